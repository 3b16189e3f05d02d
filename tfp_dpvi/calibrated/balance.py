"""Public inputs that are weighted like private ones: entropy balancing by released squares.

A column of the private inputs may have another frequency or spread than its public one. Weights of
the public inputs, as even as possible, make their expected squares those that were released
(entropy balancing: Hainmueller 2012; raking of surveys: Deville and Saerndal 1992). So weighted,
they say how hard the clip cuts each direction: much harder one that few records carry.
"""

from __future__ import annotations

import numpy as np
from scipy import optimize, special

# Where weights exist, a few are enough.
_MOST_STEPS = 50
# The least effective number of weighted inputs over their number: fewer say little.
_LEAST_EFFECTIVE = 0.1
# Of the released squares' mean.
_LEAST_NOISE = 1e-3


def balanced_rows(squares: np.ndarray, released: np.ndarray, noise: float) -> np.ndarray | None:
    """Returns numbers of public inputs, with repetition, whose squares are those released.

    Args:
      squares: Squares of n public inputs along d coordinates, shape [n, d].
      released: The released mean of those of private inputs, shape [d].
      noise: The noise's standard deviation on `released`.

    Returns:
      Integers of shape [n]; None if no even weights make them alike.
    """
    num, level = len(squares), float(np.mean(released))
    if not (level > 0.0 and np.isfinite(squares).all()):
        return None
    features, wanted = squares / level, released / level
    variance = max(noise / level, _LEAST_NOISE) ** 2

    def loss(dual: np.ndarray) -> tuple[float, np.ndarray]:
        mean = special.softmax(features @ dual) @ features
        fit = special.logsumexp(features @ dual) - dual @ wanted
        return fit + variance * (dual @ dual) / 2.0, mean - wanted + variance * dual

    def curvature(dual: np.ndarray) -> np.ndarray:
        weights = special.softmax(features @ dual)
        away = features - weights @ features
        matrix: np.ndarray = away.T @ (weights[:, None] * away) + variance * np.eye(len(dual))
        return matrix

    # The dual of the most even weights; noise leaves them more even still.
    start = np.zeros(len(wanted))
    dual = optimize.minimize(
        loss,
        start,
        jac=True,
        hess=curvature,
        method="trust-exact",
        options={"maxiter": _MOST_STEPS},
    ).x
    weights = special.softmax(features @ dual)
    if np.sum(weights**2) * _LEAST_EFFECTIVE * num > 1.0:
        return None
    # Systematic sampling: inputs of one weight together as often as it says, but for rounding.
    order = np.argsort(weights, kind="stable")
    places = (np.arange(num) + 0.5) / num
    rows: np.ndarray = order[np.searchsorted(np.cumsum(weights[order])[:-1], places)]
    return rows
