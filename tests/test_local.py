"""Latents of one record: summed out by quadrature and enumeration, or fitted inside the record's loss; against SciPy."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp
from scipy import integrate, special, stats
from support.siblings import slow
from support.toy import adam

import tfp_dpvi as dpvi

tfd = tfp.distributions
RNG = np.random.default_rng(0)
A, B = np.array([1.0, 0.5, 2.0, 1.5]), np.array([0.0, -1.0, 1.0, 0.5])
ANSWERS = RNG.integers(0, 2, (6, 4))


def answers(a=A, b=B):
    return dpvi.local.quadrature(
        lambda z: tfd.Independent(tfd.Bernoulli(logits=a * (z[:, None] - b)), 1), dtype="float64"
    )


def test_quadrature_is_the_integral():
    def integrand(z, y):
        p = 1 / (1 + np.exp(-A * (z - B)))
        return np.prod(np.where(y == 1, p, 1 - p)) * stats.norm.pdf(z)

    expected = [
        np.log(integrate.quad(integrand, -9, 9, args=(y,), epsabs=1e-12)[0]) for y in ANSWERS
    ]
    np.testing.assert_allclose(answers().log_prob(ANSWERS), expected, rtol=5e-5)
    assert answers().event_shape == [4]


def test_quadrature_in_two_dimensions_with_inputs_is_factor_analysis():
    w = RNG.normal(size=(3, 2))
    x = RNG.normal(size=(5, 1))
    y = RNG.normal(size=(5, 3))
    marginal = dpvi.local.quadrature(
        lambda z: tfd.MultivariateNormalDiag(x[:, None] + z @ w.T, np.full(3, 2.0)),
        dimension=2,
        dtype="float64",
    )
    cov = w @ w.T + 4 * np.eye(3)
    expected = [
        stats.multivariate_normal(np.full(3, one[0]), cov).logpdf(row)
        for one, row in zip(x, y, strict=True)
    ]
    assert marginal.batch_shape == [5]
    np.testing.assert_allclose(marginal.log_prob(y), expected, rtol=1e-7)
    np.testing.assert_allclose(marginal.mean(), np.tile(x, 3), atol=1e-10)
    np.testing.assert_allclose(marginal.covariance(), np.tile(cov, [5, 1, 1]), atol=1e-10)


def test_enumeration_sums_over_every_combination_of_latents():
    rain, wet = 0.3, np.array([[0.1, 0.6], [0.8, 0.99]])
    x = tf.constant(
        [0.2, 0.5, 0.7], tf.float64
    )  # The probability of the sprinkler, for each record.
    marginal = dpvi.local.enumeration(
        [tfd.Bernoulli(probs=tf.constant(rain, tf.float64)), tfd.Bernoulli(probs=x)],
        lambda first, second: tfd.Bernoulli(
            probs=tf.gather_nd(wet, tf.stack([first, second], axis=1))
        ),
    )
    by_hand = [
        sum(
            (rain if r else 1 - rain) * (s if k else 1 - s) * wet[r, k] for r in (0, 1) for k in (0, 1)
        )
        for s in x.numpy()
    ]  # fmt: skip
    assert marginal.batch_shape == [3]
    np.testing.assert_allclose(
        marginal.prob([1, 1, 0]), [by_hand[0], by_hand[1], 1 - by_hand[2]], rtol=1e-6
    )


def poisson(tau, rate):
    return dpvi.local.Variational(
        tfd.Normal(np.float64(0.0), tau),
        lambda z: tfd.Poisson(log_rate=tf.constant(rate) + z),
        num_steps=12,
    )


def test_the_local_bound_is_the_optimum_over_normal_factors():
    """Against the optimum over (m, log s) with the expectation by 40 points."""
    from scipy.optimize import minimize

    points, weights = np.polynomial.hermite_e.hermegauss(40)
    weights = weights / weights.sum()
    tau, rate, y = 0.7, np.array([0.5, 2.0, -1.0]), np.array([3.0, 20.0, 0.0])

    def bound(parameters, r, k):
        m, log_s = parameters
        z = m + np.exp(log_s) * points
        joint = stats.poisson.logpmf(k, np.exp(r + z)) + stats.norm.logpdf(z, 0, tau)
        return weights @ joint + log_s + 0.5 * np.log(2 * np.pi * np.e)

    best = [
        -minimize(lambda v, r, k: -bound(v, r, k), [0.0, -1.0], args=pair).fun
        for pair in zip(rate, y, strict=True)
    ]
    exact = [
        np.log(
            integrate.quad(
                lambda z, r, k: stats.poisson.pmf(k, np.exp(r + z)) * stats.norm.pdf(z, 0, tau),
                -6,
                6,
                pair,
            )[0]
        )
        for pair in zip(rate, y, strict=True)
    ]
    ours = poisson(tau, rate).log_prob(y).numpy()
    np.testing.assert_allclose(ours, best, atol=2e-2)
    assert (ours < np.array(exact) + 1e-2).all()


def test_where_the_record_is_normal_the_bound_is_exact_and_so_is_its_gradient():
    w = tf.Variable(RNG.normal(size=(3, 1)))
    y = RNG.normal(size=(5, 3))

    def local(w):
        return dpvi.local.Variational(
            tfd.MultivariateNormalDiag(np.zeros(1), np.ones(1)),
            lambda z: tfd.MultivariateNormalDiag(tf.linalg.matvec(w, z), np.full(3, 0.5)),
            num_steps=30,
        )

    def exact(w):
        return tfd.MultivariateNormalTriL(
            np.zeros(3), tf.linalg.cholesky(w @ tf.transpose(w) + 0.25 * np.eye(3))
        )

    results = []
    for make in (local, exact):
        with tf.GradientTape() as tape:
            value = make(w).log_prob(y)
            total = tf.reduce_sum(value)
        results.append((value.numpy(), tape.gradient(total, w).numpy()))
    np.testing.assert_allclose(results[0][0], results[1][0], rtol=1e-8)
    np.testing.assert_allclose(results[0][1], results[1][1], rtol=1e-7)


def test_samples_are_of_the_model():
    """False-alarm rate below 1e-9: bounds of 7 standard errors, variances from the samples' fourth moments."""
    num, tau = 40_000, 0.7
    draws = poisson(tau, np.array([0.5, 2.0])).sample(num, seed=(1, 2)).numpy()
    mean = np.exp(np.array([0.5, 2.0]) + tau**2 / 2)
    variance = mean + mean**2 * (np.exp(tau**2) - 1)
    assert draws.shape == (num, 2)
    assert (np.abs(draws.mean(axis=0) - mean) < 7 * np.sqrt(variance / num)).all()
    np.testing.assert_allclose(poisson(tau, np.array([0.5, 2.0])).mean(), mean, rtol=0.3)


