"""Every case of docs/benchmarks.md, for this library and others.

    python benchmarks/suite.py [--cases logistic ...] [--jax PYTHON] [--torch PYTHON] [--quick] [--check] [--gpu]

In each case all programs have the same model, number of records, batch size and optimizer, and run in alternating rounds in one
tree of processes; compiling is excluded and reported as `first_call_seconds`. Private programs draw an exact Poisson batch and
fresh noise in every step (TensorFlow Privacy uses batches of a fixed size, in order). Times of Keras models are measured inside
`fit`, from the end of its first call of the compiled function to the end of its last.

`--jax` and `--torch` are interpreters of environments with `benchmarks/peers/jax.txt` and `torch.txt` (`make bench` creates
them); without one its rows stay empty. `--check` compares the ratios with `benchmarks/reference.json` and exits with status 1
if one is worse than its threshold. `--gpu` writes `suite_gpu.json` and, without a GPU, measures nothing. The last line is one JSON
object with the ratio of each row.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import harness
import numpy as np
import vae
from cases import mean_field, sampling, streaming
from harness import Peer, Runner

from tfp_dpvi import keras
from tfp_dpvi._tf import tf

HERE = pathlib.Path(__file__).resolve().parent


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of the table: `over` divided by `under` in a case, and the bound that it is to keep."""

    name: str
    case: str
    over: str
    under: str
    bound: float
    at_most: bool = True
    factor: float = 1.0

    def reached(self, value: float | None) -> bool | None:
        return (
            None if value is None else value <= self.bound if self.at_most else value >= self.bound
        )


OURS = "tfp_dpvi"
ROWS = (
    Row(
        "logistic_tensorflow_privacy_over_private",
        "logistic",
        "TensorFlow Privacy, vectorized",
        OURS,
        10.0,
        False,
    ),
    Row("logistic_private_over_jax", "logistic", OURS, "JAX vmap", 1.0),
    Row("logistic_private_over_nonprivate", "logistic", OURS, "Keras, not private", 2.0),
    Row("logistic_opacus_over_private", "logistic", "Opacus", OURS, 1.0, False),
    Row("mixture_private_over_jax", "mixture", OURS, "JAX vmap", 1.3),
    Row("hierarchical_private_over_jax", "hierarchical", OURS, "JAX vmap", 1.3),
    Row("vae_private_over_nonprivate", "vae 128", OURS, "Keras, not private", 2.5),
    Row("vae_jax_vmap_over_private", "vae 128", "JAX vmap", OURS, 20.0, False),
    Row("vae_private_over_jax_ghost", "vae 128", OURS, "JAX ghost", 1.0),
    Row("vae_opacus_over_private", "vae 128", "Opacus", OURS, 1.0, False),
    Row("vae_private_over_opacus_ghost", "vae 128", OURS, "Opacus ghost", 1.0),
    Row(
        "vae_tensorflow_privacy_over_private",
        "vae 128",
        "TensorFlow Privacy, vectorized",
        OURS,
        25.0,
        False,
    ),
    Row("vae_2048_over_16_times_128", "vae batches", "batch 2048", "batch 128", 1.1, True, 1 / 16),
    Row("conv_private_over_nonprivate", "conv", OURS, "Keras, not private", 2.0),
    Row("streamed_over_resident", "streaming", "tfp_dpvi, from disk", OURS, 3.0),
    Row("sampler_1e9_over_1e4", "sampler", "N = 10^9", "N = 10^4", 1.2),
)


# ---------------------------------------------------------------------- cases


def of_prepared(prepared: vae.Prepared, steps: int, repetitions: int | None = None) -> Runner:
    """A `Runner` of what `benchmarks/vae.py` prepares, which gives milliseconds per step."""
    run, per_call = prepared
    steps = max(per_call, steps)
    return Runner(lambda wanted: 1e-3 * run(wanted) * max(1, wanted), steps, repetitions)


def of_peer(peer: Peer, steps: int, repetitions: int | None = None, **case: Any) -> Runner:
    return Runner(lambda wanted: peer.seconds(wanted, **case), steps, repetitions)


