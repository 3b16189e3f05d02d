"""The contents of a ledger at one version, as frozen values, and their privacy cost."""

import contextlib
import dataclasses
import functools
import json
import os
import uuid
from collections.abc import Iterator, Mapping
from typing import TypeAlias

import dp_accounting
import sqlalchemy as sa
from dp_accounting import DpEvent, NeighboringRelation

from tfp_dpvi import _validate as check
from tfp_dpvi.privacy.budgets import EpsilonBudget, RenyiFilter, total_epsilon
from tfp_dpvi.privacy.database import (
    FORMAT,
    IDENTITY,
    LEDGER,
    WITHOUT_DIGEST,
    ChangedByOthersError,
    Contents,
    Database,
    change_one,
    has_digest,
)
from tfp_dpvi.privacy.errors import LedgerError, UnsupportedPairError
from tfp_dpvi.privacy.plan import PrivacyPlan
from tfp_dpvi.privacy.sensitivity import Json

CONTINUED = "continued from a file: privacy spent after it was saved is not counted"

# A server's writers wait here for one another, so that all that they read is of one version; SQLite's wait at the start.
_LOCKED_IDENTITY = IDENTITY.with_for_update()
_DIGEST = sa.select(LEDGER.c.digest)
_SEAL = sa.text("UPDATE ledger SET digest = :digest")


@dataclasses.dataclass(frozen=True)
class LedgerEntry:
    """Releases under one plan."""

    plan: PrivacyPlan  # Of a single release: `num_releases` is 1.
    steps: int  # The number of charged releases.
    run: str | None = None  # Their fit, if the sampling scheme cannot merge fits.
    seeded: bool = False  # Whether their noise came from a fixed seed.
    since: str = ""  # The time of the first reservation, UTC in ISO 8601.

    @property
    def dp_event(self) -> DpEvent:
        """The event of all the entry's releases."""
        return self.plan.event_of(self.steps)


@dataclasses.dataclass(frozen=True)
class Kind:
    """Releases that are composed together: those of a plan, or of a fit if fits do not merge."""

    plan: PrivacyPlan
    run: str
    seeded: bool


Charged: TypeAlias = Mapping[Kind, int]


def composed(charged: Charged) -> DpEvent:
    """Returns the event of all releases, in the order in which their kinds were first charged."""
    events = [kind.plan.event_of(steps) for kind, steps in charged.items() if steps > 0]
    if not events:
        return dp_accounting.NoOpDpEvent()
    return events[0] if len(events) == 1 else dp_accounting.ComposedDpEvent(events)


@dataclasses.dataclass(frozen=True)
class LedgerState:
    """The contents of the tables at one version."""

    ledger_id: str
    dataset_id: str | None
    version: int
    continued: bool
    budget: EpsilonBudget | None
    charged: dict[Kind, int]
    since: dict[Kind, str]
    rows: dict[Kind, int]  # The rows of `charges` that this ledger object updates.
    exposures: tuple[str, ...]
    unconfirmed: int

    @classmethod
    def of(cls, contents: Contents, writer: str) -> "LedgerState":
        """Returns the state of these values; raises `ValueError` and the like for invalid ones."""
        charged: dict[Kind, int] = {}
        since: dict[Kind, str] = {}
        rows: dict[Kind, int] = {}
        for charge in contents.charges:
            run = _text("run", charge["run"])
            kind = Kind(_plan_of(charge["json"]), run, charge["seeded"])
            charged[kind] = charged.get(kind, 0) + check.count("steps", charge["steps"])
            since.setdefault(kind, _text("since", charge["since"]))
            if charge["writer"] == writer:
                rows[kind] = charge["id"]
        identity = contents.identity
        return cls(
            ledger_id=identity["ledger_id"],
            dataset_id=identity["dataset_id"],
            version=identity["version"],
            continued=identity["continued"],
            budget=_budget(contents.budget),
            charged=charged,
            since=since,
            rows=rows,
            exposures=tuple(_text("exposures", text) for text in contents.exposures),
            unconfirmed=contents.unconfirmed,
        )

    def after_reserving(
        self, kind: Kind, steps: int, *, row: int, time: str, version: int
    ) -> "LedgerState":
        """Returns the state that follows from this one by a reservation alone."""
        return dataclasses.replace(
            self,
            version=version,
            charged={**self.charged, kind: self.charged.get(kind, 0) + steps},
            since={kind: time, **self.since},
            rows={**self.rows, kind: row},
            unconfirmed=self.unconfirmed + steps,
        )

    def continues(self, earlier: "LedgerState") -> bool:
        """Returns whether this state can follow from an earlier one.

        Every version keeps all charges, confirmed steps, budgets and exposures of the versions before it, and a version
        never has two contents.
        """
        if self.version == earlier.version:
            return self == earlier
        return (
            self.ledger_id == earlier.ledger_id
            and earlier.dataset_id in (self.dataset_id, None)
            and self.continued >= earlier.continued
            and (self.budget is None) <= (earlier.budget is None)
            and self.charged.keys() >= earlier.charged.keys()
            and self.rows.items() >= earlier.rows.items()
            and self._confirmed >= earlier._confirmed
            and self.exposures[: len(earlier.exposures)] == earlier.exposures
        )

    @property
    def _confirmed(self) -> int:
        return sum(self.charged.values()) - self.unconfirmed

    @property
    def mark(self) -> Json:
        """The ledger's identity and version, JSON-ready."""
        return {"ledger_id": self.ledger_id, "version": self.version, "dataset_id": self.dataset_id}

    @property
    def relation(self) -> NeighboringRelation | None:
        """The neighboring relation of all releases; None while there is none."""
        return next((kind.plan.neighboring_relation for kind in self.charged), None)

    def check_relation(self, relation: NeighboringRelation) -> None:
        """Raises `UnsupportedPairError` if the ledger has releases under another neighboring relation."""
        if self.relation is not None and self.relation is not relation:
            raise UnsupportedPairError(
                f"neighboring_relation={relation.name} and the ledger's {self.relation.name} give "
                "guarantees that do not compose:\n"
                "fit under the ledger's neighboring relation, or use another ledger."
            )


