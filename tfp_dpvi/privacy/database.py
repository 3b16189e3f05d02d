"""Tables and transactions of the ledger, by SQLAlchemy: SQLite in a file or in memory, or a server by URL."""

import contextlib
import os
import pathlib
import sqlite3
import stat
import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import sqlalchemy as sa
from sqlalchemy import event, pool

from tfp_dpvi.privacy.errors import LedgerError

#: Of the tables below; a file of a later one is refused.
FORMAT = 2

METADATA = sa.MetaData()
_KEY = sa.BigInteger().with_variant(sa.Integer, "sqlite")

#: One row: whose ledger this is. `version` grows with every change, so that no writer acts on old figures.
LEDGER = sa.Table(
    "ledger",
    METADATA,
    sa.Column("format", sa.Integer, nullable=False),
    sa.Column("ledger_id", sa.Text, nullable=False),
    sa.Column("dataset_id", sa.Text),
    sa.Column("version", sa.BigInteger, nullable=False),
    sa.Column("continued", sa.Boolean, nullable=False),
)
#: Each distinct plan of one release, as `PrivacyPlan.to_json` writes it.
PLANS = sa.Table("plans", METADATA, sa.Column("id", _KEY, primary_key=True), sa.Column("plan", sa.Text, unique=True))
#: Releases charged, by plan, fit (where the sampling scheme cannot merge fits) and whether the noise was seeded.
CHARGES = sa.Table(
    "charges",
    METADATA,
    sa.Column("id", _KEY, primary_key=True),
    sa.Column("plan", sa.ForeignKey(PLANS.c.id), nullable=False),
    sa.Column("run", sa.Text, nullable=False),
    sa.Column("seeded", sa.Boolean, nullable=False),
    sa.Column("writer", sa.Text, nullable=False),
    sa.Column("steps", sa.BigInteger, nullable=False),
    sa.Column("since", sa.Text, nullable=False),
    sa.UniqueConstraint("plan", "run", "seeded", "writer"),
)
#: Each reservation: how many steps, and how many ran (NULL until it is confirmed: all of them count).
RESERVATIONS = sa.Table(
    "reservations",
    METADATA,
    sa.Column("id", _KEY, primary_key=True),
    sa.Column("charge", sa.ForeignKey(CHARGES.c.id), nullable=False),
    sa.Column("steps", sa.BigInteger, nullable=False),
    sa.Column("steps_run", sa.BigInteger),
    sa.Column("process", sa.Text, nullable=False),
    sa.Column("time", sa.Text, nullable=False),
)
#: Budgets in the order in which they were set; the last one holds.
BUDGETS = sa.Table(
    "budgets",
    METADATA,
    sa.Column("id", _KEY, primary_key=True),
    sa.Column("epsilon", sa.Float(53), nullable=False),
    sa.Column("delta", sa.Float(53), nullable=False),
    sa.Column("time", sa.Text, nullable=False),
)
#: What was shown of the data beside the releases.
EXPOSURES = sa.Table(
    "exposures",
    METADATA,
    sa.Column("id", _KEY, primary_key=True),
    sa.Column("text", sa.Text, unique=True),
    sa.Column("time", sa.Text, nullable=False),
)
# For `unconfirmed_steps`, which would read all reservations else.
sa.Index("open_reservations", RESERVATIONS.c.id, sqlite_where=RESERVATIONS.c.steps_run.is_(None))


