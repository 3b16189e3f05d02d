"""`examples/drawn_regressions.py`: the twelve are those of the seed, and all of them are in the page."""

import importlib
import json
import pathlib

import numpy as np
import pandas as pd
import pytest

from tfp_dpvi.regressions.fit import described

for name in ("formulae", "statsmodels", "sklearn"):
    pytest.importorskip(name)

ROOT = pathlib.Path(__file__).parents[2]
FIGURES = json.loads((ROOT / "docs/figures/regressions/drawn.json").read_text())


@pytest.fixture(scope="module")
def example():
    return importlib.import_module("drawn_regressions")


def test_the_results_are_those_of_all_that_the_seed_draws(example):
    assert list(FIGURES["cases"]) == example.drawn()
    assert FIGURES["list"] == list(example.CANDIDATES)
    page = (ROOT / "docs/regression.md").read_text()
    assert example.as_table(FIGURES["cases"]) in page


def test_each_of_them_has_a_schema_that_fits_its_formula(example):
    for name in example.drawn():
        case = example.CANDIDATES[name]
        described(case.formula, case.family, example.DATA[case.data].schema)


def test_the_fit_without_privacy_is_that_of_exponential_times_in_closed_form(example):
    generator = np.random.default_rng(0)
    data = pd.DataFrame({"x": np.repeat([0, 1], 200), "t": generator.exponential(3.0, 400)})
    means, errors = example.maximum_likelihood("exponential", "censored(t, 4) ~ x", data)
    seen, events = (
        each.groupby(data["x"]).sum()
        for each in (data["t"].clip(upper=4.0), (data["t"] < 4.0).astype(float))
    )
    np.testing.assert_allclose(means["x"], np.log(seen[1] / events[1] * events[0] / seen[0]), 1e-4)
    np.testing.assert_allclose(errors["x"], np.sqrt(1.0 / events[0] + 1.0 / events[1]), rtol=1e-3)
