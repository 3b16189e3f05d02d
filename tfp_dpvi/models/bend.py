"""How the expected score of clipped pairs depends on the parameters, in a pilot's simulation."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tfp_dpvi._tf import Structure, tf
from tfp_dpvi.models.simulation import Pairs, PairSimulator, clipped

_MOST_WEIGHT = 5.0  # Logarithm of an outcome's weight: far from the window the simulation says nothing.
_RIDGE = 1e-3


class Bend(NamedTuple):
    """The expected score as a function of theta, where the releases say its slope and a simulation how that changes.

    With y drawn at theta and y' along the window's path, `m(theta) = E psi` is the expected score and
    `G(theta) = E[psi delta^T] / 2` what the released slope A estimates if theta is true. The simulation has both, so that the
    expected score is `A G(theta)^-1 m(theta)`; where nothing bends that is `A (theta - theta_bar)`. One set of pairs, drawn at
    theta_bar and weighted to other parameters, serves all: errors of the simulation cancel but for those of the bend itself.

    Attributes:
      x: inputs of n pairs.
      outcomes: both.
      log_probs: their log densities at theta_bar, two tensors of shape [n].
      first: `E psi` of each pair over the path of its second outcome, shape [n, d], whitened.
      second: over that of its first outcome.
      slopes: likewise `E[psi delta^T] / 2`, two tensors of shape [n, d * d].
      root: d x d: parameters over it are whitened by the slope at theta_bar.
    """

    x: Structure
    outcomes: tuple[Structure, Structure]
    log_probs: tuple[tf.Tensor, ...]
    first: tf.Tensor
    second: tf.Tensor
    slopes: tuple[tf.Tensor, tf.Tensor]
    root: tf.Tensor

    @classmethod
    def of(cls, simulator: PairSimulator, pairs: Pairs, path: np.ndarray, clip: float) -> Bend:
        """Makes the sums over a path.

        Args:
          simulator: of the pilot.
          pairs: drawn at theta_bar.
          path: parameters as the window's steps had them, with mean theta_bar: all coordinates, shape [b, D].
          clip: C, or `math.inf`.
        """
        num, size = pairs.deltas.shape
        dtype = simulator.pairing.coordinates.dtype
        own = clipped(pairs.deltas, clip)
        slope = own.T @ pairs.deltas / (2.0 * num)
        slope = (slope + slope.T) / 2.0 + _RIDGE * np.trace(slope) / size * np.eye(size)
        root = np.linalg.inv(np.linalg.cholesky(slope)).T
        logs = simulator.log_probs(tf.constant(path, dtype), pairs.x, pairs.outcomes)
        deltas = simulator.deltas(path, pairs)
        psi = clipped(deltas, clip)
        means, slopes = [], []
        for log, base in zip(logs, pairs.log_probs, strict=True):
            weights = np.exp(np.minimum(log.numpy() - base, _MOST_WEIGHT)) / len(path)
            means.append(np.einsum("bn,bni->ni", weights, psi) @ root / (2.0 * num))
            product = np.einsum("bn,bni,bnj->nij", weights, psi, deltas, optimize=True)
            slopes.append((root.T @ product @ root).reshape(num, -1) / (4.0 * num))
        second, first, *both, root = (tf.constant(part, dtype) for part in (*means, slopes[1], slopes[0], root))
        parts = tf.nest.map_structure(tf.constant, (pairs.x, pairs.outcomes, pairs.log_probs))
        return cls(*parts, first, second, tuple(both), root)

    def moved(self, simulator: PairSimulator, points: tf.Tensor) -> tf.Tensor:
        """Returns `root^-1 G(theta)^-1 m(theta)`, nearly `root^-1 (theta - theta_bar)`: shape [b, d].

        Args:
          simulator: of the pilot.
          points: all coordinates of theta, shape [b, D].
        """
        logs = simulator.log_probs(points, self.x, self.outcomes)
        first, second = (
            tf.exp(tf.minimum(log - base, _MOST_WEIGHT)) for log, base in zip(logs, self.log_probs, strict=True)
        )
        size = self.root.shape[0]
        mean = tf.matmul(first, self.first) - tf.matmul(second, self.second)
        slope = tf.matmul(first, self.slopes[0]) + tf.matmul(second, self.slopes[1])
        slope = tf.reshape(slope, [-1, size, size]) + _RIDGE * tf.eye(size, dtype=slope.dtype)
        return tf.linalg.solve(slope, mean[..., None])[..., 0]
