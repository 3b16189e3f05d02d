"""The Flower app with real processes on this machine: TLS, node keys, SuperLink, SuperNodes, workers; one hospital is killed."""

import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

import pytest

import tfp_dpvi as dpvi
from tfp_dpvi.federated import StudyTerms

ROOT = pathlib.Path(__file__).resolve().parents[2]
HERE = ROOT / "examples" / "federated"


def _loopback():
    spec = importlib.util.spec_from_file_location("loopback", HERE / "loopback.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _flower_for_the_script():
    """Skips a test without a Flower that has the script's flags."""
    flwr = pytest.importorskip("flwr", reason="Flower is not installed (the extra `federated`)")
    version = tuple(map(int, flwr.__version__.split(".")[:2]))
    if version < (1, 41):
        pytest.skip(f"the script is for the flags of Flower 1.41, and this is {flwr.__version__}")


def test_the_terms_are_those_of_the_study(monkeypatch):
    """Checks that the server's terms are those of the hospitals' study."""
    monkeypatch.syspath_prepend(str(HERE))
    from hospitals.study import TERMS, make_study

    assert StudyTerms.load(TERMS).identity == make_study().terms.identity


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("kill", [False, True])
def test_the_consortium_on_loopback(tmp_path, kill):
    """With a kill: one timeout, the others go on, the hospital comes back within the run, its ledger holds every round taken."""
    _flower_for_the_script()
    loopback = _loopback()
    one = loopback.Consortium(tmp_path, 2, 10 if kill else 2)

    def kill_and_come_back():
        time.sleep(0.5)
        one.kill("hospital1-node")
        one.kill("hospital1-worker")
        one.start_hospital("hospital1")

    try:
        one.begin()
        found = one.run(
            tmp_path / "history.json", during=kill_and_come_back if kill else None, timeout=1200.0
        )
    finally:
        one.close()
    rounds = found["rounds"]
    assert found["no_tensorflow"]
    assert found["refused"] == []
    assert len(rounds) == one.rounds
    assert all("hospital0" in each["hospitals"] for each in rounds)
    taken = sum("hospital1" in each["hospitals"] for each in rounds)
    assert taken < one.rounds if kill else taken == one.rounds
    assert "hospital1" in rounds[-1]["hospitals"]
    steps = StudyTerms.load(HERE / "hospitals" / "terms.json").local_steps
    for name, least in (("hospital0", len(rounds)), ("hospital1", taken)):
        with dpvi.PrivacyLedger(one.ledger_of(name), read_only=True) as ledger:
            assert ledger.num_releases >= least * steps
            assert len(ledger.entries) == 1
            assert ledger.epsilon(1e-5) <= 3.0


_OTHER_CLIENT = """
import json
from hospitals import other_app
from tfp_dpvi.federated.deployment.flower import client_app

def answer(task):
    return json.dumps(other_app.attack({folder!r}, {pid})).encode()

app = client_app(lambda context: ("hospital0", answer))
"""
_OTHER_SERVER = """
import pathlib, time
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()

@app.main()
def main(grid, context):
    while not (nodes := list(grid.get_node_ids())):
        time.sleep(0.5)
    task = RecordDict({"tfp_dpvi": ConfigRecord({"message": b"task"})})
    (reply,) = grid.send_and_receive([Message(task, dst_node_id=nodes[0], message_type="train")])
    got = reply.content["tfp_dpvi"]["message"]
    pathlib.Path(str(context.run_config["output"])).write_bytes(got)
"""


def _executable_by_others(user):
    try:
        subprocess.run([sys.executable, "-c", ""], user=user, group=user, check=True)
    except OSError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("separate_users", [False, True])
def test_another_app_on_the_same_nodes(separate_users):
    """Flower runs it at the hospital: it reads a rehearsal's records, and no other user's."""
    _flower_for_the_script()
    loopback = _loopback()
    if separate_users and os.geteuid() != 0:
        pytest.skip("only root can start processes as other users")
    if separate_users and not _executable_by_others(loopback.NODE):
        pytest.skip("other users cannot execute this Python")
    folder = pathlib.Path(tempfile.mkdtemp())  # Pytest's own folders belong to one user.
    folder.chmod(0o711)
    app = folder / "app"
    shutil.copytree(HERE, app)
    shutil.copy(ROOT / "tests" / "support" / "other_app.py", app / "hospitals")
    consortium = loopback.Consortium(folder, 1, 2, separate_users=separate_users)
    try:
        consortium.begin()
        settings = {
            "folder": str(folder / "hospital0"),
            "pid": consortium.processes["hospital0-worker"].pid,
        }
        (app / "hospitals" / "client.py").write_text(_OTHER_CLIENT.format(**settings))
        (app / "hospitals" / "server.py").write_text(_OTHER_SERVER)
        got = consortium.run(folder / "got.json", app=app, timeout=600.0)
        if separate_users:
            assert got == {}
        else:
            assert {"read the records", "write the ledger"} <= got.keys()
        consortium.kill("run")
        history = consortium.run(folder / "history.json", timeout=600.0)
        assert [each["hospitals"] for each in history["rounds"]] == [["hospital0"]] * 2
    finally:
        consortium.close()
        shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_app_on_ray(tmp_path):
    """The guide's line: three hospitals in Ray's processes, each of which keeps its own ledger."""
    flwr = pytest.importorskip("flwr", reason="Flower is not installed (the extra `federated`)")
    pytest.importorskip("ray", reason="Ray is not installed (the extra `simulation`)")
    app, output, home = tmp_path / "app", tmp_path / "history.json", tmp_path / "flwr"
    shutil.copytree(HERE, app)
    home.mkdir()
    where = ["local", "--federation-config", "num-supernodes=3"]
    if tuple(map(int, flwr.__version__.split(".")[:2])) < (1, 26):
        where = ["local-simulation"]
        settings = (app / "pyproject.toml").read_text()
        head, tail = settings.split("# [tool.flwr.federations]")
        (app / "pyproject.toml").write_text(
            head + "[tool.flwr.federations]" + tail.replace("\n# ", "\n")
        )
    path = os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ.get("PATH", "")])
    quiet = {
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    environment = {**os.environ, **quiet, "FLWR_HOME": str(home), "PATH": path}
    environment["PYTHONPATH"] = str(HERE.parents[1])
    command = ["flwr", "run", str(app), *where, "--stream", "--run-config"]
    command.append(f'output="{output}" roster="trust_on_first_use"')
    with (
        tempfile.TemporaryDirectory() as short
    ):  # Ray's sockets lie in it, and have at most 107 characters.
        environment["TMPDIR"] = short
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=600
            )
        finally:  # Later versions leave a SuperLink behind, with its database in this folder.
            subprocess.run(["pkill", "-f", str(home)], check=False)
        assert output.exists(), done.stdout[-3000:] + done.stderr[-3000:]
        rounds = json.loads(output.read_text())["rounds"]
        assert [len(one["hospitals"]) for one in rounds] == [3, 3, 3]
        steps = StudyTerms.load(HERE / "hospitals" / "terms.json").local_steps
        ledgers = list(pathlib.Path(short).glob("tfp_dpvi-simulated-*/hospital*.ledger"))
        assert len(ledgers) == 3
        for path in ledgers:
            with dpvi.PrivacyLedger(path, read_only=True) as ledger:
                assert ledger.num_releases == 3 * steps
                assert ledger.epsilon(1e-5) <= 3.0
