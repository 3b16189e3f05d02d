"""Twins of extreme records: every sampler ends, and the record counts for nothing."""

import functools

import numpy as np
import pytest
from support.siblings import slow

import tfp_dpvi as dpvi
from tfp_dpvi._tf import tf, tfp
from tfp_dpvi.calibrated.twins import draw_apart
from tfp_dpvi.gradients import StepSpec

tfd = tfp.distributions
NUM, BAD = 5, 3
SEED = tf.constant([3, 4])


class OwnSampler(tfd.Distribution):
    """A user's distribution, whose sampler reads what its parameters do not show."""

    def __init__(self, loc):
        self._loc = loc
        super().__init__(
            tf.float32, tfd.NOT_REPARAMETERIZED, False, True, parameters={"loc": "hidden"}
        )

    def _batch_shape(self):
        return self._loc.shape

    def _event_shape(self):
        return tf.TensorShape([])

    def _sample_n(self, n, seed=None):
        return tfd.Poisson(tf.exp(self._loc)).sample(n, seed=seed)


def pair_of(a, b):
    return tf.stack([a, b], axis=-1)


FAMILIES = {
    "gamma": lambda x: tfd.Gamma(tf.exp(x), 1.0),
    "exp-gamma": lambda x: tfd.ExpGamma(tf.exp(x), 1.0),
    "beta": lambda x: tfd.Beta(tf.exp(x), 1.0),
    "student": lambda x: tfd.StudentT(tf.exp(x), x, 1.0),
    "poisson": lambda x: tfd.Poisson(log_rate=x),
    "poisson-rate": lambda x: tfd.Poisson(tf.exp(x)),
    "binomial": lambda x: tfd.Binomial(tf.exp(x), logits=x),
    "beta-binomial": lambda x: tfd.BetaBinomial(5.0, tf.exp(x), 1.0),
    "dirichlet-multinomial": lambda x: tfd.DirichletMultinomial(5.0, tf.exp(pair_of(x, 0.0 * x))),
    "multinomial": lambda x: tfd.Multinomial(5.0, logits=tf.exp(pair_of(x, 0.0 * x))),
    "generalized-normal": lambda x: tfd.GeneralizedNormal(x, 1.0, tf.exp(x)),
    "zipf": lambda x: tfd.Zipf(power=1.0 + tf.exp(x)),
    "von-mises-fisher": lambda x: tfd.VonMisesFisher(
        tf.one_hot(tf.zeros_like(x, tf.int32), 4), tf.exp(x)
    ),
    "truncated-normal": lambda x: tfd.TruncatedNormal(tf.exp(x), 1.0, 0.0, np.inf),
    "categorical": lambda x: tfd.Categorical(logits=pair_of(tf.exp(x), -tf.exp(x))),
    "independent": lambda x: tfd.Independent(tfd.Gamma(tf.exp(pair_of(x, -x)), 1.0), 1),
    "transformed": lambda x: tfp.bijectors.Exp()(tfd.Gamma(tf.exp(x), 1.0)),
    "sample": lambda x: tfd.Sample(tfd.Poisson(tf.exp(x)), 2),
    "mixture": lambda x: tfd.MixtureSameFamily(
        tfd.Categorical(logits=[0.0, 1.0]), tfd.Poisson(tf.exp(pair_of(x, 0.0 * x)))
    ),
    "joint": lambda x: tfd.JointDistributionNamed(
        {"a": tfd.Gamma(tf.exp(x), 1.0), "b": lambda a: tfd.Poisson(a)}
    ),
    "joint-auto": lambda x: tfd.JointDistributionNamedAutoBatched(
        {"a": tfd.Normal(x, 1.0), "b": lambda a: tfd.Poisson(tf.exp(a))}, batch_ndims=1
    ),
    "latent": lambda x: dpvi.local.Variational(
        tfd.Normal(0.0 * x, 1.0), lambda z: tfd.Poisson(log_rate=x + z)
    ),
    "own": OwnSampler,
}
# With XLA, TFP and TensorFlow take other code; some families have kernels without it only.
XLA_TOO = ("gamma", "student", "poisson-rate", "joint", "own", "von-mises-fisher")
QUICK = ("gamma", "binomial", "categorical", "joint", "own")


