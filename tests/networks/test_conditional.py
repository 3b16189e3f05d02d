"""Conditional autoencoders, p(x | y): both networks see y, and so may the prior (contracts C2, C3, C5)."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from support.logs import no_fallback
from support.vaes import (
    D,
    X,
    check_against_single_records,
    compiled,
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

Y = np.random.default_rng(1).integers(0, 3, size=60).astype("int32")


def joined(width, last, *, classes=3):
    """A functional Keras model of [numbers, class]."""
    numbers, label = layers.Input([width]), layers.Input([], dtype="int32")
    both = layers.Concatenate()([numbers, layers.Embedding(classes, 2)(label)])
    return keras.Model([numbers, label], last(both))


def encoder():
    return joined(6, lambda t: tfpl.DistributionLambda(diagonal)(layers.Dense(2 * D)(t)))


def decoder():
    return joined(D, lambda t: tfpl.IndependentBernoulli([6])(layers.Dense(6)(t)))


def prior_of_y():
    return keras.Sequential(
        [
            layers.Input([], dtype="int32"),
            layers.Embedding(3, 2 * D),
            tfpl.DistributionLambda(diagonal),
        ]
    )


def conditional(prior=None, **kwargs):
    return make(encoder(), decoder(), prior, **kwargs)


@pytest.fixture(scope="module")
def model():
    """Of registered parts, so that it can be saved."""
    parts = (
        dpvi.register("conditional encoder")(encoder),
        dpvi.register("conditional decoder")(decoder),
    )
    return fitted(dpvi.DPVAE(*parts, dpvi.register("prior of y")(prior_of_y)), y=Y)


# ---------------------------------------------------------------------- the guarantee


@pytest.mark.parametrize(
    ("prior", "gradients", "num_draws"),
    [
        (prior_of_y, "ghost", 1),
        pytest.param(prior_of_y, "vectorized", 2, marks=pytest.mark.slow),
        pytest.param(None, "ghost", 2, marks=pytest.mark.slow),
        pytest.param(None, "vectorized", 1, marks=pytest.mark.slow),
    ],
)
def test_clipped_sums_are_those_of_single_records(prior, gradients, num_draws):
    model = conditional(prior and prior(), gradients=gradients, num_draws=num_draws)
    ready(model, how=optimizer(clip=0.3), y=Y)
    check_against_single_records(model, {"x": X[:5], "y": Y[:5]}, clip=0.3)


@pytest.mark.slow  # A sibling is quick.
def test_functions_of_two_arguments_and_several_parts():
    """y is a dictionary here, and the networks are plain functions."""
    first, second = layers.Dense(2 * D), layers.Dense(6)
    y = {"age": X[:, 0], "ward": Y}

    def code(x, y):
        return diagonal(first(tf.concat([x, y["age"][:, None], tf.one_hot(y["ward"], 3)], axis=1)))

    def record(z, y):
        return tfd.Independent(
            tfd.Bernoulli(logits=second(tf.concat([z, tf.one_hot(y["ward"], 3)], axis=1))), 1
        )

    model = fitted(make(code, record), y=y)
    assert len(model.trainable_variables) == 4
    drawn = model.sample_predictive(5, y={"age": np.ones(1, "float32"), "ward": [2]})
    assert drawn.shape == (5, 6)


class OfTwo(keras.Model):
    """Subclassed, with a call of two arguments."""

    def __init__(self, units, last):
        super().__init__()
        self.dense, self.last = layers.Dense(units), last

    def call(self, numbers, label, training=None):
        return self.last(self.dense(tf.concat([numbers, tf.one_hot(label, 3)], axis=1)))


@pytest.mark.slow  # Functions of two arguments above.
def test_networks_whose_call_takes_two():
    model = make(
        OfTwo(2 * D, diagonal), OfTwo(6, lambda t: tfd.Independent(tfd.Bernoulli(logits=t), 1))
    )
    ready(model, how=optimizer(clip=0.3), y=Y)
    check_against_single_records(model, {"x": X[:5], "y": Y[:5]}, clip=0.3)
    assert model.sample_predictive(5, y=[2]).shape == (5, 6)


@pytest.mark.slow  # Its sums are checked above.
@pytest.mark.parametrize("jit_compile", [False, True])
def test_it_learns_what_y_says(jit_compile):
    """Records are their class: the bound rises, and drawn records follow the y that they are given."""
    keras.utils.set_random_seed(11)
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, size=600).astype("int32")
    x = (np.eye(3)[y].repeat(2, axis=1) * 0.96 + 0.02).astype("float32")
    model = conditional(seed=5)
    how = dpvi.optimizers.DPKerasAdamOptimizer(l2_norm_clip=5.0, learning_rate=0.05)
    model.compile(how, epsilon=8.0, delta=1e-5, jit_compile=jit_compile)
    with no_fallback():
        history = model.fit(
            x,
            y,
            batch_size=100,
            epochs=20,
            verbose=0,
            validation_data=(x, y),
            validation_is_public=True,
        )
    losses = history.history["val_loss"]
    assert losses[-1] < losses[0] - 0.5
    assert model.privacy_report().epsilon <= 8.0
    wanted = np.arange(300) % 3
    drawn = model.sample_predictive(300, y=wanted, mean=True, seed=1).reshape(300, 3, 2)
    own = np.eye(3, dtype=bool)[wanted]
    assert drawn[own].mean() > drawn[~own].mean() + 0.2  # 0.92 in the records.


# ---------------------------------------------------------------------- what it gives back


@pytest.mark.slow
def test_what_comes_out_has_the_records_shape(model):
    assert model.encode(X[:3], Y[:3]).batch_shape == [3]
    assert model.decode(np.zeros([4, D], "float32"), Y[:4]).batch_shape == [4]
    assert model.elbo(X, Y).shape == (60,)
    assert model.reconstruct(X[:5], Y[:5]).shape == (5, 6)
    np.testing.assert_allclose(model.predict(X[:5], y=Y[:5]), model((X[:5], Y[:5])), rtol=1e-6)
    assert model.elbo(X, Y).mean() == pytest.approx(-model.evaluate(X, Y, verbose=0), rel=0.2)
    one, each = (model.sample_predictive(7, y=y, seed=1) for y in ([2], np.full(7, 2)))
    assert one.shape == (7, 6)
    np.testing.assert_array_equal(one, each)


@pytest.mark.slow
def test_a_saved_model_and_an_export_know_y(model, tmp_path):
    model.save(tmp_path / "model.keras")
    loaded = dpvi.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(loaded.predict(X, y=Y), model.predict(X, y=Y), rtol=1e-6)
    drawn = [one.sample_predictive(6, y=Y[:6], seed=3) for one in (loaded, model)]
    np.testing.assert_array_equal(*drawn)
    spent = loaded.num_releases
    assert spent >= 6
    loaded.fit(X, Y, batch_size=20, verbose=0)
    assert loaded.num_releases == spent + 3

    model.export(tmp_path / "export")
    exported = tf.saved_model.load(str(tmp_path / "export"))
    mean = exported.predict(x=X[:4], y=Y[:4])["mean"]
    np.testing.assert_allclose(mean, model.predict(X[:4], y=Y[:4]), rtol=1e-5)
    assert exported.sample_predictive(num=5, seed=[1, 2], y=Y[:5])["x"].shape == [5, 6]
    assert exported.sample_predictive(num=5, seed=[1, 2], y=Y[:1])["x"].shape == [5, 6]


# ---------------------------------------------------------------------- bad input


def test_a_missing_or_needless_y_is_named(model):
    for call in (
        lambda: model.predict(X),
        lambda: model.elbo(X),
        lambda: model.encode(X),
        lambda: model.sample_predictive(3),
        lambda: model.evaluate(X, verbose=0),
        lambda: model.decode(np.zeros([2, D], "float32")),
    ):
        with pytest.raises(ValueError, match=r"y is missing.*y="):
            call()
    with pytest.raises(ValueError, match=r"y has 4 rows.*num=3"):
        model.sample_predictive(3, y=Y[:4])
    spent = model.num_releases
    with pytest.raises(ValueError, match=r"fit\(x, y\)"):
        model.fit(X, batch_size=20, verbose=0)
    assert model.num_releases == spent
    plain = ready(linear())
    with pytest.raises(ValueError, match=r"y was passed.*without y"):
        plain.sample_predictive(3, y=Y[:3])


@pytest.mark.parametrize(
    ("make_model", "words"),
    [
        (lambda: make(), [r"encoder failed", r"fit\(x\)"]),
        (lambda: make(encoder()), [r"decoder failed", r"\(z, y\)"]),
        (lambda: make(lambda pair: pair, decoder()), [r"encoder failed", r"\(x, y\)"]),
        (lambda: make(encoder(), decoder(), layers.Dense(2)), ["prior returned"]),
        (
            lambda: make(encoder(), decoder(), lambda y: tfd.Normal(tf.zeros(D), 1.0)),
            ["prior returned", "batch shape"],
        ),
    ],
)
def test_networks_that_do_not_take_y_are_refused_before_anything_is_spent(make_model, words):
    model = compiled(make_model())
    with pytest.raises((ValueError, TypeError)) as caught:
        model.fit(
            X,
            Y.astype("float32")[:, None]
            if "prior returned" in words[:1] and len(words) == 1
            else Y,
            verbose=0,
        )
    for word in words:
        assert caught.match(word)
    assert model.num_releases == 0


def test_a_regularizer_with_a_prior_of_y_is_refused():
    with pytest.raises(ValueError, match=r"batch_regularizer.*prior"):
        conditional(prior_of_y(), batch_regularizer=dpvi.divergences.MMD())


def test_a_prior_of_low_precision_is_refused():
    half = keras.Sequential(
        [layers.Embedding(3, 2 * D, dtype="mixed_float16"), tfpl.DistributionLambda(diagonal)]
    )
    model = conditional(half)
    with pytest.raises(ValueError, match=r"mixed_float16.*float32 or float64"):
        compiled(model)
    assert model.num_releases == 0


def test_records_that_mix_in_the_prior_are_refused():
    mixing = keras.Sequential(
        [
            layers.Input([], dtype="int32"),
            layers.Embedding(3, 2 * D),
            layers.Lambda(lambda t: t - tf.reduce_mean(t, axis=0)),
            tfpl.DistributionLambda(diagonal),
        ]
    )
    model = compiled(conditional(mixing))
    with pytest.raises(ValueError, match="influence each other"):
        model.fit(X, Y, batch_size=20, verbose=0)
    assert model.num_releases == 0
