"""Whitened coordinates: `theta = W^T phi`, in which each record's information is near I / d.

A whitened score then has a mean square of 1, which is the clip: there is none to choose. Everything
here is NumPy in float64, from public or released values.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import linalg

from tfp_dpvi.calibrated.checks import scales
from tfp_dpvi.calibrated.curvature import (
    NUM_DRAWS,
    CurvaturePrior,
    NoisyCurvature,
    relative_to,
    shaped,
    with_slopes,
)
from tfp_dpvi.calibrated.diagonal import mismatch, probes
from tfp_dpvi.calibrated.ranks import Ranking, ReleasedRanks
from tfp_dpvi.calibrated.weights import ReleasedWeights
from tfp_dpvi.calibrated.wider import ReleasedShift, SimulatedWider
from tfp_dpvi.calibrated.window import Window
from tfp_dpvi.training import Mechanism

# Degrees of freedom of the curvature's prior over d, with equal weights.
_DEGREES = (0.5, 2.0)
# And of those under which all but a few columns of the private inputs resemble the public ones.
_ALIKE = (8.0, 32.0)
# The same if the coordinates are from released values.
_UNTRUSTED_ALIKE = (8.0,)
# Without public inputs like the private ones, whose rank is then not known.
_UNTRUSTED = (0.25, 0.5, 0.75, 1.0, 2.0, 8.0)
# The probability from which private inputs are said to be unlike the public ones.
_SURELY_UNLIKE = 0.9
# And that from which, in other coordinates, a column is said to be nearly a combination of others.
_LIKELY = 0.5
# A usual direction's information over its noise at which that of others may be hidden: with more,
# the releases that form coordinates show a quarter of it, and with less public inputs say it all.
_NOISY = (4.0, 12.0)
# And the most of it that a hidden direction has.
_MOST_HIDDEN = 0.25
# Standard deviations of the noise by which draws of a direction contradict its release.
_CONTRADICTS = 2.5
# Of the mean eigenvalue: what is less is none, as of dummies of all levels beside an intercept.
_NONE = 1e-4
# The released curvature over its noise from which public inputs no longer matter.
_KNOWN = 10.0
_LOG_FACTOR_SD = 0.5
_KAPPA_SD = 0.4
# With weights, whose curvature is hardly cut.
_WEIGHTED_SD = 0.02
# Of sums in float32: a correlation nearer to 1 is not seen, and may come out larger.
_ROUNDING = 1e-6
# Relative to the mean of the diagonal.
_RIDGE = 1e-3
# Prior standard deviation of the logarithm of a parameter's scale, at public inputs over private.
_SCALE_SD = 0.75
# Of the matrix, what the most extreme public inputs have in the trial without them.
_TAIL = 0.3
# Of a prior's draws from its median, in standard deviations of a normal with its quartiles.
_FARTHEST = 8.0


def whitening_of(information: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Returns W with `W information W^T = I / d`, from a Cholesky factor.

    A shift or a scale of inputs or outcomes changes the parameters by a triangular matrix, if
    intercepts come first, and then leaves `W g` as it is.

    Args:
      information: Symmetric and positive definite, shape [d, d].
      order: The coordinates in the order of the factor, shape [d].
    """
    scale = 1.0 / np.sqrt(np.diag(information))
    relative = (scale[:, None] * information * scale)[np.ix_(order, order)]
    values, vectors = linalg.eigh(relative)
    if values[0] < _ROUNDING:
        relative = (vectors * np.maximum(values, _ROUNDING)) @ vectors.T
    lower = linalg.cholesky(relative, lower=True)
    whitening = np.zeros_like(information)
    whitening[:, order] = linalg.solve_triangular(lower, np.eye(len(order)), lower=True)
    return whitening * scale / np.sqrt(len(order))


def symmetric(matrix: np.ndarray) -> np.ndarray:
    """Returns the symmetric part of a matrix."""
    half: np.ndarray = (matrix + matrix.T) / 2.0
    return half


