"""The third order of the likelihood of a released score, which a normal distribution lacks.

A score S is a sum over records, and noise. Its log density at other parameters is about
`K(t) - t S` (Daniels 1954), with K the logarithm of its moment generating function there, and t
what makes S its mean. With K to second order and at fixed variances that is the normal likelihood
of the posterior. Where few records inform a parameter, as one of a group's, the next order moves
the posterior: steep groups have less information, and would weigh too little.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tfp_dpvi.calibrated.mixture import Mixture, kernels
from tfp_dpvi.calibrated.moved import MovedScores

# Draws of the posterior; numbers of draws times those of outcomes, which bound the time.
_NUM_DRAWS = 4096
_MOST_NUMBERS = 2**26
_NUM_KERNELS = 1024
# With less the third order moves no mean by more than a seventh of a standard deviation.
_LEAST_SQUARE = 0.1
# Standard deviation of the slope's draws over the slope.
_MOST_HIDDEN = 0.3
# Of a logarithm of a draw's weight.
_MOST_LOG = 3.0


class LinearScore(NamedTuple):
    """A released score in whitened coordinates, for each of K draws of the curvature.

    Attributes:
      place: The parameters at which scores were taken, shape [d].
      score: The released sum, shape [d].
      slopes: The slopes of its expectation, shape [K, d, d].
      covariances: Its covariances, that of the noise included, shape [K, d, d].
      num: The number of records, times the mean of their weights over that at public inputs.
    """

    place: np.ndarray
    score: np.ndarray
    slopes: np.ndarray
    covariances: np.ndarray
    num: float

    def has_third_order(self, covariance: np.ndarray) -> bool:
        """Returns whether the third order is large enough to matter, and known.

        Its square is about that of the number of parameters that data determine, with their
        noise, over the number of records. Where noise hides the slope, it says nothing of how the
        slope changes.

        Args:
          covariance: The posterior's, in whitened coordinates, shape [d, d].
        """
        slope = self.slopes.mean(axis=0)
        determined = np.trace(covariance @ slope)
        each = np.diagonal(self.slopes, axis1=1, axis2=2).std(axis=0) / np.diag(slope)
        is_large = determined**2 > _LEAST_SQUARE * self.num
        return bool(is_large and np.mean(each) < _MOST_HIDDEN)

    def tilts(self, away: np.ndarray) -> np.ndarray:
        """Returns the derivative of the log density in the score, with the opposite sign.

        Args:
          away: Distances of parameters from the place, shape [m, d].

        Returns:
          Array of shape [m, d].
        """
        roots = np.linalg.cholesky(self.covariances)
        inverses = np.linalg.inv(roots)
        logs = -np.log(np.diagonal(roots, axis1=1, axis2=2)).sum(axis=1)[:, None]
        residuals = (
            (self.score - away @ slope.T) @ inverse.T
            for slope, inverse in zip(self.slopes, inverses, strict=True)
        )
        logs = logs - np.stack([np.sum(part**2, axis=1) for part in residuals]) / 2.0
        chances = np.exp(logs - logs.max(axis=0))
        chances /= chances.sum(axis=0)
        total = np.zeros_like(away)
        for chance, slope, inverse in zip(chances, self.slopes, inverses, strict=True):
            residual = (self.score - away @ slope.T) @ inverse.T
            total += chance[:, None] * (residual @ inverse)
        return total


def third_order(
    scores: MovedScores, linear: LinearScore, whitening: np.ndarray, draws: np.ndarray
) -> np.ndarray:
    """Returns what the log likelihood of draws has beyond the normal one, to third order.

    A change of the signs of both arguments of `K(theta, t)` leaves the second order as it is, and
    changes the third one's sign: half of the difference is the third order, once a linear term,
    which is zero but for the simulation's error, is taken out. To this order the covariance at
    other parameters matters in the density's normalisation too, by a linear term.

    Args:
      scores: The scores at public inputs, at the released score's place.
      linear: The released score.
      whitening: W, shape [d, d].
      draws: Parameters in whitened coordinates, shape [m, d].

    Returns:
      Array of shape [m].
    """
    away = draws - linear.place
    tilts = linear.tilts(away)
    psi = scores.psi
    # How much of the covariance a record has.
    parts = np.sum(psi * np.linalg.solve(linear.covariances.mean(axis=0), psi.T).T, axis=1)
    up, down = (
        scores.tilted((linear.place + sign * away) @ whitening, sign * tilts)
        for sign in (1.0, -1.0)
    )
    odd = (up - down) / 2.0 - tilts @ (scores.weights @ psi)
    normalised = away @ scores.derivative(parts) + tilts @ ((scores.weights * parts) @ psi)
    found: np.ndarray = linear.num * (odd - normalised / 2.0)
    return found


def bent(
    mixture: Mixture,
    index: np.ndarray,
    scores: MovedScores,
    linear: LinearScore,
    whitening: np.ndarray,
    generator: np.random.Generator,
) -> Mixture:
    """Returns the posterior with the likelihood's third order, by weights of its draws.

    Args:
      mixture: The posterior of the normal likelihood.
      index: The coordinates that the likelihood reads, shape [d].
      scores: The scores at public inputs.
      linear: The released score.
      whitening: W, shape [d, d].
      generator: The source of random numbers.
    """
    scores.start(whitening.T @ linear.place, whitening)
    num = min(_NUM_DRAWS, max(_NUM_KERNELS, _MOST_NUMBERS // len(scores.psi)))
    draws = mixture.sample(num, generator)
    logs = third_order(scores, linear, whitening, draws[:, index] @ np.linalg.inv(whitening))
    # Far out a third order says little; that of most draws is much below this.
    logs = _MOST_LOG * np.tanh((logs - np.median(logs)) / _MOST_LOG)
    total = np.cumsum(np.exp(logs))
    # Systematic resampling.
    places = (np.arange(_NUM_KERNELS) + generator.uniform()) / _NUM_KERNELS
    picks = np.minimum(np.searchsorted(total / total[-1], places), num - 1)
    return kernels(draws[picks])
