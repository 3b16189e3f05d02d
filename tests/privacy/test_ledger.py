"""The ledger's arithmetic, in memory and in a file; what a file keeps."""

import contextlib
import copy
import datetime
import gc
import os
import pickle
import resource
import sqlite3
import weakref

import dp_accounting
import pytest

from tfp_dpvi.privacy import (
    BudgetExhaustedError,
    EachRecordOncePerEpoch,
    FixedSizeSampling,
    FullBatch,
    LedgerError,
    PoissonSampling,
    PrivacyLedger,
    PrivacyPlan,
    PrivacyReport,
    UnsupportedPairError,
    database,
)

PLAN = PrivacyPlan(
    FullBatch(), 40.0, 1000
)  # Priced in closed form: what is tested here is who counts what.
OTHER = PrivacyPlan(FullBatch(), 20.0, 200)


@pytest.fixture(params=["memory", "file"])
def make(request, tmp_path):
    """Returns a function that opens the same ledger again (a file) or a new one (in memory)."""
    opened = []

    def open_ledger(**kwargs):
        path = None if request.param == "memory" else tmp_path / "books.ledger"
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


@pytest.mark.smoke
def test_several_plans_compose_as_events_not_by_adding_epsilons(make):
    ledger = make()
    plan, other = (
        PrivacyPlan(PoissonSampling(0.01), 1.0, 1000),
        PrivacyPlan(PoissonSampling(0.05), 2.0, 200),
    )
    for each in (plan, other, plan):
        ledger.reserve(each, 100)
    assert [e.steps for e in ledger.entries] == [200, 100]
    apart = plan.replace(num_releases=200).epsilon(1e-5) + other.replace(num_releases=100).epsilon(
        1e-5
    )
    assert ledger.epsilon(1e-5) < 0.95 * apart
    assert ledger.epsilon(1e-5) == other.replace(num_releases=100).epsilon(
        1e-5, [plan.replace(num_releases=200).dp_event]
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


def test_seeded_steps_are_charged_like_any_other(make):
    ledger = make()
    assert not ledger.seeded
    ledger.reserve(PLAN, 50, seeded=True)
    again = ledger.reserve(PLAN, 50, seeded=True)
    ledger.reserve(PLAN, 10)
    assert ledger.num_releases == 110
    assert ledger.seeded
    assert [(e.steps, e.seeded) for e in ledger.entries] == [(100, True), (10, False)]
    assert ledger.epsilon(1e-5) == PLAN.replace(num_releases=110).epsilon(1e-5)
    ledger.confirm(again, steps_run=0)
    assert ledger.num_releases == 60


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


def test_budgets_of_a_call_hold_beside_the_ledgers_own(make):
    def price(n):
        return PLAN.replace(num_releases=n).epsilon(1e-5)

    ledger = make(budget_epsilon=price(500), budget_delta=1e-5)
    mine = [(price(200), 1e-5), (100.0, 1e-9)]
    ledger.reserve(PLAN, 200, budgets=mine)
    with pytest.raises(
        BudgetExhaustedError, match=r"steps=1: the budget of epsilon .* at delta 1e-05"
    ):
        ledger.reserve(PLAN, 1, budgets=mine)
    with pytest.raises(BudgetExhaustedError):
        ledger.reserve(PLAN, 1, budgets=[(100.0, 1e-5), (price(200), 1e-5)])
    assert ledger.num_releases == 200
    ledger.reserve(PLAN, 300)
    with pytest.raises(BudgetExhaustedError):
        ledger.reserve(PLAN, 1, budgets=[(100.0, 1e-5)])


def test_what_was_given_back_can_be_spent_again(make):
    target = PLAN.replace(num_releases=100).epsilon(1e-5)
    ledger = make(budget_epsilon=target, budget_delta=1e-5)
    first = ledger.reserve(PLAN, 100)
    with pytest.raises(BudgetExhaustedError):
        ledger.reserve(PLAN, 1)
    ledger.confirm(first, steps_run=40)
    ledger.reserve(PLAN, 60)
    with pytest.raises(BudgetExhaustedError):
        ledger.reserve(PLAN, 1)
    assert ledger.num_releases == 100


def test_no_noise_keeps_no_budget(make):
    ledger = make(budget_epsilon=1e6, budget_delta=1e-5)
    with pytest.raises(BudgetExhaustedError):
        ledger.reserve(PLAN.replace(noise_multiplier=0.0), 1)
    assert ledger.num_releases == 0


def test_each_fit_of_one_step_is_priced_as_a_pass_over_the_records(make):
    """Fault 2: the allowance counted steps while the price counts passes, so that 100 fits spent 4.38 of 1.0."""
    plan = PrivacyPlan(EachRecordOncePerEpoch(10), 10.0, 10, "replace_one")
    ledger = make(budget_epsilon=1.0, budget_delta=1e-5)
    granted = 0
    for fit in range(100):
        try:
            ledger.reserve(plan, 1, run=f"fit {fit}")
            granted += 1
        except BudgetExhaustedError:
            break
    full = PrivacyPlan(FullBatch(), 10.0, granted, "replace_one")
    assert 1 <= granted < 100
    assert ledger.epsilon(1e-5) == pytest.approx(full.epsilon(1e-5))
    assert ledger.epsilon(1e-5) <= 1.0 < full.replace(num_releases=granted + 1).epsilon(1e-5)


def test_fixed_size_releases_have_a_report_a_budget_and_an_end(make):
    """Fault 6: with one of them in the ledger, report, budget and reserve raised `UnsupportedPairError`."""
    plan = PrivacyPlan(FixedSizeSampling(1000, 10), 2.0, 100, "replace_one", accountant="rdp")
    target = plan.epsilon(1e-5)
    ledger = make(budget_epsilon=target, budget_delta=1e-5)
    ledger.reserve(plan, 60)
    ledger.reserve(PrivacyPlan(FullBatch(), 100.0, 1, "replace_one"), 1)
    assert 0.0 < ledger.epsilon(1e-5) <= target
    assert ledger.epsilon(1e-5) == ledger.epsilon(1e-5, "rdp")
    assert PrivacyReport.from_ledger(
        ledger, delta=1e-5, accountant="rdp"
    ).epsilon == ledger.epsilon(1e-5)
    with pytest.raises(BudgetExhaustedError, match="Nothing was charged"):
        ledger.reserve(plan, 41)
    with pytest.raises(
        UnsupportedPairError, match=r"no accountant supports these|dp-accounting >= 0\.5"
    ):
        ledger.reserve(PrivacyPlan(PoissonSampling(0.01), 1.0, 1, "replace_one"), 1)
    assert ledger.num_releases == 61


def test_a_report_of_fixed_size_releases_needs_no_accountant_named():
    ledger = PrivacyLedger()
    ledger.reserve(
        PrivacyPlan(FixedSizeSampling(1000, 10), 2.0, 100, "replace_one", accountant="rdp"), 60
    )
    assert PrivacyReport.from_ledger(ledger, delta=1e-5).epsilon == ledger.epsilon(1e-5)


def test_second_calibration_uses_up_what_is_left(make):
    ledger = make()
    first = PrivacyPlan.calibrate(
        epsilon=0.5, delta=1e-5, sampling=PoissonSampling(0.01), num_releases=500
    )
    ledger.reserve(first, 500)
    second = PrivacyPlan.calibrate(
        epsilon=1.0,
        delta=1e-5,
        sampling=PoissonSampling(0.02),
        num_releases=300,
        prior_events=ledger.events(),
    )
    ledger.reserve(second, 300)
    assert 0.99 <= ledger.epsilon(1e-5) <= 1.0
    with pytest.raises(BudgetExhaustedError, match="used up"):
        PrivacyPlan.calibrate(
            epsilon=0.9,
            delta=1e-5,
            sampling=PoissonSampling(0.02),
            num_releases=1,
            prior_events=ledger.events(),
        )


def test_copies_share_what_is_spent(make):
    ledger = make()
    copied = copy.deepcopy(ledger)
    copied.reserve(PLAN, 5)
    assert ledger.num_releases == 5
    with pytest.raises(TypeError, match="pickled"):
        pickle.dumps(ledger)


def test_entries_carry_a_utc_time(make):
    before = datetime.datetime.now(datetime.timezone.utc).replace(microsecond=0)
    ledger = make()
    ledger.reserve(PLAN, 5)
    ledger.reserve(PLAN, 5)
    (entry,) = ledger.entries
    since = datetime.datetime.fromisoformat(entry.since)
    assert since.utcoffset() == datetime.timedelta(0)
    assert before <= since <= datetime.datetime.now(datetime.timezone.utc)


@pytest.mark.parametrize("name", [None, "ledger"])
def test_a_ledger_goes_with_its_last_owner(tmp_path, name):
    ledger = PrivacyLedger(None if name is None else tmp_path / name)
    ledger.reserve(PLAN, 1)
    gone = [weakref.ref(one) for one in (ledger, ledger._database, ledger._database._engine)]
    del ledger
    gc.collect(1)  # They are young; the whole heap takes seconds.
    assert [one() for one in gone] == [None, None, None]


# --- on disk ---


def _path(tmp_path):
    return tmp_path / "books.ledger"


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
        child = os.fork()
        if child == 0:
            try:
                again.confirm(open_reservation, steps_run=0)
            except LedgerError as error:
                os._exit(0 if "another process" in str(error) else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
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


def test_seeded_steps_survive_a_restart(tmp_path):
    for _ in range(2):
        with PrivacyLedger(_path(tmp_path)) as ledger:
            ledger.reserve(PLAN, 50, seeded=True)
    with PrivacyLedger(_path(tmp_path)) as ledger:
        assert ledger.num_releases == 100
        assert ledger.seeded


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


def test_read_only_looks_while_another_writes(tmp_path):
    with pytest.raises(LedgerError, match="unable to open database file"):
        PrivacyLedger(_path(tmp_path), read_only=True)
    with PrivacyLedger(_path(tmp_path)) as ledger:
        ledger.reserve(PLAN, 10)
        look = PrivacyLedger(_path(tmp_path), read_only=True)
        assert look.num_releases == 10
        with pytest.raises(LedgerError, match="read_only"):
            look.reserve(PLAN, 1)


def test_a_failed_write_charges_nothing_and_is_undone(tmp_path):
    with PrivacyLedger(_path(tmp_path)) as ledger:
        ledger.reserve(PLAN, 10)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        for limit in (
            0,
            600,
            5000,
            9000,
        ):  # The disk is full: in the journal, or in the middle of the file.
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
            try:
                with pytest.raises(LedgerError, match="Nothing was written"):
                    ledger.reserve(OTHER, 1)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            assert ledger.num_releases == 10
        ledger.reserve(OTHER, 1)
    with PrivacyLedger(_path(tmp_path)) as ledger:
        assert ledger.num_releases == 11


@pytest.mark.parametrize("written", [False, True])
def test_an_interrupt_at_the_commit_is_noticed(tmp_path, monkeypatch, written):
    with PrivacyLedger(_path(tmp_path)) as ledger:
        ledger.reserve(PLAN, 10)
        real = ledger._database._engine.dialect.do_commit

        def interrupted(connection):
            if connection.in_transaction and connection.total_changes:
                if written:
                    real(connection)
                raise KeyboardInterrupt
            real(connection)

        monkeypatch.setattr(ledger._database._engine.dialect, "do_commit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ledger.reserve(PLAN, 30)
        monkeypatch.undo()
        ledger.reserve(PLAN, 5)
        assert ledger.num_releases == ledger.unconfirmed_steps == (45 if written else 15)
    with PrivacyLedger(_path(tmp_path)) as ledger:
        assert ledger.num_releases == (45 if written else 15)


def test_reserve_waits_for_the_disk(tmp_path):
    with PrivacyLedger(_path(tmp_path)) as ledger:
        ledger.reserve(PLAN, 10)
        with ledger._database.write() as connection:
            found = {
                name: connection.exec_driver_sql(f"PRAGMA {name}").scalar_one()
                for name in ("synchronous", "journal_mode")
            }
    assert found == {"synchronous": 3, "journal_mode": "delete"}


def test_the_documented_tables_can_be_read_by_any_client(tmp_path):
    with PrivacyLedger(
        _path(tmp_path), dataset_id="survey", budget_epsilon=3.0, budget_delta=1e-5
    ) as ledger:
        ledger.confirm(ledger.reserve(PLAN, 10), steps_run=4)
        ledger.reserve(OTHER, 2, seeded=True)
        ledger.record_exposure("exact losses were shown")
    with contextlib.closing(sqlite3.connect(_path(tmp_path))) as client:
        assert client.execute("SELECT dataset_id, format FROM ledger").fetchall() == [
            ("survey", database.FORMAT)
        ]
        charges = client.execute(
            "SELECT plans.plan, seeded, steps FROM charges JOIN plans ON plans.id = charges.plan"
        ).fetchall()
        assert [row[1:] for row in charges] == [(0, 4), (1, 2)]
        assert client.execute("SELECT steps, steps_run FROM reservations").fetchall() == [
            (10, 4),
            (2, None),
        ]
        assert client.execute("SELECT epsilon, delta FROM budgets").fetchall() == [(3.0, 1e-5)]
        assert client.execute("SELECT text FROM exposures").fetchall() == [
            ("exact losses were shown",)
        ]


def test_only_the_owner_can_read_a_new_file(tmp_path):
    PrivacyLedger(_path(tmp_path)).close()
    assert _path(tmp_path).stat().st_mode & 0o777 == 0o600
    assert [one.name for one in tmp_path.iterdir()] == [_path(tmp_path).name]


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
    with PrivacyLedger(_path(tmp_path)) as ledger:
        assert ledger.exposures == ("exact losses were shown",)
        for bad in ("", " ", None, "a\nb", "\ud800"):
            with pytest.raises(TypeError, match="text"):
                ledger.record_exposure(bad)
    with (
        PrivacyLedger(_path(tmp_path), read_only=True) as ledger,
        pytest.raises(LedgerError, match="read_only"),
    ):
        ledger.record_exposure("something else")


# --- a training loop of the user's own ---


def test_reserved_steps_are_charged_before_the_body_and_confirmed_after_it(make):
    ledger = make()
    with ledger.reserved(PLAN.replace(num_releases=30)):
        assert ledger.num_releases == ledger.unconfirmed_steps == 30
    assert (ledger.num_releases, ledger.unconfirmed_steps) == (30, 0)
    with ledger.reserved(PLAN, 5, seeded=True):
        pass
    assert [(entry.steps, entry.seeded) for entry in ledger.entries] == [(30, False), (5, True)]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_body_that_raises_leaves_all_its_steps_charged(make, error):
    ledger = make()
    with pytest.raises(error), ledger.reserved(PLAN, 20):
        raise error
    assert ledger.num_releases == ledger.unconfirmed_steps == 20


def test_a_body_without_budget_does_not_run(make):
    target = PLAN.replace(num_releases=100).epsilon(1e-5)
    ledger = make(budget_epsilon=target, budget_delta=1e-5)
    ran = []
    for steps, budgets in ((101, ()), (60, [(0.5 * target, 1e-5)])):
        with pytest.raises(BudgetExhaustedError), ledger.reserved(PLAN, steps, budgets=budgets):
            ran.append(steps)
    with pytest.raises(ValueError, match="steps"), ledger.reserved(PLAN.replace(num_releases=0)):
        ran.append(0)
    assert not ran
    assert ledger.num_releases == 0


def test_blocks_of_one_run_share_its_epochs(make):
    plan = PrivacyPlan(EachRecordOncePerEpoch(10), 5.0, 5, "replace_one")
    ledger = make()
    for _ in range(2):
        with ledger.reserved(plan, run="fit"):
            pass
    assert ledger.epsilon(1e-5) == PrivacyPlan(FullBatch(), 5.0, 1, "replace_one").epsilon(1e-5)
