"""Checks of the posterior and of single parameters' intervals, from public and released values."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import linalg, stats

from tfp_dpvi.calibrated.curvature import CurvaturePrior
from tfp_dpvi.calibrated.mixture import Mixture
from tfp_dpvi.calibrated.window import Window

MOST_DISTANCE = 1.3
MOST_BEND = 1.0
MOST_MISMATCH = 0.15
# The probability that any test warns although all is well, at most: Holm's over all that apply.
FALSE_ALARMS = 0.03
# The paired clip's only test.
LEAST_HALVES = 0.001
# A lack of fit and a shift that matter: relative, and in posterior standard deviations.
MOST_LACK_OF_FIT = 0.02
# A lack of fit that would widen intervals by a fifth.
MOST_UNSEEN = 0.5
MOST_SHIFT = 1.0
# A pull by the prior that matters, in posterior standard deviations.
MOST_PULL = 1.0
_LIMITS = {"shift": MOST_SHIFT, "pull": MOST_PULL}
# Of weighted scores.
MOST_CUT = 0.01
# Standard deviations of noise by which a released share is surely beyond its limit: 1 % of chance.
_CLEARLY = 2.33
# And from which a lack of fit is said: Holm's procedure over five tests.
_CLEARLY_UNLIKE = 2.75
# Of the range in which scores are linear.
MOST_EXTENT = 1.0
# Right public inputs have at most 1.31 in ten cells of the calibration study. Of fits whose columns
# are ten times as wide as the private ones, those that were off had 1.66 and more.
MOST_TAIL = 1.6
# Of what records should say in all: where scores overflow it is noise about 0.
LEAST_SEEN = 0.1
# Of the posterior, to the third order of the likelihood, which beyond says the direction alone.
MOST_THIRD_ORDER = 1.5
# Of the noise on the released curvature, its largest eigenvalue over the curvature's mean one. With
# correlations of .9 and independent public columns, intervals of few records cover too little above
# it (`ar10_hidden` in docs/studies.md); at 1.5 the release contradicts the public ones.
MOST_HIDDEN = 2.2
# Of pairs of columns: what shows that public inputs were invented column by column.
MOST_APART = 0.5
# Below the largest kappa that the window states, 2.5.
MOST_KAPPA_SEEN = 2.4

# A vague prior of scale 100 on standardised data stays below it with a pilot.
MOST_REACHES = 25.0
MOST_NARROWING = 1.5
MOST_WIDTH = 1.15
# Probability that a posterior which is the prior is called wider, at most.
MOST_FALSE = 0.03

_TAIL = 0.05
# Draws of chains that are worth one independent draw: measured 1.1 to 3.6.
_DRAWS_OF_EACH = 4
# Of a standard normal distribution.
_QUARTILE = 0.6744897501960817
# Standard deviations of the noise by which a coordinate's curvature is too small.
_MISSING = 5.0
_MUCH_NARROWER = 1.0 / 3.0
# Correlations of columns: with less, levels exclude one another; and less is that of chance.
_EXCLUDED = 1e-6
_UNCORRELATED = 0.2
# Of the standard deviation that one record leaves: the range in which scores are linear.
_LINEAR = 0.5
# Of the prior's standard deviation, from which on a posterior is about the prior.
ABOUT = 0.9
_MOST_NAMES = 3
_REMEDY = "rescale inputs and outcomes so that parameters are of order 1"
_MEND_FIRST = "which training that did not converge explains too: mend that first"


@dataclasses.dataclass(frozen=True)
class Checks:
    """Diagnostics of the posterior's intervals, from released values.

    Attributes:
      distance: Distance of the window's mean parameters from the posterior's mean, in posterior
        standard deviations over sqrt(d).
      halves: p-value of the difference of the window's halves.
      kappa: Ratio of the curvature to the variance of clipped pairs: 1 without a clip, at most 2.5.
      curvature_signal: The curvature's norm over that of its noise.
      bend: Shift of the posterior's mean by the nonlinear score, in units of `distance`; NaN
        without a pilot.
      mismatch: Relative distance of the released curvature from that at the pilot's inputs; NaN
        without a pilot. With the centred clip see `Curvatures.mismatch`.
      parameters: Those of single parameters; None for models that were saved without them.
      lack_of_fit: By how much clipped scores vary more than the likelihood says, relative to that;
        NaN for the paired clip.
      lack_of_fit_z: The same in standard deviations, of noise, outcomes and parameters.
      ranks: p-value of where outcomes lie under the likelihood, which is uneven if its tails, peak
        or symmetry are wrong; NaN if outcomes are enumerated.
      weight_variation: The squared coefficient of variation of survey weights, Kish's design effect
        less 1; NaN without weights, or if noise hides their mean.
      cut: The share of weighted scores that the clip cuts; NaN without weights, or if all are
        alike, so that they say nothing of outcomes.
      cut_noise: The standard deviation of the noise on `cut`.
      third_order: By up to how many of its standard deviations the likelihood's third order would
        move the posterior; infinite where it matters and is not known, as where noise or unlike
        public inputs hide it, NaN where it does not matter.
      seen: See `Curvatures.seen`.
      seen_noise: The standard deviation of the noise on `seen`.
      hidden: The largest eigenvalue of the noise on the released curvature, over the curvature's
        mean one: with a large one it does not show how columns are correlated.
      apart: See `apart`; NaN without inputs, or where the posterior is about the prior.
    """

    distance: float
    halves: float
    kappa: float
    curvature_signal: float
    bend: float = math.nan
    mismatch: float = math.nan
    parameters: ParameterChecks | None = None
    lack_of_fit: float = math.nan
    lack_of_fit_z: float = math.nan
    ranks: float = math.nan
    weight_variation: float = math.nan
    cut: float = math.nan
    cut_noise: float = math.nan
    third_order: float = math.nan
    seen: float = math.nan
    seen_noise: float = math.nan
    hidden: float = math.nan
    apart: float = math.nan

    def with_fit(
        self, excess: float, z: float, ranks: float, parameters: ParameterChecks
    ) -> Checks:
        """Returns these checks with those of the likelihood and of single parameters.

        Args:
          excess: See `lack_of_fit`.
          z: See `lack_of_fit_z`.
          ranks: See `ranks`.
          parameters: Those of single parameters.
        """
        return dataclasses.replace(
            self, lack_of_fit=excess, lack_of_fit_z=z, ranks=ranks, parameters=parameters
        )

    @property
    def _is_centred(self) -> bool:
        return not math.isnan(self.lack_of_fit)

    @property
    def warnings(self) -> list[str]:
        """Returns a sentence for each check that failed."""
        sentences = []
        # A pilot's small bend makes the distance harmless.
        if self.distance > MOST_DISTANCE and not self.bend <= MOST_BEND:
            sentences.append(
                f"training did not converge: its mean is {self.distance:.1f} posterior standard "
                f"deviations off (limit {MOST_DISTANCE:g}); {self._slow} next time"
            )
        failed = self.failed
        if "halves" in failed:
            sentences.append(
                f"the two halves of the window differ (p = {self.halves:.1g}): training did not "
                "converge"
            )
        if LEAST_SEEN - self.seen > _CLEARLY * self.seen_noise:
            sentences.append(
                f"hardly any record counts: scores say {max(self.seen, 0.0):.1%} of what they "
                f"should (limit {LEAST_SEEN:.0%}), as where they overflow; pass public inputs in "
                "the units of the private ones"
            )
        if self.mismatch > MOST_MISMATCH:
            sentences.append(
                f"the released curvature is far from that at {self._inputs} (mismatch "
                f"{self.mismatch:.2g}): pass public inputs whose scales and correlations resemble "
                "those of the private ones"
            )
        if self._hides_correlations and self.apart > MOST_APART:
            sentences.append(
                "noise hides whether columns are correlated, and those of the public inputs are "
                "not: if the private ones are, intervals are too narrow; take a larger epsilon or "
                "fewer columns, or pass public inputs that are correlated like the private ones"
            )
        if self.kappa >= MOST_KAPPA_SEEN:
            sentences.append(
                f"the clip is too small (kappa {self.kappa:.2g}): {self._cut} next time"
            )
        # Parameters that are off make any likelihood look wrong.
        is_off = any("did not converge" in sentence for sentence in sentences)
        if "lack_of_fit" in failed and abs(self.lack_of_fit) > MOST_LACK_OF_FIT:
            more = (
                "for counts try tfd.NegativeBinomial, for numbers tfd.StudentT, or more terms of x"
            )
            less = "try a likelihood that lets outcomes vary less"
            sentences.append(
                f"the likelihood does not fit: scores vary {1.0 + self.lack_of_fit:.2f} times as "
                f"much as it says (z = {self.lack_of_fit_z:.1f}); "
                + (_MEND_FIRST if is_off else more if self.lack_of_fit > 0.0 else less)
            )
        elif "ranks" in failed:
            shape = "for numbers try their logarithm, tfd.StudentT, or a scale that depends on x"
            sentences.append(
                "the likelihood has the wrong shape: outcomes are not where it expects them (p = "
                f"{self.ranks:.1g}); {_MEND_FIRST if is_off else shape}"
            )
        if self.cut - _CLEARLY * self.cut_noise > MOST_CUT:
            sentences.append(
                f"the clip cuts {self.cut:.1%} of the weighted scores (limit {MOST_CUT:.0%}): if "
                "weights depend on outcomes, estimates are biased; pass public_inputs that "
                "resemble the private ones"
            )
        if self._hides_weights:
            sentences.append(
                "weights are so far below max_weight that noise hides their mean, and with it the "
                "width of intervals: declare the largest weight that the design allows, or take a "
                "larger epsilon"
            )
        if self.parameters is not None:
            sentences += self.parameters.warnings
            if "shift" in failed:
                sentences.append(self.parameters.shift_warning)
            if "pull" in failed:
                sentences.append(self.parameters.pull_warning)
        return sentences

    @property
    def p_values(self) -> dict[str, float]:
        """Returns the p-value of each test that applies: at most uniform where all is well.

        "both" is that of ranks and shift, whose noises are independent, by Fisher's method: what
        neither is sure of, they often are together.
        """
        parameters = self.parameters
        found = {
            "halves": self.halves,
            "lack_of_fit": 2.0 * float(stats.norm.sf(abs(self.lack_of_fit_z))),
            "ranks": self.ranks,
        }
        if parameters is not None:
            found |= {name: parameters.p_value(name) for name in _LIMITS}
        # NaN stays.
        product = self.ranks * found.get("shift", math.nan)
        found["both"] = float(stats.chi2.sf(-2.0 * math.log(max(product, 1e-300)), 4))
        return {name: value for name, value in found.items() if not math.isnan(value)}

    @property
    def level(self) -> float:
        """The probability that any of these tests fails although all is well, at most."""
        return FALSE_ALARMS if self._is_centred else LEAST_HALVES

    @property
    def failed(self) -> set[str]:
        """Returns the tests that say more than chance would, by Holm's procedure."""
        p_values = self.p_values
        values = sorted((value, name) for name, value in p_values.items())
        failed: set[str] = set()
        for number, (value, name) in enumerate(values):
            if value > self.level / (len(values) - number):
                break
            failed.add(name)
        if "both" in failed:
            failed |= {name for name in ("ranks", "shift") if p_values[name] <= self.level}
        return failed

    @property
    def _hides_weights(self) -> bool:
        """True if there are weights whose mean is no more than noise."""
        return math.isnan(self.weight_variation) and not math.isnan(self.cut)

    @property
    def _hides_correlations(self) -> bool:
        """True if the release does not say how columns are correlated, and that matters."""
        return self.hidden > MOST_HIDDEN and not math.isnan(self.apart)

    @property
    def _unseen_excess(self) -> float:
        """The lack of fit that noise hides, relative; NaN for outcomes of few values."""
        if math.isnan(self.ranks) or not self.lack_of_fit_z:
            return math.nan
        return _CLEARLY_UNLIKE * self.lack_of_fit / self.lack_of_fit_z

    @property
    def notes(self) -> list[str]:
        """Returns sentences on what limits the posterior, and on what is not checked."""
        sentences = []
        few = "some parameters rest on few records for this noise, as those of small groups do"
        if math.isinf(self.third_order):
            sentences.append(
                f"{few}, and by how much that moves the posterior cannot be computed: means may be "
                "off by about a standard deviation"
            )
        elif self.third_order > MOST_THIRD_ORDER:
            sentences.append(
                f"{few}: that would move the posterior by up to {self.third_order:.1f} standard "
                f"deviations, of which at most {MOST_THIRD_ORDER:g} are reckoned with"
            )
        if self._unseen_excess > MOST_UNSEEN:
            sentences.append(
                "noise hides whether outcomes vary as the model says: "
                f"{1.0 + self._unseen_excess:.1f} times as much would not be seen"
            )
        if self._hides_correlations and not self.apart > MOST_APART:
            sentences.append(
                "noise hides how columns are correlated: intervals rest on the correlations of the "
                "public inputs"
            )
        if not (math.isnan(self.weight_variation) and math.isnan(self.cut)):
            sentences.append(self._weights)
        return sentences

    @property
    def _weights(self) -> str:
        """Returns what weights cost, and what is not checked with them."""
        effect = "not known" if self._hides_weights else f"{1.0 + self.weight_variation:.2f}"
        cut = "all weights are alike, to what the release says"
        if not math.isnan(self.cut):
            cut = (
                f"the clip cuts {max(self.cut, 0.0):.1%} +- {self.cut_noise:.1%} of the weighted "
                "scores"
            )
        return (
            f"weights: design effect {effect}, {cut}; with weights, "
            "neither the ranks of outcomes nor a wider clip are compared"
        )

    @property
    def _slow(self) -> str:
        """Returns what to do against slow training."""
        return (
            "take more epochs, or pass public_inputs that are more like the records,"
            if self._is_centred
            else "take more steps or a higher learning rate"
        )

    @property
    def _inputs(self) -> str:
        return "the public inputs" if self._is_centred else "the pilot's inputs"

    @property
    def _cut(self) -> str:
        """Returns what to do against a clip that cuts too much."""
        return (
            "pass public_inputs that resemble the private ones"
            if self._is_centred
            else "raise l2_norm_clip"
        )

    def to_array(self) -> np.ndarray:
        """Returns the diagnostics of the whole posterior, to save."""
        return np.array([getattr(self, name) for name in _numbers()])

    @classmethod
    def from_array(cls, values: Sequence[float]) -> Checks:
        """Returns the checks of `to_array`, or of an earlier version with fewer of them."""
        named: dict[str, Any] = dict(zip(_numbers(), values, strict=False))
        return cls(**named)


