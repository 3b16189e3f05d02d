"""Information that a few extreme public inputs have, of which the released matrix shows nothing."""

import numpy as np
import pytest
import tensorflow_probability as tfp

from tfp_dpvi.bayes.model import BayesianModel
from tfp_dpvi.calibrated.pairing import Pairing
from tfp_dpvi.calibrated.scoring import Scoring
from tfp_dpvi.calibrated.whitening import SimulatedMoments
from tfp_dpvi.calibrated.wider import SimulatedWider
from tfp_dpvi.data import make_records

tfd = tfp.distributions


def moments(slopes, squares):
    none = np.zeros([0, 0])
    return SimulatedMoments(
        none, 1.0, none, none, none, 1.0, 1.0, np.zeros(0), 0.0, none, 1.0,
        *[np.zeros(0)] * 2, SimulatedWider(1.0, 1.0, 1.0),
        row_slopes=np.stack(slopes, axis=1), row_squares=np.stack(squares, axis=1),
    )  # fmt: skip


def test_a_slope_of_a_few_records_falls_without_them_and_that_of_a_rare_level_does_not():
    ones = np.ones(200)
    few = np.where(np.arange(200) < 4, 60.0, 1.0)
    rare = np.where(np.arange(200) < 4, 3.0, 0.0)
    # A quarter of the matrix are records of which each has three times as much of the slope.
    found = moments([ones, few, rare], [ones, ones, rare / 3.0]).tails()
    assert found[0] == pytest.approx(1.0)
    assert found[1] == pytest.approx((4 * 60.0 + 196.0) / 200.0)
    assert found[2] == pytest.approx(1.0)


def normal(generator, num):
    return generator.normal(size=num)


def wide(generator, num):
    """Of which one in a hundred may be ten times as large as the others."""
    largest = np.where(np.arange(num) % 100, 0.1, 1.0)
    return generator.permutation(np.linspace(0.0, 1.0, num) * largest)


@pytest.mark.parametrize(("draw", "least", "most"), [(normal, 1.0, 1.4), (wide, 1.8, np.inf)])
def test_exponentials_of_wide_columns_are_seen(draw, least, most):
    x = draw(np.random.default_rng(1), 2000).astype("float32")
    prior = tfd.JointDistributionNamed({"b": tfd.Normal(0.0, 3.0), "w": tfd.Normal(0.0, 9.0)})
    model = BayesianModel(prior, lambda p, x: tfd.Poisson(log_rate=p["b"] + p["w"] * x))
    records = make_records(x, np.ones(2000, "float32"), None, dtype="float32", validate=True)
    scoring = Scoring(Pairing(model, records, log_scales=True), x)
    theta = np.array([-1.0, 3.0 if draw is wide else 0.3])
    whitening = scoring.hold(theta, 2000)
    found = scoring.likelihood.moments_at(theta, whitening).tails()
    assert least <= found.max() <= most
