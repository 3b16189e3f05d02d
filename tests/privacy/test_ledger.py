"""The ledger's arithmetic, in memory and on disk."""

import copy
import json
import multiprocessing
import os
import pickle
import time

import dp_accounting
import pytest

from tfp_dpvi.privacy import (
    BudgetExhaustedError,
    EachRecordOncePerEpoch,
    FullBatch,
    LedgerError,
    PoissonSampling,
    PrivacyLedger,
    PrivacyPlan,
    UnsupportedPairError,
    _ledger_file,
)

PLAN = PrivacyPlan(PoissonSampling(0.01), 1.0, 1000)
OTHER = PrivacyPlan(PoissonSampling(0.05), 2.0, 200)


@pytest.fixture(params=["memory", "file"])
def make(request, tmp_path):
    """Returns a function that opens the same ledger again (a file) or a new one (in memory)."""
    opened = []

    def open_ledger(**kwargs):
        path = None if request.param == "memory" else tmp_path / "ledger.jsonl"
        opened.append(PrivacyLedger(path, **kwargs))
        return opened[-1]

    yield open_ledger
    for ledger in opened:
        ledger.close()


def test_empty_ledger_spent_nothing(make):
    ledger = make()
    assert ledger.epsilon(1e-5) == 0.0
    assert ledger.num_releases == 0
    assert ledger.events() == []
    assert ledger.neighboring_relation is None
    assert isinstance(ledger.dp_event, dp_accounting.NoOpDpEvent)


def test_reservations_count_before_confirmation(make):
    ledger = make()
    first = ledger.reserve(PLAN, 600)
    assert ledger.num_releases == 600
    assert ledger.unconfirmed_steps == 600
    ledger.confirm(first)
    ledger.reserve(PLAN, 400)
    assert ledger.num_releases == 1000
    assert ledger.unconfirmed_steps == 400
    assert len(ledger.entries) == 1
    assert ledger.epsilon(1e-5) == PLAN.epsilon(1e-5)


def test_several_plans_compose_as_events_not_by_adding_epsilons(make):
    ledger = make()
    for plan in (PLAN, OTHER, PLAN):
        ledger.reserve(plan, 100)
    assert [e.steps for e in ledger.entries] == [200, 100]
    apart = PLAN.replace(num_releases=200).epsilon(1e-5) + OTHER.replace(num_releases=100).epsilon(1e-5)
    assert ledger.epsilon(1e-5) < 0.95 * apart
    assert ledger.epsilon(1e-5) == OTHER.replace(num_releases=100).epsilon(
        1e-5, [PLAN.replace(num_releases=200).dp_event]
    )
    assert ledger.epsilon(1e-5, "rdp") > ledger.epsilon(1e-5)


def test_steps_that_never_ran_are_given_back_once(make):
    ledger = make()
    kept = ledger.reserve(PLAN, 10)
    given = ledger.reserve(PLAN, 50)
    ledger.confirm(given, steps_run=20)
    assert ledger.num_releases == 30
    with pytest.raises(LedgerError, match="confirmed before"):
        ledger.confirm(given, steps_run=0)
    with pytest.raises(ValueError, match="exceeds the 10 steps"):
        ledger.confirm(kept, steps_run=11)
    ledger.confirm(kept)
    with pytest.raises(LedgerError, match="unknown"):
        ledger.confirm(99)
    assert ledger.num_releases == 30
    assert ledger.unconfirmed_steps == 0


def test_adjacencies_do_not_compose(make):
    ledger = make()
    full = PrivacyPlan(FullBatch(), 5.0, 1)
    ledger.reserve(full, 1)
    with pytest.raises(UnsupportedPairError, match="do not compose"):
        ledger.reserve(full.replace(neighboring_relation="replace_one"), 1)
    assert ledger.num_releases == 1


@pytest.mark.parametrize("steps", [0, -1, True, 1.5, "3", float("nan"), None])
def test_bad_steps_cost_nothing(make, steps):
    ledger = make()
    with pytest.raises((TypeError, ValueError), match="steps"):
        ledger.reserve(PLAN, steps)
    with pytest.raises(TypeError, match="plan"):
        ledger.reserve("plan", 1)
    assert ledger.num_releases == 0