def _numbers() -> list[str]:
    """Returns the names of the checks of a whole posterior, in the order of `to_array`."""
    return [field.name for field in dataclasses.fields(Checks) if field.name != "parameters"]


def check_posterior(
    window: Window,
    slopes: np.ndarray,
    matrices: np.ndarray,
    mixture: Mixture,
    index: np.ndarray,
    linear: Mixture | None = None,
    mismatch: float = math.nan,
    capped: np.ndarray | None = None,
) -> Checks:
    """Returns the checks of a fit, without those of single parameters.

    Args:
      window: The released averages.
      slopes: Draws of A, shape [K, d, d].
      matrices: Draws of M, shape [K, d, d].
      mixture: The posterior.
      index: The coordinates that the likelihood reads, shape [d].
      linear: The posterior for a linear score, if it is another.
      mismatch: See `Checks`.
      capped: Draws of the capped matrix, if M is another, shape [K, d, d].
    """
    covariance = mixture.covariance[np.ix_(index, index)]

    def distance_of(away: np.ndarray) -> float:
        return math.sqrt(away @ linalg.solve(covariance, away, assume_a="pos") / len(away))

    away = window.theta - mixture.mean[index]
    bend = math.nan if linear is None else distance_of(linear.mean[index] - mixture.mean[index])
    score, theta = window.half_difference
    difference = score + slopes.mean(axis=0) @ theta
    variance = window.sampling * matrices.mean(axis=0)
    variance = variance + window.score_sd**2 * np.eye(len(away))
    variance = window.half_variance * variance + _covariance(slopes @ theta)
    statistic = difference @ np.linalg.lstsq(variance, difference, rcond=None)[0]
    halves = float(stats.chi2.sf(statistic, len(away)))
    capped = matrices if capped is None else capped
    traces = np.trace(slopes, axis1=1, axis2=2) / np.trace(capped, axis1=1, axis2=2)
    kappa = float(np.mean(traces))
    return Checks(distance_of(away), halves, kappa, window.curvature_signal, bend, mismatch)


