"""Networks that end in a distribution or begin with a table: TFP's and Keras's own layers, trained privately."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp
from support.logs import no_fallback
from support.toy import adam

import tfp_dpvi as dpvi
from tfp_dpvi import keras

L, tfd, tfpl = keras.layers, tfp.distributions, tfp.layers
N = 60
X = np.random.default_rng(0).normal(size=(N, 3)).astype("float32")
Y = 2.0 * X[:, :1]
CITY = np.array(["a", "b", "c"] * 20)
QUIET = {"batch_size": 20, "verbose": 0}


def nll(y, distribution):
    return -distribution.log_prob(y)


def normal(kernel_size, bias_size=0, dtype=None):
    num = kernel_size + bias_size
    last = tfpl.DistributionLambda(lambda t: tfd.Independent(tfd.Normal(t[:num], 0.5), 1))
    return keras.Sequential([tfpl.VariableLayer(num, initializer="ones", dtype=dtype), last])


def fixed(kernel_size, bias_size=0, dtype=None):
    num = kernel_size + bias_size
    return lambda t: tfd.Independent(tfd.Normal(tf.zeros(num), 1.0), 1)


def model_of(*layers, loss=nll, noise=1.0, **settings):
    model = dpvi.DPKerasModel(keras.Sequential(list(layers)), seed=1, **settings)
    model.compile(adam(noise, clip=1e3), loss=loss, delta=1e-5, metrics=["mae"])
    return model


def test_a_network_that_ends_in_a_normal_predicts_its_mean():
    model = model_of(L.Dense(2), tfpl.IndependentNormal(1))
    public = {"validation_data": (X, Y), "validation_is_public": True}
    history = model.fit(X, Y, **QUIET, **public).history
    distribution = model(X)
    assert isinstance(distribution, tfd.Distribution)
    np.testing.assert_allclose(model.predict(X), distribution.mean(), rtol=1e-5)
    error = np.abs(model.predict(X) - Y).mean()
    assert history["val_mean_absolute_error"][-1] == pytest.approx(error, rel=1e-5)
    loss = -np.mean(distribution.log_prob(Y))
    assert history["val_loss"][-1] == pytest.approx(loss, rel=1e-4)


def test_the_clipped_sum_is_that_of_a_network_of_tensors():
    """The same network with the same density, written by hand."""

    def by_hand(y, t):
        scale = 1e-5 + tf.nn.softplus(np.log(np.expm1(1.0)) + t[..., 1:])
        return -tf.reduce_sum(tfd.Normal(t[..., :1], scale).log_prob(y), axis=-1)

    ends = []
    last = tfpl.DistributionLambda(
        lambda t: tfd.Independent(
            tfd.Normal(t[..., :1], 1e-5 + tf.nn.softplus(np.log(np.expm1(1.0)) + t[..., 1:])), 1
        )
    )
    for layers, loss in (([L.Dense(2), last], nll), ([L.Dense(2)], by_hand)):
        keras.utils.set_random_seed(0)
        model = dpvi.DPKerasModel(keras.Sequential(layers), seed=1)
        model.compile(adam(1.0), loss=loss, delta=1e-5)
        model.fit(X, Y, **QUIET)
        ends.append(np.concatenate([v.numpy().ravel() for v in model.trainable_variables]))
    np.testing.assert_allclose(ends[0], ends[1], rtol=1e-4, atol=1e-6)


def test_the_divergence_of_random_weights_is_exact_and_not_clipped():
    """It depends on no record; a regularizer of activities does, and stays in a record's loss."""
    dense = tfpl.DenseVariational(
        2, normal, fixed, kl_weight=1.0 / N, kl_use_exact=True, use_bias=False
    )
    prior = tfd.Independent(tfd.Normal([0.0], 1.0), 1)
    last = tfpl.IndependentNormal(1, activity_regularizer=tfpl.KLDivergenceRegularizer(prior))
    model = model_of(dense, last)
    model.make_data(X, Y, batch_size=20)
    places = model._training.exact_losses
    assert len(places) == 1
    weights = model.trainable_variables[0].numpy()
    divergence = tfd.kl_divergence(tfd.Normal(weights, 0.5), tfd.Normal(0.0, 1.0)).numpy().sum()
    exact = model.data_independent_loss(N)
    assert float(exact) == pytest.approx(divergence / N, rel=1e-5)
    gradient = model.exact_terms(N)["data_independent"][0]
    np.testing.assert_allclose(gradient, weights / N, rtol=1e-5)
    model(X[:5])
    activities = model.losses_of_record()  # Keras adds one for the distribution, one for its draw.
    assert activities
    assert all(float(part) != pytest.approx(divergence / N, rel=1e-3) for part in activities)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_an_exact_divergence_is_not_said_to_need_splitting(caplog):
    def divergence(q, p, _):
        return tfd.kl_divergence(q, p) / N

    model = model_of(
        L.Dense(2),
        tfpl.DenseReparameterization(2, kernel_divergence_fn=divergence),
        tfpl.IndependentNormal(1),
    )
    model.make_data(X, Y, batch_size=20)
    assert len(model._training.exact_losses) == 1
    assert "It depends on no record" in caplog.text
    assert "cannot be split" not in caplog.text


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_random_weights_are_drawn_without_a_loop_over_records():
    model = model_of(tfpl.DenseReparameterization(1), loss="mse")
    with no_fallback():
        model.fit(X, Y, **QUIET)
    assert model.num_releases > 0


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "layers",
    [
        [tfpl.Convolution1DReparameterization(2, 2, activation="relu"), L.Flatten()],
        pytest.param(
            [
                L.Reshape([3, 1, 1]),
                tfpl.Convolution2DReparameterization(2, 2, padding="same", strides=2),
                tfpl.Convolution2DReparameterization(2, 2, padding="same"),
                L.Flatten(),
            ],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            [L.Reshape([3, 1, 1, 1]), tfpl.Convolution3DReparameterization(2, 1), L.Flatten()],
            marks=pytest.mark.slow,
        ),
        pytest.param([L.Conv1DTranspose(2, 2), L.Flatten()], marks=pytest.mark.slow),
        pytest.param([L.SeparableConv1D(2, 2), L.Flatten()], marks=pytest.mark.slow),
    ],
)
def test_gradients_of_a_convolutions_weights_are_computed_without_a_loop(layers):
    model = model_of(L.Reshape([3, 1]), *layers, L.Dense(1), loss="mse")
    with no_fallback():
        model.fit(X, Y, **QUIET)
    assert model.num_releases > 0


