"""Fits by scoring steps without a model of Keras: one compiled step serves many data sets."""

from __future__ import annotations

import numpy as np

from tfp_dpvi import _random
from tfp_dpvi._tf import tf
from tfp_dpvi.bayes.model import BayesianModel
from tfp_dpvi.calibrated.centred_fit import NUM_STEPS, centred_posterior
from tfp_dpvi.calibrated.pairing import Pairing
from tfp_dpvi.calibrated.scoring import Scoring
from tfp_dpvi.data import make_records
from tfp_dpvi.gradients import StepSpec
from tfp_dpvi.optimizers import ScoringOptimizer
from tfp_dpvi.privacy import PrivacyLedger
from tfp_dpvi.sampling import FullBatchSampler
from tfp_dpvi.training import Mechanism, initial_state
from tfp_dpvi.training.step import make_steps


def scoring_of(prior, likelihood, x, y, public_inputs):
    """The state of scoring steps, for records of these shapes and dtypes.

    Args:
      prior: A distribution.
      likelihood: See `DPVI`.
      x: Inputs, whose values are not read.
      y: Outcomes, likewise.
      public_inputs: Inputs like the private ones.
    """
    model = BayesianModel(prior, likelihood)
    records = make_records(x, y, None, dtype=model.dtype, validate=False)
    return Scoring(Pairing(model, records, log_scales=True), public_inputs)


class Fits:
    """Fits of one model to several data sets of equal shapes.

    Args:
      prior: See `scoring_of`.
      likelihood: See `scoring_of`.
      x: See `scoring_of`.
      y: See `scoring_of`.
      public_inputs: See `scoring_of`.
      epsilon: The budget of each fit, at a delta of 1e-5.

    Attributes:
      scoring: The state of the steps.
      mechanism: The mechanism, with its noise.
    """

    def __init__(self, prior, likelihood, x, y, public_inputs, *, epsilon=1.0):
        self.scoring = scoring_of(prior, likelihood, x, y, public_inputs)
        num = float(len(x))
        gradient = self.scoring.gradient(StepSpec(num, len(x)))
        mechanism = Mechanism(FullBatchSampler(len(x)), gradient, num, len(x))
        self.mechanism = mechanism.calibrated(
            PrivacyLedger(), epsilon=epsilon, delta=1e-5, num_releases=NUM_STEPS
        )
        self._steps = make_steps(self.mechanism, ScoringOptimizer(1.0), [self.scoring.theta])

    def run(self, x, y, seed):
        """Makes the steps of a fit from the prior's mean, and returns the accumulators."""
        scoring, mechanism = self.scoring, self.mechanism
        scoring.restart()
        scoring.theta.assign(scoring.prior.mean)
        records = {"x": tf.constant(x), "y": tf.constant(y)}
        state = initial_state(mechanism, 0, NUM_STEPS)
        key = tf.constant(_random.new_key(seed))
        places = scoring.boundaries(NUM_STEPS)
        for start, end in zip(places, [*places[1:], NUM_STEPS], strict=True):
            scoring.advance(start, NUM_STEPS, self._accumulated(state), mechanism)
            num = tf.constant(end - start, tf.int64)
            state = self._steps(state, num, records, key, mechanism.noise)
        return self._accumulated(state)

    def posterior(self, accumulated):
        """Returns the posterior of the last run."""
        return centred_posterior(self.scoring, accumulated, self.mechanism)

    def _accumulated(self, state):
        pairs = zip(self.mechanism.joint, state.accumulated, strict=True)
        return {release.name: total for release, total in pairs}


def intervals(posterior, level=0.9, num=4000, seed=0):
    """Returns the ends of central intervals of the posterior's coordinates, shape [2, D]."""
    draws = posterior.mixture.sample(num, np.random.default_rng(seed))
    return np.quantile(draws, [(1.0 - level) / 2.0, (1.0 + level) / 2.0], axis=0)
