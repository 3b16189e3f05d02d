"""Sums released together, each in its own units: an oracle of what a joint release costs."""

import dataclasses
import math
from collections.abc import Sequence

from tfp_dpvi.privacy import Sensitivity


def joint_noise_multiplier(noise_multipliers: Sequence[float]) -> float:
    """The multiplier of the one Gaussian release that several on one sample equal: z = (sum z_i^-2)^-1/2."""
    return 1.0 / math.sqrt(math.fsum(z**-2 for z in noise_multipliers))


@dataclasses.dataclass(frozen=True)
class GaussianPart:
    """One of several sums released on the same sample; noise and sensitivity in the sum's own units, not over a clip."""

    name: str
    standard_deviation: float
    sensitivity: Sensitivity


@dataclasses.dataclass(frozen=True)
class JointGaussian:
    """Sums released together on one sample, each with its own noise, as one mechanism.

    Give `noise_multiplier` and `sensitivity` to a `PrivacyPlan`; the unit is arbitrary (A = 1).
    """

    parts: tuple[GaussianPart, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", tuple(self.parts))

    @property
    def noise_multiplier(self) -> float:
        """Standard deviation over the joint add-or-remove sensitivity."""
        return joint_noise_multiplier(
            [p.standard_deviation / p.sensitivity.add_or_remove for p in self.parts]
        )

    @property
    def sensitivity(self) -> Sensitivity:
        """A = 1 and the joint replacement distance in the same unit."""
        replace = joint_noise_multiplier(
            [p.standard_deviation / p.sensitivity.replace for p in self.parts]
        )
        return Sensitivity(1.0, self.noise_multiplier / replace)
