"""The coordinates of a prior: what is traced once, and which priors draw several values at once."""

import numpy as np
import pytest

from tfp_dpvi._tf import tf, tfd
from tfp_dpvi.bayes.coordinates import Coordinates


class Counted(tfd.Normal):
    """A normal distribution that counts how often its log density is traced."""

    def __init__(self, loc, scale):
        super().__init__(loc, scale)
        self.num = 0

    def _log_prob(self, x):
        self.num += 1
        return super()._log_prob(x)


def test_a_log_density_is_traced_once_for_single_values_and_once_for_several():
    """The check and all later points share the trace of several."""
    prior = Counted([0.0, 1.0], [1.0, 2.0])
    coordinates = Coordinates(tfd.Independent(prior, 1))
    assert coordinates.broadcasts()
    for num in (1, 5, 16):
        points = np.random.default_rng(num).normal(size=(num, 2))
        value, slope = coordinates.log_density(points)
        wanted = tfd.Normal([0.0, 1.0], [1.0, 2.0]).log_prob(points.astype(np.float32))
        np.testing.assert_allclose(value, np.sum(wanted, axis=1), rtol=1e-5)
        np.testing.assert_allclose(slope, (np.array([0.0, 1.0]) - points) / [1, 4], atol=1e-5)
    assert prior.num == 2


@pytest.mark.parametrize("size", [1, 7, 16])
def test_a_prior_whose_parts_mix_draws_does_not_broadcast(size):
    """Also where its size is the number of draws, or of the points that are evaluated at once."""

    def model():
        middle = yield tfd.JointDistributionCoroutine.Root(tfd.Normal(0.0, 1.0))
        yield tfd.Independent(tfd.Normal(middle + tf.zeros([size]), 1.0), 1)

    assert not Coordinates(tfd.JointDistributionCoroutine(model)).broadcasts()


def test_parts_without_constraint_are_found_in_one_evaluation(monkeypatch):
    prior = tfd.JointDistributionNamed(
        {
            "a": tfd.Sample(tfd.Normal(0.0, 1.0), 3),
            "b": tfd.HalfNormal(1.0),
            "c": tfd.Dirichlet([1.0, 1.0, 1.0]),
            "d": tfd.Normal(0.0, 1.0),
        }
    )
    coordinates = Coordinates(prior, log_scales=True)
    constrain = coordinates.constrain
    calls = []
    monkeypatch.setattr(coordinates, "constrain", lambda parts: calls.append(1) or constrain(parts))
    assert [coordinates.is_real(part) for part in range(4)] == [True, False, False, True]
    assert len(calls) == 1
