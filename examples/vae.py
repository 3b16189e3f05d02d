"""Variational autoencoders of MNIST and Fashion-MNIST under differential privacy.

The network of the DP literature, 784-400-50-400-784 with 688,884 parameters, and a small convolutional one. Three recipes,
the private ones with the same budget:

* `recommended`: this library's settings below;
* `d3p`: the published recipe of d3p (Prediger et al. 2022, arXiv:2103.11648): batches of 128, 20 epochs, one draw, Adam at
  1e-3, flat clip;
* `non-private`: the same network without clip and noise.

The likelihood is Bernoulli on grey values in [0, 1], not on binarised images, and the score is the mean -ELBO of the
10,000 test images in nats, with one draw each: lower is better. Test images are not used in training.

    python examples/vae.py [--data mnist] [--network dense] [--epsilon 2] [--full] [--output docs/figures/vae]
    python examples/vae.py --study --seeds 5      five seeds of each recipe, and an ablation

Writes JSON and pictures: reconstructions, samples, the latent space.

Settings were chosen by runs on the first 50,000 training images, scored on the last 10,000. These images are public; on
private records such a search would cost budget.
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
from data import load_fashion_mnist, load_mnist

import tfp_dpvi as dpvi
from tfp_dpvi._tf import keras, tf, tfp

tfd, layers = tfp.distributions, keras.layers
DELTA = 1e-5
LATENT = 50

RECIPES: dict[str, dict[str, Any]] = {
    "d3p": {
        "batch_size": 128,
        "epochs": 20,
        "num_draws": 1,
        "learning_rate": 1e-3,
        "l2_norm_clip": 1.0,
    },
    "recommended": {
        "batch_size": 2048,
        "epochs": 20,
        "num_draws": 1,
        "learning_rate": 4.5e-3,
        "l2_norm_clip": 1.0,
        "clipping": "per_layer",
        "ema_momentum": 0.95,
    },
    "non-private": {
        "batch_size": 128,
        "epochs": 20,
        "num_draws": 1,
        "learning_rate": 1e-3,
        "l2_norm_clip": math.inf,
    },
}


def dense_networks() -> tuple[Any, Any, Any]:
    """Builds the network of 688,884 parameters."""
    encoder = keras.Sequential(
        [
            layers.Input([784]),
            layers.Dense(400, "relu"),
            layers.Dense(2 * LATENT),
            tfp.layers.DistributionLambda(_diagonal(LATENT)),
        ],
        name="encoder",
    )
    decoder = keras.Sequential(
        [
            layers.Input([LATENT]),
            layers.Dense(400, "relu"),
            layers.Dense(784),
            tfp.layers.DistributionLambda(_bernoulli),
        ],
        name="decoder",
    )
    return encoder, decoder, tfd.MultivariateNormalDiag(tf.zeros(LATENT), tf.ones(LATENT))


def convolutional_networks() -> tuple[Any, Any, Any]:
    """Builds a small convolutional network: 64,161 parameters."""
    size = 16
    encoder = keras.Sequential(
        [
            layers.Input([784]),
            layers.Reshape([28, 28, 1]),
            layers.Conv2D(16, 4, 2, "same", activation="relu"),
            layers.Conv2D(32, 4, 2, "same", activation="relu"),
            layers.Flatten(),
            layers.Dense(2 * size),
            tfp.layers.DistributionLambda(_diagonal(size)),
        ],
        name="encoder",
    )
    decoder = keras.Sequential(
        [
            layers.Input([size]),
            layers.Dense(7 * 7 * 32, "relu"),
            layers.Reshape([7, 7, 32]),
            layers.Conv2DTranspose(16, 4, 2, "same", activation="relu"),
            layers.Conv2DTranspose(1, 4, 2, "same"),
            layers.Flatten(),
            tfp.layers.DistributionLambda(_bernoulli),
        ],
        name="decoder",
    )
    return encoder, decoder, tfd.MultivariateNormalDiag(tf.zeros(size), tf.ones(size))


NETWORKS = {"dense": dense_networks, "convolutional": convolutional_networks}


def _diagonal(size: int) -> Any:
    return lambda t: tfd.MultivariateNormalDiag(t[..., :size], tf.nn.softplus(t[..., size:]))


def _bernoulli(logits: Any) -> Any:
    return tfd.Independent(tfd.Bernoulli(logits=logits, dtype=logits.dtype), 1)


def load(data: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns training images, test images and test labels, as rows of 784 grey values."""
    loader = {"mnist": load_mnist, "fashion_mnist": load_fashion_mnist}[data]
    train, test = loader(), loader("test")
    return train.x.reshape(-1, 784), test.x.reshape(-1, 784), test.y


