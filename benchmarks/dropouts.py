"""Censored times of records some of which drop out: the limit of those whose event is seen is not known.

    python benchmarks/dropouts.py [--num 24] [--quick] [--out FOLDER]

`censored(time, until)` takes the limit of every record. Who drops out has one, that day; for the
others the end of the study is all that is known. Twins of these are then followed for longer than
the records were, which no theory covers where scores are cut. The truth is known here, so coverage
says what comes of it. A cell each: nobody drops out, a fifth of the records, and two fifths.
It goes on where it stopped; the last line is a summary as JSON.
"""

import argparse
import json
import pathlib

import harness
import numpy as np

import tfp_dpvi as dpvi

EPSILON = 1.0
DELTA = 1e-5
LEVEL = 0.9
NUM_RECORDS = 5000
QUICK = 12
SHAPE = 1.5
TRUTH = {"Intercept": 7.0, "age": -0.02, "treated": 0.4, "alpha": SHAPE}
# Mean days until a record drops out.
DROPOUT = {"none": np.inf, "some": 3000.0, "many": 1000.0}
SCHEMA = {
    "days": {"type": "continuous", "lower": 0.01, "upper": 20000.0, "typical": [500.0, 400.0]},
    "until": {"type": "continuous", "lower": 0.01, "upper": 2000.0, "typical": [900.0, 400.0]},
    "age": {"type": "integer", "lower": 18, "upper": 90},
    "treated": {"type": "binary"},
}


def simulated(mean, seed):
    """Returns records of a Weibull regression, and the shares that drop out and have an event."""
    rng = np.random.default_rng([seed, 17])
    age = np.round(np.clip(rng.normal(52.0, 14.0, NUM_RECORDS), 18.0, 90.0))
    treated = rng.integers(0, 2, NUM_RECORDS)
    expected = np.exp(TRUTH["Intercept"] + TRUTH["age"] * age + TRUTH["treated"] * treated)
    # The mean of a Weibull distribution with scale 1.
    unit = 0.9027452929509336
    days = np.maximum(expected / unit * rng.weibull(SHAPE, NUM_RECORDS), 0.01)
    end = rng.uniform(300.0, 1500.0, NUM_RECORDS)
    dropped = np.maximum(rng.exponential(1.0, NUM_RECORDS) * min(mean, 1e12), 0.01)
    is_seen = days < np.minimum(end, dropped)
    # What is known: the end of the study if the event was seen.
    until = np.where(is_seen, end, np.minimum(end, dropped))
    data = {"days": days, "until": until, "age": age, "treated": treated}
    return data, float(np.mean(~is_seen & (dropped < end))), float(np.mean(is_seen))


def fit(name, seed):
    """Returns what one private fit says of the truth."""
    data, dropped, seen = simulated(DROPOUT[name], seed)
    data["days"] = np.minimum(data["days"], 20000.0)
    result = dpvi.regression(
        "censored(days, until) ~ age + treated",
        data,
        "weibull",
        SCHEMA,
        epsilon=EPSILON,
        delta=DELTA,
        seed=seed,
    )
    tail = (1.0 - LEVEL) / 2.0
    row = {"dropped": dropped, "seen": seen, "warnings": result.warnings}
    for label, value in TRUTH.items():
        draws = result.draws[label]
        low, high = np.quantile(draws, [tail, 1.0 - tail])
        row[label] = [float(low), float(high), float((draws.mean() - value) / draws.std())]
    return row


def figures(name, rows):
    """Returns a cell's coverage and bias, in posterior standard deviations."""
    inside = {
        label: float(np.mean([row[label][0] <= value <= row[label][1] for row in rows]))
        for label, value in TRUTH.items()
    }
    return {
        "cell": name,
        "sets": len(rows),
        "dropped": round(float(np.mean([row["dropped"] for row in rows])), 3),
        "seen": round(float(np.mean([row["seen"] for row in rows])), 3),
        "coverage": round(float(np.mean(list(inside.values()))), 4),
        "by_name": inside,
        "bias": {
            label: round(float(np.mean([row[label][2] for row in rows])), 2) for label in TRUTH
        },
        "warned": float(np.mean([bool(row["warnings"]) for row in rows])),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num", type=int, default=24)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} data sets of each cell")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("docs/figures/families"))
    arguments = parser.parse_args()
    num = QUICK if arguments.quick else arguments.num
    folder = arguments.out / "fits"
    folder.mkdir(parents=True, exist_ok=True)
    cells = []
    for name in DROPOUT:
        path = folder / f"dropouts-{name}.json"
        rows = json.loads(path.read_text()) if path.exists() else []
        while len(rows) < num:
            rows.append(fit(name, len(rows)))
            path.write_text(json.dumps(rows) + "\n")
        cells.append(figures(name, rows[:num]))
        print(json.dumps(cells[-1]), flush=True)
        about = {"machine": harness.machine(), "commit": harness.commit()}
        result = {"cells": cells, "epsilon": EPSILON, "delta": DELTA, "level": LEVEL, **about}
        (arguments.out / "dropouts.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({cell["cell"]: cell["coverage"] for cell in cells}))


if __name__ == "__main__":
    main()
