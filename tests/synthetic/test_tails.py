"""The ends of columns of numbers, and what noise leaves of a table, known without data."""

from __future__ import annotations

import dataclasses
import random
import re

import numpy as np
import pytest
import scipy.stats

import tfp_dpvi as dpvi
from tfp_dpvi import serialization
from tfp_dpvi.privacy import FullBatch, PrivacyPlan
from tfp_dpvi.synthetic import (
    Binary,
    Continuous,
    Date,
    Estimates,
    Integer,
    NoisyPairs,
    Pairs,
    Schema,
    Segments,
    Synthesizer,
    TablePlan,
    group,
    histograms,
)
from tfp_dpvi.synthetic.grouping import with_ends
from tfp_dpvi.synthetic.planning import check_dates
from tfp_dpvi.synthetic.tails import (
    Tail,
    ends_of,
    falling_rate,
    fit,
    inverse_survival,
    survival,
)

# Of two columns at N 20,000 and epsilon 1: of the histograms, and of the counts of pairs.
COARSE, FINE = 33.4, 6.8


def released(column, numbers, generator, fine=FINE, coarse=COARSE):
    """The column as a fit chooses it, and its noisy counts."""
    levels = column.fine.encode("x", numbers)
    tree = [part + coarse * generator.normal(size=len(part)) for part in histograms(column, levels)]
    chosen = group(column, tree, coarse)
    counts = np.bincount(chosen.from_finest(levels), minlength=chosen.num_levels)
    counts = counts + fine * generator.normal(size=len(counts))
    return with_ends(chosen, counts, coarse, fine, generator), counts


