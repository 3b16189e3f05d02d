"""Twelve regressions that were drawn from a list, each one call, beside fits without privacy.

    python examples/drawn_regressions.py [--only NAME ...] [--lifelines FOLDER] [--output docs/figures/regressions]

`CANDIDATES` was written down, and twelve of it drawn with `SEED`, before any of them was fitted. All twelve stay in the
results, whatever they say. Data come with statsmodels, scikit-learn and lifelines, which need not be importable: `--lifelines` is
the folder of its package. Bounds of schemas are round numbers from what the columns mean; typical values are not declared.
Writes `drawn.json`, `drawn.txt` and `drawn.png`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import json
import pathlib
import platform
import subprocess
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
from regressions import (
    BINARY,
    HEALTH,
    SURVEY,
    affairs,
    diabetes,
    fitted,
    number,
    ordered,
    randhie,
    whole,
)
from scipy import optimize, special, stats

import tfp_dpvi as dpvi

SEED = 20261127
NUM = 12
EPSILON = 1.0
DELTA = 1e-6


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A regression of the list.

    Attributes:
      data: The name of one of `DATA`.
      formula: The formula.
      family: The family.
    """

    data: str
    formula: str
    family: str


CANDIDATES = {
    "log_visits": Candidate("randhie", "np.log1p(mdvis) ~ xage + female + logc + disea", "normal"),
    "hospital": Candidate("randhie", "inpatient ~ xage + female + logc + disea", "bernoulli"),
    "admissions": Candidate("randhie", "totadm ~ xage + female + disea", "poisson"),
    "mental_health": Candidate("randhie", "mhi ~ xage + female + income + disea", "normal"),
    "dollars": Candidate("spenders", "meddol ~ xage + female + logc + disea", "lognormal"),
    "visits_inflated": Candidate(
        "randhie", "mdvis ~ xage + female + logc + disea", "zero_inflated_negative_binomial"
    ),
    "religious": Candidate("fair", "religious ~ age + educ + rate_marriage", "ordinal"),
    "education": Candidate("fair", "educ ~ age + religious + children", "normal"),
    "years_married": Candidate("fair", "yrs_married ~ age + religious + educ", "normal"),
    "affairs": Candidate(
        "fair_pt", "naffairs ~ sex + nmarried + rate_marriage", "negative_binomial"
    ),
    "any_affair": Candidate("fair_pt", "any ~ sex + age + nmarried + rate_marriage", "bernoulli"),
    "vote": Candidate("anes96", "vote ~ PID + age + educ + income", "bernoulli"),
    "party": Candidate("anes96", "PID ~ age + educ + income + selfLR", "ordinal"),
    "left_right": Candidate("anes96", "selfLR ~ age + educ + income", "normal"),
    "schools": Candidate("star98", "p(NABOVE, pupils) ~ LOWINC + PERASIAN + PTRATIO", "binomial"),
    "diabetes_student": Candidate("diabetes", "target ~ bmi + bp + s5", "student"),
    "cancer_worst": Candidate(
        "cancer", "target ~ worst_radius + worst_texture + worst_smoothness", "bernoulli"
    ),
    "wine": Candidate("wine", "cultivar ~ alcohol + color_intensity + hue", "categorical"),
    "cd4": Candidate("actg175", "cd420 ~ cd40 + age + wtkg + treat", "normal"),
    "cd4_log": Candidate("actg175", "cd420 ~ cd40 + treat + symptom", "lognormal"),
    "aids": Candidate("actg175", "cens ~ treat + age + karnof + cd40", "bernoulli"),
    "nodes": Candidate("gbsg2", "pnodes ~ age + tsize + horTh", "negative_binomial"),
    "grade": Candidate("gbsg2", "tgrade ~ tsize + pnodes + age", "ordinal"),
    "tumour": Candidate("gbsg2", "tsize ~ age + pnodes", "gamma"),
    "kidney": Candidate("kidney", "death ~ age + male + black", "bernoulli"),
    "rearrest": Candidate("rossi", "censored(week, 53) ~ fin + age + prio", "weibull"),
    "arrest": Candidate("rossi", "arrest ~ fin + age + prio + mar", "bernoulli"),
    "senators": Candidate("senators", "censored(days, until) ~ decade + liberal", "weibull"),
    "senators_constant": Candidate(
        "senators", "censored(days, until) ~ decade + liberal", "exponential"
    ),
    "governments": Candidate("dd", "censored(duration, until) ~ democratic", "lognormal"),
    "flights": Candidate("modechoice", "air ~ hinc + psize", "bernoulli"),
}


