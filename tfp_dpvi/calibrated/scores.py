"""Centred scores of one model: which outcomes a record might have had, and their scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tfp_dpvi import _random
from tfp_dpvi._tf import Structure, tf, tfd
from tfp_dpvi.bayes.model import as_event
from tfp_dpvi.calibrated.centred import (
    CentredScores,
    RecordWeights,
    centre_outcomes,
    centre_two_outcomes,
)
from tfp_dpvi.calibrated.pairing import Pairing
from tfp_dpvi.calibrated.ranks import Ranking, centred_bins, centred_ranks
from tfp_dpvi.calibrated.twins import simulate_twins, with_zeros
from tfp_dpvi.gradients import Clip, ClippedSum
from tfp_dpvi.gradients.base import PerExample, take_apart
from tfp_dpvi.gradients.vmap import gradients_of, weighted_sum

# Outcomes of more values are simulated.
_MOST_VALUES = 8
# From this share of the clip on, a score counts as clipped.
_CLIPPED = 0.98
# Of a distribution whose scores are factorised.
_MOST_PARAMETERS = 6


class RecordClip(NamedTuple):
    """The clip of n records, and their weights.

    Attributes:
      bound: The clip C.
      weights: Survey weights; None for ones.
    """

    bound: float
    weights: RecordWeights | None = None


class OutcomeScores(NamedTuple):
    """The scores of J outcomes of each of n records, in factors.

    Attributes:
      logs: Log densities, shape [n, J].
      factors: Gradients of the log densities in p parameters, shape [n, J, p]; these are whitened
        scores if there is no Jacobian.
      jacobian: The whitened derivatives of these parameters in theta, shape [n, p, d], or None.
    """

    logs: tf.Tensor
    factors: tf.Tensor
    jacobian: tf.Tensor | None

    def usable(self) -> tf.Tensor:
        """Returns whether a record's scores are finite, bool of shape [n]."""
        square = tf.reduce_sum(tf.square(self.factors), axis=[1, 2])
        if self.jacobian is not None:
            square *= tf.reduce_sum(tf.square(self.jacobian), axis=[1, 2])
        return tf.math.is_finite(square)

    def centred(
        self,
        usable: tf.Tensor,
        weights: tf.Tensor,
        model_weights: tf.Tensor,
        observed: tf.Tensor,
        clip: RecordClip,
    ) -> tuple[tuple[tf.Tensor, tf.Tensor], CentredScores]:
        """Returns the information, see `ModelScores`, and the centred clip.

        Args:
          usable: Whether a record contributes, bool of shape [n].
          weights: As for `centre_outcomes`.
          model_weights: As for `centre_outcomes`.
          observed: As for `centre_outcomes`.
          clip: The clip and the records' weights.
        """
        factors = _select(usable, self.factors)
        weighted = model_weights[..., None] * factors
        information = (weighted, factors)
        jacobian = None
        if self.jacobian is not None:
            jacobian = _select(usable, self.jacobian)
            outer = tf.linalg.matmul(weighted, factors, transpose_a=True)
            information = (jacobian, tf.linalg.matmul(outer, jacobian))
        centred = centre_outcomes(
            factors,
            weights,
            model_weights,
            observed,
            clip.bound,
            jacobian=jacobian,
            survey=clip.weights,
        )
        return information, centred

    def slope_of(self, values: tf.Tensor) -> tf.Tensor:
        """Returns the sums over outcomes of values times whitened scores, shape [n, m, d].

        Args:
          values: Shape [n, J, m], zero for a record that does not contribute.
        """
        usable = self.usable()
        products = tf.linalg.matmul(values, _select(usable, self.factors), transpose_a=True)
        if self.jacobian is None:
            return products
        return tf.linalg.matmul(products, _select(usable, self.jacobian))


