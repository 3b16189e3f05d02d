"""Regressions whose schema has bounds alone: coverage and widths, with and without a release first.

    python benchmarks/wide_bounds.py [--families NAME ...] [--records 1000 5000] [--times 1 50]
        [--num 8] [--hospitals 3] [--seed 6700] [--out FOLDER]

Each data set is fitted three times by `dpvi.regression` at epsilon 1: as it is, where typical
values are released first; with `measured=()`; and told the true means and deviations. `--times` is
by how much the bounds are wider than the records. `--hospitals` divides the records among so many,
which fit a study together, at epsilon 1 each.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import logging
import pathlib
import time
from typing import NamedTuple

import harness
import numpy as np

import tfp_dpvi as dpvi
from tfp_dpvi import federated
from tfp_dpvi.federated.refiner import Refiner

DELTA = 1e-5
SLOPES = {"age": 0.03, "income": 1e-5, "ward[B]": 0.4, "ward[C]": -0.5}
UNIT = 5000.0
FAMILIES = ("poisson", "normal", "bernoulli", "binomial", "student", "zero_inflated_poisson")
FORMULA = "age + income + ward"
LEVEL = 0.9
EPSILON = 1.0


def data_set(family, num, seed):
    """Returns records of a right model, and their true slopes."""
    generator = np.random.default_rng([seed, num])
    age = np.clip(generator.normal(45.0, 15.0, num), 18.0, 90.0).round().astype(int)
    income = np.clip(generator.lognormal(10.3, 0.6, num), 0.0, 2e5)
    ward = generator.choice(list("ABC"), num, p=[0.7, 0.25, 0.05])
    score = SLOPES["age"] * (age - 45) + SLOPES["income"] * (income - 36000.0)
    score += SLOPES["ward[B]"] * (ward == "B") + SLOPES["ward[C]"] * (ward == "C")
    data = {"age": age, "income": income, "ward": ward}
    share, rate = 1.0 / (1.0 + np.exp(-score)), np.exp(0.5 + score)
    if family == "binomial":
        data["trials"] = generator.integers(1, 20, num)
    draw = {
        "poisson": lambda: generator.poisson(rate),
        "zero_inflated_poisson": lambda: generator.poisson(rate) * (generator.random(num) > 0.3),
        "normal": lambda: UNIT * (1.0 + score) + 3000.0 * generator.normal(size=num),
        "student": lambda: UNIT * score + 2500.0 * generator.standard_t(4, num),
        "bernoulli": lambda: (generator.random(num) < share).astype(int),
        "binomial": lambda: generator.binomial(data["trials"], share),
    }
    data["y"] = draw[family]()
    unit = UNIT if family in ("normal", "student") else 1.0
    return data, {name: unit * value for name, value in SLOPES.items()}


def schema_of(family, times, data, *, told):
    """Returns bounds that are so many times wider, with typical values if these are told."""
    counts = {"type": "integer", "lower": 0, "upper": int(100 * times)}
    dollars = {"type": "continuous", "lower": -40000.0 * times, "upper": 60000.0 * times}
    trials = {"type": "integer", "lower": 0, "upper": int(20 * times)}
    outcome = {"bernoulli": {"type": "binary"}, "binomial": trials}
    outcome |= {"normal": dollars, "student": dollars}
    schema = {
        "age": {"type": "integer", "lower": 0, "upper": int(90 * times)},
        "income": {"type": "continuous", "lower": 0.0, "upper": 2e5 * times},
        "ward": {"type": "categorical", "categories": list("ABC")},
        "y": outcome.get(family, counts),
    }
    if family == "binomial":
        schema["trials"] = {**trials, "lower": 1}
    if told:
        for name, column in schema.items():
            if column["type"] in ("integer", "continuous"):
                values = np.clip(data[name], column["lower"], column["upper"])
                column["typical"] = [float(values.mean()), float(values.std())]
    return schema


class Fit(NamedTuple):
    """A fit's draws, warnings, and the share that typical values took."""

    draws: dict
    warnings: list
    share: float


def alone(formula, data, family, schema, seed, **settings):
    """Returns the fit of all records at one place."""
    budget = {"epsilon": EPSILON, "delta": DELTA, "seed": seed}
    result = dpvi.regression(formula, data, family, schema, **budget, **settings)
    return Fit(result.draws, result.warnings, result.parts.share if result.parts.measured else 0.0)


