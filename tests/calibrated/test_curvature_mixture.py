"""The calibrated posterior against closed forms, quadrature, and coverage over simulations."""

import dataclasses

import numpy as np
import pytest
from scipy import stats

from tfp_dpvi.calibrated import curvature
from tfp_dpvi.calibrated import mixture as mixtures
from tfp_dpvi.calibrated import window as windows
from tfp_dpvi.calibrated.checks import check_posterior
from tfp_dpvi.calibrated.mixture import (
    LinearLikelihood,
    Mixture,
    exact_mixture,
    gaussian_prior,
    sampled_mixture,
)
from tfp_dpvi.calibrated.window import ReleaseNoise, Window

SIZE = 3


def normal_log_prior(precision, mean):
    def log_prior(points):
        away = points - mean
        return -0.5 * np.einsum("ni,ij,nj->n", away, precision, away), -away @ precision

    return log_prior


def laplace_log_prior(points):
    return -np.abs(points).sum(axis=1), -np.sign(points)


def window(score, theta, matrix, score_sd, simulation=1.2):
    zeros = np.zeros(len(theta))
    return Window(
        100,
        theta,
        theta[None],
        theta[None],
        score,
        matrix,
        np.trace(matrix),
        score_sd,
        0.0,
        0.0,
        simulation,
        (zeros, zeros),
        4.0,
        1e9,
    )


def test_one_curvature_and_a_normal_prior_is_the_formula():
    generator = np.random.default_rng(0)
    root = generator.normal(size=(SIZE, SIZE))
    matrix, slope = root @ root.T + np.eye(SIZE), 1.3 * (root @ root.T + np.eye(SIZE))
    theta, score, prior = (
        generator.normal(size=SIZE),
        generator.normal(size=SIZE),
        np.diag([1.0, 2.0, 3.0]),
    )
    terms = LinearLikelihood.from_window(
        window(score, theta, matrix, 0.7), slope[None], matrix[None], np.arange(SIZE)
    )
    found = exact_mixture(terms, prior, prior @ np.ones(SIZE))
    spread = np.linalg.inv(1.2 * matrix + 0.49 * np.eye(SIZE))
    precision = prior + slope @ spread @ slope
    mean = np.linalg.solve(
        precision, prior @ np.ones(SIZE) + slope @ spread @ (score + slope @ theta)
    )
    np.testing.assert_allclose(found.mean, mean)
    np.testing.assert_allclose(found.covariance, np.linalg.inv(precision))


def test_a_normal_prior_is_recognised_and_another_is_not():
    precision, mean = np.array([[2.0, 0.5, 0], [0.5, 1, 0], [0, 0, 3]]), np.array([1.0, -2.0, 0.5])
    draws = np.random.default_rng(1).normal(size=(64, SIZE))
    found, linear = gaussian_prior(normal_log_prior(precision, mean), draws)
    np.testing.assert_allclose(found, precision, atol=1e-9)
    np.testing.assert_allclose(linear, precision @ mean, atol=1e-9)
    assert gaussian_prior(laplace_log_prior, draws) is None


@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_that_does_not_depend_on_the_scale(scale):
    draws = scale * np.random.default_rng(1).normal(size=(64, SIZE))

    def student(x):  # Three degrees of freedom.
        return -2.0 * np.log1p(x**2 / (3.0 * scale**2)).sum(axis=1), -4.0 * x / (
            3.0 * scale**2 + x**2
        )

    assert gaussian_prior(student, draws) is None
    found, linear = gaussian_prior(
        lambda x: (-((x / scale) ** 2).sum(axis=1) / 2, (1.0 - x / scale) / scale), draws
    )
    np.testing.assert_allclose(found, np.eye(SIZE) / scale**2, atol=1e-6 / scale**2)
    np.testing.assert_allclose(linear, 1.0 / scale, rtol=1e-6)


def terms_of(precision, mean, index, num=32):
    return LinearLikelihood(
        index, np.repeat(precision[None], num, 0), np.repeat((precision @ mean)[None], num, 0)
    )


