"""Default priors where bounds are far wider than records, and priors that contradict these."""

import types

import numpy as np
import pytest
from scipy import stats

import tfp_dpvi as dpvi
from tfp_dpvi.regressions.checking import outcome_values
from tfp_dpvi.regressions.fit import described

pytest.importorskip("formulae")

BOUNDS = {"lower": 0, "upper": 100}
SCHEMA = {
    "custody": {"type": "binary"},
    "male": {"type": "binary"},
    "prev": {"type": "integer", **BOUNDS},
}


def widening(formula, **columns):
    design, parts = described(f"custody ~ {formula}", "bernoulli", {**SCHEMA, **columns})
    return dict(zip(design.labels, design.widening, strict=True)), parts.intercept[1]


def test_priors_are_wider_where_no_typical_values_are_declared():
    """Also of squares and interactions, and of the intercept, for records may lie elsewhere."""
    declared = {"type": "continuous", **BOUNDS, "typical": [1.5, 0.7]}
    factors, intercept = widening("male + z + prev + {prev**2} + male:prev + male:z", z=declared)
    wider = {"prev", "I(prev ** 2)", "male:prev"}
    assert factors == {name: 4.0 if name in wider else 1.0 for name in factors}
    assert wider < set(factors)
    assert intercept == pytest.approx(np.hypot(2.5, 10.0))
    _, intercept = widening("z + prev", z=dict(SCHEMA["prev"]))
    assert intercept == pytest.approx(np.sqrt(2.5**2 + 10.0**2 + 10.0**2))


@pytest.mark.parametrize("family", ["poisson", "negative_binomial", "hurdle_poisson"])
def test_a_fit_of_counts_starts_where_most_counts_are(family):
    """From 100, of 0 to 200, most fits of visits of 0.8 a person ended in wide intervals."""
    visits = {"type": "integer", "lower": 0, "upper": 200}
    started = [
        described("visits ~ male", family, {**SCHEMA, "visits": {**visits, **declared}})[1]
        for declared in ({}, {"typical": [80, 20]})
    ]
    assert [parts.outcome.location for parts in started] == pytest.approx(
        np.log([np.sqrt(201.0) - 1.0, 80.0])
    )


def test_priors_that_are_given_are_taken_as_they_are():
    _, parts = described(
        "custody ~ prev", "bernoulli", SCHEMA, {"prev": (0, 1), "Intercept": (1, 2)}
    )
    assert parts.coefficients[0][1] == pytest.approx(25.0, rel=0.02)
    assert parts.intercept == (1, 2)
    _, parts = described("custody ~ prev", "bernoulli", SCHEMA, {"prev": (0, 0.02)})
    assert parts.intercept[1] == pytest.approx(np.hypot(2.5, 0.5), rel=0.01)


def convictions(num=6000):
    """One to four earlier convictions, of bounds from 0 to 100."""
    generator = np.random.default_rng(0)
    male = generator.integers(0, 2, num)
    prev = generator.choice([1, 2, 3, 4], num, p=[0.65, 0.25, 0.07, 0.03])
    custody = generator.random(num) < 1.0 / (1.0 + np.exp(1.2 - 0.8 * male - 0.6 * prev))
    return {"male": male, "prev": prev, "custody": custody.astype(int)}


def fit(**priors):
    arguments = {"epsilon": 1.0, "delta": 1e-5, "seed": 3, "priors": priors}
    return dpvi.regression("custody ~ male + prev", convictions(), "bernoulli", SCHEMA, **arguments)


def test_a_slope_is_found_though_bounds_are_a_hundred_times_as_wide():
    """A prior of deviation 2.5 for a quarter of the bounds halved it in silence."""
    result = fit()
    mean, sd = result.summary().loc["prev", ["mean", "sd"]]
    assert abs(mean - 0.6) < stats.norm.isf(0.001) * sd
    assert sd < 0.1
    assert not result.warnings


def test_a_prior_that_contradicts_the_records_is_said():
    result = fit(prev=(0.0, 0.02))
    (sentence,) = result.warnings
    # The privacy report has the same words.
    assert sentence.replace("\n", " ") in " ".join(str(result.privacy_report()).split())
    assert sentence.startswith("the prior contradicts the records: by it ")
    assert "priors=" in sentence
    assert "prev" in sentence


def test_groups_that_do_not_differ_contradict_no_prior():
    """A half-normal prior has its mode there."""
    generator = np.random.default_rng(1)
    data = {"x": generator.normal(size=6000), "area": generator.choice(list("abcdef"), 6000)}
    data["y"] = np.clip(0.5 * data["x"] + generator.normal(size=6000), -9.0, 9.0)
    schema = {
        "y": {"type": "continuous", "lower": -9, "upper": 9, "typical": [0, 1.1]},
        "x": {"type": "continuous", "lower": -9, "upper": 9, "typical": [0, 1]},
        "area": {"type": "categorical", "categories": list("abcdef")},
    }
    data["x"] = np.clip(data["x"], -9.0, 9.0)
    arguments = {"epsilon": 8.0, "delta": 1e-5, "seed": 1}
    result = dpvi.regression("y ~ x + (1 | area)", data, "normal", schema, **arguments)
    assert not [sentence for sentence in result.warnings if "contradicts" in sentence]


def test_without_an_intercept_outcomes_are_the_coefficients_alone():
    """A linear model subtracted the middle of the outcome's bounds, and the table had its rest."""
    schema = {
        "pressure": {"type": "continuous", "lower": 60, "upper": 220},
        "ward": {"type": "categorical", "categories": ["A", "B"]},
    }
    design, parts = described("pressure ~ 0 + ward", "normal", schema)
    records = {"pressure": np.array([120.0, 140.0]), "ward": ["A", "B"]}
    scaled = outcome_values(design, "normal", parts.outcome, records)
    draws = {"coefficients": scaled[None], "sigma": np.ones([1])}
    model = types.SimpleNamespace(posterior_sample=lambda num, seed: draws)
    result = dpvi.Regression(design, parts, model)
    assert result.draws["ward[A]"] == pytest.approx(120.0)
    np.testing.assert_allclose(result.predict(records)["mean"], [120.0, 140.0], rtol=1e-5)
    # Priors about 0 reach where outcomes may lie.
    assert parts.coefficients[0][1] * parts.outcome.scale == pytest.approx(np.hypot(100.0, 140.0))
