"""The calibrated posterior as an equal-weight mixture of normals on the real line."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy import linalg

from tfp_dpvi.bayes.coordinates import LogDensity
from tfp_dpvi.calibrated.hmc import hamiltonian
from tfp_dpvi.calibrated.window import Window

DensityOfChains = Callable[[int], LogDensity]
"""Returns the density of n chains, each with its own draw of the curvature."""

Straightened = Callable[[np.ndarray], tuple[np.ndarray, Callable[[np.ndarray], np.ndarray]]]
"""Maps coordinates to points in which scores are linear, with the map of gradients back."""

# Numbers of chains: of each draw of the curvature if there are 32, and for a nonlinear score.
_CHAINS_OF_EACH = 4
_CHAINS = 32
_KEPT = 8
# Steps of chains and how many of their states are kept, in each stage; and for costly maps.
_STAGES = ((60, 4), (60, 4), (100, _KEPT))
_FEW_STAGES = ((30, 4), (50, _KEPT))
# Standard deviation of a kernel over that of all draws.
_BANDWIDTH = 0.25
# Distances of the kernels' means over those of the draws.
_SHRUNK = math.sqrt(1.0 - _BANDWIDTH**2)
# Of a numerical derivative, in posterior standard deviations.
_STEP = 1e-2
# Of records or of epsilon.
_MOST_FACTOR = 1e4
_NUM_FACTORS = 41


@dataclasses.dataclass(frozen=True)
class Mixture:
    """An equal-weight mixture of K normals.

    Attributes:
      locs: Means, shape [K, d].
      scales: Lower triangular factors of the covariances, shape [K, d, d] or [1, d, d].
    """

    locs: np.ndarray
    scales: np.ndarray

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
        """Returns draws, shape [num, d].

        Args:
          num: The number of draws.
          generator: The source of random numbers.
          wider: A factor on their distances to the mean.
        """
        draws = self.draws_of(generator.integers(len(self.locs), size=num), generator)
        return self.mean + wider * (draws - self.mean)

    def unsmoothed(self, num: int, generator: np.random.Generator) -> np.ndarray:
        """Returns draws without the kernels of chains, which widen the middle of heavy tails.

        Args:
          num: The number of draws if there are no chains.
          generator: The source of random numbers.

        Returns:
          The states of the chains, or `num` draws: shape [n, d].
        """
        if len(self.scales) == 1 < len(self.locs):
            return self.mean + (self.locs - self.mean) / _SHRUNK
        return self.sample(num, generator)

    def draws_of(self, picks: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        """Returns a draw from each of several components.

        Args:
          picks: Numbers of components, shape [n].
          generator: The source of random numbers.

        Returns:
          Draws of shape [n, d].
        """
        normals = generator.normal(size=(len(picks), self.locs.shape[1]))
        if len(self.scales) == 1:
            return self.locs[picks] + normals @ self.scales[0].T
        draws = self.locs[picks]
        for pick in np.unique(picks):
            draws[picks == pick] += normals[picks == pick] @ self.scales[pick].T
        return draws


@dataclasses.dataclass(frozen=True)
class LinearLikelihood:
    """The Gaussian likelihood of the parameters given released values, if the score is linear.

    There is one for each of K draws of the curvature.

    Attributes:
      index: The coordinates that it reads, shape [m].
      precisions: Shape [K, m, m].
      linear: Precisions times means, shape [K, m].
    """

    index: np.ndarray
    precisions: np.ndarray
    linear: np.ndarray

    @classmethod
    def from_window(
        cls, window: Window, slopes: np.ndarray, matrices: np.ndarray, index: np.ndarray
    ) -> LinearLikelihood:
        """Returns N(score; A (theta - theta_bar), B + R) as a function of theta.

        Args:
          window: The released averages.
          slopes: Draws of A, shape [K, m, m].
          matrices: Draws of M, shape [K, m, m].
          index: The coordinates that the likelihood reads, shape [m].
        """
        # S^-1 A
        solved = np.linalg.solve(window.score_covariance(matrices), slopes)
        precisions = np.swapaxes(slopes, 1, 2) @ solved
        linear = np.einsum("kij,ki->kj", solved, window.score + slopes @ window.theta)
        return cls(index, (precisions + np.swapaxes(precisions, 1, 2)) / 2.0, linear)


def gaussian_prior(
    log_prior: LogDensity, draws: np.ndarray
) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns precision and precision times mean of a prior that is normal on the real line.

    Args:
      log_prior: The prior's log density and its gradient.
      draws: The prior's draws, shape [n, D], which set scales and points for the check.

    Returns:
      Arrays of shape [D, D] and [D]; None if the prior is not normal.
    """
    part = normal_part(log_prior, draws)
    return (part.precision, part.linear) if part.is_normal.all() else None


