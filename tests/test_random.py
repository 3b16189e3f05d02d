"""The noise is Gaussian in its tails too: a truncated normal would void small deltas (contract C10)."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from scipy import stats

from tfp_dpvi import _random

pytestmark = pytest.mark.smoke


def farthest(normal):
    """The largest value that a generator makes of uniforms next to 1."""
    return float(np.max(np.abs(normal())))


@pytest.mark.parametrize("dtype", [tf.float32, tf.float64])
def test_the_tail_reaches_beyond_eight_standard_deviations(monkeypatch, dtype):
    def nearly_one(shape, **kwargs):
        return tf.fill(shape, tf.constant(1.0 - 2.0**-52, kwargs["dtype"]))

    monkeypatch.setattr(tf.random, "stateless_uniform", nearly_one)
    # The probability of lying beyond 8.4 is 4e-17 a draw: below any delta, for any number of releases.
    assert farthest(lambda: _random.normal(tf.constant([1, 2], tf.int64), [4], dtype)) > 8.4


@pytest.mark.parametrize("jit", [False, True])
def test_tail_counts_are_a_gaussians(jit):
    """Numbers beyond 1, 2, 3, 4 and 4.5 among 2^24 draws within 6.5 standard errors: false alarms below 1e-9 a run."""
    draw = tf.function(lambda key: _random.normal(key, [2**24], tf.float32), jit_compile=jit)
    values = np.abs(draw(tf.constant(_random.new_key(), tf.int64)).numpy())
    for bound in (1.0, 2.0, 3.0, 4.0, 4.5):
        expected = 2 * stats.norm.sf(bound) * len(values)
        assert abs((values > bound).sum() - expected) < 6.5 * np.sqrt(expected)


@pytest.mark.parametrize("shape", [[], [1], [7], [3, 5], [0]])
@pytest.mark.parametrize("dtype", [tf.float32, tf.float64])
def test_shapes_and_dtypes(shape, dtype):
    made = _random.normal(tf.constant([1, 2], tf.int64), shape, dtype)
    assert made.shape == shape
    assert made.dtype == dtype
    again = _random.normal(tf.constant([1, 2], tf.int64), shape, dtype)
    np.testing.assert_array_equal(made, again)


def test_no_two_keys_of_a_run_are_the_same():
    """Those of steps and uses count in one word, those that `fold_in` makes of them in the other."""
    root = tf.constant(_random.new_key())
    keys = {
        tuple(_random.fold_in(key, index).numpy())
        for step in range(5)
        for key in _random.keys_of_step(root, tf.constant(step, tf.int64))
        for index in range(6)
    }
    assert len(keys) == 5 * 4 * 6
