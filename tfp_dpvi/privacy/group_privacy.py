"""From add-or-remove-one to replace-one and to groups, with the exact factor."""

import math
from collections.abc import Callable

from scipy import optimize

from tfp_dpvi.privacy import _validation as check


def replace_one_guarantee(epsilon: float, delta: float) -> tuple[float, float]:
    """Returns what an add-or-remove-one guarantee says about replacing one record.

    A replacement is a removal and an addition: P(S) <= e^eps R(S) + delta and
    R(S) <= e^eps Q(S) + delta give P(S) <= e^{2 eps} Q(S) + (1 + e^eps) delta. (The 2017 DPVI paper
    takes 2 delta instead, which is too small a figure.)

    Args:
      epsilon: under add-or-remove-one.
      delta: that goes with it.

    Returns:
      (2 epsilon, (1 + e^epsilon) delta), the delta at most 1.
    """
    return group_guarantee(epsilon, delta, 2)


def group_guarantee(epsilon: float, delta: float, size: int) -> tuple[float, float]:
    """Returns the guarantee for a chain of `size` single changes.

    (k eps, delta (e^{k eps} - 1) / (e^eps - 1)), by induction over the chain (Vadhan 2017,
    "The complexity of differential privacy", lemma 2.2).
    """
    epsilon = check.non_negative("epsilon", epsilon)
    delta = check.non_negative("delta", delta)
    size = check.count("size", size, 1)
    if epsilon * size > 700.0:
        return size * epsilon, 1.0
    factor = math.expm1(size * epsilon) / math.expm1(epsilon) if epsilon > 0.0 else float(size)
    return size * epsilon, min(1.0, factor * delta)


def replace_one_epsilon(delta_at: Callable[[float], float], delta: float) -> float:
    """Returns the smallest epsilon for replacing one record that the conversion proves.

    Direct replace-one accounting is tighter where it exists; this serves any other guarantee.

    Args:
      delta_at: delta under add-or-remove-one as a function of epsilon, for example `plan.delta`.
      delta: the delta wanted under replace-one.

    Returns:
      The smallest epsilon with (1 + e^{epsilon/2}) delta_at(epsilon/2) <= delta; infinity if none.
    """
    delta = check.delta(delta)

    def excess(half: float) -> float:
        return replace_one_guarantee(half, delta_at(half))[1] - delta

    if excess(0.0) <= 0.0:
        return 0.0
    high = 1.0
    while excess(high) > 0.0:
        high *= 2.0
        if high > 300.0:
            return math.inf
    half = optimize.brentq(excess, 0.0, high, xtol=1e-12, rtol=1e-10)
    while excess(half) > 0.0:
        half = half * (1.0 + 1e-9) + 1e-12
    return 2.0 * half
