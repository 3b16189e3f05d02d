"""Draws from a mixture of many components: each takes one, with the right moments."""

import numpy as np
import pytest
import tensorflow_probability as tfp

from tfp_dpvi._tf import tf
from tfp_dpvi.calibrated.mixture import Mixture
from tfp_dpvi.calibrated.posterior import mixture_distribution

FACTOR = np.linalg.cholesky(np.array([[1.0, 0.5, 0.0], [0.5, 2.0, 0.3], [0.0, 0.3, 1.0]]))


class Plain:
    """Coordinates that are the parameters themselves."""

    dtype = tf.float32
    bijector = tfp.bijectors.Identity()


def made(num, scales):
    return Mixture(np.random.default_rng(0).normal(size=(num, scales.shape[1])), scales)


@pytest.mark.parametrize("shared", [True, False])
def test_draws_have_the_mixtures_moments(shared):
    """Within 6 standard errors of 40,000 draws."""
    growing = 1.0 + np.arange(50.0)[:, None, None] / 50.0
    mixture = made(50, FACTOR[None] if shared else FACTOR * growing)
    draws = mixture_distribution(mixture, Plain).sample(40_000, seed=[1, 2]).numpy()
    sds = np.sqrt(np.diag(mixture.covariance))
    assert (np.abs(draws.mean(axis=0) - mixture.mean) < 6.0 * sds / 200.0).all()
    error = np.abs(np.cov(draws.T) - mixture.covariance) / np.outer(sds, sds)
    assert (error < 6.0 * np.sqrt(3.0) / 200.0).all()


def test_thousands_of_kernels_need_no_gigabytes():
    """Draws of all components would be 80 GB."""
    mixture = made(2000, np.eye(500)[None])
    distribution = mixture_distribution(mixture, Plain)
    assert distribution.sample(100, seed=1).shape == (100, 500)
    many = tf.function(lambda num: distribution.sample(num, seed=tf.constant([1, 2])))
    assert many(tf.constant(20_000)).shape == (20_000, 500)
