"""The contents of a ledger at one version, as frozen values, and how they are read."""

import contextlib
import dataclasses
import functools
import json
from collections.abc import Iterator, Mapping
from typing import TypeAlias

import dp_accounting
import sqlalchemy as sa
from dp_accounting import DpEvent, NeighboringRelation

from tfp_dpvi import _validate as check
from tfp_dpvi.privacy.budgets import EpsilonBudget, RenyiFilter
from tfp_dpvi.privacy.database import (
    FORMAT,
    IDENTITY,
    LEDGER,
    WITHOUT_DIGEST,
    ChangedByOthersError,
    Contents,
    Database,
    has_digest,
    update_row,
)
from tfp_dpvi.privacy.errors import LedgerError, UnsupportedPairError
from tfp_dpvi.privacy.plan import PrivacyPlan
from tfp_dpvi.privacy.sensitivity import Json

CONTINUED = "continued from a file: privacy spent after it was saved is not counted"

# A server's writers wait here for one another, so that all that they read is of one version.
# SQLite's wait at the start of the transaction.
_LOCKED_IDENTITY = IDENTITY.with_for_update()
_DIGEST = sa.select(LEDGER.c.digest)
_SEAL = sa.text("UPDATE ledger SET digest = :digest")


@dataclasses.dataclass(frozen=True)
class LedgerEntry:
    """The releases of a ledger under one plan.

    Attributes:
      plan: The plan of a single release, whose `num_releases` is 1.
      steps: The number of charged releases.
      run: The name of the fit, if the sampling scheme cannot merge fits; else None.
      seeded: Whether the noise came from a fixed seed.
      since: The time of the first reservation, UTC in ISO 8601.

    ```python
    >>> from tfp_dpvi.privacy import FullBatch, PrivacyLedger, PrivacyPlan
    >>> ledger = PrivacyLedger()
    >>> _ = ledger.reserve(PrivacyPlan(FullBatch(), noise_multiplier=4.0, num_releases=3), steps=2)
    >>> [entry] = ledger.entries
    >>> entry.steps, entry.plan.num_releases, entry.dp_event.count
    (2, 1, 2)

    ```
    """

    plan: PrivacyPlan
    steps: int
    run: str | None = None
    seeded: bool = False
    since: str = ""

    @property
    def dp_event(self) -> DpEvent:
        """The event of all the entry's releases."""
        return self.plan.event_of(self.steps)


@dataclasses.dataclass(frozen=True)
class Kind:
    """The properties that releases have in common if they are composed together.

    Attributes:
      plan: The plan of a single release.
      run: The name of the fit, if the sampling scheme cannot merge fits; else empty.
      seeded: Whether the noise came from a fixed seed.
    """

    plan: PrivacyPlan
    run: str
    seeded: bool


#: The number of charged releases by kind.
Charged: TypeAlias = Mapping[Kind, int]


def composed(charged: Charged) -> DpEvent:
    """Returns the event of all releases, in the order in which their kinds were first charged."""
    events = [kind.plan.event_of(steps) for kind, steps in charged.items() if steps > 0]
    if not events:
        return dp_accounting.NoOpDpEvent()
    return events[0] if len(events) == 1 else dp_accounting.ComposedDpEvent(events)


@dataclasses.dataclass(frozen=True)
class LedgerState:
    """The contents of the tables at one version.

    Attributes:
      ledger_id: The ledger's random identity.
      dataset_id: The name of the data set that the ledger is bound to.
      version: A number that grows with every change.
      continued: Whether spending after a model was saved may be missing.
      budget: The ledger-wide budget; None without one.
      charged: The number of charged releases by kind.
      since: The time of the first reservation of each kind.
      rows: The rows of `charges` that this ledger object updates, by kind.
      exposures: Sentences on exact values of the data that were shown.
      unconfirmed: The number of steps that were reserved and not confirmed.
    """

    ledger_id: str
    dataset_id: str | None
    version: int
    continued: bool
    budget: EpsilonBudget | None
    charged: dict[Kind, int]
    since: dict[Kind, str]
    rows: dict[Kind, int]
    exposures: tuple[str, ...]
    unconfirmed: int

    @classmethod
    def from_contents(cls, contents: Contents, writer: str) -> "LedgerState":
        """Returns the state that the tables' values describe.

        Args:
          contents: The values.
          writer: The name of the ledger object, whose rows of `charges` become `rows`.

        Raises:
          ArithmeticError, AttributeError, KeyError, RecursionError, TypeError, ValueError: A value
            is not valid.
        """
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
        """Returns the state that follows from this one by a reservation alone.

        Args:
          kind: The kind of the reserved releases.
          steps: The number of releases.
          row: The id of the row of `charges`.
          time: The time of the reservation.
          version: The version after it.
        """
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

        Every version keeps all charges, confirmed steps, budgets and exposures of the versions
        before it, and a version never has two contents.
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
        """Raises `UnsupportedPairError` if releases are under another neighboring relation."""
        if self.relation is not None and self.relation is not relation:
            raise UnsupportedPairError(
                f"neighboring_relation={relation.name} and the ledger's {self.relation.name} give "
                "guarantees that do not compose:\n"
                "fit under the ledger's neighboring relation, or use another ledger."
            )

    @property
    def units(self) -> frozenset[str]:
        """The units of privacy of all releases, "record" or "person"; empty without releases."""
        return frozenset(unit_of(kind.plan) for kind in self.charged)

    def check_unit(self, plan: PrivacyPlan) -> None:
        """Raises `UnsupportedPairError` if releases protect another unit than a plan does."""
        unit = unit_of(plan)
        if self.units - {unit}:
            raise UnsupportedPairError(
                f"The ledger's releases protect another unit of privacy than this {unit}, and such "
                "guarantees do not compose:\n"
                "pass unit_ids to all fits of these data or to none, or use another ledger."
            )


