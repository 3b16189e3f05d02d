"""One scoring step: what records release, and how parameters follow."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tfp_dpvi._tf import Structure, tf
from tfp_dpvi.calibrated.centred import RecordWeights
from tfp_dpvi.calibrated.diagonal import releases_of
from tfp_dpvi.calibrated.ranks import OutcomeRanks
from tfp_dpvi.calibrated.scored import ScoredLikelihood
from tfp_dpvi.calibrated.scores import clipped_sum
from tfp_dpvi.calibrated.weights import ScoreVariance, WeightScale, WeightSums, share_of
from tfp_dpvi.calibrated.wider import WiderClip, is_worth
from tfp_dpvi.gradients import ClippedGradient, ClippedSum, JointRelease, StepGradient
from tfp_dpvi.gradients.base import PerExample

# The longest step, in whitened units over d: standard deviations of a record's information.
_LONGEST = 2.0
# And for mixtures, in whitened units: a longer step can swap components, or lose one.
_LONGEST_OF_MIXTURE = 1.0


class ScoringStep:
    """The step of a fit: parameters, and the settings of the next steps, as variables.

    Args:
      likelihood: The likelihood with its scores.
      mean: The prior's mean, shape [d].

    Attributes:
      longest: The longest step, in whitened units.
      theta: The parameters, shape [d].
      whitening: W, shape [d, d].
      gain: What a step makes of a score, in whitened coordinates, shape [d, d].
      prior_pull: What a record's part of the prior pulls, per unit of parameters, shape [d, d].
      bounds: The least and the largest step in whitened coordinates, shape [2, d].
      most: The largest parameters, shape [d].
    """

    def __init__(self, likelihood: ScoredLikelihood, mean: np.ndarray) -> None:
        self._likelihood = likelihood
        self._mean = tf.constant(mean, likelihood.dtype)
        size = likelihood.size
        self.longest = _LONGEST_OF_MIXTURE if likelihood.is_mixture else _LONGEST * size

        def variable(name: str, start: np.ndarray | float) -> tf.Variable:
            return tf.Variable(start, dtype=likelihood.dtype, trainable=False, name=name)

        self.theta = variable("theta", mean)
        self.whitening = variable("whitening", np.eye(size))
        self.gain = variable("gain", np.eye(size))
        self.prior_pull = variable("prior_pull", np.eye(size))
        self.bounds = variable("bounds", np.zeros([2, size]))
        self.most = variable("most", mean)
        self.set_limits()
        self._weight_gain = variable("weight_gain", 1.0)
        self._most_weight = variable("most_weight", 1.0)
        self._spread = variable("spread", 1.0)

    def set_limits(self, bounds: np.ndarray | None = None, most: np.ndarray | None = None) -> None:
        """Sets what no step passes.

        Args:
          bounds: The least and the largest step in whitened coordinates, shape [2, d], or None.
          most: The largest parameters, shape [d], or None.
        """
        unbounded = np.full(self._likelihood.size, math.inf)
        self.bounds.assign([-unbounded, unbounded] if bounds is None else bounds)
        self.most.assign(unbounded if most is None else most)

    def set_scale(self, scale: WeightScale) -> None:
        """Sets how weights enter the clip."""
        self._likelihood.scale = scale
        self._weight_gain.assign(scale.gain)
        self._most_weight.assign(scale.most)
        self._spread.assign(scale.spread)

    def vector(self) -> tf.Tensor:
        """Returns all coordinates, shape [D]."""
        return self._likelihood.vector_at(self.theta)

    def gradient(self, num_records: int, *, may_widen: bool) -> ClippedGradient:
        """Returns the centred clip, with its joint releases; pulled back it is a scoring step.

        Args:
          num_records: The public number of records.
          may_widen: Whether scores under a wider clip are released where records are many.
        """
        likelihood = self._likelihood
        clip, max_weight = likelihood.clip, likelihood.max_weight

        def draw(key: tf.Tensor) -> StepGradient:
            del key
            vector = self.vector()
            whitening = tf.convert_to_tensor(self.whitening)
            gain = tf.convert_to_tensor(self._weight_gain)
            most = tf.convert_to_tensor(self._most_weight)
            spread = tf.convert_to_tensor(self._spread)

            def clip_batch(
                records: dict[str, Structure], mask: tf.Tensor, key: tf.Tensor
            ) -> tuple[ClippedSum, PerExample]:
                if max_weight is None:
                    scores = likelihood.scores(vector, whitening, records, mask, key)
                    return clipped_sum(scores, clip, None)
                share, is_weight = share_of(records["sample_weight"], max_weight)
                mask = mask & is_weight
                weights = RecordWeights(gain * share, most, spread)
                scores = likelihood.scores(vector, whitening, records, mask, key, weights)
                return clipped_sum(scores, clip, share)

            def pull_back(released: Sequence[tf.Tensor]) -> list[tf.Tensor]:
                return [-self._step(released[0])]

            return StepGradient(
                clip_batch,
                [tf.zeros_like(self.theta)],
                pull_back=pull_back,
                public=tf.identity(self.theta),
            )

        parts = likelihood.pairing.parameters_read
        identity = ("centred", parts, likelihood.num_twins, max_weight)
        return ClippedGradient(
            draw,
            clip,
            joint=self._releases(num_records, may_widen=may_widen),
            gains_from_xla=likelihood.gains_from_xla,
            identity=identity,
        )

    def _releases(self, num_records: int, *, may_widen: bool) -> tuple[JointRelease, ...]:
        """Returns what is released beside the scores."""
        likelihood = self._likelihood
        size, clip = likelihood.size, likelihood.clip
        releases = releases_of(size, clip)
        # Ranks of a sample whose inclusion depends on outcomes are uneven, and hardly a weighted
        # score is cut.
        if likelihood.max_weight is not None:
            return (*releases, ScoreVariance(size, clip), WeightSums())
        # What few values an outcome has bounds its score, so that the clip hardly matters.
        if not likelihood.num_twins:
            return releases
        ranks = OutcomeRanks(likelihood.ranking)
        wider = (WiderClip(size, clip),) if may_widen and is_worth(size, num_records) else ()
        return (*releases, ranks, *wider)

    def _step(self, mean: tf.Tensor) -> tf.Tensor:
        """Returns the change of theta from the noisy mean of psi."""
        pull = mean - tf.linalg.matvec(self.prior_pull, self.theta - self._mean)
        step = tf.linalg.matvec(self.gain, pull)
        step = tf.clip_by_value(step, *tf.unstack(self.bounds))
        step *= self.longest / tf.maximum(tf.norm(step), self.longest)
        step = tf.linalg.matvec(self.whitening, step, transpose_a=True)
        return tf.minimum(step, self.most - self.theta)
