"""Poisson sampling is what it is accounted for (C4), at any N (DESIGN 5.2)."""

import time

import numpy as np
import pytest
import scipy.stats
import tensorflow as tf
from support import statistics
from support.poisson import capacity, check_poisson, draw, drawer, make_keys
from support.siblings import slow

from tfp_dpvi.privacy import PoissonSampling
from tfp_dpvi.sampling import PoissonSampler
from tfp_dpvi.sampling.poisson import partial_sums


@pytest.mark.parametrize(
    ("count", "probability", "physical", "batches", "jit_compile"),
    [
        (10, 0.3, None, 50_000, True),
        slow(10, 0.3, 1, 50_000, True),
        pytest.param(10, 0.3, 4, 3_000, False, marks=pytest.mark.smoke),
        slow(10_000, 0.01, None, 20_000, True),
        (10_000, 0.01, 7, 20_000, True),  # Some 15 visits in a batch.
        slow(10_000_000, 1e-5, None, 20_000, True),
        slow(10_000_000, 1e-5, 7, 20_000, True),
        slow(1_000, 0.99, 100, 2_000, True),
        (3, 0.5, 2, 20_000, True),
        (2**34, 1e-9, None, 20_000, True),
    ],
)
def test_inclusions_are_independent_bernoullis(count, probability, physical, batches, jit_compile):
    """C4: rates, pairs and sizes are those of Poisson sampling, for physical batches of any size. False alarms: 1e-7.

    (10 cases of at most 15 p-values, each with a false-alarm rate of 1e-9.)
    """
    sampler = PoissonSampler(count, probability, physical)
    if physical is not None:
        assert sampler.physical_batch_size == min(physical, count)
    check_poisson(sampler, probability, batches, jit_compile=jit_compile)


@pytest.mark.parametrize("physical", [None, 1, 3])
def test_every_set_of_records_has_its_exact_probability(physical):
    """C4: at N = 10 each of the 1024 possible batches occurs at its exact rate. False alarms: 3e-9."""
    count, probability, batches = 10, 0.35, 60_000
    draws = draw(PoissonSampler(count, probability, physical), probability, batches)
    pattern = np.zeros(batches, int)
    np.add.at(pattern, draws.batch, 1 << draws.index)
    ones = np.array([bin(p).count("1") for p in range(2**count)])
    expected = batches * probability**ones * (1 - probability) ** (count - ones)
    order = np.argsort(-expected, kind="stable")  # So that only rare patterns are pooled.
    statistics.fits(
        np.bincount(pattern, minlength=2**count)[order], expected[order], "sets of records"
    )


def test_every_set_of_records_of_two_shards_has_its_exact_probability():
    """C4: two workers with 5 records each and one key draw a Poisson sample of the 10. False alarms: 1e-9."""
    count, probability, batches = 10, 0.35, 60_000
    keys, pattern = make_keys(batches), np.zeros(batches, int)
    for shard in range(2):
        sampler = PoissonSampler(5, probability)
        sampler.place = (shard, 2)
        draws = draw(sampler, probability, batches, keys=keys)
        np.add.at(pattern, draws.batch, 1 << (5 * shard + draws.index))
    ones = np.array([bin(p).count("1") for p in range(2**count)])
    expected = batches * probability**ones * (1 - probability) ** (count - ones)
    order = np.argsort(-expected, kind="stable")
    counts = np.bincount(pattern, minlength=2**count)
    statistics.fits(counts[order], expected[order], "sets of records of two shards")


def test_one_record():
    """C4: N = 1 is included at rate q, and the rest of the batches are empty. False alarms: 1e-9."""
    draws = draw(PoissonSampler(1, 0.25), 0.25, 20_000)
    assert set(draws.index) == {0}
    statistics.plausible(
        scipy.stats.binomtest(len(draws.index), 20_000, 0.25).pvalue, "rate of the only record"
    )


def test_a_huge_table_is_covered_evenly():
    """C4: at N = 2^34 and q = 1e-9 indices are uniform over the whole table. False alarms: 1e-9."""
    draws = draw(PoissonSampler(2**34, 1e-9), 1e-9, 10_000)
    statistics.plausible(
        scipy.stats.kstest((draws.index + 0.5) / 2**34, "uniform").pvalue, "indices"
    )


def test_batches_depend_on_the_key_alone():
    """C10: equal keys give equal batches, other keys give others."""
    sampler = PoissonSampler(1_000, 0.03, 11)
    function = drawer(sampler, capacity(sampler, 0.03))
    keys = make_keys(50)
    first, again = function(keys)[0].numpy(), function(keys)[0].numpy()
    np.testing.assert_array_equal(first, again)
    assert len(np.unique(first, axis=0)) == 50


def _seconds(function, keys):
    begin = time.perf_counter()
    function(keys)[1].numpy()
    return time.perf_counter() - begin


def test_work_does_not_grow_with_the_table():
    """DESIGN 5.2: at a fixed q N, N = 10^7 costs at most twice what N = 10^4 does, in visits and in time.

    Visits have means within 5 % (some 20 standard errors). Time is the shortest of up to 200 turns, for other work may take
    the machine away in any of them; work that grew with the table would be a thousand times as long in each.
    """
    keys = make_keys(500)
    visits, functions = [], []
    for count in (10_000, 10_000_000):
        sampler = PoissonSampler(count, 100 / count, 10)
        function = drawer(sampler, capacity(sampler, 100 / count))
        visits.append(function(keys)[1].numpy().mean())
        functions.append(function)
    assert 0.95 < visits[1] / visits[0] < 1.05
    assert visits[0] < 13  # 100 records, 10 at a time.
    times = []
    for turn in range(200):
        times.append([_seconds(function, keys) for function in functions])
        small, large = np.min(times, axis=0)
        if turn >= 6 and large < 2 * small:
            return
    pytest.fail(f"{large:.4f} s of 10^7 records against {small:.4f} s of 10^4")


def test_the_sampler_says_what_it_does():
    """C4: the scheme that is accounted for comes from the sampler, with its own q."""
    assert PoissonSampler(1_000, 0.03, 7).scheme == PoissonSampling(0.03)


@pytest.mark.parametrize("probability", [0.0, 1.0, -0.1, 1.5, float("nan")])
def test_probabilities_out_of_range_are_refused(probability):
    """C8: no event exists for them."""
    with pytest.raises(ValueError, match="probability"):
        PoissonSampler(10, probability)


@pytest.mark.parametrize("arguments", [(0, 0.1), (2**40 + 1, 0.1), (10, 0.1, 0)])
def test_bad_counts_are_refused(arguments):
    """C8: the message names the argument."""
    with pytest.raises(ValueError, match=r"num_available|physical_batch_size"):
        PoissonSampler(*arguments)


@pytest.mark.parametrize("count", [1, 2, 3, 10, 308, 1000])
def test_partial_sums_are_exact(count):
    """Up to the largest that there can be below 2^53, and never fewer than N beyond."""
    gaps = np.random.default_rng(count).integers(1, 2**52 // count, count)
    np.testing.assert_array_equal(partial_sums(tf.constant(gaps)), np.cumsum(gaps))
    beyond = partial_sums(tf.fill([count], tf.constant(2**52, tf.int64))).numpy()
    assert np.all(np.diff(beyond) > 0)
    np.testing.assert_array_equal(beyond[1:] >= 2**53, True)
