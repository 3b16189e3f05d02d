"""DP-Keras optimizers: Keras optimizers that apply only privatised gradients.

They have a clip and a noise multiplier besides the arguments of the Keras class.
"""

from tfp_dpvi.optimizers.adapter import as_dp_optimizer
from tfp_dpvi.optimizers.dp_keras import (
    DPKerasAdagradOptimizer,
    DPKerasAdamOptimizer,
    DPKerasSGDOptimizer,
    DPOptimizer,
    PrivatizedGradients,
    UnprivatizedGradientError,
    make_dp_optimizer_class,
    privatize,
)
from tfp_dpvi.optimizers.reach import largest_move
from tfp_dpvi.optimizers.scoring import InformationOptimizer, ScoringOptimizer
from tfp_dpvi.optimizers.termwise import (
    TermwiseDPKerasAdagradOptimizer,
    TermwiseDPKerasAdamOptimizer,
    TermwiseDPKerasSGDOptimizer,
    TermwiseOptimizer,
    make_termwise_optimizer_class,
)

__all__ = [
    "DPKerasAdagradOptimizer",
    "DPKerasAdamOptimizer",
    "DPKerasSGDOptimizer",
    "DPOptimizer",
    "InformationOptimizer",
    "PrivatizedGradients",
    "ScoringOptimizer",
    "TermwiseDPKerasAdagradOptimizer",
    "TermwiseDPKerasAdamOptimizer",
    "TermwiseDPKerasSGDOptimizer",
    "TermwiseOptimizer",
    "UnprivatizedGradientError",
    "as_dp_optimizer",
    "largest_move",
    "make_dp_optimizer_class",
    "make_termwise_optimizer_class",
    "privatize",
]
