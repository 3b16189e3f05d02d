"""Scores of a record's outcomes: by factors they are those of a backward pass for each outcome."""

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp
from support.siblings import slow

from tfp_dpvi._tf import function_of_model
from tfp_dpvi.bayes.model import BayesianModel
from tfp_dpvi.calibrated import scores
from tfp_dpvi.calibrated.centred_fit import CentredFit
from tfp_dpvi.calibrated.pairing import Pairing
from tfp_dpvi.calibrated.ranks import Ranking
from tfp_dpvi.data import make_records
from tfp_dpvi.gradients import StepSpec

tfd = tfp.distributions
NUM = 32


def line(params, x):
    return params["b"] + params["w"] * x


FAMILIES = {
    "poisson": lambda p, x: tfd.Poisson(log_rate=line(p, x) + tf.math.log(p["s"])),
    "student_t": lambda p, x: tfd.StudentT(4.0, line(p, x), p["s"]),
    "categorical": lambda p, x: tfd.Categorical(
        logits=tf.stack([0.0 * x, line(p, x), p["s"] * x], axis=-1)
    ),
    "two of it": lambda p, x: tfd.MixtureSameFamily(
        tfd.Categorical(logits=tf.stack([line(p, x), 0.0 * x], axis=-1)),
        tfd.Normal(tf.stack([line(p, x), p["s"] * x], axis=-1), p["s"]),
    ),
}


def scores_of(likelihood):
    prior = tfd.JointDistributionNamed(
        {"b": tfd.Normal(0.0, 1.0), "w": tfd.Normal(0.0, 1.0), "s": tfd.LogNormal(0.0, 0.5)}
    )
    model = BayesianModel(prior, likelihood)
    x = np.random.default_rng(0).normal(size=NUM).astype("float32")
    y = np.arange(NUM, dtype="float32") % 3
    records = make_records(x, y, None, dtype=model.dtype, validate=False)
    pairing = Pairing(model, records, log_scales=True)
    vector = tf.constant([0.2, 0.1, -0.4])
    whitening = tf.constant([[0.5, 0.0, 0.0], [0.2, 0.3, 0.0], [-0.1, 0.2, 0.6]])

    def of_records(records):
        return scores.model_scores(
            scores.Place(pairing, vector, whitening),
            records,
            tf.range(NUM) < NUM - 1,
            tf.constant([3, 4], tf.int64),
            bound=0.7,
            num_twins=3,
            ranking=Ranking((4 * (0.25,),), False),
        )

    return function_of_model(of_records)({"x": tf.constant(x), "y": tf.constant(y)})


def outer(pair):
    return np.einsum("nja,njb->nab", *pair)


@pytest.mark.parametrize(
    "name", [slow(name) if name in ("student_t", "two of it") else name for name in FAMILIES]
)
def test_factorised_scores_are_those_of_a_backward_pass_for_each_outcome(name, monkeypatch):
    tried = []
    factorised = scores._factorised_scores

    def recorded(*arguments):
        tried.append(factorised(*arguments))
        return tried[-1]

    monkeypatch.setattr(scores, "_factorised_scores", recorded)
    found = scores_of(FAMILIES[name])
    assert tried[0].jacobian is not None

    def refused(*arguments):
        raise TypeError("no parts")

    monkeypatch.setattr(scores, "_factorised_scores", refused)
    wanted = scores_of(FAMILIES[name])
    for part in ("psi", "scale", "expected"):
        np.testing.assert_allclose(
            getattr(found.centred, part), getattr(wanted.centred, part), rtol=2e-4, atol=2e-5
        )
    for pairs in (
        (found.information, wanted.information),
        (found.centred.slope, wanted.centred.slope),
        (2 * (found.centred.rows,), 2 * (wanted.centred.rows,)),
    ):
        np.testing.assert_allclose(*map(outer, pairs), rtol=2e-3, atol=2e-4)
    np.testing.assert_array_equal(found.usable, np.arange(NUM) < NUM - 1)
    assert not np.any(found.centred.psi[-1])


def test_a_density_that_reads_more_than_its_parameters_is_not_factorised(monkeypatch):
    """Otherwise the part of the score outside the distribution's parameters would be lost."""

    class Tilted(tfd.Normal):
        def __init__(self, loc, scale, tilt):
            super().__init__(loc, scale)
            self.tilt = tilt

        def _log_prob(self, value):
            return super()._log_prob(value) - tf.square(self.tilt) * value

    found = []
    direct = scores._direct_scores

    def recorded(*arguments):
        found.append(direct(*arguments))
        return found[-1]

    monkeypatch.setattr(scores, "_direct_scores", recorded)
    scores_of(lambda p, x: Tilted(line(p, x), 1.0, p["s"]))
    assert found[0].jacobian is None


@pytest.mark.parametrize(
    ("likelihood", "gains"),
    [
        (lambda p, x: tfd.Normal(line(p, x), 1.0), True),
        (lambda p, x: tfd.Bernoulli(line(p, x)), True),
        (lambda p, x: tfd.Poisson(log_rate=line(p, x)), False),
        (lambda p, x: tfd.Gamma(2.0, tf.exp(line(p, x))), False),
    ],
    ids=["normal", "enumerated", "poisson", "gamma"],
)
def test_steps_whose_samplers_reject_are_not_compiled_with_xla(likelihood, gains):
    prior = tfd.JointDistributionNamed({"b": tfd.Normal(0.0, 1.0), "w": tfd.Normal(0.0, 1.0)})
    inputs = np.zeros(4, "float32")
    records = make_records(inputs, np.ones(4, "float32"), None, dtype="float32", validate=False)
    scoring = CentredFit(BayesianModel(prior, likelihood)).prepare(records, inputs)
    assert scoring.gradient(StepSpec(4.0, 4)).gains_from_xla is gains
