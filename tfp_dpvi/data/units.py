"""Persons with several rows: rows are grouped before all else, and a record is a person.

Clip, twin, sampler and accounting then act on persons, since a record is what they act on.
"""

from __future__ import annotations

import dataclasses
from numbers import Number
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from tfp_dpvi import _random
from tfp_dpvi import _validate as check
from tfp_dpvi._tf import Structure, tf
from tfp_dpvi.data import frames
from tfp_dpvi.data.columns import is_missing
from tfp_dpvi.privacy import PersonUnit

Identifiers: TypeAlias = Any
"""An identifier of each row: an array, a list or a column of a frame; or None."""

# A boolean would make two persons, and floats are no names.
_KINDS = "iuUSMO"
# Missing numbers and dates as texts, by astype(str): all of them would be one person.
_MISSING = frozenset(("", "na", "n/a", "nan", "none", "<na>", "nat", "null"))


class UnitRows(NamedTuple):
    """The inputs of n persons, of m rows each.

    Persons with fewer rows are filled up with copies of one of their rows, which count for nothing.

    ```python
    >>> UnitRows(np.zeros([2, 3, 5]), np.ones([2, 3], bool)).rows.shape
    (2, 3, 5)

    ```

    Attributes:
      rows: Inputs of shape [n, m, ...], or a structure of these.
      mask: Bool of shape [n, m], False for copies.
    """

    rows: Structure
    mask: Any

    @property
    def longest(self) -> int:
        """The largest number of rows that a person has; of public ones alone it may be told."""
        return int(max(np.flatnonzero(np.asarray(self.mask).any(axis=0)), default=0)) + 1

    def first(self, num: int) -> UnitRows:
        """Returns the first places of each person.

        Args:
          num: Their number.
        """
        return tf.nest.map_structure(lambda part: part[:, :num], self)


@dataclasses.dataclass(frozen=True, eq=False)
class Units:
    """Which rows are whose: private, and part of no output.

    ```python
    >>> units = make_units(["ann", "bob", "ann"], 3, max_rows=2, rows_beyond="first")
    >>> units.places.tolist(), units.mask.tolist()
    ([[0, 2], [1, 1]], [[True, True], [True, False]])

    ```

    Attributes:
      places: The numbers of a person's rows, int64 of shape [n, m], in increasing order.
      mask: False where a place is filled up, bool of shape [n, m].
      person: What is public of it.
      before: The number of the same person's row before each row, -1 for none, int64 of shape [N].
    """

    places: np.ndarray = dataclasses.field(repr=False)
    mask: np.ndarray = dataclasses.field(repr=False)
    person: PersonUnit
    before: np.ndarray = dataclasses.field(repr=False)

    def group_inputs(self, x: Structure) -> Structure:
        """Returns inputs of persons: with one row each as they are, otherwise a `UnitRows`.

        Args:
          x: Inputs of rows, arrays.
        """
        if self.person.max_rows == 1:
            return tf.nest.map_structure(self.group_array, x)
        return UnitRows(tf.nest.map_structure(self.group_array, x), self.mask)

    def group_array(self, part: Any) -> Any:
        """Returns an array of persons, shape [n, m, ...], or for m = 1 [n, ...].

        Args:
          part: An array of rows, shape [N, ...].
        """
        return part[self.places[:, 0] if self.person.max_rows == 1 else self.places]


