"""The noise is Gaussian in its tails too: a truncated normal would void small deltas (contract C10)."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from scipy import stats

from tfp_dpvi import _random

pytestmark = pytest.mark.smoke


KEY = (1, 2)


def normal(key, shape, dtype=tf.float64):
    """The noise of standard deviation 1, as it is added to a sum of zeros."""
    key = tf.convert_to_tensor(key, tf.int64)
    (noisy,) = _random.add_noise(key, [tf.zeros(shape, dtype)], [1.0])
    return noisy


@pytest.mark.parametrize("dtype", [tf.float32, tf.float64])
def test_the_tail_reaches_beyond_eight_standard_deviations(monkeypatch, dtype):
    def nearly_one(shape, **kwargs):
        return tf.fill(shape, tf.constant(1.0 - 2.0**-52, kwargs["dtype"]))

    monkeypatch.setattr(tf.random, "stateless_uniform", nearly_one)
    # The probability of lying beyond 8.4 is 4e-17 a draw: below any delta, for any number of releases.
    assert np.abs(normal(KEY, [4], dtype)).max() > 8.4
    # The uniform of many draws has no bit set, and its angle is next to an axis.
    assert np.abs(_random._many_normals(tf.constant([[0], [2**61]], tf.uint64))).max() > 8.4


@pytest.mark.parametrize("jit", [False, True])
def test_tail_counts_are_a_gaussians(jit):
    """Numbers beyond 1, 2, 3, 4 and 4.5 among 2^24 draws within 6.5 standard errors: false alarms below 1e-9 a run."""
    draw = tf.function(lambda key: normal(key, [2**24], tf.float32), jit_compile=jit)
    values = np.abs(draw(tf.constant(_random.new_key(), tf.int64)).numpy())
    for bound in (1.0, 2.0, 3.0, 4.0, 4.5):
        expected = 2 * stats.norm.sf(bound) * len(values)
        assert abs((values > bound).sum() - expected) < 6.5 * np.sqrt(expected)


def test_many_draws_are_the_box_muller_map_of_their_bits():
    """Against NumPy's logarithm, sine and cosine, to 1e-13; angles of all four quarters."""
    bits = np.random.default_rng(0).integers(0, 2**64, [2, 4000], np.uint64)
    ours = _random._many_normals(tf.constant(bits)).numpy()

    radius = np.sqrt(-2.0 * np.log((np.float64(bits[0] >> 12) + 0.5) * 2.0**-52))
    quarter = ((bits[1] << 2) >> 12).astype(np.float64) * 2.0**-52 + 2.0**-53 - 0.5
    angle = quarter * np.pi / 2
    both = radius * np.stack([np.cos(angle), np.sin(angle)])
    swapped = np.where(bits[1] >> 63 == 1, both[::-1], both)
    expected = np.where((bits[1] >> 62) & 1 == 1, -swapped, swapped)
    np.testing.assert_allclose(ours, expected.ravel(), rtol=0.0, atol=1e-13)


@pytest.mark.parametrize("num", [6, 2**14])
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("dtype", [tf.float32, tf.float64])
def test_the_noisy_sum_lies_on_the_grid(dtype, jit, num):
    """A sum in between is rounded to a multiple of 2^floor(log2 sd - 12), whatever lies in its low bits."""
    deviations = [1.3, 2.0, 3e-3]
    sums = [tf.constant(np.random.default_rng(part).normal(size=num), dtype) for part in range(3)]
    add = tf.function(lambda key: _random.add_noise(key, sums, deviations), jit_compile=jit)
    # XLA's Philox is another stream.
    draw = tf.function(lambda key: normal(key, [3 * num]), jit_compile=jit)
    draws = draw(tf.constant(KEY, tf.int64)).numpy()

    for number, noisy in enumerate(add(tf.constant(KEY, tf.int64))):
        deviation, exact = deviations[number], sums[number].numpy().astype(np.float64)
        grid = 2.0 ** np.floor(np.log2(deviation) - 12)
        assert _random.noise_grid(deviation) == grid
        assert noisy.dtype == dtype
        on_grid = noisy.numpy().astype(np.float64) / grid
        near = np.abs(on_grid) < 2.0**23  # Beyond, float32 has a coarser grid of its own.
        assert near.any()
        np.testing.assert_array_equal(on_grid[near], np.round(on_grid[near]))
        expected = exact + deviation * draws[number * num : (number + 1) * num]
        # The draws themselves are known to half a grid; float32 rounds far ones.
        rounding = np.abs(expected) * (2.0**-23 if dtype == tf.float32 else 0.0)
        assert (np.abs(noisy - expected) <= 1.5 * grid + rounding).all()


