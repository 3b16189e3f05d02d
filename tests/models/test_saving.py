"""Saved models come back whole in a fresh process, with their books, and hold neither a record nor a key (C6, C7, C10)."""

from __future__ import annotations

import functools
import json
import pathlib
import shutil
import subprocess
import sys
import textwrap
import zipfile

import h5py
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp
from support import internals
from support.siblings import slow

import tfp_dpvi as dpvi
from tfp_dpvi import _random, keras
from tfp_dpvi.privacy.errors import LedgerError

tfd = tfp.distributions
X = (np.random.default_rng(7).normal(size=(60, 3)) * 1.2345678).astype("float32")
Y = (X[:, 0] > 0).astype("int64")
REAL = X[:, :1]  # What a line learns.

PARTS = """
import functools
import numpy as np, tensorflow as tf, tensorflow_probability as tfp
import tfp_dpvi as dpvi
tfd, keras = tfp.distributions, dpvi.keras
tfkl = keras.layers

@dpvi.register("tests_prior")
def prior(scale=2.0):
    return tfd.JointDistributionNamed({"w": tfd.Sample(tfd.Normal(0.0, scale), 3), "b": tfd.Normal(0.0, 1.0)})

@dpvi.register("tests_likelihood")
def likelihood(params, x):
    return tfd.Bernoulli(logits=tf.linalg.matvec(x, params["w"]) + params["b"])

@dpvi.register("tests_records")
def records(params):
    return tfd.Independent(tfd.Normal(params["w"], 1.0), 1)

@dpvi.register("tests_encoder")
def encoder(width=8):
    return keras.Sequential([
        tfkl.Dense(width, activation="relu"), tfkl.Dense(4),
        tfp.layers.DistributionLambda(lambda t: tfd.Independent(tfd.Normal(t[..., :2], tf.nn.softplus(t[..., 2:])), 1))])

@dpvi.register("tests_decoder")
def decoder():
    return keras.Sequential([tfkl.Dense(6), tfp.layers.IndependentNormal(3)])

@dpvi.register("tests_codes")
def codes():
    return tfd.Independent(tfd.Normal(tf.zeros(2), 1.0), 1)

@keras.utils.register_keras_serializable("tests", "Line")
class Line(dpvi.DPModel):
    def __init__(self, units=1, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.dense = tfkl.Dense(units)

    def call(self, x):
        return self.dense(x)

    def record_loss(self, x, y):
        return tf.reduce_sum(tf.square(self(x[None])[0] - y))

    def get_config(self):
        return {**super().get_config(), "units": self.units}
"""
exec(PARTS)

P = globals()


def adam(**kwargs):
    return dpvi.optimizers.DPKerasAdamOptimizer(l2_norm_clip=1.0, learning_rate=0.05, **kwargs)


def fit(model, *data, optimizer=None, **kwargs):
    model.compile(optimizer or adam(noise_multiplier=3.0), delta=1e-5, jit_compile=False, **kwargs)
    model.fit(*data, batch_size=20, epochs=2, verbose=0)
    return model


def regression(**kwargs):
    return dpvi.DPVI(
        P["prior"], P["likelihood"], num_predictive_draws=30, **kwargs, clipping="flat"
    )


def line(**kwargs):
    return P["Line"](**kwargs)


def vae(**kwargs):
    return dpvi.DPVAE(P["encoder"], P["decoder"], P["codes"], **kwargs)


