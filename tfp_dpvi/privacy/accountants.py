"""Accountants: epsilon at delta of a `DpEvent`, by dp_accounting.

The convention of events is that of dp_accounting 0.5 and later:

* Under add-or-remove-one a Gaussian event of multiplier m compares N(0, m^2) with N(1, m^2).
* Under replace-one it compares N(0, m^2) with N(2, m^2), and a Poisson-sampled one compares
  (1-q) N(0, m^2) + q N(1, m^2) with (1-q) N(0, m^2) + q N(-1, m^2).

The RDP accountant of every version, and the PLD accountant of 0.4.3, read a replace-one Gaussian
as N(0, m^2) against N(1, m^2). They never get one here.
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

#: Grid spacing of privacy losses. It is dp_accounting's default, so that its `PLDAccountant` gives
#: the same values.
STEP = 1e-4
#: Smallest delta: below it, dp_accounting's Fourier transforms do not always round upwards.
SMALLEST_DELTA = 1e-9
#: Sampled releases with a smaller noise multiplier count as without noise: their epsilon is in the
#: hundreds of thousands.
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
#: The number of releases by (sampling rate, noise multiplier).
Counts: TypeAlias = dict[tuple[float, float], int]


class Releases:
    """The releases of an event by kind; composition does not depend on their order.

    Attributes:
      private: False if some release has no noise.
      full: Releases on all records, whose rate is 1.
      poisson: Releases on Poisson samples, whose rate is the probability.
      fixed_size: Releases on fixed-size samples, whose rate is the batch size over the number of
        records.
      selected: Selections from random trials on all records, by (mean, shape, noise multiplier of
        a trial).

    Args:
      event: The event of all releases.

    Raises:
      UnsupportedPairError: The type of the event is not supported.
    """

    def __init__(self, event: DpEvent) -> None:
        self.private = True
        self.full: Counts = {}
        self.poisson: Counts = {}
        self.fixed_size: Counts = {}
        self.selected: dict[tuple[float, float, float], int] = {}
        self._add(event, 1)

    @property
    def full_multiplier(self) -> float:
        """The multiplier of the Gaussian that equals all releases on all records; inf for none."""
        precision = math.fsum(n / z**2 for (_, z), n in sorted(self.full.items()))
        return 1.0 / math.sqrt(precision) if precision > 0.0 else math.inf

    def _add(self, event: DpEvent, times: int) -> None:
        if times == 0 or isinstance(event, dp_accounting.NoOpDpEvent):
            return
        if isinstance(event, dp_accounting.SelfComposedDpEvent):
            return self._add(event.event, times * event.count)
        if isinstance(event, dp_accounting.ComposedDpEvent):
            for part in event.events:
                self._add(part, times)
            return
        if isinstance(event, dp_accounting.dp_event.RepeatAndSelectDpEvent):
            return self._add_selected(event, times)
        rate = 1.0
        mechanism = event
        sampled = self.full
        if isinstance(event, dp_accounting.PoissonSampledDpEvent):
            rate = float(event.sampling_probability)
            mechanism = event.event
            sampled = self.poisson
        elif isinstance(event, dp_accounting.SampledWithoutReplacementDpEvent):
            rate = event.sample_size / event.source_dataset_size
            mechanism = event.event
            sampled = self.fixed_size
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

    def _add_selected(
        self, event: dp_accounting.dp_event.RepeatAndSelectDpEvent, times: int
    ) -> None:
        """Adds selections, whose trials are Gaussian releases on all records."""
        trial = Releases(event.event)
        if trial.poisson or trial.fixed_size or trial.selected:
            raise UnsupportedPairError(
                "event=RepeatAndSelectDpEvent is priced for trials on all records alone."
            )
        if not trial.private:
            self.private = False
        else:
            kind = (float(event.mean), float(event.shape), trial.full_multiplier)
            self.selected[kind] = self.selected.get(kind, 0) + times


class Accountant(abc.ABC):
    """Computes the privacy loss of a `DpEvent` under a neighboring relation.

    To add an accountant, write a subclass and put an object of it into `ACCOUNTANTS` under its
    name.

    Attributes:
      name: The name that plans and reports have.
      over_replacement: Whether dp_accounting's accountant of this name reads a replace-one Gaussian
        as N(0, m^2) against N(1, m^2), unlike the events here. An auditor who repeats the
        accounting needs the event in that form.

    ```python
    >>> from tfp_dpvi.privacy import FullBatch, NeighboringRelation, PrivacyPlan, get_accountant
    >>> event = PrivacyPlan(FullBatch(), noise_multiplier=4.0, num_releases=1).dp_event
    >>> relation = NeighboringRelation.ADD_OR_REMOVE_ONE
    >>> round(get_accountant("pld").epsilon(event, 1e-5, relation), 3)
    0.926
    >>> round(get_accountant("rdp").epsilon(event, 1e-5, relation), 3)
    1.013

    ```
    """

    name: ClassVar[str] = ""
    over_replacement: ClassVar[bool] = False

    def grid_spacing(self, event: DpEvent, relation: NeighboringRelation) -> float | None:
        """Returns the spacing of privacy losses in a numerical composition.

        Args:
          event: The event of all releases.
          relation: The neighboring relation.

        Returns:
          The spacing; None if nothing is composed on a grid.

        Raises:
          UnsupportedPairError: The event is not supported under this neighboring relation.
        """
        return None

    def releases(self, event: DpEvent, relation: NeighboringRelation) -> Releases:
        """Returns the releases of an event by kind, if all of them are supported.

        Args:
          event: The event of all releases.
          relation: The neighboring relation.

        Raises:
          UnsupportedPairError: The event is not supported under this neighboring relation.
        """
        releases = Releases(event)
        if refusal := self.refusal(releases, check.relation(relation) is _REPLACE):
            kind, fix = refusal
            raise UnsupportedPairError(
                f"accountant={self.name!r} does not support {kind} under "
                f"{relation.name.lower()}; {fix}."
            )
        return releases

    @abc.abstractmethod
    def refusal(self, releases: Releases, replace: bool) -> tuple[str, str] | None:
        """Returns the first kind of release that is not supported.

        Args:
          releases: The releases of an event.
          replace: Whether the neighboring relation is replace-one.

        Returns:
          The name of the kind, and a fix for the user; None if all kinds are supported.
        """

    @abc.abstractmethod
    def epsilon(
        self, event: DpEvent, delta: float, relation: NeighboringRelation, *, coarser: int = 0
    ) -> float:
        """Returns an epsilon that holds for an event, or infinity.

        Args:
          event: The event of all releases.
          delta: Strictly between 0 and 1.
          relation: The neighboring relation.
          coarser: How many times the precision may be halved to save time. The result holds for
            any value.

        Raises:
          UnsupportedPairError: The event is not supported under this neighboring relation.
          ValueError: Delta is out of its range.
        """

    def attack_bound(
        self, event: DpEvent, delta: float, relation: NeighboringRelation
    ) -> AttackBound:
        """Returns a limit on what releases tell an attacker about one record; see `AttackBound`.

        This method knows one of an event's (epsilon, delta) pairs. An accountant that knows more
        of them overrides `deltas`, which gives smaller numbers.

        Args:
          event: The event of all releases.
          delta: The smallest delta for which `AttackBound.mu` is to hold.
          relation: The neighboring relation.

        Raises:
          UnsupportedPairError: The event is not supported under this neighboring relation.
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
        """Returns a delta that holds at each epsilon.

        Args:
          event: The event of all releases.
          epsilons: Finite numbers in ascending order, float64 of shape [k].
          relation: The neighboring relation.

        Returns:
          float64 of shape [k]; None if the accountant does not know them.
        """
        return None


