"""A wider clip: its bound, the error of what it says, and tails that it sees."""

import numpy as np
import pytest
from scipy import stats
from support import statistics

from tfp_dpvi._tf import tf
from tfp_dpvi.calibrated.centred import WIDER, centre_outcomes
from tfp_dpvi.calibrated.wider import ReleasedShift, WiderClip, is_worth, z_scores
from tfp_dpvi.gradients import Clip

OUTCOMES = 5
NUM = 2000
SETS = 100


def centred(y):
    """The scores of mean and log standard deviation, whitened; the first outcome is the record's."""
    scores = np.stack([y, (y**2 - 1.0) / np.sqrt(2.0)], axis=-1) / np.sqrt(2.0)
    weights = np.full(y.shape, 1.0 / OUTCOMES)
    first = np.eye(OUTCOMES)[np.zeros(len(y), int)]
    parts = (scores, weights, (1.0 - first) / (OUTCOMES - 1.0), first)
    return centre_outcomes(*map(tf.constant, parts), 1.0)


def test_no_score_is_longer_than_the_wider_clip_and_some_are_as_long():
    generator = np.random.default_rng(0)
    y = generator.standard_cauchy([3000, OUTCOMES]) * 10.0 ** generator.uniform(-2, 4, [3000, 1])
    lengths = np.linalg.norm(centred(y).wider, axis=1)
    stated = WiderClip(2, Clip(1.0)).sensitivity
    assert 0.9 * WIDER < lengths.max() <= WIDER * (1.0 + 1e-12)
    assert stated.add_or_remove == WIDER
    assert stated.replace == 2.0 * WIDER


@pytest.fixture(scope="module")
def model():
    """What many records say of slope, matrix and variance: a right model."""
    key = statistics.fresh_key().numpy() % 2**31
    found = centred(np.random.default_rng(key).normal(size=[200_000, OUTCOMES]))
    psi, wider, rows = found.psi.numpy(), found.wider.numpy(), found.rows.numpy()
    slope = np.einsum("nja,njb->ab", *(part.numpy() for part in found.slope)) / len(psi)
    matrix = np.einsum("nja,njb->ab", rows, rows) / len(psi)
    ratio = float(np.mean(found.wider_slope) / np.trace(slope))
    variance = np.mean(np.sum((wider - ratio * psi) ** 2, axis=1)) / np.trace(matrix)
    return slope, matrix, ratio, variance


def scores_of_sets(model, outcomes, sampling=1.0):
    """Scores of the shift of both parameters, for data sets with outcomes of their own."""
    slope, matrix, ratio, variance = model
    generator = np.random.default_rng(statistics.fresh_key().numpy() % 2**31)
    scores = []
    for _ in range(SETS):
        y = generator.normal(size=[NUM, OUTCOMES])
        y[:, 0] = outcomes(generator)
        found = centred(y)
        away = np.sum(found.wider.numpy() - ratio * found.psi.numpy(), axis=0)
        away += 3.0 * generator.normal(size=2)
        released = ReleasedShift(away, ratio, 3.0, sampling * variance)
        # Taken at the true parameters, where a wrong ratio of slopes does no harm.
        there = np.zeros([2, 2])
        shift, error = released.of_parameters(NUM * slope, NUM * matrix, there, np.eye(2))
        scores.append(shift / np.sqrt(np.diag(error)))
    return np.array(scores)


@pytest.mark.slow
def test_the_error_is_that_of_a_right_model(model):
    """200 scores: their root mean square is within six standard errors of 1.

    The mutation forgets that outcomes vary.
    """
    deviation = np.sqrt(
        np.mean(scores_of_sets(model, lambda generator: generator.normal(size=NUM)) ** 2)
    )
    assert 0.7 < deviation < 1.3
    faulty = np.sqrt(
        np.mean(
            scores_of_sets(model, lambda generator: generator.normal(size=NUM), sampling=0.0) ** 2
        )
    )
    assert faulty > 1.3


def test_a_wrong_tail_is_seen_that_a_scale_absorbs(model):
    """The scale is the one at which narrowly clipped scores have the mean zero."""

    def outcomes(generator):
        return 0.66 * generator.standard_t(3.0, size=NUM)

    assert np.median(np.abs(scores_of_sets(model, outcomes)[:, 1])) > 4.0


def least_chances(moves):
    """The least p-value of moves of each data set, whose errors have correlations of 0.3."""
    size = moves.shape[1]
    covariance = 0.7 * np.eye(size) + 0.3
    factor = np.linalg.cholesky(covariance)
    scores = [np.max(z_scores(factor @ each, covariance)) for each in moves]
    return 2.0 * size * stats.norm.sf(scores)


@pytest.mark.parametrize("size", [7, 40])
def test_moves_by_chance_alone_are_called_so(size):
    """Of 4,000 sets 7 or 8 % have a chance below 10 %, and 4 to 6 standard errors more are 10 %.

    The mutation counts the least of two tests once, and has 12 to 15 %.
    """
    generator = np.random.default_rng(statistics.fresh_key().numpy() % 2**31)
    share = np.mean(least_chances(generator.normal(size=[4000, size])) < 0.1)
    assert 0.04 < share < 0.1


def test_what_all_moves_show_together_is_seen_and_one_alone_as_well():
    generator = np.random.default_rng(0)
    noise = generator.normal(size=[200, 7])
    # Each of seven is 2.2 off, which is nothing in seven; or one of 40 is 6 off.
    assert np.mean(least_chances(noise + 2.2) < 0.004) > 0.8
    one = np.zeros(40)
    one[0] = 6.0
    assert np.mean(least_chances(generator.normal(size=[200, 40]) + one) < 0.004) > 0.8


def test_it_is_released_where_noise_does_not_hide_it():
    assert is_worth(5, 1000)
    assert not is_worth(5, 999)
