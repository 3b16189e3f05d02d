"""A private mixture of five Gaussians in the plane: a plain TFP model in `DPVI`.

Simulated records, after the mixture of Jälkö, Dikmen and Honkela (2017): five equally likely round components with
centres (0, 0) and (+-2, +-2) and standard deviation 0.5; 2,000 training records and 2,000 held out, from a fixed seed. The
component of a record is summed out (`tfd.MixtureSameFamily`). The unit of privacy is one record.

    python examples/gaussian_mixture.py [--epsilon 1] [--delta 1e-5] [--repeats 1] [--output outputs/gaussian_mixture]

Prints the held-out score (mean log predictive density per record, in nats) and the non-private one, the posterior and the
privacy report; saves a picture of the records with both fits, and the figures as JSON.

The initial values are public: five centres evenly spaced on a circle of radius 2, half the half-width of the public box
[-4, 4] x [-4, 4], equal weights, unit variances. The truth, in contrast, has one component in the middle.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import platform
import time
from typing import Any

import numpy as np

import tfp_dpvi as dpvi
from tfp_dpvi._tf import tf, tfp

tfd = tfp.distributions

CENTRES = np.array([[0, 0], [2, 2], [2, -2], [-2, 2], [-2, -2]], "float32")
SCALE = 0.5
NUM_COMPONENTS = len(CENTRES)
DATA_SEED = 2017

# Chosen on simulated data sets with seeds 1001 to 1004; the scored one has seed 2017 (and 2018, ... with --repeats). The
# records are simulated, so the choice cost no budget; on private ones it would. The average of the iterates (use_ema)
# removes most of the noise of the last one.
SETTINGS = {
    "l2_norm_clip": 1.0,
    "learning_rate": 0.05,
    "batch_size": 2000,  # All records in each step.
    "steps_per_epoch": 50,
    "epochs": 5,
    "ema_momentum": 0.98,
    "initial_scale": 0.03,
}
NON_PRIVATE_STEPS = 400


def simulate(num: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns training records of shape [num, 2], and as many held out."""
    generator = np.random.default_rng(seed)
    z = generator.choice(NUM_COMPONENTS, size=2 * num)
    records = (CENTRES[z] + SCALE * generator.standard_normal((2 * num, 2))).astype("float32")
    return records[:num], records[num:]


def make_prior() -> Any:
    """Returns the public prior of weights, centres and variances of the components."""
    return tfd.JointDistributionNamed(
        {
            "weights": tfd.Dirichlet(np.ones(NUM_COMPONENTS, "float32")),
            "means": tfd.Sample(tfd.Normal(0.0, 4.0), sample_shape=[NUM_COMPONENTS, 2]),
            "variances": tfd.Sample(tfd.InverseGamma(1.0, 1.0), sample_shape=NUM_COMPONENTS),
        }
    )


def likelihood(params: Any) -> Any:
    """Returns the distribution of one record of shape [2], without local latent variables."""
    normals = tfd.Normal(params["means"], tf.sqrt(params["variances"])[..., tf.newaxis])
    return tfd.MixtureSameFamily(
        tfd.Categorical(probs=params["weights"]), tfd.Independent(normals, 1)
    )


def starting_point() -> dict[str, np.ndarray]:
    """Returns public initial values of the parameters, in the prior's support."""
    angles = np.pi / 2 + 2 * np.pi * np.arange(NUM_COMPONENTS) / NUM_COMPONENTS
    return {
        "weights": np.full(NUM_COMPONENTS, 1 / NUM_COMPONENTS, "float32"),
        "means": (2.0 * np.stack([np.cos(angles), np.sin(angles)], axis=1)).astype("float32"),
        "variances": np.ones(NUM_COMPONENTS, "float32"),
    }


def make_model(initial_scale: float) -> dpvi.DPVI:
    prior = make_prior()
    surrogate = dpvi.surrogates.mean_field(
        prior, initial_loc=starting_point(), initial_scale=initial_scale
    )
    # Gradients in the surrogate's unconstrained variables instead of the parameters ("aligned"): the gradient in a weight on
    # the simplex is about 1 / weight, and would use up most of the clip.
    return dpvi.DPVI(prior, likelihood, surrogate, gradients="vectorized", clipping="flat")


