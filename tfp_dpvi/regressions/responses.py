"""Outcomes of formulas: a column, NumPy's function of it, successes among trials, or censored."""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from tfp_dpvi.data import Column, Date, Integer
from tfp_dpvi.data.columns import Numeric

if TYPE_CHECKING:
    import pandas

    from tfp_dpvi.data import Schema

MOST_TRIALS = 2**20
"""Trials of one record: float32 holds so many and their successes exactly."""

TRIALS = ("p", "prop", "proportion")
"""Functions of successes among trials."""

CENSORED = "censored"
"""The function of an outcome and its limit."""

Constants = Mapping[str, Any]
"""Public numbers or lists by the names that a formula has for them."""

COMPARISONS = ("==", "!=", "<", "<=", ">", ">=")
"""Signs that compare two values."""

SIDES = ("right", "left")
"""Where outcomes are not seen: above their limit, or below it."""

MODULES = ("np", "numpy")

UFUNCS = types.SimpleNamespace(
    **{
        name: value
        for name, value in vars(np).items()
        if isinstance(value, np.ufunc) and value.signature is None and value.nin == 1
    }
)
"""NumPy's functions of each value by itself."""

_STATUS = (
    "a status says who is censored and not until when the others were followed, which simulated "
    'outcomes need:\nwrite "censored(time, followup) ~ terms", with a column of the time until '
    "which each record was followed, or a public number"
)
# What formulae reads as an outcome and no family fits, and what to do instead.
_NOT_FITTED = {
    "Surv": _STATUS,
    "truncated": (
        "no family is truncated; pass a truncated distribution as the likelihood of a DPVI model"
    ),
    "constrained": (
        "no family has bounds of your own; take one whose outcomes have them, such as "
        'family="beta", or a likelihood of your own in a DPVI model'
    ),
    "weighted": (
        "name the outcome's column alone, and pass the column of survey weights as weights="
    ),
}


class Argument(Protocol):
    """An argument of a call: a `name`, or a public `value`."""


@runtime_checkable
class Call(Argument, Protocol):
    """A call in a formula, as formulae reads it.

    Attributes:
      callee: The function's name.
      args: The arguments.
      kwargs: Those that are named.
      stateful_transform: The function, if it learns from the first values that it sees.
    """

    callee: str
    args: Sequence[Argument]
    kwargs: Mapping[str, Argument]
    stateful_transform: Callable[..., np.ndarray] | None

    def eval(self, data: pandas.DataFrame, env: Any) -> np.ndarray:
        """Returns the function's values.

        Args:
          data: Columns.
          env: Names that the formula knows, of formulae.
        """


@dataclasses.dataclass(frozen=True)
class Limit:
    """The limit of a censored outcome.

    Attributes:
      at: The column of each record's limit, or the public number that is all records'.
      side: "right" for outcomes that are not seen above it, "left" for those below.
    """

    at: str | float
    side: str = "right"

    @property
    def in_words(self) -> str:
        """The limit and what it does to outcomes, as a sentence."""
        beyond = ("at or above", "more") if self.side == "right" else ("at or below", "less")
        return (
            f"censored: of outcomes {beyond[0]} {self.at} it is known that they are as much or "
            f"{beyond[1]}; predictions are of outcomes that no limit hides"
        )


def response_of(description: Any) -> tuple[str, Call | None]:
    """Returns the outcome's column, and the call of a function of it or None.

    Args:
      description: A formula's description by formulae.

    Raises:
      ValueError: There is no outcome, or none that a family fits.
    """
    response = description.response
    if response is None:
        raise ValueError('formula has no outcome: write "outcome ~ terms".')
    (component,) = response.term.components
    call = getattr(component, "call", None)
    if call is None:
        if component.reference is not None:
            raise ValueError(
                "formula: leave out the level of the outcome, and code it as Binary in the schema."
            )
        return component.name, None
    if call.callee in _NOT_FITTED:
        raise ValueError(f"formula has the outcome {call}: {_NOT_FITTED[call.callee]}.")
    name = getattr(call.args[0], "name", None) if call.args else None
    if call.callee in TRIALS:
        if name is None or len(call.args) != 2 or call.kwargs:
            raise ValueError(
                f"formula has the outcome {call}: write p(successes, trials), with a column and a "
                "column or a public number."
            )
        return name, call
    if call.callee == CENSORED:
        if name is None or len(call.args) not in (2, 3) or call.kwargs:
            raise ValueError(
                f"formula has the outcome {call}: write censored(time, followup), with a column "
                'and a column or a public number, or censored(value, limit, "left").'
            )
        return name, call
    names = component.var_names
    if len(names) != 1:
        raise ValueError(f"formula has the outcome {component.name}: use one column.")
    # A transformation with a state, scale(y), would take it from the records.
    if not all(is_of_one_value(each) for each in _parts_of([call]) if isinstance(each, Call)):
        raise ValueError(f"formula: the outcome may be a column or np.log of it, not {call}.")
    return next(iter(names)), call