@dataclasses.dataclass(frozen=True)
class NormalPrior:
    """A normal distribution of the coordinates that a likelihood reads.

    For a prior that is not normal it has the moments of its draws, and guides steps only.

    Attributes:
      mean: Shape [d].
      precision: Shape [d, d].
    """

    mean: np.ndarray
    precision: np.ndarray

    @classmethod
    def of_draws(cls, draws: np.ndarray) -> NormalPrior:
        """Returns the normal distribution with the moments of draws of shape [n, d]."""
        scale = draws.std(axis=0)
        correlation = np.corrcoef(draws.T).reshape(len(scale), len(scale))
        precision = linalg.inv(correlation + 1e-12 * np.eye(len(scale))) / np.outer(scale, scale)
        return cls(draws.mean(axis=0), symmetric(precision))

    def whitened(self, whitening: np.ndarray) -> np.ndarray:
        """Returns the precision of phi, shape [d, d]."""
        return symmetric(whitening @ self.precision @ whitening.T)


def without_far_draws(draws: np.ndarray, names: Sequence[str]) -> np.ndarray:
    """Returns a prior's draws with those of heavy tails moved in, so that their moments exist.

    Draws of a normal distribution stay as they are.

    Args:
      draws: Shape [n, D].
      names: The coordinates' names.

    Raises:
      ValueError: Half of the draws of a coordinate are alike or not finite.
    """
    half = _FARTHEST * scales(draws)
    centre = np.median(draws, axis=0)
    is_spread = np.isfinite(half + centre) & (half > 0.0)
    if not is_spread.all():
        raise ValueError(
            f"prior: most draws of {names[int(np.argmin(is_spread))]} are alike or not finite on "
            "the real line (those of Gamma(0.001, 0.001) are zero): use a prior such as LogNormal."
        )
    moved: np.ndarray = np.clip(draws, centre - half, centre + half)
    return moved


@dataclasses.dataclass(frozen=True)
class SimulatedMoments:
    """Means over records at public inputs, whose outcomes follow the model at some parameters.

    All are of whitened scores but `information`.

    Attributes:
      information: The Fisher information of the coordinates, shape [d, d].
      length: Its trace in whitened coordinates.
      matrix: The mean of what `CentredCurvature` sums, shape [d, d].
      slope: The slope of the expected psi, symmetric, shape [d, d].
      covariance: The expected `psi psi^T`, shape [d, d].
      scale: The mean of what `CentredScale` sums.
      expected: The expected `|psi|^2`.
      excess_slope: The derivative of the expected `|psi|^2` in whitened coordinates, shape [d].
      excess_variance: The variance of `|psi|^2` over outcomes.
      ranks_slope: The derivative of the expected `centred_ranks` in whitened coordinates, shape
        [m, d] for their m numbers; [0, d] without twins.
      num: The number of records.
      squares: For many coefficients what `CentredDiagonal` sums, shape [d + P]; else empty.
      squares_variance: Its variance over records.
      wider: Those of scores under the wider clip.
      spread: See `RecordWeights`.
      lengths: Norms of scores before clip and weights, shape [n]; empty without weights.
      row_slopes: The part of each record in the diagonal of `slope`, shape [n, d].
      row_squares: The same of `matrix`, without weights.
    """

    information: np.ndarray
    length: float
    matrix: np.ndarray
    slope: np.ndarray
    covariance: np.ndarray
    scale: float
    expected: float
    excess_slope: np.ndarray
    excess_variance: float
    ranks_slope: np.ndarray
    num: float
    squares: np.ndarray
    squares_variance: np.ndarray
    wider: SimulatedWider
    spread: float = 1.0
    lengths: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0))
    row_slopes: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros([0, 0]))
    row_squares: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros([0, 0]))

    def tails(self) -> np.ndarray:
        """Returns how many times the slope falls, over the matrix, without a few of the records.

        The matrix is released, and the slope is not: it is taken as many times as large as at
        public inputs. Where a few of these have most of the slope, as exponentials of wide columns
        have, that says nothing of private inputs without such records. Those are left out whose
        slope is the most for what they have of the matrix, of which they have a share in all.

        Returns:
          About 1 or more for each whitened coordinate, shape [d].
        """
        falls = np.ones(self.row_slopes.shape[1])
        for number, (slopes, squares) in enumerate(
            zip(self.row_slopes.T, self.row_squares.T, strict=True)
        ):
            some = np.flatnonzero(squares > 0.0)
            order = some[np.argsort(-slopes[some] / squares[some])]
            total = np.cumsum(squares[order])
            kept = order[total > _TAIL * total[-1]] if len(order) else order
            rest = np.sum(slopes[kept]) / max(np.sum(squares[kept]), 1e-300)
            if rest > 0.0:
                falls[number] = np.sum(slopes) / np.sum(squares) / rest
        return falls


