"""A page about a study for everybody who takes part: public values alone, in one HTML file."""

from __future__ import annotations

import html
import os
import pathlib
from collections.abc import Iterable

from tfp_dpvi.federated.factors import movement
from tfp_dpvi.federated.saved import replace_file
from tfp_dpvi.federated.server import Server

_STYLE = (
    "body{font:16px sans-serif;margin:2em}table{border-collapse:collapse;margin:1em 0}"
    "td,th{border:1px solid #ccc;padding:.3em .6em;text-align:right}.note{color:#b22222}"
)


def write_status(server: Server, path: str | os.PathLike[str]) -> None:
    """Writes the page: caveats, hospitals, updates and messages that were refused.

    All of it is public: a function of what hospitals have released, and of when they answered.

    Args:
      server: The server of the study.
      path: Path of the HTML file, which is replaced at once.

    ```python
    >>> import pathlib, tempfile
    >>> import numpy as np
    >>> from tfp_dpvi.federated import Factor, StudyTerms, Synchronous
    >>> terms = StudyTerms("heights", Factor.normal(np.zeros(1), np.ones(1)))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     page = pathlib.Path(folder, "status.html")
    ...     write_status(Server(terms, ["berlin"], Synchronous()), page)
    ...     print("berlin" in page.read_text())
    True

    ```
    """
    title = f"Study {server.terms.name}"
    state = "finished" if server.finished else "under way"
    notes = [f'<p class="note">{html.escape(sentence)}</p>' for sentence in server.caveats]
    agreed = server.terms.agreed_sum
    if agreed is not None:
        notes.append(f"<p>{html.escape(agreed.in_words)}</p>")
    parts = [
        f"<h1>{html.escape(title)}: {state}</h1>",
        *notes,
        _table(["hospital", "updates", "epsilon", "rounds left", "state"], _hospitals(server)),
        _table(
            ["update", "hospitals", "change", "guard", "moved", "stretched", "limited", "seconds"],
            _updates(server),
        ),
        _table(["refused"], ([text] for text in server.refused[-50:])),
    ]
    text = f'<!doctype html><meta charset="utf-8"><title>{html.escape(title)}</title>'
    replace_file(pathlib.Path(path), f"{text}<style>{_STYLE}</style>{''.join(parts)}")


def _hospitals(server: Server) -> Iterable[list[str]]:
    """Yields a row for each hospital, also for those that were dropped."""
    for name in dict.fromkeys([*server.factors, *server.retired]):
        taken = sum(name in update.hospitals for update in server.history)
        epsilon, left = server.epsilon.get(name), server.rounds_left.get(name)
        yield [
            name,
            str(taken),
            "" if epsilon is None else f"{epsilon:.4g}",
            "" if left is None else str(left),
            server.retired.get(name, "takes part"),
        ]


def _updates(server: Server) -> Iterable[list[str]]:
    """Yields a row for each update, the last one first."""
    before = [server.terms.prior, *(update.posterior for update in server.history)]
    for earlier, update in reversed(list(zip(before, server.history, strict=False))):
        moved, stretched = movement(earlier, update.posterior)
        yield [
            str(update.number),
            ", ".join(update.hospitals),
            f"{update.change:.4g}",
            f"{update.guard:.3g}",
            f"{moved:.2g} sd",
            f"{stretched:.2g}",
            ", ".join(f"{name} {share:.2g}" for name, share in update.limited.items()),
            f"{update.seconds:.1f}",
        ]


def _table(names: list[str], rows: Iterable[list[str]]) -> str:
    cells = [[f"<td>{html.escape(text)}</td>" for text in row] for row in rows]
    head = "".join(f"<th>{name}</th>" for name in names)
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in cells)
    return f"<table><tr>{head}</tr>{body}</table>" if cells else ""