def test_sampled_is_exact_for_a_normal_prior_and_parts_that_are_not_read():
    """1,024 draws of 128 chains: means within 5 standard errors, deviations within 15 %; seeded."""
    prior = np.array([[2.0, 0.9, 0.4], [0.9, 1.0, 0.2], [0.4, 0.2, 3.0]])
    terms = terms_of(np.array([[30.0, 10.0], [10.0, 8.0]]), np.array([1.0, -0.5]), np.array([0, 2]))
    generator = np.random.default_rng(0)
    found = sampled_mixture(
        terms, normal_log_prior(prior, np.ones(3)), generator.normal(size=(64, 3)), generator
    )
    exact = exact_mixture(terms, prior, prior @ np.ones(3))
    sd = np.sqrt(np.diag(exact.covariance))
    assert np.all(np.abs(found.mean - exact.mean) < 5 * sd / np.sqrt(200))
    np.testing.assert_allclose(np.sqrt(np.diag(found.covariance)), sd, rtol=0.15)


def test_sampled_against_quadrature_for_a_prior_that_is_not_normal():
    terms = terms_of(np.array([[1.5]]), np.array([1.0]), np.array([0]))
    generator = np.random.default_rng(0)
    found = sampled_mixture(terms, laplace_log_prior, generator.normal(size=(64, 1)), generator)
    grid = np.linspace(-8, 8, 20_001)
    weight = np.exp(-np.abs(grid) - 0.75 * (grid - 1.0) ** 2)
    weight /= weight.sum()
    mean = np.sum(grid * weight)
    sd = np.sqrt(np.sum((grid - mean) ** 2 * weight))
    assert found.mean[0] == pytest.approx(mean, abs=5 * sd / np.sqrt(200))
    assert found.covariance[0, 0] == pytest.approx(sd**2, rel=0.25)


def test_refined_is_the_linear_posterior_where_nothing_bends():
    """512 draws of 32 chains: means within 0.25 deviations, deviations within 20 %; seeded."""
    prior, mean = np.array([[2.0, 0.9], [0.9, 1.0]]), np.array([0.5, -1.0])
    linear = exact_mixture(
        terms_of(np.array([[9.0, 2.0], [2.0, 4.0]]), np.zeros(2), np.arange(2)), prior, prior @ mean
    )
    precision = np.linalg.inv(linear.covariance)
    log_density = normal_log_prior(precision, linear.mean)
    found = mixtures.refined_mixture(linear, lambda chains: log_density, np.random.default_rng(0))
    sd = np.sqrt(np.diag(linear.covariance))
    assert np.all(np.abs(found.mean - linear.mean) < 0.25 * sd)
    np.testing.assert_allclose(np.sqrt(np.diag(found.covariance)), sd, rtol=0.2)


def test_refined_follows_a_density_that_bends():
    """A score of tanh(theta): against quadrature, from a start that does not bend; seeded."""

    def log_density(x):
        moved = np.tanh(x[:, 0])
        gradient = -(moved - 0.6) * (1 - moved**2) / 0.05 - x[:, 0]
        return -((moved - 0.6) ** 2) / 0.1 - x[:, 0] ** 2 / 2, gradient[:, None]

    linear = exact_mixture(
        terms_of(np.array([[20.0]]), np.array([0.6]), np.array([0])), np.eye(1), np.zeros(1)
    )
    found = mixtures.refined_mixture(linear, lambda chains: log_density, np.random.default_rng(0))
    grid = np.linspace(-6, 6, 20_001)
    weight = np.exp(log_density(grid[:, None])[0])
    weight /= weight.sum()
    mean = np.sum(grid * weight)
    assert found.mean[0] == pytest.approx(mean, abs=0.08)
    assert found.covariance[0, 0] == pytest.approx(np.sum((grid - mean) ** 2 * weight), rel=0.4)
    assert abs(linear.mean[0] - mean) > 0.1


def test_shares_of_the_variance_are_those_of_the_formula():
    """One parameter, one curvature: noise R, data B and the prior, in closed form."""
    released = window(np.array([1.0]), np.array([0.0]), np.array([[4.0]]), 3.0)
    slopes, matrices, index = np.array([[[5.0]]]), np.array([[[4.0]]]), np.array([0])
    mixture = exact_mixture(
        LinearLikelihood.from_window(released, slopes, matrices, index), np.eye(1), np.zeros(1)
    )
    data, noise = released.simulation * matrices[0], released.score_sd**2 * np.eye(1)
    log_prior = normal_log_prior(np.eye(1), np.zeros(1))
    shares = mixtures.variance_shares(slopes[0], data, noise, mixture, index, log_prior)
    spread = 1.2 * 4.0 + 9.0
    variance = 1 / (1 + 25 / spread)
    weight = (variance * 5.0 / spread) ** 2 / variance
    np.testing.assert_allclose(shares, [[9.0 * weight, 4.8 * weight, variance]], rtol=1e-5)


