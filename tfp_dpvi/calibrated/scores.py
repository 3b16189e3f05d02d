"""Centred scores of one model: which outcomes a record might have had, and their scores."""

from __future__ import annotations

from typing import Any, NamedTuple

from tfp_dpvi import _random
from tfp_dpvi._tf import Structure, tf, tfd
from tfp_dpvi.bayes.model import as_event
from tfp_dpvi.calibrated.centred import CentredScores, centre_outcomes, centre_two_outcomes
from tfp_dpvi.calibrated.pairing import Pairing
from tfp_dpvi.calibrated.twins import simulate_twins
from tfp_dpvi.gradients.vmap import gradients_of

# Outcomes of more values are simulated.
_MOST_VALUES = 8


class ModelScores(NamedTuple):
    """The centred scores of n records.

    Attributes:
      losses: Negative log densities of the records' outcomes, shape [n].
      usable: Whether the record contributes, bool of shape [n]; all else is zero where not.
      whitened: Whitened scores of J outcomes, neither centred nor clipped, shape [n, J, d].
      weights: Their weights in the expectation of outer products, shape [n, J].
      centred: The centred clip.
    """

    losses: tf.Tensor
    usable: tf.Tensor
    whitened: tf.Tensor
    weights: tf.Tensor
    centred: CentredScores


def model_scores(
    pairing: Pairing,
    vector: tf.Tensor,
    whitening: tf.Tensor,
    records: dict[str, Structure],
    mask: tf.Tensor,
    key: tf.Tensor,
    *,
    bound: float,
    num_twins: int,
) -> ModelScores:
    """Returns the centred scores of a batch of records.

    Outcomes of few values are enumerated; of others, K twins are drawn.

    Args:
      pairing: The model's coordinates and simulation.
      vector: The parameters' coordinates, shape [D].
      whitening: W, shape [d, d].
      records: The records' parts "x" and, unless they are whole records, "y".
      mask: Bool of shape [n], False for padding.
      key: The key of the twins' draws.
      bound: The clip C.
      num_twins: K.
    """
    x = tf.nest.map_structure(_finite, records["x"])
    distribution = pairing.distribution(_finite(vector), x)
    values = possible_values(distribution) if "y" in records else None
    arguments = (pairing, vector, whitening, {**records, "x": x}, mask)
    if values is None:
        return _of_twins(*arguments, distribution, key, bound, num_twins)
    if len(values) == 2:
        return _of_two(*arguments, distribution, bound)
    return _of_values(*arguments, distribution, values, bound)


def possible_values(distribution: tfd.Distribution) -> list[int] | None:
    """Returns the values of an outcome that has few, or None."""
    plain = getattr(distribution, "tensor_distribution", distribution)
    if plain.event_shape.rank != 0:
        return None
    if isinstance(plain, tfd.Bernoulli | tfd.ProbitBernoulli):
        return [0, 1]
    num = None
    if isinstance(plain, tfd.Categorical):
        num = (plain.probs if plain.logits is None else plain.logits).shape[-1]
    elif isinstance(plain, tfd.OrderedLogistic):
        num = plain.cutpoints.shape[-1]
        num = None if num is None else num + 1
    return None if num is None or num > _MOST_VALUES else list(range(num))


def _of_two(
    pairing: Pairing,
    vector: tf.Tensor,
    whitening: tf.Tensor,
    records: dict[str, Structure],
    mask: tf.Tensor,
    distribution: tfd.Distribution,
    bound: float,
) -> ModelScores:
    """Returns the scores for outcomes 0 and 1, from one gradient: that of the log odds."""
    theta = pairing.read(vector)
    dtype = vector.dtype

    def record_gradient(x: Structure, keep: tf.Tensor) -> tuple[tf.Tensor, list[tf.Tensor]]:
        del keep
        batch = tf.nest.map_structure(lambda part: part[None], x)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(theta)
            likelihood = pairing.likelihood(vector, theta, batch)
            one, zero = (
                tf.reshape(likelihood.log_prob(tf.constant([value], likelihood.dtype)), [])
                for value in (1, 0)
            )
            odds = one - zero
        return odds, [tape.gradient(odds, theta, unconnected_gradients="zero"), one, zero]

    odds, values = gradients_of(record_gradient, records["x"], mask)
    gradients = values[0]
    outcome = tf.cast(as_event(records["y"], distribution), dtype)
    difference = tf.linalg.matmul(gradients, whitening, transpose_b=True)
    losses = -tf.where(outcome > 0.5, values[1], values[2])
    # Another value than 0 and 1 would pass the bound.
    is_value = (outcome == 0.0) | (outcome == 1.0)
    finite = tf.math.is_finite(tf.reduce_sum(tf.square(difference), axis=1))
    usable = mask & is_value & finite & tf.math.is_finite(odds)
    difference = _select(usable, difference)
    odds = _select(usable, odds)
    probability = tf.sigmoid(odds)
    centred = centre_two_outcomes(difference, probability, _select(usable, outcome), bound)
    return ModelScores(
        losses=_select(usable, losses),
        usable=usable,
        whitened=difference[:, None],
        weights=(probability * (1.0 - probability))[:, None],
        centred=centred,
    )


