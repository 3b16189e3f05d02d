"""Regressions from a formula: six families in dollars and years, results, files and bad input."""

import sys
import types

import numpy as np
import pandas as pd
import pytest
from support.regressions import COLUMNS, OUTCOMES, SLOPES, asked, simulated
from support.siblings import slow

import tfp_dpvi as dpvi
from tfp_dpvi.data import Continuous, Schema
from tfp_dpvi.regressions import plots
from tfp_dpvi.regressions.fit import described

pytest.importorskip("formulae")


def fit(family, **settings):
    formula, schema = asked(family)
    arguments = {"epsilon": 1.0, "delta": 1e-5, "seed": 2, **settings}
    return dpvi.regression(formula, simulated(family), family, schema, **arguments)


@pytest.fixture(scope="module")
def poisson():
    return fit("poisson")


def truths(family):
    unit = 8000.0 if family in ("normal", "student") else 1.0
    if family == "categorical":
        both = (("low: ", 1.0), ("high: ", -1.0))
        return {f"{start}{name}": sign * v for start, sign in both for name, v in SLOPES.items()}
    return {name: unit * value for name, value in SLOPES.items()}


def check_near(result, family):
    """Within 5 posterior deviations: a false alarm in a million for each coefficient."""
    table = result.summary()
    for name, truth in truths(family).items():
        assert abs(table.loc[name, "mean"] - truth) < 5.0 * table.loc[name, "sd"], name
    assert (table["sd"] > 0.0).all()
    assert table.loc[next(iter(truths(family))), ["noise", "data", "prior"]].sum() == pytest.approx(
        1.0, abs=0.02
    )


@pytest.mark.parametrize("family", [slow(name) for name in OUTCOMES if name != "poisson"])
def test_each_family_finds_a_right_model_in_awkward_units(family):
    check_near(fit(family), family)


def test_counts_in_awkward_units(poisson):
    check_near(poisson, "poisson")


def test_predictions_have_the_index_of_their_records(poisson):
    """Assigned to a part of a frame they would else belong to other records, or be missing."""
    frame = pd.DataFrame({name: values[:9] for name, values in simulated("poisson").items()})
    part = frame[frame.index % 2 == 0]
    predicted = poisson.predict(part)
    assert list(predicted.index) == [0, 2, 4, 6, 8]
    np.testing.assert_array_equal(predicted, poisson.predict(part.to_dict("list")))


@pytest.mark.parametrize("term", ["{}", "age + {}", "age:{}", "np.log1p({})", "(1 | {})"])
def test_an_outcome_is_no_term(term):
    with pytest.raises(ValueError, match="formula has the outcome 'y' as a term"):
        described("y ~ " + term.format("y"), "poisson", asked("poisson")[1])


@pytest.mark.parametrize("term", ["bs(age, knots=[40])", "C(ward, levels=['A', 'B', 'C'])"])
def test_a_list_in_a_formula_is_a_constant(term):
    with pytest.raises(ValueError, match=r"formula has a list: name it, .* constants="):
        described(f"y ~ {term}", "poisson", asked("poisson")[1])


def test_priors_are_a_dict():
    with pytest.raises(TypeError, match="priors must be a dict, such as"):
        described("y ~ age", "poisson", asked("poisson")[1], [("age", 1)])


def test_measured_is_a_list():
    with pytest.raises(TypeError, match=r"measured must be a list of columns, such as \['age'\]"):
        fit("poisson", measured="age")


