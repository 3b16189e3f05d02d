"""The calibrated posterior of a study, from the hospitals' sums: nothing here touches a record."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import NamedTuple, Protocol

import numpy as np
from scipy import stats

from tfp_dpvi import _validate as check
from tfp_dpvi._tf import Structure, tf, tfd
from tfp_dpvi.calibrated.centred_fit import Statistic, posterior_of
from tfp_dpvi.calibrated.checks import MOST_BEND
from tfp_dpvi.calibrated.mixture import exact_mixture
from tfp_dpvi.calibrated.moved import secant
from tfp_dpvi.calibrated.posterior import FAILURES, Calibrated
from tfp_dpvi.calibrated.summary import PosteriorSummary, summarise
from tfp_dpvi.calibrated.whitening import Curvatures
from tfp_dpvi.federated.effects import EffectDraws, HospitalEffects, Local, SiteLikelihoods
from tfp_dpvi.federated.factors import Factor
from tfp_dpvi.federated.sums import SiteSums, total_of
from tfp_dpvi.federated.window import PublicPoint, hides_weights, released_sums, shares_of

_LOG = logging.getLogger("tfp_dpvi")
# p-values of the test for unlike records: above it weights are used, below the other it warns.
_LIKE = 0.2
_UNLIKE = 0.01
_NUM_DRAWS = 4000
# Standard deviations over sqrt(d) by which a score that is not linear may move the posterior.
_MOST_BEND = 0.5
# By how much the slope of scores may change on the way to a hospital's own parameters.
_MOST_TURN = 0.5
# Hospitals below which the effects' standard deviation is mostly its prior.
_FEW = 3
_NUM_PASSES = 2
# In whitened coordinates: nearer, slopes hardly change.
_NEAR = 0.05


class Released(Protocol):
    """The last phase, as a server, an aggregation or a history knows it."""

    @property
    def place(self) -> Factor | None:
        """The posterior at whose mean the sums were released, or None before."""

    @property
    def sums(self) -> Mapping[str, SiteSums]:
        """Each hospital's sums, or their total."""


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
class StudyDraws:
    """Joint draws of a study's posterior.

    Attributes:
      parameters: The shared parameters, in the prior's structure with n draws first.
      sds: Draws of the effects' standard deviation by the name of a coordinate, each of shape [n].
      effects: For each hospital the same of its effects; empty without local parameters.

    ```python
    >>> draws = StudyDraws(np.zeros([2]), {"b": np.ones(2)}, {"berlin": {"b": np.zeros(2)}})
    >>> draws.effects["berlin"]["b"].shape
    (2,)

    ```
    """

    parameters: Structure
    sds: Mapping[str, np.ndarray]
    effects: Mapping[str, Mapping[str, np.ndarray]]


class _Sampled(NamedTuple):
    """Draws of coordinates [n, D], of the effects' sds [n, L], and of effects [M, n, L]."""

    flat: np.ndarray
    sds: np.ndarray
    effects: np.ndarray


