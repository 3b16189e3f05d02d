"""Settings for a private fit, clip, learning rate and batches, chosen from simulated records."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Protocol

import numpy as np

from tfp_dpvi import _validate as check
from tfp_dpvi._tf import Structure, keras
from tfp_dpvi.bayes.model import BayesianModel
from tfp_dpvi.calibrated.clip import curvature_releases
from tfp_dpvi.calibrated.requirements import CannotPairError, check_settings
from tfp_dpvi.calibrated.simulation import PairSimulator
from tfp_dpvi.calibrated.state import Calibration
from tfp_dpvi.calibrated.window import BURN_IN
from tfp_dpvi.data import Binary, Continuous, Integer, Schema
from tfp_dpvi.gradients import Clip, joint_sensitivity
from tfp_dpvi.optimizers import DPKerasAdamOptimizer, ScoringOptimizer
from tfp_dpvi.privacy import PoissonSampling, PrivacyPlan, Sensitivity

_NUM_DRAWS = 64
_STEPS = 300
_RATE = 0.2
# Relative to the median norm of a pair's gradient.
_CLIPS = (1.0, 1.4, 2.0)
# The fraction of steps over which the learning rate decays.
_FALLS = 0.4
# Of the iterates in the window: more add jitter, fewer leave its mean far from the posterior's.
_RELAXATIONS = 2.0


class PairedModel(Protocol):
    """A model that a pilot can choose settings for, such as a `DPVI`."""

    clipping: str
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

    Scoring steps, which `optimizer` makes, have coordinates and a clip of their own. Clip and rates
    are for `adam`: the clip is 1 to 2 times the median norm of a pair's gradient over draws from
    the prior, chosen for the narrowest expected posterior.

    Attributes:
      l2_norm_clip: The clip C of `adam`.
      learning_rate: Its learning rate at the first step.
      last_rate: The fraction of it in the window, at most 1: chosen for two relaxations of the
        iterates.
      batch_size: The expected number of records in a step.
      epochs: The number of epochs.
      scores: Whether `optimizer` makes scoring steps. Models with `clipping="flat"`, or with a
        latent whose density is a bound, have Adam.

    ```python
    >>> from tfp_dpvi.calibrated import Pilot
    >>> settings = Pilot(1.5, learning_rate=0.1, last_rate=0.2, batch_size=200, epochs=60)
    >>> settings.fit_settings
    {'batch_size': 200, 'epochs': 60}
    >>> settings.adam(1000, noise_multiplier=1.0).l2_norm_clip
    1.5

    ```
    """

    l2_norm_clip: float
    learning_rate: float
    last_rate: float
    batch_size: int
    epochs: int
    scores: bool = True

    def optimizer(self, num_records: int, **settings: float) -> keras.optimizers.Optimizer:
        """Returns the optimizer of a calibrated posterior.

        It makes scoring steps, as `compile` without an optimizer does, from the pilot's inputs; or
        is `adam` if not `scores`.

        Args:
          num_records: The public number N of records.
          **settings: Its other arguments: of scoring steps, the noise alone.
        """
        if not self.scores:
            return self.adam(num_records, **settings)
        if unknown := ", ".join(sorted({*settings} - {"noise_multiplier"})):
            raise TypeError(
                f"optimizer: scoring steps have no {unknown}: leave it out, or take `adam`."
            )
        return ScoringOptimizer(**settings, with_inputs=True)

    def adam(self, num_records: int, **settings: Any) -> keras.optimizers.Optimizer:
        """Returns Adam with this clip and a decaying learning rate, for the surrogate.

        With `clipping="paired"` a model then clips pairs, and parameters must be of order 1.

        Args:
          num_records: The public number N of records.
          **settings: Other arguments of the optimizer.
        """
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
    x: Structure | Schema | None = None,
    *,
    num_records: int,
    epsilon: float,
    delta: float,
    learning_rate: float = 0.1,
    seed: int = 0,
) -> Pilot:
    """Proposes settings for `DPVI(clipping="paired")`, at no privacy cost.

    Draws parameters from the prior and pairs of outcomes from the likelihood, at public inputs. The
    model keeps the inputs, as `fit(public_inputs=)` does: they give a prior of the curvature's
    shape, which narrows its posterior.

    Args:
      model: The model, whose paired clip later uses the simulation.
      x: Public or synthetic inputs that resemble the private ones, at least ten records; or the
        `Schema` of the inputs, numbers and binary columns in the order in which the likelihood gets
        them, whose invented records they then are, as in a `Study`. None for models of whole
        records.
      num_records: The public number N of records of the planned fit.
      epsilon: Its epsilon.
      delta: Its delta.
      learning_rate: That of the first step of `Pilot.adam`. With several modes a lower one, such as
        0.04, ends less often in a wrong one, but moves less far.
      seed: Seeds the simulation.

    Returns:
      Clip, learning rate, batch size and epochs.

    Raises:
      ValueError: The paired clip does not apply to the model, or an argument does not fit.

    #### Formal guarantee

    A function of the model and of its arguments, which are public.
    """
    num_records = check.count("num_records", num_records, 1)
    learning_rate = check.positive("learning_rate", learning_rate)
    try:
        check_settings(model.gradients, model.num_draws)
    except CannotPairError as reason:
        raise ValueError(f'pilot: clipping="paired" does not apply: {reason}.') from reason
    simulator = PairSimulator(model.bayesian_model, _inputs(x) if isinstance(x, Schema) else x)
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
        # The plan's standard deviation is then in units of the clip.
        l2_norm_clip=1.0,
        sensitivity=joint_sensitivity(
            curvature_releases(simulator.size, Clip(median)), Sensitivity()
        ),
    )
    count = (1.0 - BURN_IN) * steps
    precision = 1.0 / np.var(np.asarray(vectors)[:, simulator.pairing.index], axis=0)
    usable = [pairs for pairs in drawn if len(pairs.deltas) > simulator.size]

    def posterior_sd(clip: float) -> float:
        noise = (plan.deviation * clip * num_records / batch) ** 2 / count
        sds = [pairs.posterior_sd(num_records, clip, noise, precision) for pairs in usable]
        return float(np.median([sd for sd in sds if math.isfinite(sd)] or [0.1]))

    clip = min((share * median for share in _CLIPS), key=posterior_sd)
    falls_to = min(_RELAXATIONS * posterior_sd(clip) / math.sqrt(count) / learning_rate, 1.0)
    return Pilot(
        clip,
        learning_rate,
        falls_to,
        batch,
        epochs,
        scores=model.clipping == "paired" and not simulator.pairing.is_bound,
    )


def _inputs(schema: Schema) -> np.ndarray:
    """Returns invented inputs of a schema, float32 [1000, columns]."""
    for name, column in schema.columns.items():
        if not isinstance(column, Binary | Continuous | Integer):
            raise ValueError(
                f"pilot: x has the column {name!r}, a {type(column).__name__}: code it as Binary "
                "columns, leave out the outcome, or pass arrays of invented inputs."
            )
    return np.stack(list(schema.simulate(1000).values()), axis=1).astype(np.float32)
