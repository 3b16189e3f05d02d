"""Correlations of intercepts and slopes of a group, as those of (x | g) in lme4 and brms."""

import functools

import numpy as np
import pandas as pd
import pytest
from scipy import stats

import tfp_dpvi as dpvi
from tfp_dpvi._tf import tf
from tfp_dpvi.bayes.coordinates import Coordinates
from tfp_dpvi.regressions.correlated import (
    CorrelatedEffects,
    correlation_prior,
    correlations,
    factors,
    partial_correlations,
)
from tfp_dpvi.regressions.families import likelihood, make_prior
from tfp_dpvi.regressions.fit import described
from tfp_dpvi.rehearsal.formula import _on_model_scale
from tfp_dpvi.rehearsal.simulated import Truth

pytest.importorskip("formulae")

SCHEMA = {
    "y": {"type": "continuous", "lower": 0, "upper": 200, "typical": [100, 20]},
    "x": {"type": "continuous", "lower": -30, "upper": 50, "typical": [10, 9]},
    "z": {"type": "continuous", "lower": -30, "upper": 50, "typical": [0, 3]},
    "g": {"type": "categorical", "categories": ["a", "b", "c"]},
    "h": {"type": "categorical", "categories": ["k", "l"]},
}


def model(terms, unit=None):
    return described(f"y ~ x + z + {terms}", "normal", SCHEMA, unit=unit)


@pytest.mark.parametrize(
    ("terms", "names"),
    [
        ("(x | g)", ["cor(1, x|g)"]),
        ("(1 + x | g)", ["cor(1, x|g)"]),
        ("(x || g)", []),
        ("(0 + x | g)", []),
        ("(1 | g) + (0 + x | g)", []),
        ("(0 + x + z | g)", ["cor(x, z|g)"]),
        ("(x + z | g)", ["cor(1, x|g)", "cor(1, z|g)", "cor(x, z|g)"]),
        ("(x | g) + (0 + z | g) + (1 | h)", ["cor(1, x|g)"]),
        ("(x | g) + (z || h)", ["cor(1, x|g)"]),
        ("(x || g) + (z | h)", ["cor(1, z|h)"]),
        ("(x | g / h)", ["cor(1, x|g)", "cor(1, x|g:h)"]),
        ("(1 || g)", []),
        ("{g == 'a'} + (x | g)", ["cor(1, x|g)"]),
        ("mo(h2) + (x | h2)", ["cor(1, x|h2)"]),
        ("{h2 == 'l||m'} + (x | h2)", ["cor(1, x|h2)"]),
    ],
)
def test_one_bar_has_correlations_and_two_have_none(terms, names):
    levels = {"h2": {"type": "categorical", "categories": ["k", "l||m", "n"]}}
    design, parts = described(f"y ~ x + z + {terms}", "normal", {**SCHEMA, **levels})
    assert parts.correlations(design) == names
    assert design.formula.endswith(terms)


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        ("(x | g) + (z | g)", r"'1\|g' in two group terms, .* \(a \+ b \| g\)"),
        ("(x | g) + (x || g)", r"'1\|g' in two group terms"),
        ("(1 | g) + (x | g)", r"'1\|g' in two group terms"),
        ("(x | g | h)", r"several bars, .* \(a \| b:c\)"),
    ],
)
def test_terms_that_contradict_each_other_are_refused(terms, message):
    with pytest.raises(ValueError, match=message) as caught:
        model(terms)
    assert len(str(caught.value).splitlines()) == 1


def test_persons_have_intercepts_alone():
    for bars in ("(1 | person)", "(1 || person)"):
        design, parts = model(f"(x | g) + {bars}", unit="person")
        assert parts.layout.unit == "person"
        assert parts.correlations(design) == ["cor(1, x|g)"]
    with pytest.raises(ValueError, match="which alone can be fitted"):
        model("(x | person)", unit="person")


def test_one_correlation_is_uniform_which_is_lkj_of_shape_1():
    """In closed form, since dr / dz = 1 - r²."""
    r = np.linspace(-0.999, 0.999, 101)
    density = np.exp(correlation_prior([[0, 1]]).log_prob(np.arctanh(r)[:, None].astype("f4")))
    np.testing.assert_allclose(density / (1.0 - r**2), 0.5, rtol=1e-3)
    ends = correlations(np.array([[-40.0], [0.0], [40.0]]), [[0, 1]])
    np.testing.assert_allclose(ends[:, 0], [-1.0, 0.0, 1.0], atol=1e-12)


