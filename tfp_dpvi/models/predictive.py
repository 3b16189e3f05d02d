"""The posterior predictive distribution as a TFP distribution."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

from tfp_dpvi import _random
from tfp_dpvi._tf import tf, tfp

tfd = tfp.distributions


def over_draws(function: Callable[[Any], Any], draws: Any) -> Any:
    """`function` of each posterior draw, stacked; `draws` has the draws in its first dimension."""
    if not tf.executing_eagerly():
        return tf.vectorized_map(function, draws)
    # As one graph: eagerly, vectorized_map would warn of retracing after a few calls.
    return tf.function(lambda: tf.vectorized_map(function, draws), autograph=False).get_concrete_function()()


def mean_of(distribution: Any) -> Any:
    """Mean of a likelihood; class probabilities for a categorical one, whose mean (of the class numbers) says nothing."""
    return distribution.probs_parameter() if _is_categorical(distribution) else distribution.mean()


def _is_categorical(distribution: Any) -> bool:
    return isinstance(distribution, tfd.Categorical)


_Distribution: Any = tfd.Distribution


class PosteriorPredictive(_Distribution):
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
        self, likelihood: Callable[[Any], Any], draws: Any, num_draws: int, *, name: str = "PosteriorPredictive"
    ) -> None:
        parameters = dict(locals())
        self._likelihood = likelihood
        draws = tf.nest.map_structure(tf.convert_to_tensor, draws)
        self._draws = draws
        self._num_draws = num_draws
        self._one = likelihood(tf.nest.map_structure(lambda part: part[0], draws))
        super().__init__(
            dtype=self._one.dtype,
            reparameterization_type=tfd.NOT_REPARAMETERIZED,
            validate_args=False,
            allow_nan_stats=True,
            parameters=parameters,
            name=name,
        )

    @property
    def num_draws(self) -> int:
        """Number S of posterior draws in the mixture."""
        return self._num_draws

    def _batch_shape(self) -> Any:
        return self._one.batch_shape

    def _batch_shape_tensor(self) -> Any:
        return self._one.batch_shape_tensor()

    def _event_shape(self) -> Any:
        return self._one.event_shape

    def _event_shape_tensor(self) -> Any:
        return self._one.event_shape_tensor()

    def _log_prob(self, value: Any) -> Any:
        logs = over_draws(lambda draw: self._likelihood(draw).log_prob(value), self._draws)
        return tf.reduce_logsumexp(logs, axis=0) - math.log(self._num_draws)

    def _mean(self) -> Any:
        return tf.reduce_mean(over_draws(lambda draw: mean_of(self._likelihood(draw)), self._draws), axis=0)

    def _variance(self) -> Any:
        if _is_categorical(self._one):
            raise NotImplementedError("A categorical likelihood has no variance: use the class probabilities, mean().")

        def moments(draw: Any) -> tuple[Any, Any]:
            one = self._likelihood(draw)
            return one.mean(), one.variance()

        means, variances = over_draws(moments, self._draws)
        return tf.reduce_mean(variances, axis=0) + tf.math.reduce_variance(means, axis=0)

    def _sample_n(self, n: Any, seed: Any = None) -> Any:
        n = tf.convert_to_tensor(n, tf.int32)
        seed = tfp.random.sanitize_seed(seed)
        pick_seed, sample_seed = tfp.random.split_seed(seed, n=2)
        picks = tf.random.stateless_uniform([n], seed=pick_seed, maxval=self._num_draws, dtype=tf.int32)
        seeds = tfp.random.split_seed(sample_seed, n=n)

        def one(pick_and_seed: Any) -> Any:
            pick, seed_of_one = pick_and_seed
            draw = tf.nest.map_structure(lambda part: part[pick], self._draws)
            return self._likelihood(draw).sample(seed=seed_of_one)

        def all_of_them() -> Any:
            return tf.map_fn(one, (picks, tf.convert_to_tensor(seeds)), fn_output_signature=self._one.dtype)

        if not tf.executing_eagerly():
            return all_of_them()
        return tf.function(all_of_them, autograph=False).get_concrete_function()()


def posterior_draws(surrogate_posterior: Any, num_draws: int, seed: int | None) -> Any:
    """`num_draws` draws, stacked in the first dimension."""
    with warnings.catch_warnings():
        # TFP samples automatically batched surrogates ("asvi") in a loop and says so; there is nothing to be done here.
        warnings.filterwarnings("ignore", message="Saw Tensor seed")
        return surrogate_posterior.sample(num_draws, seed=_random.tfp_seed(_random.new_key(seed)))
