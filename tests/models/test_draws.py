"""Several draws of the parameters in a step: traced once, and right for priors that draw one value at a time."""

import numpy as np
import pytest

import tfp_dpvi as dpvi
from tfp_dpvi import surrogates
from tfp_dpvi._tf import tf, tfp

tfd = tfp.distributions
NUM, X = 40, np.ones((40, 7), "float32")


def prior(num=7, *, together=True):
    """Weights with an unknown scale; TFP's shapes ask for `tau[..., None]`, which many priors do without."""

    def weights(tau):
        scale = tau[..., tf.newaxis] if together else tau
        return tfd.Independent(tfd.Normal(tf.zeros(num), scale), 1)

    return tfd.JointDistributionNamed({"tau": tfd.HalfNormal(1.0), "w": weights})


def fitted(num_draws, likelihood, **settings):
    model = dpvi.DPVI(prior(**settings), likelihood, num_draws=num_draws, clipping="flat", seed=1)
    optimizer = dpvi.optimizers.DPKerasAdamOptimizer(0.05, l2_norm_clip=1.0, noise_multiplier=2.0)
    model.compile(optimizer, delta=1e-5, jit_compile=False)
    model.fit(X, X[:, 0], batch_size=NUM, epochs=5, verbose=0)
    return model


def test_the_likelihood_is_traced_no_more_often_for_16_draws_than_for_one():
    """So the first fit costs little more; unrolled, it took eight times as long."""
    calls = dict.fromkeys((1, 16), 0)
    for num_draws in calls:

        def likelihood(params, x, num_draws=num_draws):
            calls[num_draws] += 1
            return tfd.Normal(tf.linalg.matvec(x, params["w"]), 1.0)

        fitted(num_draws, likelihood)
    assert calls[16] <= calls[1]


def test_draws_of_a_prior_for_one_value_are_made_one_by_one():
    assert surrogates.draws_together(surrogates.mean_field(prior()))
    assert not surrogates.draws_together(surrogates.mean_field(prior(together=False)))


def test_a_prior_for_one_value_at_a_time_can_be_clipped_flat():
    """Its divergence cannot be seen, which must not stop the fit."""
    model = fitted(2, lambda params, x: tfd.Normal(tf.linalg.matvec(x, params["w"]), 1.0), together=False)
    assert all(np.isfinite(variable.numpy()).all() for variable in model.trainable_variables)


@pytest.mark.parametrize("together", [True, False])
def test_draws_and_their_log_densities_belong_together(together):
    surrogate = surrogates.mean_field(prior(), initial_loc="prior", seed=1)
    draws, log_probs = surrogates.draws_and_log_probs(surrogate, 4, tf.constant([5, 6], tf.int64), together=together)
    assert draws["w"].shape == (4, 7)
    assert len({float(value) for value in draws["tau"]}) == 4
    for number, value in enumerate(log_probs):
        one = tf.nest.map_structure(lambda part, number=number: part[number], draws)
        np.testing.assert_allclose(value, surrogate.log_prob(one), rtol=1e-4)
