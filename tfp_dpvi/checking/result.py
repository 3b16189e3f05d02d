"""The released checks: numbers with their noise, tests of a stated level, a verdict in words."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tfp_dpvi.checking import pictures

_VERDICTS = ("nothing found", "the model does not fit")


@dataclasses.dataclass(frozen=True)
class CheckTest:
    """A test whether the model is right, which knows the noise of the release.

    ```python
    >>> print(CheckTest("PIT values", 0.004, 0.008, True, "outcomes vary more than the model says"))
    PIT values: p = 0.008, outcomes vary more than the model says

    ```

    Attributes:
      name: What is tested.
      p_value: The probability of a release that is no more extreme, if the model is right.
      adjusted: The same for all tests of the release together, by Holm's method.
      failed: Whether it is below the level.
      words: What was found, and what to try; empty if nothing was.
    """

    name: str
    p_value: float
    adjusted: float
    failed: bool
    words: str

    def __str__(self) -> str:
        found = self.words if self.failed else _VERDICTS[0]
        return f"{self.name}: p = {self.adjusted:.2g}, {found}"


@dataclasses.dataclass(frozen=True, eq=False)
class Profile:
    """Released values by bins, each with the deviation that it has if the model is right.

    ```python
    >>> profile = Profile("age", ("young", "old"), np.array([0.1, 0.0]), np.array([0.04, 0.05]))
    >>> profile.z.round(1).tolist()
    [2.5, 0.0]

    ```

    Attributes:
      name: The column, "PIT" or "reliability".
      labels: The names of the bins.
      values: Of PIT values, shares over those expected, less 1; of residuals, their mean in each
        bin over three times their variance; of a reliability curve, the share of outcomes 1 less
        the predicted one.
      deviations: Standard deviations of noise and records, if the model is right.
    """

    name: str
    labels: Sequence[str]
    values: np.ndarray
    deviations: np.ndarray

    @property
    def z(self) -> np.ndarray:
        """Values over their standard deviations."""
        ratio: np.ndarray = self.values / self.deviations
        return ratio

    def to_dict(self) -> dict[str, Any]:
        """Returns a JSON-ready dictionary."""
        return {
            "name": self.name,
            "labels": list(self.labels),
            "values": self.values.tolist(),
            "deviations": self.deviations.tolist(),
        }


@dataclasses.dataclass(frozen=True)
class MeanScore:
    """The mean log score of the records, clipped to a public range.

    ```python
    >>> print(MeanScore(-1.4123, 0.03, -10.0, 0.0))
    mean log score -1.412 +- 0.03 (noise), clipped to -10 to 0 nats

    ```

    Attributes:
      mean: In nats; higher is better.
      deviation: The standard deviation of its noise.
      low: The lower end of the range.
      high: The upper end.
    """

    mean: float
    deviation: float
    low: float
    high: float

    def __str__(self) -> str:
        return (
            f"mean log score {self.mean:.4g} +- {self.deviation:.2g} (noise), clipped to "
            f"{self.low:g} to {self.high:g} nats"
        )


@dataclasses.dataclass(frozen=True, eq=False)
class PrivateChecks:
    """The result of `DPVI.check`: released values, which cost no more. `print` or `plot` it.

    ```python
    >>> score = MeanScore(-1.4, 0.03, -10.0, 0.0)
    >>> checks = PrivateChecks((), (), score, 0.05, 0.2, 1e-5, 5000, 1.0, ())
    >>> checks.passed
    True

    ```

    Attributes:
      tests: The tests.
      profiles: The released values behind them.
      score: The mean log score.
      level: The probability that any test fails although the model is right, at most.
      epsilon: What the release cost, by itself.
      delta: Its delta.
      num_records: The public number of records, or persons.
      variance_factor: By how many times more than at fixed parameters sums were allowed to vary,
        since the fit's own noise moved the parameters. Large ones leave little power.
      notes: Sentences on what limits the tests.
    """

    tests: Sequence[CheckTest]
    profiles: Sequence[Profile]
    score: MeanScore
    level: float
    epsilon: float
    delta: float
    num_records: int
    variance_factor: float
    notes: Sequence[str]

    @property
    def passed(self) -> bool:
        """True if no test failed: not that the model is right, see `docs/guides/checks.md`."""
        return not any(test.failed for test in self.tests)

    @property
    def verdict(self) -> list[str]:
        """Sentences on what is wrong and what to try, one for each test that failed."""
        return [test.words for test in self.tests if test.failed]

    def __str__(self) -> str:
        head = (
            f"Private checks of {self.num_records} records: {_VERDICTS[not self.passed]} "
            f"(level {self.level:g}; this release alone: epsilon {self.epsilon:.3g}, "
            f"delta {self.delta:g})"
        )
        lines = [head, *(f"  {test}" for test in self.tests), f"  {self.score}"]
        return "\n".join([*lines, *(f"  Note: {note}." for note in self.notes)])

    def plot(self, axes: Any = None) -> Any:
        """Draws the released values by bins, with the band in which they lie if the model is right.

        Args:
          axes: As many axes of matplotlib as `profiles`; None for new ones.

        Returns:
          The axes.
        """
        panels = [(each.name, each.labels, each.values, each.deviations) for each in self.profiles]
        return pictures.draw(panels, axes)

    def to_dict(self) -> dict[str, Any]:
        """Returns a JSON-ready dictionary, from which `from_dict` makes an equal result."""
        return {
            **{name: getattr(self, name) for name in _PLAIN},
            "notes": list(self.notes),
            "tests": [dataclasses.asdict(test) for test in self.tests],
            "profiles": [profile.to_dict() for profile in self.profiles],
            "score": dataclasses.asdict(self.score),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PrivateChecks:
        """Returns the checks of `to_dict`.

        Args:
          data: The dictionary.
        """
        profiles = [
            Profile(
                part["name"],
                tuple(part["labels"]),
                np.array(part["values"], np.float64),
                np.array(part["deviations"], np.float64),
            )
            for part in data["profiles"]
        ]
        return cls(
            tests=tuple(CheckTest(**part) for part in data["tests"]),
            profiles=tuple(profiles),
            score=MeanScore(**data["score"]),
            notes=tuple(data["notes"]),
            **{name: data[name] for name in _PLAIN},
        )


_PLAIN = ("level", "epsilon", "delta", "num_records", "variance_factor")
