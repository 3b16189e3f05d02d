"""Successes among trials: the number of trials is a record's own, and public in its bound alone."""

import numpy as np
import pytest

pytest.importorskip("formulae")

import tfp_dpvi as dpvi
from tfp_dpvi.data import Continuous, Integer, Schema
from tfp_dpvi.regressions import Design
from tfp_dpvi.regressions.checking import outcome_values
from tfp_dpvi.regressions.families import likelihood
from tfp_dpvi.regressions.fit import described

SCHEMA = Schema({"y": Integer(0, 30), "n": Integer(0, 30), "x": Continuous(-2.0, 2.0)})
NUM = 3000
RECORD = {"y": np.array([3, 4]), "n": np.array([5, 9]), "x": np.zeros(2)}


def records():
    generator = np.random.default_rng(4)
    x, n = generator.uniform(-2.0, 2.0, NUM), generator.integers(0, 31, NUM)
    share = 1.0 / (1.0 + np.exp(0.5 - 0.8 * x))
    return {"y": generator.binomial(n, share), "n": n, "x": x}


@pytest.fixture(scope="module")
def fitted():
    return dpvi.regression(
        "p(y, n) ~ x", records(), "binomial", SCHEMA, epsilon=3.0, delta=1e-5, seed=1
    )


def maximum_likelihood(data):
    """Returns coefficients and standard errors by Newton's method."""
    columns = np.stack([np.ones(NUM), data["x"]], axis=1)
    best = np.zeros(2)
    for _ in range(10):
        share = 1.0 / (1.0 + np.exp(-columns @ best))
        information = (columns * (data["n"] * share * (1.0 - share))[:, None]).T @ columns
        best += np.linalg.solve(information, columns.T @ (data["y"] - data["n"] * share))
    return best, np.sqrt(np.diag(np.linalg.inv(information)))


def test_a_fit_has_the_log_odds_of_maximum_likelihood(fitted):
    """Noise is a hundredth of the variance here: within a standard error, and errors by 15 %."""
    best, errors = maximum_likelihood(records())
    found = fitted.summary()
    assert fitted.warnings == []
    assert found.index.tolist() == ["Intercept", "x"]
    assert (np.abs(found["mean"] - best) < errors).all()
    assert (found["noise"] < 0.05).all()
    np.testing.assert_allclose(found["sd"], errors, rtol=0.15)


def test_predictions_are_successes_of_the_trials_of_new_records(fitted):
    new = {"n": np.array([0, 10, 20]), "x": np.full(3, 0.5)}
    found = fitted.predict(new)
    share = (1.0 / (1.0 + np.exp(-fitted.draws["Intercept"] - 0.5 * fitted.draws["x"]))).mean()
    np.testing.assert_allclose(found["mean"], share * new["n"], rtol=0.01)
    assert (found["high"] <= new["n"]).all()
    assert found["low"][2] > 0.0
    assert fitted.effects("x", num=3).shape == (3, 6)
    with pytest.raises(ValueError, match="n"):
        fitted.predict({"x": new["x"]})


def test_what_was_saved_has_its_trials(fitted, tmp_path):
    fitted.save(tmp_path / "fit.zip")
    loaded = dpvi.Regression.load(tmp_path / "fit.zip")
    new = {"n": np.array([10]), "x": np.array([0.5])}
    np.testing.assert_array_equal(loaded.predict(new), fitted.predict(new))


@pytest.mark.parametrize("trials", ["n", "30", "most"])
def test_a_row_alone_has_the_trials_of_its_row_in_the_table(trials):
    design = Design(f"proportion(y, {trials}) ~ 1 + x", SCHEMA, constants={"most": 30})
    data = records()
    together = design.rows(data).trials[:, 0]
    np.testing.assert_array_equal(together, data["n"] if trials == "n" else np.full(NUM, 30))
    for row in (0, 7):
        alone = {name: values[[row]] for name, values in data.items()}
        np.testing.assert_array_equal(design.rows(alone).trials[:, 0], together[[row]])


