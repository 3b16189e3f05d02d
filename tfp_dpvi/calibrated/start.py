"""The start of scoring steps, and the order of coordinates in W."""

from __future__ import annotations

import numpy as np

from tfp_dpvi.calibrated.pairing import Pairing

SCALE = 0
"""The rank of a number with a constraint, such as a scale."""
_INTERCEPT = 1
_SLOPE = 2
_REFINEMENTS = 3
# Standard deviations that the mean of draws may be off.
_CHANCE = 3.0


def ranks_of(pairing: Pairing) -> np.ndarray:
    """Returns the ranks of coordinates in W, shape [d]: scales, intercepts, slopes.

    So a shift or a scale of columns is a triangular change.

    Args:
      pairing: The model's coordinates.
    """
    coordinates = pairing.coordinates
    ranks = []
    for part in pairing.parameters_read:
        size = coordinates.sizes[part]
        of_number = _INTERCEPT if coordinates.is_real(part) else SCALE
        ranks.append(np.full(size, _SLOPE if size > 1 else of_number))
    return np.concatenate(ranks)


def middle_of(draws: np.ndarray, pairing: Pairing) -> np.ndarray:
    """Returns the mean of a prior, shape [D]: of its draws, without their error if it is normal.

    That error is small beside the prior, but for a wide prior it is far from the records.

    Args:
      draws: Draws from the prior, shape [n, D].
      pairing: The model's coordinates.
    """
    middle: np.ndarray = draws.mean(axis=0)
    for _ in range(_REFINEMENTS):
        _, slopes = pairing.coordinates.log_density(middle[None])
        moved, first = middle.copy(), 0
        for part in pairing.parameters_read:
            size = pairing.coordinates.sizes[part]
            own = pairing.index[first : first + size]
            step = np.cov(draws[:, own].T).reshape(size, size) @ slopes[0, own]
            # A longer one is no error of draws: the prior is not normal.
            if slopes[0, own] @ step < _CHANCE**2 * size / len(draws):
                moved[own] += step
            first += size
        middle = moved
    return middle
