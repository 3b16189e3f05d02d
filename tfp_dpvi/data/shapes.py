"""Stand-ins for records of which only shapes and dtypes are used.

They are specs, zeros and synthetic records.
"""

from __future__ import annotations

import re

import numpy as np
import tree

from tfp_dpvi._tf import Structure, tf
from tfp_dpvi.data.records import Records
from tfp_dpvi.data.units import UnitRows


def specs_of(records: Records, num: int) -> tuple[Structure, Structure | None]:
    """Returns `tf.TensorSpec`s of x and of y; None for a missing y.

    Args:
      records: The records.
      num: The number of records of the specs.
    """
    return tf.nest.map_structure(
        lambda part: None if part is None else tf.TensorSpec([num, *part.shape[1:]], part.dtype),
        (records.x, records.y),
    )


def input_specs(records: Records) -> dict[str, Structure]:
    """Returns `tf.TensorSpec`s of rows, {"x": ..., "y": ...}, with None for their number.

    A row is a record, or one of a person's.
    """
    parts = {"x": records.x} if records.y is None else {"x": records.x, "y": records.y}
    first = 1
    if isinstance(records.x, UnitRows):
        parts["x"] = records.x.rows
        first = 2
    return tf.nest.map_structure(
        lambda part: tf.TensorSpec([None, *part.shape[first:]], part.dtype), parts
    )


def zeros_like(structure: Structure, num: int) -> Structure:
    """Returns records of zeros.

    Args:
      structure: Records or specs, whose shapes and dtypes the zeros have.
      num: The number of records.
    """
    return tf.nest.map_structure(
        lambda part: tf.zeros([num, *part.shape[1:]], part.dtype), structure
    )


def synthetic(part: np.ndarray, num: int, generator: np.random.Generator) -> np.ndarray:
    """Returns synthetic records of one array's shape and dtype.

    Floats are in [0, 1), so that they are valid rates and proportions too; integers are 0 or 1, two
    categories that every coding has; texts are those of these integers.

    Args:
      part: The array.
      num: The number of records.
      generator: Draws the values.
    """
    shape = (num, *part.shape[1:])
    if part.dtype.kind == "O":
        return generator.integers(0, 2, shape).astype(str).astype(object)
    if part.dtype.kind == "f":
        return generator.uniform(size=shape).astype(part.dtype)
    return generator.integers(0, 2, shape).astype(part.dtype)


def flat_names(structure: Structure, single: str) -> list[str]:
    """Returns a name for each part of a structure, in the order of `tf.nest.flatten`.

    Names come from keys, fields or numbers. They are Python identifiers, since arguments are
    keywords: "hours-per-week" becomes "hours_per_week".

    Args:
      structure: The structure.
      single: The name of a part without a key, and the beginning of names that would start with no
        letter.
    """
    names: list[str] = []
    for path, _ in tree.flatten_with_path(structure):
        name = "_".join(map(str, path)) or single
        identifier = re.sub(r"\W", "_", name, flags=re.ASCII)
        identifier = f"{single}_{identifier}" if not identifier[:1].isalpha() else identifier
        while identifier in names:
            identifier += "_"
        names.append(identifier)
    return names
