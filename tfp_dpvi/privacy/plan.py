"""`PrivacyPlan`: the privacy parameters of a fit, as a frozen value."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import dp_accounting
from dp_accounting import DpEvent, NeighboringRelation

from tfp_dpvi import _validate as check
from tfp_dpvi.privacy import accountants, calibration
from tfp_dpvi.privacy.errors import BudgetExhaustedError
from tfp_dpvi.privacy.sampling import FullBatch, SamplingScheme, scheme_from_json
from tfp_dpvi.privacy.sensitivity import PER_RECORD_CLIP, Json, Sensitivity
from tfp_dpvi.privacy.tradeoff import AttackBound

PLAN_SCHEMA_VERSION = 1
_SOMETIMES = ("purpose", "metrics", "randomness")
#: What epsilon depends on, which is never left to a default.
_NEEDED = (
    "sampling", "noise_multiplier", "num_releases", "neighboring_relation", "sensitivity", "accountant",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class PrivacyPlan:
    """Sampling scheme, mechanism, number of releases and neighboring relation of a fit.

    Formal guarantee: if `num_releases` sums are released, each of per-record contributions clipped so that `sensitivity`
    holds, drawn by `sampling`, plus Gaussian noise of standard deviation `noise_multiplier * l2_norm_clip` on every
    coordinate, fresh in every release, then all releases and everything computed from them are
    (`epsilon(delta)`, delta)-differentially private under `neighboring_relation`. Releases may depend on earlier ones.

    The attributes after `accountant` serve the report alone.

    Under "add_or_remove_one" the guarantee is about whether a record takes part. A change of an
    attribute, such as a label, replaces a record: for it the releases are only
    (2 epsilon, (1 + exp(epsilon)) delta)-differentially private, and "replace_one" is the relation to
    account under (Pradhan et al. 2025, arXiv:2511.21804). The number of records is taken as public.
    Where it is counted from the records, as `len(x)` by default in `fit`, it is not itself protected
    under "add_or_remove_one" (see arXiv:2605.15648): declare one that is public with `num_records`.
    """

    sampling: SamplingScheme  # Of each release's records.
    #: The noise's standard deviation over `l2_norm_clip`, under every relation; 0 is no privacy.
    noise_multiplier: float
    num_releases: int
    neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE
    sensitivity: Sensitivity = (
        PER_RECORD_CLIP  # Of the sum to one record, in units of `l2_norm_clip` (contract C3).
    )
    accountant: str = "pld"
    l2_norm_clip: float | None = None
    num_records: int | None = None  # As declared.
    purpose: str | None = None  # What is released if not training steps: "means of 3 columns".
    metrics: tuple[
        str, ...
    ] = ()  # Names of the privatised metrics that are released with each step.
    #: "secure" for noise, and samples that `fit` draws itself, from a cryptographic generator.
    randomness: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.sampling, SamplingScheme):
            raise TypeError(
                f"sampling={check.shown(self.sampling)} is not a sampling scheme; pass, for "
                "example, PoissonSampling(q) or FullBatch()."
            )
        if not isinstance(self.sensitivity, Sensitivity):
            raise TypeError(
                f"sensitivity={check.shown(self.sensitivity)} is not a Sensitivity; pass "
                "Sensitivity(A, D)."
            )
        put = object.__setattr__
        put(self, "noise_multiplier", check.non_negative("noise_multiplier", self.noise_multiplier))
        put(self, "num_releases", check.count("num_releases", self.num_releases))
        put(self, "neighboring_relation", check.relation(self.neighboring_relation))
        if self.l2_norm_clip is not None:
            put(self, "l2_norm_clip", check.positive("l2_norm_clip", self.l2_norm_clip))
        if self.num_records is not None:
            put(self, "num_records", check.count("num_records", self.num_records, 1))
        names = self.metrics
        if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
            raise TypeError(f"metrics={check.shown(names)} are no names; pass a tuple of strings.")
        put(self, "metrics", tuple(names))
        check.one_of("randomness", self.randomness, ("", "secure"))
        if self.purpose is not None:
            check.text("purpose", self.purpose, "describe the release, or leave it out")
        self.sampling.check_relation(self.neighboring_relation)
        single = self.sampling.dp_event(dp_accounting.GaussianDpEvent(1.0), 1)
        accountants.get_accountant(self.accountant).releases(single, self.neighboring_relation)

    @property
    def dp_event(self) -> DpEvent:
        """The event of all releases (convention: see `tfp_dpvi.privacy.accountants`)."""
        return self.event_of(self.num_releases)

    def event_of(self, num_releases: int) -> DpEvent:
        """Returns the event of the first `num_releases` releases."""
        num_releases = check.count("num_releases", num_releases)
        if num_releases == 0:
            return dp_accounting.NoOpDpEvent()
        if self.noise_multiplier == 0.0:
            return dp_accounting.NonPrivateDpEvent()
        unit = self.sampling.unit_sensitivity(self.sensitivity, self.neighboring_relation)
        return self.sampling.dp_event(
            dp_accounting.GaussianDpEvent(self.noise_multiplier / unit), num_releases
        )

    def epsilon(self, delta: float, prior_events: Sequence[DpEvent] = ()) -> float:
        """Returns epsilon at `delta` of all releases, after `prior_events`; inf without noise."""
        price = accountants.get_accountant(self.accountant)
        return price.epsilon(compose(prior_events, self.dp_event), delta, self.neighboring_relation)

    def attack_bound(self, delta: float) -> AttackBound:
        """Returns mu of Gaussian differential privacy and the advantage of an attacker.

        Args:
          delta: the smallest delta for which mu is to hold; the advantage does not depend on it.

        Returns:
          The bound for all releases, from the same accounting as `epsilon(delta)`.

        Example:
          >>> plan = PrivacyPlan(FullBatch(), noise_multiplier=4.0, num_releases=1)
          >>> plan.attack_bound(1e-5).mu
          0.25
        """
        price = accountants.get_accountant(self.accountant)
        return price.attack_bound(self.dp_event, delta, self.neighboring_relation)

    def replace(self, **changes: Any) -> "PrivacyPlan":
        """Returns a copy with some attributes changed."""
        return dataclasses.replace(self, **changes)

    @classmethod
    def calibrate(
        cls,
        *,
        epsilon: float,
        delta: float,
        prior_events: Sequence[DpEvent] = (),
        **attributes: Any,
    ) -> "PrivacyPlan":
        """Returns the plan with these attributes and the smallest noise multiplier that meets a budget.

        The total of `prior_events` (earlier releases on the same data under the same neighboring relation) and this plan, by
        `epsilon()`, is at most `epsilon` at `delta`, and uses at least 99.8 % of the budget that the prior events leave.
        `attributes` are at least `sampling` and `num_releases` (>= 1), without the noise multiplier.

        Raises:
          BudgetExhaustedError: the prior events use up the budget.
          UnsupportedPairError: sampling scheme and neighboring relation are not supported.
        """
        check.count("num_releases", attributes.get("num_releases"), 1)
        return cls(noise_multiplier=1.0, **attributes).calibrated(epsilon, delta, prior_events)

    def calibrated(
        self, epsilon: float, delta: float, prior_events: Sequence[DpEvent] = ()
    ) -> "PrivacyPlan":
        """Returns this plan with the smallest noise multiplier that meets a budget; see `calibrate`."""
        epsilon, delta = check.epsilon(epsilon), check.delta(delta)
        spent = self.replace(num_releases=0).epsilon(delta, prior_events) if prior_events else 0.0
        if spent >= epsilon:
            raise BudgetExhaustedError(
                f"epsilon={epsilon:.6g} at delta={delta:g} is used up: {spent:.6g} was spent before; this call spent no privacy."
            )
        q = getattr(self.sampling, "probability", 1.0)
        replace = self.neighboring_relation is NeighboringRelation.REPLACE_ONE
        unit = self.sampling.unit_sensitivity(self.sensitivity, self.neighboring_relation)
        guess = unit * calibration.guess_noise_multiplier(
            epsilon - spent, delta, q, self.num_releases, replace
        )

        def epsilon_of(z: float) -> float:
            return self.replace(noise_multiplier=z).epsilon(delta, prior_events)

        found = calibration.smallest_noise_multiplier(epsilon_of, epsilon, spent, guess)
        return self.replace(noise_multiplier=found)

    def to_json(self) -> Json:
        """Returns a JSON-ready dictionary from which `from_json` rebuilds an equal plan."""
        data = {
            "schema_version": PLAN_SCHEMA_VERSION,
            **dataclasses.asdict(self),
            "sampling": self.sampling.to_json(),
            "neighboring_relation": self.neighboring_relation.name.lower(),
            "metrics": list(self.metrics),
        }
        # Omitted for training plans, so that every version can read them.
        return {name: value for name, value in data.items() if value or name not in _SOMETIMES}

    @property
    def deviation(self) -> float:
        """The standard deviation of the noise on every coordinate, `noise_multiplier * l2_norm_clip`."""
        assert self.l2_norm_clip is not None, "a plan without a clip has no unit"
        return self.noise_multiplier * self.l2_norm_clip

    @classmethod
    def from_json(cls, data: Json) -> "PrivacyPlan":
        """Rebuilds a plan from `to_json`.

        Args:
          data: a JSON object, as `json.loads` returns it.

        Returns:
          The plan. What its privacy depends on must all be there; fields for the report alone may be missing.

        Raises:
          TypeError: a field has a value of another type.
          ValueError: an unknown schema version, a field that is missing, unknown or out of its range, or no JSON object.
        """
        fields = check.fields("a privacy plan", data)
        version = fields.pop("schema_version", None)
        if type(version) is not int or version != PLAN_SCHEMA_VERSION:
            raise ValueError(
                f"schema_version={version!a:.99} of a privacy plan: read it with the tfp_dpvi that wrote it."
            )
        fields.pop("gradient_sensitivity", None)  # Of earlier versions.
        known = [field.name for field in dataclasses.fields(cls)]
        fields = check.fields("a privacy plan", fields, needed=_NEEDED, known=known)
        fields["sampling"] = scheme_from_json(fields["sampling"])
        needed = [field.name for field in dataclasses.fields(Sensitivity)]
        fields["sensitivity"] = Sensitivity(
            **check.fields("sensitivity", fields["sensitivity"], needed=needed, known=needed)
        )
        return cls(**fields)


def plan_counts(
    releases: Sequence[tuple[str, float, float]],
    *,
    noise: float | None = None,
    epsilon: float | None = None,
    delta: float | None = None,
    prior_events: Sequence[DpEvent] = (),
    neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE,
    accountant: str = "pld",
    num_records: int | None = None,
) -> list[PrivacyPlan]:
    """Returns plans that share one budget, for count vectors that are each released once on all records.

    A record adds a non-negative vector with l2 norm at most `norm` to each: A = norm, and D = sqrt(2) norm, since the inner
    product of two such vectors is not negative.

    `releases` are (purpose, norm, share of the budget) of each; shares add up to at most 1. `noise` is the noise multiplier of a
    single release with the cost of all of them; or `epsilon` at `delta` is the total budget, prior events included.
    """
    counts = Sensitivity(1.0, math.sqrt(2.0))
    first = 1.0 if noise is None else noise
    whole = PrivacyPlan(
        FullBatch(), first, 1, neighboring_relation, counts, accountant, 1.0, num_records
    )
    if epsilon is not None and delta is not None:
        whole = whole.calibrated(epsilon, delta, prior_events)
    plans = [
        whole.replace(
            noise_multiplier=whole.noise_multiplier / math.sqrt(share),
            l2_norm_clip=norm,
            purpose=purpose,
        )
        for purpose, norm, share in releases
    ]
    if (
        epsilon is not None
        and delta is not None
        and len(plans) > 1
        and sum(r[2] for r in releases) > 1.0 - 1e-9
    ):
        # The last release takes the exact remainder, since sums of costs round.
        plans[-1] = plans[-1].calibrated(
            epsilon, delta, [*prior_events, *(plan.dp_event for plan in plans[:-1])]
        )
    return plans


def compose(prior_events: Sequence[DpEvent], event: DpEvent) -> DpEvent:
    """Returns the composition of earlier events and one more."""
    if not prior_events:
        return event
    return dp_accounting.ComposedDpEvent([*prior_events, event])