class Place(NamedTuple):
    """The parameters and coordinates that scores are taken in.

    Attributes:
      pairing: The model's coordinates and simulation.
      vector: The parameters' coordinates, shape [D].
      whitening: W, shape [d, d].
    """

    pairing: Pairing
    vector: tf.Tensor
    whitening: tf.Tensor

    @property
    def theta(self) -> tf.Tensor:
        """Returns the coordinates that the likelihood reads, shape [d]."""
        return self.pairing.read(self.vector)

    def likelihood(self, theta: tf.Tensor, x: Structure) -> tfd.Distribution:
        """Returns the likelihood of one record.

        Args:
          theta: The coordinates that it reads, shape [d].
          x: The record's inputs, without a batch dimension.
        """
        batch = tf.nest.map_structure(lambda part: part[None], x)
        return self.pairing.likelihood(self.vector, theta, batch)

    def whitened(self, rows: tf.Tensor) -> tf.Tensor:
        """Returns rows, shape [..., d], in whitened coordinates."""
        # One product: many small ones are slow.
        flat = tf.reshape(rows, [-1, rows.shape[-1]])
        return tf.reshape(tf.linalg.matmul(flat, self.whitening, transpose_b=True), tf.shape(rows))


class ModelScores(NamedTuple):
    """The centred scores of n records.

    Attributes:
      losses: Negative log densities of the records' outcomes, shape [n].
      usable: Whether the record contributes, bool of shape [n]; all else is zero where not.
      information: Two sets of rows for each record, shape [n, m, d], whose products sum to the
        expected outer product of whitened scores, neither centred nor clipped.
      centred: The centred clip.
      ranks: `centred_bins` or `centred_ranks` of the records' outcomes, a number for each bin of
        the ranking; shape [n, 0] without twins.
      ranks_slope: The derivative of its expectation in whitened coordinates, shape [n, m, d] for
        these m numbers.
    """

    losses: tf.Tensor
    usable: tf.Tensor
    information: tuple[tf.Tensor, tf.Tensor]
    centred: CentredScores
    ranks: tf.Tensor
    ranks_slope: tf.Tensor

    def selected(self) -> ModelScores:
        """Returns the scores with zeros for records of which a released value is not finite.

        Distances and products of finite scores may overflow.
        """
        usable = self.usable
        for part in (
            self.centred.psi,
            self.centred.rows,
            self.centred.scale,
            self.centred.expected,
        ):
            # They are bounded, so that a sum is finite if and only if all of them are.
            usable &= tf.math.is_finite(tf.reduce_sum(part, axis=list(range(1, part.shape.rank))))
        # On their own, so that nothing of them is computed where they are not released.
        wider, length = self.centred.wider, self.centred.length
        wider = _select(tf.math.is_finite(tf.reduce_sum(wider, axis=1)), wider)
        length = _select(tf.math.is_finite(length), length)
        centred = self.centred._replace(wider=wider, length=length)
        return ModelScores(
            _select(usable, self.losses),
            usable,
            tf.nest.map_structure(lambda part: _select(usable, part), self.information),
            tf.nest.map_structure(lambda part: _select(usable, part), centred),
            _select(usable, self.ranks),
            _select(usable, self.ranks_slope),
        )


def model_scores(
    place: Place,
    records: dict[str, Structure],
    mask: tf.Tensor,
    key: tf.Tensor,
    *,
    bound: float,
    num_twins: int,
    ranking: Ranking,
    weights: RecordWeights | None = None,
) -> ModelScores:
    """Returns the centred scores of a batch of records.

    Outcomes of few values are enumerated; of others, K twins are drawn.

    Args:
      place: The parameters and coordinates.
      records: The records' parts "x" and, unless they are whole records, "y".
      mask: Bool of shape [n], False for padding.
      key: The key of the twins' draws.
      bound: The clip C.
      num_twins: K.
      ranking: The bins in which outcomes that are not enumerated are counted.
      weights: Survey weights; None for ones.
    """
    clip = RecordClip(bound, weights)
    # Samplers take finite inputs; scores are of the records as they are, so that bad ones count for
    # nothing.
    finite = {**records, "x": tf.nest.map_structure(with_zeros, records["x"])}
    distribution = place.pairing.distribution(with_zeros(place.vector), finite["x"])
    values = possible_values(distribution) if "y" in records else None
    arguments = (place, records, mask)
    if values is None:
        twins = _of_twins(*arguments, finite, distribution, key, clip, num_twins, ranking)
        return twins.selected()
    if len(values) == 2:
        # Finite as they are: what is released of a record is at most its squared distance.
        return _of_two(*arguments, distribution, clip)
    return _of_values(*arguments, distribution, values, clip).selected()


