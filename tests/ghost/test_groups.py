"""Clipped sums of groups' gradients, against groups summed and clipped one at a time in NumPy."""

import math

import numpy as np
import pytest

from tfp_dpvi._tf import tf
from tfp_dpvi.ghost import groups
from tfp_dpvi.ghost.contributions import Direct, Lookup, Outer
from tfp_dpvi.gradients import Clip

N, GROUPS, CLIP = 23, 5, 0.7


def factors(rng, positions, dtype="float64"):
    """One contribution of each kind, and its records' gradients by NumPy."""
    left, right = rng.normal(size=[N, positions, 6]), rng.normal(size=[N, positions, 4])
    ids, values = rng.integers(0, 7, size=[N, positions]), rng.normal(size=[N, positions, 3])
    direct = rng.normal(size=[N, 2, 5])
    tables = np.zeros([N, 7, 3])
    for i in range(N):
        for t in range(positions):
            tables[i, ids[i, t]] += values[i, t]
    parts = [
        Outer((6, 4), tf.constant(left, dtype), tf.constant(right, dtype)),
        Lookup((7, 3), tf.constant(ids), tf.constant(values, dtype)),
        Direct((2, 5), tf.constant(direct, dtype)),
    ]
    return parts, [np.einsum("ntk,ntd->nkd", left, right), tables, direct]


def oracle(gradients, assignment, mask, clip):
    sums = [np.zeros(part.shape[1:]) for part in gradients]
    for group in range(GROUPS):
        rows = np.flatnonzero((assignment == group) & mask)
        own = [part[rows].sum(axis=0) for part in gradients]
        norm = math.sqrt(sum((part**2).sum() for part in own))
        if np.isfinite(norm):
            sums = [
                s + part * min(1.0, clip / max(norm, 1e-300))
                for s, part in zip(sums, own, strict=True)
            ]
    return sums


