"""Do private 90 % intervals cover? Simulated data sets with parameters drawn from the prior.

    python benchmarks/calibration.py [--cells NAME ...] [--num 200] [--quick] [--jobs 2] [--out FOLDER]

A cell is a model, a number of records and an epsilon (`calibration_cells.py`); all have the same
settings. A data set is fitted by `compile` without an optimizer ("centred"), and the first
`--baseline` of them also with `dpvi.pilot`'s settings ("paired", "flat"), as replicates of one
compiled step each (`replicates.py`). Each cell writes a JSON file with a row for each data set and
method. If it exists, only what is missing is run, so that an interrupted study goes on where it
stopped. A data set depends on the seed and its number alone. `--quick` is 40 data sets of a cell
and no baseline. The last line is a summary as JSON.
"""

import argparse
import collections
import concurrent.futures
import json
import math
import pathlib
import platform
import re
import subprocess
import sys
import time
from collections.abc import Collection
from typing import Any, NamedTuple

import calibration_cells
import numpy as np
import tensorflow as tf
from intervals import QUANTILE, Ideal, NonPrivate, crps, interval, interval_score
from replicates import by_pilot

from tfp_dpvi.bayes.coordinates import Coordinates
from tfp_dpvi.bayes.model import BayesianModel
from tfp_dpvi.rehearsal.replicates import Replicates, centred

DELTA = 1e-5
METHODS = ("centred", "paired", "flat")
# Of the posterior without privacy.
EXACT = "not private"
QUICK = 40
# Data sets whose ideal widths are computed, which takes as long as a fit.
NUM_IDEALS = 8
NUM_PUBLIC = 1000
# Fits from which on XLA saves more time than it takes.
WORTH_XLA = 10


class DataSet(NamedTuple):
    """A simulated data set.

    Attributes:
      x: The inputs.
      y: The outcomes.
      truth: The true parameters' coordinates, shape [D].
    """

    x: Any
    y: np.ndarray
    truth: np.ndarray


class Cell:
    """A cell's data sets and fits; what is traced serves all of them.

    Args:
      name: The name of the cell.
      seed: The seed of all data sets.
      compiled: The methods whose step is compiled with XLA.
    """

    def __init__(self, name: str, seed: int, compiled: Collection[str] = ()) -> None:
        self.kind, self.size, self.epsilon = calibration_cells.parse(name)
        self._seed = seed
        self._compiled = compiled
        self.prior, self.likelihood = self.kind.make()
        self._model = BayesianModel(self.prior, self.likelihood)
        self.coordinates = Coordinates(self.prior, log_scales=True)
        self._exact = NonPrivate(self._model, self.coordinates)
        self._ideal = Ideal(self._model, self.coordinates)
        self._fits: dict[str, Replicates] = {}

    def simulate(self, number: int) -> DataSet:
        """Returns the data set of a number."""
        generator = np.random.default_rng([self._seed, number])

        def seed():
            return tf.constant(generator.integers(2**31, size=2), tf.int32)

        params = self.prior.sample(seed=seed())
        x = self.kind.inputs(generator, self.size)
        if self.kind.outcomes is None:
            y = self.likelihood(params, x).sample(seed=seed()).numpy()
        else:
            y = self.kind.outcomes(params, x, generator)
        return DataSet(x, y, self.coordinates.flatten_one(params))

    def fits(self, method: str) -> Replicates:
        """Returns the replicates of a method."""
        if method not in self._fits:
            data = self.simulate(0)
            public = self.kind.public(np.random.default_rng(7), NUM_PUBLIC)
            arguments = (self.prior, self.likelihood, data.x, data.y, public)
            budget = {"epsilon": self.epsilon, "delta": DELTA}
            made = (
                centred(*arguments, **budget)
                if method == "centred"
                else by_pilot(method, *arguments, **budget)
            )
            self._fits[method] = Replicates(made, use_xla=method in self._compiled)
        return self._fits[method]

    def rows(self, number: int, methods: list[str]) -> dict[str, dict[str, Any]]:
        """Returns a row for each method, of one data set."""
        data = self.simulate(number)
        mean, sd = self._exact.fit(data.truth, data.x, data.y)
        ideal = None
        if number < NUM_IDEALS and "centred" in methods:
            ideal = self._ideal.sds(
                data.truth,
                data.x,
                self._exact.prior_precision(data.truth),
                num_records=self.size,
                epsilon=self.epsilon,
                delta=DELTA,
                seed=number,
            )
        ends = mean - QUANTILE * sd, mean + QUANTILE * sd
        rows = {EXACT: _row(*ends, data.truth, sd, ideal)} if "centred" in methods else {}
        for method in methods:
            fit = self.fits(method).fit(data.x, data.y, 1_000_000 * self._seed + number)
            row = _row(*interval(fit.draws), data.truth, sd, ideal)
            row["crps"] = _rounded(np.mean(crps(fit.draws, data.truth) / sd))
            row["seconds"] = round(fit.seconds, 3)
            if fit.calibrated is not None:
                checks = fit.calibrated.checks
                # The sentences without their numbers and remedies.
                row["warnings"] = [re.split(" \\(|[:;]", each)[0] for each in fit.warnings]
                row["signal"] = _rounded(checks.curvature_signal)
                row["distance"] = _rounded(checks.distance)
                row["halves"] = _rounded(checks.halves)
                if method == "centred":
                    row["lack_of_fit_z"] = _rounded(checks.lack_of_fit_z)
                    row["ranks"] = _rounded(checks.ranks)
                    row["shift_z"] = _rounded(np.max(np.abs(checks.parameters.shift_z)))
            elif method != "flat":
                row["failed"] = True
            rows[method] = row
        return rows


