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
    return dpvi.DPVAE(
        encoder or dense_encoder(), decoder or dense_decoder(), prior or standard(), **kwargs
    )


def optimizer(noise=1.0, clip=0.5, rate=0.01, **kwargs):
    return dpvi.optimizers.DPKerasAdamOptimizer(
        l2_norm_clip=clip, noise_multiplier=noise, learning_rate=rate, **kwargs
    )


def compiled(model=None, how=None, **kwargs):
    model = make() if model is None else model
    model.compile(optimizer() if how is None else how, delta=1e-5, **kwargs)
    return model


def fitted(model=None, x=X, how=None, y=None, **kwargs):
    compile_with = {
        key: kwargs.pop(key)
        for key in ("jit_compile", "physical_batch_size", "run_eagerly")
        if key in kwargs
    }
    model = compiled(model, how, **compile_with)
    model.fit(x, y, **{"batch_size": 20, "epochs": 2, "verbose": 0, **kwargs})
    return model


def ready(model=None, x=X, how=None, y=None, **kwargs):
    """Checked and priced as in `fit`, without a step."""
    model = compiled(model, how, **kwargs)
    internals.check_and_price(model, x, 20.0, y)
    return model


def check_against_single_records(model, records, clip, key=(3, 4)):
    """C1, C3, C5: the clipped sum is that of TensorFlow's own gradients, one record at a time; replay on neighbours."""
    num, dtype = len(records["x"]), model.dtype
    tensors, key = tf.nest.map_structure(tf.constant, records), tf.constant(key, tf.int64)
    variables, traced = model.trainable_variables, []

    @tf.function(autograph=False)
    def clipped(tensors, mask):
        traced.append(1)
        return internals.clip_batch(model, tensors, mask, key)

    @tf.function(autograph=False)
    def single(tensors):
        with tf.GradientTape(persistent=True) as tape:
            losses = tf.unstack(
                internals.terms_of(
                    model, tensors["x"], key, model.num_draws, y=tensors.get("y")
                ).losses
            )
        return [tape.gradient(loss, variables, unconnected_gradients="zero") for loss in losses]

    def flat(parts):
        return np.concatenate(
            [tf.convert_to_tensor(part).numpy().ravel().astype("float64") for part in parts]
        )

    each = np.stack([flat(parts) for parts in single(tensors)])
    norms = np.linalg.norm(each, axis=1, keepdims=True)
    assert (norms > clip).any(), "the case must clip something"
    wanted = (each * np.minimum(1.0, clip / norms)).sum(0)
    whole = flat(clipped(tensors, tf.ones([num], tf.bool)))
    tolerance = 2e-5 if dtype == "float32" else 1e-9
    np.testing.assert_allclose(whole, wanted, atol=tolerance * clip * num)
    # Every variable gets a gradient.
    sizes = np.cumsum([int(np.prod(variable.shape)) for variable in variables])[:-1]
    assert all(np.abs(part).max() > 0 for part in np.split(whole, sizes))
    # A removed record is masked at its place; a replaced one holds anything.
    for at in range(0, num, 2):
        without = flat(clipped(tensors, tf.range(num) != at))
        moved = np.linalg.norm(whole - without)
        assert moved <= clip * (1 + 1e-4)
        np.testing.assert_allclose(moved, min(clip, norms[at, 0]), rtol=1e-3)
        for value in (np.nan, 1e6, -1e30):
            changed = {name: part.copy() for name, part in records.items()}
            for part in changed.values():
                if part.dtype.kind == "f":
                    part[at] = value
            other = flat(
                clipped(tf.nest.map_structure(tf.constant, changed), tf.ones([num], tf.bool))
            )
            assert np.isfinite(other).all()
            assert np.linalg.norm(other - without) <= clip * (1 + 1e-4)
    assert len(traced) == 1
