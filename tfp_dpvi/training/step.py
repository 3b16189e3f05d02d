"""The private step: sample, clip, sum, add noise, update; and the compiled loop of many steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from tfp_dpvi import _random
from tfp_dpvi._tf import Optimizer, function_of_model, tf
from tfp_dpvi.gradients import Released, StepGradient
from tfp_dpvi.optimizers import PrivatizedGradients
from tfp_dpvi.training.distribution import Replicas
from tfp_dpvi.training.mechanism import Mechanism, Sums


class StepState(NamedTuple):
    """The state between steps, besides the variables of model and optimizer. All but accumulators are scalars."""

    step: (
        tf.Tensor
    )  # int64, the next step. A key and a number determine a step's draws, so no number repeats.
    accumulated: tuple[tf.Tensor, ...]  # Of each joint release, over its released values.
    first: tf.Tensor  # int64, the number of the fit's first step.
    num_steps: tf.Tensor  # int64, how many steps the fit plans; 0 if unknown.
    unsafe_loss: (
        tf.Tensor
    )  # float64, the sum over steps of exact mean losses if the mechanism has it, else 0.


def initial_state(mechanism: Mechanism, step: int = 0, num_steps: int = 0) -> StepState:
    """Returns the state before a fit's first step, number `step` of `num_steps` planned (for accumulators over a window)."""
    accumulated = tuple(one.initial() for one in mechanism.joint)
    first, planned = tf.constant(step, tf.int64), tf.constant(num_steps, tf.int64)
    return StepState(first, accumulated, first, planned, tf.zeros([], tf.float64))


def private_step(
    mechanism: Mechanism,
    optimizer: Optimizer,
    variables: Sequence[tf.Variable],
    state: StepState,
    records: dict[str, tf.Tensor],
    key: tf.Tensor,
    noise: tf.Tensor,
    replicas: Replicas,
) -> StepState:
    """Makes one private update of `variables` (Abadi et al. 2016, algorithm 1; Jälkö et al. 2017, algorithm 1).

    A function of its arguments: all draws come from `key` and `state.step`. Its only side effect is the optimizer's update.

    Args:
      mechanism: sampler, clip, joint releases.
      optimizer: the optimizer that adds the noise and updates.
      variables: the trainable variables.
      state: the state after the previous step.
      records: structures of tensors under "x", "y" and "sample_weight"; "mask" for a padded batch.
      key: int64 tensor of shape [2], the fit's key; or a tape with a row for each step, see
        `Mechanism.num_words`.
      noise: the noise multiplier, its standard deviation over the clip.
      replicas: the replicas that share the records of a batch.

    #### Formal guarantee

    The update is post-processing of one Gaussian release, that of `mechanism.plan(1)`. The caller must have reserved it.
    """
    _check_rows(mechanism, records)
    keys = _random.keys_of_step(key, state.step, mechanism.sampler.num_words)
    sampling_key, draw_key, batch_key, noise_key = keys
    gradient = mechanism.gradient.draw(draw_key)  # Monte Carlo draws shared by all records.

    def add_batch(sums: Sums, indices: tf.Tensor, mask: tf.Tensor) -> Sums:
        batch, mask = replicas.rows(
            records, *replicas.share(indices, mask), mechanism.gradient.batchwise
        )
        own_key = _random.fold_in(batch_key, sums.batches * replicas.num + replicas.number())
        return mechanism.add(sums, *replicas.clipped_sum(gradient)(batch, mask, own_key))

    sampler = mechanism.sampler.on(records)
    sums = replicas.total(
        sampler.for_each_batch(sampling_key, add_batch, mechanism.zeros(gradient))
    )
    released = mechanism.release(optimizer, sums, gradient, noise_key, noise)
    replicas.apply(optimizer, zip(released.tensors, variables, strict=True))
    return _after(mechanism, gradient, state, sums, released)


def _check_rows(mechanism: Mechanism, records: dict[str, tf.Tensor]) -> None:
    """Raises `ValueError` unless the sampler has the number of records: XLA would clamp indices to the last one."""
    for part in tf.nest.flatten(records):
        if part.shape[0] not in (None, mechanism.sampler.num_available):
            raise ValueError(
                f"records have {part.shape[0]} rows, but the sampler {mechanism.sampler.num_available}: make data and step for these."
            )


def _after(
    mechanism: Mechanism,
    gradient: StepGradient,
    state: StepState,
    sums: Sums,
    released: PrivatizedGradients,
) -> StepState:
    exact = gradient.data_independent_loss
    exact = tf.zeros([], released.tensors[0].dtype) if exact is None else exact
    number, public = state.step - state.first, gradient.public

    def of(mean: tf.Tensor) -> Released:
        return Released(
            mean, released.mean, number, state.num_steps, tf.cast(exact, mean.dtype), public
        )

    accumulated = tuple(
        one.accumulate(total, of(mean))
        for one, total, mean in zip(mechanism.joint, state.accumulated, released.joint, strict=True)
    )
    loss = state.unsafe_loss
    if mechanism.unsafe_loss:
        loss += sums.loss / mechanism.expected_batch_size + tf.cast(exact, tf.float64)
    return state._replace(step=state.step + 1, accumulated=accumulated, unsafe_loss=loss)


Steps = Callable[..., StepState]
"""`steps(state, num_steps, records, key, noise) -> state`."""


def make_steps(
    mechanism: Mechanism,
    optimizer: Optimizer,
    variables: Sequence[tf.Variable],
    *,
    jit_compile: bool = False,
    run_eagerly: bool = False,
    strategy: tf.distribute.Strategy | None = None,
) -> Steps:
    """Returns `steps(state, num_steps, records, key, noise) -> state`, which runs many steps in one call.

    The optimizer's variables are created if missing. `jit_compile` compiles with XLA, `run_eagerly` not at all, for debugging;
    `strategy` is one of `tf.distribute`, None for a single device.
    """
    optimizer.build(variables)
    replicas = Replicas(strategy, jit_compile=jit_compile, static=jit_compile or run_eagerly)

    def steps(
        state: StepState,
        num_steps: tf.Tensor,
        records: dict[str, tf.Tensor],
        key: tf.Tensor,
        noise: tf.Tensor,
    ) -> StepState:
        def one_step(state: StepState) -> StepState:
            return private_step(
                mechanism, optimizer, variables, state, records, key, noise, replicas
            )

        def body(state: StepState) -> tuple[StepState]:
            return (replicas.run(one_step, state),)

        end = state.step + tf.cast(num_steps, tf.int64)
        last: StepState = tf.while_loop(
            lambda state: state.step < end, body, (state,), parallel_iterations=1
        )[0]
        return last

    if run_eagerly:
        return steps
    compiled: Steps = function_of_model(steps, jit_compile=jit_compile and strategy is None)
    return compiled
