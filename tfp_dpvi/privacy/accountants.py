"""Accountants: epsilon at delta of a `DpEvent`, by dp_accounting.

Convention of events (as in dp_accounting >= 0.5): under add-or-remove-one a Gaussian event of multiplier m compares
N(0, m^2) with N(1, m^2); under replace-one it compares N(0, m^2) with N(2, m^2), and a Poisson-sampled one
(1-q) N(0, m^2) + q N(1, m^2) with (1-q) N(0, m^2) + q N(-1, m^2). The RDP accountant of every version, and the PLD
accountant of 0.4.3, read a replace-one Gaussian as N(0, m^2) against N(1, m^2); they never get one here.
"""

import abc
import functools
import inspect
import math
from collections.abc import Sequence
from typing import ClassVar, TypeAlias

import dp_accounting
import numpy as np
from dp_accounting import DpEvent, NeighboringRelation
from dp_accounting.pld import pld_pmf as _pld_pmf
from dp_accounting.pld import privacy_loss_distribution as _pld
from dp_accounting.pld import privacy_loss_mechanism as _mechanism
from dp_accounting.rdp import rdp_privacy_accountant as _rdp
from numpy.typing import ArrayLike, NDArray

from tfp_dpvi import _validate as check
from tfp_dpvi.privacy._fixed_size_rdp import fixed_size_rdp
from tfp_dpvi.privacy.errors import UnsupportedPairError
from tfp_dpvi.privacy.tradeoff import (
    NO_PROTECTION,
    AttackBound,
    attack_bound,
    gaussian_attack_bound,
    gaussian_epsilon,
)

#: Grid spacing of privacy losses: dp_accounting's default, so that its `PLDAccountant` gives the same values.
STEP = 1e-4
#: Smallest delta: below it, dp_accounting's Fourier transforms do not always round upwards.
SMALLEST_DELTA = 1e-9
#: Sampled releases with less noise count as without noise: their epsilon is in the hundreds of thousands.
SMALLEST_SAMPLED_NOISE = 1e-3
#: Whether dp_accounting supports Poisson sampling under replace-one: 0.5 and later.
PRICES_POISSON_REPLACE_ONE = (
    "neighboring_relation" in inspect.signature(_pld.from_gaussian_mechanism).parameters
)

_Adjacency: TypeAlias = _mechanism.AdjacencyType
FloatArray: TypeAlias = NDArray[np.float64]
_REPLACE = NeighboringRelation.REPLACE_ONE
#: Orders of the Renyi divergences: dp_accounting's default.
ORDERS = tuple(float(order) for order in _rdp.DEFAULT_RDP_ORDERS)
_POINTS = 1 << 16
#: Pairs of the profile from which mu is computed: it is at most 0.3 % larger than with all pairs.
_PROFILE_POINTS = 65
Counts: TypeAlias = dict[
    tuple[float, float], int
]  # {(sampling rate, noise multiplier): number of releases}


class Releases:
    """The releases of an event by kind; composition does not depend on their order.

    Raises:
      UnsupportedPairError: an unsupported type of event.
    """

    def __init__(self, event: DpEvent) -> None:
        self.private = True  # False if some release has no noise.
        self.full: Counts = {}  # Releases on all records; the rate is 1.
        self.poisson: Counts = {}  # The rate is the probability.
        self.fixed_size: Counts = {}  # The rate is the batch size over the number of records.
        self._add(event, 1)

    @property
    def full_multiplier(self) -> float:
        """The multiplier of the one Gaussian that equals all releases on all records; inf if there are none."""
        precision = math.fsum(n / z**2 for (_, z), n in sorted(self.full.items()))
        return 1.0 / math.sqrt(precision) if precision > 0.0 else math.inf

    def _add(self, event: DpEvent, times: int) -> None:
        rate, mechanism, sampled = 1.0, event, self.full
        if times == 0 or isinstance(event, dp_accounting.NoOpDpEvent):
            return
        if isinstance(event, dp_accounting.SelfComposedDpEvent):
            return self._add(event.event, times * event.count)
        if isinstance(event, dp_accounting.ComposedDpEvent):
            for part in event.events:
                self._add(part, times)
            return
        if isinstance(event, dp_accounting.PoissonSampledDpEvent):
            rate, mechanism, sampled = float(event.sampling_probability), event.event, self.poisson
        elif isinstance(event, dp_accounting.SampledWithoutReplacementDpEvent):
            rate, mechanism, sampled = (
                event.sample_size / event.source_dataset_size,
                event.event,
                self.fixed_size,
            )
        if not isinstance(
            mechanism, dp_accounting.GaussianDpEvent | dp_accounting.NonPrivateDpEvent
        ):
            raise UnsupportedPairError(
                f"event={type(mechanism).__name__} is not priced; only Gaussian releases are."
            )
        z = float(getattr(mechanism, "noise_multiplier", 0.0))
        if z <= (SMALLEST_SAMPLED_NOISE if sampled is self.poisson and rate < 1.0 else 0.0):
            self.private = self.private and rate == 0.0
        elif rate > 0.0:
            kinds = self.full if rate == 1.0 else sampled
            kinds[rate, z] = kinds.get((rate, z), 0) + times


