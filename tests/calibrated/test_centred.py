"""The centred clip: its mean at the truth, bounds, slope and variance; faults that the checks see.

Scores are simulated without a model. Each p-value is compared with `statistics.ALPHA` = 1e-9, which
is 6.1 standard errors of a single mean: the 120 or so of this file raise a false alarm with a
probability below 2e-7.
"""

import dataclasses
import functools

import numpy as np
import pytest
import scipy.special
import scipy.stats
from support import statistics

from tfp_dpvi._tf import tf
from tfp_dpvi.calibrated.centred import (
    WIDER,
    CentredScores,
    centre_outcomes,
    centre_two_outcomes,
    centred_releases,
)
from tfp_dpvi.calibrated.checks import MOST_MISMATCH
from tfp_dpvi.calibrated.clip import NUM_BLOCKS
from tfp_dpvi.calibrated.ranks import Ranking
from tfp_dpvi.calibrated.scores import ModelScores
from tfp_dpvi.calibrated.whitening import ReleasedSums, SeenCurvature, SimulatedMoments
from tfp_dpvi.calibrated.wider import SimulatedWider
from tfp_dpvi.gradients import Clip, Released, joint_sensitivity
from tfp_dpvi.gradients.base import PerExample
from tfp_dpvi.privacy import Sensitivity

NUM = 30_000
# A matrix far from a multiple of the identity, in either order.
SKEW = np.array([[2.0, 0.0], [1.5, 0.3]])
WHITENINGS = {"identity": np.eye(2), "skew": SKEW}
CLIPS = (0.3, 1.0, 3.0)
ITERATIONS = (0, 1, 5)


def fresh_generator():
    return np.random.default_rng(statistics.fresh_key().numpy() % 2**31)


# ---------------------------------------------------------------------- outcomes and their scores


def poisson_scores(generator, shape):
    """Outcomes of mean e^-1 on average, and scores of intercept and slope: skewed, collinear."""
    x = generator.normal(size=(shape[0], 1))
    rate = np.exp(-1.0 + 0.5 * x)
    y = generator.poisson(rate, size=shape)
    return y, (y - rate)[..., None] * np.stack([np.ones_like(x), x], axis=-1)


def gamma_scores(generator, shape, concentration=0.5):
    """Outcomes, and scores of the logarithms of mean and concentration: skewed in two directions."""
    mean = np.exp(0.5 * generator.normal(size=(shape[0], 1)))
    y = mean * generator.gamma(concentration, 1.0 / concentration, size=shape)
    relative = y / mean
    first = concentration * (relative - 1.0)
    logs = np.log(concentration * relative) - scipy.special.digamma(concentration)
    return y, np.stack([first, concentration * (logs + 1.0 - relative)], axis=-1)


def normal_scores(y):
    """Scores of mean and log standard deviation, at 0 and 0."""
    return np.stack([y, y**2 - 1.0], axis=-1)


FAMILIES = {"poisson": poisson_scores, "gamma": gamma_scores}


def of_twins(scores, bound, iterations, **how):
    """The centred clip of the first of K + 1 outcomes, the others its twins."""
    num, size, _ = scores.shape
    weights = np.full((num, size), 1.0 / size, scores.dtype)
    first = np.eye(size, dtype=scores.dtype)[np.zeros(num, int)]
    model_weights = (1.0 - first) / scores.dtype.type(size - 1)
    parts = (scores, weights, model_weights, first)
    return centre_outcomes(*map(tf.constant, parts), bound, iterations, **how)


@functools.cache
def of_values(bound, iterations, whitening="identity", num=None):
    """For each of three outcomes of `num` records: the centred clip if it is the observed one."""
    scores, probability = three_values(num or 200)
    scores = scores @ WHITENINGS[whitening].T
    each = []
    for number in range(3):
        observed = np.eye(3)[np.full(len(scores), number)]
        parts = (scores, probability, probability, observed)
        each.append(centre_outcomes(*map(tf.constant, parts), bound, iterations))
    return scores, probability, each


def three_values(num, shift=(0.0, 0.0)):
    """Scores of two logits beside one of zero, and the probabilities at logits shifted by both."""
    logits = 1.5 * np.random.default_rng(1).normal(size=(num, 2))
    scores = np.concatenate([np.zeros([1, 2]), np.eye(2)])[None] - softmax(logits)[:, None, 1:]
    return scores, softmax(logits + np.asarray(shift))


def softmax(logits):
    return scipy.special.softmax(np.pad(logits, [(0, 0), (1, 0)]), axis=1)


def matrices(rows, others):
    """Sums over outcomes of products of rows, for each record."""
    return np.einsum("nja,njb->nab", rows, others)


