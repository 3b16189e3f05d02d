"""The centred clip: scores in whitened coordinates, clipped about a centre that the model implies.

With g(y) the score of a record and W a public matrix, `u(y) = W (g(y) - a)`, and the centre a of
each record solves `E clip(u(y)) = 0` over outcomes y of the model given the record's x. Then
`psi = clip(u)` has mean zero at the true parameters for every clip, every W and every distribution
of x (conditionally unbiased estimation of bounded influence: Kuensch, Stefanski and Carroll 1989).
For outcomes of few values the expectation is a sum. For others it is a mean over the record and K
twins, which at the true parameters are exchangeable with the record, so that psi is unbiased for
each K. After a few iterations the rest `r = E clip(u)` is subtracted, and the difference multiplied
by `C / (C + |r|)`: both keep the mean of zero and the bound C.

A record of survey weight w has `psi = clip_C(w u) = w clip_{C / w}(u)`, its twins the same weight.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from tfp_dpvi._tf import Structure, tf
from tfp_dpvi.calibrated.clip import NUM_BLOCKS, in_block, initial_blocks
from tfp_dpvi.gradients.base import PerExample
from tfp_dpvi.gradients.clip import Clip, tiny
from tfp_dpvi.gradients.joint import JointRelease, Released
from tfp_dpvi.gradients.vmap import sum_of_squares
from tfp_dpvi.privacy import Sensitivity

# Below, a weight's bound C / w would overflow where it is squared.
_LEAST_WEIGHT = 1e-6
# Fixed-point steps for the centre.
_ITERATIONS = 5
# The wider clip over the clip.
WIDER = 4.0
# Bound on psi . u, in squares of the clip.
_SCALE_CAP = 3.0
# Squared noise multipliers of the joint releases over the gradient's.
MATRIX_NOISE = 8.8
SCALAR_NOISE = 44.0


class RecordWeights(NamedTuple):
    """Survey weights of n records.

    Attributes:
      weight: Finite and not negative, shape [n].
      most: The largest that a weight counts for in squares of scores, a scalar: the largest that it
        can be, or 1 where weights are alike and about 1.
      spread: What rows' squares are divided by before they are cut to C^2, a scalar: where weights
        and inputs go together a cut would change the curvature's shape.
    """

    weight: tf.Tensor
    most: tf.Tensor
    spread: tf.Tensor


class CentredScores(NamedTuple):
    """The centred clip of n records, and what their model expects of it: exact, *not private*.

    Attributes:
      psi: The clipped scores of the records' outcomes, shape [n, d], each of norm at most C.
      rows: Rows for each record, shape [n, m, d]. Their outer products sum to the expected
        `w f u u^T`, whose trace is cut to C^2; f is the clip's factor, w the weight over
        `RecordWeights.spread`, 1 without.
      scale: The expected `min(w f |u|^2, 3 C^2)`, shape [n].
      square: `|psi|^2` of the records' outcomes, shape [n]; with weights of at most m
        `w min(|psi / w|^2, C^2 / m)`, which is linear in w unless psi is cut.
      expected: The expectation of the same, shape [n], at most C^2.
      slope: Two sets of rows for each record, whose products sum to the expected `psi u^T`.
      covariance: Rows for each record, shape [n, m, d], whose outer products sum to the expected
        `psi psi^T`.
      excess_slope: The derivative of `expected` in whitened coordinates, at which outcomes are
        drawn, shape [n, d].
      excess_variance: The variance of the same over outcomes, shape [n].
      wider: The scores of the records' outcomes under the clip `WIDER C`, shape [n, d].
      wider_slope: The trace of the slope of their expectation, shape [n].
      length: The norms of the records' weighted scores before the clip, shape [n].
    """

    psi: tf.Tensor
    rows: tf.Tensor
    scale: tf.Tensor
    square: tf.Tensor
    expected: tf.Tensor
    slope: tuple[tf.Tensor, tf.Tensor]
    covariance: tf.Tensor
    excess_slope: tf.Tensor
    excess_variance: tf.Tensor
    wider: tf.Tensor
    wider_slope: tf.Tensor
    length: tf.Tensor


def centre_two_outcomes(
    difference: tf.Tensor,
    probability: tf.Tensor,
    outcome: tf.Tensor,
    bound: float,
    weights: RecordWeights | None = None,
) -> CentredScores:
    """Returns the centred clip for outcomes 0 and 1, in closed form.

    With v the whitened difference of both scores and p the probability of 1, the whitened scores
    are `(y - p) v`, and `psi = (y - p) w v` with `w = min(1, C / (|v| max(p, 1 - p)))`.

    Args:
      difference: v, shape [n, d].
      probability: p, shape [n].
      outcome: y, 0 or 1, shape [n].
      bound: The clip C.
      weights: Survey weights of the records; None for ones.
    """
    weight = None if weights is None else weights.weight
    square = tf.reduce_sum(tf.square(difference), axis=1) + _least(difference)
    longest = tf.sqrt(square) * tf.maximum(probability, 1.0 - probability)
    own = _own_bound(bound, weight)
    factor, wide = (most / tf.maximum(longest, most) for most in (own, WIDER * own))
    variance = probability * (1.0 - probability)
    # Of psi over the whitened difference.
    weighted = _weighted(weight, factor)
    slope = variance * weighted
    spread = _over_spread(weights, slope)
    trace = spread * square
    kept = spread * _at_most(trace, bound**2)
    row = difference[:, None]
    # Squares of both outcomes over (y - p)^2, before weights.
    lengths = tf.square(factor) * square
    residual = outcome - probability
    both = [_counted(weights, lengths * tf.square(y - probability), bound) for y in (1.0, 0.0)]
    expected = probability * both[0] + (1.0 - probability) * both[1]
    away = both[0] - both[1]
    return CentredScores(
        psi=(residual * weighted)[:, None] * difference,
        rows=tf.sqrt(kept)[:, None, None] * row,
        scale=tf.minimum(trace, _SCALE_CAP * bound**2),
        square=_counted(weights, lengths * tf.square(residual), bound),
        expected=expected,
        slope=(slope[:, None, None] * row, row),
        covariance=(tf.sqrt(variance) * weighted)[:, None, None] * row,
        excess_slope=(variance * away)[:, None] * difference,
        excess_variance=variance * tf.square(away),
        wider=(residual * _weighted(weight, wide))[:, None] * difference,
        wider_slope=_weighted(weight, variance * wide * square),
        length=_weighted(weight, tf.abs(residual) * tf.sqrt(square)),
    )


def centre_outcomes(
    scores: tf.Tensor,
    weights: tf.Tensor,
    model_weights: tf.Tensor,
    observed: tf.Tensor,
    bound: float,
    iterations: int = _ITERATIONS,
    *,
    jacobian: tf.Tensor | None = None,
    survey: RecordWeights | None = None,
) -> CentredScores:
    """Returns the centred clip for J outcomes of each record.

    Args:
      scores: Whitened scores, shape [n, J, d]; with a Jacobian their factors, [n, J, p].
      weights: Weights of the outcomes for the centre, which sum to 1, shape [n, J]: probabilities
        of all outcomes; or 1 / J each for the record's outcome and J - 1 twins.
      model_weights: The same for what the model expects, shape [n, J]: for twins without the
        record's own outcome.
      observed: 1 at the record's outcome and else 0, shape [n, J].
      bound: The clip C.
      iterations: The number of fixed-point steps for the centre.
      jacobian: Whitened derivatives of a distribution's p parameters, shape [n, p, d]: whitened
        scores are the factors times these. None for the identity.
      survey: Survey weights of the records; None for ones.
    """
    weight = None if survey is None else survey.weight
    own_bound = _own_bound(bound, weight)
    # Records come last: sums over few outcomes or parameters are slow where these are.
    scores = tf.transpose(scores, [1, 2, 0])
    weights, model_weights = tf.transpose(weights), tf.transpose(model_weights)
    observed = tf.transpose(observed)
    gram = None if jacobian is None else _gram(jacobian)
    centre = _mean(weights, scores)
    for _ in range(iterations):
        factors = weights * _factor(_squares(scores - centre, gram), own_bound)
        centre = _mean(factors / tf.reduce_sum(factors, axis=0), scores)
    away = scores - centre
    square = _squares(away, gram)
    factor = _factor(square, own_bound)
    # Before the weight: at most C / w.
    psi = _of_mean_zero(weights, factor[:, None] * away, gram, own_bound)
    wide = _of_mean_zero(
        weights, _factor(square, WIDER * own_bound)[:, None] * away, gram, WIDER * own_bound
    )
    spread = _over_spread(survey, _weighted(weight, factor))
    trace = spread * square
    kept = model_weights * spread * _at_most(trace, bound**2)
    lengths = _counted(survey, _squares(psi, gram), bound)
    wide_products = _weighted(weight, _products(wide, away, gram))
    expected = tf.reduce_sum(model_weights * lengths, axis=0)
    beyond = lengths - expected
    own, own_wide = (tf.transpose(_mean(observed, rows)) for rows in (psi, wide))
    psi = _weighted(weight, psi)
    excess_slope = tf.transpose(_mean(model_weights * beyond, away))
    rows = tf.transpose(tf.sqrt(kept)[:, None] * away, [2, 0, 1])
    weighted = tf.transpose(model_weights[:, None] * psi, [2, 0, 1])
    away = tf.transpose(away, [2, 0, 1])
    slope = (weighted, away)
    covariance = tf.transpose(tf.sqrt(model_weights)[:, None] * psi, [2, 0, 1])
    if jacobian is not None:
        # In d dimensions once more, since the Gram matrix may have lost digits.
        own, own_wide = (
            _within(_times(part[:, None], jacobian)[:, 0], most)
            for part, most in ((own, own_bound), (own_wide, WIDER * own_bound))
        )
        rows = _times(_root(rows), jacobian)
        total = tf.reduce_sum(tf.square(rows), axis=[1, 2]) + rows.shape[1] * _least(rows)
        rows *= tf.sqrt(_at_most(total, bound**2))[:, None, None]
        slope = (jacobian, _times(_outer(weighted, away), jacobian))
        covariance = _times(_root(covariance), jacobian)
        excess_slope = _times(excess_slope[:, None], jacobian)[:, 0]
    own_square = _counted(survey, tf.reduce_sum(tf.square(own), axis=1), bound)
    if weight is not None:
        own, own_wide = (weight[:, None] * part for part in (own, own_wide))
    return CentredScores(
        psi=own,
        rows=rows,
        scale=tf.reduce_sum(model_weights * tf.minimum(trace, _SCALE_CAP * bound**2), axis=0),
        square=own_square,
        expected=tf.minimum(expected, bound**2),
        slope=slope,
        covariance=covariance,
        excess_slope=excess_slope,
        excess_variance=tf.reduce_sum(model_weights * tf.square(beyond), axis=0),
        wider=own_wide,
        wider_slope=tf.reduce_sum(model_weights * wide_products, axis=0),
        length=_weighted(weight, tf.sqrt(tf.reduce_sum(observed * square, axis=0))),
    )


def _own_bound(bound: float, weight: tf.Tensor | None) -> float | tf.Tensor:
    """Returns C / w, the bound on a record's score before its weight: shape [n], or C."""
    return bound if weight is None else bound / tf.maximum(weight, _LEAST_WEIGHT)


