"""`EpsilonCurve`: epsilon over steps, computed at few steps and read in microseconds."""

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
    `steps` are the points at which it is computed, when they are first read; the last one at once.
    """

    def __init__(
        self,
        plan: PrivacyPlan,
        prior_events: Sequence[DpEvent] = (),
        delta: float = 1e-5,
        checkpoints: Sequence[int] = (),
    ) -> None:
        self.plan, self.delta = plan, check.delta(delta)
        self.steps = _grid(plan.num_releases, checkpoints)
        self._prior_events = tuple(prior_events)
        self._found = {self.steps[-1]: plan.epsilon(self.delta, prior_events)}

    def __call__(self, step: int) -> float:
        """Returns an epsilon that holds after `step` releases; raises `ValueError` beyond the plan's last."""
        if not 0 <= step <= self.steps[-1]:
            raise ValueError(
                f"step={step!r} must lie between 0 and the plan's {self.steps[-1]} releases."
            )
        point = self.steps[bisect.bisect_left(self.steps, step)]
        if point not in self._found:
            self._found[point] = self._price(point)
        return self._found[point]

    def _price(self, step: int) -> float:
        event, accountant = (
            compose(self._prior_events, self.plan.event_of(step)),
            get_accountant(self.plan.accountant),
        )
        value = accountant.epsilon(event, self.delta, self.plan.neighboring_relation, coarser=3)
        # Rounding of the composition differs by a few 1e-9 between numbers of steps and between grids. Epsilon grows with the
        # steps, so that a value of later steps is a bound too, and one of earlier steps is no larger than needed.
        later = min(found for point, found in self._found.items() if point > step)
        earlier = max((found for point, found in self._found.items() if point < step), default=0.0)
        return max(earlier, min(float(value) * (1 + 1e-8), later))


def _grid(total: int, checkpoints: Sequence[int]) -> list[int]:
    if total <= _MAX_POINTS:
        return list(range(total + 1))
    wanted = sorted({c for c in checkpoints if c <= total})
    room = _MAX_POINTS // 2
    if len(wanted) > room:
        wanted = [wanted[round(i * (len(wanted) - 1) / (room - 1))] for i in range(room)]
    rest = _MAX_POINTS - room
    spread = np.concatenate(
        [np.geomspace(1, max(1, total), rest // 2), np.linspace(0, total, rest - rest // 2)]
    )
    return sorted({*wanted, *(math.ceil(x) for x in spread if x <= total), 0, total})
