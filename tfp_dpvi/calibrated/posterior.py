"""The calibrated posterior of a `DPVI`, a TFP distribution computed from released values alone."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from typing import Any

import numpy as np

from tfp_dpvi._tf import Structure, function_of_model, tf, tfd
from tfp_dpvi.bayes.coordinates import Coordinates, LogDensity
from tfp_dpvi.bayes.model import LIKELIHOOD_ERRORS, BayesianModel
from tfp_dpvi.calibrated import curvature
from tfp_dpvi.calibrated import mixture as mixtures
from tfp_dpvi.calibrated import window as windows
from tfp_dpvi.calibrated.curvature import CurvaturePrior
from tfp_dpvi.calibrated.mixture import Checks, Mixture
from tfp_dpvi.calibrated.nonlinear import Bend
from tfp_dpvi.calibrated.pairing import CannotPairError, Pairing, check_settings
from tfp_dpvi.calibrated.parameters import ParameterChecks, narrowing, scales, widths
from tfp_dpvi.calibrated.simulation import Pairs, PairSimulator
from tfp_dpvi.data import Records
from tfp_dpvi.data.shapes import specs_of
from tfp_dpvi.gradients import Clip
from tfp_dpvi.training import Mechanism

LOG = logging.getLogger("tfp_dpvi")
FAILURES = (
    np.linalg.LinAlgError,
    ValueError,
    tf.errors.OpError,
)  # Arrays that are not finite or not of full rank.
_NUM_PLACES, _PAIRS_A_COORDINATE = 64, 5
# Pairs that show the curvature's shape, at places of the path: many, since few inform a group.
_NUM_PAIRS, _ROUNDS, _SHAPE_PLACES = 1024, 8, 16
# Numbers of points at which the bend is simulated: on the path, and from the posterior without it.
_FROM_PATH, _GUESSES, _WIDER = 4, 12, 1.5
# Draws that compare the posterior with the prior, and their numbers in all, which bound the memory.
_NUM_DRAWS, _MOST_NUMBERS = 4096, 2**22


@dataclasses.dataclass(frozen=True)
class Calibrated:
    """A calibrated posterior."""

    mixture: Mixture  # On the real line.
    distribution: tfd.Distribution  # Over the prior's structure.
    checks: Checks
    num_steps: int  # In the window.
    shares: np.ndarray  # Of noise, data and prior in each coordinate's variance.

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Returns the arrays to save."""
        arrays = {
            "locs": self.mixture.locs,
            "scales": self.mixture.scales,
            "checks": np.append(self.checks.to_array(), self.num_steps),
            "shares": self.shares,
        }
        if self.checks.parameters is not None:
            arrays["parameters"] = self.checks.parameters.to_array()
        return arrays

    @classmethod
    def from_arrays(cls, arrays: dict[str, np.ndarray], coordinates: Coordinates) -> Calibrated:
        """Rebuilds the posterior from `to_arrays`."""
        mixture = Mixture(arrays["locs"], arrays["scales"])
        *values, num_steps = arrays["checks"].tolist()
        checks = Checks(*values)
        if "parameters" in arrays:
            parameters = ParameterChecks(coordinates.names, *arrays["parameters"])
            checks = dataclasses.replace(checks, parameters=parameters)
        distribution = distribution_of(mixture, coordinates)
        return cls(mixture, distribution, checks, int(num_steps), arrays["shares"])


