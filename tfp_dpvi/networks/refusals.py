"""Refusals of a `DPVAE` before privacy is spent: of parts, variables, layers and optimizers."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any

from tfp_dpvi import _validate as check
from tfp_dpvi._tf import Layer, Optimizer, Structure, keras, refuse_keras_3, tf, tfp
from tfp_dpvi.models.arguments import refuse_scoring_steps
from tfp_dpvi.networks.group_terms import Regularizer
from tfp_dpvi.optimizers import TermwiseOptimizer

# Layers with the same posterior of their weights, which draw the weights instead of signs.
_WITHOUT_SIGNS = {
    tfp.layers.DenseFlipout: "DenseReparameterization",
    tfp.layers.Convolution1DFlipout: "Convolution1DReparameterization",
    tfp.layers.Convolution2DFlipout: "Convolution2DReparameterization",
    tfp.layers.Convolution3DFlipout: "Convolution3DReparameterization",
}
_WEIGHTS = {
    "loss_weights": "a network has one loss here. Multiply it by the weight in a function loss=.",
    "weighted_metrics": "pass metrics=, which evaluate weights by its sample_weight=.",
}


def check_callable(name: str, part: Any) -> None:
    """Raises `TypeError` unless an argument is a Keras model or another callable.

    Args:
      name: Name of the argument.
      part: Its value.
    """
    refuse_keras_3(name, part)
    if not callable(part):
        raise TypeError(
            f"{name} must be a Keras model or another callable, got {check.shown(part)}."
        )


def check_tracked(read: Sequence[tf.Variable], tracked: Sequence[tf.Variable]) -> None:
    """Raises `ValueError` for a variable that would not be learned.

    Args:
      read: The trainable variables that the networks read.
      tracked: The variables of the model's layers.
    """
    known = {variable.ref() for variable in tracked}
    for variable in read:
        if variable.ref() not in known:
            raise ValueError(
                f"A network reads the variable {variable.name}, which belongs to none of its "
                "layers and would not be learned. Create it with a layer's add_weight, or with "
                "trainable=False."
            )


def take_no_weights(settings: MutableMapping[str, Structure | None]) -> None:
    """Raises `ValueError` for weights of Keras's `compile`, and takes away those that are None.

    Args:
      settings: The other arguments of `compile`.
    """
    for name, why in _WEIGHTS.items():
        value = settings.pop(name, None)
        if value is not None:
            raise ValueError(f"{name}={check.shown(value)} is not supported: {why}")


def check_vectorization(layers: Sequence[Layer]) -> None:
    """Raises `ValueError` for a layer that cannot be run for each record by itself.

    Such layers pad texts to the longest one of a batch, or draw random signs, which
    `tf.vectorized_map` cannot draw for each record.

    Args:
      layers: The layers of a network.
    """
    for layer in layers:
        for kind in type(layer).__mro__:
            if kind in _WITHOUT_SIGNS:
                raise ValueError(
                    f"{layer.name} ({type(layer).__name__}) draws random signs, which cannot be "
                    f"drawn for each record.\nUse {_WITHOUT_SIGNS[kind]}, which has the same "
                    "posterior of weights."
                )
    for layer in [each for each in layers if isinstance(each, keras.layers.TextVectorization)]:
        config = layer.get_config()
        if config["output_mode"] == "int" and config["output_sequence_length"] is None:
            raise ValueError(
                f"{layer.name} (TextVectorization) pads texts to the longest one of their batch, "
                "which one record would set for all others: pass output_sequence_length= and "
                "ragged=False."
            )


def check_separate(encoder_layers: Sequence[Layer], decoder_layers: Sequence[Layer]) -> None:
    """Raises `ValueError` if encoder and decoder share layers, for a model with a regularizer.

    Args:
      encoder_layers: The outermost layers of the encoder.
      decoder_layers: The outermost layers of the decoder.
    """
    if {id(layer) for layer in encoder_layers} & {id(layer) for layer in decoder_layers}:
        raise ValueError(
            "encoder and decoder share layers, which a batch_regularizer does not allow: its "
            "noise depends on the parameters that its gradient reaches. Use separate layers "
            "for each."
        )


def check_clips(optimizer: Optimizer, regularizer: Regularizer | None) -> None:
    """Raises `ValueError` unless the optimizer clips the terms that the model has.

    Args:
      optimizer: A DP-Keras optimizer.
      regularizer: The model's batch-wise term, or None.
    """
    refuse_scoring_steps(optimizer)
    termwise = isinstance(optimizer, TermwiseOptimizer)
    name = type(optimizer).__name__
    if termwise and regularizer is None:
        raise ValueError(
            f"optimizer={name} has batch_l2_norm_clip={optimizer.batch_l2_norm_clip} for a "
            "batch-wise term, but this model has none: use DPVAE(batch_regularizer=...), or a "
            "DPKeras optimizer."
        )
    if regularizer is not None and not termwise:
        raise ValueError(
            f"optimizer={name} clips by record: a batch_regularizer's sensitivity would be "
            "O(B), B being the batch size, instead of O(1). Use "
            "dpvi.optimizers.TermwiseDPKerasAdamOptimizer, which clips it by groups."
        )
