"""Censored outcomes: a record and its simulated twin are cut at the record's own limit."""

import numpy as np
import pytest
from scipy import optimize, stats
from support.siblings import slow

pytest.importorskip("formulae")

import tfp_dpvi as dpvi
from tfp_dpvi._tf import tf, tfd
from tfp_dpvi.data import Binary, Continuous, Integer, Schema
from tfp_dpvi.regressions.censored import Censored, log_beyond
from tfp_dpvi.regressions.checking import outcome_values
from tfp_dpvi.regressions.families import likelihood
from tfp_dpvi.regressions.fit import described
from tfp_dpvi.regressions.words import in_own_words

SCHEMA = Schema(
    {
        "days": Continuous(0.5, 4000.0, typical=(300.0, 300.0), unit="days"),
        "until": Continuous(1.0, 2000.0, unit="days"),
        "dead": Binary(),
        "x": Continuous(-2.0, 2.0),
    }
)
FORMULA = "censored(days, until) ~ x"
NUM = 3000
# Each family's distribution, and SciPy's.
PAIRS = {
    "weibull": (tfd.Weibull(1.5, 2.0), stats.weibull_min(1.5, 0, 2.0)),
    "exponential": (tfd.Exponential(0.5), stats.expon(0, 2.0)),
    "gamma": (tfd.Gamma(2.0, 1.5), stats.gamma(2.0, 0, 1 / 1.5)),
    "gamma by its log rate": (tfd.Gamma(0.4, log_rate=0.3), stats.gamma(0.4, 0, np.exp(-0.3))),
    "lognormal": (tfd.LogNormal(0.5, 0.7), stats.lognorm(0.7, 0, np.exp(0.5))),
    "normal": (tfd.Normal(1.0, 2.0), stats.norm(1.0, 2.0)),
}


def records(num=NUM, seed=3):
    """Exponential times with a mean of 400 days, followed for 100 to 1,500 days."""
    generator = np.random.default_rng(seed)
    x, until = generator.uniform(-2.0, 2.0, num), generator.uniform(100.0, 1500.0, num)
    days = np.clip(generator.exponential(400.0 * np.exp(0.4 * x)), 0.5, 4000.0)
    return {"days": days, "until": until, "x": x}


@pytest.fixture(scope="module")
def fitted():
    return dpvi.regression(
        FORMULA, records(), "exponential", SCHEMA, epsilon=3.0, delta=1e-5, seed=1
    )


def maximum_likelihood(data):
    """Returns coefficients and standard errors of exponential times, by Newton's method."""
    columns = np.stack([np.ones(len(data["x"])), data["x"]], axis=1)
    seen = np.minimum(data["days"], data["until"])
    best = np.array([np.log(seen.mean()), 0.0])
    for _ in range(20):
        hazard = seen * np.exp(-columns @ best)
        information = (columns * hazard[:, None]).T @ columns
        slope = columns.T @ (hazard - (data["days"] < data["until"]))
        best += np.linalg.solve(information, slope)
    return best, np.sqrt(np.diag(np.linalg.inv(information)))


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", PAIRS)
def test_the_density_is_scipys_and_at_the_limit_a_probability(name, side):
    times, scipys = PAIRS[name]
    limit = np.float32(1.3)
    censored = Censored(times, limit, side)
    beyond = scipys.logsf(limit) if side == "right" else scipys.logcdf(limit)
    np.testing.assert_allclose(censored.log_prob(limit), beyond, rtol=1e-4)
    within = limit * (0.9 if side == "right" else 1.1)
    np.testing.assert_allclose(censored.log_prob(within), scipys.logpdf(within), rtol=1e-4)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", PAIRS)
def test_what_is_simulated_is_cut_at_the_limit_with_its_probability(name, side):
    times, scipys = PAIRS[name]
    both = tfd.BatchBroadcast(times, [2])
    drawn = Censored(both, [1.0, 2.0], side).sample(4000, seed=[1, 2]).numpy()
    share = scipys.sf([1.0, 2.0]) if side == "right" else scipys.cdf([1.0, 2.0])
    meet = np.minimum if side == "right" else np.maximum
    np.testing.assert_array_equal(meet(drawn, [1.0, 2.0]), drawn)
    np.testing.assert_allclose((drawn == [1.0, 2.0]).mean(axis=0), share, atol=0.04)