def _row(low, high, truth, sd, ideal) -> dict[str, Any]:
    """Returns figures of intervals, means over the coordinates in units of `sd`."""
    inside = (low <= truth) & (truth <= high)
    width = (high - low) / (2.0 * QUANTILE)
    row = {
        "inside": "".join("01"[int(hit)] for hit in inside),
        "width": _rounded(np.mean(width / sd)),
        "score": _rounded(np.mean(interval_score(low, high, truth) / (2.0 * QUANTILE * sd))),
    }
    if ideal is not None:
        row["ideal"] = _rounded(np.mean(width / ideal))
    return row


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")


def missing(stored: dict[str, Any], num: int, baseline: int) -> list[tuple[int, list[str]]]:
    """Returns the numbers of data sets to run, each with its methods.

    Args:
      stored: A cell's file.
      num: The number of data sets of the centred method.
      baseline: That of the others.
    """
    rows = stored.get("rows", {})
    wanted = {"centred": num, "paired": baseline, "flat": baseline}
    found = []
    for number in range(max(num, baseline)):
        methods = [
            method
            for method in METHODS
            if number < wanted[method] and str(number) not in rows.get(method, {})
        ]
        if methods:
            found.append((number, methods))
    return found


def extend(name: str, path: pathlib.Path, num: int, baseline: int, seed: int) -> dict[str, Any]:
    """Runs the data sets that a cell's file lacks; returns the file's content.

    Args:
      name: The name of the cell.
      path: Its file, which is written after every few data sets.
      num: See `missing`.
      baseline: See `missing`.
      seed: The seed of all data sets.

    Raises:
      ValueError: The file has the data sets of another seed.
    """
    stored = json.loads(path.read_text()) if path.exists() else {"cell": name, "seed": seed}
    if stored["seed"] != seed:
        raise ValueError(
            f"{path} has the data sets of seed {stored['seed']}, not {seed}: choose another folder."
        )
    todo = missing(stored, num, baseline)
    if not todo:
        return stored
    begun = time.perf_counter()
    stored["versions"] = sorted({*stored.get("versions", []), versions()})
    counts = collections.Counter(method for _, methods in todo for method in methods)
    cell = Cell(name, seed, [method for method in METHODS if counts[method] >= WORTH_XLA])
    rows = stored.setdefault("rows", {})
    before = stored.get("seconds", 0.0)
    for done, (number, methods) in enumerate(todo, start=1):
        for method, row in cell.rows(number, methods).items():
            rows.setdefault(method, {})[str(number)] = row
        if done % 10 == 0 or done == len(todo):
            stored["seconds"] = round(before + time.perf_counter() - begun, 1)
            path.write_text(as_text(stored))
    return stored


