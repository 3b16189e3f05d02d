"""Radon in houses: counties' intercepts have a common distribution with unknown mean and spread."""

import shared
import tensorflow as tf
import tensorflow_probability as tfp

tfd = tfp.distributions
NUM_COUNTIES = 30
# A county with too many of the inputs would seem to have too much information.
NUM_SYNTHETIC = 30_000


def prior():
    return tfd.JointDistributionNamed(
        {
            "mean": tfd.Normal(1.0, 1.0),
            "spread": tfd.LogNormal(-1.0, 0.5),
            "county": lambda mean, spread: tfd.Sample(tfd.Normal(mean, spread), NUM_COUNTIES),
            "basement": tfd.Normal(0.5, 0.5),
            "noise": tfd.LogNormal(-0.5, 0.3),
        }
    )


def likelihood(params, x):
    loc = tf.gather(params["county"], x["county"]) + params["basement"] * x["basement"]
    return tfd.Normal(loc, params["noise"])


def inputs(num, generator):
    """Returns random inputs: a house's county, and whether the instrument was in the basement."""
    county = generator.integers(NUM_COUNTIES, size=num).astype("int32")
    return {"county": county, "basement": generator.integers(2, size=num).astype("float32")}


if __name__ == "__main__":
    shared.main()
