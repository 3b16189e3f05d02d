"""Composition of discretised privacy losses, and epsilon and delta of the result."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from scipy import fft

from tfp_dpvi.privacy._dominating_pairs import DiscreteLoss

# Mass that a composed loss may leave outside its window; it is added to the infinite loss.
_TAIL_MASS = 1e-15
# Orders of the Chernoff bound, relative to the best one for a normal law.
_RELATIVE_ORDERS = (0.1, 0.2, 0.35, 0.5, 0.7, 0.85, 1.0, 1.3, 1.8, 3.0, 6.0)


def _log_mgf(loss: DiscreteLoss, order: float) -> float:
    # log sum_k p_k e^{order * step * k}, k counted from the first grid point.
    exponent = order * loss.step * np.arange(loss.masses.size)
    top = exponent[-1] if order > 0.0 else 0.0
    return top + math.log(float(np.dot(loss.masses, np.exp(exponent - top))))


def window(losses: Sequence[DiscreteLoss], counts: Sequence[int]) -> tuple[int, int]:
    """Returns grid indices [low, high] that hold all but `_TAIL_MASS` of the composed loss.

    A Chernoff bound on each side, so the statement holds whatever the orders tried.
    """
    low = sum(n * loss.offset for loss, n in zip(losses, counts, strict=True))
    high = low + sum(n * (x.masses.size - 1) for x, n in zip(losses, counts, strict=True))
    start = low
    mean = variance = 0.0
    for loss, n in zip(losses, counts, strict=True):
        k = np.arange(loss.masses.size)
        total = float(loss.masses.sum())
        m = float(np.dot(loss.masses, k)) / total
        mean += n * m
        variance += n * float(np.dot(loss.masses, (k - m) ** 2)) / total
    step = losses[0].step
    log_tail = math.log(2.0 / _TAIL_MASS)
    best = math.sqrt(2.0 * log_tail / max(variance, 1.0)) / step
    for relative in _RELATIVE_ORDERS:
        for order in (relative * best, -relative * best):
            log_mgf = sum(n * _log_mgf(x, order) for x, n in zip(losses, counts, strict=True))
            bound = (log_mgf + log_tail) / (order * step)
            if not math.isfinite(bound):
                continue
            if order > 0.0:
                high = min(high, start + math.ceil(bound))
            else:
                low = max(low, start + math.floor(bound))
    return low, max(high, low + 1)


def _spectrum(loss: DiscreteLoss, size: int) -> np.ndarray:
    masses = loss.masses
    if masses.size > size:  # fold: the transform is circular anyway
        padded = np.zeros(-(-masses.size // size) * size)
        padded[: masses.size] = masses
        masses = padded.reshape(-1, size).sum(axis=0)
    return fft.rfft(masses, size)


class Composer:
    """Composes fixed single losses any number of times, transforming each of them once.

    Args:
      losses: single-release losses on one common step.
      max_counts: the largest number of times that each may be composed; fixes the window.
    """

    def __init__(self, losses: Sequence[DiscreteLoss], max_counts: Sequence[int]) -> None:
        self._losses = tuple(losses)
        self._max_low, self._max_high = window(losses, max_counts)
        self._size = fft.next_fast_len(self._max_high - self._max_low + 1, real=True)
        self._spectra = [_spectrum(loss, self._size) for loss in losses]

    def __call__(self, counts: Sequence[int]) -> DiscreteLoss:
        """Returns the loss of `counts[i]` releases of each kind i (all at most `max_counts`)."""
        low, high = window(self._losses, counts)
        if high - low + 1 > self._size:
            raise ValueError("counts exceed max_counts of this composer.")
        product = None
        infinity = _TAIL_MASS
        origin = 0
        log_finite = 0.0
        for loss, n, spectrum in zip(self._losses, counts, self._spectra, strict=True):
            if n == 0:
                continue
            power = spectrum**n
            product = power if product is None else product * power
            origin += n * loss.offset
            log_finite += n * math.log1p(-loss.infinity_mass)
        infinity -= math.expm1(log_finite)
        if product is None:
            return DiscreteLoss(self._losses[0].step, 0, np.ones(1), 0.0)
        masses = fft.irfft(product, self._size)
        # irfft is circular: index k stands for origin + k modulo the size.
        masses = np.roll(masses, -((low - origin) % self._size))[: high - low + 1]
        # Rounding leaves values of about -1e-17; lifting them to zero only adds mass.
        return DiscreteLoss(self._losses[0].step, low, np.maximum(masses, 0.0), infinity)


@dataclasses.dataclass(frozen=True)
class HockeyStick:
    """Delta as a function of epsilon >= 0 for one composed loss.

    Holds, for each grid point of non-negative loss, the upper and the lower mass beyond it.
    """

    losses: np.ndarray
    upper_mass: np.ndarray
    lower_mass: np.ndarray
    infinity_mass: float
    delta_at_zero: float

    @classmethod
    def of(cls, loss: DiscreteLoss) -> "HockeyStick":
        """Prepares the curve of a discretised loss."""
        first = max(0, 1 - loss.offset)  # strictly positive losses only
        masses = loss.masses[first:]
        losses = (loss.offset + first + np.arange(masses.size)) * loss.step
        upper = np.cumsum(masses[::-1])[::-1]
        lower = np.cumsum((masses * np.exp(-losses))[::-1])[::-1]
        zero = loss.infinity_mass
        if masses.size:
            zero += float(upper[0] - lower[0])
        return cls(losses, upper, lower, loss.infinity_mass, max(0.0, zero))

    def delta(self, epsilon: float) -> float:
        """Returns the smallest delta that goes with `epsilon`."""
        k = int(np.searchsorted(self.losses, epsilon, side="right"))
        if k >= self.losses.size:
            return min(1.0, self.infinity_mass)
        with np.errstate(over="ignore"):
            lower = float(self.lower_mass[k])
            given = math.exp(epsilon + math.log(lower)) if lower > 0.0 else 0.0
        return min(1.0, max(0.0, self.infinity_mass + float(self.upper_mass[k]) - given))

    def epsilon(self, delta: float) -> float:
        """Returns the smallest epsilon >= 0 that goes with `delta`, infinity if there is none."""
        if self.infinity_mass > delta:
            return math.inf
        if self.delta_at_zero <= delta or not self.losses.size:
            return 0.0
        # Delta at each grid point counts the masses strictly beyond it.
        upper = np.append(self.upper_mass[1:], 0.0)
        lower = np.append(self.lower_mass[1:], 0.0)
        with np.errstate(divide="ignore", over="ignore"):
            given = np.exp(self.losses + np.log(lower))
        deltas = self.infinity_mass + upper - np.where(lower > 0.0, given, 0.0)
        k = int(np.argmax(deltas <= delta))  # first grid point at which delta is reached
        lower_mass = float(self.lower_mass[k])
        excess = self.infinity_mass + float(self.upper_mass[k]) - delta
        if lower_mass <= 0.0:
            return float(self.losses[k])
        if excess <= 0.0:
            return float(self.losses[k - 1]) if k else 0.0
        return float(min(self.losses[k], max(0.0, math.log(excess) - math.log(lower_mass))))
