"""The tables of a ledger as one object sees them: the state that it read last, and the changes that it makes to it."""

import contextlib
import datetime
import json
import os
import socket
import uuid
from collections.abc import Iterator, Mapping
from typing import TypeAlias

import sqlalchemy as sa

from tfp_dpvi import _validate as check
from tfp_dpvi.privacy.database import CHARGES, FORMAT, LEDGER, PLANS, RESERVATIONS, Database
from tfp_dpvi.privacy.errors import LedgerError
from tfp_dpvi.privacy.ledger_state import Kind, LedgerState

# The statements of a reservation, made once: to build one takes longer than to run it.
_NEXT_VERSION = sa.update(LEDGER).values(version=LEDGER.c.version + 1)
_NEXT_AFTER = _NEXT_VERSION.where(LEDGER.c.version == sa.bindparam("known"), LEDGER.c.ledger_id == sa.bindparam("same"))
_ADD = (
    sa.update(CHARGES)
    .where(CHARGES.c.id == sa.bindparam("charge"))
    .values(steps=CHARGES.c.steps + sa.bindparam("more"))
)
_RESERVE = sa.insert(RESERVATIONS)
_OPEN = sa.select(RESERVATIONS.c.charge, RESERVATIONS.c.steps).where(
    RESERVATIONS.c.id == sa.bindparam("reservation"),
    RESERVATIONS.c.steps_run.is_(None),
    RESERVATIONS.c.process == sa.bindparam("process"),
)
_CONFIRM = (
    sa.update(RESERVATIONS)
    .where(RESERVATIONS.c.id == sa.bindparam("reservation"))
    .values(steps_run=sa.bindparam("run"))
)
_LEDGER = sa.select(LEDGER)
_VERSION = sa.select(LEDGER.c.version)
_FORMAT = sa.select(LEDGER.c.format)

Value: TypeAlias = str | int | float | bool | None


