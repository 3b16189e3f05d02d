"""Draws of the curvature given its noisy release: a Wishart prior and a Gaussian likelihood."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import numpy as np
from scipy import linalg, special

from tfp_dpvi.calibrated.columns import FewUnlike
from tfp_dpvi.calibrated.hmc import hamiltonian
from tfp_dpvi.calibrated.window import MOST_KAPPA, Window

NUM_DRAWS = 32
# Of HMC.
_NUM_STEPS = 16


@dataclasses.dataclass(frozen=True)
class CurvaturePrior:
    """A Wishart prior of the curvature's matrix M.

    k < d degrees of freedom give a matrix of rank k; several values are a mixture with equal
    weights.

    Attributes:
      matrix: M0, the expected value up to a factor, shape [d, d].
      degrees: The degrees of freedom.
      log_factor_sd: Standard deviation of that factor's logarithm; its median is 1.
      kappa: Prior mean and standard deviation of the curvature over M.
      curvature: Expected curvature A if `matrix` is that of M; None for a multiple of it.
      error: Expected squared distance of a simulated `matrix` from that of N records.
      ridge: The number that was added to the diagonals of a simulated `matrix` and `curvature`.
      alike: Degrees of freedom of further parts of the mixture, in which a few columns may be
        unlike: see `FewUnlike`. Not for `draw_curvature`.
      intercept: See `FewUnlike`.
    """

    matrix: np.ndarray
    degrees: tuple[float, ...]
    log_factor_sd: float
    kappa: tuple[float, float] = (1.4, 0.3)
    curvature: np.ndarray | None = None
    error: float = 0.0
    ridge: float = 0.0
    alike: tuple[float, ...] = ()
    intercept: int = 0

    @classmethod
    def isotropic(cls, size: int, num_records: int, clip: float) -> CurvaturePrior:
        """Returns an isotropic prior from the clip alone, with about a fifth of the maximal trace.

        Its rank is uncertain, from d / 8 to d: inputs are often collinear, and in directions
        without information the posterior must equal the prior.

        Args:
          size: The number d of parameters.
          num_records: The number N of records.
          clip: The clip C, finite.
        """
        degrees = {max(1.0, round(size * share)) for share in (0.125, 0.25, 0.5, 1.0, 2.0, 8.0)}
        return cls(np.eye(size) * (0.2 * num_records * clip**2 / size), tuple(sorted(degrees)), 0.8)

    @property
    def slope(self) -> np.ndarray:
        """The expected curvature A up to a factor, shape [d, d]."""
        return self.matrix if self.curvature is None else self.curvature

    def weights(self, window: Window) -> np.ndarray:
        """Returns probabilities of the degrees given trace, squared norm and rank of the release.

        For several degrees `matrix` is a multiple of I. Trace and norm are approximated as normal,
        with the moments of a Wishart matrix; a rank has less weight if the rest of the release
        exceeds its noise.
        """
        if len(self.degrees) == 1 or window.matrix_sd == 0.0:
            return np.full(len(self.degrees), 1.0 / len(self.degrees))
        size, degrees = len(self.matrix), np.array(self.degrees)[:, None]
        noise, trace = window.matrix_sd**2, np.trace(self.matrix)
        released = np.trace(window.matrix), np.sum(window.matrix**2)
        log_ratio = math.log(max(released[0], 1e-9 * trace) / trace)
        widest = max(3.0 * self.log_factor_sd, abs(log_ratio) + 1.0)
        log_factor = np.linspace(-widest, widest, 401)
        trace = trace * np.exp(log_factor)
        length = trace**2 * (degrees + size + 1.0) / (degrees * size)
        pairs = size * (size + 1) / 2.0
        # Relative variance of the trace, plus an allowance for other spectra.
        spread = 2.0 / (degrees * size) + 0.01
        means = trace, length + noise * pairs
        variances = (
            noise * size + trace**2 * spread,
            2.0 * noise**2 * pairs + 4.0 * noise * length + 4.0 * length**2 * spread,
        )
        logs = -(log_factor**2) / (2.0 * self.log_factor_sd**2)
        for value, mean, variance in zip(released, means, variances, strict=True):
            logs = logs - ((value - mean) ** 2 / variance + np.log(variance)) / 2.0
        logs = special.logsumexp(logs, axis=1)
        values = np.sort(np.linalg.eigvalsh(window.matrix) ** 2)
        for number, degree in enumerate(self.degrees):
            rank = min(size, int(degree))
            free = (size - rank) * (size - rank + 1) / 2.0
            beside = np.sum(values[: size - rank]) / noise - free - 3.0 * math.sqrt(2.0 * free)
            logs[number] -= max(beside, 0.0) / 2.0
        return special.softmax(logs)

    def mismatch(self, window: Window) -> float:
        """Returns the relative distance of the release from the nearest multiple of `matrix`.

        It is the distance beyond noise, over the norm of that multiple.
        """
        size = len(self.matrix)
        factor = np.sum(window.matrix * self.matrix) / np.sum(self.matrix**2)
        # Chi-squared noise: its mean plus three standard deviations.
        free = size * (size + 1) / 2 - 1
        allowed = window.matrix_sd**2 * (free + 3.0 * math.sqrt(2.0 * free)) + 2.0 * self.error
        away = np.sum((window.matrix - factor * self.matrix) ** 2) - allowed
        length = abs(factor) * np.linalg.norm(self.matrix)
        return float(math.sqrt(max(away, 0.0)) / length) if length else math.inf

    def release_share(self, window: Window) -> float:
        """Returns the release's share of the information on M's shape: 0 if noise dominates."""
        size = len(self.matrix)
        # A Wishart matrix's variance.
        before = (np.trace(self.matrix) ** 2 + np.sum(self.matrix**2)) / self.degrees[-1]
        noise = window.matrix_sd**2 * size * (size + 1) / 2.0
        return float(before / (before + noise))


class NoisyCurvature:
    """The curvature given a noisy release of its matrix.

    Args:
      window: The released averages.
      prior: The prior of M and of A over M.
    """

    def __init__(self, window: Window, prior: CurvaturePrior) -> None:
        self._window, self._prior = window, prior

    @functools.cached_property
    def _few(self) -> list[FewUnlike]:
        window, prior = self._window, self._prior
        return [
            FewUnlike(
                window.matrix,
                window.matrix_sd,
                prior.matrix,
                factor_sd=prior.log_factor_sd,
                spike=degrees**-0.5,
                intercept=prior.intercept,
                most_trace=window.most_trace,
            )
            for degrees in prior.alike
        ]

    @functools.cached_property
    def _densities(self) -> list[_Bartlett | FewUnlike]:
        degrees = self._prior.degrees
        return [*(_Bartlett(self._window, self._prior, each) for each in degrees), *self._few]

    @functools.cached_property
    def evidence(self) -> np.ndarray:
        """Probabilities of the prior's degrees, then of `alike`, given the release.

        They are by Laplace's method, and by the filter of `FewUnlike`.
        They are alike without noise, where the degrees do not matter.
        """
        num = len(self._prior.degrees) + len(self._prior.alike)
        if num == 1 or self._window.matrix_sd == 0.0:
            return np.full(num, 1.0 / num)
        return special.softmax([density.log_evidence() for density in self._densities])

    @property
    def combined(self) -> float:
        """The probability that a column is nearly a combination of others, and how nearly a guess.

        See `FewUnlike.combined`; 0 without noise, or without `CurvaturePrior.alike`.
        """
        return self._mean_of(lambda few: few.combined)

    @property
    def weak(self) -> float:
        """See `FewUnlike.weak`; 0 without noise, or without `CurvaturePrior.alike`."""
        return self._mean_of(lambda few: few.weak)

    def _mean_of(self, probability: Callable[[FewUnlike], float]) -> float:
        """Returns the mean of a probability over the kinds of prior."""
        if self._window.matrix_sd == 0.0:
            return 0.0
        shares = self.evidence[len(self._prior.degrees) :]
        return float(
            sum(share * probability(few) for share, few in zip(shares, self._few, strict=True))
        )

    def matrices(self, weights: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        """Returns draws of M, for each number of degrees as many as its probability asks for.

        Args:
          weights: Probabilities of the prior's degrees, then of `alike`.
          generator: The source of random numbers.

        Returns:
          An array of shape [K, d, d]; K = 1 without noise.
        """
        if self._window.matrix_sd == 0.0:
            return self._window.matrix[None]
        edges = NUM_DRAWS * np.cumsum([0.0, *weights]) + generator.uniform()
        numbers = np.diff(np.floor(edges).astype(int))
        drawn = [
            density.draws(num, generator)
            for density, num in zip(self._densities, numbers, strict=True)
            if num
        ]
        return generator.permutation(np.concatenate(drawn))


def draw_curvature(
    window: Window, prior: CurvaturePrior, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Returns draws of (A, M) given their noisy release.

    A is the slope of the expected score, M half the variance of a step's pairs.

    Args:
      window: The released averages.
      prior: The prior of M and of A over M.
      generator: The source of random numbers.

    Returns:
      Arrays of shape [K, d, d]; K = 1 without noise.
    """
    matrices = NoisyCurvature(window, prior).matrices(prior.weights(window), generator)
    return with_slopes(window, prior, matrices, generator), matrices


