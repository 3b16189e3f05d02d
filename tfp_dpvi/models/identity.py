"""What a step depends on, beside plan, key and records: what must be the same for it to be the same step."""

from __future__ import annotations

import hashlib
import re
from typing import Any

from tfp_dpvi._keras import tf
from tfp_dpvi.models.records import Records


def step_settings(model: Any, records: Records) -> str:
    """A fingerprint of what a seeded step depends on, beside plan, seed, weights, learning rate and records.

    What functions compute (a likelihood, a layer) is not in it, nor is how many records there are, which may be secret.

    Args:
      model: a compiled `DPModel`.
      records: for the shapes and dtypes of one of them.
    """
    strategy, config = model.distribute_strategy, model.optimizer.get_config()
    if not isinstance(config.get("learning_rate"), dict):  # A number is restored; a schedule is not.
        config.pop("learning_rate", None)
    parts_of_record = tf.nest.flatten((records.x, records.y, records.sample_weight))
    parts = (
        type(model).__name__,
        model.step_identity,
        [(tuple(part.shape[1:]), str(part.dtype)) for part in parts_of_record if part is not None],
        [metric.identity for metric in model._dp.private_metrics],
        sorted((name, repr(value)) for name, value in config.items()),
        model._dp.settings.physical_batch_size,  # How many numbers are drawn at a time. (By default from N, which is secret.)
        # With XLA, on another device or in another version a key gives other draws.
        (
            model._dp.settings.jit_compile,
            bool(model.run_eagerly),
            type(strategy).__name__,
            strategy.num_replicas_in_sync,
        ),
        (sorted({device.device_type for device in tf.config.list_logical_devices()}), tf.__version__),
    )
    return hashlib.sha256(re.sub(r"0x[0-9a-f]+", "", repr(parts)).encode()).hexdigest()[:16]


def variables_of(model: Any) -> list[Any]:
    """All that a step reads and writes."""
    with model.distribute_strategy.scope():
        model.optimizer.build(model.trainable_variables)
    held = {variable.ref(): variable for variable in [*model.trainable_variables, *model.non_trainable_variables]}
    for metric in model.metrics:  # They may hold exact losses of records that were evaluated.
        for variable in metric.variables:
            held.pop(variable.ref(), None)
    return [*held.values(), *model.optimizer.variables]
