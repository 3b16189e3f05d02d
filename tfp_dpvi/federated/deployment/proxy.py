"""The way from a short-lived process to a hospital's resident one.

Bytes go over a Unix socket, and are never pickled.
"""

from __future__ import annotations

import os
from multiprocessing.connection import Client


class WorkerError(RuntimeError):
    """Raised where a hospital's worker refused a task or could not be reached.

    ```python
    >>> try:
    ...     ask("/nowhere/berlin.sock", b"a task")
    ... except WorkerError as error:
    ...     print(str(error).partition(":")[0])
    the worker at /nowhere/berlin.sock does not answer

    ```
    """


class RefusedError(WorkerError):
    """Raised where a hospital's worker looked at a task and refused it.

    ```python
    >>> issubclass(RefusedError, WorkerError)
    True

    ```
    """


def ask(path: str | os.PathLike[str], message: bytes, *, timeout: float = 600.0) -> bytes:
    """Asks a worker.

    Args:
      path: Path of its socket.
      message: A `Task` as bytes.
      timeout: The most seconds to wait for the reply.

    Returns:
      The worker's reply, a `Reply` as bytes.

    Raises:
      RefusedError: The worker refused the task, and says why.
      WorkerError: There is no worker at this socket, it went away, or took more than `timeout`
        seconds.
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
        raise RefusedError(f"the worker refused: {reply[1:].decode(errors='replace')}")
    return reply[1:]
