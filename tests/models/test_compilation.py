"""The whole step compiles, to the same figures, and once (C9)."""

import gc
import weakref

import numpy as np
import pytest
from support import internals
from support.cases import CASES, SURROGATES
from support.logs import no_fallback
from support.steps import Indicator

import tfp_dpvi as dpvi
from tfp_dpvi import _random
from tfp_dpvi._tf import tf, tfp
from tfp_dpvi.optimizers import DPKerasAdamOptimizer, DPKerasSGDOptimizer

tfd = tfp.distributions


def _bits(shape, seed):
    """Uniforms on (0, 1) that XLA and TensorFlow's own kernels agree on; their generators give different floats."""
    seed = tf.cast(seed, tf.int64)
    bits = _stateless_uniform(shape, seed, minval=None, maxval=None, dtype=tf.int64, alg="philox")
    return (tf.cast(tf.bitwise.right_shift(bits, 12), tf.float64) + 2.0**51 + 0.5) / 2.0**52


_stateless_uniform = tf.random.stateless_uniform


def _uniform(shape, seed, minval=0, maxval=None, dtype=tf.float32, **kwargs):
    if minval is None or not tf.as_dtype(dtype).is_floating:
        return _stateless_uniform(
            shape, seed, minval=minval, maxval=maxval, dtype=dtype, alg="philox"
        )
    maxval = 1 if maxval is None else maxval
    uniform = tf.cast(_bits(shape, seed), dtype)
    return tf.cast(minval, dtype) + uniform * (tf.cast(maxval, dtype) - tf.cast(minval, dtype))


def _normal(shape, seed, mean=0.0, stddev=1.0, dtype=tf.float32, **kwargs):
    return tf.cast(mean, dtype) + tf.cast(stddev, dtype) * tf.cast(
        tf.math.ndtri(_bits(shape, seed)), dtype
    )


@pytest.fixture
def same_generator(monkeypatch):
    import tensorflow.compat.v2 as compat

    for module in (tf.random, compat.random):
        monkeypatch.setattr(module, "stateless_uniform", _uniform)
        monkeypatch.setattr(module, "stateless_normal", _normal)


def _fitted(case, surrogate, dtype, jit_compile, **kwargs):
    model = CASES[case].model(surrogate, dtype, seed=2, **kwargs)
    model.compile(
        DPKerasAdamOptimizer(l2_norm_clip=0.5, noise_multiplier=0.7, learning_rate=0.05),
        jit_compile=jit_compile,
    )
    records = CASES[case].records(np.random.default_rng(4), dtype)
    with no_fallback():
        model.fit(records["x"], records.get("y"), batch_size=3, epochs=4, verbose=0)
    assert all(v.dtype == dtype for v in model.trainable_variables)
    return np.concatenate([v.numpy().ravel() for v in model.trainable_variables])


SAME = [("mean_field", "unknown_scale")]


@pytest.mark.parametrize(
    ("surrogate", "case"),
    [
        *SAME,
        *(
            pytest.param(s, c, marks=pytest.mark.slow)
            for s in SURROGATES
            for c in CASES
            if (s, c) not in SAME and (s, c) not in {("asvi", "unknown_scale"), ("asvi", "mixture")}
        ),
    ],
)
@pytest.mark.usefixtures("same_generator")
@pytest.mark.slow
def test_xla_changes_nothing(surrogate, case):
    """C9: whole fits, sampling and noise included, agree in float64 with and without XLA.

    Given one generator: those of XLA and of TensorFlow's kernels turn the same bits into other floats. (ASVI over gamma
    variables draws by rejection inside TensorFlow's kernels, out of reach of this test.)
    """
    plain, compiled = (_fitted(case, surrogate, np.float64, jit) for jit in (False, True))
    assert np.all(np.isfinite(plain))
    np.testing.assert_allclose(compiled, plain, rtol=1e-8, atol=1e-10)


