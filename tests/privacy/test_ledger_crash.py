"""The ledger under SIGKILL, under two processes, and under random interleavings of write, crash and read."""

import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfp_dpvi.privacy import LedgerError, PoissonSampling, PrivacyLedger, PrivacyPlan

PLANS = [PrivacyPlan(PoissonSampling(0.01), z, 100) for z in (1.0, 2.0, 3.0)]
ROOT = pathlib.Path(__file__).resolve().parents[2]
BLOCK = 3

# A worker that reserves, "releases" (writes one byte to an unbuffered file per release), and confirms, until killed.
WORKER = """
import os, random, sys
from tfp_dpvi.privacy import PoissonSampling, PrivacyLedger, PrivacyPlan

path, released, seed = sys.argv[1:]
rng = random.Random(int(seed))
plans = [PrivacyPlan(PoissonSampling(0.01), z, 100) for z in (1.0, 2.0, 3.0)]
out = os.open(released, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
ledger = PrivacyLedger(path, dataset_id="crash")
print("ready", flush=True)
while True:
    plan = rng.choice(plans)
    steps = rng.randint(1, 3)
    reservation = ledger.reserve(plan, steps)
    run = steps if rng.random() < 0.8 else rng.randint(0, steps)
    for _ in range(run):
        os.write(out, b"x")
    ledger.confirm(reservation, steps_run=run)
"""


def _start(arguments, script=WORKER):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)], env=environment, stdout=subprocess.PIPE, text=True
    )


def _released(path):
    return path.stat().st_size if path.exists() else 0


def _kill_and_check(tmp_path, times, seed):
    rng = random.Random(seed)
    path, released = tmp_path / "ledger", tmp_path / "released"
    before = 0
    for turn in range(times):
        worker = _start([path, released, turn])
        # A kill before "ready" hits the opening, the recovery or the first write.
        if rng.random() < 0.9:
            assert worker.stdout.readline() == "ready\n"
            time.sleep(rng.expovariate(1 / 0.01))
        else:
            time.sleep(rng.uniform(0.5, 1.5))
        worker.send_signal(signal.SIGKILL)
        worker.wait()
        worker.stdout.close()
        count = _released(released)
        if not path.exists():
            assert count == 0
            continue
        ledger = PrivacyLedger(path, read_only=True) if path.stat().st_size else None
        charged = ledger.num_releases if ledger else 0
        # Each crash may leave one reservation of at most BLOCK steps charged and not run.
        assert count <= charged <= count + (turn + 1) * BLOCK
        assert charged >= before
        before = charged
    with PrivacyLedger(path, dataset_id="crash") as ledger:
        assert ledger.num_releases == before
        assert _released(released) > times
    return before


