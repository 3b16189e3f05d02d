"""Draws of the curvature, and averages over the window; seeded, so that no test alarms falsely."""

import dataclasses

import numpy as np
import pytest
from scipy import stats
from support.siblings import slow

from tfp_dpvi.calibrated import curvature as lib
from tfp_dpvi.calibrated.checks import MOST_MISMATCH
from tfp_dpvi.calibrated.curvature import CurvaturePrior, draw_curvature
from tfp_dpvi.calibrated.hmc import hamiltonian
from tfp_dpvi.calibrated.mixture import LinearLikelihood, exact_mixture
from tfp_dpvi.calibrated.window import ReleaseNoise, Window, average_window

SIZE, NUM = 3, 1000
NOISE = ReleaseNoise(
    num_records=NUM, sampling_rate=0.1, clip=2.0, gradient=4.0, matrix=3.0, scale=5.0
)


def window(matrix, sd, *, scale=None, scale_sd=0.0):
    size = len(matrix)
    scale = 1.5 * np.trace(matrix) if scale is None else scale
    zeros = np.zeros(size)
    return Window(
        100,
        zeros,
        zeros[None],
        zeros[None],
        zeros,
        matrix,
        scale,
        1.0,
        sd,
        scale_sd,
        1.2,
        (zeros, zeros),
        4.0,
        1e9,
    )


def noisy(matrix, sd, generator):
    noise = generator.normal(size=matrix.shape) * sd
    return matrix + (noise + noise.T) / 2.0


PRIOR = CurvaturePrior(np.diag([30.0, 60.0, 90.0]), (8.0 * SIZE,), 0.5)
LOW = dataclasses.replace(PRIOR, degrees=(2.0,))  # Of rank two.


@pytest.mark.parametrize("prior", [PRIOR, LOW], ids=["full rank", "low rank"])
def test_the_gradient_is_that_of_the_density(prior):
    generator = np.random.default_rng(0)
    model = lib._Bartlett(window(np.eye(SIZE) * 50.0, 9.0), prior, *prior.degrees)
    x = 0.3 * generator.normal(size=(1, 7 if prior is PRIOR else 6))
    _, gradient = model.log_density(x)
    for number in range(x.shape[1]):
        step = np.zeros_like(x)
        step[0, number] = 1e-5
        slope = (model.log_density(x + step)[0] - model.log_density(x - step)[0]) / 2e-5
        np.testing.assert_allclose(gradient[0, number], slope[0], rtol=1e-5)


def test_the_mode_is_found_where_the_prior_is_sure():
    """From the release alone, 50 coordinates lie 1,000 nats below it after all steps.

    They have 1,600 degrees of freedom.
    """
    size = 50
    prior = CurvaturePrior(np.eye(size) * 100.0, (1600.0,), 0.3)
    seen = noisy(np.eye(size) * 120.0, 60.0, np.random.default_rng(0))
    model = lib._Bartlett(window(seen, 60.0), prior, 1600.0)
    mode, root = model.laplace
    _, gradient = model.log_density(mode[None])
    assert np.linalg.norm(np.linalg.solve(root, gradient[0])) < 0.5  # In standard deviations.


def drawn_from(prior, generator):
    factor = np.exp(prior.log_factor_sd * generator.normal())
    (degrees,) = prior.degrees
    normals = np.linalg.cholesky(prior.matrix) @ generator.normal(size=(SIZE, int(degrees)))
    return factor * normals @ normals.T / degrees


def ranks(sd, stated=None, symmetric=True, prior=PRIOR):
    """The rank of the true trace among the draws (Talts et al. 2018) is uniform."""
    generator, found = np.random.default_rng(1), []
    for _ in range(100):
        true = drawn_from(prior, generator)
        seen = (
            noisy(true, sd, generator)
            if symmetric
            else true + sd * np.tril(generator.normal(size=true.shape))
        )
        _, draws = draw_curvature(window(seen, stated or sd), prior, generator)
        found.append(np.mean(np.trace(draws, axis1=1, axis2=2) < np.trace(true)))
    return stats.kstest(np.array(found) + generator.uniform(0, 1 / 32, 100), "uniform").pvalue


