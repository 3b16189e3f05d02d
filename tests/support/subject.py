"""The thing under test: the package's own parts, or broken copies of them.

Checks take a `Subject`; the tests give them `REAL`, and `test_mutations.py` gives them copies with one part replaced.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

from support import internals
from support.internals import StepGradients, step_gradients
from tfp_dpvi import gradients, optimizers
from tfp_dpvi.sampling import PoissonSampler


@dataclasses.dataclass(frozen=True)
class Subject:
    """The parts of a private step."""

    clipped_sum: Callable[..., Any] = gradients.clipped_sum
    privatize: Callable[..., Any] = optimizers.privatize
    step_gradients: Callable[..., StepGradients] = step_gradients
    poisson: Callable[..., Any] = PoissonSampler

    @contextlib.contextmanager
    def installed(self):
        """Puts the parts where `fit` takes them from."""
        with internals.installed(self.clipped_sum, self.privatize, self.poisson):
            yield


REAL = Subject()
