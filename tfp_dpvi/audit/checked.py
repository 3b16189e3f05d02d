"""`replay_check`: the effect of one record on the sums that `DPVI.check` releases."""

from __future__ import annotations

from typing import Any

import numpy as np

from tfp_dpvi import _random
from tfp_dpvi._tf import Structure, tf
from tfp_dpvi.audit.canaries import convert_rows
from tfp_dpvi.audit.observed import Setting
from tfp_dpvi.audit.replayed import EXTREMES, Measured, Replay, with_row
from tfp_dpvi.checking.declared import Columns, Declared, declare
from tfp_dpvi.checking.outcomes import Predictor, draws_of
from tfp_dpvi.checking.release import Subjects, contributions
from tfp_dpvi.models import DPVI
from tfp_dpvi.models.checking import CheckSettings, subjects_of

# Sums of multiples of a grid are exact; what is left is the division by the sensitivity.
_ROUNDING = 1e-9


def replay_check(
    model: DPVI,
    x: Structure,
    y: Structure,
    *,
    columns: Columns | None = None,
    neighbours: dict[str, Structure] | None = None,
    at: tuple[int, ...] | None = None,
    seed: int | None = None,
    **settings: Setting,
) -> Replay:
    """Measures how far one record moves the sums that `DPVI.check` releases.

    The sums are computed without noise on the records, without record i, and with another record in
    its place, with the same random numbers: those of the posterior's draws, of predicted outcomes
    and of ties. The differences must not exceed the sensitivity that the noise is scaled to
    (contract 3). Nothing is charged; the result of an audit is *not private*.

    ```python
    print(dpvi.audit.replay_check(model, x[:20], y[:20], columns={0: [0.0]}))
    ```

    Args:
      model: A compiled model, fitted or not.
      x: Simulated or public records as for `check`; 10 to 100 are enough.
      y: Their outcomes.
      columns: As in `DPVI.check`.
      neighbours: Records to put in place of a record, `{"x": ..., "y": ...}`. By default rows of
        extreme values, NaN and infinities among them.
      at: The indices of the records to remove and replace; by default the first, the middle and the
        last.
      seed: The seed of the draws; None for fresh ones.
      **settings: `unit_ids` and `max_rows_per_unit` of `DPVI.check`: a person's rows are then
        removed together.

    Returns:
      The largest differences, with `holds` and a plain-text form.
    """
    subjects = subjects_of(model, x, y, seed=0, validate=False, **settings)
    declared = CheckSettings(columns).declared(model.bayesian_model, model.posterior, subjects)
    predictor = Predictor(model.bayesian_model, is_binary=declared.outcome.is_binary)
    key = _random.new_key(seed)
    draws = draws_of(model.posterior, seed)

    def rows_of(records: dict[str, Any]) -> np.ndarray:
        changed = Subjects(records["x"], records["y"], subjects.units)
        # A record's bins are its own.
        again = declare(declared.outcome, changed.x, columns, declared.score_range, declared.level)
        return contributions(predictor, draws, again, changed, key)

    records = {"x": subjects.x, "y": subjects.y}
    rows = _extremes(records)
    if neighbours is not None:
        rows = tf.nest.map_structure(np.asarray, convert_rows(model, "neighbours", neighbours))
    full = rows_of(records)
    num = len(subjects.y)
    places = sorted({0, num // 2, num - 1}) if at is None else at
    largest = _Largest(declared)
    for place in places:
        unit = _unit_of(subjects, place)
        without = np.delete(full, unit, axis=0).sum(axis=0)
        largest.take(full.sum(axis=0) - without, presence=True, pair=(place, -1))
        for row in range(len(rows["y"])):
            swapped = rows_of(dict(with_row(records, rows, place, row)))
            largest.take(swapped.sum(axis=0) - without, presence=True, pair=(place, row))
            difference = swapped.sum(axis=0) - full.sum(axis=0)
            largest.take(difference, presence=False, pair=(place, row))
    return largest.result()


def _unit_of(subjects: Subjects, place: int) -> int:
    """Returns the number of the unit that a row is of."""
    if subjects.units is None:
        return place
    used = subjects.units.places == place
    return int(np.argmax((used & subjects.units.mask).any(axis=1)))


def _extremes(records: dict[str, Any]) -> dict[str, Any]:
    """Returns pairs of extreme values of inputs and outcomes, and ordinary ones among them."""
    outcomes = np.array([0.0, 1.0, 5.0, -1.0, 1e15, -1e30, np.nan, np.inf])
    num = len(EXTREMES) * 2

    def part(array: np.ndarray, values: np.ndarray) -> np.ndarray:
        chosen = array[np.arange(num) % len(array)].copy()
        if array.dtype.kind == "f":
            filled = np.resize(np.asarray(values, array.dtype), len(EXTREMES))
            chosen[: len(EXTREMES)] = filled.reshape(-1, *[1] * (array.ndim - 1))
        return chosen

    inputs = tf.nest.map_structure(lambda array: part(array, np.array(EXTREMES)), records["x"])
    extreme = part(records["y"], outcomes)
    # Ordinary inputs with extreme outcomes too.
    if extreme.dtype.kind == "f":
        extreme[len(EXTREMES) :] = np.resize(outcomes, len(EXTREMES))
    return {"x": inputs, "y": extreme}


class _Largest:
    """The largest differences so far, over the release's stated sensitivity."""

    def __init__(self, declared: Declared) -> None:
        unit = declared.sensitivity.add_or_remove
        first = 0
        self._parts: list[tuple[str, slice, float, float]] = []
        for block in declared.blocks:
            columns = slice(first, first + len(block.matrix))
            first = columns.stop
            self._parts.append(
                (block.name, columns, block.presence / unit, block.replacement / unit)
            )
        replace = declared.sensitivity.replace / unit
        self._parts.append(("together", slice(None), 1.0, replace))
        self._unit = unit
        self._found = np.zeros([len(self._parts), 2])
        self._worst = (0.0, (0, -1))
        self._pairs: set[tuple[int, int]] = set()

    def take(self, difference: np.ndarray, *, presence: bool, pair: tuple[int, int]) -> None:
        """Takes in a difference of sums."""
        self._pairs.add(pair)
        for number, (_, columns, stated, replaced) in enumerate(self._parts):
            length = float(np.linalg.norm(difference[columns])) / self._unit
            length = length if np.isfinite(length) else np.inf
            kind = 0 if presence else 1
            self._found[number, kind] = max(self._found[number, kind], length)
            share = length / (stated if presence else replaced)
            self._worst = max(self._worst, (share, pair))

    def result(self) -> Replay:
        """Returns the result."""
        sums = tuple(
            Measured(name, float(found[0]), float(found[1]), stated, replaced)
            for (name, _, stated, replaced), found in zip(self._parts, self._found, strict=True)
        )
        finite = bool(np.isfinite(self._found).all())
        return Replay(sums, _ROUNDING, finite, (), len(self._pairs), self._worst[1])