def test_predictions_effects_and_text(poisson):
    new = {name: values[:4] for name, values in simulated("poisson").items() if name != "y"}
    table = poisson.predict(pd.DataFrame(new))
    assert len(table) == 4
    assert (table["mean_low"] < table["mean"]).all()
    assert (table["mean"] < table["mean_high"]).all()
    effects = poisson.effects("age", num=5)
    assert effects["age"].tolist() == [18.0, 36.0, 54.0, 72.0, 90.0]
    # Typically 45,000 +- 30,000: what lies beyond three deviations is hardly anybody's.
    assert poisson.effects("income", num=2)["income"].max() == 135_000.0
    assert list(poisson.effects("ward")["ward"]) == ["A", "B", "C"]
    with pytest.raises(ValueError, match="no covariate"):
        poisson.effects("y")
    with pytest.raises(ValueError, match="num=0 must be at least 1"):
        poisson.effects("age", num=0)
    for at in ("ward", {"ward": ["A", "B"]}):
        with pytest.raises(TypeError, match="at must be a dict of one value each"):
            poisson.effects("age", at=at)
    text = repr(poisson)
    assert text.index("epsilon 1") < text.index("ward[C]")
    # The test's fit has a seed.
    assert text.splitlines()[0].endswith("NOT PRIVATE")
    assert "<table" in poisson._repr_html_()
    report = poisson.report()
    for part in ("typically 45000 +- 30000 (given)", "prior of income", "Privacy report"):
        assert part in report


def test_a_saved_regression_is_the_same(poisson, tmp_path):
    poisson.save(tmp_path / "fit.zip")
    loaded = dpvi.Regression.load(tmp_path / "fit.zip")
    pd.testing.assert_frame_equal(loaded.summary(), poisson.summary())
    assert loaded.choices() == poisson.choices()
    with pytest.raises(ValueError, match="no file that"):
        dpvi.Regression.load(__file__)


def test_pictures(poisson):
    import matplotlib as mpl

    mpl.use("Agg")
    assert len(poisson.plot().get_yticks()) == 5
    assert poisson.plot("age").get_xlabel() == "age (years)"
    assert poisson.plot("ward").get_ylabel() == "expected y"


@pytest.mark.parametrize(
    ("elsewhere", "name"),
    [("gaussian", "normal"), ("negbinomial", "negative_binomial"), ("cumulative", "ordinal")],
)
def test_names_of_other_libraries_are_those_of_families(elsewhere, name):
    schema = {"x": {"type": "binary"}, "y": {"type": "integer", "lower": 0, "upper": 4}}
    assert described("y ~ x", elsewhere, schema)[1] == described("y ~ x", name, schema)[1]
    with pytest.raises(ValueError, match="family='gauss' is unknown; pass one of 'normal',"):
        described("y ~ x", "gauss", schema)


@pytest.mark.parametrize(
    ("name", "family"), [("sigma", "normal"), ("nu", "student"), ("Intercept", "normal")]
)
def test_a_column_with_the_name_of_a_parameter_is_refused(name, family):
    # The table would show the parameter in the coefficient's place.
    columns = {"y": Continuous(0.0, 9.0), name: Continuous(-1.0, 1.0)}
    with pytest.raises(ValueError, match=f"{name!r}.*rename") as refused:
        described(f"y ~ {name}", family, Schema(columns))
    assert len(str(refused.value).splitlines()) <= 2


def test_a_column_may_have_the_name_of_another_familys_parameter():
    columns = {"y": Continuous(0.0, 9.0), "nu": Continuous(-1.0, 1.0)}
    assert described("y ~ nu", "normal", Schema(columns))[0].labels == ("nu",)


def test_only_a_familys_own_parameters_are_left_out_of_the_picture():
    mpl = pytest.importorskip("matplotlib")
    mpl.use("Agg")
    draws = {name: np.arange(4.0) for name in ("Intercept", "low: Intercept", "nu", "log_alpha")}
    ax = plots.forest(draws, "y", hidden=("Intercept", "low: Intercept", "nu"))
    assert [label.get_text() for label in ax.get_yticklabels()] == ["log_alpha"]


@pytest.mark.parametrize("version", ["0.23.4", "1.0.0"])
def test_draws_for_both_versions_of_arviz(poisson, monkeypatch, version):
    def from_dict(groups=None, **named):
        assert (groups is None) == (version == "0.23.4")
        return groups or named

    module = types.SimpleNamespace(__version__=version, from_dict=from_dict)
    monkeypatch.setitem(sys.modules, "arviz", module)
    assert poisson.to_inference_data()["posterior"]["age"].shape == (4, 1000)


