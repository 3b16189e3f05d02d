"""Layers that are common beside those of `test_ghost.py`: attention, embeddings of many places, frozen normalisation (C3)."""

from __future__ import annotations

import numpy as np
import pytest
from support.per_record import check, losses_of, made, tried

from tfp_dpvi._tf import keras, tf
from tfp_dpvi.ghost import UnsupportedLayerError
from tfp_dpvi.ghost.contributions import Lookup, Outer

layers = keras.layers


def attention(mask=False):
    x = layers.Input([5, 4])
    h = layers.MultiHeadAttention(2, 3)(x, x, use_causal_mask=mask)
    return keras.Model(x, layers.Dense(2)(layers.Flatten()(layers.LayerNormalization()(x + h))))


def transformer():
    """Encoder and decoder, with attention across."""
    tokens = layers.Input([6], dtype="int32")
    h = layers.Embedding(9, 4)(tokens)
    h = layers.LayerNormalization()(h + layers.MultiHeadAttention(2, 2)(h, h))
    code = layers.RepeatVector(6)(layers.Dense(4)(layers.Flatten()(h)))
    h = layers.LayerNormalization()(
        code + layers.MultiHeadAttention(2, 2)(code, h, use_causal_mask=True)
    )
    return keras.Model(tokens, layers.Dense(3)(h + layers.Dense(4)(layers.Dense(8, "relu")(h))))


class CalledFrozen(keras.Model):
    """Trains gamma and beta of a batch normalisation, with its moments as they were."""

    def __init__(self):
        super().__init__()
        self.dense, self.normalise = layers.Dense(4), layers.BatchNormalization()

    def call(self, x):
        return self.normalise(self.dense(x), training=False)


def frozen():
    normalise = layers.BatchNormalization()
    normalise.trainable = False
    return keras.Sequential([layers.Dense(4), normalise, layers.Dense(2)])


def text(places):
    return lambda: keras.Sequential(
        [layers.Embedding(50, 3, input_length=places), layers.Flatten(), layers.Dense(2)]
    )


CASES = {
    "attention": ([5, 4], 0, attention),
    "causal attention": ([5, 4], 0, lambda: attention(mask=True)),
    "transformer": ([6], 9, transformer),
    "einsum": ([3, 4], 0, lambda: keras.Sequential([layers.EinsumDense("abc,cde->abde", [3, 2, 5], "tanh", bias_axes="de")])),
    "einsum that is no dense layer": ([3, 4], 0, lambda: keras.Sequential([layers.EinsumDense("abc,bd->abdc", [3, 2, 4])])),
    "three dimensions": ([4, 5, 4, 2], 0, lambda: keras.Sequential([layers.Conv3D(3, 2, (2, 1, 1), "same", activation="elu")])),
    "depthwise": ([6, 7, 3], 0, lambda: keras.Sequential([layers.DepthwiseConv2D((2, 3), 2, "same", depth_multiplier=2, activation="tanh")])),
    "dilated": ([6, 7, 2], 0, lambda: keras.Sequential([layers.DepthwiseConv2D((2, 3), padding="same", dilation_rate=2)])),
    "separable": ([6, 7, 3], 0, lambda: keras.Sequential([layers.SeparableConv2D(4, (3, 2), 2, "same", depth_multiplier=2, activation="tanh")])),
    "80 places": ([80], 50, text(80)),
    "400 places, two tokens": ([400], 2, text(400)),
    "frozen normalisation": ([3], 0, frozen),
    "normalisation called as in use": ([3], 0, CalledFrozen),
}  # fmt: skip
FAST = {
    "attention",
    "transformer",
    "einsum",
    "three dimensions",
    "depthwise",
    "dilated",
    "separable",
    "80 places",
}
QUICK = {
    "attention",
    "einsum",
    "three dimensions",
    "depthwise",
    "dilated",
    "separable",
    "80 places",
    "400 places, two tokens",
    "frozen normalisation",
}


@pytest.mark.parametrize(
    ("name", "mapped"),
    [
        pytest.param(name, mapped, marks=() if name in QUICK and not mapped else pytest.mark.slow)
        for name in CASES
        for mapped in (False, True)
    ],
)
def test_layers_have_the_gradients_of_single_records(name, mapped):
    shape, integers, build = CASES[name]
    gradients = check(*made(build, shape, integers=integers), mapped)
    assert not (name in FAST and gradients.slow)


@pytest.mark.parametrize("tokens", [1, 2, 50])
@pytest.mark.parametrize("places", [80, 1000])
def test_the_bound_of_an_embedding_is_tight_where_tokens_repeat(tokens, places):
    rng = np.random.default_rng(0)
    ids, values = (
        rng.integers(0, tokens, [4, places]),
        rng.normal(size=[4, places, 16]).astype("float32"),
    )
    table = np.zeros([4, tokens, 16])
    for record in range(4):
        np.add.at(table[record], ids[record], values[record])
    exact = np.square(table).sum(axis=(1, 2))
    found = Lookup((tokens, 16), tf.constant(ids), tf.constant(values)).squared_norms().numpy()
    assert (found >= exact * (1 - 1e-6)).all()
    assert (found <= exact * 1.05).all()


def test_the_bound_of_a_dense_layer_is_tight_over_many_places():
    rng = np.random.default_rng(0)
    left, right = (rng.normal(size=[3, 80, 1000]).astype("float32") for _ in range(2))
    exact = np.square(np.einsum("ntk,ntd->nkd", left, right, optimize=True).astype("float64")).sum(
        axis=(1, 2)
    )
    part = Outer.cheaper_form((1000, 1000), tf.constant(left), tf.constant(right))
    assert isinstance(part, Outer)
    assert (part.squared_norms().numpy() >= exact).all()
    assert (part.squared_norms().numpy() <= exact * 1.05).all()


def test_normalisation_by_the_batch_is_refused():
    model, x = made(
        lambda: keras.Sequential([layers.Dense(4), layers.BatchNormalization(), layers.Dense(2)]),
        [3],
    )

    def training(model, part):
        return tf.reduce_sum(model(part, training=True) ** 2, axis=1)

    with pytest.raises(UnsupportedLayerError, match="trainable = False"):
        tried(model, x, loss=training)
    model.layers[1].trainable = False
    tried(model, x, loss=training)
    assert losses_of(model, x).shape == [5]


def test_a_variable_is_checked_however_small_its_gradient():
    """The floor below which a difference is rounding is no door: a layer that sees others weakly is found all the same."""

    class Weakly(layers.Layer):
        def call(self, inputs):
            return inputs + 1e-3 * tf.reduce_mean(inputs, axis=0)

    model, x = made(lambda: keras.Sequential([layers.Dense(3), Weakly(), layers.Dense(2)]), [3])
    with pytest.raises(UnsupportedLayerError, match=r"relative error of|change \(by"):
        tried(model, x)
