"""Fixed-size sampling: distinct records, every set equally likely (contracts C3, C4)."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import tensorflow as tf
from support.siblings import slow

from tfp_dpvi.privacy import FixedSizeSampling
from tfp_dpvi.sampling import FixedSizeSampler
from tfp_dpvi.sampling.fixed_size import distinct_indices


def draws(num, count, repeats, seed=0):
    keys = np.random.default_rng(seed).integers(-(2**62), 2**62, size=(repeats, 2))
    one = tf.function(lambda key: distinct_indices(key, num, count))
    return tf.function(lambda all_keys: tf.map_fn(one, all_keys, fn_output_signature=tf.int64))(
        keys
    ).numpy()


@pytest.mark.smoke
@pytest.mark.parametrize(("num", "count"), [(5, 2), (9, 2), (13, 3)])
def test_every_set_is_equally_likely(num, count):
    """Chi-square over all sets; false-alarm rate 1e-8 (13 choose 3 by the path for small batches)."""
    from scipy import stats

    repeats = 10_000
    found = np.sort(draws(num, count, repeats), axis=1)
    sets = {s: i for i, s in enumerate(itertools.combinations(range(num), count))}
    counts = np.bincount([sets[tuple(row)] for row in found], minlength=len(sets))
    assert stats.chisquare(counts).pvalue > 1e-8


@pytest.mark.parametrize(
    ("num", "count"), [(100, 24), (100, 26), (10**6, 300), (2**40, 300), (1000, 249)]
)
def test_indices_are_distinct_and_in_range(num, count):
    for row in draws(num, count, 20):
        assert len(np.unique(row)) == count
        assert row.min() >= 0
        assert row.max() < num


def test_a_large_population_is_covered_evenly():
    """Mean of 60,000 uniform indices: within 6 standard errors, false-alarm rate 2e-9."""
    num = 10**9
    values = draws(num, 300, 200).astype(float).ravel() / num
    assert abs(values.mean() - 0.5) < 6 * np.sqrt(1 / 12 / len(values))
    assert abs((values < 0.1).mean() - 0.1) < 6 * np.sqrt(0.09 / len(values))


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("physical", [None, 7, slow(1), slow(20)])
def test_the_walk_visits_each_drawn_record_once(physical, jit):
    sampler = FixedSizeSampler(100, 20, physical)

    @tf.function(jit_compile=jit)
    def counts(key):
        def visit(carry, indices, mask):
            return tf.tensor_scatter_nd_add(carry, indices[:, None], tf.cast(mask, tf.int32))

        return sampler.for_each_batch(key, visit, tf.zeros([100], tf.int32))

    seen = counts(tf.constant([3, 4], tf.int64)).numpy()
    assert seen.max() == 1
    assert seen.sum() == 20
    assert sampler.scheme == FixedSizeSampling(100, 20)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [((10, 10), "batch_size"), ((10, 0), "batch_size"), ((10, 3, 0), "physical_batch_size")],
)
def test_bad_sizes(arguments, word):
    with pytest.raises(ValueError, match=word):
        FixedSizeSampler(*arguments)
