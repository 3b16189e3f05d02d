"""A weight in a loss that may change while a fit runs."""

from __future__ import annotations

from typing import Any, TypeAlias

from tfp_dpvi import _validate as check
from tfp_dpvi._tf import keras, tf

Weight: TypeAlias = float | tf.Variable | keras.optimizers.schedules.LearningRateSchedule


def _is_schedule(value: Any) -> bool:
    return isinstance(value, keras.optimizers.schedules.LearningRateSchedule)


class LiveWeight:
    """A weight that traced steps read whenever they run, as they do a learning rate.

    It is not tracked by Keras: a variable of it is neither learned nor saved as a weight.

    Args:
      name: The name of the argument, for messages.
      value: A number of at least 0; a scalar variable; or a Keras schedule of the number of steps,
        itself or as `keras.optimizers.schedules.serialize` returns it.

    ```python
    >>> weight = LiveWeight("beta", 0.0)
    >>> weight.takes(0.5)
    True
    >>> weight.assign(0.5)
    >>> weight.value(step=0)
    0.5
    >>> warmup = keras.optimizers.schedules.PolynomialDecay(0.0, 10, end_learning_rate=1.0)
    >>> LiveWeight("beta", warmup).value(step=5)
    0.5

    ```

    Raises:
      TypeError, ValueError: The value is none of these.
    """

    def __init__(self, name: str, value: Any) -> None:
        self._name = name
        if isinstance(value, dict):
            value = keras.optimizers.schedules.deserialize(value)
        self._source: Any = value
        if _is_schedule(value):
            return
        if not isinstance(value, tf.Variable):
            number = check.non_negative(name, value, "pass a number, a variable or a schedule")
            self._source = tf.Variable(number, trainable=False, dtype=tf.float64, name=name)
        elif value.shape.rank != 0 or not value.dtype.is_floating:
            raise ValueError(
                f"{name} is a variable of shape {value.shape} and dtype {value.dtype.name}: pass a "
                "float scalar."
            )

    @property
    def variables(self) -> list[tf.Variable]:
        """The variable that holds the weight; none of a schedule."""
        return [] if _is_schedule(self._source) else [self._source]

    def takes(self, value: object) -> bool:
        """Returns whether a value can be assigned to this weight: a number, except to a schedule.

        Args:
          value: Any value.
        """
        return isinstance(value, int | float) and not _is_schedule(self._source)

    def assign(self, value: float) -> None:
        """Sets the weight.

        Args:
          value: A number of at least 0.
        """
        self._source.assign(check.non_negative(self._name, value))

    def tensor(self, step: Any) -> tf.Tensor:
        """Returns the weight as a tensor, read when the graph runs.

        Args:
          step: The number of steps so far, for a schedule.
        """
        if _is_schedule(self._source):
            return self._source(step)
        return tf.convert_to_tensor(self._source)

    def value(self, step: Any) -> float:
        """Returns the weight now, to six digits for a schedule.

        Args:
          step: The number of steps so far, for a schedule.
        """
        value = float(self.tensor(step))
        return round(value, 6) if _is_schedule(self._source) else value

    def config(self) -> Any:
        """Returns the weight, JSON-ready: a number, or a schedule's configuration."""
        if _is_schedule(self._source):
            return keras.optimizers.schedules.serialize(self._source)
        return float(self._source)
