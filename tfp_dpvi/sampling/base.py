"""The interface of samplers."""

from __future__ import annotations

import abc
from collections.abc import Callable, Hashable
from typing import TypeVar

from tfp_dpvi._tf import tf
from tfp_dpvi.privacy import SamplingScheme

Carry = TypeVar("Carry")
Body = Callable[[Carry, tf.Tensor, tf.Tensor], Carry]
"""`body(carry, indices, mask) -> carry`, see `Sampler.for_each_batch`."""


class Sampler(abc.ABC):
    """Draws the records of one step, in physical batches of a fixed size.

    To add a sampler, override `scheme` and `for_each_batch`, and pass a function that makes it to
    `register_sampler`.

    Attributes:
      num_available: The number of records to draw from.
      physical_batch_size: P, the static number of records at a time. It has no effect on the
        guarantee.
      place: The number of this worker, and how many workers draw, each from records of its own;
        (0, 1) where all draw one sample.

    ```python
    >>> from tfp_dpvi._tf import tf
    >>> from tfp_dpvi.sampling import FullBatchSampler
    >>> sampler = FullBatchSampler(num_available=3, physical_batch_size=2)
    >>> key = tf.zeros([2], tf.int64)
    >>> count = lambda carry, indices, mask: carry + tf.reduce_sum(tf.cast(mask, tf.int64))
    >>> int(sampler.for_each_batch(key, count, tf.constant(0, tf.int64)))
    3

    ```
    """

    num_available: int
    physical_batch_size: int
    place: tuple[int, int] = (0, 1)

    @property
    def num_words(self) -> int:
        """The number of words of a key that is a tape, see `tfp_dpvi._random`; 0 without tapes."""
        return 0

    @property
    @abc.abstractmethod
    def scheme(self) -> SamplingScheme:
        """The sampling scheme of `for_each_batch`, for the accounting."""

    @abc.abstractmethod
    def for_each_batch(self, key: tf.Tensor, body: Body[Carry], initial: Carry) -> Carry:
        """Calls a function for each physical batch of the sample, in one loop with static shapes.

        Args:
          key: int64 of shape [2], or a tape of `num_words` words; fresh for each step.
          body: `body(carry, indices, mask) -> carry`, where `indices` is int64 of shape [P], all in
            [0, num_available), and `mask` is bool of shape [P], False for padding.
          initial: The first carry, a tensor or a structure of tensors.

        Returns:
          The last carry.
        """

    def on(self, records: dict[str, tf.Tensor]) -> Sampler:
        """Returns the sampler for these records: itself, unless it reads their mask."""
        del records
        return self

    @property
    def identity(self) -> Hashable:
        """A hashable value. Samplers with equal values trace the same `for_each_batch`.

        By default it is the class with all attributes.
        """
        return (type(self), *sorted(vars(self).items()))
