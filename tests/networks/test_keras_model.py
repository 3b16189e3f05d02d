"""`DPKerasModel`: Keras networks and losses, by ghost clipping where their layers allow it, else record by record."""

import logging

import numpy as np
import pytest
from support import internals, replay, toy
from support.siblings import slow

import tfp_dpvi as dpvi
from tfp_dpvi import keras
from tfp_dpvi._tf import tf

layers = keras.layers
RNG = np.random.default_rng(0)
X = RNG.normal(size=[40, 6]).astype("float32")
LABELS = (X[:, 0] > 0).astype("int32") + (X[:, 1] > 1)


def dense(outputs=3, **last):
    return keras.Sequential([layers.Dense(5, "tanh"), layers.Dense(outputs, **last)])


def convolutional():
    return keras.Sequential(
        [
            layers.Conv2D(4, 3, 2, activation="relu"),
            layers.MaxPool2D(2, 1),
            layers.Flatten(),
            layers.Dense(3),
        ]
    )


def sparse():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def compiled(network=None, loss=None, how=None, **settings):
    model = dpvi.DPKerasModel(
        network or dense(), **{k: settings.pop(k) for k in ("gradients", "seed") if k in settings}
    )
    model.compile(how or toy.sgd(1.0), loss=loss or sparse(), delta=1e-5, **settings)
    return model


def sums_of(model, x, y, clip=None):
    """Compiled: records, mask, clip -> the clipped sum; after the model was tried on records of these shapes."""
    internals.check_and_price(model, x, 20.0, y=y)
    gradient = internals.clipped_gradient(model)
    step = gradient.draw(tf.constant([1, 2], tf.int64))

    @tf.function(autograph=False)
    def compute(records, mask):
        return step.clipped_sum(records, mask, tf.constant([3, 4], tf.int64))[0].tensors

    return lambda records, mask: [part.numpy() for part in compute(records, mask)]


def by_single_records(model, loss, records, clip):
    """One backward pass for each record, its gradient clipped: the sums."""
    totals = [np.zeros(v.shape) for v in model.trainable_variables]
    weights = records.get("sample_weight", np.ones(len(records["x"]), "float32"))
    for x, y, weight in zip(records["x"], records["y"], weights, strict=True):
        with tf.GradientTape() as tape:
            value = weight * tf.reduce_mean(loss(y[None], model.network(x[None])))
        found = [
            np.asarray(part, np.float64) for part in tape.gradient(value, model.trainable_variables)
        ]
        length = np.sqrt(sum(np.sum(part**2) for part in found))
        for total, part in zip(totals, found, strict=True):
            total += part * min(1.0, clip / length)
    return totals


CASES = {
    "labels": (dense, sparse, X, LABELS),
    "labels in a column": (dense, sparse, X, LABELS[:, None]),
    "probabilities": (
        lambda: dense(3, activation="softmax"),
        lambda: "sparse_categorical_crossentropy",
        X,
        LABELS,
    ),
    "one hot": (
        dense,
        lambda: keras.losses.CategoricalCrossentropy(from_logits=True, reduction="none"),
        X,
        np.eye(3, dtype="float32")[LABELS],
    ),
    "binary": (
        lambda: dense(1, activation="sigmoid"),
        lambda: "binary_crossentropy",
        X,
        LABELS.astype(bool) * 1,
    ),
    "a number": (lambda: dense(1), lambda: "mse", X, X[:, 0]),
    "several numbers": (lambda: dense(2), lambda: keras.losses.Huber(), X, X[:, :2]),
    "images": (convolutional, sparse, RNG.uniform(size=[40, 9, 8, 1]).astype("float32"), LABELS),
}


@pytest.mark.parametrize(
    "case", [case if case in ("labels", "a number", "images") else slow(case) for case in CASES]
)
def test_gradients_are_those_of_single_records(case):
    """C3: whatever engine, loss and shape of y, against one backward pass for each record by Keras's own loss."""
    network, make_loss, x, y = CASES[case]
    model = compiled(network(), make_loss(), toy.sgd(1.0, clip=0.3))
    weights = RNG.uniform(size=40).astype("float32")
    records = {"x": x, "y": y, "sample_weight": weights}
    found = sums_of(model, x, y)(records, np.ones(40, bool))
    assert internals.clipped_gradient(model).batchwise
    loss = make_loss() if not isinstance(make_loss(), str) else keras.losses.get(make_loss())

    def shaped(y, outputs):
        return loss(y[..., None] if case == "a number" or case == "binary" else y, outputs)

    wanted = by_single_records(model, shaped, records, 0.3)
    for mine, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=2e-5)


