"""The ends of a column of numbers: generalized Pareto distributions within its outermost levels.

The outermost levels are wide, and few records lie in them: uniform draws would move means and
standard deviations. Beyond a high threshold almost every distribution is close to a generalized
Pareto distribution (Pickands 1975), whose two parameters are fitted to the released counts of the
outermost levels. It is post-processing, at no cost.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import scipy.optimize
import scipy.stats

# The fraction of records beyond the threshold, at most.
_FRACTION = 0.12

# Shapes and, relative to the mean excess, scales of the distributions that are compared.
_SHAPES = np.linspace(-1.5, 2.0, 57)
_SCALES = np.geomspace(0.05, 20.0, 97)

# The standard deviation of the normal prior of the shape.
_SPREAD = 0.3

# The number of posterior draws that are kept.
_DRAWS = 50

LEAST = 3
"""So many levels have a shape."""

# Standard deviations of the noise that the count of an outermost level exceeds.
CLEAR = 6.0

# Relative to the bounds' distance, widths of levels of one real value count as so much.
NARROW = 1e-9

# By so much less than at its neighbour's density, a level's count says that its density falls.
_LEAST_FALL = 1e-6

# How often counts of a generalized Pareto distribution are said to be none.
_MISFIT = 0.01

# How often counts of joined levels that do fall from what is beside are said not to.
_REFUTED = 0.001

# Relative to a level's width, the scale of a density that does not fall.
_EVEN = 1e6


@dataclasses.dataclass(frozen=True)
class Tail:
    """Posterior draws of the distribution of an end of a column.

    ```python
    >>> import numpy as np
    >>> tail = Tail(True, 10.0, ((0.0, 5.0),))
    >>> tail.values(np.array([10.0]), np.array([90.0]), np.array([0.5]), 0).round(2).tolist()
    [13.47]

    ```

    Attributes:
      is_upper: Whether it is the upper end, or the lower one.
      threshold: Where it begins.
      draws: Pairs of shape and scale, each from the posterior given the counts.
      heaps: Numbers of finest levels with more records than the distribution explains, which stay
        as they were counted.
      joined: The edges of the levels whose counts are little more than noise: they are as one.
      bound: Where the column ends.
      piled: The numbers of the draws in which what would be beyond the bound lies at it, as it does
        where numbers were cut to the bounds. In the other draws nothing was cut.
    """

    is_upper: bool
    threshold: float
    draws: tuple[tuple[float, float], ...]
    heaps: tuple[int, ...] = ()
    joined: tuple[float, float] | None = None
    bound: float | None = None
    piled: tuple[int, ...] = ()

    def excesses(self, numbers: np.ndarray) -> np.ndarray:
        """Returns distances from the threshold."""
        return (numbers - self.threshold) if self.is_upper else (self.threshold - numbers)

    def values(
        self, low: np.ndarray, high: np.ndarray, uniform: np.ndarray, draw: int
    ) -> np.ndarray:
        """Returns values within intervals.

        Args:
          low: Lower ends, float64 [n].
          high: Upper ends, float64 [n].
          uniform: Uniform numbers, float64 [n].
          draw: The posterior draw.
        """
        shape, scale = self.draws[draw]
        begin, end = self._beyond(low, draw), self._beyond(high, draw)
        excess = inverse_survival(begin + (end - begin) * uniform, shape, scale)
        numbers = self.threshold + excess if self.is_upper else self.threshold - excess
        even = np.where(begin > 0.0, low + (high - low) * uniform, low if self.is_upper else high)
        return np.clip(np.where(begin == end, even, numbers), low, high)

    def _beyond(self, edges: np.ndarray, draw: int) -> np.ndarray:
        """Returns probabilities of numbers farther out than edges."""
        survivals = survival(self.excesses(edges), *self.draws[draw])
        is_end = (edges == self.bound) & (draw in self.piled)
        return np.where(is_end, 0.0, survivals)

    def limits(self, low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the edges between which values of levels lie: those of all joined ones.

        Args:
          low: Lower edges of the levels, float64 [levels].
          high: Their upper edges.
        """
        if self.joined is None:
            return low, high
        begin, stop = self.joined
        inside = (low >= begin) & (high <= stop)
        return np.where(inside, begin, low), np.where(inside, stop, high)