TERMWISE = dpvi.optimizers.TermwiseDPKerasAdamOptimizer
MODELS = {
    "regression": lambda: fit(regression(name="ward"), X, Y),
    "partials": lambda: fit(
        dpvi.DPVI(
            functools.partial(P["prior"], scale=0.5),
            P["likelihood"],
            functools.partial(dpvi.surrogates.mean_field, initial_scale=0.3),
            gradients="vectorized",
            num_draws=2,
            clipping="flat",
        ),
        X,
        Y,
        optimizer=dpvi.optimizers.DPKerasSGDOptimizer(
            l2_norm_clip=1.0, noise_multiplier=3.0, momentum=0.9
        ),
    ),
    "full_rank": lambda: fit(
        dpvi.DPVI(P["prior"], P["likelihood"], "full_rank", clipping="flat"),
        X,
        Y,
        optimizer=dpvi.optimizers.DPKerasAdagradOptimizer(l2_norm_clip=1.0, noise_multiplier=3.0),
    ),
    "asvi": lambda: fit(dpvi.DPVI(P["prior"], P["likelihood"], "asvi", clipping="flat"), X, Y),
    "generative": lambda: fit(
        dpvi.DPVI(P["prior"], P["records"], clipping="flat"),
        X,
        optimizer=dpvi.optimizers.make_dp_optimizer_class(keras.optimizers.RMSprop)(
            l2_norm_clip=1.0,
            noise_multiplier=3.0,
            learning_rate=keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9),
        ),
    ),
    "vae": lambda: fit(vae(beta=0.5), X, optimizer=adam(noise_multiplier=3.0, use_ema=True)),
    "termwise": lambda: fit(
        vae(batch_regularizer=dpvi.divergences.MMD()),
        X,
        optimizer=TERMWISE(
            l2_norm_clip=1.0, batch_l2_norm_clip=0.5, num_partitions=4, noise_multiplier=3.0
        ),
    ),
    "own": lambda: fit(P["Line"](units=2), X, X[:, :2]),
}


@pytest.mark.slow  # The synthesizer itself in `test_synthesizer.py`.
def test_a_synthesizers_model_round_trips(tmp_path):
    table = dpvi.Schema(
        {
            "age": dpvi.synthetic.Integer(0, 9, bins=[3, 6], missing=True),
            "pay": dpvi.synthetic.Continuous(0.0, 1.0, bins=4),
            "job": dpvi.synthetic.Categorical(["a", "b", "c"]),
        }
    )
    data = {
        "age": np.arange(60.0) % 10,
        "pay": np.linspace(0, 1, 60),
        "job": np.array(["a", "b", "c"] * 20),
    }
    model = dpvi.Synthesizer(table, 3).fit(data, noise_multiplier=2.0, steps=3).model
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    codes = table.encode(data)
    np.testing.assert_allclose(
        loaded.predictive().log_prob(codes), model.predictive().log_prob(codes), rtol=1e-5
    )
    assert loaded.privacy_ledger is model.privacy_ledger


@functools.cache
def made(name):
    return MODELS[name]()


