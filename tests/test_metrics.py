"""Privatised metrics: what they show is right, bounded record by record, noisy as stated, and paid for (C1, C3, C7, 5.5)."""

from __future__ import annotations

import copy
import csv
import math

import dp_accounting
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp
from dp_accounting import NeighboringRelation
from support import internals
from support import statistics as tests_of
from support.siblings import slow
from support.toy import Toy

import tfp_dpvi as dpvi
from tfp_dpvi import gradients, keras
from tfp_dpvi.gradients import Clip, ClippedSum, PerExample
from tfp_dpvi.gradients.joint import joint_release
from tfp_dpvi.metrics import EpsilonSpent, PrivateClippedFraction, PrivateELBO, PrivateMetric
from tfp_dpvi.optimizers import privatize
from tfp_dpvi.privacy import FullBatch, PoissonSampling, PrivacyPlan, Sensitivity

tfd = tfp.distributions
RNG = np.random.default_rng(0)
X = RNG.normal(size=(60, 2)).astype("float32")
Y = (X[:, 0] > 0).astype("int32")


def logistic(**kwargs):
    prior = tfd.Sample(tfd.Normal(0.0, 1.0), 2)
    return dpvi.DPVI(
        prior,
        lambda params, x: tfd.Bernoulli(logits=tf.linalg.matvec(x, params)),
        **kwargs,
        clipping="flat",
    )


def fitted(
    model,
    metrics,
    *,
    epochs=2,
    batch_size=20,
    callbacks=None,
    noise=1.0,
    x=X,
    y=Y,
    clip=1.0,
    **kwargs,
):
    optimizer = dpvi.optimizers.DPKerasAdamOptimizer(
        l2_norm_clip=clip, noise_multiplier=noise, learning_rate=0.1
    )
    model.compile(optimizer, metrics=metrics, delta=1e-5, **kwargs)
    return model.fit(x, y, batch_size=batch_size, epochs=epochs, verbose=0, callbacks=callbacks)


# ------------------------------------------------------------------ values, with noise off


