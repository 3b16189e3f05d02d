"""Training processes to kill.

TensorFlow is imported once, in a process that forks one trainer after another; a fork has what any trainer has after its
imports, before TensorFlow starts a thread. Marks are single writes to an unbuffered descriptor, so that a kill leaves them
whole. "b": about to run the steps of a reservation; "e": they have run.
"""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time

import tfp_dpvi as dpvi

STEPS_PER_EXECUTION = 3

_PREPARED = """
import os, sys, traceback
import numpy as np
import tfp_dpvi as dpvi
from tfp_dpvi._tf import tf, tfp
from support.internals import mark_executions as mark_steps
from support.toy import Toy

tfd = tfp.distributions

class Logistic(Toy):
    def call(self, x):
        return tf.sigmoid(super().call(x))

    def record_loss(self, x, y):
        logit = tf.reduce_sum(self.w * x)
        return tf.math.softplus(logit) - tf.cast(y, logit.dtype) * logit

def make_model(kind, ledger_path, **settings):
    if kind == "posterior":
        model = dpvi.DPVI(
            tfd.Sample(tfd.Normal(0.0, 1.0), 3), lambda params, x: tfd.Bernoulli(logits=tf.linalg.matvec(x, params))
        )
    else:
        model, settings["jit_compile"] = Logistic(), False
    ledger = dpvi.PrivacyLedger(ledger_path, dataset_id="killed")
    model.compile(ledger=ledger, steps_per_execution=STEPS, **settings)
    return model

def data(num):
    x = np.random.default_rng(0).normal(size=(num, 3)).astype("float32")
    return x, (x[:, 0] > 0).astype("int32")
""".replace("STEPS", str(STEPS_PER_EXECUTION))

_SERVE = """
for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        try:
            train(*line.split())
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    os.write(1, b"ended %d\\n" % os.waitpid(pid, 0)[1])
"""


class Trainers:
    """Starts trainers on a ledger, one at a time.

    Args:
      directory: of ledger and marks.
      train: source of `train(ledger_path, marks_path, *arguments)`, which writes "ready <pid>" when it is about to fit.
    """

    def __init__(self, directory: pathlib.Path, train: str) -> None:
        self.ledger, self.marks = directory / "ledger", directory / "marks"
        self.errors = (directory / "errors").open("w+")
        tests = pathlib.Path(__file__).resolve().parents[1]
        paths = os.pathsep.join(map(str, (tests.parent, tests)))
        self.process = subprocess.Popen(
            [sys.executable, "-c", _PREPARED + train + _SERVE],
            env={**os.environ, "TF_USE_LEGACY_KERAS": "1", "PYTHONPATH": paths},
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

    def start(self, *arguments: object) -> int:
        self.process.stdin.write(f"{' '.join(map(str, (self.ledger, self.marks, *arguments)))}\n")
        self.process.stdin.flush()
        return self.answer("ready")

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(timeout=60)
        self.process.stdout.close()
        self.errors.close()


def size(path: pathlib.Path) -> int:
    return path.stat().st_size if path.exists() else 0


def kill_once(trainers: Trainers, seconds: float, *arguments: object, at_start: bool) -> bool:
    """Starts or resumes training and kills it some seconds into `fit` or into its steps; False if it ended before."""
    before = size(trainers.marks)
    pid = trainers.start(*arguments)
    begun = time.monotonic()
    while not at_start and size(trainers.marks) == before and time.monotonic() < begun + 120:
        time.sleep(0.01)
    time.sleep(seconds)
    with contextlib.suppress(ProcessLookupError):  # It may have ended.
        os.kill(pid, signal.SIGKILL)
    status = trainers.answer("ended")
    assert status in (0, signal.SIGKILL), status
    return status == signal.SIGKILL


def check_books(directory: pathlib.Path, kills: int) -> tuple[int, int]:
    """Charged are all steps that were begun, and the reservation that was open at each kill."""
    marks = (directory / "marks").read_bytes() if (directory / "marks").exists() else b""
    begun, ended = marks.count(b"b"), marks.count(b"e")
    ledger = dpvi.PrivacyLedger(directory / "ledger", read_only=True)
    charged = ledger.num_releases
    assert ended <= begun <= charged
    assert charged - ledger.unconfirmed_steps <= begun
    assert begun <= ended + kills * STEPS_PER_EXECUTION
    return charged, ended
