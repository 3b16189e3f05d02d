"""ArviZ on a fitted model: groups, what may be in them, and what az's own functions make of them."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp
from support.toy import adam

import tfp_dpvi as dpvi
from tfp_dpvi.bayes.inference_data import from_groups

az = pytest.importorskip("arviz")
tfd = tfp.distributions
RNG = np.random.default_rng(0)
X = RNG.normal(size=(40, 3)).astype("float32")
Y = (X @ [1.0, -1.0, 0.5] + RNG.normal(size=40)).astype("float32")


def likelihood(params, x):
    return tfd.Normal(tf.linalg.matvec(x, params["w"]) + params["b"], 1.0)


@pytest.fixture(scope="module")
def model():
    prior = tfd.JointDistributionNamed(
        {"w": tfd.Sample(tfd.Normal(0.0, 1.0), 3), "b": tfd.Normal(0.0, 1.0)}
    )
    made = dpvi.DPVI(prior, likelihood, clipping="flat")
    made.compile(adam(2.0), delta=1e-5, jit_compile=False)
    made.fit(X, Y, batch_size=20, verbose=0)
    return made


@pytest.fixture(scope="module")
def generative():
    prior = tfd.Sample(tfd.Normal(0.0, 1.0), 2)
    return dpvi.DPVI(
        prior, lambda loc: tfd.MultivariateNormalDiag(loc, tf.ones(2)), clipping="flat"
    )


ONE = int(az.__version__.partition(".")[0]) >= 1


def groups_of(data):
    return set(data.children) if ONE else set(data.groups())


def expected_log_density(found):
    return found.elpd if ONE else found.elpd_loo


def exposures(model):
    return [line for line in str(model.privacy_report()).splitlines() if "unsafe_records" in line]


def test_groups_hold_what_is_released_and_nothing_of_records(model):
    data = model.to_inference_data(num_draws=20)
    assert groups_of(data) == {"posterior", "prior"}
    assert data.posterior["w"].shape == (4, 5, 3)
    draws = model.posterior_sample(20, seed=0)["w"].numpy()
    np.testing.assert_array_equal(data.posterior["w"].values.reshape(20, 3), draws)
    assert data.prior["b"].shape == (4, 5)
    assert list(az.summary(data).index) == ["b", "w[0]", "w[1]", "w[2]"]


def test_public_records_bring_predictions_observations_and_log_likelihoods(model):
    inputs = model.to_inference_data(X[:7], num_draws=20)
    assert groups_of(inputs) == {
        "posterior",
        "prior",
        "posterior_predictive",
        "prior_predictive",
    }
    data = model.to_inference_data(X[:7], Y[:7], num_draws=20)
    assert data.posterior_predictive["y"].shape == data.prior_predictive["y"].shape == (4, 5, 7)
    np.testing.assert_array_equal(data.observed_data["y"], Y[:7])
    w, b = (data.posterior[name].values.reshape(20, -1) for name in "wb")
    expected = -0.5 * (Y[:7] - w @ X[:7].T - b) ** 2 - 0.5 * np.log(2 * np.pi)
    np.testing.assert_allclose(
        data.log_likelihood["y"].values.reshape(20, 7), expected, rtol=2e-4, atol=1e-5
    )
    assert not exposures(model)


def test_predictions_have_the_models_moments(model):
    """False-alarm rate below 1e-9: 2,000 predictions of an outcome, bounds of 7 standard errors."""
    draws = (
        model.to_inference_data(X[:2], num_draws=2000)
        .posterior_predictive["y"]
        .values.reshape(2000, 2)
    )
    exact = model.predictive(X[:2], num_draws=2000)
    error = np.abs(draws.mean(axis=0) - exact.mean())
    assert (error < 7 * exact.stddev().numpy() / np.sqrt(2000)).all()
    np.testing.assert_allclose(draws.std(axis=0), exact.stddev(), rtol=7 / np.sqrt(2 * 2000))


def test_the_prior_predictive_has_the_priors_moments(model):
    """False-alarm rate below 1e-9: as above; variance |x|^2 + 1 + 1."""
    draws = model.prior_predictive(X[:3], 2000)
    sd = np.sqrt((X[:3] ** 2).sum(axis=1) + 2)
    assert draws.shape == (2000, 3)
    assert (np.abs(draws.mean(axis=0)) < 7 * sd / np.sqrt(2000)).all()
    np.testing.assert_allclose(draws.std(axis=0), sd, rtol=7 / np.sqrt(2 * 2000))
    np.testing.assert_array_equal(draws, model.prior_predictive(X[:3], 2000))


def test_a_model_of_whole_records(generative):
    assert generative.prior_predictive(num=6).shape == (6, 2)
    assert generative.to_inference_data(num_draws=8).posterior_predictive["x"].shape == (1, 8, 2)
    data = generative.to_inference_data(X[:5, :2], num_draws=8)
    assert data.posterior_predictive["x"].shape == (1, 8, 5, 2)
    assert data.log_likelihood["x"].shape == (1, 8, 5)


@pytest.mark.filterwarnings(
    "ignore:Passing a dict or None as alias_mapping"
)  # ArviZ 0.23 on Matplotlib 3.11.
@pytest.mark.filterwarnings(
    "ignore:Estimated shape parameter"
)  # Of 200 draws from a fit with fresh noise.
def test_arviz_compares_and_draws(model, tmp_path):
    import matplotlib as mpl

    mpl.use("Agg")
    data = model.to_inference_data(X, Y, num_draws=200)
    found = az.loo(data)
    elpd = expected_log_density(found)
    assert np.isfinite(elpd)
    assert expected_log_density(model.loo(X, Y, num_draws=200)) == pytest.approx(elpd)
    if ONE:
        az.plot_dist(data).savefig(tmp_path / "posterior.png")
        return
    axes = [az.plot_posterior(data).ravel()[0], az.plot_ppc(data, num_pp_samples=20)]
    for number, axis in enumerate(axes):
        axis.figure.savefig(tmp_path / f"{number}.png")


@pytest.mark.parametrize("version", ["0.23.4", "1.0.0", "1.3.0", "1.0.0rc1"])
def test_groups_are_passed_as_each_arviz_takes_them(version):
    """0.23 takes a group by its name, 1 takes a dict of them; either refuses the other's."""
    passed = {}

    class Arviz:
        __version__ = version

        @staticmethod
        def from_dict(*args, **kwargs):
            passed["args"] = args
            passed["kwargs"] = kwargs

    groups = {"posterior": {"w": np.zeros((4, 5))}, "prior": {"w": np.ones((4, 5))}}
    from_groups(Arviz, groups)
    if version.startswith("0"):
        assert passed == {"args": (), "kwargs": groups}
    else:
        assert passed == {"args": (groups,), "kwargs": {}}


