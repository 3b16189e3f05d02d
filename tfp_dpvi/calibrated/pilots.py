"""Chooses clip, learning rate and batches for a private fit from simulated records, without the data."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Protocol

import numpy as np

from tfp_dpvi import _validate as check
from tfp_dpvi._tf import Structure, keras
from tfp_dpvi.bayes.model import BayesianModel
from tfp_dpvi.calibrated.clip import curvature_releases
from tfp_dpvi.calibrated.pairing import CannotPairError, check_settings
from tfp_dpvi.calibrated.posterior import Calibration
from tfp_dpvi.calibrated.simulation import PairSimulator
from tfp_dpvi.calibrated.window import BURN_IN
from tfp_dpvi.gradients import Clip, joint_sensitivity
from tfp_dpvi.optimizers import DPKerasAdamOptimizer
from tfp_dpvi.privacy import PoissonSampling, PrivacyPlan, Sensitivity

_NUM_DRAWS = 64
_STEPS = 300
_RATE = 0.2
_CLIPS = (1.0, 1.4, 2.0)  # Relative to the median norm of a pair's gradient.
_FALLS = 0.4  # The fraction of steps over which the learning rate decays.
# Of the iterates in the window: more add jitter, fewer leave its mean far from the posterior's.
_RELAXATIONS = 2.0


class PairedModel(Protocol):
    """A model that a pilot can choose settings for, such as a `DPVI`."""

    gradients: str
    num_draws: int

    @property
    def bayesian_model(self) -> BayesianModel:
        """Prior and likelihood."""

    @property
    def calibration(self) -> Calibration:
        """The state of the paired clip."""


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
    model: PairedModel,
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
    try:
        check_settings(model.gradients, model.num_draws)
    except CannotPairError as reason:
        raise ValueError(f'pilot: clipping="paired" does not apply: {reason}.') from reason
    simulator = PairSimulator(model.bayesian_model, x)
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
