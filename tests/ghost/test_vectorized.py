"""Layers that are mapped as one with the layers in them, against gradients one record at a time (contracts C3, C5, C8)."""

from __future__ import annotations

import pytest
from support.per_record import check, losses_of, made, tried
from support.siblings import slow

from tfp_dpvi._tf import keras, map_apart, tf
from tfp_dpvi.ghost import UnsupportedLayerError
from tfp_dpvi.gradients import Clip

layers = keras.layers


def sequential(*parts):
    return keras.Sequential(list(parts))


class OutOfSight(layers.Layer):
    """Uses a sublayer's variable where the sublayer does not see it."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(4)

    def call(self, inputs):
        return self.dense(inputs) + tf.matmul(inputs, self.dense.kernel)


class TimeMajor(layers.Layer):
    """[n, 6, 4], with time first inside."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(2)

    def call(self, inputs):
        return tf.transpose(self.dense(tf.transpose(inputs, [1, 0, 2])), [1, 0, 2])


class Places(layers.Layer):
    """Tokens and their places, whose table sees no records."""

    def __init__(self):
        super().__init__()
        self.tokens, self.places = layers.Embedding(7, 4, mask_zero=True), layers.Embedding(6, 4)

    def call(self, inputs):
        return self.tokens(inputs) + self.places(tf.range(6))


class Masked(layers.Layer):
    """Reads a mask that came with its inputs, and takes none as an argument."""

    def __init__(self):
        super().__init__()
        self.lstm = layers.LSTM(3)
        self.scale = layers.Dense(3, use_bias=False)

    def call(self, inputs):
        return (
            tf.matmul(self.lstm(inputs), self.scale.kernel)
            if self.scale.built
            else self.scale(self.lstm(inputs))
        )


class Own(layers.Layer):
    """A layer that is no builtin one, over positions."""

    def build(self, shape):
        self.kernel = self.add_weight("kernel", [shape[-1], 3])

    def call(self, inputs):
        return tf.tanh(tf.matmul(inputs, self.kernel))


CASES = {
    "lstm": ([3, 2], 0, lambda: sequential(layers.LSTM(3), layers.Dense(2))),
    "two": ([4, 3], 0, lambda: sequential(layers.LSTM(4, return_sequences=True), layers.LSTM(3), layers.Dense(2))),
    "gru": ([6, 3], 0, lambda: sequential(layers.GRU(4), layers.Dense(2))),
    "simple": ([6, 3], 0, lambda: sequential(layers.SimpleRNN(4), layers.Dense(2))),
    "unrolled": ([4, 3], 0, lambda: sequential(layers.LSTM(3, unroll=True), layers.Dense(2))),
    "unrolled gru": ([4, 3], 0, lambda: sequential(layers.GRU(3, unroll=True, reset_after=False), layers.Dense(2))),
    "both ways": ([5, 3], 0, lambda: sequential(layers.Bidirectional(layers.LSTM(3)), layers.Dense(2))),
    "cells": ([4, 3], 0, lambda: sequential(layers.RNN([layers.GRUCell(3), layers.LSTMCell(2)]))),
    "masked": ([6], 5, lambda: sequential(layers.Embedding(5, 3, mask_zero=True), layers.GRU(3), layers.Dense(2))),
    "convolutional": ([3, 4, 4, 1], 0, lambda: sequential(layers.ConvLSTM2D(2, 2), layers.Flatten(), layers.Dense(1))),
    "grouped": ([5, 4, 4], 0, lambda: sequential(layers.Conv2D(6, 2, groups=2, activation="tanh"), layers.Conv2D(4, 2, groups=2))),
    "grouped over time": ([5, 4], 0, lambda: sequential(layers.Conv1D(6, 2, 2, groups=2, activation="tanh"), layers.Dense(1))),
    "decoder": ([3], 0, lambda: sequential(layers.RepeatVector(4), layers.LSTM(3, return_sequences=True), layers.Dense(2))),
    "time distributed": ([4, 3], 0, lambda: sequential(layers.TimeDistributed(layers.Dense(2)))),
    "time distributed own": ([4, 3], 0, lambda: sequential(layers.TimeDistributed(Own()))),
    "own over places": ([4, 3], 0, lambda: sequential(Own())),
    "out of sight": ([4], 0, lambda: sequential(OutOfSight())),
    "time first": ([6, 4], 0, lambda: sequential(TimeMajor())),
    "places": ([6], 7, lambda: sequential(Places(), layers.Dense(2))),
    "masked unit": ([6], 7, lambda: sequential(layers.Embedding(7, 3, mask_zero=True), Masked(), layers.Dense(2))),
}  # fmt: skip
QUICK = {"own over places", "places", "grouped"}  # LSTM layers below.


