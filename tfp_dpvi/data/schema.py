"""A table's public description, and the coding of data sets as levels and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from tfp_dpvi import _validate as check
from tfp_dpvi.data.columns import MISSING, Binary, Categorical, Column, Integer, Numeric

if TYPE_CHECKING:
    import pandas

TableData: TypeAlias = "pandas.DataFrame | Mapping[str, np.ndarray]"
"""A pandas DataFrame, or a dict of one-dimensional arrays."""


@dataclasses.dataclass(frozen=True)
class Table:
    """Names and public descriptions of columns, in order.

    Args:
      columns: dict from names to `Continuous`, `Integer`, `Date`, `Binary` or `Categorical`, from a code book instead of the
        records.
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
    def fine(self) -> Table:
        """The table of the open columns with their finest levels."""
        return Table(
            {name: column.fine for name, column in self.columns.items() if column.fine is not None}
        )

    def encode(self, data: TableData) -> np.ndarray:
        """Returns each record's levels.

        Args:
          data: pandas DataFrame, or dict of one-dimensional arrays, with exactly the described columns in any order.

        Returns:
          int32 array of shape [records, columns]: each column's level, -1 where missing.

        Raises:
          ValueError: a column that is unknown, missing or of another length; a value that its description does not allow.
          TypeError: neither a DataFrame nor a dict, or a masked array.
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
        """Returns a data set in a layout with these levels, [records, columns]: the inverse of `encode`.

        Numbers are drawn within their bins.
        """
        made = {}
        for place, (name, column) in enumerate(self.columns.items()):
            level = codes[:, place]
            absent = level == MISSING
            made[name] = (column.values(np.where(absent, 0, level), generator), absent)
        return layout.restore(self, made)

    def _arrays(self, data: TableData) -> dict[str, np.ndarray]:
        names = _names(data)
        if absent := [name for name in self.columns if name not in names]:
            raise ValueError(f"data lacks described columns: {', '.join(map(repr, absent))}.")
        # Unknown names are counted and not shown: without a header, they are the first record.
        if unknown := [place for place, name in enumerate(names, 1) if name not in self.columns]:
            raise ValueError(
                f"data has columns that are not in Table, at positions {unknown}: drop them."
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
    """The public container, order of columns and dtypes of a data set."""

    is_frame: bool  # A pandas DataFrame, or else a dict of arrays.
    dtypes: Mapping[str, np.dtype]  # By name, in the data's order.

    @classmethod
    def of(cls, data: TableData, table: Table) -> Layout:
        """Returns the layout of a data set that `table.encode` accepts, without reading its values.

        Raises:
          ValueError: a dtype that cannot hold all values that the description allows, which samples may have.
        """
        is_frame = _is_frame(data)
        dtypes = {
            name: data[name].dtype if is_frame else _plain(name, data[name]).dtype
            for name in _names(data)
        }
        for name, dtype in dtypes.items():
            _check_dtype(name, dtype, table.columns[name].description)
            if isinstance(dtype, np.dtype) and dtype.kind in "US":
                dtypes[name] = np.dtype(
                    dtype.kind
                )  # Its width would reveal the longest value of the records.
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

    def restore(
        self, table: Table, columns: Mapping[str, tuple[np.ndarray, np.ndarray]]
    ) -> TableData:
        """Returns a data set in this layout, from each column's values and its mask of missing ones."""
        described = {name: column.description for name, column in table.columns.items()}
        made = {
            name: _restore(described[name], dtype, *columns[name])
            for name, dtype in self.dtypes.items()
        }
        if not self.is_frame:
            return made
        import pandas

        return pandas.DataFrame(made)


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
    names = list(data)  # A DataFrame iterates over its columns.
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
            f"column {name!r} has dtype category, whose categories may come from the records: use numbers or Categorical."
        )
    if getattr(dtype, "tz", None) is not None:
        raise ValueError(f"column {name!r} has a time zone: drop it, dt.tz_localize(None).")
    if not isinstance(dtype, np.dtype) or dtype.kind == "O":
        return
    if dtype.kind not in column.kinds:
        other = {"i": "Integer", "u": "Integer", "M": "Date"}.get(dtype.kind, "Categorical")
        raise ValueError(
            f"column {name!r} has dtype {check.dtype_name(dtype)}, but is described as "
            f"{type(column).__name__}: describe "
            f"it as {other}."
        )
    if column.missing and dtype.kind not in "fM":
        raise ValueError(
            f"column {name!r}: its dtype {dtype} cannot hold missing values: convert it to float64."
        )
    allowed: Sequence[Hashable] = ()
    if isinstance(column, Integer) and dtype.kind != "M":
        allowed = (int(column.lower), int(column.upper))
    elif isinstance(column, Categorical) and dtype.kind not in "US":
        allowed = column.categories
    for value in allowed:
        try:
            with np.errstate(all="ignore"):
                fits = bool(np.array(value).astype(dtype) == value)
        except (OverflowError, TypeError, ValueError):
            fits = False
        if not fits:
            raise ValueError(
                f"column {name!r} may have {value!r}, which does not fit its dtype {dtype}: convert it."
            )


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
        return values.astype(dtype.kind)  # With the width of the public categories.
    made = values.astype(dtype)
    if dtype.kind == "M":
        made[absent] = np.datetime64("NaT")
    if dtype.kind == "f":
        if isinstance(column, Numeric):
            low, high = (
                dtype.type(column.lower),
                dtype.type(column.upper),
            )  # Rounding can exceed the bounds.
            low = np.nextafter(low, dtype.type(np.inf)) if float(low) < column.lower else low
            high = np.nextafter(high, dtype.type(-np.inf)) if float(high) > column.upper else high
            made = np.clip(made, low, high)
        made[absent] = np.nan
    return made


def _objects(column: Column, values: np.ndarray, absent: np.ndarray) -> np.ndarray:
    made = values.astype(object)
    if isinstance(column, (Numeric, Binary)):
        made[:] = values.tolist()  # Python's numbers.
    made[absent] = None
    return made