@pytest.mark.parametrize("gradients", ["ghost", "vectorized"])
def test_one_record_moves_the_sum_by_the_clip_at_most(gradients):
    """C3, C8: replay on neighbours; a record whose label is out of range contributes exactly zero."""
    model = compiled(how=toy.sgd(1.0, clip=0.2), gradients=gradients)
    sums = sums_of(model, X, LABELS)
    records, other = {"x": X * 10, "y": LABELS}, {"x": X[::-1] * 30, "y": np.roll(LABELS, 3)}
    full, removed = replay.check_neighbours(lambda r, m, c: sums(r, m), records, other, 7, 0.2)
    np.testing.assert_allclose(replay.distance(full, removed), 0.2, rtol=1e-3)
    for bad in (-1, 3, 2**31 - 1):
        wrong = LABELS.copy()
        wrong[7] = bad
        for part, without in zip(
            sums({"x": X * 10, "y": wrong}, np.ones(40, bool)), removed, strict=True
        ):
            np.testing.assert_array_equal(part, without)


def test_dropout_is_the_same_in_norms_and_gradients():
    """C5: alone in its batch a record is as long as the clip, whatever is dropped; and masks are fresh."""
    network = keras.Sequential([layers.Dense(20, "tanh"), layers.Dropout(0.5), layers.Dense(3)])
    model = compiled(network, how=toy.sgd(1.0, clip=0.01))
    sums = sums_of(model, X, LABELS)
    found = [sums({"x": X[:1], "y": LABELS[:1]}, np.ones(1, bool)) for _ in range(4)]
    for parts in found:
        np.testing.assert_allclose(np.sqrt(sum(np.sum(part**2) for part in parts)), 0.01, rtol=1e-4)
    assert not np.allclose(found[0][2], found[1][2])


class Squared(layers.Layer):
    """Adds a loss of its input, which cannot be told apart by record in a batch."""

    def call(self, x):
        self.add_loss(tf.reduce_sum(tf.square(x)))
        return x


def test_what_layers_cannot_do_is_done_record_by_record(caplog):
    """`add_loss` goes through the clip; the log says that it takes longer, and "ghost" refuses."""
    network = keras.Sequential([layers.Dense(3), Squared()])
    model = compiled(network, "mse", toy.sgd(0.0, clip=np.inf, rate=0.1))
    with caplog.at_level(logging.WARNING, logger="tfp_dpvi"):
        found = sums_of(model, X, X[:, :3])({"x": X, "y": X[:, :3]}, np.ones(40, bool))
    assert "tf.vectorized_map" in caplog.text
    with tf.GradientTape() as tape:
        outputs = network.layers[0](X)
        value = tf.reduce_sum(tf.square(outputs)) + tf.reduce_sum(tf.square(outputs - X[:, :3])) / 3
    for mine, theirs in zip(found, tape.gradient(value, model.trainable_variables), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-4)
    strict = compiled(network, "mse", gradients="ghost")
    with pytest.raises(ValueError, match="gradients='ghost' does not support"):
        strict.fit(X, X[:, :3], verbose=0)
    assert strict.privacy_ledger.num_releases == 0


class Late(layers.Layer):
    """Adds a loss as a function of what it sees, which Keras calls later."""

    def call(self, x):
        self.add_loss(lambda: tf.reduce_sum(tf.square(x)))
        return x


@pytest.mark.parametrize("gradients", ["ghost", "vectorized"])
def test_a_loss_that_a_call_adds_as_a_function_is_refused(gradients):
    model = compiled(
        keras.Sequential([layers.Input([6]), layers.Dense(3), Late()]), "mse", gradients=gradients
    )
    with pytest.raises(ValueError, match=r"late.*calls add_loss with a function.*pass the tensor"):
        model.fit(X, X[:, :3], verbose=0)
    assert model.privacy_ledger.num_releases == 0


@pytest.mark.parametrize("gradients", ["ghost", "vectorized"])
def test_weight_regularizers_are_exact(gradients):
    """C2: of a loss that is zero the penalty alone is left, unclipped."""
    network = keras.Sequential(
        [layers.Dense(3, use_bias=False, kernel_regularizer=keras.regularizers.L2(0.5))]
    )
    model = compiled(
        network, lambda y, o: 0.0 * o, toy.sgd(0.0, clip=1e-3, rate=0.1), gradients=gradients
    )
    network(X)
    before = network.layers[0].kernel.numpy()
    model.fit(X, X[:, :3], batch_size=40, epochs=1, verbose=0)
    np.testing.assert_allclose(network.layers[0].kernel, before * 0.9, rtol=1e-5)


