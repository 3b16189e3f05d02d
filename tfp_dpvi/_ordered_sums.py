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
_inside = 0


def ordered(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which is traced and run with its sums in one order. To be called in no other way."""

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        with _sums_in_pairs(), _additions_left_alone():
            return function(*args)

    return call


def _add_in_pairs(inputs: Any, name: str | None = None) -> Any:
    if not isinstance(inputs, list | tuple) or len(inputs) < 3:
        return _ADD_N(inputs, name=name)
    return functools.reduce(lambda total, term: _ADD_N([total, term]), inputs)


@contextlib.contextmanager
def _sums_in_pairs() -> Iterator[None]:
    """For all threads, as replicas are traced in threads of their own; others may trace such sums in pairs meanwhile."""
    global _inside
    with _LOCK:
        _inside += 1
        gen_math_ops.add_n = _add_in_pairs
    try:
        yield
    finally:
        with _LOCK:
            _inside -= 1
            if not _inside:
                gen_math_ops.add_n = _ADD_N


@contextlib.contextmanager
def _additions_left_alone() -> Iterator[None]:
    """As `tf.config.optimizer.set_experimental_options({"arithmetic_optimization": False})`, for calls by this thread alone."""
    current = context.context()
    before = current.function_call_options
    options = copy.copy(before)
    config = config_pb2.ConfigProto.FromString(before.config_proto_serialized)
    config.graph_options.rewrite_options.arithmetic_optimization = rewriter_config_pb2.RewriterConfig.OFF
    options.config_proto_serialized = config
    current.function_call_options = options
    try:
        yield
    finally:
        current.function_call_options = before
