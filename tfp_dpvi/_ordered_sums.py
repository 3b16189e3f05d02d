"""Sums in one order, so that a seeded step gives the same bits whenever it runs.

TensorFlow's `AddN` of three terms or more begins with one whose buffer nothing else still reads: in threads that is a matter of
luck. Gradients of what is used more than twice are such sums, and Grappler joins additions of one shape into more of them.
(Compiled with XLA, sums have one order.)
"""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

from tensorflow.core.protobuf import config_pb2, rewriter_config_pb2
from tensorflow.python.eager import context
from tensorflow.python.ops import gen_math_ops

_ADD_N = gen_math_ops.add_n
_LOCK = threading.Lock()
_INSIDE: set[object] = set()


def ordered(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which is traced and run with its sums in one order. To be called in no other way."""

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        eager = context.context()
        before = eager.function_call_options  # This thread's.
        token = object()
        try:  # Not by context managers: an interrupt while one is entered would leave it so.
            _enter(token)
            eager.function_call_options = _leaving_additions_alone(before)
            return function(*args)
        finally:
            eager.function_call_options = before
            _leave(token)

    return call


@contextlib.contextmanager
def traced_in_order() -> Iterator[None]:
    """For what `ordered` functions call and is traced before them: layers whose `call` is a `tf.function`."""
    token = object()
    try:
        _enter(token)
        yield
    finally:
        _leave(token)


def _enter(token: object) -> None:
    """For all threads, as replicas are traced in threads of their own; others may trace sums in pairs meanwhile."""
    with _LOCK:
        _INSIDE.add(token)
        gen_math_ops.add_n = _add_in_pairs


def _leave(token: object) -> None:
    with _LOCK:
        _INSIDE.discard(token)
        if not _INSIDE:
            gen_math_ops.add_n = _ADD_N


def _add_in_pairs(inputs: Any, name: str | None = None) -> Any:
    if not isinstance(inputs, list | tuple) or len(inputs) < 3:
        return _ADD_N(inputs, name=name)
    *most, last = inputs
    return _ADD_N([functools.reduce(lambda total, term: _ADD_N([total, term]), most), last], name=name)


def _leaving_additions_alone(options: Any) -> Any:
    """As `tf.config.optimizer.set_experimental_options({"arithmetic_optimization": False})`, which holds for all threads."""
    changed = copy.copy(options)
    config = config_pb2.ConfigProto.FromString(options.config_proto_serialized)
    config.graph_options.rewrite_options.arithmetic_optimization = rewriter_config_pb2.RewriterConfig.OFF
    changed.config_proto_serialized = config
    return changed
