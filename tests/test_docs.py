"""The code of the documentation's pages runs as it stands, each page in a namespace of its own."""

from __future__ import annotations

import pathlib
import re

import pytest

DOCS = pathlib.Path(__file__).resolve().parents[1] / "docs"
PAGES = {
    path.relative_to(DOCS).as_posix(): re.findall(r"```python\n(.*?)```", path.read_text(), flags=re.DOTALL)
    for path in sorted(DOCS.rglob("*.md"))
}


SLOW = (
    "guides/analyst.md",
    "guides/arviz.md",
    "guides/calibrated_posterior.md",
    "guides/data_steward.md",
    "guides/in_keras.md",
    "guides/local_latents.md",
    "guides/vae_researcher.md",
)  # 10 to 20 s each; the README runs.
NEEDS = {"guides/arviz.md": "arviz"}


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[pytest.mark.slow] if page in SLOW else []) for page, blocks in PAGES.items() if blocks],
)
def test_the_pages_code_runs(page, tmp_path, monkeypatch, capsys):
    if page in NEEDS:
        pytest.importorskip(NEEDS[page])
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    for block in PAGES[page]:
        exec(compile(block, page, "exec"), names)
    assert capsys.readouterr().out.strip()


def test_there_are_pages_with_code():
    assert sum(map(bool, PAGES.values())) >= 4
