"""`PrivacyLedger`: what has been released on one data set, ahead of the release (contract C6)."""

import contextlib
import dataclasses
import datetime
import functools
import json
import logging
import os
import socket
import threading
import uuid
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import dp_accounting
import sqlalchemy as sa
from dp_accounting import DpEvent, NeighboringRelation

from tfp_dpvi.privacy import _validation as check
from tfp_dpvi.privacy import accountants
from tfp_dpvi.privacy.database import (
    BUDGETS,
    CHARGES,
    EXPOSURES,
    FORMAT,
    LEDGER,
    PLANS,
    RESERVATIONS,
    Database,
)
from tfp_dpvi.privacy.errors import BudgetExhaustedError, LedgerError, UnsupportedPairError
from tfp_dpvi.privacy.plan import PrivacyPlan

__all__ = ["LedgerEntry", "PrivacyLedger"]

_LOG = logging.getLogger("tfp_dpvi")
_CONTINUED = "continued from a file: what was spent after it was saved is not counted"
#: Saved ledgers in memory by identity, so that a model loaded again knows what this process has spent since.
_IN_MEMORY: dict[str, "PrivacyLedger"] = {}

Budget = tuple[float, float]
_MOST_STEPS = 2**62  # Databases count to 2^63.

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
_CHARGES = sa.select(CHARGES, PLANS.c.plan.label("json")).join(PLANS).order_by(CHARGES.c.id)
_UNCONFIRMED_STEPS = sa.select(sa.func.coalesce(sa.func.sum(RESERVATIONS.c.steps), 0)).where(
    RESERVATIONS.c.steps_run.is_(None)
)
_VERSION = sa.select(LEDGER.c.version)


