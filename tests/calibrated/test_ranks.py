"""Ranks of outcomes among twins: exact under the model, bounded, and uneven for a wrong shape."""

import itertools

import numpy as np
import pytest
import scipy.stats
import tensorflow as tf

from tfp_dpvi._tf import tfd
from tfp_dpvi.calibrated.ranks import (
    OutcomeRanks,
    Ranking,
    ReleasedRanks,
    centred_bins,
    centred_ranks,
    ranking_of,
)

TWINS = 4
UNIFORM = (TWINS + 1) * (1.0 / (TWINS + 1),)
DENSITIES = Ranking((UNIFORM,), False)
WITH_VALUES = Ranking((UNIFORM, UNIFORM), False)


def released_of(ranking, total, noise, num, slope, num_steps=100):
    """Of records that are in each step."""
    return ReleasedRanks(ranking, total, noise, num, slope, num_twins=num_steps, subsampling=1.0)


def ranks_of_all(values, unit):
    values = tf.constant(values)
    return centred_ranks(values, values, unit)


def test_the_first_outcome_ranks_among_all():
    logs = tf.random.stateless_normal([20, TWINS + 1], [0, 1])
    own = centred_ranks(logs, logs[:, :1], 1.0).numpy()
    np.testing.assert_array_equal(own, ranks_of_all(logs, 1.0).numpy()[:, :1])
    assert own.shape == (20, 1, TWINS + 1)


def test_ranks_and_shared_ranks():
    logs = tf.constant([[0.0, 1.0, 2.0], [5.0, 5.0 + 1e-6, 1.0], [3.0, 3.0, 3.0]])
    shares = centred_ranks(logs, logs, 1.0).numpy() + 1.0 / 3.0
    np.testing.assert_allclose(shares[0], np.eye(3), atol=1e-6)
    np.testing.assert_allclose(shares[1], [[0, 0.5, 0.5], [0, 0.5, 0.5], [1, 0, 0]], atol=1e-6)
    np.testing.assert_allclose(shares[2], np.full([3, 3], 1.0 / 3.0), atol=1e-6)


def test_every_term_has_the_stated_bound_and_some_reach_it():
    """Over all orders of five logs with ties, and whatever is not a number."""
    logs = np.array(
        list(itertools.product([0.0, 1.0, np.inf, np.nan], repeat=TWINS + 1)), "float32"
    )
    own = ranks_of_all(logs, 1.0).numpy()[:, 0]
    stated = OutcomeRanks(DENSITIES).sensitivity
    finite = np.isfinite(logs).all(axis=1)
    norms = np.linalg.norm(own[finite], axis=1)
    assert np.max(norms) == pytest.approx(stated.add_or_remove, rel=1e-6)
    away = np.linalg.norm(own[finite][:, None] - own[finite], axis=2)
    assert np.max(away) == pytest.approx(stated.replace, rel=1e-6)
    assert np.isfinite(own).all()


def test_the_covariance_is_that_of_outcomes_with_twins_of_their_own():
    """p-values of right models are uniform, for few records and many steps; a wrong one is seen.

    Kolmogorov-Smirnov at 1e-4. The mutation forgets that all steps share the outcomes.
    """
    generator = np.random.default_rng(0)
    num, steps = 500, 20
    p_values, faulty = [], []
    for _ in range(200):
        outcome = generator.random([num, 1])
        twins = generator.random([steps, num, TWINS])
        rank = np.sum(twins < outcome, axis=2)
        total = np.mean(np.sum(np.eye(TWINS + 1)[rank], axis=1), axis=0) - num / (TWINS + 1.0)
        total = total + generator.normal(size=TWINS + 1)
        slope = np.zeros([TWINS + 1, 1])
        released = [
            released_of(DENSITIES, total, 1.0, num, slope, shared).p_value(np.zeros(1), np.eye(1))
            for shared in (steps, 10**9)
        ]
        p_values.append(released[0])
        # Outcomes' variance alone, over the number of steps.
        variance = num * (np.eye(TWINS + 1) / 5.0 - 0.04) / steps + np.eye(TWINS + 1)
        statistic = total @ np.linalg.solve(variance, total)
        faulty.append(scipy.stats.chi2.sf(statistic, TWINS))
    assert scipy.stats.kstest(p_values, "uniform").pvalue > 1e-4
    assert scipy.stats.kstest(faulty, "uniform").pvalue < 1e-4


