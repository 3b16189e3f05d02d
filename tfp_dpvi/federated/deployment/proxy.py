"""The way from a short-lived process to a hospital's resident one: bytes over a Unix socket, never pickled."""

from __future__ import annotations

import os
from multiprocessing.connection import Client


class WorkerError(RuntimeError):
    """Raised where a hospital's worker refused a task or could not be reached."""


def ask(path: str | os.PathLike[str], message: bytes, *, timeout: float = 600.0) -> bytes:
    """Returns a worker's reply to a task.

    Raises:
      WorkerError: there is no worker at this socket, it refused the task, went away, or took more than `timeout` seconds.
    """
    try:
        with Client(os.fspath(path), "AF_UNIX") as connection:
            connection.send_bytes(message)
            if not connection.poll(timeout):
                raise TimeoutError(f"no reply within {timeout:g} s")
            reply = connection.recv_bytes()
    except (OSError, EOFError) as error:
        raise WorkerError(
            f"the worker at {path} does not answer: {error or type(error).__name__}."
        ) from None
    if reply[:1] != b"+":
        raise WorkerError(f"the worker refused: {reply[1:].decode(errors='replace')}")
    return reply[1:]
