"""Clipped sums for any model: one example's gradient, vectorized over the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from tfp_dpvi._tf import Structure, map_apart, tf
from tfp_dpvi.gradients.base import PerExample
from tfp_dpvi.gradients.clip import Clip, ClippedSum, product_epsilon, refuse_low_precision, tiny
from tfp_dpvi.gradients.isolation import refuse_varying_shapes, refuse_writes

# Entries of an example's gradient from which a matrix product is faster than a loop over products.
_LARGE = 4096
# Records in a float32 sum. The rounding of a longer running sum, which changes at powers of two,
# can exceed many clips; within a block it is at most 2 * 255 * 256 / 2**24 = 0.8 % of a clip.
# Blocks are summed in float64.
_BLOCK = 256
# Columns from which products of blocks in float32 are faster than one in float64.
_WIDE = 12

RecordGradient = Callable[[tf.Tensor, tf.Tensor], tuple[tf.Tensor, Sequence[tf.Tensor]]]
"""`record_gradient(record, keep) -> (loss, gradient)` for one record.

`keep` is a scalar bool: False for padding. The function may use it to replace a bad record before
any product; `clipped_sum` selects once more in any case.
"""


def clipped_sum(
    record_gradient: RecordGradient, records: Structure, mask: tf.Tensor, clip: Clip
) -> tuple[ClippedSum, PerExample]:
    """Sums per-example gradients over a batch, each clipped to a joint l2 norm.

    Args:
      record_gradient: See `RecordGradient`; the loss is a scalar and the gradient a sequence of
        float tensors.
      records: Structure of tensors with a common leading dimension P (the physical batch).
      mask: Bool tensor of shape [P]; False marks padding, which contributes exactly zero.
      clip: The bound C and its scheme.

    Returns:
      The `ClippedSum`, and exact values of single examples (*not private*).

    Raises:
      ValueError: The loss writes to a variable, or computes shapes that depend on the record's
        values.

    #### Formal guarantee

    A record contributes a vector of joint l2 norm at most C up to rounding, and exactly zero if it
    is masked or if its loss or its gradient's squared norm is NaN or Inf. Its contribution depends
    on no other record. Hence A = C and D = 2C in exact arithmetic; in float32 a sum of n records
    exceeds that by less than (1 % + n 2^-22) C, in float64 by nothing that matters.
    """
    losses, gradients = gradients_of(record_gradient, records, mask)
    rows = [
        tf.reshape(part, [tf.shape(mask)[0], int(np.prod(part.shape[1:]))]) for part in gradients
    ]
    # Adds a bound on squares that were flushed to zero, so that a norm is never too small.
    squares = [
        tf.reduce_sum(tf.square(part), axis=1) + part.shape[1] * tiny(part.dtype) for part in rows
    ]
    keep = mask & tf.math.is_finite(losses) & tf.math.is_finite(tf.add_n(squares))
    factors = clip.factors(squares)
    examples = PerExample.of(losses, factors, keep)
    # Rows are selected and never multiplied, since 0 x NaN is NaN (contract 8).
    rows = [tf.where(keep[:, None], part, tf.zeros([], part.dtype)) for part in rows]
    factors = [tf.where(keep, factor, tf.zeros_like(factor)) for factor in factors]
    clipped = list(zip(rows, factors, [part.shape[1:] for part in gradients], strict=True))
    total = [tf.reshape(weighted_sum(part, factor), shape) for part, factor, shape in clipped]
    each = [tf.reshape(part * factor[:, None], [-1, *shape]) for part, factor, shape in clipped]
    norms = tf.where(keep, tf.sqrt(tf.add_n(squares)), tf.zeros([], squares[0].dtype))
    return ClippedSum(total, clip), examples._replace(gradients=each, norms=norms)


def gradients_of(
    record_gradient: RecordGradient, records: Structure, mask: tf.Tensor
) -> tuple[tf.Tensor, Sequence[tf.Tensor]]:
    """Returns losses and gradients of a batch's records, unclipped, each from its record alone.

    Args:
      record_gradient: See `RecordGradient`.
      records: Structure of tensors with a common leading dimension P.
      mask: Bool tensor of shape [P], False for padding.

    Raises:
      ValueError: As for `clipped_sum`.
    """

    def gradient_of_record(
        record_and_mask: tuple[Structure, tf.Tensor],
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        record, keep = record_and_mask
        graph = tf.compat.v1.get_default_graph()
        num_known = len(graph.get_operations())
        loss, gradient = record_gradient(record, keep)
        refuse_writes(graph, num_known)
        refuse_varying_shapes(graph, num_known)
        return loss, list(gradient)

    losses, gradients = map_apart(gradient_of_record, (records, mask))
    refuse_low_precision(gradients)
    return losses, gradients


def weighted_sum(rows: tf.Tensor, factors: tf.Tensor) -> tf.Tensor:
    """Returns `sum_i factors[i] rows[i]`, rounded less than a long float32 sum.

    Args:
      rows: Shape [P, s].
      factors: Shape [P].
    """
    if rows.dtype == tf.float64 or (rows.shape[0] is not None and rows.shape[0] <= _BLOCK):
        return _block_sums(rows[None], factors[None])[0]
    num_blocks = (rows.shape[0] or tf.shape(rows)[0]) // _BLOCK
    whole = num_blocks * _BLOCK
    blocks = [
        tf.reshape(part[:whole], [num_blocks, _BLOCK, *part.shape[1:]]) for part in (rows, factors)
    ]
    last = _block_sums(rows[None, whole:], factors[None, whole:])
    sums = tf.concat([_block_sums(*blocks), last], axis=0)
    return tf.cast(tf.reduce_sum(tf.cast(sums, tf.float64), axis=0), rows.dtype)


def sum_of_squares(rows: tf.Tensor) -> tf.Tensor:
    """Returns `sum_i rows[i] rows[i]^T` in float64, [s, s], rounded less than a long float32 sum.

    As for `weighted_sum`, rounding within a block is at most 0.8 % of the longest row's square.

    Args:
      rows: Shape [P, s].
    """
    num, size = rows.shape
    whole = 0
    # TensorFloat-32 would round what one record adds.
    if size >= _WIDE and product_epsilon(rows.dtype) == np.finfo(np.float32).eps:
        whole = (num or 0) // _BLOCK * _BLOCK
    rest = tf.cast(rows[whole:], tf.float64)
    total = tf.linalg.matmul(rest, rest, transpose_a=True)
    if whole:
        blocks = tf.reshape(rows[:whole], [-1, _BLOCK, size])
        sums = tf.linalg.matmul(blocks, blocks, transpose_a=True)
        total += tf.reduce_sum(tf.cast(sums, tf.float64), axis=0)
    return total


def _block_sums(rows: tf.Tensor, factors: tf.Tensor) -> tf.Tensor:
    """Returns `sum_i factors[b, i] rows[b, i]` for each block b."""
    if rows.shape[2] < _LARGE:
        # XLA fuses it into one loop.
        return tf.reduce_sum(rows * factors[:, :, None], axis=1)
    return tf.linalg.matmul(factors[:, None], rows)[:, 0]
