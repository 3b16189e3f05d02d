"""`examples/mnist_classifier.py` at a small size."""

from __future__ import annotations

import importlib.util
import json
import pathlib
import re

import numpy as np
import pytest

EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "mnist_classifier.py"


@pytest.fixture
def example(monkeypatch):
    """With made-up images in place of MNIST's."""
    spec = importlib.util.spec_from_file_location("mnist_classifier_example", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    rng = np.random.default_rng(0)
    images = (
        rng.uniform(size=[1600, 28, 28, 1]).astype("float32"),
        np.eye(10, dtype="float32")[rng.integers(10, size=1600)],
    )
    monkeypatch.setattr(module, "load", lambda split: images)
    monkeypatch.setitem(module.RECIPE, "batch_size", 32)
    return module


@pytest.mark.slow  # The model is that of `models/test_keras_model.py`.
def test_it_trains_and_says_what_was_spent(example, tmp_path, capsys):
    example.main(["--images", "64", "--epochs", "1", "--output", str(tmp_path)])
    last = capsys.readouterr().out.strip().splitlines()[-1]
    found = re.fullmatch(
        r"mnist classifier: accuracy (0\.\d+) epsilon (1\.\d+) delta 1e-05 seconds \S+ \(.* at 1.19\)",
        last,
    )
    assert found, last
    saved = json.loads((tmp_path / "mnist_classifier.json").read_text())
    assert float(found[1]) == pytest.approx(saved["accuracy"], abs=1e-4)
    assert 1.17 <= saved["report"]["epsilon"] <= 1.19
    assert saved["steps"] == 2
    assert example.network().count_params() == 26_010


@pytest.mark.slow
def test_steps_are_timed(example, tmp_path):
    found = example.main(["--time", "--output", str(tmp_path)])["milliseconds"]
    assert found["tfp_dpvi"] > 0
    assert json.loads((tmp_path / "step_times.json").read_text())["milliseconds"] == found


def test_few_lines_differ_from_the_tutorial():
    assert len(re.findall(r"  # changed", EXAMPLE.read_text())) == 5