class Located(dpvi.DPModel):
    """Loss |x - loc|^2 / 2 + loc^2 / N: everything about it is known."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.loc = self.add_weight("loc", shape=[], initializer="zeros")

    def call(self, x):
        return x - self.loc

    def record_loss(self, x, y=None):
        return 0.5 * tf.square(x - self.loc) + (0.0 if y is None else 0.0 * y)

    def data_independent_loss(self, num_records):
        return tf.square(self.loc) / num_records


@pytest.mark.parametrize("jit_compile", [slow(False), True])
def test_the_shown_value_is_the_mean_of_clipped_values_minus_the_exact_part(jit_compile):
    values = np.array([0.1, -0.5, 3.0, 10.0, 0.2], "float32")
    model = Located()
    model.loc.assign(0.25)
    history = fitted(
        model,
        [PrivateELBO(-2.0, -0.01), PrivateClippedFraction()],
        epochs=1,
        batch_size=5,
        noise=0.0,
        clip=0.7,
        x=values,
        y=None,
        jit_compile=jit_compile,
    )
    losses = 0.5 * (values - 0.25) ** 2
    expected = np.clip(-losses, -2.0, -0.01).mean() - 0.25**2 / 5
    assert history.history["private_elbo"][0] == pytest.approx(expected, rel=1e-5)
    assert history.history["private_clipped_fraction"][0] == pytest.approx(
        np.mean(np.abs(values - 0.25) > 0.7)
    )


def test_an_epoch_shows_the_mean_of_its_steps_whatever_the_execution():
    """One value for each of 6 steps, in executions of 4 and 2: the mean weighs steps equally."""
    shown = []
    for steps_per_execution in (1, 4):
        model = Located(seed=3)
        history = fitted(
            model,
            [PrivateELBO(-2.0, 0.0)],
            epochs=1,
            batch_size=10,
            noise=2.0,
            x=X[:, 0],
            y=None,
            steps_per_execution=steps_per_execution,
            jit_compile=False,
        )
        shown.append(history.history["private_elbo"][0])
    np.testing.assert_allclose(shown, shown[0], rtol=1e-5)


def test_of_dpvi_the_bound_is_that_of_the_steps_own_draw():
    model = logistic(seed=1)
    history = fitted(
        model,
        [PrivateELBO(-50.0, 10.0)],
        epochs=1,
        batch_size=60,
        noise=0.0,
        unsafe_training_metrics=True,
        jit_compile=False,
    )
    again = logistic(seed=1)
    fitted(again, None, epochs=1, batch_size=60, noise=0.0, jit_compile=False)
    start = logistic(seed=1)  # Its variables are what the only step saw.
    from tfp_dpvi import _random

    key = _random.keys_of_step(tf.constant(_random.new_key(1)), tf.constant(0, tf.int64))[1]
    params, log_q = start.surrogate_posterior.experimental_sample_and_log_prob(
        seed=_random.tfp_seed(key)
    )
    exact = (
        tf.reduce_mean(start.likelihood(params, X).log_prob(Y))
        - (log_q - start.prior.log_prob(params)) / 60
    )
    assert history.history["private_elbo"][0] == pytest.approx(float(exact), rel=1e-4)
    for one, other in zip(model.trainable_variables, again.trainable_variables, strict=True):
        np.testing.assert_allclose(
            one, other, rtol=1e-6
        )  # Looking changes nothing but the noise's scale, which is 0.


@pytest.mark.slow  # `models/test_keras_model.py` has the clipped share of the ghost engine.
def test_of_a_dpvae_the_bound_and_the_clipped_share_come_from_the_ghost_engine():
    encoder = keras.Sequential(
        [
            keras.layers.Dense(4),
            tfp.layers.DistributionLambda(
                lambda t: tfd.Independent(tfd.Normal(t[..., :2], tf.nn.softplus(t[..., 2:])), 1)
            ),
        ]
    )
    decoder = keras.Sequential([keras.layers.Dense(2), tfp.layers.IndependentNormal(1)])
    model = dpvi.DPVAE(encoder, decoder, tfd.Independent(tfd.Normal([0.0, 0.0], 1.0), 1))
    x = X[:, :1]
    history = fitted(
        model,
        [PrivateELBO(-1e6, 1e6), PrivateClippedFraction()],
        x=x,
        y=None,
        noise=0.0,
        epochs=1,
        batch_size=60,
        clip=1.0,
        unsafe_training_metrics=True,
    )
    assert history.history["private_elbo"][0] == pytest.approx(
        -history.history["unsafe_loss"][0], rel=1e-4
    )
    assert 0.0 < history.history["private_clipped_fraction"][0] <= 1.0


# ------------------------------------------------------------------ sensitivity: replay on neighbours


def check_replay(metric, centred=PrivateMetric.sum_of):
    """C3: removing a record moves the centred sum by at most half the range, replacing one by at most the range."""
    rng = np.random.default_rng(1)
    half = (metric.high - metric.low) / 2
    odd = [0.0, -1e30, 1e30, np.inf, -np.inf, np.nan, 3.0]

    traced = tf.function(lambda *seen: centred(metric, PerExample(*seen)), autograph=False)

    def total(losses, kept, clipped):
        return float(
            traced(tf.constant(losses, tf.float64), tf.constant(clipped), tf.constant(kept))
        )

    for value in odd:
        losses, clipped = rng.normal(size=8) * 5, rng.uniform(size=8) < 0.5
        losses[3] = value
        kept = np.full(8, True)
        kept[3] = np.isfinite(value) and rng.uniform() < 0.9
        with_it = total(losses, kept, clipped)
        without = total(losses, kept & (np.arange(8) != 3), clipped)
        assert abs(with_it - without) <= half * (1 + 1e-9)
        for other in odd:
            replaced, flags = losses.copy(), clipped.copy()
            replaced[3], flags[3] = other, not clipped[3]
            changed = kept.copy()
            changed[3] = np.isfinite(other)
            assert abs(total(replaced, changed, flags) - with_it) <= 2 * half * (1 + 1e-9)
    everything = total(np.full(8, -1e9), np.full(8, True), np.full(8, True))
    assert abs(everything) == pytest.approx(
        8 * half
    )  # The bound is reached: it is no larger than it must be.


def unclipped(metric, statistics):
    return tf.reduce_sum(-statistics.losses)


def not_centred(metric, statistics):
    values = tf.clip_by_value(-statistics.losses, metric.low, metric.high)
    return tf.reduce_sum(tf.where(statistics.kept, values, tf.zeros_like(values)))


def padding_counted(metric, statistics):
    return 1.5 * PrivateMetric.sum_of(
        metric, statistics._replace(kept=tf.ones_like(statistics.kept))
    )


def test_a_record_moves_the_sum_by_half_the_range_at_most():
    check_replay(PrivateELBO(-4.0, 1.0))
    check_replay(PrivateClippedFraction())


@pytest.mark.parametrize("broken", [unclipped, not_centred, padding_counted])
def test_broken_bounds_are_caught(broken):
    with pytest.raises(AssertionError):
        check_replay(PrivateELBO(-4.0, 1.0), broken)


class Column(PrivateMetric):
    """Of shape [n, 1], which would broadcast against [n] and count everybody n times."""

    def __init__(self):
        super().__init__(0.0, 1.0, name="column")

    def record_values(self, statistics):
        return statistics.losses[:, None]


class Mean(Column):
    def record_values(self, statistics):
        return tf.reduce_mean(statistics.losses)


class Keeping(Column):
    def build_total(self):
        self.total = self.add_weight("total", shape=[], initializer="zeros")
        return self

    def record_values(self, statistics):
        self.total.assign_add(tf.reduce_sum(tf.cast(statistics.losses, self.total.dtype)))
        return statistics.losses


@pytest.mark.parametrize(
    ("make_metric", "words"),
    [
        (Column, "one value for each record"),
        (Mean, "one value"),
        (lambda: Keeping().build_total(), "writes"),
    ],
)
def test_values_that_are_no_records_own_are_refused(make_metric, words):
    model = Located()
    with pytest.raises(ValueError, match=words):
        fitted(model, make_metric(), x=X[:, 0], y=None)
    assert model.privacy_ledger.num_releases == 0


def test_what_was_priced_cannot_be_changed():
    metric = PrivateELBO(-1.0, 0.0)
    model = Located()

    class Cheat(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            metric.noise_ratio = 1e-3

    with pytest.raises(RuntimeError, match="A metric changed"):
        fitted(model, metric, x=X[:, 0], y=None, epochs=3, batch_size=60, callbacks=[Cheat()])
    assert model.privacy_ledger.num_releases == 1


def test_records_that_contribute_nothing_to_the_gradient_add_nothing():
    """C8: a record with a NaN loss, and padding, are left out of the sum; the mean then falls towards the middle."""
    x = X[:, 0].copy()
    x[:30] = np.nan
    model = Located()
    optimizer = dpvi.optimizers.DPKerasSGDOptimizer(
        l2_norm_clip=1.0, noise_multiplier=0.0, learning_rate=1e-6
    )
    model.compile(optimizer, metrics=[PrivateELBO(-2.0, -1.0)], delta=1e-5)
    history = model.fit(x, batch_size=60, verbose=0, validate=False)
    clipped = np.clip(-0.5 * x[30:] ** 2, -2.0, -1.0) + 1.5
    assert history.history["private_elbo"][0] == pytest.approx(-1.5 + clipped.sum() / 60, abs=1e-5)


# ------------------------------------------------------------------ noise


def check_noise(release):
    """C1: the metric's noise has standard deviation z r (high - low) / (2 q N), independent of the gradient's.

    300,000 draws of each: 1 % is 7.7 standard errors, so a sound mechanism fails once in 10^13 runs.
    """
    metric, clip, z, expected, num = (
        PrivateELBO(-3.0, 5.0, noise_ratio=2.5),
        0.5,
        1.5,
        40.0,
        300_000,
    )
    sensitivity = gradients.joint_sensitivity([metric], Sensitivity())
    clipped = ClippedSum([tf.zeros([num], tf.float64)], Clip(clip))
    joint = release([metric], clipped, [tf.zeros([num], tf.float64)], sensitivity)
    private = privatize(
        joint, noise_multiplier=z, key=tests_of.fresh_key(), expected_batch_size=expected
    )
    assert len(private.tensors) == 1
    assert len(private.joint) == 1
    gradient, shown = private.tensors[0].numpy(), private.joint[0].numpy()
    assert gradient.std() == pytest.approx(z * clip / expected, rel=0.01)
    assert shown.std() == pytest.approx(z * 2.5 * 4.0 / expected, rel=0.01)
    assert abs(np.corrcoef(gradient, shown)[0, 1]) < 8 / math.sqrt(num)


def test_the_noise_is_as_stated():
    check_noise(joint_release)


def _without_noise(metrics, clipped, sums, sensitivity):
    joint = joint_release(metrics, clipped, sums, sensitivity)
    return ClippedSum(joint.tensors, joint.clip, sensitivity, [*joint.noise_scales[:-1], 0.0], 1)


def _half_noise(metrics, clipped, sums, sensitivity):
    joint = joint_release(metrics, clipped, sums, sensitivity)
    return ClippedSum(
        joint.tensors,
        joint.clip,
        sensitivity,
        [*joint.noise_scales[:-1], joint.noise_scales[-1] / 2],
        1,
    )


def _gradient_paid_less(metrics, clipped, sums, sensitivity):
    joint = joint_release(metrics, clipped, sums, sensitivity)
    return ClippedSum(joint.tensors, joint.clip, sensitivity, [0.9, joint.noise_scales[-1]], 1)


@pytest.mark.parametrize("broken", [_without_noise, _half_noise, _gradient_paid_less])
def test_broken_noise_is_caught(broken):
    with pytest.raises(AssertionError):
        check_noise(broken)


# ------------------------------------------------------------------ price


def check_price(joint_sensitivity):
    """Full batches: dp_accounting's own composition of the two Gaussians on the same records."""
    metrics = [PrivateELBO(-3.0, 5.0, noise_ratio=2.0), PrivateClippedFraction(noise_ratio=4.0)]
    sensitivity = joint_sensitivity(metrics, Sensitivity())
    plan = PrivacyPlan(
        sampling=FullBatch(), noise_multiplier=3.0, num_releases=7, sensitivity=sensitivity
    )
    accountant = dp_accounting.pld.PLDAccountant()
    for multiplier in (3.0, 6.0, 12.0):
        accountant.compose(dp_accounting.GaussianDpEvent(multiplier), 7)
    assert plan.epsilon(1e-5) == pytest.approx(accountant.get_epsilon(1e-5), rel=2e-3)
    replace = plan.replace(neighboring_relation=NeighboringRelation.REPLACE_ONE)
    accountant = dp_accounting.pld.PLDAccountant()
    for multiplier in (1.5, 3.0, 6.0):
        accountant.compose(dp_accounting.GaussianDpEvent(multiplier), 7)
    assert replace.epsilon(1e-5) == pytest.approx(accountant.get_epsilon(1e-5), rel=2e-3)


