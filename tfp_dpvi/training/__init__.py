"""The private step and the fit around it. `private_step` shows the algorithm; `Mechanism` is what it costs."""

from tfp_dpvi.training.mechanism import Mechanism
from tfp_dpvi.training.step import StepState, initial_state, make_steps, private_step

__all__ = ["Mechanism", "StepState", "initial_state", "make_steps", "private_step"]
