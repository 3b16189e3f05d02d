"""The distances of one sum on neighbouring records, with the same randomness (contract C3)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

from tfp_dpvi._tf import Structure, tf

Sums = Callable[[Structure, np.ndarray], Sequence[np.ndarray]]
"""`sums(records, mask) -> parts of a sum`, with the same randomness in every call."""


@dataclasses.dataclass(frozen=True)
class Differences:
    """The effect of one record on a sum, measured on neighbouring records with the same randomness.

    Attributes:
      presence: distance of the sum with the record and without it.
      other_presence: likewise for the record that replaces it.
      replacement: distance of the sums with either record.
      finite: whether all three sums are.
      full, removed, replaced: the sums.
    """

    presence: float
    other_presence: float
    replacement: float
    finite: bool
    full: Sequence[np.ndarray]
    removed: Sequence[np.ndarray]
    replaced: Sequence[np.ndarray]


def distance(parts: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> float:
    """Returns the joint l2 distance of two sums."""
    squares = [
        float(np.sum(np.square(np.asarray(a, np.float64) - np.asarray(b, np.float64))))
        for a, b in zip(parts, others, strict=True)
    ]
    return math.sqrt(sum(squares))


def rounding(dtype: np.dtype | type, num_records: int, num_coordinates: int) -> float:
    """Returns an allowance for rounding, in clips: of a record's scale, and of sums of `num_records` vectors."""
    return float(np.finfo(dtype).eps) * (8 + math.sqrt(num_coordinates) + 2 * num_records)


def with_row(records: Structure, other: Structure, at: int, row: int) -> Structure:
    """Returns a copy of records whose record `at` is record `row` of other records of the same structure."""

    def put(part: np.ndarray, source: np.ndarray) -> np.ndarray:
        changed = np.array(part)
        changed[at] = source[row]
        return changed

    return tf.nest.map_structure(put, records, other)


def differences(sums: Sums, records: Structure, other: Structure, at: int) -> Differences:
    """Returns how far a sum moves if record `at` is removed, or replaced by record `at` of `other`.

    The removed record is masked at its index, so that all other records keep their random numbers.

    Args:
      sums: `(records, mask) -> parts of the sum`; the same randomness in every call.
      records: structure of arrays with one row for each record.
      other: likewise, with the same shapes.
      at: the index of the record.

    Returns:
      The distances, in the unit of the sum.
    """
    num = len(tf.nest.flatten(records)[0])
    mask = np.ones(num, bool)
    without = mask.copy()
    without[at] = False
    full = sums(records, mask)
    removed = sums(records, without)
    replaced = sums(with_row(records, other, at, at), mask)
    finite = all(bool(np.all(np.isfinite(p))) for p in (*full, *removed, *replaced))
    return Differences(
        distance(full, removed),
        distance(replaced, removed),
        distance(full, replaced),
        finite,
        full,
        removed,
        replaced,
    )