@dataclasses.dataclass(frozen=True)
class ReleasedSums:
    """Mean released values of some steps in the same coordinates, as sums over all N records.

    Attributes:
      num_steps: The number n of steps.
      theta: The mean of the parameters, shape [d].
      score: The mean sum of psi, shape [d].
      matrix: The mean sum of `CentredCurvature`, symmetric, shape [d, d]; or for many coefficients
        that of `CentredDiagonal`, shape [d + P].
      scale: The mean sum of `CentredScale`.
      excess: The mean sum of `LackOfFit`.
      ranks: The mean sum of `OutcomeRanks`, empty without twins.
      wider: The mean sum of `WiderClip`, shape [d]; empty without it.
      score_sd: The noise's standard deviation on a coordinate of `score`.
      matrix_sd: The same on the diagonal of `matrix`.
      scale_sd: The same on `scale`.
      excess_sd: The same on `excess`.
      ranks_sd: The same on `ranks`.
      wider_sd: The same on a coordinate of `wider`.
      sampling_rate: The expected batch size over N.
      variance: The mean sum of `ScoreVariance`, of the shape of `matrix`; empty without weights.
      variance_sd: As `matrix_sd`.
      weights: What was released of weights; None without them.
    """

    num_steps: int
    theta: np.ndarray
    score: np.ndarray
    matrix: np.ndarray
    scale: float
    excess: float
    ranks: np.ndarray
    wider: np.ndarray
    score_sd: float
    matrix_sd: float
    scale_sd: float
    excess_sd: float
    ranks_sd: float
    wider_sd: float
    sampling_rate: float
    variance: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0))
    variance_sd: float = math.nan
    weights: ReleasedWeights | None = None

    @classmethod
    def of_blocks(
        cls,
        accumulated: dict[str, Any],
        mechanism: Mechanism,
        used: np.ndarray,
        spread: float = 1.0,
    ) -> ReleasedSums:
        """Returns the means over some blocks of steps.

        Args:
          accumulated: The accumulators of the releases, by name.
          mechanism: The mechanism that released them.
          used: The numbers of the blocks.
          spread: See `RecordWeights`.
        """
        blocks = accumulated["curvature"]
        count = blocks["steps"][used].sum()
        num = mechanism.num_records
        rate = mechanism.expected_batch_size / num

        def mean_of(sums: np.ndarray) -> np.ndarray:
            return sums[used].sum(axis=0) / count

        def sum_of(name: str) -> np.ndarray:
            return num * mean_of(accumulated[name]) if name in accumulated else np.zeros(0)

        names = ["gradient", *(release.name for release in mechanism.joint)]
        deviations = zip(names, mechanism.deviations, strict=True)
        sds = {name: float(sd / (rate * np.sqrt(count))) for name, sd in deviations}
        matrix, variance = spread * num * mean_of(blocks["matrix"]), sum_of("variance")
        return cls(
            num_steps=int(count),
            theta=mean_of(blocks["theta"]),
            score=num * mean_of(blocks["gradient"]),
            matrix=matrix if matrix.ndim == 1 else symmetric(matrix),
            scale=float(spread * num * mean_of(accumulated["scale"])),
            excess=float(num * mean_of(accumulated["lack_of_fit"])),
            ranks=sum_of("ranks"),
            wider=sum_of("wider"),
            score_sd=sds["gradient"],
            matrix_sd=spread * sds["curvature"],
            scale_sd=spread * sds["scale"],
            excess_sd=sds["lack_of_fit"],
            ranks_sd=sds.get("ranks", math.nan),
            wider_sd=sds.get("wider", math.nan),
            sampling_rate=rate,
            variance=variance if variance.ndim == 1 else symmetric(variance),
            variance_sd=sds.get("variance", math.nan),
            weights=ReleasedWeights.of_blocks(accumulated, mechanism, used),
        )

    @property
    def subsampling(self) -> float:
        """By how much the variance of a record's mean term is larger than if it were in each step.

        Of terms of mean zero that hardly change from step to step.
        """
        return 1.0 + (1.0 / self.sampling_rate - 1.0) / self.num_steps

    def as_ranks(
        self, slope: np.ndarray, num_records: int, ranking: Ranking
    ) -> ReleasedRanks | None:
        """Returns the released ranks, or None without them.

        Args:
          slope: See `SimulatedMoments.ranks_slope`.
          num_records: The number N of records.
          ranking: The bins.
        """
        if not len(self.ranks):
            return None
        return ReleasedRanks(
            ranking,
            self.ranks,
            self.ranks_sd,
            num_records,
            slope,
            subsampling=self.subsampling,
            num_twins=self.sampling_rate * self.num_steps,
        )

    def as_shift(self, simulated: SimulatedMoments) -> ReleasedShift | None:
        """Returns the difference of released scores under both clips, or None without the wide one.

        Args:
          simulated: Means at public inputs.
        """
        if not len(self.wider):
            return None
        wider = simulated.wider
        ratio = wider.slope / float(np.trace(simulated.slope))
        variance = wider.square - 2.0 * ratio * wider.product + ratio**2 * simulated.expected
        return ReleasedShift(
            away=self.wider - ratio * self.score,
            ratio=ratio,
            noise=math.hypot(self.wider_sd, ratio * self.score_sd),
            sampling=self.subsampling * max(variance, 0.0) / float(np.trace(simulated.matrix)),
        )


