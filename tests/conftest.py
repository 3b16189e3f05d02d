"""Settings of every test process, and what the run cost.

The random numbers of a test follow from its name, so that none fails by chance: starting weights,
noise, records. A fixture of a module follows the test that asks for it first; processes that a test
starts have keys from the operating system. `TFP_DPVI_TEST_SEED=7 make test` takes others, and
hypothesis its own, to see which tests may fail by chance.

A run ends with the tests and the files that took most CPU seconds, and with those of all its
processes. Unlike the clock, they are nearly the same on a machine that has other things to do.
"""

from __future__ import annotations

import collections
import gc
import importlib
import os
import pathlib
import random
import resource
import sys
import types

import hypothesis
import pytest

SEED = os.environ.get("TFP_DPVI_TEST_SEED", "0")
hypothesis.settings.register_profile(
    "repeatable", derandomize=SEED == "0", deadline=None, database=None
)
hypothesis.settings.load_profile("repeatable")

# What `make test` may cost on an idle machine; more is printed, and fails nothing: machines differ.
MOST_SECONDS = 1150
MOST_SECONDS_OF_A_TEST = 8
NUM_SLOWEST = 20
# After so many, circles of graphs are freed: the slow set had 16 GB of them.
COLLECTED_AFTER = 60.0


def cpu_seconds():
    """Returns what this process used so far, and those that it started and that have ended."""
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(part.ru_utime + part.ru_stime for part in used)


class Costs:
    """The CPU seconds of each test, its fixtures included.

    They are measured in the process that runs it, and added up in the one that reports.
    """

    def __init__(self):
        self.before = self.collected = cpu_seconds()
        self.of_tests = collections.Counter()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self):
        self.before = cpu_seconds()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, call):
        """After each of set-up, call and tear-down. Workers hand a report's attributes on."""
        outcome = yield
        now = cpu_seconds()
        outcome.get_result().cpu_seconds = now - self.before
        if call.when == "teardown" and now - self.collected > COLLECTED_AFTER:
            gc.collect()
            self.collected = now
        self.before = now

    def pytest_runtest_logreport(self, report):
        self.of_tests[report.nodeid] += getattr(report, "cpu_seconds", 0.0)

    def pytest_terminal_summary(self, terminalreporter):
        """Called after the workers have ended, whose seconds are those of children then."""
        total, over = cpu_seconds(), " (over the limit)"
        terminalreporter.section(f"slowest {NUM_SLOWEST} tests, in CPU seconds", sep="=")
        for name, used in self.of_tests.most_common(NUM_SLOWEST):
            more = over if used > MOST_SECONDS_OF_A_TEST else ""
            terminalreporter.write_line(f"{used:7.2f}  {name}{more}")
        terminalreporter.section(f"slowest {NUM_SLOWEST} files, in CPU seconds", sep="=")
        of_files = collections.Counter()
        for name, used in self.of_tests.items():
            of_files[name.partition("::")[0]] += used
        for name, used in of_files.most_common(NUM_SLOWEST):
            terminalreporter.write_line(f"{used:7.0f}  {name}")
        more = over if total > MOST_SECONDS else ""
        terminalreporter.write_line(
            f"{total:7.0f}  all processes, of {MOST_SECONDS}; {MOST_SECONDS_OF_A_TEST} a test{more}"
        )


class Journal:
    """The result of each test, written when it ends: what a run found outlives the run.

    Tests that its file says passed are not run again. Only the process that reports writes.
    """

    def __init__(self, path, writes):
        self.path, self.writes = path, writes
        self.failures = set()

    def pytest_collection_modifyitems(self, config, items):
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        done = {line.partition(" ")[2] for line in lines if line.startswith("passed ")}
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in done])
        items[:] = [item for item in items if item.nodeid not in done]

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.failures.add(report.nodeid)
        if self.writes and report.when == "teardown":
            outcome = "failed" if report.nodeid in self.failures else "passed"
            with self.path.open("a") as file:
                file.write(f"{outcome} {report.nodeid}\n")


def pytest_addoption(parser):
    parser.addoption("--journal", type=pathlib.Path, help="a file of results, to go on from")


def pytest_configure(config):
    config.pluginmanager.register(Costs(), "costs")
    is_worker = hasattr(config, "workerinput")
    if path := config.getoption("journal"):
        config.pluginmanager.register(Journal(path, writes=not is_worker), "journal")
    runs_tests = not config.getoption("numprocesses", 0) or is_worker
    if runs_tests:
        # Before any test file imports TensorFlow. The process that starts workers needs none of it.
        importlib.import_module("tfp_dpvi._tf")


def pytest_report_header():
    return f"TFP_DPVI_TEST_SEED={SEED}"


def pytest_collection_finish():
    """What was imported and collected stays: Python's collector need not walk over it again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Before a test's fixtures are made: `os.urandom`, which keys come from, is the test's own."""
    from tfp_dpvi import _random
    from tfp_dpvi._tf import keras

    stream = random.Random(f"{SEED} {item.nodeid}")
    keras.utils.set_random_seed(stream.getrandbits(31))
    _random.os = types.SimpleNamespace(urandom=stream.randbytes)


def pytest_runtest_teardown():
    """A test's figures end with it: pyplot would keep them, also for tests that count theirs."""
    if pyplot := sys.modules.get("matplotlib.pyplot"):
        pyplot.close("all")
