"""The weight of the KL term changes while a fit runs: by assignment, by a variable, or by a schedule."""

from __future__ import annotations

import numpy as np
import pytest
from support.vaes import X, compiled, linear, optimizer

import tfp_dpvi as dpvi
from tfp_dpvi._tf import keras, tf

schedules = keras.optimizers.schedules
QUIET = {"batch_size": 20, "verbose": 0}


def ends(beta, change=None, epochs=2):
    """The weights after some epochs without noise, from the same start."""
    keras.utils.set_random_seed(0)
    model = linear(beta=beta, seed=1)
    model.compile(optimizer(0.0, clip=1e3), delta=1e-5, jit_compile=False)
    calls = [
        keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: change(model, epoch))
    ]
    model.fit(X, epochs=epochs, callbacks=calls if change else None, **QUIET)
    return model, np.concatenate([v.numpy().ravel() for v in model.trainable_variables])


def test_beta_assigned_by_a_callback_is_used():
    """The program of keras issue 13826: silently ignored once."""
    annealed, weights = ends(0.0, lambda model, epoch: setattr(model, "beta", 5.0 * epoch))
    _, constant = ends(0.0)
    assert np.abs(weights - constant).max() > 1e-3
    assert annealed.beta == 5.0


@pytest.mark.slow
def test_a_callback_a_variable_and_a_schedule_train_alike():
    """What is shown and saved is what was used."""
    variable = tf.Variable(0.0)
    assigned, by_callback = ends(0.0, lambda model, epoch: setattr(model, "beta", 5.0 * epoch))
    varied, by_variable = ends(variable, lambda model, epoch: variable.assign(5.0 * epoch))
    steps = schedules.PiecewiseConstantDecay([2], [0.0, 5.0])  # An epoch has steps 0, 1 and 2.
    scheduled, by_schedule = ends(steps)
    np.testing.assert_allclose(by_variable, by_callback, rtol=1e-5)
    np.testing.assert_allclose(by_schedule, by_callback, rtol=1e-5)
    assert assigned.beta == varied.beta == scheduled.beta == 5.0
    assert variable.ref() not in {v.ref() for v in varied.variables}


def test_a_schedule_is_saved_with_the_model():
    warmup = schedules.PolynomialDecay(0.0, 10, end_learning_rate=1.0)
    config = linear(beta=warmup)._parts.weight.config()
    again = linear(beta=config)
    assert again.beta == 0.0
    again.compile(optimizer(), delta=1e-5)
    again.optimizer.build(again.trainable_variables)
    again.optimizer.iterations.assign(5)
    assert again.beta == 0.5


@pytest.mark.parametrize("beta", [-1.0, "warm", [1.0], np.nan])
def test_a_wrong_beta_is_refused(beta):
    with pytest.raises((TypeError, ValueError), match="beta"):
        linear(beta=beta)
    model = linear()
    with pytest.raises((TypeError, ValueError), match="beta"):
        model.beta = beta
    assert model.beta == 1.0


def test_another_kind_of_weight_waits_for_the_next_fit():
    model = compiled(linear(beta=schedules.PolynomialDecay(0.0, 10, end_learning_rate=1.0)))

    def change(epoch, logs):
        model.beta = 1.0

    with pytest.raises(RuntimeError, match=r"DPVAE\.beta was assigned while fit runs"):
        model.fit(X, callbacks=[keras.callbacks.LambdaCallback(on_epoch_begin=change)], **QUIET)
    assert model.num_releases == 0
    model.beta = 0.25
    assert model.beta == 0.25


def test_layers_that_mix_records_in_the_kl_term_alone_are_seen_at_beta_zero():
    mixing = keras.layers.Dense(2)

    def encoder(x):
        loc = mixing(x)
        scale = 1.0 + tf.reduce_mean(tf.square(loc), axis=0, keepdims=True) + 0.0 * loc
        return dpvi._tf.tfd.Independent(dpvi._tf.tfd.Normal(loc, tf.stop_gradient(scale)), 1)

    model = dpvi.DPVAE(encoder, linear().decoder, linear().prior, beta=0.0)
    model.compile(optimizer(), delta=1e-5)
    with pytest.raises(ValueError, match="cannot be made private"):
        model.fit(X, **QUIET)
    assert model.num_releases == 0
