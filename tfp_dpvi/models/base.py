"""`DPModel`: a Keras model whose `fit` samples, clips, adds noise and does the privacy accounting."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import dp_accounting
import numpy as np

from tfp_dpvi import _tf, export
from tfp_dpvi import _validate as check
from tfp_dpvi import metrics as metrics_lib
from tfp_dpvi._keystream import check_randomness
from tfp_dpvi._tf import Optimizer, Structure, tf
from tfp_dpvi.data import Records, make_records
from tfp_dpvi.data.shapes import zeros_like
from tfp_dpvi.export import ExportedFunction
from tfp_dpvi.gradients import ClippedGradient, StepGradient, StepSpec, mapped
from tfp_dpvi.models import arguments, exporting
from tfp_dpvi.models.fitting import FittedModel
from tfp_dpvi.optimizers import TermwiseOptimizer, as_dp_optimizer
from tfp_dpvi.privacy import PrivacyLedger, PrivacyPlan, PrivacyReport
from tfp_dpvi.sampling import BatchNeeds
from tfp_dpvi.training import Mechanism
from tfp_dpvi.training.budget import PrivacyTarget
from tfp_dpvi.training.compiled import CompiledSteps
from tfp_dpvi.training.fit import State

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


class DPModel(FittedModel):
    """Base class of private Keras models. For a model of your own, override `record_loss`.

    ```python
    class Regression(dpvi.DPModel):
        def __init__(self):
            super().__init__()
            self.dense = dpvi.keras.layers.Dense(1)

        def call(self, x):
            return self.dense(x)

        def record_loss(self, x, y):  # One record, without a batch dimension.
            return tf.square(self(x[None])[0, 0] - y)
    ```

    Args:
      seed: None (the default) for sampling and noise keys from the operating system. An integer makes runs repeatable, for
        tests and debugging, as far as TensorFlow is deterministic; the report says "seeded: not private".
      name: name of the model.

    #### Formal guarantee

    All default outputs of `fit` (weights after every step, `History`, the progress bar) are functions of public values and of
    Gaussian releases of clipped sums over samples drawn as the plan says. They are (epsilon, delta)-differentially private
    with the values that `privacy_report()` prints, under the neighboring relation that it names, except for what it lists.
    """

    def __init__(self, *, seed: int | None = None, name: str | None = None, **kwargs: Any) -> None:
        super().__init__(name=name, **kwargs)
        self._dp = State(None if seed is None else int(seed))

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute; a setting that steps have read is refused while a fit runs."""
        _tf.refuse_keras_3(name, value)
        state = self.__dict__.get("_dp")
        if state is None or name.startswith("_") or name in _OF_KERAS:
            super().__setattr__(name, value)
            return
        if state.running is not None:
            _tf.refuse_setting(self, name, value, state.running.settings)
        changed = not _tf.is_same_plain(getattr(self, name, _MISSING), value)
        super().__setattr__(name, value)
        between_fits = state.running is None and state.compiled is not None
        if changed and between_fits and tf.executing_eagerly():
            state.compiled.forget()  # The next fit's steps read the setting.

    # ------------------------------------------------------------------ methods to override

    def record_loss(self, x: Any, y: Any = None) -> Any:
        """Returns the loss of one record of `x` (and `y`) of `fit`, without a batch dimension: a scalar. Override this.

        `fit` calls it with layers in training mode (Dropout is active, with draws for each record), `evaluate` in inference
        mode. Layers that are called with `training=` use that.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no loss: override record_loss(self, x, y), which returns the scalar loss of one record."
        )

    def data_independent_loss(self, num_records: int) -> Any:
        """Returns loss terms that depend on no record, a scalar or None, added without clip and noise (contract C2).

        Losses are means over records: divide a prior's `-log_prob` by `num_records`. `dpvi.metrics.PrivateELBO` shows the
        value.
        """
        return None

    def clipped_gradient(self, spec: StepSpec) -> ClippedGradient:
        """Returns the model's clipped gradient with its sensitivity; for models with Monte Carlo draws of their own."""
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

    def _whole_record_loss(self, record: dict[str, tf.Tensor]) -> tf.Tensor:
        """Returns `record_loss` plus the losses that layers add, times the record's weight."""
        _tf.clear_losses(self)
        given = [record[name] for name in ("x", "y") if name in record]
        with _tf.refuse_late_functions(_tf.layers_within(self)):
            loss = tf.convert_to_tensor(
                _tf.in_mode(lambda: self.record_loss(*given), training=True)
            )
        if loss.shape.rank != 0:
            raise ValueError(
                f"record_loss returned shape {loss.shape}; the loss of one record is a scalar: reduce it."
            )
        # add_loss and activity terms may depend on the record, so they are clipped (contract C2).
        loss = tf.add_n(
            [
                loss,
                *[tf.cast(tf.reduce_sum(extra), loss.dtype) for extra in self.losses_of_record()],
            ]
        )
        _tf.clear_losses(self)
        return loss * record["sample_weight"] if "sample_weight" in record else loss

    def losses_of_record(self) -> list[tf.Tensor]:
        """Returns the losses that layers added in the latest call; for subclasses."""
        return list(self.losses)

    @property
    def batch_needs(self) -> BatchNeeds:
        """The clipped gradient's needs per physical batch; for subclasses whose gradient works on a batch at once."""
        return BatchNeeds(
            sum(int(np.prod(v.shape)) * v.dtype.size for v in self.trainable_variables)
        )

    def prepare(self, records: Records) -> None:
        """Creates the variables, unless the layers have been called, for records of these shapes and dtypes."""
        if not self.trainable_variables:
            # Zeros instead of a record: layers may initialise themselves from their first input.
            self(zeros_like(records.x, 1))
        if not self.trainable_variables:
            raise ValueError(
                f"{type(self).__name__} has no trainable variables: there is nothing to learn."
            )
        self.built = True

    def released_logs(self, accumulated: dict[str, Any], mechanism: Mechanism) -> dict[str, float]:
        """Returns logs from a fit's accumulators over released values; for subclasses."""
        return {}

    @property
    def caveats(self) -> tuple[str, ...]:
        """Returns sentences for the report; for subclasses."""
        return ()

    def export_functions(self, inputs: dict[str, tf.TensorSpec]) -> list[ExportedFunction]:
        """Returns the signatures of `export` for the specs of records x and, if any, y; for subclasses."""
        return [
            exporting.mean_function(self.call, inputs["x"], "the model's output for each record.")
        ]

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Raises if this optimizer does not fit the model; for subclasses."""
        if isinstance(optimizer, TermwiseOptimizer):
            raise ValueError(
                f"optimizer={type(optimizer).__name__} has a clip for groups of records, but this model has no batch-wise "
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
          optimizer: a DP-Keras optimizer, one of TensorFlow Privacy's, or, with `l2_norm_clip`, a Keras optimizer or its name.
          epsilon: the model's lifetime total for these data, to which `fit` calibrates the noise.
          delta: the delta of every epsilon shown; needed with `epsilon`.
          l2_norm_clip: bound on one record's gradient norm, for a plain Keras optimizer.
          noise_multiplier: noise standard deviation over the clip, for a plain Keras optimizer; instead of `epsilon`.
          planned_epochs: with `epsilon`, the epochs that the budget lasts for; by default the first `fit` spends it.
          ledger: a `PrivacyLedger`: on disk, shared with other models of the data, with a budget. Default: one in memory.
          neighboring_relation: "add_or_remove_one" or "replace_one", or `dp_accounting`'s enum. The
            first protects whether a record takes part, takes the number of records as public, and
            overstates the protection of single attributes; see `PrivacyPlan`.
          accountant: "pld" (tight) or "rdp".
          validation_metrics: Keras metrics that compare `predict`'s output with y (without one, a reconstruction with x), for
            `evaluate` and validation data.
          physical_batch_size: number of records whose gradients are in memory at a time; does not change the accounting.
          steps_per_execution: steps in one compiled call; by default 50, or an epoch if that is shorter.
          jit_compile: whether to compile the step with XLA; None does so if the model gains from it and its operations allow it.
          unsafe_training_metrics: whether to show exact training losses, which are *not private*. The report says so.
          randomness: None for TensorFlow's own generators, or "secure" for noise and samples from a
            cryptographic one, AES-256 in counter mode (the extra `secure`), as the report then says. Steps
            take up to 1.6 times as long. Monte Carlo draws are still TensorFlow's, from new keys in each
            step. See `docs/sharp_edges.md`.
          run_eagerly: whether to run the step without compiling it, for debugging.
          metrics: privatised metrics, such as `dpvi.metrics.PrivateELBO`, released with every step from the same budget. Keras
            metrics are refused: they would be exact.
          loss: refused: the model defines its own.

        Raises:
          ValueError: both or neither of epsilon and noise, no clip, a value out of range, or
            `randomness="secure"` of a model with a seed.
        """
        self._refuse_while_fitting("compile")
        self._check_precision()
        private_metrics = metrics_lib.check_metrics(metrics)
        if loss is not None:
            raise ValueError(
                f"loss={check.shown(loss)}: leave it out; the model defines its own per-record "
                "loss."
            )
        if optimizer is None:
            raise ValueError(
                "optimizer is missing: pass, say, dpvi.optimizers.DPKerasAdamOptimizer(l2_norm_clip=1.0)."
            )
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
        state = self._dp
        state.ledger, state.target, state.plan = ledger, target, None
        state.compiled = CompiledSteps(
            optimizer, self.distribute_strategy, jit_compile, self.run_eagerly
        )
        state.steps_per_execution_is_set = steps_per_execution is not None
        state.validation_metrics, state.private_metrics = metric_objects, private_metrics

    def _ledger_after(self, ledger: PrivacyLedger | None) -> PrivacyLedger:
        """Returns the ledger to use from now on; raises `ValueError` if the model has releases in another one."""
        held = self._dp.ledger
        if ledger is None or ledger is held:
            return held
        if not isinstance(ledger, PrivacyLedger):
            raise TypeError(f"ledger must be a dpvi.PrivacyLedger, got {check.shown(ledger)}.")
        same = ledger.path is not None and ledger.path == held.path
        if held.num_releases and not same and not ledger.continues(held):
            raise ValueError(
                f"ledger: this model has {held.num_releases} releases in another ledger: build a new one."
            )
        return ledger

    # ------------------------------------------------------------------ privacy spent

    @property
    def privacy_ledger(self) -> PrivacyLedger:
        """The ledger of all releases from these data, over every fit."""
        return self._dp.ledger

    @property
    def num_releases(self) -> int:
        """The number of releases charged for these data, without those that a running fit has reserved."""
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
        """The lifetime epsilon of `compile`, or None."""
        return None if self._dp.target is None else self._dp.target.epsilon

    @property
    def privacy_delta(self) -> float | None:
        """The delta of `compile`, or None."""
        return None if self._dp.target is None else self._dp.target.delta

    def export(
        self, path: str | os.PathLike[str], *, delta: float | None = None, overwrite: bool = False
    ) -> None:
        """Writes the learned model as a plain SavedModel, which needs only TensorFlow, with its privacy report.

        Signatures, as far as the model has them: `predict`, `log_prob` (posterior predictive log density), `sample_posterior`
        and `sample_predictive` of `num` (int32) and `seed` (int32 [2]), `encode` and `decode` of a `DPVAE`. `serving_default`
        is `predict`, or `sample_predictive` if a model has no `predict`. The folder, new or with `overwrite` an earlier export,
        also has the privacy report (`assets.extra/privacy_report.json`) and a model card (`README.md`) with examples.

        Raises:
          RuntimeError: the model is not fitted.
          ValueError: a path that is taken or not writable, no delta, or functions that need the number of records.

        #### Formal guarantee

        A function of released variables and public values, including constants of likelihood and layers (C2). The folder has
        no record, ledger, optimizer state or key, and not the data set's name in the ledger.
        """
        state = self._dp
        if state.inputs is None or state.ledger.num_releases == 0:
            raise RuntimeError(
                f"{type(self).__name__}.export was called before fit. Call fit first.\n"
                "(Weights loaded into a new model have no ledger: use model.save and load_model.)"
            )
        report = self.privacy_report(delta)
        export.write(
            path,
            self.export_functions(state.inputs),
            report,
            title=f"Model `{self.name}`",
            overwrite=overwrite,
        )

    def privacy_report(self, delta: float | None = None) -> PrivacyReport:
        """Returns a report of the privacy spent on these data, over every `fit`, and of what it covers.

        `print` it, or use `.to_json()`. Epsilon is that at `delta`, by default that of `compile`; without either it raises
        `ValueError`.
        """
        state, target = self._dp, self._dp.target
        delta = self.privacy_delta if delta is None else delta
        if delta is None:
            raise ValueError(
                "delta is not known: use privacy_report(delta=1e-5), or pass delta to compile."
            )
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


