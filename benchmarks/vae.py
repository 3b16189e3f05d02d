"""A private VAE compared with the same VAE without privacy, TensorFlow Privacy and plain per-example gradients.

    python benchmarks/vae.py [--steps 200] [--repetitions 5] [--output docs/figures/benchmark_vae] [--quick]

The model is 784-400-50-400-784 on MNIST, 688,884 parameters, batch 128, Adam; a smaller case is convolutional. Private is
`dpvi.DPVAE`: exact Poisson batches of expected size 128, clip 1, noise multiplier 1, fresh noise in every step.

* non-private: a `dpvi.keras.Model` with a `train_step` that gathers 128 random rows from a tensor. This was never slower than
  `tf.data` of gathers, with one thread and two, or of shuffled arrays; XLA was slower.
* vectorized: a `dpvi.DPModel` with `record_loss`, so `tf.vectorized_map` over the whole batch, without XLA (which is
  slower here); noise and sampling as private.
* TensorFlow Privacy: `VectorizedDPKerasAdamOptimizer` on `fit`, a batch of 128 rows gathered in the pipeline.
* gradients: the clipped sum of a batch in memory against the plain gradient, without sampling, noise and update, both
  in one compiled loop.
* memory: see `MEMORY`.

A step is timed inside `fit`, from the end of its first call of the compiled function to the end of its last, without tracing
and one-time costs of a `fit`. All cases run in alternating rounds in one process; a ratio is one of medians, and `spread` has
the ratios of the rounds; within a round the two dense models and the two gradients alternate. The last line is one JSON
object; `TARGETS` are its targets.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import gc
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import harness
import numpy as np
from data import load_mnist
from harness import spread

import tfp_dpvi as dpvi
from tfp_dpvi._tf import keras, tf, tfp
from tfp_dpvi.gradients import StepSpec

tfd = tfp.distributions
layers = keras.layers

PIXELS, LATENT, PARAMETERS = 784, 50, 688_884
LEARNING_RATE, CLIP, NOISE_MULTIPLIER = 1e-3, 1.0, 1.0
TARGETS = {  # At most, or with a minus sign at least.
    "private_over_nonprivate": 2.5,
    "gradients_over_nonprivate": 1.3,
    "tensorflow_privacy_over_private": -25.0,
    "vectorized_over_private": -5.0,
    "memory_over_nonprivate_at_4096": 1.5,
    "conv_private_over_nonprivate": 2.0,
}
TURNS = 3
ENOUGH_SECONDS = (
    270.0  # No round starts that would end later: a busy machine has fewer, not a longer run.
)
MEMORY_STEPS, MEMORY_RECORDS = 3, 8192
MEMORY = (
    "MiB that training adds, median over fresh processes: the peak of resident memory (VmHWM, reset just before) while 3 "
    "steps run at this batch size in one call, less resident memory (VmRSS) just before, with TensorFlow, 8192 records in "
    "NumPy and a built, compiled model there. Both turn the records into a tensor inside what is measured. Tracing and "
    "compiling are in it, and what Keras, the optimizer and the thread pools allocate at first."
)

Prepared = tuple[Callable[[int], float], int]
"""`steps -> milliseconds per step`, and how many steps a call of the compiled function runs."""


# -------------------------------------------------------------------------------- models


def load(num: int | None = None) -> tuple[Any, str]:
    try:
        x, source = load_mnist().x.reshape([-1, PIXELS]), "MNIST"
    except OSError as error:
        print(f"no MNIST ({str(error)[:120]}...): uniform random records", flush=True)
        x, source = (
            np.random.default_rng(0).uniform(size=[60_000, PIXELS]).astype("float32"),
            "uniform",
        )
    return x[:num], source


def _normal(num: int) -> Any:
    return tfp.layers.DistributionLambda(
        lambda t: tfd.MultivariateNormalDiag(t[..., :num], tf.math.softplus(t[..., num:]))
    )


def _bernoulli(rank: int) -> Any:
    return tfp.layers.DistributionLambda(lambda t: tfd.Independent(tfd.Bernoulli(logits=t), rank))


def dense_parts() -> tuple[Any, Any, Any]:
    encoder = keras.Sequential(
        [
            keras.Input([PIXELS]),
            layers.Dense(400, "relu"),
            layers.Dense(2 * LATENT),
            _normal(LATENT),
        ]
    )
    decoder = keras.Sequential(
        [keras.Input([LATENT]), layers.Dense(400, "relu"), layers.Dense(PIXELS), _bernoulli(1)]
    )
    return encoder, decoder, tfd.MultivariateNormalDiag(tf.zeros(LATENT), tf.ones(LATENT))


def conv_parts() -> tuple[Any, Any, Any]:
    latent, of = 32, {"padding": "same", "activation": "relu"}
    encoder = keras.Sequential(
        [
            keras.Input([28, 28, 1]),
            layers.Conv2D(32, 3, 2, **of),
            layers.Conv2D(64, 3, 2, **of),
            layers.Flatten(),
            layers.Dense(2 * latent),
            _normal(latent),
        ]
    )
    decoder = keras.Sequential(
        [
            keras.Input([latent]),
            layers.Dense(7 * 7 * 64, "relu"),
            layers.Reshape([7, 7, 64]),
            layers.Conv2DTranspose(64, 3, 2, **of),
            layers.Conv2DTranspose(32, 3, 2, **of),
            layers.Conv2D(1, 3, padding="same"),
            _bernoulli(3),
        ]
    )
    return encoder, decoder, tfd.MultivariateNormalDiag(tf.zeros(latent), tf.ones(latent))


class Plain(keras.Model):
    """Without privacy, the way Keras's own VAE example is written."""

    def __init__(self, parts: tuple[Any, Any, Any], x: Any, batch_size: int) -> None:
        super().__init__()
        self.encoder, self.decoder, self.prior = parts
        self.records, self.batch_size = x, batch_size

    def gather(self) -> Any:
        indices = tf.random.uniform([self.batch_size], maxval=len(self.records), dtype=tf.int32)
        return tf.gather(self.records, indices)

    def record_losses(self, x: Any) -> Any:
        posterior = self.encoder(x)
        return tfd.kl_divergence(posterior, self.prior) - self.decoder(posterior.sample()).log_prob(
            x
        )

    def gradients(self, x: Any) -> tuple[Any, list[Any]]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self.record_losses(x))
        return loss, tape.gradient(loss, self.trainable_variables)

    def train_step(self, data: Any) -> dict[str, Any]:
        del data  # Keras's counting of steps.
        loss, gradients = self.gradients(self.gather())
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


