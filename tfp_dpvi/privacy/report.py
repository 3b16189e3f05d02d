"""`PrivacyReport`: the guarantee in numbers and words, for a data protection officer.

The text rounds conservatively: up what must not be understated, such as epsilon, and noise down.
"""

import dataclasses
import decimal
import math
import textwrap
from collections.abc import Sequence

import dp_accounting
from dp_accounting import DpEvent, NeighboringRelation

from tfp_dpvi import _validate as check
from tfp_dpvi.privacy.accountants import Accountant, get_accountant
from tfp_dpvi.privacy.budgets import EpsilonBudget
from tfp_dpvi.privacy.ledger import LedgerEntry, PrivacyLedger
from tfp_dpvi.privacy.sensitivity import PER_RECORD_CLIP, Json
from tfp_dpvi.privacy.unit import PersonUnit

REPORT_SCHEMA_VERSION = 1
_PLAN_FACTS = ("sampling", "noise_multiplier", "l2_norm_clip", "sensitivity")
_OTHER_FACTS = ("purpose", "metrics", "randomness", "person", "summed_over")


@dataclasses.dataclass(frozen=True)
class PrivacyReport:
    """The privacy spent on one data set, and what the guarantee covers.

    `str(report)` is the report for people, `to_json()` the one for machines.

    Attributes:
      epsilon: The privacy loss of all reserved releases; infinity without noise.
      delta: The delta at which `epsilon` and `mu` hold.
      mu: Mu of Gaussian differential privacy at every delta from `delta`; see `AttackBound`.
      advantage: An attacker's advantage, between 0 and 1; see `AttackBound`.
      neighboring_relation: "add_or_remove_one" or "replace_one".
      accountant: The name of the accountant that computed the figures.
      releases: One dictionary for each run of equal plans, with the keys `sampling`,
        `sampling_description`, `noise_multiplier`, `l2_norm_clip`, `sensitivity`, `num_releases`
        and `dp_event` (Python code for the same accountant of dp_accounting). It has `purpose` if
        the release is not training, `metrics` if some were released with the steps, and
        `randomness` "secure" if noise came from a cryptographic generator, and `person`, the
        attributes of `PersonUnit`, if the sums are of persons instead of rows.
      num_releases: The number of noisy sums that were released or reserved.
      unconfirmed_steps: The number of reserved and not confirmed steps; they count as released.
      budget_epsilon: The model's lifetime budget; None without one.
      num_records: The number of records, or of persons; None if it is unknown.
      num_records_declared: False if the number was counted from the data; None if unknown.
      seeded: True if noise was drawn from a fixed seed, which can remove it.
      caveats: Sentences that limit the guarantee. Those that begin with "NOT PRIVATE" void it.
      dataset_id: The data set's name in the ledger.
      ledger_budget: The ledger's own budget: `epsilon`, `delta`, `adaptive` and `spent`, and for an
        adaptive one `order`, `limit` and `advantage`; None without one.
      grid_spacing: The spacing of privacy losses in the numerical composition; None without one.
      message_epsilon: Epsilon for who sees the releases that `epsilon` takes to be seen within a
        sum alone, see `PrivacyPlan.summed_over`; None without such releases. The release's
        dictionary then has `summed_over`.
      schema: What was taken to be public about the columns and about rules between them, a line
        each, with the question what public source has it; None without a schema.

    ```python
    >>> from tfp_dpvi.privacy import FullBatch, PrivacyLedger, PrivacyPlan
    >>> ledger = PrivacyLedger(dataset_id="blood pressure")
    >>> with ledger.reserved(PrivacyPlan(FullBatch(), noise_multiplier=4.0, num_releases=1)):
    ...     pass  # Release the noisy sum here.
    >>> report = PrivacyReport.from_ledger(ledger, delta=1e-5)
    >>> report.mu, report.num_releases, report.private
    (0.25, 1, True)

    ```
    """

    epsilon: float
    delta: float
    mu: float
    advantage: float
    neighboring_relation: str
    accountant: str
    releases: tuple[Json, ...]
    num_releases: int
    unconfirmed_steps: int = 0
    budget_epsilon: float | None = None
    num_records: int | None = None
    num_records_declared: bool | None = None
    seeded: bool = False
    caveats: tuple[str, ...] = ()
    dataset_id: str | None = None
    ledger_budget: Json | None = None
    grid_spacing: float | None = None
    message_epsilon: float | None = None
    schema: str | None = None

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

        Args:
          ledger: The ledger.
          delta: The delta at which epsilon and mu are reported.
          accountant: The name of an accountant. By default it is that of the ledger's plans, or
            "pld" if they differ.
          budget_epsilon: The model's lifetime budget, which the report compares with epsilon.
          num_records: The number of records. By default it is the largest of the plans.
          num_records_declared: Whether that number was declared; None if that is unknown.
          seeded: Whether noise was drawn from a fixed seed. It is also True if the ledger says so.
          caveats: Further sentences that limit the guarantee.
          neighboring_relation: The relation to report while the ledger is empty.

        Raises:
          TypeError: `caveats` is a single string.
          UnsupportedPairError: The accountant does not support the ledger's releases.
          ValueError: A number is out of its range, or the accountant is unknown.
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
        if budget_epsilon is not None:
            budget_epsilon = check.epsilon(budget_epsilon, "budget_epsilon")
        if num_records is None:
            num_records = max((entry.plan.num_records or 0 for entry in entries), default=0) or None
        if num_records is not None:
            num_records = check.count("num_records", num_records, 1)
        halve = price.over_replacement and relation is NeighboringRelation.REPLACE_ONE
        exposures = (f"NOT PRIVATE: {text}" for text in ledger.exposures)
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
            budget_epsilon=budget_epsilon,
            num_records=num_records,
            num_records_declared=num_records_declared,
            seeded=bool(seeded) or ledger.seeded,
            caveats=(*exposures, *ledger.caveats, *caveats),
            dataset_id=ledger.dataset_id,
            ledger_budget=_ledger_budget(ledger, accountant),
            grid_spacing=price.grid_spacing(event, relation),
            message_epsilon=_message_epsilon(entries, price, delta, relation),
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
    def unit(self) -> str:
        """The unit of privacy: "record", or "person" with all rows of a person."""
        return "person" if any("person" in run for run in self.releases) else "record"

    @property
    def budget_left(self) -> float | None:
        """The budget minus the epsilon spent, at least 0. Later releases compose better."""
        if self.budget_epsilon is None:
            return None
        return max(0.0, self.budget_epsilon - self.epsilon)

    @property
    def plain_words(self) -> str | None:
        """The advantage in a sentence for the person whose record it is; None if not private."""
        if not self.private:
            return None
        return plain_words(self.advantage, self.neighboring_relation, self.unit)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings for the reader."""
        seeded = (
            "seeded: not private. The noise came from a fixed seed, and can be removed with it. "
            "The values are those of an unseeded run with these settings."
        )
        return (
            *((seeded,) if self.seeded else ()),
            *self.unsafe,
            *size_warnings(self.epsilon, self.delta, self.num_records, self.unit),
        )

    def to_json(self) -> Json:
        """Returns a JSON-ready dictionary with `schema_version`, the attributes and the sentences.

        An infinite number is written as the string "inf".
        """
        data = dataclasses.asdict(self)
        data["releases"] = list(data["releases"])
        data["caveats"] = list(self.caveats)
        data["epsilon"] = finite(self.epsilon)
        data["mu"] = finite(self.mu)
        data["message_epsilon"] = finite(self.message_epsilon)
        if self.ledger_budget is not None:
            data["ledger_budget"]["spent"] = finite(self.ledger_budget["spent"])
        return {
            "schema_version": REPORT_SCHEMA_VERSION,
            **data,
            "unit": self.unit,
            "budget_left": self.budget_left,
            "private": self.private,
            "plain_words": self.plain_words,
            "warnings": list(self.warnings),
            "covered": _covered(self),
            "not_covered": _not_covered(self),
        }

    def __str__(self) -> str:
        lines = ["Privacy report", "=============="]
        for warning in self.warnings:
            lines += _wrapped(f"WARNING: {warning}", "", "  ")
        if self.warnings:
            lines.append("")
        lines += [*_wrapped(_headline(self), "", ""), ""]
        facts = [*_facts(self), *_releases(self)]
        width = max(len(name) for name, _ in facts) + 2
        for name, text in facts:
            lines += _wrapped(text, f"{name + ':':<{width}}", " " * width)
        lines.append("")
        others = [caveat.rstrip(".") for caveat in self.caveats if caveat not in self.unsafe]
        for title, items in (
            ("Covered by this guarantee:", _covered(self)),
            ("Not covered:", _not_covered(self)),
            ("Taken to be public, whatever the records say:", (self.schema or "").splitlines()),
            ("Further remarks:", others),
        ):
            lines += [title] if items else []
            for item in items:
                end = "" if item.endswith("?") else "."
                lines += _wrapped(item + end, "  * ", "    ")
        return "\n".join(lines)


def _release_facts(entry: LedgerEntry, halve: bool) -> Json:
    data = entry.plan.to_json()
    sampling = entry.plan.sampling.describe()
    return {
        **{name: data[name] for name in (*_PLAN_FACTS, *_OTHER_FACTS) if name in data},
        "sampling_description": sampling.replace("record", "person")
        if "person" in data
        else sampling,
        "num_releases": entry.steps,
        "dp_event": _event_text(entry.dp_event, halve),
    }


def _message_epsilon(
    entries: Sequence[LedgerEntry],
    price: Accountant,
    delta: float,
    relation: NeighboringRelation,
) -> float | None:
    """Returns epsilon with every release seen as it is; None if it is that of the ledger."""
    if all(entry.plan.summed_over is None for entry in entries):
        return None
    events = [entry.plan.of_message().event_of(entry.steps) for entry in entries]
    return price.epsilon(dp_accounting.ComposedDpEvent(events), delta, relation)


def _ledger_budget(ledger: PrivacyLedger, accountant: str) -> Json | None:
    if ledger.budget is None:
        return None
    relation = ledger.neighboring_relation or NeighboringRelation.ADD_OR_REMOVE_ONE
    adaptive = ledger.renyi_filter
    budget = adaptive or EpsilonBudget(*ledger.budget)
    filter_facts = () if adaptive is None else ("order", "limit", "advantage")
    return {
        "epsilon": budget.epsilon,
        "delta": budget.delta,
        "adaptive": adaptive is not None,
        "spent": budget.spent(ledger.dp_event, relation, accountant),
        **{name: getattr(adaptive, name) for name in filter_facts},
    }


_COVERED = (
    "every intermediate state of the model, not only the last one: all parameters after every "
    "step, every checkpoint, the optimizer's state, the posterior, predictions and samples from it",
    "everything that is later computed from these, without limit, as long as the records are not "
    "used again",
)

_NOT_COVERED = (
    "statistics computed on the records outside this ledger, for example means and standard "
    "deviations used to standardise the columns, or the choice of columns",
    "the search for settings (learning rate, clip, batch size, model, prior) if it used these "
    "records: every trial spends budget, and trials outside this ledger are not counted",
    "the choice of prior and model: they are assumed to be public",
    "the number of {unit}s, {num_records}: it is assumed to be public{declared}",
    "{attributes}",
    "{identifiers}",
    "the check of record values before training (missing or malformed values), which the holder "
    "of the data runs and whose outcome should stay there",
    "losses and metrics computed on these records directly, for example with model.evaluate, and "
    "other models fitted to them without this ledger; weights loaded into a new model do not "
    "include its ledger",
    "stopping that depends on released values (early stopping, or an interruption): then use the "
    "figures that the fit was planned for, not those of the steps that ran{adaptive}",
    "settings of a later fit (noise, length, batch size, clip, model) that were chosen after "
    "looking at an earlier one's results: releases are composed as if all settings had been fixed "
    "in advance. With one of five candidates chosen by the first release, delta was 2.04e-5 "
    "instead of the stated 1e-5{adaptive}",
    "running time, memory and power: they can reveal how many records took part in a step",
    "floating-point arithmetic: the proof assumes real numbers; sums are rounded to a grid of "
    "2^-12 standard deviations after the noise, but neither the sums of records nor the sampler "
    "of the noise are exact",
    "{generator}",
    "{summed}",
)

_IDENTIFIERS = (
    "rows of one person under several identifiers, which count as several persons; and what the "
    "identifiers are derived from: they are taken as they were passed, and never leave"
)
_SUMMED = (
    "whoever sees a message of which only a sum should be seen, or two such sums: that the secure "
    "aggregation shows one sum alone, and that others add their noise, is taken on trust. Without "
    "it, {epsilon} holds at delta {delta:g}"
)
_ATTRIBUTES = (
    "single attributes of a person who is known to take part, for example a diagnosis: changing "
    "one replaces a {unit}, for which these results are only (2 epsilon, (1 + exp(epsilon)) "
    "delta)-differentially private; the relation replace_one accounts for it"
)
_SECURE = "from a cryptographic generator, keyed by the operating system"
_GENERATORS = {
    "all": (
        "the randomness: the proof assumes true randomness. Noise, and samples that fit drew "
        f"itself, came {_SECURE}, so that they are as good as random to anyone who cannot break it"
    ),
    "some": (
        "the pseudo-random generator: the proof assumes true randomness. Only the releases that "
        "say so above have noise and samples of a cryptographic generator"
    ),
    "none": "the pseudo-random generator: the proof assumes true randomness",
}
_FILTER_COVERS = "; the figures above do not cover it, the ledger's adaptive budget does"
_SAME_DATA = ". The guarantee compares the result on the data with the result on the same data "
_UNIT = f"one record{_SAME_DATA}with any one record "
_PERSON = f"one person, with all rows of this person{_SAME_DATA}with "
_UNITS = {
    ("record", "add_or_remove_one"): _UNIT + "added or removed",
    ("record", "replace_one"): _UNIT + "replaced by any other",
    ("person", "add_or_remove_one"): _PERSON + "all rows of any one person added or removed",
    ("person", "replace_one"): _PERSON
    + "one person's whole record, all rows, replaced by any other person's",
}
_ACCOUNTANTS = {
    "pld": (
        "privacy loss distributions{grid}, rounded upwards: PLDAccountant of dp_accounting >= 0.5 "
        "on the events below"
    ),
    "rdp": (
        "Renyi differential privacy (the moments accountant): RdpAccountant of dp_accounting on "
        "the events below"
    ),
}
_OTHER_ADVANTAGES = (
    "the smallest (e^epsilon - 1 + 2 delta) / (e^epsilon + 1) of all (epsilon, delta) by the "
    "accounting below, an upper bound"
)
_UNKNOWN_TO_ATTACKER = {
    ("record", "add_or_remove_one"): (
        "everything about you but whether your record is in these data"
    ),
    ("record", "replace_one"): "everything in these data but which of two records is yours",
    ("person", "add_or_remove_one"): (
        "everything about you, with all your rows, but whether they are in these data"
    ),
    ("person", "replace_one"): (
        "everything in these data but which of two persons' rows are yours"
    ),
}


def plain_words(advantage: float, neighboring_relation: str, unit: str = "record") -> str:
    """Returns a sentence on an attacker's advantage for the person whose record it is.

    Args:
      advantage: A number between 0 and 1, see `AttackBound`.
      neighboring_relation: "add_or_remove_one" or "replace_one".
      unit: The unit of privacy, "record" or "person".
    """
    unknown = _UNKNOWN_TO_ATTACKER[unit, neighboring_relation]
    return (
        f"A person who knows {unknown}, and who would guess "
        "right half the time without these results, guesses right at most "
        f"{up(50.0 * (1.0 + advantage), 3)} times in 100 with them."
    )


def size_warnings(
    epsilon: float, delta: float, num_records: int | None, unit: str = "record"
) -> list[str]:
    """Returns warnings about values of epsilon and delta that give little protection.

    Args:
      epsilon: The privacy loss, or infinity.
      delta: Its delta.
      num_records: The number of records; None if it is unknown, which leaves delta unchecked.
      unit: The unit of privacy, "record" or "person".
    """
    sentences = []
    if math.isinf(epsilon):
        sentences.append(
            "NOT PRIVATE: without noise (or if the accountant's bound fails) no guarantee holds."
        )
    elif epsilon > 10.0:
        sentences.append(
            f"epsilon {shown(epsilon)} is too large to protect an individual meaningfully. "
            "Aim below 10, better below 1."
        )
    if num_records is not None and delta > 0.1 / num_records:
        sentences.append(
            f"delta {delta:g} is large for {num_records} {unit}s: it should stay below "
            f"{0.1 / num_records:.1e}, a tenth of one over their number, since a mechanism may "
            f"publish a random {unit} with probability delta times their number."
        )
    return sentences


def _event_text(event: DpEvent, halve: bool) -> str:
    """Returns an event as Python code, with numbers in six digits, rounded conservatively.

    `halve` is for an accountant whose multipliers are relative to the whole sensitivity of a
    replacement.
    """
    name = type(event).__name__
    if isinstance(event, dp_accounting.GaussianDpEvent):
        return f"{name}({down(event.noise_multiplier / (2.0 if halve else 1.0), 6)})"
    if isinstance(event, dp_accounting.SelfComposedDpEvent):
        return f"{name}({_event_text(event.event, halve)}, {event.count})"
    if isinstance(event, dp_accounting.PoissonSampledDpEvent):
        return f"{name}({up(event.sampling_probability, 6)}, {_event_text(event.event, halve)})"
    if isinstance(event, dp_accounting.SampledWithoutReplacementDpEvent):
        mechanism = _event_text(event.event, halve)
        return f"{name}({event.source_dataset_size}, {event.sample_size}, {mechanism})"
    if isinstance(event, dp_accounting.dp_event.RepeatAndSelectDpEvent):
        return f"{name}({_event_text(event.event, halve)}, {up(event.mean, 6)}, {event.shape:g})"
    return f"{name}()"


def _covered(report: PrivacyReport) -> list[str]:
    purposes = dict.fromkeys(run["purpose"] for run in report.releases if "purpose" in run)
    included = "which were released with noise and are included"
    rows = ["all rows of a person together, and their number, however many rows the person has"]
    persons = rows if report.unit == "person" else []
    return [*persons, *_COVERED, *(f"{purpose}, {included}" for purpose in purposes)]


def _not_covered(report: PrivacyReport) -> list[str]:
    known = "unknown here" if report.num_records is None else f"{report.num_records:,}"
    declared = {
        True: " and was declared",
        False: ", although it was counted from the data, and is not protected",
        None: "",
    }
    budget = report.ledger_budget
    kept = budget is not None and budget["adaptive"] and budget["spent"] <= budget["limit"]
    secure = [run.get("randomness") == "secure" for run in report.releases]
    persons = report.unit == "person"
    how_many = "all" if secure and all(secure) else "some" if any(secure) else "none"
    fields = {
        "num_records": known,
        "generator": _GENERATORS[how_many],
        "declared": declared[report.num_records_declared],
        "adaptive": _FILTER_COVERS if kept else "",
        "attributes": _ATTRIBUTES.format(unit="person's whole record" if persons else "record")
        if report.neighboring_relation == "add_or_remove_one"
        else "",
        "identifiers": _IDENTIFIERS if persons else "",
        "summed": ""
        if report.message_epsilon is None
        else _SUMMED.format(epsilon=f"epsilon {shown(report.message_epsilon)}", delta=report.delta),
        "unit": report.unit,
    }
    sentences = [sentence.format(**fields) for sentence in _NOT_COVERED]
    return [sentence for sentence in sentences if sentence]


def _headline(report: PrivacyReport) -> str:
    if math.isinf(report.epsilon):
        return "NOT PRIVATE. Sums of the records were released without noise."
    if report.num_releases == 0:
        return "Nothing has been released: these records have spent no privacy budget."
    epsilon, delta = shown(report.epsilon), f"{report.delta:g}"
    if report.unsafe:
        return (
            "NOT PRIVATE: exact values were shown besides the private results. For the private "
            f"results alone, epsilon is {epsilon} at delta {delta}."
        )
    if report.seeded:
        return (
            "NOT PRIVATE, since seeded. Unseeded, a run with these settings would be "
            f"({epsilon}, {delta})-differentially private."
        )
    replaced = report.neighboring_relation == "replace_one"
    one = "person's whole record" if report.unit == "person" else "record"
    change = "as it is or replaced by another" if replaced else "present or absent"
    factor = math.exp(report.epsilon) if report.epsilon < 700.0 else math.inf
    trust = (
        ""
        if report.message_epsilon is None
        else " This is for who sees sums with other hospitals' messages alone: for who sees these "
        f"messages themselves, epsilon is {shown(report.message_epsilon)}."
    )
    return (
        f"The results are ({epsilon}, {delta})-differentially private: whether any one {one} is "
        f"{change} changes the probability of any outcome by a factor of at most {shown(factor)}, "
        f"up to {delta} in absolute terms.{trust}"
    )


def _facts(report: PrivacyReport) -> list[tuple[str, str]]:
    facts = [
        ("Data set", report.dataset_id or "not named"),
        ("Unit of privacy", _UNITS[report.unit, report.neighboring_relation]),
        *_row_facts(report),
        ("Adjacency", report.neighboring_relation.replace("_", " ")),
        ("Epsilon spent", f"{shown(report.epsilon)} at delta {report.delta:g}"),
    ]
    if report.message_epsilon is not None:
        text = f"epsilon {shown(report.message_epsilon)} at delta {report.delta:g}"
        facts.append(("If messages are seen", text))
    if math.isfinite(report.epsilon):
        facts += _attack_facts(report)
    if report.budget_left is not None:
        budget = f"{report.budget_epsilon:g} in total, {_left(report.budget_left)} left"
        facts.append(("Budget", budget))
    if report.ledger_budget is not None:
        facts.append(("Ledger's budget", _budget_text(report.ledger_budget)))
    spacing = report.grid_spacing
    grid = " in closed form" if spacing is None else f", composed on a grid of {spacing:g}"
    accounting = _ACCOUNTANTS.get(report.accountant, report.accountant)
    facts.append(("Accounting", accounting.format(grid=grid)))
    released = f"{report.num_releases:,} noisy sums"
    if report.unconfirmed_steps:
        released += (
            f" (of which {report.unconfirmed_steps:,} were reserved but not confirmed; they count "
            "as released)"
        )
    return [*facts, ("Releases so far", released)]


def _row_facts(report: PrivacyReport) -> list[tuple[str, str]]:
    """Returns which rows of persons took part, in as many ways as fits had."""
    units = (PersonUnit.from_json(run["person"]) for run in report.releases if "person" in run)
    words = dict.fromkeys(unit.in_words for unit in units)
    hidden = "how many rows were left out is not shown"
    return [("Rows", f"{'; or '.join(words)}; {hidden}")] if words else []


def _attack_facts(report: PrivacyReport) -> list[tuple[str, str]]:
    gaussian = (
        f"mu {shown(report.mu)}: at every delta of at least {report.delta:g}, epsilon is at most "
        "that of Gaussian differential privacy with this mu"
    )
    exact = report.accountant == "pld"
    source = "delta at epsilon 0 by the accounting below" if exact else _OTHER_ADVANTAGES
    advantage = (
        f"{shown(report.advantage)} at most: true minus false positive rate of any attacker; "
        f"{source}"
    )
    facts = [("Gaussian DP", gaussian), ("Advantage", advantage)]
    if report.plain_words is not None:
        facts.append(("In plain words", report.plain_words.rstrip(".")))
    return facts


def _budget_text(budget: Json) -> str:
    total = f"{budget['epsilon']:g} at delta {budget['delta']:g} for all fits and models"
    if not budget["adaptive"]:
        left = _left(max(0.0, budget["epsilon"] - budget["spent"]))
        return (
            f"{total}, {left} left; not valid for settings chosen after looking at earlier results"
        )
    return (
        f"{total}, adaptive: it covers settings chosen after looking at earlier results, by a "
        f"Renyi filter: at order {budget['order']:g} divergences add up to "
        f"{up(budget['spent'], 6)} of at most {down(budget['limit'], 6)}, which leave an attacker "
        f"an advantage of at most {up(budget['advantage'], 3)}"
    )


def _releases(report: PrivacyReport) -> list[tuple[str, str]]:
    facts = []
    for number, run in enumerate(report.releases, 1):
        part = "" if len(report.releases) == 1 else f", part {number}"
        facts += [(f"How{part}", _release_text(run)), (f"Event{part}", run["dp_event"])]
    if names := dict.fromkeys(name for run in report.releases for name in run.get("metrics", ())):
        metrics = f"{', '.join(names)}: privatised, released with the steps and included"
        facts.append(("Metrics", metrics))
    return facts


def _release_text(run: Json) -> str:
    clip = run["l2_norm_clip"]
    bound = "a fixed bound" if clip is None else f"length {clip:g}"
    what = run.get("purpose", f"{run['num_releases']:,} steps")
    unit = "person" if "person" in run else "record"
    each = f"{unit}'s contribution" + (", of all rows together," if "person" in run else "")
    text = (
        f"{what}; {run['sampling_description']}; each {each} clipped to {bound}; "
        f"Gaussian noise of {down(run['noise_multiplier'], 6)} times that bound"
    )
    if run["sensitivity"] != dataclasses.asdict(PER_RECORD_CLIP):
        presence = up(run["sensitivity"]["add_or_remove"], 6)
        replacement = up(run["sensitivity"]["replace"], 6)
        text += (
            f", times each part's scale; over these scales one {unit}'s presence moves what is "
            f"released by up to {presence} times that bound, its replacement by up to "
            f"{replacement} times"
        )
    if run.get("summed_over"):
        text += (
            f"; counted in the sum of at least {run['summed_over']} such messages, which alone is "
            "seen"
        )
    if run.get("randomness") == "secure":
        text += f"; noise, and samples that fit drew itself, {_SECURE}"
    return text


def _wrapped(text: str, first: str, rest: str) -> list[str]:
    return textwrap.wrap(text, width=96, initial_indent=first, subsequent_indent=rest)


def _left(value: float) -> str:
    return down(value, 3) if value else "nothing"


def finite(value: float | None) -> float | str | None:
    """Returns a JSON-ready number: infinity becomes the string "inf"."""
    return "inf" if value is not None and math.isinf(value) else value


def shown(value: float, digits: int = 3) -> str:
    """Returns an epsilon as text, rounded up.

    Args:
      value: The epsilon, or infinity.
      digits: The number of significant digits.
    """
    return "infinity" if math.isinf(value) else up(value, digits)


def up(value: float, digits: int) -> str:
    """Returns a number as text, rounded up, for what must not be understated, such as epsilon.

    Args:
      value: The number, finite.
      digits: The number of significant digits.
    """
    return _rounded(value, digits, decimal.ROUND_CEILING)


def down(value: float, digits: int) -> str:
    """Returns a number as text, rounded down, for what must not be overstated, such as noise.

    Args:
      value: The number, finite.
      digits: The number of significant digits.
    """
    return _rounded(value, digits, decimal.ROUND_FLOOR)


def _rounded(value: float, digits: int, rounding: str) -> str:
    rounded = decimal.Context(digits, rounding).create_decimal(repr(float(value)))
    return f"{float(rounded):.{digits}g}"
