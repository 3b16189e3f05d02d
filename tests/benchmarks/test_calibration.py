"""Rows, restarts and figures of `benchmarks/calibration.py`."""

from __future__ import annotations

import json
from typing import ClassVar

import calibration
import calibration_cells
import numpy as np
import pytest

from tfp_dpvi.bayes.model import BayesianModel


class FakeCell:
    """Instead of fits it returns rows that depend on the number of the data set alone."""

    ran: ClassVar[list[tuple[int, tuple[str, ...]]]] = []

    def __init__(self, name, seed, compiled):
        del name, seed, compiled

    def rows(self, number, methods):
        self.ran.append((number, tuple(methods)))
        values = {"inside": format(number % 4, "02b"), "width": 1.0, "crps": 0.1 * number}
        exact = {calibration.EXACT: {"inside": "11", "width": 1.0, "score": 1.0}}
        rows = {method: {**values, "score": 1.0 + number} for method in methods}
        return {**(exact if "centred" in methods else {}), **rows}


@pytest.fixture
def fake(monkeypatch, tmp_path):
    monkeypatch.setattr(calibration, "Cell", FakeCell)
    monkeypatch.setattr(calibration, "versions", lambda: "today")
    monkeypatch.setattr(FakeCell, "ran", [])
    return tmp_path / "a-1000-1.0.json"


def test_a_second_run_adds_only_what_is_missing(fake):
    calibration.extend("a-1000-1.0", fake, 3, 1, seed=7)
    everything = ("centred", "paired", "flat")
    assert FakeCell.ran == [(0, everything), (1, ("centred",)), (2, ("centred",))]
    FakeCell.ran.clear()
    calibration.extend("a-1000-1.0", fake, 4, 2, seed=7)
    assert FakeCell.ran == [(1, ("paired", "flat")), (3, ("centred",))]
    FakeCell.ran.clear()
    calibration.extend("a-1000-1.0", fake, 4, 2, seed=7)
    assert FakeCell.ran == []
    together = calibration.summary_of(json.loads(fake.read_text()))
    whole = fake.with_name("b-1000-1.0.json")
    calibration.extend("a-1000-1.0", whole, 4, 2, seed=7)
    once = calibration.summary_of(json.loads(whole.read_text()))
    for method in everything:
        assert together[method] == once[method], method


def test_data_sets_of_another_seed_are_not_pooled(fake):
    calibration.extend("a-1000-1.0", fake, 1, 0, seed=7)
    with pytest.raises(ValueError, match="seed 7"):
        calibration.extend("a-1000-1.0", fake, 2, 0, seed=8)


def row(inside, score, crps):
    return {"inside": inside, "width": 2.0, "score": score, "crps": crps}


def test_coverage_has_its_error_over_data_sets():
    rows = {str(number): row(inside, 1.0, 1.0) for number, inside in enumerate(["11", "10", "00"])}
    stored = {"cell": "a-1000-1.0", "rows": {"centred": rows}}
    figures = calibration.summary_of(stored)["centred"]
    assert figures["coverage"] == 0.5
    assert figures["error"] == pytest.approx(np.std([1.0, 0.5, 0.0], ddof=1) / 3**0.5, abs=1e-4)
    assert figures["by_coordinate"] == pytest.approx([2 / 3, 1 / 3], abs=1e-3)


def test_methods_are_compared_on_the_same_data_sets():
    rows = {str(number): row("1", 2.0, 1.0 + number) for number in range(4)}
    others = {"1": row("1", 4.0, 2.5), "3": row("1", 4.0, 4.3)}
    compared = calibration.compare(rows, others)
    assert (compared["num"], compared["score"]) == (2, 0.5)
    margin = 1.96 * np.std([-0.5, -0.3], ddof=1) / 2**0.5
    assert compared["crps"] == pytest.approx([-0.4, -0.4 - margin, -0.4 + margin], abs=1e-4)


def test_a_cell_draws_its_data_sets_by_number():
    cell = calibration.Cell("linear_dollars-5000-1.0", 3)
    first, second = cell.simulate(4), cell.simulate(5)
    again = calibration.Cell("linear_dollars-5000-1.0", 3).simulate(4)
    np.testing.assert_array_equal(first.y, again.y)
    assert np.abs(first.truth - second.truth).max() > 1.0
    assert first.truth.shape == (6,)


@pytest.mark.parametrize("name", list(calibration_cells.OTHER))
def test_every_new_model_draws_outcomes(name):
    kind = calibration_cells.MODELS[name]
    generator = np.random.default_rng(0)
    model = BayesianModel(*kind.make())
    params = model.prior.sample(seed=(0, 1))
    x, public = kind.inputs(generator, 20), kind.public(generator, 20)
    y = model.distribution_at(params, x).sample(seed=(0, 2)).numpy()
    assert y.shape == (20,)
    assert np.all(np.isfinite(model.log_prob(params, public, y)))
    if kind.outcomes is not None:
        assert kind.outcomes(params, x, generator).shape == (20,)


def test_cells_are_named_after_models_sizes_and_epsilons():
    assert len(calibration_cells.cells_of(calibration_cells.ORDER_ONE)) == 29
    assert calibration_cells.parse("poisson_size1.5-5000-3.0")[1:] == (5000, 3.0)
