"""The privacy arguments of `compile`, checked before anything runs."""

from __future__ import annotations

import dataclasses
from typing import Any

import dp_accounting

from tfp_dpvi._tf import Metric, keras, refuse_keras_3
from tfp_dpvi.privacy import FullBatch, PrivacyPlan


@dataclasses.dataclass(frozen=True)
class PrivacySettings:
    """What `compile` fixed.

    Attributes:
      epsilon: lifetime total for these data, or None with a noise multiplier.
      delta: of every epsilon shown, or None if none was given (then none is shown while training).
      noise_multiplier: noise standard deviation over the clip, or None with an epsilon.
      planned_epochs: epochs that the budget is to last for, or None for those of the next fit.
      accountant: "pld" or "rdp".
      neighboring_relation: what neighbouring data sets are.
      physical_batch_size: records held in memory at a time, or None for the sampler's choice.
      jit_compile: compile the step with XLA; None to try it and go without where an operation has no XLA form.
      unsafe_training_metrics: show exact training losses.
    """

    epsilon: float | None
    delta: float | None
    noise_multiplier: float | None
    planned_epochs: int | None
    accountant: str
    neighboring_relation: dp_accounting.NeighboringRelation
    physical_batch_size: int | None
    jit_compile: bool | None
    unsafe_training_metrics: bool


def check_target(epsilon: Any, delta: Any, noise_multiplier: Any) -> None:
    """Raises `ValueError` unless exactly one of epsilon and noise is given, and epsilon with a delta."""
    if epsilon is None and noise_multiplier is None:
        raise ValueError(
            "Neither epsilon nor noise_multiplier is given: say compile(epsilon=1.0, delta=1e-5) to have the noise "
            "calibrated, or give the optimizer a noise_multiplier."
        )
    if epsilon is not None and noise_multiplier is not None:
        raise ValueError(
            f"Both epsilon={epsilon!r} and noise_multiplier={noise_multiplier!r} are given, and each determines the "
            "other: leave out epsilon to set the noise by hand, or noise_multiplier to have it calibrated."
        )
    if epsilon is not None and (isinstance(epsilon, bool) or not _is_number(epsilon) or not 0 < epsilon < float("inf")):
        raise ValueError(f"epsilon must be a positive finite number, got {epsilon!r}; 1.0 is a common choice.")
    if delta is not None and (isinstance(delta, bool) or not _is_number(delta) or not 0 < delta < 1):
        raise ValueError(
            f"delta must lie strictly between 0 and 1, got {delta!r}; take it well below 1 / number of records, "
            "for instance 1e-5."
        )
    if epsilon is not None and delta is None:
        raise ValueError(f"epsilon={epsilon!r} needs a delta as well, for instance compile(epsilon=1.0, delta=1e-5).")


def check_metrics(metrics: Any) -> list[Any]:
    """Keras metric objects from objects, functions and names; `ValueError` for a name that is ambiguous."""
    objects = []
    refuse_keras_3("validation_metrics", list(metrics or ()))
    for metric in metrics or ():
        if metric in ("accuracy", "acc"):
            raise ValueError(
                f"validation_metrics={metric!r} depends on what predict returns: say binary_accuracy for the mean of 0/1 "
                "outcomes, or sparse_categorical_accuracy for class probabilities."
            )
        found = keras.metrics.get(metric)
        if not isinstance(found, Metric):
            found = keras.metrics.MeanMetricWrapper(found, name=getattr(found, "__name__", "metric"))
        objects.append(found)
    return objects


def check_count(name: str, value: Any, *, default_hint: str = "") -> None:
    """Raises `ValueError` unless the value is None or an integer >= 1."""
    if value is None:
        return
    if isinstance(value, bool) or not hasattr(value, "__index__") or int(value) < 1:
        raise ValueError(f"{name} must be an integer >= 1, got {value!r}.{default_hint}")


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return not isinstance(value, str)


def check_adjacency(relation: Any, accountant: str) -> None:
    """Raises where the relation or the accountant is unknown to the privacy room."""
    PrivacyPlan(
        sampling=FullBatch(),
        noise_multiplier=1.0,
        num_releases=1,
        neighboring_relation=relation,
        accountant=accountant,
    )
