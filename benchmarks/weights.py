"""Survey weights: coverage of fits to weighted samples whose inclusion depends on outcomes.

    python benchmarks/weights.py [--quick] [--num 40] [--areas 6] [--adult 20] [--first 0]

Three studies. *Logistic*: samples of 20,000 from populations of 200,000, each person included with probability proportional to 1 / w,
with weights w from 1 to 20 that depend on the outcome; intervals against the fit to the whole population, beside the same fit without
weights. *Areas*: shares of 50 areas of such a population, by `dpvi.regression` with an effect of each area and
`Regression.population`. *Adult*: a logistic regression weighted by fnlwgt, intervals against the weighted fit without privacy, over
draws of the noise. Writes `docs/figures/weights.json` and a picture; a second run goes on where the first one stopped.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import logging
import pathlib
import time
import warnings

import numpy as np
from harness import write_study

import tfp_dpvi as dpvi
from tfp_dpvi._tf import tf, tfd
from tfp_dpvi.rehearsal.replicates import Replicates, centred

DELTA = 1e-6
LEVEL = 0.9
# Data sets of a cell that are also fitted without weights.
NUM_COMPARED = 8
EPSILONS = (1.0, 3.0)
TRUTH = np.array([-1.0, 0.6, -0.5, 0.3])
MOST = 20.0
NUM_AREAS = 50
ADULT = ("age", "education-num", "hours-per-week", "sex", "capital-gain")
MOST_ADULT = 1.5e6


def newton(x, y, weights):
    """The weighted logistic fit without privacy: coefficients and design-based standard errors."""
    theta = np.zeros(x.shape[1])
    for _ in range(25):
        mean = 1.0 / (1.0 + np.exp(-x @ theta))
        slope = (x * (weights * mean * (1.0 - mean))[:, None]).T @ x
        theta = theta + np.linalg.solve(slope, x.T @ (weights * (y - mean)))
    scores = x * (weights * (y - mean))[:, None]
    inverse = np.linalg.inv(slope)
    return theta, np.sqrt(np.diag(inverse @ (scores.T @ scores) @ inverse))


def included(weights, num, rng):
    """The numbers of so many persons, each included with probability proportional to 1 / w."""
    rates = 1.05 * num / weights / np.sum(1.0 / weights)
    chosen = np.flatnonzero(rng.random(len(weights)) < rates)
    return rng.permutation(chosen)[:num]


def weights_of(y, tilt, rng):
    """Weights from 1 to 20: persons with an outcome of 1 are oversampled, the more the larger `tilt`."""
    log_weights = np.where(y == 1, -1.2, 1.0) * tilt + 0.5 * rng.normal(size=len(y))
    return np.clip(np.exp(1.5 + log_weights), 1.0, MOST)


# ---------------------------------------------------------------------- logistic


def population(num, seed, effect=0.0):
    rng = np.random.default_rng([seed, 1])
    x = rng.normal(size=(num, len(TRUTH)))
    x[:, 0] = 1.0
    y = (rng.random(num) < 1.0 / (1.0 + np.exp(-x @ TRUTH - effect))).astype(float)
    return x, y, weights_of(y, 1.0 + x[:, 1:] @ [0.5, 0.4, -0.4], rng)


def logistic(size):
    prior = tfd.JointDistributionNamed({"w": tfd.Sample(tfd.Normal(0.0, 3.0), size)})

    def likelihood(params, x):
        return tfd.Bernoulli(logits=tf.linalg.matvec(x, params["w"]), dtype=tf.float32)

    return prior, likelihood


@functools.cache
def method(num, size, epsilon, most):
    public = np.random.default_rng(9).normal(size=(600, size))
    public[:, 0] = 1.0
    zeros = np.zeros([num, size], "float32")
    arguments = (*logistic(size), zeros, zeros[:, 0], public.astype("float32"))
    fits = centred(*arguments, epsilon=epsilon, delta=DELTA, max_weight=most)
    return Replicates(fits, num_draws=4000)


def interval(fits, x, y, seed, weights):
    fit = fits.fit(x.astype("float32"), y.astype("float32"), seed, weights=weights)
    tail = (1.0 - LEVEL) / 2.0
    return fit, *np.quantile(fit.draws, [tail, 1.0 - tail], axis=0)


def one_logistic(num, epsilon, seed, number):
    x, y, weights = population(10 * num, seed)
    census, _ = newton(x, y, np.ones(len(y)))
    chosen = included(weights, num, np.random.default_rng([seed, 2]))
    x, y, weights = x[chosen], y[chosen], weights[chosen].astype("float32")
    exact, sd = newton(x, y, weights)
    fit, low, high = interval(method(num, len(TRUTH), epsilon, MOST), x, y, seed, weights=weights)
    other = {}
    if number < NUM_COMPARED:
        plain = method(num, len(TRUTH), epsilon, None)
        _, other_low, other_high = interval(plain, x, y, seed, None)
        inside = (other_low < census) & (census < other_high)
        other["covers without weights"] = inside.tolist()
    checks = fit.calibrated.checks
    return {
        "study": "logistic",
        "epsilon": epsilon,
        "seed": seed,
        "covers": ((low < census) & (census < high)).tolist(),
        "z": ((fit.draws.mean(axis=0) - census) / fit.draws.std(axis=0)).tolist(),
        **other,
        "covers without privacy": (np.abs(exact - census) < 1.645 * sd).tolist(),
        "width over that without privacy": ((high - low) / (2.0 * 1.645 * sd)).tolist(),
        "share cut": [checks.cut, checks.cut_noise],
        "warnings": fit.warnings,
        "seconds": fit.seconds,
    }


# ---------------------------------------------------------------------- Adult


@functools.cache
def adult():
    from data import load_adult

    data = load_adult()
    columns = [data.feature_names.index(name) for name in ADULT]
    x = data.x[:32561].astype(float)
    weights = x[:, data.feature_names.index("fnlwgt")]
    x = x[:, columns]
    x[:, -1] = np.log1p(x[:, -1]) / 3.0
    # Round public numbers, of no record: an age of 40 +- 15, 10 years of education, 40 hours.
    x = (x - [40.0, 10.0, 40.0, 0.5, 0.3]) / [15.0, 2.5, 12.0, 0.5, 1.0]
    return np.concatenate([np.ones([len(x), 1]), x], axis=1), data.y[:32561].astype(float), weights


def one_adult(epsilon, seed, number):
    del number
    x, y, weights = adult()
    exact, sd = newton(x, y, weights)
    fits = method(len(x), x.shape[1], epsilon, MOST_ADULT)
    fit, low, high = interval(fits, x, y, seed, weights.astype("float32"))
    checks = fit.calibrated.checks
    return {
        "study": "adult",
        "epsilon": epsilon,
        "seed": seed,
        "covers": ((low < exact) & (exact < high)).tolist(),
        "width over that without privacy": ((high - low) / (2.0 * 1.645 * sd)).tolist(),
        "share cut": [checks.cut, checks.cut_noise],
        "warnings": fit.warnings,
        "seconds": fit.seconds,
    }


# ---------------------------------------------------------------------- small areas


def one_areas(num, epsilon, seed, number):
    import pandas as pd

    rng = np.random.default_rng([seed, 3])
    size = 10 * num
    names = [f"area{number:02d}" for number in range(NUM_AREAS)]
    area = rng.choice(NUM_AREAS, size, p=rng.dirichlet(np.full(NUM_AREAS, 6.0)))
    age = rng.choice([25, 40, 55, 70], size)
    score = -0.5 + 0.02 * (age - 47) + rng.normal(0.0, 0.5, NUM_AREAS)[area]
    y = (rng.random(size) < 1.0 / (1.0 + np.exp(-score))).astype(int)
    weights = weights_of(y, np.ones(size), rng)
    frame = pd.DataFrame({"area": np.array(names)[area], "age": age, "y": y, "w": weights})
    counts = frame.groupby(["area", "age"]).size().reset_index(name="count")
    truth = frame.groupby("area")["y"].mean()
    sample = frame.iloc[included(weights, num, rng)]
    schema = {
        "y": {"type": "binary"},
        "age": {"type": "integer", "lower": 18, "upper": 90, "typical": [47, 17]},
        "area": {"type": "categorical", "categories": names},
        "w": {"type": "continuous", "lower": 1, "upper": MOST},
    }
    begun = time.perf_counter()
    found = {"study": "areas", "epsilon": epsilon, "seed": seed}
    for name, column in (("covers", "w"), ("covers without weights", None)):
        if column is None and number > 0:
            continue
        result = dpvi.regression(
            "y ~ age + (1 | area)",
            sample,
            "bernoulli",
            schema,
            epsilon=epsilon,
            delta=DELTA,
            weights=column,
            seed=seed,
        )
        table = result.population(counts, by="area", level=LEVEL)
        low, high = table.iloc[:, 4], table.iloc[:, 5]
        share = truth.loc[table["area"]].to_numpy()
        found[name] = ((low < share) & (share < high)).tolist()
        if column:
            found["width"] = float(np.median(high - low))
            found["error"] = float(np.median(np.abs(table["estimate"] - share)))
            found["warnings"] = result.warnings
            checks = result.model.posterior_summary().checks
            found["share cut"] = [checks.cut, checks.cut_noise]
            found["seconds"] = time.perf_counter() - begun
    return found


# ---------------------------------------------------------------------- all


def summarise(sets):
    rows = []
    for study in ("logistic", "areas", "adult"):
        for epsilon in EPSILONS:
            cell = [one for one in sets if one["study"] == study and one["epsilon"] == epsilon]
            if not cell:
                continue
            row = {"study": study, "epsilon": epsilon, "sets": len(cell)}
            for name in ("covers", "covers without weights", "covers without privacy"):
                if name in cell[0]:
                    row[name] = float(np.mean([one[name] for one in cell if name in one]))
            name = "width over that without privacy"
            if name in cell[0]:
                row[name] = float(np.median([one[name] for one in cell]))
            row["share cut"] = float(np.mean([one["share cut"][0] for one in cell]))
            row["fits with a warning"] = float(np.mean([bool(one["warnings"]) for one in cell]))
            row["seconds of a fit"] = float(np.median([one["seconds"] for one in cell]))
            rows.append(row)
    return rows


def draw(rows, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, ax = plt.subplots(figsize=(8, 3.4))
    places = np.arange(len(rows))
    names = ("covers", "covers without weights", "covers without privacy")
    labels = ("private, weighted", "private, without weights", "weighted, without privacy")
    colors = ("#4878a8", "#c08040", "#909090")
    for number, (name, label, color) in enumerate(zip(names, labels, colors, strict=True)):
        heights = [row.get(name, 0.0) for row in rows]
        ax.bar(places + 0.27 * (number - 1), heights, 0.25, label=label, color=color)
    ax.axhline(LEVEL, color="black", linewidth=0.8)
    ax.set_ylim(0.0, 1.0)
    ax.set_title(f"coverage of {LEVEL:.0%} intervals")
    ax.set_xticks(places, [f"{row['study']}\nepsilon {row['epsilon']:g}" for row in rows])
    ax.legend(loc="lower right", fontsize=8)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def write(options, arguments, settings, sets):
    rows = summarise(sets)
    write_study("weights.py", options.output, arguments, settings, rows, sets)
    draw(rows, options.output.with_suffix(".png"))


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="5,000 records a sample")
    parser.add_argument("--num", type=int, default=40, help="samples of the logistic study")
    parser.add_argument("--areas", type=int, default=4, help="samples of the study of areas")
    parser.add_argument("--adult", type=int, default=20, help="fits of Adult")
    parser.add_argument("--first", type=int, default=0, help="the seed of the first sample")
    parser.add_argument(
        "--output", type=pathlib.Path, default=pathlib.Path("docs/figures/weights.json")
    )
    options = parser.parse_args(arguments)
    num = 5000 if options.quick else 20_000
    logging.getLogger("tfp_dpvi").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=UserWarning)
    settings = {"records": num, "delta": DELTA, "level": LEVEL, "max_weight": MOST}
    sets = []
    if options.output.exists():
        before = json.loads(options.output.read_text())
        sets = before["sets"] if before["settings"] == settings else []
    done = {(one["study"], one["epsilon"], one["seed"]) for one in sets}
    studies = {
        "logistic": (options.num, functools.partial(one_logistic, num)),
        "areas": (options.areas, functools.partial(one_areas, num)),
        "adult": (options.adult, one_adult),
    }
    for study, (count, run) in studies.items():
        for number, epsilon in itertools.product(range(count), EPSILONS):
            seed = options.first + number
            if (study, epsilon, seed) not in done:
                sets.append(run(epsilon, seed, number))
                write(options, arguments, settings, sets)
                print(study, epsilon, seed, np.mean(sets[-1]["covers"]), flush=True)
    for row in summarise(sets):
        print(json.dumps(row))


if __name__ == "__main__":
    main()
