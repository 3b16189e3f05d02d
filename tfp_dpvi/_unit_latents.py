"""A latent that all rows of a person share, such as a random intercept: integrated out.

The functions `unit_quadrature` and `unit_normal` return the distribution of a row; `of_units` is
the joint distribution of the outcomes of persons, with which persons are fitted.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tfp_dpvi import _validate as check
from tfp_dpvi._tf import Derived, Structure, tf, tfd, tfp

MOST_POINTS = 10_000
"""The most points of a quadrature."""

# Many points look for the integrand at first. Then few are moved so often, each time nearer by a
# factor of about 3.
_FEW_POINTS = 4
_NUM_MOVES = 4
# Where one point has all the weight, its integrand is taken to be so many gaps of points wide.
_WITHIN_GAP = 0.2
_WIDEST_GAP = 2.0


def hermite_grid(num_points: int, dimension: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the points of Gauss-Hermite quadrature and the logarithms of their weights.

    Args:
      num_points: The points in each dimension.
      dimension: The number d of dimensions.

    Returns:
      P points of shape [P, d], with P the power d of `num_points`, and P logarithms, both float64.

    Raises:
      ValueError: There are too many points.
    """
    check.count("num_points", num_points, 1)
    power = check.count("dimension", dimension, 1)
    if num_points**power > MOST_POINTS:
        raise ValueError(
            f"num_points: {num_points} points in each of {power} dimensions are more than "
            f"{MOST_POINTS}: use fewer, or Variational."
        )
    points, weights = np.polynomial.hermite_e.hermegauss(num_points)
    grid = np.array([*itertools.product(points, repeat=power)])
    log_weights = itertools.product(np.log(weights), repeat=power)
    return grid, np.array([math.fsum(point) for point in log_weights])


