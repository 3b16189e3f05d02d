"""Do intervals of `Synthesizer.estimate` and of Rubin's rules contain the real table's values?

    python benchmarks/synthetic_estimates.py [--sets 20] [--rubin 5] [--tables fair diabetes] [--quick]

A public table is the population. Each set draws its records with replacement, fits a `Synthesizer` at epsilon 1, and
analyses regressions of three to five terms, a mean and a correlation by `estimate`. In the first `--rubin` sets the mixture is
fitted too (otherwise it takes one step, of which `estimate` uses nothing), and Rubin's rules combine the regressions of five
synthetic tables. Counted are nominal 95 % intervals that contain the table's own value; an analysis that is refused is counted
apart. `--bins 6` gives columns of numbers so many levels instead of 16. `--quick` (or QUICK=1): two sets. Writes
docs/figures/synthetic_estimates.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import sys
import time
import warnings
from typing import Any

import harness
import numpy as np

import tfp_dpvi as dpvi
from tfp_dpvi.data import Binary, Continuous, Integer, Schema

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "examples"))
import data

NUM_TABLES = 5
EPSILON, DELTA = 1.0, 1e-5


def fair() -> tuple[dict[str, np.ndarray], Schema, int]:
    """Affairs of 6,366 married women (statsmodels)."""
    import statsmodels.api as sm

    frame = sm.datasets.fair.load_pandas().data
    schema = Schema(
        {
            "rate_marriage": Integer(1, 5, bins=[2, 3, 4, 5]),
            "age": Continuous(15.0, 45.0),
            "yrs_married": Continuous(0.0, 25.0),
            "religious": Integer(1, 4, bins=[2, 3, 4]),
            "educ": Integer(8, 20),
            "affairs": Continuous(0.0, 60.0),
        }
    )
    integers = ("rate_marriage", "religious", "educ")
    return {
        name: frame[name].to_numpy(int if name in integers else float) for name in schema.names
    }, schema, len(frame)  # fmt: skip


def randhie() -> tuple[dict[str, np.ndarray], Schema, int]:
    """Visits to doctors of 20,190 persons in an experiment (statsmodels)."""
    import statsmodels.api as sm

    frame = sm.datasets.randhie.load_pandas().data
    schema = Schema(
        {
            "mdvis": Integer(0, 100),
            "lncoins": Continuous(0.0, 5.0),
            "physlm": Binary(),
            "disea": Continuous(0.0, 60.0),
            "hlthg": Binary(),
            "hlthf": Binary(),
        }
    )
    table = {name: frame[name].to_numpy(float) for name in schema.names}
    for name in ("physlm", "hlthg", "hlthf"):
        table[name] = (table[name] > 0.5).astype(int)
    table["mdvis"] = table["mdvis"].astype(int)
    return table, schema, len(frame)


def diabetes() -> tuple[dict[str, np.ndarray], Schema, int]:
    """Progression of diabetes (scikit-learn): of 442 patients, drawn 10,000 times."""
    from sklearn.datasets import load_diabetes

    frame = load_diabetes(scaled=False, as_frame=True).frame
    schema = Schema(
        {
            "age": Continuous(15.0, 85.0),
            "sex": Binary(),
            "bmi": Continuous(15.0, 50.0),
            "bp": Continuous(50.0, 150.0),
            "s5": Continuous(3.0, 7.0),
            "target": Continuous(0.0, 400.0),
        }
    )
    table = {name: frame[name].to_numpy(float) for name in schema.names}
    table["sex"] = (table["sex"] > 1.5).astype(int)
    return table, schema, 10_000


def anes96() -> tuple[dict[str, np.ndarray], Schema, int]:
    """The American election study of 1996 (statsmodels): of 944 persons, drawn 10,000 times."""
    import statsmodels.api as sm

    frame = sm.datasets.anes96.load_pandas().data
    schema = Schema(
        {
            "PID": Integer(0, 6, bins=[1, 2, 3, 4, 5, 6]),
            "age": Continuous(18.0, 95.0),
            "educ": Integer(1, 7, bins=[2, 3, 4, 5, 6, 7]),
            "income": Integer(1, 24),
            "selfLR": Integer(1, 7, bins=[2, 3, 4, 5, 6, 7]),
            "vote": Binary(),
        }
    )
    table = {name: frame[name].to_numpy(int) for name in schema.names}
    return {**table, "age": frame["age"].to_numpy(float)}, schema, 10_000


def star98() -> tuple[dict[str, np.ndarray], Schema, int]:
    """Californian school districts (statsmodels): of 303, drawn 10,000 times."""
    import statsmodels.api as sm

    frame = sm.datasets.star98.load_pandas().data
    schema = Schema(
        {
            "LOWINC": Continuous(0.0, 100.0),
            "PERBLACK": Continuous(0.0, 100.0),
            "PERASIAN": Continuous(0.0, 100.0),
            "AVYRSEXP": Continuous(5.0, 25.0),
            "PTRATIO": Continuous(10.0, 30.0),
            "PCTAF": Continuous(0.0, 100.0),
        }
    )
    return {name: frame[name].to_numpy(float) for name in schema.names}, schema, 10_000


def breast_cancer() -> tuple[dict[str, np.ndarray], Schema, int]:
    """Nuclei of breast tumours (scikit-learn): of 569 patients, drawn 10,000 times."""
    from sklearn.datasets import load_breast_cancer

    frame = load_breast_cancer(as_frame=True).frame
    schema = Schema(
        {
            "mean radius": Continuous(5.0, 30.0),
            "mean texture": Continuous(5.0, 40.0),
            "mean smoothness": Continuous(0.0, 0.2),
            "mean concavity": Continuous(0.0, 0.5),
            "mean symmetry": Continuous(0.1, 0.4),
            "target": Binary(),
        }
    )
    table = {name: frame[name].to_numpy(float) for name in schema.names}
    return {**table, "target": frame["target"].to_numpy(int)}, schema, 10_000


def abalone() -> tuple[dict[str, np.ndarray], Schema, int]:
    """4,177 abalones (UCI)."""
    loaded = data.load_abalone()
    columns = dict(zip(loaded.feature_names, loaded.x.T.astype(float), strict=True))
    bounds = {"length": 1.0, "diameter": 1.0, "height": 0.5, "whole weight": 3.0}
    schema = Schema(
        {name: Continuous(0.0, most) for name, most in {**bounds, "shell weight": 1.5}.items()}
    )
    # One height of 1.13 is an error of the table.
    table = {name: np.minimum(columns[name], 3.0) for name in schema.names}
    return {**table, "height": np.minimum(table["height"], 0.5)}, schema, len(loaded.x)


def adult() -> tuple[dict[str, np.ndarray], Schema, int]:
    """Incomes of 32,561 persons (UCI)."""
    loaded = data.load_adult()
    x = dict(zip(loaded.feature_names, loaded.x[:32_561].T, strict=True))
    schema = Schema(
        {
            "age": Integer(17, 90),
            "education-num": Integer(1, 16),
            "hours-per-week": Integer(1, 99),
            "sex": Binary(),
            "income": Binary(),
        }
    )
    table = {name: x[name].astype(int) for name in schema.names if name != "income"}
    return {**table, "income": loaded.y[:32_561].astype(int)}, schema, 32_561


TABLES = {
    "fair": fair,
    "randhie": randhie,
    "diabetes": diabetes,
    "anes96": anes96,
    "star98": star98,
    "breast_cancer": breast_cancer,
    "abalone": abalone,
    "adult": adult,
}
REGRESSIONS = {
    "fair": [
        ("affairs", ["rate_marriage", "yrs_married", "religious"]),
        ("rate_marriage", ["age", "religious", "educ"]),
        ("affairs", ["rate_marriage", "age", "religious", "educ"]),
    ],
    "randhie": [
        ("mdvis", ["lncoins", "physlm", "disea"]),
        ("disea", ["physlm", "hlthg", "hlthf"]),
        ("mdvis", ["lncoins", "physlm", "disea", "hlthg", "hlthf"]),
    ],
    "diabetes": [
        ("target", ["bmi", "bp", "s5"]),
        ("target", ["age", "sex", "bmi", "bp", "s5"]),
        ("bp", ["age", "sex", "bmi"]),
    ],
    "anes96": [
        ("PID", ["selfLR", "age", "educ"]),
        ("income", ["educ", "age", "PID"]),
        ("vote", ["PID", "selfLR", "income", "educ"]),
    ],
    "star98": [
        ("LOWINC", ["PERBLACK", "PERASIAN", "PTRATIO"]),
        ("PTRATIO", ["AVYRSEXP", "PCTAF", "PERASIAN"]),
        ("LOWINC", ["PERBLACK", "PERASIAN", "AVYRSEXP", "PTRATIO", "PCTAF"]),
    ],
    "breast_cancer": [
        ("mean radius", ["mean texture", "mean smoothness", "mean concavity"]),
        ("mean concavity", ["mean radius", "mean symmetry", "mean smoothness"]),
        ("target", ["mean radius", "mean texture", "mean concavity", "mean symmetry"]),
    ],
    "abalone": [
        ("shell weight", ["length", "height", "whole weight"]),
        ("whole weight", ["length", "diameter", "height"]),
        ("height", ["length", "diameter", "whole weight", "shell weight"]),
    ],
    "adult": [
        ("hours-per-week", ["age", "education-num", "sex"]),
        ("income", ["age", "education-num", "hours-per-week"]),
        ("income", ["age", "education-num", "hours-per-week", "sex"]),
    ],
}
OTHERS = {
    "fair": [("affairs", "rate_marriage"), ("age", "yrs_married")],
    "randhie": [("mdvis", "disea"), ("lncoins", "mdvis")],
    "diabetes": [("bmi", "target"), ("age", "bp")],
    "anes96": [("PID", "selfLR"), ("age", "income")],
    "star98": [("LOWINC", "PERBLACK"), ("PTRATIO", "AVYRSEXP")],
    "breast_cancer": [("mean radius", "mean concavity"), ("mean texture", "mean symmetry")],
    "abalone": [("length", "shell weight"), ("height", "diameter")],
    "adult": [("age", "hours-per-week"), ("education-num", "income")],
}


def least_squares(
    table: dict[str, np.ndarray], outcome: str, terms: list[str]
) -> tuple[np.ndarray, np.ndarray]:
    """Coefficients and their squared standard errors, as an analyst has them."""
    design = np.column_stack([np.ones(len(table[outcome])), *(table[name] for name in terms)])
    coefficients = np.linalg.lstsq(design, table[outcome], rcond=None)[0]
    residuals = table[outcome] - design @ coefficients
    variance = residuals @ residuals / (len(design) - design.shape[1])
    return coefficients, np.diag(np.linalg.inv(design.T @ design)) * variance


def row(kind: str, names: Any, real: Any, width: Any, low: Any, high: Any) -> list[dict[str, Any]]:
    """One entry for each interval: whether it contains the real value, and its relative width."""
    parts = zip(names, real, width, low, high, strict=True)
    return [
        {
            "kind": kind,
            "name": name,
            "real": float(value),
            "low": float(a),
            "high": float(b),
            "covered": bool(a <= value <= b),
            "width": float((b - a) / ideal),
        }
        for name, value, ideal, a, b in parts
    ]


def with_bins(schema: Schema, bins: int) -> Schema:
    """The schema with another number of levels where a fit chooses them."""
    columns = {
        name: dataclasses.replace(column, bins=bins) if name in schema.open else column
        for name, column in schema.columns.items()
    }
    return Schema(columns)


def one_set(label: str, seed: int, with_rubin: bool, bins: int) -> dict[str, Any]:
    """Intervals of one fit."""
    table, schema, num = TABLES[label]()
    size = len(table[schema.names[0]])
    rows = np.random.default_rng(seed).integers(size, size=num)
    records = {name: values[rows] for name, values in table.items()}
    start = time.process_time()
    synthesizer = dpvi.Synthesizer(with_bins(schema, bins), 64 if with_rubin else 2)
    steps = 2000 if with_rubin else 1
    synthesizer.fit(records, epsilon=EPSILON, delta=DELTA, steps=steps)
    fitted = time.process_time()
    estimates, found, refused = synthesizer.estimate, [], []
    for outcome, terms in REGRESSIONS[label]:
        real, _ = least_squares(table, outcome, terms)
        ideal = 2 * 1.96 * np.sqrt(least_squares(records, outcome, terms)[1])
        try:
            regression = estimates.regression(outcome, terms)
        except ValueError as error:
            refused.append(str(error).splitlines()[0])
            continue
        named = [f"{outcome}: {name}" for name in regression.names]
        found += row("regression", named, real, ideal, *regression.interval())
    for one, other in OTHERS[label]:
        real = np.corrcoef(table[one], table[other])[0, 1]
        ideal = 2 * 1.96 * (1 - real**2) / np.sqrt(num)
        try:
            correlation = estimates.correlation(one, other)
        except ValueError as error:
            refused.append(str(error).splitlines()[0])
            continue
        found += row("correlation", correlation.names, [real], [ideal], *correlation.interval())
    for name in schema.names:
        ideal = 2 * 1.96 * table[name].std() / np.sqrt(num)
        mean = estimates.mean(name)
        found += row("mean", [name], [table[name].mean()], [ideal], *mean.interval())
    result = {
        "estimate": found,
        "refused": refused,
        "seconds": {"fit": fitted - start, "estimate": time.process_time() - fitted},
    }
    if with_rubin:
        result["rubin"] = by_rubin(label, synthesizer, table, records)
    return result


def by_rubin(
    label: str, synthesizer: dpvi.Synthesizer, table: dict[str, Any], records: dict[str, Any]
) -> list[dict[str, Any]]:
    """Rubin's intervals of the same regressions."""
    sets, found = synthesizer.sample_many(NUM_TABLES), []
    for outcome, terms in REGRESSIONS[label]:
        real, _ = least_squares(table, outcome, terms)
        ideal = 2 * 1.96 * np.sqrt(least_squares(records, outcome, terms)[1])
        each = [least_squares(one, outcome, terms) for one in sets]
        combined = dpvi.synthetic.rubin(*(np.stack(part) for part in zip(*each, strict=True)))
        named = [f"{outcome}: {name}" for name in ("Intercept", *terms)]
        found += row("regression", named, real, ideal, *combined.interval())
    return found


