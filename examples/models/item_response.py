"""Item response theory: 20 questions' difficulties and discriminations, from the right and wrong answers of persons.

A person's ability is a latent of that record alone. It is summed out by quadrature, so that the likelihood of a
whole record has global parameters only, and no person's ability is ever released.
"""

import shared
import tensorflow as tf
import tensorflow_probability as tfp

import tfp_dpvi as dpvi

tfd = tfp.distributions
NUM_ITEMS = 20


def prior():
    return tfd.JointDistributionNamed(
        {
            "difficulty": tfd.Sample(tfd.Normal(0.0, 1.0), NUM_ITEMS),
            "discrimination": tfd.Sample(tfd.LogNormal(0.0, 0.3), NUM_ITEMS),
        }
    )


def likelihood(params):
    def answers(ability):
        logits = params["discrimination"] * (ability[:, None] - params["difficulty"])
        return tfd.Independent(tfd.Bernoulli(logits=logits, dtype=tf.float32), 1)

    return dpvi.local.quadrature(answers, num_points=15)


def inputs(num, generator):
    """None: the likelihood is one of whole records."""


if __name__ == "__main__":
    shared.main()
