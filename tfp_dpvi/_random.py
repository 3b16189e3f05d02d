"""Keys for sampling, Monte Carlo draws and noise (contract C10).

A key is an int64 tensor of shape [2]: the 128 bits that seed TensorFlow's counter-based generators
(`tf.random.stateless_*`, Philox). Keys come from the operating system, travel as *arguments* into compiled functions,
and are never held in a variable (a checkpoint would save them) nor read while tracing (they would become constants).
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Sequence

import numpy as np

from tfp_dpvi._tf import tf

ALGORITHM = "philox"
"""The algorithm of every `tf.random.stateless_*` call: compiled by XLA, the default reads only 64 of a key's 128 bits."""

_MANY = 2**14
_MASK = 0x7FFFFFFF
_THREEFRY = 2  # TensorFlow's number for it.


def new_key(seed: int | None = None) -> np.ndarray:
    """Returns a root key, int64 [2]: 128 bits from the operating system, which `tf.random.set_seed` does not affect.

    An integer seed makes a run repeatable and hence *not private*.
    """
    if seed is None:
        return np.frombuffer(os.urandom(16), dtype=np.int64).copy()
    bits = hashlib.sha256(f"tfp_dpvi seed {int(seed)}".encode()).digest()[:16]
    return np.frombuffer(bits, dtype=np.int64).copy()


def fold_in(key: tf.Tensor, index: tf.Tensor) -> tf.Tensor:
    """Returns key number `index` of a family; distinct indices give distinct keys.

    TensorFlow mixes the 128 bits of a stateless seed by a bijection, so neighbouring keys give unrelated streams.
    """
    index = tf.cast(index, tf.int64)
    return key + tf.stack([index, tf.zeros([], tf.int64)])


def split(key: tf.Tensor, num: int) -> list[tf.Tensor]:
    """Returns `num` new keys of 128 random bits each."""
    keys = tf.random.stateless_uniform(
        [num, 2], seed=key, minval=None, maxval=None, dtype=tf.int64, alg=ALGORITHM
    )
    return tf.unstack(keys)


def keys_of_step(key: tf.Tensor, step: tf.Tensor) -> list[tf.Tensor]:
    """Returns the keys of one training step: for sampling, shared draws, per-example draws and noise.

    They differ in the key's second word, and those of `fold_in` in its first, so no two keys of a run are equal.
    """
    number = 4 * tf.cast(step, tf.int64)
    return [key + tf.stack([tf.zeros([], tf.int64), number + use]) for use in range(4)]


def normal(key: tf.Tensor, shape: tf.Tensor, dtype: tf.Tensor) -> tf.Tensor:
    """Draws standard normals with Gaussian tails up to 8.49 standard deviations.

    `tf.random.stateless_normal` (TensorFlow 2.15, with XLA and without) never exceeds 5.68 = sqrt(-2 log 1e-7). The
    probability that a Gaussian does, times the number of releases, exceeds common values of delta: the guarantee would not
    hold. Here the Box-Muller method runs on float64 uniforms with 52 bits; the missing tail has probability 2e-17.

    Large float32 draws come from `_many_normals`, which has the same tails and takes a tenth of the time. Use a key once.
    """
    static = tf.TensorShape(shape).num_elements() if not tf.is_tensor(shape) else None
    if static is not None and static >= _MANY and tf.as_dtype(dtype) == tf.float32:
        return tf.reshape(tf.concat(_many_normals(key, static), axis=0)[:static], shape)
    size = tf.reduce_prod(tf.cast(shape, tf.int64))
    half = (size + 1) // 2
    uniform = tf.random.stateless_uniform(
        tf.stack([2, half]), seed=key, dtype=tf.float64, alg=ALGORITHM
    )
    radius = tf.sqrt(
        -2.0 * tf.math.log1p(-uniform[0])
    )  # In [0, 1): the logarithm's argument is never 0.
    angle = (2.0 * math.pi) * uniform[1]
    both = tf.concat([radius * tf.cos(angle), radius * tf.sin(angle)], axis=0)
    return tf.cast(tf.reshape(both[:size], shape), dtype)


def normals(key: tf.Tensor, shapes: Sequence[Sequence[int]], dtype: tf.Tensor) -> list[tf.Tensor]:
    """Draws standard normals of several static shapes at once: `normal` in fewer and larger operations."""
    sizes = [tf.TensorShape(shape).num_elements() for shape in shapes]
    pieces = tf.split(normal(key, [sum(sizes)], dtype), sizes)
    return [tf.reshape(piece, shape) for piece, shape in zip(pieces, shapes, strict=True)]


