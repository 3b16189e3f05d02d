"""`PrivacyLedger`: what has been released on one data set, ahead of the release (contract C6)."""

import contextlib
import dataclasses
import datetime
import json
import logging
import os
import secrets
import socket
import uuid
from collections.abc import Iterable, Iterator, Mapping
from typing import NoReturn

import sqlalchemy as sa

from tfp_dpvi import _validate as check
from tfp_dpvi.privacy.budgets import EpsilonBudget, RenyiFilter, common_accountant
from tfp_dpvi.privacy.database import (
    ALL_CHARGES,
    BUDGETS,
    CHARGES,
    EXPOSURES,
    LEDGER,
    PLANS,
    RESERVATIONS,
    Value,
    add,
    find_or_add,
)
from tfp_dpvi.privacy.errors import BudgetExhaustedError, LedgerError, UnsupportedPairError
from tfp_dpvi.privacy.ledger_state import CONTINUED, Charged, Kind, LedgerEntry, LedgerState, LedgerView, composed
from tfp_dpvi.privacy.plan import PrivacyPlan
from tfp_dpvi.privacy.sensitivity import Json

__all__ = ["LedgerEntry", "PrivacyLedger"]

_LOG = logging.getLogger("tfp_dpvi")
_MOST_STEPS = 2**62  # Databases count to 2^63.
_SAVED = ("run", "seeded", "writer", "steps", "since")
#: Saved ledgers in memory by identity, so that a model loaded again knows what this process has spent since.
_IN_MEMORY: dict[str, "PrivacyLedger"] = {}
_PROCESS = uuid.uuid4().hex

# The statements of a reservation, made once: to build one takes longer than to run it.
_NEXT_VERSION = sa.text("UPDATE ledger SET version = version + :more")
_NEXT_AFTER = sa.text("UPDATE ledger SET version = :next WHERE version = :known AND ledger_id = :same")
_ADD = sa.text("UPDATE charges SET steps = steps + :more WHERE id = :charge")
_RESERVE = sa.insert(RESERVATIONS)
_OPEN = sa.text("SELECT charge, steps FROM reservations WHERE id = :id AND steps_run IS NULL AND process = :process")
_CLOSE = sa.text("UPDATE reservations SET steps_run = :run WHERE id = :id")


class _OutdatedError(Exception):
    """The ledger is no longer in the state that was priced."""


