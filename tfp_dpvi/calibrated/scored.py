"""A likelihood with its centred scores: those of records, and their moments at public inputs."""

from __future__ import annotations

import functools
import math

import numpy as np

from tfp_dpvi import _random
from tfp_dpvi._tf import Structure, function_of_model, tf, tfd
from tfp_dpvi.bayes.units import row_distribution
from tfp_dpvi.calibrated.balance import InputWeights, balanced_weights, rows_of_weights
from tfp_dpvi.calibrated.centred import RecordWeights
from tfp_dpvi.calibrated.diagonal import MOST_DENSE, num_inputs, squares_of
from tfp_dpvi.calibrated.pairing import Pairing
from tfp_dpvi.calibrated.ranks import Ranking, ranking_of
from tfp_dpvi.calibrated.scores import ModelScores, Place, model_scores, possible_values
from tfp_dpvi.calibrated.twins import rejects
from tfp_dpvi.calibrated.weights import WeightScale
from tfp_dpvi.calibrated.whitening import SimulatedMoments, symmetric
from tfp_dpvi.calibrated.wider import SimulatedWider
from tfp_dpvi.data import UnitRows
from tfp_dpvi.gradients import Clip

# Twins of outcomes with many values.
NUM_TWINS = 4
# Public inputs times those that are used: some of them resemble private ones. So many times, the
# first of them are weighted, and all of them only where no weights of these are even.
_POOL = 32
_FIRST = 4
# The least effective number of weighted inputs, over the number of those in use.
_LEAST_EFFECTIVE = 0.1
# Of released means, without noise: what rounding leaves.
_LEAST_NOISE = 1e-9
# Coefficients of which all products weight public inputs.
_MOST_PAIRED = 16
# Of the unit of coordinates, in search of that which a release says.
_MOST_LOG_LENGTH = 2.0
_BISECTIONS = 16


