"""Mu of Gaussian differential privacy and the advantage of an attacker, from a privacy profile."""

import dataclasses
import math

import numpy as np
from numpy.typing import ArrayLike
from scipy import optimize, special


@dataclasses.dataclass(frozen=True)
class AttackBound:
    """A limit on what anyone can learn about one record, even with all others at hand.

    Attributes:
      mu: The smallest mu for which the (epsilon, delta) pairs allow the statement below; infinity
        if there is none.
      advantage: A number between 0 and 1.

    #### Formal guarantee

    Let a mechanism be (epsilon, delta)-differentially private for every pair that `attack_bound`
    got as its arguments, and let `delta` be the smallest delta of these pairs. Then

    * no test tells two neighboring data sets apart with a true positive rate that exceeds its false
      positive rate by more than `advantage`. This is the total variation distance of the results;
      an attacker for whom both data sets are equally likely is right with a probability of at most
      (1 + `advantage`) / 2.
    * at every delta' >= `delta` the mechanism is (epsilon', delta')-differentially private with the
      epsilon' of one that is `mu`-Gaussian differentially private (Dong, Roth and Su 2022,
      arXiv:1905.02383). At smaller delta' nothing is claimed: a sampled mechanism is not exactly
      Gaussian, and a numerical composition says nothing about its last tail.

    Gomez et al. 2025 (arXiv:2503.10945) recommend to report mu.

    ```python
    >>> from tfp_dpvi.privacy import FullBatch, PrivacyPlan
    >>> bound = PrivacyPlan(FullBatch(), noise_multiplier=4.0, num_releases=1).attack_bound(1e-5)
    >>> bound.mu, round(bound.advantage, 4)
    (0.25, 0.0995)

    ```
    """

    mu: float
    advantage: float


#: The bound of a release without noise.
NO_PROTECTION = AttackBound(math.inf, 1.0)


def gaussian_delta(epsilon: float, shift: float) -> float:
    """Returns the smallest delta of N(0, 1) against N(shift, 1).

    It is that of theorem 8 of Balle and Wang 2018 (arXiv:1805.06530).

    Args:
      epsilon: A number of at least 0.
      shift: The distance of the means, at least 0; it may be infinite.
    """
    if shift == 0.0 or math.isinf(shift):
        return 0.0 if shift == 0.0 else 1.0
    log_a = float(special.log_ndtr(0.5 * shift - epsilon / shift))
    log_b = epsilon + float(special.log_ndtr(-0.5 * shift - epsilon / shift))
    # This difference of exponentials is accurate if both are close.
    return math.exp(log_a) * -math.expm1(min(0.0, log_b - log_a))


def gaussian_epsilon(delta: float, shift: float) -> float:
    """Returns the smallest epsilon of N(0, 1) against N(shift, 1), rounded up.

    dp_accounting 0.4.3 has no such function.

    Args:
      delta: Strictly between 0 and 1.
      shift: The distance of the means, at least 0; it may be infinite.
    """
    if math.isinf(shift) or gaussian_delta(0.0, shift) <= delta:
        return math.inf if math.isinf(shift) else 0.0
    high = 0.5 * shift**2 + shift * math.sqrt(2.0 * math.log(1.0 / delta)) + 1e-9
    while gaussian_delta(high, shift) > delta:
        high *= 2.0
    epsilon = optimize.brentq(
        lambda e: gaussian_delta(e, shift) - delta, 0.0, high, xtol=1e-300, rtol=1e-14
    )
    while gaussian_delta(epsilon, shift) > delta:
        epsilon *= 1.0 + 1e-12
    return float(epsilon)


