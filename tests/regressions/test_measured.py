"""Typical values and shares that are released for a share of the budget, in the fit's own ledger."""

import numpy as np
import pytest
from support.regressions import COLUMNS, FORMULA, OUTCOMES, simulated

import tfp_dpvi as dpvi
from tfp_dpvi.data import Schema

pytest.importorskip("formulae")

SCHEMA = Schema(
    {"y": OUTCOMES["bernoulli"], **COLUMNS, "income": dpvi.data.Continuous(1000.0, 300000.0)}
)


def fit(measured, **settings):
    arguments = {"epsilon": 2.0, "delta": 1e-5, "seed": 2, **settings}
    data = simulated("bernoulli")
    return dpvi.regression(FORMULA, data, "bernoulli", SCHEMA, measured=measured, **arguments)


@pytest.fixture(scope="module")
def measured():
    ledger = dpvi.PrivacyLedger()
    # Named twice, income is released once.
    names = iter(["income", "ward", "y", "sex", "income"])
    return fit(names, share=0.2, ledger=ledger), ledger


def test_both_releases_are_within_the_budget_of_one_ledger(measured):
    result, ledger = measured
    assert ledger.num_releases == 161
    report = result.model.privacy_report()
    assert 1.98 < report.epsilon <= 2.0
    assert report.delta == 1e-5
    assert ledger.epsilon(1e-5) == pytest.approx(report.epsilon)
    assert "means and variances of 6 columns" in str(report)
    text = result.report()
    assert "released from the records for 20% of epsilon and delta" in text
    # What was released was not declared.
    for name in ("income", "ward", "y", "sex"):
        described = " ".join(text.split(f"* {name}:")[1].split("\n  * ")[0].split())
        assert "declared" not in described
        assert "(released from the records)" in described
    assert "released" not in text.split("* age:")[1].split("\n  * ")[0]


def test_they_describe_the_records_better_than_the_bounds(measured):
    """Noise of the release is 8 standard errors of a share at most, and of the income less."""
    result, _ = measured
    data, columns = simulated("bernoulli"), result.design.schema.columns
    assert columns["income"].typical[0] == pytest.approx(data["income"].mean(), rel=0.2)
    assert columns["income"].location != SCHEMA.columns["income"].location
    shares = [np.mean(data["ward"] == level) for level in "ABC"]
    np.testing.assert_allclose(columns["ward"].shares, shares, atol=0.1)
    assert columns["y"].share == pytest.approx(np.mean(data["y"]), abs=0.1)
    assert columns["age"] == SCHEMA.columns["age"]


def test_a_file_keeps_them(measured, tmp_path):
    result, _ = measured
    result.save(tmp_path / "fit.zip")
    assert dpvi.Regression.load(tmp_path / "fit.zip").choices() == result.choices()


def test_a_ledger_with_too_little_left_is_not_charged(measured):
    _, ledger = measured
    with pytest.raises(ValueError, match="too little is left"):
        fit(("income",), ledger=ledger)
    assert ledger.num_releases == 161


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"measured": ("wage",)}, "does not use"),
        ({"measured": ("age",), "share": 1.5}, "share"),
        ({"measured": ("age",), "formula": "y ~ age + part", "missing": "indicator"}, None),
        ({"measured": ("part",), "formula": "y ~ part", "missing": "indicator"}, "may be missing"),
        ({"measured": ("age",), "data": {"age": [200], "y": [1]}, "formula": "y ~ age"}, "outside"),
    ],
)
def test_bad_input_spends_nothing(change, message):
    ledger = dpvi.PrivacyLedger(budget_epsilon=1e-3, budget_delta=1e-6)
    schema = Schema({**SCHEMA.columns, "part": dpvi.data.Continuous(0.0, 1.0, missing=True)})
    data = {**simulated("bernoulli"), "part": np.full(2000, 0.5)}
    arguments = {"formula": FORMULA, "data": data, "family": "bernoulli", "schema": schema}
    with pytest.raises((ValueError, RuntimeError), match=message) as caught:
        dpvi.regression(**{**arguments, **change}, epsilon=1.0, delta=1e-5, ledger=ledger)
    assert message is None or len(str(caught.value).splitlines()) <= 2
    assert ledger.num_releases == 0
