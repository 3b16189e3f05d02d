"""`replay`: what one record can do to a step's sums, measured with the same randomness on neighbouring records."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from tfp_dpvi import _validate as check
from tfp_dpvi._tf import Structure, tf
from tfp_dpvi.audit.canaries import converted
from tfp_dpvi.audit.observed import ObservedStep, Part, Setting, num_rows
from tfp_dpvi.models import DPModel
from tfp_dpvi.privacy import Sensitivity
from tfp_dpvi.training import new_key

EXTREMES = (0.0, 1.0, -1.0, 30.0, -30.0, 1e4, -1e4, 1e15, -1e30, np.nan, np.inf)
"""The values of the floats of the records that `replay` tries by default."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """The largest measured differences of one released sum beside the sensitivity that is stated for it.

    All are in units of the sum's noise over the noise multiplier (for a gradient alone: in clips).
    """

    name: str
    presence: float
    replacement: float
    stated: float  # A, for presence.
    stated_replacement: float  # D.

    def within(self, allowance: float) -> bool:
        """Returns whether neither difference exceeds its statement."""
        return (
            self.presence <= self.stated + allowance
            and self.replacement <= self.stated_replacement + allowance
        )


@dataclasses.dataclass(frozen=True)
class Replay:
    """The result of `replay`.

    Attributes:
      sums: the gradient, each joint release, and "together", which is what the accounting prices.
      rounding: the difference that rounding of floats may add.
      finite: whether all sums were finite.
      leaks: names of the model's variables that a record changed without passing through the release.
      num_neighbours: number of pairs of neighbouring data sets.
      worst: the pair with the largest share of its statement: position, and row of the neighbours; no values of records.
    """

    sums: tuple[Measured, ...]
    rounding: float
    finite: bool
    leaks: tuple[str, ...]
    num_neighbours: int
    worst: tuple[int, int]

    @property
    def holds(self) -> bool:
        """True if no difference exceeds its statement and nothing else was found."""
        return (
            self.finite and not self.leaks and all(each.within(self.rounding) for each in self.sums)
        )

    @property
    def attained(self) -> float:
        """The largest measured presence over its statement: 1 if a record reached what the noise is scaled to."""
        return self.sums[-1].presence / self.sums[-1].stated

    def __str__(self) -> str:
        """Returns the result as plain text."""
        verdict = "holds" if self.holds else "DOES NOT HOLD"
        lines = [
            f"Replay on {self.num_neighbours} pairs of neighbouring records, with the same randomness:",
            f"the stated sensitivity {verdict}.",
        ]
        for each in self.sums:
            lines.append(
                f"  {each.name}: presence {each.presence:.6g} of {each.stated:.6g} stated, "
                f"replacement {each.replacement:.6g} of {each.stated_replacement:.6g}"
            )
        if not self.finite:
            lines.append("  A sum is not finite: a record is multiplied by zero, not selected.")
        if self.leaks:
            names = ", ".join(self.leaks)
            lines.append(f"  A record changed variables without clip and noise: {names}.")
        lines.append(
            f"  Worst pair: record {self.worst[0]} against row {self.worst[1]} of the neighbours."
        )
        return "\n".join(lines)


def replay(
    model: DPModel,
    x: Structure,
    y: Structure | None = None,
    sample_weight: np.ndarray | None = None,
    *,
    neighbours: dict[str, Structure] | None = None,
    at: tuple[int, ...] | None = None,
    num_steps: int = 2,
    seed: int | None = None,
    **settings: Setting,
) -> Replay:
    """Measures what one record can do to the sums of the model's own step, against the sensitivity that the step states.

    The step runs without noise on the records, without record i, and with another record in its place. The randomness is
    the same in all runs, and the removed record is masked at its index, so that all other records keep their random numbers.
    The differences must then not exceed the sensitivity that the noise is scaled to (contract C3), whatever the records hold.
    Works for every model, layer and loss; the variables and the ledger do not change.

    ```python
    model.compile(optimizer, epsilon=1.0, delta=1e-5)
    print(dpvi.audit.replay(model, x[:20], y[:20]))
    ```

    Args:
      model: a compiled model, fitted or not.
      x: simulated or public records as for `fit`; 10 to 100 are enough. The result of an audit is *not private*.
      y: likewise.
      sample_weight: likewise.
      neighbours: records to put in place of a record, `{"x": ..., "y": ..., "sample_weight": ...}` of any number of rows. By
        default rows of extreme values, NaN and infinities among them.
      at: indices of the records to remove and replace; by default the first, the middle and the last.
      num_steps: steps for each pair, with draws of their own.
      seed: of the draws; None for fresh ones.
      **settings: of `model.make_data`, such as `batch_size`. By default a step takes all records, so that none is missed.

    Returns:
      The largest differences, with `holds` and a plain-text form.

    Raises:
      ValueError: the model draws random numbers that do not follow from the step's key, so that no step can be repeated.
    """
    check.count("num_steps", num_steps, 1)
    num = num_rows(x)
    step = ObservedStep(
        model, x, y, sample_weight, num_steps=None, **{"batch_size": num, **settings}
    )
    records = tf.nest.map_structure(lambda part: part.numpy(), step.tensors)
    rows = _extremes(records) if neighbours is None else converted(model, "neighbours", neighbours)
    tf.nest.assert_same_structure(records, rows)
    key = new_key(seed)
    runs = _Runs(step, key, num_steps)
    full = runs(records)
    if not all(np.array_equal(a, b) for a, b in zip(full, runs(records), strict=True)):
        raise ValueError(
            "model: two steps with the same key differ, so none can be replayed. Draw from the key that the step passes, or "
            "leave out layers with random numbers of their own (Dropout) for the audit."
        )
    places = sorted({0, num // 2, num - 1}) if at is None else at
    largest = _Largest(step.parts, step.mechanism.sensitivity)
    for place in places:
        keep = np.arange(num) != place
        removed = runs(records, keep)
        largest.compare(full, removed, None, (place, -1))
        for row in range(len(tf.nest.flatten(rows)[0])):
            swapped = runs(with_row(records, rows, place, row))
            largest.compare(swapped, removed, full, (place, row))
    size = full[0].shape[1]
    allowance = rounding(step.dtype, num, size) * step.mechanism.sensitivity.add_or_remove
    return largest.result(allowance, runs.names)


class _Runs:
    """Runs a step without noise from the same state; returns what was released, and the variables that it changed."""

    def __init__(self, step: ObservedStep, key: np.ndarray, num_steps: int) -> None:
        self._step = step
        self._key = key
        self._num_steps = num_steps
        self._variables = list(step.model.variables)
        self.names = [variable.name for variable in self._variables]
        self._before = [variable.numpy() for variable in self._variables]

    def __call__(self, records: Structure, keep: np.ndarray | None = None) -> list[np.ndarray]:
        tensors = tf.nest.map_structure(tf.constant, records)
        try:
            released = self._step.all_values(
                self._key, self._num_steps, noise=0.0, keep=keep, tensors=tensors
            )
            after = [variable.numpy() for variable in self._variables]
        finally:
            for variable, value in zip(self._variables, self._before, strict=True):
                variable.assign(value)
        return [released, *after]


class _Largest:
    """The largest differences so far."""

    def __init__(self, parts: tuple[Part, ...], sensitivity: Sensitivity) -> None:
        whole = Part("together", slice(None), sensitivity.add_or_remove, sensitivity.replace)
        self._parts = (*parts, *((whole,) if len(parts) > 1 else ()))
        self._presence = dict.fromkeys((part.name for part in self._parts), 0.0)
        self._replacement = dict(self._presence)
        self._finite = True
        self._leaks: set[int] = set()
        self._num = 0
        self._worst = (0.0, (0, 0))

    def compare(
        self,
        there: list[np.ndarray],
        removed: list[np.ndarray],
        other: list[np.ndarray] | None,
        pair: tuple[int, int],
    ) -> None:
        """Takes in the runs with a record, without it, and with another record in its place."""
        self._num += 1
        self._finite &= bool(np.all(np.isfinite(there[0])) and np.all(np.isfinite(removed[0])))
        for number, (after, without) in enumerate(zip(there[1:], removed[1:], strict=True)):
            if not np.array_equal(after, without, equal_nan=after.dtype.kind == "f"):
                self._leaks.add(number)
        for part in self._parts:
            presence = _largest_norm(there[0][:, part.columns] - removed[0][:, part.columns])
            shares = [presence / part.sensitivity]
            self._presence[part.name] = max(self._presence[part.name], presence)
            if other is not None:
                moved = _largest_norm(there[0][:, part.columns] - other[0][:, part.columns])
                self._replacement[part.name] = max(self._replacement[part.name], moved)
                shares.append(moved / part.replace)
            self._worst = max(self._worst, (max(shares), pair))

    def result(self, allowance: float, names: list[str]) -> Replay:
        """Returns the result."""
        sums = tuple(
            Measured(
                part.name,
                self._presence[part.name],
                self._replacement[part.name],
                part.sensitivity,
                part.replace,
            )
            for part in self._parts
        )
        leaks = tuple(names[number] for number in sorted(self._leaks))
        return Replay(sums, allowance, self._finite, leaks, self._num, self._worst[1])


def _largest_norm(difference: np.ndarray) -> float:
    """Returns the largest l2 norm of the rows; infinite if one is not finite."""
    norms = np.sqrt(np.sum(np.square(difference), axis=1))
    return float(np.max(np.where(np.isfinite(norms), norms, np.inf)))


def _extremes(records: dict[str, Structure]) -> dict[str, Structure]:
    """Returns records of extreme floats; integers, such as labels, are those of the first records."""
    num = len(tf.nest.flatten(records)[0])

    def rows(part: np.ndarray) -> np.ndarray:
        taken = part[np.arange(2 * len(EXTREMES)) % num].copy()
        if part.dtype.kind == "f":
            values = np.asarray(EXTREMES, part.dtype)
            taken[: len(values)] = values.reshape(-1, *[1] * (part.ndim - 1))
            # Beside rows of one value: ordinary records, much enlarged.
            with np.errstate(over="ignore"):
                taken[len(values) :] *= 1e3
        return taken

    return tf.nest.map_structure(rows, records)


def rounding(dtype: np.dtype | type, num_records: int, num_coordinates: int) -> float:
    """Returns an allowance for rounding, in clips: of a record's scale, and of sums of `num_records` vectors."""
    return float(np.finfo(dtype).eps) * (8 + math.sqrt(num_coordinates) + 2 * num_records)


def with_row(records: Structure, other: Structure, at: int, row: int) -> Structure:
    """Returns a copy of records whose record `at` is record `row` of other records of the same structure."""

    def put(part: np.ndarray, source: np.ndarray) -> np.ndarray:
        changed = np.array(part)
        changed[at] = source[row]
        return changed

    return tf.nest.map_structure(put, records, other)
