"""Records in files larger than memory: Parquet, Arrow, HDF5, zarr and batches of a dataset.

Steps draw rows at random, one by one, for which only a plain memory map is fast: a row group or a
compressed chunk would be read whole for each row. So records are copied once to arrays on a local
disk, in bounded memory; an HDF5 dataset that is one uncompressed piece is mapped where it lies.
"""

from __future__ import annotations

import abc
import contextlib
import itertools
import json
import math
import os
import pathlib
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from tfp_dpvi import _validate as check
from tfp_dpvi._tf import Structure, keras, tf, without_values
from tfp_dpvi.data.shapes import flat_names

_META = "copy.json"
_HEADER = 256  # Bytes before the values of a file in NumPy's format.
_AT_ONCE = 2**24  # Bytes of a part that are copied at a time.

_Batch: TypeAlias = dict[str, Structure]
"""Some rows, as structures of arrays under "x", "y" and "sample_weight"."""


class FileRecords(abc.ABC):
    """Records in files, which `fit`, `evaluate` and `predict` take in place of x and y.

    They are copied to a folder when they are first read, unless they can be mapped where they are.

    Args:
      folder: Where to keep the copy, as `.npy` files; a copy of the same files that is there is
        used again. None for a temporary folder, which is deleted with this object. The copy holds
        the records as they are: protect it as you protect the files.
      verbose: 1 shows a progress bar and the space that the copy takes; 0 shows nothing.

    Subclasses say what the records are. `Parquet`, `HDF5` and `Copied` are such.

    ```python
    >>> records = Copied(np.zeros([3, 2]), verbose=0)
    >>> isinstance(records, FileRecords), records.x.shape
    (True, (3, 2))

    ```
    """

    def __init__(self, folder: str | os.PathLike[str] | None, verbose: int) -> None:
        self._folder = None if folder is None else pathlib.Path(folder)
        self._verbose = verbose
        self._parts: _Batch | None = None

    @property
    def x(self) -> Structure:
        """The records' x, a memory map or a dict of them."""
        return self._open()["x"]

    @property
    def y(self) -> Structure | None:
        """The records' y, or None."""
        return self._open().get("y")

    @property
    def sample_weight(self) -> np.ndarray | None:
        """The records' weights, or None."""
        weights: np.ndarray | None = self._open().get("sample_weight")  # type: ignore[assignment]
        return weights

    @abc.abstractmethod
    def _structure(self) -> _Batch:
        """Returns the structure of the parts, with a spec of a row in place of each array."""

    @abc.abstractmethod
    def _num(self) -> int | None:
        """Returns the number of records; None if it is not known before they are read."""

    @abc.abstractmethod
    def _batches(self) -> Iterator[_Batch]:
        """Yields all records in their order, some rows at a time."""

    def _source(self) -> object:
        """Returns what identifies the records, JSON-ready; None if nothing does."""
        return None

    def _mapped(self) -> _Batch | None:
        """Returns the parts as memory maps of the files themselves; None if they must be copied."""
        return None

    def _open(self) -> _Batch:
        if self._parts is None:
            self._parts = self._mapped() or self._copied()
        return self._parts

    def _copied(self) -> _Batch:
        structure = self._structure()
        specs = tf.nest.flatten(structure)
        files = [f"{name}.npy" for name in flat_names(structure, "x")]
        source = self._source()
        folder = self._make_folder()
        meta = folder / _META
        if meta.exists():
            if source is None or json.loads(meta.read_text()) != json.loads(json.dumps(source)):
                raise ValueError(
                    f"folder={str(folder)!r} holds a copy of other records, or of files that have "
                    "changed since: pass another folder, or delete it."
                )
        else:
            self._check_space(folder, specs)
            writer = _Writer([folder / file for file in files], specs, self._bar(folder, specs))
            try:
                writer.write(self._batches())
            except OSError as error:
                raise ValueError(
                    f"The records could not be copied to folder={str(folder)!r} "
                    f"({type(error).__name__}): pass folder= on another disk."
                ) from None
            temporary = folder / f"{_META}.new"
            temporary.write_text(json.dumps(source))
            os.replace(temporary, meta)
        maps = [np.load(folder / file, mmap_mode="r", allow_pickle=False) for file in files]
        return dict(tf.nest.pack_sequence_as(structure, maps))

    def _make_folder(self) -> pathlib.Path:
        if self._folder is None:
            self._folder = pathlib.Path(tempfile.mkdtemp(prefix="tfp_dpvi_"))
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return self._folder

    def _check_space(self, folder: pathlib.Path, specs: Sequence[_Spec]) -> None:
        num = self._num()
        free = shutil.disk_usage(folder).free
        needed = 0 if num is None else num * sum(spec.bytes for spec in specs)
        if needed > free:
            raise ValueError(
                f"The copy of {num:,} records needs {needed / 1e9:.2f} GB in {str(folder)!r}, "
                f"which has {free / 1e9:.2f} GB: pass folder= on a larger disk."
            )

    def _bar(self, folder: pathlib.Path, specs: Sequence[_Spec]) -> keras.utils.Progbar | None:
        if not self._verbose:
            return None
        num = self._num()
        row = sum(spec.bytes for spec in specs)
        size = f"{row} bytes a record" if num is None else f"{num:,} records, {num * row / 1e9:.2f}"
        unit = "" if num is None else " GB"
        print(f"Copying to {folder} ({size}{unit}), once.")
        return keras.utils.Progbar(num, unit_name="record")