class Accountant(abc.ABC):
    """Computes the privacy loss of a `DpEvent` under a neighboring relation. Add a subclass to `ACCOUNTANTS` to use its name."""

    name: ClassVar[str] = ""
    #: Whether an auditor's tool reads a replace-one Gaussian as N(0, m^2) against N(1, m^2), unlike the events here.
    over_replacement: ClassVar[bool] = False

    def grid_spacing(self, event: DpEvent, relation: NeighboringRelation) -> float | None:
        """Returns the spacing of privacy losses in a numerical composition; None without one."""
        return None

    def releases(self, event: DpEvent, relation: NeighboringRelation) -> Releases:
        """Returns the releases of an event; raises `UnsupportedPairError` if the neighboring relation is not supported for it."""
        releases = Releases(event)
        if refusal := self.refusal(releases, check.relation(relation) is _REPLACE):
            kind, fix = refusal
            raise UnsupportedPairError(
                f"accountant={self.name!r} does not support {kind} under {relation.name.lower()}; {fix}."
            )
        return releases

    @abc.abstractmethod
    def refusal(self, releases: Releases, replace: bool) -> tuple[str, str] | None:
        """Returns the unsupported kind of release and the fix; None if all are supported."""

    @abc.abstractmethod
    def epsilon(
        self, event: DpEvent, delta: float, relation: NeighboringRelation, *, coarser: int = 0
    ) -> float:
        """Returns an epsilon that holds for `event` at `delta`, or infinity; at half the precision, `coarser` times."""

    def attack_bound(
        self, event: DpEvent, delta: float, relation: NeighboringRelation
    ) -> AttackBound:
        """Returns what an attacker can learn of a record from releases; see `AttackBound`.

        Of the (epsilon, delta) pairs of an event, this knows one. An accountant that knows more of
        them overrides `deltas`, which gives smaller numbers.

        Args:
          event: the event of all releases.
          delta: the smallest delta for which `AttackBound.mu` is to hold.
          relation: the neighboring relation.
        """
        epsilon = self.epsilon(event, delta, relation)
        if math.isinf(epsilon):
            return NO_PROTECTION
        epsilons = np.linspace(0.0, epsilon, _PROFILE_POINTS if epsilon > 0.0 else 1)
        deltas = self.deltas(event, epsilons, relation)
        if deltas is None:
            return attack_bound([epsilon], [delta])
        return attack_bound(epsilons, deltas)

    def deltas(
        self, event: DpEvent, epsilons: FloatArray, relation: NeighboringRelation
    ) -> FloatArray | None:
        """Returns a delta that holds at each of finite, ascending epsilons; None if not known."""
        return None


def poisson_replace_refusal() -> tuple[str, str]:
    """Returns the refusal of Poisson sampling under replace-one: the unsupported kind and the fix."""
    fix = "use accountant='pld'"
    if not PRICES_POISSON_REPLACE_ONE:
        fix = f"install dp-accounting >= 0.5 and {fix} (TensorFlow Privacy pins 0.4.3), use full batches, or add_or_remove_one"
    return "Poisson sampling", fix


def _shift(releases: Releases, replace: bool) -> float:
    """Returns distance over standard deviation of all releases on all records together."""
    return (2.0 if replace else 1.0) / releases.full_multiplier


Kinds = tuple[tuple[float, float, int], ...]  # (q, noise multiplier, count), q = 1 for all records


