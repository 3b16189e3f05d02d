"""Correlated slopes of groups, and monotone effects: coverage, widths and warnings.

    python benchmarks/effects.py [--cases NAME ...] [--epsilons 1 3] [--num 24] [--quick]
        [--out FOLDER]

Slopes: 6,000 records of 30 groups, or 3,000, whose intercepts and slopes correlate by 0 or .6, as in
`outcome ~ age + (age | ward)`. Monotone effects: 6,000 records of five uneven levels, of whose
steps one is nearly none, as in `outcome ~ age + mo(school)`, or whose steps are shares drawn from
their prior, anew for each set. Records are drawn here and fitted as `dpvi.regression` does, by one
compiled step a model; the same without privacy, by Monte Carlo. `--quick` is 2 sets a cell. It goes
on where it stopped, as long as the library is the same; the last line is a summary as JSON.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import pathlib
import time
from typing import Any, NamedTuple

import harness
import numpy as np
from scipy import linalg, special

from tfp_dpvi._tf import tf
from tfp_dpvi.regressions.checking import outcome_values
from tfp_dpvi.regressions.families import SHARE_SD, likelihood, make_prior
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


class Outcome(NamedTuple):
    """An outcome's public description, the unit of its score, and the score at 50 years."""

    column: dict[str, Any]
    unit: float
    start: float


class Case(NamedTuple):
    """A family, the correlation of its slopes (None: a monotone effect), first seed and size.

    Shares of a monotone effect's steps are `STEPS`, or drawn from their prior.
    """

    family: str
    correlation: float | None
    seed: int
    draws_shares: bool = False
    num: int = NUM_RECORDS


