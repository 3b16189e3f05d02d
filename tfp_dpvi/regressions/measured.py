"""Typical values and shares of columns, released from the records for a share of the budget."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from tfp_dpvi.data import Binary, Categorical, Column, Schema
from tfp_dpvi.data.columns import Numeric, converted
from tfp_dpvi.preprocessing import PrivateStandardize
from tfp_dpvi.privacy import PrivacyLedger

if TYPE_CHECKING:
    from tfp_dpvi.data.schema import TableData

# A share of a level is at least this one over the number of levels: noise can make it negative.
_LEAST_SHARE = 0.05
# Typical values are so far from the bounds, over their distance, and deviations at most so many
# times what values between these can have.
_INSIDE = 0.005
_MOST_SPREAD = 0.9


def measure(
    schema: Schema,
    names: Sequence[str],
    data: TableData,
    ledger: PrivacyLedger | None,
    *,
    epsilon: float,
    delta: float,
    num_records: int | None = None,
    seed: int | None = None,
) -> tuple[Schema, PrivacyLedger]:
    """Returns a schema with released typical values, and the ledger that was charged.

    Args:
      schema: The description of the columns.
      names: The columns to measure.
      data: The records, whose values were checked.
      ledger: The ledger, or None for one in memory.
      epsilon: The release's epsilon.
      delta: Its delta.
      num_records: The public number of records.
      seed: Makes the release repeatable and *not private*.

    Raises:
      ValueError: A column is not known, or may be missing; no privacy was spent.

    #### Formal guarantee

    One Gaussian mechanism, see `PrivateStandardize.adapt`; what follows is post-processing.
    """
    names = [names] if isinstance(names, str) else list(names)
    if unknown := [name for name in names if name not in schema.columns]:
        raise ValueError(
            f"measured has {unknown}, which the formula does not use: it has "
            f"{', '.join(schema.names)}."
        )
    if absent := [name for name in names if schema.columns[name].missing]:
        raise ValueError(
            f"measured has {absent}, which may be missing: declare typical values in the schema."
        )
    arrays = schema.part(names).arrays(data)
    blocks = [_numbers(name, schema.columns[name], arrays[name]) for name in names]
    ends = [_bounds(schema.columns[name]) for name in names]
    lower, upper = (np.concatenate(side) for side in zip(*ends, strict=True))
    ledger = PrivacyLedger() if ledger is None else ledger
    layer = PrivateStandardize(lower, upper)
    layer.adapt(
        np.concatenate(blocks, axis=1),
        epsilon=epsilon,
        delta=delta,
        ledger=ledger,
        num_records=num_records,
        seed=seed,
    )
    columns = dict(schema.columns)
    first = 0
    for name, block in zip(names, blocks, strict=True):
        place = slice(first, first + block.shape[1])
        columns[name] = _described(columns[name], layer.mean[place], layer.scale[place])
        first += block.shape[1]
    return Schema(columns), ledger


def _numbers(name: str, column: Column, values: np.ndarray) -> np.ndarray:
    """Returns what is averaged, [n, 1], or [n, levels] for categories."""
    if isinstance(column, Numeric):
        return converted(column.to_numbers, values)[0].astype(np.float64)[:, None]
    codes = column.encode(name, values)
    if isinstance(column, Binary):
        return np.asarray(codes, np.float64)[:, None]
    return np.eye(column.num_levels)[codes]


def _bounds(column: Column) -> tuple[np.ndarray, np.ndarray]:
    if isinstance(column, Numeric):
        return np.array([float(column.lower)]), np.array([float(column.upper)])
    num = 1 if isinstance(column, Binary) else column.num_levels
    return np.zeros(num), np.ones(num)


def _described(column: Column, mean: np.ndarray, scale: np.ndarray) -> Column:
    """Returns a column with released means and standard deviations."""
    if isinstance(column, Numeric):
        width = column.upper - column.lower
        inner = column.lower + _INSIDE * width, column.upper - _INSIDE * width
        middle = float(np.clip(mean[0], *inner))
        most = _MOST_SPREAD * np.sqrt((middle - column.lower) * (column.upper - middle))
        return dataclasses.replace(column, typical=(middle, float(min(scale[0], most))))
    if isinstance(column, Binary):
        kept = float(np.clip(mean[0], _LEAST_SHARE / 2.0, 1.0 - _LEAST_SHARE / 2.0))
        return dataclasses.replace(column, share=kept)
    if not isinstance(column, Categorical):
        raise TypeError(type(column))
    shares = np.maximum(mean.astype(np.float64), _LEAST_SHARE / len(mean))
    return dataclasses.replace(column, shares=(shares / shares.sum()).tolist())
