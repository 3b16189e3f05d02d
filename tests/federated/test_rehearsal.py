"""Rehearsals of a study: figures of simulated hospitals, and what is refused."""

import numpy as np
import pytest

import tfp_dpvi as dpvi
from tfp_dpvi._tf import tfd
from tfp_dpvi.federated import RegressionStudy, Study, Synchronous, rehearse_study


def make_study(**settings):
    prior = tfd.JointDistributionNamed({"b": tfd.Normal(0.0, 1.0), "w": tfd.Normal(0.0, 1.0)})
    rng = np.random.default_rng(0)
    example = rng.normal(size=4).astype("float32"), np.array([0, 1, 1, 0], np.int32)
    return Study(
        prior,
        lambda params, x: tfd.Bernoulli(logits=params["b"] + params["w"] * x),
        dpvi.optimizers.InformationOptimizer(l2_norm_clip=1.5),
        local_steps=5,
        **{"example": example, "local": ["b"], **settings},
    )


@pytest.fixture(scope="module")
def study():
    return make_study()


def inputs(num, seed):
    return np.random.default_rng(seed).normal(size=num).astype("float32")


def test_a_study_is_rehearsed(study):
    found = rehearse_study(
        study,
        [(900, 4.0), (900, 2.0)],
        inputs,
        delta=1e-5,
        schedule=Synchronous(rounds=1),
        truth={"w": 1.0},
        effects={"b": 0.4},
        num=2,
        verbose=0,
    )
    assert found.names == ("b", "w", "sd of b")
    figures = found.columns(1800, 4.0)
    assert found.fixed == {"w": 1.0, "sd of b": 0.4}
    assert figures["power"][1] == 1.0
    assert 0.1 < figures["width"][1] < 0.5
    assert figures["coverage"].shape == (3,)
    assert figures["width"][0] > 1.5 * figures["width"][1], "the mean of two hospitals"
    assert figures["bias"][1] == pytest.approx(0.0, abs=0.3)
    truths = [row["truth"][0] for row in found.rows[1800, 4.0]]
    assert np.ptp(truths) > 0.01, "what is not named is drawn"
    assert "sd of b" in str(found)


@pytest.mark.slow  # As the one above.
def test_a_regression_is_rehearsed_with_outcomes_beyond_its_bounds():
    """Simulated records are the model's arrays, no table whose values the schema must allow."""
    schema = {
        "age": {"type": "continuous", "lower": 18.0, "upper": 90.0},
        "pressure": {"type": "continuous", "lower": 60.0, "upper": 200.0},
    }
    study = RegressionStudy("pressure ~ age", "normal", schema, local_steps=2)
    once = {"schedule": Synchronous(rounds=1), "num": 2, "verbose": 0}
    found = rehearse_study(study, [(300, 4.0)], delta=1e-5, truth={"intercept": 5.0}, **once)
    assert found.fixed == {"intercept": 5.0}
    assert study.columns is not None, "the study is as it was"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hospitals": []}, "hospitals is empty"),
        ({"hospitals": [(0, 1.0)]}, "num_records=0"),
        ({"hospitals": [(9, -1.0)]}, "epsilon=-1.0"),
        ({"effects": {"w": 1.0}}, "not local"),
        ({"effects": {"b": -1.0}}, "b=-1.0"),
        ({"truth": {"v": 1.0}}, "no parameter"),
        ({"inputs": None}, "inputs are missing"),
        ({"num": 1}, "num=1"),
    ],
)
def test_what_does_not_fit_is_refused(study, change, says):
    given = {"hospitals": [(100, 1.0)], "inputs": inputs, "delta": 1e-5, "verbose": 0, **change}
    with pytest.raises(ValueError, match=says) as caught:
        rehearse_study(study, **given)
    assert str(caught.value).count("\n") <= 1
