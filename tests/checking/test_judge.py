"""Tests hold their level, see the faults that they are for, and say what was found."""

import numpy as np
import pytest
from scipy import stats

from tfp_dpvi.checking.declared import PROBABILITIES, Bins, CheckedOutcome, Declared
from tfp_dpvi.checking.judge import judge, smooth_contrasts
from tfp_dpvi.checking.null import Estimate, variance_factor
from tfp_dpvi.checking.outcomes import RecordScores
from tfp_dpvi.checking.release import _parts
from tfp_dpvi.checking.result import PrivateChecks

NUM = 5000
NOISE = 16.3  # The noise multiplier of epsilon 0.2 at delta 1e-5.
EDGES = [-0.8, -0.25, 0.25, 0.8]


def released(rng, *, pit=None, residual=None, column=None, probability=None, name="Poisson"):
    """The checks of given exact scores, with the noise of epsilon 0.2."""
    pit = rng.uniform(size=NUM) if pit is None else pit
    residual = 2.0 * pit - 1.0 if residual is None else residual
    column = rng.normal(size=NUM) if column is None else column
    is_binary = probability is not None
    ones = np.ones(NUM)
    variance = 3.0 * probability * (1.0 - probability) if is_binary else ones
    shown = probability if is_binary else np.zeros(NUM)
    scores = RecordScores(pit, residual, variance, shown, -1.4 * ones, ones > 0.0)
    outcome = CheckedOutcome(is_binary, name != "Normal", name, -1.0)
    what = Declared(outcome, {"age": Bins.of_numbers("age", column, EDGES)}, (-10.0, 0.0))
    parts = zip(what.blocks, _parts(what, scores), strict=True)
    sums = np.concatenate([block.contribution(*part).sum(axis=0) for block, part in parts])
    deviation = NOISE * what.sensitivity.add_or_remove
    noisy = sums + deviation * rng.normal(size=len(sums))
    settings = {"factor": 1.0, "num_records": NUM, "epsilon": 0.2, "delta": 1e-5}
    return judge(what, noisy, deviation=deviation, **settings)


def rate(make, num=300):
    rng = np.random.default_rng(5)
    return np.mean([not make(rng).passed for _ in range(num)])


def right_labels(rng, flipped=0.0):
    probability = 1.0 / (1.0 + np.exp(-3.0 * rng.normal(size=NUM)))
    y = (rng.uniform(size=NUM) < probability) ^ (rng.uniform(size=NUM) < flipped)
    return {"probability": probability, "residual": y - probability}


def test_no_more_false_alarms_than_the_level():
    """At most 5 %, of 400 sets each: a rate of 9 % would be 3.7 standard errors above."""
    assert rate(released, 400) < 0.09
    assert rate(lambda rng: released(rng, **right_labels(rng)), 400) < 0.09


def test_faults_are_seen_and_named():
    rng = np.random.default_rng(0)
    mean = np.exp(0.3 + 0.5 * rng.normal(size=NUM))
    counts = rng.poisson(mean * rng.gamma(1.5, 1.0 / 1.5, size=NUM))
    place = rng.uniform(size=NUM) * stats.poisson.pmf(counts, mean)
    wide = released(rng, pit=stats.poisson.cdf(counts - 1, mean) + place)
    assert wide.verdict[0] == "counts vary more than the model says: try negative binomial"
    pit = stats.poisson.cdf(counts - 1, mean) + place
    for name, advice in {
        "Binomial": "try beta-binomial",
        "BetaBinomial": "add terms",
        "NegativeBinomial": "model zeros apart",
    }.items():
        assert released(rng, pit=pit, name=name).verdict[0].endswith(advice)
    tails = rng.standard_t(3, size=NUM)
    pit = stats.norm.cdf(tails / tails.std())
    assert "StudentT" in released(rng, pit=pit, name="Normal").verdict[0]
    assert "StudentT," not in released(rng, pit=pit, name="StudentT").verdict[0]
    x = rng.normal(size=NUM)
    bent = stats.norm.cdf(rng.normal(size=NUM) + 0.2 * (x**2 - 1.0))
    assert "add its square" in released(rng, pit=bent, column=x, name="Normal").verdict[-1]
    labels = released(rng, name="Bernoulli", **right_labels(rng, flipped=0.15))
    assert "mislabelled" in labels.verdict[0]


