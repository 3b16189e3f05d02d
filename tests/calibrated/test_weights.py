"""Survey weights: their scores, what is released of them, and how wide the clip is."""

import numpy as np
import pytest
import scipy.stats
import tensorflow as tf

from tfp_dpvi.calibrated.centred import RecordWeights, centre_outcomes, centre_two_outcomes
from tfp_dpvi.calibrated.checks import MOST_CUT, Checks
from tfp_dpvi.calibrated.weights import (
    ReleasedWeights,
    ScoreVariance,
    WeightScale,
    WeightSums,
    numbers_of,
)
from tfp_dpvi.gradients import Clip

NUM, OUTCOMES, SIZE = 60, 5, 3
GAIN = 0.7


def scores(seed=0):
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(NUM, OUTCOMES, SIZE)) * rng.lognormal(size=(NUM, 1, 1))
    weights = np.exp(rng.normal(size=(NUM, OUTCOMES)))
    weights /= weights.sum(axis=1, keepdims=True)
    return values, weights, np.eye(OUTCOMES)[rng.integers(OUTCOMES, size=NUM)]


def centred(values, weights, observed, survey, bound=1.0):
    parts = (values, weights, weights, observed)
    if survey is not None:
        survey = RecordWeights(*map(tf.constant, (survey, np.float64(GAIN), np.float64(1.0))))
    return centre_outcomes(*map(tf.constant, parts), bound, 8, survey=survey)


def two(difference, probability, outcome, survey, bound=1.0):
    if survey is not None:
        survey = RecordWeights(*map(tf.constant, (survey, np.float64(GAIN), np.float64(1.0))))
    return centre_two_outcomes(*map(tf.constant, (difference, probability, outcome)), bound, survey)


def survey_weights(seed=1):
    """From zero to the largest one."""
    weights = GAIN * np.random.default_rng(seed).beta(0.5, 1.0, NUM)
    weights[:4] = [0.0, 1e-30, 1e-7, GAIN]
    return weights


def test_a_weight_is_that_of_the_score_before_the_clip():
    """clip_C(w u) = w clip_{C/w}(u), outcome by outcome, and its mean over outcomes is zero."""
    values, weights, _ = scores()
    survey = survey_weights()
    all_psi = []
    for number in range(OUTCOMES):
        observed = np.tile(np.eye(OUTCOMES)[number], (NUM, 1))
        all_psi.append(centred(values, weights, observed, survey).psi.numpy())
    psi = np.stack(all_psi, axis=1)
    assert np.linalg.norm(psi, axis=2).max() <= 1.0 + 1e-12
    assert np.linalg.norm(psi, axis=2).max() > 0.99
    np.testing.assert_allclose(np.einsum("nj,njd->nd", weights, psi), 0.0, atol=1e-12)
    few = slice(4, None)
    for row in range(4, 12):
        own = centred(values[[row]], weights[[row]], np.eye(OUTCOMES)[[0]], None, 1 / survey[row])
        np.testing.assert_allclose(psi[row, 0], survey[row] * own.psi[0], rtol=1e-9, atol=1e-12)
    # Where nothing is cut it is the weighted score less its mean: Horvitz and Thompson's.
    short = 1e-3 * values
    exact = centred(short, weights, np.eye(OUTCOMES)[np.zeros(NUM, int)], survey).psi.numpy()
    away = short[:, 0] - np.einsum("nj,njd->nd", weights, short)
    np.testing.assert_allclose(exact[few], (survey[:, None] * away)[few], rtol=1e-9, atol=1e-15)


