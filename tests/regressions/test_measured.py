"""Typical values and shares that are released for a share of the budget, in the fit's own ledger."""

import numpy as np
import pytest
from support.regressions import COLUMNS, FORMULA, OUTCOMES, simulated

import tfp_dpvi as dpvi
from tfp_dpvi.data import Binary, Categorical, Continuous, Integer, Schema
from tfp_dpvi.privacy import NeighboringRelation
from tfp_dpvi.privacy.plan import plan_counts
from tfp_dpvi.regressions.fit import described
from tfp_dpvi.regressions.measured import (
    SHARES,
    Measurable,
    Measurement,
    Terms,
    _Tree,
    measured_schema,
    unresolved,
)
from tfp_dpvi.rehearsal.call import RehearsalPlan
from tfp_dpvi.rehearsal.formula import _Before

pytest.importorskip("formulae")

SCHEMA = Schema(
    {"y": OUTCOMES["bernoulli"], **COLUMNS, "income": dpvi.data.Continuous(1000.0, 300000.0)}
)


def fit(measured, **settings):
    arguments = {"epsilon": 2.0, "delta": 1e-5, "seed": 2, **settings}
    data = simulated("bernoulli")
    return dpvi.regression(FORMULA, data, "bernoulli", SCHEMA, measured=measured, **arguments)


@pytest.fixture(scope="module")
def measured():
    ledger = dpvi.PrivacyLedger()
    # Named twice, income is released once.
    names = iter(["income", "ward", "y", "sex", "income"])
    return fit(names, share=0.2, ledger=ledger), ledger


def test_both_releases_are_within_the_budget_of_one_ledger(measured):
    result, ledger = measured
    assert ledger.num_releases == 161
    report = result.model.privacy_report()
    assert 1.98 < report.epsilon <= 2.0
    assert report.delta == 1e-5
    assert ledger.epsilon(1e-5) == pytest.approx(report.epsilon)
    assert "typical values of 4 columns" in str(report)
    text = result.report()
    assert "released from the records for 20% of epsilon and delta" in text
    # What was released was not declared.
    for name in ("income", "ward", "y", "sex"):
        described = " ".join(text.split(f"* {name}:")[1].split("\n  * ")[0].split())
        assert "declared" not in described
        assert "(released from the records)" in described
        asked = {"income": "bounds?", "ward": "categories?"}.get(name, "")
        assert described.partition("Public source for ")[2].startswith(asked)
        assert bool(asked) == ("Public source" in described)
    age = text.split("* age:")[1].split("\n  * ")[0]
    assert "released" not in age
    assert "Public source for bounds?" in " ".join(age.split())


def test_they_describe_the_records_better_than_the_bounds(measured):
    """Noise of the release is 8 standard errors of a share at most, and of the income less."""
    result, _ = measured
    data, columns = simulated("bernoulli"), result.design.schema.columns
    assert columns["income"].typical[0] == pytest.approx(data["income"].mean(), rel=0.2)
    assert columns["income"].location != SCHEMA.columns["income"].location
    shares = [np.mean(data["ward"] == level) for level in "ABC"]
    np.testing.assert_allclose(columns["ward"].shares, shares, atol=0.1)
    assert columns["y"].share == pytest.approx(np.mean(data["y"]), abs=0.1)
    assert columns["age"] == SCHEMA.columns["age"]


def test_a_file_keeps_them(measured, tmp_path):
    result, _ = measured
    result.save(tmp_path / "fit.zip")
    assert dpvi.Regression.load(tmp_path / "fit.zip").choices() == result.choices()


def test_a_ledger_with_too_little_left_is_not_charged(measured):
    _, ledger = measured
    with pytest.raises(ValueError, match="too little is left"):
        fit(("income",), ledger=ledger)
    assert ledger.num_releases == 161


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"measured": ("wage",)}, "does not use"),
        ({"measured": ("age",), "share": 1.5}, "share"),
        ({"num_records": 0}, "num_records=0"),
        ({"seed": -1}, "seed=-1"),
        ({"share": 0.999}, "leaves too little for the fit: pass at most 0.9"),
        ({"measured": ("age",), "formula": "y ~ age + part", "missing": "indicator"}, None),
        ({"measured": ("kind",), "formula": "y ~ kind", "missing": "indicator"}, "may be missing"),
        ({"measured": ("age",), "data": {"age": [200], "y": [1]}, "formula": "y ~ age"}, "outside"),
    ],
)
def test_bad_input_spends_nothing(change, message):
    ledger = dpvi.PrivacyLedger(budget_epsilon=1e-3, budget_delta=1e-6)
    kind = Categorical(["a", "b"], missing=True)
    part = Continuous(0.0, 1.0, missing=True)
    schema = Schema({**SCHEMA.columns, "part": part, "kind": kind})
    data = {**simulated("bernoulli"), "part": np.full(2000, 0.5), "kind": np.full(2000, "a")}
    arguments = {"formula": FORMULA, "data": data, "family": "bernoulli", "schema": schema}
    with pytest.raises((ValueError, RuntimeError), match=message) as caught:
        dpvi.regression(**{**arguments, **change}, epsilon=1.0, delta=1e-5, ledger=ledger)
    assert message is None or len(str(caught.value).splitlines()) <= 2
    assert ledger.num_releases == 0


