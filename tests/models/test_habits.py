"""What somebody who knows Keras tries first: evaluating, printing, saving and watching work, or say what to do."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp
from support.siblings import slow
from support.toy import Toy, records, sgd, toy

import tfp_dpvi as dpvi
from tfp_dpvi import keras
from tfp_dpvi.models import arguments

tfd = tfp.distributions
X, Y = records()
WEIGHT = np.linspace(0.0, 2.0, 200).astype("float32")
PUBLIC = {"validation_is_public": True, "batch_size": 50, "verbose": 0}


def logistic(dtype="float32", **settings):
    prior = tfd.Sample(tfd.Normal(np.zeros([], dtype), 1.0), 3)
    model = dpvi.DPVI(
        prior,
        lambda w, x: tfd.Bernoulli(logits=tf.linalg.matvec(x, w)),
        num_predictive_draws=5,
        clipping="flat",
    )
    model.compile(sgd(3.0), delta=1e-5, jit_compile=False, **settings)
    return model


def vae(*shapes):
    """With layers that know their shapes, where these are given."""
    encoder, decoder = (
        keras.Sequential(
            [
                *(keras.Input([shapes[part]]) for _ in shapes[part : part + 1]),
                keras.layers.Dense(width),
                last,
            ]
        )
        for part, (width, last) in enumerate(
            [(4, tfp.layers.IndependentNormal(2)), (6, tfp.layers.IndependentNormal(3))]
        )
    )
    return dpvi.DPVAE(encoder, decoder, tfd.MultivariateNormalDiag(tf.zeros(2), tf.ones(2)))


class Batches(keras.utils.Sequence):
    def __len__(self):
        return 3

    def __getitem__(self, place):
        return X[70 * place : 70 * place + 70], Y[70 * place : 70 * place + 70]


def dataset(size=70):
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(size)


# ---------------------------------------------------------------------- validation metrics


@pytest.mark.parametrize("make", [toy, slow(logistic)])
def test_metrics_are_means_over_records_whatever_the_batches(make):
    model = (
        make(3.0, validation_metrics=["mae"]) if make is toy else make(validation_metrics=["mae"])
    )
    history = model.fit(X, Y, validation_data=(X, Y), validation_batch_size=64, **PUBLIC)
    error = np.abs(model.predict(X) - Y)
    assert history.history["val_mean_absolute_error"][-1] == pytest.approx(error.mean(), rel=1e-5)
    weighted = model.evaluate(
        X, Y, sample_weight=WEIGHT, batch_size=64, verbose=0, return_dict=True
    )
    assert weighted["mean_absolute_error"] == pytest.approx(
        np.average(error, weights=WEIGHT), rel=1e-5
    )


class Linear(dpvi.DPModel):
    """Of records alone: a reconstruction of x where `width` is x's."""

    def __init__(self, width):
        super().__init__()
        self.dense = keras.layers.Dense(width)

    def call(self, x):
        return self.dense(x)

    def record_loss(self, x):
        return tf.reduce_sum(tf.square(self(x[None])[0] - x))


@pytest.mark.slow
def test_without_y_a_reconstruction_is_compared_with_x():
    model = Linear(3)
    model.compile(sgd(3.0), delta=1e-5, jit_compile=False, validation_metrics=["mae"])
    weighted = (
        tf.data.Dataset.from_tensor_slices((X, WEIGHT))
        .batch(64)
        .map(lambda x, weight: (x, None, weight))
    )
    for data, weight in (((X, None), None), (weighted, WEIGHT)):
        history = model.fit(X, validation_data=data, **PUBLIC).history
        error = np.abs(model.predict(X, verbose=0) - X).mean(axis=1)
        by_hand = np.average(error, weights=weight)
        assert history["val_mean_absolute_error"][-1] == pytest.approx(by_hand, rel=1e-5)
    spent = model.num_releases
    with pytest.raises(ValueError, match="sample_weight was passed without y"):
        model.fit(X, validation_data=(X, None, WEIGHT), **PUBLIC)
    assert model.num_releases == spent


def test_metrics_that_compare_nothing_are_refused_before_they_cost():
    def two(w, x):
        return tfd.JointDistributionNamed(
            {"a": tfd.Bernoulli(logits=x @ w[:, None]), "b": tfd.Normal(x[:, 0], 1.0)}
        )

    prior = tfd.Sample(tfd.Normal(0.0, 1.0), 3)
    pair = {"a": Y[:, None], "b": X[:, 0]}
    cases = [
        (Linear(1), (X,), "y is missing"),
        (
            dpvi.DPVI(prior, lambda w: tfd.Independent(tfd.Normal(w, 1.0), 1), clipping="flat"),
            (X,),
            "predicts nothing",
        ),
        (dpvi.DPVI(prior, two, clipping="flat"), (X, pair), "several|log_prob has shape"),
    ]
    for model, data, words in cases:
        model.compile(sgd(3.0), delta=1e-5, jit_compile=False, validation_metrics=["mae"])
        with pytest.raises(ValueError, match=words):
            model.fit(*data, validation_data=data, **PUBLIC)
        assert model.num_releases == 0


