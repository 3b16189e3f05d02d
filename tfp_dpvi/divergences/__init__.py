"""Divergences between the codes of a group of records and a prior, and structured priors.

A value depends on every record of its group: releasing its gradient requires clipping and
accounting by group.
"""

from tfp_dpvi.divergences.aggregate import kl_from_prior
from tfp_dpvi.divergences.codes import Codes
from tfp_dpvi.divergences.discrepancy import SCALES, dimensionwise_mmd, mmd
from tfp_dpvi.divergences.priors import VampPrior, clustered_prior, sparse_prior
from tfp_dpvi.divergences.regularizers import MMD, DimensionwiseMMD, KLFromPrior

__all__ = [
    "MMD",
    "SCALES",
    "Codes",
    "DimensionwiseMMD",
    "KLFromPrior",
    "VampPrior",
    "clustered_prior",
    "dimensionwise_mmd",
    "kl_from_prior",
    "mmd",
    "sparse_prior",
]
