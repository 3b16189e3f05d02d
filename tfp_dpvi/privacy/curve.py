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

    `curve(step)` is never below the epsilon that the plan's accountant reports for that many
    releases after `prior_events`, and it never decreases. It is exact at the plan's last step. At
    the checkpoints it is exact up to the coarser grid that is used there (a few tenths of a
    percent); if there are too many checkpoints, evenly spaced ones are used. A value is computed
    when it is first read, that of the last step at once.

    Args:
      plan: The plan of the fit.
      prior_events: The events of earlier releases on the same data.
      delta: The delta at which epsilon is reported.
      checkpoints: Steps at which the curve is to be nearly exact, such as the ends of epochs.

    Attributes:
      plan: The plan.
      delta: The delta.
      steps: The steps at which the curve is computed, in ascending order.

    ```python
    >>> from tfp_dpvi.privacy import PoissonSampling, PrivacyPlan
    >>> plan = PrivacyPlan(PoissonSampling(0.01), noise_multiplier=1.0, num_releases=1000)
    >>> curve = EpsilonCurve(plan, delta=1e-5, checkpoints=[500])
    >>> curve(0) <= curve(500) < curve(1000) == plan.epsilon(1e-5)
    True
    >>> second = EpsilonCurve(plan, prior_events=[plan.event_of(1000)], delta=1e-5)
    >>> second(1000) > curve(1000)
    True

    ```
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
        self._prior_events = tuple(prior_events)
        self._epsilons = {self.steps[-1]: plan.epsilon(self.delta, prior_events)}

    def __call__(self, step: int) -> float:
        """Returns an epsilon that holds after `step` releases.

        Raises:
          ValueError: The step is not between 0 and the plan's number of releases.
        """
        if not 0 <= step <= self.steps[-1]:
            raise ValueError(
                f"step={step!r} must lie between 0 and the plan's {self.steps[-1]} releases."
            )
        point = self.steps[bisect.bisect_left(self.steps, step)]
        if point not in self._epsilons:
            self._epsilons[point] = self._price(point)
        return self._epsilons[point]

    def _price(self, step: int) -> float:
        event = compose(self._prior_events, self.plan.event_of(step))
        accountant = get_accountant(self.plan.accountant)
        value = accountant.epsilon(event, self.delta, self.plan.neighboring_relation, coarser=3)
        # Rounding of the composition differs by a few 1e-9 between numbers of steps and between
        # grids. Epsilon grows with the steps, so that a value of later steps is a bound too, and a
        # value of earlier steps is no larger than needed.
        known = self._epsilons.items()
        later = min(epsilon for point, epsilon in known if point > step)
        earlier = max((epsilon for point, epsilon in known if point < step), default=0.0)
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
