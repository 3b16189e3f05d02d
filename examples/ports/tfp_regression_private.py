"""TensorFlow Probability, "Probabilistic layers: regression", case 4, with 20,000 records of the same law."""

import numpy as np
import tensorflow as tf
import tensorflow_probability as tfp
from tfp_dpvi import DPKerasModel, keras
from records import waves

tfd, tfpl, layers = tfp.distributions, tfp.layers, keras.layers
(x_train, y_train), (x_test, y_test) = waves()


def posterior(kernel_size, bias_size=0, dtype=None):
    """Independent normals, with a spread of about 1e-5 at first."""
    n = kernel_size + bias_size
    small = np.log(np.expm1(1.0)).astype("float32")
    normal = tfpl.DistributionLambda(
        lambda t: tfd.Independent(tfd.Normal(t[:n], 1e-5 + tf.nn.softplus(t[n:] - 5 * small)), 1)
    )
    return keras.Sequential([tfpl.VariableLayer(2 * n, dtype=dtype), normal])


def prior(kernel_size, bias_size=0, dtype=None):
    """Normals around locations that are learned."""
    n = kernel_size + bias_size
    normal = tfpl.DistributionLambda(lambda t: tfd.Independent(tfd.Normal(t, 1.0), 1))
    return keras.Sequential([tfpl.VariableLayer(n, dtype=dtype), normal])


def outcome(t):
    """Returns the outcomes' normal: its location and, in softplus, its spread."""
    return tfd.Normal(t[..., :1], 1e-3 + tf.nn.softplus(0.1 * t[..., 1:]))


model = keras.Sequential(
    [
        layers.Input([1]),
        layers.Rescaling(1 / 20),
        tfpl.DenseVariational(2, posterior, prior, kl_weight=1 / len(x_train)),
        tfpl.DistributionLambda(outcome),
    ]
)
model = DPKerasModel(model)
adam = keras.optimizers.Adam(0.02)
model.compile(adam, lambda y, p: -p.log_prob(y), l2_norm_clip=1.0, epsilon=2.0, delta=1e-5)
model.fit(x_train, y_train, batch_size=250, epochs=30, verbose=2)
score = -np.mean(model(x_test).log_prob(y_test))
print(f"negative log likelihood {score:.3f}")
