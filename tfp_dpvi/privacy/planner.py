"""The privacy cost of a fit, without data: `python -m tfp_dpvi.privacy plan`."""

import contextlib
import dataclasses
import math
import textwrap
from collections.abc import Iterator

from dp_accounting import NeighboringRelation

from tfp_dpvi import _validate as check
from tfp_dpvi.privacy import accountants
from tfp_dpvi.privacy.errors import BudgetExhaustedError
from tfp_dpvi.privacy.plan import PrivacyPlan
from tfp_dpvi.privacy.report import finite, plain_words, shown, size_warnings
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
    """The noise and epsilon of one variation of a plan.

    Attributes:
      what: The variation, in words.
      noise_multiplier: Its noise multiplier; None if it is not supported.
      epsilon: Its epsilon; None if it is not supported.
      note: A remark for the reader.
    """

    what: str
    noise_multiplier: float | None
    epsilon: float | None
    note: str = ""


@dataclasses.dataclass(frozen=True)
class PrivacyOutlook:
    """A plan, its cost by every accountant and neighboring relation, and the effect of changes.

    Attributes:
      plan: The requested plan, with its noise multiplier.
      epsilon: Its epsilon by its own accountant.
      delta: The delta of epsilon.
      mu: Mu of Gaussian differential privacy at every delta from `delta`; see `AttackBound`.
      advantage: The advantage of an attacker who wants to know of one record; see `AttackBound`.
      num_records: The number of records.
      batch_size: The expected batch size.
      epochs: The number of epochs of ceil(num_records / batch_size) steps each, as in `fit`.
      side_by_side: The same noise by every accountant and neighboring relation.
      changes: Other choices, at the same epsilon if there was a target, else at the same noise.
      target_epsilon: The epsilon that the noise was calibrated to; None if the noise was an
        argument.
      warnings: Warnings for the reader.
    """

    plan: PrivacyPlan
    epsilon: float
    delta: float
    mu: float
    advantage: float
    num_records: int
    batch_size: int
    epochs: float
    side_by_side: tuple[Price, ...]
    changes: tuple[Price, ...]
    target_epsilon: float | None
    warnings: tuple[str, ...]

    def to_json(self) -> Json:
        """Returns a JSON-ready dictionary; an infinite epsilon is the string "inf"."""
        plan = self.plan.to_json()
        names = ("noise_multiplier", "accountant", "neighboring_relation", "num_releases")
        chosen = {name: plan[name] for name in names} | {
            "sampling": self.plan.sampling.name,
            "plan": plan,
        }
        data = {**dataclasses.asdict(self), **chosen, "mu": finite(self.mu)}
        for price in (data, *data["side_by_side"], *data["changes"]):
            price["epsilon"] = finite(price["epsilon"])
        return {"schema_version": OUTLOOK_SCHEMA_VERSION, **data}

    def __str__(self) -> str:
        plan = self.plan
        kept = "noise" if self.target_epsilon is None else f"epsilon {self.target_epsilon:g}"
        lines = [
            f"{self.num_records:,} records, expected batch size {self.batch_size:,}, "
            f"{plan.num_releases:,} steps ({self.epochs:.4g} epochs)",
            plan.sampling.describe(),
            "",
            f"noise multiplier {plan.noise_multiplier:.5g} (standard deviation of the noise over "
            "l2_norm_clip)",
            f"epsilon {shown(self.epsilon, 4)} at delta {self.delta:g}, accountant "
            f"{plan.accountant}, adjacency {plan.neighboring_relation.name.lower()}",
            *self._attack_lines(),
            "",
            "With this noise, by accountant and adjacency:",
            *(_row(p) for p in self.side_by_side),
            "",
            f"Other choices, {kept} kept:",
            *(_row(p) for p in self.changes),
        ]
        for warning in self.warnings:
            lines += ["", f"WARNING: {warning}"]
        return "\n".join(lines)

    def _attack_lines(self) -> list[str]:
        if math.isinf(self.epsilon):
            return []
        relation = self.plan.neighboring_relation.name.lower()
        return [
            f"mu {shown(self.mu, 4)} of Gaussian differential privacy, at every delta of at least "
            f"{self.delta:g}",
            f"advantage of an attacker at most {shown(self.advantage, 4)}",
            *textwrap.wrap(plain_words(self.advantage, relation), 96),
        ]


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
      num_records: The public number of records.
      batch_size: The expected batch size.
      delta: Strictly between 0 and 1.
      epochs: The number of passes of ceil(num_records / batch_size) steps each. Pass it or `steps`.
      steps: The number of steps.
      epsilon: The epsilon that the noise is calibrated to. Pass it or `noise_multiplier`.
      noise_multiplier: The noise's standard deviation over `l2_norm_clip`.
      neighboring_relation: The relation of data sets that the guarantee compares.
      accountant: The name of an accountant; by default "pld", and "rdp" for fixed-size sampling.
      sampling: One of `SAMPLINGS`.

    Returns:
      The plan, its cost and the effect of changes.

    Raises:
      TypeError, ValueError: An argument is wrong; the message has the fix.
      UnsupportedPairError: The accountant does not support the sampling under the neighboring
        relation.
    """
    records = check.count("num_records", num_records, 1)
    batch = check.count("batch_size", batch_size, 1)
    if batch > records:
        raise ValueError(
            f"batch_size={batch} exceeds num_records={records}; pass at most the number of records."
        )
    if (epochs is None) == (steps is None):
        raise ValueError(f"epochs={epochs!r} and steps={steps!r}: pass exactly one of them.")
    if (epsilon is None) == (noise_multiplier is None):
        raise ValueError(
            f"epsilon={epsilon!r} and noise_multiplier={noise_multiplier!r}: pass exactly one of "
            "them."
        )
    per_epoch = -(-records // batch)
    delta = check.delta(delta)
    target = None if epsilon is None else check.epsilon(epsilon)
    if epochs is None:
        num_releases = check.count("steps", steps, 1)
    else:
        num_releases = check.count("epochs", epochs, 1) * per_epoch
    draft = PrivacyPlan(
        _scheme(check.one_of("sampling", sampling, SAMPLINGS), records, batch),
        1.0 if noise_multiplier is None else noise_multiplier,
        num_releases,
        check.relation(neighboring_relation),
        accountant=accountant or ("rdp" if sampling == "fixed_size" else "pld"),
        num_records=records,
    )
    plan = _meeting(target, draft, delta)
    spent = plan.epsilon(delta)
    bound = plan.attack_bound(delta)
    return PrivacyOutlook(
        plan=plan,
        epsilon=spent,
        delta=delta,
        mu=bound.mu,
        advantage=bound.advantage,
        num_records=records,
        batch_size=batch,
        epochs=plan.num_releases / per_epoch,
        side_by_side=tuple(_side_by_side(plan, delta)),
        changes=tuple(
            _price(target, draft, delta, *change)
            for change in _changes(draft, sampling, records, batch)
        ),
        target_epsilon=target,
        warnings=tuple(size_warnings(spent, delta, records)),
    )


def _scheme(sampling: str, records: int, batch: int) -> SamplingScheme:
    if sampling == "full_batch" or (sampling == "poisson" and batch == records):
        return FullBatch()
    if sampling == "poisson":
        return PoissonSampling(batch / records)
    if sampling == "fixed_size":
        return FixedSizeSampling(records, batch)
    return EachRecordOncePerEpoch(-(-records // batch))


def _meeting(target: float | None, draft: PrivacyPlan, delta: float) -> PrivacyPlan:
    return draft if target is None else draft.calibrated(target, delta)


def _price(
    target: float | None, draft: PrivacyPlan, delta: float, what: str, note: str, changes: Json
) -> Price:
    try:
        plan = _meeting(target, draft.replace(**changes), delta)
        return Price(what, plan.noise_multiplier, plan.epsilon(delta), note)
    except (ValueError, BudgetExhaustedError):
        # A ValueError may be an UnsupportedPairError, or a delta too small for PLD.
        return Price(what, None, None, "has no price")


def _side_by_side(plan: PrivacyPlan, delta: float) -> list[Price]:
    prices = []
    for relation in (_ADD, _REPLACE):
        for name in accountants.ACCOUNTANTS:
            what = f"{name}, {relation.name.lower()}"
            epsilon, note = None, "has no price"
            # A ValueError may be an UnsupportedPairError, or a delta too small for PLD.
            with contextlib.suppress(ValueError):
                variation = plan.replace(neighboring_relation=relation, accountant=name)
                epsilon = variation.epsilon(delta)
                failed = math.isinf(epsilon) and plan.noise_multiplier
                note = "its bound does not hold here" if failed else ""
            prices.append(Price(what, plan.noise_multiplier, epsilon, note))
    return prices


def _changes(
    draft: PrivacyPlan, sampling: str, records: int, batch: int
) -> Iterator[tuple[str, str, Json]]:
    """Yields a change in words, a note, and the attributes of the plan that change."""
    half: Json = {"num_releases": -(-draft.num_releases // 2)}
    if 2 * batch <= records:
        doubled = f"batch size {2 * batch:,}, same number of"
        scheme: Json = {"sampling": _scheme(sampling, records, 2 * batch)}
        yield f"{doubled} steps", "", scheme
        if draft.num_releases >= 2:
            yield f"{doubled} epochs", "", scheme | half
    if draft.num_releases >= 2:
        yield "half the steps", "", half
    if sampling in ("poisson", "fixed_size"):
        note = "your own batches, each record at most once per epoch"
        own = {
            "sampling": EachRecordOncePerEpoch(-(-records // batch)),
            "neighboring_relation": _REPLACE,
        }
        yield "no amplification (replace_one, own batches)", note, own
    other = _ADD if draft.neighboring_relation is _REPLACE else _REPLACE
    yield f"adjacency {other.name.lower()}", "", {"neighboring_relation": other}


def _row(price: Price) -> str:
    if price.epsilon is None:
        return f"  {price.what:<48} {price.note}"
    note = f"  ({price.note})" if price.note else ""
    epsilon = f"epsilon {shown(price.epsilon, 4)}"
    return f"  {price.what:<48} noise multiplier {price.noise_multiplier:<9.5g} {epsilon}{note}"
