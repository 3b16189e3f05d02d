"""The usual calls of Keras and TFP: each works, or is refused before anything is spent in at most two true lines."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import tensorflow as tf
import tensorflow_probability as tfp
from support.toy import adam

import tfp_dpvi as dpvi
from tfp_dpvi import keras

L, tfd, tfpl = keras.layers, tfp.distributions, tfp.layers
N = 60
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, 3)).astype("float32")
Y = (X[:, 0] > 0).astype("int32")
TARGET = 2.0 * X[:, :1]
CLASS = RNG.integers(0, 3, N)
TEXT = np.array(["a", "b", "c"] * (N // 3))
CODE = RNG.integers(0, 5, N)
TABLE = pd.DataFrame(X, columns=list("abc"))
SERIES = RNG.normal(size=(N, 6, 1)).astype("float32")
PUBLIC = {"validation_data": (X, TARGET), "validation_is_public": True}
WORKS = ""


@dataclasses.dataclass
class Call:
    """A call, and the words of its refusal; none if it works."""

    words: str
    run: Callable[[Any], None]


def network(*layers, x=X, y=TARGET, loss="mse", fit=None, words=WORKS, rate=0.05, **compiled):
    def run(made):
        layered = layers[0] if len(layers) == 1 and callable(layers[0]) else None
        inner = layered() if layered is not None and not isinstance(layered, L.Layer) else None
        model = dpvi.DPKerasModel(inner or keras.Sequential(list(layers)))
        made.append(model)
        target = {"epsilon": 8.0, "delta": 1e-5, **compiled}
        model.compile(adam(rate=rate), loss=loss, **target)
        arguments = {"batch_size": 20, "verbose": 0, "epochs": 2, **(fit or {})}
        model.fit(x() if callable(x) else x, y, **arguments)

    return Call(words, run)


def dense(words=WORKS, **arguments):
    return network(L.Dense(1), words=words, **arguments)


def watched(make, words=WORKS, **fit):
    """A fit with callbacks; `make` gets a folder's path as a prefix."""

    def run(made):
        dense(fit={"callbacks": [make()], **fit}).run(made)

    return Call(words, run)


def compiled(*arguments, words, kind=None, **named):
    def run(made):
        model = (kind or (lambda: dpvi.DPKerasModel(keras.Sequential([L.Dense(1)]))))()
        made.append(model)
        model.compile(*arguments, **named)

    return Call(words, run)


def posterior(prior, likelihood, x=X, y=None, words=WORKS):
    def run(made):
        model = dpvi.DPVI(prior(), likelihood, clipping="flat")
        made.append(model)
        model.compile(adam(), epsilon=8.0, delta=1e-5)
        model.fit(x, y, batch_size=20, verbose=0)

    return Call(words, run)


def of_normals(width=1):
    return tfpl.DistributionLambda(
        lambda t: tfd.Normal(t[..., :width], 1e-3 + tf.nn.softplus(t[..., width:]))
    )


def nll(y, distribution):
    return -distribution.log_prob(y)


def trainable_normal(kernel_size, bias_size=0, dtype=None):
    num = kernel_size + bias_size
    last = tfpl.DistributionLambda(lambda t: tfd.Independent(tfd.Normal(t[:num], 1.0), 1))
    return keras.Sequential([tfpl.VariableLayer(num, dtype=dtype), last])


def structured():
    number, text = L.Input([1], name="number"), L.Input([1], dtype="string", name="city")
    code = L.Input([1], dtype="int64", name="code")
    city = L.Flatten()(L.Embedding(5, 2)(L.StringLookup(vocabulary=["a", "b", "c"])(text)))
    one_hot = L.CategoryEncoding(7, output_mode="one_hot")
    coded = one_hot(L.IntegerLookup(vocabulary=[0, 1, 2, 3, 4])(code))
    output = L.Dense(1)(L.Concatenate()([number, city, coded]))
    return keras.Model({"number": number, "city": text, "code": code}, output)


def of_an_adapted_vocabulary():
    lookup = L.StringLookup(output_mode="multi_hot")
    lookup.adapt(TEXT[:, None])
    return keras.Sequential([L.Input([1], dtype="string"), lookup, L.Dense(1)])


def of_a_feature_space():
    space = keras.utils.FeatureSpace({"a": "float_normalized", "city": "string_categorical"})
    space.adapt(tf.data.Dataset.from_tensor_slices({"a": X[:, 0], "city": TEXT}))
    return keras.Model(space.get_inputs(), L.Dense(1)(space.get_encoded_features()))


