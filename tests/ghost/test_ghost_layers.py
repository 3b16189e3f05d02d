"""Ghost norms and sums against TensorFlow's own gradients, one record at a time (contracts C3, C5, C8)."""

from __future__ import annotations

import math
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tfp_dpvi import keras
from tfp_dpvi._tf import layers_of
from tfp_dpvi.ghost import UnsupportedLayerError
from tfp_dpvi.ghost.contributions import Lookup, Outer
from tfp_dpvi.ghost.layers import LayerGradients
from tfp_dpvi.gradients import Clip

layers = keras.layers


class Scale(layers.Layer):
    """A layer without a rule."""

    def build(self, shape):
        self.factor = self.add_weight("factor", shape=[shape[-1]], initializer="random_normal")
        super().build(shape)

    def call(self, inputs):
        return inputs * tf.exp(self.factor)


class Residual(layers.Layer):
    """A layer with weights of its own and a layer inside."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = layers.Dense(4, activation="tanh")

    def build(self, shape):
        self.gate = self.add_weight("gate", shape=[], initializer="ones")
        super().build(shape)

    def call(self, inputs):
        return inputs[..., :4] + self.gate * self.dense(inputs)


def shared():
    dense = layers.Dense(5, activation="tanh", name="shared")
    x = layers.Input([5])
    return keras.Model(x, layers.Dense(2)(dense(dense(x)) + x))


def shared_embedding():
    table = layers.Embedding(7, 4)
    x = layers.Input([6], dtype="int32")
    return keras.Model(x, layers.Dense(3)(layers.Flatten()(table(x) * table(6 - x))))


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.parts = [
            layers.Dense(4, "relu"),
            Scale(),
            layers.LayerNormalization(),
            layers.Dense(2, use_bias=False),
        ]

    def call(self, x):
        for part in self.parts:
            x = part(x)
        return x


def sequential(*parts):
    return keras.Sequential(list(parts))


MODELS = {
    "dense": ([5], lambda: sequential(layers.Dense(4, "tanh"), layers.Dense(2))),
    "dense over positions": (
        [3, 5],
        lambda: sequential(layers.Dense(4, "tanh"), layers.Dense(2, use_bias=False)),
    ),
    "dense over many positions": (
        [40, 2],
        lambda: sequential(layers.Dense(3, "tanh"), layers.Dense(2)),
    ),
    "conv1d": (
        [9, 3],
        lambda: sequential(
            layers.Conv1D(4, 3, 2, "same", activation="relu"), layers.Flatten(), layers.Dense(2)
        ),
    ),
    "conv1d causal": (
        [8, 2],
        lambda: sequential(layers.Conv1D(3, 3, padding="causal", dilation_rate=2), layers.Dense(1)),
    ),
    "conv2d": (
        [8, 7, 2],
        lambda: sequential(
            layers.Conv2D(3, 3, activation="elu"), layers.Conv2D(2, (2, 3), 2, "same")
        ),
    ),
    "conv2d dilated": (
        [8, 8, 1],
        lambda: sequential(layers.Conv2D(3, 2, dilation_rate=2, padding="same", use_bias=False)),
    ),
    "conv2d to fewer channels": (
        [5, 6, 4],
        lambda: sequential(
            layers.Conv2D(2, (3, 4), padding="same"), layers.Conv2D(1, (2, 3), activation="tanh")
        ),
    ),
    "conv2d wide": (
        [2, 2, 8],
        lambda: sequential(layers.Conv2D(16, 2, padding="same", activation="tanh")),
    ),
    "conv2d transposed": (
        [3, 4, 2],
        lambda: sequential(layers.Conv2DTranspose(3, 3, 2, "same", activation="tanh")),
    ),
    "conv2d transposed valid": (
        [3, 3, 2],
        lambda: sequential(layers.Conv2DTranspose(2, 3, 2), layers.Conv2DTranspose(1, 2)),
    ),
    "embedding": (
        [6],
        lambda: sequential(
            layers.Embedding(5, 3, input_length=6), layers.Flatten(), layers.Dense(2)
        ),
    ),
    "layer normalization": (
        [4, 5],
        lambda: sequential(layers.Dense(6), layers.LayerNormalization(), layers.Dense(2)),
    ),
    "layer normalization over several axes": (
        [3, 4],
        lambda: sequential(layers.LayerNormalization(axis=[1, 2], center=False)),
    ),
    "group normalization": (
        [4, 4, 6],
        lambda: sequential(layers.Conv2D(6, 2), layers.GroupNormalization(3)),
    ),
    "shared": ([5], shared),
    "shared embedding": ([6], shared_embedding),
    "subclassed": ([5], Subclassed),
    "without a rule": (
        [5],
        lambda: sequential(Scale(), layers.Dense(3, "tanh"), layers.PReLU(), layers.Dense(1)),
    ),
    "nested": ([4], lambda: sequential(Residual(), Residual(), layers.Dense(2))),
    "nested models": (
        [5],
        lambda: sequential(shared(), sequential(layers.Dense(3), layers.Reshape([3, 1]))),
    ),
    "draws in a layer": (
        [5],
        lambda: sequential(
            layers.Dense(4), layers.GaussianNoise(1.0), layers.Dropout(0.5), layers.Dense(2)
        ),
    ),
    "masked": (
        [6],
        lambda: sequential(
            layers.Embedding(5, 3, mask_zero=True),
            layers.Dense(4, "tanh"),
            layers.GlobalAveragePooling1D(),
            layers.Dense(2),
        ),
    ),
    "frozen": ([5], lambda: sequential(layers.Dense(4, trainable=False), layers.Dense(3))),
}
INTEGERS = {"embedding", "shared embedding", "masked"}


def make(name, dtype, num, seed=0):
    shape, build = MODELS[name]
    before = keras.backend.floatx()
    keras.backend.set_floatx(dtype)
    keras.utils.set_random_seed(seed)
    try:
        model = build()
        rng = np.random.default_rng(seed)
        x = (
            rng.integers(0, 5, [num, *shape]).astype("int32")
            if name in INTEGERS
            else rng.normal(size=[num, *shape]).astype(dtype)
        )
        model(x[:1])
    finally:
        keras.backend.set_floatx(before)
    for (
        variable
    ) in model.trainable_variables:  # Biases and gammas begin at values that hide mistakes.
        variable.assign_add(0.3 * rng.normal(size=variable.shape))
    return model, tf.constant(x)


def losses_of(model, x):
    outputs = model(x, training=True)
    flat = tf.reshape(outputs, [tf.shape(x)[0], -1])
    return tf.reduce_sum(tf.sin(flat) + 0.5 * flat**2, axis=1)


def oracle(model, x):
    """Gradients from one backward pass a record, of a forward pass that is the same for all."""
    num = int(x.shape[0])
    with tf.GradientTape(persistent=True) as tape:
        losses = losses_of(model, x)
        each = tf.unstack(losses, num=num)
    gradients = []
    for loss in each:
        gradient = tape.gradient(loss, model.trainable_variables, unconnected_gradients="zero")
        gradients.append(
            [tf.convert_to_tensor(part).numpy().astype("float64") for part in gradient]
        )
    return gradients


def norm_of(gradient):
    return math.sqrt(sum(float((part**2).sum()) for part in gradient))


def clipped_by_hand(gradients, clip, keep=None):
    total = [np.zeros(part.shape) for part in gradients[0]]
    for number, gradient in enumerate(gradients):
        if keep is None or keep[number]:
            factor = min(1.0, clip / norm_of(gradient))
            total = [t + part * factor for t, part in zip(total, gradient, strict=True)]
    return total


def engine(model, mapped=False):
    return LayerGradients(layers_of(model), model.trainable_variables, mapped=mapped)


QUICK = ("dense over positions", "conv2d", "embedding", "group normalization", "nested")


MAPPED = (*QUICK, "shared", "masked")  # In float64; in float32 all kinds are mapped too.
# Of layers whose rule another one has.
SIBLINGS = (
    "conv1d causal",
    "conv2d dilated",
    "conv2d transposed valid",
    "nested models",
    "subclassed",
)
SUMS = [
    pytest.param(
        name,
        "float64",
        marks=[pytest.mark.smoke] * (name in QUICK) + [pytest.mark.slow] * (name in SIBLINGS),
    )
    for name in MODELS
]
SUMS += [pytest.param(name, "float32", marks=pytest.mark.slow) for name in MODELS]


@pytest.mark.parametrize(("name", "dtype"), SUMS)
def test_clipped_sums_equal_one_backward_pass_a_record(name, dtype):
    """With rules for layers, and with every layer mapped."""
    model, x = make(name, dtype, 6)
    engines = (False, True) if name in MAPPED or dtype == "float32" else (False,)
    rtol = 2e-5 if dtype == "float32" else 1e-10
    keep = np.array([True, True, False, True, True, True])
    if name == "draws in a layer":
        for mapped in engines:
            check_with_draws(model, x, 1.0, keep, mapped, rtol)
        return
    gradients = oracle(model, x)
    clip = float(np.median([norm_of(gradient) for gradient in gradients]))

    @tf.function(autograph=False)
    def all_of_them():
        found = []
        for mapped in engines:
            passed = engine(model, mapped).run(lambda: losses_of(model, x), 6)
            clipped, seen = passed.clipped_sum(passed.result, tf.constant(keep), Clip(clip))
            found.append((clipped.tensors, seen, passed.result))
        return found

    wanted = clipped_by_hand(gradients, clip, keep)
    for tensors, seen, losses in all_of_them():
        for got, want in zip(tensors, wanted, strict=True):
            np.testing.assert_allclose(
                got.numpy(), want, rtol=rtol, atol=rtol * max(1e-3, np.abs(want).max())
            )
        np.testing.assert_allclose(seen.losses.numpy().sum(), losses.numpy()[keep].sum(), rtol=1e-5)
        np.testing.assert_array_equal(seen.kept, keep)
        assert not seen.clipped.numpy()[~keep].any()


def check_with_draws(model, x, clip, keep, mapped, rtol):
    """Norms, sum and oracle from one and the same pass: draws happen once."""

    @tf.function(autograph=False)
    def both():
        variables = model.trainable_variables
        passed = engine(model, mapped).run(lambda: losses_of(model, x), 6, watch=variables)
        clipped, _ = passed.clipped_sum(passed.result, tf.constant(keep), Clip(clip))
        each = [
            passed.tape.gradient(passed.result, variables, output_gradients=only)
            for only in tf.unstack(tf.eye(6, dtype=x.dtype))
        ]
        return clipped.tensors, each

    tensors, gradients = both()
    wanted = [np.zeros(v.shape) for v in model.trainable_variables]
    for kept, gradient in zip(keep, gradients, strict=True):
        gradient = [part.numpy().astype("float64") for part in gradient]
        norm = math.sqrt(sum(float((part**2).sum()) for part in gradient))
        if kept:
            wanted = [
                t + part * min(1.0, clip / norm) for t, part in zip(wanted, gradient, strict=True)
            ]
    for got, want in zip(tensors, wanted, strict=True):
        np.testing.assert_allclose(
            got.numpy(), want, rtol=rtol, atol=rtol * max(1e-3, np.abs(want).max())
        )


CHECKED = ("conv2d", "embedding", "nested")


@pytest.mark.parametrize(
    "name", [n if n in CHECKED else pytest.param(n, marks=pytest.mark.slow) for n in MODELS]
)
def test_the_check_on_made_up_records_accepts_what_is_right(name):
    model, x = make(name, "float32", 3)
    checked = engine(model).checked(lambda part: losses_of(model, part), x)
    assert set(checked.rows_each) == {1}
    assert bool(checked.slow) == (name in ("subclassed", "without a rule", "nested"))


class Mixes(layers.Layer):
    def call(self, inputs):
        return inputs - 0.3 * tf.reduce_mean(inputs, axis=0, keepdims=True)


MIXERS = {
    "divides by the largest": lambda h: h / tf.reduce_max(tf.abs(h)),
    "takes the mean away": lambda h: h - tf.reduce_mean(h, axis=0),
    "normalises the batch": tf.nn.l2_normalize,
    "clips the batch": lambda h: tf.clip_by_norm(h, 10.0),
    "divides by a constant of the batch": lambda h: h / tf.stop_gradient(tf.reduce_max(tf.abs(h))),
    "adds a little of the mean": lambda h: h + 1e-3 * tf.reduce_mean(h, axis=0),
    "sorts by record": lambda h: tf.sort(h, axis=0),
}


HIDDEN = (
    "divides by a constant of the batch",
    "adds a little of the mean",
)  # Behind a layer with weights, quickly.
MIXED = [(name, True, False) for name in MIXERS] + [(name, False, False) for name in HIDDEN]
MORE_MIXED = [(name, False, False) for name in MIXERS if name not in HIDDEN]
MORE_MIXED += [(name, first, True) for name in MIXERS for first in (True, False)]


@pytest.mark.parametrize(
    ("mixer", "first", "mapped"),
    [*MIXED, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE_MIXED)],
)
def test_layers_that_mix_records_are_found(mixer, first, mapped):
    """Before the first variable, behind stop_gradient, weakly, or for large values alone: each moves all records' sums."""
    layer = layers.Lambda(MIXERS[mixer])
    inner = [layer, layers.Dense(4)] if first else [layers.Dense(4), layer]
    model = sequential(layers.Input([4]), *inner, layers.Dense(2))
    x = tf.random.stateless_uniform([3, 4], [1, 2])
    with pytest.raises(UnsupportedLayerError):
        engine(model, mapped).checked(lambda part: losses_of(model, part), x)


