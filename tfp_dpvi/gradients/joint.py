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
    """The released and public values of one step, free to use.

    ```python
    >>> import tensorflow as tf
    >>> one, zero = tf.ones([], tf.int64), tf.zeros([])
    >>> values = Released(zero, [tf.constant([0.5])], one, 10 * one, zero)
    >>> int(values.num_steps - values.step)
    9

    ```

    Attributes:
      mean: The noisy sum over the expected batch size, of the release's `shape`.
      gradient: The noisy mean gradient, before it is pulled back.
      step: Int64 scalar, the number of the step in this fit.
      num_steps: Int64 scalar, the number of steps that the fit plans; 0 if it is unknown.
      data_independent_loss: Scalar, the loss terms that depend on no record (of a prior or KL, over
        N).
      public: `StepGradient.public`, for instance the draws of the parameters.
    """

    mean: tf.Tensor
    gradient: Sequence[tf.Tensor]
    step: tf.Tensor
    num_steps: tf.Tensor
    data_independent_loss: tf.Tensor
    public: Structure = ()


class JointRelease(abc.ABC):
    """A sum of bounded per-record tensors, released with the gradient as one mechanism.

    Gradient and release read the same sample. Override `sum_of` and, to accumulate released values,
    `initial` and `accumulate`.

    ```python
    >>> import tensorflow as tf
    >>> class Count(JointRelease):
    ...     name, noise_ratio, sensitivity = "count", 3.0, Sensitivity(1.0, 1.0)
    ...     def sum_of(self, per_example):
    ...         return tf.reduce_sum(tf.cast(per_example.kept, tf.float32))
    >>> round(joint_sensitivity([Count()], Sensitivity()).add_or_remove, 3)
    1.054

    ```

    Attributes:
      name: The name in the report.
      noise_ratio: The release's noise multiplier, over A, divided by the gradient's.
      sensitivity: A and D of the sum, in its own units (not over a clip). It has no default, so
        that a release which does not state it cannot be priced.
      shape: The static shape of the sum.

    #### Formal guarantee

    The noise on every entry has standard deviation `noise_ratio * A * noise_multiplier`. Gradient
    and joint releases are one Gaussian mechanism, whose sensitivity `joint_sensitivity` states.
    """

    name: str
    noise_ratio: float
    sensitivity: Sensitivity
    shape: tuple[int, ...] = ()

    @abc.abstractmethod
    def sum_of(self, per_example: PerExample) -> tf.Tensor:
        """Returns the sum over a physical batch: a float tensor of `shape`, without side effects.

        A record's part must depend on that record alone, satisfy the bound of `sensitivity`, and be
        zero where it is not kept.

        Args:
          per_example: The exact values of the batch's records.
        """

    def initial(self) -> Structure:
        """Returns the accumulator before the first step.

        It is a structure of tensors of static shapes, empty by default.
        """
        return ()

    def accumulate(self, total: Structure, released: Released) -> Structure:
        """Returns the accumulator after a step.

        Args:
          total: The accumulator after the previous step.
          released: The step's released values.
        """
        del released
        return total

    @property
    def identity(self) -> Hashable:
        """Returns a hashable value; equal values trace the same step."""
        return (type(self), self.name, self.shape, self.sensitivity, self.noise_ratio)


def joint_sensitivity(joint: Sequence[JointRelease], gradient: Sensitivity) -> Sensitivity:
    """Returns the sensitivity of gradient and joint releases together.

    Gaussian releases on one sample are one of their concatenation, each divided by its noise:
    squared sensitivities add up.

    Args:
      joint: The releases besides the gradient.
      gradient: A and D of the gradient's sum, in units of the clip.

    Returns:
      A and D of the concatenation, each part over its noise, in units of the clip.
    """
    presence = [gradient.add_or_remove]
    replacement = [gradient.replace]
    for release in joint:
        noise = release.noise_ratio * release.sensitivity.add_or_remove
        presence.append(release.sensitivity.add_or_remove / noise)
        replacement.append(release.sensitivity.replace / noise)
    return Sensitivity(math.hypot(*presence), math.hypot(*replacement))


def joint_release(
    joint: Sequence[JointRelease],
    clipped: ClippedSum,
    sums: Sequence[tf.Tensor],
    sensitivity: Sensitivity,
) -> ClippedSum:
    """Concatenates gradient and joint releases to one sum with noise scales.

    Args:
      joint: The releases besides the gradient.
      clipped: The clipped sum of the gradient.
      sums: The sum of each release, see `JointRelease.sum_of`.
      sensitivity: A and D of the concatenation, from `joint_sensitivity`.
    """
    if not joint:
        return clipped
    scales = list(clipped.noise_scales or [1.0] * len(clipped.tensors))
    scales += [
        release.noise_ratio * release.sensitivity.add_or_remove / clipped.clip.bound
        for release in joint
    ]
    return ClippedSum(
        [*clipped.tensors, *sums], clipped.clip, sensitivity, scales, num_joint=len(joint)
    )
