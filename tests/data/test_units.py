"""Rows grouped by person: whose rows, which of them, and what is no identifier."""

import datetime
import uuid

import numpy as np
import pandas
import pytest

from tfp_dpvi.data import make_records, make_units
from tfp_dpvi.privacy import PersonUnit

try:
    import polars
except ImportError:  # No dependency of the library.
    polars = None

needs_polars = pytest.mark.skipif(polars is None, reason="polars is not installed")


def rows_by_person(unit_ids, units):
    """The rows that are used, by identifier."""
    found = {}
    for places, mask in zip(units.places, units.mask, strict=True):
        own = places[mask]
        owners = {unit_ids[place] for place in own}
        assert len(owners) == 1, "a unit has rows of one person"
        (owner,) = owners
        assert owner not in found, "a person has one unit"
        found[owner] = own.tolist()
    return found


IDENTIFIERS = {
    "integers": [7, 3, 7, 7, 9, 3],
    "texts": ["7", "3", "7", "7", "9", "3"],
    "bytes": [b"7", b"3", b"7", b"7", b"9", b"3"],
    "tuples": [(1, 2), (1, 3), (1, 2), (1, 2), (2, 2), (1, 3)],
    "uuids": [uuid.UUID(int=each) for each in (7, 3, 7, 7, 9, 3)],
    "dates": [datetime.date(2000, 1, day) for day in (7, 3, 7, 7, 9, 3)],
}


@pytest.mark.parametrize("kind", IDENTIFIERS)
def test_rows_of_a_person_are_found_wherever_they_are(kind):
    """Any hashable value."""
    ids = IDENTIFIERS[kind]
    units = make_units(ids, 6, 3)
    assert rows_by_person(ids, units) == {ids[0]: [0, 2, 3], ids[1]: [1, 5], ids[4]: [4]}
    # Filled up with a row of the person's own, so that no value is new.
    assert all(
        np.isin(row, row[mask]).all() for row, mask in zip(units.places, units.mask, strict=True)
    )


@pytest.mark.parametrize(
    "convert",
    [
        np.array,
        pandas.Series,
        lambda ids: pandas.Series(ids, index=range(50, 44, -1)),
        lambda ids: pandas.Series(ids).astype("category"),
        pytest.param(lambda ids: polars.Series(ids), marks=needs_polars),
        pytest.param(lambda ids: polars.Series(ids).cast(polars.Categorical), marks=needs_polars),
    ],
)
def test_columns_are_taken_as_lists_are(convert):
    ids = IDENTIFIERS["texts"]
    expected = make_units(ids, 6, 3)
    units = make_units(convert(ids), 6, 3)
    assert np.array_equal(units.places, expected.places)
    assert np.array_equal(units.mask, expected.mask)


def test_the_first_rows_or_random_ones():
    ids = ["a", "b"] * 10
    first = make_units(ids, 20, 3, "first")
    assert first.places.tolist() == [[0, 2, 4], [1, 3, 5]]
    assert first.person == PersonUnit(3, "first")
    seen = np.zeros(20)
    for seed in range(400):
        units = make_units(ids, 20, 3, seed=seed)
        assert units.mask.all()
        assert (np.diff(units.places, axis=1) > 0).all()
        seen[units.places.reshape(-1)] += 1
    # Each with probability .3: a standard error of .023.
    assert np.abs(seen / 400 - 0.3).max() < 0.1
    keyless = {make_units(ids, 20, 3).places.tobytes() for _ in range(5)}
    assert len(keyless) > 1


def test_a_persons_rows_are_chosen_apart_from_others():
    """C3: with the same random numbers for the same rows, others' rows do not depend on a person."""
    ids = np.repeat([1, 2, 3], 8)
    for seed in range(20):
        three = rows_by_person(ids, make_units(ids, 24, 4, seed=seed))
        two = rows_by_person(ids[:16], make_units(ids[:16], 16, 4, seed=seed))
        assert {1: three[1], 2: three[2]} == two


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1.0, 2.0, 3.0], "floats"),
        (np.array([1.0, 2.0, 3.0]), "no identifier"),
        (np.array([1.0, np.nan, 3.0]), "no identifier"),
        ([True, False, True], "booleans"),
        (["a", None, "b"], "missing"),
        ([1, float("nan"), 2], "missing"),
        (pandas.Series(["a", None, "b"]), "missing"),
        (pandas.Series([1, None, 2], dtype="Int64"), "missing"),
        (np.array(["2000-01-01", "NaT", "2001-01-01"], "datetime64[D]"), "missing"),
        # A float column with gaps after astype(str), and a file that pandas read in pieces.
        (pandas.Series([1.0, np.nan, 2.0]).astype(str), "missing"),
        (["a", " None", "b"], "missing"),
        (["NA", "NA", "b"], "missing"),
        ([b"", b"a", b"c"], "missing"),
        ([7, "7", 8], "several kinds"),
        ([b"7", "7", "8"], "several kinds"),
        ([(1, 2), 7, 8], "several kinds"),
        ([1, 2], "one identifier for each of the 3 rows"),
        (np.ones([3, 1], int), "one identifier for each of the 3 rows"),
        ([[1], [2], [3]], "not hashable"),
        ("person", "frame"),
    ],
)
def test_what_is_no_identifier(ids, message):
    """One or two lines that name the argument, and no identifier."""
    with pytest.raises((ValueError, TypeError), match=message) as error:
        make_units(ids, 3, 2)
    text = str(error.value)
    assert text.startswith("unit_ids")
    assert len(text.splitlines()) <= 2


