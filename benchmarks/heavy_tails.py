"""Columns with heavy tails: do intervals of `Synthesizer.estimate` hold, and are samples near?

    python benchmarks/heavy_tails.py [--sets 20] [--first 12000] [--quick] [--output FILE]

Two kinds of tables, each fitted by a `Synthesizer` at epsilon 1.

* Lognormal numbers exp(N(6, sigma^2)), cut at a declared bound of 1e5, beside a binary column. At
  sigma 2, about 60 of 20,000 lie at the bound. Counted are nominal 95 % intervals of the mean and
  of quantiles that contain the population's value, how far the mean and the standard deviation of
  synthetic records are from the records', and reports that say of the standard deviation that it is
  that of a few records.
* Exponential costs, several times as large in a small group: the mean, and the least squares slope
  on the group. Here nothing but `estimate` is used, and the mixture takes one step.

`--quick` (or QUICK=1): two sets. Writes docs/figures/heavy_tails.json.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import warnings
from typing import Any

import harness
import numpy as np
import scipy.stats

import tfp_dpvi as dpvi
from tfp_dpvi.data import Binary, Continuous, Integer, Schema

BOUND, NUM = 1e5, 20_000
SHARES = (0.25, 0.5, 0.9, 0.99)
SIGMAS = (1.0, 1.5, 2.0)

# Records, the group's share, and how many times its costs are as large.
GROUPS = ((20_000, 0.2, 3.0), (100_000, 0.02, 5.0), (100_000, 0.005, 8.0))


def population(sigma: float) -> np.ndarray:
    """Returns numbers at evenly spaced probabilities, cut at the bound."""
    places = scipy.stats.norm.ppf((np.arange(4_000_000) + 0.5) / 4_000_000)
    return np.minimum(np.exp(6.0 + sigma * places), BOUND)


def holds(estimate: Any, truth: np.ndarray) -> list[bool]:
    low, high = estimate.interval()
    return [bool(inside) for inside in (low <= truth) & (truth <= high)]


def is_far(estimate: Any) -> bool:
    return any("far from the others" in caveat for caveat in estimate.caveats)


def lognormal(sigma: float, seed: int, truth: tuple[float, np.ndarray]) -> dict[str, Any]:
    """Returns what one set shows."""
    generator = np.random.default_rng(seed)
    numbers = np.minimum(np.exp(generator.normal(6.0, sigma, NUM)), BOUND)
    data = {"cost": numbers, "ill": generator.integers(2, size=NUM)}
    schema = Schema({"cost": Continuous(0.0, BOUND), "ill": Binary()})
    synthesizer = dpvi.Synthesizer(schema, seed=seed).fit(data, epsilon=1.0, delta=1e-6)
    made = np.asarray(synthesizer.sample(5 * NUM, seed=seed)["cost"])
    mean = synthesizer.estimate.mean("cost")
    report = str(synthesizer.privacy_report())
    return {
        "seed": seed,
        "mean": holds(mean, np.array([truth[0]]))[0],
        "said": is_far(mean),
        "quantiles": holds(synthesizer.estimate.quantile("cost", SHARES), truth[1]),
        "mean of samples": float(made.mean() / numbers.mean() - 1.0),
        "sd of samples": float(made.std() / numbers.std() - 1.0),
        "few": "standard deviation of 'cost' is that of a few" in " ".join(report.split()),
    }


def grouped(num: int, share: float, times: float, seed: int) -> dict[str, Any]:
    """Returns what one set shows."""
    generator = np.random.default_rng(seed)
    group = (generator.random(num) < share).astype(int)
    cost = generator.exponential(1000.0, num) * np.where(group, times, 1.0)
    data = {"group": group, "cost": np.minimum(cost, 2e5), "age": generator.integers(18, 91, num)}
    schema = {"group": Binary(), "cost": Continuous(0.0, 2e5), "age": Integer(18, 90)}
    fitted = dpvi.Synthesizer(Schema(schema), 2, seed=seed)
    fitted.fit(data, epsilon=1.0, delta=1e-6, steps=1)
    mean = fitted.estimate.mean("cost")
    slope = fitted.estimate.regression("cost", ["group"])
    of_mean, of_slope = 1000.0 * (1.0 + share * (times - 1.0)), 1000.0 * (times - 1.0)
    return {
        "seed": seed,
        "mean": holds(mean, np.array([of_mean]))[0],
        "mean said": is_far(mean),
        "slope": holds(slope, np.array([0.0, of_slope]))[1],
        "slope said": is_far(slope),
        "half width of slope": float(1.96 * slope.standard_error[1] / of_slope),
    }


def summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns counts of what is true, and medians of absolute numbers."""
    result: dict[str, Any] = {"sets": len(found)}
    for name in found[0]:
        values = np.array([each[name] for each in found])
        if name != "seed":
            is_count = values.dtype == bool
            result[name] = (values.sum(axis=0) if is_count else np.median(abs(values))).tolist()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sets", type=int, default=20)
    parser.add_argument("--first", type=int, default=12_000)
    parser.add_argument("--quick", action="store_true", default=bool(os.environ.get("QUICK")))
    default = pathlib.Path("docs/figures/heavy_tails.json")
    parser.add_argument("--output", type=pathlib.Path, default=default)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    seeds = range(options.first, options.first + (2 if options.quick else options.sets))
    result: dict[str, Any] = {
        "machine": harness.machine(),
        "versions": harness.versions(numpy="numpy", tensorflow="tensorflow"),
        "commit": harness.commit(),
        "code": harness.code_hash(),
        "cells": {},
    }

    def keep(label: str, found: list[dict[str, Any]]) -> None:
        result["cells"][label] = {**summary(found), "each": found}
        print(label, json.dumps(summary(found)), flush=True)
        options.output.write_text(json.dumps(result, indent=1) + "\n")

    for case in GROUPS:
        label = "group of {1:g}, {2:g} times as large, N {0:,}".format(*case)
        keep(label, [grouped(*case, seed) for seed in seeds])
    for sigma in SIGMAS:
        numbers = population(sigma)
        truth = float(numbers.mean()), np.quantile(numbers, SHARES)
        keep(f"lognormal, sigma {sigma:g}", [lognormal(sigma, seed, truth) for seed in seeds])


if __name__ == "__main__":
    main()
