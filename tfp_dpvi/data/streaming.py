"""Streamed records: memory maps, lazy arrays and other sources, read as steps draw their rows."""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import functools
import itertools
import logging
import math
import mmap
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tfp_dpvi import _random
from tfp_dpvi import _validate as check
from tfp_dpvi._keystream import Keystream
from tfp_dpvi._tf import Structure, keras, mapped_file, tf
from tfp_dpvi.data.files import mapped_hdf5
from tfp_dpvi.data.records import Calls, Key, Records, check_weights, common_length
from tfp_dpvi.data.units import Units
from tfp_dpvi.sampling import DeclaredBatchSampler, FullBatchSampler, Sampler

_LOG = logging.getLogger("tfp_dpvi")
# Memory maps and lazy arrays up to this size are loaded into the device's memory, which is faster
# than any disk.
RESIDENT_BYTES = 2**31
_AHEAD = 8  # Steps whose rows the operating system prefetches.
_READY = 4  # Batches that are ready before the loop needs them.
_FAST_ROW = 1e-5  # Seconds for a row that needs no disk.
_MOST_HELD = 2**28  # Bytes of mapped files in memory, from which on their pages are given back.
_PIECE = 256  # Rows of a mapped file that are read at a time: Linux may map 2 MB around each.


def is_source(value: Any) -> bool:
    """Returns whether `value` is an indexable source and no array.

    A source has `source[indices]` and a length.
    """
    plain = isinstance(value, list | tuple | dict | str | bytes | tf.Tensor | tf.data.Dataset)
    return (
        not plain
        and not hasattr(value, "__array__")
        and hasattr(value, "__getitem__")
        and hasattr(value, "__len__")
    )


def is_lazy(value: Any) -> bool:
    """Returns whether `value` is an array of another library that reads its values on request.

    Such are h5py's datasets and the arrays of zarr, dask, tensorstore and xarray: they have rows,
    and neither memory of their own (as arrays and tensors have, of any library) nor labels for
    rows (as columns of pandas have).
    """
    in_memory = isinstance(value, np.ndarray | np.generic | tf.Tensor | tf.Variable) or any(
        hasattr(value, name) for name in ("__array_interface__", "__dlpack__", "iloc")
    )
    on_request = all(hasattr(value, name) for name in ("__array__", "__getitem__"))
    if in_memory or not on_request:
        return False
    shape = getattr(value, "shape", None)
    return hasattr(value, "__len__") if shape is None else len(shape) > 0


def _is_mapped(leaf: object) -> bool:
    """Returns whether an array is file-backed; a copy of an `np.memmap` is not."""
    return isinstance(leaf, np.memmap) and mapped_file(leaf) is not None


def wants_stream(parts: Any, stream: bool | None) -> bool:
    """Returns whether to stream these records.

    Sources are streamed, and memory maps and lazy arrays that are large together.

    Args:
      parts: The records.
      stream: The user's choice; None for the rule above.

    Raises:
      ValueError: A source is not to be streamed.
    """
    leaves = tf.nest.flatten(parts)
    lazy = [leaf for leaf in leaves if is_lazy(leaf)]
    sources = any(is_source(leaf) for leaf in leaves)
    if stream is False and sources:
        raise ValueError(
            "stream=False, but x or y is a source, which is streamed: leave stream out, or pass "
            "arrays."
        )
    size = sum(leaf.nbytes for leaf in leaves if _is_mapped(leaf))
    size += sum(_bytes_of(leaf) for leaf in lazy)
    return sources or (size > RESIDENT_BYTES if stream is None else bool(stream))


def _bytes_of(lazy: Any) -> float:
    """Returns the size of a lazy array, which need not say it.

    The size is infinite where the dtype is not NumPy's.
    """
    try:
        return float(math.prod(lazy.shape) * np.dtype(lazy.dtype).itemsize)
    except (AttributeError, TypeError):
        return float(getattr(lazy, "nbytes", math.inf))