def together(num_hospitals, formula, data, family, schema, seed, *, measured=None):
    """Returns the fit of a study of so many hospitals, to which records come at random."""
    schema = dpvi.Schema.from_dict(schema)
    places = np.array_split(np.random.default_rng(seed).permutation(len(data["y"])), num_hospitals)
    tables = {
        f"hospital{number}": {name: np.asarray(values)[part] for name, values in data.items()}
        for number, part in enumerate(places)
    }
    ledgers = {name: dpvi.PrivacyLedger() for name in tables}
    share = 0.0
    is_told = schema.columns["age"].typical is not None
    if measured is None and not is_told:
        counts = []
        for number, (name, table_) in enumerate(tables.items()):
            settings = {"epsilon": EPSILON, "delta": DELTA, "num_hospitals": num_hospitals}
            settings |= {"name": name, "ledger": ledgers[name], "seed": 100 * seed + number}
            counts.append(federated.count_columns(schema, table_, **settings))
        schema = federated.described_together(schema, counts)
        share = ledgers[name].epsilon(DELTA) / EPSILON
    study = federated.RegressionStudy(formula, family, schema)
    schedule = federated.Synchronous()
    budget = {"epsilon": EPSILON, "delta": DELTA, "rounds": schedule.rounds}
    refiner = Refiner(study)
    hospitals = {
        name: federated.Hospital(
            study,
            table_,
            name=name,
            ledger=ledgers[name],
            refiner=refiner,
            seed=1000 * seed + number,
            **budget,
        )
        for number, (name, table_) in enumerate(tables.items())
    }
    history = federated.simulate(study, hospitals, schedule=schedule, verbose=0)
    return Fit(study.draws(history.calibrated), study.warnings(history.calibrated), share)


def fitted(fit, family, data, truth, schema, seed, **settings):
    """Returns a row: z scores, standard deviations, coverage and warnings of one fit."""
    begin = time.perf_counter()
    left = "p(y, trials)" if family == "binomial" else "y"
    inside = {
        name: np.clip(data[name], column["lower"], column["upper"])
        for name, column in schema.items()
        if "lower" in column
    }
    found = fit(f"{left} ~ {FORMULA}", {**data, **inside}, family, schema, seed, **settings)
    draws = found.draws
    ends = {
        name: np.quantile(draws[name], [0.5 - LEVEL / 2.0, 0.5 + LEVEL / 2.0]) for name in truth
    }
    return {
        "z": [float((draws[name].mean() - truth[name]) / draws[name].std()) for name in truth],
        "sd": [float(draws[name].std() / abs(truth[name])) for name in truth],
        "inside": [bool(ends[name][0] <= truth[name] <= ends[name][1]) for name in truth],
        "warnings": [sentence[:80] for sentence in found.warnings],
        "share": found.share,
        "seconds": round(time.perf_counter() - begin, 1),
    }


def summarised(family, num, times, way, rows, told):
    """Returns the figures of one cell."""
    z = np.array([row["z"] for row in rows])
    ratio = np.array([row["sd"] for row in rows]) / np.array([row["sd"] for row in told])
    return {
        "family": family,
        "records": num,
        "times": times,
        "way": way,
        "sets": len(rows),
        "coverage": round(float(np.mean([row["inside"] for row in rows])), 3),
        "farthest": round(float(np.abs(z).max()), 1),
        "width_over_told": round(float(np.median(ratio)), 2),
        "widest_over_told": round(float(ratio.max()), 1),
        "warned": sum(bool(row["warnings"]) for row in rows),
        "share": rows[0]["share"],
        "rows": rows,
    }


def table(cells):
    """Returns the cells as a table in Markdown."""
    lines = [
        "| family | records | bounds | typical values | sets | coverage | farthest, in its sd | "
        "width (widest) | warned |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for cell in cells:
        lines.append(
            f"| `{cell['family']}` | {cell['records']:,} | {cell['times']:g} | {cell['way']} | "
            f"{cell['sets']} | {cell['coverage']:.2f} | {cell['farthest']:.1f} | "
            f"{cell['width_over_told']:.2f} ({cell['widest_over_told']:.1f}) | {cell['warned']} |"
        )
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=FAMILIES)
    parser.add_argument("--records", nargs="+", type=int, default=[1000, 5000])
    parser.add_argument("--times", nargs="+", type=float, default=[1.0, 50.0])
    parser.add_argument("--num", type=int, default=8)
    parser.add_argument("--hospitals", type=int, default=0)
    parser.add_argument("--seed", type=int, default=6700)
    parser.add_argument(
        "--out", type=pathlib.Path, default=pathlib.Path("docs/figures/wide_bounds")
    )
    options = parser.parse_args()
    logging.getLogger("tfp_dpvi").setLevel(logging.ERROR)
    cells = []
    fit = functools.partial(together, options.hospitals) if options.hospitals else alone
    for family, num, times in itertools.product(options.families, options.records, options.times):
        ways = {"told": [], "released": [], "bounds": []}
        for seed in range(options.seed, options.seed + options.num):
            data, truth = data_set(family, num, seed)
            told, plain = (schema_of(family, times, data, told=each) for each in (True, False))
            ways["told"].append(fitted(fit, family, data, truth, told, seed))
            ways["released"].append(fitted(fit, family, data, truth, plain, seed))
            ways["bounds"].append(fitted(fit, family, data, truth, plain, seed, measured=()))
        cells += [
            summarised(family, num, times, way, rows, ways["told"]) for way, rows in ways.items()
        ]
        for cell in cells[-3:]:
            print(json.dumps({name: value for name, value in cell.items() if name != "rows"}))
        options.out.mkdir(parents=True, exist_ok=True)
        settings = {"epsilon": EPSILON, "delta": DELTA, "level": LEVEL}
        settings["hospitals"] = options.hospitals
        harness.write_cells(options.out, "wide_bounds", cells, settings, table(cells))


if __name__ == "__main__":
    main()
