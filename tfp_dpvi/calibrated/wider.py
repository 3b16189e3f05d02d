"""Scores under a wider clip: whether the estimates depend on how much of them was clipped.

If the model is right, centred scores have mean zero at the true parameters under every clip, so
that two clips give the same estimates but for chance (Hausman, Specification tests in econometrics,
1978). Under a wrong one the narrow clip answers for the bulk of the records, the wide one for the
tails too, as a fit without privacy does.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from scipy import linalg, stats

from tfp_dpvi.calibrated.centred import WIDER, BlockSums
from tfp_dpvi.gradients.clip import Clip
from tfp_dpvi.privacy import Sensitivity

# With fewer records for each parameter the noise hides every shift that intervals do not.
_LEAST_RECORDS_EACH = 200
# By which share the wide clip's slope may differ from what public inputs say.
_SLOPE_ERROR = 0.2
# Standard deviations from which a parameter has a part in what all of them show together.
_HAS_PART = 2.0


def is_worth(size: int, num_records: int) -> bool:
    """Returns whether a wider clip is released.

    Args:
      size: The number d of parameters that the likelihood reads.
      num_records: The public number N of records.
    """
    return num_records >= _LEAST_RECORDS_EACH * size


class WiderClip(BlockSums):
    """The sum of centred scores under the wider clip, by blocks of steps.

    Args:
      size: The number d of parameters; the sum has shape [d].
      clip: The clip C.

    #### Formal guarantee

    A record's term has norm at most `WIDER C`; two such terms differ by at most twice as much.
    """

    name = "wider"
    noise_ratio = 2.25

    def __init__(self, size: int, clip: Clip) -> None:
        self.shape = (size,)
        most = WIDER * clip.unit
        self.sensitivity = Sensitivity(most, 2.0 * most)


@dataclasses.dataclass(frozen=True)
class SimulatedWider:
    """Means over records at public inputs, whose outcomes follow the model.

    Attributes:
      slope: The trace of the slope of the expected score under the wide clip.
      square: The expected squared norm of a score under the wide clip.
      product: The expected product of a record's scores under both clips.
    """

    slope: float
    square: float
    product: float


@dataclasses.dataclass(frozen=True)
class ReleasedShift:
    """The released scores under both clips, in whitened coordinates.

    Attributes:
      away: The mean sum of wide scores, less that of narrow ones times `ratio`, shape [d].
      ratio: The slope of wide scores over that of narrow ones.
      noise: The standard deviation of the noise on a coordinate of `away`.
      sampling: The variance of a record's term in `away` over the capped matrix.
    """

    away: np.ndarray
    ratio: float
    noise: float
    sampling: float

    def of_parameters(
        self, slope: np.ndarray, matrix: np.ndarray, covariance: np.ndarray, whitening: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns by how much parameters would move under the wide clip, and the error.

        Args:
          slope: The slope A of the narrow clip's sum, shape [d, d].
          matrix: The sum of the capped matrix, shape [d, d].
          covariance: The posterior's covariance in whitened coordinates, shape [d, d].
          whitening: W, shape [d, d].

        Returns:
          The moves, shape [d], and their covariance if the model is right, shape [d, d].
        """
        back = whitening.T @ linalg.inv(self.ratio * slope)
        variance = self.noise**2 * np.eye(len(slope)) + self.sampling * matrix
        # Of the distance of the steps from the truth, as far as the slopes' ratio is wrong.
        rest = _SLOPE_ERROR**2 * whitening.T @ covariance @ whitening
        return back @ self.away, back @ variance @ back.T + rest


def z_scores(moves: np.ndarray, covariance: np.ndarray) -> np.ndarray:
    """Returns a z score of each move, whose chance by Bonferroni's bound is the least of two tests.

    One test is of the move alone, the other of all moves together, which sees what is spread over
    several. Each probability is counted twice, since either test may fail.

    Args:
      moves: As of `ReleasedShift.of_parameters`, shape [d].
      covariance: Their covariance if the model is right, shape [d, d].

    Returns:
      Shape [d].
    """
    size = len(moves)
    own = np.abs(moves) / np.sqrt(np.diag(covariance))
    alone = 2.0 * size * stats.norm.sf(own)
    together = stats.chi2.sf(moves @ linalg.solve(covariance, moves, assume_a="pos"), size)
    least = np.where(own > _HAS_PART, np.minimum(alone, together), alone)
    # The least that is not 0 keeps scores finite.
    return np.asarray(stats.norm.isf(np.clip(2.0 * least, 1e-300, 1.0) / (2.0 * size)))
