"""The Gaussian mechanism in closed form (Balle and Wang 2018, arXiv:1805.06530, theorem 8)."""

import math

from scipy import optimize, special


def gaussian_delta(epsilon: float, shift: float) -> float:
    """Returns the smallest delta of N(0, 1) against N(shift, 1) at `epsilon` >= 0.

    Args:
      epsilon: the privacy loss allowed.
      shift: sensitivity over standard deviation; composed releases add in squares.
    """
    if shift == 0.0:
        return 0.0
    if math.isinf(shift):
        return 1.0
    log_a = float(special.log_ndtr(0.5 * shift - epsilon / shift))
    log_b = epsilon + float(special.log_ndtr(-0.5 * shift - epsilon / shift))
    # e^a - e^b with b < a; expm1 keeps digits when they are close.
    return math.exp(log_a) * -math.expm1(min(0.0, log_b - log_a))


def delta_of(plan, epsilon: float) -> float:
    """Returns the delta at which a `PrivacyPlan` has this epsilon, by bisection from 1e-9 to 0.5."""
    found = optimize.brentq(
        lambda log: plan.epsilon(math.exp(log)) - epsilon, math.log(1e-9), math.log(0.5), xtol=1e-9
    )
    return math.exp(found)


def gaussian_epsilon(delta: float, shift: float) -> float:
    """Returns the smallest epsilon >= 0 that goes with `delta`, rounded up by 1e-12 of it."""
    if math.isinf(shift):
        return math.inf
    if gaussian_delta(0.0, shift) <= delta:
        return 0.0
    high = 0.5 * shift**2 + shift * math.sqrt(2.0 * math.log(1.0 / delta)) + 1e-9
    while gaussian_delta(high, shift) > delta:
        high *= 2.0
    root = optimize.brentq(
        lambda e: gaussian_delta(e, shift) - delta, 0.0, high, xtol=1e-300, rtol=1e-14
    )
    result = root * (1.0 + 1e-12)
    while gaussian_delta(result, shift) > delta:
        result *= 1.0 + 1e-12
    return result
