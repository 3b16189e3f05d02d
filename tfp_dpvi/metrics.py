"""Privatised training metrics: sums of bounded values, released with the gradient at a small cost.

In every step each sampled record adds a value clipped to a declared range. The sum and the gradient
are released as one mechanism. To add a metric, subclass `PrivateMetric` and override
`record_values`.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any

from tfp_dpvi import _validate as check
from tfp_dpvi._tf import Metric, register_keras_serializable, tf
from tfp_dpvi.gradients import JointRelease, PerExample, Released
from tfp_dpvi.privacy import Sensitivity

__all__ = ["EpsilonSpent", "PrivateClippedFraction", "PrivateELBO", "PrivateMetric"]

RELEASED = ("kappa", "curvature", "clipped_away", "curvature_signal")
"""The logs of what a paired or centred clip releases beside the gradient."""

_RESERVED = ("epsilon", "steps", "loss", *RELEASED)


class PrivateMetric(Metric, JointRelease):
    """Base class of the privatised training metrics. Override `record_values`.

    The result is the mean over an epoch's steps of
    `middle + (sum_i (clip(v_i, low, high) - middle) + noise) / (q N)`, where v_i is a sampled
    record's value. It is unbiased for the mean of clipped values. In an epoch of T steps the
    noise's standard error is about
    `noise_ratio * noise_multiplier * (high - low) / (2 * batch_size * sqrt(T))`.

    Args:
      low: The lower end of the range that values are clipped to. Choose the range without looking
        at the records.
      high: The upper end.
      noise_ratio: The metric's noise multiplier (noise over half the range) divided by the
        gradient's. At equal epsilon the metric raises the gradient's noise by the factor
        `sqrt(1 + 1 / noise_ratio**2)`: 0.5 % at 10.
      name: The name in logs, other than those of `fit`.

    Raises:
      TypeError, ValueError: A number is out of its range, or the name is reserved.

    #### Formal guarantee

    Adding or removing a record moves the centred sum by at most `(high - low) / 2`, replacing it by
    at most `high - low`. The plan accounts for this jointly with the gradient (`joint_release`). A
    record whose loss or gradient is NaN or Inf adds zero. A fit that finds `low`, `high` or
    `noise_ratio` changed since it started raises.

    ```python
    >>> class LargeLosses(PrivateMetric):
    ...     def record_values(self, statistics):
    ...         return tf.cast(statistics.losses > 10.0, tf.float32)
    >>> LargeLosses(0.0, 1.0, name="large_losses").sensitivity
    Sensitivity(add_or_remove=0.5, replace=1.0)

    ```
    """

    def __init__(self, low: float, high: float, *, noise_ratio: float = 10.0, name: str) -> None:
        super().__init__(name=name, dtype="float64")
        low = check.real("low", low, "pass a number")
        high = check.real("high", high, "pass a number")
        ratio = check.real("noise_ratio", noise_ratio, "pass a number")
        if not 1e-12 <= high - low <= 1e30:
            raise ValueError(
                f"low={check.shown(low)} must be below high={check.shown(high)}, by 1e-12 to 1e30: "
                "values are clipped to them."
            )
        if not 1e-3 <= ratio <= 1e6:
            raise ValueError(
                f"noise_ratio={check.shown(noise_ratio)} must lie between 0.001 and 1e6, for "
                "instance 10."
            )
        if name in _RESERVED or name.startswith(("val_", "unsafe_")):
            raise ValueError(f"name={name!r} is reserved in the logs of fit: choose another.")
        self.low = low
        self.high = high
        self.noise_ratio = ratio
        self._sum = 0.0
        self._steps = 0

    # Computed anew, since low and high may be assigned.
    @property
    def sensitivity(self) -> Sensitivity:  # type: ignore[override]
        """The sensitivity of the sum of values minus the middle of the range."""
        return Sensitivity((self.high - self.low) / 2, self.high - self.low)

    def sum_of(self, per_example: PerExample) -> tf.Tensor:
        """Returns the sum of clipped values over the records that are kept.

        The middle of the range is subtracted from each of them.

        #### Formal guarantee

        A record adds a number between minus and plus half the range, and exactly zero if it is not
        kept or its value is not finite.
        """
        values = tf.convert_to_tensor(self.record_values(per_example))
        if values.shape.rank != 1 or not values.shape.is_compatible_with(per_example.kept.shape):
            raise ValueError(
                f"record_values of {self.name!r} returned shape {values.shape}: return one value "
                "for each record, [n]."
            )
        # In float64 the rounding of a sum over many records stays far below one record's value.
        values = tf.cast(values, tf.float64)
        half = (self.high - self.low) / 2
        middle = (self.high + self.low) / 2
        centred = tf.clip_by_value(values - tf.constant(middle, tf.float64), -half, half)
        counted = per_example.kept & tf.math.is_finite(values)
        centred = tf.where(counted, centred, tf.zeros_like(centred))
        # This is a product with ones: a sum of a few hundred takes many times as long under XLA on
        # CPUs.
        return tf.linalg.matmul(centred[None], tf.ones_like(centred)[:, None])[0, 0]

    def record_values(self, statistics: PerExample) -> tf.Tensor:
        """Returns one value for each record of a physical batch, before clipping. Override this.

        Value i must depend on record i alone, without side effects (no `assign`, no printing).

        Args:
          statistics: The losses and norms of the n records.

        Returns:
          A float tensor of shape [n].
        """
        raise NotImplementedError(f"{type(self).__name__} has no record_values: override it.")

    def initial(self) -> tf.Tensor:
        """See `JointRelease`."""
        return tf.zeros([], tf.float64)

    def accumulate(self, total: tf.Tensor, released: Released) -> tf.Tensor:
        """See `JointRelease`. Returns the sum of `shown` over the steps so far."""
        middle = tf.constant((self.high + self.low) / 2, released.mean.dtype)
        shown = self.shown(released.mean + middle, released.data_independent_loss)
        return total + tf.cast(shown, tf.float64)

    def shown(self, mean: tf.Tensor, data_independent_loss: tf.Tensor) -> tf.Tensor:
        """Post-processes released values for display.

        Args:
          mean: A step's privatised mean of clipped values, a scalar.
          data_independent_loss: The step's loss terms that depend on no record, a scalar.

        Returns:
          A scalar; by default the mean.
        """
        return mean

    # The Keras metric: the training loop adds released values, and the host averages over an epoch.

    def add(self, value: float, steps: int) -> None:
        """Adds released values of some steps to the epoch's mean.

        Args:
          value: The mean of `shown` over these steps.
          steps: The number of steps.
        """
        self._sum += float(value) * steps
        self._steps += steps

    def update_state(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing: the training loop calls `add`.

        Args:
          *args: Not used.
          **kwargs: Not used.
        """

    def current(self) -> float:
        """Returns the epoch's mean so far; NaN before the first step."""
        return self._sum / self._steps if self._steps else math.nan

    # Keras would convert the method at every call, which takes a millisecond.
    @tf.autograph.experimental.do_not_convert
    def result(self) -> tf.Tensor:
        """Returns `current` as a float64 scalar."""
        return tf.constant(self.current(), tf.float64)

    def reset_state(self) -> None:
        """Starts a new epoch's mean."""
        self._sum = 0.0
        self._steps = 0

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        return {
            "name": self.name,
            "low": self.low,
            "high": self.high,
            "noise_ratio": self.noise_ratio,
        }

    @property
    def identity(self) -> Hashable:
        """The values that a traced step depends on."""
        return (type(self), self.name, self.low, self.high, self.noise_ratio)


