"""Local latents in a `DPVI` likelihood: summed out, or fitted within the record's own loss.

They are never released. A local latent is no parameter of the prior: released with the shared ones,
it would carry its record's own gradient. Each function returns a TFP distribution of a record given
the shared parameters, for use in `likelihood`. Its density reads no other record and no variable,
so that `DPVI`'s guarantee is unchanged; it samples from the same model, so that the paired clip
applies.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tfp_dpvi import _validate as check
from tfp_dpvi._tf import Derived, Structure, tf, tfd, tfp

__all__ = [
    "UnitLatent",
    "Variational",
    "enumeration",
    "quadrature",
    "unit_normal",
    "unit_quadrature",
]

_MOST_POINTS = 10_000


def quadrature(
    conditional: Callable[[tf.Tensor], tfd.Distribution],
    *,
    dimension: int | None = None,
    num_points: int = 20,
    dtype: tf.DType | str = "float32",
) -> tfd.MixtureSameFamily:
    """Sums out a standard normal latent of each record by Gauss-Hermite quadrature.

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
        dimension runs over the points: batch shape [P], or [n, P] if it depends on a batch x of n
        records. For another mean and scale use `loc + scale * z`.
      dimension: None for a scalar z, of shape [P]; d for z of shape [P, d]. P is `num_points` to
        the power of d.
      num_points: The points in each dimension. Exact for polynomials of degree below 2
        `num_points`; a likelihood much narrower than the spacing of the points (about 0.5 near 0
        for 20) needs more.
      dtype: The float type of the prior.

    Raises:
      ValueError: There are too many points, or the batch shape of `conditional` does not end with
        them.
    """
    check.count("num_points", num_points, 1)
    points, weights = np.polynomial.hermite_e.hermegauss(num_points)
    power = 1 if dimension is None else check.count("dimension", dimension, 1)
    if num_points**power > _MOST_POINTS:
        raise ValueError(
            f"num_points={num_points} in dimension={power}: use fewer than {_MOST_POINTS} points, "
            "or Variational."
        )
    grid = np.array([*itertools.product(points, repeat=power)])
    log_weights = itertools.product(np.log(weights), repeat=power)
    logs = np.array([math.fsum(point) for point in log_weights])
    z = tf.constant(grid[:, 0] if dimension is None else grid, dtype)
    return _mixture(conditional(z), tf.constant(logs, dtype), len(grid))


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
    if combinations > _MOST_POINTS:
        raise ValueError(
            f"prior has {combinations} combinations of latents: sum out fewer than {_MOST_POINTS}."
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


class UnitLatent(Derived):
    """The distribution of a row whose latent is shared by all rows of its person.

    By itself it is the row's marginal distribution, as predictions of new persons need it; `fit`
    with `unit_ids` takes all rows of a person together.

    ```python
    >>> isinstance(unit_normal(tf.zeros([2]), 1.0, 1.0), UnitLatent)
    True

    ```
    """

    def of_units(self, mask: tf.Tensor) -> tfd.Distribution:
        """Returns the joint distribution of the outcomes of n persons.

        Args:
          mask: Bool of shape [n, m], False for rows that count for nothing; the n m rows are those
            of the batch.

        Returns:
          A distribution with batch shape [n] and event shape [m, ...].
        """
        raise NotImplementedError


def unit_quadrature(
    conditional: Callable[[tf.Tensor], tfd.Distribution],
    *,
    dimension: int | None = None,
    num_points: int = 20,
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
      conditional: As for `quadrature`, of rows.
      dimension: As for `quadrature`; 2 for an intercept and a slope, `z[:, 0]` and `z[:, 1]`.
      num_points: As for `quadrature`. The likelihood of all rows of a person must not be much
        narrower than the spacing of the points: for a normal outcome use `unit_normal`.
      dtype: The float type of the prior.

    Raises:
      ValueError: As for `quadrature`.
    """
    mixture = quadrature(conditional, dimension=dimension, num_points=num_points, dtype=dtype)
    return _UnitMixture(mixture)


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
    return _UnitNormal(loc, scale, unit_scale)


class _UnitMixture(UnitLatent):
    """See `unit_quadrature`."""

    def __init__(self, mixture: tfd.MixtureSameFamily, *, name: str = "UnitMixture") -> None:
        parameters = dict(locals())
        self._mixture = mixture
        super().__init__(mixture, parameters, name)

    def _log_prob(self, value: Structure) -> tf.Tensor:
        return self._mixture.log_prob(value)

    def _sample_n(self, n: tf.Tensor | int, seed: tf.Tensor | None = None) -> Structure:
        return self._mixture.sample(n, seed=seed)

    def _mean(self) -> tf.Tensor:
        return self._mixture.mean()

    def of_units(self, mask: tf.Tensor) -> tfd.Distribution:
        return _MixtureOfUnits(self._mixture, mask)


class _OfUnits(Derived):
    """Outcomes of n persons' m rows."""

    def __init__(
        self, like: tfd.Distribution, mask: tf.Tensor, parameters: dict[str, Any], name: str
    ) -> None:
        self._mask = tf.convert_to_tensor(mask)
        super().__init__(like, parameters, name)

    def _batch_shape(self) -> tf.TensorShape:
        return self._mask.shape[:1]

    def _batch_shape_tensor(self) -> tf.Tensor:
        return tf.shape(self._mask)[:1]

    def _event_shape(self) -> tf.TensorShape:
        return self._mask.shape[1:].concatenate(super()._event_shape())

    def _event_shape_tensor(self) -> tf.Tensor:
        return tf.concat([tf.shape(self._mask)[1:], super()._event_shape_tensor()], axis=0)


