"""Several draws of the parameters in a step: traced once, and right for priors that draw one value at a time."""

import numpy as np
import pytest
from support import internals
from support.siblings import slow

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


def fitted(num_draws, likelihood, prior):
    model = dpvi.DPVI(prior, likelihood, num_draws=num_draws, clipping="flat", seed=1)
    optimizer = dpvi.optimizers.DPKerasAdamOptimizer(0.05, l2_norm_clip=1.0, noise_multiplier=2.0)
    model.compile(optimizer, delta=1e-5, jit_compile=False)
    model.fit(X, X[:, 0], batch_size=NUM, epochs=1, verbose=0)
    return model


def test_the_likelihood_is_traced_no_more_often_for_16_draws_than_for_one():
    """So the first fit costs little more; unrolled, it took eight times as long."""
    calls = dict.fromkeys((1, 16), 0)
    for num_draws in calls:

        def likelihood(mean, x, num_draws=num_draws):
            calls[num_draws] += 1
            return tfd.Normal(mean * x[:, 0], 1.0)

        fitted(num_draws, likelihood, tfd.Normal(0.0, 1.0))
    assert calls[16] <= calls[1]


def test_draws_of_a_prior_for_one_value_are_made_one_by_one():
    assert surrogates.draws_together(surrogates.mean_field(prior()))
    assert not surrogates.draws_together(surrogates.mean_field(prior(together=False)))


def test_a_prior_for_one_value_at_a_time_can_be_clipped_flat():
    """Its divergence cannot be seen, which must not stop the fit."""
    likelihood = lambda params, x: tfd.Normal(tf.linalg.matvec(x, params["w"]), 1.0)  # noqa: E731
    model = fitted(2, likelihood, prior(together=False))
    assert all(np.isfinite(variable.numpy()).all() for variable in model.trainable_variables)


@pytest.mark.parametrize("together", [True, False])
def test_draws_and_their_log_densities_belong_together(together):
    surrogate = surrogates.mean_field(prior(), initial_loc="prior", seed=1)
    draws, log_probs = surrogates.draws_and_log_probs(
        surrogate, 4, tf.constant([5, 6], tf.int64), together=together
    )
    assert draws["w"].shape == (4, 7)
    assert len({float(value) for value in draws["tau"]}) == 4
    for number, value in enumerate(log_probs):
        one = tf.nest.map_structure(lambda part, number=number: part[number], draws)
        np.testing.assert_allclose(value, surrogate.log_prob(one), rtol=1e-4)


WEIGHTS = tfd.JointDistributionNamed({"w": tfd.Sample(tfd.Normal(0.0, 1.0), 4)})
ROWS = np.random.default_rng(0).normal(size=(5, 4)).astype("float32")


def loop(params, x):
    half = lambda number, total: (number + 1, total + tf.linalg.matvec(x, params["w"]) / 2.0)  # noqa: E731
    return tfd.Normal(
        tf.while_loop(lambda number, _: number < 3, half, (0, tf.zeros(tf.shape(x)[0])))[1], 1.0
    )


def mapped(params, x):
    return tfd.Normal(tf.linalg.matvec(x, tf.map_fn(tf.tanh, params["w"])), 1.0)


def segments(params, x):
    return tfd.Normal(
        tf.linalg.matvec(x[:, :3], tf.math.segment_sum(params["w"], [0, 0, 1, 2])), 1.0
    )


def masked(params, x):
    return tfd.Normal(
        tf.linalg.matvec(x, params["w"])
        + tf.reduce_sum(tf.boolean_mask(params["w"], params["w"] > 0)),
        1.0,
    )


def gathered(params, x):
    return tfd.Normal(tf.gather(params["w"], tf.cast(x[:, 0] > 0.0, tf.int32)), 1.0)


def root(params, x):
    return tfd.Normal(tf.linalg.matvec(x, params["w"]), tf.sqrt(x[:, 0] + 3.0 + params["w"][0]))


@pytest.mark.parametrize(
    "likelihood", [slow(loop), slow(mapped), segments, masked, slow(gathered), root]
)
def test_a_record_contributes_the_gradient_of_its_mean_loss_over_draws(likelihood):
    """Also with loops, segment sums and masks of the parameters. One record is NaN, at one draw or at all, and counts nothing."""
    rows = ROWS.copy()
    rows[2, 0] = np.nan if likelihood is not root else -3.0
    model = dpvi.DPVI(WEIGHTS, likelihood, num_draws=2, clipping="flat", seed=1)
    key, x, y = tf.constant([3, 5], tf.int64), tf.constant(rows), tf.ones(5)

    @tf.function(autograph=False)
    def step():
        clipped, _ = internals.step_gradients(model, key, 5).clipped_sum(
            {"x": x, "y": y}, tf.fill([5], True), key
        )
        return clipped.tensors

    draws, _ = surrogates.draws_and_log_probs(model.surrogate_posterior, 2, key, together=True)
    total = np.zeros((2, 4))
    for number in range(5):
        with tf.GradientTape() as tape:
            tape.watch(draws)
            logs = [
                likelihood({"w": draws["w"][one]}, x[number : number + 1]).log_prob(1.0)
                for one in (0, 1)
            ]
            loss = -tf.reduce_mean(logs)
        gradient = tape.gradient(loss, draws["w"]).numpy()
        if np.isfinite(loss) and np.isfinite(gradient).all():
            total += gradient / max(1.0, np.linalg.norm(gradient))
        else:
            assert number == 2
    np.testing.assert_allclose(step()[0], total, rtol=1e-3, atol=1e-5)
