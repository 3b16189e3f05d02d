"""A fixed number of distinct records, uniformly without replacement."""

from __future__ import annotations

import math

from tfp_dpvi import _random
from tfp_dpvi import _validate as check
from tfp_dpvi._tf import tf
from tfp_dpvi.privacy import FixedSizeSampling
from tfp_dpvi.sampling.base import Body, Carry, Sampler
from tfp_dpvi.sampling.full_batch import in_order


def distinct_indices(key: tf.Tensor, num: int, count: int) -> tf.Tensor:
    """Draws a uniformly random set of integers, in time and memory proportional to its size.

    A large set has the integers with the largest of `num` random numbers. A small one has the first
    `count` distinct integers of slightly more draws with replacement, which are drawn again in the
    rare case that these have too few. Neither the choice nor the repetition depends on which
    integers were drawn, so that every set is equally likely.

    Args:
      key: int64 of shape [2], or a tape of words.
      num: The integers are 0 .. num - 1.
      count: The number of integers to draw.

    Returns:
      int64 of shape [count].

    Raises:
      ValueError: `num` and `count` are too large for 64 bits.
    """
    if 4 * count >= num:
        uniform = _random.uniform(key, [num])
        return tf.cast(tf.math.top_k(uniform, count).indices, tf.int64)
    size = _num_draws(num, count)
    if (size + 1) * num >= 2**63:
        raise ValueError(f"batch_size={count} of {num} records is too large to index with 64 bits.")
    places = tf.range(size, dtype=tf.int64)

    def draw(number: tf.Tensor, *_: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        values = _random.integers(key, [size], num, number)
        # An integer holds value and place, so that one sort is enough.
        by_value = tf.sort(values * size + places)
        values, place = by_value // size, by_value % size
        first = tf.concat([[True], values[1:] != values[:-1]], axis=0)
        by_place = tf.sort(tf.where(first, place, size) * num + values)
        return number + 1, tf.reduce_sum(tf.cast(first, tf.int64)), by_place[:count] % num

    start = (tf.constant(0, tf.int64), tf.constant(0, tf.int64), tf.zeros([count], tf.int64))
    # The loop ends when a draw has enough distinct values.
    last = tf.while_loop(
        lambda _, distinct, __: distinct < count, draw, start, parallel_iterations=1
    )
    return last[2]


def _num_draws(num: int, count: int) -> int:
    return num if 4 * count >= num else math.ceil(1.3 * count) + 32


class FixedSizeSampler(Sampler):
    """Draws a fixed number of distinct records in each step, every such set equally likely.

    Args:
      num_available: N, the number of records to draw from.
      batch_size: The number of records of a step, at least 1 and below N.
      physical_batch_size: The number of records at a time; by default `batch_size`.

    Raises:
      ValueError: A size is out of its range.

    #### Formal guarantee

    The sets of different keys are independent and uniform, up to the pseudo-random generator.
    `scheme` is `FixedSizeSampling(N, batch_size)`.

    ```python
    >>> FixedSizeSampler(num_available=1000, batch_size=10).scheme
    FixedSizeSampling(num_records=1000, batch_size=10)

    ```
    """

    def __init__(
        self, num_available: int, batch_size: int, physical_batch_size: int | None = None
    ) -> None:
        if not 1 <= batch_size < num_available:
            raise ValueError(
                f"batch_size={batch_size} must be at least 1 and below the {num_available} records."
            )
        self.num_available = int(num_available)
        self.batch_size = int(batch_size)
        size = self.batch_size if physical_batch_size is None else physical_batch_size
        self.physical_batch_size = min(check.count("physical_batch_size", size, 1), self.batch_size)

    @property
    def scheme(self) -> FixedSizeSampling:
        """The sampling scheme."""
        return FixedSizeSampling(self.num_available, self.batch_size)

    @property
    def num_words(self) -> int:
        """See `Sampler`: room for one draw, which nearly always has enough distinct records."""
        return _random.words_for(1, _num_draws(self.num_available, self.batch_size))

    def for_each_batch(self, key: tf.Tensor, body: Body[Carry], initial: Carry) -> Carry:
        """See `Sampler`."""
        indices = distinct_indices(key, self.num_available, self.batch_size)

        def body_of_drawn(carry: Carry, places: tf.Tensor, mask: tf.Tensor) -> Carry:
            return body(carry, tf.gather(indices, places), mask)

        return in_order(
            self.batch_size, self.physical_batch_size, self.batch_size, body_of_drawn, initial
        )
