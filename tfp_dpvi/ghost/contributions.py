"""Factored per-record gradients of one variable.

They give norms and weighted sums without the gradients themselves. One record's gradient of a dense
layer's kernel is the outer product of its input and the gradient at its output. Norms and weighted
sums over records follow from the factors (Goodfellow 2015, arXiv:1510.01799; Li et al. 2021, "ghost
clipping", arXiv:2110.05679), in the time of one ordinary weight gradient.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence

import numpy as np

from tfp_dpvi._tf import tf
from tfp_dpvi.gradients.clip import rounding_of_pairs, tiny

# Multiply-adds that cost about as much as writing and reading one entry of a per-record gradient.
DIRECT_COST = 16.0


@dataclasses.dataclass(frozen=True)
class Groups:
    """An assignment of n records to b groups.

    Attributes:
      num: The number of groups b, a tensor if it is not static.
      group: Int32 [n], the group of each record; b for none.
      members: Int32 [b, m], the indices of each group's records.
      present: Bool [b, m]; False marks padding of `members`.
      size: The approximate number of records in a group, used to choose the cheaper form.
    """

    num: int | tf.Tensor
    group: tf.Tensor
    members: tf.Tensor
    present: tf.Tensor
    size: float

    def sums(self, values: tf.Tensor) -> tf.Tensor:
        """Sums values of records by group: [n, ...] -> [b, ...]."""
        return tf.math.unsorted_segment_sum(values, self.group, self.num + 1)[: self.num]

    def positions(self, values: tf.Tensor) -> tf.Tensor:
        """Gathers rows by group: [n, T, D] -> [b, m T, D], padded with zeros."""
        chosen = tf.where(
            self.present[:, :, None, None],
            tf.gather(values, self.members),
            tf.zeros([], values.dtype),
        )
        shape = tf.shape(chosen)
        flat = tf.reshape(chosen, [shape[0], shape[1] * shape[2], shape[3]])
        known = [part.shape[1] for part in (self.present, values)]
        positions = None if None in known else int(np.prod(known))
        flat.set_shape([self.present.shape[0], positions, values.shape[2]])
        return flat


class Contribution(abc.ABC):
    """The gradients of one variable for each of n records (or groups of records).

    Attributes:
      shape: The shape of the variable.
    """

    shape: tuple[int, ...]

    @abc.abstractmethod
    def squared_norms(self) -> tf.Tensor:
        """Returns upper bounds on the records' squared l2 norms, float [n].

        They are tight up to rounding, and not finite if a factor is not.
        """

    @abc.abstractmethod
    def weighted_sum(self, weights: tf.Tensor, *, finite: bool = False) -> tf.Tensor:
        """Returns `sum_i weights[i] gradient[i]` in the variable's shape.

        Args:
          weights: Float [n], the weight of each record.
          finite: True if all factors are known to be finite. If not, records of weight 0 are
            replaced by zeros.
        """

    @abc.abstractmethod
    def by_groups(self, groups: Groups) -> Contribution:
        """Returns the gradients of groups instead of records.

        A record, NaN included, affects only its own group.
        """

    @abc.abstractmethod
    def materialize(self) -> Direct:
        """Returns the per-record gradients."""


@dataclasses.dataclass(frozen=True)
class Direct(Contribution):
    """Unfactored per-record gradients, for small variables and layers without a rule.

    Attributes:
      shape: The shape of the variable.
      values: Float [n, *shape].
    """

    shape: tuple[int, ...]
    values: tf.Tensor

    def squared_norms(self) -> tf.Tensor:
        """See `Contribution`."""
        flat = self._flat()
        return tf.reduce_sum(tf.square(flat), axis=1) + flat.shape[1] * tiny(flat.dtype)

    def weighted_sum(self, weights: tf.Tensor, *, finite: bool = False) -> tf.Tensor:
        """See `Contribution`."""
        flat = self._flat() if finite else _select(weights, self._flat())
        return tf.reshape(tf.linalg.matmul(weights[None], flat), self.shape)

    def by_groups(self, groups: Groups) -> Direct:
        """See `Contribution`."""
        return Direct(self.shape, groups.sums(self.values))

    def materialize(self) -> Direct:
        """See `Contribution`."""
        return self

    def _flat(self) -> tf.Tensor:
        return tf.reshape(self.values, [tf.shape(self.values)[0], int(np.prod(self.shape))])


@dataclasses.dataclass(frozen=True)
class Outer(Contribution):
    """Gradients `sum_t left[i, t] (x) right[i, t]`: kernels of dense layers and of convolutions.

    Attributes:
      shape: The shape of the variable.
      left: Float [n, T, K].
      right: Float [n, T, D]; K D is the size of `shape`.
      filled: Float [n], how many positions are no padding; None for all T. How many there are for
        others must not change a norm.
    """

    shape: tuple[int, ...]
    left: tf.Tensor
    right: tf.Tensor
    filled: tf.Tensor | None = None

    @classmethod
    def cheaper_form(
        cls,
        shape: tuple[int, ...],
        left: tf.Tensor,
        right: tf.Tensor,
        positions: float | None = None,
        filled: tf.Tensor | None = None,
    ) -> Contribution:
        """Returns these factors, or gradients if those give norms at less cost.

        Args:
          shape: The shape of the variable.
          left: Float [n, T, K].
          right: Float [n, T, D].
          positions: An estimate of T, if it is not static.
          filled: See `Outer`.
        """
        outer = cls(shape, left, right, filled)
        positions = positions or left.shape[1]
        k, d = left.shape[2], right.shape[2]
        if positions == 1 or (
            positions is not None and positions**2 * (k + d) <= DIRECT_COST * k * d
        ):
            return outer
        return outer.materialize()

    def squared_norms(self) -> tf.Tensor:
        """See `Contribution`."""
        k, d = self.left.shape[2], self.right.shape[2]
        smallest = tiny(self.left.dtype)
        left_squares = tf.reduce_sum(tf.square(self.left), axis=2) + k * smallest
        right_squares = tf.reduce_sum(tf.square(self.right), axis=2) + d * smallest
        if self.left.shape[1] == 1:
            return left_squares[:, 0] * right_squares[:, 0]
        pairs = tf.linalg.matmul(self.left, self.left, transpose_b=True)
        pairs *= tf.linalg.matmul(self.right, self.right, transpose_b=True)
        most = tf.reduce_sum(tf.sqrt(left_squares) * tf.sqrt(right_squares), axis=1)
        flushed = d * smallest * tf.square(tf.reduce_sum(tf.sqrt(left_squares), axis=1))
        flushed += k * smallest * tf.square(tf.reduce_sum(tf.sqrt(right_squares), axis=1))
        filled = tf.cast(tf.shape(pairs)[1], most.dtype) if self.filled is None else self.filled
        return _sum_of_pairs(pairs, most, k + d + filled) + flushed

    def weighted_sum(self, weights: tf.Tensor, *, finite: bool = False) -> tf.Tensor:
        """See `Contribution`."""
        left, right = (
            part if finite else _select(weights, part) for part in (self.left, self.right)
        )
        if self.left.shape[2] < self.right.shape[2]:
            left *= weights[:, None, None]
        else:
            right *= weights[:, None, None]
        left = tf.reshape(left, [-1, self.left.shape[2]])
        right = tf.reshape(right, [-1, self.right.shape[2]])
        return tf.reshape(tf.linalg.matmul(left, right, transpose_a=True), self.shape)

    def by_groups(self, groups: Groups) -> Contribution:
        """See `Contribution`: concatenates the positions of a group's records."""
        positions = max(2.0, groups.size * (self.left.shape[1] or 1))
        left, right = groups.positions(self.left), groups.positions(self.right)
        each = tf.cast(tf.shape(self.left)[1], left.dtype)
        filled = each * tf.reduce_sum(tf.cast(groups.present, left.dtype), axis=1)
        return Outer.cheaper_form(self.shape, left, right, positions=positions, filled=filled)

    def materialize(self) -> Direct:
        """See `Contribution`."""
        values = tf.linalg.matmul(self.left, self.right, transpose_a=True)
        return Direct(self.shape, tf.reshape(values, [-1, *self.shape]))


