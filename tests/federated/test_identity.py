"""Studies are compared by what they compute, and records with the study's columns; a refusal names what differs."""

import functools

import numpy as np
import pytest

import tfp_dpvi as dpvi
from tfp_dpvi._tf import tf, tfd
from tfp_dpvi.data import Binary, Categorical, Continuous, Integer, Schema
from tfp_dpvi.federated import Hospital, MessageError, Server, Study, StudyTerms, Synchronous
from tfp_dpvi.federated.columns import Columns
from tfp_dpvi.federated.refiner import Refiner

PRIOR = tfd.JointDistributionNamed({"w": tfd.Sample(tfd.Normal(0.0, 2.0), 2)})
SCHEMA = Schema(
    {
        "height": Continuous(0.4, 2.5, bins=4),
        "age": Integer(0, 110, bins=4),
        "ill": Binary(),
    }
)
EXAMPLE = (np.array([[1.7, 40.0], [1.6, 20.0]], np.float32), np.array([0, 1], np.int32))


def likelihood(params, x):
    return tfd.Bernoulli(logits=tf.linalg.matvec(x, params["w"]))


def twice(params, x):
    return tfd.Bernoulli(logits=2.0 * tf.linalg.matvec(x, params["w"]))


def nearly(params, x):
    return tfd.Bernoulli(logits=(1.0 + 1e-6) * tf.linalg.matvec(x, params["w"]))


twice.__qualname__ = nearly.__qualname__ = "likelihood"


def study(function=likelihood, *, clip=1.0, **settings):
    optimizer = dpvi.optimizers.DPKerasAdamOptimizer(l2_norm_clip=clip, learning_rate=0.05)
    return Study(
        PRIOR,
        function,
        optimizer,
        **{"name": "t", "local_steps": 2, "calibrated": False, **settings},
    )


def difference(one, other):
    """Returns the refusal of one study for another's message, or None."""
    try:
        one.terms.check_same(other.terms.identity)
    except MessageError as error:
        return str(error)
    return None


COLUMNS = {"schema": SCHEMA, "outcome": "ill"}


@pytest.mark.parametrize(
    ("settings", "other", "names"),
    [
        ({}, {}, None),
        (COLUMNS, COLUMNS, None),
        ({"example": EXAMPLE}, {"example": EXAMPLE}, None),
        ({}, {"local_steps": 3}, "another local_steps;"),
        ({}, {"name": "u"}, "another name;"),
        ({}, {"clip": 2.0}, "another clip, settings.optimizer;"),
        ({}, {"initial_stddev": 0.2}, "another start_precision, settings.initial_stddev;"),
        ({}, {"family": "full_rank"}, "another prior, settings.family;"),
        ({}, {"function": twice}, "another settings.code;"),
        (COLUMNS, {"function": twice, **COLUMNS}, "another likelihood;"),
        (COLUMNS, {"function": nearly, **COLUMNS}, None),
        ({"example": EXAMPLE}, {"function": twice, "example": EXAMPLE}, "another likelihood;"),
        (
            COLUMNS,
            {
                "schema": Schema({**SCHEMA.columns, "height": Continuous(40.0, 250.0, bins=4)}),
                "outcome": "ill",
            },
            "another schema, likelihood;",
        ),
        (COLUMNS, {}, "schema, settings.outcome, likelihood, settings.code;"),
    ],
)
def test_studies_are_compared_by_content(settings, other, names):
    said = difference(study(**settings), study(**other))
    assert (said is None) == (names is None), said
    assert names is None or (names in said and said.count("\n") <= 1)


def times(factor):
    def likelihood(params, x):
        return tfd.Bernoulli(logits=factor * tf.linalg.matvec(x, params["w"]))

    return likelihood


def scaled(params, x, factor, of=tfd.Bernoulli):
    return of(logits=factor * tf.linalg.matvec(x, params["w"]))


@pytest.mark.parametrize(
    "make",
    [
        times,
        lambda factor: functools.partial(scaled, factor=factor, of=tfd.Bernoulli),
        lambda factor: times(np.full(3, factor, "float32")),
    ],
)
def test_constants_that_a_likelihood_reads_are_part_of_its_code(make):
    """They had the same source text: a hospital took tasks of another likelihood."""
    assert difference(study(function=make(1.0)), study(function=make(1.0))) is None
    assert "settings.code" in difference(study(function=make(1.0)), study(function=make(2.0)))


def test_lambdas_on_different_lines_differ():
    first = lambda p, x: tfd.Bernoulli(logits=tf.linalg.matvec(x, p["w"]))  # noqa: E731
    second = lambda p, x: tfd.Normal(tf.linalg.matvec(x, p["w"]), 1.0)  # noqa: E731
    assert "settings.code" in difference(study(first), study(second))


