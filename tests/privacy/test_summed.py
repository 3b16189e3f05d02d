"""Noise that counts only in the sum of several hospitals' messages: every number that such a plan has."""

import json
import math
import pathlib

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import pld_privacy_accountant
from scipy import optimize, stats

from tfp_dpvi.privacy import (
    FullBatch,
    PoissonSampling,
    PrivacyLedger,
    PrivacyPlan,
    PrivacyReport,
    Sensitivity,
    price_sum,
)
from tfp_dpvi.privacy.report import up

DELTA = 1e-5


def closed_form(mu, delta=DELTA):
    """Epsilon of one Gaussian release with sensitivity over noise mu (Balle and Wang 2018)."""

    def excess(epsilon):
        above = stats.norm.cdf(mu / 2.0 - epsilon / mu)
        return above - math.exp(epsilon) * stats.norm.cdf(-mu / 2.0 - epsilon / mu) - delta

    return optimize.brentq(excess, 0.0, 60.0, xtol=1e-12)


def sums_plan(noise=4.0, **more):
    return PrivacyPlan(FullBatch(), noise, 4, l2_norm_clip=1.0, **more)


@pytest.mark.parametrize("relation", ["add_or_remove_one", "replace_one"])
@pytest.mark.parametrize(
    ("num_hospitals", "curious", "missing"), [(5, 1, 0), (5, 0, 0), (5, 2, 1), (2, 1, 0)]
)
def test_each_observer_sees_the_noise_of_the_messages_that_it_does_not_know(
    relation, num_hospitals, curious, missing
):
    plan = sums_plan(sensitivity=Sensitivity(1.0, 1.5), neighboring_relation=relation)
    prices = price_sum(plan, DELTA, num_hospitals=num_hospitals, curious=curious, missing=missing)
    # Four releases of one message have mu = unit / noise each.
    unit = 1.0 if relation == "add_or_remove_one" else 1.5
    mu = math.sqrt(4.0) * unit / plan.noise_multiplier
    present = num_hospitals - missing
    assert prices.sum_alone == pytest.approx(closed_form(mu / math.sqrt(present)), rel=1e-6)
    honest = present - curious
    assert prices.coalition == pytest.approx(closed_form(mu / math.sqrt(honest)), rel=1e-6)
    assert prices.message == pytest.approx(closed_form(mu), rel=1e-6)
    assert prices.sum_alone <= prices.coalition <= prices.message
    assert prices.message == plan.epsilon(DELTA)


def test_the_event_is_that_of_dp_accounting_with_the_noise_of_the_sum():
    plan = sums_plan(summed_over=4)
    account = pld_privacy_accountant.PLDAccountant(
        dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
    )
    # Four hospitals' independent noise, whose variances add.
    total = math.sqrt(sum(4.0**2 for _ in range(4)))
    account.compose(dp_accounting.GaussianDpEvent(total), 4)
    assert plan.epsilon(DELTA) == pytest.approx(account.get_epsilon(DELTA), rel=1e-3)
    assert plan.deviation == 4.0  # What this hospital adds itself.
    assert plan.of_message() == sums_plan()
    assert plan.of_message().epsilon(DELTA) > plan.epsilon(DELTA)


def test_rounds_before_it_are_seen_by_everybody_and_add_to_every_price():
    rounds = PrivacyPlan(PoissonSampling(0.1), 2.0, 50)
    prices = price_sum(sums_plan(), DELTA, num_hospitals=5, prior_events=[rounds.dp_event])
    alone = price_sum(sums_plan(), DELTA, num_hospitals=5)
    for name in ("sum_alone", "coalition", "message"):
        both = getattr(prices, name)
        assert max(rounds.epsilon(DELTA), getattr(alone, name)) < both
    four = sums_plan(summed_over=4)
    assert prices.coalition == four.epsilon(DELTA, [rounds.dp_event])


def test_a_hospital_that_is_missing_takes_its_noise_along():
    full = price_sum(sums_plan(), DELTA, num_hospitals=5)
    lacking = price_sum(sums_plan(), DELTA, num_hospitals=5, missing=1)
    fewer = price_sum(sums_plan(), DELTA, num_hospitals=4)
    assert (lacking.sum_alone, lacking.coalition) == (fewer.sum_alone, fewer.coalition)
    assert lacking.sum_alone > full.sum_alone
    assert lacking.message == full.message


def test_a_sum_of_one_honest_message_is_that_message():
    prices = price_sum(sums_plan(), DELTA, num_hospitals=3, curious=1, missing=1)
    assert prices.coalition == prices.message > prices.sum_alone


def test_noise_is_calibrated_to_the_sum():
    alone = PrivacyPlan.calibrate(epsilon=1.0, delta=DELTA, sampling=FullBatch(), num_releases=4)
    shared = PrivacyPlan.calibrate(
        epsilon=1.0, delta=DELTA, sampling=FullBatch(), num_releases=4, summed_over=4
    )
    assert shared.noise_multiplier == pytest.approx(alone.noise_multiplier / 2.0, rel=2e-3)
    assert 0.995 < shared.epsilon(DELTA) <= 1.0
    shares = [plan.for_share(0.5).noise_multiplier for plan in (alone, shared)]
    assert shares[1] == pytest.approx(shares[0] / 2.0)


