"""The ledger on a PostgreSQL server, which these tests start: slow, and skipped where there is none."""

import contextlib
import importlib.util
import json
import os
import pathlib
import pwd
import shutil
import signal
import subprocess
import tempfile
import threading
import uuid

import pytest
from support import ledger_processes as processes

from tfp_dpvi.privacy import (
    BudgetExhaustedError,
    FullBatch,
    LedgerError,
    PrivacyLedger,
    PrivacyPlan,
)

pytestmark = pytest.mark.slow

PLAN = PrivacyPlan(FullBatch(), 5.0, 1)
OTHER = PrivacyPlan(FullBatch(), 7.0, 1)


def _program(name):
    found = [
        shutil.which(name),
        *sorted(map(str, pathlib.Path("/usr/lib/postgresql").glob(f"*/bin/{name}")), reverse=True),
    ]
    return next((one for one in found if one), None)


def _user():
    """Who the server runs as: it refuses root."""
    if os.getuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    pytest.skip("PostgreSQL does not run as root, and there is no user postgres or nobody.")


@pytest.fixture(scope="module")
def server():
    """The folder of a running server's socket."""
    if importlib.util.find_spec("psycopg") is None:
        pytest.skip("psycopg is not installed: pip install 'tfp-dpvi[postgresql]'.")
    initdb, postgres = _program("initdb"), _program("postgres")
    if initdb is None or postgres is None:
        pytest.skip("no PostgreSQL server is installed (initdb, postgres).")
    user = _user()
    rights = {} if user is None else {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    # Not below pytest's folder, which others may not enter.
    with tempfile.TemporaryDirectory(prefix="ledger-") as folder:
        if user is not None:
            os.chown(folder, user.pw_uid, user.pw_gid)
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("PG", "LD_"))
        }
        data = f"{folder}/data"
        options = {"cwd": folder, "env": environment, **rights}
        made = subprocess.run(
            [initdb, "-D", data, "-U", "tester", "-A", "trust", "-E", "UTF8", "--no-locale"],
            capture_output=True,
            text=True,
            check=False,
            **options,
        )
        if made.returncode != 0:
            pytest.skip(f"initdb failed: {made.stderr.splitlines()[-1:]}")
        with open(f"{folder}/log", "w") as log:
            running = subprocess.Popen(
                [postgres, "-D", data, "-F", "-k", folder, "-c", "listen_addresses="],
                stdout=log,
                stderr=log,
                **options,
            )
        try:
            for _ in range(600):
                if running.poll() is not None or _answers(folder):
                    break
                threading.Event().wait(0.1)
            assert running.poll() is None, pathlib.Path(f"{folder}/log").read_text()
            yield folder
        finally:
            running.send_signal(signal.SIGINT)  # It does not wait for connections.
            running.wait(60)


def _answers(folder):
    import psycopg

    try:
        psycopg.connect(host=folder, user="tester", dbname="postgres").close()
    except psycopg.OperationalError:
        return False
    return True


@pytest.fixture
def url(server):
    """A new, empty database."""
    import psycopg

    name = f"books_{uuid.uuid4().hex}"
    with psycopg.connect(
        host=server, user="tester", dbname="postgres", autocommit=True
    ) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    return f"postgresql+psycopg://tester@/{name}?host={server}"


def test_it_counts_as_a_file_does(url):
    with PrivacyLedger(url, dataset_id="survey", budget_epsilon=3.0, budget_delta=1e-5) as ledger:
        first = ledger.reserve(PLAN, 6)
        ledger.confirm(first, steps_run=4)
        ledger.reserve(OTHER, 2, seeded=True)
        ledger.record_exposure("exact losses were shown")
        with pytest.raises(LedgerError, match="confirmed before"):
            ledger.confirm(first)
        with pytest.raises(BudgetExhaustedError):
            ledger.reserve(PLAN, 100)
        spent, entries = ledger.epsilon(1e-5), ledger.entries
    with PrivacyLedger(url) as again:
        assert again.dataset_id == "survey"
        assert again.budget == (3.0, 1e-5)
        assert again.entries == entries
        assert again.num_releases == 6
        assert again.unconfirmed_steps == 2
        assert again.seeded
        assert again.exposures == ("exact losses were shown",)
        assert again.epsilon(1e-5) == spent
    with PrivacyLedger(url, read_only=True) as look, pytest.raises(LedgerError, match="read_only"):
        look.reserve(PLAN, 1)
    with pytest.raises(LedgerError, match="bound"):
        PrivacyLedger(url, dataset_id="other")


def test_four_processes_share_a_server(url):
    processes.check_spenders(url, 4)


def test_two_threads_never_pass_a_budget_together(url):
    with PrivacyLedger(url) as one, PrivacyLedger(url) as two:
        granted, errors = [0, 0], []

        def fit(index):
            ledger, plan = (one, two)[index], PrivacyPlan(FullBatch(), 30.0 + index, 3)
            try:
                while True:
                    ledger.confirm(ledger.reserve(plan, 3, budgets=[(1.0, 1e-5)]))
                    granted[index] += 3
            except BudgetExhaustedError:
                pass
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=fit, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        assert one.num_releases == sum(granted)
        assert 0.9 < one.epsilon(1e-5) <= 1.0


