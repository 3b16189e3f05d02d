"""The expected score as a function of the parameters, where no straight line is near it.

Noise may hide so much that the posterior is nearly the prior in most directions. Over its width a
score is not linear: outcomes of few values have chances between 0 and 1, so that scores level off.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tfp_dpvi.calibrated.moved import MovedScores

# Relative to the largest one, the least slope of a direction in which scores are not linear.
_LEAST_SLOPE = 1e-3


class ExpectedScore:
    """A map of parameters to points in which scores are linear.

    With m(theta) the mean score of a record at public inputs, if outcomes follow theta, and G its
    slope at the place of the released score, a point is `place + G^-1 m(theta)`: the identity to
    first order there. The slope of the private scores is released, and multiplies it. In directions
    that public inputs hardly show, as of collinear columns, points are the parameters themselves.

    Args:
      scores: The scores at public inputs, at the released score's place.
      place: The parameters there, in whitened coordinates, shape [d].
      whitening: W, shape [d, d].
      unit: The units of the coordinates that the map takes, shape [d].

    Raises:
      ValueError: The slope is not finite, as where an outcome is impossible.
    """

    def __init__(
        self, scores: MovedScores, place: np.ndarray, whitening: np.ndarray, unit: np.ndarray
    ) -> None:
        self._scores = scores
        self._unit = unit
        theta = whitening.T @ place
        size = len(place)
        self._start = theta / unit
        slope = scores.pulled(np.tile(theta, [size, 1]), np.eye(size)) @ whitening.T
        if not np.isfinite(slope).all():
            raise ValueError("scores at public inputs have no finite slope")
        inverse = np.linalg.pinv(slope, rcond=_LEAST_SLOPE)
        back = whitening.T / unit[:, None]
        self._inverse = back @ inverse
        self._kept = back @ (np.eye(size) - inverse @ slope) @ np.linalg.inv(back)

    def __call__(self, read: np.ndarray) -> tuple[np.ndarray, Callable[[np.ndarray], np.ndarray]]:
        """Returns points in which scores are linear, and the map of gradients back from there.

        Args:
          read: Coordinates that the likelihood reads, shape [n, d].
        """
        truths = read * self._unit
        moved = self._start + self._scores.means(truths) @ self._inverse.T
        moved += (read - self._start) @ self._kept.T

        def pull_back(gradient: np.ndarray) -> np.ndarray:
            pulled = self._scores.pulled(truths, gradient @ self._inverse)
            return pulled * self._unit + gradient @ self._kept

        return moved, pull_back
