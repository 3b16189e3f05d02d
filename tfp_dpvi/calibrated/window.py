"""Averages of released values over the window, the last part of training, after convergence."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from tfp_dpvi.training import Mechanism

# Fraction of a fit's steps before the window.
BURN_IN = 0.3

MOST_KAPPA = 2.5
_LEAST_STEPS = 4


@dataclasses.dataclass(frozen=True)
class ReleaseNoise:
    """The public numbers that describe the noise of a fit's released values.

    Attributes:
      num_records: The number N of records.
      sampling_rate: The expected batch size over N.
      clip: The clip C, or `math.inf`.
      gradient: Standard deviation of the noise on a step's sum of clipped pairs.
      matrix: Standard deviation of the noise on entries of the sum of their outer products over 2.
      scale: Standard deviation of the noise on the sum of `ClippedAway`.
    """

    num_records: int
    sampling_rate: float
    clip: float
    gradient: float
    matrix: float
    scale: float

    @classmethod
    def from_mechanism(cls, mechanism: Mechanism) -> ReleaseNoise:
        """Returns the noise of what a mechanism released, or will release."""
        deviations = mechanism.deviations
        return cls(
            num_records=mechanism.num_records,
            sampling_rate=mechanism.expected_batch_size / mechanism.num_records,
            clip=mechanism.gradient.clip.bound,
            gradient=deviations[0],
            matrix=deviations[1],
            scale=deviations[2],
        )


@dataclasses.dataclass(frozen=True)
class Window:
    """Averages over n steps, of sums over all N records.

    Attributes:
      num_steps: The number n of steps.
      theta: Mean of the parameters' draws, shape [d].
      path: Their means in each block of the window, shape [b, d].
      jitter: Their standard deviations there, shape [b, d].
      score: Mean of the sums of clipped pairs of scores, shape [d].
      matrix: Mean of the sums of their outer products over 2, symmetric, shape [d, d].
      scale: Mean of the sums of `ClippedAway`.
      score_sd: Standard deviation of the noise on a coordinate of `score`.
      matrix_sd: Standard deviation of the noise on the diagonal of `matrix`; off the diagonal it is
        `matrix_sd / sqrt(2)`.
      scale_sd: Standard deviation of the noise on `scale`.
      simulation: The variance of `score` without noise, over that of one full batch of observed
        records.
      half_difference: Differences of the halves' mean scores and of their mean parameters, of shape
        [d] each.
      half_variance: The variance of the former over that of `score`: 4 for halves of equal length.
      most_trace: Bound on the trace of `matrix`.
      sampling: The part of `simulation` that is independent between steps; the paired clip's is
        `simulation - 1`.
    """

    num_steps: int
    theta: np.ndarray
    path: np.ndarray
    jitter: np.ndarray
    score: np.ndarray
    matrix: np.ndarray
    scale: float
    score_sd: float
    matrix_sd: float
    scale_sd: float
    simulation: float
    half_difference: tuple[np.ndarray, np.ndarray]
    half_variance: float
    most_trace: float
    sampling: float = 0.0

    @property
    def kappa(self) -> float:
        """Returns the ratio of the curvature to the matrix, which corrects for the clip."""
        return float(np.clip(self.scale / max(np.trace(self.matrix), 1e-300), 1.0, MOST_KAPPA))

    @property
    def curvature_signal(self) -> float:
        """Returns the matrix's norm over that of its noise; inf without noise."""
        size = len(self.theta)
        noise = self.matrix_sd * math.sqrt(size * (size + 1) / 2.0)
        return float(np.linalg.norm(self.matrix)) / noise if noise else math.inf

    def score_covariance(self, matrices: np.ndarray) -> np.ndarray:
        """Returns S = B + R, the covariance of `score` given draws of M: shape [..., d, d]."""
        return self.simulation * matrices + self.score_sd**2 * np.eye(matrices.shape[-1])


def fit_window(accumulated: dict[str, Any], mechanism: Mechanism) -> Window | None:
    """Returns the averages over a fit's window, or None if it is too short.

    Args:
      accumulated: The fit's accumulators over released values, by name.
      mechanism: The mechanism that released them.
    """
    blocks = {name: part.numpy() for name, part in accumulated["curvature"].items()}
    scales = accumulated["clipped_away"].numpy()
    return average_window(blocks, scales, ReleaseNoise.from_mechanism(mechanism))


def average_window(
    blocks: dict[str, np.ndarray], scales: np.ndarray, noise: ReleaseNoise
) -> Window | None:
    """Returns the window's averages from sums over blocks of steps.

    Args:
      blocks: The accumulator of `Curvature`.
      scales: The accumulator of `ClippedAway`.
      noise: The noise on the released values.

    Returns:
      The window, or None if it has fewer than four steps or only one block.
    """
    steps = blocks["steps"]
    used = np.flatnonzero(np.cumsum(steps) > BURN_IN * steps.sum() + 1e-9)
    used = used[steps[used] > 0]
    count = steps[used].sum()
    if count < _LEAST_STEPS or len(used) < 2:
        return None
    num, rate = noise.num_records, noise.sampling_rate

    def mean_of(sums: np.ndarray, which: np.ndarray) -> np.ndarray:
        return sums[which].sum(axis=0) / steps[which].sum()

    cut = int(np.searchsorted(np.cumsum(steps[used]), count / 2.0)) + 1
    cut = min(cut, len(used) - 1)
    first, second = used[:cut], used[cut:]
    score_change, theta_change = (
        mean_of(blocks[name], first) - mean_of(blocks[name], second)
        for name in ("gradient", "theta")
    )
    path = blocks["theta"][used] / steps[used, None]
    squares = blocks["squares"][used] / steps[used, None]
    return Window(
        num_steps=int(count),
        theta=mean_of(blocks["theta"], used),
        path=path,
        jitter=np.sqrt(np.maximum(squares - path**2, 0.0)),
        score=-num * mean_of(blocks["gradient"], used),
        matrix=num * mean_of(blocks["matrix"], used),
        scale=float(num * mean_of(scales, used)),
        score_sd=noise.gradient / (rate * math.sqrt(count)),
        matrix_sd=noise.matrix / (rate * math.sqrt(count)),
        scale_sd=noise.scale / (rate * math.sqrt(count)),
        simulation=1.0 + (2.0 / rate - 1.0) / count,
        sampling=(2.0 / rate - 1.0) / count,
        half_difference=(-num * score_change, theta_change),
        half_variance=float(count / steps[first].sum() + count / steps[second].sum()),
        most_trace=num * noise.clip**2 / 2.0,
    )