class RecordSource:
    """Structures of arrays, memory maps, lazy arrays or sources of one length.

    A row is a record. Leaves of `x` and `y` have `len(leaf)` and `leaf[indices]` for an increasing
    int64 array of indices. Floats are cast to `dtype` when read, integers are kept.

    ```python
    >>> source = RecordSource(np.arange(6.0).reshape([3, 2]), None, None, np.dtype("float32"))
    >>> source.take(np.array([2]), 2)["x"].tolist()
    [[4.0, 5.0], [0.0, 0.0]]

    ```

    Raises:
      ValueError: Lengths differ, there are no records, or rows are no numeric arrays.
    """

    def __init__(
        self, x: Structure, y: Structure | None, sample_weight: np.ndarray | None, dtype: np.dtype
    ) -> None:
        named = {"x": x, "y": y, "sample_weight": sample_weight}
        lists = {
            name: np.asarray(part) if isinstance(part, list) else part
            for name, part in named.items()
        }
        self._parts = {name: part for name, part in lists.items() if part is not None}
        self.num = common_length(self._parts)
        if sample_weight is not None:
            self._parts["sample_weight"] = check_weights(sample_weight, self.num).astype(dtype)
        leaves = tf.nest.flatten(self._parts)
        self._leaves = [_readable(leaf) for leaf in leaves]
        _warn_of_slow(self._leaves)
        self._dtype = np.dtype(dtype)
        # Whether the last rows were in memory.
        self._fast = False
        for leaf in filter(_is_mapped, self._leaves):
            if hasattr(mmap, "MADV_RANDOM"):
                _map_of(leaf)[0].madvise(mmap.MADV_RANDOM)
        self._specs = [self._row(number, leaf) for number, leaf in enumerate(self._leaves)]
        self._release()

    def _row(self, number: int, leaf: Any) -> np.ndarray:
        row = (
            leaf[:1] if isinstance(leaf, np.ndarray) else np.asarray(leaf[np.zeros([1], np.int64)])
        )
        if row.ndim == 0 or row.shape[0] != 1 or row.dtype.kind not in "biuf":
            raise ValueError(
                f"Part {number} of the records returns {check.dtype_name(row.dtype)} of shape "
                f"{row.shape} for source[[0]]: "
                "return one row of floats, integers or bools."
            )
        return np.zeros(row.shape, self._dtype if row.dtype.kind in "fb" else row.dtype)

    def _release(self) -> None:
        """Gives the pages of files that were read back to the operating system.

        They would count as memory of this process, and are soon all of a file.
        """
        for leaf in self._leaves:
            # The changes that a map of another mode holds would be lost.
            if _is_mapped(leaf) and leaf.mode == "r" and hasattr(mmap, "MADV_DONTNEED"):
                _map_of(leaf)[0].madvise(mmap.MADV_DONTNEED)
        # Libraries, and files of others.
        self._held_before = _bytes_of_files()

    @property
    def probe(self) -> Records:
        """Returns one record of zeros."""
        return self._records(np.zeros([0], np.int64), 1)

    def some(self) -> Records:
        """Returns up to 64 of the records, evenly spaced."""
        rows = np.unique(np.linspace(0, self.num - 1, 64).astype(np.int64))
        return self._records(rows, len(rows))

    def _records(self, indices: np.ndarray, rows: int) -> Records:
        parts = self.take(indices, rows)
        return Records(parts["x"], parts.get("y"), parts.get("sample_weight"), rows)

    def advise(self, indices: np.ndarray) -> None:
        """Lets the operating system prefetch rows in parallel, unless it has read them before."""
        if self._fast:
            return
        for leaf in self._leaves:
            if _is_mapped(leaf) and leaf.flags.c_contiguous and hasattr(mmap, "MADV_WILLNEED"):
                mapped, offset = _map_of(leaf)
                width = leaf.strides[0]
                first = (offset + indices * width) // mmap.PAGESIZE * mmap.PAGESIZE
                for start, index in zip(first.tolist(), indices.tolist(), strict=True):
                    mapped.madvise(mmap.MADV_WILLNEED, start, offset + (index + 1) * width - start)

    def take(self, indices: np.ndarray, rows: int) -> dict[str, np.ndarray]:
        """Returns records as a structure of arrays.

        Args:
          indices: Int64 array, the numbers of the records.
          rows: The number of rows of the result, padded with zeros.

        Raises:
          RuntimeError: The source fails, or returns another shape.
        """
        start = time.perf_counter()
        leaves = [self._read(number, indices, rows) for number in range(len(self._leaves))]
        self._fast = time.perf_counter() - start < _FAST_ROW * len(indices)
        return tf.nest.pack_sequence_as(self._parts, leaves)

    def _rows_of(self, leaf: Any, indices: np.ndarray) -> np.ndarray:
        """Returns rows of a leaf; those of a mapped file are read a few at a time."""
        if not _is_mapped(leaf):
            return np.asarray(leaf[indices])
        pieces = []
        for start in range(0, len(indices), _PIECE):
            pieces.append(np.asarray(leaf[indices[start : start + _PIECE]]))
            if _bytes_of_files() - self._held_before > _MOST_HELD:
                self._release()
        return np.concatenate(pieces)

    def _read(self, number: int, indices: np.ndarray, rows: int) -> np.ndarray:
        leaf, spec = self._leaves[number], self._specs[number]
        filled = np.zeros([rows, *spec.shape[1:]], spec.dtype)
        if len(indices) == 0:
            return filled
        try:
            # Files are read fastest in increasing order; batches of a fixed size are drawn in
            # another.
            order = np.argsort(indices)
            rows_read = self._rows_of(leaf, indices[order])
        except Exception as error:
            # The message shows neither the error's text, which may show a record, nor the rows,
            # which are the secret sample.
            raise RuntimeError(
                f"Part {number} of the records could not be read: the source raised "
                f"{type(error).__name__}, which is this "
                "error's __context__.\nCheck that every row can be read; messages of a source may "
                "show records."
            ) from None
        if rows_read.dtype.kind not in "biuf" or rows_read.shape != (len(indices), *spec.shape[1:]):
            raise RuntimeError(
                f"Part {number} of the records returned {check.dtype_name(rows_read.dtype)} of "
                f"shape {['rows', *rows_read.shape[1:]]} or "
                "another number of rows than asked for; it must be numbers of shape "
                f"{['rows', *spec.shape[1:]]}.\nCheck that the "
                f"source has {self.num} rows, as its length says."
            )
        filled[order] = rows_read
        return filled


