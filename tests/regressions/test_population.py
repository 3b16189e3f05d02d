"""Estimates of finite populations: sums of outcomes against SciPy, areas, and tables that do not fit."""

import functools

import numpy as np
import pandas as pd
import pytest
import scipy.stats

import tfp_dpvi as dpvi
from tfp_dpvi.regressions.population import Outcomes, estimates, make_strata

pytest.importorskip("formulae")

DRAWS = 20_000
COUNTS = np.array([3.0, 40.0, 7.0])
MEANS = np.array([0.2, 0.5, 0.9])


def outcomes(family, scale=1.0):
    mean = np.tile(scale * MEANS, (DRAWS, 1))
    spread = {"normal": 0.7, "negative_binomial": 2.5}.get(family, np.inf)
    if family == "categorical":
        mean = np.stack([0.3 * mean, 0.7 * mean, 1.0 - mean], axis=2)
    return Outcomes(family, COUNTS, mean, np.full([DRAWS, 1], spread))


def strata(areas=("a", "b", "a")):
    table = {"count": COUNTS, "area": np.array(areas)}
    return make_strata(table, "count", "area", None)


@pytest.mark.parametrize(
    ("family", "variance"),
    [
        ("normal", lambda mean: np.full(3, 0.49)),
        ("bernoulli", lambda mean: mean * (1.0 - mean)),
        ("poisson", lambda mean: mean),
        ("negative_binomial", lambda mean: mean + mean**2 / 2.5),
    ],
)
def test_sums_of_persons_have_their_moments(family, variance):
    """Means and variances of 20,000 draws, each at 5 standard errors, for variances by kurtosis."""
    sums = outcomes(family).sums(np.random.default_rng(0))
    expected = COUNTS * variance(MEANS)
    np.testing.assert_array_less(
        np.abs(sums.mean(axis=0) - COUNTS * MEANS), 5.0 * np.sqrt(expected / DRAWS)
    )
    fourth = scipy.stats.kurtosis(sums, axis=0) + 2.0
    error = expected * np.sqrt(np.maximum(fourth, 0.1) / DRAWS)
    np.testing.assert_array_less(np.abs(sums.var(axis=0) - expected), 6.0 * error)


def test_shares_of_levels_add_up_to_the_persons():
    sums = outcomes("categorical").sums(np.random.default_rng(0))
    np.testing.assert_array_equal(sums.sum(axis=2), np.tile(COUNTS, (DRAWS, 1)))
    expected = COUNTS[:, None] * outcomes("categorical").mean[0]
    np.testing.assert_allclose(sums.mean(axis=0), expected, rtol=0.05)


