"""Beside the field: the posterior of this library and those of other private methods, on the same simulated data sets.

    python benchmarks/field.py [--cells logistic5-5000-1.0 ...] [--num 20] [--diffprivlib PYTHON] [--bambi PYTHON] [--output FILE]

Epsilon and delta are those of the cell (`calibration_cells.py`), with add-or-remove unless said. No method is tuned on the scored
data sets; the seeds are none that settings of this library were chosen on.

* ours: `compile(epsilon=...)` and nothing else.
* flat clip: the same step budget with the usual clip and Adam, settings of `dpvi.pilot`.
* noise-aware DPVI (Alrawajfeh, Jälkö and Honkela, arXiv:2410.19371) as `noise_aware.py` has it, with its settings from there: the
  best of 48 by the *truth* of other data sets, which no user can do.
* sufficient statistics: one Gaussian release of the second moments of clipped records (Dwork et al. 2014, "Analyze Gauss"), and a
  normal posterior with the noise's variance in it. For logistic regression moments of a quadratic approximation of the log likelihood
  (Huggins et al. 2017; with noise, Kulkarni et al., arXiv:2011.00467).
* objective perturbation (Chaudhuri et al. 2011) by diffprivlib in an environment of its own (`peers/diffprivlib.txt`): pure epsilon, a
  point without intervals, hence no coverage and as CRPS its absolute error.
* not private: the posterior's Laplace approximation, the ceiling; and by Bambi and NUTS, in an environment of its own
  (`peers/bambi.txt`).

Width and error (of the posterior's mean) are medians over data sets and coefficients, in standard deviations of the posterior without
privacy; so is the CRPS, a mean, which one bad fit spoils.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from calibration import DELTA
from harness import write_study
from intervals import LEVEL, NonPrivate
from noise_aware import Cell, chosen, noise_aware, scores
from replicates import by_pilot

from tfp_dpvi.bayes.model import BayesianModel
from tfp_dpvi.privacy import FullBatch, PrivacyPlan
from tfp_dpvi.rehearsal.replicates import Replicates, centred

CELLS = ("logistic5-1000-1.0", "logistic5-5000-1.0", "linear-5000-1.0")
SEED = 3030
NUM_DRAWS = 4000
# The share of public rows whose length the clip of a row leaves as it is.
WHOLE = 0.99
# The logarithm of the logistic function on [-4, 4] is nearly this quadratic (Huggins et al. 2017, by least squares).
REACH = 4.0


def quadratic() -> tuple[float, float]:
    """Returns coefficients of s and s^2 in the approximation of log sigmoid(s)."""
    s = np.linspace(-REACH, REACH, 401)
    _, slope, curvature = np.polynomial.polynomial.polyfit(s, -np.logaddexp(0.0, -s), 2)
    return float(slope), float(curvature)


def gaussian_moments(rows: np.ndarray, bound: float, cell: Cell, generator: Any) -> Any:
    """Returns the sum of v v^T over rows of length at most `bound`, with noise, and the noise's sd.

    The Frobenius norm of v v^T is |v|^2. Symmetric noise with a standard deviation of sd on the diagonal and sd / sqrt(2) beside it is
    that of the Gaussian mechanism in an orthonormal basis of symmetric matrices.
    """
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    rows = rows * np.minimum(1.0, bound / np.maximum(lengths, 1e-12))
    plan = PrivacyPlan.calibrate(
        epsilon=cell.epsilon, delta=DELTA, sampling=FullBatch(), num_releases=1
    )
    sd = plan.noise_multiplier * bound**2
    noise = generator.normal(0.0, sd, (rows.shape[1],) * 2)
    return rows.T @ rows + (noise + noise.T) / 2.0, sd


def bound_of(rows: np.ndarray) -> float:
    return float(np.quantile(np.linalg.norm(rows, axis=1), WHOLE))


def sufficient_statistics(cell: Cell) -> Callable[..., np.ndarray]:
    """Returns a fit by noisy second moments, which returns draws."""
    generator = np.random.default_rng(7)
    public = np.insert(cell.public(generator, 2000).astype(float), 0, 1.0, axis=1)
    is_linear = "s" in cell.prior.model

    if not is_linear:
        slope, curvature = quadratic()

        def logistic(x, y, generator):
            # v = (x, sign), whose second moments have x x^T and the sum of sign x.
            rows = np.column_stack([np.insert(x.astype(float), 0, 1.0, axis=1), 2.0 * y - 1.0])
            bound = bound_of(np.column_stack([public, np.ones(len(public))]))
            moments, sd = gaussian_moments(rows, bound, cell, generator)
            precision = -2.0 * curvature * moments[:-1, :-1]
            shift = slope * moments[:-1, -1]
            return normal_draws(precision, shift, 2.0 * abs(curvature) * sd, slope * sd, generator)

        return logistic

    # Outcomes that the prior expects tell how long records are.
    params = cell.prior.sample(2000, seed=[0, 7])
    by_row = np.sum(params["w"].numpy() * public[:, 1:], axis=1) + params["b"].numpy()
    spread = math.sqrt(np.mean(by_row**2) + np.mean(params["s"].numpy() ** 2))

    def linear(x, y, generator):
        rows = np.column_stack([np.insert(x.astype(float), 0, 1.0, axis=1), y / spread])
        bound = bound_of(np.column_stack([public, generator.normal(size=len(public))]))
        moments, sd = gaussian_moments(rows, bound, cell, generator)
        gram, products = moments[:-1, :-1], moments[:-1, -1]
        best = np.linalg.solve(positive(gram, sd), products)
        rest = (moments[-1, -1] - products @ best) / len(x)
        sigma2 = max(rest, 1e-3)
        draws = normal_draws(
            gram / sigma2, products / sigma2, sd / sigma2, sd / sigma2, generator, spread**-2
        )
        # sigma^2 has the noise of y^T y and of x^T x, and N (here public) degrees of freedom.
        error = math.hypot(sd * (1.0 + best @ best) / len(x) / sigma2, math.sqrt(2.0 / len(x)))
        logs = np.log(sigma2) / 2.0 + generator.normal(0.0, error / 2.0, len(draws))
        draws = np.insert(draws, 1, logs, axis=1)
        draws[:, [0, *range(2, draws.shape[1])]] *= spread
        draws[:, 1] += math.log(spread)
        return draws

    return linear


def positive(matrix: np.ndarray, floor: float) -> np.ndarray:
    """Returns the matrix with eigenvalues of at least `floor`: noise may have made them negative."""
    values, vectors = np.linalg.eigh(matrix)
    return (vectors * np.maximum(values, floor)) @ vectors.T


def normal_draws(precision, shift, sd, shift_sd, generator, prior=1.0):
    """Returns draws of the normal posterior of noisy statistics, whose noise its variance has.

    The score at the mean has the statistics' noise: sd |beta| / sqrt(2) of the matrix, at least, and shift_sd / sqrt(2) of the vector.
    """
    size = len(shift)
    total = positive(precision, sd) + prior * np.eye(size)
    mean = np.linalg.solve(total, shift)
    noise = (shift_sd**2 / 2.0 + sd**2 * (mean @ mean) / 2.0) * np.eye(size)
    noise += sd**2 / 2.0 * np.outer(mean, mean)
    inverse = np.linalg.inv(total)
    covariance = inverse + inverse @ noise @ inverse
    return generator.multivariate_normal(mean, covariance, NUM_DRAWS)


def objective_perturbation(cell: Cell, python: str) -> Callable[..., np.ndarray]:
    """Returns a fit by diffprivlib, which returns one point as its draws."""
    norm = bound_of(cell.public(np.random.default_rng(7), 2000).astype(float))

    def fit(x, y, generator):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "data.npz"
            np.savez(path, x=x, y=y)
            peer = pathlib.Path(__file__).parent / "peers" / "diffprivlib_peer.py"
            arguments = [python, str(peer), str(path), str(cell.epsilon), str(norm)]
            found = subprocess.check_output(arguments, text=True)
        return np.array([json.loads(found)] * 2)

    return fit


def by_bambi(cell: Cell, python: str) -> Callable[..., np.ndarray]:
    """Returns a fit without privacy by Bambi, which returns draws."""
    family = "gaussian" if "s" in cell.prior.model else "bernoulli"

    def fit(x, y, generator):
        with tempfile.TemporaryDirectory() as folder:
            path, output = pathlib.Path(folder) / "data.npz", pathlib.Path(folder) / "draws.npy"
            np.savez(path, x=x, y=y)
            peer = pathlib.Path(__file__).parent / "peers" / "bambi_peer.py"
            subprocess.check_call([python, str(peer), str(path), family, str(output)])
            return np.load(output)

    return fit


def methods(
    name: str, cell: Cell, python: str | None, bambi: str | None
) -> dict[str, Callable[..., np.ndarray]]:
    """Returns fits by name: each takes x, y and a generator, and returns draws."""
    x, y, _ = next(cell.sets(0))  # Only for its shapes.
    fitted = (cell.prior, cell.likelihood, x, y, cell.public(np.random.default_rng(7), 1000))
    budget = {"epsilon": cell.epsilon, "delta": DELTA}

    def replicated(method):
        fits = Replicates(method, num_draws=NUM_DRAWS)
        return lambda x, y, generator: fits.fit(x, y, int(generator.integers(2**31))).draws

    found = {
        "ours": replicated(centred(*fitted, **budget)),
        "flat clip": replicated(by_pilot("flat", *fitted, **budget)),
        "sufficient statistics": sufficient_statistics(cell),
    }
    tuned = json.loads(pathlib.Path("docs/figures/noise_aware.json").read_text()).get(name)
    if tuned:
        settings = chosen(tuned["tried"])["by coverage"]

        def descend(x, y, generator):
            trace = cell.trace(x, y, settings, generator)
            return noise_aware(trace, generator)[0]["noise-aware"]

        found["noise-aware DPVI"] = descend
    if python and name.startswith("logistic"):
        found["objective perturbation"] = objective_perturbation(cell, python)
    if bambi:
        found["not private, by Bambi"] = by_bambi(cell, bambi)
    return found


def run(name: str, num: int, python: str | None, bambi: str | None = None) -> list[dict[str, Any]]:
    """Returns the scores of every method on each data set."""
    cell = Cell(name)
    exact = NonPrivate(BayesianModel(cell.prior, cell.likelihood), cell.coordinates)
    fits, sets = methods(name, cell, python, bambi), []
    for number, (x, y, truth) in enumerate(itertools.islice(cell.sets(SEED), num)):
        mean, sd = exact.fit(truth, x, y)
        generator = np.random.default_rng([SEED, number])
        draws, seconds = {}, {}
        for kind, fit in fits.items():
            start = time.perf_counter()
            draws[kind] = fit(x, y, generator)
            seconds[kind] = time.perf_counter() - start
        draws["not private"] = mean + sd * generator.normal(size=(NUM_DRAWS, len(mean)))
        for kind, found in draws.items():
            scored = scores(found, truth, mean, sd)
            point = np.abs(found.mean(axis=0) - truth) / sd
            if len(found) == 2:
                scored = {"crps": np.abs(found[0] - truth)}
            values = {key: value.tolist() for key, value in scored.items() if key != "off"}
            crps = (np.array(values["crps"]) / sd).tolist()
            sets.append(
                {
                    "cell": name,
                    "number": number,
                    "method": kind,
                    **values,
                    "crps": crps,
                    "error": point.tolist(),
                    "seconds": seconds.get(kind),
                }
            )
        print(name, number, flush=True)
    return sets


def summarise(sets: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns a row for each cell and method."""
    rows = []
    keys = dict.fromkeys((one["cell"], one["method"]) for one in sets)
    for cell, method in keys:
        found = [one for one in sets if (one["cell"], one["method"]) == (cell, method)]
        row = {"cell": cell, "method": method, "num": len(found)}
        row["error"] = float(np.median([one["error"] for one in found]))
        row["crps"] = float(np.mean([one["crps"] for one in found]))
        # A method's first fit compiles.
        if None not in (seconds := [one.get("seconds") for one in found]):
            row["seconds"] = float(np.median(seconds))
        if "covered" in found[0]:
            covered = np.array([np.mean(one["covered"]) for one in found])
            row["coverage"] = float(covered.mean())
            row["coverage_error"] = float(covered.std(ddof=1) / math.sqrt(len(found)))
            row["width"] = float(np.median([one["width"] for one in found]))
        rows.append(row)
    return rows


