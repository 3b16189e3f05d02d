"""The mixture of Jälkö, Dikmen and Honkela (2017): held-out log density over epsilon, compared with DP-SGLD.

Five round components in the plane, at (0, 0) and (+-2, +-2) with covariance 0.5 I, 2,000 records to learn from, 100 to test on
as in the paper and 10,000 more. Prior: Dirichlet(1) weights, Normal(0, I) means, InverseGamma(1, 1) variances. Delta 1e-3.
All methods start at the same public point, five centres on a circle.
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_probability as tfp

import tfp_dpvi as dpvi
from studies import sgld
from studies.cells import Cell, Repeated, Row, load, shown
from tfp_dpvi.privacy import FullBatch, PrivacyPlan

tfd = tfp.distributions
CENTRES = np.array([[0, 0], [2, 2], [2, -2], [-2, 2], [-2, -2]], "float32")
NUM_COMPONENTS, VARIANCE, DELTA = len(CENTRES), 0.5, 1e-3
NUM_RECORDS, NUM_TEST, NUM_FRESH = 2000, 100, 10_000
EPSILONS = (0.3, 1.0, 3.0, 10.0)
STEPS, RATE, CLIP, EMA = (
    250,
    0.05,
    1.0,
    0.98,
)  # Those of examples/gaussian_mixture.py, chosen on other data.
# At the pilot's rate noise can move components from mode to mode; benchmarks/mixture_rates.py compares rates.
PILOTS_RATE, PAIRED_RATE = 0.1, 0.04
# DP-SGLD's settings are the best of these by the truth of other data sets, which is impossible for a user.
SGLD_GRID = [
    sgld.Settings(step_size=step, l2_norm_clip=clip, num_steps=STEPS)
    for clip in (1.0, 3.0, 10.0)
    for step in (3e-5, 1e-4, 3e-4, 1e-3, 3e-3)
]
TUNING_SEEDS = (1001, 1002, 1003)


def simulate(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns training records, the paper's number of test records, and more test records."""
    generator = np.random.default_rng(seed)
    num = NUM_RECORDS + NUM_TEST + NUM_FRESH
    chosen = generator.choice(NUM_COMPONENTS, size=num)
    records = CENTRES[chosen] + math.sqrt(VARIANCE) * generator.standard_normal((num, 2))
    return tuple(np.split(records.astype("float32"), [NUM_RECORDS, NUM_RECORDS + NUM_TEST]))


def starting_point() -> dict[str, np.ndarray]:
    """Returns five centres on a circle of radius 2, equal weights, unit variances."""
    angles = np.pi / 2 + 2 * np.pi * np.arange(NUM_COMPONENTS) / NUM_COMPONENTS
    return {
        "weights": np.full(NUM_COMPONENTS, 1 / NUM_COMPONENTS, "float32"),
        "means": (2.0 * np.stack([np.cos(angles), np.sin(angles)], axis=1)).astype("float32"),
        "variances": np.ones(NUM_COMPONENTS, "float32"),
    }


def make_prior() -> Any:
    return tfd.JointDistributionNamed(
        {
            "weights": tfd.Dirichlet(np.ones(NUM_COMPONENTS, "float32")),
            "means": tfd.Sample(tfd.Normal(0.0, 1.0), sample_shape=[NUM_COMPONENTS, 2]),
            "variances": tfd.Sample(tfd.InverseGamma(1.0, 1.0), sample_shape=NUM_COMPONENTS),
        }
    )


def likelihood(params: Any) -> Any:
    normals = tfd.Normal(params["means"], tf.sqrt(params["variances"])[..., tf.newaxis])
    return tfd.MixtureSameFamily(
        tfd.Categorical(probs=params["weights"]), tfd.Independent(normals, 1)
    )


def make_model(
    kind: type[dpvi.DPVI] = dpvi.DPVI, gradients: str = "vectorized", clipping: str = "flat"
) -> dpvi.DPVI:
    prior = make_prior()
    surrogate = dpvi.surrogates.mean_field(prior, initial_loc=starting_point(), initial_scale=0.03)
    return kind(prior, likelihood, surrogate, gradients=gradients, clipping=clipping)


def make_optimizer(clip: float = CLIP, averaging: bool = True) -> Callable[..., Any]:
    """Returns a function: `noise_multiplier=` -> Adam."""
    more = {"use_ema": True, "ema_momentum": EMA} if averaging else {}

    def of(**noise: float) -> Any:
        return dpvi.optimizers.DPKerasAdamOptimizer(RATE, l2_norm_clip=clip, **more, **noise)

    return of


