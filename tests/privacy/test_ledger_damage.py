"""Files that are damaged, replaced or no ledgers at all, and paths that cannot be used: refused, and left alone."""

import contextlib
import os
import pathlib
import random
import shutil
import socket
import sqlite3
import subprocess
import sys

import pytest
import sqlalchemy as sa

from tfp_dpvi.privacy import LedgerError, PoissonSampling, PrivacyLedger, PrivacyPlan, database

PLAN = PrivacyPlan(PoissonSampling(0.01), 1.0, 1000)
OTHER = PrivacyPlan(PoissonSampling(0.05), 2.0, 200)
ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture
def path(tmp_path):
    """A ledger's file, closed: 30 steps under one plan and 7 under another."""
    path = tmp_path / "books.ledger"
    with PrivacyLedger(path, dataset_id="survey", budget_epsilon=3.0, budget_delta=1e-5) as ledger:
        for _ in range(3):
            ledger.confirm(ledger.reserve(PLAN, 10))
        ledger.reserve(OTHER, 7)
        ledger.record_exposure("exact losses were shown")
    return path


def _is_refused(path, match=None):
    """Whether reading and writing alike are refused in two lines at most, and the file is left as it is."""
    data = path.read_bytes()
    for read_only in (True, False):
        with pytest.raises(LedgerError, match=match) as caught:
            PrivacyLedger(path, read_only=read_only)
        assert len(str(caught.value).splitlines()) <= 2
    return path.read_bytes() == data


# --- at opening ---


@pytest.mark.parametrize("name", [".", "none/ledger.sqlite", "a\0b"])
def test_what_is_no_file_is_said_once(tmp_path, name):
    with pytest.raises(LedgerError, match="existing folder") as refusal:
        PrivacyLedger(f"{tmp_path}/{name}")
    assert str(refusal.value).count("path=") == 1


def test_an_empty_file_is_refused(path):
    path.write_bytes(b"")
    assert _is_refused(path, "no such table")


@pytest.mark.parametrize(
    "text", [b"x", b'{"kind": "header"}\n' * 100, b"\x00" * 8192, b"SQLite format 3\x00"]
)
def test_what_is_no_database_is_refused(path, text):
    path.write_bytes(text)
    assert _is_refused(path)


def test_the_database_of_another_program_is_refused(path):
    path.unlink()
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE bookmarks (url TEXT)")
    connection.close()
    assert _is_refused(path, "no such table: ledger")


def test_a_truncated_file_is_refused(path):
    data = path.read_bytes()
    rng = random.Random(0)
    for size in (
        1,
        15,
        16,
        100,
        512,
        4096,
        8192,
        len(data) - 4096,
        len(data) - 1,
        *rng.sample(range(len(data)), 20),
    ):
        path.write_bytes(data[:size])
        assert _is_refused(path), size
    path.write_bytes(data)
    with PrivacyLedger(path) as ledger:
        assert ledger.num_releases == 37


def test_bytes_that_were_overwritten_are_refused_or_change_nothing(path):
    data = path.read_bytes()
    with PrivacyLedger(path) as ledger:
        spent, entries = ledger.epsilon(1e-5), [(e.plan, e.steps, e.seeded) for e in ledger.entries]
    rng = random.Random(1)
    used = [at for at in range(len(data)) if data[at]]  # A file is zeros for the most part.
    refused = 0
    for at in rng.sample(used, 150):
        path.write_bytes(data[:at] + bytes([data[at] ^ rng.randrange(1, 256)]) + data[at + 1 :])
        damaged = path.read_bytes()
        try:
            with PrivacyLedger(path, read_only=True) as ledger:
                assert ledger.epsilon(1e-5) == spent, at
                assert [(e.plan, e.steps, e.seeded) for e in ledger.entries] == entries, at
        except LedgerError:
            refused += 1
        assert path.read_bytes() == damaged
    assert refused > 50


