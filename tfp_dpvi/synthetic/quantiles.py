"""Quantiles of a column of numbers, from noisy counts of its levels.

Their intervals are those of Woodruff (1952): of the distribution function, inverted.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np

from tfp_dpvi.data.columns import Column, Numeric
from tfp_dpvi.synthetic import tails
from tfp_dpvi.synthetic.grouping import Grouped

# Of the values within a level: so many draws of its distribution, of so many values each.
_DRAWS = 20
_VALUES = 500

# The standard error of a place in a fitted end, over the level's deviation, if a few records have
# most of the column's variance.
_OF_FEW = 0.5


@dataclasses.dataclass(frozen=True)
class Cumulative:
    """The distribution function of a column of numbers, by its levels' counts.

    Within a level it is that of samples: even, or falling at an end of the column.

    ```python
    >>> import numpy as np
    >>> from tfp_dpvi.synthetic import Continuous
    >>> column = Continuous(0.0, 10.0, bins=[5.0])
    >>> cumulative = Cumulative(column, column, np.arange(2), np.array([30.0, 10.0]), 0.5)
    >>> bool(abs(cumulative.quantile(0.375) - 2.5) < 0.1)
    True

    ```

    Attributes:
      column: The column, with the levels that a fit chose.
      numbers: It, or what its levels are groups of.
      groups: Which of `LevelValues` each level belongs to, int [all levels].
      counts: Released counts of all levels, float64 [all levels].
      deviation: The standard deviation of their noise.
    """

    column: Column
    numbers: Numeric
    groups: np.ndarray
    counts: np.ndarray
    deviation: float

    @functools.cached_property
    def _ends(self) -> np.ndarray:
        """The distribution function at the merged levels' upper edges, from 0 on."""
        masses = np.maximum(np.bincount(self.groups, self.counts), 0.0)
        return np.concatenate([[0.0], np.cumsum(masses) / masses.sum()])

    def _level(self, probability: float) -> tuple[int, float]:
        """Returns the merged level that has a quantile, and how much of its mass is below."""
        ends = self._ends
        place = int(np.searchsorted(ends[1:-1], probability, side="right"))
        mass = ends[place + 1] - ends[place]
        below = (probability - ends[place]) / mass if mass > 0.0 else 0.5
        return place, float(np.clip(below, 0.0, 1.0))

    def _members(self, level: int) -> np.ndarray:
        return np.flatnonzero(self.groups == level)

    def _limits(self, level: int) -> tuple[float, float]:
        """Returns the edges of a merged level."""
        if isinstance(self.column, Grouped):
            low, high = self.column.limits
        else:
            low, high = self.numbers.edges[:-1], self.numbers.edges[1:]
        members = self._members(level)
        return float(low[members[0]]), float(high[members[-1]])

    def _values(self, level: int) -> np.ndarray:
        """Returns sorted values within a merged level, float64 [draws, values]."""
        generator, members = np.random.default_rng(0), self._members(level)
        masses = np.maximum(self.counts[members], 1e-9)
        draws = []
        for _ in range(_DRAWS):
            levels = generator.choice(members, _VALUES, p=masses / masses.sum())
            draws.append(self.column.values(levels, generator).astype(np.float64))
        return np.sort(np.stack(draws), axis=1)

    def _draws(self, probability: float) -> np.ndarray:
        """Returns a quantile under each draw of the values within its level, float64 [draws]."""
        level, below = self._level(probability)
        place = min(int(below * _VALUES), _VALUES - 1)
        draws: np.ndarray = self._values(level)[:, place]
        return draws

    def quantile(self, probability: float) -> float:
        """Returns a quantile.

        Args:
          probability: The share of values that are below, in [0, 1].
        """
        return float(self._draws(probability).mean())

    def noise(self, probability: float) -> float:
        """Returns the standard error, by the noise, of the share of values below a quantile.

        Args:
          probability: That share.
        """
        level, below = self._level(probability)
        sizes = np.bincount(self.groups).astype(np.float64)
        part = np.where(np.arange(len(sizes)) < level, 1.0, 0.0)
        part[level] = below
        weights = part - probability
        return self.deviation * math.sqrt(float(sizes @ weights**2)) / float(self.counts.sum())

    def model(self, probability: float) -> float:
        """Returns the standard error of what is assumed within the level of a quantile.

        Args:
          probability: The share of values that are below.
        """
        level, below = self._level(probability)
        low, high = self._limits(level)
        spread = float(self._draws(probability).var())
        step = self.numbers.step
        if step and high - low > step:
            spread += step**2 / 4.0
        if 0 < level < len(self._ends) - 2:
            spread += (self._bent(level) * below * (1.0 - below) * (high - low)) ** 2
        else:
            # Half of what is between, as a few far values have most of a tail's variance.
            far = np.quantile(self._values(level), [0.16, 0.84])
            spread += (self._unsure(low, high) * float(far[1] - far[0]) / 2.0) ** 2
        return math.sqrt(spread)

    def _unsure(self, low: float, high: float) -> float:
        """Returns the standard error of a place in an outermost level, over its deviation."""
        ends = self.column.ends if isinstance(self.column, Grouped) else ()
        if any(low >= end.threshold if end.is_upper else high <= end.threshold for end in ends):
            return _OF_FEW if isinstance(self.column, Grouped) and self.column.few else 0.0
        return 1.0

    def _bent(self, level: int) -> float:
        """Returns by how much a density changes within an inner level, relative to its mean."""
        near = range(level - 1, level + 2)
        limits = np.array([self._limits(place) for place in near])
        edges = self.numbers.edges
        widths = np.maximum(limits[:, 1] - limits[:, 0], tails.NARROW * (edges[-1] - edges[0]))
        densities = np.maximum(np.diff(self._ends)[near], tails.NARROW) / widths
        rise = abs(densities[2] - densities[0]) / (widths[1] + (widths[0] + widths[2]) / 2.0)
        return min(float(rise * widths[1] / densities[1]), 1.0)
