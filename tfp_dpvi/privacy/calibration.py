"""Searches: the smallest noise multiplier and the largest number of releases that keep within a target epsilon."""

import math
from collections.abc import Callable, Sequence

from tfp_dpvi.privacy.errors import BudgetExhaustedError

_TOLERANCE = 0.002
_LOW, _HIGH = math.log(1e-2), math.log(1e7)  # of the noise multiplier
_MAX_STRIDE = 1.5
_MAX_EVALUATIONS = 60


def smallest_noise_multiplier(
    epsilons: Sequence[tuple[Callable[[float], float], float]], target: float, guess: float
) -> float:
    """Returns z with `epsilon(z) <= target` that uses at least 99.8 % of what is left of the target.

    Args:
      epsilons: (epsilon as a non-increasing function of the noise multiplier, what was spent before by the same
        reckoning), from quick and rough to exact; each search starts where the one before ended.
      target: the epsilon not to exceed, by the last of them.
      guess: where to start, greater than zero.

    Returns:
      A noise multiplier at which the last function was itself evaluated.

    Raises:
      BudgetExhaustedError: if no noise up to 1e7 keeps within the target.
    """
    left = target - epsilons[-1][1]
    x, slope = math.log(guess), -1.0
    for epsilon_of, spent in epsilons:

        def gap(x: float, epsilon_of: Callable[[float], float] = epsilon_of, spent: float = spent) -> float:
            # Nearly a straight line in log z, whatever was spent before. Rounding must not let an excess pass.
            share = (epsilon_of(math.exp(x)) - spent) / left
            return math.log(min(max(share, 1e-9), 1e9)) + 1e-15 * target / left

        found = _smallest(gap, x, slope)
        if found is not None:
            x, slope = found
    if found is None:
        rest = f" ({left:.6g} of it is left)" if epsilons[-1][1] > 0.0 else ""
        raise BudgetExhaustedError(
            f"no noise multiplier up to {math.exp(_HIGH):g} keeps within epsilon={target:.6g}{rest}; allow a larger epsilon or "
            "fewer releases."
        )
    return math.exp(x)


def _smallest(gap: Callable[[float], float], x: float, slope: float) -> tuple[float, float] | None:
    """Returns x with -tolerance <= gap(x) <= 0, or the least one found at a jump, and the slope there.

    Newton's steps with the slope of the last two points, kept within the bracket.
    """
    low, high = -math.inf, math.inf  # exceeds the target / keeps within it
    before: tuple[float, float] | None = None
    for turn in range(_MAX_EVALUATIONS):
        x = min(max(x, _LOW), _HIGH)
        value = gap(x)
        if before is not None and x != before[0]:
            slope = min(max((value - before[1]) / (x - before[0]), -20.0), -0.1)
        before = x, value
        if value <= 0.0:
            high = x
            if value >= -_TOLERANCE or x == _LOW:
                return x, slope
        else:
            low = x
            if x == _HIGH:
                return None
        if high - low < 1e-5:
            return high, slope
        stride = -(value + 0.4 * _TOLERANCE) / slope
        x += min(max(stride, -_MAX_STRIDE), _MAX_STRIDE)
        width = high - low
        if width < math.inf and (turn % 4 == 3 or not low + 0.01 * width <= x <= high - 0.01 * width):
            x = 0.5 * (low + high)
    return None if high == math.inf else (high, slope)


def guess_noise_multiplier(left: float, delta: float, q: float, num_releases: int, replace: bool) -> float:
    """Returns a rough noise multiplier over A (or D / 2) by the central limit theorem.

    T releases at sampling rate q behave like one Gaussian release with
    mu = q sqrt(T (e^{1/z^2} - 1)) (Bu, Dong, Long and Su 2020, arXiv:1911.11607).
    """
    tail = math.sqrt(2.0 * math.log(1.0 / delta))
    mu = max(math.sqrt(tail**2 + 2.0 * left) - tail, 1e-9) * 1.15  # epsilon = mu tail + mu^2 / 2
    mu /= 2.0 if replace else 1.0
    if q >= 1.0:
        return math.sqrt(num_releases) / mu
    return 1.0 / math.sqrt(math.log1p((mu / q) ** 2 / num_releases))


def largest_count(epsilon_of: Callable[[int], float], target: float, limit: int) -> int:
    """Returns the largest n in [0, limit] with `epsilon_of(n) <= target`, which does not decrease; n was itself evaluated."""

    def log_of(value: float) -> float:
        return math.log(min(max(value / target, 1e-300), 1e9))

    if limit <= 0 or (first := epsilon_of(1)) > target:
        return 0
    if epsilon_of(limit) <= target:
        return limit
    low, low_gap = 1, log_of(first)
    high, high_gap = limit, math.inf
    # Epsilon grows like a power of n: gallop, then regula falsi on logarithms, and every third time halve.
    trial, turn = low, 0
    while high - low > 1:
        if math.isinf(high_gap):
            trial = min(high - 1, 4 * trial)
        elif turn % 3 == 2 or high_gap <= low_gap:
            trial = (low + high) // 2
        else:
            share = low_gap / (low_gap - high_gap)
            trial = round(math.exp(math.log(low) + share * (math.log(high) - math.log(low))))
        trial = min(high - 1, max(low + 1, trial))
        turn += 1
        value = epsilon_of(trial)
        if value <= target:
            low, low_gap = trial, log_of(value)
        else:
            high, high_gap = trial, log_of(value)
    return low