def _many_normals(key: tf.Tensor, num: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Draws at least `num` standard normals in float32, in two halves, by the Box-Muller method on integers.

    A pair takes 64 random bits: 40 for the radius `sqrt(-2 log u)`, with u to a relative precision of 2^-24 however small,
    and 23 for the angle. If the first 31 bits of any u are all zero (once in thousands of draws of a million), 31 more are
    drawn for all, so that tails reach 9.9. The bits come from Threefry, XLA's counter-based generator (Salmon et al. 2011),
    seeded with all 128 bits of the key.
    """
    half = (num + 1) // 2
    bits_key, more_key = split(key, 2)
    bits = _threefry(bits_key, half)
    rare = tf.reduce_any(tf.bitwise.bitwise_and(bits[0], _MASK) == 0)
    return tf.cond(
        rare,
        lambda: _box_muller(*bits, _threefry(more_key, half)[0]),
        lambda: _box_muller(*bits, bits[0][:0]),
    )


@tf.function(jit_compile=True, autograph=False, reduce_retracing=False)
def _threefry(key: tf.Tensor, num: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Draws two int32 tensors of `num` random values. Compiled alone: fused with its users, XLA would compute it twice.

    One draw of 64 bits is one block of Threefry; newer XLA computes every block of 32-bit draws twice.
    """
    key = tf.bitcast(key, tf.uint64)
    bits = tf.raw_ops.StatelessRandomUniformFullIntV2(
        shape=[num], key=key[:1], counter=key[1:], alg=_THREEFRY, dtype=tf.uint64
    )
    halves = bits, tf.bitwise.right_shift(bits, tf.constant(32, tf.uint64))
    first, second = (tf.bitcast(tf.cast(half, tf.uint32), tf.int32) for half in halves)
    return first, second


@tf.function(jit_compile=True, autograph=False, reduce_retracing=False)
def _box_muller(
    first: tf.Tensor, second: tf.Tensor, more: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns pairs of normals from two int32 tensors of shape [n]; `more` [n] or [0] extends u of which 31 bits are 0."""
    high = tf.cast(tf.bitwise.bitwise_and(first, _MASK), tf.float32) * 2.0**-31
    low = tf.cast(tf.bitwise.bitwise_and(second, 511), tf.float32) * 2.0**-40
    if more.shape[0]:  # Added last, to small numbers only: float32 adds small parts exactly.
        rest = tf.cast(tf.bitwise.bitwise_and(more, _MASK), tf.float32) * 2.0**-71 + 2.0**-72
    else:
        rest = tf.fill([first.shape[0]], tf.constant(2.0**-41))
    radius = tf.sqrt(tf.maximum(-2.0 * tf.math.log(high + (low + rest)), 0.0))
    turns = tf.cast(tf.bitwise.right_shift(second, 9), tf.float32) * 2.0**-23  # In [-1/2, 1/2).
    # Sine and cosine by polynomials on a quarter turn: XLA on CPUs has no vectorised ones.
    quarter = tf.round(turns * 4.0)
    angle = (turns - quarter * 0.25) * (2.0 * math.pi)
    square = angle * angle
    sine = angle * (
        1.0 + square * (-1 / 6 + square * (1 / 120 + square * (-1 / 5040 + square / 362880)))
    )
    cosine = 1.0 + square * (
        -1 / 2 + square * (1 / 24 + square * (-1 / 720 + square * (1 / 40320 - square / 3628800)))
    )
    odd, half_turn = tf.abs(quarter) == 1.0, tf.abs(quarter) == 2.0
    x, y = tf.where(odd, sine, cosine), tf.where(odd, cosine, sine)
    x = tf.where((quarter == 1.0) | half_turn, -x, x)
    y = tf.where((quarter == -1.0) | half_turn, -y, y)
    return radius * x, radius * y


def tfp_seed(key: tf.Tensor) -> tf.Tensor:
    """Returns the int32 pair that TFP's stateless samplers take; an array for a NumPy key, so that no graph holds the key."""
    if isinstance(key, np.ndarray):
        return (key & _MASK).astype(np.int32)
    return tf.cast(tf.bitwise.bitwise_and(key, tf.constant(0x7FFFFFFF, tf.int64)), tf.int32)