def fresh_process(code, cwd):
    result = subprocess.run(
        [sys.executable, "-c", PARTS + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()[-1]


def outputs(model):
    if isinstance(model, dpvi.DPVI) and internals.is_generative(model):
        return model.predictive().log_prob(X[:5]).numpy()
    return model.predict(X[:5], verbose=0)


# ---------------------------------------------------------------------- round trips


QUICK = ("regression", "vae", "own")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("vae", marks=pytest.mark.smoke),
        slow("regression"),
        "own",
        *(slow(n) for n in MODELS if n not in QUICK),
    ],
)
def test_a_loaded_model_is_the_saved_one(tmp_path, name):
    model = made(name)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")

    assert type(loaded) is type(model)
    np.testing.assert_allclose(outputs(loaded), outputs(model), rtol=1e-6)
    assert type(loaded.optimizer) is type(model.optimizer)
    assert len(loaded.optimizer.variables) == len(model.optimizer.variables) > 1
    for ours, theirs in zip(loaded.optimizer.variables, model.optimizer.variables, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_equal(loaded.optimizer.get_config(), model.optimizer.get_config())
    assert internals.settings_of(loaded) == internals.settings_of(model)
    assert loaded.privacy_plan == model.privacy_plan
    assert str(loaded.privacy_report()) == str(model.privacy_report())
    theirs, ours = model.get_config(), loaded.get_config()
    assert ours == theirs


@pytest.mark.parametrize("place", ["here", pytest.param("a fresh process", marks=pytest.mark.slow)])
def test_a_network_may_have_privately_standardised_inputs(tmp_path, place):
    """The layer has statistics only once its weights are loaded, after the network is tried on zeros."""
    layer = dpvi.preprocessing.PrivateStandardize(-3.0, 3.0)
    layer.adapt(X, noise_multiplier=9.0)
    model = dpvi.DPKerasModel(keras.Sequential([layer, keras.layers.Dense(2)]))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(adam(noise_multiplier=3.0), loss=loss, delta=1e-5)
    model.fit(X, np.zeros(len(X), "int32"), batch_size=20, verbose=0)
    model.save(tmp_path / "model.keras")
    if place == "here":
        found = dpvi.load_model(tmp_path / "model.keras").predict(X[:5])
    else:
        np.save(tmp_path / "x.npy", X[:5])
        code = 'import tfp_dpvi as dpvi; print(dpvi.load_model("model.keras").predict(np.load("x.npy")).tolist())'
        found = json.loads(fresh_process(code, tmp_path))
    np.testing.assert_allclose(found, model.predict(X[:5]), rtol=1e-5)


LOADED = ["regression", "partials", "generative", "termwise"]


@pytest.mark.slow
def test_a_fresh_process_goes_on_with_everything(tmp_path):
    """Also on a ledger that this process has open."""
    np.savez(tmp_path / "data.npz", x=X, y=Y)
    ledger = dpvi.PrivacyLedger(tmp_path / "books", dataset_id="ward seven")
    fit(line(), X, REAL, ledger=ledger).save(tmp_path / "shared.keras")
    for name in LOADED:
        made(name).save(tmp_path / f"{name}.keras")
    printed = fresh_process(
        """
        import json
        data = np.load("data.npz")
        found = {}
        for name in NAMES:
            model = keras.models.load_model(f"{name}.keras")
            before = model.privacy_ledger.num_releases
            generative = name == "generative"
            out = model.predictive().log_prob(data["x"][:5]).numpy() if generative else model.predict(data["x"][:5], verbose=0)
            y = {"own": data["x"][:, :2]}.get(name, data["y"])
            args = (data["x"],) if name in ("generative", "vae", "termwise") else (data["x"], y)
            if name == "regression":  # Models of the other kinds learn on in tests/test_references.py.
                model.fit(*args, batch_size=20, epochs=1, verbose=0)
            report = model.privacy_report()
            found[name] = [out.tolist(), before, report.num_releases, report.epsilon, int(model.optimizer.iterations)]
        shared = keras.models.load_model("shared.keras")
        shared.fit(data["x"], data["x"][:, :1], batch_size=20, verbose=0)
        print(json.dumps([found, shared.privacy_ledger.num_releases]))
        """.replace("NAMES", repr(LOADED)),
        tmp_path,
    )
    found, shared = json.loads(printed)
    assert shared == ledger.num_releases == 9
    ledger.close()
    for name, (out, before, after, epsilon, iterations) in found.items():
        model = made(name)
        np.testing.assert_allclose(out, outputs(model), rtol=1e-5, atol=1e-6)
        learned = name == "regression"
        assert (before, after, iterations) == ((6, 9, 9) if learned else (6, 6, 6))
        spent = model.privacy_report().epsilon
        assert epsilon > spent if learned else epsilon == pytest.approx(spent, rel=1e-9)


def test_a_lifetime_budget_outlives_the_file(tmp_path):
    model = line()
    model.compile(adam(), epsilon=1.0, delta=1e-5, planned_epochs=4, jit_compile=False)
    model.fit(X, REAL, batch_size=20, epochs=2, verbose=0)
    model.save(tmp_path / "model.keras")
    half = model.privacy_report().epsilon
    del model
    loaded = keras.models.load_model(tmp_path / "model.keras")
    loaded.fit(X, REAL, batch_size=20, epochs=2, verbose=0)
    assert half < loaded.privacy_report().epsilon <= 1.0
    with pytest.raises(
        dpvi.privacy.BudgetExhaustedError,
        match=r"lifetime total for these data, and .* of it is spent",
    ):
        loaded.fit(X, REAL, batch_size=20, epochs=1, verbose=0)


@pytest.mark.parametrize(("name", "other"), [("regression", regression), slow("vae", vae)])
def test_weights_alone_go_into_a_model_of_the_same_shape(tmp_path, name, other):
    model = made(name)
    for path in ("model.weights.h5", "checkpoint"):
        model.save_weights(str(tmp_path / name / path)) if path == "checkpoint" else None
        if path != "checkpoint":
            (tmp_path / name).mkdir(exist_ok=True)
            model.save_weights(str(tmp_path / name / path))
        fresh = other()
        fresh(X[:2])
        fresh.load_weights(str(tmp_path / name / path))
        np.testing.assert_allclose(outputs(fresh), outputs(model), rtol=1e-6)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    saved = checkpoint.save(str(tmp_path / name / "tf" / "c"))
    fresh = other()
    fresh(X[:2])
    fresh.compile(adam(noise_multiplier=3.0, use_ema=name == "vae"), delta=1e-5)
    fresh.optimizer.build(fresh.trainable_variables)
    tf.train.Checkpoint(model=fresh, optimizer=fresh.optimizer).restore(
        saved
    ).assert_existing_objects_matched()
    np.testing.assert_allclose(outputs(fresh), outputs(model), rtol=1e-6)
    assert int(fresh.optimizer.iterations) == 6


@pytest.mark.slow
def test_a_model_that_was_not_fitted_round_trips(tmp_path):
    regression().save(tmp_path / "plain.keras")
    assert internals.settings_of(keras.models.load_model(tmp_path / "plain.keras")) is None
    model = regression()
    model.compile(adam(), epsilon=1.0, delta=1e-5, validation_metrics=["binary_accuracy"])
    model.save(tmp_path / "compiled.keras")
    loaded = keras.models.load_model(tmp_path / "compiled.keras")
    assert loaded.privacy_budget == 1.0
    assert internals.validation_metrics_of(loaded) == ["binary_accuracy"]
    loaded.fit(X, Y, batch_size=20, verbose=0)


def test_model_checkpoint_saves_what_load_model_reads(tmp_path):
    model = line()
    model.compile(adam(noise_multiplier=3.0), delta=1e-5, jit_compile=False)
    checkpoint = keras.callbacks.ModelCheckpoint(str(tmp_path / "{epoch}.keras"))
    model.fit(X, REAL, batch_size=20, epochs=2, verbose=0, callbacks=[checkpoint])
    first = keras.models.load_model(tmp_path / "1.keras")
    assert int(first.optimizer.iterations) == 3
    assert (
        first.privacy_ledger is model.privacy_ledger
    )  # One process, one set of books: nothing is forgotten.


# ---------------------------------------------------------------------- books


def test_clones_and_loads_share_books_within_a_process(tmp_path):
    model = fit(line(), X, REAL)
    clone = keras.models.clone_model(model)
    assert clone.privacy_ledger is model.privacy_ledger
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.privacy_ledger is model.privacy_ledger


@pytest.mark.slow
def test_what_two_processes_spent_apart_is_counted_together(tmp_path):
    model = fit(line(), X, REAL)
    model.save(tmp_path / "start.keras")
    np.savez(tmp_path / "data.npz", x=X, y=REAL)
    for side in ("left", "right"):
        fresh_process(
            f"""
            data = np.load("data.npz")
            model = keras.models.load_model("start.keras")
            model.fit(data["x"], data["y"], batch_size=20, epochs=1, verbose=0)
            model.save("{side}.keras")
            print(model.privacy_ledger.num_releases)
            """,
            tmp_path,
        )
    ledger = model.privacy_ledger
    assert ledger.num_releases == 6
    for expected, side in ((9, "left"), (12, "right"), (12, "left"), (12, "right"), (12, "start")):
        loaded = keras.models.load_model(tmp_path / f"{side}.keras")
        assert loaded.privacy_ledger is ledger
        assert ledger.num_releases == expected


@pytest.mark.slow  # A sibling of `test_ledger.py` is quick.
def test_a_ledger_on_disk_is_opened_again(tmp_path):
    ledger = dpvi.PrivacyLedger(tmp_path / "books", dataset_id="ward seven")
    older = shutil.copy(tmp_path / "books", tmp_path / "older")
    model = fit(line(), X, REAL, ledger=ledger)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.privacy_ledger.path == ledger.path
    loaded.fit(X, REAL, batch_size=20, verbose=0)
    assert ledger.num_releases == loaded.privacy_ledger.num_releases == 9
    ledger.close()
    loaded.privacy_ledger.close()

    # Moved: it can be read, but not used, until it is shown where.
    (tmp_path / "books").rename(tmp_path / "elsewhere")
    moved = keras.models.load_model(tmp_path / "model.keras")
    assert moved.privacy_report().num_releases == 6
    moved.predict(X[:2], verbose=0)
    with pytest.raises(LedgerError, match=r"(?s)ledger is not at .*compile\(\.\.\., ledger="):
        moved.fit(X, REAL, batch_size=20, verbose=0)
    with dpvi.PrivacyLedger(tmp_path / "elsewhere") as found:
        moved.compile(adam(noise_multiplier=3.0), delta=1e-5, ledger=found, jit_compile=False)
        moved.fit(X, REAL, batch_size=20, verbose=0)
        assert found.num_releases == 12

    # Another data set's, or an older copy.
    for name in ("ward eight", "ward seven"):
        with (
            dpvi.PrivacyLedger(tmp_path / "books", dataset_id=name),
            pytest.raises(LedgerError, match=r"is not the saved model's ledger .*'ward seven'"),
        ):
            keras.models.load_model(tmp_path / "model.keras")
        (tmp_path / "books").unlink()
    shutil.copy(older, tmp_path / "books")
    with pytest.raises(LedgerError, match=r"is not the saved model's ledger .*or an older copy"):
        keras.models.load_model(tmp_path / "model.keras")


# ---------------------------------------------------------------------- nothing secret


@pytest.mark.parametrize(
    "make",
    [lambda: regression(), pytest.param(lambda: vae(), marks=pytest.mark.slow)],
    ids=["regression", "vae"],
)
def test_no_key_and_no_record_is_in_a_file(tmp_path, make, monkeypatch):
    keys = []
    new_key = _random.new_key

    def remember(seed=None):
        key = new_key(seed)
        if seed is None:
            keys.append(key)
        return key

    monkeypatch.setattr(_random, "new_key", remember)
    model = make()
    data = (X, Y) if isinstance(model, dpvi.DPVI) else (X,)
    fit(model, *data)
    loss = model.evaluate(*data, verbose=0)
    model.save(tmp_path / "model.keras")
    model.save_weights(str(tmp_path / "model.weights.h5"))
    model.save_weights(str(tmp_path / "checkpoint"))
    tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(str(tmp_path / "c"))
    with zipfile.ZipFile(tmp_path / "model.keras") as archive:
        archive.extractall(tmp_path / "unpacked")
    held = b"\0".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())

    assert keys
    for key in keys:
        for half in key:
            assert half.tobytes() not in held
            assert str(half).encode() not in held
    for value in X.ravel():
        assert value.tobytes() not in held
        assert np.float64(value).tobytes() not in held
        assert f"{value:.6g}".encode() not in held
    # Nor the exact loss that evaluate computed.
    loss = np.float32(loss if np.isscalar(loss) else loss[0])
    with h5py.File(tmp_path / "unpacked" / "model.weights.h5") as weights:
        values = []
        weights.visititems(
            lambda _, item: (
                values.append(np.ravel(item[()])) if isinstance(item, h5py.Dataset) else None
            )
        )
    flat = np.concatenate([np.asarray(value, "float64") for value in values])
    assert np.abs(flat - loss).min() > 1e-7
    assert np.abs(flat - loss * len(X)).min() > 1e-6
    assert str(tmp_path) not in (tmp_path / "unpacked" / "config.json").read_text()


