"""Mu and the advantage of an attacker: closed forms, dominance, loose pairs, extremes, speed."""

import math

import numpy as np
import pytest
from dp_accounting import NeighboringRelation, pld
from dp_accounting.rdp.rdp_privacy_accountant import compute_delta
from scipy import stats
from support.gaussian_oracle import gaussian_delta, gaussian_epsilon
from support.siblings import slow
from support.stack import POISSON_RELATIONS

from tfp_dpvi.privacy import (
    FixedSizeSampling,
    FullBatch,
    PoissonSampling,
    PrivacyPlan,
    accountants,
    get_accountant,
)
from tfp_dpvi.privacy.tradeoff import attack_bound, gaussian_attack_bound, gaussian_mu


def _profile(mu, smallest, points=65):
    epsilons = np.linspace(0.0, gaussian_epsilon(smallest, mu), points)
    return epsilons, np.array([gaussian_delta(epsilon, mu) for epsilon in epsilons.tolist()])


@pytest.mark.parametrize("smallest", [1e-5, 1e-9])
@pytest.mark.parametrize("mu", [1e-3, 0.27, 1.0, 4.0])
def test_the_profile_of_a_gaussian_gives_its_mu(mu, smallest):
    bound = attack_bound(*_profile(mu, smallest))
    assert bound.advantage == pytest.approx(2.0 * stats.norm.cdf(0.5 * mu) - 1.0, rel=1e-9)
    assert bound.advantage == pytest.approx(gaussian_attack_bound(mu).advantage, rel=1e-9)
    assert mu * (1.0 - 1e-9) <= bound.mu <= 1.003 * mu


def test_few_pairs_give_a_larger_mu_and_loose_ones_change_nothing():
    epsilons, deltas = _profile(0.27, 1e-5)
    bound = attack_bound(epsilons, deltas)
    mus = [attack_bound(epsilons[::step], deltas[::step]).mu for step in (1, 2, 8, 64)]
    assert mus == sorted(mus)
    for left in range(0, 64, 8):  # Halfway between pairs delta is at most the mean of theirs.
        middle = math.log(0.5 * (math.exp(epsilons[left]) + math.exp(epsilons[left + 8])))
        mean = 0.5 * (deltas[left] + deltas[left + 8])
        assert gaussian_delta(middle, mus[2]) >= mean * (1.0 - 1e-9)
    loose = deltas.copy()
    loose[1:-1:2] *= 3.0  # Some rise above those before them.
    assert attack_bound(epsilons, loose).mu == pytest.approx(mus[1], rel=1e-12)
    loose[0] = 0.9
    assert bound.advantage < attack_bound(epsilons, loose).advantage < 0.12


def test_one_pair_alone_allows_more():
    """(e - 1 + 2e-5) / (e + 1) at (1, 1e-5), and the mu of both it and that advantage."""
    bound = attack_bound([1.0], [1e-5])
    assert bound.advantage == pytest.approx((math.e - 1.0 + 2e-5) / (math.e + 1.0), rel=1e-12)
    for epsilon in np.linspace(0.0, 1.0, 50):
        # The pair's own profile: the line from the advantage at epsilon 0 to delta at epsilon.
        part = math.expm1(epsilon) / math.expm1(1.0)
        allowed = (1.0 - part) * bound.advantage + part * 1e-5
        assert gaussian_delta(epsilon, bound.mu) >= allowed * (1.0 - 1e-9)


@pytest.mark.parametrize("relation", POISSON_RELATIONS)
@pytest.mark.parametrize(("q", "z"), [(0.01, 1.0), (0.3, 4.0)])
def test_the_advantage_on_one_sampled_release_has_a_closed_form(q, z, relation):
    """Of (1-q) N(0, z^2) + q N(1, z^2) from N(0, z^2), or from one with N(-1, z^2)."""
    distance = 2.0 / z if relation == "replace_one" else 1.0 / z
    exact = q * (2.0 * stats.norm.cdf(0.5 * distance) - 1.0)
    found = PrivacyPlan(PoissonSampling(q), z, 1, relation).attack_bound(1e-6).advantage
    assert exact * (1.0 - 1e-9) <= found <= 1.002 * exact


