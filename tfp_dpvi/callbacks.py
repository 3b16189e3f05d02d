"""Keras callbacks that show only released and public values (contract 7)."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import textwrap
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.histogram import metadata as histogram_metadata
from tensorboard.plugins.scalar import summary_v2 as scalar_summary
from tensorboard.plugins.text import summary_v2 as text_summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from tensorboard.util import tensor_util

from tfp_dpvi import _validate as check
from tfp_dpvi._tf import Callback, keras, learning_rate_variable, tf
from tfp_dpvi.privacy import PrivacyPlan

__all__ = ["PrivacyTensorBoard", "PrivateBackupAndRestore", "StepsBar"]

_FORMAT, _VERSION = "tfp_dpvi backup", 2
_FILE = "fit.npz"
_BUCKETS = 30


class PrivacyTensorBoard(Callback):
    """Writes privacy spending, privatised metrics and learned variables to TensorBoard.

    It writes after every epoch:

    * Scalars under "privacy/": epsilon spent and left (if `compile` has a delta), noise multiplier,
      clip, learning rate, releases, and the other logs of `fit`. Losses of public validation data
      keep their names. Exact training losses, if requested, are under "non_private/".
    * Histograms of the trainable variables, by layer and part of the model.

    At the end of a fit it writes the privacy report as text, if `compile` has a delta.

    Args:
      log_dir: The directory of the event files.
      histogram_freq: The number of epochs between histograms; 0 for none.

    #### Formal guarantee

    The callback writes functions of the released variables, of the plan and of the step number:
    post-processing.

    ```python
    >>> callback = PrivacyTensorBoard("logs", histogram_freq=5)  # For fit(callbacks=[callback]).
    >>> callback.histogram_freq
    5

    ```
    """

    def __init__(self, log_dir: str | os.PathLike[str], *, histogram_freq: int = 1) -> None:
        super().__init__()
        self.log_dir = os.fspath(log_dir)
        self.histogram_freq = check.count("histogram_freq", histogram_freq)
        self._writer: EventFileWriter | None = None
        self._epoch = 0

    def on_train_begin(self, logs: dict[str, float] | None = None) -> None:
        """Opens the event file.

        Args:
          logs: Not used.

        Raises:
          ValueError: The directory is not writable; no step has run yet.
        """
        # The file is still open if the last fit was interrupted.
        self._close()
        try:
            self._writer = EventFileWriter(self.log_dir)
        except (OSError, tf.errors.OpError) as error:
            raise ValueError(
                f"log_dir={self.log_dir!r} cannot be written ({error}): pass a writable one."
            ) from error

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Writes the scalars and histograms of an epoch.

        Args:
          epoch: The number of the epoch, from 0.
          logs: The logs of `fit`.
        """
        model = self.model
        scalars = {name: float(value) for name, value in (logs or {}).items()}
        plan, budget = model.privacy_plan, model.privacy_budget
        if "epsilon" in scalars:
            scalars["epsilon_spent"] = scalars.pop("epsilon")
            if budget is not None:
                scalars["epsilon_left"] = max(0.0, budget - scalars["epsilon_spent"])
        rate = learning_rate_variable(model.optimizer)
        if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
            rate = rate(model.optimizer.iterations)
        scalars["noise_multiplier"] = plan.noise_multiplier
        scalars["l2_norm_clip"] = model.clip.bound
        scalars["releases"] = model.num_releases
        scalars["learning_rate"] = float(tf.convert_to_tensor(rate))
        values = {}
        if self.histogram_freq and epoch % self.histogram_freq == 0:
            for group, variables in model.weight_groups.items():
                values.update(
                    {f"{group}/{name}": variable.numpy() for name, variable in _named(variables)}
                )
        self._epoch = epoch
        # The writer has a thread of its own: TensorFlow's summaries take longer than an epoch of a
        # small model.
        self._write(_event(epoch, scalars, values))

    def on_train_end(self, logs: dict[str, float] | None = None) -> None:
        """Writes the privacy report as a Markdown code block and closes the event file."""
        if self._writer is not None and self.model.privacy_delta is not None:
            text = textwrap.indent(str(self.model.privacy_report()), "    ")
            summary = text_summary.text_pb("privacy/report", text)
            self._write(Event(wall_time=time.time(), step=self._epoch, summary=summary))
        self._close()

    def _write(self, event: Event) -> None:
        if self._writer is not None:
            self._writer.add_event(event)

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _event(step: int, scalars: dict[str, float], values: dict[str, np.ndarray]) -> Event:
    summary = Summary()
    for name, value in scalars.items():
        group = "non_private" if name.startswith(("unsafe_", "val_unsafe_")) else "privacy"
        tag = name if name.startswith("val_loss") else f"{group}/{name}"
        summary.MergeFrom(scalar_summary.scalar_pb(tag, value))
    for name, array in values.items():
        counts, edges = np.histogram(array[np.isfinite(array)].astype(np.float64), bins=_BUCKETS)
        buckets = tensor_util.make_tensor_proto(
            np.stack([edges[:-1], edges[1:], counts], axis=1), dtype=np.float64
        )
        metadata = histogram_metadata.create_summary_metadata(display_name=None, description=None)
        summary.value.add(tag=name, metadata=metadata, tensor=buckets)
    return Event(wall_time=time.time(), step=step, summary=summary)


