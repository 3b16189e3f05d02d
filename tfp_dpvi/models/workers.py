"""Several worker processes that train one model: what they must agree on, and what happens when one of them ends."""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tfp_dpvi._keras import tf
from tfp_dpvi.models.records import Records
from tfp_dpvi.privacy import PrivacyPlan

_LOST = (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError, tf.errors.DeadlineExceededError)


def several(strategy: Any) -> bool:
    """Whether other processes take part, as under `MultiWorkerMirroredStrategy`."""
    return bool(strategy.extended._in_multi_worker_mode())


def check_same_records(strategy: Any, records: Records, *public: int) -> None:
    """Raises, on every worker, unless all have the same records and public numbers.

    All draw the same indices and each takes its share of them by place: with records of their own, one record's presence
    would move others from one worker's data to another's. (Of streamed records only shapes and numbers are compared.)
    """
    if not several(strategy):
        return
    found = zlib.crc32(repr(public).encode())
    for part in tf.nest.flatten((records.x, records.y, records.sample_weight)):
        if part is not None:
            found = zlib.crc32(repr((part.shape, part.dtype)).encode(), found)
            found = zlib.crc32(np.ascontiguousarray(part).tobytes(), found)
    if not _same(_gathered(strategy, [found])):
        raise ValueError(
            "x, y, num_records or batch_size differ between workers: each takes its share of one and the same batch, so all need "
            "the same records. Pass the same arrays on every worker; nothing was spent."
        )


def agreed_plan(
    strategy: Any,
    make: Callable[[], PrivacyPlan],
    allowed_by: Callable[[PrivacyPlan], int],
    *public: Any,
) -> tuple[PrivacyPlan, int]:
    """The plan of this fit and how many of its steps may run, the same on all workers.

    Each worker has books of its own, and they may differ: a ledger on disk is given to one of them. All add one and the
    same noise, so that two noise multipliers would give the exact sum away: the largest holds for all, and the
    fewest steps.

    Args:
      strategy: the model's.
      make: a plan by this worker's own books.
      allowed_by: how many of a plan's releases they allow.
      *public: what else must be the same.

    Raises:
      ValueError: workers were compiled or called with other settings.
      RuntimeError: another worker has refused the fit.
      Exception: what `make` or `allowed_by` raises.
    """
    if not several(strategy):
        plan = make()
        return plan, allowed_by(plan)
    refusal: Exception | None = None
    noise, settings = 0.0, 0
    try:
        plan = make()
        noise = plan.noise_multiplier
        settings = zlib.crc32(repr((plan.replace(noise_multiplier=1.0).to_json(), public)).encode())
    except Exception as error:  # It is raised below, when the others know.
        refusal = error
    noises, all_settings = _together(strategy, refusal, [noise, settings]).T
    if not _same(all_settings):
        raise ValueError(
            "compile or fit was called with other settings on another worker (clip, epsilon and delta, noise, sampling, epochs or "
            "metrics): run the same program on all; nothing was spent."
        )
    plan = plan.replace(noise_multiplier=float(noises.max()))
    allowed = 0
    try:
        allowed = allowed_by(plan)
    except Exception as error:
        refusal = error
    return plan, int(_together(strategy, refusal, [allowed]).min())


def agreed_key(strategy: Any, key: Any) -> Any:
    """The first worker's key, on every worker: all draw the same batches and the same noise."""
    if not several(strategy):
        return key
    halves = np.asarray(key, np.int64).view(np.uint32)  # float64 holds 53 bits.
    first = _gathered(strategy, halves)[0].astype(np.uint32)
    return tf.constant(first.view(np.int64), tf.int64)


@contextlib.contextmanager
def naming_lost_workers(strategy: Any, spent: Callable[[], str]) -> Iterator[None]:
    """Turns what TensorFlow raises when a worker dies into an error that says what became of the books.

    Args:
      strategy: the model's.
      spent: a sentence about them.

    Raises:
      RuntimeError: a worker died, or the connection to it.
    """
    if not several(strategy):
        yield
        return
    try:
        yield
    except _LOST as error:
        raise RuntimeError(
            f"Another worker has ended, or cannot be reached, and all are needed for a step. {spent()} Start all workers "
            "again: TensorFlow does not take one back into a running cluster."
        ) from error


def _together(strategy: Any, refusal: Exception | None, own: list[float]) -> Any:
    """What all workers say, one row each; raises if one of them refuses."""
    refused, *found = _gathered(strategy, [float(refusal is not None), *own]).T
    if refusal is not None:
        raise refusal
    if refused.any():
        raise RuntimeError(
            f"Worker {int(np.argmax(refused))} has refused this fit: its message says why. Nothing was spent."
        )
    return np.stack(found, axis=1)


def _same(rows: Any) -> bool:
    return bool((rows == rows[0]).all())


def _gathered(strategy: Any, own: Any) -> Any:
    """Float64 array of each worker's numbers, one row for every replica in their common order."""
    with naming_lost_workers(strategy, lambda: "Nothing was spent by this call."):
        return _gather_function(strategy)(tf.constant(np.asarray(own, np.float64))).numpy()


@functools.cache  # A program has one strategy of this kind.
def _gather_function(strategy: Any) -> Callable[[Any], Any]:
    replicas = strategy.num_replicas_in_sync

    def added(numbers: Any) -> Any:
        context = tf.distribute.get_replica_context()
        place = tf.one_hot(context.replica_id_in_sync_group, replicas, dtype=numbers.dtype)
        return context.all_reduce(tf.distribute.ReduceOp.SUM, place[:, None] * numbers)

    def gather(numbers: Any) -> Any:
        return strategy.experimental_local_results(strategy.run(added, args=(numbers,)))[0]

    return tf.function(gather, autograph=False, input_signature=[tf.TensorSpec([None], tf.float64)])
