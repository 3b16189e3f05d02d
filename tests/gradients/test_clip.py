"""The clip as a value, clipping schemes from outside the package, and clipped gradients of single examples (C3, C8)."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import tfp_dpvi as dpvi
from tfp_dpvi.gradients import Clip, clipped_sum, register_clipping
from tfp_dpvi.gradients.clip import CLIPPINGS

RNG = np.random.default_rng(1)
ROWS = (10.0 ** RNG.uniform(-3, 3, size=[20, 1]) * RNG.normal(size=[20, 6])).astype("float32")


def quantized(squared_norms, bound, layers):
    """A power of two no larger than C / norm: as tight as "flat" within a factor of two."""
    norm = tf.sqrt(tf.add_n(squared_norms))
    factor = 2.0 ** tf.floor(tf.math.log(bound / norm) / np.log(2.0))
    return [tf.minimum(factor, 1.0)] * len(layers)


def too_long(squared_norms, bound, layers):
    return [3.0 * bound / tf.sqrt(part) for part in squared_norms]


@pytest.fixture
def registered():
    before = dict(CLIPPINGS)
    register_clipping("quantized", quantized)
    register_clipping("too long", too_long)
    yield
    CLIPPINGS.clear()
    CLIPPINGS.update(before)


def clipped(clip, jit_compile=False):
    def run(rows):
        mask = tf.range(20) != 3
        return clipped_sum(lambda row, keep: (row[0], [row[:2], row[2:]]), rows, mask, clip)

    total, examples = tf.function(
        lambda rows: (lambda found: (found[0].tensors, found[1]))(run(rows)),
        jit_compile=jit_compile,
    )(tf.constant(ROWS))
    return [part.numpy() for part in total], examples


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("clipping", ["flat", "per_layer", "normalized", "quantized", "too long"])
def test_every_scheme_stays_within_the_bound(registered, clipping, jit_compile):
    """Also one that does not: what it returns is scaled down."""
    total, examples = clipped(Clip(0.5, clipping), jit_compile)
    each = np.concatenate([part.numpy() for part in examples.gradients], axis=1)
    norms = np.linalg.norm(each.astype("float64"), axis=1)
    assert norms.max() <= 0.5 * (1 + 1e-6)
    assert norms.max() > 0.24
    np.testing.assert_array_equal(each[3], 0.0)
    np.testing.assert_allclose(np.concatenate(total), each.sum(axis=0), atol=1e-5)


def test_clipped_gradients_are_zero_where_nothing_is_kept():
    rows = tf.constant(np.where(np.arange(4)[:, None] == 2, np.nan, 1.0), tf.float32)
    _, examples = clipped_sum(
        lambda row, keep: (row[0], [row]), rows, tf.constant([True, False, True, True]), Clip(0.1)
    )
    np.testing.assert_allclose(
        np.linalg.norm(examples.gradients[0], axis=1), [0.1, 0.0, 0.0, 0.1], rtol=1e-6
    )


def test_a_scheme_is_one_registration_for_a_fit(registered):
    class Mean(dpvi.DPModel):
        def __init__(self):
            super().__init__()
            self.w = self.add_weight("w", [6], initializer="zeros")

        def record_loss(self, x):
            return tf.reduce_sum(tf.square(self.w - x))

    model = Mean()
    optimizer = dpvi.optimizers.DPKerasSGDOptimizer(
        1.0, l2_norm_clip=0.5, noise_multiplier=0.0, clipping="quantized"
    )
    model.compile(optimizer, jit_compile=False)
    model.fit(ROWS, batch_size=20, steps_per_epoch=1, verbose=0)
    gradients = -2.0 * ROWS
    norms = np.linalg.norm(gradients, axis=1, keepdims=True)
    wanted = (gradients * np.minimum(1.0, 2.0 ** np.floor(np.log2(0.5 / norms)))).mean(axis=0)
    np.testing.assert_allclose(-model.w.numpy(), wanted, rtol=1e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0.0,), "l2_norm_clip must be a positive number, got 0.0"),
        ((float("nan"),), "l2_norm_clip must be a positive number"),
        ((True,), "l2_norm_clip must be a positive number"),
        ((1.0, "flatt"), "clipping='flatt' is unknown; pass one of 'flat'"),
        ((float("inf"), "normalized"), "needs a finite l2_norm_clip"),
    ],
)
def test_what_is_no_clip_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Clip(*arguments)


def test_an_infinite_bound_is_off():
    assert Clip(float("inf")).is_off
    assert Clip(float("inf")).unit == 1.0
    assert not Clip(2.0).is_off
    assert Clip(2.0).unit == 2.0


def test_a_name_is_taken_once(registered):
    with pytest.raises(ValueError, match="name='flat' is registered already"):
        register_clipping("flat", quantized)
