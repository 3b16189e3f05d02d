"""DP-Keras optimizers: Keras's own updates, on privatised gradients and on nothing else."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tensorflow as tf

import tfp_dpvi as dpvi
from tfp_dpvi import keras
from tfp_dpvi.gradients import Clip, ClippedSum
from tfp_dpvi.optimizers import UnprivatizedGradientError

optimizers = dpvi.optimizers
BATCH = 8.0

CLASSES = [
    ("SGD", optimizers.DPKerasSGDOptimizer, {"momentum": 0.9, "nesterov": True}),
    (
        "Adam",
        optimizers.DPKerasAdamOptimizer,
        {"beta_1": 0.8, "beta_2": 0.95, "epsilon": 1e-3, "amsgrad": True},
    ),
    (
        "Adagrad",
        optimizers.DPKerasAdagradOptimizer,
        {"initial_accumulator_value": 0.3, "epsilon": 1e-3},
    ),
]


def variables(dtype="float32"):
    return [
        tf.Variable(np.array([0.5, -1.0, 2.0], dtype)),
        tf.Variable(np.array([[0.25, -0.75]], dtype)),
    ]


def sums_of(step, dtype="float32"):
    generator = np.random.default_rng(step)
    return [
        tf.constant(generator.normal(size=3) * BATCH, dtype),
        tf.constant(generator.normal(size=(1, 2)) * BATCH, dtype),
    ]


def key(step=0):
    return tf.constant([17, step], tf.int64)


def privatize(optimizer, step=0, dtype="float32", **kwargs):
    clipped = ClippedSum(sums_of(step, dtype), Clip(optimizer.l2_norm_clip))
    return optimizer.privatize(clipped, key=key(step), expected_batch_size=BATCH, **kwargs).tensors


def private_trajectory(optimizer, steps, dtype="float32"):
    values = variables(dtype)
    for step in range(steps):
        optimizer.apply_gradients(zip(privatize(optimizer, step, dtype), values, strict=True))
    return [v.numpy() for v in values]


def keras_trajectory(optimizer, steps, dtype="float32"):
    values = variables(dtype)
    for step in range(steps):
        optimizer.apply_gradients(
            [(s / BATCH, v) for s, v in zip(sums_of(step, dtype), values, strict=True)]
        )
    return [v.numpy() for v in values]


def adam(**kwargs):
    return optimizers.DPKerasAdamOptimizer(
        **{"l2_norm_clip": 1.0, "noise_multiplier": 1.0, **kwargs}
    )


# ---------------------------------------------------------------------- the updates are Keras's


@pytest.mark.parametrize("steps", [1, 10])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("name", "dp_class", "settings"), CLASSES)
def test_without_noise_each_step_is_the_keras_optimizers(name, dp_class, settings, dtype, steps):
    ours = dp_class(learning_rate=0.07, l2_norm_clip=3.0, noise_multiplier=0.0, **settings)
    plain = getattr(keras.optimizers, name)(learning_rate=0.07, **settings)

    for mine, theirs in zip(
        private_trajectory(ours, steps, dtype), keras_trajectory(plain, steps, dtype), strict=True
    ):
        assert mine.dtype == dtype
        np.testing.assert_allclose(mine, theirs, rtol=1e-6 if dtype == "float32" else 1e-13)
        assert not np.isin(
            mine, next(v.numpy() for v in variables(dtype))
        ).any()  # It has moved at all.


@pytest.mark.parametrize(
    "name", ["RMSprop", "Nadam", "Adamax", "Adadelta", "Ftrl", "AdamW", "Adafactor", "Lion"]
)
def test_the_factory_takes_any_other_keras_optimizer(name):
    keras_class = getattr(keras.optimizers, name)
    made = optimizers.make_dp_optimizer_class(keras_class)

    assert issubclass(made, keras_class)
    assert made.__name__ == f"DPKeras{name}Optimizer"
    ours = made(learning_rate=0.05, l2_norm_clip=2.0, noise_multiplier=0.0)
    for mine, theirs in zip(
        private_trajectory(ours, 5),
        keras_trajectory(keras_class(learning_rate=0.05), 5),
        strict=True,
    ):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6)


def test_the_factory_gives_the_same_class_twice_and_leaves_its_own_alone():
    made = optimizers.make_dp_optimizer_class(keras.optimizers.RMSprop)

    assert optimizers.make_dp_optimizer_class(keras.optimizers.RMSprop) is made
    assert optimizers.make_dp_optimizer_class(made) is made
    assert (
        optimizers.make_dp_optimizer_class(keras.optimizers.Adam) is optimizers.DPKerasAdamOptimizer
    )


@pytest.mark.parametrize(
    "wrong", [keras.optimizers.legacy.Adam, int, "Adam", None, keras.optimizers.Adam()]
)
def test_the_factory_refuses_what_is_no_keras_optimizer_class(wrong):
    with pytest.raises(TypeError, match="keras_optimizer_class"):
        optimizers.make_dp_optimizer_class(wrong)


def test_a_schedule_moves_the_rate_step_by_step():
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([2], [0.5, 0.01])
    ours = optimizers.DPKerasSGDOptimizer(
        learning_rate=schedule, l2_norm_clip=1.0, noise_multiplier=0.0
    )

    for mine, theirs in zip(
        private_trajectory(ours, 5),
        keras_trajectory(keras.optimizers.SGD(schedule), 5),
        strict=True,
    ):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6)


def test_ema_and_weight_decay_act_as_in_keras():
    settings = {"learning_rate": 0.1, "use_ema": True, "ema_momentum": 0.5, "weight_decay": 0.02}
    ours = adam(noise_multiplier=0.0, **settings)
    plain = keras.optimizers.Adam(**settings)
    results = []
    for optimizer, run in (
        (ours, privatize),
        (plain, lambda _, step: [s / BATCH for s in sums_of(step)]),
    ):
        values = variables()
        for step in range(6):
            optimizer.apply_gradients(zip(run(optimizer, step), values, strict=True))
        last = values[0].numpy()
        optimizer.finalize_variable_values(values)
        assert np.abs(values[0].numpy() - last).max() > 1e-3  # The average is not the last iterate.
        results.append([v.numpy() for v in values])

    for mine, theirs in zip(*results, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6)


# ---------------------------------------------------------------------- the noise is there


def test_the_noise_has_the_stated_standard_deviation():
    """False-alarm rate below 1e-12: the relative error of 200,000 draws' deviation is 0.0016, the band is 0.012."""
    optimizer = adam(l2_norm_clip=0.5, noise_multiplier=3.0)
    zeros = ClippedSum([tf.zeros(200_000)], Clip(0.5))
    noise = optimizer.privatize(zeros, key=key(), expected_batch_size=BATCH).tensors[0].numpy()

    assert noise.std() == pytest.approx(3.0 * 0.5 / BATCH, rel=0.012)
    assert abs(noise.mean()) < 8 * 3.0 * 0.5 / BATCH / math.sqrt(len(noise))


