"""`Mechanism`: the private release of each step of a fit, as one value."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable
from typing import NamedTuple

from dp_accounting import NeighboringRelation

from tfp_dpvi import _random
from tfp_dpvi._tf import tf
from tfp_dpvi.gradients import (
    Clip,
    ClippedGradient,
    ClippedSum,
    JointRelease,
    PerExample,
    StepGradient,
    joint_sensitivity,
)
from tfp_dpvi.gradients.isolation import refuse_writes
from tfp_dpvi.gradients.joint import joint_release
from tfp_dpvi.optimizers import DPOptimizer, PrivatizedGradients
from tfp_dpvi.privacy import PersonUnit, PrivacyLedger, PrivacyPlan, Sensitivity
from tfp_dpvi.sampling import Sampler


class Sums(NamedTuple):
    """The sums over a step's sample before noise: exact, hence *not private*.

    Attributes:
      gradient: The parts of the clipped sum.
      joint: The sum of each joint release.
      loss: The sum of the records' losses, a float64 scalar.
      batches: The number of physical batches, an int64 scalar.
    """

    gradient: list[tf.Tensor]
    joint: list[tf.Tensor]
    loss: tf.Tensor
    batches: tf.Tensor


@dataclasses.dataclass(frozen=True)
class Mechanism:
    """Sampler, clipped gradient, noise and joint releases, which determine a step's privacy cost.

    `DPModel.mechanism` returns that of a model's fit.

    Attributes:
      sampler: Draws each step's sample and states how.
      gradient: The clipped gradient, which states its sensitivity.
      expected_batch_size: The public denominator qN.
      num_records: The public number of records N.
      noise_multiplier: The noise's standard deviation over the clip; None until `calibrated` finds
        it.
      metrics: The joint releases of `compile`, on the same sample as the gradient.
      neighboring_relation: What two neighboring data sets differ in.
      accountant: The name of the accountant.
      randomness: The source of the keys, see `PrivacyPlan`.
      unsafe_loss: Whether to also sum exact losses, which are *not private*.
      person: What a person is if a record is one, see `PrivacyPlan`.

    #### Formal guarantee

    One release is a Gaussian mechanism of `sensitivity` on a sample drawn by `sampler`, as `plan`
    states for the accounting.

    ```python
    >>> import tfp_dpvi as dpvi
    >>> gradient = dpvi.gradients.ClippedGradient(lambda key: None, dpvi.gradients.Clip(1.0))
    >>> sampler = dpvi.sampling.FullBatchSampler(1000)
    >>> mechanism = Mechanism(sampler, gradient, 1000.0, 1000, noise_multiplier=4.0)
    >>> round(mechanism.plan(num_releases=1).epsilon(1e-5), 2)
    0.93
    >>> ledger = dpvi.PrivacyLedger()
    >>> enough = mechanism.calibrated(ledger, epsilon=2.0, delta=1e-5, num_releases=1)
    >>> enough.plan(num_releases=1).epsilon(1e-5) <= 2.0
    True

    ```
    """

    sampler: Sampler
    gradient: ClippedGradient
    expected_batch_size: float
    num_records: int
    noise_multiplier: float | None = None
    metrics: tuple[JointRelease, ...] = ()
    neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE
    accountant: str = "pld"
    randomness: str = ""
    unsafe_loss: bool = False
    person: PersonUnit | None = None

    @property
    def joint(self) -> tuple[JointRelease, ...]:
        """All joint releases with the gradient."""
        return (*self.gradient.joint, *self.metrics)

    @property
    def noise(self) -> tf.Tensor:
        """The noise multiplier for steps, a float64 scalar.

        Raises:
          ValueError: The mechanism has none yet.
        """
        if self.noise_multiplier is None:
            raise ValueError(
                "mechanism.noise_multiplier is None: "
                "call mechanism.calibrated(ledger, epsilon=..., delta=..., ...) first."
            )
        return tf.constant(self.noise_multiplier, tf.float64)

    def with_noise(self, noise: float) -> Mechanism:
        """Returns the mechanism with this noise multiplier."""
        return dataclasses.replace(self, noise_multiplier=noise)

    def with_noise_of(self, plan: PrivacyPlan) -> Mechanism:
        """Returns the mechanism with a plan's noise multiplier."""
        return self.with_noise(plan.noise_multiplier)

    @property
    def deviations(self) -> tuple[float, ...]:
        """The standard deviations of the noise on the gradient's sum and on each joint release.

        The first is that before the gradient's `noise_scales`.
        """
        multiplier = self.noise_multiplier or 0.0
        gradient = multiplier * self.gradient.clip.bound if multiplier else 0.0
        joint = (
            release.noise_ratio * release.sensitivity.add_or_remove * multiplier
            for release in self.joint
        )
        return gradient, *joint

    @property
    def non_private(self) -> bool:
        """True without noise and clip, as for a fit to public or simulated records."""
        return self.noise_multiplier == 0.0 and self.gradient.clip.is_off

    @property
    def sensitivity(self) -> Sensitivity:
        """The sensitivity of gradient and joint releases together, in units of the clip."""
        return joint_sensitivity(self.joint, self.gradient.sensitivity)

    def plan(self, num_releases: int) -> PrivacyPlan:
        """Returns the plan of this number of steps, for the ledger and the report."""
        clip = self.gradient.clip
        return PrivacyPlan(
            sampling=self.sampler.scheme,
            noise_multiplier=self.noise_multiplier or 0.0,
            num_releases=num_releases,
            neighboring_relation=self.neighboring_relation,
            sensitivity=self.sensitivity,
            accountant=self.accountant,
            l2_norm_clip=None if clip.is_off else clip.bound,
            num_records=self.num_records,
            metrics=tuple(release.name for release in self.joint),
            randomness=self.randomness,
            person=self.person,
        )

    def num_words(self) -> int:
        """Returns the number of random words that a step takes of a tape; traces its draws."""
        # The number of released coordinates on each replica, which are equal.
        sizes: list[int] = []

        def draw(key: tf.Tensor) -> None:
            released = self.gradient.draw(key).released
            sizes.append(sum(part.shape.num_elements() for part in released))

        def on_replicas(key: tf.Tensor) -> None:
            tf.distribute.get_strategy().run(draw, args=(key,))

        key = tf.TensorSpec([2], tf.int64)
        tf.function(on_replicas, input_signature=[key], autograph=False).get_concrete_function()
        num_coordinates = sizes[0] + sum(math.prod(release.shape) for release in self.joint)
        return _random.num_words(self.sampler.num_words, num_coordinates)

    def calibrated(
        self, ledger: PrivacyLedger, *, epsilon: float, delta: float, num_releases: int
    ) -> Mechanism:
        """Returns the mechanism with the smallest noise that meets a budget.

        Args:
          ledger: The earlier releases from these data, which count too.
          epsilon: The budget for those and these steps together.
          delta: Its delta.
          num_releases: The number of steps.

        Raises:
          BudgetExhaustedError: The budget is spent.
        """
        plan = self.plan(num_releases).calibrated(epsilon, delta, ledger.events())
        return self.with_noise_of(plan)

    def zeros(self, gradient: StepGradient) -> Sums:
        """Returns zero sums."""
        size = self.sampler.physical_batch_size
        single_batch = self.gradient.batchwise and size >= self.expected_batch_size
        # In float64 over several batches: rounding of a long float32 sum can exceed many clips.
        parts = [
            tf.zeros(part.shape, part.dtype if single_batch else tf.float64)
            for part in gradient.released
        ]
        joint = [tf.zeros(release.shape, tf.float64) for release in self.joint]
        return Sums(parts, joint, tf.zeros([], tf.float64), tf.constant(0, tf.int64))

    def add(self, sums: Sums, clipped: ClippedSum, per_example: PerExample) -> Sums:
        """Returns the sums with one more physical batch.

        Args:
          sums: The sums so far.
          clipped: The batch's clipped sum.
          per_example: The batch's exact values by record.

        Raises:
          AssertionError: The clipped sum states another sensitivity than the mechanism, which is
            that of the accounting.
        """
        stated = (clipped.clip, clipped.sensitivity, clipped.noise_scales)
        if stated != self._stated:
            raise AssertionError(f"The clipped sum states {stated}; the plan has {self._stated}.")
        parts = zip(sums.gradient, clipped.tensors, strict=True)
        joint = zip(sums.joint, self.joint, strict=True)
        loss = sums.loss
        if self.unsafe_loss:
            loss += tf.cast(tf.reduce_sum(per_example.losses), tf.float64)
        return Sums(
            gradient=[total + tf.cast(part, total.dtype) for total, part in parts],
            joint=[
                total + tf.cast(_sum_of(release, per_example), total.dtype)
                for total, release in joint
            ],
            loss=loss,
            batches=sums.batches + 1,
        )

    def release(
        self,
        optimizer: DPOptimizer,
        sums: Sums,
        gradient: StepGradient,
        key: tf.Tensor,
        noise: tf.Tensor,
    ) -> PrivatizedGradients:
        """Returns the Gaussian release of a whole sample's sums, joint releases included.

        Args:
          optimizer: The optimizer, which adds the noise.
          sums: The sums over all batches and replicas.
          gradient: The step's gradient, for its exact terms and its `pull_back`.
          key: The key of the noise, int64 of shape [2] or a tape; used once.
          noise: The noise multiplier, a float64 scalar.
        """
        clipped = ClippedSum(sums.gradient, *self._stated)
        return optimizer.privatize(
            joint_release(self.joint, clipped, sums.joint, self.sensitivity),
            noise_multiplier=noise,
            key=key,
            expected_batch_size=self.expected_batch_size,
            pull_back=gradient.pull_back,
            data_independent=gradient.data_independent,
            dtype=gradient.released[0].dtype,
        )

    @property
    def identity(self) -> Hashable:
        """A hashable value: equal values trace the same step.

        The noise multiplier is no part of it, since it is an argument of the step.
        """
        joint = tuple(release.identity for release in self.joint)
        numbers = (self.expected_batch_size, self.num_records, self.unsafe_loss)
        return (self.sampler.identity, self.gradient.identity, *self._stated, joint, *numbers)

    @property
    def _stated(self) -> tuple[Clip, Sensitivity, tuple[float, ...] | None]:
        """The clip, sensitivity and noise scales that every clipped sum must state (contract 3)."""
        return self.gradient.clip, self.gradient.sensitivity, self.gradient.noise_scales


def _sum_of(release: JointRelease, per_example: PerExample) -> tf.Tensor:
    """Returns a joint release's sum over a batch, checked for its shape and for side effects."""
    graph = tf.compat.v1.get_default_graph()
    num_known = len(graph.get_operations()) if isinstance(graph, tf.Graph) else 0
    total = tf.convert_to_tensor(release.sum_of(per_example))
    refuse_writes(graph, num_known)
    if tuple(total.shape) != tuple(release.shape):
        raise ValueError(
            f"sum_of of {release.name!r} returned shape {total.shape}; "
            f"return its stated shape {release.shape}."
        )
    return total
