"""Sparse codes of private images: PriVAE on Fashion-MNIST (Takahashi et al. 2020, arXiv:2006.11204, figure 1).

A dense VAE (784-400-50) with a sparse prior, in each of 50 latent dimensions 0.8 N(0, 0.05^2) + 0.2 N(0, 1), and the
dimension-wise MMD of codes from that prior as a batch-wise regulariser (Mathieu et al. 2019, arXiv:1812.02833).

    python examples/privae_sparse.py [--epsilon 1 2 4 8] [--delta 1e-5] [--full] [--quick]

At every epsilon: term-wise gradients with noise in blocks ("MMD") and the same model without the regulariser, calibrated to
the same (epsilon, delta). At the largest epsilon (--full: all) other aggregations of the same two terms, with the same clips
and the same privacy:

* two draws: one for each term with equal shares of the budget (noise="split"), the paper's scheme with the
  corrected sensitivity of the batch-wise term, twice its clip;
* one size: the same noise on the decoder, which the regulariser does not reach, as on the encoder (noise="single");
* one group: batch aggregation, num_partitions=1, the whole batch's gradient of the regulariser clipped as one. One
  record can then change it completely. (The MMD, whose cost is quadratic, uses every 32nd code.)
* micro-aggregation: images are in fixed micro-batches of 16, and the gradient of both terms of a micro-batch is clipped once,
  as with TensorFlow Privacy's `num_microbatches`. The unit of sampling, clipping and privacy is a micro-batch; adding or
  removing an image replaces a micro-batch by another, so the accounting is that of replacing one.
* batch aggregation: the same with micro-batches of a whole batch, one of which is expected in a step.

For orientation: both models without noise and clips. A noise multiplier is relative to the clip of a record; with the
regulariser it is not comparable between methods, but epsilon is.

Figures are for test images: the Hoyer sparsity (sqrt(d) - |y|_1 / |y|_2) / (sqrt(d) - 1) of the codes' means, with y divided
by each dimension's standard deviation over the images, as in Mathieu et al.; the reconstruction log-probability of an image
at one draw and the ELBO (beta 1), in nats, of grey values as Bernoulli means; and the dimension-wise MMD of codes from
equally many draws of the prior. The unit of privacy is one image, the adjacency adding or removing one.

Clips, groups, learning rate and weight were chosen by short runs at epsilon 1 and 8 on 55,000 training images, scored on
other training images. These are public; on private ones such a search costs budget. By default all 60,000 images and 3
epochs; --full runs 20 epochs and every method at every epsilon. The settings are this library's own.

Expected results: sparser codes, closer to the prior, at every epsilon, and blurrier reconstructions. Codes of independent
normal dimensions have Hoyer sparsity 0.235, for any widths, and the prior's own draws 0.65.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import pathlib
import platform
import sys
import time
from typing import Any

import dp_accounting
import numpy as np
from data import load_fashion_mnist

import tfp_dpvi as dpvi
from tfp_dpvi._tf import keras, tf, tfp

tfd = tfp.distributions

LATENT, HIDDEN = 50, 400
EPSILONS = (1.0, 2.0, 4.0, 8.0)
FULL_EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0)
WIDE_SHARE, NARROW_SCALE = 0.2, 0.05  # Of `sparse_prior`.
NO_CLIP = 1e4  # Of the non-private runs. Clips must be finite, and no gradient here is as long.


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings for all epsilons and methods; see the module docstring for their choice."""

    l2_norm_clip: float = 1.0
    batch_l2_norm_clip: float = 0.08
    num_partitions: int = 32  # Groups of about 16 images.
    regularizer_weight: float = 10.0
    non_private_weight: float = 3.0  # Without a clip, only the weight balances the terms.
    learning_rate: float = 1e-3
    batch_size: int = 512
    epochs: int = 3
    num_records: int | None = None  # None: all.
    num_test: int | None = None
    one_group_stride: int = 32


@dataclasses.dataclass(frozen=True)
class Method:
    """A line of the figure."""

    name: str
    color: str
    regularized: bool = True
    private: bool = True
    noise: dict[str, str] = dataclasses.field(default_factory=dict)
    one_group: bool = False
    micro_batch: int | None = None
    comparator: bool = False


