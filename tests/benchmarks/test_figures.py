"""Which code a figure is of."""

import figures
import pytest
from harness import code_hash

CODE = '"""A module."""\n\ndef f(x):\n    "Doubles."\n    return 2 * x  # Twice.\n'


def test_words_are_no_code():
    same = code_hash({"a.py": 'def f(x):\n    """Doubles a number."""\n    return 2 * x\n'})
    assert code_hash({"a.py": CODE}) == same
    assert code_hash({"a.py": CODE.replace("2 *", "3 *")}) != same
    assert code_hash({"b.py": CODE}) != same


@pytest.mark.parametrize(
    ("content", "named", "state"),
    [
        ({"commit": "aaaaaaa", "rows": []}, {("aaaaaaa", False)}, "of today's code"),
        ({"commit": "bbbbbbb"}, {("bbbbbbb", False)}, "of older code"),
        ({"commit": "aaaaaaa-dirty"}, {("aaaaaaa", True)}, "of uncommitted changes"),
        (
            {"versions": ["revision ccccccc, Python 3.11"]},
            {("ccccccc", False)},
            "of an unknown revision",
        ),
        ({"versions": {"python": "3.11.7"}, "rows": 3}, set(), "names no revision"),
        (
            [{"revision": "aaaaaaa"}, {"revision": "bbbbbbb"}],
            {("aaaaaaa", False), ("bbbbbbb", False)},
            "of older code",
        ),
    ],
)
def test_the_state_of_a_figure(content, named, state):
    known = {"aaaaaaa": "today", "bbbbbbb": "older"}
    assert figures.revisions(content) == named
    assert figures.state_of(named, "today", known.get) == state