class PrivacyLedger(LedgerView):
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
        super().__init__(path, dataset_id=dataset_id, read_only=read_only)
        self._stands_for: Json | None = None
        self._affordable: dict[EpsilonBudget, Charged] = {}  # Totals found to keep a budget.
        held = self._state()
        if budget is not None and held.budget is None and not read_only:
            self._set_budget(budget)
        # The order of a filter that is kept may be another than would be chosen today.
        elif budget is not None and (
            (type(held.budget), self.budget) != (type(budget), (budget.epsilon, budget.delta))
        ):
            raise LedgerError(
                f"budget_epsilon={budget.epsilon} at budget_delta={budget.delta} differs from {held.budget or 'no budget'} of "
                "the ledger; leave it out, or call set_budget to change it on the record."
            )

    # ------------------------------------------------------------------ reservations

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
            connection.execute(_NEXT_VERSION, {"more": _some()})
            yield connection
            after = self._read(connection)
        self._known = after

    def most_releases(self, plan: PrivacyPlan, budgets: Iterable[tuple[float, float]] = ()) -> int:
        """Returns how many of a plan's releases its accountant allows after everything that is reserved; `budgets` as `reserve`."""
        state = self._state()
        state.check_relation(plan)
        most = plan.num_releases
        for budget in (*(EpsilonBudget(*pair) for pair in budgets), state.budget):
            if budget is not None and most:
                most = budget.most_releases(plan.replace(num_releases=most), [composed(state.charged)])
        return most

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
        single = plan.replace(num_releases=1)
        # Fits that merge are one kind; of the others a reservation without a name is a fit of its own.
        name = "" if single.sampling.fits_merge else str(run or f"reservation {uuid.uuid4().hex}")
        kind = Kind(single, name, bool(seeded))
        self._check_writable()  # Before anything is priced.
        further = tuple(EpsilonBudget(*pair) for pair in budgets)
        # Whoever reserves alone need not read again: if what was read last is outdated, nothing is written.
        state = self._known or self._state()
        while True:
            try:
                self._check_allowed(state, kind, steps, plan.num_releases, further)
                return self._charge(state, kind, steps)
            except (_OutdatedError, BudgetExhaustedError, UnsupportedPairError):
                newest = self._state()
                if newest.version == state.version:
                    raise
                state = newest

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
        steps = plan.num_releases if steps is None else steps
        reservation = self.reserve(plan, steps, run=run, seeded=seeded, budgets=budgets)
        yield
        self.confirm(reservation)

    def _check_allowed(
        self, state: LedgerState, kind: Kind, steps: int, planned: int, budgets: tuple[EpsilonBudget, ...]
    ) -> None:
        if state.charged.get(kind, 0) + steps > _MOST_STEPS:
            raise ValueError(
                f"steps={steps}: a ledger counts up to 2**62 releases of a kind; pass the steps that will run."
            )
        state.check_relation(kind.plan)
        relation = kind.plan.neighboring_relation
        if kind not in state.charged:
            common_accountant(composed({**state.charged, kind: 1}), relation)
        for budget in (state.budget, *budgets):
            if budget is not None and not self._keeps(budget, state.charged, kind, steps, planned):
                spent = budget.spent(composed(state.charged), relation)
                raise BudgetExhaustedError(
                    f"steps={steps}: {budget} does not allow them; {spent:.6g} is spent. Nothing was charged."
                )

    def _keeps(self, budget: EpsilonBudget, charged: Charged, kind: Kind, steps: int, planned: int) -> bool:
        """Returns whether a budget allows some steps more; what lies below a total that was allowed needs no new price."""
        known = self._affordable.get(budget, {})
        wanted = {**charged, kind: charged.get(kind, 0) + steps}
        if all(n <= known.get(k, 0) for k, n in wanted.items()):
            return True
        most = {**wanted, kind: charged.get(kind, 0) + max(steps, planned)}
        # With room for what grows, also by others, a price holds for longer; what does not is composed already.
        roomy = {k: n + n // 4 if n > known.get(k, 0) else known.get(k, 0) for k, n in most.items()}
        for total in (roomy, most, wanted):
            if budget.allows(composed(total), kind.plan.neighboring_relation):
                self._affordable[budget] = total
                return True
        return False

    def _charge(self, priced: LedgerState, kind: Kind, steps: int) -> int:
        """Writes a reservation and returns its id; raises `_OutdatedError` if the ledger is not in the state priced."""
        now, version = _utc_now(), priced.version + _some()
        self._check_writable()
        with self._database.write() as connection:
            same = {"known": priced.version, "next": version, "same": priced.ledger_id}
            if connection.execute(_NEXT_AFTER, same).rowcount == 0:
                raise _OutdatedError
            charge = priced.rows.get(kind)
            if charge is None:
                plan = find_or_add(connection, PLANS, plan=json.dumps(kind.plan.to_json(), sort_keys=True))
                key: dict[str, Value] = {"plan": plan, "run": kind.run, "seeded": kind.seeded, "writer": self._writer}
                charge = find_or_add(connection, CHARGES, {"steps": 0, "since": now}, **key)
            connection.execute(_ADD, {"charge": charge, "more": steps})
            row = {"charge": charge, "steps": steps, "steps_run": None, "process": _process(), "time": now}
            reservation = add(connection, _RESERVE, row)
        self._known = dataclasses.replace(
            priced,
            version=version,
            charged={**priced.charged, kind: priced.charged.get(kind, 0) + steps},
            since={kind: now, **priced.since},
            rows={**priced.rows, kind: charge},
            unconfirmed=priced.unconfirmed + steps,
        )
        return reservation

    def confirm(self, reservation: int, steps_run: int | None = None) -> None:
        """Closes a reservation; raises `LedgerError` if it is unknown, was confirmed before, or is another process's.

        Args:
          reservation: the id from `reserve`.
          steps_run: how many of its steps drew noise; None means all. Passing fewer is the caller's statement that the
            others never drew noise nor touched the data: they are given back.
        """
        with self._change() as connection:
            row = connection.execute(_OPEN, {"id": reservation, "process": _process()}).first()
            if row is None:
                raise LedgerError(
                    f"reservation={reservation!r} is unknown, was confirmed before, or was made by another process (then it "
                    "stays charged); nothing changed."
                )
            run = row.steps if steps_run is None else check.count("steps_run", steps_run)
            if run > row.steps:
                raise ValueError(f"steps_run={run} exceeds the {row.steps} steps reserved: reserve before running.")
            connection.execute(_CLOSE, {"id": reservation, "run": run})
            connection.execute(_ADD, {"charge": row.charge, "more": run - row.steps})

    # ------------------------------------------------------------------ other changes

    def set_budget(self, epsilon: float, delta: float, *, adaptive: bool = False) -> None:
        """Sets or changes the ledger-wide budget, on the record; an adaptive one (`RenyiFilter`) before the first release only."""
        self._set_budget(_budget(epsilon, delta, adaptive))

    def _set_budget(self, budget: EpsilonBudget) -> None:
        order = getattr(budget, "order", None)
        with self._change() as connection:
            if order is not None and connection.execute(sa.select(CHARGES.c.id).where(CHARGES.c.steps > 0)).first():
                raise LedgerError(
                    "an adaptive budget must be set before the first release, and this ledger has some: whoever saw them could "
                    "choose it by them.\nPass budget_adaptive=True where the ledger is made."
                )
            row = {"epsilon": budget.epsilon, "delta": budget.delta, "renyi_order": order, "time": _utc_now()}
            connection.execute(sa.insert(BUDGETS).values(**row))

    def record_exposure(self, text: str) -> None:
        """Records, before it happens, that something exact is shown of the data, which no epsilon covers.

        Every later report says so, in this sentence, which reveals nothing itself: "exact training losses were shown".
        """
        check.text("text", text, "say what was shown")
        with self._change() as connection:
            find_or_add(connection, EXPOSURES, {"time": _utc_now()}, text=text)

    # ------------------------------------------------------------------ what a saved model keeps

    def to_config(self) -> Json:
        """Returns what a saved model holds of its ledger, JSON-ready. No record of the data is among it, and no key."""
        with self._database.read() as connection:
            state = self._read(connection)
            rows = connection.execute(ALL_CHARGES).mappings().all()
        if self.path is None:
            _IN_MEMORY[state.ledger_id] = self
        budget, order = state.budget, getattr(state.budget, "order", None)
        return {
            **state.mark,
            "path": self.path if self._database.path is not None else None,
            "url": self.path if self._database.url is not None else None,
            "budget": None if budget is None else [budget.epsilon, budget.delta, order],
            "exposures": list(state.exposures),
            "charges": [{**{name: row[name] for name in _SAVED}, "plan": row["json"]} for row in rows],
        }

    @classmethod
    def from_config(cls, config: Json) -> "PrivacyLedger":
        """Returns the ledger of a saved model, with everything that was spent when it was saved, and since as far as known.

        A ledger in memory is shared with other models of this process that come from the same one; if two went on apart,
        what both spent is counted. A file is opened where it was, and refused if it is an older copy. If it is not there, or
        on a server, the ledger can be read but refuses to reserve: `compile(ledger=)` takes its new place.
        """
        path = config["path"]
        if path is not None and os.path.exists(path):
            ledger = cls(path)
            ledger._check_continues(config)
        elif path is not None or config["url"] is not None:
            ledger = cls()
            ledger._merge(config, stands_in=True)
            ledger._stands_for = config
        else:
            ledger = _IN_MEMORY.get(config["ledger_id"]) or cls()
            ledger._merge(config)
        return ledger

    def _merge(self, config: Json, *, stands_in: bool = False) -> None:
        """Adds what another copy of a ledger in memory held. Each process has rows of its own, and the larger one counts."""
        others, has_budget = 0, self.budget is not None
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
                find_or_add(connection, EXPOSURES, {"time": _utc_now()}, text=text)
            if config["budget"] is not None and not has_budget:
                row = dict(
                    zip(("epsilon", "delta", "renyi_order"), config["budget"], strict=False)
                )  # Older files have two.
                connection.execute(sa.insert(BUDGETS).values(**row, time=_utc_now()))
            ledger: dict[str, Value] = {"dataset_id": config["dataset_id"]}
            if not stands_in:  # It is the saved one from here on, and is known by its identity.
                ledger["ledger_id"] = config["ledger_id"]
                _IN_MEMORY[config["ledger_id"]] = self
                if others:
                    ledger["continued"] = True
                    _LOG.warning("This model's ledger is %s. Keep it on disk: PrivacyLedger(path).", CONTINUED)
            connection.execute(sa.update(LEDGER).values(**ledger))
            self._known = None

    def mark(self) -> Json:
        """Returns the place where a ledger stands, JSON-ready, for `continues_from`."""
        return self._state().mark

    def continues_from(self, mark: Json) -> bool:
        """Returns whether this ledger holds what it, under whatever path, held when `mark` was taken."""
        mine = self.mark()
        return bool(mine["ledger_id"] == mark["ledger_id"] and mine["version"] >= mark["version"])

    def continues(self, other: "PrivacyLedger") -> bool:
        """Returns whether this ledger, elsewhere, is the one that a loaded model's stands in for."""
        if self is other or other._stands_for is None or self.path is None:
            return False
        self._check_continues(other._stands_for)
        return True

    def _check_continues(self, saved: Json) -> None:
        if not self.continues_from(saved):
            raise LedgerError(
                f"{self._database.shown!r} is another ledger than the saved model's (of the data set {saved['dataset_id']!r}), or an "
                "older copy.\nUse the newest copy of the model's own; nothing may be forgotten."
            )

    def __enter__(self) -> "PrivacyLedger":
        return self

    def __exit__(self, *exception: check.Unchecked) -> None:
        self.close()

    def __copy__(self) -> "PrivacyLedger":
        return self

    def __deepcopy__(self, memo: Mapping[int, check.Unchecked]) -> "PrivacyLedger":
        return self  # Copying a model must not fork what was spent.

    def __reduce__(self) -> NoReturn:
        raise TypeError("a PrivacyLedger cannot be pickled: a copy would forget what is spent. Open its path instead.")


def _budget(epsilon: float, delta: check.Unchecked, adaptive: bool) -> EpsilonBudget:
    epsilon, delta = check.epsilon(epsilon, "budget_epsilon"), check.delta(delta, "budget_delta")
    return RenyiFilter.chosen_for(epsilon, delta) if adaptive else EpsilonBudget(epsilon, delta)


def _some() -> int:
    """Returns by how much a version grows: at random, so that an older copy that others go on with does not come to the same."""
    return 1 + secrets.randbelow(2**20)


def _utc_now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def _process() -> str:
    return f"{socket.gethostname()} {os.getpid()} {_PROCESS}"
