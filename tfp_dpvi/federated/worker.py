"""A hospital's resident process: it holds TensorFlow, the records and the ledger, and answers tasks on a socket of its own.

    python -m tfp_dpvi.federated.worker --study package.module:function --data records.npz --name berlin
        --ledger berlin.ledger --epsilon 1 --delta 1e-5 --rounds 10 --socket /run/dpvi/berlin.sock

The study is what a function without arguments returns; the data are the arrays "x" and, where there is one, "y" of an npz file.
Epsilon, delta and the rounds are this hospital's own: no message changes them.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import pathlib
import socket
import sys

import numpy as np

from tfp_dpvi.federated.hospital import Hospital
from tfp_dpvi.federated.messages import MessageError
from tfp_dpvi.federated.proxy import receive, send
from tfp_dpvi.federated.simulation import hospital_of
from tfp_dpvi.privacy import PrivacyLedger

_LOG = logging.getLogger("tfp_dpvi")
_QUIET = 30.0  # Seconds after which a connection that says nothing is closed.


def serve(hospital: Hospital, path: str | os.PathLike[str], *, requests: int | None = None) -> None:
    """Answers tasks on a Unix socket that only this user can open, one after another.

    Args:
      hospital: holds the records.
      path: of the socket; an old one is replaced.
      requests: after how many connections to stop; None: never.
    """
    path = pathlib.Path(path)
    path.unlink(missing_ok=True)
    terms = hospital.study.terms
    most = 16 * (terms.prior.shift.size + terms.prior.precision.size) + 8192
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        before = os.umask(0o177)  # From the first moment on.
        try:
            listener.bind(str(path))
        finally:
            os.umask(before)
        listener.listen()
        _LOG.info("%s listens at %s", hospital.name, path)
        while requests is None or requests > 0:
            connection, _ = listener.accept()
            requests = None if requests is None else requests - 1
            with connection:
                connection.settimeout(_QUIET)
                try:
                    send(connection, _reply(hospital, receive(connection, most)))
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
    parser = argparse.ArgumentParser(prog="python -m tfp_dpvi.federated.worker", description=__doc__.split("\n")[0])
    parser.add_argument("--study", required=True, help="module:function that returns the study")
    parser.add_argument("--data", required=True, help="npz file with x and, where there is one, y")
    parser.add_argument("--name", required=True, help="of the hospital")
    parser.add_argument("--ledger", required=True, help="file or database URL; it outlives this process")
    parser.add_argument("--epsilon", type=float, required=True, help="the most that these records may ever cost")
    parser.add_argument("--delta", type=float, default=1e-5)
    parser.add_argument("--rounds", type=int, default=10, help="rounds that this hospital allows")
    parser.add_argument("--socket", required=True, help="path of the Unix socket to listen at")
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    module, _, function = given.study.partition(":")
    sys.path.insert(0, os.getcwd())
    study = getattr(importlib.import_module(module), function)()
    with np.load(given.data, allow_pickle=False) as held:
        x, y = held["x"], held.get("y")
    with PrivacyLedger(given.ledger) as ledger:
        budget = {"epsilon": given.epsilon, "delta": given.delta, "rounds": given.rounds, "ledger": ledger}
        hospital = hospital_of(study, x, y, name=given.name, **budget)
        print(f"{given.name}: {hospital.rounds_left} rounds left, epsilon {hospital.spent:.4g} spent", flush=True)
        serve(hospital, given.socket)
    return 0


if __name__ == "__main__":
    sys.exit(main())
