"""Batch-wise regularisers: callables `regularizer(codes: Codes) -> scalar`.

Any such callable may be used.
"""

from __future__ import annotations

import dataclasses

from tfp_dpvi._tf import tf, tfp
from tfp_dpvi.divergences.aggregate import kl_from_prior
from tfp_dpvi.divergences.codes import Codes
from tfp_dpvi.divergences.discrepancy import SCALES, check_scales, dimensionwise_mmd, mmd


@dataclasses.dataclass(frozen=True)
class MMD:
    """Squared maximum mean discrepancy of the group's draws from the prior's; see `mmd`.

    Attributes:
      kernel: a kernel of `tfp.math.psd_kernels` on vectors in the codes' dtype; None for `mmd`'s
        default.
    """

    kernel: tfp.math.psd_kernels.PositiveSemidefiniteKernel | None = None

    def __call__(self, codes: Codes) -> tf.Tensor:
        """Returns the discrepancy of the group's draws."""
        return mmd(codes.samples, codes.prior_samples, self.kernel, x_weights=codes.weights)


@dataclasses.dataclass(frozen=True)
class DimensionwiseMMD:
    """Sum over dimensions of squared maximum mean discrepancies from the prior; see `dimensionwise_mmd`.

    Attributes:
      scales: squared length scales of the inverse multiquadratic kernels.
    """

    scales: tuple[float, ...] = SCALES

    def __post_init__(self) -> None:
        object.__setattr__(self, "scales", check_scales(self.scales))

    def __call__(self, codes: Codes) -> tf.Tensor:
        """Returns the discrepancy of the group's draws."""
        return dimensionwise_mmd(
            codes.samples, codes.prior_samples, self.scales, x_weights=codes.weights
        )


@dataclasses.dataclass(frozen=True)
class KLFromPrior:
    """KL(prior || the group's aggregated posterior); see `kl_from_prior`."""

    def __call__(self, codes: Codes) -> tf.Tensor:
        """Returns the divergence at the draws from the prior."""
        return kl_from_prior(codes.prior, codes.prior_samples, codes.posterior, codes.weights)