@register_keras_serializable("tfp_dpvi", "PrivateELBO")
class PrivateELBO(PrivateMetric):
    """Privatised evidence lower bound per record, for early stopping and learning rate schedules.

    * For `DPVI` it is `mean_i clip(log p(record_i | params), low, high) - KL(q || prior) / N`, with
      the step's draw of the parameters, weights included.
    * For `DPVAE` it is `mean_i clip(ELBO_i, low, high)`.
    * For any `DPModel` it is minus its loss, clipped likewise.

    Guarantee and errors are those of `PrivateMetric`.

    Args:
      low: The lower end of the range in nats, chosen without looking at the records.
      high: The upper end in nats. Log-probabilities of discrete records are at most 0.
      noise_ratio: As for `PrivateMetric`.
      name: The name in logs.

    ```python
    >>> PrivateELBO(low=-5.0, high=0.0).sensitivity
    Sensitivity(add_or_remove=2.5, replace=5.0)

    ```
    """

    def __init__(
        self, low: float, high: float, *, noise_ratio: float = 10.0, name: str = "private_elbo"
    ) -> None:
        super().__init__(low, high, noise_ratio=noise_ratio, name=name)

    def record_values(self, statistics: PerExample) -> tf.Tensor:
        """See `PrivateMetric`. Returns minus the losses."""
        return -statistics.losses

    def shown(self, mean: tf.Tensor, data_independent_loss: tf.Tensor) -> tf.Tensor:
        """See `PrivateMetric`. Returns the mean minus the data-independent loss.

        This is a function of released values.
        """
        return mean - data_independent_loss


