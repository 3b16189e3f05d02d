"""Calibration of families of outcomes in awkward units: coverage and warnings of their intervals.

    python benchmarks/families.py [--families NAME ...] [--epsilons 1 3] [--num 100] [--quick]
        [--out FOLDER]

Covariates are uncentred years, skewed dollars and a level that one record in 20 has, where the
schema says one in three. `dpvi.rehearse_regression` simulates data sets of one truth and fits each
as `dpvi.regression` would. `--quick` is 12 sets a cell. It goes on where it stopped; the last line
is a summary as JSON.
"""

import argparse
import json
import pathlib

import harness
import numpy as np
from awkward import COVARIATES, FORMULA

import tfp_dpvi as dpvi

DELTA = 1e-5
EPSILONS = (1.0, 3.0)
LEVEL = 0.9
QUICK = 12
NUM_ROWS = 20_000
# Coverage that a cell may have, give or take three standard errors, and the most that may warn.
LEAST, MOST = 0.86, 0.97
MOST_WARNED = 0.05
SLOPES = {"age": 0.02, "income": 8e-6, "sex": 0.3, "ward[B]": 0.4, "ward[C]": -0.6}
# Of a score that is 0 at 50 years and 45,000 dollars.
START = -50 * SLOPES["age"] - 45000 * SLOPES["income"]
UNIT = 8000.0
WORDS = ["no", "low", "high"]
TRIALS = {"type": "integer", "lower": 0, "upper": 40}
# Thresholds of an ordinal outcome at the score 0.
CUTS = {"threshold[no|low]": -0.5, "threshold[low|high]": 1.0}


def positive(upper, typical):
    return {"type": "continuous", "lower": 1e-6, "upper": upper, "typical": typical}


def counts(upper, typical):
    return {"type": "integer", "lower": 0, "upper": upper, "typical": typical}


# Each family's outcome, intercept at the score 0, and parameters of its own.
FAMILIES = {
    "normal": (
        {"type": "continuous", "lower": -50000.0, "upper": 150000.0},
        30000.0,
        {"sigma": 9000.0},
    ),
    "bernoulli": ({"type": "binary"}, 0.0, {}),
    "binomial": (TRIALS, 0.0, {}),
    "beta_binomial": (TRIALS, 0.0, {"kappa": 8.0}),
    "poisson": (counts(300, [3.0, 3.0]), 0.5, {}),
    "negative_binomial": (counts(900, [3.0, 5.0]), 0.5, {"alpha": 1.0}),
    "categorical": ({"type": "categorical", "categories": WORDS}, 0.0, {}),
    "ordinal": ({"type": "categorical", "categories": WORDS}, 0.0, CUTS),
    "student": (
        {"type": "continuous", "lower": -5e5, "upper": 5e5, "typical": [30000.0, 12000.0]},
        30000.0,
        {"sigma": 6000.0, "nu": 4.0},
    ),
    "lognormal": (positive(1e7, [40000.0, 40000.0]), 10.0, {"sigma": 0.7}),
    "gamma": (positive(1000.0, [3.0, 3.0]), 0.5, {"alpha": 2.0}),
    "weibull": (positive(1000.0, [3.0, 3.0]), 0.5, {"alpha": 1.5}),
    "exponential": (positive(1000.0, [3.0, 3.0]), 0.5, {}),
    "beta": (
        {"type": "continuous", "lower": 1e-6, "upper": 1.0 - 1e-6},
        0.0,
        {"kappa": 8.0},
    ),
    "zero_inflated_poisson": (counts(300, [3.0, 3.0]), 0.5, {"zero": 0.2}),
    "zero_inflated_negative_binomial": (
        counts(900, [3.0, 5.0]),
        0.5,
        {"alpha": 1.0, "zero": 0.2},
    ),
    "hurdle_poisson": (counts(300, [3.0, 3.0]), 0.5, {"zero": 0.2}),
}
# The same with limits of half to twice the typical outcome, which a third of outcomes are beyond.
CENSORED = {f"censored_{name}": name for name in ("lognormal", "gamma", "weibull", "exponential")}


def covariates(seed=0):
    """Returns public rows that are unlike the schema's, as private ones may be."""
    rng = np.random.default_rng(seed)
    return {
        "age": np.round(np.clip(rng.normal(52.0, 14.0, NUM_ROWS), 18.0, 90.0)).astype(int),
        "income": np.clip(rng.lognormal(10.6, 0.6, NUM_ROWS), 1000.0, 300000.0),
        "ward": rng.choice(["A", "B", "C"], NUM_ROWS, p=[0.75, 0.2, 0.05]),
        "sex": rng.integers(0, 2, NUM_ROWS),
    }


def truth(name):
    """Returns true parameters in the units of the formula."""
    _, intercept, own = FAMILIES[name]
    unit = UNIT if name in ("normal", "student") else 1.0
    slopes = {label: unit * value for label, value in SLOPES.items()}
    if name == "ordinal":
        return {**slopes, **{label: cut - START for label, cut in own.items()}}
    score = {"Intercept": intercept + unit * START, **slopes}
    if name == "categorical":
        first = {f"low: {label}": value for label, value in score.items()}
        return {**first, **{f"high: {label}": -value for label, value in score.items()}}
    return {**score, **own}


