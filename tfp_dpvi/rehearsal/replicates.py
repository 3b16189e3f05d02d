"""Fits of one model to many simulated data sets, by one compiled step.

The step is traced once for a model, a method and the shapes of the records. A replicate resets the
variables, runs the step with a key of its own and computes the posterior. There is no Keras fit
and no ledger: nothing is spent on simulated records. The noise is that of a first fit within the
budget.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from tfp_dpvi import _random
from tfp_dpvi._tf import Optimizer, Structure, tf, tfd
from tfp_dpvi.bayes.coordinates import Coordinates
from tfp_dpvi.bayes.model import BayesianModel
from tfp_dpvi.calibrated.centred_fit import NUM_STEPS, CentredFit, centred_posterior
from tfp_dpvi.calibrated.posterior import FAILURES, Calibrated
from tfp_dpvi.data import Records, UnitRows, make_records
from tfp_dpvi.gradients import StepSpec
from tfp_dpvi.optimizers import ScoringOptimizer
from tfp_dpvi.privacy import NeighboringRelation, PrivacyLedger
from tfp_dpvi.sampling import FullBatchSampler
from tfp_dpvi.training import Mechanism, initial_state
from tfp_dpvi.training.compiled import CompiledSteps

# From so many steps on XLA is worth its time.
_MANY_STEPS = 100_000

Released = dict[str, Structure]
"""The accumulators over a fit's released values, by name."""


class Replicate(NamedTuple):
    """The fit to one data set.

    Attributes:
      draws: Draws of the posterior in the coordinates of `Replicates`, shape [S, D].
      calibrated: The calibrated posterior, or None if there is none.
      seconds: The time of the steps and the posterior.
      posterior_seconds: That of the posterior.
    """

    draws: np.ndarray
    calibrated: Calibrated | None
    seconds: float
    posterior_seconds: float

    @property
    def warnings(self) -> list[str]:
        """The warnings of the posterior's checks."""
        return [] if self.calibrated is None else self.calibrated.checks.warnings


@dataclasses.dataclass(frozen=True)
class Method:
    """A way to fit a model, as what a compiled step needs.

    Attributes:
      model: Prior and likelihood.
      mechanism: The release of each step, with its noise.
      optimizer: The private optimizer.
      variables: What it trains.
      num_steps: The number of steps of a fit.
      posterior: `posterior(released, mechanism)` returns the calibrated posterior of released
        values, or None.
      uncalibrated: `uncalibrated(num, seed)` returns draws where there is none.
      boundaries: The numbers of steps before which `advance` is called.
      advance: `advance(step, released, mechanism)` prepares the next steps from released values.
      settings: What was chosen for the fits, to report.
    """

    model: BayesianModel
    mechanism: Mechanism
    optimizer: Optimizer
    variables: Sequence[tf.Variable]
    num_steps: int
    posterior: Callable[[Released, Mechanism], Calibrated | None]
    uncalibrated: Callable[[int, int], Structure]
    boundaries: Sequence[int] = (0,)
    advance: Callable[[int, Released, Mechanism], None] = lambda step, released, mechanism: None
    settings: dict[str, float] = dataclasses.field(default_factory=dict)

    def priced(
        self, epsilon: float, delta: float, ledger: PrivacyLedger | None = None
    ) -> Mechanism:
        """Returns the mechanism with the noise of a first fit within a budget.

        Args:
          epsilon: The budget of a fit.
          delta: Its delta.
          ledger: What the budget was spent for before; None for nothing.
        """
        ledger = PrivacyLedger() if ledger is None else ledger
        return self.mechanism.calibrated(
            ledger, epsilon=epsilon, delta=delta, num_releases=self.num_steps
        )


def centred(
    prior: tfd.Distribution,
    likelihood: Callable[..., tfd.Distribution],
    x: Structure,
    y: Structure | None,
    public_inputs: Structure | None,
    *,
    epsilon: float,
    delta: float,
    num_steps: int = NUM_STEPS,
    neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE,
    max_weight: float | None = None,
) -> Method:
    """Returns what `compile` without an optimizer does: scoring steps with the centred clip.

    Args:
      prior: As in `DPVI`.
      likelihood: As in `DPVI`.
      x: Inputs whose shapes and dtypes are those of all data sets.
      y: Outcomes, in the same way; None for a model of whole records.
      public_inputs: As in `DPVI.fit`.
      epsilon: The budget of a fit.
      delta: Its delta.
      num_steps: The number of steps of a fit, each over all records.
      neighboring_relation: As in `DPModel.compile`.
      max_weight: As in `DPVI.fit`, for data sets with weights.

    Raises:
      ValueError: Scoring steps do not apply to the model, or not with these public inputs.
    """
    model = BayesianModel(prior, likelihood)
    weights = None if max_weight is None else np.ones(len(tf.nest.flatten(y)[0]))
    records = records_of(x, y, model.dtype, weights, max_weight)
    fit = CentredFit(model)
    scoring = fit.prepare(records, public_inputs)
    fit.begin()
    num = records.num
    gradient = scoring.gradient(StepSpec(float(num), num))
    mechanism = Mechanism(
        FullBatchSampler(num),
        gradient,
        float(num),
        num,
        neighboring_relation=neighboring_relation,
        person=records.person,
    )

    def posterior(released: Released, mechanism: Mechanism) -> Calibrated | None:
        try:
            return centred_posterior(scoring, released, mechanism)
        except FAILURES:
            return None

    def advance(step: int, released: Released, mechanism: Mechanism) -> None:
        if step == 0:
            scoring.restart()
        scoring.advance(step, num_steps, released, mechanism)

    method = Method(
        model,
        mechanism,
        ScoringOptimizer(),
        [scoring.theta],
        num_steps,
        posterior,
        lambda num, seed: prior.sample(num, seed=tf.constant([0, seed], tf.int32)),
        boundaries=scoring.boundaries(num_steps),
        advance=advance,
    )
    return dataclasses.replace(method, mechanism=method.priced(epsilon, delta))


