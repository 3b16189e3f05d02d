"""Survey weights at a hospital: what a study says of them, and how records hold them."""

from __future__ import annotations

import dataclasses

import numpy as np

from tfp_dpvi.data import Records
from tfp_dpvi.data.records import by_column, check_weights, refuse_weights

MOST_HELD = 4.0
"""The largest weight that records of a hospital hold, whatever the unit in which they were given.

Designs have mean weights of about a quarter of the largest one. So a usual record has a weight of
about 1 in the rounds, whose clip is of scores without weights.
"""

WEIGHTS_CAVEAT = (
    "records have survey weights, which are private as the records are and at most {most:g}, a "
    "public term: estimates are those of the weighted population."
)


def given_weights(
    most: float | None, own: np.ndarray | None, weights: np.ndarray | None
) -> np.ndarray | None:
    """Returns a hospital's weights as they were given, or None in a study without weights.

    Args:
      most: The study's largest weight; None in a study without weights.
      own: Weights that are a column of the hospital's table; None if they are none.
      weights: The argument.

    Raises:
      ValueError: The study has no weights, or has them and there are none; or they are given twice.
    """
    if own is not None:
        if weights is not None:
            raise ValueError("weights are a column of x in this study: leave the argument out.")
        return own
    if most is None and weights is not None:
        raise ValueError(
            "weights: the study has none; make it with max_weight, the public largest weight."
        )
    if most is not None and weights is None:
        raise ValueError(
            f"weights are missing: the study has max_weight={most:g}; pass the weight of each row."
        )
    return weights


def with_weights(
    records: Records, weights: np.ndarray, most: float | None, dtype: np.dtype
) -> Records:
    """Returns records with their weights in a unit in which the largest one is `MOST_HELD`.

    Args:
      records: The records, row by row.
      weights: Their weights, shape [n].
      most: The public largest weight.
      dtype: The float type of the model.

    Raises:
      TypeError, ValueError: A weight is none, negative or above the largest one. The error shows
        none of them.
    """
    values = check_weights(by_column("weights", weights), records.num, "weights").astype(dtype)
    refuse_weights(values, most, "weights")
    kind = values.dtype.type
    held = np.minimum(kind(MOST_HELD) * (values / kind(most or 1.0)), kind(MOST_HELD))
    return dataclasses.replace(records, sample_weight=held, max_weight=MOST_HELD)
