"""Survey weights at three hospitals: coverage of the census coefficients under informative sampling.

    python benchmarks/weighted_hospitals.py [--epsilons 1 3] [--num 10] [--seed 6130] [--out FOLDER]

The populations and weights of 1 to 20 are those of `weights.py`. A sample of 20,000 records is
divided among hospitals of a half, three tenths and a fifth of them, which fit a weighted logistic
regression together, at the given epsilon each; and the same without the weights.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import pathlib

import harness
import numpy as np
from weights import MOST, included, newton, population

from tfp_dpvi.federated import RegressionStudy, simulate

NUM = 20_000
DELTA = 1e-6
NAMES = ("Intercept", "a", "b", "c")
LEVEL = 0.9


def study_of(weights):
    """Returns the study, with or without weights."""
    covariate = {"type": "continuous", "lower": -5, "upper": 5, "typical": [0.0, 1.0]}
    schema = {
        "y": {"type": "binary"},
        "w": {"type": "continuous", "lower": 0, "upper": MOST},
        **dict.fromkeys("abc", covariate),
    }
    return RegressionStudy("y ~ a + b + c", "bernoulli", schema, weights=weights)


def fitted(study, epsilon, seed):
    """Returns a row: coverage with and without privacy, widths and warnings of one sample."""
    x, y, weights = population(10 * NUM, seed)
    census, _ = newton(x, y, np.ones(len(y)))
    chosen = included(weights, NUM, np.random.default_rng([seed, 2]))
    x, y, weights = x[chosen], y[chosen], weights[chosen]
    exact, deviation = newton(x, y, weights)
    x = np.clip(x, -5.0, 5.0)
    parts = np.split(np.arange(len(y)), [len(y) // 2, 4 * len(y) // 5])
    tables = {
        f"hospital{number}": {
            **{name: x[part, place] for place, name in enumerate("abc", 1)},
            "y": y[part].astype(int),
            "w": weights[part],
        }
        for number, part in enumerate(parts)
    }
    history = simulate(study, tables, epsilon=epsilon, delta=DELTA, verbose=0, seed=seed)
    drawn = study.draws(history.calibrated)
    draws = np.stack([drawn[name] for name in NAMES], axis=1)
    low, high = np.quantile(draws, [0.5 - LEVEL / 2.0, 0.5 + LEVEL / 2.0], axis=0)
    return {
        "inside": ((low < census) & (census < high)).tolist(),
        "exact_inside": (np.abs(exact - census) < 1.645 * deviation).tolist(),
        "width": ((high - low) / (2.0 * 1.645 * deviation)).tolist(),
        "warnings": study.warnings(history.calibrated),
    }


def summarised(epsilon, weighted, rows):
    """Returns the figures of one cell."""
    inside = np.array([row["inside"] for row in rows])
    return {
        "epsilon": epsilon,
        "weights": weighted,
        "sets": len(rows),
        "coverage": round(float(inside.mean()), 3),
        "coverage_error": round(float(inside.mean(axis=1).std() / np.sqrt(len(rows))), 3),
        "coverage_without_privacy": round(float(np.mean([row["exact_inside"] for row in rows])), 3),
        "width": round(float(np.median([row["width"] for row in rows])), 2),
        "warned": sum(bool(row["warnings"]) for row in rows),
        "rows": rows,
    }


def table(cells):
    """Returns the cells as a table in Markdown."""
    lines = [
        "| epsilon | weights | sets | coverage | without privacy, weighted | width over it | warned |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for cell in cells:
        lines.append(
            f"| {cell['epsilon']:g} | {'yes' if cell['weights'] else 'no'} | {cell['sets']} | "
            f"{cell['coverage']:.2f} ± {cell['coverage_error']:.2f} | "
            f"{cell['coverage_without_privacy']:.2f} | {cell['width']:.2f} | {cell['warned']} |"
        )
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epsilons", nargs="+", type=float, default=[1.0, 3.0])
    parser.add_argument("--num", type=int, default=10)
    parser.add_argument("--seed", type=int, default=6130)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("docs/figures"))
    options = parser.parse_args()
    logging.getLogger("tfp_dpvi").setLevel(logging.ERROR)
    cells = []
    for epsilon, column in itertools.product(options.epsilons, ("w", None)):
        study = study_of(column)
        seeds = range(options.seed, options.seed + options.num)
        rows = [fitted(study, epsilon, seed) for seed in seeds]
        cells.append(summarised(epsilon, column is not None, rows))
        shown = {name: value for name, value in cells[-1].items() if name != "rows"}
        print(json.dumps(shown), flush=True)
        options.out.mkdir(parents=True, exist_ok=True)
        settings = {"delta": DELTA, "level": LEVEL, "records": NUM, "hospitals": 3}
        harness.write_cells(options.out, "weighted_hospitals", cells, settings, table(cells))


if __name__ == "__main__":
    main()