def by_vector(vectors: np.ndarray, fresh: np.ndarray, test: np.ndarray) -> Row:
    """Returns scores of parameters, shape [S, K (d + 2)], and those of the true density on the same records."""
    truth = sgld.pack(np.full(NUM_COMPONENTS, 0.2), CENTRES, np.full(NUM_COMPONENTS, VARIANCE))[
        None
    ]
    weights, means, variances = sgld.unpack(vectors.mean(axis=0), NUM_COMPONENTS, 2)
    distances = np.linalg.norm(means[:, None] - CENTRES, axis=-1)
    return {
        "score": sgld.score(fresh, vectors, NUM_COMPONENTS),
        "truth": sgld.score(fresh, truth, NUM_COMPONENTS),
        "score_of_100": sgld.score(test, vectors, NUM_COMPONENTS),
        "truth_of_100": sgld.score(test, truth, NUM_COMPONENTS),
        # Of the true centres, those with a component's centre within one standard deviation.
        "found": int(np.sum(distances.min(axis=0) < math.sqrt(VARIANCE))),
        "components": {
            "weights": weights.tolist(),
            "means": means.tolist(),
            "variances": variances.tolist(),
        },
    }


def vectors_of(model: dpvi.DPVI, num: int = 100) -> np.ndarray:
    """Returns draws of a model's posterior as `sgld` has parameters."""
    draws = {name: part.numpy() for name, part in model.posterior_sample(num, seed=0).items()}
    logs = np.log(np.maximum(draws["weights"], 1e-30))
    return np.concatenate(
        [logs, draws["means"].reshape(num, -1), np.log(draws["variances"])], axis=1
    )


def dpvi_cell(epsilon: float, **changes: Any) -> Callable[[], Callable[[int], Row]]:
    """Returns a function that makes rows of fits of `DPVI`.

    Args:
      epsilon: math.inf for a fit without clip and noise.
      **changes: `kind`, `gradients`, `clipping`, `averaging`, `accountant`, `rate` (of the paired clip).
    """

    def make() -> Callable[[int], Row]:
        settings = {"gradients": "vectorized", "clipping": "flat", "kind": dpvi.DPVI, **changes}
        averaging, accountant = settings.pop("averaging", True), settings.pop("accountant", "pld")
        rate = settings.pop("rate", PAIRED_RATE)
        model, fit = make_model(**settings), {"batch_size": NUM_RECORDS, "steps_per_epoch": STEPS}
        if settings["clipping"] == "paired":
            pilot = dpvi.pilot(
                model, num_records=NUM_RECORDS, epsilon=epsilon, delta=DELTA, learning_rate=rate
            )
            optimizer, fit = (
                lambda **noise: pilot.adam(NUM_RECORDS, **noise),
                pilot.fit_settings,
            )
        else:
            private = epsilon < math.inf
            optimizer = make_optimizer(CLIP if private else math.inf, averaging)
        fits = Repeated(
            model,
            optimizer,
            simulate(1)[0],
            None,
            epsilon=epsilon,
            delta=DELTA,
            accountant=accountant,
            **fit,
        )

        def row(seed: int) -> Row:
            records, test, fresh = simulate(seed)
            return {
                **by_vector(vectors_of(fits(records)), fresh, test),
                "noise_multiplier": fits.noise,
            }

        return row

    return make


def sgld_cell(epsilon: float, accountant: str) -> Callable[[], Callable[[int], Row]]:
    """Returns a function that makes rows of DP-SGLD at its best settings."""

    def make() -> Callable[[int], Row]:
        plan = PrivacyPlan.calibrate(
            epsilon=epsilon,
            delta=DELTA,
            sampling=FullBatch(),
            num_releases=STEPS,
            accountant=accountant,
        )
        start = sgld.pack(*starting_point().values())

        def iterates(settings: sgld.Settings, records: np.ndarray, seed: int) -> np.ndarray:
            generator = np.random.default_rng([seed, 7])
            return sgld.run(
                records, start, NUM_COMPONENTS, settings, plan.noise_multiplier, generator
            )

        def tuning_score(settings: sgld.Settings) -> float:
            scores = []
            for seed in TUNING_SEEDS:
                records, _, fresh = simulate(seed)
                scores.append(
                    sgld.score(fresh[:2000], iterates(settings, records, seed), NUM_COMPONENTS, 50)
                )
            return float(np.mean(scores))

        best = max(SGLD_GRID, key=tuning_score)

        def row(seed: int) -> Row:
            records, test, fresh = simulate(seed)
            found = by_vector(iterates(best, records, seed)[-100:], fresh, test)
            return {
                **found,
                "noise_multiplier": plan.noise_multiplier,
                "clip": best.l2_norm_clip,
                "step_size": best.step_size,
            }

        return row

    return make


