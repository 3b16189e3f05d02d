"""Scripts of `benchmarks/` and `examples/`: what they import from here exists."""

import ast
import importlib
import pathlib

import pytest

import tfp_dpvi as dpvi

ROOT = pathlib.Path(__file__).parents[2]
SCRIPTS = sorted(
    path
    for folder in ("benchmarks", "examples")
    for path in (ROOT / folder).rglob("*.py")
    # Peers run in environments of their own.
    if "peers" not in path.parts
)


def imported(tree, own):
    """Modules of this repository and the names that a script takes from them."""
    for node in ast.walk(tree):
        is_from = isinstance(node, ast.ImportFrom) and node.module and not node.level
        if is_from and node.module.partition(".")[0] in own:
            yield node.module, [alias.name for alias in node.names]


def of_library(tree):
    """Names after `dpvi.`."""
    for node in ast.walk(tree):
        is_attribute = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        if is_attribute and node.value.id == "dpvi":
            yield node.attr


def missing(source, own):
    """What a script names and is not there."""
    tree = ast.parse(source)
    for module, names in imported(tree, own):
        found = importlib.import_module(module)
        for name in names:
            if not hasattr(found, name):
                try:
                    importlib.import_module(f"{module}.{name}")
                except ImportError:
                    yield f"{module}.{name}"
    for name in of_library(tree):
        if not hasattr(dpvi, name):
            yield f"dpvi.{name}"


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_scripts_import_only_what_exists(path, monkeypatch):
    monkeypatch.syspath_prepend(str(path.parent))
    beside = {other.stem for other in path.parent.glob("*.py")}
    if "hospitals" in path.parts:
        pytest.importorskip("flwr")
    assert list(missing(path.read_text(), {"tfp_dpvi", *beside})) == []


def test_a_name_that_has_moved_is_found():
    moved = "from replicates import Replicates\nimport tfp_dpvi as dpvi\ndpvi.refit()\n"
    assert list(missing(moved, {"replicates"})) == ["replicates.Replicates", "dpvi.refit"]
