"""Conversion of `compile(optimizer=)` to a DP-Keras optimizer.

TensorFlow Privacy's optimizers wrap legacy Keras optimizers, and its `DPKerasAdamOptimizer` is a
function, so that they are recognised by their attributes. Clip, noise multiplier and
hyperparameters go to this library's class of the same update rule. The original `apply_gradients`
is never called, since it accepts gradients without noise after one `minimize`.
"""

from __future__ import annotations

import inspect
from typing import Any

from tfp_dpvi import _validate as check
from tfp_dpvi._tf import LegacyOptimizer, Optimizer, keras, refuse_keras_3, tf
from tfp_dpvi.gradients import Clip
from tfp_dpvi.optimizers.dp_keras import DPOptimizer, make_dp_optimizer_class

_PRIVACY = ("l2_norm_clip", "noise_multiplier")
_KERAS_NAMES = ("SGD", "Adam", "Adagrad", "Adadelta", "Adamax", "Nadam", "RMSprop", "Ftrl")


def as_dp_optimizer(
    optimizer: Optimizer | str | dict[str, Any], **privacy: float | None
) -> Optimizer:
    """Returns a `DPOptimizer` with the update rule of any optimizer.

    Args:
      optimizer: An optimizer of this library, of TensorFlow Privacy, or of Keras: an object, a name
        or a configuration.
      **privacy: `l2_norm_clip`, which a plain Keras optimizer needs, and `noise_multiplier`, None
        for `compile` to calibrate it. Both are refused if the optimizer has its own.

    Raises:
      TypeError: The argument is not an optimizer.
      ValueError: There is no clip, there are two, or the optimizer has an option of TensorFlow
        Privacy that is not supported.

    ```python
    >>> optimizer = as_dp_optimizer("adam", l2_norm_clip=1.0)
    >>> type(optimizer).__name__, optimizer.l2_norm_clip, optimizer.noise_multiplier
    ('DPKerasAdamOptimizer', 1.0, None)

    ```
    """
    refuse_keras_3("optimizer", optimizer)
    if isinstance(optimizer, (str, dict)):
        try:
            optimizer = keras.optimizers.get(optimizer)
        except ValueError as error:
            raise ValueError(
                f"optimizer={check.shown(optimizer)} is no Keras optimizer: {error}"
            ) from error
    if isinstance(optimizer, DPOptimizer):
        _refuse_second(privacy, {name: getattr(optimizer, name) for name in _PRIVACY})
        return optimizer
    # TensorFlow Privacy's sparse optimizers have no query, but a noise multiplier.
    if hasattr(optimizer, "_dp_sum_query") or hasattr(optimizer, "_noise_multiplier"):
        if keras.__name__.startswith("tf_keras"):
            raise ValueError(
                f"optimizer={_describe(optimizer)} is TensorFlow Privacy's, which works on "
                f"TensorFlow 2.15 only (this is {tf.__version__}): use\n"
                "dpvi.optimizers.DPKerasAdamOptimizer(...), or install "
                "'tfp-dpvi[tensorflow-privacy]'."
            )
        return _from_tensorflow_privacy(optimizer, privacy)
    if not isinstance(optimizer, (Optimizer, LegacyOptimizer)):
        raise TypeError(
            "optimizer must be a DP-Keras optimizer, a Keras optimizer or its name, got "
            f"{check.shown(optimizer)}. For instance "
            "dpvi.optimizers.DPKerasAdamOptimizer(l2_norm_clip=1.0)."
        )
    if privacy.get("l2_norm_clip") is None:
        raise ValueError(
            f"optimizer={_describe(optimizer)} has no clip: pass compile(l2_norm_clip=...)."
        )
    return _rebuild(optimizer, privacy)


def _describe(optimizer: Optimizer) -> str:
    return f"{type(optimizer).__name__}(...)"


def _refuse_second(arguments: dict[str, float | None], own: dict[str, float | None]) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise ValueError(
                f"{name}={check.shown(value)} was passed to compile, but the optimizer has its own "
                f"({own[name]!r}): leave it out."
            )


def _from_tensorflow_privacy(optimizer: Optimizer, privacy: dict[str, float | None]) -> Optimizer:
    name = _describe(optimizer)
    query = getattr(optimizer, "_dp_sum_query", None)
    own_clip = getattr(query, "_l2_norm_clip", None)
    deviation = getattr(query, "_stddev", None)
    if own_clip is None or deviation is None:
        used = "no query (a sparse one)" if query is None else type(query).__name__
        raise ValueError(
            f"optimizer={name} uses {used}; only the plain Gaussian query is supported. Use "
            "dpvi.optimizers.DPKerasSGDOptimizer(...)."
        )
    own_clip, deviation = Clip(float(own_clip)).bound, float(deviation)
    if getattr(optimizer, "_num_microbatches", None) is not None:
        raise ValueError(
            f"optimizer={name} has num_microbatches={optimizer._num_microbatches}, which clips the "
            "mean gradient of several records. Here each record is clipped; leave num_microbatches "
            "out."
        )
    steps = getattr(optimizer, "gradient_accumulation_steps", 1)
    if steps != 1:
        raise ValueError(
            f"optimizer={name} has gradient_accumulation_steps={steps}, which adds noise in each "
            "partial step. Leave it out and use compile(physical_batch_size=...), with one noise "
            "draw per batch."
        )
    own: dict[str, float | None] = {
        "l2_norm_clip": own_clip,
        "noise_multiplier": deviation / own_clip,
    }
    _refuse_second(privacy, own)
    return _rebuild(optimizer, own)


def _rebuild(optimizer: Optimizer, privacy: dict[str, float | None]) -> Optimizer:
    """Returns a DP optimizer of the same update rule, over the Keras class that is not legacy."""
    keras_class = _keras_class(optimizer)
    variables = optimizer.variables() if callable(optimizer.variables) else optimizer.variables
    if len(variables) > (0 if isinstance(optimizer, LegacyOptimizer) else 2):
        raise ValueError(
            f"optimizer={_describe(optimizer)} has been used or restored and has slot variables: "
            "pass a new one with its settings."
        )
    config = optimizer.get_config()
    if config.get("decay"):
        raise ValueError(
            f"optimizer={_describe(optimizer)} has decay={config['decay']}, which Keras no longer "
            "supports. Pass a dpvi.keras.optimizers.schedules.LearningRateSchedule as "
            "learning_rate."
        )
    known = inspect.signature(keras_class).parameters
    taken = {*known, *inspect.signature(Optimizer).parameters} - {"name", "jit_compile"}
    settings = {key: value for key, value in config.items() if key in taken}
    rate = settings.get("learning_rate")
    if isinstance(rate, dict):
        settings["learning_rate"] = keras.optimizers.schedules.deserialize(rate)
    return make_dp_optimizer_class(keras_class)(**settings, **privacy)


def _keras_class(optimizer: Optimizer) -> type:
    if isinstance(optimizer, Optimizer) and not isinstance(optimizer, LegacyOptimizer):
        if type(optimizer).__name__.startswith("LossScaleOptimizer"):
            raise ValueError(
                "optimizer=LossScaleOptimizer(...) rescales losses and with them the clip. Pass "
                "the optimizer that it wraps."
            )
        return type(optimizer)
    for parent in type(optimizer).__mro__:
        if parent.__module__.startswith(("keras", "tf_keras")) and parent.__name__ in _KERAS_NAMES:
            return getattr(keras.optimizers, parent.__name__)
    raise ValueError(
        f"optimizer={_describe(optimizer)} is a legacy optimizer: use one of "
        f"{', '.join(_KERAS_NAMES)}."
    )
