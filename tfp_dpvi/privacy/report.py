"""`PrivacyReport`: the guarantee in numbers, for a data protection officer; `report_text` has its wording."""

import dataclasses
import math

from dp_accounting import NeighboringRelation

from tfp_dpvi import _validate as check
from tfp_dpvi.privacy import report_text
from tfp_dpvi.privacy.accountants import get_accountant
from tfp_dpvi.privacy.budgets import EpsilonBudget, RenyiFilter
from tfp_dpvi.privacy.ledger import LedgerEntry, PrivacyLedger
from tfp_dpvi.privacy.sensitivity import Json

REPORT_SCHEMA_VERSION = 1


@dataclasses.dataclass(frozen=True)
class PrivacyReport:
    """The privacy spent on one data set, and what the guarantee covers.

    `str(report)` is for people, `to_json()` for machines (with `schema_version`). `releases` has one dictionary per run of equal
    plans: sampling, sampling_description, noise_multiplier, l2_norm_clip, sensitivity, num_releases, dp_event (Python code for
    the same accountant of dp_accounting), purpose if it is not training, metrics if some were released with the steps, and
    randomness "secure" if it came from a cryptographic generator.
    """

    epsilon: float  # Of all reserved releases in the ledger, infinity without noise.
    delta: float
    mu: float  # Of Gaussian differential privacy, at every delta from `delta`: see `AttackBound`.
    advantage: float  # Of an attacker who wants to know of one record; between 0 and 1.
    neighboring_relation: str  # "add_or_remove_one" or "replace_one".
    accountant: str
    releases: tuple[Json, ...]
    num_releases: int  # Noisy sums that were released or reserved.
    unconfirmed_steps: int = 0  # Reserved and not confirmed; they count as released.
    budget_epsilon: float | None = None  # The model's lifetime budget.
    num_records: int | None = None
    num_records_declared: bool | None = None  # False if the number was counted, None if unknown.
    seeded: bool = False  # Whether noise was drawn from a fixed seed.
    caveats: tuple[str, ...] = ()
    dataset_id: str | None = None
    #: The ledger's own: epsilon, delta, adaptive, spent; order, limit and advantage if adaptive.
    ledger_budget: Json | None = None
    grid_spacing: float | None = None  # Of the numerical composition; None without one.

    @classmethod
    def from_ledger(
        cls,
        ledger: PrivacyLedger,
        *,
        delta: float,
        accountant: str | None = None,
        budget_epsilon: float | None = None,
        num_records: int | None = None,
        num_records_declared: bool | None = None,
        seeded: bool = False,
        caveats: tuple[str, ...] = (),
        neighboring_relation: NeighboringRelation | str = "add_or_remove_one",
    ) -> "PrivacyReport":
        """Returns the report of all releases in a ledger.

        The accountant is by default that of the ledger's plans, or "pld" if they differ; `num_records` is by default the largest
        of the plans; `neighboring_relation` is used while the ledger is empty. The others are attributes of the report.
        """
        if isinstance(caveats, str):
            raise TypeError(f"caveats={caveats!r} is a string; pass a tuple of strings.")
        relation = ledger.neighboring_relation or check.relation(neighboring_relation)
        entries = ledger.entries
        if accountant is None:
            names = {entry.plan.accountant for entry in entries}
            accountant = names.pop() if len(names) == 1 else "pld"
        price = get_accountant(accountant)
        event = ledger.dp_event
        delta = check.delta(delta)
        bound = price.attack_bound(event, delta, relation)
        if num_records is None:
            num_records = max((entry.plan.num_records or 0 for entry in entries), default=0) or None
        halve = price.over_replacement and relation is NeighboringRelation.REPLACE_ONE
        return cls(
            epsilon=price.epsilon(event, delta, relation),
            delta=delta,
            mu=bound.mu,
            advantage=bound.advantage,
            neighboring_relation=relation.name.lower(),
            accountant=accountant,
            releases=tuple(_release_facts(entry, halve) for entry in entries),
            num_releases=ledger.num_releases,
            unconfirmed_steps=ledger.unconfirmed_steps,
            budget_epsilon=None
            if budget_epsilon is None
            else check.epsilon(budget_epsilon, "budget_epsilon"),
            num_records=None if num_records is None else check.count("num_records", num_records, 1),
            num_records_declared=num_records_declared,
            seeded=bool(seeded) or ledger.seeded,
            caveats=(
                *(f"NOT PRIVATE: {text}" for text in ledger.exposures),
                *ledger.caveats,
                *caveats,
            ),
            dataset_id=ledger.dataset_id,
            ledger_budget=_ledger_budget(ledger, accountant),
            grid_spacing=price.grid_spacing(event, relation),
        )

    @property
    def private(self) -> bool:
        """False if noise was missing or came from a fixed seed, or exact values were shown."""
        return math.isfinite(self.epsilon) and not self.seeded and not self.unsafe

    @property
    def unsafe(self) -> tuple[str, ...]:
        """The caveats that void the guarantee: those that begin with "NOT PRIVATE"."""
        return tuple(caveat for caveat in self.caveats if caveat.startswith("NOT PRIVATE"))

    @property
    def budget_left(self) -> float | None:
        """The budget minus epsilon spent, at least 0. Later releases compose better than this difference."""
        if self.budget_epsilon is None:
            return None
        return max(0.0, self.budget_epsilon - self.epsilon)

    @property
    def plain_words(self) -> str | None:
        """The advantage in a sentence for the person whose record it is; None if not private."""
        if not self.private:
            return None
        return report_text.plain_words(self.advantage, self.neighboring_relation)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings for the reader."""
        return tuple(report_text.warnings(self))

    def to_json(self) -> Json:
        """Returns a JSON-ready dictionary; an infinite number is written as the string "inf"."""
        data = dataclasses.asdict(self)
        data["releases"], data["caveats"] = list(data["releases"]), list(self.caveats)
        data["epsilon"] = finite(self.epsilon)
        data["mu"] = finite(self.mu)
        if self.ledger_budget is not None:
            data["ledger_budget"]["spent"] = finite(self.ledger_budget["spent"])
        return {
            "schema_version": REPORT_SCHEMA_VERSION,
            **data,
            "unit": "record",
            "budget_left": self.budget_left,
            "private": self.private,
            "plain_words": self.plain_words,
            "warnings": list(self.warnings),
            "covered": [*report_text.covered(self)],
            "not_covered": [*report_text.not_covered(self)],
        }

    def __str__(self) -> str:
        return report_text.render(self)


def _release_facts(entry: LedgerEntry, halve: bool) -> Json:
    data = entry.plan.to_json()
    names = (
        *("sampling", "noise_multiplier", "l2_norm_clip", "sensitivity"),
        *("purpose", "metrics", "randomness"),
    )
    return {
        **{name: data[name] for name in names if name in data},
        "sampling_description": entry.plan.sampling.describe(),
        "num_releases": entry.steps,
        "dp_event": report_text.event_text(entry.dp_event, halve),
    }


def _ledger_budget(ledger: PrivacyLedger, accountant: str) -> Json | None:
    if ledger.budget is None:
        return None
    relation = ledger.neighboring_relation or NeighboringRelation.ADD_OR_REMOVE_ONE
    adaptive, held = ledger.renyi_filter, ledger.renyi_filter or EpsilonBudget(*ledger.budget)
    return {
        "epsilon": held.epsilon,
        "delta": held.delta,
        "adaptive": adaptive is not None,
        "spent": held.spent(ledger.dp_event, relation, accountant),
        **({} if adaptive is None else _filter_facts(adaptive)),
    }


def _filter_facts(adaptive: RenyiFilter) -> Json:
    return {
        "order": adaptive.order,
        "limit": adaptive.limit,
        "advantage": adaptive.advantage,
    }


def finite(value: float | None) -> float | str | None:
    """Returns a JSON-ready number: infinity becomes the string "inf"."""
    return "inf" if value is not None and math.isinf(value) else value
