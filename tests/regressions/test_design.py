"""A record's design row is a function of that record and the schema alone."""

import contextlib
import inspect
import itertools
import string

import numpy as np
import pandas as pd
import pytest

from tfp_dpvi.data import Binary, Categorical, Continuous, Date, Integer, Schema

formulae = pytest.importorskip("formulae")

from formulae.scanner import Scanner  # noqa: E402
from formulae.transforms import TRANSFORMS as FUNCTIONS  # noqa: E402

from tfp_dpvi.regressions import Design  # noqa: E402
from tfp_dpvi.regressions.design import CATEGORIES, PLAIN  # noqa: E402
from tfp_dpvi.regressions.responses import (  # noqa: E402
    CENSORED,
    TRIALS,
    UFUNCS,
    calls_of,
    response_of,
)
from tfp_dpvi.regressions.transforms import TRANSFORMS  # noqa: E402

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
        "share": Continuous(0.1, 0.9),
        "trials": Integer(0, 50),
        "until": Continuous(0.0, 50.0),
        "place": Categorical(["A[1]", "B"]),
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
    "y ~ mo(ward) + age + mo(`year`)",
    "y ~ age + (1 | ward) + (1 | year)",
    "y ~ age + (1 | ward:year)",
    "y ~ age + part + kind",
    "y ~ scale(np.log1p(inc))",
    "y ~ age - 1",
    "y ~ age / ward + `inc`",
    "y ~ ward / age",
    "y ~ ward * age - age",
    "y ~ {place == 'A[1]'} + {ward == \"A\"} + {age != 40} + {age >= 30} + {age < 60} + {age <= 50}",
    "y ~ {-age} + {+inc} + {age - inc} + {2 * age}",
    "y ~ {True + age}",
    "y ~ age + (1 | ward / year)",
    "y ~ age + (1 | ward * sex)",
    "y ~ age + (0 + 1 | ward)",
    "y ~ age + (age | ward)",
    "y ~ (0 + np.log1p(inc) | ward)",
    "y ~ (age + inc | ward) + (age | year)",
    "y ~ (sex | ward / year)",
    "y ~ (scale(age) + part | ward)",
    "y ~ bs(age, df=6, degree=2)",
    "y ~ bs(age, df=5, center=False)",
    "y ~ bs(age, df=5, intercept=True)",
    "y ~ bs(age, df=5, lower_bound=10, upper_bound=95)",
    "y ~ cr(age, knots=knots, lower_bound=10, upper_bound=95, center=False)",
    "y ~ poly(age, 3, raw=True)",
    "y ~ S(year, omit=2001)",
    "y ~ scale(age) + scale(np.log1p(inc)) + offset(age) + offset(np.log1p(inc))",
    "y ~ {ward < 'C'}:ward + {'A' != ward} + {sex == True}",
    "np.log1p(y) ~ age",
    "p(y, trials) ~ age",
    "prop(y, 50) ~ age",
    "proportion(y, trials) ~ age + trials",
    "censored(y, until) ~ age",
    "censored(y, until) ~ age + until",
    "censored(y, 40) ~ age",
    "censored(y, until, 'left') ~ age",
]
# Arguments of accepted functions that no formula may have.
REFUSED_ARGUMENTS = {
    ("C", "contrast"): "y ~ C(year, contrast=knots)",
    ("C", "levels"): "y ~ C(year, levels=knots)",
    ("S", "levels"): "y ~ S(year, levels=knots)",
    ("T", "levels"): "y ~ T(year, levels=knots)",
}
# Where an operator of formulae may stand.
PLACES = (
    "y ~ ward {} sex",
    "y ~ ({} ward)",
    "y ~ {}1 + age",
    "y ~ age + {{part {} share}}",
    "y ~ age + {{{} share}}",
    "y ~ age + (1 | ward {} year)",
    "y ~ (ward + sex) {} 2",
)


def records(seed=3):
    generator = np.random.default_rng(seed)
    data = SCHEMA.simulate(NUM, seed)
    for name in ("part", "kind"):
        data[name] = data[name].astype(object)
        data[name][generator.random(NUM) < 0.3] = None
    return data


