"""The wording of a privacy report, with numbers rounded conservatively."""

import dataclasses
import decimal
import math
import textwrap
from typing import TYPE_CHECKING

import dp_accounting
from dp_accounting import DpEvent

from tfp_dpvi.privacy.sensitivity import PER_RECORD_CLIP, Json

if TYPE_CHECKING:
    from tfp_dpvi.privacy.report import PrivacyReport

_COVERED = (
    "every intermediate state of the model, not only the last one: all parameters after every step, every checkpoint, the "
    "optimizer's state, the posterior, predictions and samples from it",
    "everything that is later computed from these, without limit, as long as the records are not used again",
)

_NOT_COVERED = (
    "statistics computed on the records outside this ledger, for example means and standard deviations used to standardise "
    "the columns, or the choice of columns",
    "the search for settings (learning rate, clip, batch size, model, prior) if it used these records: every trial "
    "spends budget, and trials outside this ledger are not counted",
    "the choice of prior and model: they are assumed to be public",
    "the number of records, {num_records}: it is assumed to be public{declared}",
    "{attributes}",
    "the check of record values before training (missing or malformed values), which the holder of the data runs and whose "
    "outcome should stay there",
    "losses and metrics computed on these records directly, for example with model.evaluate, and other models fitted to them "
    "without this ledger; weights loaded into a new model do not include its ledger",
    "stopping that depends on released values (early stopping, or an interruption): then use the "
    "figures that the fit was planned for, not those of the steps that ran{adaptive}",
    "settings of a later fit (noise, length, batch size, clip, model) that were chosen after looking at an earlier one's "
    "results: releases are composed as if all settings had been fixed in advance. With one of five candidates chosen "
    "by the first release, delta was 2.04e-5 instead of the stated 1e-5{adaptive}",
    "running time, memory and power: they can reveal how many records took part in a step",
    "floating-point arithmetic: the proof assumes real numbers; sums are rounded to a grid of 2^-12 standard deviations after "
    "the noise, but neither the sums of records nor the sampler of the noise are exact",
    "{generator}",
)

_ATTRIBUTES = (
    "single attributes of a person who is known to take part, for example a diagnosis: changing "
    "one replaces a "
    "record, for which these results are only (2 epsilon, (1 + exp(epsilon)) delta)-differentially "
    "private; "
    "the relation replace_one accounts for it"
)
_SECURE = "from a cryptographic generator, keyed by the operating system"
_GENERATORS = {
    "all": (
        "the randomness: the proof assumes true randomness. Noise, and samples that fit drew itself, "
        f"came {_SECURE}, so that they are as good as random to anyone who cannot break it"
    ),
    "some": (
        "the pseudo-random generator: the proof assumes true randomness. Only the releases that say so "
        "above have noise and samples of a cryptographic generator"
    ),
    "none": "the pseudo-random generator: the proof assumes true randomness",
}
_FILTER_COVERS = "; the figures above do not cover it, the ledger's adaptive budget does"
_UNIT = "one record. The guarantee compares the result on the data with the result on the same data with any one record "
_UNITS = {
    "add_or_remove_one": _UNIT + "added or removed",
    "replace_one": _UNIT + "replaced by any other",
}
_ACCOUNTANTS = {
    "pld": "privacy loss distributions{grid}, rounded upwards: PLDAccountant of dp_accounting >= 0.5 on the events below",
    "rdp": "Renyi differential privacy (the moments accountant): RdpAccountant of dp_accounting on the events below",
}
_ADVANTAGES = {
    "pld": "delta at epsilon 0 by the accounting below",
}
_OTHER_ADVANTAGES = (
    "the smallest (e^epsilon - 1 + 2 delta) / (e^epsilon + 1) of all (epsilon, delta) by the "
    "accounting below, an upper bound"
)
_UNKNOWN_TO_ATTACKER = {
    "add_or_remove_one": "everything about you but whether your record is in these data",
    "replace_one": "everything in these data but which of two records is yours",
}


def plain_words(advantage: float, neighboring_relation: str) -> str:
    """Returns what an attacker's advantage means to the person whose record it is.

    Args:
      advantage: between 0 and 1.
      neighboring_relation: "add_or_remove_one" or "replace_one".
    """
    return (
        f"A person who knows {_UNKNOWN_TO_ATTACKER[neighboring_relation]}, and who would guess "
        "right half the time without these results, guesses right at most "
        f"{up(50.0 * (1.0 + advantage), 3)} times in 100 with them."
    )