@pytest.mark.parametrize(
    ("name", "mapped"),
    [
        pytest.param(name, mapped, marks=() if name in QUICK and not mapped else pytest.mark.slow)
        for name in CASES
        for mapped in (False, True)
    ],
)
def test_units_have_the_gradients_of_single_records(name, mapped):
    shape, integers, build = CASES[name]
    check(*made(build, shape, integers=integers), mapped)


@pytest.mark.slow
def test_a_recurrent_layer_in_a_mapped_loss(caplog):
    """As in a `DPModel`: without a line in the log."""
    layer = layers.LSTM(3)
    x = tf.random.stateless_normal([4, 5, 2], [1, 2])
    layer(x)

    def one(row):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(row[None]) ** 2)
        return tape.gradient(loss, layer.trainable_variables)

    found = tf.function(lambda rows: map_apart(one, rows), autograph=False)(x)
    for each, wanted in zip(found, one(x[2]), strict=True):
        tf.debugging.assert_near(each[2], wanted, 1e-4, 1e-5)
    assert not caplog.records
    assert layers.LSTM(2)._could_use_gpu_kernel == layer._could_use_gpu_kernel


@pytest.mark.parametrize("arguments", [{"dropout": 0.5}, slow({"recurrent_dropout": 0.5})])
def test_draws_in_a_recurrent_layer_are_refused(arguments):
    model, x = made(lambda: sequential(layers.LSTM(3, **arguments)), [4, 2])
    with pytest.raises(UnsupportedLayerError, match="dropout"):
        tried(model, x, loss=lambda model, part: tf.reduce_sum(model(part, training=True), axis=1))


def test_a_recurrent_layer_with_a_state_is_refused():
    model, x = made(
        lambda: sequential(layers.Input([4, 2], batch_size=3), layers.GRU(3, stateful=True)),
        [4, 2],
        num=3,
    )
    with pytest.raises(ValueError, match="stateful"):
        tried(model, x)


@pytest.mark.slow  # In layers: `test_ghost.py`.
def test_an_unknown_category_in_a_unit_contributes_zero():
    """C8: an id out of range stops no step and shows nothing."""
    model, x = made(
        lambda: sequential(Places(), layers.Flatten(), layers.Dense(2)), [6], integers=7
    )
    gradients = tried(model, x)
    assert gradients.composites

    @tf.function(autograph=False)
    def clipped(records, mask):
        passed = gradients.run(lambda: losses_of(model, records))
        return passed.clipped_sum(passed.result, mask, Clip(0.5))[0].tensors

    bad = tf.where(tf.range(5)[:, None] == 2, 4711, x)
    for got, want in zip(
        clipped(bad, tf.fill([5], True)), clipped(x, tf.range(5) != 2), strict=True
    ):
        tf.debugging.assert_near(got, want, 1e-5, 1e-7)


def test_mixing_in_a_unit_is_refused():
    class Mixes(OutOfSight):
        def call(self, inputs):
            out = super().call(inputs)
            return out - 0.1 * tf.reduce_mean(out, axis=0, keepdims=True)

    model, x = made(lambda: sequential(Mixes()), [4])
    with pytest.raises(UnsupportedLayerError, match="influence each other"):
        tried(model, x)
