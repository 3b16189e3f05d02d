"""`replay`: the effect of one record on a step's sums, with the same randomness on neighbours."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from tfp_dpvi import _validate as check
from tfp_dpvi._tf import Structure, tf
from tfp_dpvi.audit.canaries import convert_rows
from tfp_dpvi.audit.observed import ObservedStep, Part, Setting, num_rows
from tfp_dpvi.data import Units
from tfp_dpvi.data.units import Identifiers
from tfp_dpvi.models import DPModel
from tfp_dpvi.privacy import Sensitivity
from tfp_dpvi.training import new_key

EXTREMES = (0.0, 1.0, -1.0, 30.0, -30.0, 1e4, -1e4, 1e15, -1e30, np.nan, np.inf)
"""The values of the floats of the records that `replay` tries by default."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """The largest measured differences of a released sum beside the sensitivity stated for it.

    All are in units of the sum's noise over the noise multiplier (for a gradient alone: in clips).

    Attributes:
      name: "gradient", the name of a joint release, or "together".
      presence: The largest difference that a record's presence made.
      replacement: The largest difference that a record's replacement made.
      stated: The sensitivity A that is stated for a record's presence.
      stated_replacement: The sensitivity D that is stated for its replacement.

    ```python
    >>> measured = Measured("gradient", 0.9, 1.9, stated=1.0, stated_replacement=2.0)
    >>> measured.within(allowance=1e-6)
    True

    ```
    """

    name: str
    presence: float
    replacement: float
    stated: float
    stated_replacement: float

    def within(self, allowance: float) -> bool:
        """Returns whether no difference exceeds its statement by more than the allowance."""
        return (
            self.presence <= self.stated + allowance
            and self.replacement <= self.stated_replacement + allowance
        )


@dataclasses.dataclass(frozen=True)
class Replay:
    """The result of `replay`.

    Attributes:
      sums: The gradient, each joint release, and "together", which is what the accounting prices.
      rounding: The difference that rounding of floats may add.
      finite: Whether all sums were finite.
      leaks: The names of the model's variables that a record changed without passing through the
        release.
      num_neighbours: The number of pairs of neighbouring data sets.
      worst: The pair with the largest share of its statement: the record's position, and the row of
        the neighbours; no values of records.

    ```python
    >>> measured = Measured("gradient", 0.9, 1.9, stated=1.0, stated_replacement=2.0)
    >>> result = Replay((measured,), 1e-6, True, leaks=(), num_neighbours=6, worst=(0, 3))
    >>> result.holds, result.attained
    (True, 0.9)

    ```
    """

    sums: tuple[Measured, ...]
    rounding: float
    finite: bool
    leaks: tuple[str, ...]
    num_neighbours: int
    worst: tuple[int, int]

    @property
    def holds(self) -> bool:
        """True if no difference exceeds its statement and nothing else is wrong."""
        within = all(measured.within(self.rounding) for measured in self.sums)
        return self.finite and not self.leaks and within

    @property
    def attained(self) -> float:
        """The largest measured presence over its statement.

        It is 1 if a record reached what the noise is scaled to.
        """
        return self.sums[-1].presence / self.sums[-1].stated

    def __str__(self) -> str:
        """Returns the result as plain text."""
        verdict = "holds" if self.holds else "DOES NOT HOLD"
        lines = [
            f"Replay on {self.num_neighbours} pairs of neighbouring records, "
            "with the same randomness:",
            f"the stated sensitivity {verdict}.",
        ]
        for measured in self.sums:
            lines.append(
                f"  {measured.name}: "
                f"presence {measured.presence:.6g} of {measured.stated:.6g} stated, "
                f"replacement {measured.replacement:.6g} of {measured.stated_replacement:.6g}"
            )
        if not any(measured.presence or measured.replacement for measured in self.sums):
            lines.append(
                "  Nothing was tried: no step drew these records, or none of them counts. "
                "Take more num_steps, or all records."
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
    """Measures how far one record moves the sums of the model's own step.

    The step runs without noise on the records, without record i, and with another record in its
    place. The randomness is the same in all runs, and the removed record is masked at its index, so
    that all other records keep their random numbers. The differences must then not exceed the
    sensitivity that the step states and that the noise is scaled to (contract 3), whatever the
    records hold. This works for every model, layer and loss. The variables and the ledger do not
    change.

    ```python
    model.compile(optimizer, epsilon=1.0, delta=1e-5)
    print(dpvi.audit.replay(model, x[:20], y[:20]))
    ```

    Args:
      model: A compiled model, fitted or not.
      x: Simulated or public records as for `fit`; 10 to 100 are enough. The result of an audit is
        *not private*.
      y: Their outcomes, likewise.
      sample_weight: Their weights, likewise.
      neighbours: Records to put in place of a record, `{"x": ..., "y": ..., "sample_weight": ...}`
        of any number of rows. By default rows of extreme values, NaN and infinities among them.
      at: The indices of the records to remove and replace; by default the first, the middle and the
        last.
      num_steps: The number of steps for each pair, with draws of their own.
      seed: The seed of the draws; None for fresh ones.
      **settings: Arguments of `model.make_data`, such as `batch_size`. By default a step takes all
        records, so that none is missed. With `unit_ids` and `max_rows_per_unit` a record is a
        person: all rows of a person are removed or replaced, in whichever records they are.

    Returns:
      The largest differences, with `holds` and a plain-text form.

    Raises:
      ValueError: The model draws random numbers that do not follow from the step's key, so that no
        step can be repeated.
    """
    check.count("num_steps", num_steps, 1)
    num = num_rows(x)
    if neighbours is not None and "unit_ids" in settings:
        raise ValueError(
            "neighbours with unit_ids: leave them out; persons of extreme rows are tried."
        )
    step = ObservedStep(
        model, x, y, sample_weight, num_steps=None, **{"batch_size": num, **settings}
    )
    num = step.num_rows
    records = tf.nest.map_structure(lambda part: part.numpy(), step.tensors)
    if neighbours is None:
        rows = _extremes(records)
    else:
        rows = convert_rows(model, "neighbours", neighbours)
    tf.nest.assert_same_structure(records, rows)
    key = new_key(seed)
    runs = _Runs(step, key, num_steps)
    full = runs(records)
    if not all(np.array_equal(a, b) for a, b in zip(full, runs(records), strict=True)):
        raise ValueError(
            "model: two steps with the same key differ, so none can be replayed. Draw from the key "
            "that the step passes, or leave out layers with random numbers of their own (Dropout) "
            "for the audit."
        )
    places = sorted({0, num // 2, num - 1}) if at is None else at
    largest = _Largest(step.parts, step.mechanism.sensitivity)
    for place in places:
        keep = ~_of_same_person(step.grouping, settings.get("unit_ids"), num, place)
        removed = runs(records, keep)
        largest.compare(full, removed, None, (place, -1))
        for row in range(len(tf.nest.flatten(rows)[0])):
            swapped = runs(with_row(records, rows, place, row))
            largest.compare(swapped, removed, full, (place, row))
    size = full[0].shape[1]
    allowance = rounding(step.dtype, num, size) * step.mechanism.sensitivity.add_or_remove
    return largest.result(allowance, runs.names)


def _of_same_person(units: Units | None, unit_ids: Identifiers, num: int, place: int) -> np.ndarray:
    """Returns which records hold a row of the person of one of them, by the identifiers alone."""
    if units is None:
        return np.arange(num) == place
    own = list(unit_ids)[units.places[place, 0]]
    is_own = np.array([each == own for each in unit_ids])
    return (is_own[units.places] & units.mask).any(axis=1)


class _Runs:
    """Runs a step without noise, each time from the same state.

    A call returns the released values, followed by the values of all variables after the step.
    """

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
    """Returns the largest l2 norm of the rows; infinite if a row is not finite."""
    norms = np.sqrt(np.sum(np.square(difference), axis=1))
    return float(np.max(np.where(np.isfinite(norms), norms, np.inf)))


def _extremes(records: dict[str, Structure]) -> dict[str, Structure]:
    """Returns records of extreme floats; integers, such as labels, are of the first records."""
    num = len(tf.nest.flatten(records)[0])

    def rows(part: np.ndarray) -> np.ndarray:
        extreme = part[np.arange(2 * len(EXTREMES)) % num].copy()
        if part.dtype.kind == "f":
            values = np.asarray(EXTREMES, part.dtype)
            extreme[: len(values)] = values.reshape(-1, *[1] * (part.ndim - 1))
            # Beside rows of a single value: ordinary records, much enlarged.
            with np.errstate(over="ignore"):
                extreme[len(values) :] *= 1e3
        return extreme

    return tf.nest.map_structure(rows, records)


def rounding(dtype: np.dtype | type, num_records: int, num_coordinates: int) -> float:
    """Returns an allowance for rounding, in clips.

    Args:
      dtype: The float dtype of the sums.
      num_records: The number of vectors in a sum.
      num_coordinates: The number of their coordinates, over which a record's scale is rounded.
    """
    return float(np.finfo(dtype).eps) * (8 + math.sqrt(num_coordinates) + 2 * num_records)


def with_row(records: Structure, other: Structure, at: int, row: int) -> Structure:
    """Returns a copy of records in which one is replaced.

    Args:
      records: The records, a structure of arrays.
      other: Other records, of the same structure.
      at: The index of the record to replace.
      row: The index of the other record that takes its place.
    """

    def put(part: np.ndarray, source: np.ndarray) -> np.ndarray:
        changed = np.array(part)
        changed[at] = source[row]
        return changed

    return tf.nest.map_structure(put, records, other)