def _covariance(rows: np.ndarray) -> np.ndarray:
    """Returns the covariance of draws of shape [K, d], zero for a single one."""
    away = rows - rows.mean(axis=0)
    covariance: np.ndarray = away.T @ away / len(rows)
    return covariance


def scales(draws: np.ndarray) -> np.ndarray:
    """Returns the half widths of the central halves of draws, over that of a standard normal.

    They exist for heavy tails too. NaN where a quantile is infinite.

    Args:
      draws: Shape [n, D].
    """
    first, third = _quantiles(draws, (0.25, 0.75))
    return (third - first) / (2.0 * _QUARTILE)


@dataclasses.dataclass(frozen=True, eq=False)
class ParameterChecks:
    """Diagnostics of each coordinate, shape [D]; NaN where one does not apply.

    Attributes:
      names: Names of the coordinates.
      reaches: The prior's scale over the distance that the optimizer can move a parameter in a fit.
      narrowing: How many times the prior of the curvature alone narrows the posterior's interval.
      width: The width of the posterior's 90 % interval over the prior's, see `widths`.
      shift: By how many posterior standard deviations the estimate would move under a wider clip.
      shift_z: The same in standard deviations of what is known of it, or what all coordinates show
        together; see `wider.z_scores`.
      extent: How far from the window the posterior reaches, over the distance within which scores
        are linear, see `extents`.
      pull: By how many posterior standard deviations a normal prior moves the estimate, see
        `conflict.pulls`; NaN for other priors.
      pull_z: The same in standard deviations of what it moves estimates of its own draws.
      tail: How many times the information falls without a few extreme public inputs, see
        `SimulatedMoments.tails`.
    """

    names: Sequence[str]
    reaches: np.ndarray
    narrowing: np.ndarray
    width: np.ndarray
    shift: np.ndarray
    shift_z: np.ndarray
    extent: np.ndarray
    pull: np.ndarray
    pull_z: np.ndarray
    tail: np.ndarray

    def to_array(self) -> np.ndarray:
        """Returns the diagnostics as one array of shape [9, D], to save."""
        return np.stack([getattr(self, name) for name in _ROWS])

    @classmethod
    def from_array(cls, names: Sequence[str], values: np.ndarray) -> ParameterChecks:
        """Returns the checks of `to_array`, or of an earlier version with fewer of them.

        Args:
          names: Names of the coordinates.
          values: The array.
        """
        missing = np.full([len(_ROWS) - len(values), len(names)], math.nan)
        return cls(names, *values, *missing)

    def clear(self, name: str) -> np.ndarray:
        """Returns absolute values where chance is no reason for them, else 0; NaN stays.

        Args:
          name: "shift" or "pull".
        """
        values = np.abs(getattr(self, name))
        return np.where(self._chances(name) >= FALSE_ALARMS, np.minimum(values, 0.0), values)

    def p_value(self, name: str) -> float:
        """Returns the least p-value of values that matter, over all parameters; NaN for none.

        Args:
          name: "shift" or "pull".
        """
        chances, matters = self._chances(name), np.abs(getattr(self, name)) > _LIMITS[name]
        none = math.nan if np.isnan(chances).all() else 1.0
        return float(np.min(chances, where=matters, initial=none))

    def _chances(self, name: str) -> np.ndarray:
        """Returns the p-values of all z scores that are known, by Bonferroni's bound."""
        z = getattr(self, f"{name}_z")
        return np.asarray(2.0 * np.isfinite(z).sum() * stats.norm.sf(np.abs(z)))

    @property
    def doubtful(self) -> np.ndarray:
        """True for each coordinate of which a check failed, bool [D]."""
        limits = (
            (self.reaches, MOST_REACHES),
            (self.narrowing, MOST_NARROWING),
            (self.width, MOST_WIDTH),
            (self.clear("shift"), MOST_SHIFT),
            (self.clear("pull"), MOST_PULL),
            (self.extent, MOST_EXTENT),
            (self.tail, MOST_TAIL),
        )
        # False for NaN.
        return np.any([values > limit for values, limit in limits], axis=0)

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
                f"the posterior of {wider} times as wide as the prior (limit {MOST_WIDTH:g}), "
                "which records rarely do: training did not converge, or the likelihood does not fit"
            )
        beyond = self._over(self.extent, MOST_EXTENT)
        if beyond:
            sentences.append(
                f"the posterior of {beyond} times as far from the last steps as scores are linear "
                "in parameters: the noise is too large for so few records, or training did not "
                "converge; take a larger epsilon, or a prior nearer to the records"
            )
        extreme = self._over(self.tail, MOST_TAIL)
        if extreme:
            sentences.append(
                f"the information of {extreme} times as large with a few extreme public inputs as "
                f"without them (limit {MOST_TAIL:g}): if no record is like these, its intervals "
                "are too narrow; pass public inputs whose tails resemble those of the private ones"
            )
        return sentences

    @property
    def shift_warning(self) -> str:
        """Returns the sentence on the parameters whose shift matters and is no chance."""
        moved = self._over(self.clear("shift"), MOST_SHIFT)
        return (
            f"the estimate of {moved} posterior standard deviations from that under a wider clip: "
            "the likelihood does not fit the tails, and a fit without privacy would differ; try "
            "another likelihood, or more terms of x"
        )

    @property
    def pull_warning(self) -> str:
        """Returns the sentence on the parameters that the prior pulls, and by no chance."""
        pulled = self._over(self.clear("pull"), MOST_PULL)
        return (
            f"the prior contradicts the records: it moves the estimate, and that of {pulled} "
            "posterior standard deviations from where the records alone have it; take a wider "
            "prior, or one nearer to the records"
        )

    def _over(self, values: np.ndarray, limit: float) -> str:
        """Returns the names of coordinates above a limit with the largest value, or nothing."""
        which = np.flatnonzero(values > limit)  # False for NaN.
        if not len(which):
            return ""
        names = [self.names[number] for number in which[:_MOST_NAMES]]
        if len(which) > _MOST_NAMES:
            names.append(f"{len(which) - _MOST_NAMES} more")
        most = float(np.max(values[which]))
        times = f"{most:,.0f}" if most >= 10.0 else f"{most:.2g}"
        return f"{', '.join(names)} is {'up to ' if len(which) > 1 else ''}{times}"


