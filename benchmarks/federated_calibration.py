"""Coverage and width of the calibrated posterior of several hospitals, beside that of their rounds alone.

    python benchmarks/federated_calibration.py [--quick] [--sets 24] [--out docs/figures/federated_calibration]

Simulated logistic regressions with parameters drawn from the prior, divided among hospitals: evenly, by size (half of them have
nine times the records of the others), or by label (records sorted by outcome with one in twenty moved, then cut into equal parts).
Every hospital has an epsilon of its own, at delta 1e-5. A set's line of `sets.jsonl` has coverage of 90 % intervals over
coordinates; their mean width over that of the posterior without privacy, and over the bound of independent noise, which is the
best release at the true parameters with a known curvature, the window's share of each hospital's budget, and noise of each
hospital's own; whether the posterior warned; and the same of the rounds' posterior. A second run goes on where the first one
stopped. Writes `federated_calibration.json` and a picture. With `--quick` two sets of two cells.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import math
import pathlib
import sys
import time
import warnings
from typing import NamedTuple

import numpy as np
from harness import command, commit, machine, versions
from intervals import QUANTILE, Ideal, NonPrivate, ideal_sds, interval

import tfp_dpvi as dpvi
from tfp_dpvi._tf import tf, tfd
from tfp_dpvi.bayes.coordinates import Coordinates
from tfp_dpvi.federated import Hospital, Study, Synchronous, simulate
from tfp_dpvi.federated.refiner import Refiner
from tfp_dpvi.federated.window import SHARE
from tfp_dpvi.privacy import FullBatch, PrivacyPlan

DELTA = 1e-5
WIDTH = 4
CLIP = 2.0
SCHEDULE = Synchronous(rounds=10, damping=0.3)
# Of records that are in the other label's hospitals.
MOVED = 0.05
DRAWS = 4000


class Cell(NamedTuple):
    hospitals: int
    division: str
    num: int
    epsilons: tuple[float, ...] = (1.0,)
    weights: str = "sum"

    @property
    def name(self):
        epsilons = "-".join(f"{epsilon:g}" for epsilon in self.epsilons)
        return (
            f"{self.hospitals} {self.division}, N {self.num:,}, epsilon {epsilons}, {self.weights}"
        )

    def epsilon(self, number):
        return self.epsilons[number % len(self.epsilons)]


UNLIKE = (0.3, 1.0, 1.0, 1.0, 3.0)
CELLS = (
    *(
        Cell(hospitals, division, num)
        for num in (5_000, 20_000)
        for hospitals in (3, 5, 10)
        for division in ("even", "size", "label")
    ),
    *(
        Cell(5, division, 5_000, UNLIKE, weights)
        for division in ("even", "label")
        for weights in ("sum", "precision")
    ),
)
QUICK = (Cell(3, "even", 2_000), Cell(3, "label", 2_000))


def prior():
    return tfd.JointDistributionNamed(
        {"b": tfd.Normal(0.0, 1.0), "w": tfd.Sample(tfd.Normal(0.0, 1.0), WIDTH)}
    )


def likelihood(params, x):
    return tfd.Bernoulli(logits=params["b"] + tf.linalg.matvec(x, params["w"]))


def records(num, seed):
    rng = np.random.default_rng([2026, seed])
    truth = rng.normal(size=WIDTH + 1)
    x = rng.normal(size=(num, WIDTH))
    y = rng.random(num) < 1.0 / (1.0 + np.exp(-truth[0] - x @ truth[1:]))
    return x.astype("float32"), y.astype("int32"), truth


def divided(y, cell, seed):
    """Returns the rows of each hospital: as many in every set, so that one compiled step serves all."""
    rng = np.random.default_rng([7, seed])
    num, hospitals = len(y), cell.hospitals
    shares = np.full(hospitals, 1.0)
    if cell.division == "size":
        shares[: hospitals // 2] = 9.0
    order = rng.permutation(num)
    if cell.division == "label":
        shown = np.where(rng.random(num) < MOVED, 1 - y, y)
        order = order[np.argsort(shown[order], kind="stable")]
    ends = np.round(num * np.cumsum(shares) / shares.sum()).astype(int)
    return np.split(order, ends[:-1])


@functools.cache
def study():
    rng = np.random.default_rng(1)
    example = (rng.normal(size=(4, WIDTH)).astype("float32"), np.array([0, 1, 1, 0], np.int32))
    optimizer = dpvi.optimizers.InformationOptimizer(l2_norm_clip=CLIP)
    return Study(prior(), likelihood, optimizer, example=example, calibrated=True)


@functools.cache
def tools():
    made = study()
    coordinates = Coordinates(made.prior)
    model = made.bayesian_model
    return coordinates, NonPrivate(model, coordinates), Ideal(model, coordinates)


@functools.lru_cache(maxsize=1)
def refiner(cell):
    return Refiner(study())


def bound(truth, x, cell):
    """Returns the standard deviations under the bound of independent noise."""
    coordinates, non_private, ideal = tools()
    few = tf.constant(x[:1000])
    scores, weights = ideal._scores(
        tf.constant(truth, coordinates.dtype), few, tf.constant([0, 1], tf.int32)
    )
    noise = [
        PrivacyPlan.calibrate(
            epsilon=cell.epsilon(number), delta=DELTA, sampling=FullBatch(), num_releases=1
        ).noise_multiplier
        for number in range(cell.hospitals)
    ]
    return ideal_sds(
        scores.numpy().astype("float64"),
        weights.numpy().astype("float64"),
        non_private.prior_precision(truth),
        np.arange(len(truth)),
        whitened_by=np.eye(len(truth)),
        num_records=len(x),
        noise_multiplier=math.hypot(*noise) / math.sqrt(SHARE),
    )


def run(cell, seed):
    x, y, truth = records(cell.num, seed)
    settings = {"delta": DELTA, "rounds": SCHEDULE.rounds, "refiner": refiner(cell)}
    hospitals = [
        Hospital(
            study(),
            x[rows],
            y[rows],
            name=f"hospital {number}",
            epsilon=cell.epsilon(number),
            seed=1000 * seed + number,
            **settings,
        )
        for number, rows in enumerate(divided(y, cell, seed))
    ]
    start = time.perf_counter()
    history = simulate(study(), hospitals, schedule=SCHEDULE, verbose=0)
    played = time.perf_counter()
    posterior = study().calibrated_posterior(history, weights=cell.weights)
    combined = time.perf_counter()
    coordinates, non_private, _ = tools()
    mode, sds = non_private.fit(truth, x, y)
    draws = posterior.distribution.sample(DRAWS, seed=seed)
    flat = np.concatenate([part.numpy() for part in coordinates.flatten_batch(draws)], axis=1)
    low, high = interval(flat)
    half = (high - low) / (2.0 * QUANTILE)
    rounds = history.posterior
    limit = bound(truth, x, cell)
    return {
        "coverage": float(np.mean((low <= truth) & (truth <= high))),
        "width": float(np.mean(half / sds)),
        "over_bound": float(np.mean(half / limit)),
        "not_private": float(np.mean(np.abs(mode - truth) <= QUANTILE * sds)),
        "warned": len(posterior.warnings) > 0,
        "warnings": posterior.warnings,
        "p_unlike": posterior.heterogeneity.p_value,
        "rounds_coverage": float(np.mean(np.abs(rounds.mean - truth) <= QUANTILE * rounds.stddev)),
        "rounds_width": float(np.mean(rounds.stddev / sds)),
        "missing": cell.hospitals - len(history.sums),
        "seconds": round(played - start, 2),
        "combine_seconds": round(combined - played, 2),
    }


def summary(rows):
    """Returns means over sets, and standard errors of those of coverage."""

    def mean(name):
        return round(float(np.mean([row[name] for row in rows])), 4)

    def error(name):
        values = [row[name] for row in rows]
        return round(float(np.std(values, ddof=1) / math.sqrt(len(values))), 4)

    inside = [row["coverage"] for row in rows if not row["warned"]]
    return {
        "sets": len(rows),
        "coverage": mean("coverage"),
        "coverage_error": error("coverage"),
        "coverage_without_warning": round(float(np.mean(inside)), 4) if inside else None,
        "not_private": mean("not_private"),
        "width": mean("width"),
        "over_bound": mean("over_bound"),
        "warned": mean("warned"),
        "found_unlike": round(float(np.mean([row["p_unlike"] < 0.001 for row in rows])), 4),
        "rounds_coverage": mean("rounds_coverage"),
        "rounds_coverage_error": error("rounds_coverage"),
        "rounds_width": mean("rounds_width"),
        "seconds": mean("seconds"),
        "combine_seconds": mean("combine_seconds"),
    }


def draw(cells, path):
    from matplotlib import figure

    page = figure.Figure(figsize=(10, 0.3 * len(cells) + 1.5), layout="constrained")
    left, right = page.subplots(1, 2, sharey=True)
    places = np.arange(len(cells))[::-1]
    for name, color in (("rounds_coverage", "C1"), ("coverage", "C0")):
        values = [cell[name] for cell in cells]
        errors = [cell[f"{name}_error"] for cell in cells]
        label = "rounds alone" if name.startswith("rounds") else "calibrated"
        left.errorbar(values, places, xerr=errors, fmt="o", color=color, label=label)
    left.axvline(0.9, color="gray", linewidth=0.8)
    left.set(xlabel="coverage of 90 % intervals", xlim=(0.0, 1.0))
    left.set_yticks(places, [cell["cell"] for cell in cells], fontsize=7)
    left.legend(fontsize=7)
    right.plot([cell["over_bound"] for cell in cells], places, "o", label="over the bound")
    right.plot([cell["width"] for cell in cells], places, "s", label="over not private")
    right.axvline(1.0, color="gray", linewidth=0.8)
    right.set(xlabel="width", xlim=(0.0, None))
    right.legend(fontsize=7)
    page.savefig(path, dpi=110)


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="two sets of two small cells")
    parser.add_argument("--sets", type=int, default=24)
    parser.add_argument(
        "--out",
        default=str(
            pathlib.Path(__file__).resolve().parents[1] / "docs/figures/federated_calibration"
        ),
    )
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    logging.getLogger("tfp_dpvi").setLevel(logging.ERROR)
    folder = pathlib.Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    lines = folder / "sets.jsonl"
    known = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    done = {(row["cell"], row["set"]): row for row in known}
    cells = QUICK if options.quick else CELLS
    sets = 2 if options.quick else options.sets
    own = commit()
    # Cells in turn, eight sets at a time, so that a run that is stopped has some of each.
    for first in range(0, sets, 8):
        for cell in cells:
            for seed in range(first, min(first + 8, sets)):
                if (cell.name, seed) in done:
                    continue
                row = {"cell": cell.name, "set": seed, **run(cell, seed), "commit": own}
                done[cell.name, seed] = row
                with lines.open("a") as file:
                    file.write(json.dumps(row) + "\n")
            print(cell.name, json.dumps(summary_of(cell, done)), flush=True)
    table = [
        {"cell": cell.name, **summary_of(cell, done)} for cell in cells if summary_of(cell, done)
    ]
    result = {
        "command": command("federated_calibration.py", arguments),
        "machine": machine(),
        "versions": versions(tensorflow="tensorflow", tfp="tensorflow-probability"),
        "commits": sorted({row["commit"] for row in done.values()}),
        "cells": table,
    }
    (folder / "federated_calibration.json").write_text(json.dumps(result, indent=1) + "\n")
    draw(table, folder / "federated_calibration.png")


def summary_of(cell, done):
    rows = [row for (name, _), row in done.items() if name == cell.name]
    return summary(rows) if len(rows) > 1 else {}


if __name__ == "__main__":
    main(sys.argv[1:])
