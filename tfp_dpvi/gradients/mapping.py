"""`tf.vectorized_map` for records that must stay apart, whatever indices they hold."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from tensorflow.python.ops.parallel_for import pfor

from tfp_dpvi._tf import tf

_SEGMENTS = ("UnsortedSegmentSum", "UnsortedSegmentMax", "UnsortedSegmentMin", "UnsortedSegmentProd")
_LOCK = threading.RLock()


def map_records(function: Callable[[Any], Any], records: Any) -> Any:
    """`tf.vectorized_map(function, records)`, in which no record reaches another's sums over segments.

    TensorFlow maps such a sum, which the gradient of `tf.gather(params, ids)` is, as one over the segments of all records,
    and adds the record's number times the number of segments to its ids. An id that is too large lands in another
    record's segments: in a model with 4 groups one record with ids up to 80 moved the clipped sum by 41 clips. (Under XLA,
    `tf.gather` itself takes such an id without a word.) Here it lands nowhere.
    """
    with _LOCK, _segments_apart():
        return tf.vectorized_map(function, records)


@contextlib.contextmanager
def _segments_apart() -> Iterator[None]:
    registry = pfor._pfor_converter_registry
    before = {kind: registry[kind] for kind in _SEGMENTS}

    def bounded(convert: Callable[..., Any]) -> Callable[..., Any]:
        def converter(inputs: Any, *args: Any, **kwargs: Any) -> Any:
            inputs.stack_inputs([0, 1])
            ids = inputs.stacked_input(1)
            known = ids < tf.cast(inputs.unstacked_input(2), ids.dtype)
            inputs._inputs[1] = pfor.wrap(tf.where(known, ids, -tf.ones_like(ids)), True)  # Negative ones are dropped.
            return convert(inputs, *args, **kwargs)

        return converter

    registry.update({kind: bounded(convert) for kind, convert in before.items()})
    try:
        yield
    finally:
        registry.update(before)
