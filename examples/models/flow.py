"""A flow as surrogate posterior: records inform only a + 0.3 b^2, so the posterior of (a, b) is banana-shaped.

The flow shifts and scales a by small networks of b, whose variables are created before the model.
"""

import numpy as np
import shared
import tensorflow as tf
import tensorflow_probability as tfp

tfd, tfb = tfp.distributions, tfp.bijectors
# The calibrated posterior is made of normals' neighbourhoods; a banana is not one.
CLIPPING = "flat"
CURVE, NOISE, HIDDEN = 0.3, 10.0, 16


def prior():
    return tfd.Sample(tfd.Normal(0.0, 1.0), 2)


def likelihood(params):
    return tfd.Normal(params[..., 0] + CURVE * params[..., 1] ** 2, NOISE)


class Network(tf.Module):
    """Shift and scale of a, given b."""

    def __init__(self):
        super().__init__()
        generator = np.random.default_rng(0)
        self.first = tf.Variable(generator.normal(size=(2, HIDDEN)).astype("float32"))
        self.second = tf.Variable(tf.zeros([HIDDEN + 1, 2]))

    def __call__(self, b, _, **kwargs):
        hidden = tf.tanh(b * self.first[0] + self.first[1])
        both = tf.tensordot(hidden, self.second[:-1], 1) + self.second[-1]
        return tfb.Chain([tfb.Shift(both[..., :1]), tfb.Scale(log_scale=both[..., 1:])])


def surrogate(_):
    base = tfd.MultivariateNormalDiag(tf.Variable(tf.zeros(2)), tf.Variable(0.5 * tf.ones(2)))
    coupling = tfb.RealNVP(num_masked=1, bijector_fn=Network())
    return tfd.TransformedDistribution(base, tfb.Chain([tfb.Permute([1, 0]), coupling]))


def inputs(num, generator):
    """Returns None: the likelihood generates whole records."""


def closed_form(x, _):
    """Returns draws from the exact posterior, on a grid."""
    a, b = (axis.ravel() for axis in np.meshgrid(np.linspace(-6, 4, 2001), np.linspace(-4, 4, 401)))
    log_density = -(a**2 + b**2) / 2 - len(x) * (a + CURVE * b**2 - x.mean()) ** 2 / (2 * NOISE**2)
    density = np.exp(log_density - log_density.max())
    chosen = np.random.default_rng(0).choice(len(a), size=4000, p=density / density.sum())
    return np.stack([a[chosen], b[chosen]], axis=1)


if __name__ == "__main__":
    shared.main()
