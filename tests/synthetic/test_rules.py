"""Synthetic records keep rules between columns, and rare categories stay within their parents."""

import dataclasses

import numpy as np
import pytest

import tfp_dpvi as dpvi
from tfp_dpvi import serialization
from tfp_dpvi.data import Binary, Categorical, Continuous, Date, Integer, Schema
from tfp_dpvi.synthetic import AtMost, Equal, OnlyWhere, Rule, grouping, levels, rules

SCHEMA = Schema(
    {
        "sex": Categorical(["F", "M"]),
        "pregnant": Binary(missing=True),
        "admitted": Integer(0, 9, bins=[2, 4, 6, 8]),
        "discharged": Integer(0, 9, bins=[2, 4, 6, 8]),
    }
)
RULES = [OnlyWhere("pregnant", [1], {"sex": ["F"]}), AtMost("admitted", "discharged")]


def records(num=2000):
    generator = np.random.default_rng(0)
    sex = np.where(generator.random(num) < 0.5, "F", "M")
    pregnant = ((sex == "F") & (generator.random(num) < 0.4)).astype(float)
    pregnant[generator.random(num) < 0.1] = np.nan
    admitted = generator.integers(0, 10, num)
    discharged = np.minimum(admitted + generator.integers(0, 4, num), 9)
    return {"sex": sex, "pregnant": pregnant, "admitted": admitted, "discharged": discharged}


@pytest.fixture(scope="module")
def fitted():
    synthesizer = dpvi.Synthesizer(SCHEMA, 6, rules=RULES, seed=0)
    return synthesizer.fit(records(), epsilon=2.0, delta=1e-5, steps=300)


def broken(sample):
    present = ~np.isnan(sample["pregnant"])
    return np.sum((sample["pregnant"] == 1.0) & (sample["sex"] == "M") & present), np.sum(
        sample["admitted"] > sample["discharged"]
    )


def test_samples_keep_rules_that_the_model_alone_breaks(fitted, tmp_path):
    assert broken(fitted.sample(1500, seed=1)) == (0, 0)
    assert len(fitted.sample(1500, seed=1)["sex"]) == 1500
    fitted.save(tmp_path / "a.keras")
    loaded = dpvi.Synthesizer.load(tmp_path / "a.keras")
    assert loaded.model.rules == tuple(RULES)
    for name, part in loaded.sample(99, seed=1).items():
        np.testing.assert_array_equal(part, fitted.sample(99, seed=1)[name])
    loaded.model.rules = ()
    assert min(broken(loaded.sample(1500, seed=1))) > 0


def test_records_that_break_a_rule_are_refused_and_nothing_is_spent():
    synthesizer = dpvi.Synthesizer(SCHEMA, 2, rules=RULES)
    data = records(50)
    data["admitted"][7], data["discharged"][7] = 9, 0
    with pytest.raises(ValueError, match=r"AtMost of 'admitted', 'discharged' does not hold in"):
        synthesizer.fit(data, epsilon=1.0, delta=1e-5, steps=1)
    assert synthesizer.model.privacy_ledger.num_releases == 0


def test_draws_are_those_of_the_model_given_the_rules():
    """P(a | a <= b) of fair dice, 20,000 draws: a standard error of .0035 at most, limit five."""
    generator = np.random.default_rng(0)

    def draw(num):
        nothing = np.zeros(num, bool)
        return {name: (generator.integers(1, 7, num), nothing) for name in ("a", "b")}

    columns = rules.drawn_until_kept(draw, 20_000, [AtMost("a", "b")])
    shares = np.bincount(columns["a"][0], minlength=7)[1:] / 20_000
    np.testing.assert_allclose(shares, np.arange(6, 0, -1) / 21.0, atol=0.0175)


