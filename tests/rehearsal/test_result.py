"""Figures of a rehearsal from rows whose answers are known, without a fit."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tfp_dpvi.rehearsal import Rehearsal

SD = {200: 0.6, 800: 0.3, 3200: 0.15}


def row(estimate, sd, truth=0.5, **changes):
    figures = {
        "truth": [truth],
        "mean": [estimate],
        "sd": [sd],
        "low": [estimate - 1.96 * sd],
        "high": [estimate + 1.96 * sd],
        "failed": False,
        "doubtful": [],
        "warnings": [],
        "outside": 0.0,
    }
    return {**figures, **changes}


def rehearsal(num=2000, seed=0):
    generator = np.random.default_rng(seed)
    rows = {
        (size, 1.0): [row(each, sd) for each in generator.normal(0.5, sd, num)]
        for size, sd in SD.items()
    }
    return Rehearsal(("age",), tuple(SD), (1.0,), 1e-5, 0.95, 0, {"age": 0.5}, rows)


def test_power_and_coverage_of_normal_estimates():
    known = rehearsal()
    columns = known.columns(800, 1.0)
    # Binomial, beyond six standard errors: 2e-9.
    assert abs(columns["coverage"][0] - 0.95) < 6.0 * columns["coverage_error"][0]
    # The normal distribution's upper tail at 1.96 - 0.5 / 0.3, and a lower one of 1e-4.
    power = 0.3847
    assert abs(known.power("age")[800, 1.0] - power) < 6.0 * math.sqrt(power * 0.6153 / 2000)
    assert columns["width"][0] == pytest.approx(2.0 * 1.96 * 0.3)


def test_records_for_an_effect_lie_where_the_formula_says():
    # sd = 0.3 sqrt(800 / N), and power .8 needs 0.5 / sd = 1.96 + 0.8416.
    exact = 800.0 * (0.3 * 2.8016 / 0.5) ** 2
    needed = rehearsal().records_for("age")
    assert needed.num_records == pytest.approx(exact, rel=0.06)
    assert needed.low < needed.num_records < needed.high
    assert f"{needed.num_records:,} records" in str(needed)
    with pytest.raises(ValueError, match="beyond the largest num_records=3,200"):
        rehearsal().records_for("age", power=0.99999)
    with pytest.raises(ValueError, match="beyond the smallest num_records=200"):
        rehearsal().records_for("age", power=0.05)


def test_fits_without_a_posterior_show_no_effect_and_do_not_count_for_widths():
    rows = [row(3.0, 0.1)] * 6 + [row(0.0, 0.0, failed=True)] * 2
    rows += [row(3.0, 0.1, doubtful=[0], warnings=["the halves differ"])] * 2
    known = Rehearsal(("age",), (10,), (1.0,), 1e-5, 0.95, 0, {"age": 3.0}, {(10, 1.0): rows})
    columns = known.columns(10, 1.0)
    assert columns["power"][0] == pytest.approx(0.8)
    assert columns["doubtful"][0] == pytest.approx(0.4)
    assert columns["width"][0] == pytest.approx(0.392)
    assert known.warned(10, 1.0) == pytest.approx(0.4)
    assert known.warnings(10, 1.0)["the noise left no posterior"] == pytest.approx(0.2)
    failed = Rehearsal(
        ("age",), (10,), (1.0,), 1e-5, 0.95, 0, {}, {(10, 1.0): [row(0.0, 0.0, failed=True)] * 3}
    )
    assert math.isnan(failed.columns(10, 1.0)["width"][0])
    assert failed.warned(10, 1.0) == 1.0


def test_power_without_a_given_effect_is_refused():
    known = Rehearsal(("age",), (10,), (1.0,), 1e-5, 0.95, 0, {}, {(10, 1.0): [row(1.0, 0.1)] * 3})
    with pytest.raises(ValueError, match="needs a given effect"):
        known.power("age")
    with pytest.raises(ValueError, match="were not rehearsed"):
        known.columns(11, 1.0)
    assert "drawn from the prior: age" in str(known)


def test_outcomes_beyond_the_bounds_are_said():
    rows = {(10, 1.0): [row(1.0, 0.1, outside=0.2)] * 3}
    known = Rehearsal(("age",), (10,), (1.0,), 1e-5, 0.95, 0, {}, rows)
    assert "WARNING: 20.0% of the simulated outcomes are outside" in str(known)


def test_pictures_of_power_and_of_widths():
    axes = rehearsal(num=20).plot()
    assert "excludes 0, at 0.5" in axes.get_ylabel()
    known = Rehearsal(("age",), (10,), (1.0,), 1e-5, 0.95, 0, {}, {(10, 1.0): [row(1.0, 0.1)] * 3})
    assert known.plot().get_ylabel() == "width of the 95% interval of age"