METHODS: dict[str, Callable[[float], Callable[[], Callable[[int], Row]]]] = {
    "dpvi": dpvi_cell,
    "paired": lambda epsilon: dpvi_cell(epsilon, gradients="aligned", clipping="paired"),
    "sgld": lambda epsilon: sgld_cell(epsilon, "pld"),
    "sgld_advanced": lambda epsilon: sgld_cell(epsilon, "advanced_composition"),
    "dpvi_advanced": lambda epsilon: dpvi_cell(epsilon, accountant="advanced_composition"),
}
COMPARED = (
    ("paired", 1),
    ("sgld", 1),
)  # With more seeds, as without privacy: one wrong mode decides the mean of 10.
MANY = 100
CELLS = [
    Cell("nonprivate", dpvi_cell(math.inf), num=MANY),
    Cell(
        "pilots_rate-1",
        dpvi_cell(1.0, gradients="aligned", clipping="paired", rate=PILOTS_RATE),
        num=MANY,
        full=True,
    ),
    *(
        Cell(f"{name}-{epsilon:g}", make(epsilon), num=MANY if (name, epsilon) in COMPARED else 10)
        for name, make in METHODS.items()
        for epsilon in EPSILONS
    ),
]
LABELS = {
    "dpvi": "DPVI",
    "paired": "DPVI, paired clip",
    "sgld": "DP-SGLD",
    "dpvi_advanced": "DPVI, advanced composition",
    "sgld_advanced": "DP-SGLD, advanced composition",
}


def report(folder: pathlib.Path) -> dict[tuple[str, str], str]:
    """Draws score over epsilon and the components; returns tables by page and block."""
    rows = {cell.name: load(folder / f"{cell.name}.json") for cell in CELLS}
    lines = [
        "| epsilon | " + " | ".join(LABELS.values()) + " | not private |",
        "| --- " * (len(LABELS) + 2) + "|",
    ]

    def below(cell: str) -> list[float]:
        return [row["truth"] - row["score"] for row in rows[cell]]

    for epsilon in EPSILONS:
        cells = [shown(below(f"{name}-{epsilon:g}")) for name in LABELS]
        lines.append(f"| {epsilon:g} | " + " | ".join(cells) + f" | {shown(below('nonprivate'))} |")
    wrong = {
        name: f"{sum(row['found'] < NUM_COMPONENTS for row in found)} of {len(found)}"
        for name, found in rows.items()
    }
    labels = {**LABELS, "pilots_rate": f"paired clip at the pilot's rate of {PILOTS_RATE:g}"}
    at_one = ", ".join(f"{label} {wrong.get(f'{name}-1')}" for name, label in labels.items())
    _draw(rows, below, folder)
    lines += [
        "",
        f"Fits with a wrong mode at epsilon 1: {at_one}, without privacy {wrong.get('nonprivate')}.",
        "",
    ]
    lines += [f"![Nats below the true density](figures/studies/{folder.name}/mixture.png)", ""]
    lines += [f"![Components beside the truth](figures/studies/{folder.name}/components.png)"]
    return {("docs/studies.md", "mixture"): "\n".join(lines)}


def _draw(
    rows: dict[str, list[Row]], below: Callable[[str], list[float]], folder: pathlib.Path
) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.5, 4), layout="constrained")
    for name, label in LABELS.items():
        found = [(epsilon, below(f"{name}-{epsilon:g}")) for epsilon in EPSILONS]
        found = [(epsilon, np.mean(values), np.std(values)) for epsilon, values in found if values]
        if found:
            places, means, spreads = np.array(found).T
            axes.errorbar(places, means, yerr=spreads, label=label, marker="o", ms=3, capsize=2)
    if rows["nonprivate"]:
        axes.axhline(np.mean(below("nonprivate")), color="0.5", ls="--", label="not private")
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="epsilon (delta 1e-3)",
        ylabel="nats a record below the true density",
    )
    if axes.has_data():
        axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(folder / "mixture.png", dpi=100)
    plt.close(figure)

    shown_cells = ["dpvi-1", "paired-1", "sgld_advanced-1", "nonprivate"]
    figure, panels = plt.subplots(1, 4, figsize=(13, 3.5), layout="constrained")
    records = simulate(1)[0]
    for name, panel in zip(shown_cells, panels, strict=True):
        panel.plot(*records.T, ".", ms=1, color="0.8")
        for centre in CENTRES:
            panel.add_patch(
                plt.Circle(centre, 2.146 * math.sqrt(VARIANCE), fill=False, color="k", ls=":")
            )
        for row in [row for row in rows[name] if row["seed"] == 1]:
            parts = row["components"]
            for mean, variance, weight in zip(
                parts["means"], parts["variances"], parts["weights"], strict=True
            ):
                color = plt.cm.Blues(min(1.0, 0.3 + 2 * weight))
                panel.add_patch(
                    plt.Circle(mean, 2.146 * math.sqrt(variance), fill=False, color=color, lw=2)
                )
        method, _, epsilon = name.partition("-")
        panel.set(
            aspect="equal",
            title=f"{LABELS.get(method, 'not private')}{' at ' + epsilon if epsilon else ''}",
        )
        panel.title.set_fontsize(9)
    figure.savefig(folder / "components.png", dpi=90)
    plt.close(figure)
