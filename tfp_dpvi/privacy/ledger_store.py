"""The tables of a ledger as one object sees them: the state that it read last, its changes, and what a saved model keeps."""

import contextlib
import datetime
import json
import logging
import os
import socket
import uuid
from collections.abc import Iterator, Mapping
from typing import NoReturn, TypeAlias, TypeVar

import sqlalchemy as sa

from tfp_dpvi import _validate as check
from tfp_dpvi.privacy.budgets import RenyiFilter
from tfp_dpvi.privacy.database import (
    ALL_CHARGES,
    BUDGETS,
    CHARGES,
    EXPOSURES,
    FORMAT,
    LEDGER,
    PLANS,
    RESERVATIONS,
    Database,
)
from tfp_dpvi.privacy.errors import LedgerError
from tfp_dpvi.privacy.ledger_state import Kind, LedgerState
from tfp_dpvi.privacy.sensitivity import Json

_LOG = logging.getLogger("tfp_dpvi")
CONTINUED = "continued from a file: what was spent after it was saved is not counted"
_SAVED = ("run", "seeded", "writer", "steps", "since")
#: Saved ledgers in memory by identity, so that a model loaded again knows what this process has spent since.
_IN_MEMORY: dict[str, "LedgerStore"] = {}
_Ledger = TypeVar("_Ledger", bound="LedgerStore")

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
_FORMAT = sa.select(LEDGER.c.format)
_LEDGER = sa.select(LEDGER)
_VERSION = sa.select(LEDGER.c.version)

Value: TypeAlias = str | int | float | bool | None