# ---------------------------------------------------------------------- the same in NumPy


def clipped(rows, bound):
    norms = np.linalg.norm(rows, axis=-1, keepdims=True)
    return rows * (bound / np.maximum(bound, norms))


def by_hand(scores, bound, iterations, fault=None):
    """psi of the first outcome, shape [n, d], in NumPy; a fault changes the definition."""
    num, size, _ = scores.shape
    weights = np.full((num, size), 1.0 / size)
    if fault == "the centre is of the twins alone":
        weights[:, 0] = 0.0
        weights /= weights.sum(axis=1, keepdims=True)
    centre = np.einsum("nj,njd->nd", weights, scores)
    for _ in range(iterations):
        norms = np.linalg.norm(scores - centre[:, None], axis=-1)
        factors = weights * (bound / np.maximum(bound, norms))
        total = factors.sum(axis=1, keepdims=True)
        centre = np.einsum("nj,njd->nd", factors, scores) / total
    psi = clipped(scores - centre[:, None], bound)
    rest = np.einsum("nj,njd->nd", weights, psi)
    if fault == "the rest is not removed":
        return psi[:, 0]
    shrink = bound / (bound + np.linalg.norm(rest, axis=-1, keepdims=True))
    if fault == "nothing is shrunk":
        shrink = 1.0
    return shrink * (psi[:, 0] - rest)


@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_that_of_numpy(family):
    _, scores = FAMILIES[family](np.random.default_rng(0), (50, 4))
    for bound in CLIPS:
        for iterations in ITERATIONS:
            psi = of_twins(scores @ SKEW.T, bound, iterations).psi
            expected = by_hand(scores @ SKEW.T, bound, iterations)
            np.testing.assert_allclose(psi, expected, rtol=1e-9, atol=1e-12)


# ---------------------------------------------------------------------- its mean at the truth


def check_mean(rows, what):
    """Rows of shape [n, k] have the mean zero."""
    total = rows.sum(axis=0)
    statistic = total @ np.linalg.solve(rows.T @ rows, total)
    statistics.plausible(scipy.stats.chi2.sf(statistic, rows.shape[1]), what)


@pytest.mark.parametrize("num_twins", [1, 3, 7])
@pytest.mark.parametrize("family", FAMILIES)
def test_its_mean_is_zero_for_any_number_of_twins(family, num_twins):
    """And that of |psi|^2 less its expectation, from no iterations on, for every clip and W."""
    _, scores = FAMILIES[family](fresh_generator(), (NUM, num_twins + 1))
    for name, whitening in WHITENINGS.items():
        for bound in CLIPS:
            iterations = ITERATIONS if bound == 1.0 else ITERATIONS[:1]
            for number in iterations:
                centred = of_twins(scores @ whitening.T, bound, number)
                psi = centred.psi.numpy()
                case = f"{name}, C = {bound}, {number} iterations"
                check_mean(psi, f"psi ({case})")
                check_mean(centred.wider.numpy(), f"psi under the wider clip ({case})")
                excess = np.sum(psi**2, axis=1) - centred.expected
                if num_twins == 1:  # A pair's are opposite.
                    np.testing.assert_allclose(excess, 0.0, atol=1e-12)
                else:
                    check_mean(excess.numpy()[:, None], f"lack of fit ({case})")


@pytest.mark.parametrize(
    "fault", ["the rest is not removed", "the centre is of the twins alone", "W reads the outcome"]
)
@pytest.mark.parametrize("iterations", [0, 1])
def test_a_fault_in_the_mean_is_seen(fault, iterations):
    y, scores = gamma_scores(fresh_generator(), (NUM, 4))
    if fault == "W reads the outcome":
        scores = scores / (1.0 + y[:, :1, None])
    psi = by_hand(scores, 0.3, iterations, fault)
    with pytest.raises(AssertionError, match="psi"):
        check_mean(psi, "psi")


@pytest.mark.parametrize("iterations", ITERATIONS)
def test_outcomes_of_few_values_have_the_mean_zero_exactly(iterations):
    """Here means are sums, and nothing is left to chance."""
    for name in WHITENINGS:
        for bound in CLIPS:
            _, probability, each = of_values(bound, iterations, name)
            psi, wider = (
                np.stack([getattr(centred, part) for centred in each], axis=1)
                for part in ("psi", "wider")
            )
            for rows in (psi, wider):
                mean = np.einsum("nj,njd->nd", probability, rows)
                np.testing.assert_allclose(mean, 0.0, atol=1e-14)
            variance = np.einsum("nj,njd,njd->n", probability, psi, psi)
            np.testing.assert_allclose(each[0].expected, variance, rtol=1e-9)


