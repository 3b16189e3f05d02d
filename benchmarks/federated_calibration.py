"""Coverage and width of the calibrated posterior of several hospitals, beside that of their rounds alone.

    python benchmarks/federated_calibration.py [--quick] [--sets 24] [--out docs/figures/federated_calibration]

Simulated logistic regressions with parameters drawn from the prior, divided among hospitals: evenly, by size (half of them have
nine times the records of the others), or by label (records sorted by outcome with one in twenty moved, then cut into equal parts).
Every hospital has an epsilon of its own, at delta 1e-5. A set's line of `sets.jsonl` has coverage of 90 % intervals over
coordinates; their mean width over that of the posterior without privacy, and over the bound of independent noise, which is the
best release at the true parameters with a known curvature, the window's share of each hospital's budget, and noise of each
hospital's own; whether the posterior warned; and the same of the rounds' posterior. A second run goes on where the first one
stopped. Writes `federated_calibration.json` and a picture. With `--quick` two sets of three cells.

In cells with effects each hospital has an intercept of its own, drawn anew for each set with the standard deviation that the cell
names, and the study is told so (`local=["b"]`). Coverage is that of the shared slopes; the width is over that of the posterior
without privacy, with an intercept for each hospital; beside it are whether the effects' standard deviation, the mean intercept and
the hospitals' intercepts lie inside their 90 % intervals, and what the same sums say without effects.
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
    effects: float | None = None

    @property
    def name(self):
        if self.effects is not None:
            return f"{self.hospitals} hospitals, N {self.num:,}, effects {self.effects:g}"
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
EFFECTS = tuple(
    Cell(hospitals, "even", num, effects=sd)
    for num, sd in ((5_000, 0.5), (20_000, 0.5), (5_000, 0.0))
    for hospitals in (3, 5, 10)
)
QUICK = (Cell(3, "even", 2_000), Cell(3, "label", 2_000), Cell(3, "even", 2_000, effects=0.5))


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


def with_effects(cell, seed):
    """Returns records whose intercept differs between hospitals, the rows of each, the truth and effects."""
    x, _, truth = records(cell.num, seed)
    parts = divided(np.zeros(cell.num), cell, seed)
    rng = np.random.default_rng([45, seed])
    effects = cell.effects * rng.normal(size=cell.hospitals)
    logits = truth[0] + x @ truth[1:]
    for rows, effect in zip(parts, effects, strict=True):
        logits[rows] += effect
    y = rng.random(cell.num) < 1.0 / (1.0 + np.exp(-logits))
    return x, y.astype("int32"), parts, truth, effects


@functools.cache
def study(local=()):
    rng = np.random.default_rng(1)
    example = (rng.normal(size=(4, WIDTH)).astype("float32"), np.array([0, 1, 1, 0], np.int32))
    optimizer = dpvi.optimizers.InformationOptimizer(l2_norm_clip=CLIP)
    return Study(
        prior(), likelihood, optimizer, example=example, calibrated=True, local=local or None
    )


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


def make_hospitals(cell, seed, x, y, parts):
    settings = {"delta": DELTA, "rounds": SCHEDULE.rounds, "refiner": refiner(cell)}
    return [
        Hospital(
            study(),
            x[rows],
            y[rows],
            name=f"hospital {number}",
            epsilon=cell.epsilon(number),
            seed=1000 * seed + number,
            **settings,
        )
        for number, rows in enumerate(parts)
    ]


def without_privacy(x, y, parts):
    """Returns slopes and their deviations in a fit with an intercept for each hospital, in NumPy."""
    dummies = np.zeros((len(x), len(parts)))
    for number, rows in enumerate(parts):
        dummies[rows, number] = 1.0
    design = np.concatenate([x.astype("float64"), dummies], axis=1)
    beta = np.zeros(design.shape[1])
    for _ in range(30):
        p = 1.0 / (1.0 + np.exp(-design @ beta))
        information = (design * (p * (1.0 - p))[:, None]).T @ design + 1e-2 * np.eye(len(beta))
        beta = beta + np.linalg.solve(information, design.T @ (y - p) - 1e-2 * beta)
    sds = np.sqrt(np.diag(np.linalg.inv(information)))
    return beta[: x.shape[1]], sds[: x.shape[1]]


@functools.cache
def not_private(cell, seed):
    """Returns the coverage of the shared slopes in that fit."""
    x, y, parts, truth, _ = with_effects(cell, seed)
    slopes, sds = without_privacy(x, y, parts)
    return float(np.mean(np.abs(slopes - truth[1:]) <= QUANTILE * sds))


def inside(draws, truth):
    low, high = interval(np.asarray(draws, np.float64).reshape(len(draws), -1))
    return (low <= truth) & (truth <= high), (high - low) / (2.0 * QUANTILE)


def run_effects(cell, seed):
    x, y, parts, truth, effects = with_effects(cell, seed)
    start = time.perf_counter()
    history = simulate(
        study(), make_hospitals(cell, seed, x, y, parts), schedule=SCHEDULE, verbose=0
    )
    played = time.perf_counter()
    posterior = study(("b",)).calibrated_posterior(history)
    combined = time.perf_counter()
    draws = posterior.draws(DRAWS, seed=seed)
    slopes, half = inside(draws.parameters["w"], truth[1:])
    own = [
        inside(posterior.at(f"hospital {number}", seed=seed)["b"], truth[0] + effect)[0]
        for number, effect in enumerate(effects)
    ]
    plain = study().calibrated_posterior(history)
    pooled = plain.draws(DRAWS, seed=seed).parameters
    return {
        "coverage": float(np.mean(slopes)),
        "width": float(np.mean(half / without_privacy(x, y, parts)[1])),
        "intercept": float(inside(draws.parameters["b"], truth[0])[0][0]),
        "sd": float(inside(draws.sds["b"], cell.effects)[0][0]),
        "sd_interval": [round(float(end[0]), 3) for end in interval(draws.sds["b"][:, None])],
        "own": float(np.mean(own)),
        "warned": len(posterior.warnings) > 0,
        "warnings": posterior.warnings,
        "p_unlike": posterior.heterogeneity.p_value,
        "pooled_coverage": float(np.mean(inside(pooled["w"], truth[1:])[0])),
        "pooled_intercept": float(inside(pooled["b"], truth[0])[0][0]),
        "pooled_p_unlike": plain.heterogeneity.p_value,
        "missing": cell.hospitals - len(history.sums),
        "seconds": round(played - start, 2),
        "combine_seconds": round(combined - played, 2),
    }


def run(cell, seed):
    if cell.effects is not None:
        return run_effects(cell, seed)
    x, y, truth = records(cell.num, seed)
    hospitals = make_hospitals(cell, seed, x, y, divided(y, cell, seed))
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

    if "own" in rows[0]:
        return {
            "sets": len(rows),
            "coverage": mean("coverage"),
            "coverage_error": error("coverage"),
            "width": mean("width"),
            "sd": mean("sd"),
            "sd_error": error("sd"),
            "sd_median_interval": np.median([row["sd_interval"] for row in rows], 0).tolist(),
            "intercept": mean("intercept"),
            "intercept_error": error("intercept"),
            "own": mean("own"),
            "own_error": error("own"),
            "warned": mean("warned"),
            "found_unlike": float(np.mean([row["p_unlike"] < 0.01 for row in rows])),
            "pooled_coverage": mean("pooled_coverage"),
            "pooled_intercept": mean("pooled_intercept"),
            "pooled_found_unlike": float(np.mean([row["pooled_p_unlike"] < 0.01 for row in rows])),
            "seconds": mean("seconds"),
            "combine_seconds": mean("combine_seconds"),
        }
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
        "found_unlike": round(float(np.mean([row["p_unlike"] < 0.01 for row in rows])), 4),
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
    parser.add_argument("--effects", action="store_true", help="the cells with effects alone")
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
    cells = QUICK if options.quick else (EFFECTS if options.effects else (*CELLS, *EFFECTS))
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
    table, effects = (
        [{"cell": cell.name, **found} for cell in group if (found := summary_of(cell, done))]
        for group in (
            [cell for cell in (*QUICK, *CELLS) if cell.effects is None],
            [cell for cell in (*QUICK, *EFFECTS) if cell.effects is not None],
        )
    )
    result = {
        "command": command("federated_calibration.py", arguments),
        "machine": machine(),
        "versions": versions(tensorflow="tensorflow", tfp="tensorflow-probability"),
        "commits": sorted({row["commit"] for row in done.values()}),
        "cells": table,
        "effects": effects,
    }
    (folder / "federated_calibration.json").write_text(json.dumps(result, indent=1) + "\n")
    draw(table, folder / "federated_calibration.png")


def summary_of(cell, done):
    rows = {seed: row for (name, seed), row in done.items() if name == cell.name}
    found = summary(list(rows.values())) if len(rows) > 1 else {}
    if found and cell.effects is not None:
        found["not_private"] = float(np.mean([not_private(cell, seed) for seed in rows]))
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