def clipped_sum(
    scores: ModelScores, clip: Clip, share: tf.Tensor | None
) -> tuple[ClippedSum, PerExample]:
    """Returns the sum of centred scores with its sensitivity, and the values of joint releases.

    Args:
      scores: The scores.
      clip: The clip.
      share: Weights over the largest one, shape [n]; None without weights.
    """
    centred = scores.centred
    psi = centred.psi
    kept = tf.cast(scores.usable, psi.dtype)
    extra = {
        "rows": centred.rows,
        "scale": centred.scale,
        "lack_of_fit": centred.square - centred.expected,
        "ranks": scores.ranks,
        "wider": centred.wider,
        "variance": psi,
    }
    losses = scores.losses
    if share is not None:
        share = kept * share
        losses = losses * share
        extra |= {"share": share, "length": centred.length / clip.bound}
    total = weighted_sum(psi, kept)
    # A clipped score has the clip's length but for what makes its mean zero.
    clipped = scores.usable & (tf.norm(psi, axis=1) > _CLIPPED * clip.bound)
    return ClippedSum([total], clip), PerExample(
        losses, clipped, scores.usable, gradients=[psi], extra=extra
    )


def possible_values(distribution: tfd.Distribution) -> list[int] | None:
    """Returns the values of an outcome that has few, or None."""
    plain = getattr(distribution, "tensor_distribution", distribution)
    # A joint distribution's shapes are a structure.
    if getattr(plain.event_shape, "rank", None) != 0:
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
    place: Place,
    records: dict[str, Structure],
    mask: tf.Tensor,
    distribution: tfd.Distribution,
    clip: RecordClip,
) -> ModelScores:
    """Returns the scores for outcomes 0 and 1, from one gradient: that of the log odds."""
    theta = place.theta

    def record_gradient(x: Structure, keep: tf.Tensor) -> tuple[tf.Tensor, list[tf.Tensor]]:
        del keep
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(theta)
            likelihood = place.likelihood(theta, x)
            one, zero = (
                tf.reshape(likelihood.log_prob(tf.constant([value], likelihood.dtype)), [])
                for value in (1, 0)
            )
            odds = one - zero
        return odds, [tape.gradient(odds, theta, unconnected_gradients="zero"), one, zero]

    odds, values = gradients_of(record_gradient, records["x"], mask)
    gradients = values[0]
    outcome = tf.cast(as_event(records["y"], distribution), theta.dtype)
    difference = place.whitened(gradients)
    losses = -tf.where(outcome > 0.5, values[1], values[2])
    # Another value than 0 and 1 would pass the bound.
    is_value = (outcome == 0.0) | (outcome == 1.0)
    finite = tf.math.is_finite(tf.reduce_sum(tf.square(difference), axis=1))
    usable = mask & is_value & finite & tf.math.is_finite(odds)
    difference = _select(usable, difference)
    odds = _select(usable, odds)
    probability = tf.sigmoid(odds)
    variance = probability * (1.0 - probability)
    observed = _select(usable, outcome)
    centred = centre_two_outcomes(difference, probability, observed, *clip)
    information = (variance[:, None, None] * difference[:, None], difference[:, None])
    losses = _select(usable, losses)
    return ModelScores(losses, usable, information, centred, *_no_ranks(centred))


def _of_values(
    place: Place,
    records: dict[str, Structure],
    mask: tf.Tensor,
    distribution: tfd.Distribution,
    values: list[int],
    clip: RecordClip,
) -> ModelScores:
    """Returns the scores of all values that an outcome can have, and their probabilities."""
    num = tf.shape(mask)[0]
    every = tf.tile(tf.constant(values, distribution.dtype), [num])
    scores = _scores_of(place, records["x"], every, mask, len(values))
    outcome: Any = as_event(records["y"], distribution)
    observed = tf.cast(outcome[:, None] == tf.constant(values, outcome.dtype), place.vector.dtype)
    # Without one of these values it would still add to what the model expects.
    usable = mask & tf.reduce_any(observed > 0.0, axis=1) & scores.usable()
    usable &= tf.reduce_all(~tf.math.is_nan(scores.logs), axis=1)
    weights = tf.nn.softmax(_select(usable, scores.logs), axis=1)
    logs = tf.where(observed > 0.0, scores.logs, tf.zeros_like(scores.logs))
    information, centred = scores.centred(usable, weights, weights, observed, clip)
    losses = _select(usable, -tf.reduce_sum(logs, axis=1))
    return ModelScores(losses, usable, information, centred, *_no_ranks(centred))