@dataclasses.dataclass(frozen=True)
class _Effects:
    """The effects of a posterior: their distribution, and the draws of it that it is made of.

    Attributes:
      given: The distribution of effects given the sums.
      draws: Draws of their standard deviations.
      whitening: W, shape [d, d].
      statistic: What the sums say of the shared parameters.
      heterogeneity: Whether hospitals are unlike beyond effects.
      turns: By how much the slope of scores changes on the way to each hospital, shape [M].
    """

    given: HospitalEffects
    draws: EffectDraws
    whitening: np.ndarray
    statistic: Statistic
    heterogeneity: Heterogeneity
    turns: np.ndarray


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
      local: The coordinates that differ between hospitals, see `Study`; None if none do. The
        distribution is then of the parameters around which they differ.

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
    local: Local | None = None
    _effects: _Effects | None = dataclasses.field(default=None, repr=False)

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

        With local parameters it ends with the effects' standard deviations, "sd of b", and each
        hospital's effects, "b at berlin". It has the sentences of `faults` and `notes`.

        Args:
          seed: Seed of the draws that it is computed from.
        """
        drawn = self.draws(_NUM_DRAWS, seed=seed)
        coordinates = self._point.scoring.pairing.coordinates
        table = summarise(drawn.parameters, coordinates, self.calibrated, fitted=True)
        rows = {f"sd of {name}": values for name, values in drawn.sds.items()}
        for hospital, effects in drawn.effects.items():
            rows |= {f"{name} at {hospital}": values for name, values in effects.items()}
        return table.with_rows(rows, (*self.faults, *self.notes))

    def draws(self, num: int = _NUM_DRAWS, *, seed: int = 0) -> StudyDraws:
        """Returns joint draws of shared parameters, effects and their standard deviations.

        Args:
          num: The number n of draws.
          seed: Their seed.
        """
        drawn = self._sample(num, seed)
        names = () if self.local is None else self.local.names
        of_hospitals = zip(self.sums, drawn.effects, strict=True) if names else ()
        return StudyDraws(
            self._constrained(drawn.flat),
            {name: drawn.sds[:, place] for place, name in enumerate(names)},
            {
                hospital: {name: own[:, place] for place, name in enumerate(names)}
                for hospital, own in of_hospitals
            },
        )

    def at(self, hospital: str, num: int = _NUM_DRAWS, *, seed: int = 0) -> Structure:
        """Returns draws of a hospital's own parameters: the shared ones and its effects.

        They are of released values, so that they cost nothing.

        Args:
          hospital: Its name.
          num: The number n of draws.
          seed: Their seed.

        Returns:
          The prior's structure, with n draws first.

        Raises:
          ValueError: It gave no sums.
        """
        check.one_of("hospital", hospital, tuple(self.sums))
        drawn = self._sample(num, seed)
        if self.local is not None:
            read = self._point.scoring.pairing.index
            own = drawn.effects[list(self.sums).index(hospital)]
            drawn.flat[:, read[self.local.index]] += own
        return self._constrained(drawn.flat)

    def _sample(self, num: int, seed: int) -> _Sampled:
        """Returns joint draws on the real line."""
        generator = np.random.default_rng(seed)
        mixture = self.calibrated.mixture
        picks = generator.integers(len(mixture.locs), size=num)
        flat = mixture.draws_of(picks, generator)
        if self._effects is None:
            return _Sampled(flat, np.zeros([num, 0]), np.zeros([0, num, 0]))
        own = self._effects
        # Components and chains follow the draws of tau in their order.
        picks = picks % len(own.draws.sds)
        read = flat[:, self._point.scoring.pairing.index]
        phi = np.linalg.solve(own.whitening.T, read.T).T
        effects = own.given.sample(phi, own.draws, picks, generator)
        return _Sampled(flat, own.draws.sds[picks], effects)

    def _constrained(self, flat: np.ndarray) -> Structure:
        """Returns draws of coordinates in the prior's structure."""
        coordinates = self._point.scoring.pairing.coordinates
        parts = tf.split(tf.constant(flat, coordinates.dtype), coordinates.sizes, axis=-1)
        return coordinates.constrain(parts)

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
        return combine(self._point, self._mean, others, local=self.local)


