"""Survey weights: how a record's weight enters its score, and what is released of weights.

A weighted score has the mean zero at the fit to the whole population, as Horvitz and Thompson's
sums have, whether or not the weights depend on outcomes; but only while it is not cut. So the clip
is so wide that it cuts at most 1 % of the weighted scores, and the share that it cuts is released.
If weights are all alike they say nothing of outcomes, and the clip is that without weights.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
from scipy import stats

from tfp_dpvi._tf import tf
from tfp_dpvi.calibrated.centred import MATRIX_NOISE, BlockSums, extra_of
from tfp_dpvi.calibrated.checks import MOST_CUT
from tfp_dpvi.calibrated.diagonal import MOST_DENSE, probes, squares_of
from tfp_dpvi.calibrated.diagonal import cap as cap_of_squares
from tfp_dpvi.gradients.base import PerExample
from tfp_dpvi.gradients.clip import Clip
from tfp_dpvi.gradients.vmap import sum_of_squares
from tfp_dpvi.privacy import Sensitivity
from tfp_dpvi.training import Mechanism

# Squared noise multiplier of the sums of weights over the gradient's.
_NOISE = 11.0
# The squared coefficient of variation up to which weights are alike. What differs may depend on
# outcomes, and is weighed against standard errors, which are small where records are many: of
# weights of 4.5 and 5.5 a clip that cuts a few scores moved an intercept by seven of them.
_ALIKE = 1e-6
# Standard deviations of the noise, from which a mean weight is known, and weights are surely alike.
_KNOWN = 4.0
_SURE = 2.0
_BISECTIONS = 40
# More would hardly be cut, and have more noise.
_SPREAD = 2.0
# Of the share that may be cut: private weights and scores may have heavier tails than public ones.
_PLANNED = 0.5
# Of a score over the clip. A larger bound would have more noise, and shows more of a share that is
# far too large anyway.
_MOST_EXCESS = 0.5
# By which factor weights are smaller under a wider clip, from which share cut on.
_SLIGHTLY = 2.0 / 3.0
_FAR_TOO_MUCH = 3.0
_BY_FAR = 0.5


class ScoreVariance(BlockSums):
    """The sum of `psi psi^T` over records, of clipped weighted scores, by blocks of steps.

    Weights enter the variance of the score by their squares, and its slope as they are. So the one
    is no multiple of the other, and both are released.

    Args:
      size: The number d of parameters; the sum has shape [d, d], or [d + P] for many.
      clip: The clip C.

    #### Formal guarantee

    A record's term has Frobenius norm at most C^2, and two such terms differ by at most sqrt(2) C^2
    (C^2 for d = 1); for many parameters as `CentredDiagonal`. In float32 a sum exceeds that by less
    than 1 % of C^2, as `clipped_sum` does.
    """

    name = "variance"
    noise_ratio = math.sqrt(MATRIX_NOISE)

    def __init__(self, size: int, clip: Clip) -> None:
        self._unit = clip.unit
        self._is_dense = size <= MOST_DENSE
        most = clip.unit**2
        self.shape = (size, size)
        if not self._is_dense:
            most *= cap_of_squares(size)
            self.shape = (size + len(probes(size)),)
        self.sensitivity = Sensitivity(most, most * (math.sqrt(2.0) if size > 1 else 1.0))

    def sum_of(self, per_example: PerExample) -> tf.Tensor:
        """See `JointRelease`."""
        psi = extra_of(per_example, self.name)
        if not self._is_dense:
            squares = squares_of(psi[:, None], self._unit)
            return tf.reduce_sum(tf.cast(squares, tf.float64), axis=0)
        # One float64 product more would take 15 % of a step of 20 parameters.
        return sum_of_squares(psi)


class WeightSums(BlockSums):
    """The sums of four numbers of each record, by blocks of steps.

    With w its weight over the largest one and L the norm of its weighted score over the clip, they
    are w, w^2, min(max(L - 1, 0) / 0.5, 1) and min(L, 1).

    #### Formal guarantee

    Each of a record's four numbers lies between 0 and 1, so that they have norm at most 2, and two
    records' numbers differ by at most 2.
    """

    name = "weights"
    shape = (4,)
    noise_ratio = math.sqrt(_NOISE)
    sensitivity = Sensitivity(2.0, 2.0)

    def sum_of(self, per_example: PerExample) -> tf.Tensor:
        """See `JointRelease`."""
        numbers = numbers_of(extra_of(per_example, "share"), extra_of(per_example, "length"))
        # One after another: records whose numbers lie side by side take longer to make and to sum.
        return tf.stack([tf.reduce_sum(tf.cast(number, tf.float64)) for number in numbers])


def numbers_of(share: tf.Tensor, length: tf.Tensor) -> list[tf.Tensor]:
    """Returns what `WeightSums` sums, four of shape [n].

    Args:
      share: Weights over the largest one, shape [n].
      length: The norms of weighted scores over the clip, shape [n].
    """
    cut = tf.clip_by_value((length - 1.0) / _MOST_EXCESS, 0.0, 1.0)
    # In float32 the squares of equal weights would differ from that of their mean.
    square = tf.square(tf.cast(share, tf.float64))
    return [share, square, cut, tf.minimum(length, 1.0)]


@dataclasses.dataclass(frozen=True)
class ReleasedWeights:
    """Released means of `WeightSums` over records.

    Attributes:
      mean: Of weights over the largest one.
      square: Of their squares.
      cut: Of what the clip cuts of weighted scores, over half of the clip.
      kept: Of what it keeps.
      noise: The standard deviation of the noise on each of these.
    """

    mean: float
    square: float
    cut: float
    kept: float
    noise: float

    @classmethod
    def of_blocks(
        cls, accumulated: dict[str, Any], mechanism: Mechanism, used: np.ndarray
    ) -> ReleasedWeights | None:
        """Returns the means over some blocks of steps; None without steps or weights.

        Args:
          accumulated: The accumulators of the releases, by name.
          mechanism: The mechanism that released them.
          used: The numbers of the blocks.
        """
        names = [release.name for release in mechanism.joint]
        count = float(np.asarray(accumulated["curvature"]["steps"])[used].sum())
        if "weights" not in names or not count:
            return None
        means = (np.asarray(accumulated["weights"])[used].sum(axis=0) / count).tolist()
        deviation = mechanism.deviations[1 + names.index("weights")]
        noise = deviation / (mechanism.expected_batch_size * math.sqrt(count))
        return cls(means[0], means[1], means[2], means[3], noise)

    @classmethod
    def unknown(cls) -> ReleasedWeights:
        """Returns what is known of weights before anything was released: nothing."""
        return cls(0.0, 0.0, 0.0, 0.0, noise=1.0)

    @property
    def is_known(self) -> bool:
        """True if the mean weight is more than noise."""
        return self.mean > _KNOWN * self.noise

    @property
    def variation(self) -> float:
        """The squared coefficient of variation of weights: Kish's design effect less 1."""
        return max(self.square / self.mean**2 - 1.0, 0.0) if self.is_known else math.nan

    @property
    def are_alike(self) -> bool:
        """True if all weights are surely the same, or nearly so."""
        if not self.is_known:
            return False
        # The square's error and the mean's, to first order.
        slope = 2.0 * self.square / self.mean
        error = self.noise / self.mean**2 * math.hypot(1.0, slope)
        return self.square / self.mean**2 - 1.0 + _SURE * error < _ALIKE

    @property
    def share_cut(self) -> tuple[float, float]:
        """The share of weighted scores that the clip cuts, and its standard deviation."""
        cut = _MOST_EXCESS * self.cut
        # A total below the noise is one of noise.
        total = max(cut + self.kept, self.noise, 1e-12)
        share = cut / total
        return share, self.noise * math.hypot(_MOST_EXCESS * (1.0 - share), share) / total