def _weighted(weight: tf.Tensor | None, value: tf.Tensor) -> tf.Tensor:
    """Returns values of records, which run over the last dimension, times their weights."""
    return value if weight is None else weight * value


def _over_spread(survey: RecordWeights | None, value: tf.Tensor) -> tf.Tensor:
    """Returns values over `RecordWeights.spread`."""
    return value if survey is None else value / survey.spread


def _counted(survey: RecordWeights | None, square: tf.Tensor, bound: float) -> tf.Tensor:
    """Returns the squares of clipped scores as `CentredScores.square` counts them."""
    if survey is None:
        return square
    weight = tf.minimum(survey.weight, survey.most)
    return weight * tf.minimum(square, bound**2 / survey.most)


def _of_mean_zero(
    weights: tf.Tensor, clipped: tf.Tensor, gram: tf.Tensor | None, bound: float | tf.Tensor
) -> tf.Tensor:
    """Returns clipped scores less their mean, no longer than the clip, shape [J, p, n]."""
    rest = _mean(weights, clipped)
    return bound / (bound + tf.sqrt(_squares(rest[None], gram)[0])) * (clipped - rest)


def _within(rows: tf.Tensor, bound: float | tf.Tensor) -> tf.Tensor:
    """Returns rows, shape [n, d], cut to the clip once more."""
    return rows * _factor(tf.reduce_sum(tf.square(rows), axis=1) + _least(rows), bound)[:, None]


