"""Descriptions of columns as plain values and back, and the questions that they raise."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from tfp_dpvi import _validate as check
from tfp_dpvi.data.columns import Binary, Categorical, Column, Continuous, Integer, Numeric
from tfp_dpvi.data.dates import Date

TYPES: dict[str, type[Column]] = {
    "continuous": Continuous,
    "integer": Integer,
    "binary": Binary,
    "categorical": Categorical,
    "date": Date,
}

MEASURABLE = ("typical values", "shares", "share")
"""Parts of a description that a regression may release from the records instead."""


def columns_from(columns: Mapping[str, Any]) -> dict[str, Column]:
    """Returns columns from plain values.

    Args:
      columns: Dict from names to dicts with a "type" and the arguments of that class, or columns.

    Raises:
      TypeError: The columns are no dict.
      ValueError: A type or an argument is unknown.
    """
    if not isinstance(columns, Mapping):
        raise TypeError(f"columns={check.shown(columns)} must be a dict of descriptions.")
    return {str(name): _column(str(name), described) for name, described in columns.items()}


def _column(name: str, described: Any) -> Column:
    if isinstance(described, Column):
        return described
    kind = described.get("type") if isinstance(described, Mapping) else None
    if kind not in TYPES:
        raise ValueError(
            f"column {name!r} needs a type, one of {', '.join(TYPES)}: got {check.shown(kind)}."
        )
    fields = dataclasses.fields(TYPES[kind])
    known = [field.name for field in fields]
    arguments = {key: value for key, value in described.items() if key != "type"}
    if unknown := sorted(set(map(str, arguments)) - set(known)):
        raise ValueError(f"column {name!r} has the unknown fields {unknown}: use {known}.")
    needed = [field.name for field in fields if field.default is dataclasses.MISSING]
    if absent := [each for each in needed if each not in arguments]:
        raise ValueError(f"column {name!r} lacks {', '.join(absent)}: what is public about it?")
    try:
        return TYPES[kind](**arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(f"column {name!r}: {check.first_line(error)}") from None


def plain(column: Column) -> dict[str, Any]:
    """Returns a column's type and arguments as plain values, without those that are defaults.

    Args:
      column: The column.
    """
    kind = next(name for name, cls in TYPES.items() if type(column) is cls)
    values: dict[str, Any] = {"type": kind}
    for field in dataclasses.fields(column):
        value = getattr(column, field.name)
        if field.default is dataclasses.MISSING or value != field.default:
            parts = value if isinstance(value, tuple) else (value,)
            # JSON holds no numbers of NumPy, which pandas' unique() has.
            plain_parts = [part.item() if isinstance(part, np.generic) else part for part in parts]
            values[field.name] = plain_parts if isinstance(value, tuple) else plain_parts[0]
    return values


def parsed(text: str, language: str) -> Any:
    """Returns the values of a text.

    Args:
      text: The text.
      language: "JSON" or "YAML".

    Raises:
      ValueError: It is not in that language.
    """
    try:
        if language == "JSON":
            return json.loads(text)
        import yaml  # type: ignore[import-untyped]

        return yaml.safe_load(text)
    except ImportError:
        raise ImportError("from_yaml needs pyyaml: pip install pyyaml, or use JSON.") from None
    except Exception as error:
        raise ValueError(f"text is no {language} ({check.first_line(error)}).") from None


def questions(name: str, column: Column) -> dict[str, str]:
    """Returns what a curator must be able to answer about a column, by what it is about.

    Args:
      name: The column's name.
      column: Its description.
    """
    found = {}
    if isinstance(column, Numeric):
        low, high = column.as_text(column.lower), column.as_text(column.upper)
        found["bounds"] = f"{name}: what public source says that values are from {low} to {high}?"
        if column.spikes:
            found["spikes"] = (
                f"{name}: what public source says that values are often "
                f"{column.listed(column.spikes)}, if not these records?"
            )
        if not isinstance(column.bins, int):
            found["edges"] = (
                f"{name}: what public source has the edges {column.listed(column.bins)}, if not "
                "these records?"
            )
        if column.typical is not None:
            found["typical values"] = (
                f"{name}: what public source has the mean {column.location:g} and the standard "
                f"deviation {column.deviation:g}, if not these records?"
            )
    if isinstance(column, Categorical):
        found["categories"] = (
            f"{name}: what public source lists all {column.num_levels} categories, also those that "
            "no record has?"
        )
        if column.parents is not None:
            found["parents"] = f"{name}: what public source has the parent of each category?"
        if column.shares is not None:
            found["shares"] = f"{name}: what public source has the shares, if not these records?"
    if isinstance(column, Binary) and column.share != 0.5:
        found["share"] = f"{name}: what public source has the share {column.share:g}?"
    if column.missing:
        found["missing values"] = f"{name}: is it public that values can be missing?"
    return found


def with_sources(line: str, needed: Iterable[str]) -> str:
    """Returns a line of a report with the question for public sources.

    Args:
      line: The text of a column, or of a rule.
      needed: All that needs a source other than the records.
    """
    named = ", ".join(needed)
    return f"{line}. Public source for {named}?" if named else line
