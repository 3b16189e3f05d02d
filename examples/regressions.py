"""Eight regressions on data of public packages, each one call, beside the fits without privacy.

    python examples/regressions.py [--only NAME ...] [--epsilon 1] [--output docs/figures/regressions]

The data are public; their schemas are written as if they were not, with round bounds from what the columns mean.
Writes a picture of each, and `regressions.json` with all figures.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.resources
import json
import pathlib
import platform
import subprocess
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd

import tfp_dpvi as dpvi


@dataclasses.dataclass(frozen=True)
class Case:
    """A regression of `dpvi.regression`, and the same without privacy.

    Attributes:
      load: Returns the data.
      formula: The formula.
      family: The family.
      schema: Plain values of the schema.
      reference: Returns means and standard errors of a non-private fit of the data.
    """

    load: Callable[[], pd.DataFrame]
    formula: str
    family: str
    schema: dict[str, dict[str, Any]]
    reference: Callable[[str, pd.DataFrame], tuple[pd.Series, pd.Series]]


def statsmodels_table(name: str) -> pd.DataFrame:
    """Returns one of statsmodels' data sets."""
    folder = importlib.resources.files("statsmodels") / "datasets" / name
    path = folder / f"src/{name}.csv" if name == "randhie" else folder / f"{name}.csv"
    with path.open() as file:
        return pd.read_csv(file)