class ScoredLikelihood:
    """A likelihood's centred scores.

    Args:
      pairing: The model's coordinates and simulation.
      middle: All coordinates, shape [D]: those that the likelihood does not read stay there.
      x: Public inputs like the private ones, as arrays of n rows.
      max_weight: The public largest weight of records with weights; None without weights.
      intercept: The whitened coordinate of the first intercept.

    Attributes:
      pairing: The model's coordinates and simulation.
      size: The number d of parameters that the likelihood reads.
      dtype: The dtype of coordinates.
      clip: The clip, 1: scores are whitened to a mean square of 1.
      num_twins: The number K of twins of each record; 0 if outcomes are enumerated.
      ranking: How outcomes are ranked.
      gains_from_xla: Whether steps are faster with XLA, which runs samplers that reject as loops.
      is_mixture: Whether it is a mixture, whose components may change places.
      max_weight: The public largest weight; None without weights.
      scale: How weights enter the clip; of ones without weights.
      inputs: The public inputs in use, tensors of n rows.
      weights: Their weights among those of `pool`; None if the first ones are in use.
    """

    def __init__(
        self,
        pairing: Pairing,
        middle: np.ndarray,
        x: Structure,
        max_weight: float | None,
        intercept: int = 0,
    ) -> None:
        self.pairing = pairing
        self.size = len(pairing.index)
        self.dtype = pairing.coordinates.dtype
        self.clip = Clip(1.0)
        self.max_weight = max_weight
        self.intercept = intercept
        self._middle = tf.constant(middle, self.dtype)
        self.set_inputs(x)
        at_start, rejecting = self._at_start()
        likelihood, self.ranking = at_start
        self.num_twins = 0 if possible_values(likelihood) and not pairing.generative else NUM_TWINS
        self.gains_from_xla = not (rejecting and self.num_twins)
        kinds = tfd.MixtureSameFamily | tfd.Mixture
        self.is_mixture = isinstance(row_distribution(likelihood), kinds)
        self._simulate = function_of_model(self._simulated_sums)

    def _at_start(self) -> tuple[tuple[tfd.Distribution, Ranking], bool]:
        """Returns the likelihood, how it is ranked, and whether its samplers reject."""
        traced: list[tuple[tfd.Distribution, Ranking]] = []

        def probe() -> tf.Tensor:
            inputs = tf.nest.map_structure(tf.identity, self.inputs)
            likelihood = self.pairing.distribution(self._middle, inputs)
            traced.append((likelihood, ranking_of(likelihood, NUM_TWINS)))
            self.pairing.simulate(likelihood, inputs, tf.constant([0, 1], tf.int32))
            return tf.zeros([])

        graph = tf.function(probe, autograph=False).get_concrete_function().graph
        return traced[-1], any(map(rejects, graph.get_operations()))

    def set_inputs(self, x: Structure) -> None:
        """Sets the public inputs of later fits, arrays of n rows."""
        most = num_inputs(self.size)
        available = len(tf.nest.flatten(x)[0])
        self._num = min(most, available)
        # Where only the diagonal is released, none is weighted.
        times = min(available // self._num, _POOL if self.size <= MOST_DENSE else 1)
        self.pool = tf.nest.map_structure(lambda part: tf.constant(part[: times * self._num]), x)
        # Places that no person fills would be simulated for nothing.
        self._filled = x.longest if isinstance(x, UnitRows) else None
        self.use_weights(None)
        self.scale = WeightScale.at_start(self._num)

    def use_weights(self, weights: InputWeights | None) -> None:
        """Sets the public inputs in use.

        Args:
          weights: Weights of those of `pool`, as `balanced` returns them; None for the first ones.
        """
        self.weights = weights
        self.inputs = self._inputs_of(weights)

    def _inputs_of(self, weights: InputWeights | None) -> Structure:
        if weights is None:
            return self._rows_of(np.arange(self._num))
        return self._rows_of(rows_of_weights(weights.values, self._num))

    def _rows_of(self, rows: np.ndarray) -> Structure:
        inputs = tf.nest.map_structure(lambda part: tf.gather(part, rows), self.pool)
        return inputs if self._filled is None else inputs.first(self._filled)

    def vector_at(self, theta: np.ndarray | tf.Tensor) -> tf.Tensor:
        """Returns all coordinates, shape [D], of those that the likelihood reads, shape [d]."""
        index = self.pairing.index[:, None]
        theta = tf.convert_to_tensor(theta, self.dtype)
        return tf.tensor_scatter_nd_update(self._middle, index, theta)

    def vectors_at(self, thetas: tf.Tensor) -> tf.Tensor:
        """Returns all coordinates, shape [m, D], of those that the likelihood reads, [m, d]."""
        index = self.pairing.index[:, None]
        middle = tf.tile(self._middle[:, None], [1, tf.shape(thetas)[0]])
        return tf.transpose(tf.tensor_scatter_nd_update(middle, index, tf.transpose(thetas)))

    def scores(
        self,
        vector: tf.Tensor,
        whitening: tf.Tensor,
        records: dict[str, Structure],
        mask: tf.Tensor,
        key: tf.Tensor,
        weights: RecordWeights | None = None,
    ) -> ModelScores:
        """Returns the centred scores of records.

        Args:
          vector: All coordinates, shape [D].
          whitening: W, shape [d, d].
          records: The records, by part.
          mask: Whether each counts, shape [n].
          key: The key of the twins' random numbers.
          weights: The records' weights, or None.
        """
        return model_scores(
            Place(self.pairing, vector, whitening),
            records,
            mask,
            key,
            bound=self.clip.bound,
            num_twins=self.num_twins or NUM_TWINS,
            ranking=self.ranking,
            weights=weights,
        )

    def moments_at(
        self, theta: np.ndarray, whitening: np.ndarray, weights: InputWeights | None = None
    ) -> SimulatedMoments:
        """Returns the moments at public inputs.

        Args:
          theta: The coordinates that the likelihood reads, shape [d].
          whitening: W, shape [d, d].
          weights: Weights of `pool`; None for the inputs in use.
        """
        inputs = self.inputs if weights is None else self._inputs_of(weights)
        sums = self._sums_at(theta, whitening, inputs)
        num = max(float(sums["num"]), 1.0)
        back = np.linalg.inv(whitening)
        spread = self.scale.spread
        return SimulatedMoments(
            length=float(np.trace(sums["information"])) / num,
            information=symmetric(back @ sums["information"] @ back.T) / num,
            matrix=spread * symmetric(sums["matrix"]) / num,
            slope=symmetric(sums["slope"]) / num,
            covariance=symmetric(sums["covariance"]) / num,
            scale=spread * float(sums["scale"]) / num,
            expected=float(sums["expected"]) / num,
            excess_slope=sums["excess_slope"] / num,
            excess_variance=float(sums["excess_variance"]) / num,
            ranks_slope=sums["ranks_slope"] / num,
            num=num,
            squares=spread * sums["squares"] / num,
            squares_variance=spread**2
            * (sums["fourth_powers"] / num - (sums["squares"] / num) ** 2),
            wider=SimulatedWider(
                *(float(sums[f"wider_{name}"]) / num for name in ("slope", "square", "product"))
            ),
            spread=spread,
            lengths=sums["lengths"],
            row_slopes=sums["row_slopes"],
            row_squares=sums["row_squares"],
        )

    def _sums_at(
        self, theta: np.ndarray, whitening: np.ndarray, inputs: Structure
    ) -> dict[str, np.ndarray]:
        sums = self._simulate(
            self.vector_at(theta),
            tf.constant(whitening, self.dtype),
            inputs,
            tf.constant([0, 1], tf.int64),
            self.public_weights(),
        )
        return {name: part.numpy().astype(np.float64) for name, part in sums.items()}

    def balanced(
        self, theta: np.ndarray, whitening: np.ndarray, released: np.ndarray, noise: float
    ) -> InputWeights | None:
        """Returns weights of `pool` with which it resembles the private inputs.

        They change the present weights as little as the release asks for; or even ones, if those
        cannot follow it.

        Args:
          theta: The coordinates that the likelihood reads, shape [d].
          whitening: W, shape [d, d].
          released: The mean of what `CentredCurvature` sums, shape [d, d]; or of
            `CentredDiagonal`.
          noise: The noise's standard deviation on its diagonal.

        Returns:
          Weights; None if no weights do, or where the diagonal alone is released.
        """
        if self.pairing.generative or released.ndim == 1:
            return None
        size, first = len(tf.nest.flatten(self.pool)[0]), _FIRST * self._num
        sizes = sorted({min(first, size), size})
        even = [np.where(np.arange(size) < most, 1.0 / most, 0.0) for most in sizes]
        befores = [InputWeights(values, math.inf) for values in even]
        if self.weights is not None:
            befores.insert(0, self.weights)
        i, j = self._pairs
        # Both entries off the diagonal are released.
        noises = noise * np.where(i == j, 1.0, math.sqrt(0.5))
        # Without noise all of it is known, to rounding.
        relative = max(noise * self.size / float(np.trace(released)), _LEAST_NOISE)
        for before in befores:
            products = self._products_at(theta, whitening, np.flatnonzero(before.values)[-1] + 1)
            values = balanced_weights(
                products, released[i, j], noises, before.values, _LEAST_EFFECTIVE * self._num
            )
            if values is not None:
                return InputWeights(values, (before.noise**-2 + relative**-2) ** -0.5)
        return None

    def _products_at(self, theta: np.ndarray, whitening: np.ndarray, num: int) -> np.ndarray:
        """Returns each input's products by which it is weighted, of the first inputs of `pool`."""
        # Of the shape of the inputs in use, for which the simulation is traced.
        parts = [
            self._sums_at(theta, whitening, self._rows_of(np.arange(start, start + self._num)))
            for start in range(0, num, self._num)
        ]
        products: np.ndarray = np.concatenate([part["products"] for part in parts])
        return products

    def public_weights(self) -> RecordWeights | None:
        """Returns weights of the public inputs under the clip; None without weights."""
        if self.max_weight is None:
            return None
        scale = self.scale
        parts = (scale.weights, scale.most, scale.spread)
        return RecordWeights(*(tf.constant(part, self.dtype) for part in parts))

    def moments_of_trace(
        self, theta: np.ndarray, whitening: np.ndarray, trace: float
    ) -> SimulatedMoments:
        """Returns the moments at public inputs in coordinates of another unit.

        Args:
          theta: The parameters, shape [d].
          whitening: W but for its unit, shape [d, d].
          trace: The capped matrix's trace for one record, which the unit is made to fit.
        """
        low, high = -_MOST_LOG_LENGTH, _MOST_LOG_LENGTH
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2.0
            moments = self.moments_at(theta, math.exp(middle) * whitening)
            is_short = float(np.trace(moments.matrix)) < trace
            low, high = (middle, high) if is_short else (low, middle)
        return moments

    def _simulated_sums(
        self,
        vector: tf.Tensor,
        whitening: tf.Tensor,
        x: Structure,
        key: tf.Tensor,
        weights: RecordWeights | None,
    ) -> dict[str, tf.Tensor]:
        num = tf.nest.flatten(x)[0].shape[0]
        distribution = self.pairing.distribution(vector, x)
        seed = _random.tfp_seed(_random.fold_in(key, NUM_TWINS + 1))
        outcomes, usable = self.pairing.simulate(distribution, x, seed)
        records = self.pairing.records(x, outcomes)
        mask = tf.fill([num], True) & usable
        scores = self.scores(vector, whitening, records, mask, key, weights)
        centred = scores.centred
        squares = self._squares(centred.rows)
        lengths = tf.zeros([0], vector.dtype)
        if weights is not None:
            lengths = centred.length / weights.weight
        return {
            "row_slopes": tf.reduce_sum(tf.multiply(*centred.slope), axis=1),
            "row_squares": tf.reduce_sum(tf.square(centred.rows), axis=1),
            "ranks_slope": tf.reduce_sum(scores.ranks_slope, axis=0),
            "squares": tf.reduce_sum(squares, axis=0),
            "fourth_powers": tf.reduce_sum(tf.square(squares), axis=0),
            "num": tf.reduce_sum(tf.cast(scores.usable, vector.dtype)),
            "information": tf.einsum("nja,njb->ab", *scores.information),
            "matrix": tf.einsum("nja,njb->ab", centred.rows, centred.rows),
            "slope": tf.einsum("nja,njb->ab", *centred.slope),
            "covariance": tf.einsum("nja,njb->ab", centred.covariance, centred.covariance),
            "scale": tf.reduce_sum(centred.scale),
            "expected": tf.reduce_sum(centred.expected),
            "excess_slope": tf.reduce_sum(centred.excess_slope, axis=0),
            "excess_variance": tf.reduce_sum(centred.excess_variance),
            "wider_slope": tf.reduce_sum(centred.wider_slope),
            "wider_square": tf.reduce_sum(tf.square(centred.wider)),
            "wider_product": tf.reduce_sum(centred.wider * centred.psi),
            "lengths": lengths,
            "products": self._products(centred.rows),
        }

    @functools.cached_property
    def _pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """The entries of the released matrix by which public inputs are weighted."""
        i, j = np.tril_indices(self.size)
        if self.size <= _MOST_PAIRED:
            return i, j
        # A shift of a column changes those with the intercept, which comes first.
        kept = (i == j) | (j == self.intercept)
        return i[kept], j[kept]

    def _products(self, rows: tf.Tensor) -> tf.Tensor:
        i, j = self._pairs
        return tf.reduce_sum(tf.gather(rows, i, axis=2) * tf.gather(rows, j, axis=2), axis=1)

    def _squares(self, rows: tf.Tensor) -> tf.Tensor:
        """Returns what `CentredDiagonal` sums, where it is released."""
        if self.size <= MOST_DENSE:
            return tf.zeros([tf.shape(rows)[0], 0], rows.dtype)
        return squares_of(rows, self.clip.unit)