CHANGES = [
    "UPDATE charges SET steps = 3 WHERE id = 1",
    "UPDATE charges SET steps = steps - 1 WHERE id = 2",
    "UPDATE reservations SET steps_run = 0 WHERE id = 2",
    "UPDATE reservations SET charge = 2 WHERE id = 1",
    "DELETE FROM reservations WHERE id = 3",
    "DELETE FROM charges WHERE id = 1",
    "DELETE FROM plans WHERE id = 2",
    "DROP TABLE reservations",
    "DROP TABLE charges",
    "DROP TABLE budgets",
    "UPDATE plans SET plan = '{}' WHERE id = 1",
    "UPDATE plans SET plan = 'garbage' WHERE id = 1",
    "DELETE FROM ledger",
    # A file that was as good as any other, and stated a smaller epsilon, or none that limits it.
    "UPDATE plans SET plan = replace(plan, '1.0', '9.0') WHERE id = 1",
    "UPDATE charges SET seeded = 1 WHERE id = 2",
    "UPDATE budgets SET epsilon = 100.0",
    "DELETE FROM budgets",
    "DELETE FROM exposures",
    "UPDATE ledger SET version = version - 1",
    "UPDATE ledger SET ledger_id = 'another ledger'",
    "UPDATE reservations SET steps_run = NULL WHERE id = 1",
    "UPDATE ledger SET digest = NULL",
    "INSERT INTO ledger SELECT * FROM ledger",
]


@pytest.mark.parametrize("statement", CHANGES)
def test_what_was_changed_by_hand_is_refused(path, statement):
    with sqlite3.connect(path) as connection:
        connection.execute(statement)
    connection.close()
    assert _is_refused(path)


def test_two_processes_may_open_an_old_file_at_once(tmp_path, monkeypatch):
    """Here the second updates it between the first one's look at its format and its update."""
    path = shutil.copy(
        pathlib.Path(__file__).parent.parent / "references" / "books.ledger", tmp_path
    )
    write = database.Database.write

    def late(self):
        monkeypatch.setattr(database.Database, "write", write)
        PrivacyLedger(path)
        return write(self)

    monkeypatch.setattr(database.Database, "write", late)
    assert PrivacyLedger(path).num_releases == PrivacyLedger(path, read_only=True).num_releases > 0


@pytest.mark.parametrize("number", [2, 3])
def test_files_of_older_formats_are_read_and_updated(path, number):
    """Format 3 can be read as it is; format 2 had no column for adaptive budgets."""
    statements = ["ALTER TABLE ledger DROP COLUMN digest", f"UPDATE ledger SET format = {number}"]
    if number == 2:
        statements.append("ALTER TABLE budgets DROP COLUMN renyi_order")
    _alter(path, ";".join(statements))
    before = path.read_bytes()
    if number == 3:
        with PrivacyLedger(path, read_only=True) as look:
            assert (look.num_releases, look.budget) == (37, (3.0, 1e-5))
    assert path.read_bytes() == before
    for _ in range(2):
        with PrivacyLedger(path) as ledger:
            ledger.confirm(ledger.reserve(PLAN, 1))
    with PrivacyLedger(path) as ledger:
        assert (ledger.num_releases, ledger.budget) == (39, (3.0, 1e-5))
    _alter(path, "UPDATE budgets SET epsilon = 100.0")
    assert _is_refused(path, "damaged")


def test_a_damaged_file_of_an_older_format_is_not_updated(path):
    _alter(path, "UPDATE ledger SET format = 3; UPDATE charges SET steps = 3 WHERE id = 1")
    assert _is_refused(path, "damaged")


def test_a_format_set_back_by_hand_does_not_leave_the_digest_out(path):
    """Only a file without the column of digests is read without one."""
    _alter(path, "UPDATE ledger SET format = 3; UPDATE budgets SET epsilon = 100.0")
    assert _is_refused(path)


def test_a_newer_format_is_refused(path):
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE ledger SET format = ?", (database.FORMAT + 1,))
        connection.execute("DROP TABLE exposures")  # It need not have the tables of this one.
    connection.close()
    assert _is_refused(path, f"format version {database.FORMAT + 1}.*or a newer one")


# --- while it is open (fault 3: none of these was noticed) ---


def _delete(path, other):
    path.unlink()


def _truncate(path, other):
    os.truncate(path, 0)


def _cut(path, other):
    os.truncate(path, path.stat().st_size - 4096)


def _garble(path, other):
    with path.open("r+b") as file:
        file.write(b"\xff" * 5000)


def _replace_by_an_older_copy(path, other):
    os.replace(other, path)


