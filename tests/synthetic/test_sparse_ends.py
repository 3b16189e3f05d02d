"""Wide levels of which one count says nothing but how many records they have."""

from __future__ import annotations

import re
import warnings

import numpy as np
import pytest

from tfp_dpvi import load_model
from tfp_dpvi.synthetic import (
    Binary,
    Continuous,
    Estimates,
    Grouped,
    Integer,
    NoisyPairs,
    Pairs,
    Schema,
    Segments,
    Synthesizer,
    group,
    histograms,
)
from tfp_dpvi.synthetic.grouping import with_ends
from tfp_dpvi.synthetic.levels import Far, LevelValues, limits_of

NUM = 30_000
FINE, COARSE = 60.0, 300.0


def estimates(column, numbers, generator, fine=FINE, coarse=COARSE, other=None):
    """What a fit releases of a column beside another one, without the fit."""
    levels = column.fine.encode("x", numbers)
    tree = [part + coarse * generator.normal(size=len(part)) for part in histograms(column, levels)]
    chosen = group(column, tree, coarse)
    pairs = Pairs(Segments.of(Schema({"x": chosen, "other": Binary()})))
    other = generator.integers(2, size=len(numbers)) if other is None else other
    codes = [chosen.from_finest(levels), other]
    counts = pairs.counts(np.stack(codes, axis=1))
    counts = counts + fine * generator.normal(size=counts.shape)
    released = NoisyPairs.of(pairs, counts, fine, len(numbers))
    own = released.column(0)[: chosen.num_levels]
    chosen = with_ends(chosen, own, coarse, fine, generator)
    return Estimates(Schema({"x": chosen, "other": Binary()}), released)


def of_levels(column, numbers, deviation):
    """Released counts of a column's levels alone, as they are described."""
    schema = Schema({"x": column})
    pairs = Pairs(Segments.of(schema))
    counts = pairs.counts(column.encode("x", numbers)[:, None])
    counts = counts + deviation * np.random.default_rng(0).normal(size=counts.shape)
    return Estimates(schema, NoisyPairs.of(pairs, counts, deviation, len(numbers)))


def groups(generator, *others):
    """Normal numbers around 0, but for shares of them around other places."""
    shares = [share for _, share in others]
    chosen = generator.choice(len(others) + 1, NUM, p=[1.0 - sum(shares), *shares])
    places = np.array([0.0, *(place for place, _ in others)])[chosen]
    return generator.normal(places, np.where(chosen > 0, 10.0, 1.0))


KINDS = {
    "two groups": (Continuous(-1e4, 1e4), lambda g: groups(g, (3000.0, 0.03)), 90.0),
    "three groups": (
        Continuous(-1e4, 1e4),
        lambda g: groups(g, (3000.0, 0.06), (-5000.0, 0.04)),
        -20.0,
    ),
    "outliers": (
        Continuous(0.0, 1e4),
        lambda g: np.where(
            g.random(NUM) < 0.01, g.uniform(0.0, 1e4, NUM), g.normal(50.0, 10.0, NUM)
        ),
        99.5,
    ),
    "zeros": (
        Continuous(0.0, 1e5),
        lambda g: np.where(g.random(NUM) < 0.9, 0.0, np.exp(g.normal(7.0, 1.0, NUM))),
        0.1 * np.exp(7.5),
    ),
}


def far(caveats):
    """By how much a mean changes by what its caveats say of far records."""
    found = [re.search(r"the mean is (larger|smaller) by about (\S+), ", said) for said in caveats]
    return [
        float(part.group(2)) * (1.0 if part.group(1) == "larger" else -1.0)
        for part in found
        if part
    ]


def slopes(caveats):
    """By how much the slope on `other` changes by what caveats say of far records."""
    said = re.findall(r"coefficients change by up to .*?([\d.]+) \(other\)", " ".join(caveats))
    return [float(each) for each in said]


