"""Resumes an interrupted fit: restores weights, optimizer state and epoch, with the same noise."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Sequence

from tfp_dpvi._tf import Optimizer, learning_rate_variable, tf
from tfp_dpvi.callbacks import Backup, PrivateBackupAndRestore
from tfp_dpvi.privacy import PrivacyPlan
from tfp_dpvi.training.account import Account
from tfp_dpvi.training.budget import PrivacyTarget
from tfp_dpvi.training.mechanism import Mechanism

_LOG = logging.getLogger("tfp_dpvi")


class Checkpoint:
    """The backup of a fit, and the settings that a resumed fit must have.

    Args:
      backup: The callback that writes and reads the backup.
      optimizer: The private optimizer.
      variables: The variables to restore: those of the model and of the optimizer.
      account: The model's ledger and progress.
      target: The privacy settings of `compile`.
      seeded: Whether the fit has a seed.

    Raises:
      ValueError: The ledger is in memory.
    """

    def __init__(
        self,
        backup: PrivateBackupAndRestore,
        optimizer: Optimizer,
        variables: Sequence[tf.Variable],
        account: Account,
        target: PrivacyTarget,
        *,
        seeded: bool,
    ) -> None:
        if account.ledger.path is None:
            raise ValueError(
                "PrivateBackupAndRestore needs a ledger on disk: one in memory is lost with a "
                "killed process.\n"
                'Use compile(..., ledger=dpvi.PrivacyLedger("data.ledger")).'
            )
        self._backup = backup
        self._ledger = account.ledger
        self._progress = account.progress
        self._optimizer = optimizer
        self._variables = variables
        self._public = {
            "epsilon, delta, noise_multiplier, planned_epochs": [
                target.epsilon,
                target.delta,
                target.noise,
                target.planned_epochs,
            ],
            "optimizer": type(optimizer).__name__,
            "seeded": seeded,
        }
        # The backup of an interrupted fit, or None.
        self.held = backup.read()

    def first_epoch(self, initial_epoch: int, epochs: int) -> int:
        """Returns the epoch at which to continue.

        Args:
          initial_epoch: The argument of `fit`, for a fit that was not interrupted.
          epochs: The argument of `fit`, the number of the last epoch.

        Raises:
          ValueError: More epochs ran than `epochs`.
        """
        epoch = initial_epoch if self.held is None else int(self.held.meta["epoch"])
        if epoch > epochs:
            raise ValueError(
                f"epochs={epochs}, but the backup in {self._backup.backup_dir!r} has run {epoch}: "
                "pass at least as many, or another backup_dir.\nNo privacy was spent."
            )
        return epoch

    def follow(self, plan: PrivacyPlan, first_epoch: int) -> None:
        """Makes the callback write a resumable state after each epoch.

        The state has no keys, no seeds and no records.

        Args:
          plan: The plan of the fit.
          first_epoch: The epoch at which it begins.
        """

        def snapshot(epoch: int) -> Backup:
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

        self._backup.attach(snapshot, first_epoch)

    def end(self, steps_left: int) -> None:
        """Ends a resumed fit without steps to run."""
        if steps_left:
            _LOG.warning(
                "The budget is spent; the model is that of the backup in %s.",
                self._backup.backup_dir,
            )
        elif self._backup.delete_checkpoint:
            self._backup.forget()

    def restore(self, held: Backup, draft: Mechanism) -> Mechanism:
        """Restores variables and progress of an interrupted fit.

        Args:
          held: The backup of the interrupted fit.
          draft: The mechanism of the present fit, whose noise is not yet known.

        Returns:
          The mechanism with the noise of the interrupted fit.

        Raises:
          ValueError: The backup is of another fit, or was charged to another ledger.
        """
        where = f"The backup in {held.directory!r}"
        meta = held.meta
        saved = meta["plan"]
        mark = meta["ledger"]
        if mark["dataset_id"] != self._ledger.dataset_id or not self._ledger.continues_from(mark):
            raise ValueError(
                f"{where} was charged to another ledger (of the data set {mark['dataset_id']!r}) "
                f"than {self._ledger.path!r}, or to a newer copy.\n"
                "Compile with the ledger that the fit was charged to. No privacy was spent."
            )
        mechanism = draft.with_noise(saved["noise_multiplier"])
        shapes = "the shapes of variables"
        # A plan's JSON leaves out a default.
        defaults = {"randomness": ""}
        then = {**defaults, **saved, **meta["public"]}
        then[shapes] = [list(value.shape) for value in held.arrays]
        plan = mechanism.plan(saved["num_releases"])
        now = {**defaults, **plan.to_json(), **self._public}
        now[shapes] = [variable.shape.as_list() for variable in self._variables]
        now = json.loads(json.dumps(now))
        differing = [
            f"{name} ({then.get(name)!r} then, {now[name]!r} now)"
            for name in now
            if then.get(name) != now[name]
        ]
        if differing:
            raise ValueError(
                f"{where} is of another fit: {'; '.join(differing)}.\n"
                "Use the same arguments to resume it, or another backup_dir to start anew. "
                "No privacy was spent."
            )
        for variable, value in zip(self._variables, held.arrays, strict=True):
            variable.assign(value)
        rate = learning_rate_variable(self._optimizer)
        if meta["learning_rate"] is not None and isinstance(rate, tf.Variable):
            rate.assign(meta["learning_rate"])
        self._progress.steps = meta["progress"]["steps"]
        self._progress.epochs = meta["progress"]["epochs"]
        return mechanism
