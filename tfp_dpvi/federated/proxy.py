"""The way from a short-lived process to a hospital's resident one: bytes over a Unix socket. It imports next to nothing."""

from __future__ import annotations

import os
import socket
import struct

MOST = 2**28


class WorkerError(RuntimeError):
    """A hospital's worker refused a task, or could not be reached."""


def ask(path: str | os.PathLike[str], message: bytes, *, timeout: float = 600.0) -> bytes:
    """Returns a worker's reply to a task.

    Args:
      path: of its socket.
      message: the task.
      timeout: in seconds.

    Raises:
      WorkerError: there is no worker, it refused the task, or it went away.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout)
            connection.connect(str(path))
            send(connection, message)
            reply = receive(connection, MOST)
    except (OSError, EOFError) as error:
        raise WorkerError(f"the worker at {path} does not answer: {error or type(error).__name__}.") from None
    if reply[:1] != b"+":
        raise WorkerError(f"the worker refused: {reply[1:].decode(errors='replace')}")
    return reply[1:]


def send(connection: socket.socket, message: bytes) -> None:
    """Sends a message with its length before it."""
    connection.sendall(struct.pack("<Q", len(message)) + message)


def receive(connection: socket.socket, most: int) -> bytes:
    """Returns a message of at most `most` bytes; raises `EOFError` for a longer one and where the other side goes away."""
    (length,) = struct.unpack("<Q", _exactly(connection, 8))
    if length > most:
        raise EOFError(f"a message of {length} bytes; at most {most} are read")
    return _exactly(connection, length)


def _exactly(connection: socket.socket, length: int) -> bytes:
    parts, left = [], length
    while left:
        part = connection.recv(min(left, 2**20))
        if not part:
            raise EOFError("the connection ended")
        parts.append(part)
        left -= len(part)
    return b"".join(parts)