def as_text(stored: dict[str, Any]) -> str:
    """Returns a cell's file as JSON, with a line for each row."""
    head = json.dumps({name: part for name, part in stored.items() if name != "rows"}, indent=1)
    methods = []
    for method, rows in stored["rows"].items():
        lines = (f"{json.dumps(number)}: {json.dumps(row)}" for number, row in rows.items())
        methods.append(f"{json.dumps(method)}: {{\n" + ",\n".join(lines) + "\n}")
    return head[:-2] + ',\n "rows": {\n' + ",\n".join(methods) + "\n}\n}\n"


def versions() -> str:
    """Returns what made the figures."""
    revision = subprocess.check_output(["git", "describe", "--always", "--dirty"], text=True)
    return (
        f"revision {revision.strip()}, Python {platform.python_version()}, "
        f"TensorFlow {tf.__version__}"
    )


# ---------------------------------------------------------------------- figures


def summary_of(stored: dict[str, Any]) -> dict[str, Any]:
    """Returns the figures of a cell, by method."""
    summary = {"cell": stored["cell"], "seconds": stored.get("seconds", math.nan)}
    rows = stored["rows"]
    for method in (EXACT, *METHODS):
        if method in rows:
            summary[method] = _figures([rows[method][number] for number in rows[method]])
    if "centred" in rows:
        for other in ("paired", "flat"):
            if other in rows:
                summary["centred"][f"over_{other}"] = compare(rows["centred"], rows[other])
    return summary


def _figures(rows: list[dict[str, Any]]) -> dict[str, Any]:
    inside = np.array([[hit == "1" for hit in row["inside"]] for row in rows], float)
    by_set = inside.mean(axis=1)
    figures = {
        "num": len(rows),
        "coverage": round(float(by_set.mean()), 4),
        "error": round(_error(by_set), 4),
        "by_coordinate": inside.mean(axis=0).round(3).tolist(),
    }
    for name in ("width", "ideal", "score", "crps", "signal", "seconds"):
        values = [row[name] for row in rows if name in row]
        if values:
            figures[name] = round(
                float(np.median(values) if name == "signal" else np.mean(values)), 4
            )
    figures["warned"] = round(float(np.mean([bool(row.get("warnings")) for row in rows])), 4)
    figures["failed"] = round(float(np.mean([row.get("failed", False) for row in rows])), 4)
    return figures


