"""Synthetic Adult at one budget: `dpvi.Synthesizer` compared with MST, AIM and DataSynthesizer.

    python benchmarks/synthetic.py FOLDER --write          writes the coded records for the peers
    python benchmarks/peers/synth_peer.py FOLDER mst       in the peers' environment, likewise the others
    python benchmarks/synthetic.py FOLDER [--repeats 5]    fits, measures all, writes FOLDER/synthetic.json

`--columns education marital-status occupation relationship sex over-50K` does the same with six columns, in another folder;
AIM is slow with all thirteen, and `synth_peer.py --limit 900` ends a fit after 15 minutes.

The peers get the levels of `examples/synthetic_adult.py`'s public bins, and so does `pairs, public bins`. The row `pairs`
chooses its bins within the budget. All are evaluated with these bins against the 32,561 training records: total
variation over columns (mean and maximum), pairs and triples of columns, and the accuracy on 16,281 real test records of a
logistic regression trained on the synthetic ones. `columns shuffled` has the real columns, independently.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import time
from typing import Any

import harness
import numpy as np
import synthetic_adult as adult

import tfp_dpvi as dpvi
from tfp_dpvi.data import MISSING, Layout, Schema

PGM = ("mst", "mst-smartnoise", "aim", "aim-smartnoise")
PEERS = (*PGM, *(f"{name}-sampled" for name in PGM), "datasynthesizer")


def write(folder: pathlib.Path, schema: Schema, train: Any) -> None:
    """Writes codes.csv: levels, with one more for missing values where the schema has them."""
    codes = schema.encode(train)
    sizes = [column.num_levels for column in schema.columns.values()]
    folder.mkdir(parents=True, exist_ok=True)
    coded = np.where(codes == MISSING, sizes, codes)
    np.savetxt(folder / "codes.csv", coded, "%d", ",", header=",".join(schema.names), comments="")
    levels = {name: one.num_levels + one.missing for name, one in schema.columns.items()}
    (folder / "sizes.json").write_text(json.dumps(levels) + "\n")


def read(path: pathlib.Path, schema: Schema, train: Any) -> Any:
    """Returns a peer's table, with numbers uniform within their bins."""
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


def ours(schema: Schema, train: Any, options: argparse.Namespace) -> tuple[Any, dict[str, float]]:
    """Returns a synthetic table and the seconds that fit and sample took."""
    start, used = time.perf_counter(), time.process_time()
    synthesizer = dpvi.Synthesizer(schema, target=adult.LABEL)
    made = synthesizer.fit(train, epsilon=options.epsilon, delta=options.delta).sample()
    return made, {
        "seconds": time.perf_counter() - start,
        "cpu_seconds": time.process_time() - used,
    }


def summary(rows: list[dict[str, float]]) -> dict[str, Any]:
    """Returns means over repeats."""
    means = {name: float(np.mean([row[name] for row in rows])) for name in rows[0]} if rows else {}
    return {**means, "repeats": len(rows), "commit": harness.commit()}


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
    parser.add_argument("--columns", nargs="+", help=f"these alone; {adult.LABEL} has to be one")
    options = parser.parse_args()
    described, train, test = adult.load()
    if options.columns:
        described = Schema({name: described.columns[name] for name in options.columns})
        train, test = ({name: data[name] for name in options.columns} for data in (train, test))
    schema = adult.measured_by(described)
    if options.write:
        write(options.folder, schema, train)
        return
    shuffled = adult.as_frame(adult.shuffled(train))
    train, test = adult.as_frame(train), adult.as_frame(test)
    target = options.folder / "synthetic.json"
    found = json.loads(target.read_text()) if target.exists() else {"rows": {}, "sets": {}}
    kinds = {"pairs": described, "pairs, public bins": schema}
    tables = {"real": train, "columns shuffled": shuffled}
    for label in (*kinds, *PEERS, *tables):
        if options.only and label not in options.only:
            continue
        rows, about = [], {}
        if label in kinds:
            for _ in range(options.repeats):
                made, seconds = ours(kinds[label], train, options)
                rows.append({**measure(schema, train, test, made), **seconds})
        elif label in tables:
            rows = [measure(schema, train, test, tables[label])]
        elif (path := options.folder / f"{label}.json").exists():
            about = json.loads(path.read_text())
            for number, seconds in enumerate(about.pop("fits")):
                made = read(options.folder / f"{label}-{number}.csv", schema, train)
                rows.append({**measure(schema, train, test, made), **seconds})
        else:
            continue
        found["rows"][label] = row = {**summary(rows), **about}
        found["sets"][label] = rows
        shown = {name: round(row[name], 4) for name in row if isinstance(row[name], int | float)}
        print(f"{label:<20} {shown}", flush=True)
        settings = {"epsilon": options.epsilon, "delta": options.delta, "columns": schema.names}
        harness.write_study("synthetic.py", target, None, settings, found["rows"], found["sets"])


if __name__ == "__main__":
    main()