@dataclasses.dataclass(frozen=True)
class ReleasedExcess:
    """The released sum of `LackOfFit`, and what it is expected to be.

    Attributes:
      total: The mean sum over all N records.
      variance: Its variance for a likelihood that fits, but for the error of theta.
      slope: The derivative of its expectation in whitened coordinates, shape [d].
      expected: The sum of `|psi|^2` that the model expects.
    """

    total: float
    variance: float
    slope: np.ndarray
    expected: float

    def score(self, away: np.ndarray, covariance: np.ndarray) -> tuple[float, float]:
        """Returns the excess over what is expected, relative to `expected`, and its z score.

        Args:
          away: The posterior's mean less the mean of the steps, in whitened coordinates, shape [d].
          covariance: The posterior's covariance, shape [d, d].
        """
        excess = self.total - float(self.slope @ away)
        variance = self.variance + float(self.slope @ covariance @ self.slope)
        return excess / self.expected, excess / max(float(np.sqrt(variance)), 1e-12)


@dataclasses.dataclass(frozen=True)
class Curvatures:
    """Draws of the curvature given its release, in whitened coordinates.

    Attributes:
      window: The released sums.
      slopes: Draws of A, shape [K, d, d].
      matrices: Draws of the capped matrix, shape [K, d, d].
      variances: Draws of what times `window.simulation` is the covariance of the mean score: with
        weights those of the sum of `psi psi^T`, and else of its shape, with the traces of
        `matrices`.
      lack_of_fit: See `LackOfFit`.
      shrink: The slope over the information, as simulated: at most 1, since scores are clipped.
      ranks: Those of outcomes among twins; None without twins.
      shift: What scores under a wider clip say; None without it.
      mismatch: See `diagonal.mismatch`. Where the whole matrix was released, the probability of
        `NoisyCurvature.combined`; or that private inputs are unlike the public ones, if it is
        larger and above 0.9. In coordinates of released values, which do not rest on the public
        inputs, the former if it is above 0.5, and else 0.
      weights: What was released of weights; None without them.
      seen: The released trace of the capped matrix over that of public inputs in coordinates of
        their own, which is about 1 where records count as the model says, and the standard
        deviation of its noise; NaN with unlike weights.
    """

    window: Window
    slopes: np.ndarray
    matrices: np.ndarray
    variances: np.ndarray
    lack_of_fit: ReleasedExcess
    ranks: ReleasedRanks | None
    shift: ReleasedShift | None
    shrink: float
    mismatch: float = math.nan
    weights: ReleasedWeights | None = None
    seen: tuple[float, float] = (math.nan, math.nan)

    @property
    def kappa(self) -> float:
        """The mean curvature's trace over that of the capped matrix."""
        traces = [np.trace(part.mean(axis=0)) for part in (self.slopes, self.matrices)]
        return float(traces[0] / traces[1])

    @property
    def relative_noise(self) -> float:
        """The noise's standard deviation on the diagonal of the matrix, over its mean."""
        level = np.trace(self.matrices.mean(axis=0)) / len(self.window.score)
        return float(self.window.matrix_sd / level)


