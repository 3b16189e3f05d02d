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


@pytest.mark.parametrize(("target", "triples"), [(None, False), (2, False), (2, True)])
def test_one_record_moves_pairs_by_what_is_stated(target, triples):
    """Also of triples, and with a record of which the target alone, or every column, is another one."""
    pairs, codes = Pairs(Segments.of(TABLE), target, triples), make_codes(30)
    weight = 2.0 if target and not triples else 1.0
    counts = pairs.counts(codes)
    for place in range(30):
        without = pairs.counts(np.delete(codes, place, axis=0))
        assert np.linalg.norm(counts - without) == pytest.approx(pairs.norm)
        other = codes.copy()
        other[place] = make_codes(1)
        assert np.linalg.norm(counts - pairs.counts(other)) <= math.sqrt(2.0) * pairs.norm + 1e-9
        other[place] = codes[place]
        other[place, 2] = 1 - other[place, 2]
        moved = counts - pairs.counts(other)
        assert np.sum(moved**2) == pytest.approx(
            2.0 * (1.0 + 3.0 * weight**2 + (3.0 if triples else 0.0))
        )
        other[place] = (codes[place] + 1) % [3, 3, 2, 3]
        assert np.linalg.norm(counts - pairs.counts(other)) == pytest.approx(
            math.sqrt(2.0) * pairs.norm
        )
    assert pairs.norm == pytest.approx(math.sqrt(7.0 + 3.0 * weight**2))


@pytest.mark.parametrize("triples", [False, True])
def test_what_is_not_counted_stays_zero(triples):
    pairs = Pairs(Segments.of(TABLE), 2, triples)
    assert not pairs.counts(make_codes(50))[pairs.weights() == 0.0].any()


@pytest.mark.parametrize("triples", [False, True])
def test_counts_are_those_of_a_loop(triples):
    codes, pairs = make_codes(40), Pairs(Segments.of(TABLE), 2, triples)
    counts, sizes = pairs.counts(codes), (4, 4, 2, 3)
    assert pairs.sizes == sizes
    starts = np.cumsum([0, *sizes])
    for i, j in itertools.combinations_with_replacement(range(4), 2):
        blocks = np.zeros([2, sizes[i], sizes[j]])
        for record in codes:
            levels = [record[k] if record[k] >= 0 else 3 for k in (i, j)]
            blocks[record[2], levels[0], levels[1]] += 1
        weight = 2.0 if i != j and 2 in (i, j) and not triples else 1.0
        rows, columns = (slice(starts[k], starts[k + 1]) for k in (i, j))
        if triples and i != j and 2 not in (i, j):
            np.testing.assert_array_equal(counts[columns, rows], blocks[1].T)
            blocks[1] = 0.0
        np.testing.assert_array_equal(counts[rows, columns], weight * blocks.sum(axis=0))


@pytest.mark.parametrize("triples", [False, True])
def test_shares_of_a_mixture_are_those_of_its_log_prob(triples):
    params = make_prior(TABLE, 3).sample(seed=[1, 2])
    mixture, pairs = make_likelihood(TABLE)(params), Pairs(Segments.of(TABLE), 2, triples)
    every = np.array(
        list(itertools.product([-1, 0, 1, 2], [-1, 0, 1, 2], [0, 1], [0, 1, 2])), np.int32
    )
    weights = np.exp(mixture.log_prob(every).numpy())
    assert weights.sum() == pytest.approx(1.0, abs=1e-5)
    expected = sum(
        weight * pairs.counts(record[None]) for weight, record in zip(weights, every, strict=True)
    )
    taken = pairs.weights() > 0.0
    found = (pairs.weights() * pairs.shares(params).numpy())[taken]
    np.testing.assert_allclose(found, expected[taken], atol=1e-6)


@pytest.mark.parametrize("triples", [False, True])
def test_the_likelihood_is_a_normals_and_knows_the_weights(triples):
    pairs, codes = Pairs(Segments.of(TABLE), 2, triples), make_codes(200)
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


def test_the_table_of_a_pair_is_a_sum_of_two_and_has_the_noise_of_both():
    """Of 1,600 and more errors the deviation is off by 1.8 % (one standard deviation); 9 % is five of them."""
    pairs, codes = Pairs(Segments.of(TABLE), 2, triples=True), make_codes(200)
    exact = NoisyPairs.of(Pairs(pairs.segments), Pairs(pairs.segments).counts(codes), 0.0, 200)
    errors = {5.0: [], 5.0 * math.sqrt(2.0): []}
    for _ in range(100):
        noisy = pairs.counts(codes) + 5.0 * GENERATOR.normal(size=[13, 13])
        released = NoisyPairs.of(pairs, noisy, 5.0, 200)
        for first, second in itertools.permutations(range(4), 2):
            counts, deviations = released.table(first, second)
            assert len(np.unique(deviations)) == 1
            stated = 5.0 if 2 in (first, second) else 5.0 * math.sqrt(2.0)
            assert deviations[0, 0] == pytest.approx(stated)
            if first < second:
                errors[stated].extend((counts - exact.table(first, second)[0]).ravel())
            else:
                np.testing.assert_array_equal(counts, released.table(second, first)[0].T)
    for stated, found in errors.items():
        assert np.std(found) == pytest.approx(stated, rel=0.09)


def test_saved_triples_come_back_and_former_files_have_none():
    codes = make_codes(200)
    for triples in (False, True):
        pairs = Pairs(Segments.of(TABLE), 2, triples)
        released = NoisyPairs.of(pairs, pairs.counts(codes), 5.0, 200)
        config = released.to_config()
        if not triples:
            config.pop("triples")
        again = NoisyPairs.from_config(config, TABLE)
        assert again.pairs == pairs
        np.testing.assert_array_equal(again.counts, released.counts)
        np.testing.assert_array_equal(again.deviations, released.deviations)
    for altered in ({"triples": False}, {"triples": "yes"}, {"target": 0}, {"target": 99}):
        with pytest.raises(ValueError, match="altered"):
            NoisyPairs.from_config({**config, **altered}, TABLE)


def test_triples_are_counted_where_the_noise_allows_it():
    """By public values: the number of records, the noise and the numbers of levels."""
    pairs = Pairs(Segments.of(TABLE), 2)
    for noise in (0.0, 1.0):
        assert pairs.where_clear(10_000, noise).within == 2
    assert pairs.where_clear(10_000, 1e6) == pairs
    assert pairs.where_clear(5, 1.0) == pairs
    assert 0.5 < pairs.where_clear(10_000, 1.0).norm / math.sqrt(10.0) <= 1.0
    for target in (None, 0, 3):
        other = Pairs(Segments.of(TABLE), target)
        assert other.where_clear(10_000, 1.0) == other
    missing = Schema({**TABLE.columns, "c": Binary(missing=True)})
    assert Pairs(Segments.of(missing), 2).where_clear(10_000, 1.0).within is None
    two = Pairs(Segments.of(Schema({"a": Binary(), "b": Binary()})), 1)
    assert two.where_clear(10_000, 1.0) == two


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