def test_a_few_wrong_labels_are_named_as_such():
    """A fit that has followed them leaves a contrast that few records show: it is what is said."""
    rng = np.random.default_rng(4)
    named = 0
    for _ in range(40):
        labels = right_labels(rng, flipped=0.05)
        # What a fit takes away: the mean residual, and its slope in the logit.
        logit = np.log(labels["probability"] / (1.0 - labels["probability"]))
        weight = labels["probability"] * (1.0 - labels["probability"])
        columns = np.stack([np.ones(NUM), logit], axis=1)
        moved = np.linalg.solve((columns.T * weight) @ columns, columns.T @ labels["residual"])
        fitted = 1.0 / (1.0 + np.exp(-logit - columns @ moved))
        y = labels["residual"] + labels["probability"]
        result = released(rng, probability=fitted, residual=y - fitted, name="Bernoulli")
        named += "mislabelled" in str(result)
    assert named > 20


def test_a_curve_is_undone_from_its_coordinates():
    """With a known fault in one bin and little noise the reliability curve shows it."""
    rng = np.random.default_rng(1)
    probability = np.full(NUM, 0.3)
    y = rng.uniform(size=NUM) < 0.5
    result = released(rng, probability=probability, residual=y - probability, name="Bernoulli")
    at = int(np.searchsorted(PROBABILITIES, 0.3))
    assert result.profiles[0].values[at] == pytest.approx(0.2, abs=0.05)
    assert "1 more often than predicted where their probability is 0.1 to 0.5" in str(result)


def test_contrasts_are_orthonormal_and_sum_to_zero():
    contrasts = smooth_contrasts(10)
    np.testing.assert_allclose(contrasts @ contrasts.T, np.eye(4), atol=1e-12)
    np.testing.assert_allclose(contrasts.sum(axis=1), 0.0, atol=1e-12)


def test_a_result_is_saved_whole():
    result = released(np.random.default_rng(2))
    again = PrivateChecks.from_dict(result.to_dict())
    assert again.to_dict() == result.to_dict()
    assert str(again) == str(result)


def test_the_picture_has_a_panel_for_each_test():
    pytest.importorskip("matplotlib").use("agg")
    result = released(np.random.default_rng(2))
    axes = result.plot()
    assert [ax.get_title() for ax in axes] == ["PIT values", "residuals by age"]


# ---------------------------------------------------------------- the fit is of the same records


@pytest.mark.parametrize("noise", [0.0, 1.0, 5.0])
def test_the_factor_bounds_what_a_fit_to_the_same_records_leaves(noise):
    """A linear regression whose estimate gets noise of so many times its variance, or an own prior.

    In every direction the variance of residuals by bins stays below the factor times that at the
    truth; without noise it is clearly below: the estimate has followed the records.
    """
    rng = np.random.default_rng(3)
    num, sets = 200, 1500
    x = np.stack([np.ones(num), np.linspace(-1.7, 1.7, num)], axis=1)
    codes = np.searchsorted([-0.8, 0.0, 0.8], x[:, 1])
    information = x.T @ x
    prior_variance = 1.0
    precision = np.linalg.inv((1.0 + noise) * np.linalg.inv(information)) + np.eye(2)
    variance = np.linalg.inv(precision)
    gain = np.linalg.inv(np.linalg.inv(information) * (1.0 + noise) + np.eye(2))
    sums, shares = [], np.zeros([2, 3])
    for _ in range(sets):
        truth = rng.normal(size=2)
        y = x @ truth + rng.normal(size=num)
        exact = np.linalg.solve(information, x.T @ y)
        extra = np.linalg.cholesky(noise * np.linalg.inv(information) + 1e-12 * np.eye(2))
        estimate = gain @ (exact + extra @ rng.normal(size=2))
        residual = 2.0 * stats.norm.cdf(y - x @ estimate) - 1.0
        sums.append(np.bincount(codes, residual, minlength=4))
    of_data = np.diag(gain @ np.linalg.inv(information) @ gain.T)
    of_noise = noise * of_data
    rest = np.diag(variance) - of_data - of_noise
    shares = np.stack([of_noise, of_data, rest], axis=1) / np.diag(variance)[:, None]
    estimate = Estimate(shares, np.diag(variance), np.full(2, prior_variance))
    factor = variance_factor(estimate, same_records=True)
    bound = factor * np.bincount(codes) / 3.0
    ratio = np.cov(np.array(sums).T) / np.sqrt(np.outer(bound, bound))
    largest = np.linalg.eigvalsh(ratio)[-1]
    # 1,500 sets: the largest of four eigenvalues by chance.
    assert largest < 1.15
    assert factor == pytest.approx(max(1.0, noise), rel=0.1)
    if noise == 5.0:
        assert largest > 0.3


def test_records_that_were_not_fitted_vary_more():
    """Held-out records: the estimate's own variance comes on top."""
    shares, variance = np.array([[0.0, 1.0, 0.0]]), np.array([0.01])
    estimate = Estimate(shares, variance, np.array([np.inf]))
    assert variance_factor(estimate, same_records=False, records_ratio=0.5) == 1.5
    assert variance_factor(None, same_records=True) == 1.0
