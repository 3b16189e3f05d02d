"""What a record's loss may not do: compute tensors whose shapes depend on what the record holds.

Mapped over a batch and compiled by XLA (TensorFlow 2.15), all records get the shape of one of them, without a word: with
`tf.boolean_mask` in its loss, one record decided which entries of all others counted, and moved their sum by 97 clips.
"""

from __future__ import annotations

import re
from typing import Any

from tfp_dpvi._keras import tf
from tfp_dpvi.gradients.side_effects import called_nodes

# Their results have as many rows as their inputs' values say.
_COUNTING = (
    "Where", "Unique", "UniqueV2", "UniqueWithCounts", "UniqueWithCountsV2", "ListDiff", "DynamicPartition",
    "NonMaxSuppression", "NonMaxSuppressionV2", "NonMaxSuppressionV3", "NonMaxSuppressionV4", "NonMaxSuppressionV5",
)  # fmt: skip
_CUTTING = ("Slice", "StridedSlice")
_DYNAMIC = re.compile(r"\[[\d,]*<=\d")


class VaryingShapeError(ValueError):
    """Under XLA a shape depends on values: records would not stay apart. Nothing was spent."""


def refuse_varying_shapes(graph: Any, num_known: int) -> None:
    """Raises if operations added to a graph since it had `num_known` of them have shapes that depend on values.

    Args:
      graph: the graph in which one record's loss was traced.
      num_known: how many operations it had before.

    Raises:
      ValueError: with the way out.
    """
    if not isinstance(graph, tf.Graph):
        return
    added = graph.get_operations()[num_known:]
    found = next((op.name for op in added if _varies(op)), None)
    if found is None:  # Inside conditionals, loops and calls.
        found = next((node.name for node in called_nodes(graph, added) if node.op in _COUNTING), None)
    if found is not None:
        raise ValueError(
            f"The loss of a record computes a tensor whose shape depends on the record's values ({found}), as tf.boolean_mask, "
            "tf.where with one argument, tf.unique and x[:k] with a computed k do. Records of a batch are computed side by side "
            "and need one shape: weight or replace entries, tf.where(mask, x, 0.0), in place of dropping them."
        )


def _varies(op: Any) -> bool:
    if op.type in _COUNTING:
        return not _is_constant(op)
    return op.type in _CUTTING and not all(out.shape.is_fully_defined() for out in op.outputs)


def _is_constant(op: Any) -> bool:
    """Whether all that an operation reads are constants: then it gives all records the same."""
    waiting, seen = [op], set()
    while waiting:
        one = waiting.pop()
        if one.name in seen:
            continue
        seen.add(one.name)
        if one.type != "Const" and (not one.inputs or one.op_def.is_stateful):
            return False
        waiting += [value.op for value in one.inputs]
    return True


def refuse_dynamic_shapes(compiled: Any, arguments: tuple[Any, ...]) -> None:
    """Raises if XLA's form of a function has shapes that it only knows a bound of, which are those that depend on values.

    Args:
      compiled: `tf.function` with `jit_compile=True`.
      arguments: of a call of it, which is not made.

    Raises:
      VaryingShapeError: with what to do.
    """
    found = _DYNAMIC.search(compiled.experimental_get_compiler_ir(*arguments)(stage="hlo"))
    if found is not None:
        raise VaryingShapeError(
            f"Compiled by XLA, the step has a tensor whose shape depends on values ({found.group()}]): XLA would give the "
            "records of a batch the shape of one of them. Replace entries, tf.where(mask, x, 0.0), in place of dropping them, or "
            "compile(jit_compile=False)."
        )
