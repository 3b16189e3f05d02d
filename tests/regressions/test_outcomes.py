"""Each family's distribution is SciPy's, and predictions are in the units of the formula."""

from pathlib import Path

import numpy as np
import pytest
from scipy import special, stats
from support.densities import BY_SCIPY
from support.regressions import OUTCOMES

from tfp_dpvi.data import Binary, Categorical, Continuous, Integer
from tfp_dpvi.regressions.outcomes import FAMILIES, predicted

# How a family's own parameters follow from those of `BY_SCIPY`.
OWN = {
    "student": lambda p: {"sigma": np.exp(p[0]), "nu": np.exp(p[1])},
    "lognormal": lambda p: {"sigma": np.exp(p[0])},
    "gamma": lambda p: {"alpha": np.exp(p[0])},
    "weibull": lambda p: {"alpha": np.exp(p[0])},
    "exponential": lambda p: {},
    "beta": lambda p: {"kappa": np.exp(p[0])},
    "zero_inflated_poisson": lambda p: {"zero": special.expit(p[0])},
    "zero_inflated_negative_binomial": lambda p: {
        "alpha": np.exp(p[0]),
        "zero": special.expit(p[1]),
    },
    "hurdle_poisson": lambda p: {"zero": special.expit(p[0])},
}
NUM = 20_000


def outcome_of(name):
    column = OUTCOMES[name]
    location, scale = getattr(column, "location", 0.0), getattr(column, "deviation", 1.0)
    return FAMILIES[name].outcome(column, location, scale)


@pytest.mark.parametrize("name", BY_SCIPY)
def test_densities_are_scipys(name):
    generator = np.random.default_rng(0)
    num, log_density = BY_SCIPY[name]
    score, point = generator.normal(size=50), generator.normal(size=num)
    y = np.abs(generator.normal(size=50)) + 0.01
    if isinstance(OUTCOMES[name], Integer):
        y = np.floor(3.0 * y) * (generator.random(50) < 0.7)
    if name == "beta":
        y = special.expit(score + y)
    found = FAMILIES[name].distribution(score, OWN[name](point), outcome_of(name)).log_prob(y)
    np.testing.assert_allclose(found, log_density(y, score, point), rtol=1e-6, atol=1e-9)


def test_the_density_of_successes_among_trials_is_scipys():
    generator = np.random.default_rng(0)
    score, trials = generator.normal(size=50), np.arange(50.0)
    y = generator.binomial(np.arange(50), special.expit(score)).astype(float)
    found = FAMILIES["binomial"].distribution(score, {"trials": trials}, outcome_of("binomial"))
    expected = stats.binom.logpmf(y, trials, special.expit(score))
    np.testing.assert_allclose(found.log_prob(y), expected, rtol=1e-6, atol=1e-9)


def test_the_density_of_dispersed_successes_is_scipys():
    generator = np.random.default_rng(0)
    score, trials = generator.normal(size=50), np.arange(50.0)
    y = generator.integers(0, np.arange(50) + 1).astype(float)
    own = {"trials": trials, "kappa": 8.0}
    family = FAMILIES["beta_binomial"]
    found = family.distribution(score, own, outcome_of("beta_binomial"))
    share = special.expit(score)
    expected = stats.betabinom.logpmf(y, trials, 8.0 * share, 8.0 - 8.0 * share)
    np.testing.assert_allclose(found.log_prob(y), expected, rtol=1e-6, atol=1e-9)


def test_scores_of_no_record_have_a_density_of_dispersed_successes():
    family, outcome = FAMILIES["beta_binomial"], outcome_of("beta_binomial")
    score = np.array([-1e4, 1e4], np.float32)
    own = {"trials": np.float32([5.0, 5.0]), "kappa": np.float32(8.0)}
    found = family.distribution(score, own, outcome).log_prob(np.float32([0.0, 5.0]))
    np.testing.assert_allclose(found, 0.0, atol=1e-3)


@pytest.mark.parametrize("name", FAMILIES)
def test_predictions_are_means_of_outcomes_in_units(name):
    """20,000 outcomes: the mean within five standard errors; levels' probabilities sum to 1."""
    family, outcome = FAMILIES[name], outcome_of(name)
    own = {part: np.full(NUM, 0.4) for part in family.own(outcome)}
    if "nu" in own:
        own["nu"] = np.full(NUM, 5.0)
    if name == "ordinal":
        own = {"threshold": np.zeros(NUM), "gaps": np.ones([NUM, outcome.levels - 2])}
    blocks = outcome.levels - 1 if name == "categorical" else 1
    trials = np.full(1, 7.0) if family.has_trials else None
    score = np.full([NUM, 1, blocks], 0.3)
    mean, drawn = predicted(family, score, own, outcome, seed=0, trials=trials)
    if outcome.levels:
        np.testing.assert_allclose(mean.sum(axis=-1), 1.0)
        return
    assert mean.shape == drawn.shape == (NUM, 1)
    assert abs(drawn.mean() - mean[0, 0]) < 5.0 * drawn.std() / np.sqrt(NUM)
    if family.has_trials:
        np.testing.assert_allclose(mean, 7.0 * special.expit(0.3))
    if family.is_scaled:
        np.testing.assert_allclose(mean, outcome.location + 0.3 * outcome.scale)
    assert family.num_own(outcome) == len(own)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_takes_its_outcomes_and_no_others(name):
    family = FAMILIES[name]
    assert family.fits(OUTCOMES[name])
    others = [Binary(), Categorical(["a", "b", "c"]), Continuous(-1.0, 1.0), Integer(0, 9)]
    assert not all(family.fits(column) for column in others)


def test_the_guide_names_every_family():
    guide = (Path(__file__).parents[2] / "docs" / "regression.md").read_text(encoding="utf-8")
    assert all(f'`"{name}"`' in guide for name in FAMILIES)


@pytest.mark.parametrize(
    ("lower", "upper", "typical", "middle"),
    [
        (1.0, 10_000.0, None, 100.0),
        # A lower bound that is next to nothing says nothing.
        (1e-9, 10_000.0, None, 100.0),
        (1.0, 10_000.0, (900.0, 300.0), 900.0),
    ],
)
def test_positive_outcomes_are_expected_at_the_geometric_middle_of_wide_bounds(
    lower, upper, typical, middle
):
    """At the other middle intercepts of persons rose to explain what the intercept was off."""
    column = Continuous(lower, upper, typical=typical)
    for name in ("gamma", "lognormal", "weibull", "exponential"):
        assert FAMILIES[name].typical(column) == pytest.approx(middle)
    assert FAMILIES["normal"].typical(column) == column.location
