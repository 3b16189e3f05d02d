"""The paired clip and the calibrated posterior of `DPVI`, through its public face."""

import dataclasses
import itertools
import logging
from unittest import mock

import numpy as np
import pytest
import scipy.stats
from support import internals
from support.siblings import slow

import tfp_dpvi as dpvi
from tfp_dpvi._tf import tf, tfp
from tfp_dpvi.bayes.coordinates import Coordinates
from tfp_dpvi.calibrated import mixture as mixtures
from tfp_dpvi.calibrated import simulation
from tfp_dpvi.calibrated.mixture import Mixture
from tfp_dpvi.calibrated.posterior import Calibrated, Calibrator

tfd = tfp.distributions
WIDTH = 2


@dpvi.register("calibrated_prior")
def prior():
    return tfd.JointDistributionNamed({"w": tfd.Sample(tfd.Normal(0.0, 1.0), WIDTH)})


@dpvi.register("calibrated_likelihood")
def likelihood(params, x):
    return tfd.Bernoulli(logits=tf.linalg.matvec(x, params["w"]), dtype=tf.float32)


def records(num, seed, w=None):
    generator = np.random.default_rng(seed)
    w = generator.normal(size=WIDTH) if w is None else w
    x = generator.normal(size=(num, WIDTH)).astype("float32")
    return x, (generator.random(num) < 1 / (1 + np.exp(-x @ w))).astype("float32"), w


def model_of(
    clipping="paired",
    noise=2.0,
    clip=1.5,
    rate=0.05,
    make=prior,
    like=likelihood,
    accountant="pld",
    **settings,
):
    model = dpvi.DPVI(make, like, clipping=clipping, **settings)
    falling = dpvi.keras.optimizers.schedules.CosineDecay(rate, 40, 0.1)
    optimizer = dpvi.optimizers.DPKerasAdamOptimizer(
        falling, l2_norm_clip=clip, noise_multiplier=noise
    )
    model.compile(optimizer, delta=1e-5, jit_compile=False, accountant=accountant)
    return model


@pytest.fixture(scope="module")
def fitted():
    model = model_of()
    x, y, _ = records(400, 0)
    history = model.fit(x, y, batch_size=80, epochs=20, verbose=0)
    return model, x, history


def test_the_posterior_has_the_priors_structure_and_is_used(fitted):
    model, x, _ = fitted
    drawn = model.posterior.sample(7, seed=1)
    assert drawn["w"].shape == (7, WIDTH)
    assert model.posterior.log_prob(drawn).shape == (7,)
    np.testing.assert_allclose(
        model.posterior_sample(2000, seed=3)["w"].numpy().std(axis=0),
        model.posterior.sample(2000, seed=4)["w"].numpy().std(axis=0),
        rtol=0.2,
    )
    assert np.all(
        model.posterior_sample(2000, seed=5)["w"].numpy().std(axis=0) > 0.05
    )  # 2 / sqrt(400) is 0.1; 8 deviations.
    np.testing.assert_allclose(
        model.posterior_sample(4000, seed=6)["w"].numpy().std(axis=0),
        np.sqrt(np.diag(model._calibrated().mixture.covariance)),
        rtol=0.1,  # 9 standard errors.
    )
    mean = 1 / (
        1 + np.exp(-np.einsum("sd,nd->sn", model.posterior_sample(4000, seed=1)["w"], x[:5]))
    )
    np.testing.assert_allclose(model.predict(x[:5]), mean.mean(axis=0), atol=0.05)


def test_history_and_report(fitted):
    model, _, history = fitted
    assert len(history.history["kappa"]) >= 15  # None before there is a window.
    assert 1.0 <= history.history["kappa"][-1] <= 2.5
    report = str(model.privacy_report())
    assert "curvature" in report
    assert model.caveats == ()
    joint = model.privacy_plan.noise_multiplier * np.sqrt(0.88)
    assert model.privacy_plan.sensitivity.add_or_remove == pytest.approx(1 / np.sqrt(0.88))
    import dp_accounting

    event = dp_accounting.PoissonSampledDpEvent(0.2, dp_accounting.GaussianDpEvent(joint))
    accountant = dp_accounting.pld.PLDAccountant(value_discretization_interval=1e-3)
    accountant.compose(dp_accounting.SelfComposedDpEvent(event, 100))
    assert model.privacy_report().epsilon == pytest.approx(accountant.get_epsilon(1e-5), rel=5e-3)


