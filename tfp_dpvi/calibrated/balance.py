"""Public inputs that are weighted like private ones: entropy balancing by released products.

A column of the private inputs may have another mean, frequency or spread than its public one.
Weights of the public inputs, as even as possible, make their expected products of coordinates those
that were released (entropy balancing: Hainmueller 2012; raking of surveys: Deville and Saerndal
1992). So weighted, they say what else such inputs have, as that one column is another's square, and
how hard the clip cuts each direction: much harder one that few records carry.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy import optimize, special

# Where weights exist, a few are enough.
_MOST_STEPS = 50
# Of the largest released value.
_LEAST_NOISE = 1e-3


class InputWeights(NamedTuple):
    """Weights with which public inputs resemble the private ones.

    Attributes:
      values: They sum to 1, shape [n].
      noise: Of the released matrices by which they were found, the noise's standard deviation on
        the diagonal, over the diagonal's mean.
    """

    values: np.ndarray
    noise: float


def balanced_weights(
    products: np.ndarray,
    released: np.ndarray,
    noise: np.ndarray,
    before: np.ndarray,
    least_effective: float,
) -> np.ndarray | None:
    """Returns weights of public inputs whose mean products are those released.

    Args:
      products: Squares and products of coordinates, of the first k inputs, shape [k, m].
      released: The released means of those of private inputs, shape [m].
      noise: The noise's standard deviations on `released`, shape [m].
      before: The weights that are changed as little as possible, shape [n]: they sum to 1, and are
        0 beyond the first k.
      least_effective: The least effective number of weighted inputs: fewer say little.

    Returns:
      Weights of shape [n], which sum to 1; None if no even weights make them alike.
    """
    level = float(np.max(released))
    if not (level > 0.0 and np.isfinite(products).all()):
        return None
    # Inputs without a weight get none.
    is_used = before > 0.0
    features, wanted = products[is_used[: len(products)]] / level, released / level
    base = np.log(before[is_used])
    variance = np.maximum(noise / level, _LEAST_NOISE) ** 2

    def loss(dual: np.ndarray) -> tuple[float, np.ndarray]:
        logs = base + features @ dual
        fit = special.logsumexp(logs) - dual @ wanted + variance @ dual**2 / 2.0
        return fit, special.softmax(logs) @ features - wanted + variance * dual

    def curvature(dual: np.ndarray) -> np.ndarray:
        weights = special.softmax(base + features @ dual)
        away = features - weights @ features
        matrix: np.ndarray = away.T @ (weights[:, None] * away) + np.diag(variance)
        return matrix

    # The dual of the most even weights; noise leaves them more even still.
    dual = optimize.minimize(
        loss,
        np.zeros(len(wanted)),
        jac=True,
        hess=curvature,
        method="trust-exact",
        options={"maxiter": _MOST_STEPS},
    ).x
    weights = np.zeros(len(before))
    weights[is_used] = special.softmax(base + features @ dual)
    return weights if np.sum(weights**2) * least_effective <= 1.0 else None


def rows_of_weights(weights: np.ndarray, num: int) -> np.ndarray:
    """Returns numbers of inputs, each as often as its weight says but for rounding, shape [num].

    Args:
      weights: Shape [n]; they sum to 1.
      num: How many are taken, by systematic sampling.
    """
    order = np.argsort(weights, kind="stable")
    places = (np.arange(num) + 0.5) / num
    rows: np.ndarray = order[np.searchsorted(np.cumsum(weights[order])[:-1], places)]
    return rows
