"""Several hospitals and one posterior, beside the fit that pools their records.

    python benchmarks/federated_studies.py [--studies adult coverage regression network damping] [--splits 10] [--quick] [--out FOLDER]
    make studies-federated

Each cell (a study, a way, a division of the records, a schedule, an epsilon, a split) is a line of `federated.jsonl` in the folder; what
is there is not run again. `--summary` prints tables of what is there and draws `federated.png`.

Adult is standardised by the means and standard deviations of all its records, which no budget pays for; it is the same for all ways.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import math
import pathlib
import platform
import time
from typing import Any, NamedTuple

import numpy as np
import scipy.special
import scipy.stats

import tfp_dpvi as dpvi
from tfp_dpvi._tf import tf, tfd
from tfp_dpvi.federated import Asynchronous, Factor, Sequential, Study, Synchronous, simulate
from tfp_dpvi.privacy import FullBatch, PrivacyPlan

DELTA, STEPS, CLIP, RATE = 1e-5, 200, 2.0, 0.05
HOSPITALS = 10
SCHEDULES = {
    "synchronous": Synchronous(rounds=10, damping=0.2),
    "sequential": Sequential(rounds=10),
    "asynchronous": Asynchronous(rounds=10),
    "one round": Synchronous(rounds=1, damping=1.0),
}
DIVISIONS = ("balanced", "by size", "by label")
DAMPED = {
    f"{name}, damping {damping}": dataclasses.replace(SCHEDULES[name], damping=damping)
    for name in ("synchronous", "sequential", "asynchronous")
    for damping in (0.1, 0.2, 0.3, 0.4, 0.5, 1.0)
}

LONG = "synchronous, 40 rounds"  # Of a network: with ten, splits 0 and 1 end 0.4 to 1 nat below the pooled fit.


class Cell(NamedTuple):
    study: str
    way: str  # pooled, worker, messages, fedavg.
    division: str = "balanced"
    schedule: str = "synchronous"
    epsilon: float = 1.0
    split: int = 0


def schedule_of(cell):
    return {**SCHEDULES, **DAMPED, LONG: Synchronous(rounds=40, damping=0.2)}[cell.schedule]


def optimizer(clip=CLIP, noise=None, rate=RATE):
    return dpvi.optimizers.DPKerasAdamOptimizer(
        l2_norm_clip=clip, noise_multiplier=noise, learning_rate=rate
    )


# ---------------------------------------------------------------------------- data


class Split(NamedTuple):
    x: np.ndarray
    y: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray


@functools.cache
def adult_all():
    from data import load_adult

    data = load_adult()
    x = (data.x - data.x.mean(0)) / data.x.std(0)
    return np.concatenate([np.ones((len(x), 1)), x], axis=1).astype(np.float32), data.y


def adult(split):
    x, y = adult_all()
    order = np.random.default_rng(split).permutation(len(x))
    first = int(0.8 * len(x))
    return Split(x[order[:first]], y[order[:first]], x[order[first:]], y[order[first:]])


def divided(y, division, num, rng):
    """Returns the hospital of each record."""
    if division == "balanced":
        return rng.permutation(np.arange(len(y)) % num)
    large = np.arange(num) < num // 2
    if division == "by size":  # Half of the hospitals have 9 times the records of the others.
        return rng.choice(
            num, size=len(y), p=np.where(large, 9.0, 1.0) / np.where(large, 9.0, 1.0).sum()
        )
    # Of each label 19 of 20 records are in one half of the hospitals.
    there = rng.random(len(y)) < np.where(y == 1, 0.95, 0.05)
    return rng.integers(num // 2, size=len(y)) + np.where(there, 0, num // 2)


# ---------------------------------------------------------------------------- logistic regression


def logistic(width, scale=1.0):
    prior = tfd.JointDistributionNamed({"w": tfd.Sample(tfd.Normal(0.0, scale), width)})
    return prior, lambda params, x: tfd.Bernoulli(logits=tf.linalg.matvec(x, params["w"]))


def scores(factor: Factor, data: Split, num_draws=200):
    """Accuracy and mean log-likelihood of the posterior predictive on test records."""
    draws = factor.sample(num_draws, np.random.default_rng(0))
    logits = data.x_test @ draws.T
    signed = np.where(data.y_test[:, None] == 1, logits, -logits)
    log_likelihood = scipy.special.logsumexp(-np.logaddexp(0.0, -signed), axis=1) - math.log(
        num_draws
    )
    accuracy = np.mean((scipy.special.expit(logits).mean(1) > 0.5) == (data.y_test == 1))
    return {"accuracy": float(accuracy), "log_likelihood": float(log_likelihood.mean())}


def pooled_fit(prior, likelihood, x, y, epsilon):
    model = dpvi.DPVI(prior, likelihood, clipping="flat")
    model.compile(optimizer(), epsilon=epsilon, delta=DELTA, jit_compile=False)
    model.fit(x, y, batch_size=len(x), steps_per_epoch=STEPS, verbose=0)
    base = model.posterior_sample(4000, seed=0)
    flat = np.concatenate(
        [np.reshape(part, (4000, -1)) for part in tf.nest.flatten(base)], axis=1
    ).astype(np.float64)
    return Factor.normal(flat.mean(0), flat.var(0))


def study_of(prior, likelihood, cell, schedule, *, clipping="flat", local_steps=None):
    steps = local_steps or STEPS // schedule.rounds
    if cell.way == "messages":
        silent = optimizer(clip=math.inf, noise=0.0)
        shards = {"message_clip": 40.0, "num_shards": 100, "num_hospitals": HOSPITALS}
        return Study(prior, likelihood, silent, local_steps=steps, privacy="messages", **shards)
    return Study(prior, likelihood, optimizer(), local_steps=steps, clipping=clipping)


def federated_fit(prior, likelihood, data, cell, num=HOSPITALS, show=None, **settings):
    schedule = schedule_of(cell)
    where = divided(data.y, cell.division, num, np.random.default_rng(1000 + cell.split))
    study = study_of(prior, likelihood, cell, schedule, **settings)
    hospitals = [(data.x[where == h], data.y[where == h]) for h in range(num)]
    budget = {"epsilon": cell.epsilon, "delta": DELTA, "schedule": schedule, "verbose": 0}
    return simulate(study, hospitals, evaluate=show, **budget)


def fedavg(data, cell, num=HOSPITALS, rounds=10):
    """DP-FedAvg at the level of records: local private steps on a point estimate, and averages by numbers of records."""
    rng = np.random.default_rng()
    where = divided(data.y, cell.division, num, np.random.default_rng(1000 + cell.split))
    plan = PrivacyPlan.calibrate(
        epsilon=cell.epsilon, delta=DELTA, sampling=FullBatch(), num_releases=STEPS
    )
    weights = np.zeros(data.x.shape[1])
    sizes = np.bincount(where, minlength=num)
    for _ in range(rounds):
        results = []
        for h in range(num):
            x, y, w = data.x[where == h], data.y[where == h], weights.copy()
            m = v = np.zeros_like(w)
            for step in range(1, STEPS // rounds + 1):
                gradients = (scipy.special.expit(x @ w) - y)[:, None] * x
                norms = np.linalg.norm(gradients, axis=1, keepdims=True)
                total = (gradients * np.minimum(1.0, CLIP / np.maximum(norms, 1e-30))).sum(0)
                g = (total + rng.normal(scale=CLIP * plan.noise_multiplier, size=len(w))) / len(x)
                m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
                w = w - RATE * (m / (1 - 0.9**step)) / (np.sqrt(v / (1 - 0.999**step)) + 1e-7)
            results.append(w)
        weights = np.average(results, axis=0, weights=sizes)
    return Factor.normal(weights, np.full(len(weights), 1e-12))


def run_adult(cell: Cell, data=None, num=HOSPITALS) -> dict[str, Any]:
    data = adult(cell.split) if data is None else data
    prior, likelihood = logistic(data.x.shape[1])
    if cell.way == "pooled":
        return scores(pooled_fit(prior, likelihood, data.x, data.y, cell.epsilon), data)
    if cell.way == "fedavg":
        return scores(fedavg(data, cell, num), data)
    try:
        history = federated_fit(prior, likelihood, data, cell, num)
    except ValueError as error:  # Noise that drowns the signal.
        return {"refused": str(error)}
    every = max(1, len(history.rounds) // 20)
    path = [scores(one.posterior, data) for one in history.rounds[::every]]
    last = scores(history.posterior, data)
    best = max([one["log_likelihood"] for one in [*path, last]])
    return {
        **last,
        "below_best": best - last["log_likelihood"],
        "rounds": path,
        "guard": min(one.guard for one in history.rounds),
        "epsilon_stated": max(history.epsilon.values()),
    }


# ---------------------------------------------------------------------------- damping, on simulated records


def run_damping(cell: Cell, num_records=10_000, width=10) -> dict[str, Any]:
    """Adult's model and hospitals on simulated records: the defaults are checked here, not on Adult's test records."""
    rng = np.random.default_rng(100 + cell.split)
    root = np.linalg.cholesky(0.5 ** np.abs(np.subtract.outer(np.arange(width), np.arange(width))))
    x = np.concatenate(
        [np.ones((2 * num_records, 1)), rng.normal(size=(2 * num_records, width)) @ root.T], axis=1
    )
    truth = np.concatenate([[-1.5], 0.7 * rng.normal(size=width)])
    y = (rng.random(len(x)) < scipy.special.expit(x @ truth)).astype(np.int32)
    x = x.astype(np.float32)
    return run_adult(
        cell, Split(x[:num_records], y[:num_records], x[num_records:], y[num_records:])
    )


# ---------------------------------------------------------------------------- coverage, where the truth is known


def run_coverage(cell: Cell, num_records=5000, width=5, num=5) -> dict[str, Any]:
    """90 % intervals of a logistic regression's coefficients, drawn from the prior: flat and paired workers, by rounds."""
    rng = np.random.default_rng(cell.split)
    truth = rng.normal(size=width)
    x = rng.normal(size=(num_records, width)).astype(np.float32)
    y = (rng.random(num_records) < scipy.special.expit(x @ truth)).astype(np.int32)
    prior, likelihood = logistic(width)
    half = scipy.stats.norm.ppf(0.95)

    def covers(factor):
        return float(np.mean(np.abs(factor.mean - truth) <= half * factor.stddev))

    data = Split(x, y, x[:10], y[:10])
    if cell.way == "pooled":
        factor = pooled_fit(prior, likelihood, x, y, cell.epsilon)
        return {"coverage": covers(factor), "width": float(factor.stddev.mean())}
    clipping = "paired" if cell.way == "paired" else "flat"
    history = federated_fit(prior, likelihood, data, cell, num, clipping=clipping)
    return {
        "coverage": covers(history.posterior),
        "width": float(history.posterior.stddev.mean()),
        "by_round": [covers(one.posterior) for one in history.rounds],
    }


