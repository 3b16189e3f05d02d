"""Persons of one row each: what `unit_ids` cost where nobody has several rows.

    python benchmarks/short_persons.py [--num 20000] [--repeats 3]

Linear and logistic regressions with five coefficients, epsilon 1: fits of rows, of persons with `max_rows_per_unit=1`, and of the same
persons with 20, of which 19 are places that nobody fills. Fits take turns in one process, each by a model of its own, so that tracing is
part of the time. Writes `docs/figures/short_persons.json`: processor seconds, and how far draws are from those of rows.
"""

from __future__ import annotations

import argparse
import logging
import pathlib
import statistics
import time

import numpy as np
from harness import write_study

import tfp_dpvi as dpvi
from tfp_dpvi._tf import tf, tfd

WEIGHTS = np.array([0.5, -1.0, 0.3, 0.0, 0.2])
FAMILIES = ("linear", "logistic")
NUM_PUBLIC = 1000


def likelihood(family):
    def of_rows(params, x):
        score = tf.linalg.matvec(x, params["w"])
        if family == "linear":
            return tfd.Normal(score, 1.0)
        return tfd.Bernoulli(logits=score, dtype=tf.float32)

    return of_rows


def simulate(family, num):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(num, len(WEIGHTS)))
    score = x @ WEIGHTS
    noisy = score + rng.normal(size=num)
    is_one = rng.random(num) < 1.0 / (1.0 + np.exp(-score))
    y = noisy if family == "linear" else is_one
    return x.astype("float32"), y.astype("float32"), rng.permutation(num)


def fit(family, data, most):
    """Returns processor seconds and draws; rows if `most` is None."""
    x, y, ids = data
    settings = {"public_inputs": simulate(family, NUM_PUBLIC)[0], "verbose": 0}
    if most is not None:
        persons = {"unit_ids": ids, "public_unit_ids": np.arange(NUM_PUBLIC)}
        settings |= {"max_rows_per_unit": most, **persons}
    prior = tfd.JointDistributionNamed({"w": tfd.Sample(tfd.Normal(0.0, 1.0), len(WEIGHTS))})
    model = dpvi.DPVI(prior, likelihood(family), seed=1)
    model.compile(epsilon=1.0, delta=1e-6)
    before = time.process_time()
    model.fit(x, y, **settings)
    seconds = time.process_time() - before
    return seconds, model.posterior_sample(2000, seed=0)["w"].numpy()


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num", type=int, default=20_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--output", type=pathlib.Path, default=pathlib.Path("docs/figures/short_persons.json")
    )
    options = parser.parse_args(arguments)
    logging.getLogger("tfp_dpvi").setLevel(logging.ERROR)
    kinds = {"rows": None, "persons, m = 1": 1, "persons, m = 20": 20}
    rows, fits = [], []
    for family in FAMILIES:
        data = simulate(family, options.num)
        seconds, draws = {kind: [] for kind in kinds}, {}
        for _ in range(options.repeats):
            for kind, most in kinds.items():
                taken, draws[kind] = fit(family, data, most)
                seconds[kind].append(taken)
                fits.append({"family": family, "kind": kind, "seconds": taken})
        own = draws["rows"]
        for kind in kinds:
            rows.append({
                "family": family,
                "kind": kind,
                "seconds": statistics.median(seconds[kind]),
                "over rows": statistics.median(seconds[kind]) / statistics.median(seconds["rows"]),
                "largest difference of a draw": float(np.abs(draws[kind] - own).max()),
                "width over rows": float(np.median(draws[kind].std(axis=0) / own.std(axis=0))),
            })  # fmt: skip
            print(rows[-1], flush=True)
    settings = {"num": options.num, "repeats": options.repeats}
    write_study("short_persons.py", options.output, arguments, settings, rows, fits)


if __name__ == "__main__":
    main()
