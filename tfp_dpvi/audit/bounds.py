"""Lower bounds of epsilon from the errors of guesses about who took part; no TensorFlow.

Three statements, each at a confidence that the caller chooses:

* From the error rates of repeated runs with and without one record, by exact binomial intervals
  (Clopper and Pearson 1934).
* From the correct guesses about many records in one run (Steinke, Nasr and Jagielski 2023,
  arXiv:2305.08846).
* The same under a whole trade-off curve f instead of one pair of epsilon and delta (Nasr et al.
  2023, arXiv:2302.07956; Mahloujifar, Melis and Chaudhuri 2024, arXiv:2410.22235), which is tighter
  for Gaussian noise.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
from scipy import special, stats

from tfp_dpvi.privacy import FullBatch, NeighboringRelation, PrivacyPlan, Sensitivity
from tfp_dpvi.privacy.accountants import get_accountant

Tradeoff = Callable[[float], float]
"""The smallest false negative rate of any test with a false positive rate.

The test is of whether a record took part.
"""

# The plans that are considered have noise up to this factor below or above the claim's.
_MOST_SCALE = 16.0
_EPSILONS = np.concatenate([[0.0], np.geomspace(0.02, 60.0, 40)])
_DELTAS = np.concatenate([np.logspace(-8, -2, 13), np.linspace(0.03, 0.98, 25)])


# ---------------------------------------------------------------------- trade-off curves


def gaussian_tradeoff(mu: float) -> Tradeoff:
    """Returns the trade-off curve of N(0, 1) against N(mu, 1).

    See Dong, Roth and Su 2019, arXiv:1905.02383.
    """

    def tradeoff(rate: float) -> float:
        return float(special.ndtr(-special.ndtri(rate) - mu))

    return tradeoff


def tradeoff_of(plan: PrivacyPlan) -> Tradeoff:
    """Returns the trade-off curve that a plan claims, or a curve below it.

    For sampled steps it follows from the plan's deltas at a grid of epsilons.
    """
    if isinstance(plan.sampling, FullBatch):
        return gaussian_tradeoff(_gaussian_mu(plan))
    epsilons, deltas = _privacy_curve(plan)
    grown = np.exp(np.minimum(epsilons, 700.0))

    def tradeoff(rate: float) -> float:
        lines = np.maximum(1.0 - deltas - grown * rate, (1.0 - deltas - rate) / grown)
        return max(0.0, float(np.max(lines)))

    return tradeoff


def _privacy_curve(plan: PrivacyPlan) -> tuple[np.ndarray, np.ndarray]:
    """Returns epsilons and deltas at which a plan's releases are private, both rounded upwards."""
    accountant = get_accountant(plan.accountant)
    deltas = accountant.deltas(plan.dp_event, _EPSILONS, plan.neighboring_relation)
    if deltas is None:
        # An accountant that only knows epsilons.
        return np.array([plan.epsilon(float(delta)) for delta in _DELTAS]), _DELTAS
    return _EPSILONS, np.asarray(deltas)


def _gaussian_mu(plan: PrivacyPlan) -> float:
    """Returns the distance over the deviation of all of a plan's full-batch releases together."""
    relation = plan.neighboring_relation
    releases = get_accountant(plan.accountant).releases(plan.dp_event, relation)
    distance = 2.0 if relation is NeighboringRelation.REPLACE_ONE else 1.0
    return distance / releases.full_multiplier


# ---------------------------------------------------------------------- repeated runs


@dataclasses.dataclass(frozen=True)
class Errors:
    """The errors of a test in repeated runs with and without a record.

    Attributes:
      false_positives: The number of runs without the record that the test took for runs with it.
      without: The number of runs without it.
      false_negatives: The number of runs with it that the test missed.
      present: The number of runs with it.

    ```python
    >>> errors = Errors(false_positives=0, without=100, false_negatives=0, present=100)
    >>> [round(rate, 3) for rate in errors.rates(confidence=0.95)]
    [0.036, 0.036]

    ```
    """

    false_positives: int
    without: int
    false_negatives: int
    present: int

    def rates(self, confidence: float) -> tuple[float, float]:
        """Returns upper bounds of the false positive and of the false negative rate.

        Both hold together with the probability `confidence`.
        """
        risk = (1.0 - confidence) / 2.0
        return (
            rate_at_most(self.false_positives, self.without, risk),
            rate_at_most(self.false_negatives, self.present, risk),
        )


def rate_at_most(count: int, num: int, risk: float) -> float:
    """Returns an upper bound of a binomial rate (Clopper and Pearson 1934).

    Args:
      count: The number of successes.
      num: The number of trials.
      risk: The largest probability with which the bound may fail.
    """
    return 1.0 if count >= num else float(stats.beta.isf(risk, count + 1, num - count))


def repeated_epsilon(errors: Errors, delta: float, confidence: float) -> float:
    """Returns a lower bound of epsilon for any mechanism, from repeated runs.

    Args:
      errors: The errors of a test.
      delta: The delta of epsilon.
      confidence: The probability with which the bound holds.
    """
    bounds = [0.0]
    for rate, other in (errors.rates(confidence), errors.rates(confidence)[::-1]):
        if 1.0 - delta - other > rate:
            bounds.append(math.log((1.0 - delta - other) / rate))
    return max(bounds)


