"""Tables and transactions of the ledger, by SQLAlchemy.

A database is SQLite, in a file or in memory, or a PostgreSQL server by its URL.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import sqlite3
import tempfile
import threading
import uuid
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias
from urllib.parse import quote

import sqlalchemy as sa
from sqlalchemy import event, pool

from tfp_dpvi import _validate as check
from tfp_dpvi.privacy.errors import LedgerError

#: Format version of the tables below; later versions are refused.
FORMAT = 4
#: The format before digests, which can be read as it is.
WITHOUT_DIGEST = 3

Value: TypeAlias = str | int | float | bool | None

METADATA = sa.MetaData()
_KEY = sa.BigInteger().with_variant(sa.Integer, "sqlite")

#: One row with the ledger's identity. `version` grows with every change, so that no writer uses
#: outdated values. `digest` is that of `Contents`, which reveals damage of any of its values.
LEDGER = sa.Table(
    "ledger",
    METADATA,
    sa.Column("format", sa.Integer, nullable=False),
    sa.Column("ledger_id", sa.Text, nullable=False),
    sa.Column("dataset_id", sa.Text),
    sa.Column("version", sa.BigInteger, nullable=False),
    sa.Column("continued", sa.Boolean, nullable=False),
    sa.Column("digest", sa.Text),
)
#: Each distinct plan of one release, in the format of `PrivacyPlan.to_json`.
PLANS = sa.Table(
    "plans",
    METADATA,
    sa.Column("id", _KEY, primary_key=True),
    sa.Column("plan", sa.Text, unique=True),
)
#: Releases charged, by plan, by fit where the sampling scheme cannot merge fits, and by whether the
#: noise was seeded.
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
    sa.CheckConstraint("steps >= 0"),
)
#: Each reservation with its steps, and with those that ran, NULL until it is confirmed. Until then
#: all steps count.
RESERVATIONS = sa.Table(
    "reservations",
    METADATA,
    sa.Column("id", _KEY, primary_key=True),
    sa.Column("charge", sa.ForeignKey(CHARGES.c.id), nullable=False),
    sa.Column("steps", sa.BigInteger, nullable=False),
    sa.Column("steps_run", sa.BigInteger),
    sa.Column("process", sa.Text, nullable=False),
    sa.Column("time", sa.Text, nullable=False),
    sa.CheckConstraint("steps >= 0"),
    sa.CheckConstraint("steps_run BETWEEN 0 AND steps"),
)
#: Budgets in the order in which they were set; the last one holds. A budget with a Renyi order is a
#: Renyi filter.
BUDGETS = sa.Table(
    "budgets",
    METADATA,
    sa.Column("id", _KEY, primary_key=True),
    sa.Column("epsilon", sa.Float(53), nullable=False),
    sa.Column("delta", sa.Float(53), nullable=False),
    sa.Column("renyi_order", sa.Float(53)),
    sa.Column("time", sa.Text, nullable=False),
)
#: Exact values of the data that were shown.
EXPOSURES = sa.Table(
    "exposures",
    METADATA,
    sa.Column("id", _KEY, primary_key=True),
    sa.Column("text", sa.Text, unique=True),
    sa.Column("time", sa.Text, nullable=False),
)
#: The row of `LEDGER`, as all formats have it.
IDENTITY = sa.select(*(column for column in LEDGER.c if column.name != "digest"))
#: Charges with their plans.
ALL_CHARGES = sa.select(CHARGES, PLANS.c.plan.label("json")).join(PLANS).order_by(CHARGES.c.id)
# For `unconfirmed_steps`, which would otherwise read all reservations.
_UNCONFIRMED = RESERVATIONS.c.steps_run.is_(None)
sa.Index(
    "open_reservations", RESERVATIONS.c.id, sqlite_where=_UNCONFIRMED, postgresql_where=_UNCONFIRMED
)


_BUDGET = sa.select(BUDGETS).order_by(BUDGETS.c.id.desc()).limit(1)
_EXPOSURES = sa.select(EXPOSURES.c.text).order_by(EXPOSURES.c.id)
_UNCONFIRMED_STEPS = sa.select(sa.func.sum(RESERVATIONS.c.steps)).where(_UNCONFIRMED)
_DIGESTED = ("ledger_id", "dataset_id", "version", "continued")
_OF_CHARGE = ("json", "run", "seeded", "writer", "steps", "since")
_OF_BUDGET = ("epsilon", "delta", "renyi_order")


@dataclasses.dataclass(frozen=True)
class Contents:
    """The values of a ledger that count, at one version.

    Attributes:
      identity: The row of `LEDGER`.
      charges: The rows of `ALL_CHARGES`.
      budget: The last row of `BUDGETS`; None without one.
      exposures: The sentences of `EXPOSURES`.
      unconfirmed: The number of steps of the reservations that are not confirmed.
    """

    identity: sa.RowMapping
    charges: Sequence[sa.RowMapping]
    budget: sa.RowMapping | None
    exposures: tuple[str, ...]
    unconfirmed: int

    @classmethod
    def read(cls, connection: sa.Connection, identity: sa.RowMapping) -> "Contents":
        """Reads all tables but `ledger`.

        Args:
          connection: A connection in a transaction.
          identity: The row of `ledger`.
        """
        return cls(
            identity=identity,
            charges=connection.execute(ALL_CHARGES).mappings().all(),
            budget=connection.execute(_BUDGET).mappings().first(),
            exposures=tuple(connection.execute(_EXPOSURES).scalars()),
            unconfirmed=int(connection.execute(_UNCONFIRMED_STEPS).scalar() or 0),
        )

    @functools.cached_property
    def digest(self) -> str:
        """The SHA-256 of all values as JSON; `docs/ledger.md` states their order."""
        values = [
            [self.identity[name] for name in _DIGESTED],
            [[charge[name] for name in _OF_CHARGE] for charge in self.charges],
            None if self.budget is None else [self.budget[name] for name in _OF_BUDGET],
            self.exposures,
            self.unconfirmed,
        ]
        try:
            text = json.dumps(values)
        except TypeError:
            raise LedgerError(
                "the ledger is damaged (a value is neither a text nor a number).\n"
                "It was not changed; restore the newest copy."
            ) from None
        return hashlib.sha256(text.encode()).hexdigest()


# A process must not fork during a SQLite transaction: the child would take the parent's locks for
# its own.
_ONE_AT_A_TIME = threading.RLock()
os.register_at_fork(
    before=_ONE_AT_A_TIME.acquire,
    after_in_parent=_ONE_AT_A_TIME.release,
    after_in_child=_ONE_AT_A_TIME.release,
)


class ChangedByOthersError(LedgerError):
    """Raised for contents that another program changed; this library never writes such contents."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"the ledger was changed by another program ({what}).\n"
            "Nothing was charged; restore the newest copy and open it again."
        )


