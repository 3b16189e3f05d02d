"""A hospital's resident process, which holds TensorFlow, the records and the ledger.

It answers tasks on a Unix socket.

    python -m tfp_dpvi.federated.deployment.worker --study package.module:function
        --data records.npz --name berlin
        --ledger berlin.ledger --epsilon 1 --delta 1e-5 --rounds 10
        --socket /run/dpvi/berlin.sock --socket-group dpvi-clients

The function takes no arguments and returns the study; the npz file has the arrays "x" and, where
there is one, "y". A CSV or Parquet file has the columns of the study's schema, in any order, and
may have others. Epsilon, delta and the rounds are this hospital's own: no message changes them.

    ... --ledger berlin.ledger --epsilon 1 --count-columns berlin.json --num-hospitals 3

writes noisy counts of the columns of which the schema has bounds alone, for `described_together`,
and ends: before the hospitals agree on a study.

The worker runs as a user of its own, which owns records and ledger. The SuperNode runs as another
user, a member of the socket's group.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import logging
import os
import pathlib
import sys
from multiprocessing.connection import Connection, Listener
from typing import TYPE_CHECKING

import numpy as np
import sqlalchemy as sa

from tfp_dpvi._keystream import SECURE
from tfp_dpvi._tf import Structure
from tfp_dpvi.data.units import Identifiers
from tfp_dpvi.federated.counts import count_columns
from tfp_dpvi.federated.deployment import access
from tfp_dpvi.federated.hospital import Hospital
from tfp_dpvi.federated.messages import MessageError
from tfp_dpvi.federated.simulation import hospital_of
from tfp_dpvi.federated.study import Study
from tfp_dpvi.privacy import PrivacyLedger

if TYPE_CHECKING:
    import pandas

_LOG = logging.getLogger("tfp_dpvi")
_QUIET = 30.0  # Seconds after which a connection that says nothing is closed.


def serve(
    hospital: Hospital,
    path: str | os.PathLike[str],
    *,
    group: int | None = None,
    requests: int | None = None,
) -> None:
    """Answers tasks, one after another, on a Unix socket; an old one at `path` is replaced.

    Args:
      hospital: The hospital that answers.
      path: Path of the socket.
      group: Number of the group whose members may ask, except for root and this process's own
        user, which could read the records themselves. By default this user alone may ask, and
        nothing keeps the records from it.
      requests: Number of requests after which to stop; by default never.

    Raises:
      PermissionError: This user is no member of the group, so that it cannot give the socket to it.
    """
    pathlib.Path(path).unlink(missing_ok=True)
    # The socket is private from the first moment on.
    before = os.umask(0o177 if group is None else 0o117)
    try:
        listener = Listener(os.fspath(path), "AF_UNIX", backlog=16)
    finally:
        os.umask(before)
    with listener:
        if group is not None:
            _give(path, group)
        _LOG.info("%s listens at %s", hospital.name, path)
        while requests is None or requests > 0:
            requests = None if requests is None else requests - 1
            try:
                with listener.accept() as connection:
                    _answer_one(hospital, connection, group)
            except (OSError, EOFError) as error:
                _LOG.warning("A connection broke: %s", error)


def _give(path: str | os.PathLike[str], group: int) -> None:
    """Gives a socket to a group."""
    try:
        os.chown(path, -1, group, follow_symlinks=False)
    except PermissionError:
        raise PermissionError(
            f"the socket cannot be given to group {group}: add user {os.geteuid()} to the group."
        ) from None


def _answer_one(hospital: Hospital, connection: Connection, group: int | None) -> None:
    """Answers a client's task, if it may ask and does so in time."""
    if not connection.poll(_QUIET):
        return
    message = connection.recv_bytes(hospital.study.terms.most_bytes)
    refusal = "" if group is None else access.refusal(*access.peer(connection), group)
    if refusal:
        _LOG.warning("A client is refused: %s", refusal)
    connection.send_bytes(b"-" + refusal.encode() if refusal else _reply(hospital, message))


