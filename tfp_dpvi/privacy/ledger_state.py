"""The contents of a ledger at one version: frozen values, read from the tables."""

import dataclasses
import functools
import json
import os
import threading
from collections.abc import Mapping
from typing import TypeAlias

import dp_accounting
import sqlalchemy as sa
from dp_accounting import DpEvent, NeighboringRelation

from tfp_dpvi.privacy.budgets import EpsilonBudget, RenyiFilter
from tfp_dpvi.privacy.database import ALL_CHARGES, BUDGETS, EXPOSURES, RESERVATIONS
from tfp_dpvi.privacy.plan import PrivacyPlan

_BUDGET = sa.select(BUDGETS).order_by(BUDGETS.c.id.desc()).limit(1)
_EXPOSURES = sa.select(EXPOSURES.c.text).order_by(EXPOSURES.c.id)
_UNCONFIRMED = sa.select(sa.func.coalesce(sa.func.sum(RESERVATIONS.c.steps), 0)).where(
    RESERVATIONS.c.steps_run.is_(None)
)

Row: TypeAlias = sa.RowMapping


@dataclasses.dataclass(frozen=True)
class LedgerEntry:
    """Releases under one plan.

    Attributes:
      plan: that of a single one of them (`num_releases` is 1).
      steps: how many are charged.
      run: their fit, where the sampling scheme cannot merge fits; else None.
      seeded: whether their noise came from a fixed seed.
      since: when the first was reserved, UTC in ISO 8601.
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
    """Releases that one price covers: those of a plan, or of a fit where fits do not merge."""

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
    own: dict[Kind, int]  # The rows of `charges` that this ledger object adds to.
    exposures: tuple[str, ...]
    unconfirmed: int

    @classmethod
    def read(cls, connection: sa.Connection, row: Row, writer: str) -> "LedgerState":
        """Reads all tables but `ledger`, whose row is given; raises `ValueError` and cousins for what no ledger writes."""
        charged: dict[Kind, int] = {}
        since: dict[Kind, str] = {}
        own: dict[Kind, int] = {}
        for one in connection.execute(ALL_CHARGES).mappings():
            kind = Kind(_plan_of(one["json"]), one["run"], one["seeded"])
            charged[kind] = charged.get(kind, 0) + one["steps"]
            since.setdefault(kind, one["since"])
            if one["writer"] == writer:
                own[kind] = one["id"]
        budget = connection.execute(_BUDGET).mappings().first()
        return cls(
            ledger_id=row["ledger_id"],
            dataset_id=row["dataset_id"],
            version=row["version"],
            continued=row["continued"],
            budget=None if budget is None else _budget_of(budget["epsilon"], budget["delta"], budget["renyi_order"]),
            charged=charged,
            since=since,
            own=own,
            exposures=tuple(connection.execute(_EXPOSURES).scalars()),
            unconfirmed=int(connection.execute(_UNCONFIRMED).scalar_one()),
        )

    def after(self, kind: Kind, charge: int, steps: int, unconfirmed: int, now: str) -> "LedgerState":
        """Returns the next version, in which so many steps of a kind are added, and to those unconfirmed."""
        return dataclasses.replace(
            self,
            version=self.version + 1,
            charged={**self.charged, kind: self.charged.get(kind, 0) + steps},
            unconfirmed=self.unconfirmed + unconfirmed,
            since={kind: now, **self.since},
            own={**self.own, kind: charge},
        )

    @property
    def relation(self) -> NeighboringRelation | None:
        """The adjacency of everything recorded; None while there is nothing."""
        return next((kind.plan.neighboring_relation for kind in self.charged), None)

    @property
    def entries(self) -> tuple[LedgerEntry, ...]:
        """The charges, by kind."""
        return tuple(
            LedgerEntry(kind.plan, steps, kind.run or None, kind.seeded, self.since[kind])
            for kind, steps in self.charged.items()
            if steps > 0
        )


class KnownTotals:
    """Totals that were found to keep a budget: whatever lies below one of them needs no new price."""

    def __init__(self, budget: EpsilonBudget) -> None:
        self._budget = budget
        self._known: list[dict[Kind, int]] = []
        self._pricing: dict[int, threading.Lock] = {}  # By process: a child must not wait for a thread of its parent.

    def keep(self, charged: Charged, kind: Kind, steps: int, planned: int) -> bool:
        """Returns whether what is charged keeps the budget with some steps more; a price for `planned` steps saves many."""
        wanted = {**charged, kind: charged.get(kind, 0) + steps}
        if self._below_a_known_one(wanted):
            return True
        with self._pricing.setdefault(os.getpid(), threading.Lock()):
            if self._below_a_known_one(wanted):  # Another thread's price holds for these too.
                return True
            most = {**wanted, kind: charged.get(kind, 0) + max(steps, planned)}
            # With room for what grows, also by others, a price holds for longer; what does not is composed already.
            last = self._known[-1] if self._known else most
            roomy = {k: n + n // 4 if n > last.get(k, 0) else last.get(k, 0) for k, n in most.items()}
            for total in (roomy, most, wanted):
                if self._budget.allows(composed(total), kind.plan.neighboring_relation):
                    self._known[:] = [*self._known[-1:], total]
                    return True
        return False

    def _below_a_known_one(self, wanted: Charged) -> bool:
        return any(all(n <= one.get(k, 0) for k, n in wanted.items()) for one in tuple(self._known))


@functools.lru_cache(maxsize=1024)
def _plan_of(text: str) -> PrivacyPlan:
    return PrivacyPlan.from_json(json.loads(text))


def _budget_of(epsilon: float, delta: float, order: float | None) -> EpsilonBudget:
    return EpsilonBudget(epsilon, delta) if order is None else RenyiFilter(epsilon, delta, order)
