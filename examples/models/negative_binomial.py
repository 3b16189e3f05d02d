"""Negative binomial regression of overdispersed counts, with an unknown dispersion."""

import shared
import tensorflow as tf
import tensorflow_probability as tfp

tfd = tfp.distributions


def prior():
    return tfd.JointDistributionNamed(
        {
            "intercept": tfd.Normal(1.0, 0.5),
            "slopes": tfd.Sample(tfd.Normal(0.0, 0.3), 3),
            "dispersion": tfd.LogNormal(1.0, 0.5),
        }
    )


def likelihood(params, x):
    log_mean = params["intercept"] + tf.linalg.matvec(x, params["slopes"])
    return tfd.NegativeBinomial(
        params["dispersion"], logits=log_mean - tf.math.log(params["dispersion"])
    )


def inputs(num, generator):
    return generator.normal(size=(num, 3)).astype("float32")


if __name__ == "__main__":
    shared.main()
