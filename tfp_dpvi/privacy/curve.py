"""`EpsilonCurve`: epsilon over steps, computed in advance and read in microseconds."""

import bisect
import math
from collections.abc import Sequence

import numpy as np
from dp_accounting import DpEvent

from tfp_dpvi import _validate as check
from tfp_dpvi.privacy.accountants import get_accountant
from tfp_dpvi.privacy.plan import PrivacyPlan, compose

_MAX_POINTS = 20


class EpsilonCurve:
    """An upper bound of epsilon after each step of a plan.

    `curve(step)` is never below the epsilon that the plan's accountant reports for that many releases after `prior_events`.
    It is exact at the plan's last step, and at the checkpoints up to the coarser grid used there (a few tenths of a
    percent), for example epoch ends, of which evenly spaced ones are used if there are too many. It never decreases.
    `steps` and `epsilons` are the points at which it was computed.
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
        self.steps = _grid(plan.num_releases, checkpoints)
        price, relation = get_accountant(plan.accountant), plan.neighboring_relation
        events = [compose(prior_events, plan.event_of(step)) for step in self.steps[:-1]]
        values = np.array([price.epsilon(event, self.delta, relation, coarser=3) for event in events])
        exact = plan.epsilon(self.delta, prior_events)
        # Rounding of the composition differs by a few 1e-9 between numbers of steps and between grids.
        values = np.append(np.minimum(values * (1 + 1e-8), exact), exact)
        # Epsilon grows with the steps, so a later value bounds every earlier one.
        self.epsilons = np.minimum.accumulate(values[::-1])[::-1].tolist()

    def __call__(self, step: int) -> float:
        """Returns an epsilon that holds after `step` releases; raises `ValueError` beyond the plan's last."""
        if not 0 <= step <= self.steps[-1]:
            raise ValueError(f"step={step!r} must lie between 0 and the plan's {self.steps[-1]} releases.")
        return float(self.epsilons[bisect.bisect_left(self.steps, step)])


def _grid(total: int, checkpoints: Sequence[int]) -> list[int]:
    if total <= _MAX_POINTS:
        return list(range(total + 1))
    wanted = sorted({c for c in checkpoints if c <= total})
    room = _MAX_POINTS // 2
    if len(wanted) > room:
        wanted = [wanted[round(i * (len(wanted) - 1) / (room - 1))] for i in range(room)]
    rest = _MAX_POINTS - room
    spread = np.concatenate([np.geomspace(1, max(1, total), rest // 2), np.linspace(0, total, rest - rest // 2)])
    return sorted({*wanted, *(math.ceil(x) for x in spread if x <= total), 0, total})