def _error(values: np.ndarray) -> float:
    """Returns the standard error of a mean."""
    return float(np.std(values, ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan


def compare(rows: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    """Compares two methods on the data sets that both were run on.

    Returns:
      Their number, the ratio of the mean interval scores, and the mean difference of the CRPS with
      the ends of its 95 % interval; negative where the first is better.
    """
    common = [number for number in rows if number in others]
    if not common:
        return {"num": 0}
    pairs = {
        name: np.array([[rows[number][name], others[number][name]] for number in common])
        for name in ("score", "crps")
    }
    difference = pairs["crps"][:, 0] - pairs["crps"][:, 1]
    margin = 1.96 * _error(difference)
    score = pairs["score"].mean(axis=0)
    return {
        "num": len(common),
        "score": round(float(score[0] / score[1]), 4),
        "crps": [round(float(difference.mean() + shift), 4) for shift in (0.0, -margin, margin)],
    }


def draw(done: list[dict[str, Any]], path: pathlib.Path) -> None:
    """Coverage with two standard errors, a row a cell."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    colors = {"centred": "C0", "paired": "C2", "flat": "C1"}
    figure, axes = plt.subplots(figsize=(8, 0.22 * len(done) + 1.2), layout="constrained")
    for place, (method, color) in enumerate(colors.items()):
        rows = [(row, one[method]) for row, one in enumerate(done[::-1]) if method in one]
        axes.errorbar(
            [figures["coverage"] for _, figures in rows],
            [row + 0.2 * (1 - place) for row, _ in rows],
            xerr=[2.0 * figures["error"] for _, figures in rows],
            fmt="o",
            ms=3.5,
            lw=1.0,
            color=color,
            label=method,
        )
    axes.axvline(0.9, color="0.6", lw=1, zorder=0)
    axes.set_yticks(range(len(done)), [_title(one["cell"]) for one in done[::-1]])
    axes.set_xlim(0.0, 1.0)
    axes.set_xlabel("coverage of 90 % intervals, with two standard errors; rows: model, N, epsilon")
    figure.legend(loc="outside upper center", ncols=3, fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _title(cell: str) -> str:
    name, size, epsilon = cell.rsplit("-", 2)
    return f"{name}, {int(size):,}, {float(epsilon):g}"


def table(done: list[dict[str, Any]]) -> str:
    """The table of `docs/studies.md`; the other clips have columns if some cell has them."""
    compares = any("paired" in one for one in done)
    names = ["model, N, epsilon", "data sets", "coverage", "worst", "not private", "width"]
    names += ["over ideal", "warned", "score"]
    if compares:
        names += ["score over paired", "paired", "flat", "CRPS less flat's"]
    names.append("seconds")
    rows = [names, ["---"] * len(names)]
    for one in done:
        centred, exact = one["centred"], one[EXACT]
        failed = f", {centred['failed']:.2f} failed" if centred["failed"] else ""
        row = [
            _title(one["cell"]),
            str(centred["num"]),
            f"{centred['coverage']:.3f} ± {centred['error']:.3f}",
            f"{min(centred['by_coordinate']):.2f}",
            f"{exact['coverage']:.2f}",
            f"{centred['width']:.2f}",
            f"{centred.get('ideal', math.nan):.2f}",
            f"{centred['warned']:.2f}{failed}",
            f"{centred['score']:.2f}",
        ]
        if compares:
            paired, flat = (
                centred.get(f"over_{other}", {"num": 0}) for other in ("paired", "flat")
            )
            row.append(format(paired["score"], ".2f") if paired["num"] else "")
            row += [
                f"{one[other]['coverage']:.2f}, {one[other]['width']:.2f}" if other in one else ""
                for other in ("paired", "flat")
            ]
            row.append(
                "{:+.2f} ({:+.2f}, {:+.2f})".format(*flat["crps"]) if flat["num"] > 1 else ""
            )
        rows.append([*row, f"{centred['seconds']:.2f}"])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


# ---------------------------------------------------------------------- command line


def run_cell(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns a cell's figures, after running what its file lacks."""
    path = arguments.out / f"{name}.json"
    sizes = {"num": arguments.num, "baseline": arguments.baseline, "seed": arguments.seed}
    if arguments.jobs > 1:
        # In a process of its own: traces and constants of many models fill the memory.
        options = [f"--{option}={value}" for option, value in sizes.items()]
        options += ["--jobs=1", "--no-table", f"--out={arguments.out}", "--cells", name]
        subprocess.run([sys.executable, __file__, *options], check=True, stdout=sys.stderr)
    else:
        extend(name, path, **sizes)
    summary = summary_of(json.loads(path.read_text()))
    centred = summary["centred"]
    print(
        f"{name}: coverage {centred['coverage']:.3f} ± {centred['error']:.3f}, worst "
        f"{min(centred['by_coordinate']):.2f}, width {centred['width']:.2f}, warned "
        f"{centred['warned']:.2f}, {summary['seconds']:.0f} s",
        file=sys.stderr,
        flush=True,
    )
    return summary


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cells", nargs="*", default=calibration_cells.CELLS)
    parser.add_argument("--num", type=int, help="data sets of a cell, by default 200")
    parser.add_argument(
        "--baseline", type=int, help="data sets that are also fitted with the pilot, by default 40"
    )
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} data sets, no baseline")
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--no-table", action="store_true")
    parser.add_argument(
        "--out", type=pathlib.Path, default=pathlib.Path("docs/figures/calibration_centred")
    )
    arguments = parser.parse_args()
    for name, default in (("num", (200, QUICK)), ("baseline", (40, 0))):
        if getattr(arguments, name) is None:
            setattr(arguments, name, default[arguments.quick])
    arguments.out.mkdir(parents=True, exist_ok=True)
    # A process for each core.
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        done = list(pool.map(lambda cell: run_cell(cell, arguments), arguments.cells))
    if arguments.no_table:
        return
    draw(done, arguments.out / "coverage.png")
    print(table(done))
    print(json.dumps({one.pop("cell"): one for one in done}))


if __name__ == "__main__":
    main()
