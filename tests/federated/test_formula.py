"""Regressions as the model of a study: hospitals' effects by the formula, tables, and the units of the formula."""

import types

import numpy as np
import pytest

from tfp_dpvi.federated import MessageError, RegressionStudy, StudyDraws, Synchronous, simulate

SCHEMA = {
    "ill": {"type": "binary"},
    "age": {"type": "continuous", "lower": 18.0, "upper": 90.0},
    "visits": {"type": "integer", "lower": 0, "upper": 20},
    "trials": {"type": "integer", "lower": 1, "upper": 20},
    "pressure": {"type": "continuous", "lower": 60.0, "upper": 200.0},
}


def table(num, seed, intercept=0.0):
    rng = np.random.default_rng(seed)
    age = rng.uniform(20.0, 88.0, num)
    odds = intercept + 0.05 * (age - 54.0)
    ill = (rng.random(num) < 1.0 / (1.0 + np.exp(-odds))).astype("int64")
    return {"age": age, "ill": ill, "other": age}


@pytest.fixture(scope="module")
def study():
    return RegressionStudy(
        "ill ~ age + (1 | hospital)", "bernoulli", SCHEMA, local_steps=5, calibrated=True
    )


def test_hospitals_give_tables_and_get_intercepts_of_their_own(study):
    intercepts = {"berlin": 1.0, "munich": -1.0, "rome": 0.0}
    records = {
        name: table(2000, seed, value) for seed, (name, value) in enumerate(intercepts.items())
    }
    history = simulate(
        study, records, epsilon=8.0, schedule=Synchronous(rounds=3), verbose=0, seed=1
    )
    assert history.refused == []
    shown = study.summary(history.calibrated)
    rows = {
        name: {key: values[place] for key, values in shown.columns.items()}
        for place, name in enumerate(shown.names)
    }
    assert rows["age"]["sd"] < 0.01, "in the units of the formula"
    assert abs(rows["age"]["mean"] - 0.05) < 4.0 * rows["age"]["sd"]
    assert rows["sd of Intercept"]["5%"] < 1.0 < rows["sd of Intercept"]["95%"]
    found = [rows[f"Intercept at {name}"]["mean"] for name in intercepts]
    # Differences of hospitals' intercepts are 2 and 1.
    assert found[0] - found[1] == pytest.approx(2.0, abs=0.5)
    assert found[0] - found[2] == pytest.approx(1.0, abs=0.5)
    own = history.calibrated.at("berlin")
    assert float(np.mean(own["intercept"])) == pytest.approx(1.0, abs=0.5)


@pytest.mark.parametrize(
    ("formula", "family", "local"),
    [
        ("ill ~ age", "bernoulli", None),
        pytest.param(
            "pressure ~ age + (age | site)",
            "normal",
            ("coefficients[0]", "intercept"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "p(visits, trials) ~ (0 + age | site) + age",
            "binomial",
            ("coefficients[0]",),
            marks=pytest.mark.slow,
        ),
        pytest.param("visits ~ (1 | site)", "poisson", ("intercept",), marks=pytest.mark.slow),
    ],
)
def test_formulas_name_what_differs(formula, family, local):
    made = RegressionStudy(formula, family, SCHEMA, hospital="site")
    assert made.point is not None, made.not_calibrated
    assert (None if made.local is None else made.local.names) == local


def test_the_summary_names_effects_on_parameters_without_a_unit(study):
    """As of `local={"kappa": 1.0}`: a KeyError took the place of the table."""
    parameters = {"intercept": np.zeros(8), "coefficients": np.ones([8, 1])}
    effects = {"intercept": np.ones(8), "kappa": np.full(8, 2.0)}
    posterior = types.SimpleNamespace(
        draws=lambda seed: StudyDraws(parameters, effects, {"rome": effects}),
        calibrated=types.SimpleNamespace(checks=None),
        faults=(),
        notes=(),
    )
    shown = study.summary(posterior)
    own = ["sd of Intercept", "sd of kappa", "Intercept at rome", "kappa at rome"]
    assert shown.names[2:] == own
    np.testing.assert_allclose(shown.columns["mean"][2:], [1.0, 2.0, 1.0, 2.0])


def test_effects_of_a_hospital_are_independent_with_one_bar_and_with_two():
    names = ("coefficients[0]", "intercept")
    for bars in ("|", "||"):
        own = RegressionStudy(f"ill ~ age + (age {bars} hospital)", "bernoulli", SCHEMA)
        assert tuple(sorted(own.local.names)) == names


def test_what_does_not_fit_is_refused(study):
    with pytest.raises(ValueError, match="no common effect"):
        RegressionStudy("ill ~ 1 + (age | hospital)", "bernoulli", SCHEMA)
    for formula in ("ill ~ age + pressure + (1 | hospital)*age", "ill ~ age - (1 | hospital)"):
        with pytest.raises(ValueError, match="effects of hospitals are added"):
            RegressionStudy(formula, "bernoulli", SCHEMA)
    with pytest.raises(ValueError, match="leave y out"):
        study.columns.arrays(table(9, 0), np.zeros(9))
    with pytest.raises(ValueError, match="age"):
        study.columns.arrays({"age": np.array([180.0]), "ill": np.array([1])}, None)
    other = RegressionStudy("ill ~ age", "bernoulli", SCHEMA, local_steps=5)
    with pytest.raises(MessageError, match="formula"):
        other.terms.check_same(study.terms.identity)
