"""Shapes that depend on a record's values are refused: under XLA one record's would be those of all (C1, C9)."""

from __future__ import annotations

import re
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp
from support import internals
from support.siblings import slow

import tfp_dpvi as dpvi
from tfp_dpvi.gradients import isolation, vmap

NUM = 50


def positives(x):
    return tf.reduce_sum(tf.cast(x > 0, tf.int32))


def set_to_two(x):
    part = x[: positives(x)]
    part.set_shape([2])  # Not true of all records: hides it from TensorFlow.
    return part


DROPPING = {
    "boolean_mask": lambda x: tf.boolean_mask(x, x > 0.0),
    "where": lambda x: tf.gather_nd(x, tf.where(x > 0)),
    "unique": lambda x: tf.unique(x)[0],
    "slice": lambda x: x[: positives(x)],
    "range": lambda x: tf.gather(x, tf.range(positives(x))),
    "repeat": lambda x: tf.repeat(x, tf.cast(x > 0, tf.int32)),
    "fill": lambda x: tf.fill([positives(x)], x[0]),
    "tile": lambda x: tf.tile(x, [positives(x)]),
    "top_k": lambda x: tf.math.top_k(x, positives(x))[0],
    "pad": lambda x: tf.pad(x, [[0, positives(x)]]),
    "sequence_mask": lambda x: tf.cast(tf.sequence_mask(positives(x)), tf.float32),
    "segment_sum": lambda x: tf.math.segment_sum(x, tf.sort(tf.cast(x > 0, tf.int32))),
    "dynamic_partition": lambda x: tf.dynamic_partition(x, tf.cast(x > 0, tf.int32), 2)[1],
    "in a conditional": lambda x: tf.cond(
        x[0] > 0, lambda: tf.reduce_sum(tf.boolean_mask(x, x > 0)), lambda: tf.reduce_sum(x)
    ),
}
KEEPING = {
    "where": lambda x: tf.where(x > 0, x, 0.0),
    "sequence_mask": lambda x: tf.where(tf.sequence_mask(positives(x), 4), x, 0.0),
    "while": lambda x: tf.while_loop(
        lambda i, a: i < positives(x), lambda i, a: (i + 1, a + x[i]), (0, 0.0)
    )[1],
    "an entry": lambda x: x[tf.argmax(x)],
}


class Sum(dpvi.DPModel):
    """Loss of a record: w times the sum of what `part` leaves of it."""

    def __init__(self, part, seed=None):
        super().__init__(seed=seed)
        self.part = part
        self.w = self.add_weight("w", [1], initializer="zeros")

    def record_loss(self, x):
        return tf.reduce_sum(self.w) * tf.reduce_sum(self.part(x))


def fit(part, last, *, steps=2, jit_compile=None, seed=None, num=NUM):
    """The clipped sum of one step over 50 records, -5, 10, -5, -5, but for the last; or of those that are left."""
    model = Sum(part, seed)
    optimizer = dpvi.optimizers.DPKerasSGDOptimizer(
        l2_norm_clip=1.0, noise_multiplier=0.0, learning_rate=1.0
    )
    model.compile(optimizer, jit_compile=jit_compile)
    try:
        model.fit(
            records(last)[:num], batch_size=NUM, num_records=NUM, steps_per_epoch=steps, verbose=0
        )
    finally:
        fit.spent = model.privacy_ledger.num_releases
    return float(-model.w.numpy()[0] * NUM / steps)


def records(last):
    """50 records, -5, 10, -5, -5, but for the last."""
    found = np.full([NUM, 4], -5.0, "float32")
    found[:, 1] = 10.0
    found[-1] = last
    return found


def summing(model, jit_compile=False):
    """`(records, whether each is there) -> clipped sum` by a model's first variable: what a step traces, traced once."""
    gradient = internals.step_gradients(model, tf.constant([1, 2], tf.int64), NUM).record_gradient

    def sums(x, mask):
        return dpvi.gradients.clipped_sum(gradient, {"x": x}, mask, dpvi.gradients.Clip(1.0))[
            0
        ].tensors[0]

    traced = tf.function(sums, jit_compile=jit_compile, autograph=False)
    return lambda x, mask=EVERYBODY: traced(tf.constant(x), tf.constant(mask)).numpy()


EVERYBODY = np.ones(NUM, bool)
WITHOUT_FIRST, WITHOUT_LAST = np.arange(NUM) > 0, np.arange(NUM) < NUM - 1


@pytest.mark.parametrize("kind", sorted(DROPPING))
def test_dropping_entries_is_refused(kind):
    """As soon as the sum is traced, whatever is to compile it."""
    with pytest.raises(ValueError, match=r"shape depends on the record's values"):
        summing(Sum(DROPPING[kind]))(records(5.0))