def test_batches_dealt_once_per_epoch_are_charged_by_the_epoch_and_fit(make):
    plan = PrivacyPlan(EachRecordOncePerEpoch(10), 5.0, 100, "replace_one")
    full = PrivacyPlan(FullBatch(), 5.0, 1, "replace_one")
    ledger = make()
    for _ in range(2):  # one fit of one epoch, in two reservations
        ledger.reserve(plan, 5, run="first")
    one = ledger.epsilon(1e-5)
    assert one == full.epsilon(1e-5)
    ledger.reserve(plan, 5, run="second")  # a new fit begins a new pass over the records
    assert ledger.epsilon(1e-5) == pytest.approx(full.replace(num_releases=2).epsilon(1e-5))
    ledger.reserve(plan, 5)
    ledger.reserve(plan, 5)  # unnamed reservations are never merged
    assert ledger.epsilon(1e-5) == pytest.approx(full.replace(num_releases=4).epsilon(1e-5))


def test_seeded_steps_are_charged_once(make):
    ledger = make()
    ledger.reserve(PLAN, 50, seed=7, first_step=0)
    ledger.reserve(PLAN, 50, seed=7, first_step=25)
    assert ledger.num_releases == 75
    ledger.reserve(PLAN, 75, seed=7, first_step=0)
    assert ledger.num_releases == 75
    ledger.reserve(PLAN, 10, seed=8, first_step=0)  # another seed: other noise
    ledger.reserve(PLAN.replace(noise_multiplier=1.5), 10, seed=7, first_step=0)  # another plan
    ledger.reserve(PLAN, 10, seed=7, first_step=0, run="another model")
    assert ledger.num_releases == 105
    assert ledger.seeded
    part = ledger.reserve(PLAN, 20, seed=7, first_step=70)  # 5 known, 15 new
    assert ledger.num_releases == 120
    again = ledger.reserve(PLAN, 20, seed=7, first_step=70)  # the same steps: nothing new
    ledger.confirm(part, steps_run=0)  # Gives nothing back, since `again` relies on it.
    ledger.confirm(again)
    assert ledger.num_releases == 120
    with pytest.raises(ValueError, match="both or neither"):
        ledger.reserve(PLAN, 1, seed=7)


def test_unseeded_steps_are_charged_again(make):
    ledger = make()
    ledger.reserve(PLAN, 50)
    ledger.reserve(PLAN, 50)
    assert ledger.num_releases == 100
    assert not ledger.seeded


def test_ledger_wide_budget_stops_before_it_is_overspent(make):
    target = PLAN.replace(num_releases=500).epsilon(1e-5)
    ledger = make(budget_epsilon=target, budget_delta=1e-5)
    for _ in range(10):
        ledger.reserve(PLAN, 50)
    with pytest.raises(BudgetExhaustedError, match="Nothing was charged"):
        ledger.reserve(PLAN, 1)
    with pytest.raises(BudgetExhaustedError):
        ledger.reserve(OTHER, 1)
    assert ledger.num_releases == 500
    assert ledger.epsilon(1e-5) <= target
    ledger.set_budget(2 * target, 1e-5)
    ledger.reserve(OTHER, 1)
    assert ledger.epsilon(1e-5) <= 2 * target


def test_second_calibration_uses_up_what_is_left(make):
    ledger = make()
    first = PrivacyPlan.calibrate(epsilon=0.5, delta=1e-5, sampling=PoissonSampling(0.01), num_releases=500)
    ledger.reserve(first, 500)
    second = PrivacyPlan.calibrate(
        epsilon=1.0, delta=1e-5, sampling=PoissonSampling(0.02), num_releases=300, prior_events=ledger.events()
    )
    ledger.reserve(second, 300)
    assert 0.99 <= ledger.epsilon(1e-5) <= 1.0
    with pytest.raises(BudgetExhaustedError, match="used up"):
        PrivacyPlan.calibrate(
            epsilon=0.9, delta=1e-5, sampling=PoissonSampling(0.02), num_releases=1, prior_events=ledger.events()
        )


