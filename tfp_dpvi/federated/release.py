"""`LocalRelease`: a hospital's private change of its factor, here by noise in each step."""

from __future__ import annotations

import dataclasses
from typing import Protocol

import numpy as np
from dp_accounting import NeighboringRelation

from tfp_dpvi._tf import Structure
from tfp_dpvi.data.units import Identifiers
from tfp_dpvi.federated.factors import Factor
from tfp_dpvi.federated.messages import Task
from tfp_dpvi.federated.refiner import Refiner
from tfp_dpvi.federated.study import Study
from tfp_dpvi.privacy import PrivacyPlan


@dataclasses.dataclass(frozen=True, eq=False)
class ReleaseSettings:
    """The arguments of `Hospital` that its releases depend on, checked.

    Attributes:
      study: The study.
      refiner: Runs the local steps.
      epsilon: The hospital's budget; None without privacy.
      rounds: The number of rounds that it allows.
      relation: Its neighboring relation.
      seed: Makes its noise repeatable; None for the operating system's.
      randomness: None or "secure", for the local steps.
      unit_ids: The person of each row, or None.
      rows_beyond: Which rows of persons with more are used.
      weights: The survey weight of each row, or None.
    """

    study: Study
    refiner: Refiner
    epsilon: float | None
    rounds: int
    relation: NeighboringRelation
    seed: int | None
    randomness: str | None
    unit_ids: Identifiers = None
    rows_beyond: str = "random"
    weights: np.ndarray | None = None


class LocalRelease(Protocol):
    """The records of one hospital, and the way in which it makes its private changes.

    `Hospital` checks and charges: it calibrates `draft` to its budget, calls `begin` once, and
    `change` in each round after the ledger has all the releases of that round.

    #### Formal guarantee

    An implementation states in `draft` the sampling, sensitivity and number of all releases of the
    hospital's rounds, and `change` makes at most the share of one round, with the plan's noise.

    Attributes:
      num_records: The public number of records.
      draft: The plan of all releases, before its noise is calibrated.
    """

    num_records: int
    draft: PrivacyPlan

    def begin(self, plan: PrivacyPlan) -> None:
        """Takes the calibrated plan, and traces the steps; refuses noise that leaves no signal."""

    def change(self, task: Task) -> Factor:
        """Returns the private change of the factor for a task; its releases are charged."""


class StepRelease:
    """A `LocalRelease` with noise in every local step.

    Args:
      settings: The hospital's settings.
      x: Records in memory.
      y: Their outcomes; None for a likelihood of whole records.
      num_records: The public number of records; None for that of `x`.

    Attributes:
      data: The records, which the last phase uses too.
    """

    def __init__(
        self,
        settings: ReleaseSettings,
        x: Structure,
        y: Structure | None,
        num_records: int | None,
    ) -> None:
        refiner = settings.refiner
        if refiner.private != (settings.epsilon is not None):
            raise ValueError(
                f"epsilon={settings.epsilon!r} does not go with the study's optimizer: pass "
                "epsilon, a finite l2_norm_clip and no noise_multiplier;\n"
                "or, without privacy, epsilon=None, l2_norm_clip=math.inf and noise_multiplier=0."
            )
        self._settings = settings
        data = refiner.data(
            x,
            y,
            num_records,
            weights=settings.weights,
            unit_ids=settings.unit_ids,
            rows_beyond=settings.rows_beyond,
            seed=settings.seed,
        )
        self.data = data
        self.num_records, self._tensors = data.num_records, data.tensors
        self.mechanism = refiner.mechanism(data, settings.relation, settings.randomness)
        self.draft = self.mechanism.plan(settings.rounds * settings.study.terms.local_steps)

    def begin(self, plan: PrivacyPlan) -> None:
        """See `LocalRelease.begin`."""
        refiner = self._settings.refiner
        if refiner.private:
            self.mechanism = self.mechanism.with_noise_of(plan)
        refiner.trace(self.mechanism, self._tensors)

    def change(self, task: Task) -> Factor:
        """See `LocalRelease.change`."""
        settings = self._settings
        return settings.refiner.refine(
            task.posterior,
            task.cavity,
            self.mechanism,
            self._tensors,
            settings.seed,
            task.number,
        )