class UnitLatent(Derived):
    """The distribution of a row whose latent is shared by all rows of its person.

    By itself it is the row's marginal distribution, as predictions of new persons need it; `fit`
    with `unit_ids` takes all rows of a person together.

    ```python
    >>> from tfp_dpvi.local import unit_normal
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


class IntegratedLatent(UnitLatent):
    """See `tfp_dpvi.local.unit_quadrature`."""

    def __init__(
        self,
        row: tfd.MixtureSameFamily,
        conditional: Callable[[tf.Tensor], tfd.Distribution],
        *,
        num_points: int,
        dimension: int | None,
        name: str = "IntegratedLatent",
    ) -> None:
        parameters = dict(locals())
        self._row, self._conditional = row, conditional
        self._num_points, self._dimension = num_points, dimension
        super().__init__(row, parameters, name)

    def _log_prob(self, value: Structure) -> tf.Tensor:
        return self._row.log_prob(value)

    def _sample_n(self, n: tf.Tensor | int, seed: tf.Tensor | None = None) -> Structure:
        return self._row.sample(n, seed=seed)

    def _mean(self) -> tf.Tensor:
        return self._row.mean()

    def of_units(self, mask: tf.Tensor) -> tfd.Distribution:
        """See `UnitLatent`."""
        return _IntegratedOfUnits(
            self._row,
            self._conditional,
            mask,
            num_points=self._num_points,
            dimension=self._dimension,
        )


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


class _IntegratedOfUnits(_OfUnits):
    """Each person has one value of the latent, for all rows.

    The quadrature is adaptive (Liu and Pierce 1994): its points are moved and scaled to where the
    person's own integrand lies, by its moments at the points before. So a narrow likelihood, of
    many rows or of a large scale of the latent, needs no more points than a wide one. To gradients
    the points are constants: wherever they lie, they give the same integral.
    """

    def __init__(
        self,
        row: tfd.MixtureSameFamily,
        conditional: Callable[[tf.Tensor], tfd.Distribution],
        mask: tf.Tensor,
        *,
        num_points: int,
        dimension: int | None,
        name: str = "IntegratedOfUnits",
    ) -> None:
        parameters = dict(locals())
        self._conditional = conditional
        self._num_points, self._dimension = num_points, dimension
        self._latent_dtype = row.mixture_distribution.logits_parameter().dtype
        super().__init__(row, mask, parameters, name)

    def _log_prob(self, value: tf.Tensor) -> tf.Tensor:
        num, size = tf.shape(self._mask)[0], self._dimension or 1
        centre = tf.zeros([num, size], self._latent_dtype)
        root = tf.eye(size, batch_shape=[num], dtype=centre.dtype)
        for num_points in (2 * self._num_points, *[_FEW_POINTS] * _NUM_MOVES):
            z, logs = self._log_terms(value, centre, root, num_points)
            centre, root = _moments(z, tf.stop_gradient(logs), root, num_points)
        return tf.reduce_logsumexp(
            self._log_terms(value, centre, root, self._num_points)[1], axis=1
        )

    def _log_terms(
        self,
        value: tf.Tensor,
        centre: tf.Tensor,
        root: tf.Tensor,
        num_points: int,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns moved points, shape [n, P, d], and the logarithms of the sum's terms, [n, P]."""
        points, log_weights = (
            tf.constant(part, centre.dtype)
            for part in hermite_grid(num_points, self._dimension or 1)
        )
        z = centre[:, None] + tf.einsum("nij,pj->npi", root, points)
        rows = self._rows_given(z)
        logs = rows.log_prob(tf.reshape(value, [-1, 1, *rows.event_shape]))
        logs = tf.reshape(logs, [-1, self._mask.shape[1], z.shape[1]])
        logs = tf.where(self._mask[:, :, None], logs, tf.zeros_like(logs))
        # Normal densities at the moved points over those at the points, by the change's volume.
        squares = tf.reduce_sum(points**2, axis=-1) - tf.reduce_sum(z**2, axis=-1)
        volume = tf.reduce_sum(tf.math.log(tf.linalg.diag_part(root)), axis=-1)
        moved = tf.nn.log_softmax(log_weights) + 0.5 * squares + volume[:, None]
        return z, moved + tf.reduce_sum(logs, axis=1)

    def _rows_given(self, z: tf.Tensor) -> tfd.Distribution:
        """Returns the distribution of all rows given persons' values, of shape [n, P, d]."""
        shape = [tf.shape(z)[0], self._mask.shape[1], tf.shape(z)[1], z.shape[2]]
        z = tf.broadcast_to(z[:, None], shape)
        z = tf.reshape(z, [-1, shape[2], *([] if self._dimension is None else [z.shape[3]])])
        rows = self._conditional(z)
        if not rows.batch_shape.is_compatible_with([None, z.shape[1]]):
            raise ValueError(
                f"conditional returned batch shape {rows.batch_shape} for z of shape {z.shape}: "
                "each person has\npoints of its own. Use score[:, None] + z for n rows, and "
                "z[..., 0] for the first of several latents."
            )
        return rows

    def _sample_n(self, n: tf.Tensor | int, seed: tf.Tensor | None = None) -> tf.Tensor:
        first, second = tfp.random.split_seed(tfp.random.sanitize_seed(seed), n=2)
        shape = [tf.shape(self._mask)[0], n, self._dimension or 1]
        z = tf.random.stateless_normal(shape, first, dtype=self._latent_dtype)
        rows = self._rows_given(z)
        shape = tf.concat([tf.shape(self._mask), [n], rows.event_shape_tensor()], axis=0)
        drawn = tf.reshape(rows.sample(seed=second), shape)
        return tf.transpose(drawn, [2, 0, 1, *range(3, drawn.shape.rank)])


def _moments(
    z: tf.Tensor, logs: tf.Tensor, root: tf.Tensor, num_points: int
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the mean and a root of the covariance of persons' latents.

    Args:
      z: Points, shape [n, P, d].
      logs: Logarithms of their weights, shape [n, P].
      root: What the points were scaled by, shape [n, d, d].
      num_points: The number of points in each dimension. Where one has all the weight, the
        integrand may lie anywhere between its neighbours.
    """
    gap = np.diff(hermite_grid(num_points, 1)[0][:, 0]).min(initial=_WIDEST_GAP)
    floor = tf.constant(logs.dtype.min / 4.0, logs.dtype)
    # A density of 0 or NaN says nothing about where points should lie.
    logs = tf.maximum(tf.where(tf.math.is_nan(logs), floor, logs), floor)
    weights = tf.nn.softmax(logs, axis=1)
    centre = tf.einsum("np,npi->ni", weights, z)
    away = z - centre[:, None]
    covariance = tf.einsum("np,npi,npj->nij", weights, away, away)
    covariance += (_WITHIN_GAP * gap) ** 2 * tf.linalg.matmul(root, root, transpose_b=True)
    scale = tf.sqrt(covariance) if z.shape[2] == 1 else tf.linalg.cholesky(covariance)
    return tf.stop_gradient(centre), tf.stop_gradient(scale)


class NormalLatent(UnitLatent):
    """See `tfp_dpvi.local.unit_normal`."""

    def __init__(
        self, loc: tf.Tensor, scale: tf.Tensor, unit_scale: tf.Tensor, *, name: str = "NormalLatent"
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
        """See `UnitLatent`."""
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
