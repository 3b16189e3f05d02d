"""`PrivacyLedger`: a record of all releases on one data set, charged beforehand (contract 6)."""

import contextlib
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
from dp_accounting import DpEvent, NeighboringRelation

from tfp_dpvi import _validate as check
from tfp_dpvi.privacy.budgets import (
    EpsilonBudget,
    RenyiFilter,
    common_accountant,
    total_epsilon,
)
from tfp_dpvi.privacy.database import (
    ALL_CHARGES,
    BUDGETS,
    CHARGES,
    EXPOSURES,
    LEDGER,
    PLANS,
    RESERVATIONS,
    ChangedByOthersError,
    Database,
    Value,
    add,
    find_or_add,
    update_row,
)
from tfp_dpvi.privacy.errors import BudgetExhaustedError, LedgerError, UnsupportedPairError
from tfp_dpvi.privacy.ledger_state import (
    CONTINUED,
    Charged,
    Kind,
    LedgerEntry,
    LedgerReader,
    LedgerState,
    composed,
)
from tfp_dpvi.privacy.plan import PrivacyPlan
from tfp_dpvi.privacy.sensitivity import Json

__all__ = ["LedgerEntry", "PrivacyLedger"]

_LOG = logging.getLogger("tfp_dpvi")
_SAVED = ("run", "seeded", "writer", "steps", "since")
#: In-memory ledgers by identity, so that a reloaded model has this process's spending since it was
#: saved.
_IN_MEMORY: dict[str, "PrivacyLedger"] = {}
_PROCESS = uuid.uuid4().hex

# The statements of a reservation. They are built once: building one takes longer than running it.
_NEXT_VERSION = sa.text("UPDATE ledger SET version = version + :more")
_NEXT_AFTER = sa.text(
    "UPDATE ledger SET version = :next WHERE version = :known AND ledger_id = :same"
)
_ADD = sa.text("UPDATE charges SET steps = steps + :more WHERE id = :charge")
_RESERVE = sa.insert(RESERVATIONS)
_OPEN = sa.text(
    "SELECT charge, steps FROM reservations "
    "WHERE id = :id AND steps_run IS NULL AND process = :process"
)
_CLOSE = sa.text("UPDATE reservations SET steps_run = :run WHERE id = :id")


class _OutdatedError(ChangedByOthersError):
    """Raised if the ledger has changed since the total was computed."""