def two_values(num, seed, longest=2.0):
    """Whitened differences of both scores, and probabilities of the outcome 1."""
    generator = np.random.default_rng(seed)
    difference = generator.normal(size=(num, 3))
    length = generator.uniform(0.01, longest, size=(num, 1))
    difference *= length / np.linalg.norm(difference, axis=1, keepdims=True)
    return difference, generator.uniform(0.02, 0.98, size=num)


def of_two(difference, probability, outcome, bound):
    outcomes = np.full(len(probability), float(outcome))
    return centre_two_outcomes(*map(tf.constant, (difference, probability, outcomes)), bound)


def test_two_outcomes_have_the_mean_zero_exactly():
    difference, probability = two_values(200, 0)
    for bound in CLIPS:
        zero, one = (of_two(difference, probability, value, bound) for value in (0, 1))
        weights = probability[:, None]
        mean = weights * one.psi + (1.0 - weights) * zero.psi
        np.testing.assert_allclose(mean, 0.0, atol=1e-15)
        wide = of_two(difference, probability, 1, WIDER * bound)
        np.testing.assert_allclose(one.wider, wide.psi, rtol=1e-12)
        slope = np.trace(matrices(*wide.slope), axis1=1, axis2=2)
        np.testing.assert_allclose(one.wider_slope, slope, rtol=1e-9)
        squares = [np.sum(np.square(centred.psi), axis=1) for centred in (zero, one)]
        variance = (1.0 - probability) * squares[0] + probability * squares[1]
        np.testing.assert_allclose(one.expected, variance, rtol=1e-9)


def test_the_closed_form_for_two_outcomes_is_the_limit_of_many_iterations():
    """Below three clips, where no outcome's part of the scale is cut alone."""
    difference, probability = two_values(300, 1)
    weights = np.stack([1.0 - probability, probability], axis=1)
    scores = np.array([0.0, 1.0])[None, :, None] * difference[:, None]
    is_cut = np.linalg.norm(difference, axis=1) * weights.max(axis=1) > 1.0
    assert 30 < is_cut.sum() < 270
    for outcome in (0, 1):
        closed = of_two(difference, probability, outcome, 1.0)
        observed = np.eye(2)[np.full(len(scores), outcome)]
        parts = (scores, weights, weights, observed)
        iterated = centre_outcomes(*map(tf.constant, parts), 1.0, 300)
        for name in ("psi", "scale", "expected"):
            a, b = getattr(closed, name), getattr(iterated, name)
            np.testing.assert_allclose(a, b, atol=2e-4, err_msg=name)
        slopes = [matrices(*centred.slope) for centred in (closed, iterated)]
        np.testing.assert_allclose(*slopes, atol=2e-4)
        sums = [matrices(each.rows, each.rows)[~is_cut] for each in (closed, iterated)]
        np.testing.assert_allclose(*sums, atol=2e-4)


# ---------------------------------------------------------------------- its slope


def check_slope(differences, slopes):
    """Finite differences and slopes of n records, shape [n, 2, 2], have the same mean."""
    check_mean((differences - slopes).reshape(-1, 4), "slope")


@pytest.mark.parametrize("num_twins", [1, 3, 7])
@pytest.mark.parametrize("iterations", [0, 5])
def test_the_slope_is_the_derivative_of_the_mean_in_the_true_parameters(num_twins, iterations):
    """The record's outcome moves with the parameters and its twins do not. `f u u'` is another."""
    generator, step = fresh_generator(), 0.02
    noise = generator.normal(size=(NUM, num_twins + 1))
    scores = normal_scores(noise) @ SKEW.T

    def psi_at(mean, log_scale):
        moved = scores.copy()
        moved[:, 0] = normal_scores(mean + np.exp(log_scale) * noise[:, 0]) @ SKEW.T
        return of_twins(moved, 1.0, iterations).psi.numpy()

    places = step * np.eye(2)
    derivatives = [(psi_at(*place) - psi_at(*-place)) / (2.0 * step) for place in places]
    # In the coordinates phi, of which W^T phi are the parameters.
    differences = np.stack(derivatives, axis=-1) @ SKEW.T
    centred = of_twins(scores, 1.0, iterations)
    check_slope(differences, matrices(*centred.slope))
    if iterations == 0 and num_twins > 1:
        away = scores - scores.mean(axis=1, keepdims=True)
        with pytest.raises(AssertionError, match="slope"):
            check_slope(differences, matrices(clipped(away, 1.0)[:, 1:], away[:, 1:]) / num_twins)


