"""Noisy counts of the levels of each pair of columns, and their likelihood under a mixture.

The noise is Gaussian with known variance, so that posteriors of a mixture given the noisy counts
include the noise.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from tfp_dpvi import _validate as check
from tfp_dpvi._tf import tf
from tfp_dpvi.data.columns import MISSING
from tfp_dpvi.data.schema import Schema
from tfp_dpvi.synthetic.mixture import Params, Segments, log_table_of

_MISFIT = 1.0 / 3000.0
"""How far a mixture's shares may be from the table's, as a standard deviation.

No mixture is the table. Without it, empty cells, whose counts are nearly exact under a large
budget, would weigh so much that all other cells fit badly. Chosen on public tables (randhie, fair).
"""

TARGET_WEIGHT = 2.0
"""Relative precision of the counts of pairs with the target; chosen on public data (Adult).

Triples tell these pairs anew, and need no such weight.
"""

_CLEAR = 1.0
"""Triples are counted if a cell expects so many standard deviations of the noise on average.

Chosen on public tables (Adult, randhie, fair).
"""


@dataclasses.dataclass(frozen=True)
class Pairs:
    """The counts of each column's levels and of each pair of columns' levels.

    A missing value is a level. Triples are counts of pairs within each of a target's two levels:
    those within the first are above the diagonal, where all are without triples, and those within
    the second below.

    ```python
    >>> import numpy as np
    >>> from tfp_dpvi.synthetic import Binary, Pairs, Schema, Segments
    >>> pairs = Pairs(Segments.of(Schema({"smokes": Binary(), "ill": Binary()})))
    >>> pairs.counts(np.array([[0, 1], [1, 1], [1, 1]])).tolist()
    [[1.0, 0.0, 0.0, 1.0], [0.0, 2.0, 0.0, 2.0], [0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 3.0]]

    ```

    Attributes:
      segments: The layout of the columns' levels.
      target: Index of a column whose pairs have more weight, or None.
      triples: Whether pairs of other columns are counted within each level of the target, if it has
        two. Then its own pairs have no more weight.
    """

    segments: Segments
    target: int | None = None
    triples: bool = False

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of levels of each column, with one for possibly missing values."""
        absent = self.segments.maybe_missing
        sizes = self.segments.sizes[: self.segments.num_columns]
        return tuple(size + (place in absent) for place, size in enumerate(sizes))

    @property
    def norm(self) -> float:
        """The l2 norm of one record's contribution to `counts`."""
        blocks = self._blocks()
        # A record is within one of the target's levels.
        return float(np.sqrt(sum(weight**2 for i, j, weight, _, _ in blocks if i <= j)))

    @property
    def within(self) -> int | None:
        """The column within whose two levels pairs of others are counted, or None."""
        binary = [place for place, size in enumerate(self.sizes) if size == 2]
        others = len(self.sizes) > 2
        return self.target if self.triples and others and self.target in binary else None

    def is_split(self, first: int, second: int) -> bool:
        """Returns whether two columns are counted within each level of the target.

        Args:
          first: The place of a column.
          second: The place of another one, or the same.
        """
        return first != second and self.within not in (None, first, second)

    def where_clear(self, num_records: int, deviation: float) -> Pairs:
        """Returns these pairs, with triples if the noise allows them: a rule that reads no records.

        Args:
          num_records: The public number of records.
          deviation: The standard deviation of the noise without triples.
        """
        triples = dataclasses.replace(self, triples=True)
        if triples.within is None:
            return self
        others = self.sizes[: triples.within] + self.sizes[triples.within + 1 :]
        cells = np.mean([2.0 * i * j for i, j in itertools.combinations(others, 2)])
        least = _CLEAR * deviation * triples.norm / self.norm
        return triples if num_records > least * cells else self

    def _blocks(self) -> Iterator[tuple[int, int, float, slice, slice]]:
        ends = np.cumsum(self.sizes)
        slices = [
            slice(int(end) - size, int(end)) for end, size in zip(ends, self.sizes, strict=True)
        ]
        heavy = self.target if self.within is None else None
        for i, j in itertools.combinations_with_replacement(range(len(self.sizes)), 2):
            weight = TARGET_WEIGHT if i != j and heavy in (i, j) else 1.0
            yield i, j, weight, slices[i], slices[j]
            if self.is_split(i, j):
                yield j, i, weight, slices[j], slices[i]

    def weights(self) -> np.ndarray:
        """Returns the weight of each pair of levels, float64 [levels, levels].

        It is 0 for pairs that are not counted.
        """
        weights = np.zeros([sum(self.sizes)] * 2)
        for i, j, weight, rows, columns in self._blocks():
            weights[rows, columns] = weight * np.eye(self.sizes[i]) if i == j else weight
        return weights

    def counts(self, codes: np.ndarray) -> np.ndarray:
        """Counts pairs of levels, each times its weight: float64 [levels, levels], *not private*.

        Args:
          codes: Integer array of shape [records, columns], -1 for missing values.

        #### Formal guarantee

        A record adds each pair's weight to one entry, of triples to that within its level of the
        target: a non-negative vector of l2 norm `norm`.
        """
        counts = np.zeros([sum(self.sizes)] * 2)
        places = [
            np.where(code == MISSING, size - 1, code)
            for code, size in zip(codes.T, self.sizes, strict=True)
        ]
        within = self.within
        for i, j, weight, rows, columns in self._blocks():
            shape = self.sizes[i], self.sizes[j]
            cells = places[i] * shape[1] + places[j]
            if within is not None and self.is_split(i, j):
                cells = cells[places[within] == (i > j)]
            counted = np.bincount(cells, minlength=shape[0] * shape[1])
            counts[rows, columns] = weight * counted.reshape(shape)
        return counts

    def shares(self, params: Params) -> tf.Tensor:
        """Returns a mixture's probability of each pair of levels, [..., levels, levels].

        Those of single levels are on the diagonal.
        """
        segments, parts = self.segments, {}
        split = tf.split(tf.exp(log_table_of(segments, params)), segments.sizes, axis=-1)
        absent = dict(zip(segments.maybe_missing, split[segments.num_columns :], strict=True))
        for place, part in enumerate(split[: segments.num_columns]):
            there = absent.get(place)
            parts[place] = (
                part
                if there is None
                else tf.concat([part * there[..., :1], there[..., 1:]], axis=-1)
            )
        table, weights = tf.concat(list(parts.values()), axis=-1), tf.nn.softmax(params["weights"])
        single = tf.linalg.matvec(table, weights, transpose_a=True)
        if self.within is None:
            joint = tf.matmul(table * weights[..., tf.newaxis], table, transpose_a=True)
            return tf.linalg.set_diag(joint, single)
        chances = tf.unstack(parts[self.within], num=2, axis=-1)
        # Within a level of the target, its own pairs with a column are that column's levels.
        parts[self.within] = tf.ones_like(parts[self.within])
        table = tf.concat(list(parts.values()), axis=-1)
        first, second = (
            tf.matmul(table * (weights * chance)[..., tf.newaxis], table, transpose_a=True)
            for chance in chances
        )
        below = np.tril(self.weights(), -1) > 0.0
        place = sum(self.sizes[: self.within]) + 1
        below[place], below[:, place] = True, True
        return tf.linalg.set_diag(tf.where(below, second, first), single)


