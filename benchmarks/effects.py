"""Correlated slopes of groups, and monotone effects: coverage, widths and warnings.

    python benchmarks/effects.py [--cases NAME ...] [--epsilons 1 3] [--num 24] [--quick]
        [--out FOLDER]

Slopes: 6,000 records of 30 groups, whose intercepts and slopes correlate by 0 or .6, as in
`outcome ~ age + (age | ward)`. Monotone effects: 6,000 records of five uneven levels, of whose
steps one is nearly none, as in `outcome ~ age + mo(school)`. Records are drawn here and fitted
as `dpvi.regression` does, by one compiled step a model. `--quick` is 2 sets a cell. It goes on
where it stopped, as long as the library is the same; the last line is a summary as JSON.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import pathlib
import time

import harness
import numpy as np

from tfp_dpvi._tf import tf
from tfp_dpvi.regressions.checking import outcome_values
from tfp_dpvi.regressions.families import likelihood, make_prior
from tfp_dpvi.regressions.fit import described, public_inputs
from tfp_dpvi.rehearsal.replicates import Replicates, centred

DELTA = 1e-5
EPSILONS = (1.0, 3.0)
LEVEL = 0.9
NUM, QUICK = 24, 2
NUM_RECORDS = 6000
NUM_DRAWS = 4000
# Coverage that cells are to have, give or take three standard errors.
LEAST = 0.86
WARDS = [f"ward{number:02d}" for number in range(30)]
SCHOOLS = ["none", "primary", "secondary", "college", "doctorate"]
SHARES = [0.1, 0.3, 0.35, 0.2, 0.05]
STEPS = {"primary": 0.15, "secondary": 0.5, "college": 0.03, "doctorate": 0.32}
AGE = {"type": "continuous", "lower": 18, "upper": 90, "typical": [50, 12], "unit": "years"}
# Outcomes, the unit of their score, and the score at 50 years.
OUTCOMES = {
    "normal": (
        {
            "type": "continuous",
            "lower": -60000.0,
            "upper": 140000.0,
            "typical": [40000.0, 12000.0],
            "unit": "dollars",
        },
        10000.0,
        4.0,
    ),
    "bernoulli": ({"type": "binary"}, 1.0, 0.2),
    "poisson": ({"type": "integer", "lower": 0, "upper": 100, "typical": [3, 3]}, 1.0, 0.3),
}
# Each case's family, correlation (None: monotone effects) and first seed.
CASES = {
    "slopes-normal-0": ("normal", 0.0, 7600),
    "slopes-normal-0.6": ("normal", 0.6, 7600),
    "slopes-bernoulli-0": ("bernoulli", 0.0, 7600),
    "slopes-bernoulli-0.6": ("bernoulli", 0.6, 7600),
    "monotone-normal": ("normal", None, 7700),
    "monotone-poisson": ("poisson", None, 7700),
}
SIZE = {"normal": 1.0, "poisson": 0.8}
SDS = np.array([0.5, 0.3])


def asked(name):
    """Returns the formula, the family and the schema of a case."""
    family, correlation, _ = CASES[name]
    schema = {"outcome": OUTCOMES[family][0], "age": AGE}
    if correlation is None:
        schema["school"] = {"type": "categorical", "categories": SCHOOLS}
        return "outcome ~ age + mo(school)", family, schema
    schema["ward"] = {"type": "categorical", "categories": WARDS}
    return "outcome ~ age + (age | ward)", family, schema


def data_set(name, number):
    """Returns records, and what is true of them by the names of the summary."""
    family, correlation, seed = CASES[name]
    generator = np.random.default_rng([seed + number, list(CASES).index(name)])
    age = np.clip(generator.normal(50.0, 12.0, NUM_RECORDS), 18.0, 90.0)
    since = (age - 50.0) / 12.0
    _, unit, start = OUTCOMES[family]
    truth = {"sigma": unit} if family == "normal" else {}
    data = {"age": age}
    if correlation is None:
        place = generator.choice(len(SCHOOLS), NUM_RECORDS, p=SHARES)
        data["school"] = np.array(SCHOOLS)[place]
        slope = 0.2
        rise = SIZE[family] * np.cumsum([0.0, *STEPS.values()])
        score = start + slope * since + rise[place]
        truth["mo(school)"] = unit * SIZE[family]
        truth |= {f"share(mo(school)[{level}])": step for level, step in STEPS.items()}
    else:
        place = generator.integers(0, len(WARDS), NUM_RECORDS)
        data["ward"] = np.array(WARDS)[place]
        slope = 0.5
        covariance = np.outer(SDS, SDS) * np.array([[1.0, correlation], [correlation, 1.0]])
        effects = generator.multivariate_normal([0.0, 0.0], covariance, len(WARDS))
        score = start + effects[place, 0] + (slope + effects[place, 1]) * since
        truth["cor(1, age|ward)"] = correlation
        truth |= {"sd(1|ward)": unit * SDS[0], "sd(age|ward)": unit * SDS[1] / 12.0}
        for level, (intercept, own) in zip(WARDS, effects, strict=True):
            truth[f"1|ward[{level}]"] = unit * intercept
            truth[f"age|ward[{level}]"] = unit * own / 12.0
    truth |= {"Intercept": unit * (start - slope * 50.0 / 12.0), "age": unit * slope / 12.0}
    draw = {
        "normal": lambda: unit * (score + generator.normal(size=NUM_RECORDS)),
        "bernoulli": lambda: generator.random(NUM_RECORDS) < 1.0 / (1.0 + np.exp(-score)),
        "poisson": lambda: generator.poisson(np.exp(score)),
    }
    data["outcome"] = draw[family]()
    if family == "bernoulli":
        data["outcome"] = data["outcome"].astype(int)
    return data, {label: float(value) for label, value in truth.items()}


class Fits:
    """Fits of data sets of a formula as `dpvi.regression` does them, by one compiled step."""

    def __init__(self, name):
        formula, family, schema = asked(name)
        self.design, self.parts = described(formula, family, schema)
        self.method = centred(
            make_prior(**self.parts.prior),
            functools.partial(likelihood, **self.parts.likelihood),
            *self.records(data_set(name, 0)[0]),
            public_inputs(self.design, self.parts),
            epsilon=EPSILONS[0],
            delta=DELTA,
        )
        self.fits = Replicates(self.method, num_draws=NUM_DRAWS, use_xla=True)

    def records(self, data):
        """Returns the model's inputs and outcomes."""
        family = self.parts.family
        outcomes = outcome_values(self.design, family, self.parts.outcome, data)
        return self.parts.inputs(self.design.rows(data)), outcomes

    def row(self, name, number, epsilon):
        """Returns the truth, the intervals and the warnings of one fit."""
        begin = time.perf_counter()
        data, truth = data_set(name, number)
        seed = int(np.random.default_rng([CASES[name][2] + number, 1]).integers(2**31))
        mechanism = self.method.priced(epsilon, DELTA)
        fit = self.fits.fit(*self.records(data), seed, mechanism)
        draws = self.in_units(fit.draws)
        # A level's whole slope is what is read off: the common one is uncertain too.
        for level in WARDS:
            if f"age|ward[{level}]" in truth:
                draws[f"age in {level}"] = draws["age"] + draws[f"age|ward[{level}]"]
                truth[f"age in {level}"] = truth["age"] + truth[f"age|ward[{level}]"]
        ends = (0.5 - LEVEL / 2.0, 0.5 + LEVEL / 2.0)
        figures = {
            label: [value, *np.quantile(draws[label], ends), draws[label].mean()]
            for label, value in truth.items()
        }
        return {
            "figures": {
                label: [float(f"{each:.5g}") for each in row] for label, row in figures.items()
            },
            "warnings": fit.warnings,
            "failed": fit.calibrated is None,
            "seconds": round(time.perf_counter() - begin, 1),
        }

    def in_units(self, draws):
        """Returns draws by the names of a regression's summary."""
        coordinates = self.fits.coordinates
        parts = tf.split(tf.constant(draws, coordinates.dtype), coordinates.sizes, axis=-1)
        params = {
            key: np.asarray(part, np.float64)
            for key, part in dict(coordinates.constrain(parts)).items()
        }
        return self.parts.in_units(params, self.design)