def fitted(model: str) -> Callable[[str, pd.DataFrame], tuple[pd.Series, pd.Series]]:
    """Returns the function that fits a formula with statsmodels' model of this name."""

    def fit(formula: str, data: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
        import statsmodels.formula.api as smf

        arguments = {} if model == "ols" else {"disp": 0, "maxiter": 200}
        result = getattr(smf, model)(formula, data).fit(**arguments)
        # statsmodels names levels [T.x].
        names = [name.replace("[T.", "[") for name in result.params.index]
        return pd.Series(np.array(result.params), names), pd.Series(np.array(result.bse), names)

    return fit


def ordered(formula: str, data: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
    """Fits a proportional odds model."""
    from statsmodels.miscmodels.ordinal_model import OrderedModel

    result = OrderedModel.from_formula(formula, data, distr="logit").fit(method="bfgs", disp=0)
    names = [name.replace("[T.", "[") for name in result.params.index]
    return pd.Series(np.array(result.params), names), pd.Series(np.array(result.bse), names)


def number(lower: float, upper: float, *typical: float, kind: str = "continuous") -> dict[str, Any]:
    """Returns the description of a number."""
    described = {"type": kind, "lower": lower, "upper": upper}
    return {**described, "typical": list(typical)} if typical else described


def whole(lower: int, upper: int, *typical: float) -> dict[str, Any]:
    """Returns the description of a whole number."""
    return number(lower, upper, *typical, kind="integer")


BINARY = {"type": "binary"}


def randhie() -> pd.DataFrame:
    """RAND Health Insurance Experiment: 20,190 person-years."""
    return statsmodels_table("randhie")


def affairs() -> pd.DataFrame:
    """Fair's survey of 6,366 women."""
    data = statsmodels_table("fair")
    return data.assign(affair=(data["affairs"] > 0).astype(int))


def diabetes() -> pd.DataFrame:
    """442 diabetes patients, scikit-learn's, in the original units."""
    from sklearn.datasets import load_diabetes

    data = load_diabetes(as_frame=True, scaled=False).frame
    return data.assign(sex=data["sex"].astype(int) - 1)


def cancer() -> pd.DataFrame:
    """569 breast cancer patients, scikit-learn's."""
    from sklearn.datasets import load_breast_cancer

    data = load_breast_cancer(as_frame=True).frame
    data.columns = [name.replace(" ", "_") for name in data.columns]
    return data


HEALTH = {
    "mdvis": whole(0, 100, 3, 4),
    "xage": number(0, 65),
    "female": BINARY,
    "child": BINARY,
    "logc": number(0, 5),
    "disea": number(0, 60, 11, 7),
    "physlm": number(0, 1),
    "hlthp": BINARY,
    "income": number(0, 30000, 9000, 6000),
}
SURVEY = {
    "affair": {"type": "binary", "share": 0.25},
    "rate_marriage": whole(1, 5),
    "age": number(17, 45),
    "yrs_married": number(0, 25),
    "children": number(0, 6),
    "religious": whole(1, 4),
    "educ": number(9, 20),
}

CASES = {
    "visits": Case(
        randhie,
        "mdvis ~ xage + female + logc + disea + hlthp",
        "negative_binomial",
        HEALTH,
        fitted("negativebinomial"),
    ),
    "visits_poisson": Case(
        randhie, "mdvis ~ xage * female + logc + disea", "poisson", HEALTH, fitted("poisson")
    ),
    "poor_health": Case(
        randhie, "hlthp ~ xage + female + income + disea", "bernoulli", HEALTH, fitted("logit")
    ),
    "income": Case(
        randhie, "income ~ xage + female + child + disea", "normal", HEALTH, fitted("ols")
    ),
    "affair": Case(
        affairs,
        "affair ~ rate_marriage + age + yrs_married + religious",
        "bernoulli",
        SURVEY,
        fitted("logit"),
    ),
    "rating": Case(
        affairs,
        "rate_marriage ~ age + yrs_married + children + religious + educ",
        "ordinal",
        SURVEY,
        ordered,
    ),
    "diabetes": Case(
        diabetes,
        "target ~ age + sex + bmi + bp",
        "normal",
        {
            "target": number(0, 400),
            "age": whole(18, 80),
            "sex": BINARY,
            "bmi": number(15, 45, 26, 5),
            "bp": number(60, 140, 93, 13),
        },
        fitted("ols"),
    ),
    "cancer": Case(
        cancer,
        "target ~ mean_radius + mean_texture + mean_smoothness",
        "bernoulli",
        {
            "target": BINARY,
            "mean_radius": number(5, 30, 14, 4),
            "mean_texture": number(5, 45, 19, 5),
            "mean_smoothness": number(0.04, 0.2, 0.1, 0.015),
        },
        fitted("logit"),
    ),
}


def run(name: str, case: Case, epsilon: float, folder: pathlib.Path) -> dict[str, Any]:
    """Fits a case with and without privacy, draws it, and returns its figures."""
    data = case.load()
    started = time.perf_counter()
    result = dpvi.regression(
        case.formula, data, case.family, case.schema, epsilon=epsilon, delta=1e-6
    )
    seconds = time.perf_counter() - started
    means, errors = case.reference(case.formula, data)
    print(f"\n{name}: {seconds:.1f} s\n{result}")
    table = result.summary()
    names = [each for each in table.index if each in means.index and each != "Intercept"]
    draw(result, names, means, errors, folder / f"{name}.png")
    return {
        "formula": case.formula,
        "family": case.family,
        "records": len(data),
        "seconds": round(seconds, 1),
        "warnings": result.warnings,
        "coefficients": {
            each: {
                "mean": float(table.loc[each, "mean"]),
                "sd": float(table.loc[each, "sd"]),
                "non_private_mean": float(means[each]),
                "non_private_sd": float(errors[each]),
            }
            for each in table.index
            if each in means.index
        },
    }


def draw(result: Any, names: list[str], means: Any, errors: Any, path: pathlib.Path) -> None:
    """Draws 94 % intervals with and without privacy, in non-private standard errors."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    height = 1.2 + 0.45 * len(names)
    figure, axes = plt.subplots(figsize=(6.5, height), layout="constrained")
    for place, name in enumerate(reversed(names)):
        unit = errors[name]
        low, middle, high = np.quantile(result.draws[name], [0.03, 0.5, 0.97]) / unit
        axes.plot([low, high], [place + 0.12] * 2, color="C0", lw=2.0)
        axes.plot(middle, place + 0.12, "o", color="C0", label="private" if not place else None)
        centre = means[name] / unit
        axes.plot([centre - 1.88, centre + 1.88], [place - 0.12] * 2, color="0.4", lw=2.0)
        label = "non-private" if not place else None
        axes.plot(centre, place - 0.12, "s", color="0.4", label=label)
    axes.axvline(0.0, color="0.8", lw=0.8, zorder=0)
    axes.set_yticks(range(len(names)), list(reversed(names)))
    axes.set_xlabel("coefficient in non-private standard errors, 94 % intervals")
    warned = ", which warns" if result.warnings else ""
    axes.set_title(f"{result.design.formula}\n{result.parts.family}{warned}", fontsize=9)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--epsilon", type=float, default=1.0)
    parser.add_argument("--output", type=pathlib.Path, default="docs/figures/regressions")
    chosen = parser.parse_args(arguments)
    chosen.output.mkdir(parents=True, exist_ok=True)
    results = {name: run(name, CASES[name], chosen.epsilon, chosen.output) for name in chosen.only}
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    described = {
        "epsilon": chosen.epsilon,
        "delta": 1e-6,
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
        "version": dpvi.__version__,
        "commit": commit.stdout.strip(),
        "cases": results,
    }
    (chosen.output / "regressions.json").write_text(json.dumps(described, indent=1) + "\n")
    return described


if __name__ == "__main__":
    main()
