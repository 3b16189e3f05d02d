"""Item response theory: difficulties and discriminations of 20 questions, from persons' right and wrong answers.

A person's ability is a local latent. It is summed out by quadrature, so that the likelihood of a whole record has only global
parameters, and abilities are not released.
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
    """Returns None: the likelihood generates whole records."""


if __name__ == "__main__":
    shared.main()
