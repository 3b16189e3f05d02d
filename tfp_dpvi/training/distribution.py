"""Training of one model on several replicas and workers."""

from __future__ import annotations

import contextlib
import dataclasses
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from tfp_dpvi._tf import Optimizer, in_multi_worker_mode, tf, without_assertions
from tfp_dpvi.gradients import ClippedSum, PerExample, StepGradient
from tfp_dpvi.gradients.isolation import strictly
from tfp_dpvi.training.mechanism import Sums

_State = TypeVar("_State")
_Made = TypeVar("_Made")
_SPLITS_GATHERS = not tf.__version__.startswith("2.15.")
_LOST = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
)


class Replicas:
    """The replicas of a strategy, or the single device without a strategy.

    Each replica processes its part of every physical batch. The parts' sums are added, and all
    replicas add the same noise, drawn from the step's key, and make the same update.

    Args:
      strategy: The strategy, or None for a single device.
      jit_compile: Whether to compile with XLA.
      static: Whether batches have a fixed shape.
    """

    def __init__(
        self, strategy: tf.distribute.Strategy | None, *, jit_compile: bool, static: bool
    ) -> None:
        self._strategy = strategy
        self._jit_compile = jit_compile
        self._static = static
        self.num = 1 if strategy is None else strategy.num_replicas_in_sync

    def number(self) -> tf.Tensor:
        """Returns the index of the current replica, int64; 0 without a strategy."""
        context = tf.distribute.get_replica_context()
        number = None if context is None else context.replica_id_in_sync_group
        return tf.constant(0, tf.int64) if number is None else tf.cast(number, tf.int64)

    def share(
        self, indices: tf.Tensor, mask: tf.Tensor, num_shards: int = 1
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns this replica's part of a physical batch.

        The parts are disjoint, of equal size, and cover the batch.

        Args:
          indices: The batch's rows, an int64 tensor of shape [P].
          mask: A bool tensor of shape [P], False for padding.
          num_shards: The number of workers that each draw batches of their own, which only their
            own replicas share.

        Returns:
          The replica's indices and mask.
        """
        num = self.num // num_shards
        if num == 1:
            return indices, mask
        num_rows = int(indices.shape[0])
        size = -(-num_rows // num)
        padding = size * num - num_rows
        indices = tf.concat([indices, tf.repeat(indices[:1], padding)], axis=0)
        mask = tf.pad(mask, [[0, padding]])
        begin = self.number() % num * size
        return indices[begin : begin + size], mask[begin : begin + size]

    def rows(
        self, records: dict[str, tf.Tensor], indices: tf.Tensor, mask: tf.Tensor, batchwise: bool
    ) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
        """Returns the records with these indices, and the mask of sampled ones.

        Args:
          records: All records, their rows in the first dimension.
          indices: An int64 tensor of shape [P].
          mask: A bool tensor of shape [P], False for padding.
          batchwise: Whether the gradient works on a batch at once, so that padding costs time.
        """
        records = {name: part for name, part in records.items() if name != "mask"}
        if _are_all_in_order(indices, mask, tf.nest.flatten(records)):
            # In the graph of the step: what guards records tells them by it from other tensors.
            return tf.nest.map_structure(tf.identity, records), mask
        if batchwise and not self._static:
            # Without XLA shapes may vary: drop padding except one row, so that no batch is empty.
            indices = tf.concat([tf.boolean_mask(indices, mask), indices[:1]], axis=0)
            mask = tf.range(tf.size(indices)) < tf.size(indices) - 1
        gather = _gather_for_xla if self._jit_compile and self._strategy is None else tf.gather
        return tf.nest.map_structure(lambda part: gather(part, indices), records), mask

    def clipped_sum(self, gradient: StepGradient) -> Callable[..., tuple[ClippedSum, PerExample]]:
        """Returns the gradient's clipped sum, without assertions on records.

        Under a strategy with `jit_compile` it is compiled separately with XLA. Compiled code cannot
        read a replica's variables, so only sums by tensors (with a `pull_back`) are compiled.
        """
        clipped_sum = without_assertions()(gradient.clipped_sum)
        if self._strategy is None or not self._jit_compile or gradient.pull_back is None:
            return clipped_sum
        stated: list[ClippedSum] = []

        def tensors_of(*arguments: Any) -> tuple[list[tf.Tensor], PerExample]:
            with strictly():
                clipped, per_example = clipped_sum(*arguments)
            stated.append(clipped)
            return list(clipped.tensors), per_example

        def compiled(*arguments: Any) -> tuple[ClippedSum, PerExample]:
            with_xla = tf.function(tensors_of, jit_compile=True, autograph=False)
            tensors, per_example = with_xla(*arguments)
            return dataclasses.replace(stated[-1], tensors=tensors), per_example

        return compiled

    def total(self, sums: Sums) -> Sums:
        """Returns the sums over all replicas; each has processed the same number of batches."""
        if self.num == 1:
            return sums
        own = tf.nest.flatten(sums._replace(batches=()))
        # In a single dtype, since TensorFlow then packs the tensors.
        wide = [tf.cast(part, tf.float64) for part in own]
        together = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, wide)
        parts = [tf.cast(part, like.dtype) for part, like in zip(together, own, strict=True)]
        total: Sums = tf.nest.pack_sequence_as(sums, [*parts, sums.batches])
        return total

    def apply(self, optimizer: Optimizer, pairs: Iterable[tuple[tf.Tensor, tf.Variable]]) -> None:
        """Applies gradients, which all replicas have in common, without a sum over replicas.

        Args:
          optimizer: The optimizer.
          pairs: Each variable's gradient and the variable.
        """
        # TensorFlow keeps the graph of each such sum for ever, a single device's too.
        optimizer.apply_gradients(pairs, skip_gradients_aggregation=True)

    def run(self, step: Callable[[_State], _State], state: _State) -> _State:
        """Runs a step on all replicas, which end in the same state.

        Args:
          step: The step, from the state before it to that after it.
          state: A structure of tensors.
        """
        if self._strategy is None:
            return step(state)
        results = self._strategy.experimental_local_results
        ended: _State = tf.nest.map_structure(
            lambda part: results(part)[0], self._strategy.run(step, args=(state,))
        )
        return ended


class Workers:
    """The worker processes of `MultiWorkerMirroredStrategy`, or this process alone.

    The first worker is the chief: it plans, owns the ledger, and broadcasts the noise multiplier,
    the number of steps and the key. All workers therefore draw the same sample and add the same
    noise.

    Args:
      strategy: The model's strategy, which need not have several workers.
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
        """Checks that all workers have the same public values and the same arrays.

        Each worker takes its part of one sample by position: with different records or weights,
        adding a record would move others from one worker's gradient function to another's.

        Args:
          *public: Values whose `repr` must be equal.
          arrays: Returns the arrays that must be equal; called with several workers only.

        Raises:
          ValueError: Some worker has others; raised on every worker.
        """
        if not self.several:
            return
        checksum = zlib.crc32(repr(public).encode())
        for part in arrays():
            checksum = zlib.crc32(repr(part.shape).encode(), checksum)
            checksum = zlib.crc32(np.ascontiguousarray(part).tobytes(), checksum)
        rows = self._gathered([checksum])
        if not (rows == rows[0]).all():
            raise ValueError(
                "x, y, num_records, batch_size, the settings of compile and fit, or the weights "
                "differ between workers: run the same program on the same arrays on all.\n"
                "No privacy was spent."
            )

    def from_chief(self, make: Callable[[], Sequence[float]], num: int) -> list[float]:
        """Returns, on every worker, the numbers that `make` returns on the chief.

        Args:
          make: Returns `num` numbers; called on the chief alone.
          num: How many.

        Raises:
          RuntimeError: See `agree_on`.
        """
        if not self.several:
            return list(make())
        own = [0.0] * num

        def chief_makes() -> None:
            if self.is_chief:
                own[:] = make()

        self.agree_on(chief_makes)
        return [float(number) for number in self._gathered(own)[0]]

    def agree_on(self, make: Callable[[], _Made]) -> _Made:
        """Calls `make` on every worker, and passes on what it returns or raises.

        Raises:
          RuntimeError: It raised on another worker.
        """
        refusal: Exception | None = None
        try:
            made = make()
        except Exception as error:
            refusal = error
        if self.several:
            try:
                refused = self._gathered([float(refusal is not None)])[:, 0]
            except RuntimeError:
                # A worker that has heard of the refusal may have ended before this one has.
                if refusal is None:
                    raise
            else:
                if refusal is None and refused.any():
                    raise RuntimeError(
                        f"Worker {int(np.argmax(refused))} has refused this fit; see its message. "
                        "No privacy was spent."
                    )
        if refusal is not None:
            raise refusal
        return made

    def shards(self, num_records: int) -> tuple[tuple[int, int], int]:
        """Returns a sampler's `place` on this worker, and the records of all workers together.

        Args:
          num_records: The number of this worker's own records.
        """
        if not self.several:
            return (0, 1), num_records
        # A row for each replica, of which all workers have equally many.
        own = self._gathered([num_records])[:: len(self._strategy.extended.worker_devices), 0]
        resolver = self._strategy.cluster_resolver
        after_chief = resolver.task_type == "worker" and "chief" in resolver.cluster_spec().jobs
        return (resolver.task_id + after_chief, len(own)), int(own.sum())

    def secret(self, secret: bytes) -> bytes:
        """Returns the chief's bytes, a multiple of eight of them."""
        return bytes(self.key(np.frombuffer(secret, np.int64)).numpy().tobytes())

    def key(self, key: np.ndarray[Any, Any]) -> tf.Tensor:
        """Returns the chief's key, int64 of the shape that all workers pass."""
        if not self.several:
            return tf.constant(key)
        # In halves, since workers exchange float64, which holds 53 bits.
        halves = np.asarray(key, np.int64).view(np.uint32)
        chiefs = np.asarray(self.from_chief(lambda: halves.tolist(), len(halves)))
        return tf.constant(chiefs.astype(np.uint32).view(np.int64), tf.int64)

    @contextlib.contextmanager
    def naming_lost(self, spent: Callable[[], str]) -> Iterator[None]:
        """Converts TensorFlow's error for a lost worker to a `RuntimeError`.

        Args:
          spent: Returns a sentence on the privacy spent, for its message.
        """
        try:
            yield
        except (*_LOST, tf.errors.InvalidArgumentError) as error:
            # The error of a step has TensorFlow's as its context.
            said = f"{error} {error.__context__}"
            lost = isinstance(error, _LOST) or "Collective ops is aborted" in said
            if not self.several or not lost:
                raise
            # Without the cause: its message may be that of the other worker's step, with values.
            raise RuntimeError(
                "Another worker has ended or cannot be reached, but a step needs all of them. "
                f"{spent()}\nRestart all workers."
            ) from None

    def _gathered(self, own: Sequence[float]) -> np.ndarray[Any, Any]:
        """Returns all workers' numbers as float64, a row for each replica in their common order."""
        strategy = self._strategy

        def added(numbers: tf.Tensor) -> tf.Tensor:
            context = tf.distribute.get_replica_context()
            place = tf.one_hot(
                context.replica_id_in_sync_group, strategy.num_replicas_in_sync, dtype=numbers.dtype
            )
            return context.all_reduce(tf.distribute.ReduceOp.SUM, place[:, None] * numbers)

        with self.naming_lost(lambda: "This call spent no privacy."):
            run = tf.function(lambda numbers: strategy.run(added, args=(numbers,)), autograph=False)
            total = run(tf.constant(np.asarray(own, np.float64)))
            rows: np.ndarray[Any, Any] = strategy.experimental_local_results(total)[0].numpy()
            return rows


def _are_all_in_order(indices: tf.Tensor, mask: tf.Tensor, parts: Sequence[tf.Tensor]) -> bool:
    """Returns whether a batch surely has all rows in their order, as a full batch has.

    To gather these would take a tenth of a small step.
    """
    known, kept = tf.get_static_value(indices), tf.get_static_value(mask)
    if known is None or kept is None or any(part.shape[0] != known.size for part in parts):
        return False
    return bool(kept.all()) and np.array_equal(known, np.arange(known.size))


def _gather_for_xla(table: tf.Tensor, indices: tf.Tensor) -> tf.Tensor:
    """Returns `tf.gather(table, indices)` in a form that XLA on CPUs does not split over threads.

    Since TensorFlow 2.16, XLA splits operations that read more than half a MiB, and counts a gather
    as reading the whole table: three rows of ten numbers wait for a second thread longer than a
    small step takes. It does not split in-place updates.
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
