"""The code of the documentation's pages runs as it stands, each page in a namespace of its own."""

from __future__ import annotations

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
    "guides/ports.md",
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
# TensorFlow Probability 0.25 forgets a pair of cached parameters twice.
@pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <bound method WeakStructRef:pytest.PytestUnraisableExceptionWarning"
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


# -------------------------------------------------------------------------------- words and links

ROOT = DOCS.parent
FRONT = ("README.md", "SECURITY.md", "CONTRIBUTING.md", "llms.txt")


def anchors(path):
    """Returns the anchors of a page's headings, as GitHub and Python-Markdown make them."""
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", each.lower()).strip().replace(" ", "-") for each in headings}


def broken_links(path):
    """Returns the links of a page that lead to no file, or to no heading of it."""
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith(("http://", "https://")):
            continue
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", [*FRONT, *(f"docs/{page}" for page in PAGES)])
def test_links_lead_somewhere(page):
    assert broken_links(ROOT / page) == []


def test_a_broken_link_is_seen(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A title: here\n[a](page.md#a-title-here) [b](#nowhere) [c](none.md)\n")
    assert broken_links(page) == ["#nowhere", "none.md"]


def test_every_page_is_in_the_navigation():
    """Once, and nothing else is."""
    listed = re.findall(
        r": ([\w/]+\.(?:md|ipynb))$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE
    )
    notebooks = [path.relative_to(DOCS).as_posix() for path in DOCS.glob("notebooks/*.ipynb")]
    assert sorted(listed) == sorted([*PAGES, *notebooks])


def test_the_glossary_has_twenty_terms_in_order():
    text = (DOCS / "glossary.md").read_text(encoding="utf-8")
    terms = re.findall(r"^\*\*(.+?)\.\*\*", text, flags=re.MULTILINE)
    assert len(terms) == 20
    assert terms == sorted(terms)


def test_the_install_page_has_every_extra():
    page = (DOCS / "install.md").read_text(encoding="utf-8")
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    section = project.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    extras = set(re.findall(r"^([\w-]+) = \[", section, flags=re.MULTILINE))
    cells = "".join(re.findall(r"^\| (`[^|]+) \|", page, flags=re.MULTILINE))
    assert set(re.findall(r"`([\w-]+)`", cells)) == extras


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) < 120
