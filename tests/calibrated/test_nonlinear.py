"""The expected score of clipped pairs, against sums over both outcomes of every input."""

import numpy as np
import pytest

import tfp_dpvi as dpvi
from tfp_dpvi._tf import tf, tfp
from tfp_dpvi.calibrated.nonlinear import NonlinearScore
from tfp_dpvi.calibrated.simulation import PairSimulator, SimulatedPairs

tfd = tfp.distributions
CLIP, AT = 1.0, np.array([-3.0, 0.7])  # A few per cent of ones.
PATH = AT + 0.3 * np.array([[1.0, 1.0], [-1.0, -1.0], [1.0, -1.0], [-1.0, 1.0]])


@pytest.fixture(scope="module")
def simulated():
    generator = np.random.default_rng(0)
    x = np.stack([np.ones(4000), generator.normal(size=4000)], axis=1).astype("float32")
    model = dpvi.DPVI(
        tfd.Sample(tfd.Normal(0.0, 2.0), 2),
        lambda params, x: tfd.Bernoulli(logits=tf.linalg.matvec(x, params), dtype=tf.float32),
    )
    simulator = PairSimulator(model, x)
    guesses = AT + generator.normal(size=(16, 2))
    score = NonlinearScore.simulate(simulator, PATH, guesses, CLIP, generator)
    return x, simulator, score


def sums(x, theta):
    """E psi and E[psi delta^T] / 2 for y at theta and y' on the path; delta is x, -x or 0."""
    psi = x * np.minimum(1.0, CLIP / np.linalg.norm(x, axis=1, keepdims=True))
    p, other = (np.mean(1 / (1 + np.exp(-x @ np.atleast_2d(at).T)), axis=1) for at in (theta, PATH))
    differ = (p * (1 - other) + other * (1 - p)) / 2
    return psi.T @ (p - other) / len(x), (psi * differ[:, None]).T @ x / len(x)


@pytest.mark.parametrize("away", [(0.8, 0.0), (-0.8, 0.3), (0.4, -0.6)])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_the_score_is_that_of_the_exact_sums(simulated, away, share):
    """With A = G(theta), what a release at theta shows, the score is m(theta).

    Seeded; 6 % is the simulation's error here.
    """
    x, simulator, score = simulated
    theta = AT + np.array(away)
    mean, slope = sums(x, theta)
    root = score.root.numpy().astype(float)
    at_bar = sums(x, AT)[1]
    factor = np.sum(slope * at_bar) / np.sum(
        at_bar**2
    )  # What the release says of the size; the rest as `share` says.
    shape = np.linalg.solve(root, np.linalg.solve(root, slope).T)
    inner = np.linalg.cholesky((1 - share) * shape / factor + share * np.eye(2))
    relative = np.linalg.solve(inner, np.linalg.solve(inner, shape).T)
    arrays = (tf.constant(part, tf.float32) for part in (theta[None], relative[None], share))
    expected = root @ score.at(simulator, *arrays).numpy()[0]
    np.testing.assert_allclose(expected, mean, atol=0.06 * np.abs(mean).max())


def test_the_first_slope_in_place_of_that_at_theta_is_caught(simulated):
    """The release has half of the second order: the slope at theta_bar counts it twice."""
    x, *_ = simulated
    mean, slope = sums(x, AT + np.array([0.8, 0.0]))
    wrong = slope @ np.linalg.solve(sums(x, AT)[1], mean)
    assert np.abs(wrong - mean).max() > 0.2 * np.abs(mean).max()


def test_the_simulated_curvature_is_that_of_the_path(simulated):
    x, simulator, _ = simulated
    generator = np.random.default_rng(0)
    pairs = SimulatedPairs.joined([simulator.pairs(at, generator, 1024, 8) for at in PATH])
    prior = pairs.curvature_prior(1000, CLIP)
    np.testing.assert_allclose(
        prior.curvature, 1000 * sums(x, AT)[1], rtol=0.12, atol=0.05 * prior.curvature.max()
    )
