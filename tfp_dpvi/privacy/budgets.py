"""Budgets: limits for the total of a ledger, checked before each release."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from dp_accounting import DpEvent, NeighboringRelation

from tfp_dpvi import _validate as check
from tfp_dpvi.privacy import calibration
from tfp_dpvi.privacy.accountants import (
    ORDERS,
    Accountant,
    RdpAccountant,
    Releases,
    get_accountant,
    renyi_deltas,
)
from tfp_dpvi.privacy.errors import UnsupportedPairError
from tfp_dpvi.privacy.plan import PrivacyPlan, compose
from tfp_dpvi.privacy.tradeoff import attack_bound

_RDP = RdpAccountant()


@dataclasses.dataclass(frozen=True)
class EpsilonBudget:
    """A limit of epsilon at delta, for releases whose settings do not depend on earlier results."""

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "epsilon", check.epsilon(self.epsilon))
        object.__setattr__(self, "delta", check.delta(self.delta))

    @property
    def limit(self) -> float:
        """The upper limit of `spent`."""
        return self.epsilon

    def spent(
        self, event: DpEvent, relation: NeighboringRelation, accountant: str | None = None
    ) -> float:
        """Returns epsilon of an event, by default with the first accountant that supports it."""
        return total_epsilon(event, self.delta, relation, accountant)

    def allows(self, event: DpEvent, relation: NeighboringRelation) -> bool:
        """Returns whether a total is within the budget."""
        return self.spent(event, relation) <= self.limit

    def most_releases(self, plan: PrivacyPlan, prior_events: Sequence[DpEvent]) -> int:
        """Returns the number of a plan's releases that the budget allows after earlier ones, by the plan's accountant."""

        def total(number: int) -> float:
            event = compose(prior_events, plan.event_of(number))
            return self.spent(event, plan.neighboring_relation, plan.accountant)

        return calibration.largest_count(total, self.limit, plan.num_releases)

    def __str__(self) -> str:
        return f"the budget of epsilon {self.epsilon:.6g} at delta {self.delta:g}"


@dataclasses.dataclass(frozen=True)
class RenyiFilter(EpsilonBudget):
    """A limit of epsilon at delta that also holds for adaptively chosen settings: a Renyi privacy filter.

    Formal guarantee: let the `order` be fixed before the first release. If the Renyi divergences of all releases at that order
    add up to at most `limit`, then all of them together are (`order`, `limit`)-Renyi and (`epsilon`, `delta`)-differentially
    private, even if the settings of a release, and whether there is another one, depend on earlier results (Feldman and Zrnic
    2021, arXiv:2008.11193, with the same filter for all records).
    """

    order: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.order > 1.0:
            raise ValueError(
                f"order={self.order!r} of a Renyi divergence must be above 1; see RenyiFilter.chosen_for."
            )

    @classmethod
    def chosen_for(cls, epsilon: float, delta: float) -> "RenyiFilter":
        """Returns the filter with the order that allows the most Gaussian releases, whose divergence is proportional to it.

        The order depends on epsilon and delta alone: one chosen from released values would void the guarantee. With little
        noise (below about 1.3), sampled releases need up to a quarter more noise than at their best order.

        Raises:
          ValueError: if epsilon is too small for any order.
        """
        # At whole orders the divergence of a Poisson sample is a finite sum.
        filters = [cls(epsilon, delta, order) for order in ORDERS if order.is_integer()]
        best = max(filters, key=lambda one: one.limit / one.order)
        if best.limit <= 0.0:
            raise ValueError(
                f"epsilon={epsilon:g} is too small for a Renyi filter at delta={delta:g}; pass a larger epsilon."
            )
        return best

    @property
    def limit(self) -> float:
        """The limit of the sum of divergences: epsilon minus the term that the conversion from Renyi privacy adds.

        The conversion is that of dp_accounting (Canonne, Kamath and Steinke 2020, arXiv:2004.00010, proposition 12).
        """
        added = math.log1p(-1.0 / self.order) - math.log(self.delta * self.order) / (
            self.order - 1.0
        )
        return (self.epsilon - added) * (1.0 - 1e-9)  # For the rounding of sums.

    @property
    def advantage(self) -> float:
        """The largest advantage of an attacker (see `AttackBound`), whatever the settings are."""
        epsilons = np.linspace(0.0, self.epsilon, 65)
        deltas = renyi_deltas((self.order,), (self.limit,), epsilons)
        return attack_bound(epsilons, deltas).advantage

    def spent(
        self, event: DpEvent, relation: NeighboringRelation, accountant: str | None = None
    ) -> float:
        """Returns the divergence of an event, for any accountant."""
        refusal = _RDP.refusal(Releases(event), relation is NeighboringRelation.REPLACE_ONE)
        if refusal is not None:
            raise UnsupportedPairError(
                f"an adaptive budget does not support {refusal[0]} under {relation.name.lower()}; use full batches, another "
                "neighboring relation, or a budget that is not adaptive."
            )
        return float(_RDP.divergences(event, relation, (self.order,))[0])

    def __str__(self) -> str:
        return (
            f"the adaptive budget of epsilon {self.epsilon:.6g} at delta {self.delta:g}, {self.limit:.6g} of Renyi divergence "
            f"at order {self.order:g},"
        )


def total_epsilon(
    event: DpEvent, delta: float, relation: NeighboringRelation, accountant: str | None
) -> float:
    """Returns epsilon of an event, by default (None) with the first accountant that supports it."""
    price = common_accountant(event, relation) if accountant is None else get_accountant(accountant)
    return price.epsilon(event, delta, relation)


def common_accountant(event: DpEvent, relation: NeighboringRelation) -> Accountant:
    """Returns the first of "pld" and "rdp" that supports all of an event; raises `UnsupportedPairError` if neither does."""
    refusals = []
    for accountant in map(get_accountant, ("pld", "rdp")):
        try:
            accountant.releases(event, relation)
        except UnsupportedPairError as error:
            refusals.append(error)
        else:
            return accountant
    raise UnsupportedPairError(
        f"no accountant supports these and the ledger's releases together ({refusals[0]})\nUse one kind of sampling for a data set."
    )
