"""Noisy counts, each reserved in a ledger before it is released."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from tfp_dpvi import _random
from tfp_dpvi._tf import tf
from tfp_dpvi.privacy import BudgetExhaustedError, PrivacyLedger, PrivacyPlan
from tfp_dpvi.privacy.budgets import EpsilonBudget
from tfp_dpvi.privacy.plan import compose, plan_counts
from tfp_dpvi.training.budget import PrivacyTarget


@dataclasses.dataclass(frozen=True, eq=False)
class CountReleases:
    """Plans of noisy counts under one budget, and their releases.

    ```python
    >>> import numpy as np
    >>> from tfp_dpvi.privacy import PrivacyLedger
    >>> from tfp_dpvi.training.budget import PrivacyTarget
    >>> target = PrivacyTarget(epsilon=1.0, delta=1e-5)
    >>> releases = CountReleases(PrivacyLedger(), target)
    >>> (plan,) = releases.plans([("counts of 1 column", 1.0, 1.0)], num_records=100)
    >>> releases.release(np.array([60.0, 40.0]), plan, 0).shape
    (2,)
    >>> releases.ledger.num_releases
    1

    ```

    Attributes:
      ledger: The ledger of the data.
      target: The budget, in addition to all that is in the ledger, or a noise multiplier.
      seed: Makes the noise repeatable and hence *not private*, as the ledger then records.
    """

    ledger: PrivacyLedger
    target: PrivacyTarget
    seed: int | None = None

    def plans(
        self, releases: Sequence[tuple[str, float, float]], num_records: int
    ) -> list[PrivacyPlan]:
        """Returns the plans of releases, in addition to all that is in the ledger.

        Args:
          releases: For each, its purpose, the l2 norm of a record's contribution and its share of
            the budget. Shares add up to at most 1.
          num_records: The public number of records.

        Raises:
          BudgetExhaustedError: The ledger's own budget does not allow all of them. It is checked
            before the first is charged.
        """
        target, ledger = self.target, self.ledger
        plans = plan_counts(
            releases,
            noise=target.noise,
            epsilon=target.epsilon,
            delta=target.delta,
            prior_events=ledger.events(),
            neighboring_relation=target.neighboring_relation,
            accountant=target.accountant,
            num_records=num_records,
        )
        if ledger.budget is not None and ledger.renyi_filter is None and len(plans) > 1:
            budget = EpsilonBudget(*ledger.budget)
            earlier = [*ledger.events(), *(plan.dp_event for plan in plans[:-1])]
            if not budget.allows(compose(earlier, plans[-1].dp_event), target.neighboring_relation):
                raise BudgetExhaustedError(
                    f"{budget}, the ledger's own, does not allow this fit: lower epsilon."
                )
        # Without a seed, `release` takes words of the operating system's generator.
        randomness = "secure" if self.seed is None else ""
        return [plan.replace(randomness=randomness) for plan in plans]

    def release(self, counts: np.ndarray, plan: PrivacyPlan, number: int) -> np.ndarray:
        """Returns counts with noise, after reserving their release in the ledger (contract 6).

        Args:
          counts: Exact counts of any shape, *not private*.
          plan: The plan of this release.
          number: The release's number in its fit, from 0; with a seed, it tells the noise of
            releases apart.

        Returns:
          float64 array of the same shape.

        Raises:
          BudgetExhaustedError: A budget does not allow the release. Nothing is charged.
        """
        key = _random.noise_key(counts.size, self.seed, number)
        with self.ledger.reserved(plan, seeded=self.seed is not None, budgets=self.target.budgets):
            exact = tf.constant(counts, tf.float64)
            (noisy,) = _random.add_noise(key, [exact], [plan.deviation])
            return noisy.numpy()
