"""Regressions of persons with several rows: a column of persons, and an intercept of each."""

import numpy as np
import pandas as pd
import pytest

import tfp_dpvi as dpvi

pytest.importorskip("formulae")

COLUMNS = {"age": {"type": "continuous", "lower": 20, "upper": 80, "typical": [50, 12]}}
OUTCOMES = {
    "normal": {"type": "continuous", "lower": -40, "upper": 160, "typical": [50, 20]},
    "bernoulli": {"type": "binary", "share": 0.5},
    "poisson": {"type": "integer", "lower": 0, "upper": 200, "typical": [2, 3]},
    "ordinal": {"type": "integer", "lower": 1, "upper": 3},
}
TRUTHS = {
    "normal": {"age": 0.5, "sd(1|person)": 10.0, "sigma": 5.0},
    "bernoulli": {"age": 0.04, "sd(1|person)": 1.0},
    "poisson": {"age": 0.02, "sd(1|person)": 0.5},
    "ordinal": {"age": 0.04, "sd(1|person)": 1.0},
}
FORMULA = "y ~ age + (1 | person)"


def frame(family, num=150, seed=0):
    """Persons with 1 to 6 rows, in no order."""
    rng = np.random.default_rng(seed)
    person = rng.permutation(np.repeat(np.arange(num), rng.integers(1, 7, num)))
    age = np.clip(rng.normal(50, 12, len(person)), 20, 80)
    truth = TRUTHS[family]
    score = truth["age"] * (age - 50) + truth["sd(1|person)"] * rng.normal(size=num)[person]
    y = {
        "normal": lambda: np.clip(50 + score + 5.0 * rng.normal(size=len(score)), -40, 160),
        "bernoulli": lambda: (rng.random(len(score)) < 1 / (1 + np.exp(-score))).astype(int),
        "poisson": lambda: np.minimum(rng.poisson(np.exp(0.3 + score)), 200),
        "ordinal": lambda: 1 + np.digitize(score + rng.logistic(size=len(score)), [-1.0, 1.0]),
    }[family]()
    names = np.array([f"P{number:05}" for number in person])
    return pd.DataFrame({"y": y, "age": age, "person": names})


def fit(family, data, formula=FORMULA, **settings):
    schema = {"y": OUTCOMES[family], **COLUMNS}
    settings = {"epsilon": 3.0, "delta": 1e-5, "unit": "person", "max_rows_per_unit": 6, **settings}
    return dpvi.regression(formula, data, family, schema, **settings)


@pytest.mark.slow
def test_persons_in_results_and_files(tmp_path):
    """The scale of intercepts in the outcome's units; predictions are of persons who are not known."""
    result = fit("normal", frame("normal"))
    text = " ".join(result.report().split())
    assert "y ~ age + (1 | person) (normal, 150 persons, epsilon 3" in text
    assert (
        "persons: at most 6 rows of each person; of persons with more, 6 chosen at random" in text
    )
    assert "P00" not in text
    assert set(result.draws) == {"Intercept", "age", "sigma", "sd(1|person)"}
    new = pd.DataFrame({"age": [40.0, 60.0]})
    predicted = result.predict(new)
    draws = result.draws
    width = (predicted["high"] - predicted["low"]).mean()
    both = np.hypot(draws["sigma"].mean(), draws["sd(1|person)"].mean())
    assert 0.8 < width / (2 * 1.88 * both) < 1.6
    result.save(tmp_path / "persons.zip")
    again = dpvi.regressions.Regression.load(tmp_path / "persons.zip")
    assert again.predict(new).equals(predicted)


@pytest.mark.slow
@pytest.mark.parametrize("family", OUTCOMES)
def test_effects_and_scales_of_persons(family):
    result = fit(family, frame(family, num=1000), seed=1)
    for name, value in TRUTHS[family].items():
        draws = result.draws[name]
        assert abs(draws.mean() - value) < 4.0 * draws.std(), name
        assert draws.std() < 0.35 * value, name


def test_a_column_of_the_outcome_before_is_named():
    data = frame("poisson").sort_values("person", kind="stable")
    data["age"] = data.groupby("person")["y"].shift(fill_value=0) + 20.0
    ledger = dpvi.PrivacyLedger()
    with pytest.raises(ValueError, match=r"x\['age'\] is the outcome of the person's row before"):
        fit("poisson", data, ledger=ledger)
    assert ledger.num_releases == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"unit": "patient", "formula": "y ~ age"}, "unit='patient' is no column of data"),
        ({"max_rows_per_unit": None}, "max_rows_per_unit"),
        ({"unit": None, "formula": "y ~ age"}, "max_rows_per_unit=6 needs unit="),
        ({"max_rows_per_unit": None}, "needs max_rows_per_unit=: the public"),
        ({"unit": None}, "'person', which the schema lacks"),
        ({"unit": "age", "formula": "y ~ age"}, "also a covariate"),
        ({"formula": "y ~ age + (age | person)"}, r"than \(1 \| person\), which alone"),
        ({"formula": "y ~ age + (1 | person / ward)"}, r"than \(1 \| person\), which alone"),
    ],
)
def test_what_is_refused(settings, message):
    with pytest.raises((ValueError, TypeError), match=message) as error:
        fit("normal", frame("normal"), **settings)
    assert len(str(error.value).splitlines()) <= 2
