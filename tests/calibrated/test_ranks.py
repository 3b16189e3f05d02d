"""Ranks of outcomes among twins: exact under the model, bounded, and uneven for a wrong shape."""

import itertools

import numpy as np
import pytest
import scipy.stats
import tensorflow as tf

from tfp_dpvi._tf import tfd
from tfp_dpvi.calibrated.ranks import OutcomeRanks, ReleasedRanks, centred_ranks, num_orders

TWINS = 4


def test_ranks_and_shared_ranks():
    logs = tf.constant([[0.0, 1.0, 2.0], [5.0, 5.0 + 1e-6, 1.0], [3.0, 3.0, 3.0]])
    shares = centred_ranks(logs, 1.0).numpy() + 1.0 / 3.0
    np.testing.assert_allclose(shares[0], np.eye(3), atol=1e-6)
    np.testing.assert_allclose(shares[1], [[0, 0.5, 0.5], [0, 0.5, 0.5], [1, 0, 0]], atol=1e-6)
    np.testing.assert_allclose(shares[2], np.full([3, 3], 1.0 / 3.0), atol=1e-6)


def test_every_term_has_the_stated_bound_and_some_reach_it():
    """Over all orders of five logs with ties, and whatever is not a number."""
    logs = np.array(
        list(itertools.product([0.0, 1.0, np.inf, np.nan], repeat=TWINS + 1)), "float32"
    )
    own = centred_ranks(tf.constant(logs), 1.0).numpy()[:, 0]
    stated = OutcomeRanks(TWINS, 1).sensitivity
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
            ReleasedRanks(total, 1.0, num, shared, slope, 1).p_value(np.zeros(1), np.eye(1))
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
    ranks = centred_ranks(tf.constant(logs), 1.0).numpy()
    # The score of a log scale is y^2 - 1.
    score = twins**2 - 1.0
    slope = np.einsum("njr,nj->r", ranks, score) / num / (TWINS + 1)
    small = shift / 10.0
    outcomes = np.concatenate([np.exp(small) * twins[:, :1], twins[:, 1:]], axis=1)
    own = centred_ranks(tf.constant(-(outcomes**2) / 2.0), 1.0).numpy()[:, 0]
    deviations = own.std(axis=0) / np.sqrt(num)
    # Second order: a few per cent of the shift.
    np.testing.assert_array_less(
        np.abs(own.mean(axis=0) - small * slope), 6.0 * deviations + 0.05 * np.abs(small * slope)
    )
    released = ReleasedRanks(num * own.mean(axis=0), 1.0, num, 1, slope[:, None], 1)
    assert released.p_value(np.array([small]), 1e-12 * np.eye(1)) > 1e-6
    assert released.p_value(np.zeros(1), 1e-12 * np.eye(1)) < 1e-6


def test_heavy_tails_are_seen_where_a_scale_absorbs_their_variance():
    generator = np.random.default_rng(2)
    num = 3000
    outcome = generator.standard_t(3.0, size=[num, 1]) / np.sqrt(3.0)
    twins = generator.normal(size=[num, TWINS])
    logs = -(np.concatenate([outcome, twins], axis=1) ** 2) / 2.0
    total = np.sum(centred_ranks(tf.constant(logs), 1.0).numpy()[:, 0], axis=0)
    total = total + 25.0 * generator.normal(size=TWINS + 1)
    released = ReleasedRanks(total, 25.0, num, 100, np.zeros([TWINS + 1, 1]), 1)
    assert released.p_value(np.zeros(1), np.eye(1)) < 1e-4


def test_skewed_outcomes_are_seen_by_their_own_order_alone():
    """Exponential outcomes of the normal model's mean and deviation, in units of 1e-6."""
    generator = np.random.default_rng(3)
    num, unit = 2000, 1e-6
    outcome = generator.exponential(size=[num, 1]) - 1.0
    values = unit * np.concatenate([outcome, generator.normal(size=[num, TWINS])], axis=1)
    orders = [-((values / unit) ** 2) / 2.0, values]
    sums = [
        np.sum(centred_ranks(tf.constant(order), least).numpy()[:, 0], axis=0)
        for order, least in zip(orders, (1.0, 0.0), strict=True)
    ]
    total = np.concatenate(sums) + 25.0 * generator.normal(size=2 * (TWINS + 1))
    released = ReleasedRanks(total, 25.0, num, 100, np.zeros([2 * (TWINS + 1), 1]), 2)
    assert released.p_value(np.zeros(1), np.eye(1)) < 1e-6
    stated = OutcomeRanks(TWINS, 2).sensitivity
    assert stated.add_or_remove == pytest.approx(np.sqrt(2.0 * TWINS / (TWINS + 1.0)))
    assert stated.replace == 2.0
    assert num_orders(tfd.Poisson(tf.ones([3]))) == 2
    assert num_orders(tfd.MultivariateNormalDiag(tf.zeros([3, 2]))) == 1