@pytest.mark.parametrize("is_strange", [tf.math.is_nan, tf.math.is_inf, lambda h: h > 1e2])
def test_a_record_that_only_then_reads_the_others_is_found(is_strange):
    """A missing number becomes the batch's mean: a removed record moves those of all with gaps."""

    def fill(h):
        seen = tf.where(is_strange(h), 0.0, h)
        return tf.where(is_strange(h), tf.reduce_mean(seen, axis=0), h)

    model = sequential(layers.Input([4]), layers.Lambda(fill), layers.Dense(2))
    x = tf.random.stateless_uniform([3, 4], [1, 2])
    with pytest.raises(UnsupportedLayerError, match="influence each other") as refusal:
        engine(model).checked(lambda part: losses_of(model, part), x)
    assert str(refusal.value).count("\n") == 1


def test_an_axis_of_the_batch_is_found():
    model = sequential(layers.Input([4]), layers.UnitNormalization(axis=0), layers.Dense(2))
    x = tf.random.stateless_uniform([3, 4], [1, 2])
    with pytest.raises(UnsupportedLayerError, match="influence each other"):
        engine(model).checked(lambda part: losses_of(model, part), x)


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("positions", [1, 2, 3])
def test_norms_do_not_underflow(positions, jit_compile):
    """A factor whose squares are flushed to zero has a norm all the same; else its record is not clipped."""

    @tf.function(jit_compile=jit_compile, autograph=False)
    def squared_norms(left, right):
        outer = Outer(
            (4, 400), tf.fill([1, positions, 4], left), tf.fill([1, positions, 400], right)
        )
        lookup = Lookup(
            (9, 400), tf.zeros([1, positions], tf.int32), tf.fill([1, positions, 400], right)
        )
        return outer.squared_norms()[0], lookup.squared_norms()[0]

    for left, right in [(8e18, 1e-19), (1e-19, 8e18), (1e-20, 1e-20), (1e19, 1e-30), (3e-25, 1.0)]:
        outer, lookup = (
            found.numpy() for found in squared_norms(tf.constant(left), tf.constant(right))
        )
        true = positions * np.sqrt(4 * 400) * left * right
        # Not finite is sound as well: such a record contributes zero.
        assert not np.isfinite(outer) or outer >= (true * (1 - 1e-5)) ** 2 or true < 1e-16
        true = positions * np.sqrt(400) * right
        assert lookup >= (true * (1 - 1e-5)) ** 2 or true < 1e-16


