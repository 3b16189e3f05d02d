"""When a server asks whom, and how much of a change it takes."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from tfp_dpvi import _validate as check


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Base class of schedules.

    Args:
      rounds: How often each hospital is asked.
      damping: The share of a change that is taken in the first round, in (0, 1].
      decay: The share in the last round over that in the first, in (0, 1].
      most_ahead: Rounds ahead of the slowest that answers: how stale a change may be, and how many
        rounds an absent hospital loses.
      quorum: How many hospitals must have answered their last request. Below it the study waits: no
        update is made, and no hospital is asked for new noise. At 1 it waits out an outage of all.
        Where so many have declined or were dropped that it cannot be reached any more, the study
        takes what was paid for and ends.

    Raises:
      TypeError, ValueError: An argument is out of its range.

    ```python
    >>> schedule = Synchronous(rounds=3, damping=0.4, decay=0.25)
    >>> [schedule.share(number) for number in range(3)]
    [0.4, 0.2, 0.1]

    ```
    """

    rounds: int = 20
    damping: float = 0.2
    decay: float = 1.0
    most_ahead: int = 1
    quorum: int = 1
    # Whether changes are applied once every hospital that was asked has answered.
    waits: ClassVar[bool] = True
    # Whether one hospital is asked at a time.
    one_by_one: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check.count("rounds", self.rounds, 1)
        check.count("most_ahead", self.most_ahead, 1)
        check.count("quorum", self.quorum, 1)
        for name in ("damping", "decay"):
            if check.positive(name, getattr(self, name)) > 1.0:
                raise ValueError(f"{name}={getattr(self, name)} must be at most 1; pass a share.")

    def share(self, number: int) -> float:
        """Returns the share of a change that is taken in round `number`, from 0."""
        return self.damping * self.decay ** (number / max(1, self.rounds - 1))


@dataclasses.dataclass(frozen=True)
class Synchronous(Schedule):
    """All hospitals refine at once, and their changes are applied together.

    ```python
    >>> Synchronous(rounds=5).damping
    0.3

    ```
    """

    damping: float = 0.3


@dataclasses.dataclass(frozen=True)
class Sequential(Schedule):
    """One hospital is asked after another. Undamped, it diverges with private hospitals.

    ```python
    >>> Sequential(rounds=5).damping
    0.3

    ```
    """

    damping: float = 0.3
    one_by_one: ClassVar[bool] = True


@dataclasses.dataclass(frozen=True)
class Asynchronous(Schedule):
    """Each change is applied when it comes.

    A hospital waits only for one that answers and is `most_ahead` rounds behind.

    ```python
    >>> Asynchronous(rounds=5).most_ahead
    2

    ```
    """

    damping: float = 0.4
    decay: float = 0.9**9
    most_ahead: int = 2
    waits: ClassVar[bool] = False
