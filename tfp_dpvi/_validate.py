"""Checks of arguments. Every message names the argument, the value and the fix.

No message shows records: an argument that may hold some is described by `shown`, `rows` and
`dtype_name`.
"""

import enum
import math
import operator
import re
from collections.abc import Collection
from typing import Any, SupportsFloat, SupportsIndex, TypeAlias, cast

import numpy as np
from dp_accounting import NeighboringRelation

#: An argument before it is checked.
Unchecked: TypeAlias = object

# The names of Python's and NumPy's types.
_BOOLEANS = ("bool", "bool_")
_RELATIONS = (NeighboringRelation.ADD_OR_REMOVE_ONE, NeighboringRelation.REPLACE_ONE)


def shown(value: Unchecked) -> str:
    """Returns an argument as text for a message.

    Numbers, strings and the like are shown as they are, all else by its type: a data set in the
    place of another argument is not printed.
    """
    plain = bool | int | float | str | bytes | enum.Enum | np.generic
    # A row of a structured array is a whole record.
    if value is None or (isinstance(value, plain) and not isinstance(value, np.void)):
        return repr(value)
    if isinstance(value, type):
        return f"the class {value.__name__}"
    kind = type(value).__name__
    article = "an" if kind[0] in "aeiouAEIOU" else "a"
    shape = getattr(value, "shape", None)
    return f"{article} {kind}" + ("" if shape is None else f" of shape {shape}")


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's text, or its type without one.

    Errors of other libraries have many lines.
    """
    return next(iter(str(error).splitlines()), type(error).__name__)


_LONGEST = 400
_ENDS = (
    "\n\nCall arguments received",
    "\n\t; NodeDef",
    " for '{{node",
    " [Op:",
    " Inputs received: [",
    "\n\nArguments received",
)


def plainly(error: BaseException) -> str:
    """Returns an error of TensorFlow or Keras in one line: its last cause, without its dump.

    Args:
      error: The error, whose text may be hundreds of lines long.
    """
    text = str(error)
    if "in user code:" in text:
        # Below the files and lines stands the error itself.
        text = re.split(r"\n\s+(?=\w+(?:Error|Exception)\b: )", text)[-1]
        text = re.sub(r"\n[ \t]+", "\n", text.split(": ", 1)[-1])
    while text.startswith("Exception encountered when calling"):
        text = text.partition("\n\n")[2] or text.partition("\n")[0][10:]
    for end in _ENDS:
        text = text.partition(end)[0]
    text = re.sub(r"\{\{.*?\}\} ?", "", " ".join(text.split()))
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."


def rows(concerned: np.ndarray) -> str:
    """Returns the number of rows concerned as text.

    Args:
      concerned: A bool array whose first dimension runs over records.
    """
    num = int(concerned.reshape(len(concerned), -1).any(axis=1).sum())
    return "1 row" if num == 1 else f"{num} rows"


def dtype_name(dtype: np.dtype) -> str:
    """Returns a dtype's name, without the width of strings, which is that of the longest value."""
    return {"U": "str", "S": "bytes", "V": "void"}.get(dtype.kind, str(dtype))


def _is_scalar(value: Unchecked) -> bool:
    """Returns whether a value is neither a bool nor an array, which may hold records."""
    return type(value).__name__ not in _BOOLEANS and not tuple(getattr(value, "shape", ()))


def real(name: str, value: Unchecked, fix: str) -> float:
    """Returns `value` as a float.

    Args:
      name: The name of the argument.
      value: The argument.
      fix: What to do, for the message.

    Raises:
      TypeError: The value is a bool, a string or anything else that is no real number.
      ValueError: The value is NaN, or larger than any float.
    """
    if not _is_scalar(value) or not hasattr(value, "__float__"):
        raise TypeError(f"{name}={shown(value)} is not a number; {fix}.")
    try:
        result = float(cast(SupportsFloat, value))
    except OverflowError:
        raise ValueError(f"{name} is larger than any float; {fix}.") from None
    if math.isnan(result):
        raise ValueError(f"{name} is NaN; {fix}.")
    return result


def positive(
    name: str, value: Unchecked, fix: str = "pass a finite number greater than 0"
) -> float:
    """Returns `value` as a finite float greater than zero.

    Args:
      name: The name of the argument.
      value: The argument.
      fix: What to do, for the message.

    Raises:
      TypeError, ValueError: The value is no such number.
    """
    result = real(name, value, fix)
    if not 0.0 < result < math.inf:
        raise ValueError(f"{name}={value!r} must be greater than 0 and finite; {fix}.")
    return result


def non_negative(
    name: str, value: Unchecked, fix: str = "pass a finite number of at least 0"
) -> float:
    """Returns `value` as a finite float of at least zero.

    Args:
      name: The name of the argument.
      value: The argument.
      fix: What to do, for the message.

    Raises:
      TypeError, ValueError: The value is no such number.
    """
    result = real(name, value, fix)
    if not 0.0 <= result < math.inf:
        raise ValueError(f"{name}={value!r} must be at least 0 and finite; {fix}.")
    return result