def combine(
    point: PublicPoint,
    mean: np.ndarray,
    sums: Mapping[str, SiteSums],
    *,
    weights: str = "sum",
    local: Local | None = None,
) -> StudyPosterior:
    """Returns the posterior of hospitals' sums, and warns of what its checks say.

    Args:
      point: The study's sums and public inputs.
      mean: The unconstrained parameters at which they were released, shape [D].
      sums: The hospitals' sums by name.
      weights: "sum" or "precision", see `Study.calibrated_posterior`.
      local: The coordinates that differ between hospitals; None if none do.

    Raises:
      ValueError: The sums give no posterior, or weights are given with local parameters.
    """
    check.one_of("weights", weights, ("sum", "precision"))
    if local is not None and weights != "sum":
        raise ValueError(
            f"weights={weights!r} with local parameters: each hospital counts by its own noise "
            "there; leave weights out."
        )
    theta, whitening = point.hold(mean)
    sites = list(sums.values())
    total = total_of(sites)
    if not dataclasses.replace(total, whitening=whitening).agrees(sites[0]):
        raise ValueError(
            "the hospitals' sums are in other coordinates than this study's: use their version of "
            "this library, and their public inputs."
        )
    point.scoring.num_records = total.num_records
    point.see_weights(total)
    notes: list[str] = []
    faults: list[str] = []
    effects: _Effects | None = None
    try:
        curvatures = _curvatures(point, total, theta, whitening)
        factors = np.ones(len(sites))
        statistic: Statistic | None = None
        if local is None:
            found = _heterogeneity(sites, curvatures)
            if weights == "precision" and found.p_value >= _LIKE:
                factors = _precision_weights(sites, curvatures)
                curvatures = _weighted(point, sites, factors, (theta, whitening), curvatures)
                # Weighted sums are not those of so many records, whose third order is known.
                statistic = Statistic.of_curvatures(curvatures)
        else:
            effects = _with_effects(point, sites, curvatures, (theta, whitening), local)
            found, statistic = effects.heterogeneity, effects.statistic
            faults += _far_hospitals(list(sums), effects.turns)
        calibrated = posterior_of(point.scoring, curvatures, whitening, statistic)
        bend = _bend(point, calibrated, theta, whitening) if local is None else 0.0
    except FAILURES as error:
        raise ValueError(f"the released sums give no posterior: {error}") from error
    if weights == "precision" and found.p_value < _LIKE:
        notes.append(
            f"the hospitals' records may be unlike (p = {found.p_value:.2g}): their sums have "
            "equal weights, since others would move the posterior"
        )
    notes += _on_hospitals(found, len(sites), local)
    # Effects were four of their deviations off; what hospitals share is that of sums as they are.
    (notes if local is None else faults).extend(_on_weights(sums, local))
    if bend > _MOST_BEND:
        faults.append(
            f"the rounds ended {calibrated.checks.distance:.1f} standard deviations from the "
            f"posterior, where scores are not linear: it may be {bend:.1f} of them off; use more "
            "rounds, or a larger clip"
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
        local,
        effects,
    )
    for sentence in posterior.warnings:
        _LOG.warning("Do not trust the posterior's intervals: %s.", sentence)
    for note in posterior.notes:
        _LOG.warning("%s.", note[0].upper() + note[1:])
    return posterior


def _on_hospitals(found: Heterogeneity, num: int, local: Local | None) -> list[str]:
    """Returns notes on how unlike hospitals are, and how many tell it."""
    if local is None:
        if found.p_value >= _UNLIKE:
            return []
        return [
            f"the hospitals' records are unlike (p = {found.p_value:.2g}): the posterior is that "
            "of all records together. If hospitals differ by more than what their records are, its "
            "intervals are too narrow for what they have in common: name the parameters that "
            "differ, such as the intercept, in Study(local=)"
        ]
    notes = []
    if found.p_value < _UNLIKE:
        notes.append(
            f"the hospitals are unlike beyond {', '.join(local.names)} (p = {found.p_value:.2g}): "
            "others of their parameters differ too; name them in Study(local=)"
        )
    if num < _FEW:
        notes.append(
            f"{num} hospitals hardly say how much hospitals differ: the prior of the effects' "
            "standard deviation decides"
        )
    return notes


def _on_weights(sums: Mapping[str, SiteSums], local: Local | None) -> list[str]:
    """Returns a sentence that names hospitals whose weights noise hides, and what follows."""
    hidden = [name for name, site in sums.items() if hides_weights(site)]
    if not hidden or len(sums) == 1:
        return []
    known = "the other hospitals' are" if len(hidden) < len(sums) else "if all were equal"
    other = "the test for unlike hospitals" if local is None else "effects there"
    return [
        f"noise hides how large the survey weights of {', '.join(hidden)!s:.200} are: they are "
        f"taken to be as {known}, and where they are not, {other} may be off; use a larger epsilon "
        "there, or the largest weight that the design allows as max_weight"
    ]


def _far_hospitals(names: list[str], turns: np.ndarray) -> list[str]:
    """Returns a fault that names hospitals whose parameters are too far from the public point.

    Args:
      names: Their names.
      turns: By how much the slope of scores changes on the way to each, shape [M].
    """
    far = [name for name, turn in zip(names, turns, strict=True) if turn > _MOST_TURN]
    if not far:
        return []
    change = "more than tenfold" if turns.max() > 9.0 else f"by {turns.max():.0%}"
    return [
        f"the parameters of {', '.join(far)!s:.200} are so far from the public point that scores "
        f"are not linear (their slope changes {change}): effects may be off"
    ]