@pytest.mark.parametrize(
    "settings", [{"jit_compile": False}, {"jit_compile": True}, {"steps": 1000}]
)
def test_a_fit_that_drops_entries_spends_nothing(settings):
    for kind in ("boolean_mask", "in a conditional"):
        with pytest.raises(ValueError, match=r"shape depends on the record's values"):
            fit(DROPPING[kind], 5.0, **settings)
        assert fit.spent == 0


@pytest.mark.parametrize(
    ("kind", "jit_compile"),
    [
        (kind, jit)
        for kind in sorted(KEEPING)
        for jit in (False, True)
        if (kind, jit) != ("while", True)
    ],
)  # XLA does not take TensorFlow's batched loop.
def test_what_keeps_its_shape_is_one_records_own(kind, jit_compile):
    """The last record moves the sum by what it adds, at most the clip."""
    sums = summing(Sum(KEEPING[kind]), jit_compile)
    without = sums(records(5.0), WITHOUT_LAST)
    for last in (-5.0, 5.0, [1e6, -1e6, 1e6, -1e6]):
        assert abs(sums(records(last)) - without) <= 1.0 + 1e-4


def test_a_fit_of_what_keeps_its_shape():
    without = fit(KEEPING["where"], 5.0, num=NUM - 1)
    assert abs(fit(KEEPING["where"], [1e6, -1e6, 1e6, -1e6]) - without) <= 1.0 + 1e-4


PUBLIC = np.arange(200) % 3 == 0
AS_TENSOR, AS_VARIABLE = tf.constant(PUBLIC), tf.Variable(PUBLIC, trainable=False)
IDS = tf.constant(np.arange(200) // 50)
CONSTANT = {
    "array": lambda x: tf.boolean_mask(tf.repeat(x, 50), PUBLIC),
    "tensor": lambda x: tf.boolean_mask(tf.repeat(x, 50), AS_TENSOR),
    "variable": lambda x: tf.boolean_mask(tf.repeat(x, 50), AS_VARIABLE),
    "unique": lambda x: tf.gather(x, tf.unique(IDS)[0]),
}


@pytest.mark.parametrize("kind", sorted(CONSTANT))
def test_public_choices_of_entries_are_fine(kind):
    """They are the same for all records."""
    sums = summing(Sum(CONSTANT[kind]))
    for last in (-5.0, 5.0):
        assert sums(records(last)) == pytest.approx(1 - NUM + np.sign(last), abs=1e-4)


@pytest.mark.slow  # A shape of the same kind is tried by XLA below.
def test_a_fit_of_public_choices():
    """Of as many steps as are worth it: XLA is tried, and left."""
    assert fit(CONSTANT["tensor"], 5.0, steps=1000) == pytest.approx(2 - NUM, abs=1e-2)


class Groups(dpvi.DPModel):
    """Loss of a record: its values weighted by the effects of its groups, or by group; half of it is values, half groups."""

    def __init__(self, kind, seed=None):
        super().__init__(seed=seed)
        self.kind = kind
        self.w = self.add_weight("w", [4], initializer="zeros")

    def record_loss(self, x):
        values, ids = x[:20], tf.cast(x[20:], tf.int32)
        if self.kind == "gather":
            return tf.reduce_sum(values * tf.gather(self.w, ids))
        return tf.reduce_sum(self.w * tf.math.unsorted_segment_sum(values, ids, 4))


def groups_of(last):
    found = np.concatenate([np.ones([NUM, 20]), np.zeros([NUM, 20])], axis=1).astype("float32")
    found[0, :20], found[0, 20:] = -1e6, last
    return found


OUTSIDE = np.arange(4, 84, 4)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("gather", {"jit_compile": True}),
        ("segments", {"jit_compile": True}),
        ("segments", {"jit_compile": False}),
    ],
)
def test_groups_that_are_none_reach_nobody(kind, settings):
    """TensorFlow's map writes an id that is too large into another record's segments: it moved the sum by 41."""
    sums = summing(Groups(kind), **settings)
    without = sums(groups_of(0), WITHOUT_FIRST)
    np.testing.assert_allclose(without, [NUM - 1, 0, 0, 0], rtol=1e-5)
    for last in (OUTSIDE, -OUTSIDE, 3, 10**6):
        assert np.linalg.norm(sums(groups_of(last)) - without) <= 1.0 + 1e-4


def test_tensorflows_own_map_mixes_segments():
    """So that ours can go when it no longer does."""
    with mock.patch.object(vmap, "map_apart", tf.vectorized_map):
        sums = summing(Groups("segments"))
        moved = sums(groups_of(OUTSIDE)) - sums(groups_of(0), WITHOUT_FIRST)
    assert np.linalg.norm(moved) > 20


def nearly_equal_eigenvalues(x):
    small = 3e-8 * x[1]
    return tf.linalg.eigh(tf.stack([tf.stack([1.0, small]), tf.stack([small, 1.0])]))[1][0, 1] - 0.5