# ---------------------------------------------------------------------------- linear regression, in closed form


def run_regression(cell: Cell, num_records=2000, num=5) -> dict[str, Any]:
    """Known noise 1: distances to the pooled posterior in closed form, in its standard deviations."""
    width = 1 if cell.study == "regression1" else 10
    rng = np.random.default_rng(cell.split)
    truth = rng.normal(size=width)
    x = rng.normal(size=(num_records, width)).astype(np.float32)
    y = (x @ truth + rng.normal(size=num_records)).astype(np.float32)
    exact = Factor(x.T.astype(float) @ y, np.eye(width) + x.T.astype(float) @ x)
    prior = tfd.JointDistributionNamed({"w": tfd.Sample(tfd.Normal(0.0, 1.0), width)})
    likelihood = lambda params, x: tfd.Normal(tf.linalg.matvec(x, params["w"]), 1.0)  # noqa: E731
    if cell.way == "pooled":
        factor = pooled_fit(prior, likelihood, x, y, cell.epsilon)
    else:
        data = Split(x, y, x[:10], y[:10])
        factor = federated_fit(prior, likelihood, data, cell, num).posterior
    away = (factor.mean - exact.mean) / exact.stddev
    return {
        "distance": float(np.sqrt(np.mean(away**2))),
        "spread": float(np.mean(factor.stddev / exact.stddev)),
        "covers_truth": float(np.mean(np.abs(factor.mean - truth) <= 1.645 * factor.stddev)),
    }


