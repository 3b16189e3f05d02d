"""Composite layers: vectorized over records as a whole, with their sublayers.

Recurrent layers are, and layers whose sublayers cannot be separated.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Sequence

from tfp_dpvi._tf import (
    Layer,
    Structure,
    calls_seen,
    is_graph_of_layers,
    keras,
    keras_mask,
    layers_within,
    map_apart,
    operations_since,
    set_keras_mask,
    tf,
    tfd,
)
from tfp_dpvi.ghost.contributions import Direct
from tfp_dpvi.ghost.rules import (
    ByRecord,
    ByVariable,
    Probed,
    UnsupportedLayerError,
    Whole,
    looked_up,
    without,
)
from tfp_dpvi.gradients.base import take_apart
from tfp_dpvi.gradients.isolation import refuse_varying_shapes

_RANDOM = re.compile(
    r"Random|Multinomial|ParameterizedTruncated|StatelessParam|StatefulUniform|StatefulStandard"
)

# A recurrent layer over at most so many steps is unrolled.
_UNROLLED = 64


def is_composite(layer: Layer) -> bool:
    """Returns whether the calls of a layer's sublayers cannot be recorded.

    Recurrent layers run them in a loop of their own.
    """
    return isinstance(layer, keras.layers.RNN | Whole)


def smallest_enclosing(
    layer: Layer, layers: Sequence[Layer], composites: Sequence[Layer]
) -> Layer | None:
    """Returns the smallest layer around a layer that is not composite yet, or None.

    Models that only call their layers are left out.

    Args:
      layer: The layer.
      layers: All layers of the model, sublayers included.
      composites: The layers that are vectorized as a whole.
    """
    known = {id(composite) for composite in composites}
    enclosing = []
    for other in layers:
        inner = layers_within(other, include_self=False)
        holds = any(sublayer is layer for sublayer in inner)
        if holds and id(other) not in known and not is_graph_of_layers(other):
            enclosing.append((len(inner), other))
    return min(enclosing, key=lambda pair: pair[0])[1] if enclosing else None


def by_map(
    layer: Layer,
    variables: Sequence[tf.Variable],
    original: Callable[..., Structure],
    inputs: Structure,
    args: tuple[Structure, ...],
    kwargs: dict[str, Structure],
) -> Probed:
    """Probes any layer by a second forward pass, vectorized over the records.

    Args:
      layer: The layer.
      variables: The variables to differentiate by.
      original: The layer's own call.
      inputs: The first argument of the call.
      args: The other positional arguments.
      kwargs: The keyword arguments.
    """
    # The forward pass of embeddings raises for an id out of range, which would reveal a record.
    tables = [
        sublayer
        for sublayer in layers_within(layer, include_self=False)
        if type(sublayer) is keras.layers.Embedding
    ]

    def lookups() -> contextlib.AbstractContextManager[None]:
        return calls_seen(tables, lambda table, _: lambda ids: looked_up(table, ids)[0])

    with lookups():
        outputs = original(inputs, *args, **kwargs)
    leaves, joined = _tensors_of(layer, outputs)
    arguments = ((inputs, *args), kwargs)
    tensors = [leaf for leaf in tf.nest.flatten(arguments) if tf.is_tensor(leaf)]
    masks = [keras_mask(tensor) for tensor in tensors]
    present_masks = [mask for mask in masks if mask is not None]

    def call_again(tensors_of_record: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        left = iter(tensors_of_record)
        leaves = tf.nest.flatten(arguments)
        filled = [next(left) if tf.is_tensor(leaf) else leaf for leaf in leaves]
        positional, named = tf.nest.pack_sequence_as(arguments, filled)
        return _tensors_of(layer, original(*positional, **named))[0]

    def gradient_of_record(
        tensors_of_record: Sequence[tf.Tensor],
        masks_of_record: Sequence[tf.Tensor],
        by_outputs: Sequence[tf.Tensor],
    ) -> Sequence[tf.Tensor]:
        left = iter(masks_of_record)
        for part, mask in zip(tensors_of_record, masks, strict=True):
            if mask is not None:
                set_keras_mask(part, next(left))
        graph = tf.compat.v1.get_default_graph()
        known = len(graph.get_operations())
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(variables)
            with _unrolled(layer, inputs), lookups():
                results = call_again(tensors_of_record)
            _refuse_random(layer, graph, known, results)
        gradients = tape.gradient(
            results, variables, output_gradients=by_outputs, unconnected_gradients="zero"
        )
        refuse_varying_shapes(graph, known)
        return [tf.convert_to_tensor(part) for part in gradients]

    def contributions(gradients: Sequence[tf.Tensor], by_record: ByRecord) -> ByVariable:
        rows = [
            [by_record.split(part) for part in parts]
            for parts in (tensors, present_masks, gradients)
        ]
        each = map_apart(lambda row: gradient_of_record(*row), rows)
        pairs = zip(variables, each, strict=True)
        return [(variable, Direct(tuple(variable.shape), values)) for variable, values in pairs]

    return Probed(leaves, joined, contributions)


def _unrolled(layer: Layer, inputs: Structure) -> contextlib.AbstractContextManager[None]:
    """Unrolls a recurrent layer over few steps, while active.

    Vectorized, it then traces and runs in a third of the time.
    """
    recurrent = isinstance(layer, keras.layers.RNN) and not layer.time_major
    steps = inputs.shape[1] if recurrent and isinstance(inputs, tf.Tensor) else None
    return (
        contextlib.nullcontext()
        if steps is None or steps > _UNROLLED
        else without(layer, unroll=True)
    )


def _tensors_of(
    layer: Layer, outputs: Structure
) -> tuple[list[tf.Tensor], Callable[[], Structure]]:
    """Returns a layer's outputs as tensors, and a function that restores the outputs.

    The tensors have the same rows; a distribution is replaced by its parameters.
    """
    if not isinstance(outputs, tfd.Distribution):
        return tf.nest.flatten(outputs), lambda: outputs
    try:
        parts, whole = take_apart(outputs)
    except TypeError as error:
        raise UnsupportedLayerError(
            f"{layer.name} has weights of its own, and returns a distribution: {error} Or move "
            "them to a layer that returns tensors."
        ) from error
    return parts, lambda: whole(parts)


def _refuse_random(layer: Layer, graph: tf.Graph, known: int, results: Sequence[tf.Tensor]) -> None:
    """Refuses results that depend on random draws.

    The unused samples of TFP's distribution layers are ignored.
    """
    used, waiting = set(), [result.op for result in results]
    while waiting:
        if (op := waiting.pop()) not in used:
            used.add(op)
            waiting += [value.op for value in op.inputs]
    new = (op for op in operations_since(graph, known) if op.graph is not graph or op in used)
    drawn = next((op.name for op in new if _RANDOM.search(op.type)), None)
    if drawn is not None:
        raise UnsupportedLayerError(
            f"{layer.name} ({type(layer).__name__}) draws random numbers ({drawn}) and has "
            "trainable variables: gradients and loss would use different draws (contract 5).\n"
            "Draw in a separate layer, such as Dropout before it (and set a recurrent layer's "
            "dropout=0 and recurrent_dropout=0)."
        )