def train(
    x: np.ndarray,
    network: str,
    recipe: dict[str, Any],
    epsilon: float | None,
    *,
    seed: int,
    verbose: int = 0,
) -> Any:
    """Fits a model. `seed` determines the initial weights; noise keys come from the operating system."""
    keras.utils.set_random_seed(seed)
    model = dpvi.DPVAE(*NETWORKS[network](), num_draws=recipe["num_draws"])
    average = (
        {"use_ema": True, "ema_momentum": recipe["ema_momentum"]}
        if recipe.get("ema_momentum")
        else {}
    )
    optimizer = dpvi.optimizers.DPKerasAdamOptimizer(
        l2_norm_clip=recipe["l2_norm_clip"],
        noise_multiplier=0.0 if epsilon is None else None,
        clipping=recipe.get("clipping", "flat"),
        learning_rate=recipe["learning_rate"],
        **average,
    )
    budget = {} if epsilon is None else {"epsilon": epsilon}
    model.compile(optimizer, delta=DELTA, **budget)
    model.fit(x, batch_size=recipe["batch_size"], epochs=recipe["epochs"], verbose=verbose)
    return model


def score(model: Any, test: np.ndarray) -> dict[str, float]:
    """Returns the mean -ELBO of the test images in nats, and its parts."""
    bounds = model.elbo(test, seed=0)
    divergence = tfd.kl_divergence(model.encode(test), model.prior).numpy().mean()
    return {
        "negative_elbo": float(-bounds.mean()),
        "divergence": float(divergence),
        "reconstruction": float(-bounds.mean() - divergence),
    }


VARIANTS: dict[str, dict[str, Any]] = {
    "batches of 128": {"batch_size": 128, "learning_rate": 1e-3, "ema_momentum": 0.999},
    "weights not averaged": {"ema_momentum": None},
    "4 draws before the clip": {"num_draws": 4},
    "one clip for all layers": {"clipping": "flat", "learning_rate": 3e-3},
    "normalized in place of clipped": {"clipping": "normalized", "learning_rate": 3e-3},
    "Adam at 1e-3": {"learning_rate": 1e-3},
}
"""The study's changes of the recommended recipe, one at a time."""


