"""Budgets: the limits that the total of a ledger is compared with before anything is released."""

import dataclasses
import math
from collections.abc import Sequence

from dp_accounting import DpEvent, NeighboringRelation

from tfp_dpvi import _validate as check
from tfp_dpvi.privacy import calibration
from tfp_dpvi.privacy.accountants import ORDERS, Accountant, RdpAccountant, Releases, get_accountant
from tfp_dpvi.privacy.errors import UnsupportedPairError
from tfp_dpvi.privacy.plan import PrivacyPlan, compose

_RDP = RdpAccountant()


@dataclasses.dataclass(frozen=True)
class EpsilonBudget:
    """A limit of epsilon at delta, for releases whose settings do not depend on earlier ones."""

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "epsilon", check.epsilon(self.epsilon))
        object.__setattr__(self, "delta", check.delta(self.delta))

    @property
    def limit(self) -> float:
        """The most that `spent` may return."""
        return self.epsilon

    def spent(self, event: DpEvent, relation: NeighboringRelation, accountant: str | None = None) -> float:
        """Returns epsilon of everything in an event, by default by the first accountant that prices it."""
        price = common_accountant(event, relation) if accountant is None else get_accountant(accountant)
        return price.epsilon(event, self.delta, relation)

    def allows(self, event: DpEvent, relation: NeighboringRelation) -> bool:
        """Returns whether a total keeps the budget."""
        return self.spent(event, relation) <= self.limit

    def most_releases(self, plan: PrivacyPlan, prior_events: Sequence[DpEvent]) -> int:
        """Returns how many of a plan's releases fit after earlier ones, by the plan's own accountant."""

        def total(number: int) -> float:
            event = compose(prior_events, plan.event_of(number))
            return self.spent(event, plan.neighboring_relation, plan.accountant)

        return calibration.largest_count(total, self.limit, plan.num_releases)

    def __str__(self) -> str:
        return f"the budget of epsilon {self.epsilon:.6g} at delta {self.delta:g}"


@dataclasses.dataclass(frozen=True)
class RenyiFilter(EpsilonBudget):
    """A limit of epsilon at delta that holds whatever depends on earlier results: a Renyi privacy filter.

    Formal guarantee: let the order be fixed before the first release. If the Renyi divergences of all releases at that
    order add up to at most `limit`, then all of them together are (`order`, `limit`)-Renyi and
    (`epsilon`, `delta`)-differentially private, also where the settings of a release, and whether there is another one,
    were chosen after looking at earlier ones (Feldman and Zrnic 2021, arXiv:2008.11193, with the same filter for all
    records).

    Attributes:
      epsilon: of everything released together.
      delta: the delta that goes with it.
      order: of the divergences; see `chosen_for`.
    """

    order: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.order > 1.0:
            raise ValueError(f"order={self.order!r} of a Renyi divergence must be above 1; see RenyiFilter.chosen_for.")

    @classmethod
    def chosen_for(cls, epsilon: float, delta: float) -> "RenyiFilter":
        """Returns the filter of the order that allows most Gaussian releases, whose divergence is proportional to it.

        It depends on epsilon and delta alone: an order chosen by what was released would void the guarantee. Sampled releases
        need up to a quarter more noise than at the order that is best for them where there is little (below about 1.3).

        Raises:
          ValueError: if epsilon is too small for any order.
        """
        # At whole orders the divergence of a Poisson sample is a finite sum.
        filters = [cls(epsilon, delta, order) for order in ORDERS if order.is_integer()]
        best = max(filters, key=lambda one: one.limit / one.order)
        if best.limit <= 0.0:
            raise ValueError(f"epsilon={epsilon:g} is too small for a Renyi filter at delta={delta:g}; allow more.")
        return best

    @property
    def limit(self) -> float:
        """The most that divergences may add up to: epsilon without what the conversion from Renyi privacy adds.

        The conversion is that of dp_accounting (Canonne, Kamath and Steinke 2020, arXiv:2004.00010, proposition 12).
        """
        added = math.log1p(-1.0 / self.order) - math.log(self.delta * self.order) / (self.order - 1.0)
        return (self.epsilon - added) * (1.0 - 1e-9)  # For the rounding of sums.

    def spent(self, event: DpEvent, relation: NeighboringRelation, accountant: str | None = None) -> float:
        """Returns the divergence of everything in an event, whatever the accountant."""
        refusal = _RDP.refusal(Releases.of(event), relation is NeighboringRelation.REPLACE_ONE)
        if refusal is not None:
            raise UnsupportedPairError(
                f"an adaptive budget has no price for {refusal[0]} under {relation.name.lower()}; use full batches, another "
                "adjacency, or a budget that is not adaptive."
            )
        return float(_RDP.divergences(event, relation, (self.order,))[0])

    def __str__(self) -> str:
        return (
            f"the adaptive budget of epsilon {self.epsilon:.6g} at delta {self.delta:g}, {self.limit:.6g} of Renyi divergence "
            f"at order {self.order:g},"
        )


def common_accountant(event: DpEvent, relation: NeighboringRelation) -> Accountant:
    """Returns the first accountant, of "pld" and "rdp", that prices everything in an event; refuses what neither does."""
    refusals = []
    for accountant in map(get_accountant, ("pld", "rdp")):
        try:
            accountant.releases(event, relation)
        except UnsupportedPairError as error:
            refusals.append(error)
        else:
            return accountant
    raise UnsupportedPairError(
        f"these releases and those in the ledger have no common price ({refusals[0]})\n"
        "Keep one kind of sampling for a data set."
    )