def test_an_adversarial_cancellation_stays_under_the_clip():
    """Positions that cancel to rounding: the sum of a record of huge factors must not exceed its bound."""
    rng = np.random.default_rng(0)
    worst = 0.0
    for seed in range(50):
        left = np.repeat(rng.normal(size=[1, 1, 300]), 2, axis=1).astype(
            "float32"
        ) * 10.0 ** rng.uniform(0, 8)
        right = rng.normal(size=[1, 2, 200]).astype("float32")
        right[0, 1] = -right[0, 0] * np.float32(1 + rng.uniform(-3e-6, 3e-6))
        part = Outer((300, 200), tf.constant(left), tf.constant(right))
        factor = tf.minimum(1.0, 1.0 / tf.sqrt(part.squared_norms()))
        worst = max(worst, float(tf.norm(part.weighted_sum(factor))))
        del seed
    assert worst <= 1.0 + 1e-4


@pytest.mark.parametrize("mapped", [False, True])
def test_an_unknown_category_contributes_zero(mapped):
    """C8: an id out of range stops no step and shows nothing."""
    model, x = make("embedding", "float32", 4)
    ones = tf.fill([4], True)

    @tf.function(autograph=False)
    def total(ids, mask):
        passed = engine(model, mapped).run(lambda: losses_of(model, ids), 4)
        return passed.clipped_sum(passed.result, mask, Clip(0.5))[0].tensors

    for unknown in (5, 4711, -1):
        bad = tf.constant(np.where(np.arange(4)[:, None] == 2, unknown, x.numpy()))
        for got, want in zip(
            total(bad, ones), total(x, tf.constant([True, True, False, True])), strict=True
        ):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("shape", "build"),
    [
        ([4], lambda: sequential(layers.Dense(4), Mixes(), layers.Dense(2))),
        ([4], lambda: sequential(layers.Dense(3, activity_regularizer="l2"))),
    ],
    ids=["mixes records", "add_loss"],
)
@pytest.mark.parametrize("mapped", [False, True])
def test_the_check_on_made_up_records_refuses_what_is_wrong(shape, build, mapped):
    model = build()
    x = tf.random.uniform([3, *shape])
    model(x)
    with pytest.raises(UnsupportedLayerError):
        engine(model, mapped).checked(lambda part: losses_of(model, part), x)