class Database:
    """Where a ledger is kept.

    Formal guarantee: when `write` ends without an error, what it wrote is on the disk, and nothing else was written
    since it began.

    Args:
      where: a path, a database URL, or None for memory.
      read_only: refuse `write`.

    Raises:
      LedgerError: if it cannot be opened.
    """

    def __init__(self, where: str | os.PathLike[str] | None, *, read_only: bool = False) -> None:
        self.read_only = read_only
        self.url = str(where) if where is not None and "://" in str(where) else None
        self.path = None if where is None or self.url is not None else _path(where)
        self.shown = "the ledger in memory" if where is None else str(self.path or sa.make_url(self.url or ""))
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._closed = False
        with self._naming_errors():
            if self.path is not None:
                self._identity = _open_file(self.path, create=not read_only)
                self._engine = sa.create_engine("sqlite://", creator=self._connect, poolclass=pool.NullPool)
            elif self.url is not None:
                self._engine = sa.create_engine(self.url, pool_pre_ping=True)
            else:
                memory = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
                self._engine = sa.create_engine("sqlite://", creator=lambda: memory, poolclass=pool.StaticPool)
            if self._engine.dialect.name == "sqlite":
                event.listen(self._engine, "begin", _begin)

    def _connect(self) -> sqlite3.Connection:
        assert self.path is not None
        mode = "rw" if os.access(self.path, os.W_OK) else "ro"
        url = f"file:{quote(os.fsencode(self.path))}?mode={mode}"
        connection = sqlite3.connect(url, uri=True, timeout=60.0, isolation_level=None)
        connection.execute("PRAGMA synchronous=EXTRA")  # The folder too is on the disk when a transaction ends.
        return connection

    @contextlib.contextmanager
    def read(self) -> Iterator[sa.Connection]:
        """Opens a transaction that sees one state of the tables."""
        options = {} if self.url is None else {"isolation_level": "REPEATABLE READ"}
        with self._transaction(**options) as connection:
            yield connection

    @contextlib.contextmanager
    def write(self) -> Iterator[sa.Connection]:
        """Opens a transaction that no other writer comes in between; an exception undoes it."""
        if self.read_only:
            raise LedgerError("this ledger was opened with read_only=True; open it without to reserve.")
        if self._pid != os.getpid() and self.path is None and self.url is None:
            raise LedgerError(
                "this ledger is in memory and was made before this process was forked, so that parent and child would each spend "
                "its budget.\nGive it a path: PrivacyLedger(path)."
            )
        with self._transaction(writes=True) as connection:
            yield connection

    @contextlib.contextmanager
    def _transaction(self, **options: Any) -> Iterator[sa.Connection]:
        with self._lock, self._naming_errors():
            if self._closed:
                raise LedgerError("this ledger is closed; open its path again.")
            if self._pid != os.getpid() and self.url is not None:
                self._engine.dispose(close=False)  # Connections are the parent's.
                self._pid = os.getpid()
            if self.path is not None and _identity(self.path) != self._identity:
                raise LedgerError(
                    f"{self.path} is not the file that was opened: it was deleted or replaced while in use. Nothing was charged;\n"
                    "restore it, the newest copy that there is, and open it again."
                )
            with self._engine.connect().execution_options(**options) as connection, connection.begin():
                yield connection

    @contextlib.contextmanager
    def _naming_errors(self) -> Iterator[None]:
        try:
            yield
        except sa.exc.NoSuchModuleError as error:
            raise LedgerError(f"{self.shown!r} names a database that SQLAlchemy does not know: {error}.") from error
        except ImportError as error:
            raise LedgerError(
                f"{self.shown!r} needs a driver that is not installed ({error}): pip install 'tfp-dpvi[postgresql]'."
            ) from error
        except (sa.exc.SQLAlchemyError, sqlite3.Error) as error:
            cause = getattr(error, "orig", None) or error
            raise LedgerError(
                f"{self.shown!r} is no privacy ledger that can be used: {cause}. Nothing was charged."
            ) from error

    def create_tables(self, connection: sa.Connection) -> None:
        """Makes the tables in an open `write`, unless they are there."""
        if connection.dialect.name == "postgresql":
            connection.execute(sa.text("SELECT pg_advisory_xact_lock(7310579)"))  # One creates, the others wait.
        METADATA.create_all(connection)

    def close(self) -> None:
        """Closes the connections; later calls raise `LedgerError`."""
        if self.path is not None or self.url is not None:
            self._closed = True
            self._engine.dispose(close=self._pid == os.getpid())


def _begin(connection: sa.Connection) -> None:
    writes = connection.get_execution_options().get("writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _path(where: str | os.PathLike[str]) -> pathlib.Path:
    try:
        return pathlib.Path(os.path.realpath(os.fsdecode(os.fsencode(where))))
    except (ValueError, UnicodeError) as error:
        raise LedgerError(f"path={str(where)!a} is not a path: {error}.") from error


def _open_file(path: pathlib.Path, *, create: bool) -> tuple[int, int]:
    """Makes the file, readable by its owner alone, unless it is there; returns what identifies it."""
    try:
        if path.exists() and not stat.S_ISREG(path.stat().st_mode):
            raise LedgerError(f"path={str(path)!a} is not a regular file; pass the path of a file.")
        if not path.parent.is_dir():
            raise LedgerError(f"path={str(path)!a} is not in an existing folder; create the folder first.")
        if create:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        elif not path.exists():
            raise LedgerError(f"path={str(path)!a} cannot be read: there is no such file.")
    except (OSError, ValueError) as error:
        raise LedgerError(f"path={str(path)!a} cannot be opened: {error}.") from error
    found = _identity(path)
    assert found is not None
    return found


def _identity(path: pathlib.Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