# ---------------------------------------------------------------------- the release itself

BUDGET = {"epsilon": 1.0, "delta": 1e-5}
WIDE = Continuous(0.0, 1e7)


def release(column, values, num=None, epsilon=1.0, seed=0):
    terms = Terms(epsilon, 1e-5, num or len(values), seed=seed)
    ledger = dpvi.PrivacyLedger()
    made = Measurement.chosen(Schema({"x": column}), ["x"], ledger, SHARES, terms)
    return made.release({"x": np.asarray(values)}).columns["x"], made


@pytest.mark.parametrize(
    ("column", "value"),
    [
        (WIDE, 3.5e4),
        (WIDE, 1e7),
        # With outside="clip"; "refuse" refused it before.
        (WIDE, 3e8),
        (Integer(0, 10), -7),
        (Continuous(0.0, 1e6, scale="log"), 12.0),
        (Integer(0, 10), 7),
        (Integer(1900, 2030), 1965),
        (Binary(), 1),
        (Categorical(["a", "b", "c"]), "b"),
    ],
)
def test_a_record_adds_a_vector_of_length_one_for_each_column(column, value):
    """Without the root of the number of partings, the noise would be half of what is stated."""
    counts = _Tree.of(column).counts("x", column, np.array([value]))
    assert np.linalg.norm(counts) == pytest.approx(1.0)
    assert counts.min() >= 0.0


def test_the_release_costs_its_share_of_the_budget():
    _, made = release(WIDE, np.full(5000, 3.0))
    spent = made.ledger.epsilon(made.share * 1e-5)
    assert spent == pytest.approx(made.share, rel=0.01)
    assert made.ledger.num_releases == 1


def test_the_noise_is_that_of_the_plan(monkeypatch):
    """Of 4,680 counts: a factor of 1.1 would be 9 standard errors away."""
    seen = []
    old = _Tree.described
    keep = lambda self, column, noisy, *rest: seen.append(noisy) or old(self, column, noisy, *rest)  # noqa: E731
    monkeypatch.setattr(_Tree, "described", keep)
    values = np.full(5000, 3.0)
    _, made = release(WIDE, values)
    noise = seen[0] - _Tree.of(WIDE).counts("x", WIDE, values)
    assert noise.std() == pytest.approx(made._plan.deviation, rel=0.05)


@pytest.mark.parametrize("upper", [2e5, 2e6, 2e7])
def test_they_are_found_in_bounds_that_are_much_too_wide(upper):
    """Of 150, 144 are within .5 deviations and a factor of two: of 20, 17 are, but for .4 %."""
    generator = np.random.default_rng(3)
    found = []
    for seed in range(20):
        values = np.clip(generator.lognormal(10.3, 0.6, 2000), 0.0, 2e5)
        column, _ = release(Continuous(0.0, upper), values, seed=seed)
        mean, deviation = column.typical
        found.append(((mean - values.mean()) / values.std(), deviation / values.std()))
    away, ratio = np.transpose(found)
    assert np.mean((abs(away) < 0.5) & (ratio > 0.5) & (ratio < 2.0)) >= 0.85
    assert ratio.max() < 6.0


def test_what_noise_hides_is_left_as_it_is():
    """Of 4,680 counts, 584 are looked at, and .02 of noise alone are above four deviations."""
    generator = np.random.default_rng(4)
    kept = [
        release(WIDE, generator.uniform(0.0, 1e7, 60), seed=seed)[0].typical for seed in range(20)
    ]
    assert kept.count(None) >= 15


def test_more_records_need_less_of_the_budget():
    shares = []
    for num in (60, 300, 3000, 30000, 300000):
        _, made = release(WIDE, [3.0], num=num)
        shares.append(made.share)
    assert shares == sorted(shares, reverse=True)
    assert shares[:2] == [0.5, 0.3]
    assert shares[-1] == SHARES[0]


