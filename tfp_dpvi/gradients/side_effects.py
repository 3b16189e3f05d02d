"""What a record's loss may not do: write to a variable, past clip and noise."""

from __future__ import annotations

from typing import Any

from tfp_dpvi._keras import tf


def _writes(kind: str) -> bool:
    return "Assign" in kind or kind.startswith(("ResourceScatter", "ResourceApply"))


def refuse_writes(graph: Any, num_known: int) -> None:
    """Raises if operations added to a graph since it had `num_known` of them write to a variable (contract C1).

    Batch normalisation in training mode and Keras metrics do: their variables would hold records exactly, and be saved.

    Args:
      graph: the graph in which one record's loss was traced.
      num_known: how many operations it had before.

    Raises:
      ValueError: with the way out.
    """
    if not isinstance(graph, tf.Graph):
        return
    added = graph.get_operations()[num_known:]
    found = next((op.name for op in added if _writes(op.type)), None)
    called = {attr.func.name for op in added for attr in op.node_def.attr.values() if attr.HasField("func")}
    if found is None and called:  # Inside conditionals, loops and calls.
        library = {function.signature.name: function for function in graph.as_graph_def().library.function}
        seen: set[str] = set()
        while called and found is None:
            name = called.pop()
            if name in seen or name not in library:
                continue
            seen.add(name)
            for node in library[name].node_def:
                found = node.name if _writes(node.op) else found
                called |= {attr.func.name for attr in node.attr.values() if attr.HasField("func")}
    if found is not None:
        raise ValueError(
            f"The loss of a record writes to a variable ({found}): what it writes is neither clipped nor noisy. Call "
            "batch normalisation with training=False or use layer or group normalisation, and keep metrics and other "
            "state out of the loss."
        )