def vae_makers(
    batch_size: int, steps: int, quick: bool, peers: dict[str, Peer]
) -> dict[str, Callable[[], Runner]]:
    x, _ = vae.load(500 if quick else None)
    tensor = tf.constant(x)
    per_call = 2 if quick else max(2, min(50, 6400 // batch_size))
    few = 3 if not quick else 1
    makers: dict[str, Callable[[], Runner]] = {
        OURS: lambda: of_prepared(
            vae.make_private(vae.dense_parts(), x, batch_size, per_call)[1], steps
        ),
        "Keras, not private": lambda: of_prepared(
            vae.make_plain(vae.dense_parts(), tensor, batch_size, per_call)[1], steps
        ),
    }
    if batch_size == 128 or quick:
        makers["tf.vectorized_map"] = lambda: of_prepared(
            vae.make_vectorized(x, batch_size, few), few, 2
        )
        if harness.HAS_TENSORFLOW_PRIVACY:
            makers["TensorFlow Privacy, vectorized"] = lambda: of_prepared(
                vae.make_tensorflow_privacy(tensor, batch_size, few), few, 2
            )
        if "jax" in peers:
            case = {"case": "vae", "num_records": len(x), "batch_size": batch_size}
            makers["JAX vmap"] = lambda: of_peer(peers["jax"], few, 2, ghost=False, **case)
            makers["JAX ghost"] = lambda: of_peer(peers["jax"], steps, ghost=True, **case)
        if "torch" in peers:
            case = {"case": "vae", "num_records": len(x), "batch_size": batch_size}
            makers["Opacus"] = lambda: of_peer(peers["torch"], few, 2, ghost=False, **case)
            makers["Opacus ghost"] = lambda: of_peer(peers["torch"], steps, ghost=True, **case)
    return makers


def conv_makers(quick: bool) -> dict[str, Callable[[], Runner]]:
    x, _ = vae.load(500 if quick else None)
    images = x.reshape([-1, 28, 28, 1])
    batch_size, steps, per_call = (8, 2, 2) if quick else (128, 40, 10)
    return {
        OURS: lambda: of_prepared(
            vae.make_private(vae.conv_parts(), images, batch_size, per_call)[1], steps
        ),
        "Keras, not private": lambda: of_prepared(
            vae.make_plain(vae.conv_parts(), tf.constant(images), batch_size, per_call)[1], steps
        ),
    }


def cases(
    quick: bool, peers: dict[str, Peer]
) -> dict[str, Callable[[], dict[str, Callable[[], Runner]]]]:
    jax = peers.get("jax")
    sizes = (8, 16) if quick else (32, 128, 512, 2048)

    def batches() -> dict[str, Callable[[], Runner]]:
        steps = {size: 2 if quick else max(10, 25_600 // size) for size in sizes}
        both: dict[str, Callable[[], Runner]] = {}
        for size in sizes:
            made = vae_makers(size, steps[size], quick, {})
            both[f"batch {size}"] = made[OURS]
            both[f"batch {size}, Keras, not private"] = made["Keras, not private"]
        return both

    return {
        "logistic": lambda: mean_field.logistic_makers(quick, jax, peers.get("torch")),
        "mixture": lambda: mean_field.mixture_makers(quick, jax),
        "hierarchical": lambda: mean_field.hierarchical_makers(quick, jax),
        "vae 128": lambda: vae_makers(8 if quick else 128, 2 if quick else 200, quick, peers),
        "vae batches": batches,
        "conv": lambda: conv_makers(quick),
        "sampler": lambda: sampling.sampler_makers(quick),
        "streaming": lambda: streaming.streaming_makers(quick),
        "calibration": lambda: sampling.calibration_makers(quick),
    }


# ---------------------------------------------------------------------- results


def table(rows: dict[str, Any]) -> str:
    lines = [f"{'row':44s}{'ratio':>9s}{'rounds':>18s}{'target':>10s}  reached"]
    for row in ROWS:
        found = rows.get(row.name)
        target = f"{'<=' if row.at_most else '>='} {row.bound:g}"
        if found is None:
            lines.append(f"{row.name:44s}{'-':>9s}{'':>18s}{target:>10s}  not measured")
            continue
        rounds = found["rounds"]
        between = f"{row.factor * rounds['min']:.3g} to {row.factor * rounds['max']:.3g}"
        lines.append(
            f"{row.name:44s}{found['ratio']:9.3g}{between:>18s}{target:>10s}  {'yes' if found['reached'] else 'NO'}"
        )
    return "\n".join(lines)


def draw(times: dict[str, dict[str, list[float]]], path: pathlib.Path, subtitle: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = {case: ways for case, ways in times.items() if ways}
    heights = [len(ways) + 0.8 for ways in shown.values()]
    figure, all_axes = plt.subplots(
        len(shown),
        1,
        figsize=(7.6, 0.9 + 0.3 * sum(heights)),
        height_ratios=heights,
        layout="constrained",
        squeeze=False,
    )
    for axes, (case, ways) in zip(all_axes[:, 0], shown.items(), strict=True):
        for place, (way, values) in enumerate(ways.items()):
            median = 1e3 * float(np.median(values))
            color = "C0" if way == OURS else "0.6" if "not private" in way else "C1"
            axes.barh(place, median, color=color, alpha=0.7, left=1e-9)
            axes.plot([1e3 * value for value in values], [place] * len(values), "k.", ms=3)
            axes.text(1.1e3 * max(values), place, f"{median:.3g} ms", va="center", fontsize=8)
        low = 1e3 * min(min(values) for values in ways.values())
        high = 1e3 * max(max(values) for values in ways.values())
        axes.set(xscale="log", xlim=(low / 2, high * 4))
        axes.set_yticks(range(len(ways)), list(ways), fontsize=8)
        axes.invert_yaxis()
        axes.set_title(case, loc="left", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    all_axes[-1, 0].set_xlabel(
        f"milliseconds per step, logarithmic; dots are repetitions\n{subtitle}"
    )
    figure.savefig(path, dpi=100)
    plt.close(figure)


def check(rows: dict[str, Any], reference: pathlib.Path) -> list[str]:
    """Returns the ratios that are worse than their stored thresholds."""
    if not reference.is_file():
        print(f"no {reference.name} yet: nothing to compare with")
        return []
    thresholds = json.loads(reference.read_text())["thresholds"]
    worse = []
    for row in ROWS:
        found, threshold = rows.get(row.name), thresholds.get(row.name)
        if found is None or threshold is None:
            continue
        if found["ratio"] > threshold if row.at_most else found["ratio"] < threshold:
            word = "above" if row.at_most else "below"
            worse.append(f"{row.name}: {found['ratio']:.3g} is {word} its threshold {threshold:g}")
    return worse


def gpus() -> list[str]:
    """The names of the GPUs that TensorFlow sees."""
    details = map(tf.config.experimental.get_device_details, tf.config.list_physical_devices("GPU"))
    return [each.get("device_name", "GPU") for each in details]


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--jax", help="interpreter of an environment with jax")
    parser.add_argument("--torch", help="interpreter of an environment with torch and opacus")
    parser.add_argument(
        "--output", type=pathlib.Path, default=pathlib.Path("docs/figures/benchmark")
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes: a test of the script")
    parser.add_argument("--check", action="store_true", help="compare with the stored thresholds")
    parser.add_argument("--gpu", action="store_true", help="on a GPU, into suite_gpu.json")
    options = parser.parse_args(arguments)
    if options.gpu and options.check:
        parser.error("--check: the thresholds are those of a CPU; leave it out with --gpu")
    if options.gpu and not gpus():
        print(
            "TensorFlow sees no GPU: nothing is measured. The extra `gpu` installs its libraries."
        )
        return {}
    tf.get_logger().setLevel("ERROR")
    began = time.perf_counter()
    peers: dict[str, Peer] = {}
    for name in ("jax", "torch"):
        python = getattr(options, name)
        if python:
            peers[name] = Peer(python, HERE / "peers" / f"{name}_peer.py")
    every = cases(options.quick, peers)
    unknown = set(options.cases or ()) - set(every)
    if unknown:
        parser.error(f"--cases: {', '.join(sorted(unknown))} unknown; there are {', '.join(every)}")
    times: dict[str, dict[str, list[float]]] = {}
    first: dict[str, dict[str, float]] = {}
    failed: dict[str, dict[str, str]] = {}
    for case in options.cases or every:
        makers = every[case]()
        repetitions = 1 if options.quick else options.repetitions
        times[case], first[case], wrong = harness.interleaved(
            makers, repetitions, seconds=150.0, name=case
        )
        if wrong:
            failed[case] = wrong
        keras.backend.clear_session()
    for peer in peers.values():
        peer.close()

    rows: dict[str, Any] = {}
    for row in ROWS:
        found = harness.ratio(times.get(row.case, {}), row.over, row.under)
        if found is not None:
            value = row.factor * found["ratio"]
            rows[row.name] = {
                **found,
                "ratio": value,
                "bound": row.bound,
                "reached": row.reached(value),
            }
    slowest = max((ways[OURS] for ways in first.values() if OURS in ways), default=None)
    result = {
        **{row.name: rows[row.name]["ratio"] if row.name in rows else None for row in ROWS},
        "slowest_first_call_seconds": slowest,
        "rows": rows,
        "milliseconds_per_step": {
            case: {
                way: harness.spread([1e3 * value for value in values])
                for way, values in ways.items()
            }
            for case, ways in times.items()
        },
        "first_call_seconds": first,
        "failed": failed,
        "quick": options.quick,
        "benchmark": "suite",
        "machine": {**harness.machine(), "gpus": gpus()},
        "versions": {
            **harness.versions(
                tensorflow="tensorflow",
                tfp="tensorflow-probability",
                tensorflow_privacy="tensorflow-privacy",
                tfp_dpvi="tfp-dpvi",
            ),
            **{key: value for peer in peers.values() for key, value in peer.versions.items()},
        },
        "seconds_in_all": time.perf_counter() - began,
        "command": harness.command("suite.py", sys.argv[1:] if arguments is None else arguments),
    }
    options.output.mkdir(parents=True, exist_ok=True)
    name = "suite_gpu" if options.gpu else "suite"
    (options.output / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    machine = ", ".join(
        [harness.cpu_name(), f"{os.cpu_count()} cores", *gpus(), f"TensorFlow {tf.__version__}"]
    )
    draw(times, options.output / f"{name}.png", machine)
    print(f"\n{table(rows)}\n")
    worse = check(rows, HERE / "reference.json") if options.check else []
    for line in worse:
        print(f"worse than before: {line}")
    short = {
        key: value
        for key, value in result.items()
        if key in {row.name for row in ROWS} or key.startswith("slowest")
    }
    print(json.dumps(short))
    if worse:
        raise SystemExit(1)
    return result


if __name__ == "__main__":
    main()
