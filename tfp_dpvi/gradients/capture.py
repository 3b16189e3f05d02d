"""Watches layers while a batch goes through them, to get at the factors of per-record gradients."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tfp_dpvi._tf import keras, refuse_keras_3, tf
from tfp_dpvi.gradients import layer_rules
from tfp_dpvi.gradients.contributions import Contribution, Direct, combined
from tfp_dpvi.gradients.layer_rules import UnsupportedLayerError
from tfp_dpvi.gradients.mapping import map_records
from tfp_dpvi.gradients.shapes import refuse_varying_shapes

_RANDOM = re.compile(r"Random|Multinomial|ParameterizedTruncated|StatelessParam|StatefulUniform|StatefulStandard")


@dataclasses.dataclass(frozen=True)
class _Call:
    layer: Any
    probed: layer_rules.Probed
    rows: int | None


class Capture:
    """The calls of trainable layers during one forward pass of a batch.

    Args:
      layers: Keras layers, sublayers included (`layers_of`).
      tape: the `tf.GradientTape` under which the pass runs; it must watch no variable.
      rows_each: for each call in order, how many rows the layer saw for one record; None to infer it from
        `num_records`, which must then be known while tracing.
      num_records: static number of records, or None.
      mapped: take no rule but `tf.vectorized_map` for every layer, embeddings excepted.

    Attributes:
      notes: sentences about layers that no rule knows.
    """

    def __init__(
        self,
        layers: Sequence[Any],
        tape: Any,
        *,
        rows_each: Sequence[int] | None = None,
        num_records: int | None = None,
        mapped: bool = False,
    ) -> None:
        self._layers = layers
        self._tape = tape
        self._rows_each = rows_each
        self._num_records = num_records
        self._mapped = mapped
        self._calls: list[_Call] = []
        self._paused = False
        self._graph = tf.compat.v1.get_default_graph()
        self.notes: list[str] = []

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """While active, calls of the layers are recorded."""
        watched = []
        try:
            for layer in self._layers:
                if layer._trainable_weights and layer.trainable:
                    original = layer.call
                    held = vars(layer).get("call")
                    # Past Keras's attribute tracking, which would save it.
                    object.__setattr__(layer, "call", self._watched(layer, original))
                    watched.append((layer, held))
            yield
        finally:
            for layer, held in watched:
                if held is None:
                    object.__delattr__(layer, "call")
                else:
                    object.__setattr__(layer, "call", held)

    def _watched(self, layer: Any, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(inputs: Any, *args: Any, **kwargs: Any) -> Any:
            # In another graph Keras is only inferring shapes, or the layer is inside a function or loop of its own.
            if self._paused or tf.compat.v1.get_default_graph() is not self._graph:
                return original(inputs, *args, **kwargs)
            # Of embeddings in any case: their own forward pass raises for an id out of range, which would tell of a record.
            mapped = self._mapped and type(layer) is not keras.layers.Embedding
            rule = None if mapped else layer_rules.RULES.get(type(layer))
            plain = not args and all(value is None for value in kwargs.values())
            probed = rule(layer, inputs) if rule is not None and plain and _one_dtype(layer) else None
            if probed is None:
                probed = self._by_map(layer, original, inputs, args, kwargs)
                if rule is None and not self._mapped:
                    self.notes.append(
                        f"{layer.name} ({type(layer).__name__}): no rule for its gradient norms, so its per-record "
                        "gradients are held in memory."
                    )
            self._tape.watch(probed.probes)
            self._calls.append(_Call(layer, probed, probed.probes[0].shape[0]))
            return probed.finish()

        return tf.autograph.experimental.do_not_convert(call)

    def _by_map(
        self, layer: Any, original: Callable[..., Any], inputs: Any, args: Any, kwargs: Any
    ) -> layer_rules.Probed:
        """Any layer: its own variables' gradients by one record, mapped over the records."""
        outputs = original(inputs, *args, **kwargs)
        variables = list(layer._trainable_weights)
        given = (inputs, args, kwargs)
        tensors = [leaf for leaf in tf.nest.flatten(given) if tf.is_tensor(leaf)]

        def again(leaves: Sequence[Any]) -> list[Any]:
            left = iter(leaves)
            filled = [next(left) if tf.is_tensor(leaf) else leaf for leaf in tf.nest.flatten(given)]
            one_inputs, one_args, one_kwargs = tf.nest.pack_sequence_as(given, filled)
            return tf.nest.flatten(original(one_inputs, *one_args, **one_kwargs))

        def contributions(gradients: Sequence[Any], by_record: layer_rules.ByRecord) -> layer_rules.Found:
            def one(values: Any) -> list[Any]:
                leaves, by_outputs = values
                with tf.GradientTape(watch_accessed_variables=False) as tape:
                    tape.watch(variables)
                    graph = tf.compat.v1.get_default_graph()
                    known = len(graph.get_operations())
                    results = again(leaves)
                    _refuse_random(layer, graph, known)
                found = tape.gradient(results, variables, output_gradients=by_outputs, unconnected_gradients="zero")
                refuse_varying_shapes(graph, known)
                return found

            self._paused = True
            try:
                each = map_records(
                    one, ([by_record.split(part) for part in tensors], [by_record.split(part) for part in gradients])
                )
            finally:
                self._paused = False
            pairs = zip(variables, each, strict=True)
            return [(variable, Direct(tuple(variable.shape), values)) for variable, values in pairs]

        return layer_rules.Probed(tf.nest.flatten(outputs), lambda: outputs, contributions)

    @property
    def rows_each(self) -> list[int]:
        """For each call, how many rows the layer saw for one record."""
        if self._rows_each is not None:
            if len(self._rows_each) != len(self._calls):
                raise UnsupportedLayerError(
                    f"The layers were called {len(self._calls)} times and {len(self._rows_each)} times when the model was "
                    "checked: a pass must call the same layers each time."
                )
            return list(self._rows_each)
        num = self._num_records
        found = []
        for call in self._calls:
            if num is None or call.rows is None or call.rows % num:
                raise UnsupportedLayerError(
                    f"{call.layer.name} saw {call.rows} rows for {num} records: the first dimension of what layers see "
                    "must run over records, with equally many rows for each."
                )
            found.append(call.rows // num)
        return found

    @property
    def probes(self) -> list[Any]:
        """All tensors at which gradients are wanted."""
        return [probe for call in self._calls for probe in call.probed.probes]

    def contributions(self, gradients: Sequence[Any]) -> list[tuple[Any, Contribution]]:
        """One contribution for each variable that was used, from the gradients at `probes`."""
        found: dict[Any, list[Contribution]] = {}
        left = iter(gradients)
        for call, rows in zip(self._calls, self.rows_each, strict=True):
            own = [next(left) for _ in call.probed.probes]
            for variable, part in call.probed.contributions(own, layer_rules.ByRecord(rows)):
                found.setdefault(variable.ref(), []).append(part)
        return [(key.deref(), combined(parts)) for key, parts in found.items()]


def layers_of(model: Any) -> list[Any]:
    """A Keras layer or model and all its sublayers; a plain function's from its closure, globals and attributes."""
    found: dict[int, Any] = {}
    seen: set[int] = set()

    def visit(thing: Any, depth: int) -> None:
        if id(thing) in seen or depth > 4:
            return
        seen.add(id(thing))
        refuse_keras_3("layer", thing)
        if isinstance(thing, keras.layers.Layer):
            for layer in thing._flatten_layers():
                found.setdefault(id(layer), layer)
            return
        if isinstance(thing, tf.Module):
            for module in thing.submodules:
                visit(module, depth + 1)
            return
        if isinstance(thing, list | tuple):
            for part in thing:
                visit(part, depth + 1)
        elif isinstance(thing, dict):
            for part in thing.values():
                visit(part, depth + 1)
        elif callable(thing):
            for name in ("func", "__self__", "args", "__defaults__", "__wrapped__"):
                visit(getattr(thing, name, None), depth + 1)
            for cell in getattr(thing, "__closure__", None) or ():
                with contextlib.suppress(ValueError):  # An empty cell.
                    visit(cell.cell_contents, depth + 1)
            code = getattr(thing, "__code__", None)
            for name in code.co_names if code is not None else ():
                visit(getattr(thing, "__globals__", {}).get(name), depth + 1)
            if not hasattr(thing, "__code__") and hasattr(thing, "__dict__") and not isinstance(thing, type):
                visit(vars(thing), depth + 1)

    visit(model, 0)
    return list(found.values())


def refuse_mixing(layers: Sequence[Any]) -> None:
    """Raises for layers that let records influence each other (contract C3).

    Raises:
      ValueError: with the alternative.
    """
    for layer in layers:
        names = {cls.__name__ for cls in type(layer).__mro__}
        if names & {"BatchNormalization", "BatchNormalizationBase", "SyncBatchNormalization"}:
            raise ValueError(
                f"{layer.name} is a {type(layer).__name__}, which normalises a record by the others of its batch: then one "
                "record moves all gradients and no clip bounds its influence. Use dpvi.keras.layers.GroupNormalization or "
                "LayerNormalization."
            )


def _one_dtype(layer: Any) -> bool:
    return layer.compute_dtype == layer.variable_dtype


def _refuse_random(layer: Any, graph: Any, known: int) -> None:
    drawn = next((op.name for op in graph.get_operations()[known:] if _RANDOM.search(op.type)), None)
    if drawn is not None:
        raise UnsupportedLayerError(
            f"{layer.name} ({type(layer).__name__}) draws random numbers ({drawn}) and holds trainable variables: its "
            "gradients would come from other draws than the loss (contract C5). Draw in a layer of its own."
        )


__all__ = ["Capture", "UnsupportedLayerError", "layers_of", "refuse_mixing"]