class SeenCurvature:
    """The curvature as a release and a simulation show it, before it is drawn.

    Args:
      released: The released sums.
      simulated: Means at public inputs and the same parameters and coordinates.
      whitening: W, shape [d, d].
      num_records: The number N of records.
      clip: The clip C.
      num_twins: K, or 0 if outcomes were enumerated.
      ranking: The bins in which outcomes were counted.
      trusted: Whether the simulation's matrix is the centre of the prior; if not, the coordinates
        are from released values and the centre is isotropic.
      halves: Differences of the halves' scores and of their mean phi, see `Window`.
      half_variance: See `Window`.
      generator: The source of random numbers.
      intercept: The whitened coordinate of the first intercept.
      weighted: Whether records have unlike weights, so that the variance of scores is not what
        their slope says.
      balanced: Means at public inputs that are weighted like the private ones, or None.
      centre_noise: Of the released matrices by which the simulation's inputs were weighted, or the
        coordinates formed, the noise's standard deviation on the diagonal, over the diagonal's
        mean; 0 if there were none.
      own_trace: That of the capped matrix for one public record in coordinates of its own; None for
        that of `simulated`.

    Attributes:
      trusted: As the argument.
      window: The released sums.
      lack_of_fit: See `ReleasedExcess`.
      relative_noise: The noise's standard deviation on the diagonal of the released matrix, over
        the mean of the diagonal at public inputs.
      stretch: By how much, beyond two standard deviations, the logarithm of a coordinate's scale is
        another one than at public inputs; 0 in coordinates of released values.
    """

    def __init__(
        self,
        released: ReleasedSums,
        simulated: SimulatedMoments,
        whitening: np.ndarray,
        *,
        num_records: int,
        clip: float,
        num_twins: int,
        ranking: Ranking,
        trusted: bool,
        halves: tuple[np.ndarray, np.ndarray],
        half_variance: float,
        generator: np.random.Generator,
        intercept: int = 0,
        weighted: bool = False,
        balanced: SimulatedMoments | None = None,
        centre_noise: float = 0.0,
        own_trace: float | None = None,
    ) -> None:
        self._generator = generator
        self._num_records, self._ranking = num_records, ranking
        self.trusted, self._weighted = trusted, weighted
        size = len(released.theta)
        eye = np.eye(size)
        self._source = source = simulated if balanced is None else balanced
        kappa = source.scale / np.trace(source.matrix)
        level = num_records * np.trace(simulated.matrix) / size
        matrix = num_records * simulated.matrix + _RIDGE * level * eye
        self.relative_noise = float(released.matrix_sd / level)
        self._is_dense = released.matrix.ndim == 2
        self._seen = _seen(released, simulated, num_records, own_trace)
        self.stretch = 0.0
        if not self._is_dense:
            scales = _draw_scales(released, simulated, num_records, generator)
            mean_scales = np.exp(np.log(scales).mean(axis=0))
            self._ratios = scales / mean_scales
            self._far = _wrong_correlations(released, simulated, num_records, mean_scales)
        elif trusted:
            diagonals = np.diag(released.matrix), np.diag(matrix)
            logs, sds = _log_scales(*diagonals, released.matrix_sd)
            mean_scales = np.exp(logs)
            sds = np.hypot(sds, math.sqrt(0.5 / simulated.num))
            self.stretch = float(np.max(np.abs(logs) - 2.0 * sds))
        else:
            # The coordinates are not those of public inputs, whose directions say nothing here.
            mean_scales = np.ones(size)
            matrix = level * eye
        matrix = matrix * np.outer(mean_scales, mean_scales)
        root = linalg.cholesky(matrix, lower=True)
        if not self._is_dense:
            released = dataclasses.replace(released, matrix=matrix)
        self._released = released
        variance, self.lack_of_fit = _score_variance(released, source, matrix, num_records, trusted)
        share = 1.0 if num_twins == 0 else num_twins / (num_twins + 1.0)
        self.window = _window_of(
            released,
            whitening,
            # Of the released variance itself, if there is one.
            variance=1.0 if weighted else variance,
            share=share,
            halves=(halves, half_variance),
            most_trace=simulated.spread * num_records * clip**2,
        )
        alike: tuple[float, ...] = _ALIKE if trusted else _UNTRUSTED_ALIKE
        if centre_noise:
            # A Wishart matrix with so many degrees of freedom differs from its mean by that noise.
            most = 2.0 * centre_noise**-2 / size
            alike = tuple(min(share, most) for share in alike)
        self._prior = CurvaturePrior(
            matrix=matrix,
            degrees=_degrees(size, _DEGREES if trusted else _UNTRUSTED),
            log_factor_sd=_LOG_FACTOR_SD,
            kappa=(kappa, _WEIGHTED_SD + kappa - 1.0 if weighted else _KAPPA_SD * kappa),
            curvature=root @ _relative_to_matrix(source, source.slope) @ root.T,
            alike=_degrees(size, alike),
            intercept=intercept,
        )
        self._covariance = root @ _relative_to_matrix(source, source.covariance) @ root.T
        self._noisy = NoisyCurvature(self.window, self._prior)

    @functools.cached_property
    def resembles(self) -> float:
        """The probability that all but a few columns are as the prior of the curvature has them."""
        if not self._is_dense:
            return 1.0
        return float(np.sum(self._noisy.evidence[len(self._prior.degrees) :]))

    @property
    def weak(self) -> float:
        """See `NoisyCurvature.weak`."""
        return self._noisy.weak if self._is_dense else 0.0

    def draw(self, flatten: float = 0.0) -> Curvatures:
        """Returns draws of the curvature given its noisy release.

        Args:
          flatten: The share of equal weights in those of the prior's degrees.
        """
        released, source = self._released, self._source
        window, prior = self.window, self._prior
        generator = self._generator
        if self._is_dense:
            weights = self._noisy.evidence
            flat = (1.0 - flatten) * weights + flatten / len(weights)
            matrices = self._noisy.matrices(flat, generator)
            # In coordinates of released values there is nothing that public inputs contradict, and
            # draws hold what is guessed of a column.
            far = _if_above(0.0 if self.trusted else _LIKELY, self._noisy.combined)
            if self.trusted and window.curvature_signal < _KNOWN:
                far = max(far, _if_above(_SURELY_UNLIKE, 1.0 - self.resembles))
            mean = matrices.mean(axis=0)
            if _is_hidden(mean, window.matrix, window.matrix_sd, source.matrix):
                far = 1.0
        else:
            matrices = prior.matrix * self._ratios[:, :, None] * self._ratios[:, None, :]
            far = self._far
        slopes = with_slopes(window, prior, matrices, generator)
        if not self._weighted:
            # The clip cuts long scores, and their squares more than their slopes.
            variances = shaped(matrices, prior.matrix, self._covariance)
        else:
            variances = _draw_variances(
                released,
                self._num_records * source.covariance,
                window,
                prior,
                generator,
                trusted=self.trusted,
            )
        return Curvatures(
            window=window,
            slopes=slopes,
            matrices=matrices,
            variances=variances,
            lack_of_fit=self.lack_of_fit,
            ranks=released.as_ranks(source.ranks_slope, self._num_records, self._ranking),
            shift=released.as_shift(source),
            shrink=float(np.clip(np.trace(source.slope) / source.length, 0.02, 1.0)),
            mismatch=far,
            weights=released.weights,
            seen=(math.nan, math.nan) if self._weighted else self._seen,
        )


