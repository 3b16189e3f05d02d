"""Checks of single parameters' intervals, from public and released values alone."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from tfp_dpvi.calibrated.curvature import CurvaturePrior
from tfp_dpvi.calibrated.window import Window

MOST_REACHES = 25.0  # A vague prior of scale 100 on standardised data stays below it with a pilot.
MOST_NARROWING = 1.5
MOST_WIDTH = 1.15  # 1, and three standard errors of a posterior from 128 independent chains.

_PROBABILITIES = (0.05, 0.25, 0.75, 0.95)
_QUARTILE = 0.6744897501960817  # Of a standard normal distribution.
_MISSING = 5.0  # Standard deviations of the noise by which a coordinate's curvature is too small.
_MUCH_NARROWER = 1.0 / 3.0
_MOST_NAMES = 3
_REMEDY = "rescale inputs and outcomes so that parameters are of order 1"


@dataclasses.dataclass(frozen=True, eq=False)
class Ranges:
    """Ranges of a distribution's coordinates on the real line, which exist for heavy tails too.

    Attributes:
      scale: the half width of the central half, over that of a standard normal distribution: shape [D].
      width: from the 5 % to the 95 % quantile, shape [D].
    """

    scale: np.ndarray
    width: np.ndarray

    @classmethod
    def of(cls, draws: np.ndarray) -> Ranges:
        """Returns the ranges of draws of shape [n, D]; NaN where a quantile is infinite."""
        with np.errstate(invalid="ignore"):
            low, first, third, high = np.quantile(draws, _PROBABILITIES, axis=0)
            scale = (third - first) / (2.0 * _QUARTILE)
            width = high - low
        return cls(
            np.where(np.isfinite(scale), scale, math.nan),
            np.where(np.isfinite(width), width, math.nan),
        )


@dataclasses.dataclass(frozen=True, eq=False)
class ParameterChecks:
    """Diagnostics of each coordinate, shape [D]; NaN where one does not apply.

    Attributes:
      names: of the coordinates.
      reaches: the prior's scale over the distance that the optimizer can move a parameter in a fit.
      narrowing: how many times the prior of the curvature alone narrows the posterior's interval.
      width: the width of the posterior's 90 % interval over the prior's.
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
