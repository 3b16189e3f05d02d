"""Isolation of the examples of a batch: refuses what lets one record influence another.

It refuses writes, shapes that depend on values, and iterations that records share under XLA. If a
shape depends on a record's values, XLA (TensorFlow 2.15) silently gives all records of a vectorized
batch the shape of one of them: with `tf.boolean_mask` in the loss, one record chose the entries of
all others and moved their sum by 97 clips. XLA's eigenvalues of a batch iterate until the slowest
matrix converges: that moved the sum by 35 clips.
"""

from __future__ import annotations

import contextlib
import contextvars
import re
from collections.abc import Iterator

from tfp_dpvi._tf import operations_since, tf

# Stateful operations that a loss may use: reading variables, calling functions, drawing numbers,
# raising errors.
_HARMLESS = re.compile(
    "ReadVariableOp|ResourceGather|VarHandleOp|VarIsInitializedOp|VariableShape"
    "|StatefulPartitionedCall|While|If|Case|Placeholder|Assert|Random|TruncatedNormal"
    "|ParameterizedTruncated|Multinomial|StatefulUniform|StatefulStandardNormal"
    # A table is filled when its layer is made; inserting is another operation.
    "|LookupTableFind|LookupTableSize|HashTable|AnonymousHashTable"
)
# Operations whose number of rows depends on values. (Sparse segments read other records' rows when
# vectorized.)
_COUNTING = re.compile(
    "Where$|Unique|ListDiff|DynamicPartition|NonMaxSuppression"
    "|(Sparse)?Segment(Sum|Mean|SqrtN|Prod|Min|Max)(WithNum|$)"
)
# The inputs that determine the result's shape.
_SIZED = {
    "Slice": (1, 2), "StridedSlice": (1, 2, 3), "Range": (0, 1, 2), "LinSpace": (2,), "Fill": (0,),
    "Tile": (1,), "TopKV2": (1,), "Pad": (1,), "PadV2": (1,), "MirrorPad": (1,),
    "BroadcastTo": (1,), "OneHot": (1,), "Bincount": (1,), "DenseBincount": (1,), "Reshape": (1,),
    "SplitV": (1,), "ScatterNd": (2,), "UnsortedSegmentSum": (2,),
    "StatelessRandomUniformV2": (0,), "StatelessRandomNormalV2": (0,),
    "StatelessTruncatedNormalV2": (0,),
}  # fmt: skip
_ROUNDS = ("SelfAdjointEigV2", "XlaSelfAdjointEig", "Svd", "XlaSvd", "Eig")
_JUMPS = (
    "ArgMax",
    "ArgMin",
    "Bucketize",
    "Cast",
    "Ceil",
    "Floor",
    "FloorDiv",
    "FloorMod",
    "Greater",
    "GreaterEqual",
    "Less",
    "LessEqual",
    "LowerBound",
    "Rint",
    "Round",
    "Sign",
    "StopGradient",
    "UpperBound",
)  # fmt: skip
_DYNAMIC = re.compile(r"\[[\d,]*<=\d")
_STRICT = contextvars.ContextVar("strict", default=False)


class VaryingShapeError(ValueError):
    """Raised where XLA would let the records of a batch influence each other.

    No privacy has been spent when it is raised.

    ```python
    >>> compiled = tf.function(tf.linalg.svd, jit_compile=True)
    >>> refuse_dynamic_shapes(compiled, (tf.eye(2),))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    tfp_dpvi.gradients.isolation.VaryingShapeError: Compiled by XLA, Svd iterates until ...

    ```
    """


def refuse_writes(graph: tf.Graph, num_known: int) -> None:
    """Refuses operations with side effects in the loss of a record (contract 1).

    Batch normalisation in training mode and Keras metrics write to variables, which would store
    exact values and be saved; tables, summaries and printing keep or show them elsewhere. In eager
    mode nothing is checked.

    Args:
      graph: The graph of the loss.
      num_known: The number of operations that the graph had before; these are not checked.

    Raises:
      ValueError: A later operation has a side effect.
    """
    for op in operations_since(graph, num_known):
        writes = op.type.startswith(("ResourceScatter", "ResourceApply")) or "Assign" in op.type
        if op.type.startswith("Rng"):
            raise ValueError(
                "The loss of a record draws from a tf.random.Generator, whose state would count "
                f"batches ({op.name}), as RandomFlip and other\nlayers for images do: augment the "
                "records before fit, or draw with tf.random.normal and the like."
            )
        if writes or (op.op_def.is_stateful and not _HARMLESS.match(op.type)):
            raise ValueError(
                "The loss of a record writes to a variable or has another side effect "
                f"({op.name}), which is neither clipped nor noisy. Use\n"
                "GroupNormalization or a frozen BatchNormalization (trainable=False), "
                "stateful=False in recurrent layers, and no metrics, tables, summaries or printing."
            )