def test_copies_share_what_is_spent(make):
    ledger = make()
    copied = copy.deepcopy(ledger)
    copied.reserve(PLAN, 5)
    assert ledger.num_releases == 5
    with pytest.raises(TypeError, match="pickled"):
        pickle.dumps(ledger)


def test_reserving_is_cheap():
    ledger = PrivacyLedger()
    start = time.process_time()
    for _ in range(2000):
        ledger.confirm(ledger.reserve(PLAN, 50))
    assert (time.process_time() - start) / 2000 < 1e-3
    assert ledger.num_releases == 100_000


def test_to_json_is_json(make):
    ledger = make(dataset_id="survey")
    ledger.reserve(PLAN, 5)
    data = json.loads(json.dumps(ledger.to_json()))
    assert data["dataset_id"] == "survey"
    assert data["num_releases"] == 5
    assert PrivacyPlan.from_json(data["entries"][0]["plan"]) == PLAN.replace(num_releases=1)


# --- on disk ---


def _path(tmp_path):
    return tmp_path / "ledger.jsonl"


def test_reopening_adds_up(tmp_path):
    with PrivacyLedger(_path(tmp_path), dataset_id="survey") as ledger:
        ledger.confirm(ledger.reserve(PLAN, 100), steps_run=60)
        open_reservation = ledger.reserve(OTHER, 20)
        spent = ledger.epsilon(1e-5)
    with PrivacyLedger(_path(tmp_path)) as again:
        assert again.dataset_id == "survey"
        assert again.num_releases == 80
        assert again.unconfirmed_steps == 20
        assert again.epsilon(1e-5) == spent
        with pytest.raises(LedgerError, match="earlier run"):
            again.confirm(open_reservation, steps_run=0)
        again.reserve(PLAN, 40)
        assert [e.steps for e in again.entries] == [100, 20]


def test_unnamed_data_get_a_random_identity(tmp_path):
    with PrivacyLedger(tmp_path / "a") as a, PrivacyLedger(tmp_path / "b") as b:
        assert a.dataset_id != b.dataset_id
        assert len(a.dataset_id) == 32


def test_another_data_set_is_refused(tmp_path):
    PrivacyLedger(_path(tmp_path), dataset_id="survey").close()
    with pytest.raises(LedgerError, match="bound"):
        PrivacyLedger(_path(tmp_path), dataset_id="other")
    PrivacyLedger(_path(tmp_path), dataset_id="survey").close()  # and the lock was given back


def test_budget_is_kept_in_the_file(tmp_path):
    PrivacyLedger(_path(tmp_path), budget_epsilon=0.1, budget_delta=1e-5).close()
    with pytest.raises(LedgerError, match="set_budget"):
        PrivacyLedger(_path(tmp_path), budget_epsilon=5.0, budget_delta=1e-5)
    with PrivacyLedger(_path(tmp_path)) as ledger:
        assert ledger.budget == (0.1, 1e-5)
        with pytest.raises(BudgetExhaustedError):
            ledger.reserve(PLAN, 1000)


def test_seeds_do_not_reach_the_file(tmp_path):
    with PrivacyLedger(_path(tmp_path)) as ledger:
        ledger.reserve(PLAN, 5, seed=123456789, first_step=0)
    assert b"123456789" not in _path(tmp_path).read_bytes()


def test_seeded_steps_survive_a_restart(tmp_path):
    for _ in range(2):
        with PrivacyLedger(_path(tmp_path)) as ledger:
            ledger.reserve(PLAN, 50, seed=7, first_step=100)
    assert ledger.num_releases == 50


@pytest.mark.parametrize("cut", [1, 2, 30, 120])
def test_torn_last_line_is_recovered(tmp_path, cut):
    with PrivacyLedger(_path(tmp_path)) as ledger:
        ledger.reserve(PLAN, 10)
        ledger.reserve(PLAN, 20)
    data = _path(tmp_path).read_bytes()
    _path(tmp_path).write_bytes(data[:-cut])
    with PrivacyLedger(_path(tmp_path)) as ledger:
        assert ledger.num_releases == 10
        ledger.reserve(PLAN, 5)
    with PrivacyLedger(_path(tmp_path)) as ledger:
        assert ledger.num_releases == 15