def test_outcomes_of_another_shape_would_broadcast_and_are_refused():
    model = model_of(L.Dense(2), tfpl.IndependentNormal(1))
    with pytest.raises(ValueError, match=r"y has shape \(3,\) a record"):
        model.fit(X, X, **QUIET)
    assert model.num_releases == 0


def test_texts_are_looked_up_predicted_saved_and_exported(tmp_path):
    pd = pytest.importorskip("pandas")
    number, city = L.Input([1], name="number"), L.Input([1], dtype="string", name="city")
    looked_up = L.StringLookup(vocabulary=["a", "b", "c"], output_mode="one_hot")(city)
    output = L.Dense(1)(L.Concatenate()([number, looked_up]))
    model = dpvi.DPKerasModel(keras.Model({"number": number, "city": city}, output))
    model.compile(adam(1.0), loss="mse", delta=1e-5)
    frame = pd.DataFrame({"number": X[:, 0], "city": CITY})
    model.fit(dict(frame), Y, **QUIET)
    predicted = model.predict(frame)
    np.testing.assert_allclose(model.predict({"number": X[:, 0], "city": CITY}), predicted)
    assert model.evaluate(frame, Y, verbose=0) == pytest.approx(np.mean((predicted - Y) ** 2))
    model.save(tmp_path / "model.keras")
    np.testing.assert_allclose(dpvi.load_model(tmp_path / "model.keras").predict(frame), predicted)
    model.export(tmp_path / "export")
    served = tf.saved_model.load(str(tmp_path / "export"))
    result = served.predict(number=tf.constant(X[:, 0]), city=tf.constant(CITY))
    np.testing.assert_allclose(result["mean"], predicted, rtol=1e-5)
    frame.loc[3, "city"] = None
    with pytest.raises(ValueError, match="has missing texts"):
        model.predict(frame)


def test_a_layer_that_mixes_records_behind_a_table_is_seen():
    mixing = L.Lambda(lambda t: t - tf.reduce_mean(t, axis=0, keepdims=True))
    lookup = L.StringLookup(vocabulary=["0", "1", "100"], output_mode="one_hot")
    model = dpvi.DPKerasModel(keras.Sequential([lookup, mixing, L.Dense(1)]), gradients="ghost")
    model.compile(adam(1.0), loss="mse", delta=1e-5)
    with pytest.raises(ValueError, match="let"):
        model.fit(CITY[:, None], Y, **QUIET)
    assert model.num_releases == 0
