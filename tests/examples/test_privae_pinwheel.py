"""`examples/privae_pinwheel.py` at a small size."""

from __future__ import annotations

import importlib.util
import json
import math
import pathlib
import re

import numpy as np
import pytest

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location(
        "privae_pinwheel", EXAMPLES / "privae_pinwheel.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PRIVATE = ("regularized", "unregularized")


@pytest.mark.slow
@pytest.mark.timeout(600)  # Three models are traced: much work for one processor.
@pytest.mark.parametrize("methods", [PRIVATE, (*PRIVATE, "non_private")])
def test_quick_run(example, tmp_path, capsys, monkeypatch, methods):
    """So few steps settle nothing: figures are finite, in their ranges, and those that were printed."""
    assert {*PRIVATE, "non_private"} == set(example.METHODS)
    monkeypatch.setattr(example, "METHODS", {name: example.METHODS[name] for name in methods})
    monkeypatch.setattr(
        example.tf.get_logger(), "level", 0
    )  # The script lowers it for its own run.
    result = example.main(["--quick", "--output", str(tmp_path)])

    printed = capsys.readouterr().out
    found = re.fullmatch(
        r"privae_pinwheel: epsilon (\d\.\d{4}) kl (-?\d+\.\d{4}) without (-?\d+\.\d{4}) purity (\d\.\d{4}) "
        r"without (\d\.\d{4})",
        printed.strip().splitlines()[-1],
    )
    assert found, printed
    saved = json.loads((tmp_path / "privae_pinwheel.json").read_text())
    ours, without = saved["figures"]["regularized"], saved["figures"]["unregularized"]
    expected = [
        max(saved["epsilon_spent"].values()),
        *(row["kl_from_prior"]["mean"] for row in (ours, without)),
        *(row["purity"]["mean"] for row in (ours, without)),
    ]
    for text, value in zip(found.groups(), expected, strict=True):
        assert float(text) == pytest.approx(value, abs=5.1e-5)
    assert set(saved["figures"]) == set(methods)
    for row in saved["figures"].values():
        assert 0.0 < row["reconstruction_error"]["mean"] < 10.0
        assert 0.25 <= row["purity"]["mean"] <= 1.0
        assert 0.0 <= row["smallest_cluster"]["mean"] <= 0.25
        assert math.isfinite(row["elbo"]["mean"])
        assert len(row["kl_from_prior"]["values"]) == 1
    assert set(saved["epsilon_spent"]) == {"regularized", "unregularized"}
    assert all(2.8 < spent <= 2.87 for spent in saved["epsilon_spent"].values())
    assert saved["delta"] == 1e-5
    assert saved["num_records"] == 400
    assert result["settings"] == saved["settings"]
    assert set(saved["versions"]) >= {"python", "tensorflow", "tfp"}
    assert sorted(path.name for path in tmp_path.glob("*.png")) == [
        "codes.png",
        "reconstructions.png",
        "samples.png",
    ]


def test_the_pinwheel_is_that_of_the_recipe(example):
    """Exact up to rounding: unrolling the spirals gives back the radii, and the seed is fixed."""
    x, labels = example.simulate(100, 7)
    again, _ = example.simulate(100, 7)
    np.testing.assert_array_equal(x, again)
    assert x.shape == (400, 2)
    assert list(np.bincount(labels)) == [100] * 4

    generator = np.random.default_rng(7)
    points = generator.standard_normal((400, 2)) * (0.3, 0.1) + (1.0, 0.0)
    np.testing.assert_allclose(
        np.sort(np.linalg.norm(x, axis=1)), np.sort(np.linalg.norm(points, axis=1)), rtol=1e-5
    )


def test_purity(example):
    """Exact: arms on a centre each are pure; two arms on one centre share it."""
    labels = np.repeat(np.arange(4), 5)
    assert example.purity(example.CENTRES[[2, 0, 3, 1]][labels], labels) == 1.0
    assert example.purity(example.CENTRES[[0, 0, 1, 2]][labels], labels) == 0.75
