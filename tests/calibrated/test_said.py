"""What would otherwise be wrong without a word, with `compile` without an optimizer."""

import logging
import math

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp
from support.scoring import Fits

import tfp_dpvi as dpvi
from tfp_dpvi.bayes.checks import fall
from tfp_dpvi.bayes.model import BayesianModel
from tfp_dpvi.calibrated import mixture as mixtures
from tfp_dpvi.calibrated.curvature import CurvaturePrior, NoisyCurvature
from tfp_dpvi.calibrated.jumps import parameters_that_jump
from tfp_dpvi.calibrated.mixture import Mixture
from tfp_dpvi.calibrated.pairing import Pairing
from tfp_dpvi.calibrated.scoring import Scoring
from tfp_dpvi.calibrated.window import Window
from tfp_dpvi.data import make_records

tfd = tfp.distributions


def scored(prior, likelihood, *data, epsilon=3.0, **settings):
    model = dpvi.DPVI(prior, likelihood, seed=1)
    model.compile(epsilon=epsilon, delta=1e-5)
    model.fit(*data, verbose=0, **settings)
    return model


def jump(params, x):
    return tfd.Poisson(tf.where(x < params["place"], params["before"], params["after"]))


JUMP = {
    "before": tfd.Exponential(1.0),
    "after": tfd.Exponential(1.0),
    "place": tfd.Uniform(0.0, 100.0),
}


def test_a_parameter_that_no_gradient_reaches_is_refused_by_name_before_anything_is_spent():
    x = np.linspace(0.0, 100.0, 200).astype("float32")
    model = dpvi.DPVI(tfd.JointDistributionNamed(JUMP), jump)
    model.compile(epsilon=1.0, delta=1e-5)
    with pytest.raises(ValueError, match="no gradient reaches place") as caught:
        model.fit(x, np.ones(200, "float32"), public_inputs=x)
    assert len(str(caught.value).splitlines()) <= 2
    assert model.privacy_ledger.num_releases == 0


RATES = {
    "rates": tfd.Sample(tfd.Exponential(1.0), 2),
    "places": tfd.Sample(tfd.Uniform(0.0, 100.0), 2),
}


def of_vector(params, x):
    """One entry is a threshold, and a gradient reaches the other one."""
    before, after = tf.unstack(params["rates"])
    return tfd.Poisson(
        tf.where(x < params["places"][0], before, after) + 0.001 * params["places"][1]
    )


def of_sign(params, x):
    """The gradient of a sign is zero."""
    mean, half = params["before"] + params["after"], params["before"] - params["after"]
    return tfd.Poisson(0.5 * (mean + half * tf.sign(params["place"] - x)))


def of_two_places(params, x):
    """A gradient reaches the threshold too, elsewhere."""
    rate = tf.where(x < params["place"], params["before"], params["after"])
    return tfd.Poisson(rate * tf.exp(0.001 * (x - params["place"])))


@pytest.mark.parametrize(
    ("likelihood", "prior", "name"),
    [
        (of_vector, RATES, r"places\[0\]"),
        (of_two_places, JUMP, "place"),
        pytest.param(of_sign, JUMP, "place", marks=pytest.mark.slow),
    ],
)
def test_a_jump_beside_a_gradient_is_refused_by_name(likelihood, prior, name):
    x = np.linspace(0.0, 100.0, 400).astype("float32")
    model = dpvi.DPVI(tfd.JointDistributionNamed(prior), likelihood)
    model.compile(epsilon=1.0, delta=1e-5)
    with pytest.raises(ValueError, match=f"no gradient shows how {name} changes") as caught:
        model.fit(x, np.ones(400, "float32"), public_inputs=x)
    assert len(str(caught.value).splitlines()) <= 2
    assert model.privacy_ledger.num_releases == 0