@register_keras_serializable("tfp_dpvi", "PrivateClippedFraction")
class PrivateClippedFraction(PrivateMetric):
    """Privatised fraction of records whose gradient norm exceeds `l2_norm_clip`.

    If it is near 0, a smaller clip would add less noise. Guarantee and errors are those of
    `PrivateMetric`.

    Args:
      noise_ratio: As for `PrivateMetric`.
      name: The name in logs.

    ```python
    >>> PrivateClippedFraction().sensitivity
    Sensitivity(add_or_remove=0.5, replace=1.0)

    ```
    """

    def __init__(
        self, *, noise_ratio: float = 10.0, name: str = "private_clipped_fraction"
    ) -> None:
        super().__init__(0.0, 1.0, noise_ratio=noise_ratio, name=name)

    def record_values(self, statistics: PerExample) -> tf.Tensor:
        """See `PrivateMetric`. Returns 1 for clipped records, else 0."""
        return tf.cast(statistics.clipped, statistics.losses.dtype)

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        return {"name": self.name, "noise_ratio": self.noise_ratio}


class EpsilonSpent(Metric):
    """Epsilon spent so far, as a metric: progress bars then show its value instead of a mean.

    Args:
      name: The name in logs.
      dtype: The dtype of the Keras metric.

    Attributes:
      value: Epsilon, which the train function sets.

    ```python
    >>> metric = EpsilonSpent()
    >>> metric.value = 0.5
    >>> float(metric.result())
    0.5

    ```
    """

    def __init__(self, name: str = "epsilon", dtype: str = "float64") -> None:
        super().__init__(name=name, dtype=dtype)
        self.value = 0.0

    def update_state(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing: the train function sets the value.

        Args:
          *args: Not used.
          **kwargs: Not used.
        """

    # Keras would convert the method at every call, which takes a millisecond.
    @tf.autograph.experimental.do_not_convert
    def result(self) -> tf.Tensor:
        """Returns the value, as a float64 scalar."""
        return tf.constant(self.value, tf.float64)

    def reset_state(self) -> None:
        """Does nothing: spent privacy stays spent."""


def check_metrics(metrics: check.Unchecked) -> tuple[JointRelease, ...]:
    """Returns the argument `metrics` of `compile` as a tuple.

    Raises:
      ValueError: A metric is exact, or names repeat.
    """
    if metrics is None:
        metrics = ()
    checked: list[JointRelease] = []
    for metric in metrics if isinstance(metrics, list | tuple) else (metrics,):
        if not isinstance(metric, JointRelease):
            raise ValueError(
                f"metrics={check.shown(metric)}: Keras metrics on training data would be exact, "
                "unpriced releases. Use validation_metrics=[...], or privatised ones, "
                "metrics=[dpvi.metrics.PrivateELBO(low=..., high=...)]."
            )
        checked.append(metric)
    names = [metric.name for metric in checked]
    if len(set(names)) < len(names):
        raise ValueError(f"metrics have the names {names}: pass a unique name= to each.")
    return tuple(checked)
