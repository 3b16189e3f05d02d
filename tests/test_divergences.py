"""Divergences of codes against double loops, closed forms and each other; empty groups and bad rows; priors."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp
from scipy import special, stats
from support import logs
from support.siblings import slow

from tfp_dpvi import divergences as dv

tfd = tfp.distributions
psd = tfp.math.psd_kernels

DTYPES = [np.float32, np.float64]
REGULARIZERS = [
    dv.MMD(),
    dv.MMD(psd.MaternThreeHalves(length_scale=np.float64(0.7))),
    dv.DimensionwiseMMD(),
    dv.KLFromPrior(),
]
OF_ANY_DTYPE = [
    regularizer for regularizer in REGULARIZERS if getattr(regularizer, "kernel", None) is None
]


def draws(*shape, seed=0, dtype=np.float64):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def standard_normal(dim, dtype=np.float64):
    return tfd.MultivariateNormalDiag(np.zeros(dim, dtype))


def diagonal(loc, scale):
    return tfd.MultivariateNormalDiag(loc, scale)


def independent(loc, scale):
    return tfd.Independent(tfd.Normal(loc, scale), 1)


class Group:
    """Constants of a group of n records with d codes, and the `Codes` that locations, log scales and weights make."""

    def __init__(self, n=5, m=4, d=3, dtype=np.float64, posterior=diagonal):
        self.loc = tf.constant(draws(n, d, seed=1), dtype)
        self.log_scale = tf.constant(0.3 * draws(n, d, seed=2) - 1, dtype)
        self.noise = tf.constant(draws(n, d, seed=3), dtype)
        self.prior_samples = tf.constant(draws(m, d, seed=4), dtype)
        self.prior = standard_normal(d, dtype)
        self.posterior = posterior

    def codes(self, weights, loc=None, log_scale=None):
        loc = self.loc if loc is None else loc
        scale = tf.exp(self.log_scale if log_scale is None else log_scale)
        weights = tf.convert_to_tensor(weights, self.loc.dtype)
        samples = tf.where(weights[:, tf.newaxis] > 0, loc + scale * self.noise, tf.zeros_like(loc))
        return dv.Codes(
            samples, weights, self.posterior(loc, scale), self.prior, self.prior_samples
        )

    def value_and_gradients(self, regularizer, weights, loc=None, log_scale=None):
        loc = self.loc if loc is None else loc
        log_scale = self.log_scale if log_scale is None else log_scale
        with tf.GradientTape() as tape:
            tape.watch([loc, log_scale])
            value = regularizer(self.codes(weights, loc, log_scale))
        return value, tape.gradient(value, [loc, log_scale], unconnected_gradients="zero")


# ---------------------------------------------------------------------- maximum mean discrepancy


def looped_mmd(kernel, x, y, v=None, w=None):
    v = np.ones(len(x)) if v is None else v
    w = np.ones(len(y)) if w is None else w

    def inner(a, left, b, right):
        return sum(
            a[i] * b[j] * kernel(left[i], right[j])
            for i in range(len(left))
            for j in range(len(right))
        ) / (a.sum() * b.sum())

    return inner(v, x, v, x) - 2 * inner(v, x, w, y) + inner(w, y, w, y)


def rbf(length):
    return lambda a, b: math.exp(-np.sum((a - b) ** 2) / (2 * length**2))


def inverse_multiquadric(c):
    return lambda a, b: c / (c + np.sum((a - b) ** 2))


def all_scales(a, b):
    return sum(
        inverse_multiquadric(2 * len(a) * scale)(a, b) for scale in (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weighted", [False, True])
def test_mmd_is_the_double_loop(weighted, dtype):
    x, y = draws(6, 3, seed=1, dtype=dtype), draws(4, 3, seed=2, dtype=dtype) + dtype(0.5)
    v, w = (dtype([1, 0, 2, 0.5, 0, 1]), dtype([1, 3, 0, 1])) if weighted else (None, None)
    rtol = 1e-10 if dtype is np.float64 else 2e-5
    for kernel, loop in [
        (psd.ExponentiatedQuadratic(length_scale=dtype(1.3)), rbf(1.3)),
        (None, all_scales),
        (psd.Linear(bias_amplitude=dtype(0.0), slope_amplitude=dtype(1.0)), np.dot),
        (
            psd.ExponentiatedQuadratic(length_scale=dtype(1.3))
            + psd.ExponentiatedQuadratic(length_scale=dtype(0.4)),
            lambda a, b: rbf(1.3)(a, b) + rbf(0.4)(a, b),
        ),
        (
            psd.ExponentiatedQuadratic(length_scale=dtype([1.3, 0.4])),
            lambda a, b: rbf(1.3)(a, b) + rbf(0.4)(a, b),
        ),
    ]:
        ours = dv.mmd(x, y, kernel, x_weights=v, y_weights=w)
        assert ours.dtype == dtype
        assert ours.shape == []
        np.testing.assert_allclose(ours, looped_mmd(loop, x, y, v, w), rtol=rtol)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dimensionwise_mmd_is_the_sum_of_the_double_loops_on_each_axis(dtype):
    x, y = draws(6, 3, seed=1, dtype=dtype), draws(4, 3, seed=2, dtype=dtype) + dtype(0.5)
    v, w = dtype([1, 0, 2, 0.5, 0, 1]), dtype([1, 3, 0, 1])
    rtol = 1e-10 if dtype is np.float64 else 2e-5
    for weights in ((None, None), (v, w)):
        expected = sum(looped_mmd(all_scales, x[:, [k]], y[:, [k]], *weights) for k in range(3))
        ours = dv.dimensionwise_mmd(x, y, x_weights=weights[0], y_weights=weights[1])
        assert ours.dtype == dtype
        np.testing.assert_allclose(ours, expected, rtol=rtol)
    expected = sum(
        looped_mmd(inverse_multiquadric(2 * 0.3), x[:, [k]], y[:, [k]]) for k in range(3)
    )
    np.testing.assert_allclose(dv.dimensionwise_mmd(x, y, [0.3]), expected, rtol=rtol)


def test_on_a_line_both_discrepancies_agree():
    x, y = draws(7, 1, seed=1), draws(5, 1, seed=2)
    np.testing.assert_allclose(dv.mmd(x, y), dv.dimensionwise_mmd(x, y), rtol=1e-10)


@pytest.mark.parametrize("of", [dv.mmd, dv.dimensionwise_mmd])
def test_a_row_of_weight_zero_is_a_row_that_is_not_there(of):
    x, y = draws(6, 3, seed=1), draws(4, 3, seed=2)
    kept = np.array([0, 2, 5])
    v = np.isin(np.arange(6), kept).astype(float)
    np.testing.assert_allclose(of(x, y, x_weights=v), of(x[kept], y), rtol=1e-12)
    np.testing.assert_allclose(of(y, x, y_weights=v), of(y, x[kept]), rtol=1e-12)
    bad = np.where(v[:, None] > 0, x, np.nan)
    np.testing.assert_allclose(of(bad, y, x_weights=v), of(x[kept], y), rtol=1e-12)


@pytest.mark.parametrize("of", [dv.mmd, dv.dimensionwise_mmd])
def test_discrepancies_do_not_move_with_both_sets_and_vanish_for_equal_ones(of):
    x, y = draws(6, 3, seed=1), draws(4, 3, seed=2)
    np.testing.assert_allclose(of(x + 30.0, y + 30.0), of(x, y), rtol=1e-9)
    np.testing.assert_allclose(of(x, y), of(y, x), rtol=1e-12)
    np.testing.assert_allclose(of(x, x[::-1]), 0.0, atol=1e-14)
    assert of(x + 1.0, x) > 0.1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("of", [dv.mmd, dv.dimensionwise_mmd])
def test_rounding_never_makes_a_discrepancy_negative(of, dtype):
    for seed in range(12):
        x = draws(9, 2, seed=seed, dtype=dtype)
        assert of(x, x[::-1]) >= 0
        assert of(x[:1], x[:1]) >= 0


def test_the_mean_mmd_of_normals_is_the_closed_form():
    """False-alarm rate below 1e-7: a mean of 400 independent values, 6 of its standard errors (Student, 399 degrees)."""
    n, m, d, length, shift, scale, repeats = 6, 9, 2, 1.2, 0.7, 1.5, 400
    x = tf.constant(draws(repeats, n, d, seed=5))
    y = tf.constant(shift + scale * draws(repeats, m, d, seed=6))
    kernel = psd.ExponentiatedQuadratic(length_scale=np.float64(length))
    values = tf.vectorized_map(lambda pair: dv.mmd(*pair, kernel), (x, y)).numpy()

    def mean_kernel(variance, distance):
        total = length**2 + variance
        return (length**2 / total) ** (d / 2) * math.exp(-d * distance**2 / (2 * total))

    xx, yy, xy = (
        mean_kernel(2.0, 0.0),
        mean_kernel(2 * scale**2, 0.0),
        mean_kernel(1 + scale**2, shift),
    )
    expected = (1 / n + (1 - 1 / n) * xx) + (1 / m + (1 - 1 / m) * yy) - 2 * xy
    error = values.std(ddof=1) / math.sqrt(repeats)
    assert error < 0.01
    np.testing.assert_allclose(values.mean(), expected, atol=6 * error)


# ---------------------------------------------------------------------- KL(p || q)


def looped_log_mixture(log_probs, weights):
    return special.logsumexp(log_probs, b=weights / weights.sum())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("posterior", [diagonal, independent])
def test_kl_from_prior_is_the_double_loop(posterior, dtype):
    group = Group(n=5, m=4, d=3, dtype=dtype, posterior=posterior)
    for weights in (
        np.ones(5),
        np.array([1.0, 0, 1, 0, 1]),
        np.array([0, 0, 0, 1.0, 0]),
        np.array([0.5, 2, 0, 1, 3]),
    ):
        loc, scale = group.loc.numpy(), np.exp(group.log_scale.numpy())
        expected = np.mean(
            [
                stats.norm.logpdf(z).sum()
                - looped_log_mixture(
                    [stats.norm.logpdf(z, loc[i], scale[i]).sum() for i in range(5)], weights
                )
                for z in group.prior_samples.numpy()
            ]
        )
        ours = dv.KLFromPrior()(group.codes(weights))
        assert ours.dtype == dtype
        np.testing.assert_allclose(ours, expected, rtol=1e-10 if dtype is np.float64 else 1e-5)
    np.testing.assert_allclose(
        dv.kl_from_prior(group.prior, group.prior_samples, group.codes(np.ones(5)).posterior),
        dv.KLFromPrior()(group.codes(np.ones(5))),
    )


def test_kl_from_prior_of_normals_is_the_closed_form():
    """False-alarm rate below 1e-8: a mean of 20,000 independent values, 6 of its standard errors."""
    prior = tfd.MultivariateNormalDiag(np.array([0.5, -0.2]), np.array([0.8, 1.1]))
    loc, scale = np.array([0.0, 0.4]), np.array([1.0, 1.5])
    rows = tfd.MultivariateNormalDiag(
        np.tile(loc, [3, 1]), np.tile(scale, [3, 1])
    )  # Their mixture is one normal.
    z = prior.sample(20_000, seed=(1, 2))
    q = tfd.MultivariateNormalDiag(loc, scale)
    error = np.std(prior.log_prob(z) - q.log_prob(z)) / math.sqrt(20_000)
    assert error < 0.01
    np.testing.assert_allclose(
        dv.kl_from_prior(prior, z, rows), prior.kl_divergence(q), atol=6 * error
    )


# ---------------------------------------------------------------------- groups as a model meets them


@pytest.mark.parametrize("regularizer", REGULARIZERS, ids=repr)
@pytest.mark.parametrize("posterior", [diagonal, independent])
def test_gradients_are_differences(posterior, regularizer):
    group = Group(posterior=posterior)
    weights = np.array([1.0, 0, 1, 1, 0])
    _, gradients = group.value_and_gradients(regularizer, weights)
    direction = [draws(5, 3, seed=8), draws(5, 3, seed=9)]
    step = 1e-5

    def value(sign):
        moved = [
            part + sign * step * along
            for part, along in zip((group.loc, group.log_scale), direction, strict=True)
        ]
        return regularizer(group.codes(weights, *moved)).numpy()

    expected = (value(1) - value(-1)) / (2 * step)
    ours = sum(
        np.sum(gradient * along) for gradient, along in zip(gradients, direction, strict=True)
    )
    np.testing.assert_allclose(ours, expected, rtol=1e-6, atol=1e-9)
    for gradient in gradients:
        np.testing.assert_array_equal(gradient.numpy()[weights == 0], 0.0)
        assert regularizer == dv.KLFromPrior() or np.abs(gradient.numpy()[weights > 0]).max() > 1e-4


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("regularizer", OF_ANY_DTYPE, ids=repr)
def test_an_empty_group_is_zero_with_zero_gradients(regularizer, dtype):
    group = Group(dtype=dtype)
    value, gradients = group.value_and_gradients(regularizer, np.zeros(5))
    assert value.dtype == dtype
    assert value.numpy() == 0.0
    for gradient in gradients:
        np.testing.assert_array_equal(gradient, 0.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("regularizer", OF_ANY_DTYPE, ids=repr)
def test_a_group_of_one_or_of_equal_or_of_distant_codes_is_finite(regularizer, dtype):
    group = Group(dtype=dtype)
    for weights, loc in [
        (np.eye(5)[2], group.loc),
        (np.ones(5), tf.zeros_like(group.loc)),
        (np.ones(5), 1e6 * group.loc),
    ]:
        value, gradients = group.value_and_gradients(regularizer, weights, loc)
        assert np.isfinite(value)
        for gradient in gradients:
            assert np.isfinite(gradient).all()


@pytest.mark.parametrize("regularizer", REGULARIZERS, ids=repr)
@pytest.mark.parametrize("posterior", [diagonal, independent])
def test_a_bad_row_of_weight_zero_does_not_reach_the_others(posterior, regularizer):
    group = Group(posterior=posterior)
    weights = np.array([1.0, 0, 1, 1, 0])
    value, gradients = group.value_and_gradients(regularizer, weights)
    inside = (weights > 0)[:, None]
    for bad in (np.nan, np.inf):
        loc, log_scale = tf.where(inside, group.loc, bad), tf.where(inside, group.log_scale, bad)
        ours, of_ours = group.value_and_gradients(regularizer, weights, loc, log_scale)
        np.testing.assert_allclose(ours, value, rtol=1e-12)
        for gradient, expected in zip(of_ours, gradients, strict=True):
            np.testing.assert_allclose(
                gradient.numpy()[weights > 0], expected.numpy()[weights > 0], rtol=1e-12
            )


GROUPS = np.array([[1.0, 0, 1, 1, 0], [0, 0, 0, 0, 0], [0, 1, 0, 0, 0], [0, 0, 0, 0, 1]])


@pytest.mark.parametrize("dtype", [np.float64, slow(np.float32)])
@pytest.mark.parametrize(
    "regularizer", [OF_ANY_DTYPE[0], slow(OF_ANY_DTYPE[1]), *OF_ANY_DTYPE[2:]], ids=repr
)
def test_mapping_over_groups_is_a_loop_over_them_without_a_fallback(regularizer, dtype):
    group = Group(dtype=dtype)
    groups = tf.constant(GROUPS, dtype)
    expected = [group.value_and_gradients(regularizer, weights) for weights in groups]
    rtol = 1e-10 if dtype is np.float64 else 2e-4

    # Groups as weights over the whole batch, and as rows of their own.
    def by_weights(weights):
        return group.value_and_gradients(regularizer, weights)

    def by_rows(rows):
        return group.value_and_gradients(regularizer, *rows)

    repeated = [
        tf.repeat(part[tf.newaxis], len(GROUPS), axis=0) for part in (group.loc, group.log_scale)
    ]
    for name, mapped, elements in [
        ("weights", by_weights, groups),
        ("rows", by_rows, (groups, *repeated)),
    ]:
        with logs.no_fallback():
            values, gradients = tf.function(
                lambda elements, mapped=mapped: tf.vectorized_map(
                    mapped, elements, fallback_to_while_loop=False
                )
            )(elements)
        for k, (value, of_value) in enumerate(expected):
            np.testing.assert_allclose(
                values[k], value, rtol=rtol, atol=1e-6 * (dtype is np.float32), err_msg=name
            )
            for ours, theirs in zip(gradients, of_value, strict=True):
                np.testing.assert_allclose(
                    ours[k], theirs, rtol=rtol, atol=1e-14 if dtype is np.float64 else 1e-5
                )


@pytest.mark.parametrize("regularizer", [*map(slow, OF_ANY_DTYPE[:-1]), OF_ANY_DTYPE[-1]], ids=repr)
def test_the_map_over_groups_compiles(regularizer):
    group = Group()

    @tf.function(jit_compile=True)
    def compiled(groups):
        return tf.vectorized_map(
            lambda weights: group.value_and_gradients(regularizer, weights), groups
        )

    values, gradients = compiled(tf.constant(GROUPS))
    for k, weights in enumerate(GROUPS):
        value, of_value = group.value_and_gradients(regularizer, weights)
        np.testing.assert_allclose(values[k], value, rtol=1e-9, atol=1e-14)
        for ours, theirs in zip(gradients, of_value, strict=True):
            np.testing.assert_allclose(ours[k], theirs, rtol=1e-9, atol=1e-14)


def test_regularizers_say_and_compare_what_they_are():
    assert repr(dv.KLFromPrior()) == "KLFromPrior()"
    assert repr(dv.DimensionwiseMMD([1, 2])) == "DimensionwiseMMD(scales=(1.0, 2.0))"
    assert dv.DimensionwiseMMD() == dv.DimensionwiseMMD(dv.SCALES) != dv.DimensionwiseMMD((1.0,))
    assert hash(dv.MMD()) == hash(dv.MMD())


def test_regularizers_are_the_functions_on_the_group():
    group = Group()
    weights = np.array([1.0, 0, 1, 1, 0])
    codes = group.codes(weights)
    kept = weights > 0
    samples = codes.samples.numpy()[kept]
    kernel = psd.MaternThreeHalves(length_scale=np.float64(0.7))
    np.testing.assert_allclose(dv.MMD()(codes), dv.mmd(samples, codes.prior_samples))
    np.testing.assert_allclose(dv.MMD(kernel)(codes), dv.mmd(samples, codes.prior_samples, kernel))
    np.testing.assert_allclose(
        dv.DimensionwiseMMD([0.3, 2])(codes),
        dv.dimensionwise_mmd(samples, codes.prior_samples, [0.3, 2]),
    )
    posterior = diagonal(group.loc[kept], tf.exp(group.log_scale[kept]))
    np.testing.assert_allclose(
        dv.KLFromPrior()(codes),
        dv.kl_from_prior(group.prior, codes.prior_samples, posterior),
        rtol=1e-12,
    )


# ---------------------------------------------------------------------- priors


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("sparsity", "spike", "slab"),
    [(0.8, 0.05, 1.0), (0.3, 0.2, 2.0), (0.0, 0.05, 1.0), (1.0, 0.1, 1.0)],
)
def test_the_sparse_priors_density_is_its_formula(sparsity, spike, slab, dtype):
    prior = dv.sparse_prior(3, sparsity, spike, slab, dtype)
    z = np.concatenate([draws(4, 3, dtype=dtype), 0.05 * draws(4, 3, seed=1, dtype=dtype)])
    each = sparsity * stats.norm.pdf(z, scale=spike) + (1 - sparsity) * stats.norm.pdf(
        z, scale=slab
    )
    assert prior.dtype == dtype
    assert prior.event_shape == [3]
    assert prior.batch_shape == []
    if sparsity < 1:
        np.testing.assert_allclose(prior.log_prob(z), np.log(each).sum(axis=1), rtol=2e-5)
    with tf.GradientTape() as tape:
        tape.watch(z := tf.constant(z))
        log_prob = prior.log_prob(z)
    assert np.isfinite(tape.gradient(log_prob, z)).all()


def test_the_sparse_priors_samples_have_its_variance_in_each_dimension_independently():
    """False-alarm rate below 1e-8: each of 7 statistics within 6.5 standard errors of 40,000 draws."""
    n = 40_000
    sample = tf.function(lambda: dv.sparse_prior(3).sample(n, seed=(1, 2)))().numpy()
    assert sample.dtype == np.float32
    narrow = 0.8 * (2 * stats.norm.cdf(0.2 / 0.05) - 1) + 0.2 * (2 * stats.norm.cdf(0.2) - 1)
    near = np.abs(sample) < 0.2
    np.testing.assert_allclose(
        near.mean(axis=0), narrow, atol=6.5 * math.sqrt(narrow * (1 - narrow) / n)
    )
    squares = sample.astype(float) ** 2
    np.testing.assert_allclose(
        squares.mean(axis=0), 0.8 * 0.05**2 + 0.2, atol=6.5 * squares.std() / math.sqrt(n)
    )
    both = narrow**2
    np.testing.assert_allclose(
        (near[:, 0] & near[:, 1]).mean(), both, atol=6.5 * math.sqrt(both * (1 - both) / n)
    )


PINWHEEL = [[0.0, -1.0], [0.0, 1.0], [1.0, 0.0], [-1.0, 0.0]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("scale", "probs"),
    [
        (0.2, None),
        ([0.2, 0.4], [0.1, 0.2, 0.3, 0.4]),
        ([[0.1], [0.2], [0.3], [0.4]], None),
        (np.full((4, 2), 0.3), None),
    ],
)
def test_the_clustered_priors_density_is_its_formula(scale, probs, dtype):
    prior = dv.clustered_prior(PINWHEEL, scale, probs, dtype=dtype)
    z = draws(6, 2, dtype=dtype)
    scales = np.broadcast_to(scale, (4, 2))
    each = [
        stats.norm.logpdf(z, loc, s).sum(axis=1)
        for loc, s in zip(np.array(PINWHEEL), scales, strict=True)
    ]
    expected = special.logsumexp(
        each, axis=0, b=np.reshape([0.25] * 4 if probs is None else probs, [4, 1])
    )
    assert prior.dtype == dtype
    assert (prior.event_shape, prior.batch_shape) == ([2], [])
    np.testing.assert_allclose(prior.log_prob(z), expected, rtol=2e-5)


def test_the_clustered_priors_samples_fall_into_its_clusters():
    """False-alarm rate below 1e-8: 6 standard errors of 4 proportions; a normal strays 10 deviations with 1e-23."""
    n, probs = 20_000, np.array([0.1, 0.2, 0.3, 0.4])
    sample = tf.function(
        lambda: dv.clustered_prior(PINWHEEL, 0.05, probs).sample(n, seed=(1, 2))
    )().numpy()
    distance = np.linalg.norm(sample[:, None] - np.array(PINWHEEL), axis=-1)
    assert distance.min(axis=1).max() < 0.5
    shares = np.bincount(distance.argmin(axis=1), minlength=4) / n
    np.testing.assert_allclose(shares, probs, atol=6 * math.sqrt(0.25 / n))


def test_the_clustered_prior_takes_its_dtype_from_the_centres():
    assert dv.clustered_prior([[0, -1], [0, 1]], 1).dtype == tf.float32
    assert dv.clustered_prior(np.array([[0, -1], [0, 1]]), 1).dtype == tf.float32
    assert dv.clustered_prior(np.zeros([2, 2]), 1).dtype == tf.float64
    assert dv.clustered_prior(tf.zeros([2, 2], tf.float64), 1).dtype == tf.float64


@pytest.mark.parametrize(
    "prior", [dv.sparse_prior(2), dv.clustered_prior(PINWHEEL, 0.2)], ids=["sparse", "clustered"]
)
@pytest.mark.parametrize("regularizer", OF_ANY_DTYPE, ids=repr)
def test_the_priors_serve_every_regulariser(regularizer, prior):
    group = Group(d=2, dtype=np.float32)
    group.prior, group.prior_samples = prior, prior.sample(8, seed=(1, 2))
    value, gradients = group.value_and_gradients(regularizer, np.ones(5))
    assert np.isfinite(value)
    assert all(np.isfinite(gradient).all() for gradient in gradients)


# ---------------------------------------------------------------------- what is refused

X, Y = draws(4, 2), draws(3, 2, seed=1)
ROWS = diagonal(X, np.ones_like(X))
NORMAL = standard_normal(2)
JOINT = tfd.JointDistributionSequential(
    [tfd.Normal(np.float64(0.0), 1.0), tfd.Normal(np.float64(0.0), 1.0)]
)


@pytest.mark.parametrize("of", [dv.mmd, dv.dimensionwise_mmd])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": X[:, 0]}, r"x has .*shape \(4,\).*newaxis"),
        ({"x": np.ones([4, 2], int)}, "x has dtype int64.*tf.cast"),
        ({"y": tf.constant(Y, tf.float32)}, "y has dtype float32.*float64.*same dtype"),
        ({"y": draws(3, 5)}, r"y has .*shape \(3, 5\).*\(4, 2\).*number of dimensions"),
        ({"x_weights": np.ones(3)}, r"x_weights has .*shape \(3,\).*one weight per row"),
        ({"y_weights": np.ones([3, 1])}, r"y_weights has .*shape \(3, 1\).*one weight per row"),
        ({"y_weights": tf.ones(3)}, "y_weights has dtype float32.*same dtype"),
    ],
)
def test_points_and_weights_that_do_not_fit_are_refused(of, change, message):
    with pytest.raises(ValueError, match=message):
        of(**{"x": X, "y": Y, **change})


@pytest.mark.parametrize(
    "kernel", ["rbf", psd.ExponentiatedQuadratic, psd.ExponentiatedQuadratic(feature_ndims=2)]
)
def test_kernels_that_do_not_fit_are_refused(kernel):
    with pytest.raises(TypeError, match=r"must be a kernel of tfp\.math\.psd_kernels on vectors"):
        dv.mmd(X, Y, kernel)


@pytest.mark.parametrize(
    "of", [dv.DimensionwiseMMD, lambda scales: dv.dimensionwise_mmd(X, Y, scales)]
)
@pytest.mark.parametrize("scales", [(), (1.0, 0.0), (-1.0,), (float("nan"),), ("1",), -2.0])
def test_scales_that_are_not_positive_are_refused(of, scales):
    with pytest.raises((TypeError, ValueError), match="scales"):
        of(scales)


def test_one_scale_may_stand_alone():
    assert dv.DimensionwiseMMD(2).scales == (2.0,)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: dv.kl_from_prior(NORMAL, Y[:0], ROWS),
            ValueError,
            r"prior_samples has shape \(0, 2\): draw at least one",
        ),
        (lambda: dv.kl_from_prior(NORMAL, Y, NORMAL), ValueError, r"posterior .*batch shape \(\)"),
        (lambda: dv.kl_from_prior(ROWS, Y, ROWS), ValueError, r"prior .*batch shape \(4,\)"),
        (lambda: dv.kl_from_prior(JOINT, Y, ROWS), ValueError, "prior .*event shape.*Blockwise"),
        (
            lambda: dv.kl_from_prior(tfd.Normal, Y, ROWS),
            TypeError,
            "prior must be a TFP distribution",
        ),
        (lambda: dv.kl_from_prior(NORMAL, Y, X), TypeError, "posterior must be a TFP distribution"),
        (
            lambda: dv.kl_from_prior(NORMAL, Y, ROWS, np.ones(3)),
            ValueError,
            r"weights has .*shape \(3,\)",
        ),
        (
            lambda: dv.kl_from_prior(standard_normal(2, np.float32), Y, ROWS),
            ValueError,
            "prior .*dtype.*float32.*needs .*float64",
        ),
    ],
)
def test_distributions_that_do_not_fit_are_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dim": 0}, "dim=0 must be at least 1"),
        ({"dim": 2.0}, "dim=2.0"),
        ({"sparsity": 1.2}, "sparsity=1.2 must lie in"),
        ({"sparsity": float("nan")}, "sparsity is NaN"),
        ({"spike_scale": 0.0}, "spike_scale=0.0 must be greater than 0"),
        ({"slab_scale": float("inf")}, "slab_scale=inf"),
        ({"slab_scale": "1"}, "slab_scale='1'"),
    ],
)
def test_a_sparse_prior_that_makes_no_sense_is_refused(arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        dv.sparse_prior(**{"dim": 2, **arguments})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"locs": [0.0, 1.0]}, r"locs=\[0.0, 1.0\] must be finite numbers of shape"),
        ({"locs": [[0.0, math.nan]]}, "locs="),
        ({"locs": np.zeros([0, 2])}, "locs="),
        ({"scale": 0.0}, "scale=0.0 must be positive"),
        ({"scale": [1.0, 1.0, 1.0]}, r"scale=\[1.0, 1.0, 1.0\] .*\(4, 2\)"),
        ({"probs": [0.5, 0.5]}, "probs=.*4 probabilities that sum to 1"),
        ({"probs": [0.5, 0.5, 0.5, -0.5]}, "probs="),
        ({"probs": [1, 1, 1, 1]}, "probs=.*Divide weights by their sum"),
    ],
)
def test_a_clustered_prior_that_makes_no_sense_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        dv.clustered_prior(**{"locs": PINWHEEL, "scale": 1.0, **arguments})