@pytest.mark.parametrize(
    ("name", "factor"),
    [
        ("squared_norms", 0.99),
        ("squared_norms", 1.1),
        ("weighted_sum", 1.001),
        ("weighted_sum", 0.999),
    ],
)
def test_the_check_on_made_up_records_finds_a_wrong_rule(name, factor):
    """A norm that is too small breaks the clip's bound; one too large, or a wrong sum, costs accuracy."""
    model = sequential(layers.Dense(4, "tanh"), layers.Dense(2))
    x = tf.random.uniform([3, 4])
    model(x)
    right = getattr(Outer, name)

    def wrong(self, *args, **kwargs):
        return factor * right(self, *args, **kwargs)

    with (
        mock.patch.object(Outer, name, wrong),
        pytest.raises(UnsupportedLayerError, match="per-example gradients"),
    ):
        engine(model).checked(lambda part: losses_of(model, part), x)


class MixesAtAKnownSize(layers.Layer):
    """Takes the batch's mean where the batch's size is known while tracing, as under XLA."""

    def build(self, shape):
        self.dense = layers.Dense(4)
        super().build(shape)

    def call(self, inputs):
        out = self.dense(inputs)
        return out if inputs.shape[0] is None else out - tf.reduce_mean(out, axis=0)


class Regroups(layers.Layer):
    """Shows its dense layer some records before others, for values that are never tried."""

    def build(self, shape):
        self.dense = layers.Dense(4)
        super().build(shape)

    def call(self, inputs):
        first = (inputs[:, 0] > 2.0) & (inputs[:, 0] < 3.0)
        order = tf.concat([tf.where(first)[:, 0], tf.where(~first)[:, 0]], axis=0)
        out = self.dense(tf.gather(inputs, order))
        return tf.scatter_nd(order[:, None], out, tf.cast([tf.shape(inputs)[0], 4], tf.int64))


