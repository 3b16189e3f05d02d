"""Longitudinal logistic regression: up to 20 visits of each patient, with an intercept of the patient that is summed out."""

import numpy as np
import shared
import tensorflow as tf
import tensorflow_probability as tfp

import tfp_dpvi as dpvi

tfd = tfp.distributions
MOST_VISITS = 20


def prior():
    return tfd.JointDistributionNamed(
        {
            "intercept": tfd.Normal(0.0, 1.0),
            "slope": tfd.Sample(tfd.Normal(0.0, 1.0), 2),
            "spread": tfd.HalfNormal(1.0),
        }
    )


def likelihood(params, x):
    score = params["intercept"] + tf.linalg.matvec(x, params["slope"])
    return dpvi.local.unit_quadrature(
        lambda z: tfd.Bernoulli(logits=score[:, None] + params["spread"] * z, dtype=tf.float32)
    )


def patients(num, generator):
    """Returns visits and whose they are: the time since the first one, and a treatment of the patient."""
    visits = generator.integers(1, MOST_VISITS + 1, num)
    ids = np.repeat(np.arange(num), visits)
    time = (np.arange(len(ids)) - np.repeat(np.cumsum(visits) - visits, visits)) / 10.0
    treated = generator.integers(2, size=num)[ids]
    return np.stack([time, treated], axis=1).astype("float32"), ids


def fitted(epsilon, num=5000, seed=2026):
    """Returns draws of all parameters and the truth; infinite epsilon for a fit without noise."""
    generator = np.random.default_rng(seed)
    x, ids = patients(num, generator)
    truth = np.array([-0.5, 0.4, -0.6, 0.8])
    score = truth[0] + x @ truth[1:3] + truth[3] * generator.normal(size=num)[ids]
    y = (generator.random(len(ids)) < 1.0 / (1.0 + np.exp(-score))).astype("float32")
    model = dpvi.DPVI(prior(), likelihood, seed=0)
    without = [dpvi.optimizers.ScoringOptimizer(noise_multiplier=0.0)] * int(np.isinf(epsilon))
    model.compile(*without, **({} if without else {"epsilon": epsilon, "delta": 1e-5}))
    public, public_ids = patients(1000, np.random.default_rng(7))
    persons = {"unit_ids": ids, "max_rows_per_unit": MOST_VISITS}
    model.fit(x, y, public_inputs=public, public_unit_ids=public_ids, **persons, verbose=0)
    draws = model.posterior_sample(4000, seed=0)
    return shared.flat({name: draws[name] for name in ("intercept", "slope", "spread")}), truth


if __name__ == "__main__":
    found = {f"epsilon {epsilon:g}": fitted(epsilon) for epsilon in (np.inf, 3.0, 1.0)}
    draws = {label: one for label, (one, _) in found.items()}
    names = ["intercept", "time", "treated", "spread"]
    title = "99 % intervals, 5,000 patients with 1 to 20 visits"
    shared.write_intervals("longitudinal", names, draws, found["epsilon 1"][1], title)
