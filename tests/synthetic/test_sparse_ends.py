"""Wide levels of which one count says nothing but how many records they have."""

from __future__ import annotations

import numpy as np
import pytest

from tfp_dpvi.synthetic import (
    Binary,
    Continuous,
    Estimates,
    Grouped,
    NoisyPairs,
    Pairs,
    Schema,
    Segments,
    group,
    histograms,
)
from tfp_dpvi.synthetic.grouping import with_ends
from tfp_dpvi.synthetic.levels import LevelValues

NUM = 30_000
FINE, COARSE = 60.0, 300.0


def estimates(column, numbers, generator):
    """What a fit releases of a column beside another one, without the fit."""
    levels = column.fine.encode("x", numbers)
    tree = [part + COARSE * generator.normal(size=len(part)) for part in histograms(column, levels)]
    chosen = group(column, tree, COARSE)
    pairs = Pairs(Segments.of(Schema({"x": chosen, "other": Binary()})))
    codes = [chosen.from_finest(levels), generator.integers(2, size=len(numbers))]
    counts = pairs.counts(np.stack(codes, axis=1))
    counts = counts + FINE * generator.normal(size=counts.shape)
    released = NoisyPairs.of(pairs, counts, FINE, len(numbers))
    own = released.column(0)[: chosen.num_levels]
    chosen = with_ends(chosen, own, COARSE, FINE, generator)
    return Estimates(Schema({"x": chosen, "other": Binary()}), released)


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


@pytest.mark.parametrize("kind", KINDS)
def test_intervals_reach_groups_far_from_the_others(kind):
    """40 sets at 95 %: 33 or more inside, but for 7e-4 (binomial).

    As if a single level fell from what is beside, 7 (outliers) to 28 (zeros) were.
    """
    column, draw, truth = KINDS[kind]
    inside = 0
    for seed in range(40):
        generator = np.random.default_rng(seed)
        numbers = np.clip(draw(generator), column.lower, column.upper)
        low, high = estimates(column, numbers, generator).mean("x").interval()
        inside += low[0] <= truth <= high[0]
    assert inside >= 33


def test_ages_keep_their_width_and_far_groups_say_why_theirs_is_wide():
    generator = np.random.default_rng(0)
    ages = np.clip(generator.normal(45.0, 15.0, NUM), 18.0, 90.0)
    usual = estimates(Continuous(0.0, 100.0), ages, generator).mean("x")
    assert usual.standard_error[0] < 0.3
    said = [False] * 10
    for seed in range(10):
        generator = np.random.default_rng(seed)
        column, draw, _ = KINDS["outliers"]
        numbers = np.clip(draw(generator), column.lower, column.upper)
        caveats = estimates(column, numbers, generator).mean("x").caveats
        said[seed] = any("no count says where in a wide level" in caveat for caveat in caveats)
    assert sum(said) >= 5
    assert not any("no count" in caveat for caveat in usual.caveats)


def test_quantiles_of_numbers_that_are_all_equal():
    """They are anywhere in their level. As if they were even in it, those of .1 and .9 were not reached."""
    column = Continuous(0.0, 100.0, bins=list(np.linspace(0.0, 100.0, 1001)[1:-1]))
    pairs = Pairs(Segments.of(Schema({"x": column})))
    counts = pairs.counts(column.encode("x", np.full(NUM, 37.25))[:, None])
    counts = counts + 5.0 * np.random.default_rng(0).normal(size=counts.shape)
    schema = Schema({"x": column})
    found = Estimates(schema, NoisyPairs.of(pairs, counts, 5.0, NUM))
    low, high = found.quantile("x", [0.1, 0.5, 0.9]).interval()
    assert np.all((low <= 37.205) & (high >= 37.295))
    assert np.all(high - low < 0.3)


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
