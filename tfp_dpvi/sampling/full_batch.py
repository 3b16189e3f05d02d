"""Every record in every step."""

from __future__ import annotations

from tfp_dpvi import _validate as check
from tfp_dpvi._tf import tf
from tfp_dpvi.privacy import FullBatch
from tfp_dpvi.sampling.base import Body, Carry, Sampler


class FullBatchSampler(Sampler):
    """All records in order, in physical batches (default: one), without a key and without amplification."""

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
    """Calls `body` with indices below `count`, `size` at a time, for all indices below `end`; see `Sampler`."""
    if size == count:  # Without a loop.
        return body(initial, tf.range(count, dtype=tf.int64), tf.ones([count], tf.bool))

    def one(start: tf.Tensor, carry: Carry) -> tuple[tf.Tensor, Carry]:
        indices = start + tf.range(size, dtype=tf.int64)
        return start + size, body(carry, tf.minimum(indices, count - 1), indices < count)

    begin = (tf.constant(0, tf.int64), initial)
    last_carry: Carry = tf.while_loop(
        lambda start, _: start < end, one, begin, parallel_iterations=1
    )[1]
    return last_carry
