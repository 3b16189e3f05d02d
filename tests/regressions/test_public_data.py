"""Public data in place of invented records: what noise hides of columns is taken from them."""

import dataclasses

import numpy as np
import pytest

import tfp_dpvi as dpvi
from tfp_dpvi.calibrated import centred_fit
from tfp_dpvi.data import Schema
from tfp_dpvi.regressions import Regression
from tfp_dpvi.regressions.fit import described, public_inputs
from tfp_dpvi.regressions.words import in_own_words

pytest.importorskip("formulae")

NAMES = [f"x{number}" for number in range(6)]
FORMULA = f"y ~ {' + '.join(NAMES)}"
SCHEMA = {
    "y": {"type": "binary"},
    "ward": {"type": "categorical", "categories": ["a", "b", "c"]},
    **{
        name: {"type": "continuous", "lower": -6.0, "upper": 6.0, "typical": [0.0, 1.0]}
        for name in NAMES
    },
}


def table(num, seed):
    """Columns with correlations of .8 and an outcome that follows their sum."""
    generator = np.random.default_rng(seed)
    own, common = generator.normal(size=(num, 6)), generator.normal(size=(num, 1))
    x = np.clip(np.sqrt(0.2) * own + np.sqrt(0.8) * common, -6.0, 6.0)
    y = generator.random(num) < 1.0 / (1.0 + np.exp(-x.sum(axis=1) / 3.0))
    return {"y": y.astype(int), **dict(zip(NAMES, x.T, strict=True))}


def fit(formula=FORMULA, **settings):
    data = {**table(150, 1), "ward": ["a", "b", "c"] * 50, "who": list(range(150))}
    return dpvi.regression(
        formula, data, "bernoulli", SCHEMA, epsilon=1.0, delta=1e-5, seed=3, **settings
    )


def test_intervals_rest_on_the_correlations_of_public_data(tmp_path, monkeypatch):
    """With the schema's invented records, whose columns are independent, they would be doubted."""
    # Chains, which take time, are not the subject.
    monkeypatch.setattr(centred_fit, "MOST_THIRD_ORDER", np.inf)
    result = fit(public_data=public(500))
    assert not any("public_data" in sentence for sentence in result.warnings)
    assert any("rest on the correlations" in sentence for sentence in result.choices())
    assert result.choices()[-1] == "public inputs: 500 records of public_data"
    result.save(tmp_path / "fit.zip")
    assert Regression.load(tmp_path / "fit.zip").choices() == result.choices()
    checks = result.model.posterior_summary().checks
    (doubt,) = dataclasses.replace(checks, apart=1.0).warnings
    assert "pass public_data" in in_own_words(doubt, "bernoulli", {})


def public(num, **changed):
    columns = {**table(num, 2), **changed}
    return {name: column for name, column in columns.items() if name != "y"}


@pytest.mark.parametrize(
    ("records", "settings", "message"),
    [
        ({"x0": [1.0]}, {}, "public_data: "),
        (public(200, x0=np.full(200, 9.0)), {}, "public_data: "),
        (public(0), {}, "public_data has 0 rows"),
        (public(60), {}, "public_data has 60 rows: pass at least 100"),
        (
            public(200),
            {"unit": "who", "max_rows_per_unit": 5},
            "has 68 persons of up to 5 rows: pass at least 100",
        ),
        (public(200, x3=np.zeros(200)), {}, "public_data: 'x3' is the same in all rows"),
        (
            {**public(200), "ward": np.array(["b", "c"] * 100)},
            {"formula": "y ~ x0 + (1 | ward)"},
            "public_data: a level of a group has no row",
        ),
        ({}, {"formula": "y ~ 1"}, "formula has none"),
    ],
)
def test_public_data_that_does_not_fit_spends_nothing(records, settings, message):
    ledger = dpvi.PrivacyLedger()
    with pytest.raises(ValueError, match=message) as raised:
        fit(public_data=records, ledger=ledger, **settings)
    assert len(str(raised.value).splitlines()) <= 2
    assert ledger.num_releases == 0


def test_sorted_public_data_is_not_cut():
    """Of many rows the first ones are used."""
    design, parts = described("y ~ x0", "bernoulli", Schema.of(SCHEMA))
    values = np.sort(np.random.default_rng(0).normal(size=5000))
    inputs = public_inputs(design, parts, {"x0": values})
    assert abs(np.median(inputs[:500, 0])) < 0.2
    np.testing.assert_allclose(np.sort(inputs[:, 0]), values, atol=0.1)
