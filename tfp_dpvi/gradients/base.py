"""Per-example values that every engine returns with the clipped sum."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tfp_dpvi._tf import tf, tfd, tfp, with_full_parameters


class PerExample(NamedTuple):
    """Exact values of the n examples of a physical batch, for monitoring and joint releases: *not private*."""

    losses: tf.Tensor  # float [n], weights included; 0 where not kept.
    clipped: tf.Tensor  # bool [n]: whether the gradient's norm exceeded the clip.
    # bool [n]: False for padding and for examples that contribute nothing (contract C8).
    kept: tf.Tensor
    gradients: Sequence[tf.Tensor] | None = (
        None  # Clipped, [n, ...], 0 where not kept; None if never formed.
    )
    norms: tf.Tensor | None = (
        None  # float [n], the l2 norms before the clip, 0 where not kept; None as above.
    )

    @classmethod
    def of(cls, losses: tf.Tensor, factors: Sequence[tf.Tensor], kept: tf.Tensor) -> PerExample:
        """Selects losses and marks clipped examples: those with a factor below 1 for some part of the gradient."""
        least = functools.reduce(tf.minimum, factors)
        return cls(tf.where(kept, losses, tf.zeros_like(losses)), kept & (least < 1), kept)


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
        parts = [
            tf.convert_to_tensor(part) for part in tf.nest.flatten(whole, expand_composites=True)
        ]
    except (TypeError, ValueError, NotImplementedError) as error:
        raise TypeError(
            f"{type(distribution).__name__} cannot be split by record ({error}): use one of TFP's "
            "own distributions."
        ) from error
    return parts, lambda changed: tf.nest.pack_sequence_as(whole, changed, expand_composites=True)
