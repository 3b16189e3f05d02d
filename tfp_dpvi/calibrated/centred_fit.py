"""The state of a model that learns by scoring steps, and its posterior."""

from __future__ import annotations

import dataclasses
import logging
import math
from typing import Any

import numpy as np

from tfp_dpvi._tf import Structure, tf
from tfp_dpvi.bayes.coordinates import LogDensity
from tfp_dpvi.bayes.model import LIKELIHOOD_ERRORS, BayesianModel
from tfp_dpvi.calibrated import mixture as mixtures
from tfp_dpvi.calibrated.bend import LinearScore, bent
from tfp_dpvi.calibrated.checks import (
    ABOUT,
    MOST_THIRD_ORDER,
    Checks,
    ParameterChecks,
    apart,
    check_posterior,
    extents,
    widths,
)
from tfp_dpvi.calibrated.conflict import pulls
from tfp_dpvi.calibrated.diagonal import MOST_DENSE, NUM_PROBES, least_inputs, num_inputs
from tfp_dpvi.calibrated.expected import ExpectedScore
from tfp_dpvi.calibrated.jumps import parameters_that_jump
from tfp_dpvi.calibrated.mixture import LinearLikelihood, Mixture
from tfp_dpvi.calibrated.pairing import Pairing
from tfp_dpvi.calibrated.posterior import FAILURES, Calibrated, mixture_distribution
from tfp_dpvi.calibrated.requirements import CannotPairError
from tfp_dpvi.calibrated.scoring import Scoring
from tfp_dpvi.calibrated.straight import Straight
from tfp_dpvi.calibrated.weights import ReleasedWeights, WeightScale
from tfp_dpvi.calibrated.whitening import Curvatures, NormalPrior, without_far_draws
from tfp_dpvi.calibrated.wider import z_scores
from tfp_dpvi.data import Records, UnitRows, make_records
from tfp_dpvi.data.records import by_column
from tfp_dpvi.data.shapes import specs_of, zeros_like
from tfp_dpvi.training import Mechanism

LOG = logging.getLogger("tfp_dpvi")
# Steps over all records, unless the user sets epochs.
NUM_STEPS = 160
# Below, the first steps find no coordinates.
LEAST_STEPS = 60
# Of a parameter's variance, what a whitened coordinate has whose tail matters for it.
_LEAST_PART = 0.2
_NUM_DRAWS = 4096
_HELP = "Pass public_inputs, or an optimizer to compile, such as DPKerasAdamOptimizer."


