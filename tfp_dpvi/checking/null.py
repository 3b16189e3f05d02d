"""A bound on how much released sums vary if the model is right, whatever the private inputs are.

Let v be a record's contribution, of mean zero under the model at every parameter, and s its score.
Fitted to the same records, the sum T of v at the estimate is, to first order, that of the part of v
without a correlation with s, and of `C r`: C is the covariance of v and s, and r what remains of
the sum of scores. If K is the gain of the fit, `r = (I - K) s - K n + ...` with the noise n and the
distance of the prior. So T varies by at most `max(1, ratio)` times what the sum of v varies at
fixed parameters: 1 where the fit follows the records (non-privately, T varies less: it is projected
on what scores do not explain), more where noise or prior moved the estimate. The bound needs
neither C nor the distribution of the private x.
"""

from __future__ import annotations

import dataclasses

import numpy as np

_LEAST = 1e-12


@dataclasses.dataclass(frozen=True, eq=False)
class Estimate:
    """The precision of an estimate, as the fit released it.

    ```python
    >>> public = Estimate(np.array([[0.0, 1.0, 0.0]]), np.array([0.01]), np.array([1e6]))
    >>> variance_factor(public, same_records=True)
    1.0
    >>> variance_factor(public, same_records=False, records_ratio=0.5)
    1.5

    ```

    Attributes:
      shares: Shares of noise, data and prior in each parameter's variance, shape [D, 3].
      variance: The posterior's variances, shape [D].
      prior_variance: The prior's, shape [D].
    """

    shares: np.ndarray
    variance: np.ndarray
    prior_variance: np.ndarray


def variance_factor(
    estimate: Estimate | None, *, same_records: bool, records_ratio: float = 1.0
) -> float:
    """Returns by how many times more than at fixed parameters the checks' sums may vary.

    Args:
      estimate: The fit's precision, or None if it is not known.
      same_records: Whether the model was fitted to the records that are checked.
      records_ratio: The number of checked records over that of the fit.

    Returns:
      A factor of at least 1.
    """
    if estimate is None:
        return 1.0 if same_records else 1.0 + records_ratio
    prior = estimate.shares[:, 2]
    kept = prior * estimate.variance / np.maximum(estimate.prior_variance, _LEAST)
    kept = np.clip(kept, 0.0, 1.0)
    # 1 for a parameter that the records alone determine, 0 for one that the prior does.
    gain = np.square(1.0 - np.sqrt(kept))
    data = np.maximum(estimate.shares[:, 1], _LEAST)
    if same_records:
        return float(max(1.0, np.max(kept + gain * (estimate.shares[:, 0] + prior) / data)))
    return float(1.0 + records_ratio * np.max(gain / data))
