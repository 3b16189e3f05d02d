"""Priors with trainable variables: mixtures, VampPrior, flows, and two levels of latents (contracts C2, C3, C5)."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp
from support import internals
from support.logs import no_fallback
from support.vaes import (
    D,
    X,
    check_against_single_records,
    compiled,
    dense_decoder,
    dense_encoder,
    diagonal,
    fitted,
    layers,
    linear,
    make,
    optimizer,
    ready,
    tfd,
    tfpl,
)

import tfp_dpvi as dpvi
from tfp_dpvi import keras

tfb = tfp.bijectors
PSEUDO = np.random.default_rng(2).uniform(size=[4, 6])


def mixture(dtype="float32"):
    """Two normals, with weights, centres and scales."""
    locs = tf.Variable(tf.constant([[0.0, 0.5], [0.3, -0.2]], dtype), name="locs")
    scales = tfp.util.TransformedVariable(tf.ones([2, D], dtype), tfb.Softplus(), name="scales")
    logits = tf.Variable(tf.zeros([2], dtype), name="logits")
    return tfd.MixtureSameFamily(
        tfd.Categorical(logits=logits), tfd.MultivariateNormalDiag(locs, scales)
    )


def flow():
    """A masked autoregressive flow."""
    network = tfb.AutoregressiveNetwork(
        params=2, event_shape=[D], hidden_units=[4], activation="tanh"
    )
    return tfd.TransformedDistribution(
        tfd.Sample(tfd.Normal(0.0, 1.0), sample_shape=[D]), tfb.MaskedAutoregressiveFlow(network)
    )


def vamp():
    return dpvi.divergences.VampPrior(PSEUDO.tolist())


def two_levels():
    """p(z2) p(z1 | z2), one number each, with a network that is in no layer of the prior's own."""
    network = layers.Dense(2)

    def first(second):
        t = network(second[tf.newaxis])[0]  # TFP asks for one draw, and for batches of them.
        return tfd.Independent(tfd.Normal(t[..., :1], tf.nn.softplus(t[..., 1:])), 1)

    top = tfd.Independent(tfd.Normal(tf.zeros(1), tf.ones(1)), 1)
    return tfd.Blockwise(tfd.JointDistributionSequential([top, first]))


PRIORS = {"mixture": mixture, "vamp": vamp, "flow": flow, "two_levels": two_levels}


def learned(model):
    """What a model's prior reads."""
    return internals.read_by_prior(model)


# ---------------------------------------------------------------------- the guarantee


SLOW = [
    ("flow", "ghost", 1),
    ("vamp", "vectorized", 1),
    ("flow", "vectorized", 2),
    ("two_levels", "vectorized", 1),
    ("mixture", "vectorized", 1),
    ("mixture", "ghost", 1),
    ("mixture", "ghost", 2),
    ("two_levels", "ghost", 2),
]


@pytest.mark.parametrize(
    ("name", "gradients", "num_draws"),
    [
        ("vamp", "ghost", 2),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW),
    ],
)
def test_clipped_sums_are_those_of_single_records(name, gradients, num_draws):
    model = linear(prior=PRIORS[name](), gradients=gradients, num_draws=num_draws)
    ready(model, how=optimizer(clip=0.3))
    assert {v.ref() for v in learned(model)} <= {v.ref() for v in model.trainable_variables}
    check_against_single_records(model, {"x": X[:5]}, clip=0.3)


@pytest.mark.slow
def test_in_float64_to_rounding():
    model = make(dense_encoder("float64"), dense_decoder("float64"), mixture("float64"))
    ready(model, X.astype("float64"), how=optimizer(clip=0.3))
    check_against_single_records(model, {"x": X[:7].astype("float64")}, clip=0.3)


