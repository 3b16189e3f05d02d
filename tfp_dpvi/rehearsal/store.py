"""The file of a rehearsal: one row for each fit, so that an interrupted one goes on."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from typing import Any

from tfp_dpvi import _validate as check

# Raised with a version whose fits are others.
FORMAT = 1
# Seconds between writes.
_EVERY = 2.0

Row = dict[str, Any]
"""The figures of one fit, JSON-ready."""


class Store:
    """Rows by the number of records, epsilon and the number of the data set.

    Args:
      path: A file, which is read if it exists; None for memory.
      header: What all rows have in common, JSON-ready.

    Raises:
      ValueError: The file is of another rehearsal, or damaged.
    """

    def __init__(self, path: str | os.PathLike[str] | None, header: dict[str, Any]) -> None:
        self._path = None if path is None else os.fspath(path)
        self._header = header
        self._rows: dict[str, dict[str, Row]] = {}
        self._written = time.monotonic()
        if self._path is not None and os.path.exists(self._path):
            self._rows = self._read(self._path)

    def _read(self, path: str) -> dict[str, dict[str, Row]]:
        try:
            with open(path, encoding="utf-8") as file:
                stored = json.load(file)
            known = {**stored["header"]}
            rows: dict[str, dict[str, Row]] = stored["rows"]
            is_right = stored["format"] == FORMAT
        except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(
                f"path={path!r} is no file of a rehearsal ({type(error).__name__}): choose another."
            ) from None
        wanted = json.loads(json.dumps(self._header))
        other = [name for name in wanted if wanted[name] != known.get(name)]
        if other or not is_right:
            raise ValueError(
                f"path={path!r} has fits with another {', '.join(other) or 'format'}: choose "
                "another path, or delete it."
            )
        return rows

    def get(self, num_records: int, epsilon: float, number: int) -> Row | None:
        """Returns the row of a fit, or None.

        Args:
          num_records: The number of records.
          epsilon: The epsilon.
          number: The number of the data set.
        """
        return self._rows.get(_cell(num_records, epsilon), {}).get(str(number))

    def rows(self, num_records: int, epsilon: float, num: int) -> list[Row]:
        """Returns the rows of the first data sets, in order.

        Args:
          num_records: The number of records.
          epsilon: The epsilon.
          num: The number of data sets.
        """
        cell = self._rows.get(_cell(num_records, epsilon), {})
        return [cell[str(number)] for number in range(num) if str(number) in cell]

    def add(self, num_records: int, epsilon: float, number: int, row: Row) -> None:
        """Adds the row of a fit, and writes the file every few seconds.

        Args:
          num_records: The number of records.
          epsilon: The epsilon.
          number: The number of the data set.
          row: The row.
        """
        self._rows.setdefault(_cell(num_records, epsilon), {})[str(number)] = row
        if time.monotonic() - self._written > _EVERY:
            self.write()

    def write(self) -> None:
        """Writes the file at once or not at all."""
        self._written = time.monotonic()
        if self._path is None:
            return
        text = json.dumps({"format": FORMAT, "header": self._header, "rows": self._rows})
        folder = os.path.dirname(os.path.abspath(self._path))
        file, name = tempfile.mkstemp(dir=folder, suffix=".tmp")
        try:
            with os.fdopen(file, "w", encoding="utf-8") as opened:
                opened.write(text)
            os.replace(name, self._path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise


def check_folder(path: str | os.PathLike[str] | None) -> None:
    """Raises `ValueError` if a file could not be written, before anything is computed.

    Args:
      path: The path of the file, or None.
    """
    if path is None:
        return
    folder = os.path.dirname(os.path.abspath(os.fspath(path)))
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        raise ValueError(f"path={check.shown(path)}: its folder does not exist, or is read-only.")


def _cell(num_records: int, epsilon: float) -> str:
    return f"{num_records}, {epsilon!r}"
