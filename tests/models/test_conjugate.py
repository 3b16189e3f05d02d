"""Posteriors against closed forms with noise and clip off, and how noise falls as epsilon grows (C1, C2)."""

import math

import numpy as np
import pytest
import scipy.optimize
import scipy.special
from support.cases import normal
from support.siblings import slow

import tfp_dpvi as dpvi
from tfp_dpvi._tf import keras, tf, tfp
from tfp_dpvi.optimizers import DPKerasAdamOptimizer

tfd, tfb = tfp.distributions, tfp.bijectors


def _fit(model, x, *, steps=1200, batch_size=None, rate=0.05):
    """Seeded, so that these tests give no alarm by chance; the rate falls to zero, so that Monte Carlo noise does."""
    schedule = keras.optimizers.schedules.PolynomialDecay(
        rate, steps, end_learning_rate=0.0, power=1.5
    )
    model.compile(
        DPKerasAdamOptimizer(l2_norm_clip=math.inf, noise_multiplier=0.0, learning_rate=schedule),
        jit_compile=False,
    )
    model.fit(x, batch_size=batch_size or len(x), epochs=1, steps_per_epoch=steps, verbose=0)


@pytest.mark.parametrize(("engine", "batch_size"), [slow("aligned", None), ("vectorized", 10)])
def test_normal_normal(engine, batch_size):
    """C1, C2: mean and standard deviation of a normal mean's posterior, on full and on Poisson batches.

    Tolerances: 0.1 (Poisson batches 0.25) posterior standard deviations in location, 5 % (10 %) in scale. A KL term
    N / (N - 1) times too large would pass; one counted per batch, or a mean for a sum, moves the scale by a factor.
    """
    prior_scale, scale, num = 2.0, 1.5, 40
    prior = tfd.JointDistributionNamed({"m": normal(3, prior_scale, np.float32)})
    x = np.random.default_rng(1).normal([1.0, -2.0, 5.0], scale, size=(num, 3)).astype("float32")
    model = dpvi.DPVI(
        prior,
        lambda params: tfd.Independent(tfd.Normal(params["m"], scale), 1),
        gradients=engine,
        num_draws=8,
        seed=1,
        clipping="flat",
    )
    _fit(model, x, batch_size=batch_size)
    precision = 1 / prior_scale**2 + num / scale**2
    mean = x.sum(0) / scale**2 / precision
    draws = model.posterior_sample(20_000, seed=1)["m"].numpy()
    tolerance = 0.1 if batch_size is None else 0.25
    np.testing.assert_allclose(draws.mean(0), mean, atol=tolerance / math.sqrt(precision))
    np.testing.assert_allclose(
        draws.std(0), np.full(3, precision**-0.5), rtol=0.05 if batch_size is None else 0.1
    )


ONES, NUM, PRIOR = 9, 30, (2.0, 3.0)
BITS = (np.arange(NUM) < ONES).astype("float32")


def _bits_model(surrogate):
    return dpvi.DPVI(
        tfd.Beta(*PRIOR),
        lambda p: tfd.Bernoulli(probs=p, dtype=tf.float32),
        surrogate,
        num_draws=4,
        seed=1,
        clipping="flat",
    )


@pytest.mark.slow
def test_beta_bernoulli_in_its_own_family():
    """C2: a trainable Beta surrogate finds the exact Beta posterior, to 10 % in both concentrations.

    (They move together, along the total count, where the objective is flat.) The mean is found to 0.1 of its standard
    deviation.
    """
    positive = tfb.Softplus()
    surrogate = tfd.Beta(
        tfp.util.TransformedVariable(5.0, positive, name="a"),
        tfp.util.TransformedVariable(5.0, positive, name="b"),
    )
    _fit(_bits_model(surrogate), BITS, steps=1500, rate=1.0)
    a, b = PRIOR[0] + ONES, PRIOR[1] + NUM - ONES
    np.testing.assert_allclose(
        [
            c.numpy()
            for c in map(tf.convert_to_tensor, (surrogate.concentration1, surrogate.concentration0))
        ],
        [a, b],
        rtol=0.1,
    )
    exact = tfd.Beta(a, b)
    np.testing.assert_allclose(surrogate.mean(), exact.mean(), atol=0.1 * float(exact.stddev()))


@pytest.mark.slow
def test_beta_bernoulli_within_mean_field():
    """C2: the logit-normal that mean-field means here is the deterministic optimum of the same objective.

    By quadrature; within 0.05 of its standard deviation in location and 5 % in scale.
    """
    a, b = PRIOR[0] + ONES, PRIOR[1] + NUM - ONES
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)

    def divergence(parameters):
        loc, scale = parameters[0], np.exp(parameters[1])
        z = loc + scale * nodes
        # Of p = sigmoid(z): the density of Beta(a, b) by z is p^a (1 - p)^b.
        log_target = -a * np.logaddexp(0, -z) - b * np.logaddexp(0, z)
        return -np.log(scale) - weights @ log_target / weights.sum()

    loc, log_scale = scipy.optimize.minimize(divergence, [0.0, 0.0], tol=1e-10).x
    model = _bits_model("mean_field")
    _fit(
        model, BITS, steps=5000
    )  # Over seeds, 1,200 steps leave 0.03 standard deviations of Monte Carlo error.
    z = scipy.special.logit(model.posterior_sample(20_000, seed=1).numpy().astype(float))
    np.testing.assert_allclose(z.mean(), loc, atol=0.05 * np.exp(log_scale))
    np.testing.assert_allclose(z.std(), np.exp(log_scale), rtol=0.05)
    np.testing.assert_allclose(
        scipy.special.expit(z).mean(), a / (a + b), atol=0.1 * float(tfd.Beta(a, b).stddev())
    )


@pytest.mark.slow
def test_the_error_shrinks_as_epsilon_grows():
    """C1: mean squared distance to the noise-free posterior mean falls with each larger epsilon. False alarms: 1e-7.

    96 coordinates: a mean square is off its expectation by a factor 2.2 with a probability below 1e-8 (chi-square), and
    expectations at successive epsilons differ by more than a factor 10.
    """
    width, num = 96, 50
    prior = normal(width, 1.0, np.float32)
    x = np.random.default_rng(2).normal(0.3, 1.0, size=(num, width)).astype("float32")
    errors = []
    for epsilon in (0.3, 3.0, 30.0, None):
        model = dpvi.DPVI(
            prior, lambda m: tfd.Independent(tfd.Normal(m, 1.0), 1), num_draws=4, clipping="flat"
        )
        noise = {"noise_multiplier": 0.0} if epsilon is None else {}
        target = {} if epsilon is None else {"epsilon": epsilon, "delta": 1e-5, "accountant": "rdp"}
        # No record is as long as the clip, so that noise alone separates the fits.
        optimizer = dpvi.optimizers.DPKerasSGDOptimizer(
            learning_rate=0.3, l2_norm_clip=40.0, **noise
        )
        model.compile(optimizer, jit_compile=False, **target)
        model.fit(x, batch_size=num, epochs=30, verbose=0)
        loc = model.posterior_sample(2000, seed=1).numpy().mean(0)
        errors.append(np.mean((loc - x.sum(0) / (num + 1)) ** 2))
    assert errors[0] > 3 * errors[1], errors
    assert errors[1] > 3 * errors[2], errors
    assert errors[2] > errors[3], errors
    assert errors[3] < 0.01, errors