def test_torn_header_is_recovered(tmp_path):
    PrivacyLedger(_path(tmp_path), dataset_id="survey").close()
    data = _path(tmp_path).read_bytes()
    _path(tmp_path).write_bytes(data[:40])
    with PrivacyLedger(_path(tmp_path), dataset_id="survey") as ledger:
        ledger.reserve(PLAN, 5)
    with PrivacyLedger(_path(tmp_path)) as ledger:
        assert ledger.num_releases == 5


def _tampered(data):
    lines = data.splitlines(keepends=True)
    yield "a number", data.replace(b'"steps": 20', b'"steps": 02', 1)
    yield "a smaller number", data.replace(b'"steps": 20', b'"steps": 10', 1)
    yield "a line removed", b"".join(lines[:2] + lines[3:])
    yield "lines swapped", b"".join([*lines[:2], lines[3], lines[2], *lines[4:]])
    yield "a line twice", b"".join([*lines[:3], lines[2], *lines[3:]])
    yield "no header", b"".join(lines[1:])
    yield "garbage", data[:100] + b"\x00" + data[101:]
    yield "not a ledger", b'{"a": 1}\n'


def test_tampering_is_refused_and_the_file_left_alone(tmp_path):
    with PrivacyLedger(_path(tmp_path)) as ledger:
        for steps in (10, 20, 30):
            ledger.confirm(ledger.reserve(PLAN, steps))
    original = _path(tmp_path).read_bytes()
    for what, data in _tampered(original):
        assert data != original
        _path(tmp_path).write_bytes(data)
        for read_only in (False, True):
            with pytest.raises(LedgerError, match="altered"):
                PrivacyLedger(_path(tmp_path), read_only=read_only)
        assert _path(tmp_path).read_bytes() == data, what
    _path(tmp_path).write_bytes(original)
    with PrivacyLedger(_path(tmp_path)) as ledger:
        assert ledger.num_releases == 60


def test_newer_format_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("tfp_dpvi.privacy.ledger.VERSION", 2)
    with pytest.raises(LedgerError, match="version 2"):
        PrivacyLedger(_path(tmp_path))  # it is written, and then not understood
    monkeypatch.undo()
    data = _path(tmp_path).read_bytes()
    with pytest.raises(LedgerError, match="newer"):
        PrivacyLedger(_path(tmp_path))
    assert _path(tmp_path).read_bytes() == data


def test_two_objects_in_one_process_share_a_file(tmp_path):
    first = PrivacyLedger(_path(tmp_path), dataset_id="survey")
    second = PrivacyLedger(_path(tmp_path))
    first.reserve(PLAN, 10)
    token = second.reserve(PLAN, 20)
    assert first.num_releases == second.num_releases == 30
    first.confirm(token, steps_run=5)
    assert second.num_releases == 15
    first.close()
    with pytest.raises(LedgerError, match="closed"):
        first.reserve(PLAN, 1)
    second.reserve(PLAN, 1)
    second.close()
    with PrivacyLedger(_path(tmp_path)) as third:
        assert third.num_releases == 16


def test_read_only_looks_without_locking(tmp_path):
    with pytest.raises(LedgerError, match="cannot be read"):
        PrivacyLedger(_path(tmp_path), read_only=True)
    with PrivacyLedger(_path(tmp_path)) as ledger:
        ledger.reserve(PLAN, 10)
        look = PrivacyLedger(_path(tmp_path), read_only=True)
        assert look.num_releases == 10
        with pytest.raises(LedgerError, match="read_only"):
            look.reserve(PLAN, 1)


def test_a_failed_write_charges_nothing_and_is_undone(tmp_path, monkeypatch):
    with PrivacyLedger(_path(tmp_path)) as ledger:
        ledger.reserve(PLAN, 10)
        size = _path(tmp_path).stat().st_size
        real = os.write

        def half_then_fail(descriptor, data):
            if len(data) > 20:
                return real(descriptor, data[:20])
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "write", half_then_fail)
        monkeypatch.setattr("os.fsync", lambda descriptor: None)
        with pytest.raises(LedgerError, match="nothing was reserved"):
            ledger.reserve(PLAN, 1)
        monkeypatch.undo()
        assert _path(tmp_path).stat().st_size == size
        assert ledger.num_releases == 10
        ledger.reserve(PLAN, 1)
    with PrivacyLedger(_path(tmp_path)) as ledger:
        assert ledger.num_releases == 11


