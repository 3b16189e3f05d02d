"""Scoring steps: a fit in whitened coordinates, whose steps need no learning rate.

In the first steps W follows the information at public inputs and the present parameters. Then the
releases of a few steps say whether the private inputs resemble the public ones; if they do not,
better coordinates are formed from these releases, again if parameters are still far. The last
steps, the window, keep their coordinates, and the posterior is computed from what they released.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from tfp_dpvi._tf import Structure, tf
from tfp_dpvi.calibrated.balance import InputWeights
from tfp_dpvi.calibrated.clip import NUM_BLOCKS, have_steps, last_block
from tfp_dpvi.calibrated.mixture import LinearLikelihood, exact_mixture
from tfp_dpvi.calibrated.moved import MovedScores
from tfp_dpvi.calibrated.pairing import Pairing
from tfp_dpvi.calibrated.progress import Caution, Progress, Search
from tfp_dpvi.calibrated.scored import ScoredLikelihood
from tfp_dpvi.calibrated.start import SCALE, middle_of, ranks_of
from tfp_dpvi.calibrated.steps import ScoringStep
from tfp_dpvi.calibrated.weights import (
    ReleasedWeights,
    WeightScale,
)
from tfp_dpvi.calibrated.whitening import (
    Curvatures,
    NormalPrior,
    ReleasedSums,
    SeenCurvature,
    SimulatedMoments,
    least_eigenvalue,
    log_mean,
    symmetric,
    whitening_of,
    without_far_draws,
)
from tfp_dpvi.gradients import ClippedGradient, StepSpec
from tfp_dpvi.training import Mechanism

LOG = logging.getLogger("tfp_dpvi")

# Blocks of steps in public coordinates, and the block with which the window begins.
_PUBLIC = 3
_BURN_IN = 5
# A fit that is still on its way begins the window so many blocks later, up to the last of these.
_LONGER = 2
_LATEST = 11
# On its way: the posterior of the last releases is so many standard deviations from where they are.
_STILL_FAR = 2.0
# How often the coordinates follow the parameters.
_NUM_REFRESHES = 24
_NUM_GAINS = 8
# A step makes this share of a Newton step in the window, before it 1 / (1 + 3.5 t), t from 0 to 1.
# With wrong public inputs a full Newton step is several times too long, and would go to and fro.
_LAST_GAIN = 0.04
_SLOWER = 3.5
# Between two looks at what was released, the logarithm of a scale grows by at most this: if it is
# far too small, or others are far off, its score has no bounds.
_MOST_GROWTH = 1.0
# Where information vanishes, steps wander over at most this share of the prior's width.
_WANDER = 0.3
# And at most over this distance, in whitened units: farther away scores are not linear.
_FARTHEST = 0.5
# Of the noise's spectral radius, the least eigenvalue of the curvature that forms coordinates.
_FLOOR = 0.1
# The share of equal weights in the evidence for how unlike the public inputs the private ones are.
_FLATTENED = 0.5
# The least information of a direction over the noise of its release.
_LEAST_OVER_NOISE = 12.0
# The probability that public inputs resemble the private ones, from which coordinates are kept.
_LEAST_RESEMBLANCE = 0.5
# The largest probability that a column is better seen in other ones.
_MOST_WEAK = 0.15
# And the largest logarithm of a coordinate's scale over that at public inputs.
_MOST_STRETCH = 0.25
# The released curvature over its noise (1 for noise alone), from which coordinates can be formed.
_LEAST_SIGNAL = 1.5
# The least information of a direction, over that in new coordinates, that noise has not hidden.
_MUCH_LESS = 0.3
# The least eigenvalue of the matrix at weighted inputs, over the noise of the release that weighted
# them, from which it is no remainder of that noise.
_LEAST_SEEN = 3.0
# Of what is expected, an excess of clipped scores' squares that says that parameters are far off.
_FAR = 0.5
# Newton steps at once, of a search that passes parameters where information differs.
_FAR_STEPS = 2.0
_NUM_PRIOR_DRAWS = 4096
# Outcomes of all public inputs, of which the third order is computed.
_NUM_OUTCOMES = 8192


class FitCoordinates(NamedTuple):
    """The coordinates of some steps.

    Attributes:
      whitening: W, shape [d, d].
      trusted: Whether they are those of public inputs, which the private ones resemble.
      noise: Of the released matrices by which they were found, the noise's standard deviation on
        the diagonal, over its mean: 0 if there were none.
    """

    whitening: np.ndarray
    trusted: bool
    noise: float = 0.0


class _Unlike(NamedTuple):
    """Private information that differs from that at public inputs.

    Attributes:
      information: Its estimate per record, in coordinates of public inputs, shape [d, d].
      whitening: From these to the coordinates of the next steps, shape [d, d].
      noise: See `FitCoordinates`.
    """

    information: np.ndarray
    whitening: np.ndarray
    noise: float


class _Look(NamedTuple):
    """The curvature as releases show it, and whether private inputs resemble the public ones.

    Attributes:
      seen: The curvature as they show it.
      is_alike: Whether private inputs resemble the public ones, perhaps weighted.
      weights: The weights of the public inputs that make them alike; None for the present ones.
      shows_all: Whether their least eigenvalue is more than what noise leaves of a smaller one.
    """

    seen: SeenCurvature
    is_alike: bool
    weights: InputWeights | None = None
    shows_all: bool = True


class Slope(NamedTuple):
    """The slope that a Newton step inverts, in whitened coordinates and per record.

    Attributes:
      per_record: The slope of the expected psi, and the prior's part, shape [d, d].
      shrink: The slope over the information: at most 1, since scores are clipped.
    """

    per_record: np.ndarray
    shrink: float


@dataclasses.dataclass
class _Comparison:
    """The comparison of private inputs with the public ones, as released curvature shows it.

    Attributes:
      unlike: How the private information differs from that at public inputs; None if it does not.
      num_seen: How many blocks of steps in public coordinates were looked at.
      least: See `_least_share`, with weighted public inputs.
      whitening: W in which the public inputs have equal information, shape [d, d].
    """

    unlike: _Unlike | None = None
    num_seen: int = 0
    least: float = 0.0
    whitening: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros((0, 0)))


@dataclasses.dataclass
class _Course:
    """The progress of a fit, as seen from released and public values.

    Attributes:
      last_finite: The last parameters with information, shape [d].
      search: The search of scales.
      caution: By how much steps are shorter than planned.
      inputs: How private inputs compare with the public ones.
      has_searched: Whether the present block has long steps of a search.
      released: The sums that were released up to the last call, by name.
      since: The first block of steps in the present coordinates, after the public ones.
      window: The block with which the window begins.
    """

    last_finite: np.ndarray
    search: Search
    caution: Caution = dataclasses.field(default_factory=Caution)
    inputs: _Comparison = dataclasses.field(default_factory=_Comparison)
    has_searched: bool = False
    released: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    since: int = _PUBLIC
    window: int = _BURN_IN

    @property
    def blocks(self) -> np.ndarray:
        """The blocks before the window in the present coordinates."""
        return np.arange(self.since, self.window)


class Scoring:
    """Fits by scoring steps: between two steps it prepares the next ones.

    Args:
      pairing: The model's coordinates and simulation.
      x: Public inputs like the private ones, as arrays of n rows.
      max_weight: The public largest weight of records with weights; None without weights.
      may_widen: Whether scores under a wider clip are released where records are many: not if
        several sites with other numbers of records release the same sums.

    Attributes:
      pairing: The model's coordinates and simulation.
      likelihood: The likelihood with its scores, and the public inputs.
      prior: A normal like the prior of the coordinates that the likelihood reads.
      prior_draws: Draws from the prior as coordinates, shape [n, D].
      size: The number d of parameters that the likelihood reads.
      is_input: Which coordinates are no scales, bool [d].
      intercept: The coordinate of the first intercept, or of what comes first without one.
      num_records: The public number N of records.
      theta: A variable, the parameters, shape [d].
    """

    def __init__(
        self,
        pairing: Pairing,
        x: Structure,
        max_weight: float | None = None,
        *,
        may_widen: bool = True,
    ) -> None:
        self.pairing = pairing
        self._may_widen = may_widen
        self.size = len(pairing.index)
        self.num_records = 1
        coordinates = pairing.coordinates
        self.prior_draws = coordinates.prior_draws(_NUM_PRIOR_DRAWS)
        draws = without_far_draws(self.prior_draws, coordinates.names)
        middle = middle_of(draws, pairing)
        prior = NormalPrior.of_draws(draws[:, pairing.index])
        self.prior = dataclasses.replace(prior, mean=middle[pairing.index])
        ranks = ranks_of(pairing)
        self._order = np.argsort(ranks, kind="stable")
        # In W they come first, so that their coordinates move nothing else.
        self._is_scale = np.sort(ranks) == SCALE
        self._growth = np.where(ranks == SCALE, _MOST_GROWTH, math.inf)
        # After the scales; a model of scales alone has none.
        intercept = int(self._is_scale.sum()) % self.size
        self.is_input, self.intercept = ranks != SCALE, int(self._order[intercept])
        self.likelihood = ScoredLikelihood(pairing, middle, x, max_weight, intercept)
        self._step = ScoringStep(self.likelihood, self.prior.mean)
        self.theta = self._step.theta
        self._start = self._apart() if self.likelihood.is_mixture else self.prior.mean
        self.start_anew()
        scales = 1.0 / np.sqrt(np.diag(self.prior.precision) * self.size)
        self._first_coordinates = FitCoordinates(np.diag(scales), trusted=True)
        self._coordinates = self._first_coordinates
        self._slope = Slope(np.eye(self.size), 1.0)
        self._course = self._begin(math.inf)

    def _apart(self) -> np.ndarray:
        """Returns a start at which the components of a mixture differ.

        If they are alike nothing tells them apart, and steps would stay between the modes that
        differ by the components' order. Entries of vectors on the real line start at quantiles of
        their prior.
        """
        pairing, start = self.pairing, self.prior.mean.copy()
        sds = 1.0 / np.sqrt(np.diag(self.prior.precision))
        first = 0
        for part in pairing.parameters_read:
            size = pairing.coordinates.sizes[part]
            if size > 1 and pairing.coordinates.is_real(part):
                places = (np.arange(size) + 0.5) / size
                start[first : first + size] += sds[first : first + size] * stats.norm.ppf(places)
            first += size
        return start

    def vector(self) -> tf.Tensor:
        """Returns all coordinates, shape [D]."""
        return self._step.vector()

    def gradient(self, spec: StepSpec) -> ClippedGradient:
        """Returns the centred clip, with its joint releases; pulled back it is a scoring step.

        Args:
          spec: The public size of a step; its number of records holds until the next call.
        """
        self.num_records = spec.num_records
        return self._step.gradient(spec.num_records, may_widen=self._may_widen)

    # ------------------------------------------------------------------ between steps

    def boundaries(self, num_steps: int) -> list[int]:
        """Returns the steps before which `advance` is to be called, increasing, the first 0.

        Args:
          num_steps: The number of steps that the fit plans.
        """
        public = _first_step(_PUBLIC, num_steps)
        refreshes = np.linspace(0, public, min(public, _NUM_REFRESHES) + 1)
        windows = [_first_step(block, num_steps) for block in range(_BURN_IN, _LATEST + 1, _LONGER)]
        gains = [
            np.linspace(start, end, min(end - start, _NUM_GAINS) + 1)
            for start, end in itertools.pairwise([public, *windows])
        ]
        return sorted({round(float(step)) for step in np.concatenate([refreshes, *gains])})

    def advance(
        self, step: int, num_steps: int, accumulated: dict[str, Any], mechanism: Mechanism
    ) -> None:
        """Prepares the next steps, from released and public values: post-processing.

        Args:
          step: The number of the fit's steps that ran, one of `boundaries`.
          num_steps: The number of steps that the fit plans.
          accumulated: The fit's accumulators.
          mechanism: The mechanism that releases.

        Raises:
          ValueError, np.linalg.LinAlgError: Public inputs give no coordinates at first.
        """
        try:
            self._prepare(step, num_steps, accumulated, mechanism)
        except (ValueError, np.linalg.LinAlgError) as error:
            if not step:
                raise
            # Privacy was spent: the fit goes on as it was, and the posterior says what it knows.
            LOG.warning(
                "What was released gives no coordinates: the fit keeps its own (%s).", error
            )
            self._go_back()

    def _prepare(
        self, step: int, num_steps: int, accumulated: dict[str, Structure], mechanism: Mechanism
    ) -> None:
        """See `advance`."""
        public = _first_step(_PUBLIC, num_steps)
        if step == 0:
            noise = _noise_of(mechanism) / math.sqrt(max(1.0, public / _NUM_REFRESHES))
            self._course = self._begin(noise)
            self._step.set_scale(WeightScale.at_start(len(self.likelihood.scale.shares)))
        window = _first_step(self._course.window, num_steps)
        if step > window:
            return
        if step:
            if not np.isfinite(self._theta()).all():
                self._go_back()
            self._see_progress(accumulated, mechanism, may_search=step <= public)
        course = self._course
        if step <= public:
            block = last_block(step, num_steps)
            if course.inputs.num_seen < block < _PUBLIC:
                course.inputs.num_seen = block
                # What a long search released holds at none of the parameters that it passed.
                if not course.has_searched:
                    self._see_private_inputs(accumulated, mechanism, block - 1)
                course.has_searched = False
            self._see_weights(accumulated, mechanism)
            self._follow_public_inputs()
        elif step == window:
            is_far = self._use_releases(accumulated, mechanism)
            if is_far and course.window < _LATEST:
                course.since, course.window = course.window, course.window + _LONGER
                # Earlier scores were those of other coordinates.
                course.caution = Caution(course.caution.share)
            else:
                self._widen_clip(accumulated, mechanism)
        search = course.search
        if search.is_on and step < public:
            newton = np.linalg.inv(self._slope.per_record)
            course.has_searched |= bool(np.any(search.steps > _FAR_STEPS))
            self._step.gain.assign(search.steps[:, None] * newton)
            self._step.set_limits(search.bounds(newton @ search.pull))
            return
        self._step.set_limits(most=self._theta() + self._growth)
        is_last = step == _first_step(course.window, num_steps)
        gain = min(1.0, course.caution.share / (1.0 + _SLOWER * step / window))
        self._set_gain(_LAST_GAIN if is_last else gain, mechanism)

    def hold(self, theta: np.ndarray, num_records: int) -> np.ndarray:
        """Fixes parameters and coordinates: later steps release sums there, and move nothing.

        The coordinates depend on the arguments and the public inputs alone, so that several sites
        use the same ones.

        Args:
          theta: The coordinates that the likelihood reads, shape [d].
          num_records: By so many records the prior counts in the coordinates.

        Returns:
          W, shape [d, d].
        """
        self.restart()
        self.num_records = num_records
        self.theta.assign(theta)
        # Held also without information: elsewhere sums would be taken for those of this place.
        self._course = self._begin(math.inf)
        self._follow_public_inputs()
        self._step.set_limits()
        self._step.gain.assign(np.zeros([self.size, self.size]))
        if self.likelihood.max_weight is not None:
            # Of weights the largest one alone is public; rounding too is that of no earlier fit.
            self._step.set_scale(WeightScale.at_start(len(self.likelihood.scale.shares)))
            self._weigh(ReleasedWeights.unknown())
        return self._coordinates.whitening

    def restart(self) -> None:
        """Forgets the coordinates of earlier fits, whose rounding the next one would have."""
        self._coordinates = self._first_coordinates
        self.likelihood.use_weights(None)

    def start_anew(self) -> None:
        """Returns to the start of the first fit."""
        self.theta.assign(self._start)

    def is_informed(self) -> bool:
        """Returns whether public inputs have finite, positive information where a fit starts.

        After a fit that diverged, that is the first start.
        """
        if not np.isfinite(self._theta()).all():
            self.start_anew()
        return _is_positive(
            self.likelihood.moments_at(self._theta(), self._coordinates.whitening).information
        )

    def _begin(self, noise: float) -> _Course:
        """Returns what is seen before the first step, which starts here.

        Args:
          noise: See `Search`: infinite for none.
        """
        self.likelihood.use_weights(None)
        return _Course(self._theta(), Search(self._is_scale, noise))

    def _see_weights(self, accumulated: dict[str, Any], mechanism: Mechanism) -> None:
        """Widens the clip such that it cuts hardly any weighted score, unless weights are alike.

        Args:
          accumulated: The fit's accumulators.
          mechanism: The mechanism that releases.
        """
        if self.likelihood.max_weight is None:
            return
        released = ReleasedWeights.of_blocks(accumulated, mechanism, np.arange(NUM_BLOCKS))
        if released is not None:
            self._weigh(released)

    def _weigh(self, known: ReleasedWeights) -> None:
        """Takes the clip that is wide enough for what is known of weights."""
        lengths = self.likelihood.moments_at(self._theta(), self._coordinates.whitening).lengths
        self._step.set_scale(WeightScale.of_released(known, lengths))

    def _widen_clip(self, accumulated: dict[str, Any], mechanism: Mechanism) -> None:
        """Takes a wider clip for the window if the last steps' releases say that it cut too much.

        Args:
          accumulated: The fit's accumulators.
          mechanism: The mechanism that releases.
        """
        if self.likelihood.max_weight is None:
            return
        released = ReleasedWeights.of_blocks(accumulated, mechanism, self._course.blocks)
        if released is None:
            return
        scale = self.likelihood.scale.after(released)
        # Scores that are not cut are linear in their weights.
        smaller = scale.gain / self.likelihood.scale.gain
        self._step.set_scale(scale)
        self._slope = Slope(smaller * self._slope.per_record, smaller * self._slope.shrink)
        self._step.prior_pull.assign(smaller * self._step.prior_pull)

    def _go_back(self) -> None:
        """Goes back to the last parameters with information, and on in shorter steps."""
        course = self._course
        self.theta.assign(course.last_finite)
        course.caution = Caution(course.caution.share / 4.0)
        course.search.is_on = False

    def _follow_public_inputs(self) -> None:
        """Takes coordinates from the information at public inputs and the present parameters."""
        information = self.likelihood.moments_at(
            self._theta(), self._coordinates.whitening
        ).information
        if not _is_positive(information):
            self._go_back()
            information = self.likelihood.moments_at(
                self._theta(), self._coordinates.whitening
            ).information
        theta = self._course.last_finite = self._theta()
        unlike = self._course.inputs.unlike
        whitening = whitening_of(information + self._prior_per_record(), self._order)
        self._course.inputs.whitening = whitening
        if unlike is None:
            whitening = self._less_clipped(theta, whitening)
            self._use(FitCoordinates(whitening, trusted=True))
            moments = self.likelihood.moments_at(theta, whitening)
            information = symmetric(whitening @ moments.information @ whitening.T)
        else:
            self._use(
                FitCoordinates(unlike.whitening @ whitening, trusted=False, noise=unlike.noise)
            )
            moments = self._moments_alike(theta)
            information = symmetric(unlike.whitening @ unlike.information @ unlike.whitening.T)
        self._set_target(information, moments)

    def _less_clipped(self, theta: np.ndarray, whitening: np.ndarray) -> np.ndarray:
        """Returns coordinates in which the clip leaves of each direction what releases can show.

        Weighted inputs keep a few far ones, as many as noise may hide. They have most of the
        information of a direction in which private inputs hardly vary, but the clip cuts them.

        Args:
          theta: The parameters, shape [d].
          whitening: W, in which these inputs have equal information, shape [d, d].
        """
        if self.likelihood.weights is None:
            return whitening
        matrix = self.likelihood.moments_at(theta, whitening).matrix
        magnified = _magnified(matrix / np.trace(matrix), self._course.inputs.least)
        prior = self.prior.whitened(whitening) / self.num_records
        relative: np.ndarray = whitening_of(magnified + prior, np.arange(self.size))
        return relative @ whitening

    def _see_progress(
        self, accumulated: dict[str, Any], mechanism: Mechanism, *, may_search: bool
    ) -> None:
        """Takes shorter steps, or goes back, where the last ones were too long.

        Args:
          accumulated: The fit's accumulators.
          mechanism: The mechanism that releases.
          may_search: Whether the last steps may have been those of a search.
        """
        progress = self._progress(accumulated["curvature"], mechanism)
        if progress is None:
            return
        if self._course.search.is_on and may_search:
            self._course.search.judge(progress)
            return
        back = self._course.caution.judge(progress)
        if back is not None:
            self.theta.assign(back)

    def _progress(self, blocks: dict[str, np.ndarray], mechanism: Mechanism) -> Progress | None:
        """Returns what was released since the last call; None if the parameters overflowed."""
        before = self._course.released
        released = self._course.released = {name: np.sum(part, 0) for name, part in blocks.items()}
        new = {name: part - before.get(name, 0.0) for name, part in released.items()}
        num = float(new["steps"])
        if not num:
            return None
        score, place = new["gradient"] / num, new["theta"] / num
        prior = self.likelihood.scale.ratio * self._prior_per_record()
        pull = score - self._coordinates.whitening @ prior @ (place - self.prior.mean)
        return Progress(pull, place, _noise_of(mechanism) / math.sqrt(num))

    def _see_private_inputs(
        self, accumulated: dict[str, Any], mechanism: Mechanism, block: int
    ) -> None:
        """Notes by how much the private information differs from that at public inputs.

        With wrong coordinates steps would go to and fro before the first ones are formed. In the
        present ones the information at public inputs is about the identity at every parameter, so
        that what a block of steps released holds at later parameters too.

        Args:
          accumulated: The fit's accumulators.
          mechanism: The mechanism that releases.
          block: The number of the block of steps.
        """
        if not have_steps(accumulated, [block]):
            return
        look = self._look(accumulated, mechanism, [block])
        # Far from the records, twins' scores are cut by a centre that the record has moved.
        is_far = look.seen.lack_of_fit.total > _FAR * look.seen.lack_of_fit.expected
        if is_far or look.seen.window.curvature_signal < _LEAST_SIGNAL:
            return
        if look.weights is not None:
            self._use_weights(look, 1)
        if look.is_alike:
            return
        curvatures = look.seen.draw(_FLATTENED)
        information = self._information(curvatures)
        back = self._course.inputs.whitening @ np.linalg.inv(self._coordinates.whitening)
        information = symmetric(back @ information @ back.T)
        magnified = _magnified(information, _least_share(curvatures.relative_noise, 1))
        prior = self.prior.whitened(back @ self._coordinates.whitening) / self.num_records
        relative = whitening_of(magnified + prior, np.arange(self.size))
        self._course.inputs.unlike = _Unlike(information, relative, curvatures.relative_noise)

    def _use_weights(self, look: _Look, num_blocks: int) -> None:
        """Weights the public inputs, which then resemble the private ones.

        Args:
          look: What says how.
          num_blocks: Of so many blocks of steps.
        """
        self._course.inputs.unlike = None
        self._course.inputs.least = _least_share(look.seen.relative_noise, num_blocks)
        self.likelihood.use_weights(look.weights)

    def _has_moved(self, before: np.ndarray) -> bool:
        """Returns whether the present coordinates magnify a direction much more than others did.

        Noise hid how little information it has, and may still hide it.

        Args:
          before: W of the other coordinates, shape [d, d].
        """
        relative = np.linalg.solve(self._coordinates.whitening.T, before.T)
        return bool(np.linalg.norm(relative, -2) ** 2 < _MUCH_LESS)

    def _balanced(
        self, released: ReleasedSums, weights: ReleasedWeights | None
    ) -> InputWeights | None:
        """Returns weights with which public inputs resemble the private ones, or None.

        Args:
          released: What was released of the curvature.
          weights: What was released of records' weights: they may depend on inputs and outcomes
            unless they are alike. None without weights.
        """
        if weights is not None and not weights.are_alike:
            return None
        total = self.counted(weights)
        return self.likelihood.balanced(
            released.theta,
            self._coordinates.whitening,
            released.matrix / total,
            released.matrix_sd / total,
        )

    def counted(self, weights: ReleasedWeights | None) -> float:
        """Returns N, times the mean weight of records over that of public inputs.

        Args:
          weights: What was released of records' weights; None without weights.
        """
        if weights is None:
            return float(self.num_records)
        return self.num_records * weights.mean / float(self.likelihood.scale.shares.mean())

    def _are_alike(self, seen: SeenCurvature) -> bool:
        """Returns whether private inputs resemble the public ones, whose coordinates are then kept.

        Coordinates of released values are formed anew from each look: noise may have hidden a
        direction in which there is little information, and after each look there is more in it.
        """
        is_close = seen.resembles >= _LEAST_RESEMBLANCE and seen.stretch < _MOST_STRETCH
        return seen.trusted and is_close and seen.weak <= _MOST_WEAK

    def _information(self, curvatures: Curvatures) -> np.ndarray:
        """Returns the information per record that releases say, in the present coordinates."""
        window = curvatures.window
        radius = curvatures.kappa * window.matrix_sd * math.sqrt(2.0 * self.size)
        floor = max(_FLOOR * radius, 1e-9 * np.trace(curvatures.slopes.mean(axis=0)))
        information: np.ndarray = log_mean(curvatures.slopes, floor)
        return information / (self.num_records * curvatures.shrink)

    def _use(self, coordinates: FitCoordinates) -> None:
        """Sets the coordinates."""
        self._coordinates = coordinates
        whitening = coordinates.whitening
        self._step.whitening.assign(whitening)
        self._step.prior_pull.assign(
            self.likelihood.scale.ratio * whitening @ self._prior_per_record()
        )

    def _set_target(self, information: np.ndarray, moments: SimulatedMoments) -> None:
        """Sets the slope per record that steps invert: that of psi, and the prior's part."""
        shrink = np.clip(np.trace(moments.slope) / max(np.trace(information), 1e-300), 0.05, 1.0)
        prior = self.prior.whitened(self._coordinates.whitening) / self.num_records
        prior *= self.likelihood.scale.ratio
        self._slope = Slope(shrink * information + prior, float(shrink))

    def _set_gain(self, gain: float, mechanism: Mechanism) -> None:
        """Sets the share of a Newton step that a step makes, cut where noise would dominate.

        It is cut in the directions in which steps would wander: a prior that determines one
        direction alone, as that of an intercept far from the records, slows no other.
        """
        # In these coordinates the slope is a combination of the identity and the prior's precision.
        precisions, directions = np.linalg.eigh(self.prior.whitened(self._coordinates.whitening))
        slopes = np.einsum("ij,ik,kj->j", directions, self._slope.per_record, directions)
        noise = _noise_of(mechanism) / slopes
        tiny = np.finfo(float).tiny
        nearest = np.minimum(_WANDER / np.sqrt(np.maximum(precisions, tiny)), _FARTHEST)
        gains = 2.0 / np.maximum((noise / nearest) ** 2, 2.0 / gain)
        self._step.gain.assign((directions * (gains / slopes)) @ directions.T)

    def _use_releases(self, accumulated: dict[str, Any], mechanism: Mechanism) -> bool:
        """Moves to the posterior of the burn-in's releases, and takes coordinates from these.

        Returns:
          Whether it was far.
        """
        blocks = self._course.blocks
        if not have_steps(accumulated, blocks):
            return False
        look = self._look(accumulated, mechanism, blocks)
        curvatures = look.seen.draw(0.0 if look.is_alike else _FLATTENED)
        whitening, num = self._coordinates.whitening, self.num_records
        # Of the mean curvature: draws without information would lead back to a vague prior's mean.
        slopes, variances = (
            part.mean(axis=0, keepdims=True) for part in (curvatures.slopes, curvatures.variances)
        )
        likelihood = LinearLikelihood.from_window(
            curvatures.window, slopes, variances, np.arange(self.size)
        )
        precision = self.prior.whitened(whitening)
        mixture = exact_mixture(
            likelihood, precision, whitening @ self.prior.precision @ self.prior.mean
        )
        step = mixture.mean - curvatures.window.theta
        sds = np.sqrt(np.diag(mixture.covariance))
        is_far = bool(np.max(np.abs(step) / sds) > _STILL_FAR)
        length = float(np.linalg.norm(step))
        step *= min(1.0, 2.0 * self._step.longest / max(length, 1e-12))
        self.theta.assign(whitening.T @ (curvatures.window.theta + step))
        if look.weights is not None:
            self._use_weights(look, len(blocks))
            self._follow_public_inputs()
            return is_far or self._has_moved(whitening) or not look.shows_all
        if look.is_alike or curvatures.window.curvature_signal < _LEAST_SIGNAL:
            return is_far
        information = self._information(curvatures)
        magnified = _magnified(information, _least_share(curvatures.relative_noise, len(blocks)))
        relative = whitening_of(magnified + precision / num, np.arange(self.size))
        self._use(
            FitCoordinates(relative @ whitening, trusted=False, noise=curvatures.relative_noise)
        )
        moments = self._moments_alike(self._theta())
        self._set_target(symmetric(relative @ information @ relative.T), moments)
        return is_far

    def _look(
        self,
        accumulated: dict[str, Structure],
        mechanism: Mechanism,
        used: Sequence[int] | np.ndarray,
        *,
        weigh: bool = True,
    ) -> _Look:
        """Returns what the releases of some blocks of steps say of the curvature.

        If private inputs do not resemble the public ones, these are weighted like them.

        Args:
          accumulated: The fit's accumulators.
          mechanism: The mechanism that released them.
          used: The numbers of the blocks, all in the present coordinates.
          weigh: Whether public inputs may be weighted.

        Raises:
          ValueError: The blocks have too few steps.
        """
        released, halves = self._released(accumulated, mechanism, used)
        whitening, trusted = self._coordinates.whitening, self._coordinates.trusted
        noise = self._coordinates.noise
        own_trace: float | None = None
        if trusted:
            simulated = self.likelihood.moments_at(released.theta, whitening)
        else:
            trace = float(np.trace(released.matrix)) / self.num_records
            simulated = self._moments_alike(released.theta, trace)
            # Fitted to the release, `simulated` would not say that hardly a record counts.
            own_trace = float(np.trace(self._moments_alike(released.theta).matrix))
        own = ReleasedWeights.of_blocks(accumulated, mechanism, np.asarray(used))
        weights, balanced = self._balanced(released, own), None
        if weights is not None:
            balanced = self.likelihood.moments_at(released.theta, whitening, weights)
        present = self.likelihood.weights
        if trusted and present is not None:
            noise = present.noise
        seen = self.seen_of(
            released, halves, simulated, whitening, trusted, balanced, noise, own_trace
        )
        is_alike = self._are_alike(seen)
        is_enough = is_alike and present is None
        if not weigh or is_enough or weights is None or balanced is None:
            return _Look(seen, is_alike)
        weighted = self.seen_of(released, halves, balanced, whitening, True, noise=weights.noise)
        if self._are_alike(weighted):
            least = self.num_records * least_eigenvalue(balanced.matrix)
            return _Look(weighted, True, weights, least > _LEAST_SEEN * released.matrix_sd)
        return _Look(seen, is_alike)

    def _released(
        self,
        accumulated: dict[str, Structure],
        mechanism: Mechanism,
        used: Sequence[int] | np.ndarray,
    ) -> tuple[ReleasedSums, tuple[ReleasedSums, ReleasedSums]]:
        """Returns the sums that some blocks of steps released, and those of their halves.

        Raises:
          ValueError: The blocks have too few steps.
        """
        arrays = tf.nest.map_structure(np.asarray, accumulated)
        blocks = np.asarray(used)
        blocks = blocks[arrays["curvature"]["steps"][blocks] > 0]
        if not len(blocks):
            raise ValueError("the fit was too short")
        cut = len(blocks) // 2
        spread = self.likelihood.scale.spread
        # A single block has no halves, which only checks read.
        return ReleasedSums.of_blocks(arrays, mechanism, blocks, spread), (
            ReleasedSums.of_blocks(arrays, mechanism, blocks[:cut] if cut else blocks),
            ReleasedSums.of_blocks(arrays, mechanism, blocks[cut:]),
        )

    def seen_of(
        self,
        released: ReleasedSums,
        halves: tuple[ReleasedSums, ReleasedSums],
        simulated: SimulatedMoments,
        whitening: np.ndarray,
        trusted: bool,
        balanced: SimulatedMoments | None = None,
        noise: float = 0.0,
        own_trace: float | None = None,
    ) -> SeenCurvature:
        """Returns what released sums say of the curvature.

        Args:
          released: The sums over all records.
          halves: Those of each half of the steps.
          simulated: Means at public inputs, in the same coordinates.
          whitening: W, shape [d, d].
          trusted: Whether the coordinates are those of public inputs.
          balanced: See `SeenCurvature`.
          noise: See `SeenCurvature.centre_noise`.
          own_trace: See `SeenCurvature`.
        """
        first, second = halves
        away = np.linalg.solve(whitening.T, first.theta - second.theta)
        return SeenCurvature(
            released,
            simulated,
            whitening,
            num_records=self.num_records,
            clip=self.likelihood.clip.bound,
            num_twins=self.likelihood.num_twins,
            ranking=self.likelihood.ranking,
            trusted=trusted,
            halves=(first.score - second.score, away),
            half_variance=sum(released.num_steps / side.num_steps for side in halves),
            generator=np.random.default_rng(0),
            intercept=self.likelihood.intercept,
            weighted=not self.likelihood.scale.are_alike,
            balanced=balanced,
            centre_noise=noise,
            own_trace=own_trace,
        )

    def window(
        self, accumulated: dict[str, Any], mechanism: Mechanism
    ) -> tuple[Curvatures, np.ndarray]:
        """Returns draws of the curvature from the window's releases, and its W.

        Args:
          accumulated: The fit's accumulators.
          mechanism: The mechanism that released them.

        Raises:
          ValueError: The fit was too short.
        """
        blocks = np.arange(self._course.window, NUM_BLOCKS)
        # A fit that was stopped on its way has steps in the present coordinates alone.
        if not have_steps(accumulated, blocks):
            blocks = np.arange(self._course.since, NUM_BLOCKS)
        # As weights, that centre a prior, and as what updates it, they would count twice.
        seen = self._look(accumulated, mechanism, blocks, weigh=False).seen
        return seen.draw(), self._coordinates.whitening

    # ------------------------------------------------------------------ simulation

    @functools.cached_property
    def moved(self) -> MovedScores:
        """Scores of outcomes that follow other parameters, traced once for all fits."""
        return MovedScores(self.likelihood, _NUM_OUTCOMES)

    def _prior_per_record(self) -> np.ndarray:
        return self.prior.precision / self.num_records

    def _theta(self) -> np.ndarray:
        theta: np.ndarray = self.theta.numpy().astype(np.float64)
        return theta

    def _moments_alike(self, theta: np.ndarray, trace: float | None = None) -> SimulatedMoments:
        """Returns the moments at public inputs in coordinates of their own.

        There they resemble those of private inputs in theirs: how long scores are beside the clip
        is a matter of outcomes and of the information's trace, not of its directions.

        Args:
          theta: The parameters, shape [d].
          trace: The capped matrix's trace for one record, to which the coordinates' unit is made to
            fit; None for the unit in which the information's trace is 1.
        """
        information = self.likelihood.moments_at(theta, self._coordinates.whitening).information
        whitening = whitening_of(information + self._prior_per_record(), self._order)
        if trace is None:
            return self.likelihood.moments_at(theta, whitening)
        return self.likelihood.moments_of_trace(theta, whitening, trace)


