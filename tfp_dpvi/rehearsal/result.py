"""The result of a rehearsal: tables, curves and the number of records that shows an effect."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from scipy import stats

from tfp_dpvi import _validate as check
from tfp_dpvi.rehearsal.store import Row

if TYPE_CHECKING:
    import pandas

_MOST_SHOWN = 24
# A share of outcomes beyond the schema's bounds from which records are unlike the simulated ones.
_MOST_OUTSIDE = 0.01


class Needed(NamedTuple):
    """The number of records that shows an effect.

    Attributes:
      num_records: The estimate, interpolated between the numbers that were rehearsed.
      low: The lower end of what the number of data sets leaves open, 95 %; 0 if below the smallest.
      high: The upper end; infinite if above the largest.

    ```python
    >>> print(Needed(1250, 900.0, math.inf))
    1,250 records (900 to more than were rehearsed)

    ```
    """

    num_records: int
    low: float
    high: float

    def __str__(self) -> str:
        high = f"{self.high:,.0f}" if math.isfinite(self.high) else "more than were rehearsed"
        low = f"{self.low:,.0f}" if self.low else "less"
        return f"{self.num_records:,} records ({low} to {high})"


@dataclasses.dataclass(frozen=True, eq=False)
class Rehearsal:
    """Figures of private fits of simulated records; nothing in it is private or cost privacy.

    `dpvi.rehearse` and `dpvi.rehearse_regression` make it; `print` shows its table.

    Attributes:
      names: The names of the P numbers that are reported.
      num_records: The numbers of records, in order.
      epsilon: The epsilons, in order.
      delta: The delta of all fits.
      level: The probability of the intervals, which are central.
      seed: The seed of data sets and noise.
      fixed: True values that every data set had, by name; others came from the prior.
      rows: The rows of the fits, by number of records and epsilon.

    ```python
    >>> row = {"truth": [1.0], "mean": [1.1], "sd": [0.2], "low": [0.7], "high": [1.5]}
    >>> row = {**row, "failed": False, "doubtful": [], "warnings": [], "outside": 0.0}
    >>> rehearsal = Rehearsal(
    ...     ("w",), (500,), (1.0,), 1e-5, 0.95, 0, {"w": 1.0}, {(500, 1.0): [row] * 20}
    ... )
    >>> rehearsal.power("w")
    {(500, 1.0): 1.0}
    >>> round(float(rehearsal.columns(500, 1.0)["width"][0]), 2)
    0.8

    ```
    """

    names: tuple[str, ...]
    num_records: tuple[int, ...]
    epsilon: tuple[float, ...]
    delta: float
    level: float
    seed: int
    fixed: Mapping[str, float]
    rows: Mapping[tuple[int, float], list[Row]]

    # ------------------------------------------------------------------ tables

    def columns(self, num_records: int, epsilon: float) -> dict[str, np.ndarray]:
        """Returns figures of one number of records and epsilon, each of shape [P].

        Args:
          num_records: One of the rehearsed numbers of records.
          epsilon: One of the rehearsed epsilons.

        Returns:
          "truth" is the true value, NaN if it differs between data sets. "width" (the median: a few
          fits have very wide intervals), "bias", "error" (the root mean square of the posterior
          mean's error) and "coverage" are over the fits that gave a posterior; "coverage_error" is
          the standard error of "coverage". "power" is the share of all fits whose interval excludes
          0, NaN without a fixed truth. "doubtful" is the share of all fits that warn of this
          number, or gave no posterior.

        Raises:
          ValueError: They were not rehearsed.
        """
        rows = self._rows(num_records, epsilon)
        good = [row for row in rows if not row["failed"]]
        found = {
            name: np.array([row[name] for row in good]).reshape(len(good), len(self.names))
            for name in ("truth", "mean", "low", "high")
        }
        truth, mean = found["truth"], found["mean"]
        low, high = found["low"], found["high"]
        known = np.array([self.fixed.get(name, math.nan) for name in self.names])
        unknown = np.full(len(self.names), math.nan)
        failed = len(rows) - len(good)
        doubtful = np.full(len(self.names), float(failed))
        for row in good:
            doubtful[row["doubtful"]] += 1.0
        result = {"truth": known}
        if good:
            inside = (low <= truth) & (truth <= high)
            coverage = inside.mean(axis=0)
            result["width"] = np.median(high - low, axis=0)
            result["bias"] = (mean - truth).mean(axis=0)
            result["error"] = np.sqrt(np.square(mean - truth).mean(axis=0))
            result["coverage"] = coverage
            spread = np.maximum(coverage * (1.0 - coverage), self.level * (1.0 - self.level))
            result["coverage_error"] = np.sqrt(spread / len(good))
        else:
            names = ("width", "bias", "error", "coverage", "coverage_error")
            result.update(dict.fromkeys(names, unknown))
        excluded = ((low > 0.0) | (high < 0.0)).sum(axis=0) / max(len(rows), 1)
        result["power"] = np.where(np.isnan(known), math.nan, excluded)
        result["doubtful"] = doubtful / max(len(rows), 1)
        return result

    def table(self) -> pandas.DataFrame:
        """Returns a pandas DataFrame with a row for each number of records, epsilon and name.

        Returns:
          The columns of `columns`, "fits", the number of data sets, and "warned" and "failed", the
          shares of fits with any warning, and without a posterior.
        """
        import pandas

        blocks = []
        for (num, epsilon), rows in self.rows.items():
            block = pandas.DataFrame(self.columns(num, epsilon))
            block.insert(0, "name", self.names)
            block.insert(0, "epsilon", epsilon)
            block.insert(0, "num_records", num)
            block["fits"] = len(rows)
            block["warned"] = self.warned(num, epsilon)
            block["failed"] = _share(rows, "failed")
            blocks.append(block)
        table = pandas.concat(blocks, ignore_index=True)
        return table.set_index(["num_records", "epsilon", "name"])

    def warned(self, num_records: int, epsilon: float) -> float:
        """Returns the share of fits that warn of anything, or gave no posterior.

        Args:
          num_records: One of the rehearsed numbers of records.
          epsilon: One of the rehearsed epsilons.
        """
        rows = self._rows(num_records, epsilon)
        return float(np.mean([bool(row["warnings"]) or row["failed"] for row in rows]))

    def warnings(self, num_records: int, epsilon: float) -> dict[str, float]:
        """Returns the share of fits with each warning, the most frequent first.

        Args:
          num_records: One of the rehearsed numbers of records.
          epsilon: One of the rehearsed epsilons.

        Returns:
          Shares by the warnings' sentences, without their numbers.
        """
        rows = self._rows(num_records, epsilon)
        counts = collections.Counter(text for row in rows for text in set(row["warnings"]))
        shares = {text: num / len(rows) for text, num in counts.most_common()}
        if failed := _share(rows, "failed"):
            shares["the noise left no posterior"] = failed
        return shares

    def _rows(self, num_records: int, epsilon: float) -> list[Row]:
        if (num_records, epsilon) not in self.rows:
            raise ValueError(
                f"num_records={check.shown(num_records)}, epsilon={check.shown(epsilon)} were not "
                f"rehearsed: use one of {list(self.num_records)} and of {list(self.epsilon)}."
            )
        return self.rows[num_records, epsilon]

    # ------------------------------------------------------------------ power

    def _place(self, name: str) -> int:
        if name not in self.names:
            raise ValueError(
                f"name={check.shown(name)} is unknown: use {', '.join(self.names[:_MOST_SHOWN])}."
            )
        if name not in self.fixed:
            raise ValueError(
                f"power of {name!r} needs a given effect: rehearse with truth={{{name!r}: ...}}."
            )
        return self.names.index(name)

    def power(self, name: str) -> dict[tuple[int, float], float]:
        """Returns the share of fits whose interval excludes 0, by number of records and epsilon.

        A fit without a posterior counts as one that does not exclude it. With a true value of 0 it
        is the rate of false findings.

        Args:
          name: A name with a given truth, the effect.

        Raises:
          ValueError: The name is unknown, or its truth was drawn.
        """
        place = self._place(name)
        return {cell: float(self.columns(*cell)["power"][place]) for cell in self.rows}

    def records_for(self, name: str, power: float = 0.8, epsilon: float | None = None) -> Needed:
        """Returns how many records show an effect with some probability.

        Args:
          name: A name with a given truth, the effect.
          power: The probability that its interval excludes 0.
          epsilon: One of the rehearsed epsilons; None if there is only one.

        Raises:
          ValueError: The power is not reached between the smallest and the largest number of
            records, or the name has no given truth.
        """
        power = check.probability("power", power)
        if epsilon is None:
            if len(self.epsilon) > 1:
                raise ValueError(f"epsilon is missing: pass one of {list(self.epsilon)}.")
            epsilon = self.epsilon[0]
        place = self._place(name)
        shares = [float(self.columns(num, epsilon)["power"][place]) for num in self.num_records]
        fits = [len(self.rows[num, epsilon]) for num in self.num_records]
        estimate = _crossing(self.num_records, shares, power)
        if not 0.0 < estimate < math.inf:
            where, fix = ("smallest", "smaller") if estimate == 0.0 else ("largest", "larger")
            end = 0 if estimate == 0.0 else -1
            raise ValueError(
                f"power={power:g} lies beyond the {where} num_records={self.num_records[end]:,}, "
                f"where it is {shares[end]:.2f}: rehearse with {fix} ones too."
            )
        sides = [_wilson(share, num) for share, num in zip(shares, fits, strict=True)]
        low = _crossing(self.num_records, [side[1] for side in sides], power)
        high = _crossing(self.num_records, [side[0] for side in sides], power)
        return Needed(math.ceil(estimate), low, high)

    # ------------------------------------------------------------------ text and picture

    @property
    def notes(self) -> list[str]:
        """Sentences on what the simulated data sets are, and where private ones would differ."""
        notes = []
        given = ", ".join(f"{name} = {value:.4g}" for name, value in self.fixed.items())
        others = [name for name in self.names if name not in self.fixed]
        if given:
            notes.append(f"true values: {given}")
        if others:
            notes.append(f"drawn from the prior: {_few(others)}")
        outside = max(
            (
                float(np.mean([row["outside"] for row in rows]))
                for rows in self.rows.values()
                if rows
            ),
            default=0.0,
        )
        if outside > _MOST_OUTSIDE:
            notes.append(
                f"WARNING: {outside:.1%} of the simulated outcomes are outside of the schema's "
                "bounds, which private ones are not: pass a truth, or priors that fit the bounds"
            )
        return notes

    def __str__(self) -> str:
        lines = []
        width = max(len(name) for name in self.names[:_MOST_SHOWN])
        shown = ("truth", "width", "bias", "coverage", "power", "doubtful")
        for (num, epsilon), rows in self.rows.items():
            lines.append(
                f"{num:,} records, epsilon {epsilon:g}, delta {self.delta:g}: {len(rows)} "
                f"simulated data sets, {self.level:.0%} intervals, "
                f"{self.warned(num, epsilon):.0%} with a warning"
            )
            columns = self.columns(num, epsilon)
            lines.append(" " * width + "".join(f"{name:>10}" for name in shown))
            for place, name in enumerate(self.names[:_MOST_SHOWN]):
                numbers = (columns[column][place] for column in shown)
                cells = ("-" if math.isnan(number) else f"{number:.3g}" for number in numbers)
                lines.append(f"{name:<{width}}" + "".join(f"{cell:>10}" for cell in cells))
            if len(self.names) > _MOST_SHOWN:
                lines.append(f"... and {len(self.names) - _MOST_SHOWN} more: see table().")
        return "\n".join([*lines, *(f"{note}." for note in self.notes)])

    def __repr__(self) -> str:
        return str(self)

    def plot(self, name: str | None = None, ax: Any = None) -> Any:
        """Draws the curve of power, or of widths where no effect was given, over records.

        Args:
          name: What to draw; None for the first name with a given truth other than 0, or else the
            first name.
          ax: Axes of matplotlib; None for new ones.

        Returns:
          The axes.
        """
        import matplotlib.pyplot as plt

        effects = [each for each in self.names if self.fixed.get(each)]
        name = name or (effects or self.names)[0]
        if name not in self.names:
            self._place(name)
        place = self.names.index(name)
        what = "power" if name in self.fixed else "width"
        ax = ax or plt.subplots(figsize=(5.5, 3.6), layout="constrained")[1]
        for epsilon in self.epsilon:
            values = [self.columns(num, epsilon)[what][place] for num in self.num_records]
            (line,) = ax.plot(self.num_records, values, "o-", label=f"epsilon {epsilon:g}")
            if what == "power":
                fits = [len(self.rows[num, epsilon]) for num in self.num_records]
                ends = [_wilson(*pair) for pair in zip(values, fits, strict=True)]
                lows, highs = zip(*ends, strict=True)
                ax.fill_between(self.num_records, lows, highs, color=line.get_color(), alpha=0.2)
        ax.set_xscale("log")
        ax.set_xlabel("records")
        if what == "power":
            ax.axhline(0.8, color="0.7", lw=0.8, zorder=0)
            ax.set_ylim(0.0, 1.0)
            ax.set_ylabel(
                f"probability that the interval of {name}\nexcludes 0, at {self.fixed[name]:g}"
            )
        else:
            ax.set_yscale("log")
            ax.set_ylabel(f"width of the {self.level:.0%} interval of {name}")
        ax.legend()
        return ax


def _share(rows: list[Row], name: str) -> float:
    return float(np.mean([bool(row[name]) for row in rows]))


def _few(names: list[str]) -> str:
    """Returns names as text, of which only a few are shown."""
    shown = ", ".join(names[:_MOST_SHOWN])
    return shown + (f" and {len(names) - _MOST_SHOWN} more" if len(names) > _MOST_SHOWN else "")


def _wilson(share: float, num: int) -> tuple[float, float]:
    """Returns Wilson's 95 % interval of a probability.

    Args:
      share: The share of successes.
      num: The number of trials.
    """
    z = float(stats.norm.ppf(0.975))
    centre = (share + z * z / (2.0 * num)) / (1.0 + z * z / num)
    half = z * math.sqrt(share * (1.0 - share) / num + (z / (2.0 * num)) ** 2) / (1.0 + z * z / num)
    return max(centre - half, 0.0), min(centre + half, 1.0)


def _crossing(nums: tuple[int, ...], shares: list[float], power: float) -> float:
    """Returns where a curve first stays at or above a power: 0 or infinite if beyond its ends.

    Between two numbers of records it is linear in the normal quantile over the square root.

    Args:
      nums: Numbers of records, increasing.
      shares: The power at each.
      power: The power to reach.
    """
    # More records never show less: what chance has put out of order is averaged.
    rising = _rising(np.array(shares))
    if rising[0] >= power:
        return 0.0
    if rising[-1] < power:
        return math.inf
    place = int(np.argmax(rising >= power))
    ends = stats.norm.ppf(np.clip(rising[place - 1 : place + 1], 1e-3, 1.0 - 1e-3))
    target = float(stats.norm.ppf(min(power, 1.0 - 1e-3)))
    roots = np.sqrt(np.array(nums[place - 1 : place + 1], np.float64))
    part = (target - ends[0]) / max(ends[1] - ends[0], 1e-9)
    return float((roots[0] + min(max(part, 0.0), 1.0) * (roots[1] - roots[0])) ** 2)


def _rising(values: np.ndarray) -> np.ndarray:
    """Returns the nearest values that do not fall, by pooling adjacent ones."""
    pools: list[list[float]] = []
    for value in values:
        pools.append([float(value)])
        while len(pools) > 1 and np.mean(pools[-2]) > np.mean(pools[-1]):
            pools[-2:] = [pools[-2] + pools[-1]]
    return np.concatenate([np.full(len(pool), np.mean(pool)) for pool in pools])