def test_the_grid_of_a_power_of_two_is_exact():
    assert [_random.noise_grid(2.0**power) for power in (-30, 0, 3)] == [2**-42, 2**-12, 2**-9]


def test_without_noise_the_sum_stays_as_it_is():
    exact = tf.constant([1 / 3, 1e-30])
    (same,) = _random.add_noise(tf.constant(KEY, tf.int64), [exact], [0.0])
    np.testing.assert_array_equal(same, exact)


def test_a_multiplier_that_float32_cannot_hold_is_used_in_float64():
    (noisy,) = _random.add_noise(tf.constant(KEY, tf.int64), [tf.zeros([4], tf.float64)], [0.1])
    draws = normal(KEY, [4]).numpy()
    assert _random.noise_grid(0.1) == 2.0**-16
    np.testing.assert_allclose(noisy, np.round(draws * 0.1 * 2**16) / 2**16, atol=2.0**-16)


def angle_residual(noisy, exact):
    """The mean distance of the pairs' angles from multiples of 2^-23 turns, in such steps: 1/4 if uniform."""
    noise = np.float64(noisy) - exact
    first, second = np.split(noise, 2)
    steps = np.arctan2(second, first) / (2 * np.pi) * 2**23
    return np.mean(np.abs(steps - np.round(steps)))


@pytest.mark.parametrize("deviation", [1.0, 1.37])
def test_low_bits_do_not_show_the_exact_sum(deviation):
    """The pairs' angles lie on no rays around the true sum, nor around any other.

    Residuals are uniform on [0, 1/2] with a standard deviation of 0.144; the mean of 10,000 lies
    within 6 standard errors, a false alarm in 1e9. With an angle of 23 bits it is 0.03.
    """
    exact = np.zeros(20_000)
    (noisy,) = _random.add_noise(
        tf.constant(_random.new_key()), [tf.constant(exact, tf.float32)], [deviation]
    )
    for guess in (exact, exact + 20_000**-0.5):
        assert abs(angle_residual(noisy, guess) - 0.25) < 6 * 0.1444 / 100


@pytest.mark.parametrize("shape", [[], [1], [7], [3, 5], [0]])
@pytest.mark.parametrize("dtype", [tf.float32, tf.float64])
def test_shapes_and_dtypes(shape, dtype):
    made = normal(KEY, shape, dtype)
    assert made.shape == shape
    assert made.dtype == dtype
    np.testing.assert_array_equal(made, normal(KEY, shape, dtype))


def test_no_two_steps_share_bits_of_large_noise():
    """The raw generator counts from the key's second word, in which the keys of steps count too."""
    root = tf.constant(_random.new_key())
    keys = [_random.keys_of_step(root, tf.constant(step, tf.int64))[3] for step in range(6)]
    keys += [_random.fold_in(root, index) for index in range(1, 6)]
    words = np.concatenate([_random._bits(key, 500).numpy().ravel() for key in keys])
    assert len(np.unique(words)) == len(words)


def test_a_deviation_that_is_no_number_does_not_return_the_sum():
    (noisy,) = _random.add_noise(tf.constant(KEY, tf.int64), [tf.ones([3])], [np.nan])
    assert np.isnan(noisy).all()


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