def _write_an_older_copy_over_it(path, other):
    path.write_bytes(other.read_bytes())  # The same file, by its identity.


def _move_another_ledger_over_it(path, other):
    _another_ledger(other)
    os.replace(other, path)


def _write_another_ledger_over_it(path, other):
    _another_ledger(other)
    path.write_bytes(other.read_bytes())


def _start_anew(path, other):
    path.unlink()
    PrivacyLedger(path).close()


def _another_ledger(path):
    path.unlink()
    with PrivacyLedger(path, dataset_id="survey") as ledger:
        for _ in range(50):  # Its version is beyond the first one's.
            ledger.reserve(PLAN, 1)


@pytest.mark.parametrize(
    "harm",
    [
        _delete,
        _truncate,
        _cut,
        _garble,
        _replace_by_an_older_copy,
        _write_an_older_copy_over_it,
        _move_another_ledger_over_it,
        _write_another_ledger_over_it,
        _start_anew,
    ],
)
def test_harm_to_an_open_file_is_noticed(path, tmp_path, harm):
    older = tmp_path / "older"
    shutil.copy(path, older)
    with PrivacyLedger(path) as ledger:
        reservation = ledger.reserve(PLAN, 5)
        harm(path, older)
        data = path.read_bytes() if path.exists() else None
        for call in (
            lambda: ledger.reserve(PLAN, 1),
            lambda: ledger.confirm(reservation, steps_run=0),
            lambda: ledger.set_budget(100.0, 1e-5),
            lambda: ledger.record_exposure("exact losses were shown"),
            lambda: ledger.num_releases,
        ):
            with pytest.raises(LedgerError) as caught:
                call()
            assert len(str(caught.value).splitlines()) <= 2
        assert (path.read_bytes() if path.exists() else None) == data


def test_an_older_copy_that_another_went_on_with_is_not_taken_for_the_same_version(path, tmp_path):
    """Both made two changes; the charge of a plan that only one of them knows must not go nowhere (probability 5e-7)."""
    shutil.copy(path, tmp_path / "older")
    with PrivacyLedger(path) as ledger:
        third = ledger.reserve(PLAN.replace(noise_multiplier=4.0), 1)
        ledger.confirm(third)
        os.replace(tmp_path / "older", path)
        with PrivacyLedger(path) as other:
            for _ in range(2):
                other.reserve(PLAN, 1)
        with contextlib.suppress(LedgerError):  # It may be noticed.
            ledger.reserve(PLAN.replace(noise_multiplier=4.0), 5)
            assert ledger.num_releases == 44
    with PrivacyLedger(path) as opened:
        assert opened.num_releases in (39, 44)


def test_a_newest_copy_put_back_is_gone_on_with(path, tmp_path):
    with PrivacyLedger(path) as ledger:
        shutil.copy(path, tmp_path / "copy")
        path.unlink()
        with pytest.raises(LedgerError, match="unable to open database file"):
            ledger.reserve(PLAN, 1)
    os.replace(tmp_path / "copy", path)
    with PrivacyLedger(path) as ledger:
        ledger.reserve(PLAN, 1)
        assert ledger.num_releases == 38


# --- rows that another client changed while it is open, with `version` as it was ---