def test_the_price_is_that_of_both_releases():
    check_price(gradients.joint_sensitivity)


def test_sampled_the_price_is_that_of_one_gaussian_on_one_sample():
    """Section 5.5 with dp_accounting: z = (z_1^-2 + z_2^-2)^-1/2 under Poisson sampling."""
    sensitivity = gradients.joint_sensitivity(
        [PrivateELBO(0.0, 1.0, noise_ratio=2.0)], Sensitivity()
    )
    plan = PrivacyPlan(
        sampling=PoissonSampling(0.02),
        noise_multiplier=1.2,
        num_releases=100,
        sensitivity=sensitivity,
    )
    z = (1.2**-2 + 2.4**-2) ** -0.5
    accountant = dp_accounting.pld.PLDAccountant()
    accountant.compose(
        dp_accounting.PoissonSampledDpEvent(0.02, dp_accounting.GaussianDpEvent(z)), 100
    )
    assert plan.epsilon(1e-5) == pytest.approx(accountant.get_epsilon(1e-5), rel=2e-3)


def _free(metrics, gradient):
    return gradient


def _width_for_half(metrics, gradient):
    doubled = [PrivateELBO(0.0, 1.0, noise_ratio=2 * metric.noise_ratio) for metric in metrics]
    for number, metric in enumerate(doubled):
        metric._name = f"metric_{number}"
    return gradients.joint_sensitivity(doubled, gradient)


