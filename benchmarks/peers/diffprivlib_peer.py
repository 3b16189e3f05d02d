"""Objective perturbation by diffprivlib on data that `benchmarks/field.py` wrote, in an environment of its own.

    python benchmarks/peers/diffprivlib_peer.py FILE.npz EPSILON DATA_NORM

FILE has `x`, shape [n, d], without a column of ones, and `y`, shape [n]. Prints the intercept and the coefficients as JSON.
Requirements: diffprivlib.txt.
"""

import json
import sys
import warnings

import numpy as np
from diffprivlib.models import LogisticRegression


def main() -> None:
    path, epsilon, norm = sys.argv[1:]
    warnings.filterwarnings("ignore")
    data = np.load(path)
    # C is the prior's variance.
    model = LogisticRegression(epsilon=float(epsilon), data_norm=float(norm), C=1.0)
    model.fit(data["x"].astype(float), data["y"].astype(int))
    print(json.dumps([*model.intercept_, *model.coef_[0]]))


if __name__ == "__main__":
    main()
