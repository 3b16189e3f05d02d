"""`DPModel`: a Keras model whose `fit` samples, clips, adds noise and accounts for it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any

import dp_accounting
import numpy as np

from tfp_dpvi import _deprecation, _tf, export, serialization
from tfp_dpvi import _validate as check
from tfp_dpvi import metrics as metrics_lib
from tfp_dpvi._keystream import check_randomness
from tfp_dpvi._tf import Metric, Model, Optimizer, Structure, keras, tf
from tfp_dpvi.data import Data, Records, UnitRows
from tfp_dpvi.data.files import open_files
from tfp_dpvi.data.records import by_column
from tfp_dpvi.data.shapes import zeros_like
from tfp_dpvi.data.units import Identifiers
from tfp_dpvi.export import ExportedFunction
from tfp_dpvi.gradients import Clip, ClippedGradient, StepGradient, StepSpec, mapped
from tfp_dpvi.models import arguments, evaluation, exporting, fitting, saving
from tfp_dpvi.models.state import Compiled, FitReleases, State
from tfp_dpvi.optimizers import as_dp_optimizer
from tfp_dpvi.privacy import PrivacyLedger, PrivacyPlan, PrivacyReport
from tfp_dpvi.sampling import BatchNeeds
from tfp_dpvi.training import Mechanism
from tfp_dpvi.training.account import Account
from tfp_dpvi.training.budget import PrivacyTarget
from tfp_dpvi.training.compiled import CompiledSteps
from tfp_dpvi.training.distribution import Workers

_OF_KERAS = frozenset(
    {
        "built",
        "history",
        "predict_function",
        "stop_training",
        "test_function",
        "train_function",
        "train_tf_function",
    }
)
"""Attributes that Keras assigns, also while a fit runs."""


_MISSING = object()  # In place of the value of an attribute that there is not yet.


@_tf.refuses_saved_model
class DPModel(Model):
    """Base class of private Keras models. For a model of your own, override `record_loss`.

    ```python
    >>> import numpy as np
    >>> import tfp_dpvi as dpvi
    >>> class Regression(dpvi.DPModel):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.dense = dpvi.keras.layers.Dense(1)
    ...
    ...     def call(self, x):
    ...         return self.dense(x)
    ...
    ...     def record_loss(self, x, y):  # One record, without a batch dimension.
    ...         return tf.square(self(x[None])[0, 0] - y)
    >>> model = Regression()
    >>> optimizer = dpvi.optimizers.DPKerasSGDOptimizer(0.1, l2_norm_clip=1.0)
    >>> model.compile(optimizer, epsilon=1.0, delta=1e-5)
    >>> x = np.zeros([20, 3], np.float32)
    >>> history = model.fit(x, x[:, 0], batch_size=10, epochs=1, verbose=0)
    >>> model.privacy_report().epsilon <= 1.0
    True

    ```

    Args:
      seed: None (the default) for sampling and noise keys from the operating system. An integer
        makes runs repeatable, for tests and debugging, as far as TensorFlow is deterministic; the
        report says "seeded: not private".
      name: name of the model.

    #### Formal guarantee

    All default outputs of `fit` (weights after every step, `History`, the progress bar) are
    functions of public values and of Gaussian releases of clipped sums over samples drawn as the
    plan says. They are (epsilon, delta)-differentially private with the values that
    `privacy_report()` prints, under the neighboring relation that it names, except for what it
    lists.
    """

    def __init__(self, *, seed: int | None = None, name: str | None = None, **kwargs: Any) -> None:
        super().__init__(name=name, **kwargs)
        self._dp = State(None if seed is None else check.count("seed", seed))

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute; a setting that steps have read is refused while a fit runs."""
        _tf.refuse_keras_3(name, value)
        state = self.__dict__.get("_dp")
        if state is None or name.startswith("_") or name in _OF_KERAS:
            super().__setattr__(name, value)
            return
        self.refuse_while_running(name, value)
        changed = not _tf.is_same_plain(getattr(self, name, _MISSING), value)
        super().__setattr__(name, value)
        between_fits = state.running is None and state.compiled is not None
        if changed and between_fits and tf.executing_eagerly():
            # The next fit's steps read the setting, and so do evaluations.
            state.compiled.steps.forget()
            self.drop_traces()

    def refuse_while_running(self, name: str, value: object) -> None:
        """Raises `RuntimeError` if a fit runs whose steps have read this setting.

        Args:
          name: The name of the assigned attribute.
          value: The assigned value.
        """
        if self._dp.running is not None:
            _tf.refuse_setting(self, name, value, self._dp.running.learner.settings)

    def drop_traces(self) -> None:
        """Drops traced predictions and evaluations, which hold settings as constants."""
        self.predict_function = self.test_function = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuses a class that overrides a hook by its old name: nothing would call it."""
        super().__init_subclass__(**kwargs)
        for old, new in _deprecation.HOOKS.items():
            if old in vars(cls):
                raise TypeError(
                    f"{cls.__name__}.{old} is now {new}, and would not be called: rename it. "
                    "See tfp_dpvi.models.hooks."
                )

    takes_texts: bool = False
    """See `Hooks.takes_texts`."""

    # ------------------------------------------------------------------ methods to override

    def record_loss(self, x: Any, y: Any = None) -> Any:
        """Returns the loss of one record, a scalar. Override this.

        `fit` calls it with layers in training mode (Dropout is active, with draws for each record),
        `evaluate` in inference mode. Layers that are called with `training=` use that.

        Args:
          x: One record of `fit`'s x, without a batch dimension.
          y: One record of `fit`'s y; left out if `fit` had none.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no loss: override record_loss(self, x, y), which returns "
            "the scalar loss of one record."
        )

    def data_independent_loss(self, num_records: int) -> Any:
        """Returns loss terms that depend on no record, a scalar or None.

        They are added without clip and noise (contract 2).

        Losses are means over records: divide a prior's `-log_prob` by `num_records`.
        `dpvi.metrics.PrivateELBO` shows the value.
        """
        return None

    def clipped_gradient(self, spec: StepSpec) -> ClippedGradient:
        """See `Hooks.clipped_gradient`: here by one gradient of `record_loss` for each record."""
        variables, clip = self.trainable_variables, self.clip

        def record_gradient(
            record: dict[str, tf.Tensor], keep: tf.Tensor
        ) -> tuple[tf.Tensor, Sequence[tf.Tensor]]:
            del keep
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(variables)
                loss = self._whole_record_loss(record)
            return loss, tape.gradient(loss, variables, unconnected_gradients="zero")

        def draw(key: tf.Tensor) -> StepGradient:
            del key
            return mapped(record_gradient, variables, clip, **self.exact_terms(spec.num_records))

        return ClippedGradient(draw, clip)

    def exact_terms(self, num_records: int) -> dict[str, Any]:
        """Returns `data_independent_loss` and its gradient as arguments of `StepGradient`."""
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(self.trainable_variables)
            loss = self.data_independent_loss(num_records)
        if loss is None:
            return {}
        exact = tape.gradient(loss, self.trainable_variables, unconnected_gradients="zero")
        return {"data_independent": exact, "data_independent_loss": loss}

    def _whole_record_loss(self, record: dict[str, Structure]) -> tf.Tensor:
        """Returns the loss of a record, a sum over a person's rows if it is one."""
        x = record["x"]
        if not isinstance(x, UnitRows):
            return self._row_loss(record)
        mask = x.mask
        rows = {**record, "x": x.rows}
        losses = [
            self._row_loss(tf.nest.map_structure(lambda part: part[place], rows))  # noqa: B023
            for place in range(mask.shape[0])
        ]
        return tf.reduce_sum(tf.where(mask, tf.stack(losses), tf.zeros_like(losses[0])))

    def _row_loss(self, record: dict[str, Structure]) -> tf.Tensor:
        """Returns `record_loss` plus the losses that layers add, times the record's weight."""
        _tf.clear_losses(self)
        parts = [record[name] for name in ("x", "y") if name in record]
        with _tf.refuse_late_functions(_tf.layers_within(self)):
            loss = tf.convert_to_tensor(
                _tf.in_mode(lambda: self.record_loss(*parts), training=True)
            )
        if loss.shape.rank != 0:
            raise ValueError(
                f"record_loss returned shape {loss.shape}; the loss of one record is a scalar: "
                "reduce it."
            )
        # add_loss and activity terms may depend on the record, so they are clipped (contract 2).
        loss = tf.add_n(
            [
                loss,
                *[tf.cast(tf.reduce_sum(extra), loss.dtype) for extra in self.losses_of_record()],
            ]
        )
        _tf.clear_losses(self)
        return loss * record["sample_weight"] if "sample_weight" in record else loss

    def losses_of_record(self) -> list[tf.Tensor]:
        """See `Hooks.losses_of_record`."""
        return list(self.losses)

    @property
    def batch_needs(self) -> BatchNeeds:
        """See `Hooks.batch_needs`: here memory for one gradient of each record."""
        return BatchNeeds(
            sum(int(np.prod(v.shape)) * v.dtype.size for v in self.trainable_variables)
        )

    @property
    def clip(self) -> Clip:
        """The optimizer's clip."""
        return self.optimizer.clip

    @property
    def record_dtype(self) -> np.dtype:
        """See `Hooks.record_dtype`."""
        return np.dtype(self.dtype)

    def before_fit(self, num_steps: int) -> None:
        """See `Hooks.before_fit`."""

    def after_fit(self) -> None:
        """See `Hooks.after_fit`."""

    def drop_predictions(self) -> None:
        """See `Hooks.drop_predictions`."""

    def check_records(self, records: Records) -> None:
        """See `Hooks.check_records`."""

    def check_labels(self, records: Records) -> None:
        """See `Hooks.check_labels`."""

    def fault_of_variables(self, thorough: bool) -> str | None:
        """See `Hooks.fault_of_variables`."""
        del thorough
        finite = all(np.isfinite(each.numpy()).all() for each in self.learned_variables())
        return None if finite else "a variable is not finite"

    @property
    def weight_groups(self) -> dict[str, Sequence[tf.Variable]]:
        """See `Hooks.weight_groups`."""
        return {"weights": self.trainable_variables}

    def compared(self, x: Structure, y: Structure | None) -> tuple[Structure, tf.Tensor]:
        """See `Hooks.compared`: y, or x for a reconstruction, and the model's output."""
        return x if y is None else y, _tf.in_mode(lambda: self(x), training=False)

    def test_losses(self, x: Structure, y: Structure | None) -> tf.Tensor:
        """See `Hooks.test_losses`."""
        records = (x,) if y is None else (x, y)
        losses = _tf.map_apart(
            lambda record: _tf.in_mode(lambda: self.record_loss(*record), training=False), records
        )
        _tf.clear_losses(self)
        return losses

    def prepare(self, records: Records) -> None:
        """See `Hooks.prepare`: calls the model, unless it has variables."""
        if not self.trainable_variables:
            # Zeros instead of a record: layers may initialise themselves from their first input.
            self(zeros_like(records.x, 1))
        if not self.trainable_variables:
            raise ValueError(
                f"{type(self).__name__} has no trainable variables: there is nothing to learn."
            )
        self.built = True

    def released_logs(self, accumulated: dict[str, Any], mechanism: Mechanism) -> dict[str, float]:
        """See `Hooks.released_logs`."""
        return {}

    @property
    def caveats(self) -> tuple[str, ...]:
        """See `Hooks.caveats`."""
        return ()

    @property
    def takes_persons(self) -> bool:
        """See `Hooks.takes_persons`: unless a subclass has another clipped gradient."""
        return type(self).clipped_gradient is DPModel.clipped_gradient

    def export_functions(self, inputs: dict[str, tf.TensorSpec]) -> list[ExportedFunction]:
        """See `Hooks.export_functions`."""
        return [
            exporting.mean_signature(self.call, inputs["x"], "the model's output for each record.")
        ]

    def default_optimizer(self, noise_multiplier: float | None) -> Optimizer:
        """See `Hooks.default_optimizer`."""
        del noise_multiplier
        raise ValueError(
            "optimizer is missing: pass, say, "
            "dpvi.optimizers.DPKerasAdamOptimizer(l2_norm_clip=1.0)."
        )

    def learned_variables(self) -> Sequence[tf.Variable]:
        """See `Hooks.learned_variables`."""
        return list(self.trainable_variables)

    def boundaries(self, num_steps: int) -> Sequence[int]:
        """See `Hooks.boundaries`."""
        del num_steps
        return ()

    def advance(
        self, step: int, num_steps: int, accumulated: dict[str, Any], mechanism: Mechanism
    ) -> None:
        """See `Hooks.advance`."""

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """See `Hooks.check_optimizer`."""
        arguments.refuse_termwise(optimizer)
        arguments.refuse_scoring_steps(optimizer)

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
        neighboring_relation: dp_accounting.NeighboringRelation | str = "add_or_remove_one",
        accountant: str = "pld",
        validation_metrics: Sequence[Any] | None = None,
        physical_batch_size: int | None = None,
        steps_per_execution: int | None = None,
        jit_compile: bool | None = None,
        unsafe_training_metrics: bool = False,
        randomness: str | None = None,
        run_eagerly: bool | None = None,
        metrics: Any = None,
        loss: Any = None,
    ) -> None:
        """Sets the optimizer and the privacy target. Compiling again never resets the ledger.

        Args:
          optimizer: a DP-Keras optimizer, one of TensorFlow Privacy's, or, with `l2_norm_clip`, a
            Keras optimizer or its name.
          epsilon: the model's lifetime total for these data, to which `fit` calibrates the noise.
          delta: the delta of every epsilon shown; needed with `epsilon`.
          l2_norm_clip: bound on one record's gradient norm, for a plain Keras optimizer.
          noise_multiplier: noise standard deviation over the clip, for a plain Keras optimizer;
            instead of `epsilon`.
          planned_epochs: with `epsilon`, the epochs that the budget lasts for; by default the first
            `fit` spends it.
          ledger: a `PrivacyLedger`: on disk, shared with other models of the data, with a budget.
            Default: one in memory.
          neighboring_relation: "add_or_remove_one" or "replace_one", or `dp_accounting`'s enum. The
            first protects whether a record takes part, takes the number of records as public, and
            overstates the protection of single attributes; see `PrivacyPlan`.
          accountant: "pld" (tight) or "rdp".
          validation_metrics: Keras metrics that compare `predict`'s output with y (without one, a
            reconstruction with x), for `evaluate` and validation data.
          physical_batch_size: number of records whose gradients are in memory at a time; does not
            change the accounting.
          steps_per_execution: steps in one compiled call; by default 50, or an epoch if that is
            shorter.
          jit_compile: whether to compile the step with XLA; None does so if the model gains from it
            and its operations allow it.
          unsafe_training_metrics: whether to show exact training losses, which are *not private*.
            The report says so.
          randomness: None for TensorFlow's own generators, or "secure" for noise and samples from a
            cryptographic one, AES-256 in counter mode (the extra `secure`), as the report then
            says. Steps take up to 1.6 times as long. Monte Carlo draws are still TensorFlow's, from
            new keys in each step. See `docs/sharp_edges.md`.
          run_eagerly: whether to run the step without compiling it, for debugging.
          metrics: privatised metrics, such as `dpvi.metrics.PrivateELBO`, released with every step
            from the same budget. Keras metrics are refused: they would be exact.
          loss: refused: the model defines its own.

        Raises:
          ValueError: both or neither of epsilon and noise, no clip, a value out of range, or
            `randomness="secure"` of a model with a seed.
        """
        self._dp.refuse_while_fitting("compile")
        fitting.check_precision(self)
        given = {
            "epsilon": epsilon,
            "delta": delta,
            "l2_norm_clip": l2_norm_clip,
            "noise_multiplier": noise_multiplier,
        }
        unwanted = [] if loss is None else [("leave out loss=, which the model defines", "")]
        arguments.refuse_incomplete(self, optimizer, given, unwanted)
        private_metrics = metrics_lib.check_metrics(metrics)
        if loss is not None:
            raise ValueError(
                f"loss={check.shown(loss)}: leave it out; the model defines its own per-record "
                "loss."
            )
        if optimizer is None:
            optimizer = self.default_optimizer(noise_multiplier)
            noise_multiplier = None
        optimizer = as_dp_optimizer(
            optimizer, l2_norm_clip=l2_norm_clip, noise_multiplier=noise_multiplier
        )
        self.check_optimizer(optimizer)
        arguments.check_counts(steps_per_execution=steps_per_execution)
        target = PrivacyTarget(
            epsilon=epsilon,
            delta=delta,
            noise=optimizer.noise_multiplier,
            planned_epochs=planned_epochs,
            accountant=accountant,
            neighboring_relation=check.relation(neighboring_relation),
            physical_batch_size=physical_batch_size,
            jit_compile=jit_compile,
            unsafe_training_metrics=bool(unsafe_training_metrics),
            randomness=randomness,
        )
        check_randomness(randomness, self._dp.seed, "the model")
        ledger = self._ledger_after(ledger)
        metric_objects = arguments.validation_metrics(validation_metrics)
        super().compile(
            optimizer=optimizer,
            run_eagerly=run_eagerly,
            steps_per_execution=steps_per_execution or 1,
        )
        steps = CompiledSteps(optimizer, self.distribute_strategy, jit_compile, self.run_eagerly)
        self._dp.account.ledger = ledger
        self._dp.account.plan = None
        self._dp.compiled = Compiled(
            target=target,
            steps=steps,
            private_metrics=private_metrics,
            validation_metrics=tuple(metric_objects),
            steps_per_execution_is_set=steps_per_execution is not None,
        )

    def set_ledger(self, ledger: PrivacyLedger | None) -> None:
        """Sets the ledger of later releases; None keeps the one that the model has.

        Raises:
          TypeError: It is no `PrivacyLedger`.
          ValueError: The model has releases in another ledger.
        """
        self._dp.refuse_while_fitting("set_ledger")
        self._dp.account.ledger = self._ledger_after(ledger)

    def record_release(
        self, plan: PrivacyPlan, inputs: dict[str, Structure], num_records: int, *, declared: bool
    ) -> None:
        """Notes the last release of a model that does not learn by `fit`.

        The ledger has it already.

        Args:
          plan: The plan of the release.
          inputs: `tf.TensorSpec`s of the records, {"x": ..., "y": ...}.
          num_records: The public number of records.
          declared: Whether that number was declared.
        """
        account = self._dp.account
        account.plan = plan
        account.inputs = inputs
        account.num_records = num_records
        account.num_records_declared = declared

    def _ledger_after(self, ledger: PrivacyLedger | None) -> PrivacyLedger:
        """Returns the ledger to use from now on: a model with releases keeps the one of these."""
        held = self._dp.account.ledger
        if ledger is None or ledger is held:
            return held
        if not isinstance(ledger, PrivacyLedger):
            raise TypeError(f"ledger must be a dpvi.PrivacyLedger, got {check.shown(ledger)}.")
        same = ledger.path is not None and ledger.path == held.path
        if held.num_releases and not same and not ledger.continues(held):
            raise ValueError(
                f"ledger: this model has {held.num_releases} releases in another ledger: build a "
                "new one."
            )
        return ledger

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
        unit_ids: Identifiers = None,
        max_rows_per_unit: int | None = None,
        rows_beyond: str = "random",
        max_weight: float | None = None,
        **refused: Any,
    ) -> keras.callbacks.History:
        """Trains on private records. Draws Poisson batches itself and spends privacy budget.

        Args:
          x: array of shape [N, ...], dict or tuple of arrays, or a frame of pandas, polars or Arrow
            (a dict of its columns); memory maps, lazy arrays (`h5py.Dataset`, those of zarr, dask,
            tensorstore, xarray), or sources with a length and `source[indices]` for increasing
            int64 indices; records in files with their y, `dpvi.data.Parquet`, `dpvi.data.HDF5` or
            `dpvi.data.Copied`; or a `tf.data.Dataset` of batches (x, y, sample_weight) or less,
            with `num_records`, `steps_per_epoch` and a declared `sampling`.
          y: likewise, or None for models of whole records.
          batch_size: *expected* batch size B, default 256: each step includes each record with
            probability B / num_records. `batch_size >= num_records` uses full batches, without
            amplification by sampling.
          epochs: passes of ceil(num_records / batch_size) steps each.
          verbose: as in Keras.
          callbacks: Keras callbacks; they get only public and privatised values.
          sample_weight: array of shape [N] of weights >= 0, which multiply a record's loss before
            the clip.
          num_records: the public number of records N, by default `len(x)`; declare another to hide
            the exact one.
          sampling: for arrays "poisson" (default) or "fixed_size", exactly `batch_size` distinct
            records in each step, with RDP accounting under replace-one; or "poisson_of_shards" if
            each of several workers has records of its own (`num_records` is then that of all). For
            a dataset, the declared sampling of its batches: "poisson", or
            "each_record_once_per_epoch", accounted without amplification.
          sampling_probability: the inclusion probability for a dataset of Poisson batches.
          steps_per_epoch: default ceil(num_records / batch_size).
          initial_epoch: as in Keras.
          validation_data: `(x, y)` or `(x, y, sample_weight)`, or batches of these as a
            `tf.data.Dataset` or Keras `Sequence`; needs one of the next two arguments.
          validation_is_public: declares that the validation records are public.
          unsafe_validation: whether to show exact losses of private validation records; the report
            says so.
          validation_freq: as in Keras.
          validation_batch_size: for validation arrays, default 1024.
          validate: whether to refuse NaN and infinite values, a check outside the guarantee;
            without it, and for streamed records, such records contribute exactly zero. With
            `unit_ids` and twins it also refuses a column that is the outcome of another row.
          stream: whether to read rows from their source as steps draw them; by default for sources,
            and for memory maps and lazy arrays above 2 GiB (smaller ones are read whole, once).
            Batches and guarantee are the same.
          unit_ids: the person of each row, to protect persons with several rows: N integers, texts
            or other hashable values, in an array or a column of a frame, in any order. A record is
            then a person: `num_records` and `batch_size` count persons. None protects single rows.
          max_rows_per_unit: with `unit_ids`, the public largest number m of a person's rows that
            are used. Memory and time are those of m rows a person.
          rows_beyond: "random", or "first" if rows have an order: which m rows of a person with
            more are used. How many were left out is never shown.
          max_weight: with `sample_weight` and `DPVI` compiled without an optimizer, the public
            largest weight, for calibrated intervals of the fit to the weighted population; see
            docs/guides/official_statistics.md.

        Returns:
          A Keras `History` of epsilon and of public and privatised values.

        Raises:
          RuntimeError: the model is not compiled.
          BudgetExhaustedError: the budget allows no step; nothing was run.
          ValueError, TypeError: bad arguments; no privacy was spent.
        """
        users = list(getattr(callbacks, "callbacks", tf.nest.flatten(callbacks or [])))
        state = self._dp
        compiled = state.compiled_for(f"{type(self).__name__}.fit")
        state.refuse_while_fitting("fit")
        backup = fitting.check_arguments(refused, epochs, initial_epoch, users)
        evaluations = fitting.evaluations(validation_freq, validation_batch_size)
        declared = (validation_is_public, unsafe_validation)
        records, validation = arguments.records_and_validation(
            self, (x, y, sample_weight), validation_data, refused, declared, unit_ids is not None
        )
        is_unsafe = validation is not None and unsafe_validation and not validation_is_public
        data = self.make_data(
            *records,
            batch_size=batch_size,
            num_records=num_records,
            sampling=sampling,
            sampling_probability=sampling_probability,
            steps_per_epoch=steps_per_epoch,
            validate=validate,
            stream=stream,
            unit_ids=unit_ids,
            max_rows_per_unit=max_rows_per_unit,
            rows_beyond=rows_beyond,
            max_weight=max_weight,
        )
        span = range(initial_epoch, epochs)
        fitting.try_callbacks(self, compiled, users, validation, is_unsafe, span, evaluations)
        is_public = num_records is not None
        private = fitting.private_fit(
            self, state, compiled, data, epochs=span, backup=backup, declared=is_public
        )
        with private as (run, first_epoch):
            if run is None:  # A resumed fit that was complete.
                return fitting.complete_history(self, epochs)
            is_named = Workers(self.distribute_strategy).naming_lost(run.spent)
            with fitting.unsafe_validation(self, state, is_unsafe), is_named:
                replicas = self.distribute_strategy.num_replicas_in_sync
                return super().fit(
                    # Keras counts steps with it; records are sampled inside the step.
                    tf.data.Dataset.range(replicas).batch(replicas).repeat(),
                    epochs=epochs,
                    steps_per_epoch=data.steps_per_epoch,
                    initial_epoch=first_epoch,
                    verbose=verbose,
                    callbacks=fitting.order_callbacks(users, backup, run, verbose),
                    validation_data=validation,
                    **evaluations,
                )

    def make_data(
        self,
        x: Structure | None,
        y: Structure | None = None,
        sample_weight: np.ndarray | None = None,
        **settings: Any,
    ) -> Data:
        """Returns checked records with their sampler, for `mechanism` and a custom training loop.

        Args:
          x: As in `fit`.
          y: As in `fit`.
          sample_weight: As in `fit`.
          **settings: `batch_size`, `num_records`, `sampling`, `sampling_probability`,
            `steps_per_epoch`, `validate`, `stream`, `unit_ids`, `max_rows_per_unit`,
            `rows_beyond` and `max_weight` of `fit`.
        """
        target = self._dp.target
        physical = None if target is None else target.physical_batch_size
        return arguments.make_data(
            self,
            x,
            y,
            sample_weight,
            physical_batch_size=physical,
            seed=self._dp.seed,
            **settings,
        )

    def mechanism(self, data: Data) -> Mechanism:
        """Returns the mechanism of a fit's steps: sampler, clipped gradient, noise and metrics.

        Its sensitivity and privacy cost are known before anything is traced.

        Args:
          data: Records from `make_data`.

        Returns:
          The mechanism, with the optimizer's noise multiplier or None: see `Mechanism.calibrated`.

        Raises:
          RuntimeError: The model is not compiled.
        """
        compiled = self._dp.compiled_for(f"{type(self).__name__}.mechanism")
        return fitting.make_mechanism(self, compiled, data)

    def make_train_function(self, force: bool = False) -> Callable[..., dict[str, float]]:
        """Returns the function that `Model.fit` calls for each execution; only within `fit`."""
        if self._dp.running is None:
            raise RuntimeError(
                "make_train_function: a private step needs the plan and the sampler of fit. Call "
                "fit."
            )
        return self._dp.running

    def train_step(self, data: Structure) -> None:
        """Raises: there is no accounting for a batch that was not sampled here."""
        raise RuntimeError(
            "train_step is not used: batches are sampled inside the private step. Call fit."
        )

    def train_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        """See `train_step`.

        Raises:
          RuntimeError: A batch that the caller chose is no random sample.
        """
        raise RuntimeError(
            "train_on_batch: a batch chosen by the caller is no random sample. Call fit, which "
            "samples."
        )

    # ------------------------------------------------------------------ evaluate and predict

    @property
    def metrics(self) -> list[Metric]:
        """Epsilon spent, the privatised metrics and the validation metrics."""
        return evaluation.shown_metrics(self._dp) if hasattr(self, "_dp") else []

    def get_metrics_result(self) -> dict[str, tf.Tensor]:
        """Returns the released values that `fit` shows.

        Keras asks for them after each epoch, when metrics of other records may have no state yet.
        """
        return {metric.name: metric.result() for metric in evaluation.released_metrics(self._dp)}

    @property
    def metrics_names(self) -> list[str]:
        """The names of the values that `evaluate` returns, in order."""
        return evaluation.names_of_results(self._dp) if hasattr(self, "_dp") else []

    def summary(self, *args: Any, **kwargs: Any) -> None:
        """Prints Keras's summary; a model whose layers have their shapes need not be built.

        Args:
          *args: As in Keras.
          **kwargs: As in Keras.
        """
        layers = _tf.layers_within(self, include_self=False)
        if layers and all(layer.built for layer in layers):
            self.built = True
        super().summary(*args, **kwargs)

    @tf.autograph.experimental.do_not_convert  # As in `fit`.
    def test_step(self, data: Structure) -> dict[str, tf.Tensor]:
        """Evaluates one batch: the mean of the records' losses, and the validation metrics."""
        return evaluation.test_batch(self, self._dp, data)

    def evaluate(
        self,
        x: Structure | None = None,
        y: Structure | None = None,
        batch_size: int | None = None,
        verbose: int | str = "auto",
        sample_weight: np.ndarray | None = None,
        steps: int | None = None,
        **kwargs: Any,
    ) -> Any:
        """Returns exact losses and metrics of records: *not private* unless the records are public.

        Args:
          x: Records in any form that `fit` or Keras takes. Those that `fit` would stream by default
            are read batch by batch.
          y: Their outcomes, or None.
          batch_size: As in Keras.
          verbose: As in Keras.
          sample_weight: Weights of the records, shape [n].
          steps: As in Keras.
          **kwargs: Other arguments of Keras.

        Raises:
          ValueError: `sample_weight` without y, which Keras would drop.
        """
        records, sample_weight = open_files(x, y, sample_weight)
        x, y = records
        if y is None and sample_weight is not None:
            raise ValueError(
                "sample_weight was passed without y, and Keras drops it: use batches (x, None, "
                "weight)."
            )
        batches = arguments.in_batches(self, x, y, sample_weight, batch_size)
        if batches is not None:
            x, y = batches, None
            batch_size = sample_weight = None
        elif not arguments.is_batches(x):
            y, sample_weight = by_column("y", y), by_column("sample_weight", sample_weight)
            if evaluation.fitted_to(self._dp, dict):
                x = by_column("x", x, self.takes_texts)
        with evaluation.a_batch_an_execution(self), _tf.without_values("evaluate failed"):
            return super().evaluate(x, y, batch_size, verbose, sample_weight, steps, **kwargs)

    def predict(
        self,
        x: Structure,
        batch_size: int | None = None,
        verbose: int | str = 0,
        steps: int | None = None,
        **kwargs: Any,
    ) -> np.ndarray:
        """Returns the model's outputs for records, which cost no privacy but tell of these records.

        For a `DPVI`, the posterior predictive mean (class probabilities for a categorical
        likelihood). For a `DPVAE`, reconstructions.

        Args:
          x: n records in any form that `fit` or Keras takes.
          batch_size: As in Keras, by default 1024.
          verbose: As in Keras.
          steps: As in Keras.
          **kwargs: Other arguments of Keras.

        Returns:
          Array of shape [n, ...], or a structure of arrays.
        """
        x = open_files(x)[0][0]
        batches = arguments.in_batches(self, x, None, None, batch_size)
        if batches is not None:
            evaluation.check_like_fit(self._dp, x, batches.probe.x, "x")
            x, batch_size = batches, None
        elif not arguments.is_batches(x):
            x = self.as_inputs(x)
            batch_size = batch_size or 1024
        with evaluation.a_batch_an_execution(self), _tf.without_values("predict failed"):
            return super().predict(x, batch_size, verbose, steps, **kwargs)

    def as_inputs(self, x: Structure, name: str = "x") -> Structure:
        """Returns new records as tensors of the model's dtype.

        Keras casts arrays, but not tensors, to its own `floatx`.

        Args:
          x: Records in any form that `fit` takes.
          name: "x" or "y", whose shapes in the fit they must have.

        Raises:
          ValueError: The records have other shapes than those of the fit.
        """
        return evaluation.as_inputs(self, self._dp, x, name)

    # ------------------------------------------------------------------ saving

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments and the ledger.

        A subclass adds the arguments of its own `__init__`.

        The seed is left out, since it determines the key.

        Raises:
          ValueError: arguments of the class are missing.
        """
        overrides = type(self).get_config is not DPModel.get_config
        return {
            **saving.settings_of_class(self, overrides),
            saving.SAVED_KEY: saving.write_account(self._dp.account),
        }

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None
    ) -> DPModel:
        """Returns a model with the same arguments and ledger; its weights are loaded later.

        Args:
          config: From `get_config`.
          custom_objects: Functions and classes by name, if they are not registered.
        """
        config = dict(config)
        spent = config.pop(saving.SAVED_KEY, None)
        if spent is None:
            spent = config.pop(saving.OLD_KEY, None)
        parts = config.pop("parts", {})
        decoded = {name: serialization.decode(part, custom_objects) for name, part in parts.items()}
        model = cls(**cls.complete_config(config), **decoded)
        if spent is None:
            return model
        model._dp.account = saving.read_account(spent)
        if model._dp.account.inputs is not None:
            saving.prepare_from_specs(model, model._dp.account.inputs)
        return model

    @classmethod
    def complete_config(cls, config: dict[str, Any]) -> dict[str, Any]:
        """Returns a file's arguments of the constructor, with those that old versions left out."""
        return config

    def get_compile_config(self) -> dict[str, Any] | None:
        """Returns the arguments of `compile`, JSON-ready; None before `compile`."""
        compiled = self._dp.compiled
        return None if compiled is None else saving.write_settings(self, compiled)

    def compile_from_config(self, config: dict[str, Any]) -> None:
        """Compiles with saved arguments, and creates the variables that `load_model` sets."""
        plan = self._dp.account.plan
        self.compile(**saving.read_settings(config))
        self._dp.account.plan = plan
        if self.built:
            self.optimizer.build(self.learned_variables())

    def save_own_variables(self, store: dict[str, np.ndarray]) -> None:
        """Saves the variables as Keras does, after resetting metrics.

        Metrics may hold exact losses of evaluated records.
        """
        for metric in self.metrics:
            metric.reset_state()
        super().save_own_variables(store)

    def save(
        self,
        filepath: str | os.PathLike[str],
        overwrite: bool = True,
        save_format: str | None = None,
    ) -> None:
        """Saves model, compile settings, optimizer state and ledger in one `.keras` file.

        `dpvi.load_model` or `dpvi.keras.models.load_model` restores it, with the privacy spent on
        these data: see `PrivacyLedger.from_config`. Priors, likelihoods and other functions are
        saved by name: see `dpvi.register`. The file has no record, key or seed: a loaded model
        continues with fresh noise.

        Args:
          filepath: A path that ends in `.keras`.
          overwrite: Whether to replace an earlier file.
          save_format: None or "keras".

        Raises:
          ValueError: Another format, a path that is not writable, or a part that cannot be saved,
            such as a lambda; an earlier file is unchanged.
        """
        self.get_config()  # Raises before anything is written.
        saving.save(filepath, super().save, overwrite=overwrite, save_format=save_format)

    # ------------------------------------------------------------------ privacy spent

    @property
    def privacy_ledger(self) -> PrivacyLedger:
        """The ledger of all releases from these data, over every fit."""
        return self._dp.account.ledger

    @property
    def key_seed(self) -> int | None:
        """The seed of the constructor, or None for keys from the operating system."""
        return self._dp.seed

    @property
    def num_releases(self) -> int:
        """The number of releases charged for these data, without a running fit's reserve."""
        running = self._dp.running
        return self._dp.account.ledger.num_releases - (
            0 if running is None else running.steps_ahead
        )

    @property
    def is_fitting(self) -> bool:
        """True while `fit` runs."""
        return self._dp.running is not None

    @property
    def fit_releases(self) -> FitReleases | None:
        """The releases of the last fit besides the weights; None before the first."""
        return self._dp.released

    def forget_releases(self) -> None:
        """Forgets `fit_releases`, which belong to other weights than the model's now."""
        self._dp.released = None

    @property
    def accumulated(self) -> dict[str, Any]:
        """The last fit's accumulators over released values, by the name of the joint release."""
        return {} if self.fit_releases is None else self.fit_releases.accumulated

    @property
    def privacy_plan(self) -> PrivacyPlan | None:
        """The plan of the last `fit`, or None before the first."""
        return self._dp.account.plan

    @property
    def privacy_account(self) -> Account:
        """The ledger, plan and progress that are saved with the model."""
        return dataclasses.replace(self._dp.account)

    @property
    def privacy_target(self) -> PrivacyTarget | None:
        """The privacy settings of `compile`, or None before it."""
        return self._dp.target

    @property
    def privacy_budget(self) -> float | None:
        """The lifetime epsilon of `compile`, or None."""
        return None if self.privacy_target is None else self.privacy_target.epsilon

    @property
    def privacy_delta(self) -> float | None:
        """The delta of `compile`, or None."""
        return None if self.privacy_target is None else self.privacy_target.delta

    def export(
        self, path: str | os.PathLike[str], *, delta: float | None = None, overwrite: bool = False
    ) -> None:
        """Writes the learned model as a plain SavedModel with its privacy report.

        It needs only TensorFlow to run.

        Signatures, as far as the model has them: `predict`, `log_prob` (posterior predictive log
        density), `sample_posterior` and `sample_predictive` of `num` (int32) and `seed` (int32
        [2]), `encode` and `decode` of a `DPVAE`. `serving_default` is `predict`, or
        `sample_predictive` if a model has no `predict`. The folder, new or with `overwrite` an
        earlier export, also has the privacy report (`assets.extra/privacy_report.json`) and a model
        card (`README.md`) with examples.

        Args:
          path: The folder to write.
          delta: The report's delta, by default that of `compile`.
          overwrite: Whether to replace an earlier export.

        Raises:
          RuntimeError: the model is not fitted.
          ValueError: a path that is taken or not writable, no delta, or functions that need the
            number of records.

        #### Formal guarantee

        A function of released variables and public values, including constants of likelihood and
        layers (contract 2). The folder has no record, ledger, optimizer state or key, and not the
        data set's name in the ledger.
        """
        account = self._dp.account
        if account.inputs is None or account.ledger.num_releases == 0:
            raise RuntimeError(
                f"{type(self).__name__}.export was called before fit. Call fit first.\n"
                "(Weights loaded into a new model have no ledger: use model.save and load_model.)"
            )
        report = self.privacy_report(delta)
        export.write(
            path,
            self.export_functions(account.inputs),
            report,
            title=f"Model `{self.name}`",
            overwrite=overwrite,
        )

    def privacy_report(self, delta: float | None = None) -> PrivacyReport:
        """Returns a report of the privacy spent on these data over every fit.

        `print` it, or use `.to_json()`.

        Args:
          delta: The delta at which epsilon is reported, by default that of `compile`.

        Raises:
          ValueError: Delta is neither an argument nor known from `compile`.
        """
        account, target = self._dp.account, self.privacy_target
        delta = self.privacy_delta if delta is None else delta
        if delta is None:
            raise ValueError(
                "delta is not known: use privacy_report(delta=1e-5), or pass delta to compile."
            )
        return PrivacyReport.from_ledger(
            account.ledger,
            delta=delta,
            budget_epsilon=None if target is None or delta != target.delta else target.epsilon,
            accountant="pld" if target is None else target.accountant,
            num_records=account.num_records,
            num_records_declared=account.num_records_declared,
            seeded=self._dp.seed is not None,
            caveats=self.caveats,
        )
