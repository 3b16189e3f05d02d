"""Hospital effects: parameters that differ between hospitals, around those that all share.

A hospital's own parameters are `theta + b_m`, where the effects b_m are normal about 0 with
standard deviations tau, on the coordinates that a study calls local. The sums that a hospital
releases anyway tell of `theta + b_m`, since an effect enters its likelihood as the shared
coefficient does. So effects are integrated over here, from released values, and tau by weighted
draws: no hospital computes, sends or spends anything more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

from tfp_dpvi.calibrated.mixture import LinearLikelihood
from tfp_dpvi.calibrated.whitening import Curvatures, NormalPrior
from tfp_dpvi.federated.sums import SiteSums
from tfp_dpvi.federated.window import shares_of

MOST_LOCAL = 6
"""Local coordinates at most: their standard deviations are integrated over by weighted draws."""

# Binary logarithms of the number of draws of one effect's tau from its prior, and as many near the
# first ones' weight; twice as many for each other effect.
_LEAST_LOG_DRAWS = 7
_MOST_LOG_DRAWS = 10
# Numbers of all precisions at once.
_MOST_NUMBERS = 2**23
# Draws of tau for each draw of the curvature.
_NUM_KEPT = 16
# Of draws near the weight, their spread over that of the weight.
_WIDER = 1.5
# Of a hospital's information per record over all hospitals', as far as nothing is known of it.
_OWN_SD = 0.3
_LEAST_OWN = 0.3
_TINY = 1e-6


@dataclasses.dataclass(frozen=True)
class Local:
    """The coordinates that differ between hospitals.

    Attributes:
      names: Their names, such as "w[0]".
      index: Their places among the coordinates that the likelihood reads, shape [L].
      scales: Those of the half-normal priors of tau, shape [L].
    """

    names: tuple[str, ...]
    index: np.ndarray
    scales: np.ndarray

    @classmethod
    def of_names(
        cls,
        local: Mapping[str, float | None],
        names: Sequence[str],
        prior_sds: np.ndarray,
    ) -> Local:
        """Returns the coordinates of names.

        Args:
          local: The scale of the effects' standard deviation by the name of a coordinate or of a
            whole parameter; None for the prior's standard deviation of each coordinate.
          names: Names of the coordinates that the likelihood reads.
          prior_sds: Their standard deviations under the prior, shape [d].

        Raises:
          ValueError: A name is unknown, a scale is not positive, or they are too many.
        """
        scales: dict[int, float] = {}
        for name, scale in local.items():
            own = [
                place
                for place, each in enumerate(names)
                if each == name or each.startswith(f"{name}[")
            ]
            if not own:
                raise ValueError(
                    f"local names {name!a:.99}, which is no parameter that the likelihood reads: "
                    f"use {', '.join(names)!s:.200}."
                )
            if scale is not None and not (np.isfinite(scale) and scale > 0.0):
                raise ValueError(f"local[{name!a:.99}]={scale!a:.99} must be a positive number.")
            scales |= {place: prior_sds[place] if scale is None else scale for place in own}
        if not 0 < len(scales) <= MOST_LOCAL:
            raise ValueError(
                f"local has {len(scales)} coordinates, and 1 to {MOST_LOCAL} can differ between "
                "hospitals: name single ones, such as 'w[0]'."
            )
        index = np.array(sorted(scales))
        return cls(
            tuple(names[place] for place in index),
            index,
            np.array([float(scales[place]) for place in index]),
        )


@dataclasses.dataclass(frozen=True)
class SiteLikelihoods:
    """Likelihoods of hospitals' own parameters, less the public point, in whitened coordinates.

    There is one for each of M hospitals and K draws of the curvature: quadratic in phi.

    Attributes:
      precisions: Shape [M, K, d, d].
      linear: Precisions times means, shape [M, K, d].
      squares: Of each hospital's score over its covariance, shape [M, K].
      noise: The part of the mean precisions that the variance of privacy noise is, [M, d, d]: that
        of `G s` where the precision is `G A`, for a score s with slope A.
    """

    precisions: np.ndarray
    linear: np.ndarray
    squares: np.ndarray
    noise: np.ndarray

    @classmethod
    def of_sites(
        cls, sites: Sequence[SiteSums], curvatures: Curvatures, bends: np.ndarray
    ) -> SiteLikelihoods:
        """Returns the likelihoods of sums whose curvature is known together.

        All have the shape of the total's curvature; multiplying terms with curvatures that were
        drawn apart does not cover, since a precision is quadratic in a noisy curvature.

        Args:
          sites: The sums of each hospital.
          curvatures: Draws of the curvature of all hospitals' sums together.
          bends: For each hospital the slope of scores from the public point to its own parameters,
            over that at the point; shape [M, d, d].
        """
        parts = []
        eye = np.eye(len(curvatures.window.theta))
        variances = curvatures.window.simulation * curvatures.variances
        shares = _shares(sites, curvatures)
        for share, square, site, bend in zip(*shares, sites, bends, strict=True):
            noise = site.deviation("score") ** 2
            score, slopes = site.mean("score"), share * bend @ curvatures.slopes
            covariances = square * variances + noise * eye
            weights = np.linalg.solve(covariances, slopes)
            precisions = np.swapaxes(slopes, 1, 2) @ weights
            mean = weights.mean(axis=0)
            part = (
                (precisions + np.swapaxes(precisions, 1, 2)) / 2.0,
                np.einsum("kij,i->kj", weights, score),
                np.linalg.solve(covariances, score) @ score,
                noise * mean.T @ mean,
            )
            parts.append(part)
        return cls(*(np.stack(each) for each in zip(*parts, strict=True)))

    @property
    def num_draws(self) -> int:
        """The number K of draws of the curvature."""
        return self.precisions.shape[1]


@dataclasses.dataclass(frozen=True)
class EffectDraws:
    """Draws of tau, and what they say of the shared parameters.

    Attributes:
      sds: Draws of tau, S of them for each draw of the curvature, shape [K S, L].
      picks: The draw of the curvature of each, shape [K S].
      likelihood: The likelihood of the shared parameters for each, with effects integrated over, in
        whitened coordinates.
      noise: The part of its mean precision that the variance of privacy noise is, shape [d, d].
    """

    sds: np.ndarray
    picks: np.ndarray
    likelihood: LinearLikelihood
    noise: np.ndarray


class _Shared(NamedTuple):
    """Likelihoods with effects integrated over, for n values of tau, less the public point.

    Attributes:
      precisions: Shape [n, d, d].
      linear: Precisions times means, shape [n, d].
      log_density: Of the sums given tau, up to a constant, shape [n].
    """

    precisions: np.ndarray
    linear: np.ndarray
    log_density: np.ndarray


class HospitalEffects:
    """The distribution of effects given hospitals' sums.

    Args:
      local: The coordinates that differ.
      sites: The hospitals' likelihoods.
      whitening: W, shape [d, d].
      phi: The public point in whitened coordinates, shape [d].
      prior: The prior of the shared parameters, or a normal one with its moments, by which draws of
        tau are weighted.
    """

    def __init__(
        self,
        local: Local,
        sites: SiteLikelihoods,
        whitening: np.ndarray,
        phi: np.ndarray,
        prior: NormalPrior,
    ) -> None:
        self._local, self._sites = local, sites
        self._phi = phi
        # An effect's direction in whitened coordinates.
        self._reach = np.linalg.inv(whitening.T)[:, local.index]
        self._prior_precision = prior.whitened(whitening)
        mean = np.linalg.solve(whitening.T, prior.mean)
        self._prior_linear = self._prior_precision @ (mean - phi)
        # Of an effect, from each hospital: shapes [M, K, L, d], [M, K, L, L] and [M, K, L].
        self._rows = np.swapaxes(self._reach, 0, 1) @ sites.precisions
        self._own = self._rows @ self._reach
        self._pull = sites.linear @ self._reach

    def covariances(self, sds: np.ndarray, draw: np.ndarray | int) -> np.ndarray:
        """Returns the covariance of each hospital's effects given all else, [M, n, L, L].

        Args:
          sds: Values of tau, shape [n, L].
          draw: The number of the draw of the curvature, or of each value's, shape [n].
        """
        own = self._own[:, draw]
        own = own[:, None] if own.ndim == 3 else own
        scaled = sds[:, :, None] * own * sds[:, None, :]
        inner = np.linalg.inv(np.eye(sds.shape[1]) + scaled)
        return sds[:, :, None] * inner * sds[:, None, :]

    def _shared(self, sds: np.ndarray, draw: int) -> _Shared:
        """Returns likelihoods of the shared parameters for values of tau and one curvature."""
        covariances = self.covariances(sds, draw)
        rows, pull = self._rows[:, draw], self._pull[:, draw]
        precisions = self._sites.precisions[:, draw].sum(axis=0) - np.einsum(
            "mai,mnab,mbj->nij", rows, covariances, rows, optimize=True
        )
        moved = np.einsum("mnab,mb->mna", covariances, pull)
        linear = self._sites.linear[:, draw].sum(axis=0) - np.einsum("mai,mna->ni", rows, moved)
        scaled = sds[:, :, None] * self._own[:, draw][:, None] * sds[:, None, :]
        occam = np.linalg.slogdet(np.eye(sds.shape[1]) + scaled)[1].sum(axis=0)
        total = precisions + self._prior_precision
        right = linear + self._prior_linear
        solved = np.linalg.solve(total, right[:, :, None])[:, :, 0]
        fit = np.einsum("mna,ma->n", moved, pull) + np.sum(right * solved, axis=1)
        log_density = (fit - occam - np.linalg.slogdet(total)[1]) / 2.0
        return _Shared(precisions, linear, log_density)

    def _log_densities(self, sds: np.ndarray) -> np.ndarray:
        """Returns log densities of the sums for each draw of the curvature, shape [K, n]."""
        size = len(self._phi)
        at_once = max(1, _MOST_NUMBERS // size**2)
        return np.stack(
            [
                np.concatenate(
                    [
                        self._shared(sds[first : first + at_once], draw).log_density
                        for first in range(0, len(sds), at_once)
                    ]
                )
                for draw in range(self._sites.num_draws)
            ]
        )

    def draw(self, generator: np.random.Generator, num_kept: int = _NUM_KEPT) -> EffectDraws:
        """Returns draws of tau given the sums, as many for each draw of the curvature.

        Args:
          generator: The source of random numbers.
          num_kept: The number S for each.
        """
        scales = self._local.scales
        size = len(scales)
        num = 2 ** min(_LEAST_LOG_DRAWS + size - 1, _MOST_LOG_DRAWS)
        uniform = stats.qmc.Sobol(size, seed=generator).random(num)
        first = scales * stats.halfnorm.ppf(np.clip(uniform, _TINY, 1.0 - _TINY))
        # Of several effects, few draws from the prior have weight: others are made near these.
        logs_of_first = self._log_densities(first)
        weights = _normalized(logs_of_first.mean(axis=0)[None])[0]
        logs = np.log(first)
        mean = weights @ logs
        spread = _WIDER * np.sqrt(weights @ (logs - mean) ** 2 + 1e-4)
        uniform = stats.qmc.Sobol(size, seed=generator).random(num)
        near = mean + spread * stats.norm.ppf(np.clip(uniform, _TINY, 1.0 - _TINY))
        both = np.concatenate([logs, near])
        sds = np.exp(both)
        # The prior over the mixture that they are drawn from, as densities of logarithms.
        of_prior = np.sum(stats.halfnorm.logpdf(sds, scale=scales) + both, axis=1)
        of_near = np.sum(stats.norm.logpdf(both, mean, spread), axis=1)
        ratio = of_prior - np.logaddexp(of_prior, of_near)
        found = np.concatenate([logs_of_first, self._log_densities(np.exp(near))], axis=1)
        weights = _normalized(found + ratio)
        kept = []
        for own in weights:
            places = (np.arange(num_kept) + generator.uniform()) / num_kept
            kept.append(sds[np.minimum(np.searchsorted(np.cumsum(own), places), len(sds) - 1)])
        shared = [self._shared(chosen, draw) for draw, chosen in enumerate(kept)]
        precisions = np.concatenate([part.precisions for part in shared])
        linear = np.concatenate([part.linear for part in shared]) + precisions @ self._phi
        picks = np.repeat(np.arange(len(kept)), num_kept)
        likelihood = LinearLikelihood(np.arange(len(self._phi)), precisions, linear)
        return EffectDraws(np.concatenate(kept), picks, likelihood, self._noise(kept))

    def _noise(self, kept: list[np.ndarray]) -> np.ndarray:
        """Returns the part of the shared precision that is the variance of privacy noise, [d, d].

        Integrating effects over multiplies a hospital's statistic by `I - P E Q E'`.
        """
        covariances = np.stack(
            [self.covariances(sds, draw).mean(axis=1) for draw, sds in enumerate(kept)], axis=1
        )
        back = np.einsum("mkai,mkab,jb->mij", self._rows, covariances, self._reach, optimize=True)
        left = np.eye(len(self._phi)) - back / self._sites.num_draws
        total: np.ndarray = np.sum(left @ self._sites.noise @ np.swapaxes(left, 1, 2), axis=0)
        return total

    def sample(
        self,
        phi: np.ndarray,
        draws: EffectDraws,
        picks: np.ndarray,
        generator: np.random.Generator,
    ) -> np.ndarray:
        """Returns draws of each hospital's effects given the shared parameters, shape [M, n, L].

        Args:
          phi: Draws of the shared parameters in whitened coordinates, shape [n, d].
          draws: The draws of tau.
          picks: Which of them each belongs to, shape [n].
          generator: The source of random numbers.
        """
        sds, curvature = draws.sds[picks], draws.picks[picks]
        covariances = self.covariances(sds, curvature)
        left = self._pull[:, curvature] - np.einsum(
            "mnai,ni->mna", self._rows[:, curvature], phi - self._phi
        )
        means = np.einsum("mnab,mnb->mna", covariances, left)
        values, vectors = np.linalg.eigh(covariances)
        roots = vectors * np.sqrt(np.maximum(values, 0.0))[..., None, :]
        normals = generator.normal(size=means.shape)
        sampled: np.ndarray = means + np.einsum("mnab,mnb->mna", roots, normals)
        return sampled

    def misfit(self) -> tuple[float, int]:
        """Returns Cochran's Q of the scores about common parameters, with effects of any size.

        Returns:
          Q, for the first draw of the curvature, and its degrees of freedom.
        """
        rows, pull = self._rows[:, 0], self._pull[:, 0]
        inverses = np.linalg.inv(self._own[:, 0])
        total = self._sites.precisions[:, 0].sum(axis=0)
        total = total - np.einsum("mai,mab,mbj->ij", rows, inverses, rows)
        right = self._sites.linear[:, 0].sum(axis=0)
        right = right - np.einsum("mai,mab,mb->i", rows, inverses, pull)
        # Along effects nothing is left that could tell the shared parameters.
        common = np.linalg.pinv(total, rcond=_TINY, hermitian=True)
        explained = np.einsum("ma,mab,mb->", pull, inverses, pull) + right @ common @ right
        degrees = (len(rows) - 1) * (len(right) - len(self._local.index))
        return float(self._sites.squares[:, 0].sum() - explained), degrees


def _normalized(logs: np.ndarray) -> np.ndarray:
    """Returns weights [K, n] of log densities, each row's with the sum 1."""
    weights = np.exp(logs - logs.max(axis=1, keepdims=True))
    normalized: np.ndarray = weights / weights.sum(axis=1, keepdims=True)
    return normalized


def _shares(sites: Sequence[SiteSums], curvatures: Curvatures) -> tuple[np.ndarray, np.ndarray]:
    """Returns each hospital's shares of the total's slope and of its variance, shape [M] each.

    They are those of its records, or of survey weights and of their squares, times what its own
    matrix says of the information per record.
    """
    size = len(curvatures.window.theta)
    shares, squares = shares_of(sites)
    total = float(np.trace(curvatures.matrices.mean(axis=0)))
    own = np.ones(len(sites))
    for place, site in enumerate(sites):
        matrix = site.mean("matrix")
        trace = float(np.trace(matrix) if matrix.ndim == 2 else matrix[:size].sum())
        expected = shares[place] * total
        noise = site.deviation("matrix") * np.sqrt(size) / expected
        trust = _OWN_SD**2 / (_OWN_SD**2 + noise**2)
        own[place] = max(_LEAST_OWN, 1.0 + trust * (trace / expected - 1.0))
    slopes, variances = shares * own, squares * own
    return slopes / slopes.sum(), variances / variances.sum()