def poisson_replace_refusal() -> tuple[str, str]:
    """Returns the refusal of Poisson samples under replace-one: their name, and the fix."""
    fix = "use accountant='pld'"
    if not PRICES_POISSON_REPLACE_ONE:
        fix = (
            f"install dp-accounting >= 0.5 and {fix} (TensorFlow Privacy pins 0.4.3), use full "
            "batches, or add_or_remove_one"
        )
    return "Poisson sampling", fix


def _shift(releases: Releases, replace: bool) -> float:
    """Returns the distance of the means over the standard deviation, for all full batches."""
    return (2.0 if replace else 1.0) / releases.full_multiplier


#: (q, noise multiplier, count) of each kind of release, where q = 1 stands for all records.
Kinds: TypeAlias = tuple[tuple[float, float, int], ...]


class PldAccountant(Accountant):
    """Privacy loss distributions by dp_accounting, rounded upwards.

    Releases on full batches have a closed form; all others are composed numerically.
    """

    name = "pld"

    def grid_spacing(self, event: DpEvent, relation: NeighboringRelation) -> float | None:
        """See `Accountant`. Returns None if `epsilon` is infinite or has a closed form."""
        releases = self.releases(event, relation)
        if not releases.private or not releases.poisson:
            return None
        return grid_step(_kinds(releases), relation)

    def refusal(self, releases: Releases, replace: bool) -> tuple[str, str] | None:
        """See `Accountant`.

        Refuses fixed-size samples, selections from random trials, and with dp_accounting before 0.5
        Poisson samples under replace-one.
        """
        if releases.selected:
            return "a selection from random trials", "use accountant='rdp'"
        if releases.fixed_size:
            return "fixed-size sampling", "use accountant='rdp' and replace_one"
        if releases.poisson and replace and not PRICES_POISSON_REPLACE_ONE:
            return poisson_replace_refusal()
        return None

    def epsilon(
        self, event: DpEvent, delta: float, relation: NeighboringRelation, *, coarser: int = 0
    ) -> float:
        """See `Accountant`. The smallest epsilon, rounded upwards.

        Raises:
          ValueError: Delta is below 1e-9 and the event has no closed form.
        """
        delta = check.delta(delta)
        releases = self.releases(event, relation)
        if not releases.private:
            return math.inf
        if not releases.poisson:
            return gaussian_epsilon(delta, _shift(releases, relation is _REPLACE))
        if delta < SMALLEST_DELTA:
            raise ValueError(
                f"delta={delta!r} is below {SMALLEST_DELTA:g}, the resolution of numerical "
                "composition; pass a larger delta, use accountant='rdp' (add_or_remove_one), or "
                "full batches."
            )
        kinds = _kinds(releases)
        return _epsilon(kinds, relation, grid_step(kinds, relation, _POINTS >> coarser), delta)

    def attack_bound(
        self, event: DpEvent, delta: float, relation: NeighboringRelation
    ) -> AttackBound:
        """See `Accountant`. The bound is exact if all releases are on all records."""
        releases = self.releases(event, relation)
        if releases.private and not releases.poisson:
            check.delta(delta)
            return gaussian_attack_bound(_shift(releases, relation is _REPLACE))
        return super().attack_bound(event, delta, relation)

    def deltas(
        self, event: DpEvent, epsilons: FloatArray, relation: NeighboringRelation
    ) -> FloatArray:
        """See `Accountant`. The deltas are of the cached composition that `epsilon` comes from."""
        kinds = _kinds(self.releases(event, relation))
        composition = _composition(kinds, relation, grid_step(kinds, relation))
        with np.errstate(divide="ignore", over="ignore"):
            # For several epsilons at once dp_accounting goes through its losses in a Python loop.
            deltas = [composition.get_delta_for_epsilon(epsilon) for epsilon in epsilons.tolist()]
        return np.asarray(deltas)