@dataclasses.dataclass(frozen=True, eq=False)
class WeightScale:
    """The factor on weights under the clip 1, and the weights of public inputs.

    Attributes:
      gain: The factor on weights over the largest one.
      shares: Weights of public inputs over the largest one, shape [n].
      are_alike: Whether the weights are taken to be the same for all records.
    """

    gain: float
    shares: np.ndarray
    are_alike: bool

    @classmethod
    def at_start(cls, num: int) -> WeightScale:
        """Returns that of weights which are all the largest one, for n public inputs."""
        return cls(1.0, np.ones(num), are_alike=True)

    @classmethod
    def of_released(cls, released: ReleasedWeights, lengths: np.ndarray) -> WeightScale:
        """Returns that under which the clip cuts at most `MOST_CUT` of the weighted scores.

        Which scores have the largest weights is not known: the longest ones are taken to have them.

        Args:
          released: What was released of weights.
          lengths: The norms of scores at public inputs, without weights, shape [n].
        """
        num = len(lengths)
        if released.are_alike:
            return cls(1.0 / released.mean, np.full(num, released.mean), are_alike=True)
        shares = np.ones(num)
        if released.is_known:
            # What is not known of their spread widens the clip.
            square = released.square + _SURE * released.noise
            shares = _beta_quantiles(released.mean, square, num)
        clip = _least_clip(shares * np.sort(lengths))
        return cls(1.0 / max(clip, 1e-6), _in_own_order(shares), are_alike=False)

    def with_shares_of(self, released: ReleasedWeights) -> WeightScale:
        """Returns the same factor, with weights of public inputs that are like those released.

        Args:
          released: What was released of weights under this factor.
        """
        if not released.is_known:
            return self
        shares = _beta_quantiles(released.mean, released.square, len(self.shares))
        return dataclasses.replace(self, shares=_in_own_order(shares))

    def after(self, released: ReleasedWeights) -> WeightScale:
        """Returns that of a wider clip, if the present one turns out to cut too much.

        Args:
          released: What was released under this clip.
        """
        share = released.share_cut[0]
        if self.are_alike or share <= MOST_CUT:
            return self
        narrower = _SLIGHTLY if share <= _FAR_TOO_MUCH * MOST_CUT else _BY_FAR
        return dataclasses.replace(self, gain=narrower * self.gain)

    @property
    def weights(self) -> np.ndarray:
        """The weights of public inputs under the clip 1, shape [n]."""
        return self.gain * self.shares

    @property
    def most(self) -> float:
        """See `RecordWeights`."""
        return 1.0 if self.are_alike else self.gain

    @property
    def spread(self) -> float:
        """See `RecordWeights`."""
        return 1.0 if self.are_alike else _SPREAD

    @property
    def ratio(self) -> float:
        """The mean of squared weights over that of weights."""
        return float(np.sum(self.weights**2) / np.sum(self.weights))


