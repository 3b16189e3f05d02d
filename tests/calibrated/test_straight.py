"""Values in which scores are linear: the map to them, where it applies, and the posterior there."""

import functools
import types

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp

from tfp_dpvi.bayes.coordinates import Coordinates
from tfp_dpvi.calibrated.mixture import LinearLikelihood, Mixture, sampled_mixture
from tfp_dpvi.calibrated.straight import Straight, linear_in

tfd = tfp.distributions
EVERY = np.arange(2)
# A difference, and the logit of the share of its first step.
POINT = np.array([0.8, -3.0])
UNIT = np.array([2.0, 0.5])


def steps(part):
    share = tf.sigmoid(part[:, 1])
    return part[:, :1] * tf.stack([share, 1.0 - share], axis=1)


def slopes_of_steps(total, share):
    return np.array(
        [[share, total * share * (1 - share)], [1 - share, -total * share * (1 - share)]]
    )


def straight(point=POINT, unit=UNIT):
    return Straight(steps, EVERY, point / unit, unit)


def test_the_map_is_the_identity_at_the_point_and_gradients_are_its():
    """Catches slopes that are not those of the values, and a map of gradients without transpose."""
    moved, pull_back = straight()((POINT / UNIT)[None])
    np.testing.assert_allclose(moved[0], POINT / UNIT)
    np.testing.assert_allclose(pull_back(np.array([[3.0, -1.0]])), [[3.0, -1.0]], atol=1e-12)
    away, step = np.array([[0.9, -4.0]]), 1e-6
    moved, pull_back = straight()(away)
    for weights in (np.array([[1.0, 0.0]]), np.array([[0.0, 1.0]])):
        for place in EVERY:
            ahead = straight()(away + step * np.eye(2)[place])[0]
            slope = ((ahead - moved) @ weights.T)[0, 0] / step
            assert pull_back(weights)[0, place] == pytest.approx(slope, rel=1e-4, abs=1e-6)


def test_a_value_that_may_change_its_sign_leaves_coordinates_as_they_are():
    for mean, wanted in ((0.8, True), (-0.8, True), (0.1, False)):
        mixture = Mixture(np.array([[mean / 2.0, -4.0]]), np.diag([0.1, 1.0])[None])
        assert straight().applies_to(mixture, EVERY) == wanted


def test_the_posterior_of_a_small_share_is_the_exact_one():
    """Steps of .03 and .77 with standard errors of .04; without the map it is off by far."""
    estimate, precision = np.array([0.03, 0.77]), np.linalg.inv(0.04**2 * (np.eye(2) + 0.3))
    total, logit = np.meshgrid(np.linspace(0.5, 1.1, 301), np.linspace(-9.0, 1.0, 801))
    share = 1.0 / (1.0 + np.exp(-logit))
    away = np.stack([total * share, total * (1 - share)], axis=-1) - estimate
    logs = -0.5 * np.einsum("abi,ij,abj->ab", away, precision, away)
    logs -= 0.5 * (total / 2.0) ** 2 + 0.5 * (logit / 1.8) ** 2
    weights = np.exp(logs - logs.max()).sum(axis=1)
    wanted = np.interp([0.05, 0.5, 0.95], np.cumsum(weights) / weights.sum(), share[:, 0])

    slope = slopes_of_steps(POINT[0], 1.0 / (1.0 + np.exp(-POINT[1]))) * UNIT
    share = 1.0 / (1.0 + np.exp(-POINT[1]))
    start = POINT[0] * np.array([share, 1.0 - share])
    information = slope.T @ precision @ slope
    middle = POINT / UNIT + np.linalg.solve(slope, estimate - start)
    linear = LinearLikelihood(EVERY, information[None], (information @ middle)[None])

    def log_prior(points):
        values = points * UNIT / np.array([2.0, 1.8])
        return -0.5 * (values**2).sum(axis=1), -values * UNIT / np.array([2.0, 1.8])

    generator = np.random.default_rng(0)
    guess = POINT / UNIT + 0.3 * generator.normal(size=(256, 2))
    off = []
    for used in (straight(), None):
        mixture = sampled_mixture(linear, log_prior, guess, generator, used)
        draws = UNIT[1] * mixture.sample(20_000, generator)[:, 1]
        found = np.quantile(1.0 / (1.0 + np.exp(-draws)), [0.05, 0.5, 0.95])
        off.append(np.abs(found - wanted) / (wanted[2] - wanted[0]))
    assert off[0].max() < 0.08
    assert off[1].max() > 0.3


def test_a_likelihood_says_where_its_scores_are_linear():
    """Catches keywords of a partial that are lost, and values of another part."""
    given = []

    def values(*, scale):
        given.append(scale)
        return None if scale == 0.0 else steps

    @linear_in("w", values)
    def likelihood(params, *, scale):
        return tfd.Normal(params["a"] + params["w"][0], scale)

    prior = tfd.JointDistributionNamed(
        {"a": tfd.Normal(0.0, 1.0), "w": tfd.Sample(tfd.Normal(0.0, 1.0), 2)}
    )

    def of(function):
        pairing = types.SimpleNamespace(
            model=types.SimpleNamespace(likelihood=function),
            coordinates=Coordinates(prior),
            index=np.arange(3),
        )
        return Straight.of_pairing(pairing, np.array([5.0, *POINT]), np.ones(3))

    inner = functools.partial(likelihood, scale=2.0)
    # One with attributes stays nested, as those that Keras tracks do.
    inner.tracked = True
    found = of(functools.partial(inner))
    assert given == [2.0]
    assert found.place.tolist() == [1, 2]
    np.testing.assert_array_equal(found.point, POINT)
    moved, pull_back = found(np.array([[7.0, *POINT]]))
    np.testing.assert_allclose(moved, [[7.0, *POINT]])
    np.testing.assert_allclose(pull_back(np.array([[2.0, 0.0, 0.0]])), [[2.0, 0.0, 0.0]])
    assert of(functools.partial(likelihood, scale=0.0)) is None
    assert of(lambda params: tfd.Normal(params["a"], 1.0)) is None