@pytest.mark.parametrize("metrics", [["mae", "mae"], [keras.metrics.Mean(name="loss")]])
def test_two_metrics_of_one_name_are_refused(metrics):
    with pytest.raises(ValueError, match="name="):
        toy(3.0, validation_metrics=metrics)


@pytest.mark.parametrize("metrics", [slow([]), ["mae", "mse"]])
def test_metrics_names_are_those_of_evaluate(metrics):
    model = toy(3.0, validation_metrics=metrics, metrics=[dpvi.metrics.PrivateClippedFraction()])
    for _ in range(2):
        values = model.evaluate(X, Y, verbose=0)
        values = values if metrics else [values]
        named = dict(zip(model.metrics_names, values, strict=True))
        assert named == pytest.approx(model.evaluate(X, Y, verbose=0, return_dict=True))
        assert next(iter(named)) == "loss"
        model.fit(X, Y, batch_size=50, verbose=0)


def test_a_model_in_float64_evaluates_arrays_of_any_float():
    model = logistic("float64")
    for kind in ("float32", "float64"):
        loss = model.evaluate(X.astype(kind), Y, verbose=0)
        assert loss == pytest.approx(-np.mean(model.predictive(X).log_prob(Y)), rel=1e-5)


# ---------------------------------------------------------------------- batches that others make


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(dataset, id="dataset"),
        pytest.param(Batches, id="Sequence", marks=pytest.mark.slow),
    ],
)
def test_validation_data_as_batches(make):
    arrays, batches = (
        toy(0.0, optimizer=sgd(0.0), seed=1, validation_metrics=["mae"])
        .fit(X, Y, validation_data=data, **PUBLIC)
        .history
        for data in ((X, Y), make())
    )
    assert list(batches) == list(arrays) == ["epsilon", "val_loss", "val_mean_absolute_error"]
    for name in arrays:
        assert batches[name] == pytest.approx(arrays[name], rel=1e-5)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (lambda: iter([(X, Y)]), "exhausted after one epoch"),
        (lambda: dataset().unbatch(), "batch"),
        (lambda: dataset().repeat(), "endless"),
        (lambda: X, "dataset"),
    ],
)
def test_validation_data_that_cannot_be_read_say_so(data, words):
    model = toy(3.0)
    with pytest.raises(ValueError, match=words):
        model.fit(X, Y, validation_data=data(), **PUBLIC)
    assert model.num_releases == 0


def test_a_private_dataset_needs_its_declaration_too():
    with pytest.raises(ValueError, match="unsafe_validation"):
        toy(3.0).fit(X, Y, validation_data=dataset(), verbose=0)


@pytest.mark.parametrize(
    "x", [Batches(), (batch for batch in [(X, Y)])], ids=["Sequence", "generator"]
)
def test_fit_on_batches_of_others_says_what_to_do(x):
    model = toy(3.0)
    with pytest.raises(TypeError, match="underlying arrays"):
        model.fit(x, verbose=0)
    assert model.num_releases == 0


def test_predictions_of_batches():
    model = logistic()
    expected = model.predict(X)
    for x in (dataset(), Batches(), iter([(X, Y)])):
        np.testing.assert_allclose(model.predict(x), expected, rtol=1e-6)


# ---------------------------------------------------------------------- summary, the bar, checkpoints


@pytest.mark.parametrize("make", [logistic, Toy, lambda: vae(3, 2), lambda: vae(3)])
def test_a_summary_before_fit_where_shapes_are_known(make):
    lines = []
    make().summary(print_fn=lambda line, **_: lines.append(line))
    assert any("Total params" in line for line in lines)


@pytest.mark.parametrize("make", [vae, lambda: Linear(3)])
def test_a_summary_after_build(make):
    model = make()
    with pytest.raises(ValueError, match="build"):
        model.summary()
    model.build((None, 3))
    model.summary(print_fn=lambda line, **_: None)


@pytest.mark.parametrize("verbose", [1, 2])
def test_the_bar_counts_the_steps_that_ran(capsys, verbose):
    model = toy(4.0, steps_per_execution=5)
    model.privacy_ledger.set_budget(1.2, 1e-5)
    history = model.fit(X, Y, batch_size=50, epochs=3, steps_per_epoch=12, verbose=verbose)
    ran = model.num_releases
    assert 12 < ran < 36
    assert ran % 12 % 5
    shown = capsys.readouterr().out
    epochs = len(history.history["epsilon"])
    ends = [re.findall(r"(\d+)/12", line)[-1] for line in shown.split("\n") if "/12" in line]
    assert [int(end) for end in ends] == [12] * (epochs - 1) + [ran - 12 * (epochs - 1)]


