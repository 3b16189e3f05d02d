"""The divergence of a group's aggregated posterior, from samples.

The aggregated posterior is q(z) = sum_i w_i q(z | x_i) / sum_i w_i.
"""

from __future__ import annotations

import numpy as np

from tfp_dpvi._tf import tf, tfd
from tfp_dpvi.divergences.codes import check_distribution, points, row_weights, shares


def _log_mixture(log_probs: tf.Tensor, weights: tf.Tensor, present: tf.Tensor) -> tf.Tensor:
    """Returns log sum_j share_j exp(log_probs[:, j, ...]); rows of weight zero may be NaN."""
    weights = tf.reshape(weights, [-1, *[1] * (log_probs.shape.rank - 2)])
    chosen = weights > 0
    log_weights = tf.math.log(tf.where(chosen, weights, tf.ones_like(weights)))
    # The logarithm of an empty group's zero has a NaN gradient: use a finite value, dropped later.
    absent = tf.where(present, tf.constant(-np.inf, log_probs.dtype), tf.zeros([], log_probs.dtype))
    total = tf.reduce_sum(weights)
    log_total = tf.math.log(tf.where(present, total, tf.ones_like(total)))
    return (
        tf.reduce_logsumexp(tf.where(chosen, log_probs + log_weights, absent), axis=1) - log_total
    )


def kl_from_prior(
    prior: tfd.Distribution,
    prior_samples: tf.Tensor,
    posterior: tfd.Distribution,
    weights: tf.Tensor | None = None,
) -> tf.Tensor:
    """Estimates KL(p || q) of a prior p from the aggregated posterior q, by draws from the prior.

    It is `mean_j [log p(z_j) - log q(z_j)]`, the direction that Mathieu et al. (2019,
    "Disentangling disentanglement in variational autoencoders", arXiv:1812.02833) use with a
    clustered prior, and Takahashi et al. (2020, arXiv:2006.11204) with term-wise gradients. The
    estimate is unbiased for this group's q; a draw of it may be negative. Time and memory are O(n m
    d).

    Args:
      prior: A TFP distribution p with event shape [d].
      prior_samples: Float [m, d], draws z_j from the prior, at least one.
      posterior: A TFP distribution with batch shape [n] and event shape [d], q(z | x_i).
      weights: Float [n], not negative: w_i; None for equal weights. Rows of weight zero do not
        matter, even if NaN.

    Returns:
      A scalar of the samples' dtype; exactly 0, with zero gradient, if there is no weight.

    Raises:
      TypeError: An argument is no TFP distribution.
      ValueError: Shapes or dtypes do not match, or there is no sample from the prior.
    """
    prior_samples = points(prior_samples, "prior_samples")
    if prior_samples.shape[0] == 0:
        raise ValueError(
            f"prior_samples has shape {prior_samples.shape}: draw at least one sample from the "
            "prior."
        )
    dimensions = prior_samples.shape[1:]
    check_distribution(prior, "prior", tf.TensorShape([]), dimensions, prior_samples.dtype)
    check_distribution(
        posterior, "posterior", tf.TensorShape([None]), dimensions, prior_samples.dtype
    )
    rows = tf.ones(posterior.batch_shape_tensor(), prior_samples.dtype)
    weights = rows if weights is None else row_weights(weights, rows, "weights")
    # The points have shape [m, n, d], one copy for each posterior. They are selected, not
    # broadcast: a posterior of weight zero may have NaN parameters, and then the gradient of its
    # log-probability is NaN at its copy of a point.
    z = prior_samples[:, tf.newaxis, :]
    log_probs = posterior.log_prob(tf.where(weights[:, tf.newaxis] > 0, z, tf.zeros_like(z)))
    _, present = shares(weights)
    value = tf.reduce_mean(
        prior.log_prob(prior_samples) - _log_mixture(log_probs, weights, present)
    )
    return tf.where(present, value, tf.zeros_like(value))
