"""The time of the paired clip: its step over the flat one's, and computing the posterior, by likelihood and number of coefficients.

    python benchmarks/calibration_time.py [--output docs/figures/calibration_time.json]

5,000 records, batch 500; alternating fits of 1,000 steps, medians of five. With XLA, except for the paired clip of the negative
binomial, since XLA has no gamma draws.
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


def of_linear(family):
    """Returns a prior's maker and a likelihood of a linear predictor."""

    def prior(size):
        parts = {"w": tfd.Sample(tfd.Normal(0.0, 1.0), size)}
        return tfd.JointDistributionNamed(
            {**parts, "r": tfd.LogNormal(1.0, 0.5)} if family == "negbin" else parts
        )

    def likelihood(params, x):
        eta = tf.linalg.matvec(x, params["w"])
        if family == "logistic":
            return tfd.Bernoulli(logits=eta, dtype=tf.float32)
        if family == "poisson":
            return tfd.Poisson(log_rate=eta)
        return tfd.NegativeBinomial(params["r"], logits=eta - tf.math.log(params["r"]))

    return prior, likelihood


def fitted(family, size, clipping, x, y):
    make_prior, likelihood = of_linear(family)
    model = dpvi.DPVI(make_prior(size), likelihood, clipping=clipping)
    if clipping == "paired":
        public = np.random.default_rng(1).normal(size=(1000, size))
        dpvi.pilot(model, public, num_records=NUM, epsilon=1.0, delta=1e-5)
    optimizer = dpvi.optimizers.DPKerasAdamOptimizer(0.02, l2_norm_clip=2.0, noise_multiplier=5.0)
    xla = (family, clipping) != ("negbin", "paired")
    model.compile(optimizer, delta=1e-5, jit_compile=xla, steps_per_execution=200)
    model.fit(x, y, batch_size=BATCH, epochs=20, verbose=0)
    return model


def measured(family, size):
    generator = np.random.default_rng(0)
    x = generator.normal(size=(NUM, size)).astype("float32")
    _, likelihood = of_linear(family)
    w = (0.3 * generator.normal(size=size)).astype("float32")
    y = likelihood({"w": w, "r": 2.0}, x).sample(seed=tf.constant([0, 1])).numpy()
    models = {clipping: fitted(family, size, clipping, x, y) for clipping in ("flat", "paired")}
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
    return {
        "ratio": round(float(np.median(ratios)), 2),
        "posterior_s": round(float(np.median(posterior)), 2),
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--output", type=pathlib.Path, default=pathlib.Path("docs/figures/calibration_time.json")
    )
    arguments = parser.parse_args()
    cases = [("logistic", 5), ("logistic", 20), ("logistic", 50), ("poisson", 5), ("negbin", 5)]
    found = {f"{family}, {size}": measured(family, size) for family, size in cases}
    found["versions"] = {"python": platform.python_version(), "tensorflow": tf.__version__}
    arguments.output.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
