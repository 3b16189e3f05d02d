"""Who may read what a worker holds, and who may ask it: rules that the operating system enforces.

Flower runs the code of whoever submits an app, at every hospital, as the user of the SuperNode.
What that user can read, any app can send away. So the worker and what it holds belong to another
user.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import os
import pathlib
import socket
import stat
import struct
import sys
import types
from collections.abc import Collection, Iterator, Sequence
from multiprocessing.connection import Connection

# An option of sockets on Linux, for which Python has no name.
_SO_PEERGROUPS = 59
_MOST_GROUPS = 256


def group_id(name: str) -> int:
    """Returns the number of a group that may ask a worker, from its name or its number.

    Raises:
      ValueError: There is no such group, or this system does not say which process is at the
        other end of a socket.
    """
    import grp  # Not on Windows.

    if not hasattr(socket, "SO_PEERCRED"):
        raise ValueError("a socket for a group needs Linux, which says who asks.")
    if name.isdecimal():
        return int(name)
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise ValueError(f"there is no group {name!r}; add it, or pass its number.") from None


def refusal(user: int, groups: Collection[int], group: int) -> str:
    """Returns why a process may not ask this one, or an empty string.

    A process that could read the records without asking is refused, so that a SuperNode that is
    started as the wrong user fails instead of working without protection.

    Args:
      user: Number of the user of the process that asks.
      groups: Numbers of the groups to which it belongs.
      group: Number of the group whose members may ask.
    """
    if user in (0, os.geteuid()):
        return (
            f"a client must not run as user {user}, which can read the records: "
            "run the SuperNode as another user."
        )
    if group not in groups:
        return f"a client must belong to group {group}, and that of user {user} does not."
    return ""


def peer(connection: Connection) -> tuple[int, set[int]]:
    """Returns the user and the groups of a client, as they were when it connected."""
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        credentials = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("iII"))
        more = end.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 4 * _MOST_GROUPS)
    user, group = struct.unpack("iII", credentials)[1:]
    return user, {group, *struct.unpack(f"{len(more) // 4}I", more)}


def check_private(name: str, path: str | os.PathLike[str]) -> None:
    """Checks that no other user may use a file, nor put another in its place; root always may.

    Args:
      name: Name of the argument, for the error.
      path: Path of the file.

    Raises:
      PermissionError: Another user may.
    """
    check_unchangeable(name, path)
    if stat.S_IMODE(os.stat(path).st_mode) & 0o077:
        raise PermissionError(
            f"{name}={str(path)!r} is open to other users; close it: chmod go= {path}"
        )


def check_unchangeable(name: str, path: str | os.PathLike[str]) -> None:
    """Checks that no other user may change a path, nor put another in its place; root always may.

    Args:
      name: Name of the argument, for the error.
      path: Path of the file or folder, which may be a link.

    Raises:
      PermissionError: Another user may.
    """
    real = pathlib.Path(path).resolve()
    # In a folder with the sticky bit, as /tmp, no user replaces what belongs to another. But each
    # may put a journal beside a ledger there, or a module beside a study.
    holder = real if real.is_dir() else real.parent
    for part in _passed(path):
        status = part.lstat()
        sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX and part != holder
        # The mode of a link means nothing.
        if status.st_mode & 0o022 and not sticky and not stat.S_ISLNK(status.st_mode):
            raise PermissionError(
                f"{name}={str(path)!r}: other users may change {part}; forbid it: chmod go-w {part}"
            )
        if status.st_uid not in (0, os.geteuid()):
            raise PermissionError(
                f"{name}={str(path)!r}: {part} belongs to another user; "
                "it must be this one's or root's."
            )


def _passed(path: str | os.PathLike[str]) -> Iterator[pathlib.Path]:
    """Yields all folders and links that the system passes on its way to a path, and what is there."""
    os.stat(path)  # Raises where links go in a circle.
    at, ahead = pathlib.Path(), [*reversed(pathlib.Path(path).absolute().parts)]
    while ahead:
        part = ahead.pop()
        at = at.parent if part == ".." else at / part  # The root replaces what was before it.
        yield at
        if at.is_symlink():
            ahead += reversed(pathlib.Path(os.readlink(at)).parts)
            at = at.parent


@contextlib.contextmanager
def checked_imports(name: str) -> Iterator[None]:
    """While active, a module that another user may change is refused before its code runs.

    Modules that were imported before are not checked.

    Args:
      name: of the argument that leads to the imports.

    Raises:
      PermissionError: another user may change a module, its bytecode or its package's folder.
    """
    finder = _Checked(name)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _Checked(importlib.abc.MetaPathFinder):
    """Finds what the finders after it find, and checks it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        found = (
            finder.find_spec(fullname, path, target)
            for finder in sys.meta_path
            if finder is not self
        )
        spec = next((one for one in found if one is not None), None)
        if spec is not None:
            files = [spec.origin, spec.cached] if spec.has_location else []
            for place in (*files, *(spec.submodule_search_locations or ())):
                if place is not None and os.path.exists(place):
                    check_unchangeable(self._name, place)
        return spec
