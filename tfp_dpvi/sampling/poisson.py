"""Exact Poisson sampling with static shapes, in time and memory O(qN + P)."""

from __future__ import annotations

import math

import numpy as np

from tfp_dpvi import _random
from tfp_dpvi import _validate as check
from tfp_dpvi._tf import pad, tf
from tfp_dpvi.privacy import PoissonSampling
from tfp_dpvi.sampling.base import Body, Carry, Sampler

# The probability that a step's sample takes more words than its tape has.
_RARE = 1e-15


def poisson_gaps(
    key: tf.Tensor, shape: list[int], probability: float, limit: int, number: int | tf.Tensor = 0
) -> tf.Tensor:
    """Draws distances between consecutive included records: geometric on {1, 2, ...}.

    The distances invert a float64 uniform u in [0, 1): `floor(log1p(-u) / log1p(-q)) + 1`. As
    `1 - u` is never 0, the logarithm is finite. The cap precedes the cast to int64. The uniform has
    52 bits, so that inclusion probabilities have a relative error of 2^-52 / q.

    Args:
      key: int64 of shape [2], or a tape of words.
      shape: The shape of the result.
      probability: q, in (0, 1).
      limit: Distances are capped at `limit + 1`.
      number: The number of the draw, see `_random.uniform`.

    Returns:
      int64 of this shape.
    """
    uniform = _random.uniform(key, shape, number)
    skipped = tf.floor(tf.math.log1p(-uniform) / tf.constant(math.log1p(-probability), tf.float64))
    return tf.cast(tf.minimum(skipped, tf.constant(limit, tf.float64)), tf.int64) + 1


def partial_sums(gaps: tf.Tensor) -> tf.Tensor:
    """Returns cumulative sums of positive int64 of shape [P].

    They are exact below 2^53 and otherwise at least 2^53. They are products with triangular
    matrices of ones, in about sqrt(P) rows: XLA's cumulative sum takes three times as long.
    """
    count = int(gaps.shape[0])
    width = math.ceil(math.sqrt(count))
    rows = math.ceil(count / width)
    padded = pad(tf.cast(gaps, tf.float64), [[0, rows * width - count]])
    table = tf.reshape(padded, [rows, width])
    within = tf.linalg.matmul(table, tf.constant(np.triu(np.ones([width, width]))))
    before = tf.linalg.matvec(tf.constant(np.tril(np.ones([rows, rows]), -1)), within[:, -1])
    return tf.cast(tf.reshape(within + before[:, None], [rows * width])[:count], tf.int64)


class PoissonSampler(Sampler):
    """Includes each record independently with probability q.

    The included indices are the partial sums of geometric gaps, drawn P at a time until they pass
    the last record. No record is dropped from a large batch: truncation at a fixed capacity would
    change the event.

    Args:
      num_available: N, the number of records, at most 2^40.
      probability: q, in (0, 1).
      physical_batch_size: P, the number of records at a time. By default it is about
        `q N + 3 sqrt(q N)`, which covers nearly every sample.

    Raises:
      ValueError: A number is out of its range.

    #### Formal guarantee

    Inclusions are independent Bernoulli(q) across records and across keys, up to the pseudo-random
    generator and the 52 bits of its uniforms. `scheme` is `PoissonSampling(q)`. The running time
    depends on the realised batch size.

    ```python
    >>> from tfp_dpvi._tf import tf
    >>> sampler = PoissonSampler(num_available=1000, probability=0.01)
    >>> sampler.scheme, sampler.physical_batch_size
    (PoissonSampling(probability=0.01), 24)
    >>> count = lambda carry, indices, mask: carry + tf.reduce_sum(tf.cast(mask, tf.int64))
    >>> key = tf.constant([1, 2], tf.int64)
    >>> 0 <= int(sampler.for_each_batch(key, count, tf.constant(0, tf.int64))) <= 1000
    True

    ```
    """

    def __init__(
        self, num_available: int, probability: float, physical_batch_size: int | None = None
    ) -> None:
        if not 1 <= num_available <= 2**40:
            raise ValueError(
                f"num_available must be between 1 and 2^40 records, got {num_available}."
            )
        if not 0.0 < probability < 1.0:
            raise ValueError(f"probability={probability!r} must lie strictly between 0 and 1.")
        mean = num_available * probability
        if physical_batch_size is None:
            physical_batch_size = math.ceil(mean + 3.0 * math.sqrt(mean)) + 4
        self.num_available = int(num_available)
        self.probability = float(probability)
        self.physical_batch_size = min(
            check.count("physical_batch_size", physical_batch_size, 1), self.num_available
        )

    @property
    def scheme(self) -> PoissonSampling:
        """The sampling scheme."""
        return PoissonSampling(self.probability)

    @property
    def num_words(self) -> int:
        """See `Sampler`. The words are enough except with a probability below 1e-15."""
        mean = self.num_available * self.probability
        surprise = -math.log(_RARE)
        # This is Bernstein's inequality. One gap more passes the last record.
        beyond = surprise / 3.0 + math.sqrt(surprise**2 / 9.0 + 2.0 * surprise * mean)
        most = min(self.num_available, math.ceil(mean + beyond)) + 1
        size = self.physical_batch_size
        return _random.words_for(math.ceil(most / size), size)

    def for_each_batch(self, key: tf.Tensor, body: Body[Carry], initial: Carry) -> Carry:
        """See `Sampler`."""
        count = self.num_available
        if self.place[1] > 1:
            # Independent samples of all shards together are one Poisson sample.
            key = _random.fold_in(key, tf.constant(self.place[0]))

        def more(last: tf.Tensor, *_: tf.Tensor) -> tf.Tensor:
            return last < count - 1

        def next_batch(
            last: tf.Tensor, number: tf.Tensor, carry: tf.Tensor
        ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
            size = [self.physical_batch_size]
            gaps = poisson_gaps(key, size, self.probability, count, number)
            indices = last + partial_sums(gaps)
            mask = indices < count
            carry = body(carry, tf.minimum(indices, count - 1), mask)
            return indices[-1], number + 1, carry

        start = (tf.constant(-1, tf.int64), tf.constant(0, tf.int64), initial)
        last_carry: Carry = tf.while_loop(more, next_batch, start, parallel_iterations=1)[2]
        return last_carry
