"""The public schema of a data set's columns, and the coding of data sets as levels and back."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from tfp_dpvi import _deprecation
from tfp_dpvi import _validate as check
from tfp_dpvi.data import describe
from tfp_dpvi.data.columns import MISSING, Binary, Categorical, Column, Integer, Numeric

if TYPE_CHECKING:
    import pandas

TableData: TypeAlias = "pandas.DataFrame | Mapping[str, np.ndarray]"
"""A pandas DataFrame, or a dict of one-dimensional arrays."""


@dataclasses.dataclass(frozen=True)
class Schema:
    """Names and public descriptions of columns, in order.

    ```python
    >>> import numpy as np
    >>> from tfp_dpvi.data import Binary, Integer, Schema
    >>> schema = Schema({"age": Integer(0, 99, bins=[18, 65]), "smokes": Binary(missing=True)})
    >>> schema.encode({"age": np.array([17, 70]), "smokes": np.array([1.0, np.nan])}).tolist()
    [[0, 1], [2, -1]]

    ```

    Args:
      columns: Dict from names to `Continuous`, `Integer`, `Date`, `Binary` or `Categorical`. Take
        the descriptions from a code book and not from the records.

    Raises:
      TypeError: The columns are no dict, or one of them is no description.
    """

    columns: Mapping[str, Column]

    def __post_init__(self) -> None:
        if not isinstance(self.columns, Mapping) or not self.columns:
            raise TypeError(
                f"columns={check.shown(self.columns)} must be a dict of columns, such as "
                f'{{"age": Integer(17, 90)}}.'
            )
        for name, column in self.columns.items():
            if not isinstance(column, Column):
                raise TypeError(
                    f"column {name!r} is {check.shown(column)}: describe it, for instance as "
                    "Continuous or Categorical."
                )
        object.__setattr__(self, "columns", dict(self.columns))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the columns, in order."""
        return tuple(self.columns)

    @property
    def open(self) -> tuple[str, ...]:
        """Names of the columns whose levels a private histogram will choose."""
        return tuple(name for name, column in self.columns.items() if column.fine is not None)

    @property
    def finest(self) -> Schema:
        """The schema with the finest levels of each column that is open, and the others as here."""
        return Schema({name: column.finest for name, column in self.columns.items()})

    @classmethod
    def from_dict(cls, columns: Mapping[str, Any]) -> Schema:
        """Returns the schema of plain values, as a code book has them.

        ```python
        >>> from tfp_dpvi.data import Schema
        >>> schema = Schema.from_dict(
        ...     {"age": {"type": "integer", "lower": 17, "upper": 90, "unit": "years"}}
        ... )
        >>> print(schema)
        age: 17 to 90 years, typically 53.5 +- 18.25 (from the bounds)

        ```

        Args:
          columns: Dict from names to dicts with a "type" ("continuous", "integer", "binary",
            "categorical" or "date") and the arguments of that class.

        Raises:
          ValueError: A type or an argument is unknown.
        """
        return cls(describe.columns_from(columns))

    @classmethod
    def from_json(cls, text: str) -> Schema:
        """Returns the schema of a JSON text, see `from_dict`.

        Args:
          text: The text, or what `to_json` returned.

        Raises:
          ValueError: The text is no JSON, or describes no columns.
        """
        return cls.from_dict(describe.parsed(text, "JSON"))

    @classmethod
    def from_yaml(cls, text: str) -> Schema:
        """Returns the schema of a YAML text, see `from_dict` (package `pyyaml`).

        Args:
          text: The text.

        Raises:
          ValueError: The text is no YAML, or describes no columns.
        """
        return cls.from_dict(describe.parsed(text, "YAML"))

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Returns plain values for `from_dict`."""
        return {name: describe.plain(column) for name, column in self.columns.items()}

    def to_json(self) -> str:
        """Returns JSON text for `from_json`."""
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        return "\n".join(f"{name}: {column.described}" for name, column in self.columns.items())

    def questions(self) -> list[str]:
        """Returns what a curator must be able to answer before the schema is used.

        Whatever the schema says is as if published: each statement needs a source other than the
        records.
        """
        return [
            question
            for name, column in self.columns.items()
            for question in describe.questions(name, column)
        ]

    def simulate(self, num: int, seed: int = 0) -> dict[str, np.ndarray]:
        """Returns invented records: public, as they are a function of the schema and the seed.

        Columns are independent. Numbers follow their typical values, categories their shares.

        Args:
          num: The number of records.
          seed: The seed.

        Returns:
          Dict of arrays of shape [num]; no value is missing.
        """
        generator = np.random.default_rng(seed)
        return {name: column.simulate(num, generator) for name, column in self.columns.items()}

    def encode(self, data: TableData) -> np.ndarray:
        """Returns each record's levels.

        Args:
          data: A pandas DataFrame, or a dict of one-dimensional arrays, with exactly the described
            columns in any order.

        Returns:
          int32 array of shape [records, columns]: each column's level, -1 where missing.

        Raises:
          ValueError: A column is unknown, absent or of another length, or has a value that its
            description does not allow.
          TypeError: The data are neither a DataFrame nor a dict, or have a masked array.
        """
        arrays = self._arrays(data)
        codes = np.stack(
            [column.encode(name, arrays[name]) for name, column in self.columns.items()], axis=1
        )
        if len(codes) == 0:
            raise ValueError("data has no records: pass at least one.")
        return codes

    def decode(
        self, codes: np.ndarray, layout: Layout, generator: np.random.Generator
    ) -> TableData:
        """Returns a data set with these levels: the inverse of `encode`.

        Args:
          codes: Integer array of shape [records, columns], -1 for missing values.
          layout: The container, order of columns and dtypes of the result.
          generator: The source of numbers within their bins.
        """
        columns = {}
        for place, (name, column) in enumerate(self.columns.items()):
            level = codes[:, place]
            absent = level == MISSING
            columns[name] = (column.values(np.where(absent, 0, level), generator), absent)
        return layout.restore(self, columns)

    def part(self, names: Sequence[str]) -> Schema:
        """Returns the schema of some columns.

        Args:
          names: Their names.
        """
        return Schema({name: self.columns[name] for name in names})

    def arrays(self, data: TableData) -> dict[str, np.ndarray]:
        """Returns the described columns of a data set, which may have others too.

        Args:
          data: A data set with at least these columns. Values are not checked, see `encode`.

        Returns:
          Dict of arrays of shape [records].

        Raises:
          ValueError: A column is absent or of another length.
        """
        present = set(_names(data))
        return self._arrays({name: data[name] for name in self.columns if name in present})

    def _arrays(self, data: TableData) -> dict[str, np.ndarray]:
        names = _names(data)
        if absent := [name for name in self.columns if name not in names]:
            raise ValueError(f"data lacks described columns: {', '.join(map(repr, absent))}.")
        # Unknown names are counted and not shown: without a header, they are the first record.
        if unknown := [place for place, name in enumerate(names, 1) if name not in self.columns]:
            raise ValueError(
                f"data has columns that are not in the schema, at positions {unknown}: drop them."
            )
        arrays = {name: _plain(name, data[name]) for name in self.columns}
        lengths = {name: len(array) for name, array in arrays.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(
                f"Lengths differ: {lengths}. Every column needs one entry for each record."
            )
        return arrays


@dataclasses.dataclass(frozen=True)
class Layout:
    """The public container, order of columns and dtypes of a data set.

    ```python
    >>> import numpy as np
    >>> from tfp_dpvi.data import Binary, Layout, Schema
    >>> schema = Schema({"smokes": Binary()})
    >>> layout = Layout.of({"smokes": np.array([1, 0, 1], "int8")}, schema)
    >>> schema.decode(np.array([[0], [1]]), layout, np.random.default_rng())["smokes"]
    array([0, 1], dtype=int8)

    ```

    Attributes:
      is_frame: True for a pandas DataFrame, False for a dict of arrays.
      dtypes: The columns' dtypes by name, in the data's order.
    """

    is_frame: bool
    dtypes: Mapping[str, np.dtype]

    @classmethod
    @_deprecation.renamed_argument("table", "schema")
    def of(cls, data: TableData, schema: Schema) -> Layout:
        """Returns the layout of a data set, without reading its values.

        Args:
          data: A data set that `schema.encode` accepts.
          schema: The public description of its columns.

        Raises:
          ValueError: A dtype cannot hold all values that the description allows, which samples may
            have.
        """
        is_frame = _is_frame(data)
        dtypes = {
            name: data[name].dtype if is_frame else _plain(name, data[name]).dtype
            for name in _names(data)
        }
        for name, dtype in dtypes.items():
            _check_dtype(name, dtype, schema.columns[name].description)
            if isinstance(dtype, np.dtype) and dtype.kind in "US":
                # Its width would reveal the longest value of the records.
                dtypes[name] = np.dtype(dtype.kind)
        return cls(is_frame, dtypes)

    def to_config(self) -> dict[str, bool | list[tuple[Hashable, str]]]:
        """Returns plain values for `from_config`."""
        dtypes: list[tuple[Hashable, str]] = [
            (name, _dtype_name(dtype)) for name, dtype in self.dtypes.items()
        ]
        return {"is_frame": self.is_frame, "dtypes": dtypes}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Layout:
        """Returns the layout from `to_config`."""
        return cls(
            config["is_frame"], {name: _dtype_named(dtype) for name, dtype in config["dtypes"]}
        )

    @_deprecation.renamed_argument("table", "schema")
    def restore(
        self, schema: Schema, columns: Mapping[str, tuple[np.ndarray, np.ndarray]]
    ) -> TableData:
        """Returns a data set in this layout.

        Args:
          schema: The public description of the columns.
          columns: By name, each column's values and its mask of missing ones, both of shape [n].
        """
        described = {name: column.description for name, column in schema.columns.items()}
        data = {
            name: _restore(described[name], dtype, *columns[name])
            for name, dtype in self.dtypes.items()
        }
        if not self.is_frame:
            return data
        import pandas

        return pandas.DataFrame(data)


def _dtype_name(dtype: np.dtype) -> str:
    if isinstance(dtype, np.dtype):
        return dtype.str
    # `_restore` uses the public categories.
    return "ordered" if getattr(dtype, "ordered", False) else f"pandas {dtype}"


def _dtype_named(name: str) -> np.dtype:
    if name != "ordered" and not name.startswith("pandas "):
        return np.dtype(name)
    import pandas

    if name == "ordered":
        return pandas.CategoricalDtype(ordered=True)
    return pandas.api.types.pandas_dtype(name.removeprefix("pandas "))


def _is_frame(data: TableData) -> bool:
    return hasattr(data, "columns") and hasattr(data, "to_numpy") and hasattr(data, "iloc")


def _names(data: TableData) -> list[str]:
    if not _is_frame(data) and not isinstance(data, Mapping):
        raise TypeError(
            f"data must be a pandas DataFrame or a dict of arrays, got {type(data).__name__}."
        )
    # A DataFrame iterates over its columns.
    names = list(data)
    if twice := [place for place, name in enumerate(names, 1) if names.count(name) > 1]:
        raise ValueError(f"data has columns of the same name, at positions {twice}: rename them.")
    return names


def _plain(name: str, values: np.ndarray) -> np.ndarray:
    if isinstance(values, np.ma.MaskedArray):
        raise TypeError(f"column {name!r} is a masked array: use NaN or None for missing values.")
    is_extension = hasattr(values, "dtype") and not isinstance(values.dtype, np.dtype)
    array = np.asarray(values, object) if is_extension else np.asarray(values)
    if array.ndim != 1:
        raise ValueError(
            f"column {name!r} has shape {list(array.shape)}: it must have one dimension."
        )
    return array


def _check_dtype(name: str, dtype: np.dtype, column: Column) -> None:
    if hasattr(dtype, "categories") and not isinstance(column, Categorical):
        # The categories come from the records: samples of this dtype would reveal them.
        raise ValueError(
            f"column {name!r} has dtype category, whose categories may come from the records: use "
            "numbers or Categorical."
        )
    if getattr(dtype, "tz", None) is not None:
        raise ValueError(f"column {name!r} has a time zone: drop it, dt.tz_localize(None).")
    if not isinstance(dtype, np.dtype) or dtype.kind == "O":
        return
    if dtype.kind not in column.kinds:
        other = {"i": "Integer", "u": "Integer", "M": "Date"}.get(dtype.kind, "Categorical")
        raise ValueError(
            f"column {name!r} has dtype {check.dtype_name(dtype)}, but is described as "
            f"{type(column).__name__}: describe it as {other}."
        )
    if column.missing and dtype.kind not in "fM":
        raise ValueError(
            f"column {name!r}: its dtype {dtype} cannot hold missing values: convert it to float64."
        )
    for value in _values_to_hold(dtype, column):
        try:
            with np.errstate(all="ignore"):
                fits = bool(np.array(value).astype(dtype) == value)
        except (OverflowError, TypeError, ValueError):
            fits = False
        if not fits:
            raise ValueError(
                f"column {name!r} may have {value!r}, which does not fit its dtype {dtype}: "
                "convert it."
            )


def _values_to_hold(dtype: np.dtype, column: Column) -> Sequence[Hashable]:
    """Returns the values that a dtype must hold to hold all that a description allows."""
    if isinstance(column, Integer) and dtype.kind != "M":
        return int(column.lower), int(column.upper)
    if isinstance(column, Categorical) and dtype.kind not in "US":
        return column.categories
    return ()


def _restore(column: Column, dtype: np.dtype, values: np.ndarray, absent: np.ndarray) -> np.ndarray:
    if not isinstance(dtype, np.dtype):
        import pandas

        if isinstance(dtype, pandas.CategoricalDtype) and isinstance(column, Categorical):
            # The public categories: the dtype would reveal the data's own.
            dtype = pandas.CategoricalDtype(list(column.categories), ordered=dtype.ordered)
        return pandas.array(_objects(column, values, absent), dtype=dtype)
    if dtype.kind == "O":
        return _objects(column, values, absent)
    if dtype.kind in "US":
        # With the width of the public categories.
        return values.astype(dtype.kind)
    array = values.astype(dtype)
    if dtype.kind == "M":
        array[absent] = np.datetime64("NaT")
    if dtype.kind == "f":
        if isinstance(column, Numeric):
            array = np.clip(array, *_bounds(column, dtype))
        array[absent] = np.nan
    return array


def _bounds(column: Numeric, dtype: np.dtype) -> tuple[np.floating, np.floating]:
    """Returns the smallest and the largest number of a float dtype within a column's bounds."""
    low, high = dtype.type(column.lower), dtype.type(column.upper)
    # Rounding to the dtype can exceed the bounds.
    low = np.nextafter(low, dtype.type(np.inf)) if float(low) < column.lower else low
    high = np.nextafter(high, dtype.type(-np.inf)) if float(high) > column.upper else high
    return low, high


def _objects(column: Column, values: np.ndarray, absent: np.ndarray) -> np.ndarray:
    array = values.astype(object)
    if isinstance(column, (Numeric, Binary)):
        # Python's numbers instead of NumPy's.
        array[:] = values.tolist()
    array[absent] = None
    return array
