"""The one place that knows data frames: pandas, polars and Arrow, read and built.

Frames and series are read by narwhals, which also reads Modin's and others of pandas' kind; those
come back as pandas frames.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeAlias

import narwhals as nw
import numpy as np

Container: TypeAlias = str
"""What holds columns: "dict", "pandas", "polars" or "pyarrow"."""

Dtype: TypeAlias = Any
"""A dtype of NumPy, pandas or polars, or a type of Arrow."""

Native: TypeAlias = Any
"""A frame, a column, or a part of either, of a library that need not be installed."""

_INTEGERS = (nw.Int8, nw.Int16, nw.Int32, nw.Int64, nw.Int128)
_UNSIGNED = (nw.UInt8, nw.UInt16, nw.UInt32, nw.UInt64, nw.UInt128)
_NO_VALUES = (nw.List, nw.Array, nw.Struct, nw.Duration, nw.Time, nw.Binary)
_KINDS = {
    "b": (nw.Boolean,),
    "i": _INTEGERS,
    "u": _UNSIGNED,
    "f": (nw.Float16, nw.Float32, nw.Float64),
    "U": (nw.String,),
    "M": (nw.Date, nw.Datetime),
    "O": (nw.Object,),
    "decimal": (nw.Decimal,),
    "category": (nw.Categorical, nw.Enum),
}


def container_of(value: Native) -> Container | None:
    """Returns the kind of a data frame; None for all that is none.

    Args:
      value: Native value.

    Raises:
      TypeError: The frame is lazy.
    """
    if isinstance(value, np.ndarray | Mapping | tuple | list):
        return None
    if _is_record_batch(value):
        return "pyarrow"
    if not nw.dependencies.is_into_dataframe(value):
        if isinstance(nw.from_native(value, pass_through=True), nw.LazyFrame):
            raise TypeError(
                f"A lazy frame ({type(value).__name__}) has no rows yet: pass what its collect() "
                "returns."
            )
        return None
    native = {"polars": nw.dependencies.is_polars_dataframe, "pyarrow": _is_arrow_table}
    return next((name for name, test in native.items() if test(value)), "pandas")


def names_of(frame: Native) -> list[Native]:
    """Returns the names of a frame's columns, which pandas and Arrow let be the same."""
    return list(frame.schema.names if container_of(frame) == "pyarrow" else frame.columns)


def columns_of(frame: Native) -> dict[str, nw.Series]:
    """Returns a frame's columns by name.

    Args:
      frame: A frame whose columns have unique names.
    """
    if _is_record_batch(frame):
        frame = nw.dependencies.get_pyarrow().Table.from_batches([frame])
    return {column.name: column for column in nw.from_native(frame, eager_only=True).iter_columns()}


def as_series(value: Native) -> nw.Series | None:
    """Returns a column of pandas, polars or Arrow by itself; None for all that is none."""
    if isinstance(value, nw.Series):
        return value
    if isinstance(value, np.ndarray | Mapping | tuple | list):
        return None
    arrow = nw.dependencies.get_pyarrow()
    if arrow is not None and isinstance(value, arrow.Array):
        value = arrow.chunked_array([value])
    if not nw.dependencies.is_into_series(value):
        return None
    return nw.from_native(value, series_only=True)


def numeric(name: str, column: nw.Series) -> np.ndarray:
    """Returns a column of numbers as an array; missing numbers are NaN.

    Args:
      name: The column, for messages.
      column: The column.

    Returns:
      Array of shape [n] of bools, integers or floats.

    Raises:
      TypeError: The column has no numbers.
    """
    kind = kind_of(column)
    missing = column.null_count() > 0
    if kind == "b" and missing:
        column = column.cast(nw.Float64)
    readable = kind in ("b", "i", "u", "f") or (kind in ("category", "other") and not missing)
    array = np.zeros(0, object)
    if readable and not isinstance(column.dtype, nw.Int128 | nw.UInt128):
        array = column.to_numpy()
    if array.dtype.kind not in "biuf" or array.ndim != 1:
        raise TypeError(
            f"{name} has dtype {shown(column)}, which is not numeric: cast it to float32, or code "
            "categories as integers."
        )
    return array


