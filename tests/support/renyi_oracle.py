"""Renyi divergences of the Poisson-sampled Gaussian mechanism by integration of P^a Q^(1-a), for comparison."""

import math
from collections.abc import Sequence

import numpy as np
from scipy import special

from support.pld_pairs import GaussianPair

_MARGIN = 12.0


def poisson_rdp(
    q: float, noise_multiplier: float, orders: Sequence[float], *, replace: bool
) -> np.ndarray:
    """Returns the Renyi divergence of one release at each order: of the mixture from the plain Gaussian, if not `replace`.

    The integrand is a mixture of bells of width about 1 that lie between -u (2a - 1) and u (2a - 1); the
    trapezoidal rule converges on such functions faster than any power of its step.

    Args:
      q: sampling probability in (0, 1].
      noise_multiplier: standard deviation over A, what one record's presence moves the sum.
      orders: orders above 1, shape [n].

    Returns:
      float64 array of shape [n].
    """
    pair = GaussianPair(q, 1.0 / noise_multiplier, symmetric=replace)
    return np.array([_divergence(pair, order) for order in orders])


def _divergence(pair: GaussianPair, order: float) -> float:
    reach = pair.shift * (2.0 * order - 1.0) + _MARGIN
    step = min(0.1, 0.25 / pair.shift)
    count = math.ceil(2.0 * reach / step)
    if count > 4_000_000:
        return math.inf  # so little noise at so high an order is never the best choice
    x = np.linspace(-reach, reach, count + 1)
    # log of P^a Q^(1-a) = log Q + a L.
    log_terms = pair.log_lower_density(x) + order * pair.loss(x)
    log_moment = special.logsumexp(log_terms) + math.log(x[1] - x[0])
    return max(0.0, float(log_moment)) / (order - 1.0)
