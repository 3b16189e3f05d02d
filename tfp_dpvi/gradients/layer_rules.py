"""How each Keras layer's per-record weight gradients follow from its inputs and the gradients at its outputs.

One entry a layer class: a forward pass that shows the tensor at which the gradient is taken, and the contributions that
follow. Every other trainable layer is mapped over records with `tf.vectorized_map`, for its own variables alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from tfp_dpvi._tf import keras, tf
from tfp_dpvi.gradients.contributions import Contribution, Direct, Lookup, Outer

Found = list[tuple[Any, Contribution]]
"""Pairs of a variable and what the records contribute to its gradient."""


class UnsupportedLayerError(ValueError):
    """A layer whose per-record gradients cannot be had this way; the message says which and what to do."""


@dataclasses.dataclass(frozen=True)
class ByRecord:
    """Sorts the rows that a layer saw by record: a record may have several (draws), which follow each other.

    Attributes:
      rows: how many rows there are for each record.
    """

    rows: int

    def split(self, values: Any) -> Any:
        """[rows, ...] as [n, rows of a record, ...]."""
        return tf.reshape(values, [-1, self.rows, *values.shape[1:]])

    def __call__(self, values: Any) -> Any:
        """[rows, ..., D] as [n, T, D] with a T that is known while tracing."""
        inner = values.shape[1:-1].num_elements()
        if inner is None or values.shape[-1] is None:
            raise UnsupportedLayerError(
                f"A layer saw shape {values.shape}: all dimensions but the first must be known. Fix the input shapes."
            )
        return tf.reshape(values, [-1, inner * self.rows, values.shape[-1]])


@dataclasses.dataclass(frozen=True)
class Probed:
    """A layer's forward pass, cut where the gradient is to be taken.

    Attributes:
      probes: tensors whose gradients are wanted, the layer's rows in their first dimension.
      finish: from the probes to the layer's output.
      contributions: `(gradients at the probes) -> Found`.
    """

    probes: Sequence[Any]
    finish: Callable[[], Any]
    contributions: Callable[[Sequence[Any], ByRecord], Found]


Rule = Callable[..., "Probed | None"]
"""`rule(layer, inputs) -> Probed`, or None where this use of the layer is not one that the rule knows."""


def _bias(layer: Any, gradient: Any, by_record: ByRecord) -> Found:
    if not getattr(layer, "use_bias", False):
        return []
    values = by_record(gradient)
    # Without positions to sum over a reshape does: no pass over memory.
    values = tf.reshape(values, [-1, values.shape[2]]) if values.shape[1] == 1 else tf.reduce_sum(values, axis=1)
    return [(layer.bias, Direct(tuple(layer.bias.shape), values))]


def _dense(layer: Any, inputs: Any) -> Probed | None:
    if not tf.is_tensor(inputs) or inputs.shape.rank is None or inputs.shape.rank < 2:
        return None
    inputs = tf.cast(inputs, layer.kernel.dtype)
    outputs = tf.tensordot(inputs, layer.kernel, axes=1) if inputs.shape.rank > 2 else tf.matmul(inputs, layer.kernel)
    outputs = tf.nn.bias_add(outputs, layer.bias) if layer.use_bias else outputs

    def contributions(gradients: Sequence[Any], by_record: ByRecord) -> Found:
        left, right = by_record(inputs), by_record(gradients[0])
        kernel = Outer.of_cheaper_form(tuple(layer.kernel.shape), left, right)
        return [(layer.kernel, kernel), *_bias(layer, gradients[0], by_record)]

    return Probed([outputs], lambda: layer.activation(outputs), contributions)


def _patches(
    images: Any, kernel_size: Sequence[int], strides: Sequence[int], rates: Sequence[int], padding: str
) -> Any:
    """[rows, H, W, C] -> [rows, H', W', kh kw C], in the order of a kernel [kh, kw, C, ...]."""
    return tf.image.extract_patches(
        images, sizes=[1, *kernel_size, 1], strides=[1, *strides, 1], rates=[1, *rates, 1], padding=padding
    )


def _convolution(layer: Any, inputs: Any) -> Probed | None:
    """Conv1D and Conv2D."""
    rank = layer.rank
    if layer.data_format != "channels_last" or layer.groups != 1 or inputs.shape.rank != rank + 2:
        return None
    inputs = tf.cast(inputs, layer.kernel.dtype)
    outputs = layer.convolution_op(_causal(layer, inputs), layer.kernel)
    outputs = tf.nn.bias_add(outputs, layer.bias) if layer.use_bias else outputs

    def contributions(gradients: Sequence[Any], by_record: ByRecord) -> Found:
        images = _causal(layer, inputs)
        sizes, strides, rates = tuple(layer.kernel_size), tuple(layer.strides), tuple(layer.dilation_rate)
        if rank == 1:
            images, sizes, strides, rates = images[:, None], (1, *sizes), (1, *strides), (1, *rates)
        padding = "VALID" if layer.padding == "causal" else layer.padding.upper()
        shape = tuple(layer.kernel.shape)
        if rank == 2 and strides == rates == (1, 1) and shape[3] < shape[2]:
            direct = _by_patches_of_gradients(shape, images, gradients[0], padding, by_record)
            return [(layer.kernel, direct), *_bias(layer, gradients[0], by_record)]
        left = by_record(_patches(images, sizes, strides, rates, padding))
        right = by_record(gradients[0])
        kernel = Outer.of_cheaper_form(shape, left, right)
        return [(layer.kernel, kernel), *_bias(layer, gradients[0], by_record)]

    return Probed([outputs], lambda: layer.activation(outputs), contributions)


def _by_patches_of_gradients(
    shape: tuple[int, ...], images: Any, gradient: Any, padding: str, by_record: ByRecord
) -> Direct:
    """Kernel gradients of a convolution with fewer channels out than in, whose patches would be the larger ones.

    `gradient[k, c, d] = sum_s images[s, c] g[s - k + before, d]`: patches of g, padded, in the opposite order.
    """
    height, width, channels, filters = shape
    same = padding == "SAME"
    pads = [[size // 2 if same else size - 1, (size - 1) // 2 if same else size - 1] for size in (height, width)]
    padded = tf.pad(gradient, [[0, 0], *pads, [0, 0]])
    left, right = by_record(images), by_record(_patches(padded, (height, width), (1, 1), (1, 1), "VALID"))
    values = tf.reshape(tf.linalg.matmul(left, right, transpose_a=True), [-1, channels, height, width, filters])
    return Direct(shape, tf.transpose(tf.reverse(values, [2, 3]), [0, 2, 3, 1, 4]))


def _causal(layer: Any, inputs: Any) -> Any:
    if layer.padding != "causal":
        return inputs
    return tf.pad(inputs, [[0, 0], [layer.dilation_rate[0] * (layer.kernel_size[0] - 1), 0], [0, 0]])


def _transposed_convolution(layer: Any, inputs: Any) -> Probed | None:
    """Conv2DTranspose, the gradient of a convolution: input and output change places."""
    if layer.data_format != "channels_last" or layer.output_padding is not None or layer.groups != 1:
        return None
    if tuple(layer.dilation_rate) != (1, 1) or None in inputs.shape.as_list()[1:]:
        return None
    inputs = tf.cast(inputs, layer.kernel.dtype)
    padding, strides, sizes = layer.padding.upper(), tuple(layer.strides), tuple(layer.kernel_size)
    height, width = (
        size * stride if padding == "SAME" else size * stride + max(kernel - stride, 0)
        for size, stride, kernel in zip(inputs.shape[1:3], strides, sizes, strict=True)
    )
    shape = [tf.shape(inputs)[0], height, width, layer.filters]
    outputs = tf.nn.conv2d_transpose(inputs, layer.kernel, shape, strides, padding)
    outputs = tf.ensure_shape(outputs, [inputs.shape[0], height, width, layer.filters])
    outputs = tf.nn.bias_add(outputs, layer.bias) if layer.use_bias else outputs

    def contributions(gradients: Sequence[Any], by_record: ByRecord) -> Found:
        left = by_record(_patches(gradients[0], sizes, strides, (1, 1), padding))
        kernel = Outer.of_cheaper_form(tuple(layer.kernel.shape), left, by_record(inputs))
        return [(layer.kernel, kernel), *_bias(layer, gradients[0], by_record)]

    return Probed([outputs], lambda: layer.activation(outputs), contributions)


def _embedding(layer: Any, inputs: Any) -> Probed | None:
    ids = tf.cast(inputs, tf.int32)
    if ids.shape.rank is None or ids.shape.rank < 1:
        return None
    # An id out of range makes its record's loss NaN, so that it contributes zero and stops no step (contract C8).
    known = (ids >= 0) & (ids < layer.embeddings.shape[0])
    ids = tf.where(known, ids, tf.zeros_like(ids))
    outputs = tf.nn.embedding_lookup(layer.embeddings, ids)
    outputs = tf.where(known[..., None], outputs, tf.constant(float("nan"), outputs.dtype))

    def contributions(gradients: Sequence[Any], by_record: ByRecord) -> Found:
        values = by_record(gradients[0])
        each = by_record(tf.expand_dims(ids, -1))[:, :, 0]
        return [(layer.embeddings, Lookup(tuple(layer.embeddings.shape), each, values))]

    return Probed([outputs], lambda: outputs, contributions)


def _scaled(layer: Any, normalized: Any, axes: Sequence[int]) -> Probed:
    """`normalized * gamma + beta`, with weights along `axes` of the tensor."""
    rank = normalized.shape.rank
    shape = [size if axis in axes else 1 for axis, size in enumerate(normalized.shape.as_list())]
    others = [axis for axis in range(1, rank) if axis not in axes]
    outputs = normalized
    if layer.scale:
        outputs *= tf.reshape(layer.gamma, shape)
    if layer.center:
        outputs += tf.reshape(layer.beta, shape)

    def summed(values: Any, variable: Any, by_record: ByRecord) -> Direct:
        each = tf.reshape(tf.reduce_sum(values, axis=others), [-1, 1, variable.shape.num_elements()])
        each = tf.reduce_sum(by_record(each), axis=1)
        return Direct(tuple(variable.shape), tf.reshape(each, [-1, *variable.shape]))

    def contributions(gradients: Sequence[Any], by_record: ByRecord) -> Found:
        found: Found = []
        if layer.scale:
            found.append((layer.gamma, summed(gradients[0] * normalized, layer.gamma, by_record)))
        if layer.center:
            found.append((layer.beta, summed(gradients[0], layer.beta, by_record)))
        return found

    return Probed([outputs], lambda: outputs, contributions)


def _layer_normalization(layer: Any, inputs: Any) -> Probed | None:
    rank = inputs.shape.rank
    if rank is None or None in inputs.shape.as_list()[1:]:
        return None
    axes = [axis % rank for axis in (layer.axis if isinstance(layer.axis, list | tuple) else [layer.axis])]
    if 0 in axes or sorted(axes) != axes:
        return None
    mean, variance = tf.nn.moments(inputs, axes, keepdims=True)
    return _scaled(layer, (inputs - mean) * tf.math.rsqrt(variance + layer.epsilon), axes)


def _group_normalization(layer: Any, inputs: Any) -> Probed | None:
    rank = inputs.shape.rank
    if rank is None or layer.axis % rank != rank - 1 or None in inputs.shape.as_list()[1:]:
        return None
    channels = inputs.shape[-1]
    groups = channels if layer.groups == -1 else layer.groups
    parts = tf.reshape(inputs, [-1, *inputs.shape[1:-1], groups, channels // groups])
    axes = [*range(1, rank - 1), rank]
    mean, variance = tf.nn.moments(parts, axes, keepdims=True)
    normalized = tf.reshape((parts - mean) * tf.math.rsqrt(variance + layer.epsilon), [-1, *inputs.shape[1:]])
    return _scaled(layer, normalized, [rank - 1])


RULES: dict[type, Rule] = {
    keras.layers.Dense: _dense,
    keras.layers.Conv1D: _convolution,
    keras.layers.Conv2D: _convolution,
    keras.layers.Conv2DTranspose: _transposed_convolution,
    keras.layers.Embedding: _embedding,
    keras.layers.LayerNormalization: _layer_normalization,
    keras.layers.GroupNormalization: _group_normalization,
}
"""By exact class: a subclass may compute something else."""
