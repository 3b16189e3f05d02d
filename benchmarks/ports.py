"""Ten tutorials and their private versions: the score of each, processor time a step, and the lines that differ.

    python benchmarks/ports.py [--only NAME ...] [--output docs/figures/ports/ports.json]
    python benchmarks/ports.py --quick      few records and epochs, to see that all run; its scores mean nothing
    python benchmarks/ports.py --write      only writes table and differences into docs/guides/ports.md

The programs are those of examples/ports/, run as they are. Rows that are not run again stay in the JSON file. Both versions of a
port run in one process, one after the other. Its processor time, a mean over all epochs but the first, says more than the clock
where a machine has other things to do.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import importlib
import json
import pathlib
import runpy
import sys
import time
from collections.abc import Iterator
from typing import Any

import harness

ROOT = pathlib.Path(__file__).resolve().parents[1]
FOLDER = ROOT / "examples" / "ports"
PAGE = ROOT / "docs" / "guides" / "ports.md"
RESULTS = ROOT / "docs" / "figures" / "ports" / "ports.json"
QUICK = {"records": 600, "epochs": 2}


@dataclasses.dataclass(frozen=True)
class Port:
    """A tutorial.

    Attributes:
      module: The Keras that its original imports.
      score: What its programs call `score`.
      decimals: Of the score in the table.
      records: What a record is.
    """

    module: str
    score: str
    decimals: int
    records: str


PORTS = {
    "structured_data": Port("keras", "accuracy", 3, "persons of Adult"),
    "mnist_convnet": Port("keras", "accuracy", 3, "images of MNIST"),
    "text_classification": Port("keras", "accuracy", 3, "docstrings"),
    "rows_lstm": Port("keras", "accuracy", 3, "images of MNIST"),
    "tab_transformer": Port("keras", "accuracy", 3, "persons of Adult"),
    "film_ratings": Port("keras", "mean absolute error", 3, "ratings, made up"),
    "tfp_regression": Port("tf_keras", "negative log likelihood", 3, "pairs, made up"),
    "tfp_vae": Port("tf_keras", "negative ELBO, nats", 1, "images of MNIST"),
    "tfprivacy_mnist": Port("keras", "accuracy", 3, "images of MNIST"),
    "tfprivacy_logistic": Port("keras", "accuracy", 3, "images of MNIST"),
}


# ---------------------------------------------------------------------- runs


def _owner(name: str, private: bool) -> Any:
    """Returns the class whose `fit` a program calls."""
    if private:
        return importlib.import_module("tfp_dpvi").DPModel
    return importlib.import_module(PORTS[name].module).Model


@contextlib.contextmanager
def _clocked(owner: Any, quick: bool) -> Iterator[dict[str, Any]]:
    """Notes the processor time at the end of each epoch, and the arguments of `fit`."""
    plain = owner.fit
    noted: dict[str, Any] = {"ends": []}
    private = owner.__module__.startswith("tfp_dpvi")
    keras = importlib.import_module("tfp_dpvi" if private else owner.__module__.split(".")[0])
    callbacks = (keras.keras if private else keras).callbacks

    def fit(model: Any, *records: Any, **settings: Any) -> Any:
        settings["verbose"] = 0
        if quick:
            settings["epochs"] = QUICK["epochs"]
        noted.update(epochs=settings["epochs"], batch=settings["batch_size"])
        noted["records"] = len(_first(records[0]))
        note = callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: noted["ends"].append(time.process_time())
        )
        return plain(model, *records, **settings, callbacks=[note])

    owner.fit = fit
    try:
        yield noted
    finally:
        owner.fit = plain


def _first(part: Any) -> Any:
    """Returns the first array of a structure."""
    while isinstance(part, list | tuple | dict):
        part = next(iter(part.values())) if isinstance(part, dict) else part[0]
    return part


def run(name: str, private: bool, quick: bool) -> dict[str, Any]:
    """Runs one program.

    Args:
      name: The port.
      private: Whether to run its private version.
      quick: Few records and epochs.

    Returns:
      Score, processor milliseconds a step, and the guarantee.
    """
    sys.path.insert(0, str(FOLDER))
    importlib.import_module("records").LIMIT = QUICK["records"] if quick else None
    path = FOLDER / f"{name}{'_private' if private else ''}.py"
    keras = importlib.import_module("tfp_dpvi" if private else PORTS[name].module)
    (keras.keras if private else keras).utils.set_random_seed(0)
    begin = time.process_time()
    with _clocked(_owner(name, private), quick) as noted:
        program = runpy.run_path(str(path), run_name="__main__")
    sys.path.remove(str(FOLDER))
    ends = noted["ends"]
    steps = -(-noted["records"] // noted["batch"])
    spent = {}
    if private:
        report = program["model"].privacy_report()
        steps = program["model"].num_releases / noted["epochs"]
        spent = {"epsilon": report.epsilon, "delta": report.delta}
    epoch = (ends[-1] - ends[0]) / (len(ends) - 1)  # The first one traces.
    return {
        "score": float(program["score"]),
        "records": noted["records"],
        "batch_size": noted["batch"],
        "epochs": noted["epochs"],
        "processor_ms_a_step": 1e3 * epoch / steps,
        "processor_s": time.process_time() - begin,
        **spent,
    }


# ---------------------------------------------------------------------- the page


def difference(name: str) -> list[str]:
    """Returns the lines of a port that differ, as `diff -U0` prints them."""
    texts = [
        (FOLDER / f"{name}{end}.py").read_text(encoding="utf-8").splitlines()
        for end in ("", "_private")
    ]
    return list(difflib.unified_diff(*texts, n=0, lineterm=""))[2:]


def table(rows: dict[str, Any]) -> list[str]:
    """Returns the table of the page.

    Args:
      rows: The results by port.
    """
    lines = [
        "| port | records | | without privacy | epsilon 2 | ms a step | private | lines |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, row in rows.items():
        port = PORTS[name]
        plain, private = row["plain"], row["private"]
        cells = [
            f"[{name}](#{name})",
            f"{plain['records']:,} {port.records}",
            port.score,
            f"{plain['score']:.{port.decimals}f}",
            f"{private['score']:.{port.decimals}f}",
            f"{plain['processor_ms_a_step']:.1f} of {plain['batch_size']}",
            f"{private['processor_ms_a_step']:.1f} of {private['batch_size']}",
            str(sum(line[0] in "+-" for line in difference(name))),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def written(page: str, rows: dict[str, Any]) -> str:
    """Returns the page with its table and differences as they are now.

    Args:
      page: Its text.
      rows: The results by port.
    """
    parts = {name: ["```diff", *difference(name), "```"] for name in PORTS}
    parts["table"] = table(rows)
    for name, lines in parts.items():
        begin, end = f"<!-- {name}: begin -->\n", f"\n<!-- {name}: end -->"
        head, _, rest = page.partition(begin)
        if end not in rest:
            raise ValueError(f"{PAGE} has no lines {begin!r} and {end!r}.")
        page = f"{head}{begin}\n" + "\n".join(lines) + f"\n{end}{rest.partition(end)[2]}"
    return page


def results() -> dict[str, Any]:
    """Returns the contents of the JSON file of the page."""
    return json.loads(RESULTS.read_text(encoding="utf-8"))


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Runs, prints and writes; returns the rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PORTS, default=list(PORTS), metavar="NAME")
    parser.add_argument("--quick", action="store_true", help="few records and epochs")
    parser.add_argument("--write", action="store_true", help="only write the page")
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS)
    args = parser.parse_args(argv)
    if args.write:
        page = written(PAGE.read_text(encoding="utf-8"), results()["rows"])
        PAGE.write_text(page, encoding="utf-8")
        return {}
    rows = json.loads(args.output.read_text())["rows"] if args.output.exists() else {}
    # Once: the file that is written here is part of the checkout.
    commit = harness.commit()
    for name in args.only:
        rows[name] = {
            "plain": run(name, False, args.quick),
            "private": run(name, True, args.quick),
            "commit": commit,
            "code": harness.code_hash(),
        }
        ordered = {each: rows[each] for each in PORTS if each in rows}
        settings = {"quick": QUICK if args.quick else None}
        harness.write_study("ports.py", args.output, argv, settings, ordered, None)
        print(name, json.dumps(rows[name]), flush=True)
    return rows


if __name__ == "__main__":
    main()
