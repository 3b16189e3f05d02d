"""The calibrated posterior of a study, from the hospitals' sums: nothing here touches a record."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Protocol

import numpy as np
from scipy import stats

from tfp_dpvi import _validate as check
from tfp_dpvi._tf import tfd
from tfp_dpvi.calibrated.centred_fit import posterior_of
from tfp_dpvi.calibrated.checks import MOST_BEND
from tfp_dpvi.calibrated.posterior import FAILURES, Calibrated
from tfp_dpvi.calibrated.summary import PosteriorSummary, summarise
from tfp_dpvi.calibrated.whitening import Curvatures
from tfp_dpvi.federated.factors import Factor
from tfp_dpvi.federated.sums import SiteSums, total_of
from tfp_dpvi.federated.window import PublicPoint, released_sums

_LOG = logging.getLogger("tfp_dpvi")
# p-values of the test for unlike records: above it weights are used, below the other it warns.
_LIKE = 0.2
_UNLIKE = 0.001
_NUM_DRAWS = 4000
# Standard deviations over sqrt(d) by which a score that is not linear may move the posterior.
_MOST_BEND = 0.5


class Released(Protocol):
    """The last phase, as a server or a history knows it.

    Attributes:
      place: The posterior at whose mean the sums were released, or None before.
      sums: Each hospital's sums.
    """

    place: Factor | None
    sums: dict[str, SiteSums]


@dataclasses.dataclass(frozen=True)
class Heterogeneity:
    """A test of whether hospitals' scores differ by more than noise and chance.

    Attributes:
      statistic: Cochran's Q of the scores about the common one.
      degrees: Its degrees of freedom.

    ```python
    >>> round(Heterogeneity(20.0, degrees=10).p_value, 3)
    0.029

    ```
    """

    statistic: float
    degrees: int

    @property
    def p_value(self) -> float:
        """The probability of a larger Q for hospitals with like records; 1 for one hospital."""
        return float(stats.chi2.sf(self.statistic, self.degrees)) if self.degrees else 1.0


@dataclasses.dataclass(frozen=True)
class StudyPosterior:
    """A posterior of all hospitals' records, whose spread includes the noise.

    Attributes:
      calibrated: The posterior, with its checks and its shares of noise, data and prior.
      sums: The hospitals' sums.
      heterogeneity: Whether hospitals are unlike.
      weights: The weight of each hospital's sums, with mean 1 over records.
      notes: Sentences about weights and unlike hospitals, which do not make intervals wrong.
      faults: Why not to trust the intervals, besides what the checks say.

    ```python
    >>> import numpy as np
    >>> from tfp_dpvi._tf import tf
    >>> from tfp_dpvi.federated import Study, Synchronous, simulate
    >>> from tfp_dpvi.optimizers import InformationOptimizer
    >>> rng = np.random.default_rng(0)
    >>> x = rng.normal(size=(400, 1)).astype("float32")
    >>> y = (x[:, 0] + rng.logistic(size=400) > 0).astype("int32")
    >>> study = Study(
    ...     tfd.Sample(tfd.Normal(0.0, 1.0), 1),
    ...     lambda w, x: tfd.Bernoulli(logits=tf.linalg.matvec(x, w)),
    ...     InformationOptimizer(l2_norm_clip=1.0),
    ...     local_steps=2,
    ...     example=(x[:4], y[:4]),
    ...     calibrated=True,
    ... )
    >>> records = {"berlin": (x[:200], y[:200]), "munich": (x[200:], y[200:])}
    >>> two_rounds = Synchronous(rounds=2)
    >>> history = simulate(study, records, epsilon=3.0, schedule=two_rounds, verbose=0, seed=1)
    >>> posterior = history.calibrated
    >>> sorted(posterior.sums), posterior.distribution.sample(9).shape
    (['berlin', 'munich'], TensorShape([9, 1]))
    >>> list(posterior.without("berlin").sums)
    ['munich']

    ```
    """

    calibrated: Calibrated
    sums: Mapping[str, SiteSums]
    heterogeneity: Heterogeneity
    weights: Mapping[str, float]
    notes: tuple[str, ...]
    faults: tuple[str, ...]
    _point: PublicPoint = dataclasses.field(repr=False)
    _mean: np.ndarray = dataclasses.field(repr=False)

    @property
    def distribution(self) -> tfd.Distribution:
        """The posterior as a TFP distribution over the prior's structure."""
        return self.calibrated.distribution

    @property
    def warnings(self) -> list[str]:
        """Sentences to read before the intervals; empty if the checks find nothing."""
        return [*self.calibrated.checks.warnings, *self.faults]

    def summary(self, *, seed: int = 0) -> PosteriorSummary:
        """Returns a table of intervals, with shares of noise, data and prior.

        Args:
          seed: Seed of the draws that it is computed from.
        """
        draws = self.distribution.sample(_NUM_DRAWS, seed=seed)
        coordinates = self._point.scoring.pairing.coordinates
        return summarise(draws, coordinates, self.calibrated, fitted=True)

    def without(self, hospital: str) -> StudyPosterior:
        """Returns the posterior of all hospitals but one, for nothing.

        Args:
          hospital: The name of the hospital.

        Raises:
          ValueError: It gave no sums, or is the only one that did.
        """
        others = {name: sums for name, sums in self.sums.items() if name != hospital}
        if not others or len(others) == len(self.sums):
            raise ValueError(
                f"hospital={hospital!a:.99} cannot be left out: pass one of several of "
                f"{sorted(self.sums)!a:.200}."
            )
        return combine(self._point, self._mean, others)


