"""What prices and reservations cost (fault 7): in CPU time, and beside the bare database in the same run."""

import contextlib
import sqlite3
import statistics
import time

import pytest

from tfp_dpvi.privacy import (
    EachRecordOncePerEpoch,
    FullBatch,
    PoissonSampling,
    PrivacyLedger,
    PrivacyPlan,
    database,
)

PLAN = PrivacyPlan(PoissonSampling(0.01), 1.0, 1000)
FULL = PrivacyPlan(FullBatch(), 50.0, 1)


def _seconds(work):
    start = time.process_time()
    work()
    return time.process_time() - start


def _fits(ledger, number):
    """Reserves fits that differ in rate, noise and length, as a search over hyperparameters makes them."""
    for i in range(number):
        plan = PrivacyPlan(PoissonSampling(0.002 + 0.0001 * i), 2.0 + 0.02 * i, 10 + i)
        ledger.reserve(plan, plan.num_releases)


@pytest.mark.slow
def test_sixty_different_fits_are_priced_in_seconds():
    """Fault 7: 11 s for the price, and 86 s to calibrate the next fit."""
    ledger = PrivacyLedger()
    _fits(ledger, 60)
    assert _seconds(lambda: ledger.epsilon(1e-5)) < 5.0
    ledger.set_budget(10.0, 1e-5)
    more = [PrivacyPlan(PoissonSampling(0.03), 3.0 + i, 20) for i in range(3)]
    ledger.reserve(more[0], 20)
    assert _seconds(lambda: ledger.reserve(more[0], 20)) < 1.0
    assert _seconds(lambda: ledger.reserve(more[1], 20)) < 5.0
    spent = ledger.epsilon(1e-5)
    found = []
    cost = _seconds(
        lambda: found.append(
            PrivacyPlan.calibrate(
                epsilon=spent + 0.5,
                delta=1e-5,
                sampling=PoissonSampling(0.02),
                num_releases=100,
                prior_events=ledger.events(),
            )
        )
    )
    assert cost < 30.0
    ledger.reserve(found[0], 100)
    assert ledger.epsilon(1e-5) <= spent + 0.5


def test_a_price_holds_for_the_fits_that_were_priced_before():
    """After the first price of a fit, its next blocks need none."""
    ledger = PrivacyLedger(budget_epsilon=10.0, budget_delta=1e-5)
    _fits(ledger, 8)
    ledger.reserve(PLAN, 10)
    cost = _seconds(lambda: [ledger.reserve(PLAN, 10) for _ in range(50)])
    assert cost / 50 < 0.05


def _fill(path, reservations, plan):
    """Writes many reservations as the ledger does, in one transaction."""
    with PrivacyLedger(path) as ledger:
        ledger.reserve(plan, 1)
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?) "
            "INSERT INTO reservations (charge, steps, steps_run, process, time) "
            "SELECT 1, 50, 50, 'host 1 0123456789abcdef0123456789abcdef', '2030-01-01T00:00:00+00:00' FROM n",
            (reservations,),
        )
        connection.execute("UPDATE charges SET steps = steps + 50 * ?", (reservations,))
        # Of the format before digests, which is updated when the file is opened.
        connection.execute("UPDATE ledger SET format = 3, version = version + ?", (reservations,))
        connection.execute("ALTER TABLE ledger DROP COLUMN digest")


def test_a_hundred_thousand_reservations_are_opened_and_priced_in_seconds(tmp_path):
    _fill(tmp_path / "ledger", 100_000, PLAN.replace(noise_multiplier=20.0))
    opened = []
    cost = _seconds(lambda: opened.append(PrivacyLedger(tmp_path / "ledger")))
    with opened[0] as ledger:
        cost += _seconds(lambda: ledger.epsilon(1e-5))
        assert ledger.num_releases == 5_000_001
        assert ledger.unconfirmed_steps == 1
        assert cost < 3.0
        assert (
            _seconds(lambda: ledger.confirm(ledger.reserve(PLAN.replace(noise_multiplier=20.0), 1)))
            < 0.5
        )


@pytest.mark.parametrize("where", ["memory", "file"])
def test_a_reservation_costs_a_few_bare_commits(tmp_path, where):
    """A bare commit changes one row, but not the version: else each reservation would be priced and tried twice."""
    table = database.RESERVATIONS
    one_row = table.update().where(table.c.id == 1).values(time=table.c.time + "x")
    with PrivacyLedger(
        None if where == "memory" else tmp_path / "ledger", budget_epsilon=9.0, budget_delta=1e-5
    ) as ledger:
        ledger.reserve(FULL.replace(num_releases=1000), 1)

        def bare():
            with ledger._database.write() as connection:
                connection.execute(one_row)

        def round_of_both():
            costs = {bare: [], ledger.reserve: []}
            for _ in range(60):
                for work, arguments in ((bare, ()), (ledger.reserve, (FULL, 1))):
                    start = time.perf_counter()
                    work(*arguments)
                    costs[work].append(time.perf_counter() - start)
            commit, reservation = (statistics.quantiles(found, n=4)[0] for found in costs.values())
            return reservation / commit

        # 4.7 in memory; 1.5 in a file, with a standard deviation of 0.55 beside other processes.
        assert min(round_of_both() for _ in range(3)) <= 6.0


def test_reserving_in_memory_is_cheap():
    ledger = PrivacyLedger()
    cost = _seconds(lambda: [ledger.confirm(ledger.reserve(PLAN, 50)) for _ in range(500)])
    assert cost / 500 < 8e-3  # About 1.6 ms where nothing else runs.
    assert ledger.num_releases == 25_000


def test_unnamed_fits_of_one_step_stay_affordable(tmp_path):
    """Each is a fit of its own, with a row of its own."""
    plan = PrivacyPlan(EachRecordOncePerEpoch(10), 500.0, 1, "replace_one")
    with PrivacyLedger(tmp_path / "ledger", budget_epsilon=5.0, budget_delta=1e-5) as ledger:
        for _ in range(100):
            ledger.reserve(plan, 1)
        assert len(ledger.entries) == 100
        assert _seconds(lambda: ledger.reserve(plan, 1)) < 0.5
