"""Priors that contradict the records: which are said, by how much, and which are not read."""

import numpy as np
import pytest
import tensorflow_probability as tfp
from scipy import stats

from tfp_dpvi.bayes.coordinates import Coordinates
from tfp_dpvi.calibrated.conflict import pulls
from tfp_dpvi.calibrated.mixture import LinearLikelihood, NormalPart, normal_part

tfd = tfp.distributions


def likelihood(estimate, information, index=None):
    """A likelihood that is normal about an estimate."""
    estimate, information = np.atleast_1d(estimate), np.atleast_2d(information)
    index = np.arange(len(estimate)) if index is None else index
    return LinearLikelihood(index, information[None], (information @ estimate)[None])


def pulled(estimate, information, prior_sd=1.0, mean=0.0):
    precision = np.atleast_2d(prior_sd**-2)
    values = likelihood(estimate, information)
    pull, z = pulls(
        values, NormalPart(np.array([True]), precision, precision @ np.atleast_1d(mean))
    )
    return pull[0], z[0]


@pytest.mark.parametrize("prior_sd", [0.5, 0.05, 0.005, 0.0001])
def test_the_pull_is_how_far_the_prior_moves_the_estimate(prior_sd):
    """However narrow the prior is: it then moves all of it."""
    information = 0.05**-2
    total = information + prior_sd**-2
    pull, z = pulled(0.6, information, prior_sd)
    np.testing.assert_allclose(pull, (0.6 - 0.6 * information / total) * np.sqrt(total))
    np.testing.assert_allclose(z, 0.6 / np.hypot(0.05, prior_sd))


@pytest.mark.parametrize("information", [0.01, 1.0, 100.0])
def test_the_z_of_a_prior_that_is_right_is_normal(information):
    """Its distribution is another one in less than one of 1,000 runs."""
    generator = np.random.default_rng(0)
    draws = [
        pulled(generator.normal(2.0, np.hypot(1.0, information**-0.5)), information, 1.0, 2.0)[1]
        for _ in range(2000)
    ]
    assert stats.kstest(draws, stats.halfnorm.cdf).pvalue > 1e-3


def test_the_prior_of_one_coordinate_pulls_another():
    """An intercept's, at a record far from all others, moves the slope."""
    information = np.array([[100.0, 190.0], [190.0, 400.0]])
    precision = np.diag([1.0, 1e-4])
    estimate = np.array([9.0, -5.0])
    every = np.array([True, True])
    pull, z = pulls(likelihood(estimate, information), NormalPart(every, precision, np.zeros(2)))
    covariance = np.linalg.inv(information + precision)
    moved = estimate - covariance @ information @ estimate
    np.testing.assert_allclose(pull, np.abs(moved) / np.sqrt(np.diag(covariance)), rtol=0.05)
    assert z.min() > 4.0


def test_a_direction_without_information_says_nothing():
    information = np.array([[1.0, 1.0], [1.0, 1.0]])
    every = np.array([True, True])
    pull, z = pulls(
        likelihood([0.5, -0.5], information), NormalPart(every, np.eye(2), np.array([9.0, -9.0]))
    )
    np.testing.assert_allclose([pull, z], 0.0, atol=1e-6)


def test_draws_of_the_curvature_that_differ_explain_a_conflict():
    informations = np.array([[[1.0]], [[9.0]]])
    values = LinearLikelihood(np.array([0]), informations, np.array([[2.0], [38.0]]))
    _, z = pulls(values, NormalPart(np.array([True]), np.eye(1), np.zeros(1)))
    np.testing.assert_allclose(z, 20.0 / np.sqrt(5.0 * 6.0 + 18.0**2))


PRIOR = tfd.JointDistributionNamed(
    {
        "b": tfd.Sample(tfd.Normal(1.0, 2.0), 2),
        "scale": tfd.HalfNormal(1.0),
        "effects": lambda scale: tfd.Sample(tfd.Normal(0.0, scale), 2),
        "tail": tfd.StudentT(2.0, 0.0, 1.0),
    }
)


def test_priors_that_are_not_normal_or_depend_on_others_are_not_read():
    """A deviation between groups near 0 is where a half-normal prior has its mode."""
    coordinates = Coordinates(PRIOR, log_scales=True)
    part = normal_part(coordinates.log_density, coordinates.prior_draws(64))
    is_normal, precision = part.is_normal, part.precision
    assert [coordinates.names[place] for place in np.flatnonzero(is_normal)] == ["b[0]", "b[1]"]
    np.testing.assert_allclose(precision[np.ix_(is_normal, is_normal)], np.eye(2) / 4.0, rtol=1e-3)
    estimate = np.where(is_normal, 41.0, -9.0)
    values = likelihood(estimate, np.eye(len(estimate)))
    pull, z = pulls(values, part)
    assert np.isnan(pull[~is_normal]).all()
    np.testing.assert_allclose(z[is_normal], 40.0 / np.sqrt(5.0), rtol=1e-3)


def test_what_others_leave_open_is_no_conflict():
    """Of the sum alone much is known: the other summand is free."""
    information = np.array([[100.0, 100.0], [100.0, 100.01]])
    values = likelihood([50.0, -50.0], information)
    _, z = pulls(values, NormalPart(np.array([True, False]), np.eye(2), np.zeros(2)))
    assert z[0] < 5.1
    assert np.isnan(z[1])