class NormalPart(NamedTuple):
    """The coordinates whose prior is normal and that no other coordinates change.

    Attributes:
      is_normal: Which these are, bool [D].
      precision: Their precision, shape [D, D], of which other entries mean nothing.
      linear: The precision times their mean, shape [D].
    """

    is_normal: np.ndarray
    precision: np.ndarray
    linear: np.ndarray


def normal_part(log_prior: LogDensity, draws: np.ndarray) -> NormalPart:
    """Returns which coordinates of a prior are normal, and their precision.

    Args:
      log_prior: See `gaussian_prior`.
      draws: See `gaussian_prior`.
    """
    centre, unit = draws.mean(axis=0), draws.std(axis=0)
    size = len(centre)
    far = 3.0 * np.random.default_rng(0).normal(size=(4, size))
    points = np.concatenate([np.zeros((1, size)), np.eye(size), far])
    gradients = log_prior(centre + points * unit)[1] * unit
    precision = -(gradients[1 : size + 1] - gradients[0])
    with np.errstate(invalid="ignore"):
        away = np.abs(gradients[0] - points @ precision - gradients).max(axis=0)
    is_normal = away <= 1e-3 * (1.0 + np.abs(precision).max(axis=0))
    precision = (precision + precision.T) / (2.0 * np.outer(unit, unit))
    return NormalPart(is_normal, precision, gradients[0] / unit + precision @ centre)


def exact_mixture(
    likelihood: LinearLikelihood, precision: np.ndarray, linear: np.ndarray
) -> Mixture:
    """Returns the posterior under a normal prior.

    Args:
      likelihood: The likelihood, for each draw of the curvature.
      precision: The prior's precision, shape [D, D].
      linear: The prior's precision times its mean, shape [D].
    """
    num, size = len(likelihood.precisions), len(linear)
    index = likelihood.index
    total = np.broadcast_to(precision, (num, size, size)).copy()
    total[:, index[:, None], index] += likelihood.precisions
    shifted = np.broadcast_to(linear, (num, size)).copy()
    shifted[:, index] += likelihood.linear
    covariances = np.linalg.inv(total)
    locs = np.einsum("kij,kj->ki", covariances, shifted)
    return Mixture(locs, np.linalg.cholesky((covariances + np.swapaxes(covariances, 1, 2)) / 2.0))


