"""The code of the documentation's pages runs as it stands, each page in a namespace of its own."""

from __future__ import annotations

import json
import pathlib
import re

import pytest

DOCS = pathlib.Path(__file__).resolve().parents[1] / "docs"
PAGES = {
    path.relative_to(DOCS).as_posix(): re.findall(
        r"```python\n(.*?)```", path.read_text(), flags=re.DOTALL
    )
    for path in sorted(DOCS.rglob("*.md"))
}


SLOW = (
    "audit.md",
    "guides/analyst.md",
    "guides/arviz.md",
    "guides/calibrated_posterior.md",
    "guides/checks.md",
    "guides/data_steward.md",
    "guides/from_tensorflow_privacy.md",
    "guides/in_keras.md",
    "guides/local_latents.md",
    "guides/official_statistics.md",
    "guides/persons.md",
    "guides/rehearsal.md",
    "guides/small_data.md",
    "guides/vae_researcher.md",
    "regression.md",
)  # 7 to 20 s each; the README runs.
NEEDS = {
    "guides/arviz.md": "arviz",
    "guides/checks.md": "formulae",
    "guides/official_statistics.md": "formulae",
    "guides/persons.md": "formulae",
    "guides/rehearsal.md": "formulae",
    "guides/small_data.md": "sklearn",
    "regression.md": "formulae",
}


def marks(page):
    """Returns the marks of a page's test."""
    return [pytest.mark.slow] if page in SLOW else []


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=marks(page)) for page, blocks in PAGES.items() if blocks],
)
def test_the_pages_code_runs(page, tmp_path, monkeypatch, capsys):
    if page in NEEDS:
        pytest.importorskip(NEEDS[page])
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    for block in PAGES[page]:
        exec(compile(block, page, "exec"), names)
    assert capsys.readouterr().out.strip()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["private_posterior", "private_vae"])
def test_a_notebook_runs(name, monkeypatch):
    """Cell after cell, as in Jupyter; its last one asserts what the text says. `make notebooks` keeps the output."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("Agg")
    path = DOCS / "notebooks" / f"{name}.ipynb"
    monkeypatch.chdir(path.parent)
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    names = {"__name__": "__main__"}
    for cell in cells:
        exec(compile("".join(cell["source"]), path.name, "exec"), names)
    pictures = [
        one for cell in cells for one in cell["outputs"] if "image/png" in one.get("data", {})
    ]
    assert len(pictures) == len(pyplot.get_fignums()) > 0
    pyplot.close("all")


def test_there_are_pages_with_code():
    assert sum(map(bool, PAGES.values())) >= 4


def test_every_test_that_the_contracts_name_is_there():
    """A name without a folder is in that of the name before it."""
    root = pathlib.Path(__file__).parents[1]
    page = (root / "docs" / "contracts.md").read_text(encoding="utf-8")
    folder = root
    missing = []
    for name in re.findall(r"`((?:tests/[\w/]+)?(?:test_\w+)?(?:\.py)?)`", page):
        if not name:
            continue
        path = root / name if name.startswith("tests") else folder / name
        folder = path.parent if path.suffix else path
        if not path.exists():
            missing.append(name)
    assert missing == []
