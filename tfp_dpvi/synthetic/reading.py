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
    is_table = isinstance(data, Mapping | str | np.ndarray) or frames.container_of(data) is not None
    if is_table or not isinstance(data, Iterable):
        return _of_part(schema, rules, data)
    layouts: list[Layout] = []
    codes: list[np.ndarray] = []
    for number, part in enumerate(data, 1):
        try:
            layout, levels = _of_part(schema, rules, part)
            _check_alike(layout, [*layouts, layout][0])
        except (TypeError, ValueError) as error:
            raise type(error)(f"part {number} of data: {error}") from error
        layouts = layouts or [layout]
        codes.append(levels)
    if not codes:
        raise ValueError("data has no parts: pass a table, or an iterable that is not used up.")
    return layouts[0], np.concatenate(codes)


def _of_part(schema: Schema, rules: Sequence[Rule], data: TableData) -> tuple[Layout, np.ndarray]:
    schema.check_names(data)
    layout = Layout.of(data, schema)
    codes = schema.finest.encode(data)
    layout.check_objects(data, schema)
    check_records(rules, schema, data)
    return layout, codes


def _check_alike(layout: Layout, first: Layout) -> None:
    if layout.container != first.container:
        raise ValueError(f"it is of {layout.container}, and the first of {first.container}.")
    unlike = [name for name, dtype in layout.dtypes.items() if dtype != first.dtypes[name]]
    if unlike:
        raise ValueError(
            f"column {unlike[0]!r} is {layout.dtypes[unlike[0]]}, and in the first part "
            f"{first.dtypes[unlike[0]]}: pass the dtype to what reads the parts."
        )
