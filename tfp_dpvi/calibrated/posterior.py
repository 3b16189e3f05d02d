"""The calibrated posterior of a `DPVI`, a TFP distribution computed from released values alone."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from typing import Any

import numpy as np

from tfp_dpvi._tf import Structure, tf, tfd, tfp
from tfp_dpvi.bayes.coordinates import Coordinates
from tfp_dpvi.bayes.model import LIKELIHOOD_ERRORS
from tfp_dpvi.calibrated import curvature
from tfp_dpvi.calibrated import mixture as mixtures
from tfp_dpvi.calibrated.checks import (
    MOST_MISMATCH,
    Checks,
    ParameterChecks,
    check_posterior,
    narrowing,
    scales,
    widths,
)
from tfp_dpvi.calibrated.curvature import CurvaturePrior
from tfp_dpvi.calibrated.mixture import LinearLikelihood, Mixture
from tfp_dpvi.calibrated.nonlinear import NonlinearDensity, NonlinearScore
from tfp_dpvi.calibrated.pairing import Pairing
from tfp_dpvi.calibrated.simulation import PairSimulator, SimulatedPairs
from tfp_dpvi.calibrated.window import ReleaseNoise, Window, fit_window
from tfp_dpvi.training import Mechanism

LOG = logging.getLogger("tfp_dpvi")
# Raised for arrays that are not finite or not of full rank.
FAILURES = (np.linalg.LinAlgError, ValueError, tf.errors.OpError)

_NUM_PLACES = 64
_PAIRS_A_COORDINATE = 5
# Pairs that show the curvature's shape, at places of the path: many, since few inform a group.
_NUM_PAIRS = 1024
_ROUNDS = 8
_SHAPE_PLACES = 16
# Numbers of points at which the score is simulated: on the path, and from the posterior for a
# linear score, made wider.
_FROM_PATH = 4
_GUESSES = 12
_WIDER = 1.5
# Draws that compare the posterior with the prior, and their numbers in all, which bound the memory.
_NUM_DRAWS = 4096
_MOST_NUMBERS = 2**22


@dataclasses.dataclass(frozen=True)
class Calibrated:
    """A calibrated posterior.

    Attributes:
      mixture: The posterior on the real line.
      distribution: The posterior over the prior's structure.
      checks: Diagnostics of its intervals.
      num_steps: The number of steps in the window.
      shares: Shares of noise, data and prior in each coordinate's variance, shape [D, 3].
      halving: How many times as many records, or as much epsilon, would halve each interval, shape
        [D, 2]; None for the paired clip.
      log_scales: Whether positive parameters have logarithms as coordinates, see `Coordinates`.
    """

    mixture: Mixture
    distribution: tfd.Distribution
    checks: Checks
    num_steps: int
    shares: np.ndarray
    halving: np.ndarray | None = None
    log_scales: bool = False

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Returns the arrays to save."""
        arrays = {
            "locs": self.mixture.locs,
            "scales": self.mixture.scales,
            "checks": np.append(self.checks.to_array(), self.num_steps),
            "shares": self.shares,
            "log_scales": np.array(float(self.log_scales)),
        }
        if self.halving is not None:
            arrays["halving"] = self.halving
        if self.checks.parameters is not None:
            arrays["parameters"] = self.checks.parameters.to_array()
        return arrays

    @classmethod
    def from_arrays(cls, arrays: dict[str, np.ndarray], prior: tfd.Distribution) -> Calibrated:
        """Returns the posterior that was saved.

        Args:
          arrays: The arrays of `to_arrays`.
          prior: The prior.
        """
        log_scales = bool(arrays.get("log_scales", 0.0))
        coordinates = Coordinates(prior, log_scales=log_scales)
        mixture = Mixture(arrays["locs"], arrays["scales"])
        *values, num_steps = arrays["checks"].tolist()
        checks = Checks.from_array(values)
        if "parameters" in arrays:
            parameters = ParameterChecks.from_array(coordinates.names, arrays["parameters"])
            checks = dataclasses.replace(checks, parameters=parameters)
        distribution = mixture_distribution(mixture, coordinates)
        return cls(
            mixture,
            distribution,
            checks,
            int(num_steps),
            shares=arrays["shares"],
            halving=arrays.get("halving"),
            log_scales=log_scales,
        )


