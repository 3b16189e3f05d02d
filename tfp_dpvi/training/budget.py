"""The privacy target of `compile`, the noise that meets it, and the epsilons to show."""

from __future__ import annotations

import dataclasses
import math

from dp_accounting import NeighboringRelation

from tfp_dpvi import _validate as check
from tfp_dpvi._keystream import check_randomness
from tfp_dpvi.privacy import BudgetExhaustedError, FullBatch, PrivacyLedger, PrivacyPlan
from tfp_dpvi.training.mechanism import Mechanism

SPENT_FRACTION = 0.99
"""The fraction of a budget at which it counts as spent: a calibrated plan spends more."""


@dataclasses.dataclass(frozen=True)
class PrivacyTarget:
    """The privacy settings of `compile`.

    Attributes:
      epsilon: The lifetime total for these data, or None with a noise multiplier.
      delta: The delta of every epsilon shown; without it, training shows no epsilon.
      noise: The optimizer's `noise_multiplier`, or None with an epsilon.
      planned_epochs: The number of epochs over all fits that the budget is for, or None for those
        of the next fit.
      accountant: The name of the accountant.
      neighboring_relation: What two neighboring data sets differ in.
      physical_batch_size: The number of records processed at once, or None to choose it.
      jit_compile: Whether to compile with XLA; None to choose for each fit.
      unsafe_training_metrics: Whether to show exact losses, which are *not private*.
      randomness: "secure" for a cryptographic generator, or None.

    Raises:
      ValueError, TypeError: Both or neither of epsilon and noise, an epsilon without a delta, or a
        value out of range.
    """

    epsilon: float | None = None
    delta: float | None = None
    noise: float | None = None
    planned_epochs: int | None = None
    accountant: str = "pld"
    neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE
    physical_batch_size: int | None = None
    jit_compile: bool | None = None
    unsafe_training_metrics: bool = False
    randomness: str | None = None

    def __post_init__(self) -> None:
        if self.epsilon is None and self.noise is None:
            raise ValueError(
                "epsilon and noise_multiplier are both missing: use "
                "compile(epsilon=1.0, delta=1e-5), or pass one to the optimizer."
            )
        if self.epsilon is not None and self.noise is not None:
            raise ValueError(
                f"epsilon={check.shown(self.epsilon)} and "
                f"noise_multiplier={check.shown(self.noise)}: each determines the other. Leave out "
                "one."
            )
        put = object.__setattr__
        if self.epsilon is not None:
            put(self, "epsilon", check.epsilon(self.epsilon))
            if self.delta is None:
                raise ValueError(
                    f"epsilon={check.shown(self.epsilon)} also needs a delta, for instance "
                    "compile(epsilon=1.0, delta=1e-5)."
                )
        if self.delta is not None:
            put(self, "delta", check.delta(self.delta))
        check_randomness(self.randomness)
        for name in ("planned_epochs", "physical_batch_size"):
            value = getattr(self, name)
            put(self, name, None if value is None else check.count(name, value, 1))
        if self.planned_epochs is not None and self.epsilon is None:
            raise ValueError(
                f"planned_epochs={self.planned_epochs} divides a budget, but there is none: "
                "pass compile(epsilon=, delta=)."
            )
        # Any plan refuses an unknown accountant, and a relation that it does not support.
        PrivacyPlan(
            FullBatch(),
            1.0,
            1,
            neighboring_relation=self.neighboring_relation,
            accountant=self.accountant,
        )

    @property
    def budgets(self) -> tuple[tuple[float, float], ...]:
        """The pairs (epsilon, delta) that this model imposes on the ledger's total."""
        return () if self.epsilon is None or self.delta is None else ((self.epsilon, self.delta),)


def calibrate(
    mechanism: Mechanism,
    ledger: PrivacyLedger,
    target: PrivacyTarget,
    steps: int,
    steps_per_epoch: int,
    epochs_run: float,
) -> Mechanism:
    """Returns the mechanism with the noise of this fit.

    That is the target's noise multiplier, or the smallest that meets its lifetime budget.

    Args:
      mechanism: The mechanism of the fit, without noise or with the target's.
      ledger: The earlier releases from these data.
      target: The privacy settings of `compile`.
      steps: The number of steps of this fit.
      steps_per_epoch: The number of steps of an epoch.
      epochs_run: The number of epochs that ran in earlier fits.

    Raises:
      BudgetExhaustedError: Nothing of the budget is left.
      UnsupportedPairError: The ledger has releases under another neighboring relation, or of
        another unit of privacy.
      ValueError: The fit has more epochs than `planned_epochs` leaves.
    """
    ledger.check_relation(target.neighboring_relation)
    ledger.check_unit(mechanism.plan(steps))
    if target.epsilon is None or target.delta is None:
        # Making the plan refuses unsupported settings.
        mechanism.plan(steps)
        return mechanism
    if target.planned_epochs is not None:
        left = math.ceil(round((target.planned_epochs - epochs_run) * steps_per_epoch, 6))
        if 0 < left < steps:
            raise ValueError(
                f"planned_epochs={target.planned_epochs} leaves {left / steps_per_epoch:g} epochs, "
                f"but this fit needs {steps / steps_per_epoch:g}: lower epochs, or compile again "
                "with more planned_epochs."
            )
        steps = max(steps, left)
    spent = ledger.epsilon(target.delta, accountant=target.accountant)
    if spent >= SPENT_FRACTION * target.epsilon:
        raise BudgetExhaustedError(
            f"epsilon={target.epsilon:g} at delta={target.delta:g} is the lifetime total for these "
            f"data, and {spent:.4g} of it is spent.\n"
            "Pass a larger epsilon, the total of all their fits; or keep some for later ones, with "
            "compile(planned_epochs=...) before the first."
        )
    return mechanism.calibrated(
        ledger, epsilon=target.epsilon, delta=target.delta, num_releases=steps
    )