class ByRecord(dpvi.DPModel):
    """The same VAE for `tf.vectorized_map`."""

    def __init__(self, parts: tuple[Any, Any, Any]) -> None:
        super().__init__()
        self.encoder, self.decoder, self.prior = parts

    def record_loss(self, x: Any, y: Any = None) -> Any:
        posterior = self.encoder(x[None])
        # `posterior.sample` draws with a seed of its own, which tf.vectorized_map cannot map.
        z = posterior.mean() + posterior.stddev() * tf.random.normal([1, LATENT])
        return (tfd.kl_divergence(posterior, self.prior) - self.decoder(z).log_prob(x[None]))[0]


class Losses(keras.Model):
    """The same VAE as TensorFlow Privacy wants it: a Keras model whose loss is a vector."""

    def __init__(self, parts: tuple[Any, Any, Any]) -> None:
        super().__init__()
        self.encoder, self.decoder, self.prior = parts

    def call(self, x: Any) -> Any:
        posterior = self.encoder(x)
        z = posterior.mean() + posterior.stddev() * tf.random.normal([tf.shape(x)[0], LATENT])
        return (tfd.kl_divergence(posterior, self.prior) - self.decoder(z).log_prob(x))[:, None]


# -------------------------------------------------------------------------------- timed


class _Clock(keras.callbacks.Callback):
    def on_train_begin(self, logs: Any = None) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.ends.append(time.perf_counter())


def timed(model: Any, per_call: int, *args: Any, **kwargs: Any) -> Prepared:
    def run(steps: int) -> float:
        clock = _Clock()
        calls = steps // per_call + 1  # The first is not timed.
        model.fit(
            *args,
            steps_per_epoch=calls * per_call,
            epochs=1,
            verbose=0,
            callbacks=[clock],
            **kwargs,
        )
        assert len(clock.ends) == calls, (len(clock.ends), calls)
        return 1e3 * (clock.ends[-1] - clock.ends[0]) / max(1, (calls - 1) * per_call)

    return run, per_call


