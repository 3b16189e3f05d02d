"""Simulated pairs of outcomes at public inputs, and what they say of the curvature."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from tfp_dpvi._tf import Structure, function_of_model, map_apart, tf
from tfp_dpvi.bayes.model import LIKELIHOOD_ERRORS, BayesianModel
from tfp_dpvi.calibrated.curvature import CurvaturePrior
from tfp_dpvi.calibrated.pairing import Pairing
from tfp_dpvi.calibrated.requirements import CannotPairError
from tfp_dpvi.data import Records, make_records

# Of the prior that a simulation gives: degrees of freedom over d, and relative errors.
_DEGREES = 32.0
_LOG_FACTOR_SD = 0.3
_KAPPA_SD = 0.1


class PairSimulator:
    """Simulates pairs at public inputs.

    Args:
      model: Prior and likelihood.
      x: Public inputs; None for models of whole records.

    Raises:
      ValueError: The paired clip does not apply, or the inputs do not fit the model.

    Attributes:
      x: The inputs as arrays, or simulated whole records.
      pairing: The paired clip of the model.
      size: The number d of parameters that the likelihood reads.
    """

    def __init__(self, model: BayesianModel, x: Structure | None) -> None:
        records = _example_records(model, x)
        self.x = records.x
        self._num = records.num
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
            return tf.map_fn(lambda vector: self.pairing.deltas(vector, x, outcomes), vectors)

        @function_of_model
        def log_probs(
            points: tf.Tensor, x: Structure, outcomes: tuple[Structure, Structure]
        ) -> list[tf.Tensor]:
            """Returns log densities of both outcomes at b points, two tensors of shape [b, n]."""
            return map_apart(lambda point: self.pairing.log_probs(point, x, outcomes), points)

        self._traced_deltas = traced_deltas
        self.log_probs = log_probs

    def pairs(
        self,
        vector: np.ndarray | tf.Tensor,
        generator: np.random.Generator,
        num: int,
        rounds: int = 1,
    ) -> SimulatedPairs:
        """Returns simulated pairs that differ and are finite; discrete outcomes are often equal.

        Args:
          vector: The parameters' coordinates, shape [D].
          generator: The source of random numbers.
          num: The number of pairs that a round simulates, and of those returned at most.
          rounds: How many rounds are tried at most.
        """
        vector = tf.cast(vector, self.pairing.coordinates.dtype)
        batches: list[tuple[Structure, ...]] = []
        simulated = differing = 0
        while simulated < rounds * num and differing < num:
            rows = generator.integers(self._num, size=num)
            x = tf.nest.map_structure(lambda part: tf.constant(part[rows]), self.x)  # noqa: B023
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
            batches.append(tf.nest.map_structure(lambda part: part[kept], drawn))  # noqa: B023
            simulated, differing = simulated + num, differing + int(kept.sum())
        joined = tf.nest.map_structure(lambda *parts: np.concatenate(parts)[:num], *batches)
        return SimulatedPairs(
            x=joined[0],
            outcomes=joined[1:3],
            deltas=joined[3].astype(np.float64),
            share=differing / simulated,
            num_inputs=self._num_inputs,
        )

    def deltas(
        self, vectors: np.ndarray, x: Structure, outcomes: tuple[Structure, Structure]
    ) -> np.ndarray:
        """Returns differences of pairs' scores, zero where they are not finite.

        Args:
          vectors: Coordinates of the parameters at b points, shape [b, D].
          x: Inputs of n pairs.
          outcomes: Both outcomes of each.

        Returns:
          Array of shape [b, n, d], in the model's dtype.
        """
        points = tf.constant(vectors, self.pairing.coordinates.dtype)
        deltas = self._traced_deltas(points, x, outcomes).numpy()
        finite: np.ndarray = np.where(np.isfinite(deltas).all(axis=-1, keepdims=True), deltas, 0.0)
        return finite


def _example_records(model: BayesianModel, x: Structure | None) -> Records:
    """Returns records with public inputs and simulated outcomes, or simulated whole records."""
    if model.generative != (x is None):
        wanted = (
            "x: public inputs like the private ones"
            if x is None
            else "no x: it generates whole records"
        )
        raise ValueError(f"pilot: this model needs {wanted}.")
    params = model.prior.sample(seed=tf.constant([0, 0]))
    if x is None:
        drawn = model.distribution_at(params, None).sample(16, seed=[0, 1])
        return make_records(drawn, None, None, dtype=model.dtype, validate=False)
    records = make_records(x, None, None, dtype=model.dtype, validate=True)
    inputs = tf.nest.map_structure(tf.constant, records.x)
    try:
        y = model.distribution_at(params, inputs).sample(seed=[0, 1])
    except (*LIKELIHOOD_ERRORS, tf.errors.OpError) as error:
        kinds = tf.nest.map_structure(lambda part: f"{part.dtype}{[*part.shape]}", records.x)
        raise ValueError(
            f"pilot: the likelihood fails at these x, {kinds} ({type(error).__name__}: perhaps an "
            "index out of range).\nPass inputs that it takes, like the private ones."
        ) from error
    return dataclasses.replace(records, y=tf.nest.map_structure(lambda part: part.numpy(), y))


@dataclasses.dataclass(frozen=True)
class SimulatedPairs:
    """Simulated pairs that differ, at public inputs.

    Attributes:
      x: Inputs of n records.
      outcomes: Both outcomes of each.
      deltas: Differences of the outcomes' scores, shape [n, d].
      share: The fraction of simulated pairs that differ.
      num_inputs: The number of inputs from which x was drawn.
    """

    x: Structure
    outcomes: tuple[Structure, Structure]
    deltas: np.ndarray
    share: float
    num_inputs: float

    def posterior_sd(
        self, num_records: int, clip: float, noise: float, precision: np.ndarray
    ) -> float:
        """Returns the median standard deviation that a posterior of N records would have.

        Args:
          num_records: The number N of records.
          clip: The clip C.
          noise: The variance of the noise on a coordinate of the window's mean score.
          precision: The parameters' prior precisions, shape [d].

        Returns:
          The median over coordinates; NaN if simulated curvatures overflow.
        """
        prior = self.curvature_prior(num_records, clip)
        covariance = prior.matrix + noise * np.eye(len(precision))
        with np.errstate(over="ignore", invalid="ignore"):
            total = np.diag(precision) + prior.slope @ np.linalg.solve(covariance, prior.slope)
        # If simulated gradients overflowed, nothing is known at these parameters.
        if not np.isfinite(total).all():
            return math.nan
        return float(np.median(np.sqrt(np.diag(np.linalg.inv(total)))))

    @classmethod
    def joined(cls, drawn: Sequence[SimulatedPairs]) -> SimulatedPairs:
        """Returns pairs of several parameters as those of one; their shares should be similar."""
        x, outcomes = tf.nest.map_structure(
            lambda *parts: np.concatenate(parts), *[(pairs.x, pairs.outcomes) for pairs in drawn]
        )
        return cls(
            x=x,
            outcomes=outcomes,
            deltas=np.concatenate([pairs.deltas for pairs in drawn]),
            share=float(np.mean([pairs.share for pairs in drawn])),
            num_inputs=drawn[0].num_inputs,
        )

    def curvature_prior(self, num_records: int, clip: float) -> CurvaturePrior:
        """Returns the simulation's prior of the curvature.

        Args:
          num_records: The number N of records.
          clip: The clip C.
        """
        psi = clipped(self.deltas, clip)
        num, size = psi.shape
        factor = num_records * self.share / (2.0 * num)
        matrix, slope = factor * psi.T @ psi, factor * psi.T @ self.deltas
        ridge = 1e-3 * float(np.trace(matrix)) / size
        # As `ClippedAway` does.
        released = np.minimum(np.sum(psi * self.deltas, axis=1), 3.0 * clip**2)
        kappa = float(factor * np.sum(released) / np.trace(matrix))
        # Squared errors of the means over n independent pairs, over N records and over the inputs.
        error = np.sum(psi**2, axis=1) @ np.sum(psi**2, axis=1) * factor**2
        return CurvaturePrior(
            matrix=matrix + ridge * np.eye(size),
            degrees=(_DEGREES * size,),
            log_factor_sd=_LOG_FACTOR_SD,
            kappa=(kappa, _KAPPA_SD * kappa),
            curvature=(slope + slope.T) / 2.0 + ridge * np.eye(size),
            error=float(error * (1.0 + num / (num_records * self.share) + num / self.num_inputs)),
            ridge=ridge,
        )


def clipped(deltas: np.ndarray, clip: float) -> np.ndarray:
    """Returns differences, clipped to norm C.

    Args:
      deltas: Shape [..., d].
      clip: The clip C.
    """
    norms = np.linalg.norm(deltas, axis=-1, keepdims=True)
    psi: np.ndarray = deltas * np.minimum(1.0, clip / np.maximum(norms, 1e-12))
    return psi
