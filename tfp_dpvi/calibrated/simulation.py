"""Simulated pairs of outcomes at public inputs, and what they say of the curvature."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from tfp_dpvi._tf import Structure, function_of_model, map_apart, tf
from tfp_dpvi.bayes.model import BayesianModel
from tfp_dpvi.calibrated.curvature import CurvaturePrior
from tfp_dpvi.calibrated.pairing import CannotPairError, Pairing
from tfp_dpvi.data import make_records

_DEGREES, _LOG_FACTOR_SD, _KAPPA_SD = 32.0, 0.3, 0.1


class PairSimulator:
    """Simulates pairs at public inputs; raises `ValueError` if the paired clip does not apply."""

    def __init__(self, model: BayesianModel, x: Structure | None) -> None:
        if model.generative != (x is None):
            wanted = (
                "no x: it generates whole records"
                if x is not None
                else "x: public inputs like the private ones"
            )
            raise ValueError(f"pilot: this model needs {wanted}.")
        params = model.prior.sample(seed=tf.constant([0, 0]))
        if x is None:
            drawn = model.distribution_at(params, None).sample(16, seed=[0, 1])
            records = make_records(drawn, None, None, dtype=model.dtype, validate=False)
        else:
            rows = make_records(x, None, None, dtype=model.dtype, validate=True)
            y = model.distribution_at(params, tf.nest.map_structure(tf.constant, rows.x)).sample(
                seed=[0, 1]
            )
            records = dataclasses.replace(
                rows, y=tf.nest.map_structure(lambda part: part.numpy(), y)
            )
        self._x, self._num = records.x, records.num
        self._num_inputs = math.inf if x is None else float(records.num)
        try:
            self.pairing = Pairing(model, records)
        except CannotPairError as reason:
            raise ValueError(f'pilot: clipping="paired" does not apply: {reason}.') from reason
        self.size = len(self.pairing.index)
        self._pairs = function_of_model(self.pairing.pairs)

        @function_of_model
        def traced_deltas(
            vectors: tf.Tensor, x: Structure, outcomes: tuple[Structure, Structure]
        ) -> tf.Tensor:
            return tf.map_fn(lambda one: self.pairing.deltas(one, x, outcomes), vectors)

        @function_of_model
        def log_probs(
            points: tf.Tensor, x: Structure, outcomes: tuple[Structure, Structure]
        ) -> list[tf.Tensor]:
            """Returns log densities of both outcomes at b points, two tensors of shape [b, n]."""
            return map_apart(lambda point: self.pairing.log_probs(point, x, outcomes), points)

        self._traced_deltas, self.log_probs = traced_deltas, log_probs

    def pairs(
        self,
        vector: np.ndarray | tf.Tensor,
        generator: np.random.Generator,
        num: int,
        rounds: int = 1,
    ) -> Pairs:
        """Returns at most `num` simulated pairs that differ and are finite; discrete outcomes are often equal.

        A round simulates `num` pairs at the parameters' coordinates, shape [D].
        """
        vector = tf.cast(vector, self.pairing.coordinates.dtype)
        found: list[tuple[Structure, ...]] = []
        simulated = differing = 0
        while simulated < rounds * num and differing < num:
            rows = generator.integers(self._num, size=num)
            x = tf.nest.map_structure(lambda part: tf.constant(part[rows]), self._x)  # noqa: B023
            seeds = tf.constant(generator.integers(2**31, size=(2, 2)), tf.int32)
            drawn = tf.nest.map_structure(
                lambda part: part.numpy(), (x, *self._pairs(vector, x, seeds))
            )
            deltas, *logs = drawn[3:]
            kept = (
                np.any(deltas != 0.0, axis=1)
                & np.isfinite(deltas).all(axis=1)
                & np.isfinite(sum(logs))
            )
            found.append(tf.nest.map_structure(lambda part: part[kept], drawn))  # noqa: B023
            simulated, differing = simulated + num, differing + int(kept.sum())
        x, first, second, deltas, *_ = tf.nest.map_structure(
            lambda *parts: np.concatenate(parts)[:num], *found
        )
        return Pairs(
            x, (first, second), deltas.astype(np.float64), differing / simulated, self._num_inputs
        )

    def deltas(
        self, vectors: np.ndarray, x: Structure, outcomes: tuple[Structure, Structure]
    ) -> np.ndarray:
        """Returns differences of n pairs' scores at parameters [b, D], zero if not finite: [b, n, d], the model's dtype."""
        found = self._traced_deltas(
            tf.constant(vectors, self.pairing.coordinates.dtype), x, outcomes
        ).numpy()
        finite: np.ndarray = np.where(np.isfinite(found).all(axis=-1, keepdims=True), found, 0.0)
        return finite


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Simulated pairs that differ, at public inputs."""

    x: Structure  # Inputs of n records.
    outcomes: tuple[Structure, Structure]
    deltas: np.ndarray  # Differences of the outcomes' scores, shape [n, d].
    share: float  # The fraction of simulated pairs that differ.
    num_inputs: float  # From which x was drawn.

    def spread(self, num_records: int, clip: float, noise: float, precision: np.ndarray) -> float:
        """Returns the posterior's median standard deviation for N records, or NaN if simulated curvatures overflow.

        `noise` is the variance of the noise on a coordinate of the window's mean score.
        """
        found = self.curvature_prior(num_records, clip)
        assert found.curvature is not None
        spread = found.matrix + noise * np.eye(len(precision))
        with np.errstate(over="ignore", invalid="ignore"):
            total = np.diag(precision) + found.curvature @ np.linalg.solve(spread, found.curvature)
        if not np.isfinite(
            total
        ).all():  # Simulated gradients overflowed: nothing is known at these parameters.
            return math.nan
        return float(np.median(np.sqrt(np.diag(np.linalg.inv(total)))))

    @classmethod
    def joined(cls, drawn: Sequence[Pairs]) -> Pairs:
        """Returns pairs of several parameters as those of one; their shares should be similar."""
        x, outcomes, deltas = tf.nest.map_structure(
            lambda *parts: np.concatenate(parts),
            *[(one.x, one.outcomes, one.deltas) for one in drawn],
        )
        return cls(
            x, outcomes, deltas, float(np.mean([one.share for one in drawn])), drawn[0].num_inputs
        )

    def curvature_prior(self, num_records: int, clip: float) -> CurvaturePrior:
        """Returns the simulation's prior of the curvature for N records."""
        psi, (num, size) = clipped(self.deltas, clip), self.deltas.shape
        factor = num_records * self.share / (2.0 * num)
        matrix, slope = factor * psi.T @ psi, factor * psi.T @ self.deltas
        ridge = 1e-3 * float(np.trace(matrix)) / size
        shown = np.minimum(
            np.sum(psi * self.deltas, axis=1), 3.0 * clip**2
        )  # As `ClippedAway` does.
        kappa = float(factor * np.sum(shown) / np.trace(matrix))
        # Squared errors of the means over n independent pairs, over N records and over the inputs.
        error = np.sum(psi**2, axis=1) @ np.sum(psi**2, axis=1) * factor**2
        return CurvaturePrior(
            matrix + ridge * np.eye(size),
            (_DEGREES * size,),
            _LOG_FACTOR_SD,
            (kappa, _KAPPA_SD * kappa),
            (slope + slope.T) / 2.0 + ridge * np.eye(size),
            float(error * (1.0 + num / (num_records * self.share) + num / self.num_inputs)),
            ridge,
        )


def clipped(deltas: np.ndarray, clip: float) -> np.ndarray:
    """Clips differences of shape [..., d] to norm C."""
    norms = np.linalg.norm(deltas, axis=-1, keepdims=True)
    psi: np.ndarray = deltas * np.minimum(1.0, clip / np.maximum(norms, 1e-12))
    return psi
