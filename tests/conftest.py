"""Settings of every test process.

The random numbers of a test follow from its name, so that none fails by chance: starting weights, noise, records. A fixture of
a module follows the test that asks for it first; processes that a test starts have keys from the operating system.
`TFP_DPVI_TEST_SEED=7 make test` takes others, and hypothesis its own, to see which tests may fail by chance.
"""

from __future__ import annotations

import gc
import os
import random
import types

import hypothesis
import pytest

from tfp_dpvi import _random
from tfp_dpvi._tf import keras

SEED = os.environ.get("TFP_DPVI_TEST_SEED", "0")
hypothesis.settings.register_profile(
    "repeatable", derandomize=SEED == "0", deadline=None, database=None
)
hypothesis.settings.load_profile("repeatable")


def pytest_report_header():
    return f"TFP_DPVI_TEST_SEED={SEED}"


def pytest_collection_finish():
    """What was imported and collected stays: Python's collector need not walk over it again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Before a test's fixtures are made. The library asks `os.urandom` for its keys, and finds a stream of this test's."""
    stream = random.Random(f"{SEED} {item.nodeid}")
    keras.utils.set_random_seed(stream.getrandbits(31))
    _random.os = types.SimpleNamespace(urandom=stream.randbytes)
