"""Audits of a model's own private step: sensitivity by replay."""

from tfp_dpvi.audit.neighbours import Differences, differences, rounding
from tfp_dpvi.audit.replayed import Measured, Replay, replay

__all__ = [
    "Differences",
    "Measured",
    "Replay",
    "differences",
    "replay",
    "rounding",
]
