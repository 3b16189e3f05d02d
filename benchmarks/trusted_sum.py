"""Narrower intervals for trust in what adds up: a study with and without a `TrustedSum`, rehearsed.

    python benchmarks/trusted_sum.py [--num 40] [--quick] [--out docs/figures]

Five hospitals of 600 records each and epsilon 1 fit a logistic regression of five coefficients.
Each has noise for its own message; or a share of the noise of a sum against whoever sees the sum
alone, or against one or two curious hospitals. Beside them one hospital holds all 3,000 records.
Widths and coverage are of 90 % intervals. Prices are of rounds and sums together.
"""

import argparse
import dataclasses
import json
import pathlib

import harness
import numpy as np
import tensorflow as tf
import tensorflow_probability as tfp

import tfp_dpvi as dpvi
from tfp_dpvi import federated

tfd = tfp.distributions
HOSPITALS, RECORDS, WIDTH = 5, 600, 5
EPSILON, DELTA = 1.0, 1e-5
ROUNDS = 10
TRUTH = (0.8, -0.5, 0.3, 0.0, -0.2)


def inputs(num, seed):
    """Returns simulated inputs, which are also the public ones."""
    return np.random.default_rng(seed).normal(size=(num, WIDTH)).astype("float32")


def make_study(trusted_sum=None):
    """Returns the study."""
    return federated.Study(
        tfd.Sample(tfd.Normal(0.0, 1.0), WIDTH),
        lambda w, x: tfd.Bernoulli(logits=tf.linalg.matvec(x, w)),
        dpvi.optimizers.InformationOptimizer(l2_norm_clip=2.0),
        example=(inputs(4, 0), np.array([0, 1, 0, 1], "int32")),
        public_inputs=inputs(1000, 7),
        trusted_sum=trusted_sum,
    )


def prices_of(study):
    """Returns the prices of one hospital's rounds and sums; they depend on no record."""
    x = inputs(RECORDS, 1)
    hospital = federated.Hospital(
        study,
        x,
        np.zeros(RECORDS, "int32"),
        name="one",
        epsilon=EPSILON,
        delta=DELTA,
        rounds=ROUNDS,
        trusts_sum=study.agreed_sum is not None,
    )
    return None if hospital.sum_prices is None else dataclasses.asdict(hospital.sum_prices)


def row(name, trusted_sum, hospitals, num):
    """Returns the figures of one way to add noise."""
    study = make_study(trusted_sum)
    rehearsal = federated.rehearse_study(
        study,
        hospitals,
        inputs,
        delta=DELTA,
        schedule=federated.Synchronous(rounds=ROUNDS),
        truth={f"parameter[{place}]": value for place, value in enumerate(TRUTH)},
        num=num,
        seed=3,
        verbose=0,
    )
    columns = rehearsal.columns(HOSPITALS * RECORDS, EPSILON)
    return {
        "name": name,
        "prices": prices_of(study),
        "width": float(np.mean(columns["width"])),
        "coverage": float(np.mean(columns["coverage"])),
    }


def main():
    """Prints the rows as JSON, and writes them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--num", type=int, default=40, help="simulated data sets of each row")
    parser.add_argument("--quick", action="store_true", help="two data sets of each row")
    parser.add_argument("--out", default="docs/figures", help="folder of trusted_sum.json")
    options = parser.parse_args()
    num = 2 if options.quick else options.num
    apart, together = [(RECORDS, EPSILON)] * HOSPITALS, [(RECORDS * HOSPITALS, EPSILON)]
    trust = federated.TrustedSum(
        HOSPITALS, by="the trust office", epsilon=EPSILON, delta=DELTA, curious=0
    )
    rows = [
        row("noise for each message", None, apart, num),
        row("a trusted sum, 2 curious", dataclasses.replace(trust, curious=2), apart, num),
        row("a trusted sum, 1 curious", dataclasses.replace(trust, curious=1), apart, num),
        row("a trusted sum, 0 curious", trust, apart, num),
        row("one hospital with all records", None, together, num),
    ]
    result = {
        "num": num,
        "epsilon": EPSILON,
        "delta": DELTA,
        "rows": rows,
        "machine": harness.machine(),
        "versions": harness.versions(tensorflow="tensorflow", numpy="numpy"),
        "commit": harness.commit(),
        "code": harness.code_hash(),
    }
    text = json.dumps(result, indent=1)
    print(text)
    if not options.quick:
        pathlib.Path(options.out, "trusted_sum.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
