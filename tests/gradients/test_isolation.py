"""One record's values leave no bit of another's loss and gradient changed, whatever operations the loss is made of (C1, C3)."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp

from tfp_dpvi._tf import map_apart

tfd = tfp.distributions
N, WIDTH = 5, 12
RNG = np.random.default_rng(0)
RECORDS = RNG.normal(size=[N, WIDTH]).astype("float32")
WEIGHTS = RNG.normal(size=WIDTH).astype("float32")
RIGHT = tf.constant(RNG.normal(size=[3, 3]), tf.float32)

EXTREME = {
    "zeros": np.zeros(WIDTH),
    "large": 1e4 * np.ones(WIDTH),
    "mixed": np.where(np.arange(WIDTH) % 2, 300.0, -300.0),
    "overflowing": 1e30 * np.ones(WIDTH),
    "nan": np.full(WIDTH, np.nan),
    "inf": np.full(WIDTH, -np.inf),
}


def matrix(x, w):
    return 0.3 * tf.reshape(x[:9], [3, 3]) + tf.reshape(w[:9], [3, 3])


def positive_definite(x, w):
    return tf.matmul(matrix(x, w), matrix(x, w), transpose_b=True) + 0.5 * tf.eye(3)


def positive(x, w):
    return tf.nn.softplus(0.5 * x + w) + 0.1


def unit(x, w):
    return tf.clip_by_value(tf.sigmoid(0.3 * x + w), 1e-3, 1.0 - 1e-3)


def places(x):
    return tf.math.floormod(tf.cast(3.0 * x[:4], tf.int32), 5)


# Indices are in range: others stop TensorFlow or, in sums over segments, count for nothing (`models/test_varying_shapes.py`).
BOUNDED = {
    "sort": lambda x, w: tf.sort(x * w) * w,
    "argsort": lambda x, w: tf.gather(x * w, tf.argsort(x * w)) * w,
    "top_k": lambda x, w: tf.math.top_k(x * w, 3)[0],
    "cumsum": lambda x, w: tf.cumsum(x * w) * w,
    "cumulative_logsumexp": lambda x, w: tf.math.cumulative_logsumexp(x + w),
    "gather": lambda x, w: tf.gather(w, places(x)),
    "scatter": lambda x, w: tf.tensor_scatter_nd_add(
        w[:5], places(x)[:, None], w[:4] * x[:4]
    ) * w[:5],
    "segment_sum": lambda x, w: tf.math.unsorted_segment_sum(w[:4] * x[:4], places(x), 5) * w[:5],
    "segment_mean": lambda x, w: tf.math.unsorted_segment_mean(w[:4] * x[:4], places(x), 5) * w[:5],
    "segment_max": lambda x, w: tf.nn.relu(tf.math.unsorted_segment_max(w[:4] * x[:4], places(x), 5)) * w[:5],
    "one_hot": lambda x, w: tf.one_hot(places(x), 5) * w[:5],
    "cholesky": lambda x, w: tf.linalg.cholesky(positive_definite(x, w)),
    "triangular_solve": lambda x, w: tf.linalg.triangular_solve(matrix(x, w) + 3.0 * tf.eye(3), RIGHT),
    "logdet": lambda x, w: tf.linalg.logdet(positive_definite(x, w)),
    "qr": lambda x, w: tf.abs(tf.linalg.qr(matrix(x, w) + 2.0 * tf.eye(3))[1]),
    "log_softmax": lambda x, w: tf.nn.log_softmax(x * w) * w,
    "condition": lambda x, w: tf.cond(x[0] > 0.0, lambda: w * x, lambda: w * w),
    "convolution": lambda x, w: tf.nn.conv1d(x[None, :, None], w[:3, None, None], 1, "SAME") ** 2,
    "max_pool": lambda x, w: tf.nn.max_pool1d((x * w)[None, :, None], 2, 2, "VALID"),
}  # fmt: skip
MORE = {
    "pseudo_inverse": lambda x, w: tf.linalg.pinv(matrix(x, w) + 2.0 * tf.eye(3)),
    "singular_values": lambda x, w: tf.linalg.svd(matrix(x, w), compute_uv=False) * w[:3],
    "cholesky_solve": lambda x, w: tf.linalg.cholesky_solve(tf.linalg.cholesky(positive_definite(x, w)), RIGHT),
    "lstsq": lambda x, w: tf.linalg.lstsq(matrix(x, w) + 2.0 * tf.eye(3), RIGHT),
    "roll": lambda x, w: tf.roll(x * w, tf.cast(tf.clip_by_value(2.0 * x[0], -9.0, 9.0), tf.int32), 0) * w,
    "rfft": lambda x, w: tf.abs(tf.signal.rfft(x * w)) ** 2,
    "moments": lambda x, w: tf.nn.batch_normalization(x * w, *tf.nn.moments(x * w, [0]), None, None, 1e-3) * w,
    "lgamma": lambda x, w: tf.math.lgamma(positive(x, w)),
    "igamma": lambda x, w: tf.math.igamma(positive(x, w), positive(w, x)),
    "betainc": lambda x, w: tf.math.betainc(2.0 + 0.0 * w, 3.0 + 0.0 * w, unit(x, w)),
    "zeta": lambda x, w: tf.math.zeta(1.5 + positive(x, w), positive(w, x)),
    "ndtri": lambda x, w: tf.math.ndtri(unit(x, w)),
    "bessel": lambda x, w: tf.math.bessel_i0e(x * w),
    "percentile": lambda x, w: tfp.stats.percentile(x * w, 50.0),
    "interpolation": lambda x, w: tfp.math.interp_regular_1d_grid(x, -2.0, 2.0, w),
    "searchsorted": lambda x, w: tf.gather(w, tf.minimum(tf.searchsorted(tf.sort(w[:8]), x[:3]), 7)),
    "normal_trils": lambda x, w: tfd.MultivariateNormalTriL(
        w[:3], tf.linalg.cholesky(positive_definite(w, x))
    ).log_prob(x[:3]),
    "gaussian_process": lambda x, w: tfd.GaussianProcess(
        tfp.math.psd_kernels.ExponentiatedQuadratic(positive(w, w)[0], positive(w, w)[1]),
        x[:4, None], observation_noise_variance=0.1,
    ).log_prob(w[:4]),
    "von_mises": lambda x, w: tfd.VonMises(w, positive(w, w)).log_prob(x),
}  # fmt: skip
UNCOMPILED = {  # Loops in a mapped record, which XLA refuses.
    "student_cdf": lambda x, w: tfd.StudentT(positive(w, x), 0.0, 1.0).cdf(x),
    "gamma_quantile": lambda x, w: tfp.math.igammainv(positive(x, w), unit(w, x)),
    "gamma_draws": lambda x, w: tfd.Gamma(positive(w, x), 1.0).sample(seed=[1, 2]),
}  # fmt: skip


@pytest.mark.parametrize(
    ("operations", "jit_compile"),
    [
        pytest.param(BOUNDED, False, id="plain"),
        pytest.param(BOUNDED, True, id="xla", marks=pytest.mark.slow),
        pytest.param(MORE, False, id="more", marks=pytest.mark.slow),
        pytest.param(MORE, True, id="more-xla", marks=pytest.mark.slow),
        pytest.param(UNCOMPILED, False, id="loops", marks=pytest.mark.slow),
    ],
)
def test_no_record_reaches_another(operations, jit_compile):
    """Bit for bit, under XLA and not: the first and the last record are replaced by extreme ones, the others are compared."""

    def one(x, weights):
        found = {}
        for name, operation in operations.items():
            with tf.GradientTape() as tape:
                tape.watch(weights)
                value = tf.reduce_sum(operation(x, weights))
            found[name] = (
                value,
                tf.convert_to_tensor(tape.gradient(value, weights, unconnected_gradients="zero")),
            )
        return found

    @tf.function(jit_compile=jit_compile, autograph=False)
    def mapped(records, weights):
        return map_apart(lambda x: one(x, weights), records)

    weights = tf.constant(WEIGHTS)
    before = mapped(tf.constant(RECORDS), weights)
    for kind, extreme in EXTREME.items():
        for place in (0, N - 1):
            records = RECORDS.copy()
            records[place] = extreme
            after = mapped(tf.constant(records), weights)
            others = np.arange(N) != place
            for name in operations:
                for one_part, other in zip(before[name], after[name], strict=True):
                    kept, now = one_part.numpy()[others], other.numpy()[others]
                    assert kept.tobytes() == now.tobytes(), (
                        f"{name}: a record of {kind} at {place} changes others"
                    )