class _Kernels(tfd.MixtureSameFamily):
    """Normal components of one shape, of which each draw takes one.

    TFP's own mixture draws from all of them each time: gigabytes for the kernels of many levels.
    """

    def _sample_n(self, n: tf.Tensor | int, seed: tf.Tensor | None = None) -> tf.Tensor:
        parts = self.components_distribution
        for_picks, for_normals = tfp.random.split_seed(seed)
        picks = self.mixture_distribution.sample(n, seed=for_picks)
        locs, factor = parts.loc, parts.scale.to_dense()[0]
        normals = tf.random.stateless_normal(
            tf.stack([n, tf.shape(locs)[-1]]), for_normals, dtype=locs.dtype
        )
        return tf.gather(locs, picks) + tf.linalg.matmul(normals, factor, transpose_b=True)


def mixture_distribution(mixture: Mixture, coordinates: Coordinates) -> tfd.Distribution:
    """Returns a mixture as a TFP distribution over the prior's structure.

    Args:
      mixture: The mixture on the real line.
      coordinates: The prior's coordinates.
    """
    dtype = coordinates.dtype.as_numpy_dtype
    parts = tfd.MultivariateNormalTriL(mixture.locs.astype(dtype), mixture.scales.astype(dtype))
    weights = tfd.Categorical(logits=np.zeros(len(mixture.locs), dtype))
    kind = _Kernels if len(mixture.scales) == 1 else tfd.MixtureSameFamily
    mixed: Any = kind(weights, parts)
    return tfd.TransformedDistribution(mixed, coordinates.bijector, name="posterior")


class Calibrator:
    """Computes calibrated posteriors of one model.

    Args:
      pairing: The model's paired clip.
      surrogate: The model's surrogate; for priors that are not normal, chains start from it.
      simulator: The pilot's simulator, or None if there was no pilot.

    Attributes:
      pairing: The model's paired clip.
    """

    def __init__(
        self, pairing: Pairing, surrogate: tfd.Distribution, simulator: PairSimulator | None
    ) -> None:
        self.pairing = pairing
        self._surrogate = surrogate
        self._density = None if simulator is None else NonlinearDensity(simulator)
        self._coordinates = pairing.coordinates
        self._index = pairing.index

    @functools.cached_property
    def _normal(self) -> tuple[np.ndarray, np.ndarray] | None:
        return mixtures.gaussian_prior(
            self._coordinates.log_density, self._coordinates.prior_draws(64)
        )

    @functools.cached_property
    def _prior_draws(self) -> np.ndarray:
        """The prior's draws; NaN if it does not draw so many, which leaves out some checks."""
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
        """Returns what is known, from public values alone, before a fit.

        Args:
          reach: How far the fit can move a parameter.
        """
        unknown = np.full(self._coordinates.num, math.nan)
        reaches = unknown.copy()
        reaches[self._index] = self._prior_scales[self._index] / reach
        return ParameterChecks(self._coordinates.names, reaches, *[unknown] * 8)

    def __call__(
        self, accumulated: dict[str, Structure], mechanism: Mechanism, reach: float = math.nan
    ) -> Calibrated | None:
        """Returns the posterior given the released values.

        Args:
          accumulated: The fit's accumulators over released values, by name.
          mechanism: The mechanism that released them.
          reach: How far the fit could move a parameter, NaN if that is unknown.

        Returns:
          The posterior, or None if the window has fewer than four steps.

        #### Formal guarantee

        A function of released and public values: post-processing, at no further cost.
        """
        window = fit_window(accumulated, mechanism)
        if window is None:
            return None
        noise = ReleaseNoise.from_mechanism(mechanism)
        index = self._index
        # For Monte Carlo over released values, which needs no secret seed.
        generator = np.random.default_rng(0)
        unit = mechanism.gradient.clip.unit
        prior = CurvaturePrior.isotropic(len(index), noise.num_records, unit)
        simulation, simulated = None, None
        if self._density is not None:
            simulation = _Simulation(self._density, self._path(window, generator), noise)
            simulated = simulation.curvature_prior(generator)
        mismatch = math.nan if simulated is None else simulated.mismatch(window)
        if simulated is not None and mismatch <= MOST_MISMATCH:
            prior = simulated
        slopes, matrices = curvature.draw_curvature(window, prior, generator)
        mixture = self._linear_mixture(window, slopes, matrices, generator)
        linear = None
        if simulation is not None and prior is simulated:
            share = prior.release_share(window)
            refined = simulation.refine(mixture, window, slopes, matrices, share, generator)
            if refined is not None:
                linear, mixture = mixture, refined
        checks = dataclasses.replace(
            check_posterior(window, slopes, matrices, mixture, index, linear, mismatch),
            parameters=self._check_parameters(window, prior, mixture, reach, generator),
        )
        shares = mixtures.variance_shares(
            slopes.mean(axis=0),
            window.simulation * matrices.mean(axis=0),
            window.score_sd**2 * np.eye(len(index)),
            mixture,
            index,
            self._coordinates.log_density,
        )
        distribution = mixture_distribution(mixture, self._coordinates)
        return Calibrated(mixture, distribution, checks, window.num_steps, shares)

    def _path(self, window: Window, generator: np.random.Generator) -> np.ndarray:
        """Returns the parameters of the window's steps, shape [b, D].

        Coordinates that the likelihood does not read are arbitrary.
        """
        draw = self._coordinates.flatten_one(self._surrogate.sample(seed=tf.constant([0, 1])))
        path = np.repeat(draw[None], _NUM_PLACES, axis=0)
        blocks = np.arange(_NUM_PLACES) % len(window.path)
        places = window.path[blocks] + window.jitter[blocks] * generator.normal(
            size=(len(path), len(self._index))
        )
        path[:, self._index] = places - places.mean(axis=0) + window.theta
        return path

    def _linear_mixture(
        self,
        window: Window,
        slopes: np.ndarray,
        matrices: np.ndarray,
        generator: np.random.Generator,
    ) -> Mixture:
        """Returns the posterior for a linear score."""
        likelihood = LinearLikelihood.from_window(window, slopes, matrices, self._index)
        if self._normal is not None:
            return mixtures.exact_mixture(likelihood, *self._normal)
        draws = self._surrogate.sample(64, seed=tf.constant([0, 1]))
        start = tf.concat(self._coordinates.flatten_batch(draws), axis=-1).numpy()
        return mixtures.sampled_mixture(
            likelihood, self._coordinates.log_density, start.astype(np.float64), generator
        )

    def _check_parameters(
        self,
        window: Window,
        prior: CurvaturePrior,
        mixture: Mixture,
        reach: float,
        generator: np.random.Generator,
    ) -> ParameterChecks:
        """Returns the checks of single parameters."""
        before = self._prior_scales
        after = mixture.unsmoothed(_NUM_DRAWS, generator)
        relative = (scales(after) / before)[self._index]
        precision = before[self._index] ** -2
        narrowed = np.full(self._coordinates.num, math.nan)
        narrowed[self._index] = narrowing(window, prior, precision, relative)
        return dataclasses.replace(
            self.parameter_checks(reach),
            narrowing=narrowed,
            width=widths(self._prior_draws, after),
        )