class PrivacyLedger:
    """An append-only record of every release on one data set.

    It lies in a database that models, threads and processes share. A fit reserves steps before it
    runs them, and confirms them afterwards. Reserved steps count as spent at once.

    Args:
      path: A file (SQLite); or a database URL such as `"postgresql+psycopg://host/name"` (the extra
        `postgresql`), for machines that share a budget; or None for memory.
      dataset_id: The name of the data set that the ledger is bound to. It must reveal nothing. By
        default it is random.
      budget_epsilon: A budget over all fits and models, which `reserve` enforces.
      budget_delta: The delta of that budget.
      budget_adaptive: Whether the budget is a Renyi privacy filter, which also covers settings that
        are chosen after looking at earlier results. It needs more noise, 5 to 10 % in most fits.
      read_only: Whether to refuse reservations.

    Raises:
      LedgerError: The database cannot be used, is damaged, or has another data set or budget.
      ValueError: An argument is out of its range, or one of `budget_epsilon` and `budget_delta` is
        missing.

    #### Formal guarantee

    A reservation is on the disk before `reserve` returns. It is written only if the total that was
    compared with the budgets is still the ledger's, in one transaction, so that the total never
    exceeds a budget. If every release is reserved first, then at any time, also after a process is
    killed, the ledger has all releases, and at most one further reservation per fit.

    The total composes all releases as heterogeneous events under one neighboring relation, as if
    their settings had been fixed in advance. If settings depend on earlier results, only an
    adaptive budget covers it (`RenyiFilter`).

    ```python
    >>> from tfp_dpvi.privacy import FullBatch, PrivacyPlan
    >>> ledger = PrivacyLedger(budget_epsilon=3.0, budget_delta=1e-5)
    >>> plan = PrivacyPlan(FullBatch(), noise_multiplier=4.0, num_releases=5)
    >>> reservation = ledger.reserve(plan, steps=5)
    >>> ledger.confirm(reservation, steps_run=3)
    >>> ledger.num_releases, round(ledger.epsilon(1e-5), 2)
    (3, 1.7)
    >>> ledger.most_releases(plan)
    5

    ```
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
        if (budget_epsilon is None) != (budget_delta is None) or (
            budget_adaptive and budget_epsilon is None
        ):
            raise ValueError(
                f"budget_epsilon={check.shown(budget_epsilon)} and "
                f"budget_delta={check.shown(budget_delta)}: pass both of them or neither."
            )
        if read_only and path is None:
            raise ValueError("read_only=True needs a path; pass the ledger's file.")
        budget = (
            None
            if budget_epsilon is None
            else _budget(budget_epsilon, budget_delta, budget_adaptive)
        )
        self._database = Database(path, dataset_id=dataset_id, read_only=read_only)
        self._writer = uuid.uuid4().hex if path is None else ""
        self._reader = LedgerReader(self._database, self._writer)
        if dataset_id is not None and dataset_id != self.dataset_id:
            raise LedgerError(
                f"dataset_id={dataset_id!r} differs from {self.dataset_id!r}, to which this ledger "
                "is bound; pass another path."
            )
        self._stands_for: Json | None = None
        # Totals that are known to be within a budget.
        self._affordable: dict[EpsilonBudget, Charged] = {}
        stored = self._state().budget
        if budget is not None and stored is None and not read_only:
            self.set_budget(budget.epsilon, budget.delta, adaptive=budget_adaptive)
        # A stored filter may have another order than the current version would choose.
        elif budget is not None and (
            (type(stored), self.budget) != (type(budget), (budget.epsilon, budget.delta))
        ):
            raise LedgerError(
                f"budget_epsilon={budget.epsilon} at budget_delta={budget.delta} differs from "
                f"{stored or 'no budget'} of the ledger; leave it out, or call set_budget, which "
                "records the change."
            )

    @property
    def path(self) -> str | None:
        """The file, or the URL without a password; None in memory."""
        return None if self._database.in_memory else self._database.shown

    def close(self) -> None:
        """Closes the file or server connection. A ledger in memory has nothing to close."""
        self._database.closed = not self._database.in_memory

    def _state(self) -> LedgerState:
        return self._reader.state()

    # ------------------------------------------------------------------ reservations

    def _check_writable(self) -> None:
        if self._stands_for is not None:
            place = self._stands_for["path"] or self._stands_for["url"]
            raise LedgerError(
                f"this model's ledger is not at {place!r}, where it was when the model was saved:\n"
                "use compile(..., ledger=dpvi.PrivacyLedger(new_path)). Nothing was charged."
            )
        self._database.check_writable()

    @contextlib.contextmanager
    def _change(self) -> Iterator[sa.Connection]:
        """Opens a transaction that makes a new version of the ledger's current contents."""
        self._check_writable()
        with self._database.write() as connection:
            # This refuses an older copy.
            self._reader.read_checked(connection, locked=True)
            update_row(connection, _NEXT_VERSION, {"more": _random_increment()})
            yield connection
            after = self._reader.read_changed(connection)
        self._reader.known = after

    def most_releases(self, plan: PrivacyPlan, budgets: Iterable[tuple[float, float]] = ()) -> int:
        """Returns the number of a plan's releases that the budgets allow after all reservations.

        Args:
          plan: The plan; `num_releases` is the most that is returned.
          budgets: Further (epsilon, delta) pairs that limit the ledger's total.

        Raises:
          UnsupportedPairError: The ledger has releases under another neighboring relation, or
            without a common accountant.
        """
        state = self._state()
        state.check_relation(plan.neighboring_relation)
        state.check_unit(plan)
        most = plan.num_releases
        for budget in (*(EpsilonBudget(*pair) for pair in budgets), state.budget):
            if budget is not None and most:
                most = budget.most_releases(
                    plan.replace(num_releases=most), [composed(state.charged)]
                )
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
        """Charges releases under a plan before they happen.

        Args:
          plan: The plan of the fit. Its own `num_releases` is only a hint for later reservations.
          steps: The number of releases to charge, at least 1.
          run: The name of the fit, which groups reservations for schemes that charge by the epoch
            (each record once). Without it, each reservation starts a new epoch.
          seeded: Whether the noise comes from a fixed seed, which the report then says.
          budgets: Further (epsilon, delta) pairs that limit the ledger's total, besides its own
            budget.

        Returns:
          The reservation's id, for `confirm`.

        Raises:
          UnsupportedPairError: The ledger has releases under another neighboring relation, or
            without a common accountant; nothing is charged.
          BudgetExhaustedError: A budget does not allow the steps; nothing is charged.
          LedgerError: The ledger could not be written; nothing is charged.
        """
        if not isinstance(plan, PrivacyPlan):
            raise TypeError(
                f"plan={check.shown(plan)} is not a PrivacyPlan; pass the plan of the fit."
            )
        steps = check.count("steps", steps, 1)
        single = plan.replace(num_releases=1)
        # Fits that merge are of one kind. Otherwise a reservation without a name is a separate fit.
        name = "" if single.sampling.fits_merge else str(run or f"reservation {uuid.uuid4().hex}")
        kind = Kind(single, name, bool(seeded))
        # A ledger that cannot be written is refused before the total is computed.
        self._check_writable()
        further = tuple(EpsilonBudget(*pair) for pair in budgets)
        # A single writer need not read again: if its state is outdated, nothing is written.
        state = self._reader.known or self._state()
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
        """Reserves steps, runs the body of a `with` statement, and confirms them.

        If the body raises, all of the steps stay charged. The errors are those of `reserve`.

        Args:
          plan: The plan of the fit.
          steps: The number of releases; by default all of the plan's.
          run: The name of the fit, see `reserve`.
          seeded: Whether the noise comes from a fixed seed.
          budgets: Further (epsilon, delta) pairs that limit the ledger's total.
        """
        steps = plan.num_releases if steps is None else steps
        reservation = self.reserve(plan, steps, run=run, seeded=seeded, budgets=budgets)
        yield
        self.confirm(reservation)

    def _check_allowed(
        self,
        state: LedgerState,
        kind: Kind,
        steps: int,
        planned: int,
        budgets: tuple[EpsilonBudget, ...],
    ) -> None:
        relation = kind.plan.neighboring_relation
        state.check_relation(relation)
        state.check_unit(kind.plan)
        if kind not in state.charged:
            common_accountant(composed({**state.charged, kind: 1}), relation)
        for budget in (state.budget, *budgets):
            if budget is not None and not self._keeps(budget, state.charged, kind, steps, planned):
                spent = budget.spent(composed(state.charged), relation)
                raise BudgetExhaustedError(
                    f"steps={steps}: {budget} does not allow them; {spent:.6g} is spent. "
                    "Nothing was charged."
                )

    def _keeps(
        self, budget: EpsilonBudget, charged: Charged, kind: Kind, steps: int, planned: int
    ) -> bool:
        """Returns whether a budget allows further steps.

        A total below one that is known to be allowed needs no new computation.
        """
        known = self._affordable.get(budget, {})
        wanted = {**charged, kind: charged.get(kind, 0) + steps}
        if all(n <= known.get(k, 0) for k, n in wanted.items()):
            return True
        most = {**wanted, kind: charged.get(kind, 0) + max(steps, planned)}
        # Room for the kinds that grow, also by other writers, keeps a total valid for longer. The
        # other kinds are composed already.
        roomy = {k: n + n // 4 if n > known.get(k, 0) else known.get(k, 0) for k, n in most.items()}
        for total in (roomy, most, wanted):
            if budget.allows(composed(total), kind.plan.neighboring_relation):
                self._affordable[budget] = total
                return True
        return False

    def _charge(self, priced: LedgerState, kind: Kind, steps: int) -> int:
        """Writes a reservation and returns its id; raises `_OutdatedError` for an old total."""
        now = _utc_now()
        version = priced.version + _random_increment()
        with self._database.write() as connection:
            same = {"known": priced.version, "next": version, "same": priced.ledger_id}
            if connection.execute(_NEXT_AFTER, same).rowcount == 0:
                raise _OutdatedError("its version does not change")
            charge = priced.rows.get(kind)
            if charge is None:
                plan = find_or_add(
                    connection, PLANS, plan=json.dumps(kind.plan.to_json(), sort_keys=True)
                )
                key: dict[str, Value] = {
                    "plan": plan,
                    "run": kind.run,
                    "seeded": kind.seeded,
                    "writer": self._writer,
                }
                charge = find_or_add(connection, CHARGES, {"steps": 0, "since": now}, **key)
            update_row(connection, _ADD, {"charge": charge, "more": steps})
            row = {
                "charge": charge,
                "steps": steps,
                "steps_run": None,
                "process": _process(),
                "time": now,
            }
            reservation = add(connection, _RESERVE, row)
            after = self._reader.read_changed(connection)
            # This also notices what others changed without a new version.
            if after != priced.after_reserving(kind, steps, row=charge, time=now, version=version):
                raise ChangedByOthersError("its rows are not those that were priced")
        self._reader.known = after
        return reservation

    def confirm(self, reservation: int, steps_run: int | None = None) -> None:
        """Closes a reservation, whose steps drew noise.

        Args:
          reservation: The id that `reserve` returned.
          steps_run: The number of steps that ran; by default all. Passing fewer states that the
            others never drew noise or read the data: they are refunded.

        Raises:
          LedgerError: The reservation is unknown, was confirmed before, or is another process's.
          ValueError: `steps_run` exceeds the reserved steps.
        """
        with self._change() as connection:
            row = connection.execute(_OPEN, {"id": reservation, "process": _process()}).first()
            if row is None:
                raise LedgerError(
                    f"reservation={reservation!r} is unknown, was confirmed before, or was made by "
                    "another process; nothing changed."
                )
            run = row.steps if steps_run is None else check.count("steps_run", steps_run)
            if run > row.steps:
                raise ValueError(
                    f"steps_run={run} exceeds the {row.steps} steps reserved: reserve before "
                    "running."
                )
            update_row(connection, _CLOSE, {"id": reservation, "run": run})
            update_row(connection, _ADD, {"charge": row.charge, "more": run - row.steps})

    # ------------------------------------------------------------------ other changes

    def set_budget(self, epsilon: float, delta: float, *, adaptive: bool = False) -> None:
        """Sets and records the ledger-wide budget.

        Args:
          epsilon: The limit, finite and above 0.
          delta: Strictly between 0 and 1.
          adaptive: Whether it is a `RenyiFilter`.

        Raises:
          LedgerError: The budget is adaptive and the ledger has releases, or the ledger could not
            be written.
        """
        budget = _budget(epsilon, delta, adaptive)
        order = getattr(budget, "order", None)
        with self._change() as connection:
            if (
                order is not None
                and connection.execute(sa.select(CHARGES.c.id).where(CHARGES.c.steps > 0)).first()
            ):
                raise LedgerError(
                    "an adaptive budget must be set before the first release: create the ledger "
                    "with budget_adaptive=True."
                )
            row = {
                "epsilon": budget.epsilon,
                "delta": budget.delta,
                "renyi_order": order,
                "time": _utc_now(),
            }
            connection.execute(sa.insert(BUDGETS).values(**row))

    def record_exposure(self, text: str) -> None:
        """Records, in advance, that exact values of the data are shown, which no epsilon covers.

        Args:
          text: A sentence for every later report, such as "exact training losses were shown". It
            must reveal nothing itself.
        """
        check.text("text", text, "describe what was shown")
        with self._change() as connection:
            find_or_add(connection, EXPOSURES, {"time": _utc_now()}, text=text)

    # ------------------------------------------------------------------ what was spent

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
        """Raises `UnsupportedPairError` if releases are under another neighboring relation."""
        self._state().check_relation(relation)

    def check_unit(self, plan: PrivacyPlan) -> None:
        """Raises `UnsupportedPairError` if releases protect another unit than a plan does."""
        self._state().check_unit(plan)

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
        """Sentences on exact values of the data that were shown, which voids the guarantee.

        See `record_exposure`.
        """
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
        """The composition of all reserved releases."""
        return composed(self._state().charged)

    def epsilon(self, delta: float, accountant: str | None = None) -> float:
        """Returns the epsilon of all reserved releases.

        Args:
          delta: Strictly between 0 and 1.
          accountant: The name of an accountant; by default the first of "pld" and "rdp" that
            supports the releases.

        Raises:
          UnsupportedPairError: The named accountant does not support the releases.
        """
        relation = self.neighboring_relation or NeighboringRelation.ADD_OR_REMOVE_ONE
        return total_epsilon(self.dp_event, check.delta(delta), relation, accountant)

    # ------------------------------------------------------------------ saving and loading

    def to_config(self) -> Json:
        """Returns a saved model's copy of the ledger, JSON-ready, without records or keys."""
        with self._database.read() as connection:
            state = self._reader.read_checked(connection)
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
            "charges": [
                {**{name: row[name] for name in _SAVED}, "plan": row["json"]} for row in rows
            ],
        }

    @classmethod
    def from_config(cls, config: Json) -> "PrivacyLedger":
        """Returns the ledger of a saved model.

        It has all spending until the model was saved, and later spending as far as it is known:

        * A ledger in memory is shared with this process's models of the same ledger. If two of them
          diverged, the spending of both counts.
        * A file is opened at its path, and refused if it is an older copy.
        * If the file is missing, or the ledger is on a server, it can be read but refuses to
          reserve: pass its new path to `compile(ledger=)`.

        Args:
          config: The result of `to_config`.

        Raises:
          LedgerError: The file at the path is damaged, of another ledger, or an older copy.
          ValueError: The configuration lacks a field.
        """
        needed = (
            *("ledger_id", "version", "dataset_id", "path", "url"),
            *("budget", "exposures", "charges"),
        )
        config = check.fields("the saved model's ledger", config, needed=needed)
        path = config["path"]
        if isinstance(path, str) and os.path.exists(path):
            ledger = cls(path)
            with ledger._reader.naming_damage():
                ledger._check_continues(config)
            return ledger
        stands_in = path is not None or config["url"] is not None
        ledger = cls() if stands_in else _IN_MEMORY.get(str(config["ledger_id"])) or cls()
        with ledger._reader.naming_damage():
            ledger._merge(config, stands_in=stands_in)
        ledger._stands_for = config if stands_in else None
        return ledger

    def _merge(self, config: Json, *, stands_in: bool = False) -> None:
        """Merges another copy into a ledger in memory.

        Each process has its own rows, of which the larger number of steps counts.
        """
        others = 0
        has_budget = self.budget is not None
        # A ledger's name is its own for good.
        name = self.dataset_id or config["dataset_id"]
        with self._change() as connection:
            for saved in config["charges"]:
                # This object's own rows are newer: it may have refunded steps since.
                if saved["writer"] == self._writer:
                    continue
                plan = find_or_add(connection, PLANS, plan=saved["plan"])
                key = {name: saved[name] for name in ("run", "seeded", "writer")}
                new = {"steps": 0, "since": saved["since"]}
                charge = find_or_add(connection, CHARGES, new, plan=plan, **key)
                larger = (CHARGES.c.id == charge) & (CHARGES.c.steps < saved["steps"])
                update = sa.update(CHARGES).where(larger).values(steps=saved["steps"])
                others += connection.execute(update).rowcount
            for text in config["exposures"]:
                find_or_add(connection, EXPOSURES, {"time": _utc_now()}, text=text)
            if config["budget"] is not None and not has_budget:
                epsilon, delta = config["budget"][:2]
                # Older files have no order.
                order = config["budget"][2:]
                row = {
                    "epsilon": epsilon,
                    "delta": delta,
                    "renyi_order": order[0] if order else None,
                }
                connection.execute(sa.insert(BUDGETS).values(**row, time=_utc_now()))
            ledger: dict[str, Value] = {"dataset_id": name}
            if not stands_in:
                # From here on it is the saved ledger, registered by its identity.
                ledger["ledger_id"] = config["ledger_id"]
                if others:
                    ledger["continued"] = True
                    _LOG.warning(
                        "This model's ledger is %s. Keep it on disk: PrivacyLedger(path).",
                        CONTINUED,
                    )
            update_row(connection, sa.update(LEDGER), ledger)
            self._reader.known = None
        if not stands_in:
            _IN_MEMORY[config["ledger_id"]] = self

    def mark(self) -> Json:
        """Returns the ledger's identity and version, JSON-ready, for `continues_from`."""
        return self._state().mark

    def continues_from(self, mark: Json) -> bool:
        """Returns whether this ledger, under any path, includes the state that `mark` is of."""
        mine = self.mark()
        return bool(mine["ledger_id"] == mark["ledger_id"] and mine["version"] >= mark["version"])

    def continues(self, other: "PrivacyLedger") -> bool:
        """Returns whether this ledger, at another path, is that of a loaded model."""
        if self is other or other._stands_for is None or self.path is None:
            return False
        self._check_continues(other._stands_for)
        return True

    def _check_continues(self, saved: Json) -> None:
        if not self.continues_from(saved):
            raise LedgerError(
                f"{self._database.shown!r} is not the saved model's ledger (of the data set "
                f"{saved['dataset_id']!r}), or an older copy.\n"
                "Use the newest copy of the model's own ledger."
            )

    def __enter__(self) -> "PrivacyLedger":
        return self

    def __exit__(self, *exception: check.Unchecked) -> None:
        self.close()

    def __copy__(self) -> "PrivacyLedger":
        return self

    def __deepcopy__(self, memo: Mapping[int, check.Unchecked]) -> "PrivacyLedger":
        # A copied model shares the ledger.
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a PrivacyLedger cannot be pickled: a copy would miss later spending. Open its path "
            "instead."
        )


def _budget(epsilon: float, delta: check.Unchecked, adaptive: bool) -> EpsilonBudget:
    make = RenyiFilter.chosen_for if adaptive else EpsilonBudget
    return make(check.epsilon(epsilon, "budget_epsilon"), check.delta(delta, "budget_delta"))


def _random_increment() -> int:
    """Returns a random increment of the version, which two diverging copies hardly ever share."""
    return 1 + secrets.randbelow(2**20)


def _utc_now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def _process() -> str:
    return f"{socket.gethostname()} {os.getpid()} {_PROCESS}"
