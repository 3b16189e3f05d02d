"""Reads a DpEvent into counts of priced releases, the form that every accountant starts from."""

import collections
import dataclasses
import math

import dp_accounting

from tfp_dpvi.privacy.errors import UnsupportedPairError

#: Subsampled releases with less noise than this over the sensitivity are priced as without noise:
#: their epsilon is in the hundreds of thousands, beyond what the numerics resolve.
SMALLEST_SAMPLED_NOISE = 1e-3


@dataclasses.dataclass
class ReleaseCounts:
    """Releases by kind; composition does not depend on their order.

    Attributes:
      gaussian: {noise multiplier: count} of releases on all records.
      poisson: {(probability, noise multiplier): count}.
      fixed_size: {(num_records, batch_size, noise multiplier): count}.
      non_private: True if some release carried no noise.
    """

    gaussian: dict[float, int]
    poisson: dict[tuple[float, float], int]
    fixed_size: dict[tuple[int, int, float], int]
    non_private: bool = False

    @property
    def gaussian_multiplier(self) -> float:
        """The multiplier of the one Gaussian that equals all full-batch releases; inf if none."""
        precision = math.fsum(n / z**2 for z, n in sorted(self.gaussian.items()))
        return 1.0 / math.sqrt(precision) if precision > 0.0 else math.inf

    @property
    def empty(self) -> bool:
        """True if nothing was released."""
        return not (self.gaussian or self.poisson or self.fixed_size or self.non_private)


def effective_multiplier(event: dp_accounting.DpEvent) -> float:
    """Returns z = (sum z_i^-2)^-1/2 of Gaussians released together on one sample (section 5.5).

    Raises:
      UnsupportedPairError: if the event holds anything but Gaussians.
    """
    if isinstance(event, dp_accounting.GaussianDpEvent):
        return float(event.noise_multiplier)
    if isinstance(event, dp_accounting.SelfComposedDpEvent):
        return effective_multiplier(event.event) / math.sqrt(event.count)
    if isinstance(event, dp_accounting.ComposedDpEvent):
        parts = [effective_multiplier(e) for e in event.events]
        if min(parts) == 0.0:
            return 0.0
        return 1.0 / math.sqrt(math.fsum(z**-2 for z in parts))
    raise UnsupportedPairError(f"{type(event).__name__} cannot be priced on a sample; only Gaussian releases can.")


def count_releases(event: dp_accounting.DpEvent) -> ReleaseCounts:
    """Flattens an event.

    Raises:
      UnsupportedPairError: for event types that are not priced here.
    """
    counts = ReleaseCounts({}, collections.Counter(), collections.Counter())
    gaussian: collections.Counter[float] = collections.Counter()
    _add(event, 1, counts, gaussian)
    counts.gaussian = dict(gaussian)
    return counts


def _add(event: dp_accounting.DpEvent, times: int, counts: ReleaseCounts, gaussian: dict[float, int]) -> None:
    if times == 0 or isinstance(event, dp_accounting.NoOpDpEvent):
        return
    if isinstance(event, dp_accounting.NonPrivateDpEvent):
        counts.non_private = True
    elif isinstance(event, dp_accounting.SelfComposedDpEvent):
        _add(event.event, times * event.count, counts, gaussian)
    elif isinstance(event, dp_accounting.ComposedDpEvent):
        for part in event.events:
            _add(part, times, counts, gaussian)
    elif isinstance(event, dp_accounting.GaussianDpEvent):
        if event.noise_multiplier == 0:
            counts.non_private = True
        else:
            gaussian[float(event.noise_multiplier)] += times
    elif isinstance(event, dp_accounting.PoissonSampledDpEvent):
        z, q = effective_multiplier(event.event), float(event.sampling_probability)
        if q == 0.0:
            return
        if z == 0.0 or (z < SMALLEST_SAMPLED_NOISE and q < 1.0):
            counts.non_private = True
        elif q == 1.0:
            gaussian[z] += times
        else:
            counts.poisson[q, z] += times
    elif isinstance(event, dp_accounting.SampledWithoutReplacementDpEvent):
        z = effective_multiplier(event.event)
        if z == 0.0:
            counts.non_private = True
        elif event.sample_size == event.source_dataset_size:
            gaussian[z] += times
        else:
            key = (int(event.source_dataset_size), int(event.sample_size), z)
            counts.fixed_size[key] += times
    else:
        raise UnsupportedPairError(f"{type(event).__name__} is not priced here.")
