"""Lower bounds of epsilon: published values, closed forms, and simulations of mechanisms that meet a claim exactly."""

import math

import numpy as np
import pytest
import scipy.stats

from tfp_dpvi.audit import bounds
from tfp_dpvi.audit.bounds import Errors, Guesses
from tfp_dpvi.privacy import FullBatch, PoissonSampling, PrivacyPlan

PLAN = PrivacyPlan(FullBatch(), noise_multiplier=1.0, num_releases=1)


@pytest.mark.parametrize(
    ("canaries", "guesses", "correct", "delta", "published", "unit"),
    [
        (100, 100, 75, 0.0, 0.702, 5e-4),
        (100, 100, 75, 1e-4, 0.699, 5e-4),
        (1000, 100, 75, 1e-4, 0.673, 5e-4),
        (100_000, 1510, 1439, 1e-5, 2.675, 1e-3),  # Printed without rounding.
    ],
)
def test_published_values_of_one_run(canaries, guesses, correct, delta, published, unit):
    """Steinke et al. 2023 (arXiv:2305.08846), appendix D and section 7, at a confidence of 95 %."""
    epsilon = bounds.one_run_epsilon(Guesses(canaries, guesses, correct), delta, 0.95)
    assert epsilon == pytest.approx(published, abs=unit)


def test_the_published_p_value_of_one_run():
    """Appendix D: p <= .553 for 75 of 100 at epsilon = log 3."""
    p_value = bounds.one_run_p_value(Guesses(100, 100, 75), math.log(3), 0.0)
    assert p_value == pytest.approx(0.553, abs=5e-4)


def test_the_p_value_is_the_formulas():
    """With the maximum over i written as a loop over the definition."""
    m, r, v, epsilon, delta = 60, 40, 33, 1.2, 1e-3
    law = scipy.stats.binom(r, 1 / (1 + math.exp(-epsilon)))
    mass = [law.pmf(k) for k in range(r + 1)]
    most = max(sum(mass[max(0, v - i) : v]) / i for i in range(1, v + 1))
    expected = sum(mass[v:]) + 2 * m * delta * most
    assert bounds.one_run_p_value(Guesses(m, r, v), epsilon, delta) == pytest.approx(expected)


def test_clopper_pearson():
    """The bound is the rate at which so few are as rare as the risk."""
    for count, num in ((0, 10), (3, 50), (49, 50)):
        rate = bounds.rate_at_most(count, num, 0.01)
        assert scipy.stats.binom.cdf(count, num, rate) == pytest.approx(0.01)
    assert bounds.rate_at_most(5, 5, 0.01) == 1.0


def test_trade_off_curves_agree():
    """The curve of the epsilons at a grid of deltas lies just below the closed one; sampling at a rate of nearly 1 too."""
    closed = bounds.tradeoff_of(PLAN)
    sampled = bounds.tradeoff_of(PLAN.replace(sampling=PoissonSampling(0.999999)))
    for rate in (1e-3, 0.02, 0.2, 0.5, 0.9):
        assert closed(rate) == pytest.approx(scipy.stats.norm.cdf(scipy.stats.norm.isf(rate) - 1.0))
        assert closed(rate) - 0.01 < sampled(rate) < closed(rate) + 1e-4


def test_the_bound_of_repeated_runs_comes_near_the_truth():
    """Many runs of one Gaussian release with mu = 1: its own epsilon from below."""
    num, delta = 10**6, 1e-5
    missed = round(num * scipy.stats.norm.cdf(-0.5))
    errors = Errors(missed, num, missed, num)
    epsilon = bounds.largest_rejected(
        PLAN, delta, lambda f: bounds.repeated_rejects(errors, f, 0.99)
    )
    truth = PLAN.epsilon(delta)
    assert 0.97 * truth < epsilon < truth
    assert bounds.repeated_epsilon(errors, delta, 0.99) == pytest.approx(
        math.log(scipy.stats.norm.cdf(0.5) / scipy.stats.norm.cdf(-0.5)), rel=0.01
    )


def test_errors_at_random_bound_nothing():
    errors, guesses = Errors(50, 100, 50, 100), Guesses(100, 50, 25)
    assert bounds.repeated_epsilon(errors, 1e-5, 0.95) == 0.0
    assert bounds.one_run_epsilon(guesses, 1e-5, 0.95) == 0.0
    for rejects in (bounds.repeated_rejects, bounds.one_run_rejects):
        seen = errors if rejects is bounds.repeated_rejects else guesses
        assert bounds.largest_rejected(PLAN, 1e-5, lambda f: rejects(seen, f, 0.95)) == 0.0  # noqa: B023


def _one_run(rng, mu, canaries, guesses):
    """Correct guesses about canaries that each have a coordinate of their own: a Gaussian mechanism, exactly."""
    inside = rng.random(canaries) < 0.5
    scores = rng.normal(size=canaries) + mu * (inside - 0.5)
    order = np.argsort(scores)
    out, taken = order[: guesses // 2], order[-(guesses // 2) :]
    return Guesses(canaries, guesses, int(np.sum(~inside[out]) + np.sum(inside[taken])))


@pytest.mark.parametrize("guesses", [40, 100])
def test_bounds_of_one_run_hold_and_the_curve_is_tighter(guesses):
    """Bounds at a confidence of 90 % exceed the truth in at most 10 % of the runs of a mechanism that meets it exactly.

    False alarm of this test: below 1e-9 (200 runs, at most 50 beyond it, where 20 are expected at most).
    """
    rng = np.random.default_rng(0)
    seen = [_one_run(rng, 1.5, 100, guesses) for _ in range(200)]
    curve = bounds.gaussian_tradeoff(1.5)
    truth = PLAN.replace(noise_multiplier=1 / 1.5).epsilon(1e-5)
    assert sum(bounds.one_run_rejects(each, curve, 0.9) for each in seen) <= 50
    assert sum(bounds.one_run_p_value(each, truth, 1e-5) < 0.1 for each in seen) <= 50
    middle = sorted(seen, key=lambda each: each.correct)[100]
    by_curve = bounds.largest_rejected(PLAN, 1e-5, lambda f: bounds.one_run_rejects(middle, f, 0.9))
    assert truth > by_curve > 1.3 * bounds.one_run_epsilon(middle, 1e-5, 0.9) > 0.5


def test_bounds_of_one_run_hold_at_the_mechanisms_that_attain_them():
    """Randomised response attains the pair (epsilon, 0), and one that tells all with probability delta the pair (0, delta).

    False alarm of this test: below 1e-9 (5000 runs at 5 %, rejections at most 6.5 standard errors above).
    """
    rng, m, epsilon = np.random.default_rng(1), 80, 1.0
    correct = rng.binomial(m, 1 / (1 + math.exp(-epsilon)), 5000)
    p_value = {v: bounds.one_run_p_value(Guesses(m, m, v), epsilon, 0.0) for v in set(correct)}
    rejected = np.mean([p_value[v] < 0.05 for v in correct])
    assert 0.01 < rejected < 0.05 + 6.5 * math.sqrt(0.05 * 0.95 / 5000)
    assert bounds.one_run_p_value(Guesses(m, m, m), 0.0, 0.03) >= 0.03
    # Under the curve of randomised response too, whose epsilon is exact.
    response = lambda rate: max(0.0, 1 - math.e * rate, (1 - rate) / math.e)  # noqa: E731
    by_count = {v: bounds.one_run_rejects(Guesses(m, m, v), response, 0.95) for v in set(correct)}
    rejected = np.mean([by_count[v] for v in correct])
    assert rejected < 0.05 + 6.5 * math.sqrt(0.05 * 0.95 / 5000)