# ---------------------------------------------------------------------------- a Bayesian neural network


def network_data(name, split) -> Split:
    rng = np.random.default_rng(split)
    if name == "curve":
        x = rng.uniform(-2.0, 2.0, size=(2500, 1))
        y = np.sin(2.0 * x[:, 0]) + 0.3 * rng.normal(size=len(x))
    else:
        from sklearn.datasets import load_diabetes

        x, y = load_diabetes(return_X_y=True)
        x, y = x / x.std(0), (y - y.mean()) / y.std()
    order = rng.permutation(len(x))
    first = int(0.8 * len(x))
    x, y = x[order].astype(np.float32), y[order].astype(np.float32)
    return Split(x[:first], y[:first], x[first:], y[first:])


def network(width, noise, hidden=50):
    """One hidden layer of tanh; the noise is known."""
    of = lambda shape, scale: tfd.Sample(tfd.Normal(0.0, scale), sample_shape=shape)  # noqa: E731
    prior = tfd.JointDistributionNamed(
        {
            "w1": of([width, hidden], 1.0),
            "b1": of([hidden], 1.0),
            "w2": of([hidden], hidden**-0.5),
            "b2": of([], 1.0),
        }
    )

    def likelihood(params, x):
        hidden_units = tf.tanh(tf.matmul(x, params["w1"]) + params["b1"])
        return tfd.Normal(tf.linalg.matvec(hidden_units, params["w2"]) + params["b2"], noise)

    return prior, likelihood


