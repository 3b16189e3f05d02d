"""Thirty settings against independent sources: closed forms, quadrature, Monte Carlo, published tables.

Another sixty-odd stand in test_reference.py, against dp_accounting 0.6.
"""

import math
import tracemalloc

import dp_accounting
import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, NeighboringRelation, rdp
from scipy import integrate, optimize, special, stats
from support import gaussian_oracle as gaussian
from support import pld_oracle as oracle
from support.pld_oracle import Composer, HockeyStick
from support.pld_pairs import DiscreteLoss, GaussianPair, discretise
from support.renyi_oracle import poisson_rdp
from support.siblings import slow
from support.stack import POISSON_RELATIONS, needs_poisson_replace_one

from tfp_dpvi.privacy import FullBatch, PoissonSampling, PrivacyPlan, accountants, get_accountant
from tfp_dpvi.privacy._fixed_size_rdp import fixed_size_rdp

# --- the Gaussian mechanism in closed form (Balle and Wang 2018), written out here once more ---


def _balle_wang_delta(epsilon, sigma, distance):
    first = stats.norm.cdf(distance / (2 * sigma) - epsilon * sigma / distance)
    second = stats.norm.cdf(-distance / (2 * sigma) - epsilon * sigma / distance)
    return first - math.exp(epsilon) * second


@pytest.mark.parametrize("relation", ["add_or_remove_one", "replace_one"])
@pytest.mark.parametrize(("z", "releases"), [(0.8, 1), (2.0, 1), (5.0, 30), (50.0, 1000)])
@pytest.mark.parametrize("delta", [1e-4, 1e-8])
def test_full_batches_in_closed_form(relation, z, releases, delta):
    plan = PrivacyPlan(FullBatch(), z, releases, relation)
    epsilon = plan.epsilon(delta)
    distance = (2.0 if relation == "replace_one" else 1.0) * math.sqrt(releases)
    assert _balle_wang_delta(epsilon, z, distance) == pytest.approx(delta, rel=1e-6)


def test_published_calibration_of_the_gaussian():
    """sigma for (1, 1e-5) at sensitivity 1 is 3.730632 (the reference code of Balle and Wang 2018)."""
    assert gaussian.gaussian_delta(1.0, 1 / 3.730632) == pytest.approx(1e-5, rel=1e-5)
    assert gaussian.delta_of(PrivacyPlan(FullBatch(), 3.730632, 1), 1.0) == pytest.approx(
        1e-5, rel=1e-5
    )
    plan = PrivacyPlan.calibrate(epsilon=1.0, delta=1e-5, sampling=FullBatch(), num_releases=1)
    assert 3.730632 <= plan.noise_multiplier <= 3.730632 * 1.005


# --- one subsampled release by direct quadrature of the hockey-stick divergence ---


def _quadrature_delta(epsilon, q, z, relation):
    """The larger of both directions, integrating over the line; densities written out once more."""

    def mixture(x, side):
        return (1 - q) * stats.norm.pdf(x) + q * stats.norm.pdf(x, loc=side / z)

    if relation == "replace_one":
        pairs = [(lambda x: mixture(x, 1.0), lambda x: mixture(x, -1.0))]
    else:
        pairs = [
            (lambda x: mixture(x, 1.0), stats.norm.pdf),
            (stats.norm.pdf, lambda x: mixture(x, 1.0)),
        ]
    grid = np.linspace(-12 - 1 / z, 12 + 1 / z, 400_001)
    return max(
        integrate.trapezoid(np.maximum(0.0, upper(grid) - math.exp(epsilon) * lower(grid)), grid)
        for upper, lower in pairs
    )


@pytest.mark.parametrize("relation", POISSON_RELATIONS)
@pytest.mark.parametrize(
    ("q", "z", "epsilon"),
    [
        (0.01, 1.0, 0.05),
        slow(0.1, 0.7, 0.5),
        slow(0.5, 2.0, 0.4),
        slow(0.001, 0.5, 0.1),
        (0.9, 1.5, 1.0),
    ],
)
def test_one_release_by_quadrature(relation, q, z, epsilon):
    wanted = _quadrature_delta(epsilon, q, z, relation)
    found = gaussian.delta_of(PrivacyPlan(PoissonSampling(q), z, 1, relation), epsilon)
    assert found == pytest.approx(wanted, rel=1e-4)
    assert oracle.delta([(q, z, 1)], epsilon, relation == "replace_one") == pytest.approx(
        wanted, rel=1e-4
    )