METHODS = {
    "mmd": Method("MMD, term-wise", "C0"),
    "without": Method("without MMD", "C1", regularized=False),
    "two_draws": Method("MMD, two draws", "C2", noise={"noise": "split"}, comparator=True),
    "one_size": Method("MMD, one size", "C4", noise={"noise": "single"}, comparator=True),
    "one_group": Method("MMD, one group", "C5", one_group=True, comparator=True),
    "micro": Method("MMD, micro-aggregation", "C6", micro_batch=16, comparator=True),
    "batch": Method("MMD, batch aggregation", "C8", micro_batch=512, comparator=True),
    "non_private": Method("MMD, non-private", "C0", private=False),
    "non_private_without": Method("without, non-private", "C1", regularized=False, private=False),
}


@dataclasses.dataclass(frozen=True)
class Strided:
    """The dimension-wise MMD of every k-th code of a group, which may be a whole batch."""

    stride: int

    def __call__(self, codes: dpvi.divergences.Codes) -> Any:
        weights = codes.weights[:: self.stride]
        return dpvi.divergences.dimensionwise_mmd(
            codes.samples[:: self.stride], codes.prior_samples, x_weights=weights
        )


def make_networks() -> tuple[Any, Any]:
    encoder = keras.Sequential(
        [
            keras.Input([28, 28]),
            keras.layers.Flatten(),
            keras.layers.Dense(HIDDEN, activation="relu"),
            keras.layers.Dense(2 * LATENT),
            tfp.layers.DistributionLambda(
                lambda t: tfd.MultivariateNormalDiag(
                    t[..., :LATENT], 1e-3 + tf.nn.softplus(t[..., LATENT:])
                )
            ),
        ]
    )
    decoder = keras.Sequential(
        [
            keras.Input([LATENT]),
            keras.layers.Dense(HIDDEN, activation="relu"),
            keras.layers.Dense(28 * 28),
            tfp.layers.IndependentBernoulli([28, 28]),
        ]
    )
    return encoder, decoder


