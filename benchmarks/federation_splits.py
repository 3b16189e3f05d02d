"""Few and many hospitals, split evenly, by size and by label, beside the fit that pools their records: Adult.

    python benchmarks/federation_splits.py [--seeds 5] [--hospitals 2 5 10 20] [--quick] [--out FOLDER]

Logistic regression on Adult's 14 codes at epsilon 1, delta 1e-5, with the defaults of `Study` and `Synchronous` and steps by
information; Adam's steps beside them. Without privacy too: where that is away from the pooled fit, no noise is to blame. Each cell
is a line of `federation_splits.jsonl`; what is there is not run again. `federation_splits.json` has means, machine, versions
and commit, `federation_splits.png` draws them.

QUICK (`--quick`) runs 2 and 5 hospitals with one seed in about ten minutes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import pathlib
import sys
import time

import numpy as np
from federated_studies import adult, logistic, pooled_fit, scores
from harness import code_hash, command, commit, machine, versions

import tfp_dpvi as dpvi
from tfp_dpvi.federated import Study, Synchronous, simulate

CLIP, DELTA = 2.0, 1e-5
DIVISIONS = ("even", "by size", "by label")
TARGETS = {"accuracy": 0.003, "log_likelihood": 0.005}
OUT = pathlib.Path(__file__).resolve().parents[1] / "docs" / "figures" / "federated"


def divided(y, division, num, rng):
    """Returns the hospital of each record; of each label 19 of 20 records are in one part."""
    first = max(1, num // 2)
    if division == "even":
        return rng.permutation(np.arange(len(y)) % num)
    if division == "by size":
        share = np.where(np.arange(num) < first, 9.0, 1.0)
        return rng.choice(num, size=len(y), p=share / share.sum())
    there = rng.random(len(y)) < np.where(y == 1, 0.95, 0.05)
    one, other = rng.integers(first, size=len(y)), rng.integers(first, num, size=len(y))
    return np.where(there, one, other)


def optimizer(steps, epsilon):
    private = {"l2_norm_clip": CLIP}
    if epsilon is None:
        private = {"l2_norm_clip": math.inf, "noise_multiplier": 0.0}
    if steps == "Adam":
        return dpvi.optimizers.DPKerasAdamOptimizer(learning_rate=0.05, **private)
    return dpvi.optimizers.InformationOptimizer(
        **private, **({"information": 0.25} if epsilon is None else {})
    )


def run(cell):
    """Returns a cell with its results."""
    data = adult(cell["seed"])
    prior, likelihood = logistic(data.x.shape[1])
    start = time.process_time()
    if cell["steps"] == "pooled":
        found = scores(pooled_fit(prior, likelihood, data.x, data.y, cell["epsilon"]), data)
        return {**cell, **found, "cpu_seconds": time.process_time() - start}
    rng = np.random.default_rng(1000 + cell["seed"])
    where = divided(data.y, cell["division"], cell["hospitals"], rng)
    study = Study(prior, likelihood, optimizer(cell["steps"], cell["epsilon"]))
    hospitals = [(data.x[where == h], data.y[where == h]) for h in range(cell["hospitals"])]
    schedule = Synchronous()
    history = simulate(
        study, hospitals, epsilon=cell["epsilon"], delta=DELTA, schedule=schedule, verbose=0
    )
    return {
        **cell,
        **scores(history.posterior, data),
        "by_round": [scores(update.posterior, data, 50) for update in history.rounds[::4]],
        "guard": min(update.guard for update in history.rounds),
        "caveats": list(history.caveats),
        "cpu_seconds": time.process_time() - start,
    }


def cells(seeds, hospitals, adam):
    for seed in range(seeds):
        yield {"steps": "pooled", "epsilon": 1.0, "seed": seed}
        for num, division in itertools.product(hospitals, DIVISIONS):
            common = {"division": division, "hospitals": num, "seed": seed}
            yield {"steps": "information", "epsilon": 1.0, **common}
            if seed == 0:
                yield {"steps": "information", "epsilon": None, **common}
            if seed < adam:
                yield {"steps": "Adam", "epsilon": 1.0, **common}


def key(row):
    return tuple(row.get(name) for name in ("steps", "epsilon", "division", "hospitals", "seed"))


def summary(rows):
    """Returns the mean differences to the pooled fit, and whether they are within the targets."""
    pooled = {row["seed"]: row for row in rows if row["steps"] == "pooled"}
    groups = {}
    for row in rows:
        if row["steps"] != "pooled" and row["seed"] in pooled:
            groups.setdefault(key(row)[:-1], []).append(row)
    found = []
    for (steps, epsilon, division, num), group in sorted(groups.items(), key=str):
        gaps = {
            name: float(np.mean([row[name] - pooled[row["seed"]][name] for row in group]))
            for name in TARGETS
        }
        found.append(
            {
                "steps": steps, "epsilon": epsilon, "division": division, "hospitals": num,
                "seeds": len(group), **gaps,
                "within": all(gaps[name] >= -most for name, most in TARGETS.items()),
                "with_caveat": sum(bool(row["caveats"]) for row in group),
            }
        )  # fmt: skip
    return found


def draw(found, path):
    from matplotlib import figure

    page = figure.Figure(figsize=(11, 4), layout="constrained")
    axes = page.subplots(1, 2)
    for axis, name in zip(axes, TARGETS, strict=True):
        for steps, marker in (("information", "o"), ("Adam", "x")):
            for place, division in enumerate(DIVISIONS):
                rows = [
                    row for row in found
                    if (row["steps"], row["division"], row["epsilon"]) == (steps, division, 1.0)
                ]  # fmt: skip
                rows.sort(key=lambda row: row["hospitals"])
                x, y = ([row[part] for row in rows] for part in ("hospitals", name))
                line = "-" if steps == "information" else ":"
                axis.plot(
                    x, y, line, marker=marker, color=f"C{place}", label=f"{steps}, {division}"
                )
        axis.axhspan(-TARGETS[name], TARGETS[name], color="0.9")
        axis.set(title=f"{name.replace('_', ' ')} over the pooled fit's", xlabel="hospitals")
        axis.set_yscale("symlog", linthresh=0.01)
    axes[0].legend(fontsize="x-small")
    page.savefig(path, dpi=110)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--adam", type=int, default=2, help="seeds with Adam's steps")
    parser.add_argument("--hospitals", type=int, nargs="+", default=[2, 5, 10, 20])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=pathlib.Path, default=OUT)
    options = parser.parse_args(arguments)
    if options.quick:
        options.seeds, options.hospitals = 1, [2, 5]
    options.out.mkdir(parents=True, exist_ok=True)
    lines = options.out / "federation_splits.jsonl"
    rows = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    done = {key(row) for row in rows}
    for cell in cells(options.seeds, options.hospitals, options.adam):
        if key(cell) in done:
            continue
        rows.append(run(cell))
        print({name: value for name, value in rows[-1].items() if name != "by_round"}, flush=True)
        with open(lines, "a", encoding="utf-8") as file:
            file.write(json.dumps(rows[-1]) + "\n")
    found = summary(rows)
    for row in found:
        print(row)
    kept = {
        "command": command("federation_splits.py", sys.argv[1:]),
        "machine": machine(),
        "versions": versions(tensorflow="tensorflow", tfp="tensorflow-probability"),
        "commit": commit(),
        "code": code_hash(),
        "targets": TARGETS,
        "means": found,
    }
    (options.out / "federation_splits.json").write_text(json.dumps(kept, indent=1) + "\n")
    draw(found, options.out / "federation_splits.png")


if __name__ == "__main__":
    main()
