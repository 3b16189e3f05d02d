"""The public schema of a data set's columns, and the coding of data sets as levels and back."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import json
import math
import warnings
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from tfp_dpvi import _deprecation
from tfp_dpvi import _validate as check
from tfp_dpvi.data import describe, frames
from tfp_dpvi.data.columns import (
    MISSING,
    Binary,
    Categorical,
    Column,
    Integer,
    Numeric,
    is_missing,
)
from tfp_dpvi.data.dates import Date

TableData: TypeAlias = Any
"""A DataFrame of pandas, polars or Arrow, or a dict of one-dimensional arrays."""

Described: TypeAlias = "Schema | Mapping[str, Any]"
"""A schema, or what `Schema.from_dict` takes."""


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
    def of(cls, schema: Described) -> Schema:
        """Returns a schema, or that of what `from_dict` takes.

        Args:
          schema: A schema or a dict.

        Raises:
          TypeError: It is neither.
          ValueError: A type or an argument is unknown.
        """
        if isinstance(schema, Schema):
            return schema
        if not isinstance(schema, Mapping):
            raise TypeError(
                f"schema={check.shown(schema)} must be a dpvi.Schema, or what Schema.from_dict "
                "takes."
            )
        return cls.from_dict(schema)

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

    @property
    def lines(self) -> dict[str, str]:
        """The text for reports of each column, by name."""
        return {name: _line(name, part, part.described) for name, part in self.columns.items()}

    def __str__(self) -> str:
        return "\n".join(self.lines.values())

    @property
    def asked(self) -> str:
        """The text of what is declared of each column, with the question for public sources."""
        return "\n".join(
            describe.with_sources(_line(name, part, part.declared), describe.questions(name, part))
            for name, part in self.columns.items()
        )

    def questions(self) -> list[str]:
        """Returns what a curator must be able to answer before the schema is used.

        Whatever the schema says is as if published: each statement needs a source other than the
        records.
        """
        return [
            question
            for name, column in self.columns.items()
            for question in describe.questions(name, column).values()
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
          data: A DataFrame of pandas, polars or Arrow, or a dict of one-dimensional
            arrays, with exactly the described columns in any order.

        Returns:
          int32 array of shape [records, columns]: each column's level, -1 where missing.

        Raises:
          ValueError: A column is unknown, absent or of another length, or has a value that its
            description does not allow.
          TypeError: The data are neither a DataFrame nor a dict, or have a masked array.
        """
        self.check_names(data)
        arrays = self.arrays(data)
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
        return layout.restore(self, self.values(codes, generator))

    def values(
        self, codes: np.ndarray, generator: np.random.Generator
    ) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Returns values with these levels, for `Layout.restore`.

        Args:
          codes: Integer array of shape [records, columns], -1 for missing values.
          generator: The source of numbers within their bins.

        Returns:
          By name, each column's values and its mask of missing ones, both of shape [records].
        """
        columns = {}
        for place, (name, column) in enumerate(self.columns.items()):
            level = codes[:, place]
            absent = level == MISSING
            columns[name] = (column.values(np.where(absent, 0, level), generator), absent)
        return columns

    def check_names(self, data: TableData) -> None:
        """Checks that data have exactly the described columns, without reading a value.

        Args:
          data: A DataFrame of pandas, polars or Arrow, or a dict of one-dimensional arrays.

        Raises:
          ValueError: A column is unknown or absent.
          TypeError: The data are neither a DataFrame nor a dict.
        """
        names = self._check_present(data)
        # Unknown names are counted and not shown: without a header, they are the first record.
        if unknown := [place for place, name in enumerate(names, 1) if name not in self.columns]:
            raise ValueError(
                f"data has columns that are not in the schema, at positions {unknown}: drop them."
            )

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
        self._check_present(data)
        columns = data if frames.container_of(data) is None else frames.columns_of(data)
        arrays = {name: _array(name, columns[name]) for name in self.columns}
        lengths = {name: len(array) for name, array in arrays.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(
                f"Lengths differ: {lengths}. Every column needs one entry for each record."
            )
        return arrays

    def _check_present(self, data: TableData) -> list[str]:
        names = _names(data)
        if absent := [name for name in self.columns if name not in names]:
            raise ValueError(f"data lacks described columns: {', '.join(map(repr, absent))}.")
        return names


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
      container: "pandas", "polars" or "pyarrow" for a frame, "dict" for a dict of arrays.
      dtypes: The columns' dtypes by name, in the data's order.
    """

    container: str
    dtypes: Mapping[str, frames.Native]

    @classmethod
    @_deprecation.renamed_argument("table", "schema")
    def of(cls, data: TableData, schema: Schema) -> Layout:
        """Returns the layout of a data set, without reading its values.

        Args:
          data: A data set that `schema.encode` accepts.
          schema: The public description of its columns.

        Raises:
          ValueError: A dtype cannot hold all values that the description allows, which samples may
            have. It is found by building the extreme values, all categories and a missing value.
        """
        _names(data)
        container = frames.container_of(data)
        if container is None:
            dtypes = {name: _array(name, data[name]).dtype for name in data}
            examples = {}
        else:
            examples = {name: part.head(0) for name, part in frames.columns_of(data).items()}
            dtypes = {name: frames.dtype_of(column) for name, column in examples.items()}
        container = container or "dict"
        for name, dtype in dtypes.items():
            column = schema.columns[name].description
            _check_kind(name, container, dtype, examples.get(name), column)
            if isinstance(dtype, np.dtype) and dtype.kind in "US":
                # Its width would reveal the longest value of the records.
                dtypes[name] = np.dtype(dtype.kind)
            _check_values(name, container, dtypes[name], column)
        return cls(container, dtypes)

    def check_objects(self, data: TableData, schema: Schema) -> None:
        """Checks that columns of objects have none that would come back as another type.

        Args:
          data: The data set, whose values the schema allows.
          schema: The public description of its columns.

        Raises:
          ValueError: Numbers are decimals, or days are times.
        """
        for name, dtype in self.dtypes.items():
            column = schema.columns[name]
            if not (isinstance(column, Numeric) and isinstance(dtype, np.dtype)):
                continue
            is_date = isinstance(column, Date)
            if dtype.kind != "O" or (is_date and column.unit != "D"):
                continue
            values = schema.part([name]).arrays(data)[name]
            kind = datetime.datetime if is_date else decimal.Decimal
            wrong = np.array([isinstance(value, kind) for value in values]) & ~is_missing(values)
            if wrong.any():
                advice = "times, described as days: convert it to datetime64, or pass unit="
                raise ValueError(
                    f"column {name!r} of objects has, in {check.rows(wrong)}, "
                    f"{advice if is_date else 'decimals: cast it to float64'}."
                )

    def to_config(self) -> dict[str, str | list[tuple[Hashable, str]]]:
        """Returns plain values for `from_config`."""
        dtypes: list[tuple[Hashable, str]] = [
            (name, frames.dtype_to_text(self.container, dtype))
            for name, dtype in self.dtypes.items()
        ]
        return {"container": self.container, "dtypes": dtypes}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Layout:
        """Returns the layout from `to_config`."""
        # Files of 0.2 tell pandas' frames from dicts alone.
        container = config.get("container", "pandas" if config.get("is_frame") else "dict")
        dtypes = {name: frames.dtype_from_text(container, text) for name, text in config["dtypes"]}
        return cls(container, dtypes)

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
            name: _restore(self.container, dtype, described[name], *columns[name])
            for name, dtype in self.dtypes.items()
        }
        return data if self.container == "dict" else frames.make_frame(self.container, data)


