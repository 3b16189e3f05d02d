"""DPVAE: the loss, the clip, what it gives back, and what it refuses (contracts C1, C2, C3, C5, C8, C9)."""

from __future__ import annotations

import dataclasses
import logging
import math
import weakref

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp
from support import internals
from support.logs import no_fallback
from support.siblings import slow
from support.toy import toy
from support.vaes import (
    D,
    X,
    compiled,
    dense_decoder,
    dense_encoder,
    diagonal,
    fitted,
    linear,
    make,
    optimizer,
    ready,
    standard,
)

import tfp_dpvi as dpvi
from tfp_dpvi import keras
from tfp_dpvi.sampling import FullBatchSampler

tfd, tfpl, layers = tfp.distributions, tfp.layers, keras.layers


TRACED = weakref.WeakKeyDictionary()  # Of a model its clipped sum, traced once a shape.


def clip_of(model, x, mask=None, key=(3, 4), **records):
    mask = tf.ones([len(x)], tf.bool) if mask is None else tf.constant(mask)
    if model not in TRACED:
        own = weakref.ref(model)
        TRACED[model] = tf.function(
            lambda r, m, k: internals.clip_batch(own(), r, m, k), autograph=False
        )
    tensors = TRACED[model]({"x": tf.constant(x), **records}, mask, tf.constant(key, tf.int64))
    return [part.numpy() for part in tensors]


@pytest.fixture(scope="module")
def shared():
    """A model that tests leave as it is: trying its layers takes longer than most of what they do with it."""
    return ready(make(gradients="ghost", num_draws=1), how=optimizer(clip=0.3))


def norm(parts):
    return math.sqrt(sum(float((part.astype("float64") ** 2).sum()) for part in parts))


# ---------------------------------------------------------------------- the loss


@pytest.mark.parametrize(("kl", "num_draws"), [("analytic", 1), ("monte_carlo", 4)])
def test_the_loss_is_the_elbo_written_out(kl, num_draws):
    model = make(num_draws=num_draws, kl=kl, beta=0.7)
    internals.prepare(model, X)
    key = tf.constant([5, 6], tf.int64)
    terms = internals.terms_of(model, tf.constant(X), key, num_draws)
    q = model.encode(X)
    z = q.sample(num_draws, seed=dpvi._random.tfp_seed(key)).numpy()
    loc, scale = q.mean().numpy(), q.stddev().numpy()
    np.testing.assert_allclose(terms.samples.numpy(), z[0], rtol=1e-6)
    wanted = np.zeros(len(X))
    for draw in z:
        logits = model.decode(draw).distribution.logits_parameter().numpy()
        wanted -= (X * logits - np.logaddexp(0, logits)).sum(1) / num_draws
        if kl == "monte_carlo":
            log_q = (-0.5 * ((draw - loc) / scale) ** 2 - np.log(scale)).sum(1)
            wanted += 0.7 * (log_q + 0.5 * (draw**2).sum(1)) / num_draws
    if kl == "analytic":
        wanted += 0.7 * (0.5 * (scale**2 + loc**2 - 1) - np.log(scale)).sum(1)
    np.testing.assert_allclose(terms.losses.numpy(), wanted, rtol=1e-4)


