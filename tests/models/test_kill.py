"""A training process killed at any moment has spent at least what it released (contract C6)."""

from __future__ import annotations

import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import tfp_dpvi as dpvi

STEPS_PER_EXECUTION = 3

# Marks are single writes to an unbuffered descriptor, so that a kill leaves them whole. "b": about to run the steps of a
# reservation; "e": they have run.
CHILD = """
import os, sys
import numpy as np
import tfp_dpvi as dpvi
from tfp_dpvi._keras import tf, tfp
from tfp_dpvi.models.run import PrivateRun

ledger_path, marks_path = sys.argv[1:]
marks = os.open(marks_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
make_loop = PrivateRun._loop

def marking_loop(self, sampler, tensors):
    loop = make_loop(self, sampler, tensors)
    def run(key, first, steps, *rest):
        os.write(marks, b"b" * int(steps))
        result = loop(key, first, steps, *rest)
        os.write(marks, b"e" * int(steps))
        return result
    return run

PrivateRun._loop = marking_loop
tfd = tfp.distributions
x = np.random.default_rng(0).normal(size=(200, 3)).astype("float32")
y = (x[:, 0] > 0).astype("int32")
model = dpvi.DPVI(
    tfd.Sample(tfd.Normal(0.0, 1.0), 3), lambda params, x: tfd.Bernoulli(logits=tf.linalg.matvec(x, params))
)
optimizer = dpvi.optimizers.DPKerasAdamOptimizer(l2_norm_clip=1.0, noise_multiplier=5.0)
ledger = dpvi.PrivacyLedger(ledger_path, dataset_id="killed")
model.compile(optimizer=optimizer, ledger=ledger, steps_per_execution=%d)
os.write(1, b"ready\\n")
model.fit(x, y, batch_size=20, epochs=10**6, verbose=0)
"""


def size(path: pathlib.Path) -> int:
    return path.stat().st_size if path.exists() else 0


def kill_once(directory: pathlib.Path, seconds: float, *, at_start: bool) -> None:
    """Starts or resumes training on the ledger in `directory`; kills it some seconds into `fit` or into its steps."""
    marks = directory / "marks"
    before = size(marks)
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD % STEPS_PER_EXECUTION, str(directory / "ledger"), str(directory / "marks")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert child.stdout is not None
    assert child.stderr is not None
    with child.stdout, child.stderr:
        assert child.stdout.readline() == b"ready\n", child.stderr.read().decode()
        while not at_start and size(marks) == before and child.poll() is None:
            time.sleep(0.01)
        time.sleep(seconds)
        assert child.poll() is None, child.stderr.read().decode()
        child.send_signal(signal.SIGKILL)
        child.wait()


def check_books(directory: pathlib.Path, kills: int) -> tuple[int, int]:
    """Charged are all steps that were begun, and at most one reservation more for each kill."""
    marks = (directory / "marks").read_bytes() if (directory / "marks").exists() else b""
    begun, ended = marks.count(b"b"), marks.count(b"e")
    charged = dpvi.PrivacyLedger(directory / "ledger", read_only=True).num_releases
    assert ended <= begun <= charged
    assert charged <= ended + kills * STEPS_PER_EXECUTION
    return charged, ended


def kill_many(directory: pathlib.Path, kills: int, seed: int) -> int:
    rng = np.random.default_rng(seed)
    lost = 0
    for kill in range(1, kills + 1):
        kill_once(directory, float(rng.uniform(0.0, 0.5)), at_start=kill % 10 == 0)
        charged, ended = check_books(directory, kill)
        lost = charged - ended
    assert charged > STEPS_PER_EXECUTION  # Training went on between the kills.
    return lost


def test_three_kills(tmp_path):
    kill_many(tmp_path, 3, seed=0)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_hundred_kills(tmp_path):
    lost = kill_many(tmp_path, 200, seed=1)
    print(f"200 kills: {lost} steps charged that had not ended")
