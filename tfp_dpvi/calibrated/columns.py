"""The curvature if a few columns of private inputs are unlike the public ones.

Inputs are shifted, scaled or correlated column by column: a value is rarer than in public inputs,
say. In whitened coordinates, intercepts first, that is a triangular factor with few large entries.
A Wishart prior, which spreads what is unlike over all directions, calls such an entry noise, and
its column's interval is then too narrow.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np
from scipy import linalg, special

_NUM_PARTICLES = 512
# The probability that a column is unlike the public one; and then, that it is shifted or scaled.
_UNLIKE = 0.1
_SHIFTED = 0.5
_SCALED = 0.75
# The number of other columns with which its correlations are unlike, on average.
_CORRELATED = 1.0
# Standard deviations of a shift or a correlation that is unlike, and of a scale's logarithm.
_SHIFT_SD = 1.0
_SCALE_SD = 1.0
# The share of a column's information that is its own, below which it is nearly a combination; and
# the standard deviation of that share's logarithm, from which it is not known.
_LEAST_OWN = 0.1
_GUESS_SD = 0.7
# The share below which a column is better seen in other coordinates.
_WEAK = 0.3
# Of an entry on the diagonal.
_LEAST_SQUARE = 1e-6
# In standard deviations of the noise: a released square below zero by more is as good as that.
_FARTHEST = 3.0
# Relative to the mean of the diagonal.
_RIDGE = 1e-9
# A trace beyond its bound by 1 % counts as one standard deviation, as for a Wishart matrix.
_STEEP = 100.0


class _Particles(NamedTuple):
    """Weighted draws.

    Attributes:
      log_evidence: The logarithm of the mean weight.
      rows: Rows and columns of P Cholesky factors of M, shape [d, d, P].
      weights: Shape [P]; they sum to 1.
    """

    log_evidence: float
    rows: np.ndarray
    weights: np.ndarray


class FewUnlike:
    """The matrix `M = a L B B^T L^T` given a noisy release of it, if few columns are unlike.

    L is the Cholesky factor of the matrix at public inputs, and B is lower triangular. A row of B
    is near that of the identity, or its column of inputs is unlike the public one: then entries,
    and the diagonal's logarithm, have a spike and slab prior (Mitchell and Beauchamp, Bayesian
    variable selection in linear regression, 1988). A particle filter draws one entry after another
    given its released value and the entries before it (Liu and Chen, Sequential Monte Carlo methods
    for dynamic systems, 1998).

    Args:
      released: The released matrix, symmetric, shape [d, d].
      noise: The noise's standard deviation on its diagonal; off it that is `noise / sqrt(2)`.
      matrix: The matrix at public inputs, up to the factor a, shape [d, d].
      factor_sd: The standard deviation of the logarithm of a.
      spike: The standard deviation of an entry that is alike.
      intercept: The coordinate that a shift of any column changes.
      most_trace: Bound on the trace of M.
    """

    def __init__(
        self,
        released: np.ndarray,
        noise: float,
        matrix: np.ndarray,
        *,
        factor_sd: float,
        spike: float,
        intercept: int,
        most_trace: float,
    ) -> None:
        size = len(matrix)
        self._released, self._noise = released, noise
        self._factor_sd, self._spike = factor_sd, spike
        self._intercept = intercept
        ridge = _RIDGE * np.trace(matrix) / size * np.eye(size)
        self._root = linalg.cholesky(matrix + ridge, lower=True)
        self._most_trace = most_trace
        self._particles = self._filter(np.random.default_rng(0))

    def log_evidence(self) -> float:
        """Returns the log probability of the release, up to the constant of its noise."""
        return self._particles.log_evidence

    @property
    def combined(self) -> float:
        """The probability that a column is nearly a combination of those before it.

        If the release does not say how nearly, its interval rests on a guess; if it does, this
        is 0.
        """
        logs, weights = self._own_logs, self._particles.weights
        away = logs - (logs @ weights)[:, None]
        is_guess = away**2 @ weights > _GUESS_SD**2
        return float(np.max(is_guess * self._probability_below(_LEAST_OWN)))

    @property
    def weak(self) -> float:
        """The probability that most of a column's information is of a combination of others."""
        return float(np.max(self._probability_below(_WEAK)))

    @functools.cached_property
    def _own_logs(self) -> np.ndarray:
        """Logarithms of the shares of each column's information that are its own, shape [d, P]."""
        rows = self._particles.rows
        flat = linalg.solve_triangular(self._root, rows.reshape(len(rows), -1), lower=True)
        squares = flat.reshape(rows.shape) ** 2
        own = np.diagonal(squares).T / np.sum(squares, axis=1)
        logs: np.ndarray = np.log(np.maximum(own, _LEAST_SQUARE))
        return logs

    def _probability_below(self, share: float) -> np.ndarray:
        """Returns the probabilities that the columns' own shares are smaller, shape [d]."""
        return (self._own_logs < math.log(share)) @ self._particles.weights

    def draws(self, num: int, generator: np.random.Generator) -> np.ndarray:
        """Returns draws of M, shape [num, d, d].

        Args:
          num: Their number.
          generator: The source of random numbers.
        """
        chosen = _resampled(self._particles.weights, num, generator)
        rows = np.moveaxis(self._particles.rows[:, :, chosen], 2, 0)
        return rows @ np.swapaxes(rows, 1, 2)

    def _filter(self, generator: np.random.Generator) -> _Particles:
        """Returns P particles."""
        size, num = len(self._root), _NUM_PARTICLES
        # Of sqrt(a) L B.
        rows = np.zeros((size, size, num))
        scale = np.exp(self._factor_sd * generator.normal(size=num) / 2.0)
        logs = np.full(num, -math.log(num))
        for i in range(size):
            logs += self._draw_row(rows[: i + 1], scale, generator)
            total = special.logsumexp(logs)
            weights = np.exp(logs - total)
            if 1.0 / np.sum(weights**2) < num / 2.0:
                chosen = _resampled(weights, num, generator)
                rows[: i + 1, : i + 1] = rows[: i + 1, : i + 1, chosen]
                scale = scale[chosen]
                logs = np.full(num, total - math.log(num))
        beyond = np.einsum("ijn,ijn->n", rows, rows) / self._most_trace - 1.0
        logs -= (_STEEP * np.maximum(beyond, 0.0)) ** 2 / 2.0
        evidence = float(special.logsumexp(logs))
        return _Particles(evidence, rows, np.exp(logs - evidence))

    def _draw_row(
        self, rows: np.ndarray, scale: np.ndarray, generator: np.random.Generator
    ) -> np.ndarray:
        """Fills in the last row of the particles, and returns by how much log weights grow.

        Args:
          rows: Shape [i + 1, d, P].
          scale: The root of a, shape [P].
          generator: The source of random numbers.
        """
        *earlier, row = rows
        i, num = len(earlier), len(scale)
        root, released = self._root[i], self._released[i]
        gain = scale * root[i]
        # What the rows of B before this one contribute.
        if i:
            mixed = linalg.solve_triangular(self._root[:i, :i], root[:i], lower=True, trans=1)
            row[:i] = np.tensordot(mixed, rows[:i, :i], 1)
        # Half of the particles look at either case.
        is_unlike = generator.uniform(size=num) < 0.5
        logs = np.log(np.where(is_unlike, 2.0 * _UNLIKE, 2.0 * (1.0 - _UNLIKE)))
        for j, other in enumerate(earlier):
            residual = released[j] - np.einsum("kn,kn->n", row[: j + 1], other[: j + 1])
            share = _SHIFTED if j == self._intercept else min(_SHIFTED, _CORRELATED / i)
            shares = np.where(is_unlike, share, 0.0)
            entry, fit = self._draw_entry(residual, gain * other[j], shares, generator)
            row[j] += gain * entry
            logs += fit
        residual = released[i] - np.einsum("kn,kn->n", row[:i], row[:i])
        shares = np.where(is_unlike, _SCALED, 0.0)
        entry, fit = self._draw_scale(residual, gain, shares, generator)
        row[i] = gain * entry
        return logs + fit

    def _draw_entry(
        self,
        residual: np.ndarray,
        slope: np.ndarray,
        share: np.ndarray,
        generator: np.random.Generator,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns draws of entries given `residual = slope entry + noise`, and log predictives.

        Args:
          residual: What the release leaves for the entries, shape [P].
          slope: Shape [P].
          share: The slab's prior probability, shape [P].
          generator: The source of random numbers.
        """
        noise = self._noise**2 / 2.0
        prior = np.array([[self._spike**2], [_SHIFT_SD**2]])
        total = slope**2 * prior + noise
        fits = np.stack([1.0 - share, share]) * np.sqrt(noise / total)
        # Not below a tiny number, of which the logarithm is finite.
        fits = np.log(fits + np.finfo(float).tiny) - residual**2 / (2.0 * total)
        fit: np.ndarray = np.logaddexp(*fits)
        is_slab = generator.uniform(size=len(fit)) < np.exp(fits[1] - fit)
        own, total = (np.where(is_slab, part[1], part[0]) for part in (prior, total))
        mean, sd = slope * own / total * residual, np.sqrt(own * noise / total)
        return mean + sd * generator.normal(size=len(fit)), fit

    def _draw_scale(
        self,
        residual: np.ndarray,
        gain: np.ndarray,
        share: np.ndarray,
        generator: np.random.Generator,
    ) -> tuple[np.ndarray, np.ndarray]:
        """The same for entries on the diagonal, given `residual = (gain entry)^2 + noise`."""
        num = len(gain)
        residual, noise = residual / gain**2, self._noise / gain**2
        # A square that is alike is normal, with the variance of the square of a normal entry.
        variance = 2.0 * self._spike**2
        total = variance + noise**2
        spike = -((residual - 1.0) ** 2) / (2.0 * total) - np.log(total / noise**2) / 2.0
        mean, sd = variance / total * (residual - 1.0), np.sqrt(variance / total) * noise
        alike = np.sqrt(np.maximum(1.0 + mean + sd * generator.normal(size=num), _LEAST_SQUARE))
        # A square that is unlike is drawn from what was released, and weighted by the prior.
        centre = np.maximum(residual, -_FARTHEST * noise)
        below = special.ndtr(-centre / noise)
        place = below + (1.0 - below) * generator.uniform(size=num)
        square = np.maximum(centre + noise * special.ndtri(place), _LEAST_SQUARE)
        slab = (
            ((square - centre) ** 2 - (square - residual) ** 2) / (2.0 * noise**2)
            - np.log(square) ** 2 / (8.0 * _SCALE_SD**2)
            + np.log((1.0 - below) * noise / (2.0 * _SCALE_SD * square))
        )
        tiny = np.finfo(float).tiny
        spike += np.log(np.maximum(1.0 - share, tiny))
        slab += np.log(np.maximum(share, tiny))
        fit = np.logaddexp(spike, slab)
        is_unlike = generator.uniform(size=num) < np.exp(slab - fit)
        return np.where(is_unlike, np.sqrt(square), alike), fit


def _resampled(weights: np.ndarray, num: int, generator: np.random.Generator) -> np.ndarray:
    """Returns the numbers of particles, each as often as its weight says, by systematic draws."""
    places = (np.arange(num) + generator.uniform()) / num
    chosen: np.ndarray = np.searchsorted(np.cumsum(weights), places)
    return np.minimum(chosen, len(weights) - 1)
