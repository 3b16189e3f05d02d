"""Keras callbacks that show released and public values only (contract C7)."""

from __future__ import annotations

import os
from typing import Any

from tfp_dpvi._keras import Callback, tf


class PrivacyTensorBoard(Callback):
    """Writes the privacy spent and the surrogate's variables to TensorBoard after every epoch.

    Scalars: epsilon spent and left (where a delta was given), noise multiplier, clip, learning rate, releases, and
    whatever else `fit` logs. Histograms: the model's trainable variables. All of these are public or released by the
    private mechanism; no training loss is among them.

    Args:
      log_dir: where to write event files.
      histogram_freq: epochs between histograms; 0 for none.

    #### Formal guarantee

    Writes functions of the released variables, of the plan and of the step number: post-processing.
    """

    def __init__(self, log_dir: str | os.PathLike[str], *, histogram_freq: int = 1) -> None:
        super().__init__()
        if isinstance(histogram_freq, bool) or not isinstance(histogram_freq, int) or histogram_freq < 0:
            raise ValueError(f"histogram_freq must be an integer >= 0, got {histogram_freq!r}.")
        self.log_dir = os.fspath(log_dir)
        self.histogram_freq = histogram_freq
        self._writer: Any = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Opens the event file; fails here, before a step has run, where the directory cannot be written."""
        try:
            os.makedirs(self.log_dir, exist_ok=True)
            self._writer = tf.summary.create_file_writer(self.log_dir)
            self._writer.init()
        except (OSError, tf.errors.OpError) as error:
            raise ValueError(
                f"log_dir={self.log_dir!r} cannot be written ({error}): give a directory that can."
            ) from error

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Writes one point."""
        model = self.model
        scalars = {name: float(value) for name, value in (logs or {}).items()}
        plan, budget = model.privacy_plan, model.privacy_budget
        if "epsilon" in scalars:
            scalars["epsilon_spent"] = scalars.pop("epsilon")
            if budget is not None:
                scalars["epsilon_left"] = max(0.0, budget - scalars["epsilon_spent"])
        scalars["noise_multiplier"] = plan.noise_multiplier
        scalars["l2_norm_clip"] = model.optimizer.l2_norm_clip
        scalars["releases"] = model.privacy_ledger.num_releases
        scalars["learning_rate"] = _learning_rate(model.optimizer)
        with self._writer.as_default(step=epoch):
            for name, value in scalars.items():
                group = "non_private" if name.startswith(("unsafe_", "val_unsafe_")) else "privacy"
                tf.summary.scalar(name if name.startswith("val_loss") else f"{group}/{name}", value)
            if self.histogram_freq and epoch % self.histogram_freq == 0:
                for name, variable in _named(model.trainable_variables):
                    tf.summary.histogram(f"surrogate_posterior/{name}", variable)
        self._writer.flush()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Closes the event file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _named(variables: Any) -> list[tuple[str, Any]]:
    """Variables under their names; where two share one, numbered."""
    names = [variable.name.split(":")[0] for variable in variables]
    return [
        (name if names.count(name) == 1 else f"{name}_{names[:place].count(name)}", variable)
        for place, (name, variable) in enumerate(zip(names, variables, strict=True))
    ]


def _learning_rate(optimizer: Any) -> float:
    rate = optimizer._learning_rate
    if callable(rate) and not isinstance(rate, tf.Variable):
        rate = rate(optimizer.iterations)
    return float(rate)
