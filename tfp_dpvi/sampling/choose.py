"""Chooses the sampler for the arguments of `fit`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from tfp_dpvi.sampling.base import Sampler
from tfp_dpvi.sampling.fixed_size import FixedSizeSampler
from tfp_dpvi.sampling.full_batch import FullBatchSampler
from tfp_dpvi.sampling.poisson import PoissonSampler

_MAX_BYTES = 2**27  # Per-example gradients in memory, unless physical_batch_size says otherwise.
_MAX_BATCHWISE = 1024  # Records in a float32 sum by one matrix product: more would round more.
_MAX_BATCHWISE_BYTES = 2**30  # Activations of a physical batch in memory, likewise.


@dataclasses.dataclass(frozen=True)
class BatchNeeds:
    """A gradient's needs in memory and shapes per physical batch."""

    bytes_each: int  # Memory per record.
    batchwise: bool = False  # Whether the gradient works on a batch at once, see `ClippedGradient`.
    whole: bool = False  # Whether the whole sample is needed at once.
    static: bool = True  # Whether batches have a fixed shape, so that padding costs time.


MakeSampler = Callable[[int, int, int, "int | None"], Sampler]
"""`(num_available, num_records, batch_size, physical_batch_size) -> Sampler`; None leaves the last to the sampler."""

_SAMPLERS: dict[str, MakeSampler] = {}


def register_sampler(name: str, make: MakeSampler) -> None:
    """Registers a sampler for `fit(sampling=name)`; raises `ValueError` if the name is taken."""
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

    The inclusion probability is `batch_size` over the declared `num_records`. `physical_batch_size` records are in memory at a
    time; None for a size that nearly always holds a batch, within a memory limit.

    Raises:
      ValueError: an unknown name, or a sampler that needs the exact number of records.
    """
    if name not in _SAMPLERS:
        raise ValueError(
            f"sampling={name!r} is unknown: choose one of {', '.join(map(repr, _SAMPLERS))}. Shuffling has no accounting here."
        )
    rows, size = (
        (_MAX_BATCHWISE, _MAX_BATCHWISE_BYTES) if needs.batchwise else (num_available, _MAX_BYTES)
    )
    most = physical_batch_size or max(1, min(rows, size // max(1, needs.bytes_each)))
    mean = num_available * batch_size / num_records
    full = batch_size >= num_records
    # If the whole sample is needed at once: ten standard deviations are never exceeded.
    room = (
        num_available if full else min(num_available, math.ceil(mean + 10.0 * math.sqrt(mean)) + 10)
    )
    if needs.whole and most < room:
        if physical_batch_size is not None:
            raise ValueError(
                f"physical_batch_size={physical_batch_size} would split batches of up to {room} records, but a batch_regularizer "
                "needs groups from the whole batch. Leave physical_batch_size out."
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
            f'num_records={num_records} and sampling="fixed_size": the accounting of fixed-size batches uses the exact '
            'number of records. Leave num_records out, or use sampling="poisson".'
        )
    return FixedSizeSampler(num_available, batch_size, physical_batch_size)


register_sampler(
    "poisson",
    lambda available, records, batch, physical: PoissonSampler(
        available, batch / records, physical
    ),
)
register_sampler("fixed_size", _fixed_size)
