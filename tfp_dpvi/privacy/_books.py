"""What a ledger holds, as the replay of its records: the same code runs live and when a file is read."""

import bisect
import dataclasses
from collections.abc import Mapping
from typing import Any

from dp_accounting import DpEvent

from tfp_dpvi.privacy.errors import LedgerError
from tfp_dpvi.privacy.plan import PrivacyPlan

FORMAT = "tfp_dpvi privacy ledger"
VERSION = 1

Interval = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class LedgerEntry:
    """Releases under one plan.

    Attributes:
      plan: the plan of a single one of them (`num_releases` is 1).
      steps: how many releases are charged.
      run: the fit they belong to, where the sampling scheme cannot merge fits; else None.
      seeded: whether their noise came from a fixed seed.
    """

    plan: PrivacyPlan
    steps: int
    run: str | None = None
    seeded: bool = False

    @property
    def dp_event(self) -> DpEvent:
        """The event of all the entry's releases."""
        return self.plan.event_of(self.steps)


@dataclasses.dataclass(frozen=True)
class _Key:
    plan: PrivacyPlan
    run: str | None
    seed: str | None


@dataclasses.dataclass
class _Reservation:
    key: _Key
    first_step: int
    steps: int
    charged: list[Interval]  # the steps that this reservation added, [start, end)


class Books:
    """The state after some records.

    Attributes:
      dataset_id: the data set that the ledger is bound to.
      budget: (epsilon, delta, accountant) of the ledger-wide budget, or None.
      plans: the distinct plans, in the order in which they were first recorded.
      charged: releases charged by kind.
      exposures: what was shown of the data beside the releases, as sentences.
      open: reservations that were not confirmed.
      num_reservations: how many reservations were ever made; the next one's id.
    """

    def __init__(self) -> None:
        self.dataset_id: str | None = None
        self.budget: tuple[float, float, str] | None = None
        self.plans: list[PrivacyPlan] = []
        self.plan_index: dict[PrivacyPlan, int] = {}
        self.charged: dict[_Key, int] = {}
        self.exposures: list[str] = []
        self.open: dict[int, _Reservation] = {}
        self.num_reservations = 0
        self.num_records = 0
        self._seeded_steps: dict[_Key, list[Interval]] = {}

    def apply(self, record: Mapping[str, Any]) -> None:
        """Takes one more record into account.

        Raises:
          LedgerError: for a record that this version does not know.
        """
        kind = record.get("kind")
        if (self.num_records == 0) != (kind == "header"):
            raise LedgerError("this is not a privacy ledger: its header is missing or repeated.")
        if kind == "header":
            self._header(record)
        elif kind == "plan":
            plan = PrivacyPlan.from_json(record["plan"])
            self.plan_index.setdefault(plan, len(self.plans))
            self.plans.append(plan)
        elif kind == "reserve":
            self._reserve(record)
        elif kind == "confirm":
            self._confirm(record)
        elif kind == "exposure":
            self.exposures.append(record["text"])
        elif kind == "budget":
            self.budget = (record["epsilon"], record["delta"], record["accountant"])
        else:
            raise LedgerError(f"a record of kind {kind!r} is unknown here; use a newer version of tfp_dpvi.")
        self.num_records += 1

    def _header(self, record: Mapping[str, Any]) -> None:
        if record.get("format") != FORMAT:
            raise LedgerError(f"this is not a privacy ledger: its format is {record.get('format')!r}.")
        if record.get("version") != VERSION:
            raise LedgerError(
                f"this ledger has format version {record.get('version')!r}; this code reads {VERSION}. Use the version "
                "of tfp_dpvi that wrote it, or a newer one."
            )
        self.dataset_id = record["dataset_id"]

    def _reserve(self, record: Mapping[str, Any]) -> None:
        key = _Key(self.plans[record["plan"]], record.get("run"), record.get("seed"))
        first, steps = record.get("first_step", 0), record["steps"]
        added = self._added(key, first, steps)
        if key.seed is not None:
            self._seeded_steps[key] = _union(self._seeded_steps.get(key, []), added)
        self.charged[key] = self.charged.get(key, 0) + _length(added)
        self.open[record["id"]] = _Reservation(key, first, steps, added)
        self.num_reservations = record["id"] + 1

    def _added(self, key: _Key, first: int, steps: int) -> list[Interval]:
        wanted = (first, first + steps)
        return [wanted] if key.seed is None else _missing(self._seeded_steps.get(key, []), wanted)

    def new_steps(self, plan: PrivacyPlan, run: str | None, seed: str | None, first: int, steps: int) -> int:
        """Returns how many of these steps would be charged."""
        return _length(self._added(_Key(plan, run, seed), first, steps))

    def _confirm(self, record: Mapping[str, Any]) -> None:
        reservation = self.open.pop(record["id"])
        start = reservation.first_step
        never_ran = (start + record["steps_run"], start + reservation.steps)
        returned = [x for x in (_overlap(piece, never_ran) for piece in reservation.charged) if x]
        # Of a seeded run nothing is given back: another reservation may have been charged nothing for the same steps.
        if not returned or reservation.key.seed is not None:
            return
        self.charged[reservation.key] -= _length(returned)

    def entries(self) -> tuple[LedgerEntry, ...]:
        """Returns what is charged, one entry per kind, in the order of first use."""
        return tuple(LedgerEntry(k.plan, n, k.run, k.seed is not None) for k, n in self.charged.items() if n > 0)


def _length(pieces: list[Interval]) -> int:
    return sum(end - start for start, end in pieces)


def _overlap(a: Interval, b: Interval) -> Interval | None:
    start, end = max(a[0], b[0]), min(a[1], b[1])
    return (start, end) if start < end else None


def _minus(a: Interval, b: Interval) -> list[Interval]:
    pieces = [(a[0], min(a[1], b[0])), (max(a[0], b[1]), a[1])]
    return [(start, end) for start, end in pieces if start < end]


def _missing(known: list[Interval], wanted: Interval) -> list[Interval]:
    pieces = [wanted]
    first = max(0, bisect.bisect_left(known, (wanted[0], wanted[0])) - 1)
    for old in known[first:]:
        if old[0] >= wanted[1]:
            break
        pieces = [x for piece in pieces for x in _minus(piece, old)]
    return pieces


def _union(known: list[Interval], added: list[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for start, end in sorted([*known, *added]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged
