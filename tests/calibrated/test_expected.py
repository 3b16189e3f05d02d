"""The expected score far from where it was released: against closed forms and exact posteriors."""

import dataclasses

import numpy as np
import pytest
import scipy.special
from support.scoring import Fits

from tfp_dpvi._tf import tf, tfd
from tfp_dpvi.bayes.model import BayesianModel
from tfp_dpvi.calibrated import centred_fit
from tfp_dpvi.calibrated.checks import MOST_HIDDEN, apart
from tfp_dpvi.calibrated.diagonal import MOST_DENSE
from tfp_dpvi.calibrated.expected import ExpectedScore
from tfp_dpvi.calibrated.mixture import LinearLikelihood, sampled_mixture
from tfp_dpvi.calibrated.moved import MovedScores
from tfp_dpvi.calibrated.pairing import Pairing
from tfp_dpvi.calibrated.scoring import Scoring
from tfp_dpvi.data import make_records

PLACE = 0.8
UNIT = 2.0


@pytest.fixture(scope="module")
def expected():
    """Of equal records with a chance of `expit(w)`, taken at w = .8."""
    prior = tfd.JointDistributionNamed({"w": tfd.Normal(0.0, UNIT)})
    model = BayesianModel(prior, lambda params, x: tfd.Bernoulli(logits=x[:, 0] * params["w"]))
    x = np.ones([300, 1], np.float32)
    records = make_records(
        x[:2], np.array([0, 1], np.int32), None, dtype=model.dtype, validate=True
    )
    scoring = Scoring(Pairing(model, records, log_scales=True), x, may_widen=False)
    scores, whitening = MovedScores(scoring.likelihood), np.array([[0.1]])
    scores.start(np.array([PLACE]), whitening)
    return ExpectedScore(scores, np.array([PLACE / 0.1]), whitening, np.array([UNIT]))


def straight(w):
    chance = scipy.special.expit(PLACE)
    return PLACE + (scipy.special.expit(w) - chance) / (chance * (1.0 - chance))


def test_points_have_the_mean_score_of_their_parameters(expected):
    w = np.array([-30.0, -2.0, PLACE, 3.0, 30.0])
    points, pull_back = expected(w[:, None] / UNIT)
    np.testing.assert_allclose(UNIT * points[:, 0], straight(w), rtol=1e-4, atol=1e-5)
    slopes = (straight(w + 1e-4) - straight(w - 1e-4)) / 2e-4
    np.testing.assert_allclose(pull_back(np.ones([5, 1]))[:, 0], slopes, rtol=1e-3, atol=1e-5)


def test_collinear_columns_are_as_they_are():
    """Of two equal columns the sum alone has a score; points differ as the parameters do."""
    prior = tfd.JointDistributionNamed({"w": tfd.Sample(tfd.Normal(0.0, UNIT), 2)})
    model = BayesianModel(
        prior, lambda params, x: tfd.Bernoulli(logits=tf.linalg.matvec(x, params["w"]))
    )
    x = np.ones([300, 2], np.float32)
    records = make_records(
        x[:2], np.array([0, 1], np.int32), None, dtype=model.dtype, validate=True
    )
    scoring = Scoring(Pairing(model, records, log_scales=True), x, may_widen=False)
    scores, whitening = MovedScores(scoring.likelihood), np.array([[0.1, 0.0], [0.03, 0.2]])
    place = np.array([PLACE / 2.0, PLACE / 2.0])
    scores.start(place, whitening)
    expected = ExpectedScore(
        scores, np.linalg.solve(whitening.T, place), whitening, np.array([UNIT, UNIT])
    )
    w = np.array([[3.0, -1.0], [-4.0, -2.0], [0.4, 0.4]])
    points, pull_back = expected(w / UNIT)
    # What the released score says is of the sum.
    np.testing.assert_allclose(UNIT * points.sum(axis=1), straight(w.sum(axis=1)), rtol=1e-3)
    assert np.abs(points).max() < 10.0
    gradient = np.array([[1.0, 0.3]] * 3)
    slopes = [
        ((expected((w + step) / UNIT)[0] - expected((w - step) / UNIT)[0]) * gradient).sum(axis=1)
        for step in 1e-2 * np.eye(2)
    ]
    np.testing.assert_allclose(
        pull_back(gradient), np.stack(slopes, axis=1) / 2e-2 * UNIT, rtol=2e-2, atol=2e-3
    )


