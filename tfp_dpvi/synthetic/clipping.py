"""Clipped gradient sums of table mixtures, with per-record norms in closed form.

With r_k the probability of component k given the record, its gradient in the weights' logits is r - pi, and in the
parameters of component k it is r_k times the sum over columns of the gradient of a log-probability in one column, which
depends only on k and the level there. Columns have separate parameters, so squared norms add up: a table of squared norms
for each component and level gives every record's norm by one matrix product, and the sum of the clipped gradients takes
another.
"""

from __future__ import annotations

from tfp_dpvi._tf import tf
from tfp_dpvi.gradients import Clip, ClippedSum, PerExample, product_epsilon
from tfp_dpvi.synthetic.mixture import Params, Segments, TableMixture, log_table_of


def table_clipped_sum(
    segments: Segments, params: Params, codes: tf.Tensor, mask: tf.Tensor, clip: Clip
) -> tuple[ClippedSum, PerExample]:
    """Returns the sum over coded records of the clipped gradients of `-log p(record | params)` in `params`.

    Equals `tfp_dpvi.gradients.clipped_sum` for `make_likelihood`'s mixtures.

    Params are structured as a draw from `make_prior`; codes are int32 [P, columns], -1 for missing; the mask [P] is False for
    padding. The sum's tensors are in the order of `tf.nest.flatten(params)`; the records' statistics are *not private*.

    #### Formal guarantee

    A record contributes a vector of joint l2 norm at most C, and exactly zero if it is masked or if its loss or norm is
    not finite. Norms are rounded up by a bound on the rounding of matrix products. A contribution depends on no other
    record. Hence A = C and D = 2C. Norm and contribution use the same parameters (contract C5).
    """
    dtype = params["weights"].dtype
    # The small table, which pulls back the sum over records, is float64; records keep their dtype.
    params = tf.nest.map_structure(lambda part: tf.cast(part, tf.float64), params)
    flat = tf.nest.flatten(params)
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(flat)
        log_weights = tf.nn.log_softmax(params["weights"])
        log_table = log_table_of(segments, params)
    squares = tf.cast(_squared_norms(segments, log_table), dtype)
    narrow, prior = tf.cast(log_table, dtype), tf.cast(log_weights, dtype)
    chosen = TableMixture(prior, narrow, segments).components_distribution.chosen(codes)
    log_joint = tf.matmul(chosen, narrow, transpose_b=True) + prior
    log_prob = tf.reduce_logsumexp(log_joint, axis=1)
    shares = tf.exp(log_joint - log_prob[:, tf.newaxis])  # r, [P, K]
    by_table = tf.reduce_sum(tf.square(shares) * tf.matmul(chosen, squares, transpose_b=True), axis=1)
    norms = tf.reduce_sum(tf.square(shares - tf.exp(prior)), axis=1) + by_table
    terms = len(segments.sizes) + log_weights.shape[0] + 4
    norms += terms * product_epsilon(norms.dtype) * (norms + tf.reduce_sum(tf.square(shares), axis=1))
    keep = mask & tf.math.is_finite(log_prob) & tf.math.is_finite(norms)
    # Selected, never multiplied by zero (contract C8).
    (factors,) = clip.factors([tf.where(keep, norms, tf.ones_like(norms))])
    weighted = tf.where(keep[:, tf.newaxis], shares, tf.zeros_like(shares)) * factors[:, tf.newaxis]
    by_level = tf.cast(tf.matmul(weighted, chosen, transpose_a=True), tf.float64)
    by_component = tf.cast(tf.reduce_sum(weighted, axis=0), tf.float64)
    sums = tape.gradient([log_weights, log_table], flat, output_gradients=[-by_component, -by_level])
    sums = [tf.cast(part, dtype) for part in sums]
    none_kept = ~tf.reduce_any(keep)  # The parameters themselves may then be NaN.
    sums = [tf.where(none_kept, tf.zeros_like(part), part) for part in sums]
    return ClippedSum(sums, clip), PerExample.of(-log_prob, [factors], keep)


def _squared_norms(segments: Segments, log_table: tf.Tensor) -> tf.Tensor:
    """Returns the squared norm of the gradient of each level's log-probability, |e_l - p|^2: [K, levels]."""
    parts = []
    for log_shares in tf.split(log_table, segments.sizes, axis=-1):
        shares = tf.exp(log_shares)
        # As a sum of squares: (1 - p_l)^2 and those of the other levels.
        others = tf.reduce_sum(tf.square(shares), axis=-1, keepdims=True) - tf.square(shares)
        parts.append(tf.square(1.0 - shares) + tf.maximum(others, 0.0))
    return tf.concat(parts, axis=-1)