def test_an_error_of_the_parameters_moves_ranks_by_the_slope():
    """A normal with a shifted mean: logs' ranks against their expectation, at 6 sds."""
    generator = np.random.default_rng(1)
    num = 400_000
    shift = 0.3
    twins = generator.normal(size=[num, TWINS + 1])
    logs = -(twins**2) / 2.0
    ranks = ranks_of_all(logs, 1.0).numpy()
    # The score of a log scale is y^2 - 1.
    score = twins**2 - 1.0
    slope = np.einsum("njr,nj->r", ranks, score) / num / (TWINS + 1)
    small = shift / 10.0
    outcomes = np.concatenate([np.exp(small) * twins[:, :1], twins[:, 1:]], axis=1)
    own = ranks_of_all(-(outcomes**2) / 2.0, 1.0).numpy()[:, 0]
    deviations = own.std(axis=0) / np.sqrt(num)
    # Second order: a few per cent of the shift.
    np.testing.assert_array_less(
        np.abs(own.mean(axis=0) - small * slope), 6.0 * deviations + 0.05 * np.abs(small * slope)
    )
    released = released_of(DENSITIES, num * own.mean(axis=0), 1.0, num, slope[:, None], 1)
    assert released.p_value(np.array([small]), 1e-12 * np.eye(1)) > 1e-6
    assert released.p_value(np.zeros(1), 1e-12 * np.eye(1)) < 1e-6


def test_heavy_tails_are_seen_where_a_scale_absorbs_their_variance():
    generator = np.random.default_rng(2)
    num = 3000
    outcome = generator.standard_t(3.0, size=[num, 1]) / np.sqrt(3.0)
    twins = generator.normal(size=[num, TWINS])
    logs = -(np.concatenate([outcome, twins], axis=1) ** 2) / 2.0
    total = np.sum(ranks_of_all(logs, 1.0).numpy()[:, 0], axis=0)
    total = total + 25.0 * generator.normal(size=TWINS + 1)
    released = released_of(DENSITIES, total, 25.0, num, np.zeros([TWINS + 1, 1]))
    assert released.p_value(np.zeros(1), np.eye(1)) < 1e-4


def test_skewed_outcomes_are_seen_by_their_own_order_alone():
    """Exponential outcomes of the normal model's mean and deviation, in units of 1e-6."""
    generator = np.random.default_rng(3)
    num, unit = 2000, 1e-6
    outcome = generator.exponential(size=[num, 1]) - 1.0
    values = unit * np.concatenate([outcome, generator.normal(size=[num, TWINS])], axis=1)
    orders = [-((values / unit) ** 2) / 2.0, values]
    sums = [
        np.sum(ranks_of_all(order, least).numpy()[:, 0], axis=0)
        for order, least in zip(orders, (1.0, 0.0), strict=True)
    ]
    total = np.concatenate(sums) + 25.0 * generator.normal(size=2 * (TWINS + 1))
    released = released_of(WITH_VALUES, total, 25.0, num, np.zeros([2 * (TWINS + 1), 1]))
    assert released.p_value(np.zeros(1), np.eye(1)) < 1e-6
    stated = OutcomeRanks(WITH_VALUES).sensitivity
    assert stated.add_or_remove == pytest.approx(np.sqrt(2.0 * TWINS / (TWINS + 1.0)))
    assert stated.replace == 2.0
    assert ranking_of(tfd.Poisson(tf.ones([3])), TWINS) == WITH_VALUES
    assert ranking_of(tfd.MultivariateNormalDiag(tf.zeros([3, 2])), TWINS) == DENSITIES


LAWS = {
    "normal": lambda: tfd.Normal(tf.zeros([2]), 2.0),
    "student": lambda: tfd.StudentT(4.0, tf.zeros([2]), 2.0),
    "gamma": lambda: tfd.Gamma([0.5, 3.0], 1e-3),
    "lognormal": lambda: tfd.LogNormal(tf.zeros([2]), 2.0),
    "beta": lambda: tfd.Beta([0.5, 3.0], 2.0),
}


