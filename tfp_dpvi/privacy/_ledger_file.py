"""An append-only file of records: written ahead, chained by hashes, locked, recovered after a crash.

Every line is `{"hash": H, "record": R}`. H is the SHA-256 of the previous line's hash and the bytes
of R, so an altered, missing or moved line is noticed (a file cut at the end of a line is a shorter
history, not a detectable change: keep backups). A line is complete once its newline is on the disk.
What a crash can leave is a torn last line; its record was never acknowledged, so nothing was
released under it, and it is cut off when the file is opened again.
"""

import hashlib
import json
import os
import pathlib
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from tfp_dpvi.privacy.errors import LedgerError

try:
    import fcntl
except ImportError:  # pragma: no cover - not POSIX
    fcntl = None  # type: ignore[assignment]

_START = b'{"hash": "'
_MIDDLE = b'", "record": '
_END = b"}\n"
_ZERO = "0" * 64

_OPEN_FILES: "weakref.WeakValueDictionary[str, LedgerFile]" = weakref.WeakValueDictionary()
_OPEN_LOCK = threading.Lock()


def encode(previous_hash: str, record: Mapping[str, Any]) -> tuple[bytes, str]:
    """Returns the line of a record and its hash."""
    body = json.dumps(record, sort_keys=True, allow_nan=False).encode()
    digest = hashlib.sha256(previous_hash.encode() + body).hexdigest()
    return _START + digest.encode() + _MIDDLE + body + _END, digest


def decode(data: bytes, name: str) -> tuple[list[dict[str, Any]], str, int]:
    """Reads lines.

    Returns:
      The records, the last hash and the number of bytes that hold complete lines; what follows is a
      torn line.

    Raises:
      LedgerError: if a complete line is not what was written.
    """
    records: list[dict[str, Any]] = []
    previous, position = _ZERO, 0
    while position < len(data):
        end = data.find(b"\n", position)
        if end < 0:
            break
        line = data[position : end + 1]
        body = _body(line, previous)
        if body is None:
            raise LedgerError(
                f"{name} was altered: line {len(records) + 1} does not follow from the lines before it. Nothing was "
                "changed. Restore the file from a backup; the budget it guards cannot be trusted otherwise."
            )
        previous = line[len(_START) : len(_START) + 64].decode()
        records.append(json.loads(body))
        position = end + 1
    return records, previous, position


def _body(line: bytes, previous_hash: str) -> bytes | None:
    start = len(_START) + 64
    if not (line.startswith(_START) and line[start:].startswith(_MIDDLE) and line.endswith(_END)):
        return None
    body = line[start + len(_MIDDLE) : -len(_END)]
    digest = hashlib.sha256(previous_hash.encode() + body).hexdigest()
    return body if digest.encode() == line[len(_START) : start] else None


