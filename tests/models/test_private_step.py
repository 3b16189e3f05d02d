"""The private step: what is released, with which noise, over which records (C1, C2, C4, C8, C10)."""

import numpy as np
import pytest
from support import internals, statistics
from support.cases import normal
from support.siblings import slow
from support.steps import Indicator, check_fresh_noise, check_noise, fit_indicator, shared_steps

import tfp_dpvi as dpvi
from tfp_dpvi import keras
from tfp_dpvi._tf import tf, tfp
from tfp_dpvi.optimizers import DPKerasSGDOptimizer
from tfp_dpvi.sampling import PoissonSampler

tfd = tfp.distributions


@pytest.mark.parametrize(
    ("dtype", "jit_compile"),
    [(np.float32, True), (np.float64, False), slow(np.float32, False), slow(np.float64, True)],
)
def test_noise_does_not_see_the_batch(dtype, jit_compile):
    """C1, C2: z C / (q N) within 1 % at 0, 1, q N and 3 q N records, normal, and equal across them. False alarms: 1e-8.

    (5 p-values; 1 % is 7 standard errors of 262,001 coordinates.)
    """
    check_noise(shared_steps(dtype, jit_compile))


@pytest.mark.parametrize("jit_compile", [False, True])
def test_noise_is_fresh(jit_compile):
    """C10: independent between steps, keys, variables and coordinates. False alarms: 2e-8 (18 p-values)."""
    check_fresh_noise(shared_steps(np.float32, jit_compile))


def test_noise_of_a_fit():
    """C1, C10: the weights of a whole fit move by noise of z C / (q N) in every step. False alarms: 1e-8.

    Records of zeros contribute zero, so that only noise is left, over Poisson batches of mean 3: many sizes, some empty.
    """
    width, steps, expected = 4096, 70, 1.3 * 0.7 / 3
    model = Indicator(width)
    noise = fit_indicator(
        model, np.zeros((50, width), "float32"), batch_size=3, steps=steps, clip=0.7, multiplier=1.3
    )
    assert noise.shape == (steps, width)
    statistics.standard_deviation(noise, expected, "noise of a fit")
    statistics.standard_normal(noise / expected, "noise of a fit")
    each = np.sum((noise / expected) ** 2, axis=1)
    statistics.standard_score((each.max() - width) / np.sqrt(2 * width) - 2.0, "noisiest step")
    statistics.standard_score((each.min() - width) / np.sqrt(2 * width) + 2.0, "quietest step")
    statistics.uncorrelated(noise[1:], noise[:-1], "noise of consecutive steps")
    statistics.uncorrelated(noise[:35], noise[35:], "noise of the halves of a fit")
    assert model.privacy_ledger.num_releases == steps


@pytest.mark.parametrize("engine", ["aligned", "vectorized"])
def test_noise_of_a_posterior(engine):
    """C1: DPVI's locations get noise of z C / (q N) in both engines, scales too if released. False alarms: 4e-9."""
    width, expected = 200_000, 2.0 * 0.5 / 4.0
    prior = tfd.JointDistributionNamed({"w": normal(width, 1.0, np.float32)})
    model = dpvi.DPVI(
        prior,
        lambda params, x: tfd.Normal(x[:, 0] + params["w"][0], 1.0),
        gradients=engine,
        clipping="flat",
    )
    variables = model.trainable_variables
    optimizer = DPKerasSGDOptimizer(learning_rate=1.0, l2_norm_clip=0.5, noise_multiplier=2.0)
    optimizer.build(variables)
    nobody = PoissonSampler(1, 1e-9)
    run = internals.step_of(
        model, variables, optimizer, nobody, expected_batch_size=4.0, num_records=100
    )
    records = {"x": tf.zeros([1, 1]), "y": tf.zeros([1])}
    start, key = [v.numpy() for v in variables], statistics.fresh_key()
    ends = []
    for multiplier in (0.0, 2.0):
        for variable, value in zip(variables, start, strict=True):
            variable.assign(value)
        run(key, 0, 1, multiplier, records)
        ends.append([v.numpy().astype(np.float64) for v in variables])
    noise = [noisy - quiet for quiet, noisy in zip(*ends, strict=True)]
    parts = {
        ("loc" if "loc" in v.name else "scale"): part
        for v, part in zip(variables, noise, strict=True)
    }
    statistics.standard_deviation(parts["loc"], expected, "noise of the locations")
    if engine == "vectorized":
        statistics.standard_deviation(parts["scale"], expected, "noise of the scales")
        statistics.uncorrelated(parts["loc"], parts["scale"], "noise of locations and scales")


def test_empty_batches_are_releases():
    """C1, C6: batches of nobody are pure noise, finite, and counted. (All 25 are empty but for 1 run in 40.)"""
    model = Indicator(300)
    moves = fit_indicator(
        model,
        np.full((1, 300), 5.0, "float32"),
        batch_size=1,
        steps=25,
        num_records=1000,
        multiplier=0.5,
    )
    assert np.all(np.isfinite(moves))
    assert np.all(np.any(moves != 0, axis=1)), "a step without noise shows that its batch was empty"
    assert model.privacy_ledger.num_releases == 25


