"""What a saved model keeps of its ledger, and how a ledger is found again from there."""

import logging
import os
from collections.abc import Mapping
from typing import NoReturn, TypeVar

import sqlalchemy as sa

from tfp_dpvi import _validate as check
from tfp_dpvi.privacy.budgets import RenyiFilter
from tfp_dpvi.privacy.database import ALL_CHARGES, BUDGETS, CHARGES, EXPOSURES, LEDGER, PLANS
from tfp_dpvi.privacy.errors import LedgerError
from tfp_dpvi.privacy.ledger_state import LedgerState
from tfp_dpvi.privacy.ledger_store import LedgerStore, find_or_add, utc_now
from tfp_dpvi.privacy.sensitivity import Json

_LOG = logging.getLogger("tfp_dpvi")
CONTINUED = "continued from a file: what was spent after it was saved is not counted"
_SAVED = ("run", "seeded", "writer", "steps", "since")
#: Saved ledgers in memory by identity, so that a model loaded again knows what this process has spent since.
_IN_MEMORY: dict[str, "CopiedLedger"] = {}
_Ledger = TypeVar("_Ledger", bound="CopiedLedger")


class CopiedLedger(LedgerStore):
    """A ledger that saved models refer to."""

    _stands_for: Json | None = None

    def to_config(self) -> Json:
        """Returns what a saved model holds of its ledger, JSON-ready. No record of the data is among it, and no key."""
        with self._database.read() as connection:
            state = self._read(connection)
            rows = connection.execute(ALL_CHARGES).mappings().all()
        if self.path is None:
            _IN_MEMORY[state.ledger_id] = self
        budget = state.budget
        order = [budget.order] if isinstance(budget, RenyiFilter) else []
        return {
            **self._mark_of(state),
            "path": self.path if self._database.path is not None else None,
            "url": self.path if self._database.url is not None else None,
            "budget": None if budget is None else [budget.epsilon, budget.delta, *order],
            "exposures": list(state.exposures),
            "charges": [{**{name: row[name] for name in _SAVED}, "plan": row["json"]} for row in rows],
        }

    @classmethod
    def from_config(cls: type[_Ledger], config: Json) -> _Ledger:
        """Returns the ledger of a saved model, with everything that was spent when it was saved, and since as far as known.

        A ledger in memory is shared with other models of this process that come from the same one; if two went on apart,
        what both spent is counted. A file is opened where it was. If it is not there, or on a server, the ledger can be read
        but refuses to reserve: `compile(ledger=)` takes its new place.

        Args:
          config: from `to_config`.

        Raises:
          LedgerError: the file is another ledger, or an older copy than the one that the model was saved with.
        """
        path, where = config["path"], config["path"] or config["url"]
        if where is None:
            live = _IN_MEMORY.get(config["ledger_id"])
            ledger = live if isinstance(live, cls) else cls()
            ledger._merge(config)
            return ledger
        if path is not None and os.path.exists(path):
            ledger = cls(path, read_only=not os.access(path, os.W_OK))
            ledger._check_continues(config)
            return ledger
        ledger = cls()
        ledger._merge(config, stands_in=True)
        ledger._stands_for = config
        ledger._refusal = (
            f"this model's ledger is not at {where!r}, where it was when the model was saved: say\n"
            "compile(..., ledger=dpvi.PrivacyLedger(its_new_place)). Nothing was charged."
        )
        return ledger

    def _merge(self, config: Json, *, stands_in: bool = False) -> None:
        """Adds what another copy of a ledger in memory held. Each process has rows of its own, and the larger one counts."""
        others = 0
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
                find_or_add(connection, EXPOSURES, {"time": utc_now()}, text=text)
            if config["budget"] is not None and connection.execute(sa.select(BUDGETS)).first() is None:
                names = ("epsilon", "delta", "renyi_order")
                row = dict(zip(names, config["budget"], strict=False))
                connection.execute(sa.insert(BUDGETS).values(**row, time=utc_now()))
            ledger = {"dataset_id": config["dataset_id"]}
            if not stands_in:  # It is the saved one from here on, and is known by its identity.
                ledger["ledger_id"] = config["ledger_id"]
            connection.execute(sa.update(LEDGER).values(**ledger))
            if others and not stands_in:
                connection.execute(sa.update(LEDGER).values(continued=True))
        self._known = None
        if stands_in:
            return
        _IN_MEMORY[config["ledger_id"]] = self
        if others:
            _LOG.warning("This model's ledger is %s. Keep it on disk: PrivacyLedger(path).", CONTINUED)

    def _check_continues(self, saved: Json) -> None:
        state, shown = self._state(), self._database.shown
        if state.ledger_id != saved["ledger_id"]:
            raise LedgerError(
                f"{shown!r} is another ledger (of the data set {state.dataset_id!r}) than the saved model's "
                f"(of {saved['dataset_id']!r}).\nEach data set keeps its own ledger."
            )
        if state.version < saved["version"]:
            raise LedgerError(
                f"{shown!r} does not hold what was spent when the model was saved: it is an older copy.\n"
                "Use the newest; nothing may be forgotten."
            )

    def mark(self) -> Json:
        """Returns the place where a ledger stands, JSON-ready, for `continues_from`."""
        return self._mark_of(self._state())

    def _mark_of(self, state: LedgerState) -> Json:
        return {"ledger_id": state.ledger_id, "version": state.version, "dataset_id": state.dataset_id}

    def continues_from(self, mark: Json) -> bool:
        """Returns whether this ledger holds what it, under whatever path, held when `mark` was taken."""
        state = self._state()
        return bool(state.ledger_id == mark["ledger_id"] and state.version >= mark["version"])

    def continues(self, other: "CopiedLedger") -> bool:
        """Returns whether this ledger, elsewhere, is the one that a loaded model's stands in for."""
        if self is other or other._stands_for is None or self.path is None:
            return False
        self._check_continues(other._stands_for)
        return True

    def __copy__(self: _Ledger) -> _Ledger:
        return self

    def __deepcopy__(self: _Ledger, memo: Mapping[int, check.Unchecked]) -> _Ledger:
        # Copying a model must not fork what was spent.
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError("a PrivacyLedger cannot be pickled: a copy would forget what is spent. Open its path instead.")
