"""Processes that spend one ledger together."""

import json
import os
import pathlib
import subprocess
import sys

from tfp_dpvi.privacy import PrivacyLedger

ROOT = pathlib.Path(__file__).resolve().parents[2]


def start(arguments, script):
    """Starts Python on a script."""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


# Reserves until the budget is gone; says what it was granted, by noise.
SPENDER = """
import json, random, sys, time
from tfp_dpvi.privacy import BudgetExhaustedError, FullBatch, PrivacyLedger, PrivacyPlan
where, seed = sys.argv[1:]
rng = random.Random(int(seed))
granted, refused = {}, 0
ledger = PrivacyLedger(where)
print("ready", flush=True)
sys.stdin.readline()  # All begin together.
while refused < 4:
    z, steps = rng.choice([20.0, 30.0, 40.0]), rng.randint(1, 4)
    try:
        token = ledger.reserve(PrivacyPlan(FullBatch(), z, rng.choice([1, 20])), steps)
    except BudgetExhaustedError:
        refused += 1
        continue
    run = rng.choice([steps, steps, rng.randint(0, steps)])
    granted[z] = granted.get(z, 0) + run
    ledger.confirm(token, steps_run=run)
    time.sleep(rng.random() * 0.02)  # SQLite lets whoever asks first in: so that it is not always the same.
print(json.dumps(granted))
"""


def check_spenders(where, processes):
    """Processes that spend one budget: nothing is lost, nothing goes over it, and nothing is left of it."""
    with PrivacyLedger(where, budget_epsilon=1.5, budget_delta=1e-5):
        pass
    workers = [start([where, seed], SPENDER) for seed in range(processes)]
    for worker in workers:
        assert worker.stdout.readline() == "ready\n"
    for worker in workers:
        worker.stdin.write("\n")
        worker.stdin.flush()
    granted, busy = {}, 0
    for worker in workers:
        said, _ = worker.communicate(timeout=280)
        assert worker.returncode == 0
        found = json.loads(said.splitlines()[-1])
        busy += bool(found)
        for z, steps in found.items():
            granted[float(z)] = granted.get(float(z), 0) + steps
    with PrivacyLedger(where) as ledger:
        assert {e.plan.noise_multiplier: e.steps for e in ledger.entries} == {
            z: n for z, n in granted.items() if n
        }
        assert ledger.unconfirmed_steps == 0
        assert 1.35 < ledger.epsilon(1e-5) <= 1.5
    assert busy > 1  # Else they came one after the other.
