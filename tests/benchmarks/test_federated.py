"""The study of several hospitals: divisions, cells that are not run twice, and small quick versions of it."""

import json
import random

import federated_studies as study
import numpy as np
import pytest


def data(num=600, width=4, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(num + 400, width)).astype("float32")
    y = (x @ rng.normal(size=width) + rng.logistic(size=len(x)) > 0).astype("int32")
    return study.Split(x[:num], y[:num], x[num:], y[num:])


def test_divisions():
    """Sizes within 7 standard deviations of what was meant: false alarms below 1e-10."""
    y = (np.arange(40_000) % 4 == 0).astype(int)
    rng = np.random.default_rng(random.getrandbits(32))
    sizes = np.bincount(study.divided(y, "balanced", 10, rng))
    assert set(sizes) == {4000}
    sizes = np.bincount(study.divided(y, "by size", 10, rng), minlength=10)
    assert np.all(np.abs(sizes[:5] - 7200) <= 7 * np.sqrt(7200)), sizes
    assert np.all(np.abs(sizes[5:] - 800) <= 7 * np.sqrt(800)), sizes
    where = study.divided(y, "by label", 10, rng)
    assert abs(np.mean(where[y == 1] < 5) - 0.95) <= 7 * np.sqrt(0.95 * 0.05 / 10_000)
    assert abs(np.mean(where[y == 0] < 5) - 0.05) <= 7 * np.sqrt(0.95 * 0.05 / 30_000)


def test_cells_are_not_run_twice(tmp_path, monkeypatch, capsys):
    ran = []

    def run(cell):
        ran.append(cell)
        return {**cell._asdict(), "accuracy": 0.8, "log_likelihood": -0.4, "cpu_seconds": 0.0}

    monkeypatch.setattr(study, "run", run)
    arguments = ["--studies", "adult", "--splits", "1", "--quick", "--out", str(tmp_path)]
    study.main(arguments)
    assert len(ran) == len(set(ran)) == 1 + 3 * (1 + 4 + 1)
    lines = (tmp_path / "federated.jsonl").read_text().splitlines()
    (tmp_path / "federated.jsonl").write_text("\n".join(lines[:-2]) + "\n")
    study.main(arguments)
    assert len(ran) == len(lines) + 2
    assert "accuracy 0.8000 (+0.0000)" in capsys.readouterr().out
    assert (tmp_path / "federated.png").stat().st_size > 0
    assert json.loads(lines[0])["way"] == "pooled"


def test_fedavg_learns():
    found = study.run_adult(study.Cell("adult", "fedavg", epsilon=3.0), data(4000), 2)
    assert found["log_likelihood"] > -0.65


@pytest.mark.slow
def test_a_small_study_in_closed_form(monkeypatch):
    """At epsilon 50 three hospitals' posterior mean is within 2 posterior standard deviations (root mean square)."""
    monkeypatch.setitem(study.SCHEDULES, "synchronous", study.Synchronous(rounds=5, damping=0.5))
    cell = study.Cell("regression1", "worker", epsilon=50.0)
    found = study.run_regression(cell, num_records=600, num=3)
    assert found["distance"] <= 2.0, found
    assert 0.5 <= found["spread"] <= 2.0, found