@pytest.mark.slow
def test_a_linear_model_reaches_the_closed_form():
    """Probabilistic PCA's maximum likelihood (Tipping and Bishop 1999) is the best ELBO of a linear Gaussian VAE."""
    rng = np.random.default_rng(1)
    noise = 0.5
    x = (
        rng.normal(size=[400, D]) @ rng.normal(size=[D, 5]) + noise * rng.normal(size=[400, 5])
    ).astype("float32")
    x -= x.mean(0)
    eigenvalues = np.sort(np.linalg.eigvalsh(x.T @ x / len(x)))[::-1]
    kept = np.maximum(eigenvalues[:D], noise**2)  # Variance of the noise held fixed.
    best = -0.5 * (
        5 * np.log(2 * np.pi)
        + np.log(kept).sum()
        + D
        + (5 - D) * np.log(noise**2)
        + eigenvalues[D:].sum() / noise**2
    )
    encoder = keras.Sequential(
        [layers.Input([5]), layers.Dense(D + D * (D + 1) // 2), tfpl.MultivariateNormalTriL(D)]
    )
    decoder = keras.Sequential(
        [
            layers.Input([D]),
            layers.Dense(5),
            tfpl.DistributionLambda(
                lambda t: tfd.MultivariateNormalDiag(t, noise * tf.ones_like(t))
            ),
        ]
    )
    model = dpvi.DPVAE(encoder, decoder, standard(), seed=3)
    how = dpvi.optimizers.DPKerasAdamOptimizer(
        l2_norm_clip=math.inf, noise_multiplier=0.0, learning_rate=0.02, use_ema=True
    )
    model.compile(how, delta=1e-5)
    model.fit(x, batch_size=400, steps_per_epoch=1500, verbose=0)
    reached = model.elbo(x, num_draws=100).mean()
    assert best - 0.1 < reached < best + 0.05


# ---------------------------------------------------------------------- the clip


@pytest.mark.parametrize(
    ("gradients", "num_draws"),
    [
        ("ghost", 1),
        slow("ghost", 3),
        slow("vectorized", 1),
        slow("vectorized", 3),
    ],
)
def test_one_record_moves_the_sum_by_the_clip_at_most(shared, gradients, num_draws):
    """C3, replay: same draws, one record masked at its place, whatever it holds."""
    model = shared
    if (gradients, num_draws) != ("ghost", 1):
        model = ready(make(gradients=gradients, num_draws=num_draws), how=optimizer(clip=0.3))
    x = X[:12].copy()
    x[3], x[4], x[5], x[6] = 1e6, np.nan, np.inf, -1e30
    whole = clip_of(model, x)
    assert all(np.isfinite(part).all() for part in whole)
    moved = []
    for number in range(12):
        without = clip_of(model, x, [i != number for i in range(12)])
        moved.append(norm([a - b for a, b in zip(whole, without, strict=True)]))
    assert max(moved) <= 0.3 * (1 + 1e-4)
    assert moved[4] == moved[5] == 0.0
    assert moved[0] > 0.2


@pytest.mark.parametrize("clipping", ["flat", slow("per_layer"), slow("normalized")])
def test_ghost_and_vectorized_agree_on_every_style_of_clip(clipping):
    sums = []
    for gradients in ("ghost", "vectorized"):
        model = ready(linear(gradients=gradients), how=optimizer(clip=0.3, clipping=clipping))
        rng = np.random.default_rng(0)
        model.set_weights([rng.normal(size=weight.shape) for weight in model.get_weights()])
        sums.append(clip_of(model, X, [True] * len(X)))
        one = clip_of(model, X, [True] + [False] * (len(X) - 1))
        assert norm(one) <= 0.3 * (1 + 1e-5)
    for a, b in zip(*sums, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_weights_act_inside_the_clip(shared):
    model = shared
    weights = tf.constant([1e6] * 4 + [0.0] * 8)
    heavy = clip_of(model, X[:12], sample_weight=weights)
    assert norm(heavy) <= 4 * 0.3 * (1 + 1e-5)
    only = clip_of(model, X[:12], [True] * 4 + [False] * 8, sample_weight=weights)
    for a, b in zip(heavy, only, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


def test_an_empty_batch_is_zero(shared):
    assert norm(clip_of(shared, X[:12], [False] * 12)) == 0.0


def test_a_second_draw_between_norm_and_sum_is_caught(shared, monkeypatch):
    """C5: the replay above would fail if norms came from other draws than gradients."""
    model = shared
    monkeypatch.setattr(model.optimizer, "l2_norm_clip", 0.05)
    gradients = internals.layer_gradients(model)
    x = tf.constant(X[:1])

    @tf.function(autograph=False)
    def broken(key):
        first = gradients.run(lambda: internals.terms_of(model, x, key).losses)
        second = gradients.run(lambda: internals.terms_of(model, x, key + 1).losses)
        ones = tf.ones([1])
        square = tf.add_n(
            [part.squared_norms() for part in first.contributions(first.result, ones)]
        )
        factor = tf.minimum(1.0, 0.05 / tf.sqrt(square))
        return [part.weighted_sum(factor) for part in second.contributions(second.result, ones)]

    def farthest(step):
        return max(
            norm([part.numpy() for part in step(tf.constant([k, k], tf.int64))]) for k in range(30)
        )

    assert farthest(broken) > 0.05 * 1.05
    sound = tf.function(
        lambda key: internals.clip_batch(model, {"x": x}, tf.constant([True]), key), autograph=False
    )
    assert farthest(sound) <= 0.05 * (1 + 1e-5)


def test_draws_differ_between_records_steps_and_physical_batches(shared):
    model = shared
    same = tf.constant(np.repeat(X[:1], 8, axis=0))
    one, two = (
        internals.terms_of(model, same, tf.constant(key, tf.int64)).samples.numpy()
        for key in ([1, 2], [1, 3])
    )
    assert len({tuple(row) for row in np.concatenate([one, two])}) == 16


@pytest.mark.slow  # Also in `test_ledger.py`, of the toy.
@pytest.mark.parametrize("jit_compile", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_physical_batches_change_nothing(jit_compile):
    """Full batches in pieces of 7 give the sum of all records' clipped gradients, once each."""
    certain = keras.Sequential(  # Codes of next to no spread: the pieces' own draws then change nothing either.
        [
            layers.Input([6]),
            layers.Dense(D),
            tfpl.DistributionLambda(lambda t: tfd.Independent(tfd.Normal(t, 1e-6), 1)),
        ]
    )
    model = ready(make(certain), jit_compile=jit_compile, how=optimizer(clip=1e-3, noise=0.0))
    variables = model.trainable_variables
    sgd = dpvi.optimizers.DPKerasSGDOptimizer(
        l2_norm_clip=1e-3, noise_multiplier=0.0, learning_rate=1.0
    )
    sgd.build(variables)
    moves = []
    before = [v.numpy() for v in variables]
    for physical in (60, 7):
        sampler, how = (
            FullBatchSampler(60, physical),
            {"expected_batch_size": 60.0, "num_records": 60},
        )
        run = internals.step_of(model, variables, sgd, sampler, jit_compile=jit_compile, **how)
        run([7, 8], 0, 1, 0.0, {"x": tf.constant(X)})
        moves.append([v.numpy() - b for v, b in zip(variables, before, strict=True)])
        for v, b in zip(variables, before, strict=True):
            v.assign(b)
    assert norm(moves[0]) > 1e-4
    for a, b in zip(*moves, strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-3, atol=1e-3 * norm(moves[0]))


# ---------------------------------------------------------------------- fits


@pytest.mark.slow  # The sums of each dtype and compiler are in `gradients/`.
@pytest.mark.parametrize(("dtype", "jit_compile"), [("float32", True), ("float64", False)])
def test_fits_compile_without_a_fallback(dtype, jit_compile):
    model = make(dense_encoder(dtype, width=0), dense_decoder(dtype, width=0), standard(dtype))
    with no_fallback():
        fitted(model, X.astype(dtype), jit_compile=jit_compile)
    assert all(np.isfinite(v.numpy()).all() for v in model.trainable_variables)
    assert model.privacy_ledger.num_releases == 6


@pytest.mark.slow  # `test_keras_model.py` learns.
def test_learning_improves_the_bound_and_spends_what_the_plan_says():
    """Eight other seeds gained 2.07 +- 0.25 nats. (At a clip of 1 or less, clipping's bias eats the gain, noise or none.)"""
    keras.utils.set_random_seed(11)
    rng = np.random.default_rng(0)
    x = ((rng.uniform(size=[600, 1]) > 0.5) * np.ones([600, 6]) * 0.9 + 0.05).astype("float32")
    model = make(dense_encoder(width=16), dense_decoder(width=16), seed=11)
    how = dpvi.optimizers.DPKerasAdamOptimizer(l2_norm_clip=10.0, learning_rate=0.02)
    model.compile(how, epsilon=20.0, delta=1e-5, jit_compile=False, accountant="rdp")
    internals.prepare(model, x)
    before = model.elbo(x).mean()
    history = model.fit(
        x,
        batch_size=100,
        epochs=40,
        verbose=0,
        validation_data=(X[:8], None),
        validation_is_public=True,
    )
    assert np.isfinite(history.history["val_loss"]).all()
    assert model.elbo(x).mean() > before + 1.0
    assert 0.99 * 20.0 <= history.history["epsilon"][-1] <= 20.0
    report = model.privacy_report()
    assert report.epsilon <= 20.0
    assert report.num_releases == 240


def test_what_comes_out_has_the_records_shape(shared):
    model = shared
    assert model.encode(X[:3]).batch_shape == [3]
    assert model.decode(np.zeros([4, D], "float32")).batch_shape == [4]
    assert model.reconstruct(X[:5]).shape == (5, 6)
    assert ((model.reconstruct(X[:5]) > 0) & (model.reconstruct(X[:5]) < 1)).all()
    drawn = model.sample_predictive(7, seed=1)
    assert drawn.shape == (7, 6)
    assert set(np.unique(drawn)) <= {0.0, 1.0}
    np.testing.assert_array_equal(drawn, model.sample_predictive(7, seed=1))
    grey = model.sample_predictive(7, seed=1, mean=True)
    assert 0 < grey.min() < grey.max() < 1
    assert model.elbo(X).shape == (60,)
    assert model.elbo(X).mean() == pytest.approx(-model.evaluate(X, verbose=0), rel=0.2)


@pytest.mark.slow  # `test_conditional.py` has functions of two arguments.
def test_plain_functions_with_layers_in_their_closure():
    hidden, last, back = layers.Dense(5, "relu"), layers.Dense(2 * D), layers.Dense(6)
    model = make(
        lambda x: diagonal(last(hidden(x))),
        lambda z: tfd.Independent(tfd.Bernoulli(logits=back(z)), 1),
    )
    fitted(model)
    assert len(model.trainable_variables) == 6


@pytest.mark.slow  # Layer by layer in `gradients/test_ghost.py`.
def test_convolutions_and_images(tmp_path):
    encoder = keras.Sequential(
        [layers.Input([8, 8, 1]), layers.Conv2D(4, 3, 2, "same", activation="relu"), layers.GroupNormalization(2),
         layers.Flatten(), layers.Dense(2 * D), tfpl.DistributionLambda(diagonal)]
    )  # fmt: skip
    decoder = keras.Sequential(
        [layers.Input([D]), layers.Dense(4 * 4 * 2), layers.Reshape([4, 4, 2]), layers.Conv2DTranspose(3, 3, 2, "same", activation="relu"),
         layers.Conv2D(1, 3, padding="same"), layers.Flatten(), tfpl.IndependentBernoulli([8, 8, 1])]
    )  # fmt: skip
    images = np.random.default_rng(0).uniform(size=[40, 8, 8, 1]).astype("float32")
    model = fitted(make(encoder, decoder), images, batch_size=10)
    assert model.sample_predictive(2).shape == (2, 8, 8, 1)
    model.save_weights(tmp_path / "weights.h5")
    before = model.reconstruct(images[:2])
    model.set_weights([value + 0.5 for value in model.get_weights()])
    assert not np.allclose(before, model.reconstruct(images[:2]))
    model.load_weights(tmp_path / "weights.h5")
    np.testing.assert_allclose(before, model.reconstruct(images[:2]), rtol=1e-6)


@pytest.mark.slow  # As in `test_keras_model.py`, whose models share these lines.
def test_weight_regularizers_are_exact_and_outside_the_clip():
    """C2: with no records and no noise the step is the regularizer's gradient alone."""
    encoder = keras.Sequential(
        [
            layers.Input([6]),
            layers.Dense(2 * D, kernel_regularizer=keras.regularizers.L2(10.0)),
            tfpl.DistributionLambda(diagonal),
        ]
    )
    model = make(encoder)
    sgd = dpvi.optimizers.DPKerasSGDOptimizer(
        l2_norm_clip=1e-9, noise_multiplier=0.0, learning_rate=0.01
    )
    model.compile(sgd, delta=1e-5)
    internals.prepare(model, X)
    before = encoder.layers[0].kernel.numpy()
    model.fit(X, batch_size=60, epochs=1, verbose=0)
    np.testing.assert_allclose(
        encoder.layers[0].kernel.numpy(), before * (1 - 0.01 * 2 * 10.0), rtol=1e-4
    )


class Own(layers.Layer):
    """A custom layer of one product."""

    def build(self, shape):
        self.kernel = self.add_weight("kernel", [shape[-1], 40])

    def call(self, inputs):
        return tf.nn.relu(tf.matmul(inputs, self.kernel))


@pytest.mark.parametrize("layer", [Own, slow(layers.PReLU)])
def test_a_layer_without_a_rule_is_said_in_the_log(caplog, layer):
    """With how much longer a step takes."""
    encoder = keras.Sequential(
        [layers.Input([6]), layer(), layers.Dense(2 * D), tfpl.DistributionLambda(diagonal)]
    )
    with caplog.at_level(logging.INFO, "tfp_dpvi"), no_fallback():
        fitted(make(encoder, dense_decoder(width=0)))
    (said,) = [record for record in caplog.records if "no rule" in record.message]
    assert layer.__name__ in said.message
    assert "times as long" in said.message
    assert said.levelno == logging.WARNING


@pytest.mark.slow  # Layer by layer in `gradients/test_ghost.py`.
def test_integer_records_and_embeddings():
    ids = np.random.default_rng(0).integers(0, 5, [40, 3]).astype("int32")
    encoder = keras.Sequential(
        [
            layers.Input([3], dtype="int32"),
            layers.Embedding(5, 4),
            layers.Flatten(),
            layers.Dense(2 * D),
            tfpl.DistributionLambda(diagonal),
        ]
    )
    decoder = keras.Sequential(
        [layers.Input([D]), layers.Dense(15), layers.Reshape([3, 5]),
         tfpl.DistributionLambda(lambda t: tfd.Independent(tfd.Categorical(logits=t), 1))]
    )  # fmt: skip
    model = fitted(make(encoder, decoder), ids, batch_size=10)
    assert model.sample_predictive(6).shape == (6, 3)


def test_the_networks_are_a_value_that_follows_the_settings():
    """A step that was traced keeps the value that it read; the next one reads the new settings."""
    model = linear()
    before = model.autoencoder
    model.beta = 3.0
    after = model.autoencoder
    assert (before.beta, after.beta) == (1.0, 3.0)
    assert before.encoder is after.encoder is model.encoder
    with pytest.raises(dataclasses.FrozenInstanceError):
        after.beta = 2.0


@pytest.mark.parametrize("how", [{"jit_compile": True}, {"run_eagerly": True}, {}])
def test_shapes_are_static_where_compile_says_so(how):
    assert compiled(linear(), **how).static_shapes is bool(how)


# ---------------------------------------------------------------------- bad input


class Counted(layers.Layer):
    """Not a distribution."""

    def call(self, inputs):
        return tf.reduce_sum(inputs, axis=1, keepdims=True)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"prior": 3.0}, TypeError, ["prior", "3.0"]),
        ({"encoder": "dense"}, TypeError, ["encoder", "'dense'"]),
        ({"beta": -1.0}, ValueError, ["beta", "-1.0"]),
        ({"num_draws": 0}, ValueError, ["num_draws", "0"]),
        ({"gradients": "fast"}, ValueError, ["gradients", "'fast'", "ghost"]),
        ({"kl": "exact"}, ValueError, ["kl", "'exact'"]),
        ({"batch_regularizer": 1.0}, TypeError, ["batch_regularizer", "1.0"]),
    ],
)  # fmt: skip
def test_bad_arguments_name_themselves(arguments, error, words):
    with pytest.raises(error) as caught:
        make(**arguments)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (lambda: make(encoder=keras.Sequential([layers.Input([6]), layers.Dense(2 * D)])), ["encoder", "distribution"]),
        (lambda: make(decoder=keras.Sequential([layers.Input([D]), layers.Dense(6)])), ["decoder", "distribution"]),
        (lambda: make(prior=tfd.MultivariateNormalDiag(tf.zeros(3), tf.ones(3))), ["encoder", "event shape", "(3,)"]),
        (lambda: make(encoder=keras.Sequential([layers.Input([6]), layers.Dense(D), tfpl.DistributionLambda(lambda t: tfd.Normal(t, 1.0))])), ["encoder", "Independent"]),
        (lambda: make(decoder=keras.Sequential([layers.Input([D]), layers.Dense(6), tfpl.DistributionLambda(lambda t: tfd.Bernoulli(logits=t))])), ["decoder", "log_prob", "[3, 6]"]),
        (lambda: make(decoder=keras.Sequential([layers.Input([D]), layers.Dense(4), tfpl.IndependentBernoulli([4])])), ["decoder failed"]),
        (lambda: make(encoder=keras.Sequential([layers.Input([6]), layers.Dense(D), tfpl.IndependentPoisson([D])])), ["encoder", "reparameterised"]),
        (lambda: make(encoder=keras.Sequential([layers.Input([6]), layers.Dense(4), layers.BatchNormalization(), tfpl.DistributionLambda(diagonal)])), ["BatchNormalization", "GroupNormalization", "trainable = False"]),
        (lambda: make(encoder=keras.Sequential([layers.Input([6]), layers.Dense(4, activity_regularizer="l2"), tfpl.DistributionLambda(diagonal)])), ["add_loss"]),
    ],
)  # fmt: skip
def test_networks_that_do_not_fit_are_refused_before_anything_is_spent(model, words):
    model = compiled(model())
    with pytest.raises((ValueError, TypeError)) as caught:
        model.fit(X, batch_size=20, verbose=0)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert model.privacy_ledger.num_releases == 0


