"""The price of a selection from random trials: against exact divergences, and dp_accounting itself.

The best of K normal draws has the distribution function f(Phi(x)), where f generates the probabilities
of K: for it, the divergence of neighbours is an integral. A price below that is wrong.
"""

from __future__ import annotations

import dp_accounting
import numpy as np
import pytest
from dp_accounting.rdp import RdpAccountant
from scipy import integrate, stats

from tfp_dpvi.privacy import (
    FullBatch,
    NeighboringRelation,
    PrivacyLedger,
    PrivacyPlan,
    RandomTrials,
    UnsupportedPairError,
    get_accountant,
    scheme_from_json,
)
from tfp_dpvi.privacy.accountants import ORDERS

ADD, REPLACE = NeighboringRelation.ADD_OR_REMOVE_ONE, NeighboringRelation.REPLACE_ONE
CASES = [(4.0, 4.0), (8.0, 2.0), (30.0, 6.0)]


def log_density(x, mean, multiplier, shift):
    """Of the largest of a geometric number of N(shift, multiplier^2) draws."""
    z = (x - shift) / multiplier
    # f(u) = p u / (1 - (1 - p) u), whose slope is p / (1 - (1 - p) u)^2.
    p = 1.0 / mean
    rest = p + (1.0 - p) * stats.norm.sf(z)
    return np.log(p) - 2.0 * np.log(rest) + stats.norm.logpdf(z) - np.log(multiplier)


def exact_divergence(order, mean, multiplier, shift):
    """The Renyi divergence of the selections on neighbours, by integration, the larger way."""
    found = []
    for ends in ((0.0, shift), (shift, 0.0)):

        def integrand(x, ends=ends):
            first, second = (log_density(x, mean, multiplier, end) for end in ends)
            return np.exp(order * first + (1.0 - order) * second)

        reach = 14.0 * multiplier + 2.0 * order * shift
        value, _ = integrate.quad(integrand, -reach, reach, limit=500, points=[0.0, shift])
        found.append(np.log(value) / (order - 1.0))
    return max(found)


def price(order, mean, multiplier, relation=ADD):
    event = RandomTrials(mean).dp_event(dp_accounting.GaussianDpEvent(multiplier), 1)
    divergences = get_accountant("rdp").divergences(event, relation, (order,))
    return float(divergences[0])


def test_the_exact_density_is_one():
    total, _ = integrate.quad(lambda x: np.exp(log_density(x, 8.0, 2.0, 1.0)), -40.0, 40.0)
    assert total == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize(("mean", "multiplier"), CASES)
@pytest.mark.parametrize("relation", [ADD, REPLACE])
def test_no_selection_of_the_largest_draw_costs_more_than_its_price(mean, multiplier, relation):
    shift = 2.0 if relation is REPLACE else 1.0
    for order in (2.0, 8.0, 32.0):
        exact = exact_divergence(order, mean, multiplier, shift)
        assert exact <= price(order, mean, multiplier, relation)


def test_a_price_that_forgets_the_selection_is_found():
    """Planted: the price of one trial alone, and replace-one with the shift of add-or-remove-one."""
    mean, multiplier, order = 30.0, 6.0, 8.0
    exact = exact_divergence(order, mean, multiplier, 1.0)
    single = order / (2.0 * multiplier**2)
    assert exact > single
    assert exact_divergence(32.0, 8.0, 2.0, 2.0) > price(32.0, 8.0, 2.0, ADD)


@pytest.mark.parametrize(("mean", "multiplier"), CASES)
def test_it_is_the_price_of_dp_accounting_and_of_the_theorem(mean, multiplier):
    plan = PrivacyPlan(RandomTrials(mean), multiplier, 1, accountant="rdp")
    accountant = RdpAccountant(ORDERS)
    accountant.compose(plan.dp_event)
    assert plan.epsilon(1e-5) == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-6)
    # Theorem 2 with eta = 1; E[K] = 1 / gamma for a geometric number.
    orders = np.array(ORDERS)
    own = orders / (2.0 * multiplier**2)
    least = np.min((1.0 - 1.0 / orders) * own + np.log(mean) / orders)
    theorem = own + 2.0 * least + np.log(mean) / (orders - 1.0)
    place = int(np.flatnonzero(orders == 32.0)[0])
    assert price(32.0, mean, multiplier) == pytest.approx(np.min(theorem[place:]), rel=1e-6)
    # Planted: a factor of 1 instead of 1 + eta.
    wrong = theorem - least
    assert np.min(wrong[place:]) < 0.95 * price(32.0, mean, multiplier)


def test_one_trial_costs_no_less_than_a_gaussian_release_and_more_trials_cost_more():
    prices = [
        PrivacyPlan(RandomTrials(mean), 6.0, 1, accountant="rdp").epsilon(1e-5)
        for mean in (1.0, 4.0, 16.0)
    ]
    assert PrivacyPlan(FullBatch(), 6.0, 1, accountant="rdp").epsilon(1e-5) <= prices[0]
    assert sorted(prices) == prices


def test_a_ledger_composes_selections_with_other_releases_and_an_adaptive_budget_counts_them():
    plan = PrivacyPlan(RandomTrials(8.0), 20.0, 1, accountant="rdp")
    assert scheme_from_json(plan.sampling.to_json()) == plan.sampling
    ledger = PrivacyLedger(budget_epsilon=2.0, budget_delta=1e-5, budget_adaptive=True)
    with ledger.reserved(plan):
        pass
    alone = ledger.epsilon(1e-5)
    with ledger.reserved(PrivacyPlan(FullBatch(), 20.0, 1)):
        pass
    assert ledger.epsilon(1e-5) > alone
    assert ledger.renyi_filter.spent(ledger.dp_event, ADD) > 0.0
    with pytest.raises(UnsupportedPairError, match="use accountant='rdp'"):
        ledger.epsilon(1e-5, accountant="pld")


def test_trials_on_samples_are_not_priced():
    event = dp_accounting.dp_event.RepeatAndSelectDpEvent(
        dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(1.0)), 8.0, 1.0
    )
    with pytest.raises(UnsupportedPairError, match="trials on all records alone"):
        get_accountant("rdp").epsilon(event, 1e-5, ADD)
    with pytest.raises(ValueError, match="at least 1"):
        RandomTrials(0.5)
