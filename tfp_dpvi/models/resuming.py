"""Going on with a fit that was interrupted: what a backup holds of a model, and what it must agree with."""

from __future__ import annotations

import dataclasses
from typing import Any

from tfp_dpvi._tf import keras, tf
from tfp_dpvi.callbacks import Backup, PrivateBackupAndRestore
from tfp_dpvi.models import workers
from tfp_dpvi.models.state import variables_of
from tfp_dpvi.privacy import PrivacyPlan

_STATE = ("steps_run", "epochs_run")


def find(callbacks: Any) -> PrivateBackupAndRestore | None:
    """The backup among the callbacks of `fit`.

    Raises:
      ValueError: there are two.
    """
    given = getattr(callbacks, "callbacks", callbacks)
    found = [one for one in tf.nest.flatten(given) if isinstance(one, PrivateBackupAndRestore)]
    if len(found) > 1:
        raise ValueError("callbacks has two PrivateBackupAndRestore: give one.")
    return found[0] if found else None


def put_last(callbacks: Any, backup: PrivateBackupAndRestore) -> Any:
    """The callbacks with the backup after all others, so that what they change at an epoch's end is in it."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks.callbacks = [*(one for one in callbacks.callbacks if one is not backup), backup]
        return callbacks
    return [*(one for one in tf.nest.flatten(callbacks) if one is not backup), backup]


def check(model: Any, from_dataset: bool) -> None:
    """Raises `ValueError` where a fit cannot be resumed soundly."""
    state = model._dp
    if state.ledger.path is None:
        raise ValueError(
            "PrivateBackupAndRestore needs a ledger on disk, and this model's is in memory: a process that is killed would take "
            'what it spent with it. Say compile(..., ledger=dpvi.PrivacyLedger("data.ledger")); nothing was spent.'
        )
    if from_dataset:
        raise ValueError(
            "PrivateBackupAndRestore and a dataset as x: a resumed fit would read the same batches again, which are no new "
            "sample. Pass arrays, memory maps or sources; nothing was spent."
        )
    if workers.several(model.distribute_strategy):
        raise ValueError("PrivateBackupAndRestore serves one process; several workers train here. Nothing was spent.")


def snapshot(model: Any, plan: PrivacyPlan, epoch: int) -> Backup:
    """All that a fit needs to go on after `epoch` epochs. No key, no seed and no record is in it."""
    state = model._dp
    rate = model.optimizer._learning_rate
    meta = {
        "epoch": epoch,
        "seeded": state.seed is not None,
        "plan": plan.to_json(),
        "target": _target(state),
        "ledger": state.ledger.mark(),
        "optimizer": type(model.optimizer).__name__,
        "learning_rate": float(rate.numpy()) if isinstance(rate, tf.Variable) else None,
        **{name: getattr(state, name) for name in _STATE},
    }
    return Backup(meta, [variable.numpy() for variable in variables_of(model)])


def first_epoch(backup: Backup, epochs: int) -> int:
    """Where to go on.

    Raises:
      ValueError: the fit is shorter than what was run.
    """
    epoch = int(backup.meta["epoch"])
    if epoch > epochs:
        raise ValueError(
            f"epochs={epochs}, but the backup in {backup.directory!r} is of a fit that has run {epoch}: give at least as many "
            "to go on with it, or another backup_dir to start anew. Nothing was spent."
        )
    return epoch


def plan_of(model: Any, backup: Backup, fresh: PrivacyPlan) -> PrivacyPlan:
    """The interrupted fit's plan, for the steps that `fresh` asks for.

    Args:
      model: the model.
      backup: what was read.
      fresh: the plan of this `fit`, but for its noise.

    Raises:
      ValueError: this is not the fit that was interrupted, or not the ledger that it was charged to.
    """
    state, meta = model._dp, backup.meta
    ledger = meta["ledger"]
    if ledger["dataset_id"] != state.ledger.dataset_id:
        raise ValueError(
            f"The backup in {backup.directory!r} was charged to a ledger of the data set {ledger['dataset_id']!r}, and this model's "
            f"is of {state.ledger.dataset_id!r}. Compile with that ledger, or give another backup_dir; nothing was spent."
        )
    if not state.ledger.continues_from(ledger):
        raise ValueError(
            f"The ledger {state.ledger.path!r} does not hold what the fit in {backup.directory!r} had spent: it is another one, or "
            "an old copy. Compile with the ledger that this fit was charged to; nothing was spent."
        )
    saved = PrivacyPlan.from_json(meta["plan"])
    wanted = fresh.replace(noise_multiplier=saved.noise_multiplier, num_releases=saved.num_releases)
    differing = [
        f"{field.name} ({getattr(saved, field.name)!r} then, {getattr(wanted, field.name)!r} now)"
        for field in dataclasses.fields(saved)
        if getattr(saved, field.name) != getattr(wanted, field.name)
    ]
    if meta["target"] != _target(state):
        differing.append(
            f"epsilon, delta, noise_multiplier, planned_epochs ({meta['target']} then, {_target(state)} now)"
        )
    if meta["optimizer"] != type(model.optimizer).__name__:
        differing.append(f"optimizer ({meta['optimizer']} then, {type(model.optimizer).__name__} now)")
    if meta["seeded"] != (state.seed is not None):
        differing.append(f"seed ({'given' if meta['seeded'] else 'none'} then, not so now)")
    if differing:
        raise ValueError(
            f"The backup in {backup.directory!r} is of another fit: {'; '.join(differing)}. Use the same arguments to go on with "
            "it, or give another backup_dir to start anew; nothing was spent."
        )
    return wanted.replace(num_releases=fresh.num_releases)


def restore(model: Any, backup: Backup) -> None:
    """Puts weights, optimizer state and the model's place in its sequence of steps back.

    Raises:
      ValueError: the backup's variables are not those of this model.
    """
    variables = variables_of(model)
    shapes = [list(value.shape) for value in backup.arrays]
    if shapes != [variable.shape.as_list() for variable in variables]:
        raise ValueError(
            f"The backup in {backup.directory!r} is of another model: its variables have shapes {shapes}, this model's "
            f"{[variable.shape.as_list() for variable in variables]}. Build the same model, or give another backup_dir."
        )
    for variable, value in zip(variables, backup.arrays, strict=True):
        variable.assign(value)
    meta, state = backup.meta, model._dp
    if meta["learning_rate"] is not None and isinstance(model.optimizer._learning_rate, tf.Variable):
        model.optimizer._learning_rate.assign(meta["learning_rate"])
    for name in _STATE:
        setattr(state, name, meta[name])


def empty_history(model: Any, epoch: int) -> Any:
    """What `fit` returns where nothing is left to do."""
    history = keras.callbacks.History()
    history.set_model(model)
    history.on_train_begin()
    history.params = {"epochs": epoch, "verbose": 0}
    model.history = history
    return history


def _target(state: Any) -> list[Any]:
    settings = state.settings
    return [settings.epsilon, settings.delta, settings.noise_multiplier, settings.planned_epochs]