def study(args: argparse.Namespace) -> dict[str, Any]:
    """Returns scores of every recipe and of the ablation, mean and standard error over seeds."""
    x, test, _ = load("mnist")
    names = ["recommended", "d3p", "non-private"]
    runs: dict[str, dict[str, Any]] = {name: dict(RECIPES[name]) for name in names}
    counts = {
        "recommended": args.seeds,
        "d3p": args.seeds,
        "non-private": max(1, args.variant_seeds),
    }
    for name, change in VARIANTS.items():
        runs[f"recommended, {name}"] = {**RECIPES["recommended"], **change}
        counts[f"recommended, {name}"] = args.variant_seeds
    results: dict[str, Any] = {
        name: {"settings": _plain(recipe), "scores": [], "epsilon": None}
        for name, recipe in runs.items()
    }
    path = pathlib.Path(args.output) / "vae_study.json"
    if args.resume:
        _take_over(results, path)
    compared = [(seed, name) for seed in range(args.seeds) for name in ("recommended", "d3p")]
    others = [
        (seed, name)
        for name in runs
        for seed in range(counts[name])
        if (seed, name) not in compared
    ]
    for seed, name in [*compared, *others]:
        if seed < len(results[name]["scores"]):
            continue  # Scored in an earlier run.
        recipe = runs[name]
        begin = time.perf_counter()
        epsilon = None if name == "non-private" else args.epsilon
        model = train(
            x[: args.images],
            "dense",
            {**recipe, "epochs": args.epochs or recipe["epochs"]},
            epsilon,
            seed=seed,
        )
        result = results[name]
        result["scores"].append(score(model, test)["negative_elbo"])
        result["epsilon"] = model.privacy_report().epsilon if epsilon else None
        print(
            f"seed {seed}  {name:45s} {result['scores'][-1]:8.2f}  {time.perf_counter() - begin:6.1f} s",
            flush=True,
        )
        for each in results.values():
            each.update(_summary(each["scores"]))
        _save(path, {"study": results, **_about(args)})
    difference = np.subtract(results["d3p"]["scores"], results["recommended"]["scores"])
    print(f"\n{'recipe':52s} -ELBO a test image (nats), mean +- standard error")
    for name, result in results.items():
        if not result["scores"]:
            continue
        error = result["standard_error"]
        spread = (
            "         (one seed)"
            if error is None
            else f" +- {error:.2f} ({len(result['scores'])} seeds)"
        )
        print(f"{name:52s} {result['mean']:8.2f}{spread}")
    errors = (
        difference.std(ddof=1) / math.sqrt(len(difference)) if len(difference) > 1 else math.nan
    )
    print(
        f"vae study: recommended {results['recommended']['mean']:.2f} d3p {results['d3p']['mean']:.2f} non-private "
        f"{results['non-private']['mean']:.2f} better by {difference.mean():.2f} standard error {errors:.2f}"
    )
    return results


def _take_over(results: dict[str, Any], path: pathlib.Path) -> None:
    """Copies scores of an earlier, interrupted study with the same settings."""
    for name, earlier in json.loads(path.read_text())["study"].items():
        if name in results and earlier["settings"] == results[name]["settings"]:
            results[name] = earlier


def _summary(scores: list[float]) -> dict[str, float | None]:
    if not scores:
        return {"mean": None, "standard_error": None}
    error = float(np.std(scores, ddof=1) / math.sqrt(len(scores))) if len(scores) > 1 else None
    return {"mean": float(np.mean(scores)), "standard_error": error}


def _plain(recipe: dict[str, Any]) -> dict[str, Any]:
    return {key: "none" if value == math.inf else value for key, value in recipe.items()}


def _about(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "arguments": vars(args),
        "delta": DELTA,
        "score": "mean negative ELBO of the test images in nats; Bernoulli on grey values, one draw",
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "system": platform.system(),
        },
        "versions": {
            "python": platform.python_version(),
            "tensorflow": tf.__version__,
            "tfp": tfp.__version__,
        },
    }