@pytest.mark.filterwarnings("ignore:Passing a dict or None as alias_mapping")
def test_arviz_reads_and_draws_a_regression(poisson, tmp_path):
    """The ArviZ that is installed: 1 on Python 3.13, and 0.23 on those before it."""
    az = pytest.importorskip("arviz")
    pytest.importorskip("matplotlib").use("Agg")
    data = poisson.to_inference_data()
    table, found = az.summary(data, kind="stats"), poisson.summary()
    assert set(table.index) <= set(found.index)
    for name in SLOPES:
        assert float(table.loc[name, "mean"]) == pytest.approx(
            found.loc[name, "mean"], abs=0.1 * found.loc[name, "sd"] + 0.01
        )
    if az.__version__.startswith("0"):
        az.plot_forest(data)[0].figure.savefig(tmp_path / "forest.png")
    else:
        az.plot_forest(data).savefig(tmp_path / "forest.png")
    assert (tmp_path / "forest.png").stat().st_size > 5000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"family": "gauss"}, "family"),
        ({"family": "bernoulli"}, "described as Binary"),
        ({"priors": {"agee": (0, 1)}}, "no terms"),
        ({"priors": {"age": (0, -1)}}, "positive deviation"),
        ({"priors": {"age": "wide"}}, "mean and a standard deviation"),
        ({"formula": "np.log(y) ~ age"}, "use \"normal\""),
        ({"data": {"age": np.ones(3)}}, "lacks described columns"),
        ({"data": {"age": np.full(3, 30), "y": np.array([1, 2, -1])}}, "outside its public"),
        ({"data": {"age": np.full(3, 30), "y": np.array([1, 2, 0.5])}}, "not Integer"),
        ({"data": 3}, "data must be"),
        ({"data": {"age": np.zeros(0), "y": np.zeros(0)}}, "data has no rows"),
        ({"seed": "a"}, "seed='a' is not an integer"),
        ({"epsilon": None}, "epsilon=None is not a number"),
        ({"delta": None}, "delta=None is not a number"),
        ({"measured": 3}, "measured must be a list of columns"),
        ({"constants": [30]}, "constants must be a dict"),
        ({"constants": {"np": np}}, "constants has 'np', which is NumPy"),
        ({"weights": np.ones(3)}, "weights=a ndarray"),
        ({"formula": "y ~ 0 + age", "priors": {"Intercept": (0, 1)}}, "'Intercept', and the formula"),
        ({"schema": {"y": {"type": "count"}}}, "needs a type"),
    ],
)  # fmt: skip
def test_bad_input_is_named_in_two_lines_and_nothing_is_spent(change, message):
    ledger = dpvi.PrivacyLedger()
    arguments = {
        "formula": "y ~ age",
        "data": {"age": np.full(3, 30), "y": np.arange(3)},
        "family": "poisson",
        "schema": Schema({"y": OUTCOMES["poisson"], "age": COLUMNS["age"]}),
        "epsilon": 1.0,
        "delta": 1e-5,
        "ledger": ledger,
        **change,
    }
    with pytest.raises((TypeError, ValueError), match=message) as caught:
        dpvi.regression(**arguments)
    assert len(str(caught.value).splitlines()) <= 2
    assert ledger.num_releases == 0


def test_priors_in_the_users_units_reach_the_model():
    """With next to no budget the posterior is the prior."""
    data = simulated("bernoulli", num=400)
    schema = Schema({"y": OUTCOMES["bernoulli"], "age": COLUMNS["age"], "ward": COLUMNS["ward"]})
    priors = {"age": (0.5, 0.001), "ward": (1.0, 0.01)}
    result = dpvi.regression(
        "y ~ age + ward", data, "bernoulli", schema, epsilon=0.01, delta=1e-5, seed=2, priors=priors
    )
    table = result.summary()
    assert table.loc["age", "mean"] == pytest.approx(0.5, abs=0.005)
    assert table.loc["ward[B]", "mean"] == pytest.approx(1.0, abs=0.05)
