"""DP-SGLD (Wang, Fienberg and Smola 2015, arXiv:1502.07645, algorithm 2) for a mixture of round normals, in NumPy.

In step t each record is drawn with probability q, and parameters on the real line move by

    (eta_t / 2) [grad log prior + (1 / q) sum of clipped grad log p(record)] + noise,

whose standard deviation is the larger of Langevin's, sqrt(eta_t), and what privacy needs, (eta_t / 2) z C / q. All iterates are
released; those of the last half are the sample of the posterior.
"""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Settings:
    """Of one run: rate of sampling, steps, clip, and eta_t = step_size (1 + t / steps)^-power."""

    sampling_rate: float = 1.0
    num_steps: int = 250
    l2_norm_clip: float = 1.0
    step_size: float = 1e-4
    power: float = 0.0


def unpack(vector, num_components, num_features):
    """Returns weights, means and variances of shape [..., K], [..., K, d], [..., K] from vectors of shape [..., K (d + 2)]."""
    logits, means, log_variances = np.split(
        vector, [num_components, num_components * (num_features + 1)], axis=-1
    )
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    shape = (*vector.shape[:-1], num_components, num_features)
    return (
        weights / weights.sum(axis=-1, keepdims=True),
        means.reshape(shape),
        np.exp(log_variances),
    )


def pack(weights, means, variances):
    """Returns the vector of parameters."""
    return np.concatenate([np.log(weights), np.ravel(means), np.log(variances)])


def log_densities(x, weights, means, variances):
    """Returns log weight + log density of each record in each component, shape [n, K]."""
    distances = np.sum((x[:, None] - means) ** 2, axis=-1)
    return (
        np.log(weights)
        - x.shape[1] / 2 * np.log(2 * np.pi * variances)
        - distances / (2 * variances)
    )


def record_gradients(vector, x, num_components):
    """Returns the gradient of each record's log density by the vector, shape [n, K (d + 2)]."""
    weights, means, variances = unpack(vector, num_components, x.shape[1])
    logs = log_densities(x, weights, means, variances)
    shares = np.exp(logs - logs.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    away = x[:, None] - means
    by_means = shares[..., None] * away / variances[:, None]
    by_log_variances = shares * (np.sum(away**2, axis=-1) / (2 * variances) - x.shape[1] / 2)
    return np.concatenate(
        [shares - weights, by_means.reshape(len(x), means.size), by_log_variances], axis=1
    )


def log_prior_gradient(vector, num_components, num_features):
    """Returns that of Dirichlet(1), Normal(0, I) means and InverseGamma(1, 1) variances, with the volume of the maps.

    Weights are a softmax of K numbers, of which one is too many: a standard normal on their mean takes it up.
    """
    weights, means, variances = unpack(vector, num_components, num_features)
    logits = vector[:num_components]
    return np.concatenate(
        [
            1 - num_components * weights - logits.mean() / num_components,
            -np.ravel(means),
            -1 + 1 / variances,
        ]
    )


def run(x, start, num_components, settings, noise_multiplier, generator):
    """Returns released iterates of the last half, shape [S, K (d + 2)]."""
    q, clip, vector, kept = (
        settings.sampling_rate,
        settings.l2_norm_clip,
        np.array(start, float),
        [],
    )
    for step in range(settings.num_steps):
        chosen = x if q >= 1.0 else x[generator.random(len(x)) < q]
        gradients = record_gradients(vector, chosen, num_components)
        norms = np.linalg.norm(gradients, axis=1, keepdims=True)
        total = np.sum(gradients * np.minimum(1.0, clip / np.maximum(norms, 1e-12)), axis=0) / q
        eta = settings.step_size * (1 + step / settings.num_steps) ** -settings.power
        spread = max(np.sqrt(eta), eta / 2 * noise_multiplier * clip / q)
        drift = log_prior_gradient(vector, num_components, x.shape[1]) + total
        vector = vector + eta / 2 * drift + spread * generator.normal(size=vector.shape)
        vector[-num_components:] = np.clip(
            vector[-num_components:], -5.0, 5.0
        )  # Variances that no sum can use.
        if 2 * step >= settings.num_steps:
            kept.append(vector)
    return np.array(kept)


def score(x, iterates, num_components, most=200):
    """Returns the mean log density of records under the mean density of at most so many iterates."""
    chosen = iterates[np.linspace(0, len(iterates) - 1, min(most, len(iterates))).astype(int)]
    logs = []
    for vector in chosen:
        parts = log_densities(x, *unpack(vector, num_components, x.shape[1]))
        logs.append(np.logaddexp.reduce(parts, axis=1))
    return float(np.mean(np.logaddexp.reduce(logs, axis=0) - np.log(len(logs))))
