"""Per-example clipped gradient sums. Each engine states the sensitivity of what it returns (contract C3)."""

from tfp_dpvi.gradients.base import PerExample
from tfp_dpvi.gradients.clip import (
    CLIPPINGS,
    Clip,
    ClippedSum,
    exactly,
    register_clipping,
    select_finite,
)
from tfp_dpvi.gradients.ghost import LayerGradients, Pass
from tfp_dpvi.gradients.isolation import (
    VaryingShapeError,
    depends_on,
    refuse_dynamic_shapes,
    refuse_writes,
    strictly,
)
from tfp_dpvi.gradients.joint import JointRelease, Released, joint_release, joint_sensitivity
from tfp_dpvi.gradients.layers import RULES, UnsupportedLayerError, Whole, layers_of
from tfp_dpvi.gradients.paired import NUM_BLOCKS, ClippedAway, Curvature, curvature_releases, paired
from tfp_dpvi.gradients.reparameterized import through_draws
from tfp_dpvi.gradients.step import ClippedGradient, StepGradient, StepSpec, mapped
from tfp_dpvi.gradients.vmap import clipped_sum

__all__ = [
    "CLIPPINGS",
    "NUM_BLOCKS",
    "RULES",
    "Clip",
    "ClippedAway",
    "ClippedGradient",
    "ClippedSum",
    "Curvature",
    "JointRelease",
    "LayerGradients",
    "Pass",
    "PerExample",
    "Released",
    "StepGradient",
    "StepSpec",
    "UnsupportedLayerError",
    "VaryingShapeError",
    "Whole",
    "clipped_sum",
    "curvature_releases",
    "depends_on",
    "exactly",
    "joint_release",
    "joint_sensitivity",
    "layers_of",
    "mapped",
    "paired",
    "refuse_dynamic_shapes",
    "refuse_writes",
    "register_clipping",
    "select_finite",
    "strictly",
    "through_draws",
]
