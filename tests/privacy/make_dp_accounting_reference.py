"""Writes dp_accounting_0_6_reference.json: epsilons by dp_accounting 0.6.0, for test_reference.py.

dp_accounting 0.6 cannot be installed beside the pinned 0.4.3, so its figures are stored. To make them again:

    python3.11 -m venv reference-venv && reference-venv/bin/pip install dp-accounting==0.6.0
    reference-venv/bin/python tests/privacy/make_dp_accounting_reference.py
"""

import importlib.metadata
import itertools
import json
import pathlib

import dp_accounting
from dp_accounting import pld, rdp

DELTAS = (1e-4, 1e-5, 1e-7)
PROBABILITIES = (1e-3, 1e-2, 0.1, 0.5)
NOISE_MULTIPLIERS = (0.6, 1.0, 2.0, 8.0)
COUNTS = (1, 100, 1000, 10000)
RELATIONS = ("ADD_OR_REMOVE_ONE", "REPLACE_ONE")
# (records, batch size, noise multiplier over half of the replacement distance, count)
FIXED_SIZE = (
    (10000, 100, 2.0, 1000),
    (10000, 100, 4.0, 5000),
    (1000, 50, 3.0, 200),
    (48842, 256, 2.0, 3816),
)


def poisson_rows():
    grid = itertools.product(RELATIONS, PROBABILITIES, NOISE_MULTIPLIERS, COUNTS)
    for relation, q, z, count in grid:
        if q * count > 1000 or (z < 1 and count > 1000 and q > 1e-2):
            continue  # epsilons in the hundreds or thousands say nothing and take minutes
        accountant = pld.PLDAccountant(dp_accounting.NeighboringRelation[relation])
        accountant.compose(
            dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(z)), count
        )
        yield {
            "neighboring_relation": relation.lower(),
            "probability": q,
            "noise_multiplier": z,
            "num_releases": count,
            "epsilons": [accountant.get_epsilon(delta) for delta in DELTAS],
        }


def full_batch_rows():
    for relation, z, count in itertools.product(RELATIONS, (1.0, 4.0, 20.0), (1, 50)):
        accountant = pld.PLDAccountant(dp_accounting.NeighboringRelation[relation])
        accountant.compose(dp_accounting.GaussianDpEvent(z), count)
        yield {
            "neighboring_relation": relation.lower(),
            "noise_multiplier": z,
            "num_releases": count,
            "epsilons": [accountant.get_epsilon(delta) for delta in DELTAS],
        }


def fixed_size_rows():
    for records, batch, z, count in FIXED_SIZE:
        accountant = rdp.RdpAccountant(
            neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE
        )
        # The RDP accountant takes the multiplier over the whole replacement distance, 2 C.
        event = dp_accounting.SampledWithoutReplacementDpEvent(
            records, batch, dp_accounting.GaussianDpEvent(z / 2.0)
        )
        accountant.compose(event, count)
        yield {
            "num_records": records,
            "batch_size": batch,
            "noise_multiplier": z,
            "num_releases": count,
            "epsilons": [accountant.get_epsilon(delta) for delta in DELTAS],
        }


def heterogeneous_rows():
    parts = ((0.01, 1.5, 500), (0.05, 3.0, 200), (0.002, 0.8, 2000))
    for relation in RELATIONS:
        accountant = pld.PLDAccountant(dp_accounting.NeighboringRelation[relation])
        for q, z, count in parts:
            accountant.compose(
                dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(z)), count
            )
        accountant.compose(dp_accounting.GaussianDpEvent(30.0), 20)
        yield {
            "neighboring_relation": relation.lower(),
            "poisson": parts,
            "gaussian": [30.0, 20],
            "epsilons": [accountant.get_epsilon(delta) for delta in DELTAS],
        }


def main():
    version = importlib.metadata.version("dp-accounting")
    if version != "0.6.0":
        raise SystemExit(f"this needs dp-accounting 0.6.0, found {version}")
    reference = {
        "made_by": "tests/privacy/make_dp_accounting_reference.py",
        "dp_accounting": version,
        "deltas": DELTAS,
        "poisson": list(poisson_rows()),
        "full_batch": list(full_batch_rows()),
        "fixed_size": list(fixed_size_rows()),
        "heterogeneous": list(heterogeneous_rows()),
    }
    path = pathlib.Path(__file__).with_name("dp_accounting_0_6_reference.json")
    path.write_text(json.dumps(reference, indent=1) + "\n")


if __name__ == "__main__":
    main()
