"""What a clipper sees of single records beside their gradients: for monitoring, and *not private* as it is."""

from __future__ import annotations

from typing import Any, NamedTuple

from tfp_dpvi._tf import tf


class RecordStatistics(NamedTuple):
    """Exact values of the records of a physical batch.

    Attributes:
      losses: float tensor of shape [n], weights included; 0 where not kept.
      clipped: bool tensor of shape [n]: the gradient was longer than the clip.
      kept: bool tensor of shape [n]: False for padding and for records that contribute nothing (contract C8).
    """

    losses: Any
    clipped: Any
    kept: Any

    @classmethod
    def of(cls, losses: Any, factors: Any, kept: Any) -> RecordStatistics:
        """Of losses and clip factors before selection.

        Args:
          losses: float tensor of shape [n].
          factors: list of float tensors of shape [n], what parts of the gradients are multiplied by.
          kept: bool tensor of shape [n].
        """
        least = factors[0]
        for factor in factors[1:]:
            least = tf.minimum(least, factor)
        return cls(tf.where(kept, losses, tf.zeros_like(losses)), kept & (least < 1), kept)

    def sum_of_losses(self) -> Any:
        """Scalar: what exact training losses are made of, if somebody asks for them."""
        return tf.reduce_sum(self.losses)