def drawn(column, counts, generator, num=100_000, tables=20):
    shares = np.maximum(counts, 0.0) / np.maximum(counts, 0.0).sum()
    codes = [generator.choice(len(shares), num // tables, p=shares) for _ in range(tables)]
    return np.concatenate([column.values(part, generator) for part in codes]).astype(float)


def test_the_distribution_is_scipys():
    excess = np.linspace(0.0, 3.0, 7)
    for shape in (-0.3, 0.0, 0.4):
        expected = scipy.stats.genpareto.sf(excess, shape, scale=2.0)
        np.testing.assert_allclose(survival(excess, shape, 2.0), expected, rtol=1e-5)
        np.testing.assert_allclose(
            inverse_survival(survival(excess, shape, 2.0), shape, 2.0), excess, atol=1e-5
        )


@pytest.mark.parametrize("is_upper", [True, False])
def test_draws_stay_within_their_levels(is_upper):
    tail = Tail(is_upper, 5.0, ((0.5, 1.0), (-1.0, 2.0)))
    low, high = (np.array([5.0, 6.0]), np.array([6.0, 90.0]))
    if not is_upper:
        low, high = 10.0 - high, 10.0 - low
    for draw in (0, 1):
        for uniform in (0.0, 0.5, 1.0):
            found = tail.values(low, high, np.full(2, uniform), draw)
            assert np.all((low <= found) & (found <= high))


def test_numbers_may_be_cut_to_a_bound_but_not_to_a_spike_there():
    edges = np.array([0.0, 1.0, 2.0, 4.0, 8.0])
    counts = np.array([800.0, 300.0, 150.0, 90.0])
    for may_be_cut in (True, False):
        generator = np.random.default_rng(0)
        _, piled = fit(edges, counts, counts + 9.0, generator, may_be_cut=may_be_cut)
        assert bool(piled) == may_be_cut


def test_numbers_that_were_cut_lie_at_the_bound():
    """As many as an exponential distribution has beyond it: exp(-2) of exp(-1) and of exp(-3)."""
    uniform = (np.arange(1000) + 0.5) / 1000.0
    for is_upper, low, high in ((True, 3.0, 5.0), (False, -5.0, -3.0)):
        bound, threshold = (5.0, 2.0) if is_upper else (-5.0, -2.0)
        tail = Tail(is_upper, threshold, ((0.0, 1.0), (0.0, 1.0)), bound=bound, piled=(1,))
        ends = (np.full(1000, low), np.full(1000, high))
        none, cut = (tail.values(*ends, uniform, draw) for draw in (0, 1))
        assert np.mean(none == bound) == 0.0
        assert np.mean(cut == bound) == pytest.approx(np.exp(-2.0), abs=2e-3)
        inner = np.full(1000, 2.5 if is_upper else -3.0)
        assert not np.any(tail.values(inner, inner + 0.5, uniform, 1) == bound)


@pytest.mark.parametrize("sigma", [1.0, 1.5, 2.0])
def test_moments_and_quantiles_of_heavy_tails(sigma):
    """Medians of 20 data sets.

    Uniform draws in the widest level give means that are 23 % too large at sigma 1. At sigma 2,
    60 numbers lie at the bound: as if none did, standard deviations are 10 % too small.
    """
    generator = np.random.default_rng(random.getrandbits(32))
    errors, few = [], 0
    for _ in range(20):
        numbers = np.minimum(np.exp(generator.normal(6.0, sigma, 20_000)), 1e5)
        column, counts = released(Continuous(0.0, 1e5), numbers, generator)
        made = drawn(column, counts, generator)
        few += column.few
        statistics = (np.mean, np.std, np.median, lambda part: np.quantile(part, 0.99))
        errors.append([of(made) / of(numbers) - 1.0 for of in statistics])
    mean, sd, median, high = np.median(np.abs(errors), axis=0)
    assert mean < (0.02 if sigma == 1.0 else 0.04)
    assert sd < {1.0: 0.1, 1.5: 0.12, 2.0: 0.09}[sigma]
    assert median < 0.02
    assert high < (0.04 if sigma == 1.0 else 0.1)
    assert sigma == 1.0 or few > 15


@pytest.mark.parametrize("is_upper", [True, False])
def test_few_numbers_far_from_many_zeros_stay_where_they_are(is_upper):
    """No level of theirs is clear of the noise. As if they fell from the zeros, .3 to .5 were moved."""
    generator = np.random.default_rng(random.getrandbits(32))
    edges, moved = np.array([1, 1500, 1800, 2000, 2500, 5000]), []
    for _ in range(10):
        # Such as losses of capital, which law and habit make equal.
        few = generator.choice([1590, 1672, 1740, 1887, 1902, 1977, 2258, 2415], 30_000)
        numbers = np.where(generator.random(30_000) < 0.95, 0.0, few)
        numbers = numbers if is_upper else 4999.0 - numbers
        column, counts = released(Integer(0, 4999), numbers, generator, fine=44.0)
        made = drawn(column, counts, generator)
        parts = [
            np.histogram(some if is_upper else 4999.0 - some, edges)[0] for some in (numbers, made)
        ]
        real, synthetic = (part / part.sum() for part in parts)
        moved.append(np.abs(real - synthetic).sum() / 2.0)
    assert np.median(moved) < 0.2


def test_levels_that_are_noise_stay_joined_beside_those_that_fall():
    """As if the sum of the levels had no noise of its own, 1 in 25 to 1 in 10 was not: means were 280 times too large."""
    generator = np.random.default_rng(random.getrandbits(32))
    low = np.array([0.0, 10.0, 20.0, 40.0, 80.0, 160.0, 500.0, 4e3, 3e4, 2e5, 6e5])
    true = np.array([7000.0, 7500.0, 8000.0, 4000.0, 450.0, 30.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    kept, single = 0, np.zeros(len(low), bool)
    for _ in range(1000):
        counts = true + 60.0 * generator.normal(size=len(true))
        upper = ends_of(counts, 60.0, low, np.append(low[1:], 1e6), single, ())[-1]
        kept += upper.is_upper and upper.begin <= 6
    # One in a thousand each: more than 12 have a probability of 1e-9.
    assert kept >= 988


def test_neighbours_whose_counts_are_noise_are_no_heap():
    """Within wide bounds they are one cell, whose noise adds up. As heaps they multiplied means by three."""
    generator = np.random.default_rng(3)
    for _ in range(30):
        numbers = np.exp(generator.normal(6.0, 1.0, 8000))
        column, counts = released(Continuous(0.0, 1e5), numbers, generator)
        finest = column.of.fine.edges
        for end in column.ends:
            places = np.searchsorted(finest, column.column.edges)
            assert np.all(np.diff(places)[list(end.heaps)] == 1)
        assert drawn(column, counts, generator, 20_000).mean() < 1.3 * numbers.mean()


def test_a_log_scale_tells_numbers_apart_that_a_linear_one_does_not():
    """Bounds of a trillion: every finest bin of a linear scale is wider than all numbers."""
    generator = np.random.default_rng(random.getrandbits(32))
    errors = []
    for _ in range(5):
        numbers = np.exp(generator.normal(6.0, 1.0, 20_000))
        column, counts = released(Continuous(0.0, 1e12, scale="log"), numbers, generator)
        made = drawn(column, counts, generator)
        errors.append([np.quantile(made, q) / np.quantile(numbers, q) - 1.0 for q in (0.5, 0.95)])
    median, high = np.median(np.abs(errors), axis=0)
    assert median < 0.03
    assert high < 0.06


@pytest.mark.parametrize(
    "column",
    [
        Continuous(0.0, 1e5, scale="log"),
        Continuous(0.01, 1e5, scale="log", bins=7),
        Integer(0, 10**6, scale="log"),
        Integer(1, 20, scale="log"),
    ],
)
def test_bins_of_a_log_scale(column):
    edges = column.edges
    assert edges[0] == column.lower
    assert edges[-1] == column.next_after(column.upper)
    assert np.all(np.diff(edges) > 0)
    ratios = edges[2:] / edges[1:-1]
    assert column.step or ratios[-3:].std() < 0.05 * ratios[-3:].mean()
    fine = column.finest
    codes = np.arange(fine.num_levels, dtype=np.int32)
    values = fine.values(codes, np.random.default_rng(0))
    np.testing.assert_array_equal(fine.encode("x", values), codes)
    with pytest.raises(ValueError, match="scale='log' needs lower=-1"):
        Continuous(-1, 1, scale="log")
    with pytest.raises(ValueError, match="scale="):
        Continuous(0, 1, scale="lg")


def test_a_level_as_dense_as_its_neighbour_does_not_fall():
    """A quotient and its product, 7 / 0.3 * 0.3, may be above 7: a fit failed after it had spent."""
    assert falling_rate(7.0, np.nextafter(7.0, 8.0)) == 0.0
    assert falling_rate(7.0, 7.7) == pytest.approx(0.195, abs=0.01)


def test_light_ends_on_both_sides_heaps_and_top_codes():
    generator = np.random.default_rng(random.getrandbits(32))
    numbers = np.clip(generator.normal(0.0, 1.0, 20_000), -20.0, 20.0)
    column, counts = released(Continuous(-20.0, 20.0), numbers, generator)
    made = drawn(column, counts, generator)
    assert made.std() == pytest.approx(1.0, abs=0.1)
    assert not column.few
    heap = np.where(
        generator.random(20_000) < 0.02, 5000, generator.exponential(800.0, 20_000) // 1
    )
    heap = np.where(generator.random(20_000) < 0.02, 9999, np.minimum(heap, 9998))
    column, counts = released(Integer(0, 9999), heap, generator)
    made = drawn(column, counts, generator)
    assert np.mean(made == 9999) == pytest.approx(np.mean(heap == 9999), abs=0.006)
    assert np.mean((made > 4950) & (made < 5050)) > 0.01


@pytest.mark.parametrize("column", [Integer(0, 10**6), Date("1990-01-01", "2020-01-01", unit="s")])
def test_ends_of_whole_numbers_keep_to_their_levels(column):
    generator = np.random.default_rng(random.getrandbits(32))
    steps = np.minimum(np.exp(generator.normal(6.0, 1.5, 20_000)), 1e6).astype(np.int64)
    numbers = steps + int(column.lower)
    dates = isinstance(column, Date)
    chosen, _ = released(column, numbers.astype("M8[s]") if dates else numbers, generator)
    assert dates or chosen.ends
    codes = np.repeat(np.arange(chosen.num_levels, dtype=np.int32), 200)
    found = chosen.encode("x", chosen.values(codes, generator))
    # Those that are joined are as one.
    edges = np.stack(chosen.limits)
    joined = [end.joined for end in (*chosen.ends, *chosen.falling) if end.joined]
    for low, high in joined:
        inside = (edges[0] >= low) & (edges[1] <= high)
        assert np.all(inside[found[inside[codes]]])
        codes = np.where(inside[codes], found, codes)
    np.testing.assert_array_equal(found, codes)


def two_groups(generator, num):
    first = generator.random(num) < 0.5
    return np.where(first, generator.normal(10.0, 1.0, num), generator.normal(1000.0, 10.0, num))


GENEROUS = {
    "counts": (Integer(0, 1000), lambda generator, num: generator.poisson(3.0, num)),
    "lognormal": (
        Continuous(0.0, 1e6),
        lambda generator, num: np.exp(generator.normal(3.0, 1.0, num)),
    ),
    "zeros": (
        Continuous(0.0, 1e5),
        lambda generator, num: np.where(
            generator.random(num) < 0.9, 0.0, generator.exponential(200.0, num)
        ),
    ),
    "negative": (Continuous(-1e5, 0.0), lambda generator, num: -generator.exponential(10.0, num)),
    "two groups": (Continuous(0.0, 1e5), two_groups),
    "top code": (
        Continuous(0.0, 1e4),
        lambda generator, num: np.where(
            generator.random(num) < 0.1, 1e4, generator.normal(50.0, 9.0, num)
        ),
    ),
}


@pytest.mark.parametrize("name", GENEROUS)
def test_nothing_is_sampled_where_counts_are_noise(name):
    """Medians of 15 data sets. A mixture gives each level some records, also an empty one."""
    column, numbers = GENEROUS[name]
    generator = np.random.default_rng(random.getrandbits(32))
    errors = []
    for _ in range(15):
        values = numbers(generator, 3000)
        chosen, counts = released(column, values, generator)
        masses = np.maximum(counts, 0.0) + 0.5 * FINE
        made = drawn(chosen, masses, generator)
        errors.append([made.mean() / values.mean() - 1.0, made.std() / values.std() - 1.0])
    mean, sd = np.median(errors, axis=0)
    assert abs(mean) < 0.4
    assert abs(sd) < 0.5


def hidden(generator, num):
    """Amounts of which one in a hundred is far out, where counts of records are no more than noise."""
    return np.where(np.arange(num) < num // 100, 2e5, np.exp(generator.normal(3.0, 1.0, num)))


def zeros(generator, num):
    """Zeros and small amounts: all but a few in the first of eight even levels up to 80."""
    amounts = np.minimum(generator.exponential(4.0, num), 80.0)
    return np.where(generator.random(num) < 0.8, 0.0, amounts)


@pytest.mark.parametrize(
    ("column", "draw", "truth"),
    [
        (Continuous(0.0, 1e6), GENEROUS["lognormal"][1], np.exp(3.5)),
        (Continuous(0.0, 1e6), hidden, 2e3 + 0.99 * np.exp(3.5)),
        (Continuous(0.0, 80.0, bins=list(np.linspace(0.0, 80.0, 9)[1:-1])), zeros, 0.8),
    ],
    ids=["nothing", "records", "zeros"],
)
def test_an_estimate_covers_what_noise_and_wide_levels_may_hide(column, draw, truth):
    """20 data sets at 95 %: 15 or more inside, but for 3e-4 (binomial).

    A falling density alone covered 1 of 20 where records were hidden, and half of a level's
    standard deviation 6 where most records are at its edge.
    """
    generator = np.random.default_rng(1)
    inside = []
    for _ in range(20):
        numbers = draw(generator, 3000)
        chosen = column if draw is zeros else released(column, numbers, generator)[0]
        schema = Schema({"x": chosen, "other": Binary()})
        pairs = Pairs(Segments.of(schema))
        codes = [chosen.encode("x", numbers), generator.integers(2, size=3000)]
        counts = pairs.counts(np.stack(codes, axis=1))
        counts = counts + 3.0 * FINE * generator.normal(size=counts.shape)
        estimate = Estimates(schema, NoisyPairs.of(pairs, counts, 3.0 * FINE, 3000)).mean("x")
        low, high = np.ravel(estimate.interval(0.95))
        inside.append(low <= truth <= high)
    assert sum(inside) >= 15


def waits(generator, num):
    return np.minimum(generator.exponential(15.0, num), 1000.0)


def ends(generator, num):
    """Nothing is between 10 and 90."""
    return generator.uniform(0.0, 10.0, num) + 90.0 * (generator.random(num) < 0.5)


def heavy(sigma):
    return lambda generator, num: np.minimum(np.exp(generator.normal(6.0, sigma, num)), 1e5)


@pytest.mark.parametrize(
    ("column", "draw", "num"),
    [
        (Continuous(0.0, 1e5), heavy(1.5), 20_000),
        (Continuous(0.0, 1e5), heavy(2.0), 20_000),
        (Integer(0, 1000), GENEROUS["counts"][1], 20_000),
        (Continuous(-20.0, 20.0), lambda generator, num: generator.normal(size=num), 3000),
        (Continuous(0.0, 1000.0, bins=[5.0, 10.0, 20.0, 40.0]), waits, 3000),
        (Continuous(0.0, 100.0, bins=list(np.arange(0.5, 100.0, 0.5))), ends, 3000),
    ],
    ids=["sigma 1.5", "sigma 2", "whole", "noise", "wide levels", "empty levels"],
)
def test_quantiles_are_within_their_intervals(column, draw, num):
    """15 data sets at 95 %: 11 or more inside, but for 6e-4 each (binomial).

    It finds a forgotten noise by the fourth, forgotten places within levels by the fifth, and counts
    below 0 that are cut by the last one.
    """
    shares = [0.25, 0.5, 0.9, 0.99] if num > 3000 else [0.25, 0.5, 0.9]
    generator = np.random.default_rng(3)
    truth = np.quantile(draw(generator, 1_000_000), shares, method="inverted_cdf")
    inside = np.zeros(len(shares))
    for _ in range(15):
        numbers = draw(generator, num)
        chosen = (
            column if isinstance(column.bins, tuple) else released(column, numbers, generator)[0]
        )
        schema = Schema({"x": chosen, "other": Binary()})
        pairs = Pairs(Segments.of(schema))
        codes = np.stack([chosen.encode("x", numbers), generator.integers(2, size=num)], axis=1)
        counts = pairs.counts(codes)
        counts = counts + 3.0 * FINE * generator.normal(size=counts.shape)
        estimates = Estimates(schema, NoisyPairs.of(pairs, counts, 3.0 * FINE, num))
        low, high = estimates.quantile("x", shares).interval()
        inside += (low <= truth) & (truth <= high)
    assert np.all(inside >= 11), inside


def test_quantiles_without_noise_are_those_of_as_many_records():
    """In other units too: a hundred levels of a column whose quantiles are known."""
    numbers = np.random.default_rng(0).random(20_000)
    for unit in (1e-6, 1.0, 1e6):
        column = Continuous(0.0, unit, bins=list(np.linspace(0.0, unit, 101)[1:-1]))
        schema = Schema({"x": column, "other": Binary()})
        pairs = Pairs(Segments.of(schema))
        codes = np.stack([column.encode("x", unit * numbers), np.zeros(20_000, int)], axis=1)
        counts = pairs.counts(codes)
        estimates = Estimates(schema, NoisyPairs.of(pairs, counts, 1e-6, 20_000))
        found = estimates.quantile("x", [0.1, 0.5])
        exact = np.quantile(unit * numbers, [0.1, 0.5])
        np.testing.assert_allclose(found.estimate, exact, atol=1e-3 * unit)
        np.testing.assert_allclose(found.sampling, unit * np.sqrt([0.09, 0.25]) / 141.0, rtol=0.2)
        assert np.all(found.noise < 1e-6 * unit)
        assert np.all(found.model < 1e-3 * unit)


def test_what_no_quantile_can_be_says_so():
    bins = [0.2, 0.4, 0.6, 0.8]
    schema = Schema({"x": Continuous(0.0, 1.0, bins=bins), "two": Continuous(0.0, 1.0, bins=[0.5])})
    schema = Schema({**schema.columns, "yes": Binary()})
    pairs = Pairs(Segments.of(schema))
    codes = np.random.default_rng(0).integers([5, 2, 2], size=(400, 3))
    estimates = Estimates(schema, NoisyPairs.of(pairs, pairs.counts(codes), 2.0, 400))
    with pytest.raises(ValueError, match=r"sampling hide the quantile 0\.999 of 'x'"):
        estimates.quantile("x", 0.999)
    with pytest.raises(ValueError, match="'two' has too few levels"):
        estimates.quantile("two")
    with pytest.raises(ValueError, match=r"'yes' has 0 and 1 alone: use estimate\.mean"):
        estimates.quantile("yes")
    for wrong in (0.0, 1.0, 1, "half", None, [], [0.5, 2.0], float("nan"), True):
        with pytest.raises((TypeError, ValueError), match=r"^q\b"):
            estimates.quantile("x", wrong)
    for right in (0.5, np.float32(0.5), (0.5,), np.array(0.5)):
        np.testing.assert_allclose(estimates.quantile("x", right).estimate, 0.5, atol=0.1)


def test_ends_are_saved_and_old_files_have_none():
    generator = np.random.default_rng(0)
    numbers = np.minimum(np.exp(generator.normal(6.0, 1.0, 20_000)), 1e5)
    column, _ = released(Continuous(0.0, 1e5), numbers, generator)
    assert column.ends
    saved = serialization.encode(column, "column")
    assert serialization.decode(saved) == column
    for tail in saved["fields"]["ends"]["tuple"]:
        del tail["fields"]["bound"], tail["fields"]["piled"]
    old = serialization.decode(saved)
    assert [end.draws for end in old.ends] == [end.draws for end in column.ends]
    assert not old.ends[0].piled
    for name in ("ends", "falling", "few"):
        del saved["fields"][name]
    assert serialization.decode(saved).ends == ()


def test_the_report_says_whose_sd_is_that_of_a_few_records():
    generator = np.random.default_rng(0)
    data = {"cost": np.minimum(np.exp(generator.normal(6.0, 1.6, 20_000)), 1e6)}
    synthesizer = Synthesizer(Schema({"cost": Continuous(0.0, 1e6)}), 2)
    synthesizer.fit(data, noise_multiplier=1.0, delta=1e-5, steps=3)
    assert "standard deviation of 'cost' is that of a few records" in str(
        synthesizer.privacy_report()
    )


# ---------------------------------------------------------------------- know before you spend


NINE = Schema({f"c{number}": Continuous(0.0, 1.0) for number in range(9)})


def test_a_plan_says_what_drowns_and_what_works():
    plan = Synthesizer.plan(NINE, 228, 1.0)
    assert plan.drowned == NINE.names
    assert len(plan.drowned_pairs) == 36
    few = Schema(dict(list(NINE.columns.items())[: plan.most_columns]))
    assert plan.most_columns >= 1
    assert not Synthesizer.plan(few, 228, 1.0).drowned
    coarse = Schema({name: Continuous(0.0, 1.0, bins=plan.most_levels) for name in NINE.names})
    assert not Synthesizer.plan(coarse, 228, 1.0).drowned
    assert not Synthesizer.plan(NINE, 228, plan.sufficient_epsilon).drowned
    assert Synthesizer.plan(NINE, 228, 0.85 * plan.sufficient_epsilon).drowned
    assert "drowns" in str(plan)
    plenty = Synthesizer.plan(NINE, 100_000, 1.0)
    assert plenty.drowned == ()
    assert plenty.advice == plenty.warning == ""


def test_a_plan_has_the_noise_of_the_fit():
    schema = Schema({"a": Binary(), "b": Integer(0, 99)})
    plan = Synthesizer.plan(schema, 500, 2.0, 1e-5)
    data = {"a": np.arange(500) % 2, "b": np.arange(500) % 100}
    ledger = dpvi.PrivacyLedger()
    synthesizer = Synthesizer(schema, 1).fit(data, epsilon=2.0, delta=1e-5, ledger=ledger, steps=1)
    last = synthesizer.privacy_report().releases[-1]
    assert plan.deviation == pytest.approx(last["noise_multiplier"] * np.sqrt(3.0), rel=0.01)


def test_a_plan_says_that_pairs_are_counted_within_the_target():
    """A pair's own counts have the noise of two then; the fit says the same."""
    schema = Schema({"a": Binary(), "b": Integer(0, 99), "c": Integer(0, 99), "ill": Binary()})
    assert Synthesizer.plan(schema, 5000, 2.0).target is None
    assert "within each level" not in str(Synthesizer.plan(schema, 5000, 2.0))
    plan = Synthesizer.plan(schema, 5000, 2.0, 1e-5, target="ill")
    assert plan.target == "ill"
    wide = np.sqrt(2.0) * plan.deviation
    assert f"within each level of 'ill': their own counts have noise of sd {wide:.3g}" in str(plan)
    # A cell of b and c expects 19.5 records.
    for deviation, drowned, otherwise in ((13.0, 0, 0), (14.0, 1, 0), (20.0, 1, 1)):
        noisy = dataclasses.replace(plan, deviation=deviation)
        assert len(noisy.drowned_pairs) == drowned
        assert len(dataclasses.replace(noisy, target=None).drowned_pairs) == otherwise
    assert Synthesizer.plan(schema, 50, 0.5, target="ill").target is None
    generator = np.random.default_rng(0)
    data = {name: generator.integers(0, 2, 5000) for name in schema.names}
    made = Synthesizer(schema, 1, target="ill").fit(data, epsilon=2.0, delta=1e-5, steps=1)
    last = made.privacy_report().releases[-1]
    assert plan.deviation == pytest.approx(last["noise_multiplier"] * np.sqrt(10.0), rel=0.01)
    assert "within each level of 'ill'" in last["purpose"]


def test_a_fit_of_noise_warns_and_gives_no_advice_on_bounds():
    generator = np.random.default_rng(0)
    data = {name: generator.random(228) for name in NINE.names}
    with pytest.warns(UserWarning, match="the noise drowns 9 of 9") as caught:
        Synthesizer(NINE, 2).fit(data, epsilon=1.0, delta=1e-5, steps=1)
    assert len(caught) == 1
    text = str(caught[0].message)
    assert len(text.splitlines()) == 2
    plan = Synthesizer.plan(NINE, 228, 1.0, 1e-5)
    assert text == plan.warning
    assert f"or epsilon={plan.sufficient_epsilon:g}." in text


@pytest.mark.parametrize("budget", [None, 1.1])
def test_a_fits_sufficient_epsilon_is_beside_all_that_is_in_the_ledger(budget):
    schema = Schema({"a": Integer(0, 9, bins=3)})
    plan = Synthesizer.plan(schema, 20, 1.0, 1e-5)
    ledger = dpvi.PrivacyLedger(
        budget_epsilon=budget, budget_delta=None if budget is None else 1e-5
    )
    with ledger.reserved(PrivacyPlan(FullBatch(), noise_multiplier=5.0, num_releases=1)):
        pass
    made = Synthesizer(schema, 1)
    with pytest.warns(UserWarning, match="drowns") as caught:
        made.fit({"a": np.arange(20) % 10}, epsilon=1.0, delta=1e-5, ledger=ledger, steps=1)
    found = re.search(r"epsilon=([\d.]+)\.", str(caught[0].message))
    if budget is None:
        assert float(found[1]) > plan.sufficient_epsilon
    else:
        # The ledger's own budget allows no such epsilon.
        assert found is None


def test_dates_as_numbers_and_huge_numbers_are_told():
    schema = Schema({"day": Integer(20200101, 20241231), "ill": Binary()})
    data = {"day": np.array([20200101, 20241231] * 50), "ill": np.array([0, 1] * 50)}
    with pytest.warns(UserWarning, match="look like dates YYYYMMDD"):
        Synthesizer(schema, 1).fit(data, noise_multiplier=0.1, delta=1e-5, steps=1)
    others = {
        "YYYYMM:": Integer(202001, 202412),
        "YYYYMMDD:": Continuous(20200101, 20241231),
        "YYYYMMDDHH:": Integer(2020010100, 2024123123),
    }
    for text, column in others.items():
        (warning,) = check_dates(Schema({"day": column, "sum": Integer(0, 202_412)}))
        assert text in warning
    # Rounded bounds of dates, and those of populations, salaries, identifiers and post codes.
    dates = [(20190000, 20229999), (20190000, 20221231), (20190101, 20221299), (19000000, 20239999)]
    dates += [(201900, 202299), (201900, 202312), (2019000000, 2022999999), (20190600, 20220699)]
    for bounds in dates:
        assert len([*check_dates(Schema({"day": Integer(*bounds)}))]) == 1
    numbers = [(19000000, 20000000), (180000, 220000), (190000, 210000), (200000, 200500)]
    numbers += [(0, 99999999), (20000000, 20999999), (200000, 209999), (20190000, 20230000)]
    for bounds in numbers:
        assert not [*check_dates(Schema({"sum": Integer(*bounds)}))]
    with pytest.raises(ValueError, match=r"not below 2\*\*53 .* as Categorical"):
        Integer(0, 2**53)
    with pytest.raises(
        ValueError, match=r"column 'day' has dtype int64, but .* convert it to dates"
    ):
        dpvi.data.Layout.of(
            data, Schema({"day": Date("2020-01-01", "2024-12-31"), "ill": Binary()})
        )


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (([], 10, 1.0), TypeError, "must be a dpvi.Schema"),
        ((NINE, 0, 1.0), ValueError, "num_records"),
        ((NINE, 10, -1.0), ValueError, "epsilon"),
        ((NINE, 10, 1.0, 2.0), ValueError, "delta"),
    ],
)
def test_bad_plans(arguments, error, words):
    with pytest.raises(error, match=words):
        Synthesizer.plan(*arguments)
    with pytest.raises(ValueError, match="target='x'"):
        Synthesizer.plan(NINE, 10, 1.0, target="x")


def test_a_plan_without_noise_has_room_for_all():
    assert TablePlan(50, {"a": 16}, 0.0).most_levels == 50
