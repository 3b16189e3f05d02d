"""Ablation from the 2017 paper's DPVI to the paired clip, on Adult and on the paper's mixture.

paper        KL inside the clip, vectorized gradients, advanced composition (equations 7 and 8)
kl           the KL term outside the clip, exact
accounting   tight accounting (privacy loss distributions)
aligned      one noisy gradient in the parameters, pulled back
averaging    the average of the iterates
paired       the difference of a record's gradient and its twin's; the calibrated posterior

Each includes the changes before it. Adult: held-out log density and accuracy of logistic regression on its 14 codes at epsilon
0.3 and 1, delta 1e-5, an 80 % split by seed. Mixture: nats below the true density, delta 1e-3.
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_probability as tfp
from data import load_adult

import tfp_dpvi as dpvi
from studies import mixture
from studies.cells import Cell, Repeated, Row, load, shown
from tfp_dpvi import _random
from tfp_dpvi.gradients import ClippedGradient, StepGradient, StepSpec, through_draws

tfd = tfp.distributions
DELTA, STEPS, RATE, CLIP, EMA, BATCH_SHARE = 1e-5, 300, 0.05, 1.0, 0.98, 0.05
EPSILONS = (0.3, 1.0)


class KLInside(dpvi.DPVI):
    """DPVI as in the 2017 paper: clips a record's log density minus its share of the KL term."""

    def clipped_gradient(self, spec: StepSpec) -> ClippedGradient:
        variables, surrogate, prior, clip = (
            self.trainable_variables,
            self.surrogate_posterior,
            self.prior,
            self.clip,
        )

        def draw(key: tf.Tensor) -> StepGradient:
            seed = _random.tfp_seed(_random.fold_in(key, 0))
            with tf.GradientTape(persistent=True, watch_accessed_variables=False) as outer:
                outer.watch(variables)
                params, log_q = surrogate.experimental_sample_and_log_prob(seed=seed)
                share = (log_q - prior.log_prob(params)) / spec.num_records

            def record_loss(record: dict[str, tf.Tensor]) -> tf.Tensor:
                return share - self.bayesian_model.record_log_prob(params, record)

            none = [tf.zeros_like(variable) for variable in variables]
            parts = [*tf.nest.flatten(params), share]
            return through_draws(
                record_loss,
                parts,
                outer,
                variables,
                clip,
                aligned=False,
                data_independent=none,
                data_independent_loss=tf.zeros_like(share),
            )

        return ClippedGradient(draw, clip, identity=("kl inside",))


BARS: dict[str, dict[str, Any]] = {
    "paper": {"kind": KLInside, "averaging": False, "accountant": "advanced_composition"},
    "kl": {"averaging": False, "accountant": "advanced_composition"},
    "accounting": {"averaging": False},
    "aligned": {"averaging": False, "gradients": "aligned"},
    "averaging": {"gradients": "aligned"},
    "paired": {"gradients": "aligned", "clipping": "paired"},
}
LABELS = {
    "paper": "2017 paper",
    "kl": "KL outside the clip",
    "accounting": "tight accounting",
    "aligned": "aligned gradients",
    "averaging": "averaging",
    "paired": "paired clip",
}


@functools.cache
def adult() -> tuple[np.ndarray, np.ndarray]:
    """Returns Adult's standardised codes, with the records' own means, which is not private, and labels."""
    found = load_adult("ordinal")
    x = np.asarray(found.x, "float32")
    return (x - x.mean(axis=0)) / x.std(axis=0), np.asarray(found.y, "float32")


def split(seed: int) -> tuple[Any, ...]:
    """Returns training and test x, y."""
    x, y = adult()
    order, size = np.random.default_rng(seed).permutation(len(y)), round(0.8 * len(y))
    own, other = order[:size], order[size:]
    return x[own], y[own], x[other], y[other]