@pytest.mark.slow  # Their sums are checked above.
@pytest.mark.parametrize(
    ("name", "jit_compile"),
    [
        *((name, False) for name in ("mixture", "vamp", "flow", "two_levels")),
        *((name, True) for name in ("mixture", "vamp", "flow")),
    ],
)
def test_it_learns_at_its_epsilon(name, jit_compile):
    rng = np.random.default_rng(0)
    x = ((rng.uniform(size=[400, 1]) > 0.5) * np.ones([400, 6]) * 0.9 + 0.05).astype("float32")
    model = make(dense_encoder(width=0), dense_decoder(width=0), PRIORS[name](), seed=3)
    how = dpvi.optimizers.DPKerasAdamOptimizer(l2_norm_clip=10.0, learning_rate=0.05)
    model.compile(how, epsilon=10.0, delta=1e-5, jit_compile=jit_compile)
    before = [v.numpy() for v in learned(model)]
    with no_fallback():
        history = model.fit(
            x,
            batch_size=100,
            epochs=12,
            verbose=0,
            validation_data=(x, None),
            validation_is_public=True,
        )
    losses = history.history["val_loss"]
    assert losses[-1] < losses[0] - 0.3
    assert model.privacy_report().epsilon <= 10.0
    assert all(
        np.abs(v.numpy() - b).max() > 1e-3 for v, b in zip(learned(model), before, strict=True)
    )
    assert model.sample_predictive(5).shape == (5, 6)


@pytest.mark.slow
def test_a_flow_stays_autoregressive():
    """Noise reaches masked weights too; their constraint holds after each update."""
    model = fitted(make(prior=flow()))
    bijector = model.prior.bijector
    with tf.GradientTape(persistent=True) as tape:
        z = tf.Variable(tf.random.stateless_normal([1, D], [1, 2]))
        first = bijector.inverse(z)[0, 0]
    assert np.abs(tape.gradient(first, z).numpy()[0, 1:]).max() == 0.0


@pytest.mark.slow
def test_a_frozen_layer_that_the_prior_shares_stays_as_it_is():
    encoder = dense_encoder()
    model = make(encoder, prior=vamp())
    encoder.layers[0].trainable = False
    before = encoder.layers[0].kernel.numpy()
    fitted(model)
    np.testing.assert_array_equal(encoder.layers[0].kernel.numpy(), before)


@pytest.mark.slow  # Of y in `test_conditional.py`, of pseudo-inputs above.
def test_the_prior_of_a_conditional_model():
    label = np.arange(60, dtype="int32") % 3
    first, second = layers.Dense(2 * D), layers.Dense(6)
    with_y = lambda t, y: tf.concat([t, tf.one_hot(y, 3)], axis=1)  # noqa: E731
    model = make(
        lambda x, y: diagonal(first(with_y(x, y))),
        lambda z, y: tfd.Independent(tfd.Bernoulli(logits=second(with_y(z, y))), 1),
        dpvi.divergences.VampPrior(PSEUDO, y=[0, 1, 2, 2]),
    )
    ready(model, how=optimizer(clip=0.3), y=label)
    check_against_single_records(model, {"x": X[:5], "y": label[:5]}, clip=0.3)


def test_a_frozen_flow_stays_fixed():
    network = tfb.AutoregressiveNetwork(
        params=2, event_shape=[D], hidden_units=[4], trainable=False
    )
    base = tfd.Sample(tfd.Normal(0.0, 1.0), sample_shape=[D])
    model = make(prior=tfd.TransformedDistribution(base, tfb.MaskedAutoregressiveFlow(network)))
    assert internals.read_by_prior(model) == ()


def test_a_regularizer_of_a_layer_within_the_prior_is_seen():
    layer = layers.Dense(2, kernel_regularizer="l2")
    second = tfd.Independent(tfd.Normal(tf.zeros(1), tf.ones(1)), 1)
    first = lambda z: tfd.Independent(tfd.Normal(layer(z[tf.newaxis])[0, ..., :1], 1.0), 1)  # noqa: E731
    model = make(prior=tfd.Blockwise(tfd.JointDistributionSequential([second, first])))
    assert any(one is layer for one in internals.layers_of_vae(model))


# ---------------------------------------------------------------------- saving


