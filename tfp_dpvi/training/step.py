"""The private step, `private_step`, which is the algorithm; and the compiled loop of many steps.

A step estimates the gradient of a loss over N records (N is public) from a sample of expected size
qN. C is the clip and z the noise multiplier. Step t does what its numbered lines say (Abadi et al.
2016, algorithm 1; Jälkö et al. 2017, algorithm 1; the contracts are those of `docs/contracts.md`):

1. Derive the keys of step t from the fit's key: no draw occurs twice (contract 10).
2. Draw what all records share, as the parameters' Monte Carlo draws (contract 5).
3. Sample records, clip the gradient of each to C, and sum. The sampler states its event (contract
   4), the clip its sensitivity (contract 3), and bad records contribute zero (contract 8).
4. Add z C times a standard normal vector to the sum, divide it by the public qN, and add the exact
   gradient of the terms that no record enters (contracts 1 and 2).
5. Update the variables with the optimizer.
6. Update the accumulators over released values, and count the step.

Lines 5 and 6 are post-processing of what line 4 releases: no exact value leaves the step (contract
7), except a loss that was requested as `unsafe_loss`. The whole step is one graph without detours
(contract 9), and its caller has charged the ledger before (contract 6).
"""

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
    """The state between steps, besides the variables of model and optimizer.

    A key and a step number determine a step's draws, so no number may repeat under one key: pass
    each state on to the next step, and to one step only.

    Attributes:
      step: The number of the next step, an int64 scalar.
      accumulated: The accumulator of each joint release, over its released values.
      first: The number of the fit's first step, an int64 scalar.
      num_steps: The number of steps that the fit plans, an int64 scalar; 0 if unknown.
      unsafe_loss: The sum over steps of exact mean losses, a float64 scalar, *not private*; 0
        unless the mechanism has `unsafe_loss`.

    ```python
    >>> import tfp_dpvi as dpvi
    >>> from tfp_dpvi import training
    >>> gradient = dpvi.gradients.ClippedGradient(lambda key: None, dpvi.gradients.Clip(1.0))
    >>> sampler = dpvi.sampling.PoissonSampler(1000, 0.1, 128)
    >>> mechanism = training.Mechanism(
    ...     sampler, gradient, 100.0, 1000, noise_multiplier=2.0, unsafe_loss=True
    ... )
    >>> state = training.initial_state(mechanism, step=5)
    >>> int(state.step), state.accumulated
    (5, ())
    >>> float(state.unsafe_loss)  # Grows by each step's exact loss: for debugging on public data.
    0.0

    ```
    """

    step: tf.Tensor
    accumulated: tuple[tf.Tensor, ...]
    first: tf.Tensor
    num_steps: tf.Tensor
    unsafe_loss: tf.Tensor


class _Keys(NamedTuple):
    """The keys of one step, each for one use."""

    sample: tf.Tensor
    draws: tf.Tensor
    batches: tf.Tensor
    noise: tf.Tensor


def initial_state(mechanism: Mechanism, step: int = 0, num_steps: int = 0) -> StepState:
    """Returns the state before a fit's first step.

    Args:
      mechanism: The mechanism of the fit, whose joint releases have accumulators.
      step: The number of the fit's first step.
      num_steps: The number of steps that the fit plans, for accumulators over a window of them;
        0 if unknown.
    """
    accumulated = tuple(release.initial() for release in mechanism.joint)
    first = tf.constant(step, tf.int64)
    planned = tf.constant(num_steps, tf.int64)
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
    """Makes a private update: algorithm 1 of Abadi et al. 2016 and of Jälkö et al. 2017.

    It is a function of its arguments: all draws come from `key` and `state.step`. Its only side
    effect is the optimizer's update. The numbers are those of the lines at the top of this file.

    Args:
      mechanism: The sampler, the clipped gradient and the joint releases.
      optimizer: The optimizer that adds the noise and updates.
      variables: The trainable variables.
      state: The state after the previous step.
      records: Structures of tensors under "x", "y" and "sample_weight", their rows in the first
        dimension; "mask" for a padded batch.
      key: The fit's key, an int64 tensor of shape [2]; or a tape with a row for each step, see
        `Mechanism.num_words`.
      noise: The noise multiplier z, a float64 scalar: the noise's standard deviation over the clip.
      replicas: The replicas that share the records of a batch.

    Returns:
      The state after this step.

    Raises:
      ValueError: The records have another number of rows than the sampler samples from.

    #### Formal guarantee

    The update is post-processing of one Gaussian release, that of `mechanism.plan(1)`. The caller
    must have reserved it.
    """
    _check_rows(mechanism, records)
    # 1. Keys.
    keys = _Keys(*_random.keys_of_step(key, state.step, mechanism.sampler.num_words))
    # 2. Draws that all records share.
    gradient = mechanism.gradient.draw(keys.draws)
    # 3. Sample, clip, sum: exact, hence not private.
    sums = _clipped_sums(mechanism, gradient, records, keys, replicas)
    # 4. Noise, public denominator, exact terms.
    released = mechanism.release(optimizer, sums, gradient, keys.noise, noise)
    # 5. Update.
    replicas.apply(optimizer, zip(released.tensors, variables, strict=True))
    # 6. Accumulate and count.
    return _next_state(mechanism, gradient, state, sums, released)


