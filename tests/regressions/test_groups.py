"""Group effects of many levels, of which the records say little each."""

import numpy as np
import pandas as pd
import pytest

import tfp_dpvi as dpvi

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
