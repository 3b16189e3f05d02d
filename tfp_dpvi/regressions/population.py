"""Means, totals, shares and quantiles of a finite population: post-stratification by public counts.

The table of counts says how many persons of each kind a population has. For each draw of the
posterior the outcomes of all of them are drawn, or what is asked of their sum: so an interval has
the uncertainty of the coefficients and that of the persons who were not asked. Nothing of the
records is read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import special, stats

from tfp_dpvi import _validate as check
from tfp_dpvi.data import frames
from tfp_dpvi.data.columns import is_missing

if TYPE_CHECKING:
    from tfp_dpvi.data.schema import TableData

ESTIMATES = ("mean", "total", "share", "quantile")
_SHARED = ("categorical", "ordinal")
_FAMILIES = ("normal", "bernoulli", "poisson", "negative_binomial", *_SHARED)
_BISECTIONS = 60
# The most persons, and the most that a count of a Poisson distribution is drawn for, beyond which
# NumPy refuses.
_MOST = 1e15


@dataclasses.dataclass(frozen=True, eq=False)
class Strata:
    """A population as a table of counts.

    Attributes:
      counts: The number of persons of each row, float64 of shape [n].
      area: The number of the area of each row, shape [n].
      labels: The values of the columns that make an area, by name, each of shape [areas].
    """

    counts: np.ndarray
    area: np.ndarray
    labels: dict[str, np.ndarray]

    @property
    def num_areas(self) -> int:
        """The number of areas."""
        return int(self.area.max()) + 1

    @property
    def sizes(self) -> np.ndarray:
        """The number of persons of each area, shape [areas]."""
        return np.bincount(self.area, self.counts, self.num_areas)

    def totals(self, values: np.ndarray) -> np.ndarray:
        """Returns sums over the rows of each area, shape [S, areas, ...].

        Args:
          values: Shape [S, n, ...].
        """
        one_hot = (self.area[:, None] == np.arange(self.num_areas)).astype(np.float64)
        summed: np.ndarray = np.einsum("sn...,na->sa...", values, one_hot)
        return summed


def make_strata(
    data: TableData, count: str, by: Sequence[str] | str, num_records: int | None
) -> Strata:
    """Reads a table of counts.

    Args:
      data: The table.
      count: Its column of counts.
      by: Names of columns; each combination of their values is an area.
      num_records: The public number of records, which the population has at least.

    Raises:
      ValueError: A column is absent, a count is none, or the counts do not fit the records.
    """
    by = (by,) if isinstance(by, str) else by
    if not isinstance(by, Sequence) or not all(isinstance(name, str) for name in by):
        raise TypeError(f"by={check.shown(by)}: pass the name of a column, or a list of names.")
    columns: Any = data if frames.container_of(data) is None else frames.columns_of(data)
    for argument, names in (("count", (count,)), ("by", by)):
        if absent := [name for name in names if name not in columns]:
            raise ValueError(
                f"{argument}={check.shown(absent[0])} is no column of counts: it has "
                f"{', '.join(map(str, columns))}."
            )
    counts = _counts(count, np.asarray(columns[count]))
    arrays = {name: np.asarray(columns[name]) for name in by}
    for name, array in arrays.items():
        # NaN is unlike itself: each row would be an area.
        if (missing := is_missing(array)).any():
            raise ValueError(
                f"counts: the column {name!r} of by has missing values in {check.rows(missing)}: "
                "fill them, or leave these rows out."
            )
    keys = list(zip(*(array.tolist() for array in arrays.values()), strict=True))
    numbers: dict[Any, int] = {}
    area = np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)
    if not by:
        area = np.zeros(len(counts), np.int64)
    first = np.unique(area, return_index=True)[1]
    strata = Strata(counts, area, {name: array[first] for name, array in arrays.items()})
    empty = np.flatnonzero(strata.sizes == 0.0)
    if len(empty):
        labels = [f"{name}={array[empty[0]]}" for name, array in strata.labels.items()]
        raise ValueError(
            f"counts: {', '.join(labels) or 'the population'} has no persons: leave its rows out."
        )
    if counts.sum() > _MOST:
        raise ValueError(f"counts add up to more than {_MOST:g} persons: pass numbers of persons.")
    if num_records is not None and counts.sum() < num_records:
        raise ValueError(
            f"counts add up to {counts.sum():,.0f} persons, fewer than the {num_records:,} "
            "records: pass the counts of the whole population, not of the sample."
        )
    return strata


def _counts(name: str, values: np.ndarray) -> np.ndarray:
    """Returns counts as whole numbers, float64 [n]."""
    try:
        counts = values.astype(np.float64)
    except (TypeError, ValueError):
        counts = np.full(len(values), np.nan)
    is_count = np.isfinite(counts) & (counts >= 0.0) & (counts == np.round(counts))
    if not len(counts) or not is_count.all():
        raise ValueError(
            f"counts: the column {name!r} must have whole numbers of 0 or more, and has others in "
            f"{check.rows(~is_count) if len(counts) else 'no rows at all'}."
        )
    return counts


@dataclasses.dataclass(frozen=True, eq=False)
class Outcomes:
    """The distribution of the outcomes of each kind of person, for each draw of the posterior.

    Attributes:
      family: The family.
      counts: The numbers of persons, shape [n] or [S, n].
      mean: Expected outcomes, shape [S, n], or probabilities of levels, [S, n, levels].
      spread: Of normal outcomes the standard deviation, of negative binomial ones the size, shape
        [S, 1]; infinite for others.
    """

    family: str
    counts: np.ndarray
    mean: np.ndarray
    spread: np.ndarray

    def sums(self, generator: np.random.Generator) -> np.ndarray:
        """Returns draws of the sum of all persons' outcomes, of the shape of `mean`.

        Args:
          generator: The source of random numbers.
        """
        whole = np.broadcast_to(self.counts, self.mean.shape[:2]).astype(np.int64)
        if self.family in _SHARED:
            shares = np.maximum(self.mean, 0.0)
            shares = shares / shares.sum(axis=2, keepdims=True)
            return generator.multinomial(whole, shares).astype(np.float64)
        if self.family == "bernoulli":
            return generator.binomial(whole, self.mean).astype(np.float64)
        if self.family == "normal":
            noise = generator.normal(size=self.mean.shape)
            return whole * self.mean + np.sqrt(whole) * self.spread * noise
        rates = whole * self.mean
        if self.family == "negative_binomial":
            rates = generator.gamma(whole * self.spread) * self.mean / self.spread
        return generator.poisson(np.minimum(rates, _MOST)).astype(np.float64)

    def below(self, value: np.ndarray | float) -> np.ndarray:
        """Returns the probability of an outcome of at most a value, shape [S, n].

        Args:
          value: The value, that broadcasts to [S, n].
        """
        if self.family == "normal":
            return special.ndtr((value - self.mean) / self.spread)
        if self.family == "poisson":
            return stats.poisson.cdf(value, self.mean)
        return stats.nbinom.cdf(value, self.spread, self.spread / (self.spread + self.mean))

    @property
    def range(self) -> tuple[float, float]:
        """Numbers that practically no outcome is below or above; whole ones for counts."""
        if self.family == "normal":
            low, high = np.min(self.mean - 12.0 * self.spread), np.max(self.mean + 12 * self.spread)
            return float(low), float(high)
        top = float(self.mean.max())
        return -1.0, float(np.ceil(20.0 + top + 40.0 * np.sqrt(top + top**2 / self.spread.min())))


def estimates(
    outcomes: Outcomes,
    strata: Strata,
    estimate: str,
    at: float | None,
    generator: np.random.Generator,
) -> np.ndarray:
    """Returns draws of an estimate of each area, shape [S, areas] or [S, areas, levels].

    Args:
      outcomes: The distributions of outcomes.
      strata: The areas of rows.
      estimate: One of `ESTIMATES`.
      at: The value of a share, or the probability of a quantile.
      generator: The source of random numbers.
    """
    sizes = strata.sizes
    if estimate == "quantile":
        return _quantiles(outcomes, strata, float(at or 0.0), generator)
    if estimate == "share":
        whole = np.broadcast_to(outcomes.counts, outcomes.mean.shape).astype(np.int64)
        drawn = generator.binomial(whole, outcomes.below(float(at or 0.0)))
        return strata.totals(drawn.astype(np.float64)) / sizes
    totals = strata.totals(outcomes.sums(generator))
    if estimate == "total":
        return totals
    return totals / (sizes[:, None] if totals.ndim == 3 else sizes)


def _quantiles(
    outcomes: Outcomes,
    strata: Strata,
    probability: float,
    generator: np.random.Generator,
) -> np.ndarray:
    """Returns draws of a quantile of each area, shape [S, areas].

    The quantile of N outcomes is one of them: that of rank k = ceil(N p). Among independent draws
    its probability has a beta distribution.
    """
    sizes = strata.sizes
    rank = np.clip(np.ceil(probability * sizes), 1.0, sizes)
    num = len(outcomes.mean)
    levels = generator.beta(rank, sizes - rank + 1.0, size=(num, len(sizes)))
    low, high = (np.full(levels.shape, end) for end in outcomes.range)
    is_whole = outcomes.family != "normal"
    weights = np.broadcast_to(outcomes.counts, outcomes.mean.shape)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2.0
        middle = np.floor(middle) if is_whole else middle
        below = strata.totals(weights * outcomes.below(middle[:, strata.area])) / sizes
        is_enough = below >= levels
        high = np.where(is_enough, middle, high)
        low = np.where(is_enough, low, middle)
        if is_whole and np.max(high - low) <= 1.0:
            break
    return high


def check_estimate(estimate: str, at: float | None, family: str) -> None:
    """Raises for an estimate that a family does not have.

    Args:
      estimate: One of `ESTIMATES`.
      at: The value of a share, or the probability of a quantile.
      family: The family.

    Raises:
      ValueError: It has none, or `at` does not fit.
    """
    check.one_of("estimate", estimate, ESTIMATES)
    if family not in _FAMILIES:
        raise ValueError(
            f"population estimates are not known for family={family!r}: use predict, or one of "
            f"{', '.join(_FAMILIES)}."
        )
    needs = estimate in ("share", "quantile")
    if needs and family in ("bernoulli", *_SHARED):
        raise ValueError(
            f"estimate={estimate!r} needs an outcome that is a number; family={family!r} has "
            'shares of levels: use "mean".'
        )
    if needs != (at is not None):
        raise ValueError(
            f"at={check.shown(at)} with estimate={estimate!r}: pass at= the value of a share or "
            "the probability of a quantile, and to no other estimate."
        )
    if estimate == "quantile":
        check.probability("at", at)
    elif needs:
        check.real("at", at, "pass a number")


def table(
    draws: np.ndarray, strata: Strata, level: float, names: Sequence[str] | None
) -> dict[str, Any]:
    """Returns the columns of a table of estimates.

    Args:
      draws: Shape [S, areas] or [S, areas, levels].
      strata: The areas.
      level: The probability of the intervals, which are central.
      names: The names of the outcome's levels, or None.

    Raises:
      ValueError: A column of the areas has the name of an estimate.
    """
    tail = (1.0 - level) / 2.0
    repeated = 1 if names is None else len(names)
    flat = draws.reshape(len(draws), -1)
    columns: dict[str, Any] = {}
    columns["count"] = np.repeat(np.round(strata.sizes).astype(np.int64), repeated)
    if names is not None:
        columns["level"] = np.tile(np.array(names, object), strata.num_areas)
    low, high = np.quantile(flat, [tail, 1.0 - tail], axis=0)
    columns["estimate"] = flat.mean(axis=0)
    columns["sd"] = flat.std(axis=0)
    columns[f"eti_{100 * tail:g}%"] = low
    columns[f"eti_{100 * (1.0 - tail):g}%"] = high
    if taken := [name for name in strata.labels if name in columns]:
        raise ValueError(
            f"by={check.shown(taken[0])} is the name of a column of estimates: rename it in counts."
        )
    labels = {name: np.repeat(array, repeated) for name, array in strata.labels.items()}
    return {**labels, **columns}