class _MixtureOfUnits(_OfUnits):
    """Each person has one value of the latent, for all rows."""

    def __init__(
        self, mixture: tfd.MixtureSameFamily, mask: tf.Tensor, *, name: str = "MixtureOfUnits"
    ) -> None:
        parameters = dict(locals())
        self._values = mixture.mixture_distribution
        self._rows = mixture.components_distribution
        super().__init__(mixture, mask, parameters, name)

    def _log_prob(self, value: tf.Tensor) -> tf.Tensor:
        event = self._rows.event_shape
        # [n m, values of the latent].
        logs = self._rows.log_prob(tf.reshape(value, [-1, 1, *event]))
        num = logs.shape[1]
        logs = tf.reshape(logs, [-1, self._mask.shape[1], num])
        logs = tf.where(self._mask[:, :, None], logs, tf.zeros_like(logs))
        weights = tf.math.log_softmax(self._values.logits_parameter())
        return tf.reduce_logsumexp(weights + tf.reduce_sum(logs, axis=1), axis=1)

    def _sample_n(self, n: tf.Tensor | int, seed: tf.Tensor | None = None) -> tf.Tensor:
        first, second = tfp.random.split_seed(tfp.random.sanitize_seed(seed), n=2)
        persons = tf.shape(self._mask)
        place = self._values.sample([n, persons[0]], seed=first)
        drawn = self._rows.sample(n, seed=second)
        num = self._rows.batch_shape[1]
        event = self._rows.event_shape_tensor()
        drawn = tf.reshape(drawn, tf.concat([[n], persons, [num], event], axis=0))
        place = tf.broadcast_to(place[:, :, None], tf.concat([[n], persons], axis=0))
        return tf.gather(drawn, place, axis=3, batch_dims=3)


class _UnitNormal(UnitLatent):
    """See `unit_normal`."""

    def __init__(
        self, loc: tf.Tensor, scale: tf.Tensor, unit_scale: tf.Tensor, *, name: str = "UnitNormal"
    ) -> None:
        parameters = dict(locals())
        self._scale = scale
        self._unit_scale = unit_scale
        self._row = tfd.Normal(loc, tf.sqrt(tf.square(scale) + tf.square(unit_scale)))
        super().__init__(self._row, parameters, name)

    def _log_prob(self, value: tf.Tensor) -> tf.Tensor:
        return self._row.log_prob(value)

    def _sample_n(self, n: tf.Tensor | int, seed: tf.Tensor | None = None) -> tf.Tensor:
        return self._row.sample(n, seed=seed)

    def _mean(self) -> tf.Tensor:
        return self._row.mean()

    def _variance(self) -> tf.Tensor:
        return self._row.variance()

    def _stddev(self) -> tf.Tensor:
        return self._row.stddev()

    def of_units(self, mask: tf.Tensor) -> tfd.Distribution:
        return _NormalOfUnits(self._row, mask, self._scale, self._unit_scale)


class _NormalOfUnits(_OfUnits):
    """Normal outcomes with the covariance `scale^2 I + unit_scale^2` within a person."""

    def __init__(
        self,
        row: tfd.Normal,
        mask: tf.Tensor,
        scale: tf.Tensor,
        unit_scale: tf.Tensor,
        *,
        name: str = "NormalOfUnits",
    ) -> None:
        parameters = dict(locals())
        self._loc = row.loc
        self._scale = tf.convert_to_tensor(scale)
        self._unit_scale = tf.convert_to_tensor(unit_scale)
        super().__init__(row, mask, parameters, name)

    def _log_prob(self, value: tf.Tensor) -> tf.Tensor:
        away = value - tf.reshape(self._loc, tf.shape(self._mask))
        away = tf.where(self._mask, away, tf.zeros_like(away))
        num = tf.reduce_sum(tf.cast(self._mask, away.dtype), axis=1)
        within = tf.square(self._scale)
        between = tf.square(self._unit_scale)
        whole = within + num * between
        mean = tf.math.divide_no_nan(tf.reduce_sum(away, axis=1), num)
        # Within and between persons apart: a difference of squares would lose digits.
        rest = tf.where(self._mask, away - mean[:, None], tf.zeros_like(away))
        square = tf.reduce_sum(tf.square(rest), axis=1) / within + num * tf.square(mean) / whole
        logs = num * math.log(2.0 * math.pi) + tf.math.log(whole)
        logs += (num - 1.0) * tf.math.log(within)
        return -0.5 * (square + logs)

    def _sample_n(self, n: tf.Tensor | int, seed: tf.Tensor | None = None) -> tf.Tensor:
        first, second = tfp.random.split_seed(tfp.random.sanitize_seed(seed), n=2)
        shape = tf.concat([[n], tf.shape(self._mask)], axis=0)
        dtype = self._loc.dtype
        person = tf.random.stateless_normal(shape[:2], first, dtype=dtype)[:, :, None]
        row = tf.random.stateless_normal(shape, second, dtype=dtype)
        loc = tf.reshape(self._loc, tf.shape(self._mask))
        return loc + self._unit_scale * person + self._scale * row


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
