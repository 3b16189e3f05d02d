"""How tests are laid out: none imports another, and one file alone looks behind the public face of models."""

from __future__ import annotations

import ast
import pathlib
import re
import types

TESTS = pathlib.Path(__file__).resolve().parent
# Tests import `support`, and the example `data`, whose name one folder shares.
FOLDERS = {path.name for path in TESTS.iterdir() if path.is_dir()} - {"support", "data"}
STATE = re.compile(r"\w\._dp\b")  # What a model remembers of its fits.


def imports_of_tests(text: str) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            names.append(node.module)
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    return [
        name
        for name in names
        if name.split(".")[0] in FOLDERS or name.split(".")[-1].startswith("test_")
    ]


def test_no_test_imports_another_nor_looks_behind_a_model():
    for path in sorted(TESTS.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        assert imports_of_tests(text) == [], path
        if path.name not in ("internals.py", "test_structure.py"):
            assert not STATE.search(text), f"{path}: take it from support/internals.py"


def test_the_check_sees_an_import():
    assert imports_of_tests("from models.test_dpvae import X") == ["models.test_dpvae"]
    assert imports_of_tests("import test_fit\nfrom support import toy") == ["test_fit"]


def test_a_run_says_what_it_cost(request):
    """CPU seconds of set-up, call and tear-down are added up; the dearest come first, then files."""
    costs = type(request.config.pluginmanager.get_plugin("costs"))()
    lines = []
    terminal = types.SimpleNamespace(section=lambda title, sep: None, write_line=lines.append)
    for name, seconds in [("a::cheap", 1.0), ("b::dear", 5.0), ("b::dear", 4.0), ("b::x", 0.5)]:
        costs.pytest_runtest_logreport(types.SimpleNamespace(nodeid=name, cpu_seconds=seconds))
    costs.pytest_terminal_summary(terminal)
    assert lines[:2] == ["   9.00  b::dear (over the limit)", "   1.00  a::cheap"]
    assert lines[3:5] == ["     10  b", "      1  a"]
    # On a slow machine this process may be over the limit already.
    words = r" *\d+  all processes, of 1150; 8 a test( \(over the limit\))?"
    assert re.fullmatch(words, lines[5])
