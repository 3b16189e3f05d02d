"""Cells of a study: one file for each, with a row for each seed. Existing rows are not run again."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
import platform
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import studies.advanced_composition  # noqa: F401 (registers its accountant)
import tfp_dpvi as dpvi
from tfp_dpvi.privacy import PrivacyLedger

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Cell:
    """One setting of a study.

    Attributes:
      name: name of its file.
      make: called once in a separate process; returns a function that makes the row of a seed.
      num: number of seeds.
      full: whether it is long and runs only with `--full`.
    """

    name: str
    make: Callable[[], Callable[[int], Row]]
    num: int = 10
    full: bool = False


def load(path: pathlib.Path) -> list[Row]:
    """Returns a cell's rows."""
    return json.loads(path.read_text())["rows"] if path.exists() else []


def run(cell: Cell, path: pathlib.Path, num: int) -> None:
    """Runs the missing seeds of a cell's file; writes after each."""
    found = load(path)
    have = {row["seed"] for row in found}
    lacking = [seed for seed in range(1, num + 1) if seed not in have]
    if not lacking:
        return
    begun = time.process_time()
    row_of = cell.make()
    made = time.process_time() - begun
    for seed in lacking:
        begun = time.process_time()
        row = {"seed": seed, **row_of(seed), "cpu_seconds": round(time.process_time() - begun, 2)}
        found.append(row)
        versions = {
            "python": platform.python_version(),
            "tensorflow": tf.__version__,
            "revision": subprocess.check_output(
                ["git", "describe", "--always", "--dirty"], text=True
            ).strip(),
        }
        content = {
            "cell": cell.name,
            "cpu_seconds_to_make": round(made, 1),
            **versions,
            "rows": found,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(content, indent=1) + "\n")
        os.replace(part, path)


def write_block(page: pathlib.Path, name: str, text: str) -> None:
    """Writes a table or a picture between the marks of its name in a page."""
    begin, end = (
        f"<!-- {name}: begin, written by benchmarks/run_studies.py -->\n",
        f"<!-- {name}: end -->",
    )
    before, _, rest = page.read_text().partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"{page} has no marks for {name!r}: add {begin!r} and {end!r}.")
    page.write_text(f"{before}{begin}\n{text}\n\n{end}{after}")


class Repeated:
    """Fits of one model to several data sets, traced once and with one noise multiplier.

    Args:
      model: not compiled.
      make_optimizer: `noise_multiplier=` -> a DP-Keras optimizer.
      x: records of the first data set; the others have their shapes.
      y: likewise.
      epsilon: math.inf for a fit without noise.
      delta: of epsilon.
      accountant: the accountant that calibrates the noise.
      settings: arguments of `fit`.
    """

    def __init__(
        self,
        model: dpvi.DPVI,
        make_optimizer: Callable[..., Any],
        x: Any,
        y: Any,
        *,
        epsilon: float,
        delta: float,
        accountant: str = "pld",
        **settings: Any,
    ) -> None:
        self.model, self._settings, self.noise = model, {"epochs": 1, "verbose": 0, **settings}, 0.0
        if epsilon < math.inf:
            model.compile(make_optimizer(noise_multiplier=1.0), accountant=accountant)
            data = model.make_data(
                x, y, **{name: value for name, value in settings.items() if name != "epochs"}
            )
            steps = self._settings["epochs"] * data.steps_per_epoch
            mechanism = model.mechanism(data).calibrated(
                PrivacyLedger(), epsilon=epsilon, delta=delta, num_releases=steps
            )
            self.noise = mechanism.noise_multiplier
        optimizer = make_optimizer(noise_multiplier=self.noise)
        optimizer.build(model.trainable_variables)
        model.compile(
            optimizer, accountant="rdp"
        )  # Faster, for the noise is set: this ledger grows with every data set.
        self._start = model.get_weights()
        self._optimizer_start = [variable.numpy() for variable in optimizer.variables]

    def __call__(self, x: Any, y: Any = None) -> dpvi.DPVI:
        """Returns the model, fitted to a data set."""
        self.model.set_weights(self._start)
        for variable, value in zip(
            self.model.optimizer.variables, self._optimizer_start, strict=True
        ):
            variable.assign(value)
        self.model.fit(x, y, **self._settings)
        return self.model


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Returns the mean over seeds and its standard error."""
    array = np.asarray(values, float)
    return float(array.mean()), float(array.std(ddof=1) / math.sqrt(len(array))) if len(
        array
    ) > 1 else math.nan


def shown(values: Sequence[float], digits: int = 3) -> str:
    """Returns the mean and its standard error as text."""
    if not len(values):
        return ""
    mean, error = mean_and_error(values)
    return f"{mean:.{digits}f} ± {error:.{digits}f}"
