"""`compile(optimizer=)`: TensorFlow Privacy's objects, Keras's objects, and names, as this library's optimizers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tensorflow as tf

import tfp_dpvi as dpvi
from tfp_dpvi import keras
from tfp_dpvi.gradients import Clip, ClippedSum
from tfp_dpvi.optimizers import DPOptimizer, as_dp_optimizer

pytestmark = pytest.mark.smoke

try:
    import tensorflow_privacy
except ImportError:
    tensorflow_privacy = None

needs_tensorflow_privacy = pytest.mark.skipif(
    tensorflow_privacy is None, reason="TensorFlow Privacy is installed with TensorFlow 2.15 only"
)

BATCH = 4.0
CLIP, NOISE = 0.5, 1.75
FAMILIES = {
    "SGD": {"momentum": 0.9, "nesterov": True},
    "Adam": {"beta_1": 0.8, "beta_2": 0.95, "epsilon": 1e-3, "amsgrad": True},
    "Adagrad": {"initial_accumulator_value": 0.3, "epsilon": 1e-3},
}


def theirs(name, prefix="DPKeras", **kwargs):
    """An optimizer of TensorFlow Privacy."""
    maker = getattr(tensorflow_privacy, f"{prefix}{name}Optimizer")
    return maker(
        **{"l2_norm_clip": CLIP, "noise_multiplier": NOISE, "learning_rate": 0.07, **kwargs}
    )


def sums_of(step):
    return tf.constant(np.random.default_rng(step).normal(size=3) * BATCH, tf.float32)


def start():
    return tf.Variable([0.5, -1.0, 2.0])


def private_trajectory(optimizer, steps, noise_multiplier=0.0):
    value = start()
    for step in range(steps):
        private = optimizer.privatize(
            ClippedSum([sums_of(step)], Clip(optimizer.l2_norm_clip)),
            key=tf.constant([3, step], tf.int64),
            expected_batch_size=BATCH,
            noise_multiplier=noise_multiplier,
        )
        optimizer.apply_gradients(zip(private.tensors, [value], strict=True))
    return value.numpy()


def plain_trajectory(optimizer, steps):
    value = start()
    for step in range(steps):
        optimizer.apply_gradients([(sums_of(step) / BATCH, value)])
    return value.numpy()


# ---------------------------------------------------------------------- TensorFlow Privacy


@needs_tensorflow_privacy
@pytest.mark.parametrize("prefix", ["DPKeras", "VectorizedDPKeras"])
@pytest.mark.parametrize("name", FAMILIES)
def test_an_optimizer_of_tensorflow_privacy_is_rebuilt(name, prefix):
    settings = FAMILIES[name]
    ours = as_dp_optimizer(theirs(name, prefix, **settings))

    assert isinstance(ours, DPOptimizer)
    assert type(ours) is getattr(dpvi.optimizers, f"DPKeras{name}Optimizer")
    assert ours.l2_norm_clip == CLIP
    assert ours.noise_multiplier == pytest.approx(NOISE, rel=1e-6)
    for setting, value in {"learning_rate": 0.07, **settings}.items():
        assert ours.get_config()[setting] == pytest.approx(value, rel=1e-6), setting
    plain = getattr(keras.optimizers, name)
    for steps in (1, 10):
        fresh = as_dp_optimizer(theirs(name, prefix, **settings))
        np.testing.assert_allclose(
            private_trajectory(fresh, steps),
            plain_trajectory(plain(learning_rate=0.07, **settings), steps),
            rtol=1e-6,
        )


@needs_tensorflow_privacy
@pytest.mark.parametrize("name", FAMILIES)
def test_its_defaults_are_kept_where_keras_changed_them(name):
    """Legacy and new Keras classes must not differ in what a user never wrote."""
    legacy = getattr(keras.optimizers.legacy, name)(learning_rate=0.07)
    ours = as_dp_optimizer(theirs(name))

    np.testing.assert_allclose(
        private_trajectory(ours, 10), plain_trajectory(legacy, 10), rtol=1e-4
    )


@needs_tensorflow_privacy
@pytest.mark.parametrize("prefix", ["DPKeras", "VectorizedDPKeras"])
def test_its_learning_rate_schedule_is_taken_over(prefix):
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([2], [0.5, 0.01])
    ours = as_dp_optimizer(theirs("SGD", prefix, learning_rate=schedule))

    np.testing.assert_allclose(
        private_trajectory(ours, 5), plain_trajectory(keras.optimizers.SGD(schedule), 5), rtol=1e-6
    )


@needs_tensorflow_privacy
def test_its_noise_is_the_one_that_is_added():
    """False-alarm rate below 1e-12: 100,000 draws give the deviation within 0.0022 (relative), the band is 0.017."""
    optimizer = as_dp_optimizer(theirs("Adam"))
    private = optimizer.privatize(
        ClippedSum([tf.zeros(100_000)], Clip(CLIP)),
        key=tf.constant([1, 2], tf.int64),
        expected_batch_size=BATCH,
    )

    assert private.tensors[0].numpy().std() == pytest.approx(NOISE * CLIP / BATCH, rel=0.017)


@needs_tensorflow_privacy
def test_a_model_compiles_with_it_and_learns_without_calling_its_update(monkeypatch):
    optimizer = theirs("Adam", learning_rate=0.1, noise_multiplier=0.3, l2_norm_clip=1.0)
    for method in ("apply_gradients", "minimize", "_compute_gradients"):
        monkeypatch.setattr(
            type(optimizer),
            method,
            lambda *_: pytest.fail("TensorFlow Privacy's update was called"),
        )
    tfd = dpvi._tf.tfp.distributions
    model = dpvi.DPVI(tfd.Normal(0.0, 10.0), lambda loc: tfd.Normal(loc, 1.0), clipping="flat")
    model.compile(optimizer=optimizer, delta=1e-5)
    model.fit(np.full(100, 3.0, "float32"), batch_size=50, epochs=50, verbose=0)

    # The noise moves the end of the run by about 0.1 * 0.3 a step at most; the start is 0, the records are at 3.
    assert float(model.surrogate_posterior.sample(200).numpy().mean()) == pytest.approx(
        3.0, abs=1.0
    )
    assert model.privacy_report().epsilon > 1.0


@needs_tensorflow_privacy
@pytest.mark.parametrize("prefix", ["DPKeras", "VectorizedDPKeras"])
@pytest.mark.parametrize("number", [1, 5])
def test_microbatches_are_refused(prefix, number):
    with pytest.raises(ValueError, match=rf"num_microbatches={number}, .*each record is clipped"):
        as_dp_optimizer(theirs("SGD", prefix, num_microbatches=number))


@needs_tensorflow_privacy
def test_gradient_accumulation_is_refused():
    with pytest.raises(ValueError, match=r"gradient_accumulation_steps=4.*physical_batch_size"):
        as_dp_optimizer(theirs("Adam", gradient_accumulation_steps=4))


def test_one_without_a_query_is_refused_even_with_another_clip():
    """As TensorFlow Privacy's sparse ones, whose own clip, noise and microbatches would be lost."""
    optimizer = keras.optimizers.legacy.SGD(0.1)
    optimizer._l2_norm_clip, optimizer._noise_multiplier, optimizer._num_microbatches = (
        CLIP,
        NOISE,
        5,
    )
    with pytest.raises(ValueError, match=r"no query|TensorFlow 2.15 only"):
        as_dp_optimizer(optimizer, l2_norm_clip=1.0)