def _check_rows(mechanism: Mechanism, records: dict[str, tf.Tensor]) -> None:
    """Raises `ValueError` unless the sampler has the number of records.

    XLA would not complain: it clamps indices to the last row.
    """
    num_available = mechanism.sampler.num_available
    for part in tf.nest.flatten(records):
        if part.shape[0] not in (None, num_available):
            raise ValueError(
                f"records have {part.shape[0]} rows, but the sampler {num_available}: "
                "make data and step for these."
            )


def _clipped_sums(
    mechanism: Mechanism,
    gradient: StepGradient,
    records: dict[str, tf.Tensor],
    keys: _Keys,
    replicas: Replicas,
) -> Sums:
    """Returns the sums of a sample's clipped gradients and joint releases, over all replicas.

    A sample is processed in physical batches of a fixed size, as many as it needs: none of its
    records is dropped. Each replica takes its share of every batch.
    """
    clipped_sum = replicas.clipped_sum(gradient)

    def add_batch(sums: Sums, indices: tf.Tensor, mask: tf.Tensor) -> Sums:
        indices, mask = replicas.share(indices, mask, mechanism.sampler.place[1])
        batch, mask = replicas.rows(records, indices, mask, mechanism.gradient.batchwise)
        # For draws that belong to single records: each batch and each replica has its own.
        number = sums.batches * replicas.num + replicas.number()
        clipped, per_example = clipped_sum(batch, mask, _random.fold_in(keys.batches, number))
        return mechanism.add(sums, clipped, per_example)

    sampler = mechanism.sampler.on(records)
    own = sampler.for_each_batch(keys.sample, add_batch, mechanism.zeros(gradient))
    return replicas.total(own)


def _next_state(
    mechanism: Mechanism,
    gradient: StepGradient,
    state: StepState,
    sums: Sums,
    released: PrivatizedGradients,
) -> StepState:
    """Returns the state after a step, from its released values; and its exact loss if requested."""
    exact_loss = gradient.data_independent_loss
    if exact_loss is None:
        exact_loss = tf.zeros([], released.tensors[0].dtype)

    def released_with(mean: tf.Tensor) -> Released:
        return Released(
            mean=mean,
            gradient=released.mean,
            step=state.step - state.first,
            num_steps=state.num_steps,
            data_independent_loss=tf.cast(exact_loss, mean.dtype),
            public=gradient.public,
        )

    joint = zip(mechanism.joint, state.accumulated, released.joint, strict=True)
    accumulated = tuple(
        release.accumulate(total, released_with(mean)) for release, total, mean in joint
    )
    unsafe_loss = state.unsafe_loss
    if mechanism.unsafe_loss:
        mean_loss = sums.loss / mechanism.expected_batch_size
        unsafe_loss += mean_loss + tf.cast(exact_loss, tf.float64)
    return state._replace(step=state.step + 1, accumulated=accumulated, unsafe_loss=unsafe_loss)


Steps = Callable[..., StepState]
"""`steps(state, num_steps, records, key, noise) -> state`, see `make_steps`."""


def make_steps(
    mechanism: Mechanism,
    optimizer: Optimizer,
    variables: Sequence[tf.Variable],
    *,
    jit_compile: bool = False,
    run_eagerly: bool = False,
    strategy: tf.distribute.Strategy | None = None,
) -> Steps:
    """Returns a function that runs many private steps in one call.

    Args:
      mechanism: The sampler, the clipped gradient and the joint releases.
      optimizer: The private optimizer, whose variables are created if missing.
      variables: The trainable variables.
      jit_compile: Whether to compile with XLA.
      run_eagerly: Whether not to compile at all, for debugging.
      strategy: A strategy of `tf.distribute`, or None for a single device.

    Returns:
      `steps(state, num_steps, records, key, noise) -> state`, with an integer `num_steps` and the
      other arguments as for `private_step`.
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
        def step(state: StepState) -> StepState:
            return private_step(
                mechanism, optimizer, variables, state, records, key, noise, replicas
            )

        def body(state: StepState) -> tuple[StepState]:
            return (replicas.run(step, state),)

        end = state.step + tf.cast(num_steps, tf.int64)
        ended = tf.while_loop(lambda state: state.step < end, body, (state,), parallel_iterations=1)
        last: StepState = ended[0]
        return last

    if run_eagerly:
        return steps
    compiled: Steps = function_of_model(steps, jit_compile=jit_compile and strategy is None)
    return compiled
