"""Exports load with TensorFlow alone, compute what the model computes, and hold released values only (C7, C10)."""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp
from support.toy import Toy

import tfp_dpvi as dpvi
from tfp_dpvi import _random, export, keras

tfd = tfp.distributions
ROOT = pathlib.Path(__file__).resolve().parents[1]

# Values that occur nowhere else: a search for their bytes finds a record, or nothing.
X = (np.random.default_rng(7).normal(size=(60, 3)) * 1.2345678).astype("float32")
Y = (X[:, 0] > 0).astype("int64")

ALONE = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("tfp_dpvi", "tensorflow_probability", "tensorflow_privacy", "dp_accounting", "scipy"):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocked())
import tensorflow as tf
"""


def alone(code, cwd):
    """Runs code in a process that can import TensorFlow and none of what this library needs beside it."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(
        [sys.executable, "-c", ALONE + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        env={**environment, "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def fit(model, *data, ledger=None, **kwargs):
    optimizer = dpvi.optimizers.DPKerasAdamOptimizer(
        l2_norm_clip=1.0, noise_multiplier=3.0, learning_rate=0.05
    )
    model.compile(optimizer, delta=1e-5, ledger=ledger, run_eagerly=False, jit_compile=False)
    model.fit(*data, **{"batch_size": 20, "epochs": 2, "verbose": 0, **kwargs})
    return model


def make_regression(surrogate="mean_field", **kwargs):
    prior = tfd.JointDistributionNamed(
        {"w": tfd.Sample(tfd.Normal(0.0, 2.0), 3), "b": tfd.Normal(0.0, 1.0)}
    )

    def likelihood(params, x):
        return tfd.Bernoulli(logits=tf.linalg.matvec(x, params["w"]) + params["b"])

    return dpvi.DPVI(
        prior, likelihood, surrogate, num_predictive_draws=30, **kwargs, clipping="flat"
    )


def make_generative():
    prior = tfd.JointDistributionNamed(
        {"loc": tfd.Sample(tfd.Normal(0.0, 1.0), 3), "scale": tfd.LogNormal(0.0, 1.0)}
    )

    def likelihood(params):
        return tfd.Independent(tfd.Normal(params["loc"], params["scale"]), 1)

    return dpvi.DPVI(prior, likelihood, num_predictive_draws=20, clipping="flat")


def make_vae():
    layers = keras.layers
    encoder = keras.Sequential(
        [
            layers.Dense(4),
            tfp.layers.DistributionLambda(
                lambda t: tfd.Independent(tfd.Normal(t[..., :2], tf.nn.softplus(t[..., 2:])), 1)
            ),
        ]
    )
    decoder = keras.Sequential([layers.Dense(6), tfp.layers.IndependentNormal(3)])
    return dpvi.DPVAE(encoder, decoder, tfd.Independent(tfd.Normal(tf.zeros(2), 1.0), 1))


@pytest.fixture(scope="module")
def regression():
    return fit(make_regression(), X, Y)


@pytest.fixture(scope="module")
def generative():
    return fit(make_generative(), X)


@pytest.fixture(scope="module")
def vae():
    return fit(make_vae(), X)


@pytest.fixture(scope="module")
def exported_regression(tmp_path_factory, regression):
    folder = tmp_path_factory.mktemp("exported")
    regression.export(folder / "regression")
    return folder


@pytest.fixture(scope="module")
def exported(exported_regression, generative, vae):
    """A folder with all three: each signature is traced once."""
    for name, model in (("generative", generative), ("vae", vae)):
        model.export(exported_regression / name)
    return exported_regression


def files(folder):
    return [path for path in folder.rglob("*") if path.is_file()]


def all_bytes(folder):
    return b"\0".join(path.read_bytes() for path in files(folder))


# ---------------------------------------------------------------------- the same figures, with TensorFlow alone


@pytest.mark.parametrize(
    "surrogate",
    ["mean_field", *(pytest.param(name, marks=pytest.mark.slow) for name in ("full_rank", "asvi"))],
)
def test_the_functions_are_the_models(tmp_path, surrogate, regression, exported_regression):
    model, folder = regression, exported_regression / "regression"
    if surrogate != "mean_field":
        model, folder = fit(make_regression(surrogate), X, Y), tmp_path / "model"
        model.export(folder)
    loaded = tf.saved_model.load(str(folder))

    assert set(loaded.signatures) == {"predict", "sample_posterior", "log_prob", "serving_default"}
    for num in (60, 7, 1):
        np.testing.assert_allclose(
            loaded.predict(x=X[:num])["mean"], model.predict(X[:num]), rtol=1e-5
        )
    np.testing.assert_allclose(
        loaded.log_prob(x=X, y=Y)["log_prob"], model.predictive(X).log_prob(Y), rtol=1e-4
    )
    np.testing.assert_allclose(
        loaded.signatures["predict"](x=tf.constant(X))["mean"],
        loaded.predict(x=X)["mean"],
        rtol=1e-6,
    )
    draws = loaded.sample_posterior(num=4000, seed=[1, 2])
    assert (draws["w"].shape, draws["b"].shape) == ([4000, 3], [4000])
    again, other = (
        loaded.sample_posterior(num=4000, seed=[1, 2]),
        loaded.sample_posterior(num=4000, seed=[1, 3]),
    )
    np.testing.assert_array_equal(draws["w"], again["w"])
    assert np.abs(draws["w"] - other["w"]).min() > 0
    # False-alarm rate below 1e-8: 4,000 draws of each side, 7 standard errors of the difference.
    own = model.posterior_sample(4000, seed=5)["w"].numpy()
    error = 7 * np.sqrt(2 / 4000) * own.std(axis=0)
    np.testing.assert_array_less(np.abs(draws["w"].numpy().mean(axis=0) - own.mean(axis=0)), error)


def test_codes_are_the_encoders(vae, exported):
    codes, own = tf.saved_model.load(str(exported / "vae")).encode(x=X[:7]), vae.encode(X[:7])
    np.testing.assert_allclose(codes["mean"], own.mean(), rtol=1e-5)
    np.testing.assert_allclose(codes["stddev"], own.stddev(), rtol=1e-5)
    assert (
        "| `decode` | `z`: float32 [n, 2] | `mean`: float32 [n, 3] |"
        in (exported / "vae" / "README.md").read_text()
    )


def test_somebody_who_names_no_signature_gets_the_prediction(regression, vae, exported):
    """As TensorFlow Serving and Keras's TFSMLayer do."""
    for name, model in (("regression", regression), ("vae", vae)):
        default = tf.saved_model.load(str(exported / name)).signatures["serving_default"]
        np.testing.assert_allclose(
            default(x=tf.constant(X[:5]))["mean"], model.predict(X[:5]), rtol=1e-5
        )
    default = tf.saved_model.load(str(exported / "generative")).signatures["serving_default"]
    assert default(num=tf.constant(4), seed=tf.constant([1, 2]))["x"].shape == [4, 3]


def write_formula(folder, report):
    """Writes a regression of persons by a formula, whose posterior is its prior, and returns its predictions."""
    from tfp_dpvi.regressions.families import make_prior
    from tfp_dpvi.regressions.fit import described
    from tfp_dpvi.regressions.serving import predict_signature

    schema = {"y": {"type": "binary"}, "age": {"type": "continuous", "lower": 20, "upper": 80}}
    design, parts = described("y ~ age + (1 | person)", "bernoulli", schema, unit="person")
    draws = make_prior(**parts.prior).sample(50, seed=[0, 1])
    arrays = {name: part.numpy().astype("float64") for name, part in draws.items()}
    signature = predict_signature(design, parts, arrays, 0.9)
    export.write(folder, [signature], report, title="A regression", texts={"more.txt": "More."})
    assert (folder / "assets.extra" / "more.txt").read_text() == "More."
    return signature.function(age=tf.constant([20.0, 50.0, 80.0]))


@pytest.mark.smoke
def test_a_process_with_tensorflow_alone_runs_every_signature(
    tmp_path, regression, generative, vae, exported
):
    """Also the code of the model card, and the three lines for each model in the README of saved_models/."""
    shutil.copytree(exported, tmp_path, dirs_exist_ok=True)
    np.save(tmp_path / "x.npy", X)
    pytest.importorskip("formulae")
    formula = write_formula(tmp_path / "formula", regression.privacy_report())
    card = (tmp_path / "regression" / "README.md").read_text()
    (tmp_path / "card.py").write_text(card.split("```python\n")[1].split("```")[0])
    readme = (ROOT / "saved_models" / "README.md").read_text(encoding="utf-8")
    lines = re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)
    assert [len(each.strip().splitlines()) for each in lines] == [3, 3]
    named = [each.replace("\nmodel.predict", "\nresult = model.predict") for each in lines]
    (tmp_path / "lines.json").write_text(json.dumps(named))
    printed = alone(
        """
        import json, os, numpy as np
        x = np.load("x.npy")
        made = {}
        regression = tf.saved_model.load("regression")
        made["predict"] = regression.predict(x=x[:5])["mean"].numpy().tolist()
        made["log_prob"] = regression.log_prob(x=x[:5], y=np.ones(5, "int64"))["log_prob"].numpy().tolist()
        generative = tf.saved_model.load("generative")
        made["generated"] = generative.sample_predictive(num=4, seed=[1, 2])["x"].shape.as_list()
        made["score"] = generative.log_prob(x=x[:5])["log_prob"].numpy().tolist()
        made["names"] = sorted(generative.sample_posterior(num=2, seed=[1, 2]))
        vae = tf.saved_model.load("vae")
        formula = tf.saved_model.load("formula").predict(age=tf.constant([20.0, 50.0, 80.0]))
        made["formula"] = {name: part.numpy().tolist() for name, part in formula.items()}
        made["reconstructed"] = vae.predict(x=x[:5])["mean"].numpy().tolist()
        made["images"] = vae.sample_predictive(num=3, seed=[1, 2])["x"].shape.as_list()
        codes = vae.encode(x=x[:5])
        made["sizes"] = [codes[name].shape.as_list() for name in ("mean", "stddev")]
        made["decoded"] = vae.decode(z=codes["mean"])["mean"].numpy().tolist()
        exec(open("card.py").read(), {"tf": tf, "x": tf.zeros([2, 3])})
        made["saved"] = []
        blocks = json.load(open("lines.json"))
        os.chdir(ROOT)  # Of the repository.
        for lines in blocks:
            saved = {}
            exec(lines, saved)
            made["saved"].append(saved["result"]["mean"].numpy().tolist())
        made["modules"] = [name for name in sys.modules if name.split(".")[0] in ("tfp_dpvi", "tensorflow_probability")]
        print(json.dumps(made))
        """.replace("ROOT", repr(str(ROOT))),
        tmp_path,
    )
    made = json.loads(printed.splitlines()[-1])
    assert made["modules"] == []
    for name, part in formula.items():
        np.testing.assert_allclose(made["formula"][name], part, rtol=1e-5)
    # The README's lines, on the models in saved_models/: who pays more is less likely to see a doctor.
    visits, tumours = made["saved"]
    assert 0.5 < visits[1] < visits[0] < 0.9
    assert len(tumours) == 5
    np.testing.assert_allclose(made["predict"], regression.predict(X[:5]), rtol=1e-5)
    np.testing.assert_allclose(
        made["log_prob"], regression.predictive(X[:5]).log_prob(np.ones(5, "int64")), rtol=1e-4
    )
    np.testing.assert_allclose(made["score"], generative.predictive().log_prob(X[:5]), rtol=1e-4)
    np.testing.assert_allclose(made["reconstructed"], vae.predict(X[:5]), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(made["decoded"], made["reconstructed"], rtol=1e-5, atol=1e-6)
    assert made["sizes"] == [[5, 2], [5, 2]]
    assert (made["generated"], made["images"], made["names"]) == ([4, 3], [3, 3], ["loc", "scale"])


def test_what_keras_would_save_points_to_export(tmp_path, regression, vae):
    for model in (regression, vae):
        for save in (tf.saved_model.save, keras.models.save_model):
            with pytest.raises(ValueError, match=r"export\(path\)|save_format|model\.keras"):
                save(model, str(tmp_path / "model"))
        with pytest.raises(ValueError, match=r"model\.export\(path\)"):
            tf.saved_model.save(model, str(tmp_path / "model"))
    regression.save_weights(
        str(tmp_path / "weights")
    )  # A checkpoint, which asks for the same parts.
    assert (tmp_path / "weights.index").exists()


def test_sampled_records_have_the_models_distribution(generative, vae, exported):
    """False-alarm rate below 1e-8: 7 standard errors of the difference of means of 2,000 records each."""
    for name, model in (("generative", generative), ("vae", vae)):
        loaded = tf.saved_model.load(str(exported / name))
        made = loaded.sample_predictive(num=2000, seed=[3, 4])["x"].numpy()
        own = model.sample_predictive(2000, seed=8)
        # Draws of the posterior differ between the two: for `generative` 20 each, whose means vary too.
        spread = np.sqrt(2 / 2000) * own.std(axis=0)
        if name == "generative":
            spread = spread + np.sqrt(2 / 20) * model.posterior_sample(500, seed=1)[
                "loc"
            ].numpy().std(axis=0)
        np.testing.assert_array_less(np.abs(made.mean(axis=0) - own.mean(axis=0)), 7 * spread)
        np.testing.assert_array_equal(made, loaded.sample_predictive(num=2000, seed=[3, 4])["x"])


def test_structures_of_inputs_and_outputs_go_by_their_names(tmp_path):
    prior = tfd.Sample(tfd.Normal(np.float64(0.0), 1.0), sample_shape=[3, 2])

    def likelihood(w, x):
        return tfd.Poisson(
            log_rate=tf.reduce_sum(tf.gather(w, x["the group"]) * x["features"], axis=-1)
        )

    x = {"features": np.ones((60, 2)) / 7, "the group": np.arange(60) % 3}
    model = fit(
        dpvi.DPVI(prior, likelihood, num_predictive_draws=10, clipping="flat"), x, np.ones(60)
    )
    model.export(tmp_path / "model")
    loaded = tf.saved_model.load(str(tmp_path / "model"))
    few = {name: part[:4] for name, part in x.items()}
    mean = loaded.predict(features=few["features"], the_group=few["the group"])["mean"]
    assert mean.dtype == tf.float64
    np.testing.assert_allclose(mean, model.predict(few), rtol=1e-10)
    assert loaded.sample_posterior(num=6, seed=[1, 2])["params"].shape == [6, 3, 2]


def test_a_model_of_ones_own_exports_its_outputs(tmp_path):
    class Line(dpvi.DPModel):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, x):
            return self.dense(x)

        def record_loss(self, x, y):
            return tf.square(self(x[None])[0, 0] - y)

    model = fit(Line(), X, X[:, 0])
    model.export(tmp_path / "model")
    loaded = tf.saved_model.load(str(tmp_path / "model"))
    np.testing.assert_allclose(
        loaded.predict(x=X[:9])["mean"], model.predict(X[:9], verbose=0), rtol=1e-5
    )


@pytest.mark.slow
def test_a_synthesizers_model_exports_its_codes(tmp_path):
    table = dpvi.Schema({"age": dpvi.synthetic.Integer(0, 9), "sex": dpvi.synthetic.Binary()})
    data = {"age": np.arange(120) % 10, "sex": np.arange(120) % 2}  # Fewer drown in the noise.
    synthesizer = dpvi.Synthesizer(table, 3).fit(data, noise_multiplier=2.0, steps=3)
    synthesizer.model.export(tmp_path / "model", delta=1e-5)
    loaded = tf.saved_model.load(str(tmp_path / "model"))
    codes = loaded.sample_predictive(num=20, seed=[1, 2])["x"].numpy()
    assert codes.shape == (20, 2)
    assert (codes >= 0).all()
    assert (codes < [10, 2]).all()


# ---------------------------------------------------------------------- what is in it


def test_report_and_card_lie_beside_it(regression, exported_regression):
    report = json.loads((exported_regression / "regression" / export.REPORT).read_text())
    assert report == {**regression.privacy_report().to_json(), "dataset_id": None}
    card = (exported_regression / "regression" / "README.md").read_text()
    assert str(regression.privacy_report()) in card
    assert 'tf.saved_model.load("regression")' in card
    assert "| `predict` | `x`: float32 [n, 3] | `mean`: float32 [n] |" in card
    assert "`w`: float32 [n, 3]" in card


@pytest.mark.parametrize(
    "make",
    [
        make_regression,
        *(pytest.param(make, marks=pytest.mark.slow) for make in (make_generative, make_vae)),
    ],
)
def test_no_record_ledger_optimizer_or_key_is_in_it(tmp_path, make, monkeypatch):
    keys = []
    new_key = _random.new_key

    def remember(seed=None):
        key = new_key(seed)
        if seed is None:
            keys.append(key)
        return key

    monkeypatch.setattr(_random, "new_key", remember)
    ledger = dpvi.PrivacyLedger(tmp_path / "secret_books.jsonl", dataset_id="ward seven")
    model = fit(make(), *((X, Y) if make is make_regression else (X,)), ledger=ledger)
    model.evaluate(*((X, Y) if make is make_regression else (X,)), verbose=0)
    model.export(tmp_path / "model")
    ledger.close()

    data = all_bytes(tmp_path / "model")
    assert keys
    for key in keys:
        assert key.tobytes() not in data
        for half in key:
            assert half.tobytes() not in data
            assert str(half).encode() not in data
    for row in X:
        for value in row:
            assert value.tobytes() not in data
            assert np.float64(value).tobytes() not in data
            assert f"{value:.6g}".encode() not in data
    for word in (
        b"ward seven",
        b"secret_books",
        b"tfp_dpvi privacy ledger",
        b"learning_rate",
        b"Adam",
        b"momentum",
    ):
        assert word not in data
    names = [
        name
        for name, _ in tf.train.list_variables(str(tmp_path / "model" / "variables" / "variables"))
    ]
    num = len(model.trainable_variables)
    assert sum("VARIABLE_VALUE" in name for name in names) == num
    assert (
        ledger.dataset_id.encode() in (tmp_path / "secret_books.jsonl").read_bytes()
    )  # So the search can find it.


def test_the_search_finds_what_is_there(tmp_path):
    """The test above would see a record that a likelihood holds as a constant."""
    held = tf.constant(X[:30])
    model = dpvi.DPVI(
        tfd.Sample(tfd.Normal(0.0, 1.0), 3),
        lambda w, x: tfd.Normal(tf.linalg.matvec(x, w) + tf.reduce_mean(tf.sin(held)), 1.0),
        clipping="flat",
    )
    fit(model, X, X[:, 0]).export(tmp_path / "model")
    assert X[3, 1].tobytes() in all_bytes(tmp_path / "model")


def test_a_seeded_models_key_is_not_in_it_and_its_report_warns(tmp_path):
    model = fit(Toy(seed=0), X, Y)
    model.export(tmp_path / "model")
    assert _random.new_key(0).tobytes() not in all_bytes(tmp_path / "model")
    assert "seeded: not private" in (tmp_path / "model" / "README.md").read_text()


# ---------------------------------------------------------------------- refused


def test_a_model_that_was_never_fitted_is_refused(tmp_path):
    model = make_regression()
    with pytest.raises(RuntimeError, match=r"DPVI.export was called before fit.*Call fit first"):
        model.export(tmp_path / "model")
    model.compile(dpvi.optimizers.DPKerasAdamOptimizer(l2_norm_clip=1.0), epsilon=1.0, delta=1e-5)
    with pytest.raises(RuntimeError, match="export was called before fit"):
        model.export(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_a_delta_is_needed(tmp_path):
    model = Toy()
    model.compile(dpvi.optimizers.DPKerasAdamOptimizer(l2_norm_clip=1.0, noise_multiplier=3.0))
    model.fit(X, Y, batch_size=20, verbose=0)
    with pytest.raises(ValueError, match="delta is not known"):
        model.export(tmp_path / "model")
    model.export(tmp_path / "model", delta=1e-6)
    assert json.loads((tmp_path / "model" / export.REPORT).read_text())["delta"] == 1e-6


def test_what_is_there_is_not_touched(tmp_path, regression):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("precious")
    (tmp_path / "file").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "thesis")
    before = sorted(tmp_path.rglob("*"))
    for name in ("thesis", "file", "link"):
        for overwrite in (False, True):
            with pytest.raises(
                ValueError, match=r"path=.*exists and is no export.*Nothing was changed"
            ):
                regression.export(tmp_path / name, overwrite=overwrite)
    with pytest.raises(ValueError, match=r"path=.*cannot be written.*pass a writable folder"):
        regression.export(tmp_path / "file" / "model")
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "thesis" / "chapter.txt").read_text() == "precious"