def drawn() -> list[str]:
    """Returns the names of the twelve, in the order of the list."""
    chosen = np.random.default_rng(SEED).choice(len(CANDIDATES), NUM, replace=False)
    return [name for place, name in enumerate(CANDIDATES) if place in chosen]


# ---------------------------------------------------------------------- data and what is public of them


def lifelines_table(name: str, folder: pathlib.Path | None = None) -> pd.DataFrame:
    """Returns one of lifelines' data sets, from its package's folder."""
    if folder is None:
        found = importlib.util.find_spec("lifelines")
        if found is None or not found.submodule_search_locations:
            raise SystemExit("lifelines is not installed: pass --lifelines, its package's folder.")
        folder = pathlib.Path(found.submodule_search_locations[0])
    return pd.read_csv(folder / "datasets" / f"{name}.csv")


def anes96(_: pathlib.Path | None) -> pd.DataFrame:
    """944 voters of the American election of 1996."""
    from statsmodels.datasets import anes96 as dataset

    return dataset.load_pandas().data


def gbsg2(folder: pathlib.Path | None) -> pd.DataFrame:
    """686 patients with breast cancer."""
    return lifelines_table("gbsg2", folder)


def actg175(folder: pathlib.Path | None) -> pd.DataFrame:
    """2,139 patients of a trial against HIV: numbers of CD4 cells."""
    return lifelines_table("ACTG175", folder)


def rossi(folder: pathlib.Path | None) -> pd.DataFrame:
    """432 released prisoners, all followed for 52 weeks; an arrest in week w is at w."""
    data = lifelines_table("rossi", folder)
    return data.assign(week=data["week"].where(data["arrest"] == 1, 53))


def senators(folder: pathlib.Path | None) -> pd.DataFrame:
    """933 Canadian senators, all followed until the day that the table was made."""
    data = lifelines_table("canadian_senators", folder)
    start, end = (pd.to_datetime(data[name].str[:10]) for name in ("start_date", "end_date"))
    until = (end.max() - start).dt.days + 1.0
    party = data["Political Affiliation at Appointment"]
    return pd.DataFrame(
        {
            "days": (data["diff_days"] + 1.0).where(data["observed"], until),
            "until": until,
            "decade": (start.dt.year - 1867) / 10.0,
            "liberal": (party == "Liberal Party of Canada").astype(int),
        }
    )


def governments(folder: pathlib.Path | None) -> pd.DataFrame:
    """1,808 governments since 1946, followed until 2009.

    Of those whose end is not known for another reason the limit is the last year that is known.
    """
    data = lifelines_table("dd", folder)
    is_seen = data["observed"] == 1
    return pd.DataFrame(
        {
            "duration": data["duration"].astype(float),
            "until": (2009.5 - data["start_year"]).where(is_seen, data["duration"]),
            "democratic": (data["democracy"] == "Democracy").astype(int),
        }
    )


@dataclasses.dataclass(frozen=True)
class Table:
    """A data set.

    Attributes:
      load: Returns it, given the folder of lifelines.
      schema: Plain values of the schema.
    """

    load: Callable[[pathlib.Path | None], pd.DataFrame]
    schema: dict[str, dict[str, Any]]


# Of the data sets of the list, those that were drawn.
DATA = {
    "randhie": Table(lambda _: randhie(), {**HEALTH, "mhi": number(0, 100)}),
    "fair": Table(lambda _: affairs(), SURVEY),
    "anes96": Table(
        anes96,
        {
            "PID": whole(0, 6),
            "age": whole(18, 95),
            "educ": whole(1, 7),
            "income": whole(1, 24),
            "selfLR": whole(1, 7),
        },
    ),
    "diabetes": Table(
        lambda _: diabetes(),
        {
            "target": number(0, 400),
            "bmi": number(15, 45),
            "bp": number(60, 140),
            "s5": number(3, 7),
        },
    ),
    "actg175": Table(
        actg175,
        {"cd420": whole(1, 1500), "cd40": whole(0, 1500), "treat": BINARY, "symptom": BINARY},
    ),
    "gbsg2": Table(
        gbsg2,
        {
            "pnodes": whole(0, 60),
            "age": whole(18, 90),
            "tsize": whole(1, 150),
            "horTh": {"type": "categorical", "categories": ["no", "yes"]},
        },
    ),
    "rossi": Table(
        rossi, {"week": whole(1, 53), "fin": BINARY, "age": whole(16, 60), "prio": whole(0, 30)}
    ),
    "senators": Table(
        senators,
        {
            "days": number(1, 60000),
            "until": number(1, 60000),
            "decade": number(0, 15),
            "liberal": BINARY,
        },
    ),
    "dd": Table(
        governments,
        {"duration": number(0.5, 64), "until": number(0.5, 64), "democratic": BINARY},
    ),
}


