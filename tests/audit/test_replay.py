"""`audit.replay`: tight on clean steps of every engine, and each planted fault is found."""

import dataclasses
from unittest import mock

import numpy as np
import pytest
from support import broken, planted, vaes
from support.siblings import slow

import tfp_dpvi as dpvi
from tfp_dpvi import _random, audit, divergences
from tfp_dpvi._tf import keras, tf


def test_a_linear_models_step_attains_its_statement():
    """C3: a clipped record reaches A, opposite ones D; the text says so, the ledger and the variables do not change."""
    model, x = planted.linear(), planted.small_records()
    before = [variable.numpy() for variable in model.variables]
    neighbours = {"x": np.stack([x[0] * 1e5, -x[0] * 1e5])}
    x[0] *= 1e5
    result = audit.replay(model, x, neighbours=neighbours, at=(0,), seed=3)
    (gradient,) = result.sums
    assert result.holds
    assert result.attained == pytest.approx(1.0, abs=1e-5)
    assert gradient.replacement == pytest.approx(2.0, abs=1e-5)
    assert "holds" in str(result)
    assert "presence 1 of 1 stated" in str(result)
    assert "Nothing was tried" not in str(result)
    unmoved = dataclasses.replace(gradient, presence=0.0, replacement=0.0)
    assert "Nothing was tried" in str(dataclasses.replace(result, sums=(unmoved,)))
    assert result.worst[0] == 0
    assert model.num_releases == 0
    assert all(np.array_equal(a, b) for a, b in zip(before, model.variables, strict=True))


@pytest.mark.parametrize("jit_compile", [False, slow(True)])
def test_secure_steps_are_replayed(jit_compile):
    """C10: with words of AES in the key's place; a sample of Poisson's, so that they choose it too."""
    model, x = planted.linear(randomness="secure", jit_compile=jit_compile), planted.small_records()
    x[0] *= 1e5
    keys = []
    genuine = _random.keys_of_step

    def watched(key, *args):
        keys.append(_random.is_tape(key))
        return genuine(key, *args)

    with mock.patch.object(_random, "keys_of_step", watched):
        result = audit.replay(model, x, batch_size=20, num_steps=12, seed=3)
    assert all(keys)
    assert keys
    assert result.holds
    assert result.attained == pytest.approx(1.0, abs=1e-5)
    with planted.sums(broken.clip_after_sum):
        assert not audit.replay(model, x).holds


@pytest.mark.slow
def test_pairs_and_their_joint_releases():
    """C3: the gradient, the curvature and what was clipped away each attain their statement, together too."""
    result = audit.replay(planted.logistic(), *planted.labelled())
    assert result.holds, result
    assert [each.name for each in result.sums] == [
        "gradient", "curvature", "clipped_away", "together",
    ]  # fmt: skip
    for each in result.sums:
        assert each.presence == pytest.approx(each.stated, rel=1e-3), each.name


@pytest.mark.parametrize("leaks", [False, True])
def test_a_fault_is_found(leaks):
    """A clip after the sum, and a mean that the step keeps beside what it releases. `test_planted.py` has the others."""
    model = planted.linear()
    with planted.tracked_mean(model) if leaks else planted.sums(broken.clip_after_sum):
        result = audit.replay(model, planted.small_records())
    assert not result.holds
    assert "DOES NOT HOLD" in str(result)
    assert len(result.leaks) == leaks, result
    assert all(each.within(result.rounding) for each in result.sums) == leaks


@pytest.mark.slow
def test_privatised_metrics_are_measured_too():
    """C3: each attains its statement, and all together theirs."""
    metrics = [dpvi.metrics.PrivateELBO(-5.0, 0.0), dpvi.metrics.PrivateClippedFraction()]
    model = planted.logistic(clipping="flat", metrics=metrics)
    result = audit.replay(model, *planted.labelled())
    assert result.holds, result
    assert len(result.sums) == 4
    for each in result.sums:
        assert each.presence == pytest.approx(each.stated, rel=1e-3), each.name


def _keras_model(gradients, dropout=0.0, **how):
    network = keras.Sequential(
        [keras.layers.Dense(3, "relu"), *([keras.layers.Dropout(dropout)] if dropout else []),
         keras.layers.Dense(1)]
    )  # fmt: skip
    model = dpvi.DPKerasModel(network, gradients=gradients)
    model.compile(planted.sgd(1.0), loss="mse", **how)
    return model


def _vae(gradients="auto", regularizer=None, **how):
    model = vaes.make(gradients=gradients, batch_regularizer=regularizer)
    rate = {"l2_norm_clip": 0.5, "noise_multiplier": 1.0}
    termwise = dpvi.optimizers.TermwiseDPKerasSGDOptimizer
    model.compile(
        planted.sgd(1.0)
        if regularizer is None
        else termwise(batch_l2_norm_clip=0.5, num_partitions=3, **rate),
        **how,
    )
    return model


ENGINES = {
    "flat, aligned": lambda **how: planted.logistic(clipping="flat", **how),
    "flat, vectorized": lambda **how: planted.logistic(
        clipping="flat", gradients="vectorized", **how
    ),
    "Keras, ghost": lambda **how: _keras_model("ghost", **how),
    "Keras, vectorized": lambda **how: _keras_model("vectorized", **how),
    "VAE, ghost": _vae,
    "VAE, vectorized": lambda **how: _vae("vectorized", **how),
    "VAE, term-wise": lambda **how: _vae(regularizer=divergences.MMD(), **how),
}


@pytest.mark.parametrize("randomness", [None, "secure"])
@pytest.mark.parametrize("engine", [slow(name) for name in ENGINES])
def test_every_engine(engine, randomness):
    """C3: the statement holds, and a record comes near it."""
    model = ENGINES[engine](randomness=randomness)
    x, y = planted.labelled()
    if engine.startswith("VAE"):
        x, y = vaes.X[:12], None
    elif engine.startswith("Keras"):
        y = y[:, None].astype("float32")
    result = audit.replay(model, x, y)
    assert result.holds, result
    assert result.attained > (0.4 if engine == "VAE, term-wise" else 0.99)


@pytest.mark.slow
@pytest.mark.parametrize("gradients", ["ghost", "vectorized"])
def test_dropout_is_replayed_or_refused(gradients):
    """A step that cannot be repeated is refused in so many words."""
    x, y = planted.labelled()
    model = _keras_model(gradients, dropout=0.5)
    with pytest.raises(ValueError, match="none can be replayed"):
        audit.replay(model, x, y[:, None].astype("float32"))


def test_refusals():
    model, x = planted.linear(), planted.small_records(5)
    with pytest.raises(TypeError, match="an audit leaves out records"):
        audit.replay(model, tf.data.Dataset.from_tensor_slices(x).batch(2))
    with pytest.raises(ValueError, match="neighbours has the keys"):
        audit.replay(model, x, neighbours={"z": x})
    with pytest.raises(TypeError, match="model must be"):
        audit.replay(keras.Sequential(), x)
