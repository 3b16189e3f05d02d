"""The quality of the noise schemes of term-wise gradients, at equal epsilon, over seeds.

    python benchmarks/termwise_quality.py [--seeds 4] [--epsilon 2] [--output docs/figures/termwise_quality]

The model of `examples/privae_sparse.py` (688,884 parameters, sparse prior, dimension-wise MMD) on the first 12,000 images
of Fashion-MNIST, 2 epochs, clips and weight as there; all schemes have the seed's initial weights, with fresh noise and
batches. Scores are for 2,000 test images: negative ELBO in nats, MMD of the codes to the prior, and the training objective,
negative ELBO plus the weight times the MMD. Lower is better. Each scheme's noise is calibrated to the same epsilon. Writes
JSON after every run; the last line is a JSON object.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import pathlib
import time
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import harness
import numpy as np
from cases.mean_field import example
from data import load_fashion_mnist

from tfp_dpvi._tf import keras, tf

SCHEMES = {
    "blocks (default)": {},
    "split, paper": {"noise": "split"},
    "single": {"noise": "single"},
}
DEFAULT = "blocks (default)"


def summary(scores: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Means and standard errors, and paired differences from the default (same initial weights)."""
    table: dict[str, Any] = {}
    for scheme, runs in scores.items():
        table[scheme] = {}
        for key in runs[0] if runs else ():
            values = np.array([run[key] for run in runs])
            paired = values - np.array([run[key] for run in scores[DEFAULT][: len(values)]])
            error = [
                float(v.std(ddof=1) / math.sqrt(len(v))) if len(v) > 1 else None
                for v in (values, paired)
            ]
            table[scheme][key] = {
                "mean": float(values.mean()),
                "standard_error": error[0],
                "minus_default": float(paired.mean()),
                "standard_error_of_difference": error[1],
            }
    return table


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Trains in turn, scheme by scheme within a seed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--epsilon", type=float, default=2.0)
    parser.add_argument(
        "--output", type=pathlib.Path, default=pathlib.Path("docs/figures/termwise_quality")
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes: a test of the script")
    options = parser.parse_args(arguments)
    tf.get_logger().setLevel("ERROR")
    privae = example("privae_sparse")
    changes = (
        {"num_records": 256, "num_test": 100, "batch_size": 32, "num_partitions": 2, "epochs": 1}
        if options.quick
        else {
            "num_records": 12_000,
            "num_test": 2000,
            "batch_size": 256,
            "num_partitions": 16,
            "epochs": 2,
        }
    )
    settings = privae.Settings(**changes)
    x = load_fashion_mnist().x[: settings.num_records]
    x_test = load_fashion_mnist("test").x[: settings.num_test]
    scores: dict[str, list[dict[str, float]]] = {scheme: [] for scheme in SCHEMES}
    multipliers: dict[str, float] = {}
    options.output.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {}
    for seed in range(options.seeds):
        for scheme, noise in SCHEMES.items():
            began = time.perf_counter()
            keras.backend.clear_session()
            keras.utils.set_random_seed(seed)
            method = dataclasses.replace(privae.METHODS["mmd"], noise=noise)
            model, _ = privae.fit(x, method, options.epsilon, 1e-5, settings)
            multipliers[scheme] = model.privacy_plan.noise_multiplier
            found = privae.measure(model, x_test)
            objective = settings.regularizer_weight * found["mmd"] - found["elbo"]
            scores[scheme].append(
                {"objective": objective, "negative_elbo": -found["elbo"], "mmd": found["mmd"]}
            )
            print(
                f"seed {seed}  {scheme:18s} objective {objective:8.2f}  -ELBO {-found['elbo']:8.2f}  MMD {found['mmd']:6.2f}"
                f"  {time.perf_counter() - began:.0f} s",
                flush=True,
            )
            result = {
                "benchmark": "termwise_quality",
                "epsilon": options.epsilon,
                "delta": 1e-5,
                "settings": dataclasses.asdict(settings),
                "noise_multipliers": multipliers,
                "summary": summary(scores),
                "scores": scores,
                "quick": options.quick,
                "machine": harness.machine(),
                "versions": harness.versions(tensorflow="tensorflow", tfp="tensorflow-probability"),
                "command": "python benchmarks/termwise_quality.py",
            }
            (options.output / "termwise_quality.json").write_text(
                json.dumps(result, indent=1) + "\n"
            )
    print(
        f"\n{'scheme':20s}{'objective':>12s}{'- default':>12s}{'+-':>8s}{'-ELBO':>10s}{'MMD':>8s}"
    )
    for scheme, row in result["summary"].items():
        one = row["objective"]
        error = one["standard_error_of_difference"] or 0.0
        print(
            f"{scheme:20s}{one['mean']:12.2f}{one['minus_default']:12.2f}{error:8.2f}"
            f"{row['negative_elbo']['mean']:10.2f}{row['mmd']['mean']:8.2f}"
        )
    print(json.dumps(result["summary"]))
    return result


if __name__ == "__main__":
    main()
