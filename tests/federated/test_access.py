"""Who can read what a worker holds, and whom it answers.

Another app's code, run as the SuperNode's user, gets nothing.
"""

import json
import os
import pathlib
import py_compile
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
import types
from multiprocessing import Pipe
from unittest import mock

import numpy as np
import pytest
from support import other_app

import tfp_dpvi as dpvi
from tfp_dpvi.federated import Reply, Server, StudyTerms, Synchronous
from tfp_dpvi.federated.deployment import worker
from tfp_dpvi.federated.deployment.access import (
    check_private,
    check_unchangeable,
    group_id,
    peer,
    refusal,
)
from tfp_dpvi.federated.deployment.proxy import WorkerError, ask
from tfp_dpvi.federated.deployment.worker import main, serve

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "federated" / "hospitals"
TERMS = StudyTerms.load(EXAMPLE / "terms.json")
# Users and a group without names.
WORKER, NODE, STRANGER, CLIENTS = 61001, 61002, 61004, 61003

linux = pytest.mark.skipif(
    not hasattr(socket, "SO_PEERCRED"), reason="only Linux says who is at the end of a socket"
)
root = pytest.mark.skipif(
    os.geteuid() != 0,
    reason="only root can start processes as other users",
)


@pytest.fixture
def folder():
    """A folder that other users may pass through; pytest's own belongs to one user."""
    made = pathlib.Path(tempfile.mkdtemp())
    made.chmod(0o711)
    yield made
    shutil.rmtree(made)