class Database:
    """A ledger's SQLite file, tables in memory, or PostgreSQL server; created if missing.

    Errors of the database are raised as `LedgerError`.

    Args:
      where: A file's path, a server's URL, or None for memory.
      dataset_id: The name of the data set that a new ledger is bound to.
      read_only: Whether to refuse to write. A missing database is then an error.

    #### Formal guarantee

    When `write` ends without an error, its changes are on the disk, and there were no others since
    it started.
    """

    def __init__(
        self,
        where: str | os.PathLike[str] | None,
        *,
        dataset_id: str | None = None,
        read_only: bool = False,
    ) -> None:
        self.read_only = read_only
        self.closed = False
        self._pid = os.getpid()
        self.url = _url(where) if where is not None and "://" in str(where) else None
        self.path = None if where is None or self.url is not None else _path(where)
        self.shown = "the ledger in memory" if where is None else str(self.path or self.url)
        with self._naming_errors():
            if self.path is not None:
                if not read_only and not self.path.exists():
                    _make_file(self.path, dataset_id or uuid.uuid4().hex)
                connect = functools.partial(_connect, self.path)
                self._engine = sa.create_engine(
                    "sqlite://", creator=connect, poolclass=pool.NullPool
                )
            elif self.url is not None:
                # Each transaction opens a connection of its own, which no forked child inherits.
                self._engine = sa.create_engine(self.url, poolclass=pool.NullPool)
            else:
                arguments = {"check_same_thread": False, "isolation_level": None}
                self._engine = sa.create_engine(
                    "sqlite://", connect_args=arguments, poolclass=pool.StaticPool
                )
        if self._engine.dialect.name == "sqlite":
            event.listen(self._engine, "connect", _check_references)
            event.listen(self._engine, "begin", _begin)
        weakref.finalize(self, self._engine.dispose)
        if not read_only:
            self._prepare(dataset_id)

    def _prepare(self, dataset_id: str | None) -> None:
        """Creates the tables in memory or on a server; updates those of a file to this format."""
        if self.path is not None:
            with self.read() as connection:
                if not _is_older(connection):
                    return
        with self.write() as connection:
            if self.url is not None:
                # One process creates the tables, the others wait for it.
                connection.execute(sa.text("SELECT pg_advisory_xact_lock(7310579)"))
                dataset_id = dataset_id or uuid.uuid4().hex
            tables = sa.inspect(connection).get_table_names()
            if self.path is None and METADATA.tables.keys().isdisjoint(tables):
                _create(connection, dataset_id)
            elif _is_older(connection):
                # It is asked again, since another process may have updated it meanwhile.
                self.check(connection)
                _update(connection)

    @property
    def in_memory(self) -> bool:
        """True if the ledger ends with this process."""
        return self.path is None and self.url is None

    def read(self) -> contextlib.AbstractContextManager[sa.Connection]:
        """Opens a transaction that reads one consistent state of the tables."""
        return self._transaction(
            **({} if self.url is None else {"isolation_level": "REPEATABLE READ"})
        )

    def write(self) -> contextlib.AbstractContextManager[sa.Connection]:
        """Opens an exclusive write transaction; an exception rolls it back."""
        self.check_writable()
        return self._transaction(writes=True)

    def check_writable(self) -> None:
        """Raises `LedgerError` if `write` is not allowed."""
        if self.read_only:
            raise LedgerError(
                "this ledger was opened with read_only=True; open it without to reserve."
            )
        if self._pid != os.getpid() and self.in_memory:
            raise LedgerError(
                "this ledger in memory was created before a fork: both processes would spend its "
                "budget. Use PrivacyLedger(path)."
            )

    @contextlib.contextmanager
    def _transaction(self, **options: str | bool) -> Iterator[sa.Connection]:
        if self.closed:
            raise LedgerError("this ledger is closed; open its path again.")
        with _ONE_AT_A_TIME, self._naming_errors(), self._engine.connect() as connection:
            connection.execution_options(**options).begin()
            yield connection
            connection.commit()

    @contextlib.contextmanager
    def _naming_errors(self) -> Iterator[None]:
        try:
            yield
        except ImportError as error:
            raise LedgerError(
                f"{self.shown!r} needs a driver ({check.first_line(error)}): pip install "
                "'tfp-dpvi[postgresql]'."
            ) from error
        except (sa.exc.SQLAlchemyError, sqlite3.Error, UnicodeError) as error:
            cause = getattr(error, "orig", None) or error
            raise LedgerError(
                f"{self.shown!r} is not a usable privacy ledger: {check.first_line(cause)}. "
                "Nothing was written."
            ) from error

    def check(self, connection: sa.Connection) -> None:
        """Raises `LedgerError` if a file is damaged, or charges and reservations are at odds.

        Some tables of this format lack the constraints on steps, so that these are checked here as
        well.
        """
        damage = "ok"
        missing = None
        if self.path is not None:
            damage = connection.exec_driver_sql("PRAGMA integrity_check(1)").scalar_one()
            missing = connection.exec_driver_sql("PRAGMA foreign_key_check").first()
        if missing is not None:
            damage = "some of its rows are missing"
        elif damage == "ok" and connection.execute(_IMPOSSIBLE).first() is not None:
            damage = "its charges are not the sums of its reservations, or steps are impossible"
        if damage != "ok":
            raise LedgerError(
                f"{self.shown!r} is damaged ({' '.join(damage.split())}).\n"
                "It was not changed; restore the newest copy."
            )


