"""The adaptive budget of a ledger: a Renyi privacy filter (Feldman and Zrnic 2021), and what an adversary makes of it.

The independent computation is dp_accounting's own `RdpAccountant` of the one order, and for two releases of which the second
depends on the first the exact hockey-stick divergence.
"""

import math
import random
import re

import dp_accounting
import numpy as np
import pytest
from dp_accounting import NeighboringRelation, rdp
from dp_accounting.pld import privacy_loss_distribution as pld
from dp_accounting.rdp.rdp_privacy_accountant import compute_delta
from scipy import stats

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
    RenyiFilter,
    UnsupportedPairError,
    accountants,
    budgets,
)

EPSILON, DELTA = 1.0, 1e-5
PLAN = PrivacyPlan(PoissonSampling(0.01), 2.0, 1000)
FULL = PrivacyPlan(FullBatch(), 30.0, 1)
TARGETS = [(0.05, 1e-6), (0.3, 1e-5), (1.0, 1e-5), (3.0, 1e-8), (10.0, 1e-3)]


def _ledger(path=None):
    return PrivacyLedger(path, budget_epsilon=EPSILON, budget_delta=DELTA, budget_adaptive=True)


def _divergence(releases, order, relation=NeighboringRelation.ADD_OR_REMOVE_ONE):
    """Of (plan, number of releases) pairs, by dp_accounting alone.

    Its RDP of full batches under replace-one is over the whole distance of a replacement, ours over half of it.
    """
    accountant = rdp.RdpAccountant([order], relation)
    for plan, number in releases:
        z = plan.noise_multiplier
        if isinstance(plan.sampling, PoissonSampling):
            event = dp_accounting.PoissonSampledDpEvent(
                plan.sampling.probability, dp_accounting.GaussianDpEvent(z)
            )
        elif isinstance(plan.sampling, FixedSizeSampling):
            size = plan.sampling.num_records, plan.sampling.batch_size
            event = dp_accounting.SampledWithoutReplacementDpEvent(
                *size, dp_accounting.GaussianDpEvent(z / 2)
            )
        else:
            half = 2.0 if relation is NeighboringRelation.REPLACE_ONE else 1.0
            event = dp_accounting.GaussianDpEvent(z / half)
        if number:
            accountant.compose(event, number)
    return float(accountant._rdp[0])


# --- the order and the limit ---


@pytest.mark.parametrize(("epsilon", "delta"), TARGETS)
def test_the_limit_is_what_dp_accounting_converts_to_epsilon(epsilon, delta):
    found = RenyiFilter.chosen_for(epsilon, delta)
    assert found.order in rdp.rdp_privacy_accountant.DEFAULT_RDP_ORDERS
    at, _ = rdp.rdp_privacy_accountant.compute_epsilon([found.order], [found.limit], delta)
    assert epsilon * (1 - 1e-8) <= at <= epsilon
    # The same by an accountant of that one order, for as many Gaussian releases as fit and for one more.
    z = 500.0
    most = math.floor(found.limit / (found.order / (2 * z**2)))
    for number, allowed in ((most, True), (most + 1, False)):
        accountant = rdp.RdpAccountant([found.order])
        accountant.compose(dp_accounting.GaussianDpEvent(z), number)
        assert (accountant.get_epsilon(delta) <= epsilon) == allowed
        event = PrivacyPlan(FullBatch(), z, number).dp_event
        assert found.allows(event, NeighboringRelation.ADD_OR_REMOVE_ONE) == allowed


@pytest.mark.parametrize(("epsilon", "delta"), TARGETS)
def test_the_order_is_the_one_that_allows_most_gaussian_releases(epsilon, delta):
    found = RenyiFilter.chosen_for(epsilon, delta)
    for order in filter(float.is_integer, accountants.ORDERS):
        assert RenyiFilter(epsilon, delta, order).limit / order <= found.limit / found.order
    # So that it is never far from what the best order for a plan would allow: most where there is little noise.
    for sampling in (FullBatch(), PoissonSampling(0.01), PoissonSampling(256 / 48842)):
        setting = {"epsilon": epsilon, "delta": delta, "sampling": sampling, "num_releases": 1000}
        plan = PrivacyPlan.calibrate(**setting, accountant="rdp")
        more = plan.replace(noise_multiplier=1.3 * plan.noise_multiplier)
        assert found.allows(more.dp_event, plan.neighboring_relation)


