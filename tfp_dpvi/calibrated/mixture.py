"""The calibrated posterior as an equal-weight mixture of normals on the real line."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
from scipy import linalg, stats

from tfp_dpvi.bayes.coordinates import LogDensity
from tfp_dpvi.calibrated.curvature import hamiltonian
from tfp_dpvi.calibrated.parameters import ParameterChecks
from tfp_dpvi.calibrated.window import Window

DensityOfChains = Callable[[int], LogDensity]
"""Returns the density of n chains, each with its own draw of the curvature."""

_CHAINS_OF_EACH, _KEPT, _CHAINS = 4, 8, 32
MOST_MISMATCH = 0.4
_BANDWIDTH = 0.25  # Standard deviation of a kernel over that of all draws.
_SHRUNK = math.sqrt(1.0 - _BANDWIDTH**2)  # Distances of the kernels' means over those of the draws.
_STEP = 1e-2  # Of a numerical derivative, in posterior standard deviations.


@dataclasses.dataclass(frozen=True)
class Mixture:
    """An equal-weight mixture of normals."""

    locs: np.ndarray  # Means, shape [K, d].
    scales: np.ndarray  # Lower triangular factors of the covariances, shape [K, d, d] or [1, d, d].

    @property
    def mean(self) -> np.ndarray:
        """Shape [d]."""
        return self.locs.mean(axis=0)

    @property
    def covariance(self) -> np.ndarray:
        """Returns the covariance, shape [d, d]."""
        away = self.locs - self.mean
        within: np.ndarray = np.mean(self.scales @ np.swapaxes(self.scales, 1, 2), axis=0)
        return within + away.T @ away / len(away)

    def sample(self, num: int, generator: np.random.Generator, wider: float = 1.0) -> np.ndarray:
        """Returns draws, shape [num, d], with distances to the mean multiplied by `wider`."""
        draws = self.draws_of(generator.integers(len(self.locs), size=num), generator)
        return self.mean + wider * (draws - self.mean)

    def unsmoothed(self, num: int, generator: np.random.Generator) -> np.ndarray:
        """Returns draws, shape [n, d]: those of chains without their kernels, which widen a heavy tail's middle."""
        if len(self.scales) == 1 < len(self.locs):
            return self.mean + (self.locs - self.mean) / _SHRUNK
        return self.sample(num, generator)

    def draws_of(self, picks: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        """Returns a draw from each of these components, shape [n, d]."""
        scales = np.broadcast_to(self.scales, (len(self.locs), *self.scales.shape[1:]))[picks]
        normals = generator.normal(size=(len(picks), self.locs.shape[1]))
        return self.locs[picks] + np.einsum("nij,nj->ni", scales, normals)


@dataclasses.dataclass(frozen=True)
class Terms:
    """The linear Gaussian likelihood of the parameters given released values, for each draw of the curvature."""

    index: np.ndarray  # The coordinates that it reads, shape [m].
    precisions: np.ndarray  # Shape [K, m, m].
    linear: np.ndarray  # Precisions times means, shape [K, m].

    @classmethod
    def of(
        cls, window: Window, slopes: np.ndarray, matrices: np.ndarray, index: np.ndarray
    ) -> Terms:
        """Returns N(score; A (theta - theta_bar), B + R) as a function of theta, for each draw of A and M."""
        spread = window.simulation * matrices + window.score_sd**2 * np.eye(len(index))
        solved = np.linalg.solve(spread, slopes)  # S^-1 A
        precisions = np.swapaxes(slopes, 1, 2) @ solved
        linear = np.einsum("kij,ki->kj", solved, window.score + slopes @ window.theta)
        return cls(index, (precisions + np.swapaxes(precisions, 1, 2)) / 2.0, linear)


def gaussian_prior(
    log_prior: LogDensity, draws: np.ndarray
) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns precision and precision times mean of a prior that is normal on the real line, else None.

    Its draws, shape [n, D], set scales and points for the check.
    """
    centre, unit = draws.mean(axis=0), draws.std(axis=0)
    size = len(centre)
    tried = np.concatenate(
        [np.zeros((1, size)), np.eye(size), 3.0 * np.random.default_rng(0).normal(size=(4, size))]
    )
    gradients = log_prior(centre + tried * unit)[1] * unit
    precision = -(gradients[1 : size + 1] - gradients[0])
    away = gradients[0] - tried @ precision - gradients
    if not np.isfinite(gradients).all() or np.abs(away).max() > 1e-3 * (
        1.0 + np.abs(precision).max()
    ):
        return None
    precision = (precision + precision.T) / (2.0 * np.outer(unit, unit))
    return precision, gradients[0] / unit + precision @ centre


def exact_mixture(terms: Terms, precision: np.ndarray, linear: np.ndarray) -> Mixture:
    """Returns the posterior under a normal prior."""
    num, size = len(terms.precisions), len(linear)
    together = np.broadcast_to(precision, (num, size, size)).copy()
    together[:, terms.index[:, None], terms.index] += terms.precisions
    shifted = np.broadcast_to(linear, (num, size)).copy()
    shifted[:, terms.index] += terms.linear
    covariances = np.linalg.inv(together)
    locs = np.einsum("kij,kj->ki", covariances, shifted)
    return Mixture(locs, np.linalg.cholesky((covariances + np.swapaxes(covariances, 1, 2)) / 2.0))


def sampled_mixture(
    terms: Terms, log_prior: LogDensity, start: np.ndarray, generator: np.random.Generator
) -> Mixture:
    """Returns the posterior under any prior: kernels at HMC draws, equally many for each draw of the curvature.

    Chains start at some of `start`, shape [n, d].
    """
    chains = np.tile(
        np.arange(len(terms.precisions)), _CHAINS_OF_EACH * 32 // len(terms.precisions)
    )
    precisions, linear = terms.precisions[chains], terms.linear[chains]

    def log_density(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        value, gradient = log_prior(x)
        own = x[:, terms.index]
        pulled = np.einsum("nij,nj->ni", precisions, own)
        gradient = gradient.copy()
        gradient[:, terms.index] += linear - pulled
        return value + np.sum(own * (linear - pulled / 2.0), axis=1), gradient

    x = start[generator.integers(len(start), size=len(chains))]
    spread = np.cov(start.T).reshape(len(x[0]), -1)
    reached = np.diag(linalg.inv(spread + 1e-9 * np.eye(len(spread)))).copy()
    reached[terms.index] += np.mean(np.diagonal(terms.precisions, axis1=1, axis2=2), axis=0)
    root = np.diag(1.0 / np.sqrt(reached))  # A root of the covariance.
    kept = x[None]
    for num_steps, keep in ((60, 4), (60, 4), (100, _KEPT)):
        kept = _chains(
            log_density, kept[-1], root, generator, num_steps=num_steps, num_leapfrogs=6, keep=keep
        )
        draws = kept.reshape(-1, kept.shape[-1])
        root = _root_of(draws)
    return _kernels(draws)


def refined_mixture(
    linear: Mixture, density_of: DensityOfChains, generator: np.random.Generator
) -> Mixture:
    """Returns kernels at HMC draws for a nonlinear score; chains start from the posterior for a linear one."""
    start = linear.draws_of(np.arange(_CHAINS) % len(linear.locs), generator)
    root = linalg.cholesky(linear.covariance, lower=True)
    kept = _chains(
        density_of(_CHAINS), start, root, generator, num_steps=32, num_leapfrogs=3, keep=2 * _KEPT
    )
    return _kernels(kept.reshape(-1, kept.shape[-1]))


def _chains(
    log_density: LogDensity,
    start: np.ndarray,
    root: np.ndarray,
    generator: np.random.Generator,
    **settings: int,
) -> np.ndarray:
    """Runs HMC whitened by a Cholesky factor of the covariance; `settings` are arguments of `hamiltonian`."""

    def whitened(z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        value, gradient = log_density(z @ root.T)
        return value, gradient @ root

    z = linalg.solve_triangular(root, start.T, lower=True).T
    return hamiltonian(whitened, z, generator, **settings) @ root.T


def _root_of(draws: np.ndarray) -> np.ndarray:
    """Returns a Cholesky factor of the draws' covariance."""
    size = draws.shape[1]
    return linalg.cholesky(np.cov(draws.T).reshape(size, size) + 1e-10 * np.eye(size), lower=True)


def _kernels(draws: np.ndarray) -> Mixture:
    """Returns a mixture of narrow normals at draws, shrunk to keep mean and covariance (Liu and West 2001)."""
    mean = draws.mean(axis=0)
    return Mixture(mean + _SHRUNK * (draws - mean), _BANDWIDTH * _root_of(draws)[None])


@dataclasses.dataclass(frozen=True)
class Checks:
    """Diagnostics of the posterior's intervals, from released values; `bend` and `mismatch` are NaN without a pilot."""

    distance: float  # Of the window's mean parameters from the posterior's mean, in posterior sds over sqrt(d).
    halves: float  # p-value of the difference of the window's halves.
    kappa: float  # Ratio of the curvature to the variance of clipped pairs: 1 without a clip, and at most 2.5.
    curvature_signal: float  # The curvature's norm over that of its noise.
    bend: float = (
        math.nan
    )  # Shift of the posterior's mean by the nonlinear score, in units of `distance`.
    mismatch: float = (
        math.nan
    )  # Relative distance of the released curvature from that at the pilot's inputs.
    parameters: ParameterChecks | None = None  # None for models that were saved without them.

    @property
    def warnings(self) -> list[str]:
        """Returns a sentence for each check that failed."""
        found = []
        if (
            self.distance > 1.3 and not self.bend <= 1.0
        ):  # A pilot's small bend makes the distance harmless.
            found.append(
                f"training did not converge: its mean is {self.distance:.1f} posterior standard deviations off (limit 1.3); take "
                "more steps or a higher learning rate next time"
            )
        if self.halves < 0.001:
            found.append(
                f"the two halves of the window differ (p = {self.halves:.1g}): training did not converge"
            )
        if self.mismatch > MOST_MISMATCH:
            found.append(
                f"the released curvature is far from that at the pilot's inputs (mismatch {self.mismatch:.2g}): pass inputs to "
                "the pilot that resemble the private ones"
            )
        if self.kappa >= 2.4:
            found.append(
                f"the clip is too small (kappa {self.kappa:.2g}): raise l2_norm_clip next time"
            )
        if self.parameters is not None:
            found += self.parameters.warnings
        return found

    def to_array(self) -> np.ndarray:
        """Returns the diagnostics of the whole posterior, to save."""
        names = [field.name for field in dataclasses.fields(self) if field.name != "parameters"]
        return np.array([getattr(self, name) for name in names])


def check(
    window: Window,
    slopes: np.ndarray,
    matrices: np.ndarray,
    mixture: Mixture,
    index: np.ndarray,
    linear: Mixture | None = None,
    mismatch: float = math.nan,
) -> Checks:
    """Returns the checks of a fit from draws of A and M; `linear` is the posterior for a linear score, if another."""
    spread = mixture.covariance[np.ix_(index, index)]

    def distance_of(away: np.ndarray) -> float:
        return math.sqrt(away @ linalg.solve(spread, away, assume_a="pos") / len(away))

    away = window.theta - mixture.mean[index]
    bend = math.nan if linear is None else distance_of(linear.mean[index] - mixture.mean[index])
    score, theta = window.half_difference
    difference = score + slopes.mean(axis=0) @ theta
    variance = (window.simulation - 1.0) * matrices.mean(axis=0) + window.score_sd**2 * np.eye(
        len(away)
    )
    variance *= window.half_variance
    statistic = difference @ np.linalg.lstsq(variance, difference, rcond=None)[0]
    halves = float(stats.chi2.sf(statistic, len(away)))
    kappa = float(
        np.mean(np.trace(slopes, axis1=1, axis2=2) / np.trace(matrices, axis1=1, axis2=2))
    )
    return Checks(distance_of(away), halves, kappa, window.curvature_signal, bend, mismatch)


def variance_shares(
    window: Window,
    slopes: np.ndarray,
    matrices: np.ndarray,
    mixture: Mixture,
    index: np.ndarray,
    log_prior: LogDensity,
) -> np.ndarray:
    """Returns the variance shares of privacy noise, data and prior for each coordinate: shape [D, 3], rows sum to 1.

    With V the posterior's covariance at the mean curvature, S = B + R and L0 the prior's precision, `V = V A S^-1 R S^-1 A V
    + V A S^-1 B S^-1 A V + V L0 V`. The mixture's excess over V is due to noise on the curvature, and counts as noise.
    """
    size, slope = len(mixture.mean), slopes.mean(axis=0)
    data = window.simulation * matrices.mean(axis=0)
    noise = window.score_sd**2 * np.eye(len(index))
    weights = np.linalg.solve(data + noise, slope)
    away = _STEP * np.sqrt(np.diag(mixture.covariance))
    points = mixture.mean + np.concatenate([np.diag(away), -np.diag(away)])
    gradients = log_prior(points)[1]
    prior = -(gradients[:size] - gradients[size:]) / (2.0 * away[:, None])
    prior = (prior + prior.T) / 2.0
    precision = prior.copy()
    precision[np.ix_(index, index)] += slope.T @ weights
    covariance = np.linalg.inv(precision)
    reach = covariance[:, index] @ weights.T
    parts = [
        np.diag(reach @ noise @ reach.T),
        np.diag(reach @ data @ reach.T),
        np.maximum(
            np.diag(covariance @ prior @ covariance), 0.0
        ),  # A prior need not be log-concave.
    ]
    total = np.maximum(np.diag(mixture.covariance), np.sum(parts, axis=0))
    parts[0] = total - parts[1] - parts[2]
    return np.stack(parts, axis=1) / total[:, None]
