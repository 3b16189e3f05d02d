"""The expected score of clipped pairs as a function of the parameters, from a pilot's simulation.

`NonlinearScore` is that function; `NonlinearDensity` the posterior's density with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy import special

from tfp_dpvi._tf import Structure, function_of_model, tf, tfp
from tfp_dpvi.bayes.coordinates import LogDensity
from tfp_dpvi.calibrated.mixture import DensityOfChains
from tfp_dpvi.calibrated.simulation import PairSimulator, SimulatedPairs, clipped
from tfp_dpvi.calibrated.window import Window

# Maximal log weight of an outcome: far from the window the simulation is uninformative.
_MOST_WEIGHT = 5.0
_RIDGE = 1e-3
_NUM_PAIRS = 1024
_ROUNDS = 16


class NonlinearScore(NamedTuple):
    """The expected score as a function of theta: its slope from the releases, its curve simulated.

    With y drawn at theta and y' along the window's path, `m(theta) = E psi` is the expected score,
    and the released slope A estimates `G(theta) = E[psi delta^T] / 2` if theta is true. If the
    release alone determines A, the expected score is `A G(theta)^-1 m(theta)`. If noise dominates
    its shape, the shape comes from the simulation and changes with theta as G does: with
    `G(theta_bar) = L L^T` and `A = L W L^T`, the expected score is `L R W R^T G_w^-1 m_w`, where
    `G_w` and `m_w` are whitened by L and `R R^T = (1 - w) G_w / factor + w I`; w is the release's
    share of the information on the shape. For a linear score all of these equal
    `A (theta - theta_bar)`. One set of pairs, drawn where theta may lie and reweighted for each
    theta, is used throughout, so that simulation errors cancel except for those of the
    nonlinearity.

    Attributes:
      x: Inputs of n pairs.
      outcomes: Both outcomes of each.
      base: Log densities of the proposal that weights are relative to, two of shape [n].
      first: `E psi` of each pair over the path of its second outcome, whitened, shape [n, d].
      second: The same over the path of its first outcome.
      slopes: `E[psi delta^T] / 2` likewise, two of shape [n, d (d + 1) / 2], see `_packed`.
      root: L, shape [d, d].
      factor: Weights of G_w's entries in its factor, shape [d, d].
    """

    x: Structure
    outcomes: tuple[Structure, Structure]
    base: tuple[tf.Tensor, tf.Tensor]
    first: tf.Tensor
    second: tf.Tensor
    slopes: tuple[tf.Tensor, tf.Tensor]
    root: tf.Tensor
    factor: tf.Tensor

    @classmethod
    def simulate(
        cls,
        simulator: PairSimulator,
        path: np.ndarray,
        guesses: np.ndarray,
        clip: float,
        generator: np.random.Generator,
    ) -> NonlinearScore:
        """Simulates pairs, and sums over a path.

        Args:
          simulator: The pilot's simulator.
          path: The parameters of the window's steps, with mean theta_bar, shape [b, D].
          guesses: The parameters at which pairs are drawn, shape [k, D].
          clip: The clip C.
          generator: The source of random numbers.
        """
        dtype = simulator.pairing.coordinates.dtype
        num_each = _NUM_PAIRS // len(guesses)
        drawn = [simulator.pairs(guess, generator, num_each, _ROUNDS) for guess in guesses]
        simulated = np.array(
            [
                len(pairs.deltas) / pairs.share if pairs.share else num_each * _ROUNDS
                for pairs in drawn
            ]
        )
        joined = SimulatedPairs.joined(drawn)
        x, outcomes = joined.x, joined.outcomes

        def log_probs(places: np.ndarray) -> list[np.ndarray]:
            logs = simulator.log_probs(tf.constant(places, dtype), x, outcomes)
            return [log.numpy().astype(np.float64) for log in logs]

        both = log_probs(guesses)
        shares = np.log(simulated / simulated.sum())[:, None]
        base = [special.logsumexp(shares + log, axis=0) for log in both]
        excess = base[0] + base[1] - special.logsumexp(shares + both[0] + both[1], axis=0)

        def weights_of(places: np.ndarray) -> list[np.ndarray]:
            ratios = [log - start for log, start in zip(log_probs(places), base, strict=True)]
            return [
                np.where(np.isnan(ratio), 0.0, np.exp(np.minimum(ratio, _MOST_WEIGHT)))
                for ratio in ratios
            ]

        deltas = simulator.deltas(path, x, outcomes)
        psi = clipped(deltas, clip)
        scale = np.exp(excess) / (len(path) * simulated.sum())
        along = [(weights * scale).astype(psi.dtype) for weights in weights_of(path)]
        weighted = [weights[..., None] * psi for weights in along]
        means = [part.sum(axis=0) / 2.0 for part in weighted]
        slopes = [part.transpose(1, 2, 0) @ deltas.transpose(1, 0, 2) / 4.0 for part in weighted]
        first, second = (weights[0] for weights in weights_of(path.mean(axis=0, keepdims=True)))
        size = psi.shape[-1]
        # G at theta_bar.
        slope = np.tensordot(first, slopes[1], axes=1) + np.tensordot(second, slopes[0], axes=1)
        slope = (slope + slope.T) / 2.0
        root = np.linalg.cholesky(slope + _RIDGE * np.trace(slope) / size * np.eye(size))
        inverse = np.linalg.inv(root)
        means = [mean @ inverse.T for mean in means]
        inverse = inverse.astype(psi.dtype)
        slopes = [_packed(inverse @ part @ inverse.T) for part in slopes]
        factor = (root.T @ root) @ (root.T @ root)

        def constant(part: np.ndarray) -> tf.Tensor:
            return tf.constant(part, dtype)

        return cls(
            x=tf.nest.map_structure(tf.constant, x),
            outcomes=tf.nest.map_structure(tf.constant, outcomes),
            base=(constant(base[0]), constant(base[1])),
            first=constant(means[1]),
            second=constant(means[0]),
            slopes=(constant(slopes[1]), constant(slopes[0])),
            root=constant(root),
            factor=constant(factor / np.trace(factor)),
        )

    def at(
        self, simulator: PairSimulator, points: tf.Tensor, relative: tf.Tensor, share: tf.Tensor
    ) -> tf.Tensor:
        """Returns `L^-1` times the expected score at points.

        Args:
          simulator: The simulator that drew the pairs.
          points: The parameters, shape [b, D].
          relative: W, shape [b, d, d].
          share: w, a scalar.

        Returns:
          Tensor of shape [b, d].
        """
        logs = simulator.log_probs(points, self.x, self.outcomes)
        ratios = [log - base for log, base in zip(logs, self.base, strict=True)]
        first, second = (
            tf.where(
                tf.math.is_nan(ratio),
                tf.zeros_like(ratio),
                tf.exp(tf.minimum(ratio, _MOST_WEIGHT)),
            )
            for ratio in ratios
        )
        size = self.root.shape[0]
        eye = tf.eye(size, dtype=points.dtype)
        mean = tf.matmul(first, self.first) - tf.matmul(second, self.second)
        slope = tf.matmul(first, self.slopes[0]) + tf.matmul(second, self.slopes[1])
        slope = tfp.math.fill_triangular(slope)
        slope = slope + tf.linalg.matrix_transpose(slope) + _RIDGE * eye
        factor = tf.reduce_sum(slope * self.factor, axis=[-2, -1])[:, None, None]
        moved = tf.linalg.solve(slope, mean[..., None])
        shape = tf.linalg.cholesky((1.0 - share) * slope / factor + share * eye)
        turned = tf.matmul(shape, moved, transpose_a=True)
        return tf.matmul(shape, tf.matmul(relative, turned))[..., 0]


class NonlinearDensity:
    """The posterior's log density with a nonlinear score, traced once for a simulator.

    Args:
      simulator: The pilot's simulator.

    Attributes:
      simulator: The pilot's simulator.
    """

    def __init__(self, simulator: PairSimulator) -> None:
        self.simulator = simulator
        coordinates = simulator.pairing.coordinates

        def value_and_gradient(
            points: tf.Tensor,
            whitened_score: tf.Tensor,
            whitened_slope: tf.Tensor,
            relative: tf.Tensor,
            share: tf.Tensor,
            score: NonlinearScore,
        ) -> tuple[tf.Tensor, tf.Tensor]:
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(points)
                expected = score.at(simulator, points, relative, share)
                residual = whitened_score - tf.linalg.matvec(whitened_slope, expected)
                value = coordinates.log_prior(points) - tf.reduce_sum(residual**2, axis=-1) / 2.0
            return value, tape.gradient(value, points)

        self._dtype = coordinates.dtype
        self._traced: Callable[..., tuple[tf.Tensor, tf.Tensor]] = function_of_model(
            value_and_gradient, reduce_retracing=True
        )

    def for_window(
        self,
        score: NonlinearScore,
        window: Window,
        slopes: np.ndarray,
        matrices: np.ndarray,
        share: float,
    ) -> DensityOfChains:
        """Returns the density given released values; chains take draws of the curvature in turn.

        Args:
          score: The expected score.
          window: The released averages.
          slopes: Draws of A, shape [K, d, d].
          matrices: Draws of M, shape [K, d, d].
          share: The release's share of the information on the curvature's shape.
        """
        root = score.root.numpy()
        # By S^-1/2 from the left, with S the covariance of the released score.
        whiten = np.linalg.inv(np.linalg.cholesky(window.score_covariance(matrices)))
        whitened_score, whitened_slope = whiten @ window.score, whiten @ root
        inverse = np.linalg.inv(root)
        relative = inverse @ slopes @ inverse.T

        def density_of(num: int) -> LogDensity:
            draws = np.arange(num) % len(slopes)
            parts = [
                tf.constant(part, self._dtype)
                for part in (whitened_score[draws], whitened_slope[draws], relative[draws], share)
            ]

            def log_density(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
                value, gradient = self._traced(tf.constant(points, self._dtype), *parts, score)
                return value.numpy().astype(np.float64), gradient.numpy().astype(np.float64)

            return log_density

        return density_of


def _packed(matrices: np.ndarray) -> np.ndarray:
    """Returns lower triangles that, with their transposes, add up to the symmetric parts.

    Their shape is [n, d (d + 1) / 2], for matrices of shape [n, d, d].
    """
    size = matrices.shape[1]
    places = tfp.math.fill_triangular(np.arange(1, size * (size + 1) // 2 + 1)).numpy().ravel()
    rows, columns = np.divmod(np.argsort(places)[-places.max() :], size)
    halved: np.ndarray = np.where(rows == columns, 0.25, 0.5)
    return (matrices[:, rows, columns] + matrices[:, columns, rows]) * halved