def kind_of(label):
    """Returns what a number is, such that cells count all alike together."""
    if label.startswith("share("):
        return label
    for start, kind in (("1|", "intercepts of levels"), ("age|", "slopes of levels")):
        if label.startswith(start):
            return kind
    return "whole slopes of levels" if label.startswith("age in ") else label


def summarised(name, epsilon, rows):
    """Returns the figures of one cell; errors are over data sets, whose numbers go together."""
    family, correlation, seed = CASES[name]
    labels = list(rows[0]["figures"])
    values = np.array([[row["figures"][label] for label in labels] for row in rows])
    truth, low, high = (values[:, :, place] for place in range(3))
    inside = (low <= truth) & (truth <= high)
    numbers = {}
    for kind in dict.fromkeys(map(kind_of, labels)):
        own = [place for place, label in enumerate(labels) if kind_of(label) == kind]
        each = inside[:, own].mean(axis=1)
        # The spread of so few sets may be 0 by chance: not below that of independent numbers.
        least = np.sqrt(LEVEL * (1.0 - LEVEL) / (len(rows) * len(own)))
        error = max(float(each.std(ddof=1)) / np.sqrt(len(rows)), least)
        width = (high - low)[:, own]
        numbers[kind] = {
            "coverage": round(float(each.mean()), 4),
            "coverage_error": round(error, 4),
            "too_low": round(float((high < truth)[:, own].mean()), 4),
            "too_high": round(float((low > truth)[:, own].mean()), 4),
            "width": [float(f"{q:.4g}") for q in np.quantile(width, [0.0, 0.5, 1.0])],
            "is_calibrated": bool(each.mean() + 3.0 * error >= LEAST),
        }
    return {
        "case": name,
        "family": family,
        "correlation": correlation,
        "seed": seed,
        "epsilon": epsilon,
        "sets": len(rows),
        "numbers": numbers,
        "warned": sum(bool(row["warnings"]) for row in rows),
        "failed": sum(row["failed"] for row in rows),
        "seconds": round(float(np.median([row["seconds"] for row in rows])), 1),
    }