@pytest.mark.parametrize(
    "likelihood",
    [
        lambda params, x: tfd.Normal(params["before"] * tf.nn.relu(x - params["place"]), 1.0),
        lambda params, x: tfd.Poisson(
            params["before"] * tf.sigmoid(params["place"] - x) + params["after"]
        ),
        # At rates of e^30 the last digit of a density is worth nats.
        lambda params, x: tfd.Poisson(log_rate=0.3 * params["place"] + 0.01 * x * params["after"]),
        # At the prior's middle a square has no slope.
        lambda params, x: tfd.Normal(0.0 * x + (params["place"] - 50.0) ** 2, 100.0),
    ],
)
def test_kinks_and_steep_slopes_are_no_jumps(likelihood):
    x = np.linspace(0.0, 100.0, 400).astype("float32")
    records = make_records(x, np.ones(400, "float32"), None, dtype="float32", validate=True)
    pairing = Pairing(
        BayesianModel(tfd.JointDistributionNamed(JUMP), likelihood), records, log_scales=True
    )
    pairing.may_jump = True
    assert not parameters_that_jump(Scoring(pairing, x))


def test_with_an_optimizer_it_is_warned_of_by_name(caplog):
    x = np.linspace(0.0, 100.0, 50).astype("float32")
    model = dpvi.DPVI(tfd.JointDistributionNamed(JUMP), jump)
    model.compile("sgd", l2_norm_clip=1.0, noise_multiplier=1.0)
    with caplog.at_level(logging.WARNING, "tfp_dpvi"):
        model.fit(x, np.ones(50, "float32"), epochs=1, verbose=0)
    assert "no gradient reaches place" in caplog.text


def test_hyperparameters_that_the_likelihood_does_not_read_are_no_fault():
    prior = tfd.JointDistributionNamed(
        {"mu": tfd.Normal(0.0, 1.0), "u": lambda mu: tfd.Sample(tfd.Normal(mu, 1.0), 2)}
    )
    model = dpvi.DPVI(prior, lambda p, x: tfd.Normal(tf.linalg.matvec(x, p["u"]), 1.0))
    model.compile(epsilon=1.0, delta=1e-5)
    data = model.make_data(np.ones([8, 2], "float32"), np.ones(8, "float32"), batch_size=8)
    model.mechanism(data)