def matrix(design, data):
    """All that a model is told of records by their formula."""
    rows = design.rows(data)
    outcome = design.transformed_outcome(np.asarray(data["y"], np.float64))
    columns = [rows.offset[:, None], outcome[:, None]]
    parts = [rows.common, *columns, rows.groups, rows.trials, rows.limits]
    return np.concatenate(parts, axis=1)


def design(formula):
    return Design(formula, SCHEMA, missing="indicator", constants={"knots": [30.0, 60.0]})


def check_rows(made, data, step=7):
    """Up to the last bit of a product of matrices, whose order of sums depends on its size."""
    together = matrix(made, data)
    assert len(together) == NUM
    for row in range(0, NUM, step):
        alone = {name: values[[row]] for name, values in data.items()}
        np.testing.assert_allclose(matrix(made, alone)[0], together[row], rtol=1e-12, atol=1e-13)
    others = {name: values[[5, 5, 8]] for name, values in data.items()}
    np.testing.assert_allclose(matrix(made, others)[2], together[8], rtol=1e-12, atol=1e-13)


@pytest.mark.filterwarnings("ignore:'intercept' is deprecated:FutureWarning")
@pytest.mark.parametrize("formula", ACCEPTED)
def test_a_row_alone_equals_its_row_in_the_table(formula):
    check_rows(design(formula), records())


def spellings():
    """Returns all signs that formulae's scanner knows, by their kinds."""
    found = {}
    pairs = map("".join, itertools.product(string.punctuation, repeat=2))
    for text in (*string.punctuation, *pairs):
        with contextlib.suppress(Exception):
            (token,) = Scanner(text).scan(add_intercept=False)[:-1] or [None]
            found[token.kind] = text
    return found


def test_each_operator_that_is_accepted_is_a_function_of_one_record():
    """formulae's scanner says which signs there are: one that is new to it is tried here too."""
    data, accepted = records(), {}
    for text in spellings().values():
        for place in PLACES:
            try:
                made = design(place.format(text))
            except ValueError:
                continue
            check_rows(made, data, step=19)
            accepted.setdefault(place, set()).add(text)
    compared = {"==", "!=", "<", "<=", ">", ">="}
    assert accepted == {
        PLACES[0]: {"+", "-", "*", "/", ":"},
        PLACES[1]: {"+"},
        PLACES[2]: {"+", "-"},
        PLACES[3]: {"+", "-", "*", "/", "**", *compared},
        PLACES[4]: {"+", "-"},
        PLACES[5]: {"+", "-", "*", "/", ":"},
        PLACES[6]: {"**", "-"},
    }


def arguments(formula):
    """Returns the calls of a formula, each with the names of the arguments that it is given."""
    description = formulae.model_description(formula)
    calls = [*calls_of(description), response_of(description)[1]]
    for call in filter(None, calls):
        function = FUNCTIONS.get(call.callee)
        if function is None:
            yield call.callee, ""
        else:
            names = list(inspect.signature(function).parameters)[-10:]
            yield from ((call.callee, name) for name in names[: len(call.args)])
            yield from ((call.callee, name) for name in call.kwargs)


def test_each_function_and_argument_that_is_accepted_is_in_the_list():
    known = {*TRANSFORMS, *CATEGORIES, *PLAIN, *TRIALS}
    used = {pair for formula in ACCEPTED for pair in arguments(formula)}
    assert (CENSORED, "") in used
    there = {
        (name, argument)
        for name in known
        for argument in inspect.signature(FUNCTIONS[name]).parameters
    }
    assert there - used == set(REFUSED_ARGUMENTS)
    for formula in REFUSED_ARGUMENTS.values():
        with pytest.raises(ValueError, match="formula"):
            design(formula)
    for name in FUNCTIONS.keys() - known:
        with pytest.raises(ValueError, match="no function of one record"):
            design(f"y ~ {name}(age)")


def test_each_function_of_numpy_that_is_accepted_is_a_function_of_one_record():
    """Those of one float that give one number; others are refused."""
    accepted = []
    for name, ufunc in vars(UFUNCS).items():
        term = f"np.{name}({'share + 1' if name in ('acosh', 'arccosh') else 'share'})"
        if ufunc.nout == 1 and any(kind.startswith("d->") for kind in ufunc.types):
            accepted.append(term)
        else:
            with pytest.raises(ValueError, match="cannot be evaluated"):
                design(f"y ~ {term}")
    assert len(accepted) > 40
    check_rows(design("y ~ " + " + ".join(accepted)), records())