@pytest.mark.slow  # `test_saving.py` has what cannot be saved.
def test_a_checkpoint_of_a_model_that_cannot_be_saved_costs_nothing(tmp_path):
    def fit(model, name, **settings):
        keep = keras.callbacks.ModelCheckpoint(str(tmp_path / name), **settings)
        model.fit(X, Y, batch_size=50, verbose=0, callbacks=[keep])

    for model, name, words in (
        (logistic(), "a.keras", "dpvi.register"),
        (toy(3.0), "a.h5", "save_weights"),
    ):
        with pytest.raises(ValueError, match=words):
            fit(model, name)
        assert model.num_releases == 0
        fit(model, "b.weights.h5", save_weights_only=True)
    fit(toy(3.0), "{epoch}.keras")
    assert {path.name for path in tmp_path.iterdir()} == {"b.weights.h5", "1.keras"}
    assert dpvi.load_model(tmp_path / "1.keras").num_releases == 4


def test_keras_defaults_that_are_spelled_out_change_nothing():
    arguments.refuse(
        {"shuffle": True, "validation_split": 0.0, "class_weight": None, "validation_steps": None}
    )


def _private_names(kind):
    """Methods and attributes of a class: those it defines, and those that its source assigns to `self`."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    stored = (
        one
        for one in ast.walk(tree)
        if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store)
    )
    assigned = {
        one.attr for one in stored if isinstance(one.value, ast.Name) and one.value.id == "self"
    }
    return {
        name
        for name in {*vars(kind), *assigned}
        if name.startswith("_") and not name.startswith("__")
    }


def _below(kind):
    return {kind}.union(*(_below(one) for one in kind.__subclasses__()))


def test_no_private_name_of_ours_hides_one_of_keras():
    """A method `_losses` or `_checkpoint` of ours would stand in for Keras's own of that name, without a word."""
    theirs = keras.Sequential([keras.layers.Dense(1)])
    theirs.compile("sgd", "mse")
    theirs.build([None, 1])
    of_keras = {*dir(theirs), *dir(keras.Model())}
    assert {"_losses", "_checkpoint"} <= of_keras
    kinds_loaded = [dpvi.DPVAE, dpvi.DPKerasModel, dpvi.Synthesizer]
    assert all(issubclass(kind, object) for kind in kinds_loaded)
    # Functions that `_tf` defines may, which is where private names of TensorFlow and Keras belong.
    kinds = {
        one
        for kind in _below(dpvi.DPModel)
        for one in kind.__mro__
        if one.__module__.startswith("tfp_dpvi.")
    }
    hidden = {
        kind.__name__: {
            name
            for name in _private_names(kind) & of_keras
            if getattr(vars(kind).get(name), "__module__", "") != "tfp_dpvi._tf"
        }
        for kind in kinds
    }
    assert {"DPModel", "DPVAE"} <= hidden.keys()
    assert not any(hidden.values()), hidden


# ---------------------------------------------------------------------- layers that have read data


def test_layers_that_read_data_without_noise_are_named(caplog, tmp_path):
    texts = np.array(["a", "b"] * 100)[:, None]
    lookup = keras.layers.StringLookup(output_mode="multi_hot", name="city")
    lookup.adapt(texts)
    layers = [keras.layers.Input([1], dtype="string"), lookup, keras.layers.Dense(1)]
    model = dpvi.DPKerasModel(keras.Sequential(layers))
    model.compile("sgd", loss="mse", l2_norm_clip=1.0, epsilon=1.0, delta=1e-5)
    model.fit(texts, np.ones([200, 1], "float32"), batch_size=50, verbose=0)
    assert "read data by adapt: city (StringLookup). What" in caplog.text
    model.save(tmp_path / "a.keras")
    loaded = dpvi.load_model(tmp_path / "a.keras")
    np.testing.assert_allclose(loaded.predict(texts), model.predict(texts))


def test_layers_of_a_likelihood_that_read_data_are_named(caplog):
    scale = keras.layers.Normalization(name="scale")
    scale.adapt(X)
    model = dpvi.DPVI(
        tfd.JointDistributionNamed({"slope": tfd.Sample(tfd.Normal(0.0, 1.0), X.shape[1])}),
        lambda params, x: tfd.Normal(tf.linalg.matvec(scale(x), params["slope"]), 1.0),
    )
    model.compile("sgd", l2_norm_clip=1.0, epsilon=1.0, delta=1e-5)
    model.fit(X, Y, batch_size=50, verbose=0)
    assert "read data by adapt: scale (Normalization). What" in caplog.text


def test_layers_with_public_statistics_are_not(caplog):
    layer = keras.layers.Normalization(mean=0.0, variance=1.0)
    model = dpvi.DPKerasModel(keras.Sequential([layer, keras.layers.Dense(1)]))
    model.compile("sgd", loss="mse", l2_norm_clip=1.0, epsilon=1.0, delta=1e-5)
    model.fit(X, Y, batch_size=50, verbose=0)
    assert "adapt" not in caplog.text
