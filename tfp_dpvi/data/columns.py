"""Public descriptions of columns, and the coding of values as levels.

A column has a fixed number of levels, numbered from 0, each a category or an interval of numbers.
The allowed values are public; records with other values are refused.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import ClassVar

import numpy as np

from tfp_dpvi import _validate as check

MISSING = -1
"""The level of a missing value."""

FINEST = 16**4
"""The maximal number of bins of a private histogram of a number."""

# From here on, floats of 64 bits skip whole numbers.
_MOST_EXACT = 2**53

# Categories that a file can hold.
_PLAIN = str | int | float | np.bool_ | np.integer | np.floating

# Of a column from 0 on a log scale: where its bins begin to widen, in upper bounds.
_LOG_ORIGIN = 1e-6

# Numbers of a description that a message shows.
_MOST_SHOWN = 8


@dataclasses.dataclass(frozen=True)
class Column(abc.ABC):
    """Base class of column descriptions. Subclasses are frozen values.

    ```python
    >>> from tfp_dpvi.data import Binary, Column, Integer
    >>> isinstance(Integer(17, 90), Column)
    True
    >>> Binary(missing=True) == Binary()
    False

    ```

    Attributes:
      missing: Whether values may be missing (None, NaN or pandas' NA).
      unit: The unit of the values as text for reports, such as "years".
      kinds: NumPy kinds of dtypes for such values, besides "O".
    """

    missing: bool = dataclasses.field(default=False, kw_only=True)
    unit: str = dataclasses.field(default="", kw_only=True)
    kinds: ClassVar[str]

    @property
    @abc.abstractmethod
    def num_levels(self) -> int:
        """The number of levels, missing values not counted."""

    @property
    def description(self) -> Column:
        """The user's description: the column itself, unless a histogram chose its levels."""
        return self

    @property
    def fine(self) -> Column | None:
        """The column with the finest levels that a private histogram may group.

        It is None if there is no choice of levels.
        """
        return None

    @property
    def finest(self) -> Column:
        """The column with its finest levels: `fine`, or the column itself without a choice."""
        return self.fine or self

    @abc.abstractmethod
    def levels_of(self, name: str, values: np.ndarray) -> np.ndarray:
        """Returns the levels of values of which none is missing.

        Args:
          name: The column's name, for messages.
          values: Array of shape [n].

        Returns:
          int32 array of shape [n].

        Raises:
          ValueError: A value is not allowed.
        """

    @abc.abstractmethod
    def values(self, levels: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        """Returns values of levels of which none is missing; numbers are uniform in their interval.

        Args:
          levels: Integer array of shape [n].
          generator: The source of the numbers.

        Returns:
          Array of shape [n].
        """

    @property
    def described(self) -> str:
        """Text for reports: what is public about the column."""
        return f"one of {self.num_levels} levels"

    @property
    def declared(self) -> str:
        """The same without what is assumed where nothing is declared."""
        return self.described

    def simulate(self, num: int, generator: np.random.Generator) -> np.ndarray:
        """Returns invented values, a function of the description alone.

        Args:
          num: The number of values.
          generator: The source of the values.

        Returns:
          Array of shape [num]; none is missing.
        """
        return self.values(generator.integers(self.num_levels, size=num), generator)

    def encode(self, name: str, values: np.ndarray) -> np.ndarray:
        """Returns the levels of values.

        Args:
          name: The column's name, for messages.
          values: Array of shape [n].

        Returns:
          int32 array of shape [n], -1 for missing values.

        Raises:
          ValueError: A value is not allowed.
        """
        absent = is_missing(values)
        if absent.any() and not self.missing:
            raise ValueError(
                f"column {name!r} has missing values in {check.rows(absent)}: describe it with "
                "missing=True, or fill them."
            )
        codes = np.full(len(values), MISSING, np.int32)
        codes[~absent] = self.levels_of(name, values[~absent])
        return codes


@dataclasses.dataclass(frozen=True)
class Numeric(Column):
    """Base class of `Continuous` and `Integer`: bounds and bins.

    Attributes:
      typical: The public mean and standard deviation of the values, for instance from an earlier
        publication; None for the middle of the bounds and a quarter of their distance.
      step: The distance between neighbouring numbers, 0 for real ones.
      fault: What an error calls values that cannot be converted.
    """

    lower: float
    upper: float
    bins: int | Sequence[float] = 16
    spikes: Sequence[float] = ()
    scale: str = dataclasses.field(default="linear", kw_only=True)
    typical: tuple[float, float] | None = dataclasses.field(default=None, kw_only=True)
    kinds: ClassVar[str] = "iuf"
    step: ClassVar[int] = 0
    fault: ClassVar[str] = "no numbers"

    def __post_init__(self) -> None:
        low = check.real("lower", self.lower, "pass a public bound")
        high = check.real("upper", self.upper, "pass a public bound")
        if not (self.lower < self.upper and math.isfinite(low) and math.isfinite(high)):
            raise ValueError(
                f"lower={self.lower!r} must be below upper={self.upper!r}, both finite."
            )
        room = max(1e-100, -1e-10 * low, 1e-10 * high)
        if not self.step and (room > 1e90 or high - low < room):
            # Squares overflow, or finest bins have no numbers.
            raise ValueError(
                f"lower={self.lower!r} and upper={self.upper!r} are too large, or too close to "
                "each other, for floats: use another unit, or count from another origin."
            )
        check.one_of("scale", self.scale, ("linear", "log"))
        if self.scale == "log" and low < 0.0:
            raise ValueError(
                f"scale='log' needs lower={self.lower!r} to be at least 0: use scale='linear'."
            )
        if isinstance(self.bins, int | np.integer):
            object.__setattr__(self, "bins", check.count("bins", self.bins, 2))
        else:
            inner = self._floats("bins")
            ends = (low, *inner), (*inner, self.next_after(high))
            if not inner or not all(a < b for a, b in zip(*ends, strict=True)):
                raise ValueError(
                    f"bins={_described(self.bins)} must be inner edges that increase, above "
                    f"{self.lower!r} and at most {self.upper!r}."
                )
            object.__setattr__(self, "bins", inner)
        object.__setattr__(self, "spikes", self._checked_spikes())
        if self.typical is not None:
            object.__setattr__(self, "typical", self._checked_typical())

    def _checked_typical(self) -> tuple[float, float]:
        values = self._floats("typical")
        if len(values) == 2 and self.lower < values[0] < self.upper and values[1] > 0.0:
            below, above = values[0] - self.lower, self.upper - values[0]
            if values[1] ** 2 < below * above:
                return values[0], values[1]
        raise ValueError(
            f"typical={self.typical} must be a mean between {self.lower!r} and {self.upper!r}, and "
            "a standard deviation that values between these can have."
        )

    @property
    def location(self) -> float:
        """The typical value, by default the middle of the bounds."""
        return (self.lower + self.upper) / 2.0 if self.typical is None else self.typical[0]

    @property
    def deviation(self) -> float:
        """The typical distance from `location`, by default a quarter of the bounds' distance."""
        return (self.upper - self.lower) / 4.0 if self.typical is None else self.typical[1]

    @property
    def described(self) -> str:
        """See `Column.described`."""
        if self.typical is not None:
            return self.declared
        return f"{self.declared}, {self._usual} (from the bounds)"

    @property
    def declared(self) -> str:
        """See `Column.declared`."""
        unit = f" {self.unit}" if self.unit else ""
        bounds = f"{self.as_text(self.lower)} to {self.as_text(self.upper)}{unit}"
        typical = [] if self.typical is None else [f"{self._usual} (given)"]
        return ", ".join([bounds, *self.choices, *typical])

    @property
    def _usual(self) -> str:
        return f"typically {self.location:g} +- {self.deviation:g}"

    @property
    def choices(self) -> list[str]:
        """Texts for reports of what is declared of bins."""
        choices = [f"spikes at {self.listed(self.spikes)}"] if self.spikes else []
        if not isinstance(self.bins, int):
            choices.append(f"bins with edges at {self.listed(self.bins)}")
        return choices + ["on a log scale"] * (self.scale == "log")

    def simulate(self, num: int, generator: np.random.Generator) -> np.ndarray:
        """Returns draws of a beta distribution on the bounds with the typical mean and deviation.

        Args:
          num: The number of values.
          generator: The source of the values.

        Returns:
          float64 array of shape [num], whole numbers if the column has these alone.
        """
        width = self.upper - self.lower
        mean, variance = (self.location - self.lower) / width, (self.deviation / width) ** 2
        size = mean * (1.0 - mean) / variance - 1.0
        values = self.lower + width * generator.beta(mean * size, (1.0 - mean) * size, num)
        return np.clip(np.round(values) if self.step else values, self.lower, self.upper)

    def _checked_spikes(self) -> tuple[float, ...]:
        spikes = self._floats("spikes")
        within = all(self.lower <= value <= self.upper for value in spikes)
        if not within or len(set(spikes)) < len(spikes):
            raise ValueError(
                f"spikes={_described(self.spikes)} must be different numbers from {self.lower} to "
                f"{self.upper}."
            )
        if spikes and not (isinstance(self.bins, int) and self.bins > 2 * len(spikes)):
            raise ValueError(
                f"spikes={_described(self.spikes)} need bins={_described(self.bins)} to be a "
                f"number above {2 * len(spikes)}; with your own edges, use a bin for each spike."
            )
        return spikes

    def _floats(self, name: str) -> tuple[float, ...]:
        try:
            return tuple(float(value) for value in getattr(self, name))
        except (TypeError, ValueError):
            raise TypeError(
                f"{name}={_described(getattr(self, name))} must be a list of numbers, such as "
                "[0, 10]."
            ) from None

    def next_after(self, value: float) -> float:
        """Returns the next larger number that the column allows."""
        return value + self.step if self.step else float(np.nextafter(value, np.inf))

    @property
    def edges(self) -> np.ndarray:
        """Edges of the bins, float64 [num_levels + 1].

        A bin includes its lower edge and not its upper one: the last edge is above the bound.
        """
        end = self.next_after(self.upper)
        if not isinstance(self.bins, int):
            return np.array([self.lower, *self.bins, end], np.float64)
        if not self.step:
            return np.append(self._spaced(self.upper, self.bins)[:-1], end)
        return np.unique(np.round(self._spaced(end, min(self.bins, int(end) - int(self.lower)))))

    def _spaced(self, end: float, num: int) -> np.ndarray:
        """Returns edges of so many bins up to `end`, float64 [num + 1]."""
        if self.scale == "linear":
            return np.linspace(self.lower, end, num + 1)
        # From 0 on, bins begin to widen at a millionth of the upper bound, or at 1.
        origin = self.lower or max(_LOG_ORIGIN * end, self.step)
        edges = np.geomspace(origin, end - self.lower + origin, num + 1) + (self.lower - origin)
        edges[[0, -1]] = self.lower, end
        return edges

    @property
    def special(self) -> tuple[float, ...]:
        """Values with finest bins of their own: 0, the bounds and the declared spikes."""
        common = (self.lower, 0.0, self.upper)
        return (*self.spikes, *(value for value in common if self.lower <= value <= self.upper))

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

    def to_numbers(self, values: np.ndarray) -> np.ndarray:
        """Returns values of shape [n] as numbers; NumPy's errors are caught by the caller."""
        return values.astype(np.float64)

    def clipped(self, numbers: np.ndarray) -> np.ndarray:
        """Returns numbers of shape [n], those outside of the bounds moved to them."""
        return np.clip(numbers, self.lower, self.upper)

    def as_text(self, number: float) -> str:
        """Returns a bound as messages show it."""
        return str(number)

    def listed(self, numbers: Sequence[float]) -> str:
        """Returns the first numbers of a list as text, and how many more it has."""
        shown = [
            self.as_text(int(number) if number == int(number) else number)
            for number in numbers[:_MOST_SHOWN]
        ]
        more = len(numbers) - len(shown)
        return ", ".join(shown) + (f" and {more} more" if more else "")

    def numbers_of(self, name: str, values: np.ndarray) -> np.ndarray:
        """Returns values within the bounds as float64 [n].

        Args:
          name: The column's name, for messages.
          values: Array of shape [n], none of it missing.

        Raises:
          ValueError: A value is no number, or out of bounds.
        """
        numbers, strange = converted(self.to_numbers, values)
        if strange.any():
            raise ValueError(
                f"column {name!r} has values that are {self.fault} in {check.rows(strange)}: "
                "convert them."
            )
        outside = ~((numbers >= self.lower) & (numbers <= self.upper))
        if outside.any():
            bounds = f"[{self.as_text(self.lower)}, {self.as_text(self.upper)}]"
            raise ValueError(
                f"column {name!r} has values outside its public bounds {bounds} in "
                f"{check.rows(outside)}: clip them, or use wider public bounds."
            )
        return numbers


@dataclasses.dataclass(frozen=True)
class Continuous(Numeric):
    """Real numbers between public bounds, modelled by bins; samples are uniform within a bin.

    ```python
    >>> import numpy as np
    >>> Continuous(0.0, 2.5, bins=[1.5, 2.0]).encode("height", np.array([1.2, 1.5, 2.5])).tolist()
    [0, 1, 2]

    ```

    Attributes:
      lower: The smallest allowed value.
      upper: The largest allowed value.
      bins: The number of bins, or their inner edges. Of a number of bins, `Synthesizer.fit` chooses
        the edges by a private histogram, such that each bin has about as many records and frequent
        values (zeros, bounds, round numbers) have their own.
      spikes: Values with their own bin, frequent or not. 0 and the bounds get one if they are
        frequent.
      scale: "linear", or "log" for numbers from 0 whose public bounds span powers of ten: a number
        of bins, and the finest ones of the private histogram, widen with the numbers.
      missing: Whether values may be missing.
    """

    kinds: ClassVar[str] = "f"

    def levels_of(self, name: str, values: np.ndarray) -> np.ndarray:
        """See `Column.levels_of`."""
        return self.bins_of(self.numbers_of(name, values))

    def values(self, levels: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        """Returns uniform draws within the bins.

        Args:
          levels: Integer array of shape [n].
          generator: The source of the draws.

        Returns:
          float64 array of shape [n].
        """
        edges = self.edges
        low, high = edges[levels], edges[levels + 1]
        drawn = low + (high - low) * generator.random(len(levels))
        return np.clip(drawn, low, np.nextafter(high, low))


@dataclasses.dataclass(frozen=True)
class Integer(Numeric):
    """Whole numbers between public bounds, both included; otherwise as `Continuous`.

    ```python
    >>> import numpy as np
    >>> Integer(17, 90, bins=[18, 65]).encode("age", np.array([17, 18, 90])).tolist()
    [0, 1, 2]

    ```
    """

    step: ClassVar[int] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        inner = () if isinstance(self.bins, int) else self.bins
        fields = {
            "lower": (self.lower,),
            "upper": (self.upper,),
            "bins": inner,
            "spikes": self.spikes,
        }
        if max(abs(self.lower), abs(self.upper)) >= _MOST_EXACT:
            raise ValueError(
                f"lower={self.lower!r} or upper={self.upper!r} is not below 2**53 in size, beyond "
                "which whole numbers are not exact: describe identifiers as Categorical, or "
                "rescale."
            )
        for name, values in fields.items():
            if any(float(value) != math.floor(value) for value in values):
                raise ValueError(
                    f"{name} has {_described(values)}, not all whole numbers: use Continuous, or "
                    "whole numbers."
                )

    def levels_of(self, name: str, values: np.ndarray) -> np.ndarray:
        """See `Column.levels_of`."""
        numbers = self.numbers_of(name, values)
        broken = numbers != np.floor(numbers)
        if broken.any():
            raise ValueError(
                f"column {name!r} has values that are not Integer in {check.rows(broken)}: use "
                "Continuous, or round them."
            )
        return self.bins_of(numbers)

    def values(self, levels: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        """Returns uniform draws of whole numbers in the bins.

        Args:
          levels: Integer array of shape [n].
          generator: The source of the draws.

        Returns:
          int64 array of shape [n].
        """
        edges = self.edges.astype(np.int64)
        return generator.integers(edges[levels], edges[levels + 1])


@dataclasses.dataclass(frozen=True)
class Categorical(Column):
    """One of a public list of categories.

    ```python
    >>> import numpy as np
    >>> ward = Categorical(["A", "B", "C"], missing=True)
    >>> ward.encode("ward", np.array(["B", None], object)).tolist()
    [1, -1]

    ```

    Attributes:
      categories: At least two different strings, numbers or bools. Do not collect them from the
        records.
      max_levels: Of more categories than that, `Synthesizer.fit` keeps the most frequent ones, by a
        private histogram, and merges the others. Samples have all of them.
      missing: Whether values may be missing.
      shares: The public frequency of each category, positive; None for equal ones.
      parents: A public hierarchy: the parent of each category, as chapters are of ICD codes, in
        their order or as a dict. Rare categories are merged with those of the same parent, and not
        with all others.
    """

    categories: Sequence[Hashable]
    max_levels: int = 16
    shares: Sequence[float] | None = dataclasses.field(default=None, kw_only=True)
    parents: Sequence[Hashable] | Mapping[Hashable, Hashable] | None = dataclasses.field(
        default=None, kw_only=True
    )
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
        if not all(isinstance(part, _PLAIN) and part == part for part in categories):
            raise ValueError(
                f"categories={_described(self.categories)} has an entry that is missing, or no "
                "string, number or bool, and that no file could hold: leave it out and pass "
                "missing=True, or convert the column, for pandas by column.astype(str)."
            )
        object.__setattr__(self, "categories", categories)
        object.__setattr__(self, "max_levels", check.count("max_levels", self.max_levels, 2))
        if self.shares is not None:
            object.__setattr__(self, "shares", _checked_shares(self.shares, len(categories)))
        if self.parents is not None:
            object.__setattr__(self, "parents", self._checked_parents(categories))

    def _checked_parents(self, categories: tuple[Hashable, ...]) -> tuple[Hashable, ...]:
        """Returns the parent of each category, in their order."""
        parents = self.parents
        if isinstance(parents, Mapping):
            if lacking := [category for category in categories if category not in parents]:
                raise ValueError(f"parents={_described(parents)} lacks {lacking[0]!r}.")
            parents = [parents[category] for category in categories]
        if isinstance(parents, (str, bytes)) or not isinstance(parents, Sequence):
            raise TypeError(
                f"parents={_described(parents)} must be a list, or a dict from categories."
            )
        if len(parents) != len(categories):
            raise ValueError(
                f"parents={_described(parents)} must have one entry for each of {len(categories)} "
                "categories."
            )
        if len(set(parents)) > self.max_levels < len(categories):
            raise ValueError(
                f"parents={_described(parents)} are {len(set(parents))}, and max_levels="
                f"{self.max_levels} is fewer: each parent keeps a level for its rare categories."
            )
        return tuple(parents)

    @property
    def families(self) -> np.ndarray:
        """The number of each category's parent, in order of appearance; without parents, 0."""
        parents = self.parents or [None] * len(self.categories)
        order = {parent: place for place, parent in enumerate(dict.fromkeys(parents))}
        return np.array([order[parent] for parent in parents])

    @property
    def frequencies(self) -> np.ndarray:
        """The declared share of each category, by default equal ones, float64 [num_levels]."""
        num = self.num_levels
        return np.full(num, 1.0 / num) if self.shares is None else np.array(self.shares)

    @property
    def described(self) -> str:
        """See `Column.described`."""
        return self.declared + (" (equal shares assumed)" if self.shares is None else "")

    @property
    def declared(self) -> str:
        """See `Column.declared`."""
        shown = [str(category) for category in self.categories[:_MOST_SHOWN]]
        more = len(self.categories) - len(shown)
        rest = f" and {more} more" if more else ""
        shares = "" if self.shares is None else " (shares given)"
        parents = "" if self.parents is None else f", with {len(set(self.parents))} parents"
        return f"one of {', '.join(shown)}{rest}{parents}{shares}"

    def simulate(self, num: int, generator: np.random.Generator) -> np.ndarray:
        """Returns categories, drawn with their shares.

        Args:
          num: The number of values.
          generator: The source of the values.

        Returns:
          object array of shape [num].
        """
        levels = generator.choice(self.num_levels, num, p=self.frequencies)
        return self.values(levels, generator)

    @property
    def num_levels(self) -> int:
        """The number of categories."""
        return len(self.categories)

    @property
    def fine(self) -> Column | None:
        """The column itself, if it has more than `max_levels` categories; else None."""
        return self if len(self.categories) > self.max_levels else None

    def levels_of(self, name: str, values: np.ndarray) -> np.ndarray:
        """See `Column.levels_of`."""
        known = {category: level for level, category in enumerate(self.categories)}

        def level(value: Hashable) -> int:
            try:
                return known.get(value, MISSING)
            except TypeError:
                # A value without a hash cannot be a category.
                return MISSING

        levels = np.fromiter(map(level, values.tolist()), np.int32, len(values))
        if (unknown := levels == MISSING).any():
            raise ValueError(
                f"column {name!r} has values that are not among its categories in "
                f"{check.rows(unknown)}: map them, or add them if public."
            )
        return levels

    def values(self, levels: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        """Returns the categories.

        Args:
          levels: Integer array of shape [n].
          generator: Not used: a category is one value.

        Returns:
          object array of shape [n].
        """
        del generator
        listed = np.empty(len(self.categories), object)
        listed[:] = self.categories
        return listed[levels]


@dataclasses.dataclass(frozen=True)
class Binary(Column):
    """False or true, or 0 or 1.

    ```python
    >>> import numpy as np
    >>> Binary().encode("smokes", np.array([False, True])).tolist()
    [0, 1]

    ```

    Attributes:
      share: The public share of true values.
    """

    share: float = dataclasses.field(default=0.5, kw_only=True)
    kinds: ClassVar[str] = "biuf"

    def __post_init__(self) -> None:
        share = check.real("share", self.share, "pass a public share of true values")
        if not 0.0 < share < 1.0:
            raise ValueError(f"share={self.share!r} must be between 0 and 1.")

    @property
    def described(self) -> str:
        """See `Column.described`."""
        return f"0 or 1, 1 in {100.0 * self.share:.3g}% of the records"

    @property
    def declared(self) -> str:
        """See `Column.declared`."""
        return "0 or 1" if self.share == 0.5 else self.described

    def simulate(self, num: int, generator: np.random.Generator) -> np.ndarray:
        """Returns bools, true with the column's share.

        Args:
          num: The number of values.
          generator: The source of the values.

        Returns:
          bool array of shape [num].
        """
        return generator.random(num) < self.share

    @property
    def num_levels(self) -> int:
        """Two."""
        return 2

    def levels_of(self, name: str, values: np.ndarray) -> np.ndarray:
        """See `Column.levels_of`."""
        numbers, strange = converted(lambda some: some.astype(np.float64), values)
        strange |= (numbers != 0.0) & (numbers != 1.0)
        if strange.any():
            raise ValueError(
                f"column {name!r} has values that are not Binary in {check.rows(strange)}: code "
                "them as 0 and 1, or use Categorical."
            )
        return numbers.astype(np.int32)

    def values(self, levels: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        """Returns bools.

        Args:
          levels: Integer array of shape [n].
          generator: Not used: a level is one value.

        Returns:
          bool array of shape [n].
        """
        del generator
        return levels.astype(bool)


def _checked_shares(shares: Sequence[float], num: int) -> tuple[float, ...]:
    values = np.asarray(shares, np.float64)
    if values.shape != (num,) or not (values > 0.0).all() or not np.isclose(values.sum(), 1.0):
        raise ValueError(f"shares must be {num} positive numbers whose sum is 1, one a category.")
    return tuple(float(value) for value in values / values.sum())


def _described(values: check.Unchecked) -> str:
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
    """Converts values, all at once or, where that fails, one by one.

    NumPy's errors show the values; here none leaves, not even as a cause.

    Args:
      convert: The conversion of an array of shape [n].
      values: Array of shape [n].

    Returns:
      The converted values, and which ones cannot be converted: bool [n].
    """
    strange = np.zeros(len(values), bool)
    with warnings.catch_warnings():
        # NumPy warns where it moves dates with a time zone.
        warnings.filterwarnings("error", message=".*timezone")
        with contextlib.suppress(TypeError, ValueError, OverflowError, Warning):
            return convert(values), strange
        numbers = np.zeros(len(values))
        for place in range(len(values)):
            strange[place] = True
            with contextlib.suppress(TypeError, ValueError, OverflowError, Warning):
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
    absent = (
        type(value).__name__ in kinds or (isinstance(value, float) and value != value)
        for value in values
    )
    return np.fromiter(absent, bool, len(values))
