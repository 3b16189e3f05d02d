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
    joint_release,
    joint_sensitivity,
    refuse_writes,
)
from tfp_dpvi.optimizers import DPOptimizer, PrivatizedGradients
from tfp_dpvi.privacy import PrivacyLedger, PrivacyPlan, Sensitivity
from tfp_dpvi.sampling import Sampler


class Sums(NamedTuple):
    """The sums over a step's sample before noise: exact, hence *not private*."""

    gradient: list[tf.Tensor]  # The parts of the clipped sum.
    joint: list[tf.Tensor]  # The sum of each joint release.
    loss: tf.Tensor  # The sum of the records' losses.
    batches: tf.Tensor  # int64 scalar, the number of physical batches.


@dataclasses.dataclass(frozen=True)
class Mechanism:
    """Sampler, clipped gradient, noise and joint releases, which determine a step's privacy cost.

    #### Formal guarantee

    One release is a Gaussian mechanism of `sensitivity` on a sample drawn by `sampler`, as `plan` states for the accounting.
    """

    sampler: Sampler
    gradient: ClippedGradient
    expected_batch_size: float  # The public denominator qN.
    num_records: int  # The public N.
    noise_multiplier: float | None = (
        None  # Noise standard deviation over the clip; None until `calibrated` finds it.
    )
    metrics: tuple[
        JointRelease, ...
    ] = ()  # The joint releases of `compile`, on the same sample as the gradient.
    neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE
    accountant: str = "pld"
    randomness: str = ""  # See `PrivacyPlan`.
    unsafe_loss: bool = False  # Whether to also sum exact losses, which are *not private*.

    @property
    def joint(self) -> tuple[JointRelease, ...]:
        """All joint releases with the gradient."""
        return (*self.gradient.joint, *self.metrics)

    @property
    def noise(self) -> tf.Tensor:
        """Returns the noise multiplier for steps, a float64 scalar; raises `ValueError` if it is None."""
        if self.noise_multiplier is None:
            raise ValueError(
                "mechanism.noise_multiplier is None: call mechanism.calibrated(ledger, epsilon=..., delta=..., ...) first."
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
        """Returns the standard deviations of the noise on the gradient sum (without scales) and on each joint release."""
        multiplier, clip = self.noise_multiplier or 0.0, self.gradient.clip.bound
        joint = (one.noise_ratio * one.sensitivity.add_or_remove * multiplier for one in self.joint)
        return multiplier * clip if multiplier else 0.0, *joint

    @property
    def non_private(self) -> bool:
        """True without noise and clip, as for a fit to public or simulated records."""
        return self.noise_multiplier == 0.0 and self.gradient.clip.is_off

    @property
    def sensitivity(self) -> Sensitivity:
        """Returns the sensitivity of gradient and joint releases together, in units of the clip."""
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
            metrics=tuple(one.name for one in self.joint),
            randomness=self.randomness,
        )

    def num_words(self) -> int:
        """Returns the number of random words that a step takes of a tape; traces the step's draws."""
        sizes: list[int] = []  # Of each replica's, which are equal.

        def draw(key: tf.Tensor) -> None:
            released = self.gradient.draw(key).released
            sizes.append(sum(part.shape.num_elements() for part in released))

        def on_replicas(key: tf.Tensor) -> None:
            tf.distribute.get_strategy().run(draw, args=(key,))

        key = tf.TensorSpec([2], tf.int64)
        tf.function(on_replicas, input_signature=[key], autograph=False).get_concrete_function()
        num = sizes[0] + sum(math.prod(one.shape) for one in self.joint)
        return _random.num_words(self.sampler.num_words, num)

    def calibrated(
        self, ledger: PrivacyLedger, *, epsilon: float, delta: float, num_releases: int
    ) -> Mechanism:
        """Returns the mechanism with the smallest noise such that these steps and the ledger meet a budget.

        Raises:
          BudgetExhaustedError: the budget is spent.
        """
        return self.with_noise_of(
            self.plan(num_releases).calibrated(epsilon, delta, ledger.events())
        )

    def zeros(self, gradient: StepGradient) -> Sums:
        """Returns zero sums."""
        # In float64 over several batches: rounding of a long float32 sum can exceed many clips.
        once = (
            self.gradient.batchwise and self.sampler.physical_batch_size >= self.expected_batch_size
        )
        parts = [
            tf.zeros(part.shape, part.dtype if once else tf.float64) for part in gradient.released
        ]
        joint = [tf.zeros(one.shape, tf.float64) for one in self.joint]
        return Sums(parts, joint, tf.zeros([], tf.float64), tf.constant(0, tf.int64))

    def add(self, sums: Sums, clipped: ClippedSum, per_example: PerExample) -> Sums:
        """Returns the sums with one more physical batch."""
        stated = (clipped.clip, clipped.sensitivity, clipped.noise_scales)
        if stated != self._stated:
            raise AssertionError(f"The clipped sum states {stated}; the plan has {self._stated}.")
        parts = zip(sums.gradient, clipped.tensors, strict=True)
        joint = zip(sums.joint, self.joint, strict=True)
        return Sums(
            [total + tf.cast(part, total.dtype) for total, part in parts],
            [total + tf.cast(_sum_of(one, per_example), total.dtype) for total, one in joint],
            sums.loss + tf.cast(tf.reduce_sum(per_example.losses), tf.float64)
            if self.unsafe_loss
            else sums.loss,
            sums.batches + 1,
        )

    def release(
        self,
        optimizer: DPOptimizer,
        sums: Sums,
        gradient: StepGradient,
        key: tf.Tensor,
        noise: tf.Tensor,
    ) -> PrivatizedGradients:
        """Returns the Gaussian release of a whole sample's sums, gradient and joint releases together.

        The optimizer adds the noise of this multiplier; `key` is int64 of shape [2] or a tape, used once.
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
        """Returns a hashable value; equal values trace the same step. The noise multiplier is an argument of the step."""
        joint = tuple(one.identity for one in self.joint)
        numbers = (self.expected_batch_size, self.num_records, self.unsafe_loss)
        return (self.sampler.identity, self.gradient.identity, *self._stated, joint, *numbers)

    @property
    def _stated(self) -> tuple[Clip, Sensitivity, tuple[float, ...] | None]:
        return self.gradient.clip, self.gradient.sensitivity, self.gradient.noise_scales


def _sum_of(one: JointRelease, per_example: PerExample) -> tf.Tensor:
    """Returns a joint release's sum over a physical batch, checked for its shape and for side effects."""
    graph = tf.compat.v1.get_default_graph()
    known = len(graph.get_operations()) if isinstance(graph, tf.Graph) else 0
    found = tf.convert_to_tensor(one.sum_of(per_example))
    refuse_writes(graph, known)
    if tuple(found.shape) != tuple(one.shape):
        raise ValueError(
            f"sum_of of {one.name!r} returned shape {found.shape}; return its stated shape {one.shape}."
        )
    return found
