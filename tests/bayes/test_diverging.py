"""A fit whose released variables have run away stops with a sentence; surrogates start where they stay."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp
from support import references
from support.siblings import slow
from support.toy import adam, records, toy

import tfp_dpvi as dpvi

tfd = tfp.distributions
X, Y = records(num=100)
PRIOR = tfd.Sample(tfd.Normal(0.0, 1.0), 3)


def fitted(surrogate, steps, caplog, prior=PRIOR):
    model = dpvi.DPVI(
        prior, lambda w, x: tfd.Bernoulli(logits=tf.linalg.matvec(x, w)), surrogate, clipping="flat"
    )
    model.compile(adam(2.0, rate=0.01), delta=1e-5, jit_compile=False, steps_per_execution=50)
    with caplog.at_level(logging.WARNING, logger="tfp_dpvi"):
        model.fit(X, Y, batch_size=100, epochs=steps, verbose=0)
    return model, [line for line in caplog.messages if "Training stops" in line]


def test_a_variable_that_is_not_finite_stops_the_fit(caplog):
    model = toy(1.0, steps_per_execution=1)
    model.w.assign([np.inf, 0.0, 0.0])
    with caplog.at_level(logging.WARNING, logger="tfp_dpvi"):
        model.fit(X, Y, batch_size=50, epochs=50, verbose=0)
    assert model.num_releases == 1
    assert any("a variable is not finite" in line for line in caplog.messages)


@pytest.mark.slow
def test_a_surrogate_much_wider_than_its_prior_stops_the_fit(caplog):
    wide = dpvi.surrogates.mean_field(PRIOR, initial_scale=300.0)
    model, stopped = fitted(wide, 400, caplog)
    assert model.num_releases <= 200
    assert "times as wide as the prior" in stopped[0]


@pytest.mark.slow  # Every other fit of a posterior goes on too.
@pytest.mark.parametrize("surrogate", ["mean_field", slow("full_rank")])
def test_a_fit_that_holds_goes_on(surrogate, caplog):
    model, stopped = fitted(surrogate, 250, caplog)
    assert model.num_releases == 250
    assert not stopped


@pytest.mark.parametrize(
    ("builder", "holds"), [(dpvi.surrogates.full_rank, True), (references.full_rank, False)]
)
@pytest.mark.slow
def test_noise_does_not_widen_a_full_rank_surrogate(builder, holds):
    """Of 40 coordinates that records say nothing of, after 300 steps of Adam at 0.02 on pure noise. TFP's builder, whose entries are
    learned one by one, is the mutation."""
    num = 40
    surrogate = builder(tfd.Sample(tfd.Normal(np.float64(0.0), 1.0), num))
    variables, rng = surrogate.trainable_variables, np.random.default_rng(0)
    optimizer = dpvi.keras.optimizers.Adam(0.02)

    def deviations():
        return surrogate.sample(500, seed=(1, 2)).numpy().std(axis=0)

    before = deviations()
    for _ in range(300):
        with tf.GradientTape() as tape:
            draw = surrogate.sample(seed=rng.integers(0, 2**31, 2))
        noise = tf.constant(rng.normal(size=num))
        optimizer.apply_gradients(
            zip(tape.gradient(draw, variables, output_gradients=noise), variables, strict=True)
        )
    assert (np.max(deviations() / before) < 5.0) == holds