@dataclasses.dataclass(frozen=True)
class NoisyPairs:
    """Released noisy `Pairs.counts`.

    ```python
    >>> import numpy as np
    >>> from tfp_dpvi.synthetic import Binary, NoisyPairs, Pairs, Schema, Segments
    >>> pairs = Pairs(Segments.of(Schema({"ill": Binary()})))
    >>> NoisyPairs.of(pairs, np.array([[7.5, 0.0], [0.0, 1.5]]), 2.0, 10).column(0).tolist()
    [7.5, 1.5]

    ```

    Attributes:
      pairs: The counts that were released.
      counts: The noisy counts divided by their weights, float64 [levels, levels].
      deviations: Standard deviations of their noise, of the same shape; infinite for pairs that are
        not counted.
      num_records: The public number of records.
    """

    pairs: Pairs
    counts: np.ndarray
    deviations: np.ndarray
    num_records: int

    @classmethod
    def of(cls, pairs: Pairs, noisy: np.ndarray, deviation: float, num_records: int) -> NoisyPairs:
        """Rescales released counts.

        Args:
          pairs: The counts that were released.
          noisy: `pairs.counts` with noise, float64 [levels, levels].
          deviation: The standard deviation of the noise.
          num_records: The public number of records.
        """
        weights = pairs.weights()
        counted = weights > 0.0
        safe = np.where(counted, weights, 1.0)
        counts = np.where(counted, noisy / safe, 0.0)
        return cls(pairs, counts, np.where(counted, deviation / safe, np.inf), num_records)

    def to_config(self) -> dict[str, Any]:
        """Returns plain values and arrays for `from_config`."""
        weights = self.pairs.weights()
        counted = weights > 0.0
        return {
            "target": self.pairs.target,
            "triples": self.pairs.triples,
            "num_records": self.num_records,
            "deviation": float(self.deviations[counted][0] * weights[counted][0]),
            "counts": self.counts[counted],
        }

    @classmethod
    def from_config(cls, config: Mapping[str, Any], schema: Schema) -> NoisyPairs:
        """Returns the counts from `to_config`.

        Args:
          config: What `to_config` returned.
          schema: The schema with the counted levels.

        Raises:
          ValueError: The counts are of another schema.
        """
        names = ("target", "num_records", "deviation", "counts")
        config = check.fields("the file's counts", config, needed=names, known=(*names, "triples"))
        deviation = check.non_negative("deviation", config["deviation"])
        num = check.count("num_records", config["num_records"], 1)
        # Former files have no triples.
        triples = config.get("triples", False) is True
        pairs = Pairs(Segments.of(schema), config["target"], triples)
        weights, counts = pairs.weights(), config["counts"]
        counted = weights > 0.0
        if np.shape(counts) != (int(counted.sum()),) or not np.isfinite(counts).all():
            raise ValueError(
                "The file's counts are not those of its columns: it was altered. Use another copy."
            )
        noisy = np.zeros(weights.shape)
        noisy[counted] = counts * weights[counted]
        return cls.of(pairs, noisy, deviation, num)

    def column(self, place: int) -> np.ndarray:
        """Returns the noisy counts of one column's levels."""
        begin = sum(self.pairs.sizes[:place])
        return np.diag(self.counts)[begin : begin + self.pairs.sizes[place]]

    def table(self, first: int, second: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the noisy counts of two columns' levels and the deviations of their noise.

        Where triples were counted, those of pairs without the target are sums of two noisy counts.

        Args:
          first: The place of a column.
          second: The place of another one.

        Returns:
          Two float64 arrays of shape [levels of the first, levels of the second].
        """
        if first > second:
            counts, deviations = self.table(second, first)
            return counts.T, deviations.T
        sizes = self.pairs.sizes
        rows, columns = (
            slice(sum(sizes[:place]), sum(sizes[: place + 1])) for place in (first, second)
        )
        counts, deviations = self.counts[rows, columns], self.deviations[rows, columns]
        if self.pairs.is_split(first, second):
            counts = counts + self.counts[columns, rows].T
            deviations = np.hypot(deviations, self.deviations[columns, rows].T)
        return counts, deviations

    def log_likelihood(self, params: Params) -> tf.Tensor:
        """Returns the log-likelihood of mixtures up to a constant.

        It has the variance of the noise, of sampling records, and of what a mixture cannot be. All
        are approximated as normal, and counts as independent.

        Args:
          params: Parameters of mixtures, with any leading dimensions.
        """
        dtype = params["weights"].dtype
        misfit = (_MISFIT * self.num_records) ** 2
        variances = self.deviations**2 + np.maximum(self.counts, 1.0) + misfit
        precisions = tf.constant(self.num_records**2 / variances, dtype)
        residuals = self.pairs.shares(params) - tf.constant(self.counts / self.num_records, dtype)
        return -0.5 * tf.reduce_sum(precisions * tf.square(residuals), axis=[-2, -1])
