"""Audits of a model's own private step: sensitivity by replay, epsilon from below by canaries, noise and samples by tests."""

from tfp_dpvi.audit.bounds import Errors, Guesses
from tfp_dpvi.audit.draws import Randomness, randomness
from tfp_dpvi.audit.lower_bounds import LowerBound, lower_bound
from tfp_dpvi.audit.replayed import Measured, Replay, replay

__all__ = [
    "Errors",
    "Guesses",
    "LowerBound",
    "Measured",
    "Randomness",
    "Replay",
    "lower_bound",
    "randomness",
    "replay",
]
