"""Per-example values that every engine returns with the clipped sum."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tfp_dpvi._tf import tf, tfd, tfp, with_full_parameters


class PerExample(NamedTuple):
    """Exact values of the examples of a physical batch, for monitoring and joint releases: *not private*.

    Attributes:
      losses: float tensor of shape [n], weights included; 0 where not kept.
      clipped: bool tensor of shape [n]: whether the gradient's norm exceeded the clip.
      kept: bool tensor of shape [n]: False for padding and for examples that contribute nothing (contract C8).
      gradients: the clipped per-example gradients, tensors of shape [n, ...], 0 where not kept; None if the engine never
        forms them.
      norms: float tensor of shape [n], the gradients' l2 norms before the clip, 0 where not kept; None as above.
    """

    losses: tf.Tensor
    clipped: tf.Tensor
    kept: tf.Tensor
    gradients: Sequence[tf.Tensor] | None = None
    norms: tf.Tensor | None = None

    @classmethod
    def of(cls, losses: tf.Tensor, factors: Sequence[tf.Tensor], kept: tf.Tensor) -> PerExample:
        """Selects losses and marks clipped examples: those with a factor below 1 for some part of the gradient."""
        least = functools.reduce(tf.minimum, factors)
        return cls(tf.where(kept, losses, tf.zeros_like(losses)), kept & (least < 1), kept)

    def sum_of_losses(self) -> tf.Tensor:
        """Returns the exact training loss, a scalar."""
        return tf.reduce_sum(self.losses)


def take_apart(
    distribution: tfd.Distribution,
) -> tuple[list[tf.Tensor], Callable[[Sequence[tf.Tensor]], tfd.Distribution]]:
    """Returns a distribution's parameters as tensors with one row per batch member, and a function that rebuilds it.

    Raises:
      TypeError: a distribution whose parameters TFP does not know.
    """
    plain = getattr(distribution, "tensor_distribution", distribution)  # TFP layers wrap it.
    try:
        whole = tfp.experimental.as_composite(with_full_parameters(plain))
        parts = [tf.convert_to_tensor(part) for part in tf.nest.flatten(whole, expand_composites=True)]
    except (TypeError, ValueError, NotImplementedError) as error:
        raise TypeError(
            f"{type(distribution).__name__} cannot be split by record ({error}): use one of TFP's own distributions."
        ) from error
    return parts, lambda changed: tf.nest.pack_sequence_as(whole, changed, expand_composites=True)
