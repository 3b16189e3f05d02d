"""Small autoencoders of six uniform numbers, and what tests do with them before they look."""

from __future__ import annotations

import numpy as np

import tfp_dpvi as dpvi
from support import internals
from tfp_dpvi._tf import keras, tf, tfp

tfd, tfpl, layers = tfp.distributions, tfp.layers, keras.layers
D = 2
X = np.random.default_rng(0).uniform(size=[60, 6]).astype("float32")


def diagonal(t):
    """Independent normals: with `MultivariateNormalDiag`, the same, a fit takes half as long again to trace."""
    return tfd.Independent(tfd.Normal(t[..., :D], 0.1 + tf.nn.softplus(t[..., D:])), 1)


def standard(dtype="float32"):
    return tfd.Independent(tfd.Normal(tf.zeros(D, dtype), tf.ones(D, dtype)), 1)


def hidden(width, dtype):
    return [layers.Dense(width, "tanh", dtype=dtype)] if width else []


def dense_encoder(dtype=None, width=5, features=6):
    return keras.Sequential(
        [layers.Input([features]), *hidden(width, dtype), layers.Dense(2 * D, dtype=dtype),
         tfpl.DistributionLambda(diagonal, dtype=dtype)]
    )  # fmt: skip


def dense_decoder(dtype=None, width=5, features=6):
    return keras.Sequential(
        [layers.Input([D]), *hidden(width, dtype), layers.Dense(features, dtype=dtype),
         tfpl.DistributionLambda(lambda t: tfd.Independent(tfd.Bernoulli(logits=t, dtype=t.dtype), 1), dtype=dtype)]
    )  # fmt: skip


def linear(**kwargs):
    """Without hidden layers, for tests of what is not the networks'."""
    return make(dense_encoder(width=0), dense_decoder(width=0), **kwargs)


def make(encoder=None, decoder=None, prior=None, **kwargs):
    return dpvi.DPVAE(encoder or dense_encoder(), decoder or dense_decoder(), prior or standard(), **kwargs)


def optimizer(noise=1.0, clip=0.5, rate=0.01, **kwargs):
    return dpvi.optimizers.DPKerasAdamOptimizer(l2_norm_clip=clip, noise_multiplier=noise, learning_rate=rate, **kwargs)


def compiled(model=None, how=None, **kwargs):
    model = make() if model is None else model
    model.compile(optimizer() if how is None else how, delta=1e-5, **kwargs)
    return model


def fitted(model=None, x=X, how=None, **kwargs):
    compile_with = {
        key: kwargs.pop(key) for key in ("jit_compile", "physical_batch_size", "run_eagerly") if key in kwargs
    }
    model = compiled(model, how, **compile_with)
    model.fit(x, **{"batch_size": 20, "epochs": 2, "verbose": 0, **kwargs})
    return model


def ready(model=None, x=X, how=None, **kwargs):
    """Checked and priced as in `fit`, without a step."""
    model = compiled(model, how, **kwargs)
    internals.check_and_price(model, x, dpvi.privacy.PoissonSampling(0.3), 20.0)
    return model
