"""Weibull regression of survival times that are censored at the end of a study.

The outcome is min(time, limit). A time at its limit means that the event came later. The limits are public inputs.
"""

import shared
import tensorflow as tf
import tensorflow_probability as tfp

tfd = tfp.distributions


class Censored(tfd.Distribution):
    """min(time, limit) of a distribution of times."""

    def __init__(self, times, limit):
        super().__init__(
            times.dtype, tfd.NOT_REPARAMETERIZED, validate_args=False, allow_nan_stats=True
        )
        self.times, self.limit = times, limit

    def _batch_shape(self):
        return self.times.batch_shape

    def _event_shape(self):
        return tf.TensorShape([])

    def _sample_n(self, n, seed=None):
        return tf.minimum(self.times.sample(n, seed=seed), self.limit)

    def _log_prob(self, value):
        return tf.where(
            value < self.limit,
            self.times.log_prob(value),
            self.times.log_survival_function(self.limit),
        )


def prior():
    coefficients = {
        "intercept": tfd.Normal(0.0, 0.5),
        "slopes": tfd.Sample(tfd.Normal(0.0, 0.5), 2),
    }
    return tfd.JointDistributionNamed({**coefficients, "shape": tfd.LogNormal(0.3, 0.3)})


def likelihood(params, x):
    log_scale = params["intercept"] + tf.linalg.matvec(x["patient"], params["slopes"])
    return Censored(tfd.Weibull(params["shape"], tf.exp(log_scale)), x["limit"])


def inputs(num, generator):
    limit = generator.uniform(0.5, 3.0, size=num)
    return {
        "patient": generator.normal(size=(num, 2)).astype("float32"),
        "limit": limit.astype("float32"),
    }


if __name__ == "__main__":
    shared.main()