@pytest.mark.parametrize("iterations", ITERATIONS)
def test_the_slope_for_three_outcomes_is_exact(iterations):
    scores, probability, each = of_values(0.5, iterations, num=20)

    def derivative_of(part):
        rows = np.stack([getattr(centred, part) for centred in each], axis=1)
        places = 1e-5 * np.eye(2)
        means = [
            [np.einsum("nj,njd->nd", three_values(20, side * place)[1], rows) for side in (1, -1)]
            for place in places
        ]
        return np.stack([(high - low) / 2e-5 for high, low in means], axis=-1)

    slopes = matrices(*each[0].slope)
    np.testing.assert_allclose(derivative_of("psi"), slopes, atol=1e-9)
    traces = np.trace(derivative_of("wider"), axis1=1, axis2=2)
    np.testing.assert_allclose(each[0].wider_slope, traces, atol=1e-9)
    if iterations == 0:
        away = scores - np.einsum("nj,njd->nd", probability, scores)[:, None]
        uncorrected = matrices(probability[..., None] * clipped(away, 0.5), away)
        assert np.max(np.abs(uncorrected - slopes)) > 0.01


def test_the_slope_for_two_outcomes_is_exact():
    """With v the derivative of the log odds, that of p is p (1 - p) v."""
    difference, probability = two_values(50, 2)
    zero, one = (of_two(difference, probability, value, 1.0) for value in (0, 1))
    odds = (probability * (1.0 - probability))[:, None] * difference
    derivatives = (one.psi - zero.psi)[..., None] * odds[:, None]
    np.testing.assert_allclose(matrices(*one.slope), derivatives, atol=1e-12)


def test_without_a_clip_matrix_and_slope_are_the_information():
    """Of twins, K / (K + 1) of it."""
    scores, probability, each = of_values(1e6, 0)
    information = np.einsum("nj,nja,njb->nab", probability, scores, scores)
    for found in (matrices(*each[0].slope), matrices(each[0].rows, each[0].rows)):
        np.testing.assert_allclose(found, information, rtol=1e-9, atol=1e-12)
    traces = np.trace(information, axis1=1, axis2=2)
    np.testing.assert_allclose(each[0].scale, traces, rtol=1e-9)
    scores = normal_scores(fresh_generator().normal(size=(NUM, 4)))
    centred = of_twins(scores, 1e6, 0)
    for found in (matrices(*centred.slope), matrices(centred.rows, centred.rows)):
        away = (found - 0.75 * np.diag([1.0, 2.0])).reshape(-1, 4)
        check_mean(away[:, [0, 1, 3]], "information")


# ---------------------------------------------------------------------- its variance over steps

NUM_STEPS = 4


def variance_in_window(share_twins, rate, expected):
    """The stated variance of the mean sum over a window's steps, for one record, its trace."""
    return curvatures_of(share_twins, rate, expected).window.simulation * 2.0


def simulated(expected, variance=0.0):
    """Moments at public inputs whose matrix is the identity."""
    eye = np.eye(2)
    return SimulatedMoments(
        eye, 2.0, eye, eye, eye, 2.0, expected, np.full(2, variance), variance, np.zeros([0, 2]), 1.0,
        *[np.zeros(0)] * 2, SimulatedWider(2.0, 2.0, expected),
    )  # fmt: skip


def curvatures_of(share_twins, rate, expected, matrix=None, noise=1.0, trusted=True, balanced=None):
    """Draws of the curvature, of public inputs whose matrix is the identity."""
    eye = np.eye(2)
    sums = ReleasedSums(
        NUM_STEPS,
        np.zeros(2),
        np.zeros(2),
        NUM * (eye if matrix is None else matrix),
        2.0 * NUM,
        0.0,
        np.zeros(0),
        np.zeros(0),
        *[noise] * 6,
        rate,
    )
    return SeenCurvature(
        sums, simulated(expected), eye,
        num_records=NUM,
        # The capped matrix has at most its square as a trace, for each record.
        clip=2.0,
        num_twins=share_twins,
        ranking=Ranking((), False),
        trusted=trusted,
        halves=(np.zeros(2), np.zeros(2)),
        half_variance=4.0,
        generator=np.random.default_rng(0),
        balanced=balanced,
    ).draw()  # fmt: skip


