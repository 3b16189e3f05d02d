"""Dominating pairs of the subsampled Gaussian mechanism and their discretised privacy losses.

A release is priced by two distributions on the line. With u = sensitivity / standard deviation and
f the standard normal density:

* add-or-remove-one: P = (1-q) f(x) + q f(x-u) against Q = f(x), in both directions
  (Zhu, Dong and Wang 2022, "Optimal accounting of differential privacy via characteristic
  function", arXiv:2106.08567, theorem 11);
* replace-one: P = (1-q) f(x) + q f(x-u) against Q = (1-q) f(x) + q f(x+u), symmetric
  (the same paper; Lebeda, Regehr, Kamath and Steinke 2024, arXiv:2405.20769).

The loss L(x) = log P(x)/Q(x) grows with x, so a cell of losses is a cell of x. Each cell keeps its
P-mass and its Q-mass exactly while they move to the cell's two ends ("connect the dots",
Doroshenko, Ghazi, Kamath, Kumar and Manurangsi 2022, arXiv:2207.04380): the hockey-stick divergence
at the grid points is exact and elsewhere an upper bound, so every result errs on the private side.
Masses are integrals of positive functions (Gauss-Legendre): no digits are lost to differences.
"""

import dataclasses
import math

import numpy as np
from scipy import special

# Above this many cells two nodes per cell are exact enough, as cells are then cut narrower.
_MANY_CELLS = 20_000
_MAX_CELLS = 1 << 21