@pytest.mark.parametrize("relation", POISSON_RELATIONS)
@pytest.mark.parametrize(
    ("q", "z", "releases"), [(0.005, 1.41, 1), slow(0.01, 0.7, 100), slow(0.01, 1.5, 1000)]
)
def test_mu_is_the_smallest_that_dominates_the_plan(q, z, releases, relation):
    """On dp_accounting's own composition, at other epsilons than those of the computation."""
    plan = PrivacyPlan(PoissonSampling(q), z, releases, relation)
    bound = plan.attack_bound(1e-6)
    grid = get_accountant("pld").grid_spacing(plan.dp_event, plan.neighboring_relation)
    accountant = pld.PLDAccountant(plan.neighboring_relation, grid)
    accountant.compose(plan.dp_event)
    epsilons = np.linspace(0.0, plan.epsilon(1e-6), 23)
    deltas = [accountant.get_delta(epsilon) for epsilon in epsilons.tolist()]
    room = [
        gaussian_delta(epsilon, bound.mu) / delta
        for epsilon, delta in zip(epsilons, deltas, strict=True)
    ]
    assert min(room) >= 1.0 - 1e-6
    assert any(
        gaussian_delta(epsilon, 0.997 * bound.mu) < delta
        for epsilon, delta in zip(epsilons, deltas, strict=True)
    )


def test_full_batches_are_exactly_gaussian():
    for relation, distance in (("add_or_remove_one", 1.0), ("replace_one", 2.0)):
        plan = PrivacyPlan(FullBatch(), 40.0, 16, relation)
        assert plan.attack_bound(1e-30).mu == pytest.approx(distance / 10.0, rel=1e-12)
        renyi = plan.replace(accountant="rdp").attack_bound(1e-6)
        assert renyi.advantage > plan.attack_bound(1e-6).advantage
        assert renyi.mu > plan.attack_bound(1e-6).mu


def test_an_accountant_that_knows_one_pair_still_has_a_bound():
    class Pair(accountants.PldAccountant):
        def deltas(self, event, epsilons, relation):
            return None

    plan = PrivacyPlan(PoissonSampling(0.01), 1.5, 1000)
    epsilon = plan.epsilon(1e-6)
    bound = Pair().attack_bound(plan.dp_event, 1e-6, plan.neighboring_relation)
    assert bound == attack_bound([epsilon], [1e-6])
    assert bound.advantage > plan.attack_bound(1e-6).advantage


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize("noise", [0.0, 1e-4, slow(0.05), 0.2, 1e3, 1e8])
@pytest.mark.parametrize("sampling", [PoissonSampling(0.02), FullBatch()])
def test_extremes_have_numbers(sampling, noise, accountant):
    bound = PrivacyPlan(sampling, noise, 50, accountant=accountant).attack_bound(1e-5)
    assert 0.0 <= bound.advantage <= 1.0
    assert gaussian_attack_bound(bound.mu).advantage >= bound.advantage * (1.0 - 1e-9)
    assert noise > 0.0 or bound.advantage == 1.0
    assert noise < 1e3 or bound.mu < 0.2


def test_fixed_size_samples_have_a_bound_by_renyi_divergences():
    plan = PrivacyPlan(FixedSizeSampling(1000, 50), 5.0, 20, "replace_one", accountant="rdp")
    bound = plan.attack_bound(1e-6)
    one = 0.05 * (2.0 * stats.norm.cdf(1.0 / 5.0) - 1.0)
    assert one < bound.advantage < 20 * one


def test_the_smallest_mu_at_a_pair():
    for mu in (1e-6, 0.3, 8.0):
        for epsilon in (0.0, 0.5 * mu, mu * (3.0 + 0.5 * mu)):
            assert gaussian_mu(epsilon, gaussian_delta(epsilon, mu)) == pytest.approx(mu, rel=1e-6)
    assert gaussian_mu(1.0, 0.0) == 0.0


def test_the_composition_of_epsilon_is_used_again():
    plan = PrivacyPlan(PoissonSampling(0.0123), 1.234, 321)
    plan.epsilon(1e-5)
    before = accountants._composition.cache_info().misses
    plan.attack_bound(1e-5)
    assert accountants._composition.cache_info().misses == before


def test_renyi_deltas_are_those_of_dp_accounting():
    plan = PrivacyPlan(PoissonSampling(0.01), 1.5, 1000, accountant="rdp")
    divergences = get_accountant("rdp").divergences(
        plan.dp_event, NeighboringRelation.ADD_OR_REMOVE_ONE
    )
    epsilons = [0.0, 0.3, 2.0]
    ours = accountants.renyi_deltas(accountants.ORDERS, divergences, epsilons)
    for epsilon, delta in zip(epsilons, ours, strict=True):
        theirs = compute_delta(accountants.ORDERS, divergences, epsilon)[0]
        assert delta == pytest.approx(theirs, rel=1e-12)
