"""The study that the hospitals agreed on: a logistic regression. `python study.py` writes its terms for the server."""

from __future__ import annotations

import pathlib

import numpy as np

import tfp_dpvi as dpvi
from tfp_dpvi._tf import tf, tfd

WIDTH = 3
TERMS = pathlib.Path(__file__).with_name("terms.json")


def likelihood(params, x):
    return tfd.Bernoulli(logits=tf.linalg.matvec(x, params["w"]))


def make_study():
    prior = tfd.JointDistributionNamed({"w": tfd.Sample(tfd.Normal(0.0, 2.0), sample_shape=WIDTH)})
    optimizer = dpvi.optimizers.InformationOptimizer(l2_norm_clip=1.0)
    return dpvi.federated.Study(
        prior,
        likelihood,
        optimizer,
        name="three hospitals",
        local_steps=20,
        example=make_records(0, num=4),
    )


def make_records(number, num=500):
    """Simulated records of hospital `number`: x float32 [num, 3], y int32 [num]."""
    rng = np.random.default_rng(number)
    x = rng.normal(size=(num, WIDTH)).astype(np.float32)
    return x, (rng.random(num) < 1.0 / (1.0 + np.exp(-x @ [1.0, -0.5, 0.0]))).astype(np.int32)


if __name__ == "__main__":
    make_study().terms.save(TERMS)
    print(f"wrote {TERMS}")
