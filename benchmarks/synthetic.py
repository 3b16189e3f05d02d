"""Synthetic Adult at one budget: `dpvi.Synthesizer` compared with MST, AIM and DataSynthesizer.

    python benchmarks/synthetic.py FOLDER --write          writes the coded records for the peers
    python benchmarks/peers/synth_peer.py FOLDER mst       in the peers' environment, likewise the others
    python benchmarks/synthetic.py FOLDER [--repeats 5]    fits, measures all, writes FOLDER/synthetic.json

The peers get the levels of `examples/synthetic_adult.py`'s public bins, and so does `pairs, public bins`. The row `pairs`
chooses its bins within the budget. All are evaluated with these bins against the 32,561 training records: total
variation over columns (mean and maximum) and pairs of columns, and the accuracy on 16,281 real test records of a logistic
regression trained on the synthetic ones.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import time
from typing import Any

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "examples"))

import synthetic_adult as adult

import tfp_dpvi as dpvi
from tfp_dpvi.data import MISSING, Layout, Schema

PEERS = ("mst", "mst-smartnoise", "aim", "aim-smartnoise", "datasynthesizer")


def write(folder: pathlib.Path, schema: Schema, train: Any) -> None:
    """Writes codes.csv: levels, with one more for missing values."""
    codes = schema.encode(train)
    sizes = [column.num_levels for column in schema.columns.values()]
    folder.mkdir(parents=True, exist_ok=True)
    coded = np.where(codes == MISSING, sizes, codes)
    np.savetxt(folder / "codes.csv", coded, "%d", ",", header=",".join(schema.names), comments="")
    levels = {name: size + 1 for name, size in zip(schema.names, sizes, strict=True)}
    (folder / "sizes.json").write_text(json.dumps(levels) + "\n")


def read(path: pathlib.Path, schema: Schema, train: Any) -> Any:
    """A peer's table, with numbers uniform within their bins."""
    names = path.read_text().partition("\n")[0].split(",")
    found = np.loadtxt(path, delimiter=",", skiprows=1)[
        :, [names.index(name) for name in schema.names]
    ].astype(int)
    sizes = [column.num_levels for column in schema.columns.values()]
    codes = np.where(found >= sizes, MISSING, found)
    return schema.decode(codes, Layout.of(train, schema), np.random.default_rng(0))


def measure(schema: Schema, train: Any, test: Any, made: Any) -> dict[str, float]:
    """Returns total variations and the accuracy of a classifier."""
    return {
        **adult.likeness(schema, train, made),
        "accuracy": adult.test_accuracy(schema, made, test, 10),
    }


def ours(schema: Schema, train: Any, options: argparse.Namespace) -> tuple[Any, float]:
    """A synthetic table and the seconds that fit and sample took."""
    start = time.perf_counter()
    synthesizer = dpvi.Synthesizer(schema, target=adult.LABEL)
    made = synthesizer.fit(train, epsilon=options.epsilon, delta=options.delta).sample()
    return made, time.perf_counter() - start


def summary(rows: list[dict[str, float]], seconds: list[float]) -> dict[str, Any]:
    """Means over repeats, and each of them."""
    means = {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}
    return {**means, "seconds": float(np.mean(seconds)), "repeats": len(rows), "each": rows}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--write", action="store_true", help="write the peers' input, and stop")
    parser.add_argument("--epsilon", type=float, default=1.0)
    parser.add_argument("--delta", type=float, default=1e-5)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--only",
        nargs="*",
        help="rows to measure anew; the others stay as they are in synthetic.json",
    )
    options = parser.parse_args()
    described, train, test = adult.load()
    schema = adult.measured_by(described)
    if options.write:
        write(options.folder, schema, train)
        return
    train, test = adult.as_frame(train), adult.as_frame(test)
    target = options.folder / "synthetic.json"
    found = json.loads(target.read_text()) if target.exists() else {}
    kinds = {"pairs": described, "pairs, public bins": schema}
    for label in (*kinds, *PEERS, "real"):
        if options.only and label not in options.only:
            continue
        rows, seconds = [], []
        if label in kinds:
            for _ in range(options.repeats):
                made, taken = ours(kinds[label], train, options)
                rows.append(measure(schema, train, test, made))
                seconds.append(taken)
        elif label == "real":
            rows, seconds = [measure(schema, train, test, train)], [0.0]
        else:
            for path in sorted(options.folder.glob(f"{label}-*.csv")):
                rows.append(measure(schema, train, test, read(path, schema, train)))
            seconds = (
                json.loads((options.folder / f"{label}.json").read_text())["seconds"]
                if rows
                else []
            )
        if not rows:
            continue
        found[label] = summary(rows, seconds)
        shown = {name: round(value, 4) for name, value in found[label].items() if name != "each"}
        print(f"{label:<20} {shown}", flush=True)
        target.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
