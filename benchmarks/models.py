"""Small private models of each kind that `docs/layers.md` names: the loss of public held-out records over private steps.

    python benchmarks/models.py [--only NAME ...] [--output docs/figures/layers]

Each is trained at its epsilon, with noise calibrated by `compile`, on docstrings of Python's standard library or on MNIST. The
loss is the negative ELBO, or a classifier's cross entropy, in nats per held-out record. The dotted line needs no model: it is the
frequency of each character or pixel by position, or of each class. Writes models.json and models.png.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import pathlib
import time
from collections.abc import Callable
from typing import Any

import harness
import mnist_classifier
import numpy as np
import sequence_vae as sequences
import tensorflow_probability as tfp
from data import load_mnist

import tfp_dpvi as dpvi
from tfp_dpvi._tf import keras, tf

tfd, tfb, tfpl, layers = tfp.distributions, tfp.bijectors, tfp.layers, keras.layers

DELTA, LATENT, HELD_OUT, POINTS = 1e-5, 8, 1000, 10
CHARACTERS = len(sequences.ALPHABET)


@dataclasses.dataclass(frozen=True)
class Records:
    """Private records and public ones: x, and y or None, of each."""

    train: tuple[np.ndarray, np.ndarray | None]
    test: tuple[np.ndarray, np.ndarray | None]


# ---------------------------------------------------------------------------- records


@functools.cache
def lines(length: int) -> Records:
    """Characters of docstrings, int32 [n, length]."""
    tokens = np.random.default_rng(0).permutation(
        sequences.as_tokens(sequences.docstrings(), length)
    )
    return Records((tokens[HELD_OUT:], None), (tokens[:HELD_OUT], None))


@functools.cache
def digits(num: int = 60_000, size: int = 14, classes: bool = False) -> Records:
    """Images [n, size^2] of black and white, without or with their classes; of 32 pixels, padded, [n, 32, 32, 1]."""

    def images(split: str) -> tuple[np.ndarray, np.ndarray | None]:
        x, y, _ = load_mnist(split)
        some = num if split == "train" else HELD_OUT
        x, y = x[:some], y[:some]
        x = (
            x.reshape(-1, 14, 2, 14, 2).mean((2, 4)).reshape(-1, 196)
            if size == 14
            else np.pad(x, [(0, 0), (2, 2), (2, 2)])
        )
        x = (x > 0.5).astype("float32")
        return (x if size == 14 else x[..., None]), (y if classes else None)

    return Records(images("train"), images("test"))


@functools.cache
def labelled(num: int = 60_000) -> Records:
    """Images [n, 28, 28, 1] and classes [n]."""
    (x, y, _), (u, v, _) = load_mnist("train"), load_mnist("test")
    return Records((x[:num, ..., None], y[:num]), (u[:HELD_OUT, ..., None], v[:HELD_OUT]))


def by_frequency(records: Records) -> float:
    """The loss by exact frequencies of characters or pixels at each place, or of classes."""
    (x, y), (u, v) = records.train, records.test
    if y is not None and x.shape[1:] == (28, 28, 1):
        x, u = y[:, None], v[:, None]
    x, u = (part.reshape(len(part), -1).astype(int) for part in (x, u))
    total = np.zeros(len(u))
    for level in range(x.max() + 1):
        share = ((x == level).sum(0) + 1.0) / (len(x) + x.max() + 1)
        total -= ((u == level) * np.log(share)).sum(1)
    return float(total.mean())


# ---------------------------------------------------------------------------- networks


def normal(t: Any) -> Any:
    return tfd.Independent(tfd.Normal(t[..., :LATENT], 0.01 + tf.nn.softplus(t[..., LATENT:])), 1)


def codes() -> list[Any]:
    return [layers.Dense(2 * LATENT), tfpl.DistributionLambda(normal)]


def characters() -> Any:
    return tfpl.DistributionLambda(lambda t: tfd.Independent(tfd.Categorical(logits=t), 1))


def standard() -> Any:
    return tfd.Independent(tfd.Normal(tf.zeros(LATENT), tf.ones(LATENT)), 1)


def chain(first: Any, *parts: Any) -> Any:
    return keras.Sequential([first, *parts])


def of_tokens(length: int) -> Any:
    return layers.Input([length], dtype="int32")


def flattened() -> dpvi.DPVAE:
    length = 80
    encoder = chain(
        of_tokens(length),
        layers.Embedding(CHARACTERS, 8),
        layers.Flatten(),
        layers.Dense(64, "relu"),
        *codes(),
    )
    places = [
        layers.Dense(64, "relu"),
        layers.Dense(length * CHARACTERS),
        layers.Reshape([length, CHARACTERS]),
    ]
    return dpvi.DPVAE(encoder, chain(layers.Input([LATENT]), *places, characters()), standard())


def transformer(length: int = 16, width: int = 32) -> dpvi.DPVAE:
    def block(x: Any, other: Any) -> Any:
        x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, width // 2)(x, other))
        return layers.LayerNormalization()(
            x + layers.Dense(width)(layers.Dense(2 * width, "relu")(x))
        )

    def placed(t: Any) -> Any:
        return tf.concat([t, tf.tile(tf.eye(length)[None], [tf.shape(t)[0], 1, 1])], axis=2)

    tokens = of_tokens(length)
    x = layers.Dense(width)(layers.Lambda(placed)(layers.Embedding(CHARACTERS, width)(tokens)))
    x = block(x, x)
    encoder = keras.Model(tokens, chain(layers.Flatten(), *codes())(x))
    z = layers.Input([LATENT])
    memory = layers.Reshape([4, width])(layers.Dense(4 * width)(z))
    x = layers.Dense(width)(layers.Lambda(placed)(layers.RepeatVector(length)(z)))
    x = block(block(x, x), memory)
    decoder = keras.Model(z, characters()(layers.Dense(CHARACTERS)(x)))
    return dpvi.DPVAE(encoder, decoder, standard())


def pixels(size: int = 196) -> list[Any]:
    return [layers.Dense(100, "relu"), layers.Dense(size), tfpl.IndependentBernoulli([size])]


def of_images(
    prior: Any, encoder: Any = None, first: Callable[[Any], Any] | None = None
) -> dpvi.DPVAE:
    encoder = encoder or chain(layers.Input([196]), layers.Dense(100, "relu"), *codes())
    decoder = chain(layers.Input([LATENT]), *([layers.Lambda(first)] if first else []), *pixels())
    return dpvi.DPVAE(encoder, decoder, prior)


def conditional() -> dpvi.DPVAE:
    def joined(width: int, *parts: Any) -> Any:
        numbers, label = layers.Input([width]), layers.Input([], dtype="int32")
        both = layers.Concatenate()([numbers, layers.Embedding(10, 8)(label)])
        return keras.Model([numbers, label], chain(*parts)(both))

    return dpvi.DPVAE(
        joined(196, layers.Dense(100, "relu"), *codes()), joined(LATENT, *pixels()), standard()
    )


def mixture() -> dpvi.DPVAE:
    centres = tf.Variable(tf.random.normal([10, LATENT]), name="centres")
    scales = tfp.util.TransformedVariable(tf.ones([10, LATENT]), tfb.Softplus(), name="scales")
    weights = tfd.Categorical(logits=tf.Variable(tf.zeros(10), name="logits"))
    return of_images(tfd.MixtureSameFamily(weights, tfd.MultivariateNormalDiag(centres, scales)))


def flow() -> dpvi.DPVAE:
    network = tfb.AutoregressiveNetwork(
        params=2, event_shape=[LATENT], hidden_units=[16], activation="tanh"
    )
    base = tfd.Sample(tfd.Normal(0.0, 1.0), sample_shape=[LATENT])
    return of_images(tfd.TransformedDistribution(base, tfb.MaskedAutoregressiveFlow(network)))


def vamp() -> dpvi.DPVAE:
    return of_images(dpvi.divergences.VampPrior(np.random.default_rng(2).uniform(size=[10, 196])))


def two_levels() -> dpvi.DPVAE:
    half = LATENT // 2
    level = layers.Dense(2 * half)

    def given_second(second: Any) -> Any:
        t = level(second[tf.newaxis])[0]
        return tfd.Independent(tfd.Normal(t[..., :half], tf.nn.softplus(t[..., half:])), 1)

    second = tfd.MultivariateNormalDiag(tf.zeros(half))
    prior = tfd.Blockwise(tfd.JointDistributionSequential([second, given_second]))
    return of_images(prior, first=lambda z: z[..., half:])


def frozen() -> dpvi.DPVAE:
    body = keras.applications.MobileNetV2(
        [32, 32, 3], alpha=0.35, include_top=False, weights=None, pooling="avg"
    )
    body.trainable = False
    image = layers.Input([32, 32, 1])
    encoder = keras.Model(image, chain(*codes())(body(layers.Concatenate()([image, image, image]))))
    decoder = chain(
        layers.Input([LATENT]), layers.Dense(1024), tfpl.IndependentBernoulli([32, 32, 1])
    )
    return dpvi.DPVAE(encoder, decoder, standard())


def dropout() -> dpvi.DPKerasModel:
    hidden = [layers.Dropout(0.2), layers.Dense(64, "relu"), layers.Dropout(0.3), layers.Dense(10)]
    return dpvi.DPKerasModel(chain(layers.Input([28, 28, 1]), layers.Flatten(), *hidden))


@dataclasses.dataclass(frozen=True)
class Case:
    """A model's making, its records and its recipe."""

    build: Callable[[], Any]
    records: Callable[[], Records]
    epsilon: float = 3.0
    batch_size: int = 600
    steps: int = 300
    clip: float = 2.0
    rate: float = 0.005