def generative(params):
    return dpvi.local.quadrature(
        lambda z: tfd.Independent(tfd.Bernoulli(logits=z[:, None] - params), 1), num_points=5
    )


@pytest.mark.parametrize("kind", ["quadrature", slow("variational")])
def test_they_are_fitted_with_the_paired_clip(kind):
    model = dpvi.DPVI(
        tfd.Sample(tfd.Normal(0.0, 1.0), 4),
        generative if kind == "quadrature" else lambda w, x: dpvi.local.Variational(
            tfd.Normal(0.0, 0.5), lambda z: tfd.Poisson(log_rate=tf.linalg.matvec(x, w) + z), num_steps=3
        ),
    )  # fmt: skip
    model.compile(adam(2.0), delta=1e-5, jit_compile=False)
    x = ANSWERS if kind == "quadrature" else RNG.normal(size=(6, 4)).astype("float32")
    y = () if kind == "quadrature" else (RNG.poisson(2.0, 6),)
    model.fit(x, *y, batch_size=3, epochs=3, verbose=0)
    assert model.calibration.pairing is not None
    assert np.isfinite(model.posterior_sample(5, seed=0)).all()


def test_a_record_moves_no_other():
    """Each record's bound is what it is alone: with another first record, the rest are bit-equal."""
    rate, y = np.array([0.5, 2.0, -1.0]), np.array([3.0, 20.0, 0.0])
    first = poisson(0.7, rate).log_prob(y).numpy()
    other = poisson(0.7, rate * [9.0, 1.0, 1.0]).log_prob(y * [50.0, 1.0, 1.0]).numpy()
    assert first[0] != other[0]
    np.testing.assert_array_equal(first[1:], other[1:])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: dpvi.local.quadrature(lambda z: tfd.Normal(0.0, 1.0)), "last dimension"),
        (lambda: dpvi.local.quadrature(lambda z: tfd.Normal(z, 1.0), dimension=5), "Variational"),
        (lambda: dpvi.local.enumeration(tfd.Poisson(1.0), lambda k: k), "Categorical"),
        (
            lambda: dpvi.local.enumeration(
                [tfd.Categorical(logits=np.zeros(200))] * 2, lambda k: k
            ),
            "combinations",
        ),
        (
            lambda: dpvi.local.Variational(tfd.Sample(tfd.Normal(0.0, 1.0), [2, 2]), lambda z: z),
            "event shape",
        ),
    ],
)
def test_what_does_not_fit_is_refused(make, words):
    with pytest.raises((TypeError, ValueError), match=words):
        make()