def test_a_reservation_within_anothers_pricing_is_seen(url, monkeypatch):
    with PrivacyLedger(
        url, budget_epsilon=PLAN.replace(num_releases=10).epsilon(1e-5), budget_delta=1e-5
    ) as ledger:
        with PrivacyLedger(url) as other:
            real = ledger._check_allowed
            more = [4]

            def slow(*arguments):
                real(*arguments)
                if more:
                    other.reserve(PLAN, more.pop())

            monkeypatch.setattr(ledger, "_check_allowed", slow)
            with pytest.raises(BudgetExhaustedError):
                ledger.reserve(PLAN, 7)
        assert ledger.num_releases == 4


def test_a_forked_child_has_connections_of_its_own(url):
    with PrivacyLedger(url) as ledger:
        ledger.reserve(PLAN, 1)
        for _ in range(3):
            child = os.fork()
            if child == 0:
                try:
                    ledger.reserve(PLAN, 2)
                    ledger.close()
                    os._exit(0)
                finally:
                    os._exit(1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            ledger.reserve(PLAN, 1)
        assert ledger.num_releases == 1 + 3 * 3


def test_a_model_finds_that_its_ledger_is_on_a_server(url):
    with PrivacyLedger(url) as ledger:
        ledger.reserve(PLAN, 3)
        loaded = PrivacyLedger.from_config(ledger.to_config())
        assert loaded.num_releases == 3
        with pytest.raises(LedgerError, match="compile"):
            loaded.reserve(PLAN, 1)
        assert ledger.continues(loaded)
    with PrivacyLedger(url.replace("tester@", "tester:geheim@")) as ledger:
        for text in (json.dumps(ledger.to_config()), ledger.path):
            assert "geheim" not in text


def test_another_databases_tables_are_left_alone(url):
    import psycopg

    with PrivacyLedger(url) as ledger:
        ledger.reserve(PLAN, 3)
    plain = url.replace("postgresql+psycopg", "postgresql")
    with psycopg.connect(plain, autocommit=True) as connection:
        connection.execute("UPDATE charges SET steps = 1")
        with pytest.raises(LedgerError, match="damaged"):
            PrivacyLedger(url)
        connection.execute("DROP TABLE reservations")
        with pytest.raises(LedgerError) as caught:
            PrivacyLedger(url)
        assert len(str(caught.value).splitlines()) <= 2
        assert connection.execute("SELECT to_regclass('reservations')").fetchone() == (None,)


def test_a_database_that_is_not_there_is_named(url):
    with pytest.raises(LedgerError, match="does not exist") as caught:
        PrivacyLedger(url.replace("books_", "other_"))
    assert len(str(caught.value).splitlines()) <= 2


@pytest.mark.parametrize(
    "script",
    [
        "DELETE FROM reservations; DELETE FROM charges",
        "DELETE FROM reservations WHERE charge = 2; DELETE FROM charges WHERE id = 2",
        "DELETE FROM budgets",
        "UPDATE budgets SET epsilon = 100",
        "UPDATE charges SET steps = 0 WHERE id = 1",
        "UPDATE plans SET plan = replace(plan, '7.0', '9.0') WHERE id = 2",
        "INSERT INTO ledger SELECT * FROM ledger",
        "DELETE FROM ledger",
        "CREATE RULE none AS ON UPDATE TO charges DO INSTEAD NOTHING",
        "CREATE RULE none AS ON UPDATE TO ledger DO INSTEAD NOTHING",
    ],
)
def test_rows_that_vanish_or_change_while_it_is_open_are_noticed(url, script):
    import psycopg

    tables = ("ledger", "plans", "charges", "reservations", "budgets", "exposures")
    plain = url.replace("postgresql+psycopg", "postgresql")
    with (
        PrivacyLedger(url, budget_epsilon=50.0, budget_delta=1e-5) as ledger,
        psycopg.connect(plain, autocommit=True) as client,
    ):
        ledger.confirm(ledger.reserve(PLAN, 3))
        token = ledger.reserve(OTHER, 2)
        client.execute(script)

        def contents():
            return [client.execute(f"SELECT * FROM {table}").fetchall() for table in tables]

        before = contents()
        for call in (lambda: ledger.reserve(PLAN, 1), lambda: ledger.confirm(token, steps_run=0)):
            with pytest.raises(LedgerError) as caught:
                call()
            assert len(str(caught.value).splitlines()) <= 2
        assert contents() == before


def test_impossible_steps_cannot_be_written_by_any_client(url):
    import psycopg

    with PrivacyLedger(url) as ledger:
        ledger.reserve(PLAN, 3)
    plain = url.replace("postgresql+psycopg", "postgresql")
    with psycopg.connect(plain, autocommit=True) as client:
        for statement in (
            "UPDATE charges SET steps = -1",
            "UPDATE reservations SET steps = -1",
            "UPDATE reservations SET steps_run = -1",
            "UPDATE reservations SET steps_run = steps + 1",
        ):
            with pytest.raises(psycopg.errors.CheckViolation):
                client.execute(statement)
        # Tables of this format that are older than the constraints.
        client.execute(
            "ALTER TABLE charges DROP CONSTRAINT charges_steps_check;"
            "ALTER TABLE reservations DROP CONSTRAINT reservations_steps_check;"
            "UPDATE charges SET steps = -3; UPDATE reservations SET steps = -3"
        )
    with pytest.raises(LedgerError, match="damaged"):
        PrivacyLedger(url)