@pytest.mark.parametrize(
    ("sd", "prior"),
    [(3.0, LOW), slow(60.0, PRIOR), slow(3.0, PRIOR), slow(60.0, LOW)],
    ids=["3-low rank", "60-full rank", "3-full rank", "60-low rank"],
)
def test_draws_are_calibrated(sd, prior):
    assert ranks(sd, prior=prior) > 1e-3


def test_noise_that_is_stated_three_times_too_small_is_caught():
    assert ranks(30.0, stated=10.0) < 1e-6


def test_no_draw_passes_the_public_bound():
    """Where noise drowns the release, draws of the Laplace approximation do."""
    prior, generator = CurvaturePrior.isotropic(SIZE, NUM, 1.0), np.random.default_rng(0)
    sd = np.linalg.norm(prior.matrix) / 0.1 / np.sqrt(SIZE * (SIZE + 1) / 2)
    for _ in range(20):
        known = dataclasses.replace(
            window(noisy(prior.matrix, sd, generator), sd), most_trace=NUM / 2
        )
        _, matrices = draw_curvature(known, prior, generator)
        assert np.trace(matrices, axis1=1, axis2=2).max() < 1.1 * NUM / 2


def test_without_noise_the_release_is_the_curvature():
    matrix = np.diag([1.0, 2.0, 3.0])
    slopes, matrices = draw_curvature(window(matrix, 0.0), PRIOR, np.random.default_rng(0))
    np.testing.assert_array_equal(matrices, matrix[None])
    np.testing.assert_allclose(slopes, 1.5 * matrix[None])


def test_kappa_is_drawn_with_its_noise_and_within_its_bounds():
    matrix = np.eye(SIZE) * 100.0
    kappa = [
        np.trace(slopes[0]) / np.trace(matrices[0])
        for slopes, matrices in (
            draw_curvature(
                dataclasses.replace(window(matrix, 0.0), scale=450.0, scale_sd=sd), PRIOR, generator
            )
            for generator in [np.random.default_rng(0)]
            for sd in [30.0] * 300
        )
    ]
    assert np.mean(kappa) == pytest.approx(1.5, abs=0.03)
    assert np.std(kappa) == pytest.approx(0.1, abs=0.02)
    far, matrices = draw_curvature(
        window(matrix, 0.0, scale=4000.0), PRIOR, np.random.default_rng(0)
    )
    np.testing.assert_allclose(far, 2.5 * matrices)


def test_noise_on_a_kappa_of_one_is_hardly_taken_for_information():
    """With noise of 20 %, draws cut at 1 are 10 % too large on average; truncated ones were 16 %."""
    generator = np.random.default_rng(0)
    alike = dataclasses.replace(PRIOR, kappa=(1.0, 0.4))
    found = []
    for _ in range(400):
        released = window(np.eye(3), 0.0, scale=3.0 * generator.normal(1.0, 0.2), scale_sd=0.6)
        found.append(np.trace(draw_curvature(released, alike, generator)[0][0]) / 3.0)
    assert 1.0 < np.mean(found) < 1.13


def test_a_simulated_slope_gives_the_directions_their_own_kappa():
    own = np.diag([1.0, 1.5, 2.0])
    prior = dataclasses.replace(PRIOR, curvature=PRIOR.matrix @ own)
    slopes, _ = draw_curvature(window(PRIOR.matrix, 0.0), prior, np.random.default_rng(0))
    expected = PRIOR.matrix @ own
    np.testing.assert_allclose(
        slopes[0], expected * (1.5 * np.trace(PRIOR.matrix) / np.trace(expected)), rtol=1e-6
    )


def test_a_curvature_of_another_shape_is_a_mismatch_and_noise_is_none():
    generator = np.random.default_rng(0)
    found = [
        PRIOR.mismatch(window(noisy(1.3 * PRIOR.matrix, 30.0, generator), 30.0)) for _ in range(100)
    ]
    assert np.quantile(found, 0.9) < 0.4
    other = np.diag([200.0, 20.0, 2.0])
    assert (
        min(PRIOR.mismatch(window(noisy(other, 10.0, generator), 10.0)) for _ in range(100)) > 0.4
    )