# ---------------------------------------------------------------------- latents of a person's rows

MASK = np.array([[True, True, True], [True, False, False], [True, True, False]])


def of_persons(rows):
    return rows.of_units(tf.constant(MASK))


def test_a_shared_normal_intercept_is_a_multivariate_normal():
    """The covariance `scale^2 I + unit_scale^2` among a person's own rows; what is filled up counts for nothing."""
    loc = RNG.normal(size=9)
    value = RNG.normal(size=[3, 3])
    persons = of_persons(dpvi.local.unit_normal(loc, np.float64(0.7), np.float64(1.3)))
    expected = [
        stats.multivariate_normal(
            loc.reshape(3, 3)[i, own], 0.49 * np.eye(own.sum()) + 1.69
        ).logpdf(value[i, own])
        for i, own in enumerate(MASK)
    ]
    np.testing.assert_allclose(persons.log_prob(value), expected, rtol=1e-10)
    other = np.where(MASK, value, 1e3)
    np.testing.assert_array_equal(persons.log_prob(other), persons.log_prob(value))
    drawn = persons.sample(20_000, seed=[0, 1]).numpy()[:, 0] - loc[:3]
    np.testing.assert_allclose(np.cov(drawn.T), 0.49 * np.eye(3) + 1.69, atol=0.12)


def test_a_shared_intercept_by_quadrature_is_the_integral():
    score = RNG.normal(size=9)
    value = RNG.integers(0, 2, (3, 3)).astype(float)
    persons = of_persons(
        dpvi.local.unit_quadrature(
            lambda z: tfd.Bernoulli(logits=score[:, None] + 0.8 * z, dtype=tf.float64),
            dtype="float64",
        )
    )

    def integrand(z, i):
        p = 1 / (1 + np.exp(-(score.reshape(3, 3)[i] + 0.8 * z)))
        own = np.where(value[i] == 1, p, 1 - p)[MASK[i]]
        return np.prod(own) * stats.norm.pdf(z)

    expected = [np.log(integrate.quad(integrand, -9, 9, args=(i,))[0]) for i in range(3)]
    np.testing.assert_allclose(persons.log_prob(value), expected, rtol=1e-6)
    # Twins are drawn from the same density: the share of each outcome of three rows.
    drawn = persons.sample(40_000, seed=[0, 1]).numpy()[:, 0]
    every = np.array([[i >> 2 & 1, i >> 1 & 1, i & 1] for i in range(8)], float)
    shares = np.mean(np.all(drawn[:, None] == every, axis=2), axis=0)
    same = np.repeat(every[:, None], 3, axis=1)
    probabilities = np.exp([persons.log_prob(row)[0] for row in same])
    np.testing.assert_allclose(probabilities.sum(), 1.0, rtol=1e-5)
    np.testing.assert_allclose(shares, probabilities, atol=0.012)


class GeneralBernoulli(tfd.Bernoulli):
    """Rows whose density is TFP's."""


