"""The hierarchical study of d3p (Prediger, Loppi, Kaski, Honkela 2022, arXiv:2103.11648): AUC over epsilon, records, iterations.

Groups with public characteristics z_g, weights w_g around a matrix times z_g, 5-dimensional records; the model is that of
`examples/hierarchical_logistic_regression.py`, compared with the same model without noise and clip, and with a non-private logistic
regression without groups. Delta 1e-5; the unit of privacy is a record. All seeds have the same characteristics of groups; matrix,
weights and records are new in each. AUC is on 10,000 other records.
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Callable
from typing import Any

import hierarchical_logistic_regression as example
import numpy as np

import tfp_dpvi as dpvi
from studies.cells import Cell, Repeated, Row, load, shown

DELTA, NUM_TEST = 1e-5, 10_000
EPSILONS, SIZES, STEPS = (
    (0.1, 0.3, 1.0, 3.0),
    (250, 1000, 2500, 10_000),
    (100, 1000, 10_000, 100_000),
)
NUM_RECORDS, EPSILON = 10_000, 1.0
BATCH_SHARE, NUM_STEPS, RATE, EMA = (
    0.2,
    300,
    0.03,
    0.98,
)  # Those of the example, chosen on other data.
SMALL_BATCH = 200  # For the study of iterations.


def design() -> np.ndarray:
    """Returns the groups' public characteristics."""
    drawn = np.random.default_rng(0).standard_normal(
        [example.NUM_GROUPS, example.NUM_CHARACTERISTICS - 1]
    )
    return np.concatenate([np.ones([example.NUM_GROUPS, 1]), drawn], axis=1).astype("float32")