def test_two_outcomes_are_those_of_the_iteration():
    rng = np.random.default_rng(0)
    difference = rng.normal(size=(NUM, SIZE)) * 3.0
    probability = rng.uniform(0.02, 0.98, NUM)
    outcome = rng.integers(0, 2, NUM).astype(float)
    survey = survey_weights()
    closed = two(difference, probability, outcome, survey)
    values = np.stack(
        [-probability[:, None] * difference, (1 - probability)[:, None] * difference], 1
    )
    weights = np.stack([1 - probability, probability], axis=1)
    observed = np.stack([1 - outcome, outcome], axis=1)
    iterated = centre_outcomes(
        *map(tf.constant, (values, weights, weights, observed)), 1.0, 400,
        survey=RecordWeights(*map(tf.constant, (survey, np.float64(GAIN), np.float64(1.0)))),
    )  # fmt: skip
    for name in ("psi", "square", "expected", "excess_slope", "excess_variance"):
        np.testing.assert_allclose(
            getattr(closed, name), getattr(iterated, name), rtol=2e-3, atol=1e-6, err_msg=name
        )
    for part in (closed, iterated):
        rows = part.rows.numpy()
        outer = np.einsum("nja,njb->nab", rows, rows)
        assert np.trace(outer, axis1=1, axis2=2).max() <= 1.0 + 1e-9
    away = np.abs(outcome - probability)
    np.testing.assert_allclose(
        closed.length, survey * away * np.linalg.norm(difference, axis=1), rtol=1e-6
    )


def test_weights_of_one_change_nothing():
    values, weights, observed = scores()
    plain = centred(values, weights, observed, None)
    survey = RecordWeights(tf.ones([NUM], tf.float64), *[tf.ones([], tf.float64)] * 2)
    parts = map(tf.constant, (values, weights, weights, observed))
    same = centre_outcomes(*parts, 1.0, 8, survey=survey)
    for name, part, other in zip(plain._fields, plain, same, strict=True):
        for one, two in zip(tf.nest.flatten(part), tf.nest.flatten(other), strict=True):
            np.testing.assert_allclose(one, two, rtol=1e-12, atol=1e-15, err_msg=name)


def test_the_check_of_the_likelihood_is_linear_in_weights_that_are_not_cut():
    """So that its mean over a sample is the population's, whatever inclusion depends on."""
    values, weights, observed = scores()
    values *= 0.5
    small = centred(values, weights, observed, np.full(NUM, 0.01 * GAIN))
    large = centred(values, weights, observed, np.full(NUM, 0.02 * GAIN))
    np.testing.assert_allclose(2.0 * small.square, large.square, rtol=1e-6)
    np.testing.assert_allclose(2.0 * small.expected, large.expected, rtol=1e-6)
    assert np.max(large.square) <= 1.0


def test_what_is_summed_of_weights_and_scores_keeps_its_bounds():
    share = np.array([0.0, 1.0, 0.3, 1.0])
    length = np.array([0.0, 1e30, 1.2, 1.0])
    numbers = np.stack(numbers_of(tf.constant(share), tf.constant(length)), axis=1)
    np.testing.assert_allclose(numbers[:, 2], [0.0, 1.0, 0.4, 0.0])
    assert numbers.min() >= 0.0
    most = WeightSums().sensitivity
    norms = np.linalg.norm(numbers, axis=1)
    assert norms.max() == pytest.approx(most.add_or_remove)
    assert np.linalg.norm(numbers[1] - numbers[0]) <= most.replace
    for size in (1, SIZE, 60):
        release = ScoreVariance(size, Clip(1.0))
        stated = release.sensitivity
        assert stated.replace <= 2.0 * stated.add_or_remove
        assert release.shape == ((size, size) if size < 51 else (size + 32,))


def released(share, length, noise=0.0):
    means = np.mean(numbers_of(tf.constant(share), tf.constant(length)), axis=1)
    return ReleasedWeights(*means.tolist(), noise)