class CentredFit:
    """The state of a model that learns by scoring steps.

    Args:
      model: Prior and likelihood.

    Attributes:
      scoring: The steps for the last kind of records, or None before the first fit.
    """

    def __init__(self, model: BayesianModel) -> None:
        self._model = model
        self._kind: str | None = None
        self.scoring: Scoring | None = None
        self._computed: tuple[Any, Calibrated | None] = (None, None)

    def prepare(self, records: Records, public_inputs: Structure | None) -> Scoring:
        """Returns scoring steps for records of these shapes and dtypes.

        Args:
          records: The records of a fit, whose values are not read.
          public_inputs: Public inputs like the private ones, or None.

        Raises:
          ValueError: They do not apply, or there are no public inputs where they are needed.
        """
        _check_max_weight(records)
        kind = f"{specs_of(records, 1)} {records.max_weight}"
        if self.scoring is None or kind != self._kind:
            try:
                pairing = Pairing(self._model, records, log_scales=True)
            except CannotPairError as reason:
                raise ValueError(
                    f"compile without an optimizer does not apply: {reason}.\n"
                    "Pass an optimizer, such as DPKerasAdamOptimizer(l2_norm_clip=1.0)."
                ) from reason
            if pairing.is_bound:
                raise ValueError(
                    "likelihood: the density of dpvi.local.Variational is a bound, with which "
                    "intervals are not calibrated.\n"
                    "Use dpvi.local.quadrature or enumeration, or pass an optimizer to compile."
                )
            size = len(pairing.index)
            if public_inputs is None:
                public_inputs = self._earlier_inputs(records)
            inputs = self._inputs_like(records, public_inputs, size)
            self.scoring = Scoring(pairing, inputs, records.max_weight)
            self._kind = kind
        elif public_inputs is not None:
            inputs = self._inputs_like(records, public_inputs, self.scoring.size)
            self.scoring.likelihood.set_inputs(inputs)
        return self.scoring

    def _earlier_inputs(self, records: Records) -> Structure | None:
        """Returns the inputs of an earlier fit if records have such an x, with weights or not."""
        if self.scoring is None:
            return None
        inputs = tf.nest.map_structure(np.asarray, self.scoring.likelihood.pool)
        return inputs if _shapes_of(inputs) == _shapes_of(records.x) else None

    def _inputs_like(
        self, records: Records, public_inputs: Structure | None, size: int
    ) -> Structure:
        """Returns public inputs, or standard ones of the records' shapes, for d parameters."""
        num = num_inputs(size)
        if self._model.generative:
            # Only their number is read.
            return zeros_like(records.x, num)
        if public_inputs is None and isinstance(records.x, UnitRows):
            return standard_persons(records.x, num)
        if public_inputs is None:
            generator = np.random.default_rng(0)
            return tf.nest.map_structure(
                lambda part: standard_inputs(part, num, generator), records.x
            )
        return checked_inputs(
            public_inputs, records.x, dtype=self._model.dtype, size=size, of="x has"
        )

    def start_anew(self) -> None:
        """Lets the next fit start where the first one did, instead of where the last one ended."""
        if self.scoring is not None:
            self.scoring.start_anew()

    def begin(self) -> None:
        """Runs before a fit spends privacy.

        Raises:
          ValueError: The public inputs carry no information, or overflow; or the likelihood
            jumps where a parameter moves.
        """
        if self.scoring is None:
            return
        try:
            if not self.scoring.is_informed():
                # The last fit may have ended where there is none.
                self.scoring.start_anew()
            if self.scoring.is_informed():
                _refuse_jumps(self.scoring)
                return
            failed = "has no finite information about the parameters"
        except tf.errors.OpError as error:
            failed = f"fails ({type(error).__name__}: perhaps an index out of range)"
        if self._model.generative:
            raise ValueError(
                f"likelihood: it {failed} at the prior's mean: pass another prior, or a likelihood "
                "with finite\ngradients (those of tfd.TruncatedNormal need finite bounds, such as "
                "high=1e6 instead of np.inf)."
            )
        raise ValueError(
            f"public_inputs: the likelihood {failed} at them and the prior's mean.\n"
            "Pass inputs like the private ones (without public_inputs, x is taken as standard "
            "normal), or another prior."
        )

    def posterior(
        self, accumulated: dict[str, Structure], mechanism: Mechanism
    ) -> Calibrated | None:
        """Returns the posterior of the last fit; warns of what its checks say, once.

        Args:
          accumulated: The fit's accumulators over released values, by name.
          mechanism: The mechanism that released them.
        """
        if self._computed[0] is accumulated or self.scoring is None:
            return self._computed[1]
        posterior = None
        try:
            posterior = centred_posterior(self.scoring, accumulated, mechanism)
        except FAILURES as error:
            LOG.warning(
                "The released values give no posterior (%s): `posterior` is the prior.",
                error,
            )
        self._computed = (accumulated, posterior)
        for sentence in () if posterior is None else posterior.checks.warnings:
            LOG.warning("Do not trust the posterior's intervals: %s.", sentence)
        return posterior


def _refuse_jumps(scoring: Scoring) -> None:
    """Raises `ValueError` for parameters whose jumps no gradient shows."""
    jumping = parameters_that_jump(scoring)
    if jumping:
        raise ValueError(
            f"no gradient shows how {jumping[0]} changes the likelihood: it jumps (by tf.where, "
            "tf.cast, tf.sign or a very steep function).\nSum the parameter out, or make the "
            "change smooth."
        )