# ---------------------------------------------------------------------- fits without privacy

# Log density and log survival by value, score and unbounded parameters of the family, and their
# number.
BY_SCIPY: dict[str, tuple[int, Callable[..., Any]]] = {
    "lognormal": (1, lambda e, p: stats.lognorm(np.exp(p[0]), 0, np.exp(e))),
    "exponential": (0, lambda e, p: stats.expon(0, np.exp(e))),
    "weibull": (
        1,
        lambda e, p: stats.weibull_min(
            np.exp(p[0]), 0, np.exp(e) / special.gamma(1.0 + np.exp(-p[0]))
        ),
    ),
    "student": (2, lambda e, p: stats.t(np.exp(p[1]), e, np.exp(p[0]))),
}


def maximum_likelihood(
    family: str, formula: str, data: pd.DataFrame
) -> tuple[pd.Series, pd.Series]:
    """Fits one of `BY_SCIPY`, on columns of deviation 1, and returns means and standard errors."""
    import formulae

    outcome, _, terms = (part.strip() for part in formula.partition("~"))
    limit = np.inf
    if outcome.startswith("censored("):
        outcome, given = (part.strip() for part in outcome[len("censored(") : -1].split(","))
        limit = np.asarray(data[given] if given in data else float(given))
    y = np.asarray(data[outcome], np.float64)
    design = formulae.design_matrices(terms, data).common
    matrix = np.asarray(design.design_matrix, np.float64)[:, 1:]
    names = [name for term in design.terms.values() for name in term.labels][1:]
    num, distribution = BY_SCIPY[family]
    unit = y.std() if family == "student" else 1.0
    base = y.mean() if family == "student" else 0.0
    scale = matrix.std(axis=0)
    x = np.column_stack([np.ones(len(y)), (matrix - matrix.mean(axis=0)) / scale])

    def loss(point: np.ndarray) -> float:
        at = distribution(x @ point[num:], point[:num])
        seen = at.logpdf((np.minimum(y, limit) - base) / unit)
        return -float(np.where(y < limit, seen, at.logsf((limit - base) / unit)).sum())

    start = np.zeros(num + x.shape[1])
    start[num] = 0.0 if family == "student" else np.log(np.minimum(y, limit).mean())
    best = optimize.minimize(loss, start, method="BFGS", options={"gtol": 1e-3}).x
    step = 1e-3 * np.eye(len(best))
    hessian = [
        [
            loss(best + a + b) - loss(best + a - b) - loss(best - a + b) + loss(best - a - b)
            for b in step
        ]
        for a in step
    ]
    errors = np.sqrt(np.diag(np.linalg.inv(np.array(hessian) / 4e-6)))
    pairs = [pd.Series(each[num + 1 :] * unit / scale, names) for each in (best, errors)]
    return pairs[0], pairs[1]


def reference(family: str) -> Callable[[str, pd.DataFrame], tuple[pd.Series, pd.Series]]:
    """Returns the function that fits a formula of a family without privacy."""
    if family in BY_SCIPY:
        return functools.partial(maximum_likelihood, family)
    if family == "ordinal":
        return ordered
    models = {"normal": "ols", "negative_binomial": "negativebinomial", "poisson": "poisson"}
    return fitted(models.get(family, "logit"))


# ---------------------------------------------------------------------- fits


