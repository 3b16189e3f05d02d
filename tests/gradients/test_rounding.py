"""What devices and odd draws do to clips: products that round their factors, draws whose gradients have no static shape."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tfp_dpvi.gradients.aligned import through_draws
from tfp_dpvi.gradients.clipping import clip_factors
from tfp_dpvi.gradients.contributions import Outer

TF32 = 2.0**-11
"""The most that rounding to TensorFloat-32's ten bits changes a factor by, relatively."""


@pytest.mark.parametrize("clipping", ["flat", "per_layer", "normalized"])
def test_the_clip_leaves_room_for_factors_that_a_gpu_rounds(monkeypatch, clipping):
    """Both factors of a product are rounded up as far as they can be; the contribution stays within the clip."""
    squares = [tf.constant([1e-6, 1.0, 30.0, 1e6]), tf.constant([1e-6, 2.0, 5.0, 1e3])]

    def longest():
        factors = clip_factors(squares, 0.7, clipping)
        scaled = sum(f.numpy().astype("float64") ** 2 * s.numpy() for f, s in zip(factors, squares, strict=True))
        return np.sqrt(scaled).max() * (1 + TF32) ** 2

    assert longest() > 0.7  # Without a GPU no room is left, and none is needed.
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind=None: ["one"] if kind == "GPU" else [])
    assert 0.995 * 0.7 < longest() <= 0.7
    tf.config.experimental.enable_tensor_float_32_execution(False)
    try:
        assert longest() > 0.7
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(True)


@pytest.mark.parametrize("known", [True, False])
def test_records_are_pulled_back_with_a_jacobian_and_without(known):
    """By the variables' own gradient, for draws that a Jacobian serves and for one whose shape is not known."""
    variable = tf.Variable([0.5, -1.5, 2.0])
    weights = tf.constant([[1.0, 2.0, -3.0], [0.0, 0.5, 0.25]])

    @tf.function(autograph=False)
    def found():
        with tf.GradientTape(persistent=True) as tape:
            draw = variable**3
            if not known:
                draw = tf.boolean_mask(draw, variable > -100.0)
        parts = through_draws(lambda row: tf.reduce_sum(row * draw), [draw], tape, [variable], aligned=False)
        return [parts.record_gradient(row, tf.constant(True))[1][0] for row in tf.unstack(weights)]

    expected = weights.numpy() * 3 * variable.numpy() ** 2
    np.testing.assert_allclose(np.stack([part.numpy() for part in found()]), expected, rtol=1e-6)


def test_norms_of_pairs_allow_for_rounded_factors_and_not_for_much_more(monkeypatch):
    """Twenty positions of a 784 x 400 kernel, of gradients that point anywhere or cancel; factors rounded up or down at random."""
    rng = np.random.default_rng(3)
    left, right = (rng.normal(size=[5, 20, size]) for size in (784, 400))
    left[1:, 10:], right[1:, 10:] = left[1:, :10], -right[1:, :10] * (1 + 1e-3)

    def squares(left, right):
        return Outer((784, 400), tf.constant(left, tf.float32), tf.constant(right, tf.float32)).squared_norms().numpy()

    exact = np.square(np.einsum("ntk,ntd->nkd", left, right)).sum(axis=(1, 2))
    plain = squares(left, right)
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind=None: ["one"] if kind == "GPU" else [])
    for _ in range(5):
        rounded = (part * (1 + TF32 * rng.choice([-1.0, 1.0], size=part.shape)) for part in (left, right))
        assert (squares(*rounded) >= exact).all()
    assert (plain >= exact).all()
    assert plain[0] < 1.05 * exact[0]
    assert squares(left, right)[0] < 1.25 * exact[0]
