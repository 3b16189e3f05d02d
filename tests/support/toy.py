"""The smallest models that `fit` can train, for tests of what surrounds the step: budget, ledger, files, sources."""

from __future__ import annotations

import numpy as np

import tfp_dpvi as dpvi
from tfp_dpvi._tf import keras, tf


@keras.utils.register_keras_serializable("toys", "Toy")
class Toy(dpvi.DPModel):
    """Squared loss of a line through the origin: one variable, so that next to nothing is traced."""

    def __init__(self, width=3, **kwargs):
        super().__init__(**kwargs)
        self.width = width
        self.w = self.add_weight("w", [width], initializer="zeros")
        self.built = True

    def call(self, x):
        return tf.linalg.matvec(x, self.w)

    def record_loss(self, x, y=1.0):
        return 0.5 * tf.square(tf.reduce_sum(self.w * x) - tf.cast(y, self.w.dtype))

    def get_config(self):
        return {**super().get_config(), "width": self.width}


def adam(noise=None, *, clip=1.0, rate=0.05, **kwargs):
    return dpvi.optimizers.DPKerasAdamOptimizer(
        l2_norm_clip=clip, noise_multiplier=noise, learning_rate=rate, **kwargs
    )


def sgd(noise=None, *, clip=1.0, rate=0.05, **kwargs):
    return dpvi.optimizers.DPKerasSGDOptimizer(
        l2_norm_clip=clip, noise_multiplier=noise, learning_rate=rate, **kwargs
    )


def toy(noise=None, *, epsilon=1.0, delta=1e-5, seed=None, optimizer=None, **settings):
    """Compiled without XLA, to a noise multiplier or else to an epsilon."""
    model = Toy(seed=seed)
    target = {} if noise is not None else {"epsilon": epsilon}
    model.compile(
        optimizer or adam(noise), **{"delta": delta, "jit_compile": False, **target, **settings}
    )
    return model


def records(num=200, width=3, seed=0):
    x = np.random.default_rng(seed).normal(size=(num, width)).astype("float32")
    return x, (x[:, 0] > 0).astype("int32")


def weights(model):
    return np.concatenate([v.numpy().ravel() for v in model.trainable_variables])
