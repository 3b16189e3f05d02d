"""`DPModel`: a Keras model whose `fit` samples, clips, adds noise and accounts for the privacy spent."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import dp_accounting
import numpy as np

from tfp_dpvi import _validate as check
from tfp_dpvi import export
from tfp_dpvi import metrics as metrics_lib
from tfp_dpvi._tf import (
    Optimizer,
    Structure,
    clear_losses,
    in_mode,
    layers_within,
    refuse_keras_3,
    refuse_late_functions,
    tf,
)
from tfp_dpvi.data import Records, make_records
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

LIKELIHOOD_ERRORS = (TypeError, ValueError, KeyError, IndexError, AttributeError, NotImplementedError)
"""What a user's function raises when it does not fit its data; TensorFlow's shape errors are `ValueError`s."""


class DPModel(FittedModel):
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

        `fit` calls it with layers in training mode, so that Dropout drops, with draws of each record's own; `evaluate` in
        inference mode. Layers that are told `training=` do as they are told.

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

        Losses are means over records: divide a prior's `-log_prob` by `num_records` here. `dpvi.metrics.PrivateELBO` shows
        the value.
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
            return mapped(record_gradient, variables, clip, **self.exact_terms(spec.num_records))

        return ClippedGradient(draw, clip)

    def exact_terms(self, num_records: int) -> dict[str, Any]:
        """Returns `data_independent_loss` and its gradient, as `StepGradient` takes them."""
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(self.trainable_variables)
            loss = self.data_independent_loss(num_records)
        if loss is None:
            return {}
        exact = tape.gradient(loss, self.trainable_variables, unconnected_gradients="zero")
        return {"data_independent": exact, "data_independent_loss": loss}

    def _whole_record_loss(self, record: dict[str, tf.Tensor]) -> tf.Tensor:
        """Returns `record_loss` with everything that the record's layers add to it, times its weight."""
        clear_losses(self)
        given = [record[name] for name in ("x", "y") if name in record]
        with refuse_late_functions(layers_within(self)):
            loss = tf.convert_to_tensor(in_mode(lambda: self.record_loss(*given), training=True))
        if loss.shape.rank != 0:
            raise ValueError(
                f"record_loss returned shape {loss.shape}; the loss of one record is a scalar. Reduce it, or "
                "take entry [0] of a batch of one."
            )
        # add_loss and activity terms may depend on the record, so they go through the clip (contract C2).
        loss = tf.add_n([loss, *[tf.cast(tf.reduce_sum(extra), loss.dtype) for extra in self.losses_of_record()]])
        clear_losses(self)
        return loss * record["sample_weight"] if "sample_weight" in record else loss

    def losses_of_record(self) -> list[tf.Tensor]:
        """Returns what layers added to the loss of the record that they saw last; for subclasses."""
        return list(self.losses)

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

    def released_logs(self, accumulated: dict[str, Any], mechanism: Mechanism) -> dict[str, float]:
        """Returns what to show of a fit's accumulators over released values; for subclasses."""
        return {}

    @property
    def caveats(self) -> tuple[str, ...]:
        """Sentences for the report; for subclasses."""
        return ()

    def export_functions(self, inputs: dict[str, tf.TensorSpec]) -> list[ExportedFunction]:
        """Returns the signatures of `export`, given the specs of records x and, if there is one, y; for subclasses."""
        return [exporting.mean_function(self.call, inputs["x"], "the model's output for each record.")]

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
        neighboring_relation: dp_accounting.NeighboringRelation | str = "add_or_remove_one",
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
          optimizer: a DP-Keras optimizer, one of TensorFlow Privacy's, or, with `l2_norm_clip`, a Keras optimizer or its name.
          epsilon: the model's lifetime total for these data: `fit` calibrates the noise to it.
          delta: of every epsilon shown; needed with `epsilon`.
          l2_norm_clip: bound on one record's gradient, for a plain Keras optimizer.
          noise_multiplier: noise standard deviation over the clip, likewise; instead of `epsilon`.
          planned_epochs: with `epsilon`, how many epochs the budget is to last for; by default the first `fit` spends it.
          ledger: a `PrivacyLedger`: on disk, shared with other models of the data, with a budget. Default: one in memory.
          neighboring_relation: "add_or_remove_one" or "replace_one", or `dp_accounting`'s enum.
          accountant: "pld" (tight) or "rdp".
          validation_metrics: Keras metrics that compare `predict`'s output with y (without one, a reconstruction with x), for
            `evaluate` and validation data.
          physical_batch_size: records whose gradients are held in memory at a time; changes no figure.
          steps_per_execution: steps in one compiled call; by default 50, or an epoch if that is shorter.
          jit_compile: compile the step with XLA; None does so where a model gains from it and its operations allow it.
          unsafe_training_metrics: show exact training losses, which are *not private*. The report says so.
          run_eagerly: run the step without compiling it, to debug.
          metrics: privatised metrics, `dpvi.metrics.PrivateELBO` and such, released with every step and paid for from the
            same budget. Keras metrics are refused: they would be exact.
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
            noise=optimizer.noise_multiplier,
            planned_epochs=planned_epochs,
            accountant=accountant,
            neighboring_relation=check.relation(neighboring_relation),
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

    # ------------------------------------------------------------------ what was spent

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

    @property
    def privacy_delta(self) -> float | None:
        """The delta that `compile` was given, or None."""
        return None if self._dp.target is None else self._dp.target.delta

    def export(self, path: str | os.PathLike[str], *, delta: float | None = None, overwrite: bool = False) -> None:
        """Writes what was learned as a plain SavedModel, which TensorFlow alone loads, with its privacy report.

        Signatures, where the model has them: `predict`, `log_prob` (posterior predictive log density), `sample_posterior` and
        `sample_predictive` of `num` (int32) and `seed` (int32 [2]), `encode` and `decode` of a `DPVAE`; `serving_default` is
        `predict`, or `sample_predictive` where a model predicts nothing. Beside them the report
        (`assets.extra/privacy_report.json`) and a model card (`README.md`) that says how to call them.

        Args:
          path: a folder that does not exist yet; it appears whole or not at all.
          delta: of the report; by default that of `compile`.
          overwrite: replace an earlier export.

        Raises:
          RuntimeError: not fitted.
          ValueError: a path that cannot be written or is taken, no delta, or functions that need the number of records.

        #### Formal guarantee

        A function of released variables and public values, constants of likelihood and layers among them (C2): no record,
        ledger, optimizer state or key is in the folder, nor the ledger's name for the data set.
        """
        state = self._dp
        if state.inputs is None or state.ledger.num_releases == 0:
            raise RuntimeError(
                f"{type(self).__name__}.export before fit: nothing was learned, and there is nothing to report. Call fit first.\n"
                "(Weights that were loaded into a new model come without its ledger: use model.save and load_model.)"
            )
        report = self.privacy_report(delta)
        export.write(
            path, self.export_functions(state.inputs), report, title=f"Model `{self.name}`", overwrite=overwrite
        )

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


