"""Adaptive Gauss-Hermite quadrature over a normal latent of each record or person.

The points are moved and scaled to where the integrand of a record or person lies (Liu and Pierce, A
note on Gauss-Hermite quadrature, 1994). So a narrow likelihood, of many rows or of a large scale of
the latent, needs no more points than a wide one. To gradients the points are constants: wherever
they lie, they give the same integral.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy import special

from tfp_dpvi import _validate as check
from tfp_dpvi._tf import tf, tfd

MOST_POINTS = 10_000
"""The most points of a quadrature."""

LogDensity = Callable[[tf.Tensor], tf.Tensor]

# Many points look for the integrand at first. Then a few in each dimension are moved so often.
_STENCIL = 3
_NUM_MOVES = 6
# Of the points' scale: the longest move, and the least and the largest change of the scale.
_LONGEST = 3.0
_LEAST_SCALE = 0.2
_MOST_SCALE = 2.0
# Of an integrand that is nothing, or no number.
_LEAST_LOG = -1e30
# The logarithm of the share of a point that has all the weight, so that points lie too far apart.
_MOST_WEIGHT = math.log(0.9)
# Where one point has all the weight, its integrand is taken to be so many gaps of points wide.
_WITHIN_GAP = 0.2


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


class Latent(NamedTuple):
    """A standard normal latent, and how it is integrated out.

    Attributes:
      conditional: `conditional(z)` returns the distribution of rows given z.
      num_points: The points in each dimension.
      dimension: None for a scalar z, or d.
      dtype: The float type of z.
    """

    conditional: Callable[[tf.Tensor], tfd.Distribution]
    num_points: int
    dimension: int | None
    dtype: tf.DType

    @property
    def size(self) -> int:
        """The number d of dimensions, 1 for a scalar z."""
        return self.dimension or 1

    @property
    def num_looking(self) -> int:
        """The points that look for the integrand: twice as many, unless these are too many."""
        most = 2 * self.num_points
        while most**self.size > MOST_POINTS:
            most -= 1
        return most

    def given(self, z: tf.Tensor) -> tfd.Distribution:
        """Returns the distribution of rows given points of shape [..., P, d]."""
        return self.conditional(z[..., 0] if self.dimension is None else z)

    def takes_points_of_rows(self, num: int | None) -> bool:
        """Returns whether `conditional` takes points of each of n records, shape [n, P].

        Args:
          num: The number n.
        """
        size = self.size + 1
        try:
            rows = self.given(tf.zeros([num or 1, size, self.size], self.dtype))
        except (ValueError, IndexError, tf.errors.InvalidArgumentError):
            return False
        return rows.batch_shape.is_compatible_with([num, size])

    def integral(self, log_density: LogDensity, num: tf.Tensor | int) -> tf.Tensor:
        """Returns the logarithms of n integrals over z, shape [n]; NaN where z is not found.

        Args:
          log_density: The logarithm of each integrand over the density of z, shape [n, P], at
            points of shape [n, P, d].
          num: The number n of integrals.
        """
        zeros = tf.zeros([num, self.size], self.dtype)
        root = tf.eye(self.size, batch_shape=[num], dtype=self.dtype)
        place = _Place(zeros, root, tf.reduce_sum(zeros, axis=1))
        place = place.with_moments(log_density, self.num_looking, one_peak=True)
        for _ in range(_NUM_MOVES):
            place = place.moved(tf.stop_gradient(place.log_integrand(log_density, _STENCIL)))
        if self.num_points > 1:
            # A skewed integrand is wider than its top says; one point says nothing of it.
            place = place.with_moments(log_density, self.num_points)
        logs = place.log_terms(log_density, self.num_points)
        total = tf.reduce_logsumexp(logs, axis=1)
        missed = tf.reduce_max(logs, axis=1) - total > _MOST_WEIGHT
        return tf.where(missed & (self.num_points > 1), tf.constant(math.nan, total.dtype), total)


class _Place(NamedTuple):
    """The points of n integrals, `centre + root u` for standard points u.

    Attributes:
      centre: Shape [n, d].
      root: Shape [n, d, d].
      volume: The logarithm of the determinant of the roots, shape [n].
    """

    centre: tf.Tensor
    root: tf.Tensor
    volume: tf.Tensor

    def log_integrand(self, log_density: LogDensity, num_points: int) -> tf.Tensor:
        """Returns the logarithms of the integrands but for a constant, shape [n, P]."""
        points = tf.constant(hermite_grid(num_points, self.centre.shape[1])[0], self.root.dtype)
        z = self.centre[:, None] + _times(points, self.root)
        return log_density(z) - 0.5 * tf.reduce_sum(z**2, axis=-1)

    def log_terms(self, log_density: LogDensity, num_points: int) -> tf.Tensor:
        """Returns the logarithms of the terms whose sums are the integrals, shape [n, P]."""
        points, logs = hermite_grid(num_points, self.centre.shape[1])
        logs = logs - special.logsumexp(logs) + 0.5 * np.sum(points**2, axis=1)
        logs = tf.constant(logs, self.root.dtype) + self.volume[:, None]
        return logs + self.log_integrand(log_density, num_points)

    def with_moments(
        self, log_density: LogDensity, num_points: int, *, one_peak: bool = False
    ) -> _Place:
        """Returns places at the integrands' means, with roots of their covariances.

        Args:
          log_density: The logarithm of each integrand over the density of z.
          num_points: The number of points in each dimension. If one has all the weight, the
            integrand may lie anywhere between its neighbours.
          one_peak: Whether to count only what lies within about a gap of the largest term: between
            two peaks there may be nothing.
        """
        size = self.centre.shape[1]
        logs = tf.stop_gradient(self.log_terms(log_density, num_points))
        grid = tf.constant(hermite_grid(num_points, size)[0], logs.dtype)
        gap = np.diff(hermite_grid(num_points, 1)[0][:, 0]).min(initial=1.0)
        logs = _bounded(logs)
        if one_peak:
            best = tf.gather(grid, tf.argmax(logs, axis=1))[:, None]
            logs -= 0.5 * tf.reduce_sum(((grid - best) / gap) ** 2, axis=2)
        weights = tf.nn.softmax(logs, axis=1)
        mean = tf.linalg.matmul(weights, grid)
        away = grid - mean[:, None]
        covariance = tf.linalg.matmul(weights[..., None] * away, away, transpose_a=True)
        covariance += (_WITHIN_GAP * gap) ** 2 * tf.eye(size, dtype=logs.dtype)
        root = tf.sqrt(covariance) if size == 1 else tf.linalg.cholesky(covariance)
        volume = tf.reduce_sum(tf.math.log(tf.linalg.diag_part(root)), axis=1)
        return _Place(
            tf.stop_gradient(self.centre + tf.linalg.matvec(self.root, mean)),
            tf.stop_gradient(tf.linalg.matmul(self.root, root)),
            tf.stop_gradient(self.volume + volume),
        )

    def moved(self, logs: tf.Tensor) -> _Place:
        """Returns a nearer place, by a Newton step from values alone.

        A parabola through the logarithm of the integrand says where its top is and how wide it is.
        Neither changes much at once: away from its top the logarithm is no parabola.

        Args:
          logs: `log_integrand` at the points of the stencil.
        """
        size = self.centre.shape[1]
        along, curvature = _parabola(logs, size)
        values, root = curvature[:, 0], self.root
        if size > 1:
            values, vectors = tf.linalg.eigh(curvature)
            along = tf.linalg.matvec(vectors, along, transpose_a=True)
            root = tf.linalg.matmul(root, vectors)
        precision = tf.maximum(-values, _MOST_SCALE**-2.0)
        step = along / precision
        scale = tf.maximum(tf.math.rsqrt(precision), _LEAST_SCALE)
        # Farther away longer steps are to follow.
        scale = tf.where(tf.abs(step) > _LONGEST, tf.constant(_MOST_SCALE, step.dtype), scale)
        step = tf.clip_by_value(step, -_LONGEST, _LONGEST)
        return _Place(
            tf.stop_gradient(self.centre + tf.reduce_sum(root * step[:, None], axis=2)),
            tf.stop_gradient(root * scale[:, None]),
            tf.stop_gradient(self.volume + tf.reduce_sum(tf.math.log(scale), axis=1)),
        )


def _times(points: tf.Tensor, root: tf.Tensor) -> tf.Tensor:
    """Returns `root u` for points u of shape [P, d] and roots of shape [n, d, d]: [n, P, d]."""
    if root.shape[-1] == 1:
        return points * root
    return tf.linalg.matmul(points, root, transpose_b=True)


def _parabola(logs: tf.Tensor, size: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the gradient, [n, d], and the curvature, [n, d, d], of logarithms at the stencil."""
    grid = hermite_grid(_STENCIL, size)[0]
    pairs = [*itertools.combinations_with_replacement(range(size), 2)]
    products = [grid[:, first] * grid[:, second] for first, second in pairs]
    least_squares = np.linalg.pinv(np.column_stack([np.ones(len(grid)), grid, *products]))
    # Of a product u_i u_j both derivatives.
    units = np.array([np.outer(*np.eye(size)[[*pair]]) for pair in pairs])
    units = units + np.swapaxes(units, 1, 2)
    curvature = np.einsum("kp,kij->ijp", least_squares[size + 1 :], units)
    logs = _bounded(logs)
    return (
        tf.linalg.matmul(logs, tf.constant(least_squares[1 : size + 1].T, logs.dtype)),
        tf.reshape(
            tf.linalg.matmul(logs, tf.constant(curvature.reshape([size**2, -1]).T, logs.dtype)),
            [-1, size, size],
        ),
    )


def _bounded(logs: tf.Tensor) -> tf.Tensor:
    """Returns logarithms that sums of squares can be taken of; of NaN as of 0."""
    least = tf.constant(_LEAST_LOG, logs.dtype)
    return tf.where(tf.math.is_finite(logs), tf.maximum(logs, least), least)