@functools.lru_cache(maxsize=1024)
def _plan_of(text: str) -> PrivacyPlan:
    return PrivacyPlan.from_json(json.loads(text))


def _text(name: str, value: check.Unchecked) -> str:
    """Returns a value if it is text, which SQLite's columns of texts need not hold."""
    if not isinstance(value, str):
        raise TypeError(f"{name} is no text")
    return value


def _budget(row: sa.RowMapping | None) -> EpsilonBudget | None:
    if row is None:
        return None
    if row["renyi_order"] is None:
        return EpsilonBudget(row["epsilon"], row["delta"])
    return RenyiFilter(row["epsilon"], row["delta"], row["renyi_order"])


class LedgerView:
    """The read access to a ledger's contents and their privacy cost; `PrivacyLedger` adds writing.

    Formal guarantee: a state that is older than one read before, lacks a part of it, or is of another ledger, is refused.
    """

    def __init__(
        self, path: str | os.PathLike[str] | None, *, dataset_id: str | None, read_only: bool
    ) -> None:
        self._database = Database(path, dataset_id=dataset_id, read_only=read_only)
        self._writer = uuid.uuid4().hex if path is None else ""
        self._known: LedgerState | None = None
        if dataset_id is not None and dataset_id != self.dataset_id:
            raise LedgerError(
                f"dataset_id={dataset_id!r} differs from {self.dataset_id!r}, to which this ledger is bound; pass another path."
            )

    @property
    def path(self) -> str | None:
        """The file, or the URL without a password; None in memory."""
        return None if self._database.in_memory else self._database.shown

    def close(self) -> None:
        """Closes the file or server connection. A ledger in memory has nothing to close."""
        self._database.closed = not self._database.in_memory

    def _state(self) -> LedgerState:
        if self._database.closed and self._known is not None:
            return self._known  # Reports are possible after `close`.
        with self._database.read() as connection:
            self._known = self._read(connection)
        return self._known

    def _read(self, connection: sa.Connection) -> LedgerState:
        """Returns the tables' contents, cached while their version is the same."""
        identity = self._identity(connection)
        if self._known is not None and identity["version"] == self._known.version:
            return self._known
        return self._checked(connection, identity)

    def _read_to_change(self, connection: sa.Connection) -> LedgerState:
        """Returns the tables' contents at the start of a change, compared with the cache if that is of the same version."""
        return self._checked(connection, self._identity(connection, locked=True))

    def _read_changed(self, connection: sa.Connection) -> LedgerState:
        """Returns the tables' contents at the end of a change, and writes their digest."""
        contents = self._contents(connection, self._identity(connection))
        change_one(connection, _SEAL, {"digest": contents.digest})
        return self._following(contents)

    def _checked(self, connection: sa.Connection, identity: sa.RowMapping) -> LedgerState:
        if self._known is None and not self._database.in_memory:
            self._database.check(connection)
        contents = self._contents(connection, identity)
        if identity["format"] != WITHOUT_DIGEST or has_digest(connection):
            digest = connection.execute(_DIGEST).scalar()
            if digest != contents.digest:
                raise LedgerError(
                    f"{self._database.shown!r} is damaged (its contents do not have the digest that was written with them).\n"
                    "It was not changed; restore the newest copy."
                )
        return self._following(contents)

    def _identity(self, connection: sa.Connection, *, locked: bool = False) -> sa.RowMapping:
        """Returns the row of `ledger`; raises `LedgerError` if it is of another ledger, or older than the known one."""
        shown, known = self._database.shown, self._known
        rows = connection.execute(_LOCKED_IDENTITY if locked else IDENTITY).mappings().fetchmany(2)
        if len(rows) > 1:
            raise ChangedByOthersError("it has a second identity")
        if not rows or rows[0]["format"] not in (WITHOUT_DIGEST, FORMAT):
            found = f"format version {rows[0]['format']!a:.20}" if rows else "nothing"
            raise LedgerError(
                f"{shown!r} has {found}, and not {FORMAT}: use the version of tfp_dpvi that wrote it, or a newer one."
            )
        row = rows[0]
        with self._naming_damage():
            _text("ledger_id", row["ledger_id"])
            if row["dataset_id"] is not None:
                _text("dataset_id", row["dataset_id"])
            check.count("version", row["version"])
        if known is not None and (
            row["version"] < known.version or row["ledger_id"] != known.ledger_id
        ):
            raise LedgerError(
                f"{shown!r} is an older copy of the ledger used before, or another ledger (version {row['version']}; before "
                f"{known.version}).\nNothing was charged; restore the newest copy and open it again."
            )
        return row

    def _contents(self, connection: sa.Connection, identity: sa.RowMapping) -> Contents:
        with self._naming_damage():
            return Contents.read(connection, identity)

    def _following(self, contents: Contents) -> LedgerState:
        """Returns the state of these contents; raises `LedgerError` if it cannot follow from the known one."""
        with self._naming_damage():
            state = LedgerState.of(contents, self._writer)
        if self._known is not None and not state.continues(self._known):
            raise ChangedByOthersError("rows that it had are gone or different")
        return state

    @contextlib.contextmanager
    def _naming_damage(self) -> Iterator[None]:
        try:
            yield
        except (
            ArithmeticError, AttributeError, KeyError, RecursionError, TypeError, ValueError,
        ) as error:  # fmt: skip
            raise LedgerError(
                f"{self._database.shown!r} is damaged, or needs an accountant or sampling scheme that is "
                f"not registered ({check.first_line(error)}).\n"
                "Register it, or restore the newest copy."
            ) from error

    @property
    def dataset_id(self) -> str | None:
        """The data set that the ledger is bound to."""
        return self._state().dataset_id

    @property
    def budget(self) -> tuple[float, float] | None:
        """The ledger-wide budget (epsilon, delta), or None."""
        budget = self._state().budget
        return None if budget is None else (budget.epsilon, budget.delta)

    @property
    def renyi_filter(self) -> RenyiFilter | None:
        """The ledger-wide budget if it is adaptive; else None."""
        budget = self._state().budget
        return budget if isinstance(budget, RenyiFilter) else None

    @property
    def neighboring_relation(self) -> NeighboringRelation | None:
        """The neighboring relation of all releases; None while the ledger is empty."""
        return self._state().relation

    def check_relation(self, relation: NeighboringRelation) -> None:
        """Raises `UnsupportedPairError` if there are releases under another neighboring relation."""
        self._state().check_relation(relation)

    @property
    def entries(self) -> tuple[LedgerEntry, ...]:
        """The charges; releases under equal plans are one entry, as their order does not matter."""
        state = self._state()
        return tuple(
            LedgerEntry(kind.plan, steps, kind.run or None, kind.seeded, state.since[kind])
            for kind, steps in state.charged.items()
            if steps > 0
        )

    @property
    def num_releases(self) -> int:
        """The number of releases charged."""
        return sum(self._state().charged.values())

    @property
    def unconfirmed_steps(self) -> int:
        """Steps reserved but not confirmed; they count as spent."""
        return self._state().unconfirmed

    @property
    def seeded(self) -> bool:
        """True if any release took its noise from a fixed seed."""
        return any(entry.seeded for entry in self.entries)

    @property
    def exposures(self) -> tuple[str, ...]:
        """Sentences on exact values of the data that were shown, which voids the guarantee: see `record_exposure`."""
        return self._state().exposures

    @property
    def caveats(self) -> tuple[str, ...]:
        """Sentences for the report on spending that the total may lack."""
        return (CONTINUED,) if self._state().continued else ()

    def events(self) -> list[DpEvent]:
        """Returns one event per entry, for `prior_events=` of `PrivacyPlan.calibrate`."""
        return [entry.dp_event for entry in self.entries]

    @property
    def dp_event(self) -> DpEvent:
        """Returns the composition of all reserved releases."""
        return composed(self._state().charged)

    def epsilon(self, delta: float, accountant: str | None = None) -> float:
        """Returns epsilon at `delta` of all reserved releases, by default with the first of "pld" and "rdp" that supports them."""
        relation = self.neighboring_relation or NeighboringRelation.ADD_OR_REMOVE_ONE
        return total_epsilon(self.dp_event, check.delta(delta), relation, accountant)
