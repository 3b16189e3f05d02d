"""Coverage of 99 % intervals of all parameters, for the models of examples/models/ at epsilon 1.

20 or 40 simulated data sets of 10,000 records for each, their truths drawn from the prior; delta 1e-5. And one fit of each without
noise, beside the exact posterior.
"""

from __future__ import annotations

import importlib
import json
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import shared

import tfp_dpvi as dpvi
from studies.cells import Cell, Repeated, Row, load

NUM_RECORDS, EPSILON, DELTA, NUM_SETS = 10_000, 1.0, 1e-5, 20
MORE_SETS = {"radon": 40, "full_covariance_mixture": 40}  # Where 20 sets do not decide.
PICTURES = "docs/figures/models"
FAMILIES = (
    "radon",
    "negative_binomial",
    "bayesian_network",
    "censored_weibull",
    "ordinal",
    "item_response",
    "full_covariance_mixture",
    "factor_analysis",
    "missing_values",
    "flow",
)
# The longest of the programs that draw the pictures.
PICTURED = {"item_response": ["--steps=300", "--chain-steps=100"]}
NUM_PERSONS, STEPS = (
    2000,
    1000,
)  # For item response without noise, compared with its exact posterior.


def private(name: str) -> Callable[[], Callable[[int], Row]]:
    """Returns a function that makes rows of private fits."""

    def make() -> Callable[[int], Row]:
        family = importlib.import_module(name)
        model = shared.make_model(family)
        target = {"epsilon": EPSILON, "delta": DELTA}
        pilot = dpvi.pilot(model, shared.made_up(family), num_records=NUM_RECORDS, **target)
        x, y, _ = shared.simulate(family, NUM_RECORDS, 1)

        def optimizer(**noise: float) -> Any:
            return pilot.optimizer(NUM_RECORDS, **noise)

        fits = Repeated(model, optimizer, x, y, **target, **pilot.fit_settings)

        def row(seed: int) -> Row:
            x, y, truth = shared.simulate(family, NUM_RECORDS, seed)
            fitted = fits(x, y)
            draws, value = shared.flat(fitted.posterior_sample(4000, seed=0)), shared.entries(truth)
            summary = fitted.posterior_summary()
            checks = summary.checks
            return {
                "inside": shared.inside(draws, value).tolist(),
                "z": ((draws.mean(axis=0) - value) / draws.std(axis=0)).tolist(),
                "sd": draws.std(axis=0).tolist(),
                "calibrated": checks is not None,
                "warnings": [] if checks is None else checks.warnings,
                "names": summary.names,
            }

        return row

    return make


def item_response_without_noise() -> Callable[[int], Row]:
    """Returns a function that makes a row: errors of the means, in exact standard deviations."""
    family = importlib.import_module("item_response")

    def row(seed: int) -> Row:
        x, y, _ = shared.simulate(family, NUM_PERSONS, seed)
        own = shared.fit_without_noise(family, x, y, NUM_PERSONS, STEPS).posterior_sample(
            4000, seed=0
        )
        exact, own = shared.flat(shared.exact_draws(family, x, y, own)), shared.flat(own)
        off = np.abs(own.mean(axis=0) - exact.mean(axis=0)) / exact.std(axis=0)
        return {"off": off.tolist(), "sd_ratio": (own.std(axis=0) / exact.std(axis=0)).tolist()}

    return row


def pictured(name: str) -> Callable[[], Callable[[int], Row]]:
    """Returns a function that runs the example, for its picture."""

    def make() -> Callable[[int], Row]:
        def row(seed: int) -> Row:
            arguments = [f"--seed={2025 + seed}", f"--output={PICTURES}", *PICTURED.get(name, [])]
            found = shared.main(importlib.import_module(name), arguments)
            return {"off": max(found["off"]), "epsilon": found["epsilon"]}

        return row

    return make


CELLS = [
    Cell("exact-item_response", item_response_without_noise, num=1),
    *(
        Cell(f"private-{name}", private(name), num=MORE_SETS.get(name, NUM_SETS))
        for name in FAMILIES
    ),
    *(Cell(f"picture-{name}", pictured(name), num=1) for name in FAMILIES),
]


def report(folder: pathlib.Path) -> dict[tuple[str, str], str]:
    """Returns a table and the pictures, by page and block."""
    lines = [
        "| model | entries | sets | share inside | worst entry | sets without a warning | share inside | worst entry |"
    ]
    lines.append("| --- " * 8 + "|")
    for name in FAMILIES:
        rows = load(folder / f"private-{name}.json")
        if rows:
            free = (
                np.array([row["sd"] for row in rows]).min(axis=0) > 0
            )  # Not the zeros above a diagonal.
            inside = np.array([row["inside"] for row in rows])[:, free]
            trusted = inside[[not row["warnings"] for row in rows]]
            kind = "" if rows[0]["calibrated"] else ", not calibrated"
            columns = [name.replace("_", " ") + kind, str(inside.shape[1])]
            for found in (inside, trusted):
                columns += [
                    str(len(found)),
                    f"{found.mean():.3f}",
                    f"{found.sum(axis=0).min()} of {len(found)}",
                ]
            lines.append("| " + " | ".join(columns) + " |")
    for row in load(folder / "exact-item_response.json"):
        lines += [
            "",
            f"Item response without noise, {NUM_PERSONS:,} persons: means within {max(row['off']):.2f} exact standard deviations.",
        ]
    found = {("docs/models.md", "table"): "\n".join(lines)}
    for name in FAMILIES:
        path = pathlib.Path(PICTURES) / f"{name}.json"
        if path.exists():
            one = json.loads(path.read_text())
            wider = np.divide(one["private"]["sd"], one["exact"]["sd"])
            found["docs/models.md", name] = (
                f"![{name.replace('_', ' ')}](figures/models/{name}.png)\n\nPrivate intervals are {np.median(wider):.1f} times as "
                f"wide as exact ones (median; {wider.min():.1f} to {wider.max():.1f}). Without noise, means are within "
                f"{max(one['off']):.2f} exact standard deviations."
            )
    return found