def find_or_add(
    connection: sa.Connection,
    table: sa.Table,
    defaults: Mapping[str, Value] | None = None,
    **key: Value,
) -> int:
    """Returns the id of the row with a key, and adds that row if it is missing.

    Args:
      connection: A connection in a write transaction.
      table: A table with a column `id`.
      defaults: Values of the other columns for a new row.
      **key: Values of the columns that identify the row.
    """
    match = sa.and_(*(table.c[name] == value for name, value in key.items()))
    row = connection.execute(sa.select(table.c.id).where(match)).scalar()
    return int(row or add(connection, sa.insert(table), {**key, **(defaults or {})}))


def add(connection: sa.Connection, insert: sa.Insert, row: Mapping[str, Value]) -> int:
    """Inserts a row and returns its id.

    Args:
      connection: A connection in a write transaction.
      insert: The statement.
      row: The values of the columns.

    Raises:
      ChangedByOthersError: The database added no row.
    """
    key = connection.execute(insert, row).inserted_primary_key
    if key is None:
        raise ChangedByOthersError("a row could not be added")
    return int(key[0])


def update_row(
    connection: sa.Connection, update: sa.Executable, values: Mapping[str, Value]
) -> None:
    """Updates exactly one row.

    Args:
      connection: A connection in a write transaction.
      update: The statement.
      values: The values of its parameters.

    Raises:
      ChangedByOthersError: Another number of rows was updated. This rolls the transaction back.
    """
    changed = connection.execute(update, values).rowcount
    if changed != 1:
        raise ChangedByOthersError(f"an update found {changed} rows instead of one")