def _counted() -> Any:
    return tf.data.Dataset.range(1).repeat()


def make_plain(parts: Any, x: Any, batch_size: int, per_call: int) -> tuple[Any, Prepared]:
    model = Plain(parts, x, batch_size)
    model.compile(keras.optimizers.Adam(LEARNING_RATE), steps_per_execution=per_call)
    return model, timed(model, per_call, _counted())


def _private_adam() -> Any:
    return dpvi.optimizers.DPKerasAdamOptimizer(
        l2_norm_clip=CLIP, noise_multiplier=NOISE_MULTIPLIER, learning_rate=LEARNING_RATE
    )


def make_private(
    parts: Any, x: Any, batch_size: int, per_call: int, randomness: str | None = None
) -> tuple[Any, Prepared]:
    model = dpvi.DPVAE(*parts)
    model.compile(_private_adam(), steps_per_execution=per_call, randomness=randomness)
    return model, timed(model, per_call, x, batch_size=batch_size)


def make_vectorized(x: Any, batch_size: int, per_call: int) -> Prepared:
    model = ByRecord(dense_parts())
    # All of a batch at once nearly always: by default the package would take it in pieces of 48, to save memory.
    physical = batch_size + 3 * round(batch_size**0.5)
    model.compile(
        _private_adam(),
        steps_per_execution=per_call,
        physical_batch_size=physical,
        jit_compile=False,
    )
    return timed(model, per_call, x, batch_size=batch_size)


def make_tensorflow_privacy(x: Any, batch_size: int, per_call: int) -> Prepared:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tensorflow_privacy.privacy.optimizers.dp_optimizer_keras_vectorized import (
            VectorizedDPKerasAdamOptimizer,
        )

    class RecordLosses(keras.losses.Loss):
        def __init__(self) -> None:
            super().__init__(reduction=keras.losses.Reduction.NONE)

        def call(self, y_true: Any, y_pred: Any) -> Any:
            return y_pred[:, 0]

    model = Losses(dense_parts())
    optimizer = VectorizedDPKerasAdamOptimizer(
        l2_norm_clip=CLIP,
        noise_multiplier=NOISE_MULTIPLIER,
        num_microbatches=batch_size,
        learning_rate=LEARNING_RATE,
    )
    model.compile(optimizer, loss=RecordLosses(), steps_per_execution=per_call)

    def batch(_: Any) -> tuple[Any, Any]:
        indices = tf.random.uniform([batch_size], maxval=len(x), dtype=tf.int32)
        return tf.gather(x, indices), tf.zeros([batch_size, 1])

    return timed(model, per_call, _counted().map(batch).prefetch(2))


def make_gradients(plain: Any, private: Any, x: Any) -> dict[str, Prepared]:
    """Gradients of one batch, again and again; both models have been fitted, so they are prepared."""

    spec = StepSpec(float(x.shape[0]), private.privacy_plan.num_records)

    def of_plain(batch: Any, step: Any) -> tuple[Any, Any]:
        del step  # A stateful draw is new in each step.
        return plain.gradients(batch)

    def of_private(batch: Any, step: Any) -> tuple[Any, Any]:
        key = tf.stack([step, tf.constant(7, tf.int64)])
        step_gradient = private.clipped_gradient(spec).draw(key)
        clipped, per_example = step_gradient.clipped_sum(
            {"x": batch}, tf.ones([x.shape[0]], tf.bool), key
        )
        return tf.reduce_sum(per_example.losses), clipped.tensors

    def prepared(function: Callable[..., Any], variables: Any) -> Prepared:
        @tf.function(autograph=False)
        def loop(batch: Any, steps: Any) -> Any:
            def body(step: Any, scale: Any, gradients: Any) -> Any:
                del gradients  # Carried, not summed, so that they are computed in every step and cost nothing more.
                # The batch hangs on the last step, so that nothing can be taken out of the loop.
                loss, found = function(batch * scale, step)
                return step + 1, 1.0 + 1e-30 * loss, list(found)

            start = (
                tf.constant(0, tf.int64),
                tf.constant(1.0),
                [tf.zeros_like(v) for v in variables],
            )
            found = tf.while_loop(
                lambda step, *_: step < steps, body, start, parallel_iterations=1
            )[2]
            return tf.add_n([tf.reduce_sum(part) for part in found])

        def run(steps: int) -> float:
            begin = time.perf_counter()
            total = loop(x, tf.constant(max(1, steps), tf.int64)).numpy()
            assert np.isfinite(total)
            return 1e3 * (time.perf_counter() - begin) / max(1, steps)

        return run, 1

    return {
        "gradients, non-private": prepared(of_plain, plain.trainable_variables),
        "gradients, private": prepared(of_private, private.trainable_variables),
    }