def draw(rows: list[dict[str, Any]], path: pathlib.Path) -> None:
    """Plots coverage against width, a panel for each cell."""
    import matplotlib.pyplot as plt

    cells = list(dict.fromkeys(row["cell"] for row in rows))
    colors = {name: f"C{at}" for at, name in enumerate(dict.fromkeys(r["method"] for r in rows))}
    size = (4 * len(cells), 4.0)
    figure, axes = plt.subplots(
        1, len(cells), figsize=size, sharex=True, sharey=True, squeeze=False, layout="constrained"
    )
    for axis, cell in zip(axes[0], cells, strict=True):
        axis.axhline(LEVEL, color="0.6", linestyle=":")
        for row in rows:
            if row["cell"] == cell and "width" in row:
                axis.errorbar(
                    row["width"],
                    row["coverage"],
                    row["coverage_error"],
                    fmt="o",
                    color=colors[row["method"]],
                    label=row["method"],
                )
        model, num, epsilon = cell.rsplit("-", 2)
        axis.set_title(f"{model}, N {int(num):,}, epsilon {float(epsilon):g}", fontsize=10)
        axis.set_xlabel("width over that without privacy")
    axes[0, 0].set_ylabel("coverage of 90 % intervals")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def table(rows: list[dict[str, Any]]) -> str:
    """Returns the table of the page."""
    lines = [
        "| model, N | method | coverage | width | error | CRPS | seconds |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        model, num, _ = row["cell"].rsplit("-", 2)
        covered = (
            f"{row['coverage']:.2f} ± {row['coverage_error']:.2f}" if "width" in row else "none"
        )
        width = f"{row['width']:.2f}" if "width" in row else "none"
        seconds = f"{row['seconds']:.1f}" if "seconds" in row else ""
        lines.append(
            f"| {model}, {int(num):,} | {row['method']} | {covered} | {width} | "
            f"{row['error']:.2f} | {row['crps']:.2f} | {seconds} |"
        )
    return "\n".join(lines)


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cells", nargs="*", default=CELLS)
    parser.add_argument("--num", type=int, default=20)
    parser.add_argument("--diffprivlib", help="a Python with `peers/diffprivlib.txt`")
    parser.add_argument("--bambi", help="a Python with `peers/bambi.txt`")
    parser.add_argument(
        "--output", type=pathlib.Path, default=pathlib.Path("docs/figures/field/field.json")
    )
    options = parser.parse_args(given)
    sets: list[dict[str, Any]] = []
    for name in options.cells:
        sets += run(name, options.num, options.diffprivlib, options.bambi)
        settings = {"delta": DELTA, "seed": SEED, "level": LEVEL}
        said = (
            [
                "PYTHON" if part in (options.diffprivlib, options.bambi) else part
                for part in sys.argv[1:]
            ]
            if given is None
            else given
        )
        write_study("field.py", options.output, said, settings, summarise(sets), sets)
        draw(summarise(sets), options.output.with_suffix(".png"))
    print(table(summarise(sets)))


if __name__ == "__main__":
    main()