def test_the_posterior_of_a_score_under_much_noise_is_the_exact_one(expected):
    """Under a straight line its mean is .86 standard deviations off, and it is .4 as wide."""
    sd = 0.4 / UNIT
    score = 2.2 / UNIT
    likelihood = LinearLikelihood(
        np.array([0]), np.full([32, 1, 1], sd**-2.0), np.full([32, 1], score * sd**-2.0)
    )
    start = np.random.default_rng(1).normal(size=(64, 1))
    found = sampled_mixture(
        likelihood,
        lambda x: (-0.5 * np.sum(x**2, axis=1), -x),
        start,
        np.random.default_rng(0),
        expected,
        is_costly=True,
    )
    grid = np.linspace(-6.0, 6.0, 4001)
    logs = -0.5 * grid**2 - 0.5 * ((straight(UNIT * grid) / UNIT - score) / sd) ** 2
    weights = np.exp(logs) / np.sum(np.exp(logs))
    mean = weights @ grid
    exact_sd = np.sqrt(weights @ (grid - mean) ** 2)
    line = score * sd**-2.0 / (1.0 + sd**-2.0)
    assert abs(line - mean) > 0.5 * exact_sd
    # 512 draws of 64 chains: a standard error of .06.
    assert found.mean[0] == pytest.approx(mean, abs=0.25 * exact_sd)
    assert found.covariance[0, 0] ** 0.5 == pytest.approx(exact_sd, rel=0.2)


def test_a_slope_that_is_not_finite_is_refused():
    """A density of 0 at a public input has a gradient that is not a number."""
    prior = tfd.JointDistributionNamed({"w": tfd.Normal(0.0, 1.0)})
    model = BayesianModel(prior, lambda p, x: tfd.Bernoulli(probs=tf.sigmoid(x[:, 0] * p["w"])))
    x = np.array([[1.0]] * 299 + [[-3e3]], np.float32)
    records = make_records(
        x[:2], np.array([0, 1], np.int32), None, dtype=model.dtype, validate=True
    )
    scoring = Scoring(Pairing(model, records, log_scales=True), x, may_widen=False)
    scores, eye = MovedScores(scoring.likelihood), np.eye(1)
    scores.start(np.array([PLACE]), eye)
    with pytest.raises(ValueError, match="finite slope"):
        ExpectedScore(scores, np.array([PLACE]), eye, np.ones(1))


def test_chains_know_nothing_of_more_coordinates_than_they_have():
    """Without information the posterior is the prior, up to the coordinates where it is used."""
    size = MOST_DENSE
    likelihood = LinearLikelihood(np.arange(2), np.zeros([32, 2, 2]), np.zeros([32, 2]))
    found = sampled_mixture(
        likelihood,
        lambda x: (-0.5 * np.sum(x**2, axis=1), -x),
        np.random.default_rng(1).normal(size=(256, size)),
        np.random.default_rng(0),
        is_costly=True,
    )
    # The mean of 50 standard deviations that vary by a tenth.
    sds = np.sqrt(np.diag(found.covariance))
    assert sds.mean() == pytest.approx(1.0, abs=0.06)


