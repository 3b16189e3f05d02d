"""Expected scores at one point for outcomes that follow other parameters, at public inputs.

Scores are not linear: what those at a public point are expected to be, for the records of a site
whose parameters are others, is what their slope says on the way there alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from tfp_dpvi import _random
from tfp_dpvi._tf import Structure, function_of_model, map_apart, tf
from tfp_dpvi.bayes.model import as_event
from tfp_dpvi.calibrated.centred import RecordWeights
from tfp_dpvi.calibrated.scored import NUM_TWINS, ScoredLikelihood
from tfp_dpvi.calibrated.scores import Place, model_scores, possible_values
from tfp_dpvi.data import UnitRows

# Outcomes of all public inputs, where they are simulated.
_NUM_OUTCOMES = 2**16
# Of a logarithm of a ratio of densities.
_MOST_LOG = 20.0


class MovedScores:
    """Centred scores of possible outcomes at public inputs, at one point.

    Outcomes of few values are enumerated, and others are drawn at the point and weighted by the
    ratio of their densities.

    Args:
      likelihood: The likelihood and its public inputs.
      num_outcomes: The number of outcomes of all public inputs, where they are drawn; and the most
        of these inputs.

    Attributes:
      psi: The centred scores of the outcomes, shape [n, d].
      weights: The outcomes' weights, which sum to 1, shape [n].
    """

    def __init__(self, likelihood: ScoredLikelihood, num_outcomes: int = _NUM_OUTCOMES) -> None:
        self._likelihood = likelihood
        self._num_outcomes = num_outcomes
        self._density = function_of_model(self._log_densities)
        self._score = function_of_model(self._scores)
        self._tilt = function_of_model(self._tilted)
        self._slope = function_of_model(self._slopes)
        self._mean = function_of_model(self._means)
        self._pull = function_of_model(self._pulled)

    def start(self, theta: np.ndarray, whitening: np.ndarray) -> None:
        """Computes the scores at a point.

        Args:
          theta: The coordinates at which scores are taken, shape [d].
          whitening: W, shape [d, d].
        """
        likelihood = self._likelihood
        vector = likelihood.vector_at(theta)
        place = (vector, tf.constant(whitening, likelihood.dtype))
        found = self._score(*place, likelihood.inputs, likelihood.public_weights())
        self._records = found[:2]
        self._start = self._density(vector, *self._records).numpy()
        self._place = place
        self.psi, weights = (part.numpy().astype(np.float64) for part in found[2:])
        self.weights = weights / max(weights.sum(), 1.0)
        self._usable = np.isfinite(self._start) & (weights > 0.0)
        arrays = (self.psi, np.where(self._usable, self.weights, 0.0), self._start)
        self._known = [tf.constant(part, likelihood.dtype) for part in arrays]

    @property
    def num_rows(self) -> int:
        """The number of rows of inputs: several for each person."""
        x = self._records[0]
        places = tf.nest.flatten(x)[0].shape[1] if isinstance(x, UnitRows) else 1
        return len(self.psi) * int(places)

    def __call__(self, truth: np.ndarray) -> np.ndarray:
        """Returns the mean centred score of a record at the last point, shape [d].

        Args:
          truth: The coordinates that outcomes follow, shape [d].
        """
        mean: np.ndarray = self.means(truth[None])[0]
        return mean

    def tilted(self, truths: np.ndarray, tilts: np.ndarray) -> np.ndarray:
        """Returns the moment generating function of a record's score, less 1.

        Args:
          truths: Coordinates that outcomes follow, shape [m, d].
          tilts: Its arguments in whitened coordinates, one for each of the truths, shape [m, d].

        Returns:
          Array of shape [m].
        """
        return self._found(self._tilt, truths, tilts)

    def means(self, truths: np.ndarray) -> np.ndarray:
        """Returns the mean centred score of a record for each of several truths, shape [m, d].

        Args:
          truths: Coordinates that outcomes follow, shape [m, d].
        """
        return self._found(self._mean, truths)

    def pulled(self, truths: np.ndarray, gradients: np.ndarray) -> np.ndarray:
        """Returns gradients in truths, of those in their `means`; both have shape [m, d].

        Args:
          truths: Coordinates that outcomes follow, shape [m, d].
          gradients: The gradients in the means.
        """
        return self._found(self._pull, truths, gradients)

    def _found(self, function: Callable[..., tf.Tensor], *arguments: np.ndarray) -> np.ndarray:
        """Returns what a traced function says of the scores."""
        parts = [tf.constant(part, self._likelihood.dtype) for part in arguments]
        usable = tf.constant(self._usable)
        found: np.ndarray = function(*parts, *self._known, usable, *self._records).numpy()
        return found.astype(np.float64)

    def derivative(self, values: np.ndarray) -> np.ndarray:
        """Returns the derivative of a mean over outcomes in the parameters that they follow.

        Args:
          values: A value for each outcome, shape [n].

        Returns:
          Array of shape [d], in whitened coordinates.
        """
        vector, whitening = self._place
        weights = np.where(self._usable, self.weights * values, 0.0)
        weights = tf.constant(weights, vector.dtype)
        slope = self._slope(vector, weights, tf.constant(self._usable), *self._records)
        found: np.ndarray = tf.linalg.matvec(whitening, slope).numpy()
        return found.astype(np.float64)

    def _tilted(
        self,
        truths: tf.Tensor,
        tilts: tf.Tensor,
        psi: tf.Tensor,
        weights: tf.Tensor,
        start: tf.Tensor,
        usable: tf.Tensor,
        x: Structure,
        outcomes: Structure,
    ) -> tf.Tensor:
        def one(parts: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
            truth, tilt = parts
            logs = self._log_densities(self._likelihood.vector_at(truth), x, outcomes) - start
            logs = tf.where(usable & ~tf.math.is_nan(logs), logs, -math.inf)
            # Far away a few of the outcomes have all the weight, which is made to sum to 1.
            ratios = weights * tf.exp(logs - tf.reduce_max(logs))
            tilted = ratios * tf.math.expm1(tf.linalg.matvec(psi, tilt))
            return tf.reduce_sum(tilted) / tf.reduce_sum(ratios)

        return tf.map_fn(one, (truths, tilts), fn_output_signature=psi.dtype)

    def _means(
        self,
        truths: tf.Tensor,
        psi: tf.Tensor,
        weights: tf.Tensor,
        start: tf.Tensor,
        usable: tf.Tensor,
        x: Structure,
        outcomes: Structure,
    ) -> tf.Tensor:
        vectors = self._likelihood.vectors_at(truths)
        logs = map_apart(lambda vector: self._log_densities(vector, x, outcomes), vectors) - start
        logs = tf.where(usable & ~tf.math.is_nan(logs), tf.minimum(logs, _MOST_LOG), 0.0)
        return tf.linalg.matmul(weights * tf.math.expm1(logs), psi)

    def _pulled(self, truths: tf.Tensor, gradients: tf.Tensor, *rest: Structure) -> tf.Tensor:
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(truths)
            total = tf.reduce_sum(gradients * self._means(truths, *rest))
        return tape.gradient(total, truths)

    def _slopes(
        self,
        vector: tf.Tensor,
        weights: tf.Tensor,
        usable: tf.Tensor,
        x: Structure,
        outcomes: Structure,
    ) -> tf.Tensor:
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(vector)
            logs = self._log_densities(vector, x, outcomes)
            # Of zero weight, and so that no gradient is that of an infinite density.
            logs = tf.where(usable, logs, tf.zeros_like(logs))
            total = tf.reduce_sum(weights * logs)
        slope = tape.gradient(total, vector, unconnected_gradients="zero")
        return self._likelihood.pairing.read(slope)

    def _log_densities(self, vector: tf.Tensor, x: Structure, outcomes: Structure) -> tf.Tensor:
        distribution = self._likelihood.pairing.distribution(vector, x)
        return distribution.log_prob(as_event(outcomes, distribution))

    def _scores(
        self,
        vector: tf.Tensor,
        whitening: tf.Tensor,
        inputs: Structure,
        survey: RecordWeights | None,
    ) -> tuple[Structure, Structure, tf.Tensor, tf.Tensor]:
        """Returns inputs, outcomes, their centred scores [n, d] and weights [n], summing to 1 each.

        Each public input is there once for each of its outcomes, with its survey weight.
        """
        likelihood, pairing = self._likelihood, self._likelihood.pairing
        num = min(tf.nest.flatten(inputs)[0].shape[0], self._num_outcomes)
        inputs = tf.nest.map_structure(lambda part: part[:num], inputs)
        distribution = pairing.distribution(vector, inputs)
        values = None if pairing.generative else possible_values(distribution)
        each = max(1, self._num_outcomes // num) if values is None else len(values)
        x = tf.nest.map_structure(lambda part: tf.repeat(part, each, axis=0), inputs)
        mask = tf.fill([num * each], True)
        weights = tf.fill([num * each], tf.constant(1.0 / each, vector.dtype))
        if survey is not None:
            survey = survey._replace(weight=tf.repeat(survey.weight[:num], each))
        key = tf.constant([0, 2], tf.int64)
        distribution = pairing.distribution(vector, x)
        if values is None:
            seed = _random.tfp_seed(_random.fold_in(key, NUM_TWINS + 1))
            outcomes, mask = pairing.simulate(distribution, x, seed)
        else:
            outcomes = tf.tile(tf.constant(values, distribution.dtype), [num])
            weights = tf.exp(distribution.log_prob(outcomes))
        scores = model_scores(
            Place(pairing, vector, whitening),
            pairing.records(x, outcomes),
            mask,
            key,
            bound=likelihood.clip.bound,
            num_twins=likelihood.num_twins or NUM_TWINS,
            ranking=likelihood.ranking,
            weights=survey,
        )
        kept = tf.where(scores.usable, weights, tf.zeros_like(weights))
        return x, outcomes, scores.centred.psi, kept


def secant(start: np.ndarray, expected: np.ndarray, away: np.ndarray) -> np.ndarray:
    """Returns a slope like another one, which says what is expected along one direction.

    Args:
      start: The other slope, shape [d, d].
      expected: The score at the end of the way, shape [d].
      away: The way, shape [d].
    """
    lacking = expected - start @ away
    changed: np.ndarray = start + np.outer(lacking, away) / float(away @ away)
    return changed
