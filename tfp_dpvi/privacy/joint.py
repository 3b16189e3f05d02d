"""Several Gaussian releases on the same sample, priced as one (design section 5.5)."""

import dataclasses
import math
from collections.abc import Sequence

from tfp_dpvi.privacy import _validation as check
from tfp_dpvi.privacy.sensitivity import Sensitivity


def joint_noise_multiplier(noise_multipliers: Sequence[float]) -> float:
    """Returns the multiplier of the one Gaussian release that equals several on one sample.

    Formal guarantee: releasing sums f_i + N(0, (z_i A_i)^2 I) of sensitivities A_i on the same sample
    is a linear image of releasing (f_i / (z_i A_i))_i + N(0, I), whose sensitivity is at most
    (sum z_i^-2)^1/2. It therefore costs what one release with z = (sum z_i^-2)^-1/2 costs.

    Args:
      noise_multipliers: z_i, each part's standard deviation over its own sensitivity.
    """
    values = [check.non_negative("noise_multipliers", z) for z in noise_multipliers]
    if not values:
        raise ValueError("noise_multipliers is empty; pass one per part released.")
    if min(values) == 0.0:
        return 0.0
    return 1.0 / math.sqrt(math.fsum(z**-2 for z in values))


def clipped_value_sensitivity(low: float, high: float) -> Sensitivity:
    """Returns the sensitivity of a sum of per-record values clipped to [low, high].

    The presence of a record moves the sum by max(|low|, |high|), not by high - low; a replacement by
    high - low.

    Raises:
      ValueError: if the interval is empty or a point.
    """
    low, high = check.real("low", low, "pass a number"), check.real("high", high, "pass a number")
    if not (low < high and math.isfinite(high - low)):
        raise ValueError(f"low={low} must be below high={high}, both finite; pass a real interval.")
    return Sensitivity(max(abs(low), abs(high)), high - low)


@dataclasses.dataclass(frozen=True)
class GaussianPart:
    """One of several sums released on the same sample.

    Attributes:
      name: what it is, for reports.
      standard_deviation: of the noise on every coordinate, in the sum's own units.
      sensitivity: A and D of the sum in the same units (not over a clip).
    """

    name: str
    standard_deviation: float
    sensitivity: Sensitivity

    def __post_init__(self) -> None:
        check.positive("standard_deviation", self.standard_deviation)


@dataclasses.dataclass(frozen=True)
class JointGaussian:
    """Sums released together on one sample, each with its own noise, as one mechanism.

    Give `noise_multiplier` and `sensitivity` to a `PrivacyPlan`; the unit is arbitrary (A = 1).
    """

    parts: tuple[GaussianPart, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", tuple(self.parts))
        if not self.parts:
            raise ValueError("parts is empty; pass at least one GaussianPart.")

    @property
    def noise_multiplier(self) -> float:
        """Standard deviation over the joint add-or-remove sensitivity."""
        return joint_noise_multiplier([p.standard_deviation / p.sensitivity.add_or_remove for p in self.parts])

    @property
    def sensitivity(self) -> Sensitivity:
        """A = 1 and the joint replacement distance in the same unit."""
        replace = joint_noise_multiplier([p.standard_deviation / p.sensitivity.replace for p in self.parts])
        return Sensitivity(1.0, self.noise_multiplier / replace)