def test_the_summary_says_where_the_variance_comes_from(fitted):
    model, _, _ = fitted
    summary = model.posterior_summary()
    assert "No fit" in str(model_of().posterior_summary())
    assert "No fit" not in str(summary)
    assert summary.names == ["w[0]", "w[1]"]
    shares = np.stack([summary.columns[name] for name in ("noise", "data", "prior")])
    np.testing.assert_allclose(shares.sum(axis=0), 1.0)
    assert np.all(shares >= -1e-9)
    assert np.all(summary.columns["5%"] < summary.columns["mean"])
    assert "kappa" in str(summary)


def test_a_saved_model_has_the_same_posterior(fitted, tmp_path):
    model, x, _ = fitted
    model.save(tmp_path / "model.keras")
    loaded = dpvi.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(
        loaded.posterior.sample(5, seed=(0, 1))["w"], model.posterior.sample(5, seed=(0, 1))["w"]
    )
    np.testing.assert_array_equal(loaded.predict(x[:3]), model.predict(x[:3]))
    assert str(loaded.posterior_summary()) == str(model.posterior_summary())
    diagnostics = [one.posterior_summary().checks.parameters for one in (loaded, model)]
    assert diagnostics[0].names == ["w[0]", "w[1]"]
    np.testing.assert_array_equal(*[each.to_array() for each in diagnostics])


def test_a_posterior_that_was_saved_without_diagnostics_of_its_parameters_loads(fitted):
    model, _, _ = fitted
    calibrated = model._calibrated()
    arrays = calibrated.to_arrays()
    del arrays["parameters"]
    loaded = Calibrated.from_arrays(arrays, model.prior)
    np.testing.assert_array_equal(loaded.checks.to_array(), calibrated.checks.to_array())
    assert loaded.checks.parameters is None
    assert loaded.checks.warnings == []


def test_an_export_has_the_calibrated_posterior(fitted, tmp_path):
    model, _, _ = fitted
    model.export(tmp_path / "served")
    served = tf.saved_model.load(str(tmp_path / "served"))
    drawn = served.signatures["sample_posterior"](num=tf.constant(2000), seed=tf.constant([1, 2]))[
        "w"
    ]
    np.testing.assert_allclose(
        drawn.numpy().std(axis=0),
        model.posterior_sample(2000, seed=1)["w"].numpy().std(axis=0),
        rtol=0.2,
    )


def test_predictions_follow_the_last_fit():
    """Keras keeps what it traced, and the posterior is a constant in it."""
    model = model_of(accountant="rdp")
    x, y, _ = records(200, 0)
    for flipped in (y, 1 - y):
        model.fit(x, flipped, batch_size=100, epochs=1, steps_per_epoch=60, verbose=0)
        found = model.predict(x[:5])  # Before anything else asks for the posterior.
        draws = model.posterior_sample(4000, seed=1)["w"].numpy()
        mean = np.mean(1 / (1 + np.exp(-draws @ x[:5].T)), axis=0)
        np.testing.assert_allclose(found, mean, atol=0.06)


# ---------------------------------------------------------------------- against closed forms


