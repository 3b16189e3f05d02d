"""Estimates from released noisy counts of levels and pairs, without a model of the table.

Means, shares, correlations and least squares are functions of the counts, whose noise is known. An
interval adds three variances: of the noise, of sampling the records from a population, and of what
is assumed within levels. It is post-processing, at no cost.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence

import numpy as np
import scipy.stats

from tfp_dpvi import _validate as check
from tfp_dpvi.data.columns import Binary, Column, Numeric
from tfp_dpvi.data.schema import Schema
from tfp_dpvi.synthetic.grouping import Grouped
from tfp_dpvi.synthetic.levels import FEW, Far, LevelValues, labels_of
from tfp_dpvi.synthetic.moments import Moments
from tfp_dpvi.synthetic.pairs import NoisyPairs
from tfp_dpvi.synthetic.quantiles import Cumulative

# So many standard errors above 0 must variances be, and the least eigenvalue of correlations.
_CLEAR = 4.0
_APART = 2.0

# Caveat if less of a column's variance is between levels.
_WIDE = 0.8

# Of intervals of 95 and of 99.9 %, as many standard errors; rounding must not leave an end out.
_NORMAL = (1.95, 3.29)

# Standard errors by which the counts' total may differ from the number of records.
_SAME = 4.0

# Up to so many standard errors, what far records may change of a mean is two of its own: bounds are
# near. With more, as of generous bounds, no interval would say anything, and a caveat says it.
_INCLUDED = 4.0

# Coefficients that a caveat names.
_MOST_SHOWN = 3

_MODEL = (
    "standard errors include the noise for privacy, the sampling of the records from a "
    "population, and the values within levels: the relation of two columns is taken as linear "
    "within a level, with half of that correction as a standard error of its own."
)
_WITHIN = (
    "standard errors include the noise for privacy, the sampling of the records from a "
    "population, and where in a level values lie, which are taken as spread out within it."
)
_LEAST_SQUARES = (
    "standard errors of sampling take the variance of residuals as constant, except for its "
    "dependence on each term alone."
)


_NEARER = "a nearer bound, if it is known, excludes it."


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Estimates with standard errors, which add three sources.

    ```python
    >>> import numpy as np
    >>> part = np.array([0.03])
    >>> print(Estimate("mean", ("age",), np.array([40.5]), part, 2 * part, 2 * part))
    mean
      age  40.5 +- 0.09  95 %: 40.32 to 40.68

    ```

    Attributes:
      title: What is estimated.
      names: The names of the estimates.
      estimate: float64 [n]. It has no bias from the noise to first order, so that a share may be
        below 0.
      noise: Standard errors of the noise for privacy, float64 [n].
      sampling: Those of as many records of a population without noise, float64 [n].
      model: Those of what is assumed within levels, float64 [n].
      caveats: Sentences to be read with them.
    """

    title: str
    names: tuple[str, ...]
    estimate: np.ndarray
    noise: np.ndarray
    sampling: np.ndarray
    model: np.ndarray
    caveats: tuple[str, ...] = ()

    @property
    def standard_error(self) -> np.ndarray:
        """The standard errors, float64 [n]."""
        return np.sqrt(self.noise**2 + self.sampling**2 + self.model**2)

    def interval(self, level: float = 0.95) -> tuple[np.ndarray, np.ndarray]:
        """Returns the lower and upper ends of the normal intervals.

        Args:
          level: The probability that an interval contains the value of the population.

        Raises:
          ValueError: The level is not between 0 and 1.
        """
        if not 0.0 < level < 1.0:
            raise ValueError(
                f"level={level!r} must lie strictly between 0 and 1, for instance 0.95."
            )
        half = scipy.stats.norm.ppf(0.5 + level / 2.0) * self.standard_error
        return self.estimate - half, self.estimate + half

    def __str__(self) -> str:
        width = max(map(len, self.names))
        rows = zip(self.names, self.estimate, self.standard_error, *self.interval(), strict=True)
        lines = [
            f"  {name:<{width}}  {value:.4g} +- {error:.2g}  95 %: {low:.4g} to {high:.4g}"
            for name, value, error, low, high in rows
        ]
        return "\n".join([self.title, *lines, *(f"  ({caveat})" for caveat in self.caveats)])


