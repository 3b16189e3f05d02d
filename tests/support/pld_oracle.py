"""The oracle: epsilon and delta by privacy losses that were discretised and composed by hand, without dp_accounting.

It priced every release before dp_accounting 0.6 did; the package's figures are held against it. Rounded upwards.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

import numpy as np
from scipy import fft

from support.gaussian_oracle import gaussian_delta, gaussian_epsilon
from support.pld_pairs import DiscreteLoss, GaussianPair, discretise

# Mass that a composed loss may leave outside its window; it is added to the infinite loss.
_TAIL_MASS = 1e-15
# Orders tried by the Chernoff bounds, per unit of loss. Any set of orders gives a valid bound.
_ORDERS = np.geomspace(1e-3, 1e5, 97)
_BLOCKS = 4096


class _Tails:
    """Logs of the moment generating function of one loss at `_ORDERS` and at their negatives."""

    def __init__(self, loss: DiscreteLoss) -> None:
        size = loss.masses.size
        points, masses = np.arange(size, dtype=np.float64), loss.masses
        if size > 2 * _BLOCKS:
            # Move each block's mass to its two ends, keeping its mean: by convexity this can only
            # raise the moment generating function, so the bounds stay valid.
            width = -(-size // _BLOCKS)
            starts = np.arange(0, size, width)
            mass = np.add.reduceat(masses, starts)
            first = np.add.reduceat(masses * (points % width), starts) / width
            points = np.append(starts, starts[-1] + width).astype(np.float64)
            masses = np.append(mass - first, 0.0)
            masses[1:] += first
        keep = masses > 0.0
        self._x = points[keep] * loss.step
        self._log_masses = np.log(masses[keep])
        # Losses are counted from the first grid point, so that offsets cancel nothing.
        self.up = np.array([self._log_mgf(order) for order in _ORDERS])
        self.down = np.array([self._log_mgf(-order) for order in _ORDERS])

    def _log_mgf(self, order: float) -> float:
        exponent = order * self._x + self._log_masses
        top = float(exponent.max())
        return top + math.log(float(np.exp(exponent - top).sum()))


def window(
    losses: Sequence[DiscreteLoss], counts: Sequence[int], tails: Sequence[_Tails] | None = None
) -> tuple[int, int]:
    """Returns grid indices [low, high] that hold all but `_TAIL_MASS` of the composed loss."""
    tails = [_Tails(x) for x in losses] if tails is None else tails
    start = sum(n * x.offset for x, n in zip(losses, counts, strict=True))
    end = start + sum(n * (x.masses.size - 1) for x, n in zip(losses, counts, strict=True))
    log_tail = math.log(2.0 / _TAIL_MASS)
    up = sum(n * t.up for t, n in zip(tails, counts, strict=True)) + log_tail
    down = sum(n * t.down for t, n in zip(tails, counts, strict=True)) + log_tail
    step = losses[0].step
    high = start + math.ceil(float(np.min(up / _ORDERS)) / step)
    low = start + math.floor(float(np.max(-down / _ORDERS)) / step)
    return max(low, start), max(min(high, end), max(low, start) + 1)


def _spectrum(loss: DiscreteLoss, size: int) -> np.ndarray:
    masses = loss.masses
    if masses.size > size:  # fold: the transform is circular anyway
        padded = np.zeros(-(-masses.size // size) * size)
        padded[: masses.size] = masses
        masses = padded.reshape(-1, size).sum(axis=0)
    return fft.rfft(masses, size)


def _rounding_mass(n: int) -> float:
    # What the rounding of the transform may misplace over n compositions, counted as infinite loss.
    # Measured against the closed form of the Gaussian: 2e-14 at n = 1e3, 4e-12 at n = 1e6.
    return 1e-15 * math.sqrt(n) + 1e-17 * n


class Composer:
    """Composes fixed single losses any number of times, transforming each of them once.

    Args:
      losses: single-release losses on one common step.
      max_counts: the largest number of times that each may be composed; fixes the window.
    """

    def __init__(self, losses: Sequence[DiscreteLoss], max_counts: Sequence[int]) -> None:
        self._losses = tuple(losses)
        self._tails = [_Tails(loss) for loss in losses]
        low, high = window(self._losses, max_counts, self._tails)
        self.window_size = high - low + 1
        self._spectra: dict[int, list[np.ndarray]] = {}

    def _transform(self, window_size: int) -> tuple[int, list[np.ndarray]]:
        # A few sizes only, so that a curve over many step counts transforms little.
        size = int(
            fft.next_fast_len(
                math.ceil(2.0 ** (math.ceil(2.0 * math.log2(window_size)) / 2.0)), real=True
            )
        )
        if size not in self._spectra:
            self._spectra[size] = [_spectrum(loss, size) for loss in self._losses]
        return size, self._spectra[size]

    def __call__(self, counts: Sequence[int]) -> DiscreteLoss:
        """Returns the loss of `counts[i]` releases of each kind i (all at most `max_counts`)."""
        low, high = window(self._losses, counts, self._tails)
        size, spectra = self._transform(high - low + 1)
        product = None
        infinity = _TAIL_MASS + _rounding_mass(sum(counts))
        origin = 0
        log_finite = 0.0
        for loss, n, spectrum in zip(self._losses, counts, spectra, strict=True):
            if n == 0:
                continue
            power = spectrum**n
            product = power if product is None else product * power
            origin += n * loss.offset
            log_finite += n * math.log1p(-loss.infinity_mass)
        infinity -= math.expm1(log_finite)
        if product is None:
            return DiscreteLoss(self._losses[0].step, 0, np.ones(1), 0.0)
        masses = fft.irfft(product, size)
        # irfft is circular: index k stands for origin + k modulo the size.
        masses = np.roll(masses, -((low - origin) % size))[: high - low + 1]
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


STEP = 1e-4
_MAX_SIZE = 1 << 20
# Deltas below this drown in the rounding of the Fourier transform of long compositions.
SMALLEST_DELTA = 1e-10


def composers(pairs: Sequence[tuple[GaussianPair, int]], step: float) -> list[Composer]:
    """One composer per direction (one where both are equal), coarsened until it fits."""
    # The mass that each release may count as infinite loss: 1e-16 of the whole composition.
    tail = 1e-16 / max(1, sum(n for _, n in pairs))
    widest = max(high - low for low, high in (p.loss_range(tail) for p, _ in pairs))
    while widest / step > _MAX_SIZE:
        step *= 2.0
    while True:
        singles = [discretise(p, step, tail) for p, _ in pairs]
        counts = [n for _, n in pairs]
        directions = max(len(s) for s in singles)
        columns = [[s[min(d, len(s) - 1)] for s in singles] for d in range(directions)]
        machines = [Composer(c, counts) for c in columns]
        size = max(m.window_size for m in machines)
        if size <= _MAX_SIZE:
            return machines
        step *= 2.0 ** math.ceil(math.log2(size / _MAX_SIZE))


@functools.lru_cache(maxsize=4)
def curves(
    releases: tuple[tuple[float, float, int], ...], replace: bool, step: float
) -> tuple[HockeyStick, ...]:
    """One curve per direction of releases (q, z, count), q = 1 for all records; z is over the clip."""
    pairs = [(GaussianPair(q, 1.0 / z, replace), n) for q, z, n in releases if q < 1.0]
    shift = shift_of(releases, replace)
    if shift > 0.0:
        pairs.append((GaussianPair(1.0, shift, False), 1))
    counts = [n for _, n in pairs]
    return tuple(HockeyStick.of(machine(counts)) for machine in composers(pairs, step))


def shift_of(releases: Sequence[tuple[float, float, int]], replace: bool) -> float:
    """Sensitivity over standard deviation of all releases on all records together."""
    return (2.0 if replace else 1.0) * math.sqrt(
        math.fsum(n / z**2 for q, z, n in releases if q == 1.0)
    )


def epsilon(
    releases: Sequence[tuple[float, float, int]], delta: float, replace: bool, step: float = STEP
) -> float:
    """Epsilon of releases (q, z, count); in closed form where all of them take every record."""
    releases = tuple(sorted(r for r in releases if r[2]))
    if all(q == 1.0 for q, _, _ in releases):
        return gaussian_epsilon(delta, shift_of(releases, replace))
    return max(curve.epsilon(delta) for curve in curves(releases, replace, step))


def delta(
    releases: Sequence[tuple[float, float, int]], epsilon: float, replace: bool, step: float = STEP
) -> float:
    """Delta of releases (q, z, count)."""
    releases = tuple(sorted(r for r in releases if r[2]))
    if all(q == 1.0 for q, _, _ in releases):
        return gaussian_delta(epsilon, shift_of(releases, replace))
    return max(curve.delta(epsilon) for curve in curves(releases, replace, step))