def array_of(name: str, column: nw.Series, texts: bool = False) -> np.ndarray:
    """Returns a column of numbers, or of texts, as an array.

    Args:
      name: The column, for messages.
      column: The column.
      texts: Whether it may have texts.

    Returns:
      Array of shape [n]: numbers as of `numeric`, or an array of objects that are texts.

    Raises:
      TypeError: The column has neither.
      ValueError: Texts are missing.
    """
    if not texts or not isinstance(column.dtype, nw.String | nw.Categorical | nw.Enum | nw.Object):
        return numeric(name, column)
    values = column.to_list()
    present = column.drop_nulls().to_list()
    if not all(isinstance(value, str) for value in present):
        return numeric(name, column)
    if len(present) < len(values):
        raise ValueError(f"{name} has missing texts: replace them by a text, such as 'missing'.")
    array = np.empty(len(column), object)
    array[:] = values
    return array


def values_of(name: str, column: nw.Series) -> np.ndarray:
    """Returns a column's values, each as it is; missing ones are None, NaN or NaT.

    Args:
      name: The column's name, for messages.
      column: The column.

    Returns:
      Array of shape [n].

    Raises:
      ValueError: Its values are lists, durations or others that no description allows.
    """
    check_readable(name, column)
    if kind_of(column) in ("f", "M", "O"):
        return column.to_numpy()
    absent = column.is_null().to_numpy().astype(bool)
    if not absent.any() and not isinstance(column.dtype, nw.Int128 | nw.UInt128):
        return column.to_numpy()
    # NumPy's integers and Arrow's dictionaries have no missing values.
    values = np.empty(len(column), object)
    values[:] = column.to_list()
    values[absent] = None
    return values


def check_readable(name: str, column: nw.Series) -> None:
    """Raises `ValueError` if no description allows a column's dtype.

    Args:
      name: The column's name, for messages.
      column: The column, whose values are not read.
    """
    if getattr(column.dtype, "time_zone", None) is not None:
        raise ValueError(
            f"column {name!r} has a time zone: drop it, for pandas by dt.tz_localize(None)."
        )
    if kind_of(column) == "none":
        raise ValueError(
            f"column {name!r} has dtype {shown(column)}, which no description allows: convert it "
            "to numbers, dates or strings, or drop it."
        )


def kind_of(column: nw.Series) -> str:
    """Returns the kind of a column's values.

    It is a letter as of NumPy's dtypes, or "decimal" or "category"; "none" of values that no
    description allows, and "other" of those that only a list of categories can describe.
    """
    dtype = dtype_of(column)
    if isinstance(dtype, np.dtype):
        return str(dtype.kind) if dtype.kind in "biufMUSO" else "none"
    # pandas' sparse dtypes have another inside, as its intervals have.
    inner = getattr(dtype, "subtype", None)
    if isinstance(inner, np.dtype) and hasattr(dtype, "fill_value"):
        return str(inner.kind)
    if str(dtype) == "date64[ms]" or str(dtype) == "date64[ms][pyarrow]":
        return "M"
    if isinstance(column.dtype, _NO_VALUES):
        return "none"
    if str(dtype).startswith("decimal"):
        # Arrow's are of four widths, of which narwhals knows one.
        return "decimal"
    found = (kind for kind, dtypes in _KINDS.items() if isinstance(column.dtype, dtypes))
    return next(found, "other")


def float_type(column: nw.Series) -> type[np.floating]:
    """Returns the NumPy type of a column of floats."""
    known: dict[Native, type[np.floating]] = {nw.Float16: np.float16, nw.Float32: np.float32}
    dtype = dtype_of(column)
    inner = dtype if isinstance(dtype, np.dtype) else getattr(dtype, "subtype", None)
    if isinstance(inner, np.dtype):
        return inner.type
    return known.get(type(column.dtype), np.float64)


def dtype_of(column: nw.Series) -> Dtype:
    """Returns a column's own dtype."""
    native = nw.to_native(column)
    return native.dtype if hasattr(native, "dtype") else native.type


