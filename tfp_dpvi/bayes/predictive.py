"""The posterior predictive distribution as a TFP distribution."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence

import numpy as np

from tfp_dpvi import _random, surrogates
from tfp_dpvi._tf import Derived, Structure, map_apart, operations_since, tf, tfd, tfp

_SEARCH = (
    100  # Steps of the search for a quantile on the real line: doublings from 1, then bisections.
)
# Operations that TensorFlow cannot map over draws and then, with a gradient, over records.
_UNMAPPED = re.compile("(Stateless)?While$|Segment|Where$|Unique")


class _UnmappedError(Exception):
    """Raised while a function is traced that has a `_UNMAPPED`."""


def over_draws(function: Callable[[Structure], tf.Tensor], draws: Structure) -> tf.Tensor:
    """Applies `function` to each draw and stacks the results; `draws` has the draws in its first dimension."""
    if tf.nest.flatten(draws)[0].shape[0] == 1:  # A map takes longer to trace.
        return as_graph(
            lambda: function(tf.nest.map_structure(lambda part: part[0], draws))[tf.newaxis]
        )
    return as_graph(lambda: map_apart(function, draws))


def over_draws_of_step(function: Callable[[Structure], tf.Tensor], draws: Structure) -> tf.Tensor:
    """Returns `over_draws` with a gradient: draw by draw if `function` has loops, segments or shapes that depend on the draw."""

    def traced(draw: Structure) -> tf.Tensor:
        graph = tf.compat.v1.get_default_graph()
        num_known, found = len(graph.get_operations()), function(draw)
        if any(_UNMAPPED.match(one.type) for one in operations_since(graph, num_known)):
            raise _UnmappedError
        return found

    try:
        return over_draws(traced, draws)
    except _UnmappedError:
        apart = [tf.unstack(part) for part in tf.nest.flatten(draws)]
        return tf.stack(
            [function(tf.nest.pack_sequence_as(draws, one)) for one in zip(*apart, strict=True)]
        )


def as_graph(function: Callable[[], Structure]) -> Structure:
    """Calls `function` in one graph: eager maps warn of retracing, and TFP's caches of joint bijectors print errors."""
    if not tf.executing_eagerly():
        return function()
    return tf.function(function, autograph=False).get_concrete_function()()


def mean_of(distribution: tfd.Distribution) -> tf.Tensor:
    """Returns the mean of a likelihood, or class probabilities of a categorical or ordinal one."""
    one = _each(distribution)
    if isinstance(one, tfd.OrderedLogistic):
        return one.categorical_probs()
    return one.probs_parameter() if isinstance(one, tfd.Categorical) else one.mean()


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
    """Returns one outcome, or outcomes of a shape, for each of `num` parameter draws, stacked."""
    seeds = tf.convert_to_tensor(tfp.random.split_seed(seed, n=num))

    def one(pair: tuple[Structure, tf.Tensor]) -> Structure:
        return likelihood(pair[0]).sample(shape, seed=pair[1])

    dtype = likelihood(tf.nest.map_structure(lambda part: part[0], draws)).dtype
    return as_graph(lambda: tf.map_fn(one, (draws, seeds), fn_output_signature=dtype))


