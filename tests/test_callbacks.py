"""TensorBoard shows released and public values, and they are the right ones (contract C7)."""

from __future__ import annotations

import textwrap

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp
from support.toy import records, toy

import tfp_dpvi as dpvi
from tfp_dpvi import keras

tfd = tfp.distributions
X = np.random.default_rng(0).normal(size=(100, 2)).astype("float32")
Y = (X[:, 0] > 0).astype("int32")


def fit(log_dir, **kwargs):
    model = dpvi.DPVI(
        tfd.Sample(tfd.Normal(0.0, 1.0), 2),
        lambda params, x: tfd.Bernoulli(logits=tf.linalg.matvec(x, params)),
        clipping="flat",
    )
    model.compile(
        optimizer=dpvi.optimizers.DPKerasAdamOptimizer(l2_norm_clip=0.5, learning_rate=0.05),
        epsilon=1.0,
        delta=1e-5,
    )
    history = model.fit(
        X,
        Y,
        batch_size=50,
        epochs=3,
        verbose=0,
        callbacks=[dpvi.callbacks.PrivacyTensorBoard(log_dir, **kwargs)],
    )
    return model, history


def read(log_dir):
    found: dict = {}
    for path in log_dir.glob("events*"):
        for event in tf.compat.v1.train.summary_iterator(str(path)):
            for value in event.summary.value:
                found.setdefault(value.tag, []).append(tf.make_ndarray(value.tensor))
    return found


def test_the_events_are_the_published_values(tmp_path):
    model, history = fit(tmp_path)
    found = read(tmp_path)
    assert set(found) == {
        "privacy/epsilon_spent",
        "privacy/epsilon_left",
        "privacy/noise_multiplier",
        "privacy/l2_norm_clip",
        "privacy/releases",
        "privacy/learning_rate",
        "surrogate_posterior/loc",
        "surrogate_posterior/scale",
        "privacy/report",
    }
    assert found["privacy/report"][0].item().decode() == textwrap.indent(
        str(model.privacy_report()), "    "
    )
    np.testing.assert_allclose(
        found["privacy/epsilon_spent"], history.history["epsilon"], rtol=1e-6
    )
    np.testing.assert_allclose(
        found["privacy/epsilon_left"], 1.0 - np.array(history.history["epsilon"]), atol=1e-6
    )
    assert [int(n) for n in found["privacy/releases"]] == [2, 4, 6]
    assert found["privacy/noise_multiplier"][0] == pytest.approx(
        model.privacy_plan.noise_multiplier
    )
    assert found["privacy/l2_norm_clip"][0] == 0.5
    assert found["privacy/learning_rate"][0] == pytest.approx(0.05)
    assert len(found["surrogate_posterior/loc"]) == 3


@pytest.mark.slow  # Names alone.
def test_the_weights_of_an_autoencoder_go_by_part_and_layer(tmp_path):
    encoder, decoder = (
        keras.Sequential(
            [keras.layers.Dense(4, name="hidden"), keras.layers.Dense(width, name="last"), last]
        )
        for width, last in (
            (2, tfp.layers.IndependentNormal(1)),
            (4, tfp.layers.IndependentNormal(2)),
        )
    )
    model = dpvi.DPVAE(encoder, decoder, tfd.MultivariateNormalDiag(tf.zeros(1), tf.ones(1)))
    model.compile(dpvi.optimizers.DPKerasSGDOptimizer(l2_norm_clip=1.0, noise_multiplier=5.0))
    model.fit(X, batch_size=50, verbose=0, callbacks=[dpvi.callbacks.PrivacyTensorBoard(tmp_path)])
    found = read(tmp_path)
    assert {tag for tag in found if not tag.startswith("privacy/")} == {
        f"{part}/{layer}/{kind}"
        for part in ("encoder", "decoder")
        for layer in ("hidden", "last")
        for kind in ("kernel", "bias")
    }
    assert "privacy/report" not in found  # It states epsilon at a delta, and there is none.


def test_the_report_after_an_early_stop_is_that_of_the_steps_that_ran(tmp_path):
    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = epoch == 2

    model = toy(5.0)
    callbacks = [dpvi.callbacks.PrivacyTensorBoard(tmp_path), Stop()]
    model.fit(*records(), batch_size=50, epochs=50, verbose=0, callbacks=callbacks)
    report = str(model.privacy_report())
    assert "12 steps" in report
    assert read(tmp_path)["privacy/report"][0].item().decode() == textwrap.indent(report, "    ")


def test_histograms_can_be_left_out(tmp_path):
    fit(tmp_path, histogram_freq=0)
    assert not any(tag.startswith("surrogate") for tag in read(tmp_path))


def test_a_directory_that_cannot_be_written_spends_nothing(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ValueError, match="log_dir"):
        fit(tmp_path / "file")


class Interrupt(keras.callbacks.Callback):
    """After the second epoch, once."""

    armed = True

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2 and self.armed:
            self.armed = False
            raise RuntimeError("the power went")


def test_an_interrupted_fit_loses_no_event(tmp_path):
    model = dpvi.DPVI(
        tfd.Sample(tfd.Normal(0.0, 1.0), 2),
        lambda params, x: tfd.Bernoulli(logits=tf.linalg.matvec(x, params)),
        clipping="flat",
    )
    model.compile(
        dpvi.optimizers.DPKerasSGDOptimizer(l2_norm_clip=1.0, noise_multiplier=5.0), delta=1e-5
    )
    callbacks = [dpvi.callbacks.PrivacyTensorBoard(tmp_path), Interrupt()]
    with pytest.raises(RuntimeError, match="the power went"):
        model.fit(X, Y, batch_size=50, epochs=3, verbose=0, callbacks=callbacks)
    model.fit(X, Y, batch_size=50, epochs=1, verbose=0, callbacks=callbacks)
    assert sorted(int(n) for n in read(tmp_path)["privacy/releases"]) == [2, 4, 6]
