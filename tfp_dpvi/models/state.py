"""What a private model remembers: its books, its compile settings, its place in the sequence of steps."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

from tfp_dpvi._tf import Metric, keras, tf
from tfp_dpvi.models.settings import PrivacySettings
from tfp_dpvi.privacy import PrivacyLedger, PrivacyPlan


def variables_of(model: Any) -> list[Any]:
    """Returns all variables that a step reads and writes."""
    with model.distribute_strategy.scope():
        model.optimizer.build(model.trainable_variables)
    held = {variable.ref(): variable for variable in [*model.trainable_variables, *model.non_trainable_variables]}
    for metric in model.metrics:  # They may hold exact losses of records that were evaluated.
        for variable in metric.variables:
            held.pop(variable.ref(), None)
    return [*held.values(), *model.optimizer.variables]


class EpsilonSpent(Metric):
    """Epsilon spent so far, known on the host: as a metric, so that progress bars show its value and not a mean."""

    def __init__(self) -> None:
        super().__init__(name="epsilon", dtype="float64")
        self.value = 0.0

    def update_state(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the value is set by the training loop."""

    @tf.autograph.experimental.do_not_convert  # Keras would convert it at every call, for a millisecond.
    def result(self) -> Any:
        """The value, as a float64 scalar."""
        return tf.constant(self.value, tf.float64)

    def reset_state(self) -> None:
        """Nothing: what is spent stays spent."""


class State:
    """What a model remembers about privacy. A plain object, so that no checkpoint holds a key or a ledger."""

    def __init__(self, seed: int | None) -> None:
        self.seed = seed
        self.ledger = PrivacyLedger()
        self.identity = uuid.uuid4().hex
        self.fits = 0
        self.settings: PrivacySettings | None = None
        self.plan: PrivacyPlan | None = None
        self.steps_run = 0
        self.epochs_run = 0.0
        self.inputs: dict[str, Any] | None = None  # Shapes and dtypes of the records of the last fit.
        self.num_records: int | None = None
        self.num_records_declared = False
        self.validation_metrics: list[Any] = []
        self.private_metrics: tuple[Any, ...] = ()
        self.unsafe_validation = False
        self.epsilon_metric = EpsilonSpent()
        self.loss_metric = keras.metrics.Mean(name="loss")
        self.auto_steps_per_execution = True
        self.loops: dict[Any, Callable[..., Any] | None] = {}
        self.trained: tuple[int, ...] | None = None
        self.train_function: Callable[..., Any] | None = None
