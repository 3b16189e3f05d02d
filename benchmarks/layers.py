"""A private step over a non-private one for each kind of layer, and the estimate of the warning about slow layers.

    python benchmarks/layers.py [--only NAME ...] [--output docs/figures/layers]

A model is the layer and a dense one. Both steps compute the gradient of a batch, in turn, without noise and update. `ratio` is
of median times, `cpu_ratio` of median processor time over all threads, which says more on a busy machine. Writes times.json.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import time
from collections.abc import Callable
from typing import Any

import harness
import numpy as np

from tfp_dpvi._tf import keras, layers_of, tf
from tfp_dpvi.ghost.layers import LayerGradients
from tfp_dpvi.gradients import Clip

layers = keras.layers


class Custom(layers.Layer):
    """A custom dense layer without a rule."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.units = units

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight("kernel", [shape[-1], self.units])

    def call(self, inputs: Any) -> Any:
        return tf.nn.relu(tf.tensordot(inputs, self.kernel, 1))


def attention() -> keras.Model:
    x = layers.Input([16, 32])
    return keras.Model(x, layers.MultiHeadAttention(2, 16)(x, x))


def embedding() -> list[Any]:
    return [layers.Embedding(1000, 32, input_length=80)]


# Shape of a record, categories (0: none), and the layers.
CASES: dict[str, tuple[list[int], int, Callable[[], list[Any]]]] = {
    "Dense": ([784], 0, lambda: [layers.Dense(400, "relu")]),
    "Conv2D": ([16, 16, 8], 0, lambda: [layers.Conv2D(16, 3, 2, "same")]),
    "Embedding, 80 places": ([80], 1000, embedding),
    "LayerNormalization": ([784], 0, lambda: [layers.Dense(400), layers.LayerNormalization()]),
    "custom dense 784-400": ([784], 0, lambda: [Custom(400)]),
    "custom dense, 16 places": ([16, 64], 0, lambda: [Custom(64)]),
    "LSTM, 16 steps": ([16, 32], 0, lambda: [layers.LSTM(32)]),
    "GRU, 16 steps": ([16, 32], 0, lambda: [layers.GRU(32)]),
    "MultiHeadAttention": ([16, 32], 0, lambda: [attention()]),
    "DepthwiseConv2D": ([16, 16, 8], 0, lambda: [layers.DepthwiseConv2D(3, 2)]),
    "SeparableConv2D": ([16, 16, 8], 0, lambda: [layers.SeparableConv2D(16, 3, 2)]),
    "PReLU": ([784], 0, lambda: [layers.Dense(400), layers.PReLU()]),
}


def measured(
    shape: list[int], categories: int, build: Callable[[], list[Any]], batch: int
) -> dict[str, Any]:
    """Returns times of both steps in milliseconds, their ratio, and the estimate."""
    rng = np.random.default_rng(0)
    size = [batch, *shape]
    x = tf.constant(
        rng.integers(0, categories, size).astype("int32")
        if categories
        else rng.normal(size=size).astype("float32")
    )
    model = keras.Sequential([*build(), layers.Flatten(), layers.Dense(10)])
    model(x)

    def losses(records: Any) -> Any:
        return tf.reduce_sum(tf.square(model(records)), axis=1)

    gradients = LayerGradients(layers_of(model), model.trainable_variables).checked(losses, x[:3])

    def plain(records: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(losses(records))
        return tape.gradient(loss, model.trainable_variables)

    def private(records: Any) -> Any:
        passed = gradients.run(lambda: losses(records))
        return passed.clipped_sum(passed.result, tf.fill([batch], True), Clip(1.0))[0].tensors

    steps = [tf.function(step, autograph=False) for step in (plain, private)]
    times: list[list[tuple[float, float]]] = [[], []]
    for repetition in range(22):
        for step, found in zip(steps, times, strict=True):
            start = time.perf_counter(), time.process_time()
            tf.nest.map_structure(lambda part: tf.convert_to_tensor(part).numpy(), step(x))
            if repetition > 1:
                found.append((time.perf_counter() - start[0], time.process_time() - start[1]))
    before, after = (1e3 * np.median(found, axis=0) for found in times)
    return {
        "plain_ms": round(float(before[0]), 2),
        "private_ms": round(float(after[0]), 2),
        "ratio": round(float(after[0] / before[0]), 2),
        "cpu_ratio": round(float(after[1] / before[1]), 2),
        "estimate": round(gradients.slowdown, 2),
        "mapped": [layer.name for layer in gradients.slow],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=list(CASES))
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("outputs/layers"))
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / "times.json"
    rows = json.loads(path.read_text())["layers"] if path.exists() else {}
    for name in options.only:
        rows[name] = measured(*CASES[name], options.batch)
        row = rows[name]
        print(
            f"{name:<26} {'vectorized' if row['mapped'] else 'fast':<10} {row['plain_ms']:>8} {row['private_ms']:>8} ms {row['ratio']:>6} "
            f"(processor {row['cpu_ratio']})  estimate {row['estimate']}",
            flush=True,
        )
        path.write_text(
            json.dumps({"batch": options.batch, "layers": rows, **harness.machine()}, indent=1)
            + "\n"
        )


if __name__ == "__main__":
    main()
