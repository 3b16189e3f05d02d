"""Why do regressions on synthetic records miss? Each cause by itself, on eight public tables.

    python benchmarks/synthetic_causes.py [--sets 3] [--tables fair diabetes] [--quick] [--output FILE]

All numbers are errors of least squares coefficients, over the standard errors of as many real
records: what is far above 1 is no sampling. Given are medians over a table's coefficients and sets.

* `levels`, of 16 and of 6: errors of `estimate` from counts without noise. Numbers are known by
  their levels alone.
* `components`, 16, 64 and 256: errors on many records from a mixture that was fitted to counts
  without noise, of the 16 levels. What is beyond the levels' error is the mixture's.
* `noise`: the standard error by noise at epsilon 1, of `estimate`.
* `tables`: errors on the records of 20 posterior draws at epsilon 1, averaged; and `spread`, their
  standard deviation over what the noise alone would cause. Rubin's rules take it for the noise: if
  the posterior's independence did no harm, it would be 1 or more.

`--quick` (or QUICK=1): one set of one table. Writes docs/figures/synthetic_causes.json.
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
from synthetic_estimates import DELTA, EPSILON, REGRESSIONS, TABLES, least_squares, with_bins

import tfp_dpvi as dpvi

NO_NOISE = {"noise_multiplier": 1e-3, "delta": DELTA}
LEVELS, COMPONENTS = (16, 6), (16, 64, 256)
NUM_DRAWN, NUM_TABLES = 200_000, 20


def fitted(schema: Any, components: int, records: Any, budget: Any, steps: int) -> Any:
    """Returns a fitted synthesizer."""
    synthesizer = dpvi.Synthesizer(schema, components, seed=0)
    return synthesizer.fit(records, **budget, steps=steps)


def estimated(synthesizer: Any, outcome: str, terms: list[str]) -> Any:
    """Returns an estimate, or None if it is refused."""
    try:
        return synthesizer.estimate.regression(outcome, terms)
    except ValueError:
        return None


def one_set(label: str, seed: int) -> dict[str, list[float]]:
    """Returns errors of all coefficients but intercepts, over standard errors of real records."""
    table, schema, num = TABLES[label]()
    size = len(table[schema.names[0]])
    rows = np.random.default_rng(seed).integers(size, size=num)
    records = {name: values[rows] for name, values in table.items()}
    budget = {"epsilon": EPSILON, "delta": DELTA}
    by_levels = {bins: fitted(with_bins(schema, bins), 2, records, NO_NOISE, 1) for bins in LEVELS}
    exact = {part: fitted(schema, part, records, NO_NOISE, 2000) for part in COMPONENTS}
    private = fitted(schema, 64, records, budget, 2000)
    drawn = {part: one.sample(NUM_DRAWN, seed=seed) for part, one in exact.items()}
    tables = private.sample_many(NUM_TABLES, seed=seed)
    found: dict[str, list[float]] = {}

    def keep(name: str, errors: Any, unit: Any) -> None:
        found.setdefault(name, []).extend(np.abs(np.asarray(errors) / unit)[1:].tolist())

    for outcome, terms in REGRESSIONS[label]:
        real, variance = least_squares(records, outcome, terms)
        unit = np.sqrt(variance)
        for bins, one in by_levels.items():
            estimate = estimated(one, outcome, terms)
            if estimate is not None:
                keep(f"levels {bins}", estimate.estimate - real, unit)
        for part, made in drawn.items():
            keep(f"components {part}", least_squares(made, outcome, terms)[0] - real, unit)
        each = np.stack([least_squares(one, outcome, terms)[0] for one in tables])
        keep("tables", each.mean(axis=0) - real, unit)
        estimate = estimated(private, outcome, terms)
        if estimate is not None:
            keep("noise", estimate.noise, unit)
            keep("spread", each.std(axis=0, ddof=1), estimate.noise)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sets", type=int, default=3)
    parser.add_argument("--first", type=int, default=12_100)
    parser.add_argument("--tables", nargs="*", default=list(TABLES), choices=list(TABLES))
    parser.add_argument("--quick", action="store_true", default=bool(os.environ.get("QUICK")))
    default = pathlib.Path("docs/figures/synthetic_causes.json")
    parser.add_argument("--output", type=pathlib.Path, default=default)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    labels, sets = (["diabetes"], 1) if options.quick else (options.tables, options.sets)
    result: dict[str, Any] = {
        "machine": harness.machine(),
        "versions": harness.versions(numpy="numpy", tensorflow="tensorflow"),
        "commit": harness.commit(),
        "code": harness.code_hash(),
        "sets": sets,
        "tables": {},
    }
    for label in labels:
        found: dict[str, list[float]] = {}
        for seed in range(options.first, options.first + sets):
            for name, errors in one_set(label, seed).items():
                found.setdefault(name, []).extend(errors)
        result["tables"][label] = {
            name: round(float(np.median(errors)), 3) for name, errors in found.items()
        }
        print(label, json.dumps(result["tables"][label]), flush=True)
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
