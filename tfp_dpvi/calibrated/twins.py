"""A twin of each record, its simulated outcome, drawn such that every sampler ends.

TFP's rejection samplers and TensorFlow's sampling kernels never end, or raise, at parameters that
are infinite or NaN. One extreme record would then stop a fit, and who sees it stop learns of the
record. Whatever the distribution is made of, in a graph its samplers are operations of few types.
Their inputs are replaced where they are extreme, and the record whose entries were replaced counts
for nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from tfp_dpvi._tf import Structure, argument_names, operations_within, replace_inputs, tf, tfd
from tfp_dpvi.bayes.predictive import as_graph
from tfp_dpvi.gradients.isolation import depends_on

# Operations that may not end, or raise, at extreme inputs: loops, and kernels that reject.
_SAMPLERS = re.compile(
    r"(Stateless)?(While|Multinomial|ParameterizedTruncatedNormal)$"
    r"|(Stateless)?Random(Gamma|Poisson)(V\d)?$"
    r"|State(less|ful)RandomBinomial$"
)
_CLASSES = re.compile("(Stateless)?Multinomial$")
# Does not end at zero or below.
_GAMMA = re.compile(r"(Stateless)?RandomGamma(V\d)?$")
# Far beyond what a record can be about, and its square is finite in float32. TFP's samplers end at
# 1e38.
_MOST = 1e15
# The same for logarithms: exp(89) is infinite in float32.
_MOST_LOG = 80.0


def simulate_twins(
    distribution: tfd.Distribution, records: dict[str, Structure], seed: tf.Tensor
) -> tuple[Structure, tf.Tensor]:
    """Returns one twin for each record, without gradients, and whether each can be used.

    Args:
      distribution: The likelihood of the records' outcomes, or of one whole record.
      records: Their inputs "x", and an entry "y" if outcomes are simulated, not whole records.
      seed: int32, shape [2].

    Returns:
      The twins of n records, and a bool tensor of shape [n].
    """
    num = tf.nest.flatten(records["x"])[0].shape[0]
    if "y" in records:
        twins, usable = draw_apart(lambda: distribution.sample(seed=seed), records["x"], num)
    else:  # A whole record's twin reads no record.
        twins, usable = draw_apart(lambda: distribution.sample(num, seed=seed), (), num)
    return tf.nest.map_structure(tf.stop_gradient, twins), usable


def rejects(operation: tf.Operation) -> bool:
    """Returns whether an operation is a sampler that tries until it accepts."""
    return any(
        _SAMPLERS.match(part.type) and not _CLASSES.match(part.type)
        for part in operations_within(operation)
    )


def with_zeros(part: tf.Tensor) -> tf.Tensor:
    """Returns numbers with zeros in place of what is not finite, for samplers to read."""
    if not part.dtype.is_floating:
        return part
    return tf.where(tf.math.is_finite(part), part, tf.zeros_like(part))


def draw_apart(
    draw: Callable[[], Structure], x: Structure, num: int
) -> tuple[Structure, tf.Tensor]:
    """Returns one outcome for each of `num` records, and whether it can be used, shape [num].

    Args:
      draw: Returns the outcomes. Each may depend on its own record's inputs only.
      x: The tensors that `draw` reads of the records, () if it reads none.
      num: The number of records.

    An outcome cannot be used if a sampler would have read an extreme number for it: one that is not
    finite, or absurdly large. The sampler reads ones instead. Which outcomes these are depends, for
    each record, only on its own inputs, the shared parameters and the random numbers.

    Raises:
      ValueError: A sampler reads numbers that depend on the inputs, but not some for each record.
    """
    if tf.executing_eagerly():
        outcomes, usable = as_graph(lambda: draw_apart(draw, (), num))
        return outcomes, usable
    graph = tf.compat.v1.get_default_graph()
    num_known = len(graph.get_operations())
    x_names = {part.op.name for part in tf.nest.flatten(x) if part.graph is graph}
    outcomes = draw()
    extreme = tf.zeros([num], tf.bool)
    for operation in graph.get_operations()[num_known:]:
        if any(_SAMPLERS.match(part.type) for part in operations_within(operation)):
            extreme |= _guard(operation, x_names, num)
    return outcomes, tf.logical_not(extreme)


def _guard(operation: tf.Operation, x_names: set[str], num: int) -> tf.Tensor:
    """Lets a sampler read ones in place of all numbers of a record with an extreme one.

    Args:
      operation: The sampler, whose inputs are replaced.
      x_names: The names of the operations of the records' inputs.
      num: The number of records.

    Returns:
      Which records have an extreme number, bool of shape [num], or [] if only shared ones are read.
    """
    inputs = list(operation.inputs)
    names = argument_names(operation)
    extreme = {
        index: _extreme(operation, names[index], part)
        for index, part in enumerate(inputs)
        # Constants are public, and may be infinite as the ends of an interval are.
        if part.dtype.is_floating and tf.get_static_value(part) is None
    }
    rows = tf.zeros([], tf.bool)
    for index, where in extreme.items():
        if _has_rows(inputs[index], num):
            rows |= tf.reduce_any(tf.reshape(where, [num, -1]), axis=1)
        elif depends_on(x_names, inputs[index].op):
            raise ValueError(
                f"a sampler reads numbers of shape {inputs[index].shape} for {num} records"
            )
        else:
            # Of shared parameters: no outcome can be used.
            rows |= tf.reduce_any(where)
    for index, where in extreme.items():
        part = inputs[index]
        if _has_rows(part, num):
            flat = tf.reshape(part, [num, -1])
            is_extreme = tf.broadcast_to(rows, [num])[:, tf.newaxis]
            replaced = tf.reshape(tf.where(is_extreme, tf.ones_like(flat), flat), tf.shape(part))
        else:
            replaced = tf.where(where, tf.ones_like(part), part)
        replaced.set_shape(part.shape)
        inputs[index] = replaced
    replace_inputs(operation, inputs)
    return rows


def _has_rows(part: tf.Tensor, num: int) -> bool:
    """Returns whether a tensor has numbers for each record.

    Its shape is then [num, ...], after a dimension of one sample or not, or [num * k, ...].
    """
    if part.shape.rank is None:
        raise ValueError("a sampler reads numbers of an unknown shape")
    return math.prod(size or 1 for size in part.shape) % num == 0


def _extreme(operation: tf.Operation, name: str, part: tf.Tensor) -> tf.Tensor:
    """Returns where an input of a sampler is extreme, for classes by their row."""
    # TensorFlow rewrites `not (a <= b)` to `a > b`, which is false for NaN.
    if _CLASSES.match(operation.type):
        # A class may have the probability zero, but not all of them.
        total = tf.reduce_logsumexp(part, axis=-1, keepdims=True)
        return tf.broadcast_to(tf.logical_not(tf.math.is_finite(total)), tf.shape(part))
    most = tf.constant(_MOST_LOG if name.startswith("log") else _MOST, part.dtype)
    extreme = tf.logical_not(tf.math.is_finite(part)) | (tf.abs(part) > most)
    return extreme | (part <= 0.0) if _GAMMA.match(operation.type) else extreme
