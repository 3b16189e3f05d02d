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
import numpy as np
from dp_accounting import DpEvent, NeighboringRelation
from dp_accounting.rdp import rdp_privacy_accountant as _rdp

from tfp_dpvi.privacy import _composition, _dominating_pairs, advanced_composition, analytic_gaussian
from tfp_dpvi.privacy import _validation as check
from tfp_dpvi.privacy._events import ReleaseCounts, count_releases
from tfp_dpvi.privacy._fixed_size_rdp import fixed_size_rdp
from tfp_dpvi.privacy._poisson_replace_rdp import poisson_replace_rdp
from tfp_dpvi.privacy.errors import UnsupportedPairError

#: Grid spacing of privacy losses, dp_accounting's default. Coarser ones are STEP times a power of two,
#: so that grids nest and a coarser one bounds a finer one from above.
STEP = 1e-4
_MAX_SIZE = 1 << 20
# Deltas below this drown in the rounding of the Fourier transform of long compositions.
SMALLEST_DELTA = 1e-10


_ORDERS = tuple(float(order) for order in _rdp.DEFAULT_RDP_ORDERS)
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

    def epsilon_quick(self, event: DpEvent, delta: float, relation: NeighboringRelation) -> float:
        """Returns a quick upper bound of `epsilon` for a search to start from."""
        return self.epsilon(event, delta, relation)


def gaussian_shift(counts: ReleaseCounts, relation: NeighboringRelation) -> float:
    """Returns sensitivity over standard deviation of all full-batch releases together."""
    z = counts.gaussian_multiplier
    unit = 2.0 if relation is NeighboringRelation.REPLACE_ONE else 1.0
    return 0.0 if math.isinf(z) else unit / z


def pairs_of(counts: ReleaseCounts, relation: NeighboringRelation) -> WeightedPairs:
    """Returns the dominating pairs behind an event and how often each occurs."""
    symmetric = relation is NeighboringRelation.REPLACE_ONE
    pairs = [(_dominating_pairs.GaussianPair(q, 1.0 / z, symmetric), n) for (q, z), n in sorted(counts.poisson.items())]
    shift = gaussian_shift(counts, relation)
    if shift > 0.0 and pairs:
        pairs.append((_dominating_pairs.GaussianPair(1.0, shift, False), 1))
    return tuple(pairs)


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
        return max(curve.epsilon(delta) for curve in _curves(pairs, STEP))

    def epsilon_quick(self, event: DpEvent, delta: float, relation: NeighboringRelation) -> float:
        """Returns epsilon on one coarser grid for all events, so that a search meets no jumps."""
        delta = _resolvable(check.delta(delta))
        counts = self._counts(event, relation)
        pairs = pairs_of(counts, relation)
        if counts.non_private or not pairs:
            return self.epsilon(event, delta, relation)
        return max(curve.epsilon(delta) for curve in _curves(pairs, 4.0 * STEP))

    def delta(self, event: DpEvent, epsilon: float, relation: NeighboringRelation) -> float:
        """Returns the smallest delta, rounded to the private side."""
        epsilon = check.non_negative("epsilon", epsilon)
        counts = self._counts(event, relation)
        if counts.non_private:
            return 1.0
        pairs = pairs_of(counts, relation)
        if not pairs:
            return analytic_gaussian.gaussian_delta(epsilon, gaussian_shift(counts, relation))
        return max(curve.delta(epsilon) for curve in _curves(pairs, STEP))

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
    """Renyi differential privacy (the moments accountant) at dp_accounting's default orders.

    Divergences are dp_accounting's own for Poisson sampling under add-or-remove-one, and those of
    `fixed_size_rdp` and `poisson_replace_rdp` for the pairs that it prices slowly or not at all.
    """

    name = "rdp"

    def epsilon(self, event: DpEvent, delta: float, relation: NeighboringRelation) -> float:
        """Returns epsilon by the best order."""
        return self._epsilon(event, delta, relation, _ORDERS)

    def epsilon_quick(self, event: DpEvent, delta: float, relation: NeighboringRelation) -> float:
        """Returns epsilon by the best of fewer orders, never below `epsilon`."""
        return self._epsilon(event, delta, relation, _ORDERS[::6])

    def _epsilon(self, event: DpEvent, delta: float, relation: NeighboringRelation, orders: tuple[float, ...]) -> float:
        delta = check.delta(delta)
        return float(_rdp.compute_epsilon(orders, self._rdp(event, relation, orders), delta)[0])

    def delta(self, event: DpEvent, epsilon: float, relation: NeighboringRelation) -> float:
        """Returns delta by the best order."""
        epsilon = check.non_negative("epsilon", epsilon)
        return float(_rdp.compute_delta(_ORDERS, self._rdp(event, relation, _ORDERS), epsilon)[0])

    @staticmethod
    def _rdp(event: DpEvent, relation: NeighboringRelation, orders: tuple[float, ...]) -> np.ndarray:
        check.relation(relation)
        counts = count_releases(event)
        if counts.non_private:
            return np.full(len(orders), np.inf)
        replace = relation is NeighboringRelation.REPLACE_ONE
        if counts.fixed_size and not replace:
            raise UnsupportedPairError("fixed-size sampling is not priced under add-or-remove-one; use replace-one.")
        total = 0.5 * np.asarray(orders) * gaussian_shift(counts, relation) ** 2
        for (q, z), n in counts.poisson.items():
            total = total + n * _poisson_rdp(q, z, replace, orders)
        for (records, batch, z), n in counts.fixed_size.items():
            # z is over half the distance that a replacement moves the sum.
            total = total + n * fixed_size_rdp(batch / records, z / 2.0, orders)
        return total


@functools.lru_cache(maxsize=64)
def _poisson_rdp(q: float, z: float, replace: bool, orders: tuple[float, ...]) -> np.ndarray:
    if replace:
        return poisson_replace_rdp(q, z, orders)
    accountant = _rdp.RdpAccountant(orders)
    accountant.compose(dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(z)))
    return accountant._rdp


class AdvancedCompositionAccountant(Accountant):
    """Advanced composition with amplification as in the 2017 paper; for comparison only."""

    name = "advanced_composition"

    def epsilon(self, event: DpEvent, delta: float, relation: NeighboringRelation) -> float:
        """Returns epsilon by equations 7 and 8 of the paper, infinity where their bound fails."""
        check.relation(relation)
        return advanced_composition.total_epsilon(event, check.delta(delta), relation)

    def delta(self, event: DpEvent, epsilon: float, relation: NeighboringRelation) -> float:
        """Returns the smallest delta whose epsilon is at most `epsilon`; 1 if there is none."""
        epsilon = check.non_negative("epsilon", epsilon)
        low, high = math.log(1e-300), math.log(0.5)
        if self.epsilon(event, math.exp(high), relation) > epsilon:
            return 1.0
        if self.epsilon(event, math.exp(low), relation) <= epsilon:
            return math.exp(low)
        while high - low > 1e-9:
            middle = 0.5 * (low + high)
            if self.epsilon(event, math.exp(middle), relation) > epsilon:
                low = middle
            else:
                high = middle
        return math.exp(high)


ACCOUNTANTS: dict[str, Accountant] = {
    a.name: a for a in (PldAccountant(), RdpAccountant(), AdvancedCompositionAccountant())
}


def get_accountant(name: str) -> Accountant:
    """Returns an accountant by name.

    Raises:
      ValueError: for an unknown name.
    """
    if name not in ACCOUNTANTS:
        raise ValueError(f"accountant={name!r} is unknown; choose one of {sorted(ACCOUNTANTS)}.")
    return ACCOUNTANTS[name]