NEW = PrivacyPlan(PoissonSampling(0.01), 4.0, 1000)
SILENT_CHANGES = [
    "DELETE FROM charges",
    "DELETE FROM charges WHERE id = 1",
    "DELETE FROM charges WHERE id = 2",
    "DELETE FROM charges WHERE id = 2; DELETE FROM reservations WHERE charge = 2",
    "DELETE FROM reservations",
    "DELETE FROM reservations WHERE steps_run IS NULL",
    "DELETE FROM plans",
    "DELETE FROM plans WHERE id = 2",
    "DELETE FROM budgets",
    "DELETE FROM exposures",
    "DELETE FROM ledger",
    "UPDATE charges SET steps = 1 WHERE id = 2",
    "UPDATE charges SET steps = -10 WHERE id = 1",
    "UPDATE charges SET steps = 'many' WHERE id = 1",
    "UPDATE charges SET seeded = 1 WHERE id = 2",
    "UPDATE charges SET id = 3 WHERE id = 1",
    "UPDATE reservations SET steps_run = NULL WHERE id = 1",
    "UPDATE reservations SET steps = 1000, steps_run = NULL WHERE id = 4",
    "UPDATE plans SET plan = replace(plan, '2.0', '9.0') WHERE id = 2",
    "UPDATE budgets SET epsilon = 100.0",
    "INSERT INTO budgets (epsilon, delta, time) VALUES (100.0, 1e-5, '')",
    "UPDATE exposures SET text = 'nothing was shown'",
    "UPDATE ledger SET format = 2",
    "UPDATE ledger SET continued = 1",
    "UPDATE ledger SET dataset_id = 'another survey'",
    "UPDATE ledger SET ledger_id = 'another ledger'",
    "INSERT INTO ledger SELECT * FROM ledger",
    "INSERT INTO ledger SELECT format, 'x', dataset_id, version, continued, digest FROM ledger",
    "INSERT INTO ledger SELECT format, ledger_id, dataset_id, version + 9, continued, '' FROM ledger",
    "CREATE TRIGGER t AFTER UPDATE ON charges BEGIN UPDATE charges SET steps = 0; END",
    "CREATE TRIGGER t BEFORE UPDATE ON charges BEGIN SELECT RAISE(IGNORE); END",
    "CREATE TRIGGER t BEFORE UPDATE ON ledger BEGIN SELECT RAISE(IGNORE); END",
    "CREATE TRIGGER t BEFORE INSERT ON charges BEGIN SELECT RAISE(IGNORE); END",
    "CREATE TRIGGER t BEFORE INSERT ON reservations BEGIN SELECT RAISE(IGNORE); END",
]


def _alter(path, script):
    """Runs statements as another client does, whatever its own constraints say."""
    with contextlib.closing(sqlite3.connect(path)) as client:
        client.execute("PRAGMA ignore_check_constraints = ON")
        client.executescript(script)


def _write_digest(path):
    """Writes the digest of the contents as they are: whoever alters a file may know how."""
    engine = sa.create_engine(f"sqlite:///{path}", poolclass=sa.pool.NullPool)
    with engine.begin() as connection:
        identity = connection.execute(database.IDENTITY).mappings().one()
        digest = database.Contents.read(connection, identity).digest
        connection.execute(database.LEDGER.update().values(digest=digest))
    engine.dispose()


def _is_refused_while_open(path, ledger, calls):
    data = path.read_bytes()
    for call in calls:
        with pytest.raises(LedgerError) as caught:
            call()
        assert len(str(caught.value).splitlines()) <= 2
        assert path.read_bytes() == data


@pytest.mark.parametrize("script", SILENT_CHANGES)
def test_rows_that_vanish_or_change_while_it_is_open_are_noticed(path, script):
    """Without its charge's row a reservation was granted, and nothing was counted."""
    with PrivacyLedger(path) as ledger:
        token = ledger.reserve(OTHER, 3)
        _alter(path, script)
        inserts = "INSERT ON" in script  # By whoever adds rows of this table.
        _is_refused_while_open(
            path,
            ledger,
            [lambda: ledger.reserve(NEW, 1)]
            if inserts
            else [
                lambda: ledger.reserve(PLAN, 1),
                lambda: ledger.confirm(token, steps_run=0),
            ]
            if "TRIGGER" in script
            else [
                lambda: ledger.reserve(PLAN, 1),
                lambda: ledger.reserve(NEW, 1),
                lambda: ledger.confirm(token, steps_run=0),
                lambda: ledger.set_budget(100.0, 1e-5),
                lambda: ledger.record_exposure("predictions were shown"),
            ],
        )


@pytest.mark.parametrize(
    "script",
    [
        "DELETE FROM charges WHERE id = 1; DELETE FROM reservations WHERE charge = 1",
        "UPDATE charges SET steps = 0 WHERE id = 1; UPDATE reservations SET steps_run = 0 WHERE charge = 1",
        "DELETE FROM budgets",
        "DELETE FROM exposures",
        "UPDATE ledger SET dataset_id = 'another survey'",
    ],
)
@pytest.mark.parametrize("more", [0, 7])
def test_rows_that_vanish_with_their_digest_are_noticed(path, script, more):
    """A version has one content, and what was charged, confirmed, limited or shown stays so in every later version."""
    with PrivacyLedger(path) as ledger:
        token = ledger.reserve(OTHER, 3)
        _alter(path, f"{script}; UPDATE ledger SET version = version + {more}")
        _write_digest(path)
        calls = [
            lambda: ledger.reserve(PLAN, 1),
            lambda: ledger.reserve(NEW, 1),
            lambda: ledger.confirm(token, steps_run=0),
            lambda: ledger.set_budget(100.0, 1e-5),
        ]
        if more:  # Else what is known of this version is shown.
            calls.append(lambda: ledger.num_releases)
        _is_refused_while_open(path, ledger, calls)


