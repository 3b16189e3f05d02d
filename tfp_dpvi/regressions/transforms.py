"""Centres and scales of transforms in a formula: those of the schema's typical values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from tfp_dpvi.data import Schema
from tfp_dpvi.data.columns import Numeric
from tfp_dpvi.regressions.responses import Call

CENTRED = ("center", "scale", "standardize")
# Stateful ones take their state from invented records, and no other.
TRANSFORMS = (*CENTRED, "bs", "cr", "poly")
# Of these, those whose state is not that of bounds and public knots.
_TYPICAL = (*CENTRED, "poly")


class Transform(Protocol):
    """A transform of formulae.

    Attributes:
      mean: What `center` and `scale` subtract.
      std: By what `scale` divides.
    """

    mean: float
    std: float

    def __call__(self, x: np.ndarray, *args: float, **settings: float) -> np.ndarray:
        """Returns transformed values.

        Args:
          x: Values, [n].
          *args: Other arguments.
          **settings: Likewise.
        """


class Typical:
    """A transform of formulae with the state of typical values.

    formulae takes it from the first values that it sees, which here are all levels and bounds: far
    bounds would then decide the unit of `scale(x)`.

    Args:
      transform: The transform, without a state.
      typical: The values from which it takes its state, [n]; None for those that it sees first
        without the first `num_ends`.
      num_ends: The number of levels and bounds that come first.
    """

    def __init__(self, transform: Transform, typical: np.ndarray | None, num_ends: int) -> None:
        self.transform = transform
        self._typical, self._num_ends = typical, num_ends
        self._is_set = False

    def __call__(self, x: np.ndarray, *args: float, **settings: float) -> np.ndarray:
        """Returns transformed values; the first call sets the state.

        Args:
          x: Values, [n].
          *args: Other arguments of the transform.
          **settings: Likewise.
        """
        if not self._is_set:
            self._is_set = True
            seen = np.asarray(x)[self._num_ends :] if self._typical is None else self._typical
            # What is the same of all invented records has the state of its ends.
            varies = np.ptp(np.asarray(seen, np.float64)) > 0.0
            self.transform(seen if varies else x, *args, **settings)
        return self.transform(x, *args, **settings)


def set_typical(
    calls: Sequence[Call],
    schema: Schema,
    transforms: Mapping[str, Callable[[], Transform]],
    num_ends: int,
) -> None:
    """Lets calls of a formula take their centres and scales from typical values.

    Args:
      calls: All calls of the formula, before it is evaluated.
      schema: The description of its columns.
      transforms: formulae's transforms by name.
      num_ends: See `Typical`.
    """
    for call in calls:
        if call.callee not in _TYPICAL:
            continue
        first = call.args[0] if call.args else call.kwargs.get("x")
        column = schema.columns.get(getattr(first, "name", ""))
        typical = None
        if call.callee in CENTRED and isinstance(column, Numeric):
            # Two values with exactly this mean and deviation.
            typical = column.location + column.deviation * np.array([-1.0, 1.0])
        call.stateful_transform = Typical(transforms[call.callee](), typical, num_ends)


def in_words(calls: Sequence[Call]) -> list[str]:
    """Returns the centre, and the unit, of what a formula centres or scales.

    Args:
      calls: All calls of the formula, after it was evaluated.
    """
    found = {}
    for call in calls:
        if call.callee in CENTRED and isinstance(call.stateful_transform, Typical):
            state = call.stateful_transform.transform
            inner = str(call).partition("(")[2].removesuffix(")").removeprefix("x=")
            sign = "+" if state.mean < 0.0 else "-"
            centred = f"{inner} {sign} {abs(state.mean):.6g}"
            is_scaled = call.callee != "center"
            value = f"({centred}) / {state.std:.6g}" if is_scaled else centred
            found[str(call)] = f"{call}: {value}"
    return list(found.values())
