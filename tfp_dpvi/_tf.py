"""The one place that says which Keras 2 is in force, and whether this environment can run the library.

TensorFlow 2.15 ships Keras 2 as `tf.keras`. Later versions have Keras 3 there, and Keras 2 is the package `tf_keras`, which
TensorFlow Probability uses too. `TF_USE_LEGACY_KERAS` is never set here: it would change other code of the same process.
"""

from __future__ import annotations

import importlib
from typing import Any

import tensorflow as tf
from numpy import __version__ as _numpy_version


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def _check_versions(tensorflow: str, numpy: str) -> None:
    """Raises `ImportError` for versions that are known not to work together."""
    if _number(tensorflow) < (2, 15) or _number(tensorflow) in ((2, 16), (2, 17)):
        raise ImportError(
            f"tfp_dpvi does not run on TensorFlow {tensorflow}: TensorFlow Probability 0.25 needs 2.18 or later, and 0.22 needs "
            "2.15.\nInstall a supported one: pip install 'tensorflow>=2.18,<2.22'."
        )
    if _number(numpy) >= (2, 4):
        raise ImportError(
            f"tfp_dpvi does not run on NumPy {numpy}: TensorFlow Probability 0.25 uses what NumPy 2.4 removed.\n"
            "Install an earlier one: pip install 'numpy<2.4'."
        )


def _keras_2(tensorflow: str) -> Any:
    """The module of Keras 2 that TensorFlow Probability uses."""
    if _number(tensorflow) < (2, 16):
        return tf.keras
    try:
        return importlib.import_module("tf_keras")
    except ImportError as error:
        minor = ".".join(tensorflow.split(".")[:2])
        raise ImportError(
            f"tfp_dpvi needs Keras 2, which TensorFlow {tensorflow} no longer has, from the package tf_keras ({error}).\n"
            f"Install it: pip install 'tf_keras=={minor}.*'."
        ) from error


_check_versions(tf.__version__, _numpy_version)
keras: Any = _keras_2(tf.__version__)

import tensorflow_probability as tfp  # noqa: E402  (after the checks: its own errors would come first)

Callback = keras.callbacks.Callback
Layer = keras.layers.Layer
Metric = keras.metrics.Metric
Model = keras.Model
Optimizer = keras.optimizers.Optimizer
LegacyOptimizer = keras.optimizers.legacy.Optimizer
register_keras_serializable = keras.utils.register_keras_serializable


def refuse_keras_3(name: str, value: Any) -> None:
    """Raises `TypeError` if `value`, or an entry of a list or dictionary, is a layer, model or other object of Keras 3.

    Args:
      name: the argument, for the message.
      value: anything.
    """
    if not Layer.__module__.startswith("tf_keras."):
        return  # Keras 2 is the package `keras` here.
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
    for part in parts:
        if any(kind.__module__.startswith("keras.") for kind in type(part).__mro__):
            raise TypeError(
                f"{name}={type(part).__name__}(...) is an object of Keras 3, which TensorFlow Probability cannot use. Build it "
                "from dpvi.keras\n(Keras 2), or set the environment variable TF_USE_LEGACY_KERAS=1 before TensorFlow is imported."
            )


__all__ = [
    "Callback",
    "Layer",
    "LegacyOptimizer",
    "Metric",
    "Model",
    "Optimizer",
    "keras",
    "refuse_keras_3",
    "register_keras_serializable",
    "tf",
    "tfp",
]