def trials_of(
    call: Call | None, outcome: str, schema: Schema, constants: Constants
) -> str | int | None:
    """Returns the column or the number of trials of an outcome, or None if it has none.

    Args:
      call: The call of `response_of`.
      outcome: The outcome's column.
      schema: The description of all columns.
      constants: Public numbers that the formula names.

    Raises:
      ValueError: They are no numbers of trials.
    """
    if call is None or call.callee not in TRIALS:
        return None
    name, value = _second(call, constants)
    if isinstance(value, int | np.integer) and 1 <= value <= MOST_TRIALS:
        return int(value)
    column = schema.columns.get(name)
    is_unknown = name and column is None and name not in constants
    if is_unknown or (
        isinstance(column, Integer)
        and not (column.missing or name == outcome)
        and 0 <= column.lower <= column.upper <= MOST_TRIALS
    ):
        return name
    raise ValueError(
        f"formula has the outcome {call}: trials are a public integer from 1 to "
        f"{MOST_TRIALS}, or another column, Integer with lower=0 or more, upper at most "
        f"{MOST_TRIALS} and no missing=True."
    )


def limit_of(call: Any, outcome: str, schema: Schema, constants: Constants) -> Limit | None:
    """Returns the limit of a censored outcome, or None if it is not censored.

    Args:
      call: The call of `response_of`.
      outcome: The outcome's column.
      schema: The description of all columns.
      constants: Public numbers that the formula names.

    Raises:
      ValueError: It is no limit, or not within the outcome's bounds.
    """
    if call is None or call.callee != CENSORED:
        return None
    side = getattr(call.args[2], "value", None) if len(call.args) == 3 else "right"
    name, value = _second(call, constants)
    column = schema.columns.get(name)
    if side not in SIDES:
        raise ValueError(
            f'formula has the outcome {call}: the third argument is "right", as without one, or '
            '"left"; other kinds of censoring are not known.'
        )
    if name and name not in constants and column is None:
        # Named with the formula's other unknown columns.
        return Limit(name, side)
    if isinstance(column, Numeric) and not isinstance(column, Date):
        if not column.missing and name != outcome:
            _check_within(call, schema.columns.get(outcome), (column.lower, column.upper), side)
            return Limit(name, side)
    elif column is None and isinstance(value, int | float | np.number) and math.isfinite(value):
        _check_within(call, schema.columns.get(outcome), (float(value), float(value)), side)
        return Limit(float(value), side)
    raise ValueError(f"formula has the outcome {call}: {_STATUS}.")


def _check_within(call: Call, column: Column | None, ends: tuple[float, float], side: str) -> None:
    """Refuses limits that an outcome's own bounds could not reach."""
    if not isinstance(column, Numeric):
        return
    is_beyond = ends[1] > column.upper if side == "right" else ends[0] < column.lower
    if is_beyond or ends[1] < column.lower or ends[0] > column.upper:
        bound = "upper at least the largest" if side == "right" else "lower at most the smallest"
        raise ValueError(
            f"formula has the outcome {call}: describe it with {bound} limit, so that its bounds "
            "hide nothing that is seen."
        )


def _second(call: Call, constants: Constants) -> tuple[str, Any]:
    """Returns the name of a call's second argument, or "", and its value if it is public."""
    second = call.args[1]
    name = str(getattr(second, "name", ""))
    return name, constants.get(name, getattr(second, "value", None))


def calls_of(description: Any) -> list[Call]:
    """Returns all calls of a formula's terms, also those within others.

    Args:
      description: A formula's description by formulae.
    """
    components: list[Any] = []
    for term in description.common_terms:
        components += getattr(term, "components", [])
    for term in description.group_terms:
        components += [*getattr(term.expr, "components", []), *term.factor.components]
    calls = [component.call for component in components if hasattr(component, "call")]
    return [part for part in _parts_of(calls) if isinstance(part, Call)]


def comparisons_of(calls: Sequence[Call]) -> list[tuple[Argument, Argument]]:
    """Returns both sides of the comparisons within calls, such as of {x > 3}.

    Args:
      calls: Calls of a formula; braces are one.
    """
    parts = _parts_of(calls)
    return [part.args for part in parts if getattr(part, "symbol", "") in COMPARISONS]


def is_read_otherwise(tree: Argument | list[Argument] | None) -> bool:
    """Returns whether formulae reads operators in another order than Python does.

    It would square -x in {-x ** 2}, and reads {a ** b ** c} from the left, as it does {a < b < c}.

    Args:
      tree: A formula, or a part of it, as formulae's parser returns it.
    """
    symbol, first = (_symbol(part) for part in (tree, getattr(tree, "left", None)))
    is_first = (symbol == "**" and first) or (symbol in COMPARISONS and first in COMPARISONS)
    parts = tree if isinstance(tree, list) else getattr(tree, "__dict__", {}).values()
    return bool(is_first) or any(map(is_read_otherwise, parts))


def _symbol(part: Argument | list[Argument] | None) -> str:
    """Returns the operator of a part of a formula without parentheses, or ""."""
    return str(getattr(getattr(part, "operator", None), "lexeme", ""))


def _parts_of(calls: Sequence[Argument]) -> list[Any]:
    """Returns calls and all that is within them."""
    parts = list(calls)
    for part in parts:
        parts += [*getattr(part, "args", ()), *getattr(part, "kwargs", {}).values()]
    return parts


def is_of_one_value(call: Call) -> bool:
    """Returns whether a call is NumPy's function of each value, with no other argument.

    A second one would be written to, and `where=` would leave values out.

    Args:
      call: The call.
    """
    return ufunc_of(call.callee) is not None and len(call.args) == 1 and not call.kwargs


def ufunc_of(name: str) -> np.ufunc | None:
    """Returns NumPy's function of each value by itself that a formula calls, if it is one.

    Args:
      name: The name that the formula has, such as "np.log".
    """
    parts = name.split(".")
    return getattr(UFUNCS, parts[1], None) if len(parts) == 2 and parts[0] in MODULES else None