def combine(
    point: PublicPoint,
    mean: np.ndarray,
    sums: Mapping[str, SiteSums],
    *,
    weights: str = "sum",
) -> StudyPosterior:
    """Returns the posterior of hospitals' sums, and warns of what its checks say.

    Args:
      point: The study's sums and public inputs.
      mean: The unconstrained parameters at which they were released, shape [D].
      sums: The hospitals' sums by name.
      weights: "sum" or "precision", see `Study.calibrated_posterior`.

    Raises:
      ValueError: The sums give no posterior.
    """
    check.one_of("weights", weights, ("sum", "precision"))
    theta, whitening = point.hold(mean)
    sites = list(sums.values())
    total = total_of(sites)
    own = dataclasses.replace(total, whitening=whitening)
    if not own.agrees(sites[0]):
        raise ValueError(
            "the hospitals' sums are in other coordinates than this study's: use their version of "
            "this library, and their public inputs."
        )
    point.scoring.num_records = total.num_records
    notes: list[str] = []
    try:
        curvatures = _curvatures(point, total, theta, whitening)
        found = _heterogeneity(sites, curvatures)
        factors = np.ones(len(sites))
        if weights == "precision" and found.p_value < _LIKE:
            notes.append(
                f"the hospitals' records may be unlike (p = {found.p_value:.2g}): their sums have "
                "equal weights, since others would move the posterior"
            )
        elif weights == "precision":
            factors = _precision_weights(sites, curvatures)
            curvatures = _weighted(point, sites, factors, (theta, whitening), curvatures)
        if found.p_value < _UNLIKE:
            notes.append(
                f"the hospitals' records are unlike (p = {found.p_value:.2g}): the posterior is "
                "that of all records together, and effects may differ between hospitals"
            )
        calibrated = posterior_of(point.scoring, curvatures, whitening)
        bend = _bend(point, calibrated, theta, whitening)
    except FAILURES as error:
        raise ValueError(f"the released sums give no posterior: {error}") from error
    faults = []
    if bend > _MOST_BEND:
        faults.append(
            f"the rounds ended {calibrated.checks.distance:.1f} standard deviations from the "
            f"posterior, where scores are not linear: it may be {bend:.1f} of them off; use more "
            "rounds, or a larger l2_norm_clip"
        )
    # Between the rounds' end and the posterior no steps had to converge.
    checks = dataclasses.replace(calibrated.checks, bend=min(bend, MOST_BEND))
    calibrated = dataclasses.replace(calibrated, checks=checks)
    posterior = StudyPosterior(
        calibrated,
        dict(sums),
        found,
        dict(zip(sums, factors.tolist(), strict=True)),
        tuple(notes),
        tuple(faults),
        point,
        mean,
    )
    for sentence in posterior.warnings:
        _LOG.warning("Do not trust the posterior's intervals: %s.", sentence)
    for note in posterior.notes:
        _LOG.warning("%s.", note[0].upper() + note[1:])
    return posterior


