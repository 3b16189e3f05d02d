"""Group effects of many levels, of which the records say little each."""

import numpy as np
import pandas as pd
import pytest

import tfp_dpvi as dpvi
from tfp_dpvi.regressions.families import make_prior
from tfp_dpvi.regressions.fit import described

pytest.importorskip("formulae")

SCHEMA = {
    "y": {"type": "binary"},
    "age": {"type": "integer", "lower": 18, "upper": 90, "typical": [50, 15]},
}
SD = 0.8


def made(num_levels, num):
    """Records of counties of different sizes, and the truth."""
    rng = np.random.default_rng(3)
    names = [f"c{number:03d}" for number in range(num_levels)]
    effects = rng.normal(0.0, SD, num_levels)
    county = rng.choice(num_levels, num, p=rng.dirichlet(np.full(num_levels, 4.0)))
    age = np.round(np.clip(rng.normal(50.0, 15.0, num), 18.0, 90.0))
    score = -0.3 + 0.03 * (age - 50.0) + effects[county]
    y = (rng.random(num) < 1.0 / (1.0 + np.exp(-score))).astype(int)
    return pd.DataFrame({"y": y, "age": age, "county": np.array(names)[county]}), names, effects


@pytest.mark.slow
@pytest.mark.parametrize("num_levels", [40, 100])
def test_levels_are_shrunk_and_covered(num_levels):
    """Above 50 coefficients too, where only the curvature's diagonal is released.

    Of 90 % intervals at least 70 % cover, four binomial deviations below for 40 levels, as all have
    one draw of the noise.
    """
    data, names, effects = made(num_levels, 100 * num_levels)
    schema = {**SCHEMA, "county": {"type": "categorical", "categories": names}}
    result = dpvi.regression(
        "y ~ age + (1 | county)", data, "bernoulli", schema, epsilon=3.0, delta=1e-6, seed=1
    )
    table = result.summary(level=0.9)
    levels = table.loc[[f"1|county[{name}]" for name in names]]
    covered = (levels.iloc[:, 2] < effects) & (effects < levels.iloc[:, 3])
    assert covered.mean() > 0.7
    assert np.corrcoef(levels["mean"], effects)[0, 1] > 0.6
    assert levels["mean"].std() < np.sqrt(SD**2 + (levels["sd"] ** 2).mean())
    low, high = table.loc["sd(1|county)"].iloc[[2, 3]]
    assert low < high
    assert 0.3 < table.loc["sd(1|county)", "mean"] < 1.6
    assert abs(table.loc["age", "mean"] - 0.03) < 4.0 * table.loc["age", "sd"]


SLOPES = {
    "y": {"type": "continuous", "lower": 0, "upper": 200, "typical": [100, 20]},
    "year": {"type": "integer", "lower": 1990, "upper": 2020, "typical": [2005, 9]},
    "income": {"type": "continuous", "lower": 0, "upper": 2e5},
    "county": {"type": "categorical", "categories": ["a", "b", "c"]},
}


def test_slopes_of_groups_are_those_of_terms_in_the_formulas_units():
    """Scores on the model's scale are sums of coefficients and columns in the user's units."""
    few = {"type": "integer", "lower": 1990, "upper": 1993, "typical": [1991, 1]}
    formula = "y ~ year + (year + income | county) + (0 + income | county:year)"
    design, parts = described(formula, "normal", {**SLOPES, "year": few})
    generator = np.random.default_rng(4)
    draws = {
        "coefficients": generator.normal(size=[5, 1]),
        "intercept": generator.normal(size=5),
        "sigma": np.ones(5),
        "group_sd": np.ones([5, 4]),
        "group_cor": np.zeros([5, 3]),
        "group": generator.normal(size=[5, sum(len(group.labels) for group in design.groups)]),
    }
    data = {"year": np.array([1990, 1993]), "income": np.array([3e4, 0.0]), "county": ["a", "c"]}
    rows = design.rows({**data, "y": np.zeros(2)})
    inputs = parts.inputs(rows).astype(np.float64)
    score = np.column_stack([draws["coefficients"], np.zeros(5), draws["group"]]) @ inputs.T
    score = 100.0 + 20.0 * (score + draws["intercept"][:, None])
    named = parts.in_units(draws, design)
    at = {group.name: group.location for group in design.groups}
    for place, (year, income, county) in enumerate(zip(*data.values(), strict=True)):
        wanted = named["Intercept"] + named["year"] * year + named[f"1|county[{county}]"]
        wanted += named[f"year|county[{county}]"] * (year - at["year|county"])
        wanted += named[f"income|county[{county}]"] * (income - at["income|county"])
        wanted += named[f"income|county[{county}]:year[{year}]"] * income
        np.testing.assert_allclose(score[:, place], wanted, rtol=1e-5, atol=1e-3)
    assert at["income|county:year"] == 0.0