def test_without_noise_and_clip_it_is_the_exact_posterior_but_for_simulation():
    """Conjugate linear regression, full batches: covariance from P0 + A (B + R)^-1 A.

    Here B = M (1 + 1 / n). The mean differs from the exact one by the simulation's own error, of
    variance V / n; checked at 6 standard errors.
    """
    generator = np.random.default_rng(0)
    x = generator.normal(size=(1000, WIDTH)).astype("float32")
    y = (x @ [0.7, -0.3] + 0.5 * generator.normal(size=1000)).astype("float32")

    def line(params, x):
        return tfd.Normal(tf.linalg.matvec(x, params["w"]), 0.5)

    model = model_of(noise=0.0, clip=float("inf"), rate=0.1, like=line, accountant="rdp")
    history = model.fit(x, y, batch_size=1000, epochs=100, verbose=0)
    assert history.history["loss"][-1] == pytest.approx(
        0.5 * np.log(2 * np.pi * 0.25) + 0.5, abs=0.3
    )  # Nats a record.
    precision = x.T @ x / 0.25 + np.eye(WIDTH)
    mean = np.linalg.solve(precision, x.T @ y / 0.25)
    found = model._calibrated()
    assert found.num_steps == 70
    widened = np.linalg.inv((x.T @ x / 0.25) / (1 + 1 / 70) + np.eye(WIDTH))
    np.testing.assert_allclose(
        found.mixture.covariance, widened, rtol=0.08, atol=0.08 * widened.max()
    )
    sd = np.sqrt(np.diag(np.linalg.inv(precision)))
    assert np.all(np.abs(found.mixture.mean - mean) < 6 * sd / np.sqrt(70))


@pytest.mark.slow  # `test_curvature_mixture.py` has the mixture of no budget.
def test_with_no_budget_the_prior_comes_back():
    model = model_of(noise=1e6, rate=0.001)
    x, y, _ = records(200, 1)
    model.fit(x, y, batch_size=40, epochs=10, verbose=0)
    drawn = model.posterior.sample(4000, seed=1)["w"].numpy()
    np.testing.assert_allclose(drawn.mean(axis=0), 0.0, atol=0.1)
    np.testing.assert_allclose(drawn.std(axis=0), 1.0, atol=0.1)


# `test_coordinates_go_there_and_back` and `test_curvature_mixture.py` have its parts.
@pytest.mark.slow
def test_constrained_parameters_stay_in_their_support_and_unread_ones_follow_the_prior():
    """`s` is positive; `unused` is not read by the likelihood and keeps its prior, a Gamma."""

    def make():
        return tfd.JointDistributionNamed(
            {
                "w": tfd.Sample(tfd.Normal(0.0, 1.0), WIDTH),
                "s": tfd.HalfNormal(2.0),
                "unused": tfd.Gamma(3.0, 2.0),
            }
        )

    def line(params, x):
        return tfd.Normal(tf.linalg.matvec(x, params["w"]), params["s"])

    generator = np.random.default_rng(0)
    x = generator.normal(size=(500, WIDTH)).astype("float32")
    y = (x @ [0.7, -0.3] + generator.normal(size=500)).astype("float32")
    model = model_of(noise=1.0, make=make, like=line)
    model.fit(x, y, batch_size=100, epochs=20, verbose=0)
    assert model.accumulated["curvature"]["matrix"].shape[1:] == (3, 3)
    drawn = model.posterior.sample(4000, seed=1)
    assert np.all(drawn["s"].numpy() > 0)
    assert abs(np.median(drawn["s"]) - 1.0) < 0.4
    assert drawn["unused"].numpy().mean() == pytest.approx(1.5, abs=0.2)
    assert drawn["unused"].numpy().std() == pytest.approx(np.sqrt(3) / 2, abs=0.2)


# ---------------------------------------------------------------------- coverage


def covered(clipping, num=60, simulates=False):
    """How many of `num` 90 % intervals of the first weight cover it; one trace."""
    model = model_of(
        clipping, noise=6.0, clip=1.2, accountant="rdp"
    )  # The faster one: no price is read here.
    if simulates:
        made_up = np.random.default_rng(9).normal(size=(500, WIDTH))
        dpvi.pilot(model, made_up, num_records=500, epsilon=1.0, delta=1e-5)
    x, y, _ = records(500, 0)
    start, found = model.get_weights(), 0
    for number in range(num):
        x, y, w = records(500, 1000 + number)
        model.set_weights(start)
        for variable in model.optimizer.variables:
            if "rate" not in variable.name:
                variable.assign(tf.zeros_like(variable))
        model.fit(x, y, batch_size=100, epochs=1, steps_per_epoch=100, verbose=0)
        if clipping == "flat":
            draws = model.posterior_sample(500, seed=number)["w"].numpy()
        else:  # The same without TFP.
            draws = model._calibrated().mixture.sample(500, np.random.default_rng(number))
        low, high = np.quantile(draws[:, 0], [0.05, 0.95])
        found += low <= w[0] <= high
    return found


