"""`PrivacyLedger`: what has been released on one data set, ahead of the release (contract C6)."""

import hashlib
import os
import threading
import uuid
from collections.abc import Mapping
from typing import Any

import dp_accounting
from dp_accounting import DpEvent, NeighboringRelation

from tfp_dpvi.privacy import _ledger_file, _saved_ledger, accountants
from tfp_dpvi.privacy import _validation as check
from tfp_dpvi.privacy._books import FORMAT, VERSION, Books, LedgerEntry
from tfp_dpvi.privacy.errors import BudgetExhaustedError, LedgerError, UnsupportedPairError
from tfp_dpvi.privacy.plan import PrivacyPlan

__all__ = ["LedgerEntry", "PrivacyLedger"]


class PrivacyLedger:
    """An append-only record of every release on one data set.

    A fit reserves steps before it runs them and confirms them afterwards. Whatever was reserved
    counts as spent from that moment; `confirm(..., steps_run=k)` gives back the steps that never ran,
    once, and only for the reservation it names.

    Formal guarantee: with a `path`, a reservation is on the disk (fsync) before `reserve` returns. If
    every release is preceded by a reservation that covers it, then at any moment, also after the
    process is killed, the ledger holds at least what was released, and at most one reservation more
    per run. The total composes all releases as heterogeneous events under one adjacency.

    With a `path` the ledger is a file, locked against other processes until `close()`; ledgers opened
    on one path within a process share it. Without one it lives in memory.

    Args:
      path: the file; None for memory.
      dataset_id: a name of the data set that itself reveals nothing. A file is bound to it; by default
        a new file gets a random one and an old one keeps its own.
      budget_epsilon: a ledger-wide budget over all fits and models, enforced by `reserve`.
      budget_delta: the delta that goes with it.
      read_only: look at a file without locking it; nothing can be reserved.

    Raises:
      LedgerError: if the file is in use by another process, was altered, is of a newer format, or
        belongs to another data set or budget.
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
        if dataset_id is not None and not (isinstance(dataset_id, str) and dataset_id):
            raise TypeError(f"dataset_id={dataset_id!r} must be a non-empty string; pass a name that reveals nothing.")
        if (budget_epsilon is None) != (budget_delta is None):
            raise ValueError(
                f"budget_epsilon={budget_epsilon!r} and budget_delta={budget_delta!r}: pass both of them or neither."
            )
        if read_only and path is None:
            raise ValueError("read_only=True needs a path; pass the ledger's file.")
        budget = None
        if budget_epsilon is not None:
            budget = (check.epsilon(budget_epsilon, "budget_epsilon"), check.delta(budget_delta, "budget_delta"))
        self._read_only = read_only
        self._file: _ledger_file.LedgerFile | None = None
        self._lock = threading.RLock()
        self._epsilon_cache: dict[Any, float] = {}
        self._allowance: tuple[Any, int] | None = None
        self._closed = False
        self._refusal: str | None = None
        self._books = Books()
        self._history = _saved_ledger.History()
        if read_only:
            assert path is not None
            for record in _ledger_file.read_ledger_file(path):
                self._books.apply(record)
        elif path is not None:
            self._file = _ledger_file.open_ledger_file(path)
            self._lock = self._file.lock
        else:
            _saved_ledger.LIVE[self._history.token] = self
        try:
            self._begin(dataset_id, budget)
        except BaseException:
            self.close()
            raise

    def _begin(self, dataset_id: str | None, budget: tuple[float, float] | None) -> None:
        if self._file is not None:
            if self._file.attached is None:
                for record in self._file.records:
                    self._books.apply(record)
                # What an earlier process left open can no longer be confirmed: it stays charged.
                self._file.first_own_reservation = self._books.num_reservations
                self._file.attached = self._books
            self._books = self._file.attached
        books = self._books
        if books.num_records == 0:
            if self._read_only:
                raise LedgerError("the file is empty: it is not a privacy ledger.")
            if dataset_id is None and self._file is not None:
                dataset_id = uuid.uuid4().hex
            self._write({"kind": "header", "format": FORMAT, "version": VERSION, "dataset_id": dataset_id})
        elif dataset_id is not None and dataset_id != books.dataset_id:
            raise LedgerError(
                f"dataset_id={dataset_id!r} differs from {books.dataset_id!r}, to which this ledger is bound. Each data set "
                "keeps its own ledger; pass another path."
            )
        if budget is None or self.budget == budget:
            return
        if self.budget is not None or self._read_only:
            raise LedgerError(
                f"budget_epsilon={budget[0]} at budget_delta={budget[1]} differs from the ledger's {self.budget}; "
                "leave it out, or call set_budget to change it on the record."
            )
        self._write(_budget_record(*budget))

    def __copy__(self) -> "PrivacyLedger":
        return self

    def __deepcopy__(self, memo: object) -> "PrivacyLedger":
        # Copying a model must not fork what was spent.
        return self

    def __reduce__(self) -> Any:
        raise TypeError("a PrivacyLedger cannot be pickled: a copy would forget what is spent. Open its path instead.")

    def to_config(self) -> dict[str, Any]:
        """What a saved model holds of its ledger, JSON-ready: all records, and a file's path and data set.

        No record of the data is among them, and no key.
        """
        with self._lock:
            self._sync()
            if self._file is not None:
                return {"path": os.path.abspath(self._file.path), "records": [dict(one) for one in self._file.records]}
            return {"token": self._history.token, "written": [list(one) for one in self._history.written]}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "PrivacyLedger":
        """The ledger of a saved model, with everything that was spent when it was saved, and since then as far as known.

        A ledger in memory is shared with other models of this process that come from the same one; if two went on apart,
        what both spent is counted. A ledger file is opened where it was. If it is not there, or in use by another process,
        the ledger can be read but refuses to reserve: `compile(ledger=)` takes the file's new place.

        Args:
          config: from `to_config`.

        Raises:
          LedgerError: the file was altered, belongs to other data, or does not hold what the model had spent.
        """
        if "records" in config:
            if _saved_ledger.check_file(config):
                try:
                    return cls(config["path"])
                except LedgerError:
                    return cls(config["path"], read_only=True)
            ledger = cls._replayed([("saved", one) for one in config["records"]], None)
            ledger._refusal = (
                f"this model's ledger is not at {config['path']!r}, where it was when the model was saved: say "
                "compile(..., ledger=dpvi.PrivacyLedger(its_new_path)). Nothing was charged."
            )
            return ledger
        written = [(writer, record) for writer, record in config["written"]]
        live = _saved_ledger.LIVE.get(config["token"])
        if live is None:
            return cls._replayed(written, config["token"])
        with live._lock:
            _saved_ledger.replay(live._books, live._history, written)
            return live

    @classmethod
    def _replayed(cls, written: list[tuple[str, dict[str, Any]]], token: str | None) -> "PrivacyLedger":
        ledger = cls()
        ledger._books, ledger._history = Books(), _saved_ledger.History(token)
        _saved_ledger.replay(ledger._books, ledger._history, written)
        _saved_ledger.LIVE[ledger._history.token] = ledger
        return ledger

    def mark(self) -> dict[str, Any]:
        """The place where a ledger file stands, JSON-ready, for `continues_from`; all before it is on the disk."""
        with self._lock:
            self._sync()
            if self._file is None:
                raise LedgerError("a ledger in memory ends with its process; only a file has a place to go on from.")
            records, digest = self._file.mark()
            return {"dataset_id": self.dataset_id, "records": records, "hash": digest}

    def continues_from(self, mark: Mapping[str, Any]) -> bool:
        """Whether this ledger file begins with what another, or this one, held when `mark` was taken."""
        with self._lock:
            self._sync()
            if self._file is None or self.dataset_id != mark["dataset_id"]:
                return False
            return self._file.hash_after(int(mark["records"])) == mark["hash"]

    def continues(self, other: "PrivacyLedger") -> bool:
        """Whether this ledger file begins with everything that a saved model's ledger holds."""
        if self._file is None or other._refusal is None:
            return False
        _saved_ledger.check_continues(
            self._file.records, [record for _, record in other._history.written], f"ledger={self.path!r}"
        )
        return True

    def set_budget(self, epsilon: float, delta: float) -> None:
        """Sets or changes the ledger-wide budget; the change is recorded like everything else."""
        self._write(_budget_record(check.epsilon(epsilon), check.delta(delta)))
        self._allowance = None

    def close(self) -> None:
        """Gives a ledger file back to other processes. A ledger in memory has nothing to close."""
        if self._file is not None and not self._closed:
            self._closed = True
            self._file.close()

    def __enter__(self) -> "PrivacyLedger":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def path(self) -> str | None:
        """The file, None in memory."""
        return None if self._file is None else str(self._file.path)

    @property
    def dataset_id(self) -> str | None:
        """The data set that the ledger is bound to."""
        return self._books.dataset_id

    @property
    def budget(self) -> tuple[float, float] | None:
        """(epsilon, delta) of the ledger-wide budget, None if there is none."""
        return None if self._books.budget is None else self._books.budget[:2]

    @property
    def neighboring_relation(self) -> NeighboringRelation | None:
        """The adjacency of everything recorded; None while the ledger is empty."""
        plans = self._books.plans
        return plans[0].neighboring_relation if plans else None

    @property
    def entries(self) -> tuple[LedgerEntry, ...]:
        """What is charged; releases under equal plans are one entry, as their order does not matter."""
        with self._lock:
            return self._books.entries()

    @property
    def num_releases(self) -> int:
        """The number of releases charged."""
        with self._lock:
            return sum(self._books.charged.values())

    @property
    def unconfirmed_steps(self) -> int:
        """Steps reserved but not confirmed; they count as spent."""
        return sum(sum(b - a for a, b in r.charged) for r in self._books.open.values())

    @property
    def seeded(self) -> bool:
        """Whether any release took its noise from a fixed seed."""
        return any(e.seeded for e in self.entries)

    @property
    def exposures(self) -> tuple[str, ...]:
        """What was shown of the data beside the releases, and void the guarantee: see `record_exposure`."""
        with self._lock:
            return tuple(self._books.exposures)

    def record_exposure(self, text: str) -> None:
        """Records, before it happens, that something exact is shown of the data, which no epsilon covers.

        Every later report of this ledger says so, whichever model or process it comes from. The same sentence is
        recorded once.

        Args:
          text: a sentence that reveals nothing itself, for instance "exact training losses were shown".

        Raises:
          LedgerError: if it could not be written down.
        """
        if not (isinstance(text, str) and text.strip()):
            raise TypeError(f"text={text!r} must be a non-empty string; say what was shown.")
        with self._lock:
            self._sync()
            if text not in self._books.exposures:
                self._write({"kind": "exposure", "text": text})

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
        with self._lock:
            state = tuple(self._books.charged.values())
            key = (check.delta(delta), accountant, state)
            if key not in self._epsilon_cache:
                relation = self.neighboring_relation or NeighboringRelation.ADD_OR_REMOVE_ONE
                price = accountants.get_accountant(accountant).epsilon
                self._epsilon_cache = {key: price(self.dp_event, delta, relation)}
            return self._epsilon_cache[key]

    def epsilon_without_metrics(self, delta: float, accountant: str = "pld") -> float | None:
        """Epsilon that the same releases would have cost without privatised metrics; None if there were none."""
        entries = self.entries
        if not any(entry.plan.metrics for entry in entries):
            return None
        events = [entry.plan.without_metrics.event_of(entry.steps) for entry in entries]
        relation = entries[0].plan.neighboring_relation
        price = accountants.get_accountant(accountant).epsilon
        return price(dp_accounting.ComposedDpEvent(events), check.delta(delta), relation)

    def reserve(
        self,
        plan: PrivacyPlan,
        steps: int,
        *,
        run: str | None = None,
        seed: int | str | None = None,
        first_step: int | None = None,
    ) -> int:
        """Charges `steps` releases under `plan` before they happen.

        Args:
          plan: the plan of the fit; its own `num_releases` is only a hint for the budget check.
          steps: how many releases are about to run, at least 1.
          run: a name of the fit. A scheme that charges by the epoch (each record once) needs it to see
            that reservations belong to one fit; without it each reservation begins epochs of its own.
          seed: of a run whose noise comes from a fixed seed: the seed. Then a step with the same plan,
            run, seed and number is the same release and is charged once. The ledger keeps a hash of it.
          first_step: with `seed`, the number of the first step reserved.

        Returns:
          The reservation's id, for `confirm`.

        Raises:
          UnsupportedPairError: if the ledger holds releases under another adjacency.
          BudgetExhaustedError: if the ledger-wide budget does not allow the steps; nothing is charged.
          LedgerError: if it could not be written down; nothing is charged.
        """
        if not isinstance(plan, PrivacyPlan):
            raise TypeError(f"plan={plan!r} is not a PrivacyPlan; pass the plan of the fit.")
        steps = check.count("steps", steps, 1)
        if (seed is None) != (first_step is None):
            raise ValueError(f"seed={seed!r} and first_step={first_step!r}: pass both or neither.")
        first_step = 0 if first_step is None else check.count("first_step", first_step)
        with self._lock:
            self._sync()
            return self._reserve(plan, steps, run, seed, first_step)

    def steps_charged(self, plan: PrivacyPlan, steps: int, *, run: str | None, seed: int | str, first_step: int) -> int:
        """How many of these seeded steps are charged already, so that running them again costs nothing.

        Args:
          plan: as for `reserve`, and so the others.
          steps: how many.
          run: the fit.
          seed: of the run.
          first_step: number of the first.
        """
        with self._lock:
            self._sync()
            hashed = self._hash_of(seed)
            return steps - self._books.new_steps(plan.replace(num_releases=1), run, hashed, first_step, steps)

    def _hash_of(self, seed: int | str) -> str:
        return hashlib.sha256(f"{self._books.dataset_id}/{seed!r}".encode()).hexdigest()[:16]

    def _reserve(self, plan: PrivacyPlan, steps: int, run: str | None, seed: int | str | None, first_step: int) -> int:
        relation = self.neighboring_relation
        if relation is not None and plan.neighboring_relation is not relation:
            raise UnsupportedPairError(
                f"this ledger holds releases under {relation.name} and the plan asks for "
                f"{plan.neighboring_relation.name}: guarantees under different adjacencies do not compose. Fit under the "
                "ledger's adjacency, or keep another ledger."
            )
        single = plan if plan.num_releases == 1 else plan.replace(num_releases=1)
        books = self._books
        identity = books.num_reservations
        record: dict[str, Any] = {"kind": "reserve", "id": identity, "steps": steps}
        if seed is not None:
            record["seed"] = self._hash_of(seed)
            record["first_step"] = first_step
            record["run"] = run
        elif not single.sampling.fits_merge:
            record["run"] = f"reservation {identity}" if run is None else str(run)
        if books.budget is not None:
            new = books.new_steps(single, record.get("run"), record.get("seed"), first_step, steps)
            self._check_ledger_budget(plan, single, new)
        records = []
        if single not in books.plan_index:
            records.append({"kind": "plan", "plan": single.to_json()})
            record["plan"] = len(books.plans)
        else:
            record["plan"] = books.plan_index[single]
        self._write(*records, record)
        return identity

    def confirm(self, reservation: int, steps_run: int | None = None) -> None:
        """Closes a reservation.

        Args:
          reservation: the id from `reserve`.
          steps_run: how many of its steps drew noise; None means all. Passing fewer is the caller's
            statement that the others never drew noise nor touched the data: they are given back.

        Raises:
          LedgerError: if the reservation is unknown, was confirmed before, or belongs to an earlier run.
          ValueError: if `steps_run` exceeds what was reserved.
        """
        with self._lock:
            self._sync()
            own = 0 if self._file is None else self._file.first_own_reservation
            known = self._books.open.get(reservation) if isinstance(reservation, int) else None
            if known is None or reservation < own:
                raise LedgerError(
                    f"reservation={reservation!r} is unknown, was confirmed before, or was made by an earlier run (then "
                    "it stays charged); nothing changed."
                )
            run = known.steps if steps_run is None else check.count("steps_run", steps_run)
            if run > known.steps:
                raise ValueError(f"steps_run={run} exceeds the {known.steps} steps reserved: reserve before running.")
            # Losing this line in a crash leaves the steps charged, so it need not wait for the disk.
            self._write({"kind": "confirm", "id": reservation, "steps_run": run}, durable=False)

    def _check_ledger_budget(self, plan: PrivacyPlan, single: PrivacyPlan, steps: int) -> None:
        # How many more releases of this plan fit is computed once and then counted down.
        books = self._books
        assert books.budget is not None
        epsilon, delta, accountant = books.budget
        others = tuple((k, n) for k, n in books.charged.items() if k.plan != single)
        spent = sum(n for k, n in books.charged.items() if k.plan == single)
        key = (single, others, books.budget)
        if self._allowance is not None and self._allowance[0] == key and spent + steps <= self._allowance[1]:
            return
        prior = self.events()
        try:
            priced = single.replace(accountant=accountant)
        except UnsupportedPairError:  # Sampling that the budget's accountant cannot price: by the plan's own.
            priced = single
        most = max(steps, plan.num_releases)
        if priced.replace(num_releases=most).epsilon(delta, prior) > epsilon:
            most = priced.with_most_releases(epsilon=epsilon, delta=delta, prior_events=prior, limit=most).num_releases
        self._allowance = (key, spent + most)
        if steps > most:
            raise BudgetExhaustedError(
                f"steps={steps}: the ledger's budget of epsilon {epsilon:.6g} at delta {delta:g} allows {most} more "
                f"releases of this plan; {self.epsilon(delta, accountant):.6g} is spent. Nothing was charged."
            )

    def _write(self, *records: Mapping[str, Any], durable: bool = True) -> None:
        if self._read_only:
            raise LedgerError("this ledger was opened with read_only=True; open it without to reserve.")
        if self._closed:
            raise LedgerError("this ledger is closed; open its path again.")
        with self._lock:
            if self._refusal is not None:
                raise LedgerError(self._refusal)
            if self._file is None:
                for record in records:
                    self._books.apply(record)
                    self._history.add(record)
            else:
                self._file.append(records, durable=durable)
                self._sync()

    def _sync(self) -> None:
        # The books are a replay of the file's records, also where an interrupt came in between.
        if self._file is None or self._closed:
            return
        self._file.refresh()
        for record in self._file.records[self._books.num_records :]:
            self._books.apply(record)

    def to_json(self) -> dict[str, Any]:
        """Returns what is charged as a JSON-ready dictionary."""
        return {
            "dataset_id": self.dataset_id,
            "budget": None if self.budget is None else list(self.budget),
            "num_releases": self.num_releases,
            "unconfirmed_steps": self.unconfirmed_steps,
            "exposures": list(self.exposures),
            "entries": [
                {"plan": e.plan.to_json(), "steps": e.steps, "run": e.run, "seeded": e.seeded} for e in self.entries
            ],
        }


def _budget_record(epsilon: float, delta: float) -> dict[str, Any]:
    return {"kind": "budget", "epsilon": epsilon, "delta": delta, "accountant": "pld"}