def summed(parts, assignment, mask, clip, *, static=False, size=N):
    """By a function traced for any number of records, as in training."""

    def run():
        return groups.clipped_group_sum(
            parts,
            [tf.zeros(part.shape, tf.float64) for part in parts],
            tf.constant(assignment, tf.int32),
            tf.constant(mask),
            num_groups=GROUPS,
            group_clip=Clip(clip),
            expected_batch_size=size,
            static=static,
        )

    return [part.numpy() for part in tf.function(run, autograph=False)()]


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("size", [1.0, 1e6], ids=["norms from factors", "gradients themselves"])
@pytest.mark.parametrize("positions", [1, 3])
@pytest.mark.parametrize("clip", [CLIP, math.inf])
def test_equal_to_one_group_at_a_time(positions, size, static, clip):
    rng = np.random.default_rng(5)
    parts, gradients = factors(rng, positions)
    assignment, mask = (
        rng.integers(0, GROUPS - 1, size=N),
        rng.random(N) < 0.8,
    )  # The last group has nobody.
    for found, wanted in zip(
        summed(parts, assignment, mask, clip, static=static, size=size),
        oracle(gradients, assignment, mask, clip),
        strict=True,
    ):
        np.testing.assert_allclose(found, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("odd", [math.nan, math.inf])
def test_what_is_not_finite_takes_its_own_group_with_it_and_no_other(odd, static):
    rng = np.random.default_rng(6)
    parts, gradients = factors(rng, 2)
    assignment, mask = np.arange(N) % GROUPS, np.ones(N, bool)
    mask[1] = False  # Of the second group: not finite either, but masked.
    broken = [
        np.where(np.isin(np.arange(N), [1, 3])[:, None, None], odd, part) for part in gradients
    ]
    for number, name in ((0, "left"), (1, "values"), (2, "values")):
        part = parts[number]
        value = getattr(part, name).numpy()
        value[[1, 3]] = odd
        parts[number] = type(part)(**{**part.__dict__, name: tf.constant(value)})
    for found, wanted in zip(
        summed(parts, assignment, mask, CLIP, static=static),
        oracle(broken, assignment, mask, CLIP),
        strict=True,
    ):
        np.testing.assert_allclose(found, wanted, rtol=1e-10, atol=1e-12)


def test_a_batch_of_nobody_has_a_sum_of_zero():
    rng = np.random.default_rng(7)
    parts, _ = factors(rng, 1)
    empty = [
        type(p)(
            **{k: v[:0] for k, v in p.__dict__.items() if k not in ("shape", "filled")},
            shape=p.shape,
        )
        for p in parts
    ]
    for assignment, mask, made in (
        (np.zeros(0, int), np.zeros(0, bool), empty),
        (np.arange(N) % 5, np.zeros(N, bool), parts),
    ):
        assert all((part == 0).all() for part in summed(made, assignment, mask, CLIP))


def test_gradients_that_cancel_within_a_group_stay_under_the_clip():
    """Two records of length 1e4 whose difference is of length 1: in float32 the sum of pairs alone says next to nothing."""
    rng = np.random.default_rng(8)
    for _ in range(20):
        left, right = rng.normal(size=[2, 1, 50]), rng.normal(size=[2, 1, 40])
        left[1], right[1] = left[0], -right[0]
        left *= 1e4 / np.linalg.norm(left[0]) / np.linalg.norm(right[0])
        right[1] += rng.normal(size=[1, 40]) * 1e-4
        part = Outer((50, 40), tf.constant(left, tf.float32), tf.constant(right, tf.float32))
        found = groups.clipped_group_sum(
            [part],
            [tf.zeros([50, 40])],
            tf.zeros([2], tf.int32),
            tf.ones([2], tf.bool),
            num_groups=1,
            group_clip=Clip(1.0),
            expected_batch_size=2.0,
            static=False,
        )
        assert np.linalg.norm(found[0].numpy().astype("float64")) <= 1.0 + 1e-5


def clipped_to_one(part, records):
    """The length of one group's clipped gradient with a group_clip of 1, in float64."""
    found = groups.clipped_group_sum(
        [part],
        [tf.zeros(part.shape)],
        tf.zeros([records], tf.int32),
        tf.ones([records], tf.bool),
        num_groups=1,
        group_clip=Clip(1.0),
        expected_batch_size=2.0,
        static=False,
    )
    return np.linalg.norm(found[0].numpy().astype("float64"))


@pytest.mark.parametrize(("records", "positions"), [(100, 1), (50, 50)])
def test_many_rows_of_a_table_are_not_clipped_for_rounding(records, positions):
    rng = np.random.default_rng(9)
    ids = rng.integers(0, 20_000, size=[records, positions])
    values = rng.normal(size=[records, positions, 16])
    part = Lookup((20_000, 16), tf.constant(ids), tf.constant(values, tf.float32))
    assert 0.9999 < clipped_to_one(part, records) < 1.0001


def test_a_row_out_of_range_is_nobodys():
    """GPUs read zeros there; it must not be the next group's first row."""
    part = Lookup((3, 2), tf.constant([[3], [-1]]), tf.ones([2, 1, 2]))
    grouped = part.by_groups(
        groups.members_of(tf.constant([0, 1]), tf.constant([True, True]), 2, 2.0)
    )
    np.testing.assert_array_equal(grouped.materialize().values, 0.0)
    np.testing.assert_array_equal(grouped.weighted_sum(tf.ones([2])), np.zeros([3, 2]))


def test_infinite_factors_never_have_a_small_norm():
    """Inf - Inf in the sum over pairs is NaN, and NaN must not be taken for a square below zero."""
    left = np.ones([1, 2, 1], "float32")
    for a, b in ((np.inf, 1.0), (np.inf, -np.inf), (np.nan, 1.0), (3e38, -3e38)):
        right = np.array([[[a], [b]]], "float32")
        assert not np.isfinite(
            Outer((1, 1), tf.constant(left), tf.constant(right)).squared_norms()
        ).any()


@pytest.mark.parametrize("kind", ["outer", "lookup"])
def test_how_many_records_other_groups_have_changes_no_norm(kind):
    """The largest group sets the number of places; rows of group 0 nearly cancel, to rounding."""
    rng = np.random.default_rng(0)
    left = np.tile(rng.normal(size=(2, 1, 40)), [8, 1, 1]).astype("float32")
    right = np.where(np.arange(16) % 2, -1.0, 1.0 + 1e-6)[:, None, None].astype("float32")
    right = np.tile(right, [1, 1, 2])
    left[1::2] = left[::2]
    found = []
    for others in (2, 14):
        chosen = tf.constant([0, 0] + [1] * others)
        places = slice(0, 2 + others)
        if kind == "outer":
            parts = Outer((40, 2), tf.constant(left[places]), tf.constant(right[places]))
        else:
            ids = tf.zeros([2 + others, 1], tf.int32)
            parts = Lookup((5000, 2), ids, tf.constant(right[places]))
        made = groups.members_of(chosen, tf.fill([2 + others], True), 2, 8.0)
        found.append(parts.by_groups(made).squared_norms().numpy()[0])
    assert found[0] == found[1]
    assert found[0] > 0.0
