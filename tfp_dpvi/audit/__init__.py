"""Audits of a model's own private step.

`replay` measures its sensitivity and `replay_check` that of its checks, `lower_bound` bounds its
epsilon from below by canaries, and `randomness` tests its noise and its samples.
"""

from tfp_dpvi.audit.bounds import Errors, Guesses
from tfp_dpvi.audit.checked import replay_check
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
    "replay_check",
]
