"""Training of one model on several replicas and workers."""

from __future__ import annotations

import contextlib
import dataclasses
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from tfp_dpvi._tf import in_multi_worker_mode, tf, without_assertions
from tfp_dpvi.gradients import ClippedSum, StepGradient, strictly

_SPLITS_GATHERS = not tf.__version__.startswith("2.15.")
_LOST = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
)


class Replicas:
    """The replicas of a strategy, or the one device without a strategy.

    Each replica processes its part of every physical batch. The parts' sums are added, and all replicas add the same noise,
    drawn from the step's key, and make the same update. `static` says whether batches have a fixed shape.
    """

    def __init__(
        self, strategy: tf.distribute.Strategy | None, *, jit_compile: bool, static: bool
    ) -> None:
        self._strategy, self._jit_compile, self._static = strategy, jit_compile, static
        self.num = 1 if strategy is None else strategy.num_replicas_in_sync

    def number(self) -> tf.Tensor:
        """Returns the index of the current replica, int64; 0 without a strategy."""
        context = tf.distribute.get_replica_context()
        number = None if context is None else context.replica_id_in_sync_group
        return tf.constant(0, tf.int64) if number is None else tf.cast(number, tf.int64)

    def share(self, indices: tf.Tensor, mask: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns this replica's part of a physical batch: parts are disjoint, of equal size, and cover the batch."""
        if self.num == 1:
            return indices, mask
        size = -(-int(indices.shape[0]) // self.num)
        padding, begin = size * self.num - int(indices.shape[0]), self.number() * size
        indices = tf.concat([indices, tf.repeat(indices[:1], padding)], axis=0)
        return indices[begin : begin + size], tf.pad(mask, [[0, padding]])[begin : begin + size]

    def rows(
        self, records: dict[str, tf.Tensor], indices: tf.Tensor, mask: tf.Tensor, batchwise: bool
    ) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
        """Returns the records with these indices, and the mask of sampled ones."""
        records = {name: part for name, part in records.items() if name != "mask"}
        if batchwise and not self._static:
            # Without XLA shapes may vary: drop padding except one row, so that no batch is empty.
            indices = tf.concat([tf.boolean_mask(indices, mask), indices[:1]], axis=0)
            mask = tf.range(tf.size(indices)) < tf.size(indices) - 1
        gather = _gather_for_xla if self._jit_compile and self._strategy is None else tf.gather
        return tf.nest.map_structure(lambda part: gather(part, indices), records), mask

    def clipped_sum(self, gradient: StepGradient) -> Callable[..., Any]:
        """Returns the gradient's clipped sum, without assertions on records.

        Under a strategy with `jit_compile` it is compiled separately with XLA. Compiled code cannot read a replica's variables, so only sums by tensors (with a `pull_back`) are compiled.
        """
        clipped_sum = without_assertions()(gradient.clipped_sum)
        if self._strategy is None or not self._jit_compile or gradient.pull_back is None:
            return clipped_sum
        stated: list[ClippedSum] = []

        def tensors_of(*arguments: Any) -> Any:
            with strictly():
                clipped, per_example = clipped_sum(*arguments)
            stated.append(clipped)
            return list(clipped.tensors), per_example

        def compiled(*arguments: Any) -> Any:
            tensors, per_example = tf.function(tensors_of, jit_compile=True, autograph=False)(
                *arguments
            )
            return dataclasses.replace(stated[-1], tensors=tensors), per_example

        return compiled

    def total(self, sums: Any) -> Any:
        """Returns the sums over all replicas."""
        if self.num == 1:
            return sums
        own = tf.nest.flatten(sums._replace(batches=()))
        wide = [tf.cast(part, tf.float64) for part in own]  # TensorFlow packs tensors of one dtype.
        together = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, wide)
        parts = [tf.cast(part, like.dtype) for part, like in zip(together, own, strict=True)]
        return tf.nest.pack_sequence_as(sums, [*parts, sums.batches])

    def apply(self, optimizer: Any, pairs: Iterable[tuple[tf.Tensor, tf.Variable]]) -> None:
        """Applies gradients; under a strategy without summing them, since all replicas have the same."""
        optimizer.apply_gradients(
            pairs, **({} if self._strategy is None else {"skip_gradients_aggregation": True})
        )

    def run(self, step: Callable[[Any], Any], state: Any) -> Any:
        """Runs a step on all replicas, which end in the same state."""
        if self._strategy is None:
            return step(state)
        ended = self._strategy.run(step, args=(state,))
        return tf.nest.map_structure(
            lambda part: self._strategy.experimental_local_results(part)[0], ended
        )


class Workers:
    """The worker processes of `MultiWorkerMirroredStrategy`, or this one process.

    The first worker is the chief: it plans, owns the ledger, and broadcasts the noise multiplier, the number of steps and
    the key. All workers therefore draw the same sample and add the same noise.
    """

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        self.several = in_multi_worker_mode(strategy)
        self._strategy = strategy

    @property
    def is_chief(self) -> bool:
        """True if this process is the chief."""
        if not self.several:
            return True
        resolver = self._strategy.cluster_resolver
        return resolver.task_type == "chief" or (
            resolver.task_id == 0 and "chief" not in resolver.cluster_spec().jobs
        )

    def check_same(
        self, *public: object, arrays: Callable[[], Sequence[np.ndarray[Any, Any]]]
    ) -> None:
        """Raises `ValueError` on every worker unless all have the same public values and the same arrays.

        Each worker takes its part of one sample by position: with different records or weights, adding a record would move
        others from one worker's gradient function to another's.
        """
        if not self.several:
            return
        found = zlib.crc32(repr(public).encode())
        for part in arrays():
            found = zlib.crc32(
                np.ascontiguousarray(part).tobytes(), zlib.crc32(repr(part.shape).encode(), found)
            )
        rows = self._gathered([found])
        if not (rows == rows[0]).all():
            raise ValueError(
                "x, y, num_records, batch_size, the settings of compile and fit, or the weights differ between workers: run the same "
                "program on the same arrays on all.\nNo privacy was spent."
            )

    def from_chief(self, make: Callable[[], Sequence[float]], num: int) -> list[float]:
        """Returns, on every worker, the `num` numbers that `make` returns on the chief; errors as of `agree_on`."""
        if not self.several:
            return list(make())
        own = [0.0] * num

        def chief_makes() -> None:
            if self.is_chief:
                own[:] = make()

        self.agree_on(chief_makes)
        return [float(number) for number in self._gathered(own)[0]]

    def agree_on(self, make: Callable[[], None]) -> None:
        """Calls `make` on every worker; if it raises on one, the others raise `RuntimeError`."""
        refusal: Exception | None = None
        try:
            make()
        except Exception as error:
            refusal = error
        if self.several:
            refused = self._gathered([float(refusal is not None)])[:, 0]
            if refusal is None and refused.any():
                raise RuntimeError(
                    f"Worker {int(np.argmax(refused))} has refused this fit; see its message. No privacy was spent."
                )
        if refusal is not None:
            raise refusal

    def secret(self, secret: bytes) -> bytes:
        """Returns the chief's bytes, a multiple of eight of them."""
        return bytes(self.key(np.frombuffer(secret, np.int64)).numpy().tobytes())

    def key(self, key: np.ndarray[Any, Any]) -> tf.Tensor:
        """Returns the chief's key, int64 of the shape that all workers pass."""
        if not self.several:
            return tf.constant(key)
        halves = np.asarray(key, np.int64).view(np.uint32)  # float64 holds 53 bits.
        first = np.asarray(self.from_chief(lambda: halves.tolist(), len(halves))).astype(np.uint32)
        return tf.constant(first.view(np.int64), tf.int64)

    @contextlib.contextmanager
    def naming_lost(self, spent: Callable[[], str]) -> Iterator[None]:
        """Converts TensorFlow's error for a lost worker to a `RuntimeError` with the privacy spent."""
        try:
            yield
        except (*_LOST, tf.errors.InvalidArgumentError) as error:
            # The error of a step has TensorFlow's as its context.
            said = f"{error} {error.__context__}"
            lost = isinstance(error, _LOST) or "Collective ops is aborted" in said
            if not self.several or not lost:
                raise
            # The cause is left out: its message may be that of the other worker's step, with values.
            raise RuntimeError(
                f"Another worker has ended or cannot be reached, but a step needs all of them. {spent()}\nRestart all workers."
            ) from None

    def _gathered(self, own: Sequence[float]) -> np.ndarray[Any, Any]:
        """Returns all workers' numbers as float64, one row for each replica in their common order."""
        strategy = self._strategy

        def added(numbers: tf.Tensor) -> tf.Tensor:
            context = tf.distribute.get_replica_context()
            place = tf.one_hot(
                context.replica_id_in_sync_group, strategy.num_replicas_in_sync, dtype=numbers.dtype
            )
            return context.all_reduce(tf.distribute.ReduceOp.SUM, place[:, None] * numbers)

        with self.naming_lost(lambda: "This call spent no privacy."):
            run = tf.function(lambda numbers: strategy.run(added, args=(numbers,)), autograph=False)
            found = run(tf.constant(np.asarray(own, np.float64)))
            rows: np.ndarray[Any, Any] = strategy.experimental_local_results(found)[0].numpy()
            return rows


def _gather_for_xla(table: tf.Tensor, indices: tf.Tensor) -> tf.Tensor:
    """Returns `tf.gather(table, indices)` in a form that XLA on CPUs does not split over threads.

    Since TensorFlow 2.16, XLA splits operations that read more than half a MiB, and counts a gather as reading the whole table:
    three rows of ten numbers wait for a second thread longer than a small step takes. It does not split in-place updates.
    """
    rows = tf.gather(table, indices)
    num = int(indices.shape[0])
    if (
        not _SPLITS_GATHERS
        or tf.config.list_physical_devices("GPU")
        or not num < (table.shape[0] or 0)
    ):
        return rows
    padded = tf.raw_ops.TensorStridedSliceUpdate(
        input=table[: num + 1], begin=[0], end=[num], strides=[1], value=rows
    )
    return padded[:num]
