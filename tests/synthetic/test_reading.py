"""A table that is read in parts gives the levels of the whole one, or is refused as a whole."""

from __future__ import annotations

import io

import numpy as np
import pandas as pd
import pytest

import tfp_dpvi as dpvi
from tfp_dpvi.synthetic import AtMost, Categorical, Continuous, Integer, Schema
from tfp_dpvi.synthetic.reading import encoded

SCHEMA = Schema(
    {
        "ward": Categorical(["A", "B"], missing=True),
        "age": Integer(0, 99),
        "stay": Continuous(0.0, 99.0),
    }
)
NUM = 100


def frame():
    generator = np.random.default_rng(0)
    stay = generator.uniform(0.0, 99.0, NUM)
    return pd.DataFrame(
        {
            "ward": pd.array(generator.choice(["A", "B", None], NUM), "string"),
            "age": pd.array(np.floor(stay * generator.random(NUM)).astype(int), "Int64"),
            "stay": stay,
        }
    )


def parts_of(whole, size=30):
    return (whole.iloc[place : place + size] for place in range(0, len(whole), size))


def as_dict(part):
    return {name: part[name].to_numpy() for name in part}


def test_parts_have_the_levels_of_the_whole():
    whole = frame()
    layout, codes = encoded(SCHEMA, [AtMost("age", "stay")], whole)
    chunks = pd.read_csv(
        io.StringIO(whole.to_csv(index=False)),
        chunksize=30,
        dtype={"ward": "string", "age": "Int64"},
    )
    arrow = pytest.importorskip("pyarrow")
    batches = arrow.Table.from_pandas(whole, preserve_index=False).to_batches(max_chunksize=30)
    for parts, container in (
        (parts_of(whole), "pandas"),
        (chunks, "pandas"),
        ([as_dict(part) for part in parts_of(whole)], "dict"),
        (batches, "pyarrow"),
    ):
        found, levels = encoded(SCHEMA, [AtMost("age", "stay")], parts)
        np.testing.assert_array_equal(levels, codes)
        assert found.container == container
        assert container != "pandas" or found == layout


def test_a_fit_of_parts_counts_all_records():
    synthesizer = dpvi.Synthesizer(SCHEMA, 2, seed=0)
    synthesizer.fit(parts_of(frame()), noise_multiplier=1e-3, delta=1e-5, steps=1)
    assert abs(synthesizer.estimate.mean("stay").estimate[0] - frame()["stay"].mean()) < 1.0
    assert len(synthesizer.sample()) == NUM


def altered(name, value):
    part = frame().iloc[:30]
    return part.assign(**{name: value})


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (altered("age", pd.array([100] * 30, "Int64")), r"^part 2 of data: .*'age'"),
        (
            altered("age", 0),
            r"^part 2 of data: column 'age' has the dtype '<i8', .* part 'pandas Int64'",
        ),
        (altered("stay", 0.0), r"^part 2 of data: rules: AtMost of 'age', 'stay' does not hold"),
        (as_dict(frame()), r"^part 2 of data: it is of dict, and the first of pandas\."),
        (frame().drop(columns="age"), r"^part 2 of data: "),
        (np.ones([3, 3]), r"^part 2 of data is a ndarray: each must be a DataFrame"),
        (41, r"^part 2 of data is a int: each must be a DataFrame"),
    ],
)
def test_a_part_that_is_not_as_described_is_refused_before_anything_is_spent(second, message):
    synthesizer = dpvi.Synthesizer(SCHEMA, 2, rules=[AtMost("age", "stay")])
    ledger = dpvi.PrivacyLedger()
    with pytest.raises((TypeError, ValueError), match=message) as caught:
        synthesizer.fit([frame(), second], epsilon=1.0, delta=1e-5, ledger=ledger)
    assert len(str(caught.value).splitlines()) <= 2
    assert ledger.num_releases == 0


def test_no_parts_and_no_tables_are_refused():
    used = parts_of(frame())
    assert len(list(used)) == 4
    for data, message in (
        (used, "data has no records"),
        ([frame().iloc[:0]], "data has no records"),
        (io.StringIO("A,41\n"), "part 1 of data is a str: each"),
        (frame()["age"], "must be a DataFrame"),
        ([41], "part 1 of data is a int: each"),
        (np.ones([3, 3]), "must be a DataFrame"),
        ("visits.csv", "must be a DataFrame"),
        (7, "must be a DataFrame"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            encoded(SCHEMA, [], data)
    with pytest.raises(TypeError) as caught:
        encoded(SCHEMA, [], iter([41]))
    assert "41" not in str(caught.value)


def test_parts_may_be_empty_or_have_other_categories():
    whole = frame().astype({"ward": "category"})
    parts = [
        part.assign(ward=part["ward"].cat.remove_unused_categories()) for part in parts_of(whole, 1)
    ]
    _, codes = encoded(SCHEMA, [], [whole.iloc[:0], *parts, whole.iloc[:0]])
    np.testing.assert_array_equal(codes, encoded(SCHEMA, [], whole)[1])


class Unusual(AtMost):
    def holds(self, values):
        raise UnicodeDecodeError("utf-8", b"", 0, 1, "text")


def test_an_error_of_any_signature_names_the_part():
    with pytest.raises(ValueError, match=r"part 1 of data: .*text"):
        encoded(SCHEMA, [Unusual("age", "stay")], [frame()])
