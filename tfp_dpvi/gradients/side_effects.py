"""What a record's loss may not do: leave anything behind, past clip and noise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tensorflow.python.framework import op_def_registry

from tfp_dpvi._tf import tf

# Operations with a state that a loss may use: reading variables, calling functions, drawing numbers, raising errors.
_HARMLESS = (
    "ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VarHandleOp", "VarIsInitializedOp", "VariableShape",
    "StatefulPartitionedCall", "While", "If", "Case", "Placeholder", "Assert", "Random", "TruncatedNormal",
    "ParameterizedTruncatedNormal", "Multinomial", "StatefulUniform", "StatefulStandardNormal",
)  # fmt: skip


def _leaves_something_behind(kind: str) -> bool:
    if kind.startswith(("ResourceScatter", "ResourceApply")) or "Assign" in kind:
        return True
    definition = op_def_registry.get(kind)
    return definition is not None and definition.is_stateful and not kind.startswith(_HARMLESS)


def _called(operation: Any) -> set[str]:
    names = set()
    for attr in operation.attr.values():
        if attr.HasField("func"):
            names.add(attr.func.name)
        names |= {function.name for function in attr.list.func}
    return names


def called_nodes(graph: Any, operations: Sequence[Any]) -> Iterator[Any]:
    """The nodes of all functions that these operations of a graph call, at any depth, as `NodeDef`s."""
    called = {name for op in operations for name in _called(op.node_def)}
    if not called:
        return
    library = {function.signature.name: function for function in graph.as_graph_def().library.function}
    seen: set[str] = set()
    while called:
        name = called.pop()
        if name in seen or name not in library:
            continue
        seen.add(name)
        for node in library[name].node_def:
            yield node
            called |= _called(node)


def first_added(
    graph: Any, num_known: int, is_it: Callable[[Any], bool], is_it_inside: Callable[[Any], bool]
) -> str | None:
    """Name of the first operation added to a graph since it had `num_known` of them that is what is looked for, or None.

    Args:
      graph: where Python traces, which is no graph in eager mode: then nothing is found.
      num_known: how many operations it had before.
      is_it: of an operation of the graph itself.
      is_it_inside: of a `NodeDef` inside conditionals, loops and calls.
    """
    if not isinstance(graph, tf.Graph):
        return None
    added = graph.get_operations()[num_known:]
    found = next((op.name for op in added if is_it(op)), None)
    return found or next((node.name for node in called_nodes(graph, added) if is_it_inside(node)), None)


def refuse_writes(graph: Any, num_known: int) -> None:
    """Raises if operations added to a graph since it had `num_known` of them leave something behind (contract C1).

    Batch normalisation in training mode and Keras metrics write to variables, which would hold records exactly and be
    saved; tables, summaries and printing keep or show records in other places.

    Args:
      graph: the graph in which one record's loss was traced.
      num_known: how many operations it had before.

    Raises:
      ValueError: with the way out.
    """
    found = first_added(
        graph, num_known, lambda op: _leaves_something_behind(op.type), lambda node: _leaves_something_behind(node.op)
    )
    if found is not None:
        raise ValueError(
            f"The loss of a record writes to a variable or elsewhere ({found}): what it leaves behind is neither clipped nor "
            "noisy. Call batch normalisation with training=False or use layer or group normalisation, and keep metrics, "
            "tables, summaries and printing out of the loss."
        )