def _named(variables: Sequence[tf.Variable]) -> list[tuple[str, tf.Variable]]:
    """Returns variables with their names, numbered where names repeat."""
    names = [variable.name.split(":")[0] for variable in variables]
    return [
        (name if names.count(name) == 1 else f"{name}_{names[:place].count(name)}", variable)
        for place, (name, variable) in enumerate(zip(names, variables, strict=True))
    ]


class StepsBar(keras.callbacks.ProgbarLogger):
    """Keras's progress bar with the number of steps that ran.

    A budget may end an execution of several steps early.

    Args:
      steps: Returns the number of steps that ran so far.

    ```python
    >>> bar = StepsBar(lambda: 0)  # `fit` makes it.
    >>> bar.target is None
    True

    ```
    """

    def __init__(self, steps: Callable[[], int]) -> None:
        super().__init__(count_mode="steps")
        # Keras reads it as the steps of a full bar.
        self.target: int | None = None
        self._steps = steps
        self._before = 0

    def on_epoch_begin(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Starts a bar.

        Args:
          epoch: The number of the epoch, from 0.
          logs: The logs of `fit`.
        """
        self._before = self._steps()
        super().on_epoch_begin(epoch, logs)

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        """Shows the steps of this epoch so far.

        Args:
          batch: Not used: Keras counts executions of several steps.
          logs: The logs of `fit`.
        """
        super().on_train_batch_end(self._steps() - self._before - 1, logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Ends the bar at the number of steps that ran.

        Args:
          epoch: The number of the epoch, from 0.
          logs: The logs of `fit`.
        """
        planned = self.target
        self.target = self._steps() - self._before
        super().on_epoch_end(epoch, logs)
        self.target = planned


@dataclasses.dataclass(frozen=True)
class Backup:
    """The saved state of an interrupted fit.

    Attributes:
      meta: The progress and the plan, JSON-ready.
      arrays: The values of the weights and of the optimizer's variables.
      directory: The directory that it was read from.

    ```python
    >>> Backup(meta={"epoch": 3}, arrays=[]).meta["epoch"]
    3

    ```
    """

    meta: dict[str, Any]
    arrays: list[np.ndarray]
    directory: str = ""


def _check_meta(meta: dict[str, Any]) -> None:
    """Raises `ValueError` or `TypeError` for values that no fit writes."""
    needed = ("epoch", "plan", "ledger", "public", "learning_rate", "progress")
    meta = check.fields("its meta", meta, needed=needed)
    check.count("epoch", meta["epoch"])
    PrivacyPlan.from_json(meta["plan"])
    mark = ("ledger_id", "version", "dataset_id")
    ledger = check.fields("its ledger", meta["ledger"], needed=mark, known=mark)
    check.count("version", ledger["version"])
    check.fields("its settings", meta["public"])
    if meta["learning_rate"] is not None:
        check.real("learning_rate", meta["learning_rate"], "delete the backup")
    counts = ("steps", "epochs")
    progress = check.fields("its progress", meta["progress"], needed=counts, known=counts)
    check.count("steps", progress["steps"])
    check.non_negative("epochs", progress["epochs"])


class PrivateBackupAndRestore(Callback):
    """Resumes an interrupted fit from its last epoch, also after a kill.

    Run the same script again: weights, optimizer state and noise multiplier are those of the last
    complete epoch. The ledger, which must be on disk, has the privacy spent since. Repeated steps
    draw fresh noise and are charged again, so that a fit with a target epsilon may end a few steps
    early. The callback runs after all others, so that the changes which these make at an epoch's
    end are saved; the others start anew, as in Keras.

    Args:
      backup_dir: A directory for this fit alone.
      delete_checkpoint: Whether to delete the backup when the fit ends.

    #### Formal guarantee

    The file holds released variables, the plan and the numbers of steps and epochs, but no key,
    seed or record. A step runs only after the ledger has been charged for it, before and after an
    interruption.

    ```python
    >>> callback = PrivateBackupAndRestore("backup")  # For fit(callbacks=[callback]).
    >>> callback.read() is None
    True
    >>> kept = PrivateBackupAndRestore("kept", delete_checkpoint=False)  # Stays after the fit.

    ```
    """

    def __init__(
        self, backup_dir: str | os.PathLike[str], *, delete_checkpoint: bool = True
    ) -> None:
        super().__init__()
        self.backup_dir = os.fspath(backup_dir)
        self.delete_checkpoint = delete_checkpoint
        self._snapshot: Callable[[int], Backup] | None = None
        self._first_epoch = 0

    def attach(self, snapshot: Callable[[int], Backup], first_epoch: int) -> None:
        """Sets the function that takes a backup; `fit` calls this method.

        Args:
          snapshot: Returns the backup of the state before an epoch, whose number is its argument.
          first_epoch: The number of the fit's first epoch.
        """
        self._snapshot = snapshot
        self._first_epoch = first_epoch

    def on_train_begin(self, logs: dict[str, float] | None = None) -> None:
        """Writes the initial state.

        Args:
          logs: Not used.

        Raises:
          ValueError: The directory is not writable, `fit` is not that of this library's models, or
            it has a second such callback; no step has run yet.
        """
        backup = self._take(self._first_epoch)
        try:
            os.makedirs(self.backup_dir, exist_ok=True)
            self._write(backup)
        except OSError as error:
            raise ValueError(
                f"backup_dir={self.backup_dir!r} cannot be written ({error}): pass a writable "
                "directory. No privacy was spent."
            ) from error

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Replaces the backup by the state after this epoch.

        Args:
          epoch: The number of the epoch, from 0.
          logs: Not used.
        """
        self._write(self._take(epoch + 1))

    def on_train_end(self, logs: dict[str, float] | None = None) -> None:
        """Deletes the backup."""
        self._snapshot = None
        if self.delete_checkpoint:
            self.forget()

    def forget(self) -> None:
        """Deletes the backup, if there is one."""
        self._path.unlink(missing_ok=True)

    def read(self) -> Backup | None:
        """Returns the backup in the directory, or None without one.

        Raises:
          ValueError: The file is damaged, or is not a backup of this version.
        """
        try:
            with open(self._path, "rb") as opened, np.load(opened, allow_pickle=False) as file:
                meta = check.fields("its meta", json.loads(str(file["meta"])))
                arrays = [file[f"array_{number}"] for number in range(len(file.files) - 1)]
            if (meta.get("format"), meta.get("version")) == (_FORMAT, _VERSION):
                _check_meta(meta)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except Exception as error:
            # NumPy and zipfile read whatever a file says, so that the error may be of any type.
            what = " ".join(str(error).split())
            raise ValueError(
                f"{str(self._path)!r} is not a readable backup ({type(error).__name__}: "
                f"{what:.200}). Delete it to restart the fit; the ledger keeps its spending. No "
                "privacy was spent now."
            ) from error
        if (meta.get("format"), meta.get("version")) != (_FORMAT, _VERSION):
            raise ValueError(
                f"{str(self._path)!r} is not a backup of version {_VERSION}: pass another "
                "backup_dir."
            )
        return Backup(meta, arrays, self.backup_dir)

    def _take(self, epoch: int) -> Backup:
        """Returns the backup of the state before an epoch."""
        if self._snapshot is None:
            raise ValueError(
                "PrivateBackupAndRestore works only with fit of tfp_dpvi's models, one in each fit."
            )
        return self._snapshot(epoch)

    @property
    def _path(self) -> pathlib.Path:
        return pathlib.Path(self.backup_dir) / _FILE

    def _write(self, backup: Backup) -> None:
        """Writes a new file and renames it once it is complete and synced."""
        temporary = self._path.with_suffix(".new")
        meta = json.dumps({"format": _FORMAT, "version": _VERSION, **backup.meta})
        arrays: dict[str, Any] = {f"array_{i}": value for i, value in enumerate(backup.arrays)}
        with open(temporary, "wb") as file:
            np.savez(file, meta=np.array(meta), **arrays)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self._path)
