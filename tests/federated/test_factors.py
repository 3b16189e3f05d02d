"""The algebra of factors against dense normals written out with SciPy, and the guard."""

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from scipy import stats

from tfp_dpvi.federated import Factor, guard, product

SETTINGS = hypothesis.settings(max_examples=60)
cases = st.tuples(st.integers(0, 2**32 - 1), st.integers(1, 6), st.booleans())


def draw(seed, num, full_rank):
    """Returns a random normal as mean, dense covariance and factor."""
    rng = np.random.default_rng(seed)
    mean, root = rng.normal(size=num), rng.normal(size=(num, num)) + 2.0 * np.eye(num)
    covariance = root @ root.T if full_rank else np.diag(rng.uniform(0.1, 4.0, size=num))
    return mean, covariance, Factor.normal(mean, covariance if full_rank else np.diag(covariance))


@SETTINGS
@hypothesis.given(cases)
def test_a_factor_is_its_normal(case):
    mean, covariance, factor = draw(*case)
    np.testing.assert_allclose(factor.mean, mean, rtol=1e-6, atol=1e-8)
    dense = factor.covariance if factor.full_rank else np.diag(factor.covariance)
    np.testing.assert_allclose(dense, covariance, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(factor.stddev, np.sqrt(np.diag(covariance)), rtol=1e-6)
    assert factor.proper


@SETTINGS
@hypothesis.given(cases)
def test_products_quotients_and_powers_are_those_of_densities(case):
    """Compares differences of log densities between points, where constants cancel."""
    seed, num, full_rank = case
    one, other = draw(seed, num, full_rank)[2], draw(seed + 1, num, full_rank)[2]
    z = np.random.default_rng(2).normal(size=(4, num))

    def log_density(seed):
        mean, covariance, _ = draw(seed, num, full_rank)
        return np.atleast_1d(stats.multivariate_normal(mean, covariance).logpdf(z))

    def unnormalised(factor):
        full = factor.precision if factor.full_rank else np.diag(factor.precision)
        values = z @ factor.shift - 0.5 * np.einsum("ni,ij,nj->n", z, full, z)
        return values - values[0]

    log_one, log_other = (d - d[0] for d in map(log_density, (seed, seed + 1)))
    scale = 1.0 + np.abs(log_one).max() + np.abs(log_other).max()
    np.testing.assert_allclose(unnormalised(one * other), log_one + log_other, atol=1e-8 * scale)
    np.testing.assert_allclose(unnormalised(one / other), log_one - log_other, atol=1e-8 * scale)
    np.testing.assert_allclose(unnormalised(one**0.3), 0.3 * log_one, atol=1e-8 * scale)
    both = product([one, other])
    np.testing.assert_allclose(both.precision, (one * other).precision, rtol=1e-12)
    assert both.proper


@SETTINGS
@hypothesis.given(cases)
def test_the_guard_takes_the_largest_power_and_no_less(case):
    """The precision ends above the floor; twice the factor would not have it, unless all of the change was taken."""
    seed, num, full_rank = case
    posterior, taken = draw(seed, num, full_rank)[2], draw(seed + 1, num, full_rank)[2]
    change = Factor.one(num, full_rank=full_rank) / taken**3.0  # Takes precision away.
    floor = posterior.precision / 2.0
    f = guard(posterior, change, floor)
    assert f > 0.0
    assert (posterior * change**f).exceeds(floor)
    assert f == 1.0 or not (posterior * change ** (2.0 * f)).exceeds(floor)
    assert guard(posterior, taken, floor) == 1.0


def test_the_guard_gives_a_hopeless_change_up():
    posterior = Factor(np.zeros(1), np.ones(1))
    assert guard(posterior, Factor(np.zeros(1), np.array([-1e12])), np.full(1, 0.5)) == 0.0


@SETTINGS
@hypothesis.given(cases)
def test_draws_have_the_moments(case):
    """Means of 4,000 draws lie within 7 standard errors: a false alarm has a probability below 1e-11."""
    mean, covariance, factor = draw(*case)
    draws = factor.sample(4000, np.random.default_rng(3))
    assert np.all(np.abs(draws.mean(0) - mean) <= 7.0 * np.sqrt(np.diag(covariance) / 4000))
    z = np.linalg.solve(np.linalg.cholesky(covariance), (draws - mean).T)
    assert np.all(np.abs(z @ z.T / 4000 - np.eye(len(mean))) <= 7.0 * np.sqrt(2.0 / 4000))


@pytest.mark.parametrize(
    ("shift", "precision", "says"),
    [
        ([0.0], [1.0, 2.0], r"\(1,\) and \(2,\)"),
        ([0.0, np.nan], [1.0, 2.0], "not finite"),
        ([0.0, 0.0], [[1.0, 0.5], [0.1, 1.0]], "not symmetric"),
        ([0.0, 0.0], [[0.25, 1.0], [0.0, 1e8]], "not symmetric"),  # Units differ.
        (0.0, 1.0, "shapes"),
    ],
)
def test_bad_numbers_are_refused(shift, precision, says):
    with pytest.raises(ValueError, match=says):
        Factor(shift, precision)


def test_factors_do_not_change():
    given = np.ones(2)
    factor = Factor(given, np.ones(2))
    given[0] = 5.0
    assert factor.shift[0] == 1.0
    with pytest.raises(ValueError, match="read-only"):
        factor.shift[0] = 2.0
