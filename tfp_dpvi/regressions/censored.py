"""Outcomes that are known up to a limit: times until a study ends, concentrations from a limit on.

A record's outcome is the smaller of its time and its limit ("right"), or the larger of its value
and its limit ("left"). Its twin is made in the same way from a simulated time and the record's own
limit, so that record and twin have one distribution given what is known of the record beforehand.
For this every record needs a limit, also one whose event was seen.
"""

from __future__ import annotations

from tfp_dpvi._tf import tf, tfd, tfp

# Below it an incomplete gamma function of 32 bits is taken from its series.
_LEAST = 1e-30


class Censored(tfd.Distribution):
    """min(T, limit) of times T, or max(T, limit) of values that are seen from a limit on.

    ```python
    >>> from tfp_dpvi._tf import tfd
    >>> censored = Censored(tfd.Exponential(0.5), 2.0)
    >>> [round(float(value), 3) for value in censored.log_prob([1.0, 2.0])]
    [-1.193, -1.0]

    ```

    The density is that of T below the limit, and at the limit the probability of what lies beyond.

    Args:
      times: The distribution of T.
      limit: The limits, which broadcast to its batch shape.
      side: "right" for min(T, limit), "left" for max(T, limit).
    """

    def __init__(
        self, times: tfd.Distribution, limit: tf.Tensor | float, side: str = "right"
    ) -> None:
        self.times = times
        self.limit = tf.convert_to_tensor(limit, times.dtype)
        self.side = side
        super().__init__(
            dtype=times.dtype,
            reparameterization_type=tfd.NOT_REPARAMETERIZED,
            validate_args=False,
            allow_nan_stats=True,
            name="Censored",
        )

    def _batch_shape(self) -> tf.TensorShape:
        return self.times.batch_shape

    def _batch_shape_tensor(self) -> tf.Tensor:
        return self.times.batch_shape_tensor()

    def _event_shape(self) -> tf.TensorShape:
        return tf.TensorShape([])

    def _event_shape_tensor(self) -> tf.Tensor:
        return tf.constant([], tf.int32)

    def _sample_n(self, n: tf.Tensor, seed: tf.Tensor | None = None) -> tf.Tensor:
        meet = tf.minimum if self.side == "right" else tf.maximum
        return meet(self.times.sample(n, seed=seed), self.limit)

    def _log_prob(self, value: tf.Tensor) -> tf.Tensor:
        is_seen = value < self.limit if self.side == "right" else value > self.limit
        return tf.where(
            is_seen, self.times.log_prob(value), log_beyond(self.times, self.limit, self.side)
        )


def log_beyond(times: tfd.Distribution, limit: tf.Tensor, side: str) -> tf.Tensor:
    """Returns the log probability of a value beyond a limit.

    It is finite and has a gradient where probabilities themselves are zero in 32 bits.

    Args:
      times: The distribution of values.
      limit: The limits.
      side: "right" for values above, "left" for values below.
    """
    is_right = side == "right"
    if isinstance(times, tfd.Weibull):
        hazard = tf.pow(limit / times.scale, times.concentration)
        return -hazard if is_right else tfp.math.log1mexp(hazard)
    if isinstance(times, tfd.Exponential):
        hazard = limit * times.rate
        return -hazard if is_right else tfp.math.log1mexp(hazard)
    if isinstance(times, tfd.Gamma):
        rate = tf.exp(times.log_rate) if times.rate is None else times.rate
        return _log_gamma_beyond(times.concentration, limit * rate, is_right)
    return times.log_survival_function(limit) if is_right else times.log_cdf(limit)


def _log_gamma_beyond(shape: tf.Tensor, value: tf.Tensor, is_right: bool) -> tf.Tensor:
    """Returns the log of an incomplete gamma function, from its first terms where it vanishes."""
    function = tf.math.igammac if is_right else tf.math.igamma
    probability = function(shape, value)
    is_tiny = probability < _LEAST
    # Selected before the logarithm: the gradient of what is left out would be NaN.
    usual = tf.math.log(tf.where(is_tiny, tf.ones_like(probability), probability))
    if is_right:
        power, divisor = shape - 1.0, tf.math.lgamma(shape)
    else:
        power, divisor = shape, tf.math.lgamma(shape + 1.0)
    series = power * tf.math.log(value) - value - divisor
    return tf.where(is_tiny, series, usual)
