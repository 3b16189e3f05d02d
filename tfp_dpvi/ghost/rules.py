"""Rules for the per-example weight gradients of layers.

A rule for a layer class has a forward pass that exposes the tensor to differentiate by, and the
contributions that follow from inputs and output gradients. Every other trainable layer is
vectorized over records with `tf.vectorized_map`, for its own variables alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from tfp_dpvi._tf import Layer, keras, pad, tf
from tfp_dpvi.ghost.contributions import Contribution, Direct, Lookup, Outer

ByVariable = list[tuple[tf.Variable, Contribution]]
"""Pairs of a variable and the records' contributions to its gradient."""


class UnsupportedLayerError(ValueError):
    """Raised for a layer whose per-example gradients cannot be computed.

    The message names the layer and what to do.

    ```python
    >>> layer = keras.layers.BatchNormalization(name="moments")
    >>> refuse_mixing(layer, training=True)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    tfp_dpvi.ghost.rules.UnsupportedLayerError: moments is a BatchNormalization, ...
    >>> UnsupportedLayerError("moments adds a loss.", adding=layer).adding.name
    'moments'

    ```
    """

    def __init__(
        self, message: str, layer: Layer | None = None, adding: Layer | None = None
    ) -> None:
        super().__init__(message)
        # The layer that adds a loss in its call, if that is the reason.
        self.adding = adding
        # The layer, if it might be vectorized as a whole.
        self.layer = layer


@dataclasses.dataclass(frozen=True)
class ByRecord:
    """Reshapes a layer's rows by record; a record may have several consecutive rows (draws).

    Attributes:
      rows: The number of rows of a record.
    """

    rows: int

    def split(self, values: tf.Tensor) -> tf.Tensor:
        """Reshapes [rows, ...] to [n, rows of a record, ...]."""
        inner = values.shape[1:] if values.shape[1:].is_fully_defined() else tf.shape(values)[1:]
        return tf.reshape(values, tf.concat([[-1, self.rows], inner], axis=0))

    def __call__(self, values: tf.Tensor) -> tf.Tensor:
        """Reshapes [rows, ..., D] to [n, T, D] with a static T."""
        inner = values.shape[1:-1].num_elements()
        if inner is None or values.shape[-1] is None:
            raise UnsupportedLayerError(
                f"A layer got shape {values.shape}: all dimensions but the first must be known. "
                "Fix the input shapes."
            )
        return tf.reshape(values, [-1, inner * self.rows, values.shape[-1]])


@dataclasses.dataclass(frozen=True)
class Probed:
    """A layer's forward pass, split at the tensors to differentiate by.

    Attributes:
      probes: These tensors, with the layer's rows in their first dimension.
      finish: Computes the layer's output from the probes.
      contributions: Returns the records' contributions, from the gradients at the probes.
    """

    probes: Sequence[tf.Tensor]
    finish: Callable[[], tf.Tensor]
    contributions: Callable[[Sequence[tf.Tensor], ByRecord], ByVariable]


Rule = Callable[[Layer, Callable[..., tf.Tensor], tf.Tensor], "Probed | None"]
"""`rule(layer, call, inputs)` takes a layer, its own call and the inputs of the call.

It returns the probed call, or None if the rule does not cover this use of the layer.
"""


class Whole(Layer):
    """A layer whose gradients are vectorized over records as a whole.

    The layers inside it are not recorded.

    ```python
    >>> class Shift(Whole):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.shift = self.add_weight("shift", [2])
    ...         self.reads = (self.shift,)
    ...     def call(self, inputs):
    ...         return inputs + self.shift
    >>> shift = Shift()
    >>> shift(tf.ones([3, 2])).shape
    TensorShape([3, 2])

    ```

    Attributes:
      reads: The trainable variables that it uses, of any layer. The first dimension of their uses
        need not run over records.
    """

    reads: tuple[tf.Variable, ...] = ()


@contextlib.contextmanager
def without(layer: Layer, **attributes: object) -> Iterator[None]:
    """Sets attributes of a layer without Keras's tracking, while active.

    The layer then runs its own forward pass without the last part.

    Args:
      layer: The layer.
      **attributes: The values by the names of the attributes.
    """
    before = {name: getattr(layer, name) for name in attributes}
    try:
        for name, value in attributes.items():
            object.__setattr__(layer, name, value)
        yield
    finally:
        for name, value in before.items():
            object.__setattr__(layer, name, value)


