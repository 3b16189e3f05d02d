"""Choosing clip, rate and batches for a private fit from simulated records, without touching the data."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from tfp_dpvi import _random
from tfp_dpvi import _validate as check
from tfp_dpvi._tf import Structure, keras, tf
from tfp_dpvi.data import make_records
from tfp_dpvi.gradients import Clip, curvature_releases, joint_sensitivity
from tfp_dpvi.models.pairing import CannotPairError, Pairing
from tfp_dpvi.optimizers import DPKerasAdamOptimizer
from tfp_dpvi.posterior import BURN_IN, CurvaturePrior
from tfp_dpvi.privacy import PoissonSampling, PrivacyPlan, Sensitivity

if TYPE_CHECKING:
    from tfp_dpvi.models.dpvi import DPVI

_NUM_DRAWS = 64
_STEPS, _RATE = 300, 0.2
_LEARNING_RATE = 0.1
_FALLS = 0.4  # The share of steps over which it falls.
_RELAXATIONS = (
    2.0  # Of the iterates in the window. More, and they jitter; fewer, and its mean lies far from the posterior's.
)
_DEGREES, _LOG_FACTOR_SD, _KAPPA_SD = 32.0, 0.3, 0.1


@dataclasses.dataclass(frozen=True)
class Pilot:
    """Settings for a private fit, from simulated records.

    Attributes:
      l2_norm_clip: the median length of a pair's gradient, over draws from the prior.
      learning_rate: of Adam at the first step.
      last_rate: the share of it that is left in the window: two relaxations are made there, see `pilot`.
      batch_size: expected batch size.
      epochs: how many.
    """

    l2_norm_clip: float
    learning_rate: float
    last_rate: float
    batch_size: int
    epochs: int

    def optimizer(self, num_records: int, **settings: Any) -> keras.optimizers.Optimizer:
        """Returns Adam with this clip, its rate falling over the fit.

        Args:
          num_records: the public N.
          **settings: others of `DPKerasAdamOptimizer`.
        """
        steps = self.epochs * math.ceil(num_records / self.batch_size)
        rate = keras.optimizers.schedules.CosineDecay(self.learning_rate, max(1, round(_FALLS * steps)), self.last_rate)
        return DPKerasAdamOptimizer(rate, l2_norm_clip=self.l2_norm_clip, **settings)

    @property
    def fit_settings(self) -> dict[str, int]:
        """Arguments of `fit`."""
        return {"batch_size": self.batch_size, "epochs": self.epochs}


def pilot(
    model: DPVI,
    x: Structure | None = None,
    *,
    num_records: int,
    epsilon: float,
    delta: float,
    seed: int = 0,
) -> Pilot:
    """Proposes clip, rate, batch size and epochs for `DPVI(clipping="paired")`, and costs nothing.

    Draws parameters from the prior and pairs of outcomes from the likelihood, at public inputs. The model keeps the inputs: its
    posterior then knows the shape of the curvature beforehand, which narrows it.

    Args:
      model: the model, compiled or not.
      x: public or made-up inputs that look like the private ones, at least ten records; None for models of whole records.
      num_records: the public N.
      epsilon: of the fit that is planned.
      delta: likewise.
      seed: of the simulation.

    Raises:
      ValueError: the paired clip does not apply to the model, or an argument does not fit.

    #### Formal guarantee

    A function of the model and of its arguments, which are public.
    """
    num_records = check.count("num_records", num_records, 1)
    simulator = PairSimulator(model, x)
    generator = np.random.default_rng(seed)
    medians, drawn = [], []
    for _ in range(_NUM_DRAWS):
        params = model.prior.sample(seed=_random.tfp_seed(tf.constant(generator.integers(2**31, size=2))))
        drawn.append(simulator.pairs(params, generator, 512))
        norms = np.linalg.norm(drawn[-1].deltas, axis=1)
        norms = norms[np.isfinite(norms) & (norms > 0.0)]
        if len(norms):
            medians.append(np.median(norms))
    if not medians:
        raise ValueError(
            "pilot: no simulated pair has a finite gradient; see that the prior draws sensible parameters."
        )
    model.calibration.simulator = simulator
    clip = float(np.median(medians))
    batch = max(1, math.ceil(_RATE * num_records))
    epochs = max(1, round(_STEPS / math.ceil(num_records / batch)))
    steps = epochs * math.ceil(num_records / batch)
    plan = PrivacyPlan.calibrate(
        epsilon=epsilon,
        delta=delta,
        sampling=PoissonSampling(batch / num_records),
        num_releases=steps,
        sensitivity=joint_sensitivity(curvature_releases(simulator.size, Clip(clip)), Sensitivity()),
    )
    count = (1.0 - BURN_IN) * steps
    noise = (plan.noise_multiplier * clip * num_records / batch) ** 2 / count
    spreads = [pairs.spread(num_records, clip, noise) for pairs in drawn if pairs.num_differing > len(pairs.deltas.T)]
    last = _RELAXATIONS * float(np.median(spreads or [_LEARNING_RATE])) / math.sqrt(count)
    return Pilot(clip, _LEARNING_RATE, min(last / _LEARNING_RATE, 1.0), batch, epochs)


class PairSimulator:
    """Simulates pairs at public inputs.

    Args:
      model: a `DPVI`.
      x: public inputs, or None.

    Raises:
      ValueError: the paired clip does not apply.
    """

    def __init__(self, model: DPVI, x: Structure | None) -> None:
        if model.generative != (x is None):
            wanted = (
                "no x, for it generates whole records" if model.generative else "x: public inputs like the private ones"
            )
            raise ValueError(f"pilot: this model needs {wanted}.")
        self._model, self._generative = model, x is None
        if x is None:
            drawn = model.distribution_at(model.prior.sample(seed=tf.constant([0, 0])), None).sample(16, seed=[0, 1])
            records = make_records(drawn, None, None, dtype=model.record_dtype, validate=False)
        else:
            rows = make_records(x, None, None, dtype=model.record_dtype, validate=True)
            params = model.prior.sample(seed=tf.constant([0, 0]))
            y = model.distribution_at(params, tf.nest.map_structure(tf.constant, rows.x)).sample(seed=[0, 1])
            records = dataclasses.replace(rows, y=tf.nest.map_structure(lambda part: part.numpy(), y))
        self._x, self._num = records.x, records.num
        try:
            self.pairing = Pairing(model, records)
        except CannotPairError as reason:
            raise ValueError(f'pilot: clipping="paired" does not apply: {reason}.') from reason
        self.size = len(self.pairing.index)
        self._traced = tf.function(self.pairing.pairs, autograph=False)

    def pairs(self, params: Structure, generator: np.random.Generator, num: int) -> Pairs:
        """Returns simulated pairs.

        Args:
          params: one value of the parameters.
          generator: of the inputs and outcomes.
          num: how many.
        """
        rows = generator.integers(self._num, size=num)
        x = tf.nest.map_structure(lambda part: tf.constant(part[rows]), self._x)
        seeds = tf.constant(generator.integers(2**31, size=(2, 2)), tf.int32)
        params = tf.nest.map_structure(tf.convert_to_tensor, params)
        first, second, deltas, *logs = self._traced(params, x, seeds)
        places = np.repeat(self.pairing.coordinates.flatten_one(params)[None, self.pairing.index], num, axis=0)
        return Pairs(x, (first, second), deltas.numpy().astype(np.float64), (logs[0], logs[1]), places)

    def pairs_along(self, path: np.ndarray, generator: np.random.Generator, num: int) -> Pairs:
        """Returns simulated pairs at several parameters, as many at each.

        Args:
          path: all coordinates of each, shape [b, D].
          generator: of the inputs and outcomes.
          num: how many at each.
        """
        found = [self.pairs(self.pairing.coordinates.params_at(one), generator, num) for one in path]
        parts = [(one.x, one.outcomes, tf.constant(one.deltas), one.log_probs) for one in found]
        x, outcomes, deltas, logs = tf.nest.map_structure(lambda *each: tf.concat(each, axis=0), *parts)
        return Pairs(x, outcomes, deltas.numpy(), logs, np.repeat(path[:, self.pairing.index], num, axis=0))


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Simulated pairs at public inputs.

    Attributes:
      x: inputs of n records.
      outcomes: two outcomes for each.
      deltas: differences of their scores, shape [n, d].
      log_probs: their log densities where they were drawn, two tensors of shape [n].
      places: the parameters that they were drawn at, shape [n, d].
    """

    x: Structure
    outcomes: tuple[Structure, Structure]
    deltas: np.ndarray
    log_probs: tuple[tf.Tensor, tf.Tensor]
    places: np.ndarray

    @property
    def num_differing(self) -> int:
        """How many pairs have a difference."""
        return int(np.count_nonzero(np.any(self.clipped(math.inf) != 0.0, axis=1)))

    def clipped(self, clip: float) -> np.ndarray:
        """Returns the clipped differences, zero where one is not finite: shape [n, d]."""
        deltas = np.where(np.isfinite(self.deltas).all(axis=1, keepdims=True), self.deltas, 0.0)
        norms = np.linalg.norm(deltas, axis=1, keepdims=True)
        psi: np.ndarray = deltas * np.minimum(1.0, clip / np.maximum(norms, 1e-12))
        return psi

    def spread(self, num_records: int, clip: float, noise: float) -> float:
        """Returns the posterior's median standard deviation under a flat prior, for N records.

        Args:
          num_records: N.
          clip: C.
          noise: variance of the noise on a coordinate of the window's mean score.
        """
        prior = self.curvature_prior(num_records, clip)
        assert prior.curvature is not None
        inverse = np.linalg.inv(prior.curvature)
        covariance = inverse @ (prior.matrix + noise * np.eye(len(inverse))) @ inverse
        return float(np.median(np.sqrt(np.diag(covariance))))

    def curvature_prior(self, num_records: int, clip: float) -> CurvaturePrior:
        """Returns what the simulation says of the curvature at its parameters, for N records.

        Args:
          num_records: N.
          clip: C, or `math.inf`.
        """
        psi, deltas = self.clipped(clip), self.clipped(math.inf)
        size = deltas.shape[1]
        matrix, slope = (num_records / 2.0 * (psi.T @ other) / len(psi) for other in (psi, deltas))
        ridge = 1e-3 * np.trace(matrix) / size * np.eye(size)
        kappa = float(np.trace(slope) / np.trace(matrix))
        slope = (slope + slope.T) / 2.0 + ridge
        return CurvaturePrior(matrix + ridge, _DEGREES * size, _LOG_FACTOR_SD, (kappa, _KAPPA_SD * kappa), slope)
