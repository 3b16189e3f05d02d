"""Training metrics that cost privacy, and little of it: sums of bounded values, released with the gradient.

In every step each sampled record adds a value clipped to a declared range; the sum is released with the gradient, and the
two are priced as one. To add a metric, subclass `PrivateMetric` and override `record_values`.
"""

from __future__ import annotations

import math
from typing import Any

from tfp_dpvi import _validate as check
from tfp_dpvi._tf import Metric, register_keras_serializable, tf
from tfp_dpvi.gradients import JointRelease, PerExample, Released
from tfp_dpvi.privacy import Sensitivity

_RESERVED = ("epsilon", "steps", "loss", "kappa", "curvature", "clipped_away", "curvature_signal")


class PrivateMetric(Metric, JointRelease):
    """Base of the privatised training metrics. Override `record_values`.

    Shows the mean over an epoch's steps of `middle + (sum_i (clip(v_i, low, high) - middle) + noise) / (q N)`, v_i being a
    sampled record's value: unbiased for the mean of clipped values, with a standard error from noise of about
    `noise_ratio * noise_multiplier * (high - low) / (2 * batch_size * sqrt(steps in an epoch))`.

    Args:
      low: lower end of the range that values are clipped to. Choose it without looking at the records.
      high: upper end.
      noise_ratio: the metric's noise multiplier (noise over half the range) divided by the gradient's. At equal epsilon the
        gradient's noise grows by the factor `sqrt(1 + 1 / noise_ratio**2)` for it: 0.5 % at 10.
      name: in the progress bar, `History` and TensorBoard.

    Raises:
      ValueError: an empty or infinite range, a ratio that is not positive, or a name that is taken.

    #### Formal guarantee

    A record's presence moves the centred sum by at most `(high - low) / 2`, its replacement by `high - low`: with the
    gradient's, that is the sensitivity that the plan is priced for (`joint_release`). A record whose loss or gradient is
    NaN or Inf adds zero. `low`, `high` and `noise_ratio` are priced when a fit begins, which ends if they are changed.
    """

    noise_ratio = 10.0

    def __init__(self, low: float, high: float, *, noise_ratio: float = 10.0, name: str) -> None:
        super().__init__(name=name, dtype="float64")
        for argument, value in (("low", low), ("high", high), ("noise_ratio", noise_ratio)):
            check.real(argument, value, "pass a finite number")
        if not 1e-12 <= high - low <= 1e30:
            raise ValueError(
                f"low={low!r} must be below high={high!r}, by 1e-12 to 1e30: values are clipped to this range."
            )
        if not 1e-3 <= noise_ratio <= 1e6:
            raise ValueError(
                f"noise_ratio must lie between 0.001 and 1e6, got {noise_ratio!r}: the metric's noise multiplier over the "
                "gradient's. 10 costs 0.5 % more noise in the gradient."
            )
        if name in _RESERVED or name.startswith(("val_", "unsafe_")):
            raise ValueError(f"name={name!r} has a meaning of its own in the logs of fit: choose another.")
        self.low, self.high, self.noise_ratio = float(low), float(high), float(noise_ratio)
        self._sum, self._steps = 0.0, 0  # Of this epoch.

    @property
    def sensitivity(self) -> Sensitivity:
        """Of the sum of values minus the middle of the range."""
        return Sensitivity((self.high - self.low) / 2, self.high - self.low)

    def sum_of(self, per_example: PerExample) -> tf.Tensor:
        """Returns the sum of clipped values over the records that are kept, each minus the middle of the range.

        Raises:
          ValueError: `record_values` does not give one value for each record, or writes to a variable.

        #### Formal guarantee

        A record adds a number between minus and plus half the range, exactly zero if it is masked, bad or of a value that
        is not finite.
        """
        values = tf.convert_to_tensor(self.record_values(per_example))
        if values.shape.rank != 1 or not values.shape.is_compatible_with(per_example.kept.shape):
            raise ValueError(
                f"record_values of {self.name!r} returned shape {values.shape} for records of shape {per_example.kept.shape}: it "
                "must give one value for each record, a tensor of shape [n]."
            )
        # In float64: the sum may be of many records, and its rounding must not reach what one of them adds.
        values = tf.cast(values, tf.float64)
        half, middle = ((self.high + sign * self.low) / 2 for sign in (-1, 1))
        centred = tf.clip_by_value(values - tf.constant(middle, tf.float64), -half, half)
        centred = tf.where(per_example.kept & tf.math.is_finite(values), centred, tf.zeros_like(centred))
        # A product with ones: under XLA on CPUs a sum of a few hundred takes many times as long.
        return tf.linalg.matmul(centred[None], tf.ones_like(centred)[:, None])[0, 0]

    def record_values(self, statistics: PerExample) -> tf.Tensor:
        """One value for each record of a physical batch, before clipping: float tensor of shape [n]. Override this.

        Value i must depend on record i alone, and nothing may be written anywhere (no `assign`, no printing).
        """
        raise NotImplementedError(f"{type(self).__name__} does not say what it shows: override record_values.")

    def initial(self) -> tf.Tensor:
        """See `JointRelease`."""
        return tf.zeros([], tf.float64)

    def accumulate(self, total: tf.Tensor, released: Released) -> tf.Tensor:
        """Returns the sum over the steps so far of what is shown."""
        middle = tf.constant((self.high + self.low) / 2, released.mean.dtype)
        return total + tf.cast(self.shown(released.mean + middle, released.data_independent_loss), tf.float64)

    def shown(self, mean: tf.Tensor, data_independent_loss: tf.Tensor) -> tf.Tensor:
        """Returns what is shown of a privatised mean: post-processing, by default the mean itself.

        Args:
          mean: scalar, the privatised mean of clipped values.
          data_independent_loss: scalar, the step's loss terms that touch no record (a prior's or a KL's, over N).
        """
        del data_independent_loss
        return mean

    # As a Keras metric: the training loop adds what it released, and the host takes the mean over an epoch.

    def add(self, value: float, steps: int) -> None:
        """Takes a released mean over some steps into the epoch's."""
        self._sum += float(value) * steps
        self._steps += steps

    def update_state(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: `add` is called by the training loop."""

    def current(self) -> float:
        """The epoch's mean so far, a number known on the host; NaN before the first step."""
        return self._sum / self._steps if self._steps else math.nan

    @tf.autograph.experimental.do_not_convert  # Keras would convert it at every call, for a millisecond.
    def result(self) -> tf.Tensor:
        """`current` as a float64 scalar."""
        return tf.constant(self.current(), tf.float64)

    def reset_state(self) -> None:
        """Forgets the epoch."""
        self._sum, self._steps = 0.0, 0

    def get_config(self) -> dict[str, Any]:
        """The arguments."""
        return {"name": self.name, "low": self.low, "high": self.high, "noise_ratio": self.noise_ratio}

    @property
    def identity(self) -> tuple[tf.Tensor, ...]:
        """What a traced step holds of it."""
        return (type(self), self.name, self.low, self.high, self.noise_ratio)


@register_keras_serializable("tfp_dpvi", "PrivateELBO")
class PrivateELBO(PrivateMetric):
    """Privatised evidence lower bound per record: early stopping and learning rate schedules may look at it.

    Of `DPVI`: `mean_i clip(log p(record_i | params), low, high) - KL(q || prior) / N`, with the step's draw of the parameters,
    weights included. Of `DPVAE`: `mean_i clip(ELBO_i, low, high)`. Of any `DPModel`: minus its loss, clipped likewise.

    Args:
      low: least log-likelihood (or ELBO) of a record that is told apart from lower ones, in nats.
      high: greatest; for discrete records log-probabilities are at most 0.
      noise_ratio: see `PrivateMetric`.
      name: see `PrivateMetric`.
    """

    def __init__(self, low: float, high: float, *, noise_ratio: float = 10.0, name: str = "private_elbo") -> None:
        super().__init__(low, high, noise_ratio=noise_ratio, name=name)

    def record_values(self, statistics: PerExample) -> tf.Tensor:
        """Minus the losses."""
        return -statistics.losses

    def shown(self, mean: tf.Tensor, data_independent_loss: tf.Tensor) -> tf.Tensor:
        """Minus the exact part of the loss, which is a function of released values."""
        return mean - data_independent_loss


@register_keras_serializable("tfp_dpvi", "PrivateClippedFraction")
class PrivateClippedFraction(PrivateMetric):
    """Privatised share of records whose gradient is longer than `l2_norm_clip`: near 0 the clip adds noise for nothing.

    Args:
      noise_ratio: see `PrivateMetric`; the range is [0, 1].
      name: see `PrivateMetric`.
    """

    def __init__(self, *, noise_ratio: float = 10.0, name: str = "private_clipped_fraction") -> None:
        super().__init__(0.0, 1.0, noise_ratio=noise_ratio, name=name)

    def record_values(self, statistics: PerExample) -> tf.Tensor:
        """1 where clipped, else 0."""
        return tf.cast(statistics.clipped, statistics.losses.dtype)

    def get_config(self) -> dict[str, Any]:
        """The arguments."""
        return {"name": self.name, "noise_ratio": self.noise_ratio}


class EpsilonSpent(Metric):
    """Epsilon spent so far, known on the host: as a metric, so that progress bars show its value and not a mean."""

    def __init__(self, name: str = "epsilon", dtype: str = "float64") -> None:
        super().__init__(name=name, dtype=dtype)
        self.value = 0.0

    def update_state(self, *args: object, **kwargs: object) -> None:
        """Does nothing: the train function sets the value."""

    @tf.autograph.experimental.do_not_convert  # Keras would convert it at every call, for a millisecond.
    def result(self) -> tf.Tensor:
        """Returns the value, as a float64 scalar."""
        return tf.constant(self.value, tf.float64)

    def reset_state(self) -> None:
        """Does nothing: what is spent stays spent."""


def check_metrics(metrics: Any) -> tuple[JointRelease, ...]:
    """Returns the argument `metrics` of `compile` as a tuple.

    Raises:
      ValueError: something that is no `PrivateMetric` or other `JointRelease`, or two of one name.
    """
    given = [] if metrics is None else list(metrics) if isinstance(metrics, (list, tuple)) else [metrics]
    for metric in given:
        if not isinstance(metric, JointRelease):
            raise ValueError(
                f"metrics={metrics!r}: Keras metrics on training data would be exact, unpriced releases. Use "
                "validation_metrics=[...], or privatised ones, metrics=[dpvi.metrics.PrivateELBO(low=..., high=...)]."
            )
    names = [metric.name for metric in given]
    if len(set(names)) < len(names):
        raise ValueError(f"metrics have the names {names}: give each one of its own with name=.")
    return tuple(given)
