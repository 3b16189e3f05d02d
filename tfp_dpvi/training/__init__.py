"""The private step and the fit around it.

`step.private_step` is the algorithm, and `Mechanism` determines its privacy cost.
"""

from typing import Any

from tfp_dpvi import _deprecation
from tfp_dpvi._random import new_key
from tfp_dpvi.training.compiled import CompiledSteps, make_step, secure_key
from tfp_dpvi.training.mechanism import Mechanism
from tfp_dpvi.training.step import StepState, initial_state

__all__ = [
    "CompiledSteps",
    "Mechanism",
    "StepState",
    "initial_state",
    "make_step",
    "new_key",
    "secure_key",
]


def __getattr__(name: str) -> Any:
    return _deprecation.renamed(__name__, name)
