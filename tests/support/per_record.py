"""Gradients of layers by one backward pass a record, and what the two engines make of the same records."""

from __future__ import annotations

import numpy as np

from tfp_dpvi._tf import keras, layers_of, tf
from tfp_dpvi.ghost.layers import LayerGradients
from tfp_dpvi.gradients import Clip


def losses_of(model, x):
    outputs = model(x)
    flat = tf.reshape(outputs, [tf.shape(outputs)[0], -1])
    return tf.reduce_sum(tf.sin(flat) + 0.5 * flat**2, axis=1)


def made(build, shape, num=5, dtype="float32", integers=0):
    """A model, its variables moved from where they begin, and records: normal numbers, or integers below `integers`."""
    before = keras.backend.floatx()
    keras.backend.set_floatx(dtype)
    rng = np.random.default_rng(0)
    try:
        keras.utils.set_random_seed(0)
        model = build()
        draws = (
            rng.integers(0, integers, [num, *shape]) if integers else rng.normal(size=[num, *shape])
        )
        x = tf.constant(draws.astype("int32" if integers else dtype))
        model(x)
    finally:
        keras.backend.set_floatx(before)
    for variable in model.trainable_variables:
        variable.assign_add(0.2 * rng.normal(size=variable.shape))
    return model, x


def one_by_one(model, x):
    """Each record's gradient, from a batch of that record alone."""

    @tf.function(autograph=False)
    def gradient(row):
        with tf.GradientTape() as tape:
            loss = losses_of(model, row)
        return tape.gradient(loss, model.trainable_variables, unconnected_gradients="zero")

    return [
        [tf.convert_to_tensor(part).numpy().astype("float64") for part in gradient(x[i : i + 1])]
        for i in range(len(x))
    ]


def norm_of(gradient):
    return np.sqrt(sum((part**2).sum() for part in gradient))


def tried(model, x, mapped=False, loss=losses_of):
    """The layers' gradients after their trial on synthetic records like these."""
    rng = np.random.default_rng(1)
    shape = [3, *x.shape[1:]]
    like = tf.constant(
        rng.integers(0, 2, shape) if x.dtype.is_integer else rng.uniform(size=shape), x.dtype
    )
    gradients = LayerGradients(layers_of(model), model.trainable_variables, mapped=mapped)
    return gradients.checked(lambda part: loss(model, part), like)


def check(model, x, mapped=False, rtol=2e-4):
    """The trial accepts the model; the clipped sum is that of gradients one by one; and no record moves it beyond the clip."""
    gradients = tried(model, x, mapped)
    each = one_by_one(model, x)
    norms = np.array([norm_of(gradient) for gradient in each])
    clip = float(np.median(norms))

    @tf.function(autograph=False)
    def clipped(records, mask):
        passed = gradients.run(lambda: losses_of(model, records))
        return passed.clipped_sum(passed.result, mask, Clip(clip))[0].tensors

    everyone = np.ones(len(x), bool)
    whole = [part.numpy() for part in clipped(x, tf.constant(everyone))]
    factors = np.minimum(1.0, clip / norms)
    for number, got in enumerate(whole):
        wanted = sum(
            factor * gradient[number] for factor, gradient in zip(factors, each, strict=True)
        )
        atol = rtol * max(np.abs(wanted).max(), 0.01 * clip)
        np.testing.assert_allclose(
            got, wanted, rtol=rtol, atol=atol, err_msg=model.trainable_variables[number].name
        )
    for left_out in range(len(x)):
        without = clipped(x, tf.constant(np.arange(len(x)) != left_out))
        moved = norm_of([a - b.numpy() for a, b in zip(whole, without, strict=True)])
        assert moved <= clip * (1 + 1e-4)
    return gradients