@dataclasses.dataclass(frozen=True)
class GaussianPair:
    """A dominating pair of one release.

    Attributes:
      probability: the sampling probability q in (0, 1].
      shift: u, the sensitivity over the noise's standard deviation.
      symmetric: True for replace-one (the mixture on both sides).
    """

    probability: float
    shift: float
    symmetric: bool

    def loss(self, x: np.ndarray) -> np.ndarray:
        """Returns L(x), elementwise."""
        up = self._log_mixture_ratio(x)
        return up - self._log_mixture_ratio(-x) if self.symmetric else up

    def _log_mixture_ratio(self, x: np.ndarray) -> np.ndarray:
        # log(1 - q + q exp(u x - u^2/2)), without losing digits where it is near zero.
        t = self.shift * x - 0.5 * self.shift**2
        if self.probability == 1.0:
            return t
        small = t < 30.0
        near = np.log1p(self.probability * np.expm1(np.where(small, t, 0.0)))
        if self.probability > 0.5:
            near = np.where(
                t < -1.0,
                np.logaddexp(math.log1p(-self.probability), math.log(self.probability) + t),
                near,
            )
        rest = (1.0 - self.probability) * np.exp(-np.where(small, 30.0, t))
        return np.where(small, near, t + np.log(self.probability + rest))

    def log_lower_density(self, x: np.ndarray) -> np.ndarray:
        """Returns log Q(x) of the lower distribution."""
        base = -0.5 * x * x - 0.5 * math.log(2.0 * math.pi)
        return base + self._log_mixture_ratio(-x) if self.symmetric else base

    def log_masses(self, left: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the logs of the masses that P and Q give to the intervals [left, right]."""
        q, u = self.probability, self.shift
        plain = _log_normal_mass(left, right)
        with np.errstate(divide="ignore"):
            log_q, log_rest = np.log(q), np.log1p(-q)
        upper = np.logaddexp(log_rest + plain, log_q + _log_normal_mass(left - u, right - u))
        if not self.symmetric:
            return upper, plain
        return upper, np.logaddexp(log_rest + plain, log_q + _log_normal_mass(left + u, right + u))

    def inverse_loss(self, loss: np.ndarray) -> np.ndarray:
        """Returns the x with L(x) = loss; minus infinity where no x has so small a loss."""
        q, u = self.probability, self.shift
        if self.symmetric:
            # q c y^2 + (1-q)(1-e^l) y - q c e^l = 0 for y = e^{ux}, c = e^{-u^2/2}, l = |loss|.
            size = np.abs(loss)
            with np.errstate(divide="ignore"):
                log_s = _log_expm1(size) + 0.5 * u * u - math.log(2.0 * q)
                log_s = log_s + (math.log1p(-q) if q < 1.0 else -math.inf)
            log_y = np.logaddexp(log_s, 0.5 * np.logaddexp(2.0 * log_s, size))
            return np.sign(loss) * log_y / u
        if q == 1.0:
            return (loss + 0.5 * u * u) / u
        with np.errstate(divide="ignore", invalid="ignore"):
            # (e^l - 1 + q) / q, in the form whose digits do not cancel: the second where losses are near log(1 - q).
            inside = np.where(
                loss > -0.5,
                np.expm1(np.minimum(loss, 30.0)) / q + 1.0,
                (np.exp(np.minimum(loss, 0.0)) - (1.0 - q)) / q,
            )
            near = np.log(np.where(inside > 0.0, inside, 0.0))
            far = loss + np.log1p(-(1.0 - q) * np.exp(-np.maximum(loss, 1.0))) - math.log(q)
        return (np.where(loss < 30.0, near, far) + 0.5 * u * u) / u

    def x_range(self, tail_mass: float) -> tuple[float, float]:
        """Returns the x outside which P, and on the left Q, holds at most `tail_mass`."""
        plain = -float(special.ndtri(0.25 * tail_mass))
        shifted = -float(special.ndtri(min(0.5, 0.25 * tail_mass / self.probability)))
        high = max(plain, self.shift + shifted)
        return (-high if self.symmetric else -plain), high

    def loss_range(self, tail_mass: float) -> tuple[float, float]:
        """Returns the losses at the ends of `x_range`."""
        low, high = self.loss(np.array(self.x_range(tail_mass)))
        return float(low), float(high)

    def loss_moments(self) -> tuple[float, float]:
        """Returns mean and variance of the loss under the upper distribution (rough quadrature)."""
        low, high = self.x_range(1e-16)
        x = np.linspace(low, high, 20001)
        loss = self.loss(x)
        weight = np.exp(self.log_lower_density(x) + loss) * (x[1] - x[0])
        total = weight.sum()
        mean = float((weight * loss).sum() / total)
        return mean, float((weight * (loss - mean) ** 2).sum() / total)


@dataclasses.dataclass(frozen=True)
class DiscreteLoss:
    """A privacy loss on the grid `step * (offset + k)`, rounded so that nothing is understated.

    Attributes:
      step: grid spacing.
      offset: index of the first grid point.
      masses: probability of each grid point, shape [n], float64.
      infinity_mass: probability of an infinite loss.
    """

    step: float
    offset: int
    masses: np.ndarray
    infinity_mass: float


def _log_expm1(x: np.ndarray) -> np.ndarray:
    safe = np.maximum(x, 1e-300)
    value = np.where(safe < 30.0, np.log(np.expm1(np.minimum(safe, 30.0))), safe)
    return np.where(x > 0.0, value, -np.inf)


def _by_quadrature(
    pair: GaussianPair,
    left: np.ndarray,
    width: np.ndarray,
    base: np.ndarray,
    step: float,
    points: int,
) -> np.ndarray:
    """Integrates over cells in which everything is smooth; all terms are positive."""
    sums = np.zeros((4, left.size))
    for node, weight in zip(*np.polynomial.legendre.leggauss(points), strict=True):
        x = left + 0.5 * (node + 1.0) * width
        rise = np.clip(pair.loss(x) - base, 0.0, step)
        log_density = pair.log_lower_density(x)
        parts = np.stack([np.expm1(rise), -np.expm1(rise - step)]) * (0.5 * weight) * width
        sums[:2] += parts * np.exp(log_density + base)
        if not pair.symmetric:
            sums[2:] += parts * np.exp(log_density)
    return sums


def _by_masses(
    pair: GaussianPair, left: np.ndarray, right: np.ndarray, base: np.ndarray, step: float
) -> np.ndarray:
    """The same from the cells' exact masses; wide cells (where the loss is flat) lose no digits."""
    log_upper, log_lower = pair.log_masses(left, right)
    upper, lower = np.exp(log_upper), np.exp(log_lower + base)
    sums = np.zeros((4, left.size))
    sums[0] = np.maximum(0.0, upper - lower)
    sums[1] = np.maximum(0.0, lower - upper * math.exp(-step))
    if not pair.symmetric:
        sums[2] = np.maximum(0.0, np.exp(log_upper - base) - np.exp(log_lower))
        sums[3] = np.maximum(0.0, np.exp(log_lower) - np.exp(log_upper - base - step))
    return sums


def _log_normal_mass(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    # log of the standard normal mass of [left, right], taken on the side where it is a lower tail.
    flip = left > 0.0
    low, high = np.where(flip, -right, left), np.where(flip, -left, right)
    top = special.log_ndtr(high)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(right > left, top + np.log(-np.expm1(special.log_ndtr(low) - top)), -np.inf)


def discretise(
    pair: GaussianPair, step: float, tail_mass: float = 1e-21
) -> tuple[DiscreteLoss, ...]:
    """Discretises the privacy loss of a pair: one entry if symmetric, else (remove, add).

    Formal guarantee: for every epsilon the hockey-stick divergence of the returned loss is at least
    that of the pair, up to relative rounding below 1e-7; so is that of any composition.

    Args:
      pair: the dominating pair.
      step: grid spacing of the losses.
      tail_mass: probability that may be counted as infinite loss.

    Returns:
      The loss of P against Q and, unless the pair is symmetric, that of Q against P.
    """
    low, high = pair.loss_range(tail_mass)
    first, last = math.floor(low / step), math.ceil(high / step)
    if last - first > _MAX_CELLS:
        raise ValueError(f"step={step} is too fine for a loss range of {high - low:.3g}.")
    grid = np.arange(first, last + 1)
    x_low, x_high = pair.x_range(tail_mass)
    edges = np.clip(pair.inverse_loss(grid * step), x_low, x_high)
    edges[0], edges[-1] = x_low, x_high
    edges = np.maximum.accumulate(edges)

    # above = integral of w (e^{L - e_lo} - 1), below = integral of w (1 - e^{L - e_hi}) over each
    # cell [e_lo, e_hi], with w = Q e^{e_lo} for P against Q and w = Q for Q against P.
    base = grid[:-1] * step
    width = np.diff(edges)
    many = grid.size > _MANY_CELLS
    narrow = width <= (0.02 if many else 0.25) / max(1.0, pair.shift)
    sums = np.empty((4, width.size))
    sums[:, narrow] = _by_quadrature(
        pair, edges[:-1][narrow], width[narrow], base[narrow], step, 2 if many else 4
    )
    wide = ~narrow
    sums[:, wide] = _by_masses(pair, edges[:-1][wide], edges[1:][wide], base[wide], step)
    above, below, above_lower, below_lower = sums

    shrink = -math.expm1(-step)
    # P against Q: masses at the two ends of a cell that keep both its P-mass and its Q-mass.
    upper = np.zeros(grid.size)
    upper[1:] += above / shrink
    upper[:-1] += below / shrink
    forward = DiscreteLoss(step, first, upper, tail_mass)
    if pair.symmetric:
        return (forward,)
    # Q against P: the loss is -L, so the ends swap and the masses are those of Q.
    lower = np.zeros(grid.size)
    lower[1:] += above_lower / math.expm1(step)
    lower[:-1] += below_lower / shrink
    return forward, DiscreteLoss(step, -last, lower[::-1].copy(), tail_mass)
