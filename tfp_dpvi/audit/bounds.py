"""Lower bounds of epsilon from the errors of guesses about who took part; no TensorFlow.

Three statements, each at a confidence that the caller chooses:

* From the error rates of repeated runs with and without one record, by exact binomial intervals (Clopper and Pearson 1934).
* From the correct guesses about many records in one run (Steinke, Nasr and Jagielski 2023, arXiv:2305.08846).
* The same under a whole trade-off curve f instead of one pair of epsilon and delta (Nasr et al. 2023, arXiv:2302.07956;
  Mahloujifar, Melis and Chaudhuri 2024, arXiv:2410.22235), which is tighter for Gaussian noise.
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
"""`f(false positive rate)` is the smallest false negative rate of any test of whether a record took part."""

_MOST_SCALE = (
    16.0  # The plans that are considered have noise up to this factor below or above the claim's.
)
_EPSILONS = np.concatenate([[0.0], np.geomspace(0.02, 60.0, 40)])
_DELTAS = np.concatenate([np.logspace(-8, -2, 13), np.linspace(0.03, 0.98, 25)])


# ---------------------------------------------------------------------- trade-off curves


def gaussian_tradeoff(mu: float) -> Tradeoff:
    """Returns the trade-off curve of N(0, 1) against N(mu, 1) (Dong, Roth and Su 2019, arXiv:1905.02383)."""

    def tradeoff(rate: float) -> float:
        return float(special.ndtr(-special.ndtri(rate) - mu))

    return tradeoff


def tradeoff_of(plan: PrivacyPlan) -> Tradeoff:
    """Returns the trade-off curve that a plan claims, or one below it: its deltas at a grid of epsilons."""
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
    if deltas is None:  # An accountant that only knows epsilons.
        return np.array([plan.epsilon(float(delta)) for delta in _DELTAS]), _DELTAS
    return _EPSILONS, np.asarray(deltas)


def _gaussian_mu(plan: PrivacyPlan) -> float:
    """Returns the distance over the deviation of all releases of a plan on full batches together."""
    relation = plan.neighboring_relation
    releases = get_accountant(plan.accountant).releases(plan.dp_event, relation)
    return (2.0 if relation is NeighboringRelation.REPLACE_ONE else 1.0) / releases.full_multiplier


# ---------------------------------------------------------------------- repeated runs


@dataclasses.dataclass(frozen=True)
class Errors:
    """The errors of a test in repeated runs with and without a record.

    Attributes:
      false_positives: runs without the record that the test took for runs with it.
      without: number of runs without it.
      false_negatives: runs with it that the test missed.
      present: number of runs with it.
    """

    false_positives: int
    without: int
    false_negatives: int
    present: int

    def rates(self, confidence: float) -> tuple[float, float]:
        """Returns upper bounds of the false positive and the false negative rate, which hold together at the confidence."""
        half = (1.0 - confidence) / 2.0
        return (
            rate_at_most(self.false_positives, self.without, half),
            rate_at_most(self.false_negatives, self.present, half),
        )


def rate_at_most(count: int, num: int, risk: float) -> float:
    """Returns an upper bound of a binomial rate that fails with a probability of at most `risk` (Clopper and Pearson)."""
    return 1.0 if count >= num else float(stats.beta.isf(risk, count + 1, num - count))


def repeated_epsilon(errors: Errors, delta: float, confidence: float) -> float:
    """Returns a lower bound of epsilon at delta, for any mechanism."""
    bounds = [0.0]
    for rate, other in (errors.rates(confidence), errors.rates(confidence)[::-1]):
        if 1.0 - delta - other > rate:
            bounds.append(math.log((1.0 - delta - other) / rate))
    return max(bounds)


def repeated_rejects(errors: Errors, tradeoff: Tradeoff, confidence: float) -> bool:
    """Returns whether the errors are too few for a (symmetric) trade-off curve, at the confidence."""
    rate, other = errors.rates(confidence)
    return other < tradeoff(rate) or rate < tradeoff(other)


# ---------------------------------------------------------------------- one run


@dataclasses.dataclass(frozen=True)
class Guesses:
    """Guesses about canaries that took part in one run, each by the toss of a coin.

    Attributes:
      canaries: their number m.
      guesses: number r of those that were guessed; the others were passed over.
      correct: number v of correct guesses.
    """

    canaries: int
    guesses: int
    correct: int


def one_run_p_value(guesses: Guesses, epsilon: float, delta: float) -> float:
    """Returns the largest probability of so many correct guesses under (epsilon, delta)-DP.

    Steinke et al. 2023, theorem 5.2 and appendix D: with B ~ Binomial(r, 1 / (1 + e^-epsilon)), it is at most
    `P[B >= v] + 2 m delta max_i P[v > B >= v - i] / i`.
    """
    m, r, v = guesses.canaries, guesses.guesses, guesses.correct
    accuracy = float(special.expit(epsilon))
    tail = float(stats.binom.sf(v - 1, r, accuracy))
    if v == 0 or delta == 0.0:
        return min(1.0, tail)
    shifts = np.arange(1, v + 1)
    below = stats.binom.cdf(v - 1, r, accuracy) - stats.binom.cdf(v - shifts - 1, r, accuracy)
    return min(1.0, tail + 2.0 * m * delta * float(np.max(below / shifts)))


def one_run_epsilon(guesses: Guesses, delta: float, confidence: float) -> float:
    """Returns a lower bound of epsilon at delta, for any mechanism."""
    return _largest(
        lambda epsilon: one_run_p_value(guesses, epsilon, delta) < 1.0 - confidence, 0.0, 50.0, 1e-6
    )


def one_run_rejects(guesses: Guesses, tradeoff: Tradeoff, confidence: float) -> bool:
    """Returns whether so many guesses are right with a probability of at most 1 - confidence under a trade-off curve.

    Mahloujifar et al. 2024, algorithm 3, for two outcomes: the curve bounds how the distribution of the number of correct
    guesses can fall off, and the recursion follows the slowest fall from the count that was seen down to 0. If even that
    one adds up to more than a probability can, the curve does not hold.
    """
    m, r, v = guesses.canaries, guesses.guesses, guesses.correct
    if v >= r:  # The recursion divides by wrong guesses; one guess fewer is a weaker statement.
        v = r - 1
    if v <= 0:
        return False
    risk = (1.0 - confidence) * r / m
    right, wrong = risk * v / r, risk * (r - v) / r
    for count in range(v - 1, -1, -1):
        grown = max(wrong, tradeoff(1.0 - right) if right < 1.0 else 1.0)
        right += count / (r - count) * (grown - wrong)
        wrong = grown
    return right + wrong > r / m


# ---------------------------------------------------------------------- from curves to epsilon


def largest_rejected(plan: PrivacyPlan, delta: float, rejects: Callable[[Tradeoff], bool]) -> float:
    """Returns the largest epsilon among plans like this one, with more or less noise, whose trade-off curve is rejected.

    It is a lower bound of epsilon for a mechanism of the plan's shape with an unknown noise, and above the plan's own epsilon
    only if the plan's own curve is rejected.
    """

    def at(factor: float) -> PrivacyPlan:
        stated = plan.sensitivity  # A larger sensitivity at the same noise is less noise.
        grown = Sensitivity(factor * stated.add_or_remove, factor * stated.replace)
        return plan.replace(sensitivity=grown)

    logarithm = _largest(
        lambda log_factor: rejects(tradeoff_of(at(math.exp(log_factor)))),
        -math.log(_MOST_SCALE),
        math.log(_MOST_SCALE),
        1e-3,  # A curve of sampled steps takes a quarter of a second.
    )
    if logarithm == -math.log(_MOST_SCALE):
        return 0.0
    return at(math.exp(logarithm)).epsilon(delta)


def _largest(holds: Callable[[float], bool], low: float, high: float, exactly: float) -> float:
    """Returns a number just below the largest at which a falling condition holds, or `low` if it holds nowhere."""
    if not holds(low):
        return low
    while high - low > exactly:
        middle = (low + high) / 2.0
        if holds(middle):
            low = middle
        else:
            high = middle
    return low