def _save(path: pathlib.Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


# ---------------------------------------------------------------------- pictures


def draw_images(path: pathlib.Path, rows: dict[str, np.ndarray], title: str) -> None:
    """Plots rows of images with their names at the left."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(len(rows), 1, figsize=(8, 1.0 * len(rows) + 0.5), squeeze=False)
    for axis, (name, images) in zip(axes[:, 0], rows.items(), strict=True):
        axis.imshow(
            np.concatenate([image.reshape(28, 28) for image in images], axis=1),
            cmap="gray_r",
            vmin=0,
            vmax=1,
        )
        axis.set_ylabel(name, rotation=0, ha="right", va="center")
        axis.set(xticks=[], yticks=[])
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_latent(
    path: pathlib.Path, models: dict[str, Any], test: np.ndarray, labels: np.ndarray
) -> None:
    """Plots latent means of test images in the two directions of largest variance, coloured by class."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(models), figsize=(4.6 * len(models), 4.2), squeeze=False)
    for axis, (name, model) in zip(axes[0], models.items(), strict=True):
        means = model.encode(test[:2000]).mean().numpy()
        directions = np.linalg.svd(means - means.mean(0), full_matrices=False)[2][:2]
        points = (means - means.mean(0)) @ directions.T
        drawn = axis.scatter(*points.T, c=labels[:2000], cmap="tab10", s=5)
        axis.set(title=name, xlabel="first direction", ylabel="second direction", aspect="equal")
    figure.colorbar(drawn, ax=axes[0, -1], label="class", ticks=range(10))
    figure.suptitle("Latent means of test images")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


# ---------------------------------------------------------------------- the example


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Trains, prints and plots; returns the contents of the JSON file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", choices=["mnist", "fashion_mnist"], default="mnist")
    parser.add_argument("--network", choices=sorted(NETWORKS), default="dense")
    parser.add_argument("--epsilon", type=float, default=2.0)
    parser.add_argument(
        "--epochs", type=int, help="default: 5, with --full those of the recipes (20)"
    )
    parser.add_argument("--images", type=int, help="default: all 60,000")
    parser.add_argument(
        "--full", action="store_true", help="the published setting: 20 epochs, also d3p's recipe"
    )
    parser.add_argument(
        "--study", action="store_true", help="seeds of every recipe and variant (an hour or so)"
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--variant-seeds", type=int, default=2)
    parser.add_argument(
        "--resume", action="store_true", help="continue the study in the output folder"
    )
    parser.add_argument("--quick", action="store_true", help="a few seconds, to see that it runs")
    parser.add_argument("--output", default="outputs/vae")
    args = parser.parse_args(argv)
    if args.quick:
        args.images, args.epochs, args.seeds, args.variant_seeds = 1000, 1, 1, 0
    if args.study:
        return study(args)
    begin = time.perf_counter()
    if args.epochs is None and not args.full:
        args.epochs = 5
    x, test, labels = load(args.data)
    x = x[: args.images]
    models, scores = {}, {}
    for name in (
        ["recommended", "d3p", "non-private"] if args.full else ["recommended", "non-private"]
    ):
        recipe = {**RECIPES[name], "epochs": args.epochs or RECIPES[name]["epochs"]}
        recipe["batch_size"] = min(recipe["batch_size"], max(1, len(x) // 4))
        print(f"{name}: {recipe}", flush=True)
        verbose = 2 if name == "recommended" else 0
        model = train(
            x,
            args.network,
            recipe,
            None if name == "non-private" else args.epsilon,
            seed=0,
            verbose=verbose,
        )
        models[name], scores[name] = model, {**score(model, test), "settings": _plain(recipe)}
    report = models["recommended"].privacy_report()
    output = pathlib.Path(args.output)
    seconds = time.perf_counter() - begin
    result = {
        "data": args.data,
        "network": args.network,
        "scores": scores,
        "report": report.to_json(),
        "seconds": seconds,
    }
    _save(output / f"vae_{args.data}_{args.network}.json", {**result, **_about(args)})
    shown = test[:12]
    rows = {
        "test images": shown,
        **{name: model.reconstruct(shown) for name, model in models.items()},
    }
    title = f"epsilon {report.epsilon:.2f}, delta {DELTA:g}"
    draw_images(
        output / f"reconstructions_{args.data}_{args.network}.png",
        rows,
        f"Reconstructions, {title}",
    )
    rows = {name: model.sample_predictive(12, seed=0, mean=True) for name, model in models.items()}
    draw_images(
        output / f"samples_{args.data}_{args.network}.png", rows, f"Samples (means), {title}"
    )
    draw_latent(output / f"latent_{args.data}_{args.network}.png", models, test, labels)
    print(f"\n{report}\n")
    for name, found in scores.items():
        print(
            f"{name:12s} -ELBO {found['negative_elbo']:7.2f} nats = {found['reconstruction']:.2f} + KL {found['divergence']:.2f}"
        )
    print(
        f"vae: {args.data} {args.network} negative-elbo {scores['recommended']['negative_elbo']:.2f} non-private "
        f"{scores['non-private']['negative_elbo']:.2f} epsilon {report.epsilon:.4f} delta {DELTA:g} seconds {seconds:.1f}"
    )
    return result


if __name__ == "__main__":
    main()