def event_text(event: DpEvent, halve: bool) -> str:
    """Returns an event as Python code, with numbers in six digits, rounded conservatively.

    Args:
      event: the event of a plan.
      halve: whether the accountant's multipliers are relative to the whole sensitivity of a replacement.
    """
    name = type(event).__name__
    if isinstance(event, dp_accounting.GaussianDpEvent):
        return f"{name}({down(event.noise_multiplier / (2.0 if halve else 1.0), 6)})"
    if isinstance(event, dp_accounting.SelfComposedDpEvent):
        return f"{name}({event_text(event.event, halve)}, {event.count})"
    if isinstance(event, dp_accounting.PoissonSampledDpEvent):
        return f"{name}({up(event.sampling_probability, 6)}, {event_text(event.event, halve)})"
    if isinstance(event, dp_accounting.SampledWithoutReplacementDpEvent):
        return f"{name}({event.source_dataset_size}, {event.sample_size}, {event_text(event.event, halve)})"
    return f"{name}()"


def warnings(report: "PrivacyReport") -> list[str]:
    """Returns the report's warnings."""
    seeded = (
        "seeded: not private. The noise came from a fixed seed, and can be removed with it. The values are those of an unseeded "
        "run with these settings."
    )
    found = size_warnings(report.epsilon, report.delta, report.num_records)
    return [*([seeded] if report.seeded else []), *report.unsafe, *found]


def size_warnings(epsilon: float, delta: float, num_records: int | None) -> list[str]:
    """Returns warnings about values of epsilon and delta that give little protection."""
    found = []
    if math.isinf(epsilon):
        found.append(
            "NOT PRIVATE: without noise (or if the accountant's bound fails) no guarantee holds."
        )
    elif epsilon > 10.0:
        found.append(
            f"epsilon {shown(epsilon)} is too large to protect an individual meaningfully. Aim below 10, better below 1."
        )
    if num_records is not None and delta > 0.1 / num_records:
        found.append(
            f"delta {delta:g} is large for {num_records} records: it should stay below {0.1 / num_records:.1e}, a tenth of one "
            "over their number, since a mechanism may publish a random record with probability delta times their number."
        )
    return found


def covered(report: "PrivacyReport") -> list[str]:
    """Returns the scope of the guarantee."""
    purposes = dict.fromkeys(run["purpose"] for run in report.releases if "purpose" in run)
    return [
        *_COVERED,
        *(f"{purpose}, which were released with noise and are included" for purpose in purposes),
    ]


def not_covered(report: "PrivacyReport") -> list[str]:
    """Returns the limits of the guarantee."""
    known = "unknown here" if report.num_records is None else f"{report.num_records:,}"
    declared = {
        True: " and was declared",
        False: ", although it was counted from the data, and is not protected",
        None: "",
    }
    budget = report.ledger_budget
    kept = budget is not None and budget["adaptive"] and budget["spent"] <= budget["limit"]
    secure = [run.get("randomness") == "secure" for run in report.releases]
    how_many = "all" if secure and all(secure) else "some" if any(secure) else "none"
    fields = {
        "generator": _GENERATORS[how_many],
        "declared": declared[report.num_records_declared],
        "adaptive": _FILTER_COVERS if kept else "",
        "attributes": _ATTRIBUTES if report.neighboring_relation == "add_or_remove_one" else "",
    }
    sentences = [sentence.format(num_records=known, **fields) for sentence in _NOT_COVERED]
    return [sentence for sentence in sentences if sentence]


def render(report: "PrivacyReport") -> str:
    """Returns the whole report."""
    lines = ["Privacy report", "=============="]
    for warning in report.warnings:
        lines += _wrapped(f"WARNING: {warning}", "", "  ")
    if report.warnings:
        lines.append("")
    lines += [*_wrapped(_headline(report), "", ""), ""]
    facts = [*_facts(report), *_releases(report)]
    width = max(len(name) for name, _ in facts) + 2
    for name, text in facts:
        lines += _wrapped(text, f"{name + ':':<{width}}", " " * width)
    lines.append("")
    others = [caveat.rstrip(".") for caveat in report.caveats if caveat not in report.unsafe]
    for title, items in (
        ("Covered by this guarantee:", covered(report)),
        ("Not covered:", not_covered(report)),
        ("Further remarks:", others),
    ):
        lines += [title] if items else []
        for item in items:
            lines += _wrapped(item + ".", "  * ", "    ")
    return "\n".join(lines)


def _headline(report: "PrivacyReport") -> str:
    if math.isinf(report.epsilon):
        return "NOT PRIVATE. Sums of the records were released without noise."
    if report.num_releases == 0:
        return "Nothing has been released: these records have spent no privacy budget."
    epsilon, delta = shown(report.epsilon), f"{report.delta:g}"
    if report.unsafe:
        return (
            "NOT PRIVATE: exact values were shown besides the private results. For the private results alone, epsilon "
            f"is {epsilon} at delta {delta}."
        )
    if report.seeded:
        return (
            f"NOT PRIVATE, since seeded. Unseeded, a run with these settings would be ({epsilon}, {delta})-differentially "
            "private."
        )
    replaced = report.neighboring_relation == "replace_one"
    change = "as it is or replaced by another" if replaced else "present or absent"
    factor = math.exp(report.epsilon) if report.epsilon < 700.0 else math.inf
    return (
        f"The results are ({epsilon}, {delta})-differentially private: whether any one record is {change} changes the "
        f"probability of any outcome by a factor of at most {shown(factor)}, up to {delta} in absolute terms."
    )