def test_a_rule_that_hardly_any_record_keeps_is_named():
    def draw(num):
        return {"a": (np.ones(num), np.zeros(num, bool)), "b": (np.zeros(num), np.zeros(num, bool))}

    with pytest.raises(RuntimeError, match=r"of 200000 records of the model, 0 keep them"):
        rules.drawn_until_kept(draw, 10, [AtMost("a", "b")])


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (OnlyWhere("pregnant", [1], {"gender": ["F"]}), "'gender' is no column"),
        (OnlyWhere("admitted", [1], {"sex": ["F"]}), "'admitted' has numbers"),
        (OnlyWhere("pregnant", [1], {"sex": ["W"]}), "'sex' never is 'W'"),
        (OnlyWhere("pregnant", [2], {"sex": ["F"]}), "'pregnant' never is 2"),
        (AtMost("admitted", "day"), "must be two columns of numbers, or two of dates"),
        (AtMost("admitted", "sex"), "must be two columns of numbers"),
        (AtMost("admitted", "admitted"), "must be two columns of numbers"),
        ("admitted <= discharged", "rules="),
    ],
)
def test_a_rule_that_cannot_be_about_the_schema_is_refused(rule, message):
    schema = Schema({**SCHEMA.columns, "day": Date("2020-01-01", "2020-12-31")})
    with pytest.raises((TypeError, ValueError), match=message):
        dpvi.Synthesizer(schema, rules=[rule])


PARENTS = {"a1": "a", "a2": "a", "a3": "a", "b1": "b", "b2": "b", "c1": "c"}


def test_rare_categories_are_merged_with_those_of_their_parent():
    column = Categorical(list(PARENTS), max_levels=4, parents=PARENTS)
    counts = np.array([50.0, 9.0, 3.0, 8.0, 2.0, 1.0])
    grouped = grouping.group(column, [counts], 0.0)
    # One level is left for the most frequent category; each parent has its others.
    assert grouped.groups == (0, 1, 1, 2, 2, 3)
    assert grouped.num_levels == 4
    merged = grouping.merged_categories(grouped, np.array([50.0, 12.0, 10.0, 1.0]))
    assert merged == (4, 6, pytest.approx(22.0 / 73.0))
    # Without parents all rare ones are one level.
    alone = grouping.group(Categorical(list(PARENTS), max_levels=4), [counts], 0.0)
    assert alone.groups == (0, 1, 3, 2, 3, 3)
    # Without records, every level exists all the same.
    empty = grouping.group(column, [np.zeros(6)], 0.0)
    assert sorted(set(empty.groups)) == [0, 1, 2, 3]


def test_merged_levels_are_named_by_their_parent():
    many = {f"{parent}{number}": parent for parent in "ab" for number in range(6)}
    column = Categorical(list(many), max_levels=3, parents=many)
    grouped = grouping.group(column, [np.arange(12.0)], 0.0)
    assert levels.labels_of(grouped) == ("b5", "other a", "other b")


def test_parents_are_saved_as_text():
    schema = Schema({"code": Categorical(list(PARENTS), max_levels=4, parents=PARENTS)})
    assert Schema.from_json(schema.to_json()) == schema


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ({"a": 1}, "lacks 'b'"),
        ([1], "one entry for each of 3"),
        ([1, 2, 3], "each parent keeps a level"),
        ("abc", "must be a list"),
    ],
)
def test_parents_that_do_not_fit_are_refused(parents, message):
    with pytest.raises((TypeError, ValueError), match=message):
        Categorical(["a", "b", "c"], max_levels=2, parents=parents)


def test_a_fit_says_which_share_of_records_is_merged():
    generator = np.random.default_rng(0)
    codes = [f"{number:02d}" for number in range(40)]
    synthesizer = dpvi.Synthesizer(Schema({"code": Categorical(codes), "ill": Binary()}), 2, seed=0)
    data = {"code": generator.choice(codes, 4000), "ill": generator.integers(0, 2, 4000)}
    with pytest.warns(UserWarning, match=r"25 of 40 categories, with 6\d% of the records, are"):
        synthesizer.fit(data, epsilon=1.0, delta=1e-5, steps=1)
    assert any("25 of the 40 categories of 'code'" in text for text in synthesizer.model.caveats)


# ------------------------------------------------------------------ before anything is spent

PAIR = Schema({name: Continuous(0.0, 1.0, [0.2, 0.5], missing=name == "c") for name in "abc"})


