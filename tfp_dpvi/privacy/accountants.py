"""Accountants behind one small interface: epsilon at delta and delta at epsilon of an event.

Convention of events (that of dp_accounting >= 0.6): under add-or-remove-one a Gaussian event of
multiplier m compares N(0, m^2) with N(1, m^2); under replace-one it compares N(0, m^2) with
N(2, m^2), and a Poisson-sampled one (1-q) N(0, m^2) + q N(1, m^2) with (1-q) N(0, m^2) +
q N(-1, m^2). dp_accounting 0.4.3 reads replace-one events differently, so none is passed to it raw.
"""

import abc
import functools
import math
from typing import ClassVar

import dp_accounting
from dp_accounting import DpEvent, NeighboringRelation
from dp_accounting import rdp as dp_rdp

from tfp_dpvi.privacy import _composition, _dominating_pairs, analytic_gaussian
from tfp_dpvi.privacy import _validation as check
from tfp_dpvi.privacy._events import ReleaseCounts, count_releases
from tfp_dpvi.privacy.errors import UnsupportedPairError

BASE_STEP = 1e-4
_MAX_SIZE = 1 << 20
# Deltas below this drown in the rounding of the Fourier transform.
SMALLEST_DELTA = 1e-12


WeightedPairs = tuple[tuple[_dominating_pairs.GaussianPair, int], ...]


class Accountant(abc.ABC):
    """Prices a DpEvent under an adjacency."""

    name: ClassVar[str] = ""

    @abc.abstractmethod
    def epsilon(self, event: DpEvent, delta: float, relation: NeighboringRelation) -> float:
        """Returns an epsilon that, with `delta`, holds for `event`; infinity if there is none."""

    @abc.abstractmethod
    def delta(self, event: DpEvent, epsilon: float, relation: NeighboringRelation) -> float:
        """Returns a delta that, with `epsilon`, holds for `event`."""

    def epsilon_near(
        self, event: DpEvent, delta: float, relation: NeighboringRelation, near: float
    ) -> float:
        """Returns a quick upper bound of `epsilon`, close to it where it is about `near`."""
        del near
        return self.epsilon(event, delta, relation)


def gaussian_shift(counts: ReleaseCounts, relation: NeighboringRelation) -> float:
    """Returns sensitivity over standard deviation of all full-batch releases together."""
    z = counts.gaussian_multiplier
    unit = 2.0 if relation is NeighboringRelation.REPLACE_ONE else 1.0
    return 0.0 if math.isinf(z) else unit / z


def pairs_of(counts: ReleaseCounts, relation: NeighboringRelation) -> WeightedPairs:
    """Returns the dominating pairs behind an event and how often each occurs."""
    symmetric = relation is NeighboringRelation.REPLACE_ONE
    pairs = [
        (_dominating_pairs.GaussianPair(q, 1.0 / z, symmetric), n)
        for (q, z), n in sorted(counts.poisson.items())
    ]
    shift = gaussian_shift(counts, relation)
    if shift > 0.0 and pairs:
        pairs.append((_dominating_pairs.GaussianPair(1.0, shift, False), 1))
    return tuple(pairs)


def wanted_step(epsilon: float, delta: float, releases: int) -> float:
    """Returns the grid spacing at which rounding raises `epsilon` by less than about 0.03 %.

    A release rounded to a grid of spacing h has a loss whose variance is larger by at most h^2/4
    (h^2/6 on average); n of them move epsilon by about log(1/delta) n h^2 / (12 epsilon). Spacings
    are 1e-4 times a power of two, so that grids nest and a coarser one bounds a finer one.
    """
    if epsilon <= 0.0 or math.isinf(epsilon):
        return BASE_STEP
    limit = epsilon * math.sqrt(3e-3 / (releases * math.log(2.0 / delta)))
    return BASE_STEP * 2.0 ** min(0, math.floor(math.log2(limit / BASE_STEP)))


def composers(pairs: WeightedPairs, step: float) -> list[_composition.Composer]:
    """Returns one composer per direction (one where both are equal), coarsened until it fits."""
    # The mass that each release may count as infinite loss: 1e-16 of the whole composition.
    tail = 1e-16 / max(1, sum(n for _, n in pairs))
    widest = max(high - low for low, high in (p.loss_range(tail) for p, _ in pairs))
    while widest / step > _MAX_SIZE:
        step *= 2.0
    while True:
        singles = [_dominating_pairs.discretise(p, step, tail) for p, _ in pairs]
        counts = [n for _, n in pairs]
        directions = max(len(s) for s in singles)
        columns = [[s[min(d, len(s) - 1)] for s in singles] for d in range(directions)]
        machines = [_composition.Composer(c, counts) for c in columns]
        size = max(m.window_size for m in machines)
        if size <= _MAX_SIZE:
            return machines
        step *= 2.0 ** math.ceil(math.log2(size / _MAX_SIZE))


