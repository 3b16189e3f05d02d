"""Says of each figure's JSON whether the library's code is still that which it was made with.

    python benchmarks/figures.py

Comments and docstrings do not count. A figure of a revision that this repository does not have, or of
uncommitted changes, cannot be made again.
"""

from __future__ import annotations

import functools
import json
import pathlib
import re
from collections import Counter
from typing import Any

from harness import code_hash, code_of

ROOT = pathlib.Path(__file__).resolve().parents[1]

REVISION = re.compile(r"(?:revision )?([0-9a-f]{7,40})(-dirty)?\b")


def revisions(value: Any, key: str = "") -> set[tuple[str, bool]]:
    """Returns the revisions that a JSON names, and whether each had uncommitted changes."""
    if isinstance(value, dict):
        return set().union(*(revisions(part, name) for name, part in value.items()))
    if isinstance(value, list):
        return set().union(*(revisions(part, key) for part in value[:50]))
    if not isinstance(value, str) or key not in ("commit", "revision", "setup", "versions"):
        return set()
    match = REVISION.match(value.partition("revision ")[2] or value)
    return {(match[1], bool(match[2]))} if match else set()


def state_of(named: set[tuple[str, bool]], today: str, code: Any) -> str:
    """Returns what is known of a figure whose JSON names these revisions.

    Args:
      named: The revisions.
      today: The hash of today's code.
      code: A function from a revision to the hash of its code, or None.
    """
    if not named:
        return "names no revision"
    hashes = {code(revision) for revision, _ in named}
    if any(is_dirty for _, is_dirty in named):
        return "of uncommitted changes"
    if None in hashes:
        return "of an unknown revision"
    return "of today's code" if hashes == {today} else "of older code"


def main() -> None:
    """Prints the state of each figure, and how many have each."""
    today, code = code_hash(), functools.cache(code_of)
    states: Counter[str] = Counter()
    for path in sorted((ROOT / "docs" / "figures").rglob("*.json")):
        named = revisions(json.loads(path.read_text(encoding="utf-8")))
        state = state_of(named, today, code)
        states[state] += 1
        print(f"{path.relative_to(ROOT)}: {state} ({', '.join(sorted(each for each, _ in named))})")
    print(", ".join(f"{number} {state}" for state, number in states.most_common()))


if __name__ == "__main__":
    main()