def run(name: str, folder: pathlib.Path | None) -> tuple[dict[str, Any], Any]:
    """Fits a drawn regression with and without privacy; what is refused is a result, too."""
    case = CANDIDATES[name]
    table = DATA[case.data]
    data = table.load(folder)
    figures: dict[str, Any] = {**dataclasses.asdict(case), "records": len(data)}
    means, errors = reference(case.family)(case.formula, data)
    started = time.perf_counter()
    try:
        result = dpvi.regression(
            case.formula, data, case.family, table.schema, epsilon=EPSILON, delta=DELTA
        )
    except ValueError as error:
        print(f"\n{name}: refused: {error}")
        return {**figures, "refused": str(error)}, None
    figures["seconds"] = round(time.perf_counter() - started, 1)
    print(f"\n{name}: {figures['seconds']} s\n{result}", flush=True)
    summary = result.summary()
    names = [each for each in summary.index if each in means.index and each != "Intercept"]
    columns = {}
    for each in names:
        low, high = np.quantile(result.draws[each], [0.03, 0.97])
        columns[each] = {
            "mean": float(summary.loc[each, "mean"]),
            "sd": float(summary.loc[each, "sd"]),
            "low": float(low),
            "high": float(high),
            "noise": float(summary.loc[each, "noise"]),
            "non_private_mean": float(means[each]),
            "non_private_sd": float(errors[each]),
        }
    away = [abs(each["mean"] - each["non_private_mean"]) for each in columns.values()]
    own = [each["sd"] for each in columns.values()]
    usual = [each["non_private_sd"] for each in columns.values()]
    return {
        **figures,
        "warnings": result.warnings,
        "most_away_in_own_sds": float(np.max(np.array(away) / own)),
        "most_away_in_non_private_sds": float(np.max(np.array(away) / usual)),
        "width": float(np.median(np.array(own) / usual)),
        "coefficients": columns,
    }, result


def draw(results: dict[str, dict[str, Any]], path: pathlib.Path) -> None:
    """Draws 94 % intervals with and without privacy, in non-private standard errors."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, grid = plt.subplots(4, 3, figsize=(13, 11), layout="constrained")
    for axes, (name, each) in zip(grid.flat, results.items(), strict=False):
        columns = each.get("coefficients", {})
        for place, row in enumerate(reversed(columns.values())):
            unit = row["non_private_sd"]
            ends = np.array([row["low"], row["high"]]) / unit
            axes.plot(ends, [place + 0.14] * 2, color="C0", lw=2.0)
            axes.plot(row["mean"] / unit, place + 0.14, "o", color="C0")
            centre = row["non_private_mean"] / unit
            axes.plot([centre - 1.88, centre + 1.88], [place - 0.14] * 2, color="0.4", lw=2.0)
            axes.plot(centre, place - 0.14, "s", color="0.4")
        axes.axvline(0.0, color="0.8", lw=0.8, zorder=0)
        axes.set_yticks(range(len(columns)), list(reversed(columns)))
        axes.set_ylim(-0.6, max(len(columns), 1) - 0.4)
        state = "refused" if "refused" in each else "warned" if each["warnings"] else ""
        title = f"{name}: {each['family']}, {each['records']:,} records"
        axes.set_title(title + (f" ({state})" if state else ""), fontsize=9)
    figure.suptitle(
        "94 % intervals of coefficients in non-private standard errors: private (dots, epsilon 1) "
        "and non-private (squares)",
        fontsize=10,
    )
    figure.savefig(path, dpi=100)
    plt.close(figure)


def as_table(results: dict[str, dict[str, Any]]) -> str:
    """Returns the results as a table in Markdown."""
    lines = [
        "| regression | family | records | farthest, in its own sd | in non-private se | width | warned |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, each in results.items():
        start = f"| `{name}`: `{each['formula']}` | `{each['family']}` | {each['records']:,} | "
        if "refused" in each:
            lines.append(start + "refused | | | |")
            continue
        lines.append(
            f"{start}{each['most_away_in_own_sds']:.1f} | "
            f"{each['most_away_in_non_private_sds']:.1f} | {each['width']:.1f} | "
            f"{'yes' if each['warnings'] else 'no'} |"
        )
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=drawn(), default=drawn())
    parser.add_argument("--lifelines", type=pathlib.Path)
    parser.add_argument("--output", type=pathlib.Path, default="docs/figures/regressions")
    chosen = parser.parse_args(arguments)
    chosen.output.mkdir(parents=True, exist_ok=True)
    results = {name: run(name, chosen.lifelines)[0] for name in chosen.only}
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    described = {
        "epsilon": EPSILON,
        "delta": DELTA,
        "seed": SEED,
        "list": list(CANDIDATES),
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
        "version": dpvi.__version__,
        "commit": commit.stdout.strip(),
        "cases": results,
    }
    (chosen.output / "drawn.json").write_text(json.dumps(described, indent=1) + "\n")
    (chosen.output / "drawn.txt").write_text(as_table(results))
    draw(results, chosen.output / "drawn.png")
    return described


if __name__ == "__main__":
    main()
