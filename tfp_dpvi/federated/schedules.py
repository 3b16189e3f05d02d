"""Schedules: which hospitals refine their factors when, and how much of a change is taken."""

from __future__ import annotations

import dataclasses

from tfp_dpvi import _validate as check


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Base class of schedules.

    Attributes:
      rounds: how often each hospital is asked.
      damping: the share of a change that is taken in the first round, in (0, 1].
      decay: what the share is multiplied by from round to round, in (0, 1].
    """

    rounds: int = 10
    damping: float = 0.2
    decay: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "rounds", check.count("rounds", self.rounds, 1))
        for name in ("damping", "decay"):
            value = check.positive(name, getattr(self, name))
            if value > 1.0:
                raise ValueError(f"{name}={value} must be at most 1; pass a share.")
            object.__setattr__(self, name, value)

    def share(self, number: int) -> float:
        """Returns the share of a change that is taken in round `number`, from 0."""
        return self.damping * self.decay**number

    def group(self, waiting: list[str], busy: int) -> list[str]:
        """Returns whom to ask now.

        Args:
          waiting: hospitals that this round has not asked, in order.
          busy: how many have been asked and have not answered.
        """
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Synchronous(Schedule):
    """All hospitals refine at once, and their changes are applied together."""

    def group(self, waiting: list[str], busy: int) -> list[str]:
        """See `Schedule`."""
        return [] if busy else waiting


@dataclasses.dataclass(frozen=True)
class Sequential(Schedule):
    """One hospital after another. Undamped it diverges with private hospitals."""

    damping: float = 0.3

    def group(self, waiting: list[str], busy: int) -> list[str]:
        """See `Schedule`."""
        return [] if busy else waiting[:1]


@dataclasses.dataclass(frozen=True)
class Asynchronous(Schedule):
    """Nobody waits for anybody: each change is applied when it comes.

    Attributes:
      most_stale: how many changes may have been applied since a hospital was asked. What comes later is refused, and its
        privacy cost is lost, so that the bound should lie above what is usual.
    """

    damping: float = 0.3
    most_stale: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "most_stale", check.count("most_stale", self.most_stale))

    def group(self, waiting: list[str], busy: int) -> list[str]:
        """See `Schedule`."""
        return waiting