@dataclasses.dataclass(frozen=True)
class LedgerEntry:
    """Releases under one plan.

    Attributes:
      plan: the plan of a single one of them (`num_releases` is 1).
      steps: how many releases are charged.
      run: the fit they belong to, where the sampling scheme cannot merge fits; else None.
      seeded: whether their noise came from a fixed seed.
      since: when the first of them was reserved, UTC in ISO 8601.
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
class _Kind:
    """Releases that one price covers: those of a plan, or of a fit where fits do not merge."""

    plan: PrivacyPlan
    run: str
    seeded: bool


@dataclasses.dataclass(frozen=True)
class _State:
    """What the tables held at one version."""

    ledger_id: str
    dataset_id: str | None
    version: int
    continued: bool
    budget: Budget | None
    charged: dict[_Kind, int]
    since: dict[_Kind, str]
    own: dict[_Kind, int]  # The rows of `charges` that this object adds to.
    exposures: tuple[str, ...]
    unconfirmed: int

    def after(self, kind: _Kind, charge: int, steps: int, unconfirmed: int, now: str) -> "_State":
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
        return next((kind.plan.neighboring_relation for kind in self.charged), None)


class PrivacyLedger:
    """An append-only record of every release on one data set, in a database.

    A fit reserves steps before it runs them and confirms them afterwards. Whatever was reserved counts as spent from that
    moment; `confirm(..., steps_run=k)` gives back the steps that never ran, once, and only for the reservation it names.

    Several models, threads and processes may use one ledger at a time.

    Formal guarantee: a reservation is on the disk before `reserve` returns. It is written only if the figures that were
    compared with the budgets are still the ledger's, in one transaction, so that the total of everything reserved never
    exceeds a budget, whoever reserves at the same time. If a reservation covers every release, then at any moment, also
    after a process is killed, the ledger holds at least what was released, and at most one reservation more per fit. The
    total composes all releases as heterogeneous events under one adjacency.

    Args:
      path: a file (SQLite); a database URL such as `"postgresql+psycopg://host/name"` (the extra `postgresql`), for
        machines that share a budget; None for memory.
      dataset_id: a name of the data set that itself reveals nothing. A ledger is bound to it; by default a new file gets
        a random one and an old one keeps its own.
      budget_epsilon: a budget over all fits and models, enforced by `reserve`.
      budget_delta: the delta that goes with it.
      read_only: look at a ledger that nothing can be reserved in.

    Raises:
      LedgerError: if the path or URL cannot be used, or holds no ledger or one of a newer format, of another data set or
        with another budget.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        dataset_id: str | None = None,
        budget_epsilon: float | None = None,
        budget_delta: float | None = None,
        read_only: bool = False,
    ) -> None:
        if dataset_id is not None and not (isinstance(dataset_id, str) and dataset_id.isprintable() and dataset_id):
            raise TypeError(f"dataset_id={dataset_id!a} must be printable text; pass a name that reveals nothing.")
        if (budget_epsilon is None) != (budget_delta is None):
            raise ValueError(
                f"budget_epsilon={budget_epsilon!r} and budget_delta={budget_delta!r}: pass both of them or neither."
            )
        if read_only and path is None:
            raise ValueError("read_only=True needs a path; pass the ledger's file.")
        budget = None
        if budget_epsilon is not None:
            budget = (check.epsilon(budget_epsilon, "budget_epsilon"), check.delta(budget_delta, "budget_delta"))
        self._database = Database(path, read_only=read_only)
        self._writer = uuid.uuid4().hex if path is None else ""
        self._refusal: str | None = None
        self._stands_for: Mapping[str, Any] = {}
        self._known: _State | None = None
        self._making = self._written = -1  # The version that this object makes, and the last one that it made.
        self._affordable: dict[Budget, list[dict[_Kind, int]]] = {}
        self._pricing: dict[int, threading.Lock] = {}  # By process: a child must not wait for a thread of its parent.
        try:
            self._open(dataset_id, budget)
        except BaseException:
            self.close()
            raise

    def _open(self, dataset_id: str | None, budget: Budget | None) -> None:
        if not self._database.read_only and not self._begun():
            with self._database.write() as connection:
                self._database.create_tables(connection)
                if not any(connection.execute(sa.select(one).limit(1)).first() for one in (LEDGER, RESERVATIONS)):
                    in_memory = self._database.path is None and self._database.url is None
                    name = dataset_id or (None if in_memory else uuid.uuid4().hex)
                    row = {"format": FORMAT, "ledger_id": uuid.uuid4().hex, "dataset_id": name}
                    connection.execute(sa.insert(LEDGER).values(**row, version=0, continued=False))
        state = self._state()
        if dataset_id is not None and dataset_id != state.dataset_id:
            raise LedgerError(
                f"dataset_id={dataset_id!r} differs from {state.dataset_id!r}, to which this ledger is bound.\n"
                "Each data set keeps its own ledger; pass another path."
            )
        if budget is None or state.budget == budget:
            return
        if state.budget is not None or self._database.read_only:
            raise LedgerError(
                f"budget_epsilon={budget[0]} at budget_delta={budget[1]} differs from the ledger's {state.budget}; "
                "leave it out, or call set_budget to change it on the record."
            )
        self.set_budget(*budget)

    def _begun(self) -> bool:
        """Whether a file has its first row. Then it is opened without waiting for those who write."""
        if self._database.path is None:
            return False
        with self._database.read() as connection:
            return connection.execute(_VERSION).first() is not None

    # ------------------------------------------------------------------ what is in the tables

    def _state(self) -> _State:
        if self._database.closed and self._known is not None:
            return self._known  # A report can be made after the ledger was given back.
        with self._database.read() as connection:
            return self._read(connection)

    def _read(self, connection: sa.Connection) -> _State:
        """Reads the tables, unless they are of the version that was read last."""
        try:
            return self._read_rows(connection)
        except (KeyError, TypeError, ValueError) as error:
            raise LedgerError(
                f"{self._database.shown!r} is damaged: it holds what no ledger does ({error})."
            ) from error

    def _read_rows(self, connection: sa.Connection) -> _State:
        try:
            row = connection.execute(_LEDGER).mappings().first()
        except sa.exc.DatabaseError as error:
            raise LedgerError(f"{self._database.shown!r} is not a privacy ledger ({error.orig}).") from error
        if row is None or row["format"] != FORMAT:
            found = "nothing" if row is None else f"format version {row['format']}"
            raise LedgerError(
                f"{self._database.shown!r} holds {found} where this code reads format version {FORMAT}: use the version of "
                "tfp_dpvi that wrote it, or a newer one."
            )
        known = self._known
        seen = self._written if known is None else max(known.version, self._written)
        if row["version"] < seen or (known is not None and row["ledger_id"] != known.ledger_id):
            what = "an older copy than the one" if row["version"] < seen else "another ledger than the one"
            raise LedgerError(
                f"{self._database.shown!r} is {what} used before (version {row['version']}; before {seen}).\n"
                "Nothing was charged; restore the newest copy and open it again."
            )
        if known is not None and row["version"] == known.version:
            return known
        if known is None and self.path is not None:
            self._database.check(connection)
        charges = connection.execute(_CHARGES).mappings()
        charged: dict[_Kind, int] = {}
        since: dict[_Kind, str] = {}
        own: dict[_Kind, int] = {}
        for one in charges:
            kind = _Kind(_plan_of(one["json"]), one["run"], one["seeded"])
            charged[kind] = charged.get(kind, 0) + one["steps"]
            since.setdefault(kind, one["since"])
            if one["writer"] == self._writer:
                own[kind] = one["id"]
        budget = connection.execute(sa.select(BUDGETS).order_by(BUDGETS.c.id.desc())).mappings().first()
        self._known = _State(
            row["ledger_id"],
            row["dataset_id"],
            row["version"],
            row["continued"],
            None if budget is None else (budget["epsilon"], budget["delta"]),
            charged,
            since,
            own,
            tuple(connection.execute(sa.select(EXPOSURES.c.text).order_by(EXPOSURES.c.id)).scalars()),
            int(connection.execute(_UNCONFIRMED_STEPS).scalar_one()),
        )
        return self._known

    @property
    def path(self) -> str | None:
        """The file, or the URL without a password; None in memory."""
        database = self._database
        if database.url is not None:
            return database.shown
        return None if database.path is None else str(database.path)

    @property
    def dataset_id(self) -> str | None:
        """The data set that the ledger is bound to."""
        return self._state().dataset_id

    @property
    def budget(self) -> Budget | None:
        """(epsilon, delta) of the ledger-wide budget, None if there is none."""
        return self._state().budget

    @property
    def neighboring_relation(self) -> NeighboringRelation | None:
        """The adjacency of everything recorded; None while the ledger is empty."""
        return self._state().relation

    @property
    def entries(self) -> tuple[LedgerEntry, ...]:
        """What is charged; releases under equal plans are one entry, as their order does not matter."""
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
    def version(self) -> int:
        """Grows with every change."""
        return self._state().version

    @property
    def unconfirmed_steps(self) -> int:
        """Steps reserved but not confirmed; they count as spent."""
        return self._state().unconfirmed

    @property
    def seeded(self) -> bool:
        """Whether any release took its noise from a fixed seed."""
        return any(entry.seeded for entry in self.entries)

    @property
    def exposures(self) -> tuple[str, ...]:
        """What was shown of the data beside the releases, and voids the guarantee: see `record_exposure`."""
        return self._state().exposures

    @property
    def caveats(self) -> tuple[str, ...]:
        """What the total may not hold, as sentences for the report."""
        return (_CONTINUED,) if self._state().continued else ()

    # ------------------------------------------------------------------ what it costs

    def events(self) -> list[DpEvent]:
        """Returns one event per entry, for `prior_events=` of `PrivacyPlan.calibrate`."""
        return [entry.dp_event for entry in self.entries]

    @property
    def dp_event(self) -> DpEvent:
        """The composition of everything reserved."""
        return _composed(self._state().charged)

    def epsilon(self, delta: float, accountant: str | None = None) -> float:
        """Returns epsilon at `delta` of everything reserved (heterogeneous composition).

        Args:
          delta: the delta.
          accountant: by name; None for the first of "pld" and "rdp" that prices all releases.
        """
        state = self._state()
        return _price(tuple(state.charged.items()), check.delta(delta), accountant)

    def epsilon_without_metrics(self, delta: float, accountant: str | None = None) -> float | None:
        """Returns epsilon that the same releases would have cost without privatised metrics; None if there were none."""
        charged = self._state().charged
        if not any(kind.plan.metrics for kind in charged):
            return None
        plain = ((dataclasses.replace(kind, plan=kind.plan.without_metrics), n) for kind, n in charged.items())
        return _price(tuple(plain), check.delta(delta), accountant)

    # ------------------------------------------------------------------ changes

    def reserve(
        self,
        plan: PrivacyPlan,
        steps: int,
        *,
        run: str | None = None,
        seeded: bool = False,
        budgets: Iterable[Budget] = (),
    ) -> int:
        """Charges `steps` releases under `plan` before they happen.

        Args:
          plan: the plan of the fit; its own `num_releases` is only a hint of how many more will follow.
          steps: how many releases are about to run, at least 1.
          run: a name of the fit. A scheme that charges by the epoch (each record once) needs it to see that reservations
            belong to one fit; without it each reservation begins epochs of its own.
          seeded: whether their noise comes from a fixed seed, for the report.
          budgets: (epsilon, delta) pairs that the ledger's total must keep, beside the ledger's own budget.

        Returns:
          The reservation's id, for `confirm`.

        Raises:
          UnsupportedPairError: if the ledger holds releases under another adjacency, or that no accountant prices
            together with these.
          BudgetExhaustedError: if a budget does not allow the steps; nothing is charged.
          LedgerError: if it could not be written down; nothing is charged.
        """
        if not isinstance(plan, PrivacyPlan):
            raise TypeError(f"plan={plan!r} is not a PrivacyPlan; pass the plan of the fit.")
        steps = check.count("steps", steps, 1)
        single = plan if plan.num_releases == 1 else plan.replace(num_releases=1)
        # Fits that merge are one kind; of the others a reservation without a name is a fit of its own.
        name = "" if single.sampling.fits_merge else str(run or f"reservation {uuid.uuid4().hex}")
        if not name.isprintable():
            raise ValueError(f"run={run!a} must be printable text; pass a name of the fit.")
        kind = _Kind(single, name, bool(seeded))
        self._check_writable()  # Before anything is priced.
        budgets = tuple(budgets)
        # Whoever reserves alone need not read again: if what was read last is outdated, nothing is written.
        state = self._known or self._state()
        while True:
            try:
                self._check_allowed(state, kind, steps, plan.num_releases, budgets)
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

    def _check_allowed(self, state: _State, kind: _Kind, steps: int, planned: int, budgets: tuple[Budget, ...]) -> None:
        if state.charged.get(kind, 0) + steps > _MOST_STEPS:
            raise ValueError(
                f"steps={steps}: a ledger counts up to 2**62 releases of a kind; pass the steps that will run."
            )
        self._check_priced(state, kind)
        for budget in (state.budget, *budgets):
            if budget is not None:
                self._check_affordable(state, kind, steps, planned, budget)

    def _check_priced(self, state: _State, kind: _Kind) -> None:
        relation = kind.plan.neighboring_relation
        if state.relation not in (None, relation):
            assert state.relation is not None
            raise UnsupportedPairError(
                f"this ledger holds releases under {state.relation.name} and the plan asks for {relation.name}: guarantees under "
                "different adjacencies do not compose.\nFit under the ledger's adjacency, or keep another ledger."
            )
        if kind not in state.charged:
            _accountant_of(_composed({**state.charged, kind: 1}), relation)

    def _check_affordable(self, state: _State, kind: _Kind, steps: int, planned: int, budget: Budget) -> None:
        """Raises `BudgetExhaustedError` unless the total with these steps keeps a budget.

        Totals that were found to keep it are remembered: whatever lies below one of them needs no new price.
        """
        wanted = {**state.charged, kind: state.charged.get(kind, 0) + steps}
        known = self._affordable.setdefault(budget, [])

        def found() -> bool:
            return any(all(n <= one.get(k, 0) for k, n in wanted.items()) for one in tuple(known))

        if found():
            return
        with self._pricing.setdefault(os.getpid(), threading.Lock()):
            if found():  # Another thread's price holds for these too.
                return
            most = {**wanted, kind: state.charged.get(kind, 0) + max(steps, planned)}
            # With room for what grows, also by others, a price holds for longer; what does not is composed already.
            last = known[-1] if known else most
            roomy = {k: n + n // 4 if n > last.get(k, 0) else last.get(k, 0) for k, n in most.items()}
            for total in (roomy, most, wanted):
                if _price(tuple(total.items()), budget[1], None) <= budget[0]:
                    known[:] = [*known[-1:], total]
                    return
        raise BudgetExhaustedError(
            f"steps={steps}: the budget of epsilon {budget[0]:.6g} at delta {budget[1]:g} does not allow them; "
            f"{_price(tuple(state.charged.items()), budget[1], None):.6g} is spent. Nothing was charged."
        )

    def _charge(self, state: _State, kind: _Kind, steps: int) -> int | None:
        """Writes a reservation if the ledger is still as `state` says; None if it is not."""
        now = _now()
        with self._change(state) as connection:
            if connection is None:
                return None
            charge = state.own.get(kind)
            if charge is None:
                plan = _row(connection, PLANS, plan=_json_of(kind.plan))
                key = {"plan": plan, "run": kind.run, "seeded": kind.seeded, "writer": self._writer}
                charge = _row(connection, CHARGES, defaults={"steps": 0, "since": now}, **key)
            connection.execute(_ADD, {"charge": charge, "more": steps})
            row = {"charge": charge, "steps": steps, "steps_run": None, "process": _process(), "time": now}
            reservation = _new_id(connection.execute(_RESERVE, row))
        self._remember(state.after(kind, charge, steps, steps, now))
        return reservation

    def _remember(self, state: _State) -> None:
        if self._known is None or self._known.version < state.version:
            self._known = state

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
            assert connection is not None
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

    def set_budget(self, epsilon: float, delta: float) -> None:
        """Sets or changes the ledger-wide budget; the change is recorded like everything else."""
        row = {"epsilon": check.epsilon(epsilon), "delta": check.delta(delta), "time": _now()}
        with self._change() as connection:
            assert connection is not None
            connection.execute(sa.insert(BUDGETS).values(**row))

    def record_exposure(self, text: str) -> None:
        """Records, before it happens, that something exact is shown of the data, which no epsilon covers.

        Every later report of this ledger says so, whichever model or process it comes from. The same sentence is
        recorded once.

        Args:
          text: a sentence that reveals nothing itself, for instance "exact training losses were shown".

        Raises:
          LedgerError: if it could not be written down.
        """
        if not (isinstance(text, str) and text.isprintable() and text.strip()):
            raise TypeError(f"text={text!a} must be one line of printable text; say what was shown.")
        with self._change() as connection:
            assert connection is not None
            _row(connection, EXPOSURES, defaults={"time": _now()}, text=text)

    def _check_writable(self) -> None:
        if self._refusal is not None:
            raise LedgerError(self._refusal)
        self._database.check_writable()

    @contextlib.contextmanager
    def _change(self, state: _State | None = None) -> Iterator[sa.Connection | None]:
        """Opens a transaction that makes a new version; its connection is None if the ledger is not in that state."""
        self._check_writable()
        with self._database.write() as connection:
            if state is None:
                self._read(connection)  # It refuses an older copy.
                connection.execute(_NEXT_VERSION)
                self._making = connection.execute(_VERSION).scalar_one()
            elif connection.execute(_NEXT_AFTER, {"known": state.version, "same": state.ledger_id}).rowcount == 0:
                yield None
                return
            else:
                self._making = state.version + 1
            making = self._making
            yield connection
        self._written = max(self._written, making)

    def close(self) -> None:
        """Ends the use of a file or server. A ledger in memory has nothing to close."""
        self._database.close()

    def __enter__(self) -> "PrivacyLedger":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # ------------------------------------------------------------------ copies

    def __copy__(self) -> "PrivacyLedger":
        return self

    def __deepcopy__(self, memo: object) -> "PrivacyLedger":
        # Copying a model must not fork what was spent.
        return self

    def __reduce__(self) -> Any:
        raise TypeError("a PrivacyLedger cannot be pickled: a copy would forget what is spent. Open its path instead.")

    def to_config(self) -> dict[str, Any]:
        """Returns what a saved model holds of its ledger, JSON-ready. No record of the data is among it, and no key."""
        with self._database.read() as connection:
            state = self._read(connection)
            rows = connection.execute(_CHARGES).mappings().all()
        if self.path is None:
            _IN_MEMORY[state.ledger_id] = self
        return {
            "path": None if self._database.path is None else str(self._database.path),
            "url": None if self._database.url is None else self.path,
            "ledger_id": state.ledger_id,
            "version": state.version,
            "dataset_id": state.dataset_id,
            "budget": None if state.budget is None else list(state.budget),
            "exposures": list(state.exposures),
            "charges": [
                {**{name: row[name] for name in ("run", "seeded", "writer", "steps", "since")}, "plan": row["json"]}
                for row in rows
            ],
        }

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "PrivacyLedger":
        """Returns the ledger of a saved model, with everything that was spent when it was saved, and since as far as known.

        A ledger in memory is shared with other models of this process that come from the same one; if two went on apart,
        what both spent is counted. A file is opened where it was. If it is not there, or on a server, the ledger can be read
        but refuses to reserve: `compile(ledger=)` takes its new place.

        Args:
          config: from `to_config`.

        Raises:
          LedgerError: the file is another ledger, or an older copy than the one that the model was saved with.
        """
        where = config["path"] or config["url"]
        if where is None:
            live = _IN_MEMORY.get(config["ledger_id"])
            ledger = cls() if live is None else live
            ledger._merge(config)
            return ledger
        if config["path"] is not None and os.path.exists(config["path"]):
            ledger = cls(config["path"], read_only=not os.access(config["path"], os.W_OK))
            ledger._check_continues(config)
            return ledger
        ledger = cls()
        ledger._merge(config, stands_in=True)
        ledger._stands_for = dict(config)
        ledger._refusal = (
            f"this model's ledger is not at {where!r}, where it was when the model was saved: say\n"
            "compile(..., ledger=dpvi.PrivacyLedger(its_new_place)). Nothing was charged."
        )
        return ledger

    def _merge(self, config: Mapping[str, Any], *, stands_in: bool = False) -> None:
        """Adds what another copy of a ledger in memory held. Each process has rows of its own, and the larger one counts."""
        others = 0
        with self._change() as connection:
            assert connection is not None
            for one in config["charges"]:
                if one["writer"] == self._writer:
                    continue  # This object knows better: it may have given steps back since.
                plan = _row(connection, PLANS, plan=one["plan"])
                key = {"plan": plan, "run": one["run"], "seeded": one["seeded"], "writer": one["writer"]}
                charge = _row(connection, CHARGES, defaults={"steps": 0, "since": one["since"]}, **key)
                larger = (CHARGES.c.id == charge) & (CHARGES.c.steps < one["steps"])
                others += connection.execute(sa.update(CHARGES).where(larger).values(steps=one["steps"])).rowcount
            for text in config["exposures"]:
                _row(connection, EXPOSURES, defaults={"time": _now()}, text=text)
            if config["budget"] is not None and connection.execute(sa.select(BUDGETS)).first() is None:
                epsilon, delta = config["budget"]
                connection.execute(sa.insert(BUDGETS).values(epsilon=epsilon, delta=delta, time=_now()))
            connection.execute(sa.update(LEDGER).values(dataset_id=config["dataset_id"]))
            if not stands_in:  # It is the saved one from here on, and is known by its identity.
                connection.execute(sa.update(LEDGER).values(ledger_id=config["ledger_id"]))
            if others and not stands_in:
                connection.execute(sa.update(LEDGER).values(continued=True))
        self._known = None
        if stands_in:
            return
        _IN_MEMORY[config["ledger_id"]] = self
        if others:
            _LOG.warning("This model's ledger is %s. Keep it on disk: PrivacyLedger(path).", _CONTINUED)

    def _check_continues(self, saved: Mapping[str, Any]) -> None:
        state = self._state()
        if state.ledger_id != saved["ledger_id"]:
            raise LedgerError(
                f"{self._database.shown!r} is another ledger (of the data set {state.dataset_id!r}) than the saved model's "
                f"(of {saved['dataset_id']!r}).\nEach data set keeps its own ledger."
            )
        if state.version < saved["version"]:
            raise LedgerError(
                f"{self._database.shown!r} does not hold what was spent when the model was saved: it is an older copy.\n"
                "Use the newest; nothing may be forgotten."
            )

    def mark(self) -> dict[str, Any]:
        """Returns the place where a ledger stands, JSON-ready, for `continues_from`."""
        state = self._state()
        return {"ledger_id": state.ledger_id, "version": state.version, "dataset_id": state.dataset_id}

    def continues_from(self, mark: Mapping[str, Any]) -> bool:
        """Whether this ledger holds what it, under whatever path, held when `mark` was taken."""
        state = self._state()
        return state.ledger_id == mark["ledger_id"] and state.version >= mark["version"]

    def continues(self, other: "PrivacyLedger") -> bool:
        """Whether this ledger, elsewhere, is the one that a loaded model's stands in for."""
        if self is other or other._refusal is None or self.path is None:
            return False
        self._check_continues(other._stands_for)
        return True

    def to_json(self) -> dict[str, Any]:
        """Returns what is charged as a JSON-ready dictionary."""
        return {
            "dataset_id": self.dataset_id,
            "budget": None if self.budget is None else list(self.budget),
            "num_releases": self.num_releases,
            "unconfirmed_steps": self.unconfirmed_steps,
            "exposures": list(self.exposures),
            "entries": [
                {"plan": e.plan.to_json(), "steps": e.steps, "run": e.run, "seeded": e.seeded, "since": e.since}
                for e in self.entries
            ],
        }


# ---------------------------------------------------------------------- prices


def _composed(charged: Mapping[_Kind, int]) -> DpEvent:
    events = [kind.plan.event_of(steps) for kind, steps in charged.items() if steps > 0]
    if not events:
        return dp_accounting.NoOpDpEvent()
    return events[0] if len(events) == 1 else dp_accounting.ComposedDpEvent(events)


def _accountant_of(event: DpEvent, relation: NeighboringRelation) -> accountants.Accountant:
    """Returns the first accountant that prices everything."""
    refusal: UnsupportedPairError | None = None
    for name in ("pld", "rdp"):
        accountant = accountants.get_accountant(name)
        try:
            accountant.releases(event, relation)
        except UnsupportedPairError as error:
            refusal = refusal or error
        else:
            return accountant
    raise UnsupportedPairError(
        f"these releases and those in the ledger have no common price ({refusal})\nKeep one kind of sampling for a data set."
    )


@functools.lru_cache(maxsize=64)
def _price(charged: tuple[tuple[_Kind, int], ...], delta: float, accountant: str | None) -> float:
    relation = charged[0][0].plan.neighboring_relation if charged else NeighboringRelation.ADD_OR_REMOVE_ONE
    event = _composed(dict(charged))
    found = _accountant_of(event, relation) if accountant is None else accountants.get_accountant(accountant)
    return found.epsilon(event, delta, relation)


# ---------------------------------------------------------------------- rows


def _row(connection: sa.Connection, table: sa.Table, defaults: Mapping[str, Any] | None = None, **key: Any) -> int:
    """Returns the id of the row with this key, made with `defaults` if it is not there."""
    match = sa.and_(*(table.c[name] == value for name, value in key.items()))
    found = connection.execute(sa.select(table.c.id).where(match)).scalar()
    if found is None:
        values = {**key, **(defaults or {})}
        found = _new_id(connection.execute(sa.insert(table).values(**values)))
    return int(found)


def _new_id(result: "sa.CursorResult[Any]") -> int:
    key = result.inserted_primary_key
    assert key is not None
    return int(key[0])


def _json_of(plan: PrivacyPlan) -> str:
    return json.dumps(plan.to_json(), sort_keys=True)


@functools.lru_cache(maxsize=1024)
def _plan_of(text: str) -> PrivacyPlan:
    return PrivacyPlan.from_json(json.loads(text))


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


_PROCESS = uuid.uuid4().hex


def _process() -> str:
    return f"{socket.gethostname()} {os.getpid()} {_PROCESS}"
