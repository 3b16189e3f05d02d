"""Exports of regressions: columns of the export are those of the formula, and predictions those of the model."""

import json
import pathlib
import sys
import types

import numpy as np
import pytest

import tfp_dpvi as dpvi

pytest.importorskip("formulae")

import tensorflow as tf

from tfp_dpvi.regressions.fit import described
from tfp_dpvi.regressions.serving import predict_signature

ROOT = pathlib.Path(__file__).parents[2]
COLUMNS = {
    "age": {"type": "continuous", "lower": 20, "upper": 80},
    "rooms": {"type": "integer", "lower": 1, "upper": 4},
    "female": {"type": "binary"},
    "ward": {"type": "categorical", "categories": ["A", "B: north", "C"]},
}
OUTCOMES = {
    "normal": {"type": "continuous", "lower": -40, "upper": 160},
    "bernoulli": {"type": "binary"},
    "poisson": {"type": "integer", "lower": 0, "upper": 60},
    "ordinal": {"type": "integer", "lower": 1, "upper": 3},
    "categorical": {"type": "categorical", "categories": ["a", "b", "c"]},
    "binomial": {"type": "integer", "lower": 0, "upper": 9},
    "beta_binomial": {"type": "integer", "lower": 0, "upper": 9},
}
RECORDS = {
    "age": np.array([20.0, 33.25, 80.0]),
    "rooms": np.array([4, 1, 2]),
    "female": np.array([1, 0, 1]),
    "ward": np.array(["B: north", "A", "C"], object),
}


def regression(formula, family, num_draws=40, **settings):
    """A regression whose posterior is its prior, for nothing is fitted."""
    schema = {"y": OUTCOMES[family], **COLUMNS}
    design, parts = described(formula, family, schema, **settings)

    def posterior_sample(num, seed):
        prior = dpvi.regressions.families.make_prior(**parts.prior)
        return {name: part.numpy() for name, part in prior.sample(num_draws, seed=[0, 1]).items()}

    model = types.SimpleNamespace(posterior_sample=posterior_sample)
    return dpvi.Regression(design, parts, model)


def signature(result):
    return predict_signature(result.design, result.parts, result._draws, 0.9)


def tensors(records, exported):
    return {
        name: tf.constant(records[name].tolist(), spec.dtype)
        for name, spec in exported.inputs.items()
    }


@pytest.mark.parametrize(
    ("formula", "family", "settings"),
    [
        ("y ~ age * ward + np.log(age) + C(rooms):female", "normal", {}),
        ("y ~ age + female + (1 | person)", "bernoulli", {"unit": "person"}),
        ("y ~ female + (1 | ward)", "poisson", {}),
        ("y ~ age + (1 | person)", "ordinal", {"unit": "person"}),
        ("y ~ age + ward", "categorical", {}),
        ("y ~ mo(ward) + age + mo(rooms)", "categorical", {}),
        ("p(y, 9) ~ age", "binomial", {}),
        ("p(y, 9) ~ age", "beta_binomial", {}),
        ("p(y, rooms) ~ age + (1 | person)", "binomial", {"unit": "person"}),
    ],
)
def test_an_export_predicts_as_the_regression(formula, family, settings):
    result = regression(formula, family, **settings)
    exported = signature(result)
    served = exported.function(**tensors(RECORDS, exported))
    wanted = result.predict(RECORDS, level=0.9)
    assert len(set(exported.inputs) & set(COLUMNS)) == len(exported.inputs)
    if family in ("ordinal", "categorical"):
        wanted = wanted.to_numpy().reshape(3, 3, 3)
        for place, name in enumerate(("mean", "mean_low", "mean_high")):
            np.testing.assert_allclose(served[name], wanted[:, :, place], rtol=1e-5)
        return
    for name, values in served.items():
        np.testing.assert_allclose(values, wanted[name], rtol=1e-5)


@pytest.mark.parametrize(
    ("formula", "sentence"),
    [
        ("y ~ bs(age, df=4)", "TensorFlow alone does not compute the term 'bs"),
        ("y ~ scale(age)", "TensorFlow alone does not compute the term 'scale"),
        ("y ~ age + offset(np.log(age))", "the formula has an offset"),
        ("y ~ 1", "export needs a covariate"),
    ],
)
def test_what_tensorflow_alone_does_not_compute_is_refused(formula, sentence):
    with pytest.raises(ValueError, match=r"^export[: ]") as caught:
        signature(regression(formula, "bernoulli"))
    assert sentence in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 2


