"""The paired clip: clipped gradients with mean zero at the true parameters, and their curvature.

For each record draw y' from the likelihood at the current parameters, let `delta` be the difference
of the scores of y and y', and `psi = clip(delta)`. At the true parameters y and y' are
exchangeable, so `delta` is symmetric and `psi` has mean zero for every clip; a clipped score has
not. The curvature of the sum is `A = E[psi delta^T] / 2`, its variance `E[psi psi^T]`; the noisy
sums of both are released jointly with the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from tfp_dpvi._tf import Structure, tf
from tfp_dpvi.gradients.base import PerExample
from tfp_dpvi.gradients.clip import Clip, ClippedSum
from tfp_dpvi.gradients.joint import JointRelease, Released
from tfp_dpvi.gradients.step import StepGradient
from tfp_dpvi.gradients.vmap import clipped_sum
from tfp_dpvi.privacy import Sensitivity

_Values = TypeVar("_Values")

# Blocks of steps, of equal length, over which released values are averaged.
NUM_BLOCKS = 20

# Parts of the squared sensitivity that the matrix and the clipped part take from the gradient.
_MATRIX_SHARE = 0.1
_SCALE_SHARE = 0.02
# Bound on psi . delta, in squares of the clip.
_CAP = 3.0


def paired(
    record_losses: Callable[[dict[str, Structure], tf.Tensor], tuple[tf.Tensor, tf.Tensor]],
    simulate: Callable[[dict[str, Structure], tf.Tensor], tuple[Structure, tf.Tensor]],
    theta: tf.Tensor,
    clip: Clip,
    **exact: Any,
) -> StepGradient:
    """Returns the step's gradient in the unconstrained parameters, from pairs of records.

    A pair is an observed record and its twin, a simulated record.

    Args:
      record_losses: `record_losses(record, theta)` returns the losses of the record and of its
        twin, `record["simulated"]`, two scalars.
      simulate: `simulate(records, key)` returns the twins of a physical batch of P records, each
        from its record's inputs alone, and whether each can be used, bool of shape [P].
      theta: The draw of the parameters that the step's records share, shape [d].
      clip: The clip of a pair's difference.
      **exact: Other attributes of `StepGradient`, which depend on no record.

    #### Formal guarantee

    As for `clipped_sum`: a pair is one record with its own draw, clipped as one. A record without a
    usable twin contributes exactly zero. The bound holds whatever the twins are; that a record more
    leaves the law of the others' twins as it is takes the draws of different places of a batch as
    independent.
    """

    def record_gradient(
        record: dict[str, Structure], keep: tf.Tensor
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        # `clipped_sum` selects the records that are kept.
        del keep
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(theta)
            observed, twin = record_losses(record, theta)
            difference = observed - twin
        gradient = tape.gradient(difference, theta, unconnected_gradients="zero")
        # Both or neither: dropping only the twin would break the symmetry.
        both = record["usable"] & tf.math.is_finite(twin)
        return tf.where(both, observed, math.nan), [gradient]

    def clip_batch(
        records: dict[str, Structure], mask: tf.Tensor, key: tf.Tensor
    ) -> tuple[ClippedSum, PerExample]:
        twins, usable = simulate(records, key)
        pairs = {**records, "simulated": twins, "usable": usable}
        return clipped_sum(record_gradient, pairs, mask, clip)

    return StepGradient(clip_batch, [theta], record_gradient=record_gradient, public=theta, **exact)


def curvature_releases(size: int, clip: Clip) -> tuple[JointRelease, ...]:
    """Returns the joint releases of a paired clip: its curvature, and the part that was clipped.

    Args:
      size: The number d of parameters that the likelihood reads.
      clip: The clip of a pair's difference.
    """
    gradient = 1.0 - _MATRIX_SHARE - _SCALE_SHARE
    return (
        Curvature(size, clip.unit, math.sqrt(gradient / _MATRIX_SHARE)),
        ClippedAway(clip, math.sqrt(gradient / _SCALE_SHARE)),
    )


class Curvature(JointRelease):
    """The sum of `psi psi^T / 2` over records, and sums of all released values by blocks of steps.

    Args:
      size: The number d of parameters; the sum has shape [d, d].
      bound: The clip C, finite.
      noise_ratio: The release's noise multiplier over the gradient's.

    ```python
    >>> from tfp_dpvi.calibrated import Curvature
    >>> release = Curvature(size=2, bound=1.0, noise_ratio=3.0)
    >>> release.shape
    (2, 2)
    >>> release.sensitivity.add_or_remove
    0.5

    ```

    #### Formal guarantee

    In Frobenius norm `|psi psi^T / 2| <= C^2 / 2`, and two such terms differ by at most
    `C^2 / sqrt(2)`, or `C^2 / 2` for d = 1.
    """

    name = "curvature"

    def __init__(self, size: int, bound: float, noise_ratio: float) -> None:
        self.shape = (size, size)
        self.noise_ratio = noise_ratio
        self.sensitivity = Sensitivity(
            bound**2 / 2.0, bound**2 / (math.sqrt(2.0) if size > 1 else 2.0)
        )
        self._size = size

    def sum_of(self, per_example: PerExample) -> tf.Tensor:
        """See `JointRelease`."""
        (gradients,) = _formed(self.name, per_example.gradients)
        # A long float32 sum can exceed the sensitivity by rounding.
        psi = tf.cast(gradients, tf.float64)
        return tf.linalg.matmul(psi, psi, transpose_a=True) / 2.0

    def initial(self) -> Structure:
        """Returns zero sums of shape `[NUM_BLOCKS, ...]`."""
        vector, matrix = [self._size], [self._size, self._size]
        shapes = {
            "steps": [],
            "theta": vector,
            "squares": vector,
            "gradient": vector,
            "matrix": matrix,
        }
        return initial_blocks(shapes)

    def accumulate(self, total: Any, released: Released) -> Structure:
        """See `JointRelease`."""
        (gradient,) = released.gradient
        noisy = released.mean
        values = {
            "steps": tf.ones([], tf.float64),
            "theta": released.public,
            "squares": tf.square(released.public),
            "gradient": gradient,
            "matrix": (noisy + tf.transpose(noisy)) / 2.0,
        }
        return {name: total[name] + in_block(released, value) for name, value in values.items()}


class ClippedAway(JointRelease):
    """The sum of `min(psi . delta, 3 C^2) / 2` over records.

    Its excess over the trace of the curvature was clipped away.

    Args:
      clip: The clip of a pair's difference, perhaps off.
      noise_ratio: The release's noise multiplier over the gradient's.

    ```python
    >>> from tfp_dpvi.calibrated import ClippedAway
    >>> from tfp_dpvi.gradients import Clip
    >>> ClippedAway(Clip(1.0), noise_ratio=6.0).sensitivity.add_or_remove
    1.5

    ```

    #### Formal guarantee

    A record's term lies between 0 and 1.5 C^2, which bounds A and D.
    """

    name = "clipped_away"

    def __init__(self, clip: Clip, noise_ratio: float) -> None:
        self._bound = clip.bound
        self.noise_ratio = noise_ratio
        most = _CAP / 2.0 * clip.unit**2
        self.sensitivity = Sensitivity(most, most)

    def sum_of(self, per_example: PerExample) -> tf.Tensor:
        """See `JointRelease`."""
        norms = tf.cast(_formed(self.name, per_example.norms), tf.float64)
        products = tf.minimum(norms, self._bound) * norms
        return tf.reduce_sum(tf.minimum(products, _CAP * self._bound**2)) / 2.0

    def initial(self) -> Structure:
        """Returns zero sums of shape `[NUM_BLOCKS]`."""
        return tf.zeros([NUM_BLOCKS], tf.float64)

    def accumulate(self, total: Structure, released: Released) -> Structure:
        """See `JointRelease`."""
        return total + in_block(released, released.mean)


def _formed(name: str, values: _Values | None) -> _Values:
    """Returns values of each record's gradient, which some engines never form."""
    if values is None:
        raise ValueError(f"{name} needs each record's gradient: use an engine that forms it.")
    return values