def shown(column: nw.Series) -> str:
    """Returns a column's dtype for messages, without categories, which may be those of records."""
    dtype = dtype_of(column)
    if isinstance(column.dtype, nw.Struct | nw.Enum | nw.Categorical):
        return type(column.dtype).__name__
    return str(dtype)


# ------------------------------------------------------------------------------- building


def make_column(container: Container, dtype: Dtype, values: Native) -> Native:
    """Returns a column of a container.

    Args:
      container: "pandas", "polars" or "pyarrow".
      dtype: The column's dtype, which is none of NumPy's.
      values: A list, with None for missing values, or a datetime64 array with NaT for them.
    """
    if isinstance(values, np.ndarray) and values.dtype != np.dtype("datetime64[D]"):
        # polars and Arrow know neither hours nor minutes, polars no seconds.
        values = values.astype("datetime64[ms]")
    if container == "pandas":
        import pandas

        if isinstance(values, np.ndarray):
            # Arrow's types take neither dates for times nor NumPy's dates.
            values = pandas.Series(values.astype("datetime64[us]")).astype(dtype).array
        return pandas.array(values, dtype=dtype)
    if container == "polars":
        import polars

        if isinstance(values, np.ndarray):
            return polars.Series(values).cast(dtype, strict=True)
        return polars.Series(values, dtype=dtype, strict=True)
    import pyarrow

    if isinstance(values, np.ndarray):
        return pyarrow.chunked_array([pyarrow.array(values).cast(dtype)])
    return pyarrow.chunked_array([pyarrow.array(values, type=dtype)])


def make_frame(container: Container, columns: dict[str, Native]) -> Native:
    """Returns a frame.

    Args:
      container: "pandas", "polars" or "pyarrow".
      columns: Arrays and columns of `make_column` by name.
    """
    if container == "polars":
        import polars

        return polars.DataFrame(columns)
    if container == "pyarrow":
        import pyarrow

        return pyarrow.table(columns)
    import pandas

    # Of arrays of objects, pandas would choose the dtypes anew.
    series = {
        name: pandas.Series(part, dtype=getattr(part, "dtype", None))
        for name, part in columns.items()
    }
    return pandas.DataFrame(series)


def example(container: Container, dtype: Dtype) -> nw.Series:
    """Returns a column of a dtype without values.

    Args:
      container: "pandas", "polars" or "pyarrow".
      dtype: The dtype.
    """
    if isinstance(dtype, np.dtype):
        import pandas

        return nw.from_native(pandas.Series(np.zeros(0, dtype)), series_only=True)
    column = make_column(container, dtype, [])
    if container == "pandas":
        import pandas

        column = pandas.Series(column)
    return nw.from_native(column, series_only=True)


def of_categories(container: Container, dtype: Dtype, categories: list[Native]) -> Dtype:
    """Returns a dtype with public categories in place of those that it has, if it has any.

    Args:
      container: "pandas", "polars" or "pyarrow".
      dtype: The dtype.
      categories: The public categories.
    """
    if container == "pandas" and hasattr(dtype, "categories"):
        import pandas

        return pandas.CategoricalDtype(categories, ordered=dtype.ordered)
    if container == "polars" and type(dtype).__name__ == "Enum":
        import polars

        # Others do not come back, which `Layout.of` then says of them alone.
        return polars.Enum([category for category in categories if isinstance(category, str)])
    return dtype


# ------------------------------------------------------------------------------- saving


