"""Layers are in training mode inside `fit` and in inference mode outside (C1, C3, C5)."""

import numpy as np
import pytest
from support import internals, replay, toy
from support.siblings import slow

import tfp_dpvi as dpvi
from tfp_dpvi import keras
from tfp_dpvi._tf import tf, tfp
from tfp_dpvi.gradients import Clip

tfd = tfp.distributions
ALL = 1.0 - 1e-6  # Drops everything; Keras passes everything at 1.


class Dropped(dpvi.DPModel):
    """A linear loss: a record's gradient is what Dropout leaves of it."""

    def __init__(self, width=20, rate=0.5, seed=None):
        super().__init__()
        self.drop = keras.layers.Dropout(rate, seed=seed)
        self.w = self.add_weight("w", [width], initializer="ones")
        self.built = True

    def call(self, x):
        return self.drop(x) * self.w

    def record_loss(self, x, y=None):
        return tf.reduce_sum(self(x[None]))


def clipped_sums(model, clip, *, jit_compile=False):
    """Compiled: x, mask -> the clipped sum, and the clipped gradients of single records."""
    step = internals.step_gradients(model, tf.constant([1, 2], tf.int64), 100)

    def compute(x, mask):
        found, each = internals.step_lib.clipped_sum(
            step.record_gradient, {"x": x}, mask, Clip(clip)
        )
        return found.tensors[0], each.gradients[0]

    return tf.function(compute, jit_compile=jit_compile, autograph=False)


@pytest.mark.parametrize("jit_compile", [False, True])
def test_each_record_and_step_has_its_own_mask(jit_compile):
    """False alarms: below 1e-9 for masks that are equal (400 coins), and for the rate (z of 6)."""
    sums = clipped_sums(Dropped(400), 1e9, jit_compile=jit_compile)
    x, mask = tf.ones([4, 400]), tf.ones([4], tf.bool)
    masks = np.concatenate([sums(x, mask)[1].numpy() for _ in range(2)])
    assert set(np.unique(masks)) == {0.0, 2.0}
    assert len(np.unique(masks, axis=0)) == 8
    assert abs(masks.mean() - 1.0) < 6.0 / np.sqrt(masks.size)


def test_norms_are_of_the_masks_that_gradients_have():
    """C5: every record is longer than the clip whatever is dropped, so that each comes out as long as it."""
    x = np.random.default_rng(0).normal(size=[30, 20]).astype("float32") * 1e3
    _, each = clipped_sums(Dropped(), 0.5)(x, np.ones(30, bool))
    np.testing.assert_allclose(np.linalg.norm(each, axis=1), 0.5, rtol=1e-4)


def test_neighbours_keep_their_masks():
    """C3: with the same draws one record removed or replaced moves the sum by its own clipped gradient alone."""
    rng = np.random.default_rng(1)
    x, other = rng.normal(size=[2, 6, 20]).astype("float32")

    def sums(records, mask, clip):
        tf.random.set_seed(3)  # Of a function traced anew: the same draws each time.
        return [clipped_sums(Dropped(seed=4), clip)(records["x"], mask)[0].numpy()]

    full, removed = replay.check_neighbours(sums, {"x": x}, {"x": other}, 2, 0.7)
    np.testing.assert_allclose(np.linalg.norm(full[0] - removed[0]), 0.7, rtol=1e-4)


def test_dropout_drops_in_fit_alone():
    x = np.ones([10, 20], "float32")
    model = Dropped(rate=ALL)
    model.compile(toy.sgd(0.0, clip=np.inf))
    model.fit(x, batch_size=10, epochs=3, verbose=0)
    np.testing.assert_array_equal(model.w, np.ones(20))
    assert model.evaluate(x, verbose=0) == pytest.approx(20.0)
    np.testing.assert_array_equal(model.predict(x, verbose=0), x)


def test_a_call_that_trains_by_default_does_not_in_evaluate():
    """As in Keras, whose `evaluate` says training=False."""

    class Eager(Dropped):
        def call(self, x, training=True):
            return self.drop(x, training=training) * self.w

    model = Eager(rate=ALL)
    model.compile(toy.sgd(0.0, clip=np.inf))
    assert model.evaluate(np.ones([10, 20], "float32"), verbose=0) == pytest.approx(20.0)


class Normalised(dpvi.DPModel):
    def __init__(self):
        super().__init__()
        self.normalise, self.dense = keras.layers.BatchNormalization(), keras.layers.Dense(1)

    def call(self, x):
        return self.dense(self.normalise(x))

    def record_loss(self, x, y):
        return tf.square(self(x[None])[0, 0] - y)


def test_batch_normalisation_in_training_mode_is_refused():
    """C1, C7: its averages would hold records; frozen, it is a fixed map."""
    x = np.full([20, 2], 7.0, "float32")
    model = Normalised()
    model.compile(toy.sgd(1.0))
    with pytest.raises(ValueError, match=r"writes to a variable(.|\n)*GroupNormalization"):
        model.fit(x, x[:, 0], batch_size=5, verbose=0)
    assert model.privacy_ledger.num_releases == 0
    np.testing.assert_array_equal(model.normalise.moving_mean, [0.0, 0.0])
    model.normalise.trainable = False
    model.compile(toy.sgd(1.0))
    model.fit(x, x[:, 0], batch_size=5, verbose=0)
    np.testing.assert_array_equal(model.normalise.moving_mean, [0.0, 0.0])


@pytest.mark.parametrize(
    "wrap", [slow(lambda net: net), lambda net: lambda x: net(x)], ids=["model", "function"]
)
def test_dropout_drops_in_networks_that_are_functions(wrap):
    """A `DPVAE`'s networks: the kernel behind a Dropout of everything has no gradient."""
    net = keras.Sequential(
        [keras.layers.Dropout(ALL), keras.layers.Dense(2), tfp.layers.IndependentNormal(1)]
    )
    decoder = keras.Sequential([keras.layers.Dense(6), tfp.layers.IndependentNormal(3)])
    model = dpvi.DPVAE(wrap(net), decoder, tfd.MultivariateNormalDiag(tf.zeros(1)))
    model.compile(toy.sgd(0.0, clip=0.1))
    x = np.ones([8, 3], "float32")
    net(x)
    before = net.layers[1].kernel.numpy()
    model.fit(x, batch_size=8, epochs=2, verbose=0)
    np.testing.assert_array_equal(net.layers[1].kernel, before)
    assert np.any(net.layers[1].bias != 0)
