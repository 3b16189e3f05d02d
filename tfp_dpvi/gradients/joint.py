"""Sums that are released jointly with the gradient, on the same sample and as one mechanism."""

from __future__ import annotations

import abc
import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from tfp_dpvi._tf import Structure, tf
from tfp_dpvi.gradients.base import PerExample
from tfp_dpvi.gradients.clip import ClippedSum
from tfp_dpvi.privacy import Sensitivity


class Released(NamedTuple):
    """The released and public values of one step, free to use."""

    mean: tf.Tensor  # Of the release's `shape`: the noisy sum over the expected batch size.
    gradient: Sequence[tf.Tensor]  # The noisy mean gradient, before it is pulled back.
    step: tf.Tensor  # int64 scalar, the number of the step in this fit.
    num_steps: tf.Tensor  # int64 scalar, the number of steps that the fit plans; 0 if unknown.
    # Scalar, the loss terms that depend on no record (of a prior or KL, over N).
    data_independent_loss: tf.Tensor
    public: Structure = ()  # `StepGradient.public`, for instance the draws of the parameters.


class JointRelease(abc.ABC):
    """A sum of bounded per-record tensors, released with the gradient of the same sample as one mechanism.

    Override `sum_of` and, to accumulate released values, `initial` and `accumulate`.

    #### Formal guarantee

    The noise on every entry has standard deviation `noise_ratio * A * noise_multiplier`. Gradient
    and joint releases are one Gaussian mechanism, whose sensitivity `joint_sensitivity` states.
    """

    name: str  # In the report.
    shape: tuple[int, ...] = ()  # Of the sum, static.

    @property
    @abc.abstractmethod
    def noise_ratio(self) -> float:
        """Returns the release's noise multiplier, over A, divided by the gradient's."""

    @property
    @abc.abstractmethod
    def sensitivity(self) -> Sensitivity:
        """Returns A and D of the sum, in its own units (not over a clip)."""

    @abc.abstractmethod
    def sum_of(self, per_example: PerExample) -> tf.Tensor:
        """Returns the sum over a physical batch: float tensor of `shape`, without side effects.

        A record's part must depend on that record alone, satisfy the bound of `sensitivity`, and be
        zero where it is not kept.
        """

    def initial(self) -> Structure:
        """Returns the accumulator before the first step: a structure of tensors of static shapes, empty by default."""
        return ()

    def accumulate(self, total: Structure, released: Released) -> Structure:
        """Returns the accumulator after a step, from the previous one and the step's released values."""
        del released
        return total

    @property
    def identity(self) -> Hashable:
        """Returns a hashable value; equal values trace the same step."""
        return (type(self), self.name, self.shape, self.sensitivity, self.noise_ratio)


def joint_sensitivity(joint: Sequence[JointRelease], gradient: Sensitivity) -> Sensitivity:
    """Returns the sensitivity of gradient and joint releases together, each over its noise, in units of the clip.

    Gaussian releases on one sample are one of their concatenation, each divided by its noise:
    squared sensitivities add up.
    """
    own = [(one.sensitivity, one.noise_ratio * one.sensitivity.add_or_remove) for one in joint]
    presence = [gradient.add_or_remove, *(stated.add_or_remove / noise for stated, noise in own)]
    replacement = [gradient.replace, *(stated.replace / noise for stated, noise in own)]
    return Sensitivity(math.hypot(*presence), math.hypot(*replacement))


def joint_release(
    joint: Sequence[JointRelease],
    clipped: ClippedSum,
    sums: Sequence[tf.Tensor],
    sensitivity: Sensitivity,
) -> ClippedSum:
    """Concatenates gradient and joint releases to one sum with noise scales; `sensitivity` is from `joint_sensitivity`."""
    if not joint:
        return clipped
    scales = list(clipped.noise_scales or [1.0] * len(clipped.tensors))
    scales += [
        one.noise_ratio * one.sensitivity.add_or_remove / clipped.clip.bound for one in joint
    ]
    return ClippedSum(
        [*clipped.tensors, *sums], clipped.clip, sensitivity, scales, num_joint=len(joint)
    )
