"""Typical values that hospitals agree on from noisy counts, before there is a study."""

import dataclasses
import json
import math

import numpy as np
import pytest
from scipy import stats

import tfp_dpvi as dpvi
from tfp_dpvi import federated
from tfp_dpvi.data import Binary, Continuous, Integer, Schema
from tfp_dpvi.privacy import NeighboringRelation, UnsupportedPairError

SCHEMA = Schema(
    {
        "dollars": Continuous(0.0, 1e6),
        "visits": Integer(0, 10_000),
        "age": Integer(0, 100, typical=(40.0, 10.0)),
        "ill": Binary(),
    }
)
BUDGET = {"epsilon": 1.0, "delta": 1e-5}


def table(num, mean=30_000.0, seed=0):
    rng = np.random.default_rng(seed)
    return {
        "dollars": rng.normal(mean, 5_000.0, num),
        "visits": rng.poisson(30.0, num),
        "age": np.full(num, 40),
        "ill": np.ones(num, np.int32),
    }


def counted(data, name="berlin", **change):
    ledger = change.pop("ledger", None) or dpvi.PrivacyLedger()
    settings = {"num_hospitals": 2, "seed": 1, "ledger": ledger, "name": name, **BUDGET}
    return federated.count_columns(change.pop("schema", SCHEMA), data, **settings | change), ledger


def test_hospitals_agree_on_typical_values_that_none_of_them_has_alone():
    # Unlike hospitals: between their means lies most of the deviation.
    tables = {"a": table(3000, 20_000.0, 1), "b": table(3000, 60_000.0, 2)}
    counts = [counted(data, name, seed=3)[0] for name, data in tables.items()]
    schema = federated.described_together(SCHEMA, counts)
    both = np.concatenate([data["dollars"] for data in tables.values()])
    mean, deviation = schema.columns["dollars"].typical
    assert mean == pytest.approx(both.mean(), rel=0.1)
    assert deviation == pytest.approx(both.std(), rel=0.2)
    assert schema.columns["visits"].typical[0] == pytest.approx(30.0, abs=3.0)
    for name in ("age", "ill"):
        assert schema.columns[name] == SCHEMA.columns[name]
    # Whoever has the counts gets the same, in whichever order they came.
    again = [federated.ColumnCounts.from_json(each.to_json()) for each in reversed(counts)]
    assert federated.described_together(SCHEMA, again).to_json() == schema.to_json()


def test_noise_adds_up_as_its_variances_do(monkeypatch):
    seen = []
    monkeypatch.setattr(
        federated.counts, "described_by", lambda schema, *given: seen.append(given) or schema
    )
    counts = [counted(table(num), name)[0] for name, num in (("a", 2000), ("b", 4000))]
    federated.described_together(SCHEMA, counts)
    ((total, deviation, num_records),) = seen
    assert num_records == 6000
    assert deviation == pytest.approx(math.hypot(*(each.deviation for each in counts)))
    for name, part in total.items():
        np.testing.assert_allclose(part, counts[0].counts[name] + counts[1].counts[name])


def test_a_hospital_pays_once_from_its_own_ledger():
    counts, ledger = counted(table(3000), neighboring_relation="replace_one")
    assert ledger.num_releases == 1
    assert ledger.neighboring_relation is NeighboringRelation.REPLACE_ONE
    assert 0.0 < ledger.epsilon(1e-5) < 0.2
    # A replaced record moves each of two columns by at most sqrt(2): the Gaussian mechanism's delta.
    mu, epsilon = 2.0 / counts.deviation, ledger.epsilon(1e-5)
    tails = [stats.norm.cdf(sign * mu / 2.0 - epsilon / mu) for sign in (1.0, -1.0)]
    assert tails[0] - math.exp(epsilon) * tails[1] == pytest.approx(1e-5, rel=0.01)
    with pytest.raises(UnsupportedPairError):
        counted(table(3000), ledger=ledger)
    assert ledger.num_releases == 1


def test_more_hospitals_need_less_of_each():
    one = counted(table(1200), num_hospitals=1)[1].epsilon(1e-5)
    ten = counted(table(1200), num_hospitals=10)[1].epsilon(1e-5)
    assert ten < 0.6 * one


def test_persons_are_counted_as_one_row_each():
    ids = np.repeat(np.arange(1500), 4)
    data = {name: np.tile(part, 4) for name, part in table(1500).items()}
    counts, ledger = counted(data, unit_ids=ids)
    assert counts.num_records == 1500
    with pytest.raises(UnsupportedPairError, match="another unit of privacy"):
        counted(data, ledger=ledger)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": table(30)}, "num_records=30 are too few for counts"),
        ({"schema": SCHEMA.part(["age", "ill"])}, "nothing is to count"),
        ({"columns": ["wages"]}, "columns='wages' is unknown"),
        ({"columns": "dollars"}, "columns must be a list"),
        ({"columns": []}, "columns is empty"),
        ({"columns": ["ill"]}, "no column of numbers"),
        ({"data": {**table(3000), "visits": np.full(3000, 10_001)}}, "outside its public bounds"),
        ({"ledger": "berlin.ledger"}, "ledger must be a dpvi.PrivacyLedger"),
        ({"ledger": 3.0}, "ledger must be a dpvi.PrivacyLedger"),
        ({"num_hospitals": 0}, "num_hospitals=0"),
        ({"num_records": 0}, "num_records=0"),
        ({"seed": -1}, "seed=-1"),
        ({"epsilon": -1.0}, "epsilon=-1"),
        ({"delta": 1.0}, "delta=1"),
        ({"share": 1.5}, "share"),
        ({"share": 1.0}, "pass at most 0.9"),
        ({"outside": "drop"}, "outside='drop'"),
        ({"name": ""}, "name"),
        ({"neighboring_relation": "none"}, "neighboring_relation"),
    ],
)
def test_bad_input_spends_nothing(change, message):
    ledger = dpvi.PrivacyLedger()
    with pytest.raises((ValueError, TypeError), match=message) as caught:
        counted(change.pop("data", table(3000)), **{"ledger": ledger, **change})
    assert ledger.num_releases == 0
    assert str(caught.value).count("\n") < 2


