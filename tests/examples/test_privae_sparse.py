"""`examples/privae_sparse.py` at a small size."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import pathlib
import re
import sys

import numpy as np
import pytest

pytest.importorskip("matplotlib")

pytestmark = pytest.mark.skipif(
    not pathlib.Path(os.environ.get("TFP_DPVI_DATA", ""), "fashion-mnist").is_dir(),
    reason="no real data: TFP_DPVI_DATA names no folder with them",
)


@pytest.fixture(scope="module")
def example():
    path = pathlib.Path(__file__).parents[2] / "examples" / "privae_sparse.py"
    spec = importlib.util.spec_from_file_location("examples_privae_sparse", path)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, spec.name, module)  # Dataclasses look their module up.
        spec.loader.exec_module(module)
        yield module


@pytest.mark.slow
@pytest.mark.timeout(600)  # Three models are traced: much work for one processor.
@pytest.mark.parametrize("two_draws", [False, True])
def test_quick_run(example, tmp_path, capsys, monkeypatch, two_draws):
    """The figures are those of a few steps: that they are in their ranges and tell the methods apart is all they say."""
    if not two_draws:
        monkeypatch.setattr(
            example, "METHODS", {n: m for n, m in example.METHODS.items() if n != "two_draws"}
        )
    monkeypatch.setattr(
        example.tf.get_logger(), "level", 0
    )  # The script lowers it for its own run.
    result = example.main(["--quick", "--output", str(tmp_path)])

    printed = capsys.readouterr().out
    found = re.fullmatch(
        r"privae_sparse: epsilon (\S+) hoyer (\d\.\d{4}) without (\d\.\d{4}) mmd (\d+\.\d{3}) without (\d+\.\d{3})",
        printed.strip().splitlines()[-1],
    )
    assert found, printed
    assert "epsilon" in result["privacy_report"]
    saved = json.loads((tmp_path / "privae_sparse.json").read_text())
    points = {point["method"]: point for point in saved["points"]}
    assert set(points) == {"mmd", "without"} | ({"two_draws"} if two_draws else set())
    ours, without = points["mmd"], points["without"]
    figures = (ours["epsilon"], ours["hoyer"], without["hoyer"], ours["mmd"], without["mmd"])
    for text, value in zip(found.groups(), figures, strict=True):
        assert float(text) == pytest.approx(value, abs=5.1e-4)
    for name, point in points.items():
        private = example.METHODS[name].private
        assert 0.0 < point["hoyer"] < 1.0
        assert saved["mmd_of_prior_draws"] < point["mmd"] < math.inf
        assert -2000 < point["elbo"] < point["reconstruction"] < 0
        assert (point["noise_multiplier"] > 0.0) == private
        if private:
            assert 0.9 * point["epsilon"] < point["epsilon_spent"] <= point["epsilon"] == 8.0
    # Of one privacy, less noise over the clip where less is released; equal shares have sensitivity sqrt(2) exactly.
    if two_draws:
        assert without["noise_multiplier"] < points["two_draws"]["noise_multiplier"]
        assert points["two_draws"]["noise_multiplier"] == pytest.approx(
            math.sqrt(2) * without["noise_multiplier"], rel=1e-3
        )
    assert without["noise_multiplier"] < ours["noise_multiplier"]
    assert saved["settings"]["epochs"] == 1
    assert set(saved["versions"]) >= {"python", "tensorflow", "tfp"}
    assert sorted(path.name for path in tmp_path.glob("*.png")) == [
        "codes.png",
        "figure.png",
        "reconstructions.png",
        "samples.png",
    ]


def test_hoyer_sparsity(example):
    """Exact: rows of +-1 are even, rows with one entry are as sparse as can be, whatever the columns' units."""
    signs = np.array([[1, 1, 1, 1], [-1, -1, -1, -1], [1, -1, 1, -1], [-1, 1, -1, 1]], "float64")
    assert example.hoyer(signs * [1, 10, 0.1, 3]) == pytest.approx(0.0, abs=1e-12)
    assert example.hoyer(
        np.concatenate([np.eye(4), -np.eye(4)]) * [1, 10, 0.1, 3]
    ) == pytest.approx(1.0)


def test_every_kth_code_of_one_group(example):
    """The strided regulariser is the MMD of the codes that it takes; one that it leaves out does not matter."""
    generator = np.random.default_rng(0)
    prior = example.dpvi.divergences.sparse_prior(3)
    posterior = example.tfd.MultivariateNormalDiag(
        np.zeros([9, 3], "float32"), np.ones([9, 3], "float32")
    )
    samples, prior_samples = (generator.standard_normal([n, 3]).astype("float32") for n in (9, 5))
    weights = np.ones(9, "float32")
    codes = example.dpvi.divergences.Codes(samples, weights, posterior, prior, prior_samples)
    expected = example.dpvi.divergences.dimensionwise_mmd(samples[[0, 4, 8]], prior_samples)
    np.testing.assert_allclose(example.Strided(4)(codes), expected, rtol=1e-6)