@pytest.mark.parametrize(
    ("name", "limit", "side", "rtol"),
    [
        ("weibull", 40.0, "right", 1e-5),
        ("exponential", 300.0, "right", 1e-5),
        ("gamma", 90.0, "right", 0.05),
        ("gamma", 1e-16, "left", 1e-3),
        ("lognormal", 1e4, "right", 1e-4),
        ("normal", 60.0, "right", 1e-4),
    ],
)
def test_tails_that_vanish_in_32_bits_have_values_and_gradients(name, limit, side, rtol):
    times, scipys = PAIRS[name]
    at = tf.constant(limit)
    with tf.GradientTape() as tape:
        tape.watch(at)
        found = log_beyond(times, at, side)
    expected = scipys.logsf(limit) if side == "right" else scipys.logcdf(limit)
    np.testing.assert_allclose(found, expected, rtol=rtol)
    assert np.isfinite(tape.gradient(found, at))


def test_a_fit_is_maximum_likelihoods(fitted):
    """Noise is a small part of the variance here: within a standard error, and errors by 15 %."""
    best, errors = maximum_likelihood(records())
    found = fitted.summary()
    assert fitted.warnings == []
    assert found.index.tolist() == ["Intercept", "x"]
    assert (np.abs(found["mean"] - best) < errors).all()
    np.testing.assert_allclose(found["sd"], errors, rtol=0.15)


def test_a_linear_model_of_values_above_the_limit_of_an_assay_is_maximum_likelihoods():
    """A tobit model, of which a third is below the limit: means within a standard error."""
    generator = np.random.default_rng(5)
    x = generator.uniform(-2.0, 2.0, NUM)
    data = {"days": 600.0 + 200.0 * x + 300.0 * generator.normal(size=NUM), "x": x}
    data["days"] = np.clip(data["days"], 0.5, 4000.0)
    formula = "censored(days, 450, 'left') ~ x"
    result = dpvi.regression(formula, data, "normal", SCHEMA, epsilon=3.0, delta=1e-5, seed=5)

    def loss(point):
        times = stats.norm(1000.0 * (point[0] + point[1] * x), 1000.0 * np.exp(point[2]))
        y = data["days"]
        return -np.where(y > 450.0, times.logpdf(y), times.logcdf(450.0)).sum()

    fit = optimize.minimize(loss, [0.5, 0.1, -1.0], method="BFGS", options={"gtol": 1e-2})
    best = [1000.0 * fit.x[0], 1000.0 * fit.x[1], 1000.0 * np.exp(fit.x[2])]
    found = result.summary().loc[["Intercept", "x", "sigma"]]
    assert result.warnings == []
    assert (np.abs(found["mean"] - best) < found["sd"]).all()
    assert (found["sd"] < [12.0, 9.0, 9.0]).all()


def test_predictions_are_of_times_that_no_limit_hides(fitted, tmp_path):
    new = {"x": np.array([0.5, 2.0])}
    found = fitted.predict(new)
    draws = fitted.draws
    mean = [np.exp(draws["Intercept"] + each * draws["x"]).mean() for each in new["x"]]
    np.testing.assert_allclose(found["mean"], mean, rtol=0.01)
    assert (found["high"] > 1500.0).all()
    assert fitted.effects("x", num=3).shape == (3, 6)
    with pytest.raises(ValueError, match="'until' is no covariate"):
        fitted.effects("until")
    assert any("censored: of outcomes at or above until" in each for each in fitted.choices())
    fitted.save(tmp_path / "fit.zip")
    loaded = dpvi.Regression.load(tmp_path / "fit.zip")
    np.testing.assert_array_equal(loaded.predict(new), found)
    fitted.export(tmp_path / "served")
    served = tf.saved_model.load(str(tmp_path / "served")).signatures["predict"]
    exported = served(x=tf.constant(new["x"], tf.float32))["mean"]
    np.testing.assert_allclose(exported, found["mean"], rtol=1e-4)


