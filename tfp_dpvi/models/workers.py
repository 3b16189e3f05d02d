"""Several worker processes that train one model: what they must agree on, and what happens when one of them ends."""

from __future__ import annotations

import contextlib
import functools
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from tfp_dpvi._tf import tf
from tfp_dpvi.models.records import Records
from tfp_dpvi.models.state import variables_of
from tfp_dpvi.privacy import PrivacyPlan

_LOST = (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError, tf.errors.DeadlineExceededError)


def several(strategy: Any) -> bool:
    """Whether other processes take part, as under `MultiWorkerMirroredStrategy`."""
    return bool(strategy.extended._in_multi_worker_mode())


def check_same_records(strategy: Any, records: Records, *public: int) -> None:
    """Raises, on every worker, unless all have the same records and public numbers.

    All draw the same indices and each takes its share of them by place: with records of their own, one record's presence
    would move others from one worker's data to another's. (Of streamed records some rows are compared.)
    """
    if not several(strategy):
        return
    parts = tf.nest.flatten((records.x, records.y, records.sample_weight))
    found = checksum([part for part in parts if part is not None])
    if not _same(_gathered(strategy, [found, zlib.crc32(repr(public).encode())])):
        raise ValueError(
            "x, y, num_records or batch_size differ between workers: each takes its share of one and the same batch, so all need "
            "the same records. Pass the same arrays on every worker; nothing was spent."
        )


def agreed_plan(
    model: Any,
    make: Callable[[], PrivacyPlan],
    allowed_by: Callable[[PrivacyPlan], int],
    public: Any,
) -> tuple[PrivacyPlan, int]:
    """The plan of this fit and how many of its steps may run, the same on all workers.

    Each worker has books of its own, and they may differ: a ledger on disk is given to one of them. All add one and the
    same noise, so that two noise multipliers would give the exact sum away: the largest holds for all, and the
    fewest steps.

    Args:
      model: a compiled `DPModel`.
      make: a plan by this worker's own books.
      allowed_by: how many of a plan's releases they allow.
      public: what else must be the same, beside what the model was compiled with and its weights and optimizer state: a
        worker at other weights would give its share of a batch another gradient function, and one record's presence
        moves others between shares.

    Raises:
      ValueError: workers were compiled or called with other settings.
      RuntimeError: another worker has refused the fit.
      Exception: what `make` or `allowed_by` raises.
    """
    strategy, state = model.distribute_strategy, model._dp
    if not several(strategy):
        plan = make()
        return plan, allowed_by(plan)
    values = checksum(variables_of(model))  # On all workers: it makes variables, which they share.
    steps = (state.auto_steps_per_execution, int(model._steps_per_execution.numpy()))
    rate = repr(model.optimizer.get_config().get("learning_rate"))
    metrics = [metric.identity for metric in state.private_metrics]
    own = re.sub(r"0x[0-9a-f]+", "", repr((type(model).__name__, model.step_identity, metrics)))
    known = (public, repr(state.settings), state.seed, model.optimizer.clipping, rate, steps, values, own)
    refusal: Exception | None = None
    noise, settings = 0.0, 0
    try:
        plan = make()
        noise = plan.noise_multiplier
        settings = zlib.crc32(repr((plan.replace(noise_multiplier=1.0).to_json(), known)).encode())
    except Exception as error:  # It is raised below, when the others know.
        refusal = error
    noises, all_settings = _together(strategy, refusal, [noise, settings]).T
    if not _same(all_settings):
        raise ValueError(
            "Another worker has other settings (in compile, fit, optimizer, model or seed) or other weights: run the same program "
            "on all, with the same weights; nothing was spent."
        )
    plan = plan.replace(noise_multiplier=float(noises.max()))
    allowed = 0
    try:
        allowed = allowed_by(plan)
    except Exception as error:
        refusal = error
    return plan, int(_together(strategy, refusal, [allowed]).min())


def checksum(variables: Sequence[Any]) -> int:
    """Of shapes and values of variables, or of arrays."""
    found = 0
    for variable in variables:
        value = np.asarray(variable.numpy() if hasattr(variable, "numpy") else variable)
        found = zlib.crc32(repr((value.shape, value.dtype)).encode(), found)
        found = zlib.crc32(np.ascontiguousarray(value).tobytes(), found)
    return found


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
    except (*_LOST, tf.errors.InvalidArgumentError) as error:
        if not isinstance(error, _LOST) and "Collective ops is aborted" not in str(error):
            raise
        raise RuntimeError(
            f"Another worker has ended, or cannot be reached, and all are needed for a step. {spent()} Start all workers "
            "again: TensorFlow does not take one back into a running cluster."
        ) from error


@contextlib.contextmanager
def ready_together(strategy: Any) -> Iterator[None]:
    """What a worker does by itself before the first step: where one cannot, none begins.

    Raises:
      RuntimeError: another worker has refused.
      Exception: what the body raises.
    """
    refusal: Exception | None = None
    try:
        yield
    except Exception as error:
        if not several(strategy):
            raise
        refusal = error
    if several(strategy):
        _together(strategy, refusal, [0.0])


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
