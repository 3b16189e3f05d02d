"""What a saved model keeps of its ledger, and what a process knows of ledgers in memory (fault 4)."""

import concurrent.futures
import json
import logging
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from tfp_dpvi.privacy import (
    BudgetExhaustedError,
    FullBatch,
    LedgerError,
    PrivacyLedger,
    PrivacyPlan,
    PrivacyReport,
)

PLAN = PrivacyPlan(FullBatch(), 5.0, 1)
OTHER = PrivacyPlan(FullBatch(), 7.0, 1)
ROOT = pathlib.Path(__file__).resolve().parents[2]
CONTINUED = "continued from a file"


def _saved(ledger):
    return json.loads(json.dumps(ledger.to_config()))


# Another process that loads a saved ledger, spends on, and saves it again.
ELSEWHERE = """
import json, sys
from tfp_dpvi.privacy import FullBatch, PrivacyLedger, PrivacyPlan
ledger = PrivacyLedger.from_config(json.loads(sys.argv[1]))
for _ in range(int(sys.argv[2])):
    ledger.reserve(PrivacyPlan(FullBatch(), 5.0, 1), 1)
print(json.dumps([ledger.to_config(), ledger.num_releases, ledger.caveats, ledger.budget]))
"""


def _elsewhere(config, steps):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, json.dumps(config), str(steps)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_file_does_not_rename_the_data_set_of_a_ledger_that_this_process_has():
    ledger = PrivacyLedger(dataset_id="survey")
    for other in (None, "another"):
        assert PrivacyLedger.from_config({**_saved(ledger), "dataset_id": other}) is ledger
        assert ledger.dataset_id == "survey"


def test_loading_an_older_file_forgets_nothing_that_this_process_spent():
    """Fault 4: save, fit on, delete the model, load the older file: what was fitted in between was gone."""
    ledger = PrivacyLedger(
        budget_epsilon=PLAN.replace(num_releases=10).epsilon(1e-5), budget_delta=1e-5
    )
    ledger.reserve(PLAN, 4)
    config = _saved(ledger)
    ledger.reserve(PLAN, 5)
    del ledger
    loaded = PrivacyLedger.from_config(config)
    assert loaded.num_releases == 9
    assert loaded.caveats == ()  # Nothing can be missing.
    with pytest.raises(BudgetExhaustedError):
        loaded.reserve(PLAN, 2)
    assert PrivacyLedger.from_config(config) is loaded


def test_what_was_given_back_after_saving_stays_given_back():
    ledger = PrivacyLedger()
    token = ledger.reserve(PLAN, 10)
    config = _saved(ledger)
    ledger.confirm(token, steps_run=3)
    assert PrivacyLedger.from_config(config).num_releases == 3


def test_a_ledger_restored_in_another_process_says_that_it_is_continued(caplog):
    ledger = PrivacyLedger(dataset_id="survey", budget_epsilon=3.0, budget_delta=1e-5)
    ledger.reserve(PLAN, 4)
    ledger.record_exposure("exact losses were shown")
    config, releases, caveats, budget = _elsewhere(_saved(ledger), 2)
    assert releases == 6
    assert len(caveats) == 1
    assert caveats[0].startswith(CONTINUED)
    assert budget == [3.0, 1e-5]
    assert config["dataset_id"] == "survey"
    assert config["exposures"] == ["exact losses were shown"]
    # Back here both spent since, and what the other one spent after it was saved is not known.
    ledger.reserve(PLAN, 1)
    with caplog.at_level(logging.WARNING, "tfp_dpvi"):
        assert PrivacyLedger.from_config(config) is ledger
    assert ledger.num_releases == 4 + 1 + 2
    assert CONTINUED in caplog.text
    assert ledger.caveats[0].startswith(CONTINUED)
    assert CONTINUED in str(PrivacyReport.from_ledger(ledger, delta=1e-5))
    PrivacyLedger.from_config(config)  # Once more: nothing is counted twice.
    assert ledger.num_releases == 7


def test_copies_that_went_on_apart_are_added_up():
    ledger = PrivacyLedger()
    ledger.reserve(PLAN, 4)
    config = _saved(ledger)
    with concurrent.futures.ThreadPoolExecutor() as pool:  # Each is a process.
        first, second = (
            found[0] for found in pool.map(lambda steps: _elsewhere(config, steps), (2, 3))
        )
    PrivacyLedger.from_config(first)
    PrivacyLedger.from_config(second)
    assert ledger.num_releases == 4 + 2 + 3


def test_a_saved_ledger_that_spent_nothing_is_not_called_continued(caplog):
    config = _saved(PrivacyLedger(budget_epsilon=1.0, budget_delta=1e-5))
    config["ledger_id"] = "of a process that spent nothing"
    loaded = PrivacyLedger.from_config(config)
    assert loaded.caveats == ()
    assert loaded.budget == (1.0, 1e-5)
    assert not caplog.records


def test_a_file_is_opened_where_it_was(tmp_path):
    with PrivacyLedger(tmp_path / "ledger", dataset_id="survey") as ledger:
        ledger.reserve(PLAN, 4)
        config = _saved(ledger)
        ledger.reserve(OTHER, 5)
    with PrivacyLedger.from_config(config) as loaded:
        assert loaded.num_releases == 9
        assert loaded.caveats == ()
        loaded.reserve(PLAN, 1)
        assert loaded.continues_from(ledger_mark := loaded.mark())
        assert json.loads(json.dumps(ledger_mark)) == ledger_mark


def test_an_older_copy_or_another_ledger_in_its_place_is_refused(tmp_path):
    path = tmp_path / "ledger"
    with PrivacyLedger(path, dataset_id="survey") as ledger:
        ledger.reserve(PLAN, 4)
        shutil.copy(path, tmp_path / "older")
        ledger.reserve(PLAN, 5)
        config, mark = _saved(ledger), ledger.mark()
    shutil.copy(tmp_path / "older", path)
    with pytest.raises(LedgerError, match="older copy"):
        PrivacyLedger.from_config(config)
    with PrivacyLedger(path) as older:
        assert not older.continues_from(mark)
    path.unlink()
    with PrivacyLedger(path, dataset_id="survey") as ledger:
        for _ in range(10):
            ledger.reserve(PLAN, 4)
        assert not ledger.continues_from(mark)
    with pytest.raises(LedgerError, match="not the saved model's ledger"):
        PrivacyLedger.from_config(config)


def test_a_file_that_moved_is_read_from_the_model_and_reserves_nothing(tmp_path):
    with PrivacyLedger(tmp_path / "ledger", budget_epsilon=3.0, budget_delta=1e-5) as ledger:
        ledger.reserve(PLAN, 4)
        config = _saved(ledger)
    (tmp_path / "ledger").rename(tmp_path / "moved")
    loaded = PrivacyLedger.from_config(config)
    assert loaded.num_releases == 4
    assert loaded.budget == (3.0, 1e-5)
    with pytest.raises(LedgerError, match="compile") as caught:
        loaded.reserve(PLAN, 1)
    assert len(str(caught.value).splitlines()) <= 2
    with PrivacyLedger(tmp_path / "moved") as moved, PrivacyLedger(tmp_path / "new") as new:
        assert moved.continues(loaded)
        with pytest.raises(LedgerError, match="not the saved model's ledger"):
            new.continues(loaded)
        assert not moved.continues(new)