@pytest.mark.parametrize(
    "identity", [None, 3, "", "name:x", "likelihood:a,b " * 9, "x" * 9000, "\x1b["]
)
def test_an_identity_that_is_none_is_refused(identity):
    with pytest.raises(MessageError, match="is not this one"):
        study().terms.check_same(identity)


def test_terms_with_a_schema_come_back_from_a_file(tmp_path):
    terms = study(**COLUMNS).terms
    terms.save(tmp_path / "terms.json")
    again = StudyTerms.load(tmp_path / "terms.json")
    assert again.identity == terms.identity
    assert Schema.from_json(again.schema).names == ("height", "age", "ill")
    assert len(again.likelihood) == 8


def test_a_hospitals_report_says_what_was_taken_to_be_public(refiner):
    hospital = Hospital(study(**COLUMNS), TABLE, name="A", epsilon=1.0, rounds=2, refiner=refiner)
    assert hospital.privacy_report().schema == str(SCHEMA)
    x, y = EXAMPLE
    assert Hospital(study(), x, y, name="A", epsilon=1.0, rounds=2).privacy_report().schema is None


def test_a_refused_task_costs_nothing_and_names_the_field():
    x, y = EXAMPLE
    hospital = Hospital(study(), x, y, name="A", epsilon=1.0, rounds=2)
    (task,) = Server(study(initial_stddev=0.2).terms, ["A"], Synchronous(2)).due()
    with pytest.raises(MessageError, match=r"settings\.initial_stddev"):
        hospital.answer(task.to_bytes())
    assert hospital.spent == 0.0


# ------------------------------------------------------------------------------------------ records


TABLE = {
    "ill": np.array([0, 1, 1]),
    "age": np.array([3, 50, 80]),
    "height": np.array([0.9, 1.7, 1.6]),
}
ARRAY = np.stack([TABLE["height"], TABLE["age"]], axis=1)


@pytest.fixture(scope="module")
def refiner():
    return Refiner(study(**COLUMNS))


def test_columns_go_by_their_names():
    """A table in another order is not another table."""
    columns = Columns(SCHEMA, "ill")
    x, y = columns.arrays(TABLE, None)
    np.testing.assert_array_equal(x, ARRAY.astype(np.float32))
    np.testing.assert_array_equal(y, TABLE["ill"])
    again, _ = columns.arrays(ARRAY, TABLE["ill"])
    np.testing.assert_array_equal(again, x)


@pytest.mark.parametrize(
    ("x", "y", "says"),
    [
        (ARRAY[:, ::-1], TABLE["ill"], "outside its public bounds, 0.4 to 2.5"),
        ({**TABLE, "height": 100 * TABLE["height"]}, None, "in other units"),
        (100 * ARRAY, TABLE["ill"], "in other units"),
        ({**TABLE, "age": TABLE["age"] + 0.5}, None, "'age' that are not whole"),
        ({**TABLE, "more": TABLE["age"]}, None, "not in the schema"),
        ({"height": TABLE["height"], "ill": TABLE["ill"]}, None, "lacks described columns: 'age'"),
        (ARRAY[:, :1], TABLE["ill"], "the study's schema 2 inputs"),
        (ARRAY, None, "y is missing"),
        (ARRAY, TABLE["ill"] + 1, "'ill' outside"),
        (ARRAY, np.array(["a", "b", "c"]), "'ill' has values that are no numbers"),
        (ARRAY[:0], TABLE["ill"][:0], "x holds no records"),
    ],
)
def test_records_that_are_not_the_study_s_are_refused(refiner, x, y, says):
    """In a sentence that shows no value, and before anything is spent."""
    with pytest.raises(ValueError, match=says) as error:
        refiner.data(x, y, None)
    assert str(error.value).count("\n") <= 1
    assert not any(value in str(error.value) for value in ("170", "160", "50.5", "80.5"))


def test_records_of_another_shape_than_the_example_are_refused():
    x, y = EXAMPLE
    with pytest.raises(ValueError, match=r"the study's example \(2,\)"):
        Hospital(study(example=EXAMPLE), x[:, :1], y, name="A", epsilon=1.0)


def test_columns_that_are_no_numbers_are_refused_when_the_study_is_made():
    with pytest.raises(ValueError, match="'ward' is a Categorical"):
        study(schema=Schema({"ward": Categorical(["a", "b"])}))
    with pytest.raises(ValueError, match="pass one of them"):
        study(**COLUMNS, example=EXAMPLE)
    with pytest.raises(ValueError, match="outcome='sick' is unknown"):
        study(schema=SCHEMA, outcome="sick")