class PosteriorPredictive(Derived):
    """The mixture `p(y | x, data) ~ (1/S) sum_s p(y | x, theta_s)` over S draws from the posterior.

    The batch has one entry for each row of `x`. `log_prob`, `mean`, `variance` and `sample` work if the likelihood has them, and
    so do `cdf`, `quantile` and `interval`, for each outcome of a `tfd.Independent` by itself. `mode` is the most probable of the
    draws' modes, or the most probable class. Each sample uses one posterior draw for all records, so that samples are joint.

    Args:
      likelihood: posterior draw -> TFP distribution over all records at once.
      draws: structure of tensors with S draws in the first dimension.
      num_draws: S.

    #### Formal guarantee

    A function of the released posterior and of `x` alone: post-processing, at no further cost.
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
        self._likelihood, self._num_draws = likelihood, num_draws
        self._draws = tf.nest.map_structure(tf.convert_to_tensor, draws)
        self._one = likelihood(tf.nest.map_structure(lambda part: part[0], self._draws))
        super().__init__(self._one, parameters, name)

    @property
    def num_draws(self) -> int:
        """The number S of posterior draws in the mixture."""
        return self._num_draws

    def _log_prob(self, value: Structure) -> tf.Tensor:
        logs = over_draws(lambda draw: self._likelihood(draw).log_prob(value), self._draws)
        return tf.reduce_logsumexp(logs, axis=0) - math.log(self._num_draws)

    def _mean(self) -> tf.Tensor:
        return tf.reduce_mean(
            over_draws(lambda draw: mean_of(self._likelihood(draw)), self._draws), axis=0
        )

    def _variance(self) -> tf.Tensor:
        if isinstance(self._one, tfd.Categorical):
            raise NotImplementedError(
                "A categorical likelihood has no variance: use the class probabilities, mean()."
            )

        def moments(draw: Structure) -> tuple[tf.Tensor, tf.Tensor]:
            one = self._likelihood(draw)
            return one.mean(), one.variance()

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
            return tf.reduce_mean(
                over_draws(lambda draw: _each(self._likelihood(draw)).cdf(value), self._draws),
                axis=0,
            )
        except NotImplementedError:
            one = type(_each(self._one)).__name__
            raise NotImplementedError(
                f"{one} has no cdf: take quantiles and shares of sample(1000)."
            ) from None

    def quantile(
        self, value: tf.Tensor | float, name: str = "quantile", **kwargs: object
    ) -> tf.Tensor:
        """Returns quantiles of each outcome; for counts, the smallest value whose `cdf` reaches the probability `value`."""
        # TFP would cast an array of probabilities to the counts' integer dtype.
        return super().quantile(tf.cast(value, self._kind_of_parameters()), name=name, **kwargs)

    def _quantile(self, value: tf.Tensor) -> tf.Tensor:
        one = _each(self._one)
        if tf.nest.is_nested(self.dtype) or one.event_shape.rank != 0:
            raise NotImplementedError(
                "quantile: outcomes depend on each other here; take quantiles of sample(num)."
            )
        dtype = tf.as_dtype(self.dtype)
        bijector = one.experimental_default_event_space_bijector()
        kind = self._kind_of_parameters()
        value = tf.cast(value, kind) + tf.zeros(one.batch_shape_tensor(), kind)

        def below(place: tf.Tensor) -> tf.Tensor:
            point = tf.cast(place if bijector is None else bijector.forward(place), dtype)
            cdf = self._cdf(point)
            # NaN, as outside the support of a draw, counts as below. TensorFlow rewrites
            # `not (a >= b)` to `a < b`, which is false for NaN.
            return tf.math.is_nan(cdf) | (cdf < value)

        def step(low: tf.Tensor, high: tf.Tensor) -> list[tf.Tensor]:
            grown = tf.where(
                tf.math.is_inf(low), tf.minimum(2.0 * high, -1.0), tf.maximum(2.0 * low, 1.0)
            )
            unknown = tf.math.is_inf(low) & tf.math.is_inf(high)
            middle = tf.where(tf.math.is_inf(low) | tf.math.is_inf(high), grown, (low + high) / 2.0)
            middle = tf.where(unknown, tf.zeros_like(low), middle)
            middle = tf.floor(middle) if bijector is None else middle
            under = below(middle)
            return [tf.where(under, middle, low), tf.where(under, high, middle)]

        def found() -> tf.Tensor:
            ends = [
                tf.fill(tf.shape(value), tf.constant(end, kind)) for end in (-math.inf, math.inf)
            ]
            _, high = tf.while_loop(lambda *_: True, step, ends, maximum_iterations=_SEARCH)
            return tf.cast(high if bijector is None else bijector.forward(high), dtype)

        return as_graph(found)

    def _mode(self) -> Structure:
        if has_classes(self._one):
            return tf.cast(tf.argmax(self._mean(), axis=-1), self.dtype)
        modes = over_draws(lambda draw: self._likelihood(draw).mode(), self._draws)
        logs = as_graph(
            lambda: tf.map_fn(self._log_prob, modes, fn_output_signature=self._kind_of_parameters())
        )
        best = tf.one_hot(
            tf.argmax(logs, axis=0), self._num_draws, axis=0, on_value=True, off_value=False
        )
        best = tf.reshape(
            best,
            tf.concat(
                [tf.shape(best), tf.ones([tf.rank(modes) - tf.rank(best)], tf.int32)], axis=0
            ),
        )
        return tf.reduce_sum(tf.where(best, modes, tf.zeros_like(modes)), axis=0)

    def _kind_of_parameters(self) -> tf.DType:
        return tf.nest.flatten(self._draws)[0].dtype

    def interval(self, level: float = 0.9) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the ends of the equal-tailed prediction interval of each outcome, if the likelihood has a `cdf`.

        `level` is its probability, in (0, 1); a lower bound for counts and classes.
        """
        if not 0.0 < level < 1.0:
            raise ValueError(f"level={level!r} must lie in (0, 1).")
        ends = np.reshape(
            [(1.0 - level) / 2.0, (1.0 + level) / 2.0],
            [2] + [1] * _each(self._one).batch_shape.rank,
        )
        lower, upper = tf.unstack(self.quantile(tf.constant(ends, self._kind_of_parameters())))
        return lower, upper


def _each(distribution: tfd.Distribution) -> tfd.Distribution:
    """Returns the distribution of single outcomes of a `tfd.Independent`."""
    return (
        _each(distribution.distribution)
        if isinstance(distribution, tfd.Independent)
        else distribution
    )


def posterior_draws(
    posterior: tfd.Distribution, num: tf.Tensor | int, seed: tf.Tensor | int | None
) -> Structure:
    """Returns `num` draws in the first dimension; the seed is a number, None, or an int32 tensor of shape [2]."""
    if not tf.is_tensor(seed):
        seed = _random.tfp_seed(_random.new_key(seed))
    with surrogates.without_loop_warnings():
        return posterior.sample(num, seed=seed)