def test_a_seed_is_not_saved_and_the_report_still_says_so(tmp_path):
    model = fit(line(seed=987654321), X, REAL)
    model.save(tmp_path / "model.keras")
    with zipfile.ZipFile(tmp_path / "model.keras") as archive:
        assert b"987654321" not in archive.read("config.json")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert "seeded: not private" in str(loaded.privacy_report())
    assert internals.seed_of(loaded) is None


# ---------------------------------------------------------------------- refused


def test_what_a_file_cannot_hold_is_refused_at_save_and_not_at_fit(tmp_path):
    path = tmp_path / "model.keras"
    path.write_text("precious")
    lambdas = fit(
        dpvi.DPVI(P["prior"], lambda params, x: P["likelihood"](params, x), clipping="flat"), X, Y
    )
    with pytest.raises(
        ValueError,
        match=r"(?s)likelihood is .*<lambda>.*without a registered name.*@dpvi\.register",
    ):
        lambdas.save(path)
    distribution = dpvi.DPVI(P["prior"](), P["likelihood"], clipping="flat")
    with pytest.raises(
        ValueError, match=r"(?s)prior is .*JointDistributionNamed.*functools\.partial"
    ):
        distribution.save(path)
    prior = P["prior"]()
    surrogate = dpvi.DPVI(
        prior, P["likelihood"], dpvi.surrogates.mean_field(prior), clipping="flat"
    )
    internals.given_to(surrogate)["prior"] = P["prior"]
    with pytest.raises(
        ValueError, match=r"(?s)surrogate_posterior is .*an object that cannot be saved"
    ):
        surrogate.save(path)
    with pytest.raises(
        ValueError,
        match=r"(?s)encoder has the layer .*DistributionLambda.*without arguments that builds",
    ):
        dpvi.DPVAE(P["encoder"](), P["decoder"], P["codes"]).save(path)
    assert path.read_text() == "precious"
    assert [one.name for one in tmp_path.iterdir()] == ["model.keras"]

    class Other(dpvi.DPModel):
        def __init__(self, width):
            super().__init__()

    with pytest.raises(
        ValueError, match=r"(?s)Other needs the arguments width.*override get_config"
    ):
        Other(3).save(path)