@pytest.mark.slow
def test_a_prior_without_moments_starts_near_its_median():
    """With the mean and standard deviation of Cauchy draws steps started hundreds away."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=2000).astype("float32")
    y = (rng.random(2000) < 1.0 / (1.0 + np.exp(-0.5 - x))).astype("int32")
    prior = tfd.JointDistributionNamed({"b": tfd.Cauchy(0.0, 10.0), "w": tfd.Cauchy(0.0, 2.5)})
    model = scored(prior, lambda p, x: tfd.Bernoulli(logits=p["b"] + p["w"] * x), x, y)
    summary = model.posterior_summary()
    assert summary.checks.warnings == []
    # 6 standard deviations of the mean: a false alarm in 10^8.
    away = np.abs(summary.columns["mean"] - [0.5, 1.0])
    assert (away < 6.0 * summary.columns["sd"]).all()
    assert (summary.columns["sd"] < 0.2).all()


def test_a_prior_whose_draws_are_not_finite_is_refused_by_name():
    prior = tfd.JointDistributionNamed({"m": tfd.Normal(0.0, 1.0), "s": tfd.Gamma(0.001, 0.001)})
    model = dpvi.DPVI(prior, lambda p, x: tfd.Normal(p["m"] * x, p["s"]))
    model.compile(epsilon=1.0, delta=1e-5)
    with pytest.raises(ValueError, match="draws of s are alike or not finite"):
        model.fit(np.ones(40, "float32"), np.ones(40, "float32"))
    assert model.privacy_ledger.num_releases == 0


def test_whole_records_of_integers_need_no_public_inputs():
    model = dpvi.DPVI(tfd.Normal(0.0, 1.0), lambda rate: tfd.Poisson(log_rate=rate))
    model.compile(epsilon=1.0, delta=1e-5)
    model.mechanism(model.make_data(np.arange(8), batch_size=8))


def test_a_fit_after_one_that_diverged_starts_anew():
    model = dpvi.DPVI(tfd.Normal(0.0, 1.0), lambda w, x: tfd.Normal(w * x, 1.0))
    model.compile(epsilon=1.0, delta=1e-5)
    x = np.ones(40, "float32")
    model.mechanism(model.make_data(x, x, batch_size=40))
    (theta,) = model.learned_variables()
    theta.assign([math.nan])
    model.before_fit(160)
    assert np.isfinite(theta.numpy()).all()


def test_a_bound_is_no_density():
    def likelihood(params, x):
        return dpvi.local.Variational(
            tfd.Normal(tf.zeros_like(x), 1.0), lambda z: tfd.Poisson(log_rate=params * x + z)
        )

    model = dpvi.DPVI(tfd.Normal(0.0, 1.0), likelihood)
    model.compile(epsilon=1.0, delta=1e-5)
    with pytest.raises(ValueError, match="Variational is a bound"):
        model.fit(np.ones(40, "float32"), np.ones(40, "float32"))
    assert model.privacy_ledger.num_releases == 0


@pytest.mark.parametrize("value", [0.0, 1e25])
def test_public_inputs_without_information_are_refused_before_anything_is_spent(value):
    model = dpvi.DPVI(tfd.Normal(0.0, 1.0), lambda w, x: tfd.Normal(w * x, 1.0))
    model.compile(epsilon=1.0, delta=1e-5)
    x = np.ones(40, "float32")
    with pytest.raises(ValueError, match="public_inputs"):
        model.fit(x, x, public_inputs=np.full(50, value, "float32"))
    assert model.privacy_ledger.num_releases == 0


def test_validation_during_a_fit_would_show_a_model_that_has_not_learned():
    model = dpvi.DPVI(tfd.Normal(0.0, 1.0), lambda w, x: tfd.Normal(w * x, 1.0))
    model.compile(epsilon=1.0, delta=1e-5)
    x = np.ones(40, "float32")
    with pytest.raises(ValueError, match="validation_data"):
        model.fit(x, x, validation_data=(x, x), validation_is_public=True)
    assert model.privacy_ledger.num_releases == 0


def test_a_backup_that_would_lose_the_coordinates_is_refused(tmp_path):
    model = dpvi.DPVI(tfd.Normal(0.0, 1.0), lambda w, x: tfd.Normal(w * x, 1.0))
    model.compile(epsilon=1.0, delta=1e-5)
    backup = dpvi.callbacks.PrivateBackupAndRestore(tmp_path)
    with pytest.raises(ValueError, match="PrivateBackupAndRestore"):
        model.fit(np.ones(40, "float32"), np.ones(40, "float32"), callbacks=[backup])
    assert model.privacy_ledger.num_releases == 0


@pytest.fixture(scope="module")
def counts():
    """Fits of a Poisson regression: one trace for all data sets."""
    x = np.zeros(2000, "float32")
    prior = tfd.JointDistributionNamed({"b": tfd.Normal(0.0, 1.0), "w": tfd.Normal(0.0, 1.0)})
    inputs = np.random.default_rng(1).normal(size=300).astype("float32")
    return Fits(
        prior,
        lambda p, x: tfd.Poisson(log_rate=p["b"] + p["w"] * x),
        x,
        x,
        inputs,
        epsilon=3.0,
    )


@pytest.mark.parametrize("size", [1.0, math.inf])
def test_counts_that_vary_too_much_are_warned_of_and_others_are_not(counts, size):
    """One fit each: 4.5 standard deviations of the noise, so a false alarm in 1 of 10^5."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=2000).astype("float32")
    means = np.exp(0.7 + 0.4 * x)
    rates = means if math.isinf(size) else rng.gamma(size, means / size)
    y = rng.poisson(rates).astype("float32")
    checks = counts.posterior(counts.run(x, y, seed=1)).checks
    said = [sentence for sentence in checks.warnings if "scores vary" in sentence]
    assert len(said) == (0 if math.isinf(size) else 1)
    if said:
        assert "NegativeBinomial" in said[0]
        assert checks.lack_of_fit > 0.2


@pytest.mark.parametrize("unit", [1.0, 1000.0])
def test_records_whose_scores_overflow_are_warned_of_and_others_are_not(counts, unit):
    """They count for nothing, so that the posterior is noise, and was narrower than its prior."""
    rng = np.random.default_rng(4)
    x = rng.normal(size=2000).astype("float32")
    y = rng.poisson(np.exp(0.7 + 0.4 * x)).astype("float32")
    given = x if unit == 1.0 else unit * (x + 2.6)
    checks = counts.posterior(counts.run(given, y, seed=2)).checks
    said = [sentence for sentence in checks.warnings if "hardly any record counts" in sentence]
    assert len(said) == (0 if unit == 1.0 else 1)
    # The noise's standard deviation is a hundredth.
    assert checks.seen == pytest.approx(1.0 if unit == 1.0 else 0.0, abs=0.1)