def test_an_outcome_beyond_its_limit_is_the_limit():
    data = {"days": [100.0, 300.0, 200.0], "until": [200.0, 200.0, 200.0], "x": [0.0, 0.0, 0.0]}
    data = {name: np.array(values) for name, values in data.items()}
    for formula, expected in {
        FORMULA: [100.0, 200.0, 200.0],
        "censored(days, 150) ~ x": [100.0, 150.0, 150.0],
        "censored(days, most, 'left') ~ x": [150.0, 300.0, 200.0],
    }.items():
        design, parts = described(formula, "weibull", SCHEMA, constants={"most": 150.0})
        found = outcome_values(design, "weibull", parts.outcome, data)
        assert found.tolist() == expected
        inputs = parts.inputs(design.rows(data))
        assert inputs[:, -1].tolist() == ([200.0] * 3 if formula == FORMULA else [150.0] * 3)


def test_the_limit_of_a_linear_model_is_scaled_as_the_outcome_is():
    data = {"days": np.array([900.0]), "until": np.array([700.0]), "x": np.zeros(1)}
    design, parts = described(FORMULA, "normal", SCHEMA)
    found = outcome_values(design, "normal", parts.outcome, data)
    np.testing.assert_array_equal(parts.inputs(design.rows(data))[:, -1], found)
    np.testing.assert_allclose(found, (700.0 - 300.0) / 300.0, rtol=1e-6)


@pytest.mark.parametrize("unit", [None, "who"])
@pytest.mark.parametrize("family", ["exponential", "normal"])
def test_the_likelihood_reads_each_rows_limit(family, unit):
    formula = "censored(days, until) ~ 1" + (" + (1 | who)" if unit else "")
    design, parts = described(formula, family, SCHEMA, unit=unit)
    data = {"days": np.array([100.0, 900.0]), "until": np.array([200.0, 400.0])}
    start, sigma = np.float32(parts.intercept[0]), np.float32(1.0)
    params = {"intercept": start, "unit_sd": np.float32(1e-6), "sigma": sigma}
    x, y = parts.inputs(design.rows(data)), outcome_values(design, family, parts.outcome, data)
    found = likelihood(params, x, **parts.likelihood).log_prob(y)
    scipys = stats.expon(0, 300.0) if family == "exponential" else stats.norm(300.0, 300.0)
    # A density on the model's scale is one by its unit.
    unit_of = 1.0 if family == "exponential" else 300.0
    expected = [scipys.logpdf(100.0) + np.log(unit_of), scipys.logsf(400.0)]
    np.testing.assert_allclose(np.sum(found), np.sum(expected), rtol=1e-4)


@pytest.mark.parametrize(
    ("formula", "family", "message"),
    [
        ("censored(days, dead) ~ x", "weibull", "a status says who is censored"),
        ("Surv(days, dead) ~ x", "weibull", "a status says who is censored"),
        ("censored(days, 'right') ~ x", "weibull", "a status says who is censored"),
        ("censored(days, days) ~ x", "weibull", "a status says who is censored"),
        ("censored(days) ~ x", "weibull", "write censored"),
        ("censored(np.log(days), until) ~ x", "weibull", "write censored"),
        ("censored(days, until, 'interval') ~ x", "weibull", "the third argument"),
        ("censored(days, till) ~ x", "weibull", "'till', which the schema lacks"),
        ("censored(days, until) ~ x", "poisson", "use one of normal, lognormal, gamma"),
        ("censored(days, until) ~ x", "student", "use one of normal, lognormal, gamma"),
        ("censored(until, days) ~ x", "weibull", "upper at least the largest limit"),
        ("censored(days, 5000) ~ x", "weibull", "upper at least the largest limit"),
        ("censored(until, days, 'left') ~ x", "weibull", "lower at most the smallest limit"),
        ("censored(days, x) ~ 1", "weibull", "needs limits above 0"),
    ],
)
def test_other_censoring_is_refused_before_a_record_is_read(formula, family, message):
    with pytest.raises(ValueError, match=message) as caught:
        dpvi.regression(formula, {}, family, SCHEMA, epsilon=1.0, delta=1e-5)
    assert len(str(caught.value).splitlines()) <= 2