class PldAccountant(Accountant):
    """Privacy loss distributions, composed numerically with pessimistic rounding.

    Equals dp_accounting's PLD accountant to about 1e-8 where that one applies, an order of
    magnitude faster; full batches alone are priced in closed form.
    """

    name = "pld"

    def epsilon(self, event: DpEvent, delta: float, relation: NeighboringRelation) -> float:
        """Returns the smallest epsilon, rounded to the private side."""
        delta = _resolvable(check.delta(delta))
        counts = self._counts(event, relation)
        if counts.non_private:
            return math.inf
        pairs = pairs_of(counts, relation)
        if not pairs:
            return analytic_gaussian.gaussian_epsilon(delta, gaussian_shift(counts, relation))
        # A coarse grid overstates epsilon, so it may allow too coarse a step: look again.
        releases = sum(n for _, n in pairs)
        step = 8.0 * BASE_STEP
        while True:
            epsilon = max(curve.epsilon(delta) for curve in _curves(pairs, step))
            wanted = wanted_step(epsilon, delta, releases)
            if step <= wanted or epsilon == 0.0 or math.isinf(epsilon):
                return epsilon
            step = wanted

    def epsilon_near(
        self, event: DpEvent, delta: float, relation: NeighboringRelation, near: float
    ) -> float:
        """Returns epsilon on one coarser grid for all events, so that a search meets no jumps."""
        delta = _resolvable(check.delta(delta))
        counts = self._counts(event, relation)
        pairs = pairs_of(counts, relation)
        if counts.non_private or not pairs:
            return self.epsilon(event, delta, relation)
        step = 4.0 * wanted_step(near, delta, sum(n for _, n in pairs))
        return max(curve.epsilon(delta) for curve in _curves(pairs, step))

    def delta(self, event: DpEvent, epsilon: float, relation: NeighboringRelation) -> float:
        """Returns the smallest delta, rounded to the private side."""
        epsilon = check.non_negative("epsilon", epsilon)
        counts = self._counts(event, relation)
        if counts.non_private:
            return 1.0
        pairs = pairs_of(counts, relation)
        if not pairs:
            return analytic_gaussian.gaussian_delta(epsilon, gaussian_shift(counts, relation))
        step = wanted_step(max(epsilon, _spread(pairs)), 1e-6, sum(n for _, n in pairs))
        return max(curve.delta(epsilon) for curve in _curves(pairs, step))

    @staticmethod
    def _counts(event: DpEvent, relation: NeighboringRelation) -> ReleaseCounts:
        check.relation(relation)
        counts = count_releases(event)
        if counts.fixed_size:
            raise UnsupportedPairError(
                "fixed-size sampling without replacement has no tight privacy loss distribution "
                "here; use accountant='rdp' for the whole composition."
            )
        return counts


def _spread(pairs: WeightedPairs) -> float:
    """Returns the standard deviation of the composed loss."""
    return math.sqrt(math.fsum(n * p.loss_moments()[1] for p, n in pairs))


def _resolvable(delta: float) -> float:
    if delta < SMALLEST_DELTA:
        raise ValueError(
            f"delta={delta!r} is below {SMALLEST_DELTA}, what numerical composition resolves; "
            "pass a larger delta or use accountant='rdp'."
        )
    return delta


@functools.lru_cache(maxsize=4)
def _curves(pairs: WeightedPairs, step: float) -> tuple[_composition.HockeyStick, ...]:
    counts = [n for _, n in pairs]
    return tuple(_composition.HockeyStick.of(c(counts)) for c in composers(pairs, step))


class RdpAccountant(Accountant):
    """Renyi differential privacy (the moments accountant), by dp_accounting."""

    name = "rdp"

    def epsilon(self, event: DpEvent, delta: float, relation: NeighboringRelation) -> float:
        """Returns epsilon by the best of dp_accounting's default orders."""
        delta = check.delta(delta)
        return float(self._composed(event, relation).get_epsilon(delta))

    def delta(self, event: DpEvent, epsilon: float, relation: NeighboringRelation) -> float:
        """Returns delta by the best of dp_accounting's default orders."""
        epsilon = check.non_negative("epsilon", epsilon)
        return float(self._composed(event, relation).get_delta(epsilon))

    @staticmethod
    def _composed(event: DpEvent, relation: NeighboringRelation) -> dp_rdp.RdpAccountant:
        check.relation(relation)
        counts = count_releases(event)
        accountant = dp_rdp.RdpAccountant(neighboring_relation=relation)
        if counts.non_private:
            accountant.compose(dp_accounting.NonPrivateDpEvent())
            return accountant
        # dp_accounting's RDP takes the multiplier over the whole distance of the two sums.
        shift = gaussian_shift(counts, relation)
        if shift > 0.0:
            accountant.compose(dp_accounting.GaussianDpEvent(1.0 / shift))
        if counts.poisson and relation is NeighboringRelation.REPLACE_ONE:
            raise UnsupportedPairError(
                "Poisson sampling under replace-one is not priced by accountant='rdp'; "
                "use accountant='pld'."
            )
        if counts.fixed_size and relation is NeighboringRelation.ADD_OR_REMOVE_ONE:
            raise UnsupportedPairError(
                "fixed-size sampling is not priced under add-or-remove-one; use replace-one."
            )
        for (q, z), n in counts.poisson.items():
            accountant.compose(
                dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(z)), n
            )
        for (records, batch, z), n in counts.fixed_size.items():
            accountant.compose(
                dp_accounting.SampledWithoutReplacementDpEvent(
                    records, batch, dp_accounting.GaussianDpEvent(z / 2.0)
                ),
                n,
            )
        return accountant


ACCOUNTANTS: dict[str, Accountant] = {a.name: a for a in (PldAccountant(), RdpAccountant())}


def get_accountant(name: str) -> Accountant:
    """Returns an accountant by name.

    Raises:
      ValueError: for an unknown name.
    """
    if name not in ACCOUNTANTS:
        raise ValueError(f"accountant={name!r} is unknown; choose one of {sorted(ACCOUNTANTS)}.")
    return ACCOUNTANTS[name]
