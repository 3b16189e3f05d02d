"""How good intervals are: scores, the posterior without privacy, and the ideal private one."""

from __future__ import annotations

import numpy as np

from tfp_dpvi._tf import Structure, tf
from tfp_dpvi.bayes.coordinates import Coordinates
from tfp_dpvi.bayes.model import BayesianModel, as_event
from tfp_dpvi.calibrated.scores import possible_values
from tfp_dpvi.gradients.vmap import gradients_of
from tfp_dpvi.privacy import FullBatch, PrivacyPlan

LEVEL = 0.9
# The standard normal's 95 % quantile.
QUANTILE = 1.6448536269514722
# Clips of the ideal release, over sqrt(d) in coordinates where a record's information is I.
CLIPS = (0.4, 0.6, 0.8, 1.0, 1.4, 2.0)
# Outcomes that stand for all of a record's, where there are many.
NUM_OUTCOMES = 16
# Records that stand for all.
NUM_RECORDS = 1000


def interval(draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the ends of 90 % intervals of draws of shape [S, D]."""
    low, high = np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
    return low, high


def interval_score(low: np.ndarray, high: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Returns the interval score of Gneiting and Raftery (2007), equation 43: less is better.

    The width, and 2 / alpha times the distance of a truth outside; alpha is 1 - `LEVEL`.
    """
    outside = np.maximum(low - truth, 0.0) + np.maximum(truth - high, 0.0)
    return (high - low) + 2.0 / (1.0 - LEVEL) * outside


def crps(draws: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Returns the continuous ranked probability score of draws of shape [S, D]."""
    ordered = np.sort(draws, axis=0)
    ranks = np.arange(1, len(draws) + 1)[:, None]
    spread = np.sum((2 * ranks - len(draws) - 1) * ordered, axis=0) / len(draws) ** 2
    return np.mean(np.abs(draws - truth), axis=0) - spread


class NonPrivate:
    """The posterior without privacy, by its Laplace approximation: N is in the thousands.

    Args:
      model: Prior and likelihood.
      coordinates: The coordinates of the parameters.
    """

    def __init__(self, model: BayesianModel, coordinates: Coordinates) -> None:
        self._scale = coordinates.prior_draws(4096).std(axis=0)
        dtype = coordinates.dtype

        def derivatives(value_of, units):
            """Value, gradient and Hessian in units of the prior's standard deviations."""
            with tf.GradientTape(persistent=True) as outer:
                outer.watch(units)
                with tf.GradientTape() as inner:
                    inner.watch(units)
                    value = value_of(units * tf.constant(self._scale, dtype))
                gradient = inner.gradient(value, units, unconnected_gradients="zero")
            hessian = outer.jacobian(gradient, units, unconnected_gradients="zero")
            return gradient, hessian

        @tf.function(autograph=False)
        def of_posterior(units, x, y):
            def log_density(vector):
                params = coordinates.constrain(tf.split(vector, coordinates.sizes))
                log_likelihood = tf.reduce_sum(model.log_prob(params, x, y))
                return coordinates.log_prior(vector) + log_likelihood

            return derivatives(log_density, units)

        @tf.function(autograph=False)
        def of_prior(units):
            return derivatives(coordinates.log_prior, units)

        self._of_posterior = of_posterior
        self._of_prior = of_prior
        self._dtype = dtype

    def fit(self, start: np.ndarray, x: Structure, y: Structure) -> tuple[np.ndarray, np.ndarray]:
        """Returns the mode and the standard deviations, shape [D] each.

        Args:
          start: Where Newton's steps start.
          x: The inputs.
          y: The outcomes.
        """
        units = start / self._scale
        for _ in range(30):
            gradient, hessian = self._of_posterior(tf.constant(units, self._dtype), x, y)
            covariance = np.linalg.inv(-hessian.numpy().astype("float64"))
            step = covariance @ gradient.numpy().astype("float64")
            units = units + step * min(1.0, 1.0 / np.abs(step).max())
            if np.all(np.abs(step) < 1e-2 * np.sqrt(np.abs(np.diag(covariance)))):
                break
        return units * self._scale, np.sqrt(np.diag(covariance)) * self._scale

    def prior_precision(self, vector: np.ndarray) -> np.ndarray:
        """Returns minus the Hessian of the prior's log density, shape [D, D]."""
        units = tf.constant(vector / self._scale, self._dtype)
        hessian = self._of_prior(units)[1].numpy().astype("float64")
        return -hessian / np.outer(self._scale, self._scale)


class Ideal:
    """The ideal private posterior: the whole budget in one release at the true parameters.

    The release is of the centred clip for infinitely many twins, in coordinates where a record's
    information is the identity, with the best clip; its curvature and its noise are known.

    Args:
      model: Prior and likelihood.
      coordinates: The coordinates of the parameters.
    """

    def __init__(self, model: BayesianModel, coordinates: Coordinates) -> None:
        self._model = model
        self._coordinates = coordinates
        # Set by tracing.
        self._is_simulated: list[bool] = []
        self._scores = tf.function(self._scores_of, autograph=False)
        self._prior_sd = coordinates.prior_draws(4096).std(axis=0)

    def sds(
        self,
        truth: np.ndarray,
        x: Structure,
        prior_precision: np.ndarray,
        *,
        num_records: int,
        epsilon: float,
        delta: float,
        seed: int = 0,
    ) -> np.ndarray:
        """Returns standard deviations, shape [D].

        Args:
          truth: The true parameters' coordinates.
          x: Inputs of records that stand for all.
          prior_precision: The prior's precision at the truth, shape [D, D].
          num_records: The number of records.
          epsilon: The budget.
          delta: Its delta.
          seed: Seeds the simulated outcomes.
        """
        few = tf.nest.map_structure(lambda part: tf.constant(part[:NUM_RECORDS]), x)
        scores, weights = self._scores(
            tf.constant(truth, self._coordinates.dtype), few, tf.constant([seed, 1], tf.int32)
        )
        scores = scores.numpy().astype("float64")
        read = np.flatnonzero(np.abs(scores).max(axis=(0, 1)) > 0.0)
        plan = PrivacyPlan.calibrate(
            epsilon=epsilon, delta=delta, sampling=FullBatch(), num_releases=1
        )
        return ideal_sds(
            scores[..., read],
            weights.numpy().astype("float64"),
            prior_precision,
            read,
            whitened_by=np.diag(self._prior_sd[read] ** -2.0),
            num_records=num_records,
            noise_multiplier=plan.noise_multiplier,
            simulated=self._is_simulated[-1],
        )

    def _scores_of(
        self, vector: tf.Tensor, x: Structure, seed: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the scores of J outcomes of each of n records, [n, J, D], and weights [n, J]."""
        model, coordinates = self._model, self._coordinates

        def distribution(vector, x):
            params = coordinates.constrain(tf.split(vector, coordinates.sizes))
            return model.distribution_at(params, x)

        at_truth = distribution(vector, x)
        values = possible_values(at_truth)
        self._is_simulated.append(values is None)
        num = tf.nest.flatten(x)[0].shape[0]
        if values is None:
            drawn = tf.stop_gradient(at_truth.sample(NUM_OUTCOMES, seed=seed))
            outcomes = tf.unstack(drawn)
            weights = tf.fill([num, NUM_OUTCOMES], 1.0 / NUM_OUTCOMES)
        else:
            outcomes = [tf.fill([num], value) for value in values]
            weights = tf.transpose(
                tf.stack([tf.exp(at_truth.log_prob(as_event(row, at_truth))) for row in outcomes])
            )

        def record_gradient(row, keep):
            del keep
            inputs, outcome = tf.nest.map_structure(lambda part: part[None], row)
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(vector)
                made = distribution(vector, inputs)
                value = tf.reshape(made.log_prob(as_event(outcome, made)), [])
            return value, [tape.gradient(value, vector, unconnected_gradients="zero")]

        mask = tf.fill([num], True)
        scores = [gradients_of(record_gradient, (x, row), mask)[1][0] for row in outcomes]
        return tf.stack(scores, axis=1), weights


def ideal_sds(
    scores: np.ndarray,
    weights: np.ndarray,
    prior_precision: np.ndarray,
    read: np.ndarray,
    *,
    whitened_by: np.ndarray,
    num_records: int,
    noise_multiplier: float,
    simulated: bool = False,
    clips: tuple[float, ...] = CLIPS,
) -> np.ndarray:
    """Returns the ideal standard deviations from scores of simulated outcomes.

    These are from the smallest over clips C of `(Lambda_0 + S (B + sigma^2 C^2 I)^-1 S)^-1`, where
    psi is the clipped and centred score, `S = E psi u^T` and `B = E psi psi^T`, both of all records.

    Args:
      scores: Scores of J outcomes of each of n records at the true parameters, shape [n, J, d].
      weights: The outcomes' probabilities, shape [n, J].
      prior_precision: Lambda_0, shape [D, D].
      read: The coordinates that the scores are of, shape [d].
      whitened_by: A precision over all records that keeps the coordinates finite, shape [d, d].
      num_records: The number N of records.
      noise_multiplier: sigma.
      simulated: Whether the J outcomes are draws, not all that there are: their moments about a
        centre that is theirs are too small by (J - 1) / J.
      clips: Clips over sqrt(d).
    """
    size = scores.shape[-1]
    information = np.einsum("nj,nja,njb->ab", weights, scores, scores) / len(scores)
    scale = 1.0 / np.sqrt(np.diag(information + whitened_by / num_records))
    relative = scale[:, None] * (information + whitened_by / num_records) * scale
    whitening = np.linalg.inv(np.linalg.cholesky(relative)) * scale
    whitened = scores @ whitening.T
    back = np.linalg.inv(whitening)
    num_outcomes = scores.shape[1]
    factor = num_records / len(scores)
    if simulated:
        factor *= num_outcomes / (num_outcomes - 1.0)
    best = None
    for clip in np.sqrt(size) * np.array(clips):
        clipped, away = centre(whitened, weights, clip)
        variance = np.einsum("nj,nja,njb->ab", weights, clipped, clipped)
        slope = np.einsum("nj,nja,njb->ab", weights, clipped, away)
        variance, slope = (factor * part for part in (variance, slope))
        slope = (slope + slope.T) / 2.0
        noise = (noise_multiplier * clip) ** 2 * np.eye(size)
        precision = prior_precision.copy()
        precision[np.ix_(read, read)] += (
            back @ slope @ np.linalg.solve(variance + noise, slope) @ back.T
        )
        variances = np.diag(np.linalg.inv(precision))
        if best is None or np.log(variances).mean() < np.log(best).mean():
            best = variances
    return np.sqrt(best)


def centre(
    whitened: np.ndarray, weights: np.ndarray, clip: float, iterations: int = 25
) -> tuple[np.ndarray, np.ndarray]:
    """Returns clipped scores of each outcome with mean zero, and the scores about their centres."""

    def mean(weights, rows):
        return np.sum(weights[..., None] * rows, axis=1)

    def factor(away):
        return clip / np.maximum(clip, np.linalg.norm(away, axis=-1))

    centres = mean(weights, whitened)
    for _ in range(iterations):
        factors = weights * factor(whitened - centres[:, None])
        centres = mean(factors / factors.sum(axis=1, keepdims=True), whitened)
    away = whitened - centres[:, None]
    clipped = factor(away)[..., None] * away
    return clipped - mean(weights, clipped)[:, None], away
