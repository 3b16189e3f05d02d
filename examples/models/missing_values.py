"""Three measurements with missing values: a mask among the inputs leaves them out of the likelihood."""

import shared
import tensorflow as tf
import tensorflow_probability as tfp

tfd = tfp.distributions
NUM_OUTPUTS = 3


def prior():
    return tfd.JointDistributionNamed(
        {
            "intercepts": tfd.Sample(tfd.Normal(0.0, 1.0), NUM_OUTPUTS),
            "slopes": tfd.Sample(tfd.Normal(0.0, 1.0), [2, NUM_OUTPUTS]),
            "noise": tfd.Sample(tfd.LogNormal(-0.3, 0.3), NUM_OUTPUTS),
        }
    )


def likelihood(params, x):
    outcome = tfd.Normal(
        params["intercepts"] + x["age_and_dose"] @ params["slopes"], params["noise"]
    )
    measured = tf.cast(x["measured"], tf.bool)
    return tfd.Independent(tfd.Masked(outcome, measured), reinterpreted_batch_ndims=1)


def inputs(num, generator):
    """Returns inputs with a mask: a measurement is present with probability 0.7. Missing outcomes are not read."""
    measured = (generator.random((num, NUM_OUTPUTS)) < 0.7).astype("int32")
    return {"age_and_dose": generator.normal(size=(num, 2)).astype("float32"), "measured": measured}


if __name__ == "__main__":
    shared.main()
