"""Expected scores of outcomes that follow other parameters: against NumPy, and against many records."""

import numpy as np
import pytest

from tfp_dpvi._tf import tf, tfd
from tfp_dpvi.bayes.model import BayesianModel
from tfp_dpvi.calibrated.moved import MovedScores, secant
from tfp_dpvi.calibrated.pairing import Pairing
from tfp_dpvi.calibrated.scores import Place, model_scores
from tfp_dpvi.calibrated.scoring import Scoring
from tfp_dpvi.data import make_records
from tfp_dpvi.gradients import StepSpec

PRIOR = tfd.JointDistributionNamed({"w": tfd.Sample(tfd.Normal(0.0, 1.0), 2)})
START = np.array([0.6, -0.3])
TRUTH = np.array([1.3, -0.1])


def scoring_of(likelihood, y):
    x = np.random.default_rng(0).normal(size=(300, 2)).astype("float32")
    model = BayesianModel(PRIOR, likelihood)
    records = make_records(x[: len(y)], y, None, dtype=model.dtype, validate=True)
    scoring = Scoring(Pairing(model, records, log_scales=True), x, may_widen=False)
    return scoring, x.astype("float64"), scoring.hold(START, 1000)


def test_enumerated_outcomes_are_exact():
    scoring, x, whitening = scoring_of(
        lambda params, x: tfd.Bernoulli(logits=tf.linalg.matvec(x, params["w"])),
        np.array([0, 1], np.int32),
    )
    before, after = (1.0 / (1.0 + np.exp(-x @ w)) for w in (START, TRUTH))
    v = x @ whitening.T
    cut = 1.0 / np.maximum(1.0, np.linalg.norm(v, axis=1) * np.maximum(before, 1.0 - before))
    wanted = ((after - before) * cut) @ v / len(x)
    moved = MovedScores(scoring.likelihood)
    moved.start(START, whitening)
    np.testing.assert_allclose(moved(TRUTH), wanted, rtol=2e-4, atol=1e-6)
    np.testing.assert_allclose(moved(START), 0.0, atol=1e-7)


@pytest.mark.slow
def test_drawn_outcomes_are_weighted():
    """Numbers: the mean score of 60,000 records with the other parameters, both means over draws."""

    def likelihood(params, x):
        return tfd.Normal(tf.linalg.matvec(x, params["w"]), 1.0)

    scoring, x, whitening = scoring_of(likelihood, np.array([0.0, 1.0], np.float32))
    moved = MovedScores(scoring.likelihood)
    moved.start(START, whitening)
    own = moved(TRUTH)
    rows = np.repeat(x, 200, axis=0)
    y = (rows @ TRUTH + np.random.default_rng(1).normal(size=len(rows))).astype("float32")
    place = Place(scoring.pairing, scoring.vector(), tf.constant(whitening, scoring.theta.dtype))
    scores = tf.function(model_scores, autograph=False)(
        place,
        {"x": tf.constant(rows, tf.float32), "y": tf.constant(y)},
        tf.fill([len(y)], True),
        tf.constant([3, 4], tf.int64),
        bound=1.0,
        num_twins=scoring.likelihood.num_twins,
        ranking=scoring.likelihood.ranking,
    )
    psi = scores.centred.psi.numpy()
    wanted, error = psi.mean(axis=0), psi.std(axis=0) / np.sqrt(len(psi))
    assert np.abs(own - wanted).max() < 7.0 * error.max()
    slope = scoring.likelihood.moments_at(START, whitening).slope
    linear = slope @ np.linalg.solve(whitening.T, TRUTH - START)
    assert np.linalg.norm(own - wanted) < 0.4 * np.linalg.norm(linear - wanted)


def test_a_secant_says_what_is_expected_along_the_way():
    start, way, expected = np.diag([2.0, 3.0]), np.array([1.0, 1.0]), np.array([1.5, 3.5])
    slope = secant(start, expected, way)
    np.testing.assert_allclose(slope @ way, expected)
    across = np.array([1.0, -1.0])
    np.testing.assert_allclose(slope @ across, start @ across)
    assert slope == pytest.approx(start + np.outer([-0.25, 0.25], way))


def test_held_parameters_stay_where_they_are():
    """Also a scale that is far larger than where a fit would start."""
    prior = tfd.JointDistributionNamed({"scale": tfd.HalfNormal(1.0)})
    model = BayesianModel(prior, lambda params, x: tfd.Normal(x[:, 0], params["scale"]))
    x = np.zeros([300, 1], np.float32)
    records = make_records(x, x[:, 0], None, dtype=model.dtype, validate=True)
    scoring = Scoring(Pairing(model, records, log_scales=True), x, may_widen=False)
    scoring.hold(np.array([5.0]), 1000)
    gradient = scoring.gradient(StepSpec(300.0, 300)).draw(tf.constant([0, 1]))
    np.testing.assert_array_equal(gradient.pull_back([tf.constant([0.3])]), [[0.0]])
