"""Ranks of each record's outcome among outcomes that the fitted model predicts for it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy import special

from tfp_dpvi import _random
from tfp_dpvi._tf import Structure, function_of_model, tf, tfd, without_assertions
from tfp_dpvi.bayes.model import BayesianModel, as_event
from tfp_dpvi.bayes.predictive import mean_of, posterior_draws
from tfp_dpvi.calibrated.twins import draw_apart

NUM_DRAWS = 99
"""Draws from the posterior, and of a record's outcome at each: with the record's own outcome 100,
which ten bins divide."""

_AT_ONCE = 2**15


class RecordScores(NamedTuple):
    """Scores of rows among predicted outcomes: exact, hence *not private*. All of shape [n].

    Attributes:
      pit: The randomised rank of the outcome in [0, 1), uniform if the model is right.
      residual: The mean rank, from -1 to 1, of mean 0 if the model is right: for outcomes 0 and 1
        the outcome less its probability.
      variance: Three times the residual's variance, as the model says it: 1 for a continuous
        outcome.
      probability: The predicted probability of 1, of a binary outcome.
      log_score: The log of the predictive density of the outcome.
      usable: False for rows that count for nothing.
    """

    pit: np.ndarray
    residual: np.ndarray
    variance: np.ndarray
    probability: np.ndarray
    log_score: np.ndarray
    usable: np.ndarray


def draws_of(posterior: tfd.Distribution, seed: int | None) -> Structure:
    """Returns the draws from a posterior at which outcomes are predicted.

    Args:
      posterior: The posterior, a function of released values.
      seed: Makes them repeatable; None for fresh ones.
    """
    return posterior_draws(posterior, NUM_DRAWS, seed)


class Predictor:
    """Ranks outcomes among those that a posterior of one model predicts; traced once.

    Args:
      model: Prior and likelihood.
      is_binary: Whether outcomes are 0 or 1.
    """

    def __init__(self, model: BayesianModel, *, is_binary: bool) -> None:
        def predict(
            draw: Structure, rows: Structure, outcome: tf.Tensor, seed: tf.Tensor
        ) -> tuple[tf.Tensor, ...]:
            num = outcome.shape[0]
            with without_assertions():
                distribution = model.distribution_at(draw, rows)
                drawn, usable = draw_apart(lambda: distribution.sample(seed=seed), rows, num)
                log_prob = distribution.log_prob(as_event(outcome, distribution))
                mean = mean_of(distribution) if is_binary else tf.zeros([num], log_prob.dtype)
            parts = [tf.cast(part, tf.float64) for part in (drawn, log_prob, mean)]
            return (*parts, tf.broadcast_to(usable, [num]))

        self._predict = function_of_model(predict)

    def __call__(
        self, draws: Structure, x: Structure, y: np.ndarray, key: np.ndarray
    ) -> RecordScores:
        """Returns how rows lie among outcomes that the posterior predicts.

        Args:
          draws: Draws from the posterior, of `draws_of`.
          x: Inputs of n rows, arrays.
          y: Their outcomes, shape [n].
          key: Determines all random numbers, int64 [2].

        #### Formal guarantee

        Each entry depends on its own row, the posterior and random numbers that are independent of
        the records, and on no other row.
        """
        for_outcomes, for_ties = (part.numpy() for part in _random.split(tf.constant(key), 2))
        uniforms = np.random.default_rng(for_ties.view(np.uint64)).uniform(size=len(y))
        size = min(len(y), _AT_ONCE)
        parts = []
        for begin in range(0, len(y), size):
            # The last part is filled up, so that all have one shape.
            places = np.minimum(np.arange(begin, begin + size), len(y) - 1)
            seeds = for_outcomes + np.array([begin * (NUM_DRAWS + 1), 0])
            outcomes = np.asarray(y)[places]
            predicted = self._predicted(draws, _rows_at(x, places), outcomes, seeds)
            scores = _among(outcomes, *predicted, uniforms=uniforms[places])
            parts.append([each[: len(y) - begin] for each in scores])
        return RecordScores(*map(np.concatenate, zip(*parts, strict=True)))

    def _predicted(
        self, draws: Structure, x: Structure, y: np.ndarray, key: np.ndarray
    ) -> list[np.ndarray]:
        """Returns outcomes, log densities, means and whether they can be used, each [K, n]."""
        outcome = tf.constant(y)
        found = []
        for number in range(NUM_DRAWS):
            draw = tf.nest.map_structure(lambda part: part[number], draws)  # noqa: B023
            seed = tf.constant(_random.tfp_seed(key + np.array([number, 0])))
            found.append([part.numpy() for part in self._predict(draw, x, outcome, seed)])
        return [np.stack(parts) for parts in zip(*found, strict=True)]


def _rows_at(x: Structure, places: np.ndarray) -> Structure:
    return tf.nest.map_structure(lambda part: tf.constant(np.asarray(part)[places]), x)


def _among(
    outcome: np.ndarray,
    drawn: np.ndarray,
    log_probs: np.ndarray,
    means: np.ndarray,
    usable: np.ndarray,
    *,
    uniforms: np.ndarray,
) -> RecordScores:
    """Returns scores of outcomes, [n], among K drawn ones, [K, n]."""
    own = outcome.astype(np.float64)
    less, more = (drawn < own).sum(axis=0), (drawn > own).sum(axis=0)
    num = len(drawn)
    pit = (less + uniforms * (num - less - more + 1.0)) / (num + 1.0)
    with np.errstate(invalid="ignore"):
        log_score = special.logsumexp(log_probs, axis=0) - np.log(num)
    probability = means.mean(axis=0)
    valid = usable.all(axis=0) & np.isfinite(drawn).all(axis=0) & ~np.isnan(own)
    valid &= ~np.isnan(log_score) & ~np.isnan(probability)
    residual = (less - more) / num
    return RecordScores(
        np.where(valid, pit, 0.0),
        np.where(valid, residual, 0.0),
        np.where(valid, _variance(drawn), 0.0),
        np.where(valid, probability, 0.0),
        np.where(valid, log_score, 0.0),
        valid,
    )


def _variance(drawn: np.ndarray) -> np.ndarray:
    """Returns one less the probability that three outcomes are equal, from K drawn ones, [K, n]."""
    num = len(drawn)
    ordered = np.sort(drawn, axis=0)
    # Of each outcome, the number of equal ones up to it: triples are counted at their last one.
    place = np.arange(num)[:, None]
    is_new = np.concatenate([np.ones([1, drawn.shape[1]], bool), ordered[1:] != ordered[:-1]])
    first = np.maximum.accumulate(np.where(is_new, place, 0), axis=0)
    before = place - first
    triples = (before * (before - 1) / 2.0).sum(axis=0)
    variance: np.ndarray = 1.0 - triples / (num * (num - 1) * (num - 2) / 6.0)
    return variance
