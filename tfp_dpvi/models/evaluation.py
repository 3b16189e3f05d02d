"""`evaluate`, `predict` and `summary` of a private model, and metrics of records outside the training data."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tfp_dpvi import _tf
from tfp_dpvi._tf import Metric, Structure, in_mode, keras, tf
from tfp_dpvi.models import arguments, saving


class EvaluatedModel(saving.SavedModel):
    """The part of `DPModel` that evaluates."""

    @property
    def record_dtype(self) -> np.dtype:
        """The float type that records are cast to."""
        return np.dtype(self.dtype)

    @property
    def metrics(self) -> list[Metric]:
        """Epsilon spent, the privatised metrics and the validation metrics."""
        if not hasattr(self, "_dp"):
            return []
        shown = [one for one in self._dp.private_metrics if isinstance(one, Metric)]
        return [self._dp.epsilon_metric, self._dp.loss_metric, *shown, *self._dp.validation_metrics]

    @property
    def metrics_names(self) -> list[str]:
        """The names of the values that `evaluate` returns, in order."""
        return (
            []
            if not hasattr(self, "_dp")
            else [self._loss_name, *map(self._name_of, self._dp.validation_metrics)]
        )

    @property
    def weight_groups(self) -> dict[str, Sequence[tf.Variable]]:
        """The trainable variables by part of the model, for TensorBoard; for subclasses."""
        return {"weights": self.trainable_variables}

    def summary(self, *args: Any, **kwargs: Any) -> None:
        """Prints Keras's summary; a model whose layers have their shapes need not be built first."""
        layers = _tf.layers_within(self, include_self=False)
        if layers and all(layer.built for layer in layers):
            self.built = True
        super().summary(*args, **kwargs)

    @tf.autograph.experimental.do_not_convert  # As in `fit`.
    def test_step(self, data: Structure) -> dict[str, tf.Tensor]:
        """Evaluates one batch: the mean of the records' losses, and the validation metrics."""
        x, y, weight = tf.nest.map_structure(self._cast, keras.utils.unpack_x_y_sample_weight(data))
        state = self._dp
        state.loss_metric.update_state(self.test_losses(x, y), sample_weight=weight)
        results = {self._loss_name: state.loss_metric.result()}
        compared = self._checked(x, y) if state.validation_metrics else ()
        for metric in state.validation_metrics:
            metric.update_state(*compared, sample_weight=weight)
            results[self._name_of(metric)] = metric.result()
        return results

    def _cast(self, part: tf.Tensor | None) -> tf.Tensor | None:
        """Casts a part of records as `fit` does."""
        part = None if part is None else tf.convert_to_tensor(part)
        numbers = part is not None and (part.dtype.is_floating or part.dtype.is_bool)
        return tf.cast(part, self.record_dtype) if numbers else part

    def _checked(self, x: Structure, y: Structure | None) -> list[tf.Tensor]:
        """Returns target and prediction with the shapes that Keras metrics need."""
        compared = self._compared(x, y)
        if any(map(tf.nest.is_nested, compared)):
            raise ValueError(
                "validation_metrics compare one array y with one output of predict: this model has several."
            )
        truth, prediction = map(tf.convert_to_tensor, compared)
        if y is None and not truth.shape.is_compatible_with(prediction.shape):
            raise ValueError(
                f"validation_metrics compare y with predict's output, but y is missing, and the output of shape {prediction.shape} "
                f"is no reconstruction of x of shape {truth.shape}: pass y, or leave them out of compile."
            )
        return [
            part[:, tf.newaxis] if part.shape.rank == 1 else part for part in (truth, prediction)
        ]

    @abc.abstractmethod
    def record_loss(self, x: Structure, y: Structure | None = None) -> tf.Tensor:
        """See `DPModel`."""

    def test_losses(self, x: Structure, y: Structure | None) -> tf.Tensor:
        """Returns the losses of a batch of records, shape [n]."""
        records = (x,) if y is None else (x, y)
        losses = _tf.map_apart(
            lambda record: in_mode(lambda: self.record_loss(*record), training=False), records
        )
        _tf.clear_losses(self)
        return losses

    def _compared(self, x: Structure, y: Structure | None) -> tuple[Structure, tf.Tensor]:
        """Returns target and prediction for validation metrics, or x and its reconstruction."""
        return x if y is None else y, in_mode(lambda: self(x), training=False)

    def evaluate(
        self,
        x: Structure | None = None,
        y: Structure | None = None,
        batch_size: int | None = None,
        verbose: int | str = "auto",
        sample_weight: np.ndarray | None = None,
        **kwargs: Any,
    ) -> Any:
        """Returns exact losses and metrics of records: *not private* unless the records are public.

        Arguments are as in Keras. Records that `fit` would stream by default are read batch by batch.
        """
        if y is None and sample_weight is not None:
            raise ValueError(
                "sample_weight was passed without y, and Keras drops it: use batches (x, None, weight)."
            )
        batches = arguments.in_batches(x, y, sample_weight, batch_size, self.record_dtype)
        if batches is not None:
            x, y = batches, None
            batch_size = sample_weight = None
        with self._one_step_an_execution(), _tf.without_values("evaluate failed"):
            return super().evaluate(x, y, batch_size, verbose, sample_weight, **kwargs)

    def predict(
        self,
        x: Structure,
        batch_size: int | None = None,
        verbose: int | str = "auto",
        **kwargs: Any,
    ) -> Any:
        """Returns the model's outputs. Records that `fit` would stream by default are read batch by batch."""
        batches = arguments.in_batches(x, None, None, batch_size, self.record_dtype)
        if batches is not None:
            x, batch_size = batches, None
        with self._one_step_an_execution(), _tf.without_values("predict failed"):
            return super().predict(x, batch_size, verbose, **kwargs)

    @contextlib.contextmanager
    def _one_step_an_execution(self) -> Iterator[None]:
        """While active, Keras runs one batch per execution: a function traced for several would drop the remainder."""
        counter = _tf.steps_per_execution(self) or tf.Variable(1)  # None before `compile`.
        before = counter.numpy()
        counter.assign(1)
        try:
            yield
        finally:
            counter.assign(before)

    @property
    def _loss_name(self) -> str:
        return self._name_of(self._dp.loss_metric)

    def _name_of(self, metric: Metric) -> str:
        return f"unsafe_{metric.name}" if self._dp.unsafe_validation else str(metric.name)
