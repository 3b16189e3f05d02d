"""The mixture's clipped sums against one record at a time, and on neighbouring data sets (C1, C3, C5, C8)."""

from __future__ import annotations

import math
from unittest import mock

import numpy as np
import pytest
from support import internals
from support.internals import TableModel
from support.siblings import slow

import tfp_dpvi as dpvi
from tfp_dpvi import gradients
from tfp_dpvi._tf import tf
from tfp_dpvi.synthetic import (
    Binary,
    Categorical,
    Continuous,
    Integer,
    Table,
    clipping,
    make_likelihood,
    make_prior,
    table_clipped_sum,
)
from tfp_dpvi.synthetic.mixture import Segments

K = 4
TABLES = {
    "mixed": Table(
        {
            "a": Categorical(["x", "y", "z"], missing=True),
            "b": Continuous(0, 1, bins=4, missing=True),
            "c": Binary(),
            "d": Integer(0, 9, bins=[1, 5]),
        }
    ),
    "levels": Table({"a": Categorical(["x", "y", "z"]), "c": Binary(missing=True)}),
}


def make_codes(table, num=40, seed=0):
    generator = np.random.default_rng(seed)
    columns = [
        generator.integers(-1 if column.missing else 0, column.num_levels, num) for column in table.columns.values()
    ]
    return np.stack(columns, axis=1).astype("int32")


def make_params(table, scale, dtype="float32"):
    draw = make_prior(table, K).sample(seed=(1, 2))
    return tf.nest.map_structure(lambda part: tf.cast(scale * part, dtype), dict(draw))


def by_hand(table, params, codes, clip):
    """One record at a time, with a tape over the mixture's log_prob, in NumPy float64: contributions [n, parameters]."""
    likelihood, flat = make_likelihood(table), tf.nest.flatten(params)
    rows = []
    for record in codes:
        with tf.GradientTape() as tape:
            tape.watch(flat)
            loss = -likelihood(tf.nest.pack_sequence_as(params, flat)).log_prob(record[None])[0]
        parts = tape.gradient(loss, flat)
        rows.append(np.concatenate([np.asarray(part, np.float64).ravel() for part in parts]))
    rows = np.array(rows)
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows * np.minimum(1.0, clip / np.maximum(norms, 1e-300))


def sums(table, params, codes, mask, clip, jit_compile=False):
    def run(codes, mask):
        clipped, _ = table_clipped_sum(Segments.of(table), params, codes, mask, gradients.Clip(clip))
        return list(clipped.tensors)

    run = tf.function(run, jit_compile=True, autograph=False) if jit_compile else run
    return np.concatenate([part.numpy().astype(float).ravel() for part in run(tf.constant(codes), tf.constant(mask))])


def check_sums(name, scale, clip, jit_compile=False):
    table = TABLES[name]
    params, codes = make_params(table, scale), make_codes(table)
    mask = np.arange(len(codes)) % 5 != 0
    expected = by_hand(table, params, codes, clip)[mask]
    found = sums(table, params, codes, mask, clip, jit_compile)
    size = np.linalg.norm(expected, axis=1).sum()
    np.testing.assert_allclose(found, expected.sum(0), atol=3e-5 * max(size, 1e-6), rtol=1e-4)
    return expected


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize(
    ("clip", "scale"),
    [(1.0, 2.0), slow(0.05, 0.3), slow(0.05, 2.0), slow(1.0, 0.3), slow(math.inf, 0.3), slow(math.inf, 2.0)],
)
def test_sums_are_those_of_single_records(name, scale, clip):
    check_sums(name, scale, clip)


def test_under_xla():
    """C9."""
    check_sums("mixed", 1.0, 0.5, jit_compile=True)