def test_what_outcomes_vary_by_is_that_at_inputs_weighted_like_the_private_ones():
    """Else a likelihood that fits seems to have an excess, or one that does not seems to fit."""
    before, after = (
        curvatures_of(0, 1.0, 1.0, balanced=balanced) for balanced in (None, simulated(1.5, 4.0))
    )
    assert after.window.simulation / before.window.simulation == pytest.approx(1.5)
    assert after.lack_of_fit.expected / before.lack_of_fit.expected == pytest.approx(1.5)
    grown = after.lack_of_fit.variance - before.lack_of_fit.variance
    assert grown == pytest.approx(4.0 * NUM)
    np.testing.assert_allclose(after.lack_of_fit.slope, 4.0 * NUM)


@pytest.mark.parametrize("size", [0, 2])
def test_what_a_record_varies_by_is_the_expected_square_of_its_clipped_score(size):
    """By outcomes, in closed form or by their factors: that of the capped rows is another one."""
    generator = np.random.default_rng(2)
    difference, probability = two_values(50, 3, longest=4.0)
    chances = np.stack([1.0 - probability, probability], axis=1)

    def both(outcome):
        if not size:
            parts = (difference, probability, np.full(50, float(outcome)))
            return centre_two_outcomes(*map(tf.constant, parts), 1.0)
        observed = np.tile(np.eye(2)[outcome], (50, 1))
        parts = (factors, chances, chances, observed)
        return centre_outcomes(*map(tf.constant, parts), 1.0, jacobian=tf.constant(jacobian))

    jacobian = 3.0 * generator.normal(size=(50, size, 3))
    factors = generator.normal(size=(50, 2, size))
    factors -= np.einsum("nj,njp->np", chances, factors)[:, None]
    found = both(0)
    psi = np.stack([found.psi, both(1).psi], axis=1)
    expected = np.einsum("nj,nja,njb->nab", chances, psi, psi)
    rows = found.covariance.numpy()
    np.testing.assert_allclose(np.einsum("nja,njb->nab", rows, rows), expected, atol=1e-9)
    # A fault that this would see: the rows of the capped matrix, by a factor for all of them.
    capped = found.rows.numpy()
    capped *= np.sqrt(np.sum(rows**2) / np.sum(capped**2))
    assert np.abs(np.einsum("nja,njb->nab", capped, capped) - expected).max() > 0.1


@pytest.mark.parametrize("trusted", [True, False])
def test_scores_vary_in_each_direction_as_at_public_inputs(trusted):
    """Where one is clipped more than another, and not as the capped matrix does."""
    public = dataclasses.replace(simulated(1.0), covariance=np.diag([1.5, 0.5]))
    found = curvatures_of(0, 1.0, 1.0, trusted=trusted, balanced=public)
    directions = np.diagonal(found.variances, axis1=1, axis2=2)
    capped = np.diagonal(found.matrices, axis1=1, axis2=2)
    np.testing.assert_allclose(directions.sum(axis=1), capped.sum(axis=1))
    assert np.mean(directions[:, 0] / directions[:, 1]) == pytest.approx(3.0, rel=0.05)


@pytest.mark.parametrize("noise", [1.0, 0.2 * NUM, 2.0 * NUM])
def test_public_inputs_with_other_correlations_are_said_where_the_noise_lets_it_be_seen(noise):
    """And where it matters: with hardly any noise the released curvature is all that is used."""
    collinear = np.array([[1.0, 0.99], [0.99, 1.0]])
    seen = curvatures_of(0, 1.0, 1.0, collinear, noise).mismatch
    assert (seen > MOST_MISMATCH) == (noise == 0.2 * NUM)
    assert not curvatures_of(0, 1.0, 1.0, np.eye(2), noise).mismatch > 0.0


@functools.cache
def means_over_steps(num_twins, rate, bound):
    """Squared norms of the mean of psi over steps with new twins, and the mean of |psi|^2."""
    generator = fresh_generator()
    y = generator.normal(size=(NUM, 1))
    total, square = np.zeros((NUM, 2)), 0.0
    for _ in range(NUM_STEPS):
        twins = generator.normal(size=(NUM, num_twins))
        psi = of_twins(normal_scores(np.concatenate([y, twins], axis=1)), bound, 1).psi.numpy()
        total += psi * (generator.random((NUM, 1)) < rate) / (rate * NUM_STEPS)
        square += np.mean(np.sum(psi**2, axis=1)) / NUM_STEPS
    return np.sum(total**2, axis=1), square


def check_variance(num_twins, share_twins, rate, bound=1e6):
    """Records differ, so that squares over them are independent; with a clip it is a bound."""
    squares, expected = means_over_steps(num_twins, rate, bound)
    stated = variance_in_window(share_twins, rate, expected)
    score = (squares.mean() - stated) / (squares.std() / np.sqrt(NUM))
    if bound < 1e6:
        assert squares.mean() > 0.9 * stated, "the stated variance is far too large"
        score = max(score, 0.0)
    statistics.standard_score(score, "variance over steps")


