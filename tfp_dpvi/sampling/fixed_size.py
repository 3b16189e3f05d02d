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
    """Draws a uniformly random set of `count` of the integers 0 .. num - 1, in O(count) time and memory.

    A large `count` takes those with the largest of `num` random numbers. A small one takes the first `count` distinct ones of
    slightly more draws with replacement, drawn again in the rare case that these have too few. Neither the choice nor the
    repetition depends on which integers were drawn, so every set is equally likely. Returns int64 of shape [count].
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
        by_value = tf.sort(
            values * size + places
        )  # One integer has value and place, for a single sort.
        values, place = by_value // size, by_value % size
        first = tf.concat([[True], values[1:] != values[:-1]], axis=0)
        by_place = tf.sort(tf.where(first, place, size) * num + values)
        return number + 1, tf.reduce_sum(tf.cast(first, tf.int64)), by_place[:count] % num

    start = (tf.constant(0, tf.int64), tf.constant(0, tf.int64), tf.zeros([count], tf.int64))
    return tf.while_loop(lambda _, found, __: found < count, draw, start, parallel_iterations=1)[2]


def _num_draws(num: int, count: int) -> int:
    return num if 4 * count >= num else math.ceil(1.3 * count) + 32


class FixedSizeSampler(Sampler):
    """Exactly `batch_size` distinct records of `num_available` in each step, every such set equally likely.

    #### Formal guarantee

    The sets of different keys are independent and uniform, up to the pseudo-random generator; `scheme` is
    `FixedSizeSampling(N, batch_size)`.
    """

    def __init__(
        self, num_available: int, batch_size: int, physical_batch_size: int | None = None
    ) -> None:
        if not 1 <= batch_size < num_available:
            raise ValueError(
                f"batch_size={batch_size} must be at least 1 and below the {num_available} records."
            )
        self.num_available, self.batch_size = int(num_available), int(batch_size)
        size = (
            batch_size
            if physical_batch_size is None
            else check.count("physical_batch_size", physical_batch_size, 1)
        )
        self.physical_batch_size = min(size, self.batch_size)

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

        def of_places(carry: Carry, places: tf.Tensor, mask: tf.Tensor) -> Carry:
            return body(carry, tf.gather(indices, places), mask)

        return in_order(
            self.batch_size, self.physical_batch_size, self.batch_size, of_places, initial
        )
