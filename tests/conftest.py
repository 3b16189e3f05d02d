"""Settings of every test process."""

from __future__ import annotations

import gc


def pytest_collection_finish():
    """What was imported and collected stays: Python's collector need not walk over it again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