@needs_tensorflow_privacy
def test_tree_aggregation_is_refused():
    optimizer = tensorflow_privacy.DPFTRLTreeAggregationOptimizer(
        l2_norm_clip=CLIP, noise_multiplier=NOISE, var_list_or_model=[start()], learning_rate=0.1
    )
    with pytest.raises(ValueError, match=r"TreeResidualSumQuery; only the plain Gaussian query"):
        as_dp_optimizer(optimizer)


@needs_tensorflow_privacy
def test_a_generic_optimizer_with_the_gaussian_query_is_taken_and_another_query_is_not():
    gaussian = tensorflow_privacy.GaussianSumQuery(l2_norm_clip=CLIP, stddev=CLIP * NOISE)
    ours = as_dp_optimizer(tensorflow_privacy.GenericDPSGDOptimizer(gaussian, learning_rate=0.07))
    assert (ours.l2_norm_clip, ours.noise_multiplier) == (CLIP, pytest.approx(NOISE, rel=1e-6))

    other = tensorflow_privacy.NoPrivacySumQuery()
    with pytest.raises(ValueError, match="NoPrivacySumQuery; only the plain Gaussian query"):
        as_dp_optimizer(tensorflow_privacy.GenericDPSGDOptimizer(other, learning_rate=0.07))


@needs_tensorflow_privacy
@pytest.mark.parametrize("name", ["Adam", "Adagrad"])
def test_slots_of_a_used_one_are_refused(name):
    optimizer = theirs(name, "VectorizedDPKeras")
    value = start()
    with tf.GradientTape() as tape:
        losses = tf.reduce_sum(value) * tf.ones(2)
    optimizer.minimize(losses, [value], tape=tape)

    with pytest.raises(ValueError, match=r"slot variables.*new one"):
        as_dp_optimizer(optimizer)


