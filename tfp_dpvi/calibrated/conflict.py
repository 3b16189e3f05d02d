"""Priors that contradict the records, and by how much they move the estimates."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy import linalg

from tfp_dpvi.calibrated.mixture import LinearLikelihood, NormalPart

# Of the prior's information: a direction with less in the likelihood says nothing of the prior.
_LEAST_INFORMATION = 1e-6


def pulls(likelihood: LinearLikelihood, prior: NormalPart) -> tuple[np.ndarray, np.ndarray]:
    """Returns by how much a normal prior moves each coordinate from where the likelihood has it.

    If the prior is right, the likelihood's estimate differs from the prior's mean by the variance
    of both: the prior predictive check of Evans and Moshonov (Checking for prior-data conflict,
    2006). That holds in each direction alone in which prior and likelihood are both diagonal.
    Coordinates whose prior is not normal, or depends on others, are free.

    Args:
      likelihood: That of the parameters.
      prior: What is normal of the prior.

    Returns:
      The move of each coordinate in posterior standard deviations, by the direction that moves it
      most among those that chance explains least, and the z score of that direction, both [D]. They
      are NaN where the prior is not normal.
    """
    found = np.full((2, len(prior.linear)), np.nan)
    normal = np.flatnonzero(prior.is_normal)
    used = np.flatnonzero(prior.is_normal[likelihood.index])
    if not len(used):
        return found[0], found[1]
    index = likelihood.index[used]
    covariance = np.linalg.inv(prior.precision[np.ix_(normal, normal)])
    places = np.searchsorted(normal, index)
    mean = (covariance @ prior.linear[normal])[places]
    precision = np.linalg.inv(covariance[np.ix_(places, places)])
    part = _without_others(likelihood, used, mean)
    # `v^T P v` is 1, and `v^T H v` is h.
    values, vectors = linalg.eigh(part.information, precision)
    values = np.maximum(values, 0.0)
    is_seen = values > _LEAST_INFORMATION
    values = np.where(is_seen, values, 1.0)
    away = np.where(is_seen, vectors.T @ part.score, 0.0)
    variance = values * (1.0 + values) + np.einsum("ik,ij,jk->k", vectors, part.spread, vectors)
    z = np.abs(away) / np.sqrt(variance)
    sds = np.sqrt(np.diag(np.linalg.inv(part.information + precision)))
    moves = np.abs(vectors * away / (values * (1.0 + values))) / sds[:, None]
    # Of directions that move a coordinate by more than its standard deviation, the clearest.
    order = np.where(moves > 1.0, 1.0 + z, moves / (1.0 + moves.max()))
    chosen = np.argmax(order, axis=1)
    found[0, index] = np.take_along_axis(moves, chosen[:, None], axis=1)[:, 0]
    found[1, index] = z[chosen]
    return found[0], found[1]


class _Part(NamedTuple):
    """The likelihood of some coordinates, whatever the others are.

    Attributes:
      information: The mean over draws of the curvature, shape [q, q].
      score: The mean score at the prior's mean, shape [q].
      spread: The score's covariance over draws, shape [q, q].
    """

    information: np.ndarray
    score: np.ndarray
    spread: np.ndarray


def _without_others(likelihood: LinearLikelihood, used: np.ndarray, mean: np.ndarray) -> _Part:
    """Returns the likelihood of some coordinates whatever the others are.

    Args:
      likelihood: That of all of them.
      used: Places in `likelihood.index`, shape [q].
      mean: The prior's mean of these, shape [q].
    """
    others = np.setdiff1d(np.arange(len(likelihood.index)), used)
    matrices, scores = [], []
    for precision, linear in zip(likelihood.precisions, likelihood.linear, strict=True):
        across = precision[np.ix_(used, others)]
        solved = across @ np.linalg.pinv(precision[np.ix_(others, others)], hermitian=True)
        matrices.append(precision[np.ix_(used, used)] - solved @ across.T)
        scores.append(linear[used] - solved @ linear[others] - matrices[-1] @ mean)
    matrix, away = np.mean(matrices, axis=0), np.array(scores) - np.mean(scores, axis=0)
    return _Part((matrix + matrix.T) / 2.0, np.mean(scores, axis=0), away.T @ away / len(away))
