"""The compiled training loop: sample, clip, sum, noise, update, many steps in one call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from tfp_dpvi import _random
from tfp_dpvi._tf import tf
from tfp_dpvi.gradients import ClippedSum, RecordGradient, RecordStatistics, clipped_sum
from tfp_dpvi.gradients.shapes import strictly
from tfp_dpvi.metrics import PrivateMetric, centred_sum, joint_release
from tfp_dpvi.privacy import Sensitivity
from tfp_dpvi.sampling import GivenBatchSampler, Sampler

_SPLITS_GATHERS = not tf.__version__.startswith("2.15.")
"""Whether XLA on CPUs splits gathers, see `_gather_for_xla`."""


@dataclasses.dataclass(frozen=True)
class StepGradients:
    """What a model says about one step, after its Monte Carlo draws.

    Attributes:
      record_gradient: one record's loss and its gradient, before the clip; or None with `clip_batch`.
      released: tensors with the shapes and dtypes of that gradient's parts, which are what is summed and released.
      data_independent: exact gradient of the terms that touch no record, one tensor for each variable, or None.
      pull_back: from the noisy sum to one tensor for each variable; None where the gradient is by the variables.
      clip_batch: in place of `record_gradient`, `(records, mask, key) -> (ClippedSum, RecordStatistics)` for models that
        work on a batch at once; the key is for draws that belong to single records.
      data_independent_loss: the value that `data_independent` is the gradient of, a scalar, or None.
    """

    record_gradient: RecordGradient | None
    released: Sequence[Any]
    data_independent: Sequence[Any] | None
    pull_back: Callable[[Sequence[Any]], Sequence[Any]] | None = None
    clip_batch: Callable[[Any, Any, Any], tuple[ClippedSum, RecordStatistics]] | None = None
    data_independent_loss: Any = None


@dataclasses.dataclass(frozen=True)
class LoopSettings:
    """What is fixed while tracing; everything else is an argument of the compiled function.

    `sensitivity` is what the plan was priced for, `gradient_sensitivity` (by default the same) what the clipper states; they
    differ by the `metrics` that are released with the gradient.

    With a `strategy` of several replicas each takes its share of every physical batch; the shares' clipped sums are
    added up, and all replicas add one and the same noise, drawn from the step's key, and make the same update.
    """

    sampler: Sampler
    expected_batch_size: float
    num_records: int
    sensitivity: Sensitivity
    jit_compile: bool
    run_eagerly: bool
    noise_scales: tuple[float, ...] | None = None
    strategy: Any = None
    metrics: tuple[PrivateMetric, ...] = ()
    gradient_sensitivity: Sensitivity | None = None


def make_loop(
    step_gradients: Callable[[Any, int], StepGradients],
    variables: Sequence[Any],
    optimizer: Any,
    settings: LoopSettings,
) -> Callable[..., Any]:
    """The function `run(key, first_step, num_steps, noise_multiplier, records) -> means over the steps`.

    Step t (counted from the model's first) takes its keys from `(key, t)` alone, so that the number of steps in one
    call changes nothing. It returns a vector: the mean loss per expected batch, which is exact, hence not private (callers
    drop it unless told otherwise), and the privatised metrics.

    Args:
      step_gradients: `(draw_key, num_records) -> StepGradients`, traced once inside the loop.
      variables: what is updated.
      optimizer: a `DPOptimizer`, already built.
      settings: see `LoopSettings`.
    """
    clip, clipping = optimizer.l2_norm_clip, optimizer.clipping
    static = settings.jit_compile or settings.run_eagerly
    expected_sensitivity = settings.gradient_sensitivity or settings.sensitivity
    replicas = 1 if settings.strategy is None else settings.strategy.num_replicas_in_sync

    def one_step(step: Any, key: Any, noise_multiplier: Any, records: Any) -> Any:
        sampling_key, draw_key, visits_key, noise_key = _random.keys_of_step(key, step)
        gradients = step_gradients(draw_key, settings.num_records)

        def clip_visited(batch: Any, mask: Any, visit_key: Any) -> tuple[ClippedSum, RecordStatistics]:
            if gradients.clip_batch is not None:
                return gradients.clip_batch(batch, mask, visit_key)
            assert gradients.record_gradient is not None
            if settings.strategy is not None and settings.jit_compile and gradients.pull_back is not None:
                # Tensors in, tensors out: compiled code cannot read the variables of a replica.
                compiled = tf.function(sums_of, jit_compile=True, autograph=False)
                tensors, statistics = compiled(batch, mask)
                return ClippedSum(tensors, clip), statistics
            return clipped_sum(gradients.record_gradient, batch, mask, l2_norm_clip=clip, clipping=clipping)

        def sums_of(batch: Any, mask: Any) -> tuple[Any, RecordStatistics]:
            assert gradients.record_gradient is not None
            with strictly():
                clipped, statistics = clipped_sum(
                    gradients.record_gradient, batch, mask, l2_norm_clip=clip, clipping=clipping
                )
            return list(clipped.tensors), statistics

        def visit(carry: Any, indices: Any, mask: Any) -> Any:
            sums, monitored, loss, number = carry
            if replicas > 1:
                indices, mask = _share(indices, mask, replicas)
            own = dict(records)
            given = own.pop("mask", None)
            if given is not None:
                mask &= tf.gather(given, indices)  # Rows of a given batch that are padding.
            if gradients.clip_batch is not None and not static:
                # Without XLA shapes may vary: no work for padding, but for one row, so that no batch is empty.
                indices = tf.concat([tf.boolean_mask(indices, mask), indices[:1]], axis=0)
                mask = tf.range(tf.size(indices)) < tf.size(indices) - 1
            gather = _gather_for_xla if settings.jit_compile and settings.strategy is None else tf.gather
            batch = tf.nest.map_structure(lambda part: gather(part, indices), own)
            visit_key = _random.fold_in(visits_key, number * replicas + _replica())
            clipped, statistics = clip_visited(batch, mask, visit_key)
            stated = (clipped.sensitivity, clipped.noise_scales)
            if stated != (expected_sensitivity, settings.noise_scales):
                raise AssertionError(
                    f"The clipper states {stated}, the plan was priced for {expected_sensitivity}, {settings.noise_scales}."
                )
            sums = [total + tf.cast(part, total.dtype) for total, part in zip(sums, clipped.tensors, strict=True)]
            monitored = [
                total + centred_sum(metric, statistics)
                for total, metric in zip(monitored, settings.metrics, strict=True)
            ]
            return sums, monitored, loss + statistics.sum_of_losses(), number + 1

        # In float64 over many visits: a long float32 sum can round one record's presence up to many clips.
        wide = gradients.clip_batch is None or settings.sampler.physical_batch_size < settings.expected_batch_size
        zeros = [tf.zeros(part.shape, tf.float64 if wide else part.dtype) for part in gradients.released]
        zero = tf.zeros([], variables[0].dtype)
        start = (zeros, [tf.zeros([], tf.float64) for _ in settings.metrics], zero, tf.constant(0, tf.int64))
        sampler = settings.sampler
        if isinstance(sampler, GivenBatchSampler):
            sums, monitored, loss, _ = sampler.walk(sampling_key, visit, start, given=records["mask"])
        else:
            sums, monitored, loss, _ = sampler.walk(sampling_key, visit, start)
        sums = [tf.cast(total, part.dtype) for total, part in zip(sums, gradients.released, strict=True)]
        if replicas > 1:
            context = tf.distribute.get_replica_context()
            *together, loss = context.all_reduce(tf.distribute.ReduceOp.SUM, [*sums, *monitored, loss])
            sums, monitored = together[: len(sums)], together[len(sums) :]
        of_gradient = ClippedSum(sums, clip, expected_sensitivity, settings.noise_scales)
        private = optimizer.privatize(
            joint_release(settings.metrics, of_gradient, monitored, settings.sensitivity),
            key=noise_key,
            expected_batch_size=settings.expected_batch_size,
            pull_back=gradients.pull_back,
            data_independent=gradients.data_independent,
            noise_multiplier=noise_multiplier,
        )
        pairs = zip(private.tensors, variables, strict=True)
        if settings.strategy is not None:
            optimizer.apply_gradients(pairs, skip_gradients_aggregation=True)  # They are the same everywhere already.
        else:
            optimizer.apply_gradients(pairs)
        exact = gradients.data_independent_loss
        exact = zero if exact is None else tf.cast(exact, zero.dtype)
        means = [
            mean + (metric.low + metric.high) / 2
            for mean, metric in zip(private.metrics, settings.metrics, strict=True)
        ]
        shown = [metric.shown(mean, exact) for mean, metric in zip(means, settings.metrics, strict=True)]
        return tf.stack([loss / tf.cast(settings.expected_batch_size, loss.dtype), *shown])

    def run(key: Any, first_step: Any, num_steps: Any, noise_multiplier: Any, records: Any) -> Any:
        def body(done: Any, total: Any) -> tuple[Any, Any]:
            arguments = (first_step + done, key, noise_multiplier, records)
            if settings.strategy is None:
                return done + 1, total + one_step(*arguments)
            losses = settings.strategy.run(one_step, args=arguments)
            return done + 1, total + settings.strategy.reduce(tf.distribute.ReduceOp.MEAN, losses, axis=None)

        start = (tf.constant(0, tf.int64), tf.zeros([1 + len(settings.metrics)], variables[0].dtype))
        _, total = tf.while_loop(lambda done, _: done < num_steps, body, start, parallel_iterations=1)
        return total / tf.cast(tf.maximum(num_steps, 1), total.dtype)

    if not settings.run_eagerly:
        run = tf.function(run, jit_compile=settings.jit_compile and settings.strategy is None, autograph=False)
    return run


def _gather_for_xla(table: Any, indices: Any) -> Any:
    """`tf.gather(table, indices)`, which XLA on CPUs does not split over threads.

    From TensorFlow 2.16 on it splits what reads more than half a MiB, and takes a gather to read the whole table: three rows
    of ten numbers wait for a second thread, longer than a small step takes. It does not split updates in place.
    """
    rows = tf.gather(table, indices)
    num = int(indices.shape[0])
    if not _SPLITS_GATHERS or tf.config.list_physical_devices("GPU") or not num < (table.shape[0] or 0):
        return rows
    return tf.raw_ops.TensorStridedSliceUpdate(input=table[: num + 1], begin=[0], end=[num], strides=[1], value=rows)[
        :num
    ]


def _replica() -> Any:
    """Number of the replica that this is traced for, 0 without a strategy."""
    context = tf.distribute.get_replica_context()
    number = None if context is None else context.replica_id_in_sync_group
    return tf.constant(0, tf.int64) if number is None else tf.cast(number, tf.int64)


def _share(indices: Any, mask: Any, replicas: int) -> tuple[Any, Any]:
    """This replica's part of a physical batch: parts are disjoint, of one size, and all of it together."""
    size = -(-int(indices.shape[0]) // replicas)
    padding = size * replicas - int(indices.shape[0])
    begin = _replica() * size
    indices = tf.concat([indices, tf.repeat(indices[:1], padding)], axis=0)
    return indices[begin : begin + size], tf.pad(mask, [[0, padding]])[begin : begin + size]