@pytest.mark.parametrize("unit", [None, "who"])
def test_the_likelihood_reads_each_rows_trials(unit):
    formula = "p(y, n) ~ 1" + (" + (1 | who)" if unit else "")
    design, parts = described(formula, "binomial", SCHEMA, unit=unit)
    params = {"intercept": np.float32(0.0), "unit_sd": np.float32(1e-6)}
    x = parts.inputs(design.rows(RECORD))
    found = likelihood(params, x, **parts.likelihood)
    expected = [10.0 / 32.0, 126.0 / 512.0]
    if unit is None:
        np.testing.assert_allclose(found.prob([3.0, 4.0]), expected, rtol=1e-5)
    together = found.log_prob(np.array([3.0, 4.0], np.float32))
    np.testing.assert_allclose(np.sum(together), np.sum(np.log(expected)), rtol=1e-5)


def test_more_successes_than_trials_are_refused_without_their_values_or_clipped():
    data = {"y": np.array([3, 17]), "n": np.array([5, 13]), "x": np.zeros(2)}
    design, parts = described("p(y, n) ~ x", "binomial", SCHEMA)
    with pytest.raises(ValueError, match="more successes than trials in 1 row") as caught:
        outcome_values(design, "binomial", parts.outcome, data)
    assert "17" not in str(caught.value)
    assert "13" not in str(caught.value)
    clipped, _ = described("p(y, n) ~ x", "binomial", SCHEMA, outside="clip")
    assert outcome_values(clipped, "binomial", parts.outcome, data).tolist() == [3.0, 13.0]


def test_trials_outside_of_their_bound_are_refused():
    data = {"y": np.array([3, 4]), "n": np.array([5, 41]), "x": np.zeros(2)}
    with pytest.raises(ValueError, match="'n' has values outside its public bounds") as caught:
        dpvi.regression("p(y, n) ~ x", data, "binomial", SCHEMA, epsilon=1.0, delta=1e-5)
    assert "41" not in str(caught.value)


@pytest.mark.parametrize(
    ("formula", "family", "message"),
    [
        ("y ~ x", "binomial", "need each other"),
        ("p(y, n) ~ x", "poisson", "need each other"),
        ("p(y, x) ~ 1", "binomial", "trials are a public integer"),
        ("p(y, y) ~ x", "binomial", "trials are a public integer"),
        ("p(y, 0) ~ x", "binomial", "trials are a public integer"),
        ("p(y, 2.5) ~ x", "binomial", "trials are a public integer"),
        ("p(y, n * 2) ~ x", "binomial", "trials are a public integer"),
        ("p(y, np.log1p(n)) ~ x", "binomial", "trials are a public integer"),
        ("p(y, m) ~ x", "binomial", "'m', which the schema lacks"),
        ("p(y) ~ x", "binomial", "write p"),
        ("p(np.log1p(y), n) ~ x", "binomial", "write p"),
        ("p(x, n) ~ 1", "binomial", "needs the outcome 'x' described as Integer"),
    ],
)
def test_other_trials_are_refused(formula, family, message):
    with pytest.raises(ValueError, match=message) as caught:
        described(formula, family, SCHEMA)
    assert len(str(caught.value).splitlines()) <= 2


def test_the_prior_of_the_intercept_is_about_declared_shares():
    declared = Schema(
        {
            "y": Integer(0, 30, typical=(2.0, 1.0)),
            "n": Integer(0, 30, typical=(10.0, 5.0)),
            "x": Continuous(-2.0, 2.0),
        }
    )
    assert described("p(y, n) ~ x", "binomial", SCHEMA)[1].intercept[0] == 0.0
    for trials, share in (("n", 0.2), ("20", 0.1)):
        parts = described(f"p(y, {trials}) ~ x", "binomial", declared)[1]
        assert parts.intercept[0] == pytest.approx(np.log(share / (1.0 - share)))
