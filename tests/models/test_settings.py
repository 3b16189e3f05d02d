"""Settings that a compiled step has read: refused while fit runs, honoured by the next fit."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp
from support import internals
from support.toy import Toy, adam, records, sgd, toy, weights
from support.vaes import linear

import tfp_dpvi as dpvi
from tfp_dpvi import keras

tfd = tfp.distributions
X, Y = records()
QUIET = {"batch_size": 50, "verbose": 0}


class Pulled(Toy):
    """A user's model, whose loss reads an attribute."""

    target = 1.0

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.strength = 0.0

    def record_loss(self, x, y=1.0):
        return super().record_loss(x, y) + self.strength * tf.reduce_sum(self.w)


def pulled(optimizer=None, **settings):
    model = Pulled(seed=1)
    model.compile(optimizer or sgd(1.0), delta=1e-5, jit_compile=False, **settings)
    return model


def at_epoch(number, change):
    """Returns a callback that changes something when an epoch begins."""
    return keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: change() if epoch == number else None
    )


def layered():
    model = dpvi.DPKerasModel(keras.Sequential([keras.layers.Dense(1)]), seed=1)
    model.compile(sgd(1.0), loss="mean_squared_error", delta=1e-5, jit_compile=False)
    return model


def normal_means(**settings):
    prior = tfd.Sample(tfd.Normal(0.0, 1.0), 3)
    model = dpvi.DPVI(
        prior, lambda w, x: tfd.Normal(tf.linalg.matvec(x, w), 1.0), seed=1, **settings
    )
    model.compile(adam(1.0), delta=1e-5, jit_compile=False)
    return model


def termwise_vae():
    model = linear(batch_regularizer=dpvi.divergences.MMD(1.0))
    optimizer = dpvi.optimizers.TermwiseDPKerasAdamOptimizer(
        l2_norm_clip=1.0, batch_l2_norm_clip=1.0, num_partitions=2, noise_multiplier=1.0
    )
    model.compile(optimizer, delta=1e-5)
    return model


@pytest.mark.parametrize("make", [pulled, layered, normal_means, termwise_vae])
def test_every_setting_is_refused_while_a_fit_runs(make):
    """The model's arguments, the optimizer's configuration, and what Keras has besides."""
    model = make()
    optimizer = model.optimizer
    names = [name for name in inspect.signature(type(model)).parameters if name in vars(model)]
    names += {"pulled": ["strength", "target"], "layered": ["network"]}.get(make.__name__, [])
    assert names
    of_optimizer = set(optimizer.get_config()) - {"learning_rate", "is_legacy_optimizer"}
    assert {"l2_norm_clip", "noise_multiplier", "clipping", "clipnorm"} <= of_optimizer
    with internals.as_in_fit(model):
        for owner, name in [
            *((model, name) for name in (*names, "trainable", "optimizer", "record_loss")),
            *((optimizer, name) for name in of_optimizer),
        ]:
            before = getattr(owner, name)
            with pytest.raises(
                RuntimeError, match=rf"{name} was assigned while fit runs"
            ) as caught:
                setattr(owner, name, "another")
            assert str(caught.value).count("\n") == 1
            assert getattr(owner, name) == before
            if isinstance(before, bool | int | float | str):
                setattr(owner, name, before)  # It changes nothing.
    model.strength = optimizer.clipnorm = 0.5


def test_a_refusal_ends_the_fit_and_loses_nothing():
    """The ledger holds the steps that ran, and the same model fits on."""
    ledger = dpvi.PrivacyLedger()
    model = pulled(ledger=ledger, steps_per_execution=2)

    def change():
        model.strength = 1.0

    with pytest.raises(RuntimeError, match=r"Pulled\.strength was assigned while fit runs"):
        model.fit(X, Y, epochs=3, callbacks=[at_epoch(1, change)], **QUIET)
    assert model.strength == 0.0
    assert ledger.num_releases == int(model.optimizer.iterations) == 4
    whole, rest = pulled(steps_per_execution=2), model
    rest.fit(X, Y, epochs=2, **QUIET)
    whole.fit(X, Y, epochs=3, **QUIET)
    np.testing.assert_allclose(weights(rest), weights(whole), rtol=1e-6)


