"""`benchmarks/replicates.py`: one trace serves all data sets, and each fit is that of `DPVI.fit`."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from replicates import by_pilot

import tfp_dpvi as dpvi
from tfp_dpvi._tf import tf, tfd
from tfp_dpvi.rehearsal.replicates import Replicates, centred

NUM = 300
BUDGET = {"epsilon": 1.0, "delta": 1e-5}


class Counted:
    """A likelihood that counts how often Python calls it, which is how often it is traced."""

    def __init__(self):
        self.num_calls = 0

    def __call__(self, params, x):
        self.num_calls += 1
        return tfd.Bernoulli(logits=tf.linalg.matvec(x, params["w"]), dtype=tf.float32)


def data_set(seed):
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(NUM, 2)).astype("float32")
    return x, (generator.random(NUM) < 0.5).astype("float32")


@dataclasses.dataclass(frozen=True)
class Made:
    """Replicates with the likelihood that they call."""

    likelihood: Counted
    replicates: Replicates


@pytest.fixture(scope="module")
def by_scoring():
    likelihood = Counted()
    public = np.random.default_rng(9).normal(size=(200, 2)).astype("float32")
    prior = tfd.JointDistributionNamed({"w": tfd.Sample(tfd.Normal(0.0, 1.0), 2)})
    method = centred(prior, likelihood, *data_set(0), public, **BUDGET)
    return Made(likelihood, Replicates(method, num_draws=200)), prior, public


@pytest.mark.slow
def test_one_trace_serves_all_data_sets_and_none_depends_on_those_before(by_scoring):
    made, *_ = by_scoring
    first = made.replicates.fit(*data_set(0), seed=3)
    traced = made.likelihood.num_calls
    second = made.replicates.fit(*data_set(1), seed=4)
    again = made.replicates.fit(*data_set(0), seed=3)
    assert made.likelihood.num_calls == traced
    np.testing.assert_allclose(again.draws, first.draws, atol=1e-3)
    assert np.abs(second.draws.mean(axis=0) - first.draws.mean(axis=0)).max() > 0.01
    assert first.draws.shape == (200, 2)


def test_a_replicate_is_the_fit_of_a_model_with_the_same_seed(by_scoring):
    made, prior, public = by_scoring
    x, y = data_set(2)
    model = dpvi.DPVI(prior, made.likelihood, seed=5)
    model.compile(**BUDGET)
    model.fit(x, y, public_inputs=public, verbose=0)
    fit = made.replicates.fit(x, y, seed=5)
    np.testing.assert_allclose(
        fit.calibrated.mixture.mean,
        model.posterior_summary(num_draws=20_000).columns["mean"],
        atol=0.02,
    )
    assert len(fit.warnings) == len(model.caveats)


@pytest.mark.slow
def test_the_pilots_fits_start_anew(by_scoring):
    made, prior, public = by_scoring
    x, y = data_set(0)
    method = by_pilot("flat", prior, made.likelihood, x, y, public, **BUDGET)
    # Few steps: the driver is tested, not the fit.
    replicates = Replicates(dataclasses.replace(method, num_steps=20), num_draws=200)
    first = replicates.fit(x, y, seed=3)
    traced = made.likelihood.num_calls
    replicates.fit(*data_set(1), seed=4)
    again = replicates.fit(x, y, seed=3)
    assert made.likelihood.num_calls == traced
    assert first.calibrated is None
    np.testing.assert_array_equal(again.draws, first.draws)