def repeated_rejects(errors: Errors, tradeoff: Tradeoff, confidence: float) -> bool:
    """Returns whether the errors are too few for a symmetric trade-off curve.

    Args:
      errors: The errors of a test.
      tradeoff: The curve.
      confidence: The probability with which a curve that holds is not rejected.
    """
    rate, other = errors.rates(confidence)
    return other < tradeoff(rate) or rate < tradeoff(other)


# ---------------------------------------------------------------------- one run


@dataclasses.dataclass(frozen=True)
class Guesses:
    """Guesses about canaries that took part in one run, each by the toss of a coin.

    Attributes:
      canaries: The number m of canaries.
      guesses: The number r of those that were guessed; the others were passed over.
      correct: The number v of correct guesses.

    ```python
    >>> guesses = Guesses(canaries=100, guesses=50, correct=48)
    >>> round(one_run_epsilon(guesses, delta=1e-5, confidence=0.95), 2)
    1.99

    ```
    """

    canaries: int
    guesses: int
    correct: int


def one_run_p_value(guesses: Guesses, epsilon: float, delta: float) -> float:
    """Returns a bound of the probability of so many correct guesses under (epsilon, delta)-DP.

    Steinke et al. 2023, theorem 5.2 and appendix D: with B ~ Binomial(r, 1 / (1 + e^-epsilon)), it
    is at most `P[B >= v] + 2 m delta max_i P[v > B >= v - i] / i`.

    Args:
      guesses: The numbers m, r and v.
      epsilon: The epsilon of the claim.
      delta: The delta of the claim.
    """
    v = guesses.correct
    law = stats.binom(guesses.guesses, float(special.expit(epsilon)))
    tail = float(law.sf(v - 1))
    if v == 0 or delta == 0.0:
        return min(1.0, tail)
    shifts = np.arange(1, v + 1)
    below = law.cdf(v - 1) - law.cdf(v - shifts - 1)
    return min(1.0, tail + 2.0 * guesses.canaries * delta * float(np.max(below / shifts)))


def one_run_epsilon(guesses: Guesses, delta: float, confidence: float) -> float:
    """Returns a lower bound of epsilon for any mechanism, from a single run.

    Args:
      guesses: The guesses about the canaries.
      delta: The delta of epsilon.
      confidence: The probability with which the bound holds.
    """

    def rejected(epsilon: float) -> bool:
        return one_run_p_value(guesses, epsilon, delta) < 1.0 - confidence

    return _largest(rejected, 0.0, 50.0, tolerance=1e-6)


def one_run_rejects(guesses: Guesses, tradeoff: Tradeoff, confidence: float) -> bool:
    """Returns whether so many right guesses are too improbable under a trade-off curve.

    Mahloujifar et al. 2024, algorithm 3, for two outcomes: the curve bounds how the distribution of
    the number of correct guesses can fall off, and the recursion follows the slowest fall from the
    count that was seen down to 0. If even that one adds up to more than a probability can, the
    curve does not hold.

    Args:
      guesses: The guesses about the canaries: m, r and v.
      tradeoff: The curve.
      confidence: The probability with which a curve that holds is not rejected.
    """
    m = guesses.canaries
    r = guesses.guesses
    # The recursion divides by wrong guesses; a right guess fewer is a weaker statement.
    v = min(guesses.correct, r - 1)
    if v <= 0:
        return False
    risk = (1.0 - confidence) * r / m
    right = risk * v / r
    wrong = risk * (r - v) / r
    for count in range(v - 1, -1, -1):
        grown = max(wrong, tradeoff(1.0 - right) if right < 1.0 else 1.0)
        right += count / (r - count) * (grown - wrong)
        wrong = grown
    return right + wrong > r / m


# ---------------------------------------------------------------------- from curves to epsilon


def largest_rejected(plan: PrivacyPlan, delta: float, rejects: Callable[[Tradeoff], bool]) -> float:
    """Returns the largest epsilon of a plan like this whose trade-off curve is rejected.

    The plans have more or less noise. The epsilon is a lower bound for a mechanism of the plan's
    shape with an unknown noise, and above the plan's own epsilon only if the plan's own curve is
    rejected.

    Args:
      plan: The plan.
      delta: The delta of epsilon.
      rejects: Returns whether a trade-off curve is rejected.
    """

    def at(factor: float) -> PrivacyPlan:
        # A larger sensitivity at the same noise is less noise.
        stated = plan.sensitivity
        grown = Sensitivity(factor * stated.add_or_remove, factor * stated.replace)
        return plan.replace(sensitivity=grown)

    most = math.log(_MOST_SCALE)
    # The tolerance is wide, since a curve of sampled steps takes a quarter of a second.
    logarithm = _largest(
        lambda log_factor: rejects(tradeoff_of(at(math.exp(log_factor)))),
        -most,
        most,
        tolerance=1e-3,
    )
    if logarithm == -most:
        return 0.0
    return at(math.exp(logarithm)).epsilon(delta)


def _largest(holds: Callable[[float], bool], low: float, high: float, *, tolerance: float) -> float:
    """Returns a number just below the largest at which a condition holds; `low` if at none.

    The condition must hold at all numbers below one at which it holds.
    """
    if not holds(low):
        return low
    while high - low > tolerance:
        middle = (low + high) / 2.0
        if holds(middle):
            low = middle
        else:
            high = middle
    return low
