"""Encoders and decoders that are subclasses of Keras models, with weights of their own (contracts C3, C5)."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from support.vaes import (
    D,
    X,
    check_against_single_records,
    compiled,
    fitted,
    layers,
    make,
    optimizer,
    ready,
    tfd,
    tfpl,
)

from tfp_dpvi import keras


class Encoder(keras.Model):
    """Draws at a scale that all records share: one row for all."""

    def __init__(self, width=2 * D):
        super().__init__()
        self.dense = layers.Dense(width)
        self.scale = self.add_weight(name="scale", shape=[D])
        self.shift = self.add_weight(name="shift", shape=[D], initializer="ones")

    def call(self, x):
        t = self.dense(x)[..., :D] * self.shift
        return tfd.MultivariateNormalDiag(t, 0.1 + tf.nn.softplus(self.scale))


class Decoder(keras.Model):
    """A learned noise, beside a layer."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(6)
        self.noise = self.add_weight(name="noise", shape=[], initializer="zeros")

    def call(self, z, training=None):
        return tfd.Independent(tfd.Normal(self.dense(z), tf.exp(self.noise)), 1)


class Scaled(layers.Layer):
    """A layer that returns tensors."""

    def build(self, shape):
        self.scale = self.add_weight(name="scale", shape=[shape[-1]], initializer="ones")

    def call(self, inputs):
        return inputs * self.scale


class Inner(Decoder):
    """With a TFP layer at its end, which draws to look like a tensor."""

    def __init__(self):
        super().__init__()
        self.end = tfpl.DistributionLambda(lambda t: tfd.Independent(tfd.Normal(t[0], t[1]), 1))

    def call(self, z):
        t = self.dense(z)
        return self.end(tf.stack([t, tf.exp(self.noise) * tf.ones_like(t)]))


def sequence():
    return keras.Sequential([layers.Dense(6), Scaled(), tfpl.IndependentBernoulli([6])])


@pytest.mark.parametrize(
    ("encoder", "decoder", "gradients", "num_draws"),
    [
        (Encoder, Decoder, "ghost", 2),
        pytest.param(Encoder, Inner, "vectorized", 1, marks=pytest.mark.slow),
        pytest.param(Encoder, sequence, "ghost", 1, marks=pytest.mark.slow),
        pytest.param(Encoder, Decoder, "vectorized", 2, marks=pytest.mark.slow),
    ],
)
def test_clipped_sums_are_those_of_single_records(encoder, decoder, gradients, num_draws):
    model = make(encoder(), decoder(), gradients=gradients, num_draws=num_draws)
    ready(model, how=optimizer(clip=0.3))
    names = {variable.name.split("/")[-1] for variable in model.trainable_variables}
    assert {"scale:0", "shift:0"} <= names
    check_against_single_records(model, {"x": X[:5]}, clip=0.3)


@pytest.mark.slow  # Its gradient is one of the sums above.
def test_a_learned_noise_is_learned():
    x = np.float32(0.01) * X
    model = make(decoder=Decoder(), seed=4)
    model = fitted(model, x, optimizer(noise=0.5, clip=10.0, rate=0.05), epochs=15, batch_size=30)
    assert model.decoder.noise.numpy() < -0.5  # Of records with next to no spread.


class Odd(tfd.Distribution):
    """A distribution of one's own, which does not say what its parameters are."""

    def __init__(self, loc):
        self._inner = tfd.Independent(tfd.Normal(loc, 1.0), 1)
        super().__init__(loc.dtype, tfd.FULLY_REPARAMETERIZED, False, True)

    def _batch_shape(self):
        return self._inner.batch_shape

    def _event_shape(self):
        return self._inner.event_shape

    def _sample_n(self, n, seed=None):
        return self._inner.sample(n, seed=seed)

    def _log_prob(self, value):
        return self._inner.log_prob(value)


class OddDecoder(Decoder):
    def call(self, z):
        return Odd(self.dense(z) * tf.exp(self.noise))


def test_a_distribution_that_hides_its_parameters_is_refused_in_a_sentence():
    model = compiled(make(decoder=OddDecoder()))
    with pytest.raises(
        ValueError, match=r"odd_decoder has weights of its own.*layer that returns tensors"
    ) as caught:
        model.fit(X, batch_size=20, verbose=0)
    assert str(caught.value).count("\n") < 2
    assert model.num_releases == 0
