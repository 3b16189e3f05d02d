"""One private fit in progress: it reserves steps in the ledger, runs them, and says what may be shown."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from tfp_dpvi import _random
from tfp_dpvi._tf import tf
from tfp_dpvi.gradients.shapes import VaryingShapeError, refuse_dynamic_shapes
from tfp_dpvi.metrics import joint_sensitivity
from tfp_dpvi.models import planning, workers
from tfp_dpvi.models.feeds import ArrayFeed, DatasetFeed
from tfp_dpvi.models.loop import LoopSettings, make_loop
from tfp_dpvi.models.sources import SourceFeed
from tfp_dpvi.models.state import State
from tfp_dpvi.privacy import BudgetExhaustedError, PrivacyPlan, Sensitivity
from tfp_dpvi.sampling import Sampler

_LOG = logging.getLogger("tfp_dpvi")
_STEPS_WORTH_COMPILING = 1000  # XLA takes 2 s to compile and saves about 0.4 ms a step of a small model.
_SHARE_OF_LEDGER = 0.02  # Of the time, at most, where steps are shorter than reservations: more are reserved at once.


class PrivateRun:
    """The train function of one `fit`.

    Args:
      model: the `DPModel`, compiled.
      state: its state.
      feed: where records come from.
      plan: what this fit may release.
      allowed: how many of the plan's releases the ledger-wide budget allows.
      steps_per_epoch: steps in an epoch.
      expected_batch_size: the public denominator qN.
      noise_scales: see `ClippedSum`.
      gradient_sensitivity: of the gradient alone; metrics may be released with it.
      planned_steps: steps of the whole fit, also where it was interrupted and these are its rest.
      known_releases: how many the ledger had when the plan was made; more are another model's.

    #### Formal guarantee

    A call runs no step that is not in the ledger already, and no more steps in all than `allowed`. It returns epsilon,
    or the number of steps, and an exact loss only where the compile settings say so.
    """

    def __init__(
        self,
        model: Any,
        state: State,
        feed: ArrayFeed | DatasetFeed | SourceFeed,
        plan: PrivacyPlan,
        *,
        allowed: int,
        steps_per_epoch: int,
        expected_batch_size: float,
        noise_scales: tuple[float, ...] | None,
        gradient_sensitivity: Sensitivity,
        planned_steps: int,
        known_releases: int,
    ) -> None:
        assert state.settings is not None
        assert plan.num_records is not None
        self.curve: Callable[[int], float] | None = None
        self._model, self._state, self._feed, self._plan = model, state, feed, plan
        self._settings = state.settings
        self._allowed = allowed
        self._steps_per_epoch = steps_per_epoch
        self._expected_batch_size = float(expected_batch_size)
        self._noise_scales = noise_scales
        self._gradient_sensitivity = gradient_sensitivity
        self._metrics = state.private_metrics
        if joint_sensitivity(self._metrics, self._gradient_sensitivity) != plan.sensitivity:
            raise AssertionError("The plan was priced for other metrics than those of compile.")
        self._priced = [metric.identity for metric in self._metrics]
        self._planned_steps = planned_steps
        self._num_records = plan.num_records
        # A fresh key for every fit; seeded runs go on counting steps instead, so that no noise is drawn twice.
        self._key = workers.agreed_key(model.distribute_strategy, tf.constant(_random.new_key(state.seed)))
        self._noise_multiplier = tf.constant(plan.noise_multiplier, tf.float64)
        self._compiled = False
        self._done = 0
        self._curve_from = 0
        self._reservation: int | None = None
        self._reserved = self._used = 0  # Steps of the open reservation, and how many of them ran.
        self._reserve_at_once = 1
        epsilon, delta = state.settings.epsilon, state.settings.delta
        self._budgets = () if epsilon is None or delta is None else ((epsilon, delta),)
        self._reserved_at = self._seconds_to_reserve = 0.0
        self._known_releases = known_releases
        self._name = f"{state.identity}/{state.fits}"

    def try_without_a_step(self, sampler: Sampler, tensors: Any) -> None:
        """Traces and compiles the step and runs it zero times: what cannot run fails before anything is spent."""
        with self._model.distribute_strategy.scope():  # As Keras runs it: elsewhere TensorFlow would trace it again.
            self._loop(sampler, tensors)

    def __call__(self, iterator: Any) -> dict[str, Any]:
        """One execution: what Keras calls for every `steps_per_execution` steps."""
        del iterator  # Keras's own counting of steps; records come from the feed.
        state = self._state
        if self._priced != [metric.identity for metric in self._metrics]:
            raise RuntimeError("A metric is not what this fit was priced for: leave metrics as they are while it runs.")
        number = state.steps_run
        steps = self._paid(min(int(self._model._steps_per_execution.numpy()), self._allowed - self._done))
        state.steps_run += steps
        state.epochs_run += steps / self._steps_per_epoch
        self._done += steps
        self._used += steps
        loss = 0.0
        for many, sampler, tensors in self._feed.calls(steps, self._key, number, self._compiled):
            counts = tf.constant(number, tf.int64), tf.constant(many, tf.int64)
            means = self._loop(sampler, tensors)(self._key, *counts, self._noise_multiplier, tensors)
            if self._metrics or self._settings.unsafe_training_metrics:
                exact, *shown = means.numpy().tolist()
                loss += exact * (many / steps)
                for metric, value in zip(self._metrics, shown, strict=True):
                    metric.add(value, many)
            number += many
        if self._done == self._allowed < self._plan.num_releases:
            _LOG.warning(
                "Training stops after %d of %d steps: the budget allows no more.",
                self._allowed,
                self._plan.num_releases,
            )
            self._model.stop_training = True
        return self._logs(loss)

    def _paid(self, steps: int) -> int:
        """Reserves steps ahead of their release (contract C6); returns how many may run now."""
        if self.steps_ahead >= steps:
            return steps
        self.close()
        if self._state.ledger.num_releases != self._known_releases:
            self._plan_again()
            steps = min(steps, self._allowed - self._done)
        begun = time.perf_counter()
        most = min(max(steps, self._reserve_at_once), self._allowed - self._done)
        while self._reservation is None:
            try:
                self._reservation = self._state.ledger.reserve(
                    self._plan, most, run=self._name, seeded=self._state.seed is not None, budgets=self._budgets
                )
            except BudgetExhaustedError:  # Another model was quicker.
                if most == 1 or workers.several(self._model.distribute_strategy):  # All workers run as many steps.
                    raise
                most //= 2
        steps = min(steps, most)
        self._reserved, self._used = most, 0
        self._known_releases = self._state.ledger.num_releases
        self._reserved_at, self._seconds_to_reserve = time.perf_counter(), time.perf_counter() - begun
        return steps

    @property
    def steps_ahead(self) -> int:
        """Steps that are reserved and have not run."""
        return self._reserved - self._used

    def close(self) -> None:
        """Gives back what was reserved and did not run."""
        if self._reservation is None:
            return
        ran = time.perf_counter() - self._reserved_at
        if self._used and ran * _SHARE_OF_LEDGER < self._seconds_to_reserve:
            self._reserve_at_once = 2 * self._reserved
        reservation, self._reservation = self._reservation, None
        self._state.ledger.confirm(reservation, self._used)
        self._known_releases -= self.steps_ahead
        self._reserved = self._used = 0

    def books(self) -> str:
        """What they hold, for somebody whose step failed."""
        num = self._state.ledger.num_releases - self.steps_ahead  # `close` gives them back.
        return f"This worker's ledger has {num} releases in it; the steps that failed are paid for, whether they ran or not."

    def _plan_again(self) -> None:
        """Another model has used the ledger meanwhile: what is left of the budgets and the epsilons shown are new."""
        if workers.several(self._model.distribute_strategy):
            raise RuntimeError(
                "Another model has used this worker's ledger while several workers train, which cannot learn of it. Fit one "
                f"after the other; {self._done} of {self._plan.num_releases} steps ran."
            )
        rest = self._plan.replace(num_releases=self._plan.num_releases - self._done)
        most = planning.most_releases(self._state, rest)
        self._allowed = self._done + most
        if most == 0:
            raise BudgetExhaustedError(
                f"Another model has used up the budget in this ledger; {self._done} of {self._plan.num_releases} steps ran."
            )
        self.curve = planning.make_curve(self._state, rest.replace(num_releases=most), self._steps_per_epoch)
        self._curve_from = self._done

    def _logs(self, loss: Any) -> dict[str, Any]:
        logs: dict[str, Any] = {}
        if self.curve is not None:
            self._state.epsilon_metric.value = float(self.curve(max(0, self._done - self._curve_from)))
            logs["epsilon"] = self._state.epsilon_metric.value
        else:
            logs["steps"] = self._state.steps_run
        for metric in self._metrics:
            logs[metric.name] = metric.current()
        if self._settings.unsafe_training_metrics:
            logs["unsafe_loss"] = loss
        return logs

    def _loop(self, sampler: Sampler, tensors: Any) -> Callable[..., Any]:
        """The loop for tensors of these shapes, made once for a compiled model."""
        model, state = self._model, self._state
        model._check_unchanged()
        spec = repr(tf.nest.map_structure(lambda part: (part.dtype.name, tuple(part.shape)), tensors))
        wanted = self._settings.jit_compile
        strategy = model.distribute_strategy if tf.distribute.has_strategy() else None  # Of one replica too.
        worth = model.gains_from_xla and self._planned_steps >= _STEPS_WORTH_COMPILING
        choices = (wanted,) if wanted is not None else (True, False) if worth and strategy is None else (False,)
        if model.run_eagerly:
            choices = (False,)
        for jit in choices:
            settings = LoopSettings(
                sampler=sampler,
                expected_batch_size=self._expected_batch_size,
                num_records=self._num_records,
                sensitivity=self._plan.sensitivity,
                noise_scales=self._noise_scales,
                jit_compile=jit,
                run_eagerly=bool(model.run_eagerly),
                strategy=strategy,
                metrics=self._metrics,
                gradient_sensitivity=self._gradient_sensitivity,
            )
            identity = (  # What a trace takes from the model.
                model.optimizer.l2_norm_clip,
                model.optimizer.clipping,
                model.step_identity,
                tuple(id(variable) for variable in model.trainable_variables),
                self._plan.sensitivity,
                self._noise_scales,
                tuple(metric.identity for metric in self._metrics),
                sampler.identity,
                self._expected_batch_size,
                self._num_records,
                jit,
                model.run_eagerly,
                spec,
            )
            self._compiled = jit and strategy is None
            if identity in state.loops:
                known = state.loops[identity]
                if known is None:  # It did not compile before.
                    continue
                return known
            variables = model.trainable_variables
            model.optimizer.build(variables)
            loop = make_loop(model.step_gradients, variables, model.optimizer, settings)
            zero = tf.constant(0, tf.int64)
            no_steps = (tf.zeros([2], tf.int64), zero, zero, self._noise_multiplier, tensors)
            try:
                loop(*no_steps)
                if jit and strategy is None and not model.run_eagerly:
                    refuse_dynamic_shapes(loop, no_steps)
            except (tf.errors.InvalidArgumentError, tf.errors.UnimplementedError, VaryingShapeError) as error:
                if not jit or wanted is not None:
                    raise
                _LOG.info("The step does not compile under XLA and runs without it: %s", error)
                state.loops[identity] = None
                continue
            state.loops[identity] = loop
            return loop
        raise AssertionError("unreachable: the last choice returns or raises")
