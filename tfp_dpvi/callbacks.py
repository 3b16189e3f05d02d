"""Keras callbacks that show released and public values only (contract C7)."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import textwrap
import time
import zipfile
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
from tfp_dpvi._tf import Callback, Optimizer, keras, learning_rate_variable, tf

_FORMAT, _VERSION = "tfp_dpvi backup", 2
_FILE = "fit.npz"
_BUCKETS = 30


class PrivacyTensorBoard(Callback):
    """Writes the privacy spent, privatised metrics and the learned variables to TensorBoard after every epoch.

    Scalars under "privacy/": epsilon spent and left (where a delta was given), noise multiplier, clip, learning rate,
    releases, and what else `fit` logs; losses of public validation data under their own names; exact training losses, if
    somebody asked for them, under "non_private/". Histograms: the model's trainable variables, by layers and part of the model.
    At the end of a fit the privacy report as text, where a delta was given.

    Args:
      log_dir: where to write event files.
      histogram_freq: epochs between histograms; 0 for none.

    #### Formal guarantee

    Writes functions of the released variables, of the plan and of the step number: post-processing.
    """

    def __init__(self, log_dir: str | os.PathLike[str], *, histogram_freq: int = 1) -> None:
        super().__init__()
        self.log_dir = os.fspath(log_dir)
        self.histogram_freq = check.count("histogram_freq", histogram_freq)
        self._writer: Any = None
        self._epoch = 0

    def on_train_begin(self, logs: dict[str, float] | None = None) -> None:
        """Opens the event file; fails here, before a step has run, where the directory cannot be written."""
        self._close()  # Left open where the last fit was interrupted.
        try:
            self._writer = EventFileWriter(self.log_dir)
        except (OSError, tf.errors.OpError) as error:
            raise ValueError(
                f"log_dir={self.log_dir!r} cannot be written ({error}): give a directory that can."
            ) from error

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Writes one point."""
        model = self.model
        scalars = {name: float(value) for name, value in (logs or {}).items()}
        plan, budget = model.privacy_plan, model.privacy_budget
        if "epsilon" in scalars:
            scalars["epsilon_spent"] = scalars.pop("epsilon")
            if budget is not None:
                scalars["epsilon_left"] = max(0.0, budget - scalars["epsilon_spent"])
        scalars["noise_multiplier"] = plan.noise_multiplier
        scalars["l2_norm_clip"] = model.clip.bound
        scalars["releases"] = model.num_releases
        scalars["learning_rate"] = _learning_rate(model.optimizer)
        values = {}
        if self.histogram_freq and epoch % self.histogram_freq == 0:
            for group, variables in model.weight_groups.items():
                values.update({f"{group}/{name}": variable.numpy() for name, variable in _named(variables)})
        self._epoch = epoch
        # Written by a thread of the writer's: TensorFlow's own summaries take longer than an epoch of a small model.
        self._writer.add_event(_event(epoch, scalars, values))

    def on_train_end(self, logs: dict[str, float] | None = None) -> None:
        """Writes the privacy report, in Markdown a block of code, and closes the event file."""
        if self._writer is not None and self.model.privacy_delta is not None:
            text = textwrap.indent(str(self.model.privacy_report()), "    ")
            summary = text_summary.text_pb("privacy/report", text)
            self._writer.add_event(Event(wall_time=time.time(), step=self._epoch, summary=summary))
        self._close()

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
        _add_histogram(summary, name, array)
    return Event(wall_time=time.time(), step=step, summary=summary)


def _add_histogram(summary: Summary, tag: str, values: np.ndarray) -> None:
    finite = values[np.isfinite(values)].astype(np.float64)
    counts, edges = np.histogram(finite, bins=_BUCKETS)
    buckets = tensor_util.make_tensor_proto(np.stack([edges[:-1], edges[1:], counts], axis=1), dtype=np.float64)
    metadata = histogram_metadata.create_summary_metadata(display_name=None, description=None)
    summary.value.add(tag=tag, metadata=metadata, tensor=buckets)


def _named(variables: Sequence[tf.Variable]) -> list[tuple[str, tf.Variable]]:
    """Variables under their names; where two share one, numbered."""
    names = [variable.name.split(":")[0] for variable in variables]
    return [
        (name if names.count(name) == 1 else f"{name}_{names[:place].count(name)}", variable)
        for place, (name, variable) in enumerate(zip(names, variables, strict=True))
    ]


