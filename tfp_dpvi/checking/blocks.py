"""Bounded sums by bins: what one record adds to a release, and how far it can move it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from tfp_dpvi.privacy import Sensitivity

# Contributions are multiples of it, so that their sums are exact in float64 up to 10^8 records.
GRID = 2.0**-24


@dataclasses.dataclass(frozen=True, eq=False)
class Block:
    """A sum over records of a value by bins, in coordinates that a public matrix sets.

    A record in bin j with the value v adds `v * matrix[:, j]`. A row of the matrix that is longer
    than others is released with less noise relative to it.

    ```python
    >>> counts = Block("ages", np.eye(3), signed=False)
    >>> counts.contribution(np.array([2, 0]), np.array([1.0, 0.5])).tolist()
    [[0.0, 0.0, 1.0], [0.5, 0.0, 0.0]]
    >>> counts.presence, round(counts.replacement, 3)
    (1.0, 1.414)

    ```

    Attributes:
      name: The name of the sum.
      matrix: Shape [k, bins], with k at least the number of bins that matter.
      signed: Whether values are in [-1, 1]; else they are in [0, 1].
    """

    name: str
    matrix: np.ndarray
    signed: bool

    @property
    def presence(self) -> float:
        """The most that a record's presence moves the sum, in the l2 norm."""
        return float(np.sqrt(np.square(self.matrix).sum(axis=0).max()))

    @property
    def replacement(self) -> float:
        """The most that a record's replacement by another moves the sum, in the l2 norm."""
        columns = self.matrix.T
        apart = columns[:, None] - columns[None]
        longest = float(np.sqrt(np.square(apart).sum(axis=2).max()))
        if self.signed:
            together = columns[:, None] + columns[None]
            longest = max(longest, float(np.sqrt(np.square(together).sum(axis=2).max())))
        return max(longest, self.presence)

    def contribution(self, codes: np.ndarray, values: np.ndarray) -> np.ndarray:
        """Returns what records add, float64 [n, k].

        Args:
          codes: The bins of n records.
          values: Their values, shape [n]; outside of the interval they are clipped to it.

        #### Formal guarantee

        Each row has a norm of at most `presence`, and two differ by at most `replacement`, whatever
        codes and values are: NaN counts as zero, and another bin than these as the nearest.
        """
        kept = np.where(np.isnan(values), 0.0, values)
        kept = np.clip(kept, -1.0 if self.signed else 0.0, 1.0)
        bins = np.clip(codes, 0, self.matrix.shape[1] - 1)
        rows: np.ndarray = self.matrix.T[bins] * kept[:, None]
        return rows


def sensitivity_of(blocks: Sequence[Block]) -> Sensitivity:
    """Returns how far a record moves all sums together, in the l2 norm.

    Args:
      blocks: The sums of one release, to each of which a record may add.
    """
    presence = math.sqrt(sum(block.presence**2 for block in blocks))
    replacement = math.sqrt(sum(block.replacement**2 for block in blocks))
    # Rounding towards zero shortens each contribution, but can lengthen a difference.
    size = sum(len(block.matrix) for block in blocks)
    rounding = 2.0 * GRID * math.sqrt(size)
    return Sensitivity(presence, min(replacement + rounding, 2.0 * presence))


def on_grid(rows: np.ndarray) -> np.ndarray:
    """Returns contributions rounded towards zero to multiples of `GRID`.

    Args:
      rows: Contributions, shape [n, k].
    """
    rounded: np.ndarray = np.trunc(rows / GRID) * GRID
    return rounded