def test_binary_rows_have_the_density_and_the_slope_of_tfp():
    """From one outcome's log density; shares between 0 and 1 too, and logits of nobody's that are NaN."""
    score, scale = tf.Variable(3.0 * RNG.normal(size=9)), tf.Variable(np.float64(1.3))
    value = np.array([[0.0, 1.0, 1.0], [1.0, 5.0, 0.0], [0.3, 0.0, -1.0]])
    found = []
    for kind, nobody in ((tfd.Bernoulli, np.nan), (GeneralBernoulli, 0.0)):
        with tf.GradientTape() as tape:
            logits = tf.where(MASK.ravel(), score, np.float64(nobody))[:, None]
            rows = dpvi.local.unit_quadrature(
                lambda z, kind=kind, logits=logits: kind(logits=logits + scale * z, dtype=z.dtype),
                dtype="float64",
            )
            logs = of_persons(rows).log_prob(value)
        found.append([logs, *tape.gradient(logs, [score, scale])])
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("scale", [1.5, 3.0, 8.0])
def test_a_narrow_likelihood_of_a_person_is_integrated(scale):
    """Many counts: 20 fixed points were off by 6 to 3,900 nats."""
    counts = np.array([[0.0, 1.0, 0.0], [25.0, 30.0, 21.0], [900.0, 950.0, 1.0]])
    mask = np.array([[True] * 3, [True] * 3, [True, True, False]])
    rows = dpvi.local.unit_quadrature(
        lambda z: tfd.Poisson(log_rate=np.ones([9, 1]) + scale * z), dtype="float64"
    )
    z = np.linspace(-8.0, 8.0, 200_001)
    for own, shown, value in zip(counts, mask, rows.of_units(mask).log_prob(counts), strict=True):
        given = stats.poisson.logpmf(own[shown, None], np.exp(1.0 + scale * z)).sum(axis=0)
        whole = special.logsumexp(given + stats.norm.logpdf(z)) + np.log(z[1] - z[0])
        np.testing.assert_allclose(value, whole, atol=1e-2)


