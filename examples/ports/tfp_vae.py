"""TensorFlow Probability, "Probabilistic layers: variational autoencoder", a quarter as wide."""

import numpy as np
import tensorflow as tf
import tensorflow_probability as tfp
import tf_keras as keras
from records import mnist

tfd, tfpl, layers = tfp.distributions, tfp.layers, keras.layers
x_train, x_test = ((x > np.random.default_rng(0).uniform(size=x.shape)) for x, _ in mnist())
x_train, x_test = x_train.astype("float32"), x_test.astype("float32")
train, test = (x_train, x_train), (x_test, x_test)

prior = tfd.Independent(tfd.Normal(tf.zeros(16), 1.0), 1)
encoder = keras.Sequential(
    [
        layers.Input([28, 28, 1]),
        layers.Conv2D(8, 3, strides=2, padding="same", activation="leaky_relu"),
        layers.Conv2D(16, 3, strides=2, padding="same", activation="leaky_relu"),
        layers.Flatten(),
        layers.Dense(tfpl.MultivariateNormalTriL.params_size(16)),
        tfpl.MultivariateNormalTriL(16, activity_regularizer=tfpl.KLDivergenceRegularizer(prior)),
    ]
)
decoder = keras.Sequential(
    [
        layers.Input([16]),
        layers.Dense(7 * 7 * 16, activation="leaky_relu"),
        layers.Reshape([7, 7, 16]),
        layers.Conv2DTranspose(16, 3, strides=2, padding="same", activation="leaky_relu"),
        layers.Conv2DTranspose(8, 3, strides=2, padding="same", activation="leaky_relu"),
        layers.Conv2D(1, 3, padding="same"),
        layers.Flatten(),
        tfpl.IndependentBernoulli([28, 28, 1]),
    ]
)
model = keras.Model(encoder.inputs, decoder(encoder.outputs[0]))
adam = keras.optimizers.Adam(1e-3)
model.compile(adam, lambda x, p: -p.log_prob(x))
model.fit(*train, batch_size=256, epochs=3, verbose=2)
score = model.evaluate(*test, verbose=0)
print(f"negative evidence lower bound {score:.1f}")
