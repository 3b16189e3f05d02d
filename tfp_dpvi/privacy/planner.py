"""The privacy cost of a fit, without data: `python -m tfp_dpvi.privacy plan`."""

import contextlib
import dataclasses
import math
from typing import Any

from dp_accounting import NeighboringRelation

from tfp_dpvi import _validate as check
from tfp_dpvi.privacy import accountants
from tfp_dpvi.privacy.curve import EpsilonCurve
from tfp_dpvi.privacy.errors import BudgetExhaustedError
from tfp_dpvi.privacy.plan import PrivacyPlan
from tfp_dpvi.privacy.report import finite
from tfp_dpvi.privacy.report_text import shown, size_warnings
from tfp_dpvi.privacy.sampling import (
    EachRecordOncePerEpoch,
    FixedSizeSampling,
    FullBatch,
    PoissonSampling,
    SamplingScheme,
)
from tfp_dpvi.privacy.sensitivity import Json

OUTLOOK_SCHEMA_VERSION = 1
SAMPLINGS = ("poisson", "fixed_size", "full_batch", "each_record_once_per_epoch")
_ADD, _REPLACE = NeighboringRelation.ADD_OR_REMOVE_ONE, NeighboringRelation.REPLACE_ONE


@dataclasses.dataclass(frozen=True)
class Price:
    """The noise and epsilon of one variation of a plan; epsilon is None if it is not supported."""

    what: str
    noise_multiplier: float | None
    epsilon: float | None
    note: str = ""


@dataclasses.dataclass(frozen=True)
class PrivacyOutlook:
    """A plan, its cost by every accountant and neighboring relation, and the effect of changes.

    Attributes:
      plan: the requested plan, with its noise multiplier.
      epsilon: its epsilon by its own accountant.
      delta: the delta of all epsilons.
      num_records: N.
      batch_size: the (expected) batch size.
      epochs: passes over the records, of ceil(N / batch_size) steps each, as in `fit`.
      side_by_side: the same noise by every accountant and neighboring relation.
      changes: other choices, at the same epsilon if that was an argument, else at the same noise.
      target_epsilon: the requested epsilon, or None.
      warnings: warnings for the reader.
    """

    plan: PrivacyPlan
    epsilon: float
    delta: float
    num_records: int
    batch_size: int
    epochs: float
    side_by_side: tuple[Price, ...]
    changes: tuple[Price, ...]
    target_epsilon: float | None
    warnings: tuple[str, ...]

    def curve(self) -> EpsilonCurve:
        """Returns epsilon over the steps of the plan."""
        return EpsilonCurve(self.plan, (), self.delta)

    @property
    def noise_text(self) -> str:
        """The noise as text."""
        return f"noise multiplier {self.plan.noise_multiplier:.5g}"

    def to_json(self) -> Json:
        """Returns a JSON-ready dictionary; an infinite epsilon is the string "inf"."""
        plan = self.plan.to_json()
        chosen = {
            name: plan[name] for name in ("noise_multiplier", "accountant", "neighboring_relation", "num_releases")
        }
        data = {**dataclasses.asdict(self), **chosen, "sampling": self.plan.sampling.name, "plan": plan}
        for price in (data, *data["side_by_side"], *data["changes"]):
            price["epsilon"] = finite(price["epsilon"])
        return {"schema_version": OUTLOOK_SCHEMA_VERSION, **data}

    def __str__(self) -> str:
        plan = self.plan
        lines = [
            f"{self.num_records:,} records, expected batch size {self.batch_size:,}, {plan.num_releases:,} steps "
            f"({self.epochs:.4g} epochs)",
            plan.sampling.describe(),
            "",
            f"{self.noise_text} (standard deviation of the noise over l2_norm_clip)",
            f"epsilon {shown(self.epsilon, 4)} at delta {self.delta:g}, accountant {plan.accountant}, adjacency "
            f"{plan.neighboring_relation.name.lower()}",
            "",
            "With this noise, by accountant and adjacency:",
            *(_row(p) for p in self.side_by_side),
            "",
            "Other choices, "
            + (f"epsilon {self.target_epsilon:g} kept:" if self.target_epsilon is not None else "noise kept:"),
            *(_row(p) for p in self.changes),
        ]
        for warning in self.warnings:
            lines += ["", f"WARNING: {warning}"]
        return "\n".join(lines)