@pytest.mark.parametrize("scale", [0.5, 3.0])
def test_a_narrow_or_far_likelihood_of_a_record_is_integrated(scale):
    """Beyond the prior's points a score was off a hundredfold, and a fit went where it pointed."""
    counts = np.array([0.0, 25.0, 1e3, 1e6])[: 3 if scale < 1.0 else 4]
    score = tf.Variable(np.ones(len(counts)))

    def records():
        return dpvi.local.quadrature(
            lambda z: tfd.Poisson(log_rate=score[:, None] + scale * z), dtype="float64"
        )

    with tf.GradientTape() as tape:
        value = records().log_prob(counts)
    slope = tape.gradient(value, score).numpy()
    z = np.linspace(-14.0, 14.0, 4_000_001)
    for number, count in enumerate(counts):
        logs = stats.poisson.logpmf(count, np.exp(1.0 + scale * z)) + stats.norm.logpdf(z)
        whole = special.logsumexp(logs)
        np.testing.assert_allclose(value[number], whole + np.log(z[1] - z[0]), atol=2e-2)
        # Of E(y - rate | y) by parts, which loses no digits.
        exact = np.exp(logs - whole) @ z / scale
        np.testing.assert_allclose(slope[number], exact, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dimension", [None, 2])
def test_one_point_is_the_approximation_of_laplace(dimension):
    """It took a fifth of each standard deviation: off by 1.6 nats in each dimension."""

    def sums(z):
        return tfd.Normal(z if dimension is None else tf.reduce_sum(z, axis=-1), np.float64(0.5))

    value = dpvi.local.quadrature(sums, dimension=dimension, num_points=1, dtype="float64")
    exact = stats.norm(0.0, np.sqrt((dimension or 1) + 0.25)).logpdf(1.0)
    np.testing.assert_allclose(value.log_prob(1.0), exact, rtol=1e-6)


@pytest.mark.parametrize("scale", [0.5, 0.05])
def test_of_two_narrow_peaks_one_counts(scale):
    """From between them the points did not get away: off by 3 to 79 nats, or lost."""
    values = np.array([2.0, 4.0, 9.0])
    value = dpvi.local.quadrature(lambda z: tfd.Normal(z**2, scale), dtype="float64").log_prob(
        values
    )
    z = np.linspace(-8.0, 8.0, 200_001)
    logs = stats.norm.logpdf(values[:, None], z**2, scale) + stats.norm.logpdf(z)
    whole = special.logsumexp(logs, axis=1) + np.log(z[1] - z[0])
    np.testing.assert_allclose(value, whole - np.log(2.0), atol=1e-2)


def test_a_latent_that_is_not_found_makes_a_record_unusable_and_no_wild_score():
    records = dpvi.local.quadrature(lambda z: tfd.Poisson(log_rate=np.ones([2, 1]) + 0.1 * z))
    value = records.log_prob(np.array([3.0, 1e6], np.float32)).numpy()
    assert np.isfinite(value[0])
    assert np.isnan(value[1])


def test_records_are_drawn_from_their_latent():
    """False-alarm rate below 1e-9: 7 standard errors."""
    num, mean = 20_000, np.exp(1.0 + 0.5**2 / 2)
    variance = mean + mean**2 * np.expm1(0.5**2)
    with_inputs = dpvi.local.quadrature(lambda z: tfd.Poisson(log_rate=np.ones([3, 1]) + 0.5 * z))
    alone = dpvi.local.quadrature(lambda z: tfd.Poisson(log_rate=1.0 + 0.5 * z))
    for records, shape in ((with_inputs, (num, 3)), (alone, (num,))):
        drawn = records.sample(num, seed=[0, 1]).numpy()
        assert drawn.shape == shape
        error = np.sqrt(variance / num)
        assert np.all(np.abs(drawn.mean(axis=0) - mean) < 7 * error)
        several = records.log_prob(drawn[:4])
        np.testing.assert_allclose(several[3], records.log_prob(drawn[3]), rtol=1e-5)


def test_points_that_all_records_share_stay_fixed_with_a_warning():
    def plane(z):
        return tfd.Normal(np.zeros([3, 1], np.float32) + z[:, 0] + 2.0 * z[:, 1], 1.0)

    with pytest.warns(FutureWarning, match=r"z\[\.\.\., 0\]"):
        records = dpvi.local.quadrature(plane, dimension=2)
    exact = stats.norm(0.0, np.sqrt(6.0)).logpdf(1.0)
    np.testing.assert_allclose(records.log_prob(np.ones(3, np.float32)), exact, atol=1e-3)


@pytest.mark.parametrize("times", [[0.0, 1.0, 2.0], [2015.0, 2016.0, 2017.0]])
def test_no_record_ends_a_fit(times):
    """Of infinite, missing and huge outcomes others' densities are what they were, beside a column
    of years too, whose latents' covariance has hardly a root."""
    time = np.tile(np.array(times, np.float32), 3)[:, None]
    rows = dpvi.local.unit_quadrature(
        lambda z: tfd.Gamma(0.5, tf.exp(-z[..., 0] - 0.1 * time * z[..., 1])), dimension=2
    )
    alike = np.ones([3, 3], np.float32)
    before = of_persons(rows).log_prob(alike).numpy()
    assert np.isfinite(before).all()
    for odd in (0.0, np.nan, np.inf, 1e38, -1.0):
        value = alike.copy()
        value[1] = odd
        after = of_persons(rows).log_prob(value).numpy()
        np.testing.assert_array_equal(after[[0, 2]], before[[0, 2]])


def test_a_conditional_that_takes_no_points_of_a_persons_own_is_refused():
    rows = dpvi.local.unit_quadrature(
        lambda z: tfd.Normal(z[:, 0] + np.zeros([9, 1]) * z[:, 1], 1.0),
        dimension=2,
        dtype="float64",
    )
    with pytest.raises(ValueError, match=r"z\[\.\.\., 0\]"):
        of_persons(rows).log_prob(np.zeros([3, 3]))


def test_an_intercept_and_a_slope_are_shared():
    """Two latents of a person: all rows of an outcome whose variance they make."""
    times = np.tile([0.0, 1.0, 2.0], 3)
    rows = dpvi.local.unit_quadrature(
        lambda z: tfd.Normal(z[..., 0] + 0.5 * times[:, None] * z[..., 1], np.float64(1.5)),
        dimension=2,
        dtype="float64",
    )
    drawn = of_persons(rows).sample(4_000, seed=[0, 1]).numpy()[:, 0]
    design = np.stack([np.ones(3), 0.5 * times[:3]], axis=1)
    expected = design @ design.T + 2.25 * np.eye(3)
    np.testing.assert_allclose(np.cov(drawn.T), expected, atol=0.35)
    value = RNG.normal(size=[3, 3])
    exact = stats.multivariate_normal(np.zeros(3), expected).logpdf(value[0])
    np.testing.assert_allclose(of_persons(rows).log_prob(value)[0], exact, rtol=1e-5)