def dtype_to_text(container: Container, dtype: Dtype) -> str:
    """Returns a dtype as text, without categories, for `dtype_from_text`.

    Args:
      container: "dict", "pandas", "polars" or "pyarrow".
      dtype: The dtype.
    """
    if isinstance(dtype, np.dtype):
        return dtype.str
    if container == "pyarrow":
        return f"arrow {dtype}"
    if container == "polars":
        parameters = ("precision", "scale", "time_unit")
        parts = [str(getattr(dtype, name)) for name in parameters if hasattr(dtype, name)]
        return " ".join(["polars", str(dtype).partition("(")[0], *parts])
    if hasattr(dtype, "pyarrow_dtype"):
        return f"arrow {dtype.pyarrow_dtype}"
    if hasattr(dtype, "ordered"):
        return "ordered" if dtype.ordered else "pandas category"
    if hasattr(dtype, "storage"):
        return f"string {dtype.storage} {'NaN' if isinstance(dtype.na_value, float) else 'NA'}"
    if hasattr(dtype, "fill_value"):
        return f"sparse {dtype.subtype.str} {float(dtype.fill_value)}"
    return f"pandas {dtype}"


def dtype_from_text(container: Container, text: str) -> Dtype:
    """Returns the dtype of `dtype_to_text`.

    Args:
      container: "dict", "pandas", "polars" or "pyarrow".
      text: The text.

    Raises:
      ValueError: There is no such dtype.
    """
    family = text.partition(" ")[0]
    name = text.removeprefix(family).strip()
    if family == "arrow":
        return _arrow_type(name) if container == "pyarrow" else _pandas_of_arrow(name)
    if family == "polars":
        return _polars_dtype(name)
    if family not in ("ordered", "pandas", "sparse", "string"):
        return np.dtype(text)
    import pandas

    if family == "ordered":
        return pandas.CategoricalDtype(ordered=True)
    if family == "string":
        storage, missing = name.split()
        return pandas.StringDtype(storage, na_value=np.nan if missing == "NaN" else pandas.NA)
    if family == "sparse":
        inner, fill = name.split()
        return pandas.SparseDtype(np.dtype(inner), np.dtype(inner).type(float(fill)))
    return pandas.api.types.pandas_dtype(name)


def is_common(container: Container, dtype: Dtype) -> bool:
    """Returns whether columns of a dtype can be read, and it comes back from its text.

    Args:
      container: "dict", "pandas", "polars" or "pyarrow".
      dtype: The dtype, whose categories are left out.
    """
    try:
        example(container, dtype).to_numpy()
        if hasattr(dtype, "categories"):
            return type(dtype).__name__ in ("CategoricalDtype", "Enum", "Categorical")
        return bool(dtype_from_text(container, dtype_to_text(container, dtype)) == dtype)
    except Exception:
        # Libraries raise errors of their own for dtypes that they know in part.
        return False


def _arrow_type(name: str) -> Dtype:
    import pyarrow

    if parts := re.fullmatch(r"decimal(32|64|128|256)\((\d+), (-?\d+)\)", name):
        make = {bits: f"decimal{bits}" for bits in ("32", "64", "128", "256")}[parts[1]]
        return getattr(pyarrow, make)(int(parts[2]), int(parts[3]))
    if parts := re.fullmatch(r"dictionary<values=(\w+), indices=(\w+), ordered=([01])>", name):
        values, indices = pyarrow.type_for_alias(parts[1]), pyarrow.type_for_alias(parts[2])
        return pyarrow.dictionary(indices, values, ordered=parts[3] == "1")
    return pyarrow.type_for_alias(name)


def _pandas_of_arrow(name: str) -> Dtype:
    import pandas

    return pandas.ArrowDtype(_arrow_type(name))


def _polars_dtype(text: str) -> Dtype:
    import polars

    name, *parameters = text.split()
    if name == "Datetime":
        unit: Native = parameters[0]
        return polars.Datetime(unit)
    if name == "Decimal":
        return polars.Decimal(int(parameters[0]), int(parameters[1]))
    if name == "Enum":
        return polars.Enum([])
    simple = ("Boolean", "String", "Date", "Categorical", "Object")
    if name not in simple and not re.fullmatch(r"U?Int\d+|Float\d+", name):
        raise ValueError(f"dtype {name} of polars is not known.")
    return getattr(polars, name)()


def _is_arrow_table(value: Native) -> bool:
    return bool(nw.dependencies.is_pyarrow_table(value))


def _is_record_batch(value: Native) -> bool:
    arrow = nw.dependencies.get_pyarrow()
    return arrow is not None and isinstance(value, arrow.RecordBatch)