@pytest.mark.parametrize("gradients", ["auto", slow("vectorized")])
def test_batch_normalisation_is_refused_unless_frozen(gradients):
    norm = layers.BatchNormalization()
    network = keras.Sequential([layers.Dense(4), norm, layers.Dense(3)])
    model = compiled(network, gradients=gradients)
    with pytest.raises(ValueError, match="GroupNormalization"):
        model.fit(X, LABELS, batch_size=10, verbose=0)
    assert model.privacy_ledger.num_releases == 0
    norm.trainable = False
    model.compile(toy.sgd(1.0), loss=sparse())
    model.fit(X, LABELS, batch_size=10, verbose=0)
    np.testing.assert_array_equal(norm.moving_mean, np.zeros(4))


def test_it_learns_evaluates_and_predicts():
    """Keras's habits: metrics by name in `evaluate` and validation, none of training records in `History`."""
    keras.utils.set_random_seed(1)
    network = dense()
    model = compiled(
        network, how=toy.adam(None, rate=0.05), metrics=["accuracy"], epsilon=50.0, accountant="rdp"
    )
    before = model.evaluate(X, LABELS, verbose=0, return_dict=True)
    history = model.fit(
        X,
        LABELS,
        batch_size=20,
        epochs=15,
        verbose=0,
        validation_data=(X, LABELS),
        validation_is_public=True,
    ).history
    assert set(history) == {"epsilon", "val_loss", "val_accuracy"}
    after = model.evaluate(X, LABELS, verbose=0, return_dict=True)
    assert set(after) == {"loss", "accuracy"}
    assert after["loss"] < before["loss"]
    outputs = model.predict(X)
    np.testing.assert_allclose(outputs, network(X), rtol=1e-5, atol=1e-6)
    assert after["accuracy"] == pytest.approx(np.mean(outputs.argmax(1) == LABELS))
    assert after["loss"] == pytest.approx(float(sparse()(LABELS, outputs)), rel=1e-4)
    assert 45 < model.privacy_report().epsilon <= 50


@pytest.mark.parametrize(
    ("loss", "kind"),
    [
        ("sparse_categorical_crossentropy", keras.metrics.SparseCategoricalAccuracy),
        (keras.losses.CategoricalFocalCrossentropy(), keras.metrics.CategoricalAccuracy),
        ("BinaryCrossentropy", keras.metrics.BinaryAccuracy),
    ],
)
def test_accuracy_is_that_of_the_loss(loss, kind):
    model = compiled(loss=loss, metrics="accuracy")
    assert [type(metric) for metric in model.metrics if metric.name == "accuracy"] == [kind]


def test_privatised_metrics_go_beside():
    clipped = dpvi.metrics.PrivateClippedFraction()
    model = compiled(
        metrics=[clipped, "accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2, name="top")]
    )
    history = model.fit(X, LABELS, batch_size=20, verbose=0).history
    assert set(history) == {"epsilon", clipped.name}
    assert set(model.evaluate(X, LABELS, verbose=0, return_dict=True)) >= {
        "loss",
        "accuracy",
        "top",
    }


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"loss": None}, "loss=None"),
        ({"loss": ["mse", "mae"]}, "one Keras loss"),
        ({"loss": "no_such_loss"}, "no_such_loss"),
        ({"loss": "mse", "metrics": ["accuracy"]}, "binary_accuracy"),
    ],
)
def test_bad_arguments_of_compile_name_themselves(arguments, words):
    with pytest.raises(ValueError, match=words):
        dpvi.DPKerasModel(dense()).compile(toy.sgd(1.0), **arguments)


