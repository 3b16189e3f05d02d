"""A scoring step over a flat one: the same model and the same full batch, in alternating rounds of one run.

    python benchmarks/scoring_time.py [--only logistic] [--output docs/figures/scoring_time.json]
    python benchmarks/scoring_time.py --weighted --rounds 31 [--output docs/figures/weighted_time.json]

The flat step clips the gradient of each record's log density at one draw of the surrogate (Adam, mean field). The scoring step
is that of `compile` without an optimizer. Ratios are of medians; `first_s` is the time of the first call, which traces and
compiles. Targets: 1.3 for enumerated outcomes, 2.5 for counts whose scores are factorised, 4 otherwise.

With `--weighted`: a scoring step with weights that are all one over that without weights (target 1.1), by the clock and by the
processor's time, which other programs change less.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import time
from collections.abc import Callable

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import harness
import numpy as np
import tensorflow_probability as tfp
from harness import Runner

import tfp_dpvi as dpvi
from tfp_dpvi import _random
from tfp_dpvi._tf import tf
from tfp_dpvi.bayes.model import BayesianModel
from tfp_dpvi.calibrated.centred_fit import CentredFit
from tfp_dpvi.data import make_records
from tfp_dpvi.gradients import StepSpec
from tfp_dpvi.optimizers import ScoringOptimizer
from tfp_dpvi.sampling import FullBatchSampler
from tfp_dpvi.training import Mechanism, initial_state
from tfp_dpvi.training.step import make_steps

tfd = tfp.distributions
NOISE = 50.0
NUM_CLASSES = 3
# Family, coefficients, records.
CASES = [
    *[("logistic", size, num) for size in (5, 20, 50) for num in (1_000, 5_000, 40_000)],
    *[("categorical", 5, num) for num in (1_000, 10_000)],
    *[("poisson", 5, num) for num in (1_000, 10_000)],
    *[("negbin", 5, num) for num in (1_000, 10_000)],
    *[("linear", 5, num) for num in (1_000, 10_000)],
]
# XLA has no gamma draws, hence none of the negative binomial.
WITHOUT_XLA = ("negbin",)
LIMITS = {"logistic": 1.3, "categorical": 1.3}
WEIGHTED_CASES = [
    *[("logistic", size, 20_000) for size in (4, 20, 50)],
    *[(family, 5, 20_000) for family in ("categorical", "poisson")],
]
WEIGHTED_LIMIT = 1.1


def model_of(family, size):
    """Returns prior and likelihood of a linear predictor."""
    columns = NUM_CLASSES * size if family == "categorical" else size
    parts = {"w": tfd.Sample(tfd.Normal(0.0, 1.0), columns)}
    if family == "negbin":
        parts["r"] = tfd.LogNormal(1.0, 0.5)
    if family == "linear":
        parts["s"] = tfd.LogNormal(0.0, 0.5)

    def likelihood(params, x):
        w = params["w"]
        if family == "categorical":
            return tfd.Categorical(logits=x @ tf.reshape(w, [size, NUM_CLASSES]))
        eta = tf.linalg.matvec(x, w)
        if family == "logistic":
            return tfd.Bernoulli(logits=eta, dtype=tf.float32)
        if family == "poisson":
            return tfd.Poisson(log_rate=eta)
        if family == "linear":
            return tfd.Normal(eta, params["s"])
        return tfd.NegativeBinomial(params["r"], logits=eta - tf.math.log(params["r"]))

    return tfd.JointDistributionNamed(parts), likelihood


def data_of(family, size, num):
    """Returns inputs and simulated outcomes."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(num, size)).astype("float32")
    prior, likelihood = model_of(family, size)
    shape = prior.event_shape["w"][0]
    params = {"w": (0.3 * generator.normal(size=shape)).astype("float32"), "r": 2.0, "s": 1.0}
    return x, likelihood(params, x).sample(seed=tf.constant([0, 1])).numpy()


def runner_of(mechanism, optimizer, variables, records, xla, steps, processor=None):
    """Returns a `Runner` of compiled steps, which appends its processor seconds a step to a list."""
    compiled = make_steps(mechanism, optimizer, variables, jit_compile=xla)
    key = tf.constant(_random.new_key(0))
    start = initial_state(mechanism, 0, 10**6)
    tensors = records.tensors()

    def run(wanted):
        number = tf.constant(max(1, wanted), tf.int64)
        begun, used = time.perf_counter(), time.process_time()
        compiled(start, number, tensors, key, mechanism.noise).step.numpy()
        seconds = time.perf_counter() - begun
        if processor is not None and wanted:
            processor.append((time.process_time() - used) / wanted)
        return seconds

    return Runner(run, steps)


