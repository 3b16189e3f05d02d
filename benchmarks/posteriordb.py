"""Private fits of posteriors of posteriordb, as stored, beside its reference draws.

    POSTERIORDB=... python benchmarks/posteriordb.py [--only NAME ...] [--epsilon 1] [--num 5]

`POSTERIORDB` names the folder `posterior_database` of a copy of github.com/stan-dev/posteriordb
(BSD licence); without it there is nothing to fit. Its data and models are taken as they are, in the
units that their authors chose, and `DPVI` is told nothing but the prior, the likelihood and the
budget. Where Stan's priors are flat, proper ones of 10^3 times the units' scale take their place.
Means and standard deviations of the reference draws are in `posteriordb_references.json`, so that a
test needs no copy; `--references` writes that file.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import sys
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_probability as tfp

import tfp_dpvi as dpvi

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from harness import code_hash, command, commit, machine, versions

tfd = tfp.distributions
FOLDER = pathlib.Path(__file__).parent
REFERENCES = FOLDER / "posteriordb_references.json"
DELTA = 1e-5
NUM_PUBLIC = 1000
# Of a normal distribution, the 99 % interval's half width.
WIDTH = 2.576
# Priors that are flat in Stan have this many times the units' scale.
FLAT = 1e3


@dataclasses.dataclass(frozen=True)
class Case:
    """A posterior of posteriordb.

    Attributes:
      records: Returns inputs and outcomes from the stored data.
      prior: The prior.
      likelihood: The likelihood.
      names: Our names of the reference's parameters, in its order; "" for one without.
      public: Draws invented inputs from what is known of the columns without the data, as a schema
        would; None for nothing.
    """

    records: Callable[[dict[str, Any]], tuple[Any, Any]]
    prior: Callable[[], dict[str, Any]]
    likelihood: Callable[[Any, Any], Any]
    names: tuple[str, ...]
    public: Callable[[np.random.Generator], Any] | None = None


def linear(params, x):
    """Returns the likelihood of a linear regression with an intercept."""
    return tfd.Normal(params["b0"] + tf.linalg.matvec(x, params["b"]), params["sigma"])


def without_intercept(params, x):
    """Returns the likelihood of a linear regression through the origin."""
    return tfd.Normal(tf.linalg.matvec(x, params["b"]), params["sigma"])


def flat(width: int, unit: float, slope: float, sigma: Any = None) -> Callable[[], dict[str, Any]]:
    """Returns a prior which is flat on the scale of the units.

    Args:
      width: The number of slopes.
      unit: The scale of outcomes.
      slope: The scale of slopes.
      sigma: Stan's prior of the standard deviation, or None for a flat one.
    """
    return lambda: {
        "b0": tfd.Normal(0.0, FLAT * unit),
        "b": tfd.Sample(tfd.Normal(0.0, FLAT * slope), width),
        "sigma": sigma or tfd.HalfNormal(FLAT * unit),
    }


def columns(outcome: Any, *inputs: Any) -> Callable[[dict[str, Any]], tuple[Any, Any]]:
    """Returns the function that takes columns from stored data.

    Args:
      outcome: A column's name, or a function of the data.
      *inputs: The same for each input.
    """

    def take(data: dict[str, Any], column: Any) -> np.ndarray:
        part = column(data) if callable(column) else data[column]
        return np.asarray(part, np.float32)

    return lambda data: (
        np.stack([take(data, column) for column in inputs], axis=1),
        take(data, outcome),
    )


def product(left: str, right: str) -> Callable[[dict[str, Any]], np.ndarray]:
    """Returns the function that multiplies two columns."""
    return lambda data: np.asarray(data[left]) * np.asarray(data[right])


def log(name: str) -> Callable[[dict[str, Any]], np.ndarray]:
    """Returns the function that takes a column's logarithm."""
    return lambda data: np.log(np.asarray(data[name]))


def age(group: int) -> Callable[[dict[str, Any]], np.ndarray]:
    """Returns the indicator of an age group."""
    return lambda data: np.asarray(data["age_discrete"]) == group


def slopes(width: int) -> tuple[str, ...]:
    """Returns the names of the parameters of `linear` in posteriordb's order."""
    return ("b0", *(f"b[{number}]" for number in range(width)), "sigma")


def table(*parts: Callable[[np.random.Generator], np.ndarray]) -> Any:
    """Returns the function that draws independent columns."""
    return lambda generator: np.stack([part(generator) for part in parts], axis=1).astype("float32")


def about(mean: float, sd: float) -> Callable[[np.random.Generator], np.ndarray]:
    """Returns the function that draws a normal column."""
    return lambda generator: generator.normal(mean, sd, NUM_PUBLIC)


def among(*values: float) -> Callable[[np.random.Generator], np.ndarray]:
    """Returns the function that draws a column of equally frequent values."""
    return lambda generator: generator.choice(values, NUM_PUBLIC)


