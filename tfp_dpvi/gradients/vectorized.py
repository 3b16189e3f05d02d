"""Clipped sums for any model: one record's gradient, mapped over the batch with `tf.vectorized_map`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tfp_dpvi._keras import tf
from tfp_dpvi.gradients.clipping import ClippedSum, clip_record, select_finite
from tfp_dpvi.gradients.side_effects import refuse_writes

RecordGradient = Callable[[Any, Any], tuple[Any, Sequence[Any]]]
"""`record_gradient(record, keep) -> (loss, gradient)` for one record.

`keep` is a scalar bool: False for padding. The function may use it to select away a bad record before it multiplies
anything; `clipped_sum` selects once more in any case.
"""


def clipped_sum(
    record_gradient: RecordGradient, records: Any, mask: Any, *, l2_norm_clip: float, clipping: str = "flat"
) -> tuple[ClippedSum, Any]:
    """Sum over a batch of per-record gradients, each clipped to a joint l2 norm.

    Args:
      record_gradient: see `RecordGradient`; the loss is a scalar and the gradient a sequence of float tensors.
      records: structure of tensors with a common leading dimension P (the physical batch).
      mask: bool tensor of shape [P]; False marks padding, which contributes exactly zero.
      l2_norm_clip: the bound C, positive; `math.inf` switches clipping off (and privacy with it).
      clipping: see `clip_factors`.

    Returns:
      The `ClippedSum`, and the sum of the kept records' losses (*not private*: for opt-in monitoring only).

    Raises:
      ValueError: the loss writes to a variable.

    #### Formal guarantee

    A record contributes a vector of joint l2 norm at most C, and exactly zero if it is masked or if its loss or its
    gradient holds NaN or Inf. Its contribution depends on no other record. Hence A = C and D = 2C.
    """

    def one(record_and_mask: Any) -> tuple[Any, list[Any]]:
        record, keep = record_and_mask
        graph = tf.compat.v1.get_default_graph()
        num_known = len(graph.get_operations())
        loss, gradient = record_gradient(record, keep)
        refuse_writes(graph, num_known)
        keep = keep & tf.math.is_finite(loss)
        selected, keep = select_finite(gradient, keep)
        loss = tf.where(keep, loss, tf.zeros_like(loss))
        return loss, clip_record(selected, l2_norm_clip, clipping)

    losses, clipped = tf.vectorized_map(one, (records, mask))
    total = [tf.reduce_sum(part, axis=0) for part in clipped]
    return ClippedSum(total, l2_norm_clip), tf.reduce_sum(losses)