def run_as(user, groups, *, socket="", messages=(), folder="/nowhere", pid=1):
    """Returns what another app's code gets, run as this user; see `other_app`."""
    task = {"user": user, "groups": list(groups), "socket": str(socket), "folder": str(folder)}
    task |= {"pid": pid, "messages": [message.hex() for message in messages]}
    done = subprocess.run(
        [sys.executable, "-I", "-S", other_app.__file__], input=json.dumps(task),
        capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    return json.loads(done.stdout)


def serving(path, group, answer, requests):
    """Starts a worker with a stub for a hospital in a thread; returns when it listens."""
    study = types.SimpleNamespace(terms=TERMS)
    hospital = types.SimpleNamespace(study=study, name="stub", answer=answer)
    thread = threading.Thread(
        target=serve, args=(hospital, path), kwargs={"group": group, "requests": requests},
        daemon=True,
    )  # fmt: skip
    thread.start()
    until = time.monotonic() + 20.0
    while not (path.exists() and path.stat().st_gid == group) and time.monotonic() < until:
        time.sleep(0.01)
    return thread


# ---------------------------------------------------------------------- whom it answers


@pytest.mark.parametrize(
    ("user", "groups", "told"),
    [
        (NODE, {NODE, CLIENTS}, ""),
        (NODE, {NODE}, "must belong to group 61003"),
        (NODE, {0}, "must belong to group 61003"),
        (0, {0, CLIENTS}, "run the SuperNode as another user"),
        (os.geteuid(), {CLIENTS}, "run the SuperNode as another user"),
    ],
)
def test_members_of_the_group_may_ask_except_for_those_who_can_read_the_records(user, groups, told):
    sentence = refusal(user, groups, CLIENTS)
    assert told in sentence
    assert bool(sentence) == bool(told)


@linux
def test_a_peer_is_this_process():
    near, far = Pipe()
    with near, far:
        assert peer(near) == (os.geteuid(), {os.getegid(), *os.getgroups()})


@linux
def test_a_client_that_runs_as_the_workers_own_user_is_refused(tmp_path):
    path, asked = tmp_path / "w.sock", []
    thread = serving(path, os.getegid(), asked.append, 1)
    assert stat.S_IMODE(path.stat().st_mode) == 0o660
    with pytest.raises(WorkerError, match="run the SuperNode as another user"):
        ask(path, b"a task", timeout=20.0)
    thread.join(20.0)
    assert asked == []


@linux
def test_groups_by_name_and_number():
    import grp

    assert group_id(grp.getgrgid(0).gr_name) == 0
    assert group_id("61003") == CLIENTS
    with pytest.raises(ValueError, match="there is no group 'of nobody'; add it"):
        group_id("of nobody")


@root
@linux
def test_another_apps_code_gets_nothing_and_the_consortiums_is_answered(folder):
    """Other users read nothing; a member of the group is answered, a stranger cannot connect."""
    home, run = folder / "home", folder / "run"
    home.mkdir(mode=0o700)
    run.mkdir(mode=0o755)
    np.savez(home / "records.npz", x=np.arange(3))
    (home / "records.npz").chmod(0o600)
    dpvi.PrivacyLedger(home / "ledger").close()
    path = run / "w.sock"
    there = {"folder": home, "socket": path, "pid": os.getpid(), "messages": [b"a task"]}
    thread = serving(path, CLIENTS, lambda message: b"answered " + message, 2)
    assert run_as(NODE, [CLIENTS], **there) == {"attack": {}, "answers": ["+answered a task"]}
    assert run_as(STRANGER, [], **there) == {"attack": {}, "answers": ["PermissionError"]}
    # The same code as the worker's own user: the attempts work, and the socket says what is wrong.
    own = run_as(0, [CLIENTS], **there)
    assert {"list the folder", "read the records", "read the ledger"} <= own["attack"].keys()
    assert {"write the ledger", "query the ledger", "send it a signal"} <= own["attack"].keys()
    assert "run the SuperNode as another user" in own["answers"][0]
    thread.join(20.0)


# ---------------------------------------------------------------------- what it holds


@pytest.mark.parametrize(
    ("mode", "told"), [(0o640, "open to other"), (0o604, "open to other"), (0o600, None)]
)
def test_a_file_is_for_its_owner_alone(tmp_path, mode, told):
    path = tmp_path / "records.npz"
    path.touch()
    path.chmod(mode)
    if told is None:
        check_private("--data", path)
    else:
        with pytest.raises(PermissionError, match=f"--data=.*{told}.*chmod go= "):
            check_private("--data", path)


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777])
@pytest.mark.parametrize("above", [False, True])
def test_nobody_else_can_put_another_file_in_its_place(tmp_path, mode, above):
    """Checks folders, and links: the sticky bit protects a folder, and no ledger from a journal."""
    folder = tmp_path / "a"
    (folder / "b").mkdir(parents=True)
    path = folder / "b" / "ledger"
    path.touch(mode=0o600)
    link = tmp_path / "link"
    link.symlink_to(path)
    (folder if above else folder / "b").chmod(mode)
    if above and mode & stat.S_ISVTX:
        check_private("--ledger", link)
        return
    for each in (path, link):
        with pytest.raises(PermissionError, match=r"--ledger=.*may change .*chmod go-w"):
            check_private("--ledger", each)


def test_a_working_directory_may_lie_in_a_folder_with_the_sticky_bit(folder):
    check_unchangeable("the working directory", folder)
    for mode in (0o777, 0o1777):  # The sticky bit keeps nobody from adding a module.
        folder.chmod(mode)
        with pytest.raises(PermissionError, match="other users may change"):
            check_unchangeable("the working directory", folder)