@contextlib.contextmanager
def strictly() -> Iterator[None]:
    """Refuses all shapes that may vary, while active.

    It serves functions that cannot be checked after XLA compiled them.
    """
    token = _STRICT.set(True)
    try:
        yield
    finally:
        _STRICT.reset(token)


def refuse_varying_shapes(graph: tf.Graph, num_known: int) -> None:
    """Refuses shapes that depend on the values of a record.

    Args:
      graph: The graph of one record's loss.
      num_known: The number of operations that the graph had before; these are not checked.

    Raises:
      ValueError: The shape of a later operation depends on values.
    """
    strict = _STRICT.get()
    known = graph.get_operations()[:num_known] if isinstance(graph, tf.Graph) else []
    # The map's loop variable, which indexes records. Those of maps inside the loss, made later,
    # index draws and the like.
    variables = {op.name for op in known if op.type == "PlaceholderWithDefault"}
    for op in operations_since(graph, num_known):
        if _varies(op, strict, variables, own_graph=op.graph is graph):
            more = (
                " Or compile(jit_compile=False): under tf.distribute the check is stricter with "
                "XLA."
                if strict
                else ""
            )
            raise ValueError(
                "The loss of a record computes a tensor whose shape depends on the record's "
                f"values ({op.name}), as tf.boolean_mask, tf.where with one argument, tf.unique "
                "and x[:k] with a computed k do.\nRecords of a batch are vectorized and need one "
                f"shape: replace entries, tf.where(mask, x, 0.0), instead of dropping them.{more}"
            )


def _varies(op: tf.Operation, strict: bool, variables: set[str], own_graph: bool) -> bool:
    """Returns whether the shape of an operation may depend on values.

    In a called function its type alone decides.
    """
    if _COUNTING.match(op.type):
        return not own_graph or depends_on(variables, op)
    if strict and (op.type in _ROUNDS or (op.type in _SIZED and not own_graph)):
        return True
    # A shape set by `set_shape` may hide one that varies.
    unknown = strict or not all(out.shape.is_fully_defined() for out in op.outputs)
    return (
        own_graph
        and unknown
        and any(depends_on(variables, op.inputs[number].op) for number in _SIZED.get(op.type, ()))
    )


def depends_on(variables: set[str], op: tf.Operation) -> bool:
    """Returns whether an operation depends on other operations.

    Args:
      variables: The names of the other operations.
      op: The operation.
    """
    return any(operation.name in variables for operation in _behind(op))


def compares(variables: set[str], op: tf.Operation) -> bool:
    """Returns whether an operation depends on others through one without a gradient of its own.

    These compare, round or choose: what they return changes by jumps.

    Args:
      variables: The names of the other operations.
      op: The operation.
    """
    return any(
        operation.type in _JUMPS and depends_on(variables, operation) for operation in _behind(op)
    )


def _behind(op: tf.Operation) -> Iterator[tf.Operation]:
    """Yields an operation and those whose values it depends on; a known shape has none."""
    waiting, seen = [op], set()
    while waiting:
        operation = waiting.pop()
        if operation.name in seen:
            continue
        seen.add(operation.name)
        yield operation
        if (
            operation.type not in ("Shape", "ShapeN", "Size", "Rank")
            or not operation.inputs[0].shape.is_fully_defined()
        ):
            waiting += [value.op for value in operation.inputs]


def refuse_dynamic_shapes(
    compiled: tf.types.experimental.PolymorphicFunction, arguments: tuple[tf.Tensor, ...]
) -> None:
    """Refuses a function that XLA compiles with shapes that depend on values.

    It also refuses matrix decompositions that iterate until the last matrix of a batch converges.
    The function is compiled, but not called.

    Args:
      compiled: The function.
      arguments: Tensors of the shapes and dtypes that it takes.

    Raises:
      VaryingShapeError: The function has a dynamic shape or such a decomposition.
    """
    graph = compiled.get_concrete_function(*arguments).graph
    iterative = next((op.name for op in operations_since(graph, 0) if op.type in _ROUNDS), None)
    if iterative is not None:
        raise VaryingShapeError(
            f"Compiled by XLA, {iterative} iterates until the slowest matrix of a batch converges, "
            "which changes the others. Use compile(jit_compile=False)."
        )
    dynamic = _DYNAMIC.search(compiled.experimental_get_compiler_ir(*arguments)(stage="hlo"))
    if dynamic is not None:
        raise VaryingShapeError(
            "Compiled by XLA, the step has a tensor whose shape depends on values "
            f"({dynamic.group()}]): XLA would give all records of a batch one shape.\n"
            "Replace entries, tf.where(mask, x, 0.0), instead of dropping them, or use "
            "compile(jit_compile=False)."
        )
