"""Checks of single parameters' intervals, from public and released values alone."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from scipy import stats

from tfp_dpvi.calibrated.curvature import CurvaturePrior
from tfp_dpvi.calibrated.window import Window

MOST_REACHES = 25.0  # A vague prior of scale 100 on standardised data stays below it with a pilot.
MOST_NARROWING = 1.5
MOST_WIDTH = 1.15
MOST_FALSE = 0.03  # Probability that a posterior which is the prior is called wider, at most.

_TAIL = 0.05
_DRAWS_OF_EACH = 4  # Of chains, that are worth one independent draw: measured 1.1 to 3.6.
_QUARTILE = 0.6744897501960817  # Of a standard normal distribution.
_MISSING = 5.0  # Standard deviations of the noise by which a coordinate's curvature is too small.
_MUCH_NARROWER = 1.0 / 3.0
_MOST_NAMES = 3
_REMEDY = "rescale inputs and outcomes so that parameters are of order 1"


def scales(draws: np.ndarray) -> np.ndarray:
    """Returns the half widths of the central halves of draws, [n, D], over that of a standard normal distribution.

    They exist for heavy tails too. NaN where a quantile is infinite.
    """
    first, third = _quantiles(draws, (0.25, 0.75))
    return (third - first) / (2.0 * _QUARTILE)


@dataclasses.dataclass(frozen=True, eq=False)
class ParameterChecks:
    """Diagnostics of each coordinate, shape [D]; NaN where one does not apply.

    Attributes:
      names: of the coordinates.
      reaches: the prior's scale over the distance that the optimizer can move a parameter in a fit.
      narrowing: how many times the prior of the curvature alone narrows the posterior's interval.
      width: the width of the posterior's 90 % interval over the prior's, see `widths`.
    """

    names: Sequence[str]
    reaches: np.ndarray
    narrowing: np.ndarray
    width: np.ndarray

    def to_array(self) -> np.ndarray:
        """Returns the diagnostics as one array of shape [3, D], to save."""
        return np.stack([self.reaches, self.narrowing, self.width])

    @property
    def warnings(self) -> list[str]:
        """Returns a sentence for each check that failed, with the parameters' names."""
        sentences = []
        far = self._over(self.reaches, MOST_REACHES)
        if far:
            sentences.append(
                f"the prior of {far} times as wide as what learning rate and steps can reach "
                f"(limit {MOST_REACHES:g}): {_REMEDY}"
            )
        assumed = self._over(self.narrowing, MOST_NARROWING)
        if assumed:
            sentences.append(
                "the released curvature does not show how informative the records are: what is "
                f"assumed instead gives too narrow intervals, that of {assumed} times too narrow "
                f"(limit {MOST_NARROWING:g}); {_REMEDY}"
            )
        wider = self._over(self.width, MOST_WIDTH)
        if wider:
            sentences.append(
                f"the posterior of {wider} times as wide as the prior (limit {MOST_WIDTH:g}), which "
                "records rarely do: training did not converge, or the likelihood does not fit"
            )
        return sentences

    def _over(self, values: np.ndarray, limit: float) -> str:
        """Returns the names of coordinates above a limit with the largest value, or an empty string."""
        which = np.flatnonzero(values > limit)  # False for NaN.
        if not len(which):
            return ""
        names = [self.names[number] for number in which[:_MOST_NAMES]]
        if len(which) > _MOST_NAMES:
            names.append(f"{len(which) - _MOST_NAMES} more")
        most = float(np.max(values[which]))
        times = f"{most:,.0f}" if most >= 10.0 else f"{most:.2g}"
        return f"{', '.join(names)} is {'up to ' if len(which) > 1 else ''}{times}"


