"""Mu of Gaussian differential privacy and the advantage of an attacker, from a privacy profile."""

import dataclasses
import math

import numpy as np
from numpy.typing import ArrayLike
from scipy import optimize, special


@dataclasses.dataclass(frozen=True)
class AttackBound:
    """A limit on what is learnt about one record by those who may know all others.

    Formal guarantee: let a mechanism be (epsilon, delta)-differentially private for every pair that
    `attack_bound` was given, and let `delta` be the smallest of theirs. Then

    * no test tells two neighboring data sets apart with a true positive rate that exceeds its false
      positive rate by more than `advantage`. This is the total variation distance of the results;
      an attacker for whom both data sets are equally likely is right with a probability of at most
      (1 + `advantage`) / 2.
    * at every delta' >= `delta` the mechanism is (epsilon', delta')-differentially private with the
      epsilon' of one that is `mu`-Gaussian differentially private (Dong, Roth and Su 2022,
      arXiv:1905.02383). At smaller delta' nothing is claimed: a sampled mechanism is not exactly
      Gaussian, and a numerical composition says nothing about its last tail.

    Gomez et al. 2025 (arXiv:2503.10945) recommend that mu is reported.

    Attributes:
      mu: the smallest mu of which the pairs allow this to be said; infinity if there is none.
      advantage: between 0 and 1.
    """

    mu: float
    advantage: float


#: What holds without noise: nothing.
NO_PROTECTION = AttackBound(math.inf, 1.0)


def gaussian_delta(epsilon: float, shift: float) -> float:
    """Returns the smallest delta of N(0, 1) against N(shift, 1) at `epsilon` >= 0.

    By theorem 8 of Balle and Wang 2018 (arXiv:1805.06530).
    """
    if shift == 0.0 or math.isinf(shift):
        return 0.0 if shift == 0.0 else 1.0
    log_a = float(special.log_ndtr(0.5 * shift - epsilon / shift))
    log_b = epsilon + float(special.log_ndtr(-0.5 * shift - epsilon / shift))
    return math.exp(log_a) * -math.expm1(min(0.0, log_b - log_a))  # Accurate if both are close.


def gaussian_epsilon(delta: float, shift: float) -> float:
    """Returns the smallest epsilon >= 0 at `delta`, rounded up.

    dp_accounting 0.4.3 has no such function.
    """
    if math.isinf(shift) or gaussian_delta(0.0, shift) <= delta:
        return math.inf if math.isinf(shift) else 0.0
    high = 0.5 * shift**2 + shift * math.sqrt(2.0 * math.log(1.0 / delta)) + 1e-9
    while gaussian_delta(high, shift) > delta:
        high *= 2.0
    found = optimize.brentq(
        lambda e: gaussian_delta(e, shift) - delta, 0.0, high, xtol=1e-300, rtol=1e-14
    )
    while gaussian_delta(found, shift) > delta:
        found *= 1.0 + 1e-12
    return float(found)


def gaussian_mu(epsilon: float, delta: float) -> float:
    """Returns the smallest mu whose N(0, 1) against N(mu, 1) has at least `delta` at `epsilon`."""
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
    """Returns what follows from (epsilon, delta) pairs.

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
      epsilons: numbers >= 0 in ascending order; finite.
      deltas: a delta for each of them.

    Returns:
      The bound; its `mu` is for deltas from the smallest of `deltas`.
    """
    epsilons = np.asarray(epsilons, np.float64)
    deltas = np.clip(np.asarray(deltas, np.float64), 0.0, 1.0)
    without_delta = np.tanh(0.5 * epsilons)  # (t - 1) / (t + 1)
    advantage = float(np.min(without_delta + deltas * (1.0 - without_delta)))
    if advantage >= 1.0:
        return NO_PROTECTION
    mu = 2.0 * float(special.ndtri(0.5 * (1.0 + advantage)))
    corners = [(0.0, advantage)]
    slopes: list[float] = []  # Logarithms of a, one of each edge between two corners.
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
        if not 0.5 * (positives**2 - negatives**2) > last:  # Also if both are infinite.
            mu = max(mu, -positives - negatives)
    return AttackBound(max(mu, gaussian_mu(last, smallest)), advantage)


def _log_slope(left: tuple[float, float], right: tuple[float, float]) -> float:
    """Returns log of -(change of delta) / (change of exp(epsilon)); exp(epsilon) may overflow."""
    width = right[0] - left[0]
    fall = left[1] - right[1]
    if fall <= 0.0:
        return -math.inf
    return math.log(fall) - left[0] - width - math.log(-math.expm1(-width))
