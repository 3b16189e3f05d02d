"""Per-example clipped gradient sums.

Each engine states the sensitivity of what it returns (contract 3).
"""

from typing import Any

from tfp_dpvi import _deprecation
from tfp_dpvi.gradients.base import PerExample
from tfp_dpvi.gradients.clip import (
    Clip,
    ClippedSum,
    exactly,
    register_clipping,
)
from tfp_dpvi.gradients.isolation import (
    VaryingShapeError,
)
from tfp_dpvi.gradients.joint import JointRelease, Released, joint_sensitivity
from tfp_dpvi.gradients.reparameterized import through_draws
from tfp_dpvi.gradients.step import ClippedGradient, StepGradient, StepSpec, mapped
from tfp_dpvi.gradients.vmap import clipped_sum

__all__ = [
    "Clip",
    "ClippedGradient",
    "ClippedSum",
    "JointRelease",
    "PerExample",
    "Released",
    "StepGradient",
    "StepSpec",
    "VaryingShapeError",
    "clipped_sum",
    "exactly",
    "joint_sensitivity",
    "mapped",
    "register_clipping",
    "through_draws",
]


def __getattr__(name: str) -> Any:
    return _deprecation.renamed(__name__, name)
