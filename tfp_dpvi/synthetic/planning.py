"""Plans of tables: the releases of a fit, and how much of them is noise, without data."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import itertools
import math
from collections.abc import Callable, Iterable, Mapping

from tfp_dpvi.data.columns import Numeric
from tfp_dpvi.data.dates import Date
from tfp_dpvi.data.schema import Schema
from tfp_dpvi.privacy import BudgetExhaustedError, PrivacyPlan
from tfp_dpvi.synthetic import grouping
from tfp_dpvi.synthetic.pairs import Pairs

# Fraction of the budget for the histograms that choose levels.
SHARE = 0.1

# A column drowns if a level expects fewer records than so many standard deviations of the noise.
_CLEAR = 2.0

# The largest epsilon that is proposed.
_LARGEST_EPSILON = 100.0

# Names that a message lists.
_MOST_SHOWN = 6

# How dates are written as numbers, by the number of digits.
_DATES = {6: "YYYYMM", 8: "YYYYMMDD", 10: "YYYYMMDDHH", 12: "YYYYMMDDHHMM", 14: "YYYYMMDDHHMMSS"}


def releases_of(schema: Schema, pairs: Pairs) -> list[tuple[str, float, float]]:
    """Returns purpose, norm and budget share of a fit's releases.

    Args:
      schema: The user's description.
      pairs: The counts of the coded columns.

    Returns:
      Those of the histograms that choose levels, if any, and of the counts of pairs.
    """
    columns = [schema.columns[name] for name in schema.open]
    first = []
    if columns:
        norm = math.sqrt(sum(grouping.depths(column) for column in columns))
        named = "1 column" if len(columns) == 1 else f"{len(columns)} columns"
        first = [(f"histograms of {named}, by which levels are chosen", norm, SHARE)]
    num = len(schema.names)
    purpose = f"counts of levels of {num} columns and of their pairs"
    if num == 1:
        purpose = "counts of 1 column"
    if pairs.within is not None:
        purpose += f", those of others within each level of {schema.names[pairs.within]!r}"
    return [*first, (purpose, pairs.norm, 1.0 - SHARE * len(first))]


@dataclasses.dataclass(frozen=True)
class TablePlan:
    """Compares the noise of a fit with the records that its counts expect.

    ```python
    >>> plan = TablePlan(200, {"age": 16, "smokes": 2}, 7.0, sufficient_epsilon=1.5)
    >>> plan.drowned, plan.most_levels
    (('age',), 14)
    >>> plan.advice
    'Use at most 1 column of as many levels, or bins=14 or as many categories, or epsilon=1.5.'

    ```

    Attributes:
      num_records: The public number of records.
      levels: The number of levels of each column.
      deviation: The standard deviation of the noise of a count.
      epsilon: The budget; None if it was not given.
      delta: The delta of the budget.
      sufficient_epsilon: An epsilon at which no column drowns; None if it was not sought, or none
        up to 100 is enough.
      target: The column within whose two levels pairs of others are counted, so that their own
        counts are sums of two noisy ones; None without such triples.
    """

    num_records: int
    levels: Mapping[str, int]
    deviation: float
    epsilon: float | None = None
    delta: float | None = None
    sufficient_epsilon: float | None = None
    target: str | None = None

    @property
    def expected(self) -> dict[str, float]:
        """The records that an average level of each column expects."""
        return {name: self.num_records / num for name, num in self.levels.items()}

    @property
    def drowned(self) -> tuple[str, ...]:
        """The columns whose levels expect fewer records than two deviations of the noise."""
        least = _CLEAR * self.deviation
        return tuple(name for name, expected in self.expected.items() if expected < least)

    @property
    def drowned_pairs(self) -> tuple[tuple[str, str], ...]:
        """The pairs whose cells expect fewer records than one deviation of their noise."""
        wide = 1.0 if self.target is None else math.sqrt(2.0)
        return tuple(
            (one, other)
            for one, other in itertools.combinations(self.levels, 2)
            if self.num_records / (self.levels[one] * self.levels[other])
            < self.deviation * (1.0 if self.target in (one, other) else wide)
        )

    @property
    def most_levels(self) -> int:
        """The number of levels up to which a column of this table does not drown."""
        if self.deviation == 0.0:
            return self.num_records
        return int(self.num_records / (_CLEAR * self.deviation))

    @property
    def most_columns(self) -> int:
        """The number of columns, with as many levels as these, up to which none drowns."""
        num = len(self.levels)
        unit = self.deviation / math.sqrt(num * (num + 1) / 2)
        least = min(self.expected.values())
        fits = (k for k in range(num, 0, -1) if least >= _CLEAR * unit * math.sqrt(k * (k + 1) / 2))
        return next(fits, 0)

    @property
    def advice(self) -> str:
        """One sentence on changes with which no column drowns; empty if none does."""
        if not self.drowned:
            return ""
        ways = []
        if self.most_columns:
            columns = "1 column" if self.most_columns == 1 else f"{self.most_columns} columns"
            ways.append(f"at most {columns} of as many levels")
        if self.most_levels >= 2:
            ways.append(f"bins={self.most_levels} or as many categories")
        if self.sufficient_epsilon is not None:
            ways.append(f"epsilon={self.sufficient_epsilon:g}")
        return f"Use {', or '.join(ways)}." if ways else "Use more records or a larger epsilon."

    @property
    def warning(self) -> str:
        """The warning of `fit`, at most two lines; empty if no column drowns."""
        if not self.drowned:
            return ""
        first = self.drowned[0]
        return (
            f"the noise drowns {len(self.drowned)} of {len(self.levels)} columns, "
            f"{_listed(self.drowned)}: a level of {first!r} expects {self.expected[first]:.3g} "
            "records, and its count has "
            f"noise of sd {self.deviation:.3g}.\n{self.advice} Synthesizer.plan says what would "
            "work, without data."
        )

    def __str__(self) -> str:
        """Returns the plan as text."""
        budget = "" if self.epsilon is None else f", epsilon {self.epsilon:g}, delta {self.delta:g}"
        lines = [f"{self.num_records} records{budget}: noise of sd {self.deviation:.3g} per count"]
        for name, expected in self.expected.items():
            verdict = "drowns" if name in self.drowned else "clear"
            lines.append(
                f"  {name}: {self.levels[name]} levels, {expected:.3g} records each: {verdict}"
            )
        num = math.comb(len(self.levels), 2)
        lines.append(
            f"  {len(self.drowned_pairs)} of {num} pair(s) whose cells expect fewer records than "
            "the noise, and whose dependence is learned in part."
        )
        if self.target is not None:
            lines.append(
                f"  pairs of other columns are counted within each level of {self.target!r}: their "
                f"own counts have noise of sd {math.sqrt(2.0) * self.deviation:.3g}."
            )
        return "\n".join([*lines, *filter(None, [self.advice])])


def table_plan(schema: Schema, pairs: Pairs, plan: PrivacyPlan, num: int) -> TablePlan:
    """Returns what a fit would release.

    Args:
      schema: The user's description.
      pairs: The counts of the coded columns, without triples.
      plan: The plan of their release.
      num: The public number of records.
    """
    chosen = pairs.where_clear(num, plan.deviation)
    levels = dict(zip(schema.names, pairs.sizes, strict=True))
    within = None if chosen.within is None else schema.names[chosen.within]
    return TablePlan(num, levels, plan.deviation * chosen.norm / pairs.norm, target=within)


def with_sufficient(plan: TablePlan, epsilon: float, at: Callable[[float], TablePlan]) -> TablePlan:
    """Returns a plan with an epsilon at which no column drowns, if one up to 100 is enough.

    Args:
      plan: The plan.
      epsilon: Its epsilon.
      at: Returns the plan of another epsilon, or raises where a ledger does not allow it.
    """
    low, high = epsilon, epsilon
    with contextlib.suppress(BudgetExhaustedError):
        while plan.drowned and high < _LARGEST_EPSILON and at(high).drowned:
            low, high = high, min(2.0 * high, _LARGEST_EPSILON)
        if not plan.drowned or at(high).drowned:
            return plan
        while high > 1.05 * low:
            middle = math.sqrt(low * high)
            low, high = (middle, high) if at(middle).drowned else (low, middle)
        # Rounded up to two digits.
        digits = 1 - math.floor(math.log10(high))
        enough = math.ceil(high * 10.0**digits) / 10.0**digits
        return dataclasses.replace(plan, sufficient_epsilon=enough)
    return plan


def check_dates(schema: Schema) -> Iterable[str]:
    """Yields a warning for each column of numbers whose bounds look like dates."""
    for name, column in schema.columns.items():
        if not isinstance(column, Numeric) or isinstance(column, Date):
            continue
        ends = str(int(column.lower))[3:], str(int(column.upper))[3:]
        # Whole decades are as often those of other numbers.
        decades = set(ends[0]) == {"0"} and set(ends[1]) == {"9"}
        if _is_date(column.lower, "00") and _is_date(column.upper, "99") and not decades:
            yield (
                f"column {name!r} has bounds {column.lower} and {column.upper}, which look like "
                f"dates {_DATES[len(str(int(column.lower)))]}: as {type(column).__name__}, it gets "
                "days such as 20209977.\nConvert it to dates, for pandas by "
                "pandas.to_datetime(column, format=...), and describe it as Date."
            )


def _is_date(number: float, rounded: str) -> bool:
    """Returns whether a bound is a date whose month and day may be rounded to two digits."""
    text = str(int(number))
    # A month alone begins with its first day.
    full = (text + "01")[:8]
    month, day = ("01" if part == rounded else part for part in (full[4:6], full[6:]))
    with contextlib.suppress(ValueError):
        date = datetime.datetime.strptime(full[:4] + month + day, "%Y%m%d")
        return len(text) in _DATES and 1800 <= date.year <= 2200
    return False


def _listed(names: tuple[str, ...]) -> str:
    shown = ", ".join(map(repr, names[:_MOST_SHOWN]))
    return shown + (", ..." if len(names) > _MOST_SHOWN else "")
