"""The third order of the likelihood of a released score, which a normal distribution lacks.

A score S is a sum over records, and noise. Its log density at other parameters is about
`K(t) - t S` (Daniels 1954), with K the logarithm of its moment generating function there, and t
what makes S its mean. With K to second order and at fixed variances that is the normal likelihood
of the posterior. Where few records inform a parameter, as one of a group's, the next order moves
the posterior: steep groups have less information, and would weigh too little.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from tfp_dpvi.calibrated.checks import MOST_THIRD_ORDER
from tfp_dpvi.calibrated.mixture import Mixture
from tfp_dpvi.calibrated.moved import MovedScores

# Draws of the posterior; numbers of draws times those of outcomes, which bound the time.
_MOST_DRAWS, _LEAST_DRAWS = 4096, 512
_MOST_NUMBERS = 2**24
# With less the third order moves no mean by more than a seventh of a standard deviation.
_LEAST_SQUARE = 0.1
# Standard deviation of the slope's draws over the slope.
_MOST_HIDDEN = 0.3
# Of scores at public inputs, how much more or less they vary than the private ones.
_MOST_UNLIKE = 1.3
# Of a third order, in half widths of the middle two thirds: a cube has far tails.
_FAR = 20.0


class LinearScore(NamedTuple):
    """A released score in whitened coordinates, for each of K draws of the curvature.

    Attributes:
      place: The parameters at which scores were taken, shape [d].
      score: The released sum, shape [d].
      slopes: The slopes of its expectation, shape [K, d, d].
      covariances: Its covariances, that of the noise included, shape [K, d, d].
      square: What is known of the sum of the records' squared scores.
      num: The number of records, times the mean of their weights over that at public inputs.
    """

    place: np.ndarray
    score: np.ndarray
    slopes: np.ndarray
    covariances: np.ndarray
    square: float
    num: float

    def has_third_order(self, covariance: np.ndarray) -> bool:
        """Returns whether the third order is large enough to matter.

        Its square is about that of the number of parameters that data determine, with their
        noise, over the number of records.

        Args:
          covariance: The posterior's, in whitened coordinates, shape [d, d].
        """
        slope = self.slopes.mean(axis=0)
        # A slope over a square has no unit of weights.
        determined = np.trace(covariance @ slope) * np.trace(slope) / self.square
        return bool(determined**2 > _LEAST_SQUARE * self.num)

    @property
    def is_hidden(self) -> bool:
        """True if noise hides the slope, which then says nothing of how it changes."""
        spread = np.diagonal(self.slopes, axis1=1, axis2=2).std(axis=0).sum()
        hidden = spread / np.trace(self.slopes.mean(axis=0))
        return not 0.0 <= hidden < _MOST_HIDDEN

    def is_like(self, scores: MovedScores) -> bool:
        """Returns whether scores at public inputs vary like the private ones.

        Args:
          scores: The scores at public inputs, at the released score's place.
        """
        expected = self.num * float(scores.weights @ np.sum(scores.psi**2, axis=1))
        return bool(self.square / _MOST_UNLIKE < expected < self.square * _MOST_UNLIKE)

    def tilts(self, away: np.ndarray) -> np.ndarray:
        """Returns the derivative of the log density in the score, with the opposite sign.

        Draws of the curvature are equally likely given the score, and at parameters as they make
        these likely.

        Args:
          away: Distances of parameters from the place, shape [m, d].

        Returns:
          Array of shape [m, d].
        """
        inverses = np.linalg.inv(np.linalg.cholesky(self.covariances))
        residuals = [
            (self.score - away @ slope.T) @ inverse.T
            for slope, inverse in zip(self.slopes, inverses, strict=True)
        ]
        logs = np.linalg.slogdet(inverses @ self.slopes)[1][:, None]
        logs = logs - np.stack([np.sum(part**2, axis=1) for part in residuals]) / 2.0
        chances = np.exp(logs - logs.max(axis=0))
        chances /= chances.sum(axis=0)
        parts = zip(chances, residuals, inverses, strict=True)
        total: np.ndarray = sum(
            chance[:, None] * (part @ inverse) for chance, part, inverse in parts
        )
        return total


def third_order(
    scores: MovedScores, linear: LinearScore, whitening: np.ndarray, draws: np.ndarray
) -> np.ndarray:
    """Returns what the log likelihood of draws has beyond the normal one, to third order.

    A change of the signs of both arguments of `K(theta, t)` leaves the second order as it is, and
    changes the third one's sign: half of the difference is the third order, once a linear term,
    which is zero but for the simulation's error, is taken out. To this order the covariance at
    other parameters matters in the density's normalisation too, by a linear term of the leverages,
    the shares that single records have in the covariance.

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
    leverages = np.sum(psi * np.linalg.solve(linear.covariances.mean(axis=0), psi.T).T, axis=1)
    up, down = (
        scores.tilted((linear.place + sign * away) @ whitening, sign * tilts)
        for sign in (1.0, -1.0)
    )
    odd = (up - down) / 2.0 - tilts @ (scores.weights @ psi)
    density = away @ scores.derivative(leverages) + tilts @ ((scores.weights * leverages) @ psi)
    logs: np.ndarray = linear.num * (odd - density / 2.0)
    return logs


def bent(
    mixture: Mixture,
    index: np.ndarray,
    scores: MovedScores,
    linear: LinearScore,
    whitening: np.ndarray,
    generator: np.random.Generator,
) -> tuple[Mixture, float]:
    """Returns the posterior moved by the likelihood's third order, to first order in it.

    Its mean moves by the covariance of parameters and third order. Weights of draws would say the
    same of few parameters; of many groups, each of which moves a little, few draws would be left.

    Args:
      mixture: The posterior of the normal likelihood.
      index: The coordinates that the likelihood reads, shape [d].
      scores: The scores at public inputs.
      linear: The released score.
      whitening: W, shape [d, d].
      generator: The source of random numbers.

    Returns:
      The posterior, and by up to how many of its standard deviations that would move it, of which
      `MOST_THIRD_ORDER` are taken; as it was, and infinity, where scores at public inputs are
      unlike the private ones.
    """
    scores.start(whitening.T @ linear.place, whitening)
    if not linear.is_like(scores):
        return mixture, math.inf
    num = min(_MOST_DRAWS, max(_LEAST_DRAWS, _MOST_NUMBERS // scores.num_rows))
    draws = mixture.sample(num, generator)
    logs = third_order(scores, linear, whitening, draws[:, index] @ np.linalg.inv(whitening))
    if not np.isfinite(logs).all():
        return mixture, math.inf
    ends = np.quantile(logs, [1.0 / 6.0, 5.0 / 6.0])
    logs = np.clip(logs, *(ends.mean() + _FAR * (ends - ends.mean())))
    # So far the first order in it says the direction; farther, not how far.
    distance = float(logs.std())
    taken = MOST_THIRD_ORDER / max(distance, MOST_THIRD_ORDER)
    away = draws - draws.mean(axis=0)
    shift = away.T @ (logs - logs.mean()) / num
    return Mixture(mixture.locs + taken * shift, mixture.scales), distance
