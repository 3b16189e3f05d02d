"""The posterior predictive distribution against a loop over draws in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp
from support.internals import PosteriorPredictive

import tfp_dpvi as dpvi

tfd = tfp.distributions

NUM_DRAWS = 7
GENERATOR = np.random.default_rng(0)
X = GENERATOR.normal(size=(5, 3)).astype("float32")
W = GENERATOR.normal(size=(NUM_DRAWS, 3)).astype("float32")
SCALE = np.linspace(0.5, 2.0, NUM_DRAWS).astype("float32")


def logistic(z):
    return 1 / (1 + np.exp(-z))


def normal_predictive():
    return PosteriorPredictive(
        lambda p: tfd.Normal(tf.linalg.matvec(X, p["w"]), p["scale"]),
        {"w": tf.constant(W), "scale": tf.constant(SCALE)},
        NUM_DRAWS,
    )


def log_mean_exp(logs):
    top = logs.max(axis=0)
    return top + np.log(np.mean(np.exp(logs - top), axis=0))


# ---------------------------------------------------------------------- against a loop


def test_mean_variance_and_log_prob_are_those_of_the_mixture():
    predictive = normal_predictive()
    means = np.array([X @ W[s] for s in range(NUM_DRAWS)], "float64")
    y = GENERATOR.normal(size=5).astype("float32")
    logs = np.array(
        [
            -0.5 * ((y - means[s]) / SCALE[s]) ** 2 - np.log(SCALE[s]) - 0.5 * np.log(2 * np.pi)
            for s in range(NUM_DRAWS)
        ]
    )

    assert predictive.batch_shape == [5]
    assert predictive.event_shape == []
    assert predictive.num_draws == NUM_DRAWS
    np.testing.assert_allclose(predictive.mean(), means.mean(axis=0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(predictive.log_prob(y), log_mean_exp(logs), rtol=1e-5)
    np.testing.assert_allclose(predictive.prob(y), np.exp(log_mean_exp(logs)), rtol=1e-5)
    np.testing.assert_allclose(
        predictive.variance(), np.mean(SCALE.astype("float64") ** 2) + means.var(axis=0), rtol=1e-5
    )
    np.testing.assert_allclose(predictive.stddev(), np.sqrt(predictive.variance()), rtol=1e-6)


def test_improbable_values_keep_a_finite_log_density():
    logs = normal_predictive().log_prob(np.full(5, 1e3, "float32")).numpy()
    assert np.isfinite(logs).all()
    assert (logs < -1e4).all()


def test_bernoulli_labels_average_probabilities_and_not_logits():
    predictive = PosteriorPredictive(
        lambda w: tfd.Bernoulli(logits=tf.linalg.matvec(X, 5.0 * w)), tf.constant(W), NUM_DRAWS
    )
    probabilities = logistic(5.0 * X @ W.T).mean(axis=1)

    np.testing.assert_allclose(predictive.mean(), probabilities, rtol=1e-5)
    assert (
        np.abs(probabilities - logistic(5.0 * X @ W.mean(axis=0))).max() > 0.03
    )  # The two differ here.
    labels = np.array([0, 1, 0, 1, 1])
    np.testing.assert_allclose(
        predictive.log_prob(labels),
        np.log(np.where(labels == 1, probabilities, 1 - probabilities)),
        rtol=1e-4,
    )


def test_categorical_means_are_class_probabilities():
    logits = GENERATOR.normal(size=(NUM_DRAWS, 5, 4)).astype("float32")
    predictive = PosteriorPredictive(
        lambda one: tfd.Categorical(logits=one), tf.constant(logits), NUM_DRAWS
    )
    probabilities = np.mean(np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True), axis=0)

    np.testing.assert_allclose(predictive.mean(), probabilities, rtol=1e-5)
    labels = np.array([0, 3, 1, 2, 2])
    np.testing.assert_allclose(
        predictive.log_prob(labels), np.log(probabilities[np.arange(5), labels]), rtol=1e-5
    )


def test_several_outputs_keep_their_event_shape_and_dtype():
    locs = GENERATOR.normal(size=(NUM_DRAWS, 2))
    predictive = PosteriorPredictive(
        lambda loc: tfd.MultivariateNormalDiag(loc * np.ones((5, 2)), np.ones(2)),
        tf.constant(locs),
        NUM_DRAWS,
    )
    assert predictive.dtype == tf.float64
    assert (predictive.batch_shape, predictive.event_shape) == ([5], [2])
    np.testing.assert_allclose(predictive.mean(), np.tile(locs.mean(axis=0), (5, 1)), rtol=1e-12)
    np.testing.assert_allclose(
        predictive.variance(), np.tile(1 + locs.var(axis=0), (5, 1)), rtol=1e-12
    )
    assert predictive.log_prob(np.zeros((5, 2))).shape == [5]


def test_samples_have_the_mixtures_moments_and_are_coherent_across_records():
    """False-alarm rate below 1e-9: 4,000 samples; the bounds are 7 standard errors."""
    num = 4000
    predictive = normal_predictive()
    samples = tf.function(
        lambda: predictive.sample(num, seed=(1, 2))
    )().numpy()  # Eager, it loops in Python.

    assert samples.shape == (num, 5)
    means = np.array([X @ W[s] for s in range(NUM_DRAWS)], "float64")
    variance = np.mean(SCALE**2) + means.var(axis=0)
    np.testing.assert_array_less(
        np.abs(samples.mean(axis=0) - means.mean(axis=0)), 7 * np.sqrt(variance / num)
    )
    # Records share the posterior draw of a sample: their covariance is that of the draws' means, far from 0 for some
    # pair. A sample covariance has a standard error of at most 2 v_i v_j / sqrt(num) here (kurtosis below 4 each).
    expected = np.cov(means.T, bias=True)
    error = np.abs(np.cov(samples.T, bias=True) - expected - np.diag(np.full(5, np.mean(SCALE**2))))
    deviations = np.sqrt(np.outer(variance, variance))
    assert (error < 7 * 2 * deviations / np.sqrt(num)).all()
    off = np.abs(expected[~np.eye(5, dtype=bool)])
    assert off.max() > 2 * (7 * 2 * deviations / np.sqrt(num)).min()


def test_samples_repeat_with_a_seed_and_differ_without():
    predictive = normal_predictive()
    np.testing.assert_array_equal(
        predictive.sample(3, seed=(1, 2)), predictive.sample(3, seed=(1, 2))
    )
    first, other = (predictive.sample(3, seed=seed).numpy() for seed in ((1, 2), (1, 3)))
    assert np.abs(first - other).min() > 0
    assert predictive.sample(seed=(1, 2)).shape == [5]
    assert predictive.sample([2, 3], seed=(1, 2)).shape == [2, 3, 5]


# ---------------------------------------------------------------------- from a model


@pytest.fixture(scope="module")
def regression():
    prior = tfd.JointDistributionNamed(
        {"w": tfd.Sample(tfd.Normal(0.0, 2.0), 3), "b": tfd.Normal(0.0, 1.0)}
    )

    def likelihood(params, x):
        return tfd.Bernoulli(logits=tf.linalg.matvec(x, params["w"]) + params["b"])

    surrogate = dpvi.surrogates.mean_field(prior, initial_loc="prior", initial_scale=0.8, seed=3)
    return dpvi.DPVI(prior, likelihood, surrogate, num_predictive_draws=30, clipping="flat")


@pytest.fixture(scope="module")
def generative():
    prior = tfd.JointDistributionNamed(
        {"loc": tfd.Sample(tfd.Normal(0.0, 1.0), 2), "scale": tfd.LogNormal(0.0, 1.0)}
    )

    def likelihood(params):
        return tfd.MultivariateNormalDiag(params["loc"], params["scale"] * tf.ones(2))

    return dpvi.DPVI(prior, likelihood, num_predictive_draws=20, clipping="flat")


def test_predict_and_predictive_use_the_same_draws(regression):
    draws = {name: value.numpy() for name, value in regression.posterior_sample(30, seed=0).items()}
    expected = np.mean(
        [logistic(X @ w + b) for w, b in zip(draws["w"], draws["b"], strict=True)], axis=0
    )

    np.testing.assert_allclose(regression.predict(X), expected, rtol=1e-5)
    np.testing.assert_allclose(regression.predictive(X).mean(), expected, rtol=1e-5)
    np.testing.assert_allclose(regression.predict(X, batch_size=2), expected, rtol=1e-5)
    np.testing.assert_allclose(regression(X), expected, rtol=1e-5)
    labels = np.array([1, 0, 1, 1, 0])
    np.testing.assert_allclose(
        regression.predictive(X).log_prob(labels),
        np.log(np.where(labels == 1, expected, 1 - expected)),
        rtol=1e-4,
    )


def test_draws_and_seed_can_be_chosen(regression):
    assert regression.predictive(X).num_draws == 30
    few = regression.predictive(X, num_draws=4, seed=9)
    draws = {name: value.numpy() for name, value in regression.posterior_sample(4, seed=9).items()}
    expected = np.mean(
        [logistic(X @ w + b) for w, b in zip(draws["w"], draws["b"], strict=True)], axis=0
    )
    assert few.num_draws == 4
    np.testing.assert_allclose(few.mean(), expected, rtol=1e-5)
    first, second = (regression.predictive(X, seed=None).mean().numpy() for _ in range(2))
    assert np.abs(first - second).max() > 0


def test_a_model_of_whole_records_scores_and_samples_them(generative):
    records = GENERATOR.normal(size=(6, 2)).astype("float32")
    draws = {
        name: value.numpy().astype("float64")
        for name, value in generative.posterior_sample(20, seed=0).items()
    }
    logs = np.array(
        [
            -0.5 * np.sum(((records - loc) / scale) ** 2, axis=1)
            - 2 * np.log(scale)
            - np.log(2 * np.pi)
            for loc, scale in zip(draws["loc"], draws["scale"], strict=True)
        ]
    )
    predictive = generative.predictive()

    assert (predictive.batch_shape, predictive.event_shape) == ([], [2])
    np.testing.assert_allclose(predictive.log_prob(records), log_mean_exp(logs), rtol=1e-4)
    np.testing.assert_allclose(predictive.mean(), draws["loc"].mean(axis=0), rtol=1e-4, atol=1e-6)
    assert predictive.sample(11, seed=(1, 2)).shape == [11, 2]


def test_dicts_of_columns_and_other_dtypes_are_taken():
    prior = tfd.Sample(tfd.Normal(np.float64(0.0), 1.0), sample_shape=[3, 2])

    def likelihood(w, x):
        return tfd.Poisson(
            log_rate=tf.reduce_sum(tf.gather(w, x["group"]) * x["features"], axis=-1)
        )

    model = dpvi.DPVI(prior, likelihood, num_predictive_draws=10, clipping="flat")
    x = {"features": np.ones((4, 2), "float32"), "group": np.array([0, 1, 2, 0], "int64")}
    draws = model.posterior_sample(10, seed=0).numpy()
    expected = np.mean([np.exp(w.sum(axis=1))[x["group"]] for w in draws], axis=0)
    assert model.predict(x).dtype == np.float64
    np.testing.assert_allclose(model.predict(x), expected, rtol=1e-10)
    np.testing.assert_allclose(model.predictive(x).mean(), expected, rtol=1e-10)


# ---------------------------------------------------------------------- errors


def test_x_is_needed_where_y_is_predicted(regression):
    with pytest.raises(ValueError, match=r"x is missing.*predictive\(x\)"):
        regression.predictive()


def test_x_is_refused_where_whole_records_are_generated(generative):
    with pytest.raises(ValueError, match="generates whole records"):
        generative.predictive(X)
    with pytest.raises(ValueError, match=r"generates whole records.*predictive\(\)"):
        generative.predict(X)


def test_a_likelihood_that_returns_no_distribution_is_refused():
    model = dpvi.DPVI(tfd.Normal(0.0, 1.0), lambda loc, x: x[:, 0] * loc, clipping="flat")
    with pytest.raises(TypeError, match=r"likelihood returned .*must return a TFP distribution"):
        model.predictive(X)


def test_a_likelihood_without_a_variance_says_so():
    predictive = PosteriorPredictive(
        lambda one: tfd.Categorical(logits=one), tf.zeros([NUM_DRAWS, 5, 4]), NUM_DRAWS
    )
    with pytest.raises(NotImplementedError, match="categorical"):
        predictive.variance()


# ---------------------------------------------------------------------- quantiles, modes, intervals

CASES = {
    "normal": (lambda s: tfd.Normal(X @ W[s], SCALE[s]), tf.float32),
    "lognormal": (lambda s: tfd.LogNormal(X @ W[s], SCALE[s]), tf.float32),
    "beta": (lambda s: tfd.Beta(np.exp(X @ W[s]), SCALE[s]), tf.float32),
    "poisson": (lambda s: tfd.Poisson(log_rate=X @ W[s]), tf.float32),
    "bernoulli": (lambda s: tfd.Bernoulli(logits=X @ W[s]), tf.int32),
    "ordinal": (lambda s: tfd.OrderedLogistic(np.float32([-1.0, 0.5, 2.0]), X @ W[s]), tf.int32),
}


def predictive_of(kind):
    """A predictive distribution, and its components."""
    one, _ = CASES[kind]
    tables = {"w": tf.constant(W), "scale": tf.constant(SCALE)}

    def likelihood(p):
        loc = tf.linalg.matvec(X, p["w"])
        return {
            "normal": lambda: tfd.Normal(loc, p["scale"]),
            "lognormal": lambda: tfd.LogNormal(loc, p["scale"]),
            "beta": lambda: tfd.Beta(tf.exp(loc), p["scale"]),
            "poisson": lambda: tfd.Poisson(log_rate=loc),
            "bernoulli": lambda: tfd.Bernoulli(logits=loc),
            "ordinal": lambda: tfd.OrderedLogistic(tf.constant([-1.0, 0.5, 2.0]), loc),
        }[kind]()

    return PosteriorPredictive(likelihood, tables, NUM_DRAWS), [one(s) for s in range(NUM_DRAWS)]


@pytest.mark.parametrize("kind", CASES)
def test_quantiles_invert_the_mixtures_distribution_function(kind):
    predictive, parts = predictive_of(kind)
    levels = np.float32([[0.1], [0.5], [0.9]])
    quantiles = predictive.quantile(levels)
    assert quantiles.dtype == predictive.dtype
    for found, p in zip(quantiles, levels, strict=True):
        reached = np.mean([part.cdf(found) for part in parts], axis=0)
        if kind in ("normal", "lognormal", "beta"):
            np.testing.assert_allclose(reached, np.full(5, p), atol=2e-5)
        else:
            before = np.mean([part.cdf(found - 1) for part in parts], axis=0)
            assert (reached >= p - 1e-6).all()
            assert (before < p + 1e-6).all()
    if kind == "normal":
        np.testing.assert_array_equal(predictive.interval(0.8), tf.gather(quantiles, [0, 2]))


class UnknownBelow(tfd.Normal):
    """Its distribution function is NaN below its support, which starts at 1."""

    def _cdf(self, value):
        return tf.where(value < 1.0, np.nan, super()._cdf(value))


def test_quantiles_are_found_where_a_distribution_function_is_unknown_below_them():
    mixture = PosteriorPredictive(lambda loc: UnknownBelow(loc, 1.0), tf.constant([3.0]), 1)
    assert float(mixture.quantile(0.5)) == pytest.approx(3.0, rel=1e-5)


def test_outcomes_that_are_independent_have_quantiles_each():
    several = PosteriorPredictive(
        lambda w: tfd.Independent(
            tfd.Normal(tf.stack([tf.linalg.matvec(X, w)] * 2, axis=1), 1.0), 1
        ),
        tf.constant(W),
        NUM_DRAWS,
    )
    assert several.quantile(0.5).shape == [5, 2]


def test_modes():
    """Of classes against the class probabilities; of a mixture of normals against a fine grid."""
    predictive, _ = predictive_of("ordinal")
    probabilities = predictive.mean().numpy()
    assert probabilities.shape == (5, 4)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1.0, rtol=1e-5)
    np.testing.assert_array_equal(predictive.mode(), probabilities.argmax(axis=1))
    normal, _ = predictive_of("normal")
    grid = np.linspace(-6, 6, 2001, dtype="float32")[:, None]
    best = normal.prob(grid + np.zeros(5, "float32")).numpy().max(axis=0)
    assert (normal.prob(normal.mode()).numpy() > 0.97 * best).all()


def test_an_interval_of_a_likelihood_without_a_distribution_function_says_so():
    predictive = PosteriorPredictive(
        lambda w: tfd.MultivariateNormalDiag(w, [1.0, 1.0, 1.0]), tf.constant(W), NUM_DRAWS
    )
    with pytest.raises(NotImplementedError, match=r"sample\(num\)"):
        predictive.interval()
    counts = PosteriorPredictive(
        lambda w: tfd.BetaBinomial(9.0, tf.exp(w), 1.0), tf.constant(W), NUM_DRAWS
    )
    with pytest.raises(
        NotImplementedError,
        match=r"BetaBinomial has no cdf: take quantiles and shares of sample\(1000\)",
    ):
        counts.interval()
    with pytest.raises(ValueError, match="level"):
        normal_predictive().interval(90)