@dataclasses.dataclass(frozen=True)
class Lookup(Contribution):
    """Gradients of an embedding table in its looked-up rows.

    Attributes:
      shape: The shape of the table.
      ids: Int [n, T], the looked-up rows.
      values: Float [n, T, D], the gradients at the looked-up rows.
    """

    shape: tuple[int, ...]
    ids: tf.Tensor
    values: tf.Tensor

    def squared_norms(self) -> tf.Tensor:
        """See `Contribution`."""
        values, d = self.values, self.values.shape[2]
        squares = tf.reduce_sum(tf.square(values), axis=2) + d * tiny(values.dtype)
        if self.ids.shape[1] == 1:
            return squares[:, 0]
        same = tf.cast(self.ids[:, :, None] == self.ids[:, None, :], values.dtype)
        # The norm of the sum of a token's rows, at each of its positions, and the rounding of a sum
        # in another order.
        norms = tf.sqrt(
            tf.reduce_sum(tf.square(tf.linalg.matmul(same, values)), axis=2)
            + d * tiny(values.dtype)
        )
        times, most = tf.reduce_sum(same, axis=2), tf.linalg.matvec(same, tf.sqrt(squares))
        norms += rounding_of_pairs(2.0 * times + d, values.dtype) * most
        return tf.reduce_sum(tf.square(norms) / times, axis=1)

    def weighted_sum(self, weights: tf.Tensor, *, finite: bool = False) -> tf.Tensor:
        """See `Contribution`."""
        values = (self.values if finite else _select(weights, self.values)) * weights[:, None, None]
        flat = tf.reshape(values, [-1, self.values.shape[2]])
        return tf.math.unsorted_segment_sum(flat, tf.reshape(self.ids, [-1]), self.shape[0])

    def by_groups(self, groups: Groups) -> Contribution:
        """See `Contribution`: one table for each group, unless it has few pairs of positions."""
        size, group = self.shape[0], groups.group[:, None]
        ids = tf.cast(self.ids, tf.int32)
        # An id out of range, which GPUs read as zeros, must not hit another group's row.
        known = (group < groups.num) & (ids >= 0) & (ids < size)
        if (groups.size * (self.ids.shape[1] or size)) ** 2 <= size:
            # Padding has no row, so that it counts in no norm.
            ids = groups.positions(tf.where(known, ids + 1, 0)[:, :, None])[:, :, 0] - 1
            values = tf.where(known[:, :, None], self.values, tf.zeros([], self.values.dtype))
            return Lookup(self.shape, ids, groups.positions(values))
        places = tf.reshape(tf.where(known, group * size + ids, -1), [-1])
        values = tf.reshape(self.values, [-1, self.values.shape[2]])
        tables = tf.math.unsorted_segment_sum(values, places, groups.num * size)
        return Direct(self.shape, tf.reshape(tables, [groups.num, *self.shape]))

    def materialize(self) -> Direct:
        """See `Contribution`."""
        one_hot = tf.one_hot(self.ids, self.shape[0], dtype=self.values.dtype)
        return Direct(self.shape, tf.linalg.matmul(one_hot, self.values, transpose_a=True))