def test_they_are_the_generic_engines():
    table = TABLES["mixed"]
    prior, codes = make_prior(table, K), make_codes(table, 30)
    surrogate = dpvi.surrogates.mean_field(prior, seed=0, initial_loc="prior")
    model = TableModel(table, prior, surrogate, seed=0)
    model.compile(dpvi.optimizers.DPKerasAdamOptimizer(l2_norm_clip=0.7, noise_multiplier=1.0))
    key, mask = tf.constant([3, 4], tf.int64), tf.constant(np.arange(30) > 3)
    ours = internals.step_gradients(model, key, 30)
    clipped, seen = ours.clipped_sum({"x": tf.constant(codes)}, mask, key)
    other, other_seen = gradients.clipped_sum(
        ours.record_gradient, {"x": tf.constant(codes)}, mask, gradients.Clip(0.7)
    )
    for a, b in zip(clipped.tensors, other.tensors, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-4)
    np.testing.assert_allclose(seen.losses, other_seen.losses, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(seen.clipped, other_seen.clipped)
    assert not seen.clipped.numpy()[:4].any()
    assert seen.clipped.numpy()[4:].any()
    for a, b in zip(ours.pull_back(clipped.tensors), ours.pull_back(other.tensors), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-4)
    assert (clipped.sensitivity, clipped.clip) == (other.sensitivity, other.clip)
    weighted = ours.clipped_sum({"x": tf.constant(codes), "sample_weight": tf.fill([30], 0.5)}, mask, key)[0]
    assert np.abs(weighted.tensors[0] - clipped.tensors[0]).max() > 1e-3  # The generic engine's, at half the loss.


@pytest.mark.parametrize(
    "kwargs", [{"clipping": "normalized"}, pytest.param({"clipping": "per_layer"}, marks=pytest.mark.slow)]
)
def test_other_clippings_take_the_generic_engine(kwargs):
    table = TABLES["levels"]
    prior = make_prior(table, K)
    model = TableModel(table, prior, dpvi.surrogates.mean_field(prior))
    model.compile(dpvi.optimizers.DPKerasAdamOptimizer(l2_norm_clip=0.7, noise_multiplier=1.0, **kwargs))
    assert not internals.clipped_gradient(model, 30).batchwise
    model.fit(make_codes(table), batch_size=10, epochs=1, verbose=0)


def check_neighbours(clipped_sums):
    """C3: removal moves the sum by at most C, replacement by at most 2 C, and a removal reaches it."""
    clip = 0.1
    for name, table in TABLES.items():
        for scale in (0.3, 1.0, 3.0):
            params, codes, other = make_params(table, scale), make_codes(table), make_codes(table, seed=1)
            all_of_them, largest = np.ones(len(codes), bool), 0.0
            full = clipped_sums(table, params, codes, all_of_them, clip)
            for at in range(0, len(codes), 4):
                without, swapped = all_of_them.copy(), codes.copy()
                without[at], swapped[at] = False, other[at]
                removed = clipped_sums(table, params, codes, without, clip)
                replaced = clipped_sums(table, params, swapped, all_of_them, clip)
                presence = np.linalg.norm(full - removed)
                assert presence <= clip * (1 + 1e-4), f"{name}: presence moves the sum by {presence / clip} C"
                assert np.linalg.norm(full - replaced) <= 2 * clip * (1 + 1e-4)
                largest = max(largest, presence)
            assert largest > 0.98 * clip, f"{name}: nothing was clipped"


def test_neighbours_move_sums_by_what_is_stated():
    check_neighbours(sums)


def test_wrong_norms_are_caught():
    real = clipping._squared_norms

    def too_small(*arguments):
        return 0.9 * real(*arguments)

    def without_others(segments, log_table):
        return tf.square(1.0 - tf.exp(log_table))

    for broken in (too_small, without_others):
        with mock.patch.object(clipping, "_squared_norms", broken), pytest.raises(AssertionError, match="presence"):
            check_neighbours(sums)
        with mock.patch.object(clipping, "_squared_norms", broken), pytest.raises(AssertionError):
            check_sums("mixed", 1.0, 0.05)


def test_bad_parameters_and_empty_batches_give_zeros():
    """C8, C1."""
    table = TABLES["mixed"]
    codes = make_codes(table)
    params = make_params(table, 1.0)
    nobody = np.zeros(len(codes), bool)
    np.testing.assert_array_equal(sums(table, params, codes, nobody, 1.0), 0.0)
    for value in (math.nan, math.inf):
        broken = {**params, "weights": tf.constant([value, 0.0, 0.0, 0.0])}
        np.testing.assert_array_equal(sums(table, broken, codes, ~nobody, 1.0), 0.0)


def test_huge_parameters_stay_finite_and_clipped():
    table = TABLES["mixed"]
    for scale in (30.0, 1000.0):
        params = make_params(table, scale)
        codes = make_codes(table, 1)
        found = sums(table, params, codes, np.ones(1, bool), 0.5)
        assert np.isfinite(found).all()
        assert np.linalg.norm(found) <= 0.5 * (1 + 1e-4)


@pytest.mark.slow
def test_a_fit_runs_with_poisson_batches_under_xla_and_not():
    table = Table({"a": Categorical(["x", "y", "z"]), "b": Continuous(0, 1, bins=4, missing=True)})
    values = []
    for jit_compile in (False, True):
        prior = make_prior(table, K)
        model = TableModel(table, prior, dpvi.surrogates.mean_field(prior), seed=5)
        model.compile(
            dpvi.optimizers.DPKerasAdamOptimizer(l2_norm_clip=1.0, noise_multiplier=1.0), jit_compile=jit_compile
        )
        model.fit(make_codes(table, 100), batch_size=10, epochs=1, verbose=0)
        values.append(np.concatenate([v.numpy().ravel() for v in model.trainable_variables]))
        assert model.privacy_ledger.num_releases == 10
        assert np.isfinite(values[-1]).all()
        assert np.abs(values[-1] - values[0]).max() < 0.5  # Ten steps of 0.001 from one start; the draws differ.
