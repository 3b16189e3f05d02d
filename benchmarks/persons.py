"""Persons with several rows: coverage and width for longitudinal models, against group privacy.

    python benchmarks/persons.py [--quick] [--num 100] [--families linear] [--persons 5000] [--rows 20]

Simulated data sets of persons with 1 to m rows and an intercept each, logistic and linear. Four fits of each set: with
`unit_ids`; the same fit priced by group privacy, with the noise of epsilon / m; a fit of rows at epsilon / m, by the model of
independent rows, since rows cannot have a person's intercept (linear: the same estimand, but intervals that are too narrow); and the
posterior without privacy, by Newton's method and the curvature at the mode. Writes `docs/figures/persons.json` and a picture; a second
run goes on where the first one stopped. With `--quick` 1,500 persons of at most 8 rows.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import math
import pathlib
import warnings

import numpy as np
from harness import write_study

import tfp_dpvi as dpvi
from tfp_dpvi._tf import tf, tfd
from tfp_dpvi.bayes.model import BayesianModel
from tfp_dpvi.data import make_records, make_units
from tfp_dpvi.rehearsal.replicates import Replicates, centred

WEIGHTS = np.array([0.3, -0.5, 0.8, 0.2])
SCALES = {"sd": 1.0, "scale": 0.7}
DELTA = 1e-6
LEVEL = 0.9
FAMILIES = ("linear", "logistic")
EPSILONS = (1.0, 3.0)
NUM_POINTS = 15
# Data sets of a cell that are compared with group privacy.
NUM_COMPARED = 4


def simulate(family, num, most, seed):
    """Returns inputs, outcomes and persons of a data set: an intercept, a covariate of the person, two of rows."""
    rng = np.random.default_rng([seed, FAMILIES.index(family)])
    # As many rows in each data set, so that one compiled step serves all.
    ids = np.repeat(np.arange(num), rng.permutation(np.arange(num) % most) + 1)
    x = rng.normal(size=(len(ids), len(WEIGHTS)))
    x[:, 0] = 1.0
    x[:, 1] = rng.normal(size=num)[ids]
    score = x @ WEIGHTS + SCALES["sd"] * rng.normal(size=num)[ids]
    if family == "linear":
        y = score + SCALES["scale"] * rng.normal(size=len(ids))
    else:
        y = rng.random(len(ids)) < 1.0 / (1.0 + np.exp(-score))
    return x.astype("float32"), y.astype("float32"), ids


def prior(family, shared):
    parts = {"w": tfd.Sample(tfd.Normal(0.0, 2.0), len(WEIGHTS))}
    if family == "linear":
        parts["scale"] = tfd.HalfNormal(2.0)
    if shared:
        parts["sd"] = tfd.HalfNormal(2.0)
    return tfd.JointDistributionNamed(parts)


def likelihood(family, shared):
    def of_rows(params, x):
        score = tf.linalg.matvec(x, params["w"])
        if family == "linear":
            if shared:
                return dpvi.local.unit_normal(score, params["scale"], params["sd"])
            return tfd.Normal(score, params["scale"])
        if shared:
            return dpvi.local.unit_quadrature(
                lambda z: tfd.Bernoulli(logits=score[:, None] + params["sd"] * z, dtype=tf.float32),
                num_points=NUM_POINTS,
            )
        return tfd.Bernoulli(logits=score, dtype=tf.float32)

    return of_rows


def true_values(names):
    """The truth by entry; scales as logarithms."""
    scales = {name: math.log(value) for name, value in SCALES.items()}
    return {name: WEIGHTS[int(name[2])] if name[0] == "w" else scales[name] for name in names}


def grouped(data, most):
    """Returns inputs and outcomes of persons."""
    x, y, ids = data
    records = make_records(x, y, None, dtype=np.dtype("float32"), validate=True)
    persons = records.by_person(make_units(ids, records.num, most, "first"))
    return persons.x, persons.y


@functools.cache
def method(family, epsilon, num, most, *, persons, group):
    """Returns compiled fits to data sets of `num` persons.

    Args:
      family: "linear" or "logistic".
      epsilon: The budget of a person.
      num: The number of persons.
      most: The largest number m of rows of a person.
      persons: Whether a record is a person, or a row.
      group: Whether the budget is divided by m, as group privacy needs it.
    """
    delta = DELTA
    if group:
        # m rows at epsilon / m are (epsilon, delta (e^epsilon - 1) / (e^(epsilon / m) - 1)).
        delta *= math.expm1(epsilon / most) / math.expm1(epsilon)
        epsilon /= most
    data, public = (simulate(family, num, most, seed) for seed in (10_000, 10_001))
    (x, y), (public_x, _) = (
        (grouped(data, most), grouped(public, most)) if persons else (data[:2], public[:2])
    )
    shared = persons
    fits = centred(
        prior(family, shared),
        likelihood(family, shared),
        x,
        y,
        public_x,
        epsilon=epsilon,
        delta=delta,
    )
    return Replicates(fits, num_draws=4000)


def private(family, data, epsilon, num, most, seed, *, persons, group):
    """Returns means, widths of intervals and whether they cover, by entry; and seconds and warnings."""
    fits = method(family, epsilon, num, most, persons=persons, group=group)
    x, y = grouped(data, most) if persons else data[:2]
    fit = fits.fit(x, y, seed)
    names = [name.replace("log ", "") for name in fits.coordinates.names]
    truth = true_values(names)
    tails = [(1.0 - LEVEL) / 2.0, (1.0 + LEVEL) / 2.0]
    result = {}
    for place, name in enumerate(names):
        low, high = np.quantile(fit.draws[:, place], tails)
        covers = bool(low <= truth[name] <= high)
        mean = float(fit.draws[:, place].mean())
        result[name] = {"mean": mean, "width": high - low, "covers": covers}
    return {"entries": result, "seconds": fit.seconds, "warnings": fit.warnings}


def without_privacy(family, data, most):
    """Returns widths and coverage of the normal approximation at the mode, as `private`."""
    bayes = BayesianModel(prior(family, True), likelihood(family, True))
    x, y = tf.nest.map_structure(tf.constant, grouped(data, most))
    names = [f"w[{i}]" for i in range(len(WEIGHTS))]
    names += ["scale", "sd"] if family == "linear" else ["sd"]
    theta = np.array([true_values(names)[name] for name in names])

    @tf.function(autograph=False)
    def derivatives(vector):
        with tf.GradientTape() as outer:
            outer.watch(vector)
            with tf.GradientTape() as tape:
                tape.watch(vector)
                params = {"w": vector[: len(WEIGHTS)]}
                for place, name in enumerate(names[len(WEIGHTS) :], len(WEIGHTS)):
                    params[name] = tf.exp(vector[place])
                logs = bayes.log_prob(params, x, y)
                jacobian = tf.reduce_sum(vector[len(WEIGHTS) :])
                total = tf.reduce_sum(logs) + bayes.prior.log_prob(params) + jacobian
            gradient = tape.gradient(total, vector)
        return gradient, outer.jacobian(gradient, vector, experimental_use_pfor=False)

    for _ in range(8):
        gradient, hessian = derivatives(tf.constant(theta, tf.float32))
        theta = theta - np.linalg.solve(hessian.numpy().astype(float), gradient.numpy())
    sd = np.sqrt(np.diag(np.linalg.inv(-hessian.numpy().astype(float))))
    truth, half = true_values(names), 1.645
    return {
        "entries": {
            name: {
                "mean": mean,
                "width": 2.0 * half * each,
                "covers": bool(abs(mean - truth[name]) < half * each),
            }
            for name, mean, each in zip(names, theta, sd, strict=True)
        }
    }


def one_set(family, epsilon, num, most, seed):
    data = simulate(family, num, most, seed)
    arguments = (family, data, epsilon, num, most, seed)
    found = {
        "family": family,
        "epsilon": epsilon,
        "seed": seed,
        "persons": private(*arguments, persons=True, group=False),
        "exact": without_privacy(family, data, most),
    }
    if seed < NUM_COMPARED:
        found["group"] = private(*arguments, persons=True, group=True)
        found["rows"] = private(*arguments, persons=False, group=True)
    return found


def summarise(sets):
    """Returns a row each cell: coverage, its worst entry, and widths over those without privacy."""
    rows = []
    for family in FAMILIES:
        for epsilon in EPSILONS:
            cell = [one for one in sets if one["family"] == family and one["epsilon"] == epsilon]
            if not cell:
                continue
            names = list(cell[0]["persons"]["entries"])
            covers = np.array(
                [[one["persons"]["entries"][name]["covers"] for name in names] for one in cell]
            )
            exact = np.array(
                [[one["exact"]["entries"][name]["covers"] for name in names] for one in cell]
            )

            def widths(kind, names=names, cell=cell):
                return np.array([[one[kind]["entries"][n]["width"] for n in names] for one in cell])

            compared = [one for one in cell if "group" in one]
            fixed = [name for name in names if name[0] == "w"]
            of_rows = [
                [one["rows"]["entries"][name]["covers"] for name in fixed] for one in compared
            ]
            rows.append(
                {
                    "family": family,
                    "epsilon": epsilon,
                    "sets": len(cell),
                    "coverage": covers.mean(),
                    "coverage by entry": dict(zip(names, covers.mean(axis=0), strict=True)),
                    "coverage without privacy": exact.mean(),
                    "width over that without privacy": dict(
                        zip(
                            names,
                            np.median(widths("persons") / widths("exact"), axis=0),
                            strict=True,
                        )
                    ),
                    "width over group privacy": float(
                        np.median(
                            widths("persons", names, compared) / widths("group", names, compared)
                        )
                    ),
                    "width over independent rows at epsilon / m, fixed effects": float(
                        np.median(
                            widths("persons", fixed, compared) / widths("rows", fixed, compared)
                        )
                    ),
                    "coverage of independent rows, fixed effects": float(np.mean(of_rows)),
                    "fits with a warning": float(
                        np.mean([bool(one["persons"]["warnings"]) for one in cell])
                    ),
                    "seconds of a fit": float(
                        np.median([one["persons"]["seconds"] for one in cell])
                    ),
                }
            )
    return rows


def draw(rows, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4))
    labels = [f"{row['family']}\nepsilon {row['epsilon']:g}" for row in rows]
    places = np.arange(len(rows))
    axes[0].bar(places, [row["coverage"] for row in rows], color="#4878a8")
    axes[0].axhline(LEVEL, color="black", linewidth=0.8)
    axes[0].set_ylim(0.5, 1.0)
    axes[0].set_title(f"coverage of {LEVEL:.0%} intervals")
    over = [np.mean(list(row["width over that without privacy"].values())) for row in rows]
    group = [width / row["width over group privacy"] for width, row in zip(over, rows, strict=True)]
    axes[1].bar(places - 0.2, over, 0.4, label="persons", color="#4878a8")
    axes[1].bar(places + 0.2, group, 0.4, label="group privacy", color="#c08040")
    axes[1].set_yscale("log")
    axes[1].set_title("width over the posterior without privacy")
    axes[1].legend()
    for ax in axes:
        ax.set_xticks(places, labels)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--num", type=int, help="data sets a cell: 100, or 20 with --quick")
    parser.add_argument("--families", nargs="*", default=list(FAMILIES), choices=FAMILIES)
    parser.add_argument("--persons", type=int)
    parser.add_argument("--rows", type=int, help="the largest number of rows of a person")
    parser.add_argument(
        "--output", type=pathlib.Path, default=pathlib.Path("docs/figures/persons.json")
    )
    options = parser.parse_args(arguments)
    num = options.num or (20 if options.quick else 100)
    persons = options.persons or (1500 if options.quick else 5000)
    most = options.rows or (8 if options.quick else 20)
    logging.getLogger("tfp_dpvi").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=UserWarning)
    settings = {"persons": persons, "rows": most, "delta": DELTA, "level": LEVEL}
    sets = []
    if options.output.exists():
        before = json.loads(options.output.read_text())
        sets = before["sets"] if before["settings"] == settings else []
    done = {(one["family"], one["epsilon"], one["seed"]) for one in sets}
    for seed in range(num):
        for family in options.families:
            for epsilon in EPSILONS:
                if (family, epsilon, seed) in done:
                    continue
                sets.append(one_set(family, epsilon, persons, most, seed))
                write(options, arguments, settings, sets)
                print(family, epsilon, seed, round(sets[-1]["persons"]["seconds"], 1), flush=True)
    for row in summarise(sets):
        print(json.dumps(row))


def write(options, arguments, settings, sets):
    rows = summarise(sets)
    write_study("persons.py", options.output, arguments, settings, rows, sets)
    draw(rows, options.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
