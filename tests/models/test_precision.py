"""Only float32 and float64: sums in float16 round together, and one record moves them by many clips."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp

import tfp_dpvi as dpvi
from tfp_dpvi import keras
from tfp_dpvi.gradients import Clip, clipped_sum

tfd = tfp.distributions

X = np.random.default_rng(0).normal(size=(20, 3)).astype("float32")
Y = X.sum(axis=1)
HALF = ("float16", "bfloat16")


class Regression(dpvi.DPModel):
    def __init__(self, dtype=None, late=False):
        super().__init__(**({} if late else {"dtype": dtype}))
        self.dtype_of_layer = dtype
        self.dense = None if late else keras.layers.Dense(1, dtype=dtype)

    def call(self, x):
        if self.dense is None:
            self.dense = keras.layers.Dense(1, dtype=self.dtype_of_layer)
        return self.dense(x)

    def record_loss(self, x, y):
        return tf.square(tf.cast(self(x[None])[0, 0], y.dtype) - y)


class Variable(dpvi.DPModel):
    def __init__(self, dtype):
        super().__init__()
        self.w = tf.Variable(tf.zeros([3], dtype))
        self.built = True

    def record_loss(self, x, y):
        return tf.square(tf.reduce_sum(tf.cast(self.w, x.dtype) * x) - y)


def networks(prior_dtype, layer_dtype):
    encoder = keras.Sequential(
        [
            keras.layers.Dense(4, dtype=layer_dtype),
            tfp.layers.DistributionLambda(
                lambda t: tfd.MultivariateNormalDiag(t[..., :2], tf.nn.softplus(t[..., 2:]))
            ),
        ]
    )
    decoder = keras.Sequential(
        [
            keras.layers.Dense(3, dtype=layer_dtype),
            tfp.layers.DistributionLambda(lambda t: tfd.MultivariateNormalDiag(t, tf.ones_like(t))),
        ]
    )
    return dpvi.DPVAE(
        encoder,
        decoder,
        tfd.MultivariateNormalDiag(tf.zeros(2, prior_dtype), tf.ones(2, prior_dtype)),
    )


def refused(make, dtype, *data):
    model = make()

    def compile_and_fit():
        model.compile(dpvi.optimizers.DPKerasSGDOptimizer(l2_norm_clip=1.0, noise_multiplier=1.0))
        model.fit(*data, batch_size=5, verbose=0)

    with pytest.raises(ValueError, match=rf"{dtype}.*float32 (and|or) float64") as caught:
        compile_and_fit()
    assert model.privacy_ledger.num_releases == 0
    assert str(caught.value).count("\n") < 2


@pytest.mark.parametrize("dtype", HALF)
def test_priors_of_low_precision_are_refused(dtype):
    zero, one = tf.constant(0.0, dtype), tf.constant(1.0, dtype)
    prior = tfd.Sample(tfd.Normal(zero, one), 3)
    with pytest.raises(ValueError, match=rf"prior has parts of dtype {dtype}.*float32 or float64"):
        dpvi.DPVI(prior, lambda w, x: tfd.Normal(tf.linalg.matvec(x, w), one), clipping="flat")
    with pytest.raises(ValueError, match=rf"prior has parts of dtype {dtype}.*float32 or float64"):
        networks(dtype, dtype)


@pytest.mark.parametrize("dtype", HALF)
def test_models_and_variables_of_low_precision_are_refused(dtype):
    refused(lambda: Regression(dtype), dtype, X, Y)
    refused(lambda: Regression(dtype, late=True), dtype, X, Y)
    refused(lambda: Variable(dtype), dtype, X, Y)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_mixed_precision_is_refused_with_a_sentence(policy):
    """Where a model, a layer, a layer made in the first call, or everything has such a policy."""
    refused(lambda: Regression(policy), policy, X, Y)
    refused(lambda: Regression(policy, late=True), policy, X, Y)
    refused(lambda: networks("float32", policy), policy, X)
    before = keras.mixed_precision.global_policy()
    keras.mixed_precision.set_global_policy(policy)
    try:
        refused(Regression, policy, X, Y)
        refused(lambda: networks("float32", None), policy, X)
    finally:
        keras.mixed_precision.set_global_policy(before)


@pytest.mark.parametrize("dtype", HALF)
def test_no_engine_can_state_a_sensitivity_of_such_a_sum(dtype):
    """Whatever adds up: the value that carries a clipped sum refuses. In float16 the sum of 3,000 records moved by 24 clips."""
    with pytest.raises(ValueError, match=rf"{dtype}.*float32 or float64"):
        clipped_sum(
            lambda record, keep: (tf.reduce_sum(record), [record]),
            tf.ones([4, 2], dtype),
            tf.ones([4], tf.bool),
            Clip(1.0),
        )
