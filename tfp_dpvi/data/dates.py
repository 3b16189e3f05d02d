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
    """Dates between public bounds, both included; otherwise as `Integer`, with `bins` in units since 1970.

    Attributes:
      lower: the first date: "2020-01-01", `datetime.date`, `np.datetime64`, or a number of units since 1970.
      upper: the last date, likewise.
      unit: the resolution: days "D", hours "h", minutes "m" or seconds "s". Samples are whole units.
      missing: whether values may be missing.
    """

    lower: Any  # A number after construction.
    upper: Any
    unit: str = dataclasses.field(default="D", kw_only=True)
    kinds: ClassVar[str] = "M"
    _not: ClassVar[str] = "no dates"

    def __post_init__(self) -> None:
        check.one_of("unit", self.unit, _UNITS)
        for name in ("lower", "upper"):
            value = getattr(self, name)
            if isinstance(value, (str, datetime.date, np.datetime64)):
                try:
                    value = int(
                        np.datetime64(value).astype(f"datetime64[{self.unit}]").astype(np.int64)
                    )
                except ValueError:
                    raise ValueError(
                        f'{name}={value!r} is no date: pass, for example, "2020-01-31".'
                    ) from None
            object.__setattr__(self, name, value)
        super().__post_init__()

    @property
    def special(self) -> tuple[float, ...]:
        """Common values as for numbers, without 1970."""
        return (*self.spikes, self.lower, self.upper)

    def _converted(self, values: np.ndarray) -> np.ndarray:
        return values.astype(f"datetime64[{self.unit}]").astype(np.int64)

    def _shown(self, number: float) -> str:
        return str(np.array(int(number)).astype(f"datetime64[{self.unit}]"))

    def values(self, levels: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        """Returns uniform draws of dates in the bins, datetime64 [n]."""
        return super().values(levels, generator).astype(f"datetime64[{self.unit}]")
