"""The thing under test: the package's own parts, or broken copies of them.

Checks take a `Subject`; the tests give them `REAL`, and `test_mutations.py` gives them copies with one part replaced.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any
from unittest import mock

from tfp_dpvi import gradients, optimizers
from tfp_dpvi.models import loop, planning
from tfp_dpvi.models.loop import StepGradients
from tfp_dpvi.optimizers import noise
from tfp_dpvi.sampling import PoissonSampler


def step_gradients(model, key, num_records) -> StepGradients:
    return model.step_gradients(key, num_records)


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
        with (
            mock.patch.object(loop, "clipped_sum", self.clipped_sum),
            mock.patch.object(noise, "privatize", self.privatize),
            mock.patch.object(planning, "PoissonSampler", self.poisson),
        ):
            yield


REAL = Subject()