# -------------------------------------------------------------------------------- memory


def _status(field: str) -> float:
    """MiB, from /proc/self/status."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field + ":"))


def memory_of(kind: str, batch_size: int) -> dict[str, float]:
    """What training takes in this process; called in one of its own."""
    x, _ = load(MEMORY_RECORDS)
    parts = dense_parts()
    if kind == "private":
        model, _ = make_private(parts, x, batch_size, MEMORY_STEPS)
    else:
        model, _ = make_plain(parts, x, batch_size, MEMORY_STEPS)
    gc.collect()
    pathlib.Path("/proc/self/clear_refs").write_text(
        "5"
    )  # The peak starts anew from what is resident.
    before = _status("VmRSS")
    common: dict[str, Any] = {"steps_per_epoch": MEMORY_STEPS, "epochs": 1, "verbose": 0}
    if kind == "private":
        model.fit(x, batch_size=batch_size, **common)
    else:
        model.records = tf.constant(x)
        model.fit(_counted(), **common)
    return {"before": before, "added": _status("VmHWM") - before}


def measure_memory(batch_size: int, repetitions: int) -> dict[str, Any]:
    found: dict[str, Any] = {"plain": [], "private": []}
    root = pathlib.Path(dpvi.__file__).resolve().parents[1]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]),
    }

    def one(kind: str) -> None:
        child = subprocess.run(
            [sys.executable, __file__, "--memory", kind, "--batch-size", str(batch_size)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        if child.returncode:
            raise RuntimeError(f"memory of {kind}: {child.stderr[-2000:]}")
        found[kind].append(json.loads(child.stdout.splitlines()[-1])["added"])

    with concurrent.futures.ThreadPoolExecutor(
        len(found)
    ) as pool:  # Side by side: nothing is timed here.
        for _ in range(repetitions):
            list(pool.map(one, found))
    return {"non-private": spread(found["plain"]), "private": spread(found["private"])}


# -------------------------------------------------------------------------------- results

RATIOS = {
    "private_over_nonprivate": ("private", "non-private"),
    "gradients_over_nonprivate": ("gradients, private", "gradients, non-private"),
    "tensorflow_privacy_over_private": ("TensorFlow Privacy", "private"),
    "vectorized_over_private": ("vectorized_map", "private"),
    "conv_private_over_nonprivate": ("convolutional, private", "convolutional, non-private"),
}


def ratios(times: dict[str, list[float]]) -> tuple[dict[str, float | None], dict[str, Any]]:
    """Ratios of medians over the rounds that have both, and each round's ratio."""
    medians: dict[str, float | None] = {}
    spreads: dict[str, Any] = {}
    for name, (over, under) in RATIOS.items():
        rounds = list(zip(times.get(over, []), times.get(under, []), strict=False))
        medians[name] = None
        if rounds:
            medians[name] = statistics.median(a for a, _ in rounds) / statistics.median(
                b for _, b in rounds
            )
            spreads[name] = spread([a / b for a, b in rounds])
    return medians, spreads


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def draw(times: dict[str, list[float]], path: pathlib.Path, batch_size: int, subtitle: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = {
        f"Train step of a VAE 784-400-50-400-784 ({PARAMETERS:,} parameters), batch {batch_size}": [
            ("without privacy", "non-private"),
            ("tfp_dpvi", "private"),
            ("tf.vectorized_map", "vectorized_map"),
            ("TensorFlow Privacy", "TensorFlow Privacy"),
        ],
        "Its gradients alone: no sampling, noise or update": [
            ("without privacy", "gradients, non-private"),
            ("tfp_dpvi, clipped by record", "gradients, private"),
        ],
        f"Train step of a convolutional VAE, batch {batch_size}": [
            ("without privacy", "convolutional, non-private"),
            ("tfp_dpvi", "convolutional, private"),
        ],
    }
    shown = {title: [bar for bar in bars if times.get(bar[1])] for title, bars in panels.items()}
    shown = {title: bars for title, bars in shown.items() if bars}
    figure, all_axes = plt.subplots(
        len(shown),
        1,
        figsize=(7.6, 1.6 + 0.36 * sum(len(bars) + 1.4 for bars in shown.values())),
        height_ratios=[len(bars) for bars in shown.values()],
        layout="constrained",
        squeeze=False,
    )
    for axes, (title, bars) in zip(all_axes[:, 0], shown.items(), strict=True):
        base = statistics.median(times[bars[0][1]])
        longest = max(max(times[name]) for _, name in bars)
        for place, (label, name) in enumerate(bars):
            values = times[name]
            median = statistics.median(values)
            color = (
                "0.6"
                if label.startswith("without")
                else "C0"
                if label.startswith("tfp_dpvi")
                else "C1"
            )
            axes.barh(place, median, color=color, alpha=0.7)
            axes.plot(values, [place] * len(values), "k.", ms=3)
            text = f"{_short(median)} ms" + (f", {_short(median / base)} times" if place else "")
            axes.text(max(values) + 0.015 * longest, place, text, va="center")
        axes.set(xlim=(0.0, 1.4 * longest))
        axes.set_yticks(range(len(bars)), [label for label, _ in bars])
        axes.invert_yaxis()
        axes.set_title(title, loc="left", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    all_axes[-1, 0].set_xlabel(f"milliseconds per step; dots are repetitions\n{subtitle}")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200, help="timed steps of a fit")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument(
        "--output", type=pathlib.Path, default=pathlib.Path("docs/figures/benchmark_vae")
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes: a test of the script")
    parser.add_argument("--memory", choices=("plain", "private"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    tf.get_logger().setLevel("ERROR")
    if options.memory:
        memory = memory_of(options.memory, options.batch_size)
        print(json.dumps(memory))
        return memory

    began = time.perf_counter()
    batch_size, steps, repetitions = options.batch_size, options.steps, options.repetitions
    slow_repetitions, memory_repetitions, memory_batch, per_call = min(3, repetitions), 2, 4096, 50
    if options.quick:
        batch_size, steps, repetitions, slow_repetitions = 8, 2, 1, 1
        memory_repetitions, memory_batch, per_call = 1, 64, 2
    # One-time costs of a call are negligible for these steps, and compared pairs have equally many.
    slow_per_call, conv_per_call = min(3, per_call), min(5, per_call)
    failed: dict[str, str] = {}

    def tried(name: str, function: Callable[[], Any]) -> Any:
        try:
            return function()
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {str(error)[:500]}"
            print(f"{name} failed:\n{traceback.format_exc()}", flush=True)
            return None

    # First, while nothing else runs.
    memory = tried("memory", lambda: measure_memory(memory_batch, memory_repetitions))
    if memory is not None:
        print(f"memory: {memory}", flush=True)

    x, source = load(2000 if options.quick else None)
    tensor = tf.constant(x)
    images = x.reshape([-1, 28, 28, 1])
    plain, of_plain = make_plain(dense_parts(), tensor, batch_size, per_call)
    private, of_private = make_private(dense_parts(), x, batch_size, per_call)
    cases: dict[str, Prepared] = {"non-private": of_plain, "private": of_private}
    makers: dict[str, Callable[[], Prepared]] = {
        "vectorized_map": lambda: make_vectorized(x, batch_size, slow_per_call),
        **(
            {
                "TensorFlow Privacy": lambda: make_tensorflow_privacy(
                    tensor, batch_size, slow_per_call
                )
            }
            if harness.HAS_TENSORFLOW_PRIVACY
            else {}
        ),
        "convolutional, non-private": lambda: make_plain(
            conv_parts(), tf.reshape(tensor, images.shape), batch_size, conv_per_call
        )[1],
        "convolutional, private": lambda: make_private(
            conv_parts(), images, batch_size, conv_per_call
        )[1],
    }
    slow = ("vectorized_map", "TensorFlow Privacy")
    quick_ones = ("non-private", "private", "gradients, non-private", "gradients, private")
    first: dict[str, float] = {}

    def warm(name: str, one: Prepared) -> bool:
        begin = time.perf_counter()
        one[0](0)  # One call, with tracing and compiling: left out.
        first[name] = time.perf_counter() - begin
        cases[name] = one
        return True

    for name, one in list(cases.items()):
        warm(name, one)
    for model in (plain, private):
        assert (
            sum(int(np.prod(variable.shape)) for variable in model.trainable_variables)
            == PARAMETERS
        )
    for name, one in make_gradients(plain, private, tensor[:batch_size]).items():
        warm(name, one)
    for name, make in makers.items():
        tried(name, lambda name=name, make=make: warm(name, make()))
    print(
        "first run: " + ", ".join(f"{name} {value:.1f} s" for name, value in first.items()),
        flush=True,
    )

    times: dict[str, list[float]] = {name: [] for name in cases}
    first_round = time.perf_counter() - began
    for repetition in range(repetitions):
        now = time.perf_counter() - began
        if repetition and now + (now - first_round) / repetition > ENOUGH_SECONDS:
            print("Enough time has gone: no further repetitions.", flush=True)
            break
        parts: dict[str, list[float]] = {}
        # Pairs that are compared closely take turns within a round: its value is the median of their turns.
        for turn in range(TURNS):
            for name, (run, each) in list(cases.items()):
                if name not in quick_ones and (
                    turn or (name in slow and repetition >= slow_repetitions)
                ):
                    continue
                few = (
                    each
                    if name in slow
                    else max(each, steps // 10 if name.startswith("conv") else steps // 2)
                )
                value = tried(name, lambda run=run, few=few: run(few))
                if value is None:
                    del cases[name]
                else:
                    parts.setdefault(name, []).append(value)
        for name, values in parts.items():
            times[name].append(statistics.median(values))
        now = ", ".join(
            f"{name} {values[repetition]:.2f}"
            for name, values in times.items()
            if len(values) > repetition
        )
        print(f"{repetition + 1}: {now} ms a step; load {os.getloadavg()[0]:.1f}", flush=True)

    found, spreads = ratios(times)
    found["memory_over_nonprivate_at_4096"] = None
    if memory is not None:
        found["memory_over_nonprivate_at_4096"] = (
            memory["private"]["median"] / memory["non-private"]["median"]
        )
    reached = {
        name: found[name] is not None
        and (found[name] <= bound if bound > 0 else found[name] >= -bound)
        for name, bound in TARGETS.items()
    }
    result = {
        **{name: None if value is None else round(value, 3) for name, value in found.items()},
        "spread": spreads,
        "milliseconds_per_step": {name: spread(values) for name, values in times.items() if values},
        "memory_mib": memory,
        "memory_measures": f"batch {memory_batch}: {MEMORY}",
        "targets": {
            name: {"bound": bound, "reached": reached[name]} for name, bound in TARGETS.items()
        },
        "failed": failed,
        "first_run_seconds": first,
        "data": source,
        "parameters": PARAMETERS,
        "batch_size": batch_size,
        "steps": {
            "a turn": steps // 2,
            "convolutional": steps // 10,
            "vectorized_map, TensorFlow Privacy": slow_per_call,
        },
        "turns": TURNS,
        "steps_per_execution": {
            name: each for name, (_, each) in cases.items() if not name.startswith("gradients")
        },
        "repetitions": {name: len(values) for name, values in times.items()},
        "quick": options.quick,
        "benchmark": "vae",
        "machine": harness.machine(),
        "versions": harness.versions(
            tensorflow="tensorflow",
            tfp="tensorflow-probability",
            tensorflow_privacy="tensorflow-privacy",
        ),
        "seconds_in_all": time.perf_counter() - began,
        "command": harness.command("vae.py", sys.argv[1:] if arguments is None else arguments),
    }
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "vae.json").write_text(json.dumps(result, indent=1) + "\n")
    draw(
        times,
        options.output / "vae.png",
        batch_size,
        f"{harness.cpu_name()}, {os.cpu_count()} cores, TensorFlow {tf.__version__}",
    )
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    main()