@dataclasses.dataclass(frozen=True)
class _Simulation:
    """A pilot's simulation along a fit's path.

    Attributes:
      density: The posterior's density, with the pilot's simulator.
      path: The parameters of the window's steps, shape [b, D].
      noise: The noise of the fit's released values.
    """

    density: NonlinearDensity
    path: np.ndarray
    noise: ReleaseNoise

    def curvature_prior(self, generator: np.random.Generator) -> CurvaturePrior | None:
        """Returns the curvature's prior along the path, or None if too few pairs differ there."""
        simulator = self.density.simulator
        pairs = SimulatedPairs.joined(
            [
                simulator.pairs(place, generator, _NUM_PAIRS, _ROUNDS)
                for place in self.path[:_SHAPE_PLACES]
            ]
        )
        if len(pairs.deltas) < _PAIRS_A_COORDINATE * simulator.size:
            LOG.info(
                "The pilot's simulation has too few pairs here: the posterior is computed without "
                "it."
            )
            return None
        return pairs.curvature_prior(self.noise.num_records, self.noise.clip)

    def refine(
        self,
        linear: Mixture,
        window: Window,
        slopes: np.ndarray,
        matrices: np.ndarray,
        share: float,
        generator: np.random.Generator,
    ) -> Mixture | None:
        """Returns the posterior for the nonlinear score, or None if the simulation fails."""
        drawn = linear.sample(_GUESSES, generator, _WIDER)
        guesses = np.concatenate([self.path[:_FROM_PATH], drawn])
        try:
            score = NonlinearScore.simulate(
                self.density.simulator, self.path, guesses, self.noise.clip, generator
            )
            density_of = self.density.for_window(score, window, slopes, matrices, share)
            return mixtures.refined_mixture(linear, density_of, generator)
        except FAILURES as error:
            LOG.info("The simulation failed (%s): the posterior assumes a linear score.", error)
            return None
