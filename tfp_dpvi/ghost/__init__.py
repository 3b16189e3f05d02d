"""Per-record gradients of Keras layers, clipped and summed without one gradient per record in memory."""

from tfp_dpvi.ghost.layers import LayerGradients, Pass
from tfp_dpvi.ghost.rules import RULES, UnsupportedLayerError, Whole

__all__ = ["RULES", "LayerGradients", "Pass", "UnsupportedLayerError", "Whole"]
