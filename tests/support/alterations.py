"""Alterations of what the library reads from outside: of JSON values, and of bytes."""

from __future__ import annotations

import copy
import inspect
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

_ODD = (
    None, True, False, 0, -1, 1, 7, 2**31, 2**63, -(2**70), 10**400, 0.5, -0.0, 1e308, 5e-324,
    math.nan, math.inf, -math.inf, "", "x", "1.0", "inf", "a\x1b[2J", "\ud800", "pld", "poisson",
    "replace_one", [], {}, [[]], [None], {"": 0}, {"name": "poisson"}, [0.0, 1.0], "x" * 400,
    "tfp_dpvi._random:os.system", "os:system", {"list": []}, {"value": "os:system", "fields": {}},
)  # fmt: skip
_LEAVES = st.one_of(st.sampled_from(_ODD), st.integers(), st.floats(), st.text(max_size=8))
VALUES = st.one_of(
    _LEAVES,
    st.recursive(
        _LEAVES,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
        max_leaves=4,
    ),
)
_ACTIONS = st.sampled_from(["replace", "replace", "replace", "delete", "add", "nest", "move"])
#: Of a JSON value: what is done, where, and a value that is put there.
OF_JSON = st.lists(st.tuples(_ACTIONS, st.integers(0, 10**6), VALUES), min_size=1, max_size=3)
_SIZES = st.floats(0.0, 1.0, exclude_max=True)
#: Of bytes: what is done, where (as a share of them), and bytes that are put there.
OF_BYTES = st.lists(
    st.tuples(
        st.sampled_from(["flip", "flip", "write", "insert", "delete", "cut"]),
        _SIZES,
        st.binary(min_size=1, max_size=8),
    ),
    min_size=1,
    max_size=3,
)


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Returns all containers in a JSON value, each with each of its keys."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    found = []
    for key, part in items:
        found.append((value, key))
        if isinstance(part, dict | list):
            found += _places(part)
    return found


def alter_json(value: dict[str, Any], alterations: list[tuple[str, int, Any]]) -> dict[str, Any]:
    """Returns a copy of a JSON object with parts replaced, deleted, added, nested or moved."""
    altered = copy.deepcopy(value)
    for action, where, new in alterations:
        places = _places(altered)
        if not places:
            break
        container, key = places[where % len(places)]
        if action == "replace":
            container[key] = copy.deepcopy(new)
        elif action == "delete":
            del container[key]
        elif action == "nest":
            container[key] = [container[key]]
        elif action == "move":
            other, other_key = places[where * 31 % len(places)]
            container[key] = copy.deepcopy(other[other_key])
        elif isinstance(container, dict):
            container[new if isinstance(new, str) else "more"] = copy.deepcopy(new)
        else:
            container.append(copy.deepcopy(new))
    return altered


def alter_bytes(data: bytes, alterations: list[tuple[str, float, bytes]]) -> bytes:
    """Returns bytes of which some are changed, overwritten, inserted or deleted, or all after a place."""
    for action, where, new in alterations:
        at = int(where * len(data))
        if action == "flip" and data:
            data = data[:at] + bytes([data[at] ^ (new[0] or 1)]) + data[at + 1 :]
        elif action == "write":
            data = data[:at] + new + data[at + len(new) :]
        elif action == "insert":
            data = data[:at] + new + data[at:]
        elif action == "delete":
            data = data[:at] + data[at + len(new) :]
        elif action == "cut":
            data = data[:at]
    return data


def for_many(quick, slow, **strategies):
    """A test of `quick` cases, and a slow one of `slow`; each says how many cases ran."""

    def decorate(check):
        def run(cases, **fixtures):
            ran = []

            @settings(max_examples=cases)
            @given(**strategies)
            def each(**drawn):
                ran.append(None)
                check(**fixtures, **drawn)

            each()
            print(f"{check.__name__}: {len(ran)} cases")
            assert len(ran) >= cases

        needed = inspect.signature(check).parameters.keys() - strategies.keys()
        run.__name__, run.__doc__ = check.__name__, check.__doc__
        run.__signature__ = inspect.Signature(
            [
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY)
                for name in ("cases", *sorted(needed))
            ]
        )
        cases = [quick, pytest.param(slow, marks=pytest.mark.slow)]
        return pytest.mark.timeout(3600)(pytest.mark.parametrize("cases", cases)(run))

    return decorate


def is_clear(error: BaseException) -> bool:
    """Returns whether an error says something, in two lines at most that can be printed."""
    text = str(error)
    text.encode()
    return bool(text.strip()) and len(text.splitlines()) <= 2
