"""Keys for sampling, Monte Carlo draws and noise (contract C10).

A key is an int64 tensor of shape [2]: the 128 bits that seed TensorFlow's counter-based generators
(`tf.random.stateless_*`, Philox). Keys come from the operating system, travel as *arguments* into compiled functions,
and are never held in a variable (a checkpoint would save them) nor read while tracing (they would become constants).
"""

from __future__ import annotations

import hashlib
import math
import os
from typing import Any

import numpy as np

from tfp_dpvi._keras import tf

ALGORITHM = "philox"
"""For every `tf.random.stateless_*`: the default reads only 64 of a key's 128 bits when XLA compiles it."""


def new_key(seed: int | None = None) -> np.ndarray:
    """A root key.

    Args:
      seed: None for 128 fresh bits from the operating system (independent of `tf.random.set_seed`), or an integer for
        a repeatable, hence *not private*, run.

    Returns:
      int64 array of shape [2].
    """
    if seed is None:
        return np.frombuffer(os.urandom(16), dtype=np.int64).copy()
    bits = hashlib.sha256(f"tfp_dpvi seed {int(seed)}".encode()).digest()[:16]
    return np.frombuffer(bits, dtype=np.int64).copy()


def fold_in(key: Any, index: Any) -> Any:
    """The key number `index` of a family; distinct indices give distinct keys.

    TensorFlow mixes the 128 bits of a stateless seed by a bijection, so neighbouring keys are as unrelated as any.
    """
    index = tf.cast(index, tf.int64)
    return key + tf.stack([index, tf.zeros([], tf.int64)])


def split(key: Any, num: int) -> list[Any]:
    """`num` new keys with full 128 bits each."""
    keys = tf.random.stateless_uniform([num, 2], seed=key, minval=None, maxval=None, dtype=tf.int64, alg=ALGORITHM)
    return tf.unstack(keys)


def normal(key: Any, shape: Any, dtype: Any) -> Any:
    """Standard normals whose tails are a Gaussian's as far as 8.49 standard deviations.

    `tf.random.stateless_normal` (TensorFlow 2.15, with XLA and without) never goes beyond 5.68 = sqrt(-2 log 1e-7). The
    probability that a Gaussian does, times the number of releases, is more than many a delta: the guarantee would not
    hold. Here Box and Muller's method runs on float64 uniforms with 52 bits; what lies beyond has probability 2e-17.

    Args:
      key: int64 tensor of shape [2], used once.
      shape: of the result.
      dtype: float type of the result.
    """
    size = tf.reduce_prod(tf.cast(shape, tf.int64))
    half = (size + 1) // 2
    uniform = tf.random.stateless_uniform(tf.stack([2, half]), seed=key, dtype=tf.float64, alg=ALGORITHM)
    radius = tf.sqrt(-2.0 * tf.math.log1p(-uniform[0]))  # In [0, 1), so that the logarithm's argument is never 0.
    angle = (2.0 * math.pi) * uniform[1]
    both = tf.concat([radius * tf.cos(angle), radius * tf.sin(angle)], axis=0)
    return tf.cast(tf.reshape(both[:size], shape), dtype)


def tfp_seed(key: Any) -> Any:
    """The int32 pair that TFP's stateless samplers take."""
    return tf.cast(tf.bitwise.bitwise_and(key, tf.constant(0x7FFFFFFF, tf.int64)), tf.int32)