def _gram(jacobian: tf.Tensor) -> tf.Tensor:
    """Returns the products of p rows of each record, [p, p, n] from [n, p, d]."""
    rows = tf.unstack(jacobian, axis=1)
    return tf.stack([[tf.reduce_sum(row * other, axis=1) for other in rows] for row in rows])


def _times(rows: tf.Tensor, jacobian: tf.Tensor) -> tf.Tensor:
    """Returns the products of matrices, [n, m, d] from [n, m, p] and [n, p, d].

    For small p that is faster than an operation on many small matrices.
    """
    parts = zip(tf.unstack(rows, axis=2), tf.unstack(jacobian, axis=1), strict=True)
    return tf.add_n([part[:, :, None] * row[:, None] for part, row in parts])


def _outer(left: tf.Tensor, right: tf.Tensor) -> tf.Tensor:
    """Returns the sums of products of rows, [n, p, p] from two of [n, J, p]."""
    return _times(tf.linalg.matrix_transpose(left), right)


def _root(rows: tf.Tensor) -> tf.Tensor:
    """Returns at most p rows with the outer products of J rows, [n, J, p].

    They are a Cholesky factor's, written out: its operation would be slow for small matrices.
    """
    num, size = rows.shape[1:]
    if size >= num:
        return rows
    columns = tf.unstack(tf.transpose(rows, [2, 1, 0]))
    factor: list[list[tf.Tensor]] = []
    for row in range(size):
        entries: list[tf.Tensor] = []
        for column in range(row):
            rest = tf.reduce_sum(columns[row] * columns[column], axis=0)
            for before in range(column):
                rest -= entries[before] * factor[column][before]
            diagonal = factor[column][column]
            safe = tf.where(diagonal > 0.0, diagonal, tf.ones_like(diagonal))
            entries.append(tf.where(diagonal > 0.0, rest / safe, tf.zeros_like(rest)))
        rest = tf.reduce_sum(tf.square(columns[row]), axis=0)
        for entry in entries:
            rest -= tf.square(entry)
        entries.append(tf.sqrt(tf.maximum(rest, 0.0)))
        factor.append([*entries, *[tf.zeros_like(rest)] * (size - row - 1)])
    return tf.stack([tf.stack(entries, axis=1) for entries in factor], axis=2)


