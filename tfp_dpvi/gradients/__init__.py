"""Per-example clipped gradient sums. Each engine states the sensitivity of what it returns (contract C3)."""

from tfp_dpvi.gradients.aligned import ThroughDraws, through_draws
from tfp_dpvi.gradients.clipping import ClippedSum, clip_record, select_finite
from tfp_dpvi.gradients.vectorized import RecordGradient, clipped_sum

__all__ = [
    "ClippedSum",
    "RecordGradient",
    "ThroughDraws",
    "clip_record",
    "clipped_sum",
    "select_finite",
    "through_draws",
]