@pytest.mark.parametrize(
    ("family", "jit_compile"),
    [(name, False) if name in QUICK else slow(name, False) for name in FAMILIES]
    + [slow(name, True) for name in XLA_TOO],
)
def test_every_sampler_ends_and_no_other_record_notices(family, jit_compile):
    """Exact equality, under equal random numbers, of all other records' twins."""

    @tf.function(jit_compile=jit_compile, autograph=False)
    def draw(x):
        return draw_apart(lambda: FAMILIES[family](x).sample(seed=SEED), x, NUM)

    x = np.full(NUM, 0.1, "float32")
    twins, usable = draw(x)
    assert usable.numpy().all()
    others = np.arange(NUM) != BAD
    for value in (1e5, np.inf, np.nan):
        spoilt = x.copy()
        spoilt[BAD] = value
        moved, kept = draw(spoilt)
        assert kept.numpy()[others].all()
        # The power's inverse is zero, which TFP's gamma sampler takes.
        assert not kept[BAD] or family == "generalized-normal"
        for a, b in zip(tf.nest.flatten(twins), tf.nest.flatten(moved), strict=True):
            np.testing.assert_array_equal(a.numpy()[others], b.numpy()[others])


def test_a_sampler_whose_rows_are_no_records_is_refused():
    """It is unknown whose an extreme number is: marking all would let one record drop others."""

    @tf.function(autograph=False)
    def draw(x):
        def mixing():
            return tfd.Poisson(tf.exp(tf.reduce_sum(x))).sample(NUM, seed=SEED)

        return draw_apart(mixing, x, NUM)

    with pytest.raises(ValueError, match="5 records"):
        draw(np.zeros(NUM, "float32"))


def test_extreme_shared_parameters_make_every_twin_unusable_and_public_infinities_none():
    @tf.function(autograph=False)
    def draw(x, theta):
        return draw_apart(lambda: tfd.Gamma(theta * tf.ones_like(x), 1.0).sample(seed=SEED), x, NUM)

    x = np.zeros(NUM, "float32")
    assert draw(x, tf.constant(2.0))[1].numpy().all()
    assert not draw(x, tf.constant(np.inf, tf.float32))[1].numpy().any()


def prior():
    return tfd.JointDistributionNamed({"w": tfd.Normal(0.0, 1.0), "b": tfd.Normal(0.0, 1.0)})


def gamma(params, x):
    return tfd.Gamma(2.0 + 0.0 * x[:, 0], tf.exp(params["b"] + params["w"] * x[:, 0]))


def zero_inflated(params, x):
    rate = tf.exp(params["b"] + params["w"] * x[:, 0])
    both = pair_of(rate, 1e-3 * tf.ones_like(rate))
    return tfd.MixtureSameFamily(tfd.Categorical(logits=[0.0, 0.0]), tfd.Poisson(both))


@functools.cache
def sums_of(likelihood, dtype, jit_compile):
    """Compiled: x, y, mask -> the clipped sum of pairs, with equal random numbers in each call."""
    model = dpvi.DPVI(prior, likelihood)
    model.compile(dpvi.optimizers.DPKerasSGDOptimizer(l2_norm_clip=1.0, noise_multiplier=1.0))
    model.make_data(np.full((NUM, 1), 0.1, dtype), np.ones(NUM, dtype), batch_size=NUM)
    gradient = model.calibration.pairing.gradient(
        StepSpec(NUM, NUM), model.surrogate_posterior, model.trainable_variables, model.clip
    )

    @tf.function(jit_compile=jit_compile, autograph=False)
    def run(x, y, mask):
        step = gradient.draw(tf.constant([1, 2], tf.int64))
        return step.clipped_sum({"x": x, "y": y}, mask, tf.constant([5, 6], tf.int64))[0].tensors

    return run


@pytest.mark.parametrize(
    ("likelihood", "jit_compile"),
    [(gamma, False), slow(gamma, True), slow(zero_inflated, False), slow(zero_inflated, True)],
)
def test_replay_with_an_extreme_record(likelihood, jit_compile):
    """C3, C8: it moves the sum by exactly zero or at most a clip; other parts stay to the bit."""
    run = sums_of(likelihood, "float32", jit_compile)
    x, y = np.full((NUM, 1), 0.1, "float32"), np.ones(NUM, "float32")
    mask = np.ones(NUM, bool)
    without = mask.copy()
    without[BAD] = False
    (reference,) = run(x, y, without)
    dropped = 0
    for value in (1e3, -1e3, 1e5, -1e5, 1e30, -1e30, 3e38, np.inf, np.nan, 1e-45):
        for outcome in (1.0, 1e30):
            spoilt, outcomes = x.copy(), y.copy()
            spoilt[BAD], outcomes[BAD] = value, outcome
            (found,) = run(spoilt, outcomes, mask)
            assert np.linalg.norm(found - reference) <= 1.0 + 1e-5
            np.testing.assert_array_equal(run(spoilt, outcomes, without)[0], reference)
            dropped += np.array_equal(found, reference)
    assert dropped >= 10
    assert np.linalg.norm(run(x, y, mask)[0] - reference) > 0.0
