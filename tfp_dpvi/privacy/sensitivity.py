"""The sensitivity of released sums to one record (contract C3), and joint releases on one sample."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

from tfp_dpvi import _validate as check

#: A JSON object, as `json.loads` returns it.
Json: TypeAlias = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Sensitivity:
    """L2 sensitivity of a released sum, in units of `l2_norm_clip`.

    Attributes:
      add_or_remove: A, sensitivity to adding or removing one record.
      replace: D, sensitivity to replacing one record by another; never above 2 A.
    """

    add_or_remove: float = 1.0
    replace: float = 2.0

    def __post_init__(self) -> None:
        a = check.positive("add_or_remove", self.add_or_remove)
        d = check.positive("replace", self.replace)
        if d > 2.0 * a * (1.0 + 1e-9):
            raise ValueError(
                f"replace={self.replace!r} must be at most twice add_or_remove={a}; pass a larger add_or_remove."
            )
        object.__setattr__(self, "add_or_remove", a)
        object.__setattr__(self, "replace", d)


#: The sensitivity of a plain clip of each record's contribution: A = 1, D = 2.
PER_RECORD_CLIP = Sensitivity()


def joint_noise_multiplier(noise_multipliers: Sequence[float]) -> float:
    """Returns the multiplier of the single Gaussian release equivalent to several on one sample, z = (sum z_i^-2)^-1/2.

    Formal guarantee: releasing sums f_i + N(0, (z_i A_i)^2 I) of sensitivities A_i on the same sample is a linear image of
    releasing (f_i / (z_i A_i))_i + N(0, I), whose sensitivity is at most (sum z_i^-2)^1/2.
    """
    values = [check.non_negative("noise_multipliers", z) for z in noise_multipliers]
    if not values:
        raise ValueError("noise_multipliers is empty; pass one per part released.")
    return 1.0 / math.sqrt(math.fsum(z**-2 for z in values)) if min(values) > 0.0 else 0.0