@pytest.mark.parametrize("broken", [_free, _width_for_half])
def test_broken_prices_are_caught(broken):
    with pytest.raises(AssertionError):
        check_price(broken)


def test_a_fit_pays_for_its_metrics_and_the_report_names_them():
    with_metrics, without = Toy(2), Toy(2)
    for model, metrics in (
        (with_metrics, [PrivateELBO(-5.0, 0.0, noise_ratio=2.0)]),
        (without, None),
    ):
        model.compile(
            dpvi.optimizers.DPKerasAdamOptimizer(l2_norm_clip=1.0),
            epsilon=1.0,
            delta=1e-5,
            metrics=metrics,
        )
        model.fit(X, Y, batch_size=60, epochs=3, verbose=0)
    # One Gaussian: the metric takes 1 + 1/4 of the precision, to what calibration resolves.
    ratio = with_metrics.privacy_plan.noise_multiplier / without.privacy_plan.noise_multiplier
    assert ratio == pytest.approx(math.sqrt(1.25), rel=5e-3)
    report = with_metrics.privacy_report()
    assert 0.99 <= report.epsilon <= 1.0
    assert report.to_json()["releases"][0]["metrics"] == ["private_elbo"]
    assert "private_elbo: privatised, released with the steps and included" in " ".join(
        str(report).split()
    )
    assert "Metrics:" not in str(without.privacy_report())
    assert PrivacyPlan.from_json(with_metrics.privacy_plan.to_json()) == with_metrics.privacy_plan