def _with_effects(
    point: PublicPoint,
    sites: list[SiteSums],
    curvatures: Curvatures,
    place: tuple[np.ndarray, np.ndarray],
    local: Local,
) -> _Effects:
    """Returns effects, and what the sums say of the shared parameters without them.

    Args:
      point: The study's sums and public inputs.
      sites: The hospitals' sums.
      curvatures: Draws of the curvature of all hospitals' sums together.
      place: The public point, shape [d], and W, shape [d, d].
      local: The coordinates that differ.
    """
    theta, whitening = place
    phi, prior = curvatures.window.theta, point.scoring.prior
    eye = np.eye(len(phi))
    bends = np.stack([eye] * len(sites))
    mean = dataclasses.replace(
        curvatures,
        slopes=curvatures.slopes.mean(axis=0, keepdims=True),
        variances=curvatures.variances.mean(axis=0, keepdims=True),
    )
    start = point.scoring.likelihood.moments_at(theta, whitening).slope
    expected = point.moved
    expected.start(theta, whitening)
    precision = prior.whitened(whitening)
    linear = precision @ np.linalg.solve(whitening.T, prior.mean)
    own = np.zeros([len(sites), len(phi)])

    def given(drawn: Curvatures) -> HospitalEffects:
        likelihoods = SiteLikelihoods.of_sites(sites, drawn, bends)
        return HospitalEffects(local, likelihoods, whitening, phi, prior)

    def secant_to(away: np.ndarray) -> np.ndarray:
        # Half-way, the clip has moved along: the expected scores correct for that.
        halfway = point.scoring.likelihood.moments_at(
            theta + away @ whitening / 2.0, whitening
        ).slope
        if away @ away < _NEAR**2:
            return halfway
        return secant(halfway, expected(theta + away @ whitening), away)

    # A hospital's scores have another slope on the way to its own parameters.
    for _ in range(_NUM_PASSES):
        generator = np.random.default_rng(0)
        effects = given(mean)
        draws = effects.draw(generator, 64)
        shared = exact_mixture(draws.likelihood, precision, linear).locs
        moved = effects.sample(shared, draws, np.arange(len(shared)), generator).mean(axis=1)
        own = shared.mean(axis=0) + moved @ np.linalg.inv(whitening.T)[:, local.index].T
        bends = np.stack([secant_to(away) for away in own - phi]) @ np.linalg.inv(start)
    turns = np.linalg.norm(bends - eye, ord=2, axis=(1, 2))
    found = Heterogeneity(*given(mean).misfit())
    effects = given(curvatures)
    draws = effects.draw(np.random.default_rng(0))
    slope = draws.likelihood.precisions.mean(axis=0)
    records = np.array([site.num_records for site in sites], np.float64)
    statistic = Statistic(
        draws.likelihood,
        slope,
        slope - draws.noise,
        draws.noise,
        place=records @ own / records.sum(),
        halves=False,
    )
    return _Effects(effects, draws, whitening, statistic, found, turns)


def _curvatures(
    point: PublicPoint, total: SiteSums, theta: np.ndarray, whitening: np.ndarray
) -> Curvatures:
    """Returns draws of the curvature given the sums of several hospitals."""
    first, second = (released_sums(total, theta, half) for half in range(2))
    seen = point.scoring.seen_of(
        released_sums(total, theta),
        (first, second),
        point.scoring.likelihood.moments_at(theta, whitening),
        whitening,
        trusted=True,
    )
    return seen.draw()


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
        point.scoring.likelihood.moments_at(theta + share * away, whitening).slope
        for share in (0.0, 0.5)
    )
    to_phi = np.linalg.inv(whitening.T)
    shift = whitening.T @ np.linalg.solve(start, (middle - start) @ (to_phi @ away))
    covariance = mixture.covariance[np.ix_(index, index)]
    return float(np.sqrt(shift @ np.linalg.solve(covariance, shift) / len(shift)))


def _heterogeneity(sites: list[SiteSums], curvatures: Curvatures) -> Heterogeneity:
    """Returns Q of the hospitals' scores: each is expected to have its share of the records'.

    For like records score m has mean `f_m eta` and covariance `g_m B + sd_m^2 I`, for the share f_m
    of the records and g_m = f_m; with weights w, f_m is the share of their sum, and g_m of w^2.
    """
    shares, squares = shares_of(sites)
    covariance = curvatures.window.simulation * curvatures.variances.mean(axis=0)
    size = len(covariance)
    inverses = [
        np.linalg.inv(square * covariance + site.deviation("score") ** 2 * np.eye(size))
        for square, site in zip(squares, sites, strict=True)
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
        curvatures,
        window=window,
        lack_of_fit=equal.lack_of_fit,
        ranks=equal.ranks,
        seen=equal.seen,
    )