@pytest.mark.parametrize("kind", ["uniform", "few", "skewed"])
def test_the_clip_cuts_no_more_than_it_may_even_if_the_longest_scores_weigh_most(kind):
    rng = np.random.default_rng(2)
    num = 4000
    share = {
        "uniform": rng.uniform(0.05, 1.0, num),
        "few": np.where(rng.random(num) < 0.2, 1.0, 0.05),
        "skewed": np.minimum(rng.lognormal(-2.0, 0.5, num), 1.0),
    }[kind]
    length = np.linalg.norm(rng.normal(size=(num, 4)), axis=1) / 2.0
    scale = WeightScale.of_released(released(share, length), length)
    assert not scale.are_alike
    assert scale.shares.mean() == pytest.approx(share.mean(), rel=0.03)
    worst = scale.gain * np.sort(share) * np.sort(length)
    cut, _ = released(np.sort(share), worst).share_cut
    assert cut < (1.5 if kind == "skewed" else 1.0) * MOST_CUT
    # No wider than that needs: at two thirds of the clip much more would be cut.
    assert released(np.sort(share), 2.0 * worst).share_cut[0] > 2.0 * MOST_CUT


def test_weights_are_alike_only_where_that_is_sure():
    length = np.ones(100)
    equal = np.full(100, 0.25)
    assert released(equal, length).are_alike
    scale = WeightScale.of_released(released(equal, length), length)
    assert scale.gain == pytest.approx(4.0)
    assert scale.ratio == pytest.approx(1.0)
    assert not released(equal, length, noise=1e-5).are_alike
    assert released(np.full(100, 0.15, "float32"), length).are_alike
    # Small differences may depend on outcomes: beside the errors of many records they are large.
    for away in (0.05, 2.5e-3, 5e-4):
        unlike = np.tile([0.25 - away, 0.25 + away], 50)
        assert released(unlike, length).variation == pytest.approx(16.0 * away**2)
        assert not released(unlike, length).are_alike
    # A mean that is noise says nothing: all weights may be the largest one.
    unknown = WeightScale.of_released(released(equal, length, noise=0.1), length)
    assert unknown.shares.min() == 1.0
    assert np.isnan(released(equal, length, noise=0.1).variation)


def test_a_share_that_is_cut_is_warned_of_where_it_is_more_than_noise():
    base = {"distance": 0.0, "halves": 1.0, "kappa": 1.0, "curvature_signal": 9.0}
    for cut, noise, warns in [(0.03, 0.004, True), (0.03, 0.02, False), (0.009, 0.0, False)]:
        checks = Checks(**base, weight_variation=0.5, cut=cut, cut_noise=noise)
        assert any("of the weighted scores (limit 1%)" in each for each in checks.warnings) == warns
        (note,) = checks.notes
        assert "design effect 1.50" in note
        assert "neither the ranks of outcomes nor a wider clip" in note
    assert Checks(**base).notes == []
    again = Checks.from_array(checks.to_array().tolist())
    assert again.cut == checks.cut


def test_weights_that_noise_hides_are_warned_of():
    base = {"distance": 0.0, "halves": 1.0, "kappa": 1.0, "curvature_signal": 9.0}
    hidden = Checks(**base, weight_variation=np.nan, cut=0.3, cut_noise=0.4)
    (warning,) = hidden.warnings
    assert "noise hides their mean" in warning
    assert "design effect not known" in hidden.notes[0]
    for alike in (np.nan, 0.0):
        assert not Checks(**base, weight_variation=alike, cut=np.nan).warnings


def test_a_share_of_scores_that_are_all_noise_is_no_absurd_number():
    for cut, kept in [(1e-4, -2e-4), (-1e-4, 1e-4), (0.0, 0.0)]:
        share, error = ReleasedWeights(1e-4, 1e-4, cut, kept, 1e-3).share_cut
        assert abs(share) < 1.0
        assert 0.4 < error < 1.2


def test_the_noise_of_the_share_is_that_of_its_parts():
    rng = np.random.default_rng(0)
    exact = np.array([0.3, 0.1, 0.02, 0.25])
    noise = 2e-3
    draws = exact + noise * rng.normal(size=(4000, 4))
    shares = [ReleasedWeights(*draw.tolist(), noise).share_cut[0] for draw in draws]
    stated = ReleasedWeights(*exact.tolist(), noise).share_cut[1]
    # Chi-squared of 4,000 degrees.
    ratio = np.var(shares) / stated**2
    assert scipy.stats.chi2.ppf(1e-6, 3999) < 3999 * ratio < scipy.stats.chi2.isf(1e-6, 3999) * 1.05
