"""`PrivacyLedger`: what has been released on one data set, ahead of the release (contract C6)."""

import contextlib
import dataclasses
import functools
import os
import uuid
from collections.abc import Iterable, Iterator

import sqlalchemy as sa
from dp_accounting import DpEvent, NeighboringRelation

from tfp_dpvi import _validate as check
from tfp_dpvi.privacy.accountants import get_accountant
from tfp_dpvi.privacy.budgets import EpsilonBudget, RenyiFilter, common_accountant
from tfp_dpvi.privacy.database import BUDGETS, EXPOSURES
from tfp_dpvi.privacy.errors import BudgetExhaustedError, LedgerError, UnsupportedPairError
from tfp_dpvi.privacy.ledger_state import Charged, Kind, KnownTotals, LedgerEntry, LedgerState, composed
from tfp_dpvi.privacy.ledger_store import CONTINUED, LedgerStore, find_or_add, utc_now
from tfp_dpvi.privacy.plan import PrivacyPlan
from tfp_dpvi.privacy.sensitivity import Json

__all__ = ["LedgerEntry", "PrivacyLedger"]

_MOST_STEPS = 2**62  # Databases count to 2^63.


class PrivacyLedger(LedgerStore):
    """An append-only record of every release on one data set, in a database that models, threads and processes share.

    A fit reserves steps before it runs them and confirms them afterwards. Whatever was reserved counts as spent from that
    moment; `confirm(..., steps_run=k)` gives back the steps that never ran, once, and only for the reservation it names.

    Formal guarantee: a reservation is on the disk before `reserve` returns. It is written only if the figures that were
    compared with the budgets are still the ledger's, in one transaction, so that the total never exceeds a budget. If a
    reservation covers every release, then at any moment, also after a process is killed, the ledger holds at least what was
    released, and at most one reservation more per fit. The total composes all releases as heterogeneous events under one
    adjacency, as if their settings had been fixed beforehand; where they depend on earlier results, only an adaptive budget
    covers it (`RenyiFilter`).

    Args:
      path: a file (SQLite); a database URL such as `"postgresql+psycopg://host/name"` (the extra `postgresql`), for
        machines that share a budget; None for memory.
      dataset_id: a name of the data set that reveals nothing, to which a ledger is bound; by default a random one.
      budget_epsilon: a budget over all fits and models, enforced by `reserve`.
      budget_delta: the delta that goes with it.
      budget_adaptive: make it a Renyi privacy filter, which also covers settings that are chosen after looking at earlier
        results, at the price of more noise: 5 to 10 % in most fits.
      read_only: look at a ledger that nothing can be reserved in.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        dataset_id: str | None = None,
        budget_epsilon: float | None = None,
        budget_delta: float | None = None,
        budget_adaptive: bool = False,
        read_only: bool = False,
    ) -> None:
        if dataset_id is not None:
            check.text("dataset_id", dataset_id, "pass a name that reveals nothing")
        if (budget_epsilon is None) != (budget_delta is None) or (budget_adaptive and budget_epsilon is None):
            raise ValueError(
                f"budget_epsilon={budget_epsilon!r} and budget_delta={budget_delta!r}: pass both of them or neither."
            )
        if read_only and path is None:
            raise ValueError("read_only=True needs a path; pass the ledger's file.")
        budget = None if budget_epsilon is None else _budget(budget_epsilon, budget_delta, budget_adaptive)
        self._known_totals: dict[EpsilonBudget, KnownTotals] = {}
        super().__init__(path, dataset_id=dataset_id, read_only=read_only)
        try:
            if budget is not None:
                self._keep_to(budget)
        except BaseException:
            self.close()
            raise

    def _keep_to(self, budget: EpsilonBudget) -> None:
        held = self._state().budget
        # The order of a filter that is kept may be another than would be chosen today.
        if (held and (type(held), held.epsilon, held.delta)) == (type(budget), budget.epsilon, budget.delta):
            return
        if held is not None or self._database.read_only:
            raise LedgerError(
                f"budget_epsilon={budget.epsilon} at budget_delta={budget.delta} differs from {held or 'no budget'} of the "
                "ledger; leave it out, or call set_budget to change it on the record."
            )
        self._set_budget(budget)

    # ------------------------------------------------------------------ what is in the tables

    @property
    def dataset_id(self) -> str | None:
        """The data set that the ledger is bound to."""
        return self._state().dataset_id

    @property
    def budget(self) -> tuple[float, float] | None:
        """(epsilon, delta) of the ledger-wide budget, None if there is none."""
        budget = self._state().budget
        return None if budget is None else (budget.epsilon, budget.delta)

    @property
    def renyi_filter(self) -> RenyiFilter | None:
        """The ledger-wide budget if it is adaptive; else None."""
        budget = self._state().budget
        return budget if isinstance(budget, RenyiFilter) else None

    @property
    def neighboring_relation(self) -> NeighboringRelation | None:
        """The adjacency of everything recorded; None while the ledger is empty."""
        return self._state().relation

    @property
    def entries(self) -> tuple[LedgerEntry, ...]:
        """The charges; releases under equal plans are one entry, as their order does not matter."""
        return self._state().entries

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
        """Sentences on what was shown of the data beside the releases, which voids the guarantee: see `record_exposure`."""
        return self._state().exposures

    @property
    def caveats(self) -> tuple[str, ...]:
        """Sentences for the report on what the total may lack."""
        return (CONTINUED,) if self._state().continued else ()

    def to_json(self) -> Json:
        """Returns what is charged as a JSON-ready dictionary."""
        return {
            "dataset_id": self.dataset_id,
            "budget": self.budget and list(self.budget),
            "budget_adaptive": self.renyi_filter is not None,
            "num_releases": self.num_releases,
            "unconfirmed_steps": self.unconfirmed_steps,
            "exposures": list(self.exposures),
            "entries": [{**vars(entry), "plan": entry.plan.to_json()} for entry in self.entries],
        }

    # ------------------------------------------------------------------ what it costs

    def events(self) -> list[DpEvent]:
        """Returns one event per entry, for `prior_events=` of `PrivacyPlan.calibrate`."""
        return [entry.dp_event for entry in self.entries]

    @property
    def dp_event(self) -> DpEvent:
        """The composition of everything reserved."""
        return composed(self._state().charged)

    def epsilon(self, delta: float, accountant: str | None = None) -> float:
        """Returns epsilon at `delta` of everything reserved, by default by the first of "pld" and "rdp" that prices it."""
        return _epsilon(self._state().charged, check.delta(delta), accountant)

    def epsilon_without_metrics(self, delta: float, accountant: str | None = None) -> float | None:
        """Returns epsilon that the same releases would have cost without privatised metrics; None if there were none."""
        charged = self._state().charged
        if not any(kind.plan.metrics for kind in charged):
            return None
        plain = {dataclasses.replace(kind, plan=kind.plan.without_metrics): n for kind, n in charged.items()}
        return _epsilon(plain, check.delta(delta), accountant)

    def most_releases(self, plan: PrivacyPlan, budgets: Iterable[tuple[float, float]] = ()) -> int:
        """Returns how many of a plan's releases its accountant allows after everything that is reserved; `budgets` as `reserve`."""
        state = self._state()
        _check_relation(state, plan)
        prior, most = [entry.dp_event for entry in state.entries], plan.num_releases
        for budget in (*(EpsilonBudget(*pair) for pair in budgets), state.budget):
            if budget is not None and most:
                most = budget.most_releases(plan.replace(num_releases=most), prior)
        return most

    # ------------------------------------------------------------------ reservations

    def reserve(
        self,
        plan: PrivacyPlan,
        steps: int,
        *,
        run: str | None = None,
        seeded: bool = False,
        budgets: Iterable[tuple[float, float]] = (),
    ) -> int:
        """Charges `steps` releases under `plan` before they happen.

        Args:
          plan: the plan of the fit; its own `num_releases` is only a hint of how many more will follow.
          steps: how many releases are about to run, at least 1.
          run: a name of the fit, by which a scheme that charges by the epoch (each record once) knows that reservations
            belong together; without it each begins epochs of its own.
          seeded: whether their noise comes from a fixed seed, for the report.
          budgets: (epsilon, delta) pairs that the ledger's total must keep, beside the ledger's own budget.

        Returns:
          The reservation's id, for `confirm`.

        Raises:
          UnsupportedPairError: if the ledger holds releases under another adjacency, or without a common price.
          BudgetExhaustedError: if a budget does not allow the steps; nothing is charged.
          LedgerError: if it could not be written down; nothing is charged.
        """
        if not isinstance(plan, PrivacyPlan):
            raise TypeError(f"plan={plan!r} is not a PrivacyPlan; pass the plan of the fit.")
        steps = check.count("steps", steps, 1)
        single = _of_one_release(plan)
        # Fits that merge are one kind; of the others a reservation without a name is a fit of its own.
        name = "" if single.sampling.fits_merge else str(run or f"reservation {uuid.uuid4().hex}")
        if not name.isprintable():
            raise ValueError(f"run={run!a} must be printable text; pass a name of the fit.")
        kind = Kind(single, name, bool(seeded))
        self._check_writable()  # Before anything is priced.
        further = tuple(EpsilonBudget(*pair) for pair in budgets)
        # Whoever reserves alone need not read again: if what was read last is outdated, nothing is written.
        state = self._known or self._state()
        while True:
            try:
                self._check_allowed(state, kind, steps, plan.num_releases, further)
            except (BudgetExhaustedError, UnsupportedPairError):
                newest = self._state()
                if newest.version == state.version:
                    raise
                state = newest
                continue
            identity = self._charge(state, kind, steps)
            if identity is not None:
                return identity
            state = self._state()

    @contextlib.contextmanager
    def reserved(
        self,
        plan: PrivacyPlan,
        steps: int | None = None,
        *,
        run: str | None = None,
        seeded: bool = False,
        budgets: Iterable[tuple[float, float]] = (),
    ) -> Iterator[None]:
        """Reserves steps, by default all of a plan's, runs the body of a `with` statement, and confirms them.

        Where the body raises, all of them stay charged. Arguments and errors are those of `reserve`; where it refuses, the
        body does not run.
        """
        number = plan.num_releases if steps is None else steps
        reservation = self.reserve(plan, number, run=run, seeded=seeded, budgets=budgets)
        yield
        self.confirm(reservation)

    def _check_allowed(
        self, state: LedgerState, kind: Kind, steps: int, planned: int, budgets: tuple[EpsilonBudget, ...]
    ) -> None:
        if state.charged.get(kind, 0) + steps > _MOST_STEPS:
            raise ValueError(
                f"steps={steps}: a ledger counts up to 2**62 releases of a kind; pass the steps that will run."
            )
        _check_relation(state, kind.plan)
        if kind not in state.charged:
            common_accountant(composed({**state.charged, kind: 1}), kind.plan.neighboring_relation)
        for budget in (state.budget, *budgets):
            if budget is not None:
                self._check_affordable(state, kind, steps, planned, budget)

    def _check_affordable(
        self, state: LedgerState, kind: Kind, steps: int, planned: int, budget: EpsilonBudget
    ) -> None:
        totals = self._known_totals.setdefault(budget, KnownTotals(budget))
        if not totals.keep(state.charged, kind, steps, planned):
            spent = budget.spent(composed(state.charged), kind.plan.neighboring_relation)
            raise BudgetExhaustedError(
                f"steps={steps}: {budget} does not allow them; {spent:.6g} is spent. Nothing was charged."
            )

    # ------------------------------------------------------------------ other changes

    def set_budget(self, epsilon: float, delta: float, *, adaptive: bool = False) -> None:
        """Sets or changes the ledger-wide budget, on the record; an adaptive one (`RenyiFilter`) before the first release only."""
        self._set_budget(_budget(epsilon, delta, adaptive))

    def _set_budget(self, budget: EpsilonBudget) -> None:
        order = budget.order if isinstance(budget, RenyiFilter) else None
        with self._change() as connection:
            if order is not None and self._known is not None and any(self._known.charged.values()):
                raise LedgerError(
                    "an adaptive budget must be set before the first release, and this ledger has some: whoever saw them could "
                    "choose it by them.\nPass budget_adaptive=True where the ledger is made."
                )
            row = {"epsilon": budget.epsilon, "delta": budget.delta, "renyi_order": order, "time": utc_now()}
            connection.execute(sa.insert(BUDGETS).values(**row))

    def record_exposure(self, text: str) -> None:
        """Records, before it happens, that something exact is shown of the data, which no epsilon covers.

        Every later report says so, in this sentence, which reveals nothing itself: "exact training losses were shown".
        """
        check.text("text", text, "say what was shown")
        with self._change() as connection:
            find_or_add(connection, EXPOSURES, {"time": utc_now()}, text=text)

    def __enter__(self) -> "PrivacyLedger":
        return self

    def __exit__(self, *exception: check.Unchecked) -> None:
        self.close()


