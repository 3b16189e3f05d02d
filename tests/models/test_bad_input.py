"""Bad input gets an error that names the argument and the fix, and nothing is spent (contract C8)."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp
from support.toy import Toy, records

import tfp_dpvi as dpvi

tfd = tfp.distributions

X, Y = records(50)


def prior():
    return tfd.JointDistributionNamed({"w": tfd.Sample(tfd.Normal(0.0, 1.0), sample_shape=3)})


def likelihood(params, x):
    return tfd.Bernoulli(logits=tf.linalg.matvec(x, params["w"]))


def adam(**kwargs):
    return dpvi.optimizers.DPKerasAdamOptimizer(**{"l2_norm_clip": 1.0, **kwargs})


@pytest.fixture(scope="module")
def model():
    """Whatever is refused leaves it as it was."""
    made = Toy()
    made.compile(optimizer=adam(), epsilon=1.0, delta=1e-5)
    return made


@pytest.fixture(scope="module")
def regression():
    made = dpvi.DPVI(prior(), likelihood, clipping="flat")
    made.compile(optimizer=adam(), epsilon=1.0, delta=1e-5)
    return made


def with_nan(array):
    broken = array.copy()
    broken[3] = np.nan
    return broken


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"x": with_nan(X), "y": Y}, ["x", "NaN", "validate=False"]),
        ({"x": np.where(X > 1, np.inf, X), "y": Y}, ["x", "infinite"]),
        ({"x": X.astype("float64") * 1e39, "y": Y}, ["x", "infinite", "float32"]),
        ({"x": X.astype(object), "y": Y}, ["x", "object", "astype"]),
        ({"x": np.array([["a", "b", "c"]] * 50), "y": Y}, ["x", "dtype"]),
        ({"x": X, "y": Y[:49]}, ["x has 50", "y has 49"]),
        ({"x": {"a": X, "b": X[:7]}, "y": Y}, ["x['a'] has 50", "x['b'] has 7"]),
        ({"x": X[:0], "y": Y[:0]}, ["no records"]),
        ({"x": np.float32(3.0), "y": Y}, ["scalar"]),
        ({"x": {}, "y": Y}, ["empty dict"]),
        ({"x": None}, ["x is missing"]),
        (
            {"x": tf.data.Dataset.from_tensor_slices((X, Y)), "y": None},
            ["Dataset", "declare how", "Pass arrays", "each_record_once_per_epoch"],
        ),
        ({"x": X, "y": [Y, X[:, :2]]}, ["y is a list", "tuple or dict"]),
        ({"x": X, "y": Y, "batch_size": 0}, ["batch_size", "0"]),
        ({"x": X, "y": Y, "batch_size": 2.5}, ["batch_size", "2.5"]),
        ({"x": X, "y": Y, "epochs": 0}, ["epochs", "0"]),
        ({"x": X, "y": Y, "steps_per_epoch": -1}, ["steps_per_epoch", "-1"]),
        ({"x": X, "y": Y, "num_records": 0}, ["num_records", "0"]),
        ({"x": X, "y": Y, "initial_epoch": 1}, ["initial_epoch", "epochs"]),
        ({"x": X, "y": Y, "sample_weight": np.ones(49)}, ["sample_weight", "[50]"]),
        ({"x": X, "y": Y, "sample_weight": -np.ones(50)}, ["sample_weight", ">= 0"]),
        ({"x": X, "y": Y, "shuffle": False}, ["shuffle", "sampled at random"]),
        ({"x": X, "y": Y, "validation_split": 0.1}, ["validation_split", "validation_data"]),
        ({"x": X, "y": Y, "class_weight": {0: 1.0}}, ["class_weight", "sample_weight"]),
        ({"x": X, "y": Y, "wrong": 1}, ["wrong"]),
        (
            {"x": X, "y": Y, "validation_data": (X, Y)},
            ["validation_data", "validation_is_public=True", "unsafe_"],
        ),
        (
            {"x": X, "y": Y, "validation_data": X, "validation_is_public": True},
            ["validation_data", "(x, y)"],
        ),
    ],
)
def test_fit_refuses(model, arguments, words):
    check_refused(model, arguments, words)


def check_refused(model, arguments, words):
    with pytest.raises((ValueError, TypeError)) as caught:
        model.fit(**arguments, verbose=0)
    for word in words:
        assert word in str(caught.value)
    assert model.privacy_ledger.num_releases == 0
    assert model.privacy_report().epsilon == 0.0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"optimizer": adam()}, ["both missing", "epsilon", "noise_multiplier"]),
        (
            {"optimizer": adam(noise_multiplier=1.0), "epsilon": 1.0, "delta": 1e-5},
            ["each determines", "Leave out"],
        ),
        ({"optimizer": adam(), "epsilon": 1.0}, ["delta"]),
        ({"optimizer": adam(), "epsilon": 1.0, "delta": 0.0}, ["delta", "0"]),
        ({"optimizer": adam(), "epsilon": 1.0, "delta": 1.0}, ["delta", "1"]),
        ({"optimizer": adam(), "epsilon": 1.0, "delta": "1e-5"}, ["delta"]),
        ({"optimizer": adam(), "epsilon": 0.0, "delta": 1e-5}, ["epsilon", "0"]),
        ({"optimizer": adam(), "epsilon": float("NaN"), "delta": 1e-5}, ["epsilon", "NaN"]),
        ({"optimizer": adam(), "epsilon": True, "delta": 1e-5}, ["epsilon", "True"]),
        ({"optimizer": "adam", "epsilon": 1.0, "delta": 1e-5}, ["l2_norm_clip"]),
        (
            {"optimizer": "adam", "l2_norm_clip": 0.0, "epsilon": 1.0, "delta": 1e-5},
            ["l2_norm_clip", "0.0"],
        ),
        ({"optimizer": "adamm", "l2_norm_clip": 1.0, "epsilon": 1.0, "delta": 1e-5}, ["adamm"]),
        ({"optimizer": 3, "epsilon": 1.0, "delta": 1e-5}, ["optimizer", "3"]),
        (
            {"optimizer": adam(), "l2_norm_clip": 2.0, "epsilon": 1.0, "delta": 1e-5},
            ["l2_norm_clip", "2.0"],
        ),
        ({"epsilon": 1.0, "delta": 1e-5}, ["optimizer is missing"]),
        (
            {"optimizer": adam(), "epsilon": 1.0, "delta": 1e-5, "metrics": ["accuracy"]},
            ["validation_metrics"],
        ),
        ({"optimizer": adam(), "epsilon": 1.0, "delta": 1e-5, "loss": "mse"}, ["loss"]),
        (
            {"optimizer": adam(), "epsilon": 1.0, "delta": 1e-5, "planned_epochs": 0},
            ["planned_epochs", "0"],
        ),
        (
            {"optimizer": adam(noise_multiplier=1.0), "planned_epochs": 3},
            ["planned_epochs", "epsilon"],
        ),
        (
            {"optimizer": adam(), "epsilon": 1.0, "delta": 1e-5, "accountant": "guess"},
            ["accountant", "guess"],
        ),
        (
            {"optimizer": adam(), "epsilon": 1.0, "delta": 1e-5, "physical_batch_size": 0},
            ["physical_batch_size"],
        ),
    ],
)
def test_compile_refuses(arguments, words):
    model = Toy()
    with pytest.raises((ValueError, TypeError)) as caught:
        model.compile(**arguments)
    for word in words:
        assert word in str(caught.value)
    with pytest.raises(RuntimeError, match="compile"):
        model.fit(X, Y, verbose=0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"x": X}, ["y is missing", "fit(x, y)"]),
        ({"x": X[:, :2], "y": Y}, ["likelihood failed", "for MatMul with input shapes: [3,2]"]),
        ({"x": X, "y": Y[:, None]}, ["likelihood", "[3]"]),
    ],
)
def test_records_that_the_likelihood_does_not_take_are_refused(regression, arguments, words):
    check_refused(regression, arguments, words)


@pytest.mark.parametrize("clip", [0.0, -1.0, float("NaN"), True, "1", None])
def test_the_clip_must_be_positive(clip):
    with pytest.raises(ValueError, match="l2_norm_clip"):
        adam(l2_norm_clip=clip)


@pytest.mark.parametrize("noise", [-1.0, float("NaN"), float("inf"), False, "1"])
def test_the_noise_must_be_a_number(noise):
    with pytest.raises((ValueError, TypeError), match="noise_multiplier"):
        adam(noise_multiplier=noise)


def test_no_clip_with_noise_is_refused():
    with pytest.raises(ValueError, match="noise_multiplier=0"):
        adam(l2_norm_clip=float("inf"), noise_multiplier=1.0)


def test_fit_before_compile():
    with pytest.raises(RuntimeError, match=r"fit was called before compile: call compile"):
        Toy().fit(X, Y)


def test_checks_before_compile():
    with pytest.raises(RuntimeError, match=r"fit\(checks=\) was called before compile"):
        dpvi.DPVI(prior(), likelihood).fit(X, Y, checks=0.1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            {"likelihood": lambda p, x: tfd.Normal(x, 1.0)},
            ["log_prob has shape [3, 3]", "tfd.Independent"],
        ),
        (
            {"likelihood": lambda p, x: tf.linalg.matvec(x, p["w"])},
            ["likelihood", "TFP distribution"],
        ),
        (
            {"likelihood": lambda p, x: tfd.Bernoulli(logits=p["nothing"])},
            ["likelihood failed", "nothing"],
        ),
    ],
)
def test_a_wrong_likelihood_spends_nothing(arguments, words):
    model = dpvi.DPVI(prior(), **arguments, clipping="flat")
    model.compile(optimizer=adam(), epsilon=1.0, delta=1e-5)
    with pytest.raises((ValueError, TypeError)) as caught:
        model.fit(X, X if "tfd.Independent" in words else Y, verbose=0)
    for word in words:
        assert word in str(caught.value)
    assert model.privacy_ledger.num_releases == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((3.0, likelihood), ["prior", "3.0"]),
        ((tfd.Bernoulli(0.5), likelihood), ["prior", "int32", "floating"]),
        ((tfd.Normal(0.0, 1.0), "text"), ["likelihood", "text"]),
        ((tfd.Normal(0.0, 1.0), lambda: None), ["likelihood", "0 arguments"]),
        (
            (tfd.Normal(0.0, 1.0), likelihood, "fancy"),
            ["surrogate_posterior", "fancy", "mean_field"],
        ),
        ((tfd.Normal(0.0, 1.0), likelihood, 5), ["surrogate_posterior", "5"]),
        ((tfd.Normal(0.0, 1.0), likelihood, tfd.Normal(0.0, 1.0)), ["no trainable variables"]),
        ((tfd.Normal(0.0, 1.0), likelihood, tfd.Normal(tf.Variable([0.0]), 1.0)), ["batch shape"]),
        (
            (tfd.Normal(0.0, 1.0), likelihood, tfd.MultivariateNormalDiag(tf.Variable([0.0, 0.0]))),
            ["event shape"],
        ),
    ],
)
def test_the_constructor_refuses(arguments, words):
    with pytest.raises((ValueError, TypeError)) as caught:
        dpvi.DPVI(*arguments, clipping="flat")
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("name", ["num_draws", "num_predictive_draws"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_draws_are_counted(name, value):
    with pytest.raises((ValueError, TypeError), match=name):
        dpvi.DPVI(prior(), likelihood, **{name: value}, clipping="flat")


def test_gradients_has_two_values():
    with pytest.raises(ValueError, match="aligned"):
        dpvi.DPVI(prior(), likelihood, gradients="ghost", clipping="flat")


def test_y_for_a_model_of_whole_records():
    model = dpvi.DPVI(tfd.Normal(0.0, 1.0), lambda mean: tfd.Normal(mean, 1.0), clipping="flat")
    model.compile(optimizer=adam(), epsilon=1.0, delta=1e-5)
    with pytest.raises(ValueError, match=r"fit\(x\)"):
        model.fit(X[:, 0], Y, verbose=0)
    assert model.privacy_ledger.num_releases == 0


def test_batches_of_the_callers_choice_are_refused(model):
    for call in (model.train_on_batch, model.train_step):
        with pytest.raises(RuntimeError, match="fit"):
            call((X, Y))


@pytest.mark.parametrize("call", ["fit", "compile"])
def test_fit_and_compile_from_a_callback_are_refused(call):
    """By a sentence that names the cause; what the outer fit had run is charged, and the model can be fitted again."""
    model, ones = Toy(1), np.ones([20, 1], "float32")
    sgd = lambda: dpvi.optimizers.DPKerasSGDOptimizer(l2_norm_clip=1.0, noise_multiplier=1.0)  # noqa: E731
    calls = {
        "fit": lambda: model.fit(ones, batch_size=5, verbose=0),
        "compile": lambda: model.compile(sgd()),
    }
    model.compile(sgd(), steps_per_execution=2)
    spent = 0
    for when, ran in {
        "on_train_begin": 0,
        "on_train_batch_end": 2,
        "on_epoch_end": 4,
        "on_train_end": 4,
    }.items():
        callback = dpvi.keras.callbacks.LambdaCallback(**{when: lambda *arguments: calls[call]()})
        with pytest.raises(
            RuntimeError, match=rf"{call} was called while fit runs.*Call {call} after"
        ):
            model.fit(ones, batch_size=5, verbose=0, callbacks=[callback])
        spent += ran
        assert model.privacy_ledger.num_releases == spent
    calls[call]()
    calls["fit"]()
    assert model.privacy_ledger.num_releases == spent + (8 if call == "fit" else 4)


def test_a_fit_that_could_not_begin_does_not_block_the_next(monkeypatch):
    model, ones = Toy(1), np.ones([20, 1], "float32")
    sgd = dpvi.optimizers.DPKerasSGDOptimizer(l2_norm_clip=1.0, noise_multiplier=1.0)
    model.compile(sgd, unsafe_training_metrics=True)
    with monkeypatch.context() as patched:
        patched.setattr(
            model.privacy_ledger,
            "record_exposure",
            lambda text: (_ for _ in ()).throw(OSError("disk full")),
        )
        with pytest.raises(OSError, match="disk full"):
            model.fit(ones, batch_size=5, verbose=0)
    model.fit(ones, batch_size=5, verbose=0)
    assert model.privacy_ledger.num_releases == 4
