"""Makes `saved_models/breast_cancer`: a private Bayesian logistic regression on patients' records, exported.

Wisconsin breast cancer records (Wolberg, Street and Mangasarian 1995, UCI Machine Learning Repository, CC BY 4.0; bundled
with scikit-learn). The model takes raw measurements: means and standard deviations of the columns are released privately
too, from the same budget of epsilon 1 at delta 1e-5.

    python saved_models/make_breast_cancer.py [FOLDER]
"""

from __future__ import annotations

import pathlib
import sys
from typing import Any

import numpy as np

import tfp_dpvi as dpvi  # isort: skip  (first, so that TensorFlow loads quietly)
import tensorflow as tf
import tensorflow_probability as tfp
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split

tfd = tfp.distributions

# Public bounds, from the ranges in the data set's documentation: ten measurements' means, standard errors, and worst values.
UPPER = [
    28.2, 39.3, 189.0, 2510.0, 0.17, 0.35, 0.43, 0.21, 0.31, 0.1,
    2.9, 4.9, 22.0, 543.0, 0.04, 0.14, 0.4, 0.06, 0.08, 0.03,
    36.1, 49.6, 252.0, 4260.0, 0.23, 1.06, 1.26, 0.3, 0.67, 0.21,
]  # fmt: skip


def split() -> tuple[Any, ...]:
    """80 % of the patients to learn from, the others to test on, as they were measured."""
    data = load_breast_cancer()
    return tuple(
        train_test_split(
            data.data.astype("float32"),
            data.target,
            test_size=0.2,
            random_state=0,
            stratify=data.target,
        )
    )


def learn(x: np.ndarray, y: np.ndarray) -> dpvi.DPVI:
    """Statistics of the columns first, then the posterior, from one ledger."""
    standardize = dpvi.preprocessing.PrivateStandardize(lower=0.0, upper=UPPER)
    standardize.adapt(x, epsilon=0.3, delta=1e-6)

    prior = tfd.JointDistributionNamed(
        {"w": tfd.Sample(tfd.Normal(0.0, 1.0), sample_shape=x.shape[1]), "b": tfd.Normal(0.0, 1.0)}
    )

    def likelihood(params: Any, x: Any) -> Any:
        return tfd.Bernoulli(logits=tf.linalg.matvec(standardize(x), params["w"]) + params["b"])

    model = dpvi.DPVI(prior, likelihood, name="breast_cancer", clipping="flat")
    optimizer = dpvi.optimizers.DPKerasAdamOptimizer(l2_norm_clip=1.0, learning_rate=0.05)
    model.compile(optimizer, epsilon=1.0, delta=1e-5, ledger=standardize.ledger)
    model.fit(x, y, batch_size=128, epochs=20, verbose=0)
    return model


def main() -> None:
    """Learns, exports and prints the report."""
    folder = (
        pathlib.Path(sys.argv[1])
        if len(sys.argv) > 1
        else pathlib.Path(__file__).parent / "breast_cancer"
    )
    x, x_test, y, y_test = split()
    model = learn(x, y)
    model.export(folder, overwrite=True)
    accuracy = np.mean((model.predict(x_test) > 0.5) == y_test)
    print(f"{folder}: accuracy on {len(x_test)} test patients {accuracy:.3f}")
    print(model.privacy_report())


if __name__ == "__main__":
    main()
