"""Which records a step sees. The object that samples emits the event that is accounted for (contract C4)."""

from tfp_dpvi.sampling.base import Sampler
from tfp_dpvi.sampling.fixed_size import FixedSizeSampler
from tfp_dpvi.sampling.full_batch import FullBatchSampler
from tfp_dpvi.sampling.given import GivenBatchSampler
from tfp_dpvi.sampling.host import HostDraws
from tfp_dpvi.sampling.poisson import PoissonSampler, poisson_gaps

__all__ = [
    "FixedSizeSampler",
    "FullBatchSampler",
    "GivenBatchSampler",
    "HostDraws",
    "PoissonSampler",
    "Sampler",
    "poisson_gaps",
]
