"""A record's design row is a function of that record and the schema alone."""

import numpy as np
import pandas as pd
import pytest

from tfp_dpvi.data import Binary, Categorical, Continuous, Date, Integer, Schema

formulae = pytest.importorskip("formulae")

from tfp_dpvi.regressions import Design  # noqa: E402

SCHEMA = Schema(
    {
        "y": Integer(0, 50),
        "age": Continuous(17.0, 90.0, typical=(45.0, 15.0), unit="years"),
        "inc": Continuous(0.0, 2e5, unit="dollars"),
        "ward": Categorical(["B", "A", "C"], shares=[0.6, 0.39, 0.01]),
        "sex": Binary(),
        "year": Integer(2000, 2005),
        "part": Continuous(0.0, 1.0, missing=True),
        "kind": Categorical(["u", "v"], missing=True),
        "when": Date("2020-01-01", "2021-01-01"),
    }
)
NUM = 40
ACCEPTED = [
    "y ~ age",
    "y ~ 1",
    "y ~ 0 + ward",
    "y ~ age * ward",
    "y ~ ward:sex",
    "y ~ (age + sex + ward)**2",
    "y ~ bs(age, df=4)",
    "y ~ bs(age, knots=knots)",
    "y ~ cr(age, df=4)",
    "y ~ poly(age, 3)",
    "y ~ scale(age) + center(inc) + standardize(sex)",
    "y ~ np.log1p(inc) + np.sqrt(age)",
    "y ~ I(age**2) + {age / (inc + 1)} + {age > 40}",
    "y ~ age + offset(np.log1p(inc))",
    "y ~ C(year) * sex",
    "y ~ S(year)",
    "y ~ T(year, 2002)",
    "y ~ age + (1 | ward) + (1 | year)",
    "y ~ age + (1 | ward:year)",
    "y ~ age + part + kind",
    "y ~ scale(np.log1p(inc))",
]


def records(seed=3):
    generator = np.random.default_rng(seed)
    data = SCHEMA.simulate(NUM, seed)
    for name in ("part", "kind"):
        data[name] = data[name].astype(object)
        data[name][generator.random(NUM) < 0.3] = None
    return data


def matrix(rows):
    return np.concatenate([rows.common, rows.offset[:, None], rows.groups], axis=1)


def design(formula):
    return Design(formula, SCHEMA, missing="indicator", constants={"knots": [30.0, 60.0]})


@pytest.mark.parametrize("formula", ACCEPTED)
def test_a_row_alone_equals_its_row_in_the_table(formula):
    """Up to the last bit of a product of matrices, whose order of sums depends on its size."""
    data = records()
    made = design(formula)
    together = matrix(made.rows(data))
    assert len(together) == NUM
    for row in range(0, NUM, 7):
        alone = {name: values[[row]] for name, values in data.items()}
        np.testing.assert_allclose(
            matrix(made.rows(alone))[0], together[row], rtol=1e-12, atol=1e-13
        )
    others = {name: values[[5, 5, 8]] for name, values in data.items()}
    np.testing.assert_allclose(matrix(made.rows(others))[2], together[8], rtol=1e-12, atol=1e-13)


def test_the_levels_are_the_schemas_and_the_first_is_the_reference():
    assert design("y ~ ward").labels == ("ward[A]", "ward[C]")
    (group,) = design("y ~ (1 | ward)").groups
    assert group.labels == ("1|ward[B]", "1|ward[A]", "1|ward[C]")