@pytest.mark.parametrize("size", [3, 4])
def test_each_of_more_correlations_has_the_distribution_of_lkjs(size):
    """That of a beta of shape size / 2 from -1 to 1, whose distribution functions are .02 away."""
    block = [list(range(size))]
    drawn = correlations(correlation_prior(block).sample(20_000, seed=1).numpy(), block)
    wanted = stats.beta(size / 2.0, size / 2.0, loc=-1.0, scale=2.0)
    for column in drawn.T:
        assert stats.kstest(column, wanted.cdf).statistic < 0.02


def test_effects_have_the_density_of_a_normal_with_the_correlations():
    blocks, sizes = [[0, 2], [1, 3, 4]], [2, 3, 2, 3, 3]
    generator = np.random.default_rng(1)
    sd = np.exp(generator.normal(size=[4, 5]))
    partial = generator.normal(size=[4, 4])
    tensors = tf.constant(sd), tf.constant(partial)
    effects = CorrelatedEffects(*tensors, sizes, blocks)
    values = generator.normal(size=[4, 13])
    start = np.cumsum([0, *sizes])
    found = effects.log_prob(values).numpy()
    cor = correlations(partial, blocks)
    for draw in range(4):
        total = np.eye(5)
        pairs = [(0, 2), (1, 3), (1, 4), (3, 4)]
        for (first, second), value in zip(pairs, cor[draw], strict=True):
            total[first, second] = total[second, first] = value
        total *= np.outer(sd[draw], sd[draw])
        each = [
            stats.multivariate_normal(cov=total[np.ix_(block, block)]).logpdf(
                [values[draw, start[place] + level] for place in block]
            )
            for block in blocks
            for level in range(sizes[block[0]])
        ]
        np.testing.assert_allclose(found[draw], np.sum(each), rtol=1e-9)
    drawn = effects.sample(30_000, seed=2).numpy()
    assert drawn.shape == (30_000, 4, 13)
    covariance = np.cov(drawn[:, 0, [1, 6]].T)
    np.testing.assert_allclose(np.sqrt(np.diag(covariance)), sd[0, [0, 2]], rtol=0.03)
    assert covariance[0, 1] / np.prod(sd[0, [0, 2]]) == pytest.approx(cor[0, 0], abs=0.02)
    assert np.cov(drawn[:, 0, [0, 6]].T)[0, 1] == pytest.approx(0.0, abs=0.03 * sd[0, :3].max())


def test_partial_correlations_are_the_inverse_of_correlations():
    blocks = [[0, 1, 2], [3, 4]]
    partial = np.random.default_rng(3).normal(size=[5, 4])
    found = [partial_correlations(each, blocks) for each in correlations(partial, blocks)]
    np.testing.assert_allclose(found, partial, rtol=1e-6)
    for rows in factors(tf.constant(partial), blocks):
        for row in rows:
            np.testing.assert_allclose(sum(entry**2 for entry in row), 1.0)
    with pytest.raises(ValueError, match="no effects can have together"):
        partial_correlations([0.9, 0.9, -0.9, 0.0], blocks)


def test_the_prior_has_real_coordinates_and_draws_that_broadcast():
    _, parts = model("(x + z | g) + (0 + x + z | h)")
    coordinates = Coordinates(make_prior(**parts.prior), log_scales=True)
    assert coordinates.broadcasts()
    names = ["coefficients", "group", "group_cor", "group_sd", "intercept", "sigma"]
    is_real = dict(zip(names, map(coordinates.is_real, range(6)), strict=True))
    assert is_real["group"]
    assert is_real["group_cor"]
    points = coordinates.prior_draws(3)
    # A correlation of 1 up to 4e-9, which is 1 in 32 bits.
    points[0, coordinates.names.index("group_cor[0]")] = 10.0
    value, gradient = coordinates.log_density(points)
    assert np.isfinite(value).all()
    assert np.isfinite(gradient).all()


def test_a_truth_may_have_correlations():
    design, parts = model("(x + z | g)")
    truth = {"cor(1, x|g)": 0.6, "cor(x, z|g)": -0.3, "sd(x|g)": 0.5, "z|g[b]": 0.4}
    draw = Truth(make_prior(**parts.prior), _on_model_scale(truth, design, parts))
    params = {name: np.asarray(part)[None] for name, part in draw(np.array([0, 5])).items()}
    in_units = parts.in_units(params, design)
    for name, value in {**truth, "cor(1, z|g)": 0.0}.items():
        assert in_units[name][0] == pytest.approx(value, abs=1e-4), name


