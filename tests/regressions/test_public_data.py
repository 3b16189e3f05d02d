"""Public data in place of invented records: what noise hides of columns is taken from them."""

import dataclasses

import numpy as np
import pytest

import tfp_dpvi as dpvi
from tfp_dpvi.calibrated import centred_fit
from tfp_dpvi.regressions import Regression
from tfp_dpvi.regressions.words import in_own_words

pytest.importorskip("formulae")

NAMES = [f"x{number}" for number in range(6)]
FORMULA = f"y ~ {' + '.join(NAMES)}"
SCHEMA = {
    "y": {"type": "binary"},
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


def fit(**settings):
    data = table(150, 1)
    return dpvi.regression(
        FORMULA, data, "bernoulli", SCHEMA, epsilon=1.0, delta=1e-5, seed=3, **settings
    )


def test_intervals_rest_on_the_correlations_of_public_data(tmp_path, monkeypatch):
    """With the schema's invented records, whose columns are independent, they would be doubted."""
    # Chains, which take time, are not the subject.
    monkeypatch.setattr(centred_fit, "MOST_THIRD_ORDER", np.inf)
    public = {name: column for name, column in table(500, 2).items() if name != "y"}
    result = fit(public_data=public)
    assert not any("public_data" in sentence for sentence in result.warnings)
    assert any("rest on the correlations" in sentence for sentence in result.choices())
    assert result.choices()[-1] == "public inputs: 500 records of public_data"
    result.save(tmp_path / "fit.zip")
    assert Regression.load(tmp_path / "fit.zip").choices() == result.choices()
    checks = result.model.posterior_summary().checks
    (doubt,) = dataclasses.replace(checks, apart=1.0).warnings
    assert "pass public_data" in in_own_words(doubt, "bernoulli", {})


@pytest.mark.parametrize(
    ("public", "message"),
    [
        ({"x0": [1.0]}, "public_data"),
        ({name: [9.0] for name in NAMES}, "public_data"),
        ({name: [] for name in NAMES}, "public_data"),
    ],
)
def test_public_data_that_does_not_fit_spends_nothing(public, message):
    ledger = dpvi.PrivacyLedger()
    with pytest.raises(ValueError, match=message) as raised:
        fit(public_data=public, ledger=ledger)
    assert len(str(raised.value).splitlines()) <= 2
    assert ledger.num_releases == 0
