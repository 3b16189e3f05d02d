"""Rubin's rules: by hand, and their coverage on synthetic data whose posterior is known.

Coverage checks are binomial tests at `statistics.ALPHA` = 1e-9 a side.
"""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
from support import statistics

from tfp_dpvi.synthetic import rubin


def test_fully_synthetic_by_hand():
    found = rubin([1.0, 2.0, 3.0, 6.0], [0.5, 0.4, 0.6, 0.5])
    b, v, m = 14.0 / 3.0, 0.5, 4
    assert found.estimate == 3.0
    assert found.between == pytest.approx(b)
    assert found.variance == pytest.approx((1 + 1 / m) * b - v)
    assert found.degrees_of_freedom == pytest.approx((m - 1) * (1 - v * m / ((m + 1) * b)) ** 2)
    assert not found.adjusted
    low, high = found.interval(0.9)
    half = scipy.stats.t.ppf(0.95, found.degrees_of_freedom) * found.standard_error
    assert (low, high) == (pytest.approx(3.0 - half), pytest.approx(3.0 + half))


def test_partially_synthetic_by_hand():
    found = rubin([1.0, 2.0, 3.0, 6.0], [0.5, 0.4, 0.6, 0.5], kind="partially_synthetic")
    b, v, m = 14.0 / 3.0, 0.5, 4
    assert found.variance == pytest.approx(v + b / m)
    assert found.degrees_of_freedom == pytest.approx((m - 1) * (1 + v * m / b) ** 2)


def test_a_negative_variance_is_replaced_and_said():
    found = rubin([[1.0, 1.0], [1.1, 9.0], [0.9, 5.0]], [[4.0, 0.1]] * 3)
    np.testing.assert_array_equal(found.adjusted, [True, False])
    assert found.variance[0] == 4.0
    assert found.variance[1] > 0
    assert np.isfinite(found.interval()).all()
    same = rubin([1.0, 1.0], [0.2, 0.2])
    assert same.adjusted
    assert same.variance == pytest.approx(0.2)
    assert np.isfinite(same.interval()).all()


def check_coverage(rule, repeats=4000, num=200, m=20):
    """A normal mean with known spread: own posterior draw for each set. The 95 % interval holds the truth as it says."""
    generator = np.random.default_rng(None)
    data = generator.normal(size=repeats) / np.sqrt(num)  # Means of the records.
    thetas = data[:, None] + generator.normal(size=(repeats, m)) / np.sqrt(num)
    estimates = thetas + generator.normal(size=(repeats, m)) / np.sqrt(num)
    found = rule(estimates.T, np.full((m, repeats), 1 / num))
    low, high = found.interval(0.95)
    covered = int(np.sum((low <= 0) & (high >= 0)))
    # The t law of the rule is itself an approximation: within [0.92, 0.985].
    statistics.plausible(scipy.stats.binom.cdf(covered, repeats, 0.92), "coverage is too low")
    statistics.plausible(scipy.stats.binom.sf(covered - 1, repeats, 0.985), "coverage is too high")


def test_intervals_cover_the_truth():
    check_coverage(rubin)


def test_a_wrong_rule_is_caught():
    """Rubin's rule for missing data, v + (1 + 1/m) b, is too wide here; the mean's own spread, b / m, too narrow."""

    class Rule:
        def __init__(self, estimate, variance):
            self.centre, self.sd = estimate, np.sqrt(variance)

        def interval(self, level):
            half = scipy.stats.norm.ppf(0.5 + level / 2) * self.sd
            return self.centre - half, self.centre + half

    def missing_data(estimates, variances):
        found = rubin(estimates, variances)
        return Rule(found.estimate, found.within + 1.05 * found.between)

    def of_the_mean(estimates, variances):
        found = rubin(estimates, variances)
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
        (("ab", [1.0, 1.0]), TypeError, "estimates"),
    ],
)
def test_bad_arguments(arguments, error, named):
    with pytest.raises(error, match=named):
        rubin(*arguments)


def test_bad_kind_and_level():
    with pytest.raises(ValueError, match="kind='half'"):
        rubin([1.0, 2.0], [1.0, 1.0], kind="half")
    with pytest.raises(ValueError, match="level=95"):
        rubin([1.0, 2.0], [1.0, 1.0]).interval(95)