def unit_of(plan: PrivacyPlan) -> str:
    """Returns a plan's unit of privacy, "record" or "person"."""
    return "record" if plan.person is None else "person"


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


class LedgerReader:
    """Reads the tables of a ledger, and checks them against what it knows of them.

    Args:
      database: The tables.
      writer: The name of the ledger object, see `LedgerState.from_contents`.

    Attributes:
      known: The newest state that was read, or written and committed; None before.

    #### Formal guarantee

    A state that is older than the known one, lacks a part of it, or is of another ledger, is
    refused.
    """

    def __init__(self, database: Database, writer: str) -> None:
        self._database, self._writer = database, writer
        self.known: LedgerState | None = None

    def state(self) -> LedgerState:
        """Returns the newest state, in a transaction of its own; after `close` the known one."""
        # Reports are possible after `close`.
        if self._database.closed and self.known is not None:
            return self.known
        with self._database.read() as connection:
            self.known = self._read(connection)
        return self.known

    def _read(self, connection: sa.Connection) -> LedgerState:
        """Returns the tables' contents, cached while their version is the same."""
        identity = self._identity(connection)
        if self.known is not None and identity["version"] == self.known.version:
            return self.known
        return self._checked(connection, identity)

    def read_checked(self, connection: sa.Connection, *, locked: bool = False) -> LedgerState:
        """Returns the tables' contents, compared with the known state also of the same version.

        Args:
          connection: A transaction.
          locked: Whether other writers wait until the transaction ends, as a change needs it.

        Raises:
          LedgerError: The tables are damaged, of another ledger, or older than the known state.
        """
        return self._checked(connection, self._identity(connection, locked=locked))

    def read_changed(self, connection: sa.Connection) -> LedgerState:
        """Returns the tables' contents at the end of a change, and writes their digest."""
        contents = self._contents(connection, self._identity(connection))
        update_row(connection, _SEAL, {"digest": contents.digest})
        return self._following(contents)

    def _checked(self, connection: sa.Connection, identity: sa.RowMapping) -> LedgerState:
        if self.known is None and not self._database.in_memory:
            self._database.check(connection)
        contents = self._contents(connection, identity)
        if identity["format"] != WITHOUT_DIGEST or has_digest(connection):
            digest = connection.execute(_DIGEST).scalar()
            if digest != contents.digest:
                raise LedgerError(
                    f"{self._database.shown!r} is damaged (its contents do not have the digest "
                    "that was written with them).\nIt was not changed; restore the newest copy."
                )
        return self._following(contents)

    def _identity(self, connection: sa.Connection, *, locked: bool = False) -> sa.RowMapping:
        """Returns the row of `ledger`.

        Raises:
          LedgerError: The row is of another ledger, of another format, or older than the known one.
        """
        shown, known = self._database.shown, self.known
        rows = connection.execute(_LOCKED_IDENTITY if locked else IDENTITY).mappings().fetchmany(2)
        if len(rows) > 1:
            raise ChangedByOthersError("it has a second identity")
        if not rows or rows[0]["format"] not in (WITHOUT_DIGEST, FORMAT):
            content = f"format version {rows[0]['format']!a:.20}" if rows else "nothing"
            raise LedgerError(
                f"{shown!r} has {content}, and not {FORMAT}: use the version of tfp_dpvi that "
                "wrote it, or a newer one."
            )
        row = rows[0]
        with self.naming_damage():
            _text("ledger_id", row["ledger_id"])
            if row["dataset_id"] is not None:
                _text("dataset_id", row["dataset_id"])
            check.count("version", row["version"])
        if known is not None and (
            row["version"] < known.version or row["ledger_id"] != known.ledger_id
        ):
            raise LedgerError(
                f"{shown!r} is an older copy of the ledger used before, or another ledger (version "
                f"{row['version']}; before {known.version}).\n"
                "Nothing was charged; restore the newest copy and open it again."
            )
        return row

    def _contents(self, connection: sa.Connection, identity: sa.RowMapping) -> Contents:
        with self.naming_damage():
            return Contents.read(connection, identity)

    def _following(self, contents: Contents) -> LedgerState:
        """Returns the state of these contents; refuses it unless it follows from the known one."""
        with self.naming_damage():
            state = LedgerState.from_contents(contents, self._writer)
        if self.known is not None and not state.continues(self.known):
            raise ChangedByOthersError("rows that it had are gone or different")
        return state

    @contextlib.contextmanager
    def naming_damage(self) -> Iterator[None]:
        """Raises `LedgerError` for what a value that is not valid raises in the body."""
        try:
            yield
        except (
            ArithmeticError, AttributeError, KeyError, RecursionError, TypeError, ValueError,
        ) as error:  # fmt: skip
            raise LedgerError(
                f"{self._database.shown!r} is damaged, or needs an accountant or sampling scheme "
                f"that is not registered ({check.first_line(error)}).\n"
                "Register it, or restore the newest copy."
            ) from error