@pytest.mark.parametrize("rate", [1.0, 0.5])
@pytest.mark.parametrize("num_twins", [1, 4, 7])
def test_the_variance_over_steps_is_that_of_its_twins(num_twins, rate):
    """rho = K / (K + 1) of a record's variance stays however many steps draw new twins."""
    check_variance(num_twins, num_twins, rate)
    check_variance(num_twins, num_twins, rate, bound=2.0)


@pytest.mark.parametrize(("num_twins", "stated"), [(4, 1), (7, 1), (1, 4), (4, 0), (1, 7)])
def test_the_constant_of_another_number_of_twins_is_seen(num_twins, stated):
    """Among them the 1/2 of a single twin, and the 1 of outcomes that are enumerated."""
    with pytest.raises(AssertionError, match="variance"):
        check_variance(num_twins, stated, 1.0)


def test_the_variance_of_enumerated_outcomes_has_no_share_of_twins():
    """The same psi in each step: with all records 1, and with a share of q still 1 + (1/q - 1) / T."""
    generator = fresh_generator()
    difference, probability = two_values(NUM, 3)
    outcome = (generator.random(NUM) < probability).astype(float)
    centred = centre_two_outcomes(*map(tf.constant, (difference, probability, outcome)), 1.0)
    psi = centred.psi.numpy()
    for rate in (1.0, 0.5):
        taken = generator.random((NUM_STEPS, NUM)) < rate
        total = psi * taken.mean(axis=0)[:, None] / rate
        squares, expected = np.sum(total**2, axis=1), np.mean(np.sum(psi**2, axis=1))
        score = squares.mean() - variance_in_window(0, rate, expected)
        spread = max(squares.std() / np.sqrt(NUM), 1e-12)
        statistics.standard_score(score / spread, "variance over steps")


# ---------------------------------------------------------------------- its bounds


def check_bounds(centred, bound, what):
    """What the releases state of a record: contract 3. Rounding is of a few units in the last place."""
    slack = 1.0 + 64.0 * np.finfo(centred.psi.dtype.as_numpy_dtype).eps
    norms, traces, scale, expected = (
        np.asarray(part, np.float64)
        for part in (
            tf.norm(centred.psi, axis=1),
            tf.reduce_sum(tf.square(centred.rows), axis=[1, 2]),
            centred.scale,
            centred.expected,
        )
    )
    for part in (norms, traces, scale, expected):
        assert np.isfinite(part).all(), what
    assert norms.max() <= bound * slack, f"{what}: |psi| is {norms.max() / bound:.6g} C"
    assert traces.max() <= bound**2 * slack, f"{what}: trace"
    assert scale.min() >= 0.0, f"{what}: scale"
    assert scale.max() <= 3.0 * bound**2 * slack, f"{what}: scale"
    assert np.max(np.abs(norms**2 - expected)) <= bound**2 * slack, f"{what}: lack of fit"


