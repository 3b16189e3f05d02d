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
    """A limit of epsilon at delta, for releases whose settings do not depend on earlier results.

    Attributes:
      epsilon: The limit, finite and above 0.
      delta: Strictly between 0 and 1.
    """

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
        """Returns the epsilon of an event.

        Args:
          event: The event of all releases.
          relation: The neighboring relation.
          accountant: The name of an accountant; by default the first one that supports the event.

        Raises:
          UnsupportedPairError: No accountant supports the event, or the named one does not.
        """
        return total_epsilon(event, self.delta, relation, accountant)

    def allows(self, event: DpEvent, relation: NeighboringRelation) -> bool:
        """Returns whether a total is within the budget.

        Args:
          event: The event of all releases.
          relation: The neighboring relation.
        """
        return self.spent(event, relation) <= self.limit

    def most_releases(self, plan: PrivacyPlan, prior_events: Sequence[DpEvent]) -> int:
        """Returns the number of a plan's releases that the budget allows after earlier ones.

        Args:
          plan: The plan, whose accountant computes the total.
          prior_events: The events of earlier releases on the same data.
        """

        def total(number: int) -> float:
            event = compose(prior_events, plan.event_of(number))
            return self.spent(event, plan.neighboring_relation, plan.accountant)

        return calibration.largest_count(total, self.limit, plan.num_releases)

    def __str__(self) -> str:
        return f"the budget of epsilon {self.epsilon:.6g} at delta {self.delta:g}"


@dataclasses.dataclass(frozen=True)
class RenyiFilter(EpsilonBudget):
    """A limit of epsilon at delta that also holds for adaptively chosen settings.

    Attributes:
      order: The order of the Renyi divergences that are added up; above 1.

    #### Formal guarantee

    This is a Renyi privacy filter (Feldman and Zrnic 2021, arXiv:2008.11193, with the same filter
    for all records). Let the `order` be fixed before the first release. If the Renyi divergences
    of all releases at that order add up to at most `limit`, then all of them together are
    (`order`, `limit`)-Renyi and (`epsilon`, `delta`)-differentially private, even if the settings
    of a release, and whether there is another one, depend on earlier results.

    ```python
    >>> budget = RenyiFilter.chosen_for(epsilon=1.0, delta=1e-5)
    >>> budget.order, round(budget.limit, 3), round(budget.advantage, 3)
    (18.0, 0.55, 0.28)

    ```
    """

    order: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.order > 1.0:
            raise ValueError(
                f"order={self.order!r} of a Renyi divergence must be above 1; see "
                "RenyiFilter.chosen_for."
            )

    @classmethod
    def chosen_for(cls, epsilon: float, delta: float) -> "RenyiFilter":
        """Returns the filter with the order that allows the most Gaussian releases.

        The order depends on epsilon and delta alone: an order that was chosen from released values
        would void the guarantee. With little noise (a multiplier below about 1.3), sampled releases
        need up to a quarter more noise than at their best order.

        Args:
          epsilon: The limit, finite and above 0.
          delta: Strictly between 0 and 1.

        Raises:
          ValueError: Epsilon is too small for any order.
        """
        # At whole orders the divergence of a Poisson sample is a finite sum.
        filters = [cls(epsilon, delta, order) for order in ORDERS if order.is_integer()]
        # The divergence of a Gaussian release is proportional to the order.
        best = max(filters, key=lambda candidate: candidate.limit / candidate.order)
        if best.limit <= 0.0:
            raise ValueError(
                f"epsilon={epsilon:g} is too small for a Renyi filter at delta={delta:g}; pass a "
                "larger epsilon."
            )
        return best

    @property
    def limit(self) -> float:
        """The limit of the sum of divergences.

        It is epsilon minus the term that the conversion from Renyi privacy adds. The conversion is
        that of dp_accounting (Canonne, Kamath and Steinke 2020, arXiv:2004.00010, proposition 12).
        """
        order = self.order
        added = math.log1p(-1.0 / order) - math.log(self.delta * order) / (order - 1.0)
        # A part in 1e9 is left for the rounding of sums.
        return (self.epsilon - added) * (1.0 - 1e-9)

    @property
    def advantage(self) -> float:
        """The largest advantage of an attacker, for all settings; see `AttackBound`."""
        epsilons = np.linspace(0.0, self.epsilon, 65)
        deltas = renyi_deltas((self.order,), (self.limit,), epsilons)
        return attack_bound(epsilons, deltas).advantage

    def spent(
        self, event: DpEvent, relation: NeighboringRelation, accountant: str | None = None
    ) -> float:
        """Returns the Renyi divergence of an event at the filter's order.

        Args:
          event: The event of all releases.
          relation: The neighboring relation.
          accountant: Not used: the divergence is that of every accountant.

        Raises:
          UnsupportedPairError: The divergence of the event is not known.
        """
        refusal = _RDP.refusal(Releases(event), relation is NeighboringRelation.REPLACE_ONE)
        if refusal is not None:
            raise UnsupportedPairError(
                f"an adaptive budget does not support {refusal[0]} under {relation.name.lower()}; "
                "use full batches, another neighboring relation, or a budget that is not adaptive."
            )
        return float(_RDP.divergences(event, relation, (self.order,))[0])

    def __str__(self) -> str:
        return (
            f"the adaptive budget of epsilon {self.epsilon:.6g} at delta {self.delta:g}, "
            f"{self.limit:.6g} of Renyi divergence at order {self.order:g},"
        )


def total_epsilon(
    event: DpEvent, delta: float, relation: NeighboringRelation, accountant: str | None
) -> float:
    """Returns the epsilon of an event.

    Args:
      event: The event of all releases.
      delta: Strictly between 0 and 1.
      relation: The neighboring relation.
      accountant: The name of an accountant; None for the first one that supports the event.

    Raises:
      UnsupportedPairError: No accountant supports the event, or the named one does not.
    """
    price = common_accountant(event, relation) if accountant is None else get_accountant(accountant)
    return price.epsilon(event, delta, relation)


def common_accountant(event: DpEvent, relation: NeighboringRelation) -> Accountant:
    """Returns the first of "pld" and "rdp" that supports all of an event.

    Args:
      event: The event of all releases.
      relation: The neighboring relation.

    Raises:
      UnsupportedPairError: Neither supports it.
    """
    refusals = []
    for accountant in map(get_accountant, ("pld", "rdp")):
        try:
            accountant.releases(event, relation)
        except UnsupportedPairError as error:
            refusals.append(error)
        else:
            return accountant
    raise UnsupportedPairError(
        f"no accountant supports these and the ledger's releases together ({refusals[0]})\n"
        "Use one kind of sampling for a data set."
    )