def _squares(rows: tf.Tensor, gram: tf.Tensor | None = None) -> tf.Tensor:
    """Returns squared norms, never too small; with a metric of each record, [p, p, n].

    Args:
      rows: Shape [J, p, n].
      gram: The metric, or None for the identity.
    """
    products = _products(rows, rows, gram)
    if gram is not None:
        return tf.maximum(products, 0.0) + tiny(rows.dtype)
    return products + rows.shape[1] * tiny(rows.dtype)


def _products(rows: tf.Tensor, others: tf.Tensor, gram: tf.Tensor | None) -> tf.Tensor:
    """Returns inner products of rows, shape [J, n]; see `_squares`."""
    if gram is not None:
        rows = tf.add_n(
            [
                row[:, None] * part
                for row, part in zip(tf.unstack(rows, axis=1), tf.unstack(gram), strict=True)
            ]
        )
    return tf.reduce_sum(rows * others, axis=1)


def _least(rows: tf.Tensor) -> float:
    """Returns a bound on the squares of a row that were flushed to zero."""
    return rows.shape[-1] * tiny(rows.dtype)


def _factor(square: tf.Tensor, bound: float | tf.Tensor) -> tf.Tensor:
    """Returns min(1, C / norm)."""
    return bound / tf.maximum(tf.sqrt(square), bound)


def _at_most(value: tf.Tensor, most: float) -> tf.Tensor:
    """Returns the factor that cuts a value to a bound."""
    return most / tf.maximum(value, most)