@pytest.mark.parametrize(
    ("network", "loss", "y", "words"),
    [
        (dense, sparse(), None, "y is missing"),
        (dense, lambda y, o: tf.reduce_mean(o), LABELS, "returned a scalar"),
        (dense, "mse", X[:, :5], "network or loss failed"),
        (lambda: layers.Lambda(lambda x: [x, x]), "mse", X, "several outputs"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_spent(network, loss, y, words):
    model = compiled(network(), loss)
    with pytest.raises(ValueError, match=words):
        model.fit(X, y, verbose=0)
    assert model.privacy_ledger.num_releases == 0


def test_a_network_is_a_layer():
    with pytest.raises(TypeError, match="network must be a Keras model"):
        dpvi.DPKerasModel(np.ones(3))


def weighed_by_label(y, outputs):
    weights = 1.0 + tf.cast(y, tf.float32)
    return (
        keras.losses.sparse_categorical_crossentropy(y, outputs, from_logits=True)
        * weights
        / tf.reduce_mean(weights)
    )


@pytest.mark.parametrize("gradients", ["auto", "vectorized"])
@pytest.mark.parametrize("mixes", ["network", "loss"])
def test_a_network_or_loss_of_several_records_is_refused(mixes, gradients):
    """One record at a time, the first has no input, and the second a loss of 0."""
    mean = layers.Lambda(lambda x: x - tf.reduce_mean(x, axis=0))
    parts = [mean, layers.Dense(3)] if mixes == "network" else [layers.Dense(3)]
    pairs = lambda y, p: tf.reduce_mean((p - tf.reduce_mean(p, axis=0)) ** 2, axis=-1)  # noqa: E731
    loss = sparse() if mixes == "network" else pairs
    model = compiled(keras.Sequential(parts), loss, gradients=gradients)
    with pytest.raises(ValueError, match="influence each other") as refusal:
        model.fit(X, LABELS, batch_size=20, verbose=0)
    assert str(refusal.value).count("\n") == 1
    assert model.privacy_ledger.num_releases == 0


@pytest.mark.parametrize(
    ("network", "loss", "x"),
    [
        (dense, weighed_by_label, X),
        slow(
            lambda: keras.Sequential(
                [
                    layers.Lambda(
                        lambda x: tf.cast(x, tf.float32) / tf.cast(tf.reduce_max(x), tf.float32)
                    ),
                    layers.Dense(3),
                ]
            ),
            sparse(),
            RNG.integers(0, 256, X.shape).astype("uint8"),
        ),
        (
            lambda: keras.Sequential(
                [
                    layers.Lambda(lambda x: tf.cast(x > tf.reduce_mean(x, axis=0), tf.float32)),
                    layers.Dense(4),
                    layers.Dropout(0.1),
                    layers.Dense(3),
                ]
            ),
            sparse(),
            X,
        ),
    ],
    ids=["labels", "bytes", "dropout"],
)
def test_mixing_by_integers_or_under_dropout_is_found(network, loss, x):
    """C3: the trial varies integers too, and tries in inference mode where layers draw."""
    model = compiled(network(), loss, gradients="ghost")
    with pytest.raises(ValueError, match="influence each other"):
        model.fit(x, LABELS, batch_size=20, verbose=0)
    assert model.privacy_ledger.num_releases == 0


def test_a_label_out_of_range_beside_an_ignored_class_counts_nothing():
    """C8: its own operation would stop the step, and print the batch's labels."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-1)
    model = compiled(dense(), loss)
    labels = LABELS.copy()
    labels[:2] = 77, -1
    model.fit(X, labels, batch_size=20, epochs=3, verbose=0)
    assert np.isfinite(model.predict(X)).all()


@pytest.mark.slow  # `test_saving.py` has the other models.
def test_saved_and_loaded_it_goes_on(tmp_path):
    model = compiled(how=toy.adam(1.0), metrics=["accuracy"], seed=None)
    model.fit(X, LABELS, batch_size=20, epochs=2, verbose=0)
    path = tmp_path / "model.keras"
    model.save(path)
    loaded = dpvi.load_model(path)
    np.testing.assert_array_equal(loaded.predict(X), model.predict(X))
    assert loaded.evaluate(X, LABELS, verbose=0) == pytest.approx(
        model.evaluate(X, LABELS, verbose=0)
    )
    loaded.fit(X, LABELS, batch_size=20, epochs=1, verbose=0)
    assert loaded.privacy_ledger.num_releases == 6
    model.export(tmp_path / "exported")
    served = tf.saved_model.load(str(tmp_path / "exported")).signatures["predict"]
    np.testing.assert_allclose(served(x=tf.constant(X))["mean"], model.predict(X), rtol=1e-5)


@pytest.mark.parametrize(("outputs", "columns"), [(1, 2), (2, 1)])
def test_outcomes_that_would_broadcast_are_refused(outputs, columns):
    """As the losses of Keras do in silence: each output would be compared with each outcome."""
    model = compiled(dense(outputs), "mse")
    with pytest.raises(ValueError, match="make them the same"):
        model.fit(X, X[:, :columns], batch_size=20, verbose=0)
