"""Counts with zeros of their own."""

from __future__ import annotations

from tfp_dpvi._tf import tf, tfd, tfp


class ZeroInflated(tfd.Distribution):
    """Counts that are 0 with a probability whatever else, and else those of a distribution.

    ```python
    >>> from tfp_dpvi._tf import tfd
    >>> inflated = ZeroInflated(tfd.Poisson(2.0), 0.5)
    >>> round(float(inflated.prob(0.0)), 3), float(inflated.mean())
    (0.568, 1.0)

    ```

    Args:
      counts: The distribution of counts.
      zero: The probability of zeros by inflation, which broadcasts with it.
    """

    def __init__(self, counts: tfd.Distribution, zero: tf.Tensor | float) -> None:
        self.counts = counts
        self.zero = tf.convert_to_tensor(zero, counts.dtype)
        super().__init__(
            dtype=counts.dtype,
            reparameterization_type=tfd.NOT_REPARAMETERIZED,
            validate_args=False,
            allow_nan_stats=True,
            name="ZeroInflated",
        )

    def _batch_shape(self) -> tf.TensorShape:
        return tf.broadcast_static_shape(self.counts.batch_shape, self.zero.shape)

    def _batch_shape_tensor(self) -> tf.Tensor:
        return tf.broadcast_dynamic_shape(self.counts.batch_shape_tensor(), tf.shape(self.zero))

    def _event_shape(self) -> tf.TensorShape:
        return tf.TensorShape([])

    def _event_shape_tensor(self) -> tf.Tensor:
        return tf.constant([], tf.int32)

    def _log_prob(self, value: tf.Tensor) -> tf.Tensor:
        counted = tf.math.log1p(-self.zero) + self.counts.log_prob(value)
        inflated = tf.math.log(self.zero) + tf.zeros_like(counted)
        either = tf.reduce_logsumexp(tf.stack([inflated, counted]), axis=0)
        return tf.where(tf.equal(value, 0.0), either, counted)

    def _sample_n(self, n: tf.Tensor, seed: tf.Tensor | None = None) -> tf.Tensor:
        for_counts, for_zeros = tfp.random.split_seed(seed)
        counts = self.counts.sample(n, seed=for_counts)
        shape = tf.concat([[n], self._batch_shape_tensor()], axis=0)
        uniform = tf.random.stateless_uniform(shape, for_zeros, dtype=self.dtype)
        return tf.where(uniform < self.zero, tf.zeros([], self.dtype), counts)

    def _mean(self) -> tf.Tensor:
        return (1.0 - self.zero) * self.counts.mean()


class Hurdle(tfd.Distribution):
    """Counts that are 0 with a probability, and else a Poisson's given that it is not 0.

    ```python
    >>> hurdle = Hurdle(2.0, 0.5)
    >>> float(hurdle.prob(0.0)), round(float(hurdle.mean()), 3)
    (0.5, 1.157)

    ```

    Args:
      rate: The rate of the Poisson distribution.
      zero: The probability of 0, which broadcasts with it.
    """

    def __init__(self, rate: tf.Tensor | float, zero: tf.Tensor | float) -> None:
        self.rate = tf.convert_to_tensor(rate)
        self.zero = tf.convert_to_tensor(zero, self.rate.dtype)
        super().__init__(
            dtype=self.rate.dtype,
            reparameterization_type=tfd.NOT_REPARAMETERIZED,
            validate_args=False,
            allow_nan_stats=True,
            name="Hurdle",
        )

    def _batch_shape(self) -> tf.TensorShape:
        return tf.broadcast_static_shape(self.rate.shape, self.zero.shape)

    def _batch_shape_tensor(self) -> tf.Tensor:
        return tf.broadcast_dynamic_shape(tf.shape(self.rate), tf.shape(self.zero))

    def _event_shape(self) -> tf.TensorShape:
        return tf.TensorShape([])

    def _event_shape_tensor(self) -> tf.Tensor:
        return tf.constant([], tf.int32)

    def _any(self) -> tf.Tensor:
        """Returns the Poisson's probability of a count above 0, without cancellation."""
        return -tf.math.expm1(-self.rate)

    def _log_prob(self, value: tf.Tensor) -> tf.Tensor:
        poisson = tfd.Poisson(self.rate).log_prob(tf.maximum(value, 1.0))
        above = tf.math.log1p(-self.zero) + poisson - tf.math.log(self._any())
        return tf.where(tf.equal(value, 0.0), tf.math.log(self.zero) + tf.zeros_like(above), above)

    def _sample_n(self, n: tf.Tensor, seed: tf.Tensor | None = None) -> tf.Tensor:
        for_zeros, for_counts = tfp.random.split_seed(seed)
        for_first, for_others = tfp.random.split_seed(for_counts)
        shape = tf.concat([[n], self._batch_shape_tensor()], axis=0)

        def uniform(key: tf.Tensor) -> tf.Tensor:
            return tf.random.stateless_uniform(shape, key, dtype=self.dtype)

        # The first of the events of a Poisson process, given that there is one, and those after it.
        first = -tf.math.log1p(-uniform(for_first) * self._any())
        others = tfd.Poisson(tf.maximum(self.rate - first, 0.0)).sample(seed=for_others)
        return tf.where(uniform(for_zeros) < self.zero, tf.zeros([], self.dtype), 1.0 + others)

    def _mean(self) -> tf.Tensor:
        return (1.0 - self.zero) * self.rate / self._any()
