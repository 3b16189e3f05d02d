"""Replay on neighbours: what one record can do to the sum is at most what is stated (C3), whatever it holds (C8)."""

import functools

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from support.cases import CASES, scatter, shared_model
from support.replay import (
    WIDTH,
    check_neighbours,
    check_raw_replay,
    model_sums,
    odd_values,
    raw_sums,
)
from support.siblings import slow

from tfp_dpvi._tf import tf
from tfp_dpvi.gradients import Clip, ClippedSum, clipped_sum
from tfp_dpvi.gradients.clip import select_finite
from tfp_dpvi.gradients.reparameterized import through_draws
from tfp_dpvi.privacy import Sensitivity


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_any_gradient(dtype, jit_compile):
    """C3, C8: gradients with huge, denormal, NaN and infinite entries and losses, at clips from 1e-6 to 1e3."""
    check_raw_replay(dtype=dtype, jit_compile=jit_compile)


_raw = functools.cache(raw_sums)
_floats = st.floats(width=32, allow_subnormal=False) | st.sampled_from(
    [3.4e38, -3.4e38, 1e30, np.nan, np.inf, -np.inf]
)
_vectors = hnp.arrays(np.float32, (3, WIDTH), elements=_floats.map(lambda v: np.float32(v)))
_losses = hnp.arrays(np.float32, (3,), elements=_floats.map(lambda v: np.float32(v)))


@hypothesis.settings(max_examples=150)
@hypothesis.given(_vectors, _vectors, _losses, _losses, st.integers(0, 2), st.floats(1e-6, 1e6))
def test_any_gradient_that_hypothesis_finds(x, other_x, loss, other_loss, at, clip):
    """C3, C8: the same, searched by hypothesis, which shrinks what it finds."""
    records, other = {"x": x, "loss": loss}, {"x": other_x, "loss": other_loss}

    def sums(records, mask, clip):
        return [
            part.numpy() for part in _raw()(records["x"], records["loss"], mask, np.float32(clip))
        ]

    check_neighbours(sums, records, other, at, float(np.float32(clip)))


MODELS = [
    ("bernoulli", "mean_field", "vectorized", np.float32, False),
    slow("unknown_scale", "mean_field", "aligned", np.float32, False),
    ("mixture", "mean_field", "vectorized", np.float64, False),
    slow("unknown_scale", "asvi", "vectorized", np.float64, False),
    ("bernoulli", "full_rank", "aligned", np.float64, True),
]


@pytest.mark.parametrize(("case", "surrogate", "engine", "dtype", "jit_compile"), MODELS)
def test_any_records_of_a_model(case, surrogate, engine, dtype, jit_compile):
    """C3, C8: random posteriors, random clips, odd records and weights; equal keys, so equal draws, on neighbours."""
    model = shared_model(case, surrogate, dtype)
    before = [v.numpy() for v in model.trainable_variables]
    rng = np.random.default_rng(5)
    function = model_sums(model, engine, jit_compile=jit_compile)

    def draw():
        records = CASES[case].records(rng, dtype)
        records["x"] = odd_values(rng, records["x"].shape, dtype)
        if records.get("y") is not None and records["y"].dtype.kind == "f":
            records["y"] = odd_values(rng, records["y"].shape, dtype)
        records["sample_weight"] = odd_values(rng, (len(records["x"]),), dtype)
        return records

    kept = 0
    for trial in range(40):
        scatter(model.trainable_variables, seed=trial)
        key = tf.constant(rng.integers(2**62, size=2))
        clip = float(dtype(10.0 ** rng.uniform(-4, 3)))
        full, removed = check_neighbours(
            lambda records, mask, clip, key=key: [
                p.numpy() for p in function(key, records, mask, dtype(clip))
            ],
            draw(),
            draw(),
            int(rng.integers(7)),
            clip,
        )
        kept += any(np.any(a != b) for a, b in zip(full, removed, strict=True))
        for variable, value in zip(model.trainable_variables, before, strict=True):
            variable.assign(value)
    assert kept >= 8, "hardly any record contributed: the search is idle"


