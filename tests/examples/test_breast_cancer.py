"""`examples/breast_cancer.py` at a small size: the last line, the file and the report agree."""

from __future__ import annotations

import importlib.util
import json
import pathlib
import re

import numpy as np
import pytest

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")

LAST_LINE = r"breast_cancer: accuracy ([01]\.\d{4}) non-private ([01]\.\d{4}) epsilon (\d+\.\d{4}) delta (\d\S*) seconds (\d+\.\d)"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("breast_cancer", EXAMPLES / "breast_cancer.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_main_job_end_to_end(example, tmp_path, capsys, monkeypatch):
    """Five epochs reach 0.9 in practice; 0.8 leaves 114 test patients over 8 binomial deviations of room on the noise.

    The more frequent diagnosis has 0.63. The accuracy of the calibrated posterior varies more, and has no bound here.
    """
    monkeypatch.setattr(example, "NON_PRIVATE_STEPS", 200)
    arguments = ["--epochs", "5", "--epsilon", "1", "--delta", "1e-5", "--output", str(tmp_path)]
    result = example.main([*arguments, "--clipping", "flat"])

    output = capsys.readouterr().out
    found = re.fullmatch(LAST_LINE, output.strip().splitlines()[-1])
    assert found, output[-300:]
    saved = json.loads((tmp_path / "breast_cancer.json").read_text())
    names = ("accuracy", "non_private_accuracy", "epsilon", "delta", "seconds")
    for text, name in zip(found.groups(), names, strict=True):
        assert float(text) == pytest.approx(
            saved[name], abs=0.051 if name == "seconds" else 5.1e-5
        ), name
        assert result[name] == saved[name]

    assert 0.99 <= saved["epsilon"] <= 1.0  # Calibrated: at most the target and within 1 % of it.
    assert saved["delta"] == 1e-5
    assert 0.8 < saved["accuracy"] <= 1.0
    assert 0.93 < saved["non_private_accuracy"] <= 1.0
    assert saved["settings"]["epochs"] == 5
    assert len(saved["posterior"]) == len(saved["non_private_posterior"]) == 31
    for row in saved["posterior"]:
        assert row["low"] < row["mean"] < row["high"]
        assert row["sd"] > 0
        assert row["name"] in output
    report = saved["privacy_report"]
    report = json.loads(report) if isinstance(report, str) else report
    assert report["epsilon"] == pytest.approx(saved["epsilon"])
    assert "differentially private" in output
    assert (tmp_path / "posterior.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_intervals_cover_those_without_privacy(example, tmp_path):
    """Of 31 intervals of 95 %, 24 at least hold the mean without privacy; the flat clip's 11 to 21 on 20 splits."""
    result = example.main(["--output", str(tmp_path)])
    (found,) = result["each"]
    assert found["inside"] >= 24
    assert found["narrower"] <= 6


@pytest.mark.slow  # The bar itself in `models/test_habits.py`.
def test_the_progress_bar_shows_epsilon(example, capsys):
    x, y, *_ = example.load(3)
    example.fit_private(x, y, 1.0, 1e-5, verbose=1, epochs=2)
    shown = [float(value) for value in re.findall(r"epsilon: (\d+\.\d+)", capsys.readouterr().out)]
    assert shown == sorted(shown)
    assert 0 < shown[0] < shown[-1] <= 1.0


def test_splits_are_stratified_and_standardised_on_the_training_patients(example):
    x, y, x_test, y_test, names = example.load(0)
    assert (len(x), len(x_test), len(names)) == (455, 114, 30)
    np.testing.assert_allclose(x.mean(axis=0), 0.0, atol=1e-5)
    np.testing.assert_allclose(x.std(axis=0), 1.0, atol=1e-4)
    assert np.abs(x_test.mean(axis=0)).max() > 0.01
    assert abs(y.mean() - y_test.mean()) < 0.01