def with_slopes(
    window: Window, prior: CurvaturePrior, matrices: np.ndarray, generator: np.random.Generator
) -> np.ndarray:
    """Returns a draw of A for each draw of M, from the release of what the cap of M cut.

    Args:
      window: The released averages.
      prior: The prior of A over M.
      matrices: Draws of M, shape [K, d, d].
      generator: The source of random numbers.
    """
    traces = np.trace(matrices, axis1=1, axis2=2)
    if window.scale_sd == 0.0:
        kappa = np.clip(window.scale / traces, 1.0, MOST_KAPPA)
    else:
        by_release, by_prior = (traces / window.scale_sd) ** 2, prior.kappa[1] ** -2
        mean = by_release * window.scale / traces + by_prior * prior.kappa[0]
        mean = mean / (by_release + by_prior)
        # Cut, not truncated: where little is clipped kappa is about 1, and the mean of a truncated
        # normal, larger the more noise there is, would call noise information.
        kappa = generator.normal(mean, 1.0 / np.sqrt(by_release + by_prior))
    kappa = np.where(np.isfinite(kappa), np.clip(kappa, 1.0, MOST_KAPPA), 1.0)
    # A / kappa: M, or corrected by a simulation for directions that are clipped more.
    like = matrices
    if prior.curvature is not None:
        like = shaped(matrices, prior.matrix, prior.curvature)
    slopes: np.ndarray = kappa[:, None, None] * like
    return slopes


