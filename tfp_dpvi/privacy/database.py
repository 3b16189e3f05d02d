"""Tables and transactions of the ledger, by SQLAlchemy: SQLite in a file or in memory, or a server by URL."""

import contextlib
import functools
import os
import pathlib
import sqlite3
import stat
import tempfile
import threading
import weakref
from collections.abc import Iterator
from urllib.parse import quote

import sqlalchemy as sa
from sqlalchemy import event, pool

from tfp_dpvi.privacy.errors import LedgerError

#: Of the tables below; a file of a later one is refused.
FORMAT = 3

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
#: Budgets in the order in which they were set; the last one holds. With an order it is a Renyi filter.
BUDGETS = sa.Table(
    "budgets",
    METADATA,
    sa.Column("id", _KEY, primary_key=True),
    sa.Column("epsilon", sa.Float(53), nullable=False),
    sa.Column("delta", sa.Float(53), nullable=False),
    sa.Column("renyi_order", sa.Float(53)),
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
#: Charges with their plans.
ALL_CHARGES = sa.select(CHARGES, PLANS.c.plan.label("json")).join(PLANS).order_by(CHARGES.c.id)
# For `unconfirmed_steps`, which would read all reservations else.
_UNCONFIRMED = RESERVATIONS.c.steps_run.is_(None)
sa.Index("open_reservations", RESERVATIONS.c.id, sqlite_where=_UNCONFIRMED, postgresql_where=_UNCONFIRMED)


# SQLite must not be within a transaction while its process is forked: the child would take the parent's locks for its own.
_ONE_AT_A_TIME = threading.RLock()
os.register_at_fork(
    before=_ONE_AT_A_TIME.acquire, after_in_parent=_ONE_AT_A_TIME.release, after_in_child=_ONE_AT_A_TIME.release
)


class Database:
    """A ledger's SQLite file, tables in memory (`where` is None), or server by URL.

    Formal guarantee: when `write` ends without an error, what it wrote is on the disk, and nothing else was written
    since it began. Errors of the database are raised as `LedgerError`s.
    """

    def __init__(self, where: str | os.PathLike[str] | None, *, read_only: bool = False) -> None:
        self.read_only = read_only
        self.url = _url(where) if where is not None and "://" in str(where) else None
        self.path = None if where is None or self.url is not None else _path(where)
        self.shown = "the ledger in memory" if where is None else str(self.path or self.url)
        self._pid = os.getpid()
        self.closed = False
        memory: sqlite3.Connection | None = None
        with self._naming_errors():
            if self.path is not None:
                self._identity = _open_file(self.path, create=not read_only)
                self._engine = sa.create_engine(
                    "sqlite://", creator=functools.partial(_connect, self.path), poolclass=pool.NullPool
                )
            elif self.url is not None:
                self._engine = sa.create_engine(self.url, pool_pre_ping=True)
            else:
                memory = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
                self._engine = sa.create_engine("sqlite://", creator=lambda: memory, poolclass=pool.StaticPool)
            if self._engine.dialect.name == "sqlite":
                event.listen(self._engine, "begin", _begin)
        weakref.finalize(self, _release, self._engine, self._pid, memory)

    @property
    def in_memory(self) -> bool:
        """True if it ends with this process."""
        return self.path is None and self.url is None

    @contextlib.contextmanager
    def read(self) -> Iterator[sa.Connection]:
        """Opens a transaction that sees one state of the tables."""
        with self._transaction(**({} if self.url is None else {"isolation_level": "REPEATABLE READ"})) as connection:
            yield connection

    @contextlib.contextmanager
    def write(self) -> Iterator[sa.Connection]:
        """Opens a transaction that no other writer comes in between; an exception undoes it."""
        self.check_writable()
        with self._transaction(writes=True) as connection:
            yield connection

    def check_writable(self) -> None:
        """Raises `LedgerError` where `write` is refused."""
        if self.read_only:
            raise LedgerError("this ledger was opened with read_only=True; open it without to reserve.")
        if self._pid != os.getpid() and self.in_memory:
            raise LedgerError(
                "this ledger is in memory and was made before this process was forked, so that parent and child would each spend "
                "its budget.\nGive it a path: PrivacyLedger(path)."
            )

    @contextlib.contextmanager
    def _transaction(self, **options: str | bool) -> Iterator[sa.Connection]:
        with _ONE_AT_A_TIME, self._naming_errors():
            if self.closed:
                raise LedgerError("this ledger is closed; open its path again.")
            if self._pid != os.getpid() and self.url is not None:
                self._engine.dispose(close=False)  # Connections are the parent's.
                self._pid = os.getpid()
            self._check_identity()
            with self._engine.connect().execution_options(**options) as connection, connection.begin():
                yield connection
            self._check_identity()  # What was written is in the file at that path, and not in one that is gone.

    def _check_identity(self) -> None:
        if self.path is not None and _identity(self.path) != self._identity:
            raise LedgerError(
                f"{str(self.path)!a} is not the file that was opened: it was deleted or replaced while in use. No steps were "
                "granted;\nrestore it, the newest copy that there is, and open it again."
            )

    @contextlib.contextmanager
    def _naming_errors(self) -> Iterator[None]:
        try:
            yield
        except (ImportError, sa.exc.NoSuchModuleError) as error:
            raise LedgerError(
                f"{self.shown!r} needs a driver that is not installed ({error}): pass a path or 'postgresql+psycopg://host/name', "
                "for which\npip install 'tfp-dpvi[postgresql]'."
            ) from error
        except (sa.exc.SQLAlchemyError, sqlite3.Error, UnicodeError) as error:
            cause = getattr(error, "orig", None) or error
            what = next(iter(str(cause).splitlines()), type(cause).__name__)  # A server's errors have many lines.
            raise LedgerError(
                f"{self.shown!r} is no privacy ledger that can be used: {what}. No steps were granted."
            ) from error

    def create_tables(self, connection: sa.Connection) -> None:
        """Makes the tables in an open `write` where there are none of them; a file came into being with them."""
        if self.path is not None:
            return
        if connection.dialect.name == "postgresql":
            connection.execute(sa.text("SELECT pg_advisory_xact_lock(7310579)"))  # One creates, the others wait.
        if METADATA.tables.keys().isdisjoint(sa.inspect(connection).get_table_names()):
            METADATA.create_all(connection)

    def check(self, connection: sa.Connection) -> None:
        """Raises `LedgerError` if a file is damaged, or charges are not the sums of their reservations."""
        found = "ok" if self.path is None else connection.exec_driver_sql("PRAGMA integrity_check(1)").scalar_one()
        if self.path is not None and connection.exec_driver_sql("PRAGMA foreign_key_check").first() is not None:
            found = "some of its rows are gone"
        elif found == "ok" and connection.execute(_NOT_THE_SUM).first() is not None:
            found = "its charges are not the sums of its reservations"
        if found != "ok":
            raise LedgerError(
                f"{self.shown!r} is damaged ({' '.join(found.split())}).\nIt was left as it is; restore the newest copy."
            )

    def close(self) -> None:
        """Closes the connections; later calls raise `LedgerError`."""
        if not self.in_memory:
            self.closed = True
            self._engine.dispose(close=self._pid == os.getpid())


# Two entries of the same steps: what the disk or a hand changed in one of them shows.
_RUN = sa.func.coalesce(RESERVATIONS.c.steps_run, RESERVATIONS.c.steps)
_NOT_THE_SUM = (
    sa.select(CHARGES.c.id)
    .outerjoin(RESERVATIONS)
    .group_by(CHARGES.c.id, CHARGES.c.steps)
    .having(CHARGES.c.steps != sa.func.coalesce(sa.func.sum(_RUN), 0))
    .limit(1)
)


def _release(engine: sa.Engine, pid: int, memory: sqlite3.Connection | None) -> None:
    engine.dispose(close=pid == os.getpid())  # A child leaves its parent's connections alone.
    if memory is not None:
        memory.close()


def _connect(path: pathlib.Path) -> sqlite3.Connection:
    mode = "rw" if os.access(path, os.W_OK) else "ro"
    url = f"file:{quote(os.fsencode(path))}?mode={mode}"
    connection = sqlite3.connect(url, uri=True, timeout=60.0, isolation_level=None)
    connection.execute("PRAGMA synchronous=EXTRA")  # The folder too is on the disk when a transaction ends.
    return connection


def _begin(connection: sa.Connection) -> None:
    writes = connection.get_execution_options().get("writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _url(where: str | os.PathLike[str]) -> sa.URL:
    try:
        url = sa.make_url(str(where))
    except (sa.exc.ArgumentError, ValueError):
        raise LedgerError(  # It may hold a password.
            f"path='{str(where).split('://')[0]}://...' is not a database URL; pass 'postgresql+psycopg://host/name' or a path."
        ) from None
    if url.get_backend_name() == "sqlite":
        raise LedgerError(f"path={str(url)!a} is the URL of a SQLite file; pass its path, without 'sqlite://'.")
    return url.set(drivername="postgresql+psycopg") if url.drivername == "postgresql" else url


def _path(where: str | os.PathLike[str]) -> pathlib.Path:
    try:
        return pathlib.Path(os.path.realpath(os.fsdecode(os.fsencode(where))))
    except (OSError, ValueError) as error:
        raise LedgerError(f"path={str(where)!a} is not a path: {error}.") from error


def _open_file(path: pathlib.Path, *, create: bool) -> tuple[int, int]:
    """Makes the file, readable by its owner alone, unless it is there; returns what identifies it."""
    shown = f"path={str(path)!a}"
    try:
        if not path.parent.is_dir():
            raise LedgerError(f"{shown} is not in an existing folder; create the folder first.")
        if create and not path.exists():
            _make_file(path)
        found = path.stat()
    except (OSError, ValueError) as error:
        raise LedgerError(f"{shown} cannot be opened: {getattr(error, 'strerror', None) or error}.") from error
    if not stat.S_ISREG(found.st_mode):
        raise LedgerError(f"{shown} is not a regular file; pass the path of a file.")
    if create and not os.access(path, os.W_OK):
        raise LedgerError(f"{shown} cannot be written by you; open it with read_only=True to look.")
    return found.st_dev, found.st_ino


def _make_file(path: pathlib.Path) -> None:
    """Makes a file with all tables, at once: killed on the way, or several at a time, there is none or a whole one."""
    descriptor, made = tempfile.mkstemp(prefix=".ledger-", dir=path.parent)
    os.close(descriptor)
    try:
        engine = sa.create_engine("sqlite://", creator=lambda: sqlite3.connect(made), poolclass=pool.NullPool)
        METADATA.create_all(engine)
        with contextlib.suppress(FileExistsError):  # Another process was faster.
            os.link(made, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    finally:
        os.unlink(made)


def _identity(path: pathlib.Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