@pytest.mark.slow
def test_the_components_of_a_mixture_start_apart_and_are_found():
    """At the prior's mean both components are alike: a saddle, which no step would leave."""
    rng = np.random.default_rng(3)
    y = np.where(rng.random(1000) < 0.6, rng.normal(-2.7, 1.0, 1000), rng.normal(2.9, 1.0, 1000))
    prior = tfd.JointDistributionNamed(
        {
            "mu": tfd.Sample(tfd.Normal(0.0, 2.0), 2),
            "sigma": tfd.LogNormal(0.0, 0.5),
            "share": tfd.Beta(5.0, 5.0),
        }
    )

    def likelihood(p):
        shares = tf.stack([p["share"], 1.0 - p["share"]], axis=-1)
        return tfd.MixtureSameFamily(tfd.Categorical(probs=shares), tfd.Normal(p["mu"], p["sigma"]))

    model = scored(prior, likelihood, y.astype("float32"), epsilon=1.0)
    summary = model.posterior_summary()
    np.testing.assert_allclose(np.sort(summary.columns["mean"][:2]), [-2.7, 2.9], atol=0.4)
    assert summary.checks.warnings == []


# ---------------------------------------------------------------------- the functions behind


def test_what_would_halve_an_interval_in_closed_form():
    """One parameter, a flat prior nearly: sd^2 = (B + R) / A^2, with A and B in proportion to N."""
    mixture = Mixture(np.zeros((1, 1)), np.ones((1, 1, 1)))
    slope, data, noise = np.array([[10.0]]), np.array([[8.0]]), np.array([[4.0]])

    def log_prior(points):
        return np.zeros(len(points)), np.zeros_like(points)

    ((records, epsilon),) = mixtures.halving_factors(
        slope, data, noise, mixture, np.array([0]), log_prior
    )
    # (8 k + 4) / (10 k)^2 = 12 / 400.
    assert records == pytest.approx((8.0 + math.sqrt(64.0 + 48.0)) / 6.0, rel=2e-3)
    assert math.isinf(epsilon)


def test_the_degrees_follow_the_evidence():
    """A release of rank 2 of 4 speaks for few degrees, and one that is near the prior for many."""

    def released(matrix):
        return Window(
            num_steps=100,
            theta=np.zeros(4),
            path=np.zeros((1, 4)),
            jitter=np.zeros((1, 4)),
            score=np.zeros(4),
            matrix=matrix,
            scale=4.0,
            score_sd=0.1,
            matrix_sd=0.02,
            scale_sd=0.1,
            simulation=1.0,
            half_difference=(np.zeros(4), np.zeros(4)),
            half_variance=4.0,
            most_trace=100.0,
        )

    prior = CurvaturePrior(np.eye(4), (2.0, 8.0, 128.0), 0.5)
    low = NoisyCurvature(released(np.diag([2.0, 2.0, 0.0, 0.0])), prior).evidence
    high = NoisyCurvature(released(np.diag([1.02, 0.97, 1.0, 1.01])), prior).evidence
    assert low[0] > 0.9
    assert high[2] > 0.9


@pytest.mark.parametrize("slope", [0.0, -3.0])
def test_a_fall_is_that_of_a_line_through_the_losses(slope):
    """Normal errors: 4 standard errors, a false alarm in 16,000."""
    rng = np.random.default_rng(0)
    losses = 100.0 + slope * np.linspace(0.0, 1.0, 40) + 0.1 * rng.normal(size=40)
    fell, error = fall(losses)
    assert abs(fell + slope) < 4.0 * error
    assert error < 0.1


def line_of_one(params, x):
    return tfd.Normal(params * x, 1.0)