def _reply(hospital: Hospital, message: bytes) -> bytes:
    try:
        return b"+" + hospital.answer(message)
    except MessageError as error:
        _LOG.warning("A task is refused: %s", error)
        return b"-" + str(error).encode()
    except Exception as error:  # The worker lives on; what the error says may be of records.
        _LOG.exception("A task failed.")
        return b"-it failed: a " + type(error).__name__.encode() + b", see the worker's log."


def main(arguments: list[str] | None = None) -> int:
    """Runs the process; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tfp_dpvi.federated.deployment.worker", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--study", required=True, help="module:function that returns the study")
    parser.add_argument("--data", required=True, help="file of records: npz, csv, parquet")
    parser.add_argument("--name", required=True, help="of the hospital")
    parser.add_argument(
        "--ledger", required=True, help="file or database URL; it outlives this process"
    )
    parser.add_argument(
        "--last-reply",
        help="file that keeps the latest reply for a restart; by default the ledger's name and "
        "'.reply' where that is a file",
    )
    parser.add_argument(
        "--epsilon", type=float, required=True, help="the most that these records may ever cost"
    )
    parser.add_argument("--delta", type=float, default=1e-5)
    parser.add_argument("--rounds", type=int, default=20, help="rounds that this hospital allows")
    parser.add_argument(
        "--randomness",
        choices=[SECURE],
        help="noise and samples from a cryptographic generator (the extra 'secure')",
    )
    parser.add_argument(
        "--trusts-sum",
        action="store_true",
        help="epsilon is the price of a total: trusts who adds up sums, as the study says",
    )
    parser.add_argument(
        "--unit-ids",
        metavar="COLUMN",
        help="the persons of the rows, in a study of persons: a column, or an array of the npz",
    )
    parser.add_argument("--num-hospitals", type=int, help="about how many count their columns")
    parser.add_argument("--socket", help="path of the Unix socket to listen at")
    parser.add_argument(
        "--count-columns",
        metavar="FILE",
        help="write noisy counts of columns without typical values to a new file, and end",
    )
    client = parser.add_mutually_exclusive_group()
    client.add_argument(
        "--socket-group",
        metavar="GROUP",
        help="whose members may ask, among them the SuperNode's user, which must not be this one",
    )
    client.add_argument(
        "--rehearsal",
        action="store_true",
        help="the SuperNode runs as this user: any app can read the data, which must be simulated",
    )
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    if _holds_password(options.ledger):
        parser.error(
            "--ledger holds a password, and every user of this machine sees the command line: "
            "leave it to the file ~/.pgpass"
        )
    answers = options.count_columns is None
    if answers and options.socket_group is None and not options.rehearsal:
        parser.error("one of the arguments --socket-group --rehearsal is required")
    needed = "socket" if answers else "num_hospitals"
    if getattr(options, needed) is None:
        parser.error(f"--{needed.replace('_', '-')} is missing")
    try:
        group = None if options.socket_group is None else access.group_id(options.socket_group)
    except ValueError as error:
        parser.error(f"--socket-group: {error}")
    if options.rehearsal:
        _LOG.warning("A rehearsal: whoever can submit a Flower app can read %s.", options.data)
    os.umask(0o077)  # What this process writes is for its own user alone.
    try:
        _run(options, group)
    except (PermissionError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _run(options: argparse.Namespace, group: int | None) -> None:
    """Makes the hospital and answers until the process is killed."""
    protected = not options.rehearsal
    if protected:
        access.check_unchangeable("the working directory", os.getcwd())
        access.check_private("--data", options.data)
    module, function = options.study.partition(":")[::2]
    sys.path.insert(0, os.getcwd())
    with access.checked_imports("--study") if protected else contextlib.nullcontext():
        study = getattr(importlib.import_module(module), function)()
    x, y = read_records(options.data, study)
    persons = None if options.unit_ids is None else read_unit_ids(options.data, options.unit_ids)
    last_reply = options.last_reply
    if last_reply is None and "://" not in options.ledger:
        last_reply = f"{options.ledger}.reply"
    with PrivacyLedger(options.ledger) as ledger:
        if protected and "://" not in options.ledger:
            access.check_private("--ledger", options.ledger)
        if options.count_columns is not None:
            return _count(options, study, x, persons, ledger)
        budget = {
            "epsilon": options.epsilon,
            "delta": options.delta,
            "rounds": options.rounds,
            "ledger": ledger,
            "randomness": options.randomness,
            "last_reply": last_reply,
            "trusts_sum": options.trusts_sum,
            "unit_ids": persons,
        }
        if study.example is None:
            _LOG.warning("The study has neither schema nor example: its columns are not compared.")
        hospital = hospital_of(study, x, y, name=options.name, **budget)
        print(
            f"{hospital.name}: {hospital.rounds_left} rounds left, "
            f"epsilon {hospital.spent:.4g} spent",
            flush=True,
        )
        serve(hospital, options.socket, group=group)


def _count(
    options: argparse.Namespace,
    study: Study,
    table: Structure,
    persons: Identifiers,
    ledger: PrivacyLedger,
) -> None:
    """Writes the noisy counts of a table's columns to a new file."""
    path = pathlib.Path(options.count_columns)
    # Before anything is spent.
    if path.exists():
        raise ValueError(f"--count-columns {path.name!r} exists: columns are counted once.")
    if not os.access(path.parent, os.W_OK):
        raise ValueError(f"--count-columns {path.name!r} cannot be written: name another folder.")
    if study.columns is None:
        raise ValueError("--count-columns needs a study with a schema: give one to the Study.")
    if (persons is None) != (study.max_rows_per_unit is None):
        raise ValueError("--unit-ids is for a study with max_rows_per_unit=, and needed there.")
    counts = count_columns(
        study.columns.schema,
        table,
        name=options.name,
        epsilon=options.epsilon,
        delta=options.delta,
        ledger=ledger,
        num_hospitals=options.num_hospitals,
        unit_ids=persons,
        outside=study.columns.outside,
    )
    counts.save(path)
    print(f"{options.name}: epsilon {ledger.epsilon(options.delta):.4g} spent", flush=True)


