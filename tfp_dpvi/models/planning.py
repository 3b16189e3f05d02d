"""From the arguments of `fit` to a sampler, a plan within the budget, and the epsilons to show."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tfp_dpvi import metrics as metrics_lib
from tfp_dpvi.models.state import State
from tfp_dpvi.privacy import BudgetExhaustedError, EpsilonCurve, PrivacyPlan, Sensitivity, UnsupportedPairError
from tfp_dpvi.sampling import FixedSizeSampler, FullBatchSampler, PoissonSampler, Sampler

_CALIBRATION_SLACK = 0.99  # A calibrated plan spends at least this share of its target.
_MAX_GRADIENT_BYTES = 2**27  # Per-record gradients held at a time, unless physical_batch_size says otherwise.
_MAX_RECORDS = 1024  # Added up in float32 by one matrix product: more records round to more of a clip.
_MAX_BATCH_BYTES = 2**30  # What lies between layers in a physical batch, unless physical_batch_size says otherwise.


@dataclasses.dataclass(frozen=True)
class BatchNeeds:
    """What a model that works on a batch at once asks of the sampler.

    Attributes:
      bytes_each: memory that a record takes.
      whole: the whole logical batch is needed at once.
      static: batches have a fixed shape, so padding costs time.
    """

    bytes_each: int
    whole: bool
    static: bool


def make_sampler(
    sampling: str,
    num_available: int,
    public_num: int,
    batch_size: int,
    physical: int | None,
    variables: Sequence[Any],
    needs: BatchNeeds | None = None,
) -> Sampler:
    """The sampler that was asked for, or full batches if a batch is to hold all records.

    Args:
      sampling: "poisson" or "fixed_size".
      num_available: records at hand.
      public_num: the declared N; the inclusion probability is batch_size / N.
      batch_size: expected size of a logical batch.
      physical: records in memory at a time; None for as many as one visit nearly always covers, within a memory bound.
      variables: of which a record's gradient may have the size.
      needs: of models that work on a batch at once; None for those that go record by record.

    Raises:
      ValueError: an unknown sampling scheme, or one that needs the exact number of records.
    """
    if sampling not in ("poisson", "fixed_size"):
        raise ValueError(
            f'sampling={sampling!r} is unknown: choose "poisson" (default) or "fixed_size". Shuffling is neither and cannot '
            "be accounted for as such."
        )
    if needs is not None:
        return _sampler_of_batches(sampling, num_available, public_num, batch_size, physical, needs)
    if physical is None:
        bytes_each = sum(int(np.prod(v.shape)) * v.dtype.size for v in variables)
        most = max(1, _MAX_GRADIENT_BYTES // max(1, bytes_each))
    else:
        most = physical
    if batch_size >= public_num:
        return FullBatchSampler(num_available, min(most, num_available))
    if sampling == "fixed_size":
        return _fixed_size(num_available, public_num, batch_size, most)
    default = PoissonSampler(num_available, batch_size / public_num)
    if physical is None and default.physical_batch_size <= most:
        return default
    return PoissonSampler(num_available, batch_size / public_num, most)


def _fixed_size(num_available: int, public_num: int, batch_size: int, most: int) -> FixedSizeSampler:
    if public_num != num_available:
        raise ValueError(
            f'num_records={public_num} and sampling="fixed_size": batches of a fixed size are accounted for by the exact '
            'number of records. Leave num_records out, or use sampling="poisson".'
        )
    return FixedSizeSampler(num_available, batch_size, most)


def _sampler_of_batches(
    sampling: str, num_available: int, public_num: int, batch_size: int, physical: int | None, needs: BatchNeeds
) -> Sampler:
    """For models that work on a batch at once, whose memory goes by what lies between layers."""
    most = physical or max(1, min(_MAX_RECORDS, _MAX_BATCH_BYTES // max(1, needs.bytes_each)))
    full = batch_size >= public_num
    # Where groups of records are formed in a batch, all of it is visited at once: ten standard deviations are never passed.
    mean = num_available * batch_size / public_num
    room = num_available if full else min(num_available, math.ceil(mean + 10.0 * math.sqrt(mean)) + 10)
    if needs.whole and physical is not None and physical < room:
        raise ValueError(
            f"physical_batch_size={physical} would cut batches of up to {room} records in pieces, and a batch_regularizer "
            "looks at groups from the whole batch. Leave physical_batch_size out."
        )
    size = room if needs.whole else min(most, room)
    if full:
        return FullBatchSampler(num_available, size)
    if sampling == "fixed_size":
        return _fixed_size(num_available, public_num, batch_size, min(size, batch_size))
    if needs.static and physical is None and not needs.whole:
        default = PoissonSampler(num_available, batch_size / public_num)
        if default.physical_batch_size <= most:
            return default
    return PoissonSampler(num_available, batch_size / public_num, size)


def plan_with(
    state: State,
    sampler: Sampler,
    l2_norm_clip: float,
    public_num: int,
    sensitivity: Sensitivity,
    noise_multiplier: float,
    steps: int,
) -> PrivacyPlan:
    """The plan of a fit at a given noise.

    Args:
      state: with the settings of `compile`.
      sampler: emits the event (contract C4).
      l2_norm_clip: C.
      public_num: the declared N.
      sensitivity: of the gradient's sum; privatised metrics are added here.
      noise_multiplier: z.
      steps: releases.
    """
    target = state.settings
    assert target is not None
    names = tuple(metric.name for metric in state.private_metrics)
    return PrivacyPlan(
        sampling=sampler.scheme,
        noise_multiplier=noise_multiplier,
        num_releases=steps,
        neighboring_relation=target.neighboring_relation,
        sensitivity=metrics_lib.joint_sensitivity(state.private_metrics, sensitivity),
        accountant=target.accountant,
        l2_norm_clip=None if math.isinf(l2_norm_clip) else l2_norm_clip,
        num_records=public_num,
        metrics=names,
        gradient_sensitivity=sensitivity if names else None,
    )


def make_plan(
    state: State,
    sampler: Sampler,
    l2_norm_clip: float,
    public_num: int,
    sensitivity: Sensitivity,
    steps: int,
    steps_per_epoch: int,
) -> PrivacyPlan:
    """The plan for this fit: exactly `steps` releases, at a noise that keeps the lifetime budget.

    Raises:
      BudgetExhaustedError: nothing is left.
      ValueError: the fit is longer than what `planned_epochs` leaves.
    """
    target = state.settings
    assert target is not None
    draft = plan_with(state, sampler, l2_norm_clip, public_num, sensitivity, target.noise_multiplier or 0.0, steps)
    held = state.ledger.neighboring_relation
    if held is not None and held is not target.neighboring_relation:
        raise UnsupportedPairError(
            f"neighboring_relation={target.neighboring_relation.name}, but these data have releases under {held.name} in the "
            "ledger, and guarantees under different adjacencies do not compose: compile with the ledger's."
        )
    if target.epsilon is None or target.delta is None:
        return draft
    planned = steps
    if target.planned_epochs is not None:
        left = math.ceil(round((target.planned_epochs - state.epochs_run) * steps_per_epoch, 6))
        if steps > left > 0 or (state.epochs_run == 0 and steps > left):
            raise ValueError(
                f"planned_epochs={target.planned_epochs} leaves {left / steps_per_epoch:g} epochs, and this fit asks for "
                f"{steps / steps_per_epoch:g}: lower epochs, or compile again with more planned_epochs."
            )
        planned = max(steps, left)
    spent = state.ledger.epsilon(target.delta, accountant=target.accountant)
    if spent >= _CALIBRATION_SLACK * target.epsilon:
        raise BudgetExhaustedError(
            f"epsilon={target.epsilon:g} at delta={target.delta:g} is the lifetime total for these data, and "
            f"{spent:.4g} of it is spent: nothing is left for another fit. To keep some for later fits, say "
            "compile(planned_epochs=...) before the first; to spend more, compile with a larger epsilon."
        )
    plan = PrivacyPlan.calibrate(
        epsilon=target.epsilon,
        delta=target.delta,
        num_releases=planned,
        prior_events=state.ledger.events(),
        sampling=draft.sampling,
        neighboring_relation=draft.neighboring_relation,
        sensitivity=draft.sensitivity,
        accountant=draft.accountant,
    )
    return draft.replace(noise_multiplier=plan.noise_multiplier)


def most_releases(state: State, plan: PrivacyPlan) -> int:
    """How many of the plan's releases the ledger-wide budget and the model's own allow, after all that is spent."""
    assert state.settings is not None
    own = (state.settings.epsilon, state.settings.delta)
    most = plan.num_releases
    for epsilon, delta in (own, state.ledger.budget or (None, None)):
        if epsilon is not None and delta is not None and most:
            most = plan.with_most_releases(
                epsilon=epsilon, delta=delta, prior_events=state.ledger.events(), limit=most
            ).num_releases
    return most


def allowed_by_ledger(state: State, plan: PrivacyPlan) -> int:
    """How many of the plan's releases the ledger-wide budget allows, before the first.

    Raises:
      BudgetExhaustedError: none.
    """
    if state.ledger.budget is None:
        return plan.num_releases
    allowed = most_releases(state, plan)
    if allowed == 0:
        epsilon, delta = state.ledger.budget
        raise BudgetExhaustedError(
            f"The ledger's budget of epsilon {epsilon:g} at delta {delta:g} allows no further release of this plan; "
            f"{state.ledger.epsilon(delta, plan.accountant):.4g} is spent. Raise it with ledger.set_budget, or use more noise."
        )
    return allowed


def make_curve(state: State, plan: PrivacyPlan, steps_per_epoch: int) -> Callable[[int], float] | None:
    """Epsilon after each step of this fit, never below the exact one; None without a delta."""
    assert state.settings is not None
    delta, steps = state.settings.delta, plan.num_releases
    if delta is None:
        return None
    if plan.noise_multiplier == 0:
        return lambda step: math.inf
    checkpoints = range(steps_per_epoch, steps + 1, steps_per_epoch)
    return EpsilonCurve(plan, state.ledger.events(), delta, checkpoints=checkpoints)
