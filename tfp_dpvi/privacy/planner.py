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
    """The noise and epsilon of one variation of a plan; epsilon is None if it is not supported."""

    what: str
    noise_multiplier: float | None
    epsilon: float | None
    note: str = ""


@dataclasses.dataclass(frozen=True)
class PrivacyOutlook:
    """A plan, its cost by every accountant and neighboring relation, and the effect of changes."""

    plan: PrivacyPlan  # The requested plan, with its noise multiplier.
    epsilon: float  # By the plan's own accountant.
    delta: float
    mu: float  # Of Gaussian differential privacy, at every delta from `delta`: see `AttackBound`.
    advantage: float  # Of an attacker who wants to know of one record.
    num_records: int
    batch_size: int
    epochs: float  # Of ceil(N / batch_size) steps each, as in `fit`.
    side_by_side: tuple[Price, ...]  # The same noise by every accountant and neighboring relation.
    changes: tuple[
        Price, ...
    ]  # Other choices, at the same epsilon if that was an argument, else at the same noise.
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
            f"{self.num_records:,} records, expected batch size {self.batch_size:,}, {plan.num_releases:,} steps "
            f"({self.epochs:.4g} epochs)",
            plan.sampling.describe(),
            "",
            f"noise multiplier {plan.noise_multiplier:.5g} (standard deviation of the noise over l2_norm_clip)",
            f"epsilon {shown(self.epsilon, 4)} at delta {self.delta:g}, accountant {plan.accountant}, adjacency "
            f"{plan.neighboring_relation.name.lower()}",
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
    """Plans a fit without data: of `epochs` passes, each of ceil(num_records / batch_size) steps, or of `steps`.

    The noise is calibrated to `epsilon`, or is `noise_multiplier`. The accountant is by default "pld", and "rdp" for fixed-size
    sampling; `sampling` is one of `SAMPLINGS`.

    Raises:
      TypeError, ValueError: bad arguments; the message has the fix.
      UnsupportedPairError: an unsupported pair of sampling and neighboring relation.
    """
    records, batch = (
        check.count("num_records", num_records, 1),
        check.count("batch_size", batch_size, 1),
    )
    if batch > records:
        raise ValueError(
            f"batch_size={batch} exceeds num_records={records}; pass at most the number of records."
        )
    if (epochs is None) == (steps is None):
        raise ValueError(f"epochs={epochs!r} and steps={steps!r}: pass exactly one of them.")
    if (epsilon is None) == (noise_multiplier is None):
        raise ValueError(
            f"epsilon={epsilon!r} and noise_multiplier={noise_multiplier!r}: pass exactly one of them."
        )
    per_epoch, delta = -(-records // batch), check.delta(delta)
    target = None if epsilon is None else check.epsilon(epsilon)
    draft = PrivacyPlan(
        _scheme(check.one_of("sampling", sampling, SAMPLINGS), records, batch),
        1.0 if noise_multiplier is None else noise_multiplier,
        check.count("steps", steps, 1)
        if epochs is None
        else check.count("epochs", epochs, 1) * per_epoch,
        check.relation(neighboring_relation),
        accountant=accountant or ("rdp" if sampling == "fixed_size" else "pld"),
        num_records=records,
    )
    plan = _meeting(target, draft, delta)
    found = plan.epsilon(delta)
    bound = plan.attack_bound(delta)
    return PrivacyOutlook(
        plan=plan,
        epsilon=found,
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
        warnings=tuple(size_warnings(found, delta, records)),
    )


def _scheme(sampling: str, records: int, batch: int) -> SamplingScheme:
    if sampling == "full_batch" or (sampling == "poisson" and batch == records):
        return FullBatch()
    if sampling == "poisson":
        return PoissonSampling(batch / records)
    return (
        FixedSizeSampling(records, batch)
        if sampling == "fixed_size"
        else EachRecordOncePerEpoch(-(-records // batch))
    )


def _meeting(target: float | None, draft: PrivacyPlan, delta: float) -> PrivacyPlan:
    return draft if target is None else draft.calibrated(target, delta)


def _price(
    target: float | None, draft: PrivacyPlan, delta: float, what: str, note: str, changes: Json
) -> Price:
    try:
        plan = _meeting(target, draft.replace(**changes), delta)
        return Price(what, plan.noise_multiplier, plan.epsilon(delta), note)
    except (
        ValueError,
        BudgetExhaustedError,
    ):  # Includes UnsupportedPairError and a delta too small for PLD.
        return Price(what, None, None, "has no price")


def _side_by_side(plan: PrivacyPlan, delta: float) -> list[Price]:
    prices = []
    for relation in (_ADD, _REPLACE):
        for name in accountants.ACCOUNTANTS:
            found, note = None, "has no price"
            with contextlib.suppress(
                ValueError
            ):  # UnsupportedPairError, or a delta too small for PLD.
                found = plan.replace(neighboring_relation=relation, accountant=name).epsilon(delta)
                note = (
                    "its bound does not hold here"
                    if math.isinf(found) and plan.noise_multiplier
                    else ""
                )
            prices.append(
                Price(f"{name}, {relation.name.lower()}", plan.noise_multiplier, found, note)
            )
    return prices


def _changes(
    draft: PrivacyPlan, sampling: str, records: int, batch: int
) -> Iterator[tuple[str, str, Json]]:
    """Yields what is changed, a note, and the attributes of the plan that change."""
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