def test_a_multiplier_given_to_privatize_takes_the_place_of_a_missing_one():
    optimizer = adam(noise_multiplier=None)
    with pytest.raises(ValueError, match="noise_multiplier is None"):
        privatize(optimizer)

    quiet = privatize(optimizer, noise_multiplier=0.0)[0].numpy()
    np.testing.assert_allclose(quiet, sums_of(0)[0] / BATCH, rtol=1e-6)
    loud = privatize(optimizer, noise_multiplier=tf.constant(2.0))[0].numpy()
    assert np.abs(loud - quiet).min() > 1e-6


def test_noise_depends_on_the_key_and_on_the_variable_alone():
    optimizer = adam()
    first, again, other = privatize(optimizer, 1), privatize(optimizer, 1), privatize(optimizer, 2)

    np.testing.assert_array_equal(first[0], again[0])
    residual = [a.numpy() - s.numpy() / BATCH for a, s in zip(first, sums_of(1), strict=True)]
    residual_other = other[0].numpy() - sums_of(2)[0].numpy() / BATCH
    assert np.abs(residual[0] - residual_other).min() > 1e-7
    assert (
        np.abs(residual[0][:2] - residual[1][0]).min() > 1e-7
    )  # Two variables of one step share no noise.


def test_a_sum_clipped_to_another_bound_is_refused():
    optimizer = adam(l2_norm_clip=1.0)
    with pytest.raises(
        ValueError, match=r"has the bound 2\.0, but the optimizer's l2_norm_clip is 1\.0"
    ):
        optimizer.privatize(ClippedSum(sums_of(0), Clip(2.0)), key=key(), expected_batch_size=BATCH)


# ---------------------------------------------------------------------- nothing else is applied


def by_hand(optimizer, values):
    optimizer.apply_gradients([(tf.ones_like(v), v) for v in values])


def by_hand_after_privatize(optimizer, values):
    privatize(optimizer)
    by_hand(optimizer, values)


def from_a_tape(optimizer, values):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(values[0] ** 2) + tf.reduce_sum(values[1])
    optimizer.apply_gradients(zip(tape.gradient(loss, values), values, strict=True))


def twice(optimizer, values):
    private = privatize(optimizer)
    optimizer.apply_gradients(zip(private, values, strict=True))
    optimizer.apply_gradients(zip(private, values, strict=True))


def of_an_earlier_step(optimizer, values):
    old = privatize(optimizer, 0)
    privatize(optimizer, 1)
    optimizer.apply_gradients(zip(old, values, strict=True))


def transformed(optimizer, values):
    optimizer.apply_gradients(
        (2.0 * g, v) for g, v in zip(privatize(optimizer), values, strict=True)
    )


def one_replaced(optimizer, values):
    private = privatize(optimizer)
    optimizer.apply_gradients([(private[0], values[0]), (tf.ones_like(values[1]), values[1])])


def some_left_out(optimizer, values):
    optimizer.apply_gradients([(privatize(optimizer)[0], values[0])])


def of_another_optimizer(optimizer, values):
    privatize(optimizer)
    optimizer.apply_gradients(zip(privatize(adam()), values, strict=True))


def with_minimize(optimizer, values):
    optimizer.minimize(lambda: tf.reduce_sum(values[0] ** 2), values)