TAILS = {
    "exponential": (Continuous(0.0, 100.0), lambda g: g.exponential(5.0, NUM), 5.0 * np.log(100.0)),
    "normal": (Continuous(0.0, 120.0), lambda g: g.normal(45.0, 15.0, NUM), 45.0 + 2.3263 * 15.0),
    "amounts": (
        Continuous(0.0, 1e7),
        lambda g: np.exp(g.normal(7.0, 1.0, NUM)),
        np.exp(7.0 + 2.3263),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_means_say_what_far_records_would_change(kind):
    """40 sets at 95 %: 33 or more inside, with what is said, but for 7e-4 (binomial).

    Without what is said, 6 (outliers) to 31 (three groups) are; at most 7 of these say nothing.
    """
    column, draw, truth = KINDS[kind]
    inside, silent, said = 0, 0, 0
    for seed in range(40):
        generator = np.random.default_rng(seed)
        numbers = np.clip(draw(generator), column.lower, column.upper)
        mean = estimates(column, numbers, generator).mean("x")
        changes, error = far(mean.caveats), abs(mean.estimate[0] - truth)
        for change in changes:
            assert abs(change) > 0.95 * mean.standard_error[0]
        half = 1.96 * mean.standard_error[0]
        inside += error <= np.hypot(half, 1.96 * np.abs(changes).sum())
        silent += error > half and not changes
        said += bool(changes)
    assert inside >= 33
    assert silent <= 7
    assert said >= 4


@pytest.mark.parametrize("upper", [500.0, 1000.0])
def test_means_say_what_a_few_records_at_the_bound_would_change(upper):
    """20 sets at 95 %: at most 5 outside in silence, but for 3e-4 (binomial).

    The bound is 25 to 50 times as far as what is typical, and noise hides most of 5 records there.
    """
    column, silent = Continuous(0.0, upper), 0
    truth = 0.995 * np.exp(3.0 + 0.7**2 / 2.0) + 0.005 * upper
    for seed in range(20):
        generator = np.random.default_rng(seed)
        numbers = np.minimum(np.exp(generator.normal(3.0, 0.7, 1000)), upper)
        numbers[:5] = upper
        mean = estimates(column, numbers, generator, 6.8, 23.6).mean("x")
        outside = abs(mean.estimate[0] - truth) > 1.96 * mean.standard_error[0]
        silent += bool(outside and not far(mean.caveats))
    assert silent <= 5


def test_quantiles_say_what_far_records_would_change():
    """20 sets at 95 %: at most 5 outside in silence, but for 3e-4 (binomial).

    The largest value is one that noise does not tell from those around it, as of a co-payment.
    """
    values, shares = np.array([0.0, 3.2, 3.9, 4.56, 4.62]), [0.54, 0.2, 0.08, 0.13, 0.05]
    column, silent, said = Continuous(0.0, 5.0), 0, []
    for seed in range(20):
        generator = np.random.default_rng(seed)
        found = estimates(column, generator.choice(values, NUM, p=shares), generator)
        found = found.quantile("x", [0.1, 0.5, 0.98])
        low, high = found.interval()
        caveats = [caveat for caveat in found.caveats if "far from the others" in caveat]
        silent += not (low[2] <= 4.62 <= high[2] or caveats)
        said += caveats
    assert silent <= 5
    assert len(said) >= 5
    pattern = (
        r"the noise hides whether some \d+ records of 'x' are far from the others, (between "
        r"[\d.]+ and|at) 5: if they are, the quantile 0.98 may be as large as ([\d.]+), which is in "
        r"no interval; a nearer bound, if it is known, excludes it\."
    )
    for caveat in said:
        assert 4.56 < float(re.fullmatch(pattern, caveat).group(2)) <= 5.0


def test_a_slope_on_a_small_group_with_the_largest_numbers():
    """10 data sets: with one level beyond 5,000 none was inside; of 30, 24 are now.

    All are with what the caveat says of far records.
    """
    num, inside = 100_000, []
    for seed in range(10):
        generator = np.random.default_rng(seed)
        group_of = (generator.random(num) < 0.005).astype(int)
        numbers = generator.exponential(1000.0, num) * np.where(group_of, 8.0, 1.0)
        found = estimates(Continuous(0.0, 2e5), numbers, generator, 17.0, 33.0, other=group_of)
        slope = found.regression("x", ["other"])
        low, high = slope.interval()
        inside.append(low[1] <= 7000.0 <= high[1])
        change = sum(slopes(slope.caveats))
        assert low[1] - change <= 7000.0 <= high[1] + change
    assert sum(inside) >= 6


def test_beside_a_spike_at_the_bound_the_end_is_fitted_at_doubled_distances():
    """Top codes: before, intervals of the mean were 20 times as wide, and none had the quantile.

    Of 16 nominal 95 % intervals with fixed seeds, fewer than 12 contain the truth in 1 of 10^4.
    """
    column, within = Continuous(0.0, 1e5, spikes=[1e5]), 0
    for seed in range(8):
        generator = np.random.default_rng(seed)
        numbers = np.minimum(np.exp(generator.normal(6.0, 1.5, 20_000)), 1e5)
        found = estimates(column, numbers, generator, 17.0, 33.0)
        mean, high = found.mean("x"), found.quantile("x", [0.99])
        low, up = (float(np.squeeze(edge)) for edge in mean.interval())
        assert up - low < 0.4 * numbers.mean()
        within += low < np.exp(6.0 + 1.5**2 / 2.0) < up
        low, up = (float(np.squeeze(edge)) for edge in high.interval())
        within += low < np.exp(6.0 + 1.5 * 2.3263) < up
    assert within >= 12


@pytest.mark.parametrize("spikes", [(), (1000.0,)])
def test_a_second_group_beyond_a_gap_is_no_part_of_a_fitted_end(spikes):
    """Nominal 95 % intervals: fewer than 6 of 8 are inside in 6 of 1,000; fitted, 7 of 16 were."""
    column, inside = Continuous(0.0, 1000.0, spikes=spikes), 0
    for seed in range(8):
        generator = np.random.default_rng(seed)
        numbers = generator.exponential(60.0, 20_000)
        far_out = generator.random(20_000) < 0.03
        numbers[far_out] = generator.normal(950.0, 15.0, far_out.sum())
        found = estimates(column, np.clip(numbers, 0.0, 1000.0), generator, 17.0, 33.0)
        low, high = (float(np.squeeze(edge)) for edge in found.mean("x").interval())
        inside += low < 0.97 * 60.0 + 0.03 * 950.0 < high
    assert inside >= 6


def test_coefficients_say_the_most_that_far_records_may_change():
    """Brute force over all levels of two correlated terms, with the mean's own change."""
    column = Integer(0, 1_000_000, bins=list(range(1, 12)))
    generator = np.random.default_rng(0)
    numbers = generator.integers(11, size=NUM)
    one = generator.integers(2, size=NUM)
    other = np.where(generator.random(NUM) < 0.9, one, generator.integers(2, size=NUM))
    schema = Schema({"x": column, "one": Binary(), "other": Binary()})
    pairs = Pairs(Segments.of(schema))
    codes = np.stack([column.encode("x", numbers), one, other], axis=1)
    counts = pairs.counts(codes)
    counts = counts + 20.0 * generator.normal(size=counts.shape)
    found = Estimates(schema, NoisyPairs.of(pairs, counts, 20.0, NUM))
    (change,) = far(found.mean("x").caveats)
    (said,) = (
        caveat
        for caveat in found.regression("x", ["one", "other"]).caveats
        if "coefficients change" in caveat
    )
    design = np.stack([np.ones(NUM), one, other], axis=1)
    records = np.array([[1.0, a, b] for a in (0, 1) for b in (0, 1)])
    pulls = np.linalg.solve(design.T @ design / NUM, records.T)
    for name, most in zip(
        ("Intercept", "one", "other"), abs(change * pulls).max(axis=1), strict=True
    ):
        shown = float(re.search(rf"([\d.]+) \({name}\)", said).group(1))
        assert abs(shown / most - 1.0) < 0.1


def test_spikes_and_a_far_end_have_as_many_levels_as_declared():
    """There were 17, and a fit failed after its first release."""
    generator = np.random.default_rng(0)
    far_out = np.minimum(15.0 / (1.0 - generator.random(20_000)) ** 2, 1e6)
    near = generator.integers(0, 16, 20_000)
    numbers = np.where(generator.random(20_000) < 0.05, far_out, near).astype(int)
    for num_spikes in (0, 3, 6, 7):
        column = Integer(0, 10**6, bins=16, spikes=range(2, 2 * num_spikes + 2, 2))
        counts = histograms(column, column.fine.encode("x", numbers))
        assert group(column, counts, 0.0).num_levels == 16


def test_reports_say_that_samples_have_no_far_records(tmp_path):
    generator = np.random.default_rng(0)
    usual = np.clip(generator.normal(50.0, 10.0, size=[2, 1000]), 0.0, 100.0)
    schema = Schema({"x": Continuous(0.0, 10_000.0), "y": Continuous(0.0, 100.0)})
    synthesizer = Synthesizer(schema, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        synthesizer.fit({"x": usual[0], "y": usual[1]}, epsilon=1.0, delta=1e-5, steps=1)
    caveats = synthesizer.privacy_report().caveats
    synthesizer.save(tmp_path / "table.keras")
    assert load_model(tmp_path / "table.keras").privacy_report().caveats == caveats
    (said,) = (caveat for caveat in caveats if "far from the others" in caveat)
    assert re.fullmatch(
        r"the noise hides whether some \d+ records of 'x' are far from the others, between [\d.]+ "
        r"and 10000: samples suppose that there are none; a nearer bound, if it is known, excludes "
        r"it\.",
        said,
    )


def test_far_records_are_in_no_interval_but_said():
    """Most of a mean's error may be that of records that no count tells: its interval stays."""
    said, widths = [], []
    for seed in range(10):
        generator = np.random.default_rng(seed)
        column, draw, _ = KINDS["outliers"]
        numbers = np.clip(draw(generator), column.lower, column.upper)
        found = estimates(column, numbers, generator)
        mean = found.mean("x")
        widths.append(mean.standard_error[0])
        said += [caveat for caveat in mean.caveats if "far from the others" in caveat]
        if not far(mean.caveats):
            continue
        try:
            pair = found.correlation("x", "other")
        except ValueError:
            continue
        assert any("supposes that there are none" in caveat for caveat in pair.caveats)
        assert not far(pair.caveats)
    assert len(said) >= 3
    # With those of a level between 100 and the bound, 500 and more.
    assert np.median(widths) < 25.0
    pattern = (
        r"the noise hides whether some \d+ records of 'x' are far from the others, "
        r"between [\d.]+ and 10000: if they are, the mean is larger by about [\d.]+, which is in "
        r"no interval; a nearer bound, if it is known, excludes it\."
    )
    for caveat in said:
        assert re.fullmatch(pattern, caveat)


def test_an_end_is_cut_at_doubled_distances():
    """Where half of its mass lies is noise: levels cut there say nothing of nearer records."""
    column = Continuous(0.0, 60.0, bins=16)
    numbers = np.random.default_rng(0).exponential(3.0, NUM).clip(0.0, 60.0)
    tree = histograms(column, column.fine.encode("x", numbers))
    low, high = group(column, tree, 300.0).limits
    reached = (high - np.median(numbers)) / (low - np.median(numbers))
    assert np.all(reached[-3:] < 2.6)


HEAPS = np.array(
    [0.0, 0.3, 0.6, 0.9, 1.4, 1.9, 2.1, 3.2, 4.8, 7.4, 11.0, 15.0, 20.0, 27.0, 39.0, 57.6]
)
HEAPED = np.array(
    [680, 30, 50, 40, 50, 25, 25, 25, 30, 15, 7, 4.5, 3, 2, 0.8, 0.5]
)  # fmt: skip


def test_heaps_do_not_decide_how_far_an_end_reaches():
    """40 sets: 30 or more inside. With levels at half of the mass and exact counts 19 were.

    What noise hides between the last counts and the near bound is in the interval.
    """
    shares, inside = HEAPED / HEAPED.sum(), 0
    for seed in range(40):
        generator = np.random.default_rng(seed)
        numbers = generator.choice(HEAPS, 6400, p=shares)
        mean = estimates(Continuous(0.0, 60.0), numbers, generator, 18.0, 41.0).mean("x")
        inside += abs(mean.estimate[0] - HEAPS @ shares) <= 1.96 * mean.standard_error[0]
    assert inside >= 30


def test_ordinary_columns_have_no_far_records():
    generator = np.random.default_rng(0)
    ages = np.clip(generator.normal(45.0, 15.0, NUM), 18.0, 90.0)
    for column, numbers in (
        (Continuous(0.0, 120.0), ages),
        (Integer(0, 120), np.floor(ages).astype(int)),
    ):
        usual = estimates(column, numbers, generator).mean("x")
        assert usual.standard_error[0] < 0.5
        assert not any("far from the others" in caveat for caveat in usual.caveats)


@pytest.mark.parametrize("is_upper", [True, False])
def test_estimates_of_pairs_suppose_that_no_records_are_far(is_upper):
    """By hand: 0 to 10, and one level up to a bound far away, of which noise hides about 20."""
    edges = range(1, 12) if is_upper else range(11)
    column = Integer(*((0, 1_000_000) if is_upper else (-1_000_000, 10)), bins=list(edges))
    generator = np.random.default_rng(0)
    numbers = generator.integers(11, size=NUM)
    schema = Schema({"x": column, "other": Binary()})
    pairs = Pairs(Segments.of(schema))
    others = (numbers > generator.integers(11, size=NUM)).astype(int)
    counts = pairs.counts(np.stack([column.encode("x", numbers), others], axis=1))
    counts = counts + 20.0 * generator.normal(size=counts.shape)
    found = Estimates(schema, NoisyPairs.of(pairs, counts, 20.0, NUM))
    (change,) = far(found.mean("x").caveats)
    assert 100.0 < (change if is_upper else -change) < 5000.0
    place = "between 11 and 1e+06" if is_upper else "between -1e+06 and -1"
    said = (
        rf"the noise hides whether some \d+ records of 'x' are far from the others, {re.escape(place)}"
        ": the estimate supposes that there are none; a nearer bound, if it is known, excludes it."
    )
    for estimate in (found.regression("other", ["x"]), found.correlation("x", "other")):
        assert sum(re.fullmatch(said, caveat) is not None for caveat in estimate.caveats) == 1
    # The sum of what they add is that of the smaller group.
    (largest,) = slopes(found.regression("x", ["other"]).caveats)
    share = float(found.mean("other").estimate[0])
    assert abs(largest / (abs(change) / min(share, 1.0 - share)) - 1.0) < 0.1


def test_the_place_of_far_records_may_be_one_value():
    assert Far(True, 100.0, 100.0, 5.0, 500.0).place == "at 100"


@pytest.mark.parametrize("value", [37.205, 37.25, 37.295])
def test_quantiles_of_numbers_that_are_all_equal(value):
    """They are anywhere in their level. As if they were even in it, that of .1 was off by much."""
    column = Continuous(0.0, 100.0, bins=list(np.linspace(0.0, 100.0, 1001)[1:-1]))
    found = of_levels(column, np.full(NUM, value), 5.0)
    low, high = found.quantile("x", [0.1, 0.5, 0.9]).interval()
    assert np.all((low <= value) & (value <= high))
    assert np.all(high - low < 0.15)


@pytest.mark.parametrize("tail", TAILS)
def test_quantiles_in_ordinary_tails_are_not_anywhere_in_their_level(tail):
    """The last level is far wider than what has its records, as bounds are generous."""
    column, draw, truth = TAILS[tail]
    generator = np.random.default_rng(0)
    numbers = np.clip(draw(generator), column.lower, column.upper)
    found = estimates(column, numbers, generator)
    last = found.quantile("x", 0.99)
    low, high = last.interval()
    if tail != "amounts":
        assert not any("far from the others" in caveat for caveat in last.caveats)
    kept = found.schema.columns["x"]
    starts, stops = limits_of(column.fine.edges, np.array(kept.groups), kept.num_levels)
    level = np.searchsorted(starts, truth) - 1
    assert level == kept.num_levels - 1
    assert low[0] <= truth <= high[0]
    assert high[0] - low[0] <= 0.5 * (stops[level] - starts[level])


def test_means_within_levels_have_the_noise_of_what_divides_them():
    """By hand: the middle level has two cells, whose middles are a half from its mean."""
    column = Continuous(0.0, 5.0, bins=[1.0, 2.0, 3.0, 4.0])
    counts = np.array([900.0, 1000.0, 900.0, 900.0])
    groups, shares = (0, 1, 1, 2, 3), (1.0, 0.5, 0.5, 1.0, 1.0)
    without, noisy = (
        LevelValues.of("x", Grouped(column, column, groups, shares, noise=noise), counts, 1.0)
        for noise in (0.0, 40.0)
    )
    more = np.sum(noisy.shifts**2, axis=0) - np.sum(without.shifts**2, axis=0)
    expected = (40.0 / 1000.0) ** 2 * 2.0 * 0.5**2
    np.testing.assert_allclose(more, [0.0, expected, 0.0, 0.0], atol=1e-12)
