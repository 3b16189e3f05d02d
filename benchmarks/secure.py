"""The step with `compile(randomness="secure")` beside the default one, of logistic regression and of a VAE.

    python benchmarks/secure.py [--rounds 15] [--output docs/figures/benchmark_secure.json] [--quick]

Both are rows of `suite.py`: 40,000 records of 100 features at batch 200, compiled by XLA in calls of 500
steps; the VAE of 688,884 parameters at batch 128. They are timed in alternating rounds in one process; a
ratio is one of medians, and `rounds` has those of the rounds. `TARGETS` are at most.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Callable
from typing import Any

import harness
import vae
from cases import mean_field
from harness import Runner
from suite import OURS, of_prepared

from tfp_dpvi._tf import tf

SECURE = f"{OURS}, secure"
TARGETS = {"logistic": 1.3, "vae 128": 1.6}


def vae_makers(quick: bool) -> dict[str, Callable[[], Runner]]:
    x, _ = vae.load(500 if quick else None)
    batch_size, steps, per_call = (8, 2, 2) if quick else (128, 200, 50)

    def make(randomness: str | None) -> Runner:
        parts = vae.dense_parts()
        _, prepared = vae.make_private(parts, x, batch_size, per_call, randomness)
        return of_prepared(prepared, steps)

    return {OURS: lambda: make(None), SECURE: lambda: make("secure")}


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=pathlib.Path)
    parser.add_argument("--quick", action="store_true", help="tiny sizes: a test of the script")
    options = parser.parse_args(arguments)
    tf.get_logger().setLevel("ERROR")
    logistic = mean_field.logistic_makers(options.quick, None, None)
    cases = {
        "logistic": {way: logistic[way] for way in (OURS, SECURE)},
        "vae 128": vae_makers(options.quick),
    }
    result: dict[str, Any] = {
        "machine": harness.machine(),
        "versions": harness.versions(
            tensorflow="tensorflow", cryptography="cryptography", numpy="numpy"
        ),
        "cases": {},
    }
    for name, makers in cases.items():
        times, _, failed = harness.interleaved(makers, options.rounds, name=name)
        found = harness.ratio(times, SECURE, OURS)
        if found is None:
            raise RuntimeError(f"{name}: {failed}")
        spreads = {way: harness.spread(values) for way, values in times.items()}
        result["cases"][name] = {"seconds": spreads, "target": TARGETS[name], **found}
        low, high = found["rounds"]["min"], found["rounds"]["max"]
        print(
            f"{name} secure: {found['ratio']:.3f} times the step ({low:.3f} to {high:.3f}), at most "
            f"{TARGETS[name]:g}: {'yes' if found['ratio'] <= TARGETS[name] else 'NO'}",
            flush=True,
        )
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({name: case["ratio"] for name, case in result["cases"].items()}))
    return result


if __name__ == "__main__":
    main()
