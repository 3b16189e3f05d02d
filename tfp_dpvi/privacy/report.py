"""`PrivacyReport`: the guarantee in words that a data protection officer can sign."""

import dataclasses
import math
import textwrap
from typing import TypeAlias, TypedDict

import dp_accounting
from dp_accounting import DpEvent, NeighboringRelation

from tfp_dpvi import _validate as check
from tfp_dpvi.privacy.accountants import get_accountant
from tfp_dpvi.privacy.ledger import LedgerEntry, PrivacyLedger
from tfp_dpvi.privacy.sensitivity import PER_RECORD_CLIP

REPORT_SCHEMA_VERSION = 1

_COVERED = (
    "every intermediate state of the model, not only the last one: all parameters after every "
    "step, every checkpoint, the optimizer's state, the posterior, predictions and samples from it",
    "everything that anybody computes from these later, without limit, as long as the records are not used again",
)

_NOT_COVERED = (
    "statistics computed on the records outside this ledger, for example means and standard "
    "deviations used to standardise the columns, or the choice of columns",
    "the search for settings (learning rate, clip, batch size, model, prior) if it looked at these "
    "records: every trial spends budget, and trials not in this ledger are not counted",
    "the choice of prior and model: they are taken as public",
    "the number of records, {num_records}: it is taken as public{declared}",
    "the check of record values before training (missing or malformed values), which the holder of "
    "the data runs and whose outcome should stay there",
    "losses and metrics that somebody computes on these records directly, for example with model.evaluate, and other "
    "models fitted on them without this ledger; weights loaded into a new model do not bring its ledger along",
    "a choice of when to stop that looked at released values (early stopping, or an interruption): then take the epsilon that "
    "the fit was planned for, not that of the steps that ran{adaptive}",
    "settings of a later fit (noise, length, batch size, clip, model) that were chosen after looking at what an earlier one "
    "released: releases are added up as if all settings had been fixed beforehand. With one of five candidates chosen "
    "by the first release, delta was 2.04e-5 where 1e-5 was stated{adaptive}",
    "running time, memory and power: they can reveal how many records took part in a step",
    "floating-point arithmetic: the proof assumes real numbers, and noise drawn in floating point "
    "is slightly irregular",
    "the pseudo-random generator: the proof assumes true randomness",
)

_FILTER_COVERS = "; the epsilon above does not cover it, the ledger's adaptive budget does"
_NOT_A_FILTER = "not where settings were chosen after looking at earlier results"

_UNITS = {
    "add_or_remove_one": (
        "one record. The guarantee compares the result on the data with the result on the same "
        "data with any one record added or removed"
    ),
    "replace_one": (
        "one record. The guarantee compares the result on the data with the result on the same "
        "data with any one record replaced by any other"
    ),
}

_ACCOUNTANTS = {
    "pld": "privacy loss distributions{grid}, rounded upwards: what PLDAccountant of dp_accounting >= 0.5 says of the events below",
    "rdp": "Renyi differential privacy (the moments accountant): what RdpAccountant of dp_accounting says of the events below",
    "advanced_composition": "advanced composition with amplification, a loose bound: equations 7 and 8 of arXiv:1610.08749",
}


def round_up(value: float, digits: int = 3) -> float:
    """Returns `value` rounded up to some significant digits; epsilon must not be understated."""
    if value == 0.0 or not math.isfinite(value):
        return value
    scale = 10.0 ** (digits - 1 - math.floor(math.log10(abs(value))))
    rounded = math.ceil(value * scale * (1.0 - 1e-12)) / scale
    return rounded if rounded >= value * (1.0 - 1e-12) else math.nextafter(value, math.inf)


JsonValue: TypeAlias = "str | int | float | bool | list[JsonValue] | dict[str, JsonValue] | None"
JsonObject: TypeAlias = "dict[str, JsonValue]"