_ROWS = [field.name for field in dataclasses.fields(ParameterChecks) if field.name != "names"]


def widths(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Returns the widths of the posterior's 90 % intervals over the prior's.

    A width is at most 1 where chance may have made it more.

    If the posterior is the prior, then none is above 1 with probability 1 - `MOST_FALSE`, however
    many parameters there are. How many of n independent draws lie beyond the prior's 95 % quantile
    has a binomial distribution. Errors of both ends add up as independent ones do. That fails for
    heavy tails, so it must hold too once the prior's distribution function has made the prior
    normal.

    Args:
      before: Independent draws from the prior, shape [n, D].
      after: Draws from the posterior, shape [m, D], of which a quarter counts as independent.
    """
    num = int(1.0 / (_DRAWS_OF_EACH / len(after) + 1.0 / len(before)))
    # Bonferroni's bound.
    level = MOST_FALSE / before.shape[1]
    beyond = min(0.5, (stats.binom.isf(level, num, _TAIL) + 1.0) / num)
    places = (_TAIL, beyond, 0.5, 1.0 - beyond, 1.0 - _TAIL)
    prior, posterior = _quantiles(before, places), _quantiles(after, places)
    wider = _least_width(posterior) > prior[-1] - prior[0]
    centred = _normal_scores(before, posterior - posterior[2] + prior[2])
    wider &= _least_width(centred) > -2.0 * stats.norm.ppf(_TAIL)
    ratio = (posterior[-1] - posterior[0]) / (prior[-1] - prior[0])
    return np.where(wider, ratio, np.minimum(ratio, 1.0))


def extents(
    away: np.ndarray, mixture: Mixture, information: np.ndarray, prior_sds: np.ndarray
) -> np.ndarray:
    """Returns how far each coordinate's posterior reaches beyond where scores are linear, or NaN.

    The posterior is computed for scores that are linear in parameters. About the window they are,
    within half of the standard deviation that a posterior from a single record would have: the
    logarithm of a scale that is far too large would else fall by half a unit, wherever it ought to
    be. Noise that hides more than that hides what four records would say.

    Args:
      away: The posterior's mean less the window's parameters, shape [d].
      mixture: The posterior of the coordinates that the likelihood reads.
      information: The information of a record, shape [d, d].
      prior_sds: The prior's standard deviations, shape [d].

    Returns:
      Factors of shape [d]; NaN where the posterior is about the prior, which needs no scores.
    """
    variances = np.diag(mixture.covariance)
    linear = _LINEAR**2 * np.diag(np.linalg.pinv(information, hermitian=True))
    factors: np.ndarray = np.sqrt((away**2 + variances) / linear)
    return np.where(np.sqrt(variances) < ABOUT * prior_sds, factors, math.nan)


def apart(information: np.ndarray, is_input: np.ndarray, intercept: int) -> float:
    """Returns the share of pairs of columns that are not correlated, but for chance.

    Those of invented inputs mostly are. Levels of a column or of a group exclude one another, and
    have no information in common whatever the records are: they are left out.

    Args:
      information: The information of a record at public inputs, shape [d, d].
      is_input: Which coordinates multiply a column, bool [d].
      intercept: The coordinate of the first intercept, which a shift of columns changes.

    Returns:
      The share. If there are less than two such columns it is NaN, which is above no limit.
    """
    own = np.maximum(np.diag(information), np.finfo(float).tiny)
    excluded = np.abs(information) < _EXCLUDED * np.sqrt(np.outer(own, own))
    kept = is_input & ~np.any(excluded[:, is_input], axis=1)
    kept[intercept] = False
    with_intercept = np.outer(information[:, intercept], information[intercept])
    central = information - with_intercept / own[intercept]
    root = np.sqrt(np.maximum(np.diag(central), np.finfo(float).tiny))
    correlations = np.abs(central / np.outer(root, root))[np.ix_(kept, kept)]
    pairs = correlations[np.triu_indices(len(correlations), 1)]
    return float(np.mean(pairs < _UNCORRELATED)) if len(pairs) else math.nan


def _least_width(quantiles: np.ndarray) -> np.ndarray:
    """Returns the distance of the outer of five quantiles, less what chance may have added."""
    low, high = quantiles[0], quantiles[-1]
    inner_low, inner_high = quantiles[1], quantiles[-2]
    width: np.ndarray = high - low - np.hypot(high - inner_high, inner_low - low)
    return width


def _normal_scores(draws: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Returns values, shape [k, D], as those of a standard normal of the same rank among draws."""
    ranks = [
        np.searchsorted(np.sort(column), places)
        for column, places in zip(draws.T, values.T, strict=True)
    ]
    scores: np.ndarray = stats.norm.ppf((np.array(ranks).T + 0.5) / (len(draws) + 1.0))
    return scores


def _quantiles(draws: np.ndarray, places: Sequence[float]) -> np.ndarray:
    """Returns quantiles, shape [len(places), D]; NaN where they are infinite."""
    with np.errstate(invalid="ignore"):
        quantiles: np.ndarray = np.quantile(draws, places, axis=0)
    return np.where(np.isfinite(quantiles), quantiles, math.nan)


def narrowing(
    window: Window, prior: CurvaturePrior, precision: np.ndarray, relative: np.ndarray
) -> np.ndarray:
    """Returns how many times the curvature's prior alone narrows each coordinate's interval.

    Two faults count. A simulation's ridge stands for information in directions that the simulation
    does not show. And the released curvature of a coordinate may be noise where the prior,
    simulated or isotropic, has far more.

    Args:
      window: The released averages.
      prior: The curvature's prior.
      precision: The parameters' prior precisions, shape [d].
      relative: The posterior's scales over the prior's, shape [d].

    Returns:
      Factors of shape [d], 1 where nothing is narrowed.
    """
    # Without noise the curvature is known.
    if window.matrix_sd == 0.0:
        return np.ones(len(precision))
    released = np.diag(window.matrix)
    expected = np.diag(prior.matrix) * (np.sum(released) / np.trace(prior.matrix))
    is_noise = released < 2.0 * window.matrix_sd
    is_missing = expected - released > _MISSING * window.matrix_sd
    # A coordinate with little information, such as a small group, keeps much of its prior's width.
    assumed = is_noise & is_missing & (relative < _MUCH_NARROWER)
    times = np.where(assumed, 1.0 / np.maximum(relative, 1e-9), 1.0)
    return np.maximum(times, _narrowing_by_ridge(window, prior, precision))


def _narrowing_by_ridge(window: Window, prior: CurvaturePrior, precision: np.ndarray) -> np.ndarray:
    """Returns the ratio of the standard deviations without and with the ridge, as simulated."""
    size = len(precision)
    # Below this noise the release outweighs the prior, ridge and all.
    least_noise = prior.ridge * math.sqrt(2.0 / prior.degrees[-1])
    if prior.curvature is None or window.matrix_sd < least_noise:
        return np.ones(size)
    variances = []
    for removed in (prior.ridge, 0.0):
        slope = prior.curvature - removed * np.eye(size)
        matrix = prior.matrix - removed * np.eye(size)
        covariance = window.score_covariance(matrix)
        total = np.diag(precision) + slope @ np.linalg.solve(covariance, slope)
        variances.append(np.diag(np.linalg.inv(total)))
    return np.sqrt(np.maximum(variances[0] / variances[1], 1.0))