@pytest.mark.slow
def test_intervals_cover_the_truth():
    """P(Binomial(26, 0.9) < 14) = 3e-7: the false alarm of a posterior that covers 0.9."""
    assert scipy.stats.binom.cdf(13, 26, 0.9) < 1e-6
    assert covered("paired", num=26) >= 14


@pytest.mark.parametrize(("num", "least"), [slow(60, 41)])
def test_intervals_cover_the_truth_with_a_pilot(num, least):
    """False alarms below 8e-7, as above."""
    assert covered("paired", num=num, simulates=True) >= least


@pytest.mark.slow
def test_the_flat_clips_intervals_do_not():
    assert covered("flat") < 41


# ---------------------------------------------------------------------- where it does not apply


class Unsampled(tfd.Normal):
    def _sample_n(self, n, seed=None):
        raise NotImplementedError("no draws")


def centred(params, x):
    return tfd.Normal(tf.linalg.matvec(x - tf.reduce_mean(x, axis=0), params["w"]), 1.0)


def centred_logs(params, x):
    logs = tf.math.log(x)  # No number at negative inputs, where nothing can be compared.
    return tfd.Normal(tf.linalg.matvec(logs - tf.reduce_mean(logs, axis=0), params["w"]), 1.0)


def wide_prior():
    return tfd.JointDistributionNamed({"w": tfd.Sample(tfd.Normal(0.0, 1.0), 51)})


@pytest.mark.parametrize(
    ("reason", "settings", "extra"),
    [
        slow(
            "does not simulate",
            {"like": lambda params, x: Unsampled(tf.linalg.matvec(x, params["w"]), 1.0)},
            {},
        ),
        slow("depends on other records", {"like": centred}, {}),
        ("depends on other records", {"like": centred_logs}, {}),
        slow("sample_weight", {}, {"sample_weight": np.ones(60, "float32")}),
        slow("num_draws=2", {"num_draws": 2}, {}),
        slow("gradients='vectorized'", {"gradients": "vectorized"}, {}),
        slow("51 parameters", {"make": wide_prior}, {}),
    ],
)
def test_it_falls_back_to_the_flat_clip_and_says_so_once(reason, settings, extra, caplog):
    width = 51 if "make" in settings else WIDTH
    generator = np.random.default_rng(0)
    x, y = generator.uniform(size=(60, width)).astype("float32"), np.ones(60, "float32")
    model = model_of(**settings)
    with caplog.at_level(logging.WARNING, logger=internals.LOG.name):
        for _ in range(2):
            model.fit(x, y, batch_size=30, epochs=1, verbose=0, **extra)
    said = [
        record.getMessage() for record in caplog.records if "does not apply" in record.getMessage()
    ]
    assert len(said) == 1
    assert reason in said[0]
    assert model.posterior is model.surrogate_posterior
    assert "its intervals are not calibrated" in model.caveats[0]
    assert model.privacy_plan.metrics == ()


@pytest.mark.parametrize(("name", "value"), [("num_draws", 2), slow("gradients", "vectorized")])
def test_a_setting_that_rules_pairs_out_later_is_seen(name, value, caplog):
    model = model_of()
    x, y, _ = records(60, 0)
    model.make_data(x, y, batch_size=30)
    assert model.calibration.pairing is not None
    setattr(model, name, value)
    with caplog.at_level(logging.WARNING, logger=internals.LOG.name):
        model.make_data(x, y, batch_size=30)
    assert model.calibration.pairing is None
    assert name in caplog.text