def plan_privacy(
    *,
    num_records: int,
    batch_size: int,
    delta: float,
    epochs: int | None = None,
    steps: int | None = None,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    neighboring_relation: NeighboringRelation | str = NeighboringRelation.ADD_OR_REMOVE_ONE,
    accountant: str | None = None,
    sampling: str = "poisson",
) -> PrivacyOutlook:
    """Plans a fit without data.

    Args:
      num_records: the public N.
      batch_size: the expected batch size.
      delta: the delta of all epsilons.
      epochs: passes over the data; T = epochs x ceil(N / batch_size) steps.
      steps: the number of steps, instead of `epochs`.
      epsilon: the target epsilon, to which the noise is calibrated.
      noise_multiplier: the noise multiplier, instead of `epsilon`.
      neighboring_relation: the neighboring relation.
      accountant: "pld", "rdp" or "advanced_composition"; by default "pld", and "rdp" for fixed-size sampling.
      sampling: "poisson", "fixed_size", "full_batch" or "each_record_once_per_epoch".

    Raises:
      TypeError, ValueError: bad arguments; the message has the fix.
      UnsupportedPairError: an unsupported pair of sampling and neighboring relation.
    """
    records, batch = check.count("num_records", num_records, 1), check.count("batch_size", batch_size, 1)
    if batch > records:
        raise ValueError(f"batch_size={batch} exceeds num_records={records}; pass at most the number of records.")
    if (epochs is None) == (steps is None):
        raise ValueError(f"epochs={epochs!r} and steps={steps!r}: pass exactly one of them.")
    if (epsilon is None) == (noise_multiplier is None):
        raise ValueError(f"epsilon={epsilon!r} and noise_multiplier={noise_multiplier!r}: pass exactly one of them.")
    per_epoch = -(-records // batch)
    question = _Question(
        records=records,
        batch=batch,
        total=check.count("steps", steps, 1) if epochs is None else check.count("epochs", epochs, 1) * per_epoch,
        sampling=check.one_of("sampling", sampling, SAMPLINGS),
        delta=check.delta(delta),
        epsilon=None if epsilon is None else check.epsilon(epsilon),
        noise=1.0 if noise_multiplier is None else check.non_negative("noise_multiplier", noise_multiplier),
        relation=check.relation(neighboring_relation),
        accountant=accountant or ("rdp" if sampling == "fixed_size" else "pld"),
    )
    plan = question.plan()
    found = plan.epsilon(delta)
    return PrivacyOutlook(
        plan=plan,
        epsilon=found,
        delta=question.delta,
        num_records=records,
        batch_size=batch,
        epochs=question.total / per_epoch,
        side_by_side=tuple(_side_by_side(plan, question.delta)),
        changes=tuple(_changes(question)),
        target_epsilon=question.epsilon,
        warnings=tuple(size_warnings(found, question.delta, records)),
    )


@dataclasses.dataclass(frozen=True)
class _Question:
    records: int
    batch: int
    total: int
    sampling: str
    delta: float
    epsilon: float | None
    noise: float
    relation: NeighboringRelation
    accountant: str

    def scheme(self) -> SamplingScheme:
        if self.sampling == "full_batch" or (self.sampling == "poisson" and self.batch == self.records):
            return FullBatch()
        if self.sampling == "poisson":
            return PoissonSampling(self.batch / self.records)
        if self.sampling == "fixed_size":
            return FixedSizeSampling(self.records, self.batch)
        return EachRecordOncePerEpoch(-(-self.records // self.batch))

    def plan(self) -> PrivacyPlan:
        draft = PrivacyPlan(
            self.scheme(), self.noise, self.total, self.relation, accountant=self.accountant, num_records=self.records
        )
        return draft if self.epsilon is None else draft.calibrated(self.epsilon, self.delta)

    def price(self, what: str, note: str = "", **changes: Any) -> Price:
        try:
            plan = dataclasses.replace(self, **changes).plan()
            return Price(what, plan.noise_multiplier, plan.epsilon(self.delta), note)
        except (ValueError, BudgetExhaustedError):  # Includes UnsupportedPairError and a delta too small for PLD.
            return Price(what, None, None, "has no price")


def _side_by_side(plan: PrivacyPlan, delta: float) -> list[Price]:
    prices = []
    for relation in (_ADD, _REPLACE):
        for name in accountants.ACCOUNTANTS:
            found, note = None, "has no price"
            with contextlib.suppress(ValueError):  # UnsupportedPairError, or a delta too small for PLD.
                found = plan.replace(neighboring_relation=relation, accountant=name).epsilon(delta)
                note = "its bound does not hold here" if math.isinf(found) and plan.noise_multiplier else ""
            prices.append(Price(f"{name}, {relation.name.lower()}", plan.noise_multiplier, found, note))
    return prices


def _changes(question: _Question) -> list[Price]:
    batch, half, prices = question.batch, -(-question.total // 2), []
    if 2 * batch <= question.records:
        doubled = f"batch size {2 * batch:,}, same number of"
        prices.append(question.price(f"{doubled} steps", batch=2 * batch))
        if question.total >= 2:
            prices.append(question.price(f"{doubled} epochs", batch=2 * batch, total=half))
    if question.total >= 2:
        prices.append(question.price("half the steps", total=half))
    if question.sampling in ("poisson", "fixed_size"):
        note = "your own batches, each record at most once per epoch"
        own = {"sampling": "each_record_once_per_epoch", "relation": _REPLACE}
        prices.append(question.price("no amplification (replace_one, own batches)", note, **own))
    other = _ADD if question.relation is _REPLACE else _REPLACE
    return [*prices, question.price(f"adjacency {other.name.lower()}", relation=other)]


def _row(price: Price) -> str:
    if price.epsilon is None:
        return f"  {price.what:<48} {price.note}"
    noise = "" if price.noise_multiplier is None else f"noise multiplier {price.noise_multiplier:<9.5g}"
    note = f"  ({price.note})" if price.note else ""
    return f"  {price.what:<48} {noise} epsilon {shown(price.epsilon, 4)}{note}"