def test_sigkill_at_a_few_random_moments(tmp_path):
    _kill_and_check(tmp_path, 6, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_sigkill_at_200_random_moments(tmp_path):
    _kill_and_check(tmp_path, 200, seed=2)


def _wait_for_growth(path):
    size, deadline = _released(path), time.monotonic() + 30
    while _released(path) == size and time.monotonic() < deadline:
        time.sleep(0.0005)


# The same writer without imports to speak of: forked, so that 200 kills take seconds.
def _forked_writer(path, released, seed):
    rng = random.Random(seed)
    out = os.open(released, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    ledger = PrivacyLedger(path, dataset_id="crash")
    while True:
        steps = rng.randint(1, BLOCK)
        reservation = ledger.reserve(rng.choice(PLANS), steps)
        for _ in range(steps):
            os.write(out, b"x")
        ledger.confirm(reservation)


@pytest.mark.slow
def test_sigkill_at_200_random_moments_of_a_forked_writer(tmp_path):
    rng = random.Random(3)
    path, released = tmp_path / "ledger", tmp_path / "released"
    for turn in range(200):
        child = os.fork()
        if child == 0:
            try:
                _forked_writer(path, released, turn)
            finally:
                os._exit(1)
        if rng.random() < 0.9:  # else the kill hits the opening, the recovery or the first write
            _wait_for_growth(released)
        time.sleep(rng.expovariate(1 / 0.004))
        os.kill(child, signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
        count = _released(released)
        charged = 0
        if path.exists() and path.stat().st_size:
            try:
                charged = PrivacyLedger(path, read_only=True).num_releases
            except LedgerError:
                charged = 0  # killed within the first line: then nothing may have been released
        assert count <= charged <= count + (turn + 1) * BLOCK
    assert _released(released) > 180


COUNTER = """
import sys, time
from tfp_dpvi.privacy import LedgerError, PoissonSampling, PrivacyLedger, PrivacyPlan
plan = PrivacyPlan(PoissonSampling(0.01), float(sys.argv[2]), 100)
done = 0
while done < 40:
    try:
        with PrivacyLedger(sys.argv[1]) as ledger:
            for _ in range(5):
                ledger.confirm(ledger.reserve(plan, 1))
                done += 1
    except LedgerError as error:
        assert "in use" in str(error), error
    time.sleep(0.002)
"""


def test_two_processes_lose_no_record(tmp_path):
    path = tmp_path / "ledger"
    workers = [_start([path, z], COUNTER) for z in (1.0, 2.0)]
    for worker in workers:
        assert worker.wait(120) == 0
        worker.stdout.close()
    with PrivacyLedger(path) as ledger:
        assert sorted(e.steps for e in ledger.entries) == [40, 40]


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("reserve"), st.integers(0, 2), st.integers(1, 9)),
        st.tuples(st.just("seeded"), st.integers(0, 30), st.integers(1, 9)),
        st.tuples(st.just("confirm"), st.integers(0, 5), st.floats(0, 1)),
        st.tuples(st.just("read")),
        st.tuples(st.just("reopen")),
        st.tuples(st.just("crash"), st.integers(1, 400)),
    ),
    max_size=25,
)


@settings(max_examples=60, deadline=None)
@given(ACTIONS)
def test_random_interleavings(actions):
    """A model of plain counters against the file: never below what ran, exact where nothing crashed."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "ledger"
        ledger = PrivacyLedger(path, dataset_id="model")
        charged, seeded, open_reservations = {}, set(), []
        for action, *args in actions:
            if action == "reserve":
                token = ledger.reserve(PLANS[args[0]], args[1])
                charged[args[0]] = charged.get(args[0], 0) + args[1]
                open_reservations.append((token, args[0], args[1], None))
            elif action == "seeded":
                new = set(range(args[0], args[0] + args[1])) - seeded
                token = ledger.reserve(PLANS[0], args[1], seed=1, first_step=args[0])
                seeded |= new
                open_reservations.append((token, args[0], args[1], new))
            elif action == "confirm" and open_reservations:
                token, first, steps, new = open_reservations.pop(args[0] % len(open_reservations))
                run = round(args[1] * steps)
                ledger.confirm(token, steps_run=run)
                if new is None:  # Of seeded steps nothing is given back.
                    charged[first] -= steps - run
            elif action == "read":
                look = PrivacyLedger(path, read_only=True)
                assert look.num_releases == ledger.num_releases
            elif action == "reopen":
                ledger.close()
                ledger = PrivacyLedger(path)
                open_reservations.clear()
            elif action == "crash":
                # The process dies while it writes one more reservation: any part of its line may be there.
                ledger.close()
                data = path.read_bytes()
                with PrivacyLedger(path) as victim:
                    victim.reserve(PLANS[2], 7)
                more = path.read_bytes()[len(data) :]
                path.write_bytes(data + more[: args[0] % len(more)])
                ledger = PrivacyLedger(path)
                open_reservations.clear()
            assert ledger.num_releases == sum(charged.values()) + len(seeded)
        ledger.close()
        with PrivacyLedger(path, dataset_id="model") as last:
            assert last.num_releases == sum(charged.values()) + len(seeded)
