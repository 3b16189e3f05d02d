"""Do private intervals on real data hold the non-private means? Adult, 14 ordinal codes, logistic regression, epsilon 1.

    python benchmarks/calibration_adult.py [--fits 20] [--output adult.json]

The posterior of the *whole* data without privacy is its Laplace approximation (48,842 records). Columns are standardised with the
records' own means and standard deviations, which is not private. The pilot's inputs are made up: independent standard normals.
"""

import argparse
import json
import pathlib
import sys

import numpy as np
import tensorflow as tf
import tensorflow_probability as tfp
from calibration import DELTA, NonPrivate

import tfp_dpvi as dpvi
from tfp_dpvi.models.coordinates import Coordinates

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "examples"))
from data import load_adult

tfd = tfp.distributions


def eta(params, x):
    return params["b"] + tf.linalg.matvec(x, params["w"])


def likelihood(params, x):
    return tfd.Bernoulli(logits=eta(params, x), dtype=tf.float32)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fits", type=int, default=20)
    parser.add_argument("--epsilon", type=float, default=1.0)
    parser.add_argument("--output", type=pathlib.Path)
    arguments = parser.parse_args()
    data = load_adult("ordinal")
    x, y = np.asarray(data.x, "float32"), np.asarray(data.y, "float32")
    x = (x - x.mean(axis=0)) / x.std(axis=0)
    width = x.shape[1]
    prior = tfd.JointDistributionNamed({"b": tfd.Normal(0.0, 1.0), "w": tfd.Sample(tfd.Normal(0.0, 1.0), width)})
    coordinates = Coordinates(prior)
    mean, sd = NonPrivate(prior, likelihood, coordinates).fit(np.zeros(width + 1), x, y)
    settings = {"num_records": len(x), "epsilon": arguments.epsilon, "delta": DELTA}
    rows = {}
    for clipping in ("paired", "flat"):
        inside, accuracy, widths, checks = [], [], [], []
        for _ in range(arguments.fits):
            model = dpvi.DPVI(prior, likelihood, clipping=clipping)
            pilot = dpvi.pilot(model, np.random.default_rng(0).normal(size=(1000, width)), **settings)
            model.compile(pilot.optimizer(len(x)), epsilon=arguments.epsilon, delta=DELTA, jit_compile=True)
            model.fit(x, y, **pilot.fit_settings, verbose=0)
            drawn = tf.concat(coordinates.flatten_batch(model.posterior_sample(2000, seed=1)), axis=-1).numpy()
            low, high = np.quantile(drawn, [0.05, 0.95], axis=0)
            inside.append((low <= mean) & (mean <= high))
            widths.append((high - low) / (2 * 1.645 * sd))
            accuracy.append(np.mean((model.predict(x) > 0.5) == y))
            if clipping == "paired":
                checks.append([float(value) for value in vars(model._calibrated().checks).values()])
        rows[clipping] = {
            "inside": float(np.mean(inside)),
            "by_coefficient": np.mean(inside, axis=0).tolist(),
            "width": float(np.mean(widths)),
            "accuracy": float(np.mean(accuracy)),
            "checks": np.median(checks, axis=0).tolist() if checks else [],
        }
        print(clipping, json.dumps(rows[clipping]), flush=True)
    logits = mean[0] + x @ mean[1:]
    rows["non_private_accuracy"] = float(np.mean((logits > 0) == y))
    if arguments.output:
        arguments.output.write_text(json.dumps(rows, indent=1))
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
