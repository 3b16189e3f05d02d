"""Old names and module paths of `federated`, which users' scripts and service units have."""

import importlib
import subprocess
import sys

import pytest

from tfp_dpvi import federated


@pytest.mark.parametrize(
    ("old", "new", "name"),
    [
        ("access", "deployment.access", "check_private"),
        ("local", "refiner", "Refiner"),
        ("proxy", "deployment.proxy", "ask"),
        ("worker", "deployment.worker", "serve"),
    ],
)
def test_an_old_module_path_warns_and_has_the_same_names(monkeypatch, old, new, name):
    monkeypatch.delitem(sys.modules, f"tfp_dpvi.federated.{old}", raising=False)
    with pytest.warns(FutureWarning, match=f"federated.{old} is now tfp_dpvi.federated.{new};"):
        before = importlib.import_module(f"tfp_dpvi.federated.{old}")
    now = importlib.import_module(f"tfp_dpvi.federated.{new}")
    assert getattr(before, name) is getattr(now, name)


def test_an_old_name_warns_and_is_the_new_one():
    with pytest.warns(FutureWarning, match=r"federated\.Terms is now .*federated\.StudyTerms;"):
        assert federated.Terms is federated.StudyTerms


def test_a_worker_starts_under_its_old_path():
    command = [sys.executable, "-m", "tfp_dpvi.federated.worker", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "--socket-group" in done.stdout
    assert "tfp_dpvi.federated.worker is now tfp_dpvi.federated.deployment.worker" in done.stderr
