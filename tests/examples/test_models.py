"""The models of `examples/models/`: what each simulates, and at a small size what each learns."""

from __future__ import annotations

import importlib
import json
import pathlib
import re
import sys

import numpy as np
import pytest

from tfp_dpvi._tf import tf

FOLDER = pathlib.Path(__file__).parents[2] / "examples" / "models"
sys.path.append(str(FOLDER))
shared = pytest.importorskip("shared")
pytest.importorskip("matplotlib")

NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "shared")
# Not those of persons, whose visits are simulated together.
OF_ROWS = [name for name in NAMES if name != "longitudinal"]
# Means without noise are that far from the exact ones, in exact standard deviations: 600 steps of Adam end within 0.2, four
# chains' means are within 0.1. Correlated parameters keep a mean-field normal further off.
MOST_OFF = {"full_covariance_mixture": 0.5, "factor_analysis": 0.5}


def family(name):
    return importlib.import_module(name)


def test_there_are_twelve_of_them_each_of_at_most_65_lines():
    assert len(NAMES) == 12
    assert {
        name: len((FOLDER / f"{name}.py").read_text().splitlines()) for name in NAMES if _long(name)
    } == {}


def _long(name):
    return len((FOLDER / f"{name}.py").read_text().splitlines()) > 65


@pytest.mark.parametrize("name", OF_ROWS)
def test_it_simulates_records_that_its_likelihood_takes(name):
    """Exact: a log density a record, finite, and the same from the same seed."""
    x, y, truth = shared.simulate(family(name), 20, 3)
    again = shared.simulate(family(name), 20, 3)
    tf.nest.map_structure(
        np.testing.assert_array_equal, tf.nest.flatten((x, y, truth)), tf.nest.flatten(again)
    )
    given = () if y is None else (x,)
    logs = family(name).likelihood(truth, *given).log_prob(x if y is None else y)
    assert logs.shape == (20,)
    assert np.isfinite(logs).all()
    assert (shared.made_up(family(name)) is None) == (y is None)


def test_intervals_hold_truths_within_their_quantiles():
    draws = np.linspace(0.0, 1.0, 1001)[:, None] * np.ones(4)
    assert shared.inside(draws, np.array([0.004, 0.006, 0.994, 0.996])).tolist() == [
        False,
        True,
        True,
        False,
    ]


def test_hidden_outcomes_are_not_read():
    """Whatever stands where a measurement is missing."""
    x, y, truth = shared.simulate(family("missing_values"), 20, 3)
    changed = np.where(x["measured"], y, 1e6).astype("float32")
    logs = [
        family("missing_values").likelihood(truth, x).log_prob(one).numpy() for one in (y, changed)
    ]
    np.testing.assert_array_equal(*logs)
    shown = np.where(x["measured"], 1e6, y).astype("float32")
    assert np.any(family("missing_values").likelihood(truth, x).log_prob(shown).numpy() != logs[0])


def test_a_censored_time_counts_as_the_chance_of_a_later_one():
    """Against a sum over a grid: the density up to the limit and the mass at it are one."""
    weibull = family("censored_weibull")
    params = {
        "intercept": tf.constant(0.1),
        "slopes": tf.constant([0.2, -0.3]),
        "shape": tf.constant(1.4),
    }
    times = np.linspace(1e-4, 1.5, 20_001).astype("float32")
    x = {
        "patient": np.tile(np.float32([[0.5, 1.0]]), (len(times), 1)),
        "limit": np.full(len(times), 1.5, "float32"),
    }
    density = np.exp(weibull.likelihood(params, x).log_prob(times).numpy())
    assert np.trapezoid(density[:-1], times[:-1]) + density[-1] == pytest.approx(1.0, abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_ROWS)
def test_it_runs_and_is_right_without_noise(name, tmp_path, capsys):
    # The spread of 20 areas of 50 persons has a posterior from which neither chain nor fit comes back.
    num = 10_000 if name == "small_areas" else 1_000
    result = shared.main(family(name), [f"--num={num}", f"--output={tmp_path}"])
    assert "within" in capsys.readouterr().out
    saved = json.loads((tmp_path / f"{name}.json").read_text())
    assert saved == json.loads(json.dumps(result))
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert max(saved["off"]) < MOST_OFF.get(name, 0.4)
    assert saved["calibrated"] == (name != "flow")
    assert 0.9 < saved["epsilon"] <= 1.0
    for kind in ("exact", "without noise", "private"):
        assert np.isfinite(saved[kind]["mean"]).all()
        assert np.min(saved[kind]["sd"]) > 0
    if saved[
        "calibrated"
    ]:  # Each at 6 standard deviations: no exact posterior lies outside once in 1e6 runs.
        away = np.abs(np.array(saved["private"]["mean"]) - saved["exact"]["mean"])
        assert np.all(away < 6 * np.hypot(saved["private"]["sd"], saved["exact"]["sd"]))


@pytest.mark.slow
def test_patients_with_several_visits_have_the_parameters_that_they_were_drawn_from():
    """Each within 6 standard deviations: false alarms below 1e-8."""
    draws, truth = family("longitudinal").fitted(3.0, num=1000)
    away = np.abs(draws.mean(axis=0) - truth) / draws.std(axis=0)
    assert away.max() < 6.0
    assert draws.std(axis=0).max() < 0.3


@pytest.mark.slow
def test_chains_find_a_posterior_that_is_known():
    """1,600 draws of four chains beside the exact betas: means within 0.25 standard deviations, 6 of theirs at 600 free draws."""
    network = family("bayesian_network")
    x, _, truth = shared.simulate(network, 400, 5)
    exact = shared.flat(network.closed_form(x, None))
    start = tf.nest.map_structure(lambda part: tf.stack([part] * 3), truth)
    found = shared.flat(shared.chain_draws(network, x, None, start))
    np.testing.assert_array_less(
        np.abs(found.mean(axis=0) - exact.mean(axis=0)) / exact.std(axis=0), 0.25
    )
    np.testing.assert_allclose(found.std(axis=0), exact.std(axis=0), rtol=0.25)


def test_the_page_shows_the_code_as_it_is():
    page = (FOLDER.parents[1] / "docs" / "models.md").read_text()
    blocks = re.findall(r"<!-- (\w+) -->\n```py\n(.*?)```", page, flags=re.DOTALL)
    assert sorted(name for name, _ in blocks) == NAMES
    for name, code in blocks:
        assert code in (FOLDER / f"{name}.py").read_text(), name