class MicroAggregated(dpvi.DPModel):
    """Both terms with one clip: a "record" is a micro-batch of images of shape [size, 28, 28]."""

    def __init__(self, encoder: Any, decoder: Any, settings: Settings) -> None:
        super().__init__()
        self.encoder, self.decoder = encoder, decoder
        self._settings = settings

    def record_loss(self, x: Any, y: Any = None) -> Any:
        prior, size = dpvi.divergences.sparse_prior(LATENT), x.shape[0]
        posterior = self.encoder(x)
        codes = posterior.mean() + posterior.stddev() * tf.random.normal([size, LATENT])
        divergence = posterior.log_prob(codes) - prior.log_prob(codes)
        # tf.vectorized_map does not support the prior's own sampler; this is the same mixture.
        wide = tf.random.uniform([size, LATENT]) < WIDE_SHARE
        drawn = tf.random.normal([size, LATENT]) * tf.where(wide, 1.0, NARROW_SCALE)
        stride = max(1, size // 16)
        mmd = dpvi.divergences.dimensionwise_mmd(codes[::stride], drawn[::stride])
        loss = tf.reduce_mean(divergence - self.decoder(codes).log_prob(x))
        return loss + self._settings.regularizer_weight * mmd


def fit_micro_batches(
    x: np.ndarray, method: Method, epsilon: float, delta: float, settings: Settings
) -> tuple[dpvi.DPVAE, dpvi.DPModel]:
    size = min(method.micro_batch or 1, settings.batch_size)
    num = len(x) // size
    networks = make_networks()
    model = MicroAggregated(*networks, settings)
    model.compile(
        dpvi.optimizers.DPKerasAdamOptimizer(
            l2_norm_clip=settings.l2_norm_clip, learning_rate=settings.learning_rate
        ),
        epsilon=epsilon,
        delta=delta,
        neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE,
    )
    model.fit(
        x[: num * size].reshape([num, size, *x.shape[1:]]),
        batch_size=settings.batch_size // size,
        epochs=settings.epochs,
        verbose=0,
    )
    return dpvi.DPVAE(*networks, dpvi.divergences.sparse_prior(LATENT)), model


def make_model(method: Method, settings: Settings) -> dpvi.DPVAE:
    encoder, decoder = make_networks()
    prior = dpvi.divergences.sparse_prior(LATENT)
    if not method.regularized:
        return dpvi.DPVAE(encoder, decoder, prior)
    return dpvi.DPVAE(
        encoder,
        decoder,
        prior,
        batch_regularizer=Strided(settings.one_group_stride)
        if method.one_group
        else dpvi.divergences.DimensionwiseMMD(),
        regularizer_weight=settings.regularizer_weight
        if method.private
        else settings.non_private_weight,
        num_prior_samples=max(1, round(settings.batch_size / settings.num_partitions)),
    )


def fit(
    x: np.ndarray, method: Method, epsilon: float | None, delta: float, settings: Settings
) -> tuple[dpvi.DPVAE, dpvi.DPModel]:
    """Returns the model to evaluate, and the fitted one with the ledger (the same, except for micro-batches)."""
    if method.micro_batch is not None:
        assert epsilon is not None
        return fit_micro_batches(x, method, epsilon, delta, settings)
    model = make_model(method, settings)
    clips = (
        (settings.l2_norm_clip, settings.batch_l2_norm_clip)
        if method.private
        else (NO_CLIP, NO_CLIP)
    )
    common: dict[str, Any] = {"l2_norm_clip": clips[0], "learning_rate": settings.learning_rate}
    if not method.private:
        common["noise_multiplier"] = 0.0
    if method.regularized:
        optimizer = dpvi.optimizers.TermwiseDPKerasAdamOptimizer(
            **common,
            batch_l2_norm_clip=clips[1],
            num_partitions=1 if method.one_group else settings.num_partitions,
            **method.noise,
        )
    else:
        optimizer = dpvi.optimizers.DPKerasAdamOptimizer(**common)
    model.compile(optimizer, **({"epsilon": epsilon, "delta": delta} if method.private else {}))
    model.fit(x, batch_size=settings.batch_size, epochs=settings.epochs, verbose=0)
    return model, model


def hoyer(means: np.ndarray) -> float:
    """Returns the mean sparsity of rows of [n, d], with columns divided by their standard deviations: 0 even, 1 one entry."""
    y = means / means.std(axis=0)
    root = math.sqrt(y.shape[1])
    return float(np.mean((root - np.abs(y).sum(axis=1) / np.linalg.norm(y, axis=1)) / (root - 1)))


def codes_mmd(codes: Any, prior_samples: Any) -> float:
    """Returns the dimension-wise MMD of many codes, one dimension at a time to save memory."""
    one = tf.function(dpvi.divergences.dimensionwise_mmd)
    return float(
        sum(one(codes[:, d : d + 1], prior_samples[:, d : d + 1]) for d in range(codes.shape[1]))
    )


def measure(model: dpvi.DPVAE, x: np.ndarray) -> dict[str, float]:
    """Returns exact figures, hence only for public or held-out images."""
    posterior = model.encode(x)
    codes = posterior.sample(seed=[1, 2])
    reconstruction = model.decode(codes).log_prob(x)
    num = min(2000, len(x))
    return {
        "hoyer": hoyer(posterior.mean().numpy()),
        "reconstruction": float(tf.reduce_mean(reconstruction)),
        "elbo": float(np.mean(model.elbo(x))),
        "mmd": codes_mmd(codes[:num], model.prior.sample(num, seed=[3, 4])),
        "mean_code_std": float(np.mean(posterior.stddev())),
    }


PANELS = {
    "hoyer": "Hoyer sparsity",
    "mmd": "dimension-wise MMD to the prior",
    "reconstruction": "reconstruction log-probability (nats)",
    "elbo": "test ELBO (nats)",
}


def draw_figure(
    points: list[dict[str, Any]], epsilons: list[float], title: str, path: pathlib.Path
) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(9, 7.2), layout="constrained", sharex=True)
    for place, (key, label) in zip(axes.flat, PANELS.items(), strict=True):
        for name, method in METHODS.items():
            own = sorted((p["epsilon"] or 0.0, p[key]) for p in points if p["method"] == name)
            if not own:
                continue
            if not method.private:
                place.axhline(own[0][1], color=method.color, ls=":", lw=1.2, label=method.name)
            else:
                style = "s--" if method.comparator else "o-"
                place.plot(
                    *zip(*own, strict=True),
                    style,
                    color=method.color,
                    ms=4,
                    lw=1.2,
                    label=method.name,
                )
        place.set(xscale="log", ylabel=label)
        place.set_xticks(epsilons, [f"{epsilon:g}" for epsilon in epsilons])
        place.minorticks_off()
    for place in axes[1]:
        place.set_xlabel("epsilon")
    figure.suptitle(title)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    figure.savefig(path, dpi=80)
    plt.close(figure)