def epsilon(value: Unchecked, name: str = "epsilon") -> float:
    """Returns a target epsilon: finite and greater than zero.

    Args:
      value: The argument.
      name: The name of the argument.

    Raises:
      TypeError, ValueError: The value is no such number.
    """
    return positive(name, value, "pass the privacy loss to allow, for example epsilon=1.0")


def delta(value: Unchecked, name: str = "delta") -> float:
    """Returns delta, strictly between 0 and 1.

    Args:
      value: The argument.
      name: The name of the argument.

    Raises:
      TypeError, ValueError: The value is no such number.
    """
    fix = "pass a probability well below 1 over the number of records, for example delta=1e-5"
    result = real(name, value, fix)
    if not 0.0 < result < 1.0:
        raise ValueError(f"{name}={value!r} must lie strictly between 0 and 1; {fix}.")
    return result


def probability(name: str, value: Unchecked, fix: str = "pass a number in (0, 1]") -> float:
    """Returns a probability in (0, 1].

    Args:
      name: The name of the argument.
      value: The argument.
      fix: What to do.

    Raises:
      TypeError, ValueError: The value is no such number.
    """
    result = real(name, value, fix)
    if not 0.0 < result <= 1.0:
        raise ValueError(f"{name}={value!r} must lie in (0, 1]; {fix}.")
    return result


def count(name: str, value: Unchecked, minimum: int = 0) -> int:
    """Returns an integer of at least `minimum`.

    Args:
      name: The name of the argument.
      value: The argument.
      minimum: The smallest integer that is allowed.

    Raises:
      TypeError: The value is not an integer; floats are none.
      ValueError: The value is too small.
    """
    fix = f"pass an integer of at least {minimum}"
    if not _is_scalar(value) or not hasattr(value, "__index__"):
        raise TypeError(f"{name}={shown(value)} is not an integer; {fix}.")
    result = operator.index(cast(SupportsIndex, value))
    if result < minimum:
        raise ValueError(f"{name}={value!r} must be at least {minimum}; {fix}.")
    return result


def fields(
    what: str,
    data: Unchecked,
    *,
    needed: Collection[str] = (),
    known: Collection[str] | None = None,
) -> dict[str, Any]:
    """Returns a copy of a JSON object with the right fields.

    Args:
      what: What the object describes, for the message.
      data: The object.
      needed: The names of the fields that it must have.
      known: The names of the fields that it may have; None for any.

    Raises:
      ValueError: The data are no JSON object, lack a field, or have an unknown one.
    """
    if not isinstance(data, dict):
        raise ValueError(f"{what} is no JSON object; pass what its to_json returned.")
    missing = sorted(set(needed) - data.keys())
    unknown = sorted(data.keys() - set(data if known is None else known))
    if missing or unknown:
        raise ValueError(
            f"{what} lacks the fields {missing} and has the unknown fields {unknown!a:.200}; pass "
            "what its to_json returned."
        )
    return dict(data)


def one_of(name: str, value: Unchecked, choices: Collection[str]) -> str:
    """Returns `value` if it is among the choices.

    Args:
      name: The name of the argument.
      value: The argument.
      choices: The strings to choose from.

    Raises:
      ValueError: The value is none of them.
    """
    if not isinstance(value, str) or value not in choices:
        raise ValueError(
            f"{name}={shown(value)} is unknown; pass one of {', '.join(map(repr, choices))}."
        )
    return value


def text(name: str, value: Unchecked, fix: str) -> str:
    """Returns `value` if it is one non-blank line of printable text.

    Args:
      name: The name of the argument.
      value: The argument.
      fix: What to do, for the message.

    Raises:
      TypeError: The value is no such text.
    """
    if not (isinstance(value, str) and value.isprintable() and value.strip()):
        described = ascii(value) if isinstance(value, str) else shown(value)
        raise TypeError(f"{name}={described} must be one line of printable text; {fix}.")
    return value


def relation(value: Unchecked, name: str = "neighboring_relation") -> NeighboringRelation:
    """Returns the neighboring relation as dp_accounting's enum.

    Args:
      value: The relation, or its name in lower case.
      name: The name of the argument.

    Raises:
      TypeError: The value is no relation.
      ValueError: The relation is unknown or has no accounting here.
    """
    fix = "pass dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE or .REPLACE_ONE"
    if isinstance(value, str):
        try:
            value = NeighboringRelation[value.upper()]
        except KeyError:
            raise ValueError(f"{name}={value!r} is unknown; {fix}.") from None
    if not isinstance(value, NeighboringRelation):
        raise TypeError(f"{name}={shown(value)} is not a NeighboringRelation; {fix}.")
    if value not in _RELATIONS:
        raise ValueError(f"{name}={value.name} has no accounting here; {fix}.")
    return value