def _first_step(block: int, num_steps: int) -> int:
    """Returns the first step of a block."""
    return -(-num_steps * block // NUM_BLOCKS)


def _least_share(noise: float, num_blocks: int) -> float:
    """Returns up to which share of the mean a direction with less information is magnified.

    Then the release of a usual window shows how much that is.

    Args:
      noise: That of a release, over the mean of its diagonal.
      num_blocks: In so many blocks of steps.
    """
    return min(1.0, _LEAST_OVER_NOISE * noise * math.sqrt(num_blocks / (NUM_BLOCKS - _BURN_IN)))


def _magnified(information: np.ndarray, least: float) -> np.ndarray:
    """Returns the information that the next coordinates whiten.

    A direction with little information is magnified as far as noise asks for, and no further:
    where few records have all of it, as those with a rare value, the clip would cut them.

    Args:
      information: That per record, in coordinates in which it is about I / d, shape [d, d].
      least: See `_least_share`.
    """
    values, vectors = np.linalg.eigh(information)
    values = values / np.clip(values * len(values), least, 1.0)
    return symmetric((vectors * values) @ vectors.T)


def _is_positive(information: np.ndarray) -> bool:
    """Returns whether there is information, finite and not zero: it is zero where all overflows."""
    return bool(np.isfinite(information).all() and np.trace(information) > 0.0)


def _noise_of(mechanism: Mechanism) -> float:
    """Returns the standard deviation of the noise on a coordinate of a step's mean score."""
    return float(mechanism.deviations[0] / mechanism.expected_batch_size)