def _check_max_weight(records: Records) -> None:
    """Raises unless weights have a public bound."""
    if records.sample_weight is not None and records.max_weight is None:
        raise ValueError(
            "max_weight is missing: with sample_weight, pass the public largest weight, which may "
            "not be read off the records."
        )


def standard_persons(x: UnitRows, num: int) -> UnitRows:
    """Returns standard inputs of persons, of whom as many have 1 row as 2, and so on.

    Args:
      x: Persons, of which shapes and dtypes are read.
      num: The number of persons.

    Raises:
      ValueError: The inputs are integers.
    """
    generator = np.random.default_rng(0)
    rows = tf.nest.map_structure(lambda part: standard_inputs(part, num, generator), x.rows)
    most = x.mask.shape[1]
    sizes = generator.permutation(np.arange(num) % most) + 1
    return UnitRows(rows, np.arange(most) < sizes[:, None])


def standard_inputs(part: np.ndarray, num: int, generator: np.random.Generator) -> np.ndarray:
    """Returns standard normal or random boolean inputs of a record's shape.

    Args:
      part: Records, of which shape and dtype are read.
      num: The number of rows.
      generator: The source of random numbers.

    Raises:
      ValueError: The inputs are integers.
    """
    shape = (num, *part.shape[1:])
    if part.dtype.kind == "f":
        return generator.normal(size=shape).astype(part.dtype)
    if part.dtype.kind == "b":
        return generator.uniform(size=shape) < 0.5
    raise ValueError(
        "public_inputs: x, or a part of it, has integers, whose values are not known before a "
        f"fit.\n{_HELP}"
    )


def checked_inputs(
    public_inputs: Structure, like: Structure, *, dtype: np.dtype, size: int, of: str
) -> Structure:
    """Returns public inputs as arrays.

    Args:
      public_inputs: Arrays or a table of rows, or the `UnitRows` of persons.
      like: Records, of which shapes and dtypes are read.
      dtype: The model's float type.
      size: The number d of parameters.
      of: Whose shapes and dtypes these are, for messages.

    Raises:
      ValueError: They have other shapes or dtypes than records, or are too few.
    """
    inputs = public_inputs
    if not isinstance(inputs, UnitRows):
        inputs = by_column("public_inputs", inputs)
        inputs = make_records(inputs, None, None, dtype=dtype, validate=True).x
    wanted, got = _shapes_of(like), _shapes_of(inputs)
    if wanted != got:
        raise ValueError(
            f"public_inputs have the shapes and dtypes {got} of a record, and {of} {wanted}: "
            "pass public or invented records of the same columns."
        )
    given = len(tf.nest.flatten(inputs)[0])
    if given < least_inputs(size):
        raise ValueError(
            f"public_inputs: {given} rows do not show how {size} parameters are correlated: "
            f"pass at least {least_inputs(size)}."
        )
    return inputs


def _shapes_of(x: Structure) -> Structure:
    """Returns the shape and dtype of each part of a record."""
    return tf.nest.map_structure(lambda part: (part.shape[1:], str(part.dtype)), x)


def centred_posterior(
    scoring: Scoring, accumulated: dict[str, Structure], mechanism: Mechanism
) -> Calibrated:
    """Returns the posterior from the window's releases.

    Args:
      scoring: The steps that were made.
      accumulated: Their accumulators over released values, by name.
      mechanism: The mechanism that released them.

    Raises:
      ValueError, np.linalg.LinAlgError: The releases give no posterior.

    #### Formal guarantee

    A function of released and public values: post-processing, at no further cost.
    """
    curvatures, whitening = scoring.window(accumulated, mechanism)
    return posterior_of(scoring, curvatures, whitening)


