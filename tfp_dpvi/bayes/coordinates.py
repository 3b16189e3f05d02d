"""The parameters of a prior as one vector on the real line."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
import tree

from tfp_dpvi import surrogates
from tfp_dpvi._tf import Structure, function_of_model, tf, tfd, tfp
from tfp_dpvi.bayes.model import LIKELIHOOD_ERRORS
from tfp_dpvi.bayes.predictive import as_graph

LogDensity = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
"""Values and gradients at points of shape [n, d]."""

# A multiple of this many points is evaluated at once.
_NUM_TOGETHER = 16


class Coordinates:
    """A prior's parameters, unconstrained and flat.

    The parts follow each other in the order of `tf.nest.flatten`.

    Args:
      prior: The prior, joint or single.
      log_scales: Whether positive parameters have logarithms as coordinates, also where TFP's
        default is the inverse of softplus: a change of units then shifts them.

    Raises:
      ValueError: TFP has no bijector from its support to the real line.

    ```python
    >>> from tfp_dpvi._tf import tf, tfd
    >>> coordinates = Coordinates(tfd.LogNormal(tf.zeros([2]), 1.0))
    >>> coordinates.num, coordinates.names
    (2, ['parameter[0]', 'parameter[1]'])
    >>> coordinates.flatten_one(tf.ones([2])).tolist()
    [0.0, 0.0]
    >>> Coordinates(tfd.HalfNormal(1.0), log_scales=True).flatten_one(tf.ones([])).tolist()
    [0.0]

    ```
    """

    def __init__(self, prior: tfd.Distribution, *, log_scales: bool = False) -> None:
        self._prior = prior
        self.dtype = surrogates.float_dtype(prior)
        to_support = surrogates.log_scale_bijector if log_scales else surrogates.event_bijector
        self._to_support = to_support(prior)
        start = as_graph(lambda: self._to_support.inverse(prior.sample(seed=tf.constant([0, 0]))))
        self._like = tf.nest.map_structure(tf.zeros_like, start)
        self._shapes = [tuple(part.shape) for part in tf.nest.flatten(self._like)]
        self.sizes = [int(np.prod(shape)) for shape in self._shapes]
        self.num = sum(self.sizes)

    def broadcasts(self) -> bool:
        """Returns whether the prior draws several values at once, each with its own density."""
        num = 7
        try:
            draws = self.prior_draws(num)
            # The trace that fits use.
            together, _ = self.log_density(draws)
        except (*LIKELIHOOD_ERRORS, tf.errors.OpError):
            return False
        if together.shape != (num,):
            return False
        # Cheaper to trace than a loop.
        traced = tf.function(self.log_prior, autograph=False)
        alone = np.array([traced(draw) for draw in tf.constant(draws, self.dtype)])
        return bool(np.allclose(together, alone, rtol=1e-3, equal_nan=True))

    def flatten(self, params: Structure) -> list[tf.Tensor]:
        """Returns the parts of one value of the parameters, as vectors on the real line."""
        return [tf.reshape(part, [-1]) for part in tf.nest.flatten(self._inverse(params))]

    def flatten_batch(self, params: Structure) -> list[tf.Tensor]:
        """Returns the parts of draws, which run over the first dimension."""
        flat = zip(tf.nest.flatten(self._inverse(params)), self.sizes, strict=True)
        return [tf.reshape(part, [-1, size]) for part, size in flat]

    def flatten_one(self, params: Structure) -> np.ndarray:
        """Returns one value of the parameters as a vector."""
        vector: np.ndarray = tf.concat(self.flatten(params), axis=0).numpy().astype(np.float64)
        return vector

    def constrain(self, parts: Sequence[tf.Tensor]) -> Structure:
        """Returns the parameters, from vectors of shape [..., size]."""
        return self._to_support.forward(self._unflat(parts))

    def is_real(self, part: int) -> bool:
        """Returns whether a part of the parameters has no constraint.

        Args:
          part: Its number in the order of `tf.nest.flatten`.
        """
        return self._are_real[part]

    @functools.cached_property
    def _are_real(self) -> list[bool]:
        points = [tf.linspace(tf.constant(-1.0, self.dtype), 2.0, size) for size in self.sizes]
        constrained = tf.nest.flatten(as_graph(lambda: self.constrain(points)))
        return [
            np.array_equal(np.ravel(after), before)
            for before, after in zip(points, constrained, strict=True)
        ]

    def prior_draws(self, num: int, seed: Sequence[int] | np.ndarray = (0, 3)) -> np.ndarray:
        """Returns draws from the prior as vectors on the real line, float64 of shape [num, D].

        Args:
          num: The number of draws.
          seed: A seed of TFP, two integers.
        """
        parts = self.flatten_batch(self._prior.sample(num, seed=tf.constant(seed, tf.int32)))
        draws: np.ndarray = tf.concat(parts, axis=-1).numpy().astype(np.float64)
        return draws

    def log_prior(self, vector: tf.Tensor) -> tf.Tensor:
        """Returns the prior's log density on the real line for vectors of shape [..., num]."""
        parts = self._unflat(tf.split(vector, self.sizes, axis=-1))
        ranks = tf.nest.map_structure(lambda part: part.shape.rank, self._like)
        volume = self._to_support.forward_log_det_jacobian(parts, event_ndims=ranks)
        return self._prior.log_prob(self._to_support.forward(parts)) + volume

    @property
    def names(self) -> list[str]:
        """The coordinates' names, such as "w[0]"."""
        return entry_names(self._like)

    @property
    def bijector(self) -> tfp.bijectors.Bijector:
        """The bijector from vectors of shape [num] to the parameters."""
        return surrogates.flat_bijector(self._to_support, self._like)

    @functools.cached_property
    def log_density(self) -> LogDensity:
        """The prior's log density and its gradient at points of shape [n, D], for NumPy."""

        @function_of_model
        def with_gradient(points: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(points)
                value = self.log_prior(points)
            return value, tape.gradient(value, points)

        def log_prior(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            num = len(points)
            # Of few shapes: each is traced.
            padded = np.concatenate([points, np.repeat(points[-1:], -num % _NUM_TOGETHER, axis=0)])
            parts = with_gradient(tf.constant(padded, self.dtype))
            value, gradient = (part.numpy().astype(np.float64)[:num] for part in parts)
            return value, gradient

        return log_prior

    def _inverse(self, params: Structure) -> Structure:
        return as_graph(lambda: self._to_support.inverse(params))

    def _unflat(self, parts: Sequence[tf.Tensor]) -> Structure:
        shaped = [
            tf.reshape(part, tf.concat([tf.shape(part)[:-1], np.array(shape, np.int32)], axis=0))
            for part, shape in zip(parts, self._shapes, strict=True)
        ]
        return tf.nest.pack_sequence_as(self._like, shaped)


def entry_names(structure: Structure) -> list[str]:
    """Returns a name for each entry of a structure of tensors, such as "w[3]".

    The names are in the order of `tf.nest.flatten`.
    """
    named = [
        ("/".join(map(str, path)) or "parameter", part)
        for path, part in tree.flatten_with_path(structure)
    ]
    return [
        f"{name}[{','.join(map(str, index))}]" if index else name
        for name, part in named
        for index in np.ndindex(*part.shape)
    ]
