"""Autoencoders of layers beside the dense ones: recurrent, frozen (contracts C3, C8)."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow_probability as tfp
from support import internals
from support.logs import no_fallback
from support.vaes import (
    D,
    X,
    check_against_single_records,
    diagonal,
    fitted,
    make,
    optimizer,
    ready,
)

import tfp_dpvi as dpvi
from tfp_dpvi._tf import keras, tf

tfd, tfpl, layers = tfp.distributions, tfp.layers, keras.layers


@pytest.mark.slow
@pytest.mark.parametrize("gradients", ["ghost", "vectorized"])
def test_a_sequence_model_trains(gradients):
    ids = np.random.default_rng(0).integers(0, 5, [40, 3]).astype("int32")
    encoder = keras.Sequential(
        [layers.Input([3], dtype="int32"), layers.Embedding(5, 2), layers.LSTM(2), layers.Dense(2 * D), tfpl.DistributionLambda(diagonal)]
    )  # fmt: skip
    decoder = keras.Sequential(
        [layers.Input([D]), layers.RepeatVector(3), layers.GRU(2, return_sequences=True), layers.Dense(5),
         tfpl.DistributionLambda(lambda t: tfd.Independent(tfd.Categorical(logits=t), 1))]
    )  # fmt: skip
    with no_fallback():
        model = fitted(make(encoder, decoder, gradients=gradients), ids, batch_size=10, epochs=1)
    assert all(np.isfinite(weight).all() for weight in model.get_weights())
    assert model.sample_predictive(6).shape == (6, 3)


class Attending(keras.Model):
    """Subclassed: attention makes its layers when it is called first."""

    def __init__(self):
        super().__init__()
        self.attention, self.dense = (
            layers.MultiHeadAttention(1, 2, kernel_regularizer="l2"),
            layers.Dense(2 * D),
        )

    def call(self, x, training=None):
        x = tf.reshape(x, [-1, 3, 2])
        return diagonal(
            self.dense(tf.reshape(x + self.attention(x, x, training=training), [-1, 6]))
        )


def test_layers_that_are_made_in_a_call_are_watched():
    model = ready(make(Attending()), how=optimizer(clip=0.01))
    check_against_single_records(model, {"x": X[:5]}, clip=0.01)
    assert len(internals.layers_of_vae(model)) > 10


@pytest.mark.slow
def test_a_frozen_network_of_keras_applications_is_an_encoder():
    """Its batch normalisation uses its saved moments, and mixes no records."""
    body = keras.applications.MobileNetV2(
        [32, 32, 3], alpha=0.35, include_top=False, weights=None, pooling="avg"
    )
    body.trainable = False
    before = [weight.copy() for weight in body.get_weights()]
    encoder = keras.Sequential(
        [layers.Input([32, 32, 3]), body, layers.Dense(2 * D), tfpl.DistributionLambda(diagonal)]
    )
    decoder = keras.Sequential(
        [layers.Input([D]), layers.Dense(3072), tfpl.IndependentBernoulli([32, 32, 3])]
    )
    images = np.random.default_rng(0).uniform(size=[12, 32, 32, 3]).astype("float32")
    model = fitted(make(encoder, decoder), images, batch_size=4, epochs=1)
    assert len(model.trainable_variables) == 4
    for one, value in zip(body.get_weights(), before, strict=True):
        np.testing.assert_array_equal(one, value)


class Recurrent(dpvi.DPModel):
    """Predicts each record's sum from its steps."""

    def __init__(self):
        super().__init__()
        self.lstm, self.out = layers.LSTM(2), layers.Dense(1)

    def build(self, shape=None):
        self.out(self.lstm(tf.zeros([1, 4, 2])))
        self.built = True

    def record_loss(self, x):
        return tf.reduce_sum((self.out(self.lstm(x[None])) - tf.reduce_sum(x)) ** 2)


@pytest.mark.slow
def test_a_recurrent_layer_in_a_model_of_record_losses(caplog):
    model = Recurrent()
    model.build()
    model.compile(optimizer(), delta=1e-5)
    x = np.random.default_rng(0).normal(size=[40, 4, 2]).astype("float32")
    with no_fallback():
        model.fit(x, batch_size=10, epochs=1, verbose=0)
    assert len(caplog.records) < 3
    assert model.privacy_ledger.num_releases == 4
    assert len(model.trainable_variables) == 5