@needs_tensorflow_privacy
def test_slots_of_a_restored_one_are_refused(tmp_path):
    trained = theirs("Adam", "VectorizedDPKeras")
    value = start()
    with tf.GradientTape() as tape:
        losses = tf.reduce_sum(value) * tf.ones(2)
    trained.minimize(losses, [value], tape=tape)
    path = tf.train.Checkpoint(optimizer=trained, value=value).write(str(tmp_path / "checkpoint"))
    restored = theirs("Adam", "VectorizedDPKeras")
    tf.train.Checkpoint(optimizer=restored, value=start()).restore(path)

    with pytest.raises(ValueError, match="slot variables"):
        as_dp_optimizer(restored)


@needs_tensorflow_privacy
@pytest.mark.parametrize("prefix", ["DPKeras", "VectorizedDPKeras"])
def test_decay_is_refused_with_the_way_out(prefix):
    with pytest.raises(ValueError, match=r"decay=0\.01.*LearningRateSchedule"):
        as_dp_optimizer(theirs("SGD", prefix, decay=0.01))


@needs_tensorflow_privacy
@pytest.mark.parametrize("second", [{"l2_norm_clip": 1.0}, {"noise_multiplier": 1.0}])
def test_a_second_clip_or_noise_is_refused(second):
    (argument,) = second
    for optimizer in (
        theirs("SGD"),
        dpvi.optimizers.DPKerasSGDOptimizer(l2_norm_clip=CLIP, noise_multiplier=NOISE),
    ):
        with pytest.raises(
            ValueError,
            match=rf"{argument}=1\.0 was passed to compile, but the optimizer has its own",
        ):
            as_dp_optimizer(optimizer, **second)


@needs_tensorflow_privacy
@pytest.mark.parametrize(
    "clip",
    [
        0.0,
        -1.0,
        math.nan,
    ],
)
def test_a_senseless_clip_of_theirs_is_refused(clip):
    with pytest.raises(ValueError, match="l2_norm_clip must be a positive number"):
        as_dp_optimizer(theirs("SGD", "VectorizedDPKeras", l2_norm_clip=clip))


@needs_tensorflow_privacy
@pytest.mark.parametrize("noise", [-1.0, math.nan, math.inf])
def test_senseless_noise_of_theirs_is_refused(noise):
    with pytest.raises((ValueError, TypeError), match="noise_multiplier"):
        as_dp_optimizer(theirs("SGD", "VectorizedDPKeras", noise_multiplier=noise))


# ---------------------------------------------------------------------- Keras objects and names

PLAIN = [
    ("SGD", {"learning_rate": 0.2, "momentum": 0.5}),
    ("Adam", {"learning_rate": 0.2, "beta_1": 0.7, "use_ema": True, "weight_decay": 0.1}),
    ("Adagrad", {"learning_rate": 0.2, "initial_accumulator_value": 0.5}),
    ("RMSprop", {"learning_rate": 0.2, "rho": 0.5, "centered": True}),
    ("Nadam", {"learning_rate": 0.2, "epsilon": 1e-4}),
    ("Adamax", {"learning_rate": 0.2}),
    ("Adadelta", {"learning_rate": 0.2, "rho": 0.5}),
    ("Ftrl", {"learning_rate": 0.2, "l1_regularization_strength": 0.1}),
    ("AdamW", {"learning_rate": 0.2, "weight_decay": 0.3}),
    ("Lion", {"learning_rate": 0.2}),
    ("Adafactor", {"learning_rate": 0.2, "relative_step": False}),
]