@dataclasses.dataclass(frozen=True)
class Estimates:
    """Estimates from the released counts of a `Synthesizer`, as its `estimate`.

    ```python
    >>> import numpy as np
    >>> from tfp_dpvi.synthetic import Binary, NoisyPairs, Pairs, Schema, Segments
    >>> schema = Schema({"smokes": Binary(), "ill": Binary()})
    >>> pairs = Pairs(Segments.of(schema))
    >>> counts = pairs.counts(np.array([[0, 0], [1, 1], [1, 1], [1, 0]] * 100))
    >>> estimates = Estimates(schema, NoisyPairs.of(pairs, counts, 2.0, 400))
    >>> estimates.regression("ill", ["smokes"]).estimate.round(2).tolist()
    [0.0, 0.67]

    ```

    Attributes:
      schema: The columns with the levels that a fit chose.
      released: The noisy counts.
    """

    schema: Schema
    released: NoisyPairs

    def mean(self, name: str) -> Estimate:
        """Returns the mean of a column of numbers, or of 0 and 1.

        Args:
          name: The column. Of dates it is the mean of units since 1970; of a column that misses
            values, it is that of the values that are there.

        Raises:
          ValueError: There is no such column, or it has categories.
        """
        column = self._column(name)
        self._check_numbers(name, column, "mean", "share")
        moments = self._moments_of([name])
        errors = self._errors_of_mean(name, moments)
        included, far = self._far_of_mean(name, np.linalg.norm(errors, axis=0))
        errors = (*errors[:2], np.hypot(errors[2], included))
        caveats = (*self._caveats([name]), *far, _MODEL)
        return Estimate("mean", (name,), moments.means, *errors, caveats)

    def quantile(self, name: str, q: float | Sequence[float] = 0.5) -> Estimate:
        """Returns quantiles of a column of numbers, such as its median.

        Args:
          name: The column. Of dates they are in units since 1970; of a column that misses values,
            those of the values that are there.
          q: Shares of values below, between 0 and 1.

        Returns:
          Estimates whose standard errors are those of the distribution function, carried over to
          the longer side of a 95 % interval.

        Raises:
          ValueError: There is no such column, it has no numbers, or the noise hides a quantile.
          TypeError, ValueError: `q` is no number between 0 and 1, nor a list of such.
        """
        column = self._column(name)
        self._check_numbers(name, column, "quantile", "share")
        inner = column.column if isinstance(column, Grouped) else column
        if not isinstance(inner, Numeric):
            raise ValueError(f"quantile: column {name!r} has 0 and 1 alone: use estimate.mean.")
        shares = list(np.atleast_1d(np.asarray(q, dtype=object)))
        for share in shares or [q]:
            if check.probability("q", share, "pass a number in (0, 1)") == 1.0:
                raise ValueError("q=1 must be below 1; pass a number in (0, 1).")
        num = column.num_levels
        counts, groups = self._counts(name)[:num], self._levels[name].groups
        records = min(self._present(name), self._records)
        cumulative = Cumulative(column, groups, counts, self._deviation(name))
        if len(set(groups)) < FEW and any(map(cumulative.is_wide, shares)):
            raise ValueError(
                f"quantile: column {name!r} has too few levels to tell its values: fit again "
                "with more, such as bins=16."
            )
        found = [_quantile(cumulative, name, share, records) for share in shares]
        parts = np.array(found).T
        estimate = Estimate(
            f"quantiles of {name}",
            tuple(f"{share:g}" for share in shares),
            *(parts[0], parts[1], parts[2], parts[3]),
        )
        far = self._far_of_quantiles(name, shares, estimate.interval(), cumulative)
        return dataclasses.replace(estimate, caveats=(*self._caveats([name]), *far, _WITHIN))

    def share(self, name: str) -> Estimate:
        """Returns the shares of a column's levels, with that of missing values if there may be any.

        Args:
          name: The column.

        Raises:
          ValueError: There is no such column.
        """
        column, counts = self._column(name), self._counts(name)
        shares = counts / self._total(name)
        error = self._deviation(name) / self._total(name)
        variances = 1.0 - 2.0 * shares + len(shares) * shares**2
        return self._shares(f"shares of {name}", labels_of(column), shares, error**2 * variances)

    def table(self, first: str, second: str) -> Estimate:
        """Returns the cross-table of two columns' levels as shares of all records.

        Args:
          first: A column.
          second: Another column, whose levels run faster in the result.

        Raises:
          ValueError: There is no such column, or they are the same.
        """
        labels = [labels_of(self._column(name)) for name in (first, second)]
        self._check_different([first, second])
        counts, deviations = self.released.table(*map(self._place, (first, second)))
        names = tuple(
            f"{first}={one}, {second}={other}" for one in labels[0] for other in labels[1]
        )
        return self._shares(
            f"shares of {first} by {second}",
            names,
            (counts / self._records).ravel(),
            (deviations / self._records).ravel() ** 2,
        )

    def correlation(self, first: str, second: str) -> Estimate:
        """Returns the correlation of two columns of numbers, or of 0 and 1.

        Args:
          first: A column.
          second: Another column.

        Raises:
          ValueError: There is no such column, they are the same, have categories or may miss
            values, or the noise hides whether they vary.
        """
        moments = self._moments([first, second], "correlation")

        def correlate(means: np.ndarray, cov: np.ndarray) -> np.ndarray:
            return np.array([cov[0, 1] / np.sqrt(cov[0, 0] * cov[1, 1])])

        (rho,) = correlate(moments.means, moments.covariances)
        scales = np.sqrt(np.diag(moments.covariances))
        gradient = np.array([[-rho / 2.0, 0.5], [0.5, -rho / 2.0]]) / np.outer(scales, scales)
        one, other = (
            part[:, 0] / scale
            for part, scale in zip(map(moments.scaled, range(2)), scales, strict=True)
        )
        influence = np.outer(one, other) - rho / 2.0 * (one[:, None] ** 2 + other**2)
        spread = max((1.0 - rho**2) ** 2, float(np.sum(moments.tables[0, 1][0] * influence**2)))
        noise = moments.noise(gradient[None], np.zeros([1, 2]))
        with np.errstate(invalid="ignore", divide="ignore"):
            model = moments.model(correlate, gradient[None])
        if not np.isfinite(model).all():
            raise ValueError(
                f"correlation: the noise hides where {first!r} or {second!r} lie within wide "
                "levels: fit again with narrower\nbounds, a log scale, more records or a larger "
                "epsilon."
            )
        caveats = (*self._caveats([first, second]), *self._far([first, second]))
        if abs(rho) > 1.0:
            caveats = (*caveats, "the noise moved the correlation beyond 1.")
        return Estimate(
            "correlation",
            (f"{first}, {second}",),
            np.array([rho]),
            np.sqrt(noise),
            np.sqrt(np.array([spread / self._records])),
            np.sqrt(model),
            (*caveats, _MODEL),
        )

    def regression(self, outcome: str, terms: Sequence[str]) -> Estimate:
        """Returns coefficients of least squares, the intercept first.

        Args:
          outcome: A column of numbers, or of 0 and 1.
          terms: Other columns. Categories are indicators of all levels but the first.

        Returns:
          Coefficients in the units of the columns.

        Raises:
          ValueError: There is no such column, one is named twice, may miss values, or is an
            outcome of categories; or the noise hides a variance, or how terms differ.
          TypeError: `terms` is no list of names.
        """
        if isinstance(terms, str) or not isinstance(terms, Sequence) or not terms:
            raise TypeError(f'terms={check.shown(terms)} must be a list of names, such as ["age"].')
        self._check_numbers(outcome, self._column(outcome), "regression", "table")
        moments = self._moments([*terms, outcome], "regression")
        means, cov = moments.means, moments.covariances
        self._check_clear(moments, len(means) - 1)
        coefficients = _least_squares(means, cov)
        slopes = coefficients[1:]
        residual = np.append(-slopes, 1.0)
        inverse = np.linalg.inv(cov[:-1, :-1])
        rows = np.hstack([inverse, np.zeros([len(inverse), 1])])
        products = rows[:, :, None] * residual
        products = (products + products.transpose(0, 2, 1)) / 2.0
        # The intercept is the mean of y less those of x times the slopes.
        gradients = np.concatenate([-np.tensordot(means[:-1], products, 1)[None], products])
        of_means = np.vstack([residual, np.zeros([len(slopes), len(means)])])
        sampling, unsure = self._of_sampling(moments, residual, inverse)
        estimate = Estimate(
            f"least squares of {outcome}",
            ("Intercept", *(name for part in moments.levels[:-1] for name in part.names)),
            coefficients,
            np.sqrt(moments.noise(gradients, of_means)),
            np.sqrt(sampling),
            np.sqrt(moments.model(_least_squares, gradients)),
            (*self._caveats([*terms, outcome]), *self._far(terms), _MODEL, _LEAST_SQUARES),
        )
        hidden = ("the noise hides the variance of residuals, taken at its upper end.",) * unsure
        far = self._far_of_coefficients(outcome, moments, inverse, estimate)
        return dataclasses.replace(estimate, caveats=(*hidden, *far, *estimate.caveats))

    def _of_sampling(
        self, moments: Moments, residual: np.ndarray, inverse: np.ndarray
    ) -> tuple[np.ndarray, bool]:
        """Returns variances of coefficients by sampling, and whether the residuals' is unsure."""
        means = moments.means[:-1]
        # Levels instead of numbers lose some precision, which N real records do not.
        coarse = moments.covariances + np.diag(
            np.diag(moments.covariances) * (1.0 / moments.ratios - 1.0)
        )
        gradient = np.outer(residual, residual)[None]
        error = float(np.sqrt(moments.noise(gradient, np.zeros([1, len(residual)]))[0]))
        variance = float(residual @ coarse @ residual)
        unsure = variance < 2.0 * error
        variance = max(variance, 2.0 * error)
        spread = inverse @ coarse[:-1, :-1] @ inverse * variance / self._records
        factors = np.sqrt([moments.heteroscedasticity(place) for place in range(len(means))])
        spread = spread * np.outer(factors, factors)
        first = variance / self._records + means @ spread @ means
        return np.append(first, np.diag(spread)), unsure

    def _errors_of_mean(
        self, name: str, moments: Moments
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns a mean's standard errors of noise, sampling and model, float64 [1] each."""
        (variance,) = np.diag(moments.covariances)
        of_mean, of_variance = np.ones([1, 1]), np.zeros([1, 1, 1])
        error = np.sqrt(moments.noise(of_variance + 1.0, np.zeros([1, 1])))[0]
        # Of a variance that the noise hides, the upper end.
        variance = max(variance, 2.0 * error)
        return (
            np.sqrt(moments.noise(of_variance, of_mean)),
            np.sqrt(np.array([variance / min(self._present(name), self._records)])),
            np.sqrt(moments.model(lambda means, _: means, of_variance)),
        )

    # ------------------------------------------------------------------ columns and counts

    def _place(self, name: str) -> int:
        return self.schema.names.index(name)

    def _column(self, name: str) -> Column:
        if name not in self.schema.columns:
            raise ValueError(
                f"{check.shown(name)} is no column: use one of "
                f"{', '.join(map(repr, self.schema.names))}."
            )
        return self.schema.columns[name]

    @functools.cached_property
    def _levels(self) -> dict[str, LevelValues]:
        return {
            name: LevelValues.of(name, column, self._counts(name), self._deviation(name))
            for name, column in self.schema.columns.items()
        }

    def _is_wide(self, name: str) -> bool:
        """Returns whether much of a column's variance is within levels."""
        part = self._levels[name]
        if not part.within.any():
            return False
        return bool(self._moments_of([name]).ratios[0] < _WIDE)

    def _counts(self, name: str) -> np.ndarray:
        return self.released.column(self._place(name))

    def _deviation(self, name: str) -> float:
        place = self._place(name)
        return float(self.released.table(place, place)[1][0, 0])

    def _total(self, name: str) -> float:
        """Returns the records that a column's counts add up to, if that is clearly above 0."""
        counts = self._counts(name)
        return self._checked_total(name, float(counts.sum()), len(counts))

    def _present(self, name: str) -> float:
        num = self._column(name).num_levels
        return self._checked_total(name, float(self._counts(name)[:num].sum()), num)

    def _least(self, name: str, num: int) -> float:
        """Returns the least sum of counts of levels that is clearly above 0."""
        return float(_CLEAR * self._deviation(name) * np.sqrt(num))

    def _checked_total(self, name: str, total: float, num: int) -> float:
        if total <= self._least(name, num):
            raise ValueError(
                f"column {name!r}: the noise hides how many records there are: use more records or "
                "a larger epsilon."
            )
        return total

    @property
    def _counted(self) -> tuple[float, float]:
        """The records that all counts of columns add up to on average, and the standard error."""
        names = self.schema.names
        totals = [float(self._counts(name).sum()) for name in names]
        variances = [self._deviation(name) ** 2 * len(self._counts(name)) for name in names]
        return float(np.mean(totals)), float(np.sqrt(np.sum(variances))) / len(names)

    @property
    def _is_wrong(self) -> bool:
        total, error = self._counted
        return abs(total - self.released.num_records) > _SAME * error + 1e-6 * total

    @property
    def _records(self) -> float:
        """The public number of records, or that of the counts if it is another."""
        return max(self._counted[0], 1.0) if self._is_wrong else float(self.released.num_records)

    def _caveats(self, names: Sequence[str]) -> tuple[str, ...]:
        caveats = []
        if self._is_wrong:
            caveats.append(
                f"the counts add up to about {self._counted[0]:.0f} records instead of "
                f"num_records={self.released.num_records}: shares are of the former."
            )
        missing = [name for name in names if self.schema.columns[name].missing]
        if missing:
            caveats.append(f"records without {', '.join(map(repr, missing))} are left out.")
        wide = [name for name in names if self._is_wide(name)]
        if wide:
            caveats.append(
                f"levels of {', '.join(map(repr, wide))} are wide, and values depend on what is "
                "assumed within them: describe with more levels, bins=16, or narrower bounds."
            )
        few = [name for name in names if getattr(self.schema.columns[name], "few", False)]
        if few:
            caveats.append(
                f"much of the variance of {', '.join(map(repr, few))} is that of a few records, "
                "which noisy counts do not tell: prefer a log scale or shares."
            )
        return tuple(caveats)

    def _possible(self, name: str) -> tuple[Far, ...]:
        """Returns the records that may be far, of a column of which noise hides not all."""
        num = self._column(name).num_levels
        is_seen = self._counts(name)[:num].sum() > self._least(name, num)
        return self._levels[name].far if is_seen else ()

    def _hidden(self, name: str) -> list[Far]:
        """Returns the far records that change a mean by more than its standard error."""
        possible = self._possible(name)
        if not possible:
            return []
        errors = self._errors_of_mean(name, self._moments_of([name]))
        variance = float(np.sum(np.square(errors)))
        return [far for far in possible if (far.moved / self._present(name)) ** 2 > variance]

    def _far_of_mean(self, name: str, error: np.ndarray) -> tuple[float, tuple[str, ...]]:
        """Returns what far records may add to a mean's error, and what no interval includes.

        Args:
          name: The column.
          error: The mean's standard error without them.
        """
        included, said = 0.0, []
        for far in self._possible(name):
            change = far.moved / self._present(name)
            if change <= _INCLUDED * error:
                included = float(np.hypot(included, change / 2.0))
                continue
            said.append(
                f"{_hides(name, far)}: if they are, the mean is "
                f"{'larger' if far.is_upper else 'smaller'} by about "
                f"{change:.2g}, which is in no interval; {_NEARER}"
            )
        return included, tuple(said)

    def _far_of_quantiles(
        self,
        name: str,
        shares: Sequence[float],
        ends: tuple[np.ndarray, np.ndarray],
        cumulative: Cumulative,
    ) -> tuple[str, ...]:
        """Returns which quantiles leave their intervals if records are far from the others."""
        said, present = [], self._present(name)
        for far in self._levels[name].far:
            side, word = (1.0, "large") if far.is_upper else (-1.0, "small")
            moved = {}
            for share, end in zip(shares, ends[int(far.is_upper)], strict=True):
                # Without them, the quantile is a more extreme one of the others.
                extreme = share + side * far.records / present
                inside = 0.0 < extreme < 1.0
                reached = cumulative.quantile(extreme) if inside else far.bound
                error = np.hypot(*_errors(cumulative, share, present))
                most = float(np.clip(share + side * _NORMAL[0] * error, 0.0, 1.0))
                outer = cumulative.limits(most)[int(far.is_upper)]
                if side * outer > side * far.start and side * reached > side * end:
                    moved[f"{share:g}"] = reached
            if moved:
                which = "quantiles" if len(moved) > 1 else "quantile"
                most = side * max(side * reached for reached in moved.values())
                said.append(
                    f"{_hides(name, far)}: if they are, the {which} {', '.join(moved)} may be as "
                    f"{word} as {most:.4g}, which is in no interval; {_NEARER}"
                )
        return tuple(said)

    def _far_of_coefficients(
        self, outcome: str, moments: Moments, inverse: np.ndarray, estimate: Estimate
    ) -> tuple[str, ...]:
        """Returns by how much coefficients change, at most, by far records of the outcome.

        Args:
          outcome: The column.
          moments: Those of the terms and the outcome.
          inverse: The inverse of the terms' covariances, shape [slopes, slopes].
          estimate: The coefficients with their standard errors.
        """
        # What a record of one unit adds to N times the coefficients, by the levels of its terms.
        means = moments.means[:-1]
        pulls = np.vstack([-means @ inverse, inverse])
        ends = np.tile(np.eye(len(pulls))[0], [2, 1])
        begin = 0
        for part in moments.levels[:-1]:
            own = slice(begin, begin + len(part.names))
            each = (part.values - means[own]) @ pulls[:, own].T
            ends += np.stack([each.min(axis=0), each.max(axis=0)])
            begin = own.stop
        most = abs(ends).max(axis=0)
        said = []
        for far in self._possible(outcome):
            changes = most * far.moved / self._present(outcome)
            relative = changes / estimate.standard_error
            shown = [
                f"{_rounded(changes[place])} ({estimate.names[place]})"
                for place in np.argsort(-relative)[:_MOST_SHOWN]
                if relative[place] > 1.0
            ]
            if shown:
                said.append(
                    f"{_hides(outcome, far)}: if they are, coefficients change by up to "
                    f"{', '.join(shown)}, by the levels of their terms, which is in no interval; "
                    f"{_NEARER}"
                )
        return tuple(said) or self._far([outcome])

    @property
    def far(self) -> tuple[str, ...]:
        """Sentences on records that may be far from all others, which samples do not have."""
        return self._far(self.schema.names, "samples suppose")

    def _far(
        self, names: Sequence[str], supposes: str = "the estimate supposes"
    ) -> tuple[str, ...]:
        """Returns which records may be far from the others, as no interval includes."""
        return tuple(
            f"{_hides(name, far)}: {supposes} that there are none; {_NEARER}"
            for name in names
            for far in self._hidden(name)
        )

    def _shares(
        self, title: str, names: tuple[str, ...], shares: np.ndarray, noise: np.ndarray
    ) -> Estimate:
        # A level whose count is noise may have as many records as the noise hides.
        likely = np.clip(shares, np.minimum(np.sqrt(noise), 0.5), 1.0)
        likely = np.clip(likely, 1.0 / self._records, 1.0 - 1.0 / self._records)
        sampling = np.sqrt(likely * (1.0 - likely) / self._records)
        caveats = self._caveats([])
        return Estimate(
            title, names, shares, np.sqrt(noise), sampling, np.zeros(len(shares)), caveats
        )

    # ------------------------------------------------------------------ checks

    def _check_numbers(self, name: str, column: Column, method: str, other: str) -> None:
        inner = column.column if isinstance(column, Grouped) else column
        if not isinstance(inner, Numeric | Binary):
            raise ValueError(
                f"{method}: column {name!r} has categories, without numbers: use estimate.{other}."
            )

    def _check_different(self, names: Sequence[str]) -> None:
        if len(set(names)) < len(names):
            raise ValueError(f"a column is named twice in {list(names)}: name different ones.")

    def _check_clear(self, moments: Moments, num: int) -> None:
        """Checks that the correlations of the first `num` values are positive definite for sure."""
        scales = np.sqrt(np.diag(moments.covariances))[:num]
        eigenvalues, vectors = np.linalg.eigh(
            moments.covariances[:num, :num] / np.outer(scales, scales)
        )
        direction = np.append(vectors[:, 0] / scales, np.zeros(len(moments.means) - num))
        gradient = np.outer(direction, direction)[None]
        none = np.zeros([1, len(direction)])
        error = np.sqrt(moments.noise(gradient, none) + moments.partners(gradient))[0]
        if eigenvalues[0] <= max(_APART * error, 1e-9):
            raise ValueError(
                "regression: the noise hides how terms differ from each other, as they are "
                f"correlated (least eigenvalue {eigenvalues[0]:.2g} +- {error:.2g}).\n"
                "Use fewer terms, or a fit with more records, fewer columns or a larger epsilon."
            )

    def _moments(self, names: Sequence[str], method: str) -> Moments:
        """Returns the moments of columns, if the noise lets them be seen."""
        columns = [self._column(name) for name in names]
        self._check_different(names)
        for name, column in zip(names, columns, strict=True):
            if method == "correlation":
                self._check_numbers(name, column, method, "table")
            if column.missing:
                raise ValueError(
                    f"{method}: column {name!r} may miss values, and pairs do not tell which "
                    "records are complete: leave it out,\nor fit a table of complete records, "
                    "described without missing=True."
                )
            if self._is_wide(name) and len(self._levels[name].values) < FEW:
                raise ValueError(
                    f"{method}: column {name!r} has too few levels to tell its values: fit again "
                    "with more, such as bins=16."
                )
        moments = self._moments_of(names)
        variances = np.diag(moments.covariances)
        units = np.eye(len(variances))
        gradients = units[:, :, None] * units[:, None, :]
        errors = np.sqrt(moments.noise(gradients, np.zeros_like(units)))
        values = [name for part in moments.levels for name in part.names]
        for name, variance, error, ratio in zip(
            values, variances, errors, moments.ratios, strict=True
        ):
            if not (variance > max(_CLEAR * error, 0.0) and ratio > 0.0):
                raise ValueError(
                    f"{method}: the noise hides the variance of {name!r}: leave it out, or fit "
                    "with wider or fewer levels\n(bins=, max_levels=), fewer columns, more records "
                    "or a larger epsilon."
                )
        return moments

    def _moments_of(self, names: Sequence[str]) -> Moments:
        sizes = [self._column(name).num_levels for name in names]
        places, records = [self._place(name) for name in names], self._records
        levels = [self._levels[name] for name in names]
        shares, deviations = [], []
        for name, part, size in zip(names, levels, sizes, strict=True):
            deviation, total = self._deviation(name), self._present(name)
            shares.append(part.summed(self._counts(name)[:size]) / total)
            deviations.append(np.sqrt(part.summed(np.full(size, deviation**2))) / total)
        tables = {}
        for i, j in itertools.combinations(range(len(names)), 2):
            merged = []
            counts, noise = self.released.table(places[i], places[j])
            for table in (counts, noise**2):
                rows = levels[i].summed(table[: sizes[i], : sizes[j]])
                merged.append(levels[j].summed(rows.T).T)
            tables[i, j] = merged[0] / records, np.sqrt(merged[1]) / records
        return Moments.of(levels, shares, deviations, tables)


def _hides(name: str, far: Far) -> str:
    records = _rounded(max(far.records, 1.0))
    return (
        f"the noise hides whether some {records} records of {name!r} are far from the "
        f"others, {far.place}"
    )


def _rounded(number: float) -> str:
    """Returns two digits, without an exponent where there are few zeros."""
    return f"{float(f'{number:.2g}'):.7g}"


def _errors(cumulative: Cumulative, share: float, records: float) -> tuple[float, float]:
    """Returns the standard errors of the share below a quantile, of noise and sampling."""
    return cumulative.noise(share), float(np.sqrt(share * (1.0 - share) / records))


def _quantile(
    cumulative: Cumulative, name: str, share: float, records: float
) -> tuple[float, float, float, float]:
    """Returns a quantile, and its standard errors of noise, sampling and model."""
    value = cumulative.quantile(share)
    noise, sampling = _errors(cumulative, share, records)
    error = float(np.hypot(noise, sampling))
    ends = [share + side * _NORMAL[0] * error for side in (-1.0, 1.0)]
    if ends[0] <= 0.0 or ends[1] >= 1.0:
        raise ValueError(
            f"quantile: noise and sampling hide the quantile {share:g} of {name!r} (+- {error:.2g})"
            ": ask for one nearer to\nthe median, or fit with more records or a larger epsilon."
        )
    # In other units of the standard error too: beside a heap, the nearer one may be 0.
    reached = [
        abs(cumulative.quantile(float(np.clip(share + side * far * error, 0.0, 1.0))) - value) / far
        for far in _NORMAL
        for side in (-1.0, 1.0)
    ]
    longer = max(reached)
    model = max(map(cumulative.model, (*ends, share)))
    return value, longer * noise / error, longer * sampling / error, model


def _least_squares(means: np.ndarray, covariances: np.ndarray) -> np.ndarray:
    """Returns intercept and slopes of the last value on the others."""
    slopes = np.linalg.solve(covariances[:-1, :-1], covariances[:-1, -1])
    return np.append(means[-1] - means[:-1] @ slopes, slopes)
