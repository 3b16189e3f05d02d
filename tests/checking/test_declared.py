"""What kind of outcome a likelihood has, from public values alone."""

import numpy as np
import pytest

import tfp_dpvi as dpvi
from tfp_dpvi._tf import tf, tfd
from tfp_dpvi.bayes.model import BayesianModel
from tfp_dpvi.checking.declared import declare, kind_of_outcome

X = np.full([5, 1], np.nan, "float32")  # Values are not read.
PRIOR = tfd.Normal(0.0, 1.0)


def shared(kind):
    return lambda w, x: dpvi.local.unit_quadrature(lambda z: kind(x[:, :1] + w + z), num_points=5)


LIKELIHOODS = {
    "normal": (lambda w, x: tfd.Normal(x[:, 0] + w, 1.0), False, False),
    "bernoulli": (lambda w, x: tfd.Bernoulli(logits=x[:, 0] + w), True, False),
    "poisson": (lambda w, x: tfd.Poisson(log_rate=x[:, 0] + w), False, True),
    "rare": (lambda w, x: tfd.Poisson(log_rate=x[:, 0] + w - 7.0), False, True),
    "classes": (
        lambda w, x: tfd.Categorical(logits=tf.stack([x[:, 0], x[:, 0] + w, x[:, 0]], 1)),
        False,
        False,
    ),
    "persons' labels": (shared(lambda s: tfd.Bernoulli(logits=s, dtype=tf.float32)), True, False),
    "persons' counts": (shared(lambda s: tfd.Poisson(log_rate=s)), False, True),
}


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_the_kind_of_outcome(name):
    likelihood, is_binary, is_count = LIKELIHOODS[name]
    outcome = kind_of_outcome(BayesianModel(PRIOR, likelihood), PRIOR, X)
    assert (outcome.is_binary, outcome.is_count) == (is_binary, is_count)
    assert np.isfinite(outcome.typical_score)


def test_the_sums_of_a_plan_stay_after_the_fit():
    """Whatever the posterior says of the outcome: the noise was scaled to these."""
    outcome = kind_of_outcome(BayesianModel(PRIOR, LIKELIHOODS["bernoulli"][0]), PRIOR, X)
    planned = declare(outcome, X, None, None, 0.05)
    other = kind_of_outcome(BayesianModel(PRIOR, LIKELIHOODS["normal"][0]), PRIOR, X)
    after = planned.after_fit(other, default_range=True)
    assert after.sensitivity == planned.sensitivity
    assert after.num == planned.num
    assert after.score_range != planned.score_range


def test_several_outputs_are_refused():
    model = BayesianModel(PRIOR, lambda w, x: tfd.Independent(tfd.Normal(x + w, tf.ones([1])), 1))
    with pytest.raises(ValueError, match="several outputs"):
        kind_of_outcome(model, PRIOR, X)
