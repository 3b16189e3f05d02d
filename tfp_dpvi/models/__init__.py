"""Keras models whose `fit` is differentially private."""

from typing import Any

from tfp_dpvi import _deprecation
from tfp_dpvi.models.base import DPModel
from tfp_dpvi.models.dpvi import DPVI
from tfp_dpvi.models.saving import load_model

__all__ = ["DPVI", "DPModel", "load_model"]


def __getattr__(name: str) -> Any:
    return _deprecation.renamed(__name__, name)