def test_a_ledger_keeps_what_the_sum_costs_and_the_report_says_both():
    ledger, plan = PrivacyLedger(), sums_plan(summed_over=4)
    with ledger.reserved(plan):
        pass
    with ledger.reserved(PrivacyPlan(FullBatch(), 8.0, 1)):
        pass
    report = PrivacyReport.from_ledger(ledger, delta=DELTA)
    both = [plan.of_message().dp_event, PrivacyPlan(FullBatch(), 8.0, 1).dp_event]
    message = PrivacyPlan(FullBatch(), 1.0, 0).epsilon(DELTA, both)
    assert report.epsilon == ledger.epsilon(DELTA)
    assert report.message_epsilon == pytest.approx(message, rel=1e-9)
    assert report.message_epsilon > report.epsilon
    assert report.to_json()["message_epsilon"] == report.message_epsilon
    text = " ".join(str(report).split())
    assert f"If messages are seen: epsilon {up(message, 3)} at delta 1e-05" in text
    assert "the sum of at least 4 such messages, which alone is seen" in text
    assert f"for who sees these messages themselves, epsilon is {up(message, 3)}" in text
    assert any("secure aggregation" in line for line in report.to_json()["not_covered"])


def test_reports_without_a_sum_have_one_number_as_before():
    ledger = PrivacyLedger()
    with ledger.reserved(sums_plan()):
        pass
    report = PrivacyReport.from_ledger(ledger, delta=DELTA)
    assert report.message_epsilon is None
    assert "message" not in str(report)


def test_plans_are_saved_with_what_their_price_rests_on():
    plan = sums_plan(summed_over=4)
    data = json.loads(json.dumps(plan.to_json()))
    assert PrivacyPlan.from_json(data) == plan
    assert "summed_over" not in sums_plan().to_json()
    with pytest.raises(ValueError, match="summed_over"):
        PrivacyPlan.from_json({**data, "summed_over": 0})


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"num_hospitals": 2, "curious": 2}, "leave no hospital"),
        ({"num_hospitals": 3, "curious": 1, "missing": 2}, "leave no hospital"),
        ({"num_hospitals": 0}, "num_hospitals"),
        ({"num_hospitals": 3, "curious": -1}, "curious"),
    ],
)
def test_sums_that_count_on_nobody_are_refused(wrong, match):
    with pytest.raises(ValueError, match=match):
        price_sum(sums_plan(), DELTA, **wrong)


def test_a_plan_that_is_for_a_sum_already_is_priced_by_its_message():
    assert price_sum(sums_plan(summed_over=3), DELTA, num_hospitals=5) == price_sum(
        sums_plan(), DELTA, num_hospitals=5
    )


def test_words_round_prices_up():
    words = price_sum(sums_plan(), DELTA, num_hospitals=5, missing=1).in_words
    assert words.startswith("epsilon ")
    assert "the sum of 4 hospitals' messages alone" in words
    assert "a curious hospital among them, which knows its own noise" in words
    two = price_sum(sums_plan(), DELTA, num_hospitals=5, curious=2).in_words
    assert "2 curious hospitals among them together, which know their own noise" in two


def test_messages_that_are_rounded_each_make_a_rounding_of_the_one_sum():
    """Each message is rounded to a grid: their sum is a rounding of sum + all noise + uniform values."""
    grid, shifts = 0.5, (0.13, -0.31)
    points = np.arange(-40, 41)

    def cell(shift):
        upper = (points + 0.5) * grid - shift
        return stats.norm.cdf(upper) - stats.norm.cdf(upper - grid)

    together = np.convolve(cell(shifts[0]), cell(shifts[1]))
    # Round(N(0, 2) + uniform on one cell): the average of cells over the uniform value.
    nodes, weights = np.polynomial.legendre.leggauss(30)
    at = np.arange(-80, 81)[:, None] * grid - sum(shifts) + nodes * grid / 2.0
    wide = stats.norm(scale=math.sqrt(2.0))
    one = (wide.cdf(at + grid / 2.0) - wide.cdf(at - grid / 2.0)) @ weights / 2.0
    np.testing.assert_allclose(together, one, atol=1e-13)


def test_the_guide_shows_these_prices():
    guide = pathlib.Path(__file__).parents[2] / "docs" / "guides" / "consortium.md"
    central = PrivacyPlan.calibrate(epsilon=1.0, delta=DELTA, sampling=FullBatch(), num_releases=1)
    share = central.replace(noise_multiplier=central.noise_multiplier / 5**0.5)
    for curious, missing in [(1, 0), (2, 0), (1, 1)]:
        prices = price_sum(share, DELTA, num_hospitals=5, curious=curious, missing=missing)
        assert f"    {prices.in_words}\n" in guide.read_text()
