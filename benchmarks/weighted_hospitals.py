"""Survey weights at three hospitals: coverage of the census coefficients under informative sampling.

    python benchmarks/weighted_hospitals.py [--effects] [--epsilons 1 3] [--num 10] [--seed 6130] [--out FOLDER]

The populations and weights of 1 to 20 are those of `weights.py`. A sample of 20,000 records is
divided among hospitals of a half, three tenths and a fifth of them, which fit a weighted logistic
regression together, at the given epsilon each; and the same without the weights.

With `--effects` there are ten hospitals, of 2,000 records each, whose intercepts differ by a standard
deviation of 0.5; the study has `(1 | hospital)`. Coverage is that of the slopes and of the effects'
standard deviation, and of the hospitals' own intercepts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import pathlib

import harness
import numpy as np
from weights import MOST, TRUTH, included, newton, population

from tfp_dpvi.federated import RegressionStudy, simulate

NUM = 20_000
DELTA = 1e-6
NAMES = ("Intercept", "a", "b", "c")
LEVEL = 0.9
NUM_HOSPITALS = 10
EFFECTS_SD = 0.5
MORE = {"sd": "sd of effects inside", "own": "own intercepts inside"}


def study_of(weights, effects=""):
    """Returns the study, with or without weights and effects."""
    covariate = {"type": "continuous", "lower": -5, "upper": 5, "typical": [0.0, 1.0]}
    schema = {
        "y": {"type": "binary"},
        "w": {"type": "continuous", "lower": 0, "upper": MOST},
        **dict.fromkeys("abc", covariate),
    }
    return RegressionStudy(f"y ~ a + b + c{effects}", "bernoulli", schema, weights=weights)


def inside(draws, truth):
    """Returns whether each value of the truth lies within the interval of its draws."""
    low, high = np.quantile(draws, [0.5 - LEVEL / 2.0, 0.5 + LEVEL / 2.0], axis=0)
    return (low < truth) & (truth < high)


def fitted_with_effects(study, epsilon, seed):
    """Returns a row: coverage of what hospitals share and of what they do not."""
    rng = np.random.default_rng([seed, 3])
    effects = EFFECTS_SD * rng.normal(size=NUM_HOSPITALS)
    tables, slopes, deviations = {}, [], []
    for number, effect in enumerate(effects):
        x, y, weights = population(10 * NUM // NUM_HOSPITALS, 100 * seed + number, effect)
        chosen = included(weights, NUM // NUM_HOSPITALS, rng)
        x, y, weights = x[chosen], y[chosen], weights[chosen]
        exact, deviation = newton(x, y, weights)
        slopes.append(exact[1:])
        deviations.append(deviation[1:])
        columns = np.clip(x, -5.0, 5.0)
        tables[f"hospital{number}"] = {
            **{name: columns[:, place] for place, name in enumerate("abc", 1)},
            "y": y.astype(int),
            "w": weights,
        }
    history = simulate(study, tables, epsilon=epsilon, delta=DELTA, verbose=0, seed=seed)
    drawn = study.draws(history.calibrated)
    own = [drawn["Intercept"] + drawn[f"Intercept at {name}"] for name in tables]
    found = np.stack([drawn[name] for name in NAMES[1:]], axis=1)
    precisions = 1.0 / np.square(deviations)
    exact = (precisions * slopes).sum(axis=0) / precisions.sum(axis=0)
    deviation = precisions.sum(axis=0) ** -0.5
    low, high = np.quantile(found, [0.5 - LEVEL / 2.0, 0.5 + LEVEL / 2.0], axis=0)
    return {
        "inside": inside(found, TRUTH[1:]).tolist(),
        "exact_inside": (np.abs(exact - TRUTH[1:]) < 1.645 * deviation).tolist(),
        "width": ((high - low) / (2.0 * 1.645 * deviation)).tolist(),
        "sd_inside": bool(inside(drawn["sd of Intercept"], EFFECTS_SD)),
        "own_inside": inside(np.stack(own, axis=1), TRUTH[0] + effects).tolist(),
        "warnings": study.warnings(history.calibrated),
    }


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
        **{
            name.removesuffix("_inside"): round(float(np.mean([row[name] for row in rows])), 3)
            for name in ("sd_inside", "own_inside")
            if name in rows[0]
        },
        "rows": rows,
    }


def table(cells):
    """Returns the cells as a table in Markdown."""
    more = {name: title for name, title in MORE.items() if name in cells[0]}
    titles = [
        "epsilon",
        "weights",
        "sets",
        "coverage",
        "without privacy, weighted",
        "width over it",
    ]
    titles += ["warned", *more.values()]
    lines = [f"| {' | '.join(titles)} |", f"|{' --- |' * len(titles)}"]
    for cell in cells:
        lines.append(
            f"| {cell['epsilon']:g} | {'yes' if cell['weights'] else 'no'} | {cell['sets']} | "
            f"{cell['coverage']:.2f} ± {cell['coverage_error']:.2f} | "
            f"{cell['coverage_without_privacy']:.2f} | {cell['width']:.2f} | {cell['warned']} |"
            + "".join(f" {cell[name]:.2f} |" for name in more)
        )
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--effects", action="store_true", help="hospitals with own intercepts")
    parser.add_argument("--epsilons", nargs="+", type=float, default=[1.0, 3.0])
    parser.add_argument("--num", type=int, default=10)
    parser.add_argument("--seed", type=int, default=6130)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("docs/figures"))
    options = parser.parse_args()
    logging.getLogger("tfp_dpvi").setLevel(logging.ERROR)
    cells = []
    name, fit, effects = "weighted_hospitals", fitted, ""
    if options.effects:
        name, fit, effects = "weighted_effects", fitted_with_effects, " + (1 | hospital)"
    for epsilon, column in itertools.product(options.epsilons, ("w", None)):
        study = study_of(column, effects)
        seeds = range(options.seed, options.seed + options.num)
        rows = [fit(study, epsilon, seed) for seed in seeds]
        cells.append(summarised(epsilon, column is not None, rows))
        shown = {name: value for name, value in cells[-1].items() if name != "rows"}
        print(json.dumps(shown), flush=True)
        options.out.mkdir(parents=True, exist_ok=True)
        hospitals = NUM_HOSPITALS if options.effects else 3
        settings = {"delta": DELTA, "level": LEVEL, "records": NUM, "hospitals": hospitals}
        harness.write_cells(options.out, name, cells, settings, table(cells))


if __name__ == "__main__":
    main()
