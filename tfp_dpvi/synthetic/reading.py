"""Records' levels, from one table or from the parts of one that is larger than memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from tfp_dpvi.data import frames
from tfp_dpvi.data.schema import Layout, Schema, TableData
from tfp_dpvi.synthetic.rules import Rule, check_records


def encoded(
    schema: Schema, rules: Sequence[Rule], data: TableData | Iterable[TableData]
) -> tuple[Layout, np.ndarray]:
    """Returns the layout of records and their finest levels, of which all counts are functions.

    Of parts, one is read after the other, and nothing but the levels is kept.

    Args:
      schema: The public description of the columns.
      rules: The rules that all records keep.
      data: A DataFrame or a dict of arrays, or an iterable of them: the parts.

    Returns:
      The layout, and int32 levels of shape [records, columns], -1 where missing.

    Raises:
      ValueError: A value or a dtype is not as described, parts have different dtypes, or there are
        no records.
      TypeError: The data are none of these.
    """
    if _is_table(data) or not isinstance(data, Iterable) or hasattr(data, "dtype"):
        return _of_part(schema, rules, data)
    layouts: list[Layout] = []
    codes: list[np.ndarray] = []
    for number, part in enumerate(data, 1):
        if not _is_table(part):
            raise TypeError(
                f"part {number} of data is a {type(part).__name__}: each must be a DataFrame of "
                "pandas, polars or Arrow, or a dict of arrays."
            )
        try:
            layout = _layout(schema, part, layouts)
            levels = _of_part(schema, rules, part)[1] if _num_rows(schema, part) else None
        except (TypeError, ValueError) as error:
            kind = ValueError if isinstance(error, ValueError) else TypeError
            raise kind(f"part {number} of data: {error}") from error
        layouts = layouts or [layout]
        codes += [] if levels is None else [levels]
    if not codes:
        raise ValueError("data has no records: pass a table, or parts that are not used up.")
    return layouts[0], np.concatenate(codes)


def _is_table(data: TableData) -> bool:
    return isinstance(data, Mapping) or frames.container_of(data) is not None


def _num_rows(schema: Schema, data: TableData) -> int:
    first = schema.part(schema.names[:1]).arrays(data)
    return len(first[schema.names[0]])


def _of_part(schema: Schema, rules: Sequence[Rule], data: TableData) -> tuple[Layout, np.ndarray]:
    schema.check_names(data)
    layout = Layout.of(data, schema)
    codes = schema.finest.encode(data)
    layout.check_objects(data, schema)
    check_records(rules, schema, data)
    return layout, codes


def _layout(schema: Schema, data: TableData, former: Sequence[Layout]) -> Layout:
    """Returns the layout of a part, if it is that of the first one but for categories."""
    schema.check_names(data)
    layout = Layout.of(data, schema)
    first = former[0] if former else layout
    if layout.container != first.container:
        raise ValueError(f"it is of {layout.container}, and the first of {first.container}.")
    # Texts have no categories, which may be those of records.
    dtypes, wanted = (
        {name: frames.dtype_to_text(each.container, dtype) for name, dtype in each.dtypes.items()}
        for each in (layout, first)
    )
    unlike = [name for name, dtype in dtypes.items() if dtype != wanted[name]]
    if unlike:
        raise ValueError(
            f"column {unlike[0]!r} has the dtype {dtypes[unlike[0]]!r}, and in the first part "
            f"{wanted[unlike[0]]!r}: pass one dtype to what reads the parts."
        )
    return layout