def test_a_name_may_have_a_slash():
    """The level of a ward, or `{age / income}` in a formula; ArviZ 1 keeps slashes for paths."""
    data = from_groups(az, {"posterior": {"ward[A/B]": np.zeros((4, 5)), "b": np.ones((4, 5))}})
    names = ["ward[A\N{DIVISION SLASH}B]" if ONE else "ward[A/B]", "b"]
    assert set(data.posterior.data_vars) == set(names)
    assert set(az.summary(data, kind="stats").index) == set(names)


def test_loo_on_private_records_is_refused_with_its_price(model):
    with pytest.raises(
        ValueError, match=r"pass public ones, loo\(x_public, y_public\).\n.*would cost epsilon"
    ):
        model.loo()
    assert not exposures(model)


def test_private_records_are_exposed_under_an_unsafe_name_alone_and_remembered(model):
    data = model.to_inference_data(unsafe_records=(X, Y), num_draws=8)
    assert groups_of(data) == {"posterior", "prior", "log_likelihood"}
    assert exposures(model)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"y_public": Y}, "without x_public"),
        ({"x_public": X, "y_public": Y, "unsafe_records": (X, Y)}, "with public"),
        ({"unsafe_records": X}, "tuple"),
    ],
)
def test_what_does_not_fit_is_refused(model, arguments, words):
    with pytest.raises(ValueError, match=words):
        model.to_inference_data(**arguments)


def test_outcomes_need_inputs(model, generative):
    with pytest.raises(ValueError, match="x is missing"):
        model.prior_predictive()
    with pytest.raises(ValueError, match="x was passed"):
        generative.prior_predictive(X)
