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
    """Draws the records of one step, in physical batches of a fixed size."""

    num_available: int  # Records to draw from.
    physical_batch_size: (
        int  # The static number P of records at a time, without effect on the guarantee.
    )

    @property
    def num_words(self) -> int:
        """The number of words of the key, if it is a tape (see `tfp_dpvi._random`); 0 for 128 bits."""
        return 0

    @property
    @abc.abstractmethod
    def scheme(self) -> SamplingScheme:
        """The sampling scheme of `for_each_batch`, for the accounting."""

    @abc.abstractmethod
    def for_each_batch(self, key: tf.Tensor, body: Body[Carry], initial: Carry) -> Carry:
        """Calls `body` for each physical batch of the sample, in one loop with static shapes; returns the last carry.

        `key`, int64 of shape [2] or a tape of `num_words`, is fresh for each step. In `body(carry, indices, mask) -> carry`, `indices` is int64 of shape
        [P], all in [0, num_available), and `mask` is bool of shape [P], False for padding. `initial` is the first carry.
        """

    def on(self, records: dict[str, tf.Tensor]) -> Sampler:
        """Returns the sampler for these records: itself, unless they have a mask."""
        del records
        return self

    @property
    def identity(self) -> Hashable:
        """Returns a hashable value; equal values trace the same `for_each_batch`. By default class and attributes."""
        return (type(self), *sorted(vars(self).items()))