class StepsBar(keras.callbacks.ProgbarLogger):
    """Keras's progress bar, which counts the steps that ran: a budget may end an execution of several before its last.

    Args:
      steps: gives their number so far.
    """

    def __init__(self, steps: Callable[[], int]) -> None:
        super().__init__(count_mode="steps")
        self.target: int | None = None  # Keras's: what the bar ends at.
        self._steps, self._before = steps, 0

    def on_epoch_begin(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Begins a bar."""
        self._before = self._steps()
        super().on_epoch_begin(epoch, logs)

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        """Shows the steps of this epoch so far."""
        super().on_train_batch_end(self._steps() - self._before - 1, logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Ends the bar where the steps ended."""
        planned, self.target = self.target, self._steps() - self._before
        super().on_epoch_end(epoch, logs)
        self.target = planned


def _learning_rate(optimizer: Optimizer) -> float:
    rate = learning_rate_variable(optimizer)
    if callable(rate) and not isinstance(rate, tf.Variable):
        rate = rate(optimizer.iterations)
    return float(rate.numpy() if hasattr(rate, "numpy") else rate)  # A strategy's variable is no number.


@dataclasses.dataclass(frozen=True)
class Backup:
    """What is kept of an interrupted fit.

    Attributes:
      meta: JSON-ready: its place and its plan.
      arrays: values of weights and of the optimizer's variables.
      directory: where it was read from.
    """

    meta: dict[str, Any]
    arrays: list[np.ndarray]
    directory: str = ""


class PrivateBackupAndRestore(Callback):
    """Lets a fit that was interrupted, at any moment and also by a kill, go on from its last epoch.

    Run the same script again: weights, the optimizer's state and the noise multiplier are those of the last whole epoch,
    and the ledger (which must be on disk) knows what was spent since. Steps that are run again draw fresh noise and are
    charged again, so that a fit with a target epsilon may end a few steps early. It runs as the last of the callbacks, so
    that what they change at an epoch's end is kept; they start anew, as in Keras. When `fit` ends, the backup is deleted.

    Args:
      backup_dir: directory for the backup, of this fit alone.
      delete_checkpoint: delete it when the fit ends.

    #### Formal guarantee

    The file holds released variables, the plan and the numbers of steps and epochs: no key, no seed and no record. A step
    runs only after the ledger has been charged for it, before and after an interruption.
    """

    def __init__(self, backup_dir: str | os.PathLike[str], *, delete_checkpoint: bool = True) -> None:
        super().__init__()
        self.backup_dir = os.fspath(backup_dir)
        self.delete_checkpoint = delete_checkpoint
        self._snapshot: Callable[[int], Backup] | None = None
        self._first_epoch = 0

    def attach(self, snapshot: Callable[[int], Backup], first_epoch: int) -> None:
        """Called by `fit`: how to take a backup, and the epoch that it starts from."""
        self._snapshot, self._first_epoch = snapshot, first_epoch

    def on_train_begin(self, logs: dict[str, float] | None = None) -> None:
        """Writes what the fit starts from: fails here, before a step has run, where the directory cannot be written."""
        if self._snapshot is None:
            raise ValueError("PrivateBackupAndRestore is for fit of this library's models.")
        try:
            os.makedirs(self.backup_dir, exist_ok=True)
            self._write(self._snapshot(self._first_epoch))
        except OSError as error:
            raise ValueError(
                f"backup_dir={self.backup_dir!r} cannot be written ({error}): give a directory that can. Nothing was spent."
            ) from error

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Writes the state after this epoch, in place of the last."""
        assert self._snapshot is not None
        self._write(self._snapshot(epoch + 1))

    def on_train_end(self, logs: dict[str, float] | None = None) -> None:
        """Deletes the backup."""
        self._snapshot = None
        if self.delete_checkpoint:
            self.forget()

    def forget(self) -> None:
        """Deletes the backup, if there is one."""
        self._path.unlink(missing_ok=True)

    def read(self) -> Backup | None:
        """The backup in the directory, or None.

        Raises:
          ValueError: there is something else.
        """
        try:
            with open(self._path, "rb") as opened, np.load(opened, allow_pickle=False) as file:
                meta = json.loads(str(file["meta"]))
                arrays = [file[f"array_{number}"] for number in range(len(file.files) - 1)]
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, KeyError, zipfile.BadZipFile, EOFError) as error:
            raise ValueError(
                f"{str(self._path)!r} is no backup that can be read ({type(error).__name__}: {error}). Delete it to start the fit "
                "anew: what it spent stays in the ledger. Nothing was spent now."
            ) from error
        if (meta.get("format"), meta.get("version")) != (_FORMAT, _VERSION):
            raise ValueError(
                f"{str(self._path)!r} is not a backup of version {_VERSION}: read it with the tfp_dpvi that wrote it, or give "
                "another backup_dir. Nothing was spent."
            )
        return Backup(meta, arrays, self.backup_dir)

    @property
    def _path(self) -> pathlib.Path:
        return pathlib.Path(self.backup_dir) / _FILE

    def _write(self, backup: Backup) -> None:
        """A new file takes the old one's place when it is whole and on the disk."""
        temporary = self._path.with_suffix(".new")
        meta = json.dumps({"format": _FORMAT, "version": _VERSION, **backup.meta})
        arrays: dict[str, Any] = {f"array_{i}": value for i, value in enumerate(backup.arrays)}
        with open(temporary, "wb") as file:
            np.savez(file, meta=np.array(meta), **arrays)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self._path)
