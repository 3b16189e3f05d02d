"""Local latents in a `DPVI` likelihood: summed out, or fitted within the record's own loss.

They are never released. A local latent is no parameter of the prior: released with the shared ones,
it would carry its record's own gradient. Each function returns a TFP distribution of a record given
the shared parameters, for use in `likelihood`. Its density reads no other record and no variable,
so that `DPVI`'s guarantee is unchanged; it samples from the same model, so that the paired clip
applies.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence

import numpy as np

from tfp_dpvi import _deprecation
from tfp_dpvi import _validate as check
from tfp_dpvi._quadrature import MOST_POINTS, Latent, hermite_grid
from tfp_dpvi._tf import Derived, Structure, tf, tfd, tfp
from tfp_dpvi._unit_latents import IntegratedLatent, NormalLatent, RecordLatent, UnitLatent

__all__ = [
    "UnitLatent",
    "Variational",
    "enumeration",
    "quadrature",
    "unit_normal",
    "unit_quadrature",
]


def quadrature(
    conditional: Callable[[tf.Tensor], tfd.Distribution],
    *,
    dimension: int | None = None,
    num_points: int = 8,
    dtype: tf.DType | str = "float32",
) -> tfd.Distribution:
    """Sums out a standard normal latent of each record by adaptive Gauss-Hermite quadrature.

    Item response models have such latents:

    ```python
    >>> def likelihood(params):  # Answers to two items: ability z ~ Normal(0, 1) of each person.
    ...     def answers(z):
    ...         return tfd.Bernoulli(logits=params["a"] * (z[:, None] - params["b"]))
    ...     return quadrature(lambda z: tfd.Independent(answers(z), 1))
    >>> model = likelihood({"a": tf.ones([2]), "b": tf.zeros([2])})
    >>> print(f"{model.prob([1, 1]):.3f}")
    0.293
    >>> def plane(z):  # Two latents of each record, z of shape [P, 2].
    ...     return tfd.Normal(tf.reduce_sum(z, axis=-1), 1.0)
    >>> sums = quadrature(plane, dimension=2, num_points=5)
    >>> print(f"{sums.variance():.2f}")
    3.00

    ```

    Args:
      conditional: `conditional(z)` returns a TFP distribution of records given z. Its last batch
        dimension runs over the points: batch shape [P] for z of shape [P] if it reads no x, or
        [n, P] for z of shape [n, P] if it depends on a batch x of n records, as by
        `score[:, None] + z`. For another mean and scale use `loc + scale * z`.
      dimension: None for a scalar z; d for z of shape [P, d], or [n, P, d]. P is `num_points` to
        the power of d.
      num_points: The points in each dimension. They are moved to where the likelihood of each
        record lies, so that it may be as narrow as it likes; twice as many look for it.
        Of several peaks that are far apart, one counts, and not always the largest.
      dtype: The float type of the prior.

    Returns:
      A distribution of records. Its moments and its `cdf` are by fixed points.

    Raises:
      ValueError: There are too many points, or the batch shape of `conditional` does not end with
        them.
    """
    latent = _latent(conditional, dimension, num_points, dtype)
    row = _at_fixed_points(latent)
    if row.batch_shape.rank == 0 or latent.takes_points_of_rows(row.batch_shape[0]):
        return RecordLatent(row, latent)
    _deprecation.warn(
        "quadrature with points z of shape [P] for n records",
        "one with z of shape [n, P], moved to each record (write z[..., 0] and score[:, None] + z)",
    )
    return row


def _latent(
    conditional: Callable[[tf.Tensor], tfd.Distribution],
    dimension: int | None,
    num_points: int,
    dtype: tf.DType | str,
) -> Latent:
    count = check.count("num_points", num_points, 1)
    # Refused here if there are too many.
    hermite_grid(count, 1 if dimension is None else dimension)
    return Latent(conditional, count, dimension, tf.as_dtype(dtype))


def _at_fixed_points(latent: Latent) -> tfd.MixtureSameFamily:
    """Returns the mixture over points of the prior."""
    grid, logs = hermite_grid(latent.num_looking, latent.size)
    components = latent.given(tf.constant(grid, latent.dtype))
    return _mixture(components, tf.constant(logs, latent.dtype), len(grid))


def enumeration(
    prior: tfd.Distribution | Sequence[tfd.Distribution],
    conditional: Callable[..., tfd.Distribution],
) -> tfd.MixtureSameFamily:
    """Sums out discrete latents of each record: classes, hidden nodes of a Bayesian network.

    ```python
    >>> means = tf.constant([-1.0, 1.0])
    >>> mixture = enumeration(
    ...     tfd.Categorical(probs=[0.5, 0.5]), lambda k: tfd.Normal(tf.gather(means, k), 1.0)
    ... )
    >>> float(mixture.mean())
    0.0

    ```

    Args:
      prior: A `tfd.Categorical` or `tfd.Bernoulli` for one latent, or a sequence of independent
        ones. Its parameters may be shared ones, and may depend on a batch x of n records (batch
        shape [n]).
      conditional: `conditional(k, ...)` returns a TFP distribution of records given the latents,
        each an int32 tensor of shape [K] with K the number of combinations; its last batch
        dimension runs over these, as in `quadrature`.

    Raises:
      TypeError: A latent is neither categorical nor Bernoulli.
      ValueError: There are too many combinations, or the batch shape of `conditional` does not end
        with them.
    """
    priors = [*prior] if isinstance(prior, Sequence) else [prior]
    sizes = [_num_values(latent) for latent in priors]
    combinations = math.prod(sizes)
    if combinations > MOST_POINTS:
        raise ValueError(
            f"prior has {combinations} combinations of latents: sum out fewer than {MOST_POINTS}."
        )
    values = [tf.constant(part.reshape(-1), tf.int32) for part in np.indices(sizes)]
    logs = []
    for latent, value in zip(priors, values, strict=True):
        rank = latent.batch_shape.rank
        log_prob = latent.log_prob(tf.reshape(tf.cast(value, latent.dtype), [-1] + [1] * rank))
        logs.append(tf.transpose(log_prob, [*range(1, rank + 1), 0]))
    return _mixture(conditional(*values), functools.reduce(operator.add, logs), combinations)


def _mixture(components: tfd.Distribution, logits: tf.Tensor, num: int) -> tfd.MixtureSameFamily:
    if components.batch_shape.rank == 0 or components.batch_shape[-1] != num:
        raise ValueError(
            f"conditional returned batch shape {components.batch_shape}; its last dimension must "
            f"run over the {num} values of the latent. Use, for instance, x[:, None] * z, and "
            "wrap several outcomes in tfd.Independent(..., 1)."
        )
    return tfd.MixtureSameFamily(tfd.Categorical(logits=logits), components)


def _num_values(prior: tfd.Distribution) -> int:
    if isinstance(prior, tfd.Bernoulli):
        return 2
    if not isinstance(prior, tfd.Categorical):
        raise TypeError(
            "prior must be a tfd.Categorical or tfd.Bernoulli, or a sequence of these, got "
            f"{check.shown(prior)}."
        )
    parameter = prior.logits if prior.logits is not None else prior.probs
    return int(parameter.shape[-1])


def unit_quadrature(
    conditional: Callable[[tf.Tensor], tfd.Distribution],
    *,
    dimension: int | None = None,
    num_points: int = 8,
    dtype: tf.DType | str = "float32",
) -> UnitLatent:
    """Sums out a standard normal latent that all rows of a person share: a random intercept.

    ```python
    >>> def likelihood(params, x):  # Visits of persons, with an intercept of each person.
    ...     score = tf.linalg.matvec(x, params["w"])
    ...     return unit_quadrature(
    ...         lambda z: tfd.Bernoulli(logits=score[:, None] + params["sd"] * z, dtype=tf.float32)
    ...     )
    >>> visits = likelihood({"w": tf.zeros([1]), "sd": 2.0}, tf.ones([2, 1]))
    >>> visits.prob(tf.ones([2])).numpy().round(3).tolist()
    [0.5, 0.5]
    >>> person = visits.of_units(tf.constant([[True, True]]))
    >>> print(f"{person.prob(tf.ones([1, 2]))[0]:.3f}")  # Not a quarter: the rows are alike.
    0.349

    ```

    Args:
      conditional: As for `quadrature`, of rows; z has shape [n, P], since each person has points of
        its own, for n rows.
      dimension: As for `quadrature`; 2 for an intercept and a slope, `z[..., 0]` and `z[..., 1]`.
      num_points: The points in each dimension. They are moved to where the likelihood of all rows
        of a person lies, so that it may be as narrow as it likes; twice as many look for it.
        Of several peaks that are far apart, one counts, and not always the largest.
      dtype: The float type of the prior.

    Raises:
      ValueError: As for `quadrature`.
    """
    latent = _latent(conditional, dimension, num_points, dtype)
    return IntegratedLatent(RecordLatent(_at_fixed_points(latent), latent), latent)


def unit_normal(loc: tf.Tensor, scale: tf.Tensor, unit_scale: tf.Tensor) -> UnitLatent:
    """Integrates out a normal intercept that all rows of a person share, of normal outcomes.

    The outcomes of a person are `loc + unit_scale * z + scale * e`, with z ~ Normal(0, 1) of the
    person and e ~ Normal(0, 1) of the row. The density is in closed form, whatever the scales.

    ```python
    >>> visits = unit_normal(tf.zeros([2]), scale=1.0, unit_scale=1.0)
    >>> print(f"{visits.stddev()[0]:.3f}")
    1.414
    >>> person = visits.of_units(tf.constant([[True, True]]))
    >>> print(f"{person.log_prob(tf.ones([1, 2]))[0]:.3f}")
    -2.721

    ```

    Args:
      loc: Means of n rows, shape [n].
      scale: The residual standard deviation, a scalar.
      unit_scale: The standard deviation of persons' intercepts, a scalar.
    """
    return NormalLatent(loc, scale, unit_scale)


class Variational(Derived):
    """A record with a local latent whose normal factor is fitted within the record's loss.

    See Jälkö et al. 2017, section 3.1. `log_prob` is the record's local evidence lower bound
    `E_q[log p(y | z) + log p(z) - log q(z)]` with `q = Normal(m, diag(s^2))`. Starting at the
    prior's mean and scale, `num_steps` natural-gradient steps find m and s for this record and
    these shared parameters. Gradients in the shared parameters hold the factor fixed. No variable
    stores it: the record affects only its own clipped gradient.

    `sample` draws z from the prior and a record given z; `mean` averages over 256 fixed draws of z.
    Expectations over q use the cubature rule of degree three with 2 d points. For small d,
    `quadrature` is exact.

    ```python
    >>> def likelihood(params, x):  # A count with a random effect.
    ...     means = tf.linalg.matvec(x, params["w"])
    ...     return Variational(
    ...         tfd.Normal(0.0, params["tau"]), lambda z: tfd.Poisson(log_rate=means + z)
    ...     )
    >>> counts = likelihood({"w": tf.zeros([1]), "tau": 0.5}, tf.ones([3, 1]))
    >>> counts.log_prob([0.0, 1.0, 2.0]).shape
    TensorShape([3])

    ```

    Args:
      prior: The distribution of one record's latent on the real line: event shape [] or [d], batch
        shape [] or [n].
      conditional: `conditional(z)` returns a TFP distribution of records given z of shape [..., n]
        or [..., n, d], which must broadcast over leading dimensions.
      num_steps: The steps of the inner fit. Each reduces the error to a fifth if the record's
        posterior is nearly normal.
      name: The name of the ops.

    Raises:
      ValueError: The event shape of the prior is neither [] nor [d].
    """

    def __init__(
        self,
        prior: tfd.Distribution,
        conditional: Callable[[tf.Tensor], tfd.Distribution],
        *,
        num_steps: int = 8,
        name: str = "LocalVariational",
    ) -> None:
        parameters = dict(locals())
        check.count("num_steps", num_steps, 1)
        if prior.event_shape.rank not in (0, 1) or not prior.event_shape.is_fully_defined():
            raise ValueError(
                f"prior has event shape {prior.event_shape}; a record's latent has shape [] or [d]."
            )
        self._prior, self._conditional = prior, conditional
        self._num_steps = num_steps
        self._at_mean = conditional(prior.mean())
        super().__init__(self._at_mean, parameters, name)

    def _batch_shape(self) -> tf.TensorShape:
        return tf.broadcast_static_shape(self._prior.batch_shape, self._at_mean.batch_shape)

    def _batch_shape_tensor(self) -> tf.Tensor:
        return tf.broadcast_dynamic_shape(
            self._prior.batch_shape_tensor(), self._at_mean.batch_shape_tensor()
        )

    def _log_prob(self, value: Structure) -> tf.Tensor:
        scalar = self._prior.event_shape.rank == 0

        def log_joint(z: tf.Tensor) -> tf.Tensor:
            z = z[..., 0] if scalar else z
            return self._conditional(z).log_prob(value) + self._prior.log_prob(z)

        start = self._conditional(self._prior.mean()).log_prob(value)
        zeros = tf.zeros_like(start)[..., tf.newaxis]
        loc, scale = self._prior.mean(), self._prior.stddev()
        loc, scale = (
            part[..., tf.newaxis] + zeros if scalar else part + zeros for part in (loc, scale)
        )
        loc, scale = self._fitted(log_joint, tf.stop_gradient(loc), tf.stop_gradient(scale))
        bound = tf.reduce_mean(log_joint(self._points(loc, scale)[0]), axis=0)
        return bound + tf.reduce_sum(
            tf.math.log(scale) + 0.5 * (1 + math.log(2 * math.pi)), axis=-1
        )

    def _points(self, loc: tf.Tensor, scale: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the cubature's points, shape [2 d, n, d], and their standardised form."""
        size = loc.shape[-1]
        units = np.concatenate([np.eye(size), -np.eye(size)]) * math.sqrt(size)
        units = tf.reshape(
            tf.constant(units, loc.dtype), [2 * size] + [1] * (loc.shape.rank - 1) + [size]
        )
        return loc + scale * units, units

    def _fitted(
        self, log_joint: Callable[[tf.Tensor], tf.Tensor], loc: tf.Tensor, scale: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        # If the bound is not concave, a wide factor takes a step along the gradient.
        rate, least = 0.8, 1e-2 / scale**2
        precision = 1.0 / scale**2
        for _ in range(self._num_steps):
            z, units = self._points(loc, scale)
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(z)
                value = log_joint(z)
            gradient = tape.gradient(value, z)
            # Stein's identity gives the curvature from gradients.
            curvature = -tf.reduce_mean(gradient * units, axis=0) / scale
            precision = tf.stop_gradient(
                (1 - rate) * precision + rate * tf.maximum(curvature, least)
            )
            loc = tf.stop_gradient(loc + rate * tf.reduce_mean(gradient, axis=0) / precision)
            scale = tf.math.rsqrt(precision)
        return loc, scale

    def _draws_given_prior(self, shape: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        missing = self._batch_shape().rank - self._prior.batch_shape.rank
        batch = self._batch_shape_tensor()[:missing]
        return self._prior.sample(tf.concat([shape, batch], axis=0), seed=seed)

    def _sample_n(self, n: tf.Tensor | int, seed: tf.Tensor | None = None) -> Structure:
        first, second = tfp.random.split_seed(tfp.random.sanitize_seed(seed), n=2)
        z = self._draws_given_prior(tf.reshape(n, [1]), first)
        return self._conditional(z).sample(seed=second)

    def _mean(self) -> tf.Tensor:
        z = self._draws_given_prior(tf.constant([256]), tf.constant([0, 0]))
        return tf.reduce_mean(self._conditional(z).mean(), axis=0)
