"""Counts of pairs and histograms: what one record adds (contract C3), the likelihood, and the levels that are chosen."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfp_dpvi._tf import tf
from tfp_dpvi.privacy.plan import plan_counts
from tfp_dpvi.synthetic import (
    Binary,
    Categorical,
    Continuous,
    Date,
    Integer,
    NoisyPairs,
    Pairs,
    Schema,
    Segments,
    group,
    histograms,
    make_likelihood,
    make_prior,
)
from tfp_dpvi.synthetic.grouping import crowded, depths

TABLE = Schema(
    {
        "a": Categorical(["x", "y", "z"], missing=True),
        "b": Continuous(0, 1, bins=[0.3, 0.6], missing=True),
        "c": Binary(),
        "d": Integer(0, 9, bins=[1, 5]),
    }
)
GENERATOR = np.random.default_rng(0)


def make_codes(num):
    sizes = np.array([3, 3, 2, 3])
    codes = GENERATOR.integers(0, sizes, [num, 4])
    codes[:, :2][GENERATOR.random([num, 2]) < 0.3] = -1
    return codes


@pytest.mark.parametrize("target", [None, 2])
def test_one_record_moves_pairs_by_what_is_stated(target):
    pairs, codes = Pairs(Segments.of(TABLE), target), make_codes(30)
    counts = pairs.counts(codes)
    for place in range(30):
        without = pairs.counts(np.delete(codes, place, axis=0))
        assert np.linalg.norm(counts - without) == pytest.approx(pairs.norm)
        other = codes.copy()
        other[place] = make_codes(1)
        assert np.linalg.norm(counts - pairs.counts(other)) <= math.sqrt(2.0) * pairs.norm + 1e-9
    assert pairs.norm == pytest.approx(math.sqrt(10.0 if target is None else 7.0 + 3 * 4.0))


def test_what_is_not_counted_stays_zero():
    pairs = Pairs(Segments.of(TABLE), 2)
    assert not pairs.counts(make_codes(50))[pairs.weights() == 0.0].any()


def test_counts_are_those_of_a_loop():
    codes, pairs = make_codes(40), Pairs(Segments.of(TABLE), 2)
    counts, sizes = pairs.counts(codes), (4, 4, 2, 3)
    assert pairs.sizes == sizes
    starts = np.cumsum([0, *sizes])
    for i, j in itertools.combinations_with_replacement(range(4), 2):
        block = np.zeros([sizes[i], sizes[j]])
        for record in codes:
            block[record[i] if record[i] >= 0 else 3, record[j] if record[j] >= 0 else 3] += 1
        weight = 2.0 if i != j and 2 in (i, j) else 1.0
        found = counts[starts[i] : starts[i + 1], starts[j] : starts[j + 1]]
        np.testing.assert_array_equal(found, weight * block)


def test_shares_of_a_mixture_are_those_of_its_log_prob():
    params = make_prior(TABLE, 3).sample(seed=[1, 2])
    mixture, pairs = make_likelihood(TABLE)(params), Pairs(Segments.of(TABLE))
    every = np.array(
        list(itertools.product([-1, 0, 1, 2], [-1, 0, 1, 2], [0, 1], [0, 1, 2])), np.int32
    )
    weights = np.exp(mixture.log_prob(every).numpy())
    assert weights.sum() == pytest.approx(1.0, abs=1e-5)
    expected = sum(
        weight * pairs.counts(record[None]) for weight, record in zip(weights, every, strict=True)
    )
    taken = pairs.weights() > 0.0
    np.testing.assert_allclose(pairs.shares(params).numpy()[taken], expected[taken], atol=1e-6)


def test_the_likelihood_is_a_normals_and_knows_the_weights():
    pairs, codes = Pairs(Segments.of(TABLE), 2), make_codes(200)
    noisy = pairs.counts(codes) + GENERATOR.normal(size=[13, 13])
    released = NoisyPairs.of(pairs, noisy, 5.0, 200)
    params = make_prior(TABLE, 2).sample(seed=[1, 2])
    shares, total = pairs.shares(params).numpy().astype(float), 0.0
    for (i, j), weight in np.ndenumerate(pairs.weights()):
        if weight:
            count = noisy[i, j] / weight
            variance = (5.0 / weight) ** 2 + max(count, 1.0) + (200 / 3000) ** 2
            total -= 0.5 * (count - 200 * shares[i, j]) ** 2 / variance
    assert released.log_likelihood(params).numpy() == pytest.approx(total, rel=1e-4)
    several = tf.nest.map_structure(lambda part: tf.stack([part, part]), params)
    assert released.log_likelihood(several).shape == [2]
    np.testing.assert_array_equal(released.column(2), np.diag(noisy)[8:10])


# ---------------------------------------------------------------------- the budget


@pytest.mark.parametrize("relation", ["add_or_remove_one", "replace_one"])
def test_plans_of_counts_spend_one_budget(relation):
    releases = [("histograms", 3.0, 0.1), ("pairs", 10.0, 0.9)]
    first, second = plan_counts(releases, epsilon=1.0, delta=1e-5, neighboring_relation=relation)
    assert 0.998 <= second.epsilon(1e-5, [first.dp_event]) <= 1.0
    (alone,) = plan_counts(
        [("pairs", 10.0, 1.0)], epsilon=1.0, delta=1e-5, neighboring_relation=relation
    )
    assert first.deviation == pytest.approx(3.0 / math.sqrt(0.1) * alone.deviation / 10.0)
    assert second.deviation == pytest.approx(alone.deviation / math.sqrt(0.9), rel=1e-3)
    # A record adds at most 1 to the sum of squares, and a replaced one moves it by 2.
    assert (second.sensitivity.add_or_remove, second.sensitivity.replace) == (
        1.0,
        pytest.approx(math.sqrt(2.0)),
    )


# ---------------------------------------------------------------------- levels


OPEN = [
    Integer(0, 99_999),
    Integer(-50, 49, bins=7, missing=True),
    Continuous(-1.0, 3.0, spikes=[0.5]),
    Date("2020-01-01", "2024-12-31"),
    Categorical(list(range(100)), max_levels=10),
]


@pytest.mark.parametrize("column", OPEN)
def test_one_record_moves_histograms_by_what_is_stated(column):
    levels = GENERATOR.integers(-1, column.fine.num_levels, 20)
    counts = np.concatenate(histograms(column, levels))
    for place in range(20):
        moved = counts - np.concatenate(histograms(column, np.delete(levels, place)))
        assert np.linalg.norm(moved) <= math.sqrt(depths(column)) + 1e-12
        assert moved.min() >= 0.0


@pytest.mark.parametrize("column", OPEN)
@pytest.mark.parametrize("deviation", [0.0, 3.0, 1e6])
def test_whatever_the_noise_there_are_as_many_levels_and_every_value_has_one(column, deviation):
    fine = column.fine
    heavy = GENERATOR.integers(0, fine.num_levels)
    levels = np.where(
        GENERATOR.random(2000) < 0.5, heavy, GENERATOR.integers(0, fine.num_levels, 2000)
    )
    noisy = [
        part + deviation * GENERATOR.normal(size=len(part)) for part in histograms(column, levels)
    ]
    chosen = group(column, noisy, deviation)
    num = column.max_levels if isinstance(column, Categorical) else column.num_levels
    assert chosen.num_levels == num
    assert chosen.description is column
    np.testing.assert_allclose(np.bincount(chosen.groups, chosen.shares), np.ones(num), atol=1e-9)
    codes = np.repeat(np.arange(num, dtype=np.int32), 50)
    np.testing.assert_array_equal(chosen.encode("a", chosen.values(codes, GENERATOR)), codes)
    if deviation < 10.0:
        values = fine.values(np.full(100, heavy), GENERATOR)
        assert len(np.unique(chosen.encode("a", values))) == 1
        again = chosen.values(chosen.encode("a", values), GENERATOR)
        assert np.mean(fine.encode("a", again) == heavy) > 0.5  # A heap stays one.


@settings(max_examples=30)
@given(seed=st.integers(0, 10**6), bins=st.integers(2, 20), width=st.integers(25, 5000))
def test_quantile_bins_hold_about_as_many_records(seed, bins, width):
    generator = np.random.default_rng(seed)
    values = np.minimum(generator.geometric(0.05, 5000), width)
    column = Integer(0, width, bins=bins)
    chosen = group(column, histograms(column, column.fine.encode("a", values)), 0.0)
    counts = np.bincount(chosen.encode("a", values), minlength=bins)
    assert counts.max() <= 2.0 * 5000 / bins + 2 * np.bincount(values).max()


@pytest.mark.parametrize("column", OPEN)
@pytest.mark.parametrize("deviation", [0.0, 3.0, 1e6])
def test_groups_follow_from_finest_levels(column, deviation):
    """Of values at every edge and its neighbours, and of missing ones: the same as if they were encoded anew."""
    column = dataclasses.replace(column, missing=True)
    fine, generator = column.finest, np.random.default_rng(random.getrandbits(32))
    exact = histograms(column, generator.integers(0, fine.num_levels, 500) ** 2 // fine.num_levels)
    chosen = group(
        column, [c + deviation * generator.normal(size=len(c)) for c in exact], deviation
    )
    levels = np.arange(fine.num_levels)
    values = np.append(fine.values(levels, generator).astype(object), None)
    if isinstance(column, Continuous):
        edges = fine.edges[:-1]
        values = np.concatenate([edges, np.nextafter(edges[1:], -np.inf), [np.nan]])
    elif isinstance(column, Date):
        values = np.append(fine.values(levels, generator), np.datetime64("NaT"))
    found = chosen.from_finest(fine.encode("a", values))
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found, chosen.encode("a", values))


def test_declared_spikes_are_alone():
    column = Continuous(0.0, 10.0, bins=5, spikes=[2.5, 7.0])
    chosen = group(
        column, [np.zeros_like(part) for part in histograms(column, np.zeros(0, int))], 0.0
    )
    codes = chosen.encode(
        "a", np.array([2.5, 7.0, np.nextafter(2.5, 0), np.nextafter(2.5, 9), 0.0, 10.0])
    )
    assert np.sum(codes == codes[0]) == np.sum(codes == codes[1]) == 1
    assert set(chosen.values(np.full(50, codes[0]), GENERATOR)) == {2.5}


def test_a_narrow_bin_never_gives_its_upper_edge():
    column = Continuous(0.0, 1.0, bins=[0.5, float(np.nextafter(0.5, 1.0))])
    assert set(column.values(np.ones(200, int), GENERATOR)) == {0.5}


def test_crowded_bins_are_found():
    wide, masses = Integer(0, 999, bins=10), np.eye(10)[3] * 80 + 2.0
    assert crowded(wide, masses) == (300, 400)
    assert crowded(wide, np.ones(10)) is None
    assert crowded(Integer(0, 9, bins=10), masses) is None  # One number each.
    assert (
        crowded(Integer(0, 999, bins=[300, 400, 500, 600]), masses[:5]) is None
    )  # The user's own.
    assert crowded(Binary(), np.array([99.0, 1.0])) is None


# ---------------------------------------------------------------------- dates


def test_dates_there_and_back():
    column = Date("2024-02-27", "2024-03-02", missing=True)
    values = np.array(["2024-02-29T23:59", "2024-03-02", "NaT"], "M8[ns]")
    codes = column.encode("day", values)
    assert codes.tolist() == [2, 4, -1]
    assert column.values(codes[:2], GENERATOR).tolist() == values.astype("M8[D]").tolist()[:2]
    with pytest.raises(
        ValueError, match=r"'day' has values outside .*bounds \[2024-02-27, 2024-03-02\] in 1 row"
    ):
        column.encode("day", np.array(["2024-03-03"], "M8[D]"))
    with pytest.raises(ValueError, match="lower='tomorrow' is no date"):
        Date("tomorrow", "2024-01-01")
    with pytest.raises(ValueError, match="unit='week'"):
        Date("2024-01-01", "2024-02-01", unit="week")


def test_dates_in_frames():
    pandas = pytest.importorskip("pandas")
    from tfp_dpvi.synthetic import Layout

    table = Schema(
        {
            "day": Date("2024-01-01", "2024-12-31", missing=True),
            "hour": Date("2024-01-01", "2024-01-02", unit="h"),
        }
    )
    frame = pandas.DataFrame(
        {
            "day": pandas.to_datetime(["2024-05-01", None, "2024-12-31"]),
            "hour": pandas.to_datetime(
                ["2024-01-01 05:00", "2024-01-01 00:00", "2024-01-02 00:00"]
            ),
        }
    )
    layout = Layout.from_config(Layout.of(frame, table).to_config())
    codes = Schema({name: column.fine or column for name, column in table.columns.items()}).encode(
        frame
    )
    back = Schema({name: column.fine or column for name, column in table.columns.items()}).decode(
        codes, layout, GENERATOR
    )
    assert (back.dtypes == frame.dtypes).all()
    assert back["hour"].tolist() == frame["hour"].tolist()
    with pytest.raises(ValueError, match="time zone"):
        Layout.of(frame.assign(day=frame["day"].dt.tz_localize("UTC")), table)
    with pytest.raises(ValueError, match="describe it as Date"):
        Layout.of(frame, Schema({"day": Integer(0, 9), "hour": Integer(0, 9)}))


@pytest.mark.parametrize(
    ("make", "error", "named"),
    [
        (lambda: Continuous(0, 1, spikes=[2]), ValueError, r"spikes=\[2\] must be"),
        (lambda: Continuous(0, 1, spikes=["a"]), TypeError, "spikes"),
        (lambda: Continuous(0, 1, bins=[0.5], spikes=[0]), ValueError, "your own edges"),
        (lambda: Integer(0, 9, spikes=[0.5]), ValueError, "spikes has .*0.5"),
        (lambda: Categorical(["a", "b"], max_levels=1), ValueError, "max_levels"),
    ],
)
def test_bad_descriptions(make, error, named):
    with pytest.raises(error, match=named):
        make()
