"""Item response theory: 20 questions' difficulties and discriminations, from the right and wrong answers of persons.

A person's ability is a latent of that record alone. It is summed out over the nodes of Gauss-Hermite quadrature, so that the
likelihood of a whole record has global parameters only, and no person's ability is ever released.
"""

import numpy as np
import shared
import tensorflow as tf
import tensorflow_probability as tfp

tfd = tfp.distributions
NUM_ITEMS = 20
NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(15)  # Of a standard normal ability.


def prior():
    return tfd.JointDistributionNamed(
        {
            "difficulty": tfd.Sample(tfd.Normal(0.0, 1.0), NUM_ITEMS),
            "discrimination": tfd.Sample(tfd.LogNormal(0.0, 0.3), NUM_ITEMS),
        }
    )


def likelihood(params):
    nodes = NODES.astype("float32")[:, None]
    right = tfd.Bernoulli(logits=params["discrimination"] * (nodes - params["difficulty"]), dtype=tf.float32)
    ability = tfd.Categorical(logits=np.log(WEIGHTS / WEIGHTS.sum()).astype("float32"))
    return tfd.MixtureSameFamily(ability, tfd.Independent(right, 1))


def inputs(num, generator):
    """None: the likelihood is one of whole records."""


if __name__ == "__main__":
    shared.main()