def summary(sets: list[dict[str, Any]], method: str, kind: str) -> dict[str, Any] | None:
    """Shares of intervals that contain the real value, all and of the worst value."""
    rows = [one for each in sets for one in each.get(method, ()) if one["kind"] == kind]
    if not rows:
        return None
    names = sorted({one["name"] for one in rows})
    shares = {
        name: float(np.mean([one["covered"] for one in rows if one["name"] == name]))
        for name in names
    }
    worst = min(shares, key=lambda name: shares[name])
    return {
        "covered": float(np.mean([one["covered"] for one in rows])),
        "intervals": len(rows),
        "worst": {worst: shares[worst]},
        "width": float(np.median([one["width"] for one in rows])),
        "each": shares,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sets", type=int, default=20)
    parser.add_argument("--rubin", type=int, default=5)
    parser.add_argument("--bins", type=int, default=16)
    parser.add_argument("--tables", nargs="*", default=list(TABLES), choices=list(TABLES))
    parser.add_argument("--quick", action="store_true", default=bool(os.environ.get("QUICK")))
    default = pathlib.Path("docs/figures/synthetic_estimates.json")
    parser.add_argument("--output", type=pathlib.Path, default=default)
    options = parser.parse_args()
    sets, with_rubin = (2, 1) if options.quick else (options.sets, options.rubin)
    warnings.filterwarnings("ignore", "rubin")
    result: dict[str, Any] = {
        "machine": harness.machine(),
        "versions": harness.versions(numpy="numpy", tensorflow="tensorflow"),
        "commit": harness.commit(),
        "code": harness.code_hash(),
        "epsilon": EPSILON,
        "delta": DELTA,
        "bins": options.bins,
        "tables": {},
    }
    done: dict[str, list[dict[str, Any]]] = {label: [] for label in options.tables}
    for number in range(sets):
        for label in options.tables:
            done[label].append(one_set(label, 1000 + number, number < with_rubin, options.bins))
            both = [("estimate", kind) for kind in ("regression", "correlation", "mean")]
            both += [("rubin", "regression")]
            found = {f"{how}, {kind}": summary(done[label], how, kind) for how, kind in both}
            result["tables"][label] = {
                "sets": len(done[label]),
                "refused": sum(len(each["refused"]) for each in done[label]),
                **{name: value for name, value in found.items() if value is not None},
                "seconds": done[label][-1]["seconds"],
            }
            print(label, json.dumps(result["tables"][label]), flush=True)
            options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