@pytest.mark.parametrize("mode", [0o600, 0o1666])
@pytest.mark.parametrize("way", ["link/ledger", "second", "first/../second"])
def test_every_folder_that_a_chain_of_links_passes_is_checked(tmp_path, mode, way):
    """Whoever may write to one of them can put another link there; the sticky bit of a file protects nothing."""
    for name in ("start", "middle", "end"):
        (tmp_path / name).mkdir()
    path = tmp_path / "end" / "ledger"
    path.touch()
    path.chmod(mode)
    (tmp_path / "middle" / "folder").symlink_to("../end")
    (tmp_path / "middle" / "file").symlink_to(path)
    (tmp_path / "start" / "link").symlink_to("../middle/folder")
    (tmp_path / "start" / "second").symlink_to("../middle/file")
    (tmp_path / "start" / "first").symlink_to(tmp_path / "middle" / "folder")
    given = tmp_path / "start" / way.replace("first/../", "first/../start/")
    assert given.samefile(path)
    if mode != 0o600:
        with pytest.raises(PermissionError, match=r"may change .*/end/ledger;"):
            check_unchangeable("--ledger", given)
        return
    check_unchangeable("--ledger", given)
    (tmp_path / "middle").chmod(0o777)
    with pytest.raises(PermissionError, match=r"may change .*/middle; forbid it: chmod go-w"):
        check_unchangeable("--ledger", given)


@root
def test_a_link_of_another_user_is_refused_although_the_folder_is_sticky(folder):
    """Its owner can replace it there."""
    (folder / "ledger").touch(mode=0o600)
    shared = folder / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    link = shared / "link"
    link.symlink_to(folder / "ledger")
    check_unchangeable("--ledger", link)
    os.chown(link, STRANGER, STRANGER, follow_symlinks=False)
    with pytest.raises(PermissionError, match="/shared/link belongs to another user"):
        check_unchangeable("--ledger", link)


@pytest.mark.parametrize("name", ["b", "ledger"])
def test_no_other_user_owns_it(tmp_path, monkeypatch, name):
    folder = tmp_path / "b"
    folder.mkdir()
    path = folder / "ledger"
    path.touch(mode=0o600)
    if os.geteuid() == 0:
        os.chown(tmp_path / "b" if name == "b" else path, STRANGER, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: STRANGER)
    with pytest.raises(PermissionError, match="belongs to another user"):
        check_unchangeable("--ledger", path)


@pytest.fixture
def command(tmp_path, monkeypatch):
    """The arguments of a worker; what starting one changes in this process is undone."""
    before = os.umask(0o077)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    data = tmp_path / "records.npz"
    np.savez(data, x=np.arange(3))
    options = {"--study": "hospitals.study:make_study", "--data": data, "--name": "a"}
    options |= {"--ledger": tmp_path / "ledger", "--epsilon": 1, "--socket": tmp_path / "w.sock"}
    options |= {"--socket-group": CLIENTS}
    yield options
    os.umask(before)


def start(options):
    return main([str(part) for pair in options.items() for part in pair if part is not None])


def test_a_worker_does_not_start_on_records_that_others_can_read(command, capsys):
    command["--data"].chmod(0o644)
    assert start(command) == 2
    assert "chmod go= " in capsys.readouterr().err
    assert not command["--ledger"].exists()


def test_a_worker_does_not_start_on_a_ledger_that_others_can_change(command, capsys, monkeypatch):
    """Nothing is charged, and there is no socket."""
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))
    monkeypatch.setattr(
        "tfp_dpvi.federated.deployment.access.check_unchangeable", lambda name, path: None
    )
    dpvi.PrivacyLedger(command["--ledger"]).close()
    command["--ledger"].chmod(0o660)
    assert start(command) == 2
    assert "--ledger=" in capsys.readouterr().err
    assert not command["--socket"].exists()


