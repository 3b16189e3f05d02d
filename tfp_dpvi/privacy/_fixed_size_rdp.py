"""Renyi divergences of the Gaussian mechanism on a fixed-size sample without replacement.

Wang, Balle and Kasiviswanathan 2019, arXiv:1808.00087, theorem 27 and corollary 10, for replacing
one record. The values equal those of dp_accounting's RDP accountant, which takes a second per call
because it repeats the differences for every order.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy import special

# Beyond this order dp_accounting uses only the simpler bound.
_MAX_EXACT_ORDER = 256


def _log_abs_differences(log_values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns log |k-th forward difference at 0| for k = 0, 1, ..., of positive values.

    The argument has the logarithms of the values.
    """
    logs = log_values.copy()
    positive = np.ones(log_values.size, dtype=bool)
    result = np.empty(log_values.size)
    for k in range(log_values.size):
        result[k] = logs[0]
        a, b = logs[1:], logs[:-1]
        sign_a, sign_b = positive[1:], positive[:-1]
        high, low = np.maximum(a, b), np.minimum(a, b)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(np.isneginf(high), 0.0, np.exp(low - high))
            difference = high + np.log1p(-ratio)
            total = high + np.log1p(ratio)
        same = sign_a == sign_b
        logs = np.where(same, difference, total)
        # The difference a - b has the sign of a if the signs differ, or if |a| is larger.
        positive = np.where(same, (a >= b) == sign_a, sign_a)
    return result


def fixed_size_rdp(q: float, z: float, orders: Sequence[float]) -> NDArray[np.float64]:
    """Returns an upper bound of the Renyi divergence at each order.

    Args:
      q: The batch size over the number of records, in (0, 1).
      z: The standard deviation over the sum's sensitivity to replacing one record.
      orders: Orders above 1.

    Returns:
      float64 of shape [len(orders)].
    """
    rate = 0.5 / z**2
    wanted = np.asarray(orders, dtype=np.float64)
    floors = np.floor(wanted).astype(int)
    ceilings = np.ceil(wanted).astype(int)
    exact = [int(a) for a in {*floors, *ceilings} if a <= _MAX_EXACT_ORDER]
    x = np.arange(-1.0, max(exact, default=2) + 2.0)
    # The values e^{x (x+1) rate} at x = -1 (where it is 1), 0, 1, ... are the expectations of
    # theorem 27.
    differences = _log_abs_differences(np.where(x < 0.0, 0.0, x * (x + 1.0) * rate))
    logs = {a: _log_moment(a, q, rate, differences) for a in sorted({*floors, *ceilings})}
    low = np.array([logs[a] for a in floors])
    high = np.array([logs[a] for a in ceilings])
    share = wanted - floors
    divergences: NDArray[np.float64] = ((1.0 - share) * low + share * high) / (wanted - 1.0)
    return divergences


def _log_moment(order: int, q: float, rate: float, differences: NDArray[np.float64]) -> float:
    if order <= 1:
        return 0.0
    i = np.arange(2, order + 1)
    log_choose = (
        special.gammaln(order + 1) - special.gammaln(i + 1) - special.gammaln(order - i + 1)
    )
    simple = np.log(2.0) + (i - 1.0) * i * rate
    second = 2.0 * rate
    simple[0] = min(np.log(4.0) + second + np.log(-np.expm1(-second)), second + np.log(2.0))
    terms = simple
    if order <= _MAX_EXACT_ORDER:
        low = differences[2 * (i // 2)]
        high = differences[2 * ((i + 1) // 2)]
        terms = np.minimum(simple, np.log(4.0) + 0.5 * (low + high))
        terms[0] = simple[0]
    return float(np.logaddexp(0.0, special.logsumexp(terms + i * np.log(q) + log_choose)))
