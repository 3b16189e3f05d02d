"""Sums that are released with the gradient, on the same sample and for one price (section 5.5)."""

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
    """What one step makes public, and public values of it: free to use.

    Attributes:
      mean: tensor of the release's `shape`, the noisy sum over the expected batch size.
      gradient: the noisy mean gradient, before it is pulled back.
      step: int64 scalar, the number of the step in this fit.
      num_steps: int64 scalar, how many steps the fit plans; 0 where that is not known.
      data_independent_loss: scalar, the loss terms that touch no record (a prior's or a KL's, over N).
      public: what the step's `StepGradient` calls public: draws of the parameters, for instance.
    """

    mean: tf.Tensor
    gradient: Sequence[tf.Tensor]
    step: tf.Tensor
    num_steps: tf.Tensor
    data_independent_loss: tf.Tensor
    public: Structure = ()


class JointRelease(abc.ABC):
    """A sum of bounded tensors of records, released with the gradient of the same sample and priced with it as one.

    Override `sum_of` and, to keep something of what is released, `initial` and `accumulate`.

    Attributes:
      name: in the report.
      shape: static shape of the sum.

    #### Formal guarantee

    The noise on every entry has standard deviation `noise_ratio * A * noise_multiplier`. Gradient and joint releases are
    one Gaussian mechanism, whose sensitivity `joint_sensitivity` states.
    """

    name: str
    shape: tuple[int, ...] = ()

    @property
    @abc.abstractmethod
    def noise_ratio(self) -> float:
        """The release's noise multiplier, over A, divided by the gradient's."""

    @property
    @abc.abstractmethod
    def sensitivity(self) -> Sensitivity:
        """A and D of the sum, in its own units (not over a clip)."""

    @abc.abstractmethod
    def sum_of(self, per_example: PerExample) -> tf.Tensor:
        """Returns the sum over a physical batch: float tensor of `shape`.

        A record's part depends on that record alone, is bounded so that `sensitivity` holds, and is exactly zero where
        `per_example.kept` is False. Nothing is written anywhere.
        """

    def initial(self) -> Structure:
        """Returns the accumulator before the first step: a structure of tensors of static shapes, by default none."""
        return ()

    def accumulate(self, total: Structure, released: Released) -> Structure:
        """Returns the accumulator after a step, a function of the one before it and of what the step released."""
        del released
        return total

    @property
    def identity(self) -> Hashable:
        """Hashable; equal where a step traces the same."""
        return (type(self), self.name, self.shape, self.sensitivity, self.noise_ratio)


def joint_sensitivity(joint: Sequence[JointRelease], gradient: Sensitivity) -> Sensitivity:
    """Returns the sensitivity of gradient and joint releases together, each over its noise, in units of the clip.

    #### Formal guarantee

    Gaussian releases on one sample are one of all of them side by side, each divided by its noise: squares add up.
    """
    own = [(one.sensitivity, one.noise_ratio * one.sensitivity.add_or_remove) for one in joint]
    presence = [gradient.add_or_remove, *(stated.add_or_remove / noise for stated, noise in own)]
    replacement = [gradient.replace, *(stated.replace / noise for stated, noise in own)]
    return Sensitivity(math.hypot(*presence), math.hypot(*replacement))


def joint_release(
    joint: Sequence[JointRelease], clipped: ClippedSum, sums: Sequence[tf.Tensor], sensitivity: Sensitivity
) -> ClippedSum:
    """Returns gradient and joint releases as one sum with noise scales; `sensitivity` is that of `joint_sensitivity`."""
    if not joint:
        return clipped
    scales = list(clipped.noise_scales or [1.0] * len(clipped.tensors))
    scales += [one.noise_ratio * one.sensitivity.add_or_remove / clipped.clip.bound for one in joint]
    dtype = clipped.tensors[0].dtype
    sums = [tf.cast(one, dtype) for one in sums]
    return ClippedSum([*clipped.tensors, *sums], clipped.clip, sensitivity, scales, num_joint=len(joint))