class Calibrator:
    """Computes calibrated posteriors of one model, with its pilot's simulator if there was a pilot.

    For priors that are not normal, chains start from the surrogate.
    """

    def __init__(
        self, pairing: Pairing, surrogate: tfd.Distribution, simulator: PairSimulator | None
    ) -> None:
        self._surrogate, self._simulator = surrogate, simulator
        self._coordinates, self._index = pairing.coordinates, pairing.index

    @functools.cached_property
    def _normal(self) -> tuple[np.ndarray, np.ndarray] | None:
        return mixtures.gaussian_prior(
            self._coordinates.log_density, self._coordinates.prior_draws(64)
        )

    @functools.cached_property
    def _prior_draws(self) -> np.ndarray:
        """The prior's draws; NaN if it does not draw so many, which leaves out the checks that need them."""
        num = self._coordinates.num
        try:
            return self._coordinates.prior_draws(min(_NUM_DRAWS, max(64, _MOST_NUMBERS // num)))
        except (*LIKELIHOOD_ERRORS, tf.errors.OpError) as error:
            LOG.info("The prior does not draw many values at once: %s", error)
            return np.full((64, num), math.nan)

    @functools.cached_property
    def _prior_scales(self) -> np.ndarray:
        return scales(self._prior_draws)

    def parameter_checks(self, reach: float) -> ParameterChecks:
        """Returns what is known before a fit that can move a parameter by `reach`: public values alone."""
        unknown = np.full(self._coordinates.num, math.nan)
        reaches = unknown.copy()
        reaches[self._index] = self._prior_scales[self._index] / reach
        return ParameterChecks(self._coordinates.names, reaches, unknown, unknown)

    def __call__(
        self, accumulated: dict[str, Any], mechanism: Mechanism, reach: float = math.nan
    ) -> Calibrated | None:
        """Returns the posterior given the released values, or None if the window has fewer than four steps.

        `reach` is how far the fit could move a parameter, NaN if that is unknown.

        #### Formal guarantee

        A function of released and public values: post-processing, at no further cost.
        """
        noise, coordinates, index, simulator = (
            noise_of(mechanism),
            self._coordinates,
            self._index,
            self._simulator,
        )
        window = window_in(accumulated, mechanism)
        if window is None:
            return None
        generator = np.random.default_rng(
            0
        )  # For Monte Carlo over released values, which needs no secret seed.
        unit = mechanism.gradient.clip.unit
        prior = CurvaturePrior.isotropic(len(index), noise.num_records, unit)
        mismatch, bends = math.nan, False
        if simulator is not None:
            path = self._path(window, generator)
            pairs = Pairs.joined(
                [
                    simulator.pairs(one, generator, _NUM_PAIRS, _ROUNDS)
                    for one in path[:_SHAPE_PLACES]
                ]
            )
            if len(pairs.deltas) >= _PAIRS_A_COORDINATE * len(index):
                simulated = pairs.curvature_prior(noise.num_records, noise.clip)
                mismatch = simulated.mismatch(window)
                bends = mismatch <= mixtures.MOST_MISMATCH
                prior = simulated if bends else prior
            else:
                LOG.info(
                    "The pilot's simulation has too few pairs here: the posterior is computed without it."
                )
        slopes, matrices = curvature.draw_curvature(window, prior, generator)
        terms = mixtures.Terms.of(window, slopes, matrices, index)
        if self._normal is not None:
            mixture = mixtures.exact_mixture(terms, *self._normal)
        else:
            draws = tf.concat(
                coordinates.flatten_batch(self._surrogate.sample(64, seed=tf.constant([0, 1]))),
                axis=-1,
            )
            start = draws.numpy().astype(np.float64)
            mixture = mixtures.sampled_mixture(
                terms, self._coordinates.log_density, start, generator
            )
        linear = None
        if simulator is not None and bends:
            guesses = np.concatenate(
                [path[:_FROM_PATH], mixture.sample(_GUESSES, generator, _WIDER)]
            )
            try:
                bend = Bend.of(simulator, path, guesses, noise.clip, generator)
                curve = self._curve(bend, window, slopes, matrices, prior.release_share(window))
                linear, mixture = mixture, mixtures.refined_mixture(mixture, curve, generator)
            except FAILURES as error:
                LOG.info("The simulation failed (%s): the posterior assumes a linear score.", error)
        before, after = self._prior_scales, mixture.unsmoothed(_NUM_DRAWS, generator)
        narrowed = np.full(coordinates.num, math.nan)
        relative = (scales(after) / before)[index]
        narrowed[index] = narrowing(window, prior, before[index] ** -2, relative)
        checks = dataclasses.replace(
            mixtures.check(window, slopes, matrices, mixture, index, linear, mismatch),
            parameters=dataclasses.replace(
                self.parameter_checks(reach),
                narrowing=narrowed,
                width=widths(self._prior_draws, after),
            ),
        )
        shares = mixtures.variance_shares(
            window, slopes, matrices, mixture, index, self._coordinates.log_density
        )
        return Calibrated(
            mixture, distribution_of(mixture, coordinates), checks, window.num_steps, shares
        )

    def _path(self, window: windows.Window, generator: np.random.Generator) -> np.ndarray:
        """Returns the parameters of the window's steps; coordinates that the likelihood does not read are arbitrary."""
        one = self._coordinates.flatten_one(self._surrogate.sample(seed=tf.constant([0, 1])))
        path = np.repeat(one[None], _NUM_PLACES, axis=0)
        blocks = np.arange(_NUM_PLACES) % len(window.path)
        places = window.path[blocks] + window.jitter[blocks] * generator.normal(
            size=(len(path), len(self._index))
        )
        path[:, self._index] = places - places.mean(axis=0) + window.theta
        return path

    def _curve(
        self,
        bend: Bend,
        window: windows.Window,
        slopes: np.ndarray,
        matrices: np.ndarray,
        share: float,
    ) -> mixtures.DensityOfChains:
        """Returns the posterior's log density with the simulation's nonlinear score; chains take draws in turn."""
        spread = window.simulation * matrices + window.score_sd**2 * np.eye(len(window.theta))
        roots = np.linalg.inv(np.linalg.cholesky(spread))
        seen, reach = roots @ window.score, roots @ bend.root.numpy()
        inverse = np.linalg.inv(bend.root.numpy())
        relative = inverse @ slopes @ inverse.T

        def density_of(num: int) -> LogDensity:
            draws = np.arange(num) % len(slopes)
            dtype = self._coordinates.dtype
            parts = [
                tf.constant(part, dtype)
                for part in (seen[draws], reach[draws], relative[draws], share)
            ]

            def log_density(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
                value, gradient = self._bent(tf.constant(points, dtype), *parts, bend)
                return value.numpy().astype(np.float64), gradient.numpy().astype(np.float64)

            return log_density

        return density_of

    @functools.cached_property
    def _bent(self) -> tf.types.experimental.PolymorphicFunction:
        simulator = self._simulator
        assert simulator is not None

        def bent(
            points: tf.Tensor,
            seen: tf.Tensor,
            reach: tf.Tensor,
            relative: tf.Tensor,
            share: tf.Tensor,
            bend: Bend,
        ) -> tuple[tf.Tensor, tf.Tensor]:
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(points)
                residual = seen - tf.linalg.matvec(
                    reach, bend.score(simulator, points, relative, share)
                )
                value = (
                    self._coordinates.log_prior(points) - tf.reduce_sum(residual**2, axis=-1) / 2.0
                )
            return value, tape.gradient(value, points)

        return function_of_model(bent, reduce_retracing=True)


def distribution_of(mixture: Mixture, coordinates: Coordinates) -> tfd.Distribution:
    """Returns a mixture as a TFP distribution over the prior's structure."""
    dtype = coordinates.dtype.as_numpy_dtype
    parts = tfd.MultivariateNormalTriL(mixture.locs.astype(dtype), mixture.scales.astype(dtype))
    weights = tfd.Categorical(logits=np.zeros(len(mixture.locs), dtype))
    mixed: Any = tfd.MixtureSameFamily(weights, parts)
    return tfd.TransformedDistribution(mixed, coordinates.bijector, name="posterior")


def window_in(accumulated: dict[str, Any], mechanism: Mechanism) -> windows.Window | None:
    """Returns the averages over a fit's window, or None if it is too short."""
    blocks = {name: part.numpy() for name, part in accumulated["curvature"].items()}
    return windows.window_of(blocks, accumulated["clipped_away"].numpy(), noise_of(mechanism))


def noise_of(mechanism: Mechanism) -> windows.ReleaseNoise:
    """Returns the public numbers that describe the noise of released values."""
    gradient, matrix, scale, *_ = mechanism.deviations
    return windows.ReleaseNoise(
        num_records=mechanism.num_records,
        sampling_rate=mechanism.expected_batch_size / mechanism.num_records,
        clip=mechanism.gradient.clip.bound,
        gradient=gradient,
        matrix=matrix,
        scale=scale,
    )


class Calibration:
    """The state of a model with `clipping="paired"`, besides its surrogate."""

    def __init__(self, model: BayesianModel, surrogate: tfd.Distribution) -> None:
        self._model, self._surrogate = model, surrogate
        self.pairing: Pairing | None = None  # None if the paired clip does not apply.
        self.simulator: PairSimulator | None = None  # A pilot's.
        self._kind: object = None
        self._calibrator: Calibrator | None = None
        self.loaded: Calibrated | None = None  # From a file.
        self._made: tuple[object, Calibrated | None] = (None, None)
        self._reach = math.nan  # Of the last fit.

    def prepare(self, records: Records, gradients: str, num_draws: int) -> None:
        """Checks, once for each kind of records, whether the paired clip applies; warns if it does not.

        Args:
          records: The records of a fit.
          gradients: "aligned" or "vectorized", as in `DPVI`.
          num_draws: Draws of the parameters in each step.
        """
        kind = (str(specs_of(records, 1)), records.sample_weight is None, gradients, num_draws)
        if kind == self._kind:
            return
        self._kind, self._calibrator, self.pairing = None, None, None
        try:
            check_settings(gradients, num_draws)
            self.pairing = Pairing(self._model, records)
        except CannotPairError as reason:
            self._refuse(str(reason))
        self._kind = kind

    def pairing_for(self, clip: Clip) -> Pairing | None:
        """Returns the paired clip if it applies to the records of `prepare` and to the optimizer's clip, else None."""
        if self.pairing is not None and clip.clipping != "flat":
            self.pairing = self._kind = self._calibrator = None
            self._refuse(f"the optimizer's clipping={clip.clipping!r} is not one length for all")
        return self.pairing

    def begin(self, reach: float) -> None:
        """Warns, before privacy is spent, of a prior far wider than a fit can move a parameter, `reach`."""
        self._reach = reach
        calibrator = self._current()
        if calibrator is None:
            return
        for sentence in calibrator.parameter_checks(reach).warnings:
            LOG.warning("Before training: %s.", sentence)

    def _current(self) -> Calibrator | None:
        """Returns the computation of posteriors, or None if the paired clip does not apply."""
        if self._calibrator is None and self.pairing is not None:
            self._calibrator = Calibrator(self.pairing, self._surrogate, self.simulator)
        return self._calibrator

    @staticmethod
    def _refuse(reason: str) -> None:
        LOG.warning(
            'clipping="paired" does not apply: %s. The posterior is the raw surrogate, not calibrated.',
            reason,
        )

    def posterior(
        self, accumulated: dict[str, Structure], mechanism: Mechanism
    ) -> Calibrated | None:
        """Returns the calibrated posterior of the last fit, or None if there is none; warns of what its checks say.

        Args:
          accumulated: The fit's accumulators over released values, by name.
          mechanism: The mechanism that released them.
        """
        if self._made[0] is not accumulated:
            calibrator = self._current()
            if "curvature" not in accumulated or calibrator is None:
                return None
            found = None
            try:
                found = calibrator(accumulated, mechanism, self._reach)
                if found is None:
                    said = [
                        "The fit was too short for a calibrated posterior: `posterior` is the raw surrogate."
                    ]
                else:
                    said = [
                        f"Do not trust the posterior's intervals: {each}."
                        for each in found.checks.warnings
                    ]
            except FAILURES as error:
                said = [
                    f"The released values give no posterior ({error}): `posterior` is the raw surrogate."
                ]
            for sentence in said:
                LOG.warning("%s", sentence)
            self._made = (accumulated, found)
        return self._made[1]

    def load(self, arrays: dict[str, np.ndarray]) -> None:
        """Replaces the last fit's posterior by one from `Calibrated.to_arrays`, or by none."""
        self.loaded = None
        if arrays:
            self.loaded = Calibrated.from_arrays(arrays, Coordinates(self._model.prior))

    def use(self, simulator: PairSimulator) -> None:
        """Sets a pilot's simulator for the posteriors of later fits."""
        self.simulator, self._calibrator = simulator, None

    @staticmethod
    def logs(accumulated: dict[str, Structure], mechanism: Mechanism) -> dict[str, float]:
        """Returns kappa and the curvature's signal-to-noise ratio, once there is a window."""
        if "curvature" not in accumulated:
            return {}
        window = window_in(accumulated, mechanism)
        return (
            {}
            if window is None
            else {"kappa": window.kappa, "curvature_signal": window.curvature_signal}
        )