class _Spec:
    """The shape and dtype of one row of a part.

    Args:
      shape: The shape of a row.
      dtype: Its dtype.
    """

    def __init__(self, shape: Sequence[int], dtype: np.dtype | type | str) -> None:
        self.shape = tuple(shape)
        self.dtype = np.dtype(dtype)
        self.bytes = math.prod(self.shape) * self.dtype.itemsize


class _Writer:
    """Writes the rows of several arrays to files in NumPy's format, whose length is known last.

    Args:
      paths: The files.
      specs: The rows of each.
      bar: A progress bar, or None.
    """

    def __init__(
        self,
        paths: Sequence[pathlib.Path],
        specs: Sequence[_Spec],
        bar: keras.utils.Progbar | None,
    ) -> None:
        self._paths, self._specs = paths, specs
        self._bar = bar

    def write(self, batches: Iterator[_Batch]) -> None:
        """Writes all batches.

        Args:
          batches: Structures of arrays in the order of the files.
        """
        num = 0
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(open(path, "wb")) for path in self._paths]
            for file in files:
                os.chmod(file.fileno(), 0o600)
                file.seek(_HEADER)
            for batch in batches:
                leaves = tf.nest.flatten(batch)
                lengths = {len(leaf) for leaf in leaves}
                if len(lengths) > 1:
                    raise ValueError("The parts of the records have different numbers of rows.")
                for file, leaf, spec in zip(files, leaves, self._specs, strict=True):
                    rows = np.ascontiguousarray(leaf, spec.dtype)
                    if rows.shape[1:] != spec.shape:
                        raise ValueError(
                            f"Records have shape {list(rows.shape[1:])} and {list(spec.shape)}: "
                            "all need one shape."
                        )
                    if rows.size:
                        file.write(rows.data.cast("B"))
                num += lengths.pop()
                if self._bar is not None:
                    self._bar.update(num)
            if num == 0:
                raise ValueError("x holds no records: pass at least one.")
            for file, spec in zip(files, self._specs, strict=True):
                file.seek(0)
                file.write(_header(spec, num))
        if self._bar is not None and self._bar.target is None:
            self._bar.update(num, finalize=True)


def _header(spec: _Spec, num: int) -> bytes:
    """Returns the header of a file in NumPy's format, of a fixed size."""
    array = {
        "descr": np.lib.format.dtype_to_descr(spec.dtype),
        "fortran_order": False,
        "shape": (num, *spec.shape),
    }
    start = np.lib.format.magic(1, 0) + (_HEADER - 10).to_bytes(2, "little")
    return start + repr(array).encode("latin1").ljust(_HEADER - 11) + b"\n"


def open_files(x: Any, y: Any = None, sample_weight: Any = None) -> tuple[tuple[Any, Any], Any]:
    """Returns ((x, y), sample_weight) of `FileRecords` that are passed as x.

    Other records are returned unchanged.

    Args:
      x: Records, or `FileRecords`, which have their y and weights.
      y: The outcomes of other records.
      sample_weight: The weights of other records.

    Raises:
      ValueError: `FileRecords` with y or weights besides.
    """
    if not isinstance(x, FileRecords):
        return (x, y), sample_weight
    if y is not None or sample_weight is not None:
        raise ValueError(
            f"y and sample_weight are part of x={type(x).__name__}(...): name their columns there, "
            "and pass only x."
        )
    return (x.x, x.y), x.sample_weight


