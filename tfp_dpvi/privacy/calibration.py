"""Finds the smallest noise multiplier that keeps within a target epsilon."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from tfp_dpvi.privacy.errors import BudgetExhaustedError

if TYPE_CHECKING:
    from tfp_dpvi.privacy.plan import PrivacyPlan

_TOLERANCE = 0.002
_MAX_NOISE = 1e7
_MIN_NOISE = 1e-2
_MAX_EVALUATIONS = 60


def smallest_noise_multiplier(
    epsilon_of: Callable[[float], float], target: float, guess: float, floor: float = 0.0
) -> float:
    """Returns z with `epsilon_of(z) <= target`, within 0.2 % of what is left of the target.

    Args:
      epsilon_of: epsilon as a non-increasing function of the noise multiplier.
      target: the epsilon not to exceed.
      guess: where to start, greater than zero.
      floor: epsilon with infinite noise (what was spent before), below `target`.

    Returns:
      A noise multiplier that was itself evaluated, so the target holds as reported.

    Raises:
      BudgetExhaustedError: if no noise up to 1e7 keeps within the target.
    """
    tolerance = _TOLERANCE * (1.0 - floor / target)

    def gap(log_z: float) -> float:
        value = epsilon_of(math.exp(log_z))
        return math.log(min(max(value / target, 1e-9), 1e9))

    low, high = math.log(_MIN_NOISE), math.log(_MAX_NOISE)  # exceeds the target / keeps within it
    low_gap: float | None = None
    high_gap: float | None = None
    stride = 0.0
    x = min(max(math.log(guess), low), high)
    for _ in range(_MAX_EVALUATIONS):
        value = gap(x)
        if value <= 0.0:
            high, high_gap = x, value
            if value >= -tolerance or x <= math.log(_MIN_NOISE):
                return math.exp(x)
        else:
            low, low_gap = x, value
            if x >= math.log(_MAX_NOISE):
                break
        if high - low < 1e-4:
            break
        aim = -0.4 * tolerance
        if low_gap is not None and high_gap is not None:
            # Regula falsi on log z, kept off the ends so that the bracket always shrinks.
            share = (low_gap - aim) / (low_gap - high_gap)
            x = low + min(max(share, 0.02), 0.98) * (high - low)
        else:
            # Epsilon falls roughly like 1/z. Strides grow, as near the end of a budget it hardly falls.
            stride = max(1.05 * abs(value - aim) + 0.002, 2.0 * stride)
            x = x + stride if value > 0.0 else x - stride
            x = min(max(x, math.log(_MIN_NOISE)), math.log(_MAX_NOISE))
    if high_gap is None:
        raise BudgetExhaustedError(
            f"no noise multiplier up to {_MAX_NOISE:g} keeps epsilon within {target:.6g}: "
            "too little of the budget is left. Allow a larger epsilon or fewer releases."
        )
    return math.exp(high)


def guess_noise_multiplier(plan: "PrivacyPlan", target: float, delta: float) -> float:
    """Returns a rough noise multiplier for a plan by the central limit theorem.

    T releases at sampling rate q behave like one Gaussian release with
    mu = q sqrt(T (e^{1/z^2} - 1)) (Bu, Dong, Long and Su 2020, arXiv:1911.11607).
    """
    tail = math.sqrt(2.0 * math.log(1.0 / delta))
    mu = math.sqrt(tail**2 + 2.0 * target) - tail  # epsilon = mu tail + mu^2 / 2
    mu = max(mu, 1e-9) * 1.15
    releases = max(1, plan.num_releases)
    unit = plan.sampling.unit_sensitivity(plan.sensitivity, plan.neighboring_relation)
    factor = 2.0 if plan.neighboring_relation.name == "REPLACE_ONE" else 1.0
    q = getattr(plan.sampling, "probability", 1.0)
    if q >= 1.0:
        return unit * factor * math.sqrt(releases) / mu
    return unit / math.sqrt(math.log1p((mu / (factor * q)) ** 2 / releases))


def largest_count(epsilon_of: Callable[[int], float], target: float, limit: int) -> int:
    """Returns the largest n in [0, limit] with `epsilon_of(n) <= target`, found by evaluation.

    Args:
      epsilon_of: epsilon as a non-decreasing function of a count; `epsilon_of(0)` may be anything.
      target: the epsilon not to exceed.
      limit: the largest count considered.

    Returns:
      A count that was itself evaluated (or 0), whose successor exceeds the target or the limit.
    """
    if limit <= 0 or epsilon_of(1) > target:
        return 0
    low, low_gap = 1, math.log(max(epsilon_of(1), 1e-300) / target)
    high, high_gap = limit, math.inf
    if epsilon_of(limit) <= target:
        return limit
    # Epsilon grows like a power of n: gallop, then regula falsi on logarithms, then halve.
    trial = low
    for turn in range(_MAX_EVALUATIONS):
        if high - low <= 1:
            break
        if math.isinf(high_gap):
            trial = min(high - 1, max(low + 1, 4 * trial))
        elif turn % 3 == 2:
            trial = (low + high) // 2
        else:
            share = low_gap / (low_gap - high_gap) if high_gap > low_gap else 0.5
            guess = math.log(low) + share * (math.log(high) - math.log(low))
            trial = min(high - 1, max(low + 1, round(math.exp(guess))))
        value = epsilon_of(trial)
        gap = math.log(min(max(value, 1e-300) / target, 1e9))
        if value <= target:
            low, low_gap = trial, gap
        else:
            high, high_gap = trial, gap
    while high - low > 1:
        trial = (low + high) // 2
        if epsilon_of(trial) <= target:
            low = trial
        else:
            high = trial
    return low
