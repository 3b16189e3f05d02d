"""Batches that somebody else drew, under the scheme that they declare."""

from __future__ import annotations

from typing import Any

from tfp_dpvi.privacy import SamplingScheme
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

    @property
    def identity(self) -> tuple[Any, ...]:
        """See `Sampler`."""
        return ("given", self._scheme, *super().identity)
