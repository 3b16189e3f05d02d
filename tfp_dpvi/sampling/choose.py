"""Chooses the sampler for the arguments of `fit`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from tfp_dpvi.sampling.base import Sampler
from tfp_dpvi.sampling.fixed_size import FixedSizeSampler
from tfp_dpvi.sampling.full_batch import FullBatchSampler
from tfp_dpvi.sampling.poisson import PoissonSampler

# The memory for per-example gradients, unless physical_batch_size says otherwise.
_MAX_BYTES = 2**27
# The number of records in a float32 sum by one matrix product: more would round more.
_MAX_BATCHWISE = 1024
# The memory for activations of a physical batch, unless physical_batch_size says otherwise.
_MAX_BATCHWISE_BYTES = 2**30


@dataclasses.dataclass(frozen=True)
class BatchNeeds:
    """A gradient's needs in memory and shapes per physical batch.

    Attributes:
      bytes_each: The memory per record, in bytes.
      batchwise: Whether the gradient works on a batch at once; see `ClippedGradient`.
      whole: Whether the whole sample is needed at once.
      static: Whether batches have a fixed shape, so that padding costs time.

    ```python
    >>> needs = BatchNeeds(bytes_each=2**20)
    >>> sampler = make_sampler(
    ...     "poisson", num_available=50_000, num_records=50_000, batch_size=500,
    ...     physical_batch_size=None, needs=needs,
    ... )
    >>> sampler.scheme, sampler.physical_batch_size
    (PoissonSampling(probability=0.01), 128)
    >>> network = BatchNeeds(bytes_each=2**20, batchwise=True, static=False)
    >>> make_sampler(
    ...     "poisson", num_available=50_000, num_records=50_000, batch_size=500,
    ...     physical_batch_size=None, needs=network,
    ... ).physical_batch_size
    734

    ```
    """

    bytes_each: int
    batchwise: bool = False
    whole: bool = False
    static: bool = True


MakeSampler = Callable[[int, int, int, "int | None"], Sampler]
"""`(num_available, num_records, batch_size, physical_batch_size) -> Sampler`.

None leaves the physical batch size to the sampler.
"""

SHARDS = "poisson_of_shards"
"""Poisson samples that several workers draw, each from records of its own."""

_SAMPLERS: dict[str, MakeSampler] = {}


def register_sampler(name: str, make: MakeSampler) -> None:
    """Registers a sampler for `fit(sampling=name)`.

    Args:
      name: The name.
      make: Returns the sampler, see `MakeSampler`.

    Raises:
      ValueError: The name is taken.
    """
    if name in _SAMPLERS:
        raise ValueError(f"name={name!r} is registered already: choose another.")
    _SAMPLERS[name] = make


def make_sampler(
    name: str,
    *,
    num_available: int,
    num_records: int,
    batch_size: int,
    physical_batch_size: int | None,
    needs: BatchNeeds,
) -> Sampler:
    """Returns the named sampler, or full batches if the batch size reaches the number of records.

    The inclusion probability is `batch_size` over the declared `num_records`.

    Args:
      name: "poisson", "poisson_of_shards", "fixed_size", or a name that was registered.
      num_available: The number of records to draw from.
      num_records: The declared number of records.
      batch_size: The expected batch size.
      physical_batch_size: The number of records in memory at a time; None for a size that nearly
        always holds a batch, within a memory limit.
      needs: What the gradient needs.

    Raises:
      ValueError: The name is unknown, the sampler needs the exact number of records, or the
        gradient needs a larger physical batch.
    """
    if name not in _SAMPLERS:
        raise ValueError(
            f"sampling={name!r} is unknown: choose one of {', '.join(map(repr, _SAMPLERS))}. "
            "Shuffling has no accounting here."
        )
    rows, size = num_available, _MAX_BYTES
    if needs.batchwise:
        rows, size = _MAX_BATCHWISE, _MAX_BATCHWISE_BYTES
    most = physical_batch_size or max(1, min(rows, size // max(1, needs.bytes_each)))
    mean = num_available * batch_size / num_records
    full = batch_size >= num_records
    # The largest sample: ten standard deviations above the mean are never exceeded.
    room = num_available
    if not full:
        room = min(room, math.ceil(mean + 10.0 * math.sqrt(mean)) + 10)
    if needs.whole and most < room:
        if physical_batch_size is not None:
            raise ValueError(
                f"physical_batch_size={physical_batch_size} would split batches of up to {room} "
                "records, but a batch_regularizer needs groups from the whole batch. Leave "
                "physical_batch_size out."
            )
        most = room
    most = min(most, room)
    if full:
        return FullBatchSampler(num_available, most)
    make = _SAMPLERS[name]
    if physical_batch_size is None and needs.static and not needs.whole:
        # The sampler's default size covers nearly every sample with the least padding.
        sampler = make(num_available, num_records, batch_size, None)
        if sampler.physical_batch_size <= most:
            return sampler
    return make(num_available, num_records, batch_size, most)


def _fixed_size(
    num_available: int, num_records: int, batch_size: int, physical_batch_size: int | None
) -> Sampler:
    if num_records != num_available:
        raise ValueError(
            f'num_records={num_records} and sampling="fixed_size": the accounting of fixed-size '
            "batches uses the exact number of records. Leave num_records out, or use "
            'sampling="poisson".'
        )
    return FixedSizeSampler(num_available, batch_size, physical_batch_size)


def _poisson(
    num_available: int, num_records: int, batch_size: int, physical_batch_size: int | None
) -> Sampler:
    return PoissonSampler(num_available, batch_size / num_records, physical_batch_size)


register_sampler("poisson", _poisson)
register_sampler(SHARDS, _poisson)
register_sampler("fixed_size", _fixed_size)