class DrawsFew(tfd.Normal):
    def _sample_n(self, n, seed=None):
        if n > 100:
            raise ValueError("too many at once")
        return super()._sample_n(n, seed)


def test_a_prior_that_does_not_draw_many_values_at_once_breaks_no_fit():
    """What compares with the prior is left out."""

    def like(params, x):
        return tfd.Normal(params * x[:, 0], 1.0)

    model = model_of(make=lambda: DrawsFew(0.0, 1.0), like=like, accountant="rdp")
    x, y, _ = records(60, 0)
    model.fit(x, y, batch_size=60, epochs=20, verbose=0)
    checks = model.posterior_summary().checks
    assert model.posterior is not model.surrogate_posterior
    assert np.isnan(checks.parameters.reaches).all()
    assert np.isnan(checks.parameters.width).all()


@pytest.mark.slow  # As in `test_pairing.py`.
def test_a_window_of_a_few_steps_is_none():
    model = model_of()
    x, y, _ = records(60, 0)
    model.fit(x, y, batch_size=30, epochs=1, verbose=0)
    assert model.posterior is model.surrogate_posterior
    assert "its intervals are not calibrated" in model.caveats[0]


def test_clipping_is_flat_or_paired():
    with pytest.raises(ValueError, match="clipping='twin' is unknown"):
        dpvi.DPVI(prior, likelihood, clipping="twin")


@pytest.mark.slow  # `test_local.py` fits one.
def test_a_likelihood_of_whole_records_is_paired_with_whole_records():
    def whole(params):
        return tfd.MultivariateNormalDiag(params["w"], tf.ones(WIDTH))

    model = model_of(noise=1.0, like=whole, clip=2.0)
    x = np.random.default_rng(0).normal([0.5, -1.0], size=(500, WIDTH)).astype("float32")
    model.fit(x, batch_size=100, epochs=20, verbose=0)
    drawn = model.posterior.sample(2000, seed=1)["w"].numpy()
    np.testing.assert_allclose(drawn.mean(axis=0), x.mean(axis=0), atol=6 * drawn.std(axis=0).max())
    assert model.sample_predictive(3).shape == (3, WIDTH)


@pytest.mark.parametrize(
    "kind",
    [*map(slow, ("xla", "float64", "physical", "streamed", "strategy")), "strategy in float64"],
)
def test_it_works_compiled_in_float64_by_physical_batches_streamed_and_on_replicas(kind):
    """Without noise and clip: the estimate is near the truth, however the step is run."""
    dtype = np.float64 if "float64" in kind else np.float32

    def make():
        return tfd.JointDistributionNamed(
            {"w": tfd.Sample(tfd.Normal(dtype(0.0), dtype(1.0)), WIDTH)}
        )

    def like(params, x):
        return tfd.Normal(tf.linalg.matvec(x, params["w"]), dtype(0.5))

    generator = np.random.default_rng(0)
    x = generator.normal(size=(300, WIDTH))
    y = x @ [0.7, -0.3] + 0.5 * generator.normal(size=300)
    strategy = (
        tf.distribute.MirroredStrategy(["CPU:0"])
        if "strategy" in kind
        else tf.distribute.get_strategy()
    )
    with strategy.scope():
        model = dpvi.DPVI(make, like, clipping="paired")
        optimizer = dpvi.optimizers.DPKerasAdamOptimizer(
            0.05, l2_norm_clip=1e3, noise_multiplier=1e-6
        )
        physical = 32 if kind == "physical" else None
        model.compile(optimizer, jit_compile=kind == "xla", physical_batch_size=physical)
    model.fit(
        x.astype(dtype),
        y.astype(dtype),
        batch_size=100,
        epochs=20,
        verbose=0,
        stream=kind == "streamed" or None,
    )
    drawn = model.posterior.sample(1000, seed=1)["w"].numpy()
    assert drawn.dtype == dtype
    np.testing.assert_allclose(drawn.mean(axis=0), [0.7, -0.3], atol=0.2)
    assert (
        0.02 < drawn.std(axis=0).max() < 0.06
    )  # 0.5 / sqrt(300) = 0.029, and the draws of batches and twins.


