"""The posterior predictive distribution as a TFP distribution."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

from tfp_dpvi import _random
from tfp_dpvi._tf import Derived, Structure, map_apart, tf, tfd, tfp


def over_draws(function: Callable[[Structure], tf.Tensor], draws: Structure) -> tf.Tensor:
    """Returns `function` of each posterior draw, stacked; `draws` has the draws in its first dimension."""
    return as_graph(lambda: map_apart(function, draws))


def as_graph(function: Callable[[], Structure]) -> Structure:
    """Calls `function` as one graph: eagerly, maps warn of retracing, and TFP's caches of joint bijectors print errors."""
    if not tf.executing_eagerly():
        return function()
    return tf.function(function, autograph=False).get_concrete_function()()


def mean_of(distribution: tfd.Distribution) -> tf.Tensor:
    """Returns the mean of a likelihood; class probabilities for a categorical one, as a mean of class numbers says nothing."""
    return distribution.probs_parameter() if isinstance(distribution, tfd.Categorical) else distribution.mean()


class PosteriorPredictive(Derived):
    """`p(y | x, data) ~ (1/S) sum_s p(y | x, theta_s)` over S draws from the surrogate posterior.

    The batch has one entry for each row of `x`. `log_prob`, `mean`, `variance` and `sample` work where the likelihood
    has them; each sample picks one posterior draw for all records, so that samples are jointly coherent.

    Args:
      likelihood: posterior draw -> TFP distribution over all records at once.
      draws: structure of tensors with S draws in the first dimension.
      num_draws: S.

    #### Formal guarantee

    A function of the released surrogate posterior and of the given `x` alone: post-processing, no further cost.
    """

    def __init__(
        self,
        likelihood: Callable[[Structure], tfd.Distribution],
        draws: Structure,
        num_draws: int,
        *,
        name: str = "PosteriorPredictive",
    ) -> None:
        parameters = dict(locals())
        self._likelihood = likelihood
        draws = tf.nest.map_structure(tf.convert_to_tensor, draws)
        self._draws = draws
        self._num_draws = num_draws
        self._one = likelihood(tf.nest.map_structure(lambda part: part[0], draws))
        super().__init__(self._one, parameters, name)

    @property
    def num_draws(self) -> int:
        """Number S of posterior draws in the mixture."""
        return self._num_draws

    def _log_prob(self, value: Structure) -> tf.Tensor:
        logs = over_draws(lambda draw: self._likelihood(draw).log_prob(value), self._draws)
        return tf.reduce_logsumexp(logs, axis=0) - math.log(self._num_draws)

    def _mean(self) -> tf.Tensor:
        return tf.reduce_mean(over_draws(lambda draw: mean_of(self._likelihood(draw)), self._draws), axis=0)

    def _variance(self) -> tf.Tensor:
        if isinstance(self._one, tfd.Categorical):
            raise NotImplementedError("A categorical likelihood has no variance: use the class probabilities, mean().")

        def moments(draw: Structure) -> tuple[tf.Tensor, tf.Tensor]:
            one = self._likelihood(draw)
            return one.mean(), one.variance()

        means, variances = over_draws(moments, self._draws)
        return tf.reduce_mean(variances, axis=0) + tf.math.reduce_variance(means, axis=0)

    def _sample_n(self, n: tf.Tensor | int, seed: tf.Tensor | None = None) -> Structure:
        n = tf.convert_to_tensor(n, tf.int32)
        seed = tfp.random.sanitize_seed(seed)
        pick_seed, sample_seed = tfp.random.split_seed(seed, n=2)
        picks = tf.random.stateless_uniform([n], seed=pick_seed, maxval=self._num_draws, dtype=tf.int32)
        seeds = tf.convert_to_tensor(tfp.random.split_seed(sample_seed, n=n))

        def one(pick_and_seed: tuple[tf.Tensor, tf.Tensor]) -> Structure:
            pick, seed_of_one = pick_and_seed
            draw = tf.nest.map_structure(lambda part: part[pick], self._draws)
            return self._likelihood(draw).sample(seed=seed_of_one)

        return as_graph(lambda: tf.map_fn(one, (picks, seeds), fn_output_signature=self._one.dtype))


def posterior_draws(posterior: tfd.Distribution, num: tf.Tensor | int, seed: tf.Tensor | int | None) -> Structure:
    """Draws `num` times, stacked in the first dimension; the seed is a number, None, or an int32 tensor of shape [2]."""
    if not tf.is_tensor(seed):
        seed = _random.tfp_seed(_random.new_key(seed))
    with warnings.catch_warnings():
        # TFP samples automatically batched surrogates ("asvi") in a loop and says so.
        warnings.filterwarnings("ignore", message="Saw Tensor seed")
        return posterior.sample(num, seed=seed)