@pytest.mark.parametrize(
    ("formula", "message"),
    [
        ("y ~ np.mean(age)", "no function of one record"),
        ("y ~ {age - np.max(age)}", "no function of one record"),
        ("y ~ np.sort(age)", "no function of one record"),
        ("y ~ np.cumsum(age)", "no function of one record"),
        ("y ~ np.add.reduce(age)", "no function of one record"),
        ("y ~ binary(sex, 1)", "no function of one record"),
        ("y ~ scale(np.ptp(age))", "no function of one record"),
        ("y ~ tp(age)", "no function of one record"),
        ("y ~ hsgp(age)", "no function of one record"),
        ("y ~ foo", "'foo', which the schema lacks"),
        ("y ~ age +", "formula"),
        ("~ age", "cannot be evaluated"),
        ("age", "no outcome"),
        ("y ~ 0", "no terms"),
        ("y ~ (1 | age)", "levels must be public"),
        ("y ~ C(age)", "levels must be public"),
        ("y ~ C(ward)", "write ward instead"),
        ("y ~ (age | ward)", "intercepts"),
        ("y ~ when", "derive a number"),
        ("np.log1p(y) + sex ~ age", "formula"),
        ("y ~ (age || ward)", "use an interaction, x:g"),
        ("y ~ age || ward", "use an interaction, x:g"),
        ("censored(y, sex) ~ age", "a status says who is censored"),
        ("Surv(y, sex) ~ age", "a status says who is censored"),
        ("truncated(y, lb=1) ~ age", "no family is truncated"),
        ("constrained(y, lb=0, ub=9) ~ age", "no family has bounds of your own"),
        ("weighted(y, inc) ~ age", "as weights="),
    ],
)
def test_what_is_no_function_of_a_record_is_refused(formula, message):
    with pytest.raises(ValueError, match=message) as caught:
        design(formula)
    assert len(str(caught.value).splitlines()) <= 2


def test_what_formulae_says_of_records_is_not_shown(monkeypatch):
    def fail(*args, **kwargs):
        raise ValueError("formula: no number: 'Smith'")

    made = design("y ~ age")
    monkeypatch.setattr(type(made._matrices.common), "evaluate_new_data", fail)
    with pytest.raises(ValueError, match="cannot be evaluated for these records") as caught:
        made.rows(records())
    assert "Smith" not in str(caught.value)


def test_missing_values_need_a_rule_and_no_row_is_dropped():
    with pytest.raises(ValueError, match="indicator"):
        Design("y ~ part", SCHEMA)
    data = records()
    made = design("y ~ part + kind")
    assert made.labels == ("part", "kind[v]", "kind[missing]", "part[missing]")
    rows = made.rows(data).common
    absent = pd.isna(data["part"])
    np.testing.assert_array_equal(rows[:, 3], absent)
    np.testing.assert_array_equal(rows[absent, 0], 0.5)
    with pytest.raises(ValueError, match=r"age.*missing"):
        design("y ~ age").rows({"age": np.array([20.0, np.nan])})


def test_a_category_of_the_name_of_missing_values_is_refused():
    kind = Categorical(["a", "missing"], missing=True)
    with pytest.raises(ValueError, match="'kind' has the category 'missing'"):
        Design("y ~ kind", Schema({"y": Integer(0, 9), "kind": kind}), missing="indicator")


def test_numbers_outside_are_refused_by_name_or_clipped():
    data = {"age": np.array([20.0, 120.0])}
    with pytest.raises(ValueError, match="'age' has values outside its public bounds") as caught:
        design("y ~ age").rows(data)
    assert "120" not in str(caught.value)
    clipped = Design("y ~ age", SCHEMA, outside="clip").rows(data).common
    assert clipped[:, 0].tolist() == [20.0, 90.0]


def test_terms_that_are_not_finite_are_refused():
    with pytest.raises(ValueError, match="not finite"):
        Design("y ~ np.log(inc)", SCHEMA)


def test_columns_are_scaled_by_the_schema_and_dummies_are_not():
    made = design("y ~ age + sex + ward")
    assert made.location[0] == pytest.approx(45.0, abs=1.0)
    assert made.scale[0] == pytest.approx(15.0, rel=0.05)
    assert made.scale[1:].tolist() == [1.0, 1.0, 1.0]