def _facts(report: "PrivacyReport") -> list[tuple[str, str]]:
    facts = [
        ("Data set", report.dataset_id or "not named"),
        ("Unit of privacy", _UNITS[report.neighboring_relation]),
        ("Adjacency", report.neighboring_relation.replace("_", " ")),
        ("Epsilon spent", f"{shown(report.epsilon)} at delta {report.delta:g}"),
    ]
    if math.isfinite(report.epsilon):
        facts += _attack_facts(report)
    if report.budget_left is not None:
        facts.append(
            ("Budget", f"{report.budget_epsilon:g} in total, {_left(report.budget_left)} left")
        )
    if report.ledger_budget is not None:
        facts.append(("Ledger's budget", _budget_text(report.ledger_budget)))
    grid = (
        " in closed form"
        if report.grid_spacing is None
        else f", composed on a grid of {report.grid_spacing:g}"
    )
    facts.append(
        ("Accounting", _ACCOUNTANTS.get(report.accountant, report.accountant).format(grid=grid))
    )
    released = f"{report.num_releases:,} noisy sums"
    if report.unconfirmed_steps:
        released += f" (of which {report.unconfirmed_steps:,} were reserved but not confirmed; they count as released)"
    return [*facts, ("Releases so far", released)]


def _attack_facts(report: "PrivacyReport") -> list[tuple[str, str]]:
    gaussian = (
        f"mu {shown(report.mu)}: at every delta of at least {report.delta:g}, epsilon is at most "
        "that of Gaussian differential privacy with this mu"
    )
    source = _ADVANTAGES.get(report.accountant, _OTHER_ADVANTAGES)
    facts = [
        ("Gaussian DP", gaussian),
        (
            "Advantage",
            f"{shown(report.advantage)} at most: true minus false positive rate of any attacker; "
            f"{source}",
        ),
    ]
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
        f"{total}, adaptive: it covers settings chosen after looking at earlier results, by a Renyi filter: at order "
        f"{budget['order']:g} divergences add up to {up(budget['spent'], 6)} of at most "
        f"{down(budget['limit'], 6)}, which leave an attacker an advantage of at most "
        f"{up(budget['advantage'], 3)}"
    )


def _releases(report: "PrivacyReport") -> list[tuple[str, str]]:
    facts = []
    for i, run in enumerate(report.releases, 1):
        part = "" if len(report.releases) == 1 else f", part {i}"
        clip = run["l2_norm_clip"]
        what = run.get("purpose", f"{run['num_releases']:,} steps")
        bound = "a fixed bound" if clip is None else f"length {clip:g}"
        text = (
            f"{what}; {run['sampling_description']}; each record's contribution "
            f"clipped to {bound}; Gaussian noise of {down(run['noise_multiplier'], 6)} times that bound"
        )
        if run["sensitivity"] != dataclasses.asdict(PER_RECORD_CLIP):
            presence, replacement = (
                up(run["sensitivity"][of], 6) for of in ("add_or_remove", "replace")
            )
            text += (
                f", times each part's scale; over these scales one record's presence moves what is released by up to {presence} "
                f"times that bound, its replacement by up to {replacement} times"
            )
        if run.get("randomness") == "secure":
            text += f"; noise, and samples that fit drew itself, {_SECURE}"
        facts += [(f"How{part}", text), (f"Event{part}", run["dp_event"])]
    if names := dict.fromkeys(name for run in report.releases for name in run.get("metrics", ())):
        facts.append(
            ("Metrics", f"{', '.join(names)}: privatised, released with the steps and included")
        )
    return facts


def _wrapped(text: str, first: str, rest: str) -> list[str]:
    return textwrap.wrap(text, width=96, initial_indent=first, subsequent_indent=rest)


def _left(value: float) -> str:
    return down(value, 3) if value else "nothing"


def shown(value: float, digits: int = 3) -> str:
    """Returns an epsilon as text, rounded up."""
    return "infinity" if math.isinf(value) else up(value, digits)


def up(value: float, digits: int) -> str:
    """Returns a number as text, rounded up to some significant digits: epsilon must not be understated."""
    return _rounded(value, digits, decimal.ROUND_CEILING)


def down(value: float, digits: int) -> str:
    """Returns a number as text, rounded down to some significant digits."""
    return _rounded(value, digits, decimal.ROUND_FLOOR)


def _rounded(value: float, digits: int, rounding: str) -> str:
    return (
        f"{float(decimal.Context(digits, rounding).create_decimal(repr(float(value)))):.{digits}g}"
    )
