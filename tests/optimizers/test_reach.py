"""How far an optimizer can move a parameter, against steps of the optimizers themselves."""

import numpy as np
import pytest

import tfp_dpvi as dpvi
from tfp_dpvi._tf import keras, tf
from tfp_dpvi.optimizers import largest_move, make_dp_optimizer_class

STEPS, CLIP = 60, 2.0


def falling(rate):
    return keras.optimizers.schedules.CosineDecay(rate, 40, 0.1)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("Adam", {"learning_rate": 0.05}),
        ("Adam", {"learning_rate": falling(0.05)}),
        ("RMSprop", {"learning_rate": 0.05}),
        ("SGD", {"learning_rate": 0.3}),
        ("SGD", {"learning_rate": falling(0.3), "momentum": 0.9}),
    ],
)
def test_steps_that_agree_go_as_far(kind, settings):
    """Gradients of the clip's length, all in one direction; momentum and RMSprop's average start up within 20 %."""
    plain = getattr(keras.optimizers, kind)
    variable = tf.Variable(0.0)
    moved = plain(**settings)
    moved.build([variable])
    for _ in range(STEPS):
        moved.apply_gradients([(tf.constant(CLIP), variable)])
    private = make_dp_optimizer_class(plain)(l2_norm_clip=CLIP, noise_multiplier=1.0, **settings)
    assert largest_move(private, STEPS) == pytest.approx(abs(float(variable)), rel=0.2)


def test_earlier_steps_of_the_optimizer_count():
    """A fit that goes on where another ended has come as far as both."""
    optimizer = dpvi.optimizers.DPKerasAdamOptimizer(falling(1.0), l2_norm_clip=1.0)
    assert largest_move(optimizer, 1000) == pytest.approx(
        np.sum([float(falling(1.0)(step)) for step in range(1000)]), rel=0.05
    )
    optimizer.iterations.assign(40)
    both = sum(float(falling(1.0)(step)) for step in range(90))
    assert largest_move(optimizer, 50) == pytest.approx(both, rel=1e-5)
    still = dpvi.optimizers.DPKerasAdamOptimizer(0.0, l2_norm_clip=1.0)
    assert np.isnan(largest_move(still, 50))


def test_a_momentum_of_one_goes_far():
    """Speeds then add up: after n steps the sum of 1 to n, of which this is twice."""
    optimizer = dpvi.optimizers.DPKerasSGDOptimizer(0.1, momentum=1.0, l2_norm_clip=CLIP)
    assert largest_move(optimizer, STEPS) == pytest.approx(0.1 * CLIP * STEPS**2)