def sampled_mixture(
    likelihood: LinearLikelihood,
    log_prior: LogDensity,
    start: np.ndarray,
    generator: np.random.Generator,
    straight: Straightened | None = None,
    *,
    is_costly: bool = False,
) -> Mixture:
    """Returns the posterior under any prior: kernels at HMC draws.

    There are equally many for each draw of the curvature.

    Args:
      likelihood: The likelihood, for each draw of the curvature.
      log_prior: The prior's log density and its gradient.
      start: Points of which some are the chains' starts, shape [n, D].
      generator: The source of random numbers.
      straight: Where the likelihood is linear, if that is not in its coordinates.
      is_costly: Whether that takes long: then there are fewer chains and steps.
    """
    num = len(likelihood.precisions)
    num_chains = (2 if is_costly else _CHAINS_OF_EACH) * _CHAINS
    chains = np.tile(np.arange(num), max(1, num_chains // num))
    precisions, linear = likelihood.precisions[chains], likelihood.linear[chains]
    index = likelihood.index

    def log_density(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        value, gradient = log_prior(x)
        read = x[:, index]
        pull_back: Callable[[np.ndarray], np.ndarray] = np.asarray
        if straight is not None:
            read, pull_back = straight(read)
        pulled = np.einsum("nij,nj->ni", precisions, read)
        gradient = gradient.copy()
        gradient[:, index] += pull_back(linear - pulled)
        return value + np.sum(read * (linear - pulled / 2.0), axis=1), gradient

    x = start[generator.integers(len(start), size=len(chains))]
    root = _root_of(start)
    precision = np.sum(np.square(linalg.inv(root)), axis=0)
    precision[index] += np.mean(np.diagonal(likelihood.precisions, axis1=1, axis2=2), axis=0)
    # A root of the covariance.
    root = np.diag(1.0 / np.sqrt(precision))
    kept = x[None]
    for num_steps, keep in _FEW_STAGES if is_costly else _STAGES:
        kept = _whitened_chains(
            log_density, kept[-1], root, generator, num_steps=num_steps, num_leapfrogs=6, keep=keep
        )
        draws = kept.reshape(-1, kept.shape[-1])
        root = _root_of(draws)
    return _kernels(draws)


def refined_mixture(
    linear: Mixture, density_of: DensityOfChains, generator: np.random.Generator
) -> Mixture:
    """Returns the posterior for a nonlinear score: kernels at HMC draws.

    Args:
      linear: The posterior for a linear score, where the chains start.
      density_of: Returns the posterior's log density for a number of chains.
      generator: The source of random numbers.
    """
    start = linear.draws_of(np.arange(_CHAINS) % len(linear.locs), generator)
    root = linalg.cholesky(linear.covariance, lower=True)
    kept = _whitened_chains(
        density_of(_CHAINS), start, root, generator, num_steps=32, num_leapfrogs=3, keep=2 * _KEPT
    )
    return _kernels(kept.reshape(-1, kept.shape[-1]))


def variance_shares(
    slope: np.ndarray,
    data: np.ndarray,
    noise: np.ndarray,
    mixture: Mixture,
    index: np.ndarray,
    log_prior: LogDensity,
) -> np.ndarray:
    """Returns the variance shares of privacy noise, data and prior for each coordinate.

    With V the posterior's covariance at the mean curvature, S = B + R and L0 the prior's precision,
    `V = V A S^-1 R S^-1 A V + V A S^-1 B S^-1 A V + V L0 V`. The mixture's excess over V is due to
    noise on the curvature, and counts as noise.

    Args:
      slope: The mean curvature A, shape [d, d].
      data: B, the score's variance without noise, shape [d, d].
      noise: R, that of the noise, shape [d, d].
      mixture: The posterior.
      index: The coordinates that the likelihood reads, shape [d].
      log_prior: The prior's log density and its gradient.

    Returns:
      Array of shape [D, 3], whose rows sum to 1.
    """
    weights = np.linalg.solve(data + noise, slope)
    prior = _prior_precision(mixture, log_prior)
    precision = prior.copy()
    precision[np.ix_(index, index)] += slope.T @ weights
    covariance = np.linalg.inv(precision)
    reach = covariance[:, index] @ weights.T
    parts = [
        np.diag(reach @ noise @ reach.T),
        np.diag(reach @ data @ reach.T),
        # A prior need not be log-concave.
        np.maximum(np.diag(covariance @ prior @ covariance), 0.0),
    ]
    total = np.maximum(np.diag(mixture.covariance), np.sum(parts, axis=0))
    parts[0] = total - parts[1] - parts[2]
    return np.stack(parts, axis=1) / total[:, None]


def halving_factors(
    slope: np.ndarray,
    data: np.ndarray,
    noise: np.ndarray,
    mixture: Mixture,
    index: np.ndarray,
    log_prior: LogDensity,
) -> np.ndarray:
    """Returns how many times as many records, or as much epsilon, would halve each interval.

    The curvature and the data's variance grow with the number of records, and the noise falls with
    epsilon, each in proportion.

    Args:
      slope: As in `variance_shares`.
      data: As in `variance_shares`.
      noise: As in `variance_shares`.
      mixture: The posterior.
      index: The coordinates that the likelihood reads, shape [d].
      log_prior: The prior's log density and its gradient.

    Returns:
      Array of shape [D, 2]: factors of N and of epsilon, infinite where none of them would do it.
    """
    prior = _prior_precision(mixture, log_prior)
    logs = np.linspace(0.0, math.log(_MOST_FACTOR), _NUM_FACTORS)

    def log_sds(records: float, epsilon: float) -> np.ndarray:
        spread = records * data + noise / epsilon**2
        precision = prior.copy()
        precision[np.ix_(index, index)] += records**2 * slope.T @ np.linalg.solve(spread, slope)
        variances = np.diag(np.linalg.inv(precision))
        deviations: np.ndarray = np.log(np.maximum(variances, np.finfo(float).tiny)) / 2.0
        return deviations

    def halved(path: list[np.ndarray]) -> np.ndarray:
        """Returns the factor with half of the first standard deviation, which fall on the path."""
        falls = np.maximum.accumulate(path[0] - np.array(path))
        found = [np.interp(math.log(2.0), fall, logs, right=math.inf) for fall in falls.T]
        return np.exp(found)

    factors = np.exp(logs)
    by_records = halved([log_sds(factor, 1.0) for factor in factors])
    by_epsilon = halved([log_sds(1.0, factor) for factor in factors])
    return np.stack([by_records, by_epsilon], axis=1)


def _prior_precision(mixture: Mixture, log_prior: LogDensity) -> np.ndarray:
    """Returns the negative Hessian of the prior at the posterior's mean, by differences."""
    size = len(mixture.mean)
    away = _STEP * np.sqrt(np.diag(mixture.covariance))
    points = mixture.mean + np.concatenate([np.diag(away), -np.diag(away)])
    gradients = log_prior(points)[1]
    prior = -(gradients[:size] - gradients[size:]) / (2.0 * away[:, None])
    symmetric: np.ndarray = (prior + prior.T) / 2.0
    return symmetric


def _whitened_chains(
    log_density: LogDensity,
    start: np.ndarray,
    root: np.ndarray,
    generator: np.random.Generator,
    **settings: int,
) -> np.ndarray:
    """Runs `hamiltonian`, whitened by a Cholesky factor of the covariance, with its settings."""

    def whitened(z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        value, gradient = log_density(z @ root.T)
        return value, gradient @ root

    z = linalg.solve_triangular(root, start.T, lower=True).T
    return hamiltonian(whitened, z, generator, **settings) @ root.T


def _root_of(draws: np.ndarray) -> np.ndarray:
    """Returns a Cholesky factor of the draws' covariance, with a ridge on their correlations."""
    sds = np.maximum(draws.std(axis=0), np.finfo(float).tiny)
    correlations = np.cov((draws / sds).T).reshape(len(sds), -1)
    root: np.ndarray = linalg.cholesky(correlations + 1e-9 * np.eye(len(sds)), lower=True)
    return sds[:, None] * root


def _kernels(draws: np.ndarray) -> Mixture:
    """Returns narrow normals at draws [n, D] that keep mean and covariance (Liu and West 2001)."""
    mean = draws.mean(axis=0)
    return Mixture(mean + _SHRUNK * (draws - mean), _BANDWIDTH * _root_of(draws)[None])
