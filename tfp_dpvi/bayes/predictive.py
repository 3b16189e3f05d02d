"""The posterior predictive distribution as a TFP distribution."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence

import numpy as np

from tfp_dpvi import _random, surrogates
from tfp_dpvi._tf import Derived, Structure, map_apart, operations_since, tf, tfd, tfp

# Steps of the search for a quantile on the real line: doublings from 1, then bisections.
_SEARCH = 100
# Operations that TensorFlow cannot map over draws and then, with a gradient, over records.
_UNMAPPED = re.compile("(Stateless)?While$|Segment|Where$|Unique")


class _UnmappedError(Exception):
    """Raised while a function is traced that has one of the operations `_UNMAPPED`."""


def over_draws(function: Callable[[Structure], tf.Tensor], draws: Structure) -> tf.Tensor:
    """Applies a function to each draw and stacks the results.

    Args:
      function: A function of one draw.
      draws: A structure of tensors with the draws in the first dimension.
    """
    if tf.nest.flatten(draws)[0].shape[0] == 1:
        # A map takes longer to trace.
        return as_graph(lambda: function(_first(draws))[tf.newaxis])
    return as_graph(lambda: map_apart(function, draws))


def over_draws_of_step(function: Callable[[Structure], tf.Tensor], draws: Structure) -> tf.Tensor:
    """Applies a function to each draw as `over_draws` does, with a gradient in any case.

    A function with loops, segments or shapes that depend on the draw is applied draw by draw.

    Args:
      function: A function of one draw.
      draws: A structure of tensors with the draws in the first dimension.
    """

    def traced(draw: Structure) -> tf.Tensor:
        graph = tf.compat.v1.get_default_graph()
        num_known = len(graph.get_operations())
        result = function(draw)
        new = operations_since(graph, num_known)
        if any(_UNMAPPED.match(operation.type) for operation in new):
            raise _UnmappedError
        return result

    try:
        return over_draws(traced, draws)
    except _UnmappedError:
        parts = [tf.unstack(part) for part in tf.nest.flatten(draws)]
        by_draw = (tf.nest.pack_sequence_as(draws, draw) for draw in zip(*parts, strict=True))
        return tf.stack([function(draw) for draw in by_draw])


def as_graph(function: Callable[[], Structure]) -> Structure:
    """Calls a function within a single graph.

    Eager maps warn of retracing, and TFP's caches of joint bijectors print errors.
    """
    if not tf.executing_eagerly():
        return function()
    return tf.function(function, autograph=False).get_concrete_function()()


def mean_of(distribution: tfd.Distribution) -> tf.Tensor:
    """Returns the mean of a likelihood, or class probabilities of a categorical or ordinal one."""
    outcome = _each(distribution)
    if isinstance(outcome, tfd.OrderedLogistic):
        return outcome.categorical_probs()
    if isinstance(outcome, tfd.Categorical):
        return outcome.probs_parameter()
    return outcome.mean()


def has_classes(distribution: tfd.Distribution) -> bool:
    """Returns whether `mean_of` returns class probabilities, in an additional last dimension."""
    return isinstance(_each(distribution), tfd.Categorical | tfd.OrderedLogistic)


def outcome_of_each(
    likelihood: Callable[[Structure], tfd.Distribution],
    draws: Structure,
    num: tf.Tensor | int,
    seed: tf.Tensor,
    shape: Sequence[int] = (),
) -> Structure:
    """Samples outcomes at each parameter draw.

    Args:
      likelihood: A function from one draw to a TFP distribution.
      draws: A structure of tensors with the draws in the first dimension.
      num: The number of draws.
      seed: A seed of TFP, an int32 tensor of shape [2].
      shape: The shape of the outcomes to sample at each draw; a single outcome by default.

    Returns:
      The outcomes, stacked in the first dimension.
    """
    seeds = tf.convert_to_tensor(tfp.random.split_seed(seed, n=num))

    def sample(pair: tuple[Structure, tf.Tensor]) -> Structure:
        draw, own_seed = pair
        return likelihood(draw).sample(shape, seed=own_seed)

    dtype = likelihood(_first(draws)).dtype
    return as_graph(lambda: tf.map_fn(sample, (draws, seeds), fn_output_signature=dtype))


class PosteriorPredictive(Derived):
    """The mixture `p(y | x, data) ~ (1/S) sum_s p(y | x, theta_s)` over S draws from the posterior.

    The batch has one entry for each row of `x`. `log_prob`, `mean`, `variance` and `sample` work if
    the likelihood has them, and so do `cdf`, `quantile` and `interval`, for each outcome of a
    `tfd.Independent` by itself. `mode` is the most probable of the draws' modes, or the most
    probable class. Each sample uses one posterior draw for all records, so that samples are joint.

    Args:
      likelihood: A function from one posterior draw to a TFP distribution over all records at once.
      draws: A structure of tensors with S draws in the first dimension.
      num_draws: The number of draws S.

    #### Formal guarantee

    A function of the released posterior and of `x` alone: post-processing, at no further cost.

    ```python
    >>> from tfp_dpvi._tf import tf, tfd
    >>> draws = tf.constant([-1.0, 1.0])
    >>> mixture = PosteriorPredictive(lambda draw: tfd.Normal([draw], 2.0), draws, num_draws=2)
    >>> mixture.mean().numpy().tolist(), mixture.variance().numpy().tolist()
    ([0.0], [5.0])

    ```
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
        self._num_draws = num_draws
        self._draws = tf.nest.map_structure(tf.convert_to_tensor, draws)
        # The component of the first draw, which has the shapes and dtypes of all.
        self._component = likelihood(_first(self._draws))
        super().__init__(self._component, parameters, name)

    @property
    def num_draws(self) -> int:
        """The number S of posterior draws in the mixture."""
        return self._num_draws

    def _log_prob(self, value: Structure) -> tf.Tensor:
        logs = over_draws(lambda draw: self._likelihood(draw).log_prob(value), self._draws)
        return tf.reduce_logsumexp(logs, axis=0) - math.log(self._num_draws)

    def _mean(self) -> tf.Tensor:
        means = over_draws(lambda draw: mean_of(self._likelihood(draw)), self._draws)
        return tf.reduce_mean(means, axis=0)

    def _variance(self) -> tf.Tensor:
        if isinstance(self._component, tfd.Categorical):
            raise NotImplementedError(
                "A categorical likelihood has no variance: use the class probabilities, mean()."
            )

        def moments(draw: Structure) -> tuple[tf.Tensor, tf.Tensor]:
            component = self._likelihood(draw)
            return component.mean(), component.variance()

        means, variances = over_draws(moments, self._draws)
        return tf.reduce_mean(variances, axis=0) + tf.math.reduce_variance(means, axis=0)

    def _sample_n(self, n: tf.Tensor | int, seed: tf.Tensor | None = None) -> Structure:
        n = tf.convert_to_tensor(n, tf.int32)
        seed = tfp.random.sanitize_seed(seed)
        pick_seed, sample_seed = tfp.random.split_seed(seed, n=2)
        picks = tf.random.stateless_uniform(
            [n], seed=pick_seed, maxval=self._num_draws, dtype=tf.int32
        )
        draws = tf.nest.map_structure(lambda part: tf.gather(part, picks), self._draws)
        return outcome_of_each(self._likelihood, draws, n, sample_seed)

    def _cdf(self, value: Structure) -> tf.Tensor:
        try:
            shares = over_draws(lambda draw: _each(self._likelihood(draw)).cdf(value), self._draws)
            return tf.reduce_mean(shares, axis=0)
        except NotImplementedError:
            name = type(_each(self._component)).__name__
            raise NotImplementedError(
                f"{name} has no cdf: take quantiles and shares of sample(1000)."
            ) from None

    def quantile(
        self, value: tf.Tensor | float, name: str = "quantile", **kwargs: object
    ) -> tf.Tensor:
        """Returns quantiles of each outcome.

        A quantile of counts is the smallest value whose `cdf` reaches the probability.

        Args:
          value: Probabilities in [0, 1], of a shape that broadcasts with the batch.
          name: The name of the operation.
          **kwargs: Further arguments of TFP's `quantile`.
        """
        # TFP would cast an array of probabilities to the counts' integer dtype.
        return super().quantile(tf.cast(value, self._kind_of_parameters()), name=name, **kwargs)

    def _quantile(self, value: tf.Tensor) -> tf.Tensor:
        outcome = _each(self._component)
        if tf.nest.is_nested(self.dtype) or outcome.event_shape.rank != 0:
            raise NotImplementedError(
                "quantile: outcomes depend on each other here; take quantiles of sample(num)."
            )
        dtype = tf.as_dtype(self.dtype)
        bijector = outcome.experimental_default_event_space_bijector()
        kind = self._kind_of_parameters()
        value = tf.cast(value, kind) + tf.zeros(outcome.batch_shape_tensor(), kind)

        def outcome_at(place: tf.Tensor) -> tf.Tensor:
            """Returns the outcome at a place on the real line."""
            return tf.cast(place if bijector is None else bijector.forward(place), dtype)

        def below(place: tf.Tensor) -> tf.Tensor:
            cdf = self._cdf(outcome_at(place))
            # NaN, as outside the support of a draw, counts as below. TensorFlow rewrites
            # `not (a >= b)` to `a < b`, which is false for NaN.
            return tf.math.is_nan(cdf) | (cdf < value)

        def step(low: tf.Tensor, high: tf.Tensor) -> list[tf.Tensor]:
            no_low = tf.math.is_inf(low)
            no_high = tf.math.is_inf(high)
            doubled = tf.where(no_low, tf.minimum(2.0 * high, -1.0), tf.maximum(2.0 * low, 1.0))
            middle = tf.where(no_low | no_high, doubled, (low + high) / 2.0)
            middle = tf.where(no_low & no_high, tf.zeros_like(low), middle)
            middle = tf.floor(middle) if bijector is None else middle
            under = below(middle)
            return [tf.where(under, middle, low), tf.where(under, high, middle)]

        def search() -> tf.Tensor:
            ends = [
                tf.fill(tf.shape(value), tf.constant(end, kind)) for end in (-math.inf, math.inf)
            ]
            _, high = tf.while_loop(lambda *_: True, step, ends, maximum_iterations=_SEARCH)
            return outcome_at(high)

        return as_graph(search)

    def _mode(self) -> Structure:
        if has_classes(self._component):
            return tf.cast(tf.argmax(self._mean(), axis=-1), self.dtype)
        modes = over_draws(lambda draw: self._likelihood(draw).mode(), self._draws)
        logs = as_graph(
            lambda: tf.map_fn(self._log_prob, modes, fn_output_signature=self._kind_of_parameters())
        )
        best = tf.one_hot(
            tf.argmax(logs, axis=0), self._num_draws, axis=0, on_value=True, off_value=False
        )
        event_dims = tf.ones([tf.rank(modes) - tf.rank(best)], tf.int32)
        best = tf.reshape(best, tf.concat([tf.shape(best), event_dims], axis=0))
        return tf.reduce_sum(tf.where(best, modes, tf.zeros_like(modes)), axis=0)

    def _kind_of_parameters(self) -> tf.DType:
        return tf.nest.flatten(self._draws)[0].dtype

    def interval(self, level: float = 0.9) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the ends of the equal-tailed prediction interval of each outcome.

        The likelihood must have a `cdf`.

        Args:
          level: The interval's probability, in (0, 1); a lower bound of it for counts and classes.

        Raises:
          ValueError: The level is not in (0, 1).
        """
        if not 0.0 < level < 1.0:
            raise ValueError(f"level={level!r} must lie in (0, 1).")
        rank = _each(self._component).batch_shape.rank
        ends = np.reshape([(1.0 - level) / 2.0, (1.0 + level) / 2.0], [2] + [1] * rank)
        lower, upper = tf.unstack(self.quantile(tf.constant(ends, self._kind_of_parameters())))
        return lower, upper


def _each(distribution: tfd.Distribution) -> tfd.Distribution:
    """Returns the distribution of single outcomes of a `tfd.Independent`."""
    if isinstance(distribution, tfd.Independent):
        return _each(distribution.distribution)
    return distribution


def _first(draws: Structure) -> Structure:
    """Returns the first of several draws."""
    return tf.nest.map_structure(lambda part: part[0], draws)


def posterior_draws(
    posterior: tfd.Distribution, num: tf.Tensor | int, seed: tf.Tensor | int | None
) -> Structure:
    """Returns draws from a posterior, in the first dimension.

    Args:
      posterior: A distribution over the parameters.
      num: The number of draws.
      seed: A number, None for fresh draws, or an int32 tensor of shape [2], a seed of TFP.
    """
    if not tf.is_tensor(seed):
        seed = _random.tfp_seed(_random.new_key(seed))
    with surrogates.without_loop_warnings():
        return posterior.sample(num, seed=seed)
