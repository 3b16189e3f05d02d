"""The state of a model after fits that fail, are interrupted or change nothing, and after changed settings."""

from __future__ import annotations

import types

import numpy as np
import pytest
from support import internals

import tfp_dpvi as dpvi
from tfp_dpvi import keras, serialization
from tfp_dpvi._tf import tf, tfd

X = np.ones(20, np.float32)


def make(clipping="flat", **how):
    model = dpvi.DPVI(tfd.Normal(0.0, 1.0), lambda w, x: tfd.Normal(w * x, 1.0), clipping=clipping)
    how = how or {"noise_multiplier": 1.0}
    model.compile("sgd", l2_norm_clip=1.0, jit_compile=False, **how)
    return model


def fit(model, y=X, **how):
    return model.fit(X, y, **{"batch_size": 5, "epochs": 1, "verbose": 0, **how})


class At(keras.callbacks.Callback):
    def __init__(self, act, when="on_train_begin"):
        super().__init__()
        setattr(self, when, lambda *_: act())


def test_no_ledger_takes_anothers_place_during_a_fit():
    """C6: a fit goes on charging the ledger that it began with."""
    model = make(epsilon=1.0, delta=1e-5)
    with pytest.raises(RuntimeError, match="while fit runs"):
        fit(model, callbacks=[At(lambda: model.set_ledger(dpvi.PrivacyLedger()))])


def test_the_account_that_is_shown_is_a_copy():
    model = make(epsilon=1.0, delta=1e-5)
    fit(model)
    model.privacy_account.ledger = dpvi.PrivacyLedger()
    assert model.privacy_ledger.num_releases == 4
    with pytest.raises(dpvi.privacy.BudgetExhaustedError):
        fit(model)


def test_an_error_of_the_ledger_at_the_end_leaves_the_model_usable(monkeypatch):
    model = make()
    with monkeypatch.context() as patch:
        patch.setattr(dpvi.PrivacyLedger, "confirm", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            fit(model)
    fit(model)


def test_a_second_fit_waits_even_if_the_first_ends_meanwhile():
    """It has not the lock: it must not run."""
    model = make()
    taken = types.SimpleNamespace(acquire=lambda blocking: False, locked=lambda: False)
    internals.replace_lock(model, taken)
    with pytest.raises(RuntimeError, match="while fit runs"):
        fit(model)
    assert model.num_releases == 0


def test_an_interrupted_fit_without_steps_keeps_the_posterior():
    model = make("paired")
    fit(model, epochs=20)
    before = model.posterior_summary().columns["mean"]
    with pytest.raises(KeyboardInterrupt):
        fit(model, callbacks=[At(lambda: (_ for _ in ()).throw(KeyboardInterrupt))])
    assert model.posterior_summary().checks is not None
    np.testing.assert_array_equal(model.posterior_summary().columns["mean"], before)


def test_a_refused_fit_leaves_no_plan():
    ledger = dpvi.PrivacyLedger()
    ledger.set_budget(0.01, 1e-5)
    model = make(noise_multiplier=1.0, ledger=ledger)
    with pytest.raises(dpvi.privacy.BudgetExhaustedError):
        fit(model)
    assert model.privacy_plan is None


def test_predictions_follow_a_fit_without_pairs_and_changed_settings():
    model = make("paired")
    fit(model, epochs=20)
    model.predict(X)
    model.clipping = "flat"
    fit(model, -5.0 * X, epochs=5)
    expected = model.predictive(X).mean()
    np.testing.assert_allclose(model.predict(X), expected, rtol=1e-5)
    model.num_predictive_draws = 1
    one = model.predict(X)
    np.testing.assert_allclose(one, model.predictive(X).mean(), rtol=1e-5)


def test_other_weights_have_no_calibrated_posterior(tmp_path):
    model, other = make("paired"), make("paired")
    fit(model, epochs=20)
    other.save_weights(tmp_path / "other.h5")
    model.load_weights(tmp_path / "other.h5")
    assert model.posterior is model.surrogate_posterior


@pytest.mark.parametrize("name", ["_compared", "_batch_losses"])
def test_a_hook_under_its_old_name_is_refused(name):
    with pytest.raises(TypeError, match=f"Own.{name} is now {name[1:]}"):
        type("Own", (dpvi.DPModel,), {name: lambda self, *args: None})


class Named(dpvi.DPModel):
    """Arguments that a user may choose for their model."""

    def __init__(self, privacy=0.5, **kwargs):
        super().__init__(**kwargs)
        self.privacy = privacy
        self.w = self.add_weight(name="w", shape=[], initializer="zeros")

    def record_loss(self, x, y):
        return tf.square(self.w * x - y)

    def get_config(self):
        return {**super().get_config(), "privacy": self.privacy}


def test_an_argument_may_be_called_privacy(tmp_path):
    model = Named(0.25)
    model.compile("sgd", l2_norm_clip=1.0, noise_multiplier=1.0)
    fit(model)
    model.save(tmp_path / "model.keras")
    loaded = dpvi.load_model(tmp_path / "model.keras", custom_objects={"Named": Named})
    assert loaded.privacy == 0.25
    assert loaded.num_releases == 4


def test_a_file_names_no_function_as_a_layer():
    """Keras would find `os.system`, and a `partial` of it would be called."""
    keras_function = {
        "class_name": "function",
        "config": "system",
        "module": "os",
        "registered_name": "system",
    }
    for config in (
        {"keras": keras_function},
        {"partial": {"keras": keras_function}, "args": ["true"], "kwargs": {}},
    ):
        with pytest.raises((ValueError, TypeError)):
            serialization.decode(config)
    with pytest.raises(ValueError, match="files may name"):
        serialization.decode({"library": "tfp_dpvi.synthetic.synthesizer:Synthesizer.save"})
    with pytest.raises(ValueError, match="files may name"):
        serialization.decode({"library": "tfp_dpvi.divergences.regularizers:MMD.__init__"})


class TwoInputs(dpvi.DPModel):
    def __init__(self):
        super().__init__()
        self.w = self.add_weight(name="w", shape=[], initializer="ones")

    def call(self, inputs):
        return self.w * (inputs[0] + 2.0 * inputs[1])

    def record_loss(self, x, y):
        return tf.square(self.w * (x[0] + 2.0 * x[1]) - y)


def test_predict_takes_what_keras_takes():
    """Several inputs as a list, and `steps` by its place."""
    model = TwoInputs()
    model.compile("sgd", l2_norm_clip=1.0, noise_multiplier=1.0)
    model.fit((X, X), X, batch_size=20, epochs=1, verbose=0)
    of_tuple = model.predict((X, 2.0 * X))
    np.testing.assert_array_equal(model.predict([X, 2.0 * X]), of_tuple)
    assert len(model.predict((X, X), 5, 0, 2)) == 10


def test_evaluate_takes_the_table_of_the_fit():
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"a": X})
    model = dpvi.DPVI(
        tfd.Normal(0.0, 1.0), lambda w, x: tfd.Normal(w * x["a"], 1.0), clipping="flat"
    )
    model.compile("sgd", l2_norm_clip=1.0, noise_multiplier=1.0, jit_compile=False)
    fit_to_table = {"batch_size": 5, "epochs": 1, "verbose": 0}
    model.fit(table, X, **fit_to_table)
    by_column = model.evaluate({"a": X}, X, verbose=0)
    assert model.evaluate(table, X, verbose=0) == pytest.approx(by_column)