def flat_runner(family, size, x, y, xla, steps):
    prior, likelihood = model_of(family, size)
    model = dpvi.DPVI(prior, likelihood, clipping="flat")
    optimizer = dpvi.optimizers.DPKerasAdamOptimizer(0.01, l2_norm_clip=1.0, noise_multiplier=NOISE)
    model.compile(optimizer, delta=1e-5)
    num = len(x)
    data = model.make_data(x, y, batch_size=num)
    gradient = model.mechanism(data).gradient
    mechanism = Mechanism(FullBatchSampler(num), gradient, float(num), num, noise_multiplier=NOISE)
    records = make_records(x, y, None, dtype=model.bayesian_model.dtype, validate=False)
    return runner_of(mechanism, optimizer, model.trainable_variables, records, xla, steps)


def scoring_runner(family, size, x, y, xla, steps, weights=None, processor=None):
    model = BayesianModel(*model_of(family, size))
    most = None if weights is None else float(weights.max())
    records = make_records(x, y, weights, dtype=model.dtype, validate=False, max_weight=most)
    fit = CentredFit(model)
    fit.prepare(records, np.random.default_rng(1).normal(size=(512, size)).astype("float32"))
    num = len(x)
    gradient = fit.scoring.gradient(StepSpec(float(num), num))
    mechanism = Mechanism(FullBatchSampler(num), gradient, float(num), num, noise_multiplier=NOISE)
    nothing = {release.name: release.initial() for release in mechanism.joint}
    fit.scoring.advance(0, 160, nothing, mechanism)
    optimizer, theta = ScoringOptimizer(), [fit.scoring.theta]
    return runner_of(mechanism, optimizer, theta, records, xla, steps, processor)


def measured(family, size, num, xla, rounds):
    """Returns times and their ratio of one case."""
    x, y = data_of(family, size, num)
    steps = max(5, 200_000 // num)
    makers: dict[str, Callable[[], Runner]] = {
        "flat": lambda: flat_runner(family, size, x, y, xla, steps),
        "scoring": lambda: scoring_runner(family, size, x, y, xla, steps),
    }
    name = f"{family}, d {size}, N {num}, {'XLA' if xla else 'graph'}"
    times, first, failed = harness.interleaved(makers, rounds, name=name)
    found = harness.ratio(times, "scoring", "flat")
    return {
        "ratio": None if found is None else round(found["ratio"], 2),
        "limit": LIMITS.get(family, 2.5),
        "ms": {way: round(1e3 * statistics.median(each), 4) for way, each in times.items()},
        "first_s": {way: round(each, 2) for way, each in first.items()},
        **({"failed": failed} if failed else {}),
    }


def measured_weighted(family, size, num, xla, rounds):
    """Returns times and ratios of one case with equal weights over that without."""
    x, y = data_of(family, size, num)
    steps = max(5, 400_000 // num)
    processor: dict[str, list[float]] = {"plain": [], "weighted": []}
    arguments = (family, size, x, y, xla, steps)
    makers: dict[str, Callable[[], Runner]] = {
        "plain": lambda: scoring_runner(*arguments, None, processor["plain"]),
        "weighted": lambda: scoring_runner(
            *arguments, np.ones(num, "float32"), processor["weighted"]
        ),
    }
    name = f"{family}, d {size}, N {num}, {'XLA' if xla else 'graph'}"
    times, _, failed = harness.interleaved(makers, rounds, name=name)
    found: dict[str, object] = {"limit": WEIGHTED_LIMIT}
    for clock, each in (("clock", times), ("processor", processor)):
        result = harness.ratio(each, "weighted", "plain")
        if result is None:
            continue
        found[f"{clock}_ratio"] = round(result["ratio"], 3)
        quartiles = np.quantile(result["rounds"]["all"], [0.25, 0.75])
        found[f"{clock}_quartiles"] = quartiles.round(3).tolist()
        found[f"{clock}_ms"] = {way: round(1e3 * statistics.median(each[way]), 4) for way in each}
    return {**found, **({"failed": failed} if failed else {})}


def commit():
    """Returns the commit of the code, marked if files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--backend", choices=("graph", "XLA"))
    parser.add_argument("--weighted", action="store_true", help="with equal weights over without")
    parser.add_argument("--output", type=pathlib.Path)
    arguments = parser.parse_args()
    found = {}
    measure = measured_weighted if arguments.weighted else measured
    for family, size, num in WEIGHTED_CASES if arguments.weighted else CASES:
        for backend in ("graph", "XLA"):
            name = f"{family}, {size}, {num}, {backend}"
            if arguments.only not in name or arguments.backend not in (None, backend):
                continue
            if backend == "XLA" and family in WITHOUT_XLA:
                continue
            found[name] = measure(family, size, num, backend == "XLA", arguments.rounds)
            print(name, found[name], flush=True)
    result = {
        "cases": found,
        "rounds": arguments.rounds,
        "machine": harness.machine(),
        "versions": harness.versions(tensorflow="tensorflow", tfp="tensorflow-probability"),
        "commit": commit(),
        "code": harness.code_hash(),
    }
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