def fit_private(
    x: np.ndarray, epsilon: float, delta: float, verbose: int, **changes: Any
) -> dpvi.DPVI:
    settings = {**SETTINGS, **changes}
    model = make_model(settings["initial_scale"])
    model.compile(
        optimizer=dpvi.optimizers.DPKerasAdamOptimizer(
            l2_norm_clip=settings["l2_norm_clip"],
            learning_rate=settings["learning_rate"],
            use_ema=True,
            ema_momentum=settings["ema_momentum"],
        ),
        epsilon=epsilon,
        delta=delta,
    )
    model.fit(
        x,
        batch_size=settings["batch_size"],
        epochs=settings["epochs"],
        steps_per_epoch=settings["steps_per_epoch"],
        verbose=verbose,
    )
    return model


def fit_non_private(x: np.ndarray, steps: int = NON_PRIVATE_STEPS) -> dpvi.DPVI:
    """Fits the same model from the same initial values without noise and clip, on full batches."""
    model = make_model(SETTINGS["initial_scale"])
    model.compile(
        optimizer=dpvi.optimizers.DPKerasAdamOptimizer(
            l2_norm_clip=math.inf, noise_multiplier=0.0, learning_rate=0.05
        )
    )
    model.fit(x, batch_size=len(x), epochs=1, steps_per_epoch=steps, verbose=0)
    return model


def score(model: dpvi.DPVI, x: np.ndarray) -> float:
    """Returns the mean log posterior predictive density of the records, in nats."""
    return float(np.mean(model.predictive().log_prob(x)))


def single_gaussian_score(x: np.ndarray, x_test: np.ndarray) -> float:
    """Returns the score of one Gaussian, fitted without privacy, as a baseline."""
    scale = np.linalg.cholesky(np.cov(x.T)).astype(x.dtype)
    return float(np.mean(tfd.MultivariateNormalTriL(x.mean(0), scale).log_prob(x_test)))


def posterior_table(model: dpvi.DPVI) -> list[dict[str, Any]]:
    """Returns posterior means and standard deviations of each component, ordered by their centres' angles."""
    draws = {name: value.numpy() for name, value in model.posterior_sample(1000, seed=0).items()}
    mean = {name: value.mean(0) for name, value in draws.items()}
    sd = {name: value.std(0) for name, value in draws.items()}
    order = np.lexsort((mean["means"][:, 1].round(), mean["means"][:, 0].round()))
    return [
        {
            "weight": float(mean["weights"][k]),
            "weight_sd": float(sd["weights"][k]),
            "mean": mean["means"][k].tolist(),
            "mean_sd": sd["means"][k].tolist(),
            "scale": float(np.sqrt(draws["variances"][:, k]).mean()),
            "scale_sd": float(np.sqrt(draws["variances"][:, k]).std()),
        }
        for k in order
    ]


def components_found(table: list[dict[str, Any]]) -> int:
    """Returns the number of true centres within one standard deviation of a component's posterior mean."""
    means = np.array([row["mean"] for row in table])
    return int(sum(np.linalg.norm(means - centre, axis=1).min() < SCALE for centre in CENTRES))


