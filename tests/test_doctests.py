"""Examples in docstrings run and print what they say."""

from __future__ import annotations

import doctest
import importlib
import pathlib

import pytest

import tfp_dpvi

PACKAGE = pathlib.Path(tfp_dpvi.__file__).parent
MODULES = sorted(
    ".".join(("tfp_dpvi", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(
        ".__init__"
    )
    for path in PACKAGE.rglob("*.py")
    if ">>> " in path.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of(name):
    """As `python -m doctest` runs them: each sees the names of its module."""
    module = importlib.import_module(name)
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    result = doctest.testmod(module, optionflags=flags)
    assert result.attempted
    assert not result.failed