@pytest.mark.parametrize(
    ("term", "column"),
    [
        ("code", {"type": "categorical", "categories": [2**24, 2**24 + 1]}),
        ("C(code)", {"type": "integer", "lower": 2**24, "upper": 2**24 + 1}),
    ],
)
def test_codes_that_float32_does_not_tell_apart_are_refused(monkeypatch, term, column):
    """Two wards would have had the effect of one, in silence."""
    monkeypatch.setitem(COLUMNS, "code", column)
    with pytest.raises(ValueError, match=r"export: TensorFlow alone does not compute the term"):
        signature(regression(f"y ~ {term}", "bernoulli"))


@pytest.mark.parametrize(
    ("name", "value"),
    [("age", 81.25), ("age", np.nan), ("rooms", 1.5), ("female", 2), ("ward", "Z")],
)
def test_values_that_the_schema_does_not_allow_are_refused(name, value):
    """By the column and what it may be; the value is not shown."""
    exported = signature(regression("y ~ age + rooms + female + ward", "bernoulli"))
    given = tensors({**RECORDS, name: np.array([value] * 3, object)}, exported)
    with pytest.raises(tf.errors.InvalidArgumentError, match=f"{name} must be") as caught:
        exported.function(**given)
    assert str(value) not in str(caught.value)


def test_clipped_values_are_those_of_the_fit():
    result = regression("y ~ age", "bernoulli", outside="clip")
    exported = signature(result)
    served = exported.function(age=tf.constant([10.0, 90.0]))
    wanted = result.predict({"age": np.array([10.0, 90.0])})
    np.testing.assert_allclose(served["mean"], wanted["mean"], rtol=1e-5)


def test_effects_at_values_of_other_covariates():
    """As an interaction is read: the effect of one covariate at values of another."""
    result = regression("y ~ age * ward + female", "bernoulli")
    table = result.effects("age", num=3, at={"ward": "C", "female": 1})
    records = {
        "age": np.array([20.0, 50.0, 80.0]),
        "ward": np.full(3, "C"),
        "female": np.ones(3, int),
    }
    np.testing.assert_allclose(table["mean"], result.predict(records)["mean"])
    assert not np.allclose(table["mean"], result.effects("age", num=3)["mean"])


@pytest.mark.parametrize(
    ("at", "sentence"),
    [
        ({"age": 30}, r"at has \['age'\], which are no other covariates: use female, ward."),
        ({"y": 1}, r"at has \['y'\], which are no other covariates"),
        ({"ward": "Z"}, "ward"),
        ({"female": 0.5}, "female"),
    ],
)
def test_effects_at_what_is_not_allowed(at, sentence):
    with pytest.raises(ValueError, match=sentence):
        regression("y ~ age * ward + female", "bernoulli").effects("age", at=at)


# ---------------------------------------------------------------------- saved_models/doctor_visits


def made():
    sys.path.insert(0, str(ROOT / "saved_models"))
    try:
        import make_doctor_visits
    finally:
        sys.path.pop(0)
    return make_doctor_visits


def test_the_saved_regression_protects_persons_and_is_small():
    """It has no identifier, and its report is that of persons."""
    pytest.importorskip("statsmodels")
    folder = ROOT / "saved_models" / "doctor_visits"
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 3e5
    report = json.loads((folder / "assets.extra" / "privacy_report.json").read_text())
    assert (report["unit"], report["num_records"]) == ("person", 5912)
    assert report["epsilon"] <= 1.0
    assert report["private"]
    text = (folder / "assets.extra" / "regression.txt").read_text()
    assert made().FORMULA in text
    assert "Warnings: none." in text
    held = b"".join(path.read_bytes() for path in files)
    for person in made().load()["person"].unique():
        assert int(person).to_bytes(8, "little") not in held
        assert str(person).encode() not in held


@pytest.mark.slow
def test_the_saved_regression_is_made_again(tmp_path):
    module = made()
    result = module.learn(module.load())
    result.export(tmp_path / "model")
    assert module.largest_difference(result, tmp_path / "model") < 1e-6
    with pytest.raises(ValueError, match="earlier export"):
        result.export(tmp_path / "model")
