"""`DPModel`: a Keras model whose `fit` samples, clips, adds noise and accounts for the privacy spent."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import dp_accounting
import numpy as np

from tfp_dpvi import metrics as metrics_lib
from tfp_dpvi._tf import Metric, Model, Optimizer, keras, layers_within, refuse_keras_3, steps_per_execution, tf
from tfp_dpvi.callbacks import PrivateBackupAndRestore
from tfp_dpvi.data import Data, Records
from tfp_dpvi.export import ExportedFunction
from tfp_dpvi.gradients import Clip, ClippedGradient, StepGradient, StepSpec, mapped
from tfp_dpvi.models import arguments, exporting, saving
from tfp_dpvi.models.state import State
from tfp_dpvi.optimizers import TermwiseOptimizer, as_dp_optimizer
from tfp_dpvi.privacy import BudgetExhaustedError, PrivacyLedger, PrivacyPlan, PrivacyReport
from tfp_dpvi.sampling import BatchNeeds
from tfp_dpvi.training import Mechanism, checkpoint
from tfp_dpvi.training.budget import PrivacyTarget, allowed_releases, calibrate
from tfp_dpvi.training.checkpoint import Checkpoint
from tfp_dpvi.training.compiled import CompiledSteps
from tfp_dpvi.training.distribution import Workers
from tfp_dpvi.training.fit import PrivateFit

LIKELIHOOD_ERRORS = (TypeError, ValueError, KeyError, IndexError, AttributeError, NotImplementedError)
"""What a user's function raises when it does not fit its data; TensorFlow's shape errors are `ValueError`s."""

LOG = logging.getLogger("tfp_dpvi")
_STEPS_PER_CALL = 50


class DPModel(Model):
    """Base of the private models, and the point to subclass for any other: override `record_loss`.

    ```python
    class Regression(dpvi.DPModel):
        def __init__(self):
            super().__init__()
            self.dense = dpvi.keras.layers.Dense(1)

        def call(self, x):
            return self.dense(x)

        def record_loss(self, x, y):  # x and y of one record, without a batch dimension
            return tf.square(self(x[None])[0, 0] - y)
    ```

    Args:
      seed: None (the default) takes sampling and noise from the operating system. An integer makes runs repeatable, for
        tests and debugging, as far as TensorFlow's own determinism goes; the report says "seeded: not private".
      name: name of the model.

    #### Formal guarantee

    Everything that leaves `fit` by default (weights after every step, `History`, the progress bar) is a function of
    Gaussian releases of clipped sums over samples drawn as the plan says, and of public values: it is
    (epsilon, delta)-differentially private with the figures that `privacy_report()` prints, under the adjacency that
    it names. What the report lists as not covered is not covered.
    """

    def __init__(self, *, seed: int | None = None, name: str | None = None, **kwargs: Any) -> None:
        super().__init__(name=name, **kwargs)
        self._dp = State(None if seed is None else int(seed))

    def __setattr__(self, name: str, value: Any) -> None:
        refuse_keras_3(name, value)
        super().__setattr__(name, value)

    # ------------------------------------------------------------------ what a subclass says

    def record_loss(self, x: Any, y: Any = None) -> Any:
        """The loss of one record: a scalar. Override this.

        Args:
          x: one record of what `fit` was given as `x`, without a batch dimension.
          y: likewise, if `fit` was given a `y`.
        """
        raise NotImplementedError(
            f"{type(self).__name__} does not say what it learns: override record_loss(self, x, y), which returns the "
            "scalar loss of one record."
        )

    def data_independent_loss(self, num_records: int) -> Any:
        """Terms that touch no record, as a scalar or None: added exactly, outside clip and noise (contract C2).

        Losses are means over records: a prior's `-log_prob` is to be divided by `num_records` here. Anything that
        depends on a record, on preprocessing statistics or on layers' `add_loss` belongs into `record_loss`. Its value is
        shown by `dpvi.metrics.PrivateELBO`, constants included.
        """
        return None

    def clipped_gradient(self, spec: StepSpec) -> ClippedGradient:
        """Returns how records' gradients are computed and clipped, with its sensitivity; for models with draws of their own.

        Args:
          spec: the public numbers of a step.
        """
        variables, clip = self.trainable_variables, self.clip

        def record_gradient(record: dict[str, tf.Tensor], keep: tf.Tensor) -> tuple[tf.Tensor, Sequence[tf.Tensor]]:
            del keep
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(variables)
                loss = self._whole_record_loss(record)
            return loss, tape.gradient(loss, variables, unconnected_gradients="zero")

        def draw(key: tf.Tensor) -> StepGradient:
            del key
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(variables)
                loss = self.data_independent_loss(spec.num_records)
            exact = None if loss is None else tape.gradient(loss, variables, unconnected_gradients="zero")
            return mapped(record_gradient, variables, clip, data_independent=exact, data_independent_loss=loss)

        return ClippedGradient(draw, clip)

    def _whole_record_loss(self, record: dict[str, tf.Tensor]) -> tf.Tensor:
        """Returns `record_loss` with everything that the record's layers add to it, times its weight."""
        self._clear_losses()
        loss = self.record_loss(record["x"], record["y"]) if "y" in record else self.record_loss(record["x"])
        loss = tf.convert_to_tensor(loss)
        if loss.shape.rank != 0:
            raise ValueError(
                f"record_loss returned shape {loss.shape}; the loss of one record is a scalar. Reduce it, or "
                "take entry [0] of a batch of one."
            )
        # add_loss and activity terms may depend on the record, so they go through the clip (contract C2).
        loss = tf.add_n([loss, *[tf.cast(tf.reduce_sum(extra), loss.dtype) for extra in self.losses]])
        self._clear_losses()
        return loss * record["sample_weight"] if "sample_weight" in record else loss

    @property
    def clip(self) -> Clip:
        """The clip that the optimizer carries."""
        return Clip(self.optimizer.l2_norm_clip, self.optimizer.clipping)

    @property
    def batch_needs(self) -> BatchNeeds:
        """What the clipped gradient asks of a physical batch; for subclasses whose gradient works on a batch at once."""
        return BatchNeeds(sum(int(np.prod(v.shape)) * v.dtype.size for v in self.trainable_variables))

    def prepare(self, records: Records) -> None:
        """Makes the variables, if layers have not been called yet.

        Args:
          records: of the right shapes and dtypes.
        """
        if not self.trainable_variables:
            # Zeros and not a record: layers may initialise themselves from what they see first.
            self(tf.nest.map_structure(lambda part: tf.zeros([1, *part.shape[1:]], part.dtype), records.x))
        if not self.trainable_variables:
            raise ValueError(f"{type(self).__name__} has no trainable variables: there is nothing to learn.")
        self.built = True

    def check_records(self, records: Records) -> None:
        """Raises if these records do not fit the model, before anything is spent; for subclasses.

        Args:
          records: all of them, or one of their shapes where they are streamed or a dataset's.
        """

    @property
    def caveats(self) -> tuple[str, ...]:
        """Sentences for the report; for subclasses."""
        return ()

    @property
    def record_dtype(self) -> np.dtype:
        """The float type that records are cast to."""
        return np.dtype(keras.backend.floatx())

    def export_functions(self, inputs: dict[str, tf.TensorSpec]) -> list[ExportedFunction]:
        """Returns the signatures of `export`, given the specs of records x and, if there is one, y; for subclasses."""
        return [exporting.mean_function(self.call, inputs["x"], "the model's output for each record.")]

    def _refuse_while_fitting(self, call: str) -> None:
        if self._dp.running is not None:
            raise RuntimeError(
                f"{call} was called while fit runs, by a callback or in another thread: one fit at a time, whose settings stay as "
                f"they were priced.\nCall {call} after fit has returned; this call spent nothing."
            )

    def _check_precision(self, variables: Sequence[Any] = ()) -> None:
        """Refuses dtypes other than float32 and float64, and mixed precision: in float16 one record moves a sum by many clips."""
        held = [(layer.name, layer.compute_dtype, layer.dtype_policy.name) for layer in layers_within(self)]
        held += [(variable.name, variable.dtype.name, variable.dtype.name) for variable in variables]
        for name, dtype, shown in held:
            if dtype and tf.as_dtype(dtype).is_floating and tf.as_dtype(dtype) not in (tf.float32, tf.float64):
                raise ValueError(
                    f"{name!r} computes in {shown}, whose rounding lets one record move a sum by many clips: use float32 or "
                    "float64,\nfor instance dtype='float32' or keras.mixed_precision.set_global_policy('float32')."
                )

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Raises if this optimizer does not fit the model; for subclasses."""
        if isinstance(optimizer, TermwiseOptimizer):
            raise ValueError(
                f"optimizer={type(optimizer).__name__} has a clip for groups of records, and this model has no batch-wise "
                "term: use a DPKeras optimizer, or DPVAE(batch_regularizer=...)."
            )

    # ------------------------------------------------------------------ compile

    def compile(
        self,
        optimizer: Any = None,
        *,
        epsilon: float | None = None,
        delta: float | None = None,
        l2_norm_clip: float | None = None,
        noise_multiplier: float | None = None,
        planned_epochs: int | None = None,
        ledger: PrivacyLedger | None = None,
        neighboring_relation: dp_accounting.NeighboringRelation = (dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE),
        accountant: str = "pld",
        validation_metrics: Sequence[Any] | None = None,
        physical_batch_size: int | None = None,
        steps_per_execution: int | None = None,
        jit_compile: bool | None = None,
        unsafe_training_metrics: bool = False,
        run_eagerly: bool | None = None,
        metrics: Any = None,
        loss: Any = None,
    ) -> None:
        """Chooses the optimizer and the privacy target. Compiling again never resets the ledger.

        Args:
          optimizer: a DP-Keras optimizer; one of TensorFlow Privacy's; or, with `l2_norm_clip`, any Keras optimizer or
            its name.
          epsilon: the model's lifetime total for these data: `fit` calibrates the noise to it.
          delta: the delta that goes with every epsilon shown; needed with `epsilon`.
          l2_norm_clip: bound on one record's gradient, for a plain Keras optimizer.
          noise_multiplier: noise standard deviation over the clip, for a plain Keras optimizer; instead of `epsilon`.
          planned_epochs: with `epsilon`, how many epochs in all the budget is to last for; by default the first `fit`
            spends it all.
          ledger: a `PrivacyLedger` to keep the books in: on disk, shared with other models of the same data, with a
            budget of its own. Default: one in memory, of this model alone.
          neighboring_relation: of `dp_accounting`: ADD_OR_REMOVE_ONE or REPLACE_ONE.
          accountant: "pld" (tight) or "rdp".
          validation_metrics: Keras metrics of `predict`'s output, for `evaluate` and for validation data.
          physical_batch_size: records whose gradients are held in memory at a time; changes no figure.
          steps_per_execution: steps in one compiled call; by default 50, or an epoch if that is shorter.
          jit_compile: compile the step with XLA; None does so for models that gain from it, in long runs, and goes without
            where an operation does not allow it.
          unsafe_training_metrics: show exact training losses, which are *not private*. The report says so.
          run_eagerly: run the step without compiling it, to debug.
          metrics: privatised metrics of the training records, `dpvi.metrics.PrivateELBO` and such, released with every
            step and paid for from the same budget. Keras metrics are refused: they would be exact.
          loss: refused: the model brings its own.

        Raises:
          ValueError: both or neither of epsilon and noise, no clip, or a value out of range.
        """
        self._refuse_while_fitting("compile")
        self._check_precision()
        private_metrics = metrics_lib.check_metrics(metrics)
        if loss is not None:
            raise ValueError(f"loss={loss!r}: leave it out, the model brings its own loss, record by record.")
        if optimizer is None:
            raise ValueError(
                "optimizer is missing: give for instance dpvi.optimizers.DPKerasAdamOptimizer(l2_norm_clip=1.0)."
            )
        optimizer = as_dp_optimizer(optimizer, l2_norm_clip=l2_norm_clip, noise_multiplier=noise_multiplier)
        self.check_optimizer(optimizer)
        arguments.check_counts(steps_per_execution=steps_per_execution)
        target = PrivacyTarget(
            epsilon=epsilon,
            delta=delta,
            noise_multiplier=optimizer.noise_multiplier,
            planned_epochs=planned_epochs,
            accountant=accountant,
            neighboring_relation=neighboring_relation,
            physical_batch_size=physical_batch_size,
            jit_compile=jit_compile,
            unsafe_training_metrics=bool(unsafe_training_metrics),
        )
        ledger = self._ledger_after(ledger)
        metric_objects = arguments.validation_metrics(validation_metrics)
        super().compile(optimizer=optimizer, run_eagerly=run_eagerly, steps_per_execution=steps_per_execution or 1)
        state = self._dp
        state.ledger, state.target, state.plan = ledger, target, None
        state.compiled = CompiledSteps(optimizer, self.distribute_strategy, jit_compile, self.run_eagerly)
        state.steps_per_execution_is_set = steps_per_execution is not None
        state.validation_metrics, state.private_metrics = metric_objects, private_metrics

    def _ledger_after(self, ledger: PrivacyLedger | None) -> PrivacyLedger:
        """Returns the ledger to use from now on.

        Raises:
          ValueError: the model has releases in another one.
        """
        held = self._dp.ledger
        if ledger is None or ledger is held:
            return held
        if not isinstance(ledger, PrivacyLedger):
            raise TypeError(f"ledger must be a dpvi.PrivacyLedger, got {ledger!r}.")
        same = ledger.path is not None and ledger.path == held.path
        if held.num_releases and not same and not ledger.continues(held):
            raise ValueError(
                f"ledger: this model has {held.num_releases} releases in another ledger, which must not be "
                "forgotten. Give the ledger to the first compile, or build a new model."
            )
        return ledger

    @property
    def metrics(self) -> list[Metric]:
        """Epsilon spent, the privatised metrics and the validation metrics."""
        if not hasattr(self, "_dp"):
            return []
        state = self._dp
        shown = [one for one in state.private_metrics if isinstance(one, Metric)]
        return [state.epsilon_metric, state.loss_metric, *shown, *state.validation_metrics]

    # ------------------------------------------------------------------ fit

    def fit(  # noqa: D417
        self,
        x: Any = None,
        y: Any = None,
        *,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: Any = "auto",
        callbacks: Any = None,
        sample_weight: Any = None,
        num_records: int | None = None,
        sampling: str | None = None,
        sampling_probability: float | None = None,
        steps_per_epoch: int | None = None,
        initial_epoch: int = 0,
        validation_data: Any = None,
        validation_is_public: bool = False,
        unsafe_validation: bool = False,
        validation_freq: Any = 1,
        validation_batch_size: int | None = None,
        validate: bool = True,
        stream: bool | None = None,
        **refused: Any,
    ) -> Any:
        """Learns from private records. Draws Poisson batches by itself and spends privacy budget.

        Args:
          x: array of shape [N, ...], or dict or tuple of such arrays; or a pandas DataFrame, which is a dict of its columns by
            name; or, for records that do not fit into memory, memory
            maps or sources with a length and `source[indices]` for increasing int64 indices; or a `tf.data.Dataset` of
            batches x, (x, y) or (x, y, sample_weight), with `num_records`, `steps_per_epoch` and a declared `sampling`.
          y: likewise, or None for models of whole records.
          batch_size: *expected* batch size B, default 256: each step includes each record with probability
            B / num_records. `batch_size >= num_records` means full batches, which are accounted for as such.
          epochs: passes of ceil(num_records / batch_size) steps each.
          verbose: as in Keras.
          callbacks: Keras callbacks; they see public and privatised values only. With
            `dpvi.callbacks.PrivateBackupAndRestore` an interrupted fit goes on from its last epoch.
          sample_weight: array of shape [N] of weights >= 0. They multiply a record's loss before the clip, so they
            cannot raise anyone's influence above it.
          num_records: the public number of records N, by default `len(x)`. Declare another (a rounded or outdated
            count) to keep the exact one hidden.
          sampling: for arrays "poisson" (default), or "fixed_size" for exactly `batch_size` distinct records in each step,
            which is priced under replace-one by the RDP accountant. For a dataset your declaration of how its batches
            were drawn: "poisson", or "each_record_once_per_epoch", which is priced without amplification.
          sampling_probability: of a dataset of Poisson batches.
          steps_per_epoch: default ceil(num_records / batch_size).
          initial_epoch: as in Keras.
          validation_data: `(x, y)` or `(x, y, sample_weight)`; needs one of the next two arguments.
          validation_is_public: you state that the validation records are public.
          unsafe_validation: show exact losses of private validation records; the report says so.
          validation_freq: as in Keras.
          validation_batch_size: default 1024.
          validate: look for NaN and infinite values first. This check is the curator's, outside the guarantee; without
            it such records contribute exactly zero. Streamed records are not looked through.
          stream: read the rows that a step draws from where they are stored, instead of holding all on the device; by
            default for sources that are no arrays and for memory maps above 2 GiB. Same batches, same guarantee.

        Returns:
          A Keras `History`: epsilon, public and privatised values only.

        Raises:
          RuntimeError: not compiled.
          BudgetExhaustedError: nothing is left of the budget; nothing was run.
          ValueError, TypeError: bad arguments; nothing was spent.
        """
        self._check_fit(refused, epochs, initial_epoch)
        validation = arguments.check_validation(
            validation_data, validation_is_public, unsafe_validation, self.record_dtype
        )
        refuse_keras_3("callbacks", callbacks)
        backup = checkpoint.find(callbacks)
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
        with self._running(data, epochs, initial_epoch, backup, num_records is not None) as (run, initial_epoch):
            if run is None:
                return self._history_of_nothing(epochs)
            if backup is not None:
                callbacks = checkpoint.put_last(callbacks, backup)
            unsafe_validation = unsafe_validation and validation is not None and not validation_is_public
            with self._unsafe(unsafe_validation), Workers(self.distribute_strategy).naming_lost(run.spent):
                replicas = self.distribute_strategy.num_replicas_in_sync
                return super().fit(
                    # Keras counts steps on it; records are sampled inside the step.
                    tf.data.Dataset.range(replicas).batch(replicas).repeat(),
                    epochs=epochs,
                    steps_per_epoch=data.steps_per_epoch,
                    initial_epoch=initial_epoch,
                    verbose=verbose,
                    callbacks=callbacks,
                    validation_data=validation,
                    validation_freq=validation_freq,
                    validation_batch_size=validation_batch_size or 1024,
                )

    def _check_fit(self, refused: dict[str, Any], epochs: int, initial_epoch: int) -> None:
        if self._dp.target is None or self.optimizer is None:
            raise RuntimeError(
                f"{type(self).__name__}.fit before compile: call compile(optimizer=..., epsilon=..., delta=...) first."
            )
        self._refuse_while_fitting("fit")
        arguments.refuse(refused)
        arguments.check_scope(self)
        arguments.check_counts(epochs=epochs)
        if not 0 <= initial_epoch < epochs:
            raise ValueError(f"initial_epoch={initial_epoch} must be at least 0 and below epochs={epochs}.")

    def make_data(self, x: Any, y: Any = None, sample_weight: Any = None, **settings: Any) -> Data:
        """Returns records with their sampler, checked, for `mechanism` and a training loop of one's own.

        Args:
          x: as in `fit`.
          y: as in `fit`.
          sample_weight: as in `fit`.
          **settings: `batch_size`, `num_records`, `sampling`, `sampling_probability`, `steps_per_epoch`, `validate` and
            `stream` of `fit`.
        """
        physical = None if self._dp.target is None else self._dp.target.physical_batch_size
        return arguments.make_data(self, x, y, sample_weight, physical_batch_size=physical, **settings)

    def mechanism(self, data: Data) -> Mechanism:
        """Returns what each step of a fit on these data releases: sampler, clipped gradient, noise and metrics.

        Its sensitivity and price are known before anything is traced. The noise multiplier is that of the optimizer, or
        None: see `Mechanism.calibrated`.

        Args:
          data: from `make_data`.
        """
        target = self._dp.target
        assert target is not None
        spec = StepSpec(data.sampler.scheme, data.batch_size, data.num_records, target.neighboring_relation)
        return Mechanism(
            sampler=data.sampler,
            gradient=self.clipped_gradient(spec),
            expected_batch_size=data.batch_size,
            num_records=data.num_records,
            noise_multiplier=target.noise_multiplier,
            metrics=self._dp.private_metrics,
            neighboring_relation=target.neighboring_relation,
            accountant=target.accountant,
            unsafe_loss=target.unsafe_training_metrics,
        )

    @contextlib.contextmanager
    def _running(
        self, data: Data, epochs: int, initial_epoch: int, backup: PrivateBackupAndRestore | None, declared: bool
    ) -> Iterator[tuple[PrivateFit | None, int]]:
        """Plans the fit, compiles its step and lends it to Keras; gives back what was reserved and did not run."""
        state = self._dp
        run, initial_epoch = self._begin(data, epochs, initial_epoch, backup)
        state.inputs = exporting.specs_of(data.records)
        state.num_records, state.num_records_declared = data.num_records, declared
        if run is None:
            yield None, initial_epoch
            return
        if state.target is not None and state.target.unsafe_training_metrics:
            state.ledger.record_exposure("exact training losses were shown (unsafe_training_metrics).")
        counter = steps_per_execution(self)
        before = counter.numpy()
        if not state.steps_per_execution_is_set:
            counter.assign(min(_STEPS_PER_CALL, data.steps_per_epoch))
        state.running = run
        try:
            yield run, initial_epoch
        finally:
            run.close()
            state.accumulated = run.accumulated
            state.running = self.train_function = None  # It holds the fit's key and records.
            counter.assign(before)

    def _begin(
        self, data: Data, epochs: int, initial_epoch: int, backup: PrivateBackupAndRestore | None
    ) -> tuple[PrivateFit | None, int]:
        """Returns the fit, ready but for its first step, and its first epoch; None where a resumed fit has nothing left to do."""
        state, workers = self._dp, Workers(self.distribute_strategy)
        target, ledger, compiled = state.target, state.ledger, state.compiled
        assert target is not None
        assert compiled is not None
        self._check_precision(self.trainable_variables)
        draft = self.mechanism(data)
        held = resumed = None
        if backup is not None:
            resumed = self._checkpoint(data)
            held = backup.read()
            if held is not None:
                initial_epoch = resumed.check_epochs(held, epochs)
        planned = (epochs - initial_epoch) * data.steps_per_epoch
        compiled.begin(self.trainable_variables, planned, draft.gradient.gains_from_xla)
        workers.check_same(
            type(self).__name__,
            target,
            state.seed,
            planned,
            initial_epoch,
            draft.sensitivity,
            repr(draft.gradient.clip),
        )

        def plan() -> tuple[float, float]:
            if held is not None and resumed is not None:
                noise = resumed.restore(held, draft.plan(planned))
            else:
                calibrated = calibrate(
                    draft,
                    ledger,
                    target,
                    steps=planned,
                    steps_per_epoch=data.steps_per_epoch,
                    epochs_run=state.progress.epochs,
                )
                noise = calibrated.noise_multiplier or 0.0
            mechanism = dataclasses.replace(draft, noise_multiplier=noise)
            return noise, allowed_releases(mechanism.plan(planned), ledger, target)

        noise, allowed = workers.from_chief(plan, 2)
        mechanism = dataclasses.replace(draft, noise_multiplier=noise)
        state.plan = mechanism.plan(planned)
        if not allowed:
            self._end_without_a_step(held, planned, backup, initial_epoch)
            return None, initial_epoch
        state.progress.fits += 1
        run = PrivateFit(
            self,
            mechanism,
            data,
            compiled,
            ledger=ledger,
            target=target,
            allowed=int(allowed),
            planned=planned,
            progress=state.progress,
            seed=state.seed,
            run=f"{state.identity}/{state.progress.fits}",
            epsilon=state.epsilon_metric,
        )
        refusal: Exception | None = None
        try:
            run.prepare()
        except Exception as error:
            refusal = error
        workers.agree(refusal)
        if backup is not None and resumed is not None:
            backup.attach(lambda epoch: resumed.snapshot(run.plan, epoch), initial_epoch)
        return run, initial_epoch

    def _checkpoint(self, data: Data) -> Checkpoint:
        state = self._dp
        assert state.target is not None
        if not data.resumable or Workers(self.distribute_strategy).several:
            raise ValueError(
                "PrivateBackupAndRestore serves one process and arrays, memory maps or sources: a dataset's batches read again are "
                "no new sample.\nNothing was spent."
            )
        variables = saving.variables_of(self)
        return Checkpoint(
            self.optimizer, variables, state.ledger, state.target, state.progress, seeded=state.seed is not None
        )

    def _end_without_a_step(self, held: Any, planned: int, backup: Any, initial_epoch: int) -> None:
        if held is None:
            budgets = ", ".join(f"epsilon {e:g} at delta {d:g}" for e, d in self._budgets())
            raise BudgetExhaustedError(
                f"budget: {budgets} allows no further release of this plan.\nRaise it with ledger.set_budget, or use more noise."
            )
        if planned:
            LOG.warning(
                "The interrupted fit has spent its budget; the model is that of epoch %d. The backup stays in %s.",
                initial_epoch,
                held.directory,
            )
        elif backup.delete_checkpoint:
            backup.forget()

    def _budgets(self) -> list[tuple[float, float]]:
        budget = self._dp.ledger.budget
        return [*(self._dp.target.budgets if self._dp.target else ()), *([budget] if budget else [])]

    def _history_of_nothing(self, epochs: int) -> keras.callbacks.History:
        """Returns what `fit` returns where nothing is left to do."""
        history = keras.callbacks.History()
        history.set_model(self)
        history.on_train_begin()
        history.params = {"epochs": epochs, "verbose": 0}
        self.history = history
        return history

    @contextlib.contextmanager
    def _unsafe(self, unsafe_validation: bool) -> Iterator[None]:
        """Names what validation shows of private records, and records in the ledger that it is shown."""
        state = self._dp
        if not unsafe_validation:
            yield
            return
        state.ledger.record_exposure("exact losses of private validation records were shown (unsafe_validation).")
        state.unsafe_validation, self.test_function = True, None  # Traced with the name of the loss in it.
        try:
            yield
        finally:
            state.unsafe_validation, self.test_function = False, None

    def make_train_function(self, force: bool = False) -> Callable[[Any], dict[str, Any]]:
        """Returns the function that `Model.fit` calls for each execution; made by `fit`."""
        if self._dp.running is None:
            raise RuntimeError(
                "make_train_function and train_on_batch work outside fit in Keras, but a private step needs the plan and "
                "the sampler that fit makes. Call fit."
            )
        return self._dp.running

    def train_step(self, data: Any) -> Any:
        """Refused: a batch that was not sampled here cannot be accounted for."""
        raise RuntimeError("train_step is not used: batches are sampled inside the private step. Call fit.")

    def test_step(self, data: Any) -> dict[str, Any]:
        """One batch of `evaluate`: the mean of `record_loss` over the given records."""
        x, y, weight = (*data, None, None)[:3] if isinstance(data, tuple) else (data, None, None)
        if y is None:
            losses = tf.vectorized_map(self.record_loss, x)
        else:
            losses = tf.vectorized_map(lambda pair: self.record_loss(*pair), (x, y))
        self._clear_losses()
        self._dp.loss_metric.update_state(losses, sample_weight=weight)
        return {self._loss_name: self._dp.loss_metric.result()}

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """As in Keras: exact losses and metrics of the given records, which are *not private* unless those are public."""
        with self._one_step_an_execution():
            return super().evaluate(*args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """As in Keras: the model's outputs for the given inputs."""
        with self._one_step_an_execution():
            return super().predict(*args, **kwargs)

    @contextlib.contextmanager
    def _one_step_an_execution(self) -> Iterator[None]:
        """Outside training: Keras would count a call of an earlier traced function as many batches, and drop the rest."""
        counter = steps_per_execution(self)
        before = None if counter is None else counter.numpy()
        if counter is not None:
            counter.assign(1)
        try:
            yield
        finally:
            if counter is not None:
                counter.assign(before)

    @property
    def _loss_name(self) -> str:
        return "unsafe_loss" if self._dp.unsafe_validation else "loss"

    def train_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: a batch chosen by the caller is no random sample."""
        raise RuntimeError(
            "train_on_batch: a batch chosen by the caller is no random sample and cannot be accounted for. Call fit, "
            "which samples by itself."
        )

    # ------------------------------------------------------------------ files

    def get_config(self) -> dict[str, Any]:
        """The arguments that the model was built with, and its books. A subclass adds those of its own `__init__`.

        The seed is left out: it is as good as the key.
        """
        return saving.base_config(self)

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None) -> Any:
        """A model with the same arguments and the same ledger; weights are its own until they are loaded."""
        return saving.from_config(cls, config, custom_objects)

    def get_compile_config(self) -> dict[str, Any] | None:
        """What `compile` was given."""
        return saving.compile_config(self)

    def compile_from_config(self, config: dict[str, Any]) -> None:
        """Compiles as before; the optimizer's variables are made, for `load_model` to fill."""
        saving.compile_from_config(self, config)

    def save_own_variables(self, store: Any) -> None:
        """As in Keras, after metrics are emptied: they may hold exact losses of the records last evaluated."""
        for metric in self.metrics:
            metric.reset_state()
        super().save_own_variables(store)

    def load_weights(self, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        """As in Keras; what cannot be loaded leaves the model as it was. Weights come without their books: see `save`.

        Raises:
          ValueError: the file cannot be read, or its weights have other shapes.
        """
        with saving.loading_weights(self, filepath):
            return super().load_weights(filepath, *args, **kwargs)

    def save(self, filepath: Any, overwrite: bool = True, save_format: str | None = None, **kwargs: Any) -> None:
        """Saves model, compile settings, optimizer state and books in one `.keras` file; see `dpvi.keras.Model.save`.

        `dpvi.load_model` or `dpvi.keras.models.load_model` brings it back, with what these data have spent: see
        `PrivacyLedger.from_config`. Priors, likelihoods and other functions are saved by name: see `dpvi.register`. The file
        holds no record and no key; of a seeded run it does not hold the seed, so a loaded model goes on with fresh noise.

        Args:
          filepath: ends in ".keras".
          overwrite: False refuses an existing file.
          save_format: None or "keras"; for a SavedModel see `export`.
          **kwargs: none.

        Raises:
          ValueError: another format, a file that cannot be written, or a part that cannot be saved, such as a lambda; an
            earlier file stays as it was.
        """
        saving.check_path(filepath, overwrite, save_format, kwargs)
        self.get_config()  # What it refuses, it refuses before anything is written.
        with saving.replaced(filepath) as temporary:
            super().save(temporary)

    # ------------------------------------------------------------------ books

    @property
    def privacy_ledger(self) -> PrivacyLedger:
        """What has been released from these data, in every fit so far."""
        return self._dp.ledger

    @property
    def num_releases(self) -> int:
        """Releases charged for these data, without those that a running fit has reserved ahead."""
        running = self._dp.running
        return self._dp.ledger.num_releases - (0 if running is None else running.steps_ahead)

    @property
    def accumulated(self) -> dict[str, Any]:
        """The last fit's accumulators over released values, by the name of the joint release."""
        return self._dp.accumulated

    @property
    def privacy_plan(self) -> PrivacyPlan | None:
        """The plan of the last `fit`, or None before the first."""
        return self._dp.plan

    @property
    def privacy_budget(self) -> float | None:
        """The lifetime epsilon that `compile` was given, or None."""
        return None if self._dp.target is None else self._dp.target.epsilon

    def export(self, path: str | os.PathLike[str], *, delta: float | None = None, overwrite: bool = False) -> None:
        """Writes what was learned as a plain SavedModel, which TensorFlow alone loads, with its privacy report.

        Signatures, where the model has them: `predict` (posterior predictive mean, any number of records),
        `sample_posterior` and `sample_predictive` (of `num`, int32, and `seed`, int32 [2]) and `log_prob` (posterior
        predictive log density). Beside them the privacy report (`assets.extra/privacy_report.json`) and a model card
        (`README.md`) that says how to load and call them.

        Args:
          path: a folder that does not exist yet; it appears whole or not at all.
          delta: of the report; by default that of `compile`.
          overwrite: replace an earlier export.

        Raises:
          RuntimeError: not fitted.
          ValueError: the path cannot be written or holds something, there is no delta, or the model's functions do not
            run for a number of records that is not known.

        #### Formal guarantee

        A function of released variables and public values: no record, ledger, optimizer state, or key of noise or
        sampling is in the folder, nor the ledger's name for the data set. (What a likelihood or a layer holds as a constant
        of its own is public by contract C2, and is in it.)
        """
        exporting.export_model(self, path, delta=delta, overwrite=overwrite)

    def privacy_report(self, delta: float | None = None) -> PrivacyReport:
        """What has been spent on these data so far, over every `fit`, and what that covers.

        Args:
          delta: the delta to report epsilon at; by default that of `compile`.

        Returns:
          A `PrivacyReport`: `print` it, or take `.to_json()`.

        Raises:
          ValueError: no delta here nor in `compile`.
        """
        state = self._dp
        target = state.target
        if delta is None:
            delta = None if target is None else target.delta
        if delta is None:
            raise ValueError("delta is not known: say privacy_report(delta=1e-5), or give it to compile.")
        return PrivacyReport.from_ledger(
            state.ledger,
            delta=delta,
            budget_epsilon=None if target is None or delta != target.delta else target.epsilon,
            accountant="pld" if target is None else target.accountant,
            num_records=state.num_records,
            num_records_declared=state.num_records_declared,
            seeded=state.seed is not None,
            caveats=self.caveats,
        )