class PersonSource:
    """The persons of a `RecordSource`: of a person's rows only those that are used are read.

    Args:
      rows: The rows.
      units: Which rows are whose.
    """

    def __init__(self, rows: RecordSource, units: Units) -> None:
        self.num = len(units.places)
        self._rows = rows
        self._units = units

    @property
    def probe(self) -> Records:
        """Returns one person of zeros."""
        return self._records(np.zeros([0], np.int64), 1)

    def advise(self, indices: np.ndarray) -> None:
        """See `RecordSource.advise`."""
        self._rows.advise(np.unique(self._units.places[indices]))

    def take(self, indices: np.ndarray, rows: int) -> dict[str, Structure]:
        """See `RecordSource.take`, for persons."""
        persons = self._records(indices, rows)
        return {"x": persons.x} | ({} if persons.y is None else {"y": persons.y})

    def _records(self, indices: np.ndarray, rows: int) -> Records:
        wanted, at = np.unique(self._units.places[indices], return_inverse=True)
        # One row more, of zeros, for padding.
        read = self._rows.take(wanted, len(wanted) + 1)
        shape = rows, self._units.person.max_rows
        places = np.full(shape, len(wanted))
        places[: len(indices)] = at.reshape([-1, shape[1]])
        mask = np.zeros(shape, bool)
        mask[: len(indices)] = self._units.mask[indices]
        units = dataclasses.replace(self._units, places=places, mask=mask)
        return Records(read["x"], read.get("y"), None, len(wanted) + 1).by_person(units)