def test_other_formats_and_bad_paths_are_refused(tmp_path):
    model = regression()
    for path in ("model", "model.h5", "model.tf"):
        with pytest.raises(ValueError, match=r"filepath=.*save\(\"model\.keras\"\).*export"):
            model.save(tmp_path / path)
    (tmp_path / "file").write_text("precious")
    with pytest.raises(ValueError, match=r"filepath=.*cannot be written"):
        model.save(tmp_path / "file" / "model.keras")
    model.save(tmp_path / "model.keras")
    with pytest.raises(ValueError, match=r"exists and overwrite=False"):
        model.save(tmp_path / "model.keras", overwrite=False)


def flipped(raw):
    """One bit of the weights."""
    where = raw.index(b"\x89HDF") + 2000
    return raw[:where] + bytes([raw[where] ^ 1]) + raw[where + 1 :]


DAMAGES = {
    "cut": lambda raw: raw[: len(raw) // 2],
    "empty": lambda raw: b"",
    "other": lambda raw: b"x" * 500,
}


def test_a_broken_file_is_named_and_nothing_is_spent(tmp_path):
    with dpvi.PrivacyLedger(tmp_path / "ledger", dataset_id="clinic") as ledger:
        model = fit(line(), X, REAL, ledger=ledger)
        model.save(tmp_path / "model.keras")
    before = (tmp_path / "ledger").read_bytes()
    whole = (tmp_path / "model.keras").read_bytes()
    for damage in (*DAMAGES.values(), flipped):
        (tmp_path / "broken.keras").write_bytes(damage(whole))
        with pytest.raises(
            ValueError,
            match=r"filepath='[^']*broken\.keras' is not a complete \.keras file.*another copy",
        ):
            dpvi.load_model(tmp_path / "broken.keras")
        assert (tmp_path / "ledger").read_bytes() == before
        assert damage(whole) == (tmp_path / "broken.keras").read_bytes()
    loaded = dpvi.load_model(tmp_path / "model.keras")  # The way out that the message names.
    assert loaded.privacy_report().to_json() == model.privacy_report().to_json()
    np.testing.assert_allclose(loaded.predict(X, verbose=0), model.predict(X, verbose=0), rtol=1e-6)
    with pytest.raises(ValueError, match=r"is no \.keras file"):
        dpvi.load_model(tmp_path / "nowhere.keras")


def test_a_checkpoint_waits_for_a_model_that_is_not_built(tmp_path):
    model = made("vae")
    model.save_weights(str(tmp_path / "checkpoint"))
    fresh = vae()
    fresh.load_weights(str(tmp_path / "checkpoint"))
    fresh(X[:2])
    np.testing.assert_allclose(outputs(fresh), outputs(model), rtol=1e-6)


def test_unknown_names_are_named(tmp_path):
    regression().save(tmp_path / "model.keras")
    registered = keras.utils.get_custom_objects()
    held = registered.pop("dpvi>tests_prior")
    try:
        with pytest.raises(
            ValueError, match=r"registered function 'dpvi>tests_prior'.*import the module"
        ):
            keras.models.load_model(tmp_path / "model.keras")
        keras.models.load_model(
            tmp_path / "model.keras", custom_objects={"dpvi>tests_prior": P["prior"]}
        )
    finally:
        registered["dpvi>tests_prior"] = held
    with pytest.raises(TypeError, match=r'use @dpvi\.register\("my_name"\)'):
        dpvi.register(lambda: None)


def test_files_hold_paths_of_this_library_only(tmp_path):
    assert pathlib.Path(dpvi.__file__).parent.name == "tfp_dpvi"
    from tfp_dpvi import serialization

    with pytest.raises(ValueError, match="it was altered"):
        serialization.decode({"library": "os:system"})