@pytest.fixture(scope="module")
def unfitted():
    """A regression whose posterior is the prior, since a fit takes more than these tests may."""
    design, parts = model("(x | g)")
    parametric = functools.partial(make_prior, **parts.prior)
    of = dpvi.DPVI(parametric, functools.partial(likelihood, **parts.likelihood), seed=1)
    of.compile(epsilon=1.0, delta=1e-5)
    return dpvi.Regression(design, parts, of)


def test_a_correlation_is_wherever_a_groups_parameters_are(unfitted):
    table = unfitted.summary()
    name = "cor(1, x|g)"
    assert list(table.index)[2:7] == ["z", "sigma", name, "sd(1|g)", "1|g[a]"]
    assert table.loc[name, "sd"] == pytest.approx(1.0 / np.sqrt(3.0), abs=0.02)
    assert unfitted.parts.names_of_model(unfitted.design)[name] == "group_cor[0]"
    choices = unfitted.choices()
    assert "prior of cor(1, x|g): LKJ(1), uniform over correlation matrices" in choices
    assert "effects 1|g: those where x is 10.01, its typical value" in choices
    axes = unfitted.plot()
    assert name in [label.get_text() for label in axes.get_yticklabels()]


def test_a_correlation_is_in_inference_data(unfitted):
    pytest.importorskip("arviz")
    found = unfitted.to_inference_data().posterior["cor(1, x|g)"]
    np.testing.assert_array_equal(np.ravel(found), unfitted.draws["cor(1, x|g)"])


def test_a_file_keeps_correlations(unfitted, tmp_path):
    unfitted.save(tmp_path / "slopes.zip")
    again = dpvi.Regression.load(tmp_path / "slopes.zip")
    assert again.parts == unfitted.parts
    assert again.design.formula == "y ~ x + z + (x | g)"
    pd.testing.assert_frame_equal(again.summary(), unfitted.summary())
    data = {"x": np.array([0.0, 40.0]), "z": np.zeros(2), "g": np.array(["a", "c"])}
    pd.testing.assert_frame_equal(again.predict(data), unfitted.predict(data))


def simulated(cor, num=6000, num_levels=30, seed=0, sds=(8.0, 0.5)):
    """Returns records whose levels differ in intercepts at x = 10 and in slopes."""
    generator = np.random.default_rng(seed)
    covariance = np.outer(sds, sds) * np.array([[1.0, cor], [cor, 1.0]])
    effects = generator.multivariate_normal([0.0, 0.0], covariance, num_levels)
    names = [f"l{number:02d}" for number in range(num_levels)]
    place, x = (
        generator.integers(0, num_levels, num),
        np.clip(generator.normal(10, 9, num), -30, 50),
    )
    score = effects[place, 0] + (0.6 + effects[place, 1]) * (x - 10.0)
    y = np.clip(100.0 + score + generator.normal(0.0, 10.0, num), 0.0, 200.0)
    data = pd.DataFrame({"y": y, "x": x, "g": np.array(names)[place]})
    return data, {**SCHEMA, "g": {"type": "categorical", "categories": names}}


@pytest.mark.slow
def test_with_hardly_any_noise_a_regression_is_a_mixed_model():
    """Of 30 levels the posterior means differ from maximum likelihood by half an sd at most."""
    mixedlm = pytest.importorskip("statsmodels.formula.api").mixedlm
    data, schema = simulated(0.6)
    result = dpvi.regression(
        "y ~ x + (x | g)", data, "normal", schema, epsilon=1e3, delta=1e-6, seed=1
    )
    centred = data.assign(since=data["x"] - 10.0)
    other = mixedlm("y ~ since", centred, groups="g", re_formula="~since").fit()
    wanted = np.sqrt(np.diag(other.cov_re))
    table = result.summary()
    assert abs(table.loc["x", "mean"] - other.params["since"]) < 0.1 * table.loc["x", "sd"]
    sds = table.loc[["sd(1|g)", "sd(x|g)"]]
    # A variance of 30 effects is known to a quarter, and its posterior is skewed.
    assert np.all(np.abs(sds["mean"] - wanted) < 0.5 * sds["sd"])
    assert np.all(sds["sd"] < 0.2 * wanted)
    found = table.loc["cor(1, x|g)"]
    assert found["mean"] == pytest.approx(other.cov_re.iloc[0, 1] / wanted.prod(), abs=0.06)
    assert found["sd"] < 0.2
    assert found[["noise", "data", "prior"]].sum() == pytest.approx(1.0)
    effects = np.array([other.random_effects[name].iloc[1] for name in sorted(set(data["g"]))])
    own = table.loc[[f"x|g[{name}]" for name in sorted(set(data["g"]))]]
    away = own["mean"] + table.loc["x", "mean"] - effects - other.params["since"]
    assert np.abs(away / own["sd"]).max() < 0.5
