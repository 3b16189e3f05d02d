"""Counts with zeros of their own: their probabilities sum to 1 and are those of their draws."""

import numpy as np
import pytest
from scipy import stats

from tfp_dpvi._tf import tf, tfd
from tfp_dpvi.regressions.counts import Hurdle, ZeroInflated

RATES = tf.constant([0.05, 3.0], tf.float64)
VALUES = np.arange(60.0)[:, None]
NUM = 20_000


def poisson():
    return ZeroInflated(tfd.Poisson(RATES), 0.2)


def negative_binomial():
    size = tf.constant(0.8, tf.float64)
    counts = tfd.NegativeBinomial(size, probs=RATES / (RATES + size))
    return ZeroInflated(counts, 0.2)


def hurdle():
    return Hurdle(RATES, 0.2)


def test_probabilities_are_scipys():
    rates, zeros = np.array([0.05, 3.0]), VALUES == 0.0
    counted = stats.poisson.pmf(VALUES, rates)
    np.testing.assert_allclose(poisson().prob(VALUES), 0.2 * zeros + 0.8 * counted, rtol=1e-9)
    counted = stats.nbinom.pmf(VALUES, 0.8, 0.8 / (0.8 + rates))
    expected = 0.2 * zeros + 0.8 * counted
    np.testing.assert_allclose(negative_binomial().prob(VALUES), expected, rtol=1e-9)
    above = 0.8 * stats.poisson.pmf(VALUES, rates) / stats.poisson.sf(0, rates)
    np.testing.assert_allclose(hurdle().prob(VALUES), np.where(zeros, 0.2, above), rtol=1e-9)


@pytest.mark.parametrize("make", [poisson, negative_binomial, hurdle])
def test_draws_have_these_probabilities(make):
    """Pearson's test of 20,000 draws at p = 1e-4 each, and the mean within five standard errors."""
    distribution = make()
    draws = distribution.sample(NUM, seed=[0, 1]).numpy()
    assert draws.shape == (NUM, 2)
    shares = distribution.prob(VALUES).numpy()
    for number in range(2):
        seen = np.bincount(draws[:, number].astype(int), minlength=len(VALUES))[: len(VALUES)]
        expected = NUM * shares[:, number]
        common = expected > 5.0
        observed = np.append(seen[common], NUM - seen[common].sum())
        expected = np.append(expected[common], NUM - expected[common].sum())
        kept = expected > 0.5
        statistic = np.sum((observed - expected)[kept] ** 2 / expected[kept])
        assert stats.chi2.sf(statistic, kept.sum() - 1) > 1e-4
    error = draws.std(axis=0) / np.sqrt(NUM)
    np.testing.assert_array_less(np.abs(draws.mean(axis=0) - distribution.mean()), 5.0 * error)


def test_the_test_would_see_a_wrong_share_of_zeros():
    draws = Hurdle(RATES, 0.22).sample(NUM, seed=[0, 1]).numpy()
    assert stats.binomtest(int(np.sum(draws[:, 1] == 0)), NUM, 0.2).pvalue < 1e-4
