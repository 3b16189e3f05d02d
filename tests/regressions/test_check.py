"""Checks of a regression: bins that follow from the schema, one call that spends once, words and refusals."""

import numpy as np
import pytest
from support.regressions import COLUMNS, simulated

import tfp_dpvi as dpvi
from tfp_dpvi.data import Integer, Schema
from tfp_dpvi.regressions import Design
from tfp_dpvi.regressions.checking import column_bins

SCHEMA = Schema({**COLUMNS, "y": Integer(0, 300, typical=(3.0, 3.0))})
FORMULA = "y ~ age + ward"


def test_bins_follow_from_the_schema_alone():
    data = simulated("poisson", num=400)
    design = Design("y ~ age + income + ward + sex", SCHEMA)
    bins = column_bins(design, None, data)
    assert list(bins) == ["age", "income"]
    assert bins["age"].labels == ["below 39", "39 to 50", "50 to 59", "59 to 70", "from 70"]
    counts = np.bincount(bins["age"].codes, minlength=5)
    assert counts.sum() == 400
    assert counts.min() > 20
    few = {name: column[:7] for name, column in data.items()}
    assert column_bins(design, None, few)["income"].labels == bins["income"].labels
    chosen = column_bins(design, ["ward", "sex"], data)
    assert chosen["ward"].labels == ("A", "B", "C")
    assert chosen["sex"].codes.tolist() == data["sex"].tolist()
    assert not chosen["ward"].ordered
    with pytest.raises(ValueError, match=r"\['town'\], which are no covariates: use age, income"):
        column_bins(design, ["town"], data)


def test_bad_input_is_refused_before_a_fit():
    data = simulated("poisson", num=400)
    settings = {"epsilon": 1.0, "delta": 1e-5, "ledger": dpvi.PrivacyLedger()}
    for bad, message in (
        ({"check_columns": ["age"]}, "needs checks"),
        ({"checks": 1.0}, "checks=1 would leave nothing"),
        ({"checks": 0.1, "check_columns": ["wards"]}, "no covariates"),
        ({"checks": 0.1, "check_columns": 3}, r"check_columns has \[3\], which are no"),
    ):
        with pytest.raises(ValueError, match=message):
            dpvi.regression(FORMULA, data, "poisson", SCHEMA, **settings, **bad)
    assert settings["ledger"].num_releases == 0


@pytest.mark.slow
def test_a_regression_with_checks(tmp_path):
    """Overdispersed counts under Poisson: it is said, in one call, and kept in the file."""
    data = simulated("negative_binomial", num=800)
    settings = {"epsilon": 4.0, "delta": 1e-5, "seed": 3}
    fit = dpvi.regression(
        FORMULA, data, "poisson", SCHEMA, checks=0.2, check_columns=["age"], **settings
    )
    assert (
        "counts vary more than the model says: try negative binomial" in fit.private_checks.verdict
    )
    assert fit.model.privacy_ledger.epsilon(1e-5) <= 4.0
    assert "counts vary more" in fit.report()
    assert "PIT values" in fit.check_table().failed
    fit.save(tmp_path / "fit.zip")
    again = dpvi.Regression.load(tmp_path / "fit.zip")
    assert again.private_checks.to_dict() == fit.private_checks.to_dict()
    for bad in ({"columns": ["wards"]}, {"unit": "ward"}):
        with pytest.raises(ValueError, match=r"no covariates|column of persons"):
            again.check(data, epsilon=0.1, **bad)