# ---------------------------------------------------------------- coverage over simulated releases

NUM, RATE, STEPS, CLIP = 2000, 0.2, 100, 1.0
NOISE = ReleaseNoise(NUM, RATE, CLIP, gradient=25.0, matrix=8.0, scale=8.0)
KAPPA = 1.6
TRUE_MATRIX = NUM * np.diag([0.12, 0.08, 0.05])


def released(generator, truth, noise=NOISE):
    """Sums over blocks of steps, of a fit that follows its own noisy scores; truth is [SIZE]."""
    shapes = {"steps": (), "matrix": (SIZE, SIZE)}
    shapes |= dict.fromkeys(("theta", "squares", "gradient"), (SIZE,))
    blocks = {name: np.zeros((20, *shape)) for name, shape in shapes.items()}
    scales = np.zeros(20)
    slope, root = KAPPA * TRUE_MATRIX, np.linalg.cholesky(TRUE_MATRIX)
    rate = 0.1 * np.linalg.inv(slope) * min(1.0, 25.0 / noise.gradient)
    data = root @ generator.normal(size=SIZE)  # What these records' scores sum to, at the truth.
    drawn = np.sqrt(2.0 / RATE - 1.0) * generator.normal(size=(STEPS, SIZE)) @ root.T
    drawn += noise.gradient / RATE * generator.normal(size=(STEPS, SIZE))
    entries = noise.matrix * generator.normal(size=(STEPS, SIZE, SIZE)) / RATE
    theta = truth.copy()
    for step in range(STEPS):
        score = slope @ (truth - theta) + data + drawn[step]
        block = step * 20 // STEPS
        blocks["steps"][block] += 1
        blocks["theta"][block] += theta
        blocks["gradient"][block] -= score / NUM
        blocks["matrix"][block] += (TRUE_MATRIX + (entries[step] + entries[step].T) / 2.0) / NUM
        scales[block] += (
            KAPPA * np.trace(TRUE_MATRIX) + noise.scale / RATE * generator.normal()
        ) / NUM
        theta = theta + rate @ score
    return blocks, scales


def coverage(
    num=120, noise=NOISE, mutate=lambda window, slopes, matrices: (window, slopes, matrices)
):
    """Covered intervals of all parameters, of `num` simulated fits, 90 % nominal. Seeded."""
    generator, covered = np.random.default_rng(5), []
    prior = curvature.CurvaturePrior(TRUE_MATRIX * 1.1, (8.0 * SIZE,), 0.3)
    for _ in range(num):
        truth = generator.normal(size=SIZE)
        window = windows.average_window(*released(generator, truth, noise), noise)
        window, slopes, matrices = mutate(
            window, *curvature.draw_curvature(window, prior, generator)
        )
        terms = LinearLikelihood.from_window(window, slopes, matrices, np.arange(SIZE))
        mixture = exact_mixture(terms, np.eye(SIZE), np.zeros(SIZE))
        picks = generator.integers(len(mixture.locs), size=400)
        normals = generator.normal(size=(400, SIZE))
        draws = mixture.locs[picks] + np.einsum("nij,nj->ni", mixture.scales[picks], normals)
        low, high = np.quantile(draws, [0.05, 0.95], axis=0)
        covered.append((low <= truth) & (truth <= high))
    return np.mean(covered)


def without_noise(window, slopes, matrices):
    return dataclasses.replace(window, score_sd=0.0), slopes, matrices


def kappa_of_one(window, slopes, matrices):
    return window, matrices, matrices


def double_kappa(window, slopes, matrices):
    return window, 2.0 * slopes, matrices


@pytest.mark.parametrize(
    "mutation", [without_noise, pytest.param(double_kappa, marks=pytest.mark.slow)]
)
def test_a_wrong_factor_is_caught(mutation):
    assert coverage(mutate=mutation) < 0.8


