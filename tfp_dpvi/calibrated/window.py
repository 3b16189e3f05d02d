"""Averages of released values over the window, the last part of training, after convergence."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

BURN_IN = 0.3  # Fraction of a fit's steps before the window.

MOST_KAPPA = 2.5


@dataclasses.dataclass(frozen=True)
class ReleaseNoise:
    """The public numbers that describe the noise of a fit's released values."""

    num_records: int
    sampling_rate: float  # The expected batch size over N.
    clip: float  # C, or `math.inf`.
    gradient: float  # Standard deviation of the noise on a step's sum of clipped pairs,
    matrix: float  # on entries of the sum of their outer products over 2,
    scale: float  # and on the sum of `ClippedAway`.


@dataclasses.dataclass(frozen=True)
class Window:
    """Averages over n steps, of sums over all N records."""

    num_steps: int
    theta: np.ndarray  # Mean of the parameters' draws, shape [d].
    path: np.ndarray  # Their means in each block of the window, shape [b, d],
    jitter: np.ndarray  # and their standard deviations there.
    score: np.ndarray  # Mean of the sums of clipped pairs of scores, shape [d].
    matrix: np.ndarray  # Mean of their outer products over 2, symmetric, shape [d, d].
    scale: float  # Mean of the sums of `ClippedAway`.
    score_sd: float  # Standard deviation of the noise on a coordinate of `score`,
    matrix_sd: float  # on the diagonal of `matrix` (`matrix_sd / sqrt(2)` off it),
    scale_sd: float  # and on `scale`.
    simulation: float  # The variance of `score` without noise, over that of one full batch of observed records.
    half_difference: tuple[
        np.ndarray, np.ndarray
    ]  # Of the halves' mean scores, and of their mean parameters.
    half_variance: (
        float  # The variance of the former over that of `score`: 4 for halves of equal length.
    )
    most_trace: float  # Bound on the trace of `matrix`.

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


def window_of(
    blocks: dict[str, np.ndarray], scales: np.ndarray, noise: ReleaseNoise
) -> Window | None:
    """Returns the window's averages from sums over blocks of steps, or None if it has fewer than four steps.

    `blocks` is the accumulator of `gradients.Curvature`, `scales` that of `gradients.ClippedAway`.
    """
    steps = blocks["steps"]
    used = np.flatnonzero(np.cumsum(steps) > BURN_IN * steps.sum() + 1e-9)
    used = used[steps[used] > 0]
    count = steps[used].sum()
    if count < 4 or len(used) < 2:
        return None
    num, rate = noise.num_records, noise.sampling_rate

    def mean_of(sums: np.ndarray, which: np.ndarray) -> np.ndarray:
        return sums[which].sum(axis=0) / steps[which].sum()

    cut = int(np.searchsorted(np.cumsum(steps[used]), count / 2.0)) + 1
    first, second = used[: min(cut, len(used) - 1)], used[min(cut, len(used) - 1) :]
    differences = tuple(
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
        half_difference=(-num * differences[0], differences[1]),
        half_variance=float(count / steps[first].sum() + count / steps[second].sum()),
        most_trace=num * noise.clip**2 / 2.0,
    )
