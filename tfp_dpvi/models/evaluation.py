"""`evaluate`, `predict` and metrics of records outside the training data."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from tfp_dpvi import _tf
from tfp_dpvi import _validate as check
from tfp_dpvi._tf import Metric, Model, Structure, keras, tf
from tfp_dpvi.data import make_records
from tfp_dpvi.models import arguments
from tfp_dpvi.models.hooks import Hooks
from tfp_dpvi.models.state import State


def shown_metrics(state: State) -> list[Metric]:
    """Returns epsilon spent, the loss, the privatised metrics and the validation metrics."""
    epsilon, *private = released_metrics(state)
    validation = () if state.compiled is None else state.compiled.validation_metrics
    return [epsilon, state.metrics.loss, *private, *validation]


def released_metrics(state: State) -> list[Metric]:
    """Returns epsilon spent and the privatised metrics."""
    private = () if state.compiled is None else state.compiled.private_metrics
    return [state.metrics.epsilon, *(each for each in private if isinstance(each, Metric))]


def names_of_results(state: State) -> list[str]:
    """Returns the names of the values that `evaluate` returns, in order."""
    validation = () if state.compiled is None else state.compiled.validation_metrics
    return [_shown_name(state, metric) for metric in (state.metrics.loss, *validation)]


def _shown_name(state: State, metric: Metric) -> str:
    return f"unsafe_{metric.name}" if state.unsafe_validation else str(metric.name)


def test_batch(model: Hooks, state: State, data: Structure) -> dict[str, tf.Tensor]:
    """Evaluates one batch.

    Args:
      model: The model.
      state: Its state, whose metrics are updated.
      data: Records as Keras hands them over: x, (x, y) or (x, y, sample_weight).

    Returns:
      The mean of the records' losses and the validation metrics so far, by name.
    """
    parts = keras.utils.unpack_x_y_sample_weight(data)
    dtype = model.record_dtype
    *record, weight = tf.nest.map_structure(lambda part: _as_in_fit(part, dtype), parts)
    x, y = record
    loss = state.metrics.loss
    loss.update_state(model.test_losses(x, y), sample_weight=weight)
    results = {_shown_name(state, loss): loss.result()}
    metrics = () if state.compiled is None else state.compiled.validation_metrics
    if not metrics:
        return results
    target, prediction = _for_metrics(model.compared(x, y), y is not None)
    for metric in metrics:
        metric.update_state(target, prediction, sample_weight=weight)
        results[_shown_name(state, metric)] = metric.result()
    return results


def _as_in_fit(part: tf.Tensor | None, dtype: np.dtype) -> tf.Tensor | None:
    """Casts a part of records as `fit` does."""
    if part is None:
        return None
    part = tf.convert_to_tensor(part)
    return tf.cast(part, dtype) if part.dtype.is_floating or part.dtype.is_bool else part


def _for_metrics(compared: tuple[Structure, tf.Tensor], has_y: bool) -> list[tf.Tensor]:
    """Returns target and prediction with the shapes that Keras metrics need."""
    if any(map(tf.nest.is_nested, compared)):
        raise ValueError(
            "validation_metrics compare one array y with one output of predict: this model has "
            "several."
        )
    target, prediction = map(tf.convert_to_tensor, compared)
    if not has_y and not target.shape.is_compatible_with(prediction.shape):
        raise ValueError(
            "validation_metrics compare y with predict's output, but y is missing, and the output "
            f"of shape {prediction.shape} "
            f"is no reconstruction of x of shape {target.shape}: pass y, or leave them out of "
            "compile."
        )
    return [part[:, tf.newaxis] if part.shape.rank == 1 else part for part in (target, prediction)]


def as_inputs(model: Hooks, state: State, x: Structure, name: str) -> Structure:
    """Returns new records as tensors of the model's dtype.

    Args:
      model: The model.
      state: Its state.
      x: Records in any form that `fit` takes.
      name: "x" or "y", whose shapes in the fit they must have.
    """
    if isinstance(x, list) and fitted_to(state, tuple):  # Keras's way to pass several inputs.
        x = tuple(x)
    checked = make_records(
        x, None, None, dtype=model.record_dtype, validate=False, texts=model.takes_texts
    ).x
    check_like_fit(state, x, checked, name)
    return tf.nest.map_structure(tf.convert_to_tensor, checked)


def fitted_to(state: State, kind: type) -> bool:
    """Returns whether the records x of the last fit were in such a structure.

    Args:
      state: The model's state.
      kind: A type, dict or tuple.
    """
    return state.account.inputs is not None and isinstance(state.account.inputs["x"], kind)


def check_like_fit(state: State, x: Structure, checked: Structure, name: str) -> None:
    """Raises unless these records are like those of the fit, if there was one.

    Args:
      state: The model's state.
      x: The records as they were passed.
      checked: Their arrays.
      name: "x" or "y".
    """
    if state.account.inputs is not None and not isinstance(x, tuple):
        arguments.check_like(checked, state.account.inputs[name], name)


@contextlib.contextmanager
def a_batch_an_execution(model: Model) -> Iterator[None]:
    """While active, Keras runs one batch per execution, and its errors have one line.

    A function that is traced for several would drop the remainder.
    """
    counter: Any = _tf.steps_per_execution(model) or tf.Variable(1)  # None before `compile`.
    before = counter.numpy()
    counter.assign(1)
    try:
        yield
    except ValueError as error:
        if "in user code:" not in str(error):
            raise
        raise ValueError(f"The records do not fit the model: {check.plainly(error)}") from None
    finally:
        counter.assign(before)
