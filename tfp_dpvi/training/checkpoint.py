"""Resuming an interrupted fit: weights, optimizer state and epoch come back, the plan's noise is kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tfp_dpvi._tf import Optimizer, keras, learning_rate_variable, tf
from tfp_dpvi.callbacks import Backup, PrivateBackupAndRestore
from tfp_dpvi.privacy import PrivacyPlan
from tfp_dpvi.training.fit import State
from tfp_dpvi.training.mechanism import Mechanism


def find(callbacks: Sequence[keras.callbacks.Callback]) -> PrivateBackupAndRestore | None:
    """Returns the backup among the callbacks of `fit`.

    Raises:
      ValueError: there are two.
    """
    found = [one for one in callbacks if isinstance(one, PrivateBackupAndRestore)]
    if len(found) > 1:
        raise ValueError("callbacks has two PrivateBackupAndRestore: give one.")
    return found[0] if found else None


class Checkpoint:
    """What a backup holds of one fit, and what it must agree with.

    Raises:
      ValueError: the ledger is in memory.
    """

    def __init__(self, optimizer: Optimizer, variables: Sequence[tf.Variable], state: State) -> None:
        if state.ledger.path is None:
            raise ValueError(
                "PrivateBackupAndRestore needs a ledger on disk: a killed process would take one in memory with it.\n"
                'Say compile(..., ledger=dpvi.PrivacyLedger("data.ledger")).'
            )
        self._optimizer, self._variables, self._ledger = optimizer, variables, state.ledger
        self._progress, target = state.progress, state.target
        assert target is not None
        self._public = {
            "epsilon, delta, noise_multiplier, planned_epochs": [
                target.epsilon, target.delta, target.noise, target.planned_epochs,
            ],
            "optimizer": type(optimizer).__name__,
            "seeded": state.seed is not None,
        }  # fmt: skip

    def snapshot(self, plan: PrivacyPlan, epoch: int) -> Backup:
        """Returns all that a fit needs to go on after `epoch` epochs. No key, no seed and no record is in it."""
        rate = learning_rate_variable(self._optimizer)
        meta = {
            "epoch": epoch,
            "plan": plan.to_json(),
            "ledger": self._ledger.mark(),
            "public": self._public,
            "learning_rate": float(rate.numpy()) if isinstance(rate, tf.Variable) else None,
            "progress": dataclasses.asdict(self._progress),
        }
        return Backup(meta, [variable.numpy() for variable in self._variables])

    def check_epochs(self, backup: Backup, epochs: int) -> int:
        """Returns the epoch to go on from.

        Raises:
          ValueError: the fit is shorter than what was run.
        """
        epoch = int(backup.meta["epoch"])
        if epoch > epochs:
            raise ValueError(
                f"epochs={epochs}, but the backup in {backup.directory!r} has run {epoch}: give at least as many, or another "
                "backup_dir.\nNothing was spent."
            )
        return epoch

    def restore(self, backup: Backup, draft: Mechanism) -> Mechanism:
        """Puts back the variables and the progress; returns the mechanism with the noise of the interrupted fit.

        Raises:
          ValueError: this is not the fit that was interrupted, or not the ledger that it was charged to.
        """
        where, meta = f"The backup in {backup.directory!r}", backup.meta
        mark = meta["ledger"]
        if mark["dataset_id"] != self._ledger.dataset_id or not self._ledger.continues_from(mark):
            raise ValueError(
                f"{where} was charged to another ledger (of the data set {mark['dataset_id']!r}) than {self._ledger.path!r}, or to "
                "a newer copy.\nCompile with the ledger that the fit was charged to. Nothing was spent."
            )
        saved = PrivacyPlan.from_json(meta["plan"])
        mechanism = draft.with_noise(meta["plan"]["noise_multiplier"])
        wanted = mechanism.plan(saved.num_releases)
        fields = [field.name for field in dataclasses.fields(saved)]
        then = {**{name: getattr(saved, name) for name in fields}, **meta["public"]}
        now = {**{name: getattr(wanted, name) for name in fields}, **self._public}
        differing = [
            f"{name} ({then.get(name)!r} then, {now[name]!r} now)" for name in now if then.get(name) != now[name]
        ]
        shapes = [list(value.shape) for value in backup.arrays]
        own = [variable.shape.as_list() for variable in self._variables]
        if shapes != own:
            differing.append(f"the shapes of variables ({shapes} then, {own} now)")
        if differing:
            raise ValueError(
                f"{where} is of another fit: {'; '.join(differing)}.\nUse the same arguments to go on with it, or another "
                "backup_dir to start anew. Nothing was spent."
            )
        for variable, value in zip(self._variables, backup.arrays, strict=True):
            variable.assign(value)
        rate = learning_rate_variable(self._optimizer)
        if meta["learning_rate"] is not None and isinstance(rate, tf.Variable):
            rate.assign(meta["learning_rate"])
        self._progress.steps, self._progress.epochs = meta["progress"]["steps"], meta["progress"]["epochs"]
        return mechanism