@pytest.mark.slow  # What is too wide is safe.
def test_kappa_of_one_widens_the_intervals_for_nothing():
    assert coverage(mutate=kappa_of_one) > 0.96


def test_as_the_budget_goes_to_nothing_the_prior_comes_back():
    """The truth is a draw of the prior: coverage 0.9, and the prior's mean and covariance."""
    nothing = ReleaseNoise(NUM, RATE, CLIP, gradient=25e4, matrix=8e4, scale=8e4)
    assert 0.85 <= coverage(noise=nothing) <= 0.95
    generator = np.random.default_rng(0)
    window = windows.average_window(*released(generator, np.ones(SIZE), nothing), nothing)
    prior = curvature.CurvaturePrior.isotropic(SIZE, NUM, CLIP)
    terms = LinearLikelihood.from_window(
        window, *curvature.draw_curvature(window, prior, generator), np.arange(SIZE)
    )
    mixture = exact_mixture(terms, np.eye(SIZE), np.zeros(SIZE))
    np.testing.assert_allclose(mixture.mean, 0.0, atol=0.1)
    np.testing.assert_allclose(mixture.covariance, np.eye(SIZE), atol=0.1)


# ---------------------------------------------------------------------- checks


def test_a_fit_that_has_not_arrived_is_warned_of():
    generator = np.random.default_rng(0)
    blocks, scales = released(generator, np.zeros(SIZE))
    window = windows.average_window(blocks, scales, NOISE)
    prior = curvature.CurvaturePrior(TRUE_MATRIX, (8.0 * SIZE,), 0.3)
    slopes, matrices = curvature.draw_curvature(window, prior, generator)
    for far, found in ((0.0, []), (30.0, ["did not converge"])):
        moved = Mixture(np.full((1, SIZE), far) + window.theta, 0.1 * np.eye(SIZE)[None])
        checks = check_posterior(window, slopes, matrices, moved, np.arange(SIZE))
        assert [any(word in sentence for sentence in checks.warnings) for word in found] == [
            True
        ] * len(found)
        assert len(checks.warnings) == len(found)


@pytest.mark.slow  # A hundred fits.
def test_halves_that_differ_are_warned_of():
    """p-values of 100 fits are uniform (seeded), and a drift of the score is seen."""
    generator, found = np.random.default_rng(3), []
    prior = curvature.CurvaturePrior(TRUE_MATRIX, (8.0 * SIZE,), 0.3)
    for _ in range(100):
        window = windows.average_window(*released(generator, np.zeros(SIZE)), NOISE)
        slopes, matrices = curvature.draw_curvature(window, prior, generator)
        mixture = Mixture(window.theta[None], np.eye(SIZE)[None])
        found.append(check_posterior(window, slopes, matrices, mixture, np.arange(SIZE)).halves)
    assert stats.kstest(found, "uniform").pvalue > 1e-3
    blocks, scales = released(generator, np.zeros(SIZE))
    blocks["gradient"][13:] += 3.0 * blocks["steps"][13:, None]
    window = windows.average_window(blocks, scales, NOISE)
    checks = check_posterior(window, slopes, matrices, mixture, np.arange(SIZE))
    assert checks.halves < 1e-3
    assert "halves" in checks.warnings[-1]


def test_draws_are_as_narrow_as_the_likelihood_however_vague_the_prior():
    """An absolute ridge on their covariance made kernels of 1e-5 prior sds, in silence.

    Of 4,096 draws' sds, 10 % is 9 standard errors, were they independent.
    """
    precisions = np.array([[[4e12, 1e12], [1e12, 1e12]]])
    likelihood = LinearLikelihood(np.arange(2), precisions, precisions @ [0.5, -0.2])

    def log_prior(x):
        return -np.sum(x**2, axis=1) / 2.0, -x

    start = [0.5, -0.2] + 1e-6 * np.random.default_rng(0).normal(size=(256, 2))
    drawn = sampled_mixture(likelihood, log_prior, start, np.random.default_rng(1))
    exact = np.linalg.inv(precisions[0])
    np.testing.assert_allclose(
        np.sqrt(np.diag(drawn.covariance)), np.sqrt(np.diag(exact)), rtol=0.1
    )
    assert drawn.covariance[0, 1] / exact[0, 1] == pytest.approx(1.0, abs=0.25)