def _budget(epsilon: float, delta: check.Unchecked, adaptive: bool) -> EpsilonBudget:
    epsilon, delta = check.epsilon(epsilon, "budget_epsilon"), check.delta(delta, "budget_delta")
    return RenyiFilter.chosen_for(epsilon, delta) if adaptive else EpsilonBudget(epsilon, delta)


@functools.lru_cache(maxsize=64)
def _of_one_release(plan: PrivacyPlan) -> PrivacyPlan:
    return plan.replace(num_releases=1)


def _check_relation(state: LedgerState, plan: PrivacyPlan) -> None:
    if state.relation not in (None, plan.neighboring_relation):
        assert state.relation is not None
        raise UnsupportedPairError(
            f"this ledger holds releases under {state.relation.name} and the plan asks for {plan.neighboring_relation.name}: "
            "guarantees under different adjacencies do not compose.\nFit under the ledger's adjacency, or keep another ledger."
        )


def _epsilon(charged: Charged, delta: float, accountant: str | None) -> float:
    relation = next((k.plan.neighboring_relation for k in charged), NeighboringRelation.ADD_OR_REMOVE_ONE)
    event = composed(charged)
    found = common_accountant(event, relation) if accountant is None else get_accountant(accountant)
    return found.epsilon(event, delta, relation)