@pytest.mark.parametrize("argument", ["the working directory", "--study"])
def test_a_worker_does_not_start_on_code_that_others_can_change(command, capsys, argument):
    folder = command["--data"].parent
    code = folder / "study_of_others.py"
    code.write_text("")
    code.chmod(0o666 if argument == "--study" else 0o600)
    folder.chmod(0o777 if argument == "the working directory" else 0o700)
    assert start({**command, "--study": "study_of_others:make_study"}) == 2
    said = capsys.readouterr().err
    assert said.startswith(argument)
    assert "chmod go-w" in said
    assert "study_of_others" not in sys.modules  # It has not run.


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("changeable", ["the module", "its bytecode", "a namespace"])
def test_modules_that_a_study_imports_are_checked_before_they_run(
    command, capsys, late, changeable, tmp_path_factory, monkeypatch
):
    """Wherever they are, also when the study's function imports them."""
    name = f"helper_{late}_{changeable.replace(' ', '_')}"
    imports = f"import {name}.inner" if changeable == "a namespace" else f"import {name}"
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    monkeypatch.syspath_prepend(str(elsewhere))
    code = elsewhere / f"{name}.py"
    if changeable == "a namespace":
        (elsewhere / name).mkdir()
        code = elsewhere / name / "inner.py"
        (elsewhere / name).chmod(0o777)
    code.write_text("raise AssertionError('it has run')\n")
    code.chmod(0o666 if changeable == "the module" else 0o600)
    if changeable == "its bytecode":
        pathlib.Path(py_compile.compile(str(code))).chmod(0o666)
    study = command["--data"].parent / f"study_of_{name}.py"
    study.write_text(f"def make_study():\n    {imports}\n" if late else imports)
    assert start({**command, "--study": f"study_of_{name}:make_study"}) == 2
    said = capsys.readouterr().err
    assert said.startswith("--study=")
    assert str(elsewhere) in said
    assert name not in sys.modules


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"--socket-group": "of nobody"}, "there is no group 'of nobody'"),
        ({"--ledger": "postgresql://me:hunter2@host/db"}, "leave it to the file ~/.pgpass"),
        ({"--ledger": "postgresql://host/db?password=hunter2"}, "leave it to the file ~/.pgpass"),
        ({"--rehearsal": None}, "not allowed with"),
    ],
)
def test_a_worker_refuses_what_would_leave_it_open(command, capsys, changed, told):
    with pytest.raises(SystemExit):
        start({**command, **changed})
    said = capsys.readouterr().err
    assert told in said
    assert "hunter2" not in said


def test_a_worker_takes_its_randomness_from_the_command_line(command, monkeypatch):
    given = []
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))
    monkeypatch.setattr(
        worker, "hospital_of", lambda *_, **settings: given.append(settings) or mock.Mock(spent=0.0)
    )
    monkeypatch.setattr(worker, "serve", lambda *_, **settings: None)
    del command["--socket-group"]
    arguments = [str(part) for pair in command.items() for part in pair]
    for more in ([], ["--randomness", "secure"]):
        assert main([*arguments, "--rehearsal", *more]) == 0
    assert [one["randomness"] for one in given] == [None, "secure"]


def test_who_may_ask_has_no_default(command, capsys):
    """Checks that a worker without protection was asked for."""
    del command["--socket-group"]
    with pytest.raises(SystemExit):
        start(command)
    assert "one of the arguments --socket-group --rehearsal is required" in capsys.readouterr().err


# ---------------------------------------------------------------------- the whole of it

_AS_ANOTHER_USER = """
import ctypes, json, sys, tempfile
sys.path[:0] = json.loads(sys.argv[1])
import numpy as np
import hospitals.study
import tfp_dpvi.federated.deployment.worker as worker
from support import other_app
from tfp_dpvi.federated import Server, Synchronous

# A first hospital loads whatever is needed, while root can read the interpreter.
study = hospitals.study.make_study()
(task,) = Server(study.terms, ["first"], Synchronous()).due()
with tempfile.TemporaryDirectory() as folder:
    np.savez(folder + "/records.npz", x=np.zeros([300, 3], np.float32), y=np.zeros(300, np.int32))
    with np.load(folder + "/records.npz") as held:
        records = held["x"], held["y"]
    with worker.PrivacyLedger(folder + "/ledger") as ledger:
        budget = {"epsilon": 3.0, "rounds": 1, "ledger": ledger}
        worker.hospital_of(study, *records, name="first", **budget).answer(task.to_bytes())
other_app.become(int(sys.argv[2]), [int(sys.argv[3])])
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # As in a process that has never changed its user.
sys.exit(worker.main(sys.argv[4:]))
"""


