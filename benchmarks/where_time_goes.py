"""The parts of a private step's time, for the rows of `suite.py` that miss a target, and of a first call's.

    python benchmarks/where_time_goes.py [--jax PYTHON] [--quick] [--output docs/figures/benchmark_profile]

A step is timed completely and without one of its parts, in alternating rounds as in `suite.py`: noise (none instead), sampling
(always the first records instead of a Poisson batch), Adam (plain gradient descent instead). The time of a part is the
difference; parts that run simultaneously on two cores add up to less than the whole. The remainder without all parts is the
clipped gradient with its update. A step without a part is *not private*, and only for timing.

`--jax` is an interpreter of an environment with `benchmarks/peers/jax.txt`, whose whole steps are then also timed. The parts of
the first call are checking the layers on synthetic records, tracing and compiling the step, and the rest.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import harness
import numpy as np
import suite
import vae
from cases import mean_field
from harness import Peer, Runner

import tfp_dpvi as dpvi
from tfp_dpvi import _random
from tfp_dpvi._tf import tf
from tfp_dpvi.ghost.layers import LayerGradients
from tfp_dpvi.sampling import PoissonSampler
from tfp_dpvi.training.fit import PrivateFit

HERE = pathlib.Path(__file__).resolve().parent
PARTS = ("noise", "sampling", "Adam")


def _no_noise(key: Any, sums: Any, deviations: Any, *, dtype: Any = None) -> list[Any]:
    del key, deviations
    return [tf.cast(part, dtype or sums[0].dtype) for part in sums]


def _no_sampling(self: PoissonSampler, key: Any, visit: Any, initial: Any) -> Any:
    del key
    size = max(1, round(self.probability * self.num_available))
    return visit(initial, tf.range(size, dtype=tf.int64), tf.ones([size], tf.bool))


@contextlib.contextmanager
def without(parts: tuple[str, ...]) -> Iterator[None]:
    """The library with parts of its step taken out, while a step is traced."""
    patches = {
        "noise": lambda: mock.patch.object(_random, "add_noise", _no_noise),
        "sampling": lambda: mock.patch.object(PoissonSampler, "for_each_batch", _no_sampling),
        "Adam": lambda: mock.patch.object(
            dpvi.optimizers, "DPKerasAdamOptimizer", dpvi.optimizers.DPKerasSGDOptimizer
        ),
    }
    with contextlib.ExitStack() as stack:
        for part in parts:
            stack.enter_context(patches[part]())
        yield


def reduced(make: Callable[[], Runner], parts: tuple[str, ...]) -> Runner:
    """A `Runner` whose step is traced without these parts; what it runs later is that trace."""
    with without(parts):
        runner = make()
        runner.run(0)
    return runner


def variants(make: Callable[[], Runner]) -> dict[str, Callable[[], Runner]]:
    return {
        "whole": make,
        **{f"without {part}": lambda part=part: reduced(make, (part,)) for part in PARTS},
        "without all three": lambda: reduced(make, PARTS),
    }


def cases(quick: bool, jax: Peer | None) -> dict[str, dict[str, Callable[[], Runner]]]:
    peers = {} if jax is None else {"jax": jax}
    found = {
        "logistic regression": (mean_field.logistic_makers(quick, jax, None), "JAX vmap"),
        "mixture": (mean_field.mixture_makers(quick, jax), "JAX vmap"),
        "VAE, batch 128": (
            suite.vae_makers(8 if quick else 128, 2 if quick else 200, quick, peers),
            "JAX ghost",
        ),
    }
    return {
        case: {**variants(makers[suite.OURS]), **({peer: makers[peer]} if peer in makers else {})}
        for case, (makers, peer) in found.items()
    }


def first_calls(quick: bool) -> dict[str, dict[str, float]]:
    """Seconds of the first `fit` of one step, by what they were spent on."""
    x, _ = vae.load(64 if quick else 2048)
    found = {}
    for case, parts in (("VAE", vae.dense_parts), ("convolutional VAE", vae.conv_parts)):
        spent = {"trying the layers": 0.0, "tracing and compiling": 0.0}
        data = x if case == "VAE" else x.reshape([-1, 28, 28, 1])

        def clocked(function: Any, name: str, spent: dict[str, float] = spent) -> Any:
            def timed(*args: Any, **kwargs: Any) -> Any:
                begin = time.perf_counter()
                try:
                    return function(*args, **kwargs)
                finally:
                    spent[name] += time.perf_counter() - begin

            return timed

        model = dpvi.DPVAE(*parts())
        model.compile(dpvi.optimizers.DPKerasAdamOptimizer(l2_norm_clip=1.0, noise_multiplier=1.0))
        with (
            mock.patch.object(
                LayerGradients, "checked", clocked(LayerGradients.checked, "trying the layers")
            ),
            mock.patch.object(
                PrivateFit,
                "prepare",
                clocked(PrivateFit.prepare, "tracing and compiling"),
            ),
        ):
            begin = time.perf_counter()
            model.fit(data, batch_size=8 if quick else 128, epochs=1, steps_per_epoch=1, verbose=0)
            whole = time.perf_counter() - begin
        begin = time.perf_counter()
        model.fit(data, batch_size=8 if quick else 128, epochs=1, steps_per_epoch=1, verbose=0)
        again = time.perf_counter() - begin
        _, (run, _) = vae.make_plain(parts(), tf.constant(data), 8 if quick else 128, 1)
        begin = time.perf_counter()
        run(0)
        plain = time.perf_counter() - begin
        found[case] = {
            "whole": whole,
            **spent,
            "the same fit again": again,
            "Keras, not private": plain,
        }
        print(
            f"{case}, first fit of one step: "
            + ", ".join(f"{k} {v:.1f} s" for k, v in found[case].items()),
            flush=True,
        )
    return found


def table(times: dict[str, dict[str, list[float]]]) -> dict[str, dict[str, float | None]]:
    """Milliseconds of each case's whole step and of its parts, by medians over the rounds."""
    rows: dict[str, dict[str, float | None]] = {}
    for case, by_way in times.items():
        whole = np.array(by_way["whole"])
        row: dict[str, float | None] = {"whole": 1e3 * float(np.median(whole))}
        for part in PARTS:
            row[part] = 1e3 * float(np.median(whole - np.array(by_way[f"without {part}"])))
        row["clipped gradient and update"] = 1e3 * statistics.median(by_way["without all three"])
        other = next((way for way in by_way if way.startswith("JAX")), None)
        row["JAX, whole"] = None if other is None else 1e3 * statistics.median(by_way[other])
        rows[case] = row
    return rows


