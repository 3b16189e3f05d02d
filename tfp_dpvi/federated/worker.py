"""A hospital's resident process: it holds TensorFlow, the records and the ledger, and answers tasks on a Unix socket.

    python -m tfp_dpvi.federated.worker --study package.module:function --data records.npz --name berlin
        --ledger berlin.ledger --epsilon 1 --delta 1e-5 --rounds 10 --socket /run/dpvi/berlin.sock

The function takes no arguments and returns the study; the npz file has the arrays "x" and, where there is one, "y". Epsilon,
delta and the rounds are this hospital's own: no message changes them.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import pathlib
import sys
from multiprocessing.connection import Listener

import numpy as np

from tfp_dpvi.federated.hospital import Hospital
from tfp_dpvi.federated.messages import MessageError
from tfp_dpvi.federated.simulation import hospital_of
from tfp_dpvi.privacy import PrivacyLedger

_LOG = logging.getLogger("tfp_dpvi")
_QUIET = 30.0  # Seconds after which a connection that says nothing is closed.


def serve(hospital: Hospital, path: str | os.PathLike[str], *, requests: int | None = None) -> None:
    """Answers tasks, one after another, on a Unix socket that this user alone can open; an old one at `path` is replaced.

    Stops after so many `requests`, by default never.
    """
    pathlib.Path(path).unlink(missing_ok=True)
    before = os.umask(0o177)  # The socket is private from the first moment on.
    try:
        listener = Listener(os.fspath(path), "AF_UNIX", backlog=16)
    finally:
        os.umask(before)
    with listener:
        _LOG.info("%s listens at %s", hospital.name, path)
        while requests is None or requests > 0:
            requests = None if requests is None else requests - 1
            try:
                with listener.accept() as connection:
                    if connection.poll(_QUIET):
                        connection.send_bytes(
                            _reply(hospital, connection.recv_bytes(hospital.study.terms.most_bytes))
                        )
            except (OSError, EOFError) as error:
                _LOG.warning("A connection broke: %s", error)


def _reply(hospital: Hospital, message: bytes) -> bytes:
    try:
        return b"+" + hospital.answer(message)
    except MessageError as error:
        _LOG.warning("A task is refused: %s", error)
        return b"-" + str(error).encode()


def main(arguments: list[str] | None = None) -> int:
    """Runs the process; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tfp_dpvi.federated.worker", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--study", required=True, help="module:function that returns the study")
    parser.add_argument("--data", required=True, help="npz file with x and, where there is one, y")
    parser.add_argument("--name", required=True, help="of the hospital")
    parser.add_argument(
        "--ledger", required=True, help="file or database URL; it outlives this process"
    )
    parser.add_argument(
        "--epsilon", type=float, required=True, help="the most that these records may ever cost"
    )
    parser.add_argument("--delta", type=float, default=1e-5)
    parser.add_argument("--rounds", type=int, default=10, help="rounds that this hospital allows")
    parser.add_argument("--socket", required=True, help="path of the Unix socket to listen at")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    module, _, function = options.study.partition(":")
    sys.path.insert(0, os.getcwd())
    study = getattr(importlib.import_module(module), function)()
    with np.load(options.data, allow_pickle=False) as held:
        x, y = held["x"], held.get("y")
    with PrivacyLedger(options.ledger) as ledger:
        budget = {
            "epsilon": options.epsilon,
            "delta": options.delta,
            "rounds": options.rounds,
            "ledger": ledger,
        }
        hospital = hospital_of(study, x, y, name=options.name, **budget)
        print(
            f"{hospital.name}: {hospital.rounds_left} rounds left, epsilon {hospital.spent:.4g} spent",
            flush=True,
        )
        serve(hospital, options.socket)
    return 0


if __name__ == "__main__":
    sys.exit(main())
