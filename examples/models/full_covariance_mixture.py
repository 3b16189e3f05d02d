"""A mixture of two normals with full covariances in the plane. A record's component is summed out.

The prior identifies the components by their means, near (-2, 0) and (2, 0); otherwise labels would be exchangeable.
"""

import numpy as np
import shared
import tensorflow_probability as tfp

import tfp_dpvi as dpvi

tfd = tfp.distributions
CENTRES = np.array([[-2.0, 0.0], [2.0, 0.0]], "float32")


def prior():
    return tfd.JointDistributionNamed(
        {
            "weights": tfd.Dirichlet([5.0, 5.0]),
            "means": tfd.Independent(tfd.Normal(CENTRES, 0.7), 2),
            "factors": tfd.Sample(
                dpvi.surrogates.WishartTriL(
                    6.0, 0.4 * np.eye(2, dtype="float32"), input_output_cholesky=True
                ),
                2,
            ),
        }
    )


def surrogate(prior):
    """Starts at the prior's centres."""
    start = {
        "weights": [0.5, 0.5],
        "means": CENTRES,
        "factors": np.tile(np.eye(2, dtype="float32"), (2, 1, 1)),
    }
    return dpvi.surrogates.mean_field(prior, initial_loc=start)


def likelihood(params):
    parts = tfd.MultivariateNormalTriL(params["means"], params["factors"])
    return tfd.MixtureSameFamily(tfd.Categorical(probs=params["weights"]), parts)


def inputs(num, generator):
    """Returns None: the likelihood generates whole records."""


if __name__ == "__main__":
    shared.main()
