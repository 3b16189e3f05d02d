"""A Bayesian network of four binary nodes, cloudy -> (sprinkler, rain) -> wet, with unknown probability tables.

A record has one value of each node. The posterior without privacy has a closed form: a beta for each entry of a table.
"""

import numpy as np
import shared
import tensorflow as tf
import tensorflow_probability as tfp

tfd = tfp.distributions


def prior():
    # One for each state of the node's parents.
    entries = {"cloudy": 1, "sprinkler": 2, "rain": 2, "wet": 4}
    return tfd.JointDistributionNamed(
        {name: tfd.Sample(tfd.Beta(2.0, 2.0), size) for name, size in entries.items()}
    )


def likelihood(params):
    def yes(name, state):
        states = tf.one_hot(state, params[name].shape[-1], dtype=tf.float32)
        return tfd.Bernoulli(probs=tf.reduce_sum(params[name] * states, axis=-1))

    return tfd.JointDistributionNamed(
        {
            "cloudy": tfd.Bernoulli(probs=params["cloudy"][0]),
            "sprinkler": lambda cloudy: yes("sprinkler", cloudy),
            "rain": lambda cloudy: yes("rain", cloudy),
            "wet": lambda sprinkler, rain: yes("wet", 2 * sprinkler + rain),
        }
    )


def inputs(num, generator):
    """Returns None: the likelihood generates whole records."""


def closed_form(x, _):
    """Returns draws from the exact posterior."""
    states = {
        "cloudy": 0 * x["cloudy"],
        "sprinkler": x["cloudy"],
        "rain": x["cloudy"],
        "wet": 2 * x["sprinkler"] + x["rain"],
    }
    generator, draws = np.random.default_rng(0), {}
    for name, state in states.items():
        size = {"cloudy": 1, "wet": 4}.get(name, 2)
        yes, no = (np.bincount(state[x[name] == value], minlength=size) for value in (1, 0))
        draws[name] = generator.beta(2.0 + yes, 2.0 + no, size=(4000, size))
    return draws


if __name__ == "__main__":
    shared.main()