# ---------------------------------------------------------------------- coordinates and pilot


@pytest.mark.parametrize(
    "make",
    [
        prior,
        lambda: tfd.Gamma(2.0, 1.0),
        lambda: tfd.JointDistributionSequential(
            [tfd.HalfNormal(1.0), lambda s: tfd.Sample(tfd.Normal(0.0, s), 2)]
        ),
        lambda: tfd.JointDistributionNamed(
            {"p": tfd.Dirichlet(tf.ones(3)), "m": tfd.Sample(tfd.Normal(0.0, 1.0), [2, 2])}
        ),
    ],
)
def test_coordinates_go_there_and_back(make):
    made = make()
    coordinates = Coordinates(made)
    params = made.sample(seed=1)
    parts = coordinates.flatten(params)
    tf.nest.map_structure(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        coordinates.constrain(parts),
        params,
    )
    vector = tf.concat(parts, axis=0)
    normal = tfd.MultivariateNormalDiag(tf.zeros(coordinates.num), tf.ones(coordinates.num))
    pushed = tfd.TransformedDistribution(normal, coordinates.bijector)
    volume = normal.log_prob(vector) - pushed.log_prob(params)  # The Jacobian, another way.
    np.testing.assert_allclose(
        coordinates.log_prior(vector), made.log_prob(params) + volume, rtol=1e-4
    )


def test_a_prior_is_traced_once_for_few_points_of_any_number():
    """Each point's value and gradient are its own."""
    coordinates = Coordinates(tfd.Sample(tfd.Normal(1.0, 2.0), 2))
    points = np.random.default_rng(0).normal(size=(5, 2))
    with mock.patch.object(
        Coordinates, "log_prior", autospec=True, side_effect=Coordinates.log_prior
    ) as traced:
        values, gradients = coordinates.log_density(points)
        for num in (1, 4, 16):
            chosen = np.resize(points, (num, 2))
            value, gradient = coordinates.log_density(chosen)
            np.testing.assert_allclose(value, np.resize(values, num), rtol=1e-6)
            np.testing.assert_allclose(gradient, np.resize(gradients, (num, 2)), rtol=1e-6)
        assert traced.call_count == 1
    np.testing.assert_allclose(gradients, (1.0 - points) / 4.0, rtol=1e-5)


@pytest.mark.parametrize(("epsilon", "share"), [slow(0.1, 1.0), (8.0, 2.0)])
def test_the_pilot_clips_about_the_median_length_of_a_pair(epsilon, share):
    """The median where noise counts most.

    A pair's gradient is x or nothing, and x where outcomes are sure is rare among pairs.
    """
    x = np.random.default_rng(0).normal(size=(4000, WIDTH))
    model = dpvi.DPVI(prior, likelihood, clipping="paired")
    settings = {"num_records": 5000, "epsilon": epsilon, "delta": 1e-5}
    found = dpvi.pilot(model, x, **settings)
    assert found.l2_norm_clip == pytest.approx(
        share * 0.9 * np.median(np.linalg.norm(x, axis=1)), rel=0.1
    )
    assert found == dpvi.pilot(model, x, **settings)
    assert found.fit_settings == {"batch_size": 1000, "epochs": 60}


@pytest.mark.slow
def test_the_pilot_takes_a_learning_rate_and_keeps_that_of_the_window():
    x = np.random.default_rng(0).normal(size=(50, WIDTH)).astype("float32")
    model, settings = (
        dpvi.DPVI(prior, likelihood),
        {"num_records": 5000, "epsilon": 1.0, "delta": 1e-5},
    )
    usual, low = (
        dpvi.pilot(model, x, **settings),
        dpvi.pilot(model, x, **settings, learning_rate=0.05),
    )
    assert float(low.adam(5000, noise_multiplier=1.0).learning_rate) == pytest.approx(
        low.learning_rate
    )
    assert low.learning_rate == 0.05
    assert low.learning_rate * low.last_rate == pytest.approx(usual.learning_rate * usual.last_rate)
    assert (
        dpvi.pilot(model, x, **settings, learning_rate=1e-6).last_rate == 1.0
    )  # The rate never rises.
    with pytest.raises(ValueError, match=r"learning_rate=0.*greater than 0"):
        dpvi.pilot(model, x, **settings, learning_rate=0.0)