@pytest.mark.parametrize("family", ["normal", "poisson", "negative_binomial"])
@pytest.mark.parametrize("probability", [0.1, 0.5, 0.95])
def test_a_quantile_is_that_of_simulated_persons(family, probability):
    """Of an area of one kind of persons, draw by draw in law: Kolmogorov-Smirnov at 1e-6."""
    scale = 1.0 if family == "normal" else 8.0
    both = outcomes(family, scale)
    one = strata(("a", "b", "c"))
    found = estimates(both, one, "quantile", probability, np.random.default_rng(1))[:, 1]
    rng = np.random.default_rng(2)
    shape, mean = (DRAWS // 4, 40), scale * MEANS[1]
    persons = {
        "normal": lambda: mean + 0.7 * rng.normal(size=shape),
        "poisson": lambda: rng.poisson(mean, shape),
        "negative_binomial": lambda: rng.poisson(rng.gamma(2.5, mean / 2.5, shape)),
    }[family]()
    exact = np.sort(persons, axis=1)[:, int(np.ceil(probability * 40)) - 1]
    assert scipy.stats.ks_2samp(np.round(found, 6), np.round(exact, 6)).pvalue > 1e-6


def test_a_share_below_a_value_is_that_of_the_distribution():
    for family in ("normal", "poisson", "negative_binomial"):
        found = estimates(outcomes(family), strata(), "share", 0.5, np.random.default_rng(0))
        below = outcomes(family).below(0.5)[0]
        expected = [np.sum((COUNTS * below)[[0, 2]]) / 10.0, below[1]]
        np.testing.assert_allclose(found.mean(axis=0), expected, atol=0.01)


# ---------------------------------------------------------------------- a fitted regression

AREAS = ["north", "south", "west"]
SCHEMA = {
    "works": {"type": "binary"},
    "age": {"type": "integer", "lower": 18, "upper": 90, "typical": [50, 18]},
    "area": {"type": "categorical", "categories": AREAS},
    "w": {"type": "continuous", "lower": 0, "upper": 10},
}


def people(num=20_000, seed=0):
    rng = np.random.default_rng(seed)
    area = rng.choice(3, num, p=[0.5, 0.3, 0.2])
    age = rng.choice([25, 45, 70], num)
    score = np.array([0.5, -0.5, 0.0])[area] - 0.02 * (age - 45)
    works = (rng.random(num) < 1.0 / (1.0 + np.exp(-score))).astype(int)
    weights = np.where(works == 1, 2.0, 8.0)
    return pd.DataFrame({"works": works, "age": age, "area": np.array(AREAS)[area], "w": weights})


def table():
    return people().groupby(["area", "age"]).size().reset_index(name="count")


def fit(data, **settings):
    settings = {"epsilon": 20.0, "delta": 1e-6, "seed": 1, "weights": "w", **settings}
    return dpvi.regression("works ~ age + area", data, "bernoulli", SCHEMA, **settings)


@functools.cache
def fitted():
    everybody = people()
    rng = np.random.default_rng(3)
    chosen = rng.random(len(everybody)) < 0.2 * 2.0 / everybody["w"]
    return fit(everybody[chosen])


@pytest.mark.slow
def test_weighted_areas_are_those_of_the_population(tmp_path):
    """Within 5 deviations; the sample's own shares, of which those who work are oversampled, are not."""
    result = fitted()
    found = result.population(table(), by="area", level=0.9)
    truth = people().groupby("area")["works"].mean().loc[found["area"]].to_numpy()
    assert np.all(np.abs(found["estimate"] - truth) < 5.0 * found["sd"])
    assert found["sd"].max() < 0.03
    assert list(found.columns) == ["area", "count", "estimate", "sd", "eti_5%", "eti_95%"]
    whole = result.population(table())
    assert whole["count"].tolist() == [20_000]
    assert whole["estimate"][0] == pytest.approx(
        np.average(found["estimate"], weights=found["count"]), abs=0.003
    )
    totals = result.population(table(), by="area", estimate="total")
    np.testing.assert_allclose(totals["estimate"] / totals["count"], found["estimate"], atol=0.003)
    assert any(each.startswith("weights: w, at most 10") for each in result.choices())
    assert "neither the ranks" in result.report()
    result.save(tmp_path / "works.zip")
    again = dpvi.regressions.Regression.load(tmp_path / "works.zip")
    assert again.population(table(), by="area", level=0.9).equals(found)
    assert again.parts.max_weight == 10.0


@pytest.mark.parametrize(
    ("change", "settings", "message"),
    [
        ({}, {"by": "county"}, "by='county' is no column of counts"),
        ({}, {"count": "persons"}, "count='persons' is no column of counts"),
        ({"count": -1}, {}, "whole numbers of 0 or more, and has others in 9 rows"),
        ({"count": 0.5}, {}, "whole numbers"),
        ({"count": np.nan}, {}, "whole numbers"),
        ({"count": "many"}, {}, "whole numbers"),
        ({"count": 10**16}, {}, "add up to more than 1e[+]15 persons"),
        ({"county": np.nan}, {"by": "county"}, "column 'county' of by has missing values in 9"),
        ({}, {"by": None}, "by=None"),
        ({}, {"by": 3}, "by=3"),
        ({}, {"seed": "a"}, "seed='a'"),
        ({"count": 1}, {}, "add up to 9 persons, fewer than the"),
        ({"area": "east"}, {}, "area"),
        ({"age": 200}, {}, "age"),
        ({"age": None}, {}, "age"),
        ({}, {"estimate": "median"}, "estimate='median'"),
        ({}, {"estimate": "quantile", "at": 0.5}, "needs an outcome that is a number"),
        ({}, {"at": 0.5}, "at=0.5 with estimate='mean'"),
        ({}, {"level": 2.0}, "level=2.0"),
        ({"sd": 1}, {"by": ["area", "sd"]}, "by='sd' is the name of a column of estimates"),
    ],
)
def test_counts_that_do_not_fit_are_refused_in_a_line(change, settings, message):
    counts = table().assign(**change)
    with pytest.raises((ValueError, TypeError), match=message) as error:
        fitted().population(counts, **settings)
    assert len(str(error.value).splitlines()) <= 2


def test_an_area_without_persons_and_no_rows_at_all():
    counts = table()
    counts.loc[counts["area"] == "south", "count"] = 0
    with pytest.raises(ValueError, match="area=south has no persons"):
        fitted().population(counts, by="area")
    with pytest.raises(ValueError, match="no rows at all"):
        fitted().population(counts.iloc[:0])


@pytest.mark.parametrize(
    ("settings", "change", "message"),
    [
        ({"weights": "v"}, {}, "weights='v' needs a column that the schema describes"),
        ({"weights": "area"}, {}, "weights='area' needs a column"),
        ({}, {"w": 11.0}, "'w'"),
        ({}, {"w": -1.0}, "'w'"),
        ({}, {"w": np.inf}, "'w'"),
        ({}, {"w": np.nan}, "'w'"),
        ({"measured": ["age"]}, {"w": 0.0}, "sample_weight is 0 for all records"),
        ({"weights": 3}, {}, "weights=3"),
        ({"unit": "w", "max_rows_per_unit": 50}, {}, "weights=.w. is the outcome or the unit"),
    ],
)
def test_weights_that_are_refused_spend_nothing(settings, change, message):
    ledger = dpvi.PrivacyLedger()
    with pytest.raises((ValueError, TypeError), match=message) as error:
        fit(people(50).assign(**change), ledger=ledger, **settings)
    assert len(str(error.value).splitlines()) <= 2
    assert ledger.num_releases == 0