def test_what_may_change_while_a_fit_runs():
    """The learning rate, what Keras assigns, a callback's notes, and what a trace assigns."""

    class Counting(Pulled):
        calls = 0

        def record_loss(self, x, y=1.0):
            self.calls += 1
            return super().record_loss(x, y)

    model = Counting(seed=1)
    model.compile(sgd(1.0), delta=1e-5, jit_compile=False)

    def change():
        model.optimizer.learning_rate = model.optimizer.lr = 0.0
        model.noted = getattr(model, "noted", 0) + 1
        model.noted += 1
        ends.append(weights(model))
        model.evaluate(X, Y, verbose=0)

    ends = []
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate)
    model.fit(X, Y, epochs=3, callbacks=[at_epoch(1, change), schedule], **QUIET)
    assert model.calls >= 1
    assert ends[0].any()
    np.testing.assert_array_equal(weights(model), ends[0])


def test_a_schedule_in_place_of_a_rate_is_refused_while_a_fit_runs():
    model = toy(1.0)
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    with internals.as_in_fit(model):
        for name in ("learning_rate", "lr"):
            with pytest.raises(RuntimeError, match=f"{name} was assigned while fit runs"):
                setattr(model.optimizer, name, schedule)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("activation", keras.activations.tanh),
        ("use_bias", False),
        ("kernel_regularizer", keras.regularizers.L2(0.1)),
    ],
)
def test_a_setting_of_a_layer_assigned_while_a_fit_runs_is_refused_at_the_next_step(name, value):
    """The compiled step has read it, and would ignore the change without a word."""
    model = layered()

    def change():
        setattr(model.network.layers[0], name, value)

    with pytest.raises(RuntimeError, match=rf"\.{name} was assigned while fit runs"):
        model.fit(X, Y.astype("float32"), epochs=2, callbacks=[at_epoch(1, change)], **QUIET)
    assert model.privacy_ledger.num_releases == int(model.optimizer.iterations) == 4


def test_a_layer_frozen_while_a_fit_runs_is_refused_at_the_next_step():
    model = layered()

    def change():
        model.network.layers[0].trainable = False

    with pytest.raises(RuntimeError, match="a layer was frozen or added while fit runs"):
        model.fit(X, Y.astype("float32"), epochs=2, callbacks=[at_epoch(1, change)], **QUIET)
    assert model.privacy_ledger.num_releases == int(model.optimizer.iterations) == 4


@pytest.mark.slow
def test_a_setting_assigned_between_fits_is_used_by_the_next():
    """Of an own model, and of the Keras optimizer: both would be in the step's trace."""
    model = pulled()
    ends = [weights(model)]
    model.fit(X, Y, **QUIET)
    ends.append(weights(model))
    model.strength = 1e6  # Every record then pulls every weight down.
    model.fit(X, Y, **QUIET)
    ends.append(weights(model))
    model.optimizer.clipnorm = 1e-9
    model.fit(X, Y, **QUIET)
    ends.append(weights(model))
    moves = np.diff(ends, axis=0)
    assert moves[0].max() > 0.0
    assert moves[1].max() < -0.05
    assert np.abs(moves[2]).max() < 1e-6


def test_only_a_changed_setting_makes_the_next_fit_trace_its_step_anew():
    """An array that was changed in place is another setting, although it is the same object."""

    class Counting(Pulled):
        calls = 0

        def record_loss(self, x, y=1.0):
            self.calls += 1
            return super().record_loss(x, y) + self.offset[0]

    model = Counting(seed=1)
    model.offset = np.zeros(1, "float32")
    model.compile(sgd(1.0), delta=1e-5, jit_compile=False)

    def traces():
        before = model.calls
        model.fit(X, Y, **QUIET)
        return model.calls > before

    assert traces()
    model.strength = model.strength
    model.target = 1.0  # The class has it.
    assert not traces()
    model.strength = 0.5
    assert traces()
    model.offset += 1.0
    assert traces()
    with internals.as_in_fit(model), pytest.raises(RuntimeError, match="offset was assigned"):
        model.offset += 1.0


def test_a_clipping_assigned_between_fits_is_used_by_the_next():
    model = normal_means()
    data = model.make_data(X, Y.astype("float32"), batch_size=50)
    assert model.mechanism(data).gradient.joint
    model.clipping = "flat"
    assert not model.mechanism(data).gradient.joint


def test_a_noise_multiplier_assigned_after_compile_is_refused():
    """`compile` has read it; the plan and the noise would be those of the old one."""
    model = toy(1.0)
    model.optimizer.noise_multiplier = 2.0
    with pytest.raises(ValueError, match=r"noise_multiplier=2.0 was assigned after compile"):
        model.fit(X, Y, **QUIET)
    assert model.privacy_ledger.num_releases == 0
    model.compile(model.optimizer, delta=1e-5, jit_compile=False)
    data = model.make_data(X, Y, batch_size=50)
    assert model.mechanism(data).noise_multiplier == 2.0
