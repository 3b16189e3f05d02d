"""`dpvi.rehearse_regression`: truths in the units of the formula, and figures in them."""

from __future__ import annotations

import numpy as np
import pytest
from support.regressions import COLUMNS, FORMULA, OUTCOMES, SLOPES

import tfp_dpvi as dpvi
from tfp_dpvi.data import Categorical
from tfp_dpvi.regressions.families import make_prior
from tfp_dpvi.regressions.fit import described
from tfp_dpvi.rehearsal.formula import _on_model_scale
from tfp_dpvi.rehearsal.simulated import Truth

BUDGET = {"epsilon": 1.0, "delta": 1e-5}
TRUTHS = {
    "normal": {"age": 100.0, "sigma": 9000.0, "Intercept": 20000.0, "sd(1|g)": 500.0},
    "bernoulli": {**SLOPES, "Intercept": -1.0, "1|g[b]": 0.3},
    "poisson": {"age": 0.02, "sd(1|g)": 0.2},
    "negative_binomial": {"age": 0.02, "alpha": 0.4, "Intercept": 0.2},
    "categorical": {"low: age": 0.02, "high: Intercept": -1.0, "high: ward[B]": 0.4},
    "ordinal": {"age": 0.02, "threshold[no|low]": -1.0, "threshold[low|high]": 0.5},
}


@pytest.mark.parametrize("family", TRUTHS)
def test_a_truth_in_the_units_of_the_formula_comes_back(family):
    formula = FORMULA + ("" if family == "categorical" else " + (1 | g)")
    schema = dpvi.Schema({**COLUMNS, "y": OUTCOMES[family], "g": Categorical(["a", "b", "c"])})
    design, parts = described(formula, family, schema)
    draw = Truth(make_prior(**parts.prior), _on_model_scale(TRUTHS[family], design, parts))
    params = {name: np.asarray(part)[None] for name, part in draw(np.array([0, 5])).items()}
    in_units = parts.in_units(params, design)
    for name, value in TRUTHS[family].items():
        assert in_units[name][0] == pytest.approx(value, rel=1e-4), name


def test_truths_that_do_not_fit_are_refused():
    design, parts = described(FORMULA, "ordinal", {**schema_of("ordinal")})
    for truth, message in (
        ({"height": 1.0}, "truth names 'height', which the regression has not"),
        ({"threshold[no|low]": 0.0}, "all thresholds"),
        ({"age": float("inf")}, "must be finite"),
        ({}, "must be a dict"),
    ):
        with pytest.raises(ValueError, match=message):
            _on_model_scale(truth, design, parts)


def schema_of(family):
    return dpvi.Schema({**COLUMNS, "y": OUTCOMES[family]}).to_dict()


def test_a_rehearsal_is_in_the_units_of_the_formula_and_says_what_was_true(tmp_path):
    settings = {"num_records": 600, **BUDGET, "truth": {"age": 0.03}, "num": 2, "verbose": 0}
    rehearsal = dpvi.rehearse_regression(
        "y ~ age", "bernoulli", schema_of("bernoulli"), **settings, path=tmp_path / "rehearsal.json"
    )
    assert rehearsal.names == ("Intercept", "age")
    columns = rehearsal.columns(600, 1.0)
    assert columns["truth"][1] == pytest.approx(0.03)
    # A standard deviation of 18 years: the interval of a logit's slope is a few hundredths wide.
    assert 0.01 < columns["width"][1] < 0.08
    assert abs(columns["bias"][1]) < 0.05
    assert "true values: Intercept" in str(rehearsal)
    with pytest.raises(ValueError, match="has fits with another"):
        dpvi.rehearse_regression(
            "y ~ income",
            "bernoulli",
            schema_of("bernoulli"),
            path=tmp_path / "rehearsal.json",
            **{**settings, "truth": {"income": 1e-5}},
        )
