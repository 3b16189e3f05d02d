"""Samplers of the records of a step.

Each sampler states the scheme that the accounting uses (contract 4).
"""

from typing import Any

from tfp_dpvi import _deprecation
from tfp_dpvi.sampling.base import Sampler
from tfp_dpvi.sampling.choose import BatchNeeds, register_sampler
from tfp_dpvi.sampling.declared import DeclaredBatchSampler
from tfp_dpvi.sampling.fixed_size import FixedSizeSampler
from tfp_dpvi.sampling.full_batch import FullBatchSampler
from tfp_dpvi.sampling.poisson import PoissonSampler

__all__ = [
    "BatchNeeds",
    "DeclaredBatchSampler",
    "FixedSizeSampler",
    "FullBatchSampler",
    "PoissonSampler",
    "Sampler",
    "register_sampler",
]


def __getattr__(name: str) -> Any:
    return _deprecation.renamed(__name__, name)
