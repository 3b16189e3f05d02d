"""Which records the steps of a compiled loop would draw, told to the host: for records that are not in memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from tfp_dpvi import _random
from tfp_dpvi._tf import tf
from tfp_dpvi.sampling.base import Sampler


class HostDraws:
    """The indices that a sampler draws in a step, as NumPy arrays.

    Args:
      sampler: the sampler.
      visits: how many visits are enough nearly always.

    #### Formal guarantee

    None of its own: indices and order are those of `sampler.walk` with the step's sampling key, none is dropped, and
    `sampler.scheme` is what they are accounted for.
    """

    def __init__(self, sampler: Sampler, visits: int) -> None:
        self._sampler, self._visits = sampler, visits
        self._drawer = functools.cache(self._make)

    def _make(self, visits: int, compiled: bool) -> Callable[..., Any]:
        size = self._sampler.physical_batch_size

        def draw(key: Any, step: Any) -> Any:
            def visit(carry: Any, indices: Any, mask: Any) -> Any:
                pieces, masks, number = carry
                at = tf.minimum(number, visits - 1)  # What has no room is counted, and all is drawn again with more.
                return pieces.write(at, tf.cast(indices, tf.int64)), masks.write(at, mask), number + 1

            pieces = tf.TensorArray(tf.int64, visits, element_shape=[size], clear_after_read=False)
            masks = tf.TensorArray(tf.bool, visits, element_shape=[size], clear_after_read=False)
            # Every entry is written before, so that both have a shape whatever is drawn.
            pieces = pieces.unstack(tf.zeros([visits, size], tf.int64))
            masks = masks.unstack(tf.zeros([visits, size], tf.bool))
            sampling_key = _random.keys_of_step(key, step)[0]
            pieces, masks, number = self._sampler.walk(sampling_key, visit, (pieces, masks, tf.constant(0)))
            return pieces.stack(), masks.stack(), number

        signature = [tf.TensorSpec([2], tf.int64), tf.TensorSpec([], tf.int64)]
        return tf.function(draw, input_signature=signature, jit_compile=compiled, autograph=False)

    def __call__(self, key: Any, step: int, compiled: bool) -> tuple[np.ndarray, int]:
        """What step `step` draws, and how many visits that takes.

        Args:
          key: the fit's key.
          step: number of the step.
          compiled: draw what the loop draws when XLA compiles it; TensorFlow's generators give other numbers then.
        """
        visits = self._visits
        while True:
            pieces, masks, number = self._drawer(visits, compiled)(key, tf.constant(step, tf.int64))
            if number <= visits:
                return pieces.numpy()[masks.numpy()], int(number)
            visits = int(number)