def test_an_interrupt_after_the_write_is_noticed(tmp_path, monkeypatch):
    with PrivacyLedger(_path(tmp_path)) as ledger:
        ledger.reserve(PLAN, 10)
        # The write reaches the disk, but the program is interrupted before it can take note of it.
        line, _ = _ledger_file.encode(ledger._file._hash, {"kind": "reserve", "id": 1, "steps": 30, "plan": 0})
        with _path(tmp_path).open("ab") as file:
            file.write(line)
        assert ledger.reserve(PLAN, 5) == 2
        assert ledger.num_releases == ledger.unconfirmed_steps == 45
    with PrivacyLedger(_path(tmp_path)) as ledger:
        assert ledger.num_releases == 45


def test_reserve_waits_for_the_disk(tmp_path, monkeypatch):
    synced = []
    real = os.fsync
    with PrivacyLedger(_path(tmp_path)) as ledger:
        monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.fstat(fd).st_size), real(fd)))
        ledger.reserve(PLAN, 10)
        assert synced == [_path(tmp_path).stat().st_size]


def _try_to_open(path, queue):
    try:
        with PrivacyLedger(path) as ledger:
            queue.put(("opened", ledger.num_releases))
    except LedgerError as error:
        queue.put(("refused", str(error)))


def test_a_second_process_is_refused_until_the_first_closes(tmp_path):
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    ledger = PrivacyLedger(_path(tmp_path))
    ledger.reserve(PLAN, 10)
    for expected in ("refused", "opened"):
        process = context.Process(target=_try_to_open, args=(_path(tmp_path), queue))
        process.start()
        process.join(60)
        found, detail = queue.get(timeout=10)
        assert found == expected
        if found == "refused":
            assert "in use by another process" in detail
            ledger.close()
        else:
            assert detail == 10


def test_a_forked_child_cannot_write_nor_unlock(tmp_path):
    ledger = PrivacyLedger(_path(tmp_path))
    child = os.fork()
    if child == 0:
        status = 1
        try:
            ledger.reserve(PLAN, 5)
        except LedgerError:
            status = 0
        ledger.close()
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert ledger.num_releases == 0
    ledger.reserve(PLAN, 3)
    queue = multiprocessing.get_context("spawn").Queue()
    process = multiprocessing.get_context("spawn").Process(target=_try_to_open, args=(_path(tmp_path), queue))
    process.start()
    assert queue.get(timeout=60)[0] == "refused"
    process.join(60)
    ledger.close()


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(LedgerError, match="existing folder"):
        PrivacyLedger(tmp_path / "nowhere" / "ledger")


@pytest.mark.parametrize(
    "kwargs",
    [
        {"dataset_id": ""},
        {"dataset_id": 3},
        {"budget_epsilon": 1.0},
        {"budget_delta": 1e-5},
        {"budget_epsilon": -1.0, "budget_delta": 1e-5},
        {"budget_epsilon": 1.0, "budget_delta": 0.0},
        {"read_only": True},
    ],
)
def test_bad_arguments(kwargs):
    with pytest.raises((TypeError, ValueError)):
        PrivacyLedger(**kwargs)


def test_exposures_are_kept_once_and_survive(tmp_path):
    with PrivacyLedger(_path(tmp_path)) as ledger:
        ledger.record_exposure("exact losses were shown")
        ledger.record_exposure("exact losses were shown")
        assert ledger.exposures == ("exact losses were shown",)
        assert ledger.to_json()["exposures"] == ["exact losses were shown"]
    with PrivacyLedger(_path(tmp_path)) as ledger:
        assert ledger.exposures == ("exact losses were shown",)
        for bad in ("", " ", None):
            with pytest.raises(TypeError, match="text"):
                ledger.record_exposure(bad)
    with PrivacyLedger(_path(tmp_path), read_only=True) as ledger, pytest.raises(LedgerError, match="read_only"):
        ledger.record_exposure("something else")