@dataclasses.dataclass(frozen=True)
class Statistic:
    """A released score that is linear in the parameters, with its noise.

    All is in whitened coordinates.

    Attributes:
      likelihood: The likelihood of the parameters, for each draw of the curvature.
      slope: The mean slope, shape [d, d].
      data: The score's variance without noise, shape [d, d].
      noise: That of the noise, shape [d, d].
      place: The parameters that the records have on average; None for the posterior's mean.
      halves: Whether more records or epsilon narrow it as they narrow a single site's posterior.
    """

    likelihood: LinearLikelihood
    slope: np.ndarray
    data: np.ndarray
    noise: np.ndarray
    place: np.ndarray | None = None
    halves: bool = True

    @classmethod
    def of_curvatures(cls, curvatures: Curvatures) -> Statistic:
        """Returns the released score, of sums over all records."""
        window = curvatures.window
        slopes, variances = curvatures.slopes, curvatures.variances
        every = np.arange(slopes.shape[1])
        return cls(
            LinearLikelihood.from_window(window, slopes, variances, every),
            slopes.mean(axis=0),
            window.simulation * variances.mean(axis=0),
            window.score_sd**2 * np.eye(len(every)),
        )


def posterior_of(
    scoring: Scoring,
    curvatures: Curvatures,
    whitening: np.ndarray,
    statistic: Statistic | None = None,
) -> Calibrated:
    """Returns the posterior from draws of the curvature.

    Args:
      scoring: The model, and the number of records.
      curvatures: The draws, and the window's released sums.
      whitening: W, shape [d, d].
      statistic: What the sums say, if it is not what all records together say: then the
        likelihood is taken to second order.

    Raises:
      ValueError, np.linalg.LinAlgError: The releases give no posterior.
    """
    coordinates, index = scoring.pairing.coordinates, scoring.pairing.index
    generator = np.random.default_rng(0)
    window = curvatures.window
    # Everything is in units of the prior's standard deviations, so that no unit matters.
    draws = scoring.prior_draws
    near_draws = without_far_draws(draws, coordinates.names)
    unit = near_draws.std(axis=0)
    to_phi = np.linalg.inv(whitening.T) * unit[index]
    is_sum = statistic is None
    statistic = Statistic.of_curvatures(curvatures) if statistic is None else statistic
    in_phi = statistic.likelihood
    likelihood = LinearLikelihood(
        index, to_phi.T @ in_phi.precisions @ to_phi, in_phi.linear @ to_phi
    )

    def log_prior(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        value, gradient = coordinates.log_density(points * unit)
        return value, gradient * unit

    normal = mixtures.normal_part(log_prior, near_draws[:64] / unit)
    is_normal = bool(normal.is_normal.all())
    near = NormalPrior.of_draws(near_draws / unit)
    precision, linear = near.precision, near.precision @ near.mean
    if is_normal:
        precision, linear = normal.precision, normal.linear
    scaled = mixtures.exact_mixture(likelihood, precision, linear)
    straight = _straight(scoring.pairing, whitening.T @ window.theta, unit[index], scaled)
    if straight is not None or not is_normal:
        start = scaled.sample(256, generator)
        scaled = mixtures.sampled_mixture(likelihood, log_prior, start, generator, straight)
    third_order = math.nan
    if is_sum and straight is None and not scoring.pairing.generative:
        start = scaled.sample(256, generator)
        bend = _Bend(scoring, curvatures, whitening, unit)
        scaled, third_order = bend.bent(scaled, generator)
        known = likelihood, log_prior, start, generator
        far = bend.sampled(third_order, *known) if is_normal else None
        if far is not None:
            scaled, third_order = far, math.nan if bend.is_like else math.inf
    mixture = Mixture(scaled.locs * unit, unit[:, None] * scaled.scales)
    spread = (
        to_phi.T @ statistic.slope @ to_phi,
        to_phi.T @ statistic.data @ to_phi,
        to_phi.T @ statistic.noise @ to_phi,
        scaled,
        index,
        log_prior,
    )
    pulled = pulls(likelihood, normal)
    checks = _checks(scoring, curvatures, mixture, whitening, statistic.place, pulled, generator)
    seen, noise = curvatures.seen
    checks = dataclasses.replace(checks, third_order=third_order, seen=seen, seen_noise=noise)
    distribution = mixture_distribution(mixture, coordinates)
    return Calibrated(
        mixture,
        distribution,
        checks,
        window.num_steps,
        shares=mixtures.variance_shares(*spread),
        halving=mixtures.halving_factors(*spread) if statistic.halves else None,
        log_scales=True,
    )


def _straight(
    pairing: Pairing, theta: np.ndarray, unit: np.ndarray, linear: Mixture
) -> Straight | None:
    """Returns the map to where scores are linear, if there is one that applies."""
    straight = Straight.of_pairing(pairing, theta / unit, unit)
    return straight if straight is not None and straight.applies_to(linear, pairing.index) else None


class _Bend:
    """A likelihood beyond the second order, in a fit's releases.

    Args:
      scoring: The model, and the number of records.
      curvatures: The draws, and the window's released sums.
      whitening: W, shape [d, d].
      unit: The units of all coordinates, shape [D].
    """

    def __init__(
        self, scoring: Scoring, curvatures: Curvatures, whitening: np.ndarray, unit: np.ndarray
    ) -> None:
        window = curvatures.window
        self._scoring = scoring
        self._whitening = whitening
        self._unit = unit
        self._linear = LinearScore(
            window.theta,
            window.score,
            curvatures.slopes,
            window.score_covariance(curvatures.variances),
            float(np.trace(curvatures.variances.mean(axis=0))),
            scoring.counted(curvatures.weights),
        )

    @property
    def is_like(self) -> bool:
        """True if scores at public inputs vary like the private ones."""
        return self._linear.is_like(self._scoring.moved)

    def bent(self, scaled: Mixture, generator: np.random.Generator) -> tuple[Mixture, float]:
        """Returns the posterior with the likelihood's third order, and `Checks.third_order`.

        Args:
          scaled: The posterior of the normal likelihood, in these units.
          generator: The source of random numbers.
        """
        index, linear = self._scoring.pairing.index, self._linear
        whitening, unit = self._whitening, self._unit
        back = np.diag(unit[index]) @ np.linalg.inv(whitening)
        if not linear.has_third_order(back.T @ scaled.covariance[np.ix_(index, index)] @ back):
            return scaled, math.nan
        if linear.is_hidden:
            return scaled, math.inf
        mixture = Mixture(scaled.locs * unit, unit[:, None] * scaled.scales)
        try:
            mixture, distance = bent(
                mixture, index, self._scoring.moved, linear, whitening, generator
            )
        except FAILURES as error:
            LOG.info("The likelihood is taken to second order: %s", error)
            return scaled, math.inf
        return Mixture(mixture.locs / unit, mixture.scales / unit[:, None]), distance

    def sampled(
        self,
        third_order: float,
        likelihood: LinearLikelihood,
        log_prior: LogDensity,
        start: np.ndarray,
        generator: np.random.Generator,
    ) -> Mixture | None:
        """Returns the posterior of the expected score, where the third order is not enough.

        Args:
          third_order: See `Checks.third_order`.
          likelihood: As in `mixtures.sampled_mixture`.
          log_prior: As in `mixtures.sampled_mixture`.
          start: As in `mixtures.sampled_mixture`.
          generator: The source of random numbers.

        Returns:
          None where the third order is enough, and where there is no exact expected score.
        """
        scoring, place = self._scoring, self._linear.place
        # Chances of outcomes of few values are exact, however far parameters are. With more
        # coordinates the shape of the slope is not released, and chains of few steps do not do.
        is_exact = not scoring.likelihood.num_twins and len(self._unit) <= MOST_DENSE
        if not (is_exact and third_order > MOST_THIRD_ORDER):
            return None
        scores, unit = scoring.moved, self._unit[scoring.pairing.index]
        try:
            scores.start(self._whitening.T @ place, self._whitening)
            expected = ExpectedScore(scores, place, self._whitening, unit)
            return mixtures.sampled_mixture(
                likelihood, log_prior, start, generator, expected, is_costly=True
            )
        except FAILURES as error:
            LOG.info("The likelihood is taken to third order: %s", error)
            return None


def _checks(
    scoring: Scoring,
    curvatures: Curvatures,
    mixture: Mixture,
    whitening: np.ndarray,
    place: np.ndarray | None,
    pulled: tuple[np.ndarray, np.ndarray],
    generator: np.random.Generator,
) -> Checks:
    """Returns the checks, in whitened coordinates and of single parameters."""
    coordinates, index = scoring.pairing.coordinates, scoring.pairing.index
    draws = scoring.prior_draws
    to_phi = np.linalg.inv(whitening.T)
    in_phi = Mixture(mixture.locs[:, index] @ to_phi.T, to_phi @ mixture.scales[:, index])
    checks = check_posterior(
        curvatures.window,
        curvatures.slopes,
        curvatures.variances,
        in_phi,
        np.arange(len(index)),
        mismatch=curvatures.mismatch,
        capped=curvatures.matrices,
    )
    checks = _with_weights(checks, curvatures.weights, scoring.likelihood.scale)
    unknown = np.full(coordinates.num, math.nan)
    try:
        width = widths(draws, mixture.unsmoothed(_NUM_DRAWS, generator))
    except (*LIKELIHOOD_ERRORS, np.linalg.LinAlgError):
        width = unknown
    place = in_phi.mean if place is None else place
    at = place - curvatures.window.theta, in_phi.covariance
    excess, z = curvatures.lack_of_fit.score(*at)
    ranks = math.nan
    if curvatures.ranks is not None:
        ranks = curvatures.ranks.p_value(*at)
    shift, shift_z = unknown.copy(), unknown.copy()
    if curvatures.shift is not None:
        shift[index], covariance = curvatures.shift.of_parameters(
            curvatures.slopes.mean(axis=0),
            curvatures.matrices.mean(axis=0),
            in_phi.covariance,
            whitening,
        )
        shift_z[index] = z_scores(shift[index], covariance)
    sds = np.sqrt(np.diag(mixture.covariance))
    extent = unknown.copy()
    back = whitening.T
    information = curvatures.slopes.mean(axis=0) / (scoring.num_records * curvatures.shrink)
    extent[index] = extents(
        back @ at[0],
        Mixture(mixture.locs[:, index], mixture.scales[:, index]),
        to_phi.T @ information @ to_phi,
        without_far_draws(draws, coordinates.names).std(axis=0)[index],
    )
    tail = unknown.copy()
    moments = scoring.likelihood.moments_at(back @ curvatures.window.theta, whitening)
    if len(index) <= MOST_DENSE:
        falls = moments.tails()
        # Of a parameter's variance.
        parts = np.square(whitening.T) * np.diag(in_phi.covariance)
        matters = parts > _LEAST_PART * parts.sum(axis=1, keepdims=True)
        tail[index] = np.max(np.where(matters, falls, 0.0), axis=1)
    parameters = ParameterChecks(
        coordinates.names,
        unknown,
        unknown,
        width,
        shift / sds,
        shift_z,
        extent,
        *pulled,
        tail,
    )
    if not (scoring.pairing.generative or np.all(width[index] > ABOUT)):
        # Of many columns, the noise on their squares along random directions.
        radius = math.sqrt(2.0 * min(len(index), NUM_PROBES))
        pairs = apart(moments.information, scoring.is_input, scoring.intercept)
        checks = dataclasses.replace(checks, hidden=radius * curvatures.relative_noise, apart=pairs)
    return checks.with_fit(excess, z, ranks, parameters)


def _with_weights(checks: Checks, released: ReleasedWeights | None, scale: WeightScale) -> Checks:
    """Returns checks with those of survey weights, if there are any."""
    if released is None:
        return checks
    cut, noise = (math.nan, math.nan) if scale.are_alike else released.share_cut
    return dataclasses.replace(
        checks, weight_variation=released.variation, cut=cut, cut_noise=noise
    )
