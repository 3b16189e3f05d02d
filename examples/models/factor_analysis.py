"""Factor analysis: six measurements that share one factor. A record's factor is integrated out in closed form.

Loadings are positive, which fixes the sign of the factor.
"""

import shared
import tensorflow as tf
import tensorflow_probability as tfp

tfd = tfp.distributions
NUM_MEASUREMENTS = 6


def prior():
    return tfd.JointDistributionNamed(
        {
            "mean": tfd.Sample(tfd.Normal(0.0, 1.0), NUM_MEASUREMENTS),
            "loadings": tfd.Sample(tfd.LogNormal(-0.3, 0.4), NUM_MEASUREMENTS),
            "noise": tfd.Sample(tfd.LogNormal(-0.5, 0.3), NUM_MEASUREMENTS),
        }
    )


def likelihood(params):
    loadings = params["loadings"]
    covariance = loadings[..., None] * loadings[..., None, :] + tf.linalg.diag(params["noise"] ** 2)
    return tfd.MultivariateNormalTriL(params["mean"], tf.linalg.cholesky(covariance))


def inputs(num, generator):
    """Returns None: the likelihood generates whole records."""


if __name__ == "__main__":
    shared.main()