def _line(name: str, column: Column, text: str) -> str:
    return f"{name}: {text}{', may be missing' if column.missing else ''}"


def _names(data: TableData) -> list[str]:
    if frames.container_of(data) is not None:
        names = frames.names_of(data)
    elif isinstance(data, Mapping):
        names = list(data)
    else:
        raise TypeError(
            "data must be a DataFrame of pandas, polars or Arrow, or a dict of arrays, got "
            f"{check.shown(data)}."
        )
    if twice := [place for place, name in enumerate(names, 1) if names.count(name) > 1]:
        raise ValueError(f"data has columns of the same name, at positions {twice}: rename them.")
    return names


def _array(name: str, values: frames.Native) -> np.ndarray:
    if isinstance(values, np.ma.MaskedArray):
        raise TypeError(f"column {name!r} is a masked array: use NaN or None for missing values.")
    series = frames.as_series(values)
    array = np.asarray(values) if series is None else frames.values_of(name, series)
    if array.ndim != 1:
        raise ValueError(
            f"column {name!r} has shape {list(array.shape)}: it must have one dimension."
        )
    return array


_ADVICE = {
    "i": "describe it as Integer",
    "u": "describe it as Integer",
    "f": "describe it as Continuous",
    "b": "describe it as Binary",
    "M": "describe it as Date",
    "T": "convert it by astype(str)",
    "decimal": "cast it to float64",
}


