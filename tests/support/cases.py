"""Models small enough for a loop over records, with likelihoods written out by hand as an independent reference."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

import tfp_dpvi as dpvi
from tfp_dpvi._tf import tf, tfp

tfd = tfp.distributions

SURROGATES = ("mean_field", "full_rank", "asvi")
NUM_RECORDS = 7


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, some records, and the log-likelihood of one record in plain TensorFlow."""

    prior: Callable[[Any], Any]
    likelihood: Callable[..., Any]
    log_prob: Callable[[Any, Any, Any], Any]
    records: Callable[[np.random.Generator, Any], dict[str, np.ndarray]]

    def model(self, surrogate, dtype, *, seed=0, **kwargs):
        model = dpvi.DPVI(
            self.prior(dtype), self.likelihood, surrogate, seed=seed, **kwargs, clipping="flat"
        )
        scatter(model.trainable_variables)
        return model


def scatter(variables, seed=1):
    """Moves variables off their symmetric starts."""
    rng = np.random.default_rng(seed)
    for variable in variables:
        variable.assign(
            variable + 0.3 * rng.normal(size=variable.shape).astype(variable.dtype.as_numpy_dtype)
        )


def normal(shape, scale, dtype):
    return tfd.Sample(tfd.Normal(np.zeros([], dtype), np.asarray(scale, dtype)), sample_shape=shape)


def _inputs(rng, dtype, width, y):
    x = rng.normal(size=(NUM_RECORDS, width)).astype(dtype)
    return {"x": x, "y": y(x)}


def _bernoulli_prior(dtype):
    return tfd.JointDistributionNamed({"w": normal(3, 2.0, dtype)})


def _bernoulli(params, x):
    return tfd.Bernoulli(logits=tf.linalg.matvec(x, params["w"]))


def _bernoulli_by_hand(params, x, y):
    logit = tf.reduce_sum(x * params["w"])
    return tf.cast(y, logit.dtype) * logit - tf.math.softplus(logit)


def _unknown_scale_prior(dtype):
    three, one = np.asarray(3.0, dtype), np.asarray(1.0, dtype)
    return tfd.JointDistributionNamed({"w": normal(2, 1.0, dtype), "s": tfd.Gamma(three, one)})


def _unknown_scale(params, x):
    return tfd.Normal(tf.linalg.matvec(x, params["w"]), params["s"])


def _unknown_scale_by_hand(params, x, y):
    score = (y - tf.reduce_sum(x * params["w"])) / params["s"]
    return -0.5 * tf.square(score) - tf.math.log(params["s"]) - 0.5 * math.log(2 * math.pi)


def _categorical_prior(dtype):
    return tfd.JointDistributionNamed({"w": normal([2, 3], 1.0, dtype), "b": normal(3, 1.0, dtype)})


def _categorical(params, x):
    return tfd.Categorical(logits=x @ params["w"] + params["b"])


def _categorical_by_hand(params, x, y):
    logits = tf.reduce_sum(x[:, None] * params["w"], axis=0) + params["b"]
    return logits[y] - tf.math.log(tf.reduce_sum(tf.exp(logits)))


def _mixture_prior(dtype):
    return tfd.JointDistributionNamed(
        {
            "p": tfd.Dirichlet(np.full(3, 2.0, dtype)),
            "m": tfd.Independent(tfd.Normal(np.zeros([3, 2], dtype), 1.0), 2),
        }
    )


def _mixture(params):
    parts = tfd.MultivariateNormalDiag(params["m"], tf.ones_like(params["m"]))
    return tfd.MixtureSameFamily(tfd.Categorical(probs=params["p"]), parts)


def _mixture_by_hand(params, x, y):
    del y
    squares = tf.reduce_sum(tf.square(x - params["m"]), axis=-1)
    # TFP normalises the probabilities, which adds a component to the gradient by them.
    probabilities = params["p"] / tf.reduce_sum(params["p"])
    return tf.math.log(tf.reduce_sum(probabilities * tf.exp(-0.5 * squares))) - math.log(
        2 * math.pi
    )


CASES = {
    "bernoulli": Case(
        _bernoulli_prior,
        _bernoulli,
        _bernoulli_by_hand,
        lambda rng, dtype: _inputs(rng, dtype, 3, lambda x: (x[:, 0] > 0).astype(np.int32)),
    ),
    "unknown_scale": Case(
        _unknown_scale_prior,
        _unknown_scale,
        _unknown_scale_by_hand,
        lambda rng, dtype: _inputs(rng, dtype, 2, lambda x: (x[:, 0] - 2 * x[:, 1]).astype(dtype)),
    ),
    "categorical": Case(
        _categorical_prior,
        _categorical,
        _categorical_by_hand,
        lambda rng, dtype: _inputs(
            rng, dtype, 2, lambda x: rng.integers(0, 3, len(x)).astype(np.int32)
        ),
    ),
    "mixture": Case(
        _mixture_prior,
        _mixture,
        _mixture_by_hand,
        lambda rng, dtype: {"x": (2 * rng.normal(size=(NUM_RECORDS, 2))).astype(dtype)},
    ),
}


@functools.cache
def shared_model(case, surrogate, dtype):
    """Models are dear to build: tests set `gradients` and `num_draws` on shared ones."""
    return CASES[case].model(surrogate, dtype)