# Charges and reservations hold the same steps twice, which reveals a change of either by disk
# errors or by hand.
_IMPOSSIBLE = sa.text(
    "SELECT charges.id FROM charges LEFT JOIN reservations ON reservations.charge = charges.id "
    "GROUP BY charges.id, charges.steps "
    "HAVING charges.steps <> "
    "COALESCE(SUM(COALESCE(reservations.steps_run, reservations.steps)), 0) "
    "OR charges.steps < 0 OR MIN(reservations.steps) < 0 OR MIN(reservations.steps_run) < 0 "
    "OR MAX(reservations.steps_run - reservations.steps) > 0 "
    "OR charges.steps <> CAST(charges.steps AS BIGINT) LIMIT 1"
)


def _create(connection: sa.Connection, dataset_id: str | None) -> None:
    METADATA.create_all(connection)
    row = {"format": FORMAT, "ledger_id": uuid.uuid4().hex, "dataset_id": dataset_id}
    connection.execute(sa.insert(LEDGER).values(**row, version=0, continued=False))
    _write_digest(connection)


def has_digest(connection: sa.Connection) -> bool:
    """Returns whether the tables have a place for a digest, whatever format they say they have."""
    columns = sa.inspect(connection).get_columns(LEDGER.name)
    return LEDGER.c.digest.name in [column["name"] for column in columns]


def _is_older(connection: sa.Connection) -> bool:
    return connection.execute(sa.select(LEDGER.c.format)).scalar() in (2, WITHOUT_DIGEST)


def _update(connection: sa.Connection) -> None:
    """Adds the columns that older formats lack."""
    if connection.execute(sa.select(LEDGER.c.format)).scalar() == 2:
        connection.execute(sa.text("ALTER TABLE budgets ADD COLUMN renyi_order DOUBLE PRECISION"))
    connection.execute(sa.text("ALTER TABLE ledger ADD COLUMN digest TEXT"))
    update_row(connection, sa.update(LEDGER), {"format": FORMAT})
    _write_digest(connection)


def _write_digest(connection: sa.Connection) -> None:
    identity = connection.execute(IDENTITY).mappings().one()
    digest = Contents.read(connection, identity).digest
    update_row(connection, sa.update(LEDGER), {"digest": digest})


def _connect(path: pathlib.Path) -> sqlite3.Connection:
    # This mode creates no file, and opens a write-protected file for reading.
    url = f"file:{quote(os.fsencode(path))}?mode=rw"
    connection = sqlite3.connect(url, uri=True, timeout=60.0, isolation_level=None)
    # This value also syncs the folder when a transaction ends.
    connection.execute("PRAGMA synchronous=EXTRA")
    return connection


def _check_references(connection: sqlite3.Connection, record: object) -> None:
    """Makes SQLite check foreign keys, which it leaves out by default."""
    del record
    connection.execute("PRAGMA foreign_keys=ON")


def _begin(connection: sa.Connection) -> None:
    writes = connection.get_execution_options().get("writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _url(where: str | os.PathLike[str]) -> sa.URL:
    try:
        url = sa.make_url(str(where))
        if url.get_backend_name() != "postgresql":
            raise ValueError
    except (sa.exc.ArgumentError, ValueError):
        # The URL is not shown: it may hold a password.
        scheme = str(where).split("://")[0]
        raise LedgerError(
            f"path='{scheme}://...': pass 'postgresql+psycopg://host/name', or a file's path."
        ) from None
    return url.set(drivername="postgresql+psycopg")


def _path(where: str | os.PathLike[str]) -> pathlib.Path:
    try:
        path = pathlib.Path(os.fsdecode(os.fsencode(where))).resolve()
        if path.is_file() or (path.parent.is_dir() and not path.exists()):
            return path
        raise ValueError("it is no regular file")
    except (OSError, RuntimeError, ValueError) as error:
        raise LedgerError(
            f"path={str(where)!a}: {check.first_line(error)}. Pass a file's path in an existing "
            "folder."
        ) from error


def _make_file(path: pathlib.Path, dataset_id: str) -> None:
    """Creates a file atomically, readable only by its owner.

    A process that is killed, or runs at the same time, leaves no file or a complete one.
    """
    try:
        descriptor, draft = tempfile.mkstemp(prefix=".ledger-", dir=path.parent)
        os.close(descriptor)
        try:
            engine = sa.create_engine(
                "sqlite://", creator=lambda: sqlite3.connect(draft), poolclass=pool.NullPool
            )
            with engine.begin() as connection:
                _create(connection, dataset_id)
            # The file exists if another process was faster.
            with contextlib.suppress(FileExistsError):
                os.link(draft, path)
        finally:
            os.unlink(draft)
    except OSError as error:
        raise LedgerError(f"path={str(path)!a} cannot be created: {error.strerror}.") from error