def _curvatures(
    point: PublicPoint, total: SiteSums, theta: np.ndarray, whitening: np.ndarray
) -> Curvatures:
    """Returns draws of the curvature given the sums of several hospitals."""
    first, second = (released_sums(total, theta, half) for half in range(2))
    return point.scoring.curvatures_of(
        released_sums(total, theta),
        (first, second),
        point.scoring.moments_at(theta, whitening),
        whitening,
        trusted=True,
    )


def _bend(
    point: PublicPoint, calibrated: Calibrated, theta: np.ndarray, whitening: np.ndarray
) -> float:
    """Returns by how much the posterior's mean is off where scores are not linear.

    It is in the posterior's standard deviations, over sqrt(d). The slope half-way between the
    public point and the posterior's mean, at public inputs, takes the place of that at the point.
    """
    mixture, index = calibrated.mixture, point.scoring.pairing.index
    away = mixture.mean[index] - theta
    start, middle = (
        point.scoring.moments_at(theta + share * away, whitening).slope for share in (0.0, 0.5)
    )
    to_phi = np.linalg.inv(whitening.T)
    shift = whitening.T @ np.linalg.solve(start, (middle - start) @ (to_phi @ away))
    covariance = mixture.covariance[np.ix_(index, index)]
    return float(np.sqrt(shift @ np.linalg.solve(covariance, shift) / len(shift)))


def _heterogeneity(sites: list[SiteSums], curvatures: Curvatures) -> Heterogeneity:
    """Returns Q of the hospitals' scores: each is expected to have its share of the records'.

    For like records score m has mean `f_m eta` and covariance `f_m B + sd_m^2 I`, for the share f_m
    of the records.
    """
    records = np.array([site.num_records for site in sites], np.float64)
    shares = records / records.sum()
    covariance = curvatures.window.simulation * curvatures.variances.mean(axis=0)
    size = len(covariance)
    inverses = [
        np.linalg.inv(share * covariance + site.deviation("score") ** 2 * np.eye(size))
        for share, site in zip(shares, sites, strict=True)
    ]
    scores = [site.mean("score") for site in sites]
    together = list(zip(shares, inverses, scores, strict=True))
    precision = sum(share**2 * inverse for share, inverse, _ in together)
    linear = sum(share * inverse @ score for share, inverse, score in together)
    common = np.linalg.solve(precision, linear)
    statistic = sum(
        float((score - share * common) @ inverse @ (score - share * common))
        for share, inverse, score in together
    )
    return Heterogeneity(float(statistic), size * (len(sites) - 1))


def _precision_weights(sites: list[SiteSums], curvatures: Curvatures) -> np.ndarray:
    """Returns a weight for each hospital: less for more noise, with mean 1 over records."""
    records = np.array([site.num_records for site in sites], np.float64)
    shares = records / records.sum()
    trace = float(np.trace(curvatures.variances.mean(axis=0)))
    spread = curvatures.window.simulation * trace / len(curvatures.window.theta)
    noise = np.array([site.deviation("score") ** 2 for site in sites])
    weights: np.ndarray = shares / (shares * spread + noise)
    weights /= np.sum(shares * weights)
    return weights


def _weighted(
    point: PublicPoint,
    sites: list[SiteSums],
    weights: np.ndarray,
    place: tuple[np.ndarray, np.ndarray],
    equal: Curvatures,
) -> Curvatures:
    """Returns draws of the curvature of weighted sums; what checks read is of equal weights.

    A weighted sum's slope is the curvature times the weights' mean over records, which is 1, and
    its variance the curvature times the mean of their squares.
    """
    total = dataclasses.replace(
        total_of(sites, weights.tolist()), num_records=sum(site.num_records for site in sites)
    )
    curvatures = _curvatures(point, total, *place)
    records = np.array([site.num_records for site in sites], np.float64)
    square = float(np.sum(records * weights**2) / records.sum())
    window = dataclasses.replace(
        curvatures.window,
        simulation=square * curvatures.window.simulation,
        sampling=square * curvatures.window.sampling,
    )
    return dataclasses.replace(
        curvatures, window=window, lack_of_fit=equal.lack_of_fit, ranks=equal.ranks
    )