def test_slopes_have_priors_on_the_scale_of_the_schema():
    design, parts = described("y ~ (year + income | county)", "normal", SLOPES)
    prior = make_prior(**parts.prior).sample(4000, seed=1)
    sds = parts.in_units({name: part.numpy() for name, part in prior.items()}, design)
    half_normal = 0.7979
    for name, sd in {"1": 20.0, "year": 20.0 / 9.0, "income": 20.0 / 5e4}.items():
        assert sds[f"sd({name}|county)"].mean() == pytest.approx(half_normal * sd, rel=0.1)


@pytest.mark.slow
def test_slopes_are_those_of_a_mixed_model():
    """At epsilon 8, effects are within a few standard deviations of statsmodels' predictions."""
    mixedlm = pytest.importorskip("statsmodels.formula.api").mixedlm
    rng = np.random.default_rng(5)
    names = [f"c{number:02d}" for number in range(12)]
    county, num = rng.integers(0, 12, 12_000), 12_000
    slope = 0.6 + rng.normal(0.0, 0.5, 12)
    year = rng.integers(1990, 2021, num)
    y = 100.0 + rng.normal(0.0, 8.0, 12)[county] + slope[county] * (year - 2005)
    data = pd.DataFrame({"y": y + rng.normal(0.0, 10.0, num), "year": year})
    data["county"] = np.array(names)[county]
    schema = {**SLOPES, "county": {"type": "categorical", "categories": names}}
    result = dpvi.regression(
        "y ~ year + (year || county)", data, "normal", schema, epsilon=8.0, delta=1e-6, seed=1
    )
    centred = data.assign(since=data["year"] - 2005)
    other = mixedlm("y ~ since", centred, groups="county", re_formula="~since").fit()
    wanted = np.array([other.random_effects[name]["since"] for name in names])
    table = result.summary()
    found = table.loc[[f"year|county[{name}]" for name in names]]
    away = (found["mean"] + table.loc["year", "mean"] - wanted - other.params["since"]) / found[
        "sd"
    ]
    assert np.sqrt(np.mean(away**2)) < 1.5
    assert found["sd"].max() < 0.25
    # Of twelve slopes, whose own deviation is not the 0.5 that they were drawn with.
    deviation = np.sqrt(other.cov_re.loc["since", "since"])
    assert table.loc["sd(year|county)", "mean"] == pytest.approx(deviation, rel=0.3)


def test_more_levels_than_can_be_learned_are_refused_before_anything_is_spent():
    ledger = dpvi.PrivacyLedger()
    names = [f"c{number}" for number in range(600)]
    schema = {**SCHEMA, "county": {"type": "categorical", "categories": names}}
    data = {"y": [0, 1], "age": [30, 40], "county": ["c1", "c2"]}
    with pytest.raises(ValueError, match=r"602 coefficients, .* merge levels") as caught:
        dpvi.regression(
            "y ~ age + (1 | county)",
            data,
            "bernoulli",
            schema,
            epsilon=1.0,
            delta=1e-5,
            ledger=ledger,
        )
    assert len(str(caught.value).splitlines()) == 1
    assert ledger.num_releases == 0
