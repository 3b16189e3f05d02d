"""Keras models whose `fit` is differentially private."""

from tfp_dpvi.models.base import DPModel
from tfp_dpvi.models.dpvae import DPVAE
from tfp_dpvi.models.dpvi import DPVI
from tfp_dpvi.models.keras_model import DPKerasModel
from tfp_dpvi.models.predictive import PosteriorPredictive
from tfp_dpvi.models.saving import load_model
from tfp_dpvi.models.simulation import Pilot, pilot
from tfp_dpvi.models.synthesizer import Synthesizer

__all__ = [
    "DPVAE",
    "DPVI",
    "DPKerasModel",
    "DPModel",
    "Pilot",
    "PosteriorPredictive",
    "Synthesizer",
    "load_model",
    "pilot",
]