def draw_images(rows: dict[str, np.ndarray], title: str, path: pathlib.Path) -> None:
    """Plots a row of images for each label."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns = len(next(iter(rows.values())))
    figure, axes = plt.subplots(
        len(rows),
        1,
        figsize=(0.62 * columns + 2.4, 0.7 * len(rows) + 0.5),
        layout="constrained",
        squeeze=False,
    )
    for place, (label, images) in zip(axes[:, 0], rows.items(), strict=True):
        place.imshow(np.concatenate(list(images), axis=1), cmap="gray_r", vmin=0, vmax=1)
        place.set_ylabel(label, rotation=0, ha="right", va="center", fontsize=8)
        place.set(xticks=[], yticks=[])
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=80, bbox_inches="tight")
    plt.close(figure)


def draw_codes(
    codes: dict[str, np.ndarray], prior_samples: np.ndarray, title: str, path: pathlib.Path
) -> None:
    """Plots the distribution of the codes over images and dimensions, and that of draws from the prior."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        1,
        len(codes),
        figsize=(2.6 * len(codes), 2.8),
        layout="constrained",
        squeeze=False,
        sharex=True,
        sharey=True,
    )
    edges = np.linspace(-3, 3, 121)
    for place, (label, values) in zip(axes[0], codes.items(), strict=True):
        place.hist(prior_samples.ravel(), edges, density=True, color="0.8", label="prior")
        place.hist(values.ravel(), edges, density=True, histtype="step", color="C0", label="codes")
        place.set(yscale="log", ylim=(1e-3, 10), xlabel="code")
        place.set_title(label, fontsize=8)
    axes[0, 0].set_ylabel("density")
    axes[0, 0].legend(frameon=False, fontsize=7)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=80)
    plt.close(figure)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epsilon", nargs="+", type=float)
    parser.add_argument("--delta", type=float, default=1e-5)
    parser.add_argument("--epochs", type=int)
    parser.add_argument(
        "--full", action="store_true", help="20 epochs, every method at every epsilon"
    )
    parser.add_argument(
        "--quick", action="store_true", help="a few images and steps: a test of the script"
    )
    parser.add_argument(
        "--output", type=pathlib.Path, default=pathlib.Path("docs/figures/privae_sparse")
    )
    options = parser.parse_args(arguments)
    changes: dict[str, Any] = {}
    if options.quick:
        changes = {
            "num_records": 512,
            "num_test": 200,
            "batch_size": 64,
            "num_partitions": 2,
            "epochs": 1,
        }
    elif options.full:
        changes = {"epochs": 20}
    if options.epochs is not None:
        changes["epochs"] = options.epochs
    options.settings = Settings(**changes)
    options.epsilon = sorted(
        options.epsilon
        or ((8.0,) if options.quick else FULL_EPSILONS if options.full else EPSILONS)
    )
    return options


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    options = parse(arguments)
    begin = time.perf_counter()
    tf.get_logger().setLevel(
        "ERROR"
    )  # A new model for every fit: TensorFlow would warn of retracing.
    settings = options.settings
    x = load_fashion_mnist().x[: settings.num_records]
    x_test = load_fashion_mnist("test").x[: settings.num_test]
    print(
        f"{len(x)} training images, {len(x_test)} test images, {settings.epochs} epochs of batches of {settings.batch_size}"
    )
    prior, num = dpvi.divergences.sparse_prior(LATENT), min(2000, len(x_test))
    floor = codes_mmd(prior.sample(num, seed=[5, 6]), prior.sample(num, seed=[3, 4]))
    print(
        f"Draws of the prior have an MMD of {floor:.2f} from it; their Hoyer sparsity is {hoyer(prior.sample(num).numpy()):.3f}"
    )

    ends = {options.epsilon[0], options.epsilon[-1]}
    left_out = (
        {"one_group", "one_size", "non_private", "non_private_without", "micro", "batch"}
        if options.quick
        else set()
    )
    tasks: list[tuple[str, float | None]] = [
        (name, None) for name, method in METHODS.items() if not method.private
    ]
    for epsilon in options.epsilon:
        at = [
            name
            for name, m in METHODS.items()
            if m.private and (options.full or not m.comparator or epsilon == options.epsilon[-1])
        ]
        tasks += [(name, epsilon) for name in at]

    tasks = [task for task in tasks if task[0] not in left_out]

    shown = x_test[:14]
    reconstructions, samples, codes = {"test images": shown}, {}, {}
    points: list[dict[str, Any]] = []
    report = None
    print(
        f"\n{'':26s}{'epsilon':>8s}{'noise':>8s}{'Hoyer':>8s}{'MMD':>8s}{'recon.':>9s}{'ELBO':>9s}{'seconds':>9s}"
    )
    for name, epsilon in tasks:
        method, started = METHODS[name], time.perf_counter()
        keras.backend.clear_session()
        model, fitted = fit(x, method, epsilon, options.delta, settings)
        seconds = time.perf_counter() - started
        point = {"method": name, "epsilon": epsilon, **measure(model, x_test), "seconds": seconds}
        point["noise_multiplier"] = fitted.privacy_plan.noise_multiplier if method.private else 0.0
        point["epsilon_spent"] = fitted.privacy_report().epsilon if method.private else None
        points.append(point)
        print(
            f"{method.name:26s}{'none' if epsilon is None else f'{epsilon:g}':>8s}{point['noise_multiplier']:8.3f}"
            f"{point['hoyer']:8.4f}{point['mmd']:8.2f}{point['reconstruction']:9.1f}{point['elbo']:9.1f}{seconds:9.1f}",
            flush=True,
        )
        if not method.comparator and (epsilon is None or epsilon in ends):
            label = method.name if epsilon is None else f"{method.name},\nepsilon {epsilon:g}"
            reconstructions[label] = model.reconstruct(shown)
            samples[label] = model.sample_predictive(len(shown), mean=True)
            codes[label] = model.encode(x_test[:num]).sample(seed=[7, 8]).numpy()
        if name == "mmd":
            report = fitted.privacy_report()
    assert report is not None
    print(f"\nThe model with MMD at epsilon {options.epsilon[-1]:g}:\n{report}\n")

    options.output.mkdir(parents=True, exist_ok=True)
    draw_figure(
        points,
        options.epsilon,
        f"Fashion-MNIST, {settings.epochs} epochs, delta {options.delta:g}",
        options.output / "figure.png",
    )
    draw_images(
        reconstructions, "Reconstructions of test images", options.output / "reconstructions.png"
    )
    drawn = prior.sample(num, seed=[9, 10]).numpy()
    draw_codes(codes, drawn, "Codes of test images, all dimensions", options.output / "codes.png")
    draw_images(samples, "Decoded draws from the prior", options.output / "samples.png")
    seconds = time.perf_counter() - begin
    result = {
        "points": points,
        "mmd_of_prior_draws": floor,
        "epsilon": options.epsilon,
        "delta": options.delta,
        "adjacency": "add or remove one image",
        "accountant": "pld",
        "settings": dataclasses.asdict(settings),
        "num_records": len(x),
        "num_test": len(x_test),
        "methods": {name: method.name for name, method in METHODS.items()},
        "not_covered": "choice of the settings",
        "privacy_report": report.to_json(),
        "seconds": seconds,
        "command": " ".join(
            [
                "python",
                "examples/privae_sparse.py",
                *(sys.argv[1:] if arguments is None else arguments),
            ]
        ),
        "machine": {"platform": platform.platform(), "cpus": os.cpu_count()},
        "versions": {
            "python": platform.python_version(),
            "tensorflow": tf.__version__,
            "tfp": tfp.__version__,
            "tfp_dpvi": dpvi.__version__,
        },
    }
    (options.output / "privae_sparse.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"Pictures and figures: {options.output}; {seconds:.0f} s")
    for epsilon in options.epsilon:
        ours, other = (
            next(p for p in points if (p["method"], p["epsilon"]) == (m, epsilon))
            for m in ("mmd", "without")
        )
        print(
            f"privae_sparse: epsilon {epsilon:g} hoyer {ours['hoyer']:.4f} without {other['hoyer']:.4f} "
            f"mmd {ours['mmd']:.3f} without {other['mmd']:.3f}"
        )
    return result


if __name__ == "__main__":
    main()
