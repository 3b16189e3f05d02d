"""The README's code runs as it stands."""

from __future__ import annotations

import json
import pathlib
import re

import pytest

pytestmark = pytest.mark.smoke

ROOT = pathlib.Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
FIGURES = ROOT / "docs" / "figures"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)


def test_there_is_code_to_run():
    assert BLOCKS
    assert "dpvi.regression" in BLOCKS[0]


@pytest.mark.parametrize("block", BLOCKS)
def test_the_block_runs_verbatim(block, tmp_path, monkeypatch, capsys):
    for name in ("formulae", "pandas", "statsmodels"):
        pytest.importorskip(name)
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(compile(block, str(README), "exec"), names)
    result = names["result"]
    assert 0.99 <= result.model.privacy_report().epsilon <= 1.0
    assert repr(result) in capsys.readouterr().out
    table = result.summary()
    # Without privacy -0.147 and 0.015; six deviations, of which noise is a part.
    assert abs(table.loc["logc", "mean"] + 0.147) < 6.0 * table.loc["logc", "sd"] < 0.3


def _row(begin):
    """Returns the numbers in the cells of the README's table row that begins so, but for its first cell."""
    (line,) = [line for line in README.read_text().splitlines() if line.startswith(f"| {begin}")]
    cells = [cell.replace("*", "") for cell in line.strip("| ").split(" | ")[1:]]
    return [[float(number) for number in re.findall(r"\d+(?:\.\d+)?", cell)] for cell in cells]


def _figures(name):
    return json.loads((FIGURES / name).read_text(encoding="utf-8"))


def _rounded(*values):
    return [round(value, 2) for value in values]


@pytest.mark.parametrize(
    ("begin", "method"),
    [
        ("ours", "ours"),
        ("noise-aware DPVI", "noise-aware DPVI"),
        ("a flat clip", "flat clip"),
        ("noisy sufficient", "sufficient statistics"),
        ("*without privacy*", "not private"),
    ],
)
def test_the_table_of_intervals_is_that_of_the_figures(begin, method):
    study = [row for row in _figures("field/field.json")["rows"] if row["method"] == method]
    cells = ["logistic5-1000-1.0", "logistic5-5000-1.0", "linear-5000-1.0"]
    assert [row["cell"] for row in study] == cells
    assert _row(begin) == [_rounded(row["coverage"], row["width"]) for row in study]


def test_the_errors_of_objective_perturbation_are_those_of_the_figures():
    errors = {
        (row["cell"], row["method"]): row["error"] for row in _figures("field/field.json")["rows"]
    }
    ratios = [
        round(errors[cell, "objective perturbation"] / errors[cell, "ours"], 1)
        for cell in ("logistic5-1000-1.0", "logistic5-5000-1.0")
    ]
    assert _row("objective perturbation") == [[ratio] for ratio in ratios] + [[]]


def test_the_table_of_speed_is_that_of_the_figures():
    ratios = _figures("benchmark/suite.json")
    assert _row("logistic regression, 40,000")[1:] == [
        [round(ratios["logistic_tensorflow_privacy_over_private"], 1)],
        [round(ratios["logistic_opacus_over_private"], 1)],
        [round(1 / ratios["logistic_private_over_jax"], 2)],
        [round(1 / ratios["logistic_private_over_nonprivate"], 1)],
    ]
    assert _row("VAE of MNIST")[1:] == [
        [round(ratios["vae_tensorflow_privacy_over_private"])],
        [
            round(ratios["vae_opacus_over_private"]),
            round(1 / ratios["vae_private_over_opacus_ghost"], 1),
        ],
        [
            round(ratios["vae_jax_vmap_over_private"]),
            round(1 / ratios["vae_private_over_jax_ghost"], 2),
        ],
        [round(1 / ratios["vae_private_over_nonprivate"], 2)],
    ]