@pytest.mark.slow  # A case of the pilot of which others are quick.
def test_directions_without_information_do_not_choose_the_clip():
    """Four copies of one input: the clip still depends on epsilon."""
    x = np.random.default_rng(0).normal(size=(2000, 1)) + 1e-3 * np.random.default_rng(1).normal(
        size=(2000, 4)
    )
    wide = tfd.JointDistributionNamed({"w": tfd.Sample(tfd.Normal(0.0, 1.0), 4)})
    model = dpvi.DPVI(wide, likelihood, clipping="paired")
    low, high = (
        dpvi.pilot(model, x, num_records=1000, epsilon=epsilon, delta=1e-5)
        for epsilon in (0.1, 8.0)
    )
    assert high.l2_norm_clip == pytest.approx(2.0 * low.l2_norm_clip)


def test_the_pilot_knows_the_shape_of_the_curvature():
    x = np.random.default_rng(0).normal(size=(2000, WIDTH)) * [3.0, 0.3]
    model = dpvi.DPVI(prior, likelihood, clipping="paired")
    dpvi.pilot(model, x, num_records=1000, epsilon=1.0, delta=1e-5)
    w = np.array([0.5, -0.5], "float32")
    pairs = model.calibration.simulator.pairs(w, np.random.default_rng(0), 8192)
    prior_of = pairs.curvature_prior(1000, float("inf"))
    p = 1 / (1 + np.exp(-x @ w))
    expected = 1000 * (x * (p * (1 - p))[:, None]).T @ x / len(x)
    np.testing.assert_allclose(prior_of.matrix, expected, rtol=0.15, atol=0.03 * expected.max())
    np.testing.assert_allclose(prior_of.curvature, prior_of.matrix, rtol=1e-6)


def test_the_pilot_passes_over_parameters_at_which_gradients_overflow(monkeypatch):
    """As of a variance drawn near 0: at half of the draws here."""
    honest, calls = simulation.SimulatedPairs.curvature_prior, itertools.count()

    def overflowing(pairs, num_records, clip):
        found = honest(pairs, num_records, clip)
        return dataclasses.replace(
            found, curvature=found.curvature * (np.inf if next(calls) % 2 else 1.0)
        )

    monkeypatch.setattr(simulation.SimulatedPairs, "curvature_prior", overflowing)
    model = dpvi.DPVI(prior, likelihood, clipping="paired")
    x = np.random.default_rng(0).normal(size=(50, WIDTH)).astype("float32")
    found = dpvi.pilot(model, x, num_records=1000, epsilon=1.0, delta=1e-5)
    assert 0.0 < found.last_rate < 1.0


def test_the_pilot_refuses_what_it_cannot_simulate():
    model = dpvi.DPVI(wide_prior, likelihood, clipping="paired")
    with pytest.raises(ValueError, match=r"more than 50 .compile without an optimizer takes 512"):
        dpvi.pilot(model, np.zeros((10, 51), "float32"), num_records=100, epsilon=1.0, delta=1e-5)
    with pytest.raises(ValueError, match="public inputs"):
        dpvi.pilot(
            dpvi.DPVI(prior, likelihood, clipping="paired"),
            num_records=100,
            epsilon=1.0,
            delta=1e-5,
        )


