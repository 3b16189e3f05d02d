"""Layers vectorized over records as a whole, with their sublayers: recurrent layers and layers without a rule."""

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
    Found,
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

_UNROLLED = 64  # Steps.


def is_unit(layer: Layer) -> bool:
    """Returns whether a layer's sublayer calls cannot be recorded: recurrent layers run them in a loop of their own."""
    return isinstance(layer, keras.layers.RNN | Whole)


def around(layer: Layer, layers: Sequence[Layer], units: Sequence[Layer]) -> Layer | None:
    """Returns the smallest layer around this one that is no unit yet, or None; skips models that only call their layers."""
    known = {id(unit) for unit in units}
    holding = []
    for other in layers:
        inner = layers_within(other, include_self=False)
        if (
            id(other) not in known
            and not is_graph_of_layers(other)
            and any(one is layer for one in inner)
        ):
            holding.append((len(inner), other))
    return min(holding, key=lambda pair: pair[0])[1] if holding else None


def by_map(
    layer: Layer,
    variables: Sequence[tf.Variable],
    original: Callable[..., Structure],
    inputs: Structure,
    args: tuple[Structure, ...],
    kwargs: dict[str, Structure],
) -> Probed:
    """Probes any layer: per-record gradients of `variables` from a second forward pass, vectorized over the records."""
    # The forward pass of embeddings raises for an id out of range, which would reveal a record.
    tables = [
        one
        for one in layers_within(layer, include_self=False)
        if type(one) is keras.layers.Embedding
    ]

    def lookups() -> contextlib.AbstractContextManager[None]:
        return calls_seen(tables, lambda table, _: lambda ids: looked_up(table, ids)[0])

    with lookups():
        outputs = original(inputs, *args, **kwargs)
    leaves, joined = _tensors_of(layer, outputs)
    given = (inputs, args, kwargs)
    tensors = [leaf for leaf in tf.nest.flatten(given) if tf.is_tensor(leaf)]
    masks = [keras_mask(tensor) for tensor in tensors]

    def again(of_record: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        left = iter(of_record)
        filled = [next(left) if tf.is_tensor(leaf) else leaf for leaf in tf.nest.flatten(given)]
        one_inputs, one_args, one_kwargs = tf.nest.pack_sequence_as(given, filled)
        return _tensors_of(layer, original(one_inputs, *one_args, **one_kwargs))[0]

    def one(
        values: tuple[Sequence[tf.Tensor], Sequence[tf.Tensor], Sequence[tf.Tensor]],
    ) -> Sequence[tf.Tensor]:
        of_record, their_masks, by_outputs = values
        left = iter(their_masks)
        for part, mask in zip(of_record, masks, strict=True):
            if mask is not None:
                set_keras_mask(part, next(left))
        graph = tf.compat.v1.get_default_graph()
        known = len(graph.get_operations())
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(variables)
            with _unrolled(layer, inputs), lookups():
                results = again(of_record)
            _refuse_random(layer, graph, known, results)
        found = tape.gradient(
            results, variables, output_gradients=by_outputs, unconnected_gradients="zero"
        )
        refuse_varying_shapes(graph, known)
        return [tf.convert_to_tensor(part) for part in found]

    def contributions(gradients: Sequence[tf.Tensor], by_record: ByRecord) -> Found:
        given_masks = [mask for mask in masks if mask is not None]
        records, their_masks, by_outputs = (
            [by_record.split(part) for part in parts] for parts in (tensors, given_masks, gradients)
        )
        each = map_apart(one, (records, their_masks, by_outputs))
        pairs = zip(variables, each, strict=True)
        return [(variable, Direct(tuple(variable.shape), values)) for variable, values in pairs]

    return Probed(leaves, joined, contributions)


def _unrolled(layer: Layer, inputs: Structure) -> contextlib.AbstractContextManager[None]:
    """While active, unrolls a recurrent layer over few steps: vectorized, it traces and runs in a third of the time."""
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
    """Returns a layer's outputs as tensors with the same rows, and a function that restores outputs from tensors.

    A distribution is replaced by its parameters.
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
    """Raises if results depend on random draws; the unused samples of TFP's distribution layers are ignored."""
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
            "trainable variables: gradients and loss would use different draws (contract C5).\n"
            "Draw in a separate layer, such as Dropout before it (and set a recurrent layer's "
            "dropout=0 and recurrent_dropout=0)."
        )