OUTCOMES = {
    "normal": Outcome(
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
    "bernoulli": Outcome({"type": "binary"}, 1.0, 0.2),
    "poisson": Outcome({"type": "integer", "lower": 0, "upper": 100, "typical": [3, 3]}, 1.0, 0.3),
}
CASES = {
    "slopes-normal-0": Case("normal", 0.0, 7600),
    "slopes-normal-0.6": Case("normal", 0.6, 7600),
    "slopes-bernoulli-0": Case("bernoulli", 0.0, 7600),
    "slopes-bernoulli-0.6": Case("bernoulli", 0.6, 7600),
    "monotone-normal": Case("normal", None, 7700),
    "monotone-poisson": Case("poisson", None, 7700),
    "monotone-normal-drawn": Case("normal", None, 9300, draws_shares=True),
    "monotone-poisson-drawn": Case("poisson", None, 9300, draws_shares=True),
    # A hundred records of each group.
    "slopes-bernoulli-few": Case("bernoulli", 0.6, 9400, num=3000),
}
SIZE = {"normal": 1.0, "poisson": 0.8}
SDS = np.array([0.5, 0.3])


def asked(name):
    """Returns the formula, the family and the schema of a case."""
    case = CASES[name]
    schema = {"outcome": OUTCOMES[case.family].column, "age": AGE}
    if case.correlation is None:
        schema["school"] = {"type": "categorical", "categories": SCHOOLS}
        return "outcome ~ age + mo(school)", case.family, schema
    schema["ward"] = {"type": "categorical", "categories": WARDS}
    return "outcome ~ age + (age | ward)", case.family, schema


def shares_of(logits):
    """Returns shares [..., k] of logits [..., k - 1], as regressions have them."""
    logits = logits @ linalg.helmert(np.shape(logits)[-1] + 1)
    return special.softmax(logits, axis=-1)


def data_set(name, number):
    """Returns records, and what is true of them by the names of the summary."""
    case = CASES[name]
    generator = np.random.default_rng([case.seed + number, list(CASES).index(name)])
    age = np.clip(generator.normal(50.0, 12.0, case.num), 18.0, 90.0)
    since = (age - 50.0) / 12.0
    unit, start = OUTCOMES[case.family][1:]
    truth = {"sigma": unit} if case.family == "normal" else {}
    data = {"age": age}
    if case.correlation is None:
        place = generator.choice(len(SCHOOLS), case.num, p=SHARES)
        data["school"] = np.array(SCHOOLS)[place]
        slope = 0.2
        steps = STEPS
        if case.draws_shares:
            logits = SHARE_SD * generator.normal(size=len(STEPS) - 1)
            steps = dict(zip(STEPS, shares_of(logits), strict=True))
        rise = SIZE[case.family] * np.cumsum([0.0, *steps.values()])
        score = start + slope * since + rise[place]
        truth["mo(school)"] = unit * SIZE[case.family]
        truth |= {f"share(mo(school)[{level}])": step for level, step in steps.items()}
    else:
        place = generator.integers(0, len(WARDS), case.num)
        data["ward"] = np.array(WARDS)[place]
        slope = 0.5
        covariance = np.outer(SDS, SDS) * np.array(
            [[1.0, case.correlation], [case.correlation, 1.0]]
        )
        effects = generator.multivariate_normal([0.0, 0.0], covariance, len(WARDS))
        score = start + effects[place, 0] + (slope + effects[place, 1]) * since
        truth["cor(1, age|ward)"] = case.correlation
        truth |= {"sd(1|ward)": unit * SDS[0], "sd(age|ward)": unit * SDS[1] / 12.0}
        for level, (intercept, own) in zip(WARDS, effects, strict=True):
            truth[f"1|ward[{level}]"] = unit * intercept
            truth[f"age|ward[{level}]"] = unit * own / 12.0
    truth |= {"Intercept": unit * (start - slope * 50.0 / 12.0), "age": unit * slope / 12.0}
    draw = {
        "normal": lambda: unit * (score + generator.normal(size=case.num)),
        "bernoulli": lambda: generator.random(case.num) < 1.0 / (1.0 + np.exp(-score)),
        "poisson": lambda: generator.poisson(np.exp(score)),
    }
    data["outcome"] = draw[case.family]()
    if case.family == "bernoulli":
        data["outcome"] = data["outcome"].astype(int)
    return data, {label: float(value) for label, value in truth.items()}


def figures(draws, truth):
    """Returns truth, ends of the interval and mean of each number, whole slopes included."""
    draws, truth = dict(draws), dict(truth)
    # A level's whole slope is what is read off: the common one is uncertain too.
    for level in WARDS:
        if f"age|ward[{level}]" in truth:
            draws[f"age in {level}"] = draws["age"] + draws[f"age|ward[{level}]"]
            truth[f"age in {level}"] = truth["age"] + truth[f"age|ward[{level}]"]
    ends = (0.5 - LEVEL / 2.0, 0.5 + LEVEL / 2.0)
    return {
        label: [
            float(f"{each:.5g}")
            for each in (value, *np.quantile(draws[label], ends), draws[label].mean())
        ]
        for label, value in truth.items()
        if label in draws
    }


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
        seed = int(np.random.default_rng([CASES[name].seed + number, 1]).integers(2**31))
        mechanism = self.method.priced(epsilon, DELTA)
        fit = self.fits.fit(*self.records(data), seed, mechanism)
        return {
            "figures": figures(self.in_units(fit.draws), truth),
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


def lines_of_levels(name, data):
    """Returns each level's estimated line [L, 2] at 50 years, and its covariance [L, 2, 2]."""
    is_normal = CASES[name].family == "normal"
    unit, squares = OUTCOMES[CASES[name].family].unit, 0.0
    estimates, covariances = [], []
    for level in WARDS:
        own = data["ward"] == level
        x = np.column_stack([np.ones(own.sum()), (data["age"][own] - 50.0) / 12.0])
        y = data["outcome"][own] / unit
        line = np.zeros(2)
        for _ in range(1 if is_normal else 20):
            score = x @ line
            mean = score if is_normal else 1.0 / (1.0 + np.exp(-score))
            weight = np.ones(len(y)) if is_normal else mean * (1.0 - mean)
            information = x.T @ (weight[:, None] * x)
            line = line + np.linalg.solve(information, x.T @ (y - mean))
        squares += np.sum((y - x @ line) ** 2)
        estimates.append(line)
        covariances.append(np.linalg.inv(information))
    variance = squares / (CASES[name].num - 2 * len(WARDS)) if is_normal else 1.0
    return np.array(estimates), variance * np.array(covariances)


def evolved(log_density, start, generator, *, num_chains=100, num_steps=1500):
    """Returns draws of a density, by differential evolution of many chains."""
    points = start + 0.1 * generator.normal(size=(num_chains, len(start)))
    values, kept = log_density(points), []
    for step in range(num_steps):
        first, second = generator.integers(0, num_chains, (2, num_chains))
        # Jumps of a whole difference, now and then, between modes.
        gain = np.where(generator.random(num_chains) < 0.1, 1.0, 2.38 / np.sqrt(2 * len(start)))
        moved = points + gain[:, None] * (points[first] - points[second])
        moved += 1e-3 * generator.normal(size=points.shape)
        found = log_density(moved)
        accepted = np.log(generator.random(num_chains)) < found - values
        points[accepted], values[accepted] = moved[accepted], found[accepted]
        if step >= num_steps // 3 and step % 25 == 0:
            kept.append(points.copy())
    return np.concatenate(kept)


def without_privacy(name, number):
    """Returns the row of the posterior without privacy, with the deviations' priors of regressions.

    Levels' lines are normal given their estimates, which leaves five numbers to draw. Draws of
    yes or no are then drawn again by the likelihood over that of the normals.
    """
    data, truth = data_set(name, number)
    generator = np.random.default_rng([CASES[name].seed + number, 2])
    estimates, covariances = lines_of_levels(name, data)
    family = CASES[name].family
    column, unit = OUTCOMES[family][:2]
    scale = column["typical"][1] / unit if family == "normal" else 1.0

    def covariance_of(points):
        deviations, correlation = np.exp(points[:, 2:4]), np.tanh(points[:, 4])
        total = deviations[:, :, None] * deviations[:, None, :]
        total[:, [0, 1], [1, 0]] *= correlation[:, None]
        return total

    def log_density(points):
        total = covariance_of(points)[:, None] + covariances
        away = estimates - points[:, None, :2]
        # In closed form, since there are millions of these matrices.
        first, second = total[..., 0, 0], total[..., 1, 1]
        both = total[..., 0, 1]
        determinant = first * second - both**2
        square = second * away[..., 0] ** 2 + first * away[..., 1] ** 2
        square -= 2.0 * both * away[..., 0] * away[..., 1]
        lines = -0.5 * (square / determinant + np.log(determinant)).sum(axis=1)
        logs = points[:, 2:4]
        prior = (logs - 0.5 * (np.exp(logs) / scale) ** 2).sum(axis=1)
        return lines + prior + np.log1p(-(np.tanh(points[:, 4]) ** 2))

    start = np.array([*estimates.mean(axis=0), *np.log(SDS), 0.3])
    points = evolved(log_density, start, generator)
    among, within = np.linalg.inv(covariance_of(points)), np.linalg.inv(covariances)
    spread = np.linalg.inv(among[:, None] + within)
    pull = np.einsum("cij,cj->ci", among, points[:, :2])[:, None]
    middle = np.einsum("clij,clj->cli", spread, pull + np.einsum("lij,lj->li", within, estimates))
    noise = generator.normal(size=middle.shape)
    lines = middle + np.einsum("clij,clj->cli", np.linalg.cholesky(spread), noise)
    if family == "bernoulli":
        logs = np.zeros(len(points))
        for place, level in enumerate(WARDS):
            own = data["ward"] == level
            since = (data["age"][own] - 50.0) / 12.0
            score = lines[:, place, :1] + lines[:, place, 1:] * since
            logs += (score * data["outcome"][own] - np.logaddexp(0.0, score)).sum(axis=1)
            away = lines[:, place] - estimates[place]
            logs += 0.5 * np.einsum("ci,ij,cj->c", away, within[place], away)
        weights = np.exp(logs - logs.max())
        chosen = generator.choice(len(points), len(points), p=weights / weights.sum())
        points, lines = points[chosen], lines[chosen]
    draws = {
        "age": unit * points[:, 1] / 12.0,
        "Intercept": unit * (points[:, 0] - points[:, 1] * 50.0 / 12.0),
        "sd(1|ward)": unit * np.exp(points[:, 2]),
        "sd(age|ward)": unit * np.exp(points[:, 3]) / 12.0,
        "cor(1, age|ward)": np.tanh(points[:, 4]),
    }
    for place, level in enumerate(WARDS):
        draws[f"1|ward[{level}]"] = unit * (lines[:, place, 0] - points[:, 0])
        draws[f"age|ward[{level}]"] = unit * (lines[:, place, 1] - points[:, 1]) / 12.0
    return {"figures": figures(draws, truth)}


def steps_without_privacy(name, number):
    """Returns the row of the posterior without privacy of a monotone effect.

    Shares have their prior; all else has a flat one, which is not to be told from a regression's
    with so many records.
    """
    case = CASES[name]
    data, truth = data_set(name, number)
    unit, start = OUTCOMES[case.family][1:]
    place = np.array([SCHOOLS.index(level) for level in data["school"]])
    up = place[:, None] > np.arange(len(SCHOOLS) - 1)
    x = np.column_stack([np.ones(NUM_RECORDS), (data["age"] - 50.0) / 12.0, up])
    y = data["outcome"] / unit
    gram, cross = x.T @ x, x.T @ y
    short = x.astype(np.float32).T

    def log_density(points):
        coefficients = np.concatenate(
            [points[:, :2], points[:, 2:3] * shares_of(points[:, 3:6])], axis=1
        )
        linear = coefficients @ cross
        prior = -0.5 * np.square(points[:, 3:6] / SHARE_SD).sum(axis=1)
        if case.family == "poisson":
            means = np.exp(coefficients.astype(np.float32) @ short)
            return prior + linear - means.sum(axis=1, dtype=np.float64)
        square = np.einsum("ni,ij,nj->n", coefficients, gram, coefficients)
        rest = y @ y - 2.0 * linear + square
        return prior - NUM_RECORDS * points[:, 6] - 0.5 * rest / np.exp(2.0 * points[:, 6])

    about = [start, 0.2, SIZE[case.family], 0.0, 0.0, 0.0]
    is_normal = case.family == "normal"
    generator = np.random.default_rng([case.seed + number, 2])
    settings = {"num_chains": 50, "num_steps": 4000 if is_normal else 2000}
    points = evolved(log_density, np.array(about + [0.0] * is_normal), generator, **settings)
    shares = shares_of(points[:, 3:6])
    draws = {
        "mo(school)": unit * points[:, 2],
        "age": unit * points[:, 1] / 12.0,
        "Intercept": unit * (points[:, 0] - points[:, 1] * 50.0 / 12.0),
        **{f"share(mo(school)[{level}])": shares[:, at] for at, level in enumerate(STEPS)},
    }
    if is_normal:
        draws["sigma"] = unit * np.exp(points[:, 6])
    return {"figures": figures(draws, truth)}


def kind_of(label):
    """Returns what a number is, such that cells count all alike together."""
    if label.startswith("share("):
        return label
    for start, kind in (("1|", "intercepts of levels"), ("age|", "slopes of levels")):
        if label.startswith(start):
            return kind
    return "whole slopes of levels" if label.startswith("age in ") else label


def summarised(name, epsilon, rows, peers=()):
    """Returns the figures of one cell; errors are over data sets, whose numbers go together."""
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
        chosen = [labels[place] for place in own]
        if peers and chosen[0] in peers[0]["figures"]:
            other = np.array([[row["figures"][label] for label in chosen] for row in peers])
            holds = (other[:, :, 1] <= other[:, :, 0]) & (other[:, :, 0] <= other[:, :, 2])
            across = other[:, :, 2] - other[:, :, 1]
            away = (values[:, own, 3] - other[:, :, 3]) / (across / (2.0 * 1.645))
            numbers[kind] |= {
                "coverage_without_privacy": round(float(holds.mean()), 4),
                "width_over": round(float(np.median(width / across)), 3),
                "mean_from_it_in_its_sd": round(float(away.mean()), 3),
                "mean_from_it_error": round(float(away.mean(axis=1).std() / len(rows) ** 0.5), 3),
            }
    return {
        "case": name,
        **CASES[name]._asdict(),
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
        "| case | epsilon | sets | number | coverage of 90 % | without privacy | width, median "
        "(range) | over that without privacy | mean beyond its, in its sd | warned |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for cell in cells:
        start = f"| `{cell['case']}` | {cell['epsilon']:g} | {cell['sets']} |"
        for label, row in cell["numbers"].items():
            low, middle, high = row["width"]
            names = ("coverage_without_privacy", "width_over", "mean_from_it_in_its_sd")
            peer, ratio, away = (f"{row[each]:.2f}" if each in row else "" for each in names)
            lines.append(
                f"{start} {label.replace('|', chr(92) + '|')} | {row['coverage']:.2f} ± "
                f"{row['coverage_error']:.2f} | {peer} | {middle:.3g} ({low:.3g} to {high:.3g}) | "
                f"{ratio} | {away} | {cell['warned']} |"
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

    def row(self, number, kind, make):
        """Returns the row of a fit, which `make` makes if there is none."""
        rows = self._known.setdefault(kind, {})
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
        model = (*asked(name)[:2], CASES[name].num)
        if model not in models:
            models[model] = Fits(name)
        row = models[model].row(name, number, epsilon)
        print(name, number, f"{epsilon:g}", row["seconds"], row["warnings"], flush=True)
        return row

    for number in range(num):
        for (name, epsilon), found in rows.items():
            made = functools.partial(make, name, number, epsilon)
            found.append(files[name].row(number, f"{epsilon:g}", made))
    peers = {name: [] for name in names}
    for name, found in peers.items():
        alone = steps_without_privacy if CASES[name].correlation is None else without_privacy
        for number in range(num):
            made = functools.partial(alone, name, number)
            found.append(files[name].row(number, "without privacy", made))
    return [summarised(*cell, found, peers[cell[0]]) for cell, found in rows.items()]


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
    settings = {"delta": DELTA, "level": LEVEL}
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
