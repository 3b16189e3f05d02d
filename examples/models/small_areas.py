"""Shares of small areas from a weighted survey: persons with an outcome of 1 are oversampled."""

import sys

import numpy as np
import shared
import tensorflow as tf
import tensorflow_probability as tfp

import tfp_dpvi as dpvi

tfd = tfp.distributions
NUM_AREAS = 20
MOST_WEIGHT = 20.0
NUM_SYNTHETIC = 10_000


def prior():
    return tfd.JointDistributionNamed(
        {
            "mean": tfd.Normal(0.0, 1.0),
            "spread": tfd.LogNormal(-1.0, 0.5),
            "area": lambda mean, spread: tfd.Sample(tfd.Normal(mean, spread), NUM_AREAS),
            "old": tfd.Normal(0.0, 1.0),
        }
    )


def likelihood(params, x):
    score = tf.gather(params["area"], x["area"]) + params["old"] * x["old"]
    return tfd.Bernoulli(logits=score, dtype=tf.float32)


def inputs(num, generator):
    """Returns random inputs: a person's area, and whether the person is old."""
    area = generator.integers(NUM_AREAS, size=num).astype("int32")
    return {"area": area, "old": generator.integers(2, size=num).astype("float32")}


def weighted(num=10_000, seed=2026, epsilon=1.0):
    """Returns draws of areas' shares, and the population's own, from a survey of `num` persons."""
    generator = np.random.default_rng(seed)
    x, y, _ = shared.simulate(sys.modules[__name__], 10 * num, seed)
    # Inclusion is proportional to one over the weight, which depends on the outcome.
    weights = np.where(y > 0, 2.0, 10.0) * generator.lognormal(0.0, 0.3, len(y))
    weights = np.clip(weights, 1.0, MOST_WEIGHT).astype("float32")
    chosen = generator.choice(len(y), num, replace=False, p=1.0 / weights / np.sum(1.0 / weights))
    model = dpvi.DPVI(prior(), likelihood)
    model.compile(epsilon=epsilon, delta=1e-6)
    own = {name: part[chosen] for name, part in x.items()}
    settings = {"sample_weight": weights[chosen], "max_weight": MOST_WEIGHT, "verbose": 0}
    model.fit(own, y[chosen], public_inputs=inputs(NUM_SYNTHETIC, generator), **settings)
    draws = model.posterior_sample(1000, seed=0)
    total, size = 0.0, np.zeros(NUM_AREAS)
    for old in (0.0, 1.0):
        count = np.bincount(x["area"][x["old"] == old], minlength=NUM_AREAS)
        total = total + count * tf.sigmoid(draws["area"] + old * draws["old"][:, None]).numpy()
        size += count
    return total / size, np.bincount(x["area"], y, NUM_AREAS) / size


if __name__ == "__main__":
    shares, truths = weighted()
    inside = np.abs(shares.mean(axis=0) - truths) < 1.645 * shares.std(axis=0)
    print(f"90 % intervals hold {np.mean(inside):.0%} of the areas' shares")