def test_termwise_sensitivities_are_joined_in_their_own_geometry():
    joint = gradients.joint_sensitivity(
        [PrivateELBO(0.0, 1.0, noise_ratio=2.0)], Sensitivity(1.5, 2.5)
    )
    assert joint.add_or_remove == pytest.approx(math.sqrt(1.5**2 + 0.25))
    assert joint.replace == pytest.approx(math.sqrt(2.5**2 + 1.0))


# ------------------------------------------------------------------ in Keras


def test_callbacks_work_on_the_private_values(tmp_path):
    model = Toy(2)
    seen = []
    callbacks = [
        keras.callbacks.EarlyStopping(
            monitor="private_elbo", mode="max", patience=1, min_delta=1e9
        ),
        keras.callbacks.ReduceLROnPlateau(
            monitor="private_elbo", mode="max", patience=1, min_delta=1e9, factor=0.5
        ),
        keras.callbacks.CSVLogger(str(tmp_path / "log.csv")),
        keras.callbacks.ModelCheckpoint(
            str(tmp_path / "best.weights.h5"),
            monitor="private_elbo",
            mode="max",
            save_best_only=True,
            save_weights_only=True,
        ),
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate),
        keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(dict(logs))),
    ]
    history = fitted(
        model, [PrivateELBO(-5.0, 0.0), PrivateClippedFraction()], epochs=9, callbacks=callbacks
    )
    assert len(history.epoch) == 2  # The second epoch could not be better by 1e9.
    assert (tmp_path / "best.weights.h5").exists()
    with (tmp_path / "log.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["private_elbo"]) for row in rows] == pytest.approx(
        history.history["private_elbo"]
    )
    assert set(seen[0]) == {"epsilon", "private_elbo", "private_clipped_fraction", "lr"}
    assert float(model.optimizer.learning_rate) == pytest.approx(0.05)
    assert model.privacy_ledger.num_releases == 2 * 3