# ---------------------------------------------------------------------- Parquet and Arrow


class Parquet(FileRecords):
    """Columns of Parquet or Arrow files (extra: `tfp-dpvi[files]`).

    Args:
      path: A file, a folder of files, a list of files, or a `pyarrow.dataset.Dataset`. Files that
        end in `.arrow`, `.feather` or `.ipc` are in Arrow's format, in `.csv` texts.
      x: The columns of x: a list of names for a matrix of shape [N, d]; one name for a single
        column, [N], or [N, k] for a column of lists of k numbers; a dict of such for a dict.
      y: Likewise the columns of y, or None.
      sample_weight: The column of weights, or None.
      dtype: The float type of matrices and of columns of floats; single columns of integers keep
        theirs.
      folder: As for `FileRecords`, except that a copy of filtered rows is not used again.
      verbose: As for `FileRecords`.

    ```python
    >>> import tempfile
    >>> import pyarrow as pa
    >>> import pyarrow.parquet
    >>> path = tempfile.mkdtemp() + "/visits.parquet"
    >>> table = pa.table({"age": [31.0, 64.0], "sex": [0, 1], "visits": [2, 5]})
    >>> pa.parquet.write_table(table, path)
    >>> visits = Parquet(path, x=["age", "sex"], y="visits", verbose=0)  # For fit(visits).
    >>> visits.x.tolist(), visits.y.tolist()
    ([[31.0, 0.0], [64.0, 1.0]], [2, 5])

    ```

    Raises:
      ImportError: pyarrow is not installed.
      ValueError: A column is missing, repeated, or has no numbers; or, when it is read, missing
        values.
    """

    def __init__(
        self,
        path: Any,
        x: Structure,
        y: Structure | None = None,
        sample_weight: str | None = None,
        *,
        dtype: str = "float32",
        folder: str | os.PathLike[str] | None = None,
        verbose: int = 1,
    ) -> None:
        super().__init__(folder, verbose)
        check.one_of("dtype", dtype, ("float32", "float64"))
        self._dtype = dtype
        self._dataset = _arrow_dataset(path)
        named = {"x": x, "y": y, "sample_weight": sample_weight}
        self._columns = {name: part for name, part in named.items() if part is not None}
        self._specs: _Batch = {
            name: self._spec_of(name, part) for name, part in self._columns.items()
        }

    def _spec_of(self, name: str, part: Any) -> Any:
        if isinstance(part, Mapping):
            return {key: self._spec_of(f"{name}[{key!r}]", value) for key, value in part.items()}
        names = [part] if isinstance(part, str) else part
        if not isinstance(names, list | tuple) or not names or len(set(names)) < len(names):
            raise ValueError(
                f"{name}={check.shown(part)}: pass a column's name, or a list of different names."
            )
        for column in names:
            self._check_column(name, column, single=isinstance(part, str))
        if not isinstance(part, str):
            return _Spec([len(names)], self._dtype)
        kind = self._dataset.schema.field(part).type
        size = getattr(kind, "list_size", None)
        values = kind.to_pandas_dtype() if size is None else kind.value_type.to_pandas_dtype()
        exact = np.dtype(values).kind in "iu"
        return _Spec([] if size is None else [size], values if exact else self._dtype)

    def _check_column(self, name: str, column: Any, single: bool) -> None:
        schema = self._dataset.schema
        if column not in schema.names:
            raise ValueError(
                f"{name}: there is no column {check.shown(column)}; the files have "
                f"{', '.join(map(repr, schema.names[:20]))}."
            )
        kind = schema.field(column).type
        fixed = getattr(kind, "list_size", None) is not None and single
        plain = kind.value_type if fixed else kind
        types = _pyarrow().types
        tests = (types.is_integer, types.is_floating, types.is_boolean)
        if not any(test(plain) for test in tests):
            raise ValueError(
                f"{name}: column {column!r} has type {kind}, which is not numeric: code texts and "
                "categories as integers, and dates as numbers, when you write the files."
            )

    def _structure(self) -> _Batch:
        return self._specs

    def _num(self) -> int:
        return int(self._dataset.count_rows())

    def _source(self) -> object:
        fragments = self._fragments()
        files = [getattr(part, "path", "") for part in fragments]
        if not files or not all(map(os.path.exists, files)):
            return None
        groups = [[each.id for each in getattr(part, "row_groups", ())] for part in fragments]
        marks = [
            [os.path.abspath(file), *_mark(file), of_file]
            for file, of_file in zip(files, groups, strict=True)
        ]
        return {"files": marks, "columns": self._columns, "dtype": self._dtype}

    def _batches(self) -> Iterator[_Batch]:
        leaves = tf.nest.flatten(self._columns)
        columns = list(dict.fromkeys(leaves))
        row = sum(spec.bytes for spec in tf.nest.flatten(self._specs))
        size = max(1, _AT_ONCE // max(1, row))
        for arrays in self._scanned(columns, size):
            yield {name: self._rows(part, arrays) for name, part in self._columns.items()}

    def _fragments(self) -> list[Any]:
        """Returns the files, or the parts of them that are read; none if rows are filtered."""
        try:
            return list(self._dataset.get_fragments())
        except ValueError:
            return []

    def _scanned(self, columns: list[str], size: int) -> Iterator[dict[str, np.ndarray]]:
        """Yields columns, a row group after another: of a whole file Arrow would read far ahead."""
        settings = {"columns": columns, "batch_size": size, "batch_readahead": 1}
        fragments = self._fragments()
        if not fragments:
            scans: Iterator = iter([self._dataset.to_batches(**settings)])
        else:
            splits = (getattr(part, "split_by_row_group", lambda p=part: [p]) for part in fragments)
            parts = (part for split in splits for part in split())
            schema = self._dataset.schema
            scans = iter(part.to_batches(schema=schema, **settings) for part in parts)
        for batch in itertools.chain.from_iterable(scans):
            yield {name: _numbers(name, batch.column(name)) for name in columns}

    def _rows(self, part: Any, arrays: dict[str, np.ndarray]) -> Any:
        if isinstance(part, Mapping):
            return {key: self._rows(value, arrays) for key, value in part.items()}
        if isinstance(part, str):
            return arrays[part]
        return np.stack([arrays[name].astype(self._dtype) for name in part], axis=1)


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.dataset
    except ImportError:
        raise ImportError(
            'Parquet needs pyarrow: pip install "tfp-dpvi[files]", or pip install pyarrow.'
        ) from None
    return pyarrow


def _arrow_dataset(path: Any) -> Any:
    """Returns the Arrow dataset of a path, a list of paths, or a dataset."""
    arrow = _pyarrow()
    if isinstance(path, arrow.dataset.Dataset):
        return path
    paths = [path] if isinstance(path, str | os.PathLike) else path
    if not isinstance(paths, list | tuple) or not paths:
        raise TypeError(
            f"path={check.shown(path)}: pass a file, a folder, a list of files, or a "
            "pyarrow.dataset.Dataset."
        )
    texts = [os.fspath(each) for each in paths]
    suffix = pathlib.Path(texts[0]).suffix
    formats = {".arrow": "ipc", ".feather": "ipc", ".ipc": "ipc", ".csv": "csv"}
    try:
        found = texts[0] if len(texts) == 1 else texts
        return arrow.dataset.dataset(found, format=formats.get(suffix, "parquet"))
    except (OSError, arrow.ArrowException) as error:
        raise ValueError(
            f"path={check.shown(path)} cannot be read as {formats.get(suffix, 'parquet')} "
            f"({type(error).__name__}): pass a file or folder of that format."
        ) from None


def _numbers(name: str, column: Any) -> np.ndarray:
    """Returns a column of Arrow as an array."""
    missing = column.null_count
    size = getattr(column.type, "list_size", None)
    if size is not None:
        column = column.flatten()
        missing += column.null_count
    if missing:
        raise ValueError(
            f"column {name!r} has missing values: fill them when you write the files, or drop its "
            "rows."
        )
    values = column.to_numpy(zero_copy_only=False)
    return values if size is None else values.reshape(-1, size)


def _mark(path: str | os.PathLike[str]) -> tuple[int, int]:
    """Returns what changes with a file: its size in bytes, and the time of its last change."""
    stat = os.stat(path)
    return stat.st_size, stat.st_mtime_ns


# ---------------------------------------------------------------------- HDF5, zarr and others


class Copied(FileRecords):
    """Lazy arrays (h5py, zarr, dask, xarray), or batches of a `tf.data.Dataset`, copied once.

    Records of TFRecord files are read by such a dataset:
    `tf.data.TFRecordDataset(files).map(parse).batch(1024)`.

    Args:
      x: A lazy array of shape [N, ...] or a dict of them; or a finite dataset whose elements are
        batches x, (x, y) or (x, y, sample_weight), and which is read once, in its order.
      y: A lazy array or a dict of them, or None.
      sample_weight: Numbers of shape [N], or None.
      folder: As for `FileRecords`, except that no earlier copy is used again. Later runs may load
        its files: `np.load("folder/x.npy", mmap_mode="r")`.
      verbose: As for `FileRecords`.

    ```python
    >>> batches = tf.data.Dataset.range(5).map(lambda i: (tf.fill([2], i), i)).batch(2)
    >>> records = Copied(batches, verbose=0)  # For fit(records).
    >>> records.x.shape, records.y.tolist()
    ((5, 2), [0, 1, 2, 3, 4])

    ```

    Raises:
      ValueError: Lengths differ, or a dataset is endless or has no batches of one shape.
    """

    def __init__(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        *,
        folder: str | os.PathLike[str] | None = None,
        verbose: int = 1,
    ) -> None:
        super().__init__(folder, verbose)
        self._dataset = x if isinstance(x, tf.data.Dataset) else None
        named = {"x": x, "y": y, "sample_weight": sample_weight}
        self._arrays = {name: part for name, part in named.items() if part is not None}
        if self._dataset is not None:
            if len(self._arrays) > 1:
                raise ValueError("y and sample_weight are part of the dataset: pass only x.")
            self._arrays = _specs_of_dataset(x)
        lengths = {part.shape[0] for part in tf.nest.flatten(self._arrays)}
        if len(lengths) > 1:
            raise ValueError(f"Lengths differ: {sorted(map(str, lengths))}. Pass one row each.")

    def _structure(self) -> _Batch:
        return dict(
            tf.nest.map_structure(
                lambda part: _Spec(part.shape[1:], tf.as_dtype(part.dtype).as_numpy_dtype),
                self._arrays,
            )
        )

    def _num(self) -> int | None:
        num: int | None = tf.nest.flatten(self._arrays)[0].shape[0]
        return num

    def _batches(self) -> Iterator[_Batch]:
        if self._dataset is not None:
            with without_values("The dataset failed"):
                for element in self._dataset.as_numpy_iterator():
                    parts = element if isinstance(element, tuple) else (element,)
                    yield dict(zip(self._arrays, parts, strict=True))
            return
        row = max(spec.bytes for spec in tf.nest.flatten(self._structure()))
        num = self._num() or 0
        # Whole chunks, since a part of one costs as much.
        chunk = max(_rows_of_chunk(part) for part in tf.nest.flatten(self._arrays))
        rows = math.ceil(max(1, _AT_ONCE // max(1, row)) / chunk) * chunk
        for start in range(0, num, rows):
            stop = min(start + rows, num)
            leaves = [np.asarray(part[start:stop]) for part in tf.nest.flatten(self._arrays)]
            yield dict(tf.nest.pack_sequence_as(self._arrays, leaves))


def _rows_of_chunk(part: Any) -> int:
    """Returns the number of rows that a lazy array reads at a time."""
    first = (getattr(part, "chunks", None) or (1,))[0]
    # Those of dask are tuples of the sizes along each axis.
    return int(first[0] if isinstance(first, tuple) else first)


def _specs_of_dataset(dataset: tf.data.Dataset) -> _Batch:
    element = dataset.element_spec
    parts = element if isinstance(element, tuple) else (element,)
    if dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
        raise ValueError("x is an endless dataset: leave out repeat().")
    specs = dict(zip(("x", "y", "sample_weight"), parts, strict=False))
    shapes = [getattr(spec, "shape", None) for spec in tf.nest.flatten(specs)]
    if any(s is None or s.rank in (None, 0) or None in s.as_list()[1:] for s in shapes):
        raise ValueError(
            f"x has elements of shapes {[str(shape) for shape in shapes]}: use dataset.batch(1024) "
            "and fixed record shapes."
        )
    return dict(
        tf.nest.map_structure(
            lambda spec: tf.TensorSpec([None, *spec.shape[1:]], spec.dtype), specs
        )
    )


class HDF5(Copied):
    """Datasets of an HDF5 file (extra: `tfp-dpvi[files]`).

    A dataset that is neither chunked nor compressed is mapped where it lies; otherwise all are
    copied once.

    Args:
      path: The file.
      x: The name of the dataset of x, such as "train/images", or a dict of names.
      y: Likewise of y, or None.
      sample_weight: The name of the dataset of weights, or None.
      folder: As for `FileRecords`.
      verbose: As for `FileRecords`.

    ```python
    >>> import tempfile
    >>> import h5py
    >>> path = tempfile.mkdtemp() + "/records.h5"
    >>> with h5py.File(path, "w") as file:
    ...     _ = file.create_dataset("images", data=np.zeros([3, 2, 2], "uint8"))
    ...     _ = file.create_dataset("labels", data=np.arange(3), chunks=(2,), compression="gzip")
    >>> records = HDF5(path, x="images", y="labels", verbose=0)  # For fit(records).
    >>> records.x.shape, records.y.tolist()
    ((3, 2, 2), [0, 1, 2])

    ```

    Raises:
      ImportError: h5py is not installed.
      ValueError: A dataset is missing, or lengths differ.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        x: Structure,
        y: Structure | None = None,
        sample_weight: str | None = None,
        *,
        folder: str | os.PathLike[str] | None = None,
        verbose: int = 1,
    ) -> None:
        self._path = os.fspath(path)
        self._names = {"x": x, "y": y, "sample_weight": sample_weight}
        try:
            import h5py
        except ImportError:
            raise ImportError(
                'HDF5 needs h5py: pip install "tfp-dpvi[files]", or pip install h5py.'
            ) from None
        try:
            self._file = h5py.File(self._path, "r")
        except OSError as error:
            raise ValueError(
                f"path={self._path!r} cannot be read as HDF5 ({type(error).__name__}): pass an "
                "HDF5 file."
            ) from None
        arrays = {name: self._dataset_of(name, part) for name, part in self._names.items()}
        super().__init__(**arrays, folder=folder, verbose=verbose)

    def _dataset_of(self, name: str, part: Any) -> Any:
        if part is None:
            return None
        if isinstance(part, Mapping):
            return {key: self._dataset_of(f"{name}[{key!r}]", each) for key, each in part.items()}
        found = self._file.get(part)
        if not hasattr(found, "shape") or not found.shape:
            datasets = list(itertools.islice(self._file, 20))
            raise ValueError(
                f"{name}={check.shown(part)} is no dataset with rows; the file has {datasets}: "
                'pass a dataset\'s name, such as "group/name".'
            )
        if np.dtype(found.dtype).kind not in "biuf":
            raise ValueError(
                f"{name}={check.shown(part)} has dtype {found.dtype}, which is not numeric."
            )
        return found

    def _source(self) -> object:
        return {"file": [os.path.abspath(self._path), *_mark(self._path)], "names": self._names}

    def _mapped(self) -> _Batch | None:
        maps = tf.nest.map_structure(mapped_hdf5, self._arrays)
        return None if any(part is None for part in tf.nest.flatten(maps)) else dict(maps)


def mapped_hdf5(dataset: Any) -> np.memmap | None:
    """Returns an HDF5 dataset as a memory map; None unless it is one uncompressed piece of a file.

    Args:
      dataset: An `h5py.Dataset`, or another array.
    """
    identifier: Any = getattr(dataset, "id", None)
    if not hasattr(identifier, "get_offset") or dataset.file.driver != "sec2":
        return None
    offset = identifier.get_offset()
    kind = np.dtype(dataset.dtype)
    if offset is None or kind.kind not in "biuf" or dataset.external or 0 in dataset.shape:
        return None
    dataset.file.flush()
    mapped = np.memmap(dataset.file.filename, kind, "r", offset, dataset.shape)
    # h5py does not say whether its own block before the data counts.
    same = all(np.array_equal(mapped[row], dataset[row], True) for row in (0, -1))
    return mapped if same else None
