"""The decomposition of a calibrated posterior's variance."""

from __future__ import annotations

import numpy as np

from tfp_dpvi.posterior.mixture import LogDensity, Mixture
from tfp_dpvi.posterior.window import Window

_STEP = 1e-2


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

    Args:
      window: averages of released values.
      slopes: draws of A.
      matrices: draws of M.
      mixture: the posterior.
      index: the coordinates that the likelihood reads.
      log_prior: log density on the real line.
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
        np.diag(covariance @ prior @ covariance),
    ]
    parts[2] = np.maximum(parts[2], 0.0)  # A prior need not be log-concave.
    total = np.maximum(np.diag(mixture.covariance), np.sum(parts, axis=0))
    parts[0] = total - parts[1] - parts[2]
    return np.stack(parts, axis=1) / total[:, None]
