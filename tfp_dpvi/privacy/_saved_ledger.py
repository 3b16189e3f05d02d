"""A ledger in a saved model: its history, and how a loaded model goes on with it without forgetting a release."""

import json
import os
import uuid
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from tfp_dpvi.privacy import _ledger_file
from tfp_dpvi.privacy._books import Books
from tfp_dpvi.privacy.errors import LedgerError
from tfp_dpvi.privacy.plan import PrivacyPlan

Written = tuple[str, dict[str, Any]]


class History:
    """Everything that a ledger in memory was told, each record under the name of the object that wrote it.

    Two processes that load one file and go on make different releases under records that may look alike; the writers'
    names tell them apart, so that neither is forgotten where both files are loaded again.

    Attributes:
      token: of the history and its copies.
      written: (writer, record) in order.
    """

    def __init__(self, token: str | None = None) -> None:
        self.token = token or uuid.uuid4().hex
        self.written: list[Written] = []
        self._writer = uuid.uuid4().hex
        self._known: set[str] = set()

    def add(self, record: Mapping[str, Any], writer: str | None = None, origin: str | None = None) -> None:
        """Notes a record; `origin` is what it was in the history that it came from."""
        one = (writer or self._writer, dict(record))
        self.written.append(one)
        self._known.add(origin or _key(one))

    def missing(self, others: Sequence[Written]) -> list[Written]:
        """The records of another copy that are not here."""
        return [one for one in others if _key(one) not in self._known]


def _key(one: Written) -> str:
    return json.dumps(one, sort_keys=True)


LIVE: "weakref.WeakValueDictionary[str, Any]" = weakref.WeakValueDictionary()
"""Ledgers in memory by their histories' tokens: a model loaded beside the one it was saved from shares its books."""


def replay(books: Books, history: History, written: Sequence[Written]) -> None:
    """Adds another copy's records to the books, as far as they are missing, under numbers that are free here."""
    plans: dict[int, int] = {}
    reservations: dict[int, int] = {}
    missing = {_key(one) for one in history.missing(written)}
    if not missing:
        return
    num_plans = 0
    for writer, given in written:
        record, key = dict(given), _key((writer, given))
        kind = record["kind"]
        if kind == "plan":
            plan = PrivacyPlan.from_json(record["plan"])
            new = plan not in books.plan_index
            plans[num_plans] = len(books.plans) if new else books.plan_index[plan]
            num_plans += 1
            if not new:
                continue
        elif key not in missing:
            continue
        elif kind == "reserve":
            reservations[record["id"]] = books.num_reservations
            record["id"], record["plan"] = books.num_reservations, plans[record["plan"]]
            if str(record.get("run")).startswith("reservation "):
                record["run"] = f"{record['run']} of {writer}"
        elif kind == "confirm":
            if record["id"] not in reservations and record["id"] not in books.open:
                continue
            record["id"] = reservations.get(record["id"], record["id"])
        elif (
            (kind == "header" and books.num_records)
            or (kind == "exposure" and record["text"] in books.exposures)
            or (kind == "budget" and books.budget is not None)
        ):
            continue
        books.apply(record)
        history.add(record, writer, key)


def check_file(config: Mapping[str, Any]) -> bool:
    """Whether the file that a saved model names is there; `LedgerError` if it is not that model's ledger any more."""
    path = config["path"]
    if not os.path.exists(path):
        return False
    records = _ledger_file.read_ledger_file(path)
    check_continues(records, config["records"], f"the ledger at {path!r}")
    return True


def check_continues(records: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]], name: str) -> None:
    """Raises `LedgerError` unless a ledger begins with the records that a model was saved with."""
    ours, theirs = (dict(some[0]).get("dataset_id") if some else None for some in (records, saved))
    if ours != theirs:
        raise LedgerError(
            f"{name} is bound to the data set {ours!r}, and the saved model to {theirs!r}. Each data set keeps its own ledger."
        )
    if list(records[: len(saved)]) != list(saved):
        raise LedgerError(
            f"{name} does not hold what was spent when the model was saved: it is an older copy, or another ledger of the "
            "same data. Use the newest; nothing may be forgotten."
        )