def records_of(
    x: Structure,
    y: Structure | None,
    dtype: np.dtype,
    weights: np.ndarray | None = None,
    max_weight: float | None = None,
) -> Records:
    """Returns records of rows, or of persons if x is a `UnitRows` and y has their shape.

    Args:
      x: The inputs.
      y: The outcomes.
      dtype: The float type.
      weights: Weights of the records, shape [n], or None.
      max_weight: The largest weight, or None.
    """
    if isinstance(x, UnitRows):
        return Records(x, y, None, len(x.mask))
    return make_records(x, y, weights, dtype=dtype, validate=False, max_weight=max_weight)


class Replicates:
    """Fits of a method to data sets of the same shapes; each starts as the first one did.

    Args:
      method: The method.
      num_draws: The number S of draws of a posterior.
      use_xla: Whether to compile the step with XLA where it can be, which takes seconds and is
        worth it for many replicates.

    Attributes:
      method: The method.
      coordinates: The coordinates of the draws: logarithms of positive parameters, and D in all.
    """

    def __init__(self, method: Method, *, num_draws: int = 1000, use_xla: bool = False) -> None:
        self.method = method
        self.coordinates = Coordinates(method.model.prior, log_scales=True)
        self._plain = Coordinates(method.model.prior)
        self._num_draws = num_draws
        strategy = tf.distribute.get_strategy()
        jit_compile = None if use_xla else False
        self._compiled = CompiledSteps(method.optimizer, strategy, jit_compile, run_eagerly=False)
        gains = method.mechanism.gradient.gains_from_xla
        self._compiled.begin(method.variables, _MANY_STEPS, gains)
        self._start: list[tuple[tf.Variable, np.ndarray]] = []

    def fit(
        self,
        x: Structure,
        y: Structure | None,
        seed: int,
        mechanism: Mechanism | None = None,
        weights: np.ndarray | None = None,
    ) -> Replicate:
        """Fits one data set.

        Args:
          x: The inputs.
          y: The outcomes.
          seed: Determines all random numbers of the fit.
          mechanism: The method's with other noise; None for the method's.
          weights: The weights, for a method with a largest one.
        """
        started = time.perf_counter()
        mechanism = mechanism or self.method.mechanism
        released = self._run(x, y, seed, mechanism, weights)
        ran = time.perf_counter()
        calibrated = self.method.posterior(released, mechanism)
        draws = self._draws(calibrated, seed)
        ended = time.perf_counter()
        return Replicate(draws, calibrated, ended - started, ended - ran)

    def _run(
        self,
        x: Structure,
        y: Structure | None,
        seed: int,
        mechanism: Mechanism,
        weights: np.ndarray | None,
    ) -> Released:
        """Runs all steps from the start; returns what accumulated."""
        method = self.method
        records = records_of(x, y, method.model.dtype, weights).tensors()
        steps = self._compiled.steps_for(mechanism, records)
        # Tracing has made the optimizer's variables.
        if not self._start:
            variables = (*method.variables, *method.optimizer.variables)
            self._start = [(variable, variable.numpy()) for variable in variables]
        for variable, value in self._start:
            variable.assign(value)
        key = tf.constant(_random.new_key(seed))
        state = initial_state(mechanism, 0, method.num_steps)
        ends = [*method.boundaries[1:], method.num_steps]
        for step, end in zip(method.boundaries, ends, strict=True):
            method.advance(step, self._by_name(state.accumulated), mechanism)
            num = tf.constant(end - step, tf.int64)
            state = steps(state, num, records, key, mechanism.noise)
        return self._by_name(state.accumulated)

    def _by_name(self, accumulated: Sequence[Structure]) -> Released:
        names = [release.name for release in self.method.mechanism.joint]
        return dict(zip(names, accumulated, strict=True))

    def _draws(self, calibrated: Calibrated | None, seed: int) -> np.ndarray:
        """Returns draws of a posterior in the coordinates."""
        if calibrated is None:
            return flat(self.coordinates, self.method.uncalibrated(self._num_draws, seed))
        draws = calibrated.mixture.sample(self._num_draws, np.random.default_rng(seed))
        if calibrated.log_scales:
            return draws
        parts = tf.split(tf.constant(draws, self._plain.dtype), self._plain.sizes, axis=-1)
        return flat(self.coordinates, self._plain.constrain(parts))


def flat(coordinates: Coordinates, draws: Structure) -> np.ndarray:
    """Returns draws of the parameters in coordinates, float64 of shape [S, D].

    Args:
      coordinates: The coordinates.
      draws: Draws in the prior's structure, which run over the first dimension.
    """
    return tf.concat(coordinates.flatten_batch(draws), axis=-1).numpy().astype("float64")