def draw_components(
    x: np.ndarray, tables: dict[str, list[dict[str, Any]]], title: str, path: Any
) -> None:
    """Plots the records, and for each fit circles with 90 % of each component at the posterior mean."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 7), layout="constrained")
    axes.plot(*x.T, ".", ms=2, color="0.7", label="records (simulated)", zorder=0)
    axes.plot(*CENTRES.T, "k+", ms=9, label="true centres")
    radius = math.sqrt(-2 * math.log(1 - 0.9))
    for (label, table), color, style in zip(tables.items(), ("C0", "C1"), ("-", "--"), strict=True):
        for number, row in enumerate(table):
            circle = plt.Circle(
                row["mean"], radius * row["scale"], fill=False, color=color, ls=style, lw=1.8
            )
            axes.add_patch(circle)
            axes.plot(*row["mean"], "o", ms=4, color=color)
            if number == 0:
                circle.set_label(f"{label}: 90 % of each component")
    axes.set_aspect("equal")
    axes.set_title(title)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.05), ncols=2, frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epsilon", type=float, default=1.0)
    parser.add_argument("--delta", type=float, default=1e-5)
    parser.add_argument("--records", type=int, default=2000)
    parser.add_argument(
        "--data-seed", type=int, default=DATA_SEED, help="seed of the (first) simulated data set"
    )
    parser.add_argument(
        "--repeats", type=int, default=1, help="score the mean over so many data sets"
    )
    parser.add_argument("--quick", action="store_true", help="few steps, to see that it runs")
    parser.add_argument(
        "--output", type=pathlib.Path, default=pathlib.Path("outputs/gaussian_mixture")
    )
    options = parser.parse_args(arguments)
    begin = time.perf_counter()
    changes = {"epochs": 3, "ema_momentum": 0.97} if options.quick else {}
    steps = 300 if options.quick else NON_PRIVATE_STEPS

    x, x_test = simulate(options.records, options.data_seed)
    print(
        f"{len(x)} simulated training records, {len(x_test)} held out, {NUM_COMPONENTS} components\n"
    )
    model = fit_private(x, options.epsilon, options.delta, verbose=1, **changes)
    reference = fit_non_private(x, steps)
    table, reference_table = posterior_table(model), posterior_table(reference)
    scores = [(score(model, x_test), score(reference, x_test))]
    found = [components_found(table)]
    for seed in range(options.data_seed + 1, options.data_seed + options.repeats):
        more, more_test = simulate(options.records, seed)
        other = fit_private(more, options.epsilon, options.delta, verbose=0, **changes)
        scores.append((score(other, more_test), score(fit_non_private(more, steps), more_test)))
        found.append(components_found(posterior_table(other)))
    private_score, reference_score = (float(value) for value in np.mean(scores, axis=0))
    baseline = single_gaussian_score(x, x_test)

    report = model.privacy_report()
    over = "" if options.repeats == 1 else f" (mean of {options.repeats} data sets)"
    print(
        f"\nHeld-out log predictive density{over}: {private_score:.3f} private, {reference_score:.3f} non-private"
    )
    print(
        f"One Gaussian, non-private: {baseline:.3f}. Components found: {found[0]} of {NUM_COMPONENTS}\n"
    )
    print(
        "component   weight (sd)     centre (sd)                       scale (sd)      non-private centre"
    )
    for number, (row, other_row) in enumerate(zip(table, reference_table, strict=True), start=1):
        (a, b), (sd_a, sd_b) = row["mean"], row["mean_sd"]
        print(
            f"{number:9d}   {row['weight']:.3f} ({row['weight_sd']:.3f})   {a:6.2f} ({sd_a:.2f}), {b:6.2f} ({sd_b:.2f})"
            f"      {row['scale']:7.3f} ({row['scale_sd']:.3f})"
            f"   {other_row['mean'][0]:6.2f}, {other_row['mean'][1]:6.2f}"
        )
    print(f"\n{report}\n")

    options.output.mkdir(parents=True, exist_ok=True)
    draw_components(
        x,
        {"private": table, "non-private": reference_table},
        f"Five components at epsilon {options.epsilon:g}, delta {options.delta:g}",
        options.output / "components.png",
    )
    seconds = time.perf_counter() - begin
    result = {
        "held_out": private_score,
        "non_private_held_out": reference_score,
        "single_gaussian_held_out": baseline,
        "components_found": found,
        "repeats": options.repeats,
        "scores": [{"private": a, "non_private": b} for a, b in scores],
        "epsilon": report.epsilon,
        "delta": report.delta,
        "seconds": seconds,
        "settings": {**SETTINGS, **changes, "non_private_steps": steps, "records": options.records},
        "data_seed": options.data_seed,
        "posterior": table,
        "non_private_posterior": reference_table,
        "privacy_report": report.to_json(),
        "versions": {
            "python": platform.python_version(),
            "tensorflow": tf.__version__,
            "tfp": tfp.__version__,
            "tfp_dpvi": dpvi.__version__,
        },
    }
    (options.output / "gaussian_mixture.json").write_text(json.dumps(result, indent=1) + "\n")
    print(
        f"Picture and figures: {options.output}/components.png, {options.output}/gaussian_mixture.json"
    )
    print(
        f"gaussian_mixture: held-out {private_score:.4f} non-private {reference_score:.4f} epsilon {report.epsilon:.4f} "
        f"delta {report.delta:g} seconds {seconds:.1f}"
    )
    return result


if __name__ == "__main__":
    main()