def _seen(
    released: ReleasedSums,
    simulated: SimulatedMoments,
    num_records: int,
    own_trace: float | None,
) -> tuple[float, float]:
    """Returns `Curvatures.seen`."""
    size, matrix = len(released.theta), released.matrix
    squares, expected = (
        (np.diag(matrix), np.diag(simulated.matrix))
        if matrix.ndim == 2
        else (matrix[:size], simulated.squares[:size])
    )
    total = num_records * (expected.sum() if own_trace is None else own_trace)
    if total <= 0.0:
        return math.nan, math.nan
    return float(squares.sum()) / total, released.matrix_sd * math.sqrt(size) / total


def least_eigenvalue(matrix: np.ndarray) -> float:
    """Returns the least eigenvalue of a matrix at public inputs that is not zero by design.

    Args:
      matrix: Symmetric, shape [d, d].
    """
    values = np.linalg.eigvalsh(matrix)
    return float(np.min(values, where=values > _NONE * values.mean(), initial=values[-1]))


def _is_hidden(
    matrix: np.ndarray, released: np.ndarray, noise: float, simulated: np.ndarray
) -> bool:
    """Returns whether noise hides how little information a direction has, and only a prior says it.

    Or the release contradicts what draws say: such a prior was surer than it might be.

    Args:
      matrix: The mean of the curvature's draws, shape [d, d].
      released: Its noisy release, shape [d, d].
      noise: The noise's standard deviation on the diagonal of `released`.
      simulated: The matrix at public inputs, up to a factor, shape [d, d].
    """
    values, vectors = np.linalg.eigh(matrix)
    least, most = _NOISY
    is_noisy = least * noise < values.mean() < most * noise
    is_small = values[0] < _MOST_HIDDEN * values.mean()
    direction = vectors[:, 0]
    by_design = direction @ simulated @ direction < _NONE * np.trace(simulated) / len(simulated)
    seen = direction @ released @ direction
    is_guess = is_noisy and seen < noise
    # Small noise alone contradicts by little, which matters to no interval.
    is_contradicted = seen < min(values[0] - _CONTRADICTS * noise, 0.5 * values[0])
    return bool(is_small and not by_design and (is_guess or is_contradicted))