def _beta_quantiles(mean: float, square: float, num: int) -> np.ndarray:
    """Returns n increasing quantiles of the beta distribution with these moments."""
    mean = min(max(mean, 1e-4), 1.0 - 1e-4)
    most = mean * (1.0 - mean)
    variance = min(max(square - mean**2, 1e-4 * most), 0.98 * most)
    total = most / variance - 1.0
    places = (np.arange(num) + 0.5) / num
    quantiles: np.ndarray = stats.beta.ppf(places, mean * total, (1.0 - mean) * total)
    return np.clip(quantiles, 1e-6, 1.0)


def _in_own_order(shares: np.ndarray) -> np.ndarray:
    """Returns weights in an order of their own: public inputs say nothing of weights."""
    ordered: np.ndarray = shares[np.random.default_rng(0).permutation(len(shares))]
    return ordered


def _least_clip(lengths: np.ndarray) -> float:
    """Returns the least clip that cuts at most half of `MOST_CUT` of the sum of lengths."""
    lengths = lengths[np.isfinite(lengths)]
    low, high = 0.0, float(np.max(lengths, initial=1.0))
    allowed = _PLANNED * MOST_CUT * lengths.sum()
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2.0
        cut = np.sum(np.maximum(lengths - middle, 0.0))
        low, high = (middle, high) if cut > allowed else (low, middle)
    return high


def share_of(weight: tf.Tensor, most: float) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns weights over the largest one, at most 1, and whether a weight is one; shapes [n].

    Args:
      weight: Survey weights as passed, shape [n].
      most: The largest one that is allowed.
    """
    is_weight = tf.math.is_finite(weight) & (weight >= 0.0)
    share = tf.where(is_weight, weight, tf.zeros_like(weight)) / most
    return tf.minimum(share, 1.0), is_weight