def table(cells):
    """Returns the cells as a table in Markdown, a line for each number."""
    lines = [
        "| case | epsilon | sets | number | coverage of 90 % | width, median (range) | warned |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for cell in cells:
        start = f"| `{cell['case']}` | {cell['epsilon']:g} | {cell['sets']} |"
        for label, row in cell["numbers"].items():
            low, middle, high = row["width"]
            lines.append(
                f"{start} {label.replace('|', chr(92) + '|')} | {row['coverage']:.2f} ± "
                f"{row['coverage_error']:.2f} | {middle:.3g} ({low:.3g} to {high:.3g}) | "
                f"{cell['warned']} |"
            )
    return "\n".join(lines) + "\n"


class File:
    """Fits of one case, which a later run does not make again.

    Raises:
      SystemExit: They are of another library.
    """

    def __init__(self, path):
        self._path = path
        self._known = json.loads(path.read_text()) if path.exists() else {}
        code = self._known.setdefault("code", harness.code_hash())
        if code != harness.code_hash():
            raise SystemExit(f"{path} is of another library: choose another folder, or delete it.")

    def row(self, number, epsilon, make):
        """Returns the row of a fit, which `make` makes if there is none."""
        rows = self._known.setdefault(f"{epsilon:g}", {})
        if str(number) not in rows:
            rows[str(number)] = make()
            new = self._path.with_suffix(".tmp")
            new.write_text(json.dumps(self._known) + "\n")
            new.replace(self._path)
        return rows[str(number)]


def study(names, epsilons, num, folder):
    """Returns the cells, after running what their files lack.

    The first sets of all cases come first, so that a run that was stopped has as many of each.
    """
    files = {name: File(folder / f"{name}.json") for name in names}
    rows = {(name, epsilon): [] for name in names for epsilon in epsilons}
    # Cases of two correlations have one model.
    models = {}

    def make(name, number, epsilon):
        model = asked(name)[:2]
        if model not in models:
            models[model] = Fits(name)
        row = models[model].row(name, number, epsilon)
        print(name, number, f"{epsilon:g}", row["seconds"], row["warnings"], flush=True)
        return row

    for number in range(num):
        for (name, epsilon), found in rows.items():
            made = functools.partial(make, name, number, epsilon)
            found.append(files[name].row(number, epsilon, made))
    return [summarised(*cell, found) for cell, found in rows.items()]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--epsilons", nargs="+", type=float, default=EPSILONS)
    parser.add_argument("--num", type=int, default=NUM)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} data sets of each cell")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("docs/figures/effects"))
    options = parser.parse_args()
    logging.getLogger("tfp_dpvi").setLevel(logging.ERROR)
    folder = options.out / "fits"
    folder.mkdir(parents=True, exist_ok=True)
    num = QUICK if options.quick else options.num
    if num < 2:
        parser.error("--num must be at least 2: errors are over data sets.")
    cells = study(options.cases, options.epsilons, num, folder)
    settings = {"records": NUM_RECORDS, "delta": DELTA, "level": LEVEL}
    harness.write_cells(options.out, "effects", cells, settings, table(cells))
    coverage = {
        f"{cell['case']}-{cell['epsilon']:g}": {
            label: row["coverage"] for label, row in cell["numbers"].items()
        }
        for cell in cells
    }
    print(json.dumps(coverage))


if __name__ == "__main__":
    main()