def read_records(path: str, study: Study) -> tuple[Structure, Structure | None]:
    """Returns x and y of a file: npz, or CSV and Parquet with the columns of the study's schema.

    Args:
      path: Path of the file.
      study: The study.

    Raises:
      ValueError: The file is of another kind, or a table and the study has no schema.
    """
    kind = pathlib.Path(path).suffix.lower()
    if kind == ".npz":
        with np.load(path, allow_pickle=False) as held:
            return held["x"], held.get("y")
    if kind not in (".csv", ".parquet"):
        raise ValueError(f"--data {path!r} is no .npz, .csv or .parquet: convert it to one.")
    if study.columns is None:
        raise ValueError("--data is a table, whose columns need a schema: give one to the Study.")
    table = _table(path)
    names = (*study.columns.schema.names, study.weights)
    return table[[name for name in table.columns if name in names]], None


def read_unit_ids(path: str, column: str) -> Identifiers:
    """Returns the person of each row of a file.

    Args:
      path: Path of the file, as of `read_records`.
      column: The column of a table, or the array of an npz file.

    Raises:
      ValueError: The file has no such column.
    """
    if pathlib.Path(path).suffix.lower() == ".npz":
        with np.load(path, allow_pickle=False) as held:
            found = held.get(column)
    else:
        found = _table(path).get(column)
    if found is None:
        raise ValueError(f"--unit-ids {column!r} is no column of --data: name one.")
    return np.asarray(found)


def _table(path: str) -> pandas.DataFrame:
    import pandas as pd  # A table's reader, where there is a table.

    is_csv = pathlib.Path(path).suffix.lower() == ".csv"
    try:
        return pd.read_csv(path) if is_csv else pd.read_parquet(path)
    except (ValueError, OSError) as error:  # The error may quote a record.
        raise ValueError(
            f"--data {path!r} cannot be read as a table: a {type(error).__name__}."
        ) from None


def _holds_password(ledger: str) -> bool:
    """Returns whether the URL of a ledger, if it is one, has a password in it."""
    try:
        url = sa.make_url(ledger)
    except sa.exc.ArgumentError:  # A file's path.
        return False
    return url.password is not None or "password" in url.query


if __name__ == "__main__":
    sys.exit(main())
