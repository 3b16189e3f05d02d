"""Private checks: false alarms where the model is right, power where it is not, over N.

    python benchmarks/private_checks.py [--quick] [--only null] [--num 100]

Data sets are simulated and fitted privately, as `compile` without an optimizer does (`replicates.py`), and checked by one release of
epsilon 0.2 as `DPVI.check` makes it, with one declared column (none for labels). Where the model is right, the share of data sets in which any test
fails at the level .05 is the rate of false alarms; each contribution is released ten times with fresh noise. Faults: counts of negative
binomial with size 1.5 under Poisson; a square of the declared column that explains 2 % of the outcome's variance; t outcomes with 3
degrees of freedom under normal; 5 % of labels flipped, where logits have a standard deviation of 2 or 3. Writes
`docs/figures/private_checks.json` and a picture; a second run goes on where the first one stopped.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import math
import pathlib
import re
import sys

import numpy as np
from dp_accounting import NeighboringRelation
from harness import code_hash, command, commit, machine, versions

from tfp_dpvi import _random
from tfp_dpvi._tf import tf, tfd
from tfp_dpvi.bayes.model import BayesianModel
from tfp_dpvi.checking.declared import declare, kind_of_outcome
from tfp_dpvi.checking.judge import judge
from tfp_dpvi.checking.null import Estimate, variance_factor
from tfp_dpvi.checking.outcomes import Predictor, draws_of
from tfp_dpvi.checking.release import Release, Subjects, contributions
from tfp_dpvi.rehearsal.replicates import Replicates, centred

DELTA = 1e-5
CHECK_EPSILON = 0.2
LEVEL = 0.05
EDGES = {1: [-1.0, -0.3, 0.3, 1.0]}
NUM_NOISES = 10
WEIGHTS = {"normal": [0.5, 0.7, -0.4, 0.2], "poisson": [0.3, 0.5, -0.3, 0.2]}
# By cell: the family, the fault, the standard deviation of the logits, epsilon of the fit, correlation.
CELLS = {
    "null normal": ("normal", None, 0.0, 1.0, 0.0),
    "null poisson": ("poisson", None, 0.0, 1.0, 0.0),
    "null logistic": ("logistic", None, 2.0, 1.0, 0.0),
    "null normal, epsilon .3": ("normal", None, 0.0, 0.3, 0.0),
    "null logistic, epsilon .3": ("logistic", None, 2.0, 0.3, 0.0),
    "null poisson, correlation .7": ("poisson", None, 0.0, 1.0, 0.7),
    "negative binomial 1.5 under Poisson": ("poisson", "overdispersed", 0.0, 1.0, 0.0),
    "missing square, 2 %": ("normal", "square", 0.0, 1.0, 0.0),
    "t3 under normal": ("normal", "tails", 0.0, 1.0, 0.0),
    "5 % label noise, logits of sd 2": ("logistic", "labels", 2.0, 1.0, 0.0),
    "5 % label noise, logits of sd 3": ("logistic", "labels", 3.0, 1.0, 0.0),
}
SIZES = (1000, 2000, 5000, 10_000, 20_000)
FIGURES = pathlib.Path(__file__).resolve().parents[1] / "docs" / "figures"


def weights_of(family, logit_sd):
    if family != "logistic":
        return np.array(WEIGHTS[family])
    slopes = np.array([0.8, -0.5, math.sqrt(1.0 - 0.89)])
    return np.concatenate([[0.3], logit_sd * slopes])


def simulate(cell, num, seed):
    """Returns inputs and outcomes of a data set."""
    family, fault, logit_sd, _, correlation = CELLS[cell]
    rng = np.random.default_rng([seed, num, list(CELLS).index(cell)])
    shared = rng.normal(size=[num, 1])
    inner = math.sqrt(1.0 - correlation) * rng.normal(size=[num, 3])
    x = np.concatenate([np.ones([num, 1]), inner + math.sqrt(correlation) * shared], axis=1)
    score = x @ weights_of(family, logit_sd)
    if family == "poisson":
        mean = np.exp(score)
        if fault == "overdispersed":
            mean = mean * rng.gamma(1.5, 1.0 / 1.5, size=num)
        y = rng.poisson(mean)
    elif family == "logistic":
        y = rng.random(num) < 1.0 / (1.0 + np.exp(-score))
        if fault == "labels":
            y = y ^ (rng.random(num) < 0.05)
    else:
        error = rng.standard_t(3, size=num) if fault == "tails" else rng.normal(size=num)
        y = score + error
        if fault == "square":
            # The outcome's variance is 1 + .69 without it; that of the square is 2.
            y = y + math.sqrt(0.02 * 1.69 / 2.0) * (x[:, 1] ** 2 - 1.0)
    return x.astype("float32"), y.astype("float32")


def prior(family):
    parts = {"w": tfd.Sample(tfd.Normal(0.0, 2.0), 4)}
    if family == "normal":
        parts["scale"] = tfd.LogNormal(0.0, 1.0)
    return tfd.JointDistributionNamed(parts)


def likelihood(family):
    def of_rows(params, x):
        score = tf.linalg.matvec(x, params["w"])
        if family == "poisson":
            return tfd.Poisson(log_rate=score)
        if family == "logistic":
            return tfd.Bernoulli(logits=score, dtype=tf.float32)
        return tfd.Normal(score, params["scale"])

    return of_rows


@functools.lru_cache(maxsize=1)
def fits_of(cell, num):
    """Returns compiled fits to data sets of a cell, and the predictor of its checks."""
    family, _, _, epsilon, _ = CELLS[cell]
    x, y = simulate(cell, num, 10_000)
    public = np.random.default_rng(1).normal(size=[2000, 4]).astype("float32")
    public[:, 0] = 1.0
    made = prior(family), likelihood(family)
    method = centred(*made, x, y, public, epsilon=epsilon, delta=DELTA)
    predictor = Predictor(BayesianModel(*made), is_binary=family == "logistic")
    return Replicates(method, num_draws=100), predictor


def check(cell, num, seed):
    """Returns the p-values and verdicts of the tests, of a data set and its fit, for each noise."""
    replicates, predictor = fits_of(cell, num)
    x, y = simulate(cell, num, seed)
    calibrated = replicates.fit(x, y, seed).calibrated
    if calibrated is None:
        return {"failed": [], "words": [], "factor": None}
    model = BayesianModel(prior(CELLS[cell][0]), likelihood(CELLS[cell][0]))
    outcome = kind_of_outcome(model, calibrated.distribution, x)
    declared = declare(outcome, x, None if "label" in cell else EDGES, None, LEVEL)
    key = _random.new_key(seed)
    drawn = draws_of(calibrated.distribution, seed)
    rows = contributions(predictor, drawn, declared, Subjects(x, y), key)
    draws = replicates.coordinates.prior_draws(1000)
    estimate = Estimate(
        calibrated.shares, np.diag(calibrated.mixture.covariance), draws.var(axis=0)
    )
    factor = variance_factor(estimate, same_records=True)
    found = {"failed": [], "words": [], "by_test": [], "factor": factor}
    plan = Release.calibrated(
        declared,
        epsilon=CHECK_EPSILON,
        delta=DELTA,
        num_records=num,
        relation=NeighboringRelation.ADD_OR_REMOVE_ONE,
    ).plan
    for number in range(NUM_NOISES):
        release = Release(plan, seed * NUM_NOISES + number)
        result = judge(
            declared,
            release.noisy_sum(rows),
            deviation=release.plan.deviation,
            factor=factor,
            num_records=num,
            epsilon=CHECK_EPSILON,
            delta=DELTA,
        )
        found["failed"].append(not result.passed)
        found["by_test"].append([test.p_value <= LEVEL for test in result.tests])
        found["words"] += result.verdict[:1]
    return found


def summary(sets):
    """Returns the share of releases in which a test failed, with its standard error over data sets."""
    shares = np.array([np.mean(each["failed"]) for each in sets if each["failed"]])
    tests = np.concatenate([each["by_test"] for each in sets if each["failed"]])
    words = [word for each in sets for word in each["words"]]
    common = max(set(words), key=words.count) if words else ""
    return {
        "data_sets": len(shares),
        "rate": float(shares.mean()),
        "error": float(shares.std() / math.sqrt(len(shares))),
        "by_test_at_level": tests.mean(axis=0).tolist(),
        "most_common_verdict": common,
        "verdicts_alike": words.count(common) / max(len(words), 1),
        "largest_factor": max(each["factor"] for each in sets if each["failed"]),
    }


def plot(table, path):
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for cell, by_size in table.items():
        ax = axes[0] if cell.startswith("null") else axes[1]
        sizes = sorted(map(int, by_size))
        rates = [by_size[str(size)]["rate"] for size in sizes]
        errors = [2.0 * by_size[str(size)]["error"] for size in sizes]
        ax.errorbar(sizes, rates, errors, marker="o", capsize=3, label=cell)
    for ax, title, line in zip(
        axes, ("false alarms", "power, check at epsilon 0.2"), (LEVEL, 0.8), strict=True
    ):
        ax.axhline(line, color="0.5", lw=0.8, ls="--")
        ax.set_xscale("log")
        ax.set_xlabel("records")
        ax.set_title(title)
        if ax.get_legend_handles_labels()[0]:
            ax.legend(fontsize=7)
    axes[0].set_ylim(0.0, 0.12)
    axes[1].set_ylim(0.0, 1.03)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="two data sets of 1,000 records each")
    parser.add_argument("--only", default="", help="cells whose names contain this")
    parser.add_argument("--num", type=int, default=100, help="data sets of a cell")
    parser.add_argument("--sizes", type=int, nargs="*", default=list(SIZES))
    parser.add_argument("--folder", type=pathlib.Path, default=FIGURES)
    options = parser.parse_args(arguments)
    logging.getLogger("tfp_dpvi").setLevel(logging.ERROR)
    path = options.folder / "private_checks.json"
    done = json.loads(path.read_text())["sets"] if path.exists() else {}
    sizes = [1000] if options.quick else options.sizes
    num_sets = 2 if options.quick else options.num
    for cell in CELLS:
        for size in sizes if options.only in cell else ():
            sets = done.setdefault(cell, {}).setdefault(str(size), [])
            while len(sets) < num_sets:
                sets.append(check(cell, size, len(sets)))
            write(path, done, arguments)
            print(cell, size, json.dumps(summary(sets)), flush=True)


def write(path, done, arguments):
    """Writes the results so far, and the picture."""
    table = {
        cell: {size: summary(sets) for size, sets in by_size.items() if sets}
        for cell, by_size in done.items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    shown = command("private_checks.py", sys.argv[1:] if arguments is None else arguments)
    shown = re.sub(r" --folder \S+", "", shown)
    result = {
        "command": shown,
        "machine": machine(),
        "versions": versions(tensorflow="tensorflow", tfp="tensorflow-probability"),
        "commit": commit(),
        "code": code_hash(),
        "settings": {"epsilon": CHECK_EPSILON, "delta": DELTA, "level": LEVEL},
        "table": table,
        "sets": done,
    }
    path.write_text(json.dumps(result) + "\n")
    plot({cell: rows for cell, rows in table.items() if rows}, path.with_suffix(".png"))


if __name__ == "__main__":
    main()