def widths(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Returns the widths of the posterior's 90 % intervals over the prior's, at most 1 where chance may have made it more.

    If the posterior is the prior, then none is above 1 with probability 1 - `MOST_FALSE`, however
    many parameters there are. How many of n independent draws lie beyond the prior's 95 % quantile
    has a binomial distribution. Errors of both ends add up as independent ones do. That fails for
    heavy tails, so it must hold too once the prior's distribution function has made the prior normal.

    Args:
      before: independent draws from the prior, shape [n, D].
      after: draws from the posterior, shape [m, D], of which a quarter counts as independent.
    """
    num = int(1.0 / (_DRAWS_OF_EACH / len(after) + 1.0 / len(before)))
    level = MOST_FALSE / before.shape[1]  # Bonferroni's bound.
    beyond = min(0.5, (stats.binom.isf(level, num, _TAIL) + 1.0) / num)
    places = (_TAIL, beyond, 0.5, 1.0 - beyond, 1.0 - _TAIL)
    prior, found = _quantiles(before, places), _quantiles(after, places)
    wider = _least_width(found) > prior[-1] - prior[0]
    centred = _scores(before, found - found[2] + prior[2])
    wider &= _least_width(centred) > -2.0 * stats.norm.ppf(_TAIL)
    ratio = (found[-1] - found[0]) / (prior[-1] - prior[0])
    return np.where(wider, ratio, np.minimum(ratio, 1.0))


def _least_width(quantiles: np.ndarray) -> np.ndarray:
    """Returns the distance of the outer of five quantiles, less what chance may have added to it."""
    low, inner_low, _, inner_high, high = quantiles
    width: np.ndarray = high - low - np.hypot(high - inner_high, inner_low - low)
    return width


def _scores(draws: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Returns values, shape [k, D], as those of a standard normal distribution of the same rank among the draws."""
    ranks = [
        np.searchsorted(np.sort(one), mine) for one, mine in zip(draws.T, values.T, strict=True)
    ]
    scores: np.ndarray = stats.norm.ppf((np.array(ranks).T + 0.5) / (len(draws) + 1.0))
    return scores


def _quantiles(draws: np.ndarray, places: Sequence[float]) -> np.ndarray:
    """Returns quantiles, shape [len(places), D]; NaN where they are infinite."""
    with np.errstate(invalid="ignore"):
        found: np.ndarray = np.quantile(draws, places, axis=0)
    return np.where(np.isfinite(found), found, math.nan)


def narrowing(
    window: Window, prior: CurvaturePrior, precision: np.ndarray, relative: np.ndarray
) -> np.ndarray:
    """Returns how many times the curvature's prior alone narrows each coordinate's interval, shape [d].

    Two faults count. A simulation's ridge stands for information in directions that the simulation does not see. And the
    released curvature of a coordinate may be noise where the prior, simulated or isotropic, has far more.

    Args:
      window: the released averages.
      prior: the curvature's prior.
      precision: the parameters' prior precisions, shape [d].
      relative: the posterior's scales over the prior's, shape [d].
    """
    if window.matrix_sd == 0.0:  # The curvature is known.
        return np.ones(len(precision))
    seen = np.diag(window.matrix)
    expected = np.diag(prior.matrix) * (np.sum(seen) / np.trace(prior.matrix))
    unseen = (seen < 2.0 * window.matrix_sd) & (expected - seen > _MISSING * window.matrix_sd)
    # A coordinate with little information, for instance a small group, keeps much of its prior's width.
    unseen &= relative < _MUCH_NARROWER
    times = np.where(unseen, 1.0 / np.maximum(relative, 1e-9), 1.0)
    return np.maximum(times, _narrowing_by_ridge(window, prior, precision))


def _narrowing_by_ridge(window: Window, prior: CurvaturePrior, precision: np.ndarray) -> np.ndarray:
    """Returns the ratio of the standard deviations without and with the ridge, as the simulation predicts them."""
    size = len(precision)
    # Below this noise the release outweighs the prior, ridge and all.
    if prior.curvature is None or window.matrix_sd < prior.ridge * math.sqrt(
        2.0 / prior.degrees[-1]
    ):
        return np.ones(size)
    variances = []
    for removed in (prior.ridge, 0.0):
        slope = prior.curvature - removed * np.eye(size)
        matrix = prior.matrix - removed * np.eye(size)
        spread = window.simulation * matrix + window.score_sd**2 * np.eye(size)
        total = np.diag(precision) + slope @ np.linalg.solve(spread, slope)
        variances.append(np.diag(np.linalg.inv(total)))
    return np.sqrt(np.maximum(variances[0] / variances[1], 1.0))