def test_the_bound_is_reached():
    """C3: the statements are tight (A = C, D = 2C), so that a clip by less than C is noticed too."""
    function = raw_sums()
    x = np.zeros((2, WIDTH), np.float32)
    x[0, 1] = 1e18
    both = np.ones(2, bool)
    up = function(x, np.ones(2, np.float32), both, np.float32(0.7))
    down = function(-x, np.ones(2, np.float32), both, np.float32(0.7))
    np.testing.assert_allclose(up[0].numpy(), [0, 0.7], rtol=1e-6)
    np.testing.assert_allclose(down[0].numpy(), [0, -0.7], rtol=1e-6)
    # Of a norm whose square overflows nothing is known: it is left out, like Inf.
    np.testing.assert_array_equal(
        function(1e12 * x, np.ones(2, np.float32), both, np.float32(0.7))[0], [0, 0]
    )
    assert ClippedSum([], Clip(0.7)).sensitivity == Sensitivity(1.0, 2.0)


def test_the_engine_states_its_sensitivity():
    """C3: whoever clips says the clip and A, D."""
    value, _ = clipped_sum(
        lambda r, keep: (r, [r]), tf.ones([3]), tf.constant([True] * 3), Clip(0.5)
    )
    assert (value.clip.bound, value.sensitivity) == (0.5, Sensitivity(1.0, 2.0))


def test_all_records_masked_or_bad_give_zero():
    """C8: nothing kept is a sum of exact zeros, and so is the loss."""
    x = tf.constant([np.nan, 1.0, np.inf])
    mask = tf.constant([True, False, True])
    value, statistics = clipped_sum(lambda r, keep: (r, [r, r * tf.ones([2])]), x, mask, Clip(1.0))
    for part in value.tensors:
        np.testing.assert_array_equal(part, np.zeros(part.shape))
    assert statistics.losses.numpy().sum() == 0.0
    assert not statistics.kept.numpy().any()
    assert not statistics.clipped.numpy().any()


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
def test_a_bad_record_stays_alone_on_its_way_through_the_jacobian(bad, jit_compile):
    """C8: it is left out, and the others' sum is to the bit what it is without it."""
    loc, raw_scale = tf.Variable([0.5, -1.0, 2.0]), tf.Variable([0.1, 0.2, -0.3])
    x = np.random.default_rng(0).normal(size=[6, 3]).astype("float32")
    spoilt = x.copy()
    spoilt[2, 1] = bad

    @tf.function(jit_compile=jit_compile)
    def sums(records, mask):
        with tf.GradientTape(persistent=True) as tape:
            theta = loc + 10.0 * tf.exp(raw_scale) * tf.constant([0.3, -1.2, 0.0])
        through = through_draws(
            lambda record: tf.reduce_sum(record * theta),
            [theta],
            tape,
            [loc, raw_scale],
            Clip(0.5),
            aligned=False,
        )
        clipped, statistics = clipped_sum(through.record_gradient, records, mask, Clip(0.5))
        return clipped.tensors, statistics.kept

    everyone = np.ones(6, bool)
    without = everyone & (np.arange(6) != 2)
    found, kept = sums(spoilt, everyone)
    np.testing.assert_array_equal(kept, without)
    for one, other in zip(found, sums(x, without)[0], strict=True):
        np.testing.assert_array_equal(one, other)
        assert np.abs(other).max() > 0.1


def test_a_bad_entry_takes_the_whole_record_with_it():
    """C8: a record is kept or left out as a whole, over all parts of its gradient."""
    parts, keep = select_finite([tf.constant([1.0, 2.0]), tf.constant(np.nan)], tf.constant(True))
    assert not keep.numpy()
    np.testing.assert_array_equal(parts[0], [0.0, 0.0])
    assert parts[1].numpy() == 0.0


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_gradients_within_the_clip_stay(dtype):
    """C3: no scaling up, and zero stays zero."""
    for square in (0.25, 0.0):
        (factor,) = Clip(0.6).factors([tf.constant(square, dtype)])
        assert factor == 1.0