@pytest.mark.parametrize("physical", [2, slow(None)])
def test_a_fit_takes_every_sampled_record(physical):
    """C3, C4: with noise off the releases *are* the inclusions: exact Poisson, physical batches far below the realised.

    False alarms: 5e-9 (at most 5 p-values).
    """
    count, steps, q = 40, 600, 0.75
    model = Indicator(count)
    means = fit_indicator(
        model,
        np.eye(count, dtype="float32"),
        batch_size=30,
        steps=steps,
        multiplier=0.0,
        physical_batch_size=physical,
    )
    included = means * 30.0
    np.testing.assert_allclose(included, np.round(included), atol=1e-3)
    included = np.round(included).astype(int)
    assert set(np.unique(included)) == {0, 1}, "each record at most once, clipped to 1"
    statistics.binomial_sizes(included.sum(1), count, q, "sizes of a fit's batches")
    rates = included.sum(0)
    score = np.sum((rates - steps * q) ** 2) / (steps * q * (1 - q))
    statistics.standard_score((score - count) / np.sqrt(2 * count) / 1.5, "inclusion rates")
    centred = included - q
    statistics.uncorrelated(centred[:, 1:], centred[:, :-1], "neighbouring records")
    statistics.uncorrelated(centred[1:], centred[:-1], "consecutive steps")


def test_full_batches_take_every_record_in_every_step():
    """C4: batch_size >= N is all records, none twice, with a physical size that does not divide N."""
    model = Indicator(10)
    means = fit_indicator(
        model,
        np.eye(10, dtype="float32"),
        batch_size=10,
        steps=3,
        multiplier=0.0,
        physical_batch_size=4,
    )
    np.testing.assert_allclose(means, np.full((3, 10), 0.1), rtol=1e-5)


def test_denominators_are_the_declared_ones():
    """C1: q and the denominator follow the declared N, not the realised or the available number of records."""
    model = Indicator(1)
    means = fit_indicator(
        model,
        np.ones((500, 1), "float32"),
        batch_size=40,
        steps=200,
        num_records=1000,
        multiplier=0.0,
    )
    sizes = np.round(means[:, 0] * 40.0)
    np.testing.assert_allclose(means[:, 0] * 40.0, sizes, atol=1e-2)
    statistics.binomial_sizes(sizes.astype(int), 500, 0.04, "sizes at a declared N")
    assert model.privacy_plan.sampling.probability == 0.04


def test_bad_records_leave_a_fit_unharmed():
    """C8: NaN, infinite and overflowing records contribute exactly zero, so the others' releases show as ever."""
    x = np.eye(5, dtype="float32")
    x[1, 3], x[2, 0], x[4] = np.nan, np.inf, 3e38
    model = Indicator(5)
    model.compile(DPKerasSGDOptimizer(learning_rate=1.0, l2_norm_clip=1.0, noise_multiplier=0.0))
    for variable in model.trainable_variables:
        variable.assign([1.0, -1.0, 1.0, 1.0, 1.0])
    before = model.v.numpy()
    model.fit(x, batch_size=5, epochs=1, verbose=0, validate=False)
    # The last record's gradient is finite and huge, but its loss overflows.
    np.testing.assert_allclose((model.v.numpy() - before) * 5, [1, 0, 0, 1, 0], atol=1e-5)


def _normalised(training, conditional):
    class Normalised(dpvi.DPModel):
        def __init__(self):
            super().__init__()
            self.normalise = keras.layers.BatchNormalization()
            self.dense = keras.layers.Dense(1)

        def call(self, x, training=None):
            return self.dense(self.normalise(x, training=training))

        def record_loss(self, x, y):
            switch = tf.constant(1.0) * y > -1.0 if conditional and training else training
            return tf.square(self(x[None], training=switch)[0, 0] - y)

    model = Normalised()
    model.compile(DPKerasSGDOptimizer(learning_rate=0.1, l2_norm_clip=1.0, noise_multiplier=1.0))
    return model


@pytest.mark.parametrize("conditional", [False, True])
def test_a_loss_that_remembers_records_is_refused(conditional):
    """C1, C7, C8: moving averages of batch normalisation would hold records exactly; nothing is spent or written."""
    model = _normalised(True, conditional)
    x = np.full((20, 2), 7.0, "float32")
    with pytest.raises(ValueError, match="writes to a variable"):
        model.fit(x, x[:, 0], batch_size=5, epochs=1, verbose=0)
    assert model.privacy_ledger.num_releases == 0
    np.testing.assert_array_equal(model.normalise.moving_mean, [0.0, 0.0])


def test_a_loss_that_reads_what_was_remembered_is_fine():
    """C1: with training=False batch normalisation is a fixed map, and its averages stay."""
    model = _normalised(False, False)
    x = np.full((20, 2), 7.0, "float32")
    model.fit(x, x[:, 0], batch_size=5, epochs=1, verbose=0)
    np.testing.assert_array_equal(model.normalise.moving_mean, [0.0, 0.0])
    assert np.any(model.dense.bias.numpy() != 0)
