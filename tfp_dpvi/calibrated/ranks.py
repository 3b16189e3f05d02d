"""Ranks of records' outcomes among their twins: whether the likelihood has the right shape.

If the model is right, the density of a record's outcome has a uniform rank among those of its
twins, for every distribution of x. Heavier tails put records first, and a sharper peak last. So has
an outcome that is a number, which skewed outcomes have not. What a fitted scale absorbs of the lack
of fit, ranks still show.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from scipy import special, stats

from tfp_dpvi._tf import tf, tfd
from tfp_dpvi.calibrated.centred import BlockSums
from tfp_dpvi.privacy import Sensitivity

# Squared noise multiplier over the gradient's.
_NOISE = 15.0
# What rounding may do, relatively.
_TIE = 1e-5


def num_orders(likelihood: tfd.Distribution) -> int:
    """Returns by how many orders outcomes are ranked: density and, of numbers, their own."""
    shape = likelihood.event_shape
    return 2 if isinstance(shape, tf.TensorShape) and shape.rank == 0 else 1


def centred_ranks(values: tf.Tensor, unit: float) -> tf.Tensor:
    """Returns 1 at the rank of each outcome and else 0, less the mean 1 / J, shape [n, J, J].

    Outcomes of equal values, but for rounding, share their ranks.

    Args:
      values: Values of J outcomes of each record, shape [n, J].
      unit: Values below it are rounded like it: 1 for log densities.
    """
    dtype, size = values.dtype, values.shape[1]
    own, other = values[:, :, None], values[:, None]
    near = _TIE * (unit + tf.abs(own))
    less = tf.reduce_sum(tf.cast(other < own - near, dtype), axis=2)
    ties = tf.reduce_sum(tf.cast(tf.abs(other - own) <= near, dtype), axis=2)
    first = less[..., None]
    rank = tf.range(size, dtype=dtype)
    shares = tf.cast((rank >= first) & (rank < first + ties[..., None]), dtype)
    # Without a tie with itself a density is NaN.
    return shares / tf.maximum(ties, 1.0)[..., None] - 1.0 / size


class OutcomeRanks(BlockSums):
    """The sum of `centred_ranks` of the records' own outcomes, by blocks of steps.

    Args:
      num_twins: The number K of twins.
      orders: The number of orders, see `num_orders`; the sum has shape [orders (K + 1)].

    #### Formal guarantee

    In each order a record's term has shares of sum 1 less their mean, hence norm at most
    `sqrt(K / (K + 1))`; two terms differ by at most sqrt(2).
    """

    name = "ranks"
    noise_ratio = math.sqrt(_NOISE)

    def __init__(self, num_twins: int, orders: int) -> None:
        self.shape = (orders * (num_twins + 1),)
        share = num_twins / (num_twins + 1.0)
        self.sensitivity = Sensitivity(math.sqrt(orders * share), math.sqrt(2.0 * orders))


@dataclasses.dataclass(frozen=True)
class ReleasedRanks:
    """The released sum of `OutcomeRanks`.

    Attributes:
      total: The mean sum over all N records, shape [orders (K + 1)].
      noise: The standard deviation of its noise.
      num_records: The number N of records.
      num_steps: The number of steps, each with twins of its own.
      slope: The derivative of a record's expectation in whitened coordinates, shape
        [orders (K + 1), d].
      orders: The number of orders.
    """

    total: np.ndarray
    noise: float
    num_records: int
    num_steps: int
    slope: np.ndarray
    orders: int

    def p_value(self, away: np.ndarray, covariance: np.ndarray) -> float:
        """Returns the probability of ranks that are no more uneven, if the model is right.

        Args:
          away: The posterior's mean less the mean of the steps, in whitened coordinates, shape [d].
          covariance: The posterior's covariance, shape [d, d].
        """
        rest = self.total - self.num_records * self.slope @ away
        parts = zip(np.split(rest, self.orders), np.split(self.slope, self.orders), strict=True)
        return min(1.0, self.orders * min(self._of_order(*part, covariance) for part in parts))

    def _of_order(self, rest: np.ndarray, slope: np.ndarray, covariance: np.ndarray) -> float:
        """Returns the probability for one order."""
        size = len(rest)
        slope = self.num_records * slope
        between = _variance_of_outcomes(size)
        within = np.eye(size) / size - 1.0 / size**2 - between
        variance = self.num_records * (between + within / self.num_steps)
        variance = variance + slope @ covariance @ slope.T + self.noise**2 * np.eye(size)
        # Shares add up to a constant, so that one direction is nothing but noise.
        basis = np.linalg.svd(np.ones([1, size]))[2][1:]
        rest, variance = basis @ rest, basis @ variance @ basis.T
        statistic = float(rest @ np.linalg.pinv(variance) @ rest)
        return float(stats.chi2.sf(statistic, size - 1))


def _variance_of_outcomes(size: int) -> np.ndarray:
    """Returns the covariance of an outcome's expected shares, over outcomes: [J, J].

    Given the probability u of a smaller density, a rank among K twins is binomial; u is uniform.
    """
    num = size - 1
    rank = np.arange(size)
    total = rank[:, None] + rank
    products = np.outer(special.comb(num, rank), special.comb(num, rank))
    covariance: np.ndarray = products * special.beta(total + 1, 2 * num - total + 1) - size**-2.0
    return covariance