def initial_blocks(shapes: dict[str, list[int]]) -> dict[str, tf.Tensor]:
    """Returns zero sums over blocks of steps, float64 of shape `[NUM_BLOCKS, ...]`."""
    return {name: tf.zeros([NUM_BLOCKS, *shape], tf.float64) for name, shape in shapes.items()}


def last_block(step: int, num_steps: int) -> int:
    """Returns the number of blocks that are complete after some steps.

    Args:
      step: The number of steps that ran.
      num_steps: The number of steps that the fit plans.
    """
    return step * NUM_BLOCKS // num_steps


def have_steps(accumulated: dict[str, Any], blocks: Sequence[int] | np.ndarray) -> bool:
    """Returns whether a step of some blocks counts: those at overflowing parameters do not.

    Args:
      accumulated: The fit's accumulators.
      blocks: The numbers of the blocks.
    """
    return bool(np.asarray(accumulated["curvature"]["steps"])[blocks].any())


def in_block(released: Released, value: tf.Tensor) -> tf.Tensor:
    """Returns the value in the row of the step's block, with zeros in the other rows.

    Args:
      released: What the step released, with its number.
      value: The value, of any shape.

    Returns:
      Float64 of shape `[NUM_BLOCKS, ...]`.
    """
    block = released.step * NUM_BLOCKS // tf.maximum(released.num_steps, 1)
    row = tf.one_hot(tf.minimum(block, NUM_BLOCKS - 1), NUM_BLOCKS, dtype=tf.float64)
    # A draw may lie at the end of its support.
    row *= tf.cast(tf.reduce_all(tf.math.is_finite(released.public)), tf.float64)
    value = tf.where(tf.math.is_finite(value), value, tf.zeros_like(value))
    return tf.reshape(row, [-1] + [1] * value.shape.rank) * tf.cast(value, tf.float64)