def combined(parts: Sequence[Contribution]) -> Contribution:
    """Joins the contributions of a variable that a pass uses several times.

    A shared layer does so.
    """
    if len(parts) == 1:
        return parts[0]
    if all(isinstance(part, Outer) for part in parts):
        left, right = (
            tf.concat([getattr(part, name) for part in parts], axis=1) for name in ("left", "right")
        )
        return Outer.cheaper_form(parts[0].shape, left, right)
    if all(isinstance(part, Lookup) for part in parts):
        ids, values = (
            tf.concat([getattr(part, name) for part in parts], axis=1) for name in ("ids", "values")
        )
        return Lookup(parts[0].shape, ids, values)
    return Direct(parts[0].shape, tf.add_n([part.materialize().values for part in parts]))


def total(
    parts: Sequence[Contribution], weights: Sequence[tf.Tensor], finite: tf.Tensor
) -> list[tf.Tensor]:
    """Returns the weighted sum of each variable's gradients.

    Where all factors are finite, it needs no selection of records.

    Args:
      parts: The contributions to each variable's gradient.
      weights: Float [n] for each variable, the weight of each record.
      finite: Bool tensor, True throughout if all factors are finite.
    """

    def sums(finite: bool) -> list[tf.Tensor]:
        return [
            part.weighted_sum(each, finite=finite)
            for part, each in zip(parts, weights, strict=True)
        ]

    return tf.cond(tf.reduce_all(finite), lambda: sums(True), lambda: sums(False))


def _select(weights: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    """Replaces rows of weight 0 by zeros, since 0 x NaN is NaN (contract 8)."""
    keep = tf.reshape(weights != 0, [-1] + [1] * (values.shape.rank - 1))
    return tf.where(keep, values, tf.zeros([], values.dtype))


def _sum_of_pairs(pairs: tf.Tensor, most: tf.Tensor, terms: tf.Tensor) -> tf.Tensor:
    """Returns sums over pairs of positions plus the rounding that cancellation may hide.

    Args:
      pairs: Float [n, T, T].
      most: Float [n], a bound on the square root of each sum.
      terms: The length of an inner product and of a sum over positions.
    """
    # Another dtype for the second sum keeps compilers from fusing both into one running sum, which
    # rounds far more.
    sums = tf.cast(
        tf.reduce_sum(tf.cast(tf.reduce_sum(pairs, axis=2), tf.float64), axis=1), most.dtype
    )
    # Rounding can make a square negative; NaN must stay NaN, which `maximum` does not ensure on
    # every device.
    sums = tf.where(sums < 0, tf.zeros_like(sums), sums)
    return sums + rounding_of_pairs(terms + 1.0, most.dtype) * tf.square(most)
