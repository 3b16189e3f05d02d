"""The expected score of clipped pairs as a function of the parameters, from a pilot's simulation."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy import special

from tfp_dpvi._tf import Structure, tf, tfp
from tfp_dpvi.calibrated.simulation import Pairs, PairSimulator, clipped

_MOST_WEIGHT = (
    5.0  # Maximal log weight of an outcome: far from the window the simulation is uninformative.
)
_RIDGE = 1e-3
_NUM_PAIRS, _ROUNDS = 1024, 16


class Bend(NamedTuple):
    """The expected score as a function of theta: its slope from the releases, the slope's variation from a simulation.

    With y drawn at theta and y' along the window's path, `m(theta) = E psi` is the expected score, and the released slope A
    estimates `G(theta) = E[psi delta^T] / 2` if theta is true. If the release alone determines A, the expected score is
    `A G(theta)^-1 m(theta)`. If noise dominates its shape, the shape comes from the simulation and changes with theta as G does:
    with `G(theta_bar) = L L^T` and `A = L W L^T`, the expected score is `L R W R^T G_w^-1 m_w`, where `G_w` and `m_w` are whitened
    by L and `R R^T = (1 - w) G_w / factor + w I`; w is the release's share of the information on the shape. For a linear score all
    of these equal `A (theta - theta_bar)`. One set of pairs, drawn where theta may lie and reweighted for each theta, is used
    throughout, so that simulation errors cancel except for those of the nonlinearity.
    """

    x: Structure  # Inputs of n pairs.
    outcomes: tuple[Structure, Structure]
    base: tuple[
        tf.Tensor, tf.Tensor
    ]  # Log densities of the proposal that weights are relative to, shape [n].
    first: (
        tf.Tensor
    )  # `E psi` of each pair over the path of its second outcome, shape [n, d], whitened,
    second: tf.Tensor  # and over the path of its first outcome.
    slopes: tuple[
        tf.Tensor, tf.Tensor
    ]  # Likewise `E[psi delta^T] / 2`, see `_packed`: shape [n, d (d + 1) / 2].
    root: tf.Tensor  # L, shape [d, d].
    factor: tf.Tensor  # Weights of G_w's entries in its factor, shape [d, d].

    @classmethod
    def of(
        cls,
        simulator: PairSimulator,
        path: np.ndarray,
        guesses: np.ndarray,
        clip: float,
        generator: np.random.Generator,
    ) -> Bend:
        """Simulates pairs and sums over a path.

        `path` has the parameters of the window's steps, with mean theta_bar, [b, D]; pairs are drawn at `guesses`, [k, D].
        """
        dtype = simulator.pairing.coordinates.dtype
        num_each = _NUM_PAIRS // len(guesses)
        drawn = [simulator.pairs(guess, generator, num_each, _ROUNDS) for guess in guesses]
        simulated = np.array(
            [len(one.deltas) / one.share if one.share else num_each * _ROUNDS for one in drawn]
        )
        joined = Pairs.joined(drawn)
        x, outcomes = joined.x, joined.outcomes

        def log_probs(places: np.ndarray) -> list[np.ndarray]:
            found = simulator.log_probs(tf.constant(places, dtype), x, outcomes)
            return [one.numpy().astype(np.float64) for one in found]

        both = log_probs(guesses)
        shares = np.log(simulated / simulated.sum())[:, None]
        base = [special.logsumexp(shares + one, axis=0) for one in both]
        excess = base[0] + base[1] - special.logsumexp(shares + both[0] + both[1], axis=0)

        def weights_of(places: np.ndarray) -> list[np.ndarray]:
            ratios = [log - one for log, one in zip(log_probs(places), base, strict=True)]
            return [
                np.where(np.isnan(one), 0.0, np.exp(np.minimum(one, _MOST_WEIGHT)))
                for one in ratios
            ]

        deltas = simulator.deltas(path, x, outcomes)
        psi = clipped(deltas, clip)
        scale = np.exp(excess) / (len(path) * simulated.sum())
        along = [(one * scale).astype(psi.dtype) for one in weights_of(path)]
        weighted = [one[..., None] * psi for one in along]
        means = [one.sum(axis=0) / 2.0 for one in weighted]
        slopes = [one.transpose(1, 2, 0) @ deltas.transpose(1, 0, 2) / 4.0 for one in weighted]
        first, second = (one[0] for one in weights_of(path.mean(axis=0, keepdims=True)))
        size = psi.shape[-1]
        slope = np.tensordot(first, slopes[1], axes=1) + np.tensordot(second, slopes[0], axes=1)
        slope = (slope + slope.T) / 2.0  # G at theta_bar.
        root = np.linalg.cholesky(slope + _RIDGE * np.trace(slope) / size * np.eye(size))
        inverse = np.linalg.inv(root)
        means = [one @ inverse.T for one in means]
        inverse = inverse.astype(psi.dtype)
        slopes = [_packed(inverse @ one @ inverse.T) for one in slopes]
        factor = (root.T @ root) @ (root.T @ root)
        tensors = (*base, means[1], means[0], slopes[1], slopes[0], root, factor / np.trace(factor))
        own, other, ahead, behind, *both_slopes, root, factor = (
            tf.constant(part, dtype) for part in tensors
        )
        x, outcomes = tf.nest.map_structure(tf.constant, (x, outcomes))
        return cls(x, outcomes, (own, other), ahead, behind, tuple(both_slopes), root, factor)

    def score(
        self, simulator: PairSimulator, points: tf.Tensor, relative: tf.Tensor, share: tf.Tensor
    ) -> tf.Tensor:
        """Returns `L^-1` times the expected score at points [b, D], shape [b, d]; `relative` is W, [b, d, d], `share` w."""
        logs = simulator.log_probs(points, self.x, self.outcomes)
        ratios = [log - base for log, base in zip(logs, self.base, strict=True)]
        first, second = (
            tf.where(tf.math.is_nan(one), tf.zeros_like(one), tf.exp(tf.minimum(one, _MOST_WEIGHT)))
            for one in ratios
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


def _packed(matrices: np.ndarray) -> np.ndarray:
    """Returns lower triangles [n, d (d + 1) / 2] that, added to their transposes, give the matrices' symmetric parts."""
    size = matrices.shape[1]
    places = tfp.math.fill_triangular(np.arange(1, size * (size + 1) // 2 + 1)).numpy().ravel()
    rows, columns = np.divmod(np.argsort(places)[-places.max() :], size)
    halved: np.ndarray = np.where(rows == columns, 0.25, 0.5)
    return (matrices[:, rows, columns] + matrices[:, columns, rows]) * halved
