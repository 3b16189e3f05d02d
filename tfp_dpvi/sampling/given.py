"""Batches that somebody else drew, under the scheme that they declare."""

from __future__ import annotations

from typing import Any

from tfp_dpvi._tf import tf
from tfp_dpvi.privacy import SamplingScheme
from tfp_dpvi.sampling.base import Visit
from tfp_dpvi.sampling.full_batch import FullBatchSampler


class GivenBatchSampler(FullBatchSampler):
    """Visits all rows of a batch that was drawn elsewhere.

    Args:
      num_rows: rows of the padded batch.
      scheme: how the batch was drawn, as its maker declares.
      physical_batch_size: rows per visit.

    #### Formal guarantee

    None of its own: `scheme` is the declaration of whoever draws the batches, and what is accounted for holds only if
    it is true.
    """

    def __init__(self, num_rows: int, scheme: SamplingScheme, physical_batch_size: int) -> None:
        super().__init__(num_rows, physical_batch_size)
        self._scheme = scheme

    @property
    def scheme(self) -> Any:
        """The declared scheme."""
        return self._scheme

    def walk(self, key: Any, visit: Visit, initial: Any, *, given: Any = None) -> Any:
        """See `Sampler`. With the batch's mask as `given`, physical batches behind its last record are not visited."""
        if given is None:
            return super().walk(key, visit, initial)
        count, size = self.num_available, self.physical_batch_size
        last = tf.reduce_max(tf.where(given, tf.range(1, count + 1, dtype=tf.int64), 0))

        def body(start: Any, carry: Any) -> tuple[Any, Any]:
            indices = start + tf.range(size, dtype=tf.int64)
            return start + size, visit(carry, tf.minimum(indices, count - 1), indices < count)

        begin = (tf.constant(0, tf.int64), initial)
        return tf.while_loop(lambda start, _: start < last, body, begin, parallel_iterations=1)[1]

    @property
    def identity(self) -> tuple[Any, ...]:
        """See `Sampler`."""
        return ("given", self._scheme, *super().identity)