def adversarial_scores(generator, dtype, size=5, width=3):
    """Scores of n records with J outcomes: huge, tiny, equal, collinear, and one far off."""
    # Four times the sum of their squares is finite, see the next tests.
    largest = np.sqrt(np.finfo(dtype).max / (4.0 * size * width)) * 0.99
    ordinary = generator.normal(size=(40, size, width))
    powers = 10.0 ** generator.uniform(-30, 18, size=(40, size, 1))
    lone = np.zeros((40, size, width))
    lone[np.arange(40), np.arange(40) % size] = ordinary[:, 0]
    along = generator.normal(size=(40, size, 1)) * ordinary[:, :1]
    kinds = (
        ordinary,
        1e3 * ordinary,
        np.zeros_like(ordinary),
        np.repeat(ordinary[:, :1], size, axis=1),
        along,
        1e6 * along,
        powers * ordinary,
        lone,
        1e6 * lone,
        lone - np.sign(lone) * 0.25,
        np.sign(ordinary) * largest,
        np.clip(1e30 * lone, -largest, largest),
        1e-30 * ordinary,
        np.full_like(ordinary, 1e-42),
        1e15 + ordinary,
    )
    return np.concatenate(kinds).clip(-largest, largest).astype(dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("iterations", ITERATIONS)
def test_no_scores_pass_the_bounds(dtype, iterations):
    generator = np.random.default_rng(0)
    for bound in (1e-3, 1.0, 50.0):
        scores = adversarial_scores(generator, dtype)
        centred = of_twins(scores, bound, iterations)
        check_bounds(centred, bound, "twins")
        size = scores.shape[1]
        weights = generator.dirichlet(np.full(size, 0.05), size=len(scores)).astype(dtype)
        weights[::7] = np.eye(size)[0]  # One outcome is certain, and perhaps not the observed one.
        observed = np.eye(size, dtype=dtype)[generator.integers(size, size=len(scores))]
        parts = (scores, weights, weights, observed)
        centred = centre_outcomes(*map(tf.constant, parts), bound, iterations)
        check_bounds(centred, bound, "values")


def kept_of(centred):
    """The centred clip of those records that a step keeps."""
    num = centred.psi.shape[0]
    information = (centred.rows, centred.rows)
    scores = ModelScores(
        tf.zeros([num]), tf.fill([num], True), information, centred, *[centred.psi] * 2
    ).selected()
    check_bounds(scores.centred, 1.0, "kept")
    return scores.usable.numpy()


def test_scores_whose_distances_or_products_are_infinite_count_for_nothing():
    """Finite scores are not enough: one and others on its opposite side are farther apart."""
    lengths = np.sqrt(np.finfo("float32").max) * np.linspace(0.1, 0.89, 200)
    pattern = np.array([1.0, -0.25, -0.25, -0.25, -0.25])
    scores = (lengths[:, None, None] * pattern[:, None]).astype("float32")
    assert np.isfinite(np.sum(scores**2, axis=(1, 2))).all()
    dropped = ~kept_of(of_twins(scores, 1.0, 5))
    assert 0 < dropped.sum() < len(scores) / 2
    # Two parameters whose scores cancel each other.
    jacobian = tf.constant(np.tile(lengths[:, None, None], [1, 2, 3]) / 2.0, tf.float32)
    factors = np.tile(np.array([[3.0, -3.0], [4.0, -4.0], [0.0, 0.0]]), [len(lengths), 1, 1])
    centred = of_twins(factors.astype("float32"), 1.0, 5, jacobian=jacobian)
    dropped = ~kept_of(centred)
    assert dropped.any()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("num_parameters", [1, 2, 6])
def test_no_scores_in_factors_pass_the_bounds(num_parameters, dtype):
    """Nor where the derivatives of the parameters are huge, tiny, or collinear."""
    generator = np.random.default_rng(0)
    for iterations in ITERATIONS:
        factors = adversarial_scores(generator, dtype, width=num_parameters)
        most = np.abs(factors).max(axis=(1, 2), keepdims=True)
        jacobian = generator.normal(size=(len(factors), num_parameters, 3))
        jacobian[::3, 1:] = jacobian[::3, :1]
        jacobian *= 10.0 ** generator.uniform(-6.0, 6.0, size=(len(factors), num_parameters, 1))
        jacobian[::5] /= np.maximum(most[::5], 1.0)
        centred = of_twins(factors, 1.0, iterations, jacobian=tf.constant(jacobian, dtype))
        kept = kept_of(centred)
        assert kept.sum() > len(kept) / 2


@pytest.mark.parametrize("num_parameters", [1, 2, 4, 7])
def test_scores_in_factors_are_those_of_their_products(num_parameters):
    """Also more parameters than outcomes, and of collinear derivatives."""
    generator = np.random.default_rng(0)
    factors = generator.normal(size=(60, 5, num_parameters))
    jacobian = generator.normal(size=(60, num_parameters, 3))
    jacobian[:20, 1:] = 2.0 * jacobian[:20, :1]
    for bound in CLIPS:
        for iterations in ITERATIONS:
            one = of_twins(factors @ jacobian, bound, iterations)
            other = of_twins(factors, bound, iterations, jacobian=tf.constant(jacobian))
            for name in ("psi", "scale", "expected"):
                pair = (getattr(other, name), getattr(one, name))
                np.testing.assert_allclose(*pair, atol=1e-9, err_msg=name)
            pair = [matrices(each.rows, each.rows) for each in (other, one)]
            np.testing.assert_allclose(*pair, atol=1e-7)
            pair = [matrices(*each.slope) for each in (other, one)]
            np.testing.assert_allclose(*pair, atol=1e-9)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_no_pair_of_outcomes_passes_the_bounds(dtype):
    generator = np.random.default_rng(0)
    for bound in (1e-3, 1.0, 50.0):
        difference = adversarial_scores(generator, dtype)[:, 0]
        chances = np.array([0.0, 1e-40, 1e-9, 0.3, 0.5, 1.0 - 1e-7, 1.0], dtype)
        probability = generator.choice(chances, size=len(difference))
        outcome = generator.integers(2, size=len(difference)).astype(dtype)
        parts = (difference, probability, outcome)
        centred = centre_two_outcomes(*map(tf.constant, parts), bound)
        check_bounds(centred, bound, "two outcomes")


def test_the_bound_fails_if_nothing_is_shrunk():
    """Three outcomes far off on one side leave a rest, which adds to the fourth."""
    scores = adversarial_scores(np.random.default_rng(0), "float64")
    kept = [by_hand(scores, 1.0, 0, fault) for fault in (None, "nothing is shrunk")]
    norms = [np.max(np.linalg.norm(psi, axis=1)) for psi in kept]
    assert norms[0] <= 1.0 + 1e-12
    assert norms[1] > 1.4
    centred = of_twins(scores, 1.0, 0)._replace(psi=tf.constant(kept[1]))
    with pytest.raises(AssertionError, match="psi"):
        check_bounds(centred, 1.0, "twins")


def test_the_bounds_are_reached():
    """By a long score of an outcome that is as likely as not; the lack of fit only in the limit."""
    difference = np.array([[1e3, 0.0]])
    centred = of_two(difference, np.array([0.5]), 1, 2.0)
    assert np.linalg.norm(centred.psi) == pytest.approx(2.0)
    assert np.sum(np.square(centred.rows)) == pytest.approx(4.0)
    assert float(centred.scale[0]) == pytest.approx(12.0)
    rare = of_two(difference, np.array([1e-9]), 1, 2.0)
    assert np.sum(np.square(rare.psi)) - float(rare.expected[0]) == pytest.approx(4.0)


# ---------------------------------------------------------------------- its joint releases


def test_shares_of_the_budget():
    """A and D of the curvature, the scale and the lack of fit; about a seventh of 1 / z^2 is theirs."""
    releases = centred_releases(3, Clip(2.0))
    assert [release.name for release in releases] == ["curvature", "scale", "lack_of_fit"]
    stated = [dataclasses.astuple(release.sensitivity) for release in releases]
    np.testing.assert_allclose(stated, [[4.0, 4.0 * np.sqrt(2.0)], [12.0, 12.0], [4.0, 8.0]])
    assert centred_releases(1, Clip(2.0))[0].sensitivity == Sensitivity(4.0, 4.0)
    joint = joint_sensitivity(releases, Sensitivity())
    assert joint.add_or_remove**2 == pytest.approx(1.0 + 1.0 / 8.8 + 2.0 / 44.0)


def test_sums_are_those_of_the_records_and_blocks_hold_what_is_released():
    releases = centred_releases(2, Clip(1.0))
    generator = np.random.default_rng(0)
    rows = generator.normal(size=(4, 3, 2))
    extra = {"rows": rows, "scale": generator.random(4), "lack_of_fit": generator.random(4)}
    kept = tf.ones([4], tf.bool)
    extra = {name: tf.constant(part) for name, part in extra.items()}
    each = PerExample(tf.zeros([4]), tf.zeros([4], tf.bool), kept, extra=extra)
    sums = [release.sum_of(each).numpy() for release in releases]
    np.testing.assert_allclose(sums[0], np.einsum("nja,njb->ab", rows, rows))
    np.testing.assert_allclose(
        sums[1:], [extra[name].numpy().sum() for name in ("scale", "lack_of_fit")]
    )
    totals = [release.initial() for release in releases]
    noisy = (tf.constant([[1.0, 2.0], [4.0, 3.0]], tf.float64), 2.0, -1.0)
    for step in range(2 * NUM_BLOCKS):
        for number, release in enumerate(releases):
            released = Released(
                mean=tf.convert_to_tensor(noisy[number], tf.float64),
                gradient=[tf.constant([1.0, step], tf.float64)],
                step=tf.constant(step, tf.int64),
                num_steps=tf.constant(2 * NUM_BLOCKS, tf.int64),
                data_independent_loss=tf.zeros([]),
                public=tf.constant([0.5, -0.5], tf.float64),
            )
            totals[number] = release.accumulate(totals[number], released)
    np.testing.assert_array_equal(totals[0]["steps"], 2.0)
    np.testing.assert_allclose(totals[0]["matrix"][3], [[2.0, 4.0], [8.0, 6.0]])
    np.testing.assert_allclose(totals[0]["gradient"][3], [2.0, 6 + 7])
    np.testing.assert_allclose(totals[0]["theta"][3], [1.0, -1.0])
    np.testing.assert_array_equal(totals[1], 4.0)
    np.testing.assert_array_equal(totals[2], -2.0)


def test_the_fields_are_those_of_the_docstring():
    assert all(field in CentredScores.__doc__ for field in CentredScores._fields)