CASES = {
    "LSTM encoder and decoder": Case(lambda: sequences.networks(16, 32), lambda: lines(16), 8.0, 256, 400, 5.0, 0.01),
    "Transformer": Case(transformer, lambda: lines(16), 8.0, 256, 600, 5.0, 0.005),
    "Embedding, Flatten, 80 places": Case(flattened, lambda: lines(80), 8.0, 256, 300, 10.0, 0.005),
    "frozen MobileNetV2 encoder": Case(frozen, lambda: digits(10_000, 32), 3.0, 200, 150, 5.0, 0.01),
    "Dropout classifier": Case(dropout, labelled, steps=600),
    "MNIST CNN": Case(lambda: dpvi.DPKerasModel(mnist_classifier.network()), lambda: labelled(20_000), batch_size=256, steps=300),
    "conditional VAE": Case(conditional, lambda: digits(classes=True)),
    "mixture prior": Case(mixture, digits, steps=600),
    "VampPrior": Case(vamp, digits),
    "flow prior": Case(flow, digits),
    "two levels": Case(two_levels, digits),
}  # fmt: skip


# ---------------------------------------------------------------------------- runs


def run(case: Case, quick: bool) -> dict[str, Any]:
    """Trains one model; the loss before it, and ten times on the way."""
    keras.utils.set_random_seed(1)
    records, model = case.records(), case.build()
    optimizer = dpvi.optimizers.DPKerasAdamOptimizer(
        l2_norm_clip=case.clip, learning_rate=case.rate
    )
    loss = {}
    if isinstance(model, dpvi.DPKerasModel):
        loss = {"loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True)}
    model.compile(optimizer, epsilon=case.epsilon, delta=DELTA, **loss)
    points, steps = (2, 4) if quick else (POINTS, case.steps)
    start, cpu = time.perf_counter(), time.process_time()
    history = model.fit(
        *records.train,
        batch_size=case.batch_size,
        steps_per_epoch=steps // points,
        epochs=points,
        validation_data=records.test,
        validation_is_public=True,
        verbose=0,
    )
    report = model.privacy_report()
    return {
        "losses": history.history["val_loss"],
        "steps": [steps // points * (number + 1) for number in range(points)],
        "by_frequency": by_frequency(records),
        "records": len(records.train[0]),
        "epsilon": report.epsilon,
        "delta": DELTA,
        "noise_multiplier": model.privacy_plan.noise_multiplier,
        "recipe": {
            key: value for key, value in dataclasses.asdict(case).items() if not callable(value)
        },
        "parameters": int(sum(np.prod(variable.shape) for variable in model.trainable_variables)),
        "seconds": round(time.perf_counter() - start, 1),
        "cpu_seconds": round(time.process_time() - cpu, 1),
    }


def draw(found: dict[str, Any], path: pathlib.Path) -> None:
    """A panel for each model."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(3, 4, figsize=(12, 7.5), layout="constrained")
    for axis in axes.flat[len(found) :]:
        axis.axis("off")
    for axis, (name, row) in zip(axes.flat, found.items(), strict=False):
        axis.plot(row["steps"], row["losses"], "o-", ms=3, lw=1.4, color="C0")
        axis.axhline(row["by_frequency"], color="0.5", ls=":", lw=1.2)
        axis.set_title(f"{name}, $\\epsilon$ = {row['recipe']['epsilon']:g}", fontsize=10)
        axis.tick_params(labelsize=8)
    for axis in axes[:, 0]:
        axis.set_ylabel("nats a held-out record", fontsize=9)
    for axis in axes.flat[max(0, len(found) - 4) : len(found)]:
        axis.set_xlabel("private steps", fontsize=9)
    figure.savefig(path, dpi=90)
    plt.close(figure)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument(
        "--quick", action="store_true", help="four steps of each: to see that it runs"
    )
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("outputs/layers"))
    options = parser.parse_args(argv)
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / "models.json"
    models = json.loads(path.read_text())["models"] if path.exists() else {}
    for name in options.only:
        models[name] = run(CASES[name], options.quick)
        row = models[name]
        print(
            f"{name:<30} epsilon {row['epsilon']:.3f}  {row['losses'][0]:8.3f} -> {row['losses'][-1]:8.3f} nats, by frequency "
            f"{row['by_frequency']:8.3f}  {row['cpu_seconds']} CPU s",
            flush=True,
        )
        models = {one: models[one] for one in CASES if one in models}
        versions = harness.versions(tensorflow="tensorflow")
        path.write_text(
            json.dumps(
                {"models": models, "machine": harness.machine(), "versions": versions}, indent=1
            )
            + "\n"
        )
    draw(models, options.output / "models.png")
    return models


if __name__ == "__main__":
    main()