def _bytes_of_files() -> int:
    """Returns how much of mapped files counts as this process's memory; 0 where nothing says it."""
    try:
        pages = pathlib.Path("/proc/self/statm").read_text(encoding="ascii").split()[2]
    except OSError:
        return 0
    return int(pages) * mmap.PAGESIZE


def _readable(leaf: Any) -> Any:
    """Returns what rows are read from: an array, or what reads them on request."""
    if is_source(leaf) or isinstance(leaf, np.memmap):
        return leaf
    if not is_lazy(leaf):
        return np.asarray(leaf)
    mapped = mapped_hdf5(leaf)
    return leaf if mapped is None else mapped


def _warn_of_slow(leaves: Sequence[Any]) -> None:
    """Warns of arrays that read whole chunks for each row."""
    slow = [leaf for leaf in leaves if is_lazy(leaf) and getattr(leaf, "chunks", None)]
    if slow:
        _LOG.warning(
            "x or y is stored in chunks (%s), each of which is read, and decompressed, for a row "
            "in it. dpvi.data.Copied(x, y) copies the records once to a file whose rows are read "
            "fast.",
            f"{type(slow[0]).__name__} of {type(slow[0]).__module__.partition('.')[0]}",
        )


class RowBatches(keras.utils.Sequence):
    """All records of a source in their order, a batch at a time, for `predict` and `evaluate`."""

    def __init__(self, source: RecordSource, batch_size: int) -> None:
        self._source, self._size = source, batch_size

    @property
    def probe(self) -> Records:
        """One record of zeros."""
        return self._source.probe

    def __len__(self) -> int:
        return math.ceil(self._source.num / self._size)

    def __getitem__(self, number: int) -> tuple[Structure, ...]:
        first = number * self._size
        rows = np.arange(first, min(first + self._size, self._source.num))
        taken = self._source.take(rows, len(rows))
        return tuple(taken[name] for name in ("x", "y", "sample_weight") if name in taken)


def _map_of(leaf: np.ndarray) -> tuple[mmap.mmap, int]:
    """Returns the mmap behind an array that has one, and the array's offset in it in bytes."""
    mapped = mapped_file(leaf)
    if mapped is None:
        raise TypeError(f"an array of dtype {leaf.dtype} is no memory map.")
    begins = np.frombuffer(mapped, np.uint8, 1).__array_interface__["data"][0]
    return mapped, leaf.__array_interface__["data"][0] - begins


