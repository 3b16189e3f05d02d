"""Private intervals and predictions on real data, compared with the non-private posterior, at epsilon 1.

    python benchmarks/calibration_data.py [--data adult abalone abalone_rows] [--fits 20] [--output docs/figures/calibration/data.json]

Logistic regression on Adult's 14 ordinal codes and on Abalone's 8 (at least 10 rings), against the Laplace approximation of the
posterior without privacy. Adult is fitted completely (48,842 records), Abalone on another 80 % of its records in each fit, with the
accuracy on the rest. Columns are standardised with the records' own means and standard deviations, which is not private. The pilot's
inputs are synthetic: independent standard normals. For `abalone_rows` they are 300 records, assumed to be public and not fitted.
"""

import argparse
import json
import pathlib
import platform
import subprocess
import sys

import numpy as np
import tensorflow as tf
import tensorflow_probability as tfp
from calibration import DELTA
from intervals import NonPrivate, interval
from replicates import by_pilot

from tfp_dpvi.bayes.coordinates import Coordinates
from tfp_dpvi.bayes.model import BayesianModel
from tfp_dpvi.rehearsal.replicates import Replicates

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "examples"))
from data import load_abalone, load_adult

tfd = tfp.distributions
# What loads them, the share of the records that is fitted, and how many are public.
DATA = {
    "adult": (load_adult, 1.0, 0),
    "abalone": (load_abalone, 0.8, 0),
    "abalone_rows": (load_abalone, 0.8, 300),
}


def model_of(width):
    """Returns a prior and a likelihood: an intercept, and coefficients of standardised columns."""
    prior = tfd.JointDistributionNamed(
        {"b": tfd.Normal(0.0, 1.0), "w": tfd.Sample(tfd.Normal(0.0, 1.0), width)}
    )

    def likelihood(params, x):
        return tfd.Bernoulli(
            logits=params["b"] + tf.linalg.matvec(x, params["w"]), dtype=tf.float32
        )

    return prior, likelihood


def accuracy(draws, x, y, coordinates):
    """Of the mean probability over draws, which are flattened: shape [S, d]."""
    params = coordinates.constrain(
        tf.split(tf.constant(draws, tf.float32), coordinates.sizes, axis=-1)
    )
    logits = params["b"].numpy()[:, None] + params["w"].numpy() @ x.T
    return float(np.mean((np.mean(1.0 / (1.0 + np.exp(-logits)), axis=0) > 0.5) == y))


def run(name, num_fits, epsilon):
    """Returns the figures of one data set."""
    load, share, num_public = DATA[name]
    data = load("ordinal")
    x, y = np.asarray(data.x, "float32"), np.asarray(data.y, "float32")
    x = (x - x.mean(axis=0)) / x.std(axis=0)
    order, width = np.random.default_rng(77).permutation(len(x)), x.shape[1]
    public, (x, y) = x[order[:num_public]], (x[order[num_public:]], y[order[num_public:]])
    size = round(share * len(x))
    prior, likelihood = model_of(width)
    coordinates = Coordinates(prior)
    exact = NonPrivate(BayesianModel(prior, likelihood), coordinates)
    if not num_public:
        public = np.random.default_rng(0).normal(size=(1000, width)).astype("float32")
    records = (x[:size], y[:size], public)
    fits = {
        clipping: Replicates(
            by_pilot(clipping, *model_of(width), *records, epsilon=epsilon, delta=DELTA)
        )
        for clipping in ("paired", "flat")
    }
    rows, without, seconds = {clipping: [] for clipping in fits}, [], []
    for number in range(num_fits):
        generator = np.random.default_rng(number)
        order = generator.permutation(len(x))
        own, test = (order, order) if share == 1.0 else (order[:size], order[size:])
        mean, sd = exact.fit(np.zeros(width + 1), x[own], y[own])
        gaussian = (
            mean + generator.normal(size=(500, width + 1)) * sd
        )  # Means of its predictions alone are read.
        without.append(accuracy(gaussian, x[test], y[test], coordinates))
        for clipping, one in fits.items():
            fit = one.fit(x[own], y[own], number)
            draws = fit.draws
            seconds.append(fit.seconds)
            low, high = interval(draws)
            row = {
                "inside": (low <= mean) & (mean <= high),
                "width": np.mean((high - low) / (2 * 1.645 * sd)),
                "accuracy": accuracy(draws[:500], x[test], y[test], coordinates),
            }
            if clipping == "paired":
                row["warned"] = bool(fit.warnings)
            rows[clipping].append(row)
    summary = {
        "num_records": size,
        "num_fits": num_fits,
        "epsilon": epsilon,
        "seconds": float(np.median(seconds)),
    }
    summary["non_private_accuracy"] = float(np.mean(without))
    for clipping, found in rows.items():
        inside = np.array([row["inside"] for row in found], float)
        summary[clipping] = {
            "inside": float(np.mean(inside)),
            "by_coefficient": np.mean(inside, axis=0).tolist(),
            "width": float(np.mean([row["width"] for row in found])),
            "accuracy": float(np.mean([row["accuracy"] for row in found])),
            "accuracy_sd": float(np.std([row["accuracy"] for row in found])),
            "clip": fits[clipping].method.settings["clip"],
        }
        if clipping == "paired":
            summary[clipping]["warned"] = float(np.mean([row["warned"] for row in found]))
    return summary


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", nargs="*", default=list(DATA), choices=list(DATA))
    parser.add_argument("--fits", type=int, default=20)
    parser.add_argument("--epsilon", type=float, default=1.0)
    parser.add_argument(
        "--output", type=pathlib.Path, default=pathlib.Path("docs/figures/calibration/data.json")
    )
    arguments = parser.parse_args()
    found = json.loads(arguments.output.read_text()) if arguments.output.exists() else {}
    for name in arguments.data:
        versions = {
            "python": platform.python_version(),
            "tensorflow": tf.__version__,
            "revision": subprocess.check_output(
                ["git", "describe", "--always", "--dirty"], text=True
            ).strip(),
        }
        found[name] = {**run(name, arguments.fits, arguments.epsilon), **versions}
        arguments.output.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