# --- many releases by Monte Carlo on the privacy loss itself ---


def _sampled_losses(q, z, releases, relation, direction, size, rng):
    total = np.zeros(size)
    for _ in range(releases):
        included = rng.random(size) < q
        noise = rng.standard_normal(size)
        x = noise if direction == "add" else noise + included / z
        plus = np.log1p(q * np.expm1(x / z - 0.5 / z**2))
        minus = np.log1p(q * np.expm1(-x / z - 0.5 / z**2))
        total += (
            plus - minus if relation == "replace_one" else (-plus if direction == "add" else plus)
        )
    return total


@pytest.mark.parametrize(
    ("relation", "direction"),
    [("add_or_remove_one", "remove"), ("add_or_remove_one", "add"), ("replace_one", "remove")],
)
@pytest.mark.parametrize(
    ("q", "z", "releases", "epsilon"), [(0.1, 1.5, 50, 1.5), slow(0.02, 0.8, 100, 0.7)]
)
def test_many_releases_by_monte_carlo(relation, direction, q, z, releases, epsilon):
    """delta = E max(0, 1 - e^{epsilon - L}); the mean of n draws in [0, 1] is within 6 standard errors.

    False alarms: 6 tests x 2e-9 by the normal approximation (each mean has thousands of non-zero terms).
    """
    size = 200_000
    if direction == "add":
        epsilon *= 0.4  # its losses are smaller
    losses = _sampled_losses(
        q, z, releases, relation, direction, size, np.random.default_rng(20170811)
    )
    terms = np.maximum(0.0, -np.expm1(epsilon - losses))
    assert np.count_nonzero(terms) > 1000
    loss = discretise(GaussianPair(q, 1 / z, relation == "replace_one"), 1e-4)[
        1 if direction == "add" else 0
    ]
    exact = HockeyStick.of(Composer([loss], [releases])([releases])).delta(epsilon)
    assert abs(terms.mean() - exact) < 6 * terms.std() / math.sqrt(size)
    if direction == "remove" and (
        relation == "add_or_remove_one" or accountants.PRICES_POISSON_REPLACE_ONE
    ):
        found = gaussian.delta_of(PrivacyPlan(PoissonSampling(q), z, releases, relation), epsilon)
        assert (
            exact * (1 - 1e-6) <= found <= exact * (1 + 2e-5)
        )  # A coarser grid where there is little noise.
        assert abs(terms.mean() - found) < 6 * terms.std() / math.sqrt(size)


def test_monte_carlo_would_notice_a_wrong_pair():
    """The same comparison fails for D/2 in place of A, and for the add-or-remove pair under replace-one."""
    size, q, z, releases, epsilon = 200_000, 0.1, 1.5, 50, 1.5
    losses = _sampled_losses(
        q, z, releases, "replace_one", "remove", size, np.random.default_rng(1)
    )
    terms = np.maximum(0.0, -np.expm1(epsilon - losses))
    error = 6 * terms.std() / math.sqrt(size)
    for wrong in (GaussianPair(q, 1 / z, False), GaussianPair(q, 0.9 / z, True)):
        loss = discretise(wrong, 1e-4)[0]
        assert (
            abs(
                terms.mean()
                - HockeyStick.of(Composer([loss], [releases])([releases])).delta(epsilon)
            )
            > error
        )