def adult_cell(epsilon: float, **changes: Any) -> Callable[[], Callable[[int], Row]]:
    """Returns a function that makes rows on Adult."""

    def make() -> Callable[[int], Row]:
        settings = {"gradients": "vectorized", "clipping": "flat", "kind": dpvi.DPVI, **changes}
        averaging, accountant = settings.pop("averaging", True), settings.pop("accountant", "pld")
        x, y, _, _ = split(1)
        prior = tfd.JointDistributionNamed(
            {"b": tfd.Normal(0.0, 1.0), "w": tfd.Sample(tfd.Normal(0.0, 1.0), x.shape[1])}
        )

        def likelihood(params: Any, x: Any) -> Any:
            return tfd.Bernoulli(
                logits=params["b"] + tf.linalg.matvec(x, params["w"]), dtype=tf.float32
            )

        model = settings.pop("kind")(prior, likelihood, **settings)
        fit = {"batch_size": round(BATCH_SHARE * len(y)), "steps_per_epoch": STEPS}
        more = {"use_ema": True, "ema_momentum": EMA} if averaging else {}

        def optimizer(**noise: float) -> Any:
            return dpvi.optimizers.DPKerasAdamOptimizer(RATE, l2_norm_clip=CLIP, **more, **noise)

        if settings["clipping"] == "paired":
            made_up = np.random.default_rng(0).normal(size=(1000, x.shape[1])).astype("float32")
            pilot = dpvi.pilot(model, made_up, num_records=len(y), epsilon=epsilon, delta=DELTA)
            fit = pilot.fit_settings

            def optimizer(**noise: float) -> Any:
                return pilot.adam(len(y), **noise)

        fits = Repeated(
            model, optimizer, x, y, epsilon=epsilon, delta=DELTA, accountant=accountant, **fit
        )

        def row(seed: int) -> Row:
            x, y, x_test, y_test = split(seed)
            fitted = fits(x, y)
            logs = fitted.predictive(x_test).log_prob(y_test).numpy()
            accuracy = np.mean((fitted.predict(x_test).ravel() > 0.5) == y_test)
            return {
                "score": float(np.mean(logs)),
                "accuracy": float(accuracy),
                "noise_multiplier": fits.noise,
            }

        return row

    return make


CELLS = [
    *(
        Cell(f"adult-{eps:g}-{name}", adult_cell(eps, **bar))
        for eps in EPSILONS
        for name, bar in BARS.items()
    ),
    *(Cell(f"mixture-1-{name}", mixture.dpvi_cell(1.0, **bar)) for name, bar in BARS.items()),
]


def report(folder: pathlib.Path) -> dict[tuple[str, str], str]:
    """Draws the bars; returns a table by page and block."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    found = {cell.name: load(folder / f"{cell.name}.json") for cell in CELLS}
    columns = {
        **{
            f"Adult, epsilon {eps:g}": (f"adult-{eps:g}", lambda row: -row["score"])
            for eps in EPSILONS
        },
        "mixture, epsilon 1": ("mixture-1", lambda row: row["truth"] - row["score"]),
    }
    figure, axes = plt.subplots(1, len(columns), figsize=(12, 3.2), layout="constrained")
    table = {name: [label] for name, label in LABELS.items()}
    for panel, (title, (prefix, loss)) in zip(axes, columns.items(), strict=True):
        for place, name in enumerate(LABELS):
            values = [loss(row) for row in found[f"{prefix}-{name}"]]
            table[name].append(shown(values, 4))
            if values:
                panel.barh(
                    -place, np.mean(values), xerr=np.std(values), color="C0" if place else "0.6"
                )
        panel.set(
            title=title,
            xlabel="nats below the true density"
            if "mixture" in title
            else "- log density a record",
        )
        panel.set_yticks(
            [-place for place in range(len(LABELS))],
            list(LABELS.values()) if panel is axes[0] else [],
        )
        lengths = [patch.get_width() for patch in panel.patches]
        if lengths and "mixture" not in title:
            panel.set_xlim(left=0.98 * min(lengths))
    figure.savefig(folder / "bars.png", dpi=90)
    plt.close(figure)
    accuracy = {name: [row["accuracy"] for row in found[f"adult-1-{name}"]] for name in LABELS}
    lines = [
        "| | " + " | ".join(columns) + " | accuracy on Adult at epsilon 1 |",
        "| --- " * (len(columns) + 2) + "|",
    ]
    lines += [
        f"| {' | '.join(cells)} | {shown(accuracy[name], 4)} |" for name, cells in table.items()
    ]
    lines += ["", f"![One improvement after the other](figures/studies/{folder.name}/bars.png)"]
    return {("docs/studies.md", "bars"): "\n".join(lines)}
