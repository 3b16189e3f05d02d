"""`fit` of a private model: builds the mechanism, calibrates its noise and makes the train function that Keras calls."""

from __future__ import annotations

import abc
import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from tfp_dpvi._tf import Structure, keras, layers_within, refuse_keras_3, steps_per_execution, tf
from tfp_dpvi.callbacks import PrivateBackupAndRestore, StepsBar
from tfp_dpvi.data import Data, Records
from tfp_dpvi.data.shapes import input_specs
from tfp_dpvi.gradients import Clip, ClippedGradient, StepSpec
from tfp_dpvi.models import arguments, evaluation, saving
from tfp_dpvi.privacy import BudgetExhaustedError
from tfp_dpvi.training import Mechanism
from tfp_dpvi.training.budget import calibrate
from tfp_dpvi.training.checkpoint import Checkpoint
from tfp_dpvi.training.distribution import Workers
from tfp_dpvi.training.fit import PrivateFit

LOG = logging.getLogger("tfp_dpvi")
_STEPS_PER_CALL = 50


class FittedModel(evaluation.EvaluatedModel):
    """The part of `DPModel` that fits."""

    @abc.abstractmethod
    def clipped_gradient(self, spec: StepSpec) -> ClippedGradient:
        """See `DPModel`."""

    @property
    def clip(self) -> Clip:
        """The optimizer's clip."""
        return self.optimizer.clip

    def before_fit(self, num_steps: int) -> None:
        """Runs before a fit of so many steps spends privacy; for subclasses."""

    def after_fit(self) -> None:
        """Runs after a fit; for subclasses."""

    def drop_predictions(self) -> None:
        """Drops traced predictions if they hold values of a fit as constants; runs before and after a fit. For subclasses."""

    def check_records(self, records: Records) -> None:
        """Raises if these records (or a zero record of their shapes) do not fit the model; for subclasses."""

    def fault_of_variables(self, thorough: bool) -> str | None:
        """Returns a reason to stop training, from released values, or None; `thorough` runs slower checks too."""
        del thorough
        finite = all(
            bool(np.isfinite(variable.numpy()).all()) for variable in self.trainable_variables
        )
        return None if finite else "a variable is not finite"

    def check_labels(self, records: Records) -> None:
        """Raises if records have values of probability zero under the model: the curator's check, outside the guarantee."""

    def _refuse_while_fitting(self, call: str) -> None:
        if self._dp.fitting.locked():
            raise RuntimeError(
                f"{call} was called while fit runs, by a callback or in another thread, when the settings cannot change. Call "
                f"{call} after fit has returned; this call spent no privacy."
            )

    def _check_precision(self, variables: Sequence[tf.Variable] = ()) -> None:
        """Refuses dtypes other than float32 and float64: in float16, rounding lets one record move a sum by many clips."""
        held = [
            (layer.name, layer.compute_dtype, layer.dtype_policy.name)
            for layer in layers_within(self)
        ]
        for name, dtype, shown in [
            *held,
            *((each.name, each.dtype, each.dtype.name) for each in variables),
        ]:
            if (
                dtype
                and tf.as_dtype(dtype).is_floating
                and tf.as_dtype(dtype) not in (tf.float32, tf.float64)
            ):
                raise ValueError(
                    f"{name!r} computes in {shown}, whose rounding lets one record move a sum by many clips: use float32 or "
                    "float64,\nfor instance dtype='float32' or keras.mixed_precision.set_global_policy('float32'); see docs/sharp_edges.md."
                )

    # ------------------------------------------------------------------ fit

    def fit(  # noqa: D417
        self,
        x: Structure | None = None,
        y: Structure | None = None,
        *,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: int | str = "auto",
        callbacks: Sequence[keras.callbacks.Callback] | None = None,
        sample_weight: np.ndarray | None = None,
        num_records: int | None = None,
        sampling: str | None = None,
        sampling_probability: float | None = None,
        steps_per_epoch: int | None = None,
        initial_epoch: int = 0,
        validation_data: arguments.Validation | None = None,
        validation_is_public: bool = False,
        unsafe_validation: bool = False,
        validation_freq: int | Sequence[int] = 1,
        validation_batch_size: int | None = None,
        validate: bool = True,
        stream: bool | None = None,
        **refused: Any,
    ) -> keras.callbacks.History:
        """Trains on private records. Draws Poisson batches itself and spends privacy budget.

        Args:
          x: array of shape [N, ...], dict or tuple of arrays, or DataFrame (a dict of its columns);
            memory maps, lazy arrays (`h5py.Dataset`, those of zarr, dask, tensorstore, xarray), or
            sources with a length and `source[indices]` for increasing int64 indices; or a
            `tf.data.Dataset` of batches x, (x, y) or (x, y, sample_weight), with `num_records`,
            `steps_per_epoch` and a declared `sampling`.
          y: likewise, or None for models of whole records.
          batch_size: *expected* batch size B, default 256: each step includes each record with probability
            B / num_records. `batch_size >= num_records` uses full batches, without amplification by sampling.
          epochs: passes of ceil(num_records / batch_size) steps each.
          verbose: as in Keras.
          callbacks: Keras callbacks; they get only public and privatised values.
          sample_weight: array of shape [N] of weights >= 0, which multiply a record's loss before the clip.
          num_records: the public number of records N, by default `len(x)`; declare another to hide the exact one.
          sampling: for arrays "poisson" (default) or "fixed_size", exactly `batch_size` distinct records in each step, with
            RDP accounting under replace-one. For a dataset, the declared sampling of its batches: "poisson", or
            "each_record_once_per_epoch", accounted without amplification.
          sampling_probability: the inclusion probability for a dataset of Poisson batches.
          steps_per_epoch: default ceil(num_records / batch_size).
          initial_epoch: as in Keras.
          validation_data: `(x, y)` or `(x, y, sample_weight)`, or batches of these as a `tf.data.Dataset` or Keras `Sequence`;
            needs one of the next two arguments.
          validation_is_public: declares that the validation records are public.
          unsafe_validation: whether to show exact losses of private validation records; the report says so.
          validation_freq: as in Keras.
          validation_batch_size: for validation arrays, default 1024.
          validate: whether to refuse NaN and infinite values, a check outside the guarantee; without it, and for streamed
            records, such records contribute exactly zero.
          stream: whether to read rows from their source as steps draw them; by default for sources,
            and for memory maps and lazy arrays above 2 GiB (smaller ones are read whole, once).
            Batches and guarantee are the same.

        Returns:
          A Keras `History` of epsilon and of public and privatised values.

        Raises:
          RuntimeError: the model is not compiled.
          BudgetExhaustedError: the budget allows no step; nothing was run.
          ValueError, TypeError: bad arguments; no privacy was spent.
        """
        given = list(getattr(callbacks, "callbacks", tf.nest.flatten(callbacks or [])))
        backup = self._check_fit(refused, epochs, initial_epoch, given)
        validation = arguments.check_validation(
            validation_data, validation_is_public, unsafe_validation, self.record_dtype
        )
        data = self.make_data(
            x,
            y,
            sample_weight,
            batch_size=batch_size,
            num_records=num_records,
            sampling=sampling,
            sampling_probability=sampling_probability,
            steps_per_epoch=steps_per_epoch,
            validate=validate,
            stream=stream,
        )
        self._check_callbacks(given, validation)
        with self._running(data, epochs, initial_epoch, backup, num_records is not None) as (
            run,
            initial_epoch,
        ):
            if run is None:  # A resumed fit that was complete.
                return self._complete_history(epochs)
            unsafe_validation = (
                unsafe_validation and validation is not None and not validation_is_public
            )
            with (
                self._unsafe(unsafe_validation),
                Workers(self.distribute_strategy).naming_lost(run.spent),
            ):
                replicas = self.distribute_strategy.num_replicas_in_sync
                return super().fit(
                    # Keras counts steps with it; records are sampled inside the step.
                    tf.data.Dataset.range(replicas).batch(replicas).repeat(),
                    epochs=epochs,
                    steps_per_epoch=data.steps_per_epoch,
                    initial_epoch=initial_epoch,
                    verbose=verbose,
                    callbacks=_between_ours(given, backup, run, verbose),
                    validation_data=validation,
                    validation_freq=validation_freq,
                    validation_batch_size=validation_batch_size or 1024,
                )

    def _check_fit(
        self,
        refused: dict[str, Any],
        epochs: int,
        initial_epoch: int,
        callbacks: Sequence[keras.callbacks.Callback],
    ) -> PrivateBackupAndRestore | None:
        """Checks the arguments of `fit`; returns the backup among its callbacks."""
        if self._dp.target is None or self.optimizer is None:
            raise RuntimeError(
                f"{type(self).__name__}.fit was called before compile: call compile first."
            )
        self._refuse_while_fitting("fit")
        arguments.refuse(refused)
        arguments.check_counts(epochs=epochs)
        if not 0 <= initial_epoch < epochs:
            raise ValueError(
                f"initial_epoch={initial_epoch} must be at least 0 and below epochs={epochs}."
            )
        refuse_keras_3("callbacks", callbacks)
        return next((one for one in callbacks if isinstance(one, PrivateBackupAndRestore)), None)

    def _check_callbacks(
        self, callbacks: Sequence[keras.callbacks.Callback], validation: arguments.Validation | None
    ) -> None:
        """Raises if checkpoints or evaluations would fail after an epoch, when privacy has been spent."""
        arguments.check_checkpoints(callbacks, self.save)
        if validation is not None:
            few: Any = (validation,)
            settings: dict[str, int] = {}
            if isinstance(validation, tuple):
                # At least one row for each replica; a part of a batch, as in `fit`: one trace.
                few = tf.nest.map_structure(
                    lambda part: None if part is None else part[:16], validation
                )
                settings = {"batch_size": 32}
            x, y, weight = (*few, None, None)[:3]
            self.evaluate(x, y, sample_weight=weight, steps=1, verbose=0, **settings)

    def make_data(
        self,
        x: Structure | None,
        y: Structure | None = None,
        sample_weight: np.ndarray | None = None,
        **settings: Any,
    ) -> Data:
        """Returns checked records with their sampler, for `mechanism` and a custom training loop; arguments as in `fit`."""
        target = self._dp.target
        physical = None if target is None else target.physical_batch_size
        return arguments.make_data(
            self, x, y, sample_weight, physical_batch_size=physical, **settings
        )

    def mechanism(self, data: Data) -> Mechanism:
        """Returns the mechanism of each step of a fit on data from `make_data`: sampler, clipped gradient, noise and metrics.

        Its sensitivity and privacy cost are known before anything is traced. The noise multiplier is the optimizer's, or None:
        see `Mechanism.calibrated`.
        """
        target = self._dp.target
        if target is None:
            raise RuntimeError(
                f"{type(self).__name__}.mechanism was called before compile: call compile first."
            )
        self.optimizer.refuse_other_noise(target.noise)
        spec = StepSpec(data.batch_size, data.num_records)
        return Mechanism(
            data.sampler,
            self.clipped_gradient(spec),
            data.batch_size,
            data.num_records,
            target.noise,
            metrics=self._dp.private_metrics,
            neighboring_relation=target.neighboring_relation,
            accountant=target.accountant,
            randomness=target.randomness or "",
            # Without noise and clip, as on simulated records, exact losses are shown too.
            unsafe_loss=target.unsafe_training_metrics
            or (target.noise == 0.0 and math.isinf(self.clip.bound)),
        )

    @contextlib.contextmanager
    def _running(
        self,
        data: Data,
        epochs: int,
        initial_epoch: int,
        backup: PrivateBackupAndRestore | None,
        declared: bool,
    ) -> Iterator[tuple[PrivateFit | None, int]]:
        """Plans the fit and compiles its step; afterwards refunds reserved steps that did not run."""
        state, run = self._dp, None
        if not state.fitting.acquire(blocking=False):
            self._refuse_while_fitting("fit")
        counter = steps_per_execution(self)
        before = counter.numpy()
        try:
            run, initial_epoch = self._begin(data, epochs, initial_epoch, backup)
            state.inputs = input_specs(data.records)
            state.num_records, state.num_records_declared = data.num_records, declared
            if (
                run is not None
                and state.target is not None
                and state.target.unsafe_training_metrics
            ):
                state.ledger.record_exposure(
                    "exact training losses were shown (unsafe_training_metrics)."
                )
            counter.assign(self._steps_per_call(data))
            state.running = run
            self.drop_predictions()
            with self.optimizer.settings_held():
                yield run, initial_epoch
        finally:
            if run is not None:
                run.close()
                self.drop_predictions()
                state.accumulated, state.mechanism = run.accumulated, run.mechanism
            state.running = self.train_function = None  # It holds the fit's key and records.
            counter.assign(before)
            state.fitting.release()
            self.after_fit()

    def _steps_per_call(self, data: Data) -> int:
        if self._dp.steps_per_execution_is_set:
            return int(steps_per_execution(self).numpy())
        return min(_STEPS_PER_CALL, data.steps_per_epoch)

    def _begin(
        self, data: Data, epochs: int, initial_epoch: int, backup: PrivateBackupAndRestore | None
    ) -> tuple[PrivateFit | None, int]:
        """Returns the prepared fit and its first epoch; None if a resumed fit is complete."""
        state, workers = self._dp, Workers(self.distribute_strategy)
        assert state.compiled is not None
        self._check_precision(self.trainable_variables)
        mechanism = self.mechanism(data)
        resumed = None
        if backup is not None:
            if not data.resumable or workers.several:
                raise ValueError(
                    "PrivateBackupAndRestore needs a single process and arrays: a dataset gives no new sample."
                )
            resumed = Checkpoint(backup, self.optimizer, saving.variables_of(self), state)
        initial_epoch = (
            initial_epoch if resumed is None else resumed.first_epoch(initial_epoch, epochs)
        )
        planned = (epochs - initial_epoch) * data.steps_per_epoch
        self.before_fit(planned)
        state.compiled.begin(self.trainable_variables, planned, mechanism.gradient.gains_from_xla)
        public = (
            state.target,
            state.seed,
            mechanism.plan(planned).to_json(),
            data.sampler.identity,
            self.clip,
        )
        weights = saving.variables_of(self)
        workers.check_same(*public, arrays=lambda: [variable.numpy() for variable in weights])
        noise, allowed = workers.from_chief(
            lambda: self._calibrate(mechanism, data, planned, resumed), 2
        )
        mechanism = mechanism.with_noise(noise)
        state.plan = mechanism.plan(planned)
        if not allowed:
            if resumed is None or resumed.held is None:
                raise BudgetExhaustedError(
                    f"budget: epsilon, delta = {state.ledger.budget} of the ledger allows no further release of this plan.\nRaise "
                    "it with ledger.set_budget, or use more noise."
                )
            resumed.end(planned)
            return None, initial_epoch
        per_call = self._steps_per_call(data)
        run = PrivateFit(
            self, state, mechanism, data, allowed=int(allowed), planned=planned, per_call=per_call
        )
        workers.agree_on(run.prepare)
        if resumed is not None:
            resumed.follow(run.plan, initial_epoch)
        return run, initial_epoch

    def _calibrate(
        self, mechanism: Mechanism, data: Data, planned: int, resumed: Checkpoint | None
    ) -> tuple[float, float]:
        """Returns the noise multiplier of a fit and the number of its steps that the budgets allow."""
        state = self._dp
        assert state.target is not None
        if resumed is not None and resumed.held is not None:
            mechanism = resumed.restore(resumed.held, mechanism)
        else:
            settings = (planned, data.steps_per_epoch, state.progress.epochs)
            mechanism = calibrate(mechanism, state.ledger, state.target, *settings)
        return float(mechanism.noise), state.ledger.most_releases(
            mechanism.plan(planned), state.target.budgets
        )

    def _complete_history(self, epochs: int) -> keras.callbacks.History:
        self.history = keras.callbacks.History()
        self.history.set_model(self)
        self.history.on_train_begin()
        self.history.params = {"epochs": epochs, "verbose": 0}
        return self.history

    @contextlib.contextmanager
    def _unsafe(self, unsafe_validation: bool) -> Iterator[None]:
        """Marks validation values of private records as unsafe, and records the exposure in the ledger."""
        state = self._dp
        if not unsafe_validation:
            yield
            return
        state.ledger.record_exposure(
            "exact losses of private validation records were shown (unsafe_validation)."
        )
        state.unsafe_validation, self.test_function = True, None  # Its trace holds the loss's name.
        try:
            yield
        finally:
            state.unsafe_validation, self.test_function = False, None

    def make_train_function(self, force: bool = False) -> Callable[..., dict[str, float]]:
        """Returns the function that `Model.fit` calls for each execution; only within `fit`."""
        if self._dp.running is None:
            raise RuntimeError(
                "make_train_function: a private step needs the plan and the sampler of fit. Call fit."
            )
        return self._dp.running

    def train_step(self, data: Structure) -> None:
        """Raises: there is no accounting for a batch that was not sampled here."""
        raise RuntimeError(
            "train_step is not used: batches are sampled inside the private step. Call fit."
        )

    def train_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Raises: a batch chosen by the caller is no random sample."""
        raise RuntimeError(
            "train_on_batch: a batch chosen by the caller is no random sample. Call fit, which samples."
        )


def _between_ours(
    callbacks: list[keras.callbacks.Callback],
    backup: PrivateBackupAndRestore | None,
    run: PrivateFit,
    verbose: int | str,
) -> list[keras.callbacks.Callback]:
    """Orders callbacks: the ledger is settled before others end, the bar counts executed steps, a backup is last."""
    settle = keras.callbacks.LambdaCallback(on_train_end=lambda logs: run.close())
    own = not verbose or any(isinstance(one, keras.callbacks.ProgbarLogger) for one in callbacks)
    bar = [] if own else [StepsBar(lambda: run.num_steps)]
    return [
        settle,
        *(one for one in callbacks if one is not backup),
        *bar,
        *([] if backup is None else [backup]),
    ]