def test_labels_are_refused():
    with pytest.raises(ValueError, match=r"fit\(x\)"):
        compiled().fit(X, X[:, 0], verbose=0)


@pytest.mark.slow  # Frozen layers in `gradients/test_ghost.py`.
def test_a_layer_frozen_between_fits_stays_as_it_is():
    model = fitted(make(decoder=dense_decoder(width=0)))
    model.encoder.layers[0].trainable = False
    before = model.encoder.layers[0].kernel.numpy()
    others = model.encoder.layers[1].kernel.numpy()
    compiled(model)  # As Keras wants it.
    model.fit(X, batch_size=20, epochs=1, verbose=0)
    np.testing.assert_array_equal(before, model.encoder.layers[0].kernel.numpy())
    assert not np.array_equal(others, model.encoder.layers[1].kernel.numpy())


@pytest.mark.slow  # It saves time, no more.
def test_layers_are_tried_once_after_compile(monkeypatch):
    """Fits of one compiled model share a trial; compiling again, as Keras asks for after a change of layers, brings another."""
    shared = {"mixes": False}
    mix = lambda t: t - tf.reduce_mean(t, axis=0) if shared["mixes"] else t  # noqa: E731
    encoder = keras.Sequential(
        [
            layers.Input([6]),
            layers.Dense(4),
            layers.Lambda(mix),
            layers.Dense(2 * D),
            tfpl.DistributionLambda(diagonal),
        ]
    )
    model, tried = make(encoder, dense_decoder(width=0)), []
    inner = dpvi.ghost.layers.LayerGradients.checked
    monkeypatch.setattr(
        dpvi.ghost.layers.LayerGradients,
        "checked",
        lambda *args, **settings: tried.append(1) or inner(*args, **settings),
    )
    compiled(model)
    model.fit(X, batch_size=20, epochs=1, verbose=0)
    model.fit(X + 0.1, batch_size=20, epochs=2, verbose=0)
    assert len(internals.traced_steps(model)) == 1
    model.fit(X, batch_size=30, epochs=1, verbose=0)
    assert len(tried) == 1
    spent = model.privacy_ledger.num_releases
    shared["mixes"] = True
    compiled(model)
    with pytest.raises(ValueError, match="records influence each other"):
        model.fit(X, batch_size=20, verbose=0)
    assert len(tried) == 2
    assert model.privacy_ledger.num_releases == spent


def test_a_refused_fit_holds_nothing_against_a_later_one():
    model, x = toy(3.0), X[:, :3]
    with pytest.raises(ValueError, match="batch_size"):
        model.fit(x, batch_size=0, verbose=0, validation_data=(x, None), unsafe_validation=True)
    with pytest.raises(ValueError, match="sampling"):
        model.fit(
            x,
            batch_size=20,
            sampling="shuffled",
            verbose=0,
            validation_data=(x, None),
            unsafe_validation=True,
        )
    model.fit(x, batch_size=20, verbose=0)
    assert model.privacy_ledger.exposures == ()
