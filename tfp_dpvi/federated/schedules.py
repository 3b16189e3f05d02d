"""Schedules: which hospitals refine their factors when, and how much of a change is taken."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from tfp_dpvi import _validate as check


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Base class of schedules.

    Attributes:
      rounds: how often each hospital is asked.
      damping: the share of a change that is taken in the first round, in (0, 1].
      decay: factor of the share from round to round, in (0, 1].
      most_stale: how many updates of the posterior may come between a task and its reply. A later reply is refused and
        its privacy cost is lost, so the bound should lie above what is usual.
      waits: True if changes are applied once every hospital that was asked has answered.
      one_by_one: True if one hospital is asked at a time.
    """

    rounds: int = 10
    damping: float = 0.2
    decay: float = 1.0
    most_stale: int = 100
    waits: ClassVar[bool] = True
    one_by_one: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name, least in (("rounds", 1), ("most_stale", 0)):
            object.__setattr__(self, name, check.count(name, getattr(self, name), least))
        for name in ("damping", "decay"):
            value = check.positive(name, getattr(self, name))
            if value > 1.0:
                raise ValueError(f"{name}={value} must be at most 1; pass a share.")
            object.__setattr__(self, name, value)

    def share(self, number: int) -> float:
        """Returns the share of a change that is taken in round `number`, from 0."""
        return self.damping * self.decay**number


class Synchronous(Schedule):
    """All hospitals refine at once, and their changes are applied together."""


@dataclasses.dataclass(frozen=True)
class Sequential(Schedule):
    """One hospital after another. Undamped it diverges with private hospitals."""

    damping: float = 0.3
    one_by_one: ClassVar[bool] = True


@dataclasses.dataclass(frozen=True)
class Asynchronous(Schedule):
    """No hospital waits for another: each change is applied when it comes."""

    damping: float = 0.3
    waits: ClassVar[bool] = False