class LedgerStore:
    """Reads states of a ledger and writes changes; `PrivacyLedger` decides which.

    Formal guarantee: a change is written in one transaction, and a charge only if the ledger is still in the state that
    the charge was compared with. A state that is older than one seen before, or of another ledger, is refused.

    Args:
      path: a file, a database URL, or None for memory.
      dataset_id: the name of the data set, or None.
      read_only: refuse changes.
    """

    def __init__(
        self, path: str | os.PathLike[str] | None = None, *, dataset_id: str | None = None, read_only: bool = False
    ) -> None:
        self._database = Database(path, read_only=read_only)
        self._writer = uuid.uuid4().hex if path is None else ""
        self._refusal: str | None = None
        self._known: LedgerState | None = None
        self._making = self._written = -1  # The version that this object makes, and the last one that it made.
        try:
            self._open(dataset_id)
        except BaseException:
            self.close()
            raise

    def _open(self, dataset_id: str | None) -> None:
        if not self._database.read_only and not self._begun():
            with self._database.write() as connection:
                self._database.create_tables(connection)
                if not any(connection.execute(sa.select(one).limit(1)).first() for one in (LEDGER, RESERVATIONS)):
                    name = dataset_id or (None if self._database.in_memory else uuid.uuid4().hex)
                    row = {"format": FORMAT, "ledger_id": uuid.uuid4().hex, "dataset_id": name}
                    connection.execute(sa.insert(LEDGER).values(**row, version=0, continued=False))
        if not self._database.read_only:
            self._upgrade()
        state = self._state()
        if dataset_id is not None and dataset_id != state.dataset_id:
            raise LedgerError(
                f"dataset_id={dataset_id!r} differs from {state.dataset_id!r}, to which this ledger is bound.\n"
                "Each data set keeps its own ledger; pass another path."
            )

    def _upgrade(self) -> None:
        """Adds the column by which format 3 differs from 2."""
        with self._database.read() as connection:
            if connection.execute(_FORMAT).scalar_one_or_none() != 2:
                return
        with self._database.write() as connection:
            if connection.execute(_FORMAT).scalar_one() == 2:
                connection.execute(sa.text("ALTER TABLE budgets ADD COLUMN renyi_order DOUBLE PRECISION"))
                connection.execute(sa.update(LEDGER).values(format=3))

    def _begun(self) -> bool:
        """Returns whether a file has its first row. Then it is opened without waiting for those who write."""
        if self._database.path is None:
            return False
        with self._database.read() as connection:
            return connection.execute(_VERSION).first() is not None

    @property
    def path(self) -> str | None:
        """The file, or the URL without a password; None in memory."""
        return None if self._database.in_memory else self._database.shown

    def close(self) -> None:
        """Ends the use of a file or server. A ledger in memory has nothing to close."""
        self._database.close()

    # ------------------------------------------------------------------ states

    def _state(self) -> LedgerState:
        if self._database.closed and self._known is not None:
            return self._known  # A report can be made after the ledger was given back.
        with self._database.read() as connection:
            return self._read(connection)

    def _read(self, connection: sa.Connection) -> LedgerState:
        """Reads the tables, unless they are of the version that was read last."""
        try:
            return self._read_rows(connection)
        except (KeyError, TypeError, ValueError) as error:
            raise LedgerError(
                f"{self._database.shown!r} is damaged: it holds what no ledger does ({error})."
            ) from error

    def _read_rows(self, connection: sa.Connection) -> LedgerState:
        shown, known = self._database.shown, self._known
        try:
            row = connection.execute(_LEDGER).mappings().first()
        except sa.exc.DatabaseError as error:
            raise LedgerError(f"{shown!r} is not a privacy ledger ({error.orig}).") from error
        if row is None or row["format"] != FORMAT:
            found = "nothing" if row is None else f"format version {row['format']}"
            raise LedgerError(
                f"{shown!r} holds {found} where this code reads format version {FORMAT}: use the version of "
                "tfp_dpvi that wrote it, or a newer one."
            )
        seen = self._written if known is None else max(known.version, self._written)
        if row["version"] < seen or (known is not None and row["ledger_id"] != known.ledger_id):
            what = "an older copy than the one" if row["version"] < seen else "another ledger than the one"
            raise LedgerError(
                f"{shown!r} is {what} used before (version {row['version']}; before {seen}).\n"
                "Nothing was charged; restore the newest copy and open it again."
            )
        if known is not None and row["version"] == known.version:
            return known
        if known is None and not self._database.in_memory:
            self._database.check(connection)
        self._known = LedgerState.read(connection, row, self._writer)
        return self._known

    def _remember(self, state: LedgerState) -> None:
        if self._known is None or self._known.version < state.version:
            self._known = state

    # ------------------------------------------------------------------ changes

    def _check_writable(self) -> None:
        if self._refusal is not None:
            raise LedgerError(self._refusal)
        self._database.check_writable()

    @contextlib.contextmanager
    def _change(self) -> Iterator[sa.Connection]:
        """Opens a transaction that makes a new version of whatever the ledger holds by now."""
        self._check_writable()
        with self._database.write() as connection:
            self._read(connection)  # It refuses an older copy.
            connection.execute(_NEXT_VERSION)
            making = self._making = connection.execute(_VERSION).scalar_one()
            yield connection
        self._written = max(self._written, making)

    def _charge(self, state: LedgerState, kind: Kind, steps: int) -> int | None:
        """Writes a reservation if the ledger is still in `state`; returns its id, None if it is not."""
        now = utc_now()
        self._check_writable()
        with self._database.write() as connection:
            same = {"known": state.version, "same": state.ledger_id}
            if connection.execute(_NEXT_AFTER, same).rowcount == 0:
                return None
            self._making = state.version + 1
            charge = state.own.get(kind)
            if charge is None:
                plan = find_or_add(connection, PLANS, plan=json.dumps(kind.plan.to_json(), sort_keys=True))
                key: dict[str, Value] = {"plan": plan, "run": kind.run, "seeded": kind.seeded, "writer": self._writer}
                charge = find_or_add(connection, CHARGES, {"steps": 0, "since": now}, **key)
            connection.execute(_ADD, {"charge": charge, "more": steps})
            row = {"charge": charge, "steps": steps, "steps_run": None, "process": _process(), "time": now}
            reservation = _new_id(connection.execute(_RESERVE, row))
        self._written = max(self._written, state.version + 1)
        self._remember(state.after(kind, charge, steps, steps, now))
        return reservation

    def confirm(self, reservation: int, steps_run: int | None = None) -> None:
        """Closes a reservation.

        Args:
          reservation: the id from `reserve`.
          steps_run: how many of its steps drew noise; None means all. Passing fewer is the caller's statement that the
            others never drew noise nor touched the data: they are given back.

        Raises:
          LedgerError: if the reservation is unknown, was confirmed before, or belongs to another process.
          ValueError: if `steps_run` exceeds what was reserved.
        """
        with self._change() as connection:
            number = reservation if isinstance(reservation, int) else -1
            row = connection.execute(_OPEN, {"reservation": number, "process": _process()}).mappings().first()
            if row is None:
                raise LedgerError(
                    f"reservation={reservation!r} is unknown, was confirmed before, or was made by another process (then it "
                    "stays charged); nothing changed."
                )
            run = row["steps"] if steps_run is None else check.count("steps_run", steps_run)
            if run > row["steps"]:
                raise ValueError(f"steps_run={run} exceeds the {row['steps']} steps reserved: reserve before running.")
            connection.execute(_CONFIRM, {"reservation": number, "run": run})
            if run < row["steps"]:
                connection.execute(_ADD, {"charge": row["charge"], "more": run - row["steps"]})
            before, made = self._known, self._making
        kind = next((one for one, charge in before.own.items() if charge == row["charge"]), None) if before else None
        if before is not None and kind is not None and made == before.version + 1:
            self._remember(before.after(kind, row["charge"], run - row["steps"], -row["steps"], before.since[kind]))


def find_or_add(
    connection: sa.Connection, table: sa.Table, defaults: Mapping[str, Value] | None = None, **key: Value
) -> int:
    """Returns the id of the row with this key, made with `defaults` if it is not there."""
    match = sa.and_(*(table.c[name] == value for name, value in key.items()))
    found = connection.execute(sa.select(table.c.id).where(match)).scalar()
    if found is None:
        found = _new_id(connection.execute(sa.insert(table).values(**key, **(defaults or {}))))
    return int(found)


def utc_now() -> str:
    """Returns the time in ISO 8601."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def _new_id(result: "sa.CursorResult[tuple[int]]") -> int:
    key = result.inserted_primary_key
    assert key is not None
    return int(key[0])


_PROCESS = uuid.uuid4().hex


def _process() -> str:
    return f"{socket.gethostname()} {os.getpid()} {_PROCESS}"
