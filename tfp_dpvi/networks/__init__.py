"""Keras networks with private training: `DPKerasModel` and the variational autoencoder `DPVAE`."""

from tfp_dpvi.networks.dpvae import DPVAE
from tfp_dpvi.networks.keras_model import DPKerasModel

__all__ = ["DPVAE", "DPKerasModel"]
