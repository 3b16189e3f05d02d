"""Rubin's rules: by hand, and their coverage on synthetic data whose posterior is known.

Coverage checks are binomial tests at `statistics.ALPHA` = 1e-9 a side.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
import scipy.stats
from support import statistics

from tfp_dpvi.synthetic import rubin

of_means = functools.partial(rubin, means_or_shares=True)


def test_fully_synthetic_by_hand():
    found = of_means([1.0, 2.0, 3.0, 6.0], [0.5, 0.4, 0.6, 0.5])
    b, v, m = 14.0 / 3.0, 0.5, 4
    assert found.estimate == 3.0
    assert found.between == pytest.approx(b)
    assert found.variance == pytest.approx((1 + 1 / m) * b - v)
    assert found.degrees_of_freedom == pytest.approx((m - 1) * (1 - v * m / ((m + 1) * b)) ** 2)
    assert not found.adjusted
    low, high = found.interval(0.9)
    half = scipy.stats.t.ppf(0.95, found.degrees_of_freedom) * found.standard_error
    assert (low, high) == (pytest.approx(3.0 - half), pytest.approx(3.0 + half))


def test_a_negative_variance_is_replaced_and_said():
    found = of_means([[1.0, 1.0], [1.1, 9.0], [0.9, 5.0]], [[4.0, 0.1]] * 3)
    np.testing.assert_array_equal(found.adjusted, [True, False])
    assert found.variance[0] == 4.0
    assert found.variance[1] > 0
    assert np.isfinite(found.interval()).all()
    same = of_means([1.0, 1.0], [0.2, 0.2])
    assert same.adjusted
    assert same.variance == pytest.approx(0.2)
    assert np.isfinite(same.interval()).all()


def test_no_variance_is_below_that_of_as_many_records():
    """The rules alone give 0.4 of it here, and said nothing."""
    estimates = [1.0, 1.0 + 2.0 * 1.4**0.5] * 50
    found = of_means(estimates, [1.4] * 100)
    assert found.between < 2.0 * found.within
    assert found.variance == pytest.approx(1.4)
    assert found.adjusted
    assert "less than the variance of as many records" in found.caveats[1]


def test_a_use_says_for_which_estimates_the_rules_hold():
    """It cannot know what it is given, so it says so: in the result, and to whom does not say it."""
    with pytest.warns(UserWarning, match="regression coefficients") as caught:
        found = rubin([[1.0, 2.0], [1.1, 3.0]], [[4.0, 0.1]] * 2)
    (warning,) = caught
    assert warning.filename == __file__
    assert str(warning.message).count("\n") <= 1
    always, replaced = found.caveats
    assert "means and shares" in always
    assert "regression coefficients" in always
    assert "1 of 2 estimates" in replaced
    (only,) = rubin([1.0, 2.0], [0.1, 0.1], means_or_shares=True).caveats  # Does not warn.
    assert only == always


def exact_coverage(m, level=0.95):
    """Coverage of the published interval in `check_coverage`, by quadrature, in units of the records' standard error.

    The between-set variance is 2 chi^2_{m-1} / (m - 1), independent of the estimate, whose variance is 1 + 2 / m.
    """
    grid = (np.arange(200_000) + 0.5) / 200_000
    spread = (1 + 1 / m) * 2 * scipy.stats.chi2.ppf(grid, m - 1) / (m - 1)
    positive = spread > 2.0
    freedom = np.where(positive, np.maximum((m - 1) * (1 - 1 / spread) ** 2, 1.0), m - 1)
    half = scipy.stats.t.ppf(0.5 + level / 2, freedom) * np.sqrt(
        np.where(positive, spread - 1.0, 1.0)
    )
    return np.mean(2 * scipy.stats.norm.cdf(half / np.sqrt(1 + 2 / m)) - 1)


def check_coverage(rule, repeats=40_000, num=200, m=20):
    """A normal mean with known spread, one posterior draw a set: the 95 % interval covers as often as theory says.

    The rule covers 0.9747 here, not 0.95, as no variance is below that of as many records. The published one, without
    that, covers 0.9907: its degrees of freedom are few where its variance is small.
    """
    generator = np.random.default_rng(None)
    data = generator.normal(size=repeats) / np.sqrt(num)  # Means of the records.
    thetas = data[:, None] + generator.normal(size=(repeats, m)) / np.sqrt(num)
    estimates = thetas + generator.normal(size=(repeats, m)) / np.sqrt(num)
    found = rule(estimates.T, np.full((m, repeats), 1 / num))
    low, high = found.interval(0.95)
    covered = int(np.sum((low <= 0) & (high >= 0)))
    expected = exact_coverage(m)
    statistics.plausible(scipy.stats.binom.cdf(covered, repeats, expected), "coverage is too low")
    statistics.plausible(
        scipy.stats.binom.sf(covered - 1, repeats, expected), "coverage is too high"
    )


def test_the_published_rule_is_conservative_for_few_sets():
    """What `rubin` says of itself: above the nominal 0.95 for 20 sets, close to it for 100."""
    assert exact_coverage(20) == pytest.approx(0.9747, abs=5e-4)
    assert exact_coverage(100) == pytest.approx(0.9624, abs=5e-4)


def test_intervals_cover_the_truth():
    check_coverage(of_means)


def test_a_wrong_rule_is_caught():
    """Rubin's rule for missing data, v + (1 + 1/m) b, is too wide here; the mean's own spread, b / m, too narrow.

    They cover 0.9990 and 0.43; the first fails of 40,000 intervals 40, and fewer than 200 are taken for a mistake.
    """

    class Rule:
        def __init__(self, estimate, variance):
            self.centre, self.sd = estimate, np.sqrt(variance)

        def interval(self, level):
            half = scipy.stats.norm.ppf(0.5 + level / 2) * self.sd
            return self.centre - half, self.centre + half

    def missing_data(estimates, variances):
        found = of_means(estimates, variances)
        return Rule(found.estimate, found.within + 1.05 * found.between)

    def of_the_mean(estimates, variances):
        found = of_means(estimates, variances)
        return Rule(found.estimate, found.between / 20)

    with pytest.raises(AssertionError, match="too high"):
        check_coverage(missing_data)
    with pytest.raises(AssertionError, match="too low"):
        check_coverage(of_the_mean)


@pytest.mark.parametrize(
    ("arguments", "error", "named"),
    [
        (([1.0], [1.0]), ValueError, "at least 2"),
        ((1.0, 1.0), ValueError, "at least 2"),
        (([1.0, 2.0], [1.0]), ValueError, "variances"),
        (([1.0, 2.0], [1.0, -1.0]), ValueError, "negative"),
        (([1.0, np.nan], [1.0, 1.0]), ValueError, "not finite"),
    ],
)
def test_bad_arguments(arguments, error, named):
    with pytest.raises(error, match=named):
        of_means(*arguments)


def test_bad_level():
    with pytest.raises(ValueError, match="level=95"):
        of_means([1.0, 2.0], [1.0, 1.0]).interval(95)
