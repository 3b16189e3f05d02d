"""The compiled training loop: sample, clip, sum, noise, update, many steps in one call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from tfp_dpvi import _random
from tfp_dpvi._keras import tf
from tfp_dpvi.gradients import ClippedSum, RecordGradient, clipped_sum
from tfp_dpvi.privacy import Sensitivity
from tfp_dpvi.sampling import Sampler


@dataclasses.dataclass(frozen=True)
class StepGradients:
    """What a model says about one step, after its Monte Carlo draws.

    Attributes:
      record_gradient: one record's loss and its gradient, before the clip; or None with `clip_batch`.
      released: tensors with the shapes and dtypes of that gradient's parts, which are what is summed and released.
      data_independent: exact gradient of the terms that touch no record, one tensor for each variable, or None.
      pull_back: from the noisy sum to one tensor for each variable; None where the gradient is by the variables.
      clip_batch: in place of `record_gradient`, `(records, mask, key) -> (ClippedSum, sum of losses)` for models that
        work on a batch at once; the key is for draws that belong to single records.
    """

    record_gradient: RecordGradient | None
    released: Sequence[Any]
    data_independent: Sequence[Any] | None
    pull_back: Callable[[Sequence[Any]], Sequence[Any]] | None = None
    clip_batch: Callable[[Any, Any, Any], tuple[ClippedSum, Any]] | None = None


@dataclasses.dataclass(frozen=True)
class LoopSettings:
    """What is fixed while tracing; everything else is an argument of the compiled function."""

    sampler: Sampler
    expected_batch_size: float
    num_records: int
    sensitivity: Sensitivity
    jit_compile: bool
    run_eagerly: bool
    noise_scales: tuple[float, ...] | None = None


def make_loop(
    step_gradients: Callable[[Any, int], StepGradients],
    variables: Sequence[Any],
    optimizer: Any,
    settings: LoopSettings,
) -> Callable[..., Any]:
    """The function `run(key, first_step, num_steps, noise_multiplier, records) -> mean loss per expected batch`.

    Step t (counted from the model's first) takes its keys from `(key, t)` alone, so that the number of steps in one
    call changes nothing. The returned loss is exact, hence not private: callers drop it unless told otherwise.

    Args:
      step_gradients: `(draw_key, num_records) -> StepGradients`, traced once inside the loop.
      variables: what is updated.
      optimizer: a `DPOptimizer`, already built.
      settings: see `LoopSettings`.
    """
    clip, clipping = optimizer.l2_norm_clip, optimizer.clipping
    static = settings.jit_compile or settings.run_eagerly

    def one_step(step: Any, key: Any, noise_multiplier: Any, records: Any) -> Any:
        sampling_key, draw_key, visits_key, noise_key = _random.split(_random.fold_in(key, step), 4)
        gradients = step_gradients(draw_key, settings.num_records)

        def clip_visited(batch: Any, mask: Any, visit_key: Any) -> tuple[ClippedSum, Any]:
            if gradients.clip_batch is not None:
                return gradients.clip_batch(batch, mask, visit_key)
            assert gradients.record_gradient is not None
            return clipped_sum(gradients.record_gradient, batch, mask, l2_norm_clip=clip, clipping=clipping)

        def visit(carry: Any, indices: Any, mask: Any) -> Any:
            sums, loss, number = carry
            if gradients.clip_batch is not None and not static:
                # Without XLA shapes may vary: no work for padding, but for one row, so that no batch is empty.
                indices = tf.concat([tf.boolean_mask(indices, mask), indices[:1]], axis=0)
                mask = tf.range(tf.size(indices)) < tf.size(indices) - 1
            batch = tf.nest.map_structure(lambda part: tf.gather(part, indices), dict(records))
            mask &= batch.pop("mask", True)  # Rows of a given batch that are padding.
            clipped, batch_loss = clip_visited(batch, mask, _random.fold_in(visits_key, number))
            stated = (clipped.sensitivity, clipped.noise_scales)
            if stated != (settings.sensitivity, settings.noise_scales):
                raise AssertionError(
                    f"The clipper states {stated}, the plan was priced for {settings.sensitivity}, {settings.noise_scales}."
                )
            sums = [total + part for total, part in zip(sums, clipped.tensors, strict=True)]
            return sums, loss + batch_loss, number + 1

        zeros = [tf.zeros(part.shape, part.dtype) for part in gradients.released]
        start = (zeros, tf.zeros([], variables[0].dtype), tf.constant(0, tf.int64))
        sums, loss, _ = settings.sampler.walk(sampling_key, visit, start)
        private = optimizer.privatize(
            ClippedSum(sums, clip, settings.sensitivity, settings.noise_scales),
            key=noise_key,
            expected_batch_size=settings.expected_batch_size,
            pull_back=gradients.pull_back,
            data_independent=gradients.data_independent,
            noise_multiplier=noise_multiplier,
        )
        optimizer.apply_gradients(zip(private.tensors, variables, strict=True))
        return loss / tf.cast(settings.expected_batch_size, loss.dtype)

    def run(key: Any, first_step: Any, num_steps: Any, noise_multiplier: Any, records: Any) -> Any:
        def body(done: Any, total: Any) -> tuple[Any, Any]:
            return done + 1, total + one_step(first_step + done, key, noise_multiplier, records)

        start = (tf.constant(0, tf.int64), tf.zeros([], variables[0].dtype))
        _, total = tf.while_loop(lambda done, _: done < num_steps, body, start, parallel_iterations=1)
        return total / tf.cast(tf.maximum(num_steps, 1), total.dtype)

    if settings.run_eagerly:
        return run
    return tf.function(run, jit_compile=settings.jit_compile, autograph=False)