@pytest.mark.slow  # `test_float32` of `test_clipped_sums.py` is quick.
@pytest.mark.usefixtures("same_generator")
@pytest.mark.parametrize("jit_compile", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_float32_follows_float64(jit_compile):
    """C9: a whole fit in float32 stays near that in float64 with the same draws."""
    single, double = (
        _fitted("bernoulli", "mean_field", dtype, jit_compile) for dtype in (np.float32, np.float64)
    )
    np.testing.assert_allclose(single, double, rtol=2e-3, atol=2e-3)


def test_the_generator_of_these_tests_is_one(same_generator):
    """C9: the premise of the comparison above."""
    key = tf.constant(_random.new_key())

    def draw():
        return tf.random.stateless_normal([50], key, dtype=tf.float64)

    np.testing.assert_allclose(
        tf.function(draw)(), tf.function(draw, jit_compile=True)(), rtol=1e-10
    )
    assert np.std(draw().numpy()) > 0.5


class Counting(Indicator):
    """Counts how often Python runs through the step."""

    traces = 0

    def record_loss(self, x):
        self.traces += 1
        return super().record_loss(x)


@pytest.mark.parametrize("jit_compile", [False, True])
def test_nothing_is_traced_twice(jit_compile):
    """C9: later epochs, fits of equal shapes and batches of any realised size run what the first step compiled."""
    x = np.random.default_rng(0).normal(size=(40, 3)).astype("float32")
    model = Counting(3)
    model.compile(
        DPKerasSGDOptimizer(l2_norm_clip=1.0, noise_multiplier=1.0),
        jit_compile=jit_compile,
        physical_batch_size=4,
    )
    model.fit(x, batch_size=8, epochs=1, verbose=0)
    first = model.traces
    assert 1 <= first <= 2, "the step is traced with the loop around it"
    model.fit(x, batch_size=8, epochs=6, verbose=0)  # Of 1 to 6 physical batches a step.
    model.fit(x + 1, batch_size=8, epochs=2, verbose=0)
    assert model.traces == first
    (loop,) = internals.traced_steps(model)
    assert loop.experimental_get_tracing_count() == 1
    model.fit(x[:30], batch_size=8, epochs=1, verbose=0)
    assert model.traces > first, "other shapes are another step: this test can fail"


def test_noise_levels_share_a_trace():
    """C9, C10: the multiplier and the key are arguments, so that neither is frozen into the compiled step."""
    x = np.zeros((40, 200), "float32")
    model = Counting(200)
    optimizer = DPKerasSGDOptimizer(learning_rate=1.0, l2_norm_clip=1.0)
    model.compile(optimizer, epsilon=1.0, delta=1e-5, planned_epochs=40)
    moved = []
    for _ in range(2):
        before = model.v.numpy()
        model.fit(x, batch_size=8, epochs=1, verbose=0)
        moved.append(model.v.numpy() - before)
    assert np.all(moved[0] != moved[1])
    (loop,) = internals.traced_steps(model)
    assert loop.experimental_get_tracing_count() == 1


def test_a_model_that_is_gone_leaves_no_graph():
    """Else a study of a thousand fits fills the memory: each had left 6 to 20 MB."""
    graphs = []

    def likelihood(params, x):
        logits = params["w"] * x
        if tf.inside_function():
            graphs.append(weakref.ref(logits.graph))
        return tfd.Bernoulli(logits=logits)

    model = dpvi.DPVI(tfd.JointDistributionNamed({"w": tfd.Normal(0.0, 1.0)}), likelihood)
    model.compile(epsilon=1.0, delta=1e-5)
    x, y = np.linspace(-1.0, 1.0, 40).astype("float32"), np.zeros(40, "int32")
    model.fit(x, y, public_inputs=x, verbose=0)
    assert any(graph() is not None for graph in graphs)
    del model
    gc.collect()
    assert not any(graph() is not None for graph in graphs)


def test_a_step_has_no_host_call():
    """C9: no Python function or string operation inside the compiled loop."""
    prior = tfd.JointDistributionNamed({"w": tfd.Sample(tfd.Normal(0.0, 1.0), sample_shape=2)})
    model = dpvi.DPVI(
        prior,
        lambda params, x: tfd.Bernoulli(logits=tf.linalg.matvec(x, params["w"])),
        clipping="flat",
    )
    model.compile(DPKerasSGDOptimizer(l2_norm_clip=1.0, noise_multiplier=1.0), jit_compile=False)
    x = np.zeros((20, 2), "float32")
    model.fit(x, np.zeros(20, "int32"), batch_size=4, epochs=1, verbose=0)
    (loop,) = internals.traced_steps(model)
    (concrete,) = loop._list_all_concrete_functions()
    graph = concrete.graph.as_graph_def()
    operations = {node.op for node in graph.node} | {
        n.op for f in graph.library.function for n in f.node_def
    }
    assert "StatelessRandomNormalV2" in operations, "the whole loop is in sight"
    assert not operations & {
        "PyFunc",
        "PyFuncStateless",
        "EagerPyFunc",
        "PrintV2",
        "StringFormat",
        "HostCompute",
    }
    captured = [
        np.asarray(c.numpy()) for c in concrete.graph.external_captures if c.dtype != tf.resource
    ]
    assert all(part.size < 2 or part.dtype.kind != "i" for part in captured), (
        "a key is frozen into the step"
    )