def test_an_epoch_starts_anew():
    history = fitted(
        Located(), [PrivateELBO(-1.0, 0.0)], x=X[:, 0], y=None, noise=0.0, epochs=3, batch_size=60
    )
    assert len(set(history.history["private_elbo"])) == 3
    metric = PrivateELBO(-1.0, 0.0)
    metric.add(-0.5, 3)
    metric.add(-1.0, 1)
    assert float(metric.result()) == pytest.approx(-0.625)
    metric.reset_state()
    assert math.isnan(float(metric.result()))


class MeanSquare(PrivateMetric):
    """A user's own."""

    def __init__(self):
        super().__init__(0.0, 4.0, name="mean_square")

    def record_values(self, statistics):
        return tf.square(statistics.losses)


def test_a_metric_of_ones_own_is_one_method():
    history = fitted(Located(), MeanSquare(), x=X[:, 0], y=None, noise=0.0, epochs=1, batch_size=60)
    expected = np.clip((0.5 * X[:, 0] ** 2) ** 2, 0, 4).mean()
    assert history.history["mean_square"][0] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    "metric", [PrivateELBO(-3.0, 0.5, noise_ratio=7.0, name="bound"), PrivateClippedFraction()]
)
def test_round_trip(metric):
    config = keras.utils.serialize_keras_object(metric)
    again = keras.utils.deserialize_keras_object(config)
    assert again.identity == metric.identity
    assert again is not metric


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: PrivateELBO(0.0, 0.0), "low"),
        (lambda: PrivateELBO(1.0, 0.0), "low"),
        (lambda: PrivateELBO(-math.inf, 0.0), "low"),
        (lambda: PrivateELBO(0.0, "1"), "high"),
        (lambda: PrivateELBO(0.0, 1.0, noise_ratio=0.0), "noise_ratio"),
        (lambda: PrivateClippedFraction(noise_ratio=-1.0), "noise_ratio"),
        (lambda: PrivateELBO(0.0, 1.0, name="epsilon"), "name"),
        (lambda: PrivateELBO(0.0, 1.0, name="unsafe_elbo"), "name"),
    ],
)
def test_bad_arguments_are_named(make, words):
    with pytest.raises((ValueError, TypeError), match=words):
        make()


@pytest.mark.parametrize(
    "metrics",
    [
        ["accuracy"],
        "accuracy",
        [keras.metrics.MeanSquaredError()],
        [PrivateELBO(0, 1), PrivateELBO(0, 2)],
    ],
)
def test_exact_metrics_and_double_names_are_refused(metrics):
    model = Toy(2)
    with pytest.raises(ValueError, match="metrics"):
        model.compile(
            dpvi.optimizers.DPKerasSGDOptimizer(l2_norm_clip=1.0),
            epsilon=1.0,
            delta=1e-5,
            metrics=metrics,
        )


def test_metrics_are_part_of_what_the_ledgers_budget_prices():
    """A model whose metrics are costly runs fewer steps under one and the same ledger budget and noise."""
    steps = []
    for metrics in (None, [PrivateELBO(-5.0, 0.0, noise_ratio=1.0)]):
        ledger = dpvi.PrivacyLedger(budget_epsilon=2.0, budget_delta=1e-5)
        model = Toy(2)
        fitted(model, metrics, noise=4.0, epochs=100, batch_size=60, ledger=ledger)
        steps.append(ledger.num_releases)
    assert steps[1] == pytest.approx(steps[0] / 2, abs=1)
    assert internals.most_releases(model, model.privacy_plan) == 0


def test_the_metric_of_what_is_spent_can_be_copied():
    """By Keras's way: from its configuration."""
    assert copy.deepcopy(EpsilonSpent()).name == "epsilon"