def test_a_spent_ledger_is_not_charged():
    ledger = counted(table(3000), share=0.9)[1]
    with pytest.raises(ValueError, match=r"of which 0\.\d+ was spent"):
        counted(table(3000), ledger=ledger, share=0.5)
    assert ledger.num_releases == 1


def test_a_declared_number_of_records_may_be_below_the_exact_one():
    """It does not decide whether what was paid for is returned."""
    assert counted(table(3000), num_records=1000, share=0.2)[0].num_records == 1000


def test_numbers_outside_are_clipped_where_asked():
    data = {**table(3000), "visits": np.full(3000, 20_000)}
    assert counted(data, outside="clip")[0].num_records == 3000


def test_counts_are_saved_once(tmp_path):
    counts, _ = counted(table(3000))
    counts.save(tmp_path / "berlin.json")
    with pytest.raises(FileExistsError):
        counts.save(tmp_path / "berlin.json")
    loaded = federated.ColumnCounts.load(tmp_path / "berlin.json")
    assert loaded.to_json() == counts.to_json()


COUNTS = counted(table(3000))[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"counts": {**COUNTS.counts, "visits": [1.0]}}, "another shape"),
        ({"counts": {"visits": COUNTS.counts["visits"]}}, "lacks the fields"),
        ({"counts": {**COUNTS.counts, "visits": COUNTS.counts["visits"] + 1e15}}, "above 1e"),
        ({"counts": {**COUNTS.counts, "visits": COUNTS.counts["visits"] * np.nan}}, "not finite"),
        ({"deviation": 0.0}, "deviation"),
        ({"deviation": 1e200}, "must be below"),
        ({"num_records": 10**308}, "must be below"),
        ({"num_records": 0}, "num_records"),
        ({"schema": "{}"}, "dict of columns"),
        ({"schema": "no"}, "no JSON"),
        ({"hospital": ""}, "hospital"),
    ],
)
def test_strange_counts_are_refused(change, message):
    with pytest.raises((ValueError, TypeError), match=message):
        dataclasses.replace(COUNTS, **change)


@pytest.mark.parametrize("text", ["", "[]", "{}", "[" * 10_000, json.dumps({"hospital": 1})])
def test_strange_texts_are_refused(text):
    with pytest.raises(ValueError, match="no counts of columns"):
        federated.ColumnCounts.from_json(text)


def test_hospitals_of_other_bounds_are_named():
    other = Schema({**SCHEMA.columns, "visits": Integer(0, 9_000)})
    counts = [counted(table(3000), "a")[0], counted(table(3000), "b", schema=other)[0]]
    with pytest.raises(ValueError, match=r"\['b'\] are of other columns or bounds"):
        federated.described_together(SCHEMA, counts)
    with pytest.raises(ValueError, match=r"\['a'\] are of other columns or bounds"):
        federated.described_together(SCHEMA.part(["age"]), counts[:1])
    with pytest.raises(ValueError, match="twice"):
        federated.described_together(SCHEMA, [counts[0], counts[0]])
    with pytest.raises(ValueError, match="pass what"):
        federated.described_together(SCHEMA, [])


def test_columns_that_counts_do_not_show_are_named_and_stay_as_they_are(caplog):
    data = {**table(3000), "dollars": np.linspace(10.0, 11.0, 3000)}
    described = federated.described_together(SCHEMA, [counted(data)[0]])
    assert described.columns["dollars"].typical is None
    assert described.columns["visits"].typical is not None
    assert "where values of dollars lie" in caplog.text


def test_a_study_of_bounds_alone_says_so():
    pytest.importorskip("formulae")
    rng = np.random.default_rng(2)
    tables = {
        name: {"ill": rng.integers(0, 2, 400), "dollars": rng.normal(5e5, 1e5, 400)}
        for name in "ab"
    }
    study = federated.RegressionStudy("ill ~ dollars", "bernoulli", SCHEMA)
    schedule = federated.Synchronous(rounds=2)
    history = federated.simulate(study, tables, epsilon=3.0, schedule=schedule, verbose=0, seed=1)
    (fault,) = [each for each in history.calibrated.warnings if "typical values" in each]
    assert "typical values of dollars are not known" in fault
    assert "count_columns" in fault
    assert fault in str(study.summary(history.calibrated))
    assert fault in study.warnings(history.calibrated)