def relative_to(matrix: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Returns another matrix in coordinates in which the first one is the identity.

    Args:
      matrix: Symmetric and positive definite, shape [d, d].
      other: Symmetric, shape [d, d].
    """
    root = linalg.cholesky(matrix, lower=True)
    half = linalg.solve_triangular(root, other, lower=True)
    relative: np.ndarray = linalg.solve_triangular(root, half.T, lower=True)
    return relative


def shaped(matrices: np.ndarray, expected: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Returns what differs from matrices as one differs from another in a simulation.

    Args:
      matrices: Draws of a matrix, shape [K, d, d].
      expected: The matrix in the simulation, shape [d, d].
      other: The other one in the simulation, shape [d, d].

    Returns:
      Matrices with the traces of the draws, shape [K, d, d].
    """
    relative = relative_to(expected, other)
    roots = np.linalg.cholesky(matrices + 1e-12 * np.eye(len(relative)) * np.trace(expected))
    shaped = roots @ relative @ np.swapaxes(roots, 1, 2)
    # What was cut in all directions together is released.
    traces = [np.trace(part, axis1=1, axis2=2) for part in (matrices, shaped)]
    return shaped * (traces[0] / traces[1])[:, None, None]


class _Bartlett:
    """The density log p(T, log a | M_hat) with M = a L0 T T' L0' / nu, as a function of a vector.

    Bartlett's factor T of a Wishart matrix with nu degrees of freedom is lower triangular with
    min(d, nu) columns. The vector has the entries of T by row, diagonal ones as logarithms, then
    log a.
    """

    def __init__(self, window: Window, prior: CurvaturePrior, degrees: float) -> None:
        size = len(prior.matrix)
        self._size = size
        self._released = window.matrix
        self._sd = window.matrix_sd
        self._most = window.most_trace
        self._nu = degrees
        self._factor_sd = prior.log_factor_sd
        self._root = linalg.cholesky(
            prior.matrix + 1e-9 * np.trace(prior.matrix) / size * np.eye(size), lower=True
        )
        self._rank = int(min(size, degrees))
        self._rows, self._columns = np.tril_indices(size, 0, self._rank)
        self._diagonal = np.flatnonzero(self._rows == self._columns)
        # Degrees of the chi-squared variables on the diagonal.
        self._shape = self._nu - np.arange(self._rank)

    def log_evidence(self) -> float:
        """Returns the log probability of the release, up to a constant, by Laplace's method."""
        mode, root = self.laplace
        (value,), _ = self.log_density(mode[None])
        # The densities of normals, of logarithms of chi variables, and of log a.
        num_normal = len(mode) - 1 - self._rank
        half = self._shape / 2.0
        constants = np.sum((1.0 - half) * math.log(2.0) - special.gammaln(half))
        constants -= num_normal * math.log(2.0 * math.pi) / 2.0
        constants -= math.log(self._factor_sd * math.sqrt(2.0 * math.pi))
        volume = len(mode) * math.log(2.0 * math.pi) / 2.0 - np.sum(np.log(np.diag(root)))
        return float(value + constants + volume)

    def draws(self, num: int, generator: np.random.Generator) -> np.ndarray:
        """Returns draws of M by HMC from the Laplace approximation, shape [num, d, d]."""
        mode, root = self.laplace
        normals = generator.normal(size=(num, len(mode)))
        start = mode + linalg.solve_triangular(root, normals.T, trans=1, lower=True).T
        traces = np.trace(self.matrices(start), axis1=1, axis2=2)
        # Larger traces would make HMC diverge.
        start[:, -1] -= np.log(np.maximum(1.0, traces / (0.9 * self._most)))
        # Proposals in float32, at half the time: the acceptance step corrects their error.
        inverse = linalg.lapack.strtri(root.astype(np.float32), lower=1)[0]

        def times_inverse(z: np.ndarray, transposed: int) -> np.ndarray:
            product: np.ndarray = linalg.blas.strmm(
                1.0, inverse, z.astype("f").T, lower=1, trans_a=1 - transposed
            )
            return product.T

        def whitened(z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            value, gradient = self.log_density(mode + times_inverse(z, 0))
            return value, times_inverse(gradient, 1)

        z = hamiltonian(
            whitened, (start - mode) @ root, generator, num_steps=_NUM_STEPS, num_leapfrogs=5
        )
        return self.matrices(mode + times_inverse(z[-1], 0))

    def _factors(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns L0 T, shape [n, d, rank], and a / nu, shape [n]."""
        entries = x[:, :-1].copy()
        entries[:, self._diagonal] = np.exp(entries[:, self._diagonal])
        factor = np.zeros((len(x), self._size, self._rank))
        factor[:, self._rows, self._columns] = entries
        return self._root @ factor, np.exp(x[:, -1]) / self._nu

    def matrices(self, x: np.ndarray) -> np.ndarray:
        """Returns M, shape [n, d, d]."""
        factor, scale = self._factors(x)
        return scale[:, None, None] * (factor @ np.swapaxes(factor, 1, 2))

    def log_density(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the log density and its gradient."""
        factor, scale = self._factors(x)
        matrix = scale[:, None, None] * (factor @ np.swapaxes(factor, 1, 2))
        residual = self._released - matrix
        excess = np.maximum(np.trace(matrix, axis1=1, axis2=2) / self._most - 1.0, 0.0) * 100.0
        slope = residual / self._sd**2 - (excess * 100.0 / self._most)[:, None, None] * np.eye(
            self._size
        )
        diagonal, others = x[:, self._diagonal], x[:, :-1] ** 2 / 2.0
        others[:, self._diagonal] = 0.0
        value = (
            -np.sum(residual**2, axis=(1, 2)) / (2.0 * self._sd**2)
            - excess**2 / 2.0
            + np.sum(self._shape * diagonal - np.exp(2.0 * diagonal) / 2.0, axis=1)
            - np.sum(others, axis=1)
            - x[:, -1] ** 2 / (2.0 * self._factor_sd**2)
        )
        by_factor = 2.0 * scale[:, None, None] * (self._root.T @ slope @ factor)
        gradient = np.empty_like(x)
        gradient[:, :-1] = by_factor[:, self._rows, self._columns] - x[:, :-1]
        on_diagonal = by_factor[:, range(self._rank), range(self._rank)] * np.exp(diagonal)
        gradient[:, self._diagonal] = on_diagonal + self._shape - np.exp(2.0 * diagonal)
        gradient[:, -1] = np.sum(slope * matrix, axis=(1, 2)) - x[:, -1] / self._factor_sd**2
        return value, gradient

    def _start(self) -> np.ndarray:
        """Returns the better start: the release's large eigenvalues, or a multiple of the mean."""
        inverse = linalg.solve_triangular(self._root, np.eye(self._size), lower=True)
        values, vectors = np.linalg.eigh(inverse @ self._released @ inverse.T)
        roots = np.sqrt(self._nu * np.maximum(values[-self._rank :], 0.1))
        kept = vectors[:, -self._rank :] * roots
        factor = np.linalg.qr(kept.T)[1].T
        factor = factor * np.sign(np.diag(factor))
        x = np.zeros((2, len(self._rows) + 1))
        x[0, :-1] = factor[self._rows, self._columns]
        x[0, self._diagonal] = np.log(np.maximum(x[0, self._diagonal], 0.1))
        mean = self._root @ self._root.T
        x[1, self._diagonal] = np.log(np.maximum(self._shape, 1.0)) / 2.0
        x[1, -1] = math.log(max(np.sum(self._released * mean) / np.sum(mean**2), 0.1))
        return x[[np.argmax(self.log_density(x)[0])]]

    @functools.cached_property
    def laplace(self) -> tuple[np.ndarray, np.ndarray]:
        """The mode, and a Cholesky factor of the Gauss-Newton Hessian.

        The Hessian is that at the mode or one small step before it.
        """
        x = self._start()
        (value,), gradient = self.log_density(x)
        damping = 1e-3
        hessian = self._hessian(x)
        for _ in range(30 if self._size <= 25 else 12):
            damped = hessian.copy()
            damped[np.diag_indices(len(damped))] *= 1.0 + damping
            step = linalg.cho_solve(linalg.cho_factor(damped, overwrite_a=True), gradient[0])
            trial = x + np.clip(step, -1.0, 1.0)
            (trial_value,), trial_gradient = self.log_density(trial)
            if trial_value > value:
                is_small = trial_value - value < 1e-2
                x, gradient = trial, trial_gradient
                value = trial_value
                damping /= 5.0
                if is_small:
                    break
                hessian = self._hessian(x)
            else:
                damping *= 10.0
        return x[0], linalg.cholesky(hessian, lower=True)

    def _hessian(self, x: np.ndarray) -> np.ndarray:
        """Returns the Gauss-Newton Hessian of the negative log density at one point, [1, n]."""
        factors, scales = self._factors(x)
        left, right = self._root, factors[0]
        i, j = self._rows, self._columns
        across = left.T @ right
        # Indexing rows, then columns is several times as fast as both at once.
        gram = np.take((left.T @ left)[i], i, axis=1)
        gram *= np.take((right.T @ right)[j], j, axis=1)
        gram += np.take(across[i], j, axis=1) * np.take(across.T[j], i, axis=1)
        matrix = right @ right.T
        by_scale = 2.0 * (left.T @ matrix @ right)[i, j]
        size = len(i)
        hessian = np.empty((size + 1, size + 1))
        hessian[:-1, :-1] = 2.0 * gram
        hessian[-1, :-1] = hessian[:-1, -1] = by_scale
        hessian[-1, -1] = np.sum(matrix**2)
        units = np.full(size + 1, scales[0] / self._sd)
        units[self._diagonal] *= np.exp(x[0, self._diagonal])
        hessian *= units[:, None]
        hessian *= units
        precision = np.ones(size + 1)
        precision[self._diagonal] = 2.0 * np.exp(2.0 * x[0, self._diagonal])
        precision[-1] = 1.0 / self._factor_sd**2
        hessian[np.diag_indices(size + 1)] += precision
        return hessian