class PldAccountant(Accountant):
    """Privacy loss distributions by dp_accounting, rounded upwards; only full batches have a closed form."""

    name = "pld"

    def grid_spacing(self, event: DpEvent, relation: NeighboringRelation) -> float | None:
        """Returns the grid spacing of `epsilon`; None if it is infinite or has a closed form."""
        releases = self.releases(event, relation)
        return (
            grid_step(_kinds(releases), relation) if releases.private and releases.poisson else None
        )

    def refusal(self, releases: Releases, replace: bool) -> tuple[str, str] | None:
        """Refuses fixed-size samples, and with dp_accounting < 0.5 Poisson samples under replace-one."""
        if releases.fixed_size:
            return "fixed-size sampling", "use accountant='rdp' and replace_one"
        return (
            poisson_replace_refusal()
            if releases.poisson and replace and not PRICES_POISSON_REPLACE_ONE
            else None
        )

    def epsilon(
        self, event: DpEvent, delta: float, relation: NeighboringRelation, *, coarser: int = 0
    ) -> float:
        """Returns the smallest epsilon, rounded upwards; refuses delta below 1e-9 without a closed form."""
        delta = check.delta(delta)
        releases = self.releases(event, relation)
        if not releases.private:
            return math.inf
        if not releases.poisson:
            return gaussian_epsilon(delta, _shift(releases, relation is _REPLACE))
        if delta < SMALLEST_DELTA:
            raise ValueError(
                f"delta={delta!r} is below {SMALLEST_DELTA:g}, the resolution of numerical composition; pass a larger delta, "
                "use accountant='rdp' (add_or_remove_one), or full batches."
            )
        kinds = _kinds(releases)
        return _epsilon(kinds, relation, grid_step(kinds, relation, _POINTS >> coarser), delta)

    def attack_bound(
        self, event: DpEvent, delta: float, relation: NeighboringRelation
    ) -> AttackBound:
        """Returns the bound of `Accountant`; exact if all releases are on all records."""
        releases = self.releases(event, relation)
        if releases.private and not releases.poisson:
            check.delta(delta)
            return gaussian_attack_bound(_shift(releases, relation is _REPLACE))
        return super().attack_bound(event, delta, relation)

    def deltas(
        self, event: DpEvent, epsilons: FloatArray, relation: NeighboringRelation
    ) -> FloatArray:
        """Returns the deltas of the composition from which `epsilon` comes, which is cached."""
        kinds = _kinds(self.releases(event, relation))
        composition = _composition(kinds, relation, grid_step(kinds, relation))
        with np.errstate(divide="ignore", over="ignore"):
            # One by one: for all at once dp_accounting goes through its losses in a Python loop.
            deltas = [composition.get_delta_for_epsilon(epsilon) for epsilon in epsilons.tolist()]
        return np.asarray(deltas)


def _kinds(releases: Releases) -> Kinds:
    full = ((1.0, releases.full_multiplier, 1),) if releases.full else ()
    return (*((q, z, n) for (q, z), n in releases.poisson.items()), *full)


def grid_step(kinds: Kinds, relation: NeighboringRelation, points: int = _POINTS) -> float:
    """Returns the grid spacing: `STEP`, doubled while a release needs more than `points`, or all together 16 times as many.

    Grids nest, so a coarser one gives an upper bound. If the losses of all kinds of samples have a standard deviation below
    8e-4, as in fits of 1e6 steps, `STEP` would overstate epsilon by 1 to 100 %: it is halved down to an eighth of that, while a
    quarter of the points is enough, which overstates epsilon by 0.04 to 0.2 %. More releases, or kinds of them, never make the
    grid finer, so that epsilon does not decrease.
    """
    replace = relation is _REPLACE
    widest = mean = deviation = 0.0
    for q, z, n in kinds:
        widest = max(widest, _widest(q, z, replace))
        # The mean of a loss is at most q times that of all records, and at most the chi-squared divergence.
        single = (
            min(0.5 * q / z**2, q**2 * math.expm1(min(z**-2, 700.0))) if q < 1.0 else 0.5 / z**2
        )
        mean += n * single * (4.0 if replace else 1.0)
        if q < 1.0:
            deviation = max(deviation, math.sqrt(2.0 * single) * (2.0 if replace else 1.0))
    width = widest + 2.0 * mean + 20.0 * math.sqrt(2.0 * mean)
    need = max(widest, width / 16.0) / (STEP * points)
    finest = max(-5, math.floor(math.log2(deviation / (8.0 * STEP)))) if deviation else 0
    return float(
        STEP
        * 2.0
        ** max(min(0, max(finest, math.ceil(math.log2(4.0 * need)))), math.ceil(math.log2(need)))
    )