class StreamedData:
    """Records of a `RecordSource`, drawn on the host and read ahead while steps run. See `Data`.

    Steps get the same records in the same order as from arrays on the device.

    ```python
    >>> from tfp_dpvi.sampling import PoissonSampler
    >>> source = RecordSource(np.arange(8.0), None, None, np.dtype("float32"))
    >>> data = StreamedData(source, PoissonSampler(8, 0.5, 8), 8, 4.0, 2)
    >>> data.tensors["mask"].shape  # Room for all but one sample in 10^15.
    TensorShape([32])

    ```

    Args:
      source: The records.
      draws: The sampler whose scheme draws the records.
      num_records: The public N.
      batch_size: The expected number of records of a step, the public denominator qN.
      steps_per_epoch: The public number of steps of an epoch.
    """

    resumable: bool = True

    def __init__(
        self,
        source: RecordSource | PersonSource,
        draws: Sampler,
        num_records: int,
        batch_size: float,
        steps_per_epoch: int,
    ) -> None:
        if isinstance(draws, FullBatchSampler):
            raise ValueError(
                f"batch_size is not below the number of streamed records, {source.num}: choose a "
                "smaller one, or pass arrays."
            )
        self.num_records = num_records
        self.batch_size = batch_size
        self.steps_per_epoch = steps_per_epoch
        self.records = source.probe
        self._source, self._draws = source, draws
        self._scheme, self._size = draws.scheme, draws.physical_batch_size
        # A sample exceeds this room once in 10^15 steps, and is then traced anew.
        mean = source.num * batch_size / num_records
        batches = max(1, math.ceil((mean + 9.0 * math.sqrt(mean) + 9.0) / self._size))
        self._batches, self._drawer = batches, functools.cache(self._make_drawer)
        self._rows = self._size * batches
        self.sampler: Sampler = DeclaredBatchSampler(
            self._rows, self._scheme, self._size, draws.place
        )
        self.tensors = tf.nest.map_structure(
            tf.convert_to_tensor, source.take(np.zeros([0], np.int64), self._rows)
        )
        self.tensors["mask"] = tf.zeros([self._rows], tf.bool)

    def calls(self, steps: int, key: Key, first: int, compiled: bool) -> Calls:
        """See `Data`. Each batch is a call."""
        # The host draws by words of its own, as many as a row has without noise.
        if isinstance(key, Keystream):
            key = key.beside(_random.num_words(self._draws.num_words, 0))
        ahead = iter(range(first, first + steps))
        drawn: collections.deque[tuple[np.ndarray, int]] = collections.deque()

        def read() -> tuple[int, dict[str, Structure]]:
            for step in itertools.islice(ahead, _AHEAD - len(drawn)):
                drawn.append(self._draw(key, step, compiled))
                self._source.advise(drawn[-1][0])
            return self._batch(*drawn.popleft())

        reader = concurrent.futures.ThreadPoolExecutor(1, "tfp_dpvi reader")
        try:
            ready = collections.deque(reader.submit(read) for _ in range(min(_READY, steps)))
            for number in range(_READY, steps + _READY):
                rows, arrays = ready.popleft().result()
                if number < steps:
                    ready.append(reader.submit(read))
                sampler = DeclaredBatchSampler(rows, self._scheme, self._size, self._draws.place)
                yield 1, sampler, tf.nest.map_structure(tf.convert_to_tensor, arrays)
        finally:
            reader.shutdown(cancel_futures=True)

    def _make_drawer(self, batches: int, compiled: bool) -> Callable[..., Any]:
        shape = [batches, self._size]

        def record(
            carry: tuple[tf.Tensor, ...], indices: tf.Tensor, mask: tf.Tensor
        ) -> tuple[tf.Tensor, ...]:
            pieces, masks = carry[:2]
            number = carry[2]
            # An overflow is counted, and the draw repeated with more room.
            at = [[tf.minimum(number, batches - 1)]]
            pieces = tf.tensor_scatter_nd_update(pieces, at, [tf.cast(indices, tf.int64)])
            masks = tf.tensor_scatter_nd_update(masks, at, [mask])
            return pieces, masks, number + 1

        def draw(key: tf.Tensor, step: tf.Tensor) -> tuple[tf.Tensor, ...]:
            start = (tf.zeros(shape, tf.int64), tf.zeros(shape, tf.bool), tf.constant(0))
            sampling = _random.keys_of_step(key, step, self._draws.num_words)[0]
            return self._draws.for_each_batch(sampling, record, start)

        return tf.function(draw, jit_compile=compiled, autograph=False)

    def _draw(self, key: Key, step: int, compiled: bool) -> tuple[np.ndarray, int]:
        """Returns the indices that the sampler draws in a step, and the number of physical batches.

        They are, in the same order, those of `for_each_batch` on the device; none is dropped.
        """
        batches = self._batches
        words = tf.constant(key.rows(step, 1)) if isinstance(key, Keystream) else key
        while True:
            number_of_step = tf.constant(step, tf.int64)
            drawn = self._drawer(batches, compiled)(words, number_of_step)
            number = int(drawn[2])
            if number <= batches:
                pieces, masks = drawn[0].numpy(), drawn[1].numpy()
                return pieces[masks], number
            batches = number

    def _batch(self, indices: np.ndarray, batches: int) -> tuple[int, dict[str, Structure]]:
        # Padding follows the records in every physical batch, so that the records can be
        # concatenated.
        rows = max(self._rows, batches * self._size)
        arrays: dict[str, Structure] = {**self._source.take(indices, rows)}
        arrays["mask"] = np.arange(rows) < len(indices)
        return rows, arrays