@root
@linux
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_attack_on_a_real_worker(folder):
    """Another app's code as the SuperNode's user gets nothing but the worker's own rounds."""
    home, run = folder / "home", folder / "run"
    home.mkdir(mode=0o700)
    run.mkdir(mode=0o755)
    shutil.copytree(EXAMPLE, folder / "hospitals")
    rng = np.random.default_rng(1)
    x = rng.normal(size=(300, 3)).astype("float32")
    np.savez(home / "records.npz", x=x, y=(x[:, 0] > 0).astype("int32"))
    (home / "records.npz").chmod(0o600)
    for path in (home, home / "records.npz", run):
        os.chown(path, WORKER, WORKER)
    path = run / "w.sock"
    code = json.dumps([str(ROOT), str(folder), str(ROOT / "tests")])
    options = ["--study", "hospitals.study:make_study", "--data", home / "records.npz"]
    options += ["--name", "berlin", "--ledger", home / "ledger", "--epsilon", "3"]
    options += ["--rounds", "1", "--socket", path, "--socket-group", CLIENTS]
    command = [sys.executable, "-c", _AS_ANOTHER_USER, code, WORKER, CLIENTS, *options]
    server = Server(TERMS, ["berlin"], Synchronous(rounds=2))
    (task,) = server.due()
    of_another_study = StudyTerms("another", TERMS.prior)
    (foreign,) = Server(of_another_study, ["berlin"], Synchronous()).due()
    (other,) = Server(TERMS, ["munich"], Synchronous()).due()
    refused = [b"\x80\x04pickle", foreign.to_bytes(), other.to_bytes()]
    log = folder / "log"
    with log.open("wb") as written:
        worker = subprocess.Popen(
            [str(part) for part in command], cwd=folder, stdout=written, stderr=written
        )
    try:
        until = time.monotonic() + 300.0
        while not path.exists() and worker.poll() is None and time.monotonic() < until:
            time.sleep(0.1)
        assert path.exists(), log.read_text()
        there = {"folder": home, "socket": path, "pid": worker.pid}

        def charged():
            with dpvi.PrivacyLedger(home / "ledger", read_only=True) as ledger:
                return ledger.num_releases

        got = run_as(NODE, [CLIENTS], messages=refused, **there)
        assert got["attack"] == {}
        assert [answer[:1] for answer in got["answers"]] == ["-"] * 3
        assert "is no Task" in got["answers"][0]
        assert "is not this one" in got["answers"][1]
        assert "the task is for 'munich'" in got["answers"][2]
        assert run_as(STRANGER, [], messages=[task.to_bytes()], **there) == {
            "attack": {},
            "answers": ["PermissionError"],
        }
        own = run_as(WORKER, [CLIENTS], messages=[task.to_bytes()], **there)
        assert {"read the records", "read the ledger", "write the ledger"} <= own["attack"].keys()
        assert "run the SuperNode as another user" in own["answers"][0]
        assert charged() == 0

        # The consortium's own app, as the same user as the attack: answered, and no more than once.
        (answer,) = run_as(NODE, [CLIENTS], messages=[task.to_bytes()], **there)["answers"]
        assert answer[:1] == "+"
        assert server.receive("berlin", answer[1:].encode())
        assert charged() == TERMS.local_steps
        (again,) = server.due()
        (answer,) = run_as(NODE, [CLIENTS], messages=[again.to_bytes()], **there)["answers"]
        reply = Reply.from_bytes(answer[1:].encode(), TERMS)
        assert reply.change is None
        assert "all of them are charged" in reply.reason
        assert charged() == TERMS.local_steps
        assert run_as(NODE, [CLIENTS], **there)["attack"] == {}, "with records in its memory"
    finally:
        worker.kill()
        worker.wait()