def _check_kind(
    name: str, container: str, dtype: frames.Native, example: frames.Native, column: Column
) -> None:
    """Checks that a dtype is of a kind that a description allows."""
    if example is None:
        kind, text = dtype.kind, check.dtype_name(dtype)
    else:
        kind, text = frames.kind_of(example), frames.shown(example)
        frames.check_readable(name, example)
        if text.lower().startswith("null"):
            raise ValueError(
                f"column {name!r} has dtype {text}, which has no values: cast it to the dtype of "
                "the values that it may have, or drop it."
            )
        if not frames.is_common(container, dtype):
            raise ValueError(
                f"column {name!r} has dtype {text}, which synthetic tables do not have: convert "
                "it to a common one."
            )
    if kind == "category" and not isinstance(column, Categorical):
        # The categories come from the records: samples of this dtype would reveal them.
        raise ValueError(
            f"column {name!r} has dtype category, whose categories may come from the records: use "
            "numbers or Categorical."
        )
    if kind == "O" or (
        isinstance(column, Categorical) and kind in ("category", "decimal", "other")
    ):
        return
    if kind == "decimal" and isinstance(column, Integer) and not isinstance(column, Date):
        return
    if kind in column.kinds:
        return
    listed = isinstance(column, Categorical)
    other = "convert it to numbers or strings" if listed else "describe it as Categorical"
    advice = _ADVICE.get(kind, other)
    if isinstance(column, Date):
        advice = "convert it to dates, for pandas by pandas.to_datetime(column, format=...), "
        advice += "of periods by column.dt.to_timestamp()"
    raise ValueError(
        f"column {name!r} has dtype {text}, but is described as {type(column).__name__}: {advice}."
    )


def _check_values(name: str, container: str, dtype: frames.Native, column: Column) -> None:
    """Checks that a dtype holds what a description allows, by building and reading it.

    Raises:
      ValueError: A value or a missing one does not come back.
    """
    if _comes_back(name, container, dtype, column, _values_to_hold(column), column.missing):
        return
    text = check.dtype_name(dtype) if isinstance(dtype, np.dtype) else _text(container, dtype)
    for value in _values_to_hold(column):
        if not _comes_back(name, container, dtype, column, [value], False):
            shown = column.as_text(value) if isinstance(column, Date) else repr(value)
            if isinstance(column, Categorical):
                raise ValueError(
                    f"column {name!r} has dtype {text}, which does not hold the category {shown}: "
                    "list categories of this dtype, or convert the column."
                )
            raise ValueError(
                f"column {name!r} may have {shown}, which does not fit its dtype {text}: convert "
                "it to a wider one."
            )
    raise ValueError(
        f"column {name!r}: its dtype {text} cannot hold missing values: convert it to "
        f"{'object' if isinstance(column, Categorical) else 'float64'}, or fill them."
    )


def _text(container: str, dtype: frames.Native) -> str:
    return frames.shown(frames.example(container, dtype))