def _relative_to_matrix(simulated: SimulatedMoments, other: np.ndarray) -> np.ndarray:
    """Returns another moment in coordinates in which the capped matrix is the identity."""
    size = len(simulated.matrix)
    ridge = _RIDGE * np.trace(simulated.matrix) / size * np.eye(size)
    return symmetric(relative_to(simulated.matrix + ridge, other + ridge))


def _window_of(
    released: ReleasedSums,
    whitening: np.ndarray,
    *,
    variance: float,
    share: float,
    halves: tuple[tuple[np.ndarray, np.ndarray], float],
    most_trace: float,
) -> Window:
    """Returns the window of released sums.

    Args:
      released: The released sums.
      whitening: W, shape [d, d].
      variance: The variance of psi over the matrix.
      share: The share of it that all steps have in common.
      halves: See `Window.half_difference` and `Window.half_variance`.
      most_trace: See `Window`.
    """
    size = len(released.theta)
    sampling = (1.0 / released.sampling_rate - share) / released.num_steps
    return Window(
        num_steps=released.num_steps,
        theta=np.linalg.solve(whitening.T, released.theta),
        path=np.zeros((1, size)),
        jitter=np.zeros((1, size)),
        score=released.score,
        matrix=released.matrix,
        scale=released.scale,
        score_sd=released.score_sd,
        matrix_sd=released.matrix_sd,
        scale_sd=released.scale_sd,
        simulation=variance * (share + sampling),
        sampling=variance * sampling,
        half_difference=halves[0],
        half_variance=halves[1],
        most_trace=most_trace,
    )


def _draw_variances(
    released: ReleasedSums,
    expected: np.ndarray,
    window: Window,
    prior: CurvaturePrior,
    generator: np.random.Generator,
    *,
    trusted: bool,
) -> np.ndarray:
    """Returns draws of the sum of `psi psi^T` given its release, shape [K, d, d].

    Its prior has the shape of those at public inputs.

    Args:
      released: The released sums.
      expected: The same of as many public inputs, shape [d, d].
      window: The window of the capped matrix.
      prior: The prior of the capped matrix.
      generator: The source of random numbers.
      trusted: As in `SeenCurvature`.
    """
    size = len(released.theta)
    level = np.trace(expected) / size
    matrix = expected + _RIDGE * level * np.eye(size)
    noise = released.variance_sd
    if released.variance.ndim == 1:
        logs, sds = _log_scales(released.variance[:size], np.diag(matrix), noise)
        ratios = np.exp(logs + sds * generator.normal(size=(NUM_DRAWS, size)))
        draws: np.ndarray = matrix * ratios[:, :, None] * ratios[:, None, :]
        return draws
    if trusted:
        scales = np.exp(_log_scales(np.diag(released.variance), np.diag(matrix), noise)[0])
        matrix = matrix * np.outer(scales, scales)
    else:
        matrix = level * np.eye(size)
    window = dataclasses.replace(window, matrix=released.variance, matrix_sd=noise)
    prior = dataclasses.replace(prior, matrix=matrix, curvature=None)
    noisy = NoisyCurvature(window, prior)
    return noisy.matrices(noisy.evidence, generator)


def _if_above(least: float, probability: float) -> float:
    """Returns a probability if it is large enough to be said, and else 0."""
    return probability if probability > least else 0.0


