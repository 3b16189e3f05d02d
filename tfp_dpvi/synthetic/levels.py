"""Values of levels: their means and variances within a level, and what is uncertain of these."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping

import numpy as np

from tfp_dpvi.data.columns import Binary, Categorical, Column, Numeric
from tfp_dpvi.synthetic import tails
from tfp_dpvi.synthetic.grouping import Grouped
from tfp_dpvi.synthetic.tails import Tail

# Probabilities and weights of Gauss-Legendre quadrature of the distribution within a level.
_NODES, _WEIGHTS = (np.polynomial.legendre.leggauss(32) + np.array([[1.0], [0.0]])) / 2.0

# Directions of the draws of an end's means, of less than this part of their variance, are left out.
_NEGLIGIBLE = 1e-3

FEW = 4
"""Below so many levels, nothing says how densities fall."""

# The standard error of the mean of an outermost level, relative to its standard deviation.
_OF_END = 0.5

# A level with more than this part of the variance within itself has its standard deviation as that.
_MUCH = 0.05

# A level's density falls if that takes away so much of the variance of an even one.
_LESS = 0.95

# A place is far if so many times as far as the part in which an end's records are taken to be: at
# 100, means missed in silence of 5 of 1,000 records at a bound 10 to 50 times as far as most.
_FAR = 20.0

# The noise of what divides a level is left out below this part of that of the levels' counts.
_LITTLE = 0.2

# Categories that a name of a merged level lists.
_MOST_SHOWN = 3


@dataclasses.dataclass(frozen=True)
class Far:
    """Records that may be far from where those of an end are taken to be.

    No standard error has them: within generous bounds it would be that of the bounds alone.

    ```python
    >>> Far(True, 1e4, 1e5, 43.0, 4e6).place
    'between 10000 and 100000'

    ```

    Attributes:
      is_upper: Whether it is the upper end, or the lower one.
      start: The nearer end of the place where most of the change comes from.
      bound: The farther one.
      records: How many records the noise, or one count, lets be there.
      moved: By how much they change the sum of all values.
    """

    is_upper: bool
    start: float
    bound: float
    records: float
    moved: float

    @property
    def place(self) -> str:
        """The place in words."""
        low, high = (f"{end:.6g}" for end in sorted([self.start, self.bound]))
        return f"at {low}" if low == high else f"between {low} and {high}"


@dataclasses.dataclass(frozen=True)
class LevelValues:
    """Values that stand for the levels of a column in moments.

    Outermost levels of numbers whose counts are little more than noise are merged with the next
    ones: their values are far from the mean, and would multiply the noise.

    ```python
    >>> import numpy as np
    >>> from tfp_dpvi.synthetic import Integer
    >>> levels = LevelValues.of("age", Integer(0, 9, bins=[6]), np.array([6.0, 4.0]), 0.1)
    >>> levels.values[:, 0].tolist(), levels.within.round(2).tolist()
    ([2.5, 7.5], [2.92, 1.25])
    >>> levels.summed(np.array([6.0, 4.0])).tolist()
    [6.0, 4.0]

    ```

    Attributes:
      groups: The merged level of each level, int [all levels].
      names: Names of the columns of `values`.
      values: float64 [levels, d]. Of a column of numbers d is 1, and these are means within levels;
        of categories they indicate all levels but the first.
      within: Variances within levels, float64 [levels]; 0 for categories.
      shifts: Changes of the means, float64 [sources, levels], of one standard error each: how far
        the distribution within levels may be from what is assumed.
      far: Of each end, records that may be far from where they are taken to be, if that is more
        than what is uncertain by `shifts`.
    """

    groups: np.ndarray
    names: tuple[str, ...]
    values: np.ndarray
    within: np.ndarray
    shifts: np.ndarray
    far: tuple[Far, ...] = ()

    @classmethod
    def of(cls, name: str, column: Column, counts: np.ndarray, deviation: float) -> LevelValues:
        """Returns the values of a column's levels.

        Args:
          name: The name of the column.
          column: The column, with the levels that a fit chose.
          counts: Released counts of its levels, float64 [levels].
          deviation: The standard deviation of their noise.
        """
        num = column.num_levels
        inner = column.column if isinstance(column, Grouped) else column
        if isinstance(inner, Numeric):
            return cls._of_numbers(name, column, inner, counts[:num], deviation)
        if isinstance(inner, Binary):
            names, values = [name], np.array([[0.0], [1.0]])
        else:
            names = [f"{name}[{label}]" for label in labels_of(column)[1:num]]
            values = np.eye(num)[:, 1:]
        return cls(np.arange(num), tuple(names), values, np.zeros(num), np.zeros([0, num]))

    @classmethod
    def _of_numbers(
        cls, name: str, column: Column, inner: Numeric, counts: np.ndarray, deviation: float
    ) -> LevelValues:
        owners, shares = np.arange(inner.num_levels), np.ones(inner.num_levels)
        ends = column.ends if isinstance(column, Grouped) else ()
        if isinstance(column, Grouped):
            owners, shares = np.array(column.groups), np.array(column.shares)
        limits = limits_of(inner.edges, owners, column.num_levels)
        single = limits[1] - limits[0] <= max(inner.step, tails.NARROW * np.ptp(inner.edges))
        outer = tails.ends_of(counts, deviation, *limits, single, ends)
        means, variances = _uniform(inner, inner.edges[:-1], inner.edges[1:])
        of_level = np.bincount(owners, shares * means)
        merged = np.arange(column.num_levels)
        for part in outer:
            merged[part.begin : part.stop] = part.begin
        places, merged = np.unique(merged, return_inverse=True)
        masses = np.maximum(counts, 1e-9)
        cells = merged[owners]
        # Within a level, what says where records lie are histograms with a noise of their own.
        most = np.hypot(deviation, np.maximum(counts, 0.0))[owners]
        coarse = np.minimum(column.noise, most) if isinstance(column, Grouped) else 0.0
        rough = np.where(np.bincount(owners)[owners] > 1, coarse, 0.0)
        hidden = np.where(rough, np.hypot(rough, shares * masses[owners]), most)
        ended = [np.arange(part.begin, part.stop) for part in outer]
        rough *= (means - of_level[owners]) * ~np.isin(owners, np.concatenate([[], *ended]))
        shares = shares * (masses / np.bincount(merged, masses)[merged])[owners]
        counts = np.bincount(merged, counts)
        num = len(counts)
        low, high = limits_of(inner.edges, cells, num)
        squares = variances + means**2
        values = np.bincount(cells, shares * means)
        within = np.maximum(np.bincount(cells, shares * squares) - values**2, 0.0)
        alone = np.bincount(cells) == 1
        # Noise hides where in joined levels records lie: a few may lie at the bound.
        noise = deviation * np.sqrt(np.bincount(merged, (of_level - values[merged]) ** 2))
        places_sd = np.minimum(noise / np.maximum(counts, 1.0), high - low)
        # Beyond a joined end, if anything, are values at a bound.
        outermost = {0, num - 1}
        falls = np.zeros(num, bool)
        for part in outer:
            level = int(np.searchsorted(places, part.begin))
            outermost.add(level)
            if num > 1 and (part.is_faint or alone[level]):
                beside = tails.beside(counts, high - low, level, inner.step, part.is_upper)
                count, bounds = max(counts[level], 1e-9), (float(low[level]), float(high[level]))
                falling = _falling(count, beside, *bounds, inner.step, part.is_upper)
                # In joined levels that or the released counts, whichever says more.
                if alone[level] or places_sd[level] > math.sqrt(falling[1]):
                    falls[level] = falling[1] < _LESS * within[level]
                    values[level], within[level] = falling
        rough = np.sqrt(np.bincount(cells, rough**2))
        rough *= rough > _LITTLE * deviation * np.linalg.norm(values - np.median(values))
        places_sd = np.minimum(np.hypot(places_sd, rough / np.maximum(counts, 1.0)), high - low)
        shifts = [_slopes(counts, values, low, high, inner.step)]
        shifts += [sd * (np.arange(num) == level) for level, sd in enumerate(places_sd) if sd]
        clear = np.where(counts >= tails.CLEAR * deviation, counts, 0.0)
        shifts += _unsure(clear, values, within, outermost, falls)
        for end in ends:
            inside = low >= end.threshold if end.is_upper else high <= end.threshold
            heap = shares * np.isin(np.arange(len(cells)), end.heaps)
            parts = [np.bincount(cells, heap * part)[inside] for part in (1.0, means, squares)]
            draws, within[inside] = _drawn(
                end, low[inside], high[inside], inner.step, np.stack(parts)
            )
            values[inside] = draws.mean(axis=0)
            shifts = [np.where(inside, 0.0, shift) for shift in shifts]
            shifts += list(_directions(draws) @ np.eye(num)[inside])
        far = []
        for part in outer:
            level = merged[part.begin]
            edge, filled = _filled(part, level, ends, counts, values[level], low, high, inner.step)
            reach = abs((inner.edges[1:] if part.is_upper else inner.edges[:-1]) - edge)
            inside = (part.begin <= owners) & (owners < part.stop) & (reach > _FAR * filled)
            changes = hidden * inside * np.sqrt((means - values[level]) ** 2 + variances)
            own = float(np.linalg.norm([shift[level] for shift in shifts])) * abs(counts[level])
            if np.linalg.norm(changes) > own:
                far.append(_far(part.is_upper, inner, hidden, changes))
        return cls(merged, (name,), values[:, None], within, np.stack(shifts), tuple(far))

    def summed(self, counts: np.ndarray) -> np.ndarray:
        """Returns counts of merged levels.

        Args:
          counts: Counts of all levels in the first dimension, float64 [all levels, ...].
        """
        merged = np.zeros([len(self.values), *counts.shape[1:]])
        np.add.at(merged, self.groups, counts)
        return merged


def labels_of(column: Column) -> tuple[str, ...]:
    """Returns a name of each level, of missing values last if there may be any.

    Args:
      column: The column, with the levels that a fit chose.
    """
    inner = column.column if isinstance(column, Grouped) else column
    groups = np.array(column.groups) if isinstance(column, Grouped) else np.arange(inner.num_levels)
    num = column.num_levels
    if isinstance(inner, Numeric):
        low, high = limits_of(inner.edges, groups, num)
        last = high - inner.step if inner.step else high
        labels = [
            _text(inner, a) if a == b else f"{_text(inner, a)} to {_text(inner, b)}"
            for a, b in zip(low, last, strict=True)
        ]
    elif isinstance(inner, Categorical):
        members = [np.flatnonzero(groups == level) for level in range(num)]
        labels = [_label(inner, part) for part in members]
    else:
        labels = ["0", "1"]
    return (*labels, "missing") if column.missing else tuple(labels)


def _text(column: Numeric, number: float) -> str:
    return column.as_text(int(number)) if column.step else f"{number:.6g}"


def _label(column: Categorical, members: np.ndarray) -> str:
    """Returns the name of a level: its categories, or those of a parent but for the frequent."""
    parents = column.parents
    if parents is not None and not isinstance(parents, Mapping) and len(members) > _MOST_SHOWN:
        return f"other {parents[members[0]]}"
    return _joined([str(column.categories[place]) for place in members])


def _joined(categories: list[str]) -> str:
    shown = " | ".join(categories[:_MOST_SHOWN])
    more = len(categories) - _MOST_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown


def limits_of(edges: np.ndarray, groups: np.ndarray, num: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns lower and upper edges of levels, float64 [num] each.

    Args:
      edges: The edges of cells, float64 [cells + 1].
      groups: The level of each cell, int [cells].
      num: The number of levels.
    """
    starts = edges[:-1][np.searchsorted(groups, np.arange(num))]
    return starts, np.append(starts[1:], edges[-1])


