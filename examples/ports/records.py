"""The records of the ports: public sets that need no network, or made up where there is none.

Adult and MNIST are read as `examples/data.py` does, docstrings from the installed Python and NumPy's stack.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import pathlib
import pydoc_data.topics
import re
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator

import numpy as np

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))

from data import load_adult, load_mnist

Arrays = tuple[np.ndarray, np.ndarray]

LIMIT: int | None = None  # At most so many records to learn from; benchmarks/ports.py --quick.
NUMBERS = {
    "age": (40.0, 200.0),
    "education-num": (10.0, 6.0),
    "capital-gain": (1_000.0, 5e7),
    "capital-loss": (90.0, 2e5),
    "hours-per-week": (40.0, 150.0),
}  # And what one would say of the mean and variance of each without having seen the records.
CATEGORIES = {
    "workclass": 9,
    "education": 16,
    "marital-status": 7,
    "occupation": 15,
    "relationship": 6,
    "race": 5,
    "sex": 2,
    "native-country": 42,
}  # And how many each has, which is public.


def mnist(num: int = 20_000) -> tuple[Arrays, Arrays]:
    """Returns images [n, 28, 28, 1] from 0 to 1 and classes [n], to learn from and to test.

    The first 20,000 images, so that ten ports take ten minutes: pass `num=60_000` for all.
    """
    (x, y, _), (x_test, y_test, _) = load_mnist("train"), load_mnist("test")
    num = min(num, LIMIT or num)
    return (x[:num, ..., None], y[:num]), (x_test[..., None], y_test)


def adult() -> tuple[tuple[dict[str, np.ndarray], np.ndarray], ...]:
    """Returns columns [n, 1] by name, categories as integers, and incomes above 50,000 dollars."""
    x, y, names = load_adult()
    columns = {name: x[:, [names.index(name)]] for name in (*NUMBERS, *CATEGORIES)}
    columns = {
        name: column.astype("int64") if name in CATEGORIES else column
        for name, column in columns.items()
    }
    train = slice(0, min(32_561, LIMIT or 32_561))
    test = slice(32_561, None)
    return tuple(
        ({name: column[part] for name, column in columns.items()}, y[part])
        for part in (train, test)
    )


def adult_matrices() -> tuple[tuple[list[np.ndarray], np.ndarray], ...]:
    """Returns [numbers [n, 5], codes [n, 8]], where each column's codes follow those before it."""
    offsets = np.cumsum([0, *CATEGORIES.values()])
    parts = []
    for columns, y in adult():
        numbers = np.concatenate([columns[name] for name in NUMBERS], axis=1)
        codes = [columns[name] + start for name, start in zip(CATEGORIES, offsets, strict=False)]
        parts.append(([numbers, np.concatenate(codes, axis=1)], y))
    return tuple(parts)


@functools.cache
def docstrings() -> tuple[tuple[list[str], np.ndarray], ...]:
    """Returns docstrings' first paragraphs, and whether they are of NumPy and SciPy or of Python.

    Every tenth is to test.
    """
    libraries = [pathlib.Path(importlib.util.find_spec(name).origin) for name in ("numpy", "scipy")]
    folders = [(pathlib.Path(sysconfig.get_paths()["stdlib"]), 0)]
    folders += [(path.parent, 1) for path in libraries]
    pairs = sorted({(text, y) for folder, y in folders for text in _docstrings(folder)})
    order = np.random.default_rng(0).permutation(len(pairs))
    texts = [pairs[i][0] for i in order]
    y = np.array([pairs[i][1] for i in order], "int32")
    num = len(y) // 10
    stop = None if LIMIT is None else num + LIMIT
    return (texts[num:stop], y[num:stop]), (texts[:num], y[:num])


def _docstrings(folder: pathlib.Path) -> Iterator[str]:
    for path in folder.rglob("*.py"):
        parts = path.relative_to(folder).parts
        if {"site-packages", "test", "tests", "idlelib", "lib2to3"} & set(parts):
            continue
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                text = (ast.get_docstring(node) or "").split("\n\n")[0]
                if len(text.split()) > 3:
                    yield text


def public_words(num: int) -> list[str]:
    """Returns the most frequent words of Python's language reference, which `help` prints."""
    text = " ".join(pydoc_data.topics.topics.values()).lower()
    return [word for word, _ in Counter(re.findall(r"[a-z]+", text)).most_common(num)]


def ratings() -> tuple[Arrays, Arrays]:
    """Returns pairs [n, 2] of a user and a film, and ratings [n, 1] from 0 to 1. They are made up.

    500 users have rated 100 of 200 films each, by taste in three dimensions.
    """
    rng = np.random.default_rng(0)
    users, films = rng.normal(size=(500, 3)), rng.normal(size=(200, 3))
    quality = rng.normal(size=200)
    pairs = np.array([(u, f) for u in range(500) for f in rng.permutation(200)[:100]])
    score = quality[pairs[:, 1]] + 0.5 * (users[pairs[:, 0]] * films[pairs[:, 1]]).sum(1)
    y = 1.0 / (1.0 + np.exp(-score - 0.5 * rng.normal(size=len(score))))
    y = (np.round(4.0 * y) / 4.0)[:, None].astype("float32")
    order = rng.permutation(len(y))
    test, train = order[:5_000], order[5_000:][:LIMIT]
    return (pairs[train], y[train]), (pairs[test], y[test])


def waves() -> tuple[Arrays, Arrays]:
    """Returns x and y, [n, 1], of the regression in TensorFlow Probability's tutorial. Made up."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-20.0, 60.0, size=(22_000, 1))
    spread = 3.0 * (0.25 + ((x + 20.0) / 80.0) ** 2)
    y = 0.125 * x * (1.0 + np.sin(x)) + 5.0 + spread * rng.normal(size=x.shape)
    x, y = x.astype("float32"), y.astype("float32")
    return (x[2_000:][:LIMIT], y[2_000:][:LIMIT]), (x[:2_000], y[:2_000])