@pytest.mark.parametrize("most", [0, -1, 2.5, "2", True])
def test_the_number_of_rows_is_a_count(most):
    with pytest.raises((ValueError, TypeError), match="max_rows_per_unit"):
        make_units([1, 2, 3], 3, most)


def test_records_of_one_row_each_stay_as_they_are():
    x, y = np.arange(12.0).reshape([6, 2]), np.arange(6.0)
    records = make_records(x, y, None, dtype=np.dtype("float32"), validate=True)
    ids = IDENTIFIERS["integers"]
    single = records.by_person(make_units(ids, 6, 1, "first"))
    assert single.num == 3
    assert single.y.tolist() == [0.0, 1.0, 4.0]
    assert single.x.tolist() == x[[0, 1, 4]].tolist()
    several = records.by_person(make_units(ids, 6, 2, "first"))
    assert several.x.rows.shape == (3, 2, 2)
    assert several.y.tolist() == [[0.0, 2.0], [1.0, 5.0], [4.0, 4.0]]
    assert several.x.mask.tolist() == [[True, True], [True, True], [True, False]]


def test_persons_have_as_many_places_as_is_public():
    """How many rows the longest person has is private, and norms are rounded by the number of places."""
    records = make_records(
        np.arange(12.0).reshape([6, 2]), np.arange(6.0), None, dtype=np.dtype("f4"), validate=True
    )
    tensors = records.by_person(make_units(IDENTIFIERS["integers"], 6, 50, "first")).tensors()
    assert tensors["x"].rows.shape == (3, 50, 2)
    assert tensors["x"].mask.numpy().sum(axis=1).tolist() == [3, 2, 1]
    assert tensors["y"].numpy()[0, :4].tolist() == [0.0, 2.0, 3.0, 0.0]


def visits(num=40, most=4, seed=0):
    """Outcomes of visits in no order of persons, the outcome before, and an input."""
    rng = np.random.default_rng(seed)
    ids = rng.permutation(np.repeat(np.arange(num), most))
    y = rng.poisson(2.0, len(ids)).astype(float)
    before = np.zeros(len(ids))
    for each in range(num):
        own = np.flatnonzero(ids == each)
        before[own[1:]] = y[own[:-1]]
    return ids, y, before, rng.normal(size=len(ids))


@pytest.mark.parametrize("newest_first", [False, True])
@pytest.mark.parametrize(
    "change", [np.array, lambda before: (before - 1.7) / 3.1, lambda before: -np.log1p(before)]
)
def test_an_outcome_of_another_row_among_the_inputs_is_refused(change, newest_first):
    """Twins are drawn given x, which would hold their person's outcomes; by each name x may have."""
    ids, y, before, x = (part[:: -1 if newest_first else 1] for part in visits())
    lag = change(before)
    for inputs, name in (
        (np.stack([x, lag], axis=1), r"x\[:, 1\]"),
        ({"a": x, "lag": lag}, r"x\['lag'\]"),
    ):
        records = make_records(inputs, y, None, dtype=np.dtype("float32"), validate=True)
        for most in (1, 4):
            with pytest.raises(ValueError, match=f"^{name} is the outcome of the person") as error:
                records.refuse_earlier_outcomes(make_units(ids, len(y), most))
            assert len(str(error.value).splitlines()) <= 2


@pytest.mark.parametrize("change", [np.array, lambda y: 0.5 - 2.0 * y])
def test_the_outcome_itself_is_no_outcome_of_another_row(change):
    """Where it does not change within a person: the reason given is not that of an earlier outcome."""
    ids, _, _, x = visits()
    y = np.random.default_rng(1).integers(0, 2, 40).astype(float)[ids]
    records = make_records(
        np.stack([x, change(y)], axis=1), y, None, dtype=np.dtype("float32"), validate=True
    )
    with pytest.raises(ValueError, match=r"^x\[:, 1\] is the outcome itself") as error:
        records.refuse_earlier_outcomes(make_units(ids, len(y), 4))
    assert len(str(error.value).splitlines()) <= 2


def test_inputs_that_are_like_outcomes_are_taken():
    """A lagged input, the outcome of another person, and an outcome with noise are no earlier outcome."""
    ids, y, before, x = visits()
    noisy = before + 0.2 * x
    for other in (x, np.roll(y, 1), noisy, np.zeros(len(y)), (x > 0).astype(float)):
        records = make_records({"a": other}, y, None, dtype=np.dtype("float32"), validate=True)
        records.refuse_earlier_outcomes(make_units(ids, len(y), 4))


@needs_polars
def test_a_missing_identifier_of_polars():
    with pytest.raises(ValueError, match="missing"):
        make_units(polars.Series([1, None, 2]), 3, 2)
