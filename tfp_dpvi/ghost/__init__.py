"""Per-record gradients of Keras layers, clipped and summed.

No gradient of a single record lies in memory where a rule knows the layer.
"""

from tfp_dpvi.ghost.rules import RULES, UnsupportedLayerError, Whole

__all__ = ["RULES", "UnsupportedLayerError", "Whole"]