def _uniform(column: Numeric, low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns means and variances of uniform values, whole ones if the column has these alone."""
    width = high - low
    return (low + high - column.step) / 2.0, (width**2 - column.step**2) / 12.0


def _slopes(
    counts: np.ndarray, values: np.ndarray, low: np.ndarray, high: np.ndarray, step: int
) -> np.ndarray:
    """Returns the changes of means if densities were straight lines through their neighbours'."""
    width = np.maximum(high - low, tails.NARROW * (high[-1] - low[0]))
    density = np.maximum(counts, 1.0) / width
    shift = np.zeros(len(width))
    if len(width) < 3:
        return shift
    rise = (density[2:] - density[:-2]) / (values[2:] - values[:-2])
    room = (width**2 - step**2) / 12.0
    # A line that is 0 at one edge moves the mean by a sixth of the width.
    most = room[1:-1] / (width[1:-1] / 2.0)
    shift[1:-1] = np.clip(rise * room[1:-1] / density[1:-1], -most, most)
    return shift


def _unsure(
    counts: np.ndarray,
    values: np.ndarray,
    within: np.ndarray,
    outermost: Collection[int],
    falls: np.ndarray,
) -> list[np.ndarray]:
    """Returns a standard error of each level's mean, where its distribution matters.

    Args:
      counts: Counts of the levels, 0 where they may be noise, float64 [levels].
      values: Their means.
      within: Their variances.
      outermost: The outermost levels.
      falls: Which of them were seen to fall, bool [levels].
    """
    num = len(counts)
    # Without inner levels, nothing says how densities fall.
    size = _OF_END if num >= FEW else 1.0
    parts = counts * within
    mean = np.average(values, weights=np.maximum(counts, 1e-9))
    variance = float(np.sum(parts) + counts @ (values - mean) ** 2)
    # A level with much of the variance is as unsure.
    much = (parts > _MUCH * variance) & ~falls
    sizes = np.where(much, 1.0, size * np.isin(np.arange(num), list(outermost)))
    return [row for row in np.diag(sizes * np.sqrt(within)) if row.any()]


def _falling(
    count: float, density: float, low: float, high: float, step: int, is_upper: bool
) -> tuple[float, float]:
    """Returns mean and variance in an outermost level whose density falls from its neighbour's.

    It falls exponentially, and is even if the level's own density is no smaller.

    Args:
      count: The level's count.
      density: The density of the neighbour.
      low: The lower edge.
      high: The upper edge.
      step: The distance of values, 0 for real ones.
      is_upper: Whether it is the upper end.
    """
    width = high - low
    # The level's count over that at the neighbour's density: (1 - exp(-rate)) / rate.
    most = density * width
    rate = 0.0 if width <= step else tails.falling_rate(count, most)
    if not rate:
        return (low + high - step) / 2.0, (width**2 - step**2) / 12.0
    beyond = -np.exp(-rate) / np.expm1(-rate)
    mean = 1.0 / rate - beyond
    variance = 1.0 / rate**2 - beyond - beyond**2
    middle = low + width * mean if is_upper else high - width * mean
    return middle - step / 2.0, max(variance * width**2 - step**2 / 12.0, 0.0)


def _directions(draws: np.ndarray) -> np.ndarray:
    """Returns the main independent sources of draws of one posterior, float64 [sources, values]."""
    centred = (draws - draws.mean(axis=0)) / np.sqrt(len(draws))
    sizes, directions = np.linalg.svd(centred, full_matrices=False)[1:]
    main = sizes**2 > _NEGLIGIBLE * np.sum(sizes**2)
    kept: np.ndarray = (sizes[:, None] * directions)[main]
    return kept


def _filled(
    part: tails.End,
    level: int,
    ends: Collection[Tail],
    counts: np.ndarray,
    mean: float,
    low: np.ndarray,
    high: np.ndarray,
    step: int,
) -> tuple[float, float]:
    """Returns where an end begins, and how wide a part of it its records fill as is assumed.

    That is where their mean is, or what they fill at the density beside if it is less.
    """
    for end in ends:
        if end.is_upper == part.is_upper:
            inside = low >= end.threshold if part.is_upper else high <= end.threshold
            level = int(np.argmax(inside)) if part.is_upper else int(np.sum(inside)) - 1
    edge = float(low[level] if part.is_upper else high[level])
    beside = tails.beside(counts, high - low, level, step, part.is_upper)
    records = float(counts[level:].sum() if part.is_upper else counts[: level + 1].sum())
    filled = min(abs(mean - edge), max(records, 1.0) / max(beside, 1e-300))
    # A value fills what is up to the next one.
    return edge, max(filled, float(step))


def _far(is_upper: bool, inner: Numeric, hidden: np.ndarray, changes: np.ndarray) -> Far:
    """Returns the records of an end that may be far, from those of cells and what they change."""
    cells, most = np.flatnonzero(changes), int(np.argmax(changes))
    lows, highs = inner.edges[:-1], inner.edges[1:] - inner.step
    start = lows[most] if is_upper else highs[most]
    bound = highs[cells[-1]] if is_upper else lows[cells[0]]
    moved = float(np.linalg.norm(changes))
    return Far(is_upper, float(start), float(bound), float(hidden[most]), moved)


def _drawn(
    end: Tail, low: np.ndarray, high: np.ndarray, step: int, heaps: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns means within levels under each draw, float64 [draws, levels], and variances.

    Args:
      end: The end, with its draws.
      low: The levels' lower edges.
      high: Their upper edges.
      step: The distance of values, 0 for real ones.
      heaps: Of what stays as it was counted, the shares in the levels, and these times means and
        mean squares.
    """
    uniform = np.tile(_NODES, [len(low), 1])
    begin = np.broadcast_to(low[:, None], uniform.shape)
    stop = np.broadcast_to(high[:, None], uniform.shape)
    means, squares = [], []
    for draw in range(len(end.draws)):
        numbers = end.values(begin, stop, uniform, draw)
        numbers = np.clip(np.floor(numbers), begin, stop - step) if step else numbers
        means.append(numbers @ _WEIGHTS)
        squares.append(numbers**2 @ _WEIGHTS)
    drawn = heaps[1] + (1.0 - heaps[0]) * np.stack(means)
    second = heaps[2] + (1.0 - heaps[0]) * np.stack(squares).mean(axis=0)
    return drawn, np.maximum(second - drawn.mean(axis=0) ** 2, 0.0)
