"""What another app than the consortium's tries at a hospital, as the SuperNode's user.

It uses the standard library alone. Nothing is harmed where an attempt succeeds. Run as a script it
takes its arguments as JSON and prints what it got.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pathlib
import sqlite3
import sys
from multiprocessing.connection import Client

_ATTACH, _DETACH = 16, 17  # Requests of ptrace.


def attack(folder: str, pid: int) -> dict[str, str]:
    """Returns what each attempt on a hospital's files and its worker got; none that is refused."""
    records, ledger = (os.path.join(folder, name) for name in ("records.npz", "ledger"))
    attempts = {
        "list the folder": lambda: os.listdir(folder),
        "read the records": lambda: pathlib.Path(records).read_bytes()[:4],
        "read the ledger": lambda: pathlib.Path(ledger).read_bytes()[:15],
        "write the ledger": lambda: open(ledger, "r+b").close() or "opened",
        "query the ledger": lambda: _query(ledger),
        "replace the records": lambda: _replace(records),
        "put a journal beside the ledger": lambda: _add(ledger + "-journal-of-another"),
        "read its memory": lambda: _read_memory(pid),
        "read its environment": lambda: pathlib.Path(f"/proc/{pid}/environ").read_bytes()[:4],
        "list what it has open": lambda: os.listdir(f"/proc/{pid}/fd"),
        "see where it is": lambda: os.readlink(f"/proc/{pid}/cwd"),
        "trace it": lambda: _trace(pid),
        "copy its memory": lambda: _copy_memory(pid),
        "send it a signal": lambda: os.kill(pid, 0) or "sent",
    }
    got = {}
    for name, attempt in attempts.items():
        with contextlib.suppress(OSError, sqlite3.Error):
            got[name] = str(attempt())
    return got


def talk(path: str, message: bytes) -> str:
    """Returns a worker's answer to a message, or the error."""
    try:
        with Client(path, "AF_UNIX") as connection:
            connection.send_bytes(message)
            if not connection.poll(120.0):
                return "no answer"
            return connection.recv_bytes().decode()
    except (OSError, EOFError) as error:
        return f"{type(error).__name__}"


def _query(ledger: str) -> object:
    with contextlib.closing(sqlite3.connect(ledger)) as connection:
        return connection.execute("SELECT count(*) FROM ledger").fetchone()


def _replace(path: str) -> str:
    os.rename(path, path + ".away")
    os.rename(path + ".away", path)
    return "renamed"


def _add(path: str) -> str:
    pathlib.Path(path).write_bytes(b"")
    os.unlink(path)
    return "written"


def _address(pid: int) -> int:
    first = pathlib.Path(f"/proc/{pid}/maps").read_text().splitlines()[0]
    return int(first.split("-")[0], 16)


def _read_memory(pid: int) -> bytes:
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        memory.seek(_address(pid))
        return memory.read(4)


def _checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), "refused")
    return result


def _trace(pid: int) -> str:
    libc = ctypes.CDLL(None, use_errno=True)
    _checked(libc.ptrace(_ATTACH, pid, None, None))
    os.waitpid(pid, getattr(os, "__WALL", 0x40000000))
    libc.ptrace(_DETACH, pid, None, None)
    return "attached"


class _Part(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


def _copy_memory(pid: int) -> str:
    libc = ctypes.CDLL(None, use_errno=True)
    held = ctypes.create_string_buffer(4)
    here = _Part(ctypes.cast(held, ctypes.c_void_p), 4)
    there = _Part(_address(pid), 4)
    _checked(libc.process_vm_readv(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0))
    return repr(held.raw)


def become(user: int, groups: list[int]) -> None:
    """Makes this process one of another user."""
    os.setgroups(groups)
    os.setgid(user)
    os.setuid(user)


def main() -> None:
    task = json.loads(sys.stdin.read())
    become(task["user"], task["groups"])
    got = {"attack": attack(task["folder"], task["pid"])}
    got["answers"] = [talk(task["socket"], bytes.fromhex(each)) for each in task["messages"]]
    print(json.dumps(got))


if __name__ == "__main__":
    main()
