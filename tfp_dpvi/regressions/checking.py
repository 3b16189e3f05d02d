"""Outcomes of a regression as its model has them, and bins of columns for its checks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from tfp_dpvi import _validate as check
from tfp_dpvi.checking import Bins
from tfp_dpvi.data import Binary, Categorical, Column, Schema, frames
from tfp_dpvi.data.columns import Numeric, converted
from tfp_dpvi.data.units import Identifiers
from tfp_dpvi.regressions.design import Design
from tfp_dpvi.regressions.outcomes import FAMILIES, Outcome
from tfp_dpvi.regressions.responses import Limit

if TYPE_CHECKING:
    from tfp_dpvi.data.schema import TableData

# Of a normal distribution, its fifths.
_FIFTHS = (-0.8416, -0.2533, 0.2533, 0.8416)


def outcome_values(design: Design, family: str, outcome: Outcome, data: TableData) -> np.ndarray:
    """Returns the outcomes of records on the model's scale, float32 [n].

    Args:
      design: The design.
      family: The family.
      outcome: How the outcome enters.
      data: The records.

    Raises:
      ValueError: Values are outside of the schema, or not finite once transformed.
    """
    name = design.outcome
    column = design.schema.columns[name]
    if not isinstance(column, Numeric):
        values = design.schema.part([name]).arrays(data)[name]
        return column.encode(name, values).astype(np.float32)
    numbers = numbers_within(design.schema, name, data, design.outside)
    if design.trials is not None:
        numbers = _among_trials(design, numbers, data)
    if design.limit is not None:
        numbers = _up_to_limit(design, design.limit, numbers, data)
    if family == "ordinal":
        return (numbers - column.lower).astype(np.float32)
    if FAMILIES[family].is_scaled:
        numbers = design.transformed_outcome(numbers)
        if not np.isfinite(numbers).all():
            raise ValueError(
                f"the outcome {design.outcome_text} is not finite in "
                f"{check.rows(~np.isfinite(numbers))}: use np.log1p, or other bounds."
            )
        numbers = (numbers - outcome.location) / outcome.scale
    return numbers.astype(np.float32)


def _among_trials(design: Design, successes: np.ndarray, data: TableData) -> np.ndarray:
    trials = np.asarray(design.trials)
    if isinstance(design.trials, str):
        trials = numbers_within(design.schema, design.trials, data, design.outside)
    if design.outside == "clip":
        return np.minimum(successes, trials)
    if (successes > trials).any():
        raise ValueError(
            f"the outcome {design.outcome!r} has more successes than trials in "
            f'{check.rows(successes > trials)}: correct them, or pass outside="clip".'
        )
    return successes


def _up_to_limit(design: Design, limit: Limit, values: np.ndarray, data: TableData) -> np.ndarray:
    limits = np.asarray(limit.at)
    if isinstance(limit.at, str):
        limits = numbers_within(design.schema, limit.at, data, design.outside)
    meet = np.minimum if limit.side == "right" else np.maximum
    return np.asarray(meet(values, limits), np.float64)


def numbers_within(schema: Schema, name: str, data: TableData, outside: str) -> np.ndarray:
    """Returns the numbers of a column, within its bounds or moved to them, float64 [n].

    Args:
      schema: The public description of the columns.
      name: A column of numbers.
      data: The records.
      outside: "clip" to move them.

    Raises:
      ValueError: A value is no number, or outside of the bounds.
    """
    column = schema.columns[name]
    if not isinstance(column, Numeric):
        raise ValueError(f"column {name!r} is no column of numbers.")
    values = schema.part([name]).arrays(data)[name]
    numbers, strange = converted(column.to_numbers, values)
    if outside == "clip":
        values = np.where(strange | np.isnan(numbers), values, column.clipped(numbers))
    column.encode(name, values)
    return np.asarray(values, np.float64)


def identifiers(data: TableData, name: str) -> Identifiers:
    """Returns a column of identifiers, as it is.

    Args:
      data: The records.
      name: The column.

    Raises:
      ValueError: There is none of this name.
    """
    is_frame = frames.container_of(data) is not None
    columns = frames.columns_of(data) if is_frame else data
    if name not in columns:
        raise ValueError(f"unit={check.shown(name)} is no column of data.")
    return columns[name]


def column_bins(design: Design, names: Sequence[str] | None, data: TableData) -> dict[str, Bins]:
    """Returns the bins of columns, whose edges follow from the schema alone.

    A number's are the fifths of a normal distribution at its typical value; a category's are its
    levels.

    Args:
      design: The design.
      names: Columns of the formula; None for all numbers among the covariates without missing
        values.
      data: The records.

    Raises:
      ValueError: A name is no covariate, or may be missing.
    """
    columns = {name: each for name, each in design.schema.columns.items() if name != design.outcome}
    if names is None:
        names = [
            name
            for name, column in columns.items()
            if isinstance(column, Numeric)
            and not column.missing
            and name not in (design.trials, design.limit_column)
        ]
    names = np.atleast_1d(names).tolist()
    if unknown := [name for name in names if name not in columns]:
        raise ValueError(
            f"check_columns has {unknown}, which are no covariates: use {', '.join(columns)}."
        )
    if absent := [name for name in names if columns[name].missing]:
        raise ValueError(
            f"check_columns has {absent}, which may be missing, so that its bins are not known: "
            "leave it out."
        )
    arrays = design.schema.part(names).arrays(data) if names else {}
    return {name: _bins(name, columns[name], arrays[name]) for name in names}


def _bins(name: str, column: Column, values: np.ndarray) -> Bins:
    if isinstance(column, Numeric):
        numbers = converted(column.to_numbers, values)[0]
        inner = column.location + column.deviation * np.array(_FIFTHS)
        if column.step:
            inner = np.unique(np.ceil(inner))
        inner = inner[(inner > column.lower) & (inner <= column.upper)]
        return Bins.of_numbers(name, numbers, inner.tolist())
    codes = np.asarray(column.encode(name, values), np.int64)
    if isinstance(column, Binary):
        return Bins(("0", "1"), codes, ordered=False)
    if not isinstance(column, Categorical):
        raise TypeError(type(column))
    return Bins(tuple(str(each) for each in column.categories), codes, ordered=False)