def run_network(cell: Cell, num=5) -> dict[str, Any]:
    name = cell.study.removeprefix("network ")
    data = network_data(name, cell.split)
    prior, likelihood = network(data.x.shape[1], 0.3 if name == "curve" else 0.75)
    study = study_of(prior, likelihood, cell, schedule_of(cell))
    if cell.way == "pooled":
        factor = pooled_fit(prior, likelihood, data.x, data.y, cell.epsilon)
    else:
        factor = federated_fit(prior, likelihood, data, cell, num, local_steps=20).posterior
    return {"log_likelihood": study.mean_log_likelihood(factor, data.x_test, data.y_test)}


# ---------------------------------------------------------------------------- cells


def cells(studies, splits, quick):
    epsilons = (1.0,) if quick else (0.3, 1.0, 3.0)
    for study, split in itertools.product(studies, range(splits)):
        if study == "adult":
            for epsilon in epsilons:
                yield Cell(study, "pooled", epsilon=epsilon, split=split)
                for division in DIVISIONS:
                    yield Cell(study, "fedavg", division, epsilon=epsilon, split=split)
                    for schedule in SCHEDULES:
                        yield Cell(study, "worker", division, schedule, epsilon, split)
                    yield Cell(study, "messages", division, "one round", epsilon, split)
        elif study == "coverage":
            for epsilon in epsilons:
                for way in ("pooled", "worker", "paired"):
                    yield Cell(study, way, epsilon=epsilon, split=split)
        elif study == "damping":
            yield Cell(study, "pooled", split=split)
            for division, schedule in itertools.product(("balanced", "by label"), DAMPED):
                yield Cell(study, "worker", division, schedule, split=split)
        elif study == "regression":
            for name, way, epsilon in itertools.product(
                ("regression1", "regression10"), ("pooled", "worker"), epsilons
            ):
                yield Cell(name, way, epsilon=epsilon, split=split)
        else:
            for name, way in itertools.product(
                ("network curve", "network diabetes"), ("pooled", "worker")
            ):
                schedule = "synchronous" if way == "pooled" else LONG
                yield Cell(
                    name, way, schedule=schedule, epsilon=3.0, split=split + 2
                )  # Rounds were chosen on 0 and 1.


RUN = {
    "adult": run_adult,
    "damping": run_damping,
    "coverage": run_coverage,
    "regression1": run_regression,
    "regression10": run_regression,
}


def run(cell: Cell) -> dict[str, Any]:
    start = time.process_time()
    found = RUN.get(cell.study, run_network)(cell)
    return {**cell._asdict(), **found, "cpu_seconds": round(time.process_time() - start, 2)}


def summary(rows):
    """Prints means over splits, and for the federated ways the difference to pooled."""
    pooled = {(r["study"], r["epsilon"], r["split"]): r for r in rows if r["way"] == "pooled"}
    groups: dict[Any, list[Any]] = {}
    for row in rows:
        groups.setdefault(
            (row["study"], row["way"], row["division"], row["schedule"], row["epsilon"]), []
        ).append(row)
    for key, group in sorted(groups.items()):
        shown = []
        for name in (
            "accuracy",
            "log_likelihood",
            "below_best",
            "coverage",
            "width",
            "distance",
            "spread",
        ):
            values = [row[name] for row in group if name in row]
            if values:
                pairs = [
                    row[name] - pooled[row["study"], row["epsilon"], row["split"]][name]
                    for row in group
                    if name in row
                    and name in pooled.get((row["study"], row["epsilon"], row["split"]), {})
                ]
                difference = f" ({np.mean(pairs):+.4f})" if pairs and key[1] != "pooled" else ""
                shown.append(f"{name} {np.mean(values):.4f}{difference}")
        if any("refused" in row for row in group):
            shown.append("refused: " + group[0].get("refused", "").split("\n")[0])
        print(f"{', '.join(map(str, key))} [{len(group)}]: {'; '.join(shown)}")


