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

    ```python
    >>> from tfp_dpvi._tf import tfd
    >>> unit, x = tfd.MultivariateNormalDiag([0.0]), tf.constant([[0.0], [1.0]])
    >>> codes = Codes(x, tf.ones([2]), tfd.MultivariateNormalDiag(x, tf.ones([2, 1])), unit, x)
    >>> float(MMD()(codes))
    0.0

    ```

    Attributes:
      kernel: A kernel of `tfp.math.psd_kernels` on vectors in the codes' dtype; None for `mmd`'s
        default.
    """

    kernel: tfp.math.psd_kernels.PositiveSemidefiniteKernel | None = None

    def __call__(self, codes: Codes) -> tf.Tensor:
        """Returns the discrepancy of the group's draws."""
        return mmd(codes.samples, codes.prior_samples, self.kernel, x_weights=codes.weights)


@dataclasses.dataclass(frozen=True)
class DimensionwiseMMD:
    """Sum over dimensions of squared maximum mean discrepancies from the prior.

    See `dimensionwise_mmd`.

    ```python
    >>> from tfp_dpvi._tf import tfd
    >>> unit, x = tfd.MultivariateNormalDiag([0.0]), tf.constant([[0.0], [1.0]])
    >>> codes = Codes(x, tf.ones([2]), tfd.MultivariateNormalDiag(x, tf.ones([2, 1])), unit, x)
    >>> float(DimensionwiseMMD(scales=(1.0,))(codes))
    0.0

    ```

    Attributes:
      scales: Squared length scales of the inverse multiquadratic kernels.
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
    """KL(prior || the group's aggregated posterior); see `kl_from_prior`.

    ```python
    >>> from tfp_dpvi._tf import tfd
    >>> unit, x = tfd.MultivariateNormalDiag([0.0]), tf.constant([[0.0], [1.0]])
    >>> codes = Codes(x, tf.ones([2]), tfd.MultivariateNormalDiag(x, tf.ones([2, 1])), unit, x)
    >>> print(f"{KLFromPrior()(codes):.2f}")
    -0.03

    ```
    """

    def __call__(self, codes: Codes) -> tf.Tensor:
        """Returns the divergence at the draws from the prior."""
        return kl_from_prior(codes.prior, codes.prior_samples, codes.posterior, codes.weights)
