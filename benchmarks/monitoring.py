"""The time of monitoring: the Adult fit with `PrivacyTensorBoard` and two privatised metrics, compared with the same fit without.

    python benchmarks/monitoring.py

3,000 steps on Adult one-hot at batch 256, in alternating fits of about 16 epochs; prints the median ratio and writes JSON.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import tempfile
import time
from typing import Any

import harness
import logistic_regression
import numpy as np

import tfp_dpvi as dpvi
from tfp_dpvi._tf import tf, tfp

tfd = tfp.distributions
STEPS, BATCH = 3000, 256
OUTPUT = pathlib.Path(__file__).parents[1] / "docs" / "figures" / "benchmark" / "monitoring.json"


def make(metrics: Any, d: int) -> Any:
    """A compiled logistic regression."""
    prior = tfd.Sample(tfd.Normal(0.0, 1.0), d)
    model = dpvi.DPVI(
        prior, lambda w, x: tfd.Bernoulli(logits=tf.linalg.matvec(x, w)), clipping="flat"
    )
    optimizer = dpvi.optimizers.DPKerasAdamOptimizer(
        l2_norm_clip=1.0, noise_multiplier=1.0, learning_rate=0.01
    )
    model.compile(optimizer, delta=1e-5, metrics=metrics, jit_compile=True)
    return model


def main() -> dict[str, Any]:
    """Runs the fits in turn."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--output", type=pathlib.Path, default=OUTPUT)
    arguments = parser.parse_args()
    x, y = logistic_regression.load()
    per_epoch = -(-len(x) // BATCH)
    epochs = round(STEPS / per_epoch)
    metrics = [dpvi.metrics.PrivateELBO(-5.0, 0.0), dpvi.metrics.PrivateClippedFraction()]
    plain, monitored = make(None, x.shape[1]), make(metrics, x.shape[1])
    seconds: dict[str, list[float]] = {"without": [], "with": []}
    with tempfile.TemporaryDirectory() as directory:
        for repetition in range(arguments.repetitions + 1):
            for name, model in (("without", plain), ("with", monitored)):
                board = (
                    [dpvi.callbacks.PrivacyTensorBoard(f"{directory}/{repetition}")]
                    if name == "with"
                    else []
                )
                start = time.perf_counter()
                model.fit(x, y, batch_size=BATCH, epochs=epochs, verbose=0, callbacks=board)
                if repetition:  # The first compiles.
                    seconds[name].append(time.perf_counter() - start)
    ratios = [b / a for a, b in zip(seconds["without"], seconds["with"], strict=True)]
    result = {
        "benchmark": "monitoring",
        "steps": epochs * per_epoch,
        "seconds": {name: float(np.median(values)) for name, values in seconds.items()},
        "ratio": {"median": float(np.median(ratios)), "all": ratios},
        "target": 1.05,
        "machine": harness.machine(),
        "versions": harness.versions(tensorflow="tensorflow", tfp="tensorflow-probability"),
        "command": "python benchmarks/monitoring.py",
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    main()