def asked(name):
    """Returns the formula, the family, the schema and the covariates of a cell."""
    if name in ("binomial", "beta_binomial"):
        trials = np.random.default_rng(1).integers(0, 21, NUM_ROWS)
        formula, schema = FORMULA.replace("y ~", "p(y, n) ~"), {"y": TRIALS, "n": TRIALS}
        return formula, name, {**schema, **COVARIATES}, {**covariates(), "n": trials}
    if name not in CENSORED:
        return FORMULA, name, {"y": FAMILIES[name][0], **COVARIATES}, covariates()
    family = CENSORED[name]
    outcome = FAMILIES[family][0]
    typical = outcome["typical"][0]
    limit = {"type": "continuous", "lower": 1e-6, "upper": outcome["upper"]}
    schema = {"y": outcome, "until": {**limit, "typical": [1.25 * typical, 0.5 * typical]}}
    until = typical * np.random.default_rng(1).uniform(0.5, 2.0, NUM_ROWS)
    formula = FORMULA.replace("y ~", "censored(y, until) ~")
    return formula, family, {**schema, **COVARIATES}, {**covariates(), "until": until}


def study(name, size, num, seed, folder, epsilons=EPSILONS):
    """Returns the figures of a family's cells, after running what its file lacks."""
    formula, family, schema, rows = asked(name)
    rehearsal = dpvi.rehearse_regression(
        formula,
        family,
        schema,
        num_records=size,
        epsilon=epsilons,
        delta=DELTA,
        truth=truth(family),
        num=num,
        public_data=rows,
        level=LEVEL,
        seed=seed,
        path=folder / f"{name}-{size}-{seed}.json",
        verbose=0,
    )
    return [{"family": name, "seed": seed, **cell(rehearsal, size, each)} for each in epsilons]


def cell(rehearsal, size, epsilon):
    """Returns the figures of one cell; the error is over data sets, whose parameters go together."""
    rows = [row for row in rehearsal.rows[size, epsilon] if not row["failed"]]
    low, value, high = (np.array([row[key] for row in rows]) for key in ("low", "truth", "high"))
    inside = ((low <= value) & (value <= high)).mean(axis=1)
    columns = rehearsal.columns(size, epsilon)
    # The spread of so few sets may be 0 by chance: not below that of independent parameters.
    least = np.sqrt(LEVEL * (1.0 - LEVEL) / value.size)
    error = max(float(inside.std(ddof=1)) / np.sqrt(len(rows)), least)
    coverage, warned = float(inside.mean()), rehearsal.warned(size, epsilon)
    return {
        "records": size,
        "epsilon": epsilon,
        "sets": len(rehearsal.rows[size, epsilon]),
        "coverage": round(coverage, 4),
        "coverage_error": round(float(error), 4),
        "worst": round(float(columns["coverage"].min()), 4),
        "worst_name": rehearsal.names[int(columns["coverage"].argmin())],
        "by_name": dict(zip(rehearsal.names, columns["coverage"].round(4).tolist(), strict=True)),
        "bias": dict(
            zip(
                rehearsal.names,
                (columns["bias"] / columns["error"]).round(2).tolist(),
                strict=True,
            )
        ),
        "warned": round(warned, 4),
        "warnings": rehearsal.warnings(size, epsilon),
        "is_calibrated": bool(LEAST - 3.0 * error <= coverage <= MOST + 3.0 * error),
        "is_quiet": warned <= MOST_WARNED,
        "seconds": round(float(np.median([row["seconds"] for row in rows])), 1),
    }


def table(rows):
    """Returns the cells as a table in Markdown."""
    lines = [
        "| family | epsilon | sets | coverage of 90 % | worst | warned |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        lines.append(
            f"| `{row['family']}` | {row['epsilon']:g} | {row['sets']} | {row['coverage']:.2f} ± "
            f"{row['coverage_error']:.2f} | {row['worst']:.2f} ({row['worst_name']}) | "
            f"{row['warned']:.0%} |"
        )
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--families", nargs="*", default=list(FAMILIES), choices=[*FAMILIES, *CENSORED]
    )
    parser.add_argument("--epsilons", nargs="*", type=float, default=EPSILONS)
    parser.add_argument("--num", type=int, default=100)
    parser.add_argument("--records", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} data sets of each cell")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("docs/figures/families"))
    arguments = parser.parse_args()
    folder = arguments.out / "fits"
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for name in arguments.families:
        num = QUICK if arguments.quick else arguments.num
        epsilons = tuple(arguments.epsilons)
        rows += study(name, arguments.records, num, arguments.seed, folder, epsilons)
        print(json.dumps(rows[-len(epsilons) :]), flush=True)
        settings = {"level": LEVEL, "delta": DELTA}
        harness.write_cells(arguments.out, "families", rows, settings, table(rows))
    print(json.dumps({f"{r['family']}-{r['epsilon']:g}": r["coverage"] for r in rows}))


if __name__ == "__main__":
    main()