@pytest.mark.slow
def test_decompositions_that_take_rounds_do_without_xla():
    """Under XLA a batch takes as many as its slowest matrix needs: one record moved the sum by 35."""
    with pytest.raises(ValueError, match=r"iterates until the slowest matrix"):
        fit(nearly_equal_eigenvalues, 5.0, jit_compile=True)
    assert fit.spent == 0
    sums = summing(Sum(nearly_equal_eigenvalues))
    without = sums(records(5.0), WITHOUT_LAST)
    for last in (5.0, [1e6, -1e6, 0.0, 0.0]):
        assert abs(sums(records(last)) - without) <= 1.0 + 1e-3
    without = fit(
        nearly_equal_eigenvalues, 5.0, num=NUM - 1, steps=1000
    )  # Where XLA would be chosen.
    assert (
        abs(fit(nearly_equal_eigenvalues, [1e6, -1e6, 0.0, 0.0], steps=1000) - without)
        <= 1.0 + 1e-3
    )


@tf.function
def inside_a_function(x):
    return tf.reduce_sum(x[: positives(x)])


@pytest.mark.parametrize(
    "part", [DROPPING["top_k"], inside_a_function, set_to_two, slow(nearly_equal_eigenvalues)]
)
def test_under_a_strategy_xla_takes_no_part_in_it(part):
    """What is compiled there cannot be looked at: whatever may vary is refused, and XLA is not chosen by default."""

    def likelihood(w, x):
        return tfp.distributions.Normal((w * (tf.reduce_sum(part(x[0])) + 1.0))[None], 1.0)

    for jit_compile in (True, None):
        with tf.distribute.OneDeviceStrategy("CPU:0").scope():
            model = dpvi.DPVI(tfp.distributions.Normal(0.0, 1.0), likelihood, clipping="flat")
            optimizer = dpvi.optimizers.DPKerasSGDOptimizer(l2_norm_clip=1.0, noise_multiplier=1.0)
            model.compile(optimizer, delta=1e-5, jit_compile=jit_compile)
        data = np.full([NUM, 4], 5.0, "float32"), np.zeros([NUM], "float32")
        if jit_compile:
            with pytest.raises(ValueError, match=r"shape|rounds"):
                model.fit(*data, steps_per_epoch=2, verbose=0)
            assert model.privacy_ledger.num_releases == 0
        elif part is nearly_equal_eigenvalues:
            model.fit(*data, steps_per_epoch=1000, verbose=0)
            assert not any(internals.steps_by_xla(model))


def test_without_the_check_one_record_decides_for_all():
    """What TensorFlow does, so that the checks can go when it no longer does."""
    with (
        mock.patch.object(vmap, "refuse_varying_shapes"),
        internals.without_the_look_at_xla(),
    ):
        sums = [fit(DROPPING["boolean_mask"], last, jit_compile=True) for last in (-5.0, 5.0)]
    assert abs(sums[0] - sums[1]) > 20


def test_shapes_that_xla_alone_finds_varying():
    """A shape that was set by hand: XLA is not used where it may choose, and nothing is spent where it may not."""
    with pytest.raises(
        ValueError, match=r"Compiled by XLA, the step has a tensor whose shape depends on values"
    ):
        fit(set_to_two, 5.0, jit_compile=True)
    assert fit.spent == 0
    with (
        mock.patch.object(vmap, "refuse_varying_shapes"),
        pytest.raises(ValueError, match=r"compile\(jit_compile=False\)"),
    ):
        fit(DROPPING["unique"], 5.0, jit_compile=True)
    assert fit.spent == 0


def test_a_likelihood_that_drops_missing_entries_is_refused():
    def likelihood(w, x):
        seen = tf.boolean_mask(x[0], x[0] > -9.0)
        return tfp.distributions.Normal((w * tf.reduce_sum(seen))[None], 1.0)

    model = dpvi.DPVI(tfp.distributions.Normal(0.0, 1.0), likelihood, clipping="flat")
    model.compile(
        dpvi.optimizers.DPKerasSGDOptimizer(l2_norm_clip=1.0, noise_multiplier=1.0), delta=1e-5
    )
    with pytest.raises(ValueError, match=r"shape"):
        model.fit(np.zeros([NUM, 4], "float32"), np.zeros([NUM], "float32"), verbose=0)
    assert model.privacy_ledger.num_releases == 0


def test_dynamic_shapes_are_told_from_comparisons():
    compiled = tf.function(lambda x: tf.reduce_sum(tf.cast(x <= 1.0, tf.float32)), jit_compile=True)
    isolation.refuse_dynamic_shapes(compiled, (tf.zeros([3]),))
    compiled = tf.function(lambda x: tf.reduce_sum(tf.boolean_mask(x, x <= 1.0)), jit_compile=True)
    with pytest.raises(isolation.VaryingShapeError, match=re.escape("<=")):
        isolation.refuse_dynamic_shapes(compiled, (tf.zeros([3]),))
