"""Per-example values that every engine returns with the clipped sum."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from tfp_dpvi._tf import tf, tfd, tfp, with_full_parameters


class PerExample(NamedTuple):
    """Exact values of the n examples of a physical batch: *not private*.

    They serve monitoring and joint releases.

    ```python
    >>> import tensorflow as tf
    >>> losses, factors = tf.constant([2.0, 3.0]), tf.constant([1.0, 0.5])
    >>> PerExample.of(losses, [factors], tf.constant([True, True])).clipped.numpy().tolist()
    [False, True]

    ```

    Attributes:
      losses: Float [n], weights included; 0 where an example is not kept.
      clipped: Bool [n], True where the norm of the gradient exceeded the clip.
      kept: Bool [n], False for padding and for examples that contribute nothing (contract 8).
      gradients: The clipped gradients, [n, ...] for each variable, 0 where an example is not kept.
        None if they are never formed.
      norms: Float [n], the l2 norms before the clip, 0 where an example is not kept; or None.
      extra: Values of an engine's own joint releases by name, [n, ...], 0 where an example is not
        kept; or None.
    """

    losses: tf.Tensor
    clipped: tf.Tensor
    kept: tf.Tensor
    gradients: Sequence[tf.Tensor] | None = None
    norms: tf.Tensor | None = None
    extra: Mapping[str, tf.Tensor] | None = None

    @classmethod
    def of(cls, losses: tf.Tensor, factors: Sequence[tf.Tensor], kept: tf.Tensor) -> PerExample:
        """Selects the losses and marks the clipped examples.

        Args:
          losses: Float [n], one loss for each example.
          factors: Float [n] for each part of the gradient. An example is clipped if one of its
            factors is below 1.
          kept: Bool [n], False for examples that contribute nothing.

        Returns:
          The values, without gradients and norms.
        """
        least = functools.reduce(tf.minimum, factors)
        return cls(tf.where(kept, losses, tf.zeros_like(losses)), kept & (least < 1), kept)


def take_apart(
    distribution: tfd.Distribution,
) -> tuple[list[tf.Tensor], Callable[[Sequence[tf.Tensor]], tfd.Distribution]]:
    """Splits a distribution into its parameters.

    Returns:
      The parameters as tensors with one row for each batch member, and a function that builds a
      distribution from such tensors.

    Raises:
      TypeError: TFP does not know the parameters of the distribution.
    """
    # TFP's layers wrap the distributions that they return.
    plain = getattr(distribution, "tensor_distribution", distribution)
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