def test_a_new_file_holds_no_steps_below_zero_or_beyond_its_reservation(path):
    """Whichever client writes: such charges would refund those of other fits."""
    for statement in (
        "UPDATE charges SET steps = -1",
        "UPDATE reservations SET steps = -1",
        "UPDATE reservations SET steps_run = -1",
        "UPDATE reservations SET steps_run = steps + 1",
    ):
        with (
            contextlib.closing(sqlite3.connect(path)) as client,
            pytest.raises(sqlite3.IntegrityError, match="CHECK"),
        ):
            client.execute(statement)


@pytest.mark.parametrize(
    "statement",
    [
        # Each keeps charges the sums of their reservations.
        "UPDATE charges SET steps = -30 WHERE id = 1; UPDATE reservations SET steps_run = -10 WHERE charge = 1",
        "UPDATE charges SET steps = -7 WHERE id = 2; UPDATE reservations SET steps = -7 WHERE charge = 2",
        "UPDATE charges SET steps = 50 WHERE id = 1; UPDATE reservations SET steps_run = 30 WHERE id = 1",
        "UPDATE charges SET steps = 29.5 WHERE id = 1; UPDATE reservations SET steps_run = 9.5 WHERE id = 1",
    ],
)
def test_impossible_steps_are_refused_also_in_a_file_without_constraints(path, statement):
    """Files of the format before, which had neither constraints nor a digest."""
    _alter(
        path,
        "PRAGMA writable_schema = ON;"
        "UPDATE sqlite_master SET sql = replace(sql, 'CHECK (', 'CHECK (1 OR ');"
        "PRAGMA writable_schema = RESET; UPDATE ledger SET format = 3;"
        f"ALTER TABLE ledger DROP COLUMN digest; {statement}",
    )
    assert _is_refused(path, "damaged")


@pytest.mark.parametrize("where", ["memory", "file"])
def test_rows_that_point_nowhere_cannot_be_written(path, where):
    """Foreign keys are on in every connection."""
    with (
        PrivacyLedger(path if where == "file" else None) as ledger,
        pytest.raises(LedgerError, match="FOREIGN KEY"),
        ledger._database.write() as connection,
    ):
        database.add(
            connection,
            database.RESERVATIONS.insert(),
            {"charge": 99, "steps": 1, "process": "", "time": ""},
        )


# --- paths (fault 8) ---


def _paths(folder):
    os.mkfifo(folder / "fifo")
    (folder / "loop").symlink_to("loop")
    (folder / "nowhere").symlink_to(folder / "no" / "where")
    yield from (
        "/dev/full",
        "/dev/null",
        "/dev/zero",
        "",
        "a\0b",
        "x" * 5000,
        str(folder / ("x" * 300)),
        folder,
    )
    yield from (
        folder / "fifo",
        folder / "loop",
        folder / "nowhere",
        folder / "no" / "books",
        str(folder / "\ud800"),
    )
    yield from ("/proc/nothing", "/proc/self/mem")


def test_paths_that_are_no_regular_files_are_refused_at_once(tmp_path):
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(tmp_path / "socket"))
    for where in (*_paths(tmp_path), tmp_path / "socket"):
        for read_only in (False, True):
            with pytest.raises(LedgerError) as caught:
                PrivacyLedger(where, read_only=read_only)
            assert len(str(caught.value).splitlines()) <= 2
            assert str(caught.value).encode()  # It can be printed.
    server.close()
    assert sorted(one.name for one in tmp_path.iterdir()) == ["fifo", "loop", "nowhere", "socket"]