def _score_variance(
    released: ReleasedSums,
    simulated: SimulatedMoments,
    matrix: np.ndarray,
    num_records: int,
    trusted: bool,
) -> tuple[float, ReleasedExcess]:
    """Returns the variance of psi over the matrix, and the released excess beside what is expected.

    Outcomes may vary more than the model says. So the variance is that of the simulation, and more
    by the released excess as far as the noise lets it be seen.

    In coordinates of released values public inputs are unlike the private ones, and do not say what
    the clip leaves: at parameters that make outcomes rare there, and not here, little. Scores are
    then taken to vary as without a clip, so that no interval is narrower than the released
    information allows.
    """
    expected = num_records * simulated.expected / np.trace(num_records * simulated.matrix)
    if not trusted:
        expected = max(expected, 1.0)
    total = max(np.trace(released.matrix), 0.1 * np.trace(matrix))
    excess, excess_sd = released.excess / total, released.excess_sd / total
    trust = 1.0 / (1.0 + (excess_sd / (0.3 * expected)) ** 2)
    fit = ReleasedExcess(
        total=released.excess,
        variance=released.excess_sd**2
        + released.subsampling * num_records * simulated.excess_variance,
        slope=num_records * simulated.excess_slope,
        expected=expected * total,
    )
    return expected + max(0.0, excess) * trust, fit


def _degrees(size: int, shares: tuple[float, ...]) -> tuple[float, ...]:
    """Returns degrees of freedom from shares of d."""
    degrees = {max(1.0, float(round(size * share))) for share in shares}
    # Intercepts and dummies of all levels are collinear once.
    return tuple(sorted(degrees | ({max(1.0, size - 1.0)} if shares is _UNTRUSTED else set())))


def _log_scales(
    observed: np.ndarray, expected: np.ndarray, noise: float
) -> tuple[np.ndarray, np.ndarray]:
    """Returns logarithms of the scales of whitened coordinates, by released squares, and their sds.

    Public inputs may have other frequencies or scales than private ones. Factors on the parameters
    themselves would change with a shift of inputs.

    Args:
      observed: Released sums of squares, shape [d].
      expected: Those of public inputs, shape [d].
      noise: The noise's standard deviation on `observed`.
    """
    if noise == 0.0:
        exact = np.log(np.maximum(observed / expected, 1e-3)) / 2.0
        return exact, np.zeros(len(exact))
    grid = np.linspace(-3.0, 3.0, 241)[:, None]
    fit = -((observed - np.exp(2.0 * grid) * expected) ** 2) / (2.0 * noise**2)
    density = fit - grid**2 / (2.0 * _SCALE_SD**2)
    weights = np.exp(density - density.max(axis=0))
    weights /= weights.sum(axis=0)
    logs = np.sum(weights * grid, axis=0)
    return logs, np.sqrt(np.sum(weights * (grid - logs) ** 2, axis=0))


def _draw_scales(
    released: ReleasedSums,
    simulated: SimulatedMoments,
    num_records: int,
    generator: np.random.Generator,
) -> np.ndarray:
    """Returns draws of the scales of whitened coordinates given `CentredDiagonal`, [K, d]."""
    size = len(released.theta)
    expected = num_records * simulated.squares[:size]
    expected = expected + _RIDGE * expected.mean()
    logs, sds = _log_scales(released.matrix[:size], expected, released.matrix_sd)
    draws: np.ndarray = np.exp(logs + sds * generator.normal(size=(NUM_DRAWS, size)))
    return draws


def _wrong_correlations(
    released: ReleasedSums, simulated: SimulatedMoments, num_records: int, scales: np.ndarray
) -> float:
    """Returns `diagonal.mismatch` of the released squares along probes."""
    size = len(scales)
    directions = probes(size)
    before, after = (
        np.einsum("pi,ij,pj->p", part, simulated.matrix, part)
        for part in (directions, directions * scales)
    )
    expected = num_records * simulated.squares[size:] * after / before
    sampling = simulated.squares_variance[size:] * (1.0 / simulated.num + 1.0 / num_records)
    variances = released.matrix_sd**2 + num_records**2 * sampling
    return mismatch(released.matrix[size:], expected, variances, size)


def log_mean(matrices: np.ndarray, floor: float) -> np.ndarray:
    """Returns the exponential of the mean logarithm of matrices, with floored eigenvalues.

    The mean itself calls noise information in directions that have none, and the logarithm without
    a floor the reverse.

    Args:
      matrices: Symmetric, shape [K, d, d].
      floor: The least eigenvalue, positive.
    """
    values, vectors = np.linalg.eigh((matrices + np.swapaxes(matrices, 1, 2)) / 2.0)
    logs = (vectors * np.log(np.maximum(values, floor))[:, None]) @ np.swapaxes(vectors, 1, 2)
    values, vectors = np.linalg.eigh(logs.mean(axis=0))
    return symmetric((vectors * np.exp(values)) @ vectors.T)