@pytest.mark.parametrize("name", LAWS)
def test_outcomes_of_a_right_model_have_the_bins_probabilities(name):
    """Chi square at 1e-6 for each of five laws; half a scale more is seen."""
    law = LAWS[name]()
    ranking = ranking_of(law, TWINS)
    assert ranking.is_exact
    num = 20_000
    for factor, is_right in ((1.0, True), (1.5, False)):
        outcomes = factor * tf.transpose(law.sample(num, seed=[1, 2]))
        centred = centred_bins(law, outcomes).numpy()
        for sums in centred.sum(axis=1):
            variance = num * (np.diag(ranking.probabilities[0]))
            p_value = scipy.stats.chi2.sf(sums @ np.linalg.solve(variance, sums), len(sums) - 1)
            assert (p_value > 1e-6) == is_right


def test_every_bin_has_the_stated_bound_and_the_rarest_reaches_it():
    law = tfd.Normal(tf.zeros([1]), 1.0)
    values = [-np.inf, -9.0, -1.5, -0.1, 0.1, 1.5, 9.0, np.inf, np.nan]
    own = centred_bins(law, tf.constant([values], "float32")).numpy()[0]
    stated = OutcomeRanks(ranking_of(law, TWINS)).sensitivity
    assert np.linalg.norm(own, axis=1).max() == pytest.approx(stated.add_or_remove, rel=1e-6)
    away = np.linalg.norm(own[:, None] - own, axis=2)
    assert away.max() == pytest.approx(stated.replace, rel=1e-6)
    assert len(np.unique(own, axis=0)) == 6


def test_other_classes_have_twins():
    """A circle's `cdf` depends on where it is cut, and that of a subclass may be anything."""

    class Mixing(tfd.Normal):
        def _cdf(self, value):
            return super()._cdf(value + tf.reduce_sum(self.loc))

    zeros = tf.zeros([3])
    for law in (tfd.VonMises(zeros, 1.0), Mixing(zeros, 1.0), tfd.Deterministic(zeros)):
        assert ranking_of(law, TWINS) == WITH_VALUES


def test_subsampled_records_are_less_even():
    """p-values of a right model with q .05 and 60 steps: Kolmogorov-Smirnov at 1e-4.

    The mutation takes the variance of records that are in each step.
    """
    generator = np.random.default_rng(6)
    ranking = ranking_of(tfd.Normal(tf.zeros([1]), 1.0), TWINS)
    bins = np.array(ranking.probabilities[0])
    num, steps, rate = 20_000, 60, 0.05
    subsampling = 1.0 + (1.0 / rate - 1.0) / steps
    p_values, faulty = [], []
    for _ in range(200):
        # The number of a record's steps, and its bin.
        times = generator.binomial(steps, rate, num) / (rate * steps)
        number = generator.choice(len(bins), size=num, p=bins)
        counts = np.bincount(number, weights=times, minlength=len(bins))
        total = counts - bins * times.sum() + generator.normal(size=len(bins))
        arguments = (ranking, total, 1.0, num, np.zeros([len(bins), 1]), rate * steps)
        for values, factor in ((p_values, subsampling), (faulty, 1.0)):
            values.append(ReleasedRanks(*arguments, factor).p_value(np.zeros(1), np.eye(1)))
    assert scipy.stats.kstest(p_values, "uniform").pvalue > 1e-4
    assert scipy.stats.kstest(faulty, "uniform").pvalue < 1e-4


def test_a_skewed_outcome_whose_bulk_looks_normal_is_seen_in_few_records():
    """As earnings: 1,200 lognormals, whose scale and place were fitted to the bulk."""
    generator = np.random.default_rng(4)
    num = 1200
    outcomes = np.exp(0.8 * generator.normal(size=[1, num])).astype("float32")
    law = tfd.Normal(tf.constant([1.05]), 0.75)
    ranking = ranking_of(law, TWINS)
    total = centred_bins(law, outcomes).numpy()[0].sum(axis=0)
    total = total + 20.0 * generator.normal(size=len(total))
    released = released_of(ranking, total, 20.0, num, np.zeros([len(total), 1]))
    assert released.p_value(np.zeros(1), np.eye(1)) < 1e-3