def _mean(weights: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
    """Returns a weighted sum of rows, [p, n] from [J, n] and [J, p, n]."""
    return tf.reduce_sum(weights[:, None] * rows, axis=0)


def centred_releases(size: int, clip: Clip) -> tuple[JointRelease, ...]:
    """Returns the joint releases of a centred clip: curvature, what was clipped, lack of fit.

    Args:
      size: The number d of parameters that the likelihood reads.
      clip: The clip C.
    """
    return (CentredCurvature(size, clip), CentredScale(clip), LackOfFit(clip))


class CentredCurvature(JointRelease):
    """The sum of the expected, capped `f u u^T` over records; and released sums by blocks of steps.

    It is an expectation over the model's outcomes given x, so that it holds for every distribution
    of x and does not depend on a record's outcome but through its centre.

    Args:
      size: The number d of parameters; the sum has shape [d, d].
      clip: The clip C.

    #### Formal guarantee

    A record's term is positive semi-definite with trace at most C^2, hence of Frobenius norm at
    most C^2; two such terms differ by at most `sqrt(2) C^2`, or `C^2` for d = 1. With weights, in
    float32, a sum exceeds that by less than 1 % of C^2, as `clipped_sum` does.
    """

    name = "curvature"
    noise_ratio = math.sqrt(MATRIX_NOISE)

    def __init__(self, size: int, clip: Clip) -> None:
        self.shape = (size, size)
        square = clip.unit**2
        self.sensitivity = Sensitivity(square, square * (math.sqrt(2.0) if size > 1 else 1.0))
        self._size = size

    def sum_of(self, per_example: PerExample) -> tf.Tensor:
        """See `JointRelease`."""
        rows = tf.reshape(extra_of(per_example, "rows"), [-1, self._size])
        if "share" in (per_example.extra or {}):
            # `ScoreVariance` is a second product: both in blocks take as long as one in float64.
            return sum_of_squares(rows)
        # A long float32 sum can exceed the sensitivity by rounding.
        rows = tf.cast(rows, tf.float64)
        return tf.linalg.matmul(rows, rows, transpose_a=True)

    def initial(self) -> Structure:
        """Returns zero sums of shape `[NUM_BLOCKS, ...]`."""
        vector, matrix = [self._size], list(self.shape)
        return initial_blocks({"steps": [], "theta": vector, "gradient": vector, "matrix": matrix})

    def accumulate(self, total: Any, released: Released) -> Structure:
        """See `JointRelease`."""
        (gradient,) = released.gradient
        values = {
            "steps": tf.ones([], tf.float64),
            "theta": released.public,
            "gradient": gradient,
            "matrix": released.mean,
        }
        return {name: total[name] + in_block(released, value) for name, value in values.items()}


class BlockSums(JointRelease):
    """A sum of bounded scalars or vectors of records, accumulated by blocks of steps.

    A subclass states its sensitivity; the values are those of its name in `PerExample.extra`.
    """

    noise_ratio = math.sqrt(SCALAR_NOISE)

    def sum_of(self, per_example: PerExample) -> tf.Tensor:
        """See `JointRelease`."""
        return tf.reduce_sum(tf.cast(extra_of(per_example, self.name), tf.float64), axis=0)

    def initial(self) -> Structure:
        """Returns zero sums of shape `[NUM_BLOCKS, ...]`."""
        return tf.zeros([NUM_BLOCKS, *self.shape], tf.float64)

    def accumulate(self, total: Structure, released: Released) -> Structure:
        """See `JointRelease`."""
        return total + in_block(released, released.mean)


class CentredScale(BlockSums):
    """The sum of the expected `min(f |u|^2, 3 C^2)`; its excess over the curvature's trace was cut.

    Args:
      clip: The clip C.

    #### Formal guarantee

    A record's term lies between 0 and 3 C^2, which bounds A and D.
    """

    name = "scale"

    def __init__(self, clip: Clip) -> None:
        most = _SCALE_CAP * clip.unit**2
        self.sensitivity = Sensitivity(most, most)


class LackOfFit(BlockSums):
    """The sum of `|psi|^2` less what the model expects of it given x.

    At the true parameters its mean is zero for every distribution of x; under a wrong likelihood it
    is not.

    Args:
      clip: The clip C.

    #### Formal guarantee

    A record's term lies between -C^2 and C^2.
    """

    name = "lack_of_fit"

    def __init__(self, clip: Clip) -> None:
        square = clip.unit**2
        self.sensitivity = Sensitivity(square, 2.0 * square)


def extra_of(per_example: PerExample, name: str) -> tf.Tensor:
    """Returns values that the centred clip alone has.

    Args:
      per_example: The exact values of a batch's records.
      name: The values' name.

    Raises:
      ValueError: Another clip was used.
    """
    if per_example.extra is None:
        raise ValueError(f"{name} needs the centred clip: compile without an optimizer.")
    return per_example.extra[name]