@pytest.mark.parametrize(("name", "settings"), PLAIN, ids=[name for name, _ in PLAIN])
def test_a_keras_optimizer_with_a_clip_is_rebuilt(name, settings):
    keras_class = getattr(keras.optimizers, name)
    ours = as_dp_optimizer(keras_class(**settings), l2_norm_clip=2.0, noise_multiplier=0.5)

    assert isinstance(ours, DPOptimizer)
    assert isinstance(ours, keras_class)
    assert (ours.l2_norm_clip, ours.noise_multiplier) == (2.0, 0.5)
    np.testing.assert_allclose(
        private_trajectory(ours, 10),
        plain_trajectory(keras_class(**settings), 10),
        rtol=1e-6,
        err_msg=name,
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_a_legacy_keras_optimizer_with_a_clip_is_rebuilt(name):
    settings = {"learning_rate": 0.07, **FAMILIES[name]}
    ours = as_dp_optimizer(getattr(keras.optimizers.legacy, name)(**settings), l2_norm_clip=2.0)

    assert type(ours) is getattr(dpvi.optimizers, f"DPKeras{name}Optimizer")
    assert ours.noise_multiplier is None
    plain = getattr(keras.optimizers, name)(**settings)
    np.testing.assert_allclose(private_trajectory(ours, 10), plain_trajectory(plain, 10), rtol=1e-6)


@pytest.mark.parametrize("name", ["adam", "Adam", "sgd", "adagrad", "rmsprop", "nadam"])
def test_a_name_with_a_clip_is_enough(name):
    ours = as_dp_optimizer(name, l2_norm_clip=2.0)

    assert isinstance(ours, DPOptimizer)
    assert isinstance(ours, type(keras.optimizers.get(name)))
    assert (ours.l2_norm_clip, ours.noise_multiplier) == (2.0, None)


def test_a_serialised_configuration_is_taken():
    plain = keras.optimizers.serialize(keras.optimizers.Adam(0.25))
    assert as_dp_optimizer(plain, l2_norm_clip=2.0).get_config()["learning_rate"] == pytest.approx(
        0.25
    )

    private = keras.optimizers.serialize(
        dpvi.optimizers.DPKerasAdamOptimizer(l2_norm_clip=3.0, noise_multiplier=1.0)
    )
    ours = as_dp_optimizer(private)
    assert (type(ours), ours.l2_norm_clip) == (dpvi.optimizers.DPKerasAdamOptimizer, 3.0)


def test_one_of_this_library_is_returned_as_it_is():
    mine = dpvi.optimizers.DPKerasAdamOptimizer(l2_norm_clip=1.0)
    assert as_dp_optimizer(mine) is mine


@pytest.mark.parametrize(
    "optimizer",
    ["adam", keras.optimizers.Adam(), keras.optimizers.legacy.Adam()],
    ids=["name", "object", "legacy"],
)
def test_a_plain_optimizer_without_a_clip_is_refused(optimizer):
    with pytest.raises(ValueError, match=r"has no clip: pass compile\(l2_norm_clip="):
        as_dp_optimizer(optimizer)


@pytest.mark.parametrize("clip", [0, -1.0, math.nan, True, "1"])
def test_a_senseless_clip_for_a_plain_optimizer_is_refused(clip):
    with pytest.raises(ValueError, match="l2_norm_clip must be a positive number"):
        as_dp_optimizer("adam", l2_norm_clip=clip)


@pytest.mark.parametrize("noise", [-1.0, math.nan, math.inf, True, "1"])
def test_senseless_noise_for_a_plain_optimizer_is_refused(noise):
    with pytest.raises((ValueError, TypeError), match="noise_multiplier"):
        as_dp_optimizer("adam", l2_norm_clip=1.0, noise_multiplier=noise)


def test_slots_of_a_used_keras_optimizer_are_refused():
    optimizer = keras.optimizers.Adam()
    plain_trajectory(optimizer, 1)
    with pytest.raises(ValueError, match=r"Adam\(\.\.\.\) has been used or restored"):
        as_dp_optimizer(optimizer, l2_norm_clip=1.0)


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match="'adamm' is no Keras optimizer"):
        as_dp_optimizer("adamm", l2_norm_clip=1.0)


@pytest.mark.parametrize("wrong", [3, object(), keras.optimizers.Adam, lambda: None])
def test_what_is_no_optimizer_is_refused(wrong):
    with pytest.raises(
        TypeError, match="optimizer must be a DP-Keras optimizer, a Keras optimizer or its name"
    ):
        as_dp_optimizer(wrong, l2_norm_clip=1.0)


def test_a_loss_scale_optimizer_is_refused():
    wrapped = keras.mixed_precision.LossScaleOptimizer(keras.optimizers.Adam())
    with pytest.raises(ValueError, match="LossScaleOptimizer"):
        as_dp_optimizer(wrapped, l2_norm_clip=1.0)


@pytest.mark.skipif(
    not keras.__name__.startswith("tf_keras"), reason="TensorFlow Privacy works on TensorFlow 2.15"
)
def test_on_the_current_stack_an_optimizer_of_tensorflow_privacy_is_refused_by_name():
    class VectorizedDPKerasAdamOptimizer:
        _dp_sum_query = None

    with pytest.raises(
        ValueError, match=r"VectorizedDPKerasAdamOptimizer.* works on TensorFlow 2\.15 only"
    ) as caught:
        as_dp_optimizer(VectorizedDPKerasAdamOptimizer())
    assert len(str(caught.value).splitlines()) <= 2