def _kinds(releases: Releases) -> Kinds:
    full = ((1.0, releases.full_multiplier, 1),) if releases.full else ()
    return (*((q, z, n) for (q, z), n in releases.poisson.items()), *full)


def grid_step(kinds: Kinds, relation: NeighboringRelation, points: int = _POINTS) -> float:
    """Returns the grid spacing of privacy losses.

    It is `STEP`, doubled while one release needs more than `points`, or all together more than 16
    times as many. Grids nest, so that a coarser one gives an upper bound.

    If the losses of all kinds of samples have a standard deviation below 8e-4, as in fits of 1e6
    steps, `STEP` would overstate epsilon by 1 to 100 %. It is then halved down to an eighth of the
    deviation, while a quarter of the points is enough, which overstates epsilon by 0.04 to 0.2 %.
    More releases, or kinds of them, never make the grid finer, so that epsilon does not decrease.

    Args:
      kinds: The releases.
      relation: The neighboring relation.
      points: The number of points of a grid for one release.
    """
    replace = relation is _REPLACE
    widest = mean = deviation = 0.0
    for q, z, n in kinds:
        widest = max(widest, _widest(q, z, replace))
        # The mean of a loss is at most q times that of all records, and at most the chi-squared
        # divergence.
        single = 0.5 * q / z**2
        if q < 1.0:
            single = min(single, q**2 * math.expm1(min(z**-2, 700.0)))
        mean += n * single * (4.0 if replace else 1.0)
        if q < 1.0:
            deviation = max(deviation, math.sqrt(2.0 * single) * (2.0 if replace else 1.0))
    width = widest + 2.0 * mean + 20.0 * math.sqrt(2.0 * mean)
    need = max(widest, width / 16.0) / (STEP * points)
    finest = max(-5, math.floor(math.log2(deviation / (8.0 * STEP)))) if deviation else 0
    halvings = min(0, max(finest, math.ceil(math.log2(4.0 * need))))
    return float(STEP * 2.0 ** max(halvings, math.ceil(math.log2(need))))


