"""Random words of AES-256 in counter mode, for `compile(randomness="secure")` (contract 10).

Steps take them as tapes (see `tfp_dpvi._random`), which one thread makes ahead. The 256-bit key
comes from the operating system and stays on the host: no graph, variable, checkpoint or log has it.
"""

from __future__ import annotations

import concurrent.futures
import types
from collections.abc import Iterator
from typing import Any

import numpy as np

from tfp_dpvi import _random
from tfp_dpvi import _validate as check
from tfp_dpvi._tf import tf

SECURE = "secure"
"""The value of `randomness` that asks for these words."""

_KEY_BYTES = 32
# Zeros are encrypted a piece at a time, which stays in the processor's cache.
_ZEROS = bytes(2**16)
# The largest tape of several steps.
_MOST_BYTES = 2**25


def check_randomness(randomness: str | None, seed: int | None = None, owner: str = "") -> None:
    """Refuses an unknown value of `randomness`, and "secure" beside a seed.

    Args:
      randomness: None or "secure".
      seed: The seed of the owner, or None.
      owner: What has the seed, for messages.

    Raises:
      ValueError: The value is another, or the owner has a seed beside "secure".
    """
    if randomness is None:
        return
    check.one_of("randomness", randomness, (SECURE,))
    if seed is not None:
        raise ValueError(
            f"randomness={randomness!r}, but {owner} has a seed, whose noise anyone can draw "
            "again: leave out one of them."
        )


def new_key() -> bytes:
    """Returns 256 bits from the operating system."""
    return _random.entropy(_KEY_BYTES)


class Keystream:
    """Rows of random words, one for each step: a function of key, stream and number of the step.

    Row t of W words is made of the counters t W / 2 and up, so that rows share no bits, whoever
    makes them. Streams have counters that differ in their upper 64 bits.

    Args:
      key: 32 bytes.
      num_words: The words of 64 bits in a row; an odd number is rounded up.
      stream: The number of the stream, below 2^64.
    """

    def __init__(self, key: bytes, num_words: int, stream: int = 0) -> None:
        self.num_words = num_words + num_words % 2
        self._key, self._stream = key, stream
        # A missing package is found before anything is spent.
        _ciphers()

    def beside(self, num_words: int) -> Keystream:
        """Returns the next stream of the key, with rows of its own size."""
        return Keystream(self._key, num_words, self._stream + 1)

    def rows(self, first: int, num: int) -> np.ndarray[Any, Any]:
        """Returns the rows of some steps, uint64 [num, words]; step t is row t modulo `num`.

        Args:
          first: The number of the first step.
          num: The number of steps.
        """
        tape = np.empty([num, self.num_words], np.uint64)
        at = first % num
        counter = (self._stream << 64) + first * self.num_words // 2
        fill(self._key, counter, [tape[at:].reshape(-1), tape[:at].reshape(-1)])
        return tape


def fill(key: bytes, counter: int, parts: list[np.ndarray[Any, Any]]) -> None:
    """Fills arrays with the blocks of AES in counter mode, one after another.

    Args:
      key: 32 bytes.
      counter: The counter of the first block.
      parts: Flat arrays of whole blocks of 16 bytes.
    """
    ciphers = _ciphers()
    mode = ciphers.modes.CTR(counter.to_bytes(16, "big"))
    blocks = ciphers.Cipher(ciphers.algorithms.AES(key), mode).encryptor()
    for part in parts:
        target = part.view(np.uint8)
        for begin in range(0, target.size, len(_ZEROS)):
            size = min(len(_ZEROS), target.size - begin)
            piece = np.frombuffer(blocks.update(_ZEROS[:size]), np.uint8)
            target[begin : begin + size] = piece


def _ciphers() -> types.ModuleType:
    """Returns the package's module; raises `ImportError` without it."""
    try:
        from cryptography.hazmat.primitives import ciphers
    except ImportError:
        raise ImportError(
            "randomness='secure' needs the package cryptography: pip install 'tfp-dpvi[secure]'."
        ) from None
    return ciphers


class Tapes:
    """Feeds the steps of a fit with tapes of one static shape, [steps of a tape, words].

    Args:
      keystream: The rows of the fit.
      num_steps: The most steps that a tape is to have; fewer if it would be too large.
    """

    def __init__(self, keystream: Keystream, num_steps: int) -> None:
        self.keystream = keystream
        most = _MOST_BYTES // (8 * keystream.num_words)
        self._num_steps = max(1, min(num_steps, most))
        self._maker: concurrent.futures.ThreadPoolExecutor | None = None
        self._now: tuple[int, tf.Tensor] | None = None  # The first step of a tape, and the tape.
        self._ahead: tuple[int, concurrent.futures.Future[tf.Tensor]] | None = None

    @property
    def spec(self) -> tf.TensorSpec:
        """Shape and dtype of every tape."""
        return tf.TensorSpec([self._num_steps, self.keystream.num_words], tf.uint64)

    def calls(self, first: int, steps: int) -> Iterator[tuple[int, tf.Tensor]]:
        """Yields numbers of steps with their tapes.

        Args:
          first: The number of the first step.
          steps: The number of steps together.
        """
        end = first + steps
        while first < end:
            few = min(self._num_steps, end - first)
            yield few, self._tape(first, few)
            first += few

    def close(self) -> None:
        """Ends the thread, and drops the tapes."""
        if self._maker is not None:
            self._maker.shutdown(cancel_futures=True)
        self._maker = self._now = self._ahead = None

    def _tape(self, first: int, steps: int) -> tf.Tensor:
        """Returns a tape with the rows of these steps.

        It is the latest one, or else one that begins with them.
        """
        begin, tape = self._now or (first + 1, None)
        if not begin <= first <= first + steps <= begin + self._num_steps:
            if self._ahead is None or self._ahead[0] != first:
                self._ahead = self._make(first)
            self._now = first, self._ahead[1].result()
            self._ahead = self._make(first + self._num_steps)
            tape = self._now[1]
        return tape

    def _make(self, first: int) -> tuple[int, concurrent.futures.Future[tf.Tensor]]:
        if self._maker is None:
            self._maker = concurrent.futures.ThreadPoolExecutor(1, "tfp_dpvi keystream")
        return first, self._maker.submit(self._made, first)

    def _made(self, first: int) -> tf.Tensor:
        # The array is new each time: the tensor may share its memory.
        return tf.constant(self.keystream.rows(first, self._num_steps))
