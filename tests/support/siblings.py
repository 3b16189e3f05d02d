"""Cases of a parametrized test that run the same lines as its others."""

from __future__ import annotations

import pytest


def slow(*case):
    """A case for `make test-slow`, of a test whose other cases differ in code path."""
    return pytest.param(*case, marks=pytest.mark.slow)
