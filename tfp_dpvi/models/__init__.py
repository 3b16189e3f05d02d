"""Keras models whose `fit` is differentially private."""

from tfp_dpvi import _deprecation
from tfp_dpvi.models.base import DPModel
from tfp_dpvi.models.dpvi import DPVI
from tfp_dpvi.models.saving import load_model

__all__ = ["DPVI", "DPModel", "load_model"]

__getattr__ = _deprecation.old_names(__name__)