def test_levels_with_other_frequencies_are_a_mismatch_where_the_noise_lets_it_be_seen():
    """Public levels are equally frequent, private ones are not; sizes as of 5,000 records at epsilon 1.

    The release exceeds three sds of its noise by chance in less than 1 % of fits: of 200 at most 9
    (binomial, 3e-4). With the earlier limit of 0.4 none of the others was seen.
    """

    def information(frequencies):
        design = np.zeros((9, 9))
        design[0, 0] = 1.0
        design[0, 1:] = design[1:, 0] = frequencies
        design[1:, 1:] = np.diag(frequencies)
        return 26.0 * design + 1e-3 * np.eye(9)

    private = information(np.array([0.25, 0.12, 0.06, 0.03, 0.02, 0.012, 0.008, 0.005]))
    generator = np.random.default_rng(0)

    def num_seen(public):
        prior = CurvaturePrior(public, (72.0,), 0.5)
        released = [window(noisy(private, 1.0, generator), 1.0) for _ in range(200)]
        return sum(prior.mismatch(one) > MOST_MISMATCH for one in released)

    assert num_seen(private) <= 9
    assert num_seen(information(np.full(8, 0.125))) >= 190


# ---------------------------------------------------------------------- inputs unknown

WIDE, CLIP_OF = 6, 1.0


def coverage(spectrum, signal, prior=None, num=40):
    """Of 90 % intervals in all directions, for parameters drawn from N(0, I).

    The score is linear, and its noise known.
    """
    generator, covered = np.random.default_rng(0), []
    prior = prior or CurvaturePrior.isotropic(WIDE, NUM, CLIP_OF)
    for _ in range(num):
        turned = np.linalg.qr(generator.normal(size=(WIDE, WIDE)))[0]
        matrix = (
            0.1
            * NUM
            * CLIP_OF**2
            * np.exp(0.3 * generator.normal())
            * (turned * spectrum)
            @ turned.T
            / np.sum(spectrum)
        )
        sd = np.linalg.norm(matrix) / signal / np.sqrt(WIDE * (WIDE + 1) / 2)
        slope, spread = 1.4 * matrix, 1.2 * matrix + sd**2 * np.eye(WIDE)
        truth, error = (
            generator.normal(size=WIDE),
            np.linalg.cholesky(spread) @ generator.normal(size=WIDE),
        )
        weights = slope @ np.linalg.inv(spread)
        arrived = np.linalg.solve(np.eye(WIDE) + weights @ slope, weights @ (slope @ truth + error))
        arrived += 0.3 * generator.normal(size=WIDE)
        zeros = np.zeros(WIDE)
        known = Window(
            200, arrived, arrived[None], zeros[None],
            slope @ (truth - arrived) + error, noisy(matrix, sd, generator),
            1.4 * np.trace(matrix), sd, sd, sd, 1.2, (zeros, zeros), 4.0, NUM * CLIP_OF**2 / 2,
        )  # fmt: skip
        terms = LinearLikelihood.from_window(
            known, *draw_curvature(known, prior, generator), np.arange(WIDE)
        )
        draws = exact_mixture(terms, np.eye(WIDE), zeros).sample(1000, generator) @ turned
        low, high = np.quantile(draws, [0.05, 0.95], axis=0)
        covered.append((low <= turned.T @ truth) & (turned.T @ truth <= high))
    return np.mean(covered)


COLLINEAR, ALIKE = np.array([1.0, 1.0, 1e-4, 1e-4, 1e-4, 1e-4]), np.ones(WIDE)


@pytest.mark.parametrize(
    ("spectrum", "signal"),
    [
        (COLLINEAR, 5.0),
        slow(ALIKE, 5.0),
        slow(COLLINEAR, 1.0),
        slow(0.4 ** np.arange(6.0), 1.0),
    ],
)
def test_intervals_cover_whatever_the_inputs_share(spectrum, signal):
    assert 0.8 < coverage(spectrum, signal) < 0.98


def test_a_prior_of_full_rank_alone_is_too_sure_where_inputs_are_collinear():
    full = dataclasses.replace(CurvaturePrior.isotropic(WIDE, NUM, CLIP_OF), degrees=(2.0 * WIDE,))
    assert coverage(COLLINEAR, 5.0, full) < 0.8