class DistributionModel(DPModel):
    """What `DPVI` and `DPVAE` share: they predict from records as `fit` takes them."""

    def predict(self, x: Structure, batch_size: int | None = None, verbose: int = 0, **kwargs: Any) -> np.ndarray:
        """Returns what a call returns, for all records: array of shape [n, ...].

        Of a `DPVI` the posterior predictive mean (class probabilities of a categorical likelihood), a function of the
        released posterior and `x` at no cost; of a `DPVAE` reconstructions.

        Args:
          x: array of shape [n, ...], dict or tuple of arrays, or a DataFrame; or batches of these, as Keras takes them.
          batch_size: records at a time, default 1024.
          verbose: as in Keras.
          **kwargs: as in Keras.
        """
        if not arguments.is_batches(x):
            x, batch_size = self._inputs(x), batch_size or 1024
        return super().predict(x, batch_size=batch_size, verbose=verbose, **kwargs)

    def _inputs(self, x: Structure, name: str = "x") -> Structure:
        """Returns new records as tensors in the model's dtype (Keras casts arrays, but not tensors, to its own `floatx`)."""
        checked = make_records(x, None, None, dtype=self.record_dtype, validate=False).x
        if self._dp.inputs is not None and not isinstance(x, tuple):
            arguments.check_like(checked, self._dp.inputs[name], name)
        return tf.nest.map_structure(tf.convert_to_tensor, checked)