# --- the discretisation itself ---


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(
    ("q", "shift"), [(0.01, 1.0), (1e-4, 2.0), (0.7, 0.2), (0.99, 5.0), (0.3, 30.0), (0.01, 900.0)]
)
def test_masses_are_exact_and_rounding_is_upwards(symmetric, q, shift):
    pair = GaussianPair(q, shift, symmetric)
    step = 1e-3 if shift < 10 else 1e-2 if shift < 100 else 2.0
    for loss, (above, below) in zip(discretise(pair, step), (("P", "Q"), ("Q", "P")), strict=False):
        assert loss.masses.min() >= 0.0
        assert loss.masses.sum() == pytest.approx(1.0, abs=1e-9)
        # E[e^-L] under the upper distribution is the mass of the lower one.
        grid = (loss.offset + np.arange(loss.masses.size)) * step
        lower = np.exp(special.logsumexp(-grid, b=loss.masses))
        # Far apart, the lower distribution has mass where the upper one underflows; losing it errs upwards.
        assert lower <= 1.0 + 1e-9, (above, below)
        assert lower == pytest.approx(1.0, abs=1e-9) or shift > 100


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(("q", "shift"), [(0.01, 1.0), (0.2, 0.3), (1.0, 2.0), (0.5, 40.0)])
def test_inverse_loss(symmetric, q, shift):
    if symmetric and q == 1.0:
        return  # a full batch is priced in closed form
    pair = GaussianPair(q, shift, symmetric)
    x = np.linspace(-3, 3 + shift, 101)
    steep = np.abs(np.gradient(pair.loss(x), x)) > 1e-3
    assert pair.inverse_loss(pair.loss(x))[steep] == pytest.approx(x[steep], abs=1e-6)


def test_coarser_grids_bound_finer_ones():
    pair = GaussianPair(0.02, 1.0, False)
    curves = [
        HockeyStick.of(Composer([discretise(pair, 1e-4 * 2**k)[0]], [500])([500])) for k in range(5)
    ]
    epsilons = [c.epsilon(1e-5) for c in curves]
    assert epsilons == sorted(epsilons)
    assert epsilons[-1] < 1.02 * epsilons[0]


@pytest.mark.parametrize("releases", [1, 100, 1000, 10_000, 100_000, 1_000_000])
def test_composition_errs_upwards_deep_in_the_tail(releases):
    """Many Gaussian releases by the grid against the closed form, down to the smallest delta accepted."""
    shift = 1 / math.sqrt(releases)
    loss = discretise(GaussianPair(1.0, shift, False), 1e-4 if releases < 1e6 else 2.5e-5)[0]
    curve = HockeyStick.of(Composer([loss], [releases])([releases]))
    for delta in (1e-3, 1e-5, 1e-8, oracle.SMALLEST_DELTA):
        exact = gaussian.gaussian_epsilon(delta, 1.0)
        assert (
            exact <= curve.epsilon(delta) <= exact * 1.012
        )  # Rounding depends on the processor: at most 1.0068 seen.


@pytest.mark.parametrize(
    "releases", [100, 200_003, 1_000_000, *map(slow, (1, 1000, 10_000, 100_000))]
)
def test_the_package_s_composition_errs_upwards_down_to_its_smallest_delta(releases):
    """The same of dp_accounting as the package uses it: a Gaussian on the grid is priced as a Poisson sample is."""
    kinds = ((1.0, math.sqrt(releases), releases),)
    loss = accountants._composition(kinds, NeighboringRelation.ADD_OR_REMOVE_ONE, accountants.STEP)
    for delta in (1e-3, 1e-5, 1e-8, accountants.SMALLEST_DELTA):
        exact = gaussian.gaussian_epsilon(delta, 1.0)
        assert exact <= loss.get_epsilon_for_delta(delta) <= exact * 1.006


