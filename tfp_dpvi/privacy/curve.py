"""`EpsilonCurve`: epsilon over steps, made beforehand, read in microseconds."""

import bisect
import math
from collections.abc import Sequence

import numpy as np
from dp_accounting import DpEvent

from tfp_dpvi.privacy import _composition, accountants
from tfp_dpvi.privacy import _validation as check
from tfp_dpvi.privacy._events import count_releases
from tfp_dpvi.privacy.plan import PrivacyPlan, compose

_MAX_POINTS = 64
# Grid points transformed over the whole curve: about a third of a second.
_MAX_WORK = 4e6


class EpsilonCurve:
    """An upper bound of epsilon after each step of a plan.

    `curve(step)` is never below the epsilon that the plan's accountant reports for that many
    releases after `prior_events`; it is exact at the plan's last step, and at the checkpoints up to
    the coarser grid used there (about 0.1 %). It never decreases.

    Args:
      plan: the plan of the fit.
      prior_events: what was released before on the same data.
      delta: the delta of all epsilons.
      checkpoints: steps at which the value should be close to exact, for example epoch ends; where
        there are too many, an even choice of them is taken.
    """

    def __init__(
        self,
        plan: PrivacyPlan,
        prior_events: Sequence[DpEvent] = (),
        delta: float = 1e-5,
        checkpoints: Sequence[int] = (),
    ) -> None:
        self.plan = plan
        self.delta = check.delta(delta)
        total = plan.num_releases
        self._steps = _grid(total, checkpoints)
        if self._has_no_shortcut(prior_events):
            self._steps = _grid(total, checkpoints, points=12)
        values = self._values(list(prior_events))
        exact = plan.epsilon(self.delta, prior_events)
        values = values * (1 + 1e-8)  # Rounding in the composition differs by a few 1e-9 between numbers of steps.
        # Epsilon grows with the steps, so the exact last value bounds every earlier one.
        values = np.minimum(values, exact)
        values[-1] = exact
        self._epsilons = np.minimum.accumulate(values[::-1])[::-1].tolist()

    def __call__(self, step: int) -> float:
        """Returns an epsilon that holds after `step` releases of the plan.

        Raises:
          ValueError: for a step beyond the plan's last.
        """
        if not 0 <= step <= self._steps[-1]:
            raise ValueError(f"step={step!r} must lie between 0 and the plan's {self._steps[-1]} releases.")
        return self._epsilons[bisect.bisect_left(self._steps, step)]

    def _has_no_shortcut(self, prior_events: Sequence[DpEvent]) -> bool:
        # Full batches after Poisson ones: the Gaussian part changes with every step count.
        if self.plan.accountant != "pld" or self.plan.noise_multiplier == 0.0:
            return False
        prior = count_releases(compose(list(prior_events), self.plan.event_of(0)))
        return bool(prior.poisson) and not count_releases(self.plan.release_event).poisson

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps at which epsilon was computed."""
        return tuple(self._steps)

    @property
    def epsilons(self) -> tuple[float, ...]:
        """The epsilons at `steps`."""
        return tuple(self._epsilons)

    def _values(self, prior: list[DpEvent]) -> np.ndarray:
        plan, delta = self.plan, self.delta
        relation = plan.neighboring_relation
        if plan.noise_multiplier == 0.0:
            before = compose_epsilon(plan, prior, delta, 0)
            return np.array([math.inf if s else before for s in self._steps])
        counts = count_releases(compose(prior, plan.dp_event))
        if plan.accountant != "pld" or not counts.poisson or counts.non_private:
            return np.array([compose_epsilon(plan, prior, delta, s) for s in self._steps])
        own = count_releases(plan.release_event)
        if not own.poisson:
            return np.array([compose_epsilon(plan, prior, delta, s) for s in self._steps])
        # One transform of each single release; per step count only a power and its inverse.
        ((own_q, own_z),) = own.poisson
        pairs = accountants.pairs_of(counts, relation)
        # A coarser nested grid bounds the finer one from above; take the one that time allows.
        step = accountants.STEP
        while True:
            machines = accountants.composers(pairs, step)
            work = sum(m.window_size for m in machines) * len(self._steps) / _MAX_WORK
            if work <= 1.0:
                break
            step *= 2.0 ** math.ceil(math.log2(work))
        mine = next(
            i
            for i, (p, _) in enumerate(pairs)
            if p.probability == own_q and math.isclose(p.shift, 1.0 / own_z, rel_tol=0.0)
        )
        values = []
        for s in self._steps:
            times = [n for _, n in pairs]
            times[mine] += s - plan.num_releases
            curves = [_composition.HockeyStick.of(m(times)) for m in machines]
            values.append(max(c.epsilon(delta) for c in curves))
        return np.array(values)


def compose_epsilon(plan: PrivacyPlan, prior: Sequence[DpEvent], delta: float, steps: int) -> float:
    """Returns epsilon after `steps` releases of a plan that follows `prior`."""
    return plan.replace(num_releases=steps).epsilon(delta, prior)


def _grid(total: int, checkpoints: Sequence[int], points: int = _MAX_POINTS) -> list[int]:
    wanted = sorted({check.count("checkpoints", c) for c in checkpoints} & set(range(total + 1)))
    room = points // 2
    if len(wanted) > room:
        wanted = [wanted[round(i * (len(wanted) - 1) / (room - 1))] for i in range(room)]
    rest = points - room
    spread = np.concatenate([np.geomspace(1, max(1, total), rest // 2), np.linspace(0, total, rest - rest // 2)])
    return sorted({*wanted, *(math.ceil(x) for x in spread if x <= total), 0, total})
