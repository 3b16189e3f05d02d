"""What keeps the examples of a batch apart: no writes, and shapes and rounds of their own once they are mapped and compiled.

Under XLA (TensorFlow 2.15) all records of a mapped batch get the shape of one of them, without a word, where a shape depends on
what a record holds: with `tf.boolean_mask` in its loss, one record decided which entries of all others counted, and moved
their sum by 97 clips. And its eigenvalues of a batch take as many rounds as the slowest matrix needs: that moved it by 35.
"""

from __future__ import annotations

import contextlib
import contextvars
import re
from collections.abc import Iterator

from tfp_dpvi._tf import operations_since, tf

# Operations with a state that a loss may use: reading variables, calling functions, drawing numbers, raising errors.
_HARMLESS = re.compile(
    "ReadVariableOp|ResourceGather|VarHandleOp|VarIsInitializedOp|VariableShape|StatefulPartitionedCall|While|If|Case|Placeholder"
    "|Assert|Random|TruncatedNormal|ParameterizedTruncated|Multinomial|StatefulUniform|StatefulStandardNormal"
)
# Their results have as many rows as their inputs' values say. (Sparse segments: mapped, they read other records' rows.)
_COUNTING = re.compile(
    "Where$|Unique|ListDiff|DynamicPartition|NonMaxSuppression|(Sparse)?Segment(Sum|Mean|SqrtN|Prod|Min|Max)(WithNum|$)"
)
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


def refuse_writes(graph: tf.Graph, num_known: int) -> None:
    """Raises `ValueError` if operations added to a graph since it had `num_known` of them leave something behind (contract C1).

    Batch normalisation in training mode and Keras metrics write to variables, which would hold records exactly and be
    saved; tables, summaries and printing keep or show records in other places. In eager mode nothing is found.
    """
    for op in operations_since(graph, num_known):
        writes = op.type.startswith(("ResourceScatter", "ResourceApply")) or "Assign" in op.type
        if writes or (op.op_def.is_stateful and not _HARMLESS.match(op.type)):
            raise ValueError(
                f"The loss of a record writes to a variable or elsewhere ({op.name}): that is neither clipped nor noisy. Use "
                "GroupNormalization for batch normalisation, or freeze it (trainable=False); make recurrent layers stateful=False, and "
                "keep metrics, tables, summaries and printing out of the loss."
            )


@contextlib.contextmanager
def strictly() -> Iterator[None]:
    """Where what is compiled cannot be looked at afterwards: refuses whatever may vary in a record's graph."""
    token = _STRICT.set(True)
    try:
        yield
    finally:
        _STRICT.reset(token)


def refuse_varying_shapes(graph: tf.Graph, num_known: int) -> None:
    """Raises `ValueError` if operations added to the graph of one record since it had `num_known` vary in shape with it."""
    strict = _STRICT.get()
    for op in operations_since(graph, num_known):
        if _varies(op, strict, of_record=op.graph is graph):
            more = (
                " Or compile(jit_compile=False): under tf.distribute the check is stricter with XLA." if strict else ""
            )
            raise ValueError(
                f"The loss of a record computes a tensor whose shape depends on the record's values ({op.name}), as "
                "tf.boolean_mask, tf.where with one argument, tf.unique and x[:k] with a computed k do. Records of a batch are "
                "computed side by side and need one shape: weight or replace entries, tf.where(mask, x, 0.0), in place of "
                f"dropping them.{more}"
            )


def _varies(op: tf.Operation, strict: bool, of_record: bool) -> bool:
    """Whether an operation's result may vary in shape; in a called function, whose inputs are not followed, by its kind."""
    if _COUNTING.match(op.type):
        return not of_record or _depends_on_record(op)
    if strict and (op.type in _ROUNDS or (op.type in _SIZED and not of_record)):
        return True
    # A shape that was set by hand may hide one that varies.
    unknown = strict or not all(out.shape.is_fully_defined() for out in op.outputs)
    return of_record and unknown and any(_depends_on_record(op.inputs[number].op) for number in _SIZED.get(op.type, ()))


def _depends_on_record(op: tf.Operation) -> bool:
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


def refuse_dynamic_shapes(
    compiled: tf.types.experimental.PolymorphicFunction, arguments: tuple[tf.Tensor, ...]
) -> None:
    """Raises `VaryingShapeError` if XLA knows only a bound of a shape in a function, as of those that depend on values.

    Or if it has decompositions that take rounds until the last matrix of a batch has converged. The call is not made.
    """
    graph = compiled.get_concrete_function(*arguments).graph
    found = next((op.name for op in operations_since(graph, 0) if op.type in _ROUNDS), None)
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