def draw(rows, path):
    from matplotlib import figure

    # Without Adult's rows, its axes are not on the page.
    num = 5 if any(row["study"] == "adult" for row in rows) else 3
    page = figure.Figure(figsize=(4 * num, 4), layout="constrained")
    axes = [*page.subplots(1, num), *figure.Figure().subplots(1, 2)]
    coverage, by_epsilon, damping, path_axis, accuracy = axes[:5]
    for schedule in SCHEDULES:
        paths = [
            r["rounds"]
            for r in rows
            if r["study"] == "adult" and r["schedule"] == schedule and "rounds" in r
        ]
        paths = [p for p in paths if len(p) == max(map(len, paths))]
        if paths:
            mean = np.mean([[one["log_likelihood"] for one in p] for p in paths], axis=0)
            path_axis.plot(np.linspace(0, 1, len(mean)), mean, "o-", label=schedule)
    path_axis.set(title="Adult: test log-likelihood", xlabel="share of updates")
    for way in ("pooled", "worker", "fedavg"):
        like = ("adult", way, "balanced", "synchronous")
        chosen = [
            r
            for r in rows
            if (r["study"], r["way"], r["division"], r["schedule"]) == like and r["split"] < 4
        ]
        groups = grouped(chosen, "epsilon", "accuracy")
        accuracy.plot(list(groups), list(groups.values()), "o-", label=way)
    accuracy.set(title="Adult, balanced, splits 0 to 3: accuracy", xscale="log", xlabel="epsilon")
    for way in ("pooled", "worker", "paired"):
        groups = grouped(
            [r for r in rows if (r["study"], r["way"]) == ("coverage", way)], "epsilon", "coverage"
        )
        by_epsilon.plot(list(groups), list(groups.values()), "o-", label=way)
    by_epsilon.axhline(0.9, color="k", linestyle=":")
    by_epsilon.set(title="coverage of 90 % intervals", xscale="log", xlabel="epsilon")
    for way in ("worker", "paired"):
        paths = [
            r["by_round"]
            for r in rows
            if r["way"] == way and "by_round" in r and r["epsilon"] == 1.0
        ]
        coverage.plot(np.mean(paths or [[np.nan]], axis=0), "o-", label=way)
    pooled = [
        r["coverage"]
        for r in rows
        if r["way"] == "pooled" and "coverage" in r and r["epsilon"] == 1.0
    ]
    coverage.axhline(np.mean(pooled or [np.nan]), color="C2", label="pooled")
    coverage.axhline(0.9, color="k", linestyle=":")
    coverage.set(title="coverage at epsilon 1", xlabel="round")
    damped = [
        {**r, "damping": DAMPED[r["schedule"]].damping} for r in rows if r["schedule"] in DAMPED
    ]
    for kind, division in itertools.product(
        ("synchronous", "sequential", "asynchronous"), ("balanced", "by label")
    ):
        chosen = [r for r in damped if r["schedule"].startswith(kind) and r["division"] == division]
        groups = grouped(chosen, "damping", "log_likelihood")
        line = "-" if division == "balanced" else ":"
        damping.plot(list(groups), list(groups.values()), "o" + line, label=f"{kind}, {division}")
    damping.set(title="simulated: test log-likelihood", xlabel="damping", ylim=(-0.6, -0.4))
    for axis in (by_epsilon, accuracy):
        axis.set_xticks([0.3, 1.0, 3.0], ["0.3", "1", "3"])
        axis.minorticks_off()
    for axis in page.axes:
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize="x-small")
    page.savefig(path, dpi=110)


def grouped(rows, by, name):
    """Returns means of a figure, by a setting in order."""
    values = sorted({row[by] for row in rows if name in row})
    return {
        value: np.mean([row[name] for row in rows if row[by] == value and name in row])
        for value in values
    }


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--studies", nargs="*", default=["adult", "coverage", "regression", "network"]
    )
    parser.add_argument("--splits", type=int, default=10)
    parser.add_argument("--quick", action="store_true", help="epsilon 1 alone")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("build/federated"))
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="start no cell after so many"
    )
    parser.add_argument("--summary", action="store_true")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "federated.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    if not options.summary:
        done, start = (
            {Cell(*(row[field] for field in Cell._fields)) for row in rows},
            time.monotonic(),
        )
        for cell in cells(options.studies, options.splits, options.quick):
            if cell in done or time.monotonic() - start > 60 * options.minutes:
                continue
            row = {**run(cell), "machine": platform.machine(), "tensorflow": tf.__version__}
            rows.append(row)
            with path.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(
                json.dumps({name: value for name, value in row.items() if name != "rounds"}),
                flush=True,
            )
    summary(rows)
    draw(rows, options.out / "federated.png")


if __name__ == "__main__":
    main()
