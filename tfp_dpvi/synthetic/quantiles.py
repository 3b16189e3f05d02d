"""Quantiles of a column of numbers, from noisy counts of its levels.

Their intervals are those of Woodruff (1952): of the distribution function, inverted.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import numpy as np

from tfp_dpvi.data.columns import Column, Numeric
from tfp_dpvi.synthetic import tails
from tfp_dpvi.synthetic.grouping import Grouped
from tfp_dpvi.synthetic.levels import limits_of

# Of the values within a level: so many draws of its distribution, of so many values each.
_DRAWS = 20
_VALUES = 500

# The standard error of a place in an end, over half of what is between its quantiles .16 and .84:
# of a fitted one, if a few records have most of the column's variance; of one whose density falls
# from that beside, of which one count alone says how. At most that of an even density.
_OF_FEW = 0.5
_OF_FALLING = 3.0
_OF_EVEN = 0.34

# A level so many times as dense as those beside may have one value alone, which may be anywhere in
# it; over its width, the standard deviation of that.
_DENSER = 20.0
_OF_ANY = 0.29


@dataclasses.dataclass(frozen=True)
class Cumulative:
    """The distribution function of a column of numbers, by its levels' counts.

    Within a level it is that of samples: even, or falling at an end of the column.

    ```python
    >>> import numpy as np
    >>> from tfp_dpvi.synthetic import Continuous
    >>> column = Continuous(0.0, 10.0, bins=[5.0])
    >>> cumulative = Cumulative(column, np.arange(2), np.array([30.0, 10.0]), 0.5)
    >>> bool(abs(cumulative.quantile(0.375) - 2.5) < 0.1)
    True

    ```

    Attributes:
      column: The column, with the levels that a fit chose.
      groups: Which of `LevelValues` each level belongs to, int [all levels].
      counts: Released counts of all levels, float64 [all levels].
      deviation: The standard deviation of their noise.
    """

    column: Column
    groups: np.ndarray
    counts: np.ndarray
    deviation: float

    @property
    def numbers(self) -> Numeric:
        """The column, or what its levels are groups of."""
        inner = self.column.column if isinstance(self.column, Grouped) else self.column
        assert isinstance(inner, Numeric)
        return inner

    @functools.cached_property
    def _merged(self) -> np.ndarray:
        """Released counts of the merged levels, which may be below 0."""
        return np.bincount(self.groups, self.counts)

    @functools.cached_property
    def _ends(self) -> np.ndarray:
        """The distribution function at the merged levels' upper edges, from 0 on.

        Counts below 0 stay, as the others' sum would be too large without them.
        """
        sums = np.cumsum(self._merged) / self._merged.sum()
        rising = np.maximum.accumulate(sums) + np.minimum.accumulate(sums[::-1])[::-1]
        return np.concatenate([[0.0], np.clip(rising / 2.0, 0.0, 1.0)])

    @functools.cached_property
    def _limits(self) -> np.ndarray:
        """The edges of the merged levels, float64 [levels, 2]."""
        cells = np.array(self.column.groups) if isinstance(self.column, Grouped) else slice(None)
        groups = self.groups[cells]
        return np.stack(limits_of(self.numbers.edges, groups, len(self._merged)), axis=1)

    @functools.cached_property
    def _widths(self) -> np.ndarray:
        edges = self.numbers.edges
        least = tails.NARROW * (edges[-1] - edges[0])
        return np.maximum(self._limits[:, 1] - self._limits[:, 0], least)

    @functools.cached_property
    def _wide(self) -> np.ndarray:
        """The merged levels of more than one value."""
        edges = self.numbers.edges
        least = max(self.numbers.step, tails.NARROW * (edges[-1] - edges[0]))
        return np.flatnonzero(self._widths > least)

    def _level(self, probability: float) -> tuple[int, float]:
        """Returns the merged level that has a quantile, and how much of its mass is below."""
        ends = self._ends
        place = int(np.searchsorted(ends[1:-1], probability, side="right"))
        mass = ends[place + 1] - ends[place]
        below = (probability - ends[place]) / mass if mass > 0.0 else 0.5
        return place, float(np.clip(below, 0.0, 1.0))

    def limits(self, probability: float) -> tuple[float, float]:
        """Returns the lower and the upper edge of the merged level that has a quantile.

        Args:
          probability: The share of values that are below.
        """
        low, high = self._limits[self._level(probability)[0]]
        return float(low), float(high)

    def is_wide(self, probability: float) -> bool:
        """Returns whether a quantile is in a level of more than one value.

        Args:
          probability: The share of values that are below.
        """
        return self._level(probability)[0] in self._wide

    def _is_end(self, level: int) -> bool:
        """Returns whether beyond a level are single values alone."""
        return level in self._wide and level in (self._wide[0], self._wide[-1])

    def _is_fitted(self, level: int, ends: Sequence[tails.Tail]) -> bool:
        low, high = self._limits[level]
        return any(low >= end.threshold if end.is_upper else high <= end.threshold for end in ends)

    @functools.cached_property
    def _known(self) -> dict[int, np.ndarray]:
        """The results of `_values`, as several quantiles are in one level."""
        return {}

    def _values(self, level: int) -> np.ndarray:
        """Returns sorted values within a merged level, float64 [draws, values]."""
        if level not in self._known:
            self._known[level] = self._drawn(level)
        return self._known[level]

    def _drawn(self, level: int) -> np.ndarray:
        column = self.column
        low, high = self._limits[level]
        generator, members = np.random.default_rng(0), np.flatnonzero(self.groups == level)
        fitted = (*column.ends, *column.falling) if isinstance(column, Grouped) else ()
        if self._is_end(level) and len(self._wide) > 1 and not self._is_fitted(level, fitted):
            # As in `LevelValues`, its density falls from that beside.
            is_upper, step = level == self._wide[-1], self.numbers.step
            beside = tails.beside(self._merged, self._widths, level, step, is_upper)
            count = max(float(self._merged[level]), 1e-9)
            end = tails.falling(is_upper, low, high, count, max(beside, 1e-9 / (high - low)))
            even = (np.arange(_VALUES) + 0.5) / _VALUES
            values = end.values(np.full(_VALUES, low), np.full(_VALUES, high), even, 0)
            values = np.clip(np.floor(values), low, high - step) if step else values
            return np.sort(values)[None]
        masses = np.maximum(self.counts[members], 1e-9)
        draws = []
        for _ in range(_DRAWS):
            levels = generator.choice(members, _VALUES, p=masses / masses.sum())
            draws.append(column.values(levels, generator).astype(np.float64))
        return np.sort(np.stack(draws), axis=1)

    def _draws(self, probability: float) -> np.ndarray:
        """Returns a quantile under each draw of the values within its level, float64 [draws]."""
        level, below = self._level(probability)
        # One value alone is that of all quantiles there, whose intervals have the whole level.
        below = 0.5 if self._is_isolated(level) else below
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
        return self.deviation * math.sqrt(float(sizes @ weights**2)) / float(self._merged.sum())

    def model(self, probability: float) -> float:
        """Returns the standard error of what is assumed within the level of a quantile.

        Args:
          probability: The share of values that are below.
        """
        level, below = self._level(probability)
        if level not in self._wide:
            return 0.0
        spread = float(self._draws(probability).var()) + self.numbers.step**2 / 4.0
        spread += self._rough(level, below) ** 2
        bent, width = self._bent(level), float(self._widths[level])
        if self._is_isolated(level):
            spread += (_OF_ANY * width) ** 2
        elif self._is_end(level) or bent == 1.0:
            # Half of what is between, as a few far values have most of a tail's variance.
            half = float(np.ptp(np.quantile(self._values(level), [0.16, 0.84]))) / 2.0
            spread += min(self._unsure(level) * half, _OF_EVEN * width) ** 2
        else:
            spread += (bent * below * (1.0 - below) * width) ** 2
        return math.sqrt(spread)

    def _rough(self, level: int, below: float) -> float:
        """Returns the standard error of a place in a level by the noise of what divides it."""
        column, ends = self.column, np.flatnonzero(self.groups == level)
        # In an end values are those of a distribution that falls, of which it says nothing.
        if not isinstance(column, Grouped):
            return 0.0
        if self._is_end(level) or self._is_fitted(level, column.ends):
            return 0.0
        num = np.count_nonzero(np.isin(column.groups, ends))
        share = column.noise * math.sqrt((num - 1) * below * (1.0 - below))
        share /= max(float(self._merged[level]), 1.0)
        return min(share, _OF_EVEN) * float(self._widths[level])

    def _unsure(self, level: int) -> float:
        """Returns the standard error of a place in a level, over its half width."""
        column = self.column
        if not (isinstance(column, Grouped) and self._is_fitted(level, column.ends)):
            return _OF_FALLING
        return _OF_FEW if column.few else 0.0

    @functools.cached_property
    def _densities(self) -> np.ndarray:
        densities: np.ndarray = np.maximum(np.diff(self._ends), tails.NARROW) / self._widths
        return densities

    def _near(self, level: int) -> np.ndarray:
        """Returns the levels beside one, but for single values."""
        near: np.ndarray = self._wide[abs(self._wide - level) == 1]
        return near

    def _is_isolated(self, level: int) -> bool:
        """Returns whether a level is far denser than those on both sides."""
        densities, near = self._densities, self._near(level)
        return bool(len(near)) and bool(densities[level] > _DENSER * densities[near].max())

    def _bent(self, level: int) -> float:
        """Returns by how much a density may change within a level, relative to its mean, up to 1.

        By the steeper of the lines to its neighbours, of which single values say nothing.
        """
        width, near = float(self._widths[level]), self._near(level)
        if not len(near):
            return 1.0
        densities = self._densities
        distances = (width + np.minimum(self._widths[near], width)) / 2.0
        steepest = np.max(abs(densities[near] - densities[level]) / distances)
        return min(float(steepest * width / densities[level]), 1.0)