# ---------------------------------------------------------------------- the window


def blocks(per_block, size=SIZE):
    generator, num = np.random.default_rng(2), 20
    shapes = {
        "steps": (),
        "theta": (size,),
        "squares": (size,),
        "gradient": (size,),
        "matrix": (size, size),
    }
    found = {
        name: generator.normal(size=(num, *shape)) * per_block for name, shape in shapes.items()
    }
    found["steps"] = np.full(num, float(per_block))
    return found


def test_the_window_is_the_last_seven_tenths():
    sums = blocks(10)
    found = average_window(sums, np.arange(20.0), NOISE)
    assert found.num_steps == 140
    np.testing.assert_allclose(found.path, sums["theta"][6:] / 10)
    np.testing.assert_allclose(found.theta, sums["theta"][6:].sum(axis=0) / 140)
    np.testing.assert_allclose(found.score, -NUM * sums["gradient"][6:].sum(axis=0) / 140)
    np.testing.assert_allclose(found.matrix, NUM * sums["matrix"][6:].sum(axis=0) / 140)
    assert found.scale == pytest.approx(NUM * np.arange(6.0, 20.0).sum() / 140)
    assert found.score_sd == pytest.approx(4.0 / (0.1 * np.sqrt(140)))
    assert found.matrix_sd == pytest.approx(3.0 / (0.1 * np.sqrt(140)))
    assert found.scale_sd == pytest.approx(5.0 / (0.1 * np.sqrt(140)))
    assert found.simulation == pytest.approx(1 + 2 / (0.1 * 140) - 1 / 140)
    assert found.most_trace == NUM * 2.0
    first, second = sums["theta"][6:13].sum(axis=0) / 70, sums["theta"][13:].sum(axis=0) / 70
    np.testing.assert_allclose(found.half_difference[1], first - second)
    assert found.half_variance == 4.0


@pytest.mark.parametrize("stopped", [3, 12])
def test_a_fit_that_stopped_early_has_the_window_of_what_ran(stopped):
    sums = {
        name: np.where(np.arange(20).reshape(-1, *[1] * (a.ndim - 1)) < stopped, a, 0)
        for name, a in blocks(10).items()
    }
    assert average_window(sums, np.zeros(20), NOISE).num_steps == 10 * (
        stopped - int(0.3 * stopped + 1e-9)
    )


def test_too_short_a_window_is_none():
    sums = {
        name: np.where(np.arange(20).reshape(-1, *[1] * (a.ndim - 1)) < 4, a, 0)
        for name, a in blocks(1).items()
    }
    assert average_window(sums, np.zeros(20), NOISE) is None


def test_a_chain_that_overflows_where_it_starts_stays_there():
    """Without a warning; the others go on."""

    def log_density(x):
        return -0.5 * np.sum(x**2, axis=1), -(x * np.where(abs(x) > 1e10, np.float64(1e308), 1.0))

    start = np.array([[1e11, 0.0], [3.0, 3.0]])
    end = hamiltonian(log_density, start, np.random.default_rng(0), num_steps=40, num_leapfrogs=5)[
        -1
    ]
    assert (end[0] == start[0]).all()
    assert np.linalg.norm(end[1]) < 4.0
    assert (end[1] != start[1]).all()


def test_degrees_behind_a_fall_of_the_evidence_are_found():
    """One strong direction: the evidence falls on the way from the most degrees to the fewest, which have most."""
    direction = np.array([1.0, -0.5, 0.7])
    released = 100.0 * (0.5 * np.eye(SIZE) + 200.0 * np.outer(direction, direction))
    prior = CurvaturePrior(100.0 * np.eye(SIZE), (2.0, 6.0, 24.0, 96.0), 0.5)
    seen = window(noisy(released, 200.0, np.random.default_rng(0)), 200.0)
    logs = [lib._Bartlett(seen, prior, degrees).log_evidence() for degrees in prior.degrees]
    assert logs[2] < logs[3] - 30.0 < logs[0] - 30.0, "or nothing is behind a fall"
    assert lib.NoisyCurvature(seen, prior).evidence[0] > 0.99
