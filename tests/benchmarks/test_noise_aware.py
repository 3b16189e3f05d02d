"""`benchmarks/noise_aware.py`: what its posterior finds in traces whose optimum and curvature are known."""

from __future__ import annotations

import noise_aware
import numpy as np
import pytest
from scipy.special import logsumexp

OPTIMUM, CURVATURE = (
    np.array([1.0, -0.5, -3.0, -2.0]),
    np.array([400.0, 90.0, 20.0, 30.0]),
)  # The priors have a = H: wrong near 1.


def trace(noise, num=3000, rate=noise_aware.RATE):
    generator = np.random.default_rng(1)
    parameters = OPTIMUM + generator.normal(size=(num, 4)) * 0.1
    gradients = rate * CURVATURE * (parameters - OPTIMUM) + noise * generator.normal(size=(num, 4))
    return noise_aware.Trace(parameters, gradients, noise * np.ones(4))


def test_a_trace_almost_without_noise_gives_optimum_and_curvature():
    sums = noise_aware.Sums(trace(1e-3))
    optimum, curvature = sums.draws(500, np.random.default_rng(0))
    np.testing.assert_allclose(curvature.mean(axis=0), CURVATURE, rtol=2e-3)
    np.testing.assert_allclose(optimum.mean(axis=0), OPTIMUM, atol=1e-3)
    mode, sd = sums.laplace()
    np.testing.assert_allclose(mode, OPTIMUM, atol=1e-3)
    assert np.all(sd < 1e-3)


def test_the_optimum_is_as_uncertain_as_the_noise_makes_it():
    sums = noise_aware.Sums(trace(2.0))
    optimum, _ = sums.draws(4000, np.random.default_rng(0))
    known = 2.0 / (noise_aware.RATE * CURVATURE * np.sqrt(3000))  # Were the curvature known.
    np.testing.assert_allclose(optimum.std(axis=0)[:2], known[:2], rtol=0.2)
    np.testing.assert_allclose(sums.laplace()[1][:2], known[:2], rtol=0.1)
    assert np.all(np.abs(optimum.mean(axis=0) - OPTIMUM) < 4.0 * optimum.std(axis=0))


def test_sums_give_the_density_of_the_whole_trace():
    kept = trace(3.0, num=40)
    sums, place = noise_aware.Sums(kept), 1
    optimum = sums.center[place] + np.linspace(-8.0, 8.0, 20_001)

    def whole(a, s):
        mean = (
            noise_aware.RATE * np.logaddexp(0.0, a) * (kept.parameters[:, place] - optimum[:, None])
        )
        variance = 9.0 + s**2
        value = -0.5 * np.sum(
            (kept.gradients[:, place] - mean) ** 2 / variance + np.log(variance), axis=1
        )
        value -= 0.5 * (optimum - sums.center[place]) ** 2
        weights = np.exp(value - logsumexp(value))
        prior = -0.5 * (((a - sums.a[place]) / sums.a_sd[place]) ** 2 + s**2)
        middle = weights @ optimum
        return logsumexp(value) + prior, middle, np.sqrt(weights @ (optimum - middle) ** 2)

    points = [(90.0, 0.1), (60.0, 2.0), (20.0, 1.0)]
    expected = np.array([whole(*point) for point in points])
    found = np.array([sums.log_density(place, *point) for point in points])
    np.testing.assert_allclose(found[:, 1:], expected[:, 1:], rtol=1e-4)
    np.testing.assert_allclose(
        found[1:, 0] - found[0, 0], expected[1:, 0] - expected[0, 0], rtol=1e-5
    )


@pytest.mark.parametrize("kind", ["logistic", "linear"])
def test_gradients_in_closed_form(kind):
    generator = np.random.default_rng(2)
    target = (noise_aware.Logistic if kind == "logistic" else noise_aware.Linear)(4)
    x = np.insert(generator.normal(size=(3, 3 if kind == "logistic" else 2)), 0, 1.0, axis=1)
    y, theta, weights = np.array([0.0, 1.0, 1.0]), *generator.normal(size=(2, 5, 4))

    def loss(one):
        if kind == "logistic":
            return np.logaddexp(0.0, x @ one) - y * (x @ one)
        return one[1] + 0.5 * ((y - x @ np.delete(one, 1)) / np.exp(one[1])) ** 2

    step = 1e-6 * np.eye(4)
    each = np.array(
        [[(loss(one + e) - loss(one - e)) / 2e-6 for e in step] for one in theta]
    )  # [K, d, B]
    plain, weighted = target.likelihood(theta, weights, x, y)
    np.testing.assert_allclose(plain, each.mean(axis=0).T, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(
        weighted, np.einsum("kdb,kd->bd", each, weights) / 5, rtol=1e-5, atol=1e-7
    )


def test_no_record_weighs_more_than_the_clip():
    generator = np.random.default_rng(3)
    x, y = (
        np.insert(generator.normal(size=(200, 2)), 0, 1.0, axis=1),
        generator.integers(2, size=200) * 1.0,
    )
    target, noise, clip, factor = noise_aware.Logistic(3), 1e-6, 0.1, 20.0
    kept = noise_aware.descend(target, x, y, noise, 5, clip, factor, 1e-9, np.random.default_rng(4))
    batches = np.random.default_rng(4)
    chosen = batches.random(200, np.float32) < noise_aware.RATE
    first = kept.gradients[0] * np.repeat([1.0, factor], 3)
    assert 0.0 < np.linalg.norm(first) <= clip * chosen.sum() + 1e-4
    unclipped = [
        noise_aware.descend(
            target, x, y, noise, 5, wide, factor, 1e-9, np.random.default_rng(4)
        ).gradients[0]
        for wide in (100.0, 200.0)
    ]
    assert np.linalg.norm(unclipped[0]) > 1.5 * np.linalg.norm(kept.gradients[0])
    np.testing.assert_allclose(*unclipped, atol=2e-3)
