"""How a fit begins: the plan that it may follow, anew, resumed or agreed with other workers, and the run that follows it."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from tfp_dpvi.callbacks import PrivateBackupAndRestore
from tfp_dpvi.models import planning, resuming, workers
from tfp_dpvi.models.arguments import Given
from tfp_dpvi.models.run import PrivateRun
from tfp_dpvi.privacy import PrivacyPlan

_LOG = logging.getLogger("tfp_dpvi")


@dataclasses.dataclass(frozen=True)
class Begun:
    """The plan, the run (None where the interrupted fit has nothing left to do) and the epoch that it goes on from."""

    plan: PrivacyPlan
    run: PrivateRun | None
    initial_epoch: int


def begin(
    model: Any, given: Given, *, epochs: int, initial_epoch: int, backup: PrivateBackupAndRestore | None
) -> Begun:
    """Plans a fit and makes its run ready, short of its first step.

    Args:
      model: a compiled `DPModel`.
      given: its records.
      epochs: as in `fit`.
      initial_epoch: as in `fit`; where a backup holds more epochs, it goes on after those.
      backup: of a fit that may have been interrupted, or None.

    Raises:
      BudgetExhaustedError, ValueError, RuntimeError: the fit cannot begin; nothing was spent.
    """
    state = model._dp
    sensitivity, noise_scales = model._noise(given.feed.sampler.scheme, given.batch_size)
    planned = (epochs - initial_epoch) * given.steps_per_epoch
    held = None if backup is None else backup.read()
    if held is not None:
        initial_epoch = resuming.first_epoch(held, epochs)
    steps = max(0, epochs - initial_epoch) * given.steps_per_epoch
    how = (state, given.feed.sampler, model.optimizer.l2_norm_clip, given.num_records, sensitivity)
    known = state.ledger.num_releases
    if backup is None or held is None:
        plan, allowed = workers.agreed_plan(
            model,
            lambda: planning.make_plan(*how, steps, given.steps_per_epoch),
            lambda plan: planning.allowed_by_ledger(state, plan),
            (given.steps_per_epoch, initial_epoch, noise_scales),
        )
    else:
        plan = resuming.plan_of(model, held, planning.plan_with(*how, 0.0, steps))
        resuming.restore(model, held)
        allowed = planning.most_releases(state, plan)
        _LOG.info("Resuming after epoch %d from %s.", initial_epoch, held.directory)
        if allowed == 0:
            if steps:
                _LOG.warning(
                    "The interrupted fit has spent its budget; the model is that of epoch %d. The backup stays in %s.",
                    initial_epoch,
                    held.directory,
                )
            elif backup.delete_checkpoint:
                backup.forget()
            return Begun(plan, None, initial_epoch)

    state.fits += 1
    with workers.ready_together(model.distribute_strategy):
        run = PrivateRun(
            model,
            state,
            given.feed,
            plan,
            allowed=allowed,
            steps_per_epoch=given.steps_per_epoch,
            expected_batch_size=given.batch_size,
            noise_scales=noise_scales,
            gradient_sensitivity=sensitivity,
            planned_steps=planned,
            known_releases=known,
        )
        run.try_without_a_step(given.traced, given.tensors)
        # The curve is made only now: everything that can be refused has been, and nothing is spent yet.
        run.curve = planning.make_curve(state, plan.replace(num_releases=allowed), given.steps_per_epoch)
    return Begun(plan, run, initial_epoch)