@pytest.mark.parametrize(
    "multipliers", [(2e-3, 0.2), pytest.param((2e-3, 1e-2, 0.05, 0.2), marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("relation", POISSON_RELATIONS)
def test_hardly_any_noise_needs_little_memory_and_costs_much(relation, multipliers):
    """The price of a few near-noiseless releases is right to leading order, and made of arrays of bounded size."""
    previous = math.inf
    for z in multipliers:
        plan = PrivacyPlan(PoissonSampling(0.5), z, 3, relation)
        tracemalloc.start()
        epsilon = plan.epsilon(1e-5)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1e9
        # A record that was drawn and then is not moves the sum by A; under replace-one, too, the nearest component
        # of the other mixture is the one without it.
        full = PrivacyPlan(FullBatch(), z, 3).epsilon(1e-5)
        assert 0.9 * full < epsilon < min(full * 1.1, previous)
        previous = epsilon
    assert PrivacyPlan(PoissonSampling(0.5), 5e-4, 1, relation).epsilon(1e-5) == math.inf


def test_infinite_losses_compose():
    loss = DiscreteLoss(1e-3, 5, np.array([0.5, 0.4]), 0.1)
    composed = Composer([loss], [3])([3])
    assert composed.infinity_mass == pytest.approx(1 - 0.9**3, abs=1e-12)
    assert composed.masses.sum() == pytest.approx(0.9**3)
    assert HockeyStick.of(composed).epsilon(0.2) == math.inf
    # Losses are 15, 16, 17 or 18 thousandths, and delta at 0 is the excess of upper over lower mass.
    chances = np.array([0.125, 0.3, 0.24, 0.064])
    excess = 0.271 + (chances * -np.expm1(-np.arange(15, 19) * 1e-3)).sum()
    assert HockeyStick.of(composed).delta(0.0) == pytest.approx(excess, rel=1e-9)


def test_a_delta_near_one_costs_nothing():
    assert PrivacyPlan(PoissonSampling(0.03), 1.2, 400).epsilon(0.9999) == 0.0


# --- Renyi divergences ---


@pytest.mark.parametrize(("q", "z"), [(0.01, 1.0), (0.3, 2.5), (0.001, 0.6)])
def test_replace_one_rdp_by_direct_integration(q, z):
    """The oracle's trapezoids against adaptive quadrature of P^a Q^(1-a)."""

    def integrand(x, order):
        upper = np.logaddexp(
            math.log(1 - q) + stats.norm.logpdf(x), math.log(q) + stats.norm.logpdf(x, loc=1 / z)
        )
        lower = np.logaddexp(
            math.log(1 - q) + stats.norm.logpdf(x), math.log(q) + stats.norm.logpdf(x, loc=-1 / z)
        )
        return math.exp(order * upper + (1 - order) * lower)

    orders = (1.5, 2.0, 4.0, 7.5)
    found = poisson_rdp(q, z, orders, replace=True)
    for order, value in zip(orders, found, strict=True):
        peak = (2 * order - 1) / z
        moment = integrate.quad(
            integrand, -peak - 12, peak + 12, args=(order,), points=[-peak, 0, peak], limit=500
        )[0]
        assert value == pytest.approx(math.log(moment) / (order - 1), rel=1e-6)


@pytest.mark.parametrize(("q", "z"), [(0.01, 1.0), (0.3, 2.5), (0.001, 0.6)])
def test_rdp_is_above_the_tight_accountant(q, z):
    plan = PrivacyPlan(PoissonSampling(q), z, 100, accountant="rdp")
    tight = plan.replace(accountant="pld").epsilon(1e-5)
    assert tight < plan.epsilon(1e-5) < 3 * tight  # RDP is loose where a rare draw weighs much


@pytest.mark.parametrize("z", [0.6, 2.0, 50.0])
@pytest.mark.parametrize("q", [1e-9, 2.6e-7, 1e-5, 1e-3, 0.3])
def test_add_or_remove_rdp_is_not_lost_in_rounding(q, z):
    """No order is priced below the truth, however small that is: a binomial sum in which nothing cancels."""
    orders = np.array(accountants.ORDERS)
    found = accountants._poisson_rdp(q, z)
    assert np.isfinite(found).sum() > 20
    for order, divergence in zip(orders, found, strict=True):
        if not 2 <= order <= 64:
            continue
        whole = int(order)  # Divergences grow with the order.
        k = np.arange(2, whole + 1)
        log_terms = np.log(special.comb(whole, k)) + k * math.log(q) + (whole - k) * math.log1p(-q)
        growth = k * (k - 1) / (2 * z**2)
        excess = special.logsumexp(log_terms + growth + np.log(-np.expm1(-growth)))
        exact = np.logaddexp(0.0, excess) if excess > -30 else math.exp(excess)
        assert divergence >= exact / (whole - 1) * (1 - 1e-12)
        if order == whole and np.isfinite(divergence):
            assert divergence <= exact / (whole - 1) * (1 + 1e-9) + 1e-14


def test_replace_one_rdp_at_probability_one():
    found = poisson_rdp(1.0, 2.0, (1.5, 3.0, 40.0), replace=True)
    assert found == pytest.approx(np.array([1.5, 3.0, 40.0]) * 2 / 4)


@pytest.mark.parametrize(("q", "z"), [(0.01, 1.0), (0.005, 2.5), (0.1, 0.7)])
def test_fixed_size_rdp_equals_dp_accounting(q, z):
    orders = (1.5, 2, 3, 7.3, 12, 64, 300)
    accountant = rdp.RdpAccountant(orders, NeighboringRelation.REPLACE_ONE)
    accountant.compose(
        dp_accounting.SampledWithoutReplacementDpEvent(1000, round(1000 * q), GaussianDpEvent(z))
    )
    assert fixed_size_rdp(q, z, orders) == pytest.approx(accountant._rdp, rel=1e-12)


# --- group privacy ---


@needs_poisson_replace_one
def test_group_privacy_bounds_the_tight_figure():
    """(epsilon / 2, delta') for presence gives (epsilon, (1 + e^{epsilon / 2}) delta') for a replacement."""
    plan = PrivacyPlan(PoissonSampling(0.02), 2.0, 300)
    small = optimize.brentq(
        lambda delta: (1 + math.exp(plan.epsilon(delta))) * delta - 1e-5, 1e-9, 1e-5, xtol=1e-12
    )
    half = plan.epsilon(small)
    tight = plan.replace(neighboring_relation="replace_one").epsilon(1e-5)
    assert tight <= 2 * half < 1.5 * tight


def test_unknown_accountant():
    with pytest.raises(ValueError, match="choose one of"):
        get_accountant("guess")


@pytest.mark.parametrize("shift", [0.3, 1.0, 3.0, 4.6, 6.0])
def test_a_large_gaussian_on_a_grid_is_that_of_the_closed_form(shift):
    """Both directions: losses beyond -30 lost their digits once, and epsilon of a mixture of releases was 15 % too large."""
    for one in discretise(GaussianPair(1.0, shift, False), 1e-4, 1e-18):
        assert one.masses.sum() == pytest.approx(1.0, abs=1e-9)
        curve = HockeyStick.of(one)
        for delta in (1e-3, 1e-5, 1e-8):
            exact = gaussian.gaussian_epsilon(delta, shift)
            assert exact * (1 - 1e-7) <= curve.epsilon(delta) <= exact * (1 + 1e-6) + 1e-6


@pytest.mark.parametrize("rest", [1e-3, 1e-9, 1e-14])
def test_nearly_all_records_cost_nearly_what_all_do(rest):
    """By the mixture itself, P = (1-q) N(0, 1) + q N(u, 1): delta at epsilon by adaptive quadrature of its two densities."""
    q, u = 1.0 - rest, 5.0
    pair = GaussianPair(q, u, False)
    edge = np.linspace(-12.0, 12.0 + u, 200_001)
    middle, width = (edge[1:] + edge[:-1]) / 2, np.diff(edge)
    lower = np.exp(-0.5 * middle**2) / math.sqrt(2 * math.pi)
    upper = (1.0 - q) * lower + q * np.exp(-0.5 * (middle - u) ** 2) / math.sqrt(2 * math.pi)
    forward, backward = discretise(pair, 1e-4, 1e-18)
    for one, (p, other) in ((forward, (upper, lower)), (backward, (lower, upper))):
        assert one.masses.sum() == pytest.approx(1.0, abs=1e-8)
        curve = HockeyStick.of(one)
        for epsilon in (1.0, 10.0, 20.0):
            delta = float((np.maximum(0.0, p - math.exp(epsilon) * other) * width).sum())
            assert curve.delta(epsilon) == pytest.approx(delta, rel=2e-4, abs=1e-11)


@needs_poisson_replace_one
def test_epsilon_after_full_batches_grows_with_them_after_poisson_ones():
    prior = [PrivacyPlan(PoissonSampling(0.05), 2.0, 20, "replace_one").dp_event]
    plan = PrivacyPlan(FullBatch(), 4.0, 1, "replace_one")
    found = [plan.replace(num_releases=n).epsilon(1e-5, prior) for n in (60, 80, 87, 95, 102)]
    assert found == sorted(found)
    for n, epsilon in zip((60, 80, 87, 95, 102), found, strict=True):
        alone = plan.replace(num_releases=n).epsilon(1e-5)
        assert alone < epsilon < alone + 0.5