def test_any_path_of_a_file_is_good(tmp_path):
    for name in (
        "with space",
        "per%cent?#&=",
        "ümläut 統計",
        os.fsdecode(b"\xff\xfe"),
        "a'b\"c",
        "file:x",
        "x" * 240,
    ):
        with PrivacyLedger(tmp_path / name) as ledger:
            ledger.reserve(PLAN, 3)
        with PrivacyLedger(os.fsencode(tmp_path / name)) as ledger:
            assert ledger.num_releases == 3
        assert (tmp_path / name).exists()


def test_a_link_is_followed_once(path, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(path)
    with PrivacyLedger(link) as ledger, PrivacyLedger(path) as same:
        ledger.reserve(PLAN, 3)
        assert same.num_releases == 40


URLS = [
    "http://[",
    "nothing://x/y",
    "postgresql+psycopg://u:geheim@host:port/x",
    "sqlite:///x",
    "sqlite://",
]


@pytest.mark.parametrize("url", [*URLS, "postgresql://u:geheim@127.0.0.1:1/x"])
def test_urls_that_lead_nowhere_are_refused_without_their_password(url):
    with pytest.raises(LedgerError) as caught:
        PrivacyLedger(url)
    assert "geheim" not in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 2


MANY_LINES = (
    "no pq wrapper available.\nAttempts made:\n- couldn't import 'c'\n- couldn't import 'python'"
)


def test_a_drivers_error_of_many_lines_becomes_one(monkeypatch):
    """As that of psycopg without libpq."""

    def without_driver(*args, **kwargs):
        raise ImportError(MANY_LINES)

    monkeypatch.setattr(sa, "create_engine", without_driver)
    with pytest.raises(
        LedgerError, match=r"needs a driver \(no pq wrapper available\.\)"
    ) as caught:
        PrivacyLedger("postgresql://h/x")
    assert len(str(caught.value).splitlines()) == 1


def test_a_plans_error_of_many_lines_leaves_two(path, monkeypatch):
    def unreadable(text):
        raise ValueError(MANY_LINES)

    monkeypatch.setattr("tfp_dpvi.privacy.ledger_state._plan_of", unreadable)
    assert _is_refused(path, "no pq wrapper")


# In a process of its own, which may be nobody: root writes wherever it likes.
UNWRITABLE = """
import os, sys
from tfp_dpvi.privacy import LedgerError, PoissonSampling, PrivacyLedger, PrivacyPlan
plan = PrivacyPlan(PoissonSampling(0.01), 1.0, 1000)
folder = sys.argv[1]
if os.getuid() == 0:
    os.setuid(65534)
def refused(call):
    try:
        call()
    except LedgerError as error:
        assert len(str(error).splitlines()) <= 2
        return
    raise AssertionError(call)
for read_only in (False, True):
    for name in ("closed/books", "closed/deeper/books", "folder/books"):
        refused(lambda: PrivacyLedger(os.path.join(folder, name), read_only=read_only))
    look = PrivacyLedger(os.path.join(folder, "file"), read_only=read_only)
    assert look.num_releases == 37
    refused(lambda: look.reserve(plan, 1))
"""


def test_unwritable_paths_raise_ledger_errors(path, tmp_path):
    for name in ("closed", "folder"):
        (tmp_path / name).mkdir()
    (tmp_path / "file").write_bytes(path.read_bytes())
    (tmp_path / "file").chmod(0o444)
    (tmp_path / "folder").chmod(0o555)
    (tmp_path / "closed").chmod(0o000)
    for folder in (tmp_path, *tmp_path.parents):  # Whoever is nobody must come this far.
        if (
            os.getuid() == 0
            and folder.is_relative_to(tmp_path.parents[2])
            and folder != folder.parent
        ):
            folder.chmod(folder.stat().st_mode | 0o011)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", UNWRITABLE, tmp_path],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    (tmp_path / "closed").chmod(0o700)
    (tmp_path / "folder").chmod(0o700)
    assert done.returncode == 0, done.stderr


def test_a_folder_that_cannot_hold_a_ledger_gets_a_sentence(tmp_path, monkeypatch):
    """Such as one on a file system without hard links."""

    def refuse(*args):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(LedgerError, match="cannot be created: Operation not permitted"):
        PrivacyLedger(tmp_path / "a.ledger")
    assert not list(tmp_path.iterdir())
