"""Resident workers as real processes, killed with SIGKILL in the middle of a round: the others go on and no ledger under-counts."""

import contextlib
import os
import pathlib
import random
import signal
import subprocess
import sys
import threading
import time
import types
from multiprocessing.connection import Client

import numpy as np
import pandas as pd
import pytest
from support.federation import answer

import tfp_dpvi as dpvi
from tfp_dpvi.data import Binary, Continuous, Integer, Schema
from tfp_dpvi.federated import (
    ColumnCounts,
    Factor,
    MessageError,
    Server,
    StudyTerms,
    Synchronous,
    described_together,
)
from tfp_dpvi.federated.columns import Columns
from tfp_dpvi.federated.deployment import worker
from tfp_dpvi.federated.deployment.proxy import WorkerError, ask
from tfp_dpvi.federated.deployment.worker import read_records, serve
from tfp_dpvi.privacy import PrivacyLedger

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "federated"
TERMS = StudyTerms.load(EXAMPLE / "hospitals" / "terms.json")
STEPS = TERMS.local_steps


class Worker:
    """The process of one hospital of the example's study."""

    def __init__(self, folder, number, rounds=4):
        self.name, self.folder = f"hospital{number}", folder
        self.socket, self.ledger = folder / f"{self.name}.sock", folder / f"{self.name}.ledger"
        self.data = folder / f"{self.name}.npz"
        rng = np.random.default_rng(number)
        x = rng.normal(size=(300, 3)).astype("float32")
        np.savez(self.data, x=x, y=(x[:, 0] > 0).astype("int32"))
        self.rounds = rounds
        self.start()

    def start(self):
        command = [
            sys.executable,
            "-m",
            "tfp_dpvi.federated.deployment.worker",
            "--study",
            "hospitals.study:make_study",
        ]
        command += [
            "--data",
            self.data,
            "--name",
            self.name,
            "--ledger",
            self.ledger,
            "--epsilon",
            "3",
        ]
        command += ["--rounds", str(self.rounds), "--socket", self.socket, "--rehearsal"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(EXAMPLE)])}
        self.socket.unlink(missing_ok=True)
        self.process = subprocess.Popen(
            [str(part) for part in command], cwd=EXAMPLE, env=environment,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        self.said = self.process.stdout.readline()
        until = time.monotonic() + 240
        while not self.socket.exists() and time.monotonic() < until:
            time.sleep(0.05)

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.process.stdout.close()

    def charged(self):
        with dpvi.PrivacyLedger(self.ledger, read_only=True) as ledger:
            return ledger.num_releases


def play_round(server, worker, *, during=None):
    """One synchronous round of the worker and of a hospital "steady" that is always there; each is asked in a thread."""
    lock, threads = threading.Lock(), []

    def one(task):
        if task.hospital == "steady":
            reply = answer(task, Factor(np.zeros(3), np.ones(3)))
        else:
            try:
                reply = ask(worker.socket, task.to_bytes(), timeout=120.0)
            except WorkerError:
                with lock:
                    server.give_up(task.request)
                return
        with lock:
            server.receive(task.hospital, reply)

    for task in server.due():
        threads.append(threading.Thread(target=one, args=(task,)))
        threads[-1].start()
    if during is not None:
        during()
    for thread in threads:
        thread.join()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_worker_killed_at_any_point_of_a_round(tmp_path):
    """Killed at random moments of two rounds: the other goes on, the factor stays, each step is counted, and it comes back."""
    victim, rng = Worker(tmp_path, 1, rounds=6), np.random.default_rng(random.getrandbits(32))
    try:
        assert victim.socket.stat().st_mode & 0o777 == 0o600
        with pytest.raises(WorkerError, match="is no Task"):
            ask(victim.socket, b"\x80\x04pickle")
        with pytest.raises(WorkerError, match="does not answer"):
            ask(victim.socket, bytes(10**7))
        server = Server(TERMS, ["steady", victim.name], Synchronous(rounds=6, damping=0.5))
        play_round(server, victim)
        assert set(server.history[0].hospitals) == {"steady", victim.name}
        taken = 1
        for _ in range(2):
            kept = server.factors[victim.name]

            def kill():
                time.sleep(rng.uniform(0.0, 0.1))
                victim.kill()

            play_round(server, victim, during=kill)
            last = server.history[-1]
            assert "steady" in last.hospitals
            if victim.name in last.hospitals:
                taken += 1
            else:
                np.testing.assert_array_equal(server.factors[victim.name].precision, kept.precision)
            assert last.posterior.exceeds(TERMS.floor)
            assert victim.charged() >= taken * STEPS
            victim.start()
            assert "rounds left" in victim.said
        (steady, task) = server.due()
        server.give_up(steady.request)
        before, first = victim.charged(), ask(victim.socket, task.to_bytes())
        assert ask(victim.socket, task.to_bytes()) == first, "a request repeated"
        # Nothing, if it was killed after it had kept a reply, which it now repeats.
        assert victim.charged() - before in (0, STEPS)
        assert server.receive(victim.name, first)
        with dpvi.PrivacyLedger(victim.ledger, read_only=True) as ledger:
            assert len(ledger.entries) == 1, "one plan, whatever happened"
            assert ledger.epsilon(1e-5) <= 3.0
    finally:
        victim.kill()


def test_a_client_that_is_gone_when_its_task_is_refused_does_not_end_the_worker(tmp_path):
    """The refusal goes to a closed connection; the next client is answered."""

    def refuse(message):
        time.sleep(0.3)  # So that the first client is gone.
        raise MessageError("no")

    path = tmp_path / "w.sock"
    hospital = types.SimpleNamespace(
        study=types.SimpleNamespace(terms=TERMS), name="a", answer=refuse
    )
    thread = threading.Thread(
        target=serve, args=(hospital, path), kwargs={"requests": 2}, daemon=True
    )
    thread.start()
    while not path.exists():
        time.sleep(0.01)
    time.sleep(0.1)
    with Client(str(path), "AF_UNIX") as gone:
        gone.send_bytes(b"not a task")
    with pytest.raises(WorkerError, match="refused: no"):
        ask(path, b"not a task", timeout=10.0)
    thread.join(10.0)


def test_a_worker_outlives_a_task_that_fails(tmp_path):
    """Whatever goes wrong: the client hears of which kind it was, and no more."""

    def fail(message):
        raise ZeroDivisionError("record 7 is 0")

    path = tmp_path / "w.sock"
    hospital = types.SimpleNamespace(
        study=types.SimpleNamespace(terms=TERMS), name="a", answer=fail
    )
    settings = {"args": (hospital, path), "kwargs": {"requests": 2}, "daemon": True}
    thread = threading.Thread(target=serve, **settings)
    thread.start()
    while not path.exists():
        time.sleep(0.01)
    time.sleep(0.1)
    for _ in range(2):
        with pytest.raises(WorkerError, match="it failed: a ZeroDivisionError") as error:
            ask(path, b"a task", timeout=10.0)
        assert "record" not in str(error.value)
    thread.join(10.0)


def tabular_study():
    columns = {"age": Integer(0, 110, bins=4), "height": Continuous(0.4, 2.5, bins=4)}
    read = Columns(Schema({**columns, "ill": Binary()}), "ill")
    return types.SimpleNamespace(columns=read, weights=None)


@pytest.mark.parametrize("kind", ["csv", "parquet", "npz"])
def test_a_worker_reads_tables(tmp_path, kind):
    """Columns go by their names, in any order, and others are left alone."""
    table = pd.DataFrame({"ill": [0, 1], "height": [1.7, 1.6], "note": ["-", "-"], "age": [40, 7]})
    path, study = tmp_path / f"records.{kind}", tabular_study()
    if kind == "npz":
        np.savez(path, x=table[["age", "height"]].to_numpy(), y=table["ill"])
    elif kind == "csv":
        table.to_csv(path, index=False)
    else:
        pytest.importorskip("pyarrow")
        table.to_parquet(path)
    x, y = study.columns.arrays(*read_records(str(path), study))
    np.testing.assert_allclose(x, [[40.0, 1.7], [7.0, 1.6]], rtol=1e-6)
    np.testing.assert_array_equal(y, [0, 1])


@pytest.mark.parametrize("kind", ["csv", "npz"])
def test_a_worker_reads_the_persons_of_rows(tmp_path, kind):
    path = str(tmp_path / f"records.{kind}")
    table = pd.DataFrame({"age": [40, 7], "person": ["a", "b"]})
    if kind == "npz":
        np.savez(path, x=table[["age"]].to_numpy(), person=table["person"].to_numpy(str))
    else:
        table.to_csv(path, index=False)
    assert list(worker.read_unit_ids(path, "person")) == ["a", "b"]
    with pytest.raises(ValueError, match="--unit-ids 'who' is no column"):
        worker.read_unit_ids(path, "who")


@pytest.mark.parametrize(
    ("name", "says"),
    [("records.xlsx", "is no .npz, .csv or .parquet"), ("none.csv", "a FileNotFoundError")],
)
def test_a_file_that_is_no_table_is_refused(tmp_path, name, says):
    with pytest.raises(ValueError, match=says):
        read_records(str(tmp_path / name), tabular_study())
    without = types.SimpleNamespace(columns=None, weights=None)
    with pytest.raises(ValueError, match="need a schema"):
        read_records(str(tmp_path / "records.csv"), without)


def bounds_study():
    """The study before hospitals know typical values."""
    columns = Columns(Schema({"age": Continuous(0.0, 500.0), "ill": Binary()}), "ill")
    return types.SimpleNamespace(columns=columns, max_rows_per_unit=1, weights=None)


def test_a_worker_counts_columns_once_and_ends(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "bounds", types.SimpleNamespace(make=bounds_study))
    rng = np.random.default_rng(0)
    ages = pd.DataFrame({"age": rng.normal(50.0, 9.0, 4000), "ill": 1, "who": range(4000)})
    ages.to_csv("berlin.csv", index=False)
    command = ["--study", "bounds:make", "--data", "berlin.csv", "--name", "berlin"]
    command += ["--ledger", "berlin.ledger", "--epsilon", "1", "--count-columns", "berlin.json"]
    with pytest.raises(SystemExit):
        worker.main(command)
    assert "--num-hospitals is missing" in capsys.readouterr().err
    monkeypatch.setattr(worker.access, "check_unchangeable", lambda *given: None)
    monkeypatch.setattr(worker.access, "check_private", lambda *given: None)
    monkeypatch.setattr(worker.access, "checked_imports", lambda name: contextlib.nullcontext())
    command += ["--num-hospitals", "1"]
    assert worker.main(command) == 2
    assert "--unit-ids is for a study with max_rows_per_unit" in capsys.readouterr().err
    command += ["--unit-ids", "who"]
    assert worker.main([*command, "--count-columns", "nowhere/berlin.json"]) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert worker.main(command) == 0
    counts = ColumnCounts.load("berlin.json")
    schema = described_together(bounds_study().columns.schema, [counts])
    mean, deviation = schema.columns["age"].typical
    assert mean == pytest.approx(50.0, abs=9.0)
    assert 4.5 < deviation < 27.0
    # A second call neither spends nor writes.
    assert worker.main(command) == 2
    assert "exists: columns are counted once" in capsys.readouterr().err
    with PrivacyLedger("berlin.ledger") as ledger:
        assert ledger.num_releases == 1
        assert ledger.entries[0].plan.person is not None
