"""Local steps by information: a hospital moves a posterior as far as its records say.

Adam moves each coordinate by its rate whatever the evidence, so that hospitals vote by number. A
scoring step divides a noisy score by the information that there is: the cavity's precision and the
estimate of the own factor's. How much a step takes is a Kalman gain of the noise, so that there is
no rate to choose.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from tfp_dpvi import _random
from tfp_dpvi._tf import tf, tfd
from tfp_dpvi.federated.factors import Factor
from tfp_dpvi.federated.study import Study
from tfp_dpvi.gradients import Clip, ClippedGradient, StepGradient, StepSpec, through_draws
from tfp_dpvi.training import Mechanism

# Of the largest information that a record of clip C has, C^2 over the number of coordinates.
_EXPECTED = 0.25
# Precisions stay above that share of the prior's: the server's floor is one half.
_FLOOR = 0.51
# The least share of the information expected that a step divides by.
_LEAST = 0.1
# The gain of late steps without noise. Coordinates are taken one by one, so that a gain of 1
# diverges where they are correlated.
_MOST_LATE = 0.2
# Variance of an observed information without noise, in squares of the information itself: it is
# that of a product of two normals, and of the other coordinates.
_SCATTER = 4.0


@dataclasses.dataclass(frozen=True)
class LocalState:
    """Variables of one round's steps, each of shape [d] but the step.

    Args:
      loc: The mean.
      information: The precision of the hospital's own factor, as estimated so far.
      weight: What that estimate weighs, in units of the information expected at the start.
      score: The running mean of the records' score at `loc`.
      step: Number of steps done.

    ```python
    >>> loc, information, weight, score = (tf.Variable(tf.zeros([2])) for _ in range(4))
    >>> LocalState(loc, information, weight, score, tf.Variable(0.0)).variables[0].shape
    TensorShape([2])

    ```
    """

    loc: tf.Variable
    information: tf.Variable
    weight: tf.Variable
    score: tf.Variable
    step: tf.Variable

    @property
    def variables(self) -> list[tf.Variable]:
        """All of them, in order."""
        return [getattr(self, field.name) for field in dataclasses.fields(self)]


class ScoringSteps:
    """A normal q of independent coordinates that scoring steps fit to a cavity and records.

    A step draws z from q, releases the clipped noisy score y of the records at z, and updates the
    mean of the scores, the information (the slope of the scores over draws) and the mean of q.

    Args:
      study: A mean-field study with the flat clip.

    #### Formal guarantee

    Everything here is post-processing of one release a step, that of the clipped sum.
    """

    def __init__(self, study: Study) -> None:
        self._study = study
        prior, self._dtype = study.terms.prior, study.coordinates.dtype
        zeros = tf.zeros([prior.num], self._dtype)
        names = ("loc", "information", "weight", "score")
        own = {name: tf.Variable(zeros, name=name) for name in names}
        own["step"] = tf.Variable(tf.zeros([], self._dtype), name="step")
        self.state = LocalState(**own)
        self._shift = tf.Variable(zeros, trainable=False)
        self._precision = tf.Variable(zeros, trainable=False)
        self._expected = tf.Variable(zeros + 1.0, trainable=False)
        self._noise = tf.Variable(tf.zeros([], self._dtype), trainable=False)  # Variance.
        self._prior_precision = tf.constant(prior.precision, self._dtype)
        self.distribution = tfd.TransformedDistribution(
            tfd.MultivariateNormalDiag(self.state.loc, tf.ones([prior.num], self._dtype)),
            study.coordinates.bijector,
            name="surrogate",
        )

    @property
    def variables(self) -> Sequence[tf.Variable]:
        """Variables that a step updates."""
        return self.state.variables

    def start(self, posterior: Factor, cavity: Factor, mechanism: Mechanism, number: int) -> None:
        """Sets the cavity, and starts at the posterior.

        Args:
          posterior: The present posterior.
          cavity: What takes the prior's place; it may be improper.
          mechanism: The release of one step, with its noise.
          number: How often the hospital was asked before: what its factor weighs.
        """
        num_records = float(mechanism.num_records)
        own = posterior.precision - cavity.precision
        known = np.where(own > 0.0, float(number), 0.0)
        public = num_records * self._study.information
        expected = (public + known * np.maximum(own, 0.0)) / (known + 1.0)
        values = (posterior.mean, expected, 1.0 + known, 0.0 * expected, 0.0)
        for variable, value in zip(self.variables, values, strict=True):
            variable.assign(tf.constant(value, self._dtype))
        self._shift.assign(cavity.shift)
        self._precision.assign(cavity.precision)
        self._expected.assign(expected)
        rate = mechanism.expected_batch_size / num_records
        # Of the sum of scores: noise for privacy, and the draw of the records.
        sampled = (1.0 - rate) / rate * public / _EXPECTED
        noise = float(mechanism.noise)
        private = (noise * (self._study.terms.clip or 0.0) / rate) ** 2
        self._noise.assign(private + sampled)

    def factor(self) -> Factor:
        """Returns q; raises `ValueError` if it is not finite."""
        precision = self._total().numpy().astype(np.float64)
        return Factor(self.state.loc.numpy().astype(np.float64) * precision, precision)

    def _information(self) -> tf.Tensor:
        """Returns the estimated information, kept away from 0."""
        return tf.maximum(self.state.information, _LEAST * self._expected)

    def _total(self) -> tf.Tensor:
        """Returns the precision of q."""
        return tf.maximum(self._precision + self._information(), _FLOOR * self._prior_precision)

    def clipped_gradient(self, spec: StepSpec, clip: Clip) -> ClippedGradient:
        """Returns the release of one step, whose post-processing is the scoring step.

        Args:
          spec: The public numbers of a step.
          clip: The bound on a record's score.
        """
        model = self._study.bayesian_model

        def draw(key: tf.Tensor) -> StepGradient:
            seed = _random.tfp_seed(_random.fold_in(key, 0))
            away = tf.random.stateless_normal(self.state.loc.shape, seed, dtype=self._dtype)
            z = self.state.loc + away / tf.sqrt(self._total())
            with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
                tape.watch(z)
                params = self._study.coordinates.bijector.forward(z)

            record_loss = functools.partial(model.record_loss, params)
            parts = tf.nest.flatten(params)
            gradient = through_draws(record_loss, parts, tape, [z], clip, aligned=True)

            def step(mean: Sequence[tf.Tensor]) -> list[tf.Tensor]:
                by_z = tape.gradient(parts, z, output_gradients=mean, unconnected_gradients="zero")
                score = -spec.num_records * by_z
                after = self._next(score, away)
                # The optimizer subtracts.
                return [
                    variable - value for variable, value in zip(self.variables, after, strict=True)
                ]

            return dataclasses.replace(gradient, pull_back=step)

        return ClippedGradient(draw, clip, identity=("scoring",))

    def _next(self, score: tf.Tensor, away: tf.Tensor) -> list[tf.Tensor]:
        """Returns the values of the variables after a step.

        Args:
          score: The noisy sum of the records' scores at the draw, shape [d].
          away: The draw's distance from the mean in standard deviations, shape [d].
        """
        state, number = self.state, self.state.step + 1.0
        information, total = self._information(), self._total()
        gain = tf.maximum(
            2.0 / (number + 1.0),
            tf.minimum(information / (information + self._noise), _MOST_LATE),
        )
        # At the mean, by the slope that is expected.
        deviation = tf.math.rsqrt(total)
        at_mean = score + information * deviation * away
        # A regression of scores on draws, whose first step has no mean score to compare with.
        variance = 2.0 * self._noise * total + _SCATTER * information**2
        trust = tf.where(state.step > 0.0, self._expected**2 / variance, 0.0)
        weight = state.weight + trust * away**2
        observed = -(score - state.score) * away / deviation
        slope = state.information + trust / weight * (observed - state.information * away**2)
        mean_score = tf.where(
            state.step > 0.0, state.score + gain * (at_mean - state.score), at_mean
        )
        pull = at_mean - self._precision * state.loc + self._shift
        most = tf.math.rsqrt(self._prior_precision)
        move = tf.clip_by_value(gain * pull / total, -most, most)
        return [state.loc + move, slope, weight, mean_score - information * move, number]
