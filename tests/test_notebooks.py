"""The notebooks of the documentation: kept with their output, and run as they stand by the slow tests."""

from __future__ import annotations

import ast
import base64
import json
import pathlib
import re

import pytest

import tfp_dpvi as dpvi

FOLDER = pathlib.Path(__file__).resolve().parents[1] / "docs" / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))


def cells(name, kind):
    content = json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))
    return [cell for cell in content["cells"] if cell["cell_type"] == kind]


def sources(name, kind):
    return ["".join(cell["source"]) for cell in cells(name, kind)]


def outputs(name):
    return [output for cell in cells(name, "code") for output in cell["outputs"]]


def pictures(name):
    return [
        output["data"]["image/png"]
        for output in outputs(name)
        if "image/png" in output.get("data", {})
    ]


def missing_names(code):
    """Returns names of the package that code uses and the package does not have."""
    missing = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and node.module == "tfp_dpvi":
            missing += [alias.name for alias in node.names if not hasattr(dpvi, alias.name)]
        parts = []
        while isinstance(node, ast.Attribute):
            parts.insert(0, node.attr)
            node = node.value
        if parts and isinstance(node, ast.Name) and node.id == "dpvi":
            value = dpvi
            for part in parts:
                value = getattr(value, part, None)
            if value is None:
                missing.append(".".join(parts))
    return missing


def test_a_missing_name_is_seen():
    code = "from tfp_dpvi import keras, none\ndpvi.federated.Study; dpvi.data.nobody(dpvi.DPVI)"
    assert missing_names(code) == ["none", "data.nobody"]


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_whole(name):
    """It says how to run it, its output and pictures are kept, and its names are those of the package."""
    text = "\n".join(sources(name, "markdown"))
    code = sources(name, "code")
    assert text.startswith("# ")
    assert "(https://colab.research.google.com/)" in text
    assert re.match(r"# In Colab, first: %pip install 'tfp-dpvi\[\w+\]'\n", code[0])
    assert [cell["execution_count"] for cell in cells(name, "code")] == [*range(1, len(code) + 1)]
    assert {output["output_type"] for output in outputs(name)} <= {
        "stream",
        "display_data",
        "execute_result",
    }
    assert missing_names("\n".join(code)) == []
    for link in re.findall(r"\]\(([^):]+)\)", text):
        assert (FOLDER / link.partition("#")[0]).exists(), link


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_small_and_names_no_machine(name):
    path = FOLDER / f"{name}.ipynb"
    assert path.stat().st_size < 500_000
    assert pictures(name)
    for picture in pictures(name):
        assert len(base64.b64decode(picture)) < 100_000
    for output in outputs(name):
        shown = json.dumps({**output, "data": {**output.get("data", {}), "image/png": ""}})
        assert not re.search(r"(?<![\w.])/(home|root|work|tmp|usr|opt|content)/", shown)
        assert "Traceback" not in shown


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs(name, monkeypatch):
    """Cell after cell, as in Jupyter; its last one asserts what the text says. `make notebooks` keeps the output."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("Agg")
    monkeypatch.chdir(FOLDER)
    variables = {"__name__": "__main__"}
    for code in sources(name, "code"):
        exec(compile(code, f"{name}.ipynb", "exec"), variables)
    assert len(pictures(name)) == len(pyplot.get_fignums()) > 0