def gaussian_mu(epsilon: float, delta: float) -> float:
    """Returns the smallest mu whose N(0, 1) against N(mu, 1) has at least `delta` at `epsilon`.

    Args:
      epsilon: A number of at least 0.
      delta: A number below 1.
    """
    if delta <= 0.0:
        return 0.0
    high = 1.0
    while gaussian_delta(epsilon, high) < delta:
        high *= 2.0
    while gaussian_delta(epsilon, 0.5 * high) >= delta:
        high *= 0.5
    mu = optimize.brentq(
        lambda shift: gaussian_delta(epsilon, shift) - delta, 0.5 * high, high, xtol=1e-300
    )
    while gaussian_delta(epsilon, mu) < delta:
        mu *= 1.0 + 1e-12
    return float(mu)


def gaussian_attack_bound(mu: float) -> AttackBound:
    """Returns the bound of N(0, 1) against N(mu, 1), which is exact and holds at every delta."""
    return AttackBound(mu, math.erf(mu / math.sqrt(8.0)))


def attack_bound(epsilons: ArrayLike, deltas: ArrayLike) -> AttackBound:
    """Returns the bound that follows from (epsilon, delta) pairs.

    A pair with t = exp(epsilon) bounds the error rates of every test, a (false positives) and b
    (false negatives), by b >= 1 - delta - t a and a >= 1 - delta - t b. Where both rates are equal
    this is an advantage of at most (t - 1 + 2 delta) / (t + 1).

    As a function of t the smallest delta is convex, so that it is at most the lower convex hull of
    the pairs and of (t = 1, advantage). Each edge of the hull is a line 1 - b - t a. The profile of
    N(0, 1) against N(mu, 1) is the supremum of such lines over its own error rates, so that it lies
    above an edge if mu >= -ndtri(a) - ndtri(b), and touches it at
    epsilon = (ndtri(a)^2 - ndtri(b)^2) / 2. Edges that it would touch beyond the last pair do not
    count; the last pair itself does. More pairs give a smaller mu, and any pairs one that holds.

    Args:
      epsilons: Finite numbers of at least 0 in ascending order, of shape [k].
      deltas: A delta for each of them, of shape [k].

    Returns:
      The bound; its `mu` is for deltas from the smallest of `deltas`.
    """
    epsilons = np.asarray(epsilons, np.float64)
    deltas = np.clip(np.asarray(deltas, np.float64), 0.0, 1.0)
    # This is (t - 1) / (t + 1).
    without_delta = np.tanh(0.5 * epsilons)
    advantage = float(np.min(without_delta + deltas * (1.0 - without_delta)))
    if advantage >= 1.0:
        return NO_PROTECTION
    mu = 2.0 * float(special.ndtri(0.5 * (1.0 + advantage)))
    corners = [(0.0, advantage)]
    # The logarithm of a for each edge between two corners.
    slopes: list[float] = []
    for corner in zip(epsilons.tolist(), deltas.tolist(), strict=True):
        if corner[0] == 0.0:
            continue
        slope = _log_slope(corners[-1], corner)
        while slopes and slope >= slopes[-1]:
            slopes.pop()
            corners.pop()
            slope = _log_slope(corners[-1], corner)
        slopes.append(slope)
        corners.append(corner)
    last, smallest = corners[-1]
    for (epsilon, delta), slope in zip(corners[:-1], slopes, strict=True):
        positives = float(special.ndtri_exp(slope))
        negatives = float(special.ndtri(max(0.0, 1.0 - delta - math.exp(epsilon + slope))))
        # The condition also holds if both are infinite.
        if not 0.5 * (positives**2 - negatives**2) > last:
            mu = max(mu, -positives - negatives)
    return AttackBound(max(mu, gaussian_mu(last, smallest)), advantage)


def _log_slope(left: tuple[float, float], right: tuple[float, float]) -> float:
    """Returns log of -(change of delta) / (change of exp(epsilon)); exp(epsilon) may overflow."""
    width = right[0] - left[0]
    fall = left[1] - right[1]
    if fall <= 0.0:
        return -math.inf
    return math.log(fall) - left[0] - width - math.log(-math.expm1(-width))
