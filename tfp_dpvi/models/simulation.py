"""Chooses clip, learning rate and batches for a private fit from simulated records, without the data."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tfp_dpvi import _validate as check
from tfp_dpvi._tf import Structure, function_of_model, keras, map_apart, tf
from tfp_dpvi.data import make_records
from tfp_dpvi.gradients import Clip, curvature_releases, joint_sensitivity
from tfp_dpvi.models.pairing import CannotPairError, Pairing
from tfp_dpvi.optimizers import DPKerasAdamOptimizer
from tfp_dpvi.posterior.curvature import CurvaturePrior
from tfp_dpvi.posterior.window import BURN_IN
from tfp_dpvi.privacy import PoissonSampling, PrivacyPlan, Sensitivity

if TYPE_CHECKING:
    from tfp_dpvi.models.dpvi import DPVI

_NUM_DRAWS = 64
_STEPS, _RATE = 300, 0.2
_CLIPS = (1.0, 1.4, 2.0)  # Relative to the median norm of a pair's gradient.
_FALLS = 0.4  # The fraction of steps over which it decays.
_RELAXATIONS = 2.0  # Of the iterates in the window: more add jitter, fewer leave its mean far from the posterior's.
_DEGREES, _LOG_FACTOR_SD, _KAPPA_SD = 32.0, 0.3, 0.1


@dataclasses.dataclass(frozen=True)
class Pilot:
    """Settings for a private fit, from simulated records.

    The clip is 1 to 2 times the median norm of a pair's gradient over draws from the prior, chosen for the narrowest
    expected posterior.
    """

    l2_norm_clip: float
    learning_rate: float  # Adam's at the first step.
    last_rate: float  # The fraction of it in the window, at most 1: chosen for two relaxations of the iterates.
    batch_size: int
    epochs: int

    def optimizer(self, num_records: int, **settings: Any) -> keras.optimizers.Optimizer:
        """Returns Adam with this clip and a decaying learning rate, for the public N; `settings` are its other arguments."""
        steps = self.epochs * math.ceil(num_records / self.batch_size)
        rate = keras.optimizers.schedules.CosineDecay(
            self.learning_rate, max(1, round(_FALLS * steps)), self.last_rate
        )
        return DPKerasAdamOptimizer(rate, l2_norm_clip=self.l2_norm_clip, **settings)

    @property
    def fit_settings(self) -> dict[str, int]:
        """Returns arguments of `fit`."""
        return {"batch_size": self.batch_size, "epochs": self.epochs}


def pilot(
    model: DPVI,
    x: Structure | None = None,
    *,
    num_records: int,
    epsilon: float,
    delta: float,
    learning_rate: float = 0.1,
    seed: int = 0,
) -> Pilot:
    """Proposes clip, learning rate, batch size and epochs for `DPVI(clipping="paired")`, at no privacy cost.

    Draws parameters from the prior and pairs of outcomes from the likelihood, at public or synthetic inputs `x` that resemble
    the private ones, at least ten records (None for models of whole records). The model keeps the inputs: they give a prior of
    the curvature's shape, which narrows its posterior. N, epsilon and delta are those of the planned fit. `learning_rate` is that
    of Adam's first step. With several modes a lower one, such as 0.04, ends less often in a wrong one, but moves less far.

    Raises:
      ValueError: the paired clip does not apply to the model, or an argument does not fit.

    #### Formal guarantee

    A function of the model and of its arguments, which are public.
    """
    num_records = check.count("num_records", num_records, 1)
    learning_rate = check.positive("learning_rate", learning_rate)
    simulator = PairSimulator(model, x)
    generator = np.random.default_rng(seed)
    vectors = simulator.pairing.coordinates.prior_draws(
        _NUM_DRAWS, generator.integers(2**31, size=2)
    )
    drawn = [simulator.pairs(vector, generator, 512) for vector in vectors]
    medians = [
        np.median(np.linalg.norm(pairs.deltas, axis=1)) for pairs in drawn if len(pairs.deltas)
    ]
    if not medians:
        raise ValueError(
            "pilot: no simulated pair has a finite gradient: check the prior with prior_predictive."
        )
    model.calibration.use(simulator)
    median = float(np.median(medians))
    batch = max(1, math.ceil(_RATE * num_records))
    epochs = max(1, round(_STEPS / math.ceil(num_records / batch)))
    steps = epochs * math.ceil(num_records / batch)
    plan = PrivacyPlan.calibrate(
        epsilon=epsilon,
        delta=delta,
        sampling=PoissonSampling(batch / num_records),
        num_releases=steps,
        l2_norm_clip=1.0,  # The plan's standard deviation is then in units of the clip.
        sensitivity=joint_sensitivity(
            curvature_releases(simulator.size, Clip(median)), Sensitivity()
        ),
    )
    count = (1.0 - BURN_IN) * steps
    precision = 1.0 / np.var(np.asarray(vectors)[:, simulator.pairing.index], axis=0)
    usable = [pairs for pairs in drawn if len(pairs.deltas) > simulator.size]

    def spread(clip: float) -> float:
        noise = (plan.deviation * clip * num_records / batch) ** 2 / count
        found = [pairs.spread(num_records, clip, noise, precision) for pairs in usable]
        return float(np.median([one for one in found if math.isfinite(one)] or [0.1]))

    clip = min((share * median for share in _CLIPS), key=spread)
    last = _RELAXATIONS * spread(clip) / math.sqrt(count)
    return Pilot(clip, learning_rate, min(last / learning_rate, 1.0), batch, epochs)


class PairSimulator:
    """Simulates pairs at public inputs; raises `ValueError` if the paired clip does not apply."""

    def __init__(self, model: DPVI, x: Structure | None) -> None:
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
            records = make_records(drawn, None, None, dtype=model.record_dtype, validate=False)
        else:
            rows = make_records(x, None, None, dtype=model.record_dtype, validate=True)
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
