"""Every record in every step."""

from __future__ import annotations

from tfp_dpvi import _validate as check
from tfp_dpvi._tf import tf
from tfp_dpvi.privacy import FullBatch
from tfp_dpvi.sampling.base import Body, Carry, Sampler


class FullBatchSampler(Sampler):
    """Takes all records in order, without a key and without amplification.

    Args:
      num_available: The number of records.
      physical_batch_size: The number of records at a time; by default all.

    Raises:
      ValueError: A size is below 1.

    ```python
    >>> FullBatchSampler(num_available=1000).scheme
    FullBatch()

    ```
    """

    def __init__(self, num_available: int, physical_batch_size: int | None = None) -> None:
        self.num_available = check.count("num_available", num_available, 1)
        size = self.num_available if physical_batch_size is None else physical_batch_size
        self.physical_batch_size = min(
            check.count("physical_batch_size", size, 1), self.num_available
        )

    @property
    def scheme(self) -> FullBatch:
        """The sampling scheme."""
        return FullBatch()

    def for_each_batch(self, key: tf.Tensor, body: Body[Carry], initial: Carry) -> Carry:
        """See `Sampler`."""
        del key
        return in_order(
            self.num_available, self.physical_batch_size, self.num_available, body, initial
        )


def in_order(
    count: int, size: int, end: tf.Tensor | int, body: Body[Carry], initial: Carry
) -> Carry:
    """Calls a function for indices in order, see `Sampler.for_each_batch`.

    Args:
      count: The number of indices; those from `count` on are padding.
      size: The number of indices at a time.
      end: The loop stops before the first batch that begins at or after this index.
      body: `body(carry, indices, mask) -> carry`.
      initial: The first carry.

    Returns:
      The last carry.
    """
    # A single batch needs no loop.
    if size == count:
        return body(initial, tf.range(count, dtype=tf.int64), tf.ones([count], tf.bool))

    def next_batch(start: tf.Tensor, carry: Carry) -> tuple[tf.Tensor, Carry]:
        indices = start + tf.range(size, dtype=tf.int64)
        return start + size, body(carry, tf.minimum(indices, count - 1), indices < count)

    begin = (tf.constant(0, tf.int64), initial)
    last_carry: Carry = tf.while_loop(
        lambda start, _: start < end, next_batch, begin, parallel_iterations=1
    )[1]
    return last_carry