@pytest.mark.slow
def test_equally_informed_groups_have_equal_intervals():
    """A simulation of 1,024 pairs, 51 a group, taken as exact would make one 1.9 times as wide."""
    num = 20
    groups = tfd.JointDistributionNamed({"mean": tfd.Sample(tfd.Normal(0.0, 1.0), num)})
    model = dpvi.DPVI(groups, lambda params, x: tfd.Normal(tf.gather(params["mean"], x), 0.5))
    inputs = np.tile(np.arange(num, dtype="int32"), 500)
    x = inputs[:4000]
    y = np.random.default_rng(0).normal(size=len(x)).astype("float32") * 0.5
    settings = dpvi.pilot(model, inputs, num_records=len(x), epsilon=1.0, delta=1e-5)
    model.compile(settings.adam(len(x)), epsilon=1.0, delta=1e-5)
    model.fit(x, y, **settings.fit_settings, verbose=0)
    spread = np.std(model.posterior_sample(4000, seed=0)["mean"], axis=0)
    assert spread.max() < 1.5 * spread.min()


# ---------------------------------------------------------------- parameters of very different scales


def incomes(unit, simulates=False):
    """Returns a fitted model of 400 incomes in a unit of dollars, with weak priors."""

    priors = {"a": tfd.Normal(0.0, 1e5 / unit), "s": tfd.Normal(float(np.log(1e4 / unit)), 1.0)}

    def make():
        return tfd.JointDistributionNamed(priors)

    def whole(params):
        return tfd.Normal(params["a"], tf.exp(params["s"]))

    model = model_of(make=make, like=whole, accountant="rdp")
    if simulates:
        dpvi.pilot(model, num_records=400, epsilon=8.0, delta=1e-5)
    y = np.random.default_rng(0).normal(2e4, 9e3, 400) / unit
    model.fit(y.astype("float32"), batch_size=80, epochs=10, verbose=0)
    return model


@pytest.mark.parametrize("simulates", [False, slow(True)])
def test_incomes_in_dollars_are_warned_of_by_name(simulates, caplog, monkeypatch):
    """In the log, before the first charge and after the last; in the summary, and in the report."""
    reserve, charged_after = dpvi.PrivacyLedger.reserve, []

    def watched(self, *args, **settings):
        charged_after.append(caplog.text)
        return reserve(self, *args, **settings)

    monkeypatch.setattr(dpvi.PrivacyLedger, "reserve", watched)
    with caplog.at_level(logging.WARNING, logger=internals.LOG.name):
        model = incomes(1.0, simulates)
    own = [record for record in caplog.records if record.name == internals.LOG.name]
    said = [record.getMessage() for record in own]
    warnings = model.posterior_summary().checks.warnings
    for word in ("prior of a is", "interval"):
        assert any(word in sentence and "rescale" in sentence for sentence in warnings)
    assert said[0].startswith("Before training: the prior of a is ")
    assert said[0] in charged_after[0]
    assert [
        sentence[len("Do not trust the posterior's intervals: ") : -1] for sentence in said[1:]
    ] == warnings
    assert all(f"WARNING: {sentence}." in str(model.posterior_summary()) for sentence in warnings)
    assert all(any(sentence in caveat for caveat in model.caveats) for sentence in warnings)
    assert "rescale" in " ".join(str(model.privacy_report()).split())


def test_incomes_in_ten_thousands_of_dollars_are_not(caplog):
    """Nor are narrower posteriors."""
    with caplog.at_level(logging.WARNING, logger=internals.LOG.name):
        model = incomes(1e4)
    found = model._calibrated().checks.parameters
    assert found.warnings == []
    assert "rescale" not in caplog.text
    assert np.all(found.width < 0.5)


def test_a_posterior_wider_than_its_prior_is_warned_of_by_name(fitted, monkeypatch):
    """The prior's standard deviations are 1."""
    model, _, _ = fitted
    wide = Mixture(np.zeros((1, WIDTH)), np.diag([0.9, 1.5])[None])
    monkeypatch.setattr(mixtures, "exact_mixture", lambda *terms: wide)
    calibrator = Calibrator(model.calibration.pairing, model.surrogate_posterior, None)
    checks = calibrator(model.accumulated, internals.mechanism_of(model)).checks
    np.testing.assert_allclose(checks.parameters.width, [0.9, 1.5], rtol=0.06)  # 4 errors.
    (sentence,) = [each for each in checks.warnings if "as wide as the prior" in each]
    assert "posterior of w[1] is 1.5 times" in sentence
