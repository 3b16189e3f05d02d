"""What the paired clip costs: its step over the flat one's, and the posterior's making, for 5, 20 and 50 coefficients.

    python benchmarks/calibration_time.py [--output docs/figures/calibration_time.json]

Logistic regression, 5,000 records, batch 500, XLA; fits of 1,000 steps in turn, medians of five.
"""

import argparse
import json
import pathlib
import platform
import time

import numpy as np
import tensorflow as tf
import tensorflow_probability as tfp

import tfp_dpvi as dpvi

tfd = tfp.distributions
NUM, BATCH, EPOCHS, ROUNDS = 5000, 500, 100, 5


def fitted(size, clipping, x, y):
    prior = tfd.JointDistributionNamed({"w": tfd.Sample(tfd.Normal(0.0, 1.0), size)})
    model = dpvi.DPVI(
        prior,
        lambda params, x: tfd.Bernoulli(logits=tf.linalg.matvec(x, params["w"]), dtype=tf.float32),
        clipping=clipping,
    )
    if clipping == "paired":
        public = np.random.default_rng(1).normal(size=(1000, size))
        dpvi.pilot(model, public, num_records=NUM, epsilon=1.0, delta=1e-5)
    optimizer = dpvi.optimizers.DPKerasAdamOptimizer(0.02, l2_norm_clip=2.0, noise_multiplier=5.0)
    model.compile(optimizer, delta=1e-5, jit_compile=True, steps_per_execution=200)
    model.fit(x, y, batch_size=BATCH, epochs=20, verbose=0)
    return model


def measured(size):
    generator = np.random.default_rng(0)
    x = generator.normal(size=(NUM, size)).astype("float32")
    logits = x @ (0.3 * generator.normal(size=size))
    y = (generator.random(NUM) < 1 / (1 + np.exp(-logits))).astype("float32")
    models = {clipping: fitted(size, clipping, x, y) for clipping in ("flat", "paired")}
    make, posterior = models["paired"].after_fit, []
    models["paired"].after_fit = lambda: None  # The step alone; the posterior is made below.
    fits = {clipping: [] for clipping in models}
    for _ in range(ROUNDS):
        for clipping, model in models.items():
            begun = time.perf_counter()
            model.fit(x, y, batch_size=BATCH, epochs=EPOCHS, verbose=0)
            fits[clipping].append(time.perf_counter() - begun)
        begun = time.perf_counter()
        make()
        posterior.append(time.perf_counter() - begun)
    ratios = np.array(fits["paired"]) / np.array(fits["flat"])
    return {"ratio": round(float(np.median(ratios)), 2), "posterior_s": round(float(np.median(posterior)), 2)}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("docs/figures/calibration_time.json"))
    arguments = parser.parse_args()
    found = {str(size): measured(size) for size in (5, 20, 50)}
    found["versions"] = {"python": platform.python_version(), "tensorflow": tf.__version__}
    arguments.output.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