@pytest.mark.slow  # `test_saving.py` and `test_export.py` have the other parts.
@pytest.mark.parametrize("name", ["vamp", "mixture", "flow"])
def test_a_saved_model_and_an_export_hold_the_prior(name, tmp_path):
    parts = (
        dpvi.register(f"e {name}")(lambda: dense_encoder(width=0)),
        dpvi.register(f"d {name}")(lambda: dense_decoder(width=0)),
    )
    prior = vamp() if name == "vamp" else dpvi.register(f"p {name}")(PRIORS[name])
    model = fitted(dpvi.DPVAE(*parts, prior))
    model.save(tmp_path / "model.keras")
    loaded = dpvi.load_model(tmp_path / "model.keras")
    for ours, theirs in zip(learned(model), learned(loaded), strict=True):
        np.testing.assert_array_equal(ours, theirs)
        assert ours is not theirs
    z = np.random.default_rng(0).normal(size=[5, D]).astype("float32")
    np.testing.assert_allclose(loaded.prior.log_prob(z), model.prior.log_prob(z), rtol=1e-6)
    np.testing.assert_array_equal(
        loaded.sample_predictive(6, seed=3), model.sample_predictive(6, seed=3)
    )
    model.save_weights(tmp_path / "a.weights.h5")
    changed = [value + 0.1 for value in model.get_weights()]
    model.set_weights(changed)
    model.load_weights(tmp_path / "a.weights.h5")
    np.testing.assert_allclose(loaded.prior.log_prob(z), model.prior.log_prob(z), rtol=1e-6)
    model.export(tmp_path / "export")
    exported = tf.saved_model.load(str(tmp_path / "export"))
    drawn = exported.sample_predictive(num=4000, seed=[1, 2])["x"].numpy()
    other = model.sample_predictive(4000, seed=7)
    # False-alarm rate below 1e-9: 7 standard errors of the difference of two means of 4,000 zeros and ones, at most 0.5 each.
    assert np.abs(drawn.mean(0) - other.mean(0)).max() < 7 * 0.5 * np.sqrt(2 / 4000)


# ---------------------------------------------------------------------- bad input


def test_a_prior_that_would_be_frozen_is_refused():
    """A function that computes with variables gives a distribution of their first values."""
    variable, encoder = tf.Variable(tf.zeros(D), name="centre"), dense_encoder()
    for prior in (
        lambda: tfd.Independent(tfd.Normal(tf.sin(variable), 1.0), 1),
        lambda: tfd.MixtureSameFamily(
            tfd.Categorical(logits=tf.zeros(4)), encoder(PSEUDO.astype("float32"))
        ),
    ):
        with pytest.raises(
            ValueError, match=r"prior is built from the initial value of the variable"
        ) as caught:
            make(encoder, prior=prior)
        assert str(caught.value).count("\n") < 2


def test_a_variable_that_the_density_does_not_read_is_refused():
    prior = mixture()
    prior.more = tf.Variable(0.0, name="more")
    with pytest.raises(ValueError, match="prior has the trainable variable more"):
        make(prior=prior)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"kl": "analytic"}, ["kl='analytic'", "learned prior"]),
        ({"batch_regularizer": dpvi.divergences.MMD()}, ["batch_regularizer", "learned"]),
        ({"prior": dpvi.divergences.VampPrior(np.zeros([4, 5]))}, ["prior", "VampPrior", "(4, 5)"]),
    ],
)
def test_bad_arguments_name_themselves(arguments, words):
    with pytest.raises(ValueError, match="prior") as caught:
        make(**{"prior": mixture(), **arguments})
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_prior_over_other_codes_is_refused_before_anything_is_spent():
    model = compiled(make(prior=tfd.MultivariateNormalDiag(tf.Variable(tf.zeros(3)))))
    with pytest.raises(ValueError, match=r"encoder.*event shape"):
        model.fit(X, batch_size=20, verbose=0)
    assert model.num_releases == 0


@pytest.mark.parametrize("part", ["encoder", "decoder"])
def test_a_variable_that_no_layer_holds_is_refused(part):
    """It would keep its first value, without a word."""
    scale = tf.Variable(0.5, name="scale")
    networks = {
        "encoder": keras.Sequential(
            [
                layers.Dense(D),
                tfpl.DistributionLambda(lambda t: tfd.Independent(tfd.Normal(t, tf.exp(scale)), 1)),
            ]
        ),
        "decoder": keras.Sequential(
            [
                layers.Dense(6),
                tfpl.DistributionLambda(lambda t: tfd.Independent(tfd.Normal(t, tf.exp(scale)), 1)),
            ]
        ),
    }
    model = compiled(make(**{part: networks[part]}))
    with pytest.raises(ValueError, match=r"reads the variable scale.*add_weight"):
        model.fit(X, batch_size=20, verbose=0)
    assert model.num_releases == 0