def _of_twins(
    place: Place,
    records: dict[str, Structure],
    mask: tf.Tensor,
    finite: dict[str, Structure],
    distribution: tfd.Distribution,
    key: tf.Tensor,
    clip: RecordClip,
    num_twins: int,
    ranking: Ranking,
) -> ModelScores:
    """Returns the scores of the records' outcomes and of K twins each."""
    num = mask.shape[0] if mask.shape[0] is not None else tf.shape(mask)[0]
    observed = as_event(records["y"] if "y" in records else records["x"], distribution)
    outcomes = [observed]
    usable = mask
    for number in range(num_twins):
        seed = _random.tfp_seed(_random.fold_in(key, number))
        twins, can_be_used = simulate_twins(distribution, finite, seed)
        outcomes.append(twins)
        usable &= can_be_used
    # A record's outcomes follow each other.
    rows = tf.nest.map_structure(
        lambda *parts: tf.reshape(tf.stack(parts, axis=1), [-1, *parts[0].shape[1:]]), *outcomes
    )
    size = num_twins + 1
    scores = _scores_of(place, records["x"], rows, mask, size)
    # All or none: dropping only a twin would break the symmetry. A sum that overflows is as bad.
    usable &= scores.usable() & tf.math.is_finite(tf.reduce_sum(scores.logs, axis=1))
    ones = tf.ones([num, 1], place.vector.dtype)
    weights = tf.fill([num, size], tf.constant(1.0 / size, place.vector.dtype))
    model_weights = tf.concat([0.0 * ones, tf.tile(ones / num_twins, [1, num_twins])], axis=1)
    first = tf.concat([ones, tf.tile(0.0 * ones, [1, num_twins])], axis=1)
    information, centred = scores.centred(usable, weights, model_weights, first, clip)
    losses = _select(usable, -scores.logs[:, 0])
    values = [scores.logs]
    if len(ranking.probabilities) == 2:
        values.append(tf.reshape(tf.cast(rows, scores.logs.dtype), [-1, size]))

    def ranks(num: int) -> tf.Tensor:
        """Returns those of the first outcomes: a step reads the record's own alone."""
        if ranking.is_exact:
            bins = centred_bins(distribution, tf.reshape(rows, [-1, size])[:, :num])
            return _select(usable, bins)
        orders = [
            centred_ranks(each, each[:, :num], unit)
            for each, unit in zip(values, (1.0, 0.0), strict=False)
        ]
        return _select(usable, tf.concat(orders, axis=2))

    slope = scores.slope_of(ranks(size)) / size
    return ModelScores(losses, usable, information, centred, ranks(1)[:, 0], slope)