class Counts(layers.Layer):
    def build(self, shape):
        self.calls = self.add_weight("calls", shape=[], initializer="zeros", trainable=False)
        self.dense = layers.Dense(4)
        super().build(shape)

    def call(self, inputs):
        self.calls.assign_add(1.0)
        return self.dense(inputs)


@pytest.mark.parametrize("layer", [MixesAtAKnownSize, Regroups, Counts])
def test_what_shows_only_where_sizes_are_known_is_refused_too(layer):
    """The check traces with a known and with an unknown batch size; it runs nothing eagerly, so that nothing is written."""
    model = sequential(layer())
    x = tf.random.uniform([3, 4])
    model(x)
    before = [value.copy() for value in model.get_weights()]
    with pytest.raises(ValueError, match=r"per-example gradients|None rows|writes"):
        engine(model).checked(lambda part: losses_of(model, part), x)
    for one, value in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(one, value)


def test_a_random_layer_with_weights_is_refused():
    class NoisyScale(Scale):
        def call(self, inputs):
            return super().call(inputs) * tf.random.normal(tf.shape(inputs))

    model = sequential(NoisyScale())
    x = tf.ones([3, 2])
    model(x)
    with pytest.raises(UnsupportedLayerError, match="would use different draws"):
        engine(model).checked(lambda part: losses_of(model, part), x)


