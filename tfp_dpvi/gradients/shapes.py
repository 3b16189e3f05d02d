"""What keeps the records of a batch apart once they are mapped and compiled: shapes, and rounds, of their own.

Under XLA (TensorFlow 2.15) all records of a mapped batch get the shape of one of them, without a word, where a shape depends on
what a record holds: with `tf.boolean_mask` in its loss, one record decided which entries of all others counted, and moved
their sum by 97 clips. And its eigenvalues of a batch take as many rounds as the slowest matrix needs: that moved it by 35.
"""

from __future__ import annotations

import contextlib
import contextvars
import re
from collections.abc import Iterator
from typing import Any

from tfp_dpvi.gradients.side_effects import called_nodes, first_added

# Their results have as many rows as their inputs' values say. (Sparse segments: mapped, they read other records' rows.)
_COUNTING = (
    "Where", "Unique", "UniqueV2", "UniqueWithCounts", "UniqueWithCountsV2", "ListDiff", "DynamicPartition",
    "NonMaxSuppression", "NonMaxSuppressionV2", "NonMaxSuppressionV3", "NonMaxSuppressionV4", "NonMaxSuppressionV5",
    "SegmentSum", "SegmentMean", "SegmentProd", "SegmentMin", "SegmentMax", "SparseSegmentSum", "SparseSegmentMean",
    "SparseSegmentSqrtN", "SparseSegmentSumWithNumSegments", "SparseSegmentMeanWithNumSegments",
    "SparseSegmentSqrtNWithNumSegments",
)  # fmt: skip
# Which of their inputs are sizes or places that give the result its shape.
_SIZED = {
    "Slice": (1, 2), "StridedSlice": (1, 2, 3), "Range": (0, 1, 2), "LinSpace": (2,), "Fill": (0,), "Tile": (1,), "TopKV2": (1,),
    "Pad": (1,), "PadV2": (1,), "MirrorPad": (1,), "BroadcastTo": (1,), "OneHot": (1,), "Bincount": (1,), "DenseBincount": (1,),
    "Reshape": (1,), "SplitV": (1,), "ScatterNd": (2,), "UnsortedSegmentSum": (2,), "StatelessRandomUniformV2": (0,),
    "StatelessRandomNormalV2": (0,), "StatelessTruncatedNormalV2": (0,),
}  # fmt: skip
_ROUNDS = ("SelfAdjointEigV2", "XlaSelfAdjointEig", "Svd", "XlaSvd", "Eig")
_DYNAMIC = re.compile(r"\[[\d,]*<=\d")
_STRICT = contextvars.ContextVar("strict", default=False)


class VaryingShapeError(ValueError):
    """Compiled by XLA, the records of a batch would not stay apart. Nothing was spent."""


@contextlib.contextmanager
def strictly() -> Iterator[None]:
    """Where what is compiled cannot be looked at afterwards: refuses whatever may vary in a record's graph."""
    token = _STRICT.set(True)
    try:
        yield
    finally:
        _STRICT.reset(token)


def refuse_varying_shapes(graph: Any, num_known: int) -> None:
    """Raises if operations added to a graph since it had `num_known` of them have shapes that depend on the record.

    Args:
      graph: the graph in which one record's loss was traced, by `tf.vectorized_map`.
      num_known: how many operations it had before.

    Raises:
      ValueError: with the way out.
    """
    strict = _STRICT.get()
    inside = (*_COUNTING, *_SIZED, *_ROUNDS) if strict else _COUNTING
    found = first_added(graph, num_known, lambda op: _varies(op, strict), lambda node: node.op in inside)
    if found is not None:
        more = " Or compile(jit_compile=False): under tf.distribute the check is stricter with XLA." if strict else ""
        raise ValueError(
            f"The loss of a record computes a tensor whose shape depends on the record's values ({found}), as tf.boolean_mask, "
            "tf.where with one argument, tf.unique and x[:k] with a computed k do. Records of a batch are computed side by side "
            f"and need one shape: weight or replace entries, tf.where(mask, x, 0.0), in place of dropping them.{more}"
        )


def _varies(op: Any, strict: bool) -> bool:
    if op.type in _COUNTING:
        return _depends_on_record(op)
    if strict and op.type in _ROUNDS:
        return True
    sizes = _SIZED.get(op.type, ())
    # A shape that was set by hand may hide one that varies.
    unknown = strict or not all(out.shape.is_fully_defined() for out in op.outputs)
    return unknown and any(_depends_on_record(op.inputs[number].op) for number in sizes)


def _depends_on_record(op: Any) -> bool:
    """Whether an operation reads the map's loop variable, by which records are gathered, at any distance."""
    waiting, seen = [op], set()
    while waiting:
        one = waiting.pop()
        if one.name in seen:
            continue
        seen.add(one.name)
        if one.type == "PlaceholderWithDefault":
            return True
        if one.type not in ("Shape", "ShapeN", "Size", "Rank") or not one.inputs[0].shape.is_fully_defined():
            waiting += [value.op for value in one.inputs]
    return False


def refuse_dynamic_shapes(compiled: Any, arguments: tuple[Any, ...]) -> None:
    """Raises if XLA's form of a function has shapes that it only knows a bound of, which are those that depend on values.

    Or if it has decompositions that take rounds until the last matrix of a batch has converged.

    Args:
      compiled: `tf.function` with `jit_compile=True`.
      arguments: of a call of it, which is not made.

    Raises:
      VaryingShapeError: with what to do.
    """
    graph = compiled.get_concrete_function(*arguments).graph
    operations = graph.get_operations()
    kinds = [(op.type, op.name) for op in operations] + [(n.op, n.name) for n in called_nodes(graph, operations)]
    found = next((name for kind, name in kinds if kind in _ROUNDS), None)
    if found is not None:
        raise VaryingShapeError(
            f"Compiled by XLA, {found} decomposes the matrices of a batch in as many rounds as the slowest needs: one record's "
            "would change the others'. compile(jit_compile=False) does without XLA."
        )
    dynamic = _DYNAMIC.search(compiled.experimental_get_compiler_ir(*arguments)(stage="hlo"))
    if dynamic is not None:
        raise VaryingShapeError(
            f"Compiled by XLA, the step has a tensor whose shape depends on values ({dynamic.group()}]): XLA would give the "
            "records of a batch the shape of one of them. Replace entries, tf.where(mask, x, 0.0), in place of dropping them, or "
            "compile(jit_compile=False)."
        )