def survival(
    excess: np.ndarray, shape: float | np.ndarray, scale: float | np.ndarray
) -> np.ndarray:
    """Returns probabilities of larger excesses; shapes near 0 are exponential distributions.

    Args:
      excess: Distances from the threshold, float64.
      shape: The shape, which broadcasts with the excesses.
      scale: The scale, likewise.
    """
    shape = np.where(np.abs(shape) < 1e-6, 1e-6, shape)
    return np.maximum(1.0 + shape * excess / scale, 0.0) ** (-1.0 / shape)


def inverse_survival(probability: np.ndarray, shape: float, scale: float) -> np.ndarray:
    """Returns the excesses of which `survival` is `probability`.

    Args:
      probability: Probabilities, float64.
      shape: The shape.
      scale: The scale.
    """
    shape = 1e-6 if abs(shape) < 1e-6 else shape
    return scale * (np.maximum(probability, 1e-300) ** -shape - 1.0) / shape


def fit(
    edges: np.ndarray,
    counts: np.ndarray,
    variances: np.ndarray,
    generator: np.random.Generator,
    *,
    may_be_cut: bool = True,
) -> tuple[list[tuple[float, float]], list[int]] | None:
    """Returns posterior draws of shape and scale; None if no distribution is near the counts.

    Whether numbers beyond the last edge were cut to it or are none is as likely before the counts.
    Counts that show neither leave both, which is how unsure a few records at a bound are.

    Args:
      edges: Excesses at the ends of the levels, increasing from 0, float64 [levels + 1].
      counts: Released counts of the levels, float64 [levels].
      variances: Their variances, of noise and of sampling, float64 [levels].
      generator: The source of the draws.
      may_be_cut: Whether numbers may have been cut to the last edge.

    Returns:
      The draws, and the numbers of those in which numbers were cut to the last edge.
    """
    total = counts.sum()
    middles = (edges[1:] + edges[:-1]) / 2.0
    mean = float(np.maximum(counts, 0.0) @ np.minimum(middles, 2.0 * edges[:-1] + edges[1])) / total
    shapes, scales = np.meshgrid(_SHAPES, _SCALES * mean, indexing="ij")
    beyond = survival(edges[:, None, None], shapes, scales)
    cut = np.concatenate([beyond[:-1], np.zeros_like(beyond[:1])])
    inside = -np.diff(np.stack([beyond, cut]), axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        shares = inside / inside.sum(axis=1, keepdims=True)
    residuals = (counts[:, None, None] - total * shares) ** 2 / variances[:, None, None]
    misfit = residuals.sum(axis=1)
    if not np.nanmin(misfit) < float(scipy.stats.chi2.isf(_MISFIT, len(counts) - 2)):
        return None
    log_density = np.nan_to_num(-0.5 * misfit - 0.5 * (shapes / _SPREAD) ** 2, nan=-np.inf)
    if not may_be_cut:
        log_density[1] = -np.inf
    weights = np.exp(log_density - log_density.max()).ravel()
    chosen = generator.choice(weights.size, _DRAWS, p=weights / weights.sum())
    piled, places = np.divmod(chosen, shapes.size)
    draws = [(float(shapes.flat[place]), float(scales.flat[place])) for place in places]
    return draws, list(map(int, np.flatnonzero(piled)))


def outermost(counts: np.ndarray, single: np.ndarray) -> int:
    """Returns how many of the last levels are in the tail: at least `LEAST`, or 0.

    Args:
      counts: Released counts of the levels, in the order towards the end.
      single: Which levels have a single value, at which a tail ends.
    """
    allowed = _FRACTION * max(float(counts.sum()), 1.0)
    num, mass = 0, 0.0
    for count, alone in zip(counts[::-1], single[::-1], strict=True):
        mass += float(count)
        if alone or mass > allowed:
            break
        num += 1
    return num if num >= LEAST else 0


@dataclasses.dataclass(frozen=True)
class End:
    """Outermost levels that count as one if they have no more records than the noise.

    No count that is noise shows that a level is empty. Within generous public bounds such levels
    are many and far: as they are, their values would be sampled, and would multiply the noise.

    ```python
    >>> import numpy as np
    >>> counts = np.array([500.0, 300.0, 5.0, -4.0, 900.0])
    >>> low = np.array([0.0, 1.0, 2.0, 50.0, 99.0])
    >>> single = np.array([False, False, False, False, True])
    >>> ends_of(counts, 3.0, low, np.append(low[1:], 99.0), single, ())[1]
    End(is_upper=True, begin=2, stop=4, is_faint=True)

    ```

    Attributes:
      is_upper: Whether it is the upper end, or the lower one.
      begin: The first of the levels.
      stop: The level after the last one. Values at a bound with many records are levels beyond.
      is_faint: Whether counts of single levels, but for the first, are no more than noise.
    """

    is_upper: bool
    begin: int
    stop: int
    is_faint: bool


def ends_of(
    counts: np.ndarray,
    deviation: float,
    low: np.ndarray,
    high: np.ndarray,
    single: np.ndarray,
    fitted: Sequence[Tail],
) -> list[End]:
    """Returns the lower and the upper end, of those that have levels.

    What a fitted distribution describes is joined with nothing else. Without one, up to half of
    the levels are joined: as many of the outermost as may have a density that falls from what is
    beside, by which joined levels are sampled.

    Args:
      counts: Released counts of the levels, float64 [levels].
      deviation: The standard deviation of their noise.
      low: Lower edges of the levels, float64 [levels].
      high: Their upper edges.
      single: Which levels have a single value, bool [levels].
      fitted: The distributions at the ends.
    """
    num = len(counts)
    upper = [int(np.argmax(low >= end.threshold)) for end in fitted if end.is_upper]
    lower = [int(np.argmin(high <= end.threshold)) for end in fitted if not end.is_upper]
    first = lower[0] if lower else min([num // 2, *upper])
    last = upper[0] if upper else max([num // 2, *lower])
    wide = np.maximum(high - low, NARROW * (high[-1] - low[0]))
    upwards = _outermost(counts, deviation, wide, single, last, bool(upper))
    downwards = _outermost(
        counts[::-1], deviation, wide[::-1], single[::-1], num - first, bool(lower)
    )
    mirrored = End(False, num - downwards.stop, num - downwards.begin, downwards.is_faint)
    return [end for end in (mirrored, upwards) if end.begin < end.stop]


def _outermost(
    counts: np.ndarray,
    deviation: float,
    widths: np.ndarray,
    single: np.ndarray,
    start: int,
    fitted: bool,
) -> End:
    """Returns the end of levels in outward order.

    Args:
      counts: Counts of levels, outward, float64 [levels].
      deviation: The standard deviation of their noise.
      widths: Widths of the levels.
      single: Which levels have a single value.
      start: The first level that may be in the end.
      fitted: Whether a distribution says where records lie within the levels.
    """
    alone = counts >= CLEAR * deviation
    stop = len(counts)
    while stop > start and single[stop - 1] and alone[stop - 1]:
        stop -= 1
    if stop == start:
        return End(True, stop, stop, False)
    inward = np.cumsum(counts[start:stop][::-1])
    clear = inward >= CLEAR * deviation * np.sqrt(np.arange(1, stop - start + 1))
    begin = stop - 1 - int(np.argmax(clear)) if clear.any() else start
    if not fitted:
        falls = (
            _may_fall(counts[:stop], deviation, widths[:stop], single[:stop], place)
            for place in range(begin, stop)
        )
        begin += next(skipped for skipped, may in enumerate(falls) if may)
    if begin + 1 < stop and alone[begin] and not fitted:
        # It is part of the end if densities fall there already.
        densities = counts / widths
        begin += not (begin and densities[begin] < densities[begin - 1])
        return End(True, begin, stop, True)
    return End(True, begin, stop, begin + 1 < stop or not bool(alone[begin]))


def _may_fall(
    counts: np.ndarray, deviation: float, widths: np.ndarray, single: np.ndarray, begin: int
) -> bool:
    """Returns whether the levels from `begin` may have a density that falls from what is beside.

    Each may be no more than noise, while together they have a shape: most records of a column may
    be zeros, and the others few and far from them. A single level has no shape.
    """
    num = len(counts) - begin
    if num == 1:
        return True
    edges = np.append(0.0, np.cumsum(widths[begin:]))
    total = float(counts[begin:].sum())
    density = beside(
        np.append(counts[:begin], total),
        np.append(widths[:begin], edges[-1]),
        begin,
        float(widths[single].max(initial=0.0)),
        True,
    )
    fall = falling(True, 0.0, float(edges[-1]), total, density)
    beyond = survival(edges, *fall.draws[0])
    shares = (beyond[:-1] - beyond[1:]) / (beyond[0] - beyond[-1])
    # Least squares: the sum's own noise, which is that of all levels, would be the first one's.
    expected = shares * float(counts[begin:] @ shares) / float(shares @ shares)
    variances = deviation**2 + np.maximum(expected, 1.0)
    misfit = float(np.sum((counts[begin:] - expected) ** 2 / variances))
    return misfit < float(scipy.stats.chi2.isf(_REFUTED, num - 1))


def beside(
    counts: np.ndarray, widths: np.ndarray, level: int, step: float, is_upper: bool
) -> float:
    """Returns the density of records beside a level of an end, towards the middle.

    Args:
      counts: Counts of the levels, float64 [levels].
      widths: Their widths.
      level: The level of the end.
      step: The distance of values, 0 for real ones.
      is_upper: Whether it is the upper end.
    """
    order = np.arange(level)[::-1] if is_upper else np.arange(level + 1, len(counts))
    if not len(order):
        return 0.0
    least = max(step, NARROW * float(widths.sum()))
    densities = np.maximum(counts, 1.0) / np.maximum(widths, NARROW * widths.sum())
    # A level of one value may be a heap, denser than what is beside it. The other end is no help.
    is_single = widths[order[0]] <= least and len(order) > 2
    return float(densities[order[: 2 if is_single else 1]].min())


def falling_rate(count: float, most: float) -> float:
    """Returns the rate, relative to a level's width, at which its density falls; 0 for not at all.

    It falls exponentially from its neighbour's density.

    Args:
      count: The level's count, above 0.
      most: That at the neighbour's density.
    """
    # By so little, it is rounding.
    if count >= (1.0 - _LEAST_FALL) * most:
        return 0.0
    return float(
        scipy.optimize.brentq(lambda x: -np.expm1(-x) / x - count / most, 1e-9, 2.0 * most / count)
    )


def falling(is_upper: bool, low: float, high: float, count: float, density: float) -> Tail:
    """Returns the distribution of an end whose density falls from its neighbour's.

    Args:
      is_upper: Whether it is the upper end.
      low: Its lower edge.
      high: Its upper edge.
      count: The number of its records.
      density: The density beside it.
    """
    rate = falling_rate(max(count, 1e-9), density * (high - low))
    scale = (high - low) * min(1.0 / rate if rate else _EVEN, _EVEN)
    return Tail(is_upper, low if is_upper else high, ((0.0, scale),), joined=(low, high))