def simulate(num: int, seed: int) -> tuple[Any, Any]:
    """Returns training and test data, each (x, y)."""
    generator, z = np.random.default_rng(seed), design()
    matrix = generator.normal(0.0, 0.7, [example.NUM_FEATURES, example.NUM_CHARACTERISTICS])
    weights = z @ matrix.T + 0.4 * generator.standard_normal(
        [example.NUM_GROUPS, example.NUM_FEATURES]
    )
    shares = generator.dirichlet(np.full(example.NUM_GROUPS, 3.0))

    def rows(size: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
        group = generator.choice(example.NUM_GROUPS, size=size, p=shares)
        features = np.concatenate(
            [np.ones([size, 1]), generator.standard_normal([size, example.NUM_FEATURES - 1])],
            axis=1,
        )
        chances = 1 / (1 + np.exp(-np.sum(features * weights[group], axis=1)))
        y = (generator.uniform(size=size) < chances).astype("int32")
        return {"features": features.astype("float32"), "group": group.astype("int32")}, y

    test = rows(NUM_TEST)
    return rows(num), test


def auc(scores: np.ndarray, y: np.ndarray) -> float:
    """Returns the fraction of pairs of a one and a zero that the scores order correctly."""
    ranks = np.empty(len(scores))
    ranks[np.argsort(scores)] = np.arange(1, len(scores) + 1)
    ones = int(np.sum(y))
    return float((ranks[y == 1].sum() - ones * (ones + 1) / 2) / (ones * (len(y) - ones)))


def cell(
    num: int, epsilon: float, batch_size: int, steps: int
) -> Callable[[], Callable[[int], Row]]:
    """Returns a function that makes rows; `epsilon=math.inf` is without noise and clip."""

    def make() -> Callable[[int], Row]:
        def optimizer(**noise: float) -> Any:
            clip = 1.0 if epsilon < math.inf else math.inf
            momentum = min(EMA, 1 - 5 / steps)
            return dpvi.optimizers.DPKerasAdamOptimizer(
                RATE, l2_norm_clip=clip, use_ema=True, ema_momentum=momentum, **noise
            )

        model = example.make_model(design(), example.SETTINGS["initial_scale"])
        (x, y), _ = simulate(num, 1)
        settings = {"batch_size": batch_size, "steps_per_epoch": steps}
        fits = Repeated(model, optimizer, x, y, epsilon=epsilon, delta=DELTA, **settings)

        def row(seed: int) -> Row:
            (x, y), (x_test, y_test) = simulate(num, seed)
            fitted = fits(x, y)
            return {"auc": auc(fitted.predict(x_test), y_test), "noise_multiplier": fits.noise}

        return row

    return make


def without_groups(num: int) -> Callable[[], Callable[[int], Row]]:
    """Returns a function that makes rows of a logistic regression without groups."""

    def make() -> Callable[[int], Row]:
        from sklearn.linear_model import LogisticRegression

        def row(seed: int) -> Row:
            (x, y), (x_test, y_test) = simulate(num, seed)
            fitted = LogisticRegression().fit(x["features"][:, 1:], y)
            return {"auc": auc(fitted.decision_function(x_test["features"][:, 1:]), y_test)}

        return row

    return make


def _batch(num: int) -> int:
    return round(BATCH_SHARE * num)


CELLS = [
    *(
        Cell(f"epsilon-{eps:g}", cell(NUM_RECORDS, eps, _batch(NUM_RECORDS), NUM_STEPS))
        for eps in EPSILONS
    ),
    *(Cell(f"records-{num}", cell(num, EPSILON, _batch(num), NUM_STEPS)) for num in SIZES[:-1]),
    *(Cell(f"nonprivate-{num}", cell(num, math.inf, _batch(num), NUM_STEPS)) for num in SIZES),
    *(Cell(f"groupless-{num}", without_groups(num)) for num in SIZES),
    *(
        Cell(f"steps-{steps}", cell(NUM_RECORDS, EPSILON, SMALL_BATCH, steps), full=steps > 10_000)
        for steps in STEPS
    ),
]


def report(folder: pathlib.Path) -> dict[tuple[str, str], str]:
    """Draws three panels; returns a table by page and block."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    found = {one.name: [row["auc"] for row in load(folder / f"{one.name}.json")] for one in CELLS}
    found[f"records-{NUM_RECORDS}"] = found[f"epsilon-{EPSILON:g}"]
    lines = [
        "| setting | AUC | not private | without groups, not private |",
        "| --- | --- | --- | --- |",
    ]
    panels = {
        "epsilon": (EPSILONS, "epsilon (10,000 records)", lambda _: NUM_RECORDS),
        "records": (SIZES, "records (epsilon 1)", lambda num: num),
        "steps": (
            STEPS,
            "iterations (epsilon 1, 10,000 records, batch 200)",
            lambda _: NUM_RECORDS,
        ),
    }
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained", sharey=True)
    for panel, (name, (values, label, size)) in zip(axes, panels.items(), strict=True):
        kinds = {
            "private": [
                found[f"{name}-{value:g}" if name == "epsilon" else f"{name}-{value}"]
                for value in values
            ],
            "not private": [found[f"nonprivate-{size(value)}"] for value in values],
            "without groups": [found[f"groupless-{size(value)}"] for value in values],
        }
        for kind, each in kinds.items():
            there = [
                (value, np.mean(one), np.std(one))
                for value, one in zip(values, each, strict=True)
                if one
            ]
            if there:
                places, means, spreads = np.array(there).T
                panel.errorbar(places, means, yerr=spreads, label=kind, marker="o", ms=3, capsize=2)
        panel.set(xscale="log", xlabel=label)
        for value, *each in zip(values, *kinds.values(), strict=True):
            if each[0]:
                lines.append(
                    f"| {name} {value:,} | " + " | ".join(shown(one, 4) for one in each) + " |"
                )
    axes[0].set_ylabel("AUC")
    if axes[0].has_data():
        axes[0].legend(fontsize=8)
    figure.savefig(folder / "auc.png", dpi=90)
    plt.close(figure)
    lines += ["", f"![AUC](figures/studies/{folder.name}/auc.png)"]
    return {("docs/studies.md", "hierarchical"): "\n".join(lines)}
