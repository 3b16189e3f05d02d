"""Ordinal regression of answers on a scale of five, with unknown cut points: the first and the gaps between them."""

import shared
import tensorflow as tf
import tensorflow_probability as tfp

tfd = tfp.distributions


def prior():
    return tfd.JointDistributionNamed(
        {
            "first": tfd.Normal(-2.0, 0.7),
            "gaps": tfd.Sample(tfd.LogNormal(0.0, 0.4), 3),
            "slopes": tfd.Sample(tfd.Normal(0.0, 0.7), 3),
        }
    )


def likelihood(params, x):
    cuts = params["first"] + tf.concat([[0.0], tf.cumsum(params["gaps"])], axis=0)
    return tfd.OrderedLogistic(cuts, tf.linalg.matvec(x, params["slopes"]))


def inputs(num, generator):
    return generator.normal(size=(num, 3)).astype("float32")


if __name__ == "__main__":
    shared.main()
