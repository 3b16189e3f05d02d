"""A training process killed at any moment has spent at least what it released (contract C6)."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import tfp_dpvi as dpvi

STEPS_PER_EXECUTION = 3

# TensorFlow is imported once, in a process that forks one trainer after another; a fork has what any trainer has after its
# imports, before TensorFlow starts a thread. Marks are single writes to an unbuffered descriptor, so that a kill leaves them
# whole. "b": about to run the steps of a reservation; "e": they have run.
TRAINERS = """
import os, sys
import numpy as np
import tfp_dpvi as dpvi
from tfp_dpvi._keras import tf, tfp
from tfp_dpvi.models.run import PrivateRun

tfd = tfp.distributions
make_loop = PrivateRun._loop

def train(ledger_path, marks_path):
    marks = os.open(marks_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def marking_loop(self, sampler, tensors):
        loop = make_loop(self, sampler, tensors)
        def run(key, first, steps, *rest):
            os.write(marks, b"b" * int(steps))
            result = loop(key, first, steps, *rest)
            os.write(marks, b"e" * int(steps))
            return result
        return run

    PrivateRun._loop = marking_loop
    x = np.random.default_rng(0).normal(size=(200, 3)).astype("float32")
    y = (x[:, 0] > 0).astype("int32")
    model = dpvi.DPVI(
        tfd.Sample(tfd.Normal(0.0, 1.0), 3), lambda params, x: tfd.Bernoulli(logits=tf.linalg.matvec(x, params))
    )
    optimizer = dpvi.optimizers.DPKerasAdamOptimizer(l2_norm_clip=1.0, noise_multiplier=5.0)
    ledger = dpvi.PrivacyLedger(ledger_path, dataset_id="killed")
    model.compile(optimizer=optimizer, ledger=ledger, steps_per_execution=STEPS)
    os.write(1, b"ready %d\\n" % os.getpid())
    model.fit(x, y, batch_size=20, epochs=10**6, verbose=0)

for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        try:
            train(*line.split())
        finally:
            os._exit(1)
    os.write(1, b"ended %d\\n" % os.waitpid(pid, 0)[1])
""".replace("STEPS", str(STEPS_PER_EXECUTION))


class Trainers:
    """Starts trainers on a ledger, one at a time."""

    def __init__(self, directory: pathlib.Path) -> None:
        self.ledger, self.marks = directory / "ledger", directory / "marks"
        self.errors = (directory / "errors").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-c", TRAINERS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )

    def answer(self, word: str) -> int:
        line = self.process.stdout.readline().split()
        if not line or line[0] != word:
            self.errors.seek(0)
            raise AssertionError(f"{line} for {word}: {self.errors.read()[-3000:]}")
        return int(line[1])

    def start(self) -> int:
        self.process.stdin.write(f"{self.ledger} {self.marks}\n")
        self.process.stdin.flush()
        return self.answer("ready")

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(timeout=60)
        self.process.stdout.close()
        self.errors.close()


def size(path: pathlib.Path) -> int:
    return path.stat().st_size if path.exists() else 0


def kill_once(trainers: Trainers, seconds: float, *, at_start: bool) -> None:
    """Starts or resumes training; kills it some seconds into `fit` or into its steps."""
    before = size(trainers.marks)
    pid = trainers.start()
    begun = time.monotonic()
    while not at_start and size(trainers.marks) == before and time.monotonic() < begun + 120:
        time.sleep(0.01)
    time.sleep(seconds)
    os.kill(pid, signal.SIGKILL)
    assert trainers.answer("ended") == signal.SIGKILL


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
    trainers = Trainers(directory)
    try:
        for kill in range(1, kills + 1):
            kill_once(trainers, float(rng.uniform(0.0, 0.5)), at_start=kill % 10 == 0)
            charged, ended = check_books(directory, kill)
            lost = charged - ended
    finally:
        trainers.close()
    assert charged > STEPS_PER_EXECUTION  # Training went on between the kills.
    return lost


def test_three_kills(tmp_path):
    kill_many(tmp_path, 3, seed=0)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_hundred_kills(tmp_path):
    lost = kill_many(tmp_path, 200, seed=1)
    print(f"200 kills: {lost} steps charged that had not ended")