def _values_to_hold(column: Column) -> Sequence[frames.Native]:
    """Returns the values that a dtype must hold to hold all that a description allows."""
    if isinstance(column, Integer):
        # A dtype of days holds the ends of hours alone.
        return int(column.lower), int(column.lower) + 1, int(column.upper)
    if isinstance(column, Numeric):
        width = column.upper - column.lower
        return column.lower, column.lower + width / math.e, column.upper
    return column.categories if isinstance(column, Categorical) else (False, True)


def _comes_back(
    name: str,
    container: str,
    dtype: frames.Native,
    column: Column,
    values: Sequence[frames.Native],
    missing: bool,
) -> bool:
    """Returns whether values, and a missing one if it is allowed, are the same when read again."""
    absent = np.array([False] * len(values) + [True] * missing)
    listed = np.empty(len(absent), object)
    listed[:] = [*values, *values[:1]] if missing else list(values)
    drawn = listed if isinstance(column, Categorical) else np.array(listed.tolist())
    if isinstance(column, Date):
        drawn = drawn.astype(f"datetime64[{column.unit}]")
    try:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            # A conversion that warns is compared like all others.
            warnings.simplefilter("ignore")
            restored = _restore(container, dtype, column, drawn, absent)
            if container != "dict":
                restored = frames.columns_of(frames.make_frame(container, {name: restored}))[name]
            back = _array(name, restored)
            if not np.array_equal(is_missing(back), absent):
                return False
            there = back[~absent]
            if not isinstance(column, Numeric):
                same = column.levels_of(name, there) == column.levels_of(name, drawn[~absent])
                return bool(np.all(same))
            error = np.abs(column.numbers_of(name, there) - np.array(values, np.float64))
            allowed = 0.0 if column.step else (column.upper - column.lower) / 100.0
            return bool(np.all(error <= allowed))
    except Exception:
        # Libraries raise errors of their own for values that a dtype does not hold.
        return False


def _restore(
    container: str, dtype: frames.Native, column: Column, values: np.ndarray, absent: np.ndarray
) -> frames.Native:
    """Returns a column of a dtype with these values."""
    if not isinstance(dtype, np.dtype):
        return _restore_extension(container, dtype, column, values, absent)
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
            array = np.clip(array, *_bounds(column, dtype.type))
        array[absent] = np.nan
    return array


def _restore_extension(
    container: str, dtype: frames.Native, column: Column, values: np.ndarray, absent: np.ndarray
) -> frames.Native:
    if isinstance(column, Categorical):
        # The public categories: the dtype would reveal the data's own.
        dtype = frames.of_categories(container, dtype, list(column.categories))
    example = frames.example(container, dtype)
    kind = frames.kind_of(example)
    if isinstance(column, Date) and kind == "M":
        dates = values.copy()
        dates[absent] = np.datetime64("NaT")
        return frames.make_column(container, dtype, dates)
    if kind == "f" and isinstance(column, Numeric):
        number = frames.float_type(example)
        values = np.clip(values.astype(number), *_bounds(column, number))
    if isinstance(column, Binary) and kind != "b":
        values = values.astype(np.int64)
    return frames.make_column(container, dtype, _objects(column, values, absent).tolist())


def _bounds(column: Numeric, number: type[np.floating]) -> tuple[np.floating, np.floating]:
    """Returns the smallest and the largest number of a float type within a column's bounds."""
    low, high = number(column.lower), number(column.upper)
    # Rounding to the dtype can exceed the bounds.
    low = np.nextafter(low, number(np.inf)) if float(low) < column.lower else low
    high = np.nextafter(high, number(-np.inf)) if float(high) > column.upper else high
    return low, high


def _objects(column: Column, values: np.ndarray, absent: np.ndarray) -> np.ndarray:
    array = values.astype(object)
    if isinstance(column, (Numeric, Binary)):
        # Python's numbers instead of NumPy's.
        array[:] = values.tolist()
    array[absent] = None
    return array
