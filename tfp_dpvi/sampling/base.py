"""The interface of samplers."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, TypeVar

from tfp_dpvi.privacy import SamplingScheme

Carry = TypeVar("Carry")
Visit = Callable[[Any, Any, Any], Any]


class Sampler(abc.ABC):
    """Draws the records of one logical batch and walks over them in physical batches of a fixed size.

    Attributes:
      num_available: how many records there are to draw from.
      physical_batch_size: static number P of records per visit; a memory limit, without effect on the guarantee.
    """

    num_available: int
    physical_batch_size: int

    @property
    @abc.abstractmethod
    def scheme(self) -> SamplingScheme:
        """The scheme to account for, true of what `walk` does."""

    @abc.abstractmethod
    def walk(self, key: Any, visit: Visit, initial: Any) -> Any:
        """Visits the sampled records; compiles to one loop with static shapes.

        Args:
          key: int64 tensor of shape [2], fresh for each step.
          visit: `visit(carry, indices, mask) -> carry`; `indices` is int64 of shape [P], all in
            [0, num_available), and `mask` is bool of shape [P], False for padding.
          initial: structure of tensors, the first carry.

        Returns:
          The last carry.
        """

    @property
    @abc.abstractmethod
    def identity(self) -> tuple[Any, ...]:
        """Hashable; equal for samplers whose traced `walk` is the same."""