def _places(values: tf.Tensor, last: Sequence[int]) -> tf.Tensor:
    """Reshapes [rows, ..., *last] to [rows, places, size of last]."""
    if len(last) == 1:
        return values
    width = int(np.prod(last))
    return tf.reshape(values, [-1, values.shape[1:].num_elements() // width, width])


def _with_kernel(
    layer: Layer,
    call: Callable[..., tf.Tensor],
    inputs: tf.Tensor,
    kernel_contribution: Callable[[tf.Tensor, ByRecord], Contribution],
    name: str = "kernel",
) -> Probed:
    """Probes a layer that computes `activation(linear(inputs, kernel) + bias)`.

    The kernel is in attribute `name`.
    """
    with without(layer, activation=keras.activations.linear):
        outputs = call(inputs)

    def contributions(gradients: Sequence[tf.Tensor], by_record: ByRecord) -> ByVariable:
        pairs: ByVariable = [(getattr(layer, name), kernel_contribution(gradients[0], by_record))]
        if layer.bias is not None:
            shape = tuple(layer.bias.shape)
            values = by_record(_places(gradients[0], shape))
            # Without positions to sum over, a reshape is enough.
            values = values if values.shape[1] == 1 else tf.reduce_sum(values, axis=1)
            pairs.append((layer.bias, Direct(shape, tf.reshape(values, [-1, *shape]))))
        return pairs

    return Probed([outputs], lambda: layer.activation(outputs), contributions)


def _dense(layer: Layer, call: Callable[..., tf.Tensor], inputs: tf.Tensor) -> Probed | None:
    if not tf.is_tensor(inputs) or inputs.shape.rank is None or inputs.shape.rank < 2:
        return None
    inputs = tf.cast(inputs, layer.kernel.dtype)

    def kernel_contribution(gradient: tf.Tensor, by_record: ByRecord) -> Contribution:
        return Outer.cheaper_form(tuple(layer.kernel.shape), by_record(inputs), by_record(gradient))

    return _with_kernel(layer, call, inputs, kernel_contribution)


def _patches(
    images: tf.Tensor,
    kernel_size: Sequence[int],
    strides: Sequence[int],
    rates: Sequence[int],
    padding: str,
) -> tf.Tensor:
    """Returns the patches of images, [rows, H, W, C] -> [rows, H', W', kh kw C].

    A patch has the order of a kernel [kh, kw, C, ...].
    """
    return tf.image.extract_patches(
        images,
        sizes=[1, *kernel_size, 1],
        strides=[1, *strides, 1],
        rates=[1, *rates, 1],
        padding=padding,
    )


def _convolution(layer: Layer, call: Callable[..., tf.Tensor], inputs: tf.Tensor) -> Probed | None:
    """Probes a Conv1D, Conv2D or Conv3D."""
    rank = layer.rank
    if layer.data_format != "channels_last" or layer.groups != 1 or inputs.shape.rank != rank + 2:
        return None
    if rank == 3 and tuple(layer.dilation_rate) != (1, 1, 1):
        return None
    inputs = tf.cast(inputs, layer.kernel.dtype)
    shape, sizes = tuple(layer.kernel.shape), tuple(layer.kernel_size)
    strides, rates = tuple(layer.strides), tuple(layer.dilation_rate)

    def kernel_contribution(gradient: tf.Tensor, by_record: ByRecord) -> Contribution:
        images = inputs
        if layer.padding == "causal":
            images = pad(inputs, [[0, 0], [rates[0] * (sizes[0] - 1), 0], [0, 0]])
        padding = "VALID" if layer.padding == "causal" else layer.padding.upper()
        if rank == 2 and strides == rates == (1, 1) and shape[3] < shape[2]:
            return _by_patches_of_gradients(shape, images, gradient, padding, by_record)
        if rank == 3:
            patches = tf.extract_volume_patches(images, [1, *sizes, 1], [1, *strides, 1], padding)
        elif rank == 1:
            patches = _patches(images[:, None], (1, *sizes), (1, *strides), (1, *rates), padding)
        else:
            patches = _patches(images, sizes, strides, rates, padding)
        return Outer.cheaper_form(shape, by_record(patches), by_record(gradient))

    return _with_kernel(layer, call, inputs, kernel_contribution)


def _depthwise(layer: Layer, call: Callable[..., tf.Tensor], inputs: tf.Tensor) -> Probed | None:
    if layer.data_format != "channels_last" or None in inputs.shape.as_list()[1:]:
        return None

    def kernel_contribution(gradient: tf.Tensor, by_record: ByRecord) -> Contribution:
        return _by_channels(layer, inputs, gradient, by_record)

    return _with_kernel(layer, call, inputs, kernel_contribution, "depthwise_kernel")


def _by_channels(
    layer: Layer, inputs: tf.Tensor, gradient: tf.Tensor, by_record: ByRecord
) -> Direct:
    """Returns the gradients of a small kernel for each channel, a product for each of its places.

    Grouped convolutions would be fewer operations, but XLA on CPUs makes dense ones of them.
    """
    shape = tuple(layer.depthwise_kernel.shape)
    height, width = shape[:2]
    channels, multiplier = shape[2:]
    strides, rates = layer.strides, layer.dilation_rate
    out = gradient.shape[1:3].as_list()
    pads, blocks = [], []
    for axis, kernel in enumerate((height, width)):
        size = inputs.shape[axis + 1]
        needed = (out[axis] - 1) * strides[axis] + (kernel - 1) * rates[axis] + 1
        before = max(needed - size, 0) // 2  # 0 for padding="valid".
        num = -(-max(size + before, needed) // strides[axis])
        pads.append([before, num * strides[axis] - size - before])
        blocks += [num, strides[axis]]
    images = tf.reshape(
        pad(tf.cast(inputs, gradient.dtype), [[0, 0], *pads, [0, 0]]), [-1, *blocks, channels]
    )
    # Strides first: what a place of the kernel sees is one block.
    images = tf.transpose(images, [2, 4, 0, 1, 3, 5])
    gradient = tf.reshape(gradient, [-1, *out, channels, multiplier])
    sums = []
    for row, column in itertools.product(range(height), range(width)):
        i, y = divmod(row * rates[0], strides[0])
        j, x = divmod(column * rates[1], strides[1])
        seen = images[y, x, :, i : i + out[0], j : j + out[1], :, None]
        sums.append(tf.reduce_sum(seen * gradient, axis=[1, 2]))
    values = by_record.split(tf.reshape(tf.stack(sums, axis=1), [-1, *shape]))
    return Direct(shape, tf.reduce_sum(values, axis=1))


def _separable(layer: Layer, call: Callable[..., tf.Tensor], inputs: tf.Tensor) -> Probed | None:
    """Probes a SeparableConv2D: a depthwise convolution, then one of size 1."""
    if layer.data_format != "channels_last" or None in inputs.shape.as_list()[1:]:
        return None
    inputs = tf.cast(inputs, layer.depthwise_kernel.dtype)
    how = {
        "strides": [1, *layer.strides, 1],
        "padding": layer.padding.upper(),
        "dilations": layer.dilation_rate,
    }
    middle = tf.nn.depthwise_conv2d(inputs, layer.depthwise_kernel, **how)
    pointwise = layer.pointwise_kernel

    def kernel_contribution(gradient: tf.Tensor, by_record: ByRecord) -> Contribution:
        return Outer.cheaper_form(tuple(pointwise.shape), by_record(middle), by_record(gradient))

    probed = _with_kernel(layer, call, inputs, kernel_contribution, "pointwise_kernel")

    def contributions(gradients: Sequence[tf.Tensor], by_record: ByRecord) -> ByVariable:
        at_middle = tf.tensordot(gradients[0], pointwise[0, 0], [[3], [1]])
        first = layer.depthwise_kernel, _by_channels(layer, inputs, at_middle, by_record)
        return [first, *probed.contributions(gradients, by_record)]

    return dataclasses.replace(probed, contributions=contributions)


def _einsum_dense(layer: Layer, call: Callable[..., tf.Tensor], inputs: tf.Tensor) -> Probed | None:
    """Probes an EinsumDense that is a dense layer over positions, "abc,cde->abde".

    The projections of attention are such layers.
    """
    equation = re.fullmatch(r"(\w+),(\w+)->(\w+)", layer.equation.replace(" ", ""))
    if equation is None or inputs.shape.rank is None or None in inputs.shape.as_list()[1:]:
        return None
    left_axes, kernel_axes = equation.group(1), equation.group(2)
    summed = "".join(axis for axis in kernel_axes if axis in left_axes)
    kept = "".join(axis for axis in kernel_axes if axis not in left_axes)
    places = left_axes[: len(left_axes) - len(summed)]
    is_dense = left_axes == places + summed and kernel_axes == summed + kept
    if not (places and is_dense and equation.group(3) == places + kept):
        return None
    shape = tuple(layer.kernel.shape)
    if layer.bias is not None and tuple(layer.bias.shape) != shape[len(summed) :]:
        return None

    def kernel_contribution(gradient: tf.Tensor, by_record: ByRecord) -> Contribution:
        left, right = _places(inputs, shape[: len(summed)]), _places(gradient, shape[len(summed) :])
        return Outer.cheaper_form(
            shape, by_record(tf.cast(left, layer.kernel.dtype)), by_record(right)
        )

    return _with_kernel(layer, call, inputs, kernel_contribution)


def _by_patches_of_gradients(
    shape: tuple[int, ...],
    images: tf.Tensor,
    gradient: tf.Tensor,
    padding: str,
    by_record: ByRecord,
) -> Direct:
    """Returns kernel gradients of a convolution with fewer channels out than in.

    Patches of its inputs would be larger: `gradient[k, c, d] = sum_s images[s, c] g[s - k + before,
    d]` takes padded patches of g in reverse order.
    """
    height, width = shape[:2]
    channels, filters = shape[2:]
    same = padding == "SAME"
    pads = [
        [size // 2 if same else size - 1, (size - 1) // 2 if same else size - 1]
        for size in (height, width)
    ]
    padded = pad(gradient, [[0, 0], *pads, [0, 0]])
    left = by_record(images)
    right = by_record(_patches(padded, (height, width), (1, 1), (1, 1), "VALID"))
    values = tf.reshape(
        tf.linalg.matmul(left, right, transpose_a=True), [-1, channels, height, width, filters]
    )
    return Direct(shape, tf.transpose(tf.reverse(values, [2, 3]), [0, 2, 3, 1, 4]))


def _transposed_convolution(
    layer: Layer, call: Callable[..., tf.Tensor], inputs: tf.Tensor
) -> Probed | None:
    """Probes a Conv2DTranspose, the gradient of a convolution: input and output swap roles."""
    if (
        layer.data_format != "channels_last"
        or layer.output_padding is not None
        or layer.groups != 1
    ):
        return None
    if tuple(layer.dilation_rate) != (1, 1) or None in inputs.shape.as_list()[1:]:
        return None
    inputs = tf.cast(inputs, layer.kernel.dtype)

    def kernel_contribution(gradient: tf.Tensor, by_record: ByRecord) -> Contribution:
        patches = _patches(
            gradient, layer.kernel_size, layer.strides, (1, 1), layer.padding.upper()
        )
        return Outer.cheaper_form(tuple(layer.kernel.shape), by_record(patches), by_record(inputs))

    return _with_kernel(layer, call, inputs, kernel_contribution)


def looked_up(layer: Layer, inputs: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns an embedding's output and its ids.

    An id out of range makes its record's loss NaN instead of raising (contract 8).

    Args:
      layer: The embedding.
      inputs: Ids, a numeric tensor of any shape.

    Returns:
      The rows of the table, and int32 ids, 0 where they are out of range.
    """
    ids = tf.cast(inputs, tf.int32)
    known = (ids >= 0) & (ids < layer.embeddings.shape[0])
    ids = tf.where(known, ids, tf.zeros_like(ids))
    outputs = tf.nn.embedding_lookup(layer.embeddings, ids)
    return tf.where(known[..., None], outputs, tf.constant(float("nan"), outputs.dtype)), ids


def _embedding(layer: Layer, call: Callable[..., tf.Tensor], inputs: tf.Tensor) -> Probed | None:
    if inputs.shape.rank is None or inputs.shape.rank < 1:
        return None
    outputs, ids = looked_up(layer, inputs)

    def contributions(gradients: Sequence[tf.Tensor], by_record: ByRecord) -> ByVariable:
        values = by_record(gradients[0])
        each = by_record(tf.expand_dims(ids, -1))[:, :, 0]
        return [(layer.embeddings, Lookup(tuple(layer.embeddings.shape), each, values))]

    return Probed([outputs], lambda: outputs, contributions)


def _normalization(
    layer: Layer, call: Callable[..., tf.Tensor], inputs: tf.Tensor
) -> Probed | None:
    """Probes a LayerNormalization or GroupNormalization: `normalized * gamma + beta`."""
    rank = inputs.shape.rank
    if rank is None or None in inputs.shape.as_list()[1:]:
        return None
    axes = [
        axis % rank
        for axis in (layer.axis if isinstance(layer.axis, list | tuple) else [layer.axis])
    ]
    if 0 in axes or sorted(axes) != axes:
        return None
    with without(layer, scale=False, center=False, gamma=None, beta=None):
        normalized = outputs = call(inputs)
    shape = [size if axis in axes else 1 for axis, size in enumerate(normalized.shape.as_list())]
    if layer.scale:
        outputs *= tf.reshape(layer.gamma, shape)
    if layer.center:
        outputs += tf.reshape(layer.beta, shape)

    def contributions(gradients: Sequence[tf.Tensor], by_record: ByRecord) -> ByVariable:
        others = [axis for axis in range(1, rank) if axis not in axes]
        pairs: ByVariable = []
        for used, name, factor in ((layer.scale, "gamma", normalized), (layer.center, "beta", 1.0)):
            if used:
                variable = getattr(layer, name)
                each = tf.reduce_sum(gradients[0] * factor, axis=others)
                flat = tf.reshape(each, [-1, 1, variable.shape.num_elements()])
                values = tf.reduce_sum(by_record(flat), axis=1)
                own = Direct(tuple(variable.shape), tf.reshape(values, [-1, *variable.shape]))
                pairs.append((variable, own))
        return pairs

    return Probed([outputs], lambda: outputs, contributions)


RULES: dict[type, Rule] = {
    keras.layers.Dense: _dense,
    keras.layers.Conv1D: _convolution,
    keras.layers.Conv2D: _convolution,
    keras.layers.Conv3D: _convolution,
    keras.layers.DepthwiseConv2D: _depthwise,
    keras.layers.SeparableConv2D: _separable,
    keras.layers.EinsumDense: _einsum_dense,
    keras.layers.Conv2DTranspose: _transposed_convolution,
    keras.layers.Embedding: _embedding,
    keras.layers.LayerNormalization: _normalization,
    keras.layers.GroupNormalization: _normalization,
}
"""Keyed by exact class: a subclass may compute something else."""


def refuse_mixing(layer: Layer, training: object) -> None:
    """Refuses a layer that lets records influence each other (contract 3).

    Batch normalisation that is frozen or called with `training=False` uses its saved moments and
    passes.

    Args:
      layer: The layer.
      training: The argument `training` of its call, or None.

    Raises:
      UnsupportedLayerError: The layer normalises a record by the others of its batch.
    """
    if is_batch_normalization(layer) and layer.trainable and training not in (None, False, 0):
        raise UnsupportedLayerError(
            f"{layer.name} is a {type(layer).__name__}, which normalises a record by the others "
            "of its batch: one record would move all gradients, and no clip would bound its "
            "influence.\nFreeze it (layer.trainable = False), call it with training=False, or use "
            "dpvi.keras.layers.GroupNormalization or LayerNormalization."
        )


def is_batch_normalization(layer: Layer) -> bool:
    """Returns whether a layer is a Keras batch normalisation or a subclass of one."""
    names = {cls.__name__ for cls in type(layer).__mro__}
    return bool(names & {"BatchNormalization", "BatchNormalizationBase", "SyncBatchNormalization"})
