"""The one place that says which Keras 2 this is.

TensorFlow 2.15 ships Keras 2 as `tf.keras`. From 2.16 on `tf.keras` is Keras 3 and Keras 2 lives in the package
`tf_keras`, which TensorFlow Probability uses too.
"""

from __future__ import annotations

import importlib
from typing import Any

import tensorflow as tf
import tensorflow_probability as tfp

_version = tuple(int(part) for part in tf.__version__.split(".")[:2])
keras: Any = importlib.import_module("tf_keras") if _version >= (2, 16) else tf.keras

Callback = keras.callbacks.Callback
Layer = keras.layers.Layer
Metric = keras.metrics.Metric
Model = keras.Model
Optimizer = keras.optimizers.Optimizer
LegacyOptimizer = keras.optimizers.legacy.Optimizer
register_keras_serializable = keras.utils.register_keras_serializable

__all__ = [
    "Callback",
    "Layer",
    "LegacyOptimizer",
    "Metric",
    "Model",
    "Optimizer",
    "keras",
    "register_keras_serializable",
    "tf",
    "tfp",
]