def test_a_spike_says_nothing_of_what_varies():
    """Of 60 %, with the others everywhere: in all of 10."""
    generator = np.random.default_rng(5)
    for seed in range(10):
        values = np.where(generator.random(1500) < 0.6, 0.0, generator.uniform(0.0, 1e7, 1500))
        column, _ = release(WIDE, values, seed=seed)
        assert column.typical is None or column.typical[1] > 0.2 * values.std()


def test_the_mean_of_few_whole_numbers_is_among_them():
    """Middles of [0, 1) and so on were half a number, here 0.9 deviations, too high."""
    values = np.random.default_rng(6).poisson(0.3, 20000)
    column, _ = release(Integer(0, 40), values)
    assert column.typical[0] == pytest.approx(0.3, abs=0.2)
    assert not unresolved(Schema({"x": column}), ["x"])


@pytest.mark.parametrize("middle", [50.0, 5e6])
def test_what_the_finest_part_hides_is_named(middle):
    """A deviation 70 times too large, and a slope 118 deviations off, had no warning.

    The second one is at an edge of all parts: values are in two of the finest.
    """
    values = np.random.default_rng(7).normal(middle, 10.0, 4000)
    column, _ = release(WIDE, values, seed=2)
    assert column.typical[1] > 50.0 * values.std()
    assert unresolved(Schema({"x": column}), ["x"]) == ("x",)
    narrow, _ = release(Continuous(0.0, 2.0 * middle), values, seed=2)
    assert bool(unresolved(Schema({"x": narrow}), ["x"])) == (middle == 5e6)


# ---------------------------------------------------------------------- unasked


def measured_of(num, names=None, unit_ids=None, **columns):
    schema = Schema({"y": Integer(0, 40), "x": WIDE, **columns})
    design, _ = described("y ~ x + " + " + ".join(columns or ["0"]), "poisson", schema)
    generator = np.random.default_rng(0)
    data = {"y": generator.poisson(3.0, num), "x": generator.normal(3e4, 1e3, num)}
    data |= {name: np.ones(num) for name in columns}
    ledger = dpvi.PrivacyLedger()
    terms = Terms(**BUDGET, num_records=0, seed=3)
    records = Measurable(data, ledger, unit_ids)
    return measured_schema(design.schema, names, None, records, terms), ledger


def test_numbers_with_bounds_alone_are_measured_and_no_others():
    age = Integer(0, 90, typical=(40.0, 10.0))
    found, ledger = measured_of(3000, age=age, sex=Binary())
    assert found.names == ("y", "x")
    assert found.schema.columns["age"] == age
    assert found.schema.columns["x"].typical[0] == pytest.approx(3e4, rel=0.1)
    assert ledger.num_releases == 1


@pytest.mark.parametrize(("num", "names"), [(100, None), (3000, ())])
def test_nothing_is_released_where_it_shows_nothing_or_is_not_wanted(num, names):
    found, ledger = measured_of(num, names)
    assert found is None
    assert ledger.num_releases == 0


def test_of_a_person_one_row_is_counted():
    found, ledger = measured_of(3000, unit_ids=np.arange(3000) % 1500)
    assert found.schema.columns["x"].typical[0] == pytest.approx(3e4, rel=0.1)
    (entry,) = ledger.entries
    assert entry.plan.person.max_rows == 1


def test_missing_values_add_nothing():
    values = np.where(np.arange(4000) % 2, 3e4 + np.arange(4000), np.nan)
    column, _ = release(Continuous(0.0, 1e7, missing=True), values)
    assert column.typical[0] == pytest.approx(np.nanmean(values), rel=0.1)
    assert column.typical[1] < 3e4


def test_numbers_outside_of_the_bounds_are_counted_at_these():
    values = np.concatenate([np.full(3000, 3e4), [-5.0, 3e7, np.inf]])
    column, _ = release(WIDE, values)
    assert column.typical[0] == pytest.approx(3e4, rel=0.1)
    counts = _Tree.of(WIDE).counts("x", WIDE, np.array([-5.0, 3e7, np.inf]))
    assert counts.sum() == pytest.approx(3.0 * np.sqrt(_Tree.of(WIDE).depth))