@pytest.mark.parametrize("call", [3, 12])
def test_parameters_that_overflow_on_the_way_are_gone_back_from(monkeypatch, call):
    """Such a fit ended in "the fit was too short", with its privacy spent."""
    honest, calls = Scoring._follow_public_inputs, []

    def overflowing(self):
        calls.append(self)
        if len(calls) == call:
            self.theta.assign(np.full_like(self.theta.numpy(), np.nan))
        honest(self)

    monkeypatch.setattr(Scoring, "_follow_public_inputs", overflowing)
    generator = np.random.default_rng(0)
    x = generator.normal(size=500).astype("float32")
    y = (0.5 * x + generator.normal(size=500)).astype("float32")
    model = scored(tfd.Normal(0.0, 1.0), line_of_one, x, y, epsilon=8.0, public_inputs=x)
    assert len(calls) > call
    draws = model.posterior_sample(500, seed=0).numpy()
    assert abs(draws.mean() - 0.5) < 0.3
    assert not model.posterior_summary().checks.warnings


def test_without_a_posterior_there_is_the_prior_and_a_warning(monkeypatch, caplog):
    """It was the untrained surrogate, of standard deviation 0.1, as if something had been learned."""

    def failing(*arguments):
        raise np.linalg.LinAlgError("singular")

    monkeypatch.setattr("tfp_dpvi.calibrated.centred_fit.centred_posterior", failing)
    x = np.random.default_rng(0).normal(size=200).astype("float32")
    with caplog.at_level(logging.WARNING, logger="tfp_dpvi"):
        model = scored(tfd.Normal(0.0, 7.0), line_of_one, x, x, batch_size=200, steps_per_epoch=60)
    assert "`posterior` is the prior" in caplog.text
    assert 6.0 < model.posterior_sample(2000, seed=0).numpy().std() < 8.0


def test_records_of_a_joint_distribution_need_no_settings():
    """Their shapes are a structure: such a model of whole records ended in an AttributeError."""

    def both(params):
        return tfd.JointDistributionNamed(
            {
                "first": tfd.Bernoulli(probs=params["first"], dtype=tf.float32),
                "second": lambda first: tfd.Normal(params["slope"] * first, 1.0),
            }
        )

    prior = {"first": tfd.Beta(2.0, 2.0), "slope": tfd.Normal(0.0, 1.0)}
    generator = np.random.default_rng(0)
    first = (generator.random(600) < 0.3).astype("float32")
    x = {"first": first, "second": (first + generator.normal(size=600)).astype("float32")}
    model = scored(tfd.JointDistributionNamed(prior), both, x, batch_size=600, steps_per_epoch=60)
    draws = model.posterior_sample(500, seed=0)
    assert abs(np.mean(draws["first"]) - 0.3) < 0.1
    assert abs(np.mean(draws["slope"]) - 1.0) < 0.5


def test_outcomes_with_a_mask_need_no_settings():
    """The mask of `tfd.Masked` is a parameter of dtype bool, of which a gradient was taken."""

    def masked(params, x):
        outcome = tfd.Normal(params * tf.ones_like(x), 1.0)
        return tfd.Independent(tfd.Masked(outcome, x > 0.0), reinterpreted_batch_ndims=1)

    generator = np.random.default_rng(0)
    x = generator.normal(size=(500, 2)).astype("float32")
    y = np.where(x > 0.0, 1.0 + generator.normal(size=x.shape), 99.0).astype("float32")
    model = scored(tfd.Normal(0.0, 2.0), masked, x, y, batch_size=500, steps_per_epoch=60)
    draws = model.posterior_sample(500, seed=0).numpy()
    assert abs(draws.mean() - 1.0) < 0.3


def test_where_there_is_no_information_the_next_fit_starts_anew():
    """It was refused for the public inputs, and the prior's mean, which were fine."""
    model = dpvi.DPVI(tfd.Normal(0.0, 1.0), lambda slope, x: tfd.Bernoulli(logits=slope * x))
    model.compile(epsilon=1.0, delta=1e-5)
    x = np.random.default_rng(0).normal(size=200).astype("float32")
    model.make_data(x, (x > 0.0).astype("float32"), batch_size=200)
    scoring = model._model.centred.scoring
    scoring.theta.assign([1e9])
    model._model.centred.begin()
    np.testing.assert_allclose(scoring.theta.numpy(), scoring.prior.mean, atol=1e-6)
