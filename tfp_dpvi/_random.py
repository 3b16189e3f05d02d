"""Keys for sampling, Monte Carlo draws and noise (contract 10).

A key is an int64 tensor of shape [2]: the 128 bits that seed TensorFlow's counter-based generators
(`tf.random.stateless_*`, Philox). Or it is a tape, the random words themselves: a uint64 tensor, of
a cryptographic generator, of which every word is used once. The dtype tells them apart.

Keys come from the operating system, travel as *arguments* into compiled functions, and are never
held in a variable (a checkpoint would save them) nor read while tracing (they would become
constants).
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Sequence

import numpy as np

from tfp_dpvi._tf import tf

ALGORITHM = "philox"
"""The algorithm of every `tf.random.stateless_*` call.

Compiled by XLA, the default reads only 64 bits of a key.
"""

# Coordinates from which drawing the noise is compiled.
_MANY = 2**14
_MASK = 0x7FFFFFFF
_THREEFRY = 2  # TensorFlow's number for it.
_GRID_BITS = 12  # The grid is so many powers of two finer than the noise.
_MANTISSA = np.int64(52)  # The bits of a float64's mantissa.
_ROOT_HALF = np.float64(math.sqrt(0.5)).view(np.int64)  # The bits of the float64.
# Taylor series, in squares, from the highest power down to the constant.
_SINE = [(-1) ** k / math.factorial(2 * k + 1) for k in range(8, -1, -1)]
_COSINE = [(-1) ** k / math.factorial(2 * k) for k in range(8, -1, -1)]
_ARTANH = [2.0 / (2 * k + 1) for k in range(9, -1, -1)]


def entropy(num_bytes: int) -> bytes:
    """Returns random bytes of the operating system, which `tf.random.set_seed` does not affect."""
    return os.urandom(num_bytes)


def new_key(seed: int | None = None) -> np.ndarray:
    """Returns a root key, int64 [2]: 128 bits from the operating system.

    `tf.random.set_seed` does not affect it. An integer seed makes a run repeatable and hence *not
    private*.
    """
    if seed is None:
        return np.frombuffer(entropy(16), dtype=np.int64).copy()
    bits = hashlib.sha256(f"tfp_dpvi seed {int(seed)}".encode()).digest()[:16]
    return np.frombuffer(bits, dtype=np.int64).copy()


def fold_in(key: tf.Tensor, index: tf.Tensor) -> tf.Tensor:
    """Returns a key of a family; distinct indices give distinct keys.

    TensorFlow mixes the 128 bits of a stateless seed by a bijection, so neighbouring keys give
    unrelated streams.

    Args:
      key: Int64 [2], the family.
      index: Integer scalar, the number of the key in the family.
    """
    index = tf.cast(index, tf.int64)
    return key + tf.stack([index, tf.zeros([], tf.int64)])


def split(key: tf.Tensor, num: int) -> list[tf.Tensor]:
    """Returns new keys of 128 random bits each.

    Args:
      key: Int64 [2], used once.
      num: The number of new keys.
    """
    keys = tf.random.stateless_uniform(
        [num, 2], seed=key, minval=None, maxval=None, dtype=tf.int64, alg=ALGORITHM
    )
    return tf.unstack(keys)


def keys_of_step(key: tf.Tensor, step: tf.Tensor, num_sampling: int = 0) -> list[tf.Tensor]:
    """Returns the keys of one step: for sampling, shared draws, per-example draws, noise.

    Args:
      key: Int64 [2], or a tape of several steps, [steps, words]: step t takes row t modulo their
        number.
      step: Int64 scalar.
      num_sampling: The number of words of the sampling key; 0 for a key of 128 bits.

    Returns:
      Four keys. Of an int64 key, they differ in its second word, and those of `fold_in` in its
      first, so no two keys of a run are equal. Of a tape, the sampling key (where it has words) and
      the noise key are tapes, and the other two are fresh keys of 128 bits in each step.
    """
    if not is_tape(key):
        number = 4 * tf.cast(step, tf.int64)
        return [key + tf.stack([tf.zeros([], tf.int64), number + use]) for use in range(4)]
    steps, words = key.shape
    row = tf.slice(key, tf.stack([tf.cast(step, tf.int64) % steps, 0]), [1, words])
    sizes = [num_sampling or 2, 2, 2]
    parts = tf.split(row[0], [*sizes, words - sum(sizes)])
    sampling = parts[0] if num_sampling else tf.bitcast(parts[0], tf.int64)
    return [sampling, tf.bitcast(parts[1], tf.int64), tf.bitcast(parts[2], tf.int64), parts[3]]


def num_words(num_sampling: int, num_coordinates: int) -> int:
    """Returns the number of words in a tape's row.

    Args:
      num_sampling: The words of the sampling key, as of `keys_of_step`.
      num_coordinates: The coordinates that get noise.
    """
    return (num_sampling or 2) + 4 + num_coordinates + num_coordinates % 2


def noise_key(num_coordinates: int, seed: int | None = None, number: int = 0) -> tf.Tensor:
    """Returns the key of the noise of one release that is no training step.

    Args:
      num_coordinates: The coordinates that get noise.
      seed: None for a tape of the operating system's cryptographic generator.
      number: The number of the release; with a seed, the key has this number.
    """
    if seed is not None:
        return fold_in(tf.constant(new_key(seed)), tf.constant(number))
    size = 8 * (num_coordinates + num_coordinates % 2)
    return tf.constant(np.frombuffer(entropy(size), np.uint64))


def is_tape(key: tf.Tensor) -> bool:
    """Returns whether a key is a tape."""
    return tf.as_dtype(key.dtype) == tf.uint64


def uniform(key: tf.Tensor, shape: Sequence[int], number: int | tf.Tensor = 0) -> tf.Tensor:
    """Draws float64 in [0, 1), multiples of 2^-52.

    A tape has room for some draws; the rest come from a Philox key, the tape's last two words.

    Args:
      key: Int64 [2], or a tape.
      shape: The static shape of the draw.
      number: The number of the draw from this key. Draws of a key have one shape.
    """

    def expand(key: tf.Tensor) -> tf.Tensor:
        key = _numbered(key, number)
        return tf.random.stateless_uniform(shape, seed=key, dtype=tf.float64, alg=ALGORITHM)

    return _from_tape(key, shape, number, _uniforms, expand) if is_tape(key) else expand(key)


def integers(
    key: tf.Tensor, shape: Sequence[int], limit: int, number: int | tf.Tensor = 0
) -> tf.Tensor:
    """Draws int64 in [0, limit), with probabilities that are equal up to 2^-63.

    Args:
      key: Int64 [2], or a tape; see `uniform`.
      shape: The static shape of the draw.
      limit: The number of values.
      number: The number of the draw from this key. Draws of a key have one shape.
    """

    def convert(words: tf.Tensor) -> tf.Tensor:
        return _shifted(words, 1) % limit

    def expand(key: tf.Tensor) -> tf.Tensor:
        key = _numbered(key, number)
        return tf.random.stateless_uniform(
            shape, seed=key, minval=0, maxval=limit, dtype=tf.int64, alg=ALGORITHM
        )

    return _from_tape(key, shape, number, convert, expand) if is_tape(key) else expand(key)


def _numbered(key: tf.Tensor, number: int | tf.Tensor) -> tf.Tensor:
    return key if isinstance(number, int) and number == 0 else fold_in(key, number)


def words_for(num_draws: int, size: int) -> int:
    """Returns the number of words of a tape with room for some draws, see `uniform`.

    Args:
      num_draws: The number of draws.
      size: The number of entries of a draw.
    """
    return num_draws * size + 2


def _from_tape(
    tape: tf.Tensor,
    shape: Sequence[int],
    number: int | tf.Tensor,
    convert: Callable[[tf.Tensor], tf.Tensor],
    expand: Callable[[tf.Tensor], tf.Tensor],
) -> tf.Tensor:
    size = math.prod(shape)
    room = (int(tape.shape[0]) - 2) // size
    if room < 1:
        raise ValueError(f"A tape of {tape.shape[0]} words has no room for a draw of {size}.")

    def written() -> tf.Tensor:
        return convert(tf.reshape(tf.slice(tape, [number * size], [size]), shape))

    def expanded() -> tf.Tensor:
        return expand(tf.bitcast(tape[-2:], tf.int64))

    if isinstance(number, int):
        return written() if number < room else expanded()
    return tf.cond(number < room, written, expanded)


def _uniforms(words: tf.Tensor) -> tf.Tensor:
    return tf.cast(_shifted(words, 12), tf.float64) * 2.0**-52


def _shifted(words: tf.Tensor, places: int) -> tf.Tensor:
    return tf.bitcast(tf.bitwise.right_shift(words, tf.constant(places, tf.uint64)), tf.int64)


def add_noise(
    key: tf.Tensor,
    sums: Sequence[tf.Tensor],
    deviations: Sequence[float | tf.Tensor],
    *,
    dtype: tf.DType | None = None,
) -> list[tf.Tensor]:
    """Returns sums with independent Gaussian noise, on a grid: the only function that adds noise.

    The draws have 52 bits of radius and of angle, in float64, and tails up to 8.5 standard
    deviations: the missing tail has probability 2e-17. The noisy sum is formed in float64 and
    rounded to a multiple of `noise_grid(deviation)`, at most 2^-12 standard deviations, before
    anything reads it: the low bits of a float32 sum would show whether it is exactly zero (Mironov
    2012, "On significance of the least significant bits for differential privacy").

    Args:
      key: Int64 tensor of shape [2], or a tape of at least as many words as coordinates, made even;
        used once.
      sums: Tensors of static shapes, float32 or float64; exact, hence *not private*.
      deviations: The noise's standard deviation on each sum, at least 0; a sum with 0 is returned
        as it is.
      dtype: The dtype of the results, by default that of the first sum.

    Returns:
      Noisy sums, as many as `sums` and of their shapes.

    #### Formal guarantee

    Each result is post-processing, by rounding, of `sum + deviation * draw`. Rounding adds a
    variance of at most 2^-24 / 12 of the noise's, for which no credit is taken. Not claimed: that
    the draws are those of an exact sampler of a discrete Gaussian, or that floating-point sums of
    many records move by no more than the clip in their last bits.
    """
    sums = [tf.convert_to_tensor(part) for part in sums]
    # `tf.cast` would round a Python float to float32 first.
    deviations = [
        tf.cast(part, tf.float64) if tf.is_tensor(part) else tf.constant(part, tf.float64)
        for part in deviations
    ]
    num = sum(part.shape.num_elements() for part in sums)
    if num < _MANY:
        draws, on_grid = _few_normals(key, num), _at_once
    else:
        draws, on_grid = _many_normals(_bits(key, (num + 1) // 2)), _on_grid_compiled
    parts = on_grid(draws, sums, deviations)
    return [tf.cast(part, dtype or sums[0].dtype) for part in parts]


def noise_grid(deviation: float) -> float:
    """Returns the grid of sums with this noise: the power of two 2^floor(log2(deviation) - 12)."""
    return math.ldexp(1.0, math.frexp(deviation)[1] - 1 - _GRID_BITS)


def _on_grid(
    draws: tf.Tensor, sums: Sequence[tf.Tensor], deviations: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """Returns sums with noise, in float64, rounded to `noise_grid`.

    The `draws` are standard normals.
    """
    results = []
    start = 0
    for part, deviation in zip(sums, deviations, strict=True):
        end = start + part.shape.num_elements()
        draw = tf.reshape(draws[start:end], part.shape)
        results.append(_rounded(tf.cast(part, tf.float64), draw, deviation))
        start = end
    return results


def _at_once(
    draws: tf.Tensor, sums: Sequence[tf.Tensor], deviations: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """Returns the same as `_on_grid`, in one operation on all sums: faster, if they are small enough to be copied."""
    sizes = [part.shape.num_elements() for part in sums]
    flat = tf.concat([tf.reshape(tf.cast(part, tf.float64), [-1]) for part in sums], axis=0)
    repeated = [tf.fill([size], each) for size, each in zip(sizes, deviations, strict=True)]
    noisy = _rounded(flat, draws, tf.concat(repeated, axis=0))
    parts = tf.split(noisy, sizes)
    return [tf.reshape(part, exact.shape) for part, exact in zip(parts, sums, strict=True)]


def _rounded(exact: tf.Tensor, draw: tf.Tensor, deviation: tf.Tensor) -> tf.Tensor:
    """Returns float64 sums with noise, rounded to the grid."""
    noisy = exact + deviation * draw
    # The exponent's bits are read, since no logarithm is exact at powers of two.
    exponent = tf.bitwise.right_shift(tf.bitcast(deviation, tf.int64), _MANTISSA)
    bits = tf.bitwise.left_shift(exponent - _GRID_BITS, _MANTISSA)
    grid = tf.bitcast(bits, tf.float64)
    rounded = tf.round(noisy * (1.0 / grid)) * grid
    # The exact sum is selected, since zero noise with an infinite clip (both off) must not give
    # 0 x Inf. It is selected at zero alone, since a NaN must not return it.
    return tf.where(deviation == 0.0, exact, rounded)


_on_grid_compiled = tf.function(_on_grid, jit_compile=True, autograph=False)


def _few_normals(key: tf.Tensor, num: int) -> tf.Tensor:
    """Draws standard normals, float64 [num], by the Box-Muller method.

    `tf.random.stateless_normal` (TensorFlow 2.15, with XLA and without) never exceeds
    5.68 = sqrt(-2 log 1e-7): the missing tail, times the number of releases, exceeds common deltas.
    """
    half = (num + 1) // 2
    drawn = _uniforms(_bits(key, half)) if is_tape(key) else uniform(key, [2, half])
    # The draws lie in [0, 1): the logarithm's argument is never 0.
    radius = tf.sqrt(-2.0 * tf.math.log1p(-drawn[0]))
    angle = (2.0 * math.pi) * drawn[1]
    return tf.concat([radius * tf.cos(angle), radius * tf.sin(angle)], axis=0)[:num]


def _bits(key: tf.Tensor, num_pairs: int) -> tf.Tensor:
    """Returns a uint64 tensor of shape [2, num_pairs].

    It holds the first words of a tape, or draws by `_threefry`.
    """
    if not is_tape(key):
        return _threefry(split(key, 1)[0], num_pairs)
    if key.shape[0] < 2 * num_pairs:
        raise ValueError(
            f"A tape of {key.shape[0]} words is too short: the noise takes {2 * num_pairs}."
        )
    return tf.reshape(key[: 2 * num_pairs], [2, num_pairs])


@tf.function(jit_compile=True, autograph=False, reduce_retracing=False)
def _threefry(key: tf.Tensor, num_pairs: int) -> tf.Tensor:
    """Draws a uint64 tensor of shape [2, num_pairs] from Threefry (Salmon et al. 2011).

    It is XLA's generator, seeded with all 128 bits of the key, and has 64 bits of strength.
    Compiled alone: fused with its users, XLA would compute it twice.
    """
    key = tf.bitcast(key, tf.uint64)
    bits = tf.raw_ops.StatelessRandomUniformFullIntV2(
        shape=[2 * num_pairs], key=key[:1], counter=key[1:], alg=_THREEFRY, dtype=tf.uint64
    )
    return tf.reshape(bits, [2, num_pairs])


@tf.function(jit_compile=True, autograph=False, reduce_retracing=False)
def _many_normals(bits: tf.Tensor) -> tf.Tensor:
    """Makes standard normals, float64 [2 n], of uint64 bits [2, n], by the Box-Muller method.

    Logarithm, sine and cosine are polynomials: XLA on CPUs has no vectorised ones in float64.
    """
    first, second = tf.unstack(bits)
    radius = tf.sqrt(-2.0 * _log_of_bits(first))
    sign = tf.where(_bit(second, 1), -radius, radius)
    # An angle in (-pi/4, pi/4) of 52 bits; swapping and a common sign make the other three
    # quarters.
    turns = tf.cast(_high_bits(second, 2), tf.float64) * 2.0**-52 - (0.5 - 2.0**-53)
    angle = turns * (math.pi / 2)
    square = angle * angle
    sine = angle * _polynomial(square, _SINE)
    cosine = _polynomial(square, _COSINE)
    swap = _bit(second, 0)
    return tf.concat(
        [sign * tf.where(swap, sine, cosine), sign * tf.where(swap, cosine, sine)], axis=0
    )


def _log_of_bits(bits: tf.Tensor) -> tf.Tensor:
    """Returns log((k + 1/2) 2^-52), k the highest 52 bits, to a relative error of 1e-14."""
    number = tf.cast(_high_bits(bits, 0), tf.float64) + 0.5
    pattern = tf.bitcast(number, tf.int64)
    exponent = tf.bitwise.right_shift(pattern - _ROOT_HALF, _MANTISSA)
    mantissa = tf.bitcast(pattern - tf.bitwise.left_shift(exponent, _MANTISSA), tf.float64)
    # The series is that of log m = 2 artanh((m - 1) / (m + 1)), with m in (sqrt(1/2), sqrt(2)).
    ratio = (mantissa - 1.0) / (mantissa + 1.0)
    series = ratio * _polynomial(ratio * ratio, _ARTANH)
    return series + (tf.cast(exponent, tf.float64) - 52.0) * math.log(2.0)


def _high_bits(bits: tf.Tensor, skip: int) -> tf.Tensor:
    """Returns 52 bits of uint64 values as int64, after the first `skip`."""
    return _shifted(tf.bitwise.left_shift(bits, tf.constant(skip, tf.uint64)), 12)


def _bit(bits: tf.Tensor, number: int) -> tf.Tensor:
    """Returns whether a bit of uint64 values is set; number 0 is the highest."""
    mask = tf.constant(1 << (63 - number), tf.uint64)
    return tf.bitwise.bitwise_and(bits, mask) != 0


def _polynomial(x: tf.Tensor, coefficients: Sequence[float]) -> tf.Tensor:
    """Returns the polynomial with these coefficients, that of the highest power first."""
    total = tf.constant(coefficients[0], tf.float64)
    for coefficient in coefficients[1:]:
        total = total * x + tf.constant(coefficient, tf.float64)
    return total


def tfp_seed(key: tf.Tensor) -> tf.Tensor:
    """Returns the int32 pair that TFP's samplers take.

    It has 62 of the key's 128 bits, for they read no more than 64. It is an array for a NumPy key,
    so that no graph holds the key.
    """
    if isinstance(key, np.ndarray):
        return (key & _MASK).astype(np.int32)
    return tf.cast(tf.bitwise.bitwise_and(key, tf.constant(_MASK, tf.int64)), tf.int32)
