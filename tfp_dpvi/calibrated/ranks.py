"""Ranks of records' outcomes under the model: whether the likelihood has the right shape.

If the model is right, the probability of a smaller outcome is uniform for every distribution of x
(the probability integral transform). The `cdf` of a likelihood on the real line gives it exactly:
records are counted in bins, narrow ones in the tails, where a wrong shape is seen best.

Of others, ranks among twins are uniform. So is the rank of the outcome's density: heavier tails put
records first, and a sharper peak last. What a fitted scale absorbs of the lack of fit, ranks still
show.
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
_NOISE = 10.0
# What rounding may do, relatively.
_TIE = 1e-5


# Of the bins of a probability integral transform.
_EDGES = (0.0, 0.03, 0.15, 0.5, 0.85, 0.97, 1.0)


# Continuous on the real line, with a `cdf` of each record alone: another class, or a subclass, may
# have one that is neither.
_WITH_CDF = (
    tfd.Beta,
    tfd.Cauchy,
    tfd.Exponential,
    tfd.Gamma,
    tfd.Gumbel,
    tfd.HalfNormal,
    tfd.InverseGamma,
    tfd.Laplace,
    tfd.LogitNormal,
    tfd.LogNormal,
    tfd.Logistic,
    tfd.Normal,
    tfd.StudentT,
    tfd.TruncatedNormal,
    tfd.Weibull,
)


@dataclasses.dataclass(frozen=True)
class Ranking:
    """The bins in which outcomes are counted.

    Attributes:
      probabilities: For each order of outcomes the probability of each of its bins.
      is_exact: Whether a `cdf` gives the rank, and not twins.
    """

    probabilities: tuple[tuple[float, ...], ...]
    is_exact: bool

    @property
    def size(self) -> int:
        """The number of bins."""
        return sum(map(len, self.probabilities))

    @property
    def sensitivity(self) -> Sensitivity:
        """The sensitivity of a sum over records, see `OutcomeRanks`."""
        # In the farthest corner of the simplex lies the least probable bin.
        squares = [
            1.0 - 2.0 * min(each) + sum(part**2 for part in each) for each in self.probabilities
        ]
        return Sensitivity(math.sqrt(sum(squares)), math.sqrt(2.0 * len(squares)))


def ranking_of(likelihood: tfd.Distribution, num_twins: int) -> Ranking:
    """Returns how outcomes of a likelihood are ranked.

    Args:
      likelihood: The likelihood, traced or not.
      num_twins: The number K of twins of those whose `cdf` is not known to be usable.
    """
    if type(likelihood) in _WITH_CDF:
        return Ranking((tuple(np.diff(_EDGES).tolist()),), True)
    shape = likelihood.event_shape
    # By density and, of numbers, by value.
    orders = 2 if isinstance(shape, tf.TensorShape) and shape.rank == 0 else 1
    uniform = (num_twins + 1) * (1.0 / (num_twins + 1),)
    return Ranking(orders * (uniform,), False)


def centred_bins(distribution: tfd.Distribution, outcomes: tf.Tensor) -> tf.Tensor:
    """Returns 1 in the bin of each outcome's `cdf` and else 0, less the bin's probability.

    Args:
      distribution: The likelihood of n records.
      outcomes: J outcomes of each, shape [n, J].

    Returns:
      Shape [n, J, bins]; where the `cdf` is not a number some bin's.
    """
    place = tf.transpose(distribution.cdf(tf.transpose(outcomes)))
    inner = tf.constant(_EDGES[1:-1], place.dtype)
    number = tf.reduce_sum(tf.cast(~(place[..., None] < inner), tf.int32), axis=-1)
    probabilities = tf.constant(np.diff(_EDGES), place.dtype)
    return tf.one_hot(number, len(_EDGES) - 1, dtype=place.dtype) - probabilities


def centred_ranks(values: tf.Tensor, own: tf.Tensor, unit: float) -> tf.Tensor:
    """Returns 1 at the rank of outcomes and else 0, less the mean 1 / J, shape [n, m, J].

    Outcomes of equal values, but for rounding, share their ranks.

    Args:
      values: Values of J outcomes of each record, shape [n, J].
      own: Those of them whose ranks are wanted, shape [n, m].
      unit: Values below it are rounded like it: 1 for log densities.
    """
    dtype, size = values.dtype, values.shape[1]
    own, other = own[:, :, None], values[:, None]
    near = _TIE * (unit + tf.abs(own))
    less = tf.reduce_sum(tf.cast(other < own - near, dtype), axis=2)
    ties = tf.reduce_sum(tf.cast(tf.abs(other - own) <= near, dtype), axis=2)
    first = less[..., None]
    rank = tf.range(size, dtype=dtype)
    shares = tf.cast((rank >= first) & (rank < first + ties[..., None]), dtype)
    # Without a tie with itself a density is NaN.
    return shares / tf.maximum(ties, 1.0)[..., None] - 1.0 / size


class OutcomeRanks(BlockSums):
    """The sum of the records' `centred_bins` or `centred_ranks`, by blocks of steps.

    Args:
      ranking: The bins; the sum has as many entries.

    #### Formal guarantee

    In each order a record's term has shares of sum 1 less the bins' probabilities p, hence norm at
    most `sqrt(1 - 2 min(p) + |p|^2)`; two terms differ by at most sqrt(2).
    """

    name = "ranks"
    noise_ratio = math.sqrt(_NOISE)

    def __init__(self, ranking: Ranking) -> None:
        self.shape = (ranking.size,)
        self.sensitivity = ranking.sensitivity


@dataclasses.dataclass(frozen=True)
class ReleasedRanks:
    """The released sum of `OutcomeRanks`.

    Attributes:
      ranking: The bins.
      total: The mean sum over all N records, a number for each bin.
      noise: The standard deviation of its noise.
      num_records: The number N of records.
      slope: The derivative of a record's expectation in whitened coordinates, shape [bins, d].
      num_twins: How many times a record had twins of its own, on average.
      subsampling: See `ReleasedSums.subsampling`.
    """

    ranking: Ranking
    total: np.ndarray
    noise: float
    num_records: int
    slope: np.ndarray
    num_twins: float
    subsampling: float

    def p_value(self, away: np.ndarray, covariance: np.ndarray) -> float:
        """Returns the probability of ranks that are no more uneven, if the model is right.

        Args:
          away: The posterior's mean less the mean of the steps, in whitened coordinates, shape [d].
          covariance: The posterior's covariance, shape [d, d].
        """
        rest = self.total - self.num_records * self.slope @ away
        orders = self.ranking.probabilities
        ends = np.cumsum([len(each) for each in orders])[:-1]
        parts = zip(orders, np.split(rest, ends), np.split(self.slope, ends), strict=True)
        return min(1.0, len(orders) * min(self._of_order(*part, covariance) for part in parts))

    def _of_order(
        self, bins: tuple[float, ...], rest: np.ndarray, slope: np.ndarray, covariance: np.ndarray
    ) -> float:
        """Returns the probability for one order."""
        size = len(rest)
        slope = self.num_records * slope
        total = np.diag(bins) - np.outer(bins, bins)
        between = total if self.ranking.is_exact else _variance_of_outcomes(size)
        within = (total - between) / self.num_twins
        variance = self.num_records * (self.subsampling * between + within)
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
