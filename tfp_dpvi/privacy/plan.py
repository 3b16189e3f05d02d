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
from tfp_dpvi.privacy.unit import PersonUnit

PLAN_SCHEMA_VERSION = 1
_SOMETIMES = ("purpose", "metrics", "randomness", "person", "summed_over")
#: The fields that epsilon depends on, none of which is left to a default.
_NEEDED = (
    *("sampling", "noise_multiplier", "num_releases"),
    *("neighboring_relation", "sensitivity", "accountant"),
)


@dataclasses.dataclass(frozen=True)
class PrivacyPlan:
    """The sampling scheme, mechanism, number of releases and neighboring relation of a fit.

    Attributes:
      sampling: The scheme that draws each release's records.
      noise_multiplier: The noise's standard deviation over `l2_norm_clip`, under every neighboring
        relation; 0 is no privacy.
      num_releases: The number of released sums.
      neighboring_relation: The relation of data sets that the guarantee compares.
      sensitivity: The sensitivity of the sum to one record, in units of `l2_norm_clip`
        (contract 3).
      accountant: The name of the accountant that computes epsilon.
      l2_norm_clip: The bound on the l2 norm of a record's contribution. This attribute and those
        below serve the report alone.
      num_records: The number of records, as declared.
      purpose: A description of the release if it is not training steps: "means of 3 columns".
      metrics: The names of the privatised metrics that are released with each step.
      randomness: "secure" if noise, and samples that `fit` draws itself, come from a cryptographic
        generator; else empty.
      person: What a person is, if the sums are of one contribution of each person instead of each
        row; "record" below then means all rows of a person. None if a row is a record.
      summed_over: None if the released sums are seen as they are. Otherwise the number of messages
        like this one, with noise of their own, of which only the sum is seen: the price is that of
        the sum, and `of_message` has that of the message. Epsilon depends on it.

    #### Formal guarantee

    Let `num_releases` sums be released. Let each be a sum of per-record contributions that are
    clipped so that `sensitivity` holds, over records drawn by `sampling`, plus Gaussian noise of
    standard deviation `noise_multiplier * l2_norm_clip` on every coordinate, fresh in every
    release. Then all releases and everything computed from them are (`epsilon(delta)`,
    delta)-differentially private under `neighboring_relation`. Releases may depend on earlier ones.
    With `summed_over` this holds for their sums with the releases of others, see `price_sum`.

    Under "add_or_remove_one" the guarantee is about whether a record takes part. A change of an
    attribute, such as a label, replaces a record. For it the releases are only
    (2 epsilon, (1 + exp(epsilon)) delta)-differentially private, and "replace_one" is the relation
    to account under (Pradhan et al. 2025, arXiv:2511.21804).

    The number of records is taken as public. Where it is counted from the records, as `len(x)` by
    default in `fit`, it is not itself protected under "add_or_remove_one" (see arXiv:2605.15648):
    declare one that is public with `num_records`.

    ```python
    >>> from tfp_dpvi.privacy import PoissonSampling
    >>> plan = PrivacyPlan.calibrate(
    ...     epsilon=1.0, delta=1e-5, sampling=PoissonSampling(0.01), num_releases=1000
    ... )
    >>> round(plan.noise_multiplier, 2), round(plan.epsilon(1e-5), 2)
    (1.42, 1.0)

    A release that is only seen added to three others, and the same release by itself:

    >>> shared = PrivacyPlan(FullBatch(), noise_multiplier=2.0, num_releases=1, summed_over=4)
    >>> round(shared.epsilon(1e-5), 2), round(shared.of_message().epsilon(1e-5), 2)
    (0.93, 1.99)

    ```
    """

    sampling: SamplingScheme
    noise_multiplier: float
    num_releases: int
    neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE
    sensitivity: Sensitivity = PER_RECORD_CLIP
    accountant: str = "pld"
    l2_norm_clip: float | None = None
    num_records: int | None = None
    purpose: str | None = None
    metrics: tuple[str, ...] = ()
    randomness: str = ""
    person: PersonUnit | None = None
    summed_over: int | None = None

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
        if self.person is not None and not isinstance(self.person, PersonUnit):
            raise TypeError(f"person={check.shown(self.person)} is no PersonUnit, nor None.")
        if self.summed_over is not None:
            put(self, "summed_over", check.count("summed_over", self.summed_over, 1))
        if self.purpose is not None:
            check.text("purpose", self.purpose, "describe the release, or leave it out")
        self.sampling.check_relation(self.neighboring_relation)
        single = self.sampling.dp_event(dp_accounting.GaussianDpEvent(1.0), 1)
        accountants.get_accountant(self.accountant).releases(single, self.neighboring_relation)

    @property
    def dp_event(self) -> DpEvent:
        """The event of all releases, in the convention of `tfp_dpvi.privacy.accountants`."""
        return self.event_of(self.num_releases)

    def event_of(self, num_releases: int) -> DpEvent:
        """Returns the event of the first `num_releases` releases."""
        num_releases = check.count("num_releases", num_releases)
        if num_releases == 0:
            return dp_accounting.NoOpDpEvent()
        if self.noise_multiplier == 0.0:
            return dp_accounting.NonPrivateDpEvent()
        return self.sampling.dp_event(
            dp_accounting.GaussianDpEvent(self.noise_multiplier / self._unit), num_releases
        )

    @property
    def _unit(self) -> float:
        """The sensitivity over one message's noise multiplier, in the accountants' convention."""
        unit = self.sampling.unit_sensitivity(self.sensitivity, self.neighboring_relation)
        # Variances of independent noise add.
        return unit if self.summed_over is None else unit / math.sqrt(self.summed_over)

    def epsilon(self, delta: float, prior_events: Sequence[DpEvent] = ()) -> float:
        """Returns the epsilon of all releases, together with earlier ones.

        Args:
          delta: Strictly between 0 and 1.
          prior_events: The events of earlier releases on the same data under the same neighboring
            relation.

        Returns:
          Epsilon; infinity without noise.

        Raises:
          UnsupportedPairError: The accountant does not support the prior events.
        """
        price = accountants.get_accountant(self.accountant)
        return price.epsilon(compose(prior_events, self.dp_event), delta, self.neighboring_relation)

    def attack_bound(self, delta: float) -> AttackBound:
        """Returns mu of Gaussian differential privacy and the advantage of an attacker.

        Args:
          delta: The smallest delta for which mu is to hold; the advantage does not depend on it.

        Returns:
          The bound for all releases, from the same accounting as `epsilon(delta)`.

        ```python
        >>> plan = PrivacyPlan(FullBatch(), noise_multiplier=4.0, num_releases=1)
        >>> plan.attack_bound(1e-5).mu
        0.25

        ```
        """
        price = accountants.get_accountant(self.accountant)
        return price.attack_bound(self.dp_event, delta, self.neighboring_relation)

    def replace(self, **changes: Any) -> "PrivacyPlan":
        """Returns a copy with some attributes changed."""
        return dataclasses.replace(self, **changes)

    def of_message(self) -> "PrivacyPlan":
        """Returns the plan for who sees the released sums themselves; see `summed_over`."""
        return self.replace(summed_over=None)

    @classmethod
    def calibrate(
        cls,
        *,
        epsilon: float,
        delta: float,
        prior_events: Sequence[DpEvent] = (),
        **attributes: Any,
    ) -> "PrivacyPlan":
        """Returns the plan with the smallest noise multiplier that meets a budget.

        The total of the prior events and this plan, by `epsilon()`, is at most `epsilon` at
        `delta`. It uses at least 99.8 % of the budget that the prior events leave.

        Args:
          epsilon: The budget, finite and above 0.
          delta: Strictly between 0 and 1.
          prior_events: The events of earlier releases on the same data under the same neighboring
            relation.
          **attributes: The attributes of the plan without the noise multiplier: at least `sampling`
            and `num_releases`, which is at least 1.

        Raises:
          BudgetExhaustedError: The prior events use up the budget.
          UnsupportedPairError: The accountant does not support the sampling scheme under the
            neighboring relation.
        """
        check.count("num_releases", attributes.get("num_releases"), 1)
        return cls(noise_multiplier=1.0, **attributes).calibrated(epsilon, delta, prior_events)

    def calibrated(
        self, epsilon: float, delta: float, prior_events: Sequence[DpEvent] = ()
    ) -> "PrivacyPlan":
        """Returns this plan with the smallest noise multiplier that meets a budget.

        Arguments, result and errors are those of `calibrate`.

        Args:
          epsilon: The budget, finite and above 0.
          delta: Strictly between 0 and 1.
          prior_events: The events of earlier releases.
        """
        epsilon, delta = check.epsilon(epsilon), check.delta(delta)
        spent = self._spent_before(prior_events, epsilon, delta)
        guess = self._guess(epsilon - spent, delta)

        def epsilon_of(z: float) -> float:
            return self.replace(noise_multiplier=z).epsilon(delta, prior_events)

        smallest = calibration.smallest_noise_multiplier(epsilon_of, epsilon, spent, guess)
        return self.replace(noise_multiplier=smallest)

    def _spent_before(self, prior_events: Sequence[DpEvent], epsilon: float, delta: float) -> float:
        """Returns epsilon of earlier releases; raises if these have used up a budget."""
        spent = self.replace(num_releases=0).epsilon(delta, prior_events) if prior_events else 0.0
        if spent >= epsilon:
            raise BudgetExhaustedError(
                f"epsilon={epsilon:.6g} at delta={delta:g} is used up: {spent:.6g} was spent "
                "before; this call spent no privacy."
            )
        return spent

    def for_share(self, share: float) -> "PrivacyPlan":
        """Returns this plan with the noise of a share of a budget, up to a common factor.

        A release of sensitivity A at rate q and noise z adds (q A / z)^2 to the squared mu of
        Gaussian differential privacy, to first order.

        Args:
          share: The share of squared mu, above 0.
        """
        rate = getattr(self.sampling, "probability", 1.0)
        noise = rate * self._unit * math.sqrt(self.num_releases / share)
        return self.replace(noise_multiplier=noise)

    def scaled_as(self, before: "PrivacyPlan", after: "PrivacyPlan") -> "PrivacyPlan":
        """Returns this plan with its noise multiplied as that of another plan was.

        Args:
          before: The other plan as it was.
          after: The other plan as it is.
        """
        factor = after.noise_multiplier / before.noise_multiplier
        return self.replace(noise_multiplier=factor * self.noise_multiplier)

    def with_noise_of(self, other: "PrivacyPlan", *, or_more: bool = False) -> "PrivacyPlan":
        """Returns this plan with another plan's noise multiplier.

        Args:
          other: The other plan.
          or_more: Whether to keep this plan's noise where it is larger.
        """
        noise = other.noise_multiplier
        return self.replace(noise_multiplier=max(noise, self.noise_multiplier if or_more else 0.0))

    def with_noise_over(self, factor: float) -> "PrivacyPlan":
        """Returns this plan with its noise multiplier divided by a factor above 0, rounded up.

        It has four significant digits, so that several machines come to one number.
        """
        noise = self.noise_multiplier / factor
        unit = 10.0 ** (math.floor(math.log10(noise)) - 3)
        return self.replace(noise_multiplier=float(f"{math.ceil(noise / unit) * unit:.4g}"))

    def noise_over(self, other: "PrivacyPlan") -> float:
        """Returns the ratio of this plan's noise multiplier to another's, which is above 0."""
        return self.noise_multiplier / other.noise_multiplier

    def _guess(self, left: float, delta: float) -> float:
        """Returns a rough noise multiplier for an epsilon that is left."""
        q = getattr(self.sampling, "probability", 1.0)
        replace = self.neighboring_relation is NeighboringRelation.REPLACE_ONE
        guess = calibration.guess_noise_multiplier(left, delta, q, self.num_releases, replace)
        return self._unit * guess

    def to_json(self) -> Json:
        """Returns a JSON-ready dictionary from which `from_json` rebuilds an equal plan."""
        data = {
            "schema_version": PLAN_SCHEMA_VERSION,
            **dataclasses.asdict(self),
            "sampling": self.sampling.to_json(),
            "neighboring_relation": self.neighboring_relation.name.lower(),
            "metrics": list(self.metrics),
        }
        # Training plans have none of these fields, so that every version can read them.
        return {name: value for name, value in data.items() if value or name not in _SOMETIMES}

    @property
    def deviation(self) -> float:
        """The noise's standard deviation on every coordinate, `noise_multiplier * l2_norm_clip`."""
        if self.l2_norm_clip is None:
            raise ValueError("l2_norm_clip is missing: a plan without a clip has no unit of noise.")
        return self.noise_multiplier * self.l2_norm_clip

    @classmethod
    def from_json(cls, data: Json) -> "PrivacyPlan":
        """Rebuilds a plan from `to_json`.

        Args:
          data: A JSON object, as `json.loads` returns it. It must have every field that epsilon
            depends on; fields for the report alone may be missing.

        Raises:
          TypeError: A field has a value of another type.
          ValueError: The schema version is unknown, a field is missing, unknown or out of its
            range, or the data are no JSON object.
        """
        fields = check.fields("a privacy plan", data)
        version = fields.pop("schema_version", None)
        if type(version) is not int or version != PLAN_SCHEMA_VERSION:
            raise ValueError(
                f"schema_version={version!a:.99} of a privacy plan: read it with the tfp_dpvi that "
                "wrote it."
            )
        # Plans of earlier versions have this field.
        fields.pop("gradient_sensitivity", None)
        known = [field.name for field in dataclasses.fields(cls)]
        fields = check.fields("a privacy plan", fields, needed=_NEEDED, known=known)
        fields["sampling"] = scheme_from_json(fields["sampling"])
        needed = [field.name for field in dataclasses.fields(Sensitivity)]
        fields["sensitivity"] = Sensitivity(
            **check.fields("sensitivity", fields["sensitivity"], needed=needed, known=needed)
        )
        if fields.get("person") is not None:
            fields["person"] = PersonUnit.from_json(fields["person"])
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
    """Returns plans that share one budget, for count vectors that are each released once.

    The releases are on all records. A record adds a non-negative vector with l2 norm at most `norm`
    to each. So A = norm, and D = sqrt(2) norm, since the inner product of two such vectors is not
    negative.

    Args:
      releases: (purpose, norm, share of the budget) of each release; shares add up to at most 1.
      noise: The noise multiplier of a single release with the cost of all of them. Pass it, or
        `epsilon` and `delta`.
      epsilon: The total budget, prior events included.
      delta: The delta of the budget.
      prior_events: The events of earlier releases on the same data.
      neighboring_relation: The relation of data sets that the guarantee compares.
      accountant: The name of the accountant.
      num_records: The number of records, as declared, for the report.

    Returns:
      A plan of one release for each entry of `releases`.

    Raises:
      BudgetExhaustedError: The prior events use up the budget.

    ```python
    >>> plans = plan_counts([("ages", 1.0, 0.5), ("towns", 2.0, 0.5)], noise=1.0)
    >>> [(plan.purpose, round(plan.deviation, 3)) for plan in plans]
    [('ages', 1.414), ('towns', 2.828)]

    ```
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
    whole_budget = sum(share for _, _, share in releases) > 1.0 - 1e-9
    if epsilon is not None and delta is not None and len(plans) > 1 and whole_budget:
        # The last release takes the exact remainder, since sums of costs round.
        others = [*prior_events, *(plan.dp_event for plan in plans[:-1])]
        plans[-1] = plans[-1].calibrated(epsilon, delta, others)
    return plans


def calibrate_together(
    plans: Sequence[PrivacyPlan],
    *,
    epsilon: float,
    delta: float,
    prior_events: Sequence[DpEvent] = (),
) -> list[PrivacyPlan]:
    """Returns plans that share one budget, their noise multiplied by one factor.

    The budget is that of all their releases together, as a heterogeneous composition.

    Args:
      plans: At least one plan, all under one neighboring relation and accountant. Their noise
        multipliers, above 0, say how much noise each has relative to the others.
      epsilon: The budget, prior events included.
      delta: Its delta.
      prior_events: The events of earlier releases on the same data.

    Returns:
      The plans with the smallest noise that meets the budget.

    Raises:
      BudgetExhaustedError: The prior events use up the budget.
      ValueError: A plan has no noise, or plans differ in relation or accountant.

    ```python
    >>> from tfp_dpvi.privacy import PoissonSampling
    >>> steps = PrivacyPlan(PoissonSampling(0.1), noise_multiplier=1.0, num_releases=100)
    >>> last = PrivacyPlan(FullBatch(), noise_multiplier=4.0, num_releases=1)
    >>> both = calibrate_together([steps, last], epsilon=1.0, delta=1e-5)
    >>> round(both[1].noise_multiplier / both[0].noise_multiplier, 6)
    4.0
    >>> 0.99 < both[1].epsilon(1e-5, [both[0].dp_event]) <= 1.0
    True

    ```
    """
    epsilon, delta = check.epsilon(epsilon), check.delta(delta)
    kinds = {(plan.neighboring_relation, plan.accountant) for plan in plans}
    if len(kinds) != 1 or not all(plan.noise_multiplier > 0.0 for plan in plans):
        raise ValueError(
            "plans must have noise, one neighboring relation and one accountant; pass at least one."
        )
    spent = plans[0]._spent_before(prior_events, epsilon, delta)

    def with_factor(factor: float) -> list[PrivacyPlan]:
        return [plan.replace(noise_multiplier=factor * plan.noise_multiplier) for plan in plans]

    def epsilon_of(factor: float) -> float:
        *others, last = with_factor(factor)
        return last.epsilon(delta, [*prior_events, *(plan.dp_event for plan in others)])

    # Each needs so much noise alone, and all of them somewhat more.
    ratios = [plan._guess(epsilon - spent, delta) / plan.noise_multiplier for plan in plans]
    guess = math.hypot(*ratios)
    return with_factor(calibration.smallest_noise_multiplier(epsilon_of, epsilon, spent, guess))


def compose(prior_events: Sequence[DpEvent], event: DpEvent) -> DpEvent:
    """Returns the composition of earlier events and one more.

    Args:
      prior_events: The earlier events, which may be none.
      event: The event of a plan.
    """
    if not prior_events:
        return event
    return dp_accounting.ComposedDpEvent([*prior_events, event])