def with_minimize_after_privatize(optimizer, values):
    privatize(optimizer)
    with_minimize(optimizer, values)


def with_compute_gradients(optimizer, values):
    optimizer.compute_gradients(lambda: tf.reduce_sum(values[0] ** 2), values)


ATTACKS = [
    by_hand,
    by_hand_after_privatize,
    from_a_tape,
    twice,
    of_an_earlier_step,
    transformed,
    one_replaced,
    some_left_out,
    of_another_optimizer,
    with_minimize,
    with_minimize_after_privatize,
    with_compute_gradients,
]


@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "tf.function"])
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_gradient_that_was_not_privatised_in_this_step_raises(attack, in_graph):
    optimizer, values = adam(), variables()
    optimizer.build(values)
    before = [v.numpy() for v in values]
    run = (
        tf.function(lambda: attack(optimizer, values), autograph=False)
        if in_graph
        else lambda: attack(optimizer, values)
    )

    with pytest.raises(UnprivatizedGradientError, match=r"privati|private"):
        run()

    if attack is not twice or in_graph:  # The first of the two is a sound step.
        for v, old in zip(values, before, strict=True):
            np.testing.assert_array_equal(v, old)


def test_the_sound_way_works_in_a_graph_with_fresh_noise_each_time():
    optimizer, values = (
        optimizers.DPKerasSGDOptimizer(1.0, l2_norm_clip=1.0, noise_multiplier=1.0),
        variables(),
    )
    optimizer.build(values)

    @tf.function
    def step(step_key):
        clipped = ClippedSum([tf.zeros_like(v) for v in values], Clip(1.0))
        private = optimizer.privatize(clipped, key=step_key, expected_batch_size=BATCH)
        optimizer.apply_gradients(zip(private.tensors, values, strict=True))

    places = [values[0].numpy()]
    for number in range(2):
        step(key(number))
        places.append(values[0].numpy())
    first, second = places[1] - places[0], places[2] - places[1]
    assert np.abs(first).min() > 0
    assert np.abs(first - second).min() > 1e-7


def test_nothing_private_is_kept_in_variables_or_config():
    optimizer, values = adam(), variables()
    optimizer.apply_gradients(zip(privatize(optimizer), values, strict=True))
    plain = keras.optimizers.Adam()
    plain.build(variables())

    assert len(optimizer.variables) == len(plain.variables)


# ---------------------------------------------------------------------- configuration and validation


@pytest.mark.parametrize(("name", "dp_class", "settings"), CLASSES)
@pytest.mark.parametrize("noise", [None, 1.25])
def test_the_configuration_makes_the_same_optimizer_again(name, dp_class, settings, noise):
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)
    optimizer = dp_class(
        learning_rate=schedule, l2_norm_clip=0.7, noise_multiplier=noise, clipnorm=9.0, **settings
    )

    by_class = dp_class.from_config(optimizer.get_config())
    by_keras = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    for other in (by_class, by_keras):
        assert type(other) is dp_class
        assert (other.l2_norm_clip, other.noise_multiplier) == (0.7, noise)
        assert other.get_config() == optimizer.get_config()
        assert other.get_config()["clipnorm"] == 9.0
        for setting, value in settings.items():
            assert other.get_config()[setting] == value


@pytest.mark.parametrize("clip", [0, 0.0, -1.0, math.nan, -math.inf, True, "1.0", None, [1.0]])
def test_a_clip_that_is_no_positive_number_is_refused(clip):
    with pytest.raises(ValueError, match="l2_norm_clip must be a positive number, got") as error:
        adam(l2_norm_clip=clip)
    # A list, which may be a data set in the wrong place, is shown by its type.
    assert (repr(clip) if not isinstance(clip, list) else "List") in str(error.value)


@pytest.mark.parametrize("noise", [-0.1, math.nan, math.inf, -math.inf, True, False, "1", [1.0]])
def test_a_noise_multiplier_that_is_no_finite_number_is_refused(noise):
    with pytest.raises((ValueError, TypeError), match="noise_multiplier") as error:
        adam(noise_multiplier=noise)
    shown = "a list" if isinstance(noise, list) else repr(noise).lower()
    assert shown in str(error.value).lower()


@pytest.mark.parametrize("noise", [1.0, None])
def test_no_clip_goes_with_no_noise_only(noise):
    with pytest.raises(ValueError, match="needs noise_multiplier=0"):
        adam(l2_norm_clip=math.inf, noise_multiplier=noise)
    assert adam(l2_norm_clip=math.inf, noise_multiplier=0.0).noise_multiplier == 0.0


def test_clip_is_a_keyword_and_needed():
    with pytest.raises(TypeError, match="l2_norm_clip"):
        optimizers.DPKerasAdamOptimizer(learning_rate=0.1)


def test_numbers_of_other_kinds_are_taken_as_floats():
    optimizer = adam(l2_norm_clip=2, noise_multiplier=np.float64(1.5))
    assert (type(optimizer.l2_norm_clip), type(optimizer.noise_multiplier)) == (float, float)
    assert (optimizer.l2_norm_clip, optimizer.noise_multiplier) == (2.0, 1.5)