def test_limits_outside_of_their_bounds_are_refused_without_their_values():
    data = {"days": np.array([3.0]), "until": np.array([2345.0]), "x": np.zeros(1)}
    ledger = dpvi.PrivacyLedger()
    with pytest.raises(ValueError, match="'until' has values outside its public bounds") as caught:
        dpvi.regression(FORMULA, data, "weibull", SCHEMA, epsilon=1.0, delta=1e-5, ledger=ledger)
    assert "2345" not in str(caught.value)
    assert ledger.num_releases == 0


def test_a_limit_may_be_a_covariate_too():
    design, _ = described(FORMULA + " + until", "weibull", SCHEMA)
    assert design.limit_column == ""
    assert design.labels == ("x", "until")
    alone, _ = described("censored(days, 300) ~ 1", "weibull", SCHEMA)
    assert alone.rows({"z": np.zeros(2)}).limits.tolist() == [[300.0], [300.0]]


@pytest.mark.parametrize("family", [slow("weibull"), slow("lognormal"), slow("gamma")])
def test_intervals_are_calibrated_in_awkward_units(family):
    """12 sets of days and dollars, a half of them censored: 90 % intervals, by three errors."""
    own = {"lognormal": {"sigma": 0.7}}.get(family, {"alpha": 1.6})
    schema = {
        "days": {"type": "continuous", "lower": 1e-3, "upper": 1e5, "typical": [700.0, 600.0]},
        "until": {"type": "integer", "lower": 1, "upper": 4000, "typical": [1000.0, 600.0]},
        "age": {"type": "integer", "lower": 18, "upper": 90},
        "income": {
            "type": "continuous",
            "lower": 1000.0,
            "upper": 300000.0,
            "typical": [45000.0, 30000.0],
        },
    }
    generator = np.random.default_rng(0)
    rows = {
        "until": generator.integers(200, 1800, 20000),
        "age": np.round(np.clip(generator.normal(52.0, 14.0, 20000), 18.0, 90.0)),
        "income": np.clip(generator.lognormal(10.6, 0.6, 20000), 1000.0, 300000.0),
    }
    rehearsal = dpvi.rehearse_regression(
        "censored(days, until) ~ age + income",
        family,
        schema,
        num_records=5000,
        epsilon=1.0,
        delta=1e-5,
        truth={"Intercept": 7.9, "age": -0.02, "income": 8e-6, **own},
        num=12,
        public_data=rows,
        level=0.9,
        seed=5,
        verbose=0,
    )
    inside = [
        np.mean((np.array(row["low"]) <= row["truth"]) & (row["truth"] <= np.array(row["high"])))
        for row in rehearsal.rows[5000, 1.0]
    ]
    assert rehearsal.warned(5000, 1.0) <= 0.1
    assert abs(np.mean(inside) - 0.9) < 0.12, inside


def test_a_warning_advises_nothing_that_censored_outcomes_cannot_have():
    sentence = "the likelihood has the wrong shape: ranks (p = 0.001)."
    found = in_own_words(sentence, "gamma", {}, is_censored=True)
    assert "np.log" not in found
    assert "weibull" in found


def test_integers_may_be_censored_by_integers():
    schema = Schema({"weeks": Integer(1, 60), "until": Integer(1, 52), "x": Binary()})
    design, parts = described("censored(weeks, until) ~ x", "gamma", schema)
    data = {"weeks": np.array([60, 3]), "until": np.array([52, 50]), "x": np.zeros(2, int)}
    assert outcome_values(design, "gamma", parts.outcome, data).tolist() == [52.0, 3.0]
