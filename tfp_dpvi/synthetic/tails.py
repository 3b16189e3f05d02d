"""The ends of a column of numbers: generalized Pareto distributions within its outermost levels.

The outermost levels are wide, and few records lie in them: uniform draws would move means and
standard deviations. Beyond a high threshold almost every distribution is close to a generalized
Pareto distribution (Pickands 1975), whose two parameters are fitted to the released counts of the
outermost levels. It is post-processing, at no cost.
"""

from __future__ import annotations

import dataclasses

import numpy as np

# The fraction of records beyond the threshold, at most.
_FRACTION = 0.12

# Shapes and, relative to the mean excess, scales of the distributions that are compared.
_SHAPES = np.linspace(-1.5, 2.0, 57)
_SCALES = np.geomspace(0.05, 20.0, 97)

# The standard deviation of the normal prior of the shape.
_SPREAD = 0.3

# The number of posterior draws that are kept.
_DRAWS = 50


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
    """

    is_upper: bool
    threshold: float
    draws: tuple[tuple[float, float], ...]
    heaps: tuple[int, ...] = ()

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
        begin = survival(self.excesses(low), shape, scale)
        end = survival(self.excesses(high), shape, scale)
        excess = inverse_survival(begin + (end - begin) * uniform, shape, scale)
        numbers = self.threshold + excess if self.is_upper else self.threshold - excess
        return np.clip(np.where(begin == end, low + (high - low) * uniform, numbers), low, high)


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
    edges: np.ndarray, counts: np.ndarray, variances: np.ndarray, generator: np.random.Generator
) -> list[tuple[float, float]] | None:
    """Returns posterior draws of shape and scale; None if no distribution is near the counts.

    Args:
      edges: Excesses at the ends of the levels, increasing from 0, float64 [levels + 1].
      counts: Released counts of the levels, float64 [levels].
      variances: Their variances, of noise and of sampling, float64 [levels].
      generator: The source of the draws.
    """
    total = counts.sum()
    middles = (edges[1:] + edges[:-1]) / 2.0
    mean = float(np.maximum(counts, 0.0) @ np.minimum(middles, 2.0 * edges[:-1] + edges[1])) / total
    shapes, scales = np.meshgrid(_SHAPES, _SCALES * mean, indexing="ij")
    beyond = survival(edges[:, None, None], shapes, scales)
    inside = beyond[:-1] - beyond[1:]
    with np.errstate(invalid="ignore", divide="ignore"):
        shares = inside / inside.sum(axis=0)
    residuals = (counts[:, None, None] - total * shares) ** 2 / variances[:, None, None]
    misfit = residuals.sum(axis=0)
    if not np.nanmin(misfit) < 16.0 + 2.0 * len(counts):
        return None
    log_density = np.nan_to_num(-0.5 * misfit - 0.5 * (shapes / _SPREAD) ** 2, nan=-np.inf)
    weights = np.exp(log_density - log_density.max()).ravel()
    chosen = generator.choice(weights.size, _DRAWS, p=weights / weights.sum())
    return [(float(shapes.flat[place]), float(scales.flat[place])) for place in chosen]


def outermost(counts: np.ndarray, single: np.ndarray) -> int:
    """Returns how many of the last levels are in the tail: at least 3, or 0.

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
    return num if num >= 3 else 0
