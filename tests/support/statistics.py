"""Tests of distributions with a stated false-alarm rate.

Keys follow from a test's name and `TFP_DPVI_TEST_SEED` (`tests/conftest.py`). Each p-value is compared with
`ALPHA` = 1e-9; a run of all tests with another seed looks at fewer than 500 of them, so it raises a false alarm with a probability below
5e-7 (p-values of large samples, by asymptotic laws, which are good to a small factor at these sizes).
"""

import numpy as np
import scipy.stats

from tfp_dpvi import _random
from tfp_dpvi._tf import tf

ALPHA = 1e-9


def fresh_key():
    return tf.constant(_random.new_key())


def plausible(p_value, what):
    """Fails if a p-value is below ALPHA."""
    assert p_value >= ALPHA, f"{what}: p = {p_value:.3g} < {ALPHA:g}"


def standard_score(score, what):
    """Fails if a standard normal score is implausible."""
    plausible(2.0 * scipy.stats.norm.sf(abs(score)), f"{what} (score {score:.2f})")


def fits(observed, expected, what, *, least=20.0):
    """Pearson's test of counts against expectations; neighbouring cells are pooled until each expects `least`."""
    observed, expected = np.asarray(observed, float), np.asarray(expected, float)
    np.testing.assert_allclose(observed.sum(), expected.sum(), rtol=1e-6)
    cells, pooled = [], np.zeros(2)
    for pair in zip(observed, expected, strict=True):
        pooled = pooled + pair
        if pooled[1] >= least:
            cells.append(pooled)
            pooled = np.zeros(2)
    cells[-1] = cells[-1] + pooled
    o, e = np.transpose(cells)
    plausible(scipy.stats.chi2.sf(np.sum((o - e) ** 2 / e), len(cells) - 1), what)


def binomial_sizes(sizes, num, probability, what):
    """Batch sizes against the exact Binomial(num, probability)."""
    sizes = np.asarray(sizes)
    low, high = scipy.stats.binom.ppf([1e-12, 1 - 1e-12], num, probability).astype(int)
    low, high = min(low, sizes.min()), max(high, sizes.max())
    expected = scipy.stats.binom.pmf(np.arange(low, high + 1), num, probability)
    fits(
        np.bincount(sizes - low, minlength=high - low + 1),
        len(sizes) * expected / expected.sum(),
        what,
    )


def standard_deviation(values, expected, what, *, within=0.01):
    """A known-mean-zero normal sample's standard deviation: chi-square test, and within a relative bound.

    The sample must be so large that `within` is more than 6 standard errors.
    """
    values = np.asarray(values, np.float64).ravel()
    num = len(values)
    assert within * np.sqrt(2 * num) > 6.0, "the sample is too small for this bound"
    squares = np.sum((values / expected) ** 2)
    plausible(2 * min(scipy.stats.chi2.sf(squares, num), scipy.stats.chi2.cdf(squares, num)), what)
    ratio = np.sqrt(squares / num)
    assert abs(ratio - 1.0) < within, (
        f"{what}: standard deviation is {ratio:.4f} times what it must be"
    )


def standard_normal(values, what):
    """Kolmogorov-Smirnov test against N(0, 1)."""
    plausible(scipy.stats.kstest(np.asarray(values, np.float64).ravel(), "norm").pvalue, what)


def uncorrelated(a, b, what):
    """Two paired samples with mean zero have no correlation."""
    a, b = np.asarray(a, np.float64).ravel(), np.asarray(b, np.float64).ravel()
    standard_score(a @ b / np.sqrt((a @ a) * (b @ b)) * np.sqrt(len(a)), what)