@dataclasses.dataclass(frozen=True)
class Below(Rule):
    limit: float
    columns = ("a",)

    def holds(self, values):
        return values["a"] < self.limit


Named = dpvi.register("below")(Below)


class Fails(Below):
    def holds(self, values):
        return values["b"]


class OneForAll(Below):
    def holds(self, values):
        return True


for unkept in (Fails, OneForAll):
    dpvi.register(unkept.__name__)(unkept)


@dataclasses.dataclass(frozen=True)
class Unnamed(Below):
    pass


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([Unnamed(0.5)], r"Unnamed could not be saved: .*@dpvi\.register\(\"Unnamed\"\)"),
        ([Below(lambda: 1)], "Below could not be saved"),
        ([Fails(0.5)], r"Fails\.holds fails on drawn values \(KeyError\)"),
        ([OneForAll(0.5)], r"OneForAll\.holds must return .* of shape \[100\], not bool of \[\]"),
        ([AtMost("a", "b"), AtMost("b", "a")], "all around 'a' <= 'b' <= 'a', .* use Equal alone"),
        (
            [AtMost("a", "b"), AtMost("c", "a"), AtMost("b", "c")],
            "all around 'a' <= 'b' <= 'c' <= 'a'",
        ),
        ([AtMost("a", "b"), AtMost("b", "c"), Equal("a", "c")], "all around 'a' <= 'b' <= 'a'"),
        ([Equal("a", "c"), Equal("b", "c")], "'c' is the copy of two Equal"),
        ([Equal("a", "a")], "must be two columns that are described alike"),
    ],
)
def test_a_rule_that_would_fail_after_a_fit_is_refused_before(given, message):
    with pytest.raises(ValueError, match=message) as caught:
        dpvi.Synthesizer(PAIR, 1, rules=given)
    assert len(str(caught.value).splitlines()) == 1


def test_columns_that_are_described_otherwise_are_not_equal():
    schema = Schema({"a": Integer(0, 9), "b": Integer(0, 8)})
    with pytest.raises(ValueError, match=r"'a' and 'b' must be two columns .* alike"):
        dpvi.Synthesizer(schema, 1, rules=[Equal("a", "b")])


def test_equal_columns_and_own_rules_hold_in_samples_and_in_files(tmp_path):
    generator = np.random.default_rng(0)
    one = generator.random(300) / 2.0
    data = {"a": one.copy(), "b": one.copy(), "c": one}
    data["c"][:150] = np.nan
    given = [Equal("b", "c"), Equal("a", "b"), Named(0.5)]
    fitted = dpvi.Synthesizer(PAIR, 1, rules=given)
    fitted.fit(data, noise_multiplier=0.1, delta=1e-5, steps=50)
    fitted.save(tmp_path / "a.keras")
    loaded = dpvi.Synthesizer.load(tmp_path / "a.keras")
    assert loaded.model.rules == tuple(given)
    made = loaded.sample(200, seed=1)
    np.testing.assert_array_equal(made["b"], made["a"])
    assert made["a"].max() < 0.5
    there = ~np.isnan(made["c"])
    assert 0.02 < there.mean() < 0.98
    np.testing.assert_array_equal(made["c"][there], made["a"][there])
    data["b"][0] += 0.1
    with pytest.raises(ValueError, match="Equal of 'a', 'b' does not hold in 1 row"):
        fitted.fit(data, noise_multiplier=0.1, delta=1e-5, steps=1)


def test_a_file_makes_no_other_class_of_a_registered_name():
    with pytest.raises(ValueError, match="as a dataclass, which it is not"):
        serialization.decode({"registered": "tfp_dpvi>TableModel", "fields": {}})


def test_the_report_asks_for_public_sources_of_columns_and_rules(fitted):
    text = " ".join(str(fitted.privacy_report()).split())
    assert "* sex: one of F, M. Public source for categories?" in text
    assert "may be missing. Public source for missing values? " in text
    assert "bins with edges at 2, 4, 6, 8. Public" in text
    assert "* rule: 'pregnant' is 1 only where 'sex' is F. Public source?" in text
    assert "* rule: 'admitted' is at most 'discharged'. Public source?" in text
    assert "?." not in text