def _no_ranks(centred: CentredScores) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns empty ranks, where all outcomes are enumerated."""
    psi = centred.psi
    return psi[:, :0], psi[:, None][:, :0]


def _scores_of(
    place: Place,
    x: Structure,
    outcomes: Structure,
    mask: tf.Tensor,
    num_each: int,
) -> OutcomeScores:
    """Returns the scores of J outcomes of each record."""
    arguments = (place, x, outcomes, mask, num_each)
    try:
        return _factorised_scores(*arguments)
    except (TypeError, NotImplementedError):
        return _direct_scores(*arguments)


def _direct_scores(
    place: Place,
    x: Structure,
    outcomes: Structure,
    mask: tf.Tensor,
    num_each: int,
) -> OutcomeScores:
    """Returns the scores of J outcomes of each record, from a backward pass for each."""
    theta = place.theta

    def record_gradient(
        row: tuple[Structure, Structure], keep: tf.Tensor
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        del keep
        inputs, outcome = row
        outcome = tf.nest.map_structure(lambda part: part[None], outcome)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(theta)
            log_prob = tf.reshape(place.likelihood(theta, inputs).log_prob(outcome), [])
        return log_prob, [tape.gradient(log_prob, theta, unconnected_gradients="zero")]

    repeated = tf.nest.map_structure(lambda part: tf.repeat(part, num_each, axis=0), x)
    masks = tf.repeat(mask, num_each)
    logs, gradients = gradients_of(record_gradient, (repeated, outcomes), masks)
    scores = place.whitened(gradients[0])
    return OutcomeScores(
        tf.reshape(logs, [-1, num_each]),
        tf.reshape(scores, [-1, num_each, theta.shape[0]]),
        None,
    )


def _factorised_scores(
    place: Place,
    x: Structure,
    outcomes: Structure,
    mask: tf.Tensor,
    num_each: int,
) -> OutcomeScores:
    """Returns the scores of J outcomes of each record, in factors.

    The likelihood's distribution is taken apart: with s the gradient of a log density in its p
    parameters, and J_i the derivative of these in theta for record i, a score is `J_i^T s`. Then p
    backward passes serve all outcomes.

    Raises:
      TypeError: The distribution cannot be taken apart, or has too many parameters.
    """
    theta = place.theta
    taken: list[Callable[[Sequence[tf.Tensor]], tfd.Distribution]] = []
    moving: list[bool] = []

    def derivative(x: Structure, keep: tf.Tensor) -> tuple[tf.Tensor, list[tf.Tensor]]:
        del keep
        with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
            tape.watch(theta)
            parts, joined = take_apart(place.likelihood(theta, x))
            rest = joined([tf.stop_gradient(part) for part in parts]).log_prob(_zeros(outcomes))
            if not all(part.dtype.is_floating for part in parts):
                raise TypeError("a parameter is no float: that of a mask, or of a count")
            entries = [tf.unstack(tf.reshape(part, [-1])) for part in parts]
        if tape.gradient(rest, theta) is not None:
            raise TypeError("the density reads parameters that are no part of the distribution")
        slopes = [[tape.gradient(entry, theta) for entry in part] for part in entries]
        taken.append(joined)
        moving[:] = [any(slope is not None for slope in part) for part in slopes]
        rows = [
            tf.zeros_like(theta) if slope is None else slope
            for part, moves in zip(slopes, moving, strict=True)
            for slope in part
            if moves
        ]
        if not 0 < len(rows) <= _MOST_PARAMETERS:
            raise TypeError(f"the distribution has {len(rows)} parameters")
        return tf.zeros([], theta.dtype), [tf.stack(rows), *parts]

    _, values = gradients_of(derivative, x, mask)
    jacobian, parts = values[0], values[1:]

    def density(
        row: tuple[list[tf.Tensor], Structure], keep: tf.Tensor
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        del keep
        own, outcome = row
        outcome = tf.nest.map_structure(lambda part: part[None], outcome)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            wanted = [part for part, moves in zip(own, moving, strict=True) if moves]
            tape.watch(wanted)
            log_prob = tf.reshape(taken[-1](own).log_prob(outcome), [])
        slopes = tape.gradient(log_prob, wanted, unconnected_gradients="zero")
        return log_prob, [tf.concat([tf.reshape(slope, [-1]) for slope in slopes], axis=0)]

    repeated = [tf.repeat(part, num_each, axis=0) for part in parts]
    masks = tf.repeat(mask, num_each)
    logs, gradients = gradients_of(density, (repeated, outcomes), masks)
    return OutcomeScores(
        tf.reshape(logs, [-1, num_each]),
        tf.reshape(gradients[0], [-1, num_each, jacobian.shape[1]]),
        place.whitened(jacobian),
    )


def _zeros(outcomes: Structure) -> Structure:
    """Returns one outcome of zeros."""
    return tf.nest.map_structure(lambda part: tf.zeros([1, *part.shape[1:]], part.dtype), outcomes)


def _select(usable: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
    """Returns zeros where a record is not usable; selected, since 0 x NaN is NaN."""
    # The operation for whole rows: several times faster than one that broadcasts.
    return tf.raw_ops.Select(condition=usable, x=value, y=tf.zeros_like(value))