def make_units(
    unit_ids: Identifiers,
    num_rows: int,
    max_rows: int | None,
    rows_beyond: str = "random",
    *,
    seed: int | None = None,
    name: str = "unit_ids",
) -> Units:
    """Groups rows by identifiers.

    Args:
      unit_ids: An identifier of each row: integers, texts or other hashable values, in an array, a
        list, or a column of a frame. Rows of a person need not be adjacent.
      num_rows: The number of rows.
      max_rows: The public largest number m of rows of a person.
      rows_beyond: "random" or "first", see `PersonUnit`.
      seed: None for a choice of rows with a key from the operating system.
      name: The argument, for messages.

    Raises:
      ValueError, TypeError: Identifiers are missing, of another number than rows, or no names.

    #### Formal guarantee

    A row is in one unit at most, and a person's rows are all in one unit, whose rows depend on this
    person's rows and on random numbers that are independent of everybody else's. So a person who
    comes or goes adds or removes one unit and changes no other one's distribution.
    """
    if max_rows is None:
        raise ValueError(
            f"max_rows_per_unit is missing: with {name}, pass the public largest number of rows of "
            "a person that are used."
        )
    max_rows = check.count("max_rows_per_unit", max_rows, 1)
    person = PersonUnit(max_rows, check.one_of("rows_beyond", rows_beyond, ("random", "first")))
    codes = person_numbers(unit_ids, num_rows, name)
    turn = np.argsort(codes, kind="stable")
    before = np.full(num_rows, -1)
    before[turn[1:]] = np.where(codes[turn[1:]] == codes[turn[:-1]], turn[:-1], -1)
    priority = np.arange(num_rows, dtype=np.float64)
    if rows_beyond == "random":
        # One number for each row, so that no person's choice depends on another's.
        key = _random.new_key(seed)
        priority = np.random.default_rng(key.view(np.uint64)).uniform(size=num_rows)
    order = np.lexsort((priority, codes))
    counts = np.bincount(codes)
    rank = np.arange(num_rows) - np.repeat(np.cumsum(counts) - counts, counts)
    kept = np.sort(order[rank < max_rows])
    # Once more by person, now in the order of rows.
    kept = kept[np.argsort(codes[kept], kind="stable")]
    counts = np.minimum(counts, max_rows)
    start = np.cumsum(counts) - counts
    mask = np.arange(max_rows) < counts[:, None]
    places = kept[np.where(mask, start[:, None] + np.arange(max_rows), start[:, None])]
    return Units(places, mask, person, before)


def person_numbers(unit_ids: Identifiers, num_rows: int, name: str = "unit_ids") -> np.ndarray:
    """Returns the person of each row as a number from 0 on, int64, in the order of first rows.

    Args:
      unit_ids: As of `make_units`.
      num_rows: The number of rows.
      name: The argument, for messages.

    Raises:
      ValueError, TypeError: As `make_units`.
    """
    values = _values(name, unit_ids)
    if values.shape != (num_rows,):
        raise ValueError(
            f"{name} has shape {list(values.shape)}: pass one identifier for each of the "
            f"{num_rows} rows."
        )
    if values.dtype.kind not in _KINDS:
        raise TypeError(
            f"{name} has dtype {check.dtype_name(values.dtype)}, which is no identifier: pass "
            "integers or texts, such as ids.astype('Int64')."
        )
    if is_missing(values).any():
        raise ValueError(
            f"{name} has missing entries: whose rows these are is not known. Leave such rows out "
            "of x and y, or give each its person."
        )
    if values.dtype.kind in "SUO":
        _refuse_unsure(name, values)
    if values.dtype != object:
        first, codes = np.unique(values, return_index=True, return_inverse=True)[1:]
        numbers = np.empty(len(first), np.int64)
        numbers[np.argsort(first)] = np.arange(len(first))
        return numbers[codes]
    found: dict[Any, int] = {}
    try:
        if any(isinstance(value, float | bool | np.floating | np.bool_) for value in values):
            raise TypeError
        return np.array([found.setdefault(value, len(found)) for value in values], np.int64)
    except TypeError:
        raise TypeError(
            f"{name} has entries that are floats, booleans or not hashable, which are no "
            "identifiers: pass integers or texts."
        ) from None


def _refuse_unsure(name: str, values: np.ndarray) -> None:
    """Raises for identifiers that may split a person, or join several."""
    texts = {value.decode(errors="replace") for value in values if isinstance(value, bytes)}
    texts |= {value for value in values if isinstance(value, str)}
    if any(text.strip().lower() in _MISSING for text in texts):
        raise ValueError(
            f"{name} has texts such as 'nan' or '', which are missing entries: whose rows these "
            "are is not known.\nLeave such rows out of x and y, or give each its person."
        )
    kinds = (str, bytes, Number, tuple)
    if sum(any(isinstance(value, kind) for value in values) for kind in kinds) > 1:
        raise TypeError(
            f"{name} has several kinds of values, such as numbers and texts: a person may have "
            "rows under 7 and '7'.\nMake all of them the same, such as by ids.astype(str)."
        )


def _values(name: str, unit_ids: Identifiers) -> np.ndarray:
    """Returns identifiers as an array, in which no two of a list are made the same."""
    if isinstance(unit_ids, str):
        raise TypeError(f"{name} is a text: pass a column, such as frame[{unit_ids!r}].")
    column = frames.as_series(unit_ids)
    if column is not None:
        is_number = frames.kind_of(column) in ("i", "u", "f", "b") and not column.null_count()
        if is_number:
            return np.asarray(column.to_numpy())
        unit_ids = column.to_list()
    if not isinstance(unit_ids, list | tuple):
        return np.asarray(unit_ids)
    values = np.empty(len(unit_ids), object)
    for place, value in enumerate(unit_ids):
        values[place] = value
    return values