class ReleaseFacts(TypedDict, total=False):
    """Releases of equal plans.

    `dp_event` is as the accountant's counterpart in dp_accounting reads it, in Python. `purpose` is there where it is not
    training, and `metrics` where privatised metrics were released with the steps.
    """

    sampling: dict[str, str | int | float]
    sampling_description: str
    noise_multiplier: float
    l2_norm_clip: float | None
    sensitivity: dict[str, float]
    num_releases: int
    dp_event: str
    purpose: str
    metrics: list[str]


class LedgerBudgetFacts(TypedDict, total=False):
    """A ledger's own budget. An adaptive one has an order and a limit, and spends Renyi divergence; others epsilon."""

    epsilon: float
    delta: float
    adaptive: bool
    spent: float
    order: float
    limit: float


@dataclasses.dataclass(frozen=True)
class PrivacyReport:
    """What was spent on one data set, what it covers and what it does not.

    `str(report)` is for people, `to_json()` for machines (with `schema_version`).

    Attributes:
      epsilon: total of everything reserved in the ledger, infinity without noise.
      delta: the delta that goes with it.
      neighboring_relation: "add_or_remove_one" or "replace_one".
      accountant: "pld" or "rdp".
      releases: one dictionary per run of equal plans.
      num_releases: how many noisy sums were released (or reserved).
      unconfirmed_steps: steps reserved whose end was not recorded; they are counted.
      budget_epsilon: the lifetime budget, None if none was set.
      num_records: the declared number of records, None if unknown.
      num_records_declared: True if the number was declared by hand, False if it was counted, None if that is not known.
      seeded: True if the noise was drawn from a fixed seed.
      caveats: further sentences.
      dataset_id: the name of the data set in the ledger.
      epsilon_without_metrics: what the same noise would have cost without privatised metrics; None if there were none.
      ledger_budget: what the ledger's own budget is and what is spent of it; None where it has none.
      grid_spacing: of the numerical composition; None where there is none.
    """

    epsilon: float
    delta: float
    neighboring_relation: str
    accountant: str
    releases: tuple[ReleaseFacts, ...]
    num_releases: int
    unconfirmed_steps: int = 0
    budget_epsilon: float | None = None
    num_records: int | None = None
    num_records_declared: bool | None = None
    seeded: bool = False
    caveats: tuple[str, ...] = ()
    dataset_id: str | None = None
    epsilon_without_metrics: float | None = None
    ledger_budget: LedgerBudgetFacts | None = None
    grid_spacing: float | None = None

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
        """Returns the report of everything in a ledger.

        Args:
          ledger: the ledger of the data set.
          delta: the delta to report at.
          accountant: "pld" or "rdp"; by default that of the ledger's plans, "pld" where they differ.
          budget_epsilon: the lifetime budget of a model, if one was set; the ledger's own is in the report anyway.
          num_records: the declared number of records, by default the largest that the ledger's plans hold.
          num_records_declared: whether it was declared by hand (False: counted from the data; None: not known).
          seeded: whether noise came from a fixed seed.
          caveats: further sentences, for example "unsafe training metrics were shown".
          neighboring_relation: what to say while the ledger is empty.
        """
        if isinstance(caveats, str):
            raise TypeError(f"caveats={caveats!r} is a string; pass a tuple of strings.")
        relation = ledger.neighboring_relation or check.relation(neighboring_relation)
        entries = ledger.entries
        if accountant is None:
            names = {entry.plan.accountant for entry in entries}
            accountant = names.pop() if len(names) == 1 else "pld"
        price = get_accountant(accountant)
        if num_records is None:
            num_records = max((entry.plan.num_records or 0 for entry in entries), default=0) or None
        halve = price.over_replacement and relation is NeighboringRelation.REPLACE_ONE
        return cls(
            epsilon=ledger.epsilon(delta, accountant),
            delta=check.delta(delta),
            neighboring_relation=relation.name.lower(),
            accountant=accountant,
            releases=tuple(_release_facts(entry, halve) for entry in entries),
            num_releases=ledger.num_releases,
            unconfirmed_steps=ledger.unconfirmed_steps,
            budget_epsilon=None if budget_epsilon is None else check.epsilon(budget_epsilon, "budget_epsilon"),
            num_records=None if num_records is None else check.count("num_records", num_records, 1),
            num_records_declared=num_records_declared,
            seeded=bool(seeded) or ledger.seeded,
            caveats=(*(f"NOT PRIVATE: {text}" for text in ledger.exposures), *ledger.caveats, *caveats),
            dataset_id=ledger.dataset_id,
            epsilon_without_metrics=ledger.epsilon_without_metrics(delta, accountant),
            ledger_budget=_ledger_budget(ledger, accountant),
            grid_spacing=price.grid_spacing(ledger.dp_event, relation),
        )

    @property
    def private(self) -> bool:
        """False where noise was missing or came from a fixed seed, or exact values were shown."""
        return math.isfinite(self.epsilon) and not self.seeded and not self.unsafe

    @property
    def unsafe(self) -> tuple[str, ...]:
        """The caveats that void the guarantee: those that begin with "NOT PRIVATE"."""
        return tuple(caveat for caveat in self.caveats if caveat.startswith("NOT PRIVATE"))

    @property
    def budget_left(self) -> float | None:
        """Budget minus epsilon spent, at least 0. Later releases compose better than this."""
        if self.budget_epsilon is None:
            return None
        return max(0.0, self.budget_epsilon - self.epsilon)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences that a reader must not miss."""
        found = []
        if math.isinf(self.epsilon):
            found.append("NOT PRIVATE: sums were released without noise. No guarantee holds.")
        if self.seeded:
            found.append(
                "seeded: not private. The noise came from a fixed seed; whoever knows the seed can "
                "remove it. The figures say what an unseeded run with these settings would cost."
            )
        found += self.unsafe
        if self.num_records is not None and self.delta > 0.1 / self.num_records:
            found.append(
                f"delta {self.delta:g} is large for {self.num_records} records: it should stay "
                f"below {0.1 / self.num_records:.1e}, a tenth of one over their number, since a "
                "mechanism may publish a random record outright with probability delta times their "
                "number."
            )
        if math.isfinite(self.epsilon) and self.epsilon > 10.0:
            found.append(
                "epsilon above 10 promises an individual very little; read it as an absence of "
                "accidents, not as protection."
            )
        return tuple(found)

    def to_json(self) -> JsonObject:
        """Returns a JSON-ready dictionary; an infinite number is written as the string "inf"."""
        data = dataclasses.asdict(self)
        data["releases"], data["caveats"] = list(data["releases"]), list(self.caveats)
        data["epsilon"] = _finite(self.epsilon)
        if self.ledger_budget is not None:
            data["ledger_budget"]["spent"] = _finite(self.ledger_budget["spent"])
        return {
            "schema_version": REPORT_SCHEMA_VERSION,
            **data,
            "unit": "record",
            "budget_left": self.budget_left,
            "private": self.private,
            "warnings": list(self.warnings),
            "covered": list(self._covered()),
            "not_covered": list(self._not_covered()),
        }

    def _covered(self) -> tuple[str, ...]:
        purposes = dict.fromkeys(run["purpose"] for run in self.releases if "purpose" in run)
        return (*_COVERED, *(f"{purpose}, which were released with noise and paid for here" for purpose in purposes))

    def _not_covered(self) -> tuple[str, ...]:
        known = "unknown here" if self.num_records is None else f"{self.num_records:,}"
        declared = {True: " and was declared by hand", False: ", although it was counted from the data", None: ""}[
            self.num_records_declared
        ]
        budget = self.ledger_budget
        kept = budget is not None and budget["adaptive"] and budget["spent"] <= budget["limit"]
        adaptive = _FILTER_COVERS if kept else ""
        return tuple(s.format(num_records=known, declared=declared, adaptive=adaptive) for s in _NOT_COVERED)

    def __str__(self) -> str:
        lines = ["Privacy report", "=============="]
        for warning in self.warnings:
            lines += _wrapped(f"WARNING: {warning}", "", "  ")
        if self.warnings:
            lines.append("")
        lines += [*_wrapped(self._headline(), "", ""), ""]
        facts = [*self._facts(), *self._release_texts()]
        width = max(len(name) for name, _ in facts) + 2
        for name, text in facts:
            lines += _wrapped(text, f"{name + ':':<{width}}", " " * width)
        lines.append("")
        others = [caveat.rstrip(".") for caveat in self.caveats if caveat not in self.unsafe]
        for title, items in (
            ("Covered by this guarantee:", self._covered()),
            ("Not covered:", self._not_covered()),
            ("To be read with it:", others),
        ):
            if items:
                lines.append(title)
            for item in items:
                lines += _wrapped(item + ".", "  * ", "    ")
        return "\n".join(lines)

    def _headline(self) -> str:
        if math.isinf(self.epsilon):
            return "NOT PRIVATE. Sums of the records were released without noise."
        if self.num_releases == 0:
            return "Nothing has been released: these records have spent no privacy budget."
        change = {
            "add_or_remove_one": "present or absent",
            "replace_one": "as it is or replaced by another",
        }[self.neighboring_relation]
        if self.unsafe:
            return (
                "NOT PRIVATE: exact values were shown beside the private results. Of those private results alone, epsilon "
                f"is {_shown(self.epsilon)} at delta {self.delta:g}."
            )
        if self.seeded:
            return (
                f"NOT PRIVATE, since seeded. Unseeded, a run with these settings would be ({_shown(self.epsilon)}, "
                f"{self.delta:g})-differentially private."
            )
        return (
            f"The results are ({_shown(self.epsilon)}, {self.delta:g})-differentially private: "
            f"whether any one record is {change} changes the probability of any outcome by a "
            f"factor of at most {_shown(_exp(self.epsilon))}, up to {self.delta:g} in absolute "
            "terms."
        )

    def _facts(self) -> list[tuple[str, str]]:
        facts = [
            ("Data set", self.dataset_id or "not named"),
            ("Unit of privacy", _UNITS[self.neighboring_relation]),
            ("Adjacency", self.neighboring_relation.replace("_", " ")),
            ("Epsilon spent", f"{_shown(self.epsilon)} at delta {self.delta:g}"),
        ]
        if self.budget_left is not None:
            facts.append(("Budget", f"{self.budget_epsilon:g} in total, {_shown_down(self.budget_left)} left"))
        if self.ledger_budget is not None:
            facts.append(("Ledger's budget", _budget_text(self.ledger_budget)))
        grid = " in closed form" if self.grid_spacing is None else f", composed on a grid of {self.grid_spacing:g}"
        facts.append(("Accounting", _ACCOUNTANTS.get(self.accountant, self.accountant).format(grid=grid)))
        released = f"{self.num_releases:,} noisy sums"
        if self.unconfirmed_steps:
            released += (
                f" (of which {self.unconfirmed_steps:,} were reserved and not confirmed; "
                "they are counted as if released)"
            )
        return [*facts, ("Releases so far", released)]

    def _release_texts(self) -> list[tuple[str, str]]:
        facts = []
        for i, run in enumerate(self.releases, 1):
            part = "" if len(self.releases) == 1 else f", part {i}"
            clip = run["l2_norm_clip"]
            clip_text = "a fixed bound" if clip is None else f"length {clip:g}"
            what = run.get("purpose", f"{run['num_releases']:,} steps")
            text = (
                f"{what}; {run['sampling_description']}; each record's contribution clipped to {clip_text}; Gaussian noise of "
                f"{_digits_down(run['noise_multiplier'], 6)} times that bound"
            )
            if run["sensitivity"] != PER_RECORD_CLIP.to_json():
                presence, replacement = (_digits_up(run["sensitivity"][of]) for of in ("add_or_remove", "replace"))
                text += (
                    f", times each part's scale; over these scales one record's presence moves what is released by up to {presence} "
                    f"times that bound, its replacement by up to {replacement} times"
                )
            facts += [(f"How{part}", text), (f"Event{part}", run["dp_event"])]
        if self.epsilon_without_metrics is not None:
            names = dict.fromkeys(name for run in self.releases for name in run.get("metrics", ()))
            text = (
                f"{', '.join(names)}: privatised, released with the steps and paid for here; without them epsilon would "
                f"be {_shown(self.epsilon_without_metrics)}, so that they cost "
                f"{_shown(max(0.0, self.epsilon - self.epsilon_without_metrics))}"
            )
            facts.append(("Metrics", text))
        return facts


def _release_facts(entry: LedgerEntry, halve: bool) -> ReleaseFacts:
    plan = entry.plan
    facts = ReleaseFacts(
        sampling=plan.sampling.to_json(),
        sampling_description=plan.sampling.describe(),
        noise_multiplier=plan.noise_multiplier,
        l2_norm_clip=plan.l2_norm_clip,
        sensitivity=plan.sensitivity.to_json(),
        num_releases=entry.steps,
        dp_event=_event_text(entry.dp_event, halve),
    )
    if plan.purpose is not None:
        facts["purpose"] = plan.purpose
    if plan.metrics:
        facts["metrics"] = list(plan.metrics)
    return facts


def _ledger_budget(ledger: PrivacyLedger, accountant: str) -> LedgerBudgetFacts | None:
    if ledger.budget is None:
        return None
    epsilon, delta = ledger.budget
    held = ledger.renyi_filter
    facts = LedgerBudgetFacts(epsilon=epsilon, delta=delta, adaptive=held is not None)
    if held is None:
        facts["spent"] = ledger.epsilon(delta, accountant)
    else:
        relation = ledger.neighboring_relation or NeighboringRelation.ADD_OR_REMOVE_ONE
        facts["order"], facts["limit"] = held.order, held.limit
        facts["spent"] = held.spent(ledger.dp_event, relation)
    return facts


def _budget_text(budget: LedgerBudgetFacts) -> str:
    total = f"{budget['epsilon']:g} at delta {budget['delta']:g} for all fits and models"
    if not budget["adaptive"]:
        left = _shown_down(max(0.0, budget["epsilon"] - budget["spent"]))
        return f"{total}, {left} left; {_NOT_A_FILTER}"
    return (
        f"{total}, adaptive: it covers settings that were chosen after looking at earlier results, by a Renyi filter: at order "
        f"{budget['order']:g} divergences add up to {_digits_up(budget['spent'])} of at most {_digits_down(budget['limit'], 6)}"
    )


def _event_text(event: DpEvent, halve: bool) -> str:
    """Returns an event as Python says it, figures in six digits and rounded to the safe side.

    Args:
      event: of a plan.
      halve: the reader's multipliers are over the whole distance of a replacement.
    """
    name = type(event).__name__
    if isinstance(event, dp_accounting.GaussianDpEvent):
        return f"{name}({_digits_down(event.noise_multiplier / (2.0 if halve else 1.0), 6)})"
    if isinstance(event, dp_accounting.SelfComposedDpEvent):
        return f"{name}({_event_text(event.event, halve)}, {event.count})"
    if isinstance(event, dp_accounting.PoissonSampledDpEvent):
        return f"{name}({_digits_up(event.sampling_probability)}, {_event_text(event.event, halve)})"
    if isinstance(event, dp_accounting.SampledWithoutReplacementDpEvent):
        return f"{name}({event.source_dataset_size}, {event.sample_size}, {_event_text(event.event, halve)})"
    return f"{name}()"


def _finite(value: float) -> float | str:
    return value if math.isfinite(value) else "inf"


def _wrapped(text: str, first: str, rest: str) -> list[str]:
    return textwrap.wrap(text, width=96, initial_indent=first, subsequent_indent=rest)


def _exp(value: float) -> float:
    return math.exp(value) if value < 700.0 else math.inf


def _shown(value: float) -> str:
    return "infinity" if math.isinf(value) else f"{round_up(value):.3g}"


def _shown_down(value: float) -> str:
    return "nothing" if value == 0.0 else _digits_down(value)


def _digits_up(value: float) -> str:
    return f"{round_up(value, 6):.6g}"


def _digits_down(value: float, digits: int = 3) -> str:
    if value == 0.0:
        return "0"
    scale = 10.0 ** (digits - 1 - math.floor(math.log10(value)))
    return f"{math.floor(value * scale * (1 + 1e-12)) / scale:.{digits}g}"