@pytest.mark.parametrize(
    ("short", "long"),
    [
        ("y ~ ward / sex", "y ~ ward + ward:sex"),
        ("y ~ ward * age - age", "y ~ ward + ward:age"),
        ("y ~ (ward + sex)**2", "y ~ ward + sex + ward:sex"),
    ],
)
def test_an_operator_is_short_for_the_terms_that_it_stands_for(short, long):
    """formulae has other columns for records than for its reference where terms share a part."""
    data = records()
    assert design(short).labels == design(long).labels
    np.testing.assert_array_equal(matrix(design(short), data), matrix(design(long), data))


def test_the_levels_are_the_schemas_and_the_first_is_the_reference():
    assert design("y ~ ward").labels == ("ward[A]", "ward[C]")
    (group,) = design("y ~ (1 | ward)").groups
    assert group.labels == ("1|ward[B]", "1|ward[A]", "1|ward[C]")


def test_two_bars_say_that_effects_of_a_level_are_independent():
    two, one = design("y ~ (age || ward)"), design("y ~ (age | ward)")
    assert two.groups == one.groups
    assert (two.correlated, one.correlated) == ((), ((0, 1),))


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
        ("y ~ mo(age)", "at least three ordered levels"),
        ("y ~ mo(sex)", "at least three ordered levels"),
        ("y ~ mo(ward, year)", "at least three ordered levels"),
        ("y ~ mo()", "at least three ordered levels"),
        ("y ~ mo(np.abs(year))", "at least three ordered levels"),
        ("y ~ mo(kind)", "at least three ordered levels"),
        ("y ~ mo(ward):age", "stands alone"),
        ("y ~ age * mo(ward)", "stands alone"),
        ("y ~ (mo(ward) | year)", "stands alone"),
        ("y ~ np.exp(mo(year))", "takes one value|stands alone"),
        ("y ~ (bs(age, df=4) | ward)", "slopes are of one number each"),
        ("y ~ (0 + ward | year)", "slopes are of one number each"),
        ("y ~ (np.mean(age) | ward)", "no function of one record"),
        ("y ~ (np.log(sex) | ward)", "is not finite"),
        ("y ~ when", "derive a number"),
        ("when ~ age", "derive a number"),
        ("y ~ 2 * age", "'2', which the schema lacks"),
        ("y ~ ward[A]", "for it alone"),
        ("y ~ age:I(ward['A'])", "for it alone"),
        ("y ~ (1 | ward[A])", "for it alone"),
        ("y ~ {age % 2}", "cannot be evaluated"),
        ("y ~ (age | ward) * sex", r"multiplies the group term of '1\|ward'"),
        ("y ~ age % sex + inc", "has % where no term can go on"),
        ("y ~ age == 40 + inc", "has == where no term can go on"),
        ("y ~ age) + inc", r"has \) where no term can go on"),
        ("y ~ age inc", "has inc where no term can go on"),
        ("y ~ {age / (inc + 1)} + {(age / inc) + 1}", "two terms named"),
        ("y ~ np.exp((age + 1) * sex) + np.exp(age + 1 * sex)", "two terms named"),
        ("np.log1p(y) + sex ~ age", "formula"),
        ("y ~ age || ward", r"has \| where no term can go on"),
        ("censored(y, sex) ~ age", "a status says who is censored"),
        ("Surv(y, sex) ~ age", "a status says who is censored"),
        ("truncated(y, lb=1) ~ age", "no family is truncated"),
        ("constrained(y, lb=0, ub=9) ~ age", "no family has bounds of your own"),
        ("weighted(y, inc) ~ age", "as weights="),
        ("np.exp(scale(y)) ~ age", "the outcome may be a column or np.log of it"),
        ("np.exp(center(y)) ~ age", "the outcome may be a column or np.log of it"),
        ("np.log1p(y, y) ~ age", "the outcome may be a column or np.log of it"),
        ("y ~ np.sqrt(age, inc)", "takes one value and nothing else"),
        ("y ~ np.sqrt(age, out=inc) + inc", "takes one value and nothing else"),
        ("y ~ np.sqrt(age, where=np.signbit(share))", "takes one value and nothing else"),
        ("y ~ age:offset(inc)", "an offset within a term"),
        ("y ~ age * offset(inc)", "an offset within a term"),
        ("y ~ I(offset(inc))", "an offset within a term"),
        ("y ~ {ward == 'a'}", "'ward' with 'a', which is none of its levels"),
        ("y ~ {1 == ward}", "'ward' with 1, which is none of its levels"),
        ("y ~ {year != '2001'}", "the numbers 'year' with the text '2001'"),
        ("y ~ np.exp({sex == 'True'})", "the numbers 'sex' with the text 'True'"),
        ("y ~ {kind == 'u'}", "'kind', which may be missing"),
        ("y ~ {-age ** 2}", "not read as in Python"),
        ("y ~ age + np.exp({share ** 2 ** 0.5})", "not read as in Python"),
        ("y ~ {20 < age < 40}", "not read as in Python"),
        ("y + sex ~ age", "formula='y \\+ sex ~ age' cannot be evaluated"),
        ("y ~ poly(age, 0)", r"poly\(age, 0\), without a column"),
        ("y ~ scale(np.log1p(inc)) + scale(age)", r"write scale\(z\) first"),
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