def draw(rows: dict[str, dict[str, float | None]], path: pathlib.Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 0.7 * len(rows) + 1.4), layout="constrained")
    for number, (_, row) in enumerate(rows.items()):
        left, whole = 0.0, row["whole"] or 1.0
        for color, name in enumerate(("clipped gradient and update", *PARTS)):
            share = max(0.0, row[name] or 0.0) / whole
            axis.barh(number, share, left=left, color=f"C{color}", label=None if number else name)
            left += share
        if row["JAX, whole"] is not None:
            place = row["JAX, whole"] / whole
            axis.plot(
                [place, place],
                [number - 0.4, number + 0.4],
                "k--",
                lw=1.2,
                label=None if number else "JAX, whole",
            )
    axis.set_yticks(
        range(len(rows)), [f"{case}\n{row['whole']:.3g} ms" for case, row in rows.items()]
    )
    axis.set(xlabel="share of a whole private step")
    axis.invert_yaxis()
    figure.legend(loc="outside upper center", ncols=5, frameon=False, fontsize=8)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--jax", help="interpreter of an environment made from benchmarks/peers/jax.txt"
    )
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="tiny sizes: a test of the script")
    parser.add_argument(
        "--output", type=pathlib.Path, default=pathlib.Path("docs/figures/benchmark_profile")
    )
    options = parser.parse_args(arguments)
    began = time.perf_counter()
    jax = None if options.jax is None else Peer(options.jax, HERE / "peers" / "jax_peer.py")
    first = first_calls(options.quick)
    times = {
        case: harness.interleaved(makers, 2 if options.quick else options.repetitions, name=case)[0]
        for case, makers in cases(options.quick, jax).items()
    }
    rows = table(times)
    names = list(next(iter(rows.values())))
    print(f"\n{'milliseconds a step':22s}" + "".join(f"{name:>29s}" for name in names))
    for case, row in rows.items():
        cells = ["-" if row[name] is None else f"{row[name]:.4g}" for name in names]
        print(f"{case:22s}" + "".join(f"{cell:>29s}" for cell in cells))
    result = {
        "milliseconds_per_step": rows,
        "all": {case: {way: harness.spread([1e3 * v for v in values]) for way, values in by.items()} for case, by in times.items()},
        "first_fit_seconds": first,
        "machine": harness.machine(),
        "versions": harness.versions(tensorflow="tensorflow", tfp="tensorflow-probability"),
        "seconds": time.perf_counter() - began,
    }  # fmt: skip
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "profile.json").write_text(json.dumps(result, indent=1) + "\n")
    draw(rows, options.output / "profile.png")
    print(json.dumps({"milliseconds_per_step": rows, "first_fit_seconds": first}))
    return result


if __name__ == "__main__":
    main()
