"""Autoencoders of layers beside the dense ones: recurrent, frozen (contracts C3, C8)."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow_probability as tfp
from support.logs import no_fallback
from support.vaes import D, diagonal, fitted, make

from tfp_dpvi import keras

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


@pytest.mark.slow
def test_a_frozen_network_of_keras_applications_is_an_encoder():
    """Its batch normalisation uses its saved moments, and mixes no records."""
    body = keras.applications.MobileNetV2([32, 32, 3], alpha=0.35, include_top=False, weights=None, pooling="avg")
    body.trainable = False
    before = [weight.copy() for weight in body.get_weights()]
    encoder = keras.Sequential(
        [layers.Input([32, 32, 3]), body, layers.Dense(2 * D), tfpl.DistributionLambda(diagonal)]
    )
    decoder = keras.Sequential([layers.Input([D]), layers.Dense(3072), tfpl.IndependentBernoulli([32, 32, 3])])
    images = np.random.default_rng(0).uniform(size=[12, 32, 32, 3]).astype("float32")
    model = fitted(make(encoder, decoder), images, batch_size=4, epochs=1)
    assert len(model.trainable_variables) == 4
    for one, value in zip(body.get_weights(), before, strict=True):
        np.testing.assert_array_equal(one, value)
