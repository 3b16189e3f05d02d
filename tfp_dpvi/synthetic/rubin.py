"""Rubin's rules for estimates from several synthetic data sets."""

from __future__ import annotations

import dataclasses
import warnings

import numpy as np
import numpy.typing as npt
import scipy.stats

_WARNING = (
    "rubin: intervals of regression coefficients, correlations and the like are too narrow: they "
    "leave out the bias of the model that\n"
    "generated the rows (see `caveats`): use synthesizer.estimate. For means and shares of "
    "columns, also within levels of another, pass means_or_shares=True."
)
_CAVEAT = (
    "the interval includes the noise for privacy and the sampling of synthetic rows, but no bias "
    "of the model that generated them. It was tested for means and shares of columns, also within "
    "levels of another column. It does not hold for regression coefficients, correlations and "
    "other estimates of how columns depend on each other, whose intervals often miss the real "
    "value: `Synthesizer.estimate` has correlations and least squares from the released counts."
)


@dataclasses.dataclass(frozen=True)
class RubinEstimate:
    """The combined estimate of m synthetic sets. Arrays have the shape of one set's estimate.

    ```python
    >>> import warnings
    >>> from tfp_dpvi.synthetic import rubin
    >>> with warnings.catch_warnings():
    ...     warnings.filterwarnings("ignore", "rubin")
    ...     combined = rubin([1.0, 2.0, 3.0], [0.1, 0.1, 0.1])
    >>> float(combined.estimate), combined.num_sets
    (2.0, 3)

    ```

    Attributes:
      estimate: Mean of the sets' estimates.
      variance: Its variance.
      within: Mean v of the sets' variances.
      between: Variance b of the estimates between the sets.
      degrees_of_freedom: Degrees of freedom of the t distribution.
      adjusted: True where the formula gave less than `within`, the variance of as many records,
        which replaces it.
      num_sets: The number m of sets.
    """

    estimate: np.ndarray
    variance: np.ndarray
    within: np.ndarray
    between: np.ndarray
    degrees_of_freedom: np.ndarray
    adjusted: np.ndarray
    num_sets: int

    @property
    def caveats(self) -> tuple[str, ...]:
        """Sentences on what the intervals do not include, to be read with them."""
        num_adjusted = int(np.count_nonzero(self.adjusted))
        if num_adjusted == 0:
            return (_CAVEAT,)
        return _CAVEAT, (
            f"the rules gave less than the variance of as many records for {num_adjusted} of "
            f"{np.size(self.adjusted)} estimates, and the sets' mean variance replaces it: use "
            "more sets."
        )

    @property
    def standard_error(self) -> np.ndarray:
        """The square root of the variance."""
        return np.sqrt(self.variance)

    def interval(self, level: float = 0.95) -> tuple[np.ndarray, np.ndarray]:
        """Returns the lower and upper ends of the t interval."""
        if not 0.0 < level < 1.0:
            raise ValueError(
                f"level={level!r} must lie strictly between 0 and 1, for instance 0.95."
            )
        half = scipy.stats.t.ppf(0.5 + level / 2.0, self.degrees_of_freedom) * self.standard_error
        return self.estimate - half, self.estimate + half


def rubin(
    estimates: npt.ArrayLike, variances: npt.ArrayLike, *, means_or_shares: bool = False
) -> RubinEstimate:
    """Combines one analysis of m synthetic sets.

    Each set must come from its own posterior draw, as those of `Synthesizer.sample_many` do. Those
    of `Synthesizer.sample` do not: they do not differ by the noise for privacy.

    For fully synthetic data, as from `Synthesizer`: `T = (1 + 1/m) b - v` (Raghunathan, Reiter,
    Rubin 2003, Journal of Official Statistics 19(1)). If T is below v, v replaces it (Reiter 2002,
    where T is not positive), and `adjusted` is set: sets of as many rows as the records say no more
    than these. Degrees of freedom are `(m - 1) (1 - v / ((1 + 1/m) b))^2`. Larger sets have a v
    that is too small.

    The rules assume that posterior draws have the true posterior's spread, and that the model of
    the synthetic rows has no bias for the estimate. That was tested for means and shares of
    columns, also within levels of another column. It is false for regression coefficients,
    correlations and other estimates of dependence, which a mixture of binned columns weakens:
    such intervals often miss the real value. `Synthesizer.estimate` has correlations and least
    squares from the released counts. The function cannot know what it is given, so it warns unless
    `means_or_shares` says so, and `caveats` of the result repeats it.

    A `DPVI`'s surrogate does not include the noise of the fit: with few records or a small epsilon,
    intervals are too short.

    ```python
    sets = synthesizer.sample_many(10)
    means = [table["age"].mean() for table in sets]
    variances = [table["age"].var() / len(table["age"]) for table in sets]
    combined = dpvi.synthetic.rubin(means, variances, means_or_shares=True)
    print(combined.interval(), combined.caveats)
    ```

    Args:
      estimates: Array of shape [m, ...], one estimate for each set, m >= 2.
      variances: Likewise, the squared standard errors from the analysis of each set.
      means_or_shares: Whether all are means or shares of columns, perhaps within levels of another
        column, for which the intervals were tested. Otherwise the function warns.

    Returns:
      The combined estimate, with its variance, intervals and caveats.

    Raises:
      ValueError: The shapes differ, there are fewer than two sets, a value is not finite, or a
        variance is negative.
      TypeError: A value is no number.

    #### Formal guarantee

    A function of its arguments: post-processing if these come from private synthetic data.
    """
    q, u = _numbers("estimates", estimates), _numbers("variances", variances)
    if q.shape != u.shape:
        raise ValueError(
            f"estimates has shape {list(q.shape)} and variances {list(u.shape)}: they must be the "
            "same."
        )
    if (u < 0.0).any():
        raise ValueError("variances has negative entries: pass squared standard errors.")
    if not means_or_shares:
        warnings.warn(_WARNING, stacklevel=2)
    m = len(q)
    between, within = q.var(axis=0, ddof=1), u.mean(axis=0)
    spread = (1.0 + 1.0 / m) * between
    with np.errstate(divide="ignore", invalid="ignore"):
        freedom = (m - 1) * (1.0 - within / spread) ** 2
    # No synthetic records say more than as many real ones.
    adjusted = spread <= 2.0 * within
    variance = np.where(adjusted, within, spread - within)
    # Without any spread there is no between-set variance to estimate: take the degrees of freedom
    # of a set.
    freedom = np.where(np.isfinite(freedom), np.maximum(freedom, 1.0), np.inf)
    freedom = np.where(adjusted, np.maximum(freedom, m - 1), freedom)
    return RubinEstimate(
        q.mean(axis=0), variance, within, between, freedom, np.asarray(adjusted), m
    )


def _numbers(name: str, value: npt.ArrayLike) -> np.ndarray:
    array = np.asarray(value, np.float64)
    if array.ndim == 0 or len(array) < 2:
        raise ValueError(
            f"{name} has shape {list(array.shape)}: pass one entry for each of at least 2 "
            "synthetic sets."
        )
    if not np.isfinite(array).all():
        raise ValueError(f"{name} has values that are not finite: pass finite numbers.")
    return array
