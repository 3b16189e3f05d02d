"""The Flower app with real processes on this machine: TLS, node keys, SuperLink, SuperNodes, workers; one hospital is killed."""

import importlib.util
import pathlib
import time

import pytest

import tfp_dpvi as dpvi
from tfp_dpvi.federated import Terms

HERE = pathlib.Path(__file__).resolve().parents[2] / "examples" / "federated"


def _loopback():
    spec = importlib.util.spec_from_file_location("loopback", HERE / "loopback.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_terms_are_those_of_the_study(monkeypatch):
    """Checks that the server's terms are those of the hospitals' study."""
    monkeypatch.syspath_prepend(str(HERE))
    from hospitals.study import TERMS, make_study

    assert Terms.load(TERMS).identity == make_study().terms.identity


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("kill", [False, True])
def test_the_consortium_on_loopback(tmp_path, kill):
    """With a kill: one timeout, the others go on, the hospital comes back within the run, its ledger holds every round taken."""
    flwr = pytest.importorskip("flwr", reason="Flower is not installed (the extra `federated`)")
    version = tuple(map(int, flwr.__version__.split(".")[:2]))
    if version < (1, 41):
        pytest.skip(f"the script is for the flags of Flower 1.41, and this is {flwr.__version__}")
    loopback = _loopback()
    one = loopback.Consortium(tmp_path, 2, 10 if kill else 2)

    def kill_and_come_back():
        time.sleep(0.5)
        one.kill("hospital1-node")
        one.kill("hospital1-worker")
        one.start_hospital("hospital1")

    try:
        one.begin()
        found = one.run(tmp_path / "history.json", during=kill_and_come_back if kill else None, timeout=1200.0)
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
    steps = Terms.load(HERE / "hospitals" / "terms.json").local_steps
    for name, least in (("hospital0", len(rounds)), ("hospital1", taken)):
        with dpvi.PrivacyLedger(tmp_path / f"{name}.ledger", read_only=True) as ledger:
            assert ledger.num_releases >= least * steps
            assert len(ledger.entries) == 1
            assert ledger.epsilon(1e-5) <= 3.0