def test_an_earlier_export_is_replaced_when_asked(tmp_path):
    model = fit(Toy(), X, Y)
    (tmp_path / "model").mkdir()  # An empty folder may be there.
    model.export(tmp_path / "model")
    before = all_bytes(tmp_path / "model")
    model.set_weights([np.ones(3)])
    with pytest.raises(ValueError, match=r"holds an earlier export.*overwrite=True"):
        model.export(tmp_path / "model")
    assert all_bytes(tmp_path / "model") == before
    model.export(tmp_path / "model", overwrite=True)
    mean = tf.saved_model.load(str(tmp_path / "model")).predict(x=X[:9])["mean"]
    np.testing.assert_allclose(mean, X[:9].sum(axis=1), rtol=1e-5)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_failure_leaves_nothing_behind(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise tf.errors.ResourceExhaustedError(None, None, "no space left")

    monkeypatch.setattr(tf.saved_model, "save", full)
    with pytest.raises(ValueError, match=r"cannot be written.*no space left"):
        fit(Toy(), X, Y).export(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_a_likelihood_that_needs_the_number_of_records_is_named(tmp_path):
    model = dpvi.DPVI(
        tfd.Sample(tfd.Normal(0.0, 1.0), 3),
        lambda w, x: tfd.Normal(tf.linalg.matvec(x, w) + [0.0] * x.shape[0], 1.0),
        clipping="flat",
    )
    fit(model, X, X[:, 0])
    with pytest.raises(
        ValueError, match=r"export: predict cannot be traced for x of float32 \[n, 3\]"
    ):
        model.export(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------- the model in saved_models/


def test_the_saved_model_predicts_and_is_small():
    sklearn = pytest.importorskip("sklearn.datasets")
    folder = ROOT / "saved_models" / "breast_cancer"
    assert sum(path.stat().st_size for path in files(folder)) < 1e6
    report = json.loads((folder / export.REPORT).read_text())
    assert report["epsilon"] <= 1.0
    assert report["private"]
    data = sklearn.load_breast_cancer()
    model = tf.saved_model.load(str(folder))
    mean = model.predict(x=data.data.astype("float32"))["mean"].numpy()
    assert np.mean((mean > 0.5) == data.target) > 0.9
    held = all_bytes(folder)
    for row in data.data:
        assert row.astype("float32").tobytes() not in held
        assert row.tobytes() not in held


@pytest.mark.slow
def test_breast_cancer_exports_in_time_and_size(tmp_path):
    """Under 10 s and 5 MB."""
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        import breast_cancer
    finally:
        sys.path.pop(0)
    x = np.random.default_rng(0).normal(size=(455, 30)).astype("float32")
    model = breast_cancer.fit_private(x, (x[:, 0] > 0).astype("int64"), 1.0, 1e-5, 0, epochs=1)
    start = time.perf_counter()
    model.export(tmp_path / "model")
    seconds = time.perf_counter() - start
    assert seconds < 10
    assert sum(path.stat().st_size for path in files(tmp_path / "model")) < 5e6