FAR = {
    "fitting bounds": {},
    "far bounds": {"age": Continuous(0.0, 1e5, typical=(45.0, 12.0))},
    "many whole numbers": {"age": Integer(0, 400, typical=(45.0, 12.0))},
    "another column": {"k": Integer(0, 400)},
    "many levels": {"k": Categorical([f"c{number}" for number in range(300)])},
}


def transformed(formula, change):
    """The design's columns of records of 45 and 57 years."""
    columns = {"y": Integer(0, 50), "age": Continuous(0.0, 100.0, typical=(45.0, 12.0)), **change}
    design = Design(formula + " + k" * ("k" in change), Schema(columns))
    data = {"age": np.array([45, 57])}
    if "k" in change:
        data["k"] = np.array([getattr(change["k"], "categories", [0])[0]] * 2, object)
    return design, design.rows(data).common


@pytest.mark.parametrize("change", FAR.values(), ids=FAR)
def test_what_is_centred_and_scaled_is_so_by_typical_values_alone(change):
    """Bounds, and other columns, do not change a coefficient's unit: they did."""
    design, columns = transformed("y ~ scale(age)", change)
    np.testing.assert_allclose(columns[:, 0], [0.0, 1.0], atol=1e-9)
    assert design.transformed == ["scale(age): (age - 45) / 12"]
    design, columns = transformed("y ~ center(age)", change)
    np.testing.assert_allclose(columns[:, 0], [0.0, 12.0], atol=1e-9)
    assert design.transformed == ["center(age): age - 45"]


def test_the_centre_is_said_to_six_digits_with_one_sign():
    columns = {"y": Integer(0, 50), "cold": Continuous(-90.0, 90.0, typical=(-4.25, 7.5))}
    design = Design("y ~ scale(x=cold)", Schema(columns))
    assert design.transformed == ["scale(x=cold): (cold + 4.25) / 7.5"]


def test_what_is_the_same_of_all_invented_records_has_a_scale():
    """No record that is far beyond typical values makes a formula fail."""
    columns = {"y": Integer(0, 50), "age": Continuous(0.0, 1e5, typical=(45.0, 12.0))}
    design = Design("y ~ scale({age > 9000})", Schema(columns))
    assert np.isfinite(design.rows({"age": np.array([45.0, 1e5])}).common).all()


@pytest.mark.parametrize("formula", ["y ~ scale(np.sqrt(age))", "y ~ poly(age, 2)"])
@pytest.mark.parametrize("change", list(FAR.values())[1:], ids=list(FAR)[1:])
def test_other_transforms_have_the_unit_of_invented_records(formula, change):
    """Up to the error of 4,000 of these."""
    (_, expected), (_, columns) = transformed(formula, {}), transformed(formula, change)
    found = columns[1] - columns[0]
    np.testing.assert_allclose(found[0], (expected[1] - expected[0])[0], rtol=0.15)