@pytest.fixture(scope="module")
def hidden():
    """200 records with six independent columns, and what was released of them."""
    generator = np.random.default_rng(0)
    prior = tfd.JointDistributionNamed({"w": tfd.Sample(tfd.Normal(0.0, 1.0), 6)})
    x = generator.normal(size=(200, 6)).astype("float32")
    y = (generator.random(200) < scipy.special.expit(x.sum(axis=1))).astype("int32")
    fits = Fits(prior, lambda p, x: tfd.Bernoulli(logits=tf.linalg.matvec(x, p["w"])), x, y, x)
    return fits, fits.run(x, y, seed=0)


def test_a_fit_that_noise_hides_takes_it(hidden, monkeypatch):
    taken = []

    def recorded(*arguments):
        taken.append(ExpectedScore(*arguments))
        return taken[-1]

    monkeypatch.setattr(centred_fit, "ExpectedScore", recorded)
    fits, released = hidden
    posterior = fits.posterior(released)
    assert len(taken) == 1
    assert np.isnan(posterior.checks.third_order)
    draws = posterior.distribution.sample(500, seed=[0, 1])["w"].numpy()
    assert np.isfinite(draws).all()
    assert 0.2 < draws.std(axis=0).mean() < 1.1


def test_where_its_chains_fail_the_straight_line_stays(hidden, monkeypatch):
    def failing(*arguments, is_costly=False):
        raise np.linalg.LinAlgError("chains of equal states")

    monkeypatch.setattr(centred_fit.mixtures, "sampled_mixture", failing)
    fits, released = hidden
    posterior = fits.posterior(released)
    assert np.isinf(posterior.checks.third_order)
    sds = np.sqrt(np.diag(posterior.mixture.covariance))
    assert np.all((sds > 0.1) & (sds < 1.1))


def test_noise_that_hides_correlations_is_said(hidden, monkeypatch):
    """As a warning where public inputs have none, and else as a note."""
    # Chains, which take time, are not the subject.
    monkeypatch.setattr(centred_fit, "MOST_THIRD_ORDER", np.inf)
    fits, released = hidden
    checks = fits.posterior(released).checks
    assert checks.hidden > MOST_HIDDEN
    assert any("noise hides whether columns are correlated" in each for each in checks.warnings)
    assert not any("correlations" in each for each in checks.notes)
    own = np.random.default_rng(1).normal(size=(1000, 1))
    like = (own + 0.5 * np.random.default_rng(2).normal(size=(1000, 6))).astype("float32")
    before = fits.scoring.likelihood.pool
    fits.scoring.likelihood.set_inputs(like)
    checks = fits.posterior(released).checks
    fits.scoring.likelihood.set_inputs(before)
    assert not any("columns are correlated" in each for each in checks.warnings)
    assert any("correlations of the public inputs" in each for each in checks.notes)
    # Neither is said of a release that shows them, nor of a posterior that is the prior.
    for changes in ({"hidden": 2.0}, {"apart": np.nan}):
        known = dataclasses.replace(checks, **changes)
        assert not any("correlat" in each for each in (*known.warnings, *known.notes))


def test_pairs_of_columns_are_apart_but_for_levels():
    generator = np.random.default_rng(0)
    every = np.ones(5, bool)

    def share(columns):
        x = np.concatenate([np.ones([1000, 1]), columns], axis=1)
        return apart(x.T @ x, every, 0)

    x = generator.normal(size=(1000, 4))
    assert share(x) == 1.0
    assert share(np.cumsum(x, axis=1)) == 0.0
    # Shifted columns, or of zeros and ones, have no correlation by what they share with the intercept.
    assert share(x + 5.0) == 1.0
    assert share(x > 0.0) == 1.0
    # Of two levels and two columns, the columns' pair; of levels alone none.
    levels = np.eye(3)[generator.integers(3, size=1000)]
    assert share(np.concatenate([levels[:, 1:], x[:, :2]], axis=1)) == 1.0
    assert share(np.concatenate([levels[:, 1:], x[:, :1], x[:, :1]], axis=1)) == 0.0
    assert np.isnan(share(np.eye(5)[generator.integers(5, size=1000)][:, 1:]))