class LedgerFile:
    """The open file. One per path and process; `open_ledger_file` hands it out.

    Attributes:
      path: where it is.
      records: all records read and written so far, in order.
      attached: what the reader of the records made of them, shared by all users of the file.
      first_own_reservation: the first reservation that this process made.
      users: how many ledgers of this process use it.
    """

    def __init__(self, path: pathlib.Path) -> None:
        if fcntl is None:
            raise LedgerError("a ledger file needs POSIX file locks; use PrivacyLedger() in memory on this system.")
        self.path = path
        self.records: list[dict[str, Any]] = []
        self.attached: Any = None
        self.first_own_reservation = 0
        self.users = 0
        self.lock = threading.RLock()
        self._pid = os.getpid()
        self._broken = False
        new = not path.exists()
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            self._lock_and_read()
        except BaseException:
            os.close(self._descriptor)
            self._descriptor = -1
            raise
        if new:
            _sync_directory(path.parent)

    def _lock_and_read(self) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise LedgerError(
                f"{self.path} is in use by another process. Wait for it to end, or open the ledger with read_only=True "
                "to look at it. Nothing was changed."
            ) from None
        data = _read_all(self._descriptor)
        self.records, self._hash, self._size = decode(data, str(self.path))
        if self._size < len(data):
            os.ftruncate(self._descriptor, self._size)
            os.fsync(self._descriptor)

    def refresh(self) -> None:
        """Reads what this object does not know of: a write that an interrupt cut off from its end."""
        with self.lock:
            self._check_usable()
            if os.fstat(self._descriptor).st_size != self._size:
                self._lock_and_read()

    def append(self, records: Sequence[Mapping[str, Any]], *, durable: bool = True) -> None:
        """Writes records; with `durable` they are on the disk when this returns.

        Raises:
          LedgerError: if they could not be written; then nothing was recorded.
        """
        with self.lock:
            self.refresh()
            lines, digest = b"", self._hash
            for record in records:
                line, digest = encode(digest, record)
                lines += line
            try:
                written = 0
                while written < len(lines):
                    written += os.write(self._descriptor, lines[written:])
                if durable:
                    os.fsync(self._descriptor)
            except BaseException as error:
                self._undo()
                if isinstance(error, OSError):
                    raise LedgerError(f"{self.path} could not be written ({error}); nothing was reserved.") from error
                raise
            # The size comes last: an interrupt before it makes `refresh` read the file again.
            self._hash = digest
            self.records.extend(dict(record) for record in records)
            self._size += len(lines)

    def mark(self) -> tuple[int, str]:
        """The number of records and the hash of the last, after all of them are on the disk."""
        with self.lock:
            self.refresh()
            os.fsync(self._descriptor)
            return len(self.records), self._hash

    def hash_after(self, num_records: int) -> str | None:
        """The hash of record number `num_records`, None if there are fewer."""
        if num_records > len(self.records):
            return None
        digest = _ZERO
        for record in self.records[:num_records]:
            _, digest = encode(digest, record)
        return digest

    def _undo(self) -> None:
        try:
            os.ftruncate(self._descriptor, self._size)
            os.fsync(self._descriptor)
        except OSError:
            self._broken = True

    def _check_usable(self) -> None:
        if self._descriptor < 0:
            raise LedgerError(f"the ledger {self.path} is closed; open it again.")
        if self._pid != os.getpid():
            raise LedgerError(
                f"the ledger {self.path} was opened before this process was forked; only the process that opened it may "
                "write. Open it in one process."
            )
        if self._broken:
            raise LedgerError(f"an earlier write to {self.path} failed and could not be undone; open it again.")

    def close(self) -> None:
        """Gives up one use of the file; the last one closes it and gives the lock back."""
        with self.lock:
            self.users -= 1
            if self.users > 0:
                return
            if self._descriptor >= 0:
                if self._pid == os.getpid():
                    fcntl.flock(self._descriptor, fcntl.LOCK_UN)
                os.close(self._descriptor)
                self._descriptor = -1
        with _OPEN_LOCK:
            if _OPEN_FILES.get(str(self.path)) is self:
                del _OPEN_FILES[str(self.path)]

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._descriptor < 0

    def __del__(self) -> None:
        if getattr(self, "_descriptor", -1) >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def open_ledger_file(path: str | os.PathLike[str]) -> LedgerFile:
    """Opens a file for writing, or returns the one this process has open under that path.

    Raises:
      LedgerError: if another process has it, or it was altered.
    """
    resolved = pathlib.Path(os.path.realpath(path))
    with _OPEN_LOCK:
        known = _OPEN_FILES.get(str(resolved))
        if known is not None and not known.closed and known._pid == os.getpid():
            known.users += 1
            return known
        if resolved.is_dir() or not resolved.parent.is_dir():
            raise LedgerError(f"path={str(path)!r} is not a file in an existing folder; create the folder first.")
        opened = LedgerFile(resolved)
        opened.users = 1
        _OPEN_FILES[str(resolved)] = opened
        return opened


def read_ledger_file(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Returns the records of a file without locking it; a torn last line is left out.

    Raises:
      LedgerError: if the file is missing or was altered.
    """
    try:
        data = pathlib.Path(path).read_bytes()
    except OSError as error:
        raise LedgerError(f"path={str(path)!r} cannot be read: {error}.") from error
    return decode(data, str(path))[0]


def _read_all(descriptor: int) -> bytes:
    os.lseek(descriptor, 0, os.SEEK_SET)
    parts = []
    while part := os.read(descriptor, 1 << 20):
        parts.append(part)
    return b"".join(parts)


def _sync_directory(path: pathlib.Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