@functools.lru_cache(maxsize=4096)  # Ledger, curve and report need the same values.
def _epsilon(kinds: Kinds, relation: NeighboringRelation, step: float, delta: float) -> float:
    with np.errstate(
        divide="ignore", over="ignore"
    ):  # For losses above 700, e^-loss underflows in dp_accounting.
        return float(_composition(kinds, relation, step).get_epsilon_for_delta(delta))


@functools.lru_cache(maxsize=64)
def _composition(
    kinds: Kinds, relation: NeighboringRelation, step: float
) -> "_pld.PrivacyLossDistribution":
    if len(kinds) > 1:
        # Splits at powers of two: a further kind, as in a calibration, reuses the others' cached composition.
        half = 1 << ((len(kinds) - 1).bit_length() - 1)
        first, second = (
            _composition(part, relation, step) for part in (kinds[:half], kinds[half:])
        )
        return first.compose(second, 1e-15)
    ((q, z, n),) = kinds
    single = _single(q, z, relation, step)
    if n <= 100_000 or _widest(q, z, relation is _REPLACE) > 2000.0 * step:
        return single.self_compose(n)
    # dp_accounting computes up to 1000 to the power n as an integer, which takes seconds for n above 1e5.
    most = single.self_compose(10, 0.0).self_compose(n // 10)
    return most.compose(single.self_compose(n % 10)) if n % 10 else most


def _widest(q: float, z: float, replace: bool) -> float:
    """Returns the approximate range of one release's losses."""
    reach = (
        10.2 / z + 0.5 / z**2
    )  # log of N(1/z) over N(0) at dp_accounting's cutoff, with tail mass e^-50.
    top = (
        np.logaddexp(math.log1p(-q), math.log(q) + reach)
        if q < 1.0
        else reach * (2.0 if replace else 1.0)
    )
    return float(top) * (2.0 if replace or q == 1.0 else 1.0)


@functools.lru_cache(maxsize=8)
def _single(
    q: float, z: float, relation: NeighboringRelation, step: float
) -> "_pld.PrivacyLossDistribution":
    kinds = (_Adjacency.REPLACE,) if relation is _REPLACE else (_Adjacency.REMOVE, _Adjacency.ADD)
    return _pld.PrivacyLossDistribution(*(_losses(q, z, kind, step) for kind in kinds))


def _losses(q: float, z: float, kind: "_Adjacency", step: float) -> "_pld_pmf.PLDPmf":
    """Returns dp_accounting's `from_gaussian_mechanism` (connect the dots), whose own loop takes 20 times as long."""
    loss = _mechanism.GaussianPrivacyLoss(z, sampling_prob=q, adjacency_type=kind)
    ends = loss.connect_dots_bounds()
    low, high = math.floor(ends.epsilon_lower / step), math.ceil(ends.epsilon_upper / step)
    epsilons = np.arange(low, high + 1) * step
    with np.errstate(divide="ignore"):  # Losses that sampling cannot reach have an infinite cutoff.
        x = _cutoffs(q, z, kind, epsilons)
        deltas = loss.mu_upper_cdf(x) - np.exp(epsilons + loss.mu_lower_log_cdf(x))
    return _pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(
        step, low, high, np.clip(deltas, 0.0, 1.0)
    )


def _cutoffs(q: float, z: float, kind: "_Adjacency", epsilons: FloatArray) -> FloatArray:
    """Returns the outcomes below which privacy losses exceed `epsilons`: dp_accounting's `inverse_privacy_loss`."""
    if kind in (_Adjacency.REMOVE, _Adjacency.ADD):
        sign = 1.0 if kind is _Adjacency.REMOVE else -1.0
        e = sign * epsilons
        whole = (
            e - math.log(q) + np.log(np.maximum(0.0, -np.expm1(np.log1p(-q) - e)))
        )  # log(1 + (exp(e) - 1) / q)
        cutoffs: FloatArray = -sign * (0.5 + z**2 * whole)
        return cutoffs
    half = 0.5 * np.abs(
        epsilons
    )  # x = z^2 (arcsinh(-sinh(e / 2) (1 / q - 1) exp(1 / (2 z^2))) - e / 2)
    log_y = half + np.log(-0.5 * np.expm1(-2.0 * half)) + np.log1p(-q) - math.log(q) + 0.5 / z**2
    cutoffs = (
        -np.sign(epsilons)
        * z**2
        * (np.logaddexp(log_y, 0.5 * np.logaddexp(2.0 * log_y, 0.0)) + half)
    )
    return cutoffs


class RdpAccountant(Accountant):
    """Renyi differential privacy (the moments accountant) at dp_accounting's default orders."""

    name = "rdp"
    over_replacement = True

    def refusal(self, releases: Releases, replace: bool) -> tuple[str, str] | None:
        """Refuses fixed-size samples under add-or-remove-one and Poisson samples under replace-one."""
        if releases.fixed_size and not replace:
            return "fixed-size sampling", "use replace_one"
        # Rounding dominates the divergences of that pair at small rates: epsilon 0 although the true delta is 3e-4.
        return poisson_replace_refusal() if releases.poisson and replace else None

    def epsilon(
        self, event: DpEvent, delta: float, relation: NeighboringRelation, *, coarser: int = 0
    ) -> float:
        """Returns epsilon at the best order."""
        del coarser
        delta = check.delta(delta)
        return float(_rdp.compute_epsilon(ORDERS, self.divergences(event, relation), delta)[0])

    def deltas(
        self, event: DpEvent, epsilons: FloatArray, relation: NeighboringRelation
    ) -> FloatArray:
        """Returns the delta of the best order at each epsilon, as dp_accounting does."""
        return renyi_deltas(ORDERS, self.divergences(event, relation), epsilons)

    def divergences(
        self, event: DpEvent, relation: NeighboringRelation, orders: tuple[float, ...] = ORDERS
    ) -> FloatArray:
        """Returns the Renyi divergence of an event at each order, shape [len(orders)], rounded up."""
        releases = self.releases(event, relation)
        if not releases.private:
            return np.full(len(orders), np.inf)
        total: FloatArray = 0.5 * np.asarray(orders) * _shift(releases, relation is _REPLACE) ** 2
        for (q, z), n in releases.poisson.items():
            total = total + n * _poisson_rdp(q, z, orders)
        for (q, z), n in releases.fixed_size.items():
            # z is relative to half the sensitivity to a replacement.
            total = total + n * _fixed_size_rdp(q, z / 2.0, orders)
        return total


def renyi_deltas(
    orders: Sequence[float], divergences: ArrayLike, epsilons: ArrayLike
) -> FloatArray:
    """Returns the smallest delta from Renyi divergences at each epsilon, shape [len(epsilons)].

    By proposition 12 of Canonne, Kamath and Steinke 2020 (arXiv:2004.00010), and at small epsilon
    by delta <= sqrt(1 - exp(-divergence)) (Bretagnolle and Huber), as dp_accounting does.

    Args:
      orders: orders above 1.
      divergences: the divergence at each order.
      epsilons: numbers >= 0.
    """
    order = np.asarray(orders)
    divergence = np.asarray(divergences)
    epsilon = np.asarray(epsilons)[:, np.newaxis]
    with np.errstate(divide="ignore"):
        distance = 0.5 * np.log(-np.expm1(-divergence))
    moment = (order - 1.0) * (divergence - epsilon + np.log1p(-1.0 / order)) - np.log(order)
    smallest = np.min(np.minimum(distance, moment), axis=1)
    deltas: FloatArray = np.exp(np.minimum(smallest, 0.0))
    return deltas


@functools.lru_cache(maxsize=256)
def _poisson_rdp(q: float, z: float, orders: tuple[float, ...] = ORDERS) -> FloatArray:
    """Returns dp_accounting's divergences, rounded up by their rounding error; inf if that error dominates."""
    event = dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(z))
    found = np.empty(len(orders))
    for i, order in enumerate(orders):
        accountant = _rdp.RdpAccountant([order])
        try:
            accountant.compose(event)
            found[i] = accountant._rdp[0]
        except ValueError:  # 0.4.3 takes logarithms of negative differences.
            found[i] = math.inf
    # 1e-15 of the log moment, which is divided by order - 1.
    slack = 1e-15 * np.asarray(orders) / (np.asarray(orders) - 1.0)
    return np.where(found >= -slack, np.maximum(found, 0.0) + slack, math.inf)


_fixed_size_rdp = functools.lru_cache(maxsize=256)(fixed_size_rdp)


ACCOUNTANTS: dict[str, Accountant] = {a.name: a for a in (PldAccountant(), RdpAccountant())}


def get_accountant(name: str) -> Accountant:
    """Returns an accountant by name; raises `ValueError` for an unknown one."""
    if name not in ACCOUNTANTS:
        raise ValueError(
            f"accountant={check.shown(name)} is unknown; choose one of {sorted(ACCOUNTANTS)}."
        )
    return ACCOUNTANTS[name]