class LedgerStore:
    """Reads states of a ledger and writes changes, which `PrivacyLedger` decides; saved models refer to it.

    Formal guarantee: a change is written in one transaction, and a charge only if the ledger is still in the state that
    the charge was compared with. A state that is older than one seen before, or of another ledger, is refused.
    """

    def __init__(
        self, path: str | os.PathLike[str] | None = None, *, dataset_id: str | None = None, read_only: bool = False
    ) -> None:
        self._database = Database(path, read_only=read_only)
        self._writer = uuid.uuid4().hex if path is None else ""
        self._stands_for: Json | None = None
        self._known: LedgerState | None = None
        self._making = self._written = -1  # The version that this object makes, and the last one that it made.
        try:
            self._open(dataset_id)
        except BaseException:
            self.close()
            raise

    def _open(self, dataset_id: str | None) -> None:
        # A file of this format is opened without waiting for those who write.
        if not self._database.read_only and self._format() != FORMAT:
            with self._database.write() as connection:
                self._database.create_tables(connection)
                if not any(connection.execute(sa.select(one).limit(1)).first() for one in (LEDGER, RESERVATIONS)):
                    name = dataset_id or (None if self._database.in_memory else uuid.uuid4().hex)
                    row = {"format": FORMAT, "ledger_id": uuid.uuid4().hex, "dataset_id": name}
                    connection.execute(sa.insert(LEDGER).values(**row, version=0, continued=False))
                elif connection.execute(_FORMAT).scalar_one_or_none() == 2:  # Format 3 has one column more.
                    connection.execute(sa.text("ALTER TABLE budgets ADD COLUMN renyi_order DOUBLE PRECISION"))
                    connection.execute(sa.update(LEDGER).values(format=3))
        state = self._state()
        if dataset_id is not None and dataset_id != state.dataset_id:
            raise LedgerError(
                f"dataset_id={dataset_id!r} differs from {state.dataset_id!r}, to which this ledger is bound.\n"
                "Each data set keeps its own ledger; pass another path."
            )

    def _format(self) -> int | None:
        """Returns the format of a file that has its first row."""
        if self._database.path is None:
            return None
        with self._database.read() as connection:
            return connection.execute(_FORMAT).scalar()

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
        if self._stands_for is not None:
            raise LedgerError(
                f"this model's ledger is not at {self._stands_for['path'] or self._stands_for['url']!r}, where it was when the "
                "model was saved: say\ncompile(..., ledger=dpvi.PrivacyLedger(its_new_place)). Nothing was charged."
            )
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
        """Closes a reservation; raises `LedgerError` if it is unknown, was confirmed before, or is another process's.

        Args:
          reservation: the id from `reserve`.
          steps_run: how many of its steps drew noise; None means all. Passing fewer is the caller's statement that the
            others never drew noise nor touched the data: they are given back.
        """
        with self._change() as connection:
            row = connection.execute(_OPEN, {"reservation": reservation, "process": _process()}).mappings().first()
            if row is None:
                raise LedgerError(
                    f"reservation={reservation!r} is unknown, was confirmed before, or was made by another process (then it "
                    "stays charged); nothing changed."
                )
            run = row["steps"] if steps_run is None else check.count("steps_run", steps_run)
            if run > row["steps"]:
                raise ValueError(f"steps_run={run} exceeds the {row['steps']} steps reserved: reserve before running.")
            connection.execute(_CONFIRM, {"reservation": reservation, "run": run})
            if run < row["steps"]:
                connection.execute(_ADD, {"charge": row["charge"], "more": run - row["steps"]})
            before, made = self._known, self._making
        kind = next((one for one, charge in before.own.items() if charge == row["charge"]), None) if before else None
        if before is not None and kind is not None and made == before.version + 1:
            self._remember(before.after(kind, row["charge"], run - row["steps"], -row["steps"], before.since[kind]))

    # ------------------------------------------------------------------ what a saved model keeps

    def to_config(self) -> Json:
        """Returns what a saved model holds of its ledger, JSON-ready. No record of the data is among it, and no key."""
        with self._database.read() as connection:
            state = self._read(connection)
            rows = connection.execute(ALL_CHARGES).mappings().all()
        if self.path is None:
            _IN_MEMORY[state.ledger_id] = self
        budget = state.budget
        order = [budget.order] if isinstance(budget, RenyiFilter) else []
        return {
            **self._mark_of(state),
            "path": self.path if self._database.path is not None else None,
            "url": self.path if self._database.url is not None else None,
            "budget": None if budget is None else [budget.epsilon, budget.delta, *order],
            "exposures": list(state.exposures),
            "charges": [{**{name: row[name] for name in _SAVED}, "plan": row["json"]} for row in rows],
        }

    @classmethod
    def from_config(cls: type[_Ledger], config: Json) -> _Ledger:
        """Returns the ledger of a saved model, with everything that was spent when it was saved, and since as far as known.

        A ledger in memory is shared with other models of this process that come from the same one; if two went on apart,
        what both spent is counted. A file is opened where it was, and refused if it is an older copy. If it is not there, or
        on a server, the ledger can be read but refuses to reserve: `compile(ledger=)` takes its new place.
        """
        path = config["path"]
        if path is None and config["url"] is None:
            live = _IN_MEMORY.get(config["ledger_id"])
            ledger = live if isinstance(live, cls) else cls()
            ledger._merge(config)
            return ledger
        if path is not None and os.path.exists(path):
            ledger = cls(path, read_only=not os.access(path, os.W_OK))
            ledger._check_continues(config)
            return ledger
        ledger = cls()
        ledger._merge(config, stands_in=True)
        ledger._stands_for = config
        return ledger

    def _merge(self, config: Json, *, stands_in: bool = False) -> None:
        """Adds what another copy of a ledger in memory held. Each process has rows of its own, and the larger one counts."""
        others = 0
        with self._change() as connection:
            for one in config["charges"]:
                if one["writer"] == self._writer:
                    continue  # This object knows better: it may have given steps back since.
                plan = find_or_add(connection, PLANS, plan=one["plan"])
                key = {name: one[name] for name in ("run", "seeded", "writer")}
                charge = find_or_add(connection, CHARGES, {"steps": 0, "since": one["since"]}, plan=plan, **key)
                larger = (CHARGES.c.id == charge) & (CHARGES.c.steps < one["steps"])
                others += connection.execute(sa.update(CHARGES).where(larger).values(steps=one["steps"])).rowcount
            for text in config["exposures"]:
                find_or_add(connection, EXPOSURES, {"time": utc_now()}, text=text)
            if config["budget"] is not None and connection.execute(sa.select(BUDGETS)).first() is None:
                names = ("epsilon", "delta", "renyi_order")
                row = dict(zip(names, config["budget"], strict=False))
                connection.execute(sa.insert(BUDGETS).values(**row, time=utc_now()))
            ledger = {"dataset_id": config["dataset_id"]}
            if not stands_in:  # It is the saved one from here on, and is known by its identity.
                ledger["ledger_id"] = config["ledger_id"]
            connection.execute(sa.update(LEDGER).values(**ledger))
            if others and not stands_in:
                connection.execute(sa.update(LEDGER).values(continued=True))
        self._known = None
        if stands_in:
            return
        _IN_MEMORY[config["ledger_id"]] = self
        if others:
            _LOG.warning("This model's ledger is %s. Keep it on disk: PrivacyLedger(path).", CONTINUED)

    def _check_continues(self, saved: Json) -> None:
        state, shown = self._state(), self._database.shown
        if state.ledger_id != saved["ledger_id"]:
            raise LedgerError(
                f"{shown!r} is another ledger (of the data set {state.dataset_id!r}) than the saved model's "
                f"(of {saved['dataset_id']!r}).\nEach data set keeps its own ledger."
            )
        if state.version < saved["version"]:
            raise LedgerError(
                f"{shown!r} does not hold what was spent when the model was saved: it is an older copy.\n"
                "Use the newest; nothing may be forgotten."
            )

    def mark(self) -> Json:
        """Returns the place where a ledger stands, JSON-ready, for `continues_from`."""
        return self._mark_of(self._state())

    def _mark_of(self, state: LedgerState) -> Json:
        return {"ledger_id": state.ledger_id, "version": state.version, "dataset_id": state.dataset_id}

    def continues_from(self, mark: Json) -> bool:
        """Returns whether this ledger holds what it, under whatever path, held when `mark` was taken."""
        state = self._state()
        return bool(state.ledger_id == mark["ledger_id"] and state.version >= mark["version"])

    def continues(self, other: "LedgerStore") -> bool:
        """Returns whether this ledger, elsewhere, is the one that a loaded model's stands in for."""
        if self is other or other._stands_for is None or self.path is None:
            return False
        self._check_continues(other._stands_for)
        return True

    def __copy__(self: _Ledger) -> _Ledger:
        return self

    def __deepcopy__(self: _Ledger, memo: Mapping[int, check.Unchecked]) -> _Ledger:
        # Copying a model must not fork what was spent.
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError("a PrivacyLedger cannot be pickled: a copy would forget what is spent. Open its path instead.")


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
