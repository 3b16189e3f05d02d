"""Who saw a doctor? A private regression of real patients by a formula, beside the same without privacy.

The RAND Health Insurance Experiment (1974 to 1982; in statsmodels' wheel, no network) gave families insurance at random, with a
share of the bills, "coinsurance", from 0 to 95 %. A record here is a person in the first year: 5,912 people.

    python examples/quickstart.py [--epsilon 1] [--delta 1e-5] [--output outputs/quickstart]

Prints the result, its comparison with maximum likelihood, and the privacy report; saves a picture of both intervals and all
figures as JSON. The schema says what a code book says, and nothing of the records.
"""

from __future__ import annotations

import argparse
import importlib.resources
import json
import pathlib
import platform
import subprocess
import time
from typing import Any

import numpy as np

import tfp_dpvi as dpvi  # isort: skip  (first, so that TensorFlow loads quietly)
import pandas as pd

FORMULA = "visited ~ age + female + log_share + diseases + health"
SCHEMA = {
    "visited": {"type": "binary"},
    "age": {"type": "continuous", "lower": 0, "upper": 65, "unit": "years"},
    "female": {"type": "binary"},
    # The logarithm of one and the percentage of a bill that the family pays itself.
    "log_share": {"type": "continuous", "lower": 0, "upper": 4.6},
    "diseases": {"type": "continuous", "lower": 0, "upper": 60},
    "health": {"type": "categorical", "categories": ["excellent", "good", "fair or poor"]},
}
# The picture's odds ratios are for these changes.
CHANGES = {
    "age": ("10 years older", 10.0),
    "female": ("female", 1.0),
    "log_share": ("pays 25 % of bills, not 0 %", float(np.log(26.0))),
    "diseases": ("10 more on the scale of chronic diseases", 10.0),
    "health[good]": ("good health, not excellent", 1.0),
    "health[fair or poor]": ("fair or poor health", 1.0),
}
LEVEL = 0.94
_WIDTH = 1.88  # Standard errors of a normal interval of that level.


def load() -> pd.DataFrame:
    """Returns a row for each person: the first year in the experiment."""
    folder = importlib.resources.files("statsmodels") / "datasets/randhie/src"
    with (folder / "randhie.csv").open() as file:
        people = pd.read_csv(file).drop_duplicates("zper")
    unwell = (people["hlthf"] + people["hlthp"]) > 0
    health = np.select([unwell, people["hlthg"] > 0], ["fair or poor", "good"], "excellent")
    return pd.DataFrame(
        {
            "visited": (people["mdvis"] > 0).astype(int),
            "age": people["xage"],
            "female": people["female"],
            "log_share": people["logc"],
            "diseases": people["disea"],
            "health": pd.Categorical(health, SCHEMA["health"]["categories"]),
        }
    )


def fit_non_private(people: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
    """Returns means and standard errors of maximum likelihood."""
    import statsmodels.formula.api as smf

    result = smf.logit(FORMULA, people).fit(disp=0)
    names = [name.replace("[T.", "[") for name in result.params.index]
    return pd.Series(np.array(result.params), names), pd.Series(np.array(result.bse), names)


def compare(result: dpvi.Regression, people: pd.DataFrame) -> pd.DataFrame:
    """Returns means and interval ends of the coefficients with and without privacy."""
    table = result.summary(level=LEVEL)
    means, errors = fit_non_private(people)
    columns = {
        "mean": table["mean"],
        "low": table.iloc[:, 2],
        "high": table.iloc[:, 3],
        "non_private_mean": means,
        "non_private_low": means - _WIDTH * errors,
        "non_private_high": means + _WIDTH * errors,
    }
    return pd.DataFrame(columns).loc[table.index]


def draw(table: pd.DataFrame, title: str, path: pathlib.Path) -> None:
    """Draws odds ratios for the changes of `CHANGES`."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    names = list(reversed(CHANGES))
    factors = np.array([CHANGES[name][1] for name in names])
    for start, place, color, label in (
        ("", 0.14, "C0", "private"),
        ("non_private_", -0.14, "C1", "non-private"),
    ):
        columns = [f"{start}{end}" for end in ("low", "mean", "high")]
        low, mean, high = np.exp(table.loc[names, columns].to_numpy().T * factors)
        errors = [mean - low, high - mean]
        places = np.arange(len(names)) + place
        axes.errorbar(mean, places, xerr=errors, fmt="o", ms=4, lw=1.8, color=color, label=label)
    axes.axvline(1.0, color="0.7", lw=1, zorder=0)
    axes.set_xscale("log")
    ticks = [0.5, 0.7, 1.0, 1.4, 2.0]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_yticks(range(len(names)), [CHANGES[name][0] for name in names])
    axes.set_xlabel("odds ratio of seeing a doctor in the year: mean and 94 % interval")
    axes.set_title(title)
    axes.legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epsilon", type=float, default=1.0)
    parser.add_argument("--delta", type=float, default=1e-5)
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("outputs/quickstart"))
    options = parser.parse_args(arguments)
    begin = time.perf_counter()

    people = load()
    result = dpvi.regression(
        FORMULA,
        people,
        "bernoulli",
        SCHEMA,
        epsilon=options.epsilon,
        delta=options.delta,
    )
    print(f"{result}\n")
    table = compare(result, people)
    inside = int(
        (
            (table["low"] < table["non_private_mean"]) & (table["non_private_mean"] < table["high"])
        ).sum()
    )
    print(f"{'coefficient':20s} {'private':>8s}   94 % interval      non-private   94 % interval")
    for name, row in table.iterrows():
        print(
            f"{name:20s} {row['mean']:8.3f} [{row['low']:7.3f}, {row['high']:7.3f}]   "
            f"{row['non_private_mean']:11.3f} [{row['non_private_low']:7.3f}, {row['non_private_high']:7.3f}]"
        )
    report = result.model.privacy_report()
    print(f"\n{report}\n")

    options.output.mkdir(parents=True, exist_ok=True)
    title = f"{len(people):,} people, epsilon {options.epsilon:g}, delta {options.delta:g}"
    draw(table, title, options.output / "quickstart.png")
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    seconds = time.perf_counter() - begin
    described = {
        "formula": FORMULA,
        "measured": list(result.parts.measured),
        "share": result.parts.share,
        "records": len(people),
        "epsilon": report.epsilon,
        "delta": report.delta,
        "inside": inside,
        "coefficients": table.to_dict("index"),
        "warnings": result.warnings,
        "seconds": seconds,
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
        "version": dpvi.__version__,
        "commit": commit.stdout.strip(),
        "privacy_report": report.to_json(),
    }
    (options.output / "quickstart.json").write_text(json.dumps(described, indent=1) + "\n")
    print(f"Picture and figures: {options.output}/quickstart.png, {options.output}/quickstart.json")
    print(
        f"quickstart: {len(people)} people epsilon {report.epsilon:.4f} delta {report.delta:g} "
        f"inside {inside} of {len(table)} seconds {seconds:.1f}"
    )
    return described


if __name__ == "__main__":
    main()
