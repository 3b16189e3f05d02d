"""What records contribute to the gradient of one variable, without the per-record gradients themselves.

The gradient of a dense layer's kernel by one record is the outer product of its input and of the gradient at its output.
Norms and weighted sums over records follow from the factors (Goodfellow 2015, arXiv:1510.01799; Li et al. 2021, "ghost
clipping", arXiv:2110.05679), in the time of one ordinary weight gradient.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfp_dpvi._keras import tf
from tfp_dpvi.gradients.clipping import product_epsilon

_DIRECT_COST = 16.0
"""Writing and reading one entry of a per-record gradient costs about as much as this many multiply-adds."""


class Contribution(abc.ABC):
    """The gradients of one variable by each of n records (or groups of them).

    Attributes:
      shape: of the variable.
    """

    shape: tuple[int, ...]

    @abc.abstractmethod
    def squared_norms(self) -> Any:
        """Upper bounds on the records' squared l2 norms, of shape [n]; tight to rounding. NaN or Inf if a factor is."""

    @abc.abstractmethod
    def weighted_sum(self, weights: Any, *, finite: bool = False) -> Any:
        """`sum_i weights[i] gradient[i]` in the variable's shape.

        Args:
          weights: float tensor of shape [n].
          finite: all factors are known to be finite; otherwise records of weight 0 are selected away, NaN and all.
        """

    @abc.abstractmethod
    def of_groups(self, members: Any, present: Any, size: float) -> Contribution:
        """The gradients of groups of records, in place of those of records.

        Args:
          members: int tensor of shape [b, m], the indices of each group's records.
          present: bool tensor of shape [b, m]; False marks places that no record has. Nothing of a record reaches a group
            that it is not in, nor a NaN.
          size: about how many records a group has, to choose the cheaper form by.
        """

    @abc.abstractmethod
    def materialize(self) -> Direct:
        """The per-record gradients themselves."""


@dataclasses.dataclass(frozen=True)
class Direct(Contribution):
    """Per-record gradients as they are; for small variables, and where nothing else is known.

    Attributes:
      values: float tensor of shape [n, *shape].
    """

    shape: tuple[int, ...]
    values: Any

    def squared_norms(self) -> Any:
        """See `Contribution`."""
        flat = self._flat()
        return tf.reduce_sum(tf.square(flat), axis=1) + flat.shape[1] * tiny(flat.dtype)

    def weighted_sum(self, weights: Any, *, finite: bool = False) -> Any:
        """See `Contribution`."""
        flat = self._flat() if finite else _select(weights, self._flat())
        return tf.reshape(tf.linalg.matmul(weights[None], flat), self.shape)

    def of_groups(self, members: Any, present: Any, size: float) -> Direct:
        """See `Contribution`."""
        del size
        return Direct(self.shape, tf.reduce_sum(_members_of(self.values, members, present), axis=1))

    def materialize(self) -> Direct:
        """See `Contribution`."""
        return self

    def _flat(self) -> Any:
        return tf.reshape(self.values, [tf.shape(self.values)[0], int(np.prod(self.shape))])


@dataclasses.dataclass(frozen=True)
class Outer(Contribution):
    """Gradients `sum_t left[i, t] (x) right[i, t]`: kernels of dense layers and of convolutions.

    Attributes:
      left: float tensor of shape [n, T, K].
      right: float tensor of shape [n, T, D]; K D is the size of `shape`.
    """

    shape: tuple[int, ...]
    left: Any
    right: Any

    @classmethod
    def of_cheaper_form(
        cls, shape: tuple[int, ...], left: Any, right: Any, positions: float | None = None
    ) -> Contribution:
        """These factors where norms from them are cheaper than per-record gradients, or else those gradients.

        Args:
          shape: see `Outer`.
          left: see `Outer`.
          right: see `Outer`.
          positions: T, where the shapes do not say it.
        """
        outer = cls(shape, left, right)
        positions, k, d = positions or left.shape[1], left.shape[2], right.shape[2]
        if positions == 1 or (positions is not None and positions**2 * (k + d) <= _DIRECT_COST * k * d):
            return outer
        return outer.materialize()

    def squared_norms(self) -> Any:
        """See `Contribution`.

        What sums lose by underflow, and by rounding where the sum over pairs of positions cancels, is added, so that no
        record, however odd, slips under the clip.
        """
        k, d, smallest = self.left.shape[2], self.right.shape[2], tiny(self.left.dtype)
        of_left = tf.reduce_sum(tf.square(self.left), axis=2) + k * smallest
        of_right = tf.reduce_sum(tf.square(self.right), axis=2) + d * smallest
        if self.left.shape[1] == 1:
            return of_left[:, 0] * of_right[:, 0]
        pairs = tf.linalg.matmul(self.left, self.left, transpose_b=True)
        pairs *= tf.linalg.matmul(self.right, self.right, transpose_b=True)
        most = tf.reduce_sum(tf.sqrt(of_left) * tf.sqrt(of_right), axis=1)
        flushed = d * smallest * tf.square(tf.reduce_sum(tf.sqrt(of_left), axis=1))
        flushed += k * smallest * tf.square(tf.reduce_sum(tf.sqrt(of_right), axis=1))
        positions = tf.cast(tf.shape(self.left)[1], most.dtype)
        lost = (k + d + tf.square(positions)) * product_epsilon(most.dtype) * tf.square(most) + flushed
        return tf.maximum(tf.reduce_sum(pairs, axis=[1, 2]), 0.0) + lost

    def weighted_sum(self, weights: Any, *, finite: bool = False) -> Any:
        """See `Contribution`."""
        left, right = (
            (self.left, self.right) if finite else (_select(weights, part) for part in (self.left, self.right))
        )
        if self.left.shape[2] < self.right.shape[2]:
            left *= weights[:, None, None]
        else:
            right *= weights[:, None, None]
        left = tf.reshape(left, [-1, self.left.shape[2]])
        right = tf.reshape(right, [-1, self.right.shape[2]])
        return tf.reshape(tf.linalg.matmul(left, right, transpose_a=True), self.shape)

    def of_groups(self, members: Any, present: Any, size: float) -> Contribution:
        """See `Contribution`: the positions of a group's records, one after another."""
        left, right = (_positions_of(part, members, present) for part in (self.left, self.right))
        return Outer.of_cheaper_form(self.shape, left, right, positions=max(2.0, size * (self.left.shape[1] or 1)))

    def materialize(self) -> Direct:
        """See `Contribution`."""
        values = tf.linalg.matmul(self.left, self.right, transpose_a=True)
        return Direct(self.shape, tf.reshape(values, [-1, *self.shape]))