# The ledger, the curve and the report need the same values.
@functools.lru_cache(maxsize=4096)
def _epsilon(kinds: Kinds, relation: NeighboringRelation, step: float, delta: float) -> float:
    # For losses above 700, e^-loss underflows in dp_accounting.
    with np.errstate(divide="ignore", over="ignore"):
        return float(_composition(kinds, relation, step).get_epsilon_for_delta(delta))


@functools.lru_cache(maxsize=64)
def _composition(
    kinds: Kinds, relation: NeighboringRelation, step: float
) -> "_pld.PrivacyLossDistribution":
    if len(kinds) > 1:
        # The kinds are split at powers of two, so that a further kind, as in a calibration, reuses
        # the cached composition of the others.
        half = 1 << ((len(kinds) - 1).bit_length() - 1)
        first, second = (
            _composition(part, relation, step) for part in (kinds[:half], kinds[half:])
        )
        return first.compose(second, 1e-15)
    [kind] = kinds
    q, z = kind[:2]
    n = kind[2]
    single = _single(q, z, relation, step)
    if n <= 100_000 or _widest(q, z, relation is _REPLACE) > 2000.0 * step:
        return single.self_compose(n)
    # dp_accounting computes integers of up to 1000^n, which takes seconds for n above 1e5.
    most = single.self_compose(10, 0.0).self_compose(n // 10)
    return most.compose(single.self_compose(n % 10)) if n % 10 else most


def _widest(q: float, z: float, replace: bool) -> float:
    """Returns the approximate range of one release's losses."""
    # The log ratio of N(1/z) and N(0) at dp_accounting's cutoff, whose tail has the mass e^-50.
    reach = 10.2 / z + 0.5 / z**2
    if q < 1.0:
        top = np.logaddexp(math.log1p(-q), math.log(q) + reach)
    else:
        top = reach * (2.0 if replace else 1.0)
    return float(top) * (2.0 if replace or q == 1.0 else 1.0)


@functools.lru_cache(maxsize=8)
def _single(
    q: float, z: float, relation: NeighboringRelation, step: float
) -> "_pld.PrivacyLossDistribution":
    kinds = (_Adjacency.REPLACE,) if relation is _REPLACE else (_Adjacency.REMOVE, _Adjacency.ADD)
    return _pld.PrivacyLossDistribution(*(_losses(q, z, kind, step) for kind in kinds))


def _losses(q: float, z: float, kind: "_Adjacency", step: float) -> "_pld_pmf.PLDPmf":
    """Returns the losses that dp_accounting's `from_gaussian_mechanism` (connect the dots) has.

    Its own loop takes 20 times as long.
    """
    loss = _mechanism.GaussianPrivacyLoss(z, sampling_prob=q, adjacency_type=kind)
    ends = loss.connect_dots_bounds()
    low = math.floor(ends.epsilon_lower / step)
    high = math.ceil(ends.epsilon_upper / step)
    epsilons = np.arange(low, high + 1) * step
    # Losses that sampling cannot reach have an infinite cutoff.
    with np.errstate(divide="ignore"):
        x = _cutoffs(q, z, kind, epsilons)
        deltas = loss.mu_upper_cdf(x) - np.exp(epsilons + loss.mu_lower_log_cdf(x))
    return _pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(
        step, low, high, np.clip(deltas, 0.0, 1.0)
    )


def _cutoffs(q: float, z: float, kind: "_Adjacency", epsilons: FloatArray) -> FloatArray:
    """Returns the outcomes below which privacy losses exceed `epsilons`.

    It is dp_accounting's `inverse_privacy_loss` for an array.
    """
    if kind in (_Adjacency.REMOVE, _Adjacency.ADD):
        sign = 1.0 if kind is _Adjacency.REMOVE else -1.0
        e = sign * epsilons
        # The loss on all records, log(1 + (exp(e) - 1) / q).
        whole = e - math.log(q) + np.log(np.maximum(0.0, -np.expm1(np.log1p(-q) - e)))
        cutoffs: FloatArray = -sign * (0.5 + z**2 * whole)
        return cutoffs
    # x = z^2 (arcsinh(-sinh(e / 2) (1 / q - 1) exp(1 / (2 z^2))) - e / 2), where arcsinh(y) is
    # log(y + sqrt(y^2 + 1)).
    half = 0.5 * np.abs(epsilons)
    log_y = half + np.log(-0.5 * np.expm1(-2.0 * half)) + np.log1p(-q) - math.log(q) + 0.5 / z**2
    arcsinh = np.logaddexp(log_y, 0.5 * np.logaddexp(2.0 * log_y, 0.0))
    cutoffs = -np.sign(epsilons) * z**2 * (arcsinh + half)
    return cutoffs


class RdpAccountant(Accountant):
    """Renyi differential privacy (the moments accountant) at dp_accounting's default orders."""

    name = "rdp"
    over_replacement = True

    def refusal(self, releases: Releases, replace: bool) -> tuple[str, str] | None:
        """See `Accountant`.

        Refuses fixed-size samples under add-or-remove-one and Poisson samples under replace-one.
        """
        if releases.fixed_size and not replace:
            return "fixed-size sampling", "use replace_one"
        # For Poisson samples under replace-one rounding dominates the divergences at small rates:
        # epsilon would be 0 although the true delta is 3e-4.
        return poisson_replace_refusal() if releases.poisson and replace else None

    def epsilon(
        self, event: DpEvent, delta: float, relation: NeighboringRelation, *, coarser: int = 0
    ) -> float:
        """See `Accountant`. The smallest epsilon of all orders."""
        del coarser
        delta = check.delta(delta)
        return float(_rdp.compute_epsilon(ORDERS, self.divergences(event, relation), delta)[0])

    def deltas(
        self, event: DpEvent, epsilons: FloatArray, relation: NeighboringRelation
    ) -> FloatArray:
        """See `Accountant`. The smallest delta of all orders, as in dp_accounting."""
        return renyi_deltas(ORDERS, self.divergences(event, relation), epsilons)

    def divergences(
        self, event: DpEvent, relation: NeighboringRelation, orders: tuple[float, ...] = ORDERS
    ) -> FloatArray:
        """Returns the Renyi divergences of an event, rounded up.

        Args:
          event: The event of all releases.
          relation: The neighboring relation.
          orders: Orders above 1.

        Returns:
          float64 of shape [len(orders)]; infinity without noise.

        Raises:
          UnsupportedPairError: The event is not supported under this neighboring relation.
        """
        releases = self.releases(event, relation)
        if not releases.private:
            return np.full(len(orders), np.inf)
        total: FloatArray = 0.5 * np.asarray(orders) * _shift(releases, relation is _REPLACE) ** 2
        for (q, z), n in releases.poisson.items():
            total = total + n * _poisson_rdp(q, z, orders)
        for (q, z), n in releases.fixed_size.items():
            # z is relative to half the sensitivity to a replacement.
            total = total + n * _fixed_size_rdp(q, z / 2.0, orders)
        for (mean, shape, z), n in releases.selected.items():
            # That of a replacement compares N(0, z^2) with N(2, z^2).
            own = z / 2.0 if relation is _REPLACE else z
            total = total + n * _selected_rdp(mean, shape, own, orders)
        return total


def renyi_deltas(
    orders: Sequence[float], divergences: ArrayLike, epsilons: ArrayLike
) -> FloatArray:
    """Returns the smallest delta that Renyi divergences give at each epsilon.

    It uses proposition 12 of Canonne, Kamath and Steinke 2020 (arXiv:2004.00010), and at small
    epsilon delta <= sqrt(1 - exp(-divergence)) (Bretagnolle and Huber), as dp_accounting does.

    Args:
      orders: Orders above 1.
      divergences: The divergence at each order.
      epsilons: Numbers of at least 0.

    Returns:
      float64 of shape [len(epsilons)].
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
    """Returns dp_accounting's divergences, rounded up; inf where their rounding error dominates."""
    event = dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(z))
    divergences = np.empty(len(orders))
    for i, order in enumerate(orders):
        accountant = _rdp.RdpAccountant([order])
        try:
            accountant.compose(event)
            divergences[i] = accountant._rdp[0]
        except ValueError:
            # dp_accounting 0.4.3 takes logarithms of negative differences.
            divergences[i] = math.inf
    # The rounding error is 1e-15 of the log moment, which is divided by order - 1.
    slack = 1e-15 * np.asarray(orders) / (np.asarray(orders) - 1.0)
    return np.where(divergences >= -slack, np.maximum(divergences, 0.0) + slack, math.inf)


@functools.lru_cache(maxsize=256)
def _selected_rdp(mean: float, shape: float, z: float, orders: tuple[float, ...]) -> FloatArray:
    """Returns dp_accounting's divergences of a selection from random trials.

    The bound of one order uses all others, so that the default ones are always among them.
    """
    known = (*orders, *ORDERS)
    accountant = _rdp.RdpAccountant(known)
    trial = dp_accounting.GaussianDpEvent(z)
    accountant.compose(dp_accounting.dp_event.RepeatAndSelectDpEvent(trial, mean, shape))
    divergences: FloatArray = np.asarray(accountant._rdp)[: len(orders)]
    return divergences


_fixed_size_rdp = functools.lru_cache(maxsize=256)(fixed_size_rdp)


#: The accountants by name.
ACCOUNTANTS: dict[str, Accountant] = {a.name: a for a in (PldAccountant(), RdpAccountant())}


def get_accountant(name: str) -> Accountant:
    """Returns an accountant of `ACCOUNTANTS` by name; raises `ValueError` for an unknown name."""
    if name not in ACCOUNTANTS:
        raise ValueError(
            f"accountant={check.shown(name)} is unknown; choose one of {sorted(ACCOUNTANTS)}."
        )
    return ACCOUNTANTS[name]