def of_two_inputs():
    first, second = L.Input([3]), L.Input([3])
    return keras.Model([first, second], L.Dense(1)(L.Concatenate()([first, second])))


def of_two_outputs():
    first = L.Input([3])
    return keras.Model(first, [L.Dense(1)(first), L.Dense(1)(first)])


class Stateless(keras.metrics.Metric):
    """It has no result before its first update."""

    def __init__(self, name="stateless"):
        super().__init__(name=name)
        self.values = []

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.values.append(tf.reduce_mean(y_pred))

    def result(self):
        return tf.add_n(self.values) / len(self.values)

    def reset_state(self):
        self.values = []


class ReadsLoss(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.last = logs["loss"]


class ReadsValidation(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.last = logs["val_loss"]


class FailsInTraining(L.Layer):
    """It has a name that is unknown, where only training comes by."""

    def call(self, inputs, training=None):
        return unknown_name if training else inputs  # noqa: F821


class Eigenvalues(L.Layer):
    """TensorFlow has no rule for their gradients, and says so in eighty lines."""

    def build(self, shape):
        self.kernel = self.add_weight("kernel", [shape[-1]])

    def call(self, inputs):
        outer = inputs[:, :, None] * inputs[:, None, :]
        return tf.cast(tf.linalg.eigvals(outer), tf.float32) * self.kernel


class Plots(keras.callbacks.Callback):
    def on_train_end(self, logs=None):
        self.losses = self.model.history.history["loss"]


class PlotsValidation(keras.callbacks.Callback):
    def on_train_end(self, logs=None):
        self.losses = self.model.history.history["val_loss"]


class EndsOnValidation(keras.callbacks.Callback):
    def on_train_end(self, logs=None):
        self.last = logs["val_loss"]


class Careful(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if "loss" in logs:
            self.last = logs["loss"]


class Unlogged(keras.callbacks.Callback):
    def on_epoch_end(self, epoch):
        pass


class Formats(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        logs = logs or {}
        print(f"{logs.get('loss'):.3f}")


class StopsByAccuracy(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if logs.get("accuracy") > 0.9:
            self.model.stop_training = True


class AsksForNone(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        loss = (logs or {}).get("loss")
        other = logs.get("val_loss", 0.0)
        if loss is not None and loss > other:
            self.model.stop_training = True


def scheduled(callback):
    decay = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    words = "sets the learning rate, but optimizer has a schedule"

    def run(made):
        dense(fit={"callbacks": [callback()], **PUBLIC}, rate=decay).run(made)

    return Call(words, run)


def linear(w, x):
    return tfd.Normal(tf.linalg.matvec(x, w), 1.0)


def level(params):
    initial = tfd.MultivariateNormalDiag([0.0], [1.0])
    return tfp.sts.LocalLevelStateSpaceModel(6, params, initial, 1.0)


def trend(params):
    initial = tfd.MultivariateNormalDiag([0.0, 0.0], [1.0, 1.0])
    return tfp.sts.LocalLinearTrendStateSpaceModel(6, params, 0.1, initial, 1.0)


def seasonal(params):
    initial = tfd.MultivariateNormalDiag([0.0, 0.0], [1.0, 1.0])
    return tfp.sts.SeasonalStateSpaceModel(6, 2, params, initial, observation_noise_scale=1.0)


def additive(params):
    initial = tfd.MultivariateNormalDiag([0.0], [1.0])
    parts = [
        tfp.sts.LocalLevelStateSpaceModel(3, params, initial),
        tfp.sts.SeasonalStateSpaceModel(
            3, 2, 0.1, tfd.MultivariateNormalDiag([0.0, 0.0], [1.0, 1.0])
        ),
    ]
    return tfp.sts.AdditiveStateSpaceModel(parts, observation_noise_scale=1.0)


def regression(params):
    design = np.linspace(-1.0, 1.0, 6, dtype="float32")[:, None]
    structure = tfp.sts.LinearRegression(design)
    return structure.make_state_space_model(6, {"weights": params})


def hidden(params):
    start, move = tfd.Categorical(probs=[0.5, 0.5]), [[0.9, 0.1], [0.2, 0.8]]
    return tfd.HiddenMarkovModel(start, tfd.Categorical(probs=move), tfd.Normal(params, 1.0), 6)


def process(params):
    kernel = tfp.math.psd_kernels.ExponentiatedQuadratic(params, 0.5)
    points = np.linspace(0.0, 1.0, 6, dtype="float32")[:, None]
    return tfd.GaussianProcess(kernel, points, observation_noise_variance=0.1)


class Exponential(tfd.TransformedDistribution):
    def __init__(self, loc, name="Exponential"):
        super().__init__(tfd.Normal(loc, 1.0), tfp.bijectors.Exp(), name=name)


call = keras.callbacks
sparse = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
binary = keras.losses.BinaryCrossentropy(from_logits=True)
NEVER = "what this fit never shows"
CALLS = {
    # Losses.
    "loss by name": dense(loss="mae"),
    "loss object": dense(loss=keras.losses.Huber()),
    "loss reduced to a sum": dense(loss=keras.losses.MeanSquaredError(reduction="sum")),
    "loss of labels": network(L.Dense(3), y=CLASS, loss=sparse),
    "loss function": dense(loss=lambda y, p: tf.reduce_mean(tf.square(y - p), axis=-1)),
    "loss in a list": dense(loss=["mse"]),
    "loss by output": dense(loss={"dense": "mse"}),
    "loss that reduces": dense("returned a scalar", loss=lambda y, p: tf.reduce_mean(y - p)),
    "loss unknown": dense("Unknown loss function", loss="mean_squared"),
    "loss missing": dense("pass one Keras loss", loss=None),
    "losses of two outputs": dense("for 2 outputs", loss=["mse", "mse"]),
    # Compile.
    "compile name alone": compiled(
        "adam",
        words=r"pass loss=.*l2_norm_clip=.*epsilon=.*delta=.*\n"
        r"compile\('adam', loss='mse', l2_norm_clip=1.0, epsilon=1.0, delta=1e-5\)",
    ),
    "compile of a posterior": compiled(
        "adam",
        loss="mse",
        kind=lambda: dpvi.DPVI(tfd.Normal(0.0, 1.0), lambda w: tfd.Normal(w, 1.0)),
        words=r"leave out loss=.*l2_norm_clip=.*\ncompile\('adam', l2_norm_clip=1.0, epsilon",
    ),
    "compile with weights": dense(
        "loss_weights=.* is not supported: a network has one loss", loss_weights=[1.0]
    ),
    "compile with no weights": dense(loss_weights=None, weighted_metrics=None),
    "compile with weighted metrics": dense(
        "weighted_metrics=.*: pass metrics=, which evaluate weights", weighted_metrics=["mae"]
    ),
    # Metrics.
    "metric accuracy": network(L.Dense(1), y=Y, loss=binary, metrics=["accuracy"]),
    "metrics by output": dense(metrics={"dense": ["mae", "mse"]}, fit=PUBLIC),
    "metrics nested": dense(metrics=[["mae"]]),
    "metric function": dense(metrics=[lambda y, p: tf.abs(y - p)], fit=PUBLIC),
    "metric without state": dense(metrics=[Stateless()]),
    "metric without state, validated": dense(metrics=[Stateless()], fit=PUBLIC),
    "metric unknown": dense("metric 'acuracy' is unknown", metrics=["acuracy"]),
    "metric of private records": compiled(
        adam(1.0),
        metrics=["mae"],
        delta=1e-5,
        kind=lambda: dpvi.DPVI(tfd.Normal(0.0, 1.0), lambda w: tfd.Normal(w, 1.0)),
        words="unpriced releases",
    ),
    # Callbacks.
    "stop on the loss": watched(lambda: call.EarlyStopping(monitor="loss"), NEVER),
    "stop without validation": watched(lambda: call.EarlyStopping(), NEVER),
    "stop on another metric": watched(lambda: call.EarlyStopping("val_mae"), NEVER, **PUBLIC),
    "stop on validation": watched(lambda: call.EarlyStopping(), **PUBLIC),
    "stop on epsilon": watched(lambda: call.EarlyStopping(monitor="epsilon", mode="min")),
    "plateau of the loss": watched(lambda: call.ReduceLROnPlateau(monitor="loss"), NEVER),
    "plateau of a schedule": scheduled(lambda: call.ReduceLROnPlateau(patience=1)),
    "rates of a schedule": scheduled(lambda: call.LearningRateScheduler(lambda epoch: 0.1)),
    "rates": watched(lambda: call.LearningRateScheduler(lambda epoch, rate: rate / 2)),
    "rate None": watched(lambda: call.LearningRateScheduler(lambda e: None), "returns NoneType"),
    "rate None later": watched(
        lambda: call.LearningRateScheduler(lambda epoch: None if epoch else 0.1),
        "returns NoneType in epoch 1",
    ),
    "rate fails later": watched(
        lambda: call.LearningRateScheduler(lambda epoch: [0.1][epoch]), "fails in epoch 1"
    ),
    "checkpoint named by the loss": watched(
        lambda: call.ModelCheckpoint("{epoch}-{loss:.2f}.weights.h5", save_weights_only=True),
        "needs 'loss', which this fit never shows",
    ),
    "checkpoint nowhere": watched(
        lambda: call.ModelCheckpoint("/proc/no/a.weights.h5", save_weights_only=True),
        "filepath='/proc/no/a.weights.h5' cannot be written",
    ),
    "best checkpoint": watched(
        lambda: call.ModelCheckpoint("a.weights.h5", save_weights_only=True, save_best_only=True),
        NEVER,
    ),
    "checkpoint named by validation": watched(
        lambda: call.ModelCheckpoint("{val_loss:.2f}.weights.h5", save_weights_only=True), **PUBLIC
    ),
    "log in a file": watched(lambda: call.CSVLogger("a.csv")),
    "log nowhere": watched(lambda: call.CSVLogger("/proc/a.csv"), "filename='/proc/a.csv'"),
    "TensorBoard nowhere": watched(lambda: call.TensorBoard("/proc/logs"), "log_dir='/proc/logs'"),
    "callback reads the loss": watched(ReadsLoss, r"ReadsLoss.on_epoch_end reads logs\['loss'\]"),
    "callback plots the loss": watched(Plots, r"Plots.on_train_end reads logs\['loss'\]"),
    "callback asks first": watched(Careful),
    "lambda reads the loss": watched(
        lambda: call.LambdaCallback(on_epoch_end=lambda epoch, logs: print(logs["loss"])),
        r"LambdaCallback.on_epoch_end reads logs\['loss'\]",
    ),
    "callback without logs": watched(Unlogged, r"Unlogged.on_epoch_end .*\n.*\(epoch, logs=None\)"),
    "lambda without logs": watched(
        lambda: call.LambdaCallback(on_train_end=lambda: None),
        r"on_train_end does not take .*\n.* \(logs=None\)",
    ),
    "lambda with other names": watched(
        lambda: call.LambdaCallback(on_batch_end=lambda batch, seen: None), "on_batch_end does not"
    ),
    "callback gets the loss": watched(Formats, r"Formats.on_epoch_end reads logs\['loss'\]"),
    "callback gets the accuracy": watched(StopsByAccuracy, r"reads logs\['accuracy'\]"),
    "callback gets None": watched(AsksForNone),
    "callback class": watched(lambda: call.TerminateOnNaN, r"pass TerminateOnNaN\(...\)"),
    "callback function": watched(lambda: print, "print is no Keras callback"),
    "validation every 0 epochs": dense(
        "validation_freq=0 must be", fit={**PUBLIC, "validation_freq": 0}
    ),
    "validation after the last epoch": dense(
        "in none of the epochs 1 to 2: pass 1", fit={**PUBLIC, "validation_freq": 9}
    ),
    "validation batches of 0": dense(
        "validation_batch_size=0 must be", fit={**PUBLIC, "validation_batch_size": 0}
    ),
    "callback reads what is validated": watched(ReadsValidation, **PUBLIC),
    "callback reads what is validated at times": watched(
        ReadsValidation,
        r"reads logs\['val_loss'\], which some epochs do not show: pass validation_freq=1",
        validation_freq=2,
        **PUBLIC,
    ),
    "callback plots what is validated at times": watched(
        PlotsValidation, validation_freq=2, **PUBLIC
    ),
    "checkpoint named by what is validated at times": watched(
        lambda: call.ModelCheckpoint("{val_loss:.2f}.weights.h5", save_weights_only=True),
        "needs 'val_loss', which",
        validation_freq=2,
        **PUBLIC,
    ),
    "stop on what is validated at times": watched(
        lambda: call.EarlyStopping(), validation_freq=2, **PUBLIC
    ),
    "validation in the last epoch, read": watched(EndsOnValidation, validation_freq=[2], **PUBLIC),
    "validation not in the last epoch, read": watched(
        EndsOnValidation,
        r"on_train_end reads logs\['val_loss'\], which the last epoch does not show: .*freq=1",
        validation_freq=[1],
        **PUBLIC,
    ),
    "validation at some epochs": dense(fit={**PUBLIC, "validation_freq": [2]}),
    # Inputs.
    "lists": dense(x=X.tolist(), y=TARGET.tolist()),
    "list of inputs": network(of_two_inputs, x=[X, X]),
    "split": dense("pass validation_is_public=True", fit={"validation_split": 0.2}),
    "split of public records": dense(
        fit={"validation_split": 0.2, "validation_is_public": True, "epochs": 1}
    ),
    "class weights": dense("sample_weight=", fit={"class_weight": {0: 1.0, 1: 2.0}}),
    "workers": dense("workers=2 is not supported", fit={"workers": 2}),
    "dataset": dense(
        "Pass arrays, .*Copied",
        x=lambda: tf.data.Dataset.from_tensor_slices((X, TARGET)).batch(20),
        y=None,
        fit={"batch_size": None},
    ),
    "y missing": dense("y is missing", y=None),
    "texts without a layer": dense("Texts need a StringLookup", x=TEXT[:, None]),
    "texts as y": dense("y has texts", y=TEXT),
    "table": dense(r"\nEach column.* pass x.to_numpy\('float32'\)\.", x=TABLE),
    "table of one column": dense(r"pass x.to_numpy\('float32'\)\.", x=TABLE[["a"]]),
    "table as y": dense(r"pass y.to_numpy\('float32'\)\.", y=TABLE[["a"]]),
    "tables": dense(r"pass x.to_numpy\('float32'\) and y.to_numpy", x=TABLE, y=TABLE[["a"]]),
    "table as an array": dense(x=TABLE.to_numpy("float32"), y=TABLE[["a"]].to_numpy("float32")),
    "outputs without an axis": network(
        L.Dense(1), L.Reshape([]), words=r"outputs of shape \[n, k\], as of Dense"
    ),
    "one column": dense("expected min_ndim=2, found ndim=1", x=X[:, 0]),
    "structured records": network(structured, x={"number": X[:, 0], "city": TEXT, "code": CODE}),
    # Layers.
    "integers looked up": network(
        L.IntegerLookup(vocabulary=[0, 1, 2, 3, 4], output_mode="one_hot"),
        L.Dense(1),
        x=CODE[:, None],
    ),
    "texts of an adapted vocabulary": network(of_an_adapted_vocabulary, x=TEXT[:, None]),
    "feature space": network(of_a_feature_space, x={"a": X[:, :1], "city": TEXT[:, None]}),
    "texts, one missing": network(
        L.Hashing(4, output_mode="one_hot"),
        L.Dense(1),
        x=np.array([None, *TEXT[1:]], object)[:, None],
        words="x has texts beside other values, such as None .*: fill missing texts",
    ),
    "texts hashed": network(L.Hashing(4, output_mode="one_hot"), L.Dense(1), x=TEXT[:, None]),
    "texts vectorized": network(
        L.TextVectorization(vocabulary=["a", "b"], output_sequence_length=2),
        L.Embedding(4, 2),
        L.GlobalAveragePooling1D(),
        L.Dense(1),
        x=TEXT[:, None],
    ),
    "texts of any length": network(
        L.TextVectorization(vocabulary=["a", "b"]),
        L.Embedding(4, 2),
        L.GlobalAveragePooling1D(),
        L.Dense(1),
        x=TEXT[:, None],
        words="pass output_sequence_length=",
    ),
    "images flipped": network(
        L.Reshape([3, 1, 1]), L.RandomFlip(), L.Flatten(), L.Dense(1), words="augment the records"
    ),
    "layer that fails in training": network(
        FailsInTraining(), L.Dense(1), words="NameError: name 'unknown_name' is not defined"
    ),
    "layer without a gradient": network(Eigenvalues(), L.Dense(1), words="InvalidArgumentError: "),
    "images in groups": network(
        L.Reshape([3, 1, 1]),
        L.Conv2D(4, 2, padding="same"),
        L.Conv2D(4, 1, groups=2),
        L.Flatten(),
        L.Dense(1),
    ),
    "batches normalised": network(L.BatchNormalization(), L.Dense(1), words="GroupNormalization"),
    "two outputs": network(of_two_outputs, y=(TARGET, TARGET), words="several outputs"),
    "ends in a normal": network(L.Dense(2), of_normals(), loss=nll),
    "ends in a normal, y flat": network(L.Dense(2), of_normals(), y=TARGET[:, 0], loss=nll),
    "ends in a normal, y wide": network(
        L.Dense(2), of_normals(), y=X, loss=nll, words=r"y has shape \(3,\) a record"
    ),
    "ends in IndependentNormal": network(
        L.Dense(2), tfpl.IndependentNormal(1), loss=nll, metrics=["mae"], fit=PUBLIC
    ),
    "ends in classes": network(L.Dense(3), tfpl.OneHotCategorical(3), y=np.eye(3)[CLASS], loss=nll),
    "dense of random weights": network(
        tfpl.DenseVariational(2, trainable_normal, trainable_normal, kl_weight=1 / N),
        of_normals(),
        loss=nll,
    ),
    "dense of random signs": network(
        tfpl.DenseFlipout(1), words="DenseFlipout.*\nUse DenseReparameterization"
    ),
    "convolution of random signs": network(
        L.Reshape([3, 1]),
        tfpl.Convolution1DFlipout(1, 3),
        L.Flatten(),
        words="Conv1DFlipout.*\nUse Convolution1DReparameterization",
    ),
    "convolution of random weights": network(
        L.Reshape([3, 1]), tfpl.Convolution1DReparameterization(1, 3), L.Flatten()
    ),
    "divergence as a regularizer": network(
        L.Dense(2),
        tfpl.IndependentNormal(
            1,
            activity_regularizer=tfpl.KLDivergenceRegularizer(
                tfd.Independent(tfd.Normal([0.0], 1.0), 1)
            ),
        ),
        loss=nll,
    ),
    # Priors and likelihoods.
    "normal prior": posterior(lambda: tfd.Sample(tfd.Normal(0.0, 1.0), 3), linear, y=TARGET[:, 0]),
    "discrete prior": posterior(
        lambda: tfd.Sample(tfd.Bernoulli(0.5), 3), linear, y=TARGET[:, 0], words="sum them out"
    ),
    "prior of a batch": posterior(
        lambda: Exponential(tf.zeros(3)), linear, y=TARGET[:, 0], words="has batch shape"
    ),
    "texts as covariates": posterior(
        lambda: tfd.Normal(0.0, 1.0), linear, x=TEXT, y=TARGET[:, 0], words="x has texts"
    ),
    "own transformed outcomes": posterior(
        lambda: tfd.Normal(0.0, 1.0), lambda p, x: Exponential(p * x[:, 0]), y=np.exp(X[:, 1])
    ),
    "series": posterior(lambda: tfd.LogNormal(0.0, 1.0), level, x=SERIES),
    "series with a trend": posterior(lambda: tfd.LogNormal(0.0, 1.0), trend, x=SERIES),
    "series with a season": posterior(lambda: tfd.LogNormal(0.0, 1.0), seasonal, x=SERIES),
    "series of parts": posterior(lambda: tfd.LogNormal(0.0, 1.0), additive, x=SERIES[:, :3]),
    "series on covariates": posterior(
        lambda: tfd.Sample(tfd.Normal(0.0, 1.0), 1), regression, x=SERIES
    ),
    "hidden states": posterior(
        lambda: tfd.Sample(tfd.Normal(0.0, 1.0), 2),
        hidden,
        x=SERIES[..., 0],
        words="cannot map HiddenMarkovModel over records",
    ),
    "processes": posterior(lambda: tfd.LogNormal(0.0, 1.0), process, x=SERIES[..., 0]),
}
#: What works takes a second or two; these are run by `make test`, the others by `make test-slow`.
QUICK = {
    "metric without state",
    "callback asks first",
    "callback gets None",
    "list of inputs",
    "texts of an adapted vocabulary",
    "structured records",
    "ends in IndependentNormal",
    "dense of random weights",
}


def _cases():
    for name, usual in CALLS.items():
        slow = usual.words == WORKS and name not in QUICK
        yield pytest.param(usual, id=name, marks=[pytest.mark.slow] if slow else [])


def test_there_are_many():
    assert len(CALLS) >= 60


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("usual", list(_cases()))
def test_a_usual_call_works_or_is_refused_before_anything_is_spent(usual, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = []
    if usual.words == WORKS:
        usual.run(made)
        assert made[-1].num_releases > 0
        return
    with pytest.raises((TypeError, ValueError), match=usual.words) as caught:
        usual.run(made)
    lines = str(caught.value).strip().split("\n")
    assert len(lines) <= 2, lines
    assert max(map(len, lines)) < 500
    assert not made or made[-1].num_releases == 0
    assert not any(path.is_file() for path in tmp_path.iterdir())
