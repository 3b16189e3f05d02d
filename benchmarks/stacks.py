"""The suite's own rows on two stacks, or of two revisions, in turn: how long a step takes over how long on the other.

    python benchmarks/stacks.py --other .venv-tf215/bin/python [--rows "logistic, XLA" ...] [--rounds 15] [--quick]
    python benchmarks/stacks.py --before CHECKOUT [...]

`--before` takes a checkout of an older revision, whose own suite is run by this interpreter. Else both interpreters run this
checkout. Each side has a process of its own that is made once and kept; in every round each row is
timed on one stack and then on the other, and the order changes from round to round. Compiling is left out and given as
`first_call_seconds`. A ratio is one of medians; `rounds` has those of single rounds and `of_minima` that of the least times.
The last line is one JSON object with the ratio of each row; `TARGETS` are what they are to reach.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import sys
import time
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
sys.path.insert(
    0, str(pathlib.Path(__file__).resolve().parents[1])
)  # This checkout, whatever is installed.

import harness
from harness import Peer, Runner

ROWS = {  # Name, case of the suite, way.
    "logistic, XLA": ("logistic", "tfp_dpvi"),
    "logistic": ("logistic", "tfp_dpvi, without XLA"),
    "mixture": ("mixture", "tfp_dpvi"),
    "hierarchical": ("hierarchical", "tfp_dpvi"),
    "vae 128": ("vae 128", "tfp_dpvi"),
    "conv": ("conv", "tfp_dpvi"),
    "sampler": ("sampler", "N = 10^9"),
    "streaming": ("streaming", "tfp_dpvi, from disk"),
}
TARGETS = {"logistic, XLA": 1.2, "vae 128": 1.15}
STACKS = ("this", "other")


def answer(quick: bool, checkout: pathlib.Path | None) -> None:
    """Runs rows on request, as `harness.Peer` asks for them."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # What else is printed must not mix with answers.
    if checkout is not None:
        sys.path[:0] = [str(checkout.resolve() / "benchmarks"), str(checkout.resolve())]
    import suite
    import tensorflow as tf

    tf.get_logger().setLevel("ERROR")
    found = harness.versions(tensorflow="tensorflow", tfp="tensorflow-probability", numpy="numpy")
    print(json.dumps(found), file=answers, flush=True)
    every = suite.cases(quick, {})
    runners: dict[str, Runner] = {}
    for line in sys.stdin:
        request = json.loads(line)
        name = request["row"]
        if name not in runners:
            case, way = ROWS[name]
            runners[name] = every[case]()[way]()
            begin = time.perf_counter()
            runners[name].run(0)
            seconds = time.perf_counter() - begin
        else:
            steps = max(1, runners[name].steps // 2)
            seconds = runners[name].run(steps) / steps
        print(json.dumps({"seconds": seconds, "finite": True}), file=answers, flush=True)


def measured(
    peers: dict[str, Peer], names: list[str], rounds: int
) -> tuple[dict[str, dict[str, list[float]]], dict[str, dict[str, float]]]:
    """Seconds per step and of the first call, by row and stack."""
    first = {
        name: {stack: peer.seconds(0, row=name) for stack, peer in peers.items()} for name in names
    }
    times: dict[str, dict[str, list[float]]] = {
        name: {stack: [] for stack in peers} for name in names
    }
    for name in names:
        for number in range(rounds):
            for stack in list(peers)[:: 1 if number % 2 else -1]:
                times[name][stack].append(peers[stack].seconds(1, row=name))
        shown = ", ".join(
            f"{stack} {1e3 * statistics.median(values):.4g}"
            for stack, values in times[name].items()
        )
        print(f"{name}: {shown} ms a step; load {os.getloadavg()[0]:.1f}", flush=True)
    return times, first


def main(arguments: list[str] | None = None) -> dict[str, Any] | None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--other", help="interpreter of an environment with the other stack")
    parser.add_argument("--before", type=pathlib.Path, help="a checkout of an older revision")
    parser.add_argument("--checkout", type=pathlib.Path, help=argparse.SUPPRESS)
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS), metavar="ROW")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--output", type=pathlib.Path, default=pathlib.Path("docs/figures/benchmark")
    )
    parser.add_argument(
        "--quick", action="store_true", help="tiny, to see that it runs: its figures mean nothing"
    )
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.answer:
        return answer(options.quick, options.checkout)
    if (options.other is None) == (options.before is None):
        parser.error(
            "give --other, the python of an environment with the other stack, or --before, a checkout"
        )
    more = ["--answer", *(["--quick"] if options.quick else [])]
    older = ["--checkout", str(options.before)] if options.before else []
    peers = {
        "this": Peer(sys.executable, pathlib.Path(__file__).resolve(), *more),
        "other": Peer(
            options.other or sys.executable, pathlib.Path(__file__).resolve(), *more, *older
        ),
    }
    times, first = measured(peers, options.rows, 2 if options.quick else options.rounds)
    for peer in peers.values():
        peer.close()
    rows: dict[str, Any] = {}
    for name, by_stack in times.items():
        found = harness.ratio(by_stack, *STACKS)
        assert found is not None
        target = 1.1 if options.before else TARGETS.get(name)
        rows[name] = {
            **found,
            "of_minima": min(by_stack["this"]) / min(by_stack["other"]),
            "target": target,
            "reached": None if target is None else found["ratio"] <= target,
            "milliseconds_per_step": {
                s: harness.spread([1e3 * v for v in values]) for s, values in by_stack.items()
            },
            "first_call_seconds": first[name],
        }
    versions = {stack: peer.versions for stack, peer in peers.items()}
    titles = [f"TensorFlow {versions[stack]['tensorflow']}, ms" for stack in STACKS]
    if options.before:
        titles = ["now, ms", "before, ms"]
    print(
        f"\n{'row':16s}"
        + "".join(f"{title:>24s}" for title in (*titles, "ratio", "of minima", "target"))
    )
    for name, row in rows.items():
        times_of = [f"{row['milliseconds_per_step'][stack]['median']:.4g}" for stack in STACKS]
        target = (
            "-"
            if row["target"] is None
            else f"<= {row['target']:g}" + ("" if row["reached"] else ", MISSED")
        )
        cells = (*times_of, f"{row['ratio']:.2f}", f"{row['of_minima']:.2f}", target)
        print(f"{name:16s}" + "".join(f"{cell:>24s}" for cell in cells))
    result = {
        "rows": rows,
        "versions": versions,
        "machine": harness.machine(),
        "commit": harness.commit(),
        "code": harness.code_hash(),
        "before": harness.commit(options.before) if options.before else None,
        "quick": options.quick,
        "benchmark": "stacks",
        "command": f"python benchmarks/stacks.py {'--before CHECKOUT' if options.before else '--other .venv-tf215/bin/python'}",
    }
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / ("before.json" if options.before else "stacks.json")).write_text(
        json.dumps(result, indent=1) + "\n"
    )
    print(json.dumps({name: row["ratio"] for name, row in rows.items()}))
    return result


if __name__ == "__main__":
    main()
