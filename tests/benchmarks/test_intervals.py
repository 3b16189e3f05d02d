"""`benchmarks/intervals.py`: scores, and the ideal where it has a closed form."""

from __future__ import annotations

import numpy as np
import pytest
from intervals import Ideal, NonPrivate, crps, ideal_sds, interval, interval_score

from tfp_dpvi._tf import tfd
from tfp_dpvi.bayes.coordinates import Coordinates
from tfp_dpvi.bayes.model import BayesianModel


def test_the_interval_score_is_the_width_and_twenty_times_the_distance_outside():
    low, high = np.array([-1.0, -1.0, -1.0]), np.array([2.0, 2.0, 2.0])
    score = interval_score(low, high, np.array([0.0, 2.5, -1.1]))
    np.testing.assert_allclose(score, [3.0, 3.0 + 20.0 * 0.5, 3.0 + 20.0 * 0.1])


def test_the_interval_of_the_right_quantiles_has_the_best_score():
    draws = np.random.default_rng(0).normal(size=(20_000, 1))
    low, high = interval(draws)
    np.testing.assert_allclose([low, high], [[-1.645], [1.645]], atol=0.05)
    best = interval_score(low, high, draws).mean()
    for factor in (0.8, 1.25):
        assert interval_score(factor * low, factor * high, draws).mean() > best


def test_the_crps_of_a_normal_distribution_has_a_closed_form():
    draws = np.random.default_rng(0).normal(size=(20_000, 1))
    # At the mean: (sqrt 2 - 1) / sqrt pi.
    assert crps(draws, np.zeros(1))[0] == pytest.approx(0.2337, abs=0.01)


@pytest.mark.parametrize("noise", [0.0, 20.0])
def test_the_ideal_of_two_equally_likely_outcomes_is_in_closed_form(noise):
    # Scores of +-1/2 are all clipped to +-C: the precision is N^2 / 4 over N + sigma^2.
    scores = np.tile([[-0.5], [0.5]], (7, 1, 1))
    num = 500
    sds = ideal_sds(
        scores,
        np.full([7, 2], 0.5),
        np.array([[3.0]]),
        np.array([0]),
        whitened_by=np.array([[3.0]]),
        num_records=num,
        noise_multiplier=noise,
    )
    assert sds[0] ** -2 == pytest.approx(3.0 + num**2 / 4.0 / (num + noise**2), rel=1e-6)


def test_the_ideal_of_normal_scores_is_that_of_their_information():
    # A clip that cuts nothing, and no noise.
    scores = np.random.default_rng(0).normal(size=(4000, 8, 1))
    sds = ideal_sds(
        scores,
        np.full([4000, 8], 1 / 8),
        np.zeros([1, 1]),
        np.array([0]),
        whitened_by=np.array([[1e-6]]),
        num_records=100,
        noise_multiplier=0.0,
        simulated=True,
        clips=(20.0,),
    )
    assert sds[0] == pytest.approx(0.1, rel=0.02)


def test_an_ideal_does_not_depend_on_units():
    generator = np.random.default_rng(0)
    scores = generator.normal(size=(50, 16, 2)) @ np.array([[1.0, 0.5], [0.0, 2.0]])
    scores -= scores.mean(axis=1, keepdims=True)
    weights = np.full([50, 16], 1 / 16)
    units = np.array([1e4, 1e-3])
    found = [
        ideal_sds(
            scores / scale,
            weights,
            np.diag(scale**-2.0),
            np.arange(2),
            whitened_by=np.diag(scale**-2.0),
            num_records=1000,
            noise_multiplier=4.0,
        )
        / scale
        for scale in (np.ones(2), units)
    ]
    np.testing.assert_allclose(*found, rtol=1e-6)


@pytest.fixture(scope="module")
def scale_model():
    """The mean is not read; the noise's scale is, in dollars."""
    prior = tfd.JointDistributionNamed({"m": tfd.Normal(0.0, 1.0), "w": tfd.Normal(0.0, 2e4)})
    model = BayesianModel(prior, lambda p, x: tfd.Normal(p["w"] * x, 1e4))
    return model, Coordinates(prior, log_scales=True)


def test_the_posterior_without_privacy_is_that_of_a_normal_model(scale_model):
    exact = NonPrivate(*scale_model)
    x = np.ones(100, "float32")
    y = np.full(100, 5e3, "float32")
    mean, sd = exact.fit(np.array([0.5, 9e3]), x, y)
    precision = 100 / 1e8 + 1 / 4e8
    np.testing.assert_allclose(mean, [0.0, 100 * 5e3 / 1e8 / precision], rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(sd, [1.0, precision**-0.5], rtol=1e-3)
    np.testing.assert_allclose(
        exact.prior_precision(np.array([0.3, 1e3])), np.diag([1.0, 1 / 4e8]), rtol=1e-3, atol=1e-12
    )


def test_the_ideal_of_a_model_leaves_what_it_does_not_read(scale_model):
    sds = Ideal(*scale_model).sds(
        np.array([0.0, 1e3]),
        np.ones(400, "float32"),
        np.diag([1.0, 1 / 4e8]),
        num_records=400,
        epsilon=50.0,
        delta=1e-5,
    )
    # So much privacy is spent that the clip alone costs a little.
    assert sds[0] == pytest.approx(1.0)
    assert 1.0 <= sds[1] / (400 / 1e8 + 1 / 4e8) ** -0.5 < 1.05
