"""Per-example clipped gradient sums. Each engine states the sensitivity of what it returns (contract C3)."""

from tfp_dpvi.gradients.aligned import ThroughDraws, through_draws
from tfp_dpvi.gradients.capture import layers_of, refuse_mixing
from tfp_dpvi.gradients.clipping import (
    CLIPPINGS,
    ClippedSum,
    clip_factors,
    clip_record,
    exactly,
    layer_names,
    select_finite,
)
from tfp_dpvi.gradients.ghost import LayerGradients, Pass
from tfp_dpvi.gradients.layer_rules import RULES, UnsupportedLayerError
from tfp_dpvi.gradients.statistics import RecordStatistics
from tfp_dpvi.gradients.vectorized import RecordGradient, clipped_sum

__all__ = [
    "CLIPPINGS",
    "RULES",
    "ClippedSum",
    "LayerGradients",
    "Pass",
    "RecordGradient",
    "RecordStatistics",
    "ThroughDraws",
    "UnsupportedLayerError",
    "clip_factors",
    "clip_record",
    "clipped_sum",
    "exactly",
    "layer_names",
    "layers_of",
    "refuse_mixing",
    "select_finite",
    "through_draws",
]