def test_columns_of_which_bounds_alone_are_known_are_named():
    """Of 30 records nothing can be seen; with typical values there is no such warning."""
    data = {"y": np.arange(30) % 2, "age": 20 + np.arange(30)}
    words = "typical values of age are not known"
    schema = {"y": {"type": "binary"}, "age": {"type": "integer", "lower": 18, "upper": 90}}
    found = dpvi.regression("y ~ age", data, "bernoulli", schema, **BUDGET, seed=1)
    assert any(sentence.startswith(words) for sentence in found.warnings)
    found.design.schema.columns["age"] = Integer(18, 90, typical=(40.0, 10.0))
    assert not any(sentence.startswith(words) for sentence in found.warnings)


def test_a_right_model_in_bounds_that_are_fifty_times_too_wide_covers():
    """A tenth of 30 such fits had no such slope before: dollars were up to 49 deviations off."""
    generator = np.random.default_rng(11)
    num = 2000
    dollars = np.clip(generator.lognormal(10.3, 0.6, num), 0.0, 2e5)
    score = 0.5 + 1e-5 * (dollars - 36000.0)
    data = {"y": generator.poisson(np.exp(score)).clip(0, 5000), "dollars": dollars}
    schema = {"y": Integer(0, 5000), "dollars": WIDE}
    result = dpvi.regression("y ~ dollars", data, "poisson", schema, **BUDGET, seed=5)
    draws = result.draws["dollars"]
    assert abs(draws.mean() - 1e-5) < 3.0 * draws.std()
    assert draws.std() < 2e-6
    assert result.warnings == []
    text = " ".join(result.report().split())
    assert "typical values of y, dollars: released from the records" in text


def test_a_delta_that_no_fit_can_have_releases_nothing():
    ledger = dpvi.PrivacyLedger()
    data = {"y": np.arange(2000) % 40, "x": np.full(2000, 3e4)}
    schema = Schema({"y": Integer(0, 40), "x": WIDE})
    with pytest.raises(ValueError, match="must lie strictly between 0 and 1"):
        dpvi.regression("y ~ x", data, "poisson", schema, epsilon=1.0, delta=1.0, ledger=ledger)
    assert ledger.num_releases == 0


def test_a_ledger_of_another_relation_is_not_charged():
    """The release had the ledger's relation, and the fit, which has none of these, then raised."""
    ledger = dpvi.PrivacyLedger()
    relation = NeighboringRelation.REPLACE_ONE
    (plan,) = plan_counts([("a", 1.0, 1.0)], noise=9.0, neighboring_relation=relation)
    with ledger.reserved(plan):
        pass
    data = {"y": np.arange(2000) % 40, "x": np.full(2000, 3e4)}
    schema = Schema({"y": Integer(0, 40), "x": WIDE})
    with pytest.raises(ValueError, match="do not compose"):
        dpvi.regression("y ~ x", data, "poisson", schema, **BUDGET, ledger=ledger)
    assert ledger.num_releases == 1


def test_values_outside_are_clipped_and_checks_have_bins_where_values_lie(monkeypatch):
    """Bins of the bounds alone have all records in one, and such a check finds nothing."""
    given = {}

    def keep(model, *_, **settings):
        given.update(settings)
        raise StopIteration

    monkeypatch.setattr(dpvi.DPVI, "fit", keep)
    values = np.random.default_rng(8).normal(3e4, 1e3, 4000)
    values[0] = 1e9
    data = {"y": np.arange(4000) % 50, "x": values}
    schema = Schema({"y": Integer(0, 40), "x": WIDE})
    settings = {"outside": "clip", "checks": 0.2, "seed": 1, **BUDGET}
    with pytest.raises(StopIteration):
        dpvi.regression("y ~ x", data, "poisson", schema, **settings)
    shares = np.bincount(given["check_columns"]["x"].codes, minlength=5) / 4000
    assert shares.max() < 0.7


def test_a_rehearsal_spends_what_the_fit_will():
    schema = Schema({"y": Integer(0, 40), "x": WIDE})
    before = _Before(
        schema, RehearsalPlan.checked([2000, 9000], 1.0, 1e-5, num=2, level=0.9, seed=0)
    )
    assert before.is_made
    assert before.ledger(2000, 1.0, 1e-5).num_releases == 1
    described = before.schema({"x": np.array([2e6, 4e6])}).columns
    assert described["x"].typical == (3e6, 1e6)
    assert described["y"].typical is None
    assert before.schema({"x": np.array([2e6, 4e6, np.nan])}).columns["x"].typical == (3e6, 1e6)
    few = _Before(schema, RehearsalPlan.checked([50, 9000], 1.0, 1e-5, num=2, level=0.9, seed=0))
    assert not few.is_made
    assert few.ledger(9000, 1.0, 1e-5).num_releases == 0
