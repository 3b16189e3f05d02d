"""Columns of dates."""

from __future__ import annotations

import dataclasses
import datetime
from typing import Any, ClassVar

import numpy as np

from tfp_dpvi import _validate as check
from tfp_dpvi.data.columns import Integer

_UNITS = ("D", "h", "m", "s")


@dataclasses.dataclass(frozen=True)
class Date(Integer):
    """Dates between public bounds, both included.

    Otherwise it is as `Integer`, with `bins` and `spikes` in units since 1970.

    ```python
    >>> import numpy as np
    >>> column = Date("2024-02-28", "2024-03-01")
    >>> column.encode("day", np.array(["2024-02-28", "2024-03-01"], "datetime64[D]")).tolist()
    [0, 2]

    ```

    Attributes:
      lower: The first date: "2020-01-01", a `datetime.date`, an `np.datetime64`, or a number of
        units since 1970. It is such a number after construction.
      upper: The last date, likewise.
      unit: The resolution: days "D", hours "h", minutes "m" or seconds "s". Samples are whole
        units.
      missing: Whether values may be missing.
    """

    lower: Any
    upper: Any
    unit: str = dataclasses.field(default="D", kw_only=True)
    kinds: ClassVar[str] = "M"
    fault: ClassVar[str] = "no dates without a time zone"

    def __post_init__(self) -> None:
        check.one_of("unit", self.unit, _UNITS)
        for name in ("lower", "upper"):
            object.__setattr__(self, name, self._number_of_units(name))
        super().__post_init__()

    def _number_of_units(self, name: str) -> float:
        """Returns a bound as a number of units since 1970, or the number that it is."""
        value = getattr(self, name)
        if not isinstance(value, (str, datetime.date, np.datetime64)):
            return value
        try:
            return int(self.to_numbers(np.asarray(np.datetime64(value))))
        except ValueError:
            raise ValueError(
                f'{name}={value!r} is no date: pass, for example, "2020-01-31".'
            ) from None

    @property
    def described(self) -> str:
        """See `Column.described`."""
        return self.declared

    @property
    def declared(self) -> str:
        """See `Column.declared`."""
        bounds = f"{self.as_text(self.lower)} to {self.as_text(self.upper)}"
        return ", ".join([bounds, *self.choices])

    def simulate(self, num: int, generator: np.random.Generator) -> np.ndarray:
        """See `Numeric.simulate`; returns dates."""
        numbers = super().simulate(num, generator)
        return numbers.astype(np.int64).astype(f"datetime64[{self.unit}]")

    @property
    def special(self) -> tuple[float, ...]:
        """The declared spikes and the bounds; 1970 is no common value, as 0 is among numbers."""
        return (*self.spikes, self.lower, self.upper)

    def to_numbers(self, values: np.ndarray) -> np.ndarray:
        """See `Numeric.to_numbers`."""
        return values.astype(f"datetime64[{self.unit}]").astype(np.int64)

    def as_text(self, number: float) -> str:
        """See `Numeric.as_text`."""
        return str(np.array(int(number)).astype(f"datetime64[{self.unit}]"))

    def values(self, levels: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        """Returns uniform draws of dates in the bins.

        Args:
          levels: Integer array of shape [n].
          generator: The source of the draws.

        Returns:
          datetime64 array of shape [n].
        """
        return super().values(levels, generator).astype(f"datetime64[{self.unit}]")
