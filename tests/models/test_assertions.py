"""Assertions of a model on its records: a record that one would refuse counts for nothing, and ends no fit."""

import numpy as np
import pytest
from support.siblings import slow

import tfp_dpvi as dpvi
from tfp_dpvi._tf import keras, map_apart, tf, tfp, without_assertions

tfd = tfp.distributions
NUM = 20


def fitted(model, x, y, **settings):
    """Fits without XLA, which leaves assertions out."""
    optimizer = dpvi.optimizers.DPKerasSGDOptimizer(0.1, l2_norm_clip=1.0, noise_multiplier=1.0)
    model.compile(optimizer, jit_compile=False, accountant="rdp", delta=1e-5, **settings)
    model.fit(x, y, batch_size=NUM, epochs=2, verbose=0, validate=False)
    assert all(np.isfinite(one).all() for one in model.get_weights())
    return model


def ones(extreme):
    column = np.ones(NUM, "float32")
    column[3] = extreme
    return column


def of_counts(rate, x):
    return tfd.Poisson(tf.exp(rate * x), validate_args=True)


def of_sizes(shape, x):
    return tfd.Gamma(tf.exp(shape) * x, 1.0, validate_args=True)


@pytest.mark.parametrize("clipping", ["paired", "flat"])
@pytest.mark.parametrize(
    ("likelihood", "x", "y"), [(of_counts, 1.0, -1.0), slow(of_sizes, -1.0, 1.0)]
)
def test_a_record_that_a_likelihood_would_refuse_ends_no_fit(likelihood, x, y, clipping):
    model = dpvi.DPVI(tfd.Normal(0.0, 1.0), likelihood, clipping=clipping)
    fitted(model, ones(x), ones(y))
    assert (model.calibration.pairing is not None) == (clipping == "paired")


def checked(x):
    with tf.control_dependencies([tf.debugging.assert_less(x, 2.0)]):
        return tf.identity(x)


class Checking(keras.layers.Layer):
    def call(self, x):
        return checked(x)


class InBranch(keras.layers.Layer):
    def call(self, x):
        return tf.cond(tf.reduce_sum(x) > 0.0, lambda: checked(x), lambda: x)


class Numbers(keras.layers.Layer):
    def call(self, x):
        return tf.debugging.check_numerics(x, "not finite")


def with_layer(layer, gradients):
    return dpvi.DPKerasModel(keras.Sequential([keras.layers.Dense(1), layer]), gradients=gradients)


@pytest.mark.parametrize("gradients", ["auto", slow("vectorized")])
def test_a_record_that_a_layer_would_refuse_ends_no_fit(gradients):
    fitted(with_layer(Checking(), gradients), ones(1e9)[:, None], ones(1.0), loss="mse")


@pytest.mark.parametrize("layer", [InBranch, slow(Numbers)])
@pytest.mark.parametrize("gradients", ["auto", slow("vectorized")])
def test_a_check_that_cannot_be_left_out_is_refused_before_anything_is_spent(layer, gradients):
    model = with_layer(layer(), gradients)
    with pytest.raises(ValueError, match=r"assertion in a tf\.function|side effect"):
        fitted(model, ones(1.0)[:, None], ones(1.0), loss="mse")
    assert model.privacy_ledger.num_releases == 0


def test_what_a_branch_returns_stays_as_it_is():
    """Only an assertion's own branch is changed, also where a function is mapped over records."""

    @tf.function(autograph=False)
    def run(x):
        with without_assertions():
            low = tf.cond(checked(x)[0] > 3.0, lambda: 1.0, lambda: 0.0)
        return low, map_apart(lambda one: checked(one) + 1.0, x)

    low, mapped = run(tf.constant([3.0, -1.0]))
    assert low == 0.0
    np.testing.assert_array_equal(mapped, [4.0, 0.0])
