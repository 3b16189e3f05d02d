"""Batches from the user, with a declared sampling scheme."""

from __future__ import annotations

import copy

from tfp_dpvi._tf import tf
from tfp_dpvi.privacy import SamplingScheme
from tfp_dpvi.sampling.base import Body, Carry, Sampler
from tfp_dpvi.sampling.full_batch import in_order


class DeclaredBatchSampler(Sampler):
    """Takes all rows of a padded batch that was drawn elsewhere.

    The accounting holds only if the declared scheme is true.

    Args:
      num_rows: The number of rows of a padded batch.
      scheme: The scheme that the batches are declared to follow.
      physical_batch_size: The number of records at a time.
      place: See `Sampler`.

    ```python
    >>> from tfp_dpvi._tf import tf
    >>> from tfp_dpvi.privacy import EachRecordOncePerEpoch
    >>> sampler = DeclaredBatchSampler(4, EachRecordOncePerEpoch(10), physical_batch_size=4)
    >>> batch = sampler.on({"mask": tf.constant([True, True, True, False])})
    >>> count = lambda carry, indices, mask: carry + tf.reduce_sum(tf.cast(mask, tf.int64))
    >>> int(batch.for_each_batch(tf.zeros([2], tf.int64), count, tf.constant(0, tf.int64)))
    3

    ```
    """

    def __init__(
        self,
        num_rows: int,
        scheme: SamplingScheme,
        physical_batch_size: int,
        place: tuple[int, int] = (0, 1),
    ) -> None:
        self.num_available = num_rows
        self.physical_batch_size = min(physical_batch_size, num_rows)
        self.place = place
        self._scheme = scheme
        self._mask: tf.Tensor | None = None

    @property
    def scheme(self) -> SamplingScheme:
        """The declared scheme."""
        return self._scheme

    def on(self, records: dict[str, tf.Tensor]) -> Sampler:
        """Returns the sampler for a batch whose "mask" is False for padding."""
        bound = copy.copy(self)
        bound._mask = records["mask"]
        return bound

    def for_each_batch(self, key: tf.Tensor, body: Body[Carry], initial: Carry) -> Carry:
        """See `Sampler`. Skips physical batches after the last record."""
        del key
        if self._mask is None:
            raise RuntimeError("for_each_batch was called before on(records): call on first.")
        present, count = self._mask, self.num_available
        last = tf.reduce_max(tf.where(present, tf.range(1, count + 1, dtype=tf.int64), 0))

        def body_of_present(carry: Carry, rows: tf.Tensor, mask: tf.Tensor) -> Carry:
            return body(carry, rows, mask & tf.gather(present, rows))

        return in_order(count, self.physical_batch_size, last, body_of_present, initial)