def test_bad_filters_are_refused():
    with pytest.raises(ValueError, match=r"epsilon=0\.0001 is too small"):
        RenyiFilter.chosen_for(1e-4, 1e-5)
    for bad in ({"epsilon": 0.0}, {"delta": 1.0}, {"order": 1.0}, {"order": float("nan")}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            RenyiFilter(**{"epsilon": 1.0, "delta": 1e-5, "order": 18.0, **bad})
    with pytest.raises(ValueError, match="budget_epsilon"):
        PrivacyLedger(budget_adaptive=True)


# --- a ledger that keeps it ---


def _candidates(relation):
    if relation == "replace_one":
        return [
            PrivacyPlan(FullBatch(), 60.0, 5, relation),
            PrivacyPlan(FixedSizeSampling(1000, 10), 3.0, 50, relation, accountant="rdp"),
            PrivacyPlan(FixedSizeSampling(1000, 50), 8.0, 20, relation, accountant="rdp"),
        ]
    return [
        PrivacyPlan(FullBatch(), 30.0, 5),
        PrivacyPlan(PoissonSampling(0.01), 1.6, 100),
        PrivacyPlan(PoissonSampling(0.2), 12.0, 30),
        PrivacyPlan(PoissonSampling(0.001), 1.3, 200, accountant="rdp"),
        PrivacyPlan(
            PoissonSampling(0.001), 0.9, 100
        ),  # Dear at the filter's order, and not at the best for it.
    ]


def check_adaptive_use(relation="add_or_remove_one", seed=0):
    """Spends a budget by choices that depend on what was granted; the filter's sum never passes its limit.

    Raises:
      AssertionError: where it does, or where what was refused would have kept it.
    """
    rng = random.Random(seed)
    plans, released, refused = _candidates(relation), [], 0
    kind = NeighboringRelation[relation.upper()]
    ledger = _ledger()
    order = budgets.RenyiFilter.chosen_for(EPSILON, DELTA).order
    limit = EPSILON - math.log1p(-1 / order) + math.log(DELTA * order) / (order - 1)
    assert ledger.renyi_filter.order == order
    while refused < 6:
        # The "output" of the releases so far decides which plan, how long and how much of it runs.
        plan = plans[(len(released) * 7 + rng.randrange(len(plans))) % len(plans)]
        steps = rng.randint(1, 1 + 400 // (1 + len(released)))
        wanted = _divergence([*released, (plan, steps)], order, kind)
        before = ledger.num_releases
        try:
            token = ledger.reserve(plan, steps)
        except BudgetExhaustedError:
            refused += plan.noise_multiplier > 1.0
            assert ledger.num_releases == before
            assert wanted > limit * (1 - 1e-8), (wanted, limit)
            continue
        assert wanted <= limit, (wanted, limit)
        run = rng.choice([steps, steps, rng.randint(0, steps)])
        ledger.confirm(token, steps_run=run)
        released.append((plan, run))
    assert _divergence(released, order, kind) <= limit
    held = [(e.plan, e.steps) for e in ledger.entries]
    assert _divergence(held, order, kind) == pytest.approx(
        _divergence(released, order, kind), rel=1e-9
    )
    assert _divergence(held, order, kind) > 0.5 * limit  # Not a vacuous check.


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("relation", ["add_or_remove_one", "replace_one"])
def test_adaptive_choices_never_pass_the_limit(relation, seed):
    check_adaptive_use(relation, seed)


def _check_several_seeds():
    for seed in range(3):
        check_adaptive_use(seed=seed)


def _best_order_afterwards(filter_, event, relation):
    """Ordinary accounting: the order is chosen by what was released."""
    divergences = accountants.RdpAccountant().divergences(event, relation)
    return (
        rdp.rdp_privacy_accountant.compute_epsilon(accountants.ORDERS, divergences, DELTA)[0]
        <= EPSILON
    )


def _best_limit_of_all_orders(filter_, event, relation):
    """The divergence at one order is compared with the limit of another."""
    limits = [RenyiFilter(EPSILON, DELTA, order).limit for order in accountants.ORDERS]
    return filter_.spent(event, relation) <= max(limits)


def _only_the_newest(filter_, event, relation):
    """What was charged before is left out."""
    last = event.events[-1] if isinstance(event, dp_accounting.ComposedDpEvent) else event
    return filter_.spent(last, relation) <= filter_.limit


def _without_the_conversion(filter_, event, relation):
    """Divergence is compared with epsilon itself."""
    return filter_.spent(event, relation) <= filter_.epsilon


@pytest.mark.parametrize(
    "broken",
    [_best_order_afterwards, _best_limit_of_all_orders, _only_the_newest, _without_the_conversion],
)
def test_broken_filters_are_caught(monkeypatch, broken):
    monkeypatch.setattr(budgets.RenyiFilter, "allows", broken)
    with pytest.raises(AssertionError):
        _check_several_seeds()


def test_a_refusal_leaves_nothing_charged_and_says_what_holds():
    ledger = _ledger()
    most = ledger.most_releases(FULL.replace(num_releases=10_000))
    token = ledger.reserve(FULL, most)
    with pytest.raises(
        BudgetExhaustedError,
        match=r"adaptive budget of epsilon 1 .*at order 18, .*Nothing was charged",
    ):
        ledger.reserve(FULL, 1)
    assert ledger.num_releases == most
    ledger.confirm(token, steps_run=most - 1)
    ledger.reserve(FULL, 1)
    assert ledger.num_releases == most
    with pytest.raises(BudgetExhaustedError):
        _ledger().reserve(FULL.replace(noise_multiplier=0.0), 1)


def test_what_renyi_privacy_has_no_price_for_is_refused_before_it_is_charged():
    ledger = _ledger()
    ledger.reserve(FULL, 1)
    with pytest.raises(UnsupportedPairError, match="do not compose"):
        ledger.reserve(FULL.replace(neighboring_relation="replace_one"), 1)
    assert ledger.num_releases == 1
    if accountants.PRICES_POISSON_REPLACE_ONE:
        ledger = _ledger()
        with pytest.raises(
            UnsupportedPairError, match=r"adaptive budget does not support Poisson.*not adaptive"
        ) as refused:
            ledger.reserve(PrivacyPlan(PoissonSampling(0.01), 2.0, 1, "replace_one"), 1)
        assert "pld" not in str(refused.value)
        assert ledger.num_releases == 0


def test_batches_of_an_epoch_are_charged_once():
    plan = PrivacyPlan(EachRecordOncePerEpoch(10), 60.0, 20, "replace_one")
    ledger = _ledger()
    ledger.reserve(plan, 20, run="fit")
    order = ledger.renyi_filter.order
    spent = ledger.renyi_filter.spent(ledger.dp_event, plan.neighboring_relation)
    assert spent == pytest.approx(2 * order * (2 / 60.0) ** 2 / 2)


# --- set, saved and opened again ---


def test_it_is_kept_in_the_file_with_its_order(tmp_path):
    path = tmp_path / "ledger"
    with _ledger(path) as ledger:
        ledger.reserve(PLAN, 500)
        order = ledger.renyi_filter.order
    with PrivacyLedger(path) as again:
        assert again.renyi_filter == RenyiFilter(EPSILON, DELTA, order)
        assert again.budget == (EPSILON, DELTA)
        with pytest.raises(BudgetExhaustedError, match="adaptive"):
            again.reserve(PLAN, 10**6)
        config = again.to_config()
    with _ledger(path) as same, PrivacyLedger.from_config(config) as loaded:
        assert same.renyi_filter == loaded.renyi_filter == RenyiFilter(EPSILON, DELTA, order)
    with pytest.raises(LedgerError, match="set_budget"):
        PrivacyLedger(path, budget_epsilon=EPSILON, budget_delta=DELTA)
    memory = _ledger()
    memory.reserve(PLAN, 1)
    config = memory.to_config()
    config["ledger_id"] = "of a process with a filter"
    assert PrivacyLedger.from_config(config).renyi_filter == memory.renyi_filter


def test_the_stored_order_holds_even_if_another_would_be_chosen_today(tmp_path, monkeypatch):
    with _ledger(tmp_path / "ledger") as ledger:
        order = ledger.renyi_filter.order
    monkeypatch.setattr(budgets, "ORDERS", (order + 1.0,))
    with _ledger(tmp_path / "ledger") as again:
        assert again.renyi_filter.order == order


def test_it_is_set_before_the_first_release_or_not_at_all(tmp_path):
    for path in (None, tmp_path / "ledger"):
        ledger = PrivacyLedger(path)
        token = ledger.reserve(PLAN, 10)
        with pytest.raises(LedgerError, match="before the first release") as caught:
            ledger.set_budget(EPSILON, DELTA, adaptive=True)
        assert len(str(caught.value).splitlines()) <= 2
        assert ledger.budget is None
        ledger.confirm(token, steps_run=0)  # None of them ran.
        ledger.set_budget(EPSILON, DELTA, adaptive=True)
        ledger.reserve(PLAN, 10)
        for adaptive in (
            True,
            False,
        ):  # Another one could be chosen by what was released; an ordinary one is another promise.
            if adaptive:
                with pytest.raises(LedgerError, match="before the first release"):
                    ledger.set_budget(9.0, DELTA, adaptive=True)
            else:
                ledger.set_budget(9.0, DELTA)
        assert ledger.renyi_filter is None
        assert ledger.num_releases == 10
        ledger.close()
    with pytest.raises(LedgerError, match="before the first release"):
        _other_budget(tmp_path / "other")


def _other_budget(path):
    with PrivacyLedger(path) as ledger:
        ledger.reserve(PLAN, 10)
    _ledger(path)


# --- how many releases are left ---


@pytest.mark.parametrize("adaptive", [pytest.param(False, marks=pytest.mark.slow), True])
def test_most_releases_is_what_can_be_reserved(adaptive):
    ledger = PrivacyLedger(budget_epsilon=EPSILON, budget_delta=DELTA, budget_adaptive=adaptive)
    ledger.reserve(FULL, 3)
    ledger.reserve(PLAN, 100)
    plan = PLAN.replace(num_releases=5000)
    most = ledger.most_releases(plan)
    assert 0 < most < 5000
    fewer = ledger.most_releases(plan, budgets=[(100.0, 1e-6), (0.5, DELTA)])
    assert 0 < fewer < most
    assert plan.replace(num_releases=fewer).epsilon(DELTA, ledger.events()) <= 0.5
    assert plan.replace(num_releases=fewer + 1).epsilon(DELTA, ledger.events()) > 0.5
    assert ledger.most_releases(plan.replace(num_releases=7)) == 7
    with pytest.raises(BudgetExhaustedError):
        ledger.reserve(plan, most + 1)
    ledger.reserve(plan, most)
    assert ledger.most_releases(plan) == 0
    with pytest.raises(UnsupportedPairError, match="do not compose"):
        ledger.most_releases(FULL.replace(neighboring_relation="replace_one"))
    assert PrivacyLedger().most_releases(plan) == 5000


# --- what the report says ---


def _flat(report):
    return " ".join(str(report).split())


def test_the_report_says_which_kind_of_budget_holds():
    ledger = _ledger()
    ledger.reserve(PLAN, 500)
    report = PrivacyReport.from_ledger(ledger, delta=1e-6)
    spent = ledger.renyi_filter.spent(ledger.dp_event, NeighboringRelation.ADD_OR_REMOVE_ONE)
    assert "1 at delta 1e-05 for all fits and models, adaptive: it covers settings chosen" in _flat(
        report
    )
    assert "at order 18 divergences add up to" in _flat(report)
    assert report.to_json()["ledger_budget"] == {
        "epsilon": EPSILON,
        "delta": DELTA,
        "adaptive": True,
        "order": 18.0,
        "limit": ledger.renyi_filter.limit,
        "advantage": ledger.renyi_filter.advantage,
        "spent": spent,
    }
    assert _divergence([(PLAN, 500)], 18.0) == pytest.approx(spent, rel=1e-9)
    assert "the figures above do not cover it, the ledger's adaptive budget does" in _flat(report)
    plain = PrivacyLedger(budget_epsilon=EPSILON, budget_delta=DELTA)
    plain.reserve(PLAN, 500)
    assert "not valid for settings chosen after looking at earlier results" in _flat(
        PrivacyReport.from_ledger(plain, delta=1e-6)
    )
    assert "adaptive budget" not in _flat(PrivacyReport.from_ledger(plain, delta=1e-6))


def test_the_advantage_that_a_filter_leaves_is_that_of_its_whole_limit():
    """Of its one order, by dp_accounting, on a finer grid of epsilons than the library's."""
    held = _ledger().renyi_filter
    smallest = min(
        (math.expm1(epsilon) + 2.0 * delta) / (math.exp(epsilon) + 1.0)
        for epsilon in np.linspace(0.0, EPSILON, 400)
        for delta in [compute_delta([held.order], [held.limit], epsilon)[0]]
    )
    assert smallest <= held.advantage * (1.0 + 1e-9)
    assert held.advantage <= 1.001 * smallest
    report = PrivacyReport.from_ledger(_ledger(), delta=1e-6)
    shown = float(re.search(r"leave an attacker an advantage of at most (\S+)", _flat(report))[1])
    assert held.advantage <= shown <= 1.01 * held.advantage


# --- an adversary ---


def _second_delta(plan, epsilon):
    """The hockey-stick divergence of a second fit at each epsilon, also negative ones, where a record is removed."""
    q, z, number = (
        getattr(plan.sampling, "probability", 1.0),
        plan.noise_multiplier,
        plan.num_releases,
    )
    if q == 1.0:
        z, number = z / math.sqrt(number), 1
    loss = pld.from_gaussian_mechanism(
        z, value_discretization_interval=1e-4, sampling_prob=q
    ).self_compose(number)
    loss = loss._pmf_remove.to_dense_pmf()
    losses = (np.arange(loss._probs.size) + loss._lower_loss) * loss._discretization
    upper, lower = (
        np.append(np.cumsum(p[::-1])[::-1], 0.0)
        for p in (loss._probs, loss._probs * np.exp(-losses))
    )
    place = np.searchsorted(losses, epsilon, side="right")
    return upper[place] - np.exp(epsilon) * lower[place] + loss._infinity_mass


def _adaptive_delta(first, seconds, epsilon):
    """Delta at epsilon where the second fit is chosen, for the worse, after seeing the first: exact up to the grid."""
    z = first.noise_multiplier
    edges = np.linspace(-12.0, 12.0, 601) * z
    x = (edges[1:] + edges[:-1]) / 2
    mass = np.diff(stats.norm.cdf(edges, loc=1.0, scale=z))
    left = epsilon - (x - 0.5) / z**2  # Epsilon minus the loss of the first.
    return float(mass @ np.max([_second_delta(plan, left) for plan in seconds], axis=0))


@pytest.mark.slow
def test_choosing_by_the_first_result_breaks_an_ordinary_budget_and_not_the_adaptive_one():
    """Each choice alone keeps epsilon 1 at delta 1e-5; with the choice made after the first release only the filter does."""
    first = PrivacyPlan(FullBatch(), 6.0, 1)
    shapes = [(PoissonSampling(1e-3), 0.6), (PoissonSampling(0.1), 5.0), (FullBatch(), 50.0)]
    found = {}
    for adaptive in (False, True):
        seconds = []
        for sampling, z in shapes:
            ledger = PrivacyLedger(
                budget_epsilon=EPSILON, budget_delta=DELTA, budget_adaptive=adaptive
            )
            ledger.reserve(first, 1)
            plan = PrivacyPlan(sampling, z * (2.0 if adaptive else 1.0), 20_000)
            most = ledger.most_releases(plan)
            ledger.reserve(plan, most)
            seconds.append(plan.replace(num_releases=most))
        assert all(_adaptive_delta(first, [plan], EPSILON) <= DELTA for plan in seconds)
        found[adaptive] = _adaptive_delta(first, seconds, EPSILON)
    assert found[False] > 1.5 * DELTA
    assert found[True] <= DELTA
