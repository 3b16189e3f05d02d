"""Audits of a model's own private step: its sensitivity by replay, and a lower bound of epsilon by canaries."""

from tfp_dpvi.audit.bounds import Errors, Guesses
from tfp_dpvi.audit.lower_bounds import LowerBound, lower_bound
from tfp_dpvi.audit.neighbours import Differences, differences, rounding
from tfp_dpvi.audit.replayed import Measured, Replay, replay

__all__ = [
    "Differences",
    "Errors",
    "Guesses",
    "LowerBound",
    "Measured",
    "Replay",
    "differences",
    "lower_bound",
    "replay",
    "rounding",
]