def with_product(draw: Any, left: int, right: int) -> Any:
    """Returns the function that draws columns and adds the product of two."""

    def drawn(generator: np.random.Generator) -> np.ndarray:
        x = draw(generator)
        return np.concatenate([x, (x[:, left] * x[:, right])[:, None]], axis=1)

    return drawn


def ages(generator: np.random.Generator) -> np.ndarray:
    """Returns columns of `NES` with age groups that exclude each other."""
    x = table(
        among(*range(1, 8)),
        among(1.0, 2.0),
        *[among(0.0)] * 3,
        among(1, 2, 3, 4),
        among(1.0, 2.0),
        among(*range(1, 6)),
    )(generator)
    x[:, 2:5] = np.eye(4)[generator.integers(4, size=len(x))][:, 1:]
    return x


NES = Case(
    columns(
        "partyid7", "real_ideo", "race_adj", age(2), age(3), age(4), "educ1", "gender", "income"
    ),
    flat(8, 1.0, 1.0),
    linear,
    slopes(8),
    ages,
)

CASES = {
    "kidiq-kidscore_momiq": Case(
        columns("kid_score", "mom_iq"),
        flat(1, 10.0, 1.0, tfd.HalfCauchy(0.0, 2.5)),
        linear,
        slopes(1),
        table(about(100.0, 15.0)),
    ),
    "kidiq-kidscore_interaction": Case(
        columns("kid_score", "mom_hs", "mom_iq", product("mom_hs", "mom_iq")),
        flat(3, 10.0, 10.0, tfd.HalfCauchy(0.0, 2.5)),
        linear,
        slopes(3),
        with_product(table(among(0.0, 1.0), about(100.0, 15.0)), 0, 1),
    ),
    "earnings-earn_height": Case(
        columns("earn", "height"), flat(1, 1e4, 1e3), linear, slopes(1), table(about(67.0, 4.0))
    ),
    "earnings-logearn_interaction": Case(
        columns(log("earn"), "height", "male", product("height", "male")),
        flat(3, 1.0, 1.0),
        linear,
        slopes(3),
        with_product(table(about(67.0, 4.0), among(0.0, 1.0)), 0, 1),
    ),
    "earnings-logearn_logheight_male": Case(
        columns(log("earn"), log("height"), "male"),
        flat(2, 1.0, 1.0),
        linear,
        slopes(2),
        table(about(4.2, 0.06), among(0.0, 1.0)),
    ),
    "mesquite-logmesquite": Case(
        columns(
            log("weight"),
            log("diam1"),
            log("diam2"),
            log("canopy_height"),
            log("total_height"),
            log("density"),
            "group",
        ),
        flat(6, 1.0, 1.0),
        linear,
        slopes(6),
        table(*[about(0.3, 0.5)] * 5, among(0.0, 1.0)),
    ),
    "nes1972-nes": NES,
    "nes2000-nes": NES,
    "diamonds-diamonds": Case(
        lambda data: (
            (np.asarray(data["X"])[:, 1:] - np.mean(data["X"], axis=0)[1:]).astype("float32"),
            np.asarray(data["Y"], np.float32),
        ),
        lambda: {
            "b0": tfd.StudentT(3.0, 8.0, 10.0),
            "b": tfd.Sample(tfd.Normal(0.0, 1.0), 24),
            "sigma": tfd.HalfStudentT(3.0, 0.0, 10.0),
        },
        linear,
        (*(f"b[{number}]" for number in range(24)), "b0", "sigma"),
    ),
    "sblri-blr": Case(
        lambda data: (np.asarray(data["X"], np.float32), np.asarray(data["y"], np.float32)),
        lambda: {
            "b": tfd.Sample(tfd.Normal(0.0, 10.0), 5),
            "sigma": tfd.HalfNormal(10.0),
        },
        without_intercept,
        (*(f"b[{number}]" for number in range(5)), "sigma"),
        table(*[about(0.0, 100.0)] * 5),
    ),
    "low_dim_gauss_mix-low_dim_gauss_mix": Case(
        lambda data: (np.asarray(data["y"], np.float32), None),
        lambda: {
            "mu": tfd.TransformedDistribution(
                tfd.Sample(tfd.Normal(0.0, 2.0), 2), tfp.bijectors.Ascending()
            ),
            "sigma": tfd.Sample(tfd.HalfNormal(2.0), 2),
            "theta": tfd.Beta(5.0, 5.0),
        },
        lambda params: tfd.MixtureSameFamily(
            tfd.Categorical(probs=tf.stack([params["theta"], 1.0 - params["theta"]], axis=-1)),
            tfd.Normal(params["mu"], params["sigma"]),
        ),
        ("mu[0]", "mu[1]", "sigma[0]", "sigma[1]", "theta"),
    ),
    "eight_schools-eight_schools_noncentered": Case(
        lambda data: (
            {
                "school": np.arange(8, dtype=np.int32),
                "sigma": np.asarray(data["sigma"], np.float32),
            },
            np.asarray(data["y"], np.float32),
        ),
        lambda: {
            "theta_trans": tfd.Sample(tfd.Normal(0.0, 1.0), 8),
            "mu": tfd.Normal(0.0, 5.0),
            "tau": tfd.HalfCauchy(0.0, 5.0),
        },
        lambda params, x: tfd.Normal(
            params["mu"] + params["tau"] * tf.gather(params["theta_trans"], x["school"]),
            x["sigma"],
        ),
        ("", "", "", "", "", "", "", "", "mu", "tau"),
    ),
}