def _of_values(
    pairing: Pairing,
    vector: tf.Tensor,
    whitening: tf.Tensor,
    records: dict[str, Structure],
    mask: tf.Tensor,
    distribution: tfd.Distribution,
    values: list[int],
    bound: float,
) -> ModelScores:
    """Returns the scores of all values that an outcome can have, and their probabilities."""
    num = tf.shape(mask)[0]
    every = tf.tile(tf.constant(values, distribution.dtype), [num])
    logs, scores = _scores_of(pairing, vector, whitening, records["x"], every, mask, len(values))
    outcome: Any = as_event(records["y"], distribution)
    observed = tf.cast(outcome[:, None] == tf.constant(values, outcome.dtype), vector.dtype)
    usable = mask & _finite_rows(scores) & tf.reduce_all(~tf.math.is_nan(logs), axis=1)
    scores = _select(usable, scores)
    weights = tf.nn.softmax(_select(usable, logs), axis=1)
    losses = -tf.reduce_sum(tf.where(observed > 0.0, logs, tf.zeros_like(logs)), axis=1)
    return ModelScores(
        losses=_select(usable, losses),
        usable=usable,
        whitened=scores,
        weights=weights,
        centred=centre_outcomes(scores, weights, weights, observed, bound),
    )


def _of_twins(
    pairing: Pairing,
    vector: tf.Tensor,
    whitening: tf.Tensor,
    records: dict[str, Structure],
    mask: tf.Tensor,
    distribution: tfd.Distribution,
    key: tf.Tensor,
    bound: float,
    num_twins: int,
) -> ModelScores:
    """Returns the scores of the records' outcomes and of K twins each."""
    num = mask.shape[0] if mask.shape[0] is not None else tf.shape(mask)[0]
    observed = as_event(records["y"] if "y" in records else records["x"], distribution)
    outcomes = [observed]
    usable = mask
    for number in range(num_twins):
        seed = _random.tfp_seed(_random.fold_in(key, number))
        twins, can_be_used = simulate_twins(distribution, records, seed)
        outcomes.append(twins)
        usable &= can_be_used
    # A record's outcomes follow each other.
    rows = tf.nest.map_structure(
        lambda *parts: tf.reshape(tf.stack(parts, axis=1), [-1, *parts[0].shape[1:]]), *outcomes
    )
    size = num_twins + 1
    logs, scores = _scores_of(pairing, vector, whitening, records["x"], rows, mask, size)
    # All or none: dropping only a twin would break the symmetry.
    usable &= _finite_rows(scores) & tf.reduce_all(tf.math.is_finite(logs), axis=1)
    scores = _select(usable, scores)
    ones = tf.ones([num, 1], vector.dtype)
    weights = tf.fill([num, size], tf.constant(1.0 / size, vector.dtype))
    model_weights = tf.concat([0.0 * ones, tf.tile(ones / num_twins, [1, num_twins])], axis=1)
    first = tf.concat([ones, tf.tile(0.0 * ones, [1, num_twins])], axis=1)
    return ModelScores(
        losses=_select(usable, -logs[:, 0]),
        usable=usable,
        whitened=scores,
        weights=model_weights,
        centred=centre_outcomes(scores, weights, model_weights, first, bound),
    )


def _scores_of(
    pairing: Pairing,
    vector: tf.Tensor,
    whitening: tf.Tensor,
    x: Structure,
    outcomes: Structure,
    mask: tf.Tensor,
    num_each: int,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns log densities, shape [n, J], and whitened scores, [n, J, d], of J outcomes each."""
    theta = pairing.read(vector)

    def record_gradient(
        row: tuple[Structure, Structure], keep: tf.Tensor
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        del keep
        inputs, outcome = tf.nest.map_structure(lambda part: part[None], row)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(theta)
            log_prob = tf.reshape(pairing.likelihood(vector, theta, inputs).log_prob(outcome), [])
        return log_prob, [tape.gradient(log_prob, theta, unconnected_gradients="zero")]

    repeated = tf.nest.map_structure(lambda part: tf.repeat(part, num_each, axis=0), x)
    masks = tf.repeat(mask, num_each)
    logs, (gradients,) = gradients_of(record_gradient, (repeated, outcomes), masks)
    scores = tf.linalg.matmul(gradients, whitening, transpose_b=True)
    return (
        tf.reshape(logs, [-1, num_each]),
        tf.reshape(scores, [-1, num_each, theta.shape[0]]),
    )


def _finite_rows(scores: tf.Tensor) -> tf.Tensor:
    return tf.math.is_finite(tf.reduce_sum(tf.square(scores), axis=[1, 2]))


def _select(usable: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
    """Returns zeros where a record is not usable; selected, since 0 x NaN is NaN."""
    shape = [-1] + [1] * (value.shape.rank - 1)
    return tf.where(tf.reshape(usable, shape), value, tf.zeros_like(value))


def _finite(part: tf.Tensor) -> tf.Tensor:
    if not part.dtype.is_floating:
        return part
    return tf.where(tf.math.is_finite(part), part, tf.zeros_like(part))