@dataclasses.dataclass(frozen=True)
class Lookup(Contribution):
    """Gradients of a table by the rows that records looked up: embeddings.

    Attributes:
      ids: int tensor of shape [n, T].
      values: float tensor of shape [n, T, D], the gradients at what was looked up.
    """

    shape: tuple[int, ...]
    ids: Any
    values: Any

    def squared_norms(self) -> Any:
        """See `Contribution`; rounding is treated as in `Outer`."""
        d = self.values.shape[2]
        squares = tf.reduce_sum(tf.square(self.values), axis=2) + d * tiny(self.values.dtype)
        if self.ids.shape[1] == 1:
            return squares[:, 0]
        same = tf.cast(self.ids[:, :, None] == self.ids[:, None, :], self.values.dtype)
        pairs = same * tf.linalg.matmul(self.values, self.values, transpose_b=True)
        most = tf.reduce_sum(tf.sqrt(squares), axis=1)
        positions = tf.cast(tf.shape(self.ids)[1], most.dtype)
        lost = (d + tf.square(positions)) * product_epsilon(most.dtype) * tf.square(most)
        return tf.maximum(tf.reduce_sum(pairs, axis=[1, 2]), 0.0) + lost

    def weighted_sum(self, weights: Any, *, finite: bool = False) -> Any:
        """See `Contribution`."""
        values = (self.values if finite else _select(weights, self.values)) * weights[:, None, None]
        flat = tf.reshape(values, [-1, self.values.shape[2]])
        return tf.math.unsorted_segment_sum(flat, tf.reshape(self.ids, [-1]), self.shape[0])

    def of_groups(self, members: Any, present: Any, size: float) -> Lookup:
        """See `Contribution`."""
        del size
        ids, values = (_positions_of(part, members, present) for part in (self.ids, self.values))
        return Lookup(self.shape, ids, values)

    def materialize(self) -> Direct:
        """See `Contribution`."""
        one_hot = tf.one_hot(self.ids, self.shape[0], dtype=self.values.dtype)
        return Direct(self.shape, tf.linalg.matmul(one_hot, self.values, transpose_a=True))


def combined(parts: Sequence[Contribution]) -> Contribution:
    """One contribution of a variable that was used several times in a pass, as in a shared layer."""
    if len(parts) == 1:
        return parts[0]
    if all(isinstance(part, Outer) for part in parts):
        left, right = (tf.concat([getattr(part, name) for part in parts], axis=1) for name in ("left", "right"))
        return Outer.of_cheaper_form(parts[0].shape, left, right)
    if all(isinstance(part, Lookup) for part in parts):
        ids, values = (tf.concat([getattr(part, name) for part in parts], axis=1) for name in ("ids", "values"))
        return Lookup(parts[0].shape, ids, values)
    return Direct(parts[0].shape, tf.add_n([part.materialize().values for part in parts]))


def _members_of(values: Any, members: Any, present: Any) -> Any:
    """Of values of shape [n, ...] each group's, of shape [b, m, ...], with zeros where no record is."""
    there = tf.reshape(present, tf.concat([tf.shape(present), tf.ones([values.shape.rank - 1], tf.int32)], axis=0))
    return tf.where(there, tf.gather(values, members), tf.zeros([], values.dtype))


def _positions_of(values: Any, members: Any, present: Any) -> Any:
    """Of values of shape [n, T, D], or [n, T], each group's, of shape [b, m T, D] or [b, m T]."""
    of_groups = _members_of(values, members, present)
    shape = tf.shape(of_groups)
    joined = tf.concat([shape[:1], shape[1:2] * shape[2:3], shape[3:]], axis=0)
    flat = tf.reshape(of_groups, joined)
    flat.set_shape([members.shape[0], None, *values.shape[2:]])
    return flat


def total(parts: Sequence[Contribution], weights: Sequence[Any], finite: Any) -> list[Any]:
    """The weighted sum of each variable's gradients, with no selecting where all factors are finite.

    Args:
      parts: one contribution each.
      weights: for each a float tensor of shape [n], 0 for what is not finite.
      finite: bool tensor of shape [n]. A finite norm says that all factors are.
    """

    def sums(finite: bool) -> list[Any]:
        return [part.weighted_sum(each, finite=finite) for part, each in zip(parts, weights, strict=True)]

    return tf.cond(tf.reduce_all(finite), lambda: sums(True), lambda: sums(False))


def _select(weights: Any, values: Any) -> Any:
    """Zeros in the rows of weight 0: 0 x NaN would be NaN (contract C8)."""
    keep = tf.reshape(weights != 0, [-1] + [1] * (values.shape.rank - 1))
    return tf.where(keep, values, tf.zeros([], values.dtype))


def tiny(dtype: Any) -> float:
    """The smallest normal number: TensorFlow flushes what is below it to zero."""
    return float(np.finfo(dtype.as_numpy_dtype).tiny)
