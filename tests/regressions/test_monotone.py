"""Monotone effects of ordered levels: a difference, and the shares of it that each step has."""

import numpy as np
import pytest

pytest.importorskip("formulae")

import tensorflow as tf

import tfp_dpvi as dpvi
from tfp_dpvi.calibrated.straight import Straight
from tfp_dpvi.data import Categorical, Continuous, Integer, Schema
from tfp_dpvi.regressions.families import likelihood, make_prior, slopes
from tfp_dpvi.regressions.fit import described

LEVELS = ["none", "some", "much", "most"]
SCHEMA = Schema(
    {
        "y": Continuous(0.0, 250.0),
        "school": Categorical(LEVELS),
        "rooms": Integer(1, 4),
        "age": Continuous(20.0, 80.0, typical=(50.0, 17.0)),
    }
)
FORMULA = "y ~ mo(school) + age + mo(rooms)"
STEPS = {"mo(school)[some]": 2.0, "mo(school)[much]": 16.0, "mo(school)[most]": 6.0}


def records(num=4000):
    generator = np.random.default_rng(1)
    place, rooms = generator.integers(0, 4, [2, num])
    age = generator.uniform(20.0, 80.0, num)
    mean = 80.0 + np.cumsum([0.0, *STEPS.values()])[place] + 0.4 * age - 3.0 * rooms
    y = np.clip(mean + 15.0 * generator.normal(size=num), 0.0, 250.0)
    return {"y": y, "school": np.array(LEVELS)[place], "rooms": rooms + 1, "age": age}


def test_steps_have_one_sign_add_up_and_leave_other_columns_alone():
    coefficients = tf.constant(np.random.default_rng(0).normal(size=[50, 2, 7]))
    found = slopes(coefficients, [(1, 4), (5, 7)]).numpy()
    np.testing.assert_array_equal(found[..., [0, 4]], coefficients.numpy()[..., [0, 4]])
    for start, stop in ((1, 4), (5, 7)):
        steps, total = found[..., start:stop], coefficients.numpy()[..., start]
        np.testing.assert_allclose(steps.sum(axis=-1), total)
        assert (np.sign(steps) == np.sign(total)[..., None]).all()
    flat = coefficients.numpy().copy()
    flat[..., 2:4] = 0.0
    third = slopes(tf.constant(flat), [(1, 4)]).numpy()[..., 1:4]
    np.testing.assert_allclose(third, np.repeat(flat[..., 1:2] / 3.0, 3, axis=-1))


def test_shares_are_alike_a_priori_and_spread_as_uniform_ones():
    """Their logarithms differ with the variance of a Dirichlet distribution of ones, pi^2 / 3."""
    _, parts = described(FORMULA, "normal", SCHEMA)
    draws = make_prior(**parts.prior).sample(20000, seed=[0, 1])
    steps = parts.slopes({name: part.numpy() for name, part in draws.items()})[:, 0, :3]
    shares = steps / steps.sum(axis=1, keepdims=True)
    # Six standard errors of the mean: a false alarm in 1e8.
    np.testing.assert_allclose(shares.mean(axis=0), 1.0 / 3.0, atol=6 * 0.25 / np.sqrt(20000))
    logs = np.log(shares)
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert np.var(logs[:, one] - logs[:, other]) == pytest.approx(np.pi**2 / 3.0, rel=0.06)


def test_a_prior_is_of_the_whole_difference_and_not_of_steps():
    design, parts = described(FORMULA, "normal", SCHEMA, {"mo(school)": (25.0, 5.0)})
    unit = parts.outcome.scale
    assert parts.coefficients[0] == pytest.approx((25.0 / unit, 5.0 / unit))
    assert parts.coefficients[1] == parts.coefficients[2]
    assert design.labels[:3] == tuple(STEPS)
    with pytest.raises(ValueError, match="no terms"):
        described(FORMULA, "normal", SCHEMA, {"mo(school)[some]": (1.0, 1.0)})


def test_scores_are_linear_in_steps():
    """Catches a model whose small shares are normal in their logits, and levels that are mixed up."""
    _, parts = described(FORMULA, "normal", SCHEMA)
    coefficients = tf.constant(np.random.default_rng(0).normal(size=[3, 10]))
    layout = {"num_common": 5, "monotone": [[1, 4]]}
    part, values = vars(likelihood)["linear_values"]
    assert part == "coefficients"
    found = values(layout=layout, family="categorical")(coefficients)
    for block in (slice(0, 5), slice(5, 10)):
        each = slopes(coefficients[:, block], layout["monotone"])
        np.testing.assert_allclose(found[:, block], each)
    assert values(**parts.likelihood) is not None
    _, plain = described("y ~ age", "normal", SCHEMA)
    assert values(**plain.likelihood) is None


def test_a_fit_has_the_difference_and_its_shares(tmp_path, monkeypatch):
    asked = []
    honest = Straight.applies_to
    monkeypatch.setattr(
        Straight, "applies_to", lambda *given: asked.append(honest(*given)) or asked[-1]
    )
    result = dpvi.regression(FORMULA, records(), "normal", SCHEMA, epsilon=8.0, delta=1e-5, seed=1)
    found = result.summary()
    assert set(asked) == {True}
    truth = {f"share({name})": step / 24.0 for name, step in STEPS.items()}
    truth |= {"mo(school)": 24.0, "mo(rooms)": -9.0, "age": 0.4}
    # Four standard deviations: a false alarm in a thousand.
    for name, value in truth.items():
        assert abs(found["mean"][name] - value) < 4.0 * found["sd"][name], name
    assert found["sd"]["mo(school)"] < 1.5
    shares = np.stack([result.draws[f"share(mo(rooms)[{level}])"] for level in (2, 3, 4)])
    assert (shares >= 0.0).all()
    np.testing.assert_allclose(shares.sum(axis=0), 1.0)
    assert any(each.startswith("prior of mo(school): normal(0, ") for each in result.choices())
    assert not any("share" in each.partition(":")[0] for each in result.choices())
    new = {"school": LEVELS, "rooms": [1] * 4, "age": [50.0] * 4}
    means = result.predict(new)["mean"].to_numpy()
    shares = [found["mean"][f"share({name})"] for name in STEPS]
    np.testing.assert_allclose(np.diff(means) / (means[3] - means[0]), shares, atol=0.02)
    result.save(tmp_path / "fit.zip")
    loaded = dpvi.Regression.load(tmp_path / "fit.zip")
    assert loaded.parts == result.parts
    np.testing.assert_array_equal(loaded.predict(new)["mean"], means)


def test_missing_values_have_no_place_in_the_order():
    missing = {**SCHEMA.columns, "school": Categorical(LEVELS, missing=True)}
    with pytest.raises(ValueError, match="have no place"):
        described(FORMULA, "normal", Schema(missing), missing="indicator")
