"""`PrivacyLedger`: what has been released on one data set, ahead of the release (contract C6)."""

import dataclasses
from typing import Any

import dp_accounting
from dp_accounting import DpEvent, NeighboringRelation

from tfp_dpvi.privacy import _validation as check
from tfp_dpvi.privacy import accountants
from tfp_dpvi.privacy.errors import BudgetExhaustedError, LedgerError, UnsupportedPairError
from tfp_dpvi.privacy.plan import PrivacyPlan


@dataclasses.dataclass(frozen=True)
class LedgerEntry:
    """Consecutive releases under one plan.

    Attributes:
      plan: the plan of a single one of them (`num_releases` is 1).
      steps: how many releases are charged.
    """

    plan: PrivacyPlan
    steps: int

    @property
    def dp_event(self) -> DpEvent:
        """The event of all the entry's releases."""
        return self.plan.event_of(self.steps)


class PrivacyLedger:
    """A record, in memory, of every release on one data set.

    A fit reserves steps before it runs them and confirms them afterwards. Whatever was reserved
    counts as spent from that moment; `confirm(..., steps_run=k)` gives back the steps that never
    ran, once, and only for the reservation it names.

    Args:
      dataset_id: a name of the data set that itself reveals nothing, for reports.
    """

    def __init__(self, *, dataset_id: str | None = None) -> None:
        self.dataset_id = dataset_id
        self._entries: list[LedgerEntry] = []
        self._open: dict[int, tuple[int, int]] = {}  # reservation -> (entry index, steps)
        self._next_id = 0
        self._version = 0
        self._epsilon_cache: dict[tuple[float, str], float] = {}

    @property
    def neighboring_relation(self) -> NeighboringRelation | None:
        """The adjacency of everything recorded; None while the ledger is empty."""
        return self._entries[0].plan.neighboring_relation if self._entries else None

    @property
    def entries(self) -> tuple[LedgerEntry, ...]:
        """What is charged, in order; equal consecutive plans are one entry."""
        return tuple(e for e in self._entries if e.steps)

    @property
    def num_releases(self) -> int:
        """The number of releases charged."""
        return sum(e.steps for e in self._entries)

    def events(self) -> list[DpEvent]:
        """Returns one event per entry, for `prior_events=` of `PrivacyPlan.calibrate`."""
        return [e.dp_event for e in self.entries]

    @property
    def dp_event(self) -> DpEvent:
        """The composition of everything reserved."""
        events = self.events()
        if not events:
            return dp_accounting.NoOpDpEvent()
        return events[0] if len(events) == 1 else dp_accounting.ComposedDpEvent(events)

    def epsilon(self, delta: float, accountant: str = "pld") -> float:
        """Returns epsilon at `delta` of everything reserved (heterogeneous composition)."""
        key = (check.delta(delta), accountant)
        if key not in self._epsilon_cache:
            relation = self.neighboring_relation or NeighboringRelation.ADD_OR_REMOVE_ONE
            price = accountants.get_accountant(accountant).epsilon
            self._epsilon_cache[key] = price(self.dp_event, delta, relation)
        return self._epsilon_cache[key]

    def reserve(self, plan: PrivacyPlan, steps: int) -> int:
        """Charges `steps` releases under `plan` before they happen.

        Args:
          plan: the plan of the fit; its own `num_releases` plays no part.
          steps: how many releases are about to run, at least 1.

        Returns:
          The reservation's id, for `confirm`.

        Raises:
          UnsupportedPairError: if the ledger holds releases under another adjacency.
        """
        if not isinstance(plan, PrivacyPlan):
            raise TypeError(f"plan={plan!r} is not a PrivacyPlan; pass the plan of the fit.")
        steps = check.count("steps", steps, 1)
        relation = self.neighboring_relation
        if relation is not None and plan.neighboring_relation is not relation:
            raise UnsupportedPairError(
                f"this ledger holds releases under {relation.name} and the plan asks for "
                f"{plan.neighboring_relation.name}: guarantees under different adjacencies do not "
                "compose. Fit under the ledger's adjacency, or keep another ledger."
            )
        single = plan if plan.num_releases == 1 else plan.replace(num_releases=1)
        if self._entries and self._entries[-1].plan == single:
            last = self._entries[-1]
            self._entries[-1] = LedgerEntry(last.plan, last.steps + steps)
        else:
            self._entries.append(LedgerEntry(single, steps))
        reservation = self._next_id
        self._next_id += 1
        self._open[reservation] = (len(self._entries) - 1, steps)
        self._epsilon_cache.clear()
        return reservation

    def confirm(self, reservation: int, steps_run: int | None = None) -> None:
        """Closes a reservation.

        Args:
          reservation: the id from `reserve`.
          steps_run: how many of its steps drew noise; None means all. Passing fewer is the caller's
            statement that the others never drew noise nor touched the data: they are given back.

        Raises:
          LedgerError: if the reservation is unknown or was confirmed before.
          ValueError: if `steps_run` exceeds what was reserved.
        """
        if reservation not in self._open:
            raise LedgerError(f"reservation={reservation!r} is unknown or was confirmed before; nothing changed.")
        index, steps = self._open[reservation]
        run = steps if steps_run is None else check.count("steps_run", steps_run)
        if run > steps:
            raise ValueError(f"steps_run={run} exceeds the {steps} steps reserved: reserve before running.")
        del self._open[reservation]
        if run < steps:
            entry = self._entries[index]
            self._entries[index] = LedgerEntry(entry.plan, entry.steps - (steps - run))
            self._epsilon_cache.clear()

    @property
    def unconfirmed_steps(self) -> int:
        """Steps reserved but not confirmed; they count as spent."""
        return sum(steps for _, steps in self._open.values())

    def check_budget(self, plan: PrivacyPlan, *, epsilon: float, delta: float, accountant: str = "pld") -> None:
        """Refuses a plan that would take the total over a budget; charges nothing.

        Raises:
          BudgetExhaustedError: if everything reserved plus the whole plan exceeds `epsilon`.
        """
        total = plan.replace(accountant=accountant).epsilon(delta, self.events())
        if total > check.epsilon(epsilon) * (1.0 + 1e-9):
            raise BudgetExhaustedError(
                f"{plan.num_releases} more releases would take epsilon to {total:.6g} at "
                f"delta={delta:g}, over the budget of {epsilon:.6g}; "
                f"{self.epsilon(delta, accountant):.6g} is spent. Nothing was charged."
            )

    def to_json(self) -> dict[str, Any]:
        """Returns what is charged as a JSON-ready dictionary."""
        return {
            "dataset_id": self.dataset_id,
            "num_releases": self.num_releases,
            "unconfirmed_steps": self.unconfirmed_steps,
            "entries": [{"plan": e.plan.to_json(), "steps": e.steps} for e in self.entries],
        }
