"""Columns of a table: public descriptions, and the coding of values as levels.

A column has a fixed number of levels, numbered from 0, each a category or an interval of numbers. The allowed values are
public; records with other values are refused.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import ClassVar

import numpy as np

from tfp_dpvi import _validate as check

MISSING = -1
FINEST = 16**4  # The maximal number of bins of a private histogram of a number.

_MOST_SHOWN = 8  # Numbers of a description, in a message.


@dataclasses.dataclass(frozen=True)
class Column(abc.ABC):
    """Base class of column descriptions. Subclasses are frozen values.

    Attributes:
      missing: whether values may be missing (None, NaN or pandas' NA).
    """

    missing: bool = dataclasses.field(default=False, kw_only=True)
    kinds: ClassVar[str]  # NumPy kinds of dtypes for such values, besides "O".

    @property
    @abc.abstractmethod
    def num_levels(self) -> int:
        """The number of levels, missing values not counted."""

    @property
    def description(self) -> Column:
        """The user's description: the column itself, unless a private histogram chose its levels."""
        return self

    @property
    def fine(self) -> Column | None:
        """The column with the finest levels that a private histogram may group; None if there is no choice."""
        return None

    @abc.abstractmethod
    def _levels(self, name: str, values: np.ndarray) -> np.ndarray:
        """Returns levels, int32 [n], of values without missing ones; raises `ValueError` for invalid values."""

    @abc.abstractmethod
    def values(self, levels: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        """Returns values for levels without missing ones; numbers are uniform within their interval."""

    def encode(self, name: str, values: np.ndarray) -> np.ndarray:
        """Returns levels, int32 [n], -1 for missing, of values [n]; `ValueError` for values that are not allowed."""
        absent = is_missing(values)
        if absent.any() and not self.missing:
            raise ValueError(
                f"column {name!r} has missing values in {check.rows(absent)}: describe it with "
                "missing=True, or "
                "fill them."
            )
        codes = np.full(len(values), MISSING, np.int32)
        codes[~absent] = self._levels(name, values[~absent])
        return codes


@dataclasses.dataclass(frozen=True)
class Numeric(Column):
    """Base class of `Continuous` and `Integer`: bounds and bins."""

    lower: float
    upper: float
    bins: int | Sequence[float] = 16
    spikes: Sequence[float] = ()
    kinds: ClassVar[str] = "iuf"
    step: ClassVar[int] = 0  # Between neighbouring numbers.
    _not: ClassVar[str] = "no numbers"

    def __post_init__(self) -> None:
        low = check.real("lower", self.lower, "pass a public bound")
        high = check.real("upper", self.upper, "pass a public bound")
        if not (low < high and math.isfinite(high - low)):
            raise ValueError(
                f"lower={self.lower!r} must be below upper={self.upper!r}, both finite."
            )
        if isinstance(self.bins, int | np.integer):
            object.__setattr__(self, "bins", check.count("bins", self.bins, 2))
        else:
            inner = self._floats("bins")
            ends = (low, *inner), (*inner, self.upper + self.step)
            if not inner or not all(a < b for a, b in zip(*ends, strict=True)):
                raise ValueError(
                    f"bins={_described(self.bins)} must be inner edges that increase, above "
                    f"{self.lower!r} and below {self.upper!r}."
                )
            object.__setattr__(self, "bins", inner)
        spikes = self._floats("spikes")
        if not all(self.lower <= value <= self.upper for value in spikes) or len(set(spikes)) < len(
            spikes
        ):
            raise ValueError(
                f"spikes={_described(self.spikes)} must be different numbers from {self.lower} to "
                f"{self.upper}."
            )
        if spikes and not (isinstance(self.bins, int) and self.bins > 2 * len(spikes)):
            raise ValueError(
                f"spikes={_described(self.spikes)} need bins={_described(self.bins)} to be a "
                f"number above {2 * len(spikes)}; with your own edges, use "
                "a bin for each spike."
            )
        object.__setattr__(self, "spikes", spikes)

    def _floats(self, name: str) -> tuple[float, ...]:
        try:
            return tuple(float(value) for value in getattr(self, name))
        except (TypeError, ValueError):
            raise TypeError(
                f"{name}={_described(getattr(self, name))} must be a list of numbers, such as [0, "
                "10]."
            ) from None

    def next_after(self, value: float) -> float:
        """Returns the next larger number that the column allows."""
        return value + self.step if self.step else float(np.nextafter(value, np.inf))

    @property
    def edges(self) -> np.ndarray:
        """Edges of the bins, float64 [num_levels + 1]; a bin includes its lower edge and not its upper one."""
        end = self.upper + self.step
        if not isinstance(self.bins, int):
            return np.array([self.lower, *self.bins, end], np.float64)
        if not self.step:
            return np.linspace(self.lower, end, self.bins + 1)
        return np.round(
            np.linspace(self.lower, end, min(self.bins, int(end) - int(self.lower)) + 1)
        )

    @property
    def special(self) -> tuple[float, ...]:
        """Common values (0 and the bounds) and the declared spikes, which have their own finest bins."""
        return (
            *self.spikes,
            *(
                value
                for value in (self.lower, 0.0, self.upper)
                if self.lower <= value <= self.upper
            ),
        )

    @functools.cached_property
    def fine(self) -> Column | None:
        """The column with up to 65,536 bins, if `bins` is a smaller number; else None."""
        if not isinstance(self.bins, int):
            return None
        even = dataclasses.replace(self, bins=FINEST - 64, spikes=()).edges
        inner = {float(edge) for edge in even[1:-1]} | {
            edge for value in self.special for edge in (value, self.next_after(value))
        }
        edges = tuple(sorted(edge for edge in inner if even[0] < edge < even[-1]))
        return dataclasses.replace(self, bins=edges, spikes=()) if len(edges) >= self.bins else None

    @property
    def num_levels(self) -> int:
        """The number of bins."""
        return len(self.edges) - 1

    def bins_of(self, numbers: np.ndarray) -> np.ndarray:
        """Returns the bins of numbers within the bounds, int32 [n]."""
        return np.searchsorted(self.edges[1:-1], numbers, side="right").astype(np.int32)

    def _converted(self, values: np.ndarray) -> np.ndarray:
        return values.astype(np.float64)

    def _numbers(self, name: str, values: np.ndarray) -> np.ndarray:
        numbers, strange = converted(self._converted, values)
        if strange.any():
            raise ValueError(
                f"column {name!r} has values that are {self._not} in {check.rows(strange)}: "
                "convert them."
            )
        outside = ~((numbers >= self.lower) & (numbers <= self.upper))
        if outside.any():
            raise ValueError(
                f"column {name!r} has values outside its public bounds [{self._shown(self.lower)}, "
                f"{self._shown(self.upper)}] in {check.rows(outside)}: clip them, or use wider "
                "public bounds."
            )
        return numbers

    def _shown(self, number: float) -> str:
        return str(number)


@dataclasses.dataclass(frozen=True)
class Continuous(Numeric):
    """Real numbers between public bounds, modelled by bins; samples are uniform within a bin.

    Attributes:
      lower: the smallest allowed value.
      upper: the largest allowed value.
      bins: the number of bins, which `Synthesizer.fit` chooses by a private histogram such that each has about as many records
        and frequent values (zeros, bounds, round numbers) have their own; or the inner edges of the bins.
      spikes: values with their own bin, frequent or not. 0 and the bounds get one if they are frequent.
      missing: whether values may be missing.
    """

    kinds: ClassVar[str] = "f"

    def _levels(self, name: str, values: np.ndarray) -> np.ndarray:
        return self.bins_of(self._numbers(name, values))

    def values(self, levels: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        """Returns uniform draws within the bins, float64 [n]."""
        edges = self.edges
        low, high = edges[levels], edges[levels + 1]
        drawn = low + (high - low) * generator.random(len(levels))
        return np.clip(drawn, low, np.where(high == self.upper, high, np.nextafter(high, low)))


@dataclasses.dataclass(frozen=True)
class Integer(Numeric):
    """Whole numbers between public bounds, both included; otherwise as `Continuous`."""

    step: ClassVar[int] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        inner = () if isinstance(self.bins, int) else self.bins
        given = {
            "lower": (self.lower,),
            "upper": (self.upper,),
            "bins": inner,
            "spikes": self.spikes,
        }
        for name, values in given.items():
            if any(float(value) != math.floor(value) for value in values):
                raise ValueError(
                    f"{name} has {_described(values)}, not all whole numbers: use Continuous, or "
                    "whole numbers."
                )

    def _levels(self, name: str, values: np.ndarray) -> np.ndarray:
        numbers = self._numbers(name, values)
        broken = numbers != np.floor(numbers)
        if broken.any():
            raise ValueError(
                f"column {name!r} has values that are not Integer in {check.rows(broken)}: use "
                "Continuous, or "
                "round them."
            )
        return self.bins_of(numbers)

    def values(self, levels: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        """Returns uniform draws of whole numbers in the bins, int64 [n]."""
        edges = self.edges.astype(np.int64)
        return generator.integers(edges[levels], edges[levels + 1])


@dataclasses.dataclass(frozen=True)
class Categorical(Column):
    """One of a public list of categories.

    Attributes:
      categories: at least two different values: strings, numbers or other values of the column. Do not collect them from the
        records.
      max_levels: of more categories than that, `Synthesizer.fit` keeps the most frequent ones, by a private histogram, and
        merges the others. Samples have all of them.
      missing: whether values may be missing.
    """

    categories: Sequence[Hashable]
    max_levels: int = 16
    kinds: ClassVar[str] = "biufUS"

    def __post_init__(self) -> None:
        if isinstance(self.categories, (str, bytes)) or not hasattr(self.categories, "__iter__"):
            raise TypeError(
                f"categories={_described(self.categories)} must be a list of categories."
            )
        categories = tuple(self.categories)
        if len(categories) < 2 or len(set(categories)) != len(categories):
            raise ValueError(
                f"categories={_described(self.categories)} must be at least two, all different."
            )
        if is_missing(np.array([*categories, None], object))[:-1].any():
            raise ValueError(
                f"categories={_described(self.categories)} has a missing value: leave it out and "
                "pass missing=True."
            )
        object.__setattr__(self, "categories", categories)
        object.__setattr__(self, "max_levels", check.count("max_levels", self.max_levels, 2))

    @property
    def num_levels(self) -> int:
        """The number of categories."""
        return len(self.categories)

    @property
    def fine(self) -> Column | None:
        """The column itself, if it has more than `max_levels` categories; else None."""
        return self if len(self.categories) > self.max_levels else None

    def _levels(self, name: str, values: np.ndarray) -> np.ndarray:
        known = {category: level for level, category in enumerate(self.categories)}

        def level(value: Hashable) -> int:
            try:
                return known.get(value, MISSING)
            except TypeError:  # It cannot be a category.
                return MISSING

        levels = np.fromiter(map(level, values.tolist()), np.int32, len(values))
        if (unknown := levels == MISSING).any():
            raise ValueError(
                f"column {name!r} has values that are not among its categories in "
                f"{check.rows(unknown)}: map them, "
                "or add them if public."
            )
        return levels

    def values(self, levels: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        """Returns the categories, object [n]."""
        del generator
        listed = np.empty(len(self.categories), object)
        listed[:] = self.categories
        return listed[levels]


@dataclasses.dataclass(frozen=True)
class Binary(Column):
    """False or true, or 0 or 1."""

    kinds: ClassVar[str] = "biuf"

    @property
    def num_levels(self) -> int:
        """Two."""
        return 2

    def _levels(self, name: str, values: np.ndarray) -> np.ndarray:
        numbers, strange = converted(lambda some: some.astype(np.float64), values)
        strange |= (numbers != 0.0) & (numbers != 1.0)
        if strange.any():
            raise ValueError(
                f"column {name!r} has values that are not Binary in {check.rows(strange)}: code "
                "them as 0 and 1, or "
                "use Categorical."
            )
        return numbers.astype(np.int32)

    def values(self, levels: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        """Bools, [n]."""
        del generator
        return levels.astype(bool)


def _described(values: int | Sequence[Hashable]) -> str:
    """Returns a part of a description as text: a few numbers as they are, else the length alone.

    A column of the data may have been passed in its place.
    """
    if isinstance(values, list | tuple):
        if len(values) <= _MOST_SHOWN and all(isinstance(value, int | float) for value in values):
            return repr(values)
        return f"a {type(values).__name__} of {len(values)}"
    return check.shown(values)


def converted(
    convert: Callable[[np.ndarray], np.ndarray], values: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns converted values, and which ones cannot be converted: bool [n].

    NumPy's errors show the values; here none leaves, not even as a cause.
    """
    strange = np.zeros(len(values), bool)
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        return convert(values), strange
    numbers = np.zeros(len(values))
    for place in range(len(values)):
        strange[place] = True
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            numbers[place] = convert(values[place : place + 1])[0]
            strange[place] = False
    return numbers, strange


def is_missing(values: np.ndarray) -> np.ndarray:
    """Returns which entries are None, NaN or pandas' NA or NaT: bool [n]."""
    if values.dtype != object:
        return (
            np.asarray(values != values, bool)
            if values.dtype.kind in "fM"
            else np.zeros(len(values), bool)
        )
    kinds = ("NoneType", "NAType", "NaTType")
    found = (
        type(one).__name__ in kinds or (isinstance(one, float) and one != one) for one in values
    )
    return np.fromiter(found, bool, len(values))