def test_layers_of_a_plain_function_are_found():
    inner, outer = layers.Dense(2), layers.Dense(3)

    def function(x, second=outer):
        return second(inner(x))

    assert set(map(id, layers_of(function))) == {id(inner), id(outer)}
    assert set(map(id, layers_of(lambda x: function(x)))) == {id(inner), id(outer)}


def test_layers_are_left_as_they_were():
    model, x = make("dense", "float32", 3)
    before = [set(vars(layer)) for layer in layers_of(model)]
    saved = set(model._trackable_children())
    engine(model).run(lambda: losses_of(model, x), 3)
    assert [set(vars(layer)) for layer in layers_of(model)] == before
    with pytest.raises(RuntimeError):
        engine(model).run(lambda: (_ for _ in ()).throw(RuntimeError("in the pass")), 3)
    assert set(model._trackable_children()) == saved
    assert [set(vars(layer)) for layer in layers_of(model)] == before


@st.composite
def architectures(draw):
    """A shape of records and a stack of layers that fits it."""
    rank = draw(st.sampled_from([1, 2, 3]))
    shape = [draw(st.integers(4, 6)) for _ in range(rank)]
    kinds = {
        1: ["dense", "normal", "scale"],
        2: ["dense", "conv", "normal", "scale"],
        3: ["dense", "conv", "transposed", "group", "normal"],
    }[rank]
    return (
        shape,
        draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=4)),
        draw(st.integers(0, 2**16)),
    )


def stack(rank, kinds):
    made = []
    for kind in kinds:
        if kind == "dense":
            made.append(layers.Dense(4, "tanh"))
        elif kind == "conv":
            made.append(
                (layers.Conv1D if rank == 2 else layers.Conv2D)(
                    4, 2, padding="same", activation="elu"
                )
            )
        elif kind == "transposed":
            made.append(layers.Conv2DTranspose(4, 3, padding="same"))
        elif kind == "group":
            made.extend([layers.Dense(4), layers.GroupNormalization(2)])
        else:
            made.append({"normal": layers.LayerNormalization, "scale": Scale}[kind]())
    return made


@settings(max_examples=3, suppress_health_check=list(HealthCheck))
@given(architectures())
def test_random_architectures(case):
    shape, kinds, seed = case
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([layers.Input(shape), *stack(len(shape), kinds)])
    x = tf.constant(np.random.default_rng(seed).normal(size=[5, *shape]).astype("float32"))
    gradients = oracle(model, x)
    clip = float(np.median([norm_of(gradient) for gradient in gradients]))
    wanted = clipped_by_hand(gradients, clip)
    for mapped in (False, True):
        passed = engine(model, mapped).run(lambda: losses_of(model, x), 5)
        clipped, _ = passed.clipped_sum(passed.result, tf.fill([5], True), Clip(clip))
        for got, want in zip(clipped.tensors, wanted, strict=True):
            np.testing.assert_allclose(
                got.numpy(), want, rtol=2e-3, atol=2e-4 * max(1e-3, np.abs(want).max())
            )