class DistributionModel(DPModel):
    """Base class of `DPVI` and `DPVAE`, which predict from records as `fit` takes them."""

    def predict(
        self, x: Structure, batch_size: int | None = None, verbose: int | str = 0, **kwargs: Any
    ) -> np.ndarray:
        """Returns predictions for all records of `x`, in any form that `fit` or Keras takes: array of shape [n, ...].

        For a `DPVI`, the posterior predictive mean (class probabilities for a categorical likelihood), a function of the
        released posterior and `x` at no cost. For a `DPVAE`, reconstructions. Other arguments as in Keras.
        """
        batches = arguments.in_batches(x, None, None, batch_size, self.record_dtype)
        if batches is not None:
            self._check_like(x, batches.probe.x, "x")
            x, batch_size = batches, None
        elif not arguments.is_batches(x):
            x, batch_size = self.as_inputs(x), batch_size or 1024
        return super().predict(x, batch_size=batch_size, verbose=verbose, **kwargs)

    def as_inputs(self, x: Structure, name: str = "x") -> Structure:
        """Returns new records as tensors of the model's dtype (Keras casts arrays, but not tensors, to its `floatx`)."""
        checked = make_records(x, None, None, dtype=self.record_dtype, validate=False).x
        self._check_like(x, checked, name)
        return tf.nest.map_structure(tf.convert_to_tensor, checked)

    def _check_like(self, x: Structure, checked: Structure, name: str) -> None:
        """Raises unless these records are like those of the fit, if there was one."""
        if self._dp.inputs is not None and not isinstance(x, tuple):
            arguments.check_like(checked, self._dp.inputs[name], name)
