"""Searches for the smallest noise multiplier, or the most releases, within a target epsilon."""

import bisect
import math
from collections.abc import Callable

from tfp_dpvi.privacy.errors import BudgetExhaustedError

_TOLERANCE = 0.002
# A typical slope of log(epsilon - spent) over log(noise multiplier).
_SLOPE = -1.6
# Typical settings take 3 to 11 evaluations. Later ones bisect, since epsilon has plateaus.
_SECANTS = 12
# The range of log(noise multiplier).
_LOW, _HIGH = math.log(1e-2), math.log(1e7)


def smallest_noise_multiplier(
    epsilon_of: Callable[[float], float], target: float, spent: float, guess: float
) -> float:
    """Returns z with `epsilon_of(z) <= target` that uses at least 99.8 % of the remaining target.

    It uses the secant method on logarithms, whose relation is nearly linear, within a bracket, and
    then bisection: `epsilon_of` does not increase except for jumps where the grid changes. If a
    jump leaves more of the target, the result is within 0.02 % of a noise multiplier that exceeds
    the target. `epsilon_of` was evaluated at the result.

    Args:
      epsilon_of: Returns the total epsilon at a noise multiplier.
      target: The epsilon that the total must not exceed.
      spent: The part of the target that earlier releases have spent.
      guess: The noise multiplier to begin with.

    Raises:
      BudgetExhaustedError: No noise multiplier up to 1e7 meets the target.
    """
    left = target - spent
    # At `low` the total exceeds the target, at `high` it meets it.
    low, high = -math.inf, math.inf
    x = before = min(max(math.log(guess), _LOW), _HIGH)
    last = math.nan
    slope = _SLOPE
    turn = 0
    while high - low > 0.1 * _TOLERANCE:
        turn += 1
        share = (epsilon_of(math.exp(x)) - spent) / left
        # Rounding must not let an excess pass.
        value = math.log(min(max(share, 1e-9), 1e9)) + 1e-15 * target / left
        if x != before:
            slope = min(max((value - last) / (x - before), -20.0), -1.0)
        before, last = x, value
        if value <= 0.0:
            high = x
            if value >= -_TOLERANCE or x == _LOW:
                break
        else:
            low = x
            if x == _HIGH:
                rest = f" ({left:.6g} of it is left)" if spent > 0.0 else ""
                raise BudgetExhaustedError(
                    f"no noise multiplier up to 1e7 meets epsilon={target:.6g}{rest}; allow a "
                    "larger epsilon or fewer releases."
                )
        x = min(max(x - min(max((value + 0.4 * _TOLERANCE) / slope, -1.5), 1.5), _LOW), _HIGH)
        if turn >= _SECANTS:
            x = _HIGH if high == math.inf else 0.5 * (max(low, _LOW) + high)
        elif not low < x < high:
            x = 0.5 * (low + high)
    return math.exp(high)


def guess_noise_multiplier(
    left: float, delta: float, q: float, num_releases: int, replace: bool
) -> float:
    """Returns a rough noise multiplier over A (or D / 2) by the central limit theorem.

    T releases at sampling rate q behave like one Gaussian release with
    mu = q sqrt(T (e^{1/z^2} - 1)) (Bu, Dong, Long and Su 2020, arXiv:1911.11607).

    Args:
      left: The epsilon that is left to spend, above 0.
      delta: Strictly between 0 and 1.
      q: The sampling rate, in (0, 1].
      num_releases: T, at least 1.
      replace: Whether the neighboring relation is replace-one.
    """
    tail = math.sqrt(2.0 * math.log(1.0 / delta))
    # This solves epsilon = mu tail + mu^2 / 2.
    mu = max(math.sqrt(tail**2 + 2.0 * left) - tail, 1e-9) * 1.15
    mu /= 2.0 if replace else 1.0
    if q >= 1.0:
        return math.sqrt(num_releases) / mu
    return 1.0 / math.sqrt(math.log1p((mu / q) ** 2 / num_releases))


def largest_count(epsilon_of: Callable[[int], float], target: float, limit: int) -> int:
    """Returns the largest n in [0, limit] with `epsilon_of(n) <= target`.

    Args:
      epsilon_of: Returns the total epsilon of n releases; does not decrease.
      target: The epsilon that the total must not exceed.
      limit: The largest number to consider.
    """
    if limit > 0 and epsilon_of(limit) <= target:
        return limit
    return bisect.bisect_left(
        range(1, limit), True, key=lambda count: not epsilon_of(count) <= target
    )