def stored(folder: pathlib.Path, name: str) -> dict[str, Any]:
    """Returns a posterior's data."""
    path = folder / "data" / "data" / f"{name.split('-')[0]}.json.zip"
    with zipfile.ZipFile(path) as archive:
        return json.loads(archive.read(archive.namelist()[0]))


def reference(folder: pathlib.Path, name: str) -> dict[str, list[float]]:
    """Returns means and standard deviations of a posterior's reference draws."""
    parts = {}
    for statistic in ("mean_value", "mean_squared_value"):
        path = folder / "reference_posteriors" / "summary_statistics" / statistic / statistic
        parts[statistic] = json.loads((path / f"{name}.json").read_text())
    means = np.array(parts["mean_value"]["mean_value"])
    squares = np.array(parts["mean_squared_value"]["mean_squared_value"])
    sds = np.sqrt(np.maximum(squares - means**2, 0.0))
    return {"mean": means.tolist(), "sd": [float(f"{sd:.5g}") for sd in sds]}


def fit(case: Case, data: dict[str, Any], epsilon: float) -> dict[str, Any]:
    """Fits a posterior privately, and returns means, sds and warnings."""
    x, y = case.records(data)
    model = dpvi.DPVI(tfd.JointDistributionNamed(case.prior()), case.likelihood)
    model.compile(epsilon=epsilon, delta=DELTA)
    settings = {}
    if case.public is not None:
        settings["public_inputs"] = case.public(np.random.default_rng(0))
    elif isinstance(x, dict):
        # Which schools there are and how well each was measured is public.
        settings["public_inputs"] = x
    try:
        model.fit(x, verbose=0) if y is None else model.fit(x, y, verbose=0, **settings)
    except ValueError as error:
        return {"refused": str(error)}
    table = model.posterior_summary()
    return {
        "warnings": list(table.checks.warnings) if table.checks is not None else ["no posterior"],
        **{
            column: dict(zip(table.names, map(float, table.columns[column]), strict=True))
            for column in ("mean", "sd")
        },
    }


def judged(case: Case, fitted: dict[str, Any], known: dict[str, list[float]]) -> dict[str, Any]:
    """Returns a fit's figures beside the reference: distances in sds, and ratios of sds."""
    if "refused" in fitted:
        return fitted
    distances, ratios = {}, {}
    for name, mean, sd in zip(case.names, known["mean"], known["sd"], strict=True):
        if name in fitted["mean"]:
            distances[name] = round((fitted["mean"][name] - mean) / fitted["sd"][name], 2)
            ratios[name] = round(fitted["sd"][name] / sd, 2)
    return {
        "warnings": fitted["warnings"],
        "outside": [name for name, distance in distances.items() if abs(distance) > WIDTH],
        "distances": distances,
        "ratios": ratios,
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--epsilon", type=float, default=1.0)
    parser.add_argument("--num", type=int, default=5)
    parser.add_argument("--references", action="store_true", help="write the reference file")
    parser.add_argument("--out", type=pathlib.Path, default="docs/figures/posteriordb.json")
    chosen = parser.parse_args(arguments)
    if "POSTERIORDB" not in os.environ:
        print("POSTERIORDB is not set: nothing to fit.")
        return
    folder = pathlib.Path(os.environ["POSTERIORDB"])
    if chosen.references:
        known = {name: reference(folder, name) for name in CASES}
        REFERENCES.write_text(json.dumps(known, indent=1) + "\n")
        return
    known = json.loads(REFERENCES.read_text())
    results = {}
    for name in chosen.only:
        case, data = CASES[name], stored(folder, name)
        fits = [
            judged(case, fit(case, data, chosen.epsilon), known[name]) for _ in range(chosen.num)
        ]
        results[name] = fits
        for each in fits:
            print(name, json.dumps(each), flush=True)
        report = {
            "epsilon": chosen.epsilon,
            "delta": DELTA,
            "command": command("posteriordb.py", sys.argv[1:] if arguments is None else arguments),
            "commit": commit(),
            "code": code_hash(),
            "machine": machine(),
            "versions": versions(tensorflow="tensorflow", tfp="tensorflow-probability"),
            "posteriors": results,
        }
        chosen.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
